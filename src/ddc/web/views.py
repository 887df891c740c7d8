"""What the page shows of pictures: arrays (h, w, 3) of uint8 that are small enough for a browser."""

from typing import Any

import numpy as np
import PIL.Image
from torch import Tensor

from ddc.images import Picture, quantise

Array = np.ndarray[Any, np.dtype[Any]]

VIEW = 1600  # pixels; a longer picture is shown smaller, but downloaded in full
# black, indigo, red, orange, pale yellow: the brightness increases, which colour-blind people can see as well
HEAT = np.array([(0, 0, 4), (66, 10, 104), (188, 55, 84), (249, 142, 9), (252, 255, 164)], np.float32)


def view(picture: Picture, longest: int = VIEW) -> Array:
    """The picture, reduced to at most this many pixels on its longest side."""
    share = min(1.0, longest / max(picture.size))
    height, width = (max(1, round(side * share)) for side in picture.size)
    return resized(np.ascontiguousarray(quantise(picture.pixels, 8)), height, width)


def resized(
    pixels: Array, height: int, width: int, method: PIL.Image.Resampling = PIL.Image.Resampling.BICUBIC
) -> Array:
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(PIL.Image.fromarray(pixels).resize((width, height), method))


def heat_map(std: Tensor) -> Array:
    """(3, H, W) → (H, W, 3): black where the samples agree, pale yellow where they differ most."""
    level = std.mean(0).numpy()
    level = (level / max(heat_maximum(std), 1e-6)).clip(0, 1) * (len(HEAT) - 1)
    below = np.minimum(level.astype(int), len(HEAT) - 2)
    part = (level - below)[..., None]
    return np.rint(HEAT[below] * (1 - part) + HEAT[below + 1] * part).astype(np.uint8)


def heat_maximum(std: Tensor) -> float:
    """The standard deviation that the palest colour stands for; one pixel in two hundred has more."""
    return float(np.quantile(std.mean(0).numpy(), 0.995))
