"""The work behind the page: forecasts, restorations and comparisons, for one visitor at a time. Nothing here knows
Gradio."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from ddc.degrade import degrade
from ddc.errors import UserError
from ddc.images import Picture, to_internal
from ddc.jobs import Options, Request
from ddc.notation import duration
from ddc.operators.base import Operator, Size
from ddc.perceptual import LPIPS, psnr
from ddc.pipeline import DOUBT_SAMPLES, RestorationPipeline, RestorationResult, find_part, part_names
from ddc.problems import DETECTED, TASKS, Task
from ddc.solvers import SOLVERS
from ddc.solvers.base import Solver, make_solver
from ddc.solvers.gradients import GradientSolver
from ddc.tiling import plan_for
from ddc.web import shown
from ddc.web.controls import TRY_TASKS, Choices, Trial
from ddc.web.folders import Store
from ddc.web.limits import Limits
from ddc.web.shown import Array, heat_map, heat_maximum, resized, view
from ddc.web.uploads import Upload

Progress = Callable[[float, str], None]


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


@dataclass
class Service:
    """A model, the limits, and a place for results."""

    pipe: RestorationPipeline
    limits: Limits
    store: Store
    lock: threading.Lock = field(default_factory=threading.Lock)  # one restoration at a time
    rates: dict[str, float] = field(default_factory=dict)  # seconds per evaluation and megapixel, by solver
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
        return f"The result will have {width} × {height} pixels and take about {duration(seconds)}.{tiles}"

    def _expected(self, upload: Upload, task: str, options: Options) -> tuple[int, int, float]:
        """The height, the width and the seconds of a restoration; one that cannot work is refused."""
        self.limits.check_samples(options["samples"])
        solver, operator = _checked(task, upload.size(), options)
        height, width = (side * operator.scale for side in upload.size())
        self.limits.check_size(height, width)
        samples = options["samples"] + (DOUBT_SAMPLES if options.get("doubt") else 0)
        seconds = self.expected_seconds((height, width), operator, solver, samples)
        self.limits.check_time(seconds)
        return height, width, seconds

    def expected_seconds(self, size: Size, operator: Operator, solver: Solver, samples: int = 1) -> float:
        """The time of a restoration to `size`, by the speed of earlier ones."""
        windows = [tile.window for tile in plan_for(size, operator, self.pipe.tile)]
        megapixels = sum(window.height * window.width for window in windows) / 1e6
        rate = self.rates.get(solver.name)
        if rate is None:
            slower = 3.0 if isinstance(solver, GradientSolver) else 1.0
            rate = slower * self.rates.get(self.pipe.solver, next(iter(self.rates.values()), 10.0))
        return samples * solver.evaluations() * megapixels * rate

    def warm_up(self) -> None:
        """Measure the speed of this computer on a small picture."""
        solver = self.pipe.solver
        if solver == "ddc" and self.pipe.network is None:
            solver = "ddnm"
        grey = Picture(np.full((128, 128, 3), 128, np.uint8))
        for steps in (1, 2):  # the very first run is slower
            self._run(grey, "denoise", {"sigma": 0.0, "solver": solver, "steps": steps})

    def _run(self, picture: Picture, task: str, options: Options) -> RestorationResult:
        """Restore a picture when no other one is being restored, and remember the speed."""
        with self.lock:
            result = self.pipe(picture, task, **options)
        height, width = result.picture.size
        work = result.evaluations * len(result.samples[0]) * min(height * width, self.pipe.tile**2) / 1e6
        if work > 0:
            self.rates[make_solver(options["solver"]).name] = result.seconds / work
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
        picture = upload.read(self.limits)
        height, width, _ = self._expected(upload, choices.task, choices.options)
        with self.store.room(3 * height * width * (choices.samples + 4)):  # the files and what is shown of them
            mask = _mask(picture, painted) if choices.task == "inpaint" else None
            text = f"Restoring ({choices.samples} samples)" if choices.samples > 1 else "Restoring"
            progress(0.0, text)
            options: Options = {**choices.options, "names": [upload.name], "mask": mask}
            options["progress"] = lambda share: progress(share, text)
            result = self._run(picture, choices.task, options)
            after = view(result.picture)
            height, width = after.shape[:2]
            std = result.std[0] if choices.samples > 1 else None
            doubt = (result.intervals[0][1] - result.intervals[0][0]) / 2 if choices.doubt else std
            return ShownRestoration(
                before=resized(view(picture), height, width),
                after=after,
                uncertainty=None if doubt is None else resized(heat_map(doubt), height, width),
                files=self._write(upload, result, mask, visitor),
                summary=_summary(result, choices, std),
                notes=[upload.rename(note) for note in result.notes[0]],
                command=shown.command_line(upload.name, choices, mask is not None),
                python=shown.python_code(upload.name, choices, mask is not None),
            )

    def _write(self, upload: Upload, result: RestorationResult, mask: Tensor | None, visitor: str) -> list[Path]:
        """Write the files that `ddc restore` would write, and the mask."""
        target = self.store.new_folder(visitor) / shown.result_name(upload.name)
        pictures = {target: result.mean[0]}
        if len(result.samples[0]) > 1:
            for number, sample in enumerate(result.samples[0], 1):
                pictures[target.with_name(f"{target.stem}_{number}.png")] = sample
        if mask is not None:
            pictures[target.with_name("mask.png")] = Picture.from_tensor(mask, grey=True)
        for path, picture in pictures.items():
            picture.write(path)
        return list(pictures)

    # ------------------------------------------------------------------------------------------------------
    # the API

    def restore_file(
        self, upload: Upload, task: str, options: Options, target: Path, quality: int, mask: Upload | None = None
    ) -> RestorationResult:
        """Restore an upload into the file `target`, as `ddc restore` does."""
        picture = upload.read(self.limits)
        height, width, _ = self._expected(upload, task, options)
        if mask is not None:
            self.limits.check_size(*mask.size())
        with self.store.room(8 * height * width):  # four channels of 16 bits
            masked: Options = {} if mask is None else {"mask": mask.path}
            result = self._run(picture, task, {**options, **masked, "names": [upload.name]})
            result.mean[0].write(target, quality)
        return result

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


def _mask(picture: Picture, painted: Array | None) -> Tensor | None:
    """The mask that was painted; None if the picture's transparency is the mask."""
    if painted is not None and painted.any():
        holes = resized((painted > 0).astype(np.uint8) * 255, *picture.size, PIL.Image.Resampling.NEAREST)
        if holes.all():
            raise UserError("the whole picture is painted over; leave some of it")
        return torch.from_numpy((holes == 0).astype(np.float32))[None]
    if picture.mask is None or bool(picture.mask.all()):
        raise UserError("there is no hole; paint over what is to be filled with the brush")
    return None


def _summary(result: RestorationResult, choices: Choices, std: Tensor | None) -> str:
    height, width = result.picture.size
    text = (
        f"**{width} × {height} pixels in {result.seconds:.1f} s**: {choices.solver}, {choices.steps} steps, "
        f"{result.evaluations} network evaluations"
    )
    if std is None:
        return text + "."
    return (
        f"{text} for each of {choices.samples} samples. They differ by {100 * float(std.mean()):.1f} % of the "
        f"brightness range on average; the palest colour of the map stands for {100 * heat_maximum(std):.1f} %. "
        "The slider shows the first sample; the first download is the mean of all."
    )
