"""Where pictures for training and evaluation are found: folders, tar archives, and the files of Hugging Face datasets."""

import posixpath
import re
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.formats import Pixels, read_size
from ddc.images import Picture, quantise

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
TABLES = {".parquet", ".arrow"}
Size = tuple[int, ...]  # height and width


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
        with tarfile.open(path, "r:") as archive:
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
            file = pq.ParquetFile(path)
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
    """The table of an Arrow file (as `save_to_disk` writes it), mapped into memory."""
    import pyarrow as pa

    mapped = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(mapped).read_all()
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_file(mapped).read_all()


@lru_cache(maxsize=8)
def _table_block(path: Path, block: int, column: str) -> Any:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        return pq.ParquetFile(path).read_row_group(block, columns=[column]).column(column)
    return _arrow_table(path).column(column)


def split_holdout(sources: list[Source], modulo: int) -> tuple[list[Source], list[Source]]:
    """Training and validation parts; a file whose number is divisible by `modulo` is for validation."""
    if modulo <= 0:
        return sources, []

    def held_out(source: Source) -> bool:
        numbers = re.findall(r"\d+", Path(source.name).stem)
        return bool(numbers) and int(numbers[-1]) % modulo == 0

    return [s for s in sources if not held_out(s)], [s for s in sources if held_out(s)]


def decode(source: Source) -> Tensor | None:
    """The picture as uint8 (3, H, W), or None if it cannot be read."""
    pixels = read_pixels(source)
    return None if pixels is None else torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


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
