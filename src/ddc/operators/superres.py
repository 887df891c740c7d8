"""Super-resolution: the measurement is a smaller picture.

A size that is no multiple of the scale is continued by symmetric reflection, so y has ceil(H / scale) rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.operators.base import Sigma, Size
from ddc.operators.separable import SeparableOperator, Taps, symmetric

BICUBIC_A = -0.5  # as Pillow and DDRM; OpenCV's −0.75 is another kernel


def check_scale(scale: int) -> None:
    if type(scale) is not int or scale < 2:
        raise UserError(f"the scale of super-resolution is {scale!r}; expected a whole number of at least 2")


def cubic(x: Tensor) -> Tensor:
    """Keys' cubic convolution kernel, zero outside [-2, 2]."""
    x = x.abs()
    near = (BICUBIC_A + 2) * x**3 - (BICUBIC_A + 3) * x**2 + 1
    far = BICUBIC_A * (x**3 - 5 * x**2 + 8 * x - 4)
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


@dataclass(frozen=True)
class Bicubic(SeparableOperator):
    """Antialiased bicubic downscaling: 4·scale taps, half-sample symmetric border."""

    scale: int = 4

    def __post_init__(self) -> None:
        check_scale(self.scale)

    @property
    def align(self) -> int:  # type: ignore[override]
        return self.scale

    def taps(self, length: int) -> Taps:
        rows = torch.arange(-(-length // self.scale)).unsqueeze(1)
        # the centre of output pixel i lies at (i + ½)·scale; its kernel covers 2·scale pixels on each side
        first = rows * self.scale + (self.scale - 4 * self.scale) // 2
        index = first + torch.arange(4 * self.scale)
        distance = (index.double() + 0.5) / self.scale - (rows + 0.5)
        weight = cubic(distance)
        return Taps(symmetric(index, length), weight / weight.sum(1, keepdim=True))


@dataclass(frozen=True)
class AveragePool(SeparableOperator):
    """Downscaling by the mean of scale × scale pixels."""

    scale: int = 4

    def __post_init__(self) -> None:
        check_scale(self.scale)

    @property
    def align(self) -> int:  # type: ignore[override]
        return self.scale

    def taps(self, length: int) -> Taps:
        rows = torch.arange(-(-length // self.scale)).unsqueeze(1)
        index = rows * self.scale + torch.arange(self.scale)
        return Taps(symmetric(index, length), torch.full(index.shape, 1 / self.scale, dtype=torch.float64))

    def wiener(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Bicubic's smooth guess, with the means put right.

        All singular values are equal here, so that their directions are no frequencies: the guess from them would
        be y in squares.
        """
        return self.project(Bicubic(self.scale).wiener(y, sigma, size), y, sigma)
