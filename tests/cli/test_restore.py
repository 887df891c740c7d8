"""`ddc restore` through `main`, as people type it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageFilter
import pytest
from skimage import data

from ddc.cli import main
from ddc.images import Picture
from ddc.jpegfile import jpeg_quality
from ddc.networks import save_network
from ddc.priors import DataConsistency
from processes import start


def files_below(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "photo.png"
    Picture(data.astronaut()[:12, :18]).write(path)
    return path


@pytest.fixture
def restore(tiny_model: Path) -> Callable[..., int]:
    def run(*arguments: object) -> int:
        return main(["restore", *map(str, arguments), "--model", str(tiny_model), "--device", "cpu"])

    return run


def test_one_file(restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "large.png"
    assert restore(photo, "-o", target, "--task", "sr4") == 0
    assert Picture.read(target).size == (48, 72)
    assert capsys.readouterr().out == f"{target}\n"


def test_an_estimated_blur_is_told(
    restore: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cat = PIL.Image.fromarray(data.chelsea()[60:180, 120:240]).filter(PIL.ImageFilter.GaussianBlur(2))
    cat.save(tmp_path / "cat.png")
    target = tmp_path / "sharp.png"
    assert restore(tmp_path / "cat.png", "-o", target, "--task", "deblur", "--steps", "1") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{target}\n"
    told = re.search(r"cat.png: restored as ((?:gauss|disc|motion)\S+) with noise 0\.0\d\d", captured.err)
    assert told and float(re.findall(r"[\d.]+", told[1])[0]) > 1


def test_what_was_found_is_told_and_a_picture_without_a_fault_is_left(
    restore: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cat = PIL.Image.fromarray(data.chelsea()[60:180, 120:240])
    cat.save(tmp_path / "fine.png")
    cat.save(tmp_path / "coarse.jpg", quality=12)
    assert restore(tmp_path, "-o", tmp_path / "out", "--steps", "1") == 0
    assert files_below(tmp_path / "out") == ["coarse.jpg", "fine.png"]
    told = capsys.readouterr().err
    assert "It was compressed as JPEG of quality 12. The marks of JPEG are removed (jpeg12)." in told
    assert "fine.png is left as it is: Nothing is wrong with it." in caplog.text
    assert np.array_equal(np.asarray(PIL.Image.open(tmp_path / "out" / "fine.png")), np.asarray(cat))


def test_without_a_place_the_result_lies_beside_the_picture(restore: Callable[..., int], tmp_path: Path) -> None:
    PIL.Image.fromarray(data.chelsea()[60:180, 120:240]).save(tmp_path / "cat.jpg", quality=12)
    assert restore(tmp_path / "cat.jpg", "--steps", "1") == 0
    assert files_below(tmp_path) == ["cat.jpg", "cat_restored.png"]
    assert restore(tmp_path, "--steps", "1") == 2 and not (tmp_path / "out").exists()


def test_a_folder_keeps_its_tree(restore: Callable[..., int], photo: Path, tmp_path: Path) -> None:
    shutil.copy(photo, photo.parent / "other.txt")
    (photo.parent / "sub").mkdir()
    PIL.Image.open(photo).save(photo.parent / "sub" / "b.jpg")
    assert restore(photo.parent, "-o", tmp_path / "out", "--task", "denoise") == 0
    assert files_below(tmp_path / "out") == ["photo.png", "sub/b.jpg"]
    options = ("--suffix", "_r", "--ext", "webp")
    assert restore(photo.parent, "-o", tmp_path / "out2", "--task", "denoise", *options) == 0
    assert files_below(tmp_path / "out2") == ["photo_r.webp", "sub/b_r.webp"]


def test_the_output_folder_may_lie_inside_the_input(restore: Callable[..., int], photo: Path) -> None:
    for _ in range(2):
        assert restore(photo.parent, "-o", photo.parent / "out", "--task", "denoise") == 0
    assert files_below(photo.parent) == ["out/photo.png", "photo.png"]


def test_json_lines(
    restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert restore(photo, "-o", tmp_path / "out", "--task", "denoise", "--sigma", "0.1", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    facts = json.loads(line)
    assert facts["input"] == str(photo) and facts["output"] == str(tmp_path / "out" / "photo.png")
    assert facts["sigma"] == 0.1 and (facts["width"], facts["height"]) == (18, 12) and facts["evaluations"] == 10


def test_a_file_that_cannot_be_read_is_listed_and_the_others_are_done(
    restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photo.parent / "broken.png").write_bytes(photo.read_bytes()[:200])
    (photo.parent / "empty.jpg").touch()
    code = restore(photo.parent, tmp_path / "missing.png", "-o", tmp_path / "out", "--task", "denoise")
    captured = capsys.readouterr()
    assert code == 1
    assert files_below(tmp_path / "out") == ["ddc-failures.json", "photo.png"]
    failures = json.loads((tmp_path / "out" / "ddc-failures.json").read_text())
    assert [Path(failure["input"]).name for failure in failures] == ["broken.png", "empty.jpg", "missing.png"]
    assert "broken.png is damaged" in captured.err and "3 of 4" in captured.err
    assert captured.out.splitlines() == [str(tmp_path / "out" / "photo.png")]
    assert restore(photo, "-o", tmp_path / "out", "--task", "denoise") == 0  # all well: the list goes
    assert files_below(tmp_path / "out") == ["photo.png"]


def test_when_all_fail_nothing_is_written(
    restore: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    assert restore(tmp_path / "a.png", tmp_path / "b.png", "-o", tmp_path / "out") == 2
    assert "none of the 2 inputs" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_skip_existing_and_shards(restore: Callable[..., int], photo: Path, tmp_path: Path) -> None:
    for index in range(5):
        shutil.copy(photo, photo.parent / f"{index}.png")
    photo.unlink()
    out = tmp_path / "out"
    assert restore(photo.parent, "-o", out, "--task", "denoise", "--shard", "2/2") == 0
    assert files_below(out) == ["1.png", "3.png"]
    stamp = (out / "1.png").stat().st_mtime_ns
    assert restore(photo.parent, "-o", out, "--task", "denoise", "--skip-existing") == 0
    assert len(files_below(out)) == 5 and (out / "1.png").stat().st_mtime_ns == stamp
    assert restore(photo.parent, "-o", out, "--task", "denoise", "--skip-existing") == 0


def test_results_beside_their_inputs_are_not_restored_again(
    restore: Callable[..., int], photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = photo.parent, ("--task", "denoise", "--sigma", "0.1", "--suffix", "_r")
    for more in ((), ("--skip-existing",)):
        assert restore(folder, "-o", folder, *options, *more) == 0
    assert files_below(folder) == ["photo.png", "photo_r.png"]
    assert restore(photo, folder / "photo_r.png", "-o", folder, *options) == 2  # named, so it is an input
    assert "photo_r.png would overwrite an input" in capsys.readouterr().err


def test_the_list_of_failures_lies_in_the_folder_of_the_results(
    restore: Callable[..., int], photo: Path, tmp_path: Path
) -> None:
    (photo.parent / "empty.png").touch()
    out, options = tmp_path / "run.1", ("--task", "denoise", "--sigma", "0.1")
    assert restore(photo.parent, "-o", out, *options) == 1
    assert files_below(out) == ["ddc-failures.json", "photo.png"]
    assert restore(photo, "-o", out / "other.png", *options) == 0  # says nothing of the earlier run
    assert files_below(out) == ["ddc-failures.json", "other.png", "photo.png"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_that_are_no_text(tiny_model: Path, photo: Path, tmp_path: Path, encoding: str) -> None:
    name = os.fsdecode(b"\xff \xc3\xbc.png")
    photo.rename(photo.with_name(name))
    out = tmp_path / "out"
    words = ["restore", photo.parent, "-o", out, "--task", "denoise", "--sigma", "0.1", "--model", tiny_model]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    process = start(words, tmp_path / "stdout", tmp_path / "stderr", environment)
    process.join(60)
    assert process.exitcode == 0 and b"Traceback" not in (tmp_path / "stderr").read_bytes()
    assert [file.name for file in out.iterdir()] == [name]
    said = (tmp_path / "stdout").read_bytes().strip()
    assert said.endswith(os.fsencode(name) if encoding == "utf-8" else rb"\udcff \xfc.png")


def test_the_only_picture_that_fails_has_its_json_line_too(
    restore: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.png").touch()
    assert restore(tmp_path / "empty.png", "-o", tmp_path / "out", "--json") == 2
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert set(json.loads(line)) == {"input", "error"} and captured.err.count("is empty") == 1


def test_a_launcher_of_several_processes_shares_the_list(
    restore: Callable[..., int], photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(photo, photo.parent / "z.png")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert restore(photo.parent, "-o", tmp_path / "out", "--task", "denoise") == 0
    assert files_below(tmp_path / "out") == ["z.png"]


def test_the_result_depends_on_seed_and_name_alone(restore: Callable[..., int], photo: Path, tmp_path: Path) -> None:
    shutil.copy(photo, photo.parent / "another.png")
    options = ("--task", "denoise", "--ext", "npy", "--batch", 2)
    assert restore(photo.parent, "-o", tmp_path / "both", *options) == 0
    assert restore(photo, "-o", tmp_path / "one", *options) == 0
    assert restore(photo, "-o", tmp_path / "seed", *options, "--seed", 1) == 0
    both, one, other = (np.load(tmp_path / name / "photo.npy") for name in ("both", "one", "seed"))
    assert np.abs(both - one).max() < 1e-3 < np.abs(one - other).max()


def test_samples(restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert restore(photo, "-o", tmp_path / "out", "--task", "denoise", "--samples", 2, "--json") == 0
    names = ["photo.png", "photo_1.png", "photo_2.png", "photo_std.npy", "photo_std.png"]
    assert files_below(tmp_path / "out") == names
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["files"] == [str(tmp_path / "out" / name) for name in names]
    mean, first, second = (Picture.read(tmp_path / "out" / f"photo{end}.png").tensor for end in ("", "_1", "_2"))
    assert (mean - (first + second) / 2).abs().max() < 2 / 255
    std = np.load(tmp_path / "out" / "photo_std.npy")
    assert std.shape == (12, 18, 3)
    with PIL.Image.open(tmp_path / "out" / "photo_std.png") as shown:
        assert shown.mode == "L"
        white_at_a_tenth = (std.mean(2) / 0.1).clip(max=1)
        assert np.abs(np.asarray(shown) / 255 - white_at_a_tenth).max() < 0.6 / 255


def test_settings_of_solvers(
    restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (photo, "-o", tmp_path / "out", "--task", "sr2", "--steps", 2, "--solver")
    assert restore(*common, "ddnm:eta=0.5") == 0
    shutil.rmtree(tmp_path / "out")
    assert restore(*common, "ddnm:zeta=0.5") == 2
    assert restore(*common, "ddnm:eta=") == 2
    error = capsys.readouterr().err
    assert "ddnm has no setting 'zeta'; it takes steps, eta" in error and "name:key=value" in error
    assert not (tmp_path / "out").exists()


def test_jpeg_quality_is_taken_from_the_file(
    restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PIL.Image.open(photo).save(tmp_path / "a.jpg", quality=23)
    assert jpeg_quality(tmp_path / "a.jpg") == 23
    assert restore(tmp_path / "a.jpg", "-o", tmp_path / "out", "--task", "jpeg", "--json") == 0
    assert json.loads(capsys.readouterr().out)["task"] == "jpeg23"
    assert restore(photo, "-o", tmp_path / "out", "--task", "jpeg") == 2
    assert "is not a JPEG file" in capsys.readouterr().err


def test_scratches_and_colours(restore: Callable[..., int], tmp_path: Path) -> None:
    faded = (0.18 + 0.6 * data.coffee()[:120, :160] / 255) * np.array([1.08, 1, 0.76])
    faded[10:120, 40:42] = 0.97
    Picture(np.rint(255 * faded.clip(0, 1)).astype(np.uint8)).write(tmp_path / "scan.png")
    assert restore(tmp_path / "scan.png", "--scratches", "--fix-colours", "--solver", "one-pass") == 0
    assert files_below(tmp_path) == ["scan.png", "scan_restored.png", "scan_restored_scratches.png"]
    mask = Picture.read(tmp_path / "scan_restored_scratches.png").tensor[0]
    assert float(mask[20:110, 40:42].mean()) < 0.2 and float(mask.mean()) > 0.8
    assert float(Picture.read(tmp_path / "scan_restored.png").tensor.quantile(0.01)) < 0.1  # black is black again
    given = ("--task", "inpaint", "--mask", tmp_path / "scan_restored_scratches.png", "--sigma", "auto")
    assert restore(tmp_path / "scan.png", "-o", tmp_path / "better.png", *given) == 0


def test_sigma_auto(restore: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, (64, 64, 3)).astype(np.float32)
    Picture(0.5 + noise).write(tmp_path / "a.png")
    assert restore(tmp_path / "a.png", "-o", tmp_path / "out", "--task", "denoise", "--sigma", "auto", "--json") == 0
    estimated = json.loads(capsys.readouterr().out)["sigma"]
    assert estimated == pytest.approx(0.1, abs=0.01)
    Picture(0.5 + 0.1 * noise).write(tmp_path / "b.png")
    expected = [("a", "denoise", estimated), ("a", "sr2", estimated), ("b", "sr2", 0.0)]
    expected += [("a", "gauss", estimated), ("b", "gauss", 0.1 * estimated)]
    for name, task, sigma in expected:  # where sigma is left out
        assert restore(tmp_path / f"{name}.png", "-o", tmp_path / name / task, "--task", task, "--json") == 0
        told = capsys.readouterr()
        assert json.loads(told.out)["sigma"] == pytest.approx(sigma, abs=1e-3)
        noted = "which is removed as well; --sigma 0 keeps it" in told.out
        assert noted == (task != "denoise" and sigma > 0)
    assert restore(tmp_path / "a.png", "-o", tmp_path / "kept", "--task", "sr2", "--sigma", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sigma"] == 0


OPERATOR = """
from ddc.operators.base import LinearOperator

