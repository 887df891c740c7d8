"""What `ddc restore` and `ddc degrade` do with files: what is left out, copied, refused, or fails alone."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import PIL.Image
import pytest
from skimage import data

from ddc.cli import main
from ddc.diagnosis.treatment import NOTHING, Treatment
from ddc.images import Picture
from ddc.jobs import Request
from ddc.pipeline import RestorationPipeline
from processes import start

PHOTO = PIL.Image.fromarray(data.astronaut()[:12, :18])
DENOISE = ("--task", "denoise", "--sigma", "0.1", "--steps", "1")


def files_below(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


@pytest.fixture
def restore(tiny_model: Path) -> Callable[..., int]:
    def run(*arguments: object) -> int:
        return main(["restore", *map(str, arguments), "--model", str(tiny_model), "--device", "cpu"])

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures of one size."""
    (tmp_path / "in").mkdir()
    for name in "abc":
        PHOTO.save(tmp_path / "in" / f"{name}.png")
    return tmp_path / "in"


@pytest.fixture
def good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task auto finds no fault in any picture."""
    monkeypatch.setattr(
        "ddc.jobs.plan_treatment", lambda *_: Treatment(NOTHING, because=("Nothing is wrong with it.",))
    )


# ---------------------------------------------------------------------------------------------------------
# failures of one picture


def failing(function: Callable[..., Any], path_of: Callable[..., Path | None], error: BaseException) -> Any:
    """The function; for the picture b.png it raises the error."""

    def run(*given: Any, **options: Any) -> Any:
        path = path_of(*given)
        if path is not None and path.name == "b.png":
            raise error
        return function(*given, **options)

    return run


def break_solving(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    patch.setattr(Request, "problem", failing(Request.problem, lambda _, picture, *__: picture.path, error))


def break_reading(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    patch.setattr(Picture, "read", failing(Picture.read, lambda path, *_: Path(path), error))


def break_writing(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    patch.setattr(Picture, "write", failing(Picture.write, lambda _, path, *__: Path(path), error))


@pytest.mark.parametrize("broken", [break_solving, break_reading, break_writing])
def test_an_unexpected_error_costs_one_picture(
    restore: Callable[..., int],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: Callable[..., None],
) -> None:
    broken(monkeypatch, ZeroDivisionError("division by zero"))
    out = tmp_path / "out"
    assert restore(folder, "-o", out, *DENOISE, "--batch", 3) == 1
    assert files_below(out) == ["a.png", "c.png", "ddc-failures.json"]
    (failure,) = json.loads((out / "ddc-failures.json").read_text())
    assert failure["input"] == str(folder / "b.png")
    expected = f"{folder}/b.png failed with an unexpected error (ZeroDivisionError: division by zero); please report it"
    assert failure["error"] == expected
    assert f"ddc: {expected}\n" in (said := capsys.readouterr().err) and "Traceback" not in said
    assert restore(folder / "b.png", "-o", tmp_path / "b.png", *DENOISE) == 2
    assert capsys.readouterr().err == f"ddc: {expected}\n"


def test_an_unexpected_error_costs_degrade_one_picture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ddc.degrade

    broken = failing(ddc.degrade.degrade, lambda picture, *_: picture.path, IndexError())
    monkeypatch.setattr("ddc.degrade.degrade", broken)
    assert main(["degrade", str(folder), "-o", str(tmp_path / "out"), "--task", "sr2"]) == 1
    assert files_below(tmp_path / "out") == ["a.png", "c.png", "ddc-failures.json"]
    assert "(IndexError)" in (tmp_path / "out" / "ddc-failures.json").read_text()


def test_after_ctrl_c_what_was_written_is_listed(
    restore: Callable[..., int],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_solving(monkeypatch, KeyboardInterrupt())
    assert restore(folder, "-o", tmp_path / "out", *DENOISE, "--batch", 1) == 130
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'a.png'}\n"
    assert files_below(tmp_path / "out") == ["a.png"]


# ---------------------------------------------------------------------------------------------------------
# pictures without a fault


def in_many_formats(folder: Path) -> None:
    folder.mkdir()
    picture = PIL.Image.fromarray(data.chelsea()[60:84, 120:152])
    picture.save(folder / "a.jpg", quality=70)
    picture.convert("CMYK").save(folder / "cmyk.jpg", quality=90)
    picture.save(folder / "several.jpeg", "MPO", save_all=True, append_images=[picture])
    picture.convert("P").save(folder / "palette.png")
    picture.save(folder / "a.webp", quality=70)
    picture.save(folder / "pages.tif", save_all=True, append_images=[picture])
    np.save(folder / "a.npy", np.asarray(picture))


@pytest.mark.usefixtures("good")
def test_a_picture_without_a_fault_keeps_its_bytes(restore: Callable[..., int], tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    in_many_formats(folder)
    assert restore(folder, "-o", out) == 0
    assert files_below(out) == files_below(folder)
    for name in files_below(folder):
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    assert restore(folder / "a.jpg", "-o", out / "b.jpg", "--samples", 2) == 0
    for name in ("b", "b_1", "b_2"):
        assert (out / f"{name}.jpg").read_bytes() == (folder / "a.jpg").read_bytes()
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/good/a.jpg", (folder / "a.jpg").read_bytes())
    assert restore("memory://good/a.jpg", "-o", "memory://good/out/a.jpg") == 0
    assert memory.cat_file("/good/out/a.jpg") == (folder / "a.jpg").read_bytes()
    memory.store.clear()


@pytest.mark.usefixtures("good")
def test_another_format_or_other_colours_are_written_anew(restore: Callable[..., int], tmp_path: Path) -> None:
    in_many_formats(tmp_path / "in")
    source, out = tmp_path / "in" / "a.jpg", tmp_path / "out"
    assert restore(source, "-o", out, "--ext", "png") == 0
    with PIL.Image.open(out / "a.png") as image:
        assert image.format == "PNG"
    assert restore(source, "-o", out, "--fix-colours") == 0
    assert (out / "a.jpg").read_bytes() != source.read_bytes()
    misnamed = source.with_name("palette.jpg")
    source.with_name("palette.png").rename(misnamed)
    assert restore(misnamed, "-o", out) == 0
    with PIL.Image.open(out / "palette.jpg") as image:
        assert image.format == "JPEG"


@pytest.mark.usefixtures("good")
def test_a_picture_without_a_fault_has_no_solver(
    restore: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert restore(folder / "a.png", "-o", tmp_path / "a.png", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["task"] == NOTHING and facts["solver"] is None
    assert restore(folder / "a.png", "-o", tmp_path / "a.png", "--json", *DENOISE) == 0
    assert json.loads(capsys.readouterr().out)["solver"] == "ddc"


# ---------------------------------------------------------------------------------------------------------
# a reader of the output that ends


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_without_a_reader_all_pictures_are_restored(
    tiny_model: Path, folder: Path, tmp_path: Path, stream: str
) -> None:
    for number in range(30):  # more lines than a buffer holds
        PHOTO.save(folder / f"{number}.png")
    (folder / "bad.png").touch()
    os.mkfifo(pipe := tmp_path / "pipe")
    words = ["restore", folder, "-o", tmp_path / "out", "--task", "denoise", "--sigma", "0.1", "--solver", "pinv"]
    process = start([*words, "--json", "--model", tiny_model, "--device", "cpu"], **{stream: pipe})  # type: ignore[arg-type]
    pipe.open().close()
    process.join(60)
    assert process.exitcode == 1
    assert len(files_below(tmp_path / "out")) == 34 and (tmp_path / "out" / "ddc-failures.json").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_other_commands_end_without_a_reader(tiny_model: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    process = start(["info", tiny_model], pipe)
    pipe.open().close()
    process.join(60)
    assert process.exitcode == 141


# ---------------------------------------------------------------------------------------------------------
# what is refused before a picture is restored


def test_a_place_that_cannot_be_written(
    restore: Callable[..., int],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(RestorationPipeline, "from_pretrained", lambda *_: pytest.fail("a model was read"))
    (tmp_path / "file").touch()
    places = [tmp_path / "file" / "out", tmp_path / "file" / "out.png"]
    places += [Path("/proc/ddc/out")] if sys.platform == "linux" else []
    for place in places:
        assert restore(folder / "a.png", "-o", place, *DENOISE) == 2
        (line,) = capsys.readouterr().err.splitlines()
        where = place.parent if place.suffix else place
        assert line.startswith(f"ddc: {where} cannot be written (") and "give another place with -o" in line
        assert (f"{tmp_path / 'file'} is not a folder" in line) == (tmp_path in place.parents)
    monkeypatch.undo()
    assert restore(folder / "a.png", "-o", tmp_path / "new" / "below", *DENOISE) == 0
    assert files_below(tmp_path / "new") == ["below/a.png"]


def test_a_result_that_its_format_cannot_hold(
    restore: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Picture(np.zeros((8, 8200, 3), np.uint8)).write(tmp_path / "wide.png")
    monkeypatch.setattr(RestorationPipeline, "__call__", lambda *_, **__: pytest.fail("a picture was restored"))
    assert restore(tmp_path / "wide.png", "-o", tmp_path / "wide.webp", "--task", "sr2") == 2
    assert "at most 16383 pixels a side" in capsys.readouterr().err
    monkeypatch.undo()
    assert restore(tmp_path / "wide.png", "-o", tmp_path / "wide.webp", *DENOISE, "--solver", "pinv") == 0


# ---------------------------------------------------------------------------------------------------------
# what is told


def test_links_to_folders_and_other_formats_are_told(
    restore: Callable[..., int], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    PHOTO.save(tmp_path / "elsewhere" / "d.png")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / ".hidden").symlink_to(tmp_path / "elsewhere")
    for name in ("x.GIF", "y.avif", "notes.txt", ".z.gif"):
        (folder / name).touch()
    assert restore(folder, "-o", tmp_path / "out", *DENOISE) == 0
    assert caplog.messages == [
        f"{folder}/link is a link to a folder, which is not followed; name it as well",
        "2 files of other formats were left out (avif, gif)",
    ]
    caplog.clear()
    (folder / "x.GIF").unlink()
    assert restore(folder, folder / "link", "-o", tmp_path / "both", *DENOISE) == 0
    assert caplog.messages[1:] == ["1 file of another format was left out (avif)"]
    assert files_below(tmp_path / "both") == ["a.png", "b.png", "c.png", "d.png"]


def test_warnings_of_reading_and_writing_are_notes(
    restore: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, target = tmp_path / "pages.tif", tmp_path / "out" / "pages.jpg"
    page = PHOTO.copy()
    page.putalpha(128)
    page.save(source, save_all=True, append_images=[page])
    expected = [
        f"{source} has several pages; the first is read",
        f"{target}: the picture is laid on white, because JPEG has no transparency",
    ]
    words = (str(source), "-o", str(tmp_path / "out"), "--ext", "jpg", "--json", "--task", "denoise")
    assert restore(*words, "--sigma", "0.1") == 0
    assert json.loads(capsys.readouterr().out)["notes"] == expected == caplog.messages
    assert main(["degrade", *words]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0] == expected[0]


def test_messages_name_pictures_by_their_path_in_the_folder(
    restore: Callable[..., int],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ddc.telling.SLOW", 0)
    for place in ("sub dir", "other"):
        (folder / place).mkdir()
        PHOTO.save(folder / place / "a.png")
    (folder / "a.png").unlink()
    assert restore(folder, "-o", tmp_path / "out", *DENOISE, "--batch", 1) == 0
    names = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert names == ["b.png", "c.png", "other/a.png", "sub dir/a.png"]
    same = [(tmp_path / "out" / place / "a.png").read_bytes() for place in ("other", "sub dir")]
    assert same[0] == same[1]  # the seed depends on the name of the file alone
