"""Your own solver: a frozen dataclass of its settings, and a loop.

This one is DDIM with a gradient step towards the measurement after every prediction. Adding it to the package
means moving the class to src/ddc/solvers/ and its name to the list in src/ddc/solvers/__init__.py; tests, the command
line, the web page and the documentation find it there.
"""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.operators import LinearOperator
from ddc.pipeline import RestorationPipeline
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import Callback, Solver, Step, image_shape


@dataclass(frozen=True)
class GradientStep(Solver):
    """x̂0 ← x̂0 + ρ Aᵀ(y − A x̂0), then DDIM."""

    name: ClassVar[str] = "gradient-step"

    steps: int = 20
    """Sampling steps."""
    rho: float = 1.0
    """Size of the gradient step."""

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
        shape = image_shape(y, problem)
        x = noise.normal(shape)  # x_T ~ N(0, I)
        pairs = prior.schedule.pairs(self.steps)
        for i, (t, s) in enumerate(pairs):
            prediction = prior.predict(x, t)
            x0 = prediction.x0
            x0 = x0 + self.rho * A.adjoint(y - A(x0), shape[-2:])
            x = prior.schedule.ddim(x0, prediction.noise, t, s, noise.normal(shape), eta=0.0)
            if callback:
                callback(Step(i, len(pairs), t, x0, prediction.noise))
        return x


def main(source: str, target: str, model: str | None = None, steps: int = 20) -> None:
    """Fill the transparent pixels of a picture with the new solver."""
    pipe = RestorationPipeline.from_pretrained(model).to("auto")
    result = pipe(source, task="inpaint", solver=GradientStep(steps=steps))
    result.picture.write(target)
    print(f"{target}: restored in {result.seconds:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:3])
