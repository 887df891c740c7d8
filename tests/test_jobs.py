"""What is asked for, its refusals, and the jobs it becomes; and the names at the top of the package."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

import ddc
from ddc.diagnosis.treatment import Conditions, Treatment
from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT, Picture
from ddc.jobs import Job, Options, Request
from ddc.jpegfile import jpeg_noise
from ddc.operators import JPEG, Bicubic, Colorize, Denoise, GaussianBlur, Inpaint, KernelBlur
from ddc.pipeline import RestorationPipeline
from ddc.problems import Problem, Task
from ddc.solvers.ddc import DDC
from ddc.solvers.ddnm import DDNM
from ddc.solvers.posterior import Posterior
from ddc.tiling import Window

PHOTO = Picture(data.astronaut()[:40, :48], path=Path("photo.png"))


def test_options_are_those_of_a_request() -> None:
    own = {field.name for field in fields(Request) if field.init}
    assert own == {"task", *Options.__annotations__}


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("sr99", {}, "whole number from 2 to 16"),
        ("sharpen", {}, "is not known"),
        ("sr4", {"samples": 0}, "samples must be at least 1, not 0"),
        ("sr4", {"samples": 1.5}, "samples must be a whole number, not 1.5"),
        ("sr4", {"samples": None}, "samples must be a whole number, not None"),
        ("sr4", {"steps": 2.5}, "steps must be a whole number, not 2.5"),
        ("sr4", {"tile": "512"}, "tile must be a whole number, not '512'"),
        ("sr4", {"batch": 0}, "batch must be at least 1, not 0"),
        ("sr4", {"tile": 63}, "at least 64 pixels"),
        ("sr4", {"tile": -1}, "at least 64 pixels"),
        ("sr4", {"sigma": -0.1}, "sigma is -0.1"),
        ("sr4", {"sigma": float("nan")}, "sigma is nan"),
        ("sr4", {"sigma": 12.75}, "divide by 255"),
        ("sr4", {"steps": 0}, "steps must be at least 1"),
        ("sr4", {"solver": "magic"}, "expected one of ddc"),
        ("sr4", {"solver": "ddnm:zeta=1"}, "has no setting 'zeta'"),
        ("auto", {"mask": torch.ones(4, 4), "kernel": torch.ones(3, 3)}, "auto takes no mask and no kernel"),
        ("auto", {"mask": torch.ones(4, 4), "scratches": True}, "without a mask"),
        ("deblur", {"kernel": torch.ones(3, 3)}, "deblur takes no mask and no kernel"),
        ("jpeg", {"mask": np.ones((4, 4))}, "jpeg takes no mask and no kernel"),
        ("blur", {"kernel": np.zeros((3, 3))}, "the kernel sums to 0.0"),
    ],
)
def test_a_request_is_refused_before_a_picture_is_read(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Request(task, **options)
    with pytest.raises(UserError, match=message):
        RestorationPipeline.check_options(task, **options)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("jpeg10", {"solver": "ddrm"}, "ddrm needs an operator with an SVD; jpeg10 is not one"),
        ("sr4", {"mask": torch.ones(4, 4)}, "a mask was given, but the task sr4"),
        ("gauss", {"kernel": torch.ones(3, 3)}, "a kernel was given"),
        ("sr4", {"operator_file": "a.py:A"}, "an operator file was given"),
        ("blur", {}, "needs a kernel"),
    ],
)
def test_what_needs_an_operator_to_be_refused(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Request(task, **options).check()


def test_what_needs_a_picture_is_not_refused_early() -> None:
    for task in ("inpaint", "inpaint92", "auto", "deblur", "jpeg", "custom"):
        Request(task).check()
    with pytest.raises(UserError, match="no mask was given; give one, in Python as mask="):
        Request("inpaint").problem(PHOTO)
    with pytest.raises(UserError, match="needs an operator"):
        Request("custom").problem(PHOTO)


def test_a_request_is_parsed_once() -> None:
    request = Request("sr4", solver="ddnm:eta=0.5", steps=3)
    assert request.task == Task.parse("sr4") and request.method == DDNM(eta=0.5, steps=3)
    problems = [request.problem(PHOTO) for _ in range(2)]
    assert problems[0].operator is problems[1].operator  # what does not depend on the picture is made once
    own = Bicubic(2)
    assert Request(own).problem(PHOTO).operator is own and Request(own).problem(PHOTO).name == "Bicubic"


def test_noise_is_estimated_where_nothing_is_said() -> None:
    assert Request("sr2").problem(PHOTO).sigma_y == 0
    assert float(Request("denoise").problem(PHOTO).sigma_y) > 0
    assert Request("denoise", sigma=0.03).problem(PHOTO).sigma_y == 0.03
    assert float(Request("sr2", sigma="auto").problem(PHOTO).sigma_y) > 0


def jobs(request: Request, picture: Picture = PHOTO, index: int = 0) -> list[Job]:
    return request.jobs(picture, request.problem(picture), index, request.method, {})


def test_seeds_depend_on_seed_name_and_sample_alone() -> None:
    first, second = jobs(Request("sr2", samples=2))
    assert first.seed != second.seed
    assert jobs(Request("sr2"))[0].seed == first.seed
    assert jobs(Request("sr2"), index=5)[0].seed == first.seed  # a file has a name
    assert jobs(Request("sr2", seed=1))[0].seed != first.seed
    assert jobs(Request("sr2", names=["other.png"]))[0].seed != first.seed
    nameless = replace(PHOTO, path=None)
    assert jobs(Request("sr2"), nameless, 0)[0].seed != jobs(Request("sr2"), nameless, 1)[0].seed


def job(operator: Any, picture: Picture = PHOTO, sigma_y: float = 0.0, **changes: Any) -> Job:
    return replace(Job(picture, Problem(operator, sigma_y), 0, False, DDC(), {}), **changes)


def test_every_picture_needs_a_name() -> None:
    request = Request("sr2", names=["a"])
    assert jobs(request, index=0)
    with pytest.raises(UserError, match=r"more pictures than names \(1\); give a name for each picture"):
        jobs(request, index=1)


def test_masks_and_kernels_of_other_libraries(caplog: pytest.LogCaptureFixture) -> None:
    mask = np.full((40, 48), 255, np.uint8)
    mask[:8] = 0
    for given in (mask, Image.fromarray(mask), Image.fromarray(mask).convert("RGB"), mask // 255):
        operator = Request("inpaint", mask=given).problem(PHOTO).operator
        assert isinstance(operator, Inpaint) and torch.equal(operator.mask[0, 0] * 255, torch.tensor(mask).float())
    Request("inpaint", mask=Image.fromarray(255 - mask)).problem(PHOTO)
    assert "invert it if you meant the opposite" in caplog.text
    with pytest.raises(UserError, match="the mask is 48×39 and the image 48×40"):
        Request("inpaint", mask=mask[1:]).problem(PHOTO)
    with pytest.raises(UserError, match="a mask was given, but the task sr4"):
        Request("sr4", mask=Image.fromarray(mask)).check()
    operator = Request("blur", kernel=np.ones((3, 5), np.int64)).problem(PHOTO).operator
    assert isinstance(operator, KernelBlur) and torch.allclose(operator.kernel, torch.full((3, 5), 1 / 15))


def test_which_jobs_fit_into_one_batch() -> None:
    one = job(Bicubic(2))
    assert one.fits(one) and one.fits(job(Bicubic(2), seed=7))
    assert one.fits(job(Bicubic(2), sigma_y=0.1))  # each picture has its own noise level
    assert not one.fits(job(Bicubic(3)))
    assert not one.fits(job(Bicubic(2), Picture(PHOTO.pixels[:20])))
    blur = job(GaussianBlur(2.0))
    assert blur.fits(job(GaussianBlur(2.0))) and not blur.fits(job(GaussianBlur(2.5)))
    assert not blur.fits(job(GaussianBlur(2.0), continues=True))
    mask = torch.ones(1, 1, 40, 48)
    holes = mask.clone()
    holes[..., 3:9, 3:9] = 0
    assert not job(Inpaint(mask)).fits(job(Inpaint(holes)))


def test_sizes_and_measurements_of_a_job() -> None:
    assert job(Bicubic(2)).image_size() == (80, 96) and job(JPEG(10)).image_size() == (40, 48)
    y = job(Bicubic(2)).measurement(Window(20, 40, 10, 20))
    assert torch.allclose(y, 2 * PHOTO.tensor[:, 10:15, 20:30] - 1, atol=1e-6)
    assert job(Colorize()).measurement(Window(0, 0, 40, 48)).shape == (1, 40, 48)


def test_the_noise_that_a_network_is_told() -> None:
    exact = Picture(PHOTO.pixels.astype(np.float32) / 255 * 0.9999)
    assert job(Denoise(), exact).noise_level() == 0
    assert job(Denoise()).noise_level() == ROUNDING_8_BIT
    assert job(Denoise(), solver=DDNM()).noise_level() == 0  # which has no network to be told
    assert job(Denoise(), exact, continues=True).noise_level() == ROUNDING_8_BIT
    assert job(JPEG(10)).noise_level() == 0
    assert job(Denoise(), sigma_y=0.05).noise_level() == 0.05
    assert job(Denoise(), replace(PHOTO, grey=True), 0.05).noise_level() == pytest.approx(0.05 * 3**0.5)


def test_a_picture_that_fits_one_tile_is_not_tiled(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    y = np.ascontiguousarray(data.astronaut()[:64, :40])
    whole = pipe(y, "denoise", steps=2, tile=0)

    def refuse(*_: Any) -> None:
        raise AssertionError("a picture was cut, or its brightness was matched")

    for name in ("plan_for", "restore_by_tiles", "surroundings_of", "match_mean"):
        monkeypatch.setattr(f"ddc.jobs.{name}", refuse)
    one = pipe(y, "denoise", steps=2, tile=64)
    assert torch.equal(one.picture.tensor, whole.picture.tensor)
    assert one.forecast is not None and one.forecast.tiles == 1
    with pytest.raises(AssertionError, match="was cut"):
        pipe(data.astronaut()[:65, :40], "denoise", steps=2, tile=64)


# ---------------------------------------------------------------------------------------------------------
# the top of the package


def test_names_at_the_top() -> None:
    from ddc import (
        JPEG,
        SOLVERS,
        AveragePool,
        Bicubic,
        Colorize,
        Denoise,
        GaussianBlur,
        Inpaint,
        KernelBlur,
        LinearOperator,
        Operator,
        Picture,
        Prior,
        Problem,
        RestorationPipeline,
        RestorationResult,
        SVDOperator,
        Task,
        UserError,
        make_problem,
        make_solver,
        restore,
    )

    classes = (JPEG, AveragePool, Bicubic, Colorize, Denoise, GaussianBlur, Inpaint, KernelBlur)
    assert all(issubclass(one, Operator) for one in classes) and issubclass(SVDOperator, LinearOperator)
    assert {type(make_solver(name)) for name in SOLVERS} == set(SOLVERS.values())
    assert isinstance(make_problem("sr4"), Problem) and Task.parse("sr4").name == "sr4"
    assert callable(restore) and issubclass(UserError, Exception)
    for one in (Picture, Prior, RestorationPipeline, RestorationResult):
        assert one.__name__ in dir(ddc)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ddc.nothing  # noqa: B018


def test_importing_the_package_is_light() -> None:
    code = "import sys, ddc; print(sorted({'torch', 'numpy', 'PIL', 'diffusers'} & set(sys.modules)), ddc.__version__)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == f"[] {ddc.__version__}\n"


def test_restore_uses_the_shipped_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddc.pipeline.DEFAULT_MODEL", tiny_model)
    y = data.astronaut()[:16, :16]
    restored = ddc.restore(y, "sr2", steps=1, seed=3)
    assert restored.picture.size == (32, 32) and restored.seed == 3 and restored.tasks == ["sr2"]


def test_pillow_images_in_the_pipeline(tiny_model: Path, tmp_path: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "Maker"
    Image.fromarray(data.astronaut()[:16, :24, 0]).save(tmp_path / "a.jpg", exif=exif)
    with Image.open(tmp_path / "a.jpg") as image:
        restored = pipe(image, "denoise", sigma=0.1, steps=1).picture
    assert restored.size == (24, 16) and restored.grey
    assert restored.exif is not None and b"Maker" in restored.exif
    restored.write(tmp_path / "b.png")
    assert Picture.read(tmp_path / "b.png").grey
    with pytest.raises(UserError, match=r"for bytes or an open file, use Picture\.read"):
        pipe((tmp_path / "a.jpg").read_bytes())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="for bytes or an open file"), (tmp_path / "a.jpg").open("rb") as file:
        pipe(file)  # type: ignore[arg-type]


def test_a_result_that_is_not_finite_is_an_error(tiny_model: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    with torch.no_grad():
        next(pipe.network.unet.exit.parameters()).fill_(3e38)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="no finite numbers"):
        pipe(data.astronaut()[:16, :16], "sr2", steps=2)


def test_a_plan_may_choose_the_solver_if_none_is_named() -> None:
    plan = Treatment("denoise", 0.03, solver="one-pass")
    assert Request("auto").solver_of(plan).name == "one-pass"
    assert Request("auto").solver_of(None).name == Request("auto").solver_of(Treatment("denoise")).name == "ddc"
    for options in ({"solver": "ddc"}, {"steps": 3}, {"samples": 2}, {"doubt": True}):  # of which one-pass has none
        assert Request("auto", **options).solver_of(plan).name == "ddc"
    mean = Treatment("denoise", 0.03, solver="posterior:realism=0")
    for options in ({}, {"doubt": True}):  # the model's own solver has no settings
        assert Request("auto", solver="posterior", **options).solver_of(mean) == Posterior(realism=0.0)
    assert Request("auto", solver="posterior", realism=0.5).solver_of(mean) == Posterior(realism=0.5)


def test_scratches_belong_to_auto() -> None:
    with pytest.raises(UserError, match="scratches are found by the task auto"):
        Request("sr4", scratches=True)


def test_a_posterior_network_is_told_of_a_jpeg_file(tmp_path: Path) -> None:
    """It was trained on such files. Other networks are told of stronger noise instead."""
    paths = [tmp_path / name for name in ("a.jpg", "b.jpg", "fine.jpg")]
    for path, quality in zip(paths, (40, 40, 98), strict=True):
        Image.fromarray(data.astronaut()[:64, :64]).save(path, quality=quality)
    rough, same, fine = (Picture.read(path) for path in paths)
    posterior, plain = Request("sr4", solver="posterior"), Request("sr4", solver="ddc")
    told, untold = posterior.problem(rough), plain.problem(rough)
    error = jpeg_noise(rough)
    assert error > 0.01 and told.sigma_y == pytest.approx(error) and untold.sigma_y == pytest.approx(2 * error)
    assert posterior.problem(fine).sigma_y == pytest.approx(1.2 * jpeg_noise(fine))
    assert posterior.conditions(rough, told.operator, None) == Conditions(quality=40)
    assert posterior.conditions(fine, told.operator, None) == Conditions()
    assert plain.conditions(rough, told.operator, None) is None
    assert posterior.conditions(PHOTO, told.operator, None) is None
    grain = Request("denoise", solver="posterior")
    assert grain.conditions(rough, Denoise(), None) == Conditions(quality=40)
    assert grain.problem(rough).sigma_y >= error  # an estimate of the noise leaves out what JPEG added
    assert Request("denoise", sigma=0.01, solver="posterior").problem(rough).sigma_y == 0.01
    assert Request("gauss", solver="posterior").conditions(rough, GaussianBlur(2.0), None) is None
    jobs = [
        posterior.jobs(picture, told, i, DDC(), {"conditions": found.tensor(torch.device("cpu"))})[0]
        for i, picture in enumerate((rough, same, fine))
        if (found := posterior.conditions(picture, told.operator, None)) is not None
    ]
    assert jobs[0].fits(jobs[1]) and not jobs[0].fits(jobs[2])  # only equal conditions share a batch


def test_noise_that_is_transparent_does_not_count(tmp_path: Path) -> None:
    pixels = np.full((96, 96, 4), (120, 130, 140, 255), np.uint8)
    pixels[:, :80, :3] += np.random.default_rng(0).integers(0, 60, (96, 80, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noisy.png")
    pixels[:, :80, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "hidden.png")
    noisy, hidden = (Request("sr2").problem(Picture.read(tmp_path / name)) for name in ("noisy.png", "hidden.png"))
    assert noisy.sigma_y > 0.05 and hidden.sigma_y == 0


def test_auto_with_a_mask_or_a_kernel_is_their_task() -> None:
    for task, given in (("inpaint", {"mask": torch.ones(4, 4)}), ("blur", {"kernel": torch.ones(3, 3) / 9})):
        assert Request("auto", **given).task == Task.parse(task)
