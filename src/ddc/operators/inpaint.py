"""Inpainting: some pixels are observed, the others are 0 in y.

A mask is (B or 1, 1, H, W), 1 where the pixel is observed. In a mask file white (or opaque, where the
file has transparency) is observed and black is a hole.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, interpolate, pad

from ddc.errors import UserError
from ddc.noise import Noise
from ddc.operators.base import ROUNDING, Sigma, Size, SVDOperator

logger = logging.getLogger("ddc")

WHITE = 230  # of 255; a pixel that a soft brush has touched holds some of what was painted there


@dataclass(frozen=True, eq=False)
class Inpaint(SVDOperator):
    """Keeps the observed pixels. One mask for all channels; noise falls on observed pixels."""

    mask: Tensor

    def __post_init__(self) -> None:
        if self.mask.ndim != 4 or self.mask.shape[1] != 1:
            raise UserError(f"a mask has the shape {tuple(self.mask.shape)}; expected (B or 1, 1, H, W)")
        # a mask on a GPU was made by the library: looking at it would make the device wait
        if not self.mask.is_cuda and not bool(((self.mask == 0) | (self.mask == 1)).all()):
            raise UserError("a mask holds values other than 0 and 1; threshold it first (1 is observed)")

    def singular_values(self, size: Size, like: Tensor) -> Tensor:
        height, width = self.mask.shape[-2:]
        if (height, width) != tuple(size):
            raise UserError(
                f"the mask is {width}×{height} and the picture {size[1]}×{size[0]} (width × height); "
                "give a mask of the picture's size"
            )
        if self.mask.shape[0] not in (1, like.shape[0]):
            raise UserError(
                f"{self.mask.shape[0]} masks were given for {like.shape[0]} pictures; expected as many, or 1"
            )
        return self.mask.to(like.device, like.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kept(x)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self._kept(y)

    def Vt(self, x: Tensor) -> Tensor:
        return x

    def V(self, c: Tensor) -> Tensor:
        return c

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self._kept(y)

    def U(self, c: Tensor) -> Tensor:
        return self._kept(c)

    def estimate(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """y with its holes filled smoothly from around them."""
        mask = self.singular_values((y.shape[-2], y.shape[-1]), y)
        return fill_holes(y, mask.expand(y.shape[0], -1, -1, -1))

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        known = self.singular_values((x.shape[-2], x.shape[-1]), x) * (sigma <= ROUNDING)
        return torch.where(known > 0, y, x)

    def add_noise(self, y: Tensor, z: Tensor, sigma: Sigma) -> Tensor:
        return y + self._kept(sigma * z)

    def observed(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self.singular_values((y.shape[-2], y.shape[-1]), y)

    def crop(self, top: int, left: int, height: int, width: int) -> "Inpaint":
        return Inpaint(self.mask[..., top : top + height, left : left + width])

    def _kept(self, x: Tensor) -> Tensor:
        return x * self.singular_values((x.shape[-2], x.shape[-1]), x)


def fill_holes(y: Tensor, mask: Tensor) -> Tensor:
    """Push-pull: halve the picture, as a mean of what is observed, to one pixel; then fill on the way up.

    Observed pixels are kept exactly. A picture without any observed pixel stays 0.
    """
    work = torch.promote_types(y.dtype, torch.float32)
    value, weight = y.to(work) * mask, mask.to(work)
    levels = []
    with torch.autocast(y.device.type, enabled=False):
        while max(value.shape[-2:]) > 1:
            levels.append((value, weight))
            total = _halve(weight)
            value = _halve(value * weight) / total.clamp(min=1e-30)
            weight = total.clamp(max=1)
        for fine, certainty in reversed(levels):
            height, width = fine.shape[-2:]
            doubled = (height + height % 2, width + width % 2)
            filling = interpolate(value, size=doubled, mode="bilinear", align_corners=False)
            filling = certainty * fine + (1 - certainty) * filling[..., :height, :width]
            filling = avg_pool2d(pad(filling, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
            value = certainty * fine + (1 - certainty) * filling
    return value.to(y.dtype)


def _halve(x: Tensor) -> Tensor:
    """Each pixel of the half size as a sum over 4×4 with weights 1 in the middle; zero outside the picture."""
    channels, height, width = x.shape[1:]
    kernel = _halving_kernel(x.dtype, x.device).expand(channels, 1, 4, 4)
    return conv2d(pad(x, (1, 1 + width % 2, 1, 1 + height % 2)), kernel, stride=2, groups=channels)


@lru_cache(maxsize=16)
def _halving_kernel(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        line = torch.tensor([1 / 3, 1, 1, 1 / 3], dtype=dtype, device=device)
        return torch.outer(line, line)


def random_mask(
    size: Size, rate: float, seed: int | Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Every pixel is missing with the probability `rate`; one mask for each seed."""
    if not 0 < rate < 1:
        raise UserError(f"the share of missing pixels is {rate}; expected a number between 0 and 1")
    seeds = [seed] if isinstance(seed, int) else list(seed)
    return (Noise(seeds, device=device).uniform((len(seeds), 1, *size)) >= rate).float()