class Dim(LinearOperator):
    def forward(self, x):
        return 0.5 * x

    def adjoint(self, y, size=None):
        return FACTOR * y
"""


def test_an_operator_of_ones_own(
    restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text(OPERATOR.replace("FACTOR", "0.5"))
    (tmp_path / "bad.py").write_text(OPERATOR.replace("FACTOR", "2"))
    common = (photo, "-o", tmp_path / "out", "--solver", "dds", "--steps", 2, "--operator")
    assert restore(*common, f"{tmp_path}/bad.py:Dim") == 2
    assert "not the adjoint" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert restore(*common, f"{tmp_path}/good.py:Dim") == 0
    assert files_below(tmp_path / "out") == ["photo.png"]


def test_a_blur_kernel_from_a_file(restore: Callable[..., int], photo: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "kernel.npy", np.ones((3, 3)))
    assert restore(photo, "-o", tmp_path / "out", "--task", "blur", "--kernel", tmp_path / "kernel.npy") == 0
    assert files_below(tmp_path / "out") == ["photo.png"]


def test_large_pictures_are_cut_into_tiles(
    restore: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Picture(data.astronaut()[:100, :130]).write(tmp_path / "a.png")
    assert restore(tmp_path / "a.png", "-o", tmp_path / "out", "--task", "denoise", "--tile", 64, "--json") == 0
    assert json.loads(capsys.readouterr().out)["evaluations"] > 60


def test_notes_are_logged_once_and_in_the_json_of_their_picture(
    restore: Callable[..., int],
    photo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, quality in (("fine", 95), ("rough", 20)):
        PIL.Image.open(photo).save(photo.with_name(f"{name}.jpg"), quality=quality)
    # the PNG fails as a JPEG, whereupon the others are taken one by one
    assert restore(photo.parent, "-o", tmp_path / "out", "--task", "jpeg", "--batch", 3, "--json") == 1
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    notes = {Path(line["input"]).name: line.get("notes") for line in lines}
    assert notes == {"fine.jpg": caplog.messages, "rough.jpg": [], "photo.png": None}
    assert len(caplog.messages) == 1 and "fine.jpg states quality 95" in caplog.messages[0]


def test_the_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", "--help"]) == 0
    text = capsys.readouterr().out
    assert "sr16" in text and "--mask FILE" in text and "(default: auto)" in text
    assert "None" not in text and "(default: )" not in text and "STR" not in text


def test_a_long_time_is_told_beforehand(
    restore: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Picture(data.astronaut()[:100, :130]).write(tmp_path / "a.png")
    options = (tmp_path / "a.png", "--task", "denoise", "--tile", 64, "--json")
    monkeypatch.setattr("ddc.telling.SLOW", 3600)
    assert restore(*options, "-o", tmp_path / "out") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("ddc.telling.SLOW", 0)
    assert restore(*options, "-o", tmp_path / "again") == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert re.fullmatch(rf"a\.png: 130×100 pixels in {facts['tiles']} tiles, about (a|\d+) seconds?\n", said.err)
    assert facts["tiles"] == facts["evaluations"] / 10
    assert 0.2 * facts["seconds"] < facts["forecast"] < 5 * facts["seconds"]
    monkeypatch.setattr("ddc.cli.restore.LONG", 0)
    assert restore(*options, "-o", tmp_path / "third") == 0
    assert "With --solver one-pass it takes about a second" in capsys.readouterr().err
    assert restore(*options, "-o", tmp_path / "fourth", "--solver", "one-pass") == 0
    assert re.fullmatch(r"a\.png: .* about a second\n", capsys.readouterr().err)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_the_bar_is_on_stderr_and_results_on_stdout(tiny_model: Path, photo: Path, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    words = ["restore", photo, "-o", tmp_path / "out", "--model", tiny_model, "--json", "--task", "denoise"]
    process = start(words, tmp_path / "lines", os.ttyname(theirs))
    process.join(60)
    assert process.exitcode == 0
    shown = os.read(ours, 100_000).decode()
    os.close(ours), os.close(theirs)
    assert json.loads((tmp_path / "lines").read_text())["output"] == str(tmp_path / "out" / "photo.png")
    assert "denoise" in shown and "output" not in shown


# ---------------------------------------------------------------------------------------------------------
# bad input: one line, exit code 2, no traceback, nothing written


def refused(restore: Callable[..., int], capsys: pytest.CaptureFixture[str], out: Path, *arguments: object) -> str:
    existed = out.exists()
    assert restore(*arguments, "-o", out) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.startswith("ddc: ") and captured.err.count("\n") == 1
    assert out.exists() == existed
    return captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda good: good[:150], "cut short"),
        (lambda good: b"", "0 bytes"),
        (lambda good: b"just some text\n" * 20, "not a picture"),
    ],
)
def test_bad_files(
    restore: Callable[..., int],
    photo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: Callable[[bytes], bytes],
    message: str,
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(content(photo.read_bytes()))
    assert message in refused(restore, capsys, tmp_path / "out", bad)


def test_missing_file_and_empty_folder(
    restore: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not exist" in refused(restore, capsys, tmp_path / "out", tmp_path / "none.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    assert "no pictures in it" in refused(restore, capsys, tmp_path / "out", tmp_path / "empty")
    assert "no picture was named" in refused(restore, capsys, tmp_path / "out")


def test_nan_pixels(restore: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "y.npy", np.full((8, 8, 3), np.nan, np.float32))
    assert "NaN" in refused(restore, capsys, tmp_path / "out", tmp_path / "y.npy")


def test_a_mask_of_another_size(
    restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = PIL.Image.new("L", (5, 6), 255)
    mask.putpixel((2, 2), 0)
    mask.save(tmp_path / "mask.png")
    options = ("--task", "inpaint", "--mask", tmp_path / "mask.png")
    assert "the mask is 5×6" in refused(restore, capsys, tmp_path / "out", photo, *options)
    assert "no mask was given" in refused(restore, capsys, tmp_path / "out", photo, "--task", "inpaint")
    (tmp_path / "mask.png").write_text("no picture")
    assert "cannot be read" in refused(restore, capsys, tmp_path / "out", photo, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "sr5000"), "from 2 to 16"),
        (("--task", "sharpen"), "not known"),
        (("--task", "denoise", "--sigma", "-0.1"), "sigma is -0.1"),
        (("--task", "denoise", "--sigma", "nan"), "sigma is nan"),
        (("--steps", "0"), "steps must be at least 1"),
        (("--task", "sr4", "--steps", "1001"), "between 1 and 1000"),
        (("--task", "jpeg10", "--solver", "ddrm"), "ddrm needs an operator with an SVD; jpeg10 is not"),
        (("--solver", "magic"), "expected one of ddc"),
        (("--samples", "0"), "samples must be at least 1"),
        (("--tile", "5"), "at least 64"),
        (("--device", "toaster"), "is not available"),
        (("--shard", "5/4"), "K/N"),
        (("--ext", "gif"), "not known"),
        (("--task", "sr4", "--mask", "m.png"), "does not use one"),
        (("--task", "denoise", "--mask", "m.png"), "does not use one"),
        (("--task", "jpeg", "--mask", "m.png"), "takes no mask"),
        (("--mask", "nowhere.png"), "nowhere.png does not exist"),
        (("--task", "blur"), "needs a kernel"),
        (("--operator", "nowhere.py:Op"), "nowhere.py"),
        (("--batch", "-2"), "batch must be at least 1"),
        (("--batch", "0"), "batch must be at least 1"),
        (("--quality", "300"), "from 1 to 100"),
        (("--task", "inpaint", "--mask", "nowhere.png"), "nowhere.png does not exist"),
    ],
)
def test_bad_options(
    tiny_model: Path,
    photo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    def run(*arguments: object) -> int:
        return main(["restore", *map(str, arguments), "--model", str(tiny_model)])

    assert message in refused(run, capsys, tmp_path / "out", photo, *options)


def test_a_name_of_another_format_than_asked_for(
    restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = refused(restore, capsys, tmp_path / "new.jpg", photo, "--ext", "png")
    assert "another format than --ext png" in says


def test_options_that_cannot_be_parsed(photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", str(photo), "-o", str(tmp_path / "out"), "--sigma", "much"]) == 2
    assert main(["restore", str(photo), "-o", str(tmp_path / "out"), "--no-such-option"]) == 2
    assert main(["restore"]) == 2
    assert "Traceback" not in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_bad_models(tiny_model: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def using(model: Path) -> str:
        def run(*arguments: object) -> int:
            return main(["restore", *map(str, arguments), "--model", str(model)])

        return refused(run, capsys, tmp_path / "out", photo)

    assert "does not exist" in using(tmp_path / "none")
    no_weights = shutil.copytree(tiny_model, tmp_path / "no_weights")
    weights = no_weights / "prior" / "unet" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    assert "has no weights" in using(no_weights)
    weights.with_suffix(".bin").write_bytes(b"a pickle")
    assert "is a pickle, which is not opened" in using(no_weights)
    wrong = shutil.copytree(tiny_model, tmp_path / "wrong")
    save_network(DataConsistency.from_pretrained(tiny_model / "network").unet, wrong / "prior" / "unet")
    assert "6 input" in using(wrong)
    (tmp_path / "model.ckpt").write_bytes(b"a pickle")
    assert "ddc convert" in using(tmp_path / "model.ckpt")


def test_outputs_never_overwrite_an_input(
    restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = photo.read_bytes()
    assert "would overwrite" in refused(restore, capsys, photo.parent, photo)
    assert "would overwrite" in refused(restore, capsys, photo, photo)
    link = tmp_path / "link"
    link.symlink_to(photo.parent)
    assert "would overwrite" in refused(restore, capsys, link, photo)
    shutil.copy(photo, photo.parent / "photo.bmp")
    assert "would both write" in refused(restore, capsys, tmp_path / "out", photo.parent, "--ext", "png")
    assert "several to do" in refused(restore, capsys, tmp_path / "a.png", photo.parent)
    assert photo.read_bytes() == before


def with_ctrl_c(words: list[str]) -> int:
    """A script that starts the tests in the background has them, and what they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main(words)


