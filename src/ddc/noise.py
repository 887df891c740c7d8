"""Gaussian noise that depends on (seed, draw, channel, row, column) and on nothing else.

A solver draws one field after another from its noise source. Every number is a hash of its own address. So a
batch of four equals four batches of one, a tile equals the same window of the whole picture, and a GPU draws
the same numbers as a CPU (up to the last bits of log and cos).
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Bits = TypeVar("Bits", int, Tensor)

_MASK = 0xFFFFFFFF
_BAND = 256  # rows that are drawn at once: the hashes of a field need several times its memory


def derive_seed(seed: int, name: str | int) -> int:
    """The seed of one image, from the user's seed and the image's name or index."""
    digest = hashlib.sha256(f"{seed}/{name}".encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:4], "little")


def on_device(values: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of these numbers, copied to a GPU without waiting for its queue."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _mix(x: Bits) -> Bits:
    """A 32-bit finaliser (Wellons' lowbias32), on integers or int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)  # the rest is done in place
    x *= 0x7FEB352D
    x &= _MASK
    x ^= x >> 15
    x *= 0x846CA68B
    x &= _MASK
    x ^= x >> 16
    return x


class Noise:
    """A source of N(0, I) fields, one seed per image.

    `origin` is the row and column of the window in a larger picture, for all images or for each, so that tiles
    share one field.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        origin: tuple[int, int] | Sequence[tuple[int, int]] = (0, 0),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.seeds = list(seeds)
        self.origin = origin
        self.device = torch.device(device)
        self.dtype = dtype
        self.draws = 0

    def normal(self, shape: Sequence[int]) -> Tensor:
        """The next field, of shape (B, C, H, W) with B = len(seeds)."""
        batch, channels, height, width = shape
        z = torch.empty(*shape, dtype=self.dtype, device=self.device)
        for first in range(0, height, _BAND):
            band = z[..., first : first + _BAND, :]
            h1, h2 = self._hashes((batch, channels, band.shape[-2], width), first)
            u1, u2 = _open_unit(h1), _open_unit(h2)
            band.copy_(torch.sqrt(-2.0 * torch.log(u1)) * torch.cos(2.0 * math.pi * u2))
        self.draws += 1
        return z

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """The next field of uniform numbers in (0, 1), independent of the normal one with the same address."""
        _, h2 = self._hashes(shape)
        self.draws += 1
        return _open_unit(_mix(h2 ^ 0x2545F491)).to(self.dtype)

    def _hashes(self, shape: Sequence[int], first_row: int = 0) -> tuple[Tensor, Tensor]:
        """Two 32-bit hashes of every address in rows of the present field, from `first_row` on."""
        batch, channels, height, width = shape
        if batch != len(self.seeds):
            raise ValueError(f"cannot draw noise for {batch} images from {len(self.seeds)} seeds")
        top, left = on_device(self.origin, self.device, torch.int64).view(-1, 2, 1, 1, 1).unbind(1)
        rows = top + first_row + torch.arange(height, device=self.device).view(1, 1, height, 1)
        cols = left + torch.arange(width, device=self.device).view(1, 1, 1, width)
        address = ((rows << 16) ^ cols) & _MASK
        keys = [_mix(_mix((seed ^ (seed >> 32)) & _MASK) ^ ((self.draws * 0x9E3779B9) & _MASK)) for seed in self.seeds]
        planes = [_mix(plane + 0x51ED27) for plane in range(channels)]
        of_planes = [_mix(key ^ plane) for key in keys for plane in planes]
        both = on_device([of_planes, [_mix(key + 1 & _MASK) for key in of_planes]], self.device, torch.int64)
        first, second = both.view(2, batch, channels, 1, 1)
        h1 = _mix(_mix(address ^ first) + first & _MASK)
        h2 = _mix(h1 ^ 0x6C62272E ^ second)
        return h1, h2


def _open_unit(h: Tensor) -> Tensor:
    """32 bits → (0, 1), from the upper 24 bits; never 0, so |z| stays below 5.9."""
    return ((h >> 8).float() + 0.5) / 2**24
