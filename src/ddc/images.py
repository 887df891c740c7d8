"""Reading and writing pictures; the only place that knows uint8, [0, 1], [-1, 1] and σ units.

A `Picture` keeps what a file said about itself (bit depth, grey or colour, alpha, ICC profile, EXIF), so
that the restored picture can say it too.
"""

import functools
import io
import logging
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ddc.errors import UserError

logger = logging.getLogger("ddc")

Number = TypeVar("Number", float, Tensor)
Pixels = np.ndarray[Any, np.dtype[Any]]

FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jfif": "JPEG",
    ".webp": "WEBP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".bmp": "BMP",
    ".heic": "HEIF",
    ".heif": "HEIF",
    ".npy": "NPY",
}
READABLE = "PNG, JPEG, WebP, TIFF, BMP, HEIC or .npy"
KEEPS_ALPHA = {"PNG", "WEBP", "TIFF", "HEIF", "NPY"}
KEEPS_16_BITS = {"PNG", "TIFF"}
# The noise, in [0, 1] units, that rounding to 8 bits amounts to: half more than its spread of 1/√12 levels, for in
# smooth parts of a picture its errors lie together in bands.
ROUNDING_8_BIT = 1.5 / (255 * 12**0.5)
MAX_PIXELS = 178_956_970  # a file that claims more is taken for a decompression bomb

# What describes the pixels' layout in a TIFF directory and would be wrong in another file.
_LAYOUT_TAGS = {
    *range(254, 260),
    *(262, 266, 273, 274, 277, 278, 279, 284, 292, 293, 317, 320, 322, 323, 324, 325, 330, 338, 339, 347),
    *range(512, 533),
    34675,
}
_ORIENTATION = 0x0112
_TOP = {np.dtype(np.uint8): np.float32(255), np.dtype(np.uint16): np.float32(65535)}
_MALFORMED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    zlib.error,
)


def internal_sigma(sigma_y: Number) -> Number:
    """σ_y of [0, 1] pictures → σ of the [-1, 1] pictures that everything inside works on."""
    return 2 * sigma_y


def to_internal(x: Tensor) -> Tensor:
    """[0, 1] → [-1, 1]."""
    return 2 * x - 1


def to_unit(x: Tensor) -> Tensor:
    """[-1, 1] → [0, 1], clipped."""
    return ((x + 1) / 2).clamp(0, 1)


