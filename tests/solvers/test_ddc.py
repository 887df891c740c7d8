"""DDC's loop, and the one data-consistency step that the solver, the training and the precision probe share."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddc.networks import run_unet
from ddc.noise import Noise
from ddc.operators import JPEG, Bicubic, Inpaint
from ddc.operators.inpaint import random_mask
from ddc.priors import CHANNELS, DataConsistency, Input, Prior, Residual, Schedule
from ddc.problems import Problem
from ddc.solvers.base import Run, Step
from ddc.solvers.ddc import DDC
from tiny import tiny_unet

ALL: tuple[Input, ...] = ("y", "wiener", "mask", "sigma", "projection")
OPERATORS = {"inpaint": Inpaint(random_mask((16, 16), 0.5, [1, 2])), "sr2": Bicubic(2), "jpeg": JPEG(10)}


def network(inputs: tuple[Input, ...] = ALL, residual: Residual = "blend") -> DataConsistency:
    return DataConsistency(tiny_unet(3 + sum(CHANNELS[name] for name in inputs), seed=1), inputs, residual)


def pictures() -> Tensor:
    return Noise([5, 6]).normal((2, 3, 16, 16)).clamp(-1, 1)


def measured(task: str, sigma_y: float) -> tuple[Any, Tensor, Any]:
    problem = Problem(OPERATORS[task], sigma_y)
    y = problem.operator(pictures())
    return problem.operator, problem.measure(pictures(), Noise([7, 8]).normal(y.shape)), problem.sigma


@pytest.mark.parametrize("task", OPERATORS)
@pytest.mark.parametrize("sigma_y", [0.0, 0.05])
def test_the_solver_runs_the_step_and_the_posterior(task: str, sigma_y: float) -> None:
    prior, net = Prior(tiny_unet(3, seed=0), Schedule.linear(), clamp=1.0), network()
    operator, y, sigma = measured(task, sigma_y)
    steps: list[Step] = []
    solver = DDC(steps=4)
    problem = Problem(operator, sigma_y)
    restored = solver.solve(Run(y, problem, prior, Noise([1, 2]), steps.append, network=net))

    noise = Noise([1, 2])
    shape = (2, 3, 16, 16)
    x, known = noise.normal(shape), None
    with torch.no_grad():
        for (t, s), step in zip(solver.pairs(prior.schedule), steps, strict=True):
            prediction = prior.predict(x, t)
            x0, known = net.consistent((operator, y, sigma), prediction.x0, t, known)
            assert step.t == t and torch.equal(step.x0, x0)
            assert step.noise is not None and torch.equal(step.noise, prediction.noise)
            x = prior.schedule.posterior(x, x0, t, s, noise.normal(shape), prediction.v)
    assert torch.equal(restored, x)


@pytest.mark.parametrize("task", OPERATORS)
@pytest.mark.parametrize("sigma_y", [0.0, 0.05])
def test_what_is_known_from_an_earlier_step_changes_nothing(task: str, sigma_y: float) -> None:
    net, at = network(), measured(task, sigma_y)
    first, second = Noise([1, 2]).normal((2, 3, 16, 16)), Noise([3, 4]).normal((2, 3, 16, 16))
    with torch.no_grad():
        _, known = net.consistent(at, first, 800)
        with_known, told = net.consistent(at, second, 400, known)
        without, fresh = net.consistent(at, second, 400)
    assert torch.equal(with_known, without) and torch.equal(told, fresh)
    parts = dict(net.layout())
    changed = {name for name, part in parts.items() if not torch.equal(known[:, part], told[:, part])}
    assert changed == {"projection"}  # all else depends on the measurement alone


def test_the_step_of_the_paper_is_a_difference() -> None:
    net, (operator, y, sigma) = network(("y",), "x0"), measured("sr2", 0.05)
    x0 = Noise([1, 2]).normal((2, 3, 16, 16))
    with torch.no_grad():
        consistent, known = net.consistent((operator, y, sigma), x0, 300)
        expected = x0 - run_unet(net.unet, torch.cat([x0, operator.to_image(y)], dim=1), 300)
    assert torch.equal(known, operator.to_image(y)) and torch.allclose(consistent, expected, atol=1e-6)
    assert (consistent - x0).abs().max() > 1e-3


def test_exact_pixels_are_put_back_and_noisy_ones_are_not() -> None:
    net, x0 = network(), Noise([1, 2]).normal((2, 3, 16, 16))
    for sigma_y in (0.0, 0.05):
        operator, y, sigma = measured("inpaint", sigma_y)
        with torch.no_grad():
            consistent, _ = net.consistent((operator, y, sigma), x0, 300)
        seen = operator.mask.expand_as(y) > 0
        assert torch.allclose(consistent[seen], y[seen], atol=1e-5) == (sigma_y == 0)


def test_training_may_wrap_the_unet() -> None:
    class Wrapped(nn.Module):
        def __init__(self, unet: nn.Module) -> None:
            super().__init__()
            self.unet, self.calls = unet, 0

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            self.calls += 1
            return self.unet(x, t)

    net, at = network(), measured("sr2", 0.05)
    wrapped, x0 = Wrapped(net.unet), Noise([1, 2]).normal((2, 3, 16, 16))
    times = torch.tensor([300, 700])
    with torch.no_grad():
        assert torch.equal(net.consistent(at, x0, times, unet=wrapped)[0], net.consistent(at, x0, times)[0])
    assert wrapped.calls == 1
