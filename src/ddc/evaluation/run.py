"""The folder of a run: measured rows, the protocol that they share, and kept pictures.

Each finished row is one line of `rows-*.jsonl`; it is written at once and never measured again. `protocol.json` states
what all rows have in common. So an interrupted evaluation can continue at any time, with another number of processes
and on another computer, and a finished folder needs neither the models nor the device that it was measured with.
"""

import base64
import hashlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddc import __version__
from ddc.errors import UserError
from ddc.images import Picture
from ddc.networks import open_weights
from ddc.perceptual import Array
from ddc.solvers import SOLVERS

Row = dict[str, Any]
Key = tuple[Any, ...]
KEY = ("model", "task", "sigma", "solver", "steps")
WORST = 3  # pictures kept of the worst results of a case
# what every row holds, and of what type; the other figures are numbers as well
TEXTS = ("model", "task", "solver", "image")
NUMBERS = ("sigma", "steps", "psnr", "ssim", "ssim_paper", "lpips", "consistency", "nfe", "seconds", "batch")
LARGEST = 1e12  # of any figure
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # what a damaged file raises
# what the protocol says about the columns
EXPLANATIONS = {
    "seeds": "masks, measurement noise and sampling noise depend on the seed and the image's name; equal for all solvers",
    "measurement": "floating point, not rounded to 8 bits; sigma in [0, 1] units",
    "output": "clipped to [0, 1], not rounded",
    "psnr_ci": "half the width of the 95 % confidence interval of the mean (Student's t)",
    "ssim": "scikit-image's default, data range 1; ssim_paper with data range 2, as in the paper's tables",
    "consistency": "RMS of A x − y over observed values, relative to sigma; if sigma is 0, in [0, 1] units",
    "identity": "distance of dlib's embeddings of the largest face, over images that show one; below 0.6 it is one person",
    "fd_vgg16": "Fréchet distance of position averages of VGG16's relu5_3; it falls with n, so compare equal n",
    "fid": "of the restored pictures to those of --fid-reference; fid_truth: to the true pictures of the run",
    "spread": "standard deviation between samples; ratio: spread × √2 / RMSE of a sample, 1 for samples of the posterior",
    "crps": "continuous ranked probability score of the pixels, fair for few samples; psnr_mean: of the samples' mean",
    "coverage": "share of the pixels in their intervals of 90 %, with the factor of the model's posterior network",
    "hole": "hole_spread and hole_ratio are those of the pixels that were not observed",
    "seconds": "median per image of the solver alone, at the batch size",
}


def key_of(row: Row) -> Key:
    return tuple(row[name] for name in KEY)


def solver_label(text: str) -> str:
    """A solver's name and settings as tables show them: all but the steps, which have their own column."""
    return ":".join(part for part in text.split(":") if not part.startswith("steps="))


def solver_order(label: str) -> int:
    """The place of a solver in every table; one that is not known is last."""
    names, name = list(SOLVERS), label.partition(":")[0]
    return names.index(name) if name in names else len(names)


def pack(feature: Array) -> str:
    return base64.b64encode(feature.astype(np.float16).tobytes()).decode()


def unpack(text: str) -> Array:
    return np.frombuffer(base64.b64decode(text), np.float16).astype(np.float64)


def read_rows(folder: Path) -> tuple[list[Row], dict[str, Row]]:
    """The measured rows of a run, and the truths by image; a row that two processes measured counts once."""
    rows: dict[Key, Row] = {}
    truths: dict[str, Row] = {}
    for path in sorted(folder.glob("rows-*.jsonl")):
        lines = _read_text(path).split("\n")
        for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is incomplete
            try:
                row = json.loads(line)
                check_row(row)
            except DAMAGED:
                raise UserError(f"line {number} of {path} is damaged; delete it, and it is measured again") from None
            if "truth" in row:
                truths.setdefault(row["truth"], row)
            else:
                rows.setdefault((*key_of(row), row["image"]), row)
    return list(rows.values()), truths


def check_row(row: Row) -> None:
    """Raise one of `DAMAGED` unless a row has what the results are computed from."""
    texts = ("truth",) if "truth" in row else TEXTS
    if not all(isinstance(row[name], str) and row[name] for name in texts):
        raise ValueError
    measured = {name: row[name] for name in NUMBERS} if "truth" not in row else {"checksum": row["checksum"]}
    known = {*texts, *measured, "features", "kurtosis", "finite"}
    for value in (*measured.values(), *(value for name, value in row.items() if name not in known)):
        if isinstance(value, bool) or not abs(value) < LARGEST:
            raise ValueError
    for text in row["features"].values():
        if not np.isfinite(unpack(text)).all():
            raise ValueError
    if any(not math.isfinite(t + k) for t, k in row.get("kurtosis", [])):
        raise ValueError


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it, or copy it again") from None