def box_mask(size: Size, box: Size | None = None) -> Tensor:
    """A rectangular hole (rows, columns) in the middle; by default of half the height and width."""
    height, width = size
    rows, columns = box or (max(height // 2, 1), max(width // 2, 1))
    if min(rows, columns) < 1:
        raise UserError(f"the hole is {columns}×{rows} pixels; expected at least one")
    mask = torch.ones(1, 1, height, width)
    top, left = max((height - rows) // 2, 0), max((width - columns) // 2, 0)
    mask[..., top : top + rows, left : left + columns] = 0
    return mask


def stroke_mask(size: Size, seed: int | Sequence[int], strokes: int = 8) -> Tensor:
    """Holes like brush strokes: bent lines of random place, direction and width; one mask for each seed."""
    from PIL import Image, ImageDraw

    height, width = size
    extent = math.hypot(height, width)
    bends = 5
    masks = []
    for one in [seed] if isinstance(seed, int) else seed:
        picture = Image.new("L", (width, height), 255)
        draw = ImageDraw.Draw(picture)
        # one row of numbers for a stroke: its start, its first direction, its width, and its bends
        for row in Noise([one]).uniform((1, 1, strokes, 4 + bends))[0, 0].tolist():
            x, y, angle = row[0] * width, row[1] * height, row[2] * 2 * math.pi
            radius = extent * (0.01 + 0.015 * row[3])
            points = [(x, y)]
            for turn in row[4:]:
                angle += (turn - 0.5) * math.pi / 1.5
                x, y = x + extent * 0.07 * math.cos(angle), y + extent * 0.07 * math.sin(angle)
                points.append((x, y))
            draw.line(points, fill=0, width=max(round(2 * radius), 1), joint="curve")
            for x, y in (points[0], points[-1]):
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=0)
        flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        masks.append((flat > 127).float().view(1, height, width))
    return torch.stack(masks)


def read_mask(path: str | Path) -> Tensor:
    """A (1, 1, H, W) mask from a picture: its transparency where it has any, else its brightness."""
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not Path(path).is_file():
        raise UserError(f"the mask {path} does not exist; give a PNG of 0 (a hole) and 255 (known)")
    try:
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            opacity = np.asarray(upright.convert("RGBA").getchannel("A"))
            transparent = bool((opacity < 255).any())  # programs save opaque pictures with alpha, too
            plane = opacity if transparent else np.asarray(upright.convert("L"))
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(
            f"the mask {path} cannot be read as a picture ({error}); give a PNG of 0 and 255"
        ) from error
    observed = plane > 127 if transparent else plane >= WHITE
    holes = 1 - float(observed.mean())
    if holes in (0, 1):
        lacks = "no hole" if holes == 0 else "no known pixel"
        raise UserError(
            f"the mask {path} has {lacks}: its values are {plane.min()} to {plane.max()}; "
            "expected 0 for a hole and 255 for what is known"
        )
    if holes > 0.5:
        logger.warning(
            "the mask %s makes %.0f %% of the picture a hole; black is a hole and white is known, "
            "so invert it if you meant the opposite",
            path,
            100 * holes,
        )
    return torch.from_numpy(observed).float()[None, None]
