"""The losses, and the state that the data-consistency objective carries from step to step."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_parts import MIX, NOWHERE, tiny, tiny_objective, tiny_prior_objective

from ddc.datasets import Pool, find_sources
from ddc.errors import UserError
from ddc.noise import Noise, derive_seed
from ddc.perceptual import LPIPS, rolled
from ddc.priors import Schedule
from ddc.problems import Problem
from ddc.solvers.base import Run, Step
from ddc.solvers.bridge import Bridge
from ddc.solvers.ddc import DDC
from ddc.solvers.pnp_admm import DnCNN
from ddc.training.data import Draws, measure_draws
from ddc.training.ddc import kl_of_step
from ddc.training.objectives import BridgeObjective, DnCNNObjective
from ddc.training.output import save_model
from ddc.training.settings import BridgeSettings, DnCNNSettings


@pytest.fixture
def draws(pictures: Path) -> Draws:
    return Draws(Pool(find_sources([pictures]), 32), 32, seed=2)


def run(objective: Any, draws: Draws, steps: int, batch: int = 6) -> list[float]:
    with torch.no_grad():
        return [float(objective.losses(objective.module, draws, batch, i)["loss"]) for i in range(steps)]


def bridge_settings(task: str) -> BridgeSettings:
    return BridgeSettings(data=(NOWHERE,), out=NOWHERE, task=task)


def export(objective: Any, folder: Path) -> None:
    save_model(objective.model, folder, objective.module.state_dict(), objective.remarks(), "fp32", None)


@pytest.mark.parametrize("learned", [False, True])
def test_the_kl_term_against_numpy(learned: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    schedule = Schedule.linear()
    x, x0_y, truth, z = (torch.randn(3, 3, 8, 8, generator=generator) for _ in range(4))
    v = torch.rand(3, 3, 8, 8, generator=generator) if learned else None
    t = torch.tensor([0, 1, 600])
    got = float(kl_of_step(schedule, x, x0_y, truth, t, z, v))

    bars = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    terms = [0.0]  # t = 0: ā_s = 1, omitted
    for i, step in ((1, 1), (2, 600)):
        a_t, a_s = bars[step], bars[step - 1]
        beta = 1 - a_t / a_s
        tilde = beta * (1 - a_s) / (1 - a_t)
        mean = math.sqrt(a_s) * beta / (1 - a_t) * x0_y[i].double().numpy()
        mean += math.sqrt(1 - beta) * (1 - a_s) / (1 - a_t) * x[i].double().numpy()
        std: Any = math.sqrt(tilde)
        if v is not None:
            share = v[i].double().numpy()
            std = np.exp(0.5 * (share * math.log(beta) + (1 - share) * math.log(tilde)))
        rest = mean + std * z[i].double().numpy() - math.sqrt(a_s) * truth[i].double().numpy()
        m, var = rest.mean(), rest.var()
        terms.append(0.5 * (math.log(var / (1 - a_s)) + (1 - a_s + m**2) / var - 1))
    assert got == pytest.approx(np.mean(terms), rel=1e-4)


def test_the_ddc_loss_is_its_three_terms(draws: Draws) -> None:
    objective = tiny_objective(lpips=LPIPS("alex"), w_mse=2.0, w_lpips=0.3, w_kl=0.01)
    terms = objective.losses(objective.module, draws, 3, 0)
    terms = {k: v.detach() for k, v in terms.items()}
    total = 2.0 * terms["mse"] + 0.3 * terms["lpips"] + 0.01 * terms["kl"]
    assert float(terms["loss"]) == pytest.approx(float(total), rel=1e-5)
    without = tiny_objective(lpips=LPIPS("alex"), w_lpips=0.0)
    assert "lpips" not in without.losses(without.module, draws, 2, 0)


def test_a_task_may_have_its_own_weight_of_lpips(pictures: Path) -> None:
    def loss(tasks: str, w_lpips: float) -> float:
        options = {"w_mse": 0.0, "w_kl": 0.0, "w_lpips": w_lpips}
        objective = tiny_objective(tasks=tasks, lpips=LPIPS("alex"), **options)
        draws = Draws(Pool(find_sources([pictures]), 32), 32, seed=2)
        return float(objective.losses(objective.module, draws, 3, 0)["loss"].detach())

    plain = loss("sr4", 0.1)
    assert loss("sr4:lpips=0.3", 0.0) == pytest.approx(3 * plain, rel=1e-4)
    assert loss("sr4:lpips=0", 0.1) == 0


def test_lpips_looks_at_another_place_in_every_step() -> None:
    x = torch.arange(2 * 16 * 16.0).view(1, 2, 16, 16)
    places = {tuple(rolled(step, 4, x, x)[1].flatten().tolist()) for step in range(16)}
    assert len(places) == 16  # every place of a grid of 4×4
    assert torch.equal(rolled(0, 4, x)[0], x)
    assert torch.equal(rolled(6, 4, x)[0], x.roll((1, 2), (-2, -1)))
    assert torch.equal(rolled(5, 0, x)[0], x)


def test_a_measurement_depends_on_the_number_of_its_draw_alone(draws: Draws) -> None:
    objective = tiny_objective(trajectory_share=0.5)
    many = objective._new_slots(draws, list(range(20)), [-1] * 20)
    some = objective._new_slots(draws, [13, 4], [-1, -1])
    for j, i in enumerate((13, 4)):
        assert some.draws[j] == many.draws[i]
        assert torch.allclose(some.y[j], many.y[i], atol=1e-6)
        assert torch.equal(some.truth[j], many.truth[i]) and torch.equal(some.x[j], many.x[i])
        assert torch.allclose(some.known[j], many.known[i], atol=1e-4)
    assert len({draw.task for draw in many.draws}) > 5


def test_trajectories_are_the_samplers_states(draws: Draws) -> None:
    """Every picture that is followed takes the five steps of `DDC.solve`, and then makes room."""
    objective = tiny_objective(trajectory_share=0.5)
    seen: dict[int, list[int]] = {}
    for i in range(11):
        run(objective, draws, 1)
        assert objective.slots is not None
        for number, stage in zip(objective.slots.numbers, objective.slots.stage, strict=True):
            seen.setdefault(number, []).append(stage)
        assert sum(stage < 0 for stage in objective.slots.stage) == 3, i
    followed = [stages for number, stages in seen.items() if stages[0] == 1 and number >= 6]
    assert followed and all(stages == [1, 2, 3, 4, 5][: len(stages)] for stages in followed)


class Recorded:
    """Noise that was drawn before, given to a solver."""

    def __init__(self, fields: list[torch.Tensor]) -> None:
        self.fields = fields

    def normal(self, shape: Any) -> torch.Tensor:
        return self.fields.pop(0)


@dataclass(frozen=True)
class OneStep(DDC):
    """One step of the solver, from t to s."""

    pair: tuple[int, int] = (0, -1)

    def pairs(self, schedule: Schedule) -> list[tuple[int, int]]:
        return [self.pair]


def test_the_training_step_is_the_solvers_step(draws: Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same x̂0,y from the same x_t, t and measurement, for all tasks of a mixed batch at once."""
    objective = tiny_objective(tasks=MIX + ",sr3,colorize,disc2-4", trajectory_share=0.5)
    network, prior = objective.network, objective.prior
    torch.nn.init.normal_(network.unet.exit.weight, std=0.1)
    seen: list[Any] = []

    def recorded(measured: Any, x0: torch.Tensor, t: torch.Tensor, *rest: Any) -> Any:
        made = type(network).consistent(network, measured, x0, t, *rest)
        slots = objective.slots
        assert slots is not None
        pictures = zip(slots.draws, slots.operators, slots.y, slots.x, t.tolist(), made[0], strict=True)
        seen.extend((*picture[:3], picture[3].clone(), *picture[4:]) for picture in pictures)
        return made

    monkeypatch.setattr(network, "consistent", recorded)
    run(objective, draws, 3, batch=20)
    monkeypatch.undo()
    assert len({draw.task.kind for draw, *_ in seen}) > 8 and len(seen) == 60
    for draw, operator, y, x, t, x0_y in seen:
        if draw.task.kind == "disc" and not draw.sigma_y:
            continue  # training leaves out the conjugate gradients that put an exact blur back
        shown: list[Step] = []
        problem = Problem(operator, torch.tensor([draw.sigma_y]))
        noise: Any = Recorded([x[None], torch.zeros_like(x[None])])
        OneStep(pair=(t, -1)).solve(Run(y, problem, prior, noise, shown.append, network=network))
        apart = (shown[0].x0[0] - x0_y).abs().max() / x0_y.abs().max().clamp(min=1)
        assert float(apart) < 1e-6, (draw, float(apart))