def read_protocol(folder: Path) -> dict[str, Any]:
    """What all rows of a run have in common; empty if nothing was measured yet."""
    path = folder / "protocol.json"
    if not path.is_file():
        return {}
    damaged = f"{path} is damaged; copy it again, or use another --out"
    try:
        protocol: dict[str, Any] = json.loads(_read_text(path))
        tables = [protocol.get(name, {}) for name in ("models", "parts")]
        lists = [protocol.get(name, []) for name in ("hardware", "not_measured", "size")]
        texts = [model["sha256"] for model in tables[0].values()] + list(tables[1].values())
        numbers = [model.get("millions", 0) + 0.0 for model in tables[0].values()]
        numbers += [protocol.get("samples", 1) + 0]
        json.dumps(protocol, allow_nan=False)
    except DAMAGED:
        raise UserError(damaged) from None
    sound = all(isinstance(text, str) for text in texts) and all(isinstance(entry, list) for entry in lists)
    if not sound or not all(map(math.isfinite, numbers)):
        raise UserError(damaged)
    return protocol


def recorded_models(folder: Path) -> dict[str, str]:
    """The fingerprints of the models that a run was measured with."""
    return {name: model["sha256"] for name, model in read_protocol(folder).get("models", {}).items()}


def process_numbers() -> tuple[int, int]:
    """This process's number, and how many there are, as a launcher says in RANK and WORLD_SIZE."""
    texts = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    try:
        rank, world = map(int, texts.values())
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        said = ", ".join(f"{name} is {text!r}" for name, text in texts.items())
        raise UserError(f"{said}; expected RANK from 0 to WORLD_SIZE − 1, as `accelerate launch` sets them")
    return rank, world


class RunFolder:
    """All rows of a run, its protocol, and this process's own file to append to."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.world = process_numbers()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror}); choose another --out") from None
        self.folder = folder
        self.rows, self.truths = read_rows(folder)
        self.done = {(*key_of(row), row["image"]) for row in self.rows}

    def __enter__(self) -> "RunFolder":
        path = self.folder / f"rows-{self.rank}.jsonl"
        if path.exists():  # remove an incomplete last line before the next is added
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                path.write_bytes(whole)
        try:
            self.file = path.open("a", encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); choose another --out") from None
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # on a full disk; `write` has said so
            self.file.close()

    def write(self, rows: list[Row]) -> None:
        try:
            for row in rows:
                self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise UserError(f"{self.file.name} cannot be written ({error.strerror}); free space and continue") from None
        if not Path(self.file.name).exists():
            raise UserError(f"{self.file.name} was deleted or moved during the run, which ends here; start it again")
        self.rows += [row for row in rows if "image" in row]

    def check(self, fixed: dict[str, Any], models: Mapping[str, str], parts: dict[str, str]) -> None:
        """Refuse other settings or weights than those of the rows here, which could not be compared.

        The computer may be another one.
        """
        old = read_protocol(self.folder)
        before, known = old.get("parts", {}), recorded_models(self.folder)
        differences = [f"{k} {old.get(k)} (now {fixed[k]})" for k in fixed if old and old.get(k) != fixed[k]]
        differences += [
            f"model {name}: other weights"
            for name, now in models.items()
            if name in known and not self._same_for_rows(name, known[name], now)
        ]
        differences += [f"{name}: other weights" for name in parts if before.get(name, parts[name]) != parts[name]]
        if differences:
            raise UserError(f"{self.folder} was measured with {', '.join(differences)}; use another --out")

    def _same_for_rows(self, model: str, before: str, now: str) -> bool:
        """Whether a model's rows would be the same now. Those of solvers that use its prior alone stay valid when
        its network changes."""
        if before == now:
            return True
        used = {row["solver"].partition(":")[0] for row in self.rows if row["model"] == model}
        without = all(name in SOLVERS and "network" not in SOLVERS[name].needs for name in used)
        return without and before.rpartition("-")[2] == now.rpartition("-")[2]

    def check_pictures(self, checksums: dict[str, int]) -> None:
        """Refuse a picture that has changed since it was measured."""
        for name, checksum in checksums.items():
            if name in self.truths and self.truths[name]["checksum"] != checksum:
                raise UserError(f"{name} is another picture than the one measured in {self.folder}; use another --out")

    def save_protocol(self, changes: dict[str, Any], **added: Any) -> None:
        """Update protocol.json. `added` extends the lists and tables that are there: models, parts, hardware, …"""
        if self.rank:
            return
        protocol = read_protocol(self.folder) | changes
        for name, value in added.items():
            if isinstance(value, dict):
                protocol[name] = protocol.get(name, {}) | value
            else:
                protocol[name] = list(dict.fromkeys([*protocol.get(name, []), *value]))
        path = self.folder / "protocol.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(protocol, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def wait_for_all(self) -> None:
        """Return when every process has come here."""
        if self.world > 1:
            import torch.distributed as dist

            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=timedelta(days=7))
            dist.barrier()


# ---------------------------------------------------------------------------------------------------------
# what the protocol states


def machine(device: torch.device, compiled: bool) -> str:
    """The hardware that rows were measured on, and the versions."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    versions = f"ddc {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{name} ({versions}{', compiled' if compiled else ''})"


def weight_files(folder: Path) -> dict[str, Path]:
    """The configurations and weights of a folder's networks, by their names in it."""
    settings, seen, files = {"config.json", "scheduler_config.json"}, set(), []
    for place, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(place))
        folders[:] = [
            name for name in folders if os.path.realpath(Path(place, name)) not in seen
        ]  # links go in circles
        found = (Path(place, name) for name in names)
        files += [path for path in found if path.name in settings or path.suffix == ".safetensors"]
    return {path.relative_to(folder).as_posix(): path for path in sorted(files)}


