"""Training pictures: decoded once and kept on the device as uint8, or decoded on demand by threads.

The picture, crop and flip of the n-th draw depend on (seed, n) alone. So a position in the data is one number,
resuming is exact, and two processes see the same data as one process with twice the batch.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ddc.datasets import Size, Source, read_header, read_pixels
from ddc.errors import UserError
from ddc.images import from_uint8
from ddc.noise import derive_seed, on_device

Device = torch.device | str


@dataclass(frozen=True)
class Place:
    """The place of a crop: the picture's index, and the crop's first row and column."""

    index: int
    top: int
    left: int


class Pictures(ABC):
    """The pictures that are not smaller than the crop, in order, with their sizes (height and width)."""

    def __init__(self, sources: list[Source], sizes: list[Size | None], crop: int, device: Device) -> None:
        usable = {i: size for i, size in enumerate(sizes) if size and min(size) >= crop}
        self.unreadable = sum(size is None for size in sizes)
        self.too_small = len(sources) - self.unreadable - len(usable)
        if not usable:
            raise UserError(
                f"none of {len(sources)} pictures can be used: {self.unreadable} unreadable, {self.too_small} smaller "
                f"than the {crop}-pixel crop; give larger pictures or a smaller --crop"
            )
        self.indices, self.sizes = list(usable), list(usable.values())
        self.names = [sources[i].name for i in usable]
        self.device = torch.device(device)

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def crops(self, numbers: Sequence[int], places: Sequence[Place], side: int) -> Tensor:
        """The crops of these draws: uint8, (B, side, side, 3), on the device."""

    def report(self) -> str:
        """How many pictures are used, and how many are not."""
        unreadable = f", {self.unreadable} unreadable passed over" if self.unreadable else ""
        small = f", {self.too_small} smaller than the crop passed over" if self.too_small else ""
        return f"{len(self)} pictures{unreadable}{small}"

    def fingerprint(self) -> str:
        """A short hash of names and sizes. If it is the same, draws give the same pictures."""
        text = "\n".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"{len(self)} pictures, {hashlib.sha256(text.encode()).hexdigest()[:8]}"


class Pool(Pictures):
    """All pictures, decoded one after the other into one uint8 tensor on the device."""

    def __init__(self, sources: list[Source], crop: int, device: Device = "cpu", workers: int = 16) -> None:
        with ThreadPoolExecutor(workers) as executor:
            decoded = list(executor.map(read_pixels, sources))
        super().__init__(sources, [None if pixels is None else pixels.shape[:2] for pixels in decoded], crop, device)
        flat = [pixels.reshape(-1, 3) for i in self.indices if (pixels := decoded[i]) is not None]
        self.pixels = torch.from_numpy(np.concatenate(flat)).to(device)  # (total of height·width, 3)
        self.starts = [0, *np.cumsum([len(pixels) for pixels in flat]).tolist()]

    def crops(self, numbers: Sequence[int], places: Sequence[Place], side: int) -> Tensor:
        corners = [self.starts[p.index] + p.top * self.sizes[p.index][1] + p.left for p in places]
        widths = [self.sizes[p.index][1] for p in places]
        corner, width = on_device([corners, widths], self.device, torch.int64).view(2, -1, 1, 1)
        steps = torch.arange(side, device=self.device)
        return self.pixels[corner + steps.view(1, -1, 1) * width + steps]


class Stream(Pictures):
    """Pictures that are decoded on demand, by threads that work ahead of the training.

    A picture with a valid header that cannot be decoded is replaced by the next one.
    """

    def __init__(
        self, sources: list[Source], sizes: list[Size | None], crop: int, device: Device, workers: int
    ) -> None:
        super().__init__(sources, sizes, crop, device)
        self.sources = [sources[i] for i in self.indices]
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._coming: dict[int, Future[Tensor]] = {}
        self._broken: set[int] = set()

    def expect(self, numbers: Sequence[int], places: Sequence[Place], side: int) -> None:
        """Start to decode the crops of these draws."""
        for number, place in zip(numbers, places, strict=True):
            if number not in self._coming:
                self._coming[number] = self._executor.submit(self._decode, place, side)

    def crops(self, numbers: Sequence[int], places: Sequence[Place], side: int) -> Tensor:
        self.expect(numbers, places, side)
        crops = torch.stack([self._coming.pop(number).result() for number in numbers])
        if self.device.type != "cuda":
            return crops.to(self.device)
        return crops.pin_memory().to(self.device, non_blocking=True)

    def _decode(self, place: Place, side: int) -> Tensor:
        for step in range(len(self)):
            index = (place.index + step) % len(self)
            pixels = None if index in self._broken else read_pixels(self.sources[index])
            if pixels is not None:
                top, left = min(place.top, pixels.shape[0] - side), min(place.left, pixels.shape[1] - side)
                return torch.from_numpy(pixels[top : top + side, left : left + side].copy())
            if index not in self._broken:
                self._broken.add(index)
                self.unreadable += 1
        raise UserError(f"none of the {len(self)} pictures can be decoded; look at the data")


def load_pictures(
    sources: list[Source],
    crop: int,
    device: Device = "cpu",
    stream: Literal["auto", "on", "off"] = "auto",
    workers: int = 8,
    share: float = 0.3,
) -> Pictures:
    """A pool, or a stream if the decoded pictures would take more than `share` of the device's memory."""
    if stream == "off":
        return Pool(sources, crop, device)
    with ThreadPoolExecutor(workers) as executor:
        headers = list(executor.map(read_header, sources))
    needed = sum(3 * size[0] * size[1] for size in headers if size)
    if stream == "auto" and needed <= share * _memory(torch.device(device)):
        return Pool(sources, crop, device)
    return Stream(sources, headers, crop, device, workers)


