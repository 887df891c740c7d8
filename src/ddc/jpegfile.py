"""Reads from a JPEG file how it was compressed."""

import functools
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, JpegImagePlugin

from ddc.errors import UserError
from ddc.formats import Pixels, open_image
from ddc.images import Picture


@functools.lru_cache
def _standard_tables() -> dict[int, Pixels]:
    """Returns the luminance quantisation table of every quality, as libjpeg writes it."""
    tables = {}
    for quality in range(1, 101):
        buffer = io.BytesIO()
        Image.new("L", (8, 8)).save(buffer, "JPEG", quality=quality)
        tables[quality] = np.asarray(Image.open(buffer).quantization[0])  # type: ignore[attr-defined]
    return tables


class JPEGSettings(NamedTuple):
    """How a JPEG file was written: its quantisation tables, and Pillow's number for its chroma subsampling."""

    tables: tuple[tuple[int, ...], ...]
    sampling: int

    @property
    def quality(self) -> int:
        """The quality, 1 to 100, whose standard table is nearest to the file's luminance table."""
        standard, own = _standard_tables(), np.asarray(self.tables[0])
        return min(standard, key=lambda quality: int(np.abs(standard[quality] - own).sum()))

    def apply(self, pixels: Pixels) -> Pixels:
        """Compresses 8-bit pixels (H, W, C) with these settings, and decodes them again."""
        file = io.BytesIO()
        tables = [list(table) for table in self.tables]
        Image.fromarray(pixels.squeeze()).save(file, "JPEG", qtables=tables, subsampling=self.sampling)
        with Image.open(file) as image:
            return np.asarray(image).reshape(pixels.shape)


def jpeg_settings(path: str | Path | bytes | None) -> JPEGSettings | None:
    """Returns how a file was written, or None if there is no file or it is not a JPEG."""
    if path is None:
        return None
    try:
        with open_image(path) as image:
            found = getattr(image, "quantization", {})
            tables = tuple(tuple(found[number]) for number in sorted(found))
            sampling = JpegImagePlugin.get_sampling(image) if tables else -1
    except Exception:  # as in `read_file`
        return None
    return JPEGSettings(tables, sampling) if tables and len(tables[0]) == 64 else None


def jpeg_quality(path: str | Path, content: bytes | None = None) -> int:
    """Returns the quality (1 to 100) that a JPEG file, or its `content`, was written with, from its quantisation table."""
    settings = jpeg_settings(path if content is None else content)
    if settings is None:
        raise UserError(f"{path} is not a JPEG file, so its quality cannot be read; name it, as in --task jpeg10")
    return settings.quality


def jpeg_noise(picture: Picture) -> float:
    """Returns σ_y, in [0, 1] units, of the error that JPEG left in a picture's luma; 0 if its file is not a JPEG.

    Each coefficient was rounded to a multiple of its step q, an error of q/√12. Where most became 0 they were
    smaller than that: with a Laplace distribution of scale b, the share p that did not become 0 is
    exp(−q / 2b), and the error is √2·b.
    """
    settings = jpeg_settings(picture.file) if picture.is_jpeg else None
    if picture.file is None or settings is None:
        return 0.0
    try:
        with open_image(picture.file) as image:
            grey = np.asarray(image.convert("L"))  # not turned upright, which would move its blocks
    except Exception:  # as in `read_file`
        return 0.0
    rows, columns = (min(length // 8 * 8, 1024) for length in grey.shape)  # a part is enough
    if not rows or not columns:
        return 0.0
    steps = np.asarray(settings.tables[0], np.float64).reshape(8, 8)
    k = np.arange(8)
    cosine = np.cos((2 * k[None] + 1) * k[:, None] * np.pi / 16) / 2
    cosine[0] /= 2**0.5
    blocks = grey[:rows, :columns].astype(np.float64).reshape(rows // 8, 8, columns // 8, 8).swapaxes(1, 2)
    kept = (np.abs(cosine @ blocks @ cosine.T) >= steps / 2).mean((0, 1)).clip(1e-6, 1 - 1e-6)
    variance = np.minimum(steps**2 / 12, 2 * (steps / (2 * np.log(1 / kept))) ** 2)
    return float(variance.mean() ** 0.5 / 255)