@dataclass(frozen=True, eq=False)
class Picture:
    """Pixels as they are stored, and what is kept beside them."""

    # (H, W, 3); uint8, uint16, or float32 in [0, 1]; grey is three equal channels
    pixels: Pixels = field(repr=False)
    alpha: Pixels | None = field(default=None, repr=False)  # (H, W), of the same kind
    bits: int = 8  # of each channel in the file: 8, 16, or 32 for floating point
    grey: bool = False
    icc: bytes | None = field(default=None, repr=False)
    # upright: the orientation has been applied and says so
    exif: bytes | None = field(default=None, repr=False)
    path: Path | None = None

    @property
    def in_8_bits(self) -> bool:
        """Whether the pixels are whole levels of 8 bits, also where they came as floating-point numbers."""
        if self.pixels.dtype != np.float32:
            return bool(self.pixels.dtype == np.uint8)
        top, left = (max(0, (length - 256) // 2) for length in self.size)  # its middle will tell
        levels = self.pixels[top : top + 256, left : left + 256] * 255
        return bool((np.abs(levels - np.rint(levels)) < 1e-3).all())

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def tensor(self) -> Tensor:
        """(3, H, W), float32 in [0, 1]."""
        return self.window(0, 0, *self.size)

    def window(self, top: int, left: int, height: int, width: int) -> Tensor:
        """A part of the picture, (3, height, width), float32 in [0, 1]; only that part is converted."""
        part = self.pixels[top : top + height, left : left + width]
        return torch.from_numpy(unit_float(part).transpose(2, 0, 1).copy())

    @property
    def mask(self) -> Tensor | None:
        """Alpha as a map of observed pixels, (1, H, W) with 1 where alpha is at least a half."""
        if self.alpha is None:
            return None
        return torch.from_numpy((unit_float(self.alpha) >= 0.5).astype(np.float32))[None]

    @staticmethod
    def from_tensor(x: Tensor, **kept: Any) -> "Picture":
        """From (3, H, W) or (1, H, W) in [0, 1]. Values are kept as they are; writing clips them."""
        if x.dim() != 3 or x.shape[0] not in (1, 3):
            raise UserError(f"a picture's tensor is (3, H, W), not {tuple(x.shape)}")
        pixels = np.broadcast_to(x.detach().float().cpu().permute(1, 2, 0).numpy(), (*x.shape[1:], 3))
        return Picture(pixels, **kept)

    @staticmethod
    def read(path: str | Path) -> "Picture":
        """Read a file. What cannot be read is a `UserError` that names it."""
        return _read(Path(path))

    def write(self, path: str | Path, quality: int = 95) -> None:
        """Write a file, in the format of its name. It appears whole or not at all."""
        _write(self, Path(path), quality)


def unit_float(pixels: Pixels) -> Pixels:
    """uint8, uint16 or float → float32 in [0, 1]."""
    top = _TOP.get(pixels.dtype)
    return pixels.astype(np.float32, copy=False) if top is None else pixels.astype(np.float32) / top


def quantise(pixels: Pixels, bits: int) -> Pixels:
    """To uint8 or uint16, rounded to nearest and clipped; by bands of rows, to keep memory low."""
    dtype = np.dtype(np.uint8 if bits == 8 else np.uint16)
    if pixels.dtype == dtype:
        return pixels
    top = _TOP[dtype]
    out = np.empty(pixels.shape, dtype)
    for row in range(0, pixels.shape[0], 64):
        band = unit_float(pixels[row : row + 64]) * top
        out[row : row + 64] = np.rint(band.clip(0, top))
    return out


# ---------------------------------------------------------------------------------------------------------
# reading


def _read(path: Path) -> Picture:
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected one picture")
    if not path.stat().st_size:
        raise UserError(f"{path} is empty (0 bytes); copy it again")
    if path.suffix.lower() == ".npy":
        return _read_npy(path)
    from PIL import Image

    if FORMATS.get(path.suffix.lower()) == "HEIF":
        _register_heif(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own limit is checked below; odd EXIF is no reason to speak
            with Image.open(path) as image:
                _check_size(path, image.size)
                pages = getattr(image, "n_frames", 1)
                # in others these are small previews
                if pages > 1 and image.format in ("TIFF", "WEBP", "PNG"):
                    logger.warning("%s has %d pages; the first is read", path, pages)
                return _from_pillow(path, image)
    except UserError:
        raise
    except Image.DecompressionBombError:
        raise UserError(
            f"{path} claims more than {MAX_PIXELS / 1e6:.0f} megapixels; cut it into parts"
        ) from None
    except Image.UnidentifiedImageError:
        raise UserError(f"{path} is not a picture that can be read; expected {READABLE}") from None
    except _MALFORMED as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is damaged or cut short ({reason}); copy it again") from None


def _check_size(path: Path, size: Sequence[int]) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise UserError(
            f"{path} has {size[0]}×{size[1]} pixels, more than the limit of {MAX_PIXELS / 1e6:.0f} megapixels; "
            "cut it into parts"
        )


def _register_heif(path: Path) -> None:
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        raise UserError(f"{path} is HEIC, which needs another package: pip install 'ddc[heic]'") from None
    register_heif_opener()


def _from_pillow(path: Path, image: Any) -> Picture:
    readers = {"TIFF": _tiff_16_bit, "PNG": _png_16_bit}
    deep = readers[image.format](path, image) if image.format in readers else None
    exif, orientation = _upright_exif(image)
    icc = image.info.get("icc_profile") or None
    if deep is not None:
        pixels = deep
    elif image.mode.startswith("I;16") or image.mode == "I":
        pixels = np.asarray(image)
        if pixels.dtype != np.uint16:
            if pixels.min() < 0 or pixels.max() > 65535:
                raise UserError(f"{path} has 32-bit whole numbers; expected 8 or 16 bits a channel")
            pixels = pixels.astype(np.uint16)
    elif image.mode == "F":
        pixels = checked_floats(path, np.array(image))
    else:
        if image.mode == "CMYK":
            image, icc = _from_cmyk(image, icc), None
        grey = image.mode in ("1", "L", "LA", "La")
        transparent = image.has_transparency_data
        wanted = ("LA" if transparent else "L") if grey else ("RGBA" if transparent else "RGB")
        pixels = np.array(image if image.mode == wanted else image.convert(wanted))
    pixels = np.ascontiguousarray(_turn(pixels, orientation))
    return _assemble(pixels, icc=icc, exif=exif, path=path)


def _assemble(pixels: Pixels, **kept: Any) -> Picture:
    """A picture from (H, W) or (H, W, 1 to 4): grey, grey and alpha, colour, colour and alpha."""
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    channels = pixels.shape[2]
    alpha = pixels[:, :, -1] if channels in (2, 4) else None
    colour = np.broadcast_to(pixels[:, :, :1], (*pixels.shape[:2], 3)) if channels < 3 else pixels[:, :, :3]
    bits = {1: 8, 2: 16, 4: 32}[pixels.dtype.itemsize]
    return Picture(colour, alpha, bits, grey=channels < 3, **kept)


def _upright_exif(image: Any) -> tuple[bytes | None, int]:
    """The EXIF to keep, which says "upright", and the orientation that is still to be applied."""
    try:
        exif = image.getexif()
        orientation = int(exif.get(_ORIENTATION, 1))
        for tag in [tag for tag in exif if tag in _LAYOUT_TAGS]:
            del exif[tag]
        if not len(exif):
            return None, orientation
        exif[_ORIENTATION] = 1
        return exif.tobytes(), orientation
    except _MALFORMED:  # a picture is worth more than its notes
        return None, 1


def _turn(pixels: Pixels, orientation: int) -> Pixels:
    """Apply EXIF orientation 1 to 8."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _from_cmyk(image: Any, icc: bytes | None) -> Any:
    """sRGB from CMYK, by the file's own profile where it has a usable one."""
    from PIL import ImageCms

    if icc:
        try:
            profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
            return ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
        except (ImageCms.PyCMSError, OSError):
            pass
    return image.convert("RGB")


def _png_16_bit(path: Path, image: Any) -> Pixels | None:
    """The 16 bits of a PNG with several channels, of which Pillow returns the upper 8.

    The file is decoded twice, once for the upper and once for the lower bytes: read as if it were
    little-endian, "the upper byte" is the lower one.
    """
    from PIL import Image

    layouts = {"RGB;16B": ("RGB;16B", "RGB;16L"), "RGBA;16B": ("RGBA;16B", "RGBA;16L"), "LA;16B": ("RGBA",)}
    layout = layouts.get(image.tile[0].args) if image.tile and isinstance(image.tile[0].args, str) else None
    if layout is None:
        return None
    parts = []
    for raw_mode in layout:
        with Image.open(path) as part:
            part.tile = [tile._replace(args=raw_mode) for tile in part.tile]
            parts.append(np.asarray(part))
    if len(parts) == 1:  # grey and alpha, two bytes each, decoded as four
        high, low = parts[0][:, :, 0::2], parts[0][:, :, 1::2]
    else:
        high, low = parts
    out = high.astype(np.uint16)
    out <<= 8
    out |= low
    return out


def _tiff_16_bit(path: Path, image: Any) -> Pixels | None:
    """A TIFF with several channels of 16 bits, of which Pillow reads 8."""
    bits = image.tag_v2.get(258, (1,))
    bits = bits if isinstance(bits, tuple) else (bits,)
    if len(bits) < 2 or max(bits) <= 8:
        return None
    import tifffile

    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        pixels = page.asarray()
        if page.axes.startswith("S"):  # planes one after another
            pixels = np.moveaxis(pixels, 0, -1)
        photometric = int(page.photometric)
    if (
        photometric not in (1, 2)
        or pixels.dtype != np.uint16
        or pixels.ndim != 3
        or not 2 <= pixels.shape[2] <= 4
    ):
        raise UserError(f"{path} is a deep TIFF but not 16-bit grey or RGB; save it as 16-bit RGB")
    return pixels


def _read_npy(path: Path) -> Picture:
    try:
        pixels = np.load(path, allow_pickle=False)
    except _MALFORMED as error:
        raise UserError(f"{path} is not a plain .npy array ({str(error).splitlines()[0]})") from None
    shape = pixels.shape
    if pixels.ndim == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim not in (2, 3) or 0 in shape or (pixels.ndim == 3 and pixels.shape[2] not in (1, 2, 3, 4)):
        raise UserError(f"{path} has the shape {shape}; expected (H, W), (H, W, 3) or (3, H, W)")
    _check_size(path, pixels.shape)
    if pixels.dtype.kind == "f":
        pixels = checked_floats(path, pixels)
    elif pixels.dtype not in (np.uint8, np.uint16):
        raise UserError(f"{path} holds {pixels.dtype} values; expected floats in [0, 1], uint8 or uint16")
    return _assemble(np.ascontiguousarray(pixels), path=path)


def checked_floats(name: str | Path, pixels: Pixels) -> Pixels:
    """float32, without NaN; noise may reach a little beyond [0, 1], another scale may not."""
    pixels = pixels.astype(np.float32)
    if not np.isfinite(pixels).all():
        raise UserError(f"{name} has NaN or infinite pixels; expected numbers in [0, 1]")
    if pixels.min() < -1.5 or pixels.max() > 2.5:
        raise UserError(
            f"{name} has values from {pixels.min():.3g} to {pixels.max():.3g}; expected [0, 1]: divide by 255 or 65535"
        )
    return pixels


# ---------------------------------------------------------------------------------------------------------
# writing


def check_writable(path: Path) -> str:
    """The format that a file name stands for; a name without one is refused."""
    try:
        return FORMATS[path.suffix.lower()]
    except KeyError:
        known = ", ".join(sorted(FORMATS))
        raise UserError(f"{path.name} does not end like a picture; expected one of {known}") from None


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that becomes `path` when all went well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(picture: Picture, path: Path, quality: int) -> None:
    kind = check_writable(path)
    alpha = picture.alpha if kind in KEEPS_ALPHA else None
    if alpha is None and picture.alpha is not None:
        logger.warning("%s: the picture is laid on white, for %s has no transparency", path, kind)
        opacity = unit_float(picture.alpha)[:, :, None]
        picture = replace(picture, pixels=1 - opacity * (1 - unit_float(picture.pixels)), alpha=None)
    colour = picture.pixels[:, :, :1] if picture.grey else picture.pixels
    if picture.grey and picture.pixels.strides[2]:  # three channels of its own, which need not be equal
        colour = picture.pixels.mean(axis=2, keepdims=True, dtype=np.float32)
        colour = (
            colour if picture.pixels.dtype == np.float32 else np.rint(colour).astype(picture.pixels.dtype)
        )

    if kind == "NPY":
        pixels = unit_float(colour)
        if alpha is not None:
            pixels = np.concatenate([pixels, unit_float(alpha)[:, :, None]], axis=2)
        with appearing(path) as temporary, temporary.open("wb") as file:
            np.save(file, pixels)
        return

    bits = 16 if picture.bits >= 16 and kind in KEEPS_16_BITS else 8
    pixels = quantise(colour, bits)
    if alpha is not None:
        pixels = np.concatenate([pixels, quantise(alpha, bits)[:, :, None]], axis=2)
    # a profile describes grey or colour, and is wrong for the other
    icc = (
        picture.icc if picture.icc and picture.icc[16:20] == (b"GRAY" if picture.grey else b"RGB ") else None
    )
    try:
        with appearing(path) as temporary:
            if bits == 16 and kind == "PNG":
                _write_png_16(temporary, pixels, icc, picture.exif)
            elif bits == 16:
                _write_tiff_16(temporary, pixels, icc, picture.exif)
            else:
                _write_with_pillow(temporary, path, kind, pixels, icc, picture.exif, quality)
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); is there space, and the right?"
        ) from None


def _write_with_pillow(
    file: Path, path: Path, kind: str, pixels: Pixels, icc: bytes | None, exif: bytes | None, quality: int
) -> None:
    from PIL import Image

    options: dict[str, Any] = {}
    if kind == "HEIF":
        _register_heif(path)
    if kind in ("JPEG", "HEIF"):
        options = {"quality": quality}
    if kind == "JPEG":
        options["subsampling"] = 0
    if kind == "WEBP":
        options = {"lossless": True, "exact": True}
        limit = 16383
        if max(pixels.shape[:2]) > limit:
            raise UserError(f"{path}: WebP holds at most {limit} pixels a side; write PNG (--ext png)")
    if kind == "TIFF":
        options = {"compression": "tiff_adobe_deflate"}
    if icc:
        options["icc_profile"] = icc
    if exif and kind != "BMP":
        options["exif"] = exif
    if kind in ("WEBP", "HEIF") and pixels.shape[2] < 3:
        # these formats have no grey
        pixels = np.concatenate([pixels[:, :, :1].repeat(3, axis=2), pixels[:, :, 1:]], axis=2)
    if pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    with file.open("wb") as stream:
        Image.fromarray(pixels).save(stream, kind, **options)


def _write_png_16(file: Path, pixels: Pixels, icc: bytes | None, exif: bytes | None) -> None:
    """PNG with 16 bits a channel (which Pillow writes for grey only), filter "up", in bands of rows."""
    height, width, channels = pixels.shape
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    with file.open("wb") as stream:

        def chunk(kind: bytes, data: bytes) -> None:
            stream.write(
                struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            )

        stream.write(b"\x89PNG\r\n\x1a\n")
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0))
        if icc:
            chunk(b"iCCP", b"ICC\0\0" + zlib.compress(icc))
        if exif:
            chunk(b"eXIf", exif.removeprefix(b"Exif\0\0"))
        packer = zlib.compressobj(6)
        above = np.zeros((1, width * channels * 2), np.uint8)
        for row in range(0, height, 64):
            band = pixels[row : row + 64].astype(">u2").reshape(-1, width * channels).view(np.uint8)
            filtered = np.full((len(band), band.shape[1] + 1), 2, np.uint8)
            filtered[:, 1:] = band - np.concatenate(
                [above, band[:-1]]
            )  # modulo 256, as the filter is defined
            above = band[-1:]
            if packed := packer.compress(filtered.tobytes()):
                chunk(b"IDAT", packed)
        chunk(b"IDAT", packer.flush())
        chunk(b"IEND", b"")


