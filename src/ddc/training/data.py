"""What a network is trained on: pictures, the draws of crops from them, and the measurements of those crops.

The picture, crop, flip, task and noise of the n-th draw depend on (seed, n) alone. So a position in the data is one number,
resuming is exact, and two processes see the same data as one process with twice the batch.

A mix of tasks is written `sr4,sr8,gauss,jpeg5-95:weight=0.5,inpaint92:lpips=0.4`: tasks, or a kind of task with a range,
each with an optional weight and weight of LPIPS. `disc1-6:photo=0.7:blind=0.2`: 70 % of the measurements get a camera's
noise, JPEG and so on (`ddc.training.photographs`), and of 20 % of those the network is not told the operator. With
`soft=0.3`, 30 % of these photographs are enlarged first: at full size, cameras' pictures are softer than small ones are.
Pictures with operators of one kind are measured together, because many small groups are slow on a GPU.
"""

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.datasets import Pictures, Place, Stream, contents, find_sources, load_pictures, split_holdout
from ddc.diagnosis.treatment import Conditions
from ddc.errors import UserError
from ddc.images import INTERNAL_RANGE, ROUNDING_8_BIT, round_to_8_bit
from ddc.noise import Noise, derive_seed, on_device
from ddc.notation import Entry, split
from ddc.operators.base import LinearOperator, Operator, Sigma, Size
from ddc.operators.blur import KernelBlur
from ddc.operators.inpaint import Inpaint, stroke_mask
from ddc.priors import Measured
from ddc.problems import KINDS, Task, measure
from ddc.solvers.base import Run
from ddc.training.photographs import SOFT, Damage, damaged, enlarge
from ddc.training.settings import LoopSettings, MixSettings

_RANGE = re.compile(r"([a-z]+)(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)")
# The grid of the numbers that are drawn from a range, because few blurs need few decompositions. Others are continuous.
_STEPS = {"gauss": 0.25, "jpeg": 5, "sr": 1, "box": 1, "motion": 1}
PAPER_SETTINGS = (
    *((task, sigma) for sigma in (0.0, 0.05) for task in ("sr4", "sr8", "gauss", "inpaint92")),
    ("jpeg10", 0.0),
)

NOTHING_ELSE = Conditions()
ERROR_OF_SIGMA = 0.12  # of the noise that a diagnosis finds, in its logarithm


# -- draws ---------------------------------------------------------------------------------------------------


def load_data(settings: LoopSettings, device: torch.device) -> tuple[Pictures, Pictures | None]:
    """The pictures for training and for validation."""
    sources, held = split_holdout(find_sources(settings.data), settings.holdout)
    if settings.validation is not None:
        held = find_sources([settings.validation])
    if not sources:
        raise UserError(f"--holdout {settings.holdout} keeps every picture out of training; choose a larger number")
    how = (settings.crop, device, settings.stream, settings.workers, settings.memory_share)
    validation = load_pictures(held[: settings.validation_limit], *how) if held else None
    pictures = load_pictures(sources, *how)
    pictures.contents = contents(sources, settings.workers)
    return pictures, validation


