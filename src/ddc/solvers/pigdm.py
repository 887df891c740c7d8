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
from ddc.solvers.gradients import predict_with_vjp, prepare


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
        prepare(prior, self.checkpointing)

        x = noise.normal(shape)  # x_T ~ N(0, I)
        for i, (t, s) in enumerate(pairs):
            prediction, vjp = predict_with_vjp(prior, x, t)
            x0, signal, level = prediction.x0, schedule.signal(t, x), schedule.level(t, x)
            ratio = 0.0 if self.noise_blind else (problem.sigma / level) ** 2  # σ²/r_t², r_t² = 1 − ā_t
            guide = vjp(self.direction(x0, y, problem, ratio))  # g
            z = noise.normal(shape)
            if self.score_factor:  # DDIM with the conditional score, and the x̂0 that goes with it
                x = schedule.ddim(x0 + guide / signal, prediction.noise - guide / level, t, s, z, self.eta)
            else:
                x = schedule.ddim(x0, prediction.noise, t, s, z, self.eta)
                x = x + signal * schedule.signal(s, x) * guide  # √(ā_t ā_s) g
            if callback:
                callback(Step(i, len(pairs), t, x0, prediction.noise))
        return x

    @staticmethod
    def direction(x0: Tensor, y: Tensor, problem: Problem, ratio: Sigma) -> Tensor:
        """Aᵀ(AAᵀ + σ²/r² I)⁻¹(y − A x̂0); for JPEG y − JPEG(x̂0), and nothing goes through JPEG."""
        A, size = problem.operator, (x0.shape[-2], x0.shape[-1])
        if isinstance(A, LinearOperator):
            return A.regularised_inverse(y - A(x0), ratio, size)
        return A.to_image(y, size) - A.to_image(A(x0), size)
