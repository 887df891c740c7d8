import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

from ddc.errors import UserError
from ddc.noise import Noise
from ddc.operators import JPEG, AveragePool, Bicubic, Denoise, GaussianBlur, Inpaint, KernelBlur, Operator
from ddc.operators.blur import disc_kernel, motion_kernel, softened
from ddc.operators.inpaint import random_mask
from ddc.problems import TASKS, Problem, make_problem, misfit, task_family, task_operator

SIZE = (33, 47)


def build(task: str, tmp_path: Path, **options: object) -> Problem:
    """A problem of any name in `TASKS`, with what it needs."""
    if task == "blur":
        np.save(tmp_path / "kernel.npy", np.ones((3, 3)))
        options["kernel"] = tmp_path / "kernel.npy"
    if task == "inpaint":
        Image.fromarray(np.eye(*SIZE, dtype=np.uint8) * 255).save(tmp_path / "mask.png")
        options["mask"] = tmp_path / "mask.png"
    if task == "custom":
        source = "from ddc.operators import Denoise\nclass Mine(Denoise): pass\n"
        (tmp_path / "mine.py").write_text(source)
        options["operator_file"] = f"{tmp_path}/mine.py:Mine"
    return make_problem(task, 0.05, SIZE, [1, 2], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_builds_and_measures(task: str, tmp_path: Path) -> None:
    problem = build(task, tmp_path)
    x = torch.rand(2, 3, *SIZE) * 2 - 1
    clean = problem.measure(x)
    y = problem.measure(x, Noise([1, 2]).normal(clean.shape))
    assert y.shape == clean.shape and bool(y.isfinite().all())
    assert 0.01 < float((y - clean).std()) < 0.11
    assert problem.name == task and problem.sigma == pytest.approx(0.1)
    assert problem.operator.to_image(y, SIZE).shape == x.shape
    assert len(TASKS[task]) < 100 and task_family(task)


@pytest.mark.parametrize(
    "task, expected",
    [
        ("sr5", Bicubic(5)),
        ("sr16", Bicubic(16)),
        ("sr3-pool", AveragePool(3)),
        ("gauss", GaussianBlur(3.0, 61)),
        ("gauss1.5", GaussianBlur(1.5, 61)),
        ("gauss20", GaussianBlur(20.0, 161)),
        ("jpeg35", JPEG(35)),
        ("denoise", Denoise()),
    ],
)
def test_numbers_in_names(task: str, expected: Operator) -> None:
    assert task_operator(task) == expected


def test_motion_and_masks_in_names() -> None:
    motion, default = task_operator("motion21@-30"), task_operator("motion")
    assert isinstance(motion, KernelBlur) and isinstance(default, KernelBlur)
    assert torch.equal(motion.kernel, motion_kernel(21, -30))
    assert torch.equal(default.kernel, motion_kernel(15, 45))
    flat = task_operator("motion9@0")
    assert isinstance(flat, KernelBlur) and torch.equal(flat.kernel, motion_kernel(9, 0))
    disc, soft = task_operator("disc2.5"), task_operator("disc2.5+gauss0.6")
    assert isinstance(disc, KernelBlur) and torch.equal(disc.kernel, disc_kernel(2.5))
    assert isinstance(soft, KernelBlur) and torch.equal(soft.kernel, softened(disc_kernel(2.5), 0.6))
    moved = task_operator("motion9@30+gauss0.6")
    assert isinstance(moved, KernelBlur) and torch.equal(moved.kernel, softened(motion_kernel(9, 30), 0.6))
    random = task_operator("inpaint70.5", SIZE, [4, 5])
    assert isinstance(random, Inpaint) and torch.equal(random.mask, random_mask(SIZE, 0.705, [4, 5]))
    box = task_operator("box8", SIZE)
    assert isinstance(box, Inpaint) and int((box.mask == 0).sum()) == 64


def test_a_given_mask_takes_the_place_of_a_made_one() -> None:
    mask = random_mask(SIZE, 0.3, 9)
    for task in ("inpaint", "inpaint92", "box", "strokes"):
        for given in (mask, mask[0], mask[0, 0]):
            operator = task_operator(task, SIZE, mask=given)
            assert isinstance(operator, Inpaint) and torch.equal(operator.mask, mask)


@pytest.mark.parametrize(
    "task, family",
    [
        ("sr7-pool", "superres"),
        ("motion9", "blur"),
        ("disc3+gauss0.5", "blur"),
        ("blur", "blur"),
        ("strokes", "inpaint"),
        ("inpaint50", "inpaint"),
        ("jpeg99", "jpeg"),
        ("custom", "custom"),
    ],
)
def test_families(task: str, family: str) -> None:
    assert task_family(task) == family


@pytest.mark.parametrize(
    "task, message",
    [
        ("gaus", "did you mean gauss"),
        ("denoize", "did you mean denoise"),
        ("", "is not known"),
        ("sr", "is not known"),
        ("sr4x", "is not known"),
        ("sr1", "2 to 16"),
        ("sr17", "2 to 16"),
        ("jpeg0", "1 to 100"),
        ("jpeg101", "1 to 100"),
        ("inpaint0", "between 0 and 100"),
        ("inpaint100", "between 0 and 100"),
        ("inpaint", "needs a mask"),
        ("gauss0", "more than 0"),
        ("gauss1000", "at most 100"),
        ("motion0", "1 to 255"),
        ("disc0", "0.5 to 100"),
        ("disc3+gauss21", "at most 20"),
        ("disc3+motion9", "is not known"),
        ("box0", "at least one"),
        ("blur", "needs a kernel"),
        ("custom", "needs an operator"),
    ],
)
def test_bad_tasks_are_refused(task: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_operator(task, (8, 8))


def test_masks_need_a_size_and_must_fit() -> None:
    for task in ("inpaint92", "box", "strokes"):
        with pytest.raises(UserError, match="size of the picture"):
            task_operator(task)
    with pytest.raises(UserError, match=r"9×8.*47×33"):
        task_operator("inpaint", SIZE, mask=torch.ones(8, 9))


def test_what_a_task_does_not_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a mask was given"):
        task_operator("sr4", mask=torch.ones(8, 8))
    with pytest.raises(UserError, match="a kernel was given"):
        task_operator("gauss", kernel=torch.ones(3, 3))
    with pytest.raises(UserError, match="an operator file was given"):
        task_operator("denoise", operator_file="a.py:A")


@pytest.mark.parametrize("sigma_y", [-0.1, math.nan, math.inf])
def test_bad_sigmas_are_refused(sigma_y: float) -> None:
    with pytest.raises(UserError, match="sigma is"):
        Problem(Denoise(), sigma_y)
    with pytest.raises(UserError, match="sigma is"):
        make_problem("denoise", torch.tensor([0.05, sigma_y]))


def test_sigma_for_each_image() -> None:
    problem = make_problem("denoise", torch.tensor([0.0, 0.05]))
    x, z = torch.zeros(2, 3, 4, 4), torch.ones(2, 3, 4, 4)
    y = problem.measure(x, z)
    assert bool((y[0] == 0).all()) and torch.allclose(y[1], torch.tensor(0.1))


def test_suggested_solvers() -> None:
    assert make_problem("sr4").suggested_solvers() == "any solver"
    assert make_problem("motion").suggested_solvers() == "ddc, dps or dds"
    assert make_problem("jpeg10").suggested_solvers() == "ddc, dps, pigdm or reddiff"


def test_a_sigma_in_other_units_is_refused() -> None:
    with pytest.raises(UserError, match=r"sigma is 12\.75.*divide by 255"):
        make_problem("denoise", 12.75)


@pytest.mark.parametrize("sigma", [0.0, 0.02])
@pytest.mark.parametrize("task", ["gauss3", "motion"])
def test_a_blur_that_is_said_too_strong_does_not_fit(task: str, sigma: float) -> None:
    x = torch.from_numpy(data.coffee()[100:292, 200:392]).permute(2, 0, 1)[None] / 127.5 - 1
    problem, weaker = make_problem(task, sigma), make_problem("gauss1", sigma)
    z = Noise([0]).normal(x.shape)
    fitting, sharper = misfit(problem.measure(x, z), problem), misfit(weaker.measure(x, z), problem)
    assert fitting < 0.006 + 1.4 * sigma < sharper


@pytest.mark.parametrize(
    ("task", "instead"), [("jpeg", "jpeg10"), ("deblur", "gauss1.5"), ("auto", "gauss1.5")]
)
def test_what_is_read_off_a_picture_is_no_problem_by_itself(task: str, instead: str) -> None:
    with pytest.raises(UserError, match=rf"read off a picture .* as in {instead}"):
        make_problem(task)
    with pytest.raises(UserError, match=f"did you mean {task}"):
        make_problem(f"{task}r")
