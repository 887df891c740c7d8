"""Solvers that differentiate through the prior, and the derivatives that others share. No graph outlives its step.

DPS, "Diffusion Posterior Sampling" (Chung et al. 2023, arXiv 2209.14687), Algorithm 1; MCG, "Manifold Constrained
Gradient" (Chung et al. 2022, arXiv 2206.00941); ΠGDM, "Pseudoinverse-Guided Diffusion Models" (Song et al. 2023, ICLR).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ddc.networks import CompactUNet
from ddc.operators.base import LinearOperator, Operator, Sigma
from ddc.operators.blur import GaussianBlur
from ddc.priors import Denoiser, Prediction
from ddc.solvers.base import Run, Solver


@dataclass(frozen=True)
class GradientSolver(Solver):
    """A solver that differentiates through the prior."""

    operators = Operator

    steps: int = 1000
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    def prepare(self, run: Run) -> None:
        """Have the prior's network keep its activations for the backward pass, or recompute them there."""
        if isinstance(run.prior, nn.Module):
            set_checkpointing(run.prior, self.checkpointing)


def set_checkpointing(network: nn.Module, on: bool) -> None:
    """Whether the U-Nets in `network` keep only the inputs of each block, and compute its inside again going back."""
    for module in network.modules():
        if isinstance(module, CompactUNet):
            module.checkpointing = on
        elif hasattr(module, "enable_gradient_checkpointing"):  # diffusers'
            (module.enable_gradient_checkpointing if on else module.disable_gradient_checkpointing)()  # type: ignore[operator]


def predict_with_vjp(
    prior: Denoiser, x: Tensor, t: int, clip: bool = False
) -> tuple[Prediction, Callable[[Tensor], Tensor]]:
    """The prior's prediction, and v ↦ (∂x̂0/∂x_t)ᵀ v, to be called once."""
    # the clone is an ordinary tensor even where the caller runs in inference mode
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        prediction = prior.predict(x, t)
        x0 = prediction.x0.clamp(-1, 1) if clip else prediction.x0
    v = None if prediction.v is None else prediction.v.detach()
    known = Prediction(x0.detach(), prediction.noise.detach(), v)

    def vjp(cotangent: Tensor) -> Tensor:
        # a gradient of length 1 has small entries, which float16 would flush to zero: scale them up to 1 and back
        size = cotangent.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-30)
        return torch.autograd.grad(x0, x, cotangent / size)[0] * size

    return known, vjp