def fingerprint(files: dict[str, Path]) -> str:
    """A hash of files and their names."""
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def parameter_count(files: Iterable[Path]) -> float:
    """Millions of numbers in the safetensors among files."""
    total = 0
    for path in (path for path in files if path.suffix == ".safetensors"):
        with open_weights(path) as file:
            total += sum(int(np.prod(file.get_slice(key).get_shape())) for key in file.keys())  # noqa: SIM118
    return round(total / 1e6, 2)


# ---------------------------------------------------------------------------------------------------------
# pictures


def picture_paths(run: Path, row: Row, samples: int = 1) -> list[Path]:
    """The files of the truth, the measurement and the samples of a row; none lies outside the run."""

    def safe(name: str) -> str:
        name = re.sub(r"[/\\:=\0]", lambda found: "-" if found[0] in ":=" else "_", name)
        return name.replace(".", "_") if set(name) == {"."} else name

    setting, name = safe(f"{row['task']}-{row['sigma']:g}"), safe(row["image"]).removesuffix(".png")
    folder = run / "pictures"
    case = folder / safe(row["model"]) / setting / safe(f"{row['solver']}-{row['steps']}")
    others = [case / "samples" / f"{name}-{k}.png" for k in range(1, samples)]
    return [folder / "truth" / f"{name}.png", folder / "y" / setting / f"{name}.png", case / f"{name}.png", *others]


def write_pictures(paths: Sequence[Path], pictures: Sequence[Tensor]) -> None:
    """The truth and the measurement if another case did not write them yet, and the samples."""
    for i, (path, picture) in enumerate(zip(paths, pictures, strict=True)):
        if i > 1 or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Picture.from_tensor(picture.clamp(0, 1), bits=8).write(path)


class Gallery:
    """Keeps the pictures of one case for the report: those in `keep`, and the `worst` ones by LPIPS so far."""

    def __init__(self, run: RunFolder, key: Key, keep: set[str], worst: int, executor: Executor) -> None:
        self.folder, self.keep, self.count, self.executor = run.folder, keep, worst, executor
        self.samples = 1
        self.lpips = {row["image"]: row["lpips"] for row in run.rows if key_of(row) == key}

    def offer(self, rows: Sequence[Row], pictures: Iterable[Sequence[Tensor]]) -> list["Future[None]"]:
        """Hand what is kept to the writer: truth, measurement and samples of each row. Others are deleted again."""
        before = self.worst()
        self.lpips |= {row["image"]: row["lpips"] for row in rows}
        after = self.worst()
        jobs = []
        for row, kinds in zip(rows, pictures, strict=True):
            if row["image"] in self.keep | after:
                paths = picture_paths(self.folder, row, len(kinds) - 2)
                jobs.append(self.executor.submit(write_pictures, paths, [kind.cpu() for kind in kinds]))
                self.samples = len(kinds) - 2
        for loser in before - after - self.keep:
            for path in picture_paths(self.folder, rows[0] | {"image": loser}, self.samples)[2:]:
                jobs.append(self.executor.submit(path.unlink, missing_ok=True))
        return jobs

    def worst(self) -> set[str]:
        return set(sorted(self.lpips, key=self.lpips.__getitem__, reverse=True)[: self.count])


