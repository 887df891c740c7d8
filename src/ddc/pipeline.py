"""RestorationPipeline: the one door for people. Pictures in, pictures out.

pipe = RestorationPipeline.from_pretrained("model").to("cuda")
pipe("small.png", task="sr4").picture.write("large.png")
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from ddc.consistency import DataConsistency
from ddc.errors import UserError
from ddc.estimates import diagnose, estimate_blur, estimate_sigma, is_possible, with_jpeg_noise
from ddc.images import (
    ROUNDING_8_BIT,
    Picture,
    checked_floats,
    internal_sigma,
    jpeg_quality,
    to_internal,
)
from ddc.noise import Noise, derive_seed
from ddc.operators.base import LinearOperator, Operator, check_adjoint
from ddc.operators.blur import Blur, GaussianBlur
from ddc.operators.border import is_reflected
from ddc.operators.colorize import GREY, Colorize
from ddc.operators.inpaint import Inpaint
from ddc.priors import Prior
from ddc.problems import READ_OFF, Problem, check_sigma, task_family, task_operator
from ddc.solvers import SOLVERS
from ddc.solvers.base import Callback, Solver, Step
from ddc.tiling import (
    SMALLEST_TILE,
    Window,
    level,
    own_measurement,
    plan_for,
    reach_of,
    restore_by_tiles,
    surroundings_of,
    widened,
)

logger = logging.getLogger("ddc")

DEFAULT_MODEL = Path(__file__).parent / "models" / "default"
MOST_NOISE = 0.1  # that it was trained for, in [0, 1] units
DEFAULT_TILE = 256  # pixels; what the networks are trained at, and compiled for on CUDA
MEASURED_STEPS = 3  # of the first tile, to forecast the time of all
FINE_JPEG = 90  # a quality from which on a JPEG hardly differs from what it was made of
SHARP = 0.7  # pixels; photographs that nobody blurred are estimated up to 0.5, as JPEG up to 0.7
ESTIMATE_NOISE = ("denoise", "deblur")  # where none is said
CPU_TILE = 512  # nothing is compiled there, and fewer borders are faster and better

Image = str | Path | Picture | Tensor | np.ndarray[Any, Any] | PIL.Image.Image


@dataclass(frozen=True)
class Forecast:
    """What a call of the pipeline will take, told after its first steps."""

    height: int  # of the restored picture
    width: int
    tiles: int
    seconds: float  # for the whole call


@dataclass(frozen=True)
class RestorationResult:
    """What came out, one entry for each picture that went in."""

    pictures: list[Picture]  # the restored pictures; the first sample of each
    samples: list[list[Picture]] = field(repr=False)  # all samples of each
    mean: list[Picture] = field(repr=False)  # over the samples
    # of each pixel over the samples, (3, H, W) in [0, 1] units; zero for one sample
    std: list[Tensor] = field(repr=False)
    seconds: float  # in all
    evaluations: int  # of a network, for one sample of the last picture, over all its tiles
    seed: int
    sigma: list[float]  # the noise level used for each
    tasks: list[str]  # the task of each
    notes: list[list[str]]  # what the logger "ddc" warned of while each was restored
    forecast: Forecast | None = None  # what was expected of the time, where the solver has steps

    @property
    def picture(self) -> Picture:
        """The restored picture, where one went in."""
        return self.pictures[0]


@dataclass(frozen=True)
class _Job:
    """One picture to restore once."""

    picture: Picture
    problem: Problem
    seed: int
    goes_on: bool  # beyond the border of the picture


class RestorationPipeline:
    """A prior, and the data-consistency network that goes with it."""

    def __init__(
        self,
        prior: Prior,
        network: DataConsistency | None = None,
        folder: Path | None = None,
        tile: int = DEFAULT_TILE,
    ) -> None:
        self.prior = prior
        self.network = network
        self.folder = folder
        self.tile = tile
        self.device = torch.device("cpu")
        self.batch = 1  # pictures or tiles at once; the fast path chooses by the card's memory
        self.accelerated = False
        self._told: set[str] = set()  # notes that were logged
        self._parts: dict[tuple[str, str], dict[str, Any]] = {}  # of solvers, by their name and the task's

    @staticmethod
    def from_pretrained(
        folder: str | Path | None = None, network: str | Path | None = None
    ) -> "RestorationPipeline":
        """Read a model folder: prior/ and network/. None is the model that comes with the package.

        A prior's own folder (unet/ and scheduler/) is taken as well, and a folder with network/ alone: its
        prior is that of the model that comes with the package. `network` names a data-consistency network
        that lies elsewhere.
        """
        if folder is None:
            if not (DEFAULT_MODEL / "prior").is_dir():
                raise UserError(
                    "no model was named and none came with this package; name a folder with --model"
                )
            folder = DEFAULT_MODEL
        folder = Path(folder)
        if not folder.exists():
            raise UserError(f"the model folder {folder} does not exist; check --model")
        if folder.is_file():
            raise UserError(
                f"{folder} is a file; a model is a folder with prior/ and network/. "
                "A checkpoint (.pt) becomes one with `ddc convert`"
            )
        prior = prior_folder(folder)
        if prior is None:
            lack = ", and none came with this package" if (folder / "network").is_dir() else ""
            raise UserError(
                f"{folder} is not a model: it has no prior/ (with unet/ and scheduler/) in it{lack}"
            )
        network_folder = Path(network) if network is not None else folder / "network"
        has_network = network is not None or network_folder.is_dir()
        return RestorationPipeline(
            Prior.from_pretrained(prior).requires_grad_(False),
            DataConsistency.from_pretrained(network_folder).requires_grad_(False) if has_network else None,
            folder,
        )

    def to(self, device: str | torch.device, fast: bool = True, **options: Any) -> "RestorationPipeline":
        """Move to a device; "auto" is the best there is.

        The fast path is on unless `fast` is False; `options` are those of `ddc.fast.accelerate_models`.
        """
        if self.accelerated:
            raise UserError(
                "this pipeline is on the fast path of its device already; load it again to move it"
            )
        self.device = pick_device(device)
        if self.tile == DEFAULT_TILE:
            self.tile = default_tile(self.device)
        self._parts.clear()
        if fast and self.device.type in ("cpu", "cuda"):
            from ddc.fast import accelerate_models

            models = accelerate_models(self.prior, self.network, self.device, size=self.tile, **options)
            self.prior, self.network, self.batch = models.prior, models.network, models.batch
            self.accelerated = True
            return self
        self.prior.to(self.device)
        if self.network is not None:
            self.network.to(self.device)
        return self

    def __call__(
        self,
        images: Image | Sequence[Image],
        task: str | Operator = "sr4",
        *,
        sigma: float | Literal["auto"] | None = None,
        solver: str | Solver = "ddc",
        steps: int | None = None,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        samples: int = 1,
        names: Sequence[str] | None = None,
        mask: Tensor | np.ndarray | str | Path | None = None,
        kernel: Tensor | str | Path | None = None,
        operator_file: str | None = None,
        tile: int | None = None,
        batch: int | None = None,
        callback: Callback | None = None,
        progress: Callable[[float], None] | None = None,
        forecast: Callable[[Forecast], None] | None = None,
    ) -> RestorationResult:
        """Restore one picture or several.

        images: files, `Picture`s, Pillow images, (H, W, 3) arrays, or (3, H, W) tensors; floats are in [0, 1]
        task: a name (see `ddc.problems.TASKS`), "jpeg" for the quality that a file says, "deblur" for a blur that
            the picture shows, "auto" for whatever it shows, or an operator
        sigma: the noise of the pictures in [0, 1] units, or "auto" to estimate it from each; left out, it is
            "auto" for the tasks denoise and deblur, what "auto" finds, and 0 for the others
        solver, steps, options: the algorithm, its length, and its other settings by name
        seed: of all randomness, with each picture's name (a file's name, `names`, or else its index)
        samples: how many restorations of each picture
        mask, kernel, operator_file: what the tasks inpaint, blur and custom need; a mask is 1 where the
            picture is known, and 0 in its holes
        tile: the side of a tile in pixels; None is the model's own, 0 never cuts
        batch: pictures of one size, or tiles, that are restored together; None chooses
        callback: called after each step of each tile; progress: called with the share that is done
        forecast: called once, as soon as the first steps say how long the whole will take

        What is worth knowing about a result, such as that its picture does not fit the task, is in the
        result's notes; the logger "ddc" is told of it the first time.
        """
        started = time.perf_counter()
        pictures = _as_pictures(images)
        if samples < 1:
            raise UserError(f"samples must be at least 1, not {samples}")
        if tile is not None and tile != 0 and tile < SMALLEST_TILE:
            raise UserError(f"a tile must be at least {SMALLEST_TILE} pixels (or 0: never cut), not {tile}")
        if isinstance(mask, np.ndarray):
            mask = torch.from_numpy(mask)
        method = make_solver(solver, steps, options)
        operators = _Operators(mask, kernel, operator_file)
        if isinstance(task, str) and task not in READ_OFF:
            task_family(task)  # an unknown name is refused before anything is read
        jobs: list[_Job] = []
        notes: list[list[str]] = [[] for _ in pictures]
        for index, picture in enumerate(pictures):
            name = names[index] if names else picture.path.name if picture.path else index
            with _noting(notes[index], self._told):
                own_task, own_sigma = asked_of(picture, task, sigma)
                problem = self.problem(picture, operators, own_task, own_sigma)
                self.check(method, problem)
                self.warn_of_lack_of_training(method, problem)
                warn_of_range(picture)
                warn_of_misfit(picture, problem)
            if operators.use_alpha(own_task):
                picture = dataclasses.replace(picture, alpha=None)
            first = derive_seed(seed, name)
            seeds = [first, *(derive_seed(first, sample) for sample in range(1, samples))]
            beyond = goes_on(picture, problem)
            jobs.extend(_Job(picture, problem, one, beyond) for one in seeds)

        batch = batch or self.batch
        clock = _Clock(started, len(jobs), forecast, self.device)
        run = _Run(self, method, self.tile if tile is None else tile, batch, callback, clock)
        restored: list[Picture] = []
        of_all: list[str] = []  # of the computer rather than of a picture
        with _noting(of_all, set()):
            for group in _groups(jobs, batch):
                share = len(group) / len(jobs)
                done = len(restored) / len(jobs)
                report = (lambda part, a=done, b=share: progress(a + b * part)) if progress else None
                restored.extend(run.group(group, report))
        per_picture = [restored[i : i + samples] for i in range(0, len(restored), samples)]
        return RestorationResult(
            pictures=[all_samples[0] for all_samples in per_picture],
            samples=per_picture,
            mean=[_mean(all_samples) for all_samples in per_picture],
            std=[_std(all_samples) for all_samples in per_picture],
            seconds=time.perf_counter() - started,
            evaluations=run.evaluations,
            seed=seed,
            sigma=[float(job.problem.sigma_y) for job in jobs[::samples]],
            tasks=[job.problem.name for job in jobs[::samples]],
            notes=[own + of_all for own in notes],
            forecast=clock.forecast,
        )

    def problem(
        self, picture: Picture, operators: "_Operators", task: str | Operator, sigma: float | Literal["auto"]
    ) -> Problem:
        """The problem that a picture is the measurement of."""
        sigma_y = estimate_sigma(picture) if sigma == "auto" else float(sigma)
        check_sigma(sigma_y)
        operator, name = operators.of(picture, task, sigma_y)
        if operator.scale > 1 or isinstance(operator, Blur):
            sigma_y = with_jpeg_noise(picture, sigma_y)
        return Problem(operator, sigma_y, name)

    def check(self, solver: Solver, problem: Problem) -> None:
        """Refuse, before anything runs, what cannot work."""
        solver.check(problem)
        if "network" in solver.needs and self.network is None:
            raise UserError(
                f"{solver.name} needs a data-consistency network; {self.folder or 'this model'} has no network/. "
                "Name one with --network, or use ddnm or dps"
            )
        self.prior.schedule.pairs(solver.steps)

    def warn_of_lack_of_training(self, solver: Solver, problem: Problem) -> None:
        """Say so where the network never saw the task, or as much noise."""
        unknown = None
        if isinstance(problem.operator, Colorize) or problem.operator.scale > 8:
            unknown = problem.name
        elif float(problem.sigma_y) > 1.5 * MOST_NOISE:
            unknown = f"noise above {MOST_NOISE:g}"
        if unknown and "network" in solver.needs and self.folder == DEFAULT_MODEL:
            logger.warning(
                "the model that ships was not trained for %s, so expect little of it; "
                "the solver ddnm needs no training",
                unknown,
            )

    def parts(self, solver: Solver, problem: Problem) -> dict[str, Any]:
        """What a solver takes beside the prior, on this device."""
        key = (solver.name, problem.name)
        if key not in self._parts:
            loaded = solver.load_parts(self.folder, problem)
            self._parts[key] = {k: v.to(self.device) if hasattr(v, "to") else v for k, v in loaded.items()}
        network = {"network": self.network} if "network" in solver.needs else {}
        return network | self._parts[key]


class _Run:
    """One call of the pipeline: the tile, which halves when memory runs out, and the count of evaluations."""

    def __init__(
        self,
        pipe: RestorationPipeline,
        solver: Solver,
        tile: int,
        batch: int,
        callback: Callback | None,
        clock: "_Clock",
    ) -> None:
        self.pipe, self.solver, self.tile, self.batch = pipe, solver, tile, batch
        self.callback, self.clock = callback, clock
        self.evaluations = 0

    def group(self, jobs: Sequence[_Job], progress: Callable[[float], None] | None) -> list[Picture]:
        """Restore jobs that fit together in one batch."""
        while True:
            short = False
            try:
                x = self.solve(jobs, progress)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                short = True
            if not short:
                return [_finish(job.picture, job.problem, image) for job, image in zip(jobs, x, strict=True)]
            # outside the handler, for the exception holds on to the tensors of the failed run
            if self.pipe.device.type == "cuda":
                torch.cuda.empty_cache()
            if self.batch > 1:
                self.batch //= 2
                self.pipe.batch = min(self.pipe.batch, self.batch)  # the next picture need not find out again
                logger.warning("out of memory: going on with %d at once", self.batch)
                parts = [jobs[i : i + self.batch] for i in range(0, len(jobs), self.batch)]
                return [picture for part in parts for picture in self.group(part, progress)]
            height, width = _image_size(jobs[0])
            side = max(height, width)
            self.tile = min(self.tile or side, side) // 2
            if self.tile < SMALLEST_TILE:
                raise UserError(
                    f"there is not enough memory on {self.pipe.device} even for tiles of {SMALLEST_TILE} pixels; "
                    "use another device (--device cpu) or a smaller model"
                )
            self.pipe.tile = min(self.pipe.tile, self.tile)
            logger.warning("out of memory: going on with tiles of %d pixels", self.tile)

    def noise_level(self, job: _Job) -> float:
        """σ_y. Rounding to 8 bits counts for a network, which would take the pixels for exact otherwise. A guess of
        what lies beyond the border is no better.

        The noise of a grey picture is the same in all channels, where networks expect to average three.
        """
        sigma_y = float(job.problem.sigma_y)
        if "network" not in self.solver.needs or not isinstance(job.problem.operator, LinearOperator):
            return sigma_y
        if job.picture.grey:
            sigma_y *= 3**0.5
        return max(sigma_y, ROUNDING_8_BIT) if job.picture.in_8_bits or job.goes_on else sigma_y

    def solve(self, jobs: Sequence[_Job], progress: Callable[[float], None] | None) -> Tensor:
        """(B, 3, H, W) in [0, 1], on the CPU."""
        pipe, problem = self.pipe, jobs[0].problem
        operator = problem.operator
        parts = pipe.parts(self.solver, problem)
        size = _image_size(jobs[0])
        tiles = plan_for(size, operator, self.tile)
        around = surroundings_of(operator, min(self.tile, *size)) if len(tiles) > 1 else 0
        levels = [self.noise_level(job) for job in jobs]
        finished = 0

        def sigma_of(times: int) -> float | Tensor:
            """σ_y of the jobs, as often as there are windows."""
            return levels[0] if len(set(levels)) == 1 else torch.tensor(levels * times, device=pipe.device)

        def measurement(window: Window) -> Tensor:
            wide = widened(window, around, size)
            y = torch.stack([_measurement(job, wide) for job in jobs]).to(pipe.device)
            return own_measurement(y, Problem(operator, sigma_of(1)), wide, window, jobs[0].goes_on)

        def restore(windows: list[Window]) -> Tensor:
            nonlocal finished
            each = [(window, job) for window in windows for job in jobs]
            y = torch.cat([measurement(window) for window in windows])
            part = Problem(_joined(operator, windows, len(jobs)), sigma_of(len(windows)), problem.name)
            observed = part.operator.observed(y)
            if observed is not None:
                y = y * observed.to(y)
            corners = [(window.top, window.left) for window, _ in each]
            noise = Noise([job.seed for _, job in each], corners, pipe.device)

            def step_done(step: Step) -> None:
                if self.callback:
                    self.callback(step)
                self.clock.tick(step, size, len(tiles), len(each))
                if progress:
                    share = len(windows) * (step.index + 1) / step.steps
                    progress((finished + share) / len(tiles))

            x = self.solver.solve(y, part, pipe.prior, noise, step_done, **parts).detach()
            finished += len(windows)
            x = x[..., : windows[0].height, : windows[0].width]
            if len(tiles) > 1:
                x = level(x, y, part)
            return x.unflatten(0, (len(windows), len(jobs)))

        together = max(1, self.batch // len(jobs)) if _can_join(operator) else 1
        out = restore_by_tiles(tiles, size, len(jobs), restore, together)
        self.evaluations = self.solver.evaluations() * len(tiles)
        return out.add_(1).div_(2).clamp_(0, 1)


class _Clock:
    """Measures the first steps of a call, and says what the whole of it will take."""

    def __init__(
        self, started: float, jobs: int, tell: Callable[[Forecast], None] | None, device: torch.device
    ) -> None:
        self.started, self.jobs, self.tell, self.device = started, jobs, tell, device
        self.done: list[float] = []  # when each step was
        self.forecast: Forecast | None = None

    def tick(self, step: Step, size: tuple[int, int], tiles: int, together: int) -> None:
        """A step is done, of as many tiles as are restored together."""
        if self.forecast:
            return
        if self.device.type == "cuda":  # where a step returns before it is done
            torch.cuda.synchronize(self.device)
        self.done.append(time.perf_counter())
        if len(self.done) != min(step.steps, MEASURED_STEPS):
            return
        first = self.done[0] - self.started  # slower than all that follow
        each = (self.done[-1] - self.done[0]) / (len(self.done) - 1) if len(self.done) > 1 else first
        steps = step.steps * math.ceil(self.jobs * tiles / together)
        self.forecast = Forecast(*size, tiles, first + each * (steps - 1))
        if self.tell:
            self.tell(self.forecast)


class _Operators:
    """The operator of each picture; those that do not depend on it are made once."""

    def __init__(
        self,
        mask: Tensor | str | Path | None,
        kernel: Tensor | str | Path | None,
        operator_file: str | None,
    ) -> None:
        self.mask, self.kernel, self.operator_file = mask, kernel, operator_file
        self.made: dict[str, Operator] = {}

    def use_alpha(self, task: str | Operator) -> bool:
        """Whether a picture's alpha is its mask, not its transparency."""
        return (
            isinstance(task, str)
            and task not in READ_OFF
            and task_family(task) == "inpaint"
            and self.mask is None
        )

    def of(self, picture: Picture, task: str | Operator, sigma_y: float) -> tuple[Operator, str]:
        if isinstance(task, Operator):
            if "given" not in self.made:
                size = (min(picture.size[0] * task.scale, 64), min(picture.size[1] * task.scale, 64))
                window = task.crop(0, 0, *size)
                if isinstance(window, LinearOperator):
                    check_adjoint(window, torch.zeros(1, 3, *size))
            self.made["given"] = task
            return task, type(task).__name__
        if task == "jpeg":
            if picture.path is None:
                raise UserError("the task jpeg reads the quality from a file; name it, as in jpeg10")
            quality = jpeg_quality(picture.path)
            if quality >= FINE_JPEG:
                logger.warning(
                    "%s says quality %d, at which there is little to restore; if it was compressed more before it "
                    "was saved so, name that, as in jpeg30",
                    picture.path,
                    quality,
                )
            task = f"jpeg{quality}"
        if task == "deblur":
            blur = estimate_blur(picture, with_jpeg_noise(picture, sigma_y))
            if blur.spread < SHARP:
                logger.warning(
                    "%s looks sharp, so there is little to undo; if you know of a blur, name it, as in gauss1.5",
                    picture.path or "the picture",
                )
            task = blur.task if blur.spread >= 0.5 else "gauss0.5"
        if task_family(task) == "inpaint":
            mask = self.mask if self.mask is not None else picture.mask
            if mask is None:
                raise UserError(
                    f"{picture.path or 'the picture'} has no transparency and no mask was given; "
                    "name one with --mask (white is known, black a hole)"
                )
            if self.mask is None and bool(mask.all()):  # type: ignore[union-attr]
                raise UserError(
                    f"{picture.path or 'the picture'} has no transparent pixel, so there is no hole to fill; "
                    "make the holes transparent, or name a mask with --mask (white is known, black a hole)"
                )
            return task_operator(task, picture.size, mask=mask), task
        if task not in self.made:
            self.made[task] = task_operator(
                task, picture.size, mask=self.mask, kernel=self.kernel, operator_file=self.operator_file
            )
        return self.made[task], task


