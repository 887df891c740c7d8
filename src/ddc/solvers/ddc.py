"""DDC, "Deep Data Consistency" (Chen, Hao, Xiao 2024, arXiv 2405.10748), Algorithm 1."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.operators.base import Operator
from ddc.priors import Schedule, Spacing
from ddc.solvers.base import Run, Solver


@dataclass(frozen=True)
class DDC(Solver):
    """Deep Data Consistency: any operator the network was trained for, in five steps."""

    name: ClassVar[str] = "ddc"
    operators: ClassVar[type] = Operator
    needs: ClassVar[tuple[str, ...]] = ("prior", "network")

    steps: int = 5
    """Sampling steps."""
    spacing: Spacing | None = None
    """Timesteps: leading (800, 600, …, 0) or even (999, 749, …, 0); if None, leading from four steps on."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        network, schedule = run.parts["network"], run.prior.schedule
        measured = (run.A, run.y, run.sigma)
        x, known = run.normal(), None  # x_T ~ N(0, I)
        for t, s in run.steps(self.pairs(schedule)):
            prediction = run.prior.predict(x, t)
            x0, known = network.consistent(measured, prediction.x0, t, known)  # equation 6
            x = schedule.posterior(x, x0, t, s, run.normal(), prediction.v)
            run.show(x0, prediction.noise)
        return x

    def pairs(self, schedule: Schedule) -> list[tuple[int, int]]:
        """(t, s) of each step. A few leading steps would start below the pure noise that the run starts from."""
        return schedule.pairs(self.steps, self.spacing or ("leading" if self.steps > 3 else "even"))
