"""Your own operator: what your camera, scanner or telescope does to a picture.

Here, a sensor that loses every fourth row of pixels. The same class serves the command line:

ddc restore rows.png -o whole.png --operator examples/own_operator.py:LostRows --solver ddnm
"""

import sys

import torch
from torch import Tensor

from ddc.images import Picture, to_internal, to_unit
from ddc.operators import LinearOperator
from ddc.operators.base import Size
from ddc.pipeline import RestorationPipeline


class LostRows(LinearOperator):
    """Every fourth row is black. A linear operator needs its adjoint, and nothing else."""

    align = 4  # tiles of a large picture must start at a multiple of four rows

    def __call__(self, x: Tensor) -> Tensor:
        kept = (torch.arange(x.shape[-2], device=x.device) % 4 != 3).to(x.dtype)
        return x * kept.view(-1, 1)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self(y)

    def pinv(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self(y)  # left out, it would be found by conjugate gradients


def main(source: str, target: str, model: str | None = None, steps: int = 20) -> None:
    """Lose rows of a picture, and bring them back."""
    x = to_internal(Picture.read(source).tensor)[None]
    y = LostRows()(x)
    pipe = RestorationPipeline.from_pretrained(model).to("auto")
    result = pipe(to_unit(y)[0], task=LostRows(), solver="ddnm", steps=steps)
    result.picture.write(target)
    print(f"{target}: restored in {result.seconds:.1f} s, {result.evaluations} network evaluations")


if __name__ == "__main__":
    main(*sys.argv[1:3])
