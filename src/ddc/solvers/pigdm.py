"""ΠGDM, "Pseudoinverse-Guided Diffusion Models" (Song et al. 2023, ICLR), Algorithm 1.

DDIM(η), and the gradient of the likelihood of y under p(x0 | x_t) ≈ N(x̂0, r_t²).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.operators.base import LinearOperator, Operator, Sigma
from ddc.solvers.base import Run
from ddc.solvers.gradients import GradientSolver, predict_with_vjp


@dataclass(frozen=True)
class PiGDM(GradientSolver):
    """Pseudo-inverse guidance: linear operators and JPEG, with a gradient in each step."""

    name: ClassVar[str] = "pigdm"
    operators: ClassVar[type] = Operator

    steps: int = 100
    """Sampling steps."""
    eta: float = 1.0
    """DDIM's η."""
    noise_blind: bool = False
    """Leave the noise of y out of the guidance, as the released code does."""
    score_factor: bool = False
    """Weigh the guidance by √ā_s/√ā_t − c2/√(1−ā_t), which follows from the score, instead of √(ā_t ā_s)."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        self.prepare(run)
        schedule = run.prior.schedule
        x = run.normal()  # x_T ~ N(0, I)
        for t, s in run.steps(schedule.pairs(self.steps)):
            prediction, vjp = predict_with_vjp(run.prior, x, t)
            x0, signal, level = prediction.x0, schedule.signal(t, x), schedule.level(t, x)
            ratio = 0.0 if self.noise_blind else (run.sigma / level) ** 2  # σ²/r_t², r_t² = 1 − ā_t
            guide = vjp(self.direction(run, x0, ratio))  # g
            z = run.normal()
            if self.score_factor:  # DDIM with the conditional score, and the x̂0 that goes with it
                x = schedule.ddim(x0 + guide / signal, prediction.noise - guide / level, t, s, z, self.eta)
            else:
                x = schedule.ddim(x0, prediction.noise, t, s, z, self.eta)
                x = x + signal * schedule.signal(s, x) * guide  # √(ā_t ā_s) g
            run.show(x0, prediction.noise)
        return x

    @staticmethod
    def direction(run: Run, x0: Tensor, ratio: Sigma) -> Tensor:
        """Aᵀ(AAᵀ + σ²/r² I)⁻¹(y − A x̂0); for JPEG y − JPEG(x̂0), which is not differentiated."""
        A = run.A
        if isinstance(A, LinearOperator):
            return A.regularised_inverse(run.y - A(x0), ratio, run.size)
        return A.to_image(run.y, run.size) - A.to_image(A(x0), run.size)
