"""Reads and writes each file format, as plain arrays. `Picture.read` and `Picture.write` are the way in."""

import errno
import io
import stat
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageCms
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from ddc.errors import UserError

Pixels = np.ndarray[Any, np.dtype[Any]]

FORMATS = {
    ".png": "PNG",
    **dict.fromkeys((".jpg", ".jpeg", ".jfif"), "JPEG"),
    ".webp": "WEBP",
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".bmp": "BMP",
    **dict.fromkeys((".heic", ".heif"), "HEIF"),
    ".npy": "NPY",
}
READABLE = "PNG, JPEG, WebP, TIFF, BMP, HEIC or .npy"
KEEPS_ALPHA = {"PNG", "WEBP", "TIFF", "HEIF", "NPY"}
KEEPS_16_BITS = {"PNG", "TIFF"}
MAX_PIXELS = 178_956_970  # a file that claims more is treated as a decompression bomb, also by Pillow
MAX_WEBP_SIDE = 16383  # Pillow decodes longer rows in quadratic time
MAX_JPEG_SIDE = 65500  # libjpeg's own limit, a little below the format's
MAX_RLE_PIXELS = 4_000_000  # Pillow decodes run lengths of a BMP byte by byte, also from a file of 60 bytes
MAX_SCANS = 100  # of a progressive JPEG, each of which goes over the whole picture; usual are about 10
CLOSED = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)

# TIFF tags that describe the layout of the pixels, which would be wrong in another file.
_LAYOUT_TAGS = {
    *(*range(254, 260), *range(512, 533), 34675),
    *(262, 266, 273, 274, 277, 278, 279, 284, 292, 293, 317, 320, 322, 323, 324, 325, 330, 338, 339, 347),
}
ORIENTATION = 0x0112
# directories of EXIF; the last is within that of the camera
_CAMERA, _PLACE, _INTEROPERABILITY = 0x8769, 0x8825, 0xA005
_PREMULTIPLIED = (1,)  # in a TIFF, the value of ExtraSamples for colours that were multiplied by alpha
# format → the longest side, and the beginning of the message
_LONGEST = {
    "WEBP": (MAX_WEBP_SIDE, "cannot be WebP"),
    "JPEG": (MAX_JPEG_SIDE, "could not be written as JPEG"),
}

# Pillow warns about large pictures, whose size is checked here, and about odd EXIF, which is ignored. A filter
# for the duration of one read would not be safe with threads.
warnings.filterwarnings("ignore", module=r"PIL\.")


class Stored(NamedTuple):
    """What a file holds."""

    pixels: Pixels  # (H, W, 1 to 4): grey, grey and alpha, RGB, RGB and alpha; uint8, uint16 or float32
    icc: bytes | None = None
    exif: bytes | None = None  # its orientation is "upright"
    several: bool = False  # whether the file has more pages


def read_file(source: Path | bytes, name: str | Path) -> Stored:
    """Read a file, or the bytes of one. Whatever goes wrong is a `UserError` that starts with `name`."""
    suffix = Path(name).suffix.lower()
    try:
        status = None if isinstance(source, bytes) else source.stat()
        if status and stat.S_ISDIR(status.st_mode):
            raise UserError("is a folder; expected one picture")
        if not (status.st_size if status else len(bytes(source))):
            raise UserError("is empty (0 bytes); copy it again")
        if suffix == ".npy":
            return _read_npy(source)
        if FORMATS.get(suffix) == "HEIF":
            _register_heif()
        return _read_with_pillow(source)
    except UserError as error:
        raise UserError(f"{name} {error}") from None
    except Image.DecompressionBombError:
        raise UserError(f"{name} claims more than {MAX_PIXELS / 1e6:.0f} megapixels; cut it into parts") from None
    except Image.UnidentifiedImageError:
        raise UserError(f"{name} is not a picture that can be read; expected {READABLE}") from None
    except MemoryError:
        raise UserError(f"{name} does not fit into memory; cut it into parts") from None
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{name} does not exist") from None
    except Exception as error:  # decoders raise nearly everything for a damaged file
        if isinstance(error, OSError) and error.errno in CLOSED:
            raise UserError(f"{name} cannot be opened ({error.strerror}); check its name and permissions") from None
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{name} is damaged or cut short ({reason}); copy it again") from None


