"""An inference model from a run's latest checkpoint: the averaged weights, in the format of its loader."""

from pathlib import Path
from typing import Any

import torch

from ddc.consistency import DataConsistency
from ddc.errors import UserError
from ddc.networks import build_network
from ddc.priors import Prior, schedule_from_config
from ddc.solvers.bridge import Bridge
from ddc.solvers.dncnn import DnCNN
from ddc.training.checkpoints import latest_checkpoint, read_checkpoint, replacing


def export_run(
    run: Path, out: Path, dtype: torch.dtype = torch.float32, shard_mb: float | None = None
) -> int:
    """Write the model of the run's latest checkpoint into the folder `out`; the step it was trained for."""
    path = latest_checkpoint(run / "checkpoints")
    if path is None:
        raise UserError(f"{run} has no checkpoint; expected the --out folder of `ddc train`")
    if (out / "checkpoints").exists():
        raise UserError(f"{out} is a run's folder, which would be replaced; name a new folder")
    tensors, record = read_checkpoint(path)
    if "model" not in record:
        raise UserError(f"{path} does not say what network it holds; resume the run once, and export again")
    with replacing(out) as folder:
        _save(record["model"], folder, state=tensors["average"], dtype=dtype, shard_mb=shard_mb)
    return int(record["step"])


def _save(model: dict[str, Any], folder: Path, **options: Any) -> None:
    kind, config = model["kind"], model["network"]
    if kind == "dncnn":
        DnCNN(**config).save_pretrained(folder, **options)
        return
    unet = build_network(config)
    if kind == "prior":
        scheduler = model["scheduler"]
        prior = Prior(unet, schedule_from_config(scheduler), scheduler_config=scheduler)
        prior.save_pretrained(folder, **options)
    elif kind == "ddc":
        network = DataConsistency(unet, tuple(model["inputs"]), model["residual"])
        network.save_pretrained(folder, extra_config=model["remarks"], **options)
    else:
        Bridge(unet, model["task"], model.get("sigma_max", 0.0)).save_pretrained(folder, **options)
