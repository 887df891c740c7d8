"""DiffPIR, "Denoising Diffusion Models for Plug-and-Play Image Restoration" (Zhu et al. 2023, arXiv 2305.08995),
Algorithm 1: half-quadratic splitting with the prior as denoiser.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.operators.base import Operator
from ddc.operators.inpaint import Inpaint
from ddc.solvers.base import Run, Solver

SIGMA_FLOOR = 0.001  # keeps ρ_t above 0 where y has no noise


@dataclass(frozen=True)
class DiffPIR(Solver):
    """Plug-and-play splitting: any linear operator, without gradients of the network."""

    name = "diffpir"
    zeta_range = (0.0, 1.0)
    # the released configurations: little fresh noise for deblurring and super-resolution, only fresh noise for masks
    paper: ClassVar[dict[str, dict[type, float]]] = {"zeta": {Inpaint: 1.0, Operator: 0.1}}

    lam: float = 1.0
    """The weight λ of the prior against the measurement; 1 is the 4 of the released code, whose σ is in [0, 1] units."""
    zeta: float | None = None
    """The share ζ of fresh noise in each step; None is its authors': 1.0 for masks, 0.1 otherwise."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        A, y, schedule = run.A, run.y, run.prior.schedule
        zeta = self.setting("zeta", run.problem)
        sigma2 = torch.as_tensor(run.sigma, dtype=y.dtype, device=y.device).clamp(min=SIGMA_FLOOR) ** 2

        x = run.normal()  # x_T ~ N(0, I)
        for t, s in run.steps(schedule.pairs(self.steps)):
            prediction = run.prior.predict(x, t)
            signal, level = schedule.signal(t, x), schedule.level(t, x)
            rho = self.lam * sigma2 * (signal / level) ** 2  # ρ_t
            # argmin ‖Ax − y‖² + ρ_t‖x − x̂0‖²
            x0 = prediction.x0 + A.regularised_inverse(y - A(prediction.x0), rho, run.size, cutoff=0.0)
            e = (x - signal * x0) / level  # ε̂' of the corrected x̂0
            mixed = math.sqrt(1 - zeta) * e + math.sqrt(zeta) * run.normal()
            x = schedule.signal(s, x) * x0 + schedule.level(s, x) * mixed
            run.show(x0, prediction.noise)
        return x
