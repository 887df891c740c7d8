from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from skimage import data

from ddc.cli import main
from ddc.images import Picture
from ddc.operators import Bicubic


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Picture(data.astronaut()[:64, :96]).write(path)
    return path


def degrade(photo: Path, out: Path, *options: object) -> int:
    return main(["degrade", str(photo), "-o", str(out), *map(str, options)])


def test_super_resolution_writes_the_small_picture(photo: Path, tmp_path: Path) -> None:
    assert degrade(photo, tmp_path / "y.png", "--task", "sr4") == 0
    small = Picture.read(tmp_path / "y.png")
    expected = (Bicubic(4)(2 * Picture.read(photo).tensor[None] - 1)[0] + 1) / 2
    assert small.size == (16, 24) and (small.tensor - expected.clamp(0, 1)).abs().max() < 0.51 / 255


@pytest.mark.parametrize("ext", ["png", "webp", "tiff", "npy"])
def test_inpainting_carries_its_mask(photo: Path, tmp_path: Path, ext: str) -> None:
    assert degrade(photo, tmp_path / "y", "--task", "inpaint92", "--ext", ext) == 0
    y = Picture.read(tmp_path / "y" / f"photo.{ext}")
    assert y.mask is not None and 0.04 < float(y.mask.mean()) < 0.12
    kept = y.mask[0] > 0
    difference = (y.tensor - Picture.read(photo).tensor)[:, kept]
    assert difference.abs().max() < 0.51 / 255
    assert (y.tensor[:, ~kept] - 0.5).abs().max() < 0.51 / 255


