"""From pictures, and what is asked for, to jobs that a solver can run."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

import torch
from torch import Tensor

from ddc import estimates
from ddc.diagnosis.treatment import NOTHING, Conditions, Treatment, plan_treatment, told_by_file, with_marks_filled
from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT, KernelLike, MaskLike, Picture, as_kernel, as_mask, to_internal
from ddc.jpegfile import jpeg_settings
from ddc.operators.base import LinearOperator, Operator, Size
from ddc.operators.blur import Blur
from ddc.operators.colorize import GREY, Colorize
from ddc.operators.custom import check_adjoint
from ddc.operators.inpaint import WHITE, Inpaint
from ddc.problems import DETECTED, Problem, Task, check_sigma, check_whole
from ddc.solvers.base import Callback, Run, Solver, Step, make_solver, sample_seeds
from ddc.telling import Clock, Forecast
from ddc.tiling import (
    SMALLEST_TILE,
    Tile,
    Window,
    match_mean,
    own_measurement,
    plan_for,
    restore_by_tiles,
    surroundings_of,
    widened,
)

logger = logging.getLogger("ddc")

SHARE_OF_ATTENTION = 0.28 / 512**2  # of a posterior network's time, for each pixel of a tile, as measured
ESTIMATE_NOISE = ("denoise", "deblur")  # tasks for which the noise is estimated if it is not given

AS_MASK = "in Python as mask=, on the command line as --mask (white is known, black a hole)"
Sigma = float | Literal["auto"] | None
Strength = Literal["low", "medium", "high"]
STRENGTHS = {"low": 0.6, "medium": 1.0, "high": 1.6}  # factors of a noise level that is estimated


class Options(TypedDict, total=False):
    """The options of a restoration; `Request` has their defaults and what they mean."""

    sigma: Sigma
    strength: Strength
    solver: str | Solver | None
    steps: int | None
    realism: float | None
    doubt: bool
    seed: int
    samples: int
    names: Sequence[str] | None
    mask: MaskLike | None
    kernel: KernelLike | None
    operator_file: str | None
    scratches: bool
    fix_colours: bool
    tile: int | None
    batch: int | None
    callback: Callback | None
    progress: Callable[[float], None] | None
    forecast: Callable[[Forecast], None] | None
    planned: Callable[[int, Treatment], None] | None


@dataclass
class Request:
    """What is asked for: a task and its options, checked before any picture is read."""

    task: str | Task | Operator
    """A name (see `ddc.problems.TASKS`), "jpeg" for the quality that a file states, "deblur" for a blur that is
    estimated from the picture, "auto" for whatever the picture shows, or an operator."""
    sigma: Sigma = None
    """The noise of the pictures in [0, 1] units, or "auto" to estimate it from each. None estimates it for the tasks denoise,
    deblur and auto, and where a noisy file is enlarged or deblurred; it is 0 for the others."""
    strength: Strength = "medium"
    """How much to change: less or more noise is assumed than was estimated."""
    solver: str | Solver | None = None
    """The algorithm, with settings if needed: "ddnm:eta=0.5". None is ddc; for the task auto, what its plan prefers."""
    steps: int | None = None
    """Length of the run; None is the solver's own."""
    realism: float | None = None
    """For the solver posterior, from 0, the estimate with the least error, to 1, a sample; None is its own."""
    doubt: bool = False
    """Also find the interval in which each pixel lies with 90 %, from further samples."""
    seed: int = 0
    """Seed of all randomness, together with each picture's name (its file's name, `names`, or its index)."""
    samples: int = 1
    """Restorations of each picture."""
    names: Sequence[str] | None = None
    """Names of the pictures, one for each, instead of their files' names."""
    mask: MaskLike | None = None
    """For inpainting: 1 (white; 255 in 8 bits) where the picture is known, 0 (black) in its holes."""
    kernel: KernelLike | None = None
    """For the task blur: a kernel, or a file with one. Arrays and files are scaled so that they sum to 1."""
    operator_file: str | None = None
    """For the task custom: "file.py:Class"."""
    scratches: bool = False
    """For the task auto: also fill scratches and dust. What was taken for them is in the result's `marks`."""
    fix_colours: bool = False
    """Also correct faded and tinted colours, by black and white of each channel; no network is used for that."""
    tile: int | None = None
    """Side of a tile in pixels; None is the model's own, 0 never cuts."""
    batch: int | None = None
    """Pictures of one size, or tiles, that are restored together; None chooses."""
    callback: Callback | None = None
    """Called after each step of each tile."""
    progress: Callable[[float], None] | None = None
    """Called with the share that is done."""
    forecast: Callable[[Forecast], None] | None = None
    """Called once, after the first steps, if the whole will take `ddc.telling.SLOW` seconds or more."""
    planned: Callable[[int, Treatment], None] | None = None
    """For the task auto: called with the index of each picture and what will be done to it, before it is restored."""
    method: Solver = field(init=False)  # the solver with its settings
    operators: dict[str, Operator] = field(init=False, default_factory=dict)  # those that do not depend on a picture

    def __post_init__(self) -> None:
        if self.strength not in STRENGTHS:
            raise UserError(f"the strength is {self.strength!r}; expected one of {', '.join(STRENGTHS)}")
        for name, least in {"samples": 1, "batch": 1, "steps": None, "tile": None}.items():
            if name == "samples" or getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        if self.tile and self.tile < SMALLEST_TILE:
            raise UserError(f"a tile must be at least {SMALLEST_TILE} pixels (or 0: never cut), not {self.tile}")
        self.kernel = None if self.kernel is None else as_kernel(self.kernel)
        if self.scratches and (self.task != "auto" or self.mask is not None):
            raise UserError("scratches are found by the task auto without a mask; leave one of them out")
        if self.task == "auto" and (self.mask is None) != (self.kernel is None):
            self.task = "blur" if self.mask is None else "inpaint"  # nothing is left to detect
        self.method = self._with_realism(make_solver(self.solver, self.steps))
        if not isinstance(self.sigma, str) and self.sigma is not None:
            check_sigma(float(self.sigma))
        if isinstance(self.task, str) and self.task not in DETECTED:
            self.task = Task.parse(self.task)
        elif isinstance(self.task, str) and not (self.mask is None and self.kernel is None):
            raise UserError(f"the task {self.task} takes no mask and no kernel; leave them out")

    def _with_realism(self, solver: Solver) -> Solver:
        if self.realism is None:  # samples of a mean are equal
            several = self.samples > 1 and hasattr(solver, "calm")
            return make_solver(solver, options={"calm": False}) if several else solver
        if not hasattr(solver, "realism"):
            raise UserError(f"{solver.name} has no realism; use the solver posterior, or leave it out")
        return make_solver(solver, options={"realism": self.realism})

    def check(self) -> None:
        """Refuse a task that the solver cannot take, where no picture is needed to know it."""
        if isinstance(self.task, Task) and self.task.family not in ("inpaint", "custom"):
            self.method.check(Problem(self._operator(self.task, None), 0.0, self.task.name))

    def plan(self, picture: Picture, index: int = 0) -> Treatment | None:
        """What the task auto does to a picture, which may be nothing; None for other tasks."""
        if self.task != "auto":
            return None
        plan = plan_treatment(picture, "posterior" in self.method.needs, STRENGTHS[self.strength])
        if self.scratches:
            plan = with_marks_filled(plan, picture)
        if plan.task == NOTHING:
            name = picture.path or "the picture"
            logger.warning("%s is left as it is: %s To enlarge it, use --task sr4", name, " ".join(plan.because))
        elif self.planned is not None:
            self.planned(index, plan)
        return plan

    def solver_of(self, plan: Treatment | None) -> Solver:
        """The solver that a plan prefers, if no other one and no settings are named, and one sample is enough."""
        if plan is None or plan.solver is None or self.samples > 1:
            return self.method
        preferred, own = make_solver(plan.solver), type(self.method)
        named = (self.solver is not None or self.doubt) and type(preferred) is not own
        return self.method if named or self.steps is not None or self.method != own() else preferred

    def problem(self, picture: Picture, plan: Treatment | None = None) -> Problem:
        """The problem that a picture is the measurement of; for the task auto, that of its plan."""
        task, sigma = self._detected(plan)
        sigma_y = estimates.estimate_sigma(picture) * STRENGTHS[self.strength] if sigma == "auto" else float(sigma)
        check_sigma(sigma_y)
        if task == "jpeg":
            task = estimates.jpeg_task(picture)
        elif task == "deblur":
            task = estimates.deblur_task(picture, sigma_y)
        if plan is not None and plan.operator is not None:
            operator, name = plan.operator, plan.task
        elif isinstance(task, Operator):
            operator, name = self._checked(task, picture), type(task).__name__
        else:
            task = Task.parse(task)
            operator, name = self._operator(task, picture), task.name
        amplifies = operator.scale > 1 or isinstance(operator, Blur)
        if self.sigma is None and sigma != "auto" and plan is None and amplifies and picture.file is not None:
            settings = jpeg_settings(picture.file) if picture.is_jpeg else None
            middle, enlarged = picture.middle(estimates.ENOUGH), operator.scale > 1
            sigma_y = STRENGTHS[self.strength] * estimates.noticeable_noise(middle, settings, enlarged, picture.path)
        known, told = self.conditions(picture, operator, plan), plan is not None and plan.conditions is not None
        if picture.is_jpeg and not told and (amplifies or (known is not None and sigma == "auto")):
            sigma_y = estimates.with_jpeg_noise(picture, sigma_y, known.quality if known else None)
        problem = Problem(operator, sigma_y, name)
        self.method.check(problem)
        estimates.warn_of_range(picture)
        if isinstance(operator, Blur) and not told:
            estimates.warn_of_misfit(picture, problem)
        return problem

    def conditions(self, picture: Picture, operator: Operator, plan: Treatment | None) -> Conditions | None:
        """What a posterior network is told beside A and σ: by the plan, or by a JPEG file."""
        if plan is None and "posterior" in self.method.needs:
            return told_by_file(picture, operator)
        return plan.conditions if plan else None

    def _detected(self, plan: Treatment | None) -> tuple[str | Task | Operator, float | Literal["auto"]]:
        """The task and the noise of one picture, where they are left to it."""
        if plan is not None:
            return plan.task, plan.sigma if self.sigma is None else self.sigma
        name = self.task.name if isinstance(self.task, Task) else self.task
        default: float | Literal["auto"] = "auto" if name in ESTIMATE_NOISE else 0.0
        return self.task, default if self.sigma is None else self.sigma

    def _operator(self, task: Task, picture: Picture | None) -> Operator:
        if task.family == "inpaint" and picture is not None:
            return task.operator(picture.size, mask=self._mask(picture))
        if task.name not in self.operators:
            size = None if picture is None else picture.size
            given: Any = {"mask": self.mask, "kernel": self.kernel, "operator_file": self.operator_file}
            self.operators[task.name] = task.operator(size, **given)
        return self.operators[task.name]

    def _mask(self, picture: Picture) -> Tensor | str | Path:
        if self.mask is not None:
            return as_mask(self.mask, WHITE)
        name, mask = picture.path or "the picture", picture.mask
        if mask is None:
            raise UserError(f"{name} has no transparency and no mask was given; give one, {AS_MASK}")
        if bool(mask.all()):
            raise UserError(
                f"{name} has no transparent pixel, so there is no hole to fill; make the holes transparent, or give a mask, {AS_MASK}"
            )
        return mask

    def _checked(self, operator: Operator, picture: Picture) -> Operator:
        """A person's own operator, whose adjoint is tested once."""
        if "given" not in self.operators:
            size = (min(picture.size[0] * operator.scale, 64), min(picture.size[1] * operator.scale, 64))
            window = operator.crop(0, 0, *size)
            if isinstance(window, LinearOperator):
                check_adjoint(window, torch.zeros(1, 3, *size))
            self.operators["given"] = operator
        return operator

    def jobs(
        self, picture: Picture, problem: Problem, index: int, solver: Solver, parts: Mapping[str, Any]
    ) -> list["Job"]:
        """One job for each sample of a picture; `parts` are the networks that the solver uses beside the prior."""
        if self.names and index >= len(self.names):
            raise UserError(f"there are more pictures than names ({len(self.names)}); give a name for each picture")
        name = self.names[index] if self.names else picture.path.name if picture.path else index
        if self.mask is None and isinstance(problem.operator, Inpaint) and not isinstance(self.task, Operator):
            picture = dataclasses.replace(picture, alpha=None)  # its alpha is the mask
        seeds = sample_seeds(self.seed, name, self.samples)
        beyond = isinstance(problem.operator, Blur) and estimates.continues_beyond(picture, problem)
        return [Job(picture, problem, seed, beyond, solver, parts) for seed in seeds]


