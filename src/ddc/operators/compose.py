"""The composition of operators, `A2 @ A1`: y = A2(A1(x))."""

import math
from collections.abc import Hashable, Sequence
from typing import Self

import torch
from torch import Tensor

from ddc.operators.base import LinearOperator, Operator, Sigma, Size, repeat_pixels


class Composition(Operator):
    """`second @ first`: y = A2(A1(x)). Noise falls on the measurement of A2."""

    def __init__(self, second: Operator, first: Operator) -> None:
        super().__init__()
        self.second, self.first = second, first
        self.scale = second.scale * first.scale
        self.local = second.local and first.local
        self.align = math.lcm(first.align, second.align * first.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        size = size or self.image_size(y)
        return self.first.to_image(self.second.to_image(y, self.between(size)), size)

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        size = size or self.image_size(y)
        return self.first.guess(self.second.guess(y, sigma, self.between(size)), sigma, size)

    def prox(self, x: Tensor, y: Tensor, lam: Sigma, iterations: int | None = None) -> Tensor:
        return self.first.prox(x, self.second.prox(self.first(x), y, lam, iterations), lam, iterations)

    def observed(self, y: Tensor, size: Size | None = None) -> Tensor | None:
        observed = self.second.observed(y, self.between(size) if size else None)
        return repeat_pixels(observed, self.first.scale, size) if size and observed is not None else observed

    def unround(self, y: Tensor) -> Tensor:
        return self.second.unround(y)

    def image_size(self, y: Tensor) -> Size:
        return self.first.image_size(torch.empty(1, 1, *self.second.image_size(y), device="meta"))

    def crop(self, top: int, left: int, height: int, width: int) -> Operator:
        scale, rest = self.first.scale, self.between((height, width))
        return self.second.crop(top // scale, left // scale, *rest) @ self.first.crop(top, left, height, width)

    def between(self, size: Size) -> Size:
        """Returns the size of A1's measurement of an image."""
        return -(-size[0] // self.first.scale), -(-size[1] // self.first.scale)

    @property
    def key(self) -> Hashable:
        return type(self), self.second.key, self.first.key

    @property
    def batch_key(self) -> Hashable:
        return type(self), self.second.batch_key, self.first.batch_key

    @classmethod
    def merge(cls, operators: Sequence[Self], device: torch.device) -> Operator:
        seconds, firsts = [one.second for one in operators], [one.first for one in operators]
        return seconds[0].merge(seconds, device) @ firsts[0].merge(firsts, device)


class LinearComposition(LinearOperator, Composition):
    """`second @ first` of two linear operators."""

    second: LinearOperator
    first: LinearOperator
    guess_iterations = 20

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns the guess of A2's measurement at image size, moved to explain y. From x = 0 it would be grey, because
        the singular values of a reduction are small beside the noise."""
        size = size or self.image_size(y)
        start = self.first.to_image(self.second.guess(y, sigma, self.between(size)), size)
        return self.project(start, y, sigma)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        size = size or self.image_size(y)
        return self.first.adjoint(self.second.adjoint(y, self.between(size)), size)