def asked_of(
    picture: Picture, task: str | Operator, sigma: float | Literal["auto"] | None
) -> tuple[str | Operator, float | Literal["auto"]]:
    """The task and the noise of one picture, where they are left to it."""
    if task != "auto":
        return task, ("auto" if task in ESTIMATE_NOISE else 0.0) if sigma is None else sigma
    found = diagnose(picture)
    if found.task is None:
        raise UserError(
            f"{picture.path or 'the picture'} shows no holes, no marks of JPEG, no blur and no noise; name what it "
            "lacks, as in --task sr4 to make it larger"
        )
    return found.task, found.task_sigma if sigma is None else sigma


# Where the notes on a picture go while it is being restored, and which were logged before.
_notebook: ContextVar[tuple[list[str], set[str]] | None] = ContextVar("_notebook", default=None)


@contextlib.contextmanager
def _noting(notes: list[str], told: set[str]) -> Iterator[None]:
    """Collect what the logger is warned of; what was told before is collected, but not logged again."""
    token = _notebook.set((notes, told))
    try:
        yield
    finally:
        _notebook.reset(token)


def _take_note(record: logging.LogRecord) -> bool:
    """A filter, not a handler: a logger with no handler but this one would fall silent."""
    notebook = _notebook.get()
    if notebook is None or record.levelno < logging.WARNING:
        return True
    notes, told = notebook
    text = record.getMessage()
    if text not in notes:
        notes.append(text)
    new = text not in told
    told.add(text)
    return new


