"""A bridge to deepinv: its linear physics as operators of `ddc`, and operators of `ddc` as its physics.

operator = from_deepinv(physics)
y = to_internal(operator, physics(x))                  # x in [0, 1]
restored = pipe.solve(y, Problem(operator, sigma_y=0.05), make_solver("ddc"), seeds=[0])

Copy this file to where your program finds it. It needs `deep-data-consistency`, and `to_deepinv` needs `deepinv`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.operators.base import LinearOperator, Size, size_of


class PhysicsOperator(LinearOperator):
    """A linear physics of deepinv. The pseudo-inverse and the proximal step use conjugate gradients."""

    def __init__(self, physics: Any, scale: int = 1) -> None:
        super().__init__()
        self.physics, self.scale = physics, scale

    def forward(self, x: Tensor) -> Tensor:
        """Returns the measurement without noise; what deepinv calls `A`."""
        measured: Tensor = self.physics.A(x)
        if not isinstance(measured, Tensor):
            raise UserError(f"{type(self.physics).__name__} measures {type(measured).__name__}; expected one tensor")
        return measured

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        image: Tensor = self.physics.A_adjoint(y)
        return image

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        """Returns y if it has the shape of an image, as after a blur; otherwise a rough reconstruction."""
        image = self.adjoint(y)
        return y if y.shape == image.shape else self.regularised_inverse(y, 1e-3, size_of(image), 10)

    def image_size(self, y: Tensor) -> Size:
        return size_of(self.adjoint(y))

    def crop(self, top: int, left: int, height: int, width: int) -> "PhysicsOperator":
        """Returns the operator itself, if it is not made for images of one size."""
        made_for = getattr(self.physics, "img_size", None)
        if made_for is not None and tuple(made_for[-2:]) != (height, width):
            raise UserError(
                f"this physics is for images of {made_for[-1]}×{made_for[-2]} pixels, and has no tiles; restore the whole "
                "image with `RestorationPipeline.solve`"
            )
        return self


def from_deepinv(physics: Any, scale: int | None = None) -> PhysicsOperator:
    """Returns a linear physics of deepinv as an operator. Its noise model is not used: give σ to the `Problem`.

    `scale` is the size of the image over that of the measurement, if the measurement is a picture; by default the
    physics' own `factor`, or 1.
    """
    if not (callable(getattr(physics, "A", None)) and callable(getattr(physics, "A_adjoint", None))):
        raise UserError(f"{type(physics).__name__} has no A_adjoint; expected a deepinv.physics.LinearPhysics")
    factor = getattr(physics, "factor", 1)
    return PhysicsOperator(physics, scale or (factor if isinstance(factor, int) else 1))


def to_internal(operator: LinearOperator, y: Tensor) -> Tensor:
    """Returns the measurement of the image 2x − 1, in [-1, 1] as `ddc` has it, from that of x in [0, 1]."""
    return 2 * y - operator(torch.ones_like(operator.adjoint(y)))


def to_deepinv(operator: LinearOperator, img_size: tuple[int, ...] | None = None, **options: Any) -> nn.Module:
    """Returns a linear operator as a `deepinv.physics.LinearPhysics`; `options`, such as `noise_model`, are those of its
    constructor. `img_size` (C, H, W) is needed where `scale` does not divide the size of the image."""
    if not isinstance(operator, LinearOperator):
        raise UserError(f"{type(operator).__name__} is not linear; expected a LinearOperator")
    try:
        from deepinv.physics import LinearPhysics
    except ImportError:
        raise UserError("to_deepinv needs another package: pip install deepinv") from None
    size = None if img_size is None else (img_size[-2], img_size[-1])

    class OperatorPhysics(LinearPhysics):  # type: ignore[misc]
        """An operator of ddc."""

        def __init__(self) -> None:
            super().__init__(img_size=img_size, **options)
            self.operator = operator

        def A(self, x: Tensor, **_: Any) -> Tensor:
            return operator(x)

        def A_adjoint(self, y: Tensor, **_: Any) -> Tensor:
            return operator.adjoint(y, size)

        def A_dagger(self, y: Tensor, **_: Any) -> Tensor:
            return operator.pinv(y, size)

    return OperatorPhysics()
