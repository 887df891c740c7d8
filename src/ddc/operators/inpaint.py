"""Inpainting: some pixels are observed, the others are 0 in y.

A mask is (B or 1, 1, H, W), 1 where the pixel is observed. In a mask file, white (or opaque, if the file has
transparency) is observed and black is a hole.
"""

import logging
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, interpolate, pad

from ddc.errors import UserError
from ddc.formats import open_image
from ddc.noise import Noise
from ddc.operators.base import ROUNDING, Operator, Sigma, Size, SVDOperator, size_of

logger = logging.getLogger("ddc")

WHITE = 230  # brightness, of 255, from which on a pixel counts as observed; a soft brush leaves less


class PixelwiseOperator(SVDOperator):
    """A diagonal matrix of zeros and ones: a subclass defines `forward` and its `singular_values`."""

    local = True

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self(y)

    def Vt(self, x: Tensor) -> Tensor:
        return x

    def V(self, c: Tensor) -> Tensor:
        return c

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self(y)

    def U(self, c: Tensor) -> Tensor:
        return self(c)


class Denoise(PixelwiseOperator):
    """The identity: the whole image is measured, with noise."""

    settings = ()

    def forward(self, x: Tensor) -> Tensor:
        return x

    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        return torch.ones(1, 1, 1, 1, dtype=x.dtype, device=x.device)

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        return y


