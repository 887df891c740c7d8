"""The benchmark: every solver on the same pictures, measurements and seeds; one row for each restored picture.

A run is a folder. Each finished row is one line of `rows-*.jsonl`, written at once and never measured again;
`protocol.json` says what all rows of the folder have in common. Nothing else is kept, so that an interrupted
evaluation goes on where it stopped, with as many processes as there are then.
"""

import base64
import dataclasses
import hashlib
import json
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from ddc import __version__
from ddc.consistency import DataConsistency
from ddc.errors import UserError
from ddc.evaluation.metrics import Array, Metrics, consistency, kurtosis, spread
from ddc.images import Picture, to_internal, to_unit
from ddc.noise import Noise, derive_seed
from ddc.priors import Prior
from ddc.problems import Problem, make_problem, measure_named
from ddc.solvers import SOLVERS
from ddc.solvers.base import Solver, Step
from ddc.training.data import decode, find_sources

Row = dict[str, Any]
T = TypeVar("T")
Precision = Literal["fp32", "bf16", "fp16"]
KEY = ("model", "task", "sigma", "solver", "steps")
WORST = 3  # pictures kept of the worst results of each case
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One solver with one model on one task: a row of the table."""

    model: str
    task: str
    sigma: float
    label: str  # the solver's name, and the settings that are not its defaults
    solver: Solver

    @property
    def key(self) -> tuple[str, str, float, str, int]:
        return self.model, self.task, self.sigma, self.label, self.solver.steps

    @property
    def folder(self) -> str:
        label = self.label.replace(":", "-").replace("=", "-")
        return f"{self.model}/{self.task}-{self.sigma:g}/{label}-{self.solver.steps}"


@dataclass(frozen=True)
class Image:
    """A clean picture, cropped: uint8 (3, H, W)."""

    name: str
    pixels: Tensor

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.pixels.numpy().tobytes())


@dataclass(frozen=True)
class Options:
    """How to measure."""

    out: Path
    batch_size: int = 1
    seed: int = 0
    device: str = "cpu"
    precision: Precision = "fp32"
    samples: int = 1
    """Restorations of each measurement; the figures are the first one's, the spread is between all of them."""
    trace: bool = False
    """Keep the kurtosis of ε̂ of every step."""
    keep: int = 4
    """Pictures to keep of each case for the report, beside the worst ones."""
    inception: Path | None = None


# ---------------------------------------------------------------------------------------------------------
# what is measured


def load_images(path: Path, size: int = 256, limit: int | None = None) -> list[Image]:
    """The centres of the pictures in a folder or tar archive; `limit` takes that many, evenly over the names."""
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a folder or a .tar archive of pictures (--images)")
    sources = find_sources([path])
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise UserError(f"{path} holds two pictures of one name; rows are kept by name, so names must differ")
    if limit is not None:
        if limit < 1:
            raise UserError(f"the limit is {limit}; expected at least one picture")
        sources = evenly(sources, limit)
    images = []
    for source in sources:
        pixels = decode(source)
        if pixels is None:
            raise UserError(f"{source.name} in {path} cannot be read; remove it, or copy it again")
        images.append(Image(source.name, crop_centre(pixels, size, source.name)))
    return images


def evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, spread over all of them; a smaller count takes a part of a larger one's where it
    divides it."""
    return list(items[:: max(len(items) // max(count, 1), 1)][:count])


def bundled_images(size: int = 256, limit: int | None = None) -> list[Image]:
    """Four photographs that come with scikit-image, for a first look without any data."""
    from skimage import data

    images = []
    for name in ("astronaut", "coffee", "cat", "rocket")[:limit]:
        pixels = torch.from_numpy(np.array(getattr(data, name)())).permute(2, 0, 1)
        images.append(Image(name, crop_centre(pixels, size, name)))
    return images


def crop_centre(pixels: Tensor, size: int, name: str) -> Tensor:
    height, width = pixels.shape[1:]
    if min(height, width) < size:
        raise UserError(f"{name} has {width}×{height} pixels; expected at least {size}×{size} for its centre")
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[:, top : top + size, left : left + size].contiguous()


def parse_solver(text: str) -> tuple[str, Solver]:
    """A solver from "ddnm", or with settings: "pigdm:noise_blind=true:steps=50". Also its label: all but steps."""
    name, *settings = text.split(":")
    if name not in SOLVERS:
        raise UserError(f"there is no solver {name!r}; expected one of {', '.join(SOLVERS)}")
    kind = SOLVERS[name]
    fields = {field.name for field in dataclasses.fields(kind)}
    values = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in fields or not value:
            raise UserError(
                f"{name} has no setting {setting!r}; expected name=value with one of {sorted(fields)}"
            )
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    label = ":".join([name, *(s for s in settings if not s.startswith("steps="))])
    return label, kind(**values)


def cap_evaluations(solver: Solver, max_nfe: int | None) -> Solver:
    """The solver with as many steps as `max_nfe` network evaluations allow; never fewer than two."""
    if max_nfe is None:
        return solver
    while solver.evaluations() > max_nfe and solver.steps > 2:
        fewer = solver.steps * max_nfe // solver.evaluations()
        solver = dataclasses.replace(solver, steps=min(max(fewer, 2), solver.steps - 1))
    return solver


class Models:
    """The folders of the models by their names, read when they are needed.

    `priors` names another folder to take a model's prior from. A model that is a network alone uses the first
    model's.
    """

    def __init__(
        self, folders: dict[str, Path], device: str = "cpu", priors: dict[str, Path] | None = None
    ) -> None:
        if not folders:
            raise UserError("no model was given; expected a folder with prior/ and network/ (--model)")
        for folder in folders.values():
            if not folder.is_dir():
                raise UserError(f"the model {folder} is not a folder; expected one with prior/ and network/")
        self.folders = folders
        self.device = device
        self.priors = priors or {}
        self._loaded: dict[tuple[str, ...], Any] = {}

    def prior_folder(self, name: str) -> Path:
        own = self.priors.get(name, self.folders[name])
        folder = own if (own / "prior").is_dir() else next(iter(self.folders.values()))
        return folder / "prior" if (folder / "prior").is_dir() else folder

    def prior(self, name: str) -> Prior:
        folder = self.prior_folder(name)
        return self._once(("prior", str(folder)), lambda: Prior.from_pretrained(folder).requires_grad_(False))

    def network(self, name: str) -> DataConsistency:
        folder = self.folders[name] / "network"
        if not folder.is_dir():
            raise UserError(f"the model {self.folders[name]} has no network/; train one with `ddc train ddc`")
        return self._once(("network", str(folder)), lambda: DataConsistency.from_pretrained(folder))

    def parts(self, case: Case, problem: Problem) -> tuple[Any, dict[str, Any]]:
        """What the case's solver takes, on the device: the prior, or None where it has no use for one, and more."""
        needs = case.solver.needs
        own = self._once(
            (case.label, problem.name, case.model),
            lambda: case.solver.load_parts(self.folders[case.model], problem),
        )
        parts = dict(own)
        if "network" in needs:
            parts["network"] = self.network(case.model)
        return self.prior(case.model) if "prior" in needs else None, parts

    def distinct_for(self, solver: Solver) -> list[str]:
        """The models that this solver can tell apart: all by their networks, or those of different priors."""
        names = list(self.folders)
        if "network" in solver.needs:
            return names
        if "prior" not in solver.needs:
            return names[:1]
        first = {fingerprint(self.prior_folder(name)): name for name in reversed(names)}
        return [name for name in names if name in first.values()]

    def _once(self, key: tuple[str, ...], load: Callable[[], Any]) -> Any:
        if key not in self._loaded:
            loaded = load()
            # channels last is what the GPU's half-precision convolutions want
            layout = torch.channels_last if self.device.startswith("cuda") else torch.preserve_format
            for part in loaded.values() if isinstance(loaded, dict) else [loaded]:
                part.to(self.device, memory_format=layout)
            self._loaded[key] = loaded
        return self._loaded[key]