def _write_tiff_16(file: Path, pixels: Pixels, icc: bytes | None, exif: bytes | None) -> None:
    """TIFF with 16 bits a channel. Of EXIF, the texts of its main directory are kept (camera, date, author)."""
    import tifffile

    texts = []
    if exif:
        from PIL import Image

        tags = Image.Exif()
        tags.load(exif)
        texts = [
            (tag, 2, 0, value, True)
            for tag, value in tags.items()
            if isinstance(value, str) and value.isascii()
        ]
    if pixels.shape[2] == 2:  # few programs read grey with alpha in 16 bits
        pixels = pixels[:, :, (0, 0, 0, 1)]
    channels = pixels.shape[2]
    tifffile.imwrite(
        file,
        pixels if channels > 1 else pixels[:, :, 0],
        photometric="rgb" if channels >= 3 else "minisblack",
        planarconfig="contig" if channels > 1 else None,
        extrasamples=["unassalpha"] if channels == 4 else None,
        compression="adobe_deflate",
        iccprofile=icc,
        extratags=texts,
        metadata=None,
        software=False,
    )


# ---------------------------------------------------------------------------------------------------------
# what a file says about its degradation


@functools.lru_cache
def _standard_tables() -> dict[int, Pixels]:
    """The luminance quantisation table of every quality, as libjpeg writes it."""
    from PIL import Image

    tables = {}
    for quality in range(1, 101):
        buffer = io.BytesIO()
        Image.new("L", (8, 8)).save(buffer, "JPEG", quality=quality)
        tables[quality] = np.asarray(Image.open(buffer).quantization[0])  # type: ignore[attr-defined]
    return tables


