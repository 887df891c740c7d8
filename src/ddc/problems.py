"""Tasks, which name a degradation, and problems, which are an operator and the noise of its measurement."""

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.images import INTERNAL_RANGE
from ddc.noise import Noise, derive_seed
from ddc.operators.base import LinearOperator, Operator, Size, SVDOperator, size_of
from ddc.operators.blur import (
    GaussianBlur,
    KernelBlur,
    coded_kernel,
    disc_kernel,
    gaussian_kernel,
    levin_kernel,
    motion_kernel,
    read_kernel,
    softened,
)
from ddc.operators.colorize import Bayer, Colorize
from ddc.operators.custom import load_operator
from ddc.operators.fourier import MaskedFourier, RandomProjections, cartesian_mask
from ddc.operators.inpaint import Denoise, Inpaint, box_mask, random_mask, read_mask, stroke_mask
from ddc.operators.jpeg import JPEG
from ddc.operators.radon import Radon
from ddc.operators.superres import AreaDownscale, AveragePool, Bicubic

Family = Literal["superres", "blur", "inpaint", "jpeg", "denoise", "colorize", "custom", "other"]

# The names that menus show. Other numbers are accepted as well: sr5, gauss2.5, inpaint70, jpeg35, …
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
    "custom": "your own operator, a class in a Python file: my_op.py:MyOp",
}

# Tasks whose numbers are detected in the picture. They restore a picture; they cannot degrade one.
DETECTED: dict[str, str] = {
    "jpeg": "JPEG compression at the quality that the file states",
    "deblur": "blur: a disc, a motion or a Gaussian; the blur and the noise are estimated from the picture",
    "auto": "whatever the picture shows: holes, JPEG artefacts, blur or noise",
}

# Tasks for experiments: `ddc evaluate` and Python take them. Those of the family "other" are not restored from files,
# because their measurement is no picture, or does not tell the picture's size.
EXPERIMENTAL: dict[str, str] = {
    "colorize": "colour for a grey picture; no shipped network was trained for it, so the result stays grey",
    "ct60": "tomography: parallel rays at 60 angles; any number from 1 to 1000",
    "mri4": "magnetic resonance: one of 4 columns of the Fourier transform, the lowest frequencies among them",
    "aniso6x1.5@30": "a Gaussian blur of 6 pixels at 30° and 1.5 across",
    "coded": "a coded aperture of 7×7 cells",
    "levin1": "one of Levin's eight kernels, levin1 to levin8, from the file that DDC_LEVIN09 names",
    "area3.5": "3.5 times the size, where each small pixel is the mean over its area; any number from 1 to 16",
    "bayer": "one colour at each pixel, as a camera's sensor has it",
    "projections25": "random projections, a quarter as many as pixels; any per cent up to 100",
}

_NUMBER = r"\d+(?:\.\d+)?"
_SOFT = rf"(?:\+gauss(?P<softness>{_NUMBER}))?"
_SOFTNESS = (0.0, 0.0, 20.0, "at most 20 pixels")


@dataclass(frozen=True)
class Kind:
    """One kind of task: how its name is written, and the numbers it takes."""

    pattern: str
    family: Family
    # number → default, lowest and highest value, and the range in words
    numbers: dict[str, tuple[float | None, float, float, str]] = field(default_factory=dict)