def fingerprint(folder: Path) -> str:
    """A hash of a model folder's settings and weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".json", ".safetensors"}:
            digest.update(path.relative_to(folder).as_posix().encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()[:16]


def make_cases(
    models: Models,
    tasks: Sequence[str],
    sigmas: Sequence[float],
    solvers: Sequence[str],
    steps: Sequence[int] = (),
    max_nfe: int | None = None,
) -> list[Case]:
    """All combinations that differ: a solver runs once for models that are the same to it."""
    cases = []
    for task in tasks:
        for sigma in sigmas:
            for text in solvers:
                label, solver = parse_solver(text)
                repeated = steps and solver.evaluations()
                runs = [dataclasses.replace(solver, steps=n) for n in steps] if repeated else [solver]
                for model in models.distinct_for(solver):
                    for run in runs:
                        cases.append(Case(model, task, float(sigma), label, cap_evaluations(run, max_nfe)))
    return list({case.key: case for case in cases}.values())  # capped runs can coincide


# ---------------------------------------------------------------------------------------------------------
# measuring


def evaluate(
    cases: Sequence[Case],
    images: Sequence[Image],
    models: Models,
    options: Options,
    protocol: dict[str, Any] | None = None,
) -> list[str]:
    """Measure every case on every image that has no row yet. Returns what could not be run, and why.

    Under several processes (RANK and WORLD_SIZE set, as `accelerate launch` does) each takes its share of the
    images; all return when all are done.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    options.out.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(options.device, options.inception)
    write_protocol(options, models, images, metrics, protocol or {}, check_only=rank > 0)
    share = list(images)[rank::world]
    skipped: list[tuple[str, str]] = []  # what, and why
    with RowFile(options.out, rank) as rows:
        check_truth(rows, share, metrics, options.batch_size)
        runnable: list[tuple[Case, list[Image]]] = []
        for case in cases:
            pending = [image for image in share if (*case.key, image.name) not in rows.done]
            reason = why_not(case, models, images[0])
            if reason:
                skipped.append((f"{case.label} on {case.task}", reason))
            elif pending:
                runnable.append((case, pending))
        if cases and len(skipped) == len(cases):
            raise UserError(f"nothing can be measured: {': '.join(skipped[0])}")
        with progress(sum(len(pending) for _, pending in runnable), hidden=rank > 0) as advance:
            kept = {image.name for image in evenly(images, options.keep)}
            for case, pending in runnable:
                gallery = Gallery(options.out / "pictures", case, kept, rows.values(case, "lpips"))
                for start in range(0, len(pending), options.batch_size):
                    batch = pending[start : start + options.batch_size]
                    rows.write(restore_batch(case, batch, models, metrics, options, gallery))
                    advance(len(batch), f"{case.task} σ={case.sigma:g} {case.label}")
    if world > 1:
        wait_for_all()
    reasons: dict[str, list[str]] = {}
    for what, reason in dict.fromkeys(skipped):
        reasons.setdefault(reason, []).append(what)
    return [f"{', '.join(whats)}: {reason}" for reason, whats in reasons.items()]


def why_not(case: Case, models: Models, image: Image) -> str | None:
    """Why a case cannot be run: the solver's maths does not take the task, or a network is missing."""
    problem = make_problem(
        case.task, case.sigma, size=(image.pixels.shape[1], image.pixels.shape[2]), seeds=[0]
    )
    try:
        case.solver.check(problem)
        models.parts(case, problem)
    except UserError as error:
        return str(error)
    return None


