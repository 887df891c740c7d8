"""PnP-ADMM (Chan, Wang and Elgendy 2016, arXiv 1605.01710): ADMM with a denoiser as its proximal step.

It works on pictures in [0, 1], for which the denoiser is trained, a DnCNN (Zhang et al. 2017, arXiv 1608.03981) without
batch normalisation: an image's result does not depend on its neighbours in the batch.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.images import to_internal
from ddc.networks import check_ranges, load_network, read_config, save_network
from ddc.operators.base import conjugate_gradient
from ddc.solvers.base import Run, Solver


class DnCNN(nn.Module):
    """`depth` 3×3 convolutions with ReLU between them; they predict the noise, which is taken away."""

    def __init__(self, depth: int = 17, width: int = 64, sigma_y: float = 0.1) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"depth": depth, "width": width, "sigma_y": sigma_y}
        check_ranges(self.config)
        if type(sigma_y) not in (int, float) or not 0 <= sigma_y <= 1:
            raise UserError(f"sigma_y of a DnCNN is {sigma_y!r}; expected a number from 0 to 1")
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
        network = load_network(folder, config, lambda config: DnCNN(**config))
        assert isinstance(network, DnCNN)
        return network

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        save_network(self, folder, **options)


@dataclass(frozen=True)
class PnPADMM(Solver):
    """Plug-and-play ADMM with a DnCNN: linear operators, no diffusion prior."""

    name = "pnp-admm"
    needs = ("denoiser",)

    steps: int = 10
    """Iterations."""
    rho: float = 0.05
    """The penalty ρ that ties the picture to its denoised copy."""
    cg_iterations: int = 50
    """Largest number of conjugate-gradient iterations in each x step."""

    def __post_init__(self) -> None:
        self.check_settings()

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        denoise, A, rho = run.parts["denoiser"], run.A, self.rho
        ones = torch.ones(run.shape, dtype=run.y.dtype, device=run.y.device)
        y = (run.y + A(ones)) / 2  # A x in [0, 1], because A is linear

        x = A.adjoint(y, run.size)
        b, v, u = x, x, torch.zeros_like(x)
        for _ in run.steps([(t, t - 1) for t in reversed(range(self.steps))]):
            # argmin ½‖Ax − y‖² + (ρ/2)‖x − v + u‖²
            x = conjugate_gradient(
                lambda p: A.adjoint(A(p), run.size) + rho * p, b + rho * (v - u), x, self.cg_iterations
            )
            v = denoise(x + u).to(x.dtype)
            u = u + x - v
            run.show(to_internal(x))
        return to_internal(x)
