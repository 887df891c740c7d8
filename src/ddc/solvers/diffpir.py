"""DiffPIR, "Denoising Diffusion Models for Plug-and-Play Image Restoration" (Zhu et al. 2023, arXiv 2305.08995),
Algorithm 1: half-quadratic splitting with the prior as denoiser.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators.base import LinearOperator, Operator
from ddc.operators.inpaint import Inpaint
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import Callback, Solver, Step, image_shape

SIGMA_FLOOR = 0.001  # keeps ρ_t above 0 where y has no noise


@dataclass(frozen=True)
class DiffPIR(Solver):
    """Plug-and-play splitting: any linear operator, without gradients of the network."""

    name: ClassVar[str] = "diffpir"
    # its released configurations: little fresh noise for deblurring and super-resolution, all of it for masks
    paper: ClassVar[dict[str, dict[type, float]]] = {"zeta": {Inpaint: 1.0, Operator: 0.1}}

    steps: int = 100
    """Sampling steps."""
    lam: float = 1.0
    """The weight λ of the prior against the measurement."""
    zeta: float | None = None
    """The share ζ of fresh noise in each step; None is its authors': 1.0 for masks, 0.1 otherwise."""

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
        zeta = self.setting("zeta", problem)
        sigma2 = torch.as_tensor(problem.sigma, dtype=y.dtype, device=y.device).clamp(min=SIGMA_FLOOR) ** 2

        x = noise.normal(shape)  # x_T ~ N(0, I)
        for i, (t, s) in enumerate(pairs):
            prediction = prior.predict(x, t)
            signal, level = schedule.signal(t, x), schedule.level(t, x)
            rho = self.lam * sigma2 * (signal / level) ** 2  # ρ_t
            # argmin ‖Ax − y‖² + ρ_t‖x − x̂0‖²
            x0 = prediction.x0 + A.regularised_inverse(y - A(prediction.x0), rho, shape[-2:])
            e = (x - signal * x0) / level  # ε̂' of the corrected x̂0
            mixed = math.sqrt(1 - zeta) * e + math.sqrt(zeta) * noise.normal(shape)
            x = schedule.signal(s, x) * x0 + schedule.level(s, x) * mixed
            if callback:
                callback(Step(i, len(pairs), t, x0, prediction.noise))
        return x
