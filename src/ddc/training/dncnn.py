"""Training DnCNN (Zhang et al. 2017, arXiv 1608.03981), the denoiser of PnP-ADMM: pictures in [0, 1]."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddc.images import to_internal, to_unit
from ddc.noise import Noise, derive_seed, on_device
from ddc.perceptual import LPIPS
from ddc.solvers.dncnn import DnCNN
from ddc.training.data import Draws
from ddc.training.objectives import Forward, Losses, Objective, figures_of


@dataclass
class DnCNNObjective(Objective):
    """The squared error of the denoised picture, for noise of one level or a range of them."""

    network: DnCNN
    sigma_low: float = 0.1  # in [0, 1] units
    sigma_high: float = 0.1
    lpips: LPIPS | None = None

    def __post_init__(self) -> None:
        self.module = self.network
        self.folder = "dncnn"  # where the solver looks for it

    def prepare(self, device: torch.device) -> None:
        if self.lpips is not None:
            self.lpips.to(device)

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        with torch.no_grad(), torch.autocast(draws.device.type, enabled=False):
            crops, numbers = draws.take(batch)
            clean = to_unit(crops)
            levels = [
                np.random.default_rng((draws.seed, 2, n)).uniform(self.sigma_low, self.sigma_high)
                for n in numbers
            ]
            sigma = on_device(levels, clean.device, torch.float32).view(-1, 1, 1, 1)
            z = Noise(draws.seeds(numbers, "noise"), device=clean.device).normal(clean.shape)
            noisy = clean + sigma * z
        loss = (forward(noisy).float() - clean).square().mean()
        return {"loss": loss, "mse": loss.detach()}

    def model_record(self) -> dict[str, Any]:
        return {"kind": "dncnn", "network": dict(self.network.config)}

    def save(self, folder: Path, state: dict[str, Tensor], **options: Any) -> None:
        self.network.save_pretrained(folder, state=state, **options)

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS at the network's own noise level, before and after."""
        noisy, denoised = self._denoise(crops, names)
        after = figures_of("denoised", denoised, crops, self.lpips)
        return after | figures_of("noisy", noisy, crops, self.lpips)

    def _denoise(self, crops: Tensor, names: list[str]) -> tuple[Tensor, Tensor]:
        z = Noise([derive_seed(0, name) for name in names], device=crops.device).normal(crops.shape)
        noisy = to_unit(crops) + self.network.sigma_y * z
        return to_internal(noisy), to_internal(self.network(noisy).float())

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, with noise, and denoised."""
        return list(torch.stack([crops, *self._denoise(crops, names)], dim=1).unbind(0))
