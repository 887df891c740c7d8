"""The benchmark: every solver on the same pictures, measurements and seeds; one row for each restored picture."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.evaluation.cases import Case, CleanImage, Models, evenly
from ddc.evaluation.metrics import Metrics, consistency, spread
from ddc.evaluation.results import (
    EXPLANATIONS,
    KEY,
    WORST,
    Gallery,
    Row,
    RunFolder,
    machine,
    pack,
    read_rows,
    solver_order,
)
from ddc.fast import can_compile, pick_device

Precision = Literal["fp32", "bf16", "fp16"]
SLOW_EVALUATIONS = 200  # network evaluations above which a solver is called slow
# the rows of a batch; and its restored pictures, truths and measurements in [0, 1]
Measured = tuple[list[Row], list[tuple[Tensor, Tensor, Tensor]]]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class EvaluationOptions:
    """How to measure."""

    out: Path
    batch_size: int = 1
    seed: int = 0
    device: str = "cpu"
    precision: Precision = "fp32"
    samples: int = 1
    """Restorations of each measurement; figures are those of the first, the spread is between all of them."""
    trace: bool = False
    """Record the kurtosis of ε̂ at every step."""
    keep: int = 4
    """Pictures to keep of each case for the report, beside the worst ones."""
    inception: Path | None = None
    slow_limit: int | None = None
    """Pictures for solvers of more than `SLOW_EVALUATIONS`; None is all."""
    deadline: float | None = None
    """The time.monotonic() before which every batch should end."""
    compile: bool = False
    """Compile the U-Nets for the batch size."""

    def images_of(self, case: Case, images: Sequence[CleanImage]) -> list[CleanImage]:
        """The images that a case is measured on."""
        if self.slow_limit is None or case.evaluations <= SLOW_EVALUATIONS:
            return list(images)
        return evenly(images, self.slow_limit)


@dataclass(frozen=True)
class EvaluationResult:
    """How many rows there are, and what was not measured."""

    skipped: list[str]  # what cannot run, and why
    left: dict[Case, int]  # pictures that are still to be measured
    rows: int  # of these cases
    fewer: str = ""  # which solvers were measured on fewer pictures

    @property
    def unfinished(self) -> str:
        """What is missing because the time was up."""
        if not self.left:
            return ""
        each = []
        for label in dict.fromkeys(case.label for case in self.left):
            left = {case: n for case, n in self.left.items() if case.label == label}
            settings = list(dict.fromkeys(f"{case.task} σ={case.sigma:g}" for case in left))
            where = ", ".join(settings) if len(settings) <= 3 else f"{len(settings)} settings"
            each.append(f"{label}: {sum(left.values())} in {where}")
        total = sum(self.left.values())
        return (
            f"The time was up: {total} of {self.rows + total} rows are missing ({', '.join(each)}). "
            "Run the same command again to measure them."
        )

    @property
    def notes(self) -> list[str]:
        """What a report says first."""
        return [note for note in (self.unfinished, self.fewer) if note]


def evaluate(
    cases: Sequence[Case],
    images: Sequence[CleanImage],
    models: Models,
    options: EvaluationOptions,
    protocol: dict[str, Any] | None = None,
) -> EvaluationResult:
    """Measure every case on every image that has no row yet.

    With several processes (RANK and WORLD_SIZE are set, as `accelerate launch` does) each measures its share of the
    images; all return when all are done.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    run = RunFolder(options.out, rank)
    parts = models.part_fingerprints(cases)
    fixed = {
        "seed": options.seed,
        "size": list(images[0].pixels.shape[1:]),
        "precision": options.precision,
        "samples": options.samples,
    }
    run.check(fixed, {name: models.fingerprint(name) for name in models.folders}, parts)
    share = list(images)[rank::world]
    check_pictures(run, share)
    pending = {
        case: [i for i in options.images_of(case, images)[rank::world] if (*case.key, i.name) not in run.done]
        for case in cases
    }
    timer = Timer(options.deadline)
    if any(pending.values()) and not timer.late():
        models.target, models.size = device_options(options), images[0].pixels.shape[-1]
    reasons = {case: models.why_not(case, images[0]) if pending[case] else None for case in cases}
    skipped = {case: reason for case, reason in reasons.items() if reason}
    if cases and len(skipped) == len(cases):
        case, reason = next(iter(skipped.items()))
        raise UserError(f"nothing can be measured: {case.label} on {case.task}: {reason}")
    todo = {case: pending[case] for case in cases if pending[case] and case not in skipped}
    changes = fixed | (protocol or {})
    if todo and not timer.late():
        device = models.target["device"]
        metrics = Metrics(device, options.inception)
        if rank == 0:
            run.save_protocol(
                changes | EXPLANATIONS,
                models=models.facts(),
                parts=parts,
                hardware=[machine(device, options.compile)],
                not_measured=metrics.absent,
            )
        with run:
            add_truths(run, share, metrics, options.batch_size)
            runs = {case: options.images_of(case, images) for case in cases if case not in skipped}
            Measuring(run, models, metrics, options, timer, runs).all(todo)
    elif rank == 0:
        run.save_protocol(changes)
    if world > 1:
        wait_for_all()
    return result_of(cases, images, options, skipped)


