"""ddc convert: guided-diffusion's .pt to a model folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Convert:
    """Turn a guided-diffusion checkpoint into a model folder with safetensors."""

    checkpoint: Positional[Path]
    """The .pt file: 256x256_diffusion_uncond.pt, RePaint's CelebA-HQ network, or another of the family."""
    out: Positional[Path]
    """The folder to write; new or empty."""
    head_channels: int = 64
    """Channels per attention head, as the 64, 256 and 512 pixel models have."""
    num_heads: int | None = None
    """Attention heads, for models trained with a number of heads instead (128x128_diffusion.pt: 4)."""
    num_heads_upsample: int | None = None
    """Attention heads on the way up, where they differ from num-heads."""
    new_attention_order: bool = False
    """Queries, keys and values packed by kind, as in 64x64_diffusion.pt."""
    noise_schedule: Literal["linear", "cosine"] = "linear"
    """The noise schedule of the training."""
    diffusion_steps: int = 1000
    """The length of that schedule."""
    predict_xstart: bool = False
    """The network predicts the clean image instead of the noise."""
    image_size: int = 256
    """The size of the training images."""
    class_label: int | None = None
    """For a class-conditional checkpoint: the class whose prior to write."""

    def run(self) -> int:
        from dataclasses import asdict

        from ddc.convert import convert

        options = asdict(self)
        checkpoint, out = options.pop("checkpoint"), options.pop("out")
        convert(checkpoint, out, **options)
        print(out)
        return 0
