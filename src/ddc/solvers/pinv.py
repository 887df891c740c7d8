"""A†y, the pseudo-inverse alone: the baseline that every solver should beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.operators.base import Operator
from ddc.solvers.base import Run, Solver


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
    def solve(self, run: Run) -> Tensor:
        x = run.pseudo_inverse()
        for _ in run.steps([(0, -1)]):
            run.show(x)
        return x

    def evaluations(self) -> int:
        return 0
