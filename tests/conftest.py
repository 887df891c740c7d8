"""Fixtures that several test files use."""

from pathlib import Path

import pytest
import torch

from ddc.consistency import DataConsistency
from ddc.networks import CompactUNet
from ddc.priors import Prior, schedule_from_config, scheduler_config


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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as people have it, prior/ and network/, with tiny random networks."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = scheduler_config(clamp=1.0)
    prior = Prior(tiny_unet(3, seed=0), schedule_from_config(config), clamp=1.0, scheduler_config=config)
    prior.save_pretrained(folder / "prior")
    DataConsistency(tiny_unet(6, seed=1)).save_pretrained(folder / "network")
    return folder
