"""MCG, "Manifold Constrained Gradient" (Chung et al. 2022, arXiv 2206.00941).

DPS's update, then a projection onto the measurement at the next noise level.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.solvers.base import Run
from ddc.solvers.dps import dps_step
from ddc.solvers.gradients import GradientSolver


@dataclass(frozen=True)
class MCG(GradientSolver):
    """Manifold-constrained gradient: DPS and a projection, for linear operators."""

    name: ClassVar[str] = "mcg"

    steps: int = 1000
    """Sampling steps."""
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
