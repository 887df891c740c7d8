"""The clean pictures that are degraded, restored and compared."""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ddc.datasets import Source, find_sources
from ddc.errors import UserError
from ddc.evaluation.run import evenly
from ddc.images import Picture, quantise


@dataclass(frozen=True)
class CleanImage:
    """A clean picture, cropped: uint8 (3, H, W)."""

    name: str
    pixels: Tensor
    checksum: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checksum", zlib.crc32(self.pixels.numpy().tobytes()))


def load_images(path: Path, size: int = 256, limit: int | None = None) -> list[CleanImage]:
    """The centres of the pictures in a folder or tar archive; `limit` takes that many, evenly over the names."""
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a folder or a .tar archive of pictures (--images)")
    sources = find_sources([path])
    if len({source.name for source in sources}) < len(sources):
        raise UserError(f"{path} has two pictures of the same name; rows are stored by name, so rename one")
    if limit is not None:
        if limit < 1:
            raise UserError(f"the limit is {limit}; expected at least one picture")
        sources = evenly(sources, limit)
    return list(read_images(path, sources, size))


def read_images(path: Path, sources: Iterable[Source], size: int) -> Iterator[CleanImage]:
    """The centres of these pictures of a folder or archive, one after the other."""
    for source in sources:
        try:
            pixels = quantise(Picture.read(source.name, source.read()).pixels, 8)
        except (UserError, OSError, ValueError) as error:
            raise UserError(f"{source.name} in {path} cannot be read ({error}); remove it, or copy it again") from None
        yield CleanImage(source.name, crop_centre(torch.tensor(pixels).permute(2, 0, 1), size, source.name))


def crop_centre(pixels: Tensor, size: int, name: str) -> Tensor:
    height, width = pixels.shape[1:]
    if size < 32:
        raise UserError(f"the size is {size}; expected at least 32 pixels, which LPIPS needs")
    if min(height, width) < size:
        raise UserError(f"{name} has {width}×{height} pixels; expected at least {size}×{size} for its centre")
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[:, top : top + size, left : left + size].contiguous()
