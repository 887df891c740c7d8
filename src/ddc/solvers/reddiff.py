"""RED-diff (Mardani et al. 2023, arXiv 2305.04391), Algorithm 1: variational inference as optimisation.

The mean μ of a narrow Gaussian is optimised by Adam. The prior's noise error is its regulariser, and is not
differentiated through.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.operators.base import Operator
from ddc.operators.jpeg import JPEG
from ddc.problems import Problem
from ddc.solvers.base import Run, Solver
from ddc.solvers.gradients import residual_and_gradient


@dataclass(frozen=True)
class REDdiff(Solver):
    """Optimises one picture with the prior as regulariser: any differentiable operator."""

    name = "reddiff"
    operators = Operator
    # 0.5 is the paper's, which has no JPEG. With it JPEG loses in a few steps what y had, and does not recover it.
    paper: ClassVar[dict[str, dict[type, float]]] = {"lr": {JPEG: 0.1, Operator: 0.5}}

    steps: int = 100
    """Steps of the optimiser, from the noisiest level to the cleanest."""
    lr: float | None = None
    """Adam's learning rate; None is the paper's 0.5, and 0.1 for JPEG."""
    lam: float = 0.25
    """The weight λ of the prior."""
    count_holes: bool = False
    """Count the holes of a mask in the mean of the data term, as the released code does for masks of image size."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        schedule = run.prior.schedule
        pixels = run.shape[1] * run.shape[2] * run.shape[3]
        # the data term is a mean over what was measured
        measured = run.y[0].numel() if self.count_holes else count_measured(run.y, run.problem)

        mu = run.pseudo_inverse().clone()
        adam = torch.optim.Adam([mu], lr=self.setting("lr", run.problem), betas=(0.9, 0.99))
        for t, _ in run.steps(schedule.pairs(self.steps)):
            z = run.normal()
            prediction = run.prior.predict(schedule.add_noise(mu, t, z), t)
            _, gradient = residual_and_gradient(run.A, mu, run.y)
            # ∇ of ½ mean (y − Aμ)² + λ √((1−ā)/ā) mean sg(ε̂ − z)·μ
            weight = self.lam * schedule.level(t, mu) / schedule.signal(t, mu)
            mu.grad = gradient / measured + weight * (prediction.noise - z) / pixels
            adam.step()
            run.show(mu.clone(), prediction.noise)
        return mu


def count_measured(y: Tensor, problem: Problem) -> Tensor:
    """The number of values in each image's y, (B or 1, 1, 1, 1), without the holes of an inpainting mask."""
    observed = problem.operator.observed(y)
    if observed is None:
        return torch.full((1, 1, 1, 1), y[0].numel(), dtype=y.dtype, device=y.device)
    return observed.flatten(1).sum(1).clamp(min=1).view(-1, 1, 1, 1).to(y.dtype) * y.shape[1]
