"""References: A†y, the pseudo-inverse alone, which every solver should beat, and unconditional sampling.

Unconditional sampling (Ho et al. 2020, arXiv 2006.11239; DDIM, Song et al. 2021, arXiv 2010.02502) is the loop of every
other solver without its data-consistency line: only the size of y is used.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.operators.base import Operator
from ddc.priors import Spacing
from ddc.solvers.base import OneStep, Run, Solver


@dataclass(frozen=True)
class PseudoInverse(OneStep):
    """A†y without any network; y itself for JPEG."""

    name = "pinv"
    operators = Operator
    needs = ()

    cutoff: float | None = None
    """Singular values up to it count as zero; None is 1e-6, and 0.03 with noise, the best on validation pictures."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        x = run.pseudo_inverse(self.cutoff)
        for _ in run.steps([(0, -1)]):
            run.show(x)
        return x


@dataclass(frozen=True)
class Unconditional(Solver):
    """Samples from the prior and ignores the measurement: a reference for experiments."""

    name = "unconditional"
    operators = Operator

    eta: float | None = None
    """DDIM's η, 0 for no noise after the first; None takes the posterior step with the prior's own variance."""
    spacing: Spacing = "leading"
    """Timesteps of the short run: leading (…, 200, 0) or even (999, …, 0)."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        schedule = run.prior.schedule
        x = run.normal()  # x_T ~ N(0, I)
        for t, s in run.steps(schedule.pairs(self.steps, self.spacing)):
            prediction = run.prior.predict(x, t)
            z = run.normal()
            if self.eta is None:
                x = schedule.posterior(x, prediction.x0, t, s, z, prediction.v)  # DDPM, Algorithm 2
            else:
                x = schedule.ddim(prediction.x0, prediction.noise, t, s, z, self.eta)  # DDIM, equation 12
            run.show(prediction.x0, prediction.noise)
        return x
