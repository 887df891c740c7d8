"""Latent solvers with a linear autoencoder and a Gaussian prior of its latents, against numpy; and with real classes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gaussian_prior import DIM, Array, DenseSVD, images, random_orthogonal, vectors
from torch import Tensor

from ddc.noise import Noise
from ddc.operators import Bicubic, Denoise
from ddc.priors import Prediction, Schedule
from ddc.problems import Problem
from ddc.solvers.base import Run, Solver, Step
from ddc.solvers.latent import HGU, PSLD, Reconstruction, ReSample
from tiny import tiny_latent_prior

LATENT = 6
RNG = np.random.default_rng(11)
D, d = RNG.standard_normal((DIM, LATENT)) / 2, 0.1 * RNG.standard_normal(DIM)  # the decoder D z + d
E, e = RNG.standard_normal((LATENT, DIM)) / 3, 0.1 * RNG.standard_normal(LATENT)  # the encoder E x + e
_root = RNG.standard_normal((LATENT, LATENT)) / 2
MEAN, COVARIANCE = 0.3 * RNG.standard_normal(LATENT), _root @ _root.T + 0.05 * np.eye(LATENT)
OPERATOR = DenseSVD(
    random_orthogonal(RNG), np.array([1.0, 1, 0.9, 0.7, 0.7, 0.4, 0.2, 0, 0, 0, 0, 0]), random_orthogonal(RNG)
)
A = OPERATOR.matrix
Y = A @ (D @ (MEAN + _root @ RNG.standard_normal(LATENT)) + d)
SCHEDULE = Schedule.linear()
abar = SCHEDULE.alpha_bars.numpy()


def latents(z: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(z)).view(-1, LATENT, 1, 1)


def apply(matrix: Array, x: Tensor, shift: Array) -> Tensor:
    return x.flatten(1) @ torch.from_numpy(matrix).T + torch.from_numpy(shift)


def denoiser(t: int) -> tuple[Array, Array]:
    """K and k with ẑ0 = K z + k."""
    a = abar[t]
    K = np.sqrt(a) * COVARIANCE @ np.linalg.inv(a * COVARIANCE + (1 - a) * np.eye(LATENT))
    return K, MEAN - np.sqrt(a) * K @ MEAN


class LinearLatents:
    """A latent prior in which everything is linear: six numbers for a picture of 3×2×2."""

    schedule, channels, factor = SCHEDULE, LATENT, 2

    def predict(self, z: Tensor, t: int) -> Prediction:
        K, k = denoiser(t)
        z0 = apply(K, z, k).view_as(z)
        return Prediction(z0, (z - np.sqrt(abar[t]) * z0) / np.sqrt(1 - abar[t]))

    def encode(self, x: Tensor) -> Tensor:
        return apply(E, x, e).view(-1, LATENT, 1, 1)

    def decode(self, z: Tensor, size: Any = None) -> Tensor:
        return apply(D, z, d).view(-1, 3, 2, 2)


class GivenLatents(Noise):
    """Hands out the given fields, (draws, 6), one after the other."""

    def __init__(self, fields: Array) -> None:
        super().__init__([0], dtype=torch.float64)
        self.fields = fields

    def normal(self, shape: Any) -> Tensor:
        assert tuple(shape) == (1, LATENT, 1, 1)
        self.draws += 1
        return latents(self.fields[self.draws - 1])


def solve(solver: Solver, sigma: float, fields: Array) -> Array:
    problem = Problem(OPERATOR, sigma / 2, "dense")
    return vectors(solver.solve(Run(images(Y), problem, LinearLatents(), GivenLatents(fields))))[0]


def projection(sigma: float) -> tuple[Array, Array]:
    """P and p with P x + p nearest to x among what explains y, as far as its noise permits."""
    s, u, v = OPERATOR.s, OPERATOR.u, OPERATOR.v
    gain = np.where(s > 0, s / np.where(s > 0, s**2 + (sigma / 0.25) ** 2, 1), 0)
    inverse = v @ np.diag(gain) @ u.T
    return np.eye(DIM) - inverse @ A, inverse @ Y


def ddim(z: Array, z0: Array, t: int, s: int, fresh: Array | None = None, eta: float = 0.0) -> Array:
    tilde = (1 - abar[t] / abar[s]) * (1 - abar[s]) / (1 - abar[t])
    noise = (z - np.sqrt(abar[t]) * z0) / np.sqrt(1 - abar[t])
    c1 = eta * np.sqrt(tilde)
    step = np.sqrt(abar[s]) * z0 + np.sqrt(1 - abar[s] - c1**2) * noise
    return step if fresh is None else step + c1 * fresh


def unit(v: Array) -> Array:
    return v / np.linalg.norm(v)


@pytest.mark.parametrize("sigma", [0.0, 0.4])
@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_psld_follows_its_formula(sigma: float, eta: float) -> None:
    solver = PSLD(steps=20, omega=0.3, gamma=0.2, eta=eta)
    fields = RNG.standard_normal((21, LATENT))
    result = solve(solver, sigma, fields)

    P, p = projection(sigma)
    draws = iter(fields)
    z = next(draws)
    for t, s in SCHEDULE.pairs(solver.steps):
        K, k = denoiser(t)
        z0 = K @ z + k
        x0 = D @ z0 + d
        apart = unit(z0 - (E @ (P @ x0 + p) + e))  # the gradient of the gluing norm
        by_measurement = D.T @ A.T @ unit(A @ x0 - Y)
        by_gluing = (np.eye(LATENT) - E @ P @ D).T @ apart
        z = ddim(z, z0, t, s, next(draws), eta) - K.T @ (0.3 * by_measurement + 0.2 * by_gluing)
    assert np.abs(result - (D @ z + d)).max() < 1e-8


def adam_fit(z: Array, iterations: int, lr: float, limit: float) -> Array:
    m, v = np.zeros(LATENT), np.zeros(LATENT)
    for i in range(1, iterations + 1):
        residual = A @ (D @ z + d) - Y
        if np.mean(residual**2) <= limit**2:
            return z
        gradient = D.T @ A.T @ residual
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        z = z - lr * (m / (1 - 0.9**i)) / (np.sqrt(v / (1 - 0.999**i)) + 1e-8)
    return z


@pytest.mark.parametrize("sigma", [0.0, 0.4])
def test_resample_follows_its_formula(sigma: float) -> None:
    solver = ReSample(steps=24, zeta=0.3, every=3, lookahead=2, gamma=7.0, iterations=30, lr=0.01)
    fields = RNG.standard_normal((30, LATENT))
    result = solve(solver, sigma, fields)

    (P, p), pairs, limit = projection(sigma), SCHEDULE.pairs(24), max(sigma, 0.001)
    draws: Iterator[Array] = iter(fields)
    z, kinds = next(draws), list[str]()
    for i, (t, s) in enumerate(pairs):
        K, k = denoiser(t)
        z0 = K @ z + k
        gradient = K.T @ D.T @ A.T @ unit(A @ (D @ z0 + d) - Y)
        z = ddim(z, z0, t, s) - 0.3 * abar[t] * gradient
        left = 23 - i
        if left == 0 or left % 3 or left > 16:  # no fit in the first third, nor after the last step
            continue
        ahead = z
        for t2, s2 in pairs[i + 1 : i + 3]:
            K, k = denoiser(t2)
            z0 = K @ ahead + k
            ahead = ddim(ahead, z0, t2, s2)
        if left >= 8:
            z0 = E @ (P @ (D @ z0 + d) + p) + e
        else:
            z0 = adam_fit(z0, 30, 0.01, limit)
        kinds.append("pixels" if left >= 8 else "latents")
        variance = 7.0 * (1 - abar[t] / abar[s]) * (1 - abar[s]) / (1 - abar[t])
        level = 1 - abar[s]
        mean = (variance * np.sqrt(abar[s]) * z0 + level * z) / (variance + level)
        z = mean + np.sqrt(variance * level / (variance + level)) * next(draws)
    assert kinds == ["pixels"] * 3 + ["latents"] * 2
    assert np.abs(result - (D @ adam_fit(z, 30, 0.01, limit) + d)).max() < 1e-8


def test_resample_ends_where_nothing_more_of_the_measurement_can_be_explained() -> None:
    """Whatever the prior says, the last fit is the least-squares solution in the decoder's range."""
    fields = RNG.standard_normal((10, LATENT))
    x = solve(ReSample(steps=8, iterations=4000, lr=0.01, tolerance=0.0), 0.0, fields)
    best = np.linalg.lstsq(A @ D, Y - A @ d, rcond=None)[0]
    assert np.abs(x - (D @ best + d)).max() < 1e-6


