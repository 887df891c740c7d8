"""What a solver is: a frozen dataclass of its settings, and one loop over the steps of a `Run`."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.noise import Noise, derive_seed
from ddc.notation import Entry, with_settings
from ddc.operators.base import NOISE_FLOOR, SINGULAR_CUTOFF, LinearOperator, Size, SVDOperator
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


EXACT_CUTOFF = 1e-6  # of singular values in A†y without noise: the best on validation pictures

Callback = Callable[[Step], None]

# the lowest and highest value of settings; all others must be finite
RANGES: dict[str, tuple[float, float]] = {
    "rounds": (0, 100),
    **{"steps": (1, math.inf), "cg_iterations": (1, 1000), "eta": (0, 1), "eta_b": (0, 1), "realism": (0, 1)},
    **{
        "cutoff": (0, 1),
        "lr": (0, math.inf),
        "lam": (0, math.inf),
        "gamma": (0, math.inf),
        "rho": (1e-9, math.inf),
        "c": (0, math.inf),
    },
    **{"omega": (0, math.inf), "every": (1, math.inf), "iterations": (1, 100_000), "lookahead": (0, 1000)},
    **{"order": (1, 2), "eta1": (0, 0.9999999), "eta2": (0, 0.9999999), "tolerance": (0, math.inf)},
}


class Run:
    """What a solver is given: measurements, their problem, the prior, the noise, and other networks by name.

    `noise` is a source, or a list with a seed for each picture; `corners` then says where each lies in a larger picture,
    with which it shares its noise. `size` is the height and width of the pictures that y measures; None asks the operator.
    `parts` are the networks that the solver's `needs` name beside the prior: network, bridge, denoiser or
    posterior; and "conditions" of the picture, for the last of them. The prior may be None if the solver does not need it.
    """

    def __init__(
        self,
        y: Tensor,
        problem: Problem,
        prior: Denoiser | None,
        noise: Noise | list[int],
        callback: Callback | None = None,
        size: Size | None = None,
        corners: Sequence[tuple[int, int]] = ((0, 0),),
        **parts: Any,
    ) -> None:
        self.y, self.problem, self.callback = y, problem, callback
        self.prior: Any = prior
        self.parts = parts
        self.A: Any = problem.operator  # the solver's `operators` says which kind it is
        self.sigma = problem.sigma
        self.size: Size = size or problem.operator.image_size(y)
        factor = getattr(prior, "factor", 1)  # of a latent prior
        height, width = (-(-side // factor) for side in self.size)
        self.shape = (y.shape[0], getattr(prior, "channels", 3), height, width)
        corners = [(top // factor, left // factor) for top, left in corners]
        self.noise = Noise(noise, corners, y.device) if isinstance(noise, list) else noise
        self._step = (0, 0, 0)

    def normal(self) -> Tensor:
        """The next standard normal field, in the shape of what the prior is of: pictures, or latents."""
        return self.noise.normal(self.shape)

    def steps(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The pairs (t, s), one step after the other."""
        for index, (t, s) in enumerate(pairs):
            self.at(index, len(pairs), t)
            yield t, s

    def at(self, index: int, steps: int, t: int) -> None:
        """Say which step of how many runs, and its time."""
        self._step = (index, steps, t)

    def show(self, x0: Tensor, noise: Tensor | None = None) -> None:
        """Tell the callback, if there is one, that the step is done."""
        if self.callback:
            self.callback(Step(*self._step, x0, noise))

    def pseudo_inverse(self, cutoff: float | None = None) -> Tensor:
        """A†y without singular values up to `cutoff`, by default what is best with or without noise; for an operator that
        is not linear (JPEG), y at image size."""
        if not isinstance(self.A, LinearOperator):
            return self.A.to_image(self.y, self.size)
        noisy = bool((torch.as_tensor(self.sigma) > NOISE_FLOOR).any())
        return self.A.pinv(
            self.y, self.size, (SINGULAR_CUTOFF if noisy else EXACT_CUTOFF) if cutoff is None else cutoff
        )


