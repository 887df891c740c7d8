"""Measures the noise of a picture in three bands of luma and chroma.

Noise is in every block of a picture, detail is not: the quietest blocks show the noise, and if they are equally quiet,
it is noise and no texture. Demosaicing, denoising in a camera and JPEG remove the finest noise and leave the coarser,
so σ is measured in bands. Each σ is that of white noise with as much power in the band.
"""

from typing import NamedTuple

import numpy as np

from ddc.diagnosis.planes import WHITE, Plane, block_dct, luma_chroma

BLOCK = 16  # pixels
QUIET, STILL_QUIET = 0.05, 0.25  # quantiles of the blocks, the quietest first
LEAST_BLOCKS, MANY_BLOCKS = 40, 200  # from which noise is told from texture, also by the coarse band of colour alone
# A flat plane with white noise has 0.90 to 0.94 of its σ in the quietest blocks.
QUIET_LEVEL = 0.92
NOTICEABLE_LUMA, NOTICEABLE_CHROMA = 0.035, 0.025  # σ that is worth removing; grass has 0.03 in luma
EVEN_LUMA = (
    1.5,
    1.37,
)  # the most that σ may grow between the quantiles in the finest and the middle band, if it is noise
FLAT = 0.5  # least ratio of the middle to the coarse band: detail has much more power in the coarse one
LEAST_FINE = 0.24  # ratio of the finest to the middle band: soft detail, as of grass, has less
STRONG, FLAT_IF_STRONG = 0.08, 0.75  # noise as strong as this outweighs detail in the coarse band, too
STRONGEST_LUMA = 0.15  # more, without colour, is texture
WEAK_LUMA, SURELY_GAUSSIAN, EVEN_IF_WEAK = 0.02, 3.3, 1.7  # weaker noise needs the kurtosis of noise
AGED = 1.4  # by which the noise of an old print may be less even: scratches and dust lie on it
# of noise in colour: the middle band shows it, and the coarse one alone if JPEG has halved the colour planes
EVEN_IF_COLOURED = 1.65  # the most growth of the finest luma
# most kurtosis of the middle luma in quiet blocks, of noise in luma and in colour: noise has 3, texture more
GAUSSIAN, GAUSSIAN_IF_COLOURED = 4.25, 5.2
# σ of white noise that covers coarse noise: a constant, and the share of the middle band's σ that is added
COVERING = (0.03, 0.7)
COMPRESSED = 90  # JPEG quality below which the colour's middle band is gone


class Coloured(NamedTuple):
    """How noise looks in a band of the colour planes."""

    band: int  # of `Bands`
    least: float  # σ
    growth: float  # between the quantiles, at most
    luma: float  # times the σ is the most that luma's middle band has, unless it is texture
    usual: float  # times the σ is what luma's middle band has without texture
    finer: float = 0.0  # times the σ is the least that the colour's own middle band has: detail has much less


UNCOMPRESSED_COLOUR = (
    Coloured(1, NOTICEABLE_CHROMA, 1.6, 2.6, 1.15),
    Coloured(2, NOTICEABLE_CHROMA, 1.7, 2.0, 1.6, 0.3),
)
COMPRESSED_COLOUR = (Coloured(2, 0.03, 2.0, 2.6, 1.6),)
UNBLURRED = 0.55  # ratio of the middle to the coarse band, which a shake makes less
# of a camera's noise, which is weak and coarse but has colour: σ of the middle luma and of the coarse colour, at least
CAMERA_LUMA, CAMERA_COLOUR = (0.012, 0.08), 0.015
CAMERA_COLOUR_TO_LUMA, CAMERA_FLAT = 0.7, 0.45
CAMERA_EVEN = (1.75, 4.5), (2.3, 3.5)  # growth and kurtosis: noise is stronger where a picture is brighter


class Bands(NamedTuple):
    """σ in [0, 1] units above 1/4, from 1/8 to 1/4, and from 1/25 to 1/8 cycles a pixel."""

    fine: float = 0.0
    middle: float = 0.0
    coarse: float = 0.0


class Noise(NamedTuple):
    """The noise of a picture."""

    luma: Bands = Bands()
    chroma: Bands = Bands()
    found: bool = False  # it is noise for certain, and not the picture's own texture
    white: float = 0.0  # σ of the white noise to assume, so that coarse noise is removed, too; 0 if none was found
    even: bool = True  # the finest detail is about as strong in all quiet blocks, as noise is

    @property
    def coloured(self) -> bool:
        """Whether the finest noise is missing, as after demosaicing or denoising in a camera."""
        return self.found and self.luma.fine < 0.65 * self.luma.middle

    @property
    def unblurred(self) -> bool:
        """Whether even the quietest blocks have middle frequencies that a wide blur would have removed, as noise has."""
        return self.luma.middle > max(CAMERA_LUMA[0], UNBLURRED * self.luma.coarse)

    @property
    def covering(self) -> float:
        """σ of white noise that is as strong as coarse noise at all frequencies, or the σ to assume of other noise."""
        least, share = COVERING
        return max(self.white, least + share * self.luma.middle) if self.coloured else self.white


