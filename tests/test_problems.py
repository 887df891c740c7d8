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
from ddc.problems import DETECTED, TASKS, Problem, Task, make_problem, measure, misfit

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
    assert len(TASKS[task]) < 100 and Task.parse(task).family


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
    assert Task.parse(task).operator().key == expected.key


def test_motion_and_masks_in_names() -> None:
    motion, default = Task.parse("motion21@-30").operator(), Task.parse("motion").operator()
    assert isinstance(motion, KernelBlur) and isinstance(default, KernelBlur)
    assert torch.equal(motion.kernel, motion_kernel(21, -30))
    assert torch.equal(default.kernel, motion_kernel(15, 45))
    flat = Task.parse("motion9@0").operator()
    assert isinstance(flat, KernelBlur) and torch.equal(flat.kernel, motion_kernel(9, 0))
    disc, soft = Task.parse("disc2.5").operator(), Task.parse("disc2.5+gauss0.6").operator()
    assert isinstance(disc, KernelBlur) and torch.equal(disc.kernel, disc_kernel(2.5))
    assert isinstance(soft, KernelBlur) and torch.equal(soft.kernel, softened(disc_kernel(2.5), 0.6))
    moved = Task.parse("motion9@30+gauss0.6").operator()
    assert isinstance(moved, KernelBlur) and torch.equal(moved.kernel, softened(motion_kernel(9, 30), 0.6))
    random = Task.parse("inpaint70.5").operator(SIZE, [4, 5])
    assert isinstance(random, Inpaint) and torch.equal(random.mask, random_mask(SIZE, 0.705, [4, 5]))
    box = Task.parse("box8").operator(SIZE)
    assert isinstance(box, Inpaint) and int((box.mask == 0).sum()) == 64


def test_a_given_mask_takes_the_place_of_a_made_one() -> None:
    mask = random_mask(SIZE, 0.3, 9)
    for task in ("inpaint", "inpaint92", "box", "strokes"):
        for given in (mask, mask[0], mask[0, 0]):
            operator = Task.parse(task).operator(SIZE, mask=given)
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
    assert Task.parse(task).family == family


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
        Task.parse(task).operator((8, 8))


def test_masks_need_a_size_and_must_fit() -> None:
    for task in ("inpaint92", "box", "strokes"):
        with pytest.raises(UserError, match="size of the picture"):
            Task.parse(task).operator()
    with pytest.raises(UserError, match=r"9×8.*47×33"):
        Task.parse("inpaint").operator(SIZE, mask=torch.ones(8, 9))


def test_what_a_task_does_not_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a mask was given"):
        Task.parse("sr4").operator(mask=torch.ones(8, 8))
    with pytest.raises(UserError, match="a kernel was given"):
        Task.parse("gauss").operator(kernel=torch.ones(3, 3))
    with pytest.raises(UserError, match="an operator file was given"):
        Task.parse("denoise").operator(operator_file="a.py:A")


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


@pytest.mark.parametrize(("task", "instead"), [("jpeg", "jpeg10"), ("deblur", "gauss1.5"), ("auto", "gauss1.5")])
def test_what_is_detected_in_a_picture_is_no_problem_by_itself(task: str, instead: str) -> None:
    with pytest.raises(UserError, match=rf"detects the degradation in a picture .* as in {instead}"):
        make_problem(task)
    with pytest.raises(UserError, match=f"did you mean {task}"):
        make_problem(f"{task}r")


@pytest.mark.parametrize("task", ["sr4", "inpaint92", "strokes", "jpeg10", "motion", "colorize"])
def test_measurements_depend_on_the_seed_and_the_name_alone(task: str) -> None:
    x = 2 * torch.rand(2, 3, *SIZE, generator=torch.Generator().manual_seed(0)) - 1
    problem, y = measure(task, 0.05, x, ["a.png", "b.png"])
    alone = measure(task, 0.05, x[1:], ["b.png"])[1]
    assert torch.allclose(y[1:], alone, atol=1e-5)
    assert problem.name == task and problem.sigma_y == 0.05
    assert not torch.equal(alone, measure(task, 0.05, x[1:], ["c.png"])[1])
    assert not torch.equal(alone, measure(task, 0.05, x[1:], ["b.png"], seed=1)[1])


def test_measurements_have_one_noise_field_for_every_level() -> None:
    x = torch.zeros(1, 3, *SIZE)
    _, clean = measure("denoise", 0.0, x, ["a.png"])
    _, little = measure("denoise", 0.05, x, ["a.png"])
    _, much = measure(Task.parse("denoise"), 0.1, x, ["a.png"])
    assert torch.equal(clean, x) and torch.allclose(2 * little, much, atol=1e-6)
    assert float(little.std()) == pytest.approx(0.1, rel=0.05)  # σ_y is in [0, 1] units, y in [-1, 1]


def test_measurements_with_what_is_given() -> None:
    x, mask = torch.ones(1, 3, *SIZE), random_mask(SIZE, 0.3, 9)
    problem, y = measure("inpaint", 0.0, x, ["a.png"], mask=mask)
    assert torch.equal(y, mask.expand_as(y)) and isinstance(problem.operator, Inpaint)
    with pytest.raises(UserError, match="a mask was given"):
        measure("sr4", 0.0, x, ["a.png"], mask=mask)
    with pytest.raises(UserError, match="needs a kernel"):
        measure("blur", 0.0, x, ["a.png"])


@pytest.mark.parametrize(
    ("name", "kind", "numbers"),
    [
        ("sr4", "sr", {"scale": 4}),
        ("sr4-pool", "sr", {"scale": 4, "pool": 1}),
        ("gauss", "gauss", {"sigma": 3}),
        ("disc2.5", "disc", {"radius": 2.5, "softness": 0}),
        ("motion", "motion", {"length": 15, "angle": 45, "softness": 0}),
        ("motion21@-30+gauss0.6", "motion", {"length": 21, "angle": -30, "softness": 0.6}),
        ("inpaint92", "inpaint", {"percent": 92}),
        ("inpaint", "inpaint", {}),
        ("box", "box", {}),
        ("box64", "box", {"side": 64}),
        ("jpeg10", "jpeg", {"quality": 10}),
        ("strokes", "strokes", {}),
    ],
)
def test_a_task_is_parsed_once(name: str, kind: str, numbers: dict[str, float]) -> None:
    task = Task.parse(name)
    assert (task.name, task.kind, task.numbers) == (name, kind, numbers)
    assert Task.parse(task) is task and make_problem(task, size=(99, 99), mask=MASKS.get(name)).name == name


MASKS = {"inpaint": torch.ones(99, 99)}


def test_detected_tasks_are_listed_apart() -> None:
    assert not set(DETECTED) & set(TASKS) and all(len(text) < 110 for text in DETECTED.values())
