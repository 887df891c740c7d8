"""Blur with a Gaussian (separable) or with any kernel. The image is reflected at its border.

A photograph is not reflected: `ddc.operators.border` estimates what lies beyond its border.
"""

import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.errors import UserError
from ddc.formats import open_image
from ddc.operators.base import ROUNDING, LinearOperator, Operator, SeparableOperator, Sigma, Size, SVDOperator, Taps

SMALLEST_POWER = 0.01  # of a kernel's spectrum in its preconditioner: below, the border matters more than the kernel


class _Unrounding(Operator):
    """What all blurs share."""

    def unround(self, y: Tensor) -> Tensor:
        """Removes the bands that rounding to 8 bits leaves in slow gradients, and that deblurring turns into waves. It
        smooths y where that changes nearly all pixels around by no more than half a level, as rounding did."""
        smooth = y
        for blur in SMOOTHERS:
            wide = blur(y)
            kept = ((wide - y).abs() <= 1.02 * ROUNDING).to(y.dtype)
            trust = (20 * blur(kept) - 19).clamp(0, 1)
            smooth = smooth + trust * (wide - smooth)
        return smooth


class GaussianBlur(_Unrounding, SeparableOperator):
    """A Gaussian of standard deviation `sigma` pixels, cut to size × size taps; the paper uses 3.0 and 61."""

    settings = ("sigma", "size")

    def __init__(self, sigma: float = 3.0, size: int = 61) -> None:
        super().__init__()
        if not (math.isfinite(sigma) and sigma > 0):
            raise UserError(f"the sigma of a Gaussian blur is {sigma}; expected a number above 0, in pixels")
        if size < 1 or size % 2 == 0:
            raise UserError(f"the size of a Gaussian blur is {size}; expected an odd number of taps")
        self.sigma, self.size = sigma, size

    @property
    def batch_key(self) -> Hashable:
        return type(self)

    @classmethod
    def merge(cls, operators: Sequence[Self], device: torch.device) -> Operator:
        return operators[0] if len({one.key for one in operators}) == 1 else GaussianBlurs(operators)

    @property
    def weight(self) -> Tensor:
        """The taps of one side, in float64."""
        offset = torch.arange(self.size, dtype=torch.float64) - self.size // 2
        weight = torch.exp(-0.5 * (offset / self.sigma) ** 2)
        return weight / weight.sum()

    @property
    def kernel(self) -> Tensor:
        return torch.outer(self.weight, self.weight).float()

    def taps(self, length: int) -> Taps:
        index = torch.arange(length).unsqueeze(1) + torch.arange(self.size) - self.size // 2
        return reflect(index, length), self.weight.expand(length, -1)


class GaussianBlurs(_Unrounding, SVDOperator):
    """A Gaussian blur of its own width for each image of a batch."""

    by_frequency = True
    local = True

    def __init__(self, operators: Sequence[GaussianBlur]) -> None:
        super().__init__()
        self.operators = tuple(operators)  # not children: they are shared, and hold nothing but their caches

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (_stacked(one.matrix(n, x) for one in self.operators) for n in x.shape[-2:])
        return rows @ x @ columns.mT

    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        return _stacked(one.singular_values(size, x) for one in self.operators)

    def measured(self, size: Size, x: Tensor) -> Tensor:
        return _stacked(one.measured(size, x) for one in self.operators)

    def spectrum(self, size: Size, x: Tensor) -> Tensor:
        return self.operators[0].spectrum(size, x)

    def Vt(self, x: Tensor) -> Tensor:
        rows, columns = self._bases("v", x)
        return rows.mT @ x @ columns

    def V(self, c: Tensor) -> Tensor:
        rows, columns = self._bases("v", c)
        return rows @ c @ columns.mT

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        rows, columns = self._bases("u", y)
        return rows.mT @ y @ columns

    def U(self, c: Tensor) -> Tensor:
        rows, columns = self._bases("u", c)
        return rows @ c @ columns.mT

    def _bases(self, name: Literal["u", "v"], x: Tensor) -> list[Tensor]:
        return [_stacked(one.basis(name, n, x) for one in self.operators) for n in x.shape[-2:]]


def _stacked(matrices: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(matrices)).unsqueeze(1)  # (B, 1, m, n)


