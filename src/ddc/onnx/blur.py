"""Blurs by matrix products and sums, because ONNX runtimes in browsers have no Fourier transform and no SVD."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ddc.images import to_internal, to_unit
from ddc.operators.base import Sigma, Size, SVDOperator, conjugate_gradient, spread_of_photographs
from ddc.operators.blur import GaussianBlur, KernelBlur, fast_length, reflect
from ddc.operators.border import FINEST, ITERATIONS

KERNEL = 33  # taps of the kernel that a blur takes; smaller ones are padded with zeros
PART = 48  # terms of a sum
BEYOND = 64  # pixels of the scene that lie beyond a picture, on both sides together


class Filter(NamedTuple):
    """A convolution of Hartley coefficients c: four products, with c and its mirrors along rows and columns."""

    even: Tensor  # along both sides
    odd_rows: Tensor
    odd_columns: Tensor
    odd: Tensor  # along both sides

    @classmethod
    def of_kernel(cls, kernel: Tensor, length: int) -> Self:
        """The filter of a kernel (h, w) with its centre in the middle, for coefficients (length, length)."""
        sides = [_angles(length, torch.arange(taps) - taps // 2) for taps in kernel.shape]
        (rows_cos, rows_sin), (cos, sin) = ((angle.cos().float(), angle.sin().float()) for angle in sides)
        return cls(
            rows_cos @ kernel @ cos.mT,
            rows_sin @ kernel @ cos.mT,
            rows_cos @ kernel @ sin.mT,
            rows_sin @ kernel @ sin.mT,
        )

    @classmethod
    def of_spectrum(cls, real: Tensor, imaginary: Tensor) -> Self:
        """The filter that multiplies the Fourier transform by this spectrum."""
        turned, back = _mirrored(real, -1), _mirrored(imaginary, -1)
        return cls((real + turned) / 2, (imaginary + back) / -2, (back - imaginary) / 2, (turned - real) / 2)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """The real and the imaginary part of the Fourier transform."""
        return self.even - self.odd, -(self.odd_rows + self.odd_columns)

    def adjoint(self) -> "Filter":
        return Filter(self.even, -self.odd_rows, -self.odd_columns, self.odd)

    def __call__(self, c: Tensor) -> Tensor:
        turned = _mirrored(c, -1)
        return self.even * c + self.odd_columns * turned - _mirrored(self.odd_rows * c + self.odd * turned, -2)


class SymmetricFilter(NamedTuple):
    """As `Filter`, with a real spectrum."""

    even: Tensor
    odd: Tensor

    @classmethod
    def of_spectrum(cls, real: Tensor) -> Self:
        turned = _mirrored(real, -1)
        return cls((real + turned) / 2, (turned - real) / 2)

    def __call__(self, c: Tensor) -> Tensor:
        return self.even * c + self.odd * _mirrored(_mirrored(c, -1), -2)


def hartley(length: int) -> Tensor:
    """The Hartley transform, a matrix that is symmetric, orthogonal and real, in float64."""
    angle = _angles(length, torch.arange(length))
    return (angle.cos() + angle.sin()) / math.sqrt(length)


def _angles(length: int, places: Tensor) -> Tensor:
    return 2 * math.pi * (torch.arange(length)[:, None] * places % length).double() / length


def _mirrored(c: Tensor, dim: int) -> Tensor:
    """The coefficients of −f in the place of those of f."""
    return c.index_select(dim, -torch.arange(c.shape[dim]) % c.shape[dim])


def _along_both(matrix: Tensor, x: Tensor) -> Tensor:
    """M x Mᵀ. Long sums are added in parts, because conjugate gradients amplify their rounding errors."""
    parts = [slice(start, start + PART) for start in range(0, matrix.shape[1], PART)]
    rows = _total([matrix[:, part] @ x[..., part, :] for part in parts])
    return _total([rows[..., part] @ matrix[:, part].mT for part in parts])


def _total(terms: list[Tensor]) -> Tensor:
    while len(terms) > 1:
        terms = [sum(terms[first + 1 : first + 2], terms[first]) for first in range(0, len(terms), 2)]
    return terms[0]


class MatrixBlur(KernelBlur):
    """KernelBlur with Hartley transforms, which are matrix products, in place of FFTs."""

    def __init__(self, kernel: Tensor, side: int) -> None:
        nn.Module.__init__(self)
        self.kernel, self.cg_iterations, self.guess_iterations = kernel, 50, 15
        length, around = side + KERNEL - 1, KERNEL // 2
        transform = hartley(length)
        reflected = torch.eye(side, dtype=torch.float64)[reflect(torch.arange(length) - around, side)]
        self.reflected = (transform @ reflected).float()
        self.inside = transform[:, around : around + side].float()
        self.filter = Filter.of_kernel(kernel, length)

    def forward(self, x: Tensor) -> Tensor:
        return _along_both(self.inside.mT, self.filter(_along_both(self.reflected, x)))

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return _along_both(self.reflected.mT, self.filter.adjoint()(_along_both(self.inside, y)))

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        return x  # pictures of 8 bits are not exact


class BasisBlur(SVDOperator):
    """A blur that is the same along both sides, of square images: u diag(s) vᵀ on each side, s from large to small."""

    by_frequency = True

    def __init__(self, u: Tensor, s: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u, self.s, self.v = u, s, v

    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        return self.s[:, None] * self.s

    def Vt(self, x: Tensor) -> Tensor:
        return self.v.mT @ x @ self.v

    def V(self, c: Tensor) -> Tensor:
        return self.v @ c @ self.v.mT

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self.u.mT @ y @ self.u

    def U(self, c: Tensor) -> Tensor:
        return self.u @ c @ self.u.mT

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        return x  # as in MatrixBlur


def singular_vectors(blur: GaussianBlur, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """u, s and v of a blur on one side of a picture."""
    u, s, vt = torch.linalg.svd(blur.matrix(side, torch.zeros(0, dtype=torch.float64)))
    return u.float(), s.float(), vt.mT.float().contiguous()


class Border(nn.Module):
    """Of a blurred photograph, what the operator would have measured of it: see `ddc.operators.border`.

    `forward(y, sigma, kernel, rows, columns)` → y for a blur that reflects the picture at its border, all in [0, 1]. Rows and
    columns are 1 inside the photograph, and 0 where y is larger. Rounding to 8 bits is smoothed away.
    """

    names = ("y", "sigma", "kernel", "rows", "columns")

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side, self.length = side, fast_length(side + BEYOND)
        self.inside = hartley(self.length)[:, :side].float()
        place = torch.arange(self.length)
        frequency = torch.minimum(place, self.length - place).double() / self.length
        self.spread = spread_of_photographs(512 * (frequency[:, None] ** 2 + frequency**2).sqrt()).float()

    def forward(self, y: Tensor, sigma: Tensor, kernel: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        known = rows[:, None] * columns
        y = to_internal(y)
        operator = MatrixBlur(kernel, self.side)
        y = operator.unround(y)
        mean = (known * y).sum((-2, -1), keepdim=True) / known.sum()
        noise = torch.clamp(2 * sigma.view(1, 1), min=FINEST)
        scene, blurred = self.scene(known * (y - mean), noise, Filter.of_kernel(kernel, self.length), rows, columns)
        guess, explained = (self.inside.mT @ part @ self.inside + mean for part in (scene, blurred))
        return to_unit(operator(guess) + known * (y - explained), clip=False)

    def scene(self, y: Tensor, sigma: Tensor, blur: Filter, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients of the most probable scene, and of its blur, as in `extrapolate_border`."""
        above, beside = ((self.inside * side) @ self.inside.mT for side in (rows, columns))
        measured = self.inside @ y @ self.inside.mT
        real, imaginary = blur.spectrum()
        power = (real**2 + imaginary**2) * self.spread**2
        d, before = torch.zeros_like(measured), torch.ones_like(power)
        for coarseness in (10, 3, 1):
            noise = coarseness * sigma
            squared = 1 / (1 + power / noise**2)
            scale = squared.sqrt()
            weight = self.spread * scale / noise
            explain, damp = Filter.of_spectrum(real * weight, imaginary * weight), SymmetricFilter.of_spectrum(squared)

            def apply(d: Tensor, explain: Filter = explain, damp: SymmetricFilter = damp) -> Tensor:
                return damp(d) + explain.adjoint()(above @ explain(d) @ beside)

            start = SymmetricFilter.of_spectrum(before / scale)(d)
            d = conjugate_gradient(apply, explain.adjoint()(measured) / noise, start, ITERATIONS)
            before = scale
        scene = self.spread * SymmetricFilter.of_spectrum(before)(d)
        return scene, blur(scene)

    def arguments(self, picture: Tensor, sigma: float) -> dict[str, Tensor]:
        """The inputs, by their names, for a clean picture (1, 3, side, side)."""
        kernel, inside = GaussianBlur(1.5, KERNEL).kernel, torch.ones(self.side)
        wider = pad(picture, [8] * 4, mode="reflect").roll(3, -1)
        y = KernelBlur(kernel)(wider)[..., 8:-8, 8:-8]
        return dict(zip(self.names, (y, torch.tensor([sigma]), kernel, inside, inside.clone()), strict=True))
