"""Solvers on a latent prior, whose pictures are D(z) for an autoencoder with the encoder E and the decoder D.

PSLD, "Solving Linear Inverse Problems Provably via Posterior Sampling with Latent Diffusion Models" (Rout et al. 2023, arXiv
2307.00619), Algorithm 2; ReSample, "Solving Inverse Problems with Latent Diffusion Models via Hard Data Consistency" (Song et al.
2024, arXiv 2307.08123), Algorithm 1; HGU, "History Gradient Update" (He et al. 2023, arXiv 2307.12070). Settings are those of the
released code. HGU's is in its first author's later repository (fpsandnoob/vss), whose form of Adam is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.operators.base import LinearOperator, Operator
from ddc.operators.superres import Bicubic
from ddc.priors import Prediction
from ddc.solvers.base import OneStep, Run
from ddc.solvers.gradients import GradientSolver, norm, residual_and_gradient
from ddc.solvers.reddiff import count_measured


@dataclass(frozen=True)
class LatentSolver(GradientSolver):
    """A solver that differentiates through the decoder of a latent prior."""

    latent = True


class Decoded:
    """The prior's prediction for z_t, its picture D(ẑ0), and derivatives with respect to z_t."""

    def __init__(self, run: Run, z: Tensor, t: int) -> None:
        # the clone is an ordinary tensor even where the caller runs in inference mode
        with torch.inference_mode(False), torch.enable_grad():
            self._z = z.clone().requires_grad_()
            prediction = run.prior.predict(self._z, t)
            picture = run.prior.decode(prediction.x0, run.size)
        self._outputs = (picture, prediction.x0)
        v = None if prediction.v is None else prediction.v.detach()
        self.known = Prediction(prediction.x0.detach(), prediction.noise.detach(), v)
        self.picture: Tensor = picture.detach()

    def vjp(self, of_picture: Tensor, of_latent: Tensor | None = None) -> Tensor:
        """(∂D(ẑ0)/∂z_t)ᵀ of_picture + (∂ẑ0/∂z_t)ᵀ of_latent, to be called once."""
        of_latent = torch.zeros_like(self.known.x0) if of_latent is None else of_latent
        return torch.autograd.grad(self._outputs, self._z, (of_picture, of_latent))[0]


