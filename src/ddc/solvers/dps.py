"""DPS, "Diffusion Posterior Sampling" (Chung et al. 2023, arXiv 2209.14687), Algorithm 1.

The posterior step, then a step down the gradient of the unsquared norm ‖y − A(x̂0)‖, as its released code does:
the paper's ζ_t = ζ/‖y − A(x̂0)‖.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators.base import Operator
from ddc.operators.blur import GaussianBlur
from ddc.priors import Denoiser, Prediction
from ddc.problems import Problem
from ddc.solvers.base import Callback, Solver, Step, image_shape
from ddc.solvers.gradients import misfit, norm, predict_with_vjp, prepare


@dataclass(frozen=True)
class DPS(Solver):
    """Diffusion posterior sampling: any differentiable operator, a thousand steps with a gradient in each."""

    name: ClassVar[str] = "dps"
    operators: ClassVar[type] = Operator
    paper: ClassVar[dict[str, dict[type, float]]] = {"zeta": {GaussianBlur: 0.4, Operator: 1.0}}

    steps: int = 1000
    """Sampling steps."""
    zeta: float | None = None
    """Step size ζ; None is the paper's: 0.4 for Gaussian blur, 1.0 otherwise."""
    checkpointing: bool = False
    """Compute activations again on the way back: less memory, about a third more time."""

    @torch.no_grad()
    def solve(
        self,
        y: Tensor,
        problem: Problem,
        prior: Denoiser,
        noise: Noise,
        callback: Callback | None = None,
        **parts: Any,
    ) -> Tensor:
        pairs = prior.schedule.pairs(self.steps)
        shape = image_shape(y, problem)
        zeta = self.setting("zeta", problem)
        prepare(prior, self.checkpointing)

        x = noise.normal(shape)  # x_T ~ N(0, I)
        for i, (t, s) in enumerate(pairs):
            z = noise.normal(shape)
            x, prediction = dps_step(x, t, s, z, y, problem, prior, zeta)
            if callback:
                callback(Step(i, len(pairs), t, prediction.x0, prediction.noise))
        return x


def dps_step(
    x: Tensor,
    t: int,
    s: int,
    z: Tensor,
    y: Tensor,
    problem: Problem,
    prior: Denoiser,
    zeta: float,
) -> tuple[Tensor, Prediction]:
    """Lines 3 to 7 of Algorithm 1: x_t → x_s, and the prediction it used."""
    prediction, vjp = predict_with_vjp(prior, x, t)
    x_s = prior.schedule.posterior(x, prediction.x0, t, s, z, prediction.v)  # line 6
    residual, gradient = misfit(problem.operator, prediction.x0, y)
    return x_s - zeta * vjp(gradient / norm(residual)), prediction  # line 7: ζ ∇_{x_t} ‖y − A(x̂0)‖
