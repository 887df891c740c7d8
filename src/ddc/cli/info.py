"""`ddc info`: what a model folder contains, and what is available on this computer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from torch import nn

    from ddc.latents import Autoencoder

PACKAGES = "deep-data-consistency torch diffusers safetensors pillow pillow-heif accelerate gradio"


@dataclass(frozen=True)
class Info:
    """Show the networks of a model (parameters, FLOPs, sizes, inputs, schedule), and the tasks, solvers, devices
    and versions on this computer."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """A model folder, a model on the Hugging Face Hub (user/model), or the folder of a prior or of another single network;
    if left out, the model that is shipped with the package, if there is one."""
    size: int = 256
    """Side of the picture that FLOPs are counted for."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from ddc.errors import UserError
        from ddc.pipeline import DEFAULT_MODEL

        if self.size < 1:
            raise UserError(f"--size is {self.size}; expected the side of a picture in pixels, such as 256")
        facts: dict[str, Any] = {}
        if self.model is not None or (DEFAULT_MODEL / "prior").is_dir():
            folder = self.model or DEFAULT_MODEL
            if not folder.exists():
                from ddc.hub import fetch_model

                folder = fetch_model(folder)
            facts["model"] = _model(folder, self.size)
        facts |= _computer()
        if self.json:
            print(json.dumps(facts, indent=2, ensure_ascii=False))
        else:
            _show(facts)
        return 0


def _model(folder: Path, size: int) -> dict[str, Any]:
    """A model's networks, or the one network that `ddc train ddc`, `i2sb` or `dncnn` exported."""
    from ddc.fast import default_tile, pick_device
    from ddc.latents import CLASSES, Autoencoder, LatentPrior
    from ddc.networks import read_config
    from ddc.pipeline import PARTS, RestorationPipeline
    from ddc.priors import DataConsistency
    from ddc.solvers.bridge import Bridge
    from ddc.solvers.pnp_admm import DnCNN
    from ddc.solvers.posterior import PosteriorDenoiser

    def sampling(network: PosteriorDenoiser) -> dict[str, Any]:
        levels = (
            {"noise levels": network.generator[0], "in wide holes": network.generator[1]} if network.generator else {}
        )
        return {**_unet(network.unet, size), "usual realism": network.realism, **levels}

    def consistency(network: DataConsistency) -> dict[str, Any]:
        return {**_unet(network.unet, size), "inputs": ["x0", *network.inputs]}

    config = read_config(folder) if (folder / "config.json").is_file() else {}
    megabytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    facts: dict[str, Any] = {"folder": str(folder), "megabytes": round(megabytes, 1)}
    if "inputs" in config or config.get("in_channels") == 6:  # the released DDC networks name no inputs
        use = {"use": f"a data-consistency network: ddc restore … --network {folder}"}
        return facts | use | {"network": consistency(DataConsistency.from_pretrained(folder))}
    if config.get("posterior"):
        return facts | {"posterior": sampling(PosteriorDenoiser.from_pretrained(folder))}
    if "task" in config:
        bridge = Bridge.from_pretrained(folder)
        known = {"task": bridge.task, "largest noise": bridge.sigma_max}
        return facts | {"bridge": {**_unet(bridge.unet, size), **known}}
    if config.get("_class_name") == "DnCNN":
        dncnn = DnCNN.from_pretrained(folder)
        return facts | {"denoiser": {"parameters": _parameters(dncnn), **dncnn.config}}
    if config.get("_class_name") in CLASSES:
        return facts | {"autoencoder": _autoencoder(Autoencoder.from_pretrained(folder))}
    pipe = RestorationPipeline.from_pretrained(folder)
    prior, schedule = pipe.prior, pipe.prior.schedule
    facts["tile"] = default_tile(pick_device("auto"))
    if isinstance(prior, LatentPrior):
        facts["autoencoder"] = _autoencoder(prior.autoencoder)
        size = -(-size // prior.factor)
    facts["prior"] = {
        **_unet(prior.unet, size),
        "predicts": prior.prediction_type,
        "variance": "learned" if prior.learns_variance else "fixed",
        "clamp": prior.clamp,
        "schedule": {
            "steps": schedule.train_steps,
            "kind": _kind(prior.scheduler_config),
            "last alpha bar": float(f"{float(schedule.alpha_bars[-2]):.3g}"),
        },
    }
    if pipe.network is not None:
        facts["network"] = consistency(pipe.network)
    if (own := folder / PARTS["posterior"]).is_dir():
        facts["posterior"] = sampling(PosteriorDenoiser.from_pretrained(own))
    return facts


def _autoencoder(autoencoder: "Autoencoder") -> dict[str, Any]:
    return {
        "class": type(autoencoder.vae).__name__,
        "parameters": _parameters(autoencoder),
        "latent channels": autoencoder.channels,
        "factor": autoencoder.factor,
        "scale and shift": [autoencoder.scale, autoencoder.shift],
    }


def _kind(scheduler: dict[str, Any]) -> str:
    """The betas of a DDPM; a flow or EDM has none."""
    name = str(scheduler.get("_class_name", ""))
    return name if name.startswith(("Flow", "EDM")) else str(scheduler.get("beta_schedule", "linear"))


def _unet(unet: "nn.Module", size: int) -> dict[str, Any]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from ddc.networks import run_unet, unet_size_multiple

    config: Any = unet.config
    parameters, channels = _parameters(unet), int(config["in_channels"])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:  # on "meta" nothing is computed
        run_unet(unet.to("meta"), torch.empty(1, channels, size, size, device="meta"), 0)
    return {
        "class": type(unet).__name__,
        "parameters": parameters,
        "channels in": channels,
        "channels out": int(config["out_channels"]),
        "sizes": f"any (padded to a multiple of {unet_size_multiple(unet)})",
        f"GFLOP at {size}×{size}": float(f"{counter.get_total_flops() / 1e9:.4g}"),
    }


def _parameters(network: "nn.Module") -> int:
    return sum(p.numel() for p in network.parameters())


def _computer() -> dict[str, Any]:
    """Tasks, solvers, devices and versions."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from ddc.problems import DETECTED, TASKS
    from ddc.solvers import SOLVERS

    threads = torch.get_num_threads()
    devices = [f"cpu ({threads} thread{'s' if threads > 1 else ''})"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    versions = {"python": platform.python_version()}
    for name in PACKAGES.split():
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "tasks": TASKS | DETECTED,
        "solvers": {name: (kind.__doc__ or "").splitlines()[0] for name, kind in SOLVERS.items()},
        "devices": devices,
        "versions": versions,
    }


def _show(facts: dict[str, Any], indent: str = "") -> None:
    for key, value in facts.items():
        if isinstance(value, dict):
            print(f"{indent}{key}")
            _show(value, indent + "  ")
            continue
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        print(f"{indent}{key:<16} {value:,}" if isinstance(value, int) else f"{indent}{key:<16} {value}")