class Draws:
    """The endless, reproducible sequence of training crops: the n-th draw is a function of (seed, n).

    Each epoch is a new permutation. Process r of R takes the draws n = k·R + r.
    """

    def __init__(self, pool: Pictures, crop: int, seed: int, rank: int = 0, world: int = 1, flip: bool = True) -> None:
        self.pool, self.crop, self.seed, self.flip = pool, crop, seed, flip
        self.rank, self.world, self.position, self.device = rank, world, 0, pool.device
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(len(pool.names))
        )

    def take(self, count: int) -> tuple[Tensor, list[int]]:
        """The next `count` crops in [-1, 1], (count, 3, crop, crop), and the numbers of their draws."""
        numbers = self.advance(count)
        return self.crops(numbers), numbers

    def advance(self, count: int) -> list[int]:
        """The numbers of the next `count` draws; a stream starts to decode them and those that follow."""
        numbers = self.coming(count)
        self.position += count
        if isinstance(self.pool, Stream):
            coming = [*numbers, *self.coming(2 * count)]
            self.pool.expect(coming, [self._place(n) for n in coming], self.crop)
        return numbers

    def coming(self, count: int) -> list[int]:
        """The numbers that `advance` will return next."""
        return [(self.position + i) * self.world + self.rank for i in range(count)]

    def crops(self, numbers: Sequence[int]) -> Tensor:
        return cut(self.pool, numbers, [self._place(number) for number in numbers], self.crop).contiguous()

    def tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """These numbers on the device."""
        return on_device(values, self.device, dtype)

    def _place(self, number: int) -> Place:
        epoch, offset = divmod(number, len(self.pool.names))
        index = int(self._order(epoch)[offset])
        rng = np.random.default_rng((self.seed, 1, number))
        top, left = (int(rng.integers(0, length - self.crop + 1)) for length in self.pool.sizes[index])
        return Place(index, top, left, self.flip and bool(rng.integers(0, 2)))

    def times(self, numbers: Sequence[int], steps: int) -> list[int]:
        """Uniform timesteps of these draws, spread evenly over any run of consecutive draws."""
        golden = 0.6180339887498949
        return [int(steps * ((n * golden + self.seed * 0.37) % 1.0)) for n in numbers]

    def seeds(self, numbers: Sequence[int | str], purpose: str) -> list[int]:
        """Seeds for the other random numbers of these draws."""
        return [derive_seed(self.seed, f"{purpose}/{n}") for n in numbers]

    def noise(self, numbers: Sequence[int | str], shape: Sequence[int], purpose: str = "noise") -> Tensor:
        """A field of standard normal noise for each of these draws."""
        return Noise(self.seeds(numbers, purpose), device=self.device).normal(shape)


def cut(pool: Pictures, numbers: Sequence[int], places: list[Place], crop: int) -> Tensor:
    """The crops of these draws in [-1, 1], (B, 3, crop, crop), on the device."""
    return pool.crops(numbers, places, on_device(places, pool.device, torch.int64), crop)