KINDS: dict[str, Kind] = {
    "sr": Kind(
        r"sr(?P<scale>\d+)(?P<pool>-pool)?", "superres", {"scale": (None, 2, 16, "a whole number from 2 to 16")}
    ),
    "gauss": Kind(
        rf"gauss(?P<sigma>{_NUMBER})?", "blur", {"sigma": (3.0, 1e-9, 100, "more than 0 and at most 100 pixels")}
    ),
    "disc": Kind(
        rf"disc(?P<radius>{_NUMBER})?{_SOFT}",
        "blur",
        {"radius": (3.0, 0.5, 100, "0.5 to 100 pixels"), "softness": _SOFTNESS},
    ),
    "motion": Kind(
        rf"motion(?:(?P<length>{_NUMBER})(?:@(?P<angle>-?{_NUMBER}))?)?{_SOFT}",
        "blur",
        {
            "length": (15.0, 1, 255, "1 to 255 pixels"),
            "angle": (45.0, -math.inf, math.inf, "degrees"),
            "softness": _SOFTNESS,
        },
    ),
    "blur": Kind(r"blur", "blur"),
    "inpaint": Kind(
        rf"inpaint(?P<percent>{_NUMBER})?", "inpaint", {"percent": (None, 1e-9, 100 - 1e-9, "between 0 and 100")}
    ),
    "box": Kind(r"box(?P<side>\d+)?", "inpaint", {"side": (None, 1, math.inf, "at least one pixel")}),
    "strokes": Kind(r"strokes", "inpaint"),
    "jpeg": Kind(r"jpeg(?P<quality>\d+)", "jpeg", {"quality": (None, 1, 100, "a whole number from 1 to 100")}),
    "denoise": Kind(r"denoise", "denoise"),
    "colorize": Kind(r"colorize", "colorize"),
    "custom": Kind(r"custom", "custom"),
    "ct": Kind(r"ct(?P<angles>\d+)", "other", {"angles": (None, 1, 1000, "a whole number from 1 to 1000")}),
    "mri": Kind(rf"mri(?P<factor>{_NUMBER})", "other", {"factor": (None, 1, 100, "a number from 1 to 100")}),
    "aniso": Kind(
        rf"aniso(?P<along>{_NUMBER})x(?P<across>{_NUMBER})@(?P<angle>-?{_NUMBER})",
        "blur",
        {
            "along": (None, 0.2, 30, "0.2 to 30 pixels"),
            "across": (None, 0.2, 30, "0.2 to 30 pixels"),
            "angle": (None, -math.inf, math.inf, "degrees"),
        },
    ),
    "coded": Kind(r"coded", "blur"),
    "levin": Kind(r"levin(?P<number>\d)", "blur", {"number": (None, 1, 8, "a whole number from 1 to 8")}),
    "area": Kind(rf"area(?P<factor>{_NUMBER})", "other", {"factor": (None, 1, 16, "a number from 1 to 16")}),
    "bayer": Kind(r"bayer", "other"),
    "projections": Kind(
        rf"projections(?P<percent>{_NUMBER})", "other", {"percent": (None, 0.1, 100, "0.1 to 100 per cent")}
    ),
}

_OPERATORS: dict[str, Callable[[dict[str, float]], Operator]] = {
    "sr": lambda n: (AveragePool if "pool" in n else Bicubic)(int(n["scale"])),
    # the paper's 61 taps, or as many as a wider Gaussian needs
    "gauss": lambda n: GaussianBlur(n["sigma"], max(61, 2 * math.ceil(4 * n["sigma"]) + 1)),
    "disc": lambda n: KernelBlur(softened(disc_kernel(n["radius"]), n["softness"])),
    "motion": lambda n: KernelBlur(softened(motion_kernel(n["length"], n["angle"]), n["softness"])),
    "jpeg": lambda n: JPEG(int(n["quality"])),
    "denoise": lambda n: Denoise(),
    "colorize": lambda n: Colorize(),
    "aniso": lambda n: KernelBlur(gaussian_kernel(n["along"], n["across"], n["angle"])),
    "coded": lambda n: KernelBlur(coded_kernel()),
    "levin": lambda n: KernelBlur(levin_kernel(int(n["number"]))),
}

# of the family "other": from the numbers, the size of the picture and a seed for each image
_SIZED: dict[str, Callable[[dict[str, float], Size, Sequence[int]], Operator]] = {
    "ct": lambda n, size, seeds: Radon(size, int(n["angles"])),
    "mri": lambda n, size, seeds: MaskedFourier(cartesian_mask(size, n["factor"], seeds)),
    "area": lambda n, size, seeds: AreaDownscale(size, n["factor"]),
    "bayer": lambda n, size, seeds: Bayer(),
    "projections": lambda n, size, seeds: RandomProjections(size, n["percent"] / 100),
}


class Given(TypedDict, total=False):
    """What only some tasks use."""

    mask: Tensor | str | Path | None  # replaces the generated mask of every inpainting task
    kernel: Tensor | str | Path | None  # for "blur"
    operator_file: str | None  # for "custom"


