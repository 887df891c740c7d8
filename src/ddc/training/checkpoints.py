"""Checkpoints: written beside the last one and renamed when complete, so that `latest` is never broken.

A checkpoint is a folder of safetensors and JSON: weights, EMA, optimiser moments, what the objective keeps,
and the counters from which every random number follows.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
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
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"the checkpoint {final} could not be written ({error}); the previous one is untouched"
        ) from None
    # by age and not by step: a run that began again has fewer steps than what it replaces
    complete = sorted(folder.glob("*/record.json"), key=lambda path: path.stat().st_mtime_ns)
    for old in complete[:-keep] if keep > 0 else []:
        if old.parent != final:
            shutil.rmtree(old.parent)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    path = folder / pointer.read_text().strip()
    return path if (path / "record.json").is_file() else None


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `folder` once it is complete."""
    partial, old = folder.with_name(folder.name + ".partial"), folder.with_name(folder.name + ".old")
    for rest in (partial, old):
        shutil.rmtree(rest, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{folder} could not be written ({error}); what was there is untouched") from None


def read_checkpoint(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    try:
        record = json.loads((path / "record.json").read_text())
        return {p.stem: load_file(p) for p in path.glob("*.safetensors")}, record
    except (ValueError, OSError, SafetensorError) as error:
        raise UserError(
            f"the checkpoint {path} cannot be read ({error}); write the name of an older one into "
            f"{path.parent / LATEST}, or begin again with --no-resume"
        ) from None
