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
AGED = 1.4  # by which the noise of an old print may be less even: scratches and dust lie on it
# of noise in colour: the middle band shows it, and the coarse one alone if JPEG has halved the colour planes
EVEN_IF_COLOURED = 1.65  # the most growth of the finest luma
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


def measure_noise(pixels: Plane, quality: int | None = None, aged: bool = False) -> Noise:
    """Returns the noise of pixels (h, w, 3) in [0, 1], which were a JPEG of some quality, or an old print. Blocks that
    touch black or white are left out, because their noise is clipped."""
    power = np.concatenate([_power(pixels[top:, left:]) for top in (0, 8) for left in (0, 8)], axis=1)
    if power.shape[1] < LEAST_BLOCKS:
        return Noise()
    quiet, still = np.sqrt(np.quantile(power, (QUIET, STILL_QUIET), axis=1))  # (channels, bands)
    growth = still / np.maximum(quiet, 1e-4)
    sigma = quiet / QUIET_LEVEL
    luma, chroma = (Bands(*(float(value) for value in each)) for each in (sigma[0], sigma[1:].mean(0)))
    slack = AGED if aged else 1.0
    in_luma = (
        NOTICEABLE_LUMA <= luma.middle < min(STRONGEST_LUMA, luma.fine / LEAST_FINE)
        and luma.middle >= (FLAT_IF_STRONG if luma.middle > STRONG else FLAT / slack) * luma.coarse
        and growth[0, 0] < slack**2 * EVEN_LUMA[0]
        and growth[0, 1] < slack * EVEN_LUMA[1]
    )
    white = max(luma.fine, luma.middle) if in_luma else 0.0
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
        ):
            white = max(luma.fine, min(luma.middle, rule.usual * level), chroma.middle)
            break
    even = growth[0, 0] < EVEN_LUMA[0] and (bool(white) or luma.middle <= STRONG)
    return Noise(luma, chroma, bool(white), float(white), bool(even))


def _power(pixels: Plane) -> Plane:
    """Returns the mean power of each channel and block in the bands, (3, blocks, 3), as a variance of white noise."""
    k = np.arange(BLOCK) / (2 * BLOCK)
    radius = np.hypot(k[:, None], k)
    bands = [radius >= 0.25, (radius >= 0.125) & (radius < 0.25), (radius >= 0.04) & (radius < 0.125)]
    rows, columns = (length // BLOCK for length in pixels.shape[:2])
    inside = np.all((pixels > 0.004) & (pixels < 0.996), axis=2)[: rows * BLOCK, : columns * BLOCK]
    whole = inside.reshape(rows, BLOCK, columns, BLOCK).mean((1, 3)) > 0.98
    power = []
    for plane, white in zip(luma_chroma(pixels), WHITE, strict=True):
        squared = block_dct(plane, BLOCK)[whole] ** 2
        power.append(np.stack([squared[:, band].mean(1) for band in bands], axis=-1) / white**2)
    return np.stack(power)
