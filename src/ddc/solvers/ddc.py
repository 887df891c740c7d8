"""DDC, "Deep Data Consistency" (Chen, Hao, Xiao 2024, arXiv 2405.10748), Algorithm 1; and its first step alone.

In the first step x̂0 comes from pure noise and says nothing, so that one pass can do without the prior: x = 0 − Δφ(y, 0, T).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.operators.base import Operator
from ddc.priors import TRAIN_STEPS, Schedule, Spacing
from ddc.solvers.base import OneStep, Run, Solver


@dataclass(frozen=True)
class DDC(Solver):
    """Deep Data Consistency: any operator the network was trained for, in five steps."""

    name = "ddc"
    operators = Operator
    needs = ("prior", "network")

    steps: int = 5
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


@dataclass(frozen=True)
class OnePass(OneStep):
    """One evaluation of DDC's network, without the prior and without noise: a tenth of the time."""

    name = "one-pass"
    operators = Operator
    needs = ("network",)

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        unknown = torch.zeros(run.shape, device=run.y.device, dtype=run.y.dtype)
        for t, _ in run.steps([(TRAIN_STEPS - 1, -1)]):
            x, _ = run.parts["network"].consistent((run.A, run.y, run.sigma), unknown, t)
            run.show(x)
        return x