def restore_batch(
    case: Case, batch: list[Image], models: Models, metrics: Metrics, options: Options, gallery: "Gallery"
) -> list[Row]:
    """The rows of a few images: measure, restore, compare."""
    device = torch.device(options.device)
    truth = torch.stack([image.pixels for image in batch]).to(device).float() / 255
    x = to_internal(truth)
    problem, y = measure_named(case.task, case.sigma, x, [image.name for image in batch], options.seed)
    prior, parts = models.parts(case, problem)
    trace: list[tuple[int, list[float]]] = []

    def watch(step: Step) -> None:
        if step.noise is not None:
            trace.append((step.t, [round(float(k), 4) for k in kurtosis(step.noise)]))

    samples = []
    started = 0.0
    for k in range(options.samples):
        seeds = [derive_seed(options.seed, f"solve/{image.name}" + (f"/{k}" if k else "")) for image in batch]
        autocast = (
            torch.autocast(device.type, DTYPES[options.precision])
            if options.precision != "fp32"
            else nullcontext()
        )
        synchronise(device)
        started = time.perf_counter() if k == 0 else started
        with torch.no_grad(), autocast:
            restored = case.solver.solve(
                y,
                problem,
                prior,
                Noise(seeds, device=device),
                watch if options.trace and k == 0 else None,
                **parts,
            ).float()
        synchronise(device)
        if k == 0:
            seconds = (time.perf_counter() - started) / len(batch)
        samples.append(restored)

    finite = torch.isfinite(samples[0]).flatten(1).all(1)
    pictures = [to_unit(torch.nan_to_num(sample, nan=0.0)) for sample in samples]  # what a person would get
    values, features = metrics(pictures[0], truth)
    values["consistency"] = consistency(to_internal(pictures[0]), y, problem).tolist()
    if options.samples > 1:
        values["spread"] = spread(torch.stack(pictures)).tolist()
    rows = []
    for i, image in enumerate(batch):
        row: Row = dict(zip(KEY, case.key, strict=True)) | {"image": image.name}
        row |= {name: round(column[i], 7) for name, column in values.items()}
        row |= {"nfe": case.solver.evaluations(), "seconds": round(seconds, 6), "batch": len(batch)}
        if not bool(finite[i]):
            row["finite"] = False
        if trace:
            row["kurtosis"] = [[t, column[i]] for t, column in trace]
        row["features"] = {name: pack(table[i]) for name, table in features.items()}
        rows.append(row)
        gallery.offer(
            image.name, row["lpips"], pictures[0][i], truth[i], to_unit(problem.operator.to_image(y)[i])
        )
    return rows


def check_truth(rows: "RowFile", images: list[Image], metrics: Metrics, batch_size: int) -> None:
    """The truth's own features, once for each image; an image that has changed since is refused."""
    for image in images:
        known = rows.truths.get(image.name)
        if known is not None and known["checksum"] != image.checksum:
            raise UserError(
                f"{image.name} is another picture than the one measured in {rows.folder}; use another --out"
            )
    unknown = [image for image in images if image.name not in rows.truths]
    for start in range(0, len(unknown), batch_size):
        batch = unknown[start : start + batch_size]
        features = metrics.features(torch.stack([image.pixels for image in batch]).float() / 255)
        fresh = []
        for i, image in enumerate(batch):
            packed = {name: pack(table[i]) for name, table in features.items()}
            fresh.append({"truth": image.name, "checksum": image.checksum, "features": packed})
        rows.write(fresh)


def pack(feature: Array) -> str:
    return base64.b64encode(feature.astype(np.float16).tobytes()).decode()


def unpack(text: str) -> Array:
    return np.frombuffer(base64.b64decode(text), np.float16).astype(np.float64)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wait_for_all() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    dist.barrier()


# ---------------------------------------------------------------------------------------------------------
# the run's folder


