"""PnP-ADMM (Chan, Wang and Elgendy 2016, arXiv 1605.01710): ADMM with a denoiser as its proximal step.

It works on pictures in [0, 1], which is what the denoiser knows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.images import to_internal
from ddc.noise import Noise
from ddc.operators.base import LinearOperator, conjugate_gradient
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import PARTS, Callback, Solver, Step, find_part, image_shape
from ddc.solvers.dncnn import DnCNN


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
    """Conjugate-gradient iterations in each x step, at most."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"pnp-admm needs at least one step, not {self.steps}")

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
        denoise: DnCNN = parts["denoiser"]
        A: LinearOperator = problem.operator  # type: ignore[assignment]
        rho, shape = self.rho, image_shape(y, problem)
        size = shape[-2:]
        y = (y + A(torch.ones(shape, dtype=y.dtype, device=y.device))) / 2  # A x in [0, 1], for A is linear

        x = A.adjoint(y, size)
        b, v, u = x, x, torch.zeros_like(x)
        for i in range(self.steps):
            # argmin ½‖Ax − y‖² + (ρ/2)‖x − v + u‖²
            x = conjugate_gradient(
                lambda p: A.adjoint(A(p), size) + rho * p, b + rho * (v - u), x, self.cg_iterations
            )
            v = denoise(x + u).to(x.dtype)
            u = u + x - v
            if callback:
                callback(Step(i, self.steps, self.steps - 1 - i, to_internal(x), None))
        return to_internal(x)

    def load_parts(self, model: str | Path | None, problem: Problem) -> dict[str, Any]:
        folder = find_part(PARTS["denoiser"], model)
        if folder is None:
            raise UserError("pnp-admm needs a denoiser; none was found. Train one with `ddc train dncnn`")
        return {"denoiser": DnCNN.from_pretrained(folder)}