@dataclass(frozen=True)
class Job:
    """One picture to restore once."""

    picture: Picture
    problem: Problem
    seed: int
    continues: bool  # the scene continues beyond the border of the picture, and was blurred into it
    solver: Solver
    parts: Mapping[str, Any]  # networks beside the prior, and the conditions that one of them is told

    def image_size(self) -> Size:
        """The size of the restored picture."""
        height, width = self.picture.size
        return height * self.problem.operator.scale, width * self.problem.operator.scale

    def interval_width(self) -> float:
        """How many times as wide as between samples the intervals of 90 % are."""
        network = self.parts.get("posterior")
        return 1.0 if network is None else network.widening(self.problem.operator)

    def fits(self, other: "Job") -> bool:
        """Whether both can run in one batch: one size, one operator, one kind of border."""
        return (
            self.picture.size == other.picture.size
            and self.problem.operator.key == other.problem.operator.key
            and self.continues == other.continues
            and self.parts.get("conditions") is other.parts.get("conditions")
            # the noise may decide how many evaluations are worth their time
            and self.solver.settled(self.problem, self.parts) == other.solver.settled(other.problem, other.parts)
        )

    def measurement(self, window: Window) -> Tensor:
        """The part of y that belongs to a window of the restored picture, in [-1, 1]."""
        operator, picture, scale = self.problem.operator, self.picture, self.problem.operator.scale
        height, width = -(-window.height // scale), -(-window.width // scale)
        y = to_internal(picture.window(window.top // scale, window.left // scale, height, width))
        if isinstance(operator, Colorize):
            y = (y * y.new_tensor(GREY).view(3, 1, 1)).sum(0, keepdim=True)
        return operator.unround(y[None])[0] if picture.in_8_bits else y

    def noise_level(self) -> float:
        """σ_y as the solver is told it.

        For a network rounding to 8 bits counts as noise; otherwise it would take the pixels for exact. The same
        holds for a guess of what lies beyond the border. The noise of a grey picture is the same in all channels,
        where networks expect to average three.
        """
        sigma_y = float(self.problem.sigma_y)
        if not {"network", "posterior"} & {*self.solver.needs} or not isinstance(self.problem.operator, LinearOperator):
            return sigma_y
        if self.picture.grey:
            sigma_y *= 3**0.5
        return max(sigma_y, ROUNDING_8_BIT) if self.picture.in_8_bits or self.continues else sigma_y

    def finish(self, x: Tensor) -> Picture:
        """The restored pixels (3, H, W) in [0, 1], with the metadata of the source."""
        source = self.picture
        alpha = source.resized_alpha(x.shape[-2], x.shape[-1])
        grey = source.grey and not isinstance(self.problem.operator, Colorize)
        return dataclasses.replace(source, pixels=x.permute(1, 2, 0).numpy(), alpha=alpha, grey=grey)


class Engine(Protocol):
    """What jobs run on: the pipeline."""

    prior: Any
    device: torch.device
    tile: int
    batch: int


class Execution:
    """One call of the pipeline: the tile and the batch, which are halved when memory runs out."""

    def __init__(self, pipe: Engine, request: Request, clock: Clock) -> None:
        self.pipe, self.request, self.clock = pipe, request, clock
        self.tile = pipe.tile if request.tile is None else request.tile
        self.batch = request.batch or pipe.batch
        self.evaluations = 0

    def all(self, jobs: Sequence[Job]) -> list[Picture]:
        """Restore all jobs, neighbours that fit together in one batch."""
        restored: list[Picture] = []
        tell = self.request.progress
        while len(restored) < len(jobs):
            first = len(restored)
            last = first + 1
            while last < len(jobs) and last - first < self.batch and jobs[last].fits(jobs[first]):
                last += 1

            def progress(share: float, first: int = first, last: int = last) -> None:
                if tell:
                    tell((first + share * (last - first)) / len(jobs))

            restored += self.group(jobs[first:last], progress)
        return restored

    def group(self, jobs: Sequence[Job], progress: Callable[[float], None]) -> list[Picture]:
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
                return [job.finish(image) for job, image in zip(jobs, x, strict=True)]
            # outside the handler, because the exception holds on to the tensors of the failed run
            if self.pipe.device.type == "cuda":
                torch.cuda.empty_cache()
            if self.batch > 1:
                self.batch //= 2
                self.pipe.batch = min(self.pipe.batch, self.batch)  # so that the next picture fits at once
                logger.warning("out of memory: continuing with %d at once", self.batch)
                parts = [jobs[i : i + self.batch] for i in range(0, len(jobs), self.batch)]
                return [picture for part in parts for picture in self.group(part, progress)]
            self._halve_tile(max(jobs[0].image_size()))

    def _halve_tile(self, side: int) -> None:
        self.tile = min(self.tile or side, side) // 2
        if self.tile < SMALLEST_TILE:
            raise UserError(
                f"there is not enough memory on {self.pipe.device} even for tiles of {SMALLEST_TILE} pixels; "
                "use another device (--device cpu) or a smaller model"
            )
        self.pipe.tile = min(self.pipe.tile, self.tile)
        logger.warning("out of memory: continuing with tiles of %d pixels", self.tile)

    def tiles(self, size: Size, operator: Operator, solver: Solver) -> list[Tile]:
        """The tiles of a picture. On the CPU they have the side that costs least: few pixels in overlaps, and for a
        posterior network short attention, whose cost for a pixel grows with the area of a tile."""
        sides = [self.tile]
        if self.request.tile is None and self.pipe.device.type == "cpu":
            sides = [side for side in range(320, 577, 32) if side <= self.tile * 9 // 8] or sides
        share = SHARE_OF_ATTENTION if "posterior" in solver.needs else 0.0

        def cost(tiles: list[Tile]) -> float:
            return sum((area := t.window.height * t.window.width) * (1 + area * share) for t in tiles)

        return min((plan_for(size, operator, side) for side in sides), key=cost)

    def solve(self, jobs: Sequence[Job], progress: Callable[[float], None]) -> Tensor:
        """(B, 3, H, W) in [0, 1], on the CPU."""
        operator = jobs[0].problem.operator
        size = jobs[0].image_size()
        if not self.tile or max(size) <= self.tile:
            group = Group(self, jobs, size, 1, progress)
            out = group.restore([Window(0, 0, *size)])[0].to("cpu", torch.float32)
        else:
            tiles = self.tiles(size, operator, jobs[0].solver)
            group = Group(self, jobs, size, len(tiles), progress)
            # windows of an operator can run as one batch if it is the same everywhere, or a mask
            joinable = isinstance(operator, Inpaint) or type(operator).crop is Operator.crop
            together = max(1, self.batch // len(jobs)) if joinable else 1
            out = restore_by_tiles(tiles, size, len(jobs), group.restore, together)
        if not bool(out.isfinite().all()):
            raise UserError(
                f"{group.solver.name} gave no finite numbers, so there is no picture; use its default settings, "
                "dtype float32, or another model"
            )
        self.evaluations = group.solver.evaluations() * group.tiles
        return out.add_(1).div_(2).clamp_(0, 1)


class Group:
    """Jobs that run in one batch, and the windows of their pictures."""

    def __init__(
        self, execution: Execution, jobs: Sequence[Job], size: Size, tiles: int, progress: Callable[[float], None]
    ) -> None:
        self.execution, self.jobs, self.size, self.tiles, self.progress = execution, jobs, size, tiles, progress
        self.pipe, self.problem = execution.pipe, jobs[0].problem
        self.operator = self.problem.operator.to(self.pipe.device)
        # operators that mix distant pixels are not cut into tiles
        self.solver = jobs[0].solver.settled(self.problem, jobs[0].parts, size if tiles == 1 else None)
        tile = min(execution.tile, *size)
        self.around = surroundings_of(self.operator, tile) if tiles > 1 else 0
        self.levels = [job.noise_level() for job in jobs]
        self.finished = 0

    def restore(self, windows: list[Window]) -> Tensor:
        """The restored windows of all jobs, (windows, jobs, 3, h, w) in [-1, 1]."""
        jobs, count = self.jobs, len(windows)
        y = torch.cat([self.measurement(window) for window in windows])
        crops = [self.operator.crop(w.top, w.left, w.height, w.width) for w in windows]
        operator = crops[0]
        if count > 1 and isinstance(operator, Inpaint):
            masks = [crop.mask.expand(len(jobs), -1, -1, -1) for crop in crops if isinstance(crop, Inpaint)]
            operator = Inpaint(torch.cat(masks))
        part = Problem(operator, self.sigma_y(count), self.problem.name)
        observed = operator.observed(y)
        if observed is not None:
            y = y * observed.to(y)

        def step_done(step: Step) -> None:
            if self.execution.request.callback:
                self.execution.request.callback(step)
            self.execution.clock.tick(step, self.size, self.tiles, count * len(jobs))
            self.progress((self.finished + count * (step.index + 1) / step.steps) / self.tiles)

        seeds = [job.seed for _ in windows for job in jobs]
        corners = [(window.top, window.left) for window in windows for _ in jobs]
        size = (y.shape[-2] * operator.scale, y.shape[-1] * operator.scale)
        prior = self.pipe.prior if "prior" in self.solver.needs else None
        run = Run(y, part, prior, seeds, step_done, size, corners, **jobs[0].parts)
        x = self.solver.solve(run).detach()
        self.finished += count
        x = x[..., : windows[0].height, : windows[0].width]
        if self.tiles > 1 and "posterior" not in self.solver.needs:  # which starts from the mean
            x = match_mean(x, y, part)
        return x.unflatten(0, (count, len(jobs)))

    def measurement(self, window: Window) -> Tensor:
        """What the operator would have measured of the window alone."""
        wide = widened(window, self.around, self.size) if self.around else window
        y = torch.stack([job.measurement(wide) for job in self.jobs]).to(self.pipe.device)
        return own_measurement(y, Problem(self.operator, self.sigma_y(1)), wide, window, self.jobs[0].continues)

    def sigma_y(self, windows: int) -> float | Tensor:
        """σ_y of the jobs, repeated for each window."""
        levels = self.levels
        return levels[0] if len(set(levels)) == 1 else torch.tensor(levels * windows, device=self.pipe.device)


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text
