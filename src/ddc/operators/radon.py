"""Computed tomography: y holds the mean of the image along parallel rays, one row for each angle."""

import math

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.operators.base import LinearOperator, Size, like, size_of


class Radon(LinearOperator):
    """The parallel-beam Radon transform, y of shape (B, C, angles, detectors).

    Each pixel adds its value to the two detectors next to its projection, in proportion to its nearness. The adjoint
    reads these detectors with the same weights. y is the sum divided by the longer side of the image, so that it stays
    within the image's range; the detectors are one pixel wide and cover the diagonal.
    """

    settings = ("size", "angles")

    def __init__(self, size: Size, angles: int = 60) -> None:
        super().__init__()
        if angles < 1:
            raise UserError(f"tomography needs at least one angle, not {angles}")
        self.size, self.angles = (int(size[0]), int(size[1])), int(angles)
        height, width = self.size
        self.detectors = 2 * math.ceil(math.hypot(height, width) / 2) + 1
        theta = torch.arange(angles, dtype=torch.float64) * (math.pi / angles)
        rows = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
        columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
        place = theta.cos().view(-1, 1, 1) * columns - theta.sin().view(-1, 1, 1) * rows.view(-1, 1)
        place = (place + self.detectors // 2).flatten(1)  # (angles, pixels)
        left = place.floor().clamp(0, self.detectors - 2)
        self.register_buffer("left", left.to(torch.int32), persistent=False)
        self.register_buffer("share", (place - left).float(), persistent=False)  # of the detector to the right

    left: Tensor
    share: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.check_size(size_of(x))
        pixels = x.reshape(-1, x.shape[-2] * x.shape[-1])
        empty = x.new_zeros(pixels.shape[0], self.detectors)
        rows = []
        for left, share in zip(self.left, self.share, strict=True):
            detector, right_part = left.long().expand_as(pixels), pixels * like(share, x)
            row = empty.scatter_add(1, detector, pixels - right_part)
            rows.append(row.scatter_add(1, detector + 1, right_part))
        return torch.stack(rows, dim=1).view(*x.shape[:2], self.angles, self.detectors) / max(self.size)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        if tuple(y.shape[-2:]) != (self.angles, self.detectors):
            raise UserError(
                f"this Radon transform has {self.angles} angles and {self.detectors} detectors; the measurement has "
                f"{y.shape[-2]} and {y.shape[-1]}"
            )
        rays = y.reshape(-1, self.angles, self.detectors)
        x = y.new_zeros(rays.shape[0], self.left.shape[1])
        for ray, left, share in zip(rays.unbind(1), self.left, self.share, strict=True):
            x = x + torch.lerp(ray.index_select(1, left), ray.index_select(1, left + 1), like(share, y))
        return x.view(*y.shape[:2], *self.size) / max(self.size)

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        """Returns a reconstruction by a few conjugate gradients, in the place of filtered back-projection."""
        return self.regularised_inverse(y, 1e-3, size, 10)

    def image_size(self, y: Tensor) -> Size:
        return self.size

    def crop(self, top: int, left: int, height: int, width: int) -> "Radon":
        """Returns the operator itself: each ray measures the whole image, which has no windows."""
        self.check_size((height, width))
        return self

    def check_size(self, size: Size) -> None:
        if self.size != tuple(size):
            raise UserError(
                f"this Radon transform is for images of {self.size[1]}×{self.size[0]} pixels, not {size[1]}×{size[0]}; "
                "restore the image as a whole, without tiles"
            )
