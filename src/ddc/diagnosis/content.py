"""What a picture is: a drawing, a cut-out, an old print with scratches and a tint."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ddc.diagnosis.planes import Plane, luma_chroma
from ddc.images import Picture, unit_float

Mask = np.ndarray[Any, np.dtype[np.bool_]]

FEW_COLOURS = 0.6  # share of the pixels in the three most frequent colours from which on a picture may be a drawing
SHARP_STEP = 0.25  # of neighbours in [0, 1]: the strongest edges of drawings are at least as steep
FRAME = 0.3  # share of the border in transparent areas from which on transparency belongs to the picture
MARK_CONTRAST = 0.16  # by which a scratch is brighter than both its sides
MOST_MARKS = 0.08  # share of the picture; more is its own texture
FLAT = 0.05  # range of values below which there is nothing to correct
LEVELS, LEAST_RANGE = (0.002, 0.998), 0.65  # quantiles that become black and white; a smaller range may be the scene's
FADED_BLACK, FADED_RANGE, TINTED = 0.07, 0.75, 0.1  # the darkest value, the range of values, the tint of an old print


def is_drawing(pixels: Plane) -> bool:
    """Returns whether pixels (h, w, 3), black 0 and white 1, are line art or a screenshot: few flat colours and sharp edges.
    A picture of black and white alone is one too, dithered ones among them."""
    pixels = pixels.clip(0, 1)
    if np.isin(pixels, (0, 1)).all():
        return True
    colours = (pixels * 31.99).astype(int) @ np.array([1024, 32, 1])
    counts = np.bincount(colours.ravel(), minlength=32768)
    common = np.sort(counts)[-3:].sum() / colours.size
    if common < FEW_COLOURS:
        return False
    steps = np.abs(np.diff(pixels.mean(2), axis=1))
    edges = steps[steps > 0.04]
    return bool(edges.size > 50 and np.quantile(edges, 0.9) > SHARP_STEP and np.median(steps) < 0.5 / 255)


def belongs_to_picture(alpha: Plane) -> bool:
    """Returns whether transparency, 0 where nothing is seen, is a background and not holes to fill: wide transparent
    areas lie along the border."""
    rows, columns = (length // 8 for length in alpha.shape)
    if not rows or not columns:
        return False
    clear = np.all((alpha[: rows * 8, : columns * 8] < 0.5).reshape(rows, 8, columns, 8), axis=(1, 3))
    frame = np.concatenate([clear[0], clear[-1], clear[:, 0], clear[:, -1]])
    return bool(frame.mean() > FRAME)


def find_marks(pixels: Plane) -> Mask | None:
    """Returns where scratches and dust are, (h, w): thin, brighter than both sides, and long or white.
    None if there are too few or too many. A person should look at it before it is filled."""
    luma = luma_chroma(pixels)[0]
    thin = _ridges(luma) | _ridges(luma.T).T
    joined = _long_runs(thin) | _long_runs(thin.T).T | (thin & _extreme(pixels))
    share = joined.mean()
    if not 2e-4 < share < MOST_MARKS:
        return None
    return _grown(joined)


def _ridges(luma: Plane) -> Mask:
    """Returns pixels that differ from those 3 to the left and 3 to the right, in the same direction."""
    padded = np.pad(luma, ((0, 0), (3, 3)), mode="edge")
    left, right = padded[:, :-6], padded[:, 6:]
    brighter = np.minimum(luma - left, luma - right) > MARK_CONTRAST
    return brighter & (np.abs(left - right) < MARK_CONTRAST)


def _long_runs(thin: Mask, length: int = 24) -> Mask:
    """Returns pixels of marks that continue down at least `length` rows, leaning by at most one column in three."""
    wide = thin | np.roll(thin, 1, 1) | np.roll(thin, -1, 1)
    count = np.cumsum(np.pad(wide.astype(np.int32), ((1, 0), (0, 0))), axis=0)
    reach = length // 2
    rows = np.arange(len(wide))
    first, last = np.maximum(rows - reach, 0), np.minimum(rows + reach, len(wide))
    return thin & (count[last] - count[first] >= 0.8 * length)


def _extreme(pixels: Plane) -> Mask:
    """Returns pixels that are nearly white, where little of the picture is."""
    white = pixels.min(2) > 0.72
    return white if white.mean() < 0.03 else np.zeros_like(white)


def _grown(mask: Mask) -> Mask:
    grown = mask.copy()
    for rows in (-1, 0, 1):
        for columns in (-1, 0, 1):
            grown |= np.roll(mask, (rows, columns), (0, 1))
    return grown


class Fading(NamedTuple):
    """Black and white of a faded print in each channel, in [0, 1]."""

    black: tuple[float, float, float]
    white: tuple[float, float, float]

    def corrected(self, pixels: Plane) -> Plane:
        """Returns pixels with the full range and without the tint."""
        black, white = np.array(self.black, np.float32), np.array(self.white, np.float32)
        return np.asarray(((pixels - black) / (white - black)).clip(0, 1), np.float32)


def find_fading(pixels: Plane, marks: Mask | None = None) -> Fading | None:
    """Returns the fading and the tint of a picture whose black is grey and whose white is coloured, or None. Scratches,
    which are white, do not count."""
    seen = pixels.reshape(-1, 3) if marks is None else pixels[~marks]
    black, white = np.quantile(seen[::7], (0.005, 0.99), axis=0)
    small_range = (white - black).max() < FADED_RANGE
    tinted = np.ptp(white) > TINTED and np.ptp(black) > 0.3 * TINTED
    tinted &= (black - black.mean()) @ (white - white.mean()) > 0  # a print has one tint, a scene several colours
    if black.min() < FADED_BLACK or not small_range or not tinted:
        return None
    return levels_of(seen)


def levels_of(seen: Plane) -> Fading:
    """Returns what to make black and white in each channel of pixels (n, 3)."""
    black, white = np.quantile(seen, LEVELS, axis=0)
    spans = white - black
    if spans.max() < FLAT:
        return Fading((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    beyond = (np.maximum(spans, spans.max() / 4) * max(1.0, LEAST_RANGE / spans.max()) - spans) / 2
    return Fading(tuple(map(float, black - beyond)), tuple(map(float, white + beyond)))  # type: ignore[arg-type]


def with_fixed_colours(picture: Picture) -> Picture:
    """Returns a picture with the full range and without a tint. Scratches and transparent pixels do not count."""
    pixels = unit_float(picture.pixels)
    marks = find_marks(pixels)
    seen = np.ones(pixels.shape[:2], bool) if marks is None else ~marks
    if picture.mask is not None:
        seen &= picture.mask[0].numpy() > 0
    return dataclasses.replace(picture, pixels=levels_of(pixels[seen]).corrected(pixels) if seen.any() else pixels)
