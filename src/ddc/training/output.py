"""What a run writes and shows: checkpoints, exported models, logs, example pictures and progress.

A checkpoint is a folder of safetensors and JSON: weights, averaged weights, optimiser moments, the state of the
objective, and the counters from which every random number follows. It is written beside the last one and renamed
when it is complete, so that `latest` is never broken.
"""

import glob
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.latents import Autoencoder, LatentPrior
from ddc.networks import check_fit, read_weights, save_weights
from ddc.priors import DataConsistency, Prior
from ddc.solvers.bridge import Bridge
from ddc.solvers.pnp_admm import DnCNN
from ddc.solvers.posterior import PosteriorDenoiser

LATEST, RECORD = "latest", "record.json"
# what a save writes before it renames; "partial" is that of older versions
_TEMPORARY = re.compile(rf"\.(step-\d+(-\d+)?|{LATEST})\.[0-9a-f]{{8}}|step-\d+\.partial")
MODELS: dict[str, Any] = {
    kind.__name__: kind for kind in (Prior, DataConsistency, PosteriorDenoiser, Bridge, DnCNN, Autoencoder, LatentPrior)
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "8bit": torch.int8}
_NOT_TERMS = ("step", "rate", "images_per_second")


# -- checkpoints ---------------------------------------------------------------------------------------------

State = tuple[dict[str, dict[str, Tensor]], dict[str, Any]]  # the tensors and the record of a checkpoint


def write_checkpoint(
    folder: Path, name: str, tensors: dict[str, dict[str, Tensor]], record: dict[str, Any], keep: int = 2
) -> Path:
    """Save a checkpoint and make it the latest. Nothing is removed or overwritten before it is complete."""
    names = [name, *(f"{name}-{i}" for i in range(1, 1000))]  # a run that began again reaches the same steps
    partial, final = folder / f".{name}.{uuid4().hex[:8]}", folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        final = next(folder / name for name in names if not os.path.lexists(folder / name))
        partial.mkdir()
        for part, content in tensors.items():
            flat = {k: v.detach().to("cpu").contiguous() for k, v in content.items()}
            save_file(flat, partial / f"{part}.safetensors")
        record = record | {"tensors": {part: len(content) for part, content in tensors.items()}}
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        _settle(partial, partial / RECORD)
        partial.rename(final)
        pointer = folder / f".{LATEST}.{uuid4().hex[:8]}"
        pointer.write_text(final.name + "\n")
        _sync(pointer, folder)
        pointer.replace(folder / LATEST)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"the checkpoint {final} could not be written ({error}); the previous one is untouched"
        ) from None
    _prune(folder, final, keep)
    return final


def _settle(folder: Path, model: Path) -> None:
    """Give the weights in a folder the mode of the file `model`, for safetensors are private, and sync all to the disk."""
    weights = [*folder.rglob("*.safetensors")]
    for path in weights:
        shutil.copymode(model, path)
    _sync(*weights, model, folder)


def _sync(*paths: Path) -> None:
    for path in paths if os.name != "nt" else ():  # where folders cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove older checkpoints, and what a killed run left. A folder with other files in it stays."""
    leftovers = [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]
    # by age and not by step: a run that began again has fewer steps than what it replaces
    for old in _checkpoints(folder)[keep:] if keep > 0 else []:
        if old != newest and not _foreign(old):
            leftovers.append(old.rename(folder / f".{old.name}.{uuid4().hex[:8]}"))  # at once, not file by file
    for path in leftovers:
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif not _foreign(path):
            shutil.rmtree(path, ignore_errors=True)


def _foreign(folder: Path) -> bool:
    """Whether a folder holds anything that is not part of a checkpoint."""
    return any(path.is_dir() or (path.name != RECORD and path.suffix != ".safetensors") for path in folder.iterdir())


def _checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run that have a record, the newest first."""
    found = folder.glob(f"[!.]*/{RECORD}")
    return [path.parent for path in sorted(found, key=lambda p: (p.stat().st_mtime_ns, str(p)), reverse=True)]


def read_latest(folder: Path, say: Callable[[str], None]) -> tuple[Path, State] | None:
    """The checkpoint that `latest` names, or else the newest that is complete; None if there never was one."""
    try:
        found, pointer = _checkpoints(folder), folder / LATEST
        if not found and not pointer.exists() and not [*folder.glob("step-*")]:
            return None
        name = pointer.read_bytes().decode(errors="replace").strip() if pointer.is_file() else ""
    except OSError as error:
        raise UserError(
            f"the checkpoints in {folder} cannot be read ({error}); begin again with another --out"
        ) from None
    named = [path for path in found if path.name == name]
    problem = f"{LATEST} names no checkpoint" if not named else ""
    for path in named + [path for path in found if path.name != name]:
        try:
            state = read_checkpoint(path)
        except UserError as error:
            problem = problem or str(error)
            continue
        if problem:
            say(f"{problem}; {path.name} is used instead")
        return path, state
    raise UserError(
        f"{folder} has no complete checkpoint ({problem}); begin again with another --out, or with --no-resume"
    )


def read_checkpoint(path: Path) -> State:
    """The tensors and the record of a checkpoint, which must be complete and finite."""
    try:
        record = json.loads((path / RECORD).read_text())
        if not isinstance(record, dict):
            raise ValueError(f"{RECORD} holds no JSON object")
        _check_record(record)
        tensors = {p.stem: load_file(p) for p in path.glob("*.safetensors")}
        counts = record.get("tensors", {})
        for part in {"weights", "average", "optimiser", *counts}:
            if not tensors.get(part) or len(tensors[part]) != counts.get(part, len(tensors[part])):
                raise ValueError(f"{part}.safetensors is missing or incomplete")
            for name, tensor in tensors[part].items():
                if tensor.is_complex() or not tensor.isfinite().all():
                    raise ValueError(f"{name} in {part}.safetensors is not finite")
    except (ValueError, RecursionError, OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the checkpoint {path} cannot be read ({reason})") from None
    return tensors, record


def _check_record(record: dict[str, Any]) -> None:
    """Raise ValueError unless a record has what `resume` needs."""
    positions = record.get("positions", [record.get("position")])
    whole = [record.get("step"), *(positions if isinstance(positions, list) and positions else [None])]
    if any(type(number) is not int or not 0 <= number < 2**48 for number in whole):
        raise ValueError(f"step or position in {RECORD} is not a whole number from 0 on")
    seconds = record.get("seconds")
    if type(seconds) not in (int, float) or not 0 <= seconds < 1e12:  # type: ignore[operator]
        raise ValueError(f"seconds in {RECORD} is not a number from 0 on")
    if not isinstance(record.get("settings"), dict) or not isinstance(record.get("tensors", {}), dict):
        raise ValueError(f"settings or tensors in {RECORD} is no JSON object")


def weights_fingerprint(module: nn.Module) -> str:
    """A short hash of the beginning of every tensor: enough to tell one trained network from another."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


