"""CDDB, "Consistent Direct Diffusion Bridge" (Chung, Kim and Ye 2023, arXiv 2305.19809).

I²SB's step with a gradient step towards the measurement.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.operators.base import Operator
from ddc.operators.jpeg import JPEG
from ddc.solvers.base import Run
from ddc.solvers.gradients import residual_and_gradient
from ddc.solvers.i2sb import I2SB


@dataclass(frozen=True)
class CDDB(I2SB):
    """Image-to-image bridge kept consistent with y: any operator that a bridge network was trained for."""

    name: ClassVar[str] = "cddb"
    paper: ClassVar[dict[str, dict[type, float]]] = {"c": {JPEG: 0.5, Operator: 1.0}}

    c: float | None = None
    """Step size c of the gradient; None is the paper's: 0.5 for JPEG, 1.0 otherwise."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        bridge, c = run.parts["bridge"], self.setting("c", run.problem)
        x = run.A.to_image(run.y)  # x₁
        for n, m in run.steps(bridge.schedule.pairs(self.steps)):
            predicted = bridge(x, n)
            x0 = bridge.schedule.clean(x, predicted, n)
            x = bridge.schedule.step(x, x0, n, m, run.normal())
            _, gradient = residual_and_gradient(run.A, x0, run.y)
            x = x - c * bridge.schedule.share(n, m, x) * 2 * gradient  # c (α²/S_n²) ∇‖A x̂0 − y‖²
            run.show(x0, predicted)
        return x
