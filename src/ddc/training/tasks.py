"""Which degradation each training picture gets: exact tasks, ranges of them, and a person's own operators.

A mix is written `sr4,sr8,gauss,jpeg5-95:0.5`: names of tasks, or a family with a range, each with an optional
weight after a colon. Task, parameters and noise are drawn for each picture by itself.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.operators.base import Operator
from ddc.operators.blur import KernelBlur
from ddc.operators.custom import load_operator
from ddc.operators.inpaint import Inpaint
from ddc.problems import Problem, task_family, task_operator

_RANGE = re.compile(r"(sr|gauss|motion|inpaint|box|jpeg)(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)")
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
        match = _RANGE.fullmatch(name)
        if match:
            low, high = float(match[2]), float(match[3])
            if low > high:
                raise UserError(f"the range {name} ends below its start; write the smaller number first")
            return TaskRange(name, share, match[1], low, high)
        if ".py:" not in name:
            task_family(name)  # refuses an unknown name
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
        if self.family == "inpaint":
            return f"inpaint{rng.uniform(self.low, self.high):.1f}"
        return f"{self.family}{rng.integers(int(self.low), int(self.high) + 1)}"


def parse_tasks(text: str) -> tuple[TaskRange, ...]:
    tasks = tuple(TaskRange.parse(part) for part in text.split(",") if part.strip())
    if not tasks:
        raise UserError("no tasks were given; write for example --tasks sr4,jpeg10,denoise")
    return tasks


@dataclass(frozen=True)
class TaskMix:
    """Draws a task and the noise of its measurement for each picture."""

    tasks: tuple[TaskRange, ...]
    sigma_max: float = 0.05  # in [0, 1] units
    noiseless_share: float = 0.0  # of the draws with exactly no noise
    eight_bit_share: float = 0.0  # of the noiseless draws whose measurement is rounded to 8 bits

    def draw(self, rng: np.random.Generator, size: int, seed: int) -> "Draw":
        weights = np.array([task.weight for task in self.tasks])
        task = self.tasks[int(rng.choice(len(self.tasks), p=weights / weights.sum()))].draw(rng)
        noiseless = rng.random() < self.noiseless_share and task != "denoise"
        sigma_y = 0.0 if noiseless else float(rng.uniform(0, self.sigma_max))
        rounded = noiseless and rng.random() < self.eight_bit_share
        if ".py:" in task:
            return Draw(load_operator(task, (size, size)), sigma_y, task, rounded)
        operator = task_operator(task, (size, size), [seed])
        if task.startswith("box") and isinstance(operator, Inpaint):  # anywhere, not only in the middle
            shift = [int(rng.integers(-size // 3, size // 3 + 1)) for _ in range(2)]
            operator = Inpaint(_shift(operator.mask, shift))
        return Draw(operator, sigma_y, task, rounded)


@dataclass(frozen=True)
class Draw:
    """The degradation of one picture."""

    operator: Operator
    sigma_y: float
    task: str
    rounded: bool

    def on(self, device: torch.device) -> "Draw":
        """The same, with its mask or kernel on the device; the copy does not make the device wait."""
        if device.type != "cuda" or not isinstance(self.operator, Inpaint | KernelBlur):
            return self
        name = "mask" if isinstance(self.operator, Inpaint) else "kernel"
        tensor: Tensor = getattr(self.operator, name)
        moved = tensor.pin_memory().to(device, non_blocking=True)
        return replace(self, operator=replace(self.operator, **{name: moved}))


def _shift(mask: Tensor, shift: Sequence[int]) -> Tensor:
    holes = torch.roll(1 - mask, tuple(shift), dims=(-2, -1))
    return 1 - holes


def group_key(operator: Operator) -> Hashable:
    """Operators with the same key can be merged into one that works on a batch."""
    if isinstance(operator, Inpaint):
        return Inpaint, tuple(operator.mask.shape[-2:])
    if isinstance(operator, KernelBlur):
        return KernelBlur, tuple(operator.kernel.shape[-2:])
    return operator


def merge(operators: Sequence[Operator], device: torch.device) -> Operator:
    """One operator for a batch of pictures of the same group."""
    first: Any = operators[0]
    if isinstance(first, Inpaint):
        return Inpaint(torch.cat([op.mask for op in operators]).to(device))  # type: ignore[attr-defined]
    if isinstance(first, KernelBlur):
        kernels = [op.kernel.reshape(1, 1, *op.kernel.shape[-2:]) for op in operators]  # type: ignore[attr-defined]
        return replace(first, kernel=torch.cat(kernels).to(device))
    return first


def groups(draws: Sequence[Draw], device: torch.device) -> list[tuple[list[int], Problem]]:
    """The pictures of a batch that share an operator, each group with its problem."""
    members: dict[Hashable, list[int]] = {}
    for i, draw in enumerate(draws):
        members.setdefault(group_key(draw.operator), []).append(i)
    result = []
    for indices in members.values():
        operator = merge([draws[i].operator for i in indices], device)
        sigma = torch.tensor([draws[i].sigma_y for i in indices], device=device)
        result.append((indices, Problem(operator, sigma, draws[indices[0]].task)))
    return result
