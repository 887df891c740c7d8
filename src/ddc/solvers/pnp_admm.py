"""PnP-ADMM (Chan, Wang and Elgendy 2016, arXiv 1605.01710): ADMM with a denoiser as its proximal step.

It works on pictures in [0, 1], for which the denoiser is trained.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.images import to_internal
from ddc.operators.base import conjugate_gradient
from ddc.solvers.base import Run, Solver


@dataclass(frozen=True)
class PnPADMM(Solver):
    """Plug-and-play ADMM with a DnCNN: linear operators, no diffusion prior."""

    name: ClassVar[str] = "pnp-admm"
    needs: ClassVar[tuple[str, ...]] = ("denoiser",)

    steps: int = 10
    """Iterations."""
    rho: float = 0.05
    """The penalty ρ that ties the picture to its denoised copy."""
    cg_iterations: int = 50
    """Largest number of conjugate-gradient iterations in each x step."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"pnp-admm needs at least one step, not {self.steps}")

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        denoise, A, rho = run.parts["denoiser"], run.A, self.rho
        ones = torch.ones(run.shape, dtype=run.y.dtype, device=run.y.device)
        y = (run.y + A(ones)) / 2  # A x in [0, 1], because A is linear

        x = A.adjoint(y, run.size)
        b, v, u = x, x, torch.zeros_like(x)
        for _ in run.steps([(t, t - 1) for t in reversed(range(self.steps))]):
            # argmin ½‖Ax − y‖² + (ρ/2)‖x − v + u‖²
            x = conjugate_gradient(
                lambda p: A.adjoint(A(p), run.size) + rho * p, b + rho * (v - u), x, self.cg_iterations
            )
            v = denoise(x + u).to(x.dtype)
            u = u + x - v
            run.show(to_internal(x))
        return to_internal(x)
