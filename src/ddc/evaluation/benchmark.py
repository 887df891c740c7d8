"""The benchmark: every solver on the same pictures, measurements and seeds; one row for each restored picture.

A run is a folder. Each finished row is one line of `rows-*.jsonl`, written at once and never measured again;
`protocol.json` says what all rows of the folder have in common. Nothing else is kept, so that an interrupted
evaluation goes on where it stopped, with as many processes as there are then, on another machine too: a folder
whose rows are all there needs neither the models nor the device that it was measured with.
"""

import base64
import dataclasses
import hashlib
import json
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ddc import __version__
from ddc.consistency import DataConsistency
from ddc.errors import UserError
from ddc.evaluation.metrics import Array, Metrics, consistency, kurtosis, spread
from ddc.fast import CpuUNet, can_compile, prepare_compiler
from ddc.images import Picture, to_internal, to_unit
from ddc.networks import run_unet, unet_size_multiple
from ddc.noise import Noise, derive_seed
from ddc.pipeline import make_solver, pick_device, prior_folder
from ddc.priors import Prior
from ddc.problems import Problem, make_problem, measure_named
from ddc.solvers import SOLVERS
from ddc.solvers.base import Solver, Step, find_part
from ddc.training.data import decode, find_sources

Row = dict[str, Any]
T = TypeVar("T")
Precision = Literal["fp32", "bf16", "fp16"]
KEY = ("model", "task", "sigma", "solver", "steps")
WORST = 3  # pictures kept of the worst results of each case
SMALLEST = 32  # pixels of a side that AlexNet needs
SLOW = 200  # network evaluations above which a solver is called slow
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
    slow_limit: int | None = None
    """Pictures for solvers of more than `SLOW` evaluations; None is all."""
    deadline: float | None = None
    """The time.monotonic() after which no batch should end."""
    compile: bool = False
    """Compile the U-Nets for the batch size."""


@dataclass(frozen=True)
class Outcome:
    """What an evaluation did not measure."""

    skipped: list[str]  # what cannot be run, and why
    left: dict[Case, int]  # pictures that are still to be measured
    rows: int  # that there are of these cases

    def __str__(self) -> str:
        if not self.left:
            return ""
        total = sum(self.left.values())
        labels = dict.fromkeys(case.label for case in self.left)
        each = ", ".join(self._left_of(label) for label in labels)
        return (
            f"The time was up: {total} of {self.rows + total} rows are missing ({each}). "
            "The same command goes on where this one stopped."
        )

    def _left_of(self, label: str) -> str:
        left = {case: n for case, n in self.left.items() if case.label == label}
        settings = list(dict.fromkeys(f"{case.task} σ={case.sigma:g}" for case in left))
        where = ", ".join(settings) if len(settings) <= 3 else f"{len(settings)} settings"
        return f"{label}: {sum(left.values())} in {where}"


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
    if size < SMALLEST:
        raise UserError(f"the size is {size}; expected at least {SMALLEST} pixels, for LPIPS sees no fewer")
    if min(height, width) < size:
        raise UserError(f"{name} has {width}×{height} pixels; expected at least {size}×{size} for its centre")
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[:, top : top + size, left : left + size].contiguous()


