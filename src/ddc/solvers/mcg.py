"""MCG, "Manifold Constrained Gradient" (Chung et al. 2022, arXiv 2206.00941).

DPS's update, then a projection onto the measurement at the next noise level.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators.base import LinearOperator
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import Callback, Solver, Step, image_shape
from ddc.solvers.dps import dps_step
from ddc.solvers.gradients import prepare


@dataclass(frozen=True)
class MCG(Solver):
    """Manifold-constrained gradient: DPS and a projection, for linear operators."""

    name: ClassVar[str] = "mcg"

    steps: int = 1000
    """Sampling steps."""
    zeta: float = 1.0
    """Step size ζ of the gradient."""
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
        A: LinearOperator = problem.operator  # type: ignore[assignment]
        schedule = prior.schedule
        pairs = schedule.pairs(self.steps)
        shape = image_shape(y, problem)
        prepare(prior, self.checkpointing)

        x = noise.normal(shape)  # x_T ~ N(0, I)
        for i, (t, s) in enumerate(pairs):
            z = noise.normal(shape)
            x, prediction = dps_step(x, t, s, z, y, problem, prior, self.zeta)
            # x_s = (I − A†A) x' + A†(√ā_s y + √(1−ā_s) A z)
            y_s = schedule.signal(s, x) * y + schedule.level(s, x) * A(noise.normal(shape))
            x = x + A.pinv(y_s - A(x), shape[-2:])
            if callback:
                callback(Step(i, len(pairs), t, prediction.x0, prediction.noise))
        return x
