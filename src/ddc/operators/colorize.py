"""Colourisation: the measurement is the grey picture."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.operators.base import Sigma, Size, SVDOperator

GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True)
class Colorize(SVDOperator):
    """y has one channel, the luma of ITU-R BT.601. Its SVD rotates the three channels of each pixel."""

    def __call__(self, x: Tensor) -> Tensor:
        return _mix_channels(x.new_tensor([GREY]), x)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y * y.new_tensor(GREY).view(1, 3, 1, 1)

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y.expand(-1, 3, -1, -1)

    def estimate(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """The grey picture: the pseudo-inverse would tint it with the weights of the luma."""
        return self.to_image(y)

    def singular_values(self, size: Size, like: Tensor) -> Tensor:
        norm = torch.tensor(GREY, dtype=torch.float64).norm()
        return like.new_tensor([float(norm), 0.0, 0.0]).view(1, 3, 1, 1)

    def Vt(self, x: Tensor) -> Tensor:
        return _mix_channels(_rotation().to(x.dtype).to(x.device), x)

    def V(self, c: Tensor) -> Tensor:
        return _mix_channels(_rotation().mT.to(c.dtype).to(c.device), c)

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return pad(y, (0, 0, 0, 0, 0, 2))

    def U(self, c: Tensor) -> Tensor:
        return c[:, :1]


def _mix_channels(matrix: Tensor, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("oc,bchw->bohw", matrix, x)


@lru_cache(maxsize=1)
def _rotation() -> Tensor:
    """(3, 3) float64: the unit vector of grey in the first row, two directions of pure colour below it."""
    with torch.inference_mode(False):
        weights = torch.tensor([GREY], dtype=torch.float64)
        rotation = torch.linalg.svd(weights, full_matrices=True).Vh
        return rotation * torch.sign(rotation[:1] @ weights.mT)  # the SVD may choose −grey
