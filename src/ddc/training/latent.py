"""Training a latent prior: first an autoencoder, then a prior of its latents (Rombach et al. 2022, arXiv 2112.10752)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddc.cuda import write_out_norms
from ddc.errors import UserError
from ddc.latents import Autoencoder, LatentPrior
from ddc.networks import unet_size_multiple
from ddc.noise import Noise
from ddc.perceptual import LPIPS, rolled
from ddc.priors import read_preset
from ddc.training.data import Draws
from ddc.training.objectives import Forward, Losses, Objective, PriorObjective, figures_of, new_prior
from ddc.training.settings import AutoencoderSettings, LatentSettings

MOMENT_RATE = 0.01  # of the running mean and mean square of the latents


@dataclass
class AutoencoderObjective(Objective):
    """Mean absolute error, LPIPS, and the KL divergence of the latents from N(0, I)."""

    settings: AutoencoderSettings
    autoencoder: Autoencoder
    lpips: LPIPS | None = None
    folder = "vae"  # as a latent prior has it

    def __post_init__(self) -> None:
        self.module = self.model = self.autoencoder
        if type(self.autoencoder.vae).__name__ != "AutoencoderKL":
            raise UserError(
                "only an AutoencoderKL can be trained; a VQModel can be used, as the folder vae/ of a prior"
            )
        check_crop(self.settings.crop, self.autoencoder.factor)
        self.moments = torch.tensor([[0.0, 1.0]])  # the mean of the latents and of their squares, on the device

    @classmethod
    def from_settings(cls, settings: AutoencoderSettings) -> "AutoencoderObjective":
        if settings.init is not None:
            autoencoder = Autoencoder.from_pretrained(settings.init)
        else:
            autoencoder = Autoencoder.from_config(read_preset("autoencoder", settings.network))
        return cls(settings, autoencoder, LPIPS("alex"))

    def prepare(self, device: torch.device) -> None:
        self.moments = self.moments.to(device)

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        settings, factor = self.settings, self.autoencoder.factor
        crops, numbers = draws.take(batch)
        side = settings.crop // factor
        noise = draws.noise(numbers, (batch, self.autoencoder.channels, side, side))
        x, mean, log_variance = (one.float() for one in forward(crops, noise))
        absolute = (x - crops).abs().mean()
        variance = log_variance.exp()
        kl = 0.5 * (mean.square() + variance - 1 - log_variance).mean()
        loss = absolute + settings.w_kl * kl
        terms = {"absolute": absolute.detach(), "kl": kl.detach()}
        if self.lpips is not None and settings.w_lpips:
            distance = self.lpips(*rolled(step, settings.lpips_shift, x, crops)).mean()
            loss = loss + settings.w_lpips * distance
            terms["lpips"] = distance.detach()
        with torch.no_grad():
            seen = torch.stack([mean.mean(), mean.square().mean()]).view(1, 2)
            self.moments = self.moments.lerp(seen, max(MOMENT_RATE, 1 / (step + 1)))
        return {"loss": loss, **terms}

    def remarks(self) -> dict[str, Any]:
        """The shift and scale that give the latents the mean 0 and the variance 1."""
        mean, square = self.moments[0].tolist()
        return {"shift_factor": mean, "scaling_factor": max(square - mean**2, 1e-12) ** -0.5}

    def tensors(self) -> dict[str, Tensor]:
        return {"moments": self.moments}

    def restore(self, tensors: dict[str, Tensor], draws: Draws) -> None:
        self.moments = tensors["moments"].float()

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS of pictures that were encoded and decoded."""
        return figures_of("reconstruction", self._again(crops), crops, self.lpips)

    def _again(self, crops: Tensor) -> Tensor:
        return self.autoencoder.decode(self.autoencoder.encode(crops)).float()

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, and the picture that was encoded and decoded."""
        return list(torch.stack([crops, self._again(crops)], dim=1).unbind(0))


def check_crop(crop: int, multiple: int) -> None:
    if crop % multiple:
        raise UserError(
            f"--crop is {crop}; expected a multiple of {multiple}, because the networks halve pictures so often"
        )


@dataclass
class LatentObjective(PriorObjective):
    """A prior of latents: the loss of a prior of pictures. A frozen encoder computes the latents of each batch."""

    settings: LatentSettings
    prior: LatentPrior
    lpips: LPIPS | None = None  # for validation alone

    def __post_init__(self) -> None:
        super().__post_init__()
        check_crop(self.settings.crop, self.prior.factor * unet_size_multiple(self.prior.unet))

    @classmethod
    def from_settings(cls, settings: LatentSettings) -> "LatentObjective":  # type: ignore[override]
        autoencoder = Autoencoder.from_pretrained(settings.autoencoder)
        parts = new_prior(settings, "latent", autoencoder.channels, LatentPrior)
        objective = cls(settings, LatentPrior(autoencoder, *parts), LPIPS("alex"))
        if settings.compile:
            write_out_norms(autoencoder.vae.encoder).compile(dynamic=False)
        return objective

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        autoencoder = self.prior.autoencoder.to(device).requires_grad_(False)
        if device.type == "cuda":
            autoencoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def frozen(self) -> dict[str, nn.Module]:
        return {"autoencoder": self.prior.autoencoder}

    def take(self, draws: Draws, batch: int) -> tuple[Tensor, list[int]]:
        numbers, each = draws.advance(batch), self.settings.draws_per_picture
        with torch.no_grad():
            latents = self.prior.encode(draws.crops(numbers[::each])).float()
        return latents.repeat_interleave(each, dim=0)[:batch], numbers

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR of the decoded ẑ0 at the timesteps of five steps, and PSNR and LPIPS of the autoencoder, their ceiling."""
        again = self.prior.decode(self.prior.encode(crops)).float()
        return super().validate(crops, names) | figures_of("autoencoder", again, crops, self.lpips)

    def _denoise(self, crops: Tensor, t: int) -> tuple[Tensor, Tensor]:
        z0 = self.prior.encode(crops).float()
        noise = Noise([t + i for i in range(len(crops))], device=crops.device).normal(z0.shape)
        z = self.prior.schedule.add_noise(z0, t, noise)
        return self.prior.decode(z).float(), self.prior.decode(self.prior.predict(z, t).x0).float()
