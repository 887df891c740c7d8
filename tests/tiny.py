"""Tiny networks of the real classes, and a small file that no library here writes."""

import struct
from typing import Any

import numpy as np
import torch

from ddc.latents import Autoencoder, LatentPrior
from ddc.networks import CompactUNet
from ddc.priors import DataConsistency, schedule_from_config, scheduler_config
from ddc.solvers.posterior import CONDITIONS, PosteriorDenoiser

TINY_VAE: dict[str, Any] = {
    "block_out_channels": [8, 8, 16, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}


def filled(unet: CompactUNet) -> CompactUNet:
    """The network ready for use, with small weights in its zero-initialised layers: everything it is told has an effect."""
    for parameter in unet.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return unet.eval().requires_grad_(False)


def tiny_unet(in_channels: int, seed: int, out_channels: int = 3) -> CompactUNet:
    """A small network of the real class."""
    torch.manual_seed(seed)
    unet = CompactUNet(
        in_channels,
        out_channels,
        channels=(8, 16),
        encoder_blocks=(1, 1),
        decoder_blocks=(1,),
        groups=4,
        head_dim=8,
    )
    return filled(unet)


def tiny_posterior() -> PosteriorDenoiser:
    """A small posterior network that is told conditions, with a layer that is large enough to be rounded."""
    torch.manual_seed(0)
    unet = CompactUNet(
        11,
        channels=(8, 24),
        encoder_blocks=(1, 1),
        decoder_blocks=(1,),
        groups=4,
        head_dim=8,
        middle_blocks=1,
        attention_levels=(0,),
        conditions=CONDITIONS,
    )
    return PosteriorDenoiser(filled(unet))


def tiny_network() -> DataConsistency:
    """A small network like the shipped one, with a layer that is large enough to be rounded."""
    torch.manual_seed(0)
    unet = CompactUNet(11, channels=(8, 24), encoder_blocks=(1, 1), decoder_blocks=(1,), groups=4, head_dim=8)
    return DataConsistency(filled(unet), ("wiener", "projection", "mask", "sigma"), "blend")


def small_diffusers(**options: Any) -> Any:
    """A small UNet2DModel of diffusers."""
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
        **options,
    ).eval()


def tiny_latent_prior(channels: int = 4) -> LatentPrior:
    """A small latent prior of diffusers' classes, 8×."""
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    vae = AutoencoderKL(**TINY_VAE, latent_channels=channels, scaling_factor=0.7, shift_factor=0.1)
    unet = small_diffusers(in_channels=channels, out_channels=channels)
    config = scheduler_config(prediction_type="v_prediction")
    prior = LatentPrior(Autoencoder(vae), unet, schedule_from_config(config), "v_prediction", None, config)
    return prior.eval().requires_grad_(False)


def lzw_tiff(pixels: np.ndarray, photometric: int | None = None, orientation: int = 1) -> bytes:
    """A 16-bit TIFF compressed with LZW; the table is cleared so often that every code is a literal of 9 bits."""
    height, width, channels = pixels.shape
    data = pixels.astype("<u2").tobytes()
    codes = [code for i in range(0, len(data), 200) for code in (256, *data[i : i + 200])]
    bits = "".join(f"{code:09b}" for code in [*codes, 257])
    bits += "0" * (-len(bits) % 8)
    strip = int(bits, 2).to_bytes(len(bits) // 8, "big")
    strip += b"\0" * (len(strip) % 2)
    colour = (2 if channels >= 3 else 1) if photometric is None else photometric
    tags = {256: width, 257: height, 258: 16, 259: 5, 262: colour, 273: 8, 274: orientation, 277: channels}
    tags |= {278: height, 279: len(strip), 284: 1} | ({338: 2} if channels in (2, 4) else {})
    directory = 8 + len(strip)
    depths = directory + 2 + 12 * len(tags) + 4  # 16, once for each channel
    entries = b""
    for tag, value in tags.items():
        if tag == 258 and channels > 2:
            entries += struct.pack("<HHII", tag, 3, channels, depths)
        elif tag == 258:
            entries += struct.pack("<HHIHH", tag, 3, channels, 16, 16 if channels == 2 else 0)
        else:
            entries += struct.pack("<HHII", tag, 4, 1, value)
    head = b"II*\0" + struct.pack("<I", directory) + strip + struct.pack("<H", len(tags))
    return head + entries + b"\0\0\0\0" + struct.pack(f"<{channels}H", *[16] * channels)
