"""Pictures for training and evaluation: found in folders, tar archives and the files of Hugging Face datasets, and decoded
at once or on demand."""

import hashlib
import os
import posixpath
import re
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.formats import Pixels
from ddc.images import Picture, from_uint8, quantise, read_size
from ddc.storage import Remote, located

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
TABLES = {".parquet", ".arrow"}
Size = tuple[int, ...]  # height and width
T = TypeVar("T")


class Source(NamedTuple):
    """A picture that is not decoded yet: a file, a member of a tar archive, or a row of a Hugging Face dataset."""

    name: str
    path: Path
    offset: int = 0  # of a member, in bytes; of a row, in its block
    size: int = -1  # of a member, in bytes
    block: int = 0  # a row's row group, in a Parquet file
    column: str | None = None  # that holds the pictures of a dataset

    def read(self, limit: int = -1) -> bytes:
        """The picture's bytes, or at least its first `limit` bytes."""
        if self.column is None:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read(limit if self.size < 0 or 0 <= limit < self.size else self.size)
        value = _table_block(self.path, self.block, self.column)[self.offset].as_py()
        if isinstance(value, dict):  # the bytes, or the path of a file
            value = value.get("bytes") or (self.path.parent / str(value.get("path"))).read_bytes()
        if not isinstance(value, bytes):
            raise ValueError(f"row {self.offset} of {self.path} holds no picture")
        return value


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """All pictures in folders (recursively), tar archives, dataset files and single files, sorted by name."""
    sources: list[Source] = []
    for path in paths:
        path = located(path) if ":/" in str(path) else path
        if path.is_dir():
            for inside in sorted(path.rglob("*"), key=lambda inside: (inside.suffix == ".tar", inside)):
                sources += _sources_in(inside, str(inside.relative_to(path)))
        elif path.is_file() and path.suffix.lower() in {*SUFFIXES, *TABLES, ".tar"}:
            sources += _sources_in(path, path.name)
        else:
            raise UserError(f"{path} is neither a folder, a tar archive nor a picture; --data takes those")
    if not sources:
        raise UserError(
            f"no pictures in {', '.join(map(str, paths))}; expected {', '.join(sorted(SUFFIXES))}, "
            ".tar archives, or .parquet or .arrow files of a Hugging Face dataset"
        )
    return sorted(sources, key=lambda source: source.name)


def _sources_in(path: Path, name: str) -> list[Source]:
    """The pictures in a file: itself, the members of a tar archive, or the rows of a dataset file."""
    suffix = path.suffix.lower()
    if suffix in TABLES:
        return _table_rows(path)
    if suffix != ".tar":
        return [Source(name, path)] if suffix in SUFFIXES else []
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            members = [m for m in archive if m.isfile() and Path(m.name).suffix.lower() in SUFFIXES]
    except tarfile.TarError as error:
        raise UserError(f"{path} is not a plain tar archive ({error}); unpack compressed ones first") from None
    # tar calls the file a.png of a folder "./a.png"; here it is "a.png"
    return [Source(posixpath.normpath(m.name), path, m.offset_data, m.size) for m in members]