def parse_solver(text: str) -> tuple[str, Solver]:
    """A solver from "ddnm", or with settings: "pigdm:noise_blind=true:steps=50". Also its label: all but steps."""
    name, *settings = text.split(":")
    values = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if not value:
            raise UserError(f"{name}'s setting {setting!r} has no value; expected name=value, as in steps=50")
        values[key] = value
    label = ":".join([name, *(s for s in settings if not s.startswith("steps="))])
    return label, make_solver(name, options=values)


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
    model's, or the one that comes with the package. `recorded` has the fingerprints of models that were measured
    before; their folders may be gone.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        priors: dict[str, Path] | None = None,
        recorded: dict[str, str] | None = None,
    ) -> None:
        if not folders:
            raise UserError("no model was given; expected a folder with prior/ and network/ (--model)")
        self.recorded = recorded or {}
        for name, folder in folders.items():
            if not folder.is_dir() and name not in self.recorded:
                raise UserError(f"the model {folder} is not a folder; expected one with prior/ and network/")
        self.folders = folders
        self.device = torch.device("cpu")
        self.compile = False
        self.priors = priors or {}
        self._loaded: dict[tuple[str, ...], Any] = {}
        self._prints: dict[str, str] = {}

    def prior_folder(self, name: str) -> Path:
        own, first = self.priors.get(name, self.folders[name]), next(iter(self.folders.values()))
        folder = prior_folder(own if (own / "prior").is_dir() else first)
        if folder is None:
            raise UserError(f"the model {own} has no prior/ (with unet/ and scheduler/) in it")
        return folder

    def fingerprint(self, name: str) -> str:
        """Hashes of the model's network and of its prior; as recorded where the folder is not here."""
        if name not in self._prints:
            here = self.folders[name].is_dir()
            self._prints[name] = (
                "-".join(map(fingerprint, self._files(name))) if here else self.recorded[name]
            )
        return self._prints[name]

    def millions(self, name: str) -> float:
        """Millions of parameters: the model's network and its prior."""
        return parameter_count(path for files in self._files(name) for path in files.values())

    def _files(self, name: str) -> tuple[dict[str, Path], dict[str, Path]]:
        """What computes, by its name: the network, and the prior."""
        network = computing_files(self.folders[name] / "network").items()
        return {f"network/{key}": path for key, path in network}, computing_files(self.prior_folder(name))

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

    def own_parts(self, cases: Iterable[Case]) -> dict[str, str]:
        """Hashes of the networks that solvers need beside the model's, by model and folder. They are not known of a
        model whose folder is not here."""
        prints = {}
        for model, part in dict.fromkeys((case.model, case.solver.part(case.task)) for case in cases):
            if part and self.folders[model].is_dir() and (folder := find_part(part, self.folders[model])):
                prints[f"{model}/{part}"] = fingerprint(computing_files(folder))
        return prints

    def distinct_for(self, solver: Solver) -> list[str]:
        """The models that this solver can tell apart: all by their networks, or those of different priors."""
        names = list(self.folders)
        if "network" in solver.needs:
            return names
        if "prior" not in solver.needs:
            return names[:1]
        first = {self.fingerprint(name).rpartition("-")[2]: name for name in reversed(names)}
        return [name for name in names if name in first.values()]

    def _once(self, key: tuple[str, ...], load: Callable[[], Any]) -> Any:
        if key not in self._loaded:
            loaded = load()
            for part in loaded.values() if isinstance(loaded, dict) else [loaded]:
                self._prepare(part)
            self._loaded[key] = loaded
        return self._loaded[key]

    def _prepare(self, part: nn.Module) -> None:
        if self.device.type == "cuda":
            # channels last is what the GPU's half-precision convolutions want
            part.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            # a number of the schedule's table that is copied at every step makes the GPU wait
            if hasattr(part, "schedule"):
                part.schedule = moved(part.schedule, self.device)
        elif self.device.type == "cpu" and hasattr(part, "unet"):
            part.unet = CpuUNet(part.unet)  # type: ignore[arg-type]
        else:
            part.to(self.device)
        if self.compile and hasattr(part, "unet"):
            part.unet = CompiledUNet(part.unet)  # type: ignore[arg-type]


class CompiledUNet(nn.Module):
    """A U-Net that is compiled for the batches it is shown, with and without gradients with respect to x.

    Precision is autocast's, as without it. One compiled form serves all solvers of a batch size: what they give is
    brought to one layout, which would be compiled again otherwise.
    """

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.config = unet.config
        self.size_multiple = unet_size_multiple(unet)
        self.module = unet
        self._run = torch.compile(partial(run_unet, unet), dynamic=False)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return self._run(x.clone(memory_format=torch.channels_last), times)


