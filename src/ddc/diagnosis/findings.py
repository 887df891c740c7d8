"""Diagnoses a photograph: what was done to it, and in which strength."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ddc.diagnosis.blocks import FirstSaving, detect_blocks, first_saving
from ddc.diagnosis.content import Fading, Mask, belongs_to_picture, find_fading, find_marks, is_drawing
from ddc.diagnosis.enlarged_jpeg import EnlargedJPEG, detect_enlarged_jpeg
from ddc.diagnosis.enlargement import SURE, Enlargement, detect_enlargement, is_soft, without_enlargement
from ddc.diagnosis.grain import Noise, measure_noise
from ddc.diagnosis.planes import Plane, luma_chroma, middle, middle_of
from ddc.diagnosis.shake import estimate_kernel, explains, is_cut_off, spread_of
from ddc.errors import UserError
from ddc.estimates import (
    BLURRED,
    COARSE_JPEG,
    COARSEST_TO_DEBLUR,
    NOTICEABLE,
    BlurEstimate,
    blur_before_jpeg,
    detail_of,
    direction_spectrum,
    is_possible,
    lens_blur,
    noise_of,
    with_jpeg_noise,
)
from ddc.images import Picture, quantise, unit_float
from ddc.jpegfile import jpeg_settings
from ddc.operators.blur import KernelBlur

SIDE = 1024  # pixels of the part that is examined
SAVED = 512  # pixels of the part in which the first saving is searched
SMALLEST_SHAKEN, NOISIEST_SHAKEN = 128, 0.04  # pixels and σ, beyond which no kernel is searched
SHAKEN_DROP = 9.0  # dB by which the power of a shaken picture falls somewhere
SHAKEN = 2.0  # pixels of a kernel's spread; less may be texture
BLURRED_IN_JPEG = 1.5  # pixels of a blur that is worth undoing beneath JPEG: cameras' pictures are as soft at full size
LARGE_HOLE = 100  # pixels across, from which on the filling is invention
LIKE_DEMOSAICING = 0.05  # from the factor 2, of which demosaicing leaves weak traces
STRONGEST = 0.2  # σ that is assumed at most


@dataclass(frozen=True)
class Findings:
    """What was done to a picture: blurred, then reduced or enlarged, then noise, then JPEG; and what it is."""

    blur: BlurEstimate | None = None
    light: float = 0.0  # σ of the noise in linear light, if that is what was blurred; else 0
    kernel: Tensor | None = None  # of a path of free shape, instead of the blur
    enlargement: Enlargement | None = None
    enlarged_jpeg: EnlargedJPEG | None = None  # the file that was enlarged
    noise: Noise = field(default_factory=Noise)
    sigma: float = 0.0  # of the finest noise, before JPEG; 0 if it is not noticeable
    quality: int | None = None  # of the coarsest JPEG compression
    grid: tuple[int, int] = (0, 0)  # row and column where its first whole block begins
    saved_again: bool = False  # since that compression
    first: FirstSaving | None = None  # that compression, exactly, if it is known
    hole: int = 0  # pixels across the largest hole; 0 if there is none
    cut_out: bool = False  # its transparency is a background, and stays
    drawing: bool = False
    soft: bool = False  # it has little fine detail, by a blur or by nature, so that JPEG changed little
    marks: Mask | None = None  # of scratches and dust, in the examined part
    fading: Fading | None = None

    @property
    def strength(self) -> float:
        """σ of the white noise to assume, so that the strongest band is covered; 0 if there is none."""
        return min(max(self.sigma, self.noise.white), STRONGEST)

    @property
    def compressed(self) -> bool:
        """Whether its JPEG compression is worth undoing."""
        return self.quality is not None and self.quality < COARSE_JPEG

    def sentences(self) -> list[str]:
        """Returns a plain sentence for each finding."""
        said = []
        if self.drawing:
            said.append("It is a drawing or a screenshot, which is left alone.")
        if self.cut_out:
            said.append("Its transparent background is kept.")
        if self.hole:
            said.append(f"It has holes of up to {self.hole} pixels.")
        if self.hole > LARGE_HOLE:
            said.append("What fills such large holes is invented.")
        if self.kernel is not None:
            said.append(f"It is shaken, along a path of about {4 * spread_of(self.kernel):.0f} pixels.")
        elif self.blur is not None:
            said.append(_blur_in_words(self.blur))
        if self.enlargement is not None:
            file = f", from a JPEG file of quality {self.enlarged_jpeg.quality}" if self.enlarged_jpeg else ""
            said.append(f"It was enlarged {self.enlargement.factor:.1f} times{file}.")
        if self.strength:
            colour = "coarse noise, as from a camera" if self.noise.coloured else "noise"
            said.append(f"It has {colour}, of strength {self.strength:.3f}.")
        if self.compressed:
            again = ", and saved again since" if self.saved_again else ""
            said.append(f"It was compressed as JPEG of quality {self.quality}{again}.")
        if self.marks is not None:
            said.append("It may have scratches or dust; a mask can be made for them.")
        if self.fading is not None:
            said.append("Its colours have faded; they can be corrected separately.")
        return said or ["Nothing is wrong with it."]


def _blur_in_words(blur: BlurEstimate) -> str:
    if blur.length:
        return f"It was moved by about {blur.length:.0f} pixels."
    if blur.radius:
        return f"It is out of focus, by a disc of about {blur.radius:.1f} pixels."
    return f"It is blurred by about {blur.width:.1f} pixels."


def examine(picture: Picture) -> Findings:
    """Returns what is found in a picture, from a part of at most `SIDE` pixels."""
    pixels = middle(picture, SIDE)
    alpha = None if picture.alpha is None else unit_float(picture.alpha)
    cut_out = alpha is not None and belongs_to_picture(alpha)
    hole = 0 if alpha is None or cut_out else _hole(alpha)
    if hole or is_drawing(pixels):
        return Findings(hole=hole, cut_out=cut_out, drawing=not hole)
    if alpha is not None and cut_out:  # blocks that touch black do not count
        seen = alpha[middle_of(picture, SIDE)] > 0.9
        return Findings(cut_out=True, noise=measure_noise(pixels * seen[:, :, None]))
    settings = jpeg_settings(picture.file)
    luma = luma_chroma(pixels)[0]
    blocks = detect_blocks(luma, settings and settings.quality)
    quality = blocks.quality if blocks else settings and settings.quality
    grid = (blocks.top, blocks.left) if blocks else (0, 0)
    marks = find_marks(pixels)
    fading = find_fading(pixels, marks)
    noise = measure_noise(pixels, quality, aged=fading is not None)
    coarse = quality is not None and quality < COARSEST_TO_DEBLUR
    # the blocks of a coarse JPEG file have the marks of an enlargement, twice or four times
    enlargement = None if coarse else detect_enlargement(luma, quality is not None)
    demosaiced = enlargement is not None and is_demosaiced(enlargement)
    enlargement = None if demosaiced else enlargement
    enlarged_jpeg = None
    if enlargement is not None:  # interpolated texture is as even as noise
        enlarged_jpeg = detect_enlarged_jpeg(picture, enlargement.factor)
        if enlarged_jpeg is not None:
            enlargement = enlargement._replace(factor=enlarged_jpeg.factor)
        small = without_enlargement(quantise(pixels, 8), enlargement.factor)
        noise = measure_noise(unit_float(small), enlarged_jpeg.quality if enlarged_jpeg else quality)
    try:
        level = detail_of(picture)
    except UserError:  # too few pixels are known
        level = 0.0
    sigma = noise_of(level, settings, 1 if picture.grey else 3)
    soft = enlargement is None and is_soft(luma)
    # coarse blocks hide detail as a blur does
    blur, light = _blur(picture, sigma, quality, demosaiced) if soft and not coarse else (None, 0.0)
    may_be_shaken = not coarse and enlargement is None and not noise.unblurred and is_soft(luma, SHAKEN_DROP)
    kernel = _shake(picture, luma, max(sigma, noise.covering), quality, blur) if may_be_shaken and not light else None
    return Findings(
        blur,
        light,
        kernel,
        enlargement,
        enlarged_jpeg,
        noise,
        sigma if level >= NOTICEABLE and noise.even else 0.0,
        quality,
        grid,
        saved_again=blocks is not None,
        first=blocks and first_saving(quantise(pixels[:SAVED, :SAVED], 8), blocks.quality, grid),
        soft=soft,
        marks=marks if fading else None,  # few other pictures have scratches, and many have thin lines
        fading=fading,
    )


def is_demosaiced(found: Enlargement) -> bool:
    """Returns whether an enlargement is rather the trace of demosaicing in a camera's picture at full size."""
    return found.coherence <= SURE and abs(found.factor - 2) < LIKE_DEMOSAICING


