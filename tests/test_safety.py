"""Files that must not run, folders that must not be lost, and names that must not be confused."""

import io
import json
import os
import re
import shutil
import struct
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from skimage import data

from ddc.cli import main
from ddc.datasets import find_sources, read_pixels
from ddc.errors import UserError
from ddc.images import Picture
from ddc.jpegfile import jpeg_settings
from ddc.operators.blur import read_kernel
from ddc.operators.inpaint import read_mask
from ddc.solvers.pnp_admm import DnCNN
from ddc.training.output import save_model

ROOT = Path(__file__).parents[1]
ENDLESS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n{ } loop\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("read", [Picture.read, read_mask, read_kernel])
def test_a_program_in_the_clothes_of_a_picture_is_not_run(read: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "loop.png"
    path.write_bytes(ENDLESS)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"loop\.png"):
        read(path)
    assert time.monotonic() - started < 5
    assert jpeg_settings(path) is None
    assert read_pixels(find_sources([path])[0]) is None


@pytest.mark.parametrize("kind", ["GIF", "PPM", "ICO", "PCX", "TGA"])
def test_formats_that_are_not_named_are_refused(kind: str, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "a.png", kind)
    with pytest.raises(UserError, match="not a picture that can be read; expected PNG, JPEG"):
        Picture.read(tmp_path / "a.png")


def test_an_export_does_not_delete_other_files(tmp_path: Path) -> None:
    model = DnCNN(depth=2, width=4)
    state = dict(model.state_dict())
    photos = tmp_path / "photos"
    (photos / "2020").mkdir(parents=True)
    (photos / "2020" / "wedding.png").write_bytes(b"irreplaceable")
    with pytest.raises(UserError, match=r"2020/wedding\.png in it is not part of a model"):
        save_model(model, photos, state, {}, "fp32", None)
    assert (photos / "2020" / "wedding.png").read_bytes() == b"irreplaceable"


def test_an_export_replaces_neither_a_file_nor_a_folder_of_models(tiny_model: Path, tmp_path: Path) -> None:
    model, (thesis, models) = DnCNN(depth=2, width=4), (tmp_path / "thesis", tmp_path / "models")
    thesis.write_text("irreplaceable")
    shutil.copytree(tiny_model, models)
    for path in (thesis, models):
        with pytest.raises(UserError, match="name a new folder"):
            save_model(model, path, dict(model.state_dict()), {}, "fp32", None)
    assert thesis.read_text() == "irreplaceable" and (models / "prior" / "unet" / "config.json").is_file()
    save_model(model, models / "network", dict(model.state_dict()), {}, "fp32", None)
    assert DnCNN.from_pretrained(models / "network").config["width"] == 4


