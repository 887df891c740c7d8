"""A†y, the pseudo-inverse alone: the floor that every solver should rise above."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.noise import Noise
from ddc.operators.base import Operator
from ddc.priors import Denoiser
from ddc.problems import Problem
from ddc.solvers.base import Callback, Solver, Step, pseudo_inverse


@dataclass(frozen=True)
class PseudoInverse(Solver):
    """A†y without any network; y itself for JPEG."""

    name: ClassVar[str] = "pinv"
    operators: ClassVar[type] = Operator
    needs: ClassVar[tuple[str, ...]] = ()

    steps: int = 1
    """Always 1: nothing is repeated."""

    def __post_init__(self) -> None:
        if self.steps != 1:
            raise UserError(f"pinv has one step, not {self.steps}; leave its steps out")

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
        x = pseudo_inverse(y, problem)
        if callback:
            callback(Step(0, 1, 0, x, None))
        return x

    def evaluations(self) -> int:
        return 0
