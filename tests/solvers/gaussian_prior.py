"""A test bed where everything is known: a Gaussian prior, dense operators, and noise that is given.

Pictures are 3×2×2, twelve numbers, in float64. With a Gaussian prior the exact x̂0 and ε̂ are affine in x_t, so
a solver without optimisation is an affine map of its noise: feeding it each unit vector gives its mean and
covariance exactly.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators.base import LinearOperator, Size, SVDOperator
from ddc.priors import Prediction, Schedule, Time

SHAPE = (3, 2, 2)
DIM = 12
Array = np.ndarray


def images(vectors: Array) -> Tensor:
    """(B, 12) → (B, 3, 2, 2)."""
    return torch.from_numpy(np.ascontiguousarray(vectors)).view(-1, *SHAPE)


def vectors(x: Tensor) -> Array:
    return x.detach().reshape(-1, DIM).numpy()


def apply(matrix: Array, x: Tensor) -> Tensor:
    return (x.reshape(-1, DIM) @ torch.from_numpy(matrix).T).view(-1, *SHAPE)


def random_orthogonal(rng: np.random.Generator) -> Array:
    q, r = np.linalg.qr(rng.standard_normal((DIM, DIM)))
    return q * np.sign(np.diag(r))


class GaussianPrior:
    """The exact denoiser of N(m, C): E[x0 | x_t] = m + √ā C (āC + (1−ā)I)⁻¹ (x_t − √ā m)."""

    def __init__(self, mean: Array, covariance: Array, schedule: Schedule | None = None) -> None:
        self.mean, self.covariance = mean, covariance
        self.schedule = schedule or Schedule.linear()
        self.alpha_bars = self.schedule.alpha_bars.numpy()
        self.seen: list[Tensor] = []

    def denoiser(self, t: int) -> tuple[Array, Array, Array, Array]:
        """K, k, E, e with x̂0 = K x + k and ε̂ = E x + e."""
        a = self.alpha_bars[t]
        K = np.sqrt(a) * self.covariance @ np.linalg.inv(a * self.covariance + (1 - a) * np.eye(DIM))
        k = self.mean - np.sqrt(a) * K @ self.mean
        E = (np.eye(DIM) - np.sqrt(a) * K) / np.sqrt(1 - a)
        return K, k, E, -np.sqrt(a) * k / np.sqrt(1 - a)

    def predict(self, x: Tensor, t: Time) -> Prediction:
        assert isinstance(t, int)
        self.seen.append(x.detach().clone())
        K, k, E, e = self.denoiser(t)
        return Prediction(apply(K, x) + images(k), apply(E, x) + images(e))

    def posterior(self, A: Array, y: Array, sigma: float) -> tuple[Array, Array]:
        """The mean and covariance of x0 given y = A x0 + σ e."""
        gain = self.covariance @ A.T @ np.linalg.pinv(A @ self.covariance @ A.T + sigma**2 * np.eye(DIM))
        return self.mean + gain @ (y - A @ self.mean), self.covariance - gain @ A @ self.covariance


class DenseLinear(LinearOperator):
    """y = A x for any 12×12 matrix; its inverses are conjugate gradients."""

    def __init__(self, matrix: Array) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return apply(self.matrix, x)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return apply(self.matrix.T, y)


class DenseSVD(SVDOperator):
    """y = U diag(s) Vᵀ x for given orthogonal U and V."""

    def __init__(self, u: Array, s: Array, v: Array) -> None:
        super().__init__()
        self.u, self.s, self.v = u, s, v
        self.matrix = u @ np.diag(s) @ v.T

    def singular_values(self, size: Size, like: Tensor) -> Tensor:
        return images(self.s)

    def Vt(self, x: Tensor) -> Tensor:
        return apply(self.v.T, x)

    def V(self, c: Tensor) -> Tensor:
        return apply(self.v, c)

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return apply(self.u.T, y) * (images(self.s) > 0)

    def U(self, c: Tensor) -> Tensor:
        return apply(self.u, c)


class GivenNoise(Noise):
    """Hands out the given fields, (draws, B, 12), one after the other; zeros after the last."""

    def __init__(self, fields: Array) -> None:
        super().__init__(range(fields.shape[1]), dtype=torch.float64)
        self.fields = fields

    def normal(self, shape: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        draw, self.draws = self.draws, self.draws + 1
        return images(self.fields[draw]) if draw < len(self.fields) else torch.zeros(shape, dtype=torch.float64)


AffineMap = Callable[[Tensor, Noise], Tensor]  # y (B, 3, 2, 2) and noise → x


def mean_and_covariance(run: AffineMap, y: Array) -> tuple[Array, Array]:
    """Those of an affine solver's output, from its answer to no noise and to each unit vector of noise."""
    dry = GivenNoise(np.zeros((0, 1, DIM)))
    run(images(y), dry)
    batch = dry.draws * DIM + 1
    fields = np.zeros((dry.draws * DIM, batch))
    fields[np.arange(batch - 1), np.arange(1, batch)] = 1.0  # image 0 has no noise, image i the i-th number
    fields = fields.reshape(dry.draws, DIM, batch).transpose(0, 2, 1)
    out = vectors(run(images(np.tile(y, (batch, 1))), GivenNoise(fields)))
    spread = out[1:] - out[0]
    return out[0], spread.T @ spread


def square_root(matrix: Array) -> Array:
    values, basis = np.linalg.eigh((matrix + matrix.T) / 2)
    return basis @ np.diag(np.sqrt(values.clip(min=0))) @ basis.T


def wasserstein(p: tuple[Array, Array], q: tuple[Array, Array]) -> float:
    """The 2-Wasserstein distance of two Gaussians."""
    root = square_root(q[1])
    cross = np.trace(p[1] + q[1] - 2 * square_root(root @ p[1] @ root))
    return float(np.sqrt(max(np.sum((p[0] - q[0]) ** 2) + cross, 0.0)))