# ---------------------------------------------------------------------------------------------------------
# progress


class Timer:
    """Whether there is time for another batch of a solver, by what the last ones took."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.last: dict[Key, float] = {}
        self.rate = 0.0  # seconds of one evaluation of the last batch, for a solver that did not run yet

    def late(self, expected: float = 0.0) -> bool:
        return self.deadline is not None and time.monotonic() + expected >= self.deadline

    def allows(self, solver: Key, evaluations: int) -> bool:
        return not self.late(self.last.get(solver, self.rate * evaluations))

    def took(self, solver: Key, evaluations: int, seconds: float) -> None:
        self.last[solver] = seconds
        if evaluations:
            self.rate = seconds / evaluations


@contextmanager
def progress(total: int, hidden: bool = False) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr with the remaining time, or lines if that is no terminal. Yields the function that advances it."""
    if hidden:
        yield lambda count, text: None
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("measuring", total=total)
            yield lambda count, text: bar.update(task, advance=count, description=text)
        return
    started = printed = time.monotonic()
    done, last = 0, ""

    def say() -> None:
        seconds = time.monotonic() - started
        print(f"measured {done} of {total} in {seconds:.0f} s: {last}", file=sys.stderr, flush=True)

    def advance(count: int, text: str) -> None:
        nonlocal done, printed, last
        done, last = done + count, text
        if time.monotonic() - printed >= 10:  # seconds between lines
            printed = time.monotonic()
            say()

    yield advance
    say()


@dataclass(frozen=True)
class EvaluationResult:
    """How many rows there are, and what was not measured."""

    skipped: list[str]  # what cannot run, and why
    left: dict[Key, int]  # pictures that are still to be measured, by the case's key
    rows: int  # of these cases
    rank: int  # the number of this process
    unfinished: str  # what is missing because the time was up
    notes: list[str]  # what a report says first: what is missing, and what cannot run

    @staticmethod
    def of(out: Path, wanted: dict[Key, list[str]], skipped: dict[Key, str], total: int) -> "EvaluationResult":
        """What is there now, of all processes, of the images wanted of each case; `total` is the number of images."""
        done = {(*key_of(row), row["image"]) for row in read_rows(out)[0]}
        there = {key: sum((*key, image) in done for image in images) for key, images in wanted.items()}
        left = {
            k: len(images) - there[k] for k, images in wanted.items() if there[k] < len(images) and k not in skipped
        }
        few = {key[3]: len(images) for key, images in wanted.items() if len(images) < total}
        reasons: dict[str, list[str]] = {}
        for (_, task, _, label, _), reason in skipped.items():
            what = f"{label} on {task}"
            if what not in reasons.setdefault(reason, []):
                reasons[reason].append(what)
        lines = [f"{', '.join(whats)}: {reason}" for reason, whats in reasons.items()]
        rows, notes = sum(there.values()), [f"Not run: {line}" for line in lines]
        if few:
            most = max(few.values())
            pictures = "one picture" if most == 1 else f"{most} pictures"
            notes.insert(0, f"Measured on {pictures} only, because they are slow: {', '.join(few)}.")
        unfinished = _missing(left, rows)
        rank, _ = process_numbers()
        return EvaluationResult(lines, left, rows, rank, unfinished, [unfinished, *notes] if unfinished else notes)


def _missing(left: dict[Key, int], rows: int) -> str:
    """Which rows are missing, for people."""
    each = []
    for label in dict.fromkeys(key[3] for key in left):
        settings = list(dict.fromkeys(f"{key[1]} σ={key[2]:g}" for key in left if key[3] == label))
        where = ", ".join(settings) if len(settings) <= 3 else f"{len(settings)} settings"
        each.append(f"{label}: {sum(n for key, n in left.items() if key[3] == label)} in {where}")
    if not each:
        return ""
    total = sum(left.values())
    return (
        f"The time was up: {total} of {rows + total} rows are missing ({', '.join(each)}). "
        "Run the same command again to measure them."
    )
