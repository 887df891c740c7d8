"""Estimates the noise and the blur of a picture, and detects what is wrong with it."""

import logging
import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT, Picture, internal_sigma, to_internal, unit_float
from ddc.jpegfile import JPEGSettings, jpeg_noise, jpeg_quality, jpeg_settings
from ddc.operators.base import Operator
from ddc.operators.blur import Blur, GaussianBlur, disc_kernel, motion_kernel
from ddc.operators.border import is_reflected
from ddc.problems import Problem, Task, misfit
from ddc.tiling import reach_of

logger = logging.getLogger("ddc")

# A disc is preferred to a Gaussian, and a motion to both, if it gains at least this much log-likelihood, and this share
# of what it leaves unexplained (where the model of photographs fits badly, differences mean little).
LEAST_GAIN, LEAST_SHARE = 25.0, 0.15
# Of two discs, that of linear light is preferred if it leaves less than this share of what the other leaves unexplained.
SURELY_LIGHT = 0.9

BLOCK = 16  # side in pixels of the blocks whose noise is compared
QUIET_SHARE = 0.1  # share of the blocks, those of least detail, that are taken to show only noise
QUIET_LEVEL = 0.871  # the estimate in these blocks for white noise of standard deviation 1, by simulation
FAINT = 0.0025  # σ in [0, 1] units; below it, a JPEG file tells nothing about the noise before compression
ENOUGH = 512  # pixels around the middle that tell the noise of a picture
NOTICEABLE = 0.02  # σ in [0, 1] units; weaker noise may be the picture's own detail
NOTICEABLE_IF_BLURRED = 0.004  # a blur leaves no detail that could be taken for noise
SHARP = 0.7  # pixels of blur; estimates for sharp photographs are at most 0.5, and 0.7 for JPEG files
BLURRED = 0.9  # pixels of blur; less may come from the lens or from sharpening
FINE_JPEG = 90  # JPEG quality from which on a file hardly differs from its original
COARSE_JPEG = 85  # JPEG quality below which compression artefacts are worth removing
# Pixels by which a Gaussian blur looks wider after JPEG of these qualities: medians of 14 photographs, blurs of 0.8 to 2 pixels
WIDENED = ((60, 75, 90, 95), (0.25, 0.2, 0.1, 0.0))
# Times the error of JPEG that a network is given beside the quality: what is best for 20 validation photographs, sr2 and sr4
TOLD = ((75, 90), (1.0, 1.2))
LEAST_TO_TELL = 48  # pixels of the shorter side, below which a picture does not tell what blurred it, or cannot have
COARSEST_TO_DEBLUR = 60  # JPEG quality below which deblurring would amplify the artefacts too much
NOISES = np.append(0, np.geomspace(0.005, 0.3, 20))  # σ in [0, 1] units, for which compression is simulated

Array = np.ndarray[Any, np.dtype[np.float64]]
Numbers = Iterable[float]


def estimate_sigma(picture: Picture) -> float:
    """Returns σ_y of a picture's noise, in [0, 1] units: Donoho and Johnstone's median of the finest diagonal detail,
    in the blocks with least detail.

    Blocks that touch black, white or a transparent pixel are left out, because their noise is clipped. For nine in ten
    of 173 photographs, the estimate is at most 0.010 without noise, and at most 0.039 with noise of 0.03. JPEG removes
    much of the finest detail, so the noise before compression is found by simulation.
    """
    return noise_in(picture.middle(ENOUGH), jpeg_settings(picture.file))


def noise_in(middle: tuple[Array, Array | None], settings: JPEGSettings | None) -> float:
    """Does the same for the middle of a picture."""
    return noise_of(detail_level(*middle), settings, middle[0].shape[2])


