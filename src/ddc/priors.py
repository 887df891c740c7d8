"""The prior: a frozen noise predictor and the schedule it was trained with."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.networks import load_network, read_config, run_unet, save_network
from ddc.schedule import Schedule, Time

DEFAULT_MODEL = Path(__file__).parent / "models" / "default"  # what is shipped with the package
SCHEDULER = "scheduler_config.json"
PredictionType = Literal["epsilon", "v_prediction", "sample"]


@dataclass(frozen=True)
class Prediction:
    """What the prior says about x_t."""

    x0: Tensor
    noise: Tensor
    v: Tensor | None = None  # the learned variance's interpolation in [0, 1], where the prior has one


class Denoiser(Protocol):
    """What a solver needs of a prior. The tests' Gaussian prior is one too."""

    schedule: Schedule

    def predict(self, x: Tensor, t: Time) -> Prediction: ...


class Prior(nn.Module):
    """A U-Net that predicts ε, v or x0, shown to solvers as x̂0 and ε̂."""

    def __init__(
        self,
        unet: nn.Module,
        schedule: Schedule,
        prediction_type: PredictionType = "epsilon",
        clamp: float | None = None,
        scheduler_config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if prediction_type not in get_args(PredictionType):
            raise UserError(
                f"the prediction type {prediction_type!r} is not known; expected epsilon, v_prediction or sample"
            )
        self.unet = unet
        self.schedule = schedule
        self.prediction_type = prediction_type
        self.clamp = clamp
        self.scheduler_config = scheduler_config or {}
        self.channels = int(unet.config["in_channels"])  # type: ignore[index]
        self.learns_variance = int(unet.config["out_channels"]) == 2 * self.channels  # type: ignore[index]

    def predict(self, x: Tensor, t: Time) -> Prediction:
        """x̂0 = (x_t − √(1−ᾱ_t) ε̂)/√ᾱ_t, ε̂, and the learned variance where there is one.

        x̂0 is clamped to ±clamp where the prior's configuration says so; ε̂ is left as predicted.
        """
        raw = run_unet(self.unet, x, t).to(x.dtype)
        v = None
        if self.learns_variance:
            raw, v_raw = raw.chunk(2, dim=1)
            v = ((v_raw + 1) / 2).clamp(0, 1)
        signal, level = self.schedule.signal(t, x), self.schedule.level(t, x)
        if self.prediction_type == "epsilon":
            noise, x0 = raw, (x - level * raw) / signal
        elif self.prediction_type == "v_prediction":
            x0, noise = signal * x - level * raw, level * x + signal * raw
        else:
            x0, noise = raw, (x - signal * raw) / level
        if self.clamp is not None:
            x0 = x0.clamp(-self.clamp, self.clamp)
        return Prediction(x0, noise, v)

    @staticmethod
    def from_pretrained(folder: str | Path) -> "Prior":
        """Read a prior: a diffusers pipeline folder (unet/ and scheduler/), or one flat folder."""
        folder = Path(folder)
        unet_folder = folder / "unet" if (folder / "unet").is_dir() else folder
        config = read_config(unet_folder)
        if "inputs" in config:  # what a data-consistency network reads
            raise UserError(f"{folder} is a data-consistency network, not a prior; name it with --network")
        if "task" in config:  # what a bridge was trained for
            raise UserError(
                f"{folder} is a bridge network (for i2sb and cddb) and not a prior; put it beside a prior, as "
                f"i2sb-{config['task']}"
            )
        unet = load_network(unet_folder)
        places = [place for place in (folder / "scheduler", folder) if (place / SCHEDULER).is_file()]
        scheduler = read_config(places[0], SCHEDULER) if places else {}
        kind = scheduler.get("prediction_type", "epsilon")
        clamp = scheduler.get("clip_sample_range", 1.0) if scheduler.get("clip_sample") else None
        prior = Prior(unet, schedule_from_config(scheduler), kind, clamp, scheduler)
        outputs = int(unet.config["out_channels"])  # type: ignore[index]
        if prior.channels != 3 or outputs not in (3, 6):
            raise UserError(
                f"{folder} is not an RGB prior: it has {prior.channels} input and {outputs} output channels; "
                "expected 3 in and 3 (or 6, with learned variance) out"
            )
        return prior.eval()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write unet/ and scheduler/ so that diffusers and `from_pretrained` can read them."""
        save_network(self.unet, Path(folder, "unet"), **options)
        place = Path(folder, "scheduler")
        place.mkdir(exist_ok=True)
        (place / SCHEDULER).write_text(json.dumps(self.scheduler_config, indent=2) + "\n")


def prior_folder(model: Path) -> Path | None:
    """Where a model's prior lies: in prior/, in the folder itself, or, for a network alone, in the default model."""
    places = [model / "prior" if (model / "prior").is_dir() else model]
    if not (model / "prior").is_dir() and any((model / name).is_dir() for name in ("network", "posterior")):
        places.append(DEFAULT_MODEL / "prior")
    return next((p for p in places if (p / "config.json").exists() or (p / "unet").exists()), None)


def scheduler_config(
    train_steps: int = 1000,
    beta_schedule: str = "linear",
    prediction_type: PredictionType = "epsilon",
    clamp: float | None = None,
    learned_variance: bool = False,
) -> dict[str, Any]:
    """The settings of diffusers' DDPMScheduler that a prior is saved with."""
    return {
        "_class_name": "DDPMScheduler",
        "num_train_timesteps": train_steps,
        "beta_schedule": beta_schedule,
        "beta_start": 1e-4,
        "beta_end": 0.02,
        "prediction_type": prediction_type,
        "variance_type": "learned_range" if learned_variance else "fixed_small",
        "clip_sample": clamp is not None,
        "clip_sample_range": clamp if clamp is not None else 1.0,
    }


def schedule_from_config(config: dict[str, Any]) -> Schedule:
    """A schedule from diffusers' scheduler settings; the DDPM one where nothing is said."""
    steps = int(config.get("num_train_timesteps", 1000))
    if config.get("trained_betas") is not None:
        return Schedule.from_betas(torch.tensor(config["trained_betas"], dtype=torch.float64))
    kind = config.get("beta_schedule", "linear")
    start, end = float(config.get("beta_start", 1e-4)), float(config.get("beta_end", 0.02))
    if kind == "linear":
        return Schedule.linear(steps, start, end)
    if kind == "scaled_linear":
        return Schedule.scaled_linear(steps, start, end)
    if kind == "squaredcos_cap_v2":
        return Schedule.cosine(steps)
    raise UserError(f"the beta schedule {kind!r} is not known; expected linear, scaled_linear or squaredcos_cap_v2")