def test_a_followed_picture_ends_where_the_solver_ends(draws: Draws) -> None:
    objective = tiny_objective(tasks="sr4", trajectory_share=1.0)
    torch.nn.init.normal_(objective.network.unet.exit.weight, std=0.1)
    objective.slots = objective._new_slots(draws, [40], [0])
    slots = objective.slots
    fields = [slots.x.clone()]
    fields += [Noise([derive_seed(2, f"z/40/{k}")]).normal((1, 3, 32, 32)) for k in range(5)]
    y = slots.y[0].clone()
    run(objective, draws, 5, batch=1)  # the picture makes room at the beginning of the sixth
    problem = Problem(slots.operators[0], torch.tensor([slots.draws[0].sigma_y]))
    run_of_solver = Run(y, problem, objective.prior, Recorded(fields), network=objective.network)  # type: ignore[arg-type]
    restored = DDC().solve(run_of_solver)
    assert torch.allclose(slots.x, restored, atol=1e-5)


def test_the_state_between_steps_can_be_put_back(draws: Draws) -> None:
    one = tiny_objective(trajectory_share=0.5)
    run(one, draws, 7)
    kept, position = {k: v.clone() for k, v in one.tensors().items()}, draws.position
    expected = run(one, draws, 4)
    other = tiny_objective(trajectory_share=0.5)
    draws.position = position
    other.restore(kept, draws)
    assert run(other, draws, 4) == expected


