"""DDS, "Decomposed Diffusion Sampling" (Chung, Lee and Ye 2024, arXiv 2303.05754).

A few conjugate-gradient iterations from x̂0 towards the measurement.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.operators.base import conjugate_gradient
from ddc.problems import Problem
from ddc.solvers.base import Run, Solver


@dataclass(frozen=True)
class DDS(Solver):
    """Conjugate gradients on x̂0: any linear operator, without gradients of the network."""

    name = "dds"

    steps: int = 50
    eta: float = 0.85
    """The share η of fresh noise in each step."""
    gamma: float | None = None
    """The weight γ of the measurement against x̂0; None is scale² (1 for an A of norm 1), or infinite without noise."""
    cg_iterations: int = 5
    """Largest number of conjugate-gradient iterations in each step."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        A, schedule = run.A, run.prior.schedule
        keep, gamma = self.weights(run.problem)
        keep = keep.to(run.y)
        rounding = 100 * torch.finfo(run.y.dtype).eps  # AᵀA has a null space, where a smaller residual would grow
        pull = gamma * A.adjoint(run.y, run.size)  # γAᵀy

        x = run.normal()  # x_T ~ N(0, I)
        for t, s in run.steps(schedule.pairs(self.steps)):
            prediction = run.prior.predict(x, t)
            x0 = conjugate_gradient(  # (I + γAᵀA) x = x̂0 + γAᵀy, or AᵀA x = Aᵀy
                lambda p: keep * p + gamma * A.adjoint(A(p), run.size),
                keep * prediction.x0 + pull,
                prediction.x0,
                self.cg_iterations,
                rounding,
            )
            x = schedule.ddnm_noise_rule(x0, prediction.noise, s, run.normal(), self.eta)
            run.show(x0, prediction.noise)
        return x

    def weights(self, problem: Problem) -> tuple[Tensor, float]:
        """The weights of x̂0, for each image, and of y.

        Without noise only y counts, and x̂0 is where the iterations start. The singular values of a mean over scale²
        pixels reach 1/scale, those of the other operators 1.
        """
        if self.gamma is not None:
            return torch.ones(()), self.gamma
        noisy = torch.as_tensor(problem.sigma) > 0
        return noisy.float(), float(problem.operator.scale**2)
