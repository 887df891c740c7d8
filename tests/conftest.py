"""Fixtures that several test files use."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton; see test_kernels.py

from ddc.priors import DataConsistency, Prior, schedule_from_config, scheduler_config
from tiny import tiny_unet


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as people have it, prior/ and network/, with tiny random networks."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = scheduler_config(clamp=1.0)
    prior = Prior(tiny_unet(3, seed=0), schedule_from_config(config), clamp=1.0, scheduler_config=config)
    prior.save_pretrained(folder / "prior")
    DataConsistency(tiny_unet(6, seed=1)).save_pretrained(folder / "network")
    return folder