logger.addFilter(_take_note)


def warn_of_misfit(picture: Picture, problem: Problem) -> None:
    """Say so where a picture cannot have been blurred as the task says, for the result would ring."""
    operator, sigma = problem.operator, float(problem.sigma_y)
    if not isinstance(operator, Blur) or min(picture.size) < 64 or is_possible(picture, operator, sigma):
        return
    advice = "another blur"
    if isinstance(operator, GaussianBlur):
        weaker = (step / 4 for step in range(math.ceil(4 * operator.sigma) - 1, 1, -1))
        fits = (w for w in weaker if is_possible(picture, dataclasses.replace(operator, sigma=w), sigma))
        fitting = next(fits, None)
        advice = f"gauss{fitting:g} or less" if fitting else "another task"
    logger.warning(
        "%s is sharper or noisier than %s with sigma %.2g would leave it, so the result may ring; "
        "try %s, or a larger sigma",
        picture.path or "the picture",
        problem.name,
        problem.sigma_y,
        advice,
    )


def goes_on(picture: Picture, problem: Problem) -> bool:
    """Whether a picture was blurred with what lies beyond its border, as photographs are and an operator's
    measurements are not."""
    blur = problem.operator
    if not isinstance(blur, Blur):
        return False
    side = 256  # two corners are enough
    height, width = (min(side, length) for length in picture.size)
    corners = [
        picture.window(0, 0, height, width),
        picture.window(picture.size[0] - height, picture.size[1] - width, height, width).flip(-2, -1),
    ]
    y, sigma = to_internal(torch.stack(corners)), float(problem.sigma_y)
    if picture.in_8_bits:
        y, sigma = blur.unround(y), max(sigma, ROUNDING_8_BIT)
    with torch.no_grad():
        return not is_reflected(y, blur, internal_sigma(sigma), reach_of(blur, min(height, width)))


