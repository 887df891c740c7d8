"""Diagnoses a photograph: what was done to it, in which strength, and what the pipeline can do about it."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import PIL.Image

from ddc.diagnosis.blocks import detect_blocks
from ddc.diagnosis.content import Fading, Mask, belongs_to_picture, find_fading, find_marks, is_drawing
from ddc.diagnosis.enlargement import Enlargement, detect_enlargement, is_soft
from ddc.diagnosis.grain import Noise, measure_noise
from ddc.diagnosis.planes import luma_chroma, middle
from ddc.errors import UserError
from ddc.estimates import (
    BLURRED,
    COARSE_JPEG,
    COARSEST_TO_DEBLUR,
    NOTICEABLE,
    BlurEstimate,
    detail_of,
    estimate_blur,
    noise_of,
    with_jpeg_noise,
)
from ddc.images import Picture, quantise, unit_float
from ddc.jpegfile import jpeg_settings

SIDE = 1024  # pixels of the part that is examined
LARGE_HOLE = 100  # pixels across, from which on the filling is invention
NOTHING = "nothing"  # the task of a picture that is returned as it is
STRONGEST = 0.12  # σ that is assumed at most


@dataclass(frozen=True)
class Findings:
    """What was done to a picture: blurred, then reduced or enlarged, then noise, then JPEG; and what it is."""

    blur: BlurEstimate | None = None
    enlargement: Enlargement | None = None
    noise: Noise = field(default_factory=Noise)
    sigma: float = 0.0  # of the finest noise, before JPEG; 0 if it is not noticeable
    quality: int | None = None  # of the coarsest JPEG compression
    grid: tuple[int, int] = (0, 0)  # row and column where its first whole block begins
    saved_again: bool = False  # since that compression
    hole: int = 0  # pixels across the largest hole; 0 if there is none
    cut_out: bool = False  # its transparency is a background, and stays
    drawing: bool = False
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
        if self.blur is not None:
            said.append(_blur_in_words(self.blur))
        if self.enlargement is not None:
            said.append(f"It was enlarged {self.enlargement.factor:.1f} times.")
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
    if hole or cut_out or is_drawing(pixels):
        return Findings(hole=hole, cut_out=cut_out, drawing=not hole and is_drawing(pixels))
    settings = jpeg_settings(picture.path)
    luma = luma_chroma(pixels)[0]
    blocks = detect_blocks(luma, settings and settings.quality)
    quality = blocks.quality if blocks else settings and settings.quality
    grid = (blocks.top, blocks.left) if blocks else (0, 0)
    noise = measure_noise(pixels)
    # the blocks of a coarse JPEG file have the marks of an enlargement, twice or four times
    coarse = quality is not None and quality < COARSEST_TO_DEBLUR
    enlargement = None if coarse else detect_enlargement(luma, quality is not None)
    try:
        level = detail_of(picture)
    except UserError:  # too few pixels are known
        level = 0.0
    sigma = noise_of(level, settings, 1 if picture.grey else 3)
    blur = _blur(picture, sigma) if enlargement is None and is_soft(luma) else None
    fading = find_fading(pixels)
    return Findings(
        blur,
        enlargement,
        noise,
        sigma if level >= NOTICEABLE and noise.even else 0.0,
        quality,
        grid,
        saved_again=blocks is not None,
        marks=find_marks(pixels) if fading else None,  # few other pictures have scratches, and many have thin lines
        fading=fading,
    )


def _blur(picture: Picture, sigma: float) -> BlurEstimate | None:
    try:
        blur = estimate_blur(picture, with_jpeg_noise(picture, sigma))
    except UserError:  # the picture is too small
        return None
    return blur if blur.spread >= BLURRED * (1 + 10 * sigma) else None  # noise hides detail as a blur does


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


@dataclass(frozen=True)
class Treatment:
    """What the pipeline does: prepare the picture, restore it with a task and σ_y, and bring it to its size."""

    task: str
    sigma: float = 0.0
    shrink: float = 1.0  # the factor by which it was enlarged
    grid: tuple[int, int] = (0, 0)  # of JPEG's blocks
    because: tuple[str, ...] = ()  # the findings, in words

    def prepared(self, picture: Picture) -> Picture:
        """Returns the picture that is the measurement of the task."""
        if self.shrink > 1:
            height, width = (max(8, round(length / self.shrink)) for length in picture.size)
            image = PIL.Image.fromarray(quantise(picture.pixels, 8))
            small = np.asarray(image.resize((width, height), PIL.Image.Resampling.BOX))
            return dataclasses.replace(picture, pixels=small, alpha=None)
        if self.grid != (0, 0):
            pixels = np.pad(picture.pixels, self._margins(), mode="symmetric")
            alpha = None if picture.alpha is None else np.pad(picture.alpha, self._margins()[:2], mode="edge")
            return dataclasses.replace(picture, pixels=pixels, alpha=alpha)
        return picture

    def _margins(self) -> tuple[tuple[int, int], ...]:
        return (-self.grid[0] % 8, 0), (-self.grid[1] % 8, 0), (0, 0)

    def finished(self, restored: Picture, source: Picture) -> Picture:
        """Returns a restored picture at the place and in the size of its source."""
        if self.shrink > 1 and restored.size != source.size:
            planes = [PIL.Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(restored.pixels, 2, 0)]
            size = source.size[::-1]
            resized = [np.asarray(plane.resize(size, PIL.Image.Resampling.LANCZOS)) for plane in planes]
            return dataclasses.replace(restored, pixels=np.stack(resized, axis=2).clip(0, 1), alpha=source.alpha)
        if self.shrink == 1 and restored.size != source.size:
            (top, _), (left, _), _ = self._margins()
            return dataclasses.replace(restored, pixels=restored.pixels[top:, left:], alpha=source.alpha)
        return restored


def plan_treatment(picture: Picture) -> Treatment:
    """Returns what to do with a picture, and why; the task is `NOTHING` if it should be left alone."""
    found = examine(picture)
    return dataclasses.replace(treatment(found) or Treatment(NOTHING), because=tuple(found.sentences()))


def treatment(found: Findings) -> Treatment | None:
    """Returns what the pipeline can do about the findings today; None if it should leave the picture alone."""
    if found.hole:
        return Treatment("inpaint")
    if found.drawing or found.cut_out:
        return None
    quality = 100 if found.quality is None else found.quality
    if found.enlargement is not None:
        factor = found.enlargement.factor
        whole = round(factor) if abs(factor - round(factor)) < 0.06 else math.ceil(factor)
        return Treatment(f"sr{min(max(whole, 2), 8)}", found.strength, shrink=factor)
    if found.blur is not None and quality >= COARSEST_TO_DEBLUR:
        luma = found.noise.luma
        # after JPEG, the finest noise is weaker than that before it; too little is worse than too much
        compressed = min(1.5 * luma.middle, 3 * luma.fine) if quality < 95 else 0.0
        return Treatment(found.blur.task, min(max(found.strength, compressed), STRONGEST))
    if found.noise.luma_found or found.noise.chroma_found:
        return Treatment("denoise", min(1.1 * found.strength, STRONGEST))
    if found.compressed:
        return Treatment(f"jpeg{quality}", 0.008 if found.saved_again else 0.0, grid=found.grid)
    return Treatment("denoise", min(found.sigma, STRONGEST)) if found.sigma else None