@pytest.mark.parametrize("order", [1, 2])
def test_hgu_follows_its_formula(order: int) -> None:
    solver = HGU(steps=20, zeta=0.05, order=order)
    fields = RNG.standard_normal((21, LATENT))
    result = solve(solver, 0.4, fields)

    draws = iter(fields)
    z, m, v = next(draws), np.zeros(LATENT), np.zeros(LATENT)
    for i, (t, s) in enumerate(SCHEDULE.pairs(20)):
        K, k = denoiser(t)
        z0 = K @ z + k
        residual = A @ (D @ z0 + d) - Y
        g = K.T @ D.T @ A.T @ (np.sign(residual) if order == 1 else unit(residual))
        beta = 1 - abar[t] / abar[s]
        mean = np.sqrt(abar[s]) * beta / (1 - abar[t]) * z0
        mean = mean + np.sqrt(1 - beta) * (1 - abar[s]) / (1 - abar[t]) * z
        z = mean + np.sqrt(beta * (1 - abar[s]) / (1 - abar[t])) * next(draws)
        if i > 0:  # the first gradient is not used, as in the released code
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        z = z - 0.05 * (m / 0.1) / (np.sqrt(v / 0.001) + 1e-8)
    assert np.abs(result - (D @ z + d)).max() < 1e-8


