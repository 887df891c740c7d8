"""Mixes of tasks: how they are written, what is drawn, and that measuring together is measuring alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_parts import MIX

from ddc.errors import UserError
from ddc.noise import Noise
from ddc.operators.blur import GaussianBlur, KernelBlur
from ddc.operators.inpaint import Inpaint, box_mask, random_mask, stroke_mask
from ddc.operators.jpeg import JPEG
from ddc.problems import Task, make_problem
from ddc.training.data import (
    Draw,
    MixedOperator,
    Mixes,
    TaskMix,
    make_operators,
    noise_levels,
    parse_tasks,
    pick,
    round_to_8_bit,
)

CPU = torch.device("cpu")


def draw_of(task: str, **options: Any) -> Draw:
    return Draw(Task.parse(task), **options)


def test_names_ranges_and_weights() -> None:
    sr4, jpeg, gauss = parse_tasks("sr4, jpeg5-95:weight=0.5,gauss0.5-4:lpips=0.2:weight=2")
    assert (sr4.task, sr4.end, sr4.weight, sr4.lpips) == (Task.parse("sr4"), None, 1.0, None)
    assert (jpeg.name, jpeg.task.name, jpeg.weight) == ("jpeg5-95", "jpeg5", 0.5)
    assert jpeg.end is not None and jpeg.end.numbers == {"quality": 95}
    assert (gauss.task.numbers, gauss.weight, gauss.lpips) == ({"sigma": 0.5}, 2.0, 0.2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tasks"),
        ("sr4,sharpen", "not known"),
        ("jpeg95-5", "ends below its start"),
        ("jpeg5-300", "1 to 100"),
        ("inpaint0-95", "between 0 and 100"),
        ("sr4:weight=0", "not above 0"),
        ("sr4:weight=x", "expected a number"),
        ("sr4:lpips=-1", "negative"),
        ("sr4:lpips=nan", "expected a number"),
        ("sr4:share=1", "no setting"),
        ("sr4:0.5", "not known"),
        ("strokes1-5", "not known"),
        ("inpaint", "needs a mask"),
        ("nothing.py:Op", "there is no file"),
    ],
)
def test_what_cannot_be_a_task_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        for entry in parse_tasks(text):
            make_operators([Draw(entry.task)], [0], 32, CPU)


def test_ranges_cover_both_ends_and_weights_count() -> None:
    mix = TaskMix(parse_tasks("sr2-4,denoise:weight=3"), sigma_max=0.1, noiseless_share=0.5)
    choices = [mix.draw(np.random.default_rng((0, n)), 32) for n in range(2000)]
    tasks = [choice.task.name for choice in choices]
    assert set(tasks) == {"sr2", "sr3", "sr4", "denoise"}
    assert 0.7 < tasks.count("denoise") / 2000 < 0.8
    quiet = [choice.sigma_y == 0 for choice in choices if choice.task.kind != "denoise"]
    assert 0.4 < np.mean(quiet) < 0.6
    assert all(0 < choice.sigma_y <= 0.1 for choice in choices if choice.task.kind == "denoise")


@pytest.mark.parametrize(
    ("text", "key", "low", "high", "step"),
    [
        ("gauss0.5-4", "sigma", 0.5, 4, 0.25),
        ("jpeg5-95", "quality", 5, 95, 5),
        ("motion5-9", "length", 5, 9, 1),
        ("box8-16", "side", 8, 16, 1),
        ("disc1-2", "radius", 1, 2, 0.1),
        ("inpaint30-32", "percent", 30, 32, 0.1),
    ],
)
def test_a_drawn_task_is_the_task_of_its_name(text: str, key: str, low: float, high: float, step: float) -> None:
    (entry,) = parse_tasks(text)
    rng = np.random.default_rng(0)
    tasks = [entry.draw(rng) for _ in range(400)]
    for task in tasks:
        assert Task.parse(task.name).numbers == task.numbers
    values = sorted({task.numbers[key] for task in tasks})
    assert values[0] == low and values[-1] == high and np.allclose(np.diff(values), step)


def test_pick_is_numpys_weighted_choice() -> None:
    weights = (0.5, 2.0, 1.0)
    for n in range(50):
        expected = np.random.default_rng(n).choice(3, p=np.array(weights) / 3.5)
        assert pick(weights, np.random.default_rng(n)) == expected


def test_masks_made_together_are_those_made_alone() -> None:
    size, seeds = 48, [11, 12, 13, 14, 15]
    tasks = ("inpaint92", "inpaint37.5", "box20", "box", "strokes")
    draws = [draw_of(task, shift=(9, -16) if task == "box20" else (0, 0)) for task in tasks]
    operators = make_operators(draws, seeds, size, CPU)
    masks = [operator.mask for operator in operators if isinstance(operator, Inpaint)]
    assert torch.equal(masks[0], random_mask((size, size), 0.92, seeds[0]))
    assert torch.equal(masks[1], random_mask((size, size), 0.375, seeds[1]))
    hole = 1 - box_mask((size, size), (20, 20))
    assert torch.equal(masks[2], 1 - torch.roll(hole, (9, -16), dims=(-2, -1)))
    assert torch.equal(masks[3], box_mask((size, size)))
    assert torch.equal(masks[4], stroke_mask((size, size), seeds[4]))


def test_a_batch_is_measured_as_its_pictures_alone() -> None:
    mix = TaskMix(parse_tasks(MIX + ",disc1-4,sr2-8,jpeg5-95,gauss0.5-4"), 0.05, 0.3, 0.5)
    draws = [mix.draw(np.random.default_rng((1, n)), 32) for n in range(40)]
    seeds = list(range(100, 140))
    truth = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    operators = make_operators(draws, seeds, 32, CPU)
    mixed = MixedOperator(operators, CPU)
    y = mixed.measure(truth, draws, seeds)
    assert len(mixed.groups) < 15 and sorted(mixed.order.tolist()) == list(range(40))
    assert any(draw.rounded for draw in draws)
    assert {"motion", "disc"} <= {draw.task.kind for draw in draws}

    together = mixed.project(truth, y, noise_levels(draws, CPU))
    seen = mixed.observed(y, (32, 32))
    for i, draw in enumerate(draws):
        kernel = isinstance(operators[i], KernelBlur)
        # as `ddc restore` makes it, without zeros around it
        operator = draw.task.operator() if kernel else operators[i]
        clean = operator(truth[i : i + 1])
        noisy = operator.add_noise(clean, Noise([seeds[i]]).normal(clean.shape), 2 * draw.sigma_y)
        alone = operator.unround(round_to_8_bit(clean)) if draw.rounded else noisy
        assert torch.allclose(y[i], alone, atol=1e-5), draw.task
        projected = operator.project(truth[i : i + 1], alone, 2 * draw.sigma_y)
        assert torch.allclose(together[i], projected[0], atol=1e-3 if kernel else 1e-4), draw.task
        mask = operator.observed(alone, (32, 32))
        assert torch.equal(seen[i], torch.ones(1, 32, 32) if mask is None else mask[0])


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
    operators = make_operators([draw_of(task) for task in tasks], list(range(11)), 32, CPU)
    groups = MixedOperator(operators, CPU).groups
    assert [indices for _, indices, _ in groups] == [[0, 1], [2, 3], [4, 5, 6], [7, 8], [9], [10]]
    x = torch.rand(2, 3, 32, 32) * 2 - 1
    both = groups[0][0]
    singles = torch.cat([GaussianBlur(s)(x[i : i + 1]) for i, s in enumerate((1.0, 2.0))])
    assert torch.allclose(both(x), singles, atol=1e-6)
    assert isinstance(groups[1][0], JPEG)


def test_a_persons_own_operator(tmp_path: Path) -> None:
    path = tmp_path / "mirror.py"
    path.write_text(
        "from ddc.operators import Operator\n"
        "class Mirror(Operator):\n"
        "    def forward(self, x):\n"
        "        return x.flip(-1)\n"
    )
    (entry,) = parse_tasks(f"{path}:Mirror:weight=2.5")
    assert entry.weight == 2.5 and entry.name == f"{path}:Mirror"
    draws = [Draw(entry.task)] * 2
    truth = torch.rand(2, 3, 32, 32)
    y = MixedOperator(make_operators(draws, [0, 1], 32, CPU), CPU).measure(truth, draws, [0, 1])
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
    draws = [draw_of("inpaint92", sigma_y=0.05)]
    (y,) = MixedOperator(make_operators(draws, [77], 32, CPU), CPU).measure(truth, draws, [77])
    problem = make_problem("inpaint92", 0.05, (32, 32), [77])
    assert torch.allclose(y, problem.measure(truth, Noise([77]).normal(truth.shape)), atol=1e-6)


def test_pictures_in_a_row_share_a_kind_of_task() -> None:
    mixes = Mixes((TaskMix(parse_tasks("sr2-8,gauss0.5-4,inpaint30-95,denoise"), 0.1),), together=8)
    draws = [mixes.draw(0, number, 64) for number in range(240)]
    blocks = [draws[i : i + 8] for i in range(0, 240, 8)]
    kinds = [{draw.task.name if draw.task.kind == "sr" else draw.task.kind for draw in block} for block in blocks]
    assert all(len(kind) == 1 for kind in kinds) and len(set.union(*kinds)) > 6
    assert all(len({draw.sigma_y for draw in block}) == 8 for block in blocks)
    strengths = [{draw.task.name for draw in block} for block in blocks if block[0].task.kind == "gauss"]
    assert strengths and all(len(names) > 3 for names in strengths)
