"""DPS, "Diffusion Posterior Sampling" (Chung et al. 2023, arXiv 2209.14687), Algorithm 1.

The posterior step, then a step down the gradient of the norm ‖y − A(x̂0)‖, not squared, as in its released code:
the paper's ζ_t = ζ/‖y − A(x̂0)‖.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.operators.base import Operator
from ddc.operators.blur import GaussianBlur
from ddc.priors import Prediction
from ddc.solvers.base import Run
from ddc.solvers.gradients import GradientSolver, norm, predict_with_vjp, residual_and_gradient


@dataclass(frozen=True)
class DPS(GradientSolver):
    """Diffusion posterior sampling: any differentiable operator, a thousand steps with a gradient in each."""

    name: ClassVar[str] = "dps"
    operators: ClassVar[type] = Operator
    paper: ClassVar[dict[str, dict[type, float]]] = {"zeta": {GaussianBlur: 0.4, Operator: 1.0}}

    steps: int = 1000
    """Sampling steps."""
    zeta: float | None = None
    """Step size ζ; None is the paper's: 0.4 for Gaussian blur, 1.0 otherwise."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        self.prepare(run)
        zeta = self.setting("zeta", run.problem)
        x = run.normal()  # x_T ~ N(0, I)
        for t, s in run.steps(run.prior.schedule.pairs(self.steps)):
            x, prediction = dps_step(run, x, t, s, zeta)
            run.show(prediction.x0, prediction.noise)
        return x


def dps_step(run: Run, x: Tensor, t: int, s: int, zeta: float) -> tuple[Tensor, Prediction]:
    """Lines 3 to 7 of Algorithm 1: x_t → x_s, and the prediction it used."""
    prediction, vjp = predict_with_vjp(run.prior, x, t)
    x_s = run.prior.schedule.posterior(x, prediction.x0, t, s, run.normal(), prediction.v)  # line 6
    residual, gradient = residual_and_gradient(run.A, prediction.x0, run.y)
    return x_s - zeta * vjp(gradient / norm(residual)), prediction  # line 7: ζ ∇_{x_t} ‖y − A(x̂0)‖