def test_the_autoencoder_alone() -> None:
    x = solve(Reconstruction(), 0.0, np.zeros((0, LATENT)))
    assert np.abs(x - (D @ (E @ np.linalg.pinv(A) @ Y + e) + d)).max() < 1e-8
    prior = tiny_latent_prior()
    picture = torch.rand(1, 3, 24, 40, generator=torch.Generator().manual_seed(0)) * 2 - 1
    run = Run(picture, Problem(Denoise(), 0.0), prior, Noise([0]))
    assert torch.allclose(Reconstruction().solve(run), prior.decode(prior.encode(picture)), atol=1e-6)


# ---------------------------------------------------------------------------------------------------------
# with networks of diffusers' classes


def make_run(size: tuple[int, int], seeds: list[int], corners: Any = ((0, 0),), show: Any = None) -> Run:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(1, 3, *size, generator=generator).expand(len(seeds), -1, -1, -1) * 2 - 1
    problem = Problem(Bicubic(2), 0.02)
    return Run(problem.measure(x), problem, tiny_latent_prior(), seeds, show, corners=corners)


SOLVERS: list[Callable[[], Solver]] = [
    lambda: PSLD(steps=3),
    lambda: ReSample(steps=6, every=2, iterations=3),
    lambda: HGU(steps=3),
]


@pytest.mark.parametrize("make", SOLVERS)
@pytest.mark.parametrize("size", [(16, 16), (30, 46), (8, 50), (72, 24)])
def test_sizes_that_are_no_multiples(make: Callable[[], Solver], size: tuple[int, int]) -> None:
    seen = list[Step]()
    x = make().solve(make_run(size, [5], show=seen.append))
    assert x.shape == (1, 3, *size) and bool(x.isfinite().all())
    assert all(step.x0.shape == x.shape for step in seen) and len(seen) == make().steps


def test_tiles_share_the_noise_of_their_latents() -> None:
    whole, tile = make_run((64, 64), [7]), make_run((32, 32), [7], [(16, 24)])
    assert whole.shape == (1, 4, 8, 8) and tile.shape == (1, 4, 4, 4)
    assert torch.equal(whole.normal()[..., 2:6, 3:7], tile.normal())


def test_a_fit_ends_for_each_picture_by_itself() -> None:
    """One picture starts where its measurement is explained, and stays; the other moves as it does alone."""
    prior, solver = tiny_latent_prior(), ReSample(iterations=5)
    z = Noise([1, 2]).normal((2, 4, 4, 4))
    problem = Problem(Denoise(), 0.0)
    y = torch.cat([prior.decode(z[:1]), torch.zeros(1, 3, 32, 32)])
    both = solver.fitted(Run(y, problem, prior, [1, 2]), z)
    alone = solver.fitted(Run(y[1:], problem, prior, [2]), z[1:])
    assert torch.equal(both[0], z[0]) and torch.allclose(both[1], alone[0], atol=1e-6)
    before, after = ((prior.decode(one) - y).square().mean((1, 2, 3)) for one in (z, both))
    assert after[1] < before[1]