def open_image(source: str | Path | bytes) -> Any:
    """A file opened by Pillow, if it is in one of the formats that are read and does not take minutes to decode.

    Pillow knows many more, and runs other programs for some of them: Ghostscript interprets the program in an EPS file.
    """
    allowed = [name for name in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "HEIF") if name != "HEIF" or name in Image.OPEN]
    image = Image.open(_stream(source), formats=allowed)
    if image.format == "WEBP" and max(image.size) > MAX_WEBP_SIDE:  # of an animation, which has no such limit
        image.close()
        raise UserError(
            f"is an animation of {image.width}×{image.height} pixels; expected at most {MAX_WEBP_SIDE} a side"
        )
    run_lengths = image.format == "BMP" and image.info.get("compression") in (1, 2)
    if run_lengths and image.width * image.height > MAX_RLE_PIXELS:
        image.close()
        raise UserError(f"is a compressed BMP of more than {MAX_RLE_PIXELS / 1e6:.0f} megapixels; save it as PNG")
    if image.info.get("progressive"):
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        if content.count(b"\xff\xda") > MAX_SCANS:
            image.close()
            raise UserError(f"is a JPEG of more than {MAX_SCANS} scans; save it as PNG")
    return image


def _stream(source: str | Path | bytes) -> Any:
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _register_heif() -> None:
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        raise UserError("is HEIC, which needs another package: pip install 'deep-data-consistency[heic]'") from None
    register_heif_opener()


def _read_with_pillow(source: Path | bytes) -> Stored:
    try:
        image = open_image(source)
    except Image.UnidentifiedImageError:
        return _read_float_tiff(source)
    with image:
        # in other formats, further pages are small previews
        several = image.format in ("TIFF", "WEBP", "PNG") and image.is_animated
        deep = {"TIFF": _tiff_16_bit, "PNG": _png_16_bit}.get(image.format or "")
        return stored_image(image, deep(source, image) if deep else None, several)


def stored_image(image: Any, pixels: Pixels | None = None, several: bool = False) -> Stored:
    """The upright pixels of an open image and its metadata; `pixels` are given where Pillow has only 8 bits of them."""
    icc = image.info.get("icc_profile")
    if pixels is None and image.mode == "CMYK":
        pixels, icc = np.asarray(_from_cmyk(image, icc)), None
    elif pixels is None:
        pixels = _pillow_pixels(image)
    # after the pixels, because Pillow turns a TIFF when it decodes it
    exif, orientation = _upright_exif(image.getexif)
    icc = icc if icc and isinstance(icc, bytes) else None
    return Stored(np.atleast_3d(np.ascontiguousarray(_turn(pixels, orientation))), icc, exif, several)


def _pillow_pixels(image: Any) -> Pixels:
    inverted = image.format == "TIFF" and image.tag_v2.get(262) == 0  # 0 is white; Pillow knows that for 8 bits
    if image.mode.startswith("I"):
        pixels = np.asarray(image)
        if pixels.dtype != np.uint16 and (pixels.min() < 0 or pixels.max() > 65535):
            raise UserError("has 32-bit whole numbers; expected 8 or 16 bits a channel")
        if image.mode == "I" and image.format is None and pixels.max() <= 255:  # made in memory
            raise UserError("has whole numbers up to 255, which may have 8 bits or 16; convert it to L first")
        pixels = pixels.astype(np.uint16, copy=False)
        return 65535 - pixels if inverted else pixels
    if image.mode == "F":
        return 1 - np.array(image) if inverted else np.array(image)
    colour = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    mode = colour + "A" if image.has_transparency_data else colour
    return np.array(image if image.mode == mode else image.convert(mode))


def _upright_exif(read: Callable[[], Image.Exif]) -> tuple[bytes | None, int]:
    """The EXIF to keep, which says "upright", and the orientation that is still to be applied."""
    try:
        exif, kept = read(), Image.Exif()  # a copy, because the EXIF of a Pillow image belongs to the caller
        orientation = int(exif.get(ORIENTATION, 1))
        kept.endian = exif.endian
        for tag in set(exif) - _LAYOUT_TAGS:
            kept[tag] = exif[tag]
        if not len(kept):
            return None, orientation
        kept[ORIENTATION] = 1
        for tag, directory in _directories(exif).items():
            kept[tag] = directory
        return kept.tobytes(), orientation
    except Exception:  # broken EXIF is no reason to refuse a picture
        return None, 1


