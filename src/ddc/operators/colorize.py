"""Colourisation: the measurement is the grey image. Demosaicking: it has one colour at each pixel."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.errors import UserError
from ddc.operators.base import LinearOperator, Sigma, Size, SVDOperator

GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601


class Colorize(SVDOperator):
    """y has one channel, the luma of ITU-R BT.601, or other weights: DDRM and DDNM take a third of each channel. The SVD
    rotates the three channels of each pixel."""

    settings = ("grey",)
    local = True

    def __init__(self, grey: Sequence[float] = GREY) -> None:
        super().__init__()
        self.grey = tuple(float(weight) for weight in grey)
        if len(self.grey) != 3 or not all(map(math.isfinite, self.grey)) or not any(self.grey):
            raise UserError(f"the weights of grey are {self.grey}; expected three numbers, such as {GREY}")
        self.weights = torch.tensor([self.grey], dtype=torch.float64)
        basis = torch.linalg.svd(self.weights, full_matrices=True).Vh
        # (3, 3): the unit vector of grey in the first row, two directions of pure colour below; the SVD may choose −grey
        self.rotation = basis * torch.sign(basis[:1] @ self.weights.mT)

    def forward(self, x: Tensor) -> Tensor:
        return self._mix_channels("weights", self.weights, x)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y * self.cached_like(y, "weights", lambda: self.weights).view(1, 3, 1, 1)

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y.expand(-1, 3, -1, -1)

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns the grey image; the pseudo-inverse would be tinted by the weights of the luma."""
        return self.to_image(y)

    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        return self.cached_like(x, "s", lambda: self.Ut(self.weights.norm().view(1, 1, 1, 1)))

    def Vt(self, x: Tensor) -> Tensor:
        return self._mix_channels("Vt", self.rotation, x)

    def V(self, c: Tensor) -> Tensor:
        return self._mix_channels("V", self.rotation.mT, c)

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return pad(y, (0, 0, 0, 0, 0, 2))

    def U(self, c: Tensor) -> Tensor:
        return c[:, :1]

    def _mix_channels(self, name: str, matrix: Tensor, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.einsum("oc,bchw->bohw", self.cached_like(x, name, lambda: matrix), x)


class Bayer(LinearOperator):
    """y has one channel: at each pixel red, green or blue, in squares of red and green above green and blue."""

    settings = ()
    align = 2
    local = True

    def forward(self, x: Tensor) -> Tensor:
        return (x * self._pattern(x)).sum(1, keepdim=True)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y * self._pattern(y)

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y.expand(-1, 3, -1, -1)

    def _pattern(self, x: Tensor) -> Tensor:
        """Returns the colours (1, 3, H, W), 1 where one is measured."""
        height, width = x.shape[-2:]

        def make() -> Tensor:
            rows, columns = torch.arange(height).view(-1, 1) % 2, torch.arange(width) % 2
            return torch.stack([rows + columns == 0, rows + columns == 1, rows + columns == 2]).double()[None]

        return self.cached_like(x, ("pattern", height, width), make)