class Inpaint(PixelwiseOperator):
    """Keeps the observed pixels. All channels share one mask; noise falls on observed pixels."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        if mask.ndim != 4 or mask.shape[1] != 1:
            raise UserError(f"a mask has the shape {tuple(mask.shape)}; expected (B or 1, 1, H, W)")
        # a mask on a GPU was made by the library: reading it would make the device wait
        if not mask.is_cuda and not bool(((mask == 0) | (mask == 1)).all()):
            raise UserError("a mask holds values other than 0 and 1; threshold it first (1 is observed)")
        self.register_buffer("mask", mask, persistent=False)

    @property
    def batch_key(self) -> Hashable:
        return type(self), self.mask.shape[-2:]

    @classmethod
    def merge(cls, operators: Sequence[Self], device: torch.device) -> Operator:
        return cls(torch.cat([one.mask for one in operators]).to(device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.singular_values(size_of(x), x)

    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        self.check_size(size)
        if len(self.mask) not in (1, len(x)):
            raise UserError(f"there are {len(self.mask)} masks for {len(x)} images; expected as many, or 1")
        return self.cached_like(x, "mask", lambda: self.mask)

    def check_size(self, size: Size) -> None:
        """Raises an error unless the mask has the size of the image."""
        height, width = self.mask.shape[-2:]
        if (height, width) != tuple(size):
            given = f"the mask is {width}×{height} and the image {size[1]}×{size[0]} (width × height)"
            raise UserError(f"{given}; give a mask of the image's size")

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns y with its holes filled smoothly from their surroundings."""
        return fill_holes(y, self.observed(y).expand(y.shape[0], -1, -1, -1))

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        return torch.where(self.observed(x) * (sigma <= ROUNDING) > 0, y, x)

    def observed(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self.singular_values(size_of(y), y)

    def crop(self, top: int, left: int, height: int, width: int) -> "Inpaint":
        return Inpaint(self.mask[..., top : top + height, left : left + width])


def fill_holes(y: Tensor, mask: Tensor) -> Tensor:
    """Fills holes by push-pull: halves the image, as a mean of what is observed, down to one pixel, and fills the
    holes on the way up.

    Observed pixels are kept exactly. An image without any observed pixel stays 0.
    """
    work = torch.promote_types(y.dtype, torch.float32)
    value, weight = y.to(work) * mask, mask.to(work)
    # weights 1 in the middle and 1/3 around; from Python numbers, a GPU would wait for the copy
    line = torch.full((4,), 1 / 3, dtype=work, device=y.device)
    line[1:3] = 1
    kernel = torch.outer(line, line)
    levels = []
    with torch.autocast(y.device.type, enabled=False):
        while max(value.shape[-2:]) > 1:
            levels.append((value, weight))
            total = _halve(weight, kernel)
            value = _halve(value * weight, kernel) / total.clamp(min=1e-30)
            weight = total.clamp(max=1)
        for fine, certainty in reversed(levels):
            height, width = fine.shape[-2:]
            doubled = (height + height % 2, width + width % 2)
            filling = interpolate(value, size=doubled, mode="bilinear", align_corners=False)
            filling = certainty * fine + (1 - certainty) * filling[..., :height, :width]
            filling = avg_pool2d(pad(filling, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
            value = certainty * fine + (1 - certainty) * filling
    return value.to(y.dtype)


def _halve(x: Tensor, kernel: Tensor) -> Tensor:
    """Returns each pixel of the half size as a weighted sum over 4×4 pixels; zero outside the image."""
    channels, height, width = x.shape[1:]
    padded = pad(x, (1, 1 + width % 2, 1, 1 + height % 2))
    return conv2d(padded, kernel.expand(channels, 1, 4, 4), stride=2, groups=channels)


def random_mask(size: Size, rate: float, seed: int | Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Returns one mask for each seed, in which every pixel is missing with the probability `rate`."""
    if not 0 < rate < 1:
        raise UserError(f"the share of missing pixels is {rate}; expected a number between 0 and 1")
    seeds = [seed] if isinstance(seed, int) else list(seed)
    return (Noise(seeds, device=device).uniform((len(seeds), 1, *size)) >= rate).float()


def box_mask(size: Size, box: Size | None = None) -> Tensor:
    """Returns a mask with a rectangular hole (rows, columns) in the middle, by default half as high and wide."""
    rows, columns = box or (max(size[0] // 2, 1), max(size[1] // 2, 1))
    if min(rows, columns) < 1:
        raise UserError(f"the hole is {columns}×{rows} pixels; expected at least one")
    mask = torch.ones(1, 1, *size)
    top, left = max((size[0] - rows) // 2, 0), max((size[1] - columns) // 2, 0)
    mask[..., top : top + rows, left : left + columns] = 0
    return mask


def stroke_mask(size: Size, seed: int | Sequence[int], strokes: int = 8) -> Tensor:
    """Returns one mask for each seed, with brush strokes: bent lines of random place, direction and width."""
    height, width = size
    extent = math.hypot(height, width)
    masks = []
    for one in [seed] if isinstance(seed, int) else seed:
        picture = Image.new("L", (width, height), 255)
        draw = ImageDraw.Draw(picture)
        # each stroke has a row of numbers: its start, first direction, width and five bends
        for row in Noise([one]).uniform((1, 1, strokes, 9))[0, 0].tolist():
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
    """Reads a (1, 1, H, W) mask from the transparency of an image file, or from its brightness if it is opaque."""
    if not Path(path).is_file():
        raise UserError(f"the mask {path} does not exist; give a PNG of 0 (a hole) and 255 (observed)")
    try:
        with open_image(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            opacity = np.asarray(upright.convert("RGBA").getchannel("A"))
            transparent = bool((opacity < 255).any())  # some programs save opaque images with alpha
            plane = opacity if transparent else np.asarray(upright.convert("L"))
    except Exception as error:  # decoders raise nearly everything for a damaged file
        raise UserError(f"the mask {path} cannot be read as an image ({error}); give a PNG of 0 and 255") from error
    observed = plane > 127 if transparent else plane >= WHITE
    holes = 1 - float(observed.mean())
    if holes in (0, 1):
        raise UserError(
            f"the mask {path} has {'no observed pixel' if holes else 'no hole'}: its values are {plane.min()} to "
            f"{plane.max()}; expected 0 for a hole and 255 for an observed pixel"
        )
    if holes > 0.5:
        logger.warning(
            "in the mask %s, %.0f %% of the pixels are holes; black is a hole and white is observed, "
            "so invert it if you meant the opposite",
            *(path, 100 * holes),
        )
    return torch.from_numpy(observed).float()[None, None]
