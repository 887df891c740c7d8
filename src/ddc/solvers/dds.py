"""DDS, "Decomposed Diffusion Sampling" (Chung, Lee and Ye 2024, arXiv 2303.05754).

A few conjugate-gradient iterations from x̂0 towards the measurement.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators.base import LinearOperator, conjugate_gradient
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import Callback, Solver, Step, image_shape


@dataclass(frozen=True)
class DDS(Solver):
    """Conjugate gradients on x̂0: any linear operator, without gradients of the network."""

    name: ClassVar[str] = "dds"

    steps: int = 50
    """Sampling steps."""
    eta: float = 0.85
    """The share η of fresh noise in each step."""
    gamma: float | None = None
    """The weight γ of the measurement against x̂0; None is scale² (1 for an A of norm 1), or all without noise."""
    cg_iterations: int = 5
    """Conjugate-gradient iterations in each step, at most."""

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
        A: LinearOperator = problem.operator  # type: ignore[assignment]
        schedule = prior.schedule
        pairs = schedule.pairs(self.steps)
        shape = image_shape(y, problem)
        size = shape[-2:]
        keep, gamma = self.weights(problem)
        keep = keep.to(y)
        rounding = 100 * torch.finfo(y.dtype).eps  # AᵀA has a null space, where what is left then would grow
        pull = gamma * A.adjoint(y, size)  # γAᵀy

        x = noise.normal(shape)  # x_T ~ N(0, I)
        for i, (t, s) in enumerate(pairs):
            prediction = prior.predict(x, t)
            x0 = conjugate_gradient(  # (I + γAᵀA) x = x̂0 + γAᵀy, or AᵀA x = Aᵀy
                lambda p: keep * p + gamma * A.adjoint(A(p), size),
                keep * prediction.x0 + pull,
                prediction.x0,
                self.cg_iterations,
                rounding,
            )
            x = schedule.ddnm_noise_rule(x0, prediction.noise, s, noise.normal(shape), self.eta)
            if callback:
                callback(Step(i, len(pairs), t, x0, prediction.noise))
        return x

    def weights(self, problem: Problem) -> tuple[Tensor, float]:
        """Those of x̂0, for each image, and of y.

        Where y has no noise it alone counts, and x̂0 is where the iterations start. The singular values of a mean
        over scale² pixels reach 1/scale, those of the other operators 1.
        """
        if self.gamma is not None:
            return torch.ones(()), self.gamma
        noisy = torch.as_tensor(problem.sigma) > 0
        return noisy.float(), float(problem.operator.scale**2)
