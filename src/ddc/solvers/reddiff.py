"""RED-diff (Mardani et al. 2023, arXiv 2305.04391), Algorithm 1: variational inference as optimisation.

The mean μ of a narrow Gaussian is optimised by Adam; the prior's noise error is its regulariser, not
differentiated through.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators.base import Operator
from ddc.operators.jpeg import JPEG
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import Callback, Solver, Step, image_shape, pseudo_inverse
from ddc.solvers.gradients import misfit


@dataclass(frozen=True)
class REDdiff(Solver):
    """Optimises one picture with the prior as regulariser: any differentiable operator."""

    name: ClassVar[str] = "reddiff"
    operators: ClassVar[type] = Operator
    # 0.5 is the paper's, which has no JPEG: there it loses in a few steps what y had, and does not find it again
    paper: ClassVar[dict[str, dict[type, float]]] = {"lr": {JPEG: 0.1, Operator: 0.5}}

    steps: int = 100
    """Steps of the optimiser, from the noisiest level to the cleanest."""
    lr: float | None = None
    """Adam's learning rate; None is the paper's 0.5, and 0.1 for JPEG."""
    lam: float = 0.25
    """The weight λ of the prior."""

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
        pairs = schedule.pairs(self.steps)
        shape = image_shape(y, problem)
        pixels = shape[1] * shape[2] * shape[3]
        measured = count_measured(y, problem)  # the misfit is a mean over what was measured

        mu = pseudo_inverse(y, problem).clone()
        adam = torch.optim.Adam([mu], lr=self.setting("lr", problem), betas=(0.9, 0.99))
        for i, (t, _) in enumerate(pairs):
            z = noise.normal(shape)
            prediction = prior.predict(schedule.add_noise(mu, t, z), t)
            _, gradient = misfit(problem.operator, mu, y)
            # ∇ of ½ mean (y − Aμ)² + λ √((1−ā)/ā) mean sg(ε̂ − z)·μ
            weight = self.lam * schedule.level(t, mu) / schedule.signal(t, mu)
            mu.grad = gradient / measured + weight * (prediction.noise - z) / pixels
            adam.step()
            if callback:
                callback(Step(i, len(pairs), t, mu.clone(), prediction.noise))
        return mu


def count_measured(y: Tensor, problem: Problem) -> Tensor:
    """How many numbers each image's y holds, (B or 1, 1, 1, 1); holes of an inpainting mask are not among them."""
    observed = problem.operator.observed(y)
    if observed is None:
        return torch.full((1, 1, 1, 1), y[0].numel(), dtype=y.dtype, device=y.device)
    return observed.flatten(1).sum(1).clamp(min=1).view(-1, 1, 1, 1).to(y.dtype) * y.shape[1]
