"""Pictures, and the units of their values: uint8, [0, 1], and the [-1, 1] that everything inside works on.

A `Picture` keeps what its file says about itself (bit depth, grey or colour, alpha, ICC profile, EXIF), so
that the restored picture can be written with it.
"""

import logging
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ddc.errors import UserError
from ddc.formats import (
    FORMATS,
    KEEPS_16_BITS,
    KEEPS_ALPHA,
    ORIENTATION,
    Pixels,
    Stored,
    open_image,
    read_file,
    stored_image,
    write_file,
)
from ddc.storage import Remote, located

logger = logging.getLogger("ddc")

Number = TypeVar("Number", float, Tensor)

# The noise, in [0, 1] units, that stands for rounding to 8 bits: 1.5 times its standard deviation of 1/√12 levels,
# because in smooth parts of a picture its errors form bands.
ROUNDING_8_BIT = 1.5 / (255 * 12**0.5)
_TOP = {np.dtype(np.uint8): np.float32(255), np.dtype(np.uint16): np.float32(65535)}
INTERNAL_RANGE = 2.0  # from black to white: pictures are in [-1, 1] inside, and in [0, 1] for people


def internal_sigma(sigma_y: Number) -> Number:
    """σ_y of [0, 1] pictures → σ of [-1, 1] pictures."""
    return INTERNAL_RANGE * sigma_y


def to_internal(x: Tensor) -> Tensor:
    """[0, 1] → [-1, 1]."""
    return 2 * x - 1


def to_unit(x: Tensor, clip: bool = True) -> Tensor:
    """[-1, 1] → [0, 1]."""
    x = (x + 1) / 2
    return x.clamp(0, 1) if clip else x


def from_uint8(pixels: Tensor) -> Tensor:
    """uint8 → [-1, 1]."""
    return pixels.float().div_(127.5).sub_(1)


