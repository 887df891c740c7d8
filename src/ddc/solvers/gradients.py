"""Derivatives that several solvers share. No graph outlives the step that made it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddc.networks import set_checkpointing
from ddc.operators.base import LinearOperator, Operator
from ddc.priors import Denoiser, Prediction
from ddc.solvers.base import Run, Solver


@dataclass(frozen=True)
class GradientSolver(Solver):
    """A solver that differentiates through the prior."""

    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    def prepare(self, run: Run) -> None:
        """Have the prior's network keep its activations for the backward pass, or recompute them there."""
        if isinstance(run.prior, nn.Module):
            set_checkpointing(run.prior, self.checkpointing)


def predict_with_vjp(prior: Denoiser, x: Tensor, t: int) -> tuple[Prediction, Callable[[Tensor], Tensor]]:
    """The prior's prediction, and v ↦ (∂x̂0/∂x_t)ᵀ v, to be called once."""
    # the clone is an ordinary tensor even where the caller runs in inference mode
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        prediction = prior.predict(x, t)
    v = None if prediction.v is None else prediction.v.detach()
    known = Prediction(prediction.x0.detach(), prediction.noise.detach(), v)

    def vjp(cotangent: Tensor) -> Tensor:
        # a gradient of length 1 has small entries, which float16 would flush to zero: scale them up to 1 and back
        size = cotangent.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-30)
        return torch.autograd.grad(prediction.x0, x, cotangent / size)[0] * size

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