def _directories(exif: Image.Exif) -> dict[int, dict[int, Any]]:
    """The directories of EXIF below the main one, by their tags."""
    found = {tag: dict(exif.get_ifd(tag)) for tag in (_CAMERA, _PLACE) if tag in exif}
    if found.get(_CAMERA, {}).pop(_INTEROPERABILITY, None) is not None:
        with suppress(ValueError):  # of a TIFF that Pillow has closed
            found[_CAMERA][_INTEROPERABILITY] = dict(exif.get_ifd(_INTEROPERABILITY))
    return found


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
    """Convert to sRGB, with the file's own profile if it has a usable one."""
    if icc:
        with suppress(ImageCms.PyCMSError, OSError):
            profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
            return ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
    return image.convert("RGB")


def _png_16_bit(source: Path | bytes, image: Any) -> Pixels | None:
    """The 16 bits of a PNG with several channels, of which Pillow returns the upper 8; None for others.

    The file is decoded again for the lower bytes: read as little-endian, "the upper byte" is the lower one.
    """
    layouts = {"RGB;16B": ("RGB;16B", "RGB;16L"), "RGBA;16B": ("RGBA;16B", "RGBA;16L"), "LA;16B": ("RGBA",)}
    layout = layouts.get(image.tile[0].args) if image.tile and isinstance(image.tile[0].args, str) else None
    if layout is None:
        return None
    parts = []
    for raw_mode in layout:
        with open_image(source) as part:
            part.tile = [tile._replace(args=raw_mode) for tile in part.tile]
            parts.append(np.asarray(part))
    # grey and alpha, two bytes each, are decoded as four channels
    high, low = parts if len(parts) == 2 else (parts[0][:, :, 0::2], parts[0][:, :, 1::2])
    return high.astype(np.uint16) << 8 | low


def _tiff_16_bit(source: Path | bytes, image: Any) -> Pixels | None:
    """The pixels of a TIFF with several channels of 16 bits, of which Pillow returns 8; None for others."""
    bits = image.tag_v2.get(258, (1,))
    if not isinstance(bits, tuple) or len(bits) < 2 or max(bits) <= 8:
        return None
    premultiplied = image.tag_v2.get(338) == _PREMULTIPLIED
    if image.tile[0].codec_name == "libtiff" and image.mode in ("RGB", "RGBA") and image.tag_v2.get(284) != 2:
        layout = image.tile[0].args[0].split(";")[0].replace("RGBa", "RGBA")  # Pillow would divide 8 bits by alpha
        with open_image(source) as part:  # for the lower bytes, as in `_png_16_bit`
            for one, order in zip((image, part), "LB" if sys.byteorder == "little" else "BL", strict=True):
                one.tile = [tile._replace(args=(f"{layout};16{order}", *tile.args[1:])) for tile in one.tile]
            pixels = np.asarray(image).astype(np.uint16) << 8 | np.asarray(part)
        return _divided_by_alpha(pixels) if premultiplied else pixels
    import tifffile

    with tifffile.TiffFile(_stream(source)) as file:
        page = file.pages.first
        pixels = _tiff_page(page)
        known = int(page.photometric) in (1, 2) and pixels.dtype == np.uint16
    if not known or pixels.ndim != 3 or not 2 <= pixels.shape[2] <= 4:
        raise UserError("is a deep TIFF but not 16-bit grey or RGB; save it as 16-bit RGB")
    return _divided_by_alpha(pixels) if premultiplied else pixels


def _tiff_page(page: Any) -> Pixels:
    """The pixels of a page that tifffile has opened, with the channels last."""
    if page.size > 4 * MAX_PIXELS:
        raise Image.DecompressionBombError
    try:
        pixels: Pixels = page.asarray()
    except ValueError as error:
        if "imagecodecs" in str(error):
            raise UserError("is a TIFF whose compression needs another package: `pip install imagecodecs`") from None
        raise
    return np.moveaxis(pixels, 0, -1) if page.axes.startswith("S") else pixels  # planes one after another


def _divided_by_alpha(pixels: Pixels) -> Pixels:
    """Colours without the alpha (the last channel) that they were multiplied by; where it is 0, they stay as they are."""
    colours, alpha = pixels[:, :, :-1], pixels[:, :, -1:]
    top = np.float32(65535 if pixels.dtype == np.uint16 else 1)
    divided = np.minimum(colours * (top / np.where(alpha > 0, alpha, top).astype(np.float32)), top)
    if pixels.dtype == np.uint16:
        divided = np.rint(divided)
    return np.concatenate([divided.astype(pixels.dtype), alpha], axis=2)


