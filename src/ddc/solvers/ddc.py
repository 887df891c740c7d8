"""DDC, "Deep Data Consistency" (Chen, Hao, Xiao 2024), Algorithm 1.

x̂0 from the frozen prior, x̂0,y = x̂0 − Δφ(y, x̂0, t) from the trained network, and the posterior step.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.consistency import DataConsistency
from ddc.noise import Noise
from ddc.operators.base import Operator
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.schedule import Schedule, Spacing
from ddc.solvers.base import Callback, Solver, Step, image_shape


@dataclass(frozen=True)
class DDC(Solver):
    """Deep Data Consistency: any operator the network was trained for, in five steps."""

    name: ClassVar[str] = "ddc"
    operators: ClassVar[type] = Operator
    needs: ClassVar[tuple[str, ...]] = ("prior", "network")

    steps: int = 5
    """Sampling steps."""
    spacing: Spacing | None = None
    """Timesteps: leading (800, 600, …, 0) or even (999, 749, …, 0); left out, leading from four steps on."""

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
        network: DataConsistency = parts["network"]
        schedule = prior.schedule
        pairs = self.pairs(schedule)
        shape = image_shape(y, problem)

        x, known = noise.normal(shape), None  # x_T ~ N(0, I)
        for i, (t, s) in enumerate(pairs):
            prediction = prior.predict(x, t)
            x0 = prediction.x0
            known = network.describe(y, x0, problem, known)
            x0 = x0 - network(known, x0, t)  # equation 6
            x0 = problem.operator.keep_known(x0, y, problem.sigma)  # what an exact y says stays
            x = schedule.posterior(x, x0, t, s, noise.normal(shape), prediction.v)
            if callback:
                callback(Step(i, len(pairs), t, x0, prediction.noise))
        return x

    def pairs(self, schedule: Schedule) -> list[tuple[int, int]]:
        """(t, s) of each step. Few leading steps would take the pure noise at the start for less than it is."""
        return schedule.pairs(self.steps, self.spacing or ("leading" if self.steps > 3 else "even"))

    def evaluations(self) -> int:
        return 2 * self.steps
