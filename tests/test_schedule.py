"""The tables, the pairs of a short run, and the moments of each step."""

import math

import pytest
import torch

from ddc.errors import UserError
from ddc.priors import Schedule, schedule_from_config

LINEAR = Schedule.linear()
COSINE = schedule_from_config({"beta_schedule": "squaredcos_cap_v2"})
ONE = torch.ones(1, 1, 1, 1, dtype=torch.float64)
ZERO = torch.zeros_like(ONE)
PAIRS = [(999, 998), (800, 600), (500, 0), (200, 199), (1, 0)]


def test_pairs_of_the_paper() -> None:
    assert LINEAR.pairs(5) == [(800, 600), (600, 400), (400, 200), (200, 0), (0, -1)]
    assert LINEAR.pairs(2) == [(500, 0), (0, -1)]


def test_pairs_evenly_spaced_include_both_ends() -> None:
    assert LINEAR.pairs(5, "even") == [(999, 749), (749, 500), (500, 250), (250, 0), (0, -1)]


@pytest.mark.parametrize("spacing", ["leading", "even"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20, 100, 333, 1000])
def test_pairs_form_one_descending_chain(steps: int, spacing: str) -> None:
    pairs = LINEAR.pairs(steps, spacing)  # type: ignore[arg-type]
    assert len(pairs) == steps
    assert all(t > s for t, s in pairs)
    assert [s for _, s in pairs] == [*[t for t, _ in pairs[1:]], -1]
    assert pairs[0][0] <= 999


def test_a_single_step_starts_at_the_noisy_end() -> None:
    assert LINEAR.pairs(1) == [(999, -1)]


@pytest.mark.parametrize("steps", [0, -1, 1001])
def test_impossible_steps_are_refused(steps: int) -> None:
    with pytest.raises(UserError, match="between 1 and 1000"):
        LINEAR.pairs(steps)


def test_linear_table() -> None:
    assert LINEAR.train_steps == 1000
    assert LINEAR.alpha_bars.dtype == torch.float64
    assert LINEAR.alpha_bars[0].item() == pytest.approx(1 - 1e-4, abs=1e-15)
    product = math.prod(1 - (1e-4 + (0.02 - 1e-4) * i / 999) for i in range(1000))
    assert LINEAR.alpha_bars[999].item() == pytest.approx(product, rel=1e-10)
    assert LINEAR.alpha_bars[-1] == 1


def test_scaled_linear_table() -> None:
    schedule = schedule_from_config(
        {"num_train_timesteps": 10, "beta_schedule": "scaled_linear", "beta_start": 1e-2, "beta_end": 4e-2}
    )
    assert schedule.alpha_bars[0].item() == pytest.approx(0.99)
    assert (schedule.alpha_bars[9] / schedule.alpha_bars[8]).item() == pytest.approx(0.96)


def test_cosine_table() -> None:
    def f(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    for t in (0, 300, 900):
        assert COSINE.alpha_bars[t].item() == pytest.approx(f((t + 1) / 1000) / f(0), rel=1e-9)
    last_beta = 1 - COSINE.alpha_bars[999] / COSINE.alpha_bars[998]
    assert last_beta.item() == pytest.approx(0.999)


@pytest.mark.parametrize("schedule", [LINEAR, COSINE])
@pytest.mark.parametrize(("t", "s"), PAIRS)
def test_posterior_is_the_conditional_of_the_forward_process(schedule: Schedule, t: int, s: int) -> None:
    """Bayes: x_s ~ N(√ā_s x0, 1−ā_s), and x_t given x_s ~ N(√(ā_t/ā_s) x_s, 1 − ā_t/ā_s)."""
    a_t, a_s = float(schedule.alpha_bars[t]), float(schedule.alpha_bars[s])
    x0, x = 0.7 * ONE, -0.4 * ONE
    ratio = math.sqrt(a_t / a_s)
    precision = 1 / (1 - a_s) + ratio**2 / (1 - ratio**2)
    mean = (math.sqrt(a_s) * 0.7 / (1 - a_s) + ratio * -0.4 / (1 - ratio**2)) / precision
    assert float(schedule.posterior_mean(x, x0, t, s)) == pytest.approx(mean, rel=1e-9)
    assert float(schedule.posterior_std(x, t, s)) == pytest.approx(precision**-0.5, rel=1e-9)
    drawn = schedule.posterior(x, x0, t, s, 2 * ONE)
    assert float(drawn) == pytest.approx(mean + 2 * precision**-0.5, rel=1e-9)


def test_learned_variance_interpolates_in_the_logarithm() -> None:
    t, s = 600, 400
    beta = float(1 - LINEAR.alpha_bars[t] / LINEAR.alpha_bars[s])
    tilde = float(LINEAR.posterior_std(ONE, t, s)) ** 2
    for v, variance in ((0.0, tilde), (1.0, beta), (0.5, math.sqrt(beta * tilde))):
        assert float(LINEAR.posterior_std(ONE, t, s, v * ONE)) ** 2 == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [0, 200, 999])
