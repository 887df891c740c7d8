"""The trained parts of a model: the prior with its noise schedule, and the networks that are told the measurement.

The schedule's table is float64; results are cast to the dtype of the images. Index −1 is the clean image, ᾱ = 1: a step
to it adds no noise. `t` and `s` are integers, or a tensor of shape (B,) with one integer per image.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.networks import PRESETS, build_network, load_network, read_config, run_unet, save_network

Spacing = Literal["leading", "even"]
Time = int | Tensor
SCHEDULER = "scheduler_config.json"
LONGEST = 100_000  # steps of a schedule
# diffusers' schedulers of models that were trained as DDPMs; the others have another noise or another target
DDPM_LIKE = [
    *("DDPM", "DDIM", "DDIMInverse", "DDPMParallel", "DDIMParallel", "PNDM", "IPNDM", "UniPCMultistep", "LMSDiscrete"),
    *("DPMSolverMultistep", "DPMSolverSinglestep", "DPMSolverSDE", "SASolver", "DEISMultistep", "UnCLIP", "RePaint"),
    *("EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "KDPM2Discrete", "KDPM2AncestralDiscrete"),
]
# and of models with another noise, see `ddc.flows`
FLOW = ["FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete"]
EDM = ["EDMEuler", "EDMDPMSolverMultistep"]
PredictionType = Literal["epsilon", "v_prediction", "sample", "flow", "edm_epsilon", "edm_v_prediction"]
Input = Literal["y", "estimate", "wiener", "mask", "sigma", "projection"]
Residual = Literal["x0", "blend"]
TRAIN_STEPS = 1000
# An operator, y and its noise σ in [-1, 1] units. In training the operator stands for one operator for each picture.
Measured = tuple[Any, Any, Any]
CHANNELS: dict[Input, int] = {"y": 3, "estimate": 3, "wiener": 3, "mask": 1, "sigma": 1, "projection": 3}


@dataclass(frozen=True)
class Schedule:
    """A variance-preserving noise schedule."""

    alpha_bars: Tensor  # (N + 1,) float64; the last entry is 1, so that index −1 means "clean"

    @staticmethod
    def from_betas(betas: Tensor) -> "Schedule":
        alpha_bars = torch.cumprod(1.0 - betas.double().cpu(), dim=0)
        return Schedule(torch.cat([alpha_bars, torch.ones(1, dtype=torch.float64)]))

    @staticmethod
    def linear() -> "Schedule":
        """DDPM's own."""
        return schedule_from_config({})

    @property
    def train_steps(self) -> int:
        return len(self.alpha_bars) - 1

    def pairs(self, steps: int, spacing: Spacing = "leading") -> list[tuple[int, int]]:
        """The (t, s) of a run: 800→600, …, 200→0, 0→clean for five steps of a 1000-step schedule.

        "leading" is t = i·N/steps, as in the paper; "even" includes both ends, as in Nichol and Dhariwal
        (999, 749, 500, 250, 0).
        """
        n = self.train_steps
        if not 1 <= steps <= n:
            raise UserError(f"steps must be between 1 and {n} (the schedule's length), not {steps}")
        if steps == 1:  # a single step starts from pure noise, not at t = 0
            times = [n - 1]
        elif spacing == "leading":
            times = [i * n // steps for i in reversed(range(steps))]
        else:
            times = [round(i * (n - 1) / (steps - 1)) for i in reversed(range(steps))]
        return list(zip(times, [*times[1:], -1], strict=True))

    def alpha_bar(self, t: Time, like: Tensor) -> Tensor:
        """ᾱ_t, shaped to broadcast over images of `like`'s dtype and device."""
        return self._exact(t, like).to(like.dtype)

    def signal(self, t: Time, like: Tensor) -> Tensor:
        """√ᾱ_t, the scale of x_0 in x_t."""
        return self._exact(t, like).sqrt().to(like.dtype)

    def level(self, t: Time, like: Tensor) -> Tensor:
        """√(1−ᾱ_t), the noise level of x_t. The cast follows the subtraction, which is inexact in float32."""
        return (1 - self._exact(t, like)).sqrt().to(like.dtype)

    def noise_to_signal(self, t: Time, like: Tensor) -> Tensor:
        """√((1−ᾱ_t)/ᾱ_t), as exact as the table."""
        a = self._exact(t, like)
        return ((1 - a) / a).sqrt()

    def add_noise(self, x0: Tensor, t: Time, z: Tensor) -> Tensor:
        """q(x_t | x_0): √ᾱ_t x_0 + √(1−ᾱ_t) z."""
        return self.signal(t, x0) * x0 + self.level(t, x0) * z

    def posterior_mean(self, x: Tensor, x0: Tensor, t: Time, s: Time) -> Tensor:
        """The mean of q(x_s | x_t, x_0): √ā_s β/(1−ā_t) x0 + √(1−β) (1−ā_s)/(1−ā_t) x_t."""
        a_t, a_s, beta, _ = self._variances(t, s, x)
        c0 = a_s.sqrt() * beta / (1 - a_t)
        ct = (1 - beta).sqrt() * (1 - a_s) / (1 - a_t)
        return c0.to(x.dtype) * x0 + ct.to(x.dtype) * x

    def posterior_std(self, x: Tensor, t: Time, s: Time, v: Tensor | None = None) -> Tensor:
        """The standard deviation of the posterior step; exactly 0 where ā_s = 1.

        `v` in [0, 1] is a learned interpolation, exp(½(v log β + (1−v) log β̃)); None is β̃.
        """
        _, a_s, beta, tilde = self._variances(t, s, x)
        if v is None:
            return tilde.sqrt().to(x.dtype)
        log_tilde = tilde.clamp(min=1e-20).log()
        std = torch.exp(0.5 * (v.double() * beta.log() + (1 - v.double()) * log_tilde))
        return (std * (a_s < 1)).to(x.dtype)

    def posterior(self, x: Tensor, x0: Tensor, t: Time, s: Time, z: Tensor, v: Tensor | None = None) -> Tensor:
        """A sample of q(x_s | x_t, x_0), with the standard normal field z."""
        return self.posterior_mean(x, x0, t, s) + self.posterior_std(x, t, s, v) * z

    def ddim(self, x0: Tensor, noise: Tensor, t: Time, s: Time, z: Tensor, eta: float) -> Tensor:
        """DDIM(η): c1 = η√β̃, c2 = √(1−ā_s−c1²); √ā_s x0 + c1 z + c2 ε̂."""
        _, a_s, _, tilde = self._variances(t, s, x0)
        c1 = eta * tilde.sqrt()
        c2 = (1 - a_s - c1**2).clamp(min=0).sqrt()
        return a_s.sqrt().to(x0.dtype) * x0 + c1.to(x0.dtype) * z + c2.to(x0.dtype) * noise

    def ddnm_noise_rule(self, x0: Tensor, noise: Tensor, s: Time, z: Tensor, eta: float) -> Tensor:
        """DDNM's step to the next level, which is not DDIM(η): √ā_s x0 + √(1−ā_s)(η z + √(1−η²) ε̂)."""
        mixed = eta * z + math.sqrt(1 - eta**2) * noise
        return self.signal(s, x0) * x0 + self.level(s, x0) * mixed

    def _variances(self, t: Time, s: Time, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ā_t, ā_s, β and β̃ of a step from t to s."""
        a_t, a_s = self._exact(t, like), self._exact(s, like)
        beta = 1 - a_t / a_s
        return a_t, a_s, beta, beta * (1 - a_s) / (1 - a_t)

    def _exact(self, t: Time, like: Tensor) -> Tensor:
        """ᾱ_t in float64 (float32 on MPS, which has no float64), broadcastable over `like`.

        For a single t it stays on the CPU: kernels take such a number as an argument, and a copy to the device
        would synchronise.
        """
        if not isinstance(t, Tensor):
            return self.alpha_bars[t]
        wide = torch.float32 if like.device.type == "mps" else torch.float64
        return self.alpha_bars.to(t.device)[t].to(wide).to(like.device).view(-1, 1, 1, 1)


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
    """A U-Net that predicts ε, v or x0, or a flow or EDM's residual, shown to solvers as x̂0 and ε̂."""

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
                f"the prediction type {str(prediction_type)[:40]!r} is not known; expected epsilon, v_prediction or sample"
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
        if self.prediction_type in ("flow", "edm_epsilon", "edm_v_prediction"):
            from ddc.flows import predict  # which few models need

            x0, noise = predict(self, x, t)
            return Prediction(x0 if self.clamp is None else x0.clamp(-self.clamp, self.clamp), noise)
        raw = run_unet(self.unet, x, t).to(x.dtype)
        v = None
        if self.learns_variance:
            raw, v_raw = raw.chunk(2, dim=1)
            v = ((v_raw + 1) / 2).clamp(0, 1)
        elif str(self.scheduler_config.get("variance_type")).startswith("fixed_large"):
            v = torch.ones_like(x[:, :1])
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
        if autoencoder_folder(folder) is not None:
            raise UserError(
                f"{folder} is a latent prior, for the solvers resample, psld and hgu; expected one of pictures"
            )
        prior = Prior(*read_prior(folder))
        outputs = int(prior.unet.config["out_channels"])  # type: ignore[index]
        if prior.channels != 3 or outputs not in (3, 6):
            raise UserError(
                f"{folder} is not an RGB prior: it has {prior.channels} input and {outputs} output channels; "
                "expected 3 in and 3 (or 6, with learned variance) out"
                + ("; a data-consistency network is named with --network" if prior.channels == 6 else "")
            )
        return prior.eval()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write unet/ and scheduler/ so that diffusers and `from_pretrained` can read them."""
        save_network(self.unet, Path(folder, "unet"), **options)
        place = Path(folder, "scheduler")
        place.mkdir(exist_ok=True)
        (place / SCHEDULER).write_text(json.dumps(self.scheduler_config, indent=2) + "\n")


def autoencoder_folder(folder: Path) -> Path | None:
    """Where a latent prior, or its unet/, has its autoencoder; None for a prior of pictures."""
    whole = folder.absolute().parent if folder.name == "unet" else folder
    places = [whole / name for name in ("vae", "vqvae")] if (whole / "unet").is_dir() else []
    return next((place for place in places if place.is_dir()), None)


def read_prior(folder: Path) -> tuple[nn.Module, Schedule, PredictionType, float | None, dict[str, Any]]:
    """The network of a prior's folder and what follows from its scheduler, as `Prior` takes them."""
    unet_folder = folder / "unet" if (folder / "unet").is_dir() else folder
    config = read_config(unet_folder)
    if "inputs" in config:  # what a data-consistency network reads
        raise UserError(f"{folder} is a data-consistency network, not a prior; name it with --network")
    if "task" in config:  # what a bridge was trained for
        raise UserError(
            f"{folder} is a bridge network (for i2sb and cddb) and not a prior; put it beside a prior, as "
            f"i2sb-{config['task']}"
        )
    unet = load_network(unet_folder, config)
    scheduler = read_scheduler(folder)
    kind = prediction_type_of(scheduler)
    clamp = scheduler.get("clip_sample_range", 1.0) if scheduler.get("clip_sample") else None
    if clamp is not None and (type(clamp) not in (int, float) or not 0 < clamp < math.inf):
        raise UserError(f"clip_sample_range is {str(clamp)[:40]!r}; expected a number above 0")
    return unet, schedule_from_config(scheduler), kind, clamp, scheduler


def read_scheduler(folder: Path) -> dict[str, Any]:
    """The scheduler's settings of a prior's folder, or of its unet/; nothing if there are none."""
    places = [folder / "scheduler", folder]
    if folder.name == "unet":
        places.append(folder.absolute().parent / "scheduler")
    found = [place for place in places if (place / SCHEDULER).is_file()]
    return read_config(found[0], SCHEDULER) if found else {}


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
    """A schedule from diffusers' scheduler settings; the DDPM one where nothing is said. Others are refused by name."""
    name, variance = _scheduler_name(config), config.get("variance_type")
    if name in FLOW or name in EDM:
        from ddc.flows import alpha_bars

        return Schedule(alpha_bars(config, flow=name in FLOW))
    if name not in DDPM_LIKE or config.get("timestep_type") == "continuous":
        kind = f"{str(config.get('_class_name'))[:40]!r}" + (" with continuous times" if name in DDPM_LIKE else "")
        raise UserError(
            f"models of the scheduler {kind} are not supported; expected those of DDPMScheduler or another of its "
            f"samplers, such as DDIMScheduler, or of {', '.join(f'{name}Scheduler' for name in (*FLOW, *EDM))}"
        )
    if variance == "learned":
        raise UserError('the variance_type "learned" is not supported; expected learned_range or a fixed one')
    betas = _betas(config)
    if not bool(((betas > 0) & (betas < 1)).all()):
        raise UserError("the betas of a schedule must lie between 0 and 1; check scheduler_config.json")
    if not config.get("rescale_betas_zero_snr"):
        return Schedule.from_betas(betas)
    if config.get("prediction_type", "epsilon") == "epsilon":
        raise UserError("rescale_betas_zero_snr needs the prediction_type v_prediction or sample: pure noise has no x̂0")
    root = Schedule.from_betas(betas).alpha_bars[:-1].sqrt()  # Lin et al. 2023, arXiv 2305.08891, Algorithm 1
    root = (root - root[-1]) * root[0] / (root[0] - root[-1])
    return Schedule(torch.cat([root**2, torch.ones(1, dtype=torch.float64)]))


def prediction_type_of(config: dict[str, Any]) -> Any:
    """What the network of a scheduler predicts, as `Prior` names it."""
    name, kind = _scheduler_name(config), config.get("prediction_type", "epsilon")
    if name in FLOW:
        return "flow"
    return f"edm_{kind}" if name in EDM else kind


def _scheduler_name(config: dict[str, Any]) -> str:
    return str(config.get("_class_name", "DDPMScheduler")).removesuffix("Scheduler")


def _betas(config: dict[str, Any]) -> Tensor:
    """The βs of diffusers' scheduler settings, (N,) float64."""
    steps, start, end = (
        config.get(k, d) for k, d in (("num_train_timesteps", 1000), ("beta_start", 1e-4), ("beta_end", 0.02))
    )
    numbers = config.get("trained_betas")
    numbers = [start, end] if numbers is None else numbers
    if not isinstance(numbers, list) or not all(type(n) in (int, float) and 0 < n < 1 for n in numbers):
        raise UserError("the betas of a schedule must be numbers between 0 and 1; check scheduler_config.json")
    if type(steps) is not int or not 2 <= steps <= LONGEST or not 2 <= len(numbers) <= LONGEST:
        raise UserError(f"num_train_timesteps is {str(steps)[:40]}; expected a whole number from 2 to {LONGEST}")
    if config.get("trained_betas") is not None:
        return torch.tensor(numbers, dtype=torch.float64)
    kind = config.get("beta_schedule", "linear")
    if kind == "linear":
        return torch.linspace(start, end, steps, dtype=torch.float64)
    if kind == "scaled_linear":
        return torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float64) ** 2
    if kind == "squaredcos_cap_v2":  # Nichol and Dhariwal (2102.09672), equation 17
        u = torch.arange(steps + 1, dtype=torch.float64) / steps
        f = torch.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2
        return (1 - f[1:] / f[:-1]).clamp(max=0.999)
    if kind == "sigmoid":  # GeoDiff (2203.02923)
        return start + (end - start) * torch.linspace(-6, 6, steps, dtype=torch.float64).sigmoid()
    known = "linear, scaled_linear, squaredcos_cap_v2 or sigmoid"
    raise UserError(f"the beta schedule {str(kind)[:40]!r} is not known; expected {known}")


class DataConsistency(nn.Module):
    """The network and the list of what it reads beside x̂0."""

    def __init__(self, unet: nn.Module, inputs: tuple[Input, ...] = ("y",), residual: Residual = "x0") -> None:
        super().__init__()
        if not isinstance(inputs, tuple) or not all(isinstance(name, str) for name in inputs) or len(inputs) > 20:
            raise UserError("the inputs of a data-consistency network are no short list of names")
        if residual not in get_args(Residual):
            raise UserError(f"the residual {str(residual)[:40]!r} is not known; expected one of {get_args(Residual)}")
        if residual == "blend" and not {"estimate", "wiener"} & set(inputs):
            raise UserError('a network with residual "blend" must read "estimate" or "wiener"; add one to its inputs')
        unknown = set(inputs) - set(get_args(Input))
        if unknown:
            raise UserError(f"network inputs {sorted(unknown)} are not known; expected some of {get_args(Input)}")
        expected = 3 + sum(CHANNELS[name] for name in inputs)
        actual = int(unet.config["in_channels"])  # type: ignore[index]
        if actual != expected:
            raise UserError(
                f"this is not a data-consistency network for inputs {list(inputs)}: it takes {actual} channels, "
                f"expected {expected} (3 for x̂0 and {expected - 3} for the measurement)"
            )
        check_rgb(unet)
        self.unet = unet
        self.inputs = inputs
        self.residual = residual

    def delta(self, raw: Tensor, known: Tensor, x0: Tensor, t: Time) -> Tensor:
        """Δ from the U-Net's output.

        With the residual "x0" (the paper's) the output is Δ. With "blend" the U-Net corrects a picture that is mostly
        the first guess from y at high noise, where x̂0 says little, and mostly x̂0 at low noise.
        """
        if self.residual == "x0":
            return raw
        guess = next(known[:, part] for name, part in self.layout() if name in ("wiener", "estimate"))
        trust = (1 - t / TRAIN_STEPS) ** 2
        trust = trust.view(-1, 1, 1, 1).to(x0.dtype) if isinstance(trust, Tensor) else trust
        return (1 - trust) * (x0 - guess) - raw

    def layout(self) -> list[tuple[Input, slice]]:
        """The channels of each input."""
        ends = list(accumulate(CHANNELS[name] for name in self.inputs))
        return [(name, slice(end - CHANNELS[name], end)) for name, end in zip(self.inputs, ends, strict=True)]

    def consistent(
        self,
        measured: Measured,
        x0: Tensor,
        t: Time,
        known: Tensor | None = None,
        unet: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The data-consistency step, x̂0,y = x̂0 − Δφ(y, x̂0, t), with what y states exactly put back.

        Also returns what the network was told, which the next step passes as `known`. In training `unet` is the wrapped
        form of the network's own U-Net.
        """
        operator, y, sigma = measured
        with torch.no_grad(), torch.autocast(x0.device.type, enabled=False):
            known = self.describe(measured, x0, known)
        raw = run_unet(unet or self.unet, torch.cat([x0, known], dim=1), t).to(x0.dtype)
        x0 = x0 - self.delta(raw, known, x0, t)
        with torch.autocast(x0.device.type, enabled=False):
            return operator.keep_known(x0, y, sigma), known

    def describe(self, measured: Measured, x0: Tensor, before: Tensor | None = None) -> Tensor:
        """What the network is told beside x̂0: (B, k, H, W). `before` is what it was told in an earlier step, of which
        only the projection of x̂0 is computed again."""
        parts = [
            self.channel(name, measured, x0) if before is None or name == "projection" else before[:, part]
            for name, part in self.layout()
        ]
        return torch.cat(parts, dim=1)

    def channel(self, name: Input, measured: Measured, x0: Tensor) -> Tensor:
        """One of the inputs; only "projection" depends on the values of x̂0."""
        operator, y, sigma = measured
        size = (x0.shape[-2], x0.shape[-1])
        if name == "projection":
            return operator.project(x0, y, sigma)
        if name == "y":
            return operator.to_image(y, size)
        if name in ("wiener", "estimate"):  # two names of one input
            return operator.guess(y, sigma, size)
        one = torch.ones_like(x0[:, :1])
        if name == "sigma":
            return one * (10.0 * sigma)  # the noise level, scaled to the order of 1
        mask = operator.observed(y, size)
        return one if mask is None else mask.to(one.dtype).expand_as(one)

    @staticmethod
    def from_pretrained(folder: str | Path) -> "DataConsistency":
        """Read a network folder; one without `inputs` in its configuration is the paper's (x̂0 and y)."""
        config = read_config(Path(folder))
        inputs, residual = config.pop("inputs", ["y"]), config.pop("residual", "x0")
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        return DataConsistency(load_network(folder, config), inputs, residual).eval()

    @staticmethod
    def from_config(config: str | dict[str, Any]) -> "DataConsistency":
        """A network with fresh weights, from a configuration, the name of a preset, or a JSON file."""
        config = read_preset("network", config) if isinstance(config, str) else dict(config)
        inputs: tuple[Input, ...] = tuple(config.pop("inputs", ("y",)))
        residual: Residual = config.pop("residual", "x0")
        config["in_channels"] = 3 + sum(CHANNELS[name] for name in inputs)
        return DataConsistency(build_network(config), inputs, residual)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        extra = {"inputs": list(self.inputs), "residual": self.residual} | options.pop("extra_config", {})
        save_network(self.unet, folder, extra_config=extra, **options)


def check_rgb(unet: nn.Module) -> None:
    """Refuse a network that does not return a picture of 3 channels."""
    if (channels := unet.config["out_channels"]) != 3:  # type: ignore[index]
        raise UserError(f"this network has {channels} output channels; expected 3")


def read_preset(kind: str, name: str) -> dict[str, Any]:
    """The configuration of a prior, network, posterior or bridge: by the name of a preset, or from a JSON file."""
    if name in PRESETS[kind]:
        return dict(PRESETS[kind][name])
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        return read_config(path.parent, path.name)
    raise UserError(f"{name!r} is neither a preset ({', '.join(PRESETS[kind])}) nor a JSON file with a configuration")
