"""Your own operator: what your camera, scanner or telescope does to a picture.

This sensor loses every fourth row of pixels. The command line takes the same class:

ddc restore rows.png -o whole.png --operator examples/own_operator.py:LostRows --solver ddnm
"""

import sys

import torch
from torch import Tensor

from ddc import LinearOperator, Picture, RestorationPipeline
from ddc.images import to_internal, to_unit
from ddc.operators.base import Size


class LostRows(LinearOperator):
    """Every fourth row is black. A linear operator needs only its adjoint."""

    align = 4  # tiles of a large picture must start at a multiple of four rows

    def forward(self, x: Tensor) -> Tensor:
        kept = (torch.arange(x.shape[-2], device=x.device) % 4 != 3).to(x.dtype)
        return x * kept.view(-1, 1)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self(y)

    def pinv(self, y: Tensor, size: Size | None = None, cutoff: float | None = None) -> Tensor:
        return self(y)  # the default uses conjugate gradients


def main(source: str, target: str, model: str | None = None, steps: int = 20) -> None:
    """Remove rows of a picture, and restore them."""
    x = to_internal(Picture.read(source).tensor)[None]
    y = LostRows()(x)
    pipe = RestorationPipeline.from_pretrained(model).to("auto")
    result = pipe(to_unit(y)[0], task=LostRows(), solver="ddnm", steps=steps)
    result.picture.write(target)
    print(f"{target}: restored in {result.seconds:.1f} s, {result.evaluations} network evaluations")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
