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
LEAST_BLOCKS = 40
# A flat plane with white noise has 0.90 to 0.94 of its σ in the quietest blocks.
QUIET_LEVEL = 0.92
NOTICEABLE_LUMA, NOTICEABLE_CHROMA = 0.035, 0.025  # σ that is worth removing; grass has 0.03 in luma
# the most that σ may grow between the two quantiles, in the finest, the middle and the coarse band, if it is noise
EVEN_LUMA, EVEN_CHROMA = (1.5, 1.37), (1.6, 1.7)
FLAT = 0.5  # least ratio of the middle to the coarse band: detail has much more power in the coarse one
STRONG, FLAT_IF_STRONG = 0.08, 0.75  # noise as strong as this outweighs detail in the coarse band, too


class Bands(NamedTuple):
    """σ in [0, 1] units above 1/4, from 1/8 to 1/4, and from 1/25 to 1/8 cycles a pixel."""

    fine: float = 0.0
    middle: float = 0.0
    coarse: float = 0.0


class Noise(NamedTuple):
    """The noise of a picture."""

    luma: Bands = Bands()
    chroma: Bands = Bands()
    luma_found: bool = False  # it is noise for certain, and not the picture's own texture
    chroma_found: bool = False
    even: bool = True  # the finest detail is about as strong in all quiet blocks, as noise is

    @property
    def white(self) -> float:
        """σ of the white noise that is as strong as this in its strongest band; 0 if none was found. Denoising with
        it removes coarse noise, too."""
        bands = [self.luma.fine, self.luma.middle] * self.luma_found + [self.chroma.middle] * self.chroma_found
        return max(bands, default=0.0)

    @property
    def coloured(self) -> bool:
        """Whether the finest noise is missing, as after demosaicing or denoising in a camera."""
        return self.luma_found and self.luma.fine < 0.65 * self.luma.middle


def measure_noise(pixels: Plane) -> Noise:
    """Returns the noise of pixels (h, w, 3) in [0, 1]. Blocks that touch black or white are left out, because their
    noise is clipped."""
    power = np.concatenate([_power(pixels[top:, left:]) for top in (0, 8) for left in (0, 8)], axis=1)
    if power.shape[1] < LEAST_BLOCKS:
        return Noise()
    quiet, still = np.sqrt(np.quantile(power, (QUIET, STILL_QUIET), axis=1))  # (channels, bands)
    growth = still / np.maximum(quiet, 1e-4)
    sigma = quiet / QUIET_LEVEL
    chroma = sigma[1:].mean(0)
    luma_found = (
        sigma[0, 1] >= NOTICEABLE_LUMA
        and sigma[0, 1] >= FLAT * sigma[0, 2]
        and growth[0, 0] < EVEN_LUMA[0]
        and growth[0, 1] < EVEN_LUMA[1]
    )
    chroma_found = any(
        chroma[band] >= NOTICEABLE_CHROMA and growth[1:, band].max() < most
        for band, most in zip((1, 2), EVEN_CHROMA, strict=True)
    )
    luma = Bands(*(float(value) for value in sigma[0]))
    coarse = Bands(*(float(value) for value in chroma))
    flat = luma.middle >= FLAT_IF_STRONG * luma.coarse
    if luma.middle > STRONG and not flat and coarse.middle < NOTICEABLE_CHROMA:  # a forest, for example
        return Noise(luma, coarse, even=False)
    return Noise(luma, coarse, bool(luma_found or chroma_found), bool(chroma_found), bool(growth[0, 0] < EVEN_LUMA[0]))


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
