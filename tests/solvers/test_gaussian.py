"""Every solver against an independent float64 recursion of its formula, and against the true posterior."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gaussian_prior import (
    DIM,
    SHAPE,
    Array,
    DenseLinear,
    DenseSVD,
    GaussianPrior,
    GivenNoise,
    images,
    mean_and_covariance,
    random_orthogonal,
    vectors,
    wasserstein,
)
from torch import Tensor

from ddc.noise import Noise
from ddc.priors import Measured
from ddc.problems import Problem
from ddc.solvers import SOLVERS
from ddc.solvers.base import Run, Solver
from ddc.solvers.bridge import CDDB, I2SB, BridgeSchedule
from ddc.solvers.ddc import DDC
from ddc.solvers.ddnm import DDNM
from ddc.solvers.ddrm import DDRM
from ddc.solvers.dds import DDS
from ddc.solvers.diffpir import DiffPIR
from ddc.solvers.gradients import DPS, MCG, PiGDM
from ddc.solvers.pnp_admm import PnPADMM
from ddc.solvers.posterior import Posterior
from ddc.solvers.reddiff import REDdiff
from ddc.solvers.references import Unconditional

I = np.eye(DIM)
RNG = np.random.default_rng(7)
_basis = random_orthogonal(RNG)
PRIOR = GaussianPrior(0.3 * RNG.standard_normal(DIM), _basis @ np.diag(np.geomspace(0.02, 0.5, DIM)) @ _basis.T)
# few distinct singular values, so that five conjugate-gradient iterations are exact; five directions unmeasured
OPERATOR = DenseSVD(
    random_orthogonal(RNG), np.array([1.0, 1, 0.7, 0.7, 0.4, 0.4, 0.2, 0, 0, 0, 0, 0]), random_orthogonal(RNG)
)
A = OPERATOR.matrix
TRUTH = PRIOR.mean + np.linalg.cholesky(PRIOR.covariance) @ RNG.standard_normal(DIM)
CLEAN = A @ TRUTH
MEASURED_NOISE = OPERATOR.u @ (RNG.standard_normal(DIM) * (OPERATOR.s > 0))
LEVELS = (0.0, 0.1, 0.4)  # σ, in [-1, 1] units
abar = PRIOR.alpha_bars

Moments = tuple[Array, Array]
# one step of a recursion: F, f, N with x_s = F x + f + N z
Affine = tuple[Array, Array, Array]


def measurement(sigma: float) -> Array:
    return CLEAN + sigma * MEASURED_NOISE


def problem(sigma: float) -> Problem:
    return Problem(OPERATOR, sigma / 2, "dense")


def solve(solver: Solver, sigma: float, **parts: Any) -> Callable[[Tensor, Noise], Tensor]:
    return lambda y, noise: solver.solve(Run(y, problem(sigma), PRIOR, noise, **parts))


def recursion(pairs: list[tuple[int, int]], step: Callable[[int, int], Affine], start: Moments) -> Moments:
    mean, cov = start
    for t, s in pairs:
        F, f, N = step(t, s)
        mean, cov = F @ mean + f, F @ cov @ F.T + N @ N.T
    return mean, cov


WHITE: Moments = (np.zeros(DIM), I)


def beta_tilde(t: int, s: int) -> float:
    return (1 - abar[t] / abar[s]) * (1 - abar[s]) / (1 - abar[t])


def noise_rule(t: int, s: int, R: Array, r: Array, eta: float) -> Affine:
    """√ā_s x0 + √(1−ā_s)(ηz + √(1−η²)ε̂) with x0 = R x + r."""
    _, _, E, e = PRIOR.denoiser(t)
    level = np.sqrt(1 - abar[s])
    keep = level * np.sqrt(1 - eta**2)
    return np.sqrt(abar[s]) * R + keep * E, np.sqrt(abar[s]) * r + keep * e, level * eta * I


# ----------------------------------------------------------------------------------------------------------
# the recursions, each written from the formula and not from the code


def reference_unconditional(solver: Unconditional, sigma: float) -> Moments:
    def step(t: int, s: int) -> Affine:
        K, k, E, e = PRIOR.denoiser(t)
        if solver.eta is None:
            beta = 1 - abar[t] / abar[s]
            c0 = np.sqrt(abar[s]) * beta / (1 - abar[t])
            ct = np.sqrt(1 - beta) * (1 - abar[s]) / (1 - abar[t])
            return c0 * K + ct * I, c0 * k, np.sqrt(beta_tilde(t, s)) * I
        c1 = solver.eta * np.sqrt(beta_tilde(t, s))
        c2 = np.sqrt(1 - abar[s] - c1**2)
        return np.sqrt(abar[s]) * K + c2 * E, np.sqrt(abar[s]) * k + c2 * e, c1 * I

    return recursion(PRIOR.schedule.pairs(solver.steps), step, WHITE)


def reference_ddnm(solver: DDNM, sigma: float) -> Moments:
    y, pinv, eta = measurement(sigma), np.linalg.pinv(A), solver.eta

    def step(t: int, s: int) -> Affine:
        K, k, E, e = PRIOR.denoiser(t)
        if sigma == 0:
            null = I - pinv @ A
            return noise_rule(t, s, null @ K, null @ k + pinv @ y, eta)
        a, level = np.sqrt(abar[s]), np.sqrt(1 - abar[s])
        correct, keep, fresh = np.zeros(DIM), np.zeros(DIM), np.zeros(DIM)
        for i, d in enumerate(OPERATOR.s):
            if d == 0:
                correct[i], keep[i], fresh[i] = 0, level * np.sqrt(1 - eta**2), level * eta
            elif level >= a * sigma / d:
                correct[i], keep[i], fresh[i] = 1, 0, np.sqrt(level**2 - (a * sigma / d) ** 2)
            else:
                correct[i], keep[i], fresh[i] = d * level * np.sqrt(1 - eta**2) / (a * sigma), 0, eta * level
        V = OPERATOR.v
        mend = V @ np.diag(correct) @ V.T
        R, r = K - mend @ pinv @ A @ K, k - mend @ pinv @ (A @ k - y)
        keep_matrix = V @ np.diag(keep) @ V.T
        return a * R + keep_matrix @ E, a * r + keep_matrix @ e, V @ np.diag(fresh)

    return recursion(PRIOR.schedule.pairs(solver.steps), step, WHITE)


def reference_ddrm(solver: DDRM, sigma: float) -> Moments:
    pairs, V, eta, eta_b = PRIOR.schedule.pairs(solver.steps), OPERATOR.v, solver.eta, solver.eta_b
    coefficients = OPERATOR.u.T @ measurement(sigma)

    def level(t: int) -> float:
        return np.sqrt((1 - abar[t]) / abar[t])

    def step(t: int, s: int) -> Affine:  # in the coordinates Vᵀ x/√ā
        K, k, E, e = PRIOR.denoiser(t)
        K0, k0 = V.T @ K @ V * np.sqrt(abar[t]), V.T @ k
        E0, e0 = V.T @ E @ V * np.sqrt(abar[t]), V.T @ e
        F, f, fresh = np.zeros((DIM, DIM)), np.zeros(DIM), np.zeros(DIM)
        for i, d in enumerate(OPERATOR.s):
            if d == 0:
                F[i] = K0[i] + level(s) * np.sqrt(1 - eta**2) * E0[i]
                f[i] = k0[i] + level(s) * np.sqrt(1 - eta**2) * e0[i]
                fresh[i] = level(s) * eta
            elif level(s) < sigma / d:
                pull = level(s) * np.sqrt(1 - eta**2) / (sigma / d)
                F[i], f[i], fresh[i] = (
                    (1 - pull) * K0[i],
                    k0[i] + pull * (coefficients[i] / d - k0[i]),
                    level(s) * eta,
                )
            else:
                F[i], f[i] = (1 - eta_b) * K0[i], (1 - eta_b) * k0[i] + eta_b * coefficients[i] / d
                fresh[i] = np.sqrt(level(s) ** 2 - (eta_b * sigma / d) ** 2)
        return F, f, np.diag(fresh)

    first = level(pairs[0][0])
    mean, variance = np.zeros(DIM), np.full(DIM, first**2)
    for i, d in enumerate(OPERATOR.s):
        if d > 0 and first**2 > (sigma / d) ** 2:
            mean[i], variance[i] = coefficients[i] / d, first**2 - (sigma / d) ** 2
    mean, cov = recursion(pairs, step, (mean, np.diag(variance)))
    return V @ mean, V @ cov @ V.T


def reference_pigdm(solver: PiGDM, sigma: float) -> Moments:
    y = measurement(sigma)

    def step(t: int, s: int) -> Affine:
        K, k, E, e = PRIOR.denoiser(t)
        r2 = 1 - abar[t]
        if sigma == 0 or solver.noise_blind:
            inverse = np.linalg.pinv(A)
        else:
            inverse = A.T @ np.linalg.inv(A @ A.T + sigma**2 / r2 * I)
        G, g = -K.T @ inverse @ A @ K, K.T @ inverse @ (y - A @ k)
        c1 = solver.eta * np.sqrt(beta_tilde(t, s))
        c2 = np.sqrt(1 - abar[s] - c1**2)
        factor = np.sqrt(abar[t] * abar[s])
        if solver.score_factor:
            factor = np.sqrt(abar[s] / abar[t]) - c2 / np.sqrt(1 - abar[t])
        return (
            np.sqrt(abar[s]) * K + c2 * E + factor * G,
            np.sqrt(abar[s]) * k + c2 * e + factor * g,
            c1 * I,
        )

    pairs, start = PRIOR.schedule.pairs(solver.steps), WHITE
    if solver.start_at_pinv:
        a = abar[pairs[0][0]]
        start = (np.sqrt(a) * np.linalg.pinv(A) @ y, (1 - a) * I)
    return recursion(pairs, step, start)


def reference_dds(solver: DDS, sigma: float) -> Moments:
    y, gamma = measurement(sigma), solver.gamma or 1.0
    keep = np.linalg.inv(I + gamma * A.T @ A)
    pull = keep @ (gamma * A.T)
    if solver.gamma is None and sigma == 0:  # x̂0 counts where A says nothing
        keep, pull = I - np.linalg.pinv(A) @ A, np.linalg.pinv(A)

    def step(t: int, s: int) -> Affine:
        K, k, _, _ = PRIOR.denoiser(t)
        return noise_rule(t, s, keep @ K, keep @ k + pull @ y, solver.eta)

    return recursion(PRIOR.schedule.pairs(solver.steps), step, WHITE)


def reference_diffpir(solver: DiffPIR, sigma: float) -> Moments:
    y, zeta = measurement(sigma), solver.zeta or 0.0

    def step(t: int, s: int) -> Affine:
        K, k, _, _ = PRIOR.denoiser(t)
        rho = solver.lam * max(sigma, 0.001) ** 2 * abar[t] / (1 - abar[t])
        inverse = np.linalg.inv(A.T @ A + rho * I)
        R, r = inverse @ (rho * K), inverse @ (rho * k + A.T @ y)
        E, e = (I - np.sqrt(abar[t]) * R) / np.sqrt(1 - abar[t]), -np.sqrt(abar[t]) * r / np.sqrt(1 - abar[t])
        level = np.sqrt(1 - abar[s])
        return (
            np.sqrt(abar[s]) * R + level * np.sqrt(1 - zeta) * E,
            np.sqrt(abar[s]) * r + level * np.sqrt(1 - zeta) * e,
            level * np.sqrt(zeta) * I,
        )

    return recursion(PRIOR.schedule.pairs(solver.steps), step, WHITE)


class GaussianBridge:
    """The exact bridge network: E[x0 | x_n] for x1 = A x0 + σe, affine in x_n."""

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        self.schedule = BridgeSchedule.symmetric()
        rising = np.linspace(np.sqrt(1e-4), np.sqrt(3e-4), 1000)[:500] ** 2
        self.S2 = np.cumsum(np.concatenate([rising, rising[::-1]]))

    def denoiser(self, n: int) -> tuple[Array, Array]:
        weight = self.S2[n] / self.S2[-1]  # of x1
        M = (1 - weight) * I + weight * A
        spread = self.S2[n] * (1 - weight) + weight**2 * self.sigma**2 + 1e-9
        K = PRIOR.covariance @ M.T @ np.linalg.inv(M @ PRIOR.covariance @ M.T + spread * I)
        return K, PRIOR.mean - K @ M @ PRIOR.mean

    def __call__(self, x: Tensor, n: int) -> Tensor:
        K, k = self.denoiser(n)
        x0 = vectors(x) @ K.T + k
        return (x - images(x0)) / np.sqrt(self.S2[n])


def reference_bridge(solver: I2SB | CDDB, sigma: float) -> Moments:
    bridge, y = GaussianBridge(sigma), measurement(sigma)
    c = 1.0 if isinstance(solver, CDDB) else 0.0

    def step(n: int, m: int) -> Affine:
        K, k = bridge.denoiser(n)
        S_n, S_m = bridge.S2[n], bridge.S2[m]
        alpha2 = S_n - S_m
        pull = 2 * c * alpha2 / S_n
        spread = 0.0 if m == 0 else np.sqrt(alpha2 * S_m / S_n)
        return (
            alpha2 / S_n * K + S_m / S_n * I - pull * A.T @ A @ K,
            alpha2 / S_n * k - pull * A.T @ (A @ k - y),
            spread * I,
        )

    return recursion(bridge.schedule.pairs(solver.steps), step, (y, np.zeros((DIM, DIM))))


REFERENCES: list[tuple[str, Solver, Callable[..., Moments]]] = [
    ("unconditional", Unconditional(), reference_unconditional),
    ("unconditional, η = 0", Unconditional(eta=0.0), reference_unconditional),
    ("unconditional, η = 0.7", Unconditional(eta=0.7), reference_unconditional),
    ("ddnm", DDNM(), reference_ddnm),
    ("ddrm", DDRM(), reference_ddrm),
    ("ddrm, η_b = 0.6", DDRM(eta_b=0.6), reference_ddrm),
    ("pigdm", PiGDM(), reference_pigdm),
    ("pigdm, from noise", PiGDM(start_at_pinv=False), reference_pigdm),
    ("pigdm, noise-blind", PiGDM(noise_blind=True), reference_pigdm),
    ("pigdm, score factor", PiGDM(score_factor=True), reference_pigdm),
    ("pigdm, η = 0.5", PiGDM(eta=0.5, score_factor=True), reference_pigdm),
    ("dds", DDS(), reference_dds),
    ("dds, γ = 2", DDS(gamma=2.0), reference_dds),
    ("diffpir", DiffPIR(zeta=0.1), reference_diffpir),
    ("i2sb", I2SB(), reference_bridge),
    ("cddb", CDDB(), reference_bridge),
]


def parts_for(solver: Solver, sigma: float) -> dict[str, Any]:
    return {"bridge": GaussianBridge(sigma)} if "bridge" in solver.needs else {}


@pytest.mark.parametrize("sigma", LEVELS)
@pytest.mark.parametrize(("label", "solver", "reference"), REFERENCES, ids=[r[0] for r in REFERENCES])
def test_mean_and_covariance_equal_the_recursion(
    label: str, solver: Solver, reference: Callable[..., Moments], sigma: float
) -> None:
    mean, cov = mean_and_covariance(solve(solver, sigma, **parts_for(solver, sigma)), measurement(sigma))
    expected_mean, expected_cov = reference(solver, sigma)
    error = max(np.abs(mean - expected_mean).max(), np.abs(cov - expected_cov).max())
    print(f"recursion error  {label:24} σ {sigma:.1f}  {error:.1e}")
    assert error < 1e-8


# ----------------------------------------------------------------------------------------------------------
# solvers that are not affine: the same path, written out in numpy


def given_fields(draws: int) -> Array:
    return np.random.default_rng(3).standard_normal((draws, 1, DIM))


@pytest.mark.parametrize("sigma", [0.0, 0.4])
@pytest.mark.parametrize("kind", [DPS, MCG])
def test_gradient_solvers_follow_their_formula(kind: type[Solver], sigma: float) -> None:
    steps, zeta, y = 25, 0.6, measurement(sigma)
    fields = given_fields(2 * steps + 1)
    clip = {"clip": False} if kind is DPS else {}
    solver = kind(steps=steps, zeta=zeta, **clip)  # type: ignore[arg-type]
    result = vectors(solve(solver, sigma)(images(y), GivenNoise(fields)))[0]

    draws = iter(fields[:, 0])
    pinv = np.linalg.pinv(A)
    x = next(draws)
    for t, s in PRIOR.schedule.pairs(steps):
        K, k, _, _ = PRIOR.denoiser(t)
        x0 = K @ x + k
        beta = 1 - abar[t] / abar[s]
        mean = np.sqrt(abar[s]) * beta / (1 - abar[t]) * x0
        mean = mean + np.sqrt(1 - beta) * (1 - abar[s]) / (1 - abar[t]) * x
        gradient = K.T @ A.T @ (A @ x0 - y) / np.linalg.norm(A @ x0 - y)
        x = mean + np.sqrt(beta_tilde(t, s)) * next(draws) - zeta * gradient
        if kind is MCG:
            x = (I - pinv @ A) @ x + pinv @ (np.sqrt(abar[s]) * y + np.sqrt(1 - abar[s]) * A @ next(draws))
    assert np.abs(result - x).max() < 1e-8


@pytest.mark.parametrize("sigma", [0.0, 0.4])
def test_reddiff_follows_its_formula(sigma: float) -> None:
    solver, y = REDdiff(steps=25, lr=0.1), measurement(sigma)
    fields = given_fields(solver.steps)
    result = vectors(solve(solver, sigma)(images(y), GivenNoise(fields)))[0]

    mu = np.linalg.pinv(A) @ y
    first, second = np.zeros(DIM), np.zeros(DIM)
    for i, (t, _) in enumerate(PRIOR.schedule.pairs(solver.steps), 1):
        z = fields[i - 1, 0]
        _, _, E, e = PRIOR.denoiser(t)
        noise = E @ (np.sqrt(abar[t]) * mu + np.sqrt(1 - abar[t]) * z) + e
        gradient = A.T @ (A @ mu - y) / DIM
        gradient = gradient + solver.lam * np.sqrt((1 - abar[t]) / abar[t]) * (noise - z) / DIM
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        mu = mu - 0.1 * (first / (1 - 0.9**i)) / (np.sqrt(second / (1 - 0.99**i)) + 1e-8)
    assert np.abs(result - mu).max() < 1e-8


def test_pnp_admm_follows_its_formula() -> None:
    gain = PRIOR.covariance @ np.linalg.inv(PRIOR.covariance + 0.04 * I)  # a linear denoiser for [0, 1]
    shift = 0.5 * (1 - gain @ np.ones(DIM))

    def denoise(x: Tensor) -> Tensor:
        return images(vectors(x) @ gain.T + shift)

    solver, y = PnPADMM(), measurement(0.4)
    result = vectors(solve(solver, 0.4, denoiser=denoise)(images(y), GivenNoise(np.zeros((0, 1, DIM)))))[0]

    unit = (y + A @ np.ones(DIM)) / 2
    x = A.T @ unit
    v, u = x, np.zeros(DIM)
    for _ in range(10):
        x = np.linalg.solve(A.T @ A + 0.05 * I, A.T @ unit + 0.05 * (v - u))
        v = gain @ (x + u) + shift
        u = u + x - v
    assert np.abs(result - (2 * x - 1)).max() < 1e-5  # conjugate gradients stop at 1e-6 of the right side


# ----------------------------------------------------------------------------------------------------------
# what must hold whatever the code looks like


def test_unconditional_ddim_converges_to_the_prior() -> None:
    prior = (PRIOR.mean, PRIOR.covariance)
    errors = []
    for steps in (10, 50, 250):
        moments = mean_and_covariance(solve(Unconditional(steps=steps, eta=0.0), 0.0), CLEAN)
        errors.append(wasserstein(moments, prior))
    print(f"unconditional DDIM, W₂ to the prior at 10, 50, 250 steps: {errors}")
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.03 * np.sqrt(np.trace(PRIOR.covariance))


class Oracle:
    """The exact data-consistency step, x̂0 → E[x0 | x_t, y]: with a Gaussian prior x_t can be had back from x̂0."""

    def __init__(self, y: Array, sigma: float) -> None:
        self.posterior = GaussianPrior(*PRIOR.posterior(A, y, sigma))

    def consistent(self, measured: Measured, x0: Tensor, t: int, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
        K, k, _, _ = PRIOR.denoiser(t)
        x = (vectors(x0) - k) @ np.linalg.inv(K).T
        R, r, _, _ = self.posterior.denoiser(t)
        return images(x @ R.T + r), measured[1]


@pytest.mark.parametrize("sigma", [0.1, 0.4])
def test_ddc_with_the_oracle_converges_to_the_posterior(sigma: float) -> None:
    y = measurement(sigma)
    exact = PRIOR.posterior(A, y, sigma)
    errors = []
    for steps in (10, 50, 250):
        moments = mean_and_covariance(solve(DDC(steps=steps), sigma, network=Oracle(y, sigma)), y)
        errors.append(wasserstein(moments, exact))
    print(f"DDC with the oracle, σ {sigma}, W₂ to the posterior at 10, 50, 250 steps: {errors}")
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.06 * np.sqrt(np.trace(exact[1]))


@pytest.mark.parametrize("sigma", [0.1, 0.4])
@pytest.mark.parametrize("eta", [0.0, 0.85, 1.0])
def test_ddnm_plus_equals_ddrm_where_it_is_measured(eta: float, sigma: float) -> None:
    # a prior that knows one picture says the same x̂0 whatever the start was, and the starts differ
    prior = GaussianPrior(PRIOR.mean, np.zeros((DIM, DIM)))
    fields, steps = given_fields(21), 20
    paths = []
    for solver in (DDNM(steps=steps, eta=eta), DDRM(steps=steps, eta=eta, eta_b=1.0)):
        prior.seen.clear()
        solver.solve(Run(images(measurement(sigma)), problem(sigma), prior, GivenNoise(fields)))
        paths.append(torch.cat(prior.seen[1:]))
    difference = OPERATOR.Vt(paths[0] - paths[1]) * (images(OPERATOR.s) > 0)
    print(f"DDNM+ − DDRM on measured coordinates, η {eta}, σ {sigma}: {difference.abs().max():.1e}")
    assert paths[0].shape == (steps - 1, *SHAPE)
    assert difference.abs().max() < 1e-10


def test_ddnm_without_noise_ends_on_the_measurement() -> None:
    y = images(CLEAN)
    x = DDNM().solve(Run(y, problem(0.0), PRIOR, GivenNoise(given_fields(101))))
    assert (OPERATOR(x) - y).abs().max() < 1e-12


def test_operators_without_an_svd_give_the_same_by_conjugate_gradients() -> None:
    y, noise = images(measurement(0.4)), given_fields(101)
    dense = Problem(DenseLinear(A), 0.2, "dense")
    for solver in (PiGDM(steps=10), DiffPIR(steps=10), DDS(steps=10)):
        direct = solver.solve(Run(y, problem(0.4), PRIOR, GivenNoise(noise)))
        iterated = solver.solve(Run(y, dense, PRIOR, GivenNoise(noise)))
        assert (direct - iterated).abs().max() < 1e-4, solver.name


def test_one_sigma_for_each_image() -> None:
    """A batch with another σ for each image, 0 among them, equals single runs."""
    sigmas = torch.tensor([0.0, 0.05, 0.2], dtype=torch.float64)
    ys = images(np.stack([measurement(2 * float(sigma)) for sigma in sigmas]))
    fields = np.random.default_rng(5).standard_normal((40, 3, DIM))
    for solver in (DDNM(steps=8), DDRM(steps=8), PiGDM(steps=8), DiffPIR(steps=8)):
        together = solver.solve(Run(ys, Problem(OPERATOR, sigmas), PRIOR, GivenNoise(fields)))
        for i, sigma in enumerate(sigmas):
            alone = solver.solve(
                Run(ys[i : i + 1], Problem(OPERATOR, float(sigma)), PRIOR, GivenNoise(fields[:, i : i + 1]))
            )
            assert (together[i] - alone[0]).abs().max() < 1e-10, (solver.name, float(sigma))


# ----------------------------------------------------------------------------------------------------------
# how far each one ends from the true posterior: a figure to report, since most do not converge to it

SAMPLED = {"dps": 2000, "mcg": 2000, "reddiff": 2000}  # not affine: from so many samples
WITHOUT_NETWORKS = [
    name
    for name, kind in SOLVERS.items()
    if not {"network", "posterior", "denoiser"} & {*kind.needs} and not kind.latent
]


@pytest.mark.parametrize("sigma", [0.1, 0.4])
@pytest.mark.parametrize("name", WITHOUT_NETWORKS)
def test_distance_to_the_posterior(name: str, sigma: float, record_property: Callable[..., None]) -> None:
    y = measurement(sigma)
    exact = PRIOR.posterior(A, y, sigma)
    scale = wasserstein((PRIOR.mean, PRIOR.covariance), exact)
    solver = SOLVERS[name]()
    if isinstance(solver, DPS | MCG):  # a unit step of the unsquared norm is small among 256² pixels, not among 12
        solver = replace(solver, zeta=(DIM / (3 * 256**2)) ** 0.5, steps=200)
    run = solve(solver, sigma, **parts_for(solver, sigma))
    if name in SAMPLED:
        noise = GivenNoise(np.random.default_rng(0).standard_normal((2 * solver.steps + 1, SAMPLED[name], DIM)))
        samples = vectors(run(images(np.tile(y, (SAMPLED[name], 1))), noise))
        moments = samples.mean(0), np.cov(samples.T)
    else:
        moments = mean_and_covariance(run, y)
    distance = wasserstein(moments, exact)
    record_property("W2 to the posterior", distance)
    print(f"W₂ to the posterior  {name:14} σ {sigma:.1f}  {distance:.3f}  (of the prior: {scale:.3f})")
    assert np.isfinite(distance)
    # with little noise every solver ends nearer to the posterior than the prior is; with much, those that
    # reckon with it
    if name in ("ddnm", "ddrm", "pigdm", "diffpir") or (sigma == 0.1 and name not in ("unconditional", "pinv")):
        assert distance < scale


class ExactPosterior:
    """E[x0 | x_t, y] for the Gaussian prior: what a posterior network learns."""

    def __init__(self, y: Array, sigma: float) -> None:
        self.mean, self.covariance = PRIOR.posterior(A, y, sigma)

    def __call__(self, measured: Any, x: Tensor, theta: Tensor, **_: Any) -> tuple[Tensor, None]:
        a, b = np.cos(float(theta[0])), np.sin(float(theta[0]))
        gain = a * self.covariance @ np.linalg.inv(a**2 * self.covariance + b**2 * I)
        return images(self.mean + (vectors(x) - a * self.mean) @ gain.T), None


@pytest.mark.parametrize("sigma", [0.1, 0.4])
def test_the_posterior_solver_converges_to_the_posterior(sigma: float) -> None:
    y = measurement(sigma)
    network, exact = ExactPosterior(y, sigma), PRIOR.posterior(A, y, sigma)
    scale = wasserstein((PRIOR.mean, PRIOR.covariance), exact)

    def distance(**settings: Any) -> float:
        solver = Posterior(realism=1.0, **settings)
        return wasserstein(mean_and_covariance(solve(solver, sigma, posterior=network), y), exact)

    usual, fine = distance(), distance(steps=160)
    assert fine < 0.003 * scale and fine < usual < 0.12 * scale
    assert distance(steps=160, eta=0.0) < 0.003 * scale  # the ODE
    mean, covariance = mean_and_covariance(solve(Posterior(realism=0.0), sigma, posterior=network), y)
    assert np.allclose(mean, exact[0]) and np.allclose(covariance, 0)
    spreads = [
        np.trace(mean_and_covariance(solve(Posterior(realism=r), sigma, posterior=network), y)[1])
        for r in (0, 0.3, 0.6, 1)
    ]
    assert spreads == sorted(spreads)