def residual_and_gradient(operator: Operator, x0: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The residual A(x0) − y, and the gradient of ½‖A(x0) − y‖²: Aᵀ(A x0 − y).

    An operator that is not linear is differentiated by autograd (JPEG passes the gradient straight through
    its rounding).
    """
    if isinstance(operator, LinearOperator):
        residual = operator(x0) - y
        return residual, operator.adjoint(residual, (x0.shape[-2], x0.shape[-1]))
    with torch.inference_mode(False), torch.enable_grad():
        x0 = x0.clone().requires_grad_()
        residual = operator(x0) - y.clone()
        (gradient,) = torch.autograd.grad(0.5 * residual.square().sum(), x0)
    return residual.detach(), gradient


def norm(residual: Tensor) -> Tensor:
    """‖·‖₂ of each image, (B, 1, 1, 1); never 0, so that it can divide."""
    return torch.linalg.vector_norm(residual.flatten(1), dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)


@dataclass(frozen=True)
class DPS(GradientSolver):
    """Diffusion posterior sampling: any differentiable operator, a thousand steps with a gradient in each."""

    name = "dps"
    paper: ClassVar[dict[str, dict[type, float]]] = {"zeta": {GaussianBlur: 0.4, Operator: 1.0}}

    zeta: float | None = None
    """Step size ζ; None is the paper's: 0.4 for Gaussian blur, 1.0 otherwise."""
    clip: bool = True
    """Clip x̂0 to [-1, 1] in each step, as the released code does."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        self.prepare(run)
        zeta = self.setting("zeta", run.problem)
        x = run.normal()  # x_T ~ N(0, I)
        for t, s in run.steps(run.prior.schedule.pairs(self.steps)):
            x, prediction = dps_step(run, x, t, s, zeta, self.clip)
            run.show(prediction.x0, prediction.noise)
        return x


def dps_step(run: Run, x: Tensor, t: int, s: int, zeta: float, clip: bool = False) -> tuple[Tensor, Prediction]:
    """Lines 3 to 7 of Algorithm 1: x_t → x_s, and the prediction it used."""
    prediction, vjp = predict_with_vjp(run.prior, x, t, clip)
    x_s = run.prior.schedule.posterior(x, prediction.x0, t, s, run.normal(), prediction.v)  # line 6
    residual, gradient = residual_and_gradient(run.A, prediction.x0, run.y)
    return x_s - zeta * vjp(gradient / norm(residual)), prediction  # line 7: ζ ∇_{x_t} ‖y − A(x̂0)‖


@dataclass(frozen=True)
class MCG(GradientSolver):
    """Manifold-constrained gradient: DPS and a projection, for linear operators."""

    name = "mcg"
    operators = LinearOperator

    zeta: float = 1.0
    """Step size ζ of the gradient."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        self.prepare(run)
        A, schedule = run.A, run.prior.schedule
        x = run.normal()  # x_T ~ N(0, I)
        for t, s in run.steps(schedule.pairs(self.steps)):
            x, prediction = dps_step(run, x, t, s, self.zeta)
            # x_s = (I − A†A) x' + A†(√ā_s y + √(1−ā_s) A z)
            y_s = schedule.signal(s, x) * run.y + schedule.level(s, x) * A(run.normal())
            x = x + A.pinv(y_s - A(x), run.size)
            run.show(prediction.x0, prediction.noise)
        return x


@dataclass(frozen=True)
class PiGDM(GradientSolver):
    """Pseudo-inverse guidance: linear operators and JPEG, with a gradient in each step."""

    name = "pigdm"

    steps: int = 100
    eta: float = 1.0
    """DDIM's η."""
    noise_blind: bool = False
    """Leave the noise of y out of the guidance, as the released code does."""
    score_factor: bool = False
    """Weigh the guidance by √ā_s/√ā_t − c2/√(1−ā_t), which follows from the score, instead of √(ā_t ā_s)."""
    start_at_pinv: bool = True
    """Start at A†y with the noise of the first step, as the released code does, instead of at noise alone."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        self.prepare(run)
        schedule = run.prior.schedule
        pairs = schedule.pairs(self.steps)
        x = run.normal()  # x_T ~ N(0, I)
        if self.start_at_pinv:
            x = schedule.add_noise(run.pseudo_inverse(), pairs[0][0], x)
        for t, s in run.steps(pairs):
            prediction, vjp = predict_with_vjp(run.prior, x, t)
            x0, signal, level = prediction.x0, schedule.signal(t, x), schedule.level(t, x)
            ratio = 0.0 if self.noise_blind else (run.sigma / level) ** 2  # σ²/r_t², r_t² = 1 − ā_t
            guide = vjp(self.direction(run, x0, ratio))  # g
            z = run.normal()
            if self.score_factor:  # DDIM with the conditional score, and the x̂0 that goes with it
                x = schedule.ddim(x0 + guide / signal, prediction.noise - guide / level, t, s, z, self.eta)
            else:
                x = schedule.ddim(x0, prediction.noise, t, s, z, self.eta)
                x = x + signal * schedule.signal(s, x) * guide  # √(ā_t ā_s) g
            run.show(x0, prediction.noise)
        return x

    @staticmethod
    def direction(run: Run, x0: Tensor, ratio: Sigma) -> Tensor:
        """Aᵀ(AAᵀ + σ²/r² I)⁻¹(y − A x̂0); for JPEG y − JPEG(x̂0), which is not differentiated."""
        A = run.A
        if isinstance(A, LinearOperator):
            return A.regularised_inverse(run.y - A(x0), ratio, run.size)
        return A.to_image(run.y, run.size) - A.to_image(A(x0), run.size)
