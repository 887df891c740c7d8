"""Mixes of tasks: how they are written, what is drawn, and that measuring together is measuring alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from training_parts import MIX

from ddc.errors import UserError
from ddc.noise import Noise
from ddc.operators.blur import GaussianBlur, KernelBlur
from ddc.operators.inpaint import Inpaint, box_mask, random_mask, stroke_mask
from ddc.operators.jpeg import JPEG
from ddc.problems import make_problem, task_operator
from ddc.training.tasks import (
    Choice,
    TaskMix,
    TaskRange,
    group_draws,
    make_draws,
    measure_batch,
    parse_tasks,
    pick,
    round_to_8_bit,
    single_task,
)

CPU = torch.device("cpu")


def test_names_ranges_and_weights() -> None:
    sr4, jpeg, gauss = parse_tasks("sr4, jpeg5-95:0.5,gauss0.5-4:2")
    assert sr4 == TaskRange("sr4")
    assert jpeg == TaskRange("jpeg5-95", 0.5, "jpeg", 5, 95)
    assert gauss == TaskRange("gauss0.5-4", 2.0, "gauss", 0.5, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tasks"),
        ("sr4,sharpen", "not known"),
        ("jpeg95-5", "ends below its start"),
        ("jpeg5-300", "1 to 100"),
        ("inpaint0-95", "between 0 and 100"),
        ("sr4:0", "not above 0"),
        ("inpaint", "needs a mask"),
        ("nothing.py:Op", "there is no file"),
    ],
)
def test_what_cannot_be_a_task_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        for task in parse_tasks(text):
            make_draws([Choice(task.name, 0.0, False)], [0], 32, CPU)


def test_a_bridge_has_one_task() -> None:
    assert single_task("jpeg10").name == "jpeg10"
    for text in ("jpeg5-95", "sr4:0.5", "op.py:Op"):
        with pytest.raises(UserError, match="is not one task"):
            single_task(text)


def test_ranges_cover_both_ends_and_weights_count() -> None:
    mix = TaskMix(parse_tasks("sr2-4,denoise:3"), sigma_max=0.1, noiseless_share=0.5)
    choices = [mix.choose(np.random.default_rng((0, n)), 32) for n in range(2000)]
    tasks = [choice.task for choice in choices]
    assert set(tasks) == {"sr2", "sr3", "sr4", "denoise"}
    assert 0.7 < tasks.count("denoise") / 2000 < 0.8
    quiet = [choice.sigma_y == 0 for choice in choices if choice.task != "denoise"]
    assert 0.4 < np.mean(quiet) < 0.6
    assert all(0 < choice.sigma_y <= 0.1 for choice in choices if choice.task == "denoise")


def test_pick_is_numpys_weighted_choice() -> None:
    weights = (0.5, 2.0, 1.0)
    for n in range(50):
        expected = np.random.default_rng(n).choice(3, p=np.array(weights) / 3.5)
        assert pick(weights, np.random.default_rng(n)) == expected


def test_masks_made_together_are_those_made_alone() -> None:
    size, seeds = 48, [11, 12, 13, 14, 15]
    choices = [
        Choice("inpaint92", 0.0, False),
        Choice("inpaint37.5", 0.0, False),
        Choice("box20", 0.0, False, (9, -16)),
        Choice("box", 0.0, False),
        Choice("strokes", 0.0, False),
    ]
    draws = make_draws(choices, seeds, size, CPU)
    masks = [draw.operator.mask for draw in draws if isinstance(draw.operator, Inpaint)]
    assert torch.equal(masks[0], random_mask((size, size), 0.92, seeds[0]))
    assert torch.equal(masks[1], random_mask((size, size), 0.375, seeds[1]))
    hole = 1 - box_mask((size, size), (20, 20))
    assert torch.equal(masks[2], 1 - torch.roll(hole, (9, -16), dims=(-2, -1)))
    assert torch.equal(masks[3], box_mask((size, size)))
    assert torch.equal(masks[4], stroke_mask((size, size), seeds[4]))


def test_a_batch_is_measured_as_its_pictures_alone() -> None:
    mix = TaskMix(parse_tasks(MIX + ",disc1-4,sr2-8,jpeg5-95,gauss0.5-4"), 0.05, 0.3, 0.5)
    choices = [mix.choose(np.random.default_rng((1, n)), 32) for n in range(40)]
    seeds = list(range(100, 140))
    truth = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    draws = make_draws(choices, seeds, 32, CPU)
    groups = group_draws(draws, CPU)
    y = measure_batch(truth, draws, seeds, groups)
    assert len(groups.groups) < 15 and sorted(groups.order.tolist()) == list(range(40))
    assert any(draw.rounded for draw in draws)
    assert all(any(draw.task.startswith(family) for draw in draws) for family in ("motion", "disc"))

    together = groups.apply(
        lambda group: group.problem.operator.project(
            truth[group.indices], torch.cat([y[i] for i in group.indices]), group.problem.sigma
        )
    )
    for i, draw in enumerate(draws):
        kernel = isinstance(draw.operator, KernelBlur)
        # as `ddc restore` makes it, without zeros around it
        operator = task_operator(draw.task) if kernel else draw.operator
        clean = operator(truth[i : i + 1])
        noisy = operator.add_noise(clean, Noise([seeds[i]]).normal(clean.shape), 2 * draw.sigma_y)
        alone = operator.unround(round_to_8_bit(clean)) if draw.rounded else noisy
        assert torch.allclose(y[i], alone, atol=1e-5), draw.task
        projected = operator.project(truth[i : i + 1], alone, 2 * draw.sigma_y)
        assert torch.allclose(together[i], projected[0], atol=1e-3 if kernel else 1e-4), draw.task


def test_operators_of_a_kind_become_one_group() -> None:
    tasks = [
        "gauss1",
        "gauss2",
        "jpeg10",
        "jpeg50",
        "motion5@10",
        "motion25@70",
        "disc5.5",
        "inpaint50",
        "box8",
        "sr2",
        "sr4",
    ]
    draws = make_draws([Choice(task, 0.0, False) for task in tasks], list(range(11)), 32, CPU)
    groups = group_draws(draws, CPU).groups
    assert [group.indices for group in groups] == [[0, 1], [2, 3], [4, 5, 6], [7, 8], [9], [10]]
    x = torch.rand(2, 3, 32, 32) * 2 - 1
    both = groups[0].problem.operator
    singles = torch.cat([GaussianBlur(s)(x[i : i + 1]) for i, s in enumerate((1.0, 2.0))])
    assert torch.allclose(both(x), singles, atol=1e-6)
    assert isinstance(groups[1].problem.operator, JPEG)


def test_a_persons_own_operator(tmp_path: Path) -> None:
    path = tmp_path / "mirror.py"
    path.write_text(
        "from ddc.operators import Operator\n"
        "class Mirror(Operator):\n"
        "    def __call__(self, x):\n"
        "        return x.flip(-1)\n"
    )
    (task,) = parse_tasks(f"{path}:Mirror:2.5")
    assert task.weight == 2.5 and task.name == f"{path}:Mirror"
    draws = make_draws([Choice(task.name, 0.0, False)] * 2, [0, 1], 32, CPU)
    truth = torch.rand(2, 3, 32, 32)
    y = measure_batch(truth, draws, [0, 1], group_draws(draws, CPU))
    assert torch.equal(torch.cat(y), truth.flip(-1))


def test_eight_bits() -> None:
    y = torch.linspace(-1.2, 1.2, 1001)
    levels = (round_to_8_bit(y) + 1) * 127.5
    assert torch.allclose(levels, levels.round(), atol=1e-4)
    assert (round_to_8_bit(y) - y.clamp(-1, 1)).abs().max() <= 1 / 255 + 1e-6
    assert len(levels.round().unique()) == 256


def test_measurements_agree_with_the_library() -> None:
    """What is trained on is what `ddc degrade` makes of the same seed."""
    truth = torch.rand(1, 3, 32, 32) * 2 - 1
    draws = make_draws([Choice("inpaint92", 0.05, False)], [77], 32, CPU)
    (y,) = measure_batch(truth, draws, [77], group_draws(draws, CPU))
    problem = make_problem("inpaint92", 0.05, (32, 32), [77])
    assert torch.allclose(y, problem.measure(truth, Noise([77]).normal(truth.shape)), atol=1e-6)