def device_options(options: EvaluationOptions) -> dict[str, Any]:
    """The arguments of `RestorationPipeline.to`."""
    device = pick_device(options.device)
    if device.type != "cuda" and options.precision != "fp32":
        raise UserError(f"--precision {options.precision} needs a CUDA device; this is {device.type}. Use fp32")
    if options.compile and (device.type != "cuda" or not can_compile()):
        raise UserError(f"--compile needs a CUDA device, Triton and a C compiler; this is {device.type}. Leave it out")
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    return {
        "device": device,
        "dtype": DTYPES[options.precision],
        "compile": options.compile,
        "batch": options.batch_size,
    }


def check_pictures(run: RunFolder, images: Sequence[CleanImage]) -> None:
    """Refuse an image that has changed since it was measured."""
    for image in images:
        known = run.truths.get(image.name)
        if known is not None and known["checksum"] != image.checksum:
            raise UserError(f"{image.name} is another picture than the one measured in {run.folder}; use another --out")


def add_truths(run: RunFolder, images: Sequence[CleanImage], metrics: Metrics, batch_size: int) -> None:
    """Write the features of the clean images, once for each."""
    unknown = [image for image in images if image.name not in run.truths]
    for start in range(0, len(unknown), batch_size):
        batch = unknown[start : start + batch_size]
        features = metrics.features(torch.stack([image.pixels for image in batch]).float() / 255)
        fresh = []
        for i, image in enumerate(batch):
            packed = {name: pack(table[i]) for name, table in features.items()}
            fresh.append({"truth": image.name, "checksum": image.checksum, "features": packed})
        run.write(fresh)


def wait_for_all() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    dist.barrier()


def result_of(
    cases: Sequence[Case],
    images: Sequence[CleanImage],
    options: EvaluationOptions,
    skipped: dict[Case, str],
) -> EvaluationResult:
    """What is there now, of all processes, and what is not."""
    done = {(*(row[k] for k in KEY), row["image"]) for row in read_rows(options.out)[0]}
    left: dict[Case, int] = {}
    count = 0
    few: dict[str, None] = {}
    for case in cases:
        wanted = options.images_of(case, images)
        there = sum((*case.key, image.name) in done for image in wanted)
        count += there
        if there < len(wanted) and case not in skipped:
            left[case] = len(wanted) - there
        if len(wanted) < len(images):
            few[case.label] = None
    reasons: dict[str, dict[str, None]] = {}
    for case, reason in skipped.items():
        reasons.setdefault(reason, {})[f"{case.label} on {case.task}"] = None
    pictures = "one picture" if options.slow_limit == 1 else f"{options.slow_limit} pictures"
    return EvaluationResult(
        [f"{', '.join(whats)}: {reason}" for reason, whats in reasons.items()],
        left,
        count,
        f"Measured on {pictures} only, because they are slow: {', '.join(few)}." if few else "",
    )


