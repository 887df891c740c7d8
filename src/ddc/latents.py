"""Latent priors: a diffusion model of an autoencoder's latents (Rombach et al. 2022, arXiv 2112.10752).

A folder has vae/ (or vqvae/, as older ones), unet/ and scheduler/, as diffusers writes them. Solvers see latents that are
shifted and scaled to about unit variance, as diffusers does: z = (latents − shift_factor) · scaling_factor.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddc.errors import UserError, shorten
from ddc.networks import check_ranges, diffusers_class, load_network, pad_to_multiple, save_network
from ddc.operators.base import Size
from ddc.priors import Prior, autoencoder_folder, read_prior

CLASSES = ("AutoencoderKL", "VQModel")


class Autoencoder(nn.Module):
    """diffusers' AutoencoderKL or VQModel, from pictures to scaled latents and back."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        config: Any = vae.config
        self.vae: Any = vae
        self.channels = int(config["latent_channels"])
        self.factor = 2 ** (len(config["block_out_channels"]) - 1)  # side of a picture over that of its latents
        self.scale, self.shift = (_number(config, name) for name in ("scaling_factor", "shift_factor"))

    def encode(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, channels, ⌈H/factor⌉, ⌈W/factor⌉): the mean of the latents, or those before quantisation."""
        found = self.vae.encode(pad_to_multiple(x, self.factor))
        latents = found.latents if hasattr(found, "latents") else found.latent_dist.mode()
        return (latents - self.shift) * self.scale

    def decode(self, z: Tensor, size: Size | None = None) -> Tensor:
        """The pictures of latents, cut to `size`."""
        x: Tensor = self.vae.decode(z / self.scale + self.shift).sample
        return x if size is None else x[..., : size[0], : size[1]]

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For training: x again, from latents that are drawn with standard normal noise; their mean and log-variance."""
        before, after = self.vae.quant_conv, self.vae.post_quant_conv
        moments = self.vae.encoder(x)
        mean, log_variance = (moments if before is None else before(moments)).chunk(2, dim=1)
        log_variance = log_variance.clamp(-30, 20)
        latents = mean + (0.5 * log_variance).exp() * noise
        return self.vae.decoder(latents if after is None else after(latents)), mean, log_variance

    @staticmethod
    def from_config(config: dict[str, Any]) -> "Autoencoder":
        """An autoencoder with fresh weights."""
        return Autoencoder(_build(config))

    @staticmethod
    def from_pretrained(folder: str | Path) -> "Autoencoder":
        """Read the folder of an autoencoder."""
        autoencoder = Autoencoder(load_network(folder, build=_build))
        side = 2 * autoencoder.factor
        try:
            with torch.no_grad():
                shape = tuple(autoencoder.decode(autoencoder.encode(torch.zeros(1, 3, side, side))).shape)
        except Exception as error:  # whatever diffusers says of settings that do not fit together
            raise UserError(
                f"the autoencoder in {folder} does not run ({shorten(error)}); check its config.json"
            ) from None
        if shape != (1, 3, side, side):
            raise UserError(f"the autoencoder in {folder} does not return a picture; check its config.json")
        return autoencoder.eval()

    def save_pretrained(self, folder: str | Path, *, state: dict[str, Tensor] | None = None, **options: Any) -> None:
        """Write config.json and safetensors, which diffusers' class reads. `state` is one of this module."""
        own = {name.removeprefix("vae."): tensor for name, tensor in (state or self.state_dict()).items()}
        save_network(self.vae, folder, state=own, **options)


class LatentPrior(Prior):
    """A prior of latents, with the autoencoder that they belong to."""

    def __init__(self, autoencoder: Autoencoder, unet: nn.Module, *schedule: Any) -> None:
        super().__init__(unet, *schedule)
        self.autoencoder = autoencoder
        self.factor = autoencoder.factor
        outputs = int(unet.config["out_channels"])  # type: ignore[index]
        if self.channels != autoencoder.channels or outputs not in (self.channels, 2 * self.channels):
            raise UserError(
                f"the network of this latent prior has {self.channels} input and {outputs} output channels; expected the "
                f"{autoencoder.channels} of its autoencoder's latents"
            )

    def encode(self, x: Tensor) -> Tensor:
        return self.autoencoder.encode(x)

    def decode(self, z: Tensor, size: Size | None = None) -> Tensor:
        return self.autoencoder.decode(z, size)

    @staticmethod
    def from_pretrained(folder: str | Path) -> "LatentPrior":
        """Read a folder with vae/, unet/ and scheduler/."""
        folder = Path(folder)
        place = autoencoder_folder(folder)
        if place is None:
            raise UserError(f"{folder} is not a latent prior: it has no vae/ in it")
        return LatentPrior(Autoencoder.from_pretrained(place), *read_prior(folder)).eval()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write vae/, unet/ and scheduler/; `options` are those of `save_network`, a state is that of the U-Net."""
        super().save_pretrained(folder, **options)
        kept = {name: value for name, value in options.items() if name in ("dtype", "shard_mb")}
        self.autoencoder.save_pretrained(Path(folder, "vae"), **kept)


def _build(config: dict[str, Any]) -> nn.Module:
    """An autoencoder of diffusers with fresh weights."""
    name = config.get("_class_name", "AutoencoderKL")
    if name not in CLASSES:
        raise UserError(f"the autoencoder class {shorten(name)!r} is not known; expected {' or '.join(CLASSES)}")
    check_ranges(config)
    kind = diffusers_class(name)
    try:
        vae: nn.Module = kind.from_config({k: v for k, v in config.items() if k[:1] != "_"})
    except Exception as error:  # whatever diffusers says of settings that do not fit together
        raise UserError(f"{name} cannot be built from this configuration ({shorten(error)})") from None
    channels = (vae.config["in_channels"], vae.config["out_channels"])  # type: ignore[index]
    if channels != (3, 3):
        raise UserError(f"this autoencoder has {channels[0]} input and {channels[1]} output channels; expected 3 and 3")
    return vae


def _number(config: Any, name: str) -> float:
    value = config.get(name)
    if value is None:
        return 1.0 if name == "scaling_factor" else 0.0
    if type(value) not in (int, float) or abs(value) > 1e6 or (name == "scaling_factor" and value < 1e-6):
        raise UserError(f"{name} of an autoencoder is {shorten(value)}; expected a number")
    return float(value)
