"""The work behind the page: forecasts, restorations and comparisons, for one visitor at a time. Nothing here knows
Gradio."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from ddc.degrade import degrade
from ddc.diagnosis.treatment import NOTHING, plan_treatment
from ddc.errors import UserError
from ddc.images import Picture, to_internal
from ddc.jobs import STRENGTHS, Options, Request
from ddc.notation import duration
from ddc.operators.base import Operator, Size
from ddc.perceptual import LPIPS, psnr
from ddc.pipeline import DOUBT_SAMPLES, RestorationPipeline, RestorationResult, find_part, part_names, sampling
from ddc.problems import DETECTED, TASKS, Problem, Task
from ddc.solvers import SOLVERS
from ddc.solvers.base import Solver
from ddc.solvers.gradients import GradientSolver
from ddc.solvers.posterior import Posterior
from ddc.tiling import plan_for
from ddc.web import shown
from ddc.web.controls import REMOVE, TRY_TASKS, Choices, Trial
from ddc.web.folders import Store
from ddc.web.limits import MOST_FILES, Limits
from ddc.web.receiving import file_name
from ddc.web.shown import Array, busiest, heat_map, heat_maximum, resized, view
from ddc.web.uploads import Upload

Progress = Callable[[float, str], None]
FRESH = 120  # seconds for which a measured speed is believed; others may begin to use the computer
LONG = 60  # seconds from which a quicker solver is named
PREVIEWED = 256  # pixels of a preview
TAKEN_BACK = "so it is left as it is."  # in the note about a result of the task auto that was worse


class Stopped(UserError):
    """A run was stopped by the visitor who started it."""


@dataclass
class Visitors:
    """The visitors whose pictures are being restored, each with an event that stops the run."""

    running: dict[str, threading.Event] = field(default_factory=dict)

    def begin(self, visitor: str, progress: Progress) -> Progress:
        """`progress`, which now raises `Stopped` once the visitor has stopped the run."""
        event = self.running[visitor] = threading.Event()

        def report(share: float, text: str) -> None:
            if event.is_set():
                raise Stopped("the run was stopped")
            progress(share, text)

        return report

    def stop(self, visitor: str) -> None:
        event = self.running.pop(visitor, None)
        if event is not None:
            event.set()


@dataclass(frozen=True)
class ShownRestoration:
    """What the page shows of a restoration."""

    before: Array  # (h, w, 3) uint8, as large as `after`
    after: Array
    uncertainty: Array | None
    files: list[Path]
    summary: str
    notes: list[str]  # warnings about the result
    command: str
    python: str


@dataclass(frozen=True)
class ShownComparison:
    """What the page shows of two solvers on one degraded picture."""

    clean: Array
    measured: Array
    results: list[Array]
    table: str
    notes: list[str]
    files: list[Path]
    command: str


@dataclass(frozen=True)
class ShownSeveral:
    """What the page shows of several restored pictures."""

    files: list[Path]
    said: list[str]  # a line for each


@dataclass
class Service:
    """A model, the limits, and a place for results."""

    pipe: RestorationPipeline
    limits: Limits
    store: Store
    lock: threading.Lock = field(default_factory=threading.Lock)  # one restoration at a time
    rates: dict[str, float] = field(default_factory=dict)  # seconds per evaluation and megapixel, by solver
    measured: dict[str, float] = field(default_factory=dict)  # when each of them was
    lpips: LPIPS | None = None

    def solver_names(self) -> list[str]:
        """The solvers whose networks are available."""
        return [name for name, kind in SOLVERS.items() if self._has_networks(kind())]

    def _has_networks(self, solver: Solver) -> bool:
        if "prior" in solver.needs and solver.latent != self.pipe.latent:
            return False
        if "network" in solver.needs and self.pipe.network is None:
            return False
        parts = {part for task in TASKS for part in part_names(solver, task)}
        return not parts or any(find_part(part, self.pipe.folder) for part in parts)

    # ------------------------------------------------------------------------------------------------------
    # forecasts

    def forecast(self, upload: Upload, choices: Choices) -> str:
        """One sentence about the size and the time of a restoration; one that cannot work is refused."""
        height, width, seconds = self._expected(upload, choices.task, choices.options)
        tiles = " It is large, so it is restored in tiles." if max(height, width) > self.pipe.tile else ""
        text = f"The result will have {width} × {height} pixels and take about {duration(seconds)}.{tiles}"
        if seconds < LONG or self.quick in (choices.solver, self.pipe.solver):
            return text
        quick: Options = {**choices.options, "solver": self.quick, "steps": None}
        quick.pop("realism", None)
        other = self._expected(upload, choices.task, quick)[2]
        return f"{text} The solver {self.quick}, under More, takes about {duration(other)} and is nearly as good."

    def is_too_long(self, upload: Upload, choices: Choices) -> bool:
        """Whether a restoration would be refused because of its time, which the quick solver would save."""
        solver, operator = _checked(choices.task, upload.size(), choices.options)
        height, width = (side * operator.scale for side in upload.size())
        self._measure()
        long = self._seconds((height, width), operator, solver, choices.options) > 60 * self.limits.minutes
        return long and self.quick != choices.solver

    def _expected(self, upload: Upload, task: str, options: Options) -> tuple[int, int, float]:
        """The height, the width and the seconds of a restoration; one that cannot work is refused."""
        self.limits.check_samples(options["samples"])
        solver, operator = _checked(task, upload.size(), options)
        height, width = (side * operator.scale for side in upload.size())
        self.limits.check_size(height, width)
        self._measure()
        seconds = self._seconds((height, width), operator, solver, options)
        self.limits.check_time(seconds)
        return height, width, seconds

    def _seconds(self, size: Size, operator: Operator, solver: Solver, options: Options) -> float:
        """The time of all samples, with those for the doubt."""
        seconds = self.expected_seconds(size, operator, solver, options["samples"])
        if options.get("doubt"):
            seconds += self.expected_seconds(size, operator, sampling(solver), DOUBT_SAMPLES)
        return seconds

    def expected_seconds(self, size: Size, operator: Operator, solver: Solver, samples: int = 1) -> float:
        """The time of a restoration to `size`, by the speed of earlier ones."""
        windows = [tile.window for tile in plan_for(size, operator, self.pipe.tile)]
        megapixels = sum(window.height * window.width for window in windows) / 1e6
        rate = self.rates.get(solver.name)
        if rate is None:
            slower = 3.0 if isinstance(solver, GradientSolver) else 1.0
            rate = slower * self.rates.get(self.pipe.solver, next(iter(self.rates.values()), 10.0))  # as fast as others
        if "posterior" in solver.needs:  # whose network says how many evaluations it takes
            problem = Problem(operator)
            solver = solver.settled(problem, self.pipe.parts(solver, problem), size)
        return samples * solver.evaluations() * megapixels * rate

    def warm_up(self) -> None:
        """Measure the speed of this computer on a small picture."""
        for _ in range(2):  # the very first run is slower
            self.measured.clear()
            self._measure()

    def _measure(self) -> None:
        """Measure the speed of the usual solver, unless that was done a moment ago or a restoration is under way."""
        solver = "ddnm" if self.pipe.solver == "ddc" and self.pipe.network is None else self.pipe.solver
        if time.monotonic() - self.measured.get(solver, -math.inf) < FRESH or not self.lock.acquire(blocking=False):
            return
        try:
            grey = Picture(np.full((PREVIEWED, PREVIEWED, 3), 128, np.uint8))
            self._timed(grey, "denoise", {"sigma": 0.0, "solver": solver, "steps": 1})
        finally:
            self.lock.release()

    def _run(self, picture: Picture, task: str | Operator, options: Options) -> RestorationResult:
        """Restore a picture when no other one is being restored."""
        with self.lock:
            return self._timed(picture, task, options)

    def _timed(self, picture: Picture, task: str | Operator, options: Options) -> RestorationResult:
        """Restore a picture, and remember the speed."""
        result = self.pipe(picture, task, **options)
        height, width = result.picture.size
        work = result.evaluations * len(result.samples[0]) * min(height * width, self.pipe.tile**2) / 1e6
        name = result.solvers[0]  # empty where a result was taken back
        if work > 0 and name and not options.get("doubt"):  # whose samples have evaluations of their own
            self.rates[name], self.measured[name] = result.seconds / work, time.monotonic()
        return result

    # ------------------------------------------------------------------------------------------------------
    # "Restore my photo"

    def restore(
        self,
        upload: Upload,
        choices: Choices,
        painted: Array | None = None,
        progress: Progress = lambda share, text: None,
        visitor: str = "visitor",
    ) -> ShownRestoration:
        """Restore an upload. `painted` (h, w) is above 0 where the brush was, at any size."""
        picture, notes = upload.read_with_notes(self.limits)
        height, width, _ = self._expected(upload, choices.task, choices.options)
        # the files and what is shown of them; or a copy of what was uploaded
        with self.store.room(upload.path.stat().st_size + 3 * height * width * (choices.samples + 4)):
            mask = _mask(picture, painted, choices.kind == REMOVE) if choices.task == "inpaint" else None
            text = f"Restoring ({choices.samples} samples)" if choices.samples > 1 else "Restoring"
            progress(0.0, text)
            options: Options = {**choices.options, "names": [upload.name], "mask": mask}
            options["progress"] = lambda share: progress(share, text)
            result = self._run(picture, choices.task, options)
            after = view(result.picture)
            height, width = after.shape[:2]
            std = result.std[0] if choices.samples > 1 else None
            doubt = (result.intervals[0][1] - result.intervals[0][0]) / 2 if choices.doubt else std
            files, more = self._write(upload, picture, result, mask, visitor, choices.format)
            return ShownRestoration(
                before=resized(view(picture), height, width),
                after=after,
                uncertainty=None if doubt is None else resized(heat_map(doubt), height, width),
                files=files,
                summary=_summary(result, choices, std),
                notes=[*notes, *(_with_advice(upload.rename(note)) for note in result.notes[0]), *more],
                command=shown.command_line(upload.name, choices, mask is not None),
                python=shown.python_code(upload.name, choices, mask is not None),
            )

    def _write(
        self, upload: Upload, before: Picture, result: RestorationResult, mask: Tensor | None, visitor: str, format: str
    ) -> tuple[list[Path], list[str]]:
        """Write the files that `ddc restore` would write, and the mask; returns them, and warnings."""
        target = self.store.new_folder(visitor) / shown.result_name(file_name(upload.name), format)
        notes = upload.write_result(before, _whole(result), target)
        pictures = {}
        if len(result.samples[0]) > 1:
            for number, sample in enumerate(result.samples[0], 1):
                pictures[target.with_name(f"{target.stem}_{number}.{format}")] = sample
        if mask is not None:
            pictures[target.with_name("mask.png")] = Picture.from_tensor(mask, grey=True)
        for path, picture in pictures.items():
            picture.write(path)
        return [target, *pictures], notes

    @property
    def quick(self) -> str:
        """The solver of previews: the quickest that the model has the networks for."""
        return "one-pass" if self.pipe.solver == "ddc" and self.pipe.network is not None else self.pipe.solver

    def preview(
        self, upload: Upload, choices: Choices, place: tuple[int, int] | None = None
    ) -> tuple[Array, Array, str] | None:
        """A part of an upload before and after, and a sentence; None where a part shows nothing.

        place: the row and the column of its middle; by default it is where there is most detail
        """
        if choices.task == "inpaint":
            return None
        picture, _ = upload.read_with_notes(self.limits)
        _checked(choices.task, picture.size, choices.options)
        task: str | Operator = choices.task
        options: Options = {"solver": self.quick, "names": [upload.name], "sigma": choices.options.get("sigma")}
        scale, shrink = choices.scale if choices.task.startswith("sr") else 1, 1.0
        if choices.task == "auto":
            told = self.quick == "posterior"
            plan = plan_treatment(picture, told, STRENGTHS[choices.strength])
            if plan.task == NOTHING:
                return None
            task, options["sigma"], shrink = plan.operator or plan.task, plan.sigma, plan.shrink
            if told and plan.solver is not None:
                options["solver"] = plan.solver
            picture = plan.prepared(picture)
            scale = Task.parse(plan.task).operator(picture.size).scale if shrink > 1 else 1
        else:
            options["strength"] = choices.strength  # type: ignore[typeddict-item]
        side = PREVIEWED // scale
        if place is None:
            top, left = busiest(picture.pixels, side)
        else:
            top, left = (round(middle / shrink) - side // 2 for middle in place)
        rows, columns = (_around(start, side, length) for start, length in zip((top, left), picture.size, strict=True))
        part = dataclasses.replace(picture, pixels=np.ascontiguousarray(picture.pixels[rows, columns]), alpha=None)
        result = self._run(part, task, options)
        after = view(result.picture)
        text = f"A preview of {after.shape[1]} × {after.shape[0]} pixels, made in {result.seconds:.1f} s."
        return resized(view(part), *after.shape[:2]), after, text

    def restore_several(
        self, uploads: Sequence[Upload], solver: str, format: str, progress: Progress, visitor: str
    ) -> ShownSeveral:
        """Restore several uploads, each as what is found in it; those that cannot be are named."""
        if len(uploads) > MOST_FILES:
            raise UserError(f"there are {len(uploads)} pictures; this page takes {MOST_FILES} at once")
        options: Options = {"solver": solver, "samples": 1}
        self.limits.check_time(sum(self._expected_or_0(upload, options) for upload in uploads))
        files, said = [], []
        target = self.store.new_folder(visitor)
        for index, upload in enumerate(uploads):

            def report(share: float, index: int = index) -> None:
                progress((index + share) / len(uploads), f"Picture {index + 1} of {len(uploads)}")

            path = target / f"{index + 1}_{shown.result_name(file_name(upload.name), format)}"
            try:
                said.append(self._restore_one(upload, {**options, "progress": report}, path))
                files.append(path)
            except Stopped:
                raise
            except UserError as error:
                said.append(upload.rename(str(error), path))
        return ShownSeveral(files, said)

    def _restore_one(self, upload: Upload, options: Options, path: Path) -> str:
        """Restore one of several; returns what was found in it."""
        found: list[str] = []
        named: Options = {**options, "names": [upload.name], "planned": lambda _, plan: found.append(plan.in_words())}
        result = self.restore_file(upload, "auto", named, path, 95)
        notes = [note.removesuffix(" To enlarge it, use --task sr4") for note in result.notes[0]]
        return " ".join([*(f"{upload.name}: {text}" for text in found), *notes])

    def _expected_or_0(self, upload: Upload, options: Options) -> float:
        """The seconds of a picture; one that cannot be restored takes none."""
        try:
            return self._expected(upload, "auto", options)[2]
        except UserError:
            return 0.0

    # ------------------------------------------------------------------------------------------------------
    # the API

    def restore_file(
        self, upload: Upload, task: str, options: Options, target: Path, quality: int, mask: Upload | None = None
    ) -> RestorationResult:
        """Restore an upload into the file `target`, as `ddc restore` does. The notes have the visitor's names."""
        picture, notes = upload.read_with_notes(self.limits)
        height, width, _ = self._expected(upload, task, options)
        if mask is not None:
            self.limits.check_size(*mask.size())
        # four channels of 16 bits; or a copy of what was uploaded
        with self.store.room(upload.path.stat().st_size + 8 * height * width):
            masked: Options = {} if mask is None else {"mask": mask.path}
            result = self._run(picture, task, {**options, **masked, "names": [upload.name]})
            more = upload.write_result(picture, _whole(result), target, quality)
        for note in result.notes[0]:
            notes.append(upload.rename(mask.rename(note) if mask else note))
        return dataclasses.replace(result, notes=[notes + more])

    # ------------------------------------------------------------------------------------------------------
    # "Try it"

    def compare(
        self,
        upload: Upload,
        trial: Trial,
        progress: Progress = lambda share, text: None,
        visitor: str = "visitor",
    ) -> ShownComparison:
        """Degrade a clean picture and restore it with two solvers."""
        if trial.task not in TRY_TASKS:
            raise UserError(f"the task {trial.task!r} is not offered; expected one of {', '.join(TRY_TASKS)}")
        picture = upload.read(self.limits)
        clean = Picture(view(picture, trial.longest), grey=picture.grey)
        checked = [_checked(trial.task, clean.size, options) for options in trial.options]
        self.limits.check_time(sum(self.expected_seconds(clean.size, operator, solver) for solver, operator in checked))
        with self.store.room(50 * clean.size[0] * clean.size[1]):  # one file is of 12 bytes a pixel
            measured = degrade(clean, trial.task, trial.sigma, trial.seed, "clean.png", floating=True)
            folder = self.store.new_folder(visitor)
            files = [folder / "clean.png", folder / "measured.npy"]
            clean.write(files[0])
            measured.write(files[1])
            rows, pictures, notes = [], [], []
            for index, ((solver, _), options) in enumerate(zip(checked, trial.options, strict=True)):
                text = f"Solver {index + 1} of 2: {solver.name}"

                def report(share: float, index: int = index, text: str = text) -> None:
                    progress((index + share) / 2, text)

                report(0.0)
                named: Options = {**options, "names": ["measured.npy"], "progress": report}
                result = self._run(measured, trial.task, named)
                files.append(folder / f"restored_{index + 1}_{solver.name}.png")
                result.picture.write(files[-1])
                pictures.append(view(result.picture)[: clean.size[0], : clean.size[1]])
                notes += [note for note in result.notes[0] if note not in notes]
                rows.append(self._row(clean, result, solver))
            columns = ("solver", "steps", "evaluations", "PSNR ↑", "LPIPS ↓", "time")
            lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
            return ShownComparison(
                clean=view(clean),
                measured=resized(view(measured), *clean.size, PIL.Image.Resampling.NEAREST),
                results=pictures,
                table="\n".join(lines),
                notes=notes,
                files=files,
                command=shown.trial_commands(trial, [file.name for file in files[2:]]),
            )

    def _row(self, clean: Picture, result: RestorationResult, solver: Solver) -> tuple[str, ...]:
        """The row of one solver in the table."""
        if self.lpips is None:
            self.lpips = LPIPS("alex").to(self.pipe.device)
        truth = clean.tensor[None]
        # where the scale does not divide the size, the restored picture is a little larger
        x = result.picture.tensor[None, :, : clean.size[0], : clean.size[1]]
        with torch.no_grad():
            lpips = self.lpips(*(to_internal(image).to(self.pipe.device) for image in (x, truth)))
        return (
            solver.name,
            str(solver.steps),
            str(result.evaluations),
            f"{float(psnr(x, truth)):.2f} dB",
            f"{float(lpips):.3f}",
            f"{result.seconds:.1f} s",
        )


