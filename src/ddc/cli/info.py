"""`ddc info`: what a model folder holds, and what this computer offers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from torch import nn

    from ddc.consistency import DataConsistency


@dataclass(frozen=True)
class Info:
    """Show a model's networks (parameters, FLOPs, sizes, inputs, schedule), and the tasks, solvers, devices
    and versions here."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """A model's folder, or that of its prior or of another of its networks alone; left out, the model that comes
    with the package, if it is there."""
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
            facts["model"] = self._model()
        facts |= _here()
        if self.json:
            print(json.dumps(facts, indent=2, ensure_ascii=False))
        else:
            _show(facts)
        return 0

    def _model(self) -> dict[str, Any]:
        from ddc.pipeline import RestorationPipeline, default_tile, pick_device

        if self.model is not None and (alone := self._alone(self.model)):
            return {"folder": str(self.model), "megabytes": _megabytes(self.model), **alone}
        pipe = RestorationPipeline.from_pretrained(self.model)
        prior, schedule = pipe.prior, pipe.prior.schedule
        assert pipe.folder is not None
        facts: dict[str, Any] = {
            "folder": str(pipe.folder),
            "megabytes": _megabytes(pipe.folder),
            "tile": default_tile(pick_device("auto")),
        }
        facts["prior"] = {
            **self._network(prior.unet),
            "predicts": prior.prediction_type,
            "variance": "learned" if prior.learns_variance else "fixed",
            "clamp": prior.clamp,
            "schedule": {
                "steps": schedule.train_steps,
                "kind": prior.scheduler_config.get("beta_schedule", "linear"),
                "last alpha bar": float(f"{float(schedule.alpha_bars[-2]):.3g}"),
            },
        }
        if pipe.network is not None:
            facts["network"] = self._consistency(pipe.network)
        return facts

    def _alone(self, folder: Path) -> dict[str, Any] | None:
        """One network in a folder, as `ddc train ddc`, `i2sb` and `dncnn` export it."""
        from ddc.consistency import DataConsistency
        from ddc.networks import read_config
        from ddc.solvers.bridge import Bridge
        from ddc.solvers.dncnn import DnCNN

        config = read_config(folder) if (folder / "config.json").is_file() else {}
        if "inputs" in config:
            return {"network": self._consistency(DataConsistency.from_pretrained(folder))}
        if "task" in config:
            bridge = Bridge.from_pretrained(folder)
            known = {"task": bridge.task, "largest noise": bridge.sigma_max}
            return {"bridge": {**self._network(bridge.unet), **known}}
        if config.get("_class_name") == "DnCNN":
            dncnn = DnCNN.from_pretrained(folder)
            return {"denoiser": {"parameters": sum(p.numel() for p in dncnn.parameters()), **dncnn.config}}
        return None

    def _consistency(self, network: "DataConsistency") -> dict[str, Any]:
        return {**self._network(network.unet), "inputs": ["x0", *network.inputs]}

    def _network(self, unet: "nn.Module") -> dict[str, Any]:
        import torch

        from ddc.networks import run_unet, unet_size_multiple

        channels = int(unet.config["in_channels"])  # type: ignore[index]
        facts = {
            "class": type(unet).__name__,
            "parameters": sum(p.numel() for p in unet.parameters()),
            "channels in": channels,
            "channels out": int(unet.config["out_channels"]),  # type: ignore[index]
            "sizes": f"any (padded inside to a multiple of {unet_size_multiple(unet)})",
        }
        from torch.utils.flop_counter import FlopCounterMode

        with torch.no_grad(), FlopCounterMode(display=False) as counter:  # shapes alone: nothing is computed
            run_unet(unet.to("meta"), torch.empty(1, channels, self.size, self.size, device="meta"), 0)
        facts[f"GFLOP at {self.size}×{self.size}"] = float(f"{counter.get_total_flops() / 1e9:.4g}")
        return facts


def _megabytes(folder: Path) -> float:
    return round(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6, 1)


def _here() -> dict[str, Any]:
    """Tasks, solvers, devices and versions."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from ddc.problems import READ_OFF, TASKS
    from ddc.solvers import SOLVERS

    threads = torch.get_num_threads()
    devices = [f"cpu ({threads} thread{'s' if threads > 1 else ''})"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    versions = {"python": platform.python_version()}
    for name in ("ddc", "torch", "diffusers", "safetensors", "pillow", "pillow-heif", "accelerate", "gradio"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "tasks": TASKS | READ_OFF,
        "solvers": {name: (kind.__doc__ or "").splitlines()[0] for name, kind in SOLVERS.items()},
        "devices": devices,
        "versions": versions,
    }


def _show(facts: dict[str, Any], indent: str = "") -> None:
    for key, value in facts.items():
        if isinstance(value, dict):
            print(f"{indent}{key}")
            _show(value, indent + "  ")
        elif isinstance(value, list):
            print(f"{indent}{key:<16} {', '.join(map(str, value))}")
        else:
            print(f"{indent}{key:<16} {value:,}" if isinstance(value, int) else f"{indent}{key:<16} {value}")