def prior_folder(model: Path) -> Path | None:
    """Where a model's prior lies: in prior/, in the folder itself, or, for a network alone, in the model that
    comes with the package."""
    places = [model / "prior" if (model / "prior").is_dir() else model]
    if (model / "network").is_dir() and not (model / "prior").is_dir():
        places.append(DEFAULT_MODEL / "prior")
    return next((p for p in places if (p / "config.json").exists() or (p / "unet").exists()), None)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 1.5:
        return "a second"
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def make_solver(
    solver: str | Solver, steps: int | None = None, options: Mapping[str, Any] | None = None
) -> Solver:
    """A solver by name, with its settings; texts (as a command line gives them) are turned into numbers."""
    if isinstance(solver, Solver):
        if steps is not None or options:
            return dataclasses.replace(
                solver, **dict(options or {}), **({} if steps is None else {"steps": steps})
            )
        return solver
    if solver not in SOLVERS:
        raise UserError(f"the solver {solver!r} is not known; expected one of {', '.join(SOLVERS)}")
    kind = SOLVERS[solver]
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    settings: dict[str, Any] = {}
    for name, value in (options or {}).items():
        key = name.replace("-", "_")
        if key not in known:
            raise UserError(f"{solver} has no setting {name!r}; it takes {', '.join(known)}")
        settings[key] = _parsed(solver, key, value, hints[key])
    if steps is not None:
        settings["steps"] = steps
    if settings.get("steps", 1) < 1:
        raise UserError(f"steps must be at least 1, not {settings['steps']}")
    return kind(**settings)