def _blur(picture: Picture, sigma: float, quality: int | None, demosaiced: bool) -> tuple[BlurEstimate | None, float]:
    """Returns the blur that is worth undoing, and the noise in linear light if it happened there."""
    try:
        found = blur_before_jpeg(picture, sigma)
        blur, light = lens_blur(picture, sigma, found) or (found, 0.0)
    except UserError:  # the picture is too small
        return None, 0.0
    if demosaiced and not blur.radius and not blur.length:
        return None, 0.0  # a camera's own softness at full size
    least = BLURRED if quality is None or quality >= COARSE_JPEG else BLURRED_IN_JPEG
    is_worth_it = blur.spread >= least * (1 + 10 * sigma)  # noise hides detail as a blur does
    return (blur, light) if is_worth_it else (None, 0.0)


def _shake(
    picture: Picture, luma: Plane, sigma: float, quality: int | None, blur: BlurEstimate | None
) -> Tensor | None:
    """Returns the kernel of a shaken picture, if it has one."""
    if min(luma.shape) < SMALLEST_SHAKEN or sigma > NOISIEST_SHAKEN:
        return None
    kernel, spectrum = estimate_kernel(luma), direction_spectrum(luma, with_jpeg_noise(picture, sigma))
    in_jpeg = quality is not None and quality < COARSE_JPEG
    if spread_of(kernel) < SHAKEN or is_cut_off(kernel) or not explains(spectrum, kernel, blur, in_jpeg):
        return None
    # a shaken picture has so little detail that JPEG adds little noise; a sharp one contradicts the kernel
    return kernel if is_possible(picture, KernelBlur(kernel), sigma) else None


def _hole(alpha: np.ndarray[Any, Any]) -> int:
    """Returns the longest run of transparent pixels along rows or columns, the shorter of the two."""

    def longest(clear: np.ndarray[Any, Any]) -> int:
        best, run = 0, np.zeros(clear.shape[1], int)
        for row in clear:
            run = (run + 1) * row
            best = max(best, int(run.max()))
        return best

    clear = alpha < 0.5
    return min(longest(clear), longest(clear.T))
