"""What a solver is: a frozen dataclass of its settings, and one loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ddc.errors import UserError
from ddc.noise import Noise
from ddc.operators.base import LinearOperator, SVDOperator
from ddc.priors import Denoiser
from ddc.problems import Problem


@dataclass(frozen=True)
class Step:
    """What a callback is shown after each step."""

    index: int
    steps: int
    t: int
    x0: Tensor  # after data consistency
    noise: Tensor | None  # the network's ε̂, where there is one


Callback = Callable[[Step], None]

PARTS = {"bridge": "i2sb-{task}", "denoiser": "dncnn"}  # the folders of networks that solvers bring


@dataclass(frozen=True)
class Solver(ABC):
    """An algorithm with the paper's settings as defaults. `steps` is the length of the run."""

    name: ClassVar[str]
    operators: ClassVar[type] = LinearOperator  # what its maths can take
    needs: ClassVar[tuple[str, ...]] = ("prior",)  # what it takes: "prior", "network", "denoiser" or "bridge"
    paper: ClassVar[dict[str, dict[type, float]]] = {}  # setting → operator → value, the first that fits

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
        need: dict[type, str] = {SVDOperator: "an operator with an SVD", LinearOperator: "a linear operator"}
        raise UserError(
            f"{self.name} needs {need.get(self.operators, 'another operator')}; {problem.name} is not one. "
            f"Use {problem.suggested_solvers()}."
        )

    def part(self, task: str) -> str | None:
        """The name of the folder with the network that it needs for a task beside the model's, if any."""
        return next((PARTS[need].format(task=task) for need in self.needs if need in PARTS), None)

    def load_parts(self, model: str | Path | None, problem: Problem) -> dict[str, Any]:
        """What `solve` takes beside the prior and the model's own network, read from disk."""
        return {}

    def setting(self, name: str, problem: Problem) -> float:
        """A setting as given; left at None, the paper's value for this operator."""
        given: float | None = getattr(self, name)
        if given is not None:
            return given
        return next(value for kind, value in self.paper[name].items() if isinstance(problem.operator, kind))


def image_shape(y: Tensor, problem: Problem) -> tuple[int, int, int, int]:
    """The shape of the pictures that y measures."""
    return (y.shape[0], 3, *problem.operator.image_size(y))


def pseudo_inverse(y: Tensor, problem: Problem) -> Tensor:
    """A†y; for an operator that is not linear (JPEG), y at image size."""
    operator = problem.operator
    return operator.pinv(y) if isinstance(operator, LinearOperator) else operator.to_image(y)


def find_part(name: str, model: str | Path | None) -> Path | None:
    """The folder of a solver's own network: in the model's folder, beside it, shipped with the package, or in
    the repository that the package is used from."""
    package = Path(__file__).parents[1]
    places = [package / "models", package.parents[1] / "models"]
    if model is not None:
        places = [Path(model), Path(model).absolute().parent, *places]
    return next((place / name for place in places if (place / name / "config.json").is_file()), None)
