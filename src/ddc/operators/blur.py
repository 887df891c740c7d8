"""Blur with a Gaussian (separable) or with any kernel. The picture is reflected at its border.

A photograph is not: `ddc.operators.border` guesses what lies beyond its border.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.errors import UserError
from ddc.operators.base import ROUNDING, LinearOperator, Sigma, Size
from ddc.operators.separable import SeparableOperator, Taps, reflect


@dataclass(frozen=True)
class GaussianBlur(SeparableOperator):
    """A Gaussian of standard deviation `sigma` pixels, cut to size × size taps; the paper's is 3.0 and 61."""

    sigma: float = 3.0
    size: int = 61

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise UserError(
                f"the sigma of a Gaussian blur is {self.sigma}; expected a number above 0, in pixels"
            )
        if self.size < 1 or self.size % 2 == 0:
            raise UserError(f"the size of a Gaussian blur is {self.size}; expected an odd number of taps")

    @property
    def weight(self) -> Tensor:
        """The taps of one side."""
        offset = torch.arange(self.size, dtype=torch.float64) - self.size // 2
        weight = torch.exp(-0.5 * (offset / self.sigma) ** 2)
        return weight / weight.sum()

    @property
    def kernel(self) -> Tensor:
        return torch.outer(self.weight, self.weight).float()

    def taps(self, length: int) -> Taps:
        index = torch.arange(length).unsqueeze(1) + torch.arange(self.size) - self.size // 2
        return Taps(reflect(index, length), self.weight.expand(length, -1))

    def unround(self, y: Tensor) -> Tensor:
        return smooth_bands(y)


