"""FFDNet for colour pictures (Zhang and others, 1710.04026): a network that removes noise of a given strength."""

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pixels = np.ndarray[Any, Any]


class FFDNet(nn.Module):
    """Twelve convolutions at half the size, of four pixels in one and a map of σ. The weights are those of KAIR."""

    def __init__(self, width: int = 96, depth: int = 12) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(13, width, 3, padding=1)]
        for _ in range(depth - 2):
            layers += [nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        self.model = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(width, 12, 3, padding=1))

    @classmethod
    def from_file(cls, path: Path) -> Self:
        network = cls()
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return network.eval()

    def forward(self, x: Tensor, sigma: float) -> Tensor:
        """Returns pictures in [0, 1] without their noise of standard deviation σ."""
        height, width = x.shape[-2:]
        packed = F.pixel_unshuffle(F.pad(x, (0, width % 2, 0, height % 2), mode="replicate"), 2)
        strength = packed.new_full((len(x), 1, *packed.shape[-2:]), sigma)
        return F.pixel_shuffle(self.model(torch.cat([packed, strength], 1)), 2)[..., :height, :width]

    @torch.no_grad()
    def denoised(self, pixels: Pixels, sigma: float) -> Pixels:
        """Returns a picture in 8-bit levels without its noise."""
        x = torch.from_numpy(pixels / 255).float().permute(2, 0, 1)[None]
        return np.rint(255 * self(x, sigma).clamp(0, 1)[0].permute(1, 2, 0).numpy()).astype(np.uint8)
