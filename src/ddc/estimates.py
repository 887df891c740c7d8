"""What a picture tells of its own noise and blur, and of what is wrong with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ddc.errors import UserError
from ddc.images import (
    ROUNDING_8_BIT,
    JPEGSettings,
    Picture,
    jpeg_noise,
    jpeg_settings,
    to_internal,
    unit_float,
)
from ddc.operators.base import Operator
from ddc.operators.blur import disc_kernel, motion_kernel
from ddc.problems import Problem, misfit, task_family, task_operator

# To believe in a disc and not in a Gaussian alone, or in a motion: what it gains in log-likelihood, at least, and as a
# share of what it leaves unexplained (where the law of photographs holds badly, differences mean little)
LEAST_GAIN, LEAST_SHARE = 25.0, 0.15

BLOCK = 16  # pixels: of the blocks whose noise is compared
QUIET_SHARE = 0.1  # of the blocks: those in which little but noise is to be seen
QUIET_LEVEL = 0.871  # what white noise of 1 has there, by simulation
NOTICEABLE = 0.02  # less detail than such noise has may be the picture's own
BLURRED = 0.9  # pixels; less may be the lens, or the taste of whoever sharpened it
COARSE_JPEG = 85  # a quality below which the marks of JPEG are worth undoing
COARSEST_TO_DEBLUR = 60  # a quality below which they would grow with the detail that was blurred
FAINT = 0.0025  # below it, a JPEG file may as well have had no noise as have lost it
NOISES = np.append(0, np.geomspace(0.005, 0.3, 20))  # that a file is tried with

Array = np.ndarray[Any, np.dtype[np.float64]]


def estimate_sigma(picture: Picture) -> float:
    """σ_y of a picture's noise, in [0, 1] units: Donoho and Johnstone's median of the finest diagonal detail, in its
    quietest blocks.

    Blocks that touch black, white or a transparent pixel are left out, for their noise is cut off. Of 173 photographs
    nine in ten read at most 0.010 without noise, and at most 0.039 with noise of 0.03. JPEG takes much of the finest
    detail away; how much noise there was before is told by what such a file leaves of noise.
    """
    return noise_of(detail_of(picture), settings_of(picture), 1 if picture.grey else 3)


def settings_of(picture: Picture) -> JPEGSettings | None:
    return None if picture.path is None else jpeg_settings(picture.path)


def noise_of(level: float, settings: JPEGSettings | None, channels: int) -> float:
    """The noise that left such detail in a file."""
    if settings is None or level < FAINT:
        return level
    return float(np.interp(level, levels_after_jpeg(settings, channels), NOISES))


def detail_of(picture: Picture) -> float:
    """The standard deviation of white noise that would have a picture's detail."""
    height, width = picture.size
    rows = slice(max(0, height // 2 - 512), height // 2 + 513)  # the middle is enough
    columns = slice(max(0, width // 2 - 512), width // 2 + 513)
    pixels = unit_float(picture.pixels[rows, columns, : 1 if picture.grey else 3])
    return detail_level(pixels, None if picture.mask is None else picture.mask[0].numpy()[rows, columns] > 0)


def detail_level(pixels: np.ndarray[Any, Any], known: np.ndarray[Any, Any] | None = None) -> float:
    """The same of pixels (h, w, c) in [0, 1], where they are known."""
    usable = (pixels > 0.002) & (pixels < 0.998)
    if known is not None:
        usable &= known[..., None]
    detail, whole = pixels, usable
    for _ in range(2):  # 1 −2 1 down the rows, then along them: zero on every plane
        detail = ((detail[2:] - 2 * detail[1:-1] + detail[:-2]) / np.float32(6**0.5)).swapaxes(0, 1)
        whole = (whole[2:] & whole[1:-1] & whole[:-2]).swapaxes(0, 1)
    detail = np.abs(detail) / 0.6745
    if (samples := detail[whole]).size < 200:
        raise UserError(
            "too few pixels are known to estimate the noise; give it as a number, as in --sigma 0.05"
        )
    blocks, all_whole = in_blocks(detail), in_blocks(whole).all(-1)
    if np.count_nonzero(all_whole) < 20:  # a small picture, or one with many holes
        return float(np.median(samples))
    return float(np.quantile(np.median(blocks[all_whole], axis=-1), QUIET_SHARE) / QUIET_LEVEL)


def in_blocks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(h, w, c) → (rows, columns, c, pixels of a block)."""
    rows, columns = (length // BLOCK for length in values.shape[:2])
    cut = values[: rows * BLOCK, : columns * BLOCK].reshape(rows, BLOCK, columns, BLOCK, values.shape[2])
    return cut.transpose(0, 2, 4, 1, 3).reshape(rows, columns, values.shape[2], BLOCK**2)


@lru_cache(maxsize=16)
def levels_after_jpeg(settings: JPEGSettings, channels: int) -> Array:
    """The detail of grey with white noise of each of `NOISES`, once it was in such a file."""
    field = np.random.default_rng(0).normal(0, 255, (192, 192, channels))
    noisy = ((127.5 + sigma * field).clip(0, 255).round().astype(np.uint8) for sigma in NOISES)
    levels = np.array([detail_level(unit_float(settings.apply(pixels))) for pixels in noisy])
    return np.maximum.accumulate(levels)


class BlurEstimate(NamedTuple):
    """A disc, as a lens out of focus makes of a point, or a line, as a motion does, and a Gaussian on top of it; pixels,
    and degrees counter-clockwise. 0 is none of it."""

    radius: float = 0.0
    width: float = 0.0
    length: float = 0.0
    angle: float = 0.0

    @property
    def spread(self) -> float:
        """The standard deviation of what becomes of a point, along the side where it is largest."""
        return (self.width**2 + self.radius**2 / 4 + self.length**2 / 12) ** 0.5

    @property
    def task(self) -> str:
        """The task that undoes it."""
        if not self.radius and not self.length:
            return f"gauss{self.width:g}"
        shape = f"disc{self.radius:g}" if self.radius else f"motion{self.length:g}@{self.angle:g}"
        return shape + (f"+gauss{self.width:g}" if self.width else "")


def estimate_blur(picture: Picture, sigma: float) -> BlurEstimate:
    """The blur of a picture, told by its spectrum; σ_y is its noise.

    Of 40 photographs of 208×208 pixels, blurred whole and saved in 8 bits, the middle half of Gaussians of 1 to 3 pixels
    and nine in ten discs of 2 to 9 are estimated within 0.1 pixels. A picture that is sky for the most part reads too
    little, for rounding is no even noise there.
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
    power = np.abs(np.fft.rfft2(faded)) ** 2 / (fade**2).sum()
    noise = max(sigma, ROUNDING_8_BIT / 1.5) ** 2 / (1 if picture.grey else 3)

    def is_believed(blur: BlurEstimate, cost: float, other: float, spectrum: "Spectrum") -> bool:
        """Against another blur and its cost."""
        if other - cost < max(LEAST_GAIN, LEAST_SHARE * (cost - spectrum.least())):
            return False
        # a lattice in a picture has dark rings, too, but cannot have been blurred so
        return is_possible(picture, task_operator(blur.task), sigma)

    rings = Spectrum(mean_over_bins(power, grey.shape[1], 120, 1), 200, noise)
    plain, best = rings.best(each(width=np.arange(0, 6.01, 0.1)))
    # smaller discs look like Gaussians
    _, near = rings.best(each(np.arange(1.5, 12.01, 0.25), (0, 0.4, 0.8, 1.2)), 4)
    around = each(
        np.arange(max(near.radius - 0.2, 1.5), near.radius + 0.21, 0.05),
        np.arange(max(near.width - 0.3, 0), near.width + 0.31, 0.1),
    )
    cost, disc = rings.best(around)
    if is_believed(disc, cost, plain, rings):
        best = disc

    sectors = Spectrum(mean_over_bins(power, grey.shape[1], 60, 18), 12, noise)
    still, _ = sectors.best([best, disc], 3.5)
    # dark stripes lie 1/length apart, so that short lines need small steps
    lengths = np.round(np.append(1 / np.arange(1 / 12, 1 / 4.9, 1 / 120), np.arange(13, 32, 2)), 1)
    _, near = sectors.best(each(width=(0, 0.8), length=lengths, angle=np.arange(0, 180, 10)), 8)
    around = each(
        width=np.arange(0, 1.21, 0.3),
        length=np.round(near.length + np.arange(-2, 3) * min(0.5, near.length**2 / 240), 1),
        angle=np.arange(near.angle - 8, near.angle + 9, 4) % 180,
    )
    cost, motion = sectors.best(around, 3.5)
    return motion if is_believed(motion, cost, still, sectors) else best


def is_possible(picture: Picture, operator: Operator, sigma: float) -> bool:
    """Whether a picture can have been blurred by the operator, with noise σ_y, as far as its middle tells."""
    side = 256
    top, left = (max(0, (length - side) // 2) for length in picture.size)
    y = to_internal(picture.window(top, left, side, side))[None]
    sigma = max(sigma, ROUNDING_8_BIT)
    limit = 0.006 + 1.4 * sigma  # of photographs blurred as said, in 8 bits or as JPEG, few come near it
    return misfit(y, Problem(operator, sigma)) <= limit


def each(
    radius: Iterable[float] = (0.0,),
    width: Iterable[float] = (0.0,),
    length: Iterable[float] = (0.0,),
    angle: Iterable[float] = (0.0,),
) -> list[BlurEstimate]:
    """All combinations."""
    return [
        BlurEstimate(*(round(float(value), 2) for value in values))
        for values in product(radius, width, length, angle)
    ]


class Bins(NamedTuple):
    """Means of a spectrum over bins of equal frequency and direction, (directions, frequencies)."""

    power: Array
    frequency: Array  # cycles per pixel
    size: Array  # how many frequencies are in the bin; 0 where there is none


def mean_over_bins(power: Array, width: int, rings: int, sectors: int) -> Bins:
    """Of a spectrum as `rfft2` makes it of pictures of this width; `rings` to a cycle per pixel, from 0.02 to 0.5."""
    down, right = np.fft.fftfreq(power.shape[0])[:, None], np.fft.rfftfreq(width)
    frequency = np.hypot(down, right)
    used = (frequency >= 0.02) & (frequency <= 0.5)
    turn = np.arctan2(down, right)[used] / np.pi % 1
    shape = (sectors, rings // 2 + 1)
    bin = np.rint(sectors * turn).astype(int) % sectors * shape[1] + (rings * frequency[used]).astype(int)
    size = np.bincount(bin, minlength=sectors * shape[1])
    power, frequency = (
        (np.bincount(bin, values[used], minlength=len(size)) / np.maximum(size, 1)).reshape(shape)
        for values in (power, frequency)
    )
    return Bins(power, frequency, size.astype(np.float64).reshape(shape))


@dataclass(frozen=True)
class Spectrum:
    """What is known of a picture's power, and how probable a blur makes it.

    The power of a photograph's frequencies ω falls as ω^−b, with b about 2.4, from an amplitude that may differ between
    directions; a Gaussian of width s multiplies it by exp(−s²ω²), a disc and a line by their own spectra with their dark
    rings and stripes, and noise adds the same to all. The cost of a blur is Whittle's: minus the logarithm of the
    likelihood.
    """

    bins: Bins
    most: float  # weight of a bin: many frequencies are no better known than the law holds
    noise: float

    @property
    def weight(self) -> Array:
        return np.minimum(self.bins.size, self.most)

    def least(self) -> float:
        """The cost if all were explained."""
        return float((self.weight * (np.log(np.maximum(self.bins.power, 1e-20)) + 1)).sum())

    def best(self, blurs: Iterable[BlurEstimate], coarseness: float = 1) -> tuple[float, BlurEstimate]:
        """The blur of the least cost, and its cost; photographs' laws are tried in finer or coarser steps."""
        omega = np.where(self.bins.size > 0, 2 * np.pi * self.bins.frequency, 1)
        slope = np.arange(1.6, 3.61, 0.1 * coarseness)[:, None, None, None]
        amplitude = np.exp(np.arange(-16, 3, 0.1 * coarseness))[:, None]
        photograph = amplitude * omega[:, None] ** -slope  # slopes, directions, amplitudes, frequencies
        improbable = 10 * ((slope[:, 0, 0, 0] - 2.4) / 0.35) ** 2
        weight, power = self.weight[:, None], self.bins.power[:, None]
        sectors, rings = len(omega), 2 * (omega.shape[1] - 1)

        def cost(blur: BlurEstimate) -> float:
            passed = np.exp(-((blur.width * omega) ** 2)) * passed_power(
                *(blur.radius, blur.length, blur.angle, rings, sectors)
            )
            expected = photograph * passed[:, None] + self.noise
            each_law = (weight * (np.log(expected) + power / expected)).sum(3).min(2).sum(1)
            return float((each_law + improbable).min())

        return min((cost(blur), blur) for blur in blurs)


@lru_cache(maxsize=4096)
def passed_power(radius: float, length: float, angle: float, rings: int, sectors: int) -> Array:
    """What a disc or a line leaves of each bin's power."""
    if not radius and not length:
        return np.ones((sectors, rings // 2 + 1))
    kernel = disc_kernel(radius) if radius else motion_kernel(length, angle)
    side = 240
    return mean_over_bins(np.abs(np.fft.rfft2(kernel.numpy(), (side, side))) ** 2, side, rings, sectors).power


class Diagnosis(NamedTuple):
    """What seems to be wrong with a picture."""

    holes: bool  # some of it is transparent
    quality: int | None  # of its JPEG file
    sigma: float | None  # of its noise; None where too little is known to tell
    noisy: bool  # more than its own detail can explain
    blur: BlurEstimate | None  # where there is one to speak of

    @property
    def task(self) -> str | None:
        """The task that undoes the worst of it; None where there is nothing to undo, but perhaps a small size."""
        if self.holes:
            return "inpaint"
        quality = 100 if self.quality is None else self.quality
        if self.blur is not None and quality >= COARSEST_TO_DEBLUR:
            return self.blur.task
        if quality < COARSE_JPEG:
            return f"jpeg{quality}"
        return "denoise" if self.noisy else None

    @property
    def task_sigma(self) -> float:
        """The noise to reckon with in that task."""
        exact = self.task is None or task_family(self.task) in ("inpaint", "jpeg")
        return 0.0 if exact or self.sigma is None else self.sigma


def diagnose(picture: Picture) -> Diagnosis:
    """Look at a picture for holes, the marks of JPEG, blur and noise."""
    settings = settings_of(picture)
    try:
        level = detail_of(picture)
        sigma, noisy = noise_of(level, settings, 1 if picture.grey else 3), level >= NOTICEABLE
    except UserError:  # too few pixels are known
        sigma, noisy = None, False
    try:
        blur = estimate_blur(picture, with_jpeg_noise(picture, sigma or 0.0))
    except UserError:  # too small to tell
        blur = BlurEstimate()
    blurred = blur.spread >= BLURRED * (1 + 10 * (sigma or 0.0))  # noise hides detail as a blur does
    holes = picture.mask is not None and not bool(picture.mask.all())
    return Diagnosis(holes, settings and settings.quality, sigma, noisy, blur if blurred else None)


def with_jpeg_noise(picture: Picture, sigma_y: float) -> float:
    """The noise to reckon with where undoing a blur or a loss of size would make JPEG's errors many times larger.

    They lie together around edges, which is worse than the even noise that networks know: twice their size gives
    the best pictures.
    """
    return max(sigma_y, 2 * jpeg_noise(picture))
