"""DnCNN (Zhang et al. 2017, arXiv 1608.03981): the denoiser of PnP-ADMM, for pictures in [0, 1].

Batch normalisation is left out: trained for one noise level the network does without it, and then an image's
result does not depend on its neighbours in the batch, in training either.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.networks import read_config, read_weights, save_network


class DnCNN(nn.Module):
    """`depth` 3×3 convolutions with ReLU between them; they predict the noise, which is taken away."""

    def __init__(self, depth: int = 17, width: int = 64, sigma_y: float = 0.1) -> None:
        super().__init__()
        if depth < 2:
            raise UserError(f"a DnCNN has at least 2 layers, not {depth}")
        self.config: dict[str, Any] = {"depth": depth, "width": width, "sigma_y": sigma_y}
        self.sigma_y = sigma_y  # the noise it is trained for, in [0, 1] units
        widths = [3, *[width] * (depth - 1), 3]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        nn.init.zeros_(self.layers[-1].weight)  # type: ignore[arg-type]  # it begins as the identity

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 3, H, W) with noise → without."""
        h = x
        for layer in self.layers[:-1]:
            h = F.relu(layer(h))
        return x - self.layers[-1](h)

    @staticmethod
    def from_pretrained(folder: str | Path) -> "DnCNN":
        """Read config.json and safetensors, in float32 and eval mode. A missing weight is an error."""
        folder = Path(folder)
        config = {k: v for k, v in read_config(folder).items() if not k.startswith("_")}
        if set(config) - {"depth", "width", "sigma_y"}:
            raise UserError(f"{folder} is not a DnCNN: its config.json should hold depth, width and sigma_y")
        network = DnCNN(**config)
        try:
            network.load_state_dict({name: tensor.float() for name, tensor in read_weights(folder).items()})
        except RuntimeError:
            raise UserError(
                f"the weights in {folder} do not fit its config.json; copy the folder again, or train it "
                "with `ddc train dncnn`"
            ) from None
        return network.eval().requires_grad_(False)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        save_network(self, folder, **options)
