"""Training pictures: decoded once and kept on the device as uint8, or streamed by workers.

Which picture, crop and flip the n-th draw gets depends on (seed, n) alone, so that a position in the data is
one number, resuming is exact, and two processes see what one process with twice the batch would see.
"""

import hashlib
import io
import os
import posixpath
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ddc.errors import UserError
from ddc.noise import derive_seed, on_device

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
TABLES = {".parquet", ".arrow"}
_BROKEN = (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Source:
    """One undecoded picture: a file, or a member of a tar archive (offset and size within it)."""

    name: str
    path: Path
    offset: int = 0
    size: int = -1

    def read(self, limit: int | None = None) -> bytes:
        """The picture's bytes, or only the first of them."""
        size = self.size if limit is None else (limit if self.size < 0 else min(limit, self.size))
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(size)


@dataclass(frozen=True)
class TableRow(Source):
    """One row of a Hugging Face dataset's Parquet or Arrow file; `offset` is its row, `size` its block."""

    column: str = "image"

    def read(self, limit: int | None = None) -> bytes:
        value = _table_block(self.path, self.size, self.column)[self.offset].as_py()
        if isinstance(value, dict):
            if value.get("bytes") is None:
                return (self.path.parent / str(value.get("path"))).read_bytes()
            value = value["bytes"]
        if not isinstance(value, bytes):
            raise ValueError(f"row {self.offset} of {self.path} holds no picture")
        return value


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """All pictures in folders (recursively), tar archives, dataset files and single files, sorted by name."""
    sources: list[Source] = []
    for path in paths:
        if path.is_dir():
            for inside in path.rglob("*"):
                suffix = inside.suffix.lower()
                if suffix in SUFFIXES:
                    sources.append(Source(str(inside.relative_to(path)), inside))
                elif suffix in TABLES:
                    sources += _table_rows(inside)
            for archive in sorted(path.rglob("*.tar")):
                sources += _tar_members(archive)
        elif path.suffix == ".tar" and path.is_file():
            sources += _tar_members(path)
        elif path.suffix.lower() in TABLES and path.is_file():
            sources += _table_rows(path)
        elif path.is_file() and path.suffix.lower() in SUFFIXES:
            sources.append(Source(path.name, path))
        else:
            raise UserError(f"{path} is neither a folder, a tar archive nor a picture; --data takes those")
    if not sources:
        raise UserError(
            f"no pictures in {', '.join(map(str, paths))}; expected {', '.join(sorted(SUFFIXES))}, "
            ".tar archives, or .parquet or .arrow files of a Hugging Face dataset"
        )
    return sorted(sources, key=lambda source: source.name)


def _tar_members(path: Path) -> list[Source]:
    """The pictures in an archive; "./a.png", as tar names what is in a folder, is the "a.png" of that folder."""
    try:
        with tarfile.open(path, "r:") as archive:
            return [
                Source(posixpath.normpath(m.name), path, m.offset_data, m.size)
                for m in archive
                if m.isfile() and Path(m.name).suffix.lower() in SUFFIXES
            ]
    except tarfile.TarError as error:
        raise UserError(
            f"{path} is not a plain tar archive ({error}); compressed ones must be unpacked first"
        ) from None


def _table_rows(path: Path) -> list[Source]:
    """The rows of a dataset file, with the block (row group or record batch) that each lies in."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(
            f"{path} belongs to a Hugging Face dataset, which needs pyarrow; install it with `pip install pyarrow`"
        ) from None
    try:
        if path.suffix.lower() == ".parquet":
            file = pq.ParquetFile(path)
            schema = file.schema_arrow
            lengths = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        else:
            batches = _arrow_batches(path)
            schema, lengths = batches[0].schema, [batch.num_rows for batch in batches]
    except (pa.ArrowInvalid, IndexError, OSError) as error:
        raise UserError(f"{path} is not a good dataset file ({error}); copy it again") from None
    column = _image_column(schema)
    if column is None:
        raise UserError(
            f"{path} has no column of pictures; expected bytes, or a struct of bytes and path, among "
            f"{', '.join(schema.names)}"
        )
    first, rows = 0, []
    for block, length in enumerate(lengths):
        rows += [
            TableRow(f"{path.stem}/{first + row:08d}", path, row, block, column) for row in range(length)
        ]
        first += length
    return list(rows)


def _image_column(schema: Any) -> str | None:
    import pyarrow as pa

    for entry in schema:
        if pa.types.is_struct(entry.type) and entry.type.get_field_index("bytes") >= 0:
            return str(entry.name)
    for entry in schema:
        if pa.types.is_binary(entry.type) or pa.types.is_large_binary(entry.type):
            return str(entry.name)
    return None


@lru_cache(maxsize=64)
def _arrow_batches(path: Path) -> list[Any]:
    """The record batches of an Arrow file (as `save_to_disk` writes it), mapped into memory and not read."""
    import pyarrow as pa

    mapped = pa.memory_map(str(path))
    try:
        return list(pa.ipc.open_stream(mapped))
    except pa.ArrowInvalid:
        mapped.seek(0)
        reader = pa.ipc.open_file(mapped)
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]


@lru_cache(maxsize=8)
def _table_block(path: Path, block: int, column: str) -> Any:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        return pq.ParquetFile(path).read_row_group(block, columns=[column]).column(column)
    return _arrow_batches(path)[block].column(column)


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
    pixels = _pixels(source)
    return None if pixels is None else torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _pixels(source: Source) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    try:
        with Image.open(io.BytesIO(source.read())) as image:
            return np.array(image.convert("RGB"))
    except _BROKEN:
        return None


def _header(source: Source) -> tuple[int, int] | None:
    """Height and width, from the first bytes of a picture; from all of it where they lie further behind."""
    for limit in (1 << 16, None):
        try:
            with Image.open(io.BytesIO(source.read(limit))) as image:
                return image.height, image.width
        except _BROKEN:
            continue
    return None


@dataclass
class Place:
    """Where a crop lies: the picture's index, and the crop's first row and column."""

    index: int
    top: int
    left: int


@dataclass
class Pictures(ABC):
    """The pictures that can be used, in order, with their sizes."""

    names: list[str]
    sizes: list[tuple[int, int]]  # height and width
    device: torch.device
    unreadable: int = 0
    too_small: int = 0

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def crops(self, numbers: Sequence[int], places: Sequence[Place], side: int) -> Tensor:
        """The crops of these draws: uint8, (B, side, side, 3), on the device."""

    def expect(self, numbers: Sequence[int], places: Sequence[Place], side: int) -> None:
        """These will be asked for soon."""

    def report(self) -> str:
        text = f"{len(self)} pictures"
        if self.unreadable:
            text += f", {self.unreadable} unreadable passed over"
        if self.too_small:
            text += f", {self.too_small} smaller than the crop passed over"
        return text

    def fingerprint(self) -> str:
        """A short hash of names and sizes: draws mean the same pictures only where it is the same."""
        text = "\n".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"{len(self)} pictures, {hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass
class Pool(Pictures):
    """Decoded pictures, one after the other in one uint8 tensor on the device."""

    pixels: Tensor = field(kw_only=True)  # (total of height·width, 3)

    def __post_init__(self) -> None:
        areas = [height * width for height, width in self.sizes]
        self.starts = [0, *np.cumsum(areas).tolist()]

    def crops(self, numbers: Sequence[int], places: Sequence[Place], side: int) -> Tensor:
        corners = [self.starts[p.index] + p.top * self.sizes[p.index][1] + p.left for p in places]
        widths = [self.sizes[p.index][1] for p in places]
        corner, width = on_device([corners, widths], self.device, torch.int64).view(2, -1, 1, 1)
        steps = torch.arange(side, device=self.device)
        return self.pixels[corner + steps.view(1, -1, 1) * width + steps]


@dataclass
class Stream(Pictures):
    """Pictures that are decoded when they are needed, by threads that work ahead of the training.

    A picture whose header is good and whose body is not is found late: the next one takes its place.
    """

    sources: list[Source] = field(kw_only=True)
    workers: int = 8

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        self._coming: dict[int, Future[Tensor]] = {}
        self._broken: set[int] = set()

    def expect(self, numbers: Sequence[int], places: Sequence[Place], side: int) -> None:
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
            pixels = None if index in self._broken else _pixels(self.sources[index])
            if pixels is None:
                if index not in self._broken:
                    self._broken.add(index)
                    self.unreadable += 1
                continue
            height, width = pixels.shape[:2]
            top, left = min(place.top, height - side), min(place.left, width - side)
            return torch.from_numpy(pixels[top : top + side, left : left + side].copy())
        raise UserError(f"none of the {len(self)} pictures can be decoded; look at the data")


def load_pool(
    sources: list[Source], crop: int, device: torch.device | str = "cpu", workers: int = 16
) -> Pool:
    """Decode everything once; pictures below the crop are passed over with a count."""
    with ThreadPoolExecutor(workers) as executor:
        decoded = list(executor.map(_pixels, sources))
    unreadable = sum(pixels is None for pixels in decoded)
    kept = [
        (source.name, pixels)
        for source, pixels in zip(sources, decoded, strict=True)
        if pixels is not None and min(pixels.shape[:2]) >= crop
    ]
    too_small = len(sources) - unreadable - len(kept)
    _check_some(len(kept), len(sources), unreadable, too_small, crop)
    sizes = [(pixels.shape[0], pixels.shape[1]) for _, pixels in kept]
    flat = torch.from_numpy(np.concatenate([pixels.reshape(-1, 3) for _, pixels in kept]))
    names = [name for name, _ in kept]
    return Pool(names, sizes, torch.device(device), unreadable, too_small, pixels=flat.to(device))


def open_stream(
    sources: list[Source],
    headers: list[tuple[int, int] | None],
    crop: int,
    device: torch.device | str = "cpu",
    workers: int = 8,
) -> Stream:
    """The pictures whose headers are good and large enough, to be decoded when needed."""
    kept = [(s, size) for s, size in zip(sources, headers, strict=True) if size and min(size) >= crop]
    unreadable = sum(size is None for size in headers)
    too_small = len(sources) - unreadable - len(kept)
    _check_some(len(kept), len(sources), unreadable, too_small, crop)
    return Stream(
        [source.name for source, _ in kept],
        [size for _, size in kept],
        torch.device(device),
        unreadable,
        too_small,
        sources=[source for source, _ in kept],
        workers=workers,
    )


def _check_some(kept: int, found: int, unreadable: int, too_small: int, crop: int) -> None:
    if kept == 0:
        raise UserError(
            f"none of {found} pictures can be used: {unreadable} unreadable, {too_small} smaller than the "
            f"{crop}-pixel crop; give larger pictures or a smaller --crop"
        )


def load_pictures(
    sources: list[Source],
    crop: int,
    device: torch.device | str = "cpu",
    stream: Literal["auto", "on", "off"] = "auto",
    workers: int = 8,
    share: float = 0.3,
) -> Pictures:
    """A pool, or a stream where the decoded pictures would take more than `share` of the device's memory."""
    if stream == "off":
        return load_pool(sources, crop, device)
    with ThreadPoolExecutor(workers) as executor:
        headers = list(executor.map(_header, sources))
    needed = sum(3 * size[0] * size[1] for size in headers if size)
    if stream == "on" or needed > share * _memory(torch.device(device)):
        return open_stream(sources, headers, crop, device, workers)
    return load_pool(sources, crop, device)


def _memory(device: torch.device) -> int:
    """Bytes of memory where pictures would be kept."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):  # Windows
        return 8 << 30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Draws:
    """The endless, reproducible sequence of training crops: the n-th draw is a function of (seed, n).

    Each epoch is a fresh permutation. Process r of R takes the draws n = k·R + r.
    """

    def __init__(
        self, pool: Pictures, crop: int, seed: int, rank: int = 0, world: int = 1, flip: bool = True
    ) -> None:
        self.pool, self.crop, self.seed, self.flip = pool, crop, seed, flip
        self.rank, self.world = rank, world
        self.position = 0
        self.device = pool.device
        self._order = lru_cache(maxsize=2)(self._permutation)

    def take(self, count: int) -> tuple[Tensor, list[int]]:
        """The next `count` crops in [-1, 1], (count, 3, crop, crop), and the numbers of their draws."""
        numbers = self.advance(count)
        return self.crops(numbers), numbers

    def advance(self, count: int) -> list[int]:
        """The numbers of the next `count` draws; what follows them is made ready."""
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
        return pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1).contiguous()

    def _place(self, number: int) -> tuple[Place, bool]:
        epoch, offset = divmod(number, len(self.pool))
        index = int(self._order(epoch)[offset])
        rng = np.random.default_rng((self.seed, 1, number))
        height, width = self.pool.sizes[index]
        top = int(rng.integers(0, height - self.crop + 1))
        left = int(rng.integers(0, width - self.crop + 1))
        return Place(index, top, left), self.flip and bool(rng.integers(0, 2))

    def _permutation(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.pool))

    def times(self, numbers: Sequence[int], steps: int) -> list[int]:
        """Uniform timesteps of these draws, spread evenly over any run of consecutive draws."""
        golden = 0.6180339887498949
        return [int(steps * ((n * golden + self.seed * 0.37) % 1.0)) for n in numbers]

    def seeds(self, numbers: Sequence[int], purpose: Literal["measure", "noise"]) -> list[int]:
        """Seeds for the other random numbers of these draws."""
        return [derive_seed(self.seed, f"{purpose}/{n}") for n in numbers]


def centre_crops(
    pool: Pictures, crop: int, batch: int, limit: int | None = None
) -> Iterator[tuple[Tensor, list[str]]]:
    """Centre crops in [-1, 1], in batches, with their names."""
    count = len(pool) if limit is None else min(limit, len(pool))
    for start in range(0, count, batch):
        chosen = range(start, min(start + batch, count))
        places = [Place(i, (pool.sizes[i][0] - crop) // 2, (pool.sizes[i][1] - crop) // 2) for i in chosen]
        # numbers below zero, so that no draw is taken for one of these
        pixels = pool.crops([-1 - i for i in chosen], places, crop)
        yield pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1), [pool.names[i] for i in chosen]