def test_an_export_replaces_a_model_and_nothing_beside_it(tmp_path: Path) -> None:
    model, folder = DnCNN(depth=2, width=4), tmp_path / "model"
    for name in ("model.old", "model.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    for value in (0.0, 1.0):
        state = {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}
        save_model(model, folder, state, {}, "fp32", None)
        assert all((tensor == value).all() for tensor in DnCNN.from_pretrained(folder).state_dict().values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.old", "model.partial"]
    assert (tmp_path / "model.old" / "notes.txt").read_text() == "mine"


def test_samples_overwrite_neither_inputs_nor_each_other(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "v"
    for name in ("b.png", "b_r_1.png"):
        Picture(np.full((16, 16, 3), 90, np.uint8)).write(folder / name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = ["restore", "--task", "denoise", "--model", str(tiny_model), "--samples", "2"]
    assert main([*words, str(folder / "b.png"), str(folder / "b_r_1.png"), "-o", str(folder), "--suffix", "_r"]) == 2
    assert "would overwrite an input" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    (folder / "b_r_1.png").rename(folder / "b_1.png")
    assert main([*words, str(folder), "-o", str(tmp_path / "out")]) == 2
    assert "would both write" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_second_run_does_not_take_samples_for_inputs(tiny_model: Path, tmp_path: Path) -> None:
    Picture(np.full((16, 16, 3), 90, np.uint8)).write(tmp_path / "b.png")
    words = ["restore", str(tmp_path), "-o", str(tmp_path), "--suffix", "_r", "--task", "denoise", "--sigma", "0.1"]
    files = ["b.png", "b_r.png", "b_r_1.png", "b_r_2.png", "b_r_std.npy", "b_r_std.png"]
    for samples in ("2", "2", "1"):
        assert main([*words, "--steps", "1", "--model", str(tiny_model), "--samples", samples]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == files


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with two good pictures."""
    for name in ("a.png", "z.png"):
        Picture(np.ascontiguousarray(data.astronaut()[:16, :24])).write(tmp_path / "photos" / name)
    return tmp_path / "photos"


@pytest.fixture
def run(tiny_model: Path, photos: Path, tmp_path: Path) -> Callable[..., int]:
    """Restores the folder of photos."""
    common = ["--task", "denoise", "--sigma", "0.1", "--steps", "1", "--device", "cpu", "--model", str(tiny_model)]

    def restore(*options: object, also: tuple[Path, ...] = ()) -> int:
        files = [photos, *also]
        return main(["restore", *map(str, files), "-o", str(tmp_path / "out"), *common, *map(str, options)])

    return restore


def results(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def infinite_orientation() -> bytes:
    """A PNG whose EXIF orientation is a floating-point infinity."""
    entry = struct.pack("<HHIf", 0x0112, 11, 1, float("inf"))
    exif = b"II*\0" + struct.pack("<IH", 8, 1) + entry + b"\0\0\0\0"
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def turned_tiff(orientation: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(data.astronaut()[:6, :9]).save(buffer, "TIFF", tiffinfo={274: orientation})
    return buffer.getvalue()


def big_tiff() -> bytes:
    buffer = io.BytesIO()
    pixels = data.astronaut()[:16, :24].astype(np.uint16) * 257
    tifffile.imwrite(buffer, pixels, photometric="rgb", bigtiff=True, description="a text")
    return buffer.getvalue()


DAMAGED_NPY = (
    b"\x93NUMPY\x01\0" + struct.pack("<H", 60) + b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4L".ljust(60)
)


def test_one_bad_file_does_not_stop_the_folder(
    run: Callable[..., int], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {f"turned{n}.tif": turned_tiff(n) for n in range(1, 9)} | {
        "inf.png": infinite_orientation(),
        "big.tif": big_tiff(),
    }
    bad = {"eps.png": ENDLESS, "damaged.npy": DAMAGED_NPY, "empty.jpg": b"", "cut.tif": big_tiff()[:200]}
    for name, content in (good | bad).items():
        (photos / name).write_bytes(content)
    assert run() == 1
    assert results(tmp_path / "out") == sorted(["a.png", "z.png", "ddc-failures.json", *good])
    errors = capsys.readouterr().err
    assert all(f"/{name} " in errors for name in bad) and "4 of 16 inputs failed" in errors


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_turned_tiff_is_upright(orientation: int, compression: str, tmp_path: Path) -> None:
    image = Image.fromarray(data.astronaut()[:6, :9])
    for deep in (False, True):
        path = tmp_path / f"{deep}.tif"
        if deep:
            extra = [(274, 3, 1, orientation, True)]
            pixels = data.astronaut()[:6, :9].astype(np.uint16) * 257
            tifffile.imwrite(
                path, pixels, photometric="rgb", extratags=extra, compression="zlib" if "lzw" in compression else None
            )
        else:
            image.save(path, tiffinfo={274: orientation}, compression=compression)
        turn = {
            **{2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM},
            **{5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE},
            8: Image.Transpose.ROTATE_90,
        }.get(orientation)
        expected = np.asarray(image if turn is None else image.transpose(turn))
        picture = Picture.read(path)
        assert np.array_equal(picture.pixels, expected.astype(np.uint16) * 257 if deep else expected)
        picture.write(tmp_path / "again.tif")
        assert np.array_equal(Picture.read(tmp_path / "again.tif").pixels, picture.pixels)


def test_white_is_zero(tmp_path: Path) -> None:
    grey = np.linspace(0, 65535, 48).astype(np.uint16).reshape(6, 8)
    tifffile.imwrite(tmp_path / "a.tif", grey, photometric="miniswhite")
    assert np.array_equal(Picture.read(tmp_path / "a.tif").pixels[:, :, 0], 65535 - grey)
    tifffile.imwrite(tmp_path / "b.tif", (grey / 65535).astype(np.float32), photometric="miniswhite")
    assert np.abs(Picture.read(tmp_path / "b.tif").pixels[:, :, 0] - (1 - grey / 65535)).max() < 1e-6
    Image.fromarray(grey.astype(np.uint8)).save(tmp_path / "c.tif", tiffinfo={262: 0})
    assert np.array_equal(Picture.read(tmp_path / "c.tif").pixels[:, :, 0], grey.astype(np.uint8))


def test_the_exif_of_a_camera_is_written_into_a_tiff(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010F] = "Maker"
    exif.get_ifd(0x8769)[0x829A] = (1, 60)
    Image.fromarray(data.astronaut()[:16, :24]).save(tmp_path / "a.jpg", exif=exif)
    Picture.read(tmp_path / "a.jpg").write(tmp_path / "a.tif")
    assert b"Maker" in (Picture.read(tmp_path / "a.tif").exif or b"")


def test_metadata_that_a_format_cannot_hold_does_not_lose_the_picture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exif = Image.Exif()
    exif[0x010E] = "x" * 70_000
    picture = Picture(np.ascontiguousarray(data.astronaut()[:16, :24]), exif=exif.tobytes())
    picture.write(tmp_path / "a.jpg")
    assert Picture.read(tmp_path / "a.jpg").size == (16, 24) and "without its metadata" in caplog.text


def test_a_link_to_itself_is_named_and_the_others_are_done(
    run: Callable[..., int], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "loop.png").symlink_to(photos / "loop.png")
    (photos / "loop").symlink_to(photos / "loop")
    (photos / "nowhere.png").symlink_to(photos / "gone.png")
    for options in ((), ("--suffix", "_r"), ("--skip-existing",)):
        assert run(*options) != 0
        errors = capsys.readouterr().err
        assert "loop.png cannot be opened" in errors and "nowhere.png does not exist" in errors
    assert results(tmp_path / "out") == ["a.png", "a_r.png", "ddc-failures.json", "z.png", "z_r.png"]


def test_a_folder_that_cannot_be_opened_is_reported(
    run: Callable[..., int],
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (photos / "private").mkdir()
    scandir = os.scandir

    def closed(path: Any = ".") -> Any:
        if Path(path).name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert run() == 1
    assert results(tmp_path / "out") == ["a.png", "ddc-failures.json", "z.png"]
    assert "photos/private cannot be opened (Permission denied)" in capsys.readouterr().err
    (failure,) = json.loads((tmp_path / "out" / "ddc-failures.json").read_text())
    assert failure["input"] == str(photos / "private")
    assert run("--skip-existing") == 2  # nothing else to do
    assert main(["restore", str(photos / "private"), "-o", str(tmp_path / "other")]) == 2
    assert "private cannot be opened" in capsys.readouterr().err


def test_files_in_a_closed_folder(
    run: Callable[..., int],
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stat = Path.stat

    def closed(path: Path, **options: Any) -> os.stat_result:
        if "closed" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", closed)
    assert run(also=(tmp_path / "closed" / "x.png",)) == 1
    assert results(tmp_path / "out") == ["a.png", "ddc-failures.json", "z.png"]
    assert "closed/x.png cannot be opened (Permission denied)" in capsys.readouterr().err
    for option, task in (("--mask", "inpaint"), ("--kernel", "blur"), ("--model", "denoise"), ("--network", "denoise")):
        line = ["restore", str(photos / "a.png"), "-o", str(tmp_path / "new"), "--task", task]
        assert main([*line, option, str(tmp_path / "closed" / "x.png")]) == 2, option
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and "closed" in errors and errors.startswith("ddc: "), option
    assert not (tmp_path / "new").exists()


def test_an_output_that_cannot_be_written(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system", "out")

    monkeypatch.setattr(Path, "mkdir", read_only)
    for options in (("--ext", "npy"), ("--samples", "2"), ("--ext", "heic")):
        assert run(*options) == 2
        errors = capsys.readouterr().err
        assert errors.count("could not be written (Read-only file system)") == 2 and "none of the 2 inputs" in errors
    assert not (tmp_path / "out").exists()


def test_a_picture_that_its_format_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.heic could not be written .*; try another format"):
        Picture(np.zeros((5000, 1, 3), np.uint8)).write(tmp_path / "a.heic")
    with pytest.raises(UserError, match=r"b\.webp cannot be WebP"):
        Picture(np.zeros((1, 20_000, 3), np.uint8)).write(tmp_path / "b.webp")
    with pytest.raises(UserError, match=r"b\.jpg could not be written"):
        Picture(np.zeros((1, 70_000, 3), np.uint8)).write(tmp_path / "b.jpg")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "a", "b"))]


@pytest.mark.skipif(sys.platform == "win32", reason="names are shorter there")
def test_names_of_255_bytes(
    run: Callable[..., int], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "ü" * 125 + "o.png"
    (photos / "z.png").rename(photos / long)
    assert len(os.fsencode(long)) == 255 and run() == 0
    assert results(tmp_path / "out") == ["a.png", long]
    assert run("--suffix", "_restored", "--skip-existing") == 1
    assert "could not be written (File name too long); check its name" in capsys.readouterr().err


def test_a_name_of_two_lines_is_named_in_one(
    run: Callable[..., int], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "two\nlines.png").touch()
    assert run() == 1
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize(("rank", "world"), [("x", "1"), ("7", "1"), ("0", "0"), ("-1", "2"), ("1", "y")])
def test_a_share_that_is_none(
    run: Callable[..., int],
    rank: str,
    world: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    assert run() == 2
    assert "expected 0 ≤ RANK < WORLD_SIZE" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_messages_name_our_distribution() -> None:
    """`ddc` on the package index is another project."""
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert name == "deep-data-consistency"
    texts = [path.read_text() for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md")]]
    named = [found for text in texts for found in re.findall(r"pip install '?([\w-]+)\[", text)]
    assert len(named) >= 4 and set(named) == {name}