def measure_noise(pixels: Plane, quality: int | None = None, aged: bool = False) -> Noise:
    """Returns the noise of pixels (h, w, 3) in [0, 1], which were a JPEG of some quality, or an old print. Blocks that
    touch black or white are left out, because their noise is clipped."""
    moments = [_moments(pixels[top:, left:]) for top in (0, 8) for left in (0, 8)]
    power, fourth = (np.concatenate(each, axis=1) for each in zip(*moments, strict=True))
    if power.shape[1] < LEAST_BLOCKS:
        return Noise()
    quiet, still = np.sqrt(np.quantile(power, (QUIET, STILL_QUIET), axis=1))  # (channels, bands)
    growth = still / np.maximum(quiet, 1e-4)
    sigma = quiet / QUIET_LEVEL
    luma, chroma = (Bands(*(float(value) for value in each)) for each in (sigma[0], sigma[1:].mean(0)))
    kurtosis, slack = _kurtosis(power, fourth), AGED if aged else 1.0
    in_luma = (
        NOTICEABLE_LUMA <= luma.middle < min(STRONGEST_LUMA, luma.fine / LEAST_FINE)
        and luma.middle >= (FLAT_IF_STRONG if luma.middle > STRONG else FLAT / slack) * luma.coarse
        and growth[0, 0] < slack**2 * EVEN_LUMA[0]
        and growth[0, 1] < slack * EVEN_LUMA[1]
        and kurtosis < GAUSSIAN
    )
    weak = (
        WEAK_LUMA <= luma.middle < min(NOTICEABLE_LUMA, luma.fine / LEAST_FINE)
        and luma.middle >= FLAT * luma.coarse
        and growth[0, :2].max() < EVEN_IF_WEAK
        and kurtosis < SURELY_GAUSSIAN
    )
    white = max(luma.fine, luma.middle) if in_luma or weak else 0.0
    compressed = quality is not None and quality < COMPRESSED
    rules = UNCOMPRESSED_COLOUR if not compressed else COMPRESSED_COLOUR if power.shape[1] >= MANY_BLOCKS else ()
    for rule in rules:
        level = chroma[rule.band]
        if (
            level >= rule.least
            and chroma.middle >= rule.finer * level
            and luma.middle < rule.luma * level
            and growth[1:, rule.band].max() < rule.growth
            and growth[0, 0] < EVEN_IF_COLOURED
            and kurtosis < GAUSSIAN_IF_COLOURED
        ):
            white = max(luma.fine, min(luma.middle, rule.usual * level), chroma.middle)
            break
    if _is_from_camera(luma, chroma) and any(growth[0, 1] < even and kurtosis < most for even, most in CAMERA_EVEN):
        white = max(white, luma.middle)
    even = growth[0, 0] < EVEN_LUMA[0] and (bool(white) or luma.middle <= STRONG)
    return Noise(luma, chroma, bool(white), float(white), bool(even))


def _is_from_camera(luma: Bands, chroma: Bands) -> bool:
    """Returns whether the bands are those of a camera's noise: colour is coarse, and strong beside luma."""
    weakest, strongest = CAMERA_LUMA
    return (
        weakest <= luma.middle < strongest
        and luma.middle >= CAMERA_FLAT * luma.coarse
        and chroma.coarse >= max(CAMERA_COLOUR, CAMERA_COLOUR_TO_LUMA * luma.middle)
    )


def _kurtosis(power: Plane, fourth: Plane) -> float:
    """Returns the kurtosis of the middle luma in the tenth of the blocks with the least luma."""
    luma = power[0]
    middle, coarse = (luma[:, band] / max(float(np.median(luma[:, band])), 1e-12) for band in (1, 2))
    quiet = np.argsort(middle + coarse)[: max(LEAST_BLOCKS, len(luma) // 10)]
    return float(fourth[0, quiet, 1].mean() / max(float(luma[quiet, 1].mean()) ** 2, 1e-20))


def _moments(pixels: Plane) -> tuple[Plane, Plane]:
    """Returns the mean square and the mean fourth power of each channel and block in the bands, (3, blocks, 3). They are
    those of white noise."""
    k = np.arange(BLOCK) / (2 * BLOCK)
    radius = np.hypot(k[:, None], k)
    bands = [radius >= 0.25, (radius >= 0.125) & (radius < 0.25), (radius >= 0.04) & (radius < 0.125)]
    rows, columns = (length // BLOCK for length in pixels.shape[:2])
    inside = np.all((pixels > 0.004) & (pixels < 0.996), axis=2)[: rows * BLOCK, : columns * BLOCK]
    whole = inside.reshape(rows, BLOCK, columns, BLOCK).mean((1, 3)) > 0.98
    second, fourth = [], []
    for plane, white in zip(luma_chroma(pixels), WHITE, strict=True):
        squared = (block_dct(plane, BLOCK)[whole] / white) ** 2
        second.append(np.stack([squared[:, band].mean(1) for band in bands], axis=-1))
        fourth.append(np.stack([(squared[:, band] ** 2).mean(1) for band in bands], axis=-1))
    return np.stack(second), np.stack(fourth)
