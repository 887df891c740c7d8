"""What a picture tells of its own noise and blur."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT, Picture, to_internal, unit_float
from ddc.operators.base import Operator
from ddc.operators.blur import disc_kernel
from ddc.problems import Problem, misfit, task_operator

RINGS = 120  # of equal frequency, to a cycle per pixel
# To believe in a disc and not in a Gaussian alone: what it gains in log-likelihood, at least, and as a share of what it
# leaves unexplained (where the law of photographs holds badly, differences mean little)
LEAST_GAIN, LEAST_SHARE = 25.0, 0.4

Array = np.ndarray[Any, np.dtype[np.float64]]


def estimate_sigma(picture: Picture) -> float:
    """σ_y of a picture's noise, in [0, 1] units: Donoho and Johnstone's median of the finest diagonal detail.

    Blocks that touch black, white or a transparent pixel are left out, for their noise is cut off. The
    detail of the picture itself counts as noise, so that a noiseless photograph reads some thousandths.
    """
    height, width = picture.size
    rows = slice(max(0, height // 2 - 512), height // 2 + 513)  # the middle is enough
    columns = slice(max(0, width // 2 - 512), width // 2 + 513)
    pixels = unit_float(picture.pixels[rows, columns, : 1 if picture.grey else 3])
    usable = (pixels > 0.002) & (pixels < 0.998)
    if picture.mask is not None:
        usable &= picture.mask[0].numpy()[rows, columns, None] > 0
    detail, whole = pixels, usable
    for _ in range(2):  # 1 −2 1 down the rows, then along them: zero on every plane
        detail = ((detail[2:] - 2 * detail[1:-1] + detail[:-2]) / np.float32(6**0.5)).swapaxes(0, 1)
        whole = (whole[2:] & whole[1:-1] & whole[:-2]).swapaxes(0, 1)
    samples = np.abs(detail[whole])
    if samples.size < 200:
        raise UserError(
            "too few pixels are known to estimate the noise; give it as a number, as in --sigma 0.05"
        )
    return float(np.median(samples) / 0.6745)


class BlurEstimate(NamedTuple):
    """A disc, as a lens out of focus makes of a point, and a Gaussian on top of it; 0 is none of it."""

    radius: float
    width: float

    @property
    def spread(self) -> float:
        """The standard deviation along each side, in pixels."""
        return (self.width**2 + self.radius**2 / 4) ** 0.5

    @property
    def task(self) -> str:
        """The task that undoes it."""
        if not self.radius:
            return f"gauss{self.width:g}"
        return f"disc{self.radius:g}" + (f"+gauss{self.width:g}" if self.width else "")


def estimate_blur(picture: Picture, sigma: float) -> BlurEstimate:
    """The blur of a picture, told by its spectrum; σ_y is its noise.

    The power of a photograph's frequencies ω falls as ω^−b, with b about 2.4; a Gaussian of width s multiplies it by
    exp(−s²ω²), a disc by its own spectrum with its dark rings, and noise adds the same to all. Whittle's likelihood
    says which it is. Of 40 photographs of 208×208 pixels, blurred whole and saved in 8 bits, the middle half of
    Gaussians of 1 to 3 pixels and nine in ten discs of 2 to 9 are estimated within 0.1 pixels. A picture that is sky
    for the most part reads too little, for rounding is no even noise there.
    """
    height, width = picture.size
    rows = slice(max(0, height // 2 - 256), height // 2 + 256)  # the middle is enough
    columns = slice(max(0, width // 2 - 256), width // 2 + 256)
    grey = unit_float(picture.pixels[rows, columns]).mean(2, dtype=np.float64)
    if min(grey.shape) < 48:
        raise UserError(
            f"a picture of {width}×{height} pixels is too small to estimate its blur; name it, as in gauss1.5"
        )
    fade = np.hanning(grey.shape[0] + 2)[1:-1, None] * np.hanning(grey.shape[1] + 2)[1:-1]
    faded = (grey - np.average(grey, weights=fade)) * fade
    rings = mean_over_rings(np.abs(np.fft.rfft2(faded)) ** 2 / (fade**2).sum(), grey.shape[1])
    known = rings.size > 0
    power, omega = rings.power[known], 2 * np.pi * rings.frequency[known]
    weight = np.minimum(rings.size[known], 200)  # many frequencies are no better known than the law holds
    noise = max(sigma, ROUNDING_8_BIT / 1.5) ** 2 / (1 if picture.grey else 3)

    def best(radii: Iterable[float], widths: Iterable[float], fineness: float) -> tuple[float, BlurEstimate]:
        slope = np.arange(1.6, 3.61, 0.1 * fineness)[:, None, None]
        photograph = (
            np.exp(np.arange(-16, 3, 0.1 * fineness))[:, None] * omega**-slope
        )  # slopes, amplitudes, rings
        improbable = 10 * ((slope[..., 0] - 2.4) / 0.35) ** 2

        def misfit(blur: BlurEstimate) -> float:
            passed = np.exp(-((blur.width * omega) ** 2)) * disc_power(blur.radius)[known]
            expected = photograph * passed + noise
            return float(((weight * (np.log(expected) + power / expected)).sum(2) + improbable).min())

        blurs = [
            BlurEstimate(round(float(radius), 2), round(float(width), 1))
            for radius, width in product(radii, widths)
        ]
        return min((misfit(blur), blur) for blur in blurs)

    gaussian, soft = best([0], np.arange(0, 6.01, 0.1), 1)
    _, near = best(np.arange(1.5, 12.01, 0.25), (0, 0.4, 0.8, 1.2), 4)  # smaller discs look like Gaussians
    radii = np.arange(max(near.radius - 0.2, 1.5), near.radius + 0.21, 0.05)
    widths = np.arange(max(near.width - 0.3, 0), near.width + 0.31, 0.1)
    disc, focus = best(radii, widths, 1)
    unexplained = disc - float((weight * (np.log(np.maximum(power, 1e-20)) + 1)).sum())
    if gaussian - disc < max(LEAST_GAIN, LEAST_SHARE * unexplained):
        return soft
    # a lattice in a picture has dark rings, too, but cannot have been blurred so
    return focus if is_possible(picture, task_operator(focus.task), sigma) else soft


def is_possible(picture: Picture, operator: Operator, sigma: float) -> bool:
    """Whether a picture can have been blurred by the operator, with noise σ_y, as far as its middle tells."""
    side = 256
    top, left = (max(0, (length - side) // 2) for length in picture.size)
    y = to_internal(picture.window(top, left, side, side))[None]
    sigma = max(sigma, ROUNDING_8_BIT)
    limit = 0.006 + 1.4 * sigma  # of photographs blurred as said, in 8 bits or as JPEG, few come near it
    return misfit(y, Problem(operator, sigma)) <= limit


class Rings(NamedTuple):
    """Means over rings of equal frequency."""

    power: Array
    frequency: Array  # cycles per pixel
    size: Array  # how many frequencies are in the ring; 0 where there is none


def mean_over_rings(power: Array, width: int) -> Rings:
    """Of a spectrum as `rfft2` makes it of pictures of this width, from 0.02 cycles per pixel on."""
    frequency = np.hypot(np.fft.fftfreq(power.shape[0])[:, None], np.fft.rfftfreq(width))
    used = (frequency >= 0.02) & (frequency <= 0.5)
    ring = (RINGS * frequency[used]).astype(int)
    count = np.bincount(ring, minlength=RINGS // 2 + 1)
    power, frequency = (
        np.bincount(ring, values[used], minlength=len(count)) / np.maximum(count, 1)
        for values in (power, frequency)
    )
    return Rings(power, frequency, count.astype(np.float64))


@lru_cache(maxsize=256)
def disc_power(radius: float) -> Array:
    """What a disc leaves of each ring's power; radius 0 leaves all."""
    if not radius:
        return np.ones(RINGS // 2 + 1)
    side = 2 * RINGS
    return mean_over_rings(np.abs(np.fft.rfft2(disc_kernel(radius).numpy(), (side, side))) ** 2, side).power
