"""What a run writes and shows: checkpoints, exported models, logs, example pictures and progress.

A checkpoint is a folder of safetensors and JSON: weights, averaged weights, optimiser moments, the state of the
objective, and the counters from which every random number follows. It is written beside the last one and renamed
when it is complete, so that `latest` is never broken.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddc.consistency import DataConsistency
from ddc.errors import UserError
from ddc.priors import Prior
from ddc.solvers.bridge import Bridge
from ddc.solvers.dncnn import DnCNN

LATEST = "latest"
MODELS: dict[str, Any] = {kind.__name__: kind for kind in (Prior, DataConsistency, Bridge, DnCNN)}
_NOT_TERMS = ("step", "rate", "images_per_second")


# -- checkpoints ---------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path, name: str, tensors: dict[str, dict[str, Tensor]], record: dict[str, Any], keep: int = 2
) -> Path:
    """Save a checkpoint and make it the latest; if the disk is full, the previous one stays."""
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


def read_checkpoint(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors and the record of a checkpoint."""
    try:
        record = json.loads((path / "record.json").read_text())
        return {p.stem: load_file(p) for p in path.glob("*.safetensors")}, record
    except (ValueError, OSError, SafetensorError) as error:
        raise UserError(
            f"the checkpoint {path} cannot be read ({error}); write the name of an older one into "
            f"{path.parent / LATEST}, or begin again with --no-resume"
        ) from None


def weights_fingerprint(module: nn.Module) -> str:
    """A short hash of the beginning of every tensor: enough to tell one trained network from another."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


# -- exported models -----------------------------------------------------------------------------------------


def check_replaceable(folder: Path) -> None:
    """Refuse a folder with files that are not part of an exported model: exporting would delete them."""
    ours = ("config.json", "scheduler_config.json", ".safetensors", ".safetensors.index.json")
    for path in folder.rglob("*") if folder.exists() else ():
        if not path.is_dir() and not path.name.endswith(ours):
            raise UserError(
                f"{folder} would be replaced, but {path.relative_to(folder)} in it is not part of a model; "
                "name a new folder, or move the file"
            )


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which replaces `folder` once it is complete. Only a model is replaced."""
    check_replaceable(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            new, old = Path(temporary, "new"), Path(temporary, "old")
            new.mkdir()
            yield new
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} could not be written ({error}); what was there is untouched") from None


def save_model(
    model: Any,
    out: Path,
    state: dict[str, Tensor],
    remarks: dict[str, Any],
    dtype: str,
    shard_mb: float | None,
) -> None:
    """Write a model folder with these weights; `remarks` are added to its configuration."""
    number_format = torch.float16 if dtype == "fp16" else torch.float32
    with _replaced(out) as folder:
        model.save_pretrained(folder, state=state, dtype=number_format, shard_mb=shard_mb, extra_config=remarks)


def export_run(run: Path, out: Path, dtype: str = "fp32", shard_mb: float | None = None) -> int:
    """Write the model of a run's latest checkpoint into the folder `out`. Returns the step of the checkpoint."""
    path = latest_checkpoint(run / "checkpoints")
    if path is None:
        raise UserError(f"{run} has no checkpoint; expected the --out folder of `ddc train`")
    if (out / "checkpoints").exists():
        raise UserError(f"{out} is a run's folder, which would be replaced; name a new folder")
    tensors, record = read_checkpoint(path)
    description = record.get("model", {})
    if "class" not in description:
        raise UserError(f"{path} does not say what network it holds; resume the run once, and export again")
    model = MODELS[description["class"]].from_pretrained(run / description["folder"])
    save_model(model, out, tensors["average"], description["remarks"], dtype, shard_mb)
    return int(record["step"])


# -- logs and progress ---------------------------------------------------------------------------------------


class Log:
    """Metrics as one JSON object a line in log.jsonl, and as TensorBoard's scalars if it is installed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "logs"))
        except ImportError:
            pass

    def write(self, figures: dict[str, float]) -> None:
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(figures) + "\n")
        if self._writer is not None:
            for key, value in figures.items():
                if key != "step":
                    self._writer.add_scalar(key, value, int(figures["step"]))

    def write_pictures(self, step: int, rows: list[Tensor]) -> None:
        """Pictures in [-1, 1] as one PNG: a row for each, two grey pixels between them."""
        count, _, height, width = rows[0].shape
        gap = 2
        sheet = np.full((len(rows) * (height + gap) - gap, count * (width + gap) - gap, 3), 128, np.uint8)
        for r, row in enumerate(rows):
            pixels = ((row.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
            for c, one in enumerate(pixels.cpu().numpy()):
                top, left = r * (height + gap), c * (width + gap)
                sheet[top : top + height, left : left + width] = one
        path = self.folder / "pictures" / f"step-{step:08d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sheet).save(path)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Display:
    """Messages and progress: a bar on a terminal, plain lines elsewhere. With `report`, both go there as lines."""

    def __init__(self, report: Callable[[str], None] | None, on: bool = True) -> None:
        self._report, self._on = report, on
        self._bar: Any = None

    def __enter__(self) -> "Display":
        if self._on and self._report is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            bar, percent = BarColumn(bar_width=16), TextColumn("{task.percentage:3.0f} %")
            text = TextColumn("{task.description}")
            self._bar = Progress(bar, percent, text, console=Console(stderr=True))
            self._task = self._bar.add_task("starting", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        if not self._on:
            return
        if self._report is not None:
            self._report(text)
        elif self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, figures: dict[str, float], share: float, seconds_left: float) -> None:
        terms = "  ".join(f"{k} {v:.4g}" for k, v in figures.items() if k not in _NOT_TERMS)
        step, speed = f"step {figures['step']:.0f}", f"{figures['images_per_second']:.0f} images/s"
        left = f"{_short_time(seconds_left)} left" if seconds_left < 1e7 else ""
        rate = f"rate {figures['rate']:.2e}"
        if self._bar is not None:
            # what does not fit beside the bar is cut at its end, where the least important terms are
            text = "  ".join([step, left, speed, terms, rate])[: max(self._bar.console.width - 26, 20)]
            self._bar.update(self._task, completed=min(share, 1.0), description=text)
        else:
            self.say("  ".join([step, terms, rate, speed, left]).rstrip())


def _short_time(seconds: float) -> str:
    minutes = max(seconds, 0) / 60
    if minutes < 2:
        return f"{max(seconds, 0):.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
