"""A problem is an operator and the noise of its measurement; the named tasks are made here."""

from dataclasses import dataclass

from torch import Tensor

from ddc.operators.base import LinearOperator, Operator, SVDOperator
from ddc.images import internal_sigma


@dataclass(frozen=True)
class Problem:
    """y = A(x) + e, e ~ N(0, σ²). σ_y is in [0, 1] units, as people and the paper's tables give it."""

    operator: Operator
    sigma_y: float | Tensor = 0.0  # a tensor holds one value for each image
    name: str = "this operator"

    @property
    def sigma(self) -> float | Tensor:
        """The noise in [-1, 1] units, where everything inside works."""
        sigma = internal_sigma(self.sigma_y)
        return sigma.view(-1, 1, 1, 1) if isinstance(sigma, Tensor) else sigma

    def measure(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """A(x) with noise from the standard normal field z (shaped like A(x)); None only without noise."""
        y = self.operator(x)
        return y if z is None else self.operator.add_noise(y, z, self.sigma)

    def suggested_solvers(self) -> str:
        """Solvers that take this operator, for error messages."""
        if isinstance(self.operator, SVDOperator):
            return "any solver"
        return "ddc, dps or dds" if isinstance(self.operator, LinearOperator) else "ddc or dps"