class RowFile:
    """All rows of a run, and this process's own file to append to."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.path = folder / f"rows-{rank}.jsonl"
        self.rows, self.truths = read_rows(folder)
        self.done = {(*(row[k] for k in KEY), row["image"]) for row in self.rows}

    def __enter__(self) -> "RowFile":
        if self.path.exists():  # a line that was cut short by a kill is taken away before the next is added
            data = self.path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                self.path.write_bytes(whole)
        self.file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.rows += [row for row in rows if "image" in row]

    def values(self, case: Case, name: str) -> dict[str, float]:
        return {row["image"]: row[name] for row in self.rows if tuple(row[k] for k in KEY) == case.key}


def read_rows(folder: Path) -> tuple[list[Row], dict[str, Row]]:
    """The measured rows of a run, and the truths by image; a row that two processes measured counts once."""
    rows: dict[tuple[Any, ...], Row] = {}
    truths: dict[str, Row] = {}
    for path in sorted(folder.glob("rows-*.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines[:-1], 1):  # what follows the last newline was cut short
            try:
                row = json.loads(line)
            except ValueError:
                raise UserError(
                    f"line {number} of {path} is damaged; delete that line, it is measured again"
                ) from None
            if "truth" in row:
                truths.setdefault(row["truth"], row)
            else:
                rows.setdefault((*(row[k] for k in KEY), row["image"]), row)
    return list(rows.values()), truths


def write_protocol(
    options: Options,
    models: Models,
    images: Sequence[Image],
    metrics: Metrics,
    extra: dict[str, Any],
    check_only: bool = False,
) -> None:
    """What all rows have in common. A run of other settings is refused: its rows could not be compared."""
    path = options.out / "protocol.json"
    old: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    fixed = {
        "seed": options.seed,
        "size": list(images[0].pixels.shape[1:]),
        "precision": options.precision,
        "samples": options.samples,
    }
    prints = {
        name: f"{fingerprint(folder)}-{fingerprint(models.prior_folder(name))}"
        for name, folder in models.folders.items()
    }
    known = old.get("models", {})
    differences = [f"{k} {old[k]} (now {fixed[k]})" for k in fixed if old and old.get(k) != fixed[k]]
    differences += [
        f"model {k}: other weights" for k in prints if k in known and known[k]["sha256"] != prints[k]
    ]
    if differences:
        raise UserError(f"{options.out} was measured with {', '.join(differences)}; use another --out")
    if check_only:
        return
    parameters = {}
    for name, folder in models.folders.items():
        parameters[name] = {
            "sha256": prints[name],
            "millions": parameter_count(folder),
            "name": folder.resolve().name,
        }
    protocol = (
        old
        | fixed
        | {
            "models": known | parameters,
            "seeds": "masks, measurement noise and sampling noise from (seed, image name), equal for all solvers",
            "measurement": "floating point, not rounded to 8 bits; sigma in [0, 1] units",
            "output": "clipped to [0, 1], not rounded",
            "psnr_ci": "half the width of the 95 % confidence interval of the mean (Student's t)",
            "ssim": "scikit-image's default, data range 1; ssim_paper with data range 2, the scale of the paper's tables",
            "consistency": "RMS of A x − y over observed values, relative to sigma; where sigma is 0, in [0, 1] units",
            "fd_vgg16": "Fréchet distance of position averages of VGG16's relu5_3; falls with n, so compare equal n",
            "seconds": "median per image of the solver alone, at the batch size",
            "hardware": hardware(options.device),
            "versions": {"ddc": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "not_measured": metrics.absent,
        }
    )
    protocol |= extra
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(protocol, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def parameter_count(folder: Path) -> float:
    """Millions of numbers in the prior's and the network's safetensors."""
    from safetensors import safe_open

    total = 0
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(int(np.prod(file.get_slice(key).get_shape())) for key in file.keys())  # noqa: SIM118
    return round(total / 1e6, 2)


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


class Gallery:
    """Keeps pictures for the report: the first few images of a case, and its worst by LPIPS so far."""

    def __init__(self, folder: Path, case: Case, always: set[str], measured: dict[str, float]) -> None:
        self.folder = folder
        self.case = case
        self.always = always
        self.measured = dict(measured)

    def offer(self, name: str, lpips: float, restored: Tensor, truth: Tensor, measured: Tensor) -> None:
        before = self.worst()
        self.measured[name] = lpips
        after = self.worst()
        if name in self.always or name in after:
            for path, picture in zip(self.paths(name), (restored, truth, measured), strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                Picture.from_tensor(picture.clamp(0, 1), bits=8).write(path)
        for loser in before - after - self.always:
            self.paths(loser)[0].unlink(missing_ok=True)

    def worst(self) -> set[str]:
        return set(sorted(self.measured, key=self.measured.__getitem__)[-WORST:])

    def paths(self, name: str) -> tuple[Path, Path, Path]:
        """Where the restored picture, the truth and the measurement lie."""
        file = picture_name(name)
        setting = f"{self.case.task}-{self.case.sigma:g}"
        return (
            self.folder / self.case.folder / file,
            self.folder / "truth" / file,
            self.folder / "y" / setting / file,
        )


def picture_name(image: str) -> str:
    """A file name for an image, whatever folders its own name has."""
    name = image.replace("/", "_").replace("\\", "_")
    return name if name.endswith(".png") else f"{name}.png"


@contextmanager
def progress(total: int, hidden: bool = False) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr with the time left; what it yields advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=hidden or not total) as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda count, text: bar.update(task, advance=count, description=text)
