"""TIFF beyond 8 bits, the sizes that a format holds, and EXIF with directories."""

import io
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import ExifTags, Image

from ddc.errors import UserError
from ddc.formats import MAX_JPEG_SIDE, MAX_WEBP_SIDE, check_fits
from ddc.images import Picture
from tiny import lzw_tiff

VALUES = np.random.default_rng(0).random((12, 10, 3), np.float32)
CAMERA = {0x829A: 0.02, 0x9003: "2024:01:01 00:00:00", 0x927C: b"a note of the maker"}
PLACE = {1: "N", 2: (48.0, 8.0, 30.5), 3: "E", 4: (11.0, 34.0, 2.25)}


def with_tag(file: bytes, tag: int, value: int) -> bytes:
    """The bytes of a little-endian TIFF, with another value of a tag."""
    start = next(file.index(head) for kind in (3, 4) if (head := np.array([tag, kind], "<u2").tobytes()) in file)
    return file[: start + 8] + np.array(value, "<u4").tobytes() + file[start + 12 :]


@pytest.mark.parametrize("layout", ["contig", "separate", "deflate", "lzw"])
def test_a_16_bit_tiff_with_premultiplied_alpha(tmp_path: Path, layout: str) -> None:
    generator = np.random.default_rng(1)
    colours, alpha = generator.integers(0, 65536, (12, 10, 3)), generator.integers(4096, 65536, (12, 10, 1))
    alpha[0, :3, 0] = 0, 1, 65535
    premultiplied = np.rint(colours * (alpha / 65535))
    premultiplied[0, 1] = 1, 0, 7  # more than its alpha
    stored = np.concatenate([premultiplied, alpha], axis=2).astype(np.uint16)
    path = tmp_path / "a.tif"
    if layout == "lzw":
        path.write_bytes(with_tag(lzw_tiff(stored), 338, 1))
    else:
        planes = "separate" if layout == "separate" else "contig"
        pixels = stored.transpose(2, 0, 1) if planes == "separate" else stored
        compression = "adobe_deflate" if layout == "deflate" else None
        kind = {"photometric": "rgb", "extrasamples": ["assocalpha"], "planarconfig": planes}
        tifffile.imwrite(path, pixels, compression=compression, **kind)
    picture = Picture.read(path)
    assert picture.bits == 16 and picture.alpha is not None and np.array_equal(picture.alpha, alpha[:, :, 0])
    error = np.abs(picture.pixels.astype(int) - colours)
    assert error[1:].max() <= 0.5 * 65535 / 4096 + 1 and np.array_equal(picture.pixels[0, 2], colours[0, 2])
    assert picture.pixels[0, 0].tolist() == [0, 0, 0] and picture.pixels[0, 1].tolist() == [65535, 0, 65535]


def test_a_16_bit_tiff_with_a_channel_of_no_meaning(tmp_path: Path) -> None:
    stored = np.random.default_rng(2).integers(0, 65536, (9, 14, 4)).astype(np.uint16)
    (tmp_path / "a.tif").write_bytes(with_tag(lzw_tiff(stored), 338, 0))
    picture = Picture.read(tmp_path / "a.tif")
    assert picture.alpha is None and np.array_equal(picture.pixels, stored[:, :, :3])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("compression", [None, "adobe_deflate"])
def test_a_floating_point_rgb_tiff(tmp_path: Path, dtype: type, compression: str | None) -> None:
    values = VALUES.astype(dtype)
    tags = [(274, 3, 1, 6, True), (271, 2, 0, "Maker", True)]
    kind = {"photometric": "rgb", "compression": compression, "iccprofile": b"x" * 132}
    tifffile.imwrite(tmp_path / "a.tif", values, extratags=tags, **kind)
    picture = Picture.read(tmp_path / "a.tif")
    assert picture.bits == 32 and not picture.grey and picture.alpha is None
    assert np.array_equal(picture.pixels, np.rot90(values, -1).astype(np.float32))
    assert picture.icc == b"x" * 132 and picture.exif is not None and b"Maker" in picture.exif
    content = (tmp_path / "a.tif").read_bytes()
    assert np.array_equal(Picture.read("a.tif", content).pixels, picture.pixels)


