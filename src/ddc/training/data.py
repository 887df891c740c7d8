"""Training pictures: decoded once and kept on the device as uint8, or streamed by workers.

Which picture, crop and flip the n-th draw gets depends on (seed, n) alone, so that a position in the data is
one number, resuming is exact, and two processes see what one process with twice the batch would see.
"""

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ddc.errors import UserError
from ddc.noise import derive_seed

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}


@dataclass(frozen=True)
class Source:
    """One undecoded picture: a file, or a member of a tar archive (offset and size within it)."""

    name: str
    path: Path
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """All pictures in folders (recursively), tar archives and single files, sorted by name."""
    sources: list[Source] = []
    for path in paths:
        if path.is_dir():
            found = [
                Source(str(p.relative_to(path)), p) for p in path.rglob("*") if p.suffix.lower() in SUFFIXES
            ]
            for archive in sorted(path.rglob("*.tar")):
                found += _tar_members(archive)
            sources += found
        elif path.suffix == ".tar" and path.is_file():
            sources += _tar_members(path)
        elif path.is_file() and path.suffix.lower() in SUFFIXES:
            sources.append(Source(path.name, path))
        else:
            raise UserError(f"{path} is neither a folder, a tar archive nor a picture; --data takes those")
    if not sources:
        raise UserError(
            f"no pictures in {', '.join(map(str, paths))}; expected {', '.join(sorted(SUFFIXES))} or .tar archives"
        )
    return sorted(sources, key=lambda source: source.name)


def _tar_members(path: Path) -> list[Source]:
    try:
        with tarfile.open(path, "r:") as archive:
            return [
                Source(m.name, path, m.offset_data, m.size)
                for m in archive
                if m.isfile() and Path(m.name).suffix.lower() in SUFFIXES
            ]
    except tarfile.TarError as error:
        raise UserError(
            f"{path} is not a plain tar archive ({error}); compressed ones must be unpacked first"
        ) from None


def split_holdout(sources: list[Source], modulo: int) -> tuple[list[Source], list[Source]]:
    """Training and validation parts: validation is every file whose number in its name divides by `modulo`."""
    if modulo <= 0:
        return sources, []

    def held_out(source: Source) -> bool:
        numbers = re.findall(r"\d+", Path(source.name).stem)
        return bool(numbers) and int(numbers[-1]) % modulo == 0

    return [s for s in sources if not held_out(s)], [s for s in sources if held_out(s)]


def decode(source: Source) -> Tensor | None:
    """A uint8 (3, H, W) picture, or None for a file that cannot be read."""
    try:
        with Image.open(io.BytesIO(source.read())) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        return None


@dataclass
class Pool:
    """Decoded pictures, padded into one uint8 tensor (N, 3, H, W), with their true sizes."""

    pixels: Tensor
    sizes: Tensor  # (N, 2) height and width
    names: list[str]
    unreadable: int = 0
    too_small: int = 0

    def __len__(self) -> int:
        return len(self.names)

    def report(self) -> str:
        text = f"{len(self)} pictures"
        if self.unreadable:
            text += f", {self.unreadable} unreadable passed over"
        if self.too_small:
            text += f", {self.too_small} smaller than the crop passed over"
        return text


def load_pool(
    sources: list[Source], crop: int, device: torch.device | str = "cpu", workers: int = 16
) -> Pool:
    """Decode everything once; pictures below the crop are passed over with a count."""
    with ThreadPoolExecutor(workers) as executor:
        decoded = list(executor.map(decode, sources))
    unreadable = sum(image is None for image in decoded)
    kept = [
        (s.name, im)
        for s, im in zip(sources, decoded, strict=True)
        if im is not None and min(im.shape[1:]) >= crop
    ]
    too_small = len(sources) - unreadable - len(kept)
    if not kept:
        raise UserError(
            f"none of {len(sources)} pictures can be used: {unreadable} unreadable, {too_small} smaller than the "
            f"{crop}-pixel crop; give larger pictures or a smaller --crop"
        )
    height = max(im.shape[1] for _, im in kept)
    width = max(im.shape[2] for _, im in kept)
    pixels = torch.zeros(len(kept), 3, height, width, dtype=torch.uint8)
    for i, (_, image) in enumerate(kept):
        pixels[i, :, : image.shape[1], : image.shape[2]] = image
    sizes = torch.tensor([image.shape[1:] for _, image in kept])
    return Pool(pixels.to(device), sizes, [name for name, _ in kept], unreadable, too_small)


