"""Training DnCNN (Zhang et al. 2017, arXiv 1608.03981), the denoiser of PnP-ADMM: pictures in [0, 1]."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.images import to_internal, to_unit
from ddc.models import PARTS
from ddc.noise import Noise, derive_seed, on_device
from ddc.perceptual import LPIPS
from ddc.problems import check_sigma
from ddc.solvers.dncnn import DnCNN
from ddc.training.data import Draws
from ddc.training.objectives import Forward, Losses, Objective, figures_of
from ddc.training.settings import DnCNNSettings


@dataclass
class DnCNNObjective(Objective):
    """The squared error of the denoised picture, for one noise level or a range of them."""

    settings: DnCNNSettings
    network: DnCNN
    lpips: LPIPS | None = None

    def __post_init__(self) -> None:
        self.module = self.model = self.network
        self.folder = PARTS["denoiser"]  # where the solver looks for it
        high, low = self.settings.sigma, self.settings.sigma_low
        self.levels = (high if low is None else low, high)
        for level in self.levels:
            check_sigma(level)
        if self.levels[0] > high:
            raise UserError(f"--sigma-low {low} lies above --sigma {high}; give the smaller number there")

    @classmethod
    def from_settings(cls, settings: DnCNNSettings) -> "DnCNNObjective":
        if settings.init is not None:
            network = DnCNN.from_pretrained(settings.init)
        else:
            network = DnCNN(settings.depth, settings.width, settings.sigma)
        return cls(settings, network, LPIPS("alex"))

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        with torch.no_grad(), torch.autocast(draws.device.type, enabled=False):
            crops, numbers = draws.take(batch)
            clean = to_unit(crops)
            levels = [np.random.default_rng((draws.seed, 2, n)).uniform(*self.levels) for n in numbers]
            sigma = on_device(levels, clean.device, torch.float32).view(-1, 1, 1, 1)
            z = Noise(draws.seeds(numbers, "noise"), device=clean.device).normal(clean.shape)
            noisy = clean + sigma * z
        loss = (forward(noisy).float() - clean).square().mean()
        return {"loss": loss, "mse": loss.detach()}

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
        """Truth, noisy, and denoised."""
        return list(torch.stack([crops, *self._denoise(crops, names)], dim=1).unbind(0))
