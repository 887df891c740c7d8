"""DDNM and DDNM+, "Denoising Diffusion Null-space Model" (Wang et al. 2023, arXiv 2212.00490).

Algorithm 1 without noise in y; with noise DDNM+ (equations 17 and 18, and appendix I for any A with an SVD), which
weighs the correction of each singular direction by what the noise lets through.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.operators.base import SVDOperator
from ddc.problems import Problem
from ddc.solvers.base import Run, Solver


@dataclass(frozen=True)
class DDNM(Solver):
    """Null-space model: the measured part of x̂0 is replaced by A†y; with noise in y, DDNM+."""

    name = "ddnm"

    eta: float = 0.85
    """The share η of fresh noise in each step."""

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if has_noise(problem) and not isinstance(problem.operator, SVDOperator):
            raise UserError(
                f"ddnm needs an operator with an SVD where y has noise; {problem.name} is not one. "
                f"Use {problem.suggested_solvers()}."
            )

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        A, schedule, noisy = run.A, run.prior.schedule, has_noise(run.problem)
        x = run.normal()  # x_T ~ N(0, I)
        for t, s in run.steps(schedule.pairs(self.steps)):
            prediction = run.prior.predict(x, t)
            z = run.normal()
            if noisy:
                x0, x = self.plus_step(run, prediction.x0, prediction.noise, z, s)
            else:
                x0 = prediction.x0 - A.pinv(A(prediction.x0) - run.y, run.size)  # equation 13
                x = schedule.ddnm_noise_rule(x0, prediction.noise, s, z, self.eta)
            run.show(x0, prediction.noise)
        return x

    def plus_step(self, run: Run, x0: Tensor, noise: Tensor, z: Tensor, s: int) -> tuple[Tensor, Tensor]:
        """DDNM+: the corrected x̂0, and x_s, computed from the coefficients in the basis V."""
        A, schedule = run.A, run.prior.schedule
        a, level = schedule.signal(s, x0), schedule.level(s, x0)
        measured = A.measured(run.size, x0)
        singular = torch.where(measured, A.singular_values(run.size, x0), 1.0)
        stay = math.sqrt(1 - self.eta**2)
        c0, e, z = A.Vt(x0), A.Vt(noise), A.Vt(z)
        data_level = a * run.sigma / singular  # the noise of y at this level, a σ/s_i

        enough = level >= data_level
        share = torch.where(enough, 1.0, level * stay / data_level.clamp(min=1e-12))  # λ_i
        c0 = torch.where(measured, c0 + share * (A.Ut(run.y, run.size) / singular - c0), c0)
        fresh = torch.where(enough, (level**2 - data_level**2).clamp(min=0).sqrt(), self.eta * level)
        rule = level * (self.eta * z + stay * e)  # DDNM's own, where nothing is measured or y has no noise
        added = torch.where(measured & (data_level > 0), fresh * z, rule)
        return A.V(c0), A.V(a * c0 + added)


def has_noise(problem: Problem) -> bool:
    return bool((torch.as_tensor(problem.sigma) > 0).any())
