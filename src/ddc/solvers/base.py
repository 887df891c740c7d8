"""What a solver is: a frozen dataclass of its settings, and one loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ddc.errors import UserError
from ddc.noise import Noise
from ddc.operators.base import LinearOperator, Operator, SVDOperator
from ddc.priors import Denoiser
from ddc.problems import Problem


@dataclass(frozen=True)
class Step:
    """What a callback is shown after each step."""

    index: int
    steps: int
    t: int
    x0: Tensor  # after data consistency
    noise: Tensor | None  # the prior's ε̂


Callback = Callable[[Step], None]


@dataclass(frozen=True)
class Solver(ABC):
    """An algorithm with the paper's settings as defaults. `steps` is the length of the run."""

    name: ClassVar[str]
    operators: ClassVar[type[Operator]] = LinearOperator  # what its maths can take
    needs: ClassVar[tuple[str, ...]] = ("prior",)  # what else it takes: "prior", "network", …

    steps: int = 100

    @abstractmethod
    def solve(
        self,
        y: Tensor,
        problem: Problem,
        prior: Denoiser,
        noise: Noise,
        callback: Callback | None = None,
        **parts: Any,
    ) -> Tensor:
        """The restored images, (B, 3, H, W) in about [-1, 1], for the measurements y."""

    def evaluations(self) -> int:
        """Network evaluations for one image."""
        return self.steps

    def check(self, problem: Problem) -> None:
        """Refuse, before anything runs, an operator that this solver's maths cannot take."""
        if isinstance(problem.operator, self.operators):
            return
        need = {SVDOperator: "an operator with an SVD", LinearOperator: "a linear operator"}
        raise UserError(
            f"{self.name} needs {need.get(self.operators, 'another operator')}; {problem.name} is not one. "
            f"Use {problem.suggested_solvers()}."
        )
