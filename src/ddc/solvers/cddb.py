"""CDDB, "Consistent Direct Diffusion Bridge" (Chung, Kim and Ye 2023, arXiv 2305.19809).

I²SB's step with a gradient step towards the measurement.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators.base import Operator
from ddc.operators.jpeg import JPEG
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import Callback, Solver, Step, image_shape
from ddc.solvers.bridge import Bridge
from ddc.solvers.gradients import misfit
from ddc.solvers.i2sb import load_bridge


@dataclass(frozen=True)
class CDDB(Solver):
    """Image-to-image bridge kept consistent with y: any operator that a bridge network was trained for."""

    name: ClassVar[str] = "cddb"
    operators: ClassVar[type] = Operator
    needs: ClassVar[tuple[str, ...]] = ("bridge",)
    paper: ClassVar[dict[str, dict[type, float]]] = {"c": {JPEG: 0.5, Operator: 1.0}}

    steps: int = 20
    """Sampling steps."""
    c: float | None = None
    """Step size c of the gradient; None is the paper's: 0.5 for JPEG, 1.0 otherwise."""

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
        bridge: Bridge = parts["bridge"]
        schedule = bridge.schedule
        pairs = schedule.pairs(self.steps)
        shape = image_shape(y, problem)
        c = self.setting("c", problem)

        x = problem.operator.to_image(y)  # x₁
        for i, (n, m) in enumerate(pairs):
            predicted = bridge(x, n)
            x0 = schedule.clean(x, predicted, n)
            x = schedule.step(x, x0, n, m, noise.normal(shape))
            _, gradient = misfit(problem.operator, x0, y)
            x = x - c * schedule.share(n, m, x) * 2 * gradient  # c (α²/S_n²) ∇‖A x̂0 − y‖²
            if callback:
                callback(Step(i, len(pairs), n, x0, predicted))
        return x

    def load_parts(self, model: str | Path | None, problem: Problem) -> dict[str, Any]:
        return {"bridge": load_bridge(self.name, model, problem)}
