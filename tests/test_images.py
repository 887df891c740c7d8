import io
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageCms, ImageOps
from skimage import data

from ddc import formats
from ddc.cli.files import find_pictures
from ddc.errors import UserError
from ddc.images import (
    Picture,
    as_kernel,
    as_mask,
    as_picture,
    from_uint8,
    internal_sigma,
    round_to_8_bit,
    to_internal,
    to_unit,
    unit_float,
)
from ddc.jpegfile import jpeg_noise, jpeg_quality
from ddc.operators.blur import read_kernel
from ddc.operators.inpaint import WHITE, read_mask
from tiny import lzw_tiff


def ramp(height: int, width: int, channels: int = 3, top: int = 255) -> np.ndarray:
    generator = np.random.default_rng(height * 1000 + width)
    return generator.integers(0, top + 1, (height, width, channels)).astype(np.uint8 if top == 255 else np.uint16)


@cache  # it holds the second it was made in
def srgb_profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def test_units() -> None:
    x = torch.tensor([0.0, 0.5, 1.0])
    assert torch.equal(to_internal(x), torch.tensor([-1.0, 0.0, 1.0]))
    assert torch.equal(to_unit(to_internal(x)), x)
    assert torch.equal(to_unit(torch.tensor([-3.0, 3.0])), torch.tensor([0.0, 1.0]))
    assert torch.equal(to_unit(torch.tensor([-3.0, 3.0]), clip=False), torch.tensor([-1.0, 2.0]))
    assert internal_sigma(0.05) == 0.1


def test_units_of_8_bits() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    x = from_uint8(levels)
    assert x[0] == -1 and x[-1] == 1 and torch.equal(((x + 1) * 127.5).round(), levels.float())
    assert torch.equal(round_to_8_bit(torch.tensor([-2.0, 2.0])), torch.tensor([-1.0, 1.0]))
    near = x + torch.linspace(-0.9, 0.9, 256) / 255
    torch.testing.assert_close(round_to_8_bit(near), x, atol=1e-6, rtol=0)


@pytest.mark.parametrize("suffix", [".png", ".webp", ".tif", ".tiff", ".bmp"])
@pytest.mark.parametrize("size", [(7, 11), (1, 13), (13, 1), (1, 1)])
def test_lossless_formats_return_every_pixel(tmp_path: Path, suffix: str, size: tuple[int, int]) -> None:
    pixels = ramp(*size)
    Picture(pixels).write(tmp_path / f"a{suffix}")
    again = Picture.read(tmp_path / f"a{suffix}")
    assert np.array_equal(again.pixels, pixels)
    assert again.bits == 8 and not again.grey and again.alpha is None


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_16_bits_survive(tmp_path: Path, suffix: str, channels: int) -> None:
    stored = ramp(9, 14, channels, 65535)
    colour = np.broadcast_to(stored[:, :, :1], (9, 14, 3)) if channels < 3 else stored[:, :, :3]
    alpha = stored[:, :, -1] if channels in (2, 4) else None
    Picture(colour, alpha, bits=16, grey=channels < 3).write(tmp_path / f"a{suffix}")
    again = Picture.read(tmp_path / f"a{suffix}")
    assert (
        again.pixels.dtype == np.uint16
        and again.bits == 16
        and again.grey == (channels < (3 if suffix == ".png" else 2))
    )
    assert np.array_equal(again.pixels, colour)
    assert (again.alpha is None) == (alpha is None)
    assert alpha is None or np.array_equal(again.alpha, alpha)


