"""I²SB, "Image-to-Image Schrödinger Bridge" (Liu et al. 2023, arXiv 2302.05872), Algorithm 2.

The run begins at the measurement, not at noise, and needs a network trained for the task.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT
from ddc.noise import Noise
from ddc.operators.base import Operator
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import PARTS, Callback, Solver, Step, find_part, image_shape
from ddc.solvers.bridge import Bridge

logger = logging.getLogger("ddc")


@dataclass(frozen=True)
class I2SB(Solver):
    """Image-to-image bridge: any operator that a bridge network was trained for."""

    name: ClassVar[str] = "i2sb"
    operators: ClassVar[type] = Operator
    needs: ClassVar[tuple[str, ...]] = ("bridge",)

    steps: int = 20
    """Sampling steps."""

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

        x = problem.operator.to_image(y)  # x₁
        for i, (n, m) in enumerate(pairs):
            predicted = bridge(x, n)
            x0 = schedule.clean(x, predicted, n)
            x = schedule.step(x, x0, n, m, noise.normal(shape))  # the posterior of the bridge
            if callback:
                callback(Step(i, len(pairs), n, x0, predicted))
        return x

    def load_parts(self, model: str | Path | None, problem: Problem) -> dict[str, Any]:
        return {"bridge": load_bridge(self.name, model, problem)}


def load_bridge(solver: str, model: str | Path | None, problem: Problem) -> Bridge:
    """The bridge network of the problem's task."""
    folder = find_part(PARTS["bridge"].format(task=problem.name), model)
    if folder is None:
        raise UserError(
            f"{solver} needs a bridge network for {problem.name}; none was found. "
            f"Train one with `ddc train i2sb --task {problem.name}`"
        )
    bridge = Bridge.from_pretrained(folder)
    noise = float(torch.as_tensor(problem.sigma_y).max())
    if noise > max(bridge.sigma_max, ROUNDING_8_BIT):
        logger.warning(
            "the bridge network for %s was trained on measurements with noise of at most %g, not %g, and will "
            "take noise for part of the picture; the solver ddc, or `ddc train i2sb --sigma-max %g`, does better",
            problem.name,
            bridge.sigma_max,
            noise,
            noise,
        )
    return bridge
