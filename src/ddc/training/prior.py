"""Training a prior: DDPM (2006.11239) with ε, v or x0 as the target, and optionally a learned variance."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddc.networks import network_config
from ddc.noise import Noise, on_device
from ddc.priors import Prior
from ddc.schedule import Schedule
from ddc.training.data import Draws
from ddc.training.objectives import Forward, Losses, Objective, call, figures_of


@dataclass
class PriorObjective(Objective):
    """MSE of the target with min-SNR-γ weights (2303.09556); `snr_gamma` None is the plain ε loss."""

    prior: Prior
    snr_gamma: float | None = 5.0
    variational_weight: float = 1e-3  # of the bound that trains a learned variance (2102.09672, L_hybrid)

    def __post_init__(self) -> None:
        self.module = self.prior.unet

    def prepare(self, device: torch.device) -> None:
        if device.type == "cuda":  # a table on the CPU would be copied at each use, and each copy waits
            self.prior.schedule = Schedule(self.prior.schedule.alpha_bars.to(device))

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        x0, numbers = draws.take(batch)
        schedule = self.prior.schedule
        t = on_device(draws.times(numbers, schedule.train_steps), x0.device, torch.int64)
        z = Noise(draws.seeds(numbers, "noise"), device=x0.device).normal(x0.shape)
        x = schedule.add_noise(x0, t, z)
        raw = call(forward, x, t).float()
        v = None
        if self.prior.learns_variance:
            raw, v_raw = raw.chunk(2, dim=1)
            v = ((v_raw + 1) / 2).clamp(0, 1)
        a = schedule.alpha_bar(t, x0)
        target = {
            "epsilon": z,
            "v_prediction": a.sqrt() * z - (1 - a).sqrt() * x0,
            "sample": x0,
        }[self.prior.prediction_type]
        error = (raw - target).square().mean(dim=(1, 2, 3))
        loss = (self._weights(a.flatten()) * error).mean()
        terms = {"mse": error.mean().detach()}
        if v is not None:
            prediction = raw.detach()
            bound = variational_bound(schedule, x0, x, self._x0(x, prediction, a), t, v)
            loss = loss + self.variational_weight * bound
            terms["bound"] = bound.detach()
        return {"loss": loss, **terms}

    def _x0(self, x: Tensor, raw: Tensor, a: Tensor) -> Tensor:
        if self.prior.prediction_type == "epsilon":
            return (x - (1 - a).sqrt() * raw) / a.sqrt()
        return a.sqrt() * x - (1 - a).sqrt() * raw if self.prior.prediction_type == "v_prediction" else raw

    def _weights(self, a: Tensor) -> Tensor:
        if self.snr_gamma is None:
            return torch.ones_like(a)
        snr = a / (1 - a)
        clipped = snr.clamp(max=self.snr_gamma)
        return (
            clipped
            / {"epsilon": snr, "v_prediction": snr + 1, "sample": torch.ones_like(snr)}[
                self.prior.prediction_type
            ]
        )

    def model_record(self) -> dict[str, Any]:
        return {
            "kind": "prior",
            "network": network_config(self.prior.unet),
            "scheduler": self.prior.scheduler_config,
        }

    def save(self, folder: Path, state: dict[str, Tensor], **options: Any) -> None:
        self.prior.save_pretrained(folder, state=state, **options)

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR of x̂0 at the timesteps that a run of five steps visits."""
        figures: dict[str, list[float]] = {}
        n = self.prior.schedule.train_steps
        for t in (n // 5, 2 * n // 5, 3 * n // 5, 4 * n // 5):
            x0 = self._denoise(crops, t)[1]
            figures[f"psnr_t{t}"] = figures_of("x0", x0, crops, None)["x0/psnr"]
        return figures

    def _denoise(self, crops: Tensor, t: int) -> tuple[Tensor, Tensor]:
        z = Noise([t + i for i in range(len(crops))], device=crops.device).normal(crops.shape)
        x = self.prior.schedule.add_noise(crops, t, z)
        return x, self.prior.predict(x, t).x0.float()

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, and x_t with x̂0 at two noise levels."""
        n = self.prior.schedule.train_steps
        columns = [crops, *self._denoise(crops, n // 5), *self._denoise(crops, 3 * n // 5)]
        return list(torch.stack(columns, dim=1).unbind(0))


def variational_bound(
    schedule: Schedule, x0: Tensor, x: Tensor, x0_hat: Tensor, t: Tensor, v: Tensor
) -> Tensor:
    """KL(q(x_{t−1} | x_t, x_0) ‖ p(x_{t−1} | x_t)) in bits per number; t = 0 is left out (its q has no width)."""
    s = t - 1
    mean_q = schedule.posterior_mean(x, x0, t, s)
    mean_p = schedule.posterior_mean(x, x0_hat, t, s)
    std_q = schedule.posterior_std(x, t, s).clamp(min=1e-10)
    std_p = schedule.posterior_std(x, t, s, v).clamp(min=1e-10)
    kl = (std_p / std_q).log() + (std_q**2 + (mean_q - mean_p) ** 2) / (2 * std_p**2) - 0.5
    per_image = kl.mean(dim=(1, 2, 3)) / math.log(2.0)
    return torch.where(t > 0, per_image, torch.zeros_like(per_image)).mean()