@pytest.mark.parametrize("filter_type", range(5))
def test_16_bit_png_with_every_filter(tmp_path: Path, filter_type: int) -> None:
    """Files of other programs use all five row filters; this one is written here, byte by byte."""
    pixels = ramp(5, 6, 3, 65535)
    rows = pixels.astype(">u2").reshape(5, -1).view(np.uint8).astype(int)
    out, above = b"", np.zeros(rows.shape[1], int)
    for row in rows:
        left = np.concatenate([np.zeros(6, int), row[:-6]])
        corner = np.concatenate([np.zeros(6, int), above[:-6]])
        p = left + above - corner
        distance = np.abs(p - left), np.abs(p - above), np.abs(p - corner)
        nearest_left = (distance[0] <= distance[1]) & (distance[0] <= distance[2])
        paeth = np.where(nearest_left, left, np.where(distance[1] <= distance[2], above, corner))
        guess = [0 * row, left, above, (left + above) // 2, paeth][filter_type]
        out += bytes([filter_type]) + ((row - guess) % 256).astype(np.uint8).tobytes()
        above = row

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 6, 5, 16, 2, 0, 0, 0))
    file = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(out)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(file)
    assert np.array_equal(Picture.read(tmp_path / "a.png").pixels, pixels)


def test_float_pictures_are_rounded_to_nearest_and_clipped(tmp_path: Path) -> None:
    x = torch.tensor([-0.1, 0.0, 0.5 / 255 - 1e-6, 0.5 / 255 + 1e-6, 1.0, 1.2]).view(1, 1, 6).expand(3, 2, 6)
    Picture.from_tensor(x).write(tmp_path / "a.png")
    assert Picture.read(tmp_path / "a.png").pixels[0, :, 0].tolist() == [0, 0, 0, 1, 255, 255]


def test_tensor_and_window_agree() -> None:
    picture = Picture(ramp(10, 12))
    assert picture.tensor.shape == (3, 10, 12) and picture.tensor.dtype == torch.float32
    assert torch.equal(picture.window(2, 3, 4, 5), picture.tensor[:, 2:6, 3:8])
    assert np.array_equal(Picture.from_tensor(picture.tensor).pixels, picture.tensor.permute(1, 2, 0).numpy())
    with pytest.raises(UserError, match=r"\(3, H, W\)"):
        Picture.from_tensor(torch.zeros(2, 4, 4))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_colour_modes(tmp_path: Path, mode: str) -> None:
    source = Image.fromarray(data.astronaut()[:40:2, :50:2])
    if mode in ("LA", "RGBA"):
        source.putalpha(77)
    suffix = ".jpg" if mode in ("CMYK", "YCbCr") else ".png"
    image = source.convert(mode)
    image.save(tmp_path / f"a{suffix}", quality=100)
    with Image.open(tmp_path / f"a{suffix}") as stored:
        expected = np.asarray(stored.convert("RGB"))
    picture = Picture.read(tmp_path / f"a{suffix}")
    assert np.array_equal(picture.pixels, expected)
    assert picture.grey == (mode in ("1", "L", "LA"))
    assert (picture.alpha is not None) == (mode in ("LA", "RGBA"))
    if picture.alpha is not None:
        assert (picture.alpha == 77).all()


def test_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (4, 3), 1)
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putpixel((0, 0), 2)
    image.save(tmp_path / "a.png", transparency=2)
    picture = Picture.read(tmp_path / "a.png")
    assert picture.pixels[1, 1].tolist() == [0, 255, 0]
    assert picture.alpha is not None and picture.alpha[0, 0] == 0 and picture.alpha[1, 1] == 255
    assert picture.mask is not None and picture.mask.sum() == 11