def _checked(task: str, size: Size, options: Options) -> tuple[Solver, Operator]:
    """The solver and the operator; a combination that cannot work is refused before any pixel is read."""
    request = Request(task, **options)
    request.check()
    # one of the same size stands for an operator that is still to be detected, and for a mask still to be painted
    known = {"inpaint": "box", **dict.fromkeys(DETECTED, "denoise")}.get(task, task)
    return request.method, Task.parse(known).operator(size)


def _around(start: int, side: int, length: int) -> slice:
    """A window inside of a side of a picture, on the grid of JPEG's blocks."""
    start = min(max(start, 0), max(length - side, 0)) // 8 * 8
    return slice(start, min(start + side, length))


def _mask(picture: Picture, painted: Array | None, remove: bool = False) -> Tensor | None:
    """The mask that was painted; None if the picture's transparency is the mask."""
    if painted is not None and painted.any():
        holes = resized((painted > 0).astype(np.uint8) * 255, *picture.size, PIL.Image.Resampling.NEAREST)
        if holes.all():
            raise UserError("the whole picture is painted over; leave some of it")
        return torch.from_numpy((holes == 0).astype(np.float32))[None]
    if remove:
        raise UserError("nothing is painted over; paint over what is to be removed with the brush")
    if picture.mask is None or bool(picture.mask.all()):
        raise UserError("there is no hole; paint over what is to be filled with the brush")
    return None


def _whole(result: RestorationResult) -> Picture:
    """The mean of the samples, or the picture itself if it was left as it is."""
    return result.pictures[0] if result.tasks[0] == NOTHING else result.mean[0]


def _with_advice(note: str) -> str:
    """A note; one that a result was taken back says how to get it all the same."""
    return f"{note} Choose the task by hand to undo it all the same." if TAKEN_BACK in note else note


def _summary(result: RestorationResult, choices: Choices, std: Tensor | None) -> str:
    height, width = result.picture.size
    text = f"**{width} × {height} pixels in {result.seconds:.1f} s**: "
    text += "left as it is" if result.tasks[0] == NOTHING else result.tasks[0]
    if solver := result.solvers[0]:
        steps = f"{choices.steps} steps, " if solver == choices.solver != Posterior.name else ""
        text += f" with {solver}, {steps}{result.evaluations} network evaluations"
    if std is None:
        return text + "."
    return (
        f"{text} for each of {choices.samples} samples. They differ by {100 * float(std.mean()):.1f} % of the "
        f"brightness range on average; the palest colour of the map stands for {100 * heat_maximum(std):.1f} %. "
        "The slider shows the first sample; the first download is the mean of all."
    )
