"""The model that ships does what it is for, on pictures as people have them."""

from typing import Any

import numpy as np
import pytest
import torch
from skimage import data

from ddc.images import Picture, to_internal, to_unit
from ddc.latents import LatentPrior
from ddc.noise import Noise
from ddc.perceptual import LPIPS
from ddc.pipeline import RestorationPipeline, load_parts
from ddc.problems import Task, measure
from ddc.solvers.base import Run, make_solver
from ddc.solvers.bridge import I2SB


def psnr(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float(-10 * (x - truth).square().mean().log10())


@pytest.fixture(scope="module")
def pipe() -> RestorationPipeline:
    return RestorationPipeline.from_pretrained().to("cpu")


@pytest.mark.parametrize(
    ("task", "sigma", "gain"),
    [
        ("sr4", 0.0, 0.0),
        ("sr4", 0.05, 1.0),
        ("gauss", 0.0, 3.0),
        ("gauss", 0.05, 2.0),
        ("inpaint50", 0.0, 1.0),
        ("jpeg10", 0.0, 0.8),
        ("denoise", 0.1, 8.0),
    ],
)
def test_eight_bit_measurements_are_restored(pipe: RestorationPipeline, task: str, sigma: float, gain: float) -> None:
    truth = torch.from_numpy(data.coffee()[100:196, 200:296].copy()).permute(2, 0, 1)[None].float() / 255
    problem, y = measure(task, sigma, to_internal(truth), ["coffee"])
    pixels = np.rint(to_unit(y)[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8)
    mask = {"mask": problem.operator.observed(y)} if task.startswith("inpaint") else {}
    restored = pipe(Picture(pixels), "inpaint" if mask else task, sigma=sigma, **mask).picture.tensor
    size = (truth.shape[-2], truth.shape[-1])
    first = to_unit(problem.operator.guess(y, 0.0, size) if task != "gauss" else y)[0]
    assert psnr(restored, truth[0]) > psnr(first, truth[0]) + gain


def test_no_noise_is_left_at_the_border(pipe: RestorationPipeline) -> None:
    truth = torch.from_numpy(data.coffee()[60:220, 120:280].copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    problem, y = measure("denoise", 0.1, truth, ["coffee"])
    error = (pipe.solve(y, problem, make_solver("posterior:realism=0"), [0]) - truth).square()
    inside = error[..., 2:-2, 2:-2]
    border = (error.sum() - inside.sum()) / (error.numel() - inside.numel())
    assert border.sqrt() < 1.3 * inside.mean().sqrt()  # 1.2; without a margin 1.6


@pytest.mark.parametrize(
    ("task", "sigma", "least"), [("projections25", 0.0, 4.0), ("bayer", 0.02, 1.0), ("area3.5", 0.0, 0.8)]
)
def test_operators_of_no_training_gain_from_the_network(
    pipe: RestorationPipeline, task: str, sigma: float, least: float
) -> None:
    truth = torch.from_numpy(data.coffee()[100:196, 200:296].copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    problem, y = measure(task, sigma, truth, ["coffee"])
    guess = problem.operator.guess(y, problem.sigma, (96, 96))
    found = pipe.solve(y, problem, make_solver("posterior:realism=0"), [0], size=(96, 96))
    gain = psnr(to_unit(found), to_unit(truth)) - psnr(to_unit(guess), to_unit(truth))
    print(f"{task}: {gain:.2f} dB more than the guess")
    assert gain > least


@pytest.mark.parametrize(("task", "sigma"), [("sr4", 0.0), ("sr4", 0.05)])
def test_one_pass_comes_close_to_five_steps(pipe: RestorationPipeline, task: str, sigma: float) -> None:
    truth = torch.from_numpy(data.coffee()[100:164, 200:264].copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    problem, y = measure(task, sigma, truth, ["coffee"])
    lpips = LPIPS("alex")
    five, one = (pipe.solve(y, problem, make_solver(name), [0]) for name in ("ddc", "one-pass"))
    assert psnr(to_unit(one), to_unit(truth)) > psnr(to_unit(five), to_unit(truth)) - 0.5
    assert float(lpips(one, truth)) < float(lpips(five, truth)) + 0.02


@pytest.mark.parametrize("task", ["sr4", "jpeg10"])
def test_the_bridges_of_the_repository_beat_the_measurement(task: str) -> None:
    truth = torch.from_numpy(data.coffee()[100:196, 200:296].copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    problem, y = measure(task, 0.0, truth, ["coffee"])
    solver = I2SB(steps=2)
    nothing: Any = None  # it has no use for a prior
    restored = solver.solve(Run(y, problem, nothing, Noise([0]), **load_parts(solver, None, problem)))
    first = y if task == "jpeg10" else problem.operator.pinv(y)  # type: ignore[attr-defined]
    assert psnr(to_unit(restored), to_unit(truth)) > psnr(to_unit(first), to_unit(truth)) + 0.5
    lpips = LPIPS("alex")
    assert float(lpips(restored, truth)) < float(lpips(first, truth))


def test_deblurring_leaves_no_waves_in_a_sky(pipe: RestorationPipeline) -> None:
    down, right = torch.meshgrid(torch.linspace(0, 1, 64), torch.linspace(0, 1, 64), indexing="ij")
    sky = torch.stack([0.25 + 0.1 * down + 0.05 * right, 0.35 + 0.1 * down, 0.5 + 0.08 * down * right])[None]
    _, y = measure("gauss", 0.0, to_internal(sky), ["sky"])
    restored = pipe((to_unit(y) * 255).round() / 255, "gauss").picture.tensor
    assert float((restored - sky[0])[:, 16:-16, 16:-16].abs().max()) < 10 / 255  # 20 with the bands of rounding


def test_a_picture_out_of_focus_is_restored_by_what_it_shows(pipe: RestorationPipeline) -> None:
    world = torch.from_numpy(data.chelsea().copy()).permute(2, 0, 1)[None].float() / 255
    blurred = to_unit(Task.parse("disc3.5+gauss0.6").operator()(to_internal(world)))
    truth, y = (x[0, :, 60:252, 100:292] for x in (world, blurred))
    picture = Picture(np.rint(y.permute(1, 2, 0).numpy() * 255).astype(np.uint8))
    restored = pipe(picture, "deblur")
    radius = float(restored.tasks[0].removeprefix("disc").partition("+")[0])
    assert radius == pytest.approx(3.5, abs=0.11)
    assert psnr(restored.picture.tensor, truth) > psnr(y, truth) + 3


@pytest.mark.parametrize("task", ["gauss", "motion"])
def test_the_border_of_a_blurred_photograph_is_restored_too(pipe: RestorationPipeline, task: str) -> None:
    """The world goes on beyond it, and was blurred into it."""
    world = torch.from_numpy(data.coffee().copy()).permute(2, 0, 1)[None].float() / 255
    blurred = to_unit(Task.parse(task).operator((400, 600))(to_internal(world)))
    truth, y = (x[0, :, 100:196, 200:296] for x in (world, blurred))
    picture = Picture(np.rint(y.permute(1, 2, 0).numpy() * 255).astype(np.uint8))
    restored = pipe(picture, task).picture.tensor
    border = torch.ones(96, 96, dtype=torch.bool)
    border[12:-12, 12:-12] = False
    assert psnr(restored[:, border], truth[:, border]) > psnr(y[:, border], truth[:, border]) + 1.5
    assert psnr(restored, truth) > psnr(y, truth) + 3


def test_the_latent_prior_of_the_repository_knows_photographs() -> None:
    prior = LatentPrior.from_pretrained("models/latent")
    x = to_internal(torch.from_numpy(data.astronaut()[:256, 100:356].copy()).permute(2, 0, 1)[None].float() / 255)
    with torch.no_grad():
        z = prior.encode(x)
        assert 0.7 < z.std() < 1.4
        assert psnr(to_unit(prior.decode(z)), to_unit(x)) > 24  # 26.4 on validation photographs
        noisy = prior.schedule.add_noise(z, 400, Noise([0]).normal(z.shape))
        denoised = prior.predict(noisy, 400).x0
    # what is left of the noise that the best multiple of z_t leaves
    share = (z * noisy).sum() / noisy.square().sum()
    assert (denoised - z).square().mean() < 0.6 * (share * noisy - z).square().mean()
