"""A tiny network, trained here on two photographs, restores a third better than the pseudo-inverse does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from skimage import data
from torch import Tensor
from training_parts import QUICK

from ddc.images import to_internal
from ddc.networks import CompactUNet
from ddc.noise import Noise
from ddc.priors import DataConsistency, Prior, schedule_from_config, scheduler_config
from ddc.problems import measure
from ddc.solvers.base import Run
from ddc.solvers.ddc import DDC
from ddc.solvers.pnp_admm import DnCNN
from ddc.training.ddc import DDCObjective
from ddc.training.loop import train
from ddc.training.objectives import DnCNNObjective, figures_of
from ddc.training.settings import DDCSettings, DnCNNSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("astronaut", "coffee"):
        Image.fromarray(getattr(data, name)()).save(folder / f"{name}.png")
    return folder


@pytest.fixture
def truth() -> Tensor:
    return to_internal(torch.from_numpy(data.cat()[90:186, 100:196]).permute(2, 0, 1)[None] / 255)


@pytest.mark.parametrize(("task", "steps"), [("sr4", 30), ("denoise", 60)])
def test_gain_over_the_pseudo_inverse(task: str, steps: int, folder: Path, truth: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = scheduler_config(prediction_type="v_prediction", clamp=1.0)
    small = {"encoder_blocks": (1, 1), "decoder_blocks": (1,), "groups": 4, "head_dim": 16}
    unet = CompactUNet(3, 3, channels=(8, 16), **small).eval()
    prior = Prior(unet, schedule_from_config(config), "v_prediction", 1.0, config)
    network = DataConsistency(CompactUNet(7, 3, channels=(16, 32), **small), ("estimate", "sigma"), "blend")
    # from noise in one step, where the first guess from y is corrected: what little training can teach
    how: dict[str, Any] = {
        "steps": steps,
        "batch_size": 8,
        "warmup": 10,
        "learning_rate": 3e-3,
        "ema": 0.9,
        "log_every": 50,
    }
    how |= {"crop": 32, "prior": folder, "tasks": task, "sigma_max": 0.1}
    how |= {"trajectory_share": 1.0, "trajectory_steps": (1,)}
    settings = DDCSettings(data=(folder,), out=tmp_path / "run", **(QUICK | how))
    train(DDCObjective(settings, network, prior), report=lambda line: None)

    trained = DataConsistency.from_pretrained(tmp_path / "run" / "model")
    problem, y = measure(task, 0.1, truth, ["cat"])
    run = Run(y, problem, prior, Noise([0]), network=trained)
    restored = DDC(steps=1).solve(run)
    after = figures_of("x", restored, truth, None)["x/psnr"][0]
    before = figures_of("x", run.pseudo_inverse(), truth, None)["x/psnr"][0]
    print(f"{task}: {before:.2f} → {after:.2f} dB")
    assert after >= before + 1


def test_gain_of_a_denoiser(folder: Path, truth: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    how: dict[str, Any] = {
        "steps": 80,
        "batch_size": 8,
        "warmup": 10,
        "learning_rate": 3e-3,
        "ema": 0.9,
        "log_every": 40,
    }
    settings = DnCNNSettings(data=(folder,), out=tmp_path / "run", **(QUICK | how))
    train(DnCNNObjective(settings, DnCNN(4, 24, 0.1)), report=lambda line: None)
    trained = DnCNNObjective(settings, DnCNN.from_pretrained(tmp_path / "run" / "dncnn"))
    figures = trained.validate(truth, ["cat"])
    before, after = figures["noisy/psnr"][0], figures["denoised/psnr"][0]
    print(f"dncnn: {before:.2f} → {after:.2f} dB")
    assert after >= before + 5