@dataclass(frozen=True)
class Task:
    """A degradation by its name, parsed once: "sr4", "gauss1.5", "motion21@30+gauss0.6", "inpaint92", "jpeg10", …"""

    name: str
    kind: str  # a key of `KINDS`
    numbers: dict[str, float] = field(default_factory=dict, compare=False)

    @staticmethod
    def parse(name: "str | Task") -> "Task":
        """Returns the task of a name; numbers that the name leaves out have their defaults."""
        if isinstance(name, Task):
            return name
        for key, kind in KINDS.items():
            if match := re.fullmatch(kind.pattern, name):
                return Task(name, key, _numbers(name, kind, match))
        if name in DETECTED:
            raise UserError(
                f"the task {name} detects the degradation in a picture that is restored; "
                f"name the degradation here, as in {'jpeg10' if name == 'jpeg' else 'gauss1.5'}"
            )
        names = (*TASKS, *DETECTED, *EXPERIMENTAL)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"the task {name!r} is not known; expected one of {', '.join(names)}{hint}")

    @property
    def family(self) -> Family:
        return KINDS[self.kind].family

    def operator(
        self, size: Size | None = None, seeds: Sequence[int] | None = None, **given: Unpack[Given]
    ) -> Operator:
        """Returns the operator of this task. The `size` (height, width) of the picture and the `seeds` (one for each
        image) determine random masks."""
        mask, kernel, operator_file = given.get("mask"), given.get("kernel"), given.get("operator_file")
        for what, value, fits in (
            ("a mask", mask, self.family == "inpaint"),
            ("a kernel", kernel, self.kind == "blur"),
            ("an operator file", operator_file, self.kind == "custom"),
        ):
            if value is not None and not fits:
                raise UserError(f"{what} was given, but the task {self.name} does not use one; leave it out")
        if mask is not None:
            observed = mask if isinstance(mask, Tensor) else read_mask(mask)
            inpaint = Inpaint(observed.reshape(-1, 1, *observed.shape[-2:]))
            if size is not None:
                inpaint.check_size(size)
            return inpaint
        if self.family == "inpaint":
            return Inpaint(self._mask(size, [0] if seeds is None else seeds))
        if self.kind == "blur":
            if kernel is None:
                raise UserError("the task blur needs a kernel: give a picture or a .npy file, or use gauss or motion")
            return KernelBlur(kernel if isinstance(kernel, Tensor) else read_kernel(kernel))
        if self.kind == "custom":
            if operator_file is None:
                raise UserError("the task custom needs an operator: give file.py:Class, for example my_op.py:MyOp")
            return load_operator(operator_file, size)
        if self.family == "other":
            if size is None:
                raise UserError(
                    f"the task {self.name} is for experiments with known pictures (`ddc evaluate`, or Python with the size "
                    "of the picture); its measurement cannot be restored from a file"
                )
            return _SIZED[self.kind](self.numbers, size, [0] if seeds is None else seeds)
        return _OPERATORS[self.kind](self.numbers)

    def _mask(self, size: Size | None, seeds: Sequence[int]) -> Tensor:
        if self.name == "inpaint":
            raise UserError("the task inpaint needs a mask: give one, or a picture with transparency, or use inpaint92")
        if size is None:
            raise UserError(f"the task {self.name} needs the size of the picture, or a mask; give size=(height, width)")
        if self.kind == "strokes":
            return stroke_mask(size, seeds)
        if self.kind == "box":
            side = int(self.numbers.get("side", 0))
            return box_mask(size, (side, side) if side else None)
        return random_mask(size, self.numbers["percent"] / 100, seeds)


def _numbers(name: str, kind: Kind, match: re.Match[str]) -> dict[str, float]:
    """Returns the numbers in a task's name, with defaults, checked against their limits."""
    found = match.groupdict()
    numbers = {"pool": 1.0} if found.get("pool") else {}
    for key, (default, low, high, expected) in kind.numbers.items():
        value = default if found[key] is None else float(found[key])
        if value is None:
            continue
        if not low <= value <= high:
            raise UserError(f"the {key} of the task {name} is {value:g}; expected {expected}")
        numbers[key] = value
    return numbers


