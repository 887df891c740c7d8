"""The posterior denoiser: its inputs, its folder, and its training."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from training_parts import TINY

from ddc.cli import main
from ddc.errors import UserError
from ddc.images import Picture, to_internal
from ddc.pipeline import RestorationPipeline
from ddc.problems import measure
from ddc.solvers.posterior import PosteriorDenoiser, coefficients
from tiny import tiny_unet

SETTINGS = "--batch-size 4 --crop 32 --warmup 1 --precision fp32 --tasks denoise --sigma-max 0.3 --log-every 1"


def test_the_linear_estimate_lies_between_the_noisy_picture_and_the_guess() -> None:
    theta = torch.tensor([0.0, math.atan(0.25), math.pi / 2]).view(-1, 1, 1, 1)
    of_x, of_guess, scale = (part.flatten() for part in coefficients(theta))
    cos = theta.cos().flatten()
    assert torch.allclose(of_x * cos + of_guess, torch.ones(3), atol=1e-6)  # unbiased
    assert torch.allclose(of_guess, torch.tensor([0.0, 0.5, 1.0]), atol=1e-6)  # as good as the guess at n = s
    assert torch.allclose(scale, torch.tensor([0.0, 0.25 / 2**0.5, 0.25]), atol=1e-6)


@pytest.mark.parametrize("task", ["sr4", "inpaint92", "jpeg10", "motion"])
def test_the_mean_does_not_depend_on_the_noisy_picture(task: str) -> None:
    network = PosteriorDenoiser(tiny_unet(11, seed=5))
    truth = to_internal(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    problem, y = measure(task, 0.0, truth, ["a", "b"])
    measured = (problem.operator, y, problem.sigma)
    theta = torch.full((2, 1, 1, 1), math.pi / 2)
    with torch.no_grad():
        first, known = network(measured, truth, theta)
        second, _ = network(measured, torch.zeros_like(truth), theta)
        kept, _ = network(measured, torch.zeros_like(truth), theta, known)
        clean, _ = network(measured, truth, torch.full((2, 1, 1, 1), 1e-6))
    assert torch.allclose(first, second, atol=1e-5) and torch.equal(second, kept)
    # without noise it is the picture itself, within the cells of JPEG's coefficients
    assert (clean - truth).abs().mean() < (0.03 if task == "jpeg10" else 1e-3) < (first - truth).abs().mean()


def test_a_trained_network_restores_from_its_folder(tmp_path: Path) -> None:
    for i in range(4):
        Picture(np.full((40, 40, 3), 60 + 40 * i, np.uint8)).write(tmp_path / "photos" / f"{i}.png")
    config = {"_class_name": "CompactUNet", "out_channels": 3, "middle_blocks": 1, "attention_levels": [0]}
    (tmp_path / "tiny.json").write_text(json.dumps(config | TINY))
    run = tmp_path / "run"
    words = f"train posterior --data {tmp_path / 'photos'} --out {run} --network {tmp_path / 'tiny.json'} {SETTINGS}"
    assert main([*words.split(), "--steps", "60", "--learning-rate", "0.003", "--pictures-every", "60"]) == 0
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 60 and all(map(math.isfinite, losses))
    assert sum(losses[-20:]) < 0.85 * sum(losses[:20])
    assert (run / "pictures" / "step-00000060.png").is_file()

    pipe = RestorationPipeline.from_pretrained(run)  # with the shipped prior, which it does not use
    small = torch.rand(3, 10, 10, generator=torch.Generator().manual_seed(1))
    mean, sample, other = (
        pipe(small, "sr4", solver=f"posterior:realism={realism}:steps=4", seed=seed)
        for realism, seed in ((0, 0), (1, 0), (1, 1))
    )
    assert mean.evaluations == 1 and sample.evaluations == 4
    assert (sample.picture.tensor - other.picture.tensor).abs().max() > 0.01
    again = pipe(small, "sr4", solver="posterior:realism=0:steps=4", seed=5).picture.tensor
    assert torch.equal(mean.picture.tensor, again)
    with pytest.raises(UserError, match="between 0 and 1"):
        pipe(small, "sr4", solver="posterior:realism=2")


def test_another_network_is_not_taken_for_one(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="not a posterior network"):
        PosteriorDenoiser.from_pretrained(tiny_model / "network")
    with pytest.raises(UserError, match="takes 11 channels"):
        PosteriorDenoiser(tiny_unet(6, seed=0))