def centre_crops(pool: Pictures, crop: int, batch: int, limit: int | None = None) -> Iterator[tuple[Tensor, list[str]]]:
    """Centre crops in [-1, 1], in batches, with their names."""
    indices = range(len(pool.names))[:limit]
    for start in range(0, len(indices), batch):
        chosen = indices[start : start + batch]
        places = [Place(i, (pool.sizes[i][0] - crop) // 2, (pool.sizes[i][1] - crop) // 2) for i in chosen]
        # negative numbers, because the numbers of draws are not
        yield cut(pool, [-1 - i for i in chosen], places, crop), [pool.names[i] for i in chosen]


# -- mixes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixEntry:
    """One entry of a mix: a task, or a range of tasks up to `end`."""

    name: str
    task: Task
    end: Task | None = None
    weight: float = 1.0
    lpips: float | None = None  # weight of LPIPS, if it has its own
    photo: float = 0.0  # share of the measurements that are photographs, with a `Damage` instead of white noise
    blind: float = 0.0  # share of these of which the network is not told the operator
    soft: float = 0.0  # share of these that are enlarged first

    @staticmethod
    def parse(text: str) -> "MixEntry":
        """The entry of one part of a mix."""
        entry = Entry.parse(text).check_keys("weight", "lpips", "photo", "blind", "soft")
        photo, blind, soft = (entry.number(name, 0.0) for name in ("photo", "blind", "soft"))
        if not (0 <= photo <= 1 and 0 <= blind <= 1 and 0 <= soft <= 1):
            raise UserError(f"photo, blind and soft in {text!r} are shares; expected numbers from 0 to 1")
        made = MixEntry._of_task(entry, text)
        if photo and not isinstance(made.task.operator((64, 64)), LinearOperator):
            raise UserError(f"{text!r} has a share of photographs, which needs a linear task, as denoise or sr2-4")
        if photo and blind and made.task.family == "superres":
            raise UserError(f"{text!r} is blind, but the size of a picture is never unknown; leave blind out")
        return replace(made, photo=photo, blind=blind, soft=soft)

    @staticmethod
    def _of_task(entry: Entry, text: str) -> "MixEntry":
        weight, lpips = entry.number("weight", 1.0), None
        if weight <= 0:
            raise UserError(f"the weight in {text!r} is not above 0; leave the task out instead")
        if "lpips" in entry.settings and (lpips := entry.number("lpips", 0.0)) < 0:
            raise UserError(f"the LPIPS weight in {text!r} is negative; expected a number from 0 on")
        name = entry.name
        if match := _RANGE.fullmatch(name):
            low, high = (Task.parse(match[1] + match[i]) for i in (2, 3))
            if float(match[2]) > float(match[3]):
                raise UserError(f"the range {name} ends below its start; write the smaller number first")
            return MixEntry(name, low, high, weight, lpips)
        if ".py:" in name:
            return MixEntry(name, Task(name, "custom"), None, weight, lpips)
        task = Task.parse(name)
        task.operator((64, 64))  # refuses a task that needs a mask, a kernel or a file
        return MixEntry(name, task, None, weight, lpips)

    def draw(self, rng: np.random.Generator) -> Task:
        """One task of the range."""
        if self.end is None:
            return self.task
        kind, key = self.task.kind, next(iter(KINDS[self.task.kind].numbers))
        low, high = self.task.numbers[key], self.end.numbers[key]
        if kind in _STEPS:
            step = _STEPS[kind]
            value = low + step * int(rng.integers(0, int((high - low) / step) + 1))
        else:
            value = round(rng.uniform(low, high), 1)
        name, numbers = f"{kind}{value:g}", self.task.numbers | {key: value}
        if kind == "motion":
            numbers["angle"] = float(rng.integers(0, 180))
            name += f"@{numbers['angle']:g}"
        return replace(self.task, name=name, numbers=numbers)


def parse_tasks(text: str) -> tuple[MixEntry, ...]:
    tasks = tuple(MixEntry.parse(part) for part in split(text))
    if not tasks:
        raise UserError("no tasks were given; write for example --tasks sr4,jpeg10,denoise")
    return tasks


@dataclass(frozen=True)
class Draw:
    """What is drawn for one picture."""

    task: Task
    sigma_y: float = 0.0
    rounded: bool = False  # whether the measurement is rounded to 8 bits
    lpips: float | None = None
    shift: tuple[int, int] = (0, 0)  # of a box from the centre
    damage: Damage | None = None  # instead of noise and rounding; sigma_y is then what the network is told
    conditions: Conditions = NOTHING_ELSE  # what a posterior network is told beside σ
    enlarged: float = 1.0  # times, before all else

    @property
    def told(self) -> Task:
        """The task whose operator the network is told."""
        return Task.parse("denoise") if self.conditions.blind else self.task


@dataclass(frozen=True)
class TaskMix:
    """Draws a task and the noise of its measurement for each picture."""

    tasks: tuple[MixEntry, ...]
    sigma_max: float = 0.05  # in [0, 1] units
    noiseless_share: float = 0.0  # share of the draws without noise
    eight_bit_share: float = 0.0  # share of the noiseless draws that are rounded to 8 bits

    def draw(self, rng: np.random.Generator, size: int, common: np.random.Generator | None = None) -> Draw:
        """What one picture gets; its kind of task, and the size of its measurement, come from `common`."""
        common = common or rng
        entry = self.tasks[pick([task.weight for task in self.tasks], common)]
        task = entry.draw(common if entry.task.family == "superres" else rng)
        noiseless = rng.random() < self.noiseless_share and task.kind != "denoise"
        sigma_y = 0.0 if noiseless else float(rng.uniform(0, self.sigma_max))
        rounded = noiseless and rng.random() < self.eight_bit_share
        if rounded and task.kind != "jpeg":  # which rounds by itself
            sigma_y = ROUNDING_8_BIT
        down, right = rng.integers(-size // 3, size // 3 + 1, size=2) if task.kind == "box" else (0, 0)
        drawn = Draw(task, sigma_y, rounded, entry.lpips, (int(down), int(right)))
        if not entry.photo or rng.random() >= entry.photo:
            return drawn
        damage = Damage.draw(rng, 0.0 if noiseless else sigma_y)
        sigma_y, conditions = damage.told(blind=rng.random() < entry.blind)
        sigma_y *= float(np.exp(rng.normal(0, ERROR_OF_SIGMA)))  # what is found in a photograph is not exact
        sigma_y = max(sigma_y, ROUNDING_8_BIT)
        enlarged = float(rng.uniform(*SOFT)) if rng.random() < entry.soft else 1.0
        return replace(drawn, sigma_y=sigma_y, rounded=False, damage=damage, conditions=conditions, enlarged=enlarged)


@dataclass(frozen=True)
class Mixes:
    """The mixes of a run, and their shares."""

    mixes: tuple[TaskMix, ...]
    shares: tuple[float, ...] = (1.0,)
    together: int = 1  # pictures in a row with one kind of task

    @staticmethod
    def of(settings: MixSettings) -> "Mixes":
        main = TaskMix(parse_tasks(settings.tasks), settings.sigma_max, settings.noiseless_share)
        if not settings.wide_tasks:
            return Mixes((main,), together=settings.together)
        wide = parse_tasks(settings.wide_tasks)
        mix = TaskMix(wide, settings.wide_sigma_max, settings.noiseless_share, settings.eight_bit_share)
        return Mixes((main, mix), (1 - settings.wide_share, settings.wide_share), settings.together)

    def draw(self, seed: int, number: int, size: int) -> Draw:
        """What the picture with this number gets."""
        rng = np.random.default_rng((seed, 2, number))
        common = rng if self.together == 1 else np.random.default_rng((seed, 5, number // self.together))
        return self.mixes[pick(self.shares, common)].draw(rng, size, common)

    def validation_tasks(self) -> tuple[tuple[str, float], ...]:
        """The paper's settings among the tasks; else each task, with the most noise."""
        most = self.mixes[0].sigma_max
        fixed = [entry.name for entry in self.mixes[0].tasks if entry.end is None and entry.task.kind != "custom"]
        chosen = tuple(one for one in PAPER_SETTINGS if one[0] in fixed and one[1] <= most)
        return chosen or tuple((task, most) for task in fixed) or PAPER_SETTINGS


def pick(weights: Sequence[float], rng: np.random.Generator) -> int:
    """An index, drawn with these weights as `rng.choice` does, but faster."""
    total = np.cumsum(np.array(weights) / np.sum(weights))
    return int(np.searchsorted(total / total[-1], rng.random(), side="right"))


# -- the operators of a batch --------------------------------------------------------------------------------


def measure_draws(
    draws: Draws, numbers: Sequence[int], draw: Callable[[int, int, int], Draw]
) -> tuple[Tensor, list[Draw], list[Operator], Measured]:
    """The crops of these numbers, what `draw(seed, number, size)` returns for each, their operators and measurements."""
    truth = draws.crops(numbers)
    device, size, seeds = truth.device, truth.shape[-1], draws.seeds(numbers, "measure")
    drawn = [draw(draws.seed, number, size) for number in numbers]
    if soft := [i for i, one in enumerate(drawn) if one.enlarged > 1]:
        index = on_device(soft, device, torch.int64)
        truth = truth.index_copy(0, index, enlarge(truth[index], [drawn[i].enlarged for i in soft]))
    operators = make_operators(drawn, seeds, size, device)
    mixed = MixedOperator(operators, device)
    y, sigma = mixed.measure(truth, drawn, seeds), noise_levels(drawn, device)
    if any(one.conditions.blind for one in drawn):
        operators = [
            _fixed_operator(one.told, size, device) if one.conditions.blind else operator
            for one, operator in zip(drawn, operators, strict=True)
        ]
        mixed = MixedOperator(operators, device)
    return truth, drawn, operators, (mixed, y, sigma)


def make_operators(draws: Sequence[Draw], seeds: Sequence[int], size: int, device: torch.device) -> list[Operator]:
    """The operators of these draws; masks and kernels are computed together, on the device."""
    kinds: dict[str, list[int]] = {}
    for i, draw in enumerate(draws):
        kinds.setdefault(draw.task.kind, []).append(i)
    made: dict[int, Operator] = {}
    for kind, make in _MASKS.items():
        if indices := kinds.get(kind):
            masks = make([draws[i] for i in indices], [seeds[i] for i in indices], size, device)
            made |= {i: Inpaint(mask) for i, mask in zip(indices, masks.split(1), strict=True)}
    by_taps: dict[int, list[int]] = {}
    for i in kinds.get("motion", []) + kinds.get("disc", []):
        by_taps.setdefault(_kernel(draws[i].task).shape[-1], []).append(i)
    for indices in by_taps.values():
        kernels = _move(torch.stack([_kernel(draws[i].task) for i in indices]), device)
        made |= {i: KernelBlur(kernel) for i, kernel in zip(indices, kernels.split(1), strict=True)}
    return [made.get(i) or _fixed_operator(draw.task, size, device) for i, draw in enumerate(draws)]


def _random_masks(draws: Sequence[Draw], seeds: Sequence[int], size: int, device: torch.device) -> Tensor:
    rates = [draw.task.numbers["percent"] / 100 for draw in draws]
    field = Noise(seeds, device=device).uniform((len(draws), 1, size, size))
    return (field >= on_device(rates, device, torch.float32).view(-1, 1, 1, 1)).float()


def _box_masks(draws: Sequence[Draw], seeds: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Square holes, shifted from the centre; beyond the border they enter again on the other side."""
    sides = [min(int(draw.task.numbers.get("side", size // 2)), size) for draw in draws]
    corners = [
        ((size - side) // 2 + draw.shift[0], (size - side) // 2 + draw.shift[1], side)
        for side, draw in zip(sides, draws, strict=True)
    ]
    top, left, side = on_device(corners, device, torch.int64).view(-1, 3, 1, 1, 1).unbind(1)
    steps = torch.arange(size, device=device)
    rows, columns = (steps.view(1, 1, -1, 1) - top) % size, (steps.view(1, 1, 1, -1) - left) % size
    return 1 - ((rows < side) & (columns < side)).float()


_MASKS = {
    "inpaint": _random_masks,
    "box": _box_masks,
    "strokes": lambda _, seeds, size, device: _move(stroke_mask((size, size), seeds), device),
}


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@lru_cache(maxsize=4096)
def _kernel(task: Task) -> Tensor:
    """The kernel (1, k, k) of a motion or a disc, padded to one of few sizes so that it can be merged."""
    operator = task.operator()
    assert isinstance(operator, KernelBlur)
    taps = operator.kernel.shape[-1]
    side = -(-taps // 32) * 32 + 1
    before = side // 2 - taps // 2
    return pad(operator.kernel, (before, side - taps - before) * 2).unsqueeze(0)


@lru_cache(maxsize=256)
def _fixed_operator(task: Task, size: int, device: torch.device) -> Operator:
    """The operator of a task without random masks."""
    file = task.name if task.kind == "custom" else None
    return task.operator((size, size), operator_file=file).to(device)


class MixedOperator:
    """One operator for a batch in which each picture has its own; y is a list with a tensor for each of them."""

    def __init__(self, operators: Sequence[Operator], device: torch.device) -> None:
        groups: dict[Hashable, list[int]] = {}
        for i, operator in enumerate(operators):
            groups.setdefault(operator.batch_key, []).append(i)
        order = [i for group in groups.values() for i in group]
        self.order = on_device(order, device, torch.int64)
        # operator, indices, and their slice of the batch sorted by groups
        self.groups: list[tuple[Operator, list[int], slice]] = []
        for group in groups.values():
            members, start = [operators[i] for i in group], order.index(group[0])
            self.groups.append((members[0].merge(members, device), group, slice(start, start + len(group))))
        linear = [isinstance(operator, LinearOperator) for operator in operators]
        self.linear = on_device(linear, device, torch.bool).view(-1, 1, 1, 1)

    def each(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """The results of `function(operator, *arguments)` for each group, in the order of the batch."""
        arguments = tuple(a[self.order] if isinstance(a, Tensor) else a for a in arguments)
        made = []
        for operator, group, part in self.groups:
            given = [a[part] if isinstance(a, Tensor) else torch.cat([a[i] for i in group]) for a in arguments]
            made.append(function(operator, *given))
        results = torch.cat(made)
        return torch.empty_like(results).index_copy_(0, self.order, results)

    def project(self, x: Tensor, y: list[Tensor], sigma: Sigma) -> Tensor:
        return self.each(lambda operator, *given: operator.project(*given), x, y, sigma)

    def keep_known(self, x: Tensor, y: list[Tensor], sigma: Sigma) -> Tensor:
        return self.each(lambda operator, *given: operator.keep_known(*given), x, y, sigma)

    def to_image(self, y: list[Tensor], size: Size) -> Tensor:
        return self.each(lambda operator, y: operator.to_image(y, size), y)

    def guess(self, y: list[Tensor], sigma: Sigma, size: Size) -> Tensor:
        return self.each(lambda operator, y, sigma: operator.guess(y, sigma, size), y, sigma)

    def observed(self, y: list[Tensor], size: Size) -> Tensor:
        def observed(operator: Operator, y: Tensor) -> Tensor:
            mask, ones = operator.observed(y, size), y.new_ones(len(y), 1, *size)
            return ones if mask is None else mask.to(ones.dtype).expand_as(ones)

        return self.each(observed, y)

    def measure(self, x: Tensor, draws: Sequence[Draw], seeds: Sequence[int]) -> list[Tensor]:
        """The measurement (1, c, h, w) of each picture; its noise depends only on its seed."""
        order = [i for _, group, _ in self.groups for i in group]
        x, sigma = x[self.order], noise_levels([draws[i] for i in order], x.device)
        # one field for all: that of a smaller measurement is a window of it
        field = Noise([seeds[i] for i in order], device=x.device).normal(x.shape)
        rounded = on_device([draws[i].rounded for i in order], x.device, torch.bool).view(-1, 1, 1, 1)
        y: list[Tensor] = [x] * len(order)
        for operator, group, part in self.groups:
            clean = operator(x[part])
            if all(small <= large for small, large in zip(clean.shape[1:], x.shape[1:], strict=True)):
                channels, height, width = clean.shape[1:]
                z = field[part, :channels, :height, :width]
            else:
                z = Noise([seeds[i] for i in group], device=x.device).normal(clean.shape)
            z = z.masked_fill(rounded[part], 0)  # rounding is the only noise then
            measured = operator.add_noise(clean, z, sigma[part])
            if any(draws[i].rounded for i in group):
                measured = torch.where(rounded[part], operator.unround(round_to_8_bit(measured)), measured)
            places = [j for j, i in enumerate(group) if draws[i].damage is not None]
            if places:
                index, damages = on_device(places, x.device, torch.int64), [draws[i].damage for i in group]
                made = damaged(clean[index], z[index], [damage for damage in damages if damage is not None])
                measured = measured.index_copy(0, index, made.to(measured.dtype))
            for i, one in zip(group, measured.split(1), strict=True):
                y[i] = one
        return y


def lpips_weights(draws: Sequence[Draw], default: float, x: Tensor) -> Tensor:
    """The weight of LPIPS for each draw, with the dtype and device of x."""
    return on_device([default if draw.lpips is None else draw.lpips for draw in draws], x.device, x.dtype)


def noise_levels(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """σ in [-1, 1] units, (B, 1, 1, 1)."""
    levels = on_device([draw.sigma_y for draw in draws], device, torch.float32)
    return (INTERNAL_RANGE * levels).view(-1, 1, 1, 1)


def noise_like(x: Tensor, seed: int, names: Sequence[str]) -> Tensor:
    """A field of standard normal noise for each picture, by its name."""
    return Noise([derive_seed(seed, name) for name in names], device=x.device).normal(x.shape)


def example_run(task: str, sigma_y: float, x: Tensor, names: list[str], prior: Any, **parts: Any) -> tuple[Run, Tensor]:
    """The run of a solver that restores measurements of these pictures, and the measurements at image size."""
    problem, y = measure(task, sigma_y, x, names)
    size, noise = (x.shape[-2], x.shape[-1]), Noise([derive_seed(1, name) for name in names], device=x.device)
    return Run(y, problem, prior, noise, size=size, **parts), problem.operator.to_image(y, size)
