"""A tiny network of the real class."""

import torch

from ddc.networks import CompactUNet


def tiny_unet(in_channels: int, seed: int, out_channels: int = 3) -> CompactUNet:
    """A small network of the real class. Its zero-initialised layers are given small weights, so that
    everything it is told has an effect."""
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
    for parameter in unet.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return unet.eval().requires_grad_(False)