def round_to_8_bit(x: Tensor) -> Tensor:
    """Clip and round values in [-1, 1] to the nearest of 256 levels."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1


def unit_float(pixels: Pixels) -> Pixels:
    """uint8, uint16 or float → float32 in [0, 1]."""
    top = _TOP.get(pixels.dtype)
    return pixels.astype(np.float32, copy=False) if top is None else pixels.astype(np.float32) / top


def to_light(pixels: Pixels) -> Pixels:
    """Linear light in [0, 1] from values of sRGB, which a lens and a moving camera blur."""
    low = pixels / np.float32(12.92)
    return np.where(pixels <= 0.04045, low, ((pixels.clip(0) + np.float32(0.055)) / np.float32(1.055)) ** 2.4)


def from_light(light: Pixels) -> Pixels:
    """Values of sRGB from linear light."""
    high = np.float32(1.055) * light.clip(0) ** np.float32(1 / 2.4) - np.float32(0.055)
    return np.where(light <= 0.0031308, light * np.float32(12.92), high)


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


def checked_floats(name: str | Path, pixels: Pixels) -> Pixels:
    """float32, without NaN. Noise may exceed [0, 1] a little; values of another scale are refused."""
    pixels = pixels.astype(np.float32)
    if not np.isfinite(pixels).all():
        raise UserError(f"{name} has NaN or infinite pixels; expected numbers in [0, 1]")
    low, high = pixels.min(), pixels.max()
    if low < -1.5 or high > 2.5:
        raise UserError(f"{name} has values from {low:.3g} to {high:.3g}; expected [0, 1]: divide by 255 or 65535")
    return pixels


@dataclass(frozen=True, eq=False)
class Picture:
    """Pixels as they are stored, with the metadata of their file."""

    # (H, W, 3); uint8, uint16, or float32 in [0, 1]; grey is three equal channels
    pixels: Pixels = field(repr=False)
    alpha: Pixels | None = field(default=None, repr=False)  # (H, W), of the same dtype
    bits: int = 8  # of each channel in the file: 8, 16, or 32 for floating point
    grey: bool = False
    icc: bytes | None = field(default=None, repr=False)
    # the orientation has been applied, and is "upright" here
    exif: bytes | None = field(default=None, repr=False)
    path: Path | None = None
    content: bytes | None = field(default=None, repr=False)  # of the file, if it is not a local one

    @property
    def file(self) -> Path | bytes | None:
        """What the picture was read from."""
        return self.path if self.content is None else self.content

    @property
    def in_8_bits(self) -> bool:
        """Whether the pixels are multiples of 1/255, also if they are floating-point numbers."""
        if self.pixels.dtype != np.float32:
            return bool(self.pixels.dtype == np.uint8)
        top, left = (max(0, (length - 256) // 2) for length in self.size)  # the middle is enough
        levels = self.pixels[top : top + 256, left : left + 256] * 255
        return bool((np.abs(levels - np.rint(levels)) < 1e-3).all())

    @property
    def is_jpeg(self) -> bool:
        """Whether the picture was read from a JPEG file."""
        return self.path is not None and FORMATS.get(self.path.suffix.lower()) == "JPEG"

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

    def middle(self, reach: int) -> tuple[Pixels, Pixels | None]:
        """The pixels at most `reach` from the middle row and column, (h, w, c), float32 in [0, 1], with one channel if it is
        grey; and where they are known, (h, w), or None for all."""
        rows, columns = (slice(max(0, side // 2 - reach), side // 2 + reach + 1) for side in self.size)
        known = None if self.alpha is None else unit_float(self.alpha[rows, columns]) >= 0.5
        return unit_float(self.pixels[rows, columns, : 1 if self.grey else 3]), known

    @property
    def mask(self) -> Tensor | None:
        """Alpha as a map of observed pixels, (1, H, W), which is 1 where alpha is at least a half."""
        if self.alpha is None:
            return None
        return torch.from_numpy((unit_float(self.alpha) >= 0.5).astype(np.float32))[None]

    def resized_alpha(self, height: int, width: int) -> Pixels | None:
        """Alpha for a restored picture of this size."""
        if self.alpha is None or self.alpha.shape == (height, width):
            return self.alpha
        plane = Image.fromarray(self.alpha if self.alpha.dtype == np.uint8 else self.alpha.astype(np.float32))
        resized = np.asarray(plane.resize((width, height), Image.Resampling.BILINEAR))
        return resized if self.alpha.dtype.kind == "f" else np.rint(resized).astype(self.alpha.dtype)

    def in_light(self) -> "Picture":
        """The same picture with pixels in linear light."""
        return replace(self, pixels=to_light(unit_float(self.pixels)), bits=32)

    @staticmethod
    def from_tensor(x: Tensor, **kept: Any) -> "Picture":
        """From (3, H, W) or (1, H, W) in [0, 1]. Values are kept as they are; writing clips them."""
        if x.dim() != 3 or x.shape[0] not in (1, 3):
            raise UserError(f"a picture's tensor is (3, H, W), not {tuple(x.shape)}")
        pixels = np.broadcast_to(x.detach().float().cpu().permute(1, 2, 0).numpy(), (*x.shape[1:], 3))
        return Picture(pixels, **kept)

    @staticmethod
    def read(path: str | Path, content: bytes | None = None) -> "Picture":
        """Read a file, or its `content`, which `path` then only names. Raises a `UserError` if that fails."""
        if not isinstance(path, Path):
            path = located(path) if "://" in path else Path(path)
        only_a_name = content is not None
        if content is None and isinstance(path, Remote):
            content = path.read_bytes()
        stored = read_file(path if content is None else content, path)
        if stored.several and not only_a_name:
            logger.warning("%s has several pages; the first is read", path)
        return Picture.from_stored(stored, path, path=path, content=content)

    @staticmethod
    def from_stored(stored: Stored, name: str | Path, **kept: Any) -> "Picture":
        """From what a file holds; `name` is what an error calls it."""
        pixels = checked_floats(name, stored.pixels) if stored.pixels.dtype.kind == "f" else stored.pixels
        channels = pixels.shape[2]
        alpha = pixels[:, :, -1] if channels in (2, 4) else None
        grey = channels < 3
        colour = np.broadcast_to(pixels[:, :, :1], (*pixels.shape[:2], 3)) if grey else pixels[:, :, :3]
        return Picture(colour, alpha, 8 * pixels.dtype.itemsize, grey, stored.icc, stored.exif, **kept)

    def write(self, path: str | Path, quality: int = 95) -> None:
        """Write a file, in the format of its name. It appears whole or not at all."""
        if not isinstance(path, Path):
            path = located(path) if "://" in path else Path(path)
        kind = check_writable(path)
        pixels, alpha = self.pixels, self.alpha
        if alpha is not None and kind not in KEEPS_ALPHA:
            logger.warning("%s: the picture is laid on white, because %s has no transparency", path, kind)
            pixels, alpha = 1 - unit_float(alpha)[:, :, None] * (1 - unit_float(pixels)), None
        if self.grey and pixels.strides[2]:
            mean = pixels.mean(axis=2, keepdims=True, dtype=np.float32)
            pixels = mean if pixels.dtype == np.float32 else np.rint(mean).astype(pixels.dtype)
        elif self.grey:  # one channel, broadcast
            pixels = pixels[:, :, :1]
        bits = 16 if self.bits >= 16 and kind in KEEPS_16_BITS else 8
        parts = [pixels] if alpha is None else [pixels, alpha[:, :, None]]
        parts = [unit_float(part) if kind == "NPY" else quantise(part, bits) for part in parts]
        whole = np.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
        # a profile describes grey or colour, and is wrong for the other
        fits = self.icc is not None and self.icc[16:20] == (b"GRAY" if self.grey else b"RGB ")
        stored = Stored(whole, self.icc if fits else None, self.exif)
        with appearing(path) as temporary:
            try:
                write_file(temporary, kind, stored, quality)
            except (UserError, OSError):
                raise
            except Exception:  # metadata that this format cannot hold: too long, or damaged
                write_file(temporary, kind, Stored(whole), quality)
                logger.warning("%s is written without its metadata, which %s cannot hold", path, kind)

    def write_unchanged(self, path: Path, quality: int = 95) -> None:
        """Write a picture that was not restored. If `path` has the format of its file, the file is copied and loses nothing."""
        source = self.file
        if source is None or _format_of(self.path, source) != FORMATS.get(path.suffix.lower()):
            return self.write(path, quality)
        with appearing(path) as temporary:
            if isinstance(source, bytes):
                temporary.write_bytes(source)
            else:
                shutil.copyfile(source, temporary)


def _format_of(name: Path | None, source: Path | bytes) -> str | None:
    """The format of a picture's file, by its content, or by its name where Pillow does not know it (.npy)."""
    try:
        with open_image(source) as image:
            kind: str | None = image.format
    except Exception:  # decoders raise nearly everything
        return None if name is None else FORMATS.get(name.suffix.lower())
    return "JPEG" if kind == "MPO" else kind  # a JPEG file with more pictures in it


