"""Super-resolution: the measurement is a smaller image.

A size that is no multiple of the scale is continued by symmetric reflection, so y has ceil(H / scale) rows.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ddc.errors import UserError
from ddc.operators.base import LinearOperator, SeparableOperator, Sigma, Size, Taps


def symmetric(index: Tensor, length: int) -> Tensor:
    """Half-sample symmetry: … 1 0 | 0 1 2 … The border pixel is repeated."""
    folded = index % (2 * length)
    return torch.minimum(folded, 2 * length - 1 - folded)


class Downscale(SeparableOperator):
    """Downscaling by a whole number. A subclass defines the taps."""

    settings = ("scale",)

    def __init__(self, scale: int = 4) -> None:
        super().__init__()
        if type(scale) is not int or scale < 2:
            raise UserError(f"the scale of super-resolution is {scale!r}; expected a whole number of at least 2")
        self.scale = self.align = scale


class Bicubic(Downscale):
    """Antialiased bicubic downscaling: 4·scale taps, half-sample symmetric border, as in DDRM. Pillow differs in the outer
    two pixels of y, where it leaves out the taps beyond the border."""

    def taps(self, length: int) -> Taps:
        rows = torch.arange(-(-length // self.scale)).unsqueeze(1)
        # the centre of output pixel i lies at (i + ½)·scale; its kernel covers 2·scale pixels on each side
        first = rows * self.scale + (self.scale - 4 * self.scale) // 2
        index = first + torch.arange(4 * self.scale)
        weight = cubic((index.double() + 0.5) / self.scale - (rows + 0.5))
        return symmetric(index, length), weight / weight.sum(1, keepdim=True)


class AveragePool(Downscale):
    """Downscaling by the mean of scale × scale pixels."""

    def __init__(self, scale: int = 4) -> None:
        super().__init__(scale)
        self.smooth = Bicubic(scale)

    def taps(self, length: int) -> Taps:
        index = torch.arange(-(-length // self.scale) * self.scale).view(-1, self.scale)
        return symmetric(index, length), torch.full(index.shape, 1 / self.scale, dtype=torch.float64)

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns the guess for bicubic downscaling, corrected to have the means y. All singular values are equal here,
        so their directions are not frequencies: Wiener's filter would return y in squares."""
        return self.project(self.smooth.guess(y, sigma, size), y, sigma)


class AreaDownscale(SeparableOperator):
    """Downscaling by any factor: each pixel of y is the mean over its area, which may cut pixels. It has the size of its
    images, because a factor such as 3.5 does not tell it from y."""

    settings = ("size", "factor")

    def __init__(self, size: Size, factor: float) -> None:
        super().__init__()
        if not 1 <= factor <= min(size):
            raise UserError(f"the factor of downscaling is {factor:g}; expected 1 to {min(size)}, the shorter side")
        self.size, self.factor, self.scale = (size[0], size[1]), float(factor), round(factor)

    def taps(self, length: int) -> Taps:
        start = torch.arange(math.ceil(length / self.factor), dtype=torch.float64).unsqueeze(1) * self.factor
        index = start.floor().long() + torch.arange(math.ceil(self.factor) + 1)
        weight = torch.minimum(index + 1.0, start + self.factor) - torch.maximum(index.double(), start)
        return symmetric(index, length), weight.clamp(min=0) / self.factor

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        return interpolate(y, size=size or self.size, mode="nearest-exact")

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns the likeliest photograph: the singular directions of cut pixels are no frequencies."""
        return LinearOperator.guess(self, y, sigma, size or self.size)

    def image_size(self, y: Tensor) -> Size:
        return self.size


def cubic(x: Tensor) -> Tensor:
    """Returns Keys' cubic convolution kernel with a = −½ (as in Pillow and DDRM; OpenCV uses −¾), 0 outside [-2, 2]."""
    x = x.abs()
    near = 1.5 * x**3 - 2.5 * x**2 + 1
    far = -0.5 * (x**3 - 5 * x**2 + 8 * x - 4)
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))