def moved(thing: T, device: torch.device) -> T:
    """A dataclass (an operator, a schedule) with its tensors on the device."""
    if not dataclasses.is_dataclass(thing):
        return thing
    values = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(thing, **tensors) if tensors else thing  # type: ignore[type-var]


def computing_files(folder: Path) -> dict[str, Path]:
    """The settings and weights of a folder's networks, by their names in it."""
    settings = {"config.json", "scheduler_config.json"}
    found = (Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names)
    files = sorted(path for path in found if path.name in settings or path.suffix == ".safetensors")
    return {path.relative_to(folder).as_posix(): path for path in files}


def fingerprint(files: dict[str, Path]) -> str:
    """A hash of files and their names."""
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{what} is {text!r}; expected a number") from None


def make_cases(
    models: Models,
    tasks: Sequence[str],
    sigmas: Sequence[float],
    solvers: Sequence[str],
    steps: Sequence[int] = (),
    max_nfe: int | None = None,
) -> list[Case]:
    """All combinations that differ: a solver runs once for models that are the same to it.

    A task may say its own noise: jpeg10:sigma=0.
    """
    cases = []
    for named in tasks:
        task, _, own = named.partition(":sigma=")
        for sigma in [number(own, "sigma")] if own else sigmas:
            for text in solvers:
                label, solver = parse_solver(text)
                repeated = steps and solver.evaluations()
                runs = [dataclasses.replace(solver, steps=n) for n in steps] if repeated else [solver]
                for model in models.distinct_for(solver):
                    for run in runs:
                        cases.append(Case(model, task, sigma, label, cap_evaluations(run, max_nfe)))
    return list({case.key: case for case in cases}.values())  # capped runs can coincide


# ---------------------------------------------------------------------------------------------------------
# measuring