def noticeable_noise(
    middle: tuple[Array, Array | None], settings: JPEGSettings | None, enlarged: bool, name: Any
) -> float:
    """Returns the noise of a file that is to be enlarged or deblurred, because false detail would be made of it; 0 if there is
    little. Of 173 photographs without noise, reduced to a half or a quarter, 3 and 9 % are taken
    for noisy; with noise of 0.02, all."""
    try:
        sigma = noise_in(middle, settings)
    except UserError:  # too few pixels are known
        return 0.0
    if sigma < (NOTICEABLE if enlarged else NOTICEABLE_IF_BLURRED):
        return 0.0
    logger.warning("%s has noise of about %.2g, which is removed as well; --sigma 0 keeps it", name, sigma)
    return sigma


def noise_of(level: float, settings: JPEGSettings | None, channels: int) -> float:
    """Returns the noise that has left this level of detail in a file."""
    if settings is None or level < FAINT:
        return level
    return float(np.interp(level, levels_after_jpeg(settings, channels), NOISES))


def detail_of(picture: Picture) -> float:
    """Returns the standard deviation of white noise with as much detail as the picture."""
    return detail_level(*picture.middle(ENOUGH))


def detail_level(pixels: np.ndarray[Any, Any], known: np.ndarray[Any, Any] | None = None) -> float:
    """Does the same for pixels (h, w, c) in [0, 1], where they are known."""
    whole = (pixels > 0.002) & (pixels < 0.998)
    if known is not None:
        whole &= known[..., None]
    detail = pixels
    for _ in range(2):  # 1 −2 1 down the rows, then along them: zero on every plane
        detail = ((detail[2:] - 2 * detail[1:-1] + detail[:-2]) / np.float32(6**0.5)).swapaxes(0, 1)
        whole = (whole[2:] & whole[1:-1] & whole[:-2]).swapaxes(0, 1)
    detail = np.abs(detail) / 0.6745
    if (samples := detail[whole]).size < 200:
        raise UserError("too few pixels are known to estimate the noise; give it as a number, as in --sigma 0.05")
    blocks, all_whole = in_blocks(detail), in_blocks(whole).all(-1)
    if np.count_nonzero(all_whole) < 20:  # a small picture, or one with many holes
        return float(np.median(samples))
    return float(np.quantile(np.median(blocks[all_whole], axis=-1), QUIET_SHARE) / QUIET_LEVEL)


