"""Photographs as a Gaussian: the likeliest one for a linear measurement, whatever its operator is.

The cosine coefficients of luma and of two chromas count as independent, with the spreads of photographs. Luma is the mean of
red, green and blue here, up to a factor; chroma is weaker, above all in fine detail. From this follow colours for a mosaic and
a picture for a few random projections.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from ddc.operators.base import (
    LinearOperator,
    Operator,
    Sigma,
    Size,
    conjugate_gradient,
    like,
    natural_spectrum,
    remember,
)

LUMA_AND_CHROMA = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))
# the spread of each chroma relative to luma, and the frequency at which half of that is left, in half periods per 256
# pixels; with that of luma, within a quarter of 173 photographs up to a frequency of 200
CHROMA = ((0.24, 90.0), (0.12, 110.0))
LEAST_NOISE = 0.04  # of y, with which conjugate gradients converge in `ITERATIONS`; a projection adds the rest
ALIASING = 0.1  # the error in a frequency that the others leave; without it they would converge slowly
ITERATIONS = 25
BLOCK = 8  # frequencies along a side over which `gain` is a mean
NEAR = 16  # pixels to each side that are near
FAR_SHARE = 0.25  # of the energy of AᵀA's response to a pixel, from which on it is far
EVEN_BLOCK, UNEVEN = 32, 0.25  # frequencies along a side, and how much the gain may vary between such blocks

_BASES: dict[object, Tensor] = {}


def likeliest(operator: LinearOperator, y: Tensor, sigma: Sigma, size: Size) -> Tensor:
    """Returns argmin ‖A x − y‖² / σ² + xᵀS⁻¹x, with S the covariance of photographs. Conjugate gradients find z = S^(−1/2) x,
    preconditioned by what A measures of each frequency."""
    work = torch.promote_types(y.dtype, torch.float32)
    with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
        start = operator.adjoint(y.to(work), size)
        spread = operator.cached_like(start, ("photographs", start.shape[1:]), lambda: spreads(start.shape[1], size))
        noise = torch.as_tensor(sigma, device=y.device).to(work).clamp(min=LEAST_NOISE) ** 2

        def normal(z: Tensor) -> Tensor:
            seen = operator.adjoint(operator(picture_of(spread * z)), size)
            return spread * coefficients_of(seen) + noise * z

        usual = 1 / (gain(operator, start) * spread**2 + noise.clamp(min=ALIASING**2))
        b = spread * coefficients_of(start)
        z = conjugate_gradient(normal, b, torch.zeros_like(b), ITERATIONS, 1e-4, lambda r: usual * r)
        return picture_of(spread * z).to(y.dtype)


def gain(operator: LinearOperator, x: Tensor) -> Tensor:
    """Returns what AᵀA leaves of each coefficient of pictures shaped like x: the mean over blocks of frequencies, measured
    with random signs. For a single x it is that of each picture, if A has an operator for each."""

    def make() -> Tensor:
        signs = random_signs(x, 0)
        seen = signs * coefficients_of(operator.adjoint(operator(picture_of(signs)), size))
        means = avg_pool2d(seen if len(x) == 1 else seen.mean(0, keepdim=True), BLOCK, ceil_mode=True)
        return interpolate(means, size=size, mode="nearest").clamp(min=0)

    size = (x.shape[-2], x.shape[-1])
    return operator.cached(("gain", x.shape, x.dtype, x.device), make)


def random_signs(x: Tensor, seed: int) -> Tensor:
    """Returns 1 or −1 at random for each number of x; the same for all devices."""
    generator = torch.Generator().manual_seed(seed)
    return like(torch.randint(2, x.shape, generator=generator) * 2.0 - 1, x)


def spreads(channels: int, size: Size) -> Tensor:
    """Returns the spread of each coefficient, (channels, H, W) float64; without colours all channels are alike."""
    grey = natural_spectrum(size)
    if channels != len(LUMA_AND_CHROMA):
        return grey.expand(channels, -1, -1)
    rows, columns = (torch.arange(length, dtype=torch.float64) * (256 / length) for length in size)
    q = (rows[:, None] ** 2 + columns**2).sqrt()
    luma = math.sqrt(channels) * grey
    return torch.stack([luma, *(luma * share / (1 + (q / half) ** 2) for share, half in CHROMA)])


def coefficients_of(x: Tensor) -> Tensor:
    """Returns the cosine coefficients of luma and chroma, an orthonormal transform."""
    height, width = x.shape[-2:]
    return to_luma_and_chroma(_cosines(height, x) @ x @ _cosines(width, x).mT)


def picture_of(c: Tensor) -> Tensor:
    """Returns the picture with these coefficients."""
    height, width = c.shape[-2:]
    return from_luma_and_chroma(_cosines(height, c).mT @ c @ _cosines(width, c))


def to_luma_and_chroma(x: Tensor) -> Tensor:
    """Returns luma and two chromas, an orthonormal mixture of three channels; other numbers of them are kept."""
    return torch.einsum("oc,bchw->bohw", _colours(x), x) if x.shape[1] == len(LUMA_AND_CHROMA) else x


def from_luma_and_chroma(x: Tensor) -> Tensor:
    """Returns red, green and blue."""
    return torch.einsum("oc,bohw->bchw", _colours(x), x) if x.shape[1] == len(LUMA_AND_CHROMA) else x


def _colours(x: Tensor) -> Tensor:
    def make() -> Tensor:
        basis = torch.tensor(LUMA_AND_CHROMA, dtype=torch.float64)
        return like(basis / basis.norm(dim=1, keepdim=True), x)

    return remember(_BASES, ("colours", x.dtype, x.device), make, 32)


def _cosines(length: int, x: Tensor) -> Tensor:
    """Returns the orthonormal cosine transform (DCT-II) of a line of pixels, a matrix."""

    def make() -> Tensor:
        k = torch.arange(length, dtype=torch.float64)
        matrix = torch.cos(math.pi / length * (k + 0.5) * k[:, None]) * math.sqrt(2 / length)
        matrix[0] /= math.sqrt(2)
        return like(matrix, x)

    return remember(_BASES, (length, x.dtype, x.device), make, 32)


def mixes(operator: LinearOperator, x: Tensor) -> bool:
    """Whether A mixes distant pixels of pictures shaped like x evenly, as random projections do: AᵀA spreads a pixel over the
    picture, and leaves as much of each frequency as of the others."""
    if not is_far(operator, x):
        return False
    kept = avg_pool2d(gain(operator, x[:1]).mean(1, keepdim=True), EVEN_BLOCK)
    return bool(kept.std() < UNEVEN * kept.mean())


def is_far(operator: LinearOperator, x: Tensor) -> bool:
    """Whether AᵀA spreads a pixel of pictures shaped like x over the picture."""
    if operator.local or min(x.shape[-2:]) <= 2 * NEAR:
        return False

    def make() -> bool:
        top, left = (side // 2 for side in x.shape[-2:])
        point = torch.zeros_like(x[:1])
        point[..., top, left] = 1
        energy = operator.adjoint(operator(point), (x.shape[-2], x.shape[-1])).square()
        near = energy[..., top - NEAR : top + NEAR + 1, left - NEAR : left + NEAR + 1].sum()
        return bool(near < (1 - FAR_SHARE) * energy.sum())

    return operator.cached(("far", x.shape[1:]), make)


def blank(operator: Operator, size: Size) -> Tensor:
    """Returns a picture of zeros, on the operator's device."""
    device = next((one.device for one in operator.buffers()), torch.device("cpu"))
    return torch.zeros(1, 3, *size, device=device)


def far_and_unmixed(operator: Operator, size: Size, unmixing: bool) -> bool:
    """Whether A mixes distant pixels of pictures with measurements of this size; evenly does not count if the solver can
    undo that."""
    if not isinstance(operator, LinearOperator) or operator.local:
        return False
    size = getattr(operator, "size", None) or operator.image_size(torch.empty(1, 1, *size, device="meta"))
    x = blank(operator, size)
    return is_far(operator, x) and not (unmixing and mixes(operator, x))