def evaluate(
    cases: Sequence[Case],
    images: Sequence[Image],
    models: Models,
    options: Options,
    protocol: dict[str, Any] | None = None,
) -> Outcome:
    """Measure every case on every image that has no row yet. Returns what was not measured, and why.

    Under several processes (RANK and WORLD_SIZE set, as `accelerate launch` does) each takes its share of the
    images; all return when all are done.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    options.out.mkdir(parents=True, exist_ok=True)
    parts = models.own_parts(cases)
    check_protocol(options, models, images, parts)
    rows = RowFile(options.out, rank)
    share = list(images)[rank::world]
    check_pictures(rows, share)
    pending = {}
    for case in cases:
        mine = images_of(case, images, options)[rank::world]
        pending[case] = [image for image in mine if (*case.key, image.name) not in rows.done]
    clock = Clock(options.deadline)
    if any(pending.values()) and not clock.late():
        models.device, models.compile = pick_device(options.device), options.compile
        if options.compile:
            check_compiler(models.device)
    skipped: dict[Case, str] = {}
    for case in cases:
        reason = why_not(case, models, images[0]) if pending[case] else None
        if reason:
            skipped[case] = reason
    if cases and len(skipped) == len(cases):
        case, reason = next(iter(skipped.items()))
        raise UserError(f"nothing can be measured: {case.label} on {case.task}: {reason}")
    todo = [case for case in cases if pending[case] and case not in skipped]
    if options.deadline is not None:  # what a short time allows should be whole rows of many solvers
        todo.sort(key=lambda case: case.solver.evaluations())
    if todo and not clock.late():
        metrics = Metrics(models.device, options.inception)
        if rank == 0:
            known = read_protocol(options.out).get("parts", {})
            write_protocol(options, models, images, {"parts": known | parts} | (protocol or {}), metrics)
        runs = {case: images_of(case, images, options) for case in cases if case not in skipped}
        leaders = first_cases(runs)
        kept = {
            image.name for image in evenly(min(runs.values(), key=len), options.keep)
        }  # all cases have them
        jobs = [
            Job(
                case,
                pending[case],
                min(options.batch_size, len(runs[case])),
                kept,
                WORST if case in leaders else 0,
            )
            for case in todo
        ]
        with rows:
            add_truths(rows, share, metrics, options.batch_size)
            measure(jobs, models, metrics, options, clock, rows)
    elif rank == 0:
        write_protocol(options, models, images, protocol or {})
    if world > 1:
        wait_for_all()
    done = RowFile(options.out).done
    left: dict[Case, int] = {}
    count = 0
    for case in cases:
        wanted = images_of(case, images, options)
        there = sum((*case.key, image.name) in done for image in wanted)
        count += there
        if there < len(wanted) and case not in skipped:
            left[case] = len(wanted) - there
    reasons: dict[str, list[str]] = {}
    for case, reason in skipped.items():
        what, whats = f"{case.label} on {case.task}", reasons.setdefault(reason, [])
        whats += [] if what in whats else [what]
    return Outcome([f"{', '.join(whats)}: {reason}" for reason, whats in reasons.items()], left, count)


def images_of(case: Case, images: Sequence[Image], options: Options) -> list[Image]:
    """The images that a case is measured on."""
    if options.slow_limit is None or case.solver.evaluations() <= SLOW:
        return list(images)
    return evenly(images, options.slow_limit)


def slow_note(cases: Sequence[Case], images: Sequence[Image], options: Options) -> list[str]:
    """What to say of solvers that are measured on fewer images."""
    few = dict.fromkeys(case.label for case in cases if len(images_of(case, images, options)) < len(images))
    pictures = "one picture" if options.slow_limit == 1 else f"{options.slow_limit} pictures"
    return [f"Measured on {pictures} only, for their time: {', '.join(few)}."] if few else []


@dataclass(frozen=True)
class Job:
    """The images that a case still has to be measured on."""

    case: Case
    images: list[Image]
    size: int  # of a batch: a compiled network takes one, and the last batch is filled up to it
    keep: set[str]  # images whose pictures the report may show
    worst: int  # how many of the worst are kept beside them


def first_cases(cases: Iterable[Case]) -> set[Case]:
    """The first of each task and noise: the report shows its worst pictures."""
    first: dict[tuple[str, float], Case] = {}
    for case in sorted(cases, key=lambda case: solver_order(case.label)):
        first.setdefault((case.task, case.sigma), case)
    return set(first.values())


def solver_order(label: str) -> int:
    """The place of a solver in every table."""
    return list(SOLVERS).index(label.partition(":")[0])


def measure(
    jobs: Sequence[Job],
    models: Models,
    metrics: Metrics,
    options: Options,
    clock: "Clock",
    rows: "RowFile",
) -> None:
    """Add the rows of the jobs' images, batch by batch, as long as the time allows."""
    cuda = models.device.type == "cuda"
    if cuda:
        torch.backends.cudnn.benchmark = True
    written: list[Future[None]] = []
    total = sum(len(job.images) for job in jobs)
    with ThreadPoolExecutor(1) as writer, progress(total, hidden=rows.rank > 0) as advance:
        for job in jobs:
            case, size = job.case, job.size if options.compile else None
            gallery = Gallery(options.out / "pictures", job, rows.values(case, "lpips"), writer)
            for start in range(0, len(job.images), options.batch_size):
                if not clock.allows(case):
                    break
                batch = job.images[start : start + options.batch_size]
                if cuda and start == 0 and case.solver.evaluations():
                    # kernels are loaded, chosen and compiled, which is not the solver's time
                    warm = dataclasses.replace(case, solver=dataclasses.replace(case.solver, steps=2))
                    restore_batch(warm, batch, models, metrics, options, size)
                started = time.monotonic()
                restored = restore_batch(case, batch, models, metrics, options, size)
                rows.write(restored.rows)
                written += gallery.offer(restored)
                clock.took(case, time.monotonic() - started)
                advance(len(batch), f"{case.task} σ={case.sigma:g} {case.label}")
    for future in written:
        future.result()  # a picture that could not be written is an error