def test_a_hole_larger_than_the_picture_is_refused(
    photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert degrade(photo, tmp_path / "y.png", "--task", "box999") == 2
    assert "box999 leaves nothing of photo.png, 96×64; name a smaller hole" in capsys.readouterr().err
    assert not (tmp_path / "y.png").exists()


def test_what_was_degraded_can_be_restored(photo: Path, tmp_path: Path, tiny_model: Path) -> None:
    assert degrade(photo, tmp_path / "y", "--task", "inpaint50") == 0
    options = ["--task", "inpaint", "--solver", "ddnm", "--steps", "3", "--model", str(tiny_model)]
    assert main(["restore", str(tmp_path / "y"), "-o", str(tmp_path / "x"), *options]) == 0
    y, x = Picture.read(tmp_path / "y" / "photo.png"), Picture.read(tmp_path / "x" / "photo.png")
    assert y.mask is not None and x.alpha is None
    assert (y.tensor - x.tensor)[:, y.mask[0] > 0].abs().max() < 1.01 / 255


def test_noise_has_the_level_that_was_asked_for(photo: Path, tmp_path: Path) -> None:
    assert degrade(photo, tmp_path / "y.npy", "--task", "denoise", "--sigma", 0.1, "--ext", "npy") == 0
    y = Picture.read(tmp_path / "y.npy").tensor
    noise = y - Picture.read(photo).tensor
    assert float(noise.std()) == pytest.approx(0.1, rel=0.03) and abs(float(noise.mean())) < 0.005
    assert y.min() < 0 or y.max() > 1  # .npy keeps what lies beyond black and white


def test_noise_on_observed_pixels_has_the_full_level(photo: Path, tmp_path: Path) -> None:
    """Mask and noise must be independent: the pixels that are kept are not those with little noise."""
    assert degrade(photo, tmp_path / "y.npy", "--task", "inpaint70", "--sigma", 0.1, "--ext", "npy") == 0
    y = Picture.read(tmp_path / "y.npy")
    assert y.mask is not None
    kept = y.mask[0] > 0
    noise = (y.tensor - Picture.read(photo).tensor)[:, kept]
    assert torch.allclose(noise.std(1), torch.tensor(0.1), rtol=0.06)
    assert (y.tensor[:, ~kept] == 0.5).all()  # and none in the holes


def test_seeds_are_per_name(photo: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin.png"
    twin.write_bytes(photo.read_bytes())
    options = ("--task", "denoise", "--sigma", 0.1)
    assert degrade(photo, tmp_path / "a", *options) == 0
    assert main(["degrade", str(twin), str(photo), "-o", str(tmp_path / "b"), *map(str, options)]) == 0
    assert degrade(photo, tmp_path / "c", *options, "--seed", 5) == 0
    alone, again = (Picture.read(tmp_path / folder / "photo.png").pixels for folder in "ab")
    assert np.array_equal(alone, again)
    assert not np.array_equal(alone, Picture.read(tmp_path / "b" / "twin.png").pixels)
    assert not np.array_equal(alone, Picture.read(tmp_path / "c" / "photo.png").pixels)


def test_the_noise_of_a_tall_picture_is_one_field(tmp_path: Path) -> None:
    Picture(np.full((300, 8, 3), 128, np.uint8)).write(tmp_path / "tall.png")
    assert degrade(tmp_path / "tall.png", tmp_path / "y.npy", "--task", "denoise", "--sigma", 0.1) == 0
    y = Picture.read(tmp_path / "y.npy").tensor - 128 / 255
    assert float(y.std()) == pytest.approx(0.1, rel=0.05)
    assert (y[:, :128] - y[:, 128:256]).abs().mean() > 0.05  # bands differ


@pytest.mark.parametrize("size", [(3, 5), (4, 6)])
def test_a_kernel_is_convolved_or_correlated(tmp_path: Path, size: tuple[int, int]) -> None:
    """A point becomes the kernel; OpenCV's filter2D makes the kernel turned by 180° of it, about the tap n // 2."""
    point = np.zeros((21, 21, 3), np.float32)
    point[10, 10] = 1
    kernel = np.arange(1, 1 + size[0] * size[1], dtype=np.float32).reshape(size)
    kernel /= kernel.sum()
    np.save(tmp_path / "point.npy", point)
    np.save(tmp_path / "kernel.npy", kernel)
    rows, columns = np.indices(size)
    for options, sign in (((), 1), (("--correlation",), -1)):
        expected = np.zeros((21, 21))
        expected[10 + sign * (rows - size[0] // 2), 10 + sign * (columns - size[1] // 2)] = kernel
        out = tmp_path / f"{sign}.npy"
        assert (
            degrade(tmp_path / "point.npy", out, "--task", "blur", "--kernel", tmp_path / "kernel.npy", *options) == 0
        )
        assert np.abs(np.load(out)[:, :, 0] - expected).max() < 1e-5


def test_colourisation_writes_grey(photo: Path, tmp_path: Path) -> None:
    assert degrade(photo, tmp_path / "y.png", "--task", "colorize") == 0
    with PIL.Image.open(tmp_path / "y.png") as image, PIL.Image.open(photo) as source:
        assert image.mode == "L"
        assert np.abs(np.asarray(image).astype(int) - np.asarray(source.convert("L"))).max() <= 1


def test_default_format_is_png_for_jpeg_sources(photo: Path, tmp_path: Path) -> None:
    PIL.Image.open(photo).save(tmp_path / "a.jpg")
    assert degrade(tmp_path / "a.jpg", tmp_path / "y", "--task", "gauss") == 0
    assert [file.name for file in (tmp_path / "y").iterdir()] == ["a.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "inpaint92", "--ext", "jpg"), "cannot hold the mask"),
        (("--task", "inpaint"), "needs a mask"),
        (("--task", "blurry"), "not known"),
        (("--task", "sr4", "--sigma", "-1"), "sigma"),
        (("--task", "sr4", "--sigma", "inf"), "sigma"),
        (("--task", "inpaint100"), "between 0 and 100"),
    ],
)
def test_bad_options(
    photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert degrade(photo, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("ddc: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_failures_are_listed(photo: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.png").write_text("text")
    (tmp_path / "in" / "good.png").write_bytes(photo.read_bytes())
    assert degrade(tmp_path / "in", tmp_path / "out", "--task", "jpeg10") == 1
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["ddc-failures.json", "good.png"]


def test_a_folder_is_degraded_as_far_as_it_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, side in (("large", 64), ("small", 16)):
        Picture(data.astronaut()[:side, :side]).write(tmp_path / "in" / f"{name}.png")
    assert degrade(tmp_path / "in", tmp_path / "y", "--task", "box32") == 1
    assert "box32 leaves nothing of small.png" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "y").iterdir()) == ["ddc-failures.json", "large.png"]
    assert degrade(tmp_path / "in" / "large.png", tmp_path / "y.jpg", "--task", "inpaint92") == 2
    assert "y.jpg cannot hold the mask in an alpha channel; use --ext png" in capsys.readouterr().err