def _table_rows(path: Path) -> list[Source]:
    """The rows of a dataset file; those of a Parquet file are in blocks, its row groups."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{path} is part of a Hugging Face dataset; to read it, `pip install pyarrow`") from None
    try:
        if path.suffix.lower() == ".parquet":
            file = pq.ParquetFile(path.open("rb") if isinstance(path, Remote) else path)
            schema = file.schema_arrow
            lengths = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        else:
            schema, lengths = _arrow_table(path).schema, [_arrow_table(path).num_rows]
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not a valid dataset file ({error}); copy it again") from None
    structs = [c.name for c in schema if pa.types.is_struct(c.type) and c.type.get_field_index("bytes") >= 0]
    binary = [c.name for c in schema if pa.types.is_binary(c.type) or pa.types.is_large_binary(c.type)]
    if not structs and not binary:
        names = ", ".join(schema.names)
        raise UserError(f"{path} has no column of pictures (bytes, or a struct of bytes and path) among {names}")
    column = (structs + binary)[0]
    places = enumerate((row, block) for block, length in enumerate(lengths) for row in range(length))
    return [Source(f"{path.stem}/{i:08d}", path, row, block=block, column=column) for i, (row, block) in places]


@lru_cache(maxsize=64)
def _arrow_table(path: Path) -> Any:
    """The table of an Arrow file (as `save_to_disk` writes it), mapped into memory; behind a URL, all of it is read."""
    import pyarrow as pa

    mapped = pa.BufferReader(path.read_bytes()) if isinstance(path, Remote) else pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(mapped).read_all()
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_file(mapped).read_all()


@lru_cache(maxsize=8)
def _table_block(path: Path, block: int, column: str) -> Any:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        file = pq.ParquetFile(path.open("rb") if isinstance(path, Remote) else path)
        return file.read_row_group(block, columns=[column]).column(column)
    return _arrow_table(path).column(column)


def split_holdout(sources: list[Source], modulo: int) -> tuple[list[Source], list[Source]]:
    """Training and validation parts; a file whose number is divisible by `modulo` is for validation."""
    if modulo <= 0:
        return sources, []

    def held_out(source: Source) -> bool:
        numbers = re.findall(r"\d+", Path(source.name).stem)
        return bool(numbers) and int(numbers[-1]) % modulo == 0

    return [s for s in sources if not held_out(s)], [s for s in sources if held_out(s)]


def read_pixels(source: Source) -> Pixels | None:
    """uint8 (H, W, 3), or None if it cannot be read."""
    try:
        pixels = quantise(Picture.read(source.name, source.read()).pixels, 8)
        return np.require(pixels, requirements=["C", "W"])  # grey is a view of one channel
    except (UserError, OSError, ValueError):
        return None


def read_header(source: Source) -> Size | None:
    """Height and width, from the first bytes of a picture if they are enough."""
    try:
        return read_size(source.read(1 << 16)) or read_size(source.read())
    except (OSError, ValueError):
        return None


class Place(NamedTuple):
    """The place of a crop: the picture's index, the crop's first row and column, and whether it is mirrored."""

    picture: int
    top: int
    left: int
    mirrored: bool = False


class Pictures(ABC):
    """The pictures that are not smaller than the crop, in order, with their sizes (height and width)."""

    def __init__(self, sources: list[Source], sizes: list[Size | None], crop: int, device: torch.device | str) -> None:
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
        self.contents = ""  # see `contents`
        self.count = f"{len(usable)} pictures"  # in words, with those that are not used
        self.count += f", {self.unreadable} unreadable passed over" if self.unreadable else ""
        self.count += f", {self.too_small} smaller than the crop passed over" if self.too_small else ""
        text = "\n".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))
        self.fingerprint = f"{len(usable)} pictures, {hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def crops(self, numbers: Sequence[int], places: Sequence[Place], table: Tensor, side: int) -> Tensor:
        """The crops of these draws in [-1, 1], (B, 3, side, side), on the device; `table` has the places there, (B, 4)."""
        pixels = self._pixels(numbers, places, table, side)
        if any(place.mirrored for place in places):
            pixels = torch.where(table[:, 3].bool().view(-1, 1, 1, 1), pixels.flip(2), pixels)
        return from_uint8(pixels.permute(0, 3, 1, 2))

    @abstractmethod
    def _pixels(self, numbers: Sequence[int], places: Sequence[Place], table: Tensor, side: int) -> Tensor:
        """The crops as uint8, (B, side, side, 3), not mirrored."""


class Pool(Pictures):
    """All pictures, decoded one after the other into one uint8 tensor on the device."""

    def __init__(self, sources: list[Source], crop: int, device: torch.device | str = "cpu", workers: int = 16) -> None:
        with ThreadPoolExecutor(workers) as executor:
            decoded = list(executor.map(read_pixels, sources))
        super().__init__(sources, [None if pixels is None else pixels.shape[:2] for pixels in decoded], crop, device)
        flat = [pixels.reshape(-1, 3) for i in self.indices if (pixels := decoded[i]) is not None]
        self.pixels = torch.from_numpy(np.concatenate(flat)).to(device)  # (total of height·width, 3)
        self.starts = torch.tensor([0, *np.cumsum([len(pixels) for pixels in flat])], device=device)
        self.widths = torch.tensor([size[1] for size in self.sizes], device=device)

    def _pixels(self, numbers: Sequence[int], places: Sequence[Place], table: Tensor, side: int) -> Tensor:
        index, top, left, _ = table.view(-1, 4, 1, 1).unbind(1)
        steps = torch.arange(side, device=self.device)
        return self.pixels[self.starts[index] + (top + steps.view(1, -1, 1)) * self.widths[index] + left + steps]


class Stream(Pictures):
    """Pictures that are decoded on demand, by threads that work ahead of the training.

    A picture with a valid header that cannot be decoded is replaced by the next one.
    """

    def __init__(
        self, sources: list[Source], sizes: list[Size | None], crop: int, device: torch.device | str, workers: int
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

    def _pixels(self, numbers: Sequence[int], places: Sequence[Place], table: Tensor, side: int) -> Tensor:
        self.expect(numbers, places, side)
        crops = torch.stack([self._coming.pop(number).result() for number in numbers])
        if self.device.type != "cuda":
            return crops.to(self.device)
        return crops.pin_memory().to(self.device, non_blocking=True)

    def _decode(self, place: Place, side: int) -> Tensor:
        for step in range(len(self.names)):
            index = (place.picture + step) % len(self.names)
            pixels = None if index in self._broken else read_pixels(self.sources[index])
            if pixels is not None:
                top, left = min(place.top, pixels.shape[0] - side), min(place.left, pixels.shape[1] - side)
                return torch.from_numpy(pixels[top : top + side, left : left + side].copy())
            if index not in self._broken:
                self._broken.add(index)
                self.unreadable += 1
        raise UserError(f"none of the {len(self.names)} pictures can be decoded; look at the data")


def contents(sources: list[Source], workers: int) -> str:
    """A short hash of the beginning (256 KB) and the length of each file: of most photographs, all there is."""

    def of(source: Source) -> bytes:
        try:
            beginning = source.read(1 << 18)
            length = source.path.stat().st_size if source.size < 0 and source.column is None else source.size
            return hashlib.sha256(f"{length} ".encode() + beginning).digest()
        except (OSError, ValueError):
            return b"unreadable"

    with ThreadPoolExecutor(workers) as executor:
        return hashlib.sha256(b"".join(executor.map(of, sources))).hexdigest()[:12]


def load_pictures(
    sources: list[Source],
    crop: int,
    device: torch.device | str = "cpu",
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
    if torch.device(device).type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:  # Windows has no sysconf
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    if stream == "auto" and needed <= share * memory:
        return Pool(sources, crop, device)
    return Stream(sources, headers, crop, device, workers)


# -- clean pictures for evaluation --------------------------------------------------------------------------------


def evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, spread over all of them. A smaller count that divides a larger one selects some of the same."""
    return list(items[:: max(len(items) // max(count, 1), 1)][:count])


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