@dataclass(frozen=True, eq=False)
class KernelBlur(LinearOperator):
    """Convolution with a kernel (h, w), or one kernel for each image (B, 1, h, w); its middle is h//2, w//2."""

    kernel: Tensor
    cg_iterations: int = 50

    def __post_init__(self) -> None:
        if self.kernel.ndim not in (2, 4) or (self.kernel.ndim == 4 and self.kernel.shape[1] != 1):
            raise UserError(
                f"a kernel has the shape {tuple(self.kernel.shape)}; expected (h, w) or (B, 1, h, w)"
            )
        # a kernel on a GPU was made by the library: looking at it would make the device wait
        if self.kernel.numel() == 0 or (not self.kernel.is_cuda and not bool(self.kernel.isfinite().all())):
            raise UserError("a blur kernel is empty or holds NaN or infinity; expected finite numbers")

    def __call__(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        rows, columns, spectrum, fft_size = _plan(self, (height, width), x.dtype, x.device)
        padded = x.to(spectrum.real.dtype)[..., rows, :][..., columns]
        y = torch.fft.irfft2(torch.fft.rfft2(padded, s=fft_size) * spectrum, s=fft_size)
        top, left = self.kernel.shape[-2] - 1, self.kernel.shape[-1] - 1  # where the convolution is whole
        return y[..., top : top + height, left : left + width].to(x.dtype)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        height, width = y.shape[-2:]
        rows, columns, spectrum, fft_size = _plan(self, (height, width), y.dtype, y.device)
        top, left = self.kernel.shape[-2] - 1, self.kernel.shape[-1] - 1
        placed = pad(y.to(spectrum.real.dtype), (left, 0, top, 0))
        padded = torch.fft.irfft2(torch.fft.rfft2(placed, s=fft_size) * spectrum.conj(), s=fft_size)
        padded = padded[..., : len(rows), : len(columns)]
        x = padded.new_zeros(*y.shape[:-2], height, len(columns)).index_add(-2, rows, padded)
        x = padded.new_zeros(*y.shape).index_add(-1, columns, x)
        return x.to(y.dtype)

    def estimate(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        return LinearOperator.estimate(self._quick(), y, sigma, size)

    def project(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        return LinearOperator.project(self._quick(), x, y, sigma)

    def unround(self, y: Tensor) -> Tensor:
        return smooth_bands(y)

    def _quick(self) -> "KernelBlur":
        """What a guess needs: stopping early regularises it as well."""
        return replace(self, cg_iterations=min(self.cg_iterations, 15))


class Plan(NamedTuple):
    """What a convolution of one size needs."""

    rows: Tensor  # of the reflected picture
    columns: Tensor
    spectrum: Tensor  # of the kernel, at the size of the FFT
    fft_size: Size


@lru_cache(maxsize=8)  # conjugate gradients ask again and again
def _plan(operator: KernelBlur, size: Size, dtype: torch.dtype, device: torch.device) -> Plan:
    sides, fft_sides = [], []
    with torch.inference_mode(False), torch.no_grad():
        for length, taps in zip(size, operator.kernel.shape[-2:], strict=True):
            # tap a takes pixel i − (a − taps//2), so the picture is needed from taps//2 − (taps − 1) on
            index = torch.arange(length + taps - 1, device=device) + taps // 2 - (taps - 1)
            sides.append(reflect(index, length))
            fft_sides.append(-(-(length + taps - 1) // 32) * 32)  # a length that FFTs are quick at
        work = torch.promote_types(dtype, torch.float32)  # no FFT in half precision
        spectrum = torch.fft.rfft2(operator.kernel.clone().to(work).to(device), s=fft_sides)
    return Plan(sides[0], sides[1], spectrum, (fft_sides[0], fft_sides[1]))


Blur = GaussianBlur | KernelBlur


def smooth_bands(y: Tensor) -> Tensor:
    """y with the bands gone that rounding to 8 bits leaves in a slow gradient, and deblurring turns into waves.

    Smoothing is taken where it changes nearly all pixels around by no more than half a level, as rounding did.
    """
    smooth = y
    for width, taps in ((2.0, 13), (5.0, 31)):
        blur = GaussianBlur(width, taps)
        wide = blur(y)
        kept = ((wide - y).abs() <= 1.02 * ROUNDING).to(y.dtype)
        trust = (20 * blur(kept) - 19).clamp(0, 1)
        smooth = smooth + trust * (wide - smooth)
    return smooth


def motion_kernel(length: float = 15, angle_degrees: float = 45) -> Tensor:
    """A straight line of `length` pixels, counter-clockwise from the x axis, one pixel thick, of sum 1."""
    if not (math.isfinite(length) and length >= 1 and math.isfinite(angle_degrees)):
        raise UserError(
            f"a motion of {length} pixels at {angle_degrees}° was asked for; expected at least 1 pixel"
        )
    half = math.ceil(length) // 2 + 1
    axis = torch.arange(-half, half + 1, dtype=torch.float64)
    angle = math.radians(angle_degrees)
    row, column = axis.view(-1, 1), axis.view(1, -1)
    along = column * math.cos(angle) - row * math.sin(angle)
    across = column * math.sin(angle) + row * math.cos(angle)
    # the share of each pixel that the line covers, as if pixels were cut along and across it
    kernel = (length / 2 + 0.5 - along.abs()).clamp(0, 1) * (1 - across.abs()).clamp(0, 1)
    return (kernel / kernel.sum()).float()


def disc_kernel(radius: float = 3) -> Tensor:
    """A disc, as a lens out of focus makes of a point, of sum 1."""
    if not (math.isfinite(radius) and radius > 0):
        raise UserError(f"a disc of radius {radius} was asked for; expected pixels, more than 0")
    half, parts = math.ceil(radius - 0.5), 16
    axis = (torch.arange((2 * half + 1) * parts, dtype=torch.float64) + 0.5) / parts - half - 0.5
    inside = (axis.view(-1, 1) ** 2 + axis**2 <= radius**2).double()
    kernel = inside.view(2 * half + 1, parts, 2 * half + 1, parts).mean((1, 3))  # the share of each pixel
    return (kernel / kernel.sum()).float()


def softened(kernel: Tensor, width: float) -> Tensor:
    """A kernel with an odd number of rows and columns, and a Gaussian of `width` pixels on top of it; of sum 1."""
    if not width:
        return kernel
    sides = []
    for taps in kernel.shape:
        half = taps // 2
        wider = half + math.ceil(4 * width)
        offset = torch.arange(-wider, wider + 1).view(-1, 1) - torch.arange(-half, half + 1)
        sides.append(torch.exp(-0.5 * (offset.double() / width) ** 2))
    soft = sides[0] @ kernel.double() @ sides[1].mT
    return (soft / soft.sum()).float()


def read_kernel(path: str | Path) -> Tensor:
    """A kernel (h, w) of sum 1 from a picture (its brightness) or a 2-D .npy array."""
    import numpy as np
    from PIL import Image

    path = Path(path)
    try:
        if path.suffix.lower() == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            with Image.open(path) as picture:
                values = np.asarray(picture if picture.mode in ("I;16", "I", "F") else picture.convert("L"))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"the kernel {path} cannot be read ({error}); give a picture or a 2-D .npy array"
        ) from error
    if values.ndim != 2 or values.dtype.kind not in "uif":
        raise UserError(
            f"the kernel {path} is {values.ndim}-D of {values.dtype}; expected a 2-D array of numbers"
        )
    kernel = torch.from_numpy(values.astype(np.float64))
    total = float(kernel.sum())
    if not math.isfinite(total) or total <= 0:
        raise UserError(f"the kernel {path} sums to {total}; expected finite numbers with a sum above 0")
    return (kernel / total).float()