class JPEGSettings(NamedTuple):
    """How a JPEG file was written: its quantisation tables, and Pillow's number for the sampling of colours."""

    tables: tuple[tuple[int, ...], ...]
    sampling: int

    @property
    def quality(self) -> int:
        """1 to 100: that of the standard table nearest to the first."""
        standard, own = _standard_tables(), np.asarray(self.tables[0])
        return min(standard, key=lambda quality: int(np.abs(standard[quality] - own).sum()))

    def apply(self, pixels: Pixels) -> Pixels:
        """What becomes of a picture (h, w, c) in 8 bits in such a file."""
        from PIL import Image

        file = io.BytesIO()
        tables = [list(table) for table in self.tables]
        Image.fromarray(pixels.squeeze()).save(file, "JPEG", qtables=tables, subsampling=self.sampling)
        with Image.open(file) as image:
            return np.asarray(image).reshape(pixels.shape)


def jpeg_settings(path: str | Path) -> JPEGSettings | None:
    """How a file was written; None where it is no JPEG."""
    from PIL import Image, JpegImagePlugin

    try:
        with Image.open(path) as image:
            found = getattr(image, "quantization", {})
            tables = tuple(tuple(found[number]) for number in sorted(found))
            sampling = JpegImagePlugin.get_sampling(image) if tables else -1
    except _MALFORMED:
        return None
    return JPEGSettings(tables, sampling) if tables and len(tables[0]) == 64 else None


