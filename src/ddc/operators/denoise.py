"""Denoising: the whole picture is measured, with noise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.operators.base import Sigma, Size, SVDOperator


@dataclass(frozen=True)
class Denoise(SVDOperator):
    """The identity."""

    def singular_values(self, size: Size, like: Tensor) -> Tensor:
        return torch.ones(1, 1, 1, 1, dtype=like.dtype, device=like.device)

    def Vt(self, x: Tensor) -> Tensor:
        return x

    def V(self, c: Tensor) -> Tensor:
        return c

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y

    def U(self, c: Tensor) -> Tensor:
        return c

    def wiener(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        return y
