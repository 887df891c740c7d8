"""Reading and writing pictures; the only place that knows uint8, [0, 1], [-1, 1] and σ units."""

from typing import TypeVar

from torch import Tensor

Number = TypeVar("Number", float, Tensor)


def internal_sigma(sigma_y: Number) -> Number:
    """σ_y of [0, 1] pictures → σ of the [-1, 1] pictures that everything inside works on."""
    return 2 * sigma_y


def to_internal(x: Tensor) -> Tensor:
    """[0, 1] → [-1, 1]."""
    return 2 * x - 1


def to_unit(x: Tensor) -> Tensor:
    """[-1, 1] → [0, 1], clipped."""
    return ((x + 1) / 2).clamp(0, 1)
