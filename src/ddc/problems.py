"""A problem is an operator and the noise of its measurement; the named tasks are made here."""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.images import internal_sigma
from ddc.noise import Noise, derive_seed
from ddc.operators.base import LinearOperator, Operator, Size, SVDOperator
from ddc.operators.blur import GaussianBlur, KernelBlur, disc_kernel, motion_kernel, read_kernel, softened
from ddc.operators.colorize import Colorize
from ddc.operators.custom import load_operator
from ddc.operators.denoise import Denoise
from ddc.operators.inpaint import Inpaint, box_mask, random_mask, read_mask, stroke_mask
from ddc.operators.jpeg import JPEG
from ddc.operators.superres import AveragePool, Bicubic

Family = Literal["superres", "blur", "inpaint", "jpeg", "denoise", "colorize", "custom"]

# The names a menu shows. Other numbers than these are taken as well: sr5, gauss2.5, inpaint70, jpeg35, …
TASKS: dict[str, str] = {
    "sr2": "twice the size (bicubic); any whole number from 2 to 16",
    "sr3": "three times the size (bicubic)",
    "sr4": "four times the size (bicubic)",
    "sr8": "eight times the size (bicubic)",
    "sr4-pool": "four times the size, where each small pixel is the mean of 4×4; any number from 2 to 16",
    "gauss": "Gaussian blur, standard deviation 3 pixels; gauss1.5 for 1.5 pixels",
    "disc": "out of focus: a disc of radius 3 pixels; disc2.5 for 2.5 pixels, disc2.5+gauss0.6 for a soft one",
    "motion": "motion blur of 15 pixels at 45°; motion21@30+gauss0.6 for 21 soft ones at 30°",
    "blur": "blur with a kernel that you give (a picture or a .npy file)",
    "inpaint92": "92 % of the pixels are missing, at random; any number between 0 and 100",
    "box": "the middle is missing, half as high and as wide as the picture; box64 for 64×64 pixels",
    "strokes": "brush strokes are missing",
    "inpaint": "what your mask (or the picture's transparency) says is missing",
    "jpeg10": "JPEG compression at quality 10; any number from 1 to 100",
    "denoise": "noise alone",
    "colorize": "colour for a grey picture",
    "custom": "your own operator, a class in a Python file: my_op.py:MyOp",
}

# Of these the number is read off each picture, which takes a picture: they can be restored, not degraded with.
READ_OFF: dict[str, str] = {
    "jpeg": "JPEG compression at the quality that the file says",
    "deblur": "blur: a disc, a motion or a Gaussian; it and the noise are estimated from the picture",
    "auto": "what the picture itself shows: holes, the marks of JPEG, blur or noise",
}

_NUMBER = r"\d+(?:\.\d+)?"
_SOFT = rf"(?:\+gauss(?P<soft>{_NUMBER}))?"
_PATTERNS: tuple[tuple[str, Family], ...] = (
    (r"sr(?P<scale>\d+)(?P<pool>-pool)?", "superres"),
    (rf"gauss(?P<sigma>{_NUMBER})?", "blur"),
    (rf"disc(?P<radius>{_NUMBER})?{_SOFT}", "blur"),
    (rf"motion(?:(?P<length>{_NUMBER})(?:@(?P<angle>-?{_NUMBER}))?)?{_SOFT}", "blur"),
    (r"blur", "blur"),
    (rf"inpaint(?P<percent>{_NUMBER})?", "inpaint"),
    (r"box(?P<side>\d+)?", "inpaint"),
    (r"strokes", "inpaint"),
    (r"jpeg(?P<quality>\d+)", "jpeg"),
    (r"denoise", "denoise"),
    (r"colorize", "colorize"),
    (r"custom", "custom"),
)


