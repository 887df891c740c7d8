"""What the web page does, without the page."""

import io
import math
import os
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageFile, ImageFilter
from skimage import data

from ddc.cli import main
from ddc.diagnosis import treatment
from ddc.diagnosis.treatment import LEAST_ERROR
from ddc.errors import UserError
from ddc.images import Picture
from ddc.notation import duration
from ddc.operators.blur import KernelBlur, disc_kernel
from ddc.operators.inpaint import Denoise
from ddc.pipeline import RestorationPipeline
from ddc.problems import TASKS
from ddc.solvers import SOLVERS
from ddc.solvers.base import make_solver
from ddc.solvers.posterior import PosteriorDenoiser
from ddc.web import service
from ddc.web.controls import DISC, KINDS, LINE, TRY_TASKS, Choices, Trial, from_values
from ddc.web.folders import IDLE, Store
from ddc.web.limits import Limits
from ddc.web.service import Service, Visitors, _summary
from ddc.web.shown import command_line, heat_map
from ddc.web.uploads import Upload, inspect, write_clean_examples, write_examples
from tiny import tiny_posterior


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> RestorationPipeline:
    return RestorationPipeline.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def rates(pipe: RestorationPipeline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The speed of this computer, measured as the page does it."""
    made = Service(pipe, Limits(), Store(tmp_path_factory.mktemp("speed")))
    made.warm_up()
    return made.rates


@pytest.fixture
def work(pipe: RestorationPipeline, rates: dict[str, float], tmp_path: Path) -> Service:
    made = Service(pipe, Limits(megapixels=1, minutes=5), Store(tmp_path / "files"))
    made.rates.update(rates)
    made.measured.update(dict.fromkeys(rates, time.monotonic()))
    return made


def saved(path: Path, pixels: np.ndarray, **options: object) -> Upload:
    Image.fromarray(pixels).save(path, **options)  # type: ignore[arg-type]
    return Upload(path, path.name)


@pytest.fixture
def photo(tmp_path: Path) -> Upload:
    return saved(tmp_path / "my photo.png", data.astronaut()[20:52, 180:228])


def look_at(upload: Upload) -> tuple[str, Choices]:
    """What the page says of an upload, and what it suggests."""
    return inspect(upload.name, upload.read(Limits(megapixels=1)))


# ---------------------------------------------------------------------------------------------------------
# before a restoration


def test_a_jpeg_file_says_its_quality(tmp_path: Path) -> None:
    facts, seen = look_at(saved(tmp_path / "a.jpg", data.astronaut()[:96, :128], quality=23))
    assert seen.kind == "Find out" and seen.quality == 23
    assert seen.task == "auto" and "JPEG of quality 23" in facts and "(jpeg23)" in facts
    assert "128 × 96 pixels" in facts


def test_a_plan_may_choose_the_solver_where_nobody_did() -> None:
    assert not {"solver", "steps"} & {*Choices().options}
    for chosen in (Choices(solver="ddnm"), Choices(steps=3), Choices(kind="Noise")):
        assert (chosen.options["solver"], chosen.options["steps"]) == (chosen.solver, chosen.steps)


def test_noise_is_estimated_and_suggested(tmp_path: Path) -> None:
    noisy = data.coffee()[100:220, 200:320] + np.random.default_rng(0).normal(0, 0.1 * 255, (120, 120, 3))
    _, seen = look_at(saved(tmp_path / "a.png", noisy.clip(0, 255).astype(np.uint8)))
    assert seen.kind == "Find out" and seen.sigma == pytest.approx(0.1, rel=0.25)
    _, clean = look_at(saved(tmp_path / "b.png", data.coffee()[100:220, 200:320]))
    assert clean.kind == "Low resolution" and clean.sigma == 0 and "sigma" not in clean.options


def test_an_enlargement_that_is_refused_is_not_suggested(tmp_path: Path) -> None:
    cat = Picture(data.chelsea()[60:180, 120:240])
    for megapixels, kind, scale in ((1, "Low resolution", 4), (0.1, "Low resolution", 2), (0.05, "Find out", 2)):
        facts, seen = inspect("cat.png", cat, Limits(megapixels=megapixels))
        assert (seen.kind, seen.scale) == (kind, scale) and ("It can be enlarged" in facts) == (kind != "Find out")


def test_blur_is_estimated_and_suggested(tmp_path: Path) -> None:
    blurred = np.asarray(Image.fromarray(data.chelsea()).filter(ImageFilter.GaussianBlur(2)))[80:200, 140:260]
    facts, seen = look_at(saved(tmp_path / "a.png", blurred))
    assert seen.kind == "Find out" and seen.blur == pytest.approx(2, abs=0.4)
    assert "The blur is undone" in facts
    picture = torch.from_numpy(data.coffee() / np.float32(255)).permute(2, 0, 1)[None]
    unfocused = (KernelBlur(disc_kernel(4))(picture)[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    facts, seen = look_at(saved(tmp_path / "c.png", unfocused[120:240, 180:340]))
    assert seen.kind == "Find out" and replace(seen, kind="Blur").task.startswith("disc")
    assert seen.blur == pytest.approx(4, abs=0.15) and "a disc of about 4.0 pixels" in facts
    tiny_facts, tiny = look_at(saved(tmp_path / "b.png", blurred[:32, :32]))
    assert tiny.kind == "Low resolution" and "blur" not in tiny_facts


def test_transparent_pixels_are_holes(tmp_path: Path) -> None:
    pixels = np.dstack([data.astronaut()[:64, :64], np.full((64, 64), 255, np.uint8)])
    assert look_at(saved(tmp_path / "whole.png", pixels))[1].kind != "Holes"
    pixels[10:20, 10:20, 3] = 0
    assert look_at(saved(tmp_path / "holes.png", pixels))[1].kind == "Holes"


def test_what_is_no_picture_is_refused_by_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "a1b2c3" / "stored.png"
    path.parent.mkdir()
    path.write_text("no picture")
    with pytest.raises(UserError, match=r"^holiday\.png is not a picture") as refused:
        look_at(Upload(path, "holiday.png"))
    assert str(tmp_path) not in str(refused.value)
    np.save(tmp_path / "a.npy", np.zeros((9, 9, 3)))
    with pytest.raises(UserError, match="not a picture that can be shown"):
        look_at(Upload(tmp_path / "a.npy", "a.npy"))
    with pytest.raises(UserError, match=r"gone\.png is no longer here"):
        look_at(Upload(tmp_path / "gone.png", "gone.png"))
    with pytest.raises(UserError, match="at least 8"):
        look_at(saved(tmp_path / "dot.png", np.zeros((2, 2, 3), np.uint8)))


def test_what_is_too_large_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(buffer, "PNG")
    (tmp_path / "bomb.png").write_bytes(buffer.getvalue())
    upload = saved(tmp_path / "wide.png", np.zeros((110, 10_000, 3), np.uint8))
    decoded: list[object] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded.append)
    with pytest.raises(UserError, match="takes up to 1"):
        look_at(Upload(tmp_path / "bomb.png", "bomb.png"))
    assert not decoded
    with pytest.raises(UserError, match="10000×110 pixels"):
        look_at(upload)


def test_a_photograph_held_upright_is_told_upright(work: Service, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upload = saved(tmp_path / "a.jpg", data.astronaut()[:40, :64], exif=exif)
    assert "40 × 64 pixels" in look_at(upload)[0]
    assert "40 × 64 pixels" in work.forecast(upload, Choices(kind="Noise"))


def test_time_is_told_beforehand(work: Service, tmp_path: Path, photo: Upload) -> None:
    work.rates["ddc"] = 20.0  # seconds per evaluation and megapixel
    small = work.forecast(photo, Choices(kind="Low resolution", scale=2))
    assert "96 × 64 pixels" in small and "take about a second" in small
    work.rates["ddc"] = 100.0
    large = work.forecast(saved(tmp_path / "wide.png", np.zeros((96, 500, 3), np.uint8)), Choices(kind="Noise"))
    assert "large" in large and ("minutes" in large or "seconds" in large)
    with pytest.raises(UserError, match="this page allows 5 minutes"):
        work.forecast(photo, Choices(kind="Noise", solver="ddrm", steps=1000, samples=8))
    with pytest.raises(UserError, match="takes up to 1"):
        work.forecast(
            saved(tmp_path / "b.png", np.zeros((300, 400, 3), np.uint8)), Choices(kind="Low resolution", scale=8)
        )


def test_the_forecast_follows_the_measured_speed(work: Service) -> None:
    work.rates = {"ddc": 10.0}
    expected = work.expected_seconds((200, 200), Denoise(), make_solver("ddc", 5), samples=3)
    assert expected == pytest.approx(3 * 10 * 0.04 * 10)
    assert work.expected_seconds((200, 200), Denoise(), make_solver("dps", 10)) == pytest.approx(10 * 0.04 * 30)
    tiled = work.expected_seconds((200, 1000), Denoise(), make_solver("ddc", 5))
    assert tiled > 5 * 10 * 0.04 * 10  # tiles overlap


def test_the_forecast_of_a_posterior_network_counts_its_own_evaluations(tmp_path: Path) -> None:
    PosteriorDenoiser(tiny_posterior().unet, ([0.5], [1.0]), realism=0.5).save_pretrained(tmp_path / "posterior")
    work = Service(RestorationPipeline.from_pretrained(tmp_path), Limits(), Store(tmp_path / "files"))
    work.rates["posterior"] = 10.0
    solver, denoise = make_solver("posterior"), Denoise()
    assert work.expected_seconds((200, 200), denoise, solver) == pytest.approx(2 * 0.04 * 10)
    mean = make_solver("posterior:realism=0")
    assert work.expected_seconds((200, 200), denoise, mean) == pytest.approx(0.04 * 10)


def test_the_forecast_counts_the_samples_for_the_doubt(tmp_path: Path, photo: Upload) -> None:
    """Eight of two evaluations each, whatever the realism of the picture itself is."""
    PosteriorDenoiser(tiny_posterior().unet, ([0.5], [1.0])).save_pretrained(tmp_path / "posterior")
    work = Service(RestorationPipeline.from_pretrained(tmp_path), Limits(minutes=5), Store(tmp_path / "files"))
    mean = Choices(kind="Noise", solver="posterior", steps=20, realism=0.0)
    doubted = replace(mean, doubt=True)
    work.rates["posterior"], work.measured["posterior"] = 10.0, math.inf  # it needs not be measured
    expected = [work._expected(photo, choices.task, choices.options)[2] for choices in (mean, doubted)]
    assert expected[1] == pytest.approx((1 + 8 * 2) * expected[0])
    work.rates["posterior"] *= 100 / expected[0]  # 100 seconds for the mean
    assert "about 2 minutes" in work.forecast(photo, mean)
    with pytest.raises(UserError, match="about 28 minutes; this page allows 5 minutes"):
        work.forecast(photo, doubted)


def test_refusals_of_solvers_come_before_the_run(work: Service, photo: Upload) -> None:
    with pytest.raises(UserError, match="ddnm needs a linear operator"):
        work.forecast(photo, Choices(kind="JPEG artefacts", solver="ddnm"))
    with pytest.raises(UserError, match="expected 1 to 8"):
        work.forecast(photo, Choices(samples=9))
    with pytest.raises(UserError, match="is not known"):
        work.forecast(photo, Choices(kind="Everything"))


def test_menus_come_from_the_registries(work: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(TRY_TASKS) == set(TASKS) - {"blur", "inpaint", "custom", "colorize"}
    latent = {name for name, kind in SOLVERS.items() if kind.latent}
    shipped = [name for name in SOLVERS if name not in latent]  # no latent prior is shipped
    assert work.solver_names() == shipped and shipped[0] == "ddc"
    monkeypatch.setattr(service, "find_part", lambda name, model: None)  # where no bridge and no denoiser is
    assert set(SOLVERS) - set(work.solver_names()) == {"i2sb", "cddb", "pnp-admm", "posterior"} | latent
    assert all(Choices(kind=kind).task for kind in KINDS)
    assert Choices(kind="Blur", shape=LINE, blur=9, angle=30).task == "motion9@30"
    assert Choices(kind="Blur", shape=DISC, blur=2.5).task == "disc2.5"
    assert Choices(kind="Blur", shape=DISC, blur=2.5, softness=0.6).task == "disc2.5+gauss0.6"
    assert Choices(kind="Blur", blur=1.5).task == "gauss1.5"


# ---------------------------------------------------------------------------------------------------------
# restoring


@pytest.mark.parametrize(
    "choices",
    [
        Choices(kind="Low resolution", scale=2, seed=3),
        Choices(kind="Noise", sigma=0.05, solver="ddrm", steps=3, samples=2),
        Choices(kind="Blur", blur=1.5, steps=2),
        Choices(kind="Holes"),
        Choices(kind="JPEG artefacts", quality=30),
    ],
    ids=lambda choices: choices.kind,
)
def test_the_command_line_and_python_do_the_same(
    work: Service, photo: Upload, tiny_model: Path, choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    painted = np.zeros((16, 24), np.uint8)
    painted[4:8, 4:8] = 255
    done = work.restore(photo, choices, painted)
    assert done.files[0].name == "my photo_restored.png"
    folder = photo.path.parent
    if choices.kind == "Holes":
        mask = np.asarray(Image.open(done.files[-1]))
        assert mask.shape == (32, 48) and mask.mean() == pytest.approx(255 * (1 - 16 / (16 * 24)))
        (folder / "mask.png").write_bytes(done.files[-1].read_bytes())

    monkeypatch.chdir(folder)
    command = shlex.split(done.command)
    assert command[0] == "ddc" and main([*command[1:], "--model", str(tiny_model), "--device", "cpu"]) == 0
    ours, theirs = Picture.read(done.files[0]).pixels, Picture.read(folder / done.files[0].name).pixels
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1
    (folder / done.files[0].name).unlink()
    code = done.python.replace("from_pretrained()", f"from_pretrained({str(tiny_model)!r})")
    exec(compile(code, "snippet", "exec"), {})
    theirs = Picture.read(folder / done.files[0].name).pixels
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1


def test_strength_stands_for_sigma() -> None:
    noise = Choices(kind="Noise", sigma=0.05, strength="high", solver="posterior", steps=20)  # the shipped model's own
    assert command_line("a.png", noise, mask=False).endswith("--task denoise --sigma 0.08")
    estimated = command_line("a.png", replace(noise, sigma=0.0, strength="low"), mask=False)
    assert estimated.endswith("--task denoise --strength low")
    assert command_line("a.png", Choices(sigma=0.1), mask=False) == "ddc restore a.png -o a_restored.png --task auto"
    assert "--strength" not in command_line("a.png", Choices(kind="Low resolution", strength="high"), mask=False)
    blur = Choices(kind="Blur", blur=2, strength="high", solver="posterior", steps=20)
    assert command_line("a.png", blur, mask=False).endswith("--task gauss2 --strength high")
    holes = Choices(kind="Holes", solver="posterior", steps=20)
    assert holes.options["sigma"] == 0 and "--sigma" not in command_line("a.png", holes, mask=True)


def test_the_model_chooses_its_realism_until_somebody_does() -> None:
    own = Choices(solver="posterior", steps=20)
    assert "realism" not in own.options and "steps" not in own.options  # a plan may prefer the least error
    assert replace(own, realism=0.0).options["realism"] == 0 and replace(own, steps=4).options["steps"] == 4


def test_the_speed_is_measured_when_it_is_needed(work: Service, photo: Upload, monkeypatch: pytest.MonkeyPatch) -> None:
    work.rates["ddc"] = 1e6  # as on a computer that was busy
    with pytest.raises(UserError, match="this page allows"):
        work.forecast(photo, Choices(kind="Noise"))  # it was measured a moment ago
    monkeypatch.setattr(service, "FRESH", 0)
    with work.lock, pytest.raises(UserError, match="this page allows"):
        work.forecast(photo, Choices(kind="Noise"))  # a restoration is under way
    assert "about a second" in work.forecast(photo, Choices(kind="Noise")) and work.rates["ddc"] < 1e5


def test_a_quicker_solver_is_named(work: Service, photo: Upload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LONG", 0)
    assert "one-pass, under More, takes about a second" in work.forecast(photo, Choices())
    assert "under More" not in work.forecast(photo, Choices(solver="one-pass", steps=1))


def test_a_picture_that_would_take_too_long_gets_the_quick_solver(work: Service, photo: Upload) -> None:
    assert not work.is_too_long(photo, Choices())
    one_sample = work._expected(photo, "auto", Choices().options)[2]
    work.rates["ddc"] *= 60 / one_sample
    assert not work.is_too_long(photo, Choices()) and work.is_too_long(photo, Choices(doubt=True))
    work.rates["ddc"] = 1e6
    assert work.is_too_long(photo, Choices()) and not work.is_too_long(photo, Choices(solver="one-pass", steps=1))


@pytest.mark.parametrize(
    "choices", [Choices(), Choices(kind="Noise"), Choices(kind="Low resolution"), Choices(kind="JPEG artefacts")]
)
def test_a_preview_shows_a_part(work: Service, tmp_path: Path, choices: Choices) -> None:
    pixels = np.full((300, 700, 3), 128, np.uint8)
    pixels[20:180, 400:650] = data.chelsea()[60:220, 100:350]
    upload = saved(tmp_path / "a.jpg", pixels, quality=12)
    shown = work.preview(upload, choices)
    assert shown is not None
    before, after, text = shown
    assert before.shape == after.shape == (256, 256, 3) and "256 × 256 pixels" in text
    assert before.std() > 30  # where the cat is
    flat = work.preview(upload, choices, (280, 20))
    assert flat is not None and flat[0].std() < 5
    assert work.preview(upload, Choices(kind="Holes")) is None


def test_a_preview_is_made_as_the_whole_will_be(work: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).normal(0, 40, (300, 300, 3))
    noise = (noise + np.roll(noise, 1, 0) + np.roll(noise, 1, 1) + np.roll(noise, (1, 1), (0, 1))) / 4  # coarse
    upload = saved(tmp_path / "a.png", (data.chelsea()[:300, :300] + noise).clip(0, 255).astype(np.uint8))
    used: list[object] = []

    def run(picture: Picture, task: object, options: dict[str, object]) -> None:
        used.append((task, options["solver"]))
        raise UserError("that is all")

    monkeypatch.setattr(work, "_run", run)
    for quick in ("posterior", "one-pass"):
        monkeypatch.setattr(Service, "quick", quick)
        with pytest.raises(UserError, match="that is all"):
            work.preview(upload, Choices())
    assert used == [("denoise", LEAST_ERROR), ("denoise", "one-pass")]


def test_a_good_picture_has_no_preview_of_what_is_not_done(work: Service, tmp_path: Path) -> None:
    assert work.preview(saved(tmp_path / "a.png", data.chelsea()), Choices()) is None


def test_something_is_removed(work: Service, photo: Upload) -> None:
    with pytest.raises(UserError, match="paint over what is to be removed"):
        work.restore(photo, Choices(kind="Remove something"))
    painted = np.zeros((32, 48), np.uint8)
    painted[10:20, 10:20] = 1
    done = work.restore(photo, Choices(kind="Remove something", steps=1, format="webp"), painted)
    assert [path.name for path in done.files] == ["my photo_restored.webp", "mask.png"]
    assert "-o 'my photo_restored.webp' --task inpaint" in done.command


def test_several_pictures_are_restored_each_as_what_is_found(work: Service, tmp_path: Path) -> None:
    cat = data.chelsea()[60:180, 120:240]
    uploads = [saved(tmp_path / "coarse.jpg", cat, quality=12), saved(tmp_path / "fine.png", cat)]
    (tmp_path / "bad.png").write_text("no picture")
    uploads.append(Upload(tmp_path / "bad.png", "bad.png"))
    seen: list[float] = []
    done = work.restore_several(uploads, "one-pass", "jpg", lambda share, text: seen.append(share), "visitor")
    assert [path.name for path in done.files] == ["1_coarse_restored.jpg", "2_fine_restored.jpg"]
    assert all(path.is_file() for path in done.files) and seen
    assert "(jpeg12)" in done.said[0] and "Nothing is wrong" in done.said[1] and "bad.png is not" in done.said[2]
    assert not any(str(tmp_path) in line for line in done.said)
    with pytest.raises(UserError, match="takes 20 at once"):
        work.restore_several(uploads * 7, "one-pass", "jpg", lambda share, text: None, "visitor")


def test_before_and_after_have_one_size(work: Service, photo: Upload) -> None:
    seen: list[tuple[float, str]] = []
    done = work.restore(
        photo, Choices(kind="Low resolution", scale=4), progress=lambda share, text: seen.append((share, text))
    )
    assert done.before.shape == done.after.shape == (128, 192, 3) and done.uncertainty is None
    assert [share for share, _ in seen] == sorted(share for share, _ in seen) and seen[-1][0] == 1
    assert "192 × 128 pixels in" in done.summary


def test_uncertainty_lies_where_the_holes_are(work: Service, photo: Upload) -> None:
    painted = np.zeros((32, 48), np.uint8)
    painted[:, :16] = 1
    done = work.restore(photo, Choices(kind="Holes", solver="ddnm", steps=3, samples=3), painted)
    assert done.uncertainty is not None and done.uncertainty.shape == done.after.shape
    assert done.uncertainty[:, :16].mean() > 10 * max(done.uncertainty[:, 16:].mean(), 1)
    assert [path.name[-6:] for path in done.files[1:4]] == ["_1.png", "_2.png", "_3.png"]
    assert "3 samples" in done.summary


def test_notes_call_the_picture_as_the_visitor_does(work: Service, tmp_path: Path) -> None:
    stored = saved(tmp_path / "stored.png", data.coffee()[150:250, 250:350])
    notes = work.restore(Upload(stored.path, "cup.png"), Choices(kind="Blur", blur=3, steps=1)).notes
    assert len(notes) == 1 and notes[0].startswith("cup.png is sharper or noisier than gauss3")
    assert work.restore(stored, Choices(kind="Noise", steps=1)).notes == []


def test_notes_are_also_about_the_files(work: Service, tmp_path: Path) -> None:
    page = Image.fromarray(data.astronaut()[20:52, 180:228]).convert("RGBA")
    page.save(tmp_path / "stored.tiff", save_all=True, append_images=[page])
    done = work.restore(Upload(tmp_path / "stored.tiff", "x+y.tiff"), Choices(kind="Noise", steps=1, format="jpg"))
    assert done.notes[0] == "x+y.tiff has several pages; the first is read"
    assert done.notes[-1] == "x+y.tiff: the picture is laid on white, because JPEG has no transparency"
    assert done.files[0].name == "x_y_restored.jpg" and "ddc restore x+y.tiff -o x+y_restored.jpg" in done.command


def test_a_good_picture_is_not_encoded_again(work: Service, tmp_path: Path) -> None:
    fine = saved(tmp_path / "fine.webp", data.chelsea()[60:180, 120:240], quality=97)
    for format, kept in (("webp", True), ("png", False)):
        (file,) = work.restore(fine, Choices(kind="Find out", format=format)).files
        (other,) = work.restore_several([fine], "one-pass", format, lambda share, text: None, "visitor").files
        assert (file.read_bytes() == fine.path.read_bytes()) == kept == (other.read_bytes() == fine.path.read_bytes())
        assert file.suffix == other.suffix == f".{format}" and Picture.read(file).size == (120, 120)


def test_an_untouched_file_that_pillow_cannot_open_is_not_encoded_again(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    tifffile.imwrite(path, data.chelsea()[60:180, 120:240].astype(np.float32) / 255, photometric="rgb")
    picture, content = Picture.read(path), path.read_bytes()
    assert Upload(path, "fine.tiff").write_result(picture, picture, tmp_path / "b.tiff") == []
    assert (tmp_path / "b.tiff").read_bytes() == content
    Upload(path, "fine.tiff").write_result(picture, picture, tmp_path / "b.png")
    assert Image.open(tmp_path / "b.png").format == "PNG"


def test_the_summary_says_what_was_done(work: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = saved(tmp_path / "fine.png", data.chelsea()[60:180, 120:240])
    assert work.restore(fine, Choices()).summary.endswith("s**: left as it is.")
    text = work.restore(fine, Choices(kind="Noise", steps=3)).summary
    assert "denoise with ddc, 3 steps, " in text
    result = work.pipe(Picture.read(fine.path), "denoise", steps=1)
    text = _summary(replace(result, solvers=["posterior"]), Choices(solver="posterior", steps=20), None)
    assert "denoise with posterior, " in text and "steps" not in text


def test_what_was_taken_back_can_be_undone_by_hand(
    work: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = data.chelsea()[60:180, 120:240] + np.random.default_rng(0).normal(0, 25, (120, 120, 3))
    upload = saved(tmp_path / "a.png", noisy.clip(0, 255).astype(np.uint8))
    monkeypatch.setattr(treatment, "MOST_RESIDUAL", (0.0, 0.0))  # so that no result is good enough
    done = work.restore(upload, Choices())
    assert done.summary.endswith("left as it is.")
    assert any(note.endswith("left as it is. Choose the task by hand to undo it all the same.") for note in done.notes)


def test_a_preview_does_not_log_the_private_folder(
    work: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = Image.fromarray(data.astronaut()[20:84, 180:244])
    page.save(tmp_path / "stored.tiff", save_all=True, append_images=[page])
    assert work.preview(Upload(tmp_path / "stored.tiff", "x.tiff"), Choices(kind="Noise")) is not None
    assert str(tmp_path) not in caplog.text


def test_heat_map() -> None:
    std = torch.linspace(0, 0.2, 256).expand(3, 4, 256)
    heat = heat_map(std)
    assert heat.shape == (4, 256, 3) and heat.dtype == np.uint8
    brightness = heat[0].astype(int).sum(1)
    assert (np.diff(brightness) >= -1).all() and brightness[0] < 10 and brightness[-1] > 600
    assert not heat_map(torch.zeros(3, 4, 4)).any(where=[True, True, False])


def test_holes_must_be_painted_and_leave_something(work: Service, photo: Upload) -> None:
    with pytest.raises(UserError, match="paint over"):
        work.restore(photo, Choices(kind="Holes"), None)
    with pytest.raises(UserError, match="leave some"):
        work.restore(photo, Choices(kind="Holes"), np.ones((8, 8), np.uint8))


def test_a_run_can_be_stopped(work: Service, photo: Upload) -> None:
    visitors = Visitors()
    seen: list[float] = []
    report = visitors.begin("a", lambda share, text: seen.append(share))
    visitors.begin("b", report)
    visitors.stop("b")
    report(0.5, "")
    assert seen == [0.5]
    visitors.stop("a")
    visitors.stop("nobody")
    with pytest.raises(UserError, match="stopped"):
        work.restore(photo, Choices(kind="Noise"), progress=report)
    assert not work.lock.locked()


def test_restorations_run_one_at_a_time(work: Service, photo: Upload) -> None:
    running, most = [0], [0]

    def progress(share: float, text: str) -> None:
        if share == 0:
            return
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.005)
        running[0] -= 1

    threads = [
        threading.Thread(
            target=work.restore, args=(photo, Choices(kind="Low resolution", scale=2, seed=seed), None, progress)
        )
        for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert len(list(work.store.folder.rglob("*_restored.png"))) == 4


# ---------------------------------------------------------------------------------------------------------
# trying


def test_compare_degrades_restores_and_measures(
    work: Service, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = saved(tmp_path / "a.png", data.chelsea()[:150, :200])
    done = work.compare(upload, Trial("sr4", 0.05, "ddc", 2, "pinv", 1, longest=96, seed=1))
    assert done.clean.shape == done.measured.shape == done.results[0].shape == (72, 96, 3)
    rows = [row.split("|") for row in done.table.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == ["ddc", "pinv"] and rows[1][3].strip() == "0"
    assert 5 < float(rows[1][4].split()[0]) < 40 and 0 < float(rows[1][5]) < 2
    folder = tmp_path / "again"
    folder.mkdir()
    (folder / "clean.png").write_bytes(done.files[0].read_bytes())
    monkeypatch.chdir(folder)
    degrade, *restores = (shlex.split(line)[1:] for line in done.command.splitlines())
    assert main(degrade) == 0
    assert np.array_equal(np.load("measured.npy"), np.load(done.files[1]))
    for command, file in zip(restores, done.files[2:], strict=True):
        assert main([*command, "--model", str(tiny_model)]) == 0
        ours, theirs = Picture.read(file).tensor, Picture.read(file.name).tensor
        assert float((ours - theirs).abs().max()) < 0.01


def test_compare_says_a_note_once(
    work: Service, photo: Upload, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddc.pipeline.DEFAULT_MODEL", tiny_model)
    (note,) = work.compare(photo, Trial("denoise", 0.3, "ddc", 1, "ddc", 2)).notes
    assert "not trained for noise above 0.1" in note


def test_compare_refuses_what_cannot_work(work: Service, photo: Upload) -> None:
    with pytest.raises(UserError, match="ddrm needs an operator with an SVD"):
        work.compare(photo, Trial("jpeg10", 0.0, "ddc", 2, "ddrm", 2))
    with pytest.raises(UserError, match="not offered"):
        work.compare(photo, Trial("custom", 0.0, "ddc", 2, "ddrm", 2))
    assert not list(work.store.folder.rglob("*.png"))


def test_examples_are_what_they_say(work: Service, tmp_path: Path) -> None:
    examples = write_examples(tmp_path / "examples")
    assert [choices.kind for _, choices in examples] == [
        "Blur",
        "Low resolution",
        "Holes",
        "Noise",
        "JPEG artefacts",
    ]
    for upload, choices in examples:
        _, suggested = look_at(upload)
        kinds = {"Low resolution": "Low resolution", "Holes": "Holes"}
        assert suggested.kind == kinds.get(choices.kind, "Find out")
        assert "pixels" in work.forecast(upload, choices)
    assert all(upload.read(work.limits).size == (256, 256) for upload in write_clean_examples(tmp_path / "clean"))


def test_old_files_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("visitors/old/a.png", "visitors/new/b.png", "examples/c.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    past = time.time() - 3600
    for path in (tmp_path / "visitors/old/a.png", tmp_path / "examples/c.png"):
        os.utime(path, (past, past))
    store.remove_old(30)
    os.utime(tmp_path / "visitors/old", (past, past))  # its file went just now
    store.remove_old(30)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b.png", "c.png", "examples", "new", "visitors"]


def test_the_disk_has_a_limit(tmp_path: Path) -> None:
    store = Store(tmp_path, gigabytes=0.001)
    for visitor, age in (("left", 2 * IDLE), ("here", 0)):
        (store.new_folder(visitor) / "a.png").write_bytes(bytes(400_000))
        past = time.time() - age
        os.utime(store.visitors / visitor, (past, past))
    with store.room(150_000):
        assert (store.visitors / "left").exists()
        with store.room(200_000):
            assert not (store.visitors / "left").exists()
            with pytest.raises(UserError, match="no room for more files at present"), store.room(400_000):
                pass
    with store.room(400_000):
        assert (store.visitors / "here").exists()
    for _ in range(9):  # small files count too
        (store.new_folder("here") / "b.png").write_bytes(b"x")
    with pytest.raises(UserError, match="no room"), store.room(1):
        pass


def test_results_are_refused_where_there_is_no_room(work: Service, photo: Upload) -> None:
    work.store.limit = 70_000
    with pytest.raises(UserError, match="no room"):
        work.restore(photo, Choices(kind="Low resolution", scale=8))
    with pytest.raises(UserError, match="no room"):
        work.compare(photo, Trial("sr4", 0.05, "ddc", 2, "pinv", 1, longest=96))
    assert not list(work.store.folder.rglob("*.png"))


def test_heic_is_read_although_pillow_alone_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pillow_heif")
    Picture(data.astronaut()[:40, :64]).write(tmp_path / "a.heic")
    Image.init()
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])  # as in a new process
    facts, _ = look_at(Upload(tmp_path / "a.heic", "a.heic"))
    assert "64 × 40 pixels" in facts


def test_a_form_is_made_from_the_values_of_its_components() -> None:
    values = ["Blur", 4, "Soft", 2, None, 45, 10.0, "medium", None, "ddnm", 20.0, None, 1, 0.5, None, "png"]
    form = from_values(Choices, values)
    assert form == Choices("Blur", blur=2.0, sigma=0.0, solver="ddnm", steps=20, angle=45.0)
    assert type(form.blur) is float and type(form.steps) is int
    with pytest.raises(ValueError, match="shorter"):
        from_values(Choices, values[:-1])
    for field, value in (
        (0, "Everything"),
        (1, 5),
        (3, 99),
        (3, "wide"),
        (7, "much"),
        (8, float("nan")),
        (10, 0.5),
        (11, 10**12),
    ):
        with pytest.raises(UserError, match="expected"):
            from_values(Choices, [*values[:field], value, *values[field + 1 :]])
    assert from_values(Choices, [*values[:-4], 12, 0, 0, "png"], {"samples": {"maximum": 20}}).samples == 12


def test_limits_and_durations() -> None:
    with pytest.raises(UserError, match="queue must be above 0"):
        Limits(queue=0)
    said = [duration(seconds) for seconds in (0.2, 40, 300, 9000)]
    assert said == ["a second", "40 seconds", "5 minutes", "2.5 hours"]


def test_the_web_modules_do_not_slow_the_command_line() -> None:
    code = "import sys; import ddc.cli.web; print('gradio' in sys.modules, 'torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False False\n"