class Draws:
    """The endless, reproducible sequence of training crops: the n-th draw is a function of (seed, n).

    Each epoch is a fresh permutation. Process r of R takes the draws n = k·R + r.
    """

    def __init__(
        self, pool: Pool, crop: int, seed: int, rank: int = 0, world: int = 1, flip: bool = True
    ) -> None:
        self.pool, self.crop, self.seed, self.flip = pool, crop, seed, flip
        self.rank, self.world = rank, world
        self.position = 0
        self._epoch = -1
        self._order = np.arange(0)

    def take(self, count: int) -> tuple[Tensor, list[int]]:
        """The next `count` crops in [-1, 1], (count, 3, crop, crop), and the numbers of their draws."""
        numbers = [(self.position + i) * self.world + self.rank for i in range(count)]
        self.position += count
        return self.crops(numbers), numbers

    def crops(self, numbers: Sequence[int]) -> Tensor:
        device = self.pool.pixels.device
        index, top, left, flip = (torch.tensor(v) for v in zip(*map(self._place, numbers), strict=True))
        index, top, left, flip = (v.to(device, non_blocking=True) for v in (index, top, left, flip))
        steps = torch.arange(self.crop, device=device)
        rows = top[:, None] + steps
        columns = left[:, None] + torch.where(flip[:, None], self.crop - 1 - steps, steps)
        i, r, c = index[:, None, None], rows[:, :, None], columns[:, None, :]
        pixels = self.pool.pixels.permute(0, 2, 3, 1)[i, r, c]  # (B, crop, crop, 3)
        return pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1).contiguous()

    def _place(self, number: int) -> tuple[int, int, int, bool]:
        epoch, offset = divmod(number, len(self.pool))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self.pool))
            self._epoch = epoch
        index = int(self._order[offset])
        rng = np.random.default_rng((self.seed, 1, number))
        height, width = (int(v) for v in self.pool.sizes[index])
        top = int(rng.integers(0, height - self.crop + 1))
        left = int(rng.integers(0, width - self.crop + 1))
        return index, top, left, self.flip and bool(rng.integers(0, 2))

    def times(self, numbers: Sequence[int], steps: int, device: torch.device) -> Tensor:
        """Uniform timesteps of these draws, (B,), spread evenly over any run of consecutive draws."""
        golden = 0.6180339887498949
        return torch.tensor(
            [int(steps * ((n * golden + self.seed * 0.37) % 1.0)) for n in numbers], device=device
        )

    def seeds(self, numbers: Sequence[int], purpose: Literal["measure", "noise"]) -> list[int]:
        """Seeds for the other random numbers of these draws."""
        return [derive_seed(self.seed, f"{purpose}/{n}") for n in numbers]


def centre_crops(pool: Pool, crop: int, batch: int) -> Iterator[tuple[Tensor, list[str]]]:
    """Validation pictures: centre crops in [-1, 1], in batches, with their names."""
    for start in range(0, len(pool), batch):
        stop = min(start + batch, len(pool))
        crops = []
        for i in range(start, stop):
            height, width = (int(v) for v in pool.sizes[i])
            top, left = (height - crop) // 2, (width - crop) // 2
            crops.append(pool.pixels[i, :, top : top + crop, left : left + crop])
        yield torch.stack(crops).float().div_(127.5).sub_(1), pool.names[start:stop]