def test_ctrl_c_leaves_no_half_written_picture(tiny_model: Path, tmp_path: Path) -> None:
    for index in range(40):
        Picture(data.astronaut()[:64, :64]).write(tmp_path / "in" / f"{index}.png")
    command = ["restore", tmp_path / "in", "-o", tmp_path / "out", "--task", "denoise", "--steps", "50"]
    process = start([*command, "--model", tiny_model, "--device", "cpu"], stderr=tmp_path / "said", call=with_ctrl_c)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("*.png")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    errors = (tmp_path / "said").read_text()
    assert process.exitcode == 130 and "Traceback" not in errors and "interrupted" in errors
    written = files_below(tmp_path / "out")
    assert 1 <= len(written) < 40 and all(name.endswith(".png") and name[0] != "." for name in written)
    assert all(Picture.read(tmp_path / "out" / name).size == (64, 64) for name in written)


MEMORY = """
import resource, sys
from ddc.cli import main

def peak(name):
    options = ["--task", "denoise", "--solver", "pinv", "--model", sys.argv[1], "--device", "cpu"]
    assert main(["restore", f"{name}.png", "-o", "out", *options]) == 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

small, large = peak("small"), peak("large")
print((large - small) / (1800 * 1400), file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
def test_host_memory_is_at_most_30_bytes_a_pixel(tiny_model: Path, tmp_path: Path) -> None:
    large = np.tile(data.astronaut(), (4, 3, 1))[:1800, :1400]
    Picture(large).write(tmp_path / "large.png")
    Picture(large[:300, :300]).write(tmp_path / "small.png")  # tiles as well, so what they take is not counted
    command = [sys.executable, "-c", MEMORY, str(tiny_model)]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(answer.stderr.split()[-1]) < 30
    again = Picture.read(tmp_path / "out" / "large.png")
    assert np.abs(again.pixels.astype(int) - large).max() <= 1


def test_a_format_that_cannot_be_written_is_not_taken_for_a_folder(
    restore: Callable[..., int], photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ".gif pictures cannot be written" in refused(restore, capsys, tmp_path / "x.gif", photo)