def _read_float_tiff(source: Path | bytes) -> Stored:
    """A floating-point TIFF that Pillow does not know: RGB, or with 16 or 64 bits. Other files are not identified."""
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as stream:
        tags = Image.Exif()
        try:
            tags.load_from_fp(stream)
        except Exception:  # no TIFF, or a damaged one
            raise Image.UnidentifiedImageError from None
        photometric, sample_format = tags.get(262), np.unique(tags.get(339, 1)).tolist()
        if sample_format != [3] or photometric not in (0, 1, 2):
            raise Image.UnidentifiedImageError
        exif, orientation = _upright_exif(lambda: tags)
        import tifffile

        stream.seek(0)
        with tifffile.TiffFile(stream) as file:
            pixels, several = np.atleast_3d(_tiff_page(file.pages.first)), len(file.pages) > 1
    if pixels.dtype.kind != "f" or pixels.ndim != 3 or pixels.shape[2] > 4 or not pixels.size:
        raise UserError("is a floating-point TIFF but not grey or RGB; save it as 16-bit RGB or .npy")
    pixels = 1 - pixels if photometric == 0 else pixels  # 0 is white
    pixels = _divided_by_alpha(pixels) if tags.get(338) == 1 else pixels
    icc = tags.get(34675)
    return Stored(
        np.ascontiguousarray(_turn(pixels, orientation)), icc if isinstance(icc, bytes) else None, exif, several
    )


def _read_npy(source: Path | bytes) -> Stored:
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as stream:
            first = np.lib.format.read_magic(stream) == (1, 0)
            read_header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
            shape, _, dtype = read_header(stream)
            planes_first = _check_array(shape, dtype)
            stream.seek(0)
            pixels = np.load(stream, allow_pickle=False)
    except (UserError, OSError, Image.DecompressionBombError):
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"is not a plain .npy array ({reason})") from None
    return Stored(np.atleast_3d(np.ascontiguousarray(np.moveaxis(pixels, 0, -1) if planes_first else pixels)))


def _check_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Refuse an array that is no picture, before memory is taken for it; returns whether its planes come first."""
    if dtype.hasobject:
        raise UserError("is not a plain .npy array but holds Python objects")
    planes_first = len(shape) == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3)
    height, width, channels = (shape[1], shape[2], shape[0]) if planes_first else (*shape, 1, 1, 1)[:3]
    if len(shape) not in (2, 3) or 0 in shape or channels not in (1, 2, 3, 4):
        raise UserError(f"has the shape {shape}; expected (H, W), (H, W, 3) or (3, H, W)")
    if height * width > MAX_PIXELS:
        raise Image.DecompressionBombError
    if dtype.kind != "f" and dtype not in (np.uint8, np.uint16):
        raise UserError(f"holds {dtype} values; expected floats in [0, 1], uint8 or uint16")
    return planes_first


def check_fits(path: str | Path, height: int, width: int) -> None:
    """Raise a `UserError` if the format that a file's name stands for cannot hold a picture of this size."""
    try:
        _check_side(FORMATS.get(Path(path).suffix.lower(), ""), max(height, width))
    except UserError as error:
        raise UserError(f"{path} {error}") from None


def _check_side(kind: str, side: int) -> None:
    longest, message = _LONGEST.get(kind, (side, ""))
    if side > longest:
        raise UserError(f"{message}, which has at most {longest} pixels a side; write PNG (--ext png)")


def write_file(file: Path, kind: str, stored: Stored, quality: int) -> None:
    """Write a file in the format `kind`, one of the values of `FORMATS`."""
    _check_side(kind, max(stored.pixels.shape[:2]))
    if kind == "NPY":
        with file.open("wb") as stream:
            np.save(stream, stored.pixels)
    elif stored.pixels.dtype == np.uint8:
        _write_with_pillow(file, kind, stored, quality)
    elif kind == "PNG":
        _write_png_16(file, stored)
    else:
        _write_tiff_16(file, stored)