class Timer:
    """Whether there is time for another batch, by what the last ones took."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.last: dict[tuple[str, int], float] = {}
        self.rate = 0.0  # seconds of one evaluation of the last batch, for a solver that did not run yet

    def late(self, expected: float = 0.0) -> bool:
        return self.deadline is not None and time.monotonic() + expected >= self.deadline

    def allows(self, case: Case) -> bool:
        key = (case.label, case.solver.steps)
        return not self.late(self.last.get(key, self.rate * case.evaluations))

    def took(self, case: Case, seconds: float) -> None:
        self.last[case.label, case.solver.steps] = seconds
        if case.evaluations:
            self.rate = seconds / case.evaluations


class Measuring:
    """Adds rows, batch by batch, as long as the time allows. `runs` has all images of each case."""

    def __init__(
        self,
        run: RunFolder,
        models: Models,
        metrics: Metrics,
        options: EvaluationOptions,
        timer: Timer,
        runs: dict[Case, list[CleanImage]],
    ) -> None:
        self.run, self.models, self.metrics, self.options = run, models, metrics, options
        self.timer, self.runs, self.device = timer, runs, metrics.device
        self.keep = {image.name for image in evenly(min(runs.values(), key=len), options.keep)}  # all cases have them
        # the first case of each task and noise, whose worst pictures the report shows
        leaders: dict[tuple[str, float], Case] = {}
        for case in sorted(runs, key=lambda case: solver_order(case.label)):
            leaders.setdefault((case.task, case.sigma), case)
        self.leaders = set(leaders.values())

    def all(self, todo: dict[Case, list[CleanImage]]) -> None:
        """Measure the images that each case lacks."""
        cases = list(todo)
        if self.options.deadline is not None:  # so that a short time gives complete rows of many solvers
            cases.sort(key=lambda case: case.evaluations)
        written: list[Future[None]] = []
        total = sum(map(len, todo.values()))
        with ThreadPoolExecutor(1) as writer, progress(total, hidden=self.run.rank > 0) as advance:
            for case in cases:
                worst = WORST if case in self.leaders else 0
                gallery = Gallery(self.run, case.key, self.keep, worst, writer)
                for rows, pictures in self.batches(case, todo[case]):
                    self.run.write(rows)
                    written += gallery.offer(rows, pictures)
                    advance(len(rows), f"{case.task} σ={case.sigma:g} {case.label}")
        for future in written:
            future.result()  # a picture that could not be written is an error

    def batches(self, case: Case, images: list[CleanImage]) -> Iterator[Measured]:
        size = self.options.batch_size
        full = min(size, len(self.runs[case])) if self.options.compile else 0
        for start in range(0, len(images), size):
            if not self.timer.allows(case):
                return
            batch = images[start : start + size]
            if self.device.type == "cuda" and start == 0 and case.evaluations:
                # kernels are loaded, chosen and compiled, which is not the solver's time
                self.batch(dataclasses.replace(case, solver=dataclasses.replace(case.solver, steps=2)), batch, full)
            started = time.monotonic()
            measured = self.batch(case, batch, full)
            self.timer.took(case, time.monotonic() - started)
            yield measured

    def batch(self, case: Case, images: list[CleanImage], full: int = 0) -> Measured:
        """Restore and compare a few images. They are repeated up to a `full` batch, for which networks are compiled."""
        count, options = len(images), self.options
        images = images + images[-1:] * (full - count)
        out = self.models.restore(case, images, options.seed, options.samples, options.trace)
        # of the whole batch, because the operator's masks belong to it
        agreement = consistency(out.samples[0], out.y, out.problem)
        samples, truth = [sample[:count] for sample in out.samples], out.truth[:count]
        values, features = self.metrics(samples[0], truth)
        values["consistency"] = agreement[:count].tolist()
        if len(samples) > 1:
            values["spread"] = spread(torch.stack(samples)).tolist()
        common = dict(zip(KEY, case.key, strict=True))
        timing = {"nfe": case.evaluations, "seconds": round(out.seconds, 6), "batch": len(images)}
        curves = torch.stack([column for _, column in out.trace], 1).tolist() if out.trace else []
        rows = []
        for i, image in enumerate(images[:count]):
            row: Row = common | {"image": image.name}
            row |= {name: round(column[i], 7) for name, column in values.items()} | timing
            row |= {} if out.finite[i] else {"finite": False}
            if curves:
                row["kurtosis"] = [[t, round(k, 4)] for (t, _), k in zip(out.trace, curves[i], strict=True)]
            row["features"] = {name: pack(table[i]) for name, table in features.items()}
            rows.append(row)
        return rows, list(zip(samples[0], truth, out.measurement[:count], strict=True))


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
    done = 0
    last = ""

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
