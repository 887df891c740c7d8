"""Your own solver: a frozen dataclass of its settings, and a loop.

This one is DDIM with a gradient step towards the measurement after every prediction. To add it to the package, move the
class to src/ddc/solvers/ and add it to the list in src/ddc/solvers/__init__.py. The tests, the command line, the web
page and the documentation find it there.
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc import RestorationPipeline
from ddc.solvers.base import Run, Solver


@dataclass(frozen=True)
class GradientStep(Solver):
    """x̂0 ← x̂0 + ρ Aᵀ(y − A x̂0), then DDIM."""

    name: ClassVar[str] = "gradient-step"

    steps: int = 20
    """Sampling steps."""
    rho: float = 1.0
    """Size of the gradient step."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        schedule = run.prior.schedule
        x = run.normal()  # x_T ~ N(0, I)
        for t, s in run.steps(schedule.pairs(self.steps)):
            prediction = run.prior.predict(x, t)
            x0 = prediction.x0 + self.rho * run.A.adjoint(run.y - run.A(prediction.x0), run.size)
            x = schedule.ddim(x0, prediction.noise, t, s, run.normal(), eta=0.0)
            run.show(x0, prediction.noise)
        return x


def main(source: str, target: str, model: str | None = None, steps: int = 20) -> None:
    """Fill the transparent pixels of a picture with the new solver."""
    pipe = RestorationPipeline.from_pretrained(model).to("auto")
    result = pipe(source, task="inpaint", solver=GradientStep(steps=steps))
    result.picture.write(target)
    print(f"{target}: restored in {result.seconds:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