def test_prior_objective_learns_what_the_prior_predicts(draws: Draws) -> None:
    objective = tiny_prior_objective(snr_gamma=0.0)
    terms = objective.losses(objective.module, draws, 4, 0)
    # the fresh network says 0, so the loss is the mean square of v
    assert float(terms["loss"]) == pytest.approx(float(terms["mse"]), rel=1e-6)
    assert 0.1 < float(terms["mse"]) < 2
    figures = objective.validate(draws.crops([0, 1]), ["a", "b"])
    assert set(figures) == {f"psnr_t{t}" for t in (200, 400, 600, 800)}


def test_bridge_objective(draws: Draws, tmp_path: Path) -> None:
    bridge = Bridge(tiny(), "sr4")
    objective = BridgeObjective(bridge_settings("sr4"), bridge, LPIPS("alex"))
    loss = float(objective.losses(objective.module, draws, 4, 0)["loss"].detach())
    # the fresh network says 0: the loss is the mean square of (x_n − x₀)/S_n
    draws.position = 0
    numbers = draws.advance(4)
    n = torch.tensor(draws.times(numbers, 1000))
    x0, _, _, (operator, y, _) = measure_draws(draws, numbers, objective._draw)
    x1 = operator.to_image(y, (32, 32))
    low = torch.nn.functional.avg_pool2d(x1, 4)
    repeated = low.repeat_interleave(4, -1).repeat_interleave(4, -2)
    assert torch.allclose(x1, repeated, atol=1e-6)  # the small picture, repeated to image size
    z = Noise(draws.seeds(numbers, "noise")).normal(x0.shape)
    expected = bridge.schedule.target(bridge.schedule.sample(x0, x1, n, z), x0, n).square().mean()
    assert loss == pytest.approx(float(expected), rel=1e-5)
    export(objective, tmp_path / "b")
    assert Bridge.from_pretrained(tmp_path / "b").task == "sr4"
    figures = objective.validate(x0[:2], ["a", "b"])
    assert set(figures) == {"sr4/psnr", "sr4/lpips", "measurement/psnr", "measurement/lpips"}


def test_dncnn_objective(draws: Draws, tmp_path: Path) -> None:
    settings = DnCNNSettings(data=(NOWHERE,), out=NOWHERE, sigma=0.2, sigma_low=0.1)
    objective = DnCNNObjective(settings, DnCNN(3, 8, 0.2))
    loss = float(objective.losses(objective.module, draws, 8, 0)["loss"].detach())
    assert 0.1**2 < loss < 0.2**2  # it begins as the identity: what is left is the noise
    export(objective, tmp_path / "d")
    assert DnCNN.from_pretrained(tmp_path / "d").sigma_y == 0.2
    figures = objective.validate(draws.crops([0, 1]), ["a", "b"])
    assert figures["denoised/psnr"] == figures["noisy/psnr"]


@pytest.mark.parametrize("kind", ["prior", "ddc", "i2sb", "dncnn"])
def test_pictures_to_look_at(kind: str, draws: Draws) -> None:
    made: dict[str, Any] = {
        "prior": lambda: tiny_prior_objective(),
        "ddc": lambda: tiny_objective(),
        "i2sb": lambda: BridgeObjective(bridge_settings("jpeg10"), Bridge(tiny(), "jpeg10")),
        "dncnn": lambda: DnCNNObjective(DnCNNSettings(data=(NOWHERE,), out=NOWHERE), DnCNN(2, 4)),
    }
    crops = draws.crops([0, 1])
    rows = made[kind]().pictures(crops, ["a", "b"])
    assert len(rows) == 2 and all(row.shape[1:] == (3, 32, 32) for row in rows)
    assert rows[0].shape[0] == {"prior": 5, "ddc": 4, "i2sb": 4, "dncnn": 3}[kind]
    assert torch.equal(rows[1][0], crops[1]) and not torch.equal(rows[1][-1], crops[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_step_makes_the_gpu_wait(pictures: Path) -> None:
    device = torch.device("cuda", 0)
    objective = tiny_objective(trajectory_share=0.5, lpips=LPIPS("alex"))
    objective.prepare(device)
    assert objective.lpips is not None
    objective.lpips.to(device)
    module = objective.module.to(device)
    draws = Draws(Pool(find_sources([pictures]), 32, device), 32, seed=2)
    for i in range(20):
        if i == 12:  # what is kept on the device has been copied there by now
            torch.cuda.set_sync_debug_mode("error")
        try:
            terms = objective.losses(module, draws, 24, i)
            terms["loss"].backward()
        except BaseException:
            torch.cuda.set_sync_debug_mode("default")
            raise
    torch.cuda.set_sync_debug_mode("default")
    assert bool(terms["loss"].isfinite())


def test_a_bridge_has_one_task() -> None:
    assert BridgeObjective(bridge_settings("jpeg10"), Bridge(tiny(), "sr4")).bridge.task == "jpeg10"
    for text in ("jpeg5-95", "sr4:weight=0.5", "op.py:Op"):
        with pytest.raises(UserError, match="is not one task"):
            BridgeObjective(bridge_settings(text), Bridge(tiny(), "sr4"))