def _write_with_pillow(file: Path, kind: str, stored: Stored, quality: int) -> None:
    pixels = stored.pixels
    by_kind: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": quality, "subsampling": 0},
        "HEIF": {"quality": quality},
        "WEBP": {"lossless": True, "exact": True},
        "TIFF": {"compression": "tiff_adobe_deflate"},
    }
    options = by_kind.get(kind, {})
    if kind == "HEIF":
        _register_heif()
    if stored.icc:
        options["icc_profile"] = stored.icc
    if stored.exif and kind != "BMP":
        options["exif"] = stored.exif
    directories: dict[int, dict[int, Any]] = {}
    if stored.exif and kind == "TIFF":  # its main directory: libtiff fails for the others
        options["exif"] = Image.Exif()
        options["exif"].load(stored.exif)
        directories = _directories(options["exif"])
        for tag in directories:
            del options["exif"][tag]
    if kind in ("WEBP", "HEIF") and pixels.shape[2] < 3:  # these formats have no grey
        pixels = np.concatenate([pixels[:, :, :1].repeat(3, axis=2), pixels[:, :, 1:]], axis=2)
    if pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    encoded = io.BytesIO()  # into a file, Pillow does not notice a full disk
    Image.fromarray(pixels).save(encoded, kind, **options)
    file.write_bytes(encoded.getbuffer())
    if directories:
        _append_directories(file, directories)


def _write_png_16(file: Path, stored: Stored) -> None:
    """PNG with 16 bits a channel (which Pillow writes for grey only), filter "up", in bands of rows."""
    pixels = stored.pixels
    height, width, channels = pixels.shape
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    with file.open("wb") as stream:

        def chunk(kind: bytes, data: bytes) -> None:
            length, checksum = struct.pack(">I", len(data)), struct.pack(">I", zlib.crc32(kind + data))
            stream.write(length + kind + data + checksum)

        stream.write(b"\x89PNG\r\n\x1a\n")
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0))
        if stored.icc:
            chunk(b"iCCP", b"ICC\0\0" + zlib.compress(stored.icc))
        if stored.exif:
            chunk(b"eXIf", stored.exif.removeprefix(b"Exif\0\0"))
        packer = zlib.compressobj(6)
        above = np.zeros((1, width * channels * 2), np.uint8)
        for row in range(0, height, 64):
            band = pixels[row : row + 64].astype(">u2").reshape(-1, width * channels).view(np.uint8)
            # modulo 256, as the filter is defined
            filtered = np.insert(np.diff(band, axis=0, prepend=above), 0, 2, axis=1)
            above = band[-1:]
            if packed := packer.compress(filtered.tobytes()):
                chunk(b"IDAT", packed)
        chunk(b"IDAT", packer.flush())
        chunk(b"IEND", b"")


def _write_tiff_16(file: Path, stored: Stored) -> None:
    """TIFF with 16 bits a channel. Of EXIF's main directory, the texts are kept (camera, date, author)."""
    import tifffile

    tags = Image.Exif()
    if stored.exif:
        tags.load(stored.exif)
    texts = [(tag, 2, 0, text, True) for tag, text in tags.items() if isinstance(text, str) and text.isascii()]
    pixels = stored.pixels
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
        iccprofile=stored.icc,
        extratags=texts,
        metadata=None,
        software=False,
    )
    if directories := _directories(tags):
        _append_directories(file, directories)


def _append_directories(file: Path, directories: dict[int, dict[int, Any]]) -> None:
    """Append directories of EXIF to a TIFF, and a copy of its main directory that points to them."""
    with file.open("r+b") as stream:
        head = stream.read(8)
        if head[2:4] not in (b"*\0", b"\0*"):  # a BigTIFF
            return
        order = "<" if head.startswith(b"II") else ">"
        stream.seek(struct.unpack(f"{order}I", head[4:])[0])
        (count,) = struct.unpack(f"{order}H", stream.read(2))
        entries = [stream.read(12) for _ in range(count)]
        end = stream.seek(0, io.SEEK_END)
        stream.write(b"\0" * (end % 2))
        appended = ImageFileDirectory_v2(head)
        for tag, directory in directories.items():
            appended[tag] = directory
        block = appended.tobytes(end := stream.tell())
        entries += [block[2 + 12 * i : 14 + 12 * i] for i in range(len(directories))]
        entries.sort(key=lambda entry: struct.unpack(f"{order}H", entry[:2]))
        stream.write(block + struct.pack(f"{order}H", len(entries)) + b"".join(entries) + b"\0\0\0\0")
        stream.seek(4)
        stream.write(struct.pack(f"{order}I", end + len(block)))