def sample_seeds(seed: int, name: str | int, samples: int) -> list[int]:
    """The seeds of the samples of one picture, from the user's seed and the picture's name or index."""
    first = derive_seed(seed, name)
    return [first, *(derive_seed(first, sample) for sample in range(1, samples))]


@dataclass(frozen=True)
class Solver(ABC):
    """An algorithm with the paper's settings as defaults. `steps` is the length of the run."""

    name: ClassVar[str]
    operators: ClassVar[type] = LinearOperator  # what its maths can take
    needs: ClassVar[tuple[str, ...]] = ("prior",)  # the networks it uses: "prior", "network", "denoiser" or "bridge"
    latent: ClassVar[bool] = False  # whether the prior must be one of latents, and not one of pictures
    zeta_range: ClassVar[tuple[float, float]] = (0.0, math.inf)
    paper: ClassVar[dict[str, dict[type, float]]] = {}  # setting → operator → value; the first that fits is used

    steps: int = 100
    """Sampling steps."""

    def check_settings(self) -> None:
        """Refuse settings for which the algorithm's formulas mean nothing."""
        for name, value in vars(self).items():
            low, high = RANGES.get(name, (-math.inf, math.inf)) if name != "zeta" else self.zeta_range
            if isinstance(value, (int, float)) and not (low <= value <= high and math.isfinite(value)):
                expected = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
                expected = "a finite number" if low == -math.inf else expected
                raise UserError(f"{name} must be {expected}, not {value}")

    @abstractmethod
    def solve(self, run: Run) -> Tensor:
        """The restored images, (B, 3, H, W) in about [-1, 1]."""

    def evaluations(self) -> int:
        """Network evaluations for one image: in each step one of every network it needs."""
        return self.steps * len(self.needs)

    def check(self, problem: Problem) -> None:
        """Refuse, before anything runs, an operator that this solver's maths cannot take."""
        if isinstance(problem.operator, self.operators):
            return
        need: dict[type, str] = {SVDOperator: "an operator with an SVD", LinearOperator: "a linear operator"}
        raise UserError(
            f"{self.name} needs {need.get(self.operators, 'another operator')}; {problem.name} is not one. "
            f"Use {problem.suggested_solvers()}."
        )

    def settled(self, problem: Problem, parts: Mapping[str, Any], size: Size | None = None) -> "Solver":
        """The solver with the settings that it leaves to the problem, to its networks and to the size of the pictures;
        only then is its number of evaluations the true one."""
        return self

    def setting(self, name: str, problem: Problem) -> float:
        """A setting as given; if it is None, the paper's value for this operator."""
        given: float | None = getattr(self, name)
        if given is not None:
            return given
        return next(value for kind, value in self.paper[name].items() if isinstance(problem.operator, kind))


@dataclass(frozen=True)
class OneStep(Solver):
    """A solver that repeats nothing."""

    steps: int = 1
    """Always 1: nothing is repeated."""

    def __post_init__(self) -> None:
        self.check_settings()
        if self.steps != 1:
            raise UserError(f"{self.name} has one step, not {self.steps}; leave its steps out")


def make_solver(
    solver: str | Solver | None, steps: int | None = None, options: Mapping[str, Any] | None = None
) -> Solver:
    """A solver from its name, with settings if there are any: "ddnm", "pigdm:noise_blind=true:steps=50". None is ddc."""
    from ddc.solvers import SOLVERS

    given = dict(options or {}) | ({} if steps is None else {"steps": steps})
    if isinstance(solver, Solver):
        made = dataclasses.replace(solver, **given) if given else solver
        made.check_settings()
        return made
    solver = "ddc" if solver is None else solver
    entry = Entry.parse(solver) if ":" in solver else Entry(solver, {})
    if entry.name not in SOLVERS:
        raise UserError(f"the solver {entry.name!r} is not known; expected one of {', '.join(SOLVERS)}")
    settings = entry.settings | given
    kind = SOLVERS[entry.name]
    made = with_settings(kind, entry.name, settings) if settings else kind()
    made.check_settings()
    return made
