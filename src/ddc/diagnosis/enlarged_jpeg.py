"""Detects that a picture is an enlarged JPEG file, as messengers and web sites make them.

The enlargement is undone first: the small picture whose interpolation is nearest to the enlarged one has the blocks of its JPEG
file again. Enlarged blocks also leave marks of other enlargements: with the factor f they are 8f pixels wide, and multiples of
1/8f cycles a pixel look like edges of the spectrum. So factors are tried from which the one that was found may follow.
"""

from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from ddc.diagnosis.blocks import Blocks, FirstSaving, detect_blocks, first_saving, saved, with_margin
from ddc.diagnosis.planes import Plane, luma_chroma
from ddc.images import Picture, quantise, unit_float

Levels = np.ndarray[Any, np.dtype[np.uint8]]

SIDE = 640  # pixels of the part that is examined
LEAST = 64  # pixels of the small picture
BOX = PIL.Image.Resampling.BOX
KERNELS = (PIL.Image.Resampling.BICUBIC, PIL.Image.Resampling.LANCZOS, PIL.Image.Resampling.BILINEAR)
COMPARED = 256  # pixels of the part in which kernels are compared
ROUNDS = 12  # of back-projection
ALIKE = 1.03  # times the least misfit, of kernels that are compared by the blocks they show
HARMONICS = (8, 7, 6, 5, 4, 16)  # k: blocks that were enlarged by f look like an enlargement by 8f/k
SMALLEST = 1.3  # factor
SIMPLE = 0.015  # a factor as near to a multiple of 1/4 is one


class EnlargedJPEG(NamedTuple):
    """The JPEG file that a picture was enlarged from."""

    factor: float
    kernel: int  # of the interpolation, as Pillow names it
    quality: int
    first: FirstSaving | None  # the file exactly, if it can be made again

    def undone(self, pixels: Levels) -> Levels:
        """Returns the small picture, (h, w, 3) in 8-bit levels, of an enlarged one: as the file had it, if it is known."""
        levels = quantise(shrunk(unit_float(pixels), self.factor, self.kernel).clip(0, 1), 8)
        if self.first is None:
            return levels
        top, left = self.first.top, self.first.left
        return saved(with_margin(levels, top, left), self.first.quality)[top:, left:]


def detect_enlarged_jpeg(picture: Picture, factor: float) -> EnlargedJPEG | None:
    """Returns the file that a picture was enlarged from, or None. The factor is that of `detect_enlargement`."""
    pixels = unit_float(picture.pixels[:SIDE, :SIDE])  # with the first row and column, where both pictures begin
    luma = luma_chroma(pixels)[0].astype(np.float32)
    best: tuple[float, Blocks, int] | None = None
    for harmonic in HARMONICS:
        tried = _simple(factor * harmonic / 8)
        if tried < SMALLEST or min(luma.shape) / tried < LEAST:
            continue
        for kernel in _kernels(_whole_part(luma[:COMPARED, :COMPARED, None], tried), tried):
            blocks = detect_blocks(shrunk(_whole_part(luma[..., None], tried), tried, kernel)[..., 0].clip(0, 1))
            if blocks is not None and (best is None or blocks.score > best[1].score):
                best = tried, blocks, kernel
    if best is None:
        return None
    tried, blocks, kernel = best
    small = quantise(shrunk(_whole_part(pixels, tried), tried, kernel).clip(0, 1), 8)
    first = first_saving(small, blocks.quality, (blocks.top, blocks.left))
    return EnlargedJPEG(tried, kernel, first.quality if first else blocks.quality, first)


def _simple(factor: float) -> float:
    """Returns a factor, as a multiple of 1/4 if it is near one: a spectrum does not tell it more exactly."""
    simple = round(4 * factor) / 4
    return simple if abs(factor / simple - 1) < SIMPLE else factor


def _whole_part(pixels: Plane, factor: float) -> Plane:
    """Returns the part, (h, w, channels), that comes from whole pixels, a multiple of four."""
    height, width = (round(int(min(length, SIDE) / factor) // 4 * 4 * factor) for length in pixels.shape[:2])
    return pixels[:height, :width]


def _kernels(part: Plane, factor: float) -> list[int]:
    """Returns the kernels whose interpolation leaves the least unexplained: for the factor 2, a bicubic one explains whatever a
    bilinear one does, with another small picture."""
    misfits = {}
    for kernel in KERNELS:
        again = _resized(shrunk(part, factor, kernel), part.shape[:2], kernel)
        misfits[int(kernel)] = float(((again - part) ** 2).mean())
    return [kernel for kernel, misfit in misfits.items() if misfit <= ALIKE * min(misfits.values())]


def shrunk(pixels: Plane, factor: float, kernel: int) -> Plane:
    """Returns the small picture whose enlargement with this kernel is nearest to the picture, by back-projection."""
    pixels = np.ascontiguousarray(pixels, np.float32)
    size = tuple(max(8, round(length / factor)) for length in pixels.shape[:2])
    small = _resized(pixels, size, BOX)
    for _ in range(ROUNDS):
        small = small + _resized(pixels - _resized(small, pixels.shape[:2], kernel), size, BOX)
    return small


def _resized(pixels: Plane, size: tuple[int, ...], kernel: int) -> Plane:
    """Returns pixels (h, w, channels) in another height and width."""
    planes = [PIL.Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(pixels, 2, 0)]
    return np.stack([np.asarray(plane.resize((size[1], size[0]), kernel)) for plane in planes], axis=2)
