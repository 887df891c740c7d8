"""The benchmark: every solver on the same pictures, measurements and seeds; one row for each restored picture."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ddc.datasets import CleanImage, evenly
from ddc.errors import UserError
from ddc.evaluation.reference import check_features, measure_reference
from ddc.evaluation.run import (
    EXPLANATIONS,
    KEY,
    WORST,
    EvaluationResult,
    Gallery,
    Key,
    Row,
    RunFolder,
    Timer,
    fingerprint,
    machine,
    pack,
    parameter_count,
    progress,
    recorded_models,
    solver_label,
    solver_order,
    weight_files,
)
from ddc.fast import pick_device
from ddc.hub import fetch_model
from ddc.images import to_internal, to_unit
from ddc.notation import Entry, split, to_number
from ddc.operators.inpaint import Inpaint
from ddc.perceptual import Metrics, judge_samples, kurtosis
from ddc.pipeline import DEFAULT_MODEL, RestorationPipeline, find_part, part_names, prior_folder
from ddc.problems import Problem, consistency, image_seeds, make_problem, measure
from ddc.solvers.base import Solver, Step, make_solver

SLOW_EVALUATIONS = 200  # network evaluations above which a solver is called slow
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
# the rows of a batch; and the truth, the measurement and the samples of each, in [0, 1]
Measured = tuple[list[Row], list[tuple[Tensor, ...]]]


# ---------------------------------------------------------------------------------------------------------
# models and cases


@dataclass(frozen=True)
class Case:
    """One solver with one model on one task: a row of the table."""

    model: str
    task: str
    sigma: float
    label: str  # the solver's name, and the settings that are not its defaults
    solver: Solver
    evaluations: int = field(init=False)  # of a network, for one image, before the model chooses settings
    key: Key = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "evaluations", self.solver.evaluations())
        object.__setattr__(self, "key", (self.model, self.task, self.sigma, self.label, self.solver.steps))


def parse_models(text: str) -> dict[str, Path]:
    """Names and folders from "DIR:name=ours,DIR2"; a folder without a name is called by its own. "" is the shipped one."""
    folders: dict[str, Path] = {}
    for part in split(text) or [f"{DEFAULT_MODEL}:name=default"]:
        entry = Entry.parse(part).check_keys("name")
        path = Path(entry.name)
        name = entry.settings.get("name", path.resolve().name)
        if name in folders:
            raise UserError(f"two models are called {name}; give them names: DIR:name=first,DIR2:name=second")
        if not name or name in (".", "..") or "/" in name or "\\" in name:
            raise UserError(
                f"a model cannot be called {name!r}; pictures are stored by its name. Use letters and digits"
            )
        folders[name] = path
    return folders


class Models:
    """Model folders by their names. Their pipelines are loaded when they are needed.

    `priors` names other folders to take a model's prior from. A model without a prior uses that of the first model, or
    the shipped one. A model that was measured before, in the run folder `out`, may be gone.
    """

    def __init__(
        self, folders: dict[str, Path], priors: dict[str, Path] | None = None, out: Path | None = None
    ) -> None:
        if not folders:
            raise UserError("no model was given; expected a folder with prior/ and network/ (--model)")
        self.folders, self.priors, self.recorded = folders, priors or {}, recorded_models(out) if out else {}
        for name, folder in folders.items():
            if not folder.is_dir() and name not in self.recorded:
                folders[name] = fetch_model(folder)
        self.target: dict[str, Any] = {"device": "cpu", "fast": False}  # the arguments of `RestorationPipeline.to`
        self.size: int | None = None  # of the pictures, for which networks are compiled
        self._pipes: dict[str, RestorationPipeline] = {}
        self._prints: dict[str, str] = {}

    def pipeline(self, name: str) -> RestorationPipeline:
        """The model's pipeline, on the device that `target` names."""
        if name not in self._pipes:
            folder = self.folders[name]
            network = folder / "network" if (folder / "network").is_dir() else None
            loaded = RestorationPipeline.from_pretrained(self.prior_folder(name), network)
            # in the model's own folder, the networks of other solvers are found
            self._pipes[name] = RestorationPipeline(loaded.prior, loaded.network, folder, self.size).to(**self.target)
        return self._pipes[name]

    def prior_folder(self, name: str) -> Path:
        own = self.priors.get(name, self.folders[name])
        complete = any((own / part).is_dir() for part in ("prior", "unet"))
        if folder := prior_folder(own if complete else next(iter(self.folders.values()))):
            return folder
        raise UserError(f"the model {own} has no prior/ (with unet/ and scheduler/) in it")

    def fingerprint(self, name: str) -> str:
        """Hashes of the model's network and of its prior; the recorded ones if the folder is gone."""
        if name not in self._prints:
            here = self.folders[name].is_dir()
            self._prints[name] = "-".join(map(fingerprint, self._files(name))) if here else self.recorded[name]
        return self._prints[name]

    def _files(self, name: str) -> tuple[dict[str, Path], dict[str, Path]]:
        """The files of the network, and those of the prior."""
        network = weight_files(self.folders[name] / "network")
        return {f"network/{key}": path for key, path in network.items()}, weight_files(self.prior_folder(name))

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the protocol states about each model: its fingerprint, millions of parameters and folder name."""
        facts = {}
        for name, folder in self.folders.items():
            if folder.is_dir():
                millions = parameter_count([path for files in self._files(name) for path in files.values()])
                facts[name] = {"sha256": self.fingerprint(name), "millions": millions, "name": folder.resolve().name}
        return facts

    def part_fingerprints(self, cases: Iterable[Case]) -> dict[str, str]:
        """Hashes of the networks that solvers need beside the model's, by model and folder."""
        found: dict[str, Path] = {}
        for case in cases:
            model = self.folders[case.model]
            if model.is_dir() and not {"prior", "network"}.issuperset(case.solver.needs):
                parts = part_names(case.solver, case.task)
                found |= {f"{case.model}/{part}": folder for part in parts if (folder := find_part(part, model))}
        return {name: fingerprint(weight_files(folder)) for name, folder in found.items()}

    def distinct_for(self, solver: Solver) -> list[str]:
        """The models that differ for this solver: all by their networks, or those of different priors."""
        names = list(self.folders)
        if "network" in solver.needs:
            return names
        if "prior" not in solver.needs:
            return names[:1]
        first = {self.fingerprint(name).rpartition("-")[2]: name for name in reversed(names)}
        return [name for name in names if name in first.values()]

    def why_not(self, case: Case, image: CleanImage) -> str | None:
        """Why a case cannot run: the solver does not support the task or the size, or a network is missing."""
        height, width = image.pixels.shape[1:]
        problem = make_problem(case.task, case.sigma, size=(height, width), seeds=[0])
        scale = problem.operator.scale
        if height % scale or width % scale:
            return f"{width}×{height} pixels cannot be made {scale} times smaller; choose another --size"
        try:
            case.solver.check(problem)
            pipe = self.pipeline(case.model)
            pipe.check_training(case.solver, problem, (height // scale, width // scale))
            pipe.parts(case.solver, problem)
        except UserError as error:
            return str(error)
        return None


def parse_cases(
    models: Models, task: str, sigma: str, solver: str, steps: str = "", max_nfe: int | None = None
) -> list[Case]:
    """The cases of a command line, whose lists are separated by commas."""
    sigmas = [to_number(text, "sigma") for text in split(sigma)]
    if not all(text.isdecimal() for text in split(steps)):
        raise UserError(f"--steps is {steps}; expected whole numbers, as in 2,5")
    return make_cases(models, split(task), sigmas, split(solver), [int(text) for text in split(steps)], max_nfe)


def make_cases(
    models: Models,
    tasks: Sequence[str],
    sigmas: Sequence[float],
    solvers: Sequence[str],
    steps: Sequence[int] = (),
    max_nfe: int | None = None,
) -> list[Case]:
    """All combinations that differ; a solver runs once for models that are the same to it.

    A task may have its own noise: jpeg10:sigma=0.
    """
    entries = [Entry.parse(text).check_keys("sigma") for text in tasks]
    settings = [(e.name, s) for e in entries for s in ([e.number("sigma", 0)] if e.settings else sigmas)]
    cases = []
    for task, sigma in settings:
        for text in solvers:
            solver = make_solver(text)
            repeated = steps and solver.evaluations()
            runs = [make_solver(solver, n) for n in steps] if repeated else [solver]
            cases += [
                Case(model, task, sigma, solver_label(text), cap_evaluations(run, max_nfe))
                for model in models.distinct_for(solver)
                for run in runs
            ]
    if not cases:
        raise UserError("there is nothing to measure; expected at least one task, sigma and solver")
    return list({case.key: case for case in cases}.values())  # capped runs can coincide


def cap_evaluations(solver: Solver, max_nfe: int | None) -> Solver:
    """The solver with as many steps as `max_nfe` network evaluations allow; never fewer than two."""
    while max_nfe is not None and solver.evaluations() > max_nfe and solver.steps > 2:
        fewer = solver.steps * max_nfe // solver.evaluations()
        solver = dataclasses.replace(solver, steps=min(max(fewer, 2), solver.steps - 1))
    return solver


# ---------------------------------------------------------------------------------------------------------
# measuring


@dataclass(frozen=True)
class EvaluationOptions:
    """How to measure."""

    out: Path
    batch_size: int = 1
    seed: int = 0
    device: str = "cpu"
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    samples: int = 1  # of each measurement; figures are those of the first, the spread is between all of them
    trace: bool = False  # record the kurtosis of ε̂ at every step
    keep: int = 4  # pictures to keep of each case for the report, beside the worst ones
    fid: bool = False  # download the Inception weights if they are absent; if they are there, FID is always measured
    inception: Path | None = None  # the file of the Inception weights, if it is not in a usual place
    reference: Path | None = None  # other photographs, which FID compares with
    slow_limit: int | None = None  # pictures for solvers of more than `SLOW_EVALUATIONS`; None is all
    deadline: float | None = None  # the time.monotonic() before which every batch should end
    compile: bool = False  # compile the U-Nets for the batch size

    def images_of(self, case: Case, images: Sequence[CleanImage]) -> list[CleanImage]:
        """The images that a case is measured on."""
        if self.slow_limit is None or case.evaluations <= SLOW_EVALUATIONS:
            return list(images)
        return evenly(images, self.slow_limit)


def evaluate(
    cases: Sequence[Case],
    images: Sequence[CleanImage],
    models: Models,
    options: EvaluationOptions,
    protocol: dict[str, Any] | None = None,
    how: Callable[..., "Measuring"] | None = None,
) -> EvaluationResult:
    """Measure every case on every image that has no row yet; `how` is another class than `Measuring` to do it with.

    With several processes (RANK and WORLD_SIZE are set, as `accelerate launch` does) each measures its share of the
    images; all return when all are done.
    """
    run = RunFolder(options.out)
    parts = models.part_fingerprints(cases)
    changes = {
        "seed": options.seed,
        "size": list(images[0].pixels.shape[1:]),
        "precision": options.precision,
        "samples": options.samples,
    }
    run.check(changes, {name: models.fingerprint(name) for name in models.folders}, parts)
    wanted = {case: options.images_of(case, images) for case in cases}
    share = slice(run.rank, None, run.world)
    run.check_pictures({image.name: image.checksum for image in images[share]})
    pending = {case: [i for i in wanted[case][share] if (*case.key, i.name) not in run.done] for case in cases}
    timer = Timer(options.deadline)
    if any(pending.values()) and not timer.late():
        models.target, models.size = device_options(options), images[0].pixels.shape[-1]
    reasons = {case: models.why_not(case, images[0]) if pending[case] else None for case in cases}
    skipped = {case: reason for case, reason in reasons.items() if reason}
    if cases and len(skipped) == len(cases):
        case, reason = next(iter(skipped.items()))
        raise UserError(f"nothing can be measured: {case.label} on {case.task}: {reason}")
    todo = {case: pending[case] for case in cases if pending[case] and case not in skipped}
    changes |= protocol or {}
    if todo and not timer.late():
        device = models.pipeline(next(iter(todo)).model).device
        metrics = Metrics(device, options.inception, options.fid)
        added = {"models": models.facts(), "parts": parts, "not_measured": metrics.absent}
        run.save_protocol(changes | EXPLANATIONS, hardware=[machine(device, options.compile)], **added)
        runs = {case: wanted[case] for case in cases if case not in skipped}
        prepare_reference(options, run, cases, images[0], metrics)
        with run:
            measuring = (how or Measuring)(run, models, metrics, options, timer, runs)
            measuring.truths([image for image in images[share] if image.name not in run.truths])
            measuring.all(todo)
    else:
        if not todo and not timer.late():  # all rows are there, but perhaps not yet the reference
            prepare_reference(options, run, cases, images[0])
        run.save_protocol(changes)
    run.wait_for_all()
    return EvaluationResult.of(
        options.out,
        {case.key: [image.name for image in chosen] for case, chosen in wanted.items()},
        {case.key: reason for case, reason in skipped.items()},
        len(images),
    )


def prepare_reference(
    options: EvaluationOptions, run: RunFolder, cases: Sequence[Case], image: CleanImage, metrics: Metrics | None = None
) -> None:
    """Measure the photographs that FID compares with, if there are any; only the first process does."""
    if options.reference is None or run.rank:
        return
    check_features(run.rows, {case.key for case in cases}, run.folder)

    def load() -> Metrics:
        return metrics or Metrics(pick_device(options.device), options.inception, options.fid)

    measure_reference(options.reference, image.pixels.shape[-1], load, run.folder)


def device_options(options: EvaluationOptions) -> dict[str, Any]:
    """The arguments of `RestorationPipeline.to`."""
    if options.compile:
        from ddc.fused import can_compile

        if not can_compile():
            raise UserError("--compile needs a CUDA device, Triton and a C compiler. Leave it out")
    torch.backends.cudnn.benchmark = True
    dtype = DTYPES[options.precision]
    return {"device": options.device, "dtype": dtype, "compile": options.compile, "batch": options.batch_size}


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
        in_order = sorted(runs, key=lambda case: solver_order(case.label))
        self.leaders = set({(case.task, case.sigma): case for case in reversed(in_order)}.values())

    def truths(self, images: list[CleanImage]) -> None:
        """Write the features of clean images."""
        size = self.options.batch_size
        for batch in (images[start : start + size] for start in range(0, len(images), size)):
            features = self.metrics.features(torch.stack([image.pixels for image in batch]).float() / 255)
            rows: list[Row] = [{"truth": image.name, "checksum": image.checksum} for image in batch]
            for i, row in enumerate(rows):
                row["features"] = {name: pack(table[i]) for name, table in features.items()}
            self.run.write(rows)

    def all(self, todo: dict[Case, list[CleanImage]]) -> None:
        """Measure the images that each case lacks."""
        cases = list(todo)
        if self.options.deadline is not None:  # so that a short time gives complete rows of many solvers
            cases.sort(key=self.evaluations)
        written: list[Future[None]] = []
        total = sum(map(len, todo.values()))
        with ThreadPoolExecutor(1) as writer, progress(total, hidden=self.run.rank > 0) as advance:
            worst = {case: WORST if case in self.leaders else 0 for case in cases}
            kept = {case: Gallery(self.run, case.key, self.keep, worst[case], writer) for case in cases}
            for case, (rows, pictures) in self.batches({case: todo[case] for case in cases}):
                self.run.write(rows)
                written += kept[case].offer(rows, pictures)
                advance(len(rows), f"{case.task} σ={case.sigma:g} {case.label}")
        for future in written:
            future.result()  # a picture that could not be written is an error

    def batches(self, todo: dict[Case, list[CleanImage]]) -> Iterator[tuple[Case, Measured]]:
        """Batch by batch, each with all cases that lack the same images, so that the features of the truth are computed once.
        If the time is limited, one case after the other, so that a case is complete before the next begins."""
        size, limited = self.options.batch_size, self.options.deadline is not None
        counts = {case: self.evaluations(case) for case in todo}
        together: dict[Any, list[Case]] = {}
        for case, images in todo.items():
            key = case.key if limited else (case.model, *(image.name for image in images))
            together.setdefault(key, []).append(case)
        for cases in together.values():
            images = todo[cases[0]]
            for start, case in product(range(0, len(images), size), cases):
                if not self.timer.allows(case.key[3:], counts[case]):
                    continue
                batch = images[start : start + size]
                if start == 0:
                    self.warm_up(case, batch)
                started = time.monotonic()
                measured = self.batch(case, batch)
                self.timer.took(case.key[3:], counts[case], time.monotonic() - started)
                yield case, measured

    def evaluations(self, case: Case) -> int:
        """Of a network, for one image, with the settings that the solver leaves to the model."""
        height, width = self.runs[case][0].pixels.shape[1:]
        problem = make_problem(case.task, case.sigma, size=(height, width), seeds=[0])
        parts = self.models.pipeline(case.model).parts(case.solver, problem)
        return case.solver.settled(problem, parts, (height, width)).evaluations()

    def warm_up(self, case: Case, images: list[CleanImage]) -> None:
        """Have CUDA's kernels loaded, chosen and compiled, which is not the solver's time."""
        if self.device.type == "cuda" and case.evaluations:
            self.batch(case, images, short=True)

    def batch(self, case: Case, images: list[CleanImage], short: bool = False) -> Measured:
        """Degrade, restore and compare a few images; repeated up to a full batch, for which networks are compiled."""
        count, options = len(images), self.options
        full = min(options.batch_size, len(self.runs[case])) if options.compile else 0
        if short:
            case = dataclasses.replace(case, solver=dataclasses.replace(case.solver, steps=2))
        images = images + images[-1:] * (full - count)
        names = [image.name for image in images]
        truth = torch.stack([image.pixels for image in images]).to(self.device).float() / 255
        problem, y = measure(case.task, case.sigma, to_internal(truth), names, options.seed)
        restored, seconds, trace = self.restore(case, problem, y, names, (truth.shape[-2], truth.shape[-1]))
        finite = torch.isfinite(restored[0]).flatten(1).all(1).tolist()
        pictures = [to_unit(torch.nan_to_num(x, nan=0.0)) for x in restored]
        # of the whole batch, because the operator's masks belong to it
        agreement = consistency(to_internal(pictures[0]), y, problem)
        samples, truth = [sample[:count] for sample in pictures], truth[:count]
        values, features = self.metrics(samples[0], truth)
        values["consistency"] = agreement[:count].tolist()
        parts = self.models.pipeline(case.model).parts(case.solver, problem)
        if len(samples) > 1:
            inpaints = isinstance(problem.operator, Inpaint)
            seen = problem.operator.observed(y, (truth.shape[-2], truth.shape[-1])) if inpaints else None
            hole = None if seen is None else 1 - seen[:count].float()
            network = parts.get("posterior")
            factor = 1.0 if network is None else network.widening(problem.operator)
            values |= judge_samples(torch.stack(samples), truth, hole, factor)
        evaluations = case.solver.settled(problem, parts, (truth.shape[-2], truth.shape[-1])).evaluations()
        timing = {"nfe": evaluations, "seconds": round(seconds, 6), "batch": len(images)}
        curves = torch.stack([column for _, column in trace], 1).tolist() if trace else []
        rows = []
        for i, name in enumerate(names[:count]):
            row: Row = dict(zip(KEY, case.key, strict=True)) | {"image": name}
            row |= {metric: round(column[i], 7) for metric, column in values.items() if column[i] is not None} | timing
            row |= {} if finite[i] else {"finite": False}
            if curves:
                row["kurtosis"] = [[t, round(k, 4)] for (t, _), k in zip(trace, curves[i], strict=True)]
            row["features"] = {name: pack(table[i]) for name, table in features.items()}
            rows.append(row)
        return rows, list(zip(truth, to_unit(problem.shown(y))[:count], *samples, strict=True))

    def restore(
        self, case: Case, problem: Problem, y: Tensor, names: list[str], size: tuple[int, int]
    ) -> tuple[list[Tensor], float, list[tuple[int, Tensor]]]:
        """The samples, the seconds of the first one for each image, and (t, kurtosis of ε̂) of its steps if recorded."""
        pipe, traced = self.models.pipeline(case.model), []
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda device: None

        def watch(step: Step) -> None:
            if step.noise is not None:
                traced.append((step.t, kurtosis(step.noise)))

        restored, seconds = [], 0.0
        for k in range(self.options.samples):
            seeds = image_seeds(self.options.seed, "solve", [f"{name}/{k}" if k else name for name in names])
            wait(self.device)
            started = time.perf_counter()
            with torch.no_grad():
                x = pipe.solve(y, problem, case.solver, seeds, watch if self.options.trace and k == 0 else None, size)
            wait(self.device)
            seconds = seconds or (time.perf_counter() - started) / len(names)
            restored.append(x.float())
        return restored, seconds, traced