class KernelBlur(_Unrounding, LinearOperator):
    """Convolution with a kernel (h, w), or with one for each image (B, 1, h, w). Its centre is h//2, w//2."""

    kernel: Tensor
    local = True

    def __init__(self, kernel: Tensor, cg_iterations: int = 50) -> None:
        super().__init__()
        if kernel.ndim not in (2, 4) or (kernel.ndim == 4 and kernel.shape[1] != 1):
            raise UserError(f"a kernel has the shape {tuple(kernel.shape)}; expected (h, w) or (B, 1, h, w)")
        # a kernel on a GPU was made by the library: reading it would make the device wait
        if kernel.numel() == 0 or (not kernel.is_cuda and not bool(kernel.isfinite().all())):
            raise UserError("a blur kernel is empty or holds NaN or infinity; expected finite numbers")
        self.register_buffer("kernel", kernel, persistent=False)
        self.cg_iterations = cg_iterations
        self.guess_iterations = min(cg_iterations, 15)  # early stopping also regularises a guess

    @property
    def batch_key(self) -> Hashable:
        return type(self), self.kernel.shape[-2:]

    @classmethod
    def merge(cls, operators: Sequence[Self], device: torch.device) -> Operator:
        kernels = [one.kernel.reshape(1, 1, *one.kernel.shape[-2:]) for one in operators]
        return cls(torch.cat(kernels).to(device), operators[0].cg_iterations)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns, spectrum, fft_size = self._plan(x)
        padded = x.to(spectrum.real.dtype)[..., rows, :][..., columns]
        y = torch.fft.irfft2(torch.fft.rfft2(padded, s=fft_size) * spectrum, s=fft_size)
        top, left = self.kernel.shape[-2] - 1, self.kernel.shape[-1] - 1  # where the convolution is complete
        return y[..., top : len(rows), left : len(columns)].to(x.dtype)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        rows, columns, spectrum, fft_size = self._plan(y)
        top, left = self.kernel.shape[-2] - 1, self.kernel.shape[-1] - 1
        placed = pad(y.to(spectrum.real.dtype), (left, 0, top, 0))
        padded = torch.fft.irfft2(torch.fft.rfft2(placed, s=fft_size) * spectrum.conj(), s=fft_size)
        padded = padded[..., : len(rows), : len(columns)]
        x = padded.new_zeros(*y.shape[:-1], len(columns)).index_add(-2, rows, padded)
        return padded.new_zeros(y.shape).index_add(-1, columns, x).to(y.dtype)

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns `project` from x = 0, which the networks were trained with."""
        return self._towards(y, sigma, size)

    def preconditioner(self, size: Size, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Returns (AᵀA + εI)⁻¹ of a picture that goes on periodically, which differs at the border only."""
        if any(taps > length for taps, length in zip(self.kernel.shape[-2:], size, strict=True)):
            return None
        power = torch.fft.rfft2(self.kernel.clone().to(x), s=size).abs() ** 2
        return lambda r: torch.fft.irfft2(torch.fft.rfft2(r) / (power + SMALLEST_POWER), s=size)

    def _plan(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Size]:
        """Returns what a convolution of x needs: the rows and columns of the reflected image, the spectrum of the
        kernel and the size of the FFT."""

        def make() -> tuple[Tensor, Tensor, Tensor, Size]:
            height, width = (fast_length(x.shape[side] + self.kernel.shape[side] - 1) for side in (-2, -1))
            rows, columns = (
                # tap a reads pixel i − (a − taps//2), so the first pixel needed is taps//2 − (taps − 1)
                reflect(torch.arange(length + taps - 1, device=x.device) + taps // 2 - (taps - 1), length)
                for length, taps in zip(x.shape[-2:], self.kernel.shape[-2:], strict=True)
            )
            work = torch.promote_types(x.dtype, torch.float32)  # there is no FFT in half precision
            spectrum = torch.fft.rfft2(self.kernel.clone().to(work).to(x.device), s=(height, width))
            return rows, columns, spectrum, (height, width)

        return self.cached((x.shape[-2:], x.dtype, x.device), make)


Blur = GaussianBlur | KernelBlur
SMOOTHERS = (GaussianBlur(2.0, 13), GaussianBlur(5.0, 31))  # for `unround`


def reflect(index: Tensor, length: int) -> Tensor:
    """Whole-sample reflection: … 2 1 | 0 1 2 … The border pixel is not repeated."""
    period = max(2 * (length - 1), 1)
    folded = index % period
    return torch.minimum(folded, period - folded)


def fast_length(length: int) -> int:
    """Returns the next length for which FFTs are fast."""
    return -(-length // 32) * 32


def motion_kernel(length: float = 15, angle_degrees: float = 45) -> Tensor:
    """Returns a line of `length` pixels, one pixel thick, counter-clockwise from the x axis; its sum is 1."""
    if not (math.isfinite(length) and length >= 1 and math.isfinite(angle_degrees)):
        raise UserError(f"the motion blur has {length} pixels at {angle_degrees}°; expected at least 1 pixel")
    half, angle = math.ceil(length) // 2 + 1, math.radians(angle_degrees)
    column = torch.arange(-half, half + 1, dtype=torch.float64)
    row = column.view(-1, 1)
    along = column * math.cos(angle) - row * math.sin(angle)
    across = column * math.sin(angle) + row * math.cos(angle)
    # the share of each pixel that the line covers, as if pixels were cut along and across it
    kernel = (length / 2 + 0.5 - along.abs()).clamp(0, 1) * (1 - across.abs()).clamp(0, 1)
    return (kernel / kernel.sum()).float()


def disc_kernel(radius: float = 3) -> Tensor:
    """Returns a disc, the image of a point by a lens out of focus; its sum is 1."""
    if not (math.isfinite(radius) and radius > 0):
        raise UserError(f"the disc has a radius of {radius} pixels; expected a number above 0")
    half, parts = math.ceil(radius - 0.5), 16
    axis = (torch.arange((2 * half + 1) * parts, dtype=torch.float64) + 0.5) / parts - half - 0.5
    inside = (axis.view(-1, 1) ** 2 + axis**2 <= radius**2).double()
    kernel = inside.view(2 * half + 1, parts, 2 * half + 1, parts).mean((1, 3))  # the share of each pixel
    return (kernel / kernel.sum()).float()


def gaussian_kernel(along: float, across: float, angle_degrees: float = 0) -> Tensor:
    """Returns a Gaussian of two widths, the first at an angle counter-clockwise from the x axis; its sum is 1."""
    half, angle = math.ceil(4 * max(along, across)), math.radians(angle_degrees)
    column = torch.arange(-half, half + 1, dtype=torch.float64)
    row = column.view(-1, 1)
    u = (column * math.cos(angle) - row * math.sin(angle)) / along
    v = (column * math.sin(angle) + row * math.cos(angle)) / across
    kernel = torch.exp(-0.5 * (u**2 + v**2))
    return (kernel / kernel.sum()).float()


def coded_kernel(cells: int = 7, seed: int = 0) -> Tensor:
    """Returns a coded aperture: a square of cells that are open or closed at random; its sum is 1."""
    kernel = (torch.rand(cells, cells, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
    kernel[cells // 2, cells // 2] = 1
    return kernel / kernel.sum()


def levin_kernel(number: int) -> Tensor:
    """Returns one of the eight kernels of Levin et al. (2009), from the file that the variable DDC_LEVIN09 names."""
    path = os.environ.get("DDC_LEVIN09")
    if not path:
        raise UserError(
            "Levin's kernels are in a file of its authors; name it (Levin09.mat) in the variable DDC_LEVIN09"
        )
    try:
        values = np.asarray(_levin_kernels(path)[number - 1], dtype=np.float64)
    except ImportError:
        raise UserError(f"{path} is in MATLAB's newer format, which needs h5py: pip install h5py") from None
    except Exception as error:  # a damaged file can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"Levin's kernels cannot be read from {path} ({reason}); expected Levin09.mat") from None
    kernel = torch.from_numpy(values)
    if kernel.ndim != 2 or not bool(kernel.isfinite().all()) or not float(kernel.sum()) > 0:
        raise UserError(f"{path} holds no kernel {number}; expected eight of them, as in Levin09.mat")
    return (kernel / kernel.sum()).float()


def _levin_kernels(path: str) -> Any:
    from scipy.io import loadmat

    try:
        return loadmat(path)["kernels"].ravel()
    except NotImplementedError:  # MATLAB's newer format is HDF5, with columns first
        import h5py  # type: ignore[import-not-found, unused-ignore]

        with h5py.File(path) as file:
            return [np.asarray(file[name]).T for name in file["kernels"][:].ravel()]


def softened(kernel: Tensor, width: float) -> Tensor:
    """Returns a kernel of odd height and width convolved with a Gaussian of `width` pixels; its sum is 1."""
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
    """Reads a kernel (h, w) from the brightness of an image file or a 2-D .npy array, and scales its sum to 1."""
    path = Path(path)
    try:
        if path.suffix.lower() == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            with open_image(path) as picture:
                values = np.asarray(picture if picture.mode in ("I;16", "I", "F") else picture.convert("L"))
    except Exception as error:  # decoders raise nearly everything for a damaged file
        raise UserError(f"the kernel {path} cannot be read ({error}); give an image or a 2-D .npy array") from error
    if values.ndim != 2 or values.dtype.kind not in "uif":
        raise UserError(f"the kernel {path} is {values.ndim}-D of {values.dtype}; expected a 2-D array of numbers")
    kernel = torch.from_numpy(values.astype(np.float64))
    total = float(kernel.sum())
    if not math.isfinite(total) or total <= 0:
        raise UserError(f"the kernel {path} sums to {total}; expected finite numbers with a sum above 0")
    return (kernel / total).float()