def jpeg_quality(path: str | Path) -> int:
    """The quality (1 to 100) that a JPEG file was written with, from its quantisation table."""
    settings = jpeg_settings(path)
    if settings is None:
        raise UserError(
            f"{path} is not a JPEG file, so its quality cannot be read; name it, as in --task jpeg10"
        )
    return settings.quality


def jpeg_noise(picture: Picture) -> float:
    """σ_y of the error, in [0, 1] units, that JPEG left in a picture's brightness; 0 where its file is no JPEG.

    Each coefficient was rounded to a multiple of its step q, an error of q/√12; where most became 0 they were
    smaller than that. A share p that did not become 0 says how much: with Laplace's distribution it is √2·b, where
    p = exp(−q / 2b).
    """
    from PIL import Image

    if picture.path is None or FORMATS.get(picture.path.suffix.lower()) != "JPEG":
        return 0.0
    settings = jpeg_settings(picture.path)
    if settings is None:
        return 0.0
    try:
        with Image.open(picture.path) as image:
            grey = np.asarray(image.convert("L"))  # not turned upright: its blocks would lie elsewhere
    except _MALFORMED:
        return 0.0
    rows, columns = (min(length // 8 * 8, 1024) for length in grey.shape)  # a part is enough
    if not rows or not columns:
        return 0.0
    steps = np.asarray(settings.tables[0], np.float64).reshape(8, 8)
    k = np.arange(8)
    cosine = np.cos((2 * k[None] + 1) * k[:, None] * np.pi / 16) / 2
    cosine[0] /= 2**0.5
    blocks = grey[:rows, :columns].astype(np.float64).reshape(rows // 8, 8, columns // 8, 8).swapaxes(1, 2)
    coefficients = cosine @ blocks @ cosine.T
    kept = (np.abs(coefficients) >= steps / 2).mean((0, 1)).clip(1e-6, 1 - 1e-6)
    variance = np.minimum(steps**2 / 12, 2 * (steps / (2 * np.log(1 / kept))) ** 2)
    return float(variance.mean() ** 0.5 / 255)


# ---------------------------------------------------------------------------------------------------------
# folders


@dataclass(frozen=True)
class Found:
    """A picture that was found, and where it lies below the folder that was named."""

    path: Path
    relative: Path


def find_pictures(paths: Iterable[str | Path], outside: Path | None = None) -> list[Found]:
    """Files as they are named, and every picture below the folders, sorted; other files are passed over.

    Nothing below the folder `outside` (where results go) is taken, nor anything hidden.
    """
    found: list[Found] = []
    empty: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(Found(path, Path(path.name)))
            continue
        inside = []
        for folder, folders, names in os.walk(path):
            here = Path(folder)
            folders[:] = sorted(
                name
                for name in folders
                if not name.startswith(".") and (outside is None or not _same(here / name, outside))
            )
            for name in names:
                if Path(name).suffix.lower() in FORMATS and not name.startswith("."):
                    inside.append(Found(here / name, (here / name).relative_to(path)))
        if not inside:
            empty.append(path)
        found.extend(sorted(inside, key=lambda one: one.relative.as_posix()))
    for path in empty:
        message = f"{path} has no pictures in it; expected {READABLE} files"
        if not found:
            raise UserError(message)
        logger.warning(message)
    return found


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
