"""DDRM, "Denoising Diffusion Restoration Models" (Kawar et al. 2022, arXiv 2201.11793), equations 7 and 8.

It works on x/√ā, whose noise level is σ_t = √((1−ā_t)/ā_t), in the basis V of A = U diag(s) Vᵀ.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.operators.base import SVDOperator
from ddc.solvers.base import Run, Solver


@dataclass(frozen=True)
class DDRM(Solver):
    """Restoration in the spectral basis: linear operators with an SVD, in twenty steps."""

    name = "ddrm"
    operators = SVDOperator

    steps: int = 20
    eta: float = 0.85
    """The share η of fresh noise where y says little or nothing."""
    eta_b: float = 1.0
    """The share η_b of y where it is cleaner than the present noise level."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        A, schedule = run.A, run.prior.schedule
        pairs = schedule.pairs(self.steps)
        eta, eta_b, stay = self.eta, self.eta_b, math.sqrt(1 - self.eta**2)

        measured = A.measured(run.size, run.y)
        singular = torch.where(measured, A.singular_values(run.size, run.y), 1.0)
        y_bar = A.Ut(run.y, run.size) / singular  # ȳ = Uᵀy/s_i
        sigma_bar = run.sigma / singular  # its noise, σ/s_i

        z = A.Vt(run.normal())
        first = pairs[0][0]
        sigma_t = schedule.level(first, z) / schedule.signal(first, z)
        known = measured & (sigma_t > sigma_bar)
        spread = (sigma_t**2 - sigma_bar**2).clamp(min=0).sqrt()
        c = torch.where(known, y_bar + spread * z, sigma_t * z)  # equation 7
        for t, s in run.steps(pairs):
            prediction = run.prior.predict(A.V(c) * schedule.signal(t, c), t)
            c0, e, z = A.Vt(prediction.x0), A.Vt(prediction.noise), A.Vt(run.normal())
            sigma_s = schedule.level(s, c) / schedule.signal(s, c)

            # equation 8, case by case
            unmeasured = c0 + sigma_s * (stay * e + eta * z)
            noisier = c0 + sigma_s * (stay * (y_bar - c0) / sigma_bar.clamp(min=1e-12) + eta * z)
            spread = (sigma_s**2 - eta_b**2 * sigma_bar**2).clamp(min=0).sqrt()
            cleaner = (1 - eta_b) * c0 + eta_b * y_bar + spread * z
            c = torch.where(measured, torch.where(sigma_s < sigma_bar, noisier, cleaner), unmeasured)
            run.show(prediction.x0, prediction.noise)
        return A.V(c)
