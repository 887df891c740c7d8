"""What the estimators share: planes of a picture, its middle, and blocks of DCT coefficients."""

from typing import Any

import numpy as np

from ddc.images import Picture, unit_float

Plane = np.ndarray[Any, np.dtype[np.float32]]

# standard deviation of luma, blue difference and red difference for white noise of 1 in each of three channels
WHITE = np.sqrt(
    [
        0.299**2 + 0.587**2 + 0.114**2,
        ((1 - 0.114) ** 2 + 0.299**2 + 0.587**2) / 1.772**2,
        ((1 - 0.299) ** 2 + 0.587**2 + 0.114**2) / 1.402**2,
    ]
)


def middle(picture: Picture, side: int) -> Plane:
    """Returns the middle of a picture, at most `side` pixels high and wide, (h, w, 3) in [0, 1]."""
    rows, columns = middle_of(picture, side)
    return unit_float(picture.pixels[rows, columns])


def middle_of(picture: Picture, side: int) -> tuple[slice, slice]:
    """Returns the rows and columns of the middle of a picture. They begin at a multiple of 16 pixels, so that blocks of JPEG
    lie as in the whole picture."""
    top, left = (max(0, (length - side) // 32 * 16) for length in picture.size)
    return slice(top, top + side), slice(left, left + side)


def luma_chroma(pixels: Plane) -> Plane:
    """Returns luma, blue difference and red difference, (3, h, w)."""
    red, green, blue = np.moveaxis(pixels, 2, 0)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return np.stack([luma, (blue - luma) / 1.772, (red - luma) / 1.402])


def block_dct(plane: Plane, side: int) -> Plane:
    """Returns the orthonormal DCT of the whole blocks of a plane, (rows, columns, side, side)."""
    rows, columns = (length // side for length in plane.shape)
    blocks = plane[: rows * side, : columns * side].reshape(rows, side, columns, side).swapaxes(1, 2)
    k = np.arange(side)
    cosine = np.cos((2 * k + 1) * k[:, None] * np.pi / (2 * side)) * (2 / side) ** 0.5
    cosine[0] /= 2**0.5
    cosine = cosine.astype(np.float32)
    return np.asarray(cosine @ blocks @ cosine.T)