@dataclass(frozen=True)
class Problem:
    """y = A(x) + e, e ~ N(0, σ²). σ_y is in [0, 1] units, as people and the paper's tables state it."""

    operator: Operator
    sigma_y: float | Tensor = 0.0  # a tensor holds one value for each image
    name: str = "this operator"
    sigma: float | Tensor = field(init=False, repr=False)  # in [-1, 1] units, as all tensors are; (B, 1, 1, 1)

    def __post_init__(self) -> None:
        sigma = INTERNAL_RANGE * self.sigma_y
        if isinstance(sigma, Tensor):  # not checked: reading it would make every training step wait for the device
            sigma = sigma.view(-1, 1, 1, 1)
        else:
            check_sigma(self.sigma_y)
        object.__setattr__(self, "sigma", sigma)

    def measure(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Returns A(x) plus noise from the standard normal field z, shaped like A(x); no noise if z is None."""
        y = self.operator(x)
        return y if z is None else self.operator.add_noise(y, z, self.sigma)

    def shown(self, y: Tensor) -> Tensor:
        """Returns y as a picture to look at: at image size, clipped to [-1, 1]."""
        return self.operator.to_image(y).clamp(-1, 1)

    def solver_without_training(self) -> str:
        """Returns a solver for this operator that needs the prior alone."""
        if isinstance(self.operator, SVDOperator):
            return "ddnm"
        return "dds" if isinstance(self.operator, LinearOperator) else "dps"

    def suggested_solvers(self) -> str:
        """Returns the solvers that accept this operator, for error messages."""
        if isinstance(self.operator, SVDOperator):
            return "any solver"
        return "ddc, dps or dds" if isinstance(self.operator, LinearOperator) else "ddc, dps, pigdm or reddiff"


def make_problem(
    task: str | Task,
    sigma_y: float | Tensor = 0.0,
    size: Size | None = None,
    seeds: Sequence[int] | None = None,
    **given: Unpack[Given],
) -> Problem:
    """Returns the problem of a task; see `Task.operator`."""
    check_sigma(sigma_y)
    task = Task.parse(task)
    return Problem(task.operator(size, seeds, **given), sigma_y, task.name)


def measure(
    task: str | Task, sigma_y: float, x: Tensor, names: Sequence[str], seed: int = 0, **given: Unpack[Given]
) -> tuple[Problem, Tensor]:
    """Returns the problem and the measurements of clean pictures x, (B, 3, H, W) in [-1, 1].

    Masks and noise depend only on the seed and the pictures' names; the noise is the same field for every σ_y. y is
    floating point, as in the paper; it is not rounded to 8 bits.
    """
    problem = make_problem(task, sigma_y, size_of(x), image_seeds(seed, "operator", names), **given)
    problem.operator.to(x.device)
    with torch.autocast(x.device.type, enabled=False):
        y = problem.operator(x)
        if sigma_y:
            noise = Noise(image_seeds(seed, "measure", names), device=x.device)
            y = problem.operator.add_noise(y, noise.normal(y.shape), problem.sigma)
        return problem, y


def image_seeds(seed: int, purpose: str, names: Sequence[str]) -> list[int]:
    """Returns a seed for each picture, which depends on its name, on the user's seed and on what it is for."""
    return [derive_seed(seed, f"{purpose}/{name}") for name in names]


def check_whole(name: str, value: object, least: int | None = None) -> None:
    if not isinstance(value, Integral):
        raise UserError(f"{name} must be a whole number, not {value!r}")
    if least is not None and value < least:
        raise UserError(f"{name} must be at least {least}, not {value}")


def check_sigma(sigma_y: float | Tensor) -> None:
    """Raises an error unless σ_y, or every σ_y of a batch, is finite, not negative and at most 1."""
    for value in sigma_y.flatten().tolist() if isinstance(sigma_y, Tensor) else [sigma_y]:
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"sigma is {value}; expected 0 or a small positive number such as 0.05 ([0, 1] units)")
        if value > 1:
            raise UserError(
                f"sigma is {value:g}, more than the range from black to white; expected a number such as 0.05 "
                "([0, 1] units: for 8-bit pixels, divide by 255)"
            )


def misfit(y: Tensor, problem: Problem) -> float:
    """Returns how far the linear guess from y, (B, 3, H, W), is from y when it is degraded again: RMS, [0, 1] units.

    It is at most about the noise in y if the problem describes y. If the operator blurs more than y is blurred, or y
    has more noise than stated, the guess exceeds black and white, and is clipped. The border is left out, because no
    operator knows what lies beyond it.
    """
    operator = problem.operator
    with torch.no_grad():
        zero = y.new_zeros(*y.shape[:2], *operator.image_size(y))
        guess = operator.project(zero, y, problem.sigma).clamp(-1, 1)
        residual = (operator(guess) - y) / 2
    rows, columns = residual.shape[-2] // 8, residual.shape[-1] // 8
    inside = residual[..., rows : residual.shape[-2] - rows, columns : residual.shape[-1] - columns]
    return float(inside.square().mean().sqrt())


def consistency(x: Tensor, y: Tensor, problem: Problem) -> Tensor:
    """Returns the root mean square of A(x) − y over what was observed, (B,), for restored pictures x in [-1, 1].

    Relative to σ if the measurement has noise (the truth has 1), else in [0, 1] units.
    """
    residual = (problem.operator(x) - y).double()
    seen = problem.operator.observed(y, size_of(x))
    if seen is not None:  # holes are no measurement
        weight = seen.to(residual).expand_as(residual)
        mean = (weight * residual**2).sum((1, 2, 3)) / weight.sum((1, 2, 3)).clamp(min=1)
    else:
        mean = (residual**2).mean((1, 2, 3))
    sigma = torch.as_tensor(problem.sigma).double().flatten().to(mean)
    return mean.sqrt() / torch.where(sigma > 0, sigma, 2.0)
