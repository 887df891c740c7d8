"""Detects JPEG compression in the pixels of a picture: the grid of its blocks and its quantisation steps.

A coefficient of a block that was quantised with step s lies near a multiple of s. For the coefficients beyond the zero
bin, the mean of cos(2πc/s) is about 1 then, and at most about 0 for any other grid or for a picture that was never
compressed. It stays high if the picture was saved again with smaller steps, on the same grid or on another.
"""

import io
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from ddc.diagnosis.planes import Plane, block_dct
from ddc.operators.jpeg import LUMA, quantisation

Levels = np.ndarray[Any, np.dtype[np.uint8]]

SIDE = 512  # pixels of the part in which the grid is searched
BINS_TO_A_LEVEL, LARGEST = 4, 400  # of the histograms of coefficients
STEPS = np.arange(4, 129)  # smaller ones are hidden by rounding to 8 bits
BEYOND = 0.4  # coefficients of at least this many steps are used
LEAST_MEAN, LEAST_SCORE = 0.35, 20.0  # of the cosines, and of their sum in standard deviations
MOST_DEVIATION = 0.2  # of the steps' logarithms from a standard table
COARSER = 1.45  # times the steps of a file are the least that show an earlier compression: nearer ones look alike
# (row, column) of the frequencies that are used, the lowest first: others are mostly zero
FREQUENCIES = tuple(
    sorted(((u, v) for u in range(6) for v in range(6) if 0 < u + v < 6), key=lambda f: (f[0] + f[1], f))
)


NEARBY = 2  # by which the quality of a table may differ from the one that was found
MOST_CHANGE = 4.0  # levels, RMS, that a second saving changes; more means that the tables differ


class Blocks(NamedTuple):
    """JPEG compression that is seen in pixels."""

    quality: int  # 1 to 100: whose standard table is nearest to the steps
    top: int  # row and column of the first corner of a block, 0 to 7
    left: int
    score: float  # of the evidence, in standard deviations


def detect_blocks(luma: Plane, own: int | None = None) -> Blocks | None:
    """Returns the compression of a plane of luma in [0, 1], or None. If it was read from a JPEG file of quality `own`,
    only an earlier, coarser compression is returned."""
    if min(luma.shape) < 40:
        return None
    levels = 255 * np.asarray(luma[:SIDE, :SIDE], np.float32)
    best: Blocks | None = None
    for top in range(8):
        for left in range(8):
            score, steps = _steps(levels[top:, left:], own)
            if len(steps) < 3 or score < max(LEAST_SCORE, best.score if best else 0):
                continue
            quality, deviation = nearest_quality(steps)
            if deviation < MOST_DEVIATION:  # on a wrong grid, steps are found, but not in a table's proportions
                best = Blocks(quality, top, left, score)
    return best


def _steps(levels: Plane, own: int | None) -> tuple[float, dict[tuple[int, int], int]]:
    """Returns the score of a grid and the step of each frequency that shows one."""
    coefficients = np.abs(block_dct(levels, 8))
    rows, columns = zip(*FREQUENCIES, strict=True)
    chosen = coefficients[:, :, rows, columns].reshape(-1, len(FREQUENCIES))
    bins = np.minimum(np.rint(chosen * BINS_TO_A_LEVEL).astype(int), LARGEST * BINS_TO_A_LEVEL)
    length = LARGEST * BINS_TO_A_LEVEL + 1
    index = bins + length * np.arange(len(FREQUENCIES))
    histograms = np.bincount(index.ravel(), minlength=length * len(FREQUENCIES)).reshape(-1, length)
    cosines, counted = _combs()
    total, count = histograms @ cosines, histograms @ counted  # (frequencies, steps)
    mean = total / np.maximum(count, 1)
    score = total / np.sqrt(np.maximum(count, 1) / 2)
    steps: dict[tuple[int, int], int] = {}
    overall = 0.0
    for number, frequency in enumerate(FREQUENCIES):
        least = 0.0 if own is None else COARSER * float(_tables()[own][frequency])
        good = np.flatnonzero((mean[number] > LEAST_MEAN) & (score[number] > 3) & (least <= STEPS))
        if len(good):
            # divisors of the step fit as well, so it is the best of the largest ones
            best = good[np.argmax(mean[number, good] + 0.15 * np.log2(STEPS[good]))]
            steps[frequency] = int(STEPS[best])
            overall += float(score[number, best]) ** 2
    return overall**0.5, steps


@lru_cache(maxsize=1)
def _tables() -> Plane:
    """Returns the steps of each quality, (101, 8, 8)."""
    return np.asarray(quantisation(LUMA).numpy())


@lru_cache(maxsize=1)
def _combs() -> tuple[Plane, Plane]:
    """Returns the cosine of each bin for each step, and whether the bin is used."""
    values = np.arange(LARGEST * BINS_TO_A_LEVEL + 1)[:, None] / BINS_TO_A_LEVEL
    used = (values >= BEYOND * STEPS) & (values < LARGEST)
    return np.cos(2 * np.pi * values / STEPS) * used, used.astype(np.float64)


def nearest_quality(steps: dict[tuple[int, int], int]) -> tuple[int, float]:
    """Returns the quality whose standard steps are nearest, and the median deviation of the steps' logarithms."""
    rows, columns = zip(*steps, strict=True)
    found = np.array(list(steps.values()), np.float64)
    deviations = np.abs(np.log(_tables()[1:, rows, columns] / found))
    nearest = int(deviations.sum(1).argmin())
    return 1 + nearest, float(np.median(deviations[nearest]))


class FirstSaving(NamedTuple):
    """How a picture was compressed before it was saved again."""

    quality: int
    top: int  # rows and columns to add, so that it begins with a whole block of its colour planes
    left: int


def first_saving(pixels: Levels, quality: int, grid: tuple[int, int]) -> FirstSaving | None:
    """Returns the first compression of a picture, (h, w, 3) in 8-bit levels, from a quality near it and the grid.

    Compressed again with its own tables on its own grid, a picture hardly changes. So the quality, and the grid of the
    colour planes with their larger blocks, are those under which it changes least. None if it changes much under all, as
    with other tables.
    """
    best: tuple[float, FirstSaving] | None = None
    for tried in range(max(1, quality - NEARBY), min(100, quality + NEARBY) + 1):
        for extra in ((0, 0), (0, 8), (8, 0), (8, 8)):
            top, left = (-start % 8 + more for start, more in zip(grid, extra, strict=True))
            change = saved(with_margin(pixels, top, left), tried)[top:, left:].astype(np.float32) - pixels
            error = float(np.sqrt((change[16:-16, 16:-16] ** 2).mean()))
            if best is None or error < best[0]:
                best = error, FirstSaving(tried, top, left)
    return best[1] if best is not None and best[0] < MOST_CHANGE else None


def with_margin(pixels: Levels, top: int, left: int) -> Levels:
    """Returns pixels with rows and columns added above and to the left."""
    return np.pad(pixels, ((top, 0), (left, 0), (0, 0)), mode="symmetric")


def saved(pixels: Levels, quality: int) -> Levels:
    """Returns 8-bit levels as JPEG leaves them. For a picture that was saved again, with its first quality and on its first
    grid, these are the levels of the first file: the errors of the second are smaller than the first one's steps."""
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.asarray(PIL.Image.open(file).convert("RGB"))