class Clock:
    """Whether there is time for another batch, by what the last ones took."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.last: dict[tuple[str, int], float] = {}
        self.rate = 0.0  # seconds of one evaluation of the last batch, for a solver that did not run yet

    def late(self, expected: float = 0.0) -> bool:
        return self.deadline is not None and time.monotonic() + expected >= self.deadline

    def allows(self, case: Case) -> bool:
        key = (case.label, case.solver.steps)
        return not self.late(self.last.get(key, self.rate * case.solver.evaluations()))

    def took(self, case: Case, seconds: float) -> None:
        self.last[case.label, case.solver.steps] = seconds
        if case.solver.evaluations():
            self.rate = seconds / case.solver.evaluations()


def check_compiler(device: torch.device) -> None:
    if device.type != "cuda" or not can_compile():
        raise UserError(
            f"--compile needs a CUDA device, Triton and a C compiler; this is {device.type}. Leave it out"
        )
    prepare_compiler()


def why_not(case: Case, models: Models, image: Image) -> str | None:
    """Why a case cannot be run: the solver's maths does not take the task or size, or a network is missing."""
    height, width = image.pixels.shape[1:]
    problem = make_problem(case.task, case.sigma, size=(height, width), seeds=[0])
    scale = problem.operator.scale
    if height % scale or width % scale:
        return f"{width}×{height} pixels cannot be made {scale} times smaller; choose another --size"
    try:
        case.solver.check(problem)
        models.parts(case, problem)
    except UserError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Restored:
    """What came of a batch: its rows, and its pictures in [0, 1], on the device."""

    rows: list[Row]
    pictures: Tensor
    truth: Tensor
    measured: Tensor  # at image size


def restore_batch(
    case: Case,
    batch: list[Image],
    models: Models,
    metrics: Metrics,
    options: Options,
    size: int | None = None,
) -> Restored:
    """Measure, restore, compare a few images; `size` fills the batch up by repeating the last of them."""
    device, count = models.device, len(batch)
    batch = batch + batch[-1:] * ((size or count) - count)
    names = [image.name for image in batch]
    truth = torch.stack([image.pixels for image in batch]).to(device).float() / 255
    problem, y = measure_named(case.task, case.sigma, to_internal(truth), names, options.seed)
    problem = dataclasses.replace(problem, operator=moved(problem.operator, device))
    prior, parts = models.parts(case, problem)
    trace: list[tuple[int, Tensor]] = []

    def watch(step: Step) -> None:
        if step.noise is not None:
            trace.append((step.t, kurtosis(step.noise)))

    samples = []
    seconds = 0.0
    for k in range(options.samples):
        seeds = [derive_seed(options.seed, f"solve/{name}" + (f"/{k}" if k else "")) for name in names]
        autocast = (
            torch.autocast(device.type, DTYPES[options.precision])
            if options.precision != "fp32"
            else nullcontext()
        )
        synchronise(device)
        started = time.perf_counter()
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

    # what a person would get, and the whole batch's agreement with y, for the operator knows no smaller one
    pictures = [to_unit(torch.nan_to_num(sample, nan=0.0)) for sample in samples]
    agreement = consistency(to_internal(pictures[0]), y, problem)[:count].tolist()
    finite = torch.isfinite(samples[0]).flatten(1).all(1).tolist()
    curves = torch.stack([column for _, column in trace], 1).tolist() if trace else []
    pictures = [sample[:count] for sample in pictures]
    values, features = metrics(pictures[0], truth[:count])
    values["consistency"] = agreement
    if options.samples > 1:
        values["spread"] = spread(torch.stack(pictures)).tolist()
    rows = []
    for i, image in enumerate(batch[:count]):
        row: Row = dict(zip(KEY, case.key, strict=True)) | {"image": image.name}
        row |= {name: round(column[i], 7) for name, column in values.items()}
        row |= {"nfe": case.solver.evaluations(), "seconds": round(seconds, 6), "batch": len(batch)}
        if not finite[i]:
            row["finite"] = False
        if trace:
            row["kurtosis"] = [[t, round(value, 4)] for (t, _), value in zip(trace, curves[i], strict=True)]
        row["features"] = {name: pack(table[i]) for name, table in features.items()}
        rows.append(row)
    measured = to_unit(problem.operator.to_image(y)[:count])
    return Restored(rows, pictures[0], truth[:count], measured)


