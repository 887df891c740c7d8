"""Operators that work on rows and columns by themselves: y = L x Rᵀ, with L and R sparse.

A 1-D operator is given by its taps. Measuring uses blocks of a banded matrix, so that a large picture costs
little; the SVD of the small dense matrix of each side is made only when a solver asks for it.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.operators.base import Size, SVDOperator

BLOCK = 256  # rows of a block: small enough to skip the zeros of a large picture, large enough for one matmul


class Taps(NamedTuple):
    """Row i of the matrix is Σ_k weight[i, k] · e[column[i, k]]; columns may repeat."""

    column: Tensor  # (m, k) int64
    weight: Tensor  # (m, k) float64


class Block(NamedTuple):
    """Rows `top` to `bottom` of a matrix, which are zero outside the columns `left` to `right`."""

    top: int
    bottom: int
    left: int
    right: int
    values: Tensor


class Factors(NamedTuple):
    """A = u diag(s) vᵀ with u (m, m), s (m), v (n, n): the last n − m columns of v span the null space."""

    u: Tensor
    s: Tensor
    v: Tensor


def symmetric(index: Tensor, length: int) -> Tensor:
    """Half-sample symmetry: … 1 0 | 0 1 2 … The border pixel is repeated."""
    folded = index % (2 * length)
    return torch.minimum(folded, 2 * length - 1 - folded)


def reflect(index: Tensor, length: int) -> Tensor:
    """Whole-sample reflection: … 2 1 | 0 1 2 … The border pixel is not repeated."""
    period = max(2 * (length - 1), 1)
    folded = index % period
    return torch.minimum(folded, period - folded)


class SeparableOperator(SVDOperator):
    """y = L x Rᵀ. A subclass is a frozen dataclass and gives `taps`, with every column inside the picture."""

    by_frequency = True  # singular values fall with frequency, and are sorted

    @abstractmethod
    def taps(self, length: int) -> Taps:
        """The 1-D operator on `length` pixels, of ceil(length / scale) rows."""

    def __call__(self, x: Tensor) -> Tensor:
        return _along_both(x, self._measure)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        height, width = size or self.image_size(y)
        with torch.autocast(y.device.type, enabled=False):
            x = self._spread(y, height)
            return self._spread(x.mT, width).mT

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        """y repeated (nearest) to image size."""
        if self.scale == 1:
            return y
        height, width = size or self.image_size(y)
        large = y.repeat_interleave(self.scale, dim=-2).repeat_interleave(self.scale, dim=-1)
        return large[..., :height, :width]

    def singular_values(self, size: Size, like: Tensor) -> Tensor:
        return _singular_values(self, size, like.dtype, like.device)

    def Vt(self, x: Tensor) -> Tensor:
        return _along_both(x, lambda side: self._factors(side.shape[-2], side).v.mT @ side)

    def V(self, c: Tensor) -> Tensor:
        return _along_both(c, lambda side: self._factors(side.shape[-2], side).v @ side)

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        height, width = size or self.image_size(y)
        left, right = self._factors(height, y).u, self._factors(width, y).u
        with torch.autocast(y.device.type, enabled=False):
            c = left.mT @ y @ right
        return pad(c, (0, width - c.shape[-1], 0, height - c.shape[-2]))

    def U(self, c: Tensor) -> Tensor:
        left, right = (self._factors(length, c).u for length in c.shape[-2:])
        with torch.autocast(c.device.type, enabled=False):
            return left @ c[..., : left.shape[0], : right.shape[0]] @ right.mT

    def _factors(self, length: int, like: Tensor) -> Factors:
        return _cast_factors(self, length, like.dtype, like.device)

    def _measure(self, x: Tensor) -> Tensor:
        blocks = _blocks(self, x.shape[-2], x.dtype, x.device)
        parts = [block.values @ x[..., block.left : block.right, :] for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def _spread(self, y: Tensor, length: int) -> Tensor:
        x = y.new_zeros(*y.shape[:-2], length, y.shape[-1])
        for block in _blocks(self, length, y.dtype, y.device):
            part = block.values.mT @ y[..., block.top : block.bottom, :]
            x = x + pad(part, (0, 0, block.left, length - block.right))
        return x


def _along_both(x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """`apply` works on dimension −2: use it on the columns of x, then on the rows. Full precision always."""
    with torch.autocast(x.device.type, enabled=False):
        return apply(apply(x).mT).mT


# What is cached is made outside inference mode: a later run may want gradients through it.


@lru_cache(maxsize=16)
def _factors64(operator: SeparableOperator, length: int) -> Factors:
    with torch.inference_mode(False):
        column, weight = operator.taps(length)
        matrix = torch.zeros(column.shape[0], length, dtype=torch.float64)
        matrix.scatter_add_(1, column, weight)
        u, s, vt = torch.linalg.svd(matrix, full_matrices=True)
        return Factors(u, s, vt.mT.contiguous())


@lru_cache(maxsize=64)
def _cast_factors(
    operator: SeparableOperator, length: int, dtype: torch.dtype, device: torch.device
) -> Factors:
    with torch.inference_mode(False):
        return Factors(*(part.to(dtype).to(device) for part in _factors64(operator, length)))


@lru_cache(maxsize=64)
def _singular_values(
    operator: SeparableOperator, size: Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(H, W): the outer product of both sides' values, zero on the null space."""
    with torch.inference_mode(False):
        height, width = size
        outer = torch.outer(_factors64(operator, height).s, _factors64(operator, width).s)
        outer = pad(outer, (0, width - outer.shape[1], 0, height - outer.shape[0]))
        return outer.to(dtype).to(device)


@lru_cache(maxsize=64)
def _blocks(
    operator: SeparableOperator, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Block, ...]:
    blocks = []
    with torch.inference_mode(False):
        column, weight = operator.taps(length)
        for top in range(0, column.shape[0], BLOCK):
            columns, values = column[top : top + BLOCK], weight[top : top + BLOCK]
            left, right = int(columns.min()), int(columns.max()) + 1
            band = torch.zeros(columns.shape[0], right - left, dtype=torch.float64)
            band.scatter_add_(1, columns - left, values)
            blocks.append(Block(top, top + columns.shape[0], left, right, band.to(dtype).to(device)))
    return tuple(blocks)