def test_grey_stays_grey(tmp_path: Path) -> None:
    x = torch.rand(3, 6, 6)
    Picture.from_tensor(x, grey=True).write(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "L"
        assert np.abs(np.asarray(image) / 255 - x.mean(0).numpy()).max() < 0.003


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_and_reset(tmp_path: Path, orientation: int) -> None:
    image = Image.fromarray(ramp(6, 9))
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "Maker"
    image.save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as stored:
        expected = np.asarray(ImageOps.exif_transpose(stored))
    picture = Picture.read(tmp_path / "a.png")
    assert np.array_equal(picture.pixels, expected)
    picture.write(tmp_path / "b.png")
    with Image.open(tmp_path / "b.png") as again:
        assert again.getexif().get(0x0112, 1) == 1
        assert again.getexif()[0x010F] == "Maker"


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif"])
@pytest.mark.parametrize("bits", [8, 16])
def test_profile_and_exif_are_kept(tmp_path: Path, suffix: str, bits: int) -> None:
    exif = Image.Exif()
    exif[0x010F] = "Maker"
    exif[0x9003] = "2024:01:01 00:00:00"
    pixels = ramp(8, 8, 3, 255 if bits == 8 else 65535)
    Picture(pixels, bits=bits, icc=srgb_profile(), exif=exif.tobytes()).write(tmp_path / f"a{suffix}")
    again = Picture.read(tmp_path / f"a{suffix}")
    assert again.icc == srgb_profile()
    assert again.exif is not None and b"Maker" in again.exif


def test_tiff_layout_tags_are_not_carried_into_another_file(tmp_path: Path) -> None:
    image = Image.fromarray(ramp(8, 8))
    image.save(tmp_path / "a.tif", tiffinfo={270: "a description"})
    picture = Picture.read(tmp_path / "a.tif")
    picture.write(tmp_path / "b.jpg")
    with Image.open(tmp_path / "b.jpg") as again:
        tags = dict(again.getexif())
    assert tags[270] == "a description" and 273 not in tags and 256 not in tags


def test_a_grey_profile_is_not_put_on_a_colour_picture(tmp_path: Path) -> None:
    grey_profile = b"\0" * 16 + b"GRAY" + b"\0" * 108
    Picture(ramp(4, 4), icc=grey_profile).write(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert "icc_profile" not in image.info


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3), (3, 6, 5), (6, 5, 4)])
def test_npy_measurements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(0.5, 0.3, shape).astype(np.float32)
    np.save(tmp_path / "y.npy", values)
    picture = Picture.read(tmp_path / "y.npy")
    assert picture.size == (6, 5) and picture.bits == 32
    channels_last = values.transpose(1, 2, 0) if shape[0] == 3 else values
    assert np.array_equal(picture.pixels[:, :, 0], channels_last[..., 0] if len(shape) == 3 else values)
    picture.write(tmp_path / "z.npy")
    again = Picture.read(tmp_path / "z.npy")
    assert np.array_equal(again.pixels, picture.pixels) and (again.alpha is None) == (shape[-1] != 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((4, 4, 3), np.nan), "NaN"),
        (np.full((4, 4, 3), np.inf), "infinite"),
        (np.full((4, 4, 3), 200.0), "divide by 255"),
        (np.zeros((4, 4, 5)), "shape"),
        (np.zeros(4), "shape"),
        (np.zeros((0, 4, 3)), "shape"),
        (np.zeros((4, 4), np.int64), "int64"),
        (np.array([{"a": 1}], dtype=object), "not a plain"),
    ],
)
def test_npy_that_cannot_be_used(tmp_path: Path, values: np.ndarray, message: str) -> None:
    np.save(tmp_path / "y.npy", values, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        Picture.read(tmp_path / "y.npy")


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("planes", ["contig", "separate"])
def test_16_bit_tiff_of_other_programs(tmp_path: Path, order: str, planes: str) -> None:
    pixels = ramp(9, 14, 3, 65535)
    stored = pixels if planes == "contig" else pixels.transpose(2, 0, 1)
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric="rgb", planarconfig=planes, byteorder=order)
    assert np.array_equal(Picture.read(tmp_path / "a.tif").pixels, pixels)
    tifffile.imwrite(tmp_path / "b.tif", pixels[:, :, 0], photometric="minisblack", byteorder=order)
    grey = Picture.read(tmp_path / "b.tif")
    assert grey.grey and grey.bits == 16 and np.array_equal(grey.pixels[:, :, 2], pixels[:, :, 0])


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_16_bit_tiff_with_lzw(tmp_path: Path, channels: int) -> None:
    """As OpenCV writes it; tifffile needs another package for it."""
    pixels = ramp(9, 14, channels, 65535)
    (tmp_path / "a.tif").write_bytes(lzw_tiff(pixels))
    picture = Picture.read(tmp_path / "a.tif")
    assert picture.bits == 16 and np.array_equal(picture.pixels[:, :, : min(channels, 3)], pixels[:, :, :3])
    assert channels < 4 or np.array_equal(picture.alpha, pixels[:, :, 3])
    (tmp_path / "b.tif").write_bytes(lzw_tiff(pixels, orientation=6))
    assert np.array_equal(Picture.read(tmp_path / "b.tif").pixels, np.rot90(picture.pixels, -1))


