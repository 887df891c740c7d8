"""The speed of training that `ddc bench --training` reports."""

from pathlib import Path

import torch

from ddc.pipeline import RestorationPipeline
from ddc.training.speed import training_speed


def test_training_is_measured_and_changes_the_network(tiny_model: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    assert pipe.network is not None
    before = [p.clone() for p in pipe.network.requires_grad_(True).parameters()]
    assert training_speed(pipe.prior, pipe.network, batch=2, size=32, compile=False) > 0
    assert not all(torch.equal(a, b) for a, b in zip(before, pipe.network.parameters(), strict=True))