ImageLike = str | Path | Picture | Tensor | np.ndarray[Any, Any] | Image.Image  # what people give as an image
MaskLike = str | Path | Tensor | np.ndarray[Any, Any] | Image.Image  # what they give as a mask
KernelLike = str | Path | Tensor | np.ndarray[Any, Any]  # and as a kernel


def as_picture(image: ImageLike) -> Picture:
    """Whatever people give as an image, as a picture; a file is read."""
    if isinstance(image, Picture):
        return image
    if isinstance(image, (str, Path)):
        return Picture.read(image)
    if isinstance(image, Image.Image):
        return _from_pillow(image)
    if not isinstance(image, (Tensor, np.ndarray)):
        raise UserError(
            f"a picture is a file's name, a Picture, a Pillow image, an array or a tensor, not {type(image).__name__}; "
            "for bytes or an open file, use Picture.read('name.png', content=bytes)"
        )
    if 0 in image.shape:
        raise UserError(f"the picture has no pixels: its shape is {tuple(image.shape)}; give at least one")
    if isinstance(image, Tensor):
        if image.dim() != 3 or image.shape[0] not in (1, 3):
            raise UserError(f"a picture's tensor is (3, H, W), not {tuple(image.shape)}")
        image = image.detach().cpu().expand(3, -1, -1).permute(1, 2, 0)
        image = (image.float() if image.is_floating_point() else image).numpy()
    floating = np.issubdtype(image.dtype, np.floating)
    if image.ndim != 3 or image.shape[2] != 3 or not (floating or image.dtype in (np.uint8, np.uint16)):
        raise UserError(
            f"a picture is (H, W, 3) of uint8, uint16 or floating point, not {image.shape} of {image.dtype}"
        )
    if not floating:
        return Picture(image, bits=8 * image.dtype.itemsize)
    return Picture(checked_floats("the picture", image), bits=32)


def _from_pillow(image: Image.Image) -> Picture:
    """As if the image were read from a file; Pillow decodes it here, if it has not done so yet."""
    if 0 in image.size:
        raise UserError(f"the Pillow image has no pixels: its size is {image.width}×{image.height}; give at least one")
    try:
        stored = stored_image(image)
    except UserError as error:
        raise UserError(f"the Pillow image {error}") from None
    except Exception as error:  # decoders raise nearly everything for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        advice = "convert it to RGB, or give the name of its file"
        raise UserError(f"the Pillow image of mode {image.mode} cannot be read ({reason}); {advice}") from None
    return Picture.from_stored(stored, "the Pillow image")


