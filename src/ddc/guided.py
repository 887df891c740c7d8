"""diffusers' UNet2DModel with the further options of guided-diffusion's U-Net.

A converted checkpoint is a plain UNet2DModel if possible. This class is for the others: a number of heads instead of a
width per head, and a first level that is not as wide as the time embedding (channel_mult 0.5, 1, … at 512×512).
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from torch import nn

from ddc.errors import UserError, shorten
from ddc.networks import check_ranges, run_unet, unet_size_multiple


class GuidedUNet(UNet2DModel):
    """UNet2DModel with `num_heads` per attention (`num_heads_upsample` on the way up) and `time_channels`."""

    def __init__(
        self,
        num_heads: int | None = None,
        num_heads_upsample: int | None = None,
        time_channels: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.register_to_config(num_heads=num_heads, num_heads_upsample=num_heads_upsample, time_channels=time_channels)
        if time_channels is not None:
            self.time_proj = Timesteps(time_channels, flip_sin_to_cos=True, downscale_freq_shift=0)
            self.time_embedding = TimestepEmbedding(time_channels, settings["time_embedding_dim"])
        for name, module in self.named_modules():
            heads = num_heads_upsample if name.startswith("up_blocks") and num_heads_upsample else num_heads
            if heads is not None and isinstance(module, Attention):
                module.heads = heads


def diffusers_network(name: str, settings: dict[str, Any]) -> nn.Module:
    """A UNet2DModel or GuidedUNet with fresh weights, from settings that were checked."""
    check_ranges(settings)
    if settings.get("class_embed_type") is not None:
        raise UserError("this UNet2DModel is conditioned on times or vectors as classes; use an unconditional model")
    if settings.get("num_class_embeds") is not None:
        choice = "choose one of its classes with `ddc convert FOLDER OUT --class-label N`"
        raise UserError(f"this UNet2DModel is class-conditional and a prior is not; {choice}")
    try:
        return UNet2DModel.from_config(settings) if name == "UNet2DModel" else GuidedUNet(**settings)
    except Exception as error:  # whatever diffusers says of settings that do not fit together
        raise UserError(f"{name} cannot be built from this configuration ({shorten(error)})") from None


def try_out(network: nn.Module, folder: Path) -> None:
    """Refuse a network of diffusers whose settings of the wrong type show only when it runs."""
    side = 2 * unet_size_multiple(network)  # GroupNorm refuses single pixels
    config: Any = network.config
    x = torch.zeros(1, config["in_channels"], side, side)
    try:
        with torch.no_grad():
            shape = tuple(run_unet(network, x, 1).shape)
    except Exception as error:
        raise UserError(f"the network in {folder} does not run ({shorten(error)}); check its config.json") from None
    if shape != (1, config["out_channels"], side, side):
        raise UserError(f"the network in {folder} does not return a picture; check its config.json")