def in_blocks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Reshapes (h, w, c) to (rows, columns, c, pixels of a block)."""
    rows, columns, channels = values.shape[0] // BLOCK, values.shape[1] // BLOCK, values.shape[2]
    cut = values[: rows * BLOCK, : columns * BLOCK].reshape(rows, BLOCK, columns, BLOCK, channels)
    return cut.transpose(0, 2, 4, 1, 3).reshape(rows, columns, channels, BLOCK**2)


@lru_cache(maxsize=16)
def levels_after_jpeg(settings: JPEGSettings, channels: int) -> Array:
    """Returns the detail of a grey picture with white noise, for each of `NOISES`, after compression."""
    field = np.random.default_rng(0).normal(0, 255, (192, 192, channels))
    noisy = ((127.5 + sigma * field).clip(0, 255).round().astype(np.uint8) for sigma in NOISES)
    levels = np.array([detail_level(unit_float(settings.apply(pixels))) for pixels in noisy])
    return np.maximum.accumulate(levels)


class BlurEstimate(NamedTuple):
    """A disc (a lens out of focus) or a line (a motion), convolved with a Gaussian; 0 means none."""

    radius: float = 0.0  # of the disc, in pixels
    width: float = 0.0  # of the Gaussian, in pixels
    length: float = 0.0  # of the line, in pixels
    angle: float = 0.0  # of the line, in degrees counter-clockwise

    @property
    def spread(self) -> float:
        """The standard deviation of the blurred image of a point, in the direction in which it is largest."""
        return (self.width**2 + self.radius**2 / 4 + self.length**2 / 12) ** 0.5

    @property
    def task(self) -> str:
        """The task that undoes it."""
        if not self.radius and not self.length:
            return f"gauss{self.width:g}"
        shape = f"disc{self.radius:g}" if self.radius else f"motion{self.length:g}@{self.angle:g}"
        return shape + (f"+gauss{self.width:g}" if self.width else "")


def estimate_blur(picture: Picture, sigma: float) -> BlurEstimate:
    """Returns the blur of a picture with noise σ_y, estimated from its spectrum.

    For 40 photographs of 208×208 pixels, blurred whole and saved in 8 bits, half of the Gaussians of 1 to 3 pixels and
    nine in ten discs of 2 to 9 are estimated within 0.1 pixels. The estimate is too small for a picture that is mostly
    sky, because rounding is not even noise there.
    """
    height, width = picture.size
    grey = grey_middle(picture)
    if min(grey.shape) < LEAST_TO_TELL:
        raise UserError(
            f"a picture of {width}×{height} pixels is too small to estimate its blur; name it, as in gauss1.5"
        )
    channels = 1 if picture.grey else 3

    def is_better(blur: BlurEstimate, cost: float, other: float, spectrum: "Spectrum") -> bool:
        """Returns whether to prefer the blur to another one of cost `other`."""
        if other - cost < max(LEAST_GAIN, LEAST_SHARE * (cost - spectrum.least_cost())):
            return False
        # a lattice in a picture has dark rings, too, but cannot have been blurred like this
        return is_possible(picture, Task.parse(blur.task).operator(), sigma)

    rings = ring_spectrum(grey, sigma, channels)
    plain, best = rings.best(each(width=np.arange(0, 6.01, 0.1)))
    # smaller discs look like Gaussians
    _, near = rings.best(each(np.arange(1.5, 12.01, 0.25), (0, 0.4, 0.8, 1.2)), 4)
    radii = np.arange(max(near.radius - 0.2, 1.5), near.radius + 0.21, 0.05)
    cost, disc = rings.best(each(radii, np.arange(max(near.width - 0.3, 0), near.width + 0.31, 0.1)))
    if is_better(disc, cost, plain, rings):
        best = disc

    sectors = direction_spectrum(grey, sigma, channels)
    still, _ = sectors.best([best, disc], 3.5)
    # dark stripes are 1/length apart, so short lines need small steps
    lengths = np.round(np.append(1 / np.arange(1 / 12, 1 / 4.9, 1 / 120), np.arange(13, 32, 2)), 1)
    _, near = sectors.best(each(width=(0, 0.8), length=lengths, angle=np.arange(0, 180, 10)), 8)
    lengths = np.round(near.length + np.arange(-2, 3) * min(0.5, near.length**2 / 240), 1)
    angles = np.arange(near.angle - 8, near.angle + 9, 4) % 180
    cost, motion = sectors.best(each(width=np.arange(0, 1.21, 0.3), length=lengths, angle=angles), 3.5)
    return motion if is_better(motion, cost, still, sectors) else best


def is_possible(picture: Picture, operator: Operator, sigma: float) -> bool:
    """Returns whether the operator, with noise σ_y, may have blurred a picture, judging by its middle."""
    if min(picture.size) < LEAST_TO_TELL:
        return True
    side = 256
    top, left = (max(0, (length - side) // 2) for length in picture.size)
    y = to_internal(picture.window(top, left, side, side))[None]
    sigma = max(sigma, ROUNDING_8_BIT)
    # few photographs that were blurred like this, in 8 bits or as JPEG, come near this limit
    return misfit(y, Problem(operator, sigma)) <= 0.006 + 1.4 * sigma


def each(
    radius: Numbers = (0.0,), width: Numbers = (0.0,), length: Numbers = (0.0,), angle: Numbers = (0.0,)
) -> list[BlurEstimate]:
    """Returns all combinations."""
    combinations = product(radius, width, length, angle)
    return [BlurEstimate(*(round(float(value), 2) for value in values)) for values in combinations]


def mean_over_bins(power: Array, width: int, rings: int, sectors: int) -> tuple[Array, Array, Array]:
    """Returns the means of a spectrum, as `rfft2` computes it of pictures of this width, over bins of equal direction
    and frequency, (sectors, rings / 2 + 1). There are `rings` bins to a cycle per pixel, used from 0.02 to 0.5.

    Also returns the frequencies, in cycles per pixel, and how many are in each bin (0 in unused ones).
    """
    used, bin, frequency, size = _bins(power.shape[0], width, rings, sectors)
    power = np.bincount(bin, power[used], minlength=size.size).reshape(size.shape) / np.maximum(size, 1)
    return power, frequency, size


@lru_cache(maxsize=4)
def _bins(height: int, width: int, rings: int, sectors: int) -> tuple[Array, Array, Array, Array]:
    """Returns which frequencies are used, the bin of each, and the mean frequency and the size of the bins."""
    down, right = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)
    frequency = np.hypot(down, right)
    used = (frequency >= 0.02) & (frequency <= 0.5)
    turn = np.arctan2(down, right)[used] / np.pi % 1
    shape = (sectors, rings // 2 + 1)
    bin = np.rint(sectors * turn).astype(int) % sectors * shape[1] + (rings * frequency[used]).astype(int)
    size = np.bincount(bin, minlength=sectors * shape[1]).astype(np.float64)
    frequency = np.bincount(bin, frequency[used], minlength=len(size)) / np.maximum(size, 1)
    return used, bin, frequency.reshape(shape), size.reshape(shape)


class Spectrum:
    """The power of a picture in bins, and the cost of a blur that may explain it.

    The power of a photograph falls with the frequency ω as ω^−b, with b about 2.4, from an amplitude that may differ
    between directions. A Gaussian of width s multiplies it by exp(−s²ω²), a disc and a line by their own spectra with
    their dark rings and stripes, and noise adds the same to all. The cost of a blur is Whittle's: minus the logarithm
    of the likelihood. A bin weighs at most `most`, because many frequencies are no better known than the law holds.
    """

    def __init__(self, power: Array, width: int, rings: int, sectors: int, most: float, noise: float) -> None:
        self.power, frequency, size = mean_over_bins(power, width, rings, sectors)
        self.omega = np.where(size > 0, 2 * np.pi * frequency, 1)
        self.weight, self.noise = np.minimum(size, most), noise
        self.rings, self.sectors = rings, sectors

    def least_cost(self) -> float:
        """Returns the cost of a perfect explanation."""
        return float((self.weight * (np.log(np.maximum(self.power, 1e-20)) + 1)).sum())

    def best(self, blurs: Iterable[BlurEstimate], coarseness: float = 1) -> tuple[float, BlurEstimate]:
        """Returns the least cost and its blur. `coarseness` scales the steps of the slope and the amplitude."""

        def cost(blur: BlurEstimate) -> float:
            shape = passed_power(blur.radius, blur.length, blur.angle, self.rings, self.sectors)
            return self.cost(np.exp(-((blur.width * self.omega) ** 2)) * shape, coarseness)

        return min((cost(blur), blur) for blur in blurs)

    def cost(self, passed: Array, coarseness: float = 1) -> float:
        """Returns the cost of a blur that leaves these shares of each bin's power."""
        slope, photograph = self._laws(coarseness)
        improbable = 10 * ((slope[:, 0, 0, 0] - 2.4) / 0.35) ** 2
        expected = photograph * passed[:, None]
        expected += self.noise
        unlikely = self.power[:, None] / expected
        unlikely += torch.from_numpy(expected).log_().numpy()  # faster than NumPy's
        each_law = np.einsum("ldaf,df->lda", unlikely, self.weight).min(2).sum(1)
        return float((each_law + improbable).min())

    @lru_cache(maxsize=2)  # noqa: B019
    def _laws(self, coarseness: float) -> tuple[Array, Array]:
        """Returns the slopes and the power of photographs: slopes, directions, amplitudes, frequencies."""
        slope = np.arange(1.6, 3.61, 0.1 * coarseness)[:, None, None, None]
        amplitude = np.exp(np.arange(-16, 3, 0.1 * coarseness))[:, None]
        return slope, amplitude * self.omega[:, None] ** -slope