def check_pictures(rows: "RowFile", images: Sequence[Image]) -> None:
    """An image that has changed since its truth was recorded is refused."""
    for image in images:
        known = rows.truths.get(image.name)
        if known is not None and known["checksum"] != image.checksum:
            raise UserError(
                f"{image.name} is another picture than the one measured in {rows.folder}; use another --out"
            )


def add_truths(rows: "RowFile", images: Sequence[Image], metrics: Metrics, batch_size: int) -> None:
    """The truth's own features, once for each image."""
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
        self.folder, self.rank = folder, rank
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


def read_protocol(folder: Path) -> dict[str, Any]:
    """What all rows of a run have in common; empty where nothing was measured yet."""
    path = folder / "protocol.json"
    protocol: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return protocol


def recorded_models(folder: Path) -> dict[str, str]:
    """The fingerprints of the models that a run was measured with."""
    return {name: model["sha256"] for name, model in read_protocol(folder).get("models", {}).items()}


def fixed_settings(options: Options, images: Sequence[Image]) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "size": list(images[0].pixels.shape[1:]),
        "precision": options.precision,
        "samples": options.samples,
    }


def check_protocol(options: Options, models: Models, images: Sequence[Image], parts: dict[str, str]) -> None:
    """A run of other settings is refused: its rows could not be compared. The machine may be another."""
    old, fixed = read_protocol(options.out), fixed_settings(options, images)
    known = recorded_models(options.out)
    differences = [f"{k} {old[k]} (now {fixed[k]})" for k in fixed if old and old.get(k) != fixed[k]]
    differences += [
        f"model {name}: other weights"
        for name in models.folders
        if name in known and not same_to_rows(known[name], models.fingerprint(name), name, options.out)
    ]
    before = old.get("parts", {})
    differences += [
        f"{name}: other weights" for name in parts if before.get(name, parts[name]) != parts[name]
    ]
    if differences:
        raise UserError(f"{options.out} was measured with {', '.join(differences)}; use another --out")


def same_to_rows(before: str, now: str, model: str, folder: Path) -> bool:
    """Whether the rows of a model would be the same now. Those of solvers that do not use its network stay when
    another is put beside the prior."""
    if before == now:
        return True
    used = {row["solver"].partition(":")[0] for row in read_rows(folder)[0] if row["model"] == model}
    without = all("network" not in SOLVERS[name].needs for name in used)
    return without and before.rpartition("-")[2] == now.rpartition("-")[2]


def write_protocol(
    options: Options,
    models: Models,
    images: Sequence[Image],
    extra: dict[str, Any],
    metrics: Metrics | None = None,
) -> None:
    """What all rows have in common, and where they were measured; `metrics` is None where nothing is."""
    protocol = read_protocol(options.out) | fixed_settings(options, images)
    if metrics is not None:
        parameters = {
            name: {
                "sha256": models.fingerprint(name),
                "millions": models.millions(name),
                "name": folder.resolve().name,
            }
            for name, folder in models.folders.items()
            if folder.is_dir()
        }
        machines = [*protocol.get("hardware", []), machine(models.device, options.compile)]
        absent = [*protocol.get("not_measured", []), *metrics.absent]
        protocol |= {
            "models": protocol.get("models", {}) | parameters,
            "seeds": "masks, measurement noise and sampling noise from (seed, image name), equal for all solvers",
            "measurement": "floating point, not rounded to 8 bits; sigma in [0, 1] units",
            "output": "clipped to [0, 1], not rounded",
            "psnr_ci": "half the width of the 95 % confidence interval of the mean (Student's t)",
            "ssim": "scikit-image's default, data range 1; ssim_paper with data range 2, the scale of the paper's tables",
            "consistency": "RMS of A x − y over observed values, relative to sigma; where sigma is 0, in [0, 1] units",
            "fd_vgg16": "Fréchet distance of position averages of VGG16's relu5_3; falls with n, so compare equal n",
            "seconds": "median per image of the solver alone, at the batch size",
            "hardware": list(dict.fromkeys(machines)),
            "not_measured": list(dict.fromkeys(absent)),
        }
    protocol |= extra
    path = options.out / "protocol.json"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(protocol, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def parameter_count(files: Iterable[Path]) -> float:
    """Millions of numbers in the safetensors among files."""
    from safetensors import safe_open

    total = 0
    for path in files:
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "pt") as file:
            total += sum(int(np.prod(file.get_slice(key).get_shape())) for key in file.keys())  # noqa: SIM118
    return round(total / 1e6, 2)