def test_floating_point_tiff(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((6, 7), np.float32)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="minisblack")
    picture = Picture.read(tmp_path / "a.tif")
    assert picture.bits == 32 and np.array_equal(picture.pixels[:, :, 1], values)
    values[2, 3] = np.nan
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="minisblack")
    with pytest.raises(UserError, match="NaN"):
        Picture.read(tmp_path / "a.tif")


def test_tiff_of_a_kind_that_is_not_taken(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", ramp(6, 7, 4, 65535), photometric="separated")
    with pytest.raises(UserError, match="not 16-bit grey or RGB"):
        Picture.read(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "b.tif", np.full((6, 7), 70000, np.int32), photometric="minisblack")
    with pytest.raises(UserError, match="32-bit whole numbers"):
        Picture.read(tmp_path / "b.tif")


def test_cmyk_with_a_broken_profile(tmp_path: Path) -> None:
    image = Image.fromarray(data.astronaut()[:20, :20]).convert("CMYK")
    image.save(tmp_path / "a.jpg", icc_profile=b"no profile", quality=100)
    picture = Picture.read(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as stored:
        assert np.array_equal(picture.pixels, np.asarray(stored.convert("RGB")))
    assert picture.icc is None


def test_a_transparent_picture_is_laid_on_white_where_it_must_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alpha = np.repeat(np.array([[0, 51, 255]], np.uint8), 8, axis=0)
    Picture(np.full((8, 3, 3), 100, np.uint8), alpha).write(tmp_path / "a.bmp")
    assert "laid on white, because BMP has no transparency" in caplog.text
    written = Picture.read(tmp_path / "a.bmp")
    assert written.alpha is None and written.pixels[4, :, 1].tolist() == [255, 224, 100]


def test_grey_in_a_format_without_grey(tmp_path: Path) -> None:
    grey = np.broadcast_to(ramp(8, 8, 1), (8, 8, 3))
    Picture(grey, ramp(8, 8, 1)[:, :, 0], grey=True).write(tmp_path / "a.webp")
    again = Picture.read(tmp_path / "a.webp")
    assert np.array_equal(again.pixels, grey) and again.alpha is not None


def png_bytes() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(data.astronaut()[:64, :64]).save(buffer, "PNG")
    return buffer.getvalue()


def jpeg_bytes(quality: int = 90) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(data.astronaut()[:64, :64]).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.png", b"", "0 bytes"),
        ("a.png", b"this is text, and not short\n" * 10, "not a picture"),
        ("a.png", png_bytes()[:2000], "damaged or cut short"),
        ("a.png", png_bytes()[:20], "not a picture|damaged"),
        ("a.jpg", jpeg_bytes()[:900], "damaged or cut short"),
        ("a.npy", b"no array", "not a plain"),
        ("a.heic", b"\0\0\0\x18ftypheic", "heic|not a picture|damaged"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        Picture.read(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Picture.read(tmp_path / "none.png")
    with pytest.raises(UserError, match="is a folder"):
        Picture.read(tmp_path)


def test_decompression_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(png_bytes())
    np.save(tmp_path / "a.npy", np.zeros((40, 40)))
    monkeypatch.setattr(formats, "MAX_PIXELS", 1000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    for name in ("a.png", "a.npy"):
        with pytest.raises(UserError, match="claims more than"):
            Picture.read(tmp_path / name)
    monkeypatch.undo()
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + png_bytes()[33:])
    with pytest.raises(UserError, match="megapixels"):
        Picture.read(tmp_path / "b.png")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"the old one")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Picture(ramp(4, 4)).write(tmp_path / "a.png")
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_bytes() == b"the old one"


def test_names_that_are_no_picture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected one of .*\.png"):
        Picture(ramp(4, 4)).write(tmp_path / "a.xyz")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        Picture(ramp(4, 4)).write(tmp_path / "file" / "a.png")
    for folder in ("file", "file/deep/deeper"):
        with pytest.raises(
            UserError, match=r"a\.png could not be written: .*/file is not a folder; name another place"
        ):
            Picture(ramp(4, 4)).write(tmp_path / folder / "a.png")


@pytest.mark.parametrize("quality", [5, 10, 50, 75, 90, 100])
def test_jpeg_quality_is_read_from_the_tables(tmp_path: Path, quality: int) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg_bytes(quality))
    assert jpeg_quality(tmp_path / "a.jpg") == quality


def test_jpeg_quality_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png_bytes())
    with pytest.raises(UserError, match="not a JPEG"):
        jpeg_quality(tmp_path / "a.png")


def test_find_pictures_keeps_the_tree_and_passes_over_other_files(tmp_path: Path) -> None:
    for name in ["b.png", "sub/a.JPG", "sub/deep/c.npy", "notes.txt", ".hidden/x.png", "out/y.png"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_pictures([tmp_path], outside=tmp_path / "out")
    assert [relative.as_posix() for _, relative in found] == ["b.png", "sub/a.JPG", "sub/deep/c.npy"]
    assert [relative.name for _, relative in find_pictures([tmp_path / "notes.txt"])] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no pictures"):
        find_pictures([tmp_path / "empty"])
    assert len(find_pictures([tmp_path / "empty", tmp_path / "sub"])) == 2


def test_heic_round_trip(tmp_path: Path) -> None:
    picture = Picture(np.ascontiguousarray(data.astronaut()[:64, :96]), icc=srgb_profile())
    picture.write(tmp_path / "a.heic", quality=95)
    again = Picture.read(tmp_path / "a.heic")
    error = (again.pixels.astype(float) - picture.pixels.astype(float)) ** 2
    assert again.size == (64, 96)
    assert -10 * np.log10(error.mean() / 255**2) > 30
    assert again.icc is not None


@pytest.mark.parametrize("quality", [30, 60, 80, 95])
@pytest.mark.parametrize("scale", [1, 6])
def test_the_noise_that_jpeg_left(tmp_path: Path, quality: int, scale: int) -> None:
    clean = Image.fromarray(data.coffee()).resize((600 // scale, 400 // scale), Image.Resampling.BICUBIC)
    clean.save(tmp_path / "a.jpg", quality=quality)
    picture = Picture.read(tmp_path / "a.jpg")
    error = float((unit_float(picture.pixels) - unit_float(np.asarray(clean))).std())
    assert 0.3 * error < jpeg_noise(picture) < 1.5 * error
    picture.write(tmp_path / "a.png")
    assert jpeg_noise(Picture.read(tmp_path / "a.png")) == 0 == jpeg_noise(Picture(picture.pixels))


def test_pages_that_are_not_read_are_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pages = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    for name in ("scan.tiff", "moving.webp"):
        pages[0].save(tmp_path / name, save_all=True, append_images=pages[1:], lossless=True)
        assert Picture.read(tmp_path / name).pixels[0, 0].tolist() == [255, 0, 0]
        assert f"{name} has several pages; the first is read" in caplog.text
    caplog.clear()
    pages[0].save(tmp_path / "one.tiff")
    assert Picture.read(tmp_path / "one.tiff").size == (6, 8) and not caplog.text


# ---------------------------------------------------------------------------------------------------------
# what people give in Python


def same(one: Picture, other: Picture) -> bool:
    """Whether two pictures hold the same, wherever they were read from."""
    alphas = one.alpha is other.alpha or (one.alpha is not None and np.array_equal(one.alpha, other.alpha))
    facts = [(picture.bits, picture.grey, picture.icc, picture.exif, picture.pixels.dtype) for picture in (one, other)]
    return np.array_equal(one.pixels, other.pixels) and alphas and facts[0] == facts[1]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "I;16", "I", "F", "CMYK"])
def test_a_pillow_image_is_taken_as_its_file(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(data.astronaut()[:40:2, :50:2])
    if mode.startswith("I"):
        image = Image.fromarray(ramp(20, 25, 1, 65535)[:, :, 0])
        image = image if mode == "I;16" else image.convert("I")
    elif mode == "F":
        image = Image.fromarray(np.random.default_rng(0).random((20, 25), np.float32))
    elif mode.endswith("A"):
        image.putalpha(77)
    path = tmp_path / ("a.png" if mode in ("I;16", "PA") else "a.tif")
    image = image if image.mode == mode else image.convert(mode)
    (image if mode != "PA" else image.convert("RGBA")).save(path)
    picture = as_picture(image)
    assert same(picture, Picture.read(path)) and picture.grey == (mode[0] in "1LIF") and picture.pixels.std() > 0
    with Image.open(path) as opened:
        assert same(as_picture(opened), picture)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif"])
def test_a_pillow_image_keeps_its_metadata(tmp_path: Path, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "Maker"
    path = tmp_path / f"a{suffix}"
    Image.fromarray(ramp(6, 9)).save(path, exif=exif, icc_profile=srgb_profile())
    picture = Picture.read(path)
    assert picture.size == (9, 6) and picture.icc == srgb_profile()
    for name in ("before", "after"):
        with Image.open(path) as image:
            if name == "after":
                image.load()
            assert same(as_picture(image), picture) and same(as_picture(image), picture)
            assert image.getexif().get(0x0112) == (None if suffix == ".tif" else 6)  # which Pillow turns by itself
            assert same(as_picture(image.convert("RGB").copy()), picture) or suffix == ".tif"


def test_pillow_images_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.png").write_bytes(png_bytes()[:2000])
    for image, message in (
        (Image.new("RGB", (0, 4)), "no pixels: its size is 0×4"),
        (Image.new("I", (4, 4), 70000), "the Pillow image has 32-bit whole numbers"),
        (Image.new("F", (4, 4), 200), "the Pillow image has values from 200 to 200; .* divide by 255"),
        (Image.open(tmp_path / "short.png"), "the Pillow image of mode RGB cannot be read .*; convert it to RGB"),
    ):
        with pytest.raises(UserError, match=message):
            as_picture(image)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (png_bytes(), "not bytes; for bytes or an open file, use Picture.read"),
        (io.BytesIO(png_bytes()), "not BytesIO; for bytes or an open file"),
        (137, "not int; for bytes"),
        (torch.zeros(3, 0, 0), r"no pixels: its shape is \(3, 0, 0\)"),
        (np.zeros((0, 4, 3), np.uint8), r"no pixels: its shape is \(0, 4, 3\)"),
    ],
)
def test_what_is_no_picture(given: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_picture(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "LA", "RGBA"])
def test_a_pillow_mask_is_taken_as_its_file(tmp_path: Path, mode: str) -> None:
    mask = Image.fromarray(ramp(16, 20)).convert("L").point(lambda level: min(255, 220 + level // 4))  # around `WHITE`
    image = mask.convert(mode)
    if mode == "RGBA":
        image.putalpha(mask.point(lambda level: max(0, 8 * (level - 224))))
    exif = Image.Exif()
    exif[0x0112] = 8
    image.save(tmp_path / "mask.png", exif=exif)
    expected = read_mask(tmp_path / "mask.png")[0, 0]
    with Image.open(tmp_path / "mask.png") as opened:
        known = as_mask(opened, WHITE)
    assert isinstance(known, torch.Tensor) and torch.equal(known, expected) and 0 < float(expected.mean()) < 1


def test_masks_in_python(caplog: pytest.LogCaptureFixture) -> None:
    levels = np.array([[0, 229, 230, 255]], np.uint8)
    holes = torch.tensor([[0.0, 0, 1, 1]])
    for mask in (levels, torch.from_numpy(levels), levels[:, ::-1][:, ::-1], Image.fromarray(levels)):
        known = as_mask(mask, WHITE)
        assert isinstance(known, torch.Tensor) and torch.equal(known, holes)
    zeros_and_ones = np.array([[0, 1]])
    for dtype in (bool, np.uint8, np.int64, np.float64):
        known = as_mask(zeros_and_ones.astype(dtype), WHITE)
        assert isinstance(known, torch.Tensor) and known.tolist() == [[0, 1]]
    assert as_mask(Path("mask.png"), WHITE) == Path("mask.png") and not caplog.text
    as_mask(np.array([[0, 0, 255]], np.uint8), WHITE)
    assert "67 % of the mask are holes; black is a hole and white is known" in caplog.text
    for mask, message in (
        (np.full((2, 2), 255, np.uint8), "the mask has no hole"),
        (Image.new("L", (2, 2)), "the mask has no known pixel"),
        (np.array(["a"]), "an array of numbers or a tensor, not an array of <U1"),
        ([[0, 1]], "a mask is a file, a Pillow image, an array of numbers or a tensor, not list"),
    ):
        with pytest.raises(UserError, match=message):
            as_mask(mask, WHITE)  # type: ignore[arg-type]


def test_kernels_in_python(tmp_path: Path) -> None:
    values = np.arange(6.0).reshape(2, 3)
    np.save(tmp_path / "kernel.npy", values)
    for array in (values, values.astype(np.uint8), values[::-1][::-1]):
        kernel = as_kernel(array)
        assert isinstance(kernel, torch.Tensor) and torch.equal(kernel, read_kernel(tmp_path / "kernel.npy"))
    given = torch.ones(3, 3)
    assert as_kernel(given) is given and as_kernel("kernel.npy") == "kernel.npy"
    for wrong, message in (
        (np.ones((3, 3, 3)), "3-D of float64; expected a 2-D array"),
        (np.zeros((3, 3)), "sums to 0.0; expected finite numbers"),
        (np.full((3, 3), np.nan), "sums to nan"),
        ([[1.0]], "a kernel is a file, a 2-D array of numbers or a tensor, not list"),
    ):
        with pytest.raises(UserError, match=message):
            as_kernel(wrong)  # type: ignore[arg-type]


def test_whole_numbers_of_an_unclear_range_are_refused() -> None:
    small = Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8))
    with pytest.raises(UserError, match="whole numbers up to 255, which may have 8 bits or 16; convert it to L"):
        as_picture(small)
    assert as_picture(small.convert("L")).grey
    deep = Image.fromarray(1000 * np.arange(64, dtype=np.int32).reshape(8, 8))
    assert as_picture(deep).pixels.dtype == np.uint16


def test_a_mask_of_three_equal_channels() -> None:
    mask = np.full((6, 5), 255, np.uint8)
    mask[2:4] = 0
    for given in (mask, np.stack([mask] * 3, axis=2)):
        known = as_mask(given, WHITE)
        assert isinstance(known, torch.Tensor) and known.shape == (6, 5) and float(known.mean()) == pytest.approx(2 / 3)