def test_the_last_step_adds_exactly_no_noise(t: int, dtype: torch.dtype) -> None:
    x, x0 = torch.rand(2, 3, 4, 4, dtype=dtype), torch.rand(2, 3, 4, 4, dtype=dtype)
    z = torch.full_like(x, 1e6)
    for v in (None, torch.zeros_like(x), torch.full_like(x, 0.5), torch.ones_like(x)):
        assert torch.equal(LINEAR.posterior(x, x0, t, -1, z, v), x0)
    noise = torch.rand(2, 3, 4, 4, dtype=dtype)
    assert torch.equal(LINEAR.ddim(x0, noise, t, -1, z, 1.0), x0)
    assert torch.equal(LINEAR.ddnm_noise_rule(x0, noise, -1, z, 0.85), x0)


@pytest.mark.parametrize(("t", "s"), PAIRS)
def test_ddim_keeps_the_marginal(t: int, s: int) -> None:
    """With the true x0 and ε the step lands on q(x_s | x0) for every η: variances add up to 1 − ā_s."""
    for eta in (0.0, 0.4, 1.0):
        fresh = LINEAR.ddim(ZERO, ZERO, t, s, ONE, eta)
        kept = LINEAR.ddim(ZERO, ONE, t, s, ZERO, eta)
        assert float(fresh**2 + kept**2) == pytest.approx(float(1 - LINEAR.alpha_bars[s]), rel=1e-9)
        assert float(LINEAR.ddim(ONE, ZERO, t, s, ZERO, eta)) == pytest.approx(math.sqrt(float(LINEAR.alpha_bars[s])))
    assert float(LINEAR.ddim(ZERO, ZERO, t, s, ONE, 0.0)) == 0


def test_ddim_with_full_noise_is_the_posterior_step() -> None:
    x0, noise, z = 0.3 * ONE, -1.2 * ONE, 0.8 * ONE
    x = LINEAR.add_noise(x0, 600, noise)
    assert torch.allclose(LINEAR.ddim(x0, noise, 600, 400, z, 1.0), LINEAR.posterior(x, x0, 600, 400, z), atol=1e-12)


def test_ddnm_noise_rule_is_its_own() -> None:
    level = math.sqrt(float(1 - LINEAR.alpha_bars[400]))
    assert float(LINEAR.ddnm_noise_rule(ZERO, ZERO, 400, ONE, 0.85)) == pytest.approx(0.85 * level)
    assert float(LINEAR.ddnm_noise_rule(ZERO, ONE, 400, ZERO, 0.85)) == pytest.approx(math.sqrt(1 - 0.85**2) * level)
    assert float(LINEAR.ddim(ZERO, ZERO, 600, 400, ONE, 0.85)) != pytest.approx(0.85 * level, rel=1e-3)


def test_one_time_for_each_image() -> None:
    x, x0, z = torch.rand(3, 3, 5, 4), torch.rand(3, 3, 5, 4), torch.rand(3, 3, 5, 4)
    t, s = torch.tensor([800, 200, 0]), torch.tensor([600, 0, -1])
    together = LINEAR.posterior(x, x0, t, s, z)
    noised = LINEAR.add_noise(x0, t, z)
    for i in range(3):
        one = slice(i, i + 1)
        assert torch.equal(LINEAR.posterior(x[one], x0[one], int(t[i]), int(s[i]), z[one]), together[one])
        assert torch.equal(LINEAR.add_noise(x0[one], int(t[i]), z[one]), noised[one])


def test_steps_keep_the_dtype() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16):
        x = torch.ones(1, 3, 2, 2, dtype=dtype)
        assert LINEAR.posterior(x, x, 600, 400, x, x).dtype == dtype
        assert LINEAR.ddim(x, x, 600, 400, x, 0.5).dtype == dtype
        assert LINEAR.alpha_bar(3, x).dtype == dtype
