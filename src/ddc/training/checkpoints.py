"""Checkpoints: written beside the last one and renamed when complete, so that `latest` is never broken.

A checkpoint is a folder of safetensors and JSON: weights, EMA, optimiser moments, what the objective keeps,
and the counters from which every random number follows.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ddc.errors import UserError

LATEST = "latest"


def write_checkpoint(
    folder: Path, name: str, tensors: dict[str, dict[str, Tensor]], record: dict[str, Any], keep: int = 2
) -> Path:
    """Save and make it the latest; on a full disk the previous one stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.partial"):
        shutil.rmtree(stale)
    partial, final = folder / f"{name}.partial", folder / name
    try:
        partial.mkdir()
        for part, content in tensors.items():
            flat = {k: v.detach().to("cpu").contiguous() for k, v in content.items()}
            save_file(flat, partial / f"{part}.safetensors")
        (partial / "record.json").write_text(json.dumps(record, indent=2) + "\n")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        pointer = folder / f"{LATEST}.partial-name"
        pointer.write_text(name + "\n")
        pointer.replace(folder / LATEST)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"the checkpoint {final} could not be written ({error}); the previous one is untouched"
        ) from None
    complete = sorted(p for p in folder.iterdir() if p.is_dir() and (p / "record.json").is_file())
    for old in complete[:-keep] if keep > 0 else []:
        if old != final:
            shutil.rmtree(old)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    path = folder / pointer.read_text().strip()
    return path if (path / "record.json").is_file() else None


def read_checkpoint(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    record = json.loads((path / "record.json").read_text())
    return {p.stem: load_file(p) for p in path.glob("*.safetensors")}, record
