"""Which degradation each training picture gets: exact tasks, ranges of them, and a person's own operators.

A mix is written `sr4,sr8,gauss,jpeg5-95:0.5`: names of tasks, or a family with a range, each with an optional
weight after a colon. Task, parameters and noise are drawn for each picture by itself. Pictures with the same
kind of operator are then measured together, for a GPU has no patience with forty small groups.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT
from ddc.noise import Noise, on_device
from ddc.operators.base import Operator, Size, SVDOperator
from ddc.operators.blur import GaussianBlur, KernelBlur
from ddc.operators.custom import load_operator
from ddc.operators.inpaint import Inpaint, stroke_mask
from ddc.operators.jpeg import JPEG
from ddc.problems import Problem, task_operator

_RANGE = re.compile(r"(sr|gauss|disc|motion|inpaint|box|jpeg)(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)")
_SIGMA_STEP = 0.25  # drawn blur widths, so that few decompositions are needed
_QUALITY_STEP = 5


@dataclass(frozen=True)
class TaskRange:
    """One entry of a mix: a task (low = high = None) or a family whose parameter is drawn between two ends."""

    name: str
    weight: float = 1.0
    family: str | None = None
    low: float = 0.0
    high: float = 0.0

    @staticmethod
    def parse(text: str) -> "TaskRange":
        name, _, weight = (
            text.strip().rpartition(":") if re.search(r":[\d.]+$", text) else (text.strip(), "", "1")
        )
        try:
            share = float(weight)
        except ValueError:
            raise UserError(
                f"the weight in {text!r} is not a number; write for example jpeg5-95:0.5"
            ) from None
        if share <= 0:
            raise UserError(f"the weight in {text!r} is not above 0; leave the task out instead")
        match = _RANGE.fullmatch(name)
        if match:
            low, high = float(match[2]), float(match[3])
            if low > high:
                raise UserError(f"the range {name} ends below its start; write the smaller number first")
            for end in (low, high):
                task_operator(f"{match[1]}{end:g}", (64, 64))  # refuses what no operator can do
            return TaskRange(name, share, match[1], low, high)
        if ".py:" not in name:
            task_operator(name, (64, 64))
        return TaskRange(name, share)

    def draw(self, rng: np.random.Generator) -> str:
        """The name of one task."""
        if self.family is None:
            return self.name
        if self.family == "gauss":
            value = self.low + _SIGMA_STEP * rng.integers(0, int((self.high - self.low) / _SIGMA_STEP) + 1)
            return f"gauss{value:g}"
        if self.family == "jpeg":
            value = self.low + _QUALITY_STEP * rng.integers(
                0, int((self.high - self.low) / _QUALITY_STEP) + 1
            )
            return f"jpeg{int(value)}"
        if self.family == "motion":
            return f"motion{rng.integers(int(self.low), int(self.high) + 1)}@{rng.integers(0, 180)}"
        if self.family == "disc":
            return f"disc{rng.uniform(self.low, self.high):.1f}"
        if self.family == "inpaint":
            return f"inpaint{rng.uniform(self.low, self.high):.1f}"
        return f"{self.family}{rng.integers(int(self.low), int(self.high) + 1)}"


def parse_tasks(text: str) -> tuple[TaskRange, ...]:
    tasks = tuple(TaskRange.parse(part) for part in text.split(",") if part.strip())
    if not tasks:
        raise UserError("no tasks were given; write for example --tasks sr4,jpeg10,denoise")
    return tasks


def task_weights(text: str, tasks: Sequence[TaskRange]) -> dict[str, float]:
    """ "inpaint92=0.4,sr8=0.2" → the weight of each of these tasks."""
    names = [task.name for task in tasks if task.family is None]
    weights = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in names:
            raise UserError(f"a weight is given to {name!r}; expected one of the tasks {', '.join(names)}")
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = float("nan")
        if not weights[name] >= 0:
            raise UserError(f"{part!r} is no weight; expected a task and a number from 0 on, as in sr8=0.2")
    return weights


def single_task(name: str) -> TaskRange:
    """One task, of which nothing is drawn but masks and noise."""
    task = TaskRange.parse(name)
    if task.family is not None or task.name != name or ".py:" in name:
        raise UserError(f"{name!r} is not one task; a bridge is trained for one, for example sr4")
    return task


@dataclass(frozen=True)
class Choice:
    """What was drawn for one picture, before its mask or kernel is made."""

    task: str
    sigma_y: float
    rounded: bool
    shift: tuple[int, int] = (0, 0)  # of a box from the middle


@dataclass(frozen=True)
class TaskMix:
    """Draws a task and the noise of its measurement for each picture."""

    tasks: tuple[TaskRange, ...]
    sigma_max: float = 0.05  # in [0, 1] units
    noiseless_share: float = 0.0  # of the draws with exactly no noise
    eight_bit_share: float = 0.0  # of the noiseless draws whose measurement is rounded to 8 bits

    def choose(self, rng: np.random.Generator, size: int) -> Choice:
        task = self.tasks[pick(tuple(task.weight for task in self.tasks), rng)].draw(rng)
        noiseless = rng.random() < self.noiseless_share and task != "denoise"
        sigma_y = 0.0 if noiseless else float(rng.uniform(0, self.sigma_max))
        rounded = noiseless and rng.random() < self.eight_bit_share
        if rounded and not task.startswith("jpeg"):  # which rounds by itself
            sigma_y = ROUNDING_8_BIT
        if not task.startswith("box"):
            return Choice(task, sigma_y, rounded)
        down, right = (int(rng.integers(-size // 3, size // 3 + 1)) for _ in range(2))
        return Choice(task, sigma_y, rounded, (down, right))


def pick(weights: tuple[float, ...], rng: np.random.Generator) -> int:
    """An index, drawn with these weights."""
    return int(np.searchsorted(_cumulative(weights), rng.random(), side="right"))


@lru_cache(maxsize=64)
def _cumulative(weights: tuple[float, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    shares = np.array(weights) / np.sum(weights)
    total = shares.cumsum()
    return np.asarray(total / total[-1])


@dataclass(frozen=True)
class Draw:
    """The degradation of one picture."""

    operator: Operator
    sigma_y: float
    task: str
    rounded: bool


def make_draws(
    choices: Sequence[Choice], seeds: Sequence[int], size: int, device: torch.device
) -> list[Draw]:
    """The operators of these choices; masks and kernels are made for all of them at once, on the device."""
    operators: list[Operator | None] = [None] * len(choices)
    random, boxes, strokes, kernels = (
        [i for i, choice in enumerate(choices) if choice.task.startswith(families)]
        for families in ("inpaint", "box", "strokes", ("motion", "disc"))
    )
    if random:
        rates = [float(choices[i].task.removeprefix("inpaint")) / 100 for i in random]
        field = Noise([seeds[i] for i in random], device=device).uniform((len(random), 1, size, size))
        kept = field >= on_device(rates, device, torch.float32).view(-1, 1, 1, 1)
        _put(operators, random, kept.float())
    if boxes:
        sides = [min(int(choices[i].task.removeprefix("box") or size // 2), size) for i in boxes]
        _put(operators, boxes, box_masks(sides, [choices[i].shift for i in boxes], size, device))
    if strokes:
        _put(operators, strokes, _move(stroke_mask((size, size), [seeds[i] for i in strokes]), device))
    by_taps: dict[int, list[int]] = {}
    for i in kernels:
        by_taps.setdefault(_kernel(choices[i].task).shape[-1], []).append(i)
    for members in by_taps.values():
        moved = _move(torch.stack([_kernel(choices[i].task) for i in members]), device)
        for i, kernel in zip(members, moved.split(1), strict=True):
            operators[i] = KernelBlur(kernel)
    return [
        Draw(operator or _fixed_operator(choice.task, size), choice.sigma_y, choice.task, choice.rounded)
        for choice, operator in zip(choices, operators, strict=True)
    ]


def _put(operators: list[Operator | None], indices: Sequence[int], masks: Tensor) -> None:
    for i, mask in zip(indices, masks.split(1), strict=True):
        operators[i] = Inpaint(mask)


def box_masks(
    sides: Sequence[int], shifts: Sequence[tuple[int, int]], size: int, device: torch.device
) -> Tensor:
    """(B, 1, size, size): a square hole, moved from the middle; beyond the border it comes in on the other side."""
    corners = [
        ((size - side) // 2 + down, (size - side) // 2 + right, side)
        for side, (down, right) in zip(sides, shifts, strict=True)
    ]
    top, left, side = on_device(corners, device, torch.int64).view(-1, 3, 1, 1, 1).unbind(1)
    steps = torch.arange(size, device=device)
    rows, columns = (steps.view(1, 1, -1, 1) - top) % size, (steps.view(1, 1, 1, -1) - left) % size
    return 1 - ((rows < side) & (columns < side)).float()


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@lru_cache(maxsize=4096)
def _kernel(task: str) -> Tensor:
    """The kernel (1, k, k) of a motion or a disc, with zeros around it to one of few sizes, so that kernels of
    different widths work together."""
    operator = task_operator(task)
    assert isinstance(operator, KernelBlur)
    taps = operator.kernel.shape[-1]
    side = -(-taps // 32) * 32 + 1
    before = side // 2 - taps // 2
    return pad(operator.kernel, (before, side - taps - before) * 2).unsqueeze(0)


@lru_cache(maxsize=256)
def _fixed_operator(task: str, size: int) -> Operator:
    """An operator in which nothing is random but its name."""
    if ".py:" in task:
        return load_operator(task, (size, size))
    return task_operator(task, (size, size))


# ---------------------------------------------------------------------------------------------------------
# pictures that are measured together


class GaussianBlurs(SVDOperator):
    """A Gaussian blur of its own width for each picture of a batch."""

    by_frequency = True

    def __init__(self, operators: Sequence[GaussianBlur]) -> None:
        self.operators = tuple(operators)

    def __call__(self, x: Tensor) -> Tensor:
        rows, columns = (
            torch.stack([_matrix(op, length, x.dtype, x.device) for op in self.operators]).unsqueeze(1)
            for length in x.shape[-2:]
        )
        return rows @ x @ columns.mT

    def unround(self, y: Tensor) -> Tensor:
        return self.operators[0].unround(y)

    def singular_values(self, size: Size, like: Tensor) -> Tensor:
        return torch.stack([op.singular_values(size, like) for op in self.operators]).unsqueeze(1)

    def Vt(self, x: Tensor) -> Tensor:
        return self._side("v", x.shape[-2], x).mT @ x @ self._side("v", x.shape[-1], x)

    def V(self, c: Tensor) -> Tensor:
        return self._side("v", c.shape[-2], c) @ c @ self._side("v", c.shape[-1], c).mT

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self._side("u", y.shape[-2], y).mT @ y @ self._side("u", y.shape[-1], y)

    def U(self, c: Tensor) -> Tensor:
        return self._side("u", c.shape[-2], c) @ c @ self._side("u", c.shape[-1], c).mT

    def _side(self, name: str, length: int, like: Tensor) -> Tensor:
        factors = [op._factors(length, like) for op in self.operators]
        return torch.stack([getattr(one, name) for one in factors]).unsqueeze(1)  # (B, 1, n, n)


@lru_cache(maxsize=64)
def _matrix(operator: GaussianBlur, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    column, weight = operator.taps(length)
    matrix = torch.zeros(length, length, dtype=torch.float64)
    return matrix.scatter_add_(1, column, weight).to(dtype).to(device)


def group_key(operator: Operator) -> Hashable:
    """Operators with the same key can be merged into one that works on a batch."""
    if isinstance(operator, Inpaint):
        return Inpaint, tuple(operator.mask.shape[-2:])
    if isinstance(operator, KernelBlur):
        return KernelBlur, tuple(operator.kernel.shape[-2:])
    if type(operator) in (JPEG, GaussianBlur):
        return type(operator)
    return operator


def merge(operators: Sequence[Any], device: torch.device) -> Operator:
    """One operator for a batch of pictures of the same group."""
    first: Operator = operators[0]
    if isinstance(first, Inpaint):
        return Inpaint(torch.cat([op.mask for op in operators]).to(device))
    if isinstance(first, KernelBlur):
        kernels = [op.kernel.reshape(1, 1, *op.kernel.shape[-2:]) for op in operators]
        return replace(first, kernel=torch.cat(kernels).to(device))
    if len(set(map(id, operators))) == 1 or all(op == first for op in operators):
        return first
    if type(first) is JPEG:
        return JPEG(on_device([op.quality for op in operators], device, torch.int64))
    return GaussianBlurs(operators)


@dataclass(frozen=True)
class Group:
    """Pictures of a batch that are measured together."""

    indices: list[int]
    problem: Problem
    part: slice  # of the batch, once it is sorted by groups


@dataclass(frozen=True)
class Groups:
    """A batch, sorted by groups."""

    order: Tensor  # (B,) on the device
    groups: list[Group]

    def apply(self, function: Callable[[Group], Tensor]) -> Tensor:
        """What `function` makes of each group, in the order of the batch."""
        results = torch.cat([function(group) for group in self.groups])
        return torch.empty_like(results).index_copy_(0, self.order, results)


def group_draws(draws: Sequence[Draw], device: torch.device) -> Groups:
    members: dict[Hashable, list[int]] = {}
    for i, draw in enumerate(draws):
        members.setdefault(group_key(draw.operator), []).append(i)
    order = [i for indices in members.values() for i in indices]
    sigmas = on_device([draws[i].sigma_y for i in order], device, torch.float32)
    groups, start = [], 0
    for indices in members.values():
        part = slice(start, start + len(indices))
        operator = merge([draws[i].operator for i in indices], device)
        groups.append(Group(indices, Problem(operator, sigmas[part], draws[indices[0]].task), part))
        start += len(indices)
    return Groups(on_device(order, device, torch.int64), groups)


def measure_batch(truth: Tensor, draws: Sequence[Draw], seeds: Sequence[int], groups: Groups) -> list[Tensor]:
    """The measurement (1, c, h, w) of each picture; its noise depends on its seed alone."""
    order = [i for group in groups.groups for i in group.indices]
    truth = truth[groups.order]
    # one field for all: that of a smaller measurement is a window of it
    field = Noise([seeds[i] for i in order], device=truth.device).normal(truth.shape)
    rounded = on_device([draws[i].rounded for i in order], truth.device, torch.bool).view(-1, 1, 1, 1)
    y: list[Tensor] = [truth] * len(order)
    for group in groups.groups:
        clean = group.problem.operator(truth[group.part])
        if all(small <= large for small, large in zip(clean.shape[1:], truth.shape[1:], strict=True)):
            channels, height, width = clean.shape[1:]
            z = field[group.part, :channels, :height, :width]
        else:
            z = Noise([seeds[i] for i in group.indices], device=truth.device).normal(clean.shape)
        z = z.masked_fill(rounded[group.part], 0)  # rounding is all the noise there is
        measured = group.problem.operator.add_noise(clean, z, group.problem.sigma)
        if any(draws[i].rounded for i in group.indices):
            whole = group.problem.operator.unround(round_to_8_bit(measured))
            measured = torch.where(rounded[group.part], whole, measured)
        for i, one in zip(group.indices, measured.split(1), strict=True):
            y[i] = one
    return y


def round_to_8_bit(y: Tensor) -> Tensor:
    """What a measurement becomes in a PNG file."""
    return ((y.clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1
