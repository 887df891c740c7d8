"""Unconditional sampling (Ho et al. 2020, arXiv 2006.11239; DDIM, Song et al. 2021, arXiv 2010.02502).

The loop of every other solver without its data-consistency line: only the size of y is used.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators.base import Operator
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.schedule import Spacing
from ddc.solvers.base import Callback, Solver, Step, image_shape


@dataclass(frozen=True)
class Unconditional(Solver):
    """Draws from the prior and does not look at the measurement: a reference for experiments."""

    name: ClassVar[str] = "unconditional"
    operators: ClassVar[type] = Operator

    steps: int = 100
    """Sampling steps."""
    eta: float | None = None
    """DDIM's η, 0 for no noise after the first; None takes the posterior step with the prior's own variance."""
    spacing: Spacing = "leading"
    """Timesteps of the short run: leading (…, 200, 0) or even (999, …, 0)."""

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
        schedule = prior.schedule
        pairs = schedule.pairs(self.steps, self.spacing)
        shape = image_shape(y, problem)

        x = noise.normal(shape)  # x_T ~ N(0, I)
        for i, (t, s) in enumerate(pairs):
            prediction = prior.predict(x, t)
            z = noise.normal(shape)
            if self.eta is None:
                x = schedule.posterior(x, prediction.x0, t, s, z, prediction.v)  # DDPM, Algorithm 2
            else:
                x = schedule.ddim(prediction.x0, prediction.noise, t, s, z, self.eta)  # DDIM, equation 12
            if callback:
                callback(Step(i, len(pairs), t, prediction.x0, prediction.noise))
        return x