def grey_middle(picture: Picture) -> Array:
    """Returns the grey middle of a picture, which is enough to tell its blur."""
    rows, columns = (slice(max(0, side // 2 - 256), side // 2 + 256) for side in picture.size)
    return unit_float(picture.pixels[rows, columns]).mean(2, dtype=np.float64)


def ring_spectrum(grey: Array, sigma: float, channels: int = 3) -> "Spectrum":
    """Returns the spectrum of a grey plane with noise σ_y in bins of all directions together."""
    return Spectrum(faded_power(grey), grey.shape[1], 120, 1, 200, noise_power(sigma, channels))


def direction_spectrum(grey: np.ndarray[Any, Any], sigma: float, channels: int = 3) -> "Spectrum":
    """Returns the spectrum of a grey plane with noise σ_y in bins of 18 directions."""
    return Spectrum(faded_power(grey), grey.shape[1], 60, 18, 12, noise_power(sigma, channels))


def noise_power(sigma: float, channels: int) -> float:
    """Returns the power of the noise of a mean over channels."""
    return max(sigma, ROUNDING_8_BIT / 1.5) ** 2 / channels


def faded_power(grey: np.ndarray[Any, Any]) -> Array:
    """Returns the power of a plane that is faded out towards its border, as `rfft2` orders it."""
    fade = np.hanning(grey.shape[0] + 2)[1:-1, None] * np.hanning(grey.shape[1] + 2)[1:-1]
    return np.abs(np.fft.rfft2((grey - np.average(grey, weights=fade)) * fade)) ** 2 / (fade**2).sum()


def passed_by(kernel: torch.Tensor, rings: int, sectors: int) -> Array:
    """Returns the share of each bin's power that a kernel leaves."""
    side = 240
    return mean_over_bins(np.abs(np.fft.rfft2(kernel.numpy(), (side, side))) ** 2, side, rings, sectors)[0]


@lru_cache(maxsize=4096)
def passed_power(radius: float, length: float, angle: float, rings: int, sectors: int) -> Array:
    """Returns the share of each bin's power that a disc or a line leaves."""
    if not radius and not length:
        return np.ones((sectors, rings // 2 + 1))
    return passed_by(disc_kernel(radius) if radius else motion_kernel(length, angle), rings, sectors)


def with_jpeg_noise(picture: Picture, sigma_y: float, quality: int | None = None) -> float:
    """Returns the noise to assume if undoing a blur or a loss of size would amplify the errors of JPEG. They gather
    around edges, which is worse than the even noise of training: twice their size gives the best pictures. A network that is
    told the `quality` needs less."""
    noise = jpeg_noise(picture)
    return max(sigma_y, 2 * noise) if quality is None else math.hypot(sigma_y, float(np.interp(quality, *TOLD)) * noise)


def jpeg_task(picture: Picture) -> str:
    """Returns the task of the quality that a picture's file states."""
    if picture.path is None:
        raise UserError("the task jpeg reads the quality from a file; name it, as in jpeg10")
    quality = jpeg_quality(picture.path, picture.content)
    if quality >= FINE_JPEG:
        logger.warning(
            "%s states quality %d, at which there is little to restore; if it was compressed more before it was saved "
            "like this, name that quality, as in jpeg30",
            *(picture.path, quality),
        )
    return f"jpeg{quality}"


def blur_before_jpeg(picture: Picture, sigma_y: float) -> BlurEstimate:
    """Returns the blur of a picture that may have been saved as JPEG since, which makes a Gaussian look wider."""
    blur, settings = estimate_blur(picture, with_jpeg_noise(picture, sigma_y)), jpeg_settings(picture.file)
    if settings is None or blur.radius or blur.length:
        return blur
    return blur._replace(width=round(max(blur.width - float(np.interp(settings.quality, *WIDENED)), 0.0), 1))


def noise_in_light(picture: Picture, sigma_y: float) -> float:
    """Returns the noise of a picture in linear light, over all of its pixels."""
    rows, columns = (slice(max(0, side // 2 - 256), side // 2 + 256) for side in picture.size)
    values = unit_float(picture.pixels[rows, columns])
    slope = 2.4 / 1.055 * ((values.clip(0) + 0.055) / 1.055) ** 1.4  # of `to_light`
    return max(sigma_y, ROUNDING_8_BIT) * math.sqrt(float((slope**2).mean()))


def lens_blur(picture: Picture, sigma_y: float, other: BlurEstimate) -> tuple[BlurEstimate, float] | None:
    """Returns the disc that blurred a picture in linear light, as a lens out of focus does, and σ of the noise there. The disc
    should explain more than another disc or line that blurred the values of sRGB."""
    light, sigma_y = picture.in_light(), with_jpeg_noise(picture, sigma_y)
    noise = noise_in_light(picture, sigma_y)
    blur = estimate_blur(light, noise)
    if not blur.radius:
        return None
    alone = not other.radius and not other.length
    if alone or unexplained(light, blur, noise) < SURELY_LIGHT * unexplained(picture, other, sigma_y):
        return blur, noise
    return None


def unexplained(picture: Picture, blur: BlurEstimate, sigma_y: float) -> float:
    """Returns what a blur leaves unexplained of a picture's spectrum."""
    grey = grey_middle(picture)
    spectrum = direction_spectrum(grey, sigma_y) if blur.length else ring_spectrum(grey, sigma_y)
    return spectrum.best([blur])[0] - spectrum.least_cost()


def deblur_task(picture: Picture, sigma_y: float) -> str:
    """Returns the task of the blur that is estimated from a picture."""
    blur = blur_before_jpeg(picture, sigma_y)
    if blur.spread < SHARP:
        name = picture.path or "the picture"
        logger.warning(
            "%s looks sharp, so there is little to undo; if you know the blur, name it, as in gauss1.5", name
        )
    return blur.task if blur.spread >= 0.5 else "gauss0.5"


def continues_beyond(picture: Picture, problem: Problem) -> bool:
    """Returns whether a picture was blurred together with the scene beyond its border, as photographs are and an
    operator's measurements are not."""
    blur = problem.operator
    assert isinstance(blur, Blur)
    height, width = (min(256, length) for length in picture.size)  # two corners are enough
    corners = [
        picture.window(0, 0, height, width),
        picture.window(picture.size[0] - height, picture.size[1] - width, height, width).flip(-2, -1),
    ]
    y, sigma = to_internal(torch.stack(corners)), float(problem.sigma_y)
    if picture.in_8_bits:
        y, sigma = blur.unround(y), max(sigma, ROUNDING_8_BIT)
    with torch.no_grad():
        return not is_reflected(y, blur, internal_sigma(sigma), reach_of(blur, min(height, width)))


def warn_of_misfit(picture: Picture, problem: Problem) -> None:
    """Warns if a picture cannot have been blurred as the task says, because the result would ring."""
    operator, sigma = problem.operator, float(problem.sigma_y)
    if is_possible(picture, operator, sigma):
        return
    advice = "another blur"
    if isinstance(operator, GaussianBlur):
        weaker = (step / 4 for step in range(math.ceil(4 * operator.sigma) - 1, 1, -1))
        fitting = next((w for w in weaker if is_possible(picture, GaussianBlur(w, operator.size), sigma)), None)
        advice = f"gauss{fitting:g} or less" if fitting else "another task"
    logger.warning(
        "%s is sharper or noisier than %s with sigma %.2g would leave it, so the result may ring; "
        "try %s, or a larger sigma",
        *(picture.path or "the picture", problem.name, problem.sigma_y, advice),
    )


def warn_of_range(picture: Picture) -> None:
    """Warns if floating-point pixels seem to be in [-1, 1]; noise would go beyond white, too."""
    pixels = picture.pixels
    if pixels.dtype == np.float32 and pixels.min() < -0.5 and pixels.max() <= 1:
        name, low, high = picture.path or "the picture", pixels.min(), pixels.max()
        logger.warning("%s has values from %.2f to %.2f; expected [0, 1]: take (x + 1) / 2", name, low, high)