def _parsed(solver: str, name: str, value: Any, hint: Any) -> Any:
    """A setting's value, from its text where it is one, checked against the type of the field."""
    literals = [kind for kind in (hint, *typing.get_args(hint)) if typing.get_origin(kind) is Literal]
    choices = [choice for literal in literals for choice in typing.get_args(literal)]
    if not choices and isinstance(value, str):
        with contextlib.suppress(ValueError):  # what is no number stays a text
            value = json.loads(value.lower().replace("none", "null"))
    kinds = typing.get_args(hint) or (hint,)
    fits = value in choices if choices else any(_is_a(value, kind) for kind in kinds)
    if not fits:
        expected = " or ".join(map(str, choices)) or str(getattr(hint, "__name__", hint))
        raise UserError(f"{solver}'s setting {name} cannot be {value!r}; expected {expected}")
    return (
        float(value) if float in kinds and isinstance(value, int) and not isinstance(value, bool) else value
    )


def _is_a(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else False


def pick_device(name: str | torch.device) -> torch.device:
    """A device that works, by name; "auto" is CUDA, else Apple's MPS, else the CPU.

    Where a launcher started several processes, each has a CUDA device of its own.
    """
    if str(name) in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if str(name) == "auto":
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # any of these is how torch says so
        raise UserError(
            f"the device {str(name)!r} is not there; expected auto, cpu, cuda, cuda:1 or mps"
        ) from None
    return device


def default_tile(device: torch.device) -> int:
    """The side of a tile where none was chosen."""
    return CPU_TILE if device.type == "cpu" else DEFAULT_TILE


def warn_of_range(picture: Picture) -> None:
    """Say so where floating-point pixels seem to be in [-1, 1]; noise would go beyond white, too."""
    pixels = picture.pixels
    if pixels.dtype == np.float32 and pixels.min() < -0.5 and pixels.max() <= 1:
        logger.warning(
            "%s has values from %.2f to %.2f; expected [0, 1]: take (x + 1) / 2",
            picture.path or "the picture",
            pixels.min(),
            pixels.max(),
        )


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def _as_pictures(images: Image | Sequence[Image]) -> list[Picture]:
    if isinstance(images, (Tensor, np.ndarray)) and images.ndim == 4:
        images = list(images)
    if isinstance(images, (str, Path, Picture, Tensor, np.ndarray, PIL.Image.Image)):
        images = [images]
    if not images:
        raise UserError("no picture was given")
    return [_as_picture(image) for image in images]


def _as_picture(image: Image) -> Picture:
    if isinstance(image, Picture):
        return image
    if isinstance(image, (str, Path)):
        return Picture.read(image)
    if isinstance(image, PIL.Image.Image):
        if image.has_transparency_data:
            pixels = np.asarray(image.convert("RGBA"))
            return Picture(pixels[:, :, :3], pixels[:, :, 3])
        image = np.asarray(image.convert("RGB"))
    if isinstance(image, Tensor):
        if image.dim() != 3 or image.shape[0] not in (1, 3):
            raise UserError(f"a picture's tensor is (3, H, W), not {tuple(image.shape)}")
        image = image.detach().cpu().expand(3, -1, -1).permute(1, 2, 0)
        image = (image.float() if image.is_floating_point() else image).numpy()
    floating = np.issubdtype(image.dtype, np.floating)
    if image.ndim != 3 or image.shape[2] != 3 or not (floating or image.dtype in (np.uint8, np.uint16)):
        raise UserError(
            f"a picture is (H, W, 3) of uint8, uint16 or floating point, not {image.shape} of {image.dtype}"
        )
    if not floating:
        return Picture(image, bits=8 * image.dtype.itemsize)
    return Picture(checked_floats("the picture", image), bits=32)


def _groups(jobs: Sequence[_Job], batch: int) -> Iterator[list[_Job]]:
    """Neighbours in the list that can run as one batch: one size, one operator, one kind of border."""
    group: list[_Job] = []
    for job in jobs:
        fits = group and (
            len(group) < batch
            and job.picture.size == group[0].picture.size
            and job.problem.operator == group[0].problem.operator
            and job.goes_on == group[0].goes_on
        )
        if group and not fits:
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def _image_size(job: _Job) -> tuple[int, int]:
    return job.problem.operator.image_size(torch.empty(1, 3, *job.picture.size, device="meta"))


def _can_join(operator: Operator) -> bool:
    """Whether windows of the operator can be restored as one batch: it is the same everywhere, or a mask."""
    return isinstance(operator, Inpaint) or type(operator).crop is Operator.crop


def _joined(operator: Operator, windows: list[Window], images: int) -> Operator:
    """The operator of a batch: every window of every image."""
    crops = [operator.crop(w.top, w.left, w.height, w.width) for w in windows]
    if len(crops) == 1 or not isinstance(operator, Inpaint):
        return crops[0]
    return Inpaint(torch.cat([crop.mask.expand(images, -1, -1, -1) for crop in crops]))  # type: ignore[attr-defined]


def _measurement(job: _Job, window: Window) -> Tensor:
    """The part of y that belongs to a window of the picture, in [-1, 1]."""
    operator, picture = job.problem.operator, job.picture
    scale = operator.scale
    height, width = -(-window.height // scale), -(-window.width // scale)
    y = to_internal(picture.window(window.top // scale, window.left // scale, height, width))
    if measures_grey(operator):
        y = (y * y.new_tensor(GREY).view(3, 1, 1)).sum(0, keepdim=True)
    return operator.unround(y[None])[0] if picture.in_8_bits else y


def measures_grey(operator: Operator) -> bool:
    """Whether the operator's measurement has one channel."""
    return isinstance(operator, Colorize)


def _finish(source: Picture, problem: Problem, x: Tensor) -> Picture:
    """The restored pixels, with what the source said about itself."""
    alpha = None if source.alpha is None else _enlarged(source.alpha, (x.shape[-2], x.shape[-1]))
    pixels = x.permute(1, 2, 0).numpy()
    grey = source.grey and not measures_grey(problem.operator)
    return dataclasses.replace(source, pixels=pixels, alpha=alpha, grey=grey)


def _enlarged(alpha: np.ndarray[Any, Any], size: tuple[int, int]) -> np.ndarray[Any, Any]:
    if alpha.shape == size:
        return alpha
    plane = alpha if alpha.dtype == np.uint8 else alpha.astype(np.float32)
    enlarged = np.asarray(PIL.Image.fromarray(plane).resize(size[::-1], PIL.Image.Resampling.BILINEAR))
    return enlarged if alpha.dtype.kind == "f" else np.rint(enlarged).astype(alpha.dtype)


def _mean(samples: list[Picture]) -> Picture:
    if len(samples) == 1:
        return samples[0]
    total = torch.stack([sample.tensor for sample in samples]).mean(0)
    return dataclasses.replace(samples[0], pixels=total.permute(1, 2, 0).numpy())


def _std(samples: list[Picture]) -> Tensor:
    if len(samples) == 1:
        return torch.zeros(1).expand(3, *samples[0].size)  # a view: no memory
    return torch.stack([sample.tensor for sample in samples]).std(0)