# -- exported models -----------------------------------------------------------------------------------------


def check_replaceable(folder: Path) -> None:
    """Refuse a folder with files that are not part of an exported model: exporting would delete them."""
    if folder.is_file():
        raise UserError(f"{folder} is a file, which would be replaced by a folder; name a new folder")
    ours = ("config.json", "scheduler_config.json", ".safetensors", ".safetensors.index.json")
    try:
        for path in folder.rglob("*") if folder.exists() else ():
            if not path.is_dir() and not path.name.endswith(ours):
                raise UserError(
                    f"{folder} would be replaced, but {path.relative_to(folder)} in it is not part of a model; "
                    "name a new folder, or move the file"
                )
        inside = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error}); name a new folder") from None
    if others := inside - {"unet", "scheduler", "vae"}:  # the folders of a prior; others are models of their own
        raise UserError(f"{folder} would be replaced with the folder {min(others)} in it; name a new folder")


def recover_model(folder: Path) -> None:
    """Put back the model that was moved aside when a process was killed between the two renames of an export."""
    for moved in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.ddc-*/old")):
        if not folder.exists():
            moved.rename(folder)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which replaces `folder` once it is complete. Only a model is replaced."""
    check_replaceable(folder)
    temporary = folder.parent / f".{folder.name}.ddc-{uuid4().hex[:8]}"
    new, old = temporary / "new", temporary / "old"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        recover_model(folder)
        new.mkdir(parents=True)
        yield new
        _settle(new, next(new.rglob("*.json")))
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} could not be written ({error}); what was there is untouched") from None
    finally:
        recover_model(folder)
        for path in folder.parent.glob(f".{glob.escape(folder.name)}.ddc-*"):
            with suppress(UserError, OSError):  # of another program's files
                for part in path.iterdir():
                    check_replaceable(part)
                shutil.rmtree(path, ignore_errors=True)


def save_model(
    model: Any,
    out: Path,
    state: dict[str, Tensor],
    remarks: dict[str, Any],
    dtype: str,
    shard_mb: float | None,
) -> None:
    """Write a model folder with these weights; `remarks` are added to its configuration."""
    number_format = DTYPES[dtype]
    with _replaced(out) as folder:
        model.save_pretrained(folder, state=state, dtype=number_format, shard_mb=shard_mb, extra_config=remarks)


def export_model(model: Path, out: Path, dtype: str, shard_mb: float | None) -> None:
    """Write a model folder again, with weights of another data type."""
    settings = [path for path in sorted(model.rglob("*.json")) if ".safetensors.index" not in path.name]
    with _replaced(out) as folder:
        for path in settings:
            place = folder / path.relative_to(model)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
            if any(path.parent.glob("*.safetensors")) and path.name == "config.json":
                save_weights(read_weights(path.parent), place.parent, DTYPES[dtype], shard_mb)


def export_run(run: Path, out: Path, dtype: str = "fp32", shard_mb: float | None = None) -> int | None:
    """Write the model of a run's latest checkpoint, or a model folder, into the folder `out`. Returns the checkpoint's step."""
    if shard_mb is not None and not 0 < shard_mb < math.inf:
        raise UserError(f"--shard-mb is {shard_mb}; expected a number above 0")
    if not (run / "checkpoints").is_dir() and any(run.glob("**/config.json")):
        export_model(run, out, dtype, shard_mb)
        return None
    found = read_latest(run / "checkpoints", lambda text: print(text, file=sys.stderr))
    if found is None:
        raise UserError(f"{run} has no checkpoint; expected the --out folder of `ddc train`")
    if (out / "checkpoints").exists():
        raise UserError(f"{out} is a run's folder, which would be replaced; name a new folder")
    path, (tensors, record) = found
    model = record.get("model")
    kind, folder, remarks = (
        model.get(key) if isinstance(model, dict) else None for key in ("class", "folder", "remarks")
    )
    if kind not in MODELS or not isinstance(folder, str) or not isinstance(remarks, dict):
        raise UserError(f"{path} does not say what network it holds; resume the run once, and export again")
    recover_model(run / folder)
    loaded = MODELS[kind].from_pretrained(run / folder)
    check_fit(getattr(loaded, "unet", loaded), {name: one.shape for name, one in tensors["average"].items()}, path)
    save_model(loaded, out, tensors["average"], remarks, dtype, shard_mb)
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
