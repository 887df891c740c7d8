"""I²SB, "Image-to-Image Schrödinger Bridge" (Liu et al. 2023, arXiv 2302.05872), Algorithm 2.

The run starts at the measurement, not at noise, and needs a network trained for the task.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.operators.base import Operator
from ddc.solvers.base import Run, Solver


@dataclass(frozen=True)
class I2SB(Solver):
    """Image-to-image bridge: any operator that a bridge network was trained for."""

    name: ClassVar[str] = "i2sb"
    operators: ClassVar[type] = Operator
    needs: ClassVar[tuple[str, ...]] = ("bridge",)

    steps: int = 20
    """Sampling steps."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        bridge = run.parts["bridge"]
        x = run.A.to_image(run.y)  # x₁
        for n, m in run.steps(bridge.schedule.pairs(self.steps)):
            predicted = bridge(x, n)
            x0 = bridge.schedule.clean(x, predicted, n)
            x = bridge.schedule.step(x, x0, n, m, run.normal())  # the posterior of the bridge
            run.show(x0, predicted)
        return x