def machine(device: torch.device, compiled: bool) -> str:
    """The hardware that rows were measured on, and the versions."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    versions = f"ddc {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{name} ({versions}{', compiled' if compiled else ''})"


class Gallery:
    """Keeps pictures for the report: a few images of every case, and the worst by LPIPS so far."""

    def __init__(self, folder: Path, job: Job, measured: dict[str, float], writer: Executor) -> None:
        self.folder, self.job, self.writer = folder, job, writer
        self.measured = dict(measured)

    def offer(self, batch: Restored) -> list["Future[None]"]:
        """Hand what is worth keeping to the writer, which drops what no longer is."""
        before = self.worst()
        self.measured |= {row["image"]: row["lpips"] for row in batch.rows}
        after = self.worst()
        jobs = []
        for i, row in enumerate(batch.rows):
            if row["image"] in self.job.keep or row["image"] in after:
                paths = picture_paths(self.folder, self.job.case, row["image"])
                pictures = [kind[i].cpu() for kind in (batch.pictures, batch.truth, batch.measured)]
                jobs.append(self.writer.submit(write_pictures, paths, pictures))
        for loser in before - after - self.job.keep:
            path, *_ = picture_paths(self.folder, self.job.case, loser)
            jobs.append(self.writer.submit(path.unlink, missing_ok=True))
        return jobs

    def worst(self) -> set[str]:
        return set(sorted(self.measured, key=self.measured.__getitem__, reverse=True)[: self.job.worst])


def write_pictures(paths: Sequence[Path], pictures: Sequence[Tensor]) -> None:
    """The restored picture; the truth and the measurement where another case did not write them yet."""
    for i, (path, picture) in enumerate(zip(paths, pictures, strict=True)):
        if i == 0 or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Picture.from_tensor(picture.clamp(0, 1), bits=8).write(path)


def picture_paths(folder: Path, case: Case, name: str) -> tuple[Path, Path, Path]:
    """Where the restored picture, the truth and the measurement lie."""
    file, setting = picture_name(name), f"{case.task}-{case.sigma:g}"
    return folder / case.folder / file, folder / "truth" / file, folder / "y" / setting / file


def picture_name(image: str) -> str:
    """A file name for an image, whatever folders its own name has."""
    name = image.replace("/", "_").replace("\\", "_")
    return name if name.endswith(".png") else f"{name}.png"


@contextmanager
def progress(total: int, hidden: bool = False) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr with the time left, or lines where that is no terminal; what it yields advances it."""
    if hidden or not total:
        yield lambda count, text: None
        return
    if not sys.stderr.isatty():
        with lines_of_progress(total) as advance:
            yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda count, text: bar.update(task, advance=count, description=text)


@contextmanager
def lines_of_progress(total: int, every: float = 10.0) -> Iterator[Callable[[int, str], None]]:
    """A line for a log every few seconds, and at the end."""
    started = said = time.monotonic()
    done = 0
    last = ""

    def say() -> None:
        seconds = time.monotonic() - started
        print(f"measured {done} of {total} in {seconds:.0f} s: {last}", file=sys.stderr, flush=True)

    def advance(count: int, text: str) -> None:
        nonlocal done, said, last
        done, last = done + count, text
        if time.monotonic() - said >= every:
            said = time.monotonic()
            say()

    yield advance
    say()
