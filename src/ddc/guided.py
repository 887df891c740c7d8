"""diffusers' UNet2DModel with the further options of guided-diffusion's U-Net.

A converted checkpoint is a plain UNet2DModel if possible. This class is for the others: a number of heads instead of a
width per head, and a first level that is not as wide as the time embedding (channel_mult 0.5, 1, … at 512×512).
"""

from typing import Any

from diffusers import UNet2DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import TimestepEmbedding, Timesteps


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