def encode_with_vjp(run: Run, x: Tensor, cotangent: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """E(x), and (∂E/∂x)ᵀ cotangent(E(x))."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        z = run.prior.encode(x)
        (gradient,) = torch.autograd.grad(z, x, cotangent(z.detach()))
    return z.detach(), gradient


@dataclass(frozen=True)
class PSLD(LatentSolver):
    """Posterior sampling with a latent prior: DPS and a step that glues the measurement to D(ẑ0)."""

    name = "psld"
    operators = LinearOperator
    paper: ClassVar[dict[str, dict[type, float]]] = {"omega": {Bicubic: 0.9, Operator: 0.1}}

    omega: float | None = None
    """Step size ω of the measurement's gradient; None is the released 0.9 for super-resolution and 0.1 otherwise."""
    gamma: float = 0.1
    """Step size γ of the gluing gradient."""
    eta: float = 0.0
    """DDIM's η."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        self.prepare(run)
        schedule, omega = run.prior.schedule, self.setting("omega", run.problem)
        z = run.normal()  # z_T ~ N(0, I)
        for t, s in run.steps(schedule.pairs(self.steps)):
            at = Decoded(run, z, t)
            z = schedule.ddim(at.known.x0, at.known.noise, t, s, run.normal(), self.eta)
            residual, gradient = residual_and_gradient(run.A, at.picture, run.y)
            apart, glue = gluing_step(run, at)
            # z_s ← z_s − ∇(ω ‖y − A D(ẑ0)‖ + γ ‖ẑ0 − E(A†y + (I − A†A) D(ẑ0))‖)
            z = z - at.vjp(omega * gradient / norm(residual) + self.gamma * glue, self.gamma * apart)
            run.show(at.picture, at.known.noise)
        return run.prior.decode(z, run.size)


def gluing_step(run: Run, at: Decoded) -> tuple[Tensor, Tensor]:
    """The derivatives of ‖ẑ0 − E(A†y + (I − A†A) D(ẑ0))‖ by ẑ0 alone, and by D(ẑ0).

    Where y has noise, A† is regularised by it.
    """
    glued = run.A.project(at.picture, run.y, run.sigma)

    def direction(z: Tensor) -> Tensor:
        return (z - at.known.x0) / norm(z - at.known.x0)

    encoded, gradient = encode_with_vjp(run, glued, direction)
    # I − A†A is symmetric: its adjoint is the projection on a measurement of 0
    return -direction(encoded), run.A.project(gradient, torch.zeros_like(run.y), run.sigma)


@dataclass(frozen=True)
class ReSample(LatentSolver):
    """Hard data consistency: now and then ẑ0 is fitted to the measurement, and noised again."""

    name = "resample"

    steps: int = 500
    zeta: float = 0.5
    """Step size ζ of DPS's gradient in each step; it is multiplied with ā_t."""
    every: int = 10
    """Steps from one fit to the next, after the first third of the run."""
    lookahead: int = 5
    """Further steps of DDIM from which ẑ0 is taken for a fit."""
    gamma: float = 40.0
    """γ of the variance of resampling, γ β̃_t."""
    iterations: int = 500
    """Largest number of Adam's iterations in each fit of latents, in the last third of the run and at its end."""
    lr: float = 0.005
    """Adam's learning rate."""
    tolerance: float = 0.001
    """A fit ends where the root mean square of y − A D(z) is at most this, or the noise of y."""

    def fits(self) -> range:
        """The steps after which ẑ0 is fitted, counted from the end of the run."""
        return range(self.every, self.steps - self.steps // 3 + 1, self.every)

    def evaluations(self) -> int:
        """Of the prior's network; fits take the decoder alone."""
        return self.steps + sum(min(self.lookahead, left) for left in self.fits())

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        self.prepare(run)
        schedule = run.prior.schedule
        pairs = schedule.pairs(self.steps)
        z = run.normal()  # z_T ~ N(0, I)
        for i, (t, s) in enumerate(run.steps(pairs)):
            at = Decoded(run, z, t)
            residual, gradient = residual_and_gradient(run.A, at.picture, run.y)
            weight = self.zeta * schedule.alpha_bar(t, z)
            z = schedule.ddim(at.known.x0, at.known.noise, t, s, z, 0.0) - weight * at.vjp(gradient / norm(residual))
            left = self.steps - 1 - i
            if left in self.fits():
                z0 = self.ahead(run, z, at.known.x0, pairs[i + 1 : i + 1 + self.lookahead])
                if left >= self.steps // 3:  # in pixels: argmin ‖y − A x‖ nearest to D(ẑ0)
                    z0 = run.prior.encode(run.A.project(run.prior.decode(z0, run.size), run.y, run.sigma))
                else:  # in latents: argmin ‖y − A D(z)‖ from ẑ0
                    z0 = self.fitted(run, z0)
                z = self.resample_step(run, z0, z, t, s)
            run.show(at.picture, at.known.noise)
        return run.prior.decode(self.fitted(run, z), run.size)

    def resample_step(self, run: Run, z0: Tensor, z: Tensor, t: int, s: int) -> Tensor:
        """A sample of q(z_s | ẑ0(y), z'_s): N((σ²√ā_s ẑ0(y) + (1−ā_s) z'_s)/(σ² + 1−ā_s), σ²(1−ā_s)/(σ² + 1−ā_s))."""
        schedule = run.prior.schedule
        variance = self.gamma * schedule.posterior_std(z, t, s) ** 2  # σ² = γ β̃
        level = schedule.level(s, z) ** 2
        mean = (variance * schedule.signal(s, z) * z0 + level * z) / (variance + level)
        return mean + (variance * level / (variance + level)).sqrt() * run.normal()

    def ahead(self, run: Run, z: Tensor, z0: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
        """ẑ0 after a few more steps of DDIM."""
        for t, s in pairs:
            prediction = run.prior.predict(z, t)
            z0, z = prediction.x0, run.prior.schedule.ddim(prediction.x0, prediction.noise, t, s, z, 0.0)
        return z0

    def fitted(self, run: Run, z: Tensor) -> Tensor:
        """argmin ‖y − A(D(z))‖² by Adam from z. Each picture stops when what remains is noise."""
        limit = torch.as_tensor(run.sigma, device=z.device, dtype=z.dtype).clamp(min=self.tolerance) ** 2
        m = v = torch.zeros_like(z)
        values = count_measured(run.y, run.problem)
        for k in range(1, self.iterations + 1):
            with torch.inference_mode(False), torch.enable_grad():
                at = z.clone().requires_grad_()
                picture = run.prior.decode(at, run.size)
            residual, gradient = residual_and_gradient(run.A, picture.detach(), run.y)
            (gradient,) = torch.autograd.grad(picture, at, gradient)
            going = residual.square().sum((1, 2, 3), keepdim=True) > limit * values
            if k % 10 == 0 and not bool(going.any()):  # asked now and then, because a GPU waits for the answer
                break
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            change = self.lr * (m / (1 - 0.9**k)) / ((v / (1 - 0.999**k)).sqrt() + 1e-8)
            z = torch.where(going, z - change, z)
        return z


@dataclass(frozen=True)
class HGU(LatentSolver):
    """History gradient update: DPS through the decoder, with Adam's moments of the gradients."""

    name = "hgu"

    zeta: float = 0.01
    """Step size ζ: the released value for photographs."""
    order: int = 1
    """p of the norm ‖y − A D(ẑ0)‖_p: 1, as in most of the released settings, or 2."""
    eta1: float = 0.9
    """η₁, the share of earlier gradients in their mean."""
    eta2: float = 0.999
    """η₂, the share of earlier gradients in their mean square."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        self.prepare(run)
        schedule, m, v = run.prior.schedule, None, None
        z = run.normal()  # z_T ~ N(0, I)
        for t, s in run.steps(schedule.pairs(self.steps)):
            at = Decoded(run, z, t)
            z = schedule.posterior(z, at.known.x0, t, s, run.normal(), at.known.v)
            g = at.vjp(self.direction(run, at.picture))  # ∇ ‖y − A D(ẑ0)‖_p by z_t
            if m is None or v is None:
                m = v = torch.zeros_like(g)
            else:
                m, v = self.eta1 * m + (1 - self.eta1) * g, self.eta2 * v + (1 - self.eta2) * g**2
            z = z - self.zeta * (m / (1 - self.eta1)) / ((v / (1 - self.eta2)).sqrt() + 1e-8)
            run.show(at.picture, at.known.noise)
        return run.prior.decode(z, run.size)

    def direction(self, run: Run, x: Tensor) -> Tensor:
        """The gradient of ‖y − A(x)‖_p."""
        residual, gradient = residual_and_gradient(run.A, x, run.y)
        if self.order == 2:
            return gradient / norm(residual)
        # for a target that is 1 or −1 away from A(x), the gradient of half the square is that of the sum of magnitudes
        return residual_and_gradient(run.A, x, run.A(x) - residual.sign())[1]


@dataclass(frozen=True)
class Reconstruction(OneStep):
    """The autoencoder alone, D(E(A†y)): what latent solvers start from, and for an exact picture their ceiling."""

    name = "autoencoder"
    operators = Operator
    latent = True

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        x: Tensor = run.prior.decode(run.prior.encode(run.pseudo_inverse()), run.size)
        for _ in run.steps([(0, -1)]):
            run.show(x)
        return x

    def evaluations(self) -> int:
        return 0
