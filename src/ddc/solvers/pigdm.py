"""ΠGDM, "Pseudoinverse-Guided Diffusion Models" (Song et al. 2023, ICLR), Algorithm 1.

DDIM(η), and the gradient of the likelihood of y under p(x0 | x_t) ≈ N(x̂0, r_t²).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators.base import LinearOperator, Operator, Sigma
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import Callback, Solver, Step, image_shape
from ddc.solvers.gradients import predict_with_vjp


@dataclass(frozen=True)
class PiGDM(Solver):
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
    checkpointing: bool = False
    """Compute activations again on the way back: less memory, about a third more time."""

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

        x = noise.normal(shape)  # x_T ~ N(0, I)
        for i, (t, s) in enumerate(pairs):
            prediction, vjp = predict_with_vjp(prior, x, t, self.checkpointing)
            x0, a_t, a_s = prediction.x0, schedule.alpha_bar(t, x), schedule.alpha_bar(s, x)
            r2 = 1 - a_t  # r_t²
            guide = vjp(self.direction(x0, y, problem, 0.0 if self.noise_blind else problem.sigma**2 / r2))
            z = noise.normal(shape)
            if (
                self.score_factor
            ):  # DDIM with the conditional score: ε̂ − g/√(1−ā_t), and the x̂0 that belongs to it
                moved = prediction.noise - guide / (1 - a_t).sqrt()
                x = schedule.ddim(x0 + guide / a_t.sqrt(), moved, t, s, z, self.eta)
            else:
                x = schedule.ddim(x0, prediction.noise, t, s, z, self.eta) + (a_t * a_s).sqrt() * guide
            if callback:
                callback(Step(i, len(pairs), t, x0, prediction.noise))
        return x

    @staticmethod
    def direction(x0: Tensor, y: Tensor, problem: Problem, noise_to_spread: Sigma) -> Tensor:
        """Aᵀ(AAᵀ + σ²/r² I)⁻¹(y − A x̂0); for JPEG y − JPEG(x̂0), and nothing goes through JPEG."""
        A, size = problem.operator, (x0.shape[-2], x0.shape[-1])
        if isinstance(A, LinearOperator):
            return A.regularised_inverse(y - A(x0), noise_to_spread, size)
        return A.to_image(y, size) - A.to_image(A(x0), size)
