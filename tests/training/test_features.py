"""The distance in the prior's own features."""

from pathlib import Path

import pytest
import torch
from training_parts import tiny, tiny_objective

from ddc.datasets import Pool, find_sources
from ddc.errors import UserError
from ddc.perceptual import unit_length
from ddc.training.data import Draws
from ddc.training.ddc import PriorFeatures


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(2, 3, 32, 32, generator=generator) * 2 - 1 for _ in range(2))
    return x, y


def test_the_distance_is_that_of_unit_features() -> None:
    unet = tiny().eval().requires_grad_(False)
    x, y = pair()
    expected = torch.zeros(2)
    levels = [unet.encode(one, torch.zeros(1)) for one in (x, y)]
    assert [tuple(f.shape[1:]) for f in levels[0]] == [(8, 16, 16), (16, 8, 8)]
    for fx, fy in zip(*levels, strict=True):
        cosine = (unit_length(fx) * unit_length(fy)).sum(1)
        expected += (2 - 2 * cosine).mean((1, 2)) / 2
    distance = PriorFeatures(unet)
    assert torch.allclose(distance(x, y), expected, atol=1e-5)
    assert distance(x, x).abs().max() < 1e-6 and distance(x, y).min() > 0.01


def test_it_draws_the_picture_towards_the_truth_and_leaves_the_prior_alone() -> None:
    unet = tiny().eval().requires_grad_(False)
    distance = PriorFeatures(unet)
    x, y = pair()
    x.requires_grad_()
    before = distance(x, y).sum()
    (gradient,) = torch.autograd.grad(before, x)
    step = x - 1e-2 * gradient / gradient.abs().max()
    assert float(distance(step.detach(), y).sum()) < float(before.detach())
    assert all(parameter.grad is None for parameter in unet.parameters())


def test_a_diffusers_prior_has_features_too() -> None:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=32,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
    ).requires_grad_(False)
    x, y = pair()
    distance = PriorFeatures(unet)
    assert len(distance.features(x)) == 2
    assert distance(x, x).abs().max() < 1e-6 and distance(x, y).min() > 0
    assert not unet.down_blocks[0]._forward_hooks


def test_a_prior_without_known_features_is_refused() -> None:
    with pytest.raises(UserError, match="leave --w-features out"):
        PriorFeatures(torch.nn.Identity())(*pair())


def test_the_term_of_the_loss(pictures: Path) -> None:
    draws = Draws(Pool(find_sources([pictures]), 32), 32, seed=2)
    losses = []
    for weight in (0.0, 0.5):
        objective = tiny_objective(w_mse=0.0, w_kl=0.0, w_features=weight)
        objective.features = PriorFeatures(objective.prior.unet)
        draws.position = 0
        losses.append(objective.losses(objective.module, draws, 4, 0))
    assert float(losses[0]["loss"].detach()) == 0 and "features" not in losses[0]
    assert float(losses[1]["loss"].detach()) == pytest.approx(0.5 * float(losses[1]["features"]), rel=1e-5)
    losses[1]["loss"].backward()