def as_mask(mask: MaskLike, white: int) -> Tensor | str | Path:
    """Whatever people give as a mask, as a tensor that is 1 where the picture is known; the name of a file is kept.

    A Pillow image is taken as a mask file is, and so is an array of 8 bits that are not 0 and 1: pixels of at least the
    brightness `white` are known.
    """
    if isinstance(mask, (str, Path)):
        return mask
    if isinstance(mask, Image.Image):
        return _checked_mask(_known_pixels(as_picture(mask), white))
    if not isinstance(mask, Tensor) and not (isinstance(mask, np.ndarray) and mask.dtype.kind in "buif"):
        given = f"an array of {mask.dtype}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise UserError(f"a mask is a file, a Pillow image, an array of numbers or a tensor, not {given}")
    if isinstance(mask, np.ndarray) and mask.ndim == 3 and mask.shape[2] in (3, 4) and mask.dtype == np.uint8:
        mask = mask[:, :, 0]  # of a grey picture, as cv2.imread returns it
    in_8_bits = mask.dtype in (np.uint8, torch.uint8)
    values = mask if isinstance(mask, Tensor) else torch.from_numpy(mask.astype(np.float32))
    return _checked_mask(values >= white) if in_8_bits and bool((values > 1).any()) else values


def _known_pixels(mask: Picture, white: int) -> Tensor:
    """From transparency, or from brightness if the picture is opaque, (H, W)."""
    if mask.mask is not None and mask.alpha is not None and float(unit_float(mask.alpha).min()) < 1:
        return mask.mask[0] > 0  # some programs save opaque images with alpha
    brightness = Image.fromarray(quantise(mask.pixels, 8)).convert("L")
    return torch.from_numpy(np.asarray(brightness) >= white)


def _checked_mask(known: Tensor) -> Tensor:
    holes = 1 - float(known.float().mean())
    if holes in (0, 1):
        lacks = "no known pixel" if holes else "no hole"
        raise UserError(f"the mask has {lacks}; expected 0 (black) for a hole and 255 (white) for a known pixel")
    if holes > 0.5:
        logger.warning(
            "%.0f %% of the mask are holes; black is a hole and white is known, so invert it if you meant the opposite",
            100 * holes,
        )
    return known.float()


def as_kernel(kernel: KernelLike) -> Tensor | str | Path:
    """Whatever people give as a kernel, as a tensor; the name of a file is kept. An array is scaled so that its sum is 1,
    as that of a file is."""
    if isinstance(kernel, (str, Path, Tensor)):
        return kernel
    if not isinstance(kernel, np.ndarray):
        raise UserError(f"a kernel is a file, a 2-D array of numbers or a tensor, not {type(kernel).__name__}")
    if kernel.ndim != 2 or kernel.dtype.kind not in "uif":
        raise UserError(f"the kernel is {kernel.ndim}-D of {kernel.dtype}; expected a 2-D array of numbers")
    values = kernel.astype(np.float64)
    total = float(values.sum())
    if not (np.isfinite(total) and total > 0):
        raise UserError(f"the kernel sums to {total}; expected finite numbers with a sum above 0")
    return torch.from_numpy(values / total).float()


def read_size(content: bytes) -> tuple[int, int] | None:
    """Height and width of the upright picture, from its first bytes; None if they are not enough."""
    try:
        with open_image(content) as image:
            # Pillow's method for PNG decodes the whole picture, to find EXIF behind the pixels.
            turned = Image.Image.getexif(image).get(ORIENTATION, 1) in (5, 6, 7, 8)
            return (image.width, image.height) if turned else (image.height, image.width)
    except Exception:
        return None


def check_writable(path: Path) -> str:
    """The format of a file name; a name without a known ending is refused."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path.name} does not end like a picture; expected one of {', '.join(sorted(FORMATS))}")
    return FORMATS[path.suffix.lower()]


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which is renamed to `path` on success and deleted otherwise; for a URL, a local
    file that is sent there.

    Whatever fails between is a `UserError` that names the file.
    """
    name = f".ddc-{uuid.uuid4().hex}.part"  # the name of `path` may have no room for more
    remote = isinstance(path, Remote)
    temporary = Path(tempfile.gettempdir(), name) if remote else path.with_name(name)
    try:
        if not remote:
            _make_folder(path.parent)
        try:
            yield temporary
            if isinstance(path, Remote):
                path.send(temporary)
            else:
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except UserError as error:
        raise UserError(f"{path} {error}") from None
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        of_the_disk = isinstance(error, OSError)
        advice = "check its name, the free space and the permissions" if of_the_disk else "try another format"
        raise UserError(f"{path} could not be written ({reason}); {advice}") from None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), folder)
        raise UserError(f"could not be written: {file} is not a folder; name another place") from None