def test_further_floating_point_tiffs(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, VALUES[:, :, 0].astype(np.float16), photometric="miniswhite")
    grey = Picture.read(path)
    assert grey.grey and np.array_equal(grey.pixels[:, :, 1], 1 - VALUES[:, :, 0].astype(np.float16))
    tifffile.imwrite(path, VALUES.transpose(2, 0, 1), photometric="rgb", planarconfig="separate")
    assert np.array_equal(Picture.read(path).pixels, VALUES)
    half = np.concatenate([VALUES / 2, np.full((12, 10, 1), 0.5, np.float32)], axis=2)
    tifffile.imwrite(path, half, photometric="rgb", extrasamples=["assocalpha"])
    straight = Picture.read(path)
    assert straight.alpha is not None and (straight.alpha == 0.5).all() and np.array_equal(straight.pixels, VALUES)
    tifffile.imwrite(path, 255 * VALUES, photometric="rgb")
    with pytest.raises(UserError, match="divide by 255"):
        Picture.read(path)


def test_floating_point_tiffs_that_are_not_read(capfd: pytest.CaptureFixture[str]) -> None:
    encoded = io.BytesIO()
    tifffile.imwrite(encoded, VALUES, photometric="rgb", metadata=None)
    for content, message in (
        (with_tag(encoded.getvalue(), 259, 5), "a.tif is a TIFF whose compression needs another package"),
        (with_tag(encoded.getvalue(), 262, 8), "a.tif is not a picture"),  # Lab
        (b"II*\0 and no directory", "a.tif is not a picture"),
    ):
        with pytest.raises(UserError, match=message):
            Picture.read("a.tif", content)
    assert not any(capfd.readouterr())  # a library's own messages


def test_the_longest_sides(tmp_path: Path) -> None:
    for name, longest in (("a.jpg", MAX_JPEG_SIDE), ("b.webp", MAX_WEBP_SIDE)):
        path = tmp_path / name
        check_fits(path, 8, longest)
        Picture(np.zeros((1, longest, 3), np.uint8)).write(path)
        path.unlink()
        with pytest.raises(UserError, match=rf"{name} .* at most {longest} pixels a side; write PNG") as checked:
            check_fits(path, longest + 1, 8)
        with pytest.raises(UserError) as written:
            Picture(np.zeros((1, longest + 1, 3), np.uint8)).write(path)
        assert str(checked.value) == str(written.value) and not list(tmp_path.iterdir())
    for name in ("a.png", "b.tiff", "c.npy", "folder"):
        check_fits(name, 10**6, 10**6)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("grey", [False, True])
def test_a_tiff_keeps_camera_and_place(tmp_path: Path, bits: int, grey: bool) -> None:
    exif = Image.Exif()
    exif[0x010F] = "Maker"
    exif[ExifTags.IFD.Exif] = CAMERA | {ExifTags.IFD.Interop: {1: "R98"}}
    exif[ExifTags.IFD.GPSInfo] = PLACE
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.jpg", exif=exif)
    pixels = np.random.default_rng(3).integers(0, 2**bits, (9, 7, 3)).astype(f"uint{bits}")
    pixels = np.broadcast_to(pixels[:, :, :1], pixels.shape) if grey else pixels
    profile = b"\0" * 16 + (b"GRAY" if grey else b"RGB ") + b"\0" * 112
    path = tmp_path / "a.tif"
    Picture(pixels, bits=bits, grey=grey, icc=profile, exif=Picture.read(tmp_path / "a.jpg").exif).write(path)
    with Image.open(path) as image:
        written = image.getexif()
        assert written[0x010F] == "Maker" and written.get_ifd(ExifTags.IFD.Interop) == {1: "R98"}
        camera, place = written.get_ifd(ExifTags.IFD.Exif), written.get_ifd(ExifTags.IFD.GPSInfo)
        assert {tag: camera[tag] for tag in CAMERA} == CAMERA and place == PLACE
    again = Picture.read(path)
    assert np.array_equal(again.pixels, pixels) and again.icc == profile and again.grey == grey
    assert np.array_equal(np.atleast_3d(tifffile.imread(path)), pixels[:, :, :1] if grey else pixels)
    again.write(tmp_path / "b.jpg")
    with Image.open(tmp_path / "b.jpg") as image:
        assert image.getexif().get_ifd(ExifTags.IFD.GPSInfo) == PLACE
