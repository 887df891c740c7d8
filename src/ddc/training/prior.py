"""Training a prior: DDPM (2006.11239) with ε, v or x0 as the target, and optionally a learned variance."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.networks import build_network
from ddc.noise import Noise, on_device
from ddc.presets import PRIORS, preset
from ddc.priors import Prior, schedule_from_config, scheduler_config
from ddc.schedule import Schedule
from ddc.training.data import Draws
from ddc.training.objectives import Forward, Losses, Objective, call, figures_of
from ddc.training.settings import PriorSettings

VARIATIONAL_WEIGHT = 1e-3  # of the bound that trains a learned variance (2102.09672, L_hybrid)


@dataclass
class PriorObjective(Objective):
    """MSE of the target with min-SNR-γ weights (2303.09556); `snr_gamma` 0 is the plain loss of the target."""

    settings: PriorSettings
    prior: Prior

    def __post_init__(self) -> None:
        self.module, self.model = self.prior.unet, self.prior

    @classmethod
    def from_settings(cls, settings: PriorSettings) -> "PriorObjective":
        prediction, clamp, learned = settings.prediction, settings.clamp, settings.learned_variance
        scheduler = scheduler_config(1000, settings.beta_schedule, prediction, clamp, learned)
        if settings.init is None:
            outputs = {"in_channels": 3, "out_channels": 6 if learned else 3}
            unet = build_network(preset(settings.network, PRIORS) | outputs)
        else:
            start = Prior.from_pretrained(settings.init)
            unet, then = start.unet, start.scheduler_config
            keys = ("num_train_timesteps", "beta_schedule", "prediction_type", "variance_type")
            different = [
                f"{key} was {then[key]} and is {scheduler[key]}"
                for key in keys
                if key in then and then[key] != scheduler[key]
            ]
            if different:
                raise UserError(
                    f"the prior in {settings.init} was trained otherwise: {'; '.join(different)}. Use the same "
                    "options, or leave --init out"
                )
        return cls(settings, Prior(unet, schedule_from_config(scheduler), prediction, clamp, scheduler))

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
        snr = (a / (1 - a)).flatten()
        target, scale = {
            "epsilon": (z, snr),
            "v_prediction": (a.sqrt() * z - (1 - a).sqrt() * x0, snr + 1),
            "sample": (x0, torch.ones_like(snr)),
        }[self.prior.prediction_type]
        error = (raw - target).square().mean(dim=(1, 2, 3))
        gamma = self.settings.snr_gamma
        weights = snr.clamp(max=gamma) / scale if gamma else torch.ones_like(snr)
        loss = (weights * error).mean()
        terms = {"mse": error.mean().detach()}
        if v is not None:
            bound = variational_bound(schedule, x0, x, self._x0(x, raw.detach(), a), t, v)
            loss = loss + VARIATIONAL_WEIGHT * bound
            terms["bound"] = bound.detach()
        return {"loss": loss, **terms}

    def _x0(self, x: Tensor, raw: Tensor, a: Tensor) -> Tensor:
        if self.prior.prediction_type == "epsilon":
            return (x - (1 - a).sqrt() * raw) / a.sqrt()
        return a.sqrt() * x - (1 - a).sqrt() * raw if self.prior.prediction_type == "v_prediction" else raw

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR of x̂0 at the timesteps that a run of five steps visits."""
        n = self.prior.schedule.train_steps
        return {
            f"psnr_t{t}": figures_of("x0", self._denoise(crops, t)[1], crops, None)["x0/psnr"]
            for t in (n // 5, 2 * n // 5, 3 * n // 5, 4 * n // 5)
        }

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


def variational_bound(schedule: Schedule, x0: Tensor, x: Tensor, x0_hat: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """KL(q(x_{t−1} | x_t, x_0) ‖ p(x_{t−1} | x_t)) in bits per number; t = 0 is left out (its q has no width)."""
    s = t - 1
    mean_q = schedule.posterior_mean(x, x0, t, s)
    mean_p = schedule.posterior_mean(x, x0_hat, t, s)
    std_q = schedule.posterior_std(x, t, s).clamp(min=1e-10)
    std_p = schedule.posterior_std(x, t, s, v).clamp(min=1e-10)
    kl = (std_p / std_q).log() + (std_q**2 + (mean_q - mean_p) ** 2) / (2 * std_p**2) - 0.5
    per_image = kl.mean(dim=(1, 2, 3)) / math.log(2.0)
    return torch.where(t > 0, per_image, torch.zeros_like(per_image)).mean()