@dataclass(frozen=True)
class Problem:
    """y = A(x) + e, e ~ N(0, σ²). σ_y is in [0, 1] units, as people and the paper's tables give it."""

    operator: Operator
    sigma_y: float | Tensor = 0.0  # a tensor holds one value for each image
    name: str = "this operator"

    def __post_init__(self) -> None:
        # a tensor is trusted here: looking at it would make every training step wait for the device
        if not isinstance(self.sigma_y, Tensor):
            check_sigma(self.sigma_y)

    @property
    def sigma(self) -> float | Tensor:
        """The noise in [-1, 1] units, where everything inside works."""
        if isinstance(self.sigma_y, Tensor):
            return internal_sigma(self.sigma_y).view(-1, 1, 1, 1)
        return internal_sigma(self.sigma_y)

    def measure(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """A(x) with noise from the standard normal field z (shaped like A(x)); None only without noise."""
        y = self.operator(x)
        return y if z is None else self.operator.add_noise(y, z, self.sigma)

    def suggested_solvers(self) -> str:
        """Solvers that take this operator, for error messages."""
        if isinstance(self.operator, SVDOperator):
            return "any solver"
        if isinstance(self.operator, LinearOperator):
            return "ddc, dps or dds"
        return "ddc, dps, pigdm or reddiff"


def check_sigma(sigma_y: float | Tensor) -> None:
    """σ_y, or one for each image, must be finite and not negative."""
    values = sigma_y.flatten().tolist() if isinstance(sigma_y, Tensor) else [sigma_y]
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise UserError(
                f"sigma is {value}; expected 0 or a small positive number such as 0.05 ([0, 1] units)"
            )
        if value > 1:
            raise UserError(
                f"sigma is {value:g}, more than all of black to white; expected a number such as 0.05 "
                "([0, 1] units: for 8-bit pixels, divide by 255)"
            )


def misfit(y: Tensor, problem: Problem) -> float:
    """How far the linear guess from y, (B, 3, H, W), is from y when it is degraded again: rms, in [0, 1] units.

    It is about the noise in y, or less, where the problem describes y. Where the operator blurs more than y is
    blurred, or y has more noise than is said, the guess goes far beyond black and white, which pixels cannot. The
    border is left out, for beyond it real pictures go on as no operator knows.
    """
    with torch.no_grad():
        guess = problem.operator.estimate(y, problem.sigma).clamp(-1, 1)
        residual = (problem.operator(guess) - y) / 2
    rows, columns = residual.shape[-2] // 8, residual.shape[-1] // 8
    inside = residual[..., rows : residual.shape[-2] - rows, columns : residual.shape[-1] - columns]
    return float(inside.square().mean().sqrt())


def task_family(task: str) -> Family:
    """What kind of degradation a task's name stands for; an unknown name is refused."""
    return _parse(task)[0]


def make_problem(
    task: str,
    sigma_y: float | Tensor = 0.0,
    size: Size | None = None,
    seeds: Sequence[int] | None = None,
    mask: Tensor | str | Path | None = None,
    kernel: Tensor | str | Path | None = None,
    operator_file: str | None = None,
) -> Problem:
    """The problem of a named task; see `task_operator`."""
    check_sigma(sigma_y)
    return Problem(task_operator(task, size, seeds, mask, kernel, operator_file), sigma_y, task)


def measure_named(
    task: str, sigma_y: float, x: Tensor, names: Sequence[str], seed: int = 0
) -> tuple[Problem, Tensor]:
    """The problem and measurements of clean pictures x, (B, 3, H, W) in [-1, 1].

    Masks and noise depend on the seed and the pictures' names alone; the noise is the same field for every σ. y is
    floating point, as in the paper, and not rounded to 8 bits.
    """
    seeds = [derive_seed(seed, f"operator/{name}") for name in names]
    problem = make_problem(task, sigma_y, size=(x.shape[-2], x.shape[-1]), seeds=seeds)
    with torch.autocast(x.device.type, enabled=False):
        if not sigma_y:
            return problem, problem.measure(x)
        noise = Noise([derive_seed(seed, f"measure/{name}") for name in names], device=x.device)
        return problem, problem.measure(x, noise.normal(problem.operator(x).shape))


def task_operator(
    task: str,
    size: Size | None = None,
    seeds: Sequence[int] | None = None,
    mask: Tensor | str | Path | None = None,
    kernel: Tensor | str | Path | None = None,
    operator_file: str | None = None,
) -> Operator:
    """The operator of a named task.

    `size` (height, width) of the picture and `seeds` (one for each image) decide random masks. `mask` takes the
    place of a made one in every inpainting task; `kernel` belongs to "blur", `operator_file` to "custom".
    """
    family, numbers = _parse(task)
    for given, what, fits in (
        (mask, "a mask", family == "inpaint"),
        (kernel, "a kernel", task == "blur"),
        (operator_file, "an operator file", family == "custom"),
    ):
        if given is not None and not fits:
            raise UserError(f"{what} was given, but the task {task} does not use one; leave it out")

    if family == "superres":
        scale = int(numbers["scale"])
        if not 2 <= scale <= 16:
            raise UserError(f"the task {task} enlarges {scale} times; expected a whole number from 2 to 16")
        return AveragePool(scale) if numbers["pool"] else Bicubic(scale)
    if family == "blur":
        return _blur(task, numbers, kernel)
    if family == "inpaint":
        return Inpaint(_mask(task, numbers, size, seeds, mask))
    if family == "jpeg":
        return JPEG(int(numbers["quality"]))
    if family == "denoise":
        return Denoise()
    if family == "colorize":
        return Colorize()
    if operator_file is None:
        raise UserError("the task custom needs an operator: give file.py:Class, for example my_op.py:MyOp")
    return load_operator(operator_file, size)


def _parse(task: str) -> tuple[Family, dict[str, str]]:
    for pattern, family in _PATTERNS:
        match = re.fullmatch(pattern, task)
        if match:
            return family, match.groupdict()
    if task in READ_OFF:
        raise UserError(
            f"the task {task} is read off a picture that is restored; name one here, as in "
            + ("jpeg10" if task == "jpeg" else "gauss1.5")
        )
    names = (*TASKS, *READ_OFF)
    near = difflib.get_close_matches(task, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"the task {task!r} is not known; expected one of {', '.join(names)}{hint}")


def _blur(task: str, numbers: dict[str, str], kernel: Tensor | str | Path | None) -> Operator:
    if task == "blur":
        if kernel is None:
            raise UserError(
                "the task blur needs a kernel: give a picture or a .npy file, or use gauss or motion"
            )
        return KernelBlur(kernel if isinstance(kernel, Tensor) else read_kernel(kernel))
    if "soft" in numbers:
        soft = float(numbers["soft"] or 0)
        if soft > 20:
            raise UserError(f"the task {task} has a Gaussian of {soft:g} pixels on top; expected at most 20")
        return KernelBlur(softened(_shape(task, numbers), soft))
    sigma = float(numbers["sigma"] or 3.0)
    if not 0 < sigma <= 100:
        raise UserError(f"the task {task} blurs with {sigma:g} pixels; expected more than 0 and at most 100")
    return GaussianBlur(sigma, max(61, 2 * math.ceil(4 * sigma) + 1))  # 61 taps, unless that would cut it


def _shape(task: str, numbers: dict[str, str]) -> Tensor:
    if "radius" in numbers:
        radius = float(numbers["radius"] or 3)
        if not 0.5 <= radius <= 100:
            raise UserError(f"the task {task} has a disc of radius {radius:g} pixels; expected 0.5 to 100")
        return disc_kernel(radius)
    length, angle = float(numbers["length"] or 15), float(numbers["angle"] or 45)
    if not 1 <= length <= 255:
        raise UserError(f"the task {task} moves by {length:g} pixels; expected 1 to 255")
    return motion_kernel(length, angle)


def _mask(
    task: str,
    numbers: dict[str, str],
    size: Size | None,
    seeds: Sequence[int] | None,
    mask: Tensor | str | Path | None,
) -> Tensor:
    if mask is not None:
        given = mask if isinstance(mask, Tensor) else read_mask(mask)
        given = given.reshape(-1, 1, *given.shape[-2:])
        if size is not None and tuple(given.shape[-2:]) != tuple(size):
            raise UserError(
                f"the mask is {given.shape[-1]}×{given.shape[-2]} and the picture {size[1]}×{size[0]} "
                "(width × height); give a mask of the picture's size"
            )
        return given
    if task == "inpaint":
        raise UserError(
            "the task inpaint needs a mask: give one, or a picture with transparency, or use inpaint92"
        )
    if size is None:
        raise UserError(
            f"the task {task} needs the size of the picture, or a mask; give size=(height, width)"
        )
    seeds = [0] if seeds is None else seeds
    if task == "strokes":
        return stroke_mask(size, seeds)
    if task.startswith("box"):
        side = numbers["side"]
        return box_mask(size, (int(side), int(side)) if side else None)
    percent = float(numbers["percent"])
    if not 0 < percent < 100:
        raise UserError(
            f"the task {task} misses {percent:g} % of the pixels; expected a number between 0 and 100"
        )
    return random_mask(size, percent / 100, seeds)