def _memory(device: torch.device) -> int:
    """Bytes of memory where pictures would be kept."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):  # Windows
        return 8 << 30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Draws:
    """The endless, reproducible sequence of training crops: the n-th draw is a function of (seed, n).

    Each epoch is a new permutation. Process r of R takes the draws n = k·R + r.
    """

    def __init__(self, pool: Pictures, crop: int, seed: int, rank: int = 0, world: int = 1, flip: bool = True) -> None:
        self.pool, self.crop, self.seed, self.flip = pool, crop, seed, flip
        self.rank, self.world, self.position, self.device = rank, world, 0, pool.device
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng((seed, epoch)).permutation(len(pool)))

    def take(self, count: int) -> tuple[Tensor, list[int]]:
        """The next `count` crops in [-1, 1], (count, 3, crop, crop), and the numbers of their draws."""
        numbers = self.advance(count)
        return self.crops(numbers), numbers

    def advance(self, count: int) -> list[int]:
        """The numbers of the next `count` draws; a stream starts to decode them and those that follow."""
        numbers = self._numbers(count)
        self.position += count
        if isinstance(self.pool, Stream):
            coming = [*numbers, *self._numbers(2 * count)]
            self.pool.expect(coming, [self._place(n)[0] for n in coming], self.crop)
        return numbers

    def _numbers(self, count: int) -> list[int]:
        return [(self.position + i) * self.world + self.rank for i in range(count)]

    def crops(self, numbers: Sequence[int]) -> Tensor:
        placed = [self._place(number) for number in numbers]
        pixels = self.pool.crops(numbers, [place for place, _ in placed], self.crop)
        if self.flip:
            mirrored = on_device([flip for _, flip in placed], self.device, torch.bool).view(-1, 1, 1, 1)
            pixels = torch.where(mirrored, pixels.flip(2), pixels)
        return from_uint8(pixels.permute(0, 3, 1, 2)).contiguous()

    def _place(self, number: int) -> tuple[Place, bool]:
        epoch, offset = divmod(number, len(self.pool))
        index = int(self._order(epoch)[offset])
        rng = np.random.default_rng((self.seed, 1, number))
        top, left = (int(rng.integers(0, length - self.crop + 1)) for length in self.pool.sizes[index])
        return Place(index, top, left), self.flip and bool(rng.integers(0, 2))

    def times(self, numbers: Sequence[int], steps: int) -> list[int]:
        """Uniform timesteps of these draws, spread evenly over any run of consecutive draws."""
        golden = 0.6180339887498949
        return [int(steps * ((n * golden + self.seed * 0.37) % 1.0)) for n in numbers]

    def seeds(self, numbers: Sequence[int], purpose: Literal["measure", "noise"]) -> list[int]:
        """Seeds for the other random numbers of these draws."""
        return [derive_seed(self.seed, f"{purpose}/{n}") for n in numbers]


def centre_crops(pool: Pictures, crop: int, batch: int, limit: int | None = None) -> Iterator[tuple[Tensor, list[str]]]:
    """Centre crops in [-1, 1], in batches, with their names."""
    count = len(pool) if limit is None else min(limit, len(pool))
    for start in range(0, count, batch):
        chosen = range(start, min(start + batch, count))
        places = [Place(i, (pool.sizes[i][0] - crop) // 2, (pool.sizes[i][1] - crop) // 2) for i in chosen]
        # negative numbers, because the numbers of draws are not
        pixels = pool.crops([-1 - i for i in chosen], places, crop)
        yield from_uint8(pixels.permute(0, 3, 1, 2)), [pool.names[i] for i in chosen]
