"""Colourisation: the measurement is the grey image."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.operators.base import Sigma, Size, SVDOperator

GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601
WEIGHTS = torch.tensor([GREY], dtype=torch.float64)
_VH = torch.linalg.svd(WEIGHTS, full_matrices=True).Vh
# (3, 3): the unit vector of grey in the first row, two directions of pure colour below it; the SVD may choose −grey
ROTATION = _VH * torch.sign(_VH[:1] @ WEIGHTS.mT)


class Colorize(SVDOperator):
    """y has one channel, the luma of ITU-R BT.601. The SVD rotates the three channels of each pixel."""

    settings = ()

    def forward(self, x: Tensor) -> Tensor:
        return self._mix_channels("weights", WEIGHTS, x)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y * self.cached_like(y, "weights", lambda: WEIGHTS).view(1, 3, 1, 1)

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y.expand(-1, 3, -1, -1)

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns the grey image; the pseudo-inverse would be tinted by the weights of the luma."""
        return self.to_image(y)

    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        return self.cached_like(x, "s", lambda: self.Ut(WEIGHTS.norm().view(1, 1, 1, 1)))

    def Vt(self, x: Tensor) -> Tensor:
        return self._mix_channels("Vt", ROTATION, x)

    def V(self, c: Tensor) -> Tensor:
        return self._mix_channels("V", ROTATION.mT, c)

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return pad(y, (0, 0, 0, 0, 0, 2))

    def U(self, c: Tensor) -> Tensor:
        return c[:, :1]

    def _mix_channels(self, name: str, matrix: Tensor, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.einsum("oc,bchw->bohw", self.cached_like(x, name, lambda: matrix), x)
