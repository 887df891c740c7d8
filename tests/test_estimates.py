"""What is read off a picture: its noise and its blur."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from skimage import data

from ddc.errors import UserError
from ddc.estimates import (
    NOTICEABLE,
    BlurEstimate,
    estimate_blur,
    estimate_sigma,
    is_possible,
    passed_power,
)
from ddc.images import Picture, quantise
from ddc.operators.blur import GaussianBlur, KernelBlur, disc_kernel, motion_kernel, softened
from ddc.problems import Task


def flat(side: int) -> np.ndarray:
    return np.full((side, side, 3), 100, np.uint8)


def blurred(photograph: np.ndarray, kernel: torch.Tensor, sigma: float = 0.0) -> Picture:
    """A window of a photograph that was blurred whole, in 8 bits."""
    x = torch.from_numpy(photograph / np.float32(255)).permute(2, 0, 1)[None]
    y = KernelBlur(kernel)(x)[0].permute(1, 2, 0).numpy()[40:-40, 80:-80]
    y = y + sigma * np.random.default_rng(0).standard_normal(y.shape)
    return Picture(quantise(y.astype(np.float32), 8))


@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.1])
def test_noise_estimate(sigma: float) -> None:
    clean = data.astronaut().astype(np.float32) / 255
    noise = np.random.default_rng(0).normal(0, sigma, clean.shape).astype(np.float32)
    estimate = estimate_sigma(Picture((clean + noise).clip(0, 1)))
    assert abs(estimate - sigma) < 0.01


def with_noise(photograph: np.ndarray, sigma: float) -> np.ndarray:
    noisy = photograph / 255 + np.random.default_rng(0).normal(0, sigma, photograph.shape)
    return (noisy.clip(0, 1) * 255).round().astype(np.uint8)


@pytest.mark.parametrize("photograph", [data.astronaut(), data.coffee(), data.chelsea()])
def test_the_detail_of_a_photograph_is_no_noise(photograph: np.ndarray) -> None:
    assert estimate_sigma(Picture(photograph)) < 0.008
    assert estimate_sigma(Picture(with_noise(photograph, 0.03))) == pytest.approx(0.03, abs=0.003)


@pytest.mark.parametrize(("quality", "sampling", "sigma"), [(75, 2, 0.06), (85, 2, 0.05), (92, 2, 0.03), (95, 0, 0.02)])
def test_the_noise_before_jpeg_is_told(tmp_path: Path, quality: int, sampling: int, sigma: float) -> None:
    def saved(pixels: np.ndarray) -> Picture:
        Image.fromarray(pixels).save(tmp_path / "a.jpg", quality=quality, subsampling=sampling)
        return Picture.read(tmp_path / "a.jpg")

    noisy = saved(with_noise(data.coffee(), sigma))
    assert estimate_sigma(noisy) == pytest.approx(sigma, rel=0.15)
    by_pixels_alone = estimate_sigma(Picture(noisy.pixels))
    assert (by_pixels_alone < 0.8 * sigma) == (quality < 95)  # fine files lose little
    assert estimate_sigma(saved(data.coffee())) < NOTICEABLE
    assert estimate_sigma(saved(with_noise(data.coffee()[..., 0], sigma))) == pytest.approx(sigma, rel=0.2)


def test_noise_estimate_needs_pixels() -> None:
    with pytest.raises(UserError, match="too few pixels"):
        estimate_sigma(Picture(flat(8)))
    mask = np.random.default_rng(0).random((64, 64)) < 0.08
    with pytest.raises(UserError, match="too few pixels"):
        estimate_sigma(Picture(flat(64), (mask * 255).astype(np.uint8)))


@pytest.mark.parametrize(("width", "sigma"), [(1.0, 0.02), (1.5, 0.0), (2.5, 0.02), (4.0, 0.0)])
def test_a_blur_is_estimated(width: float, sigma: float) -> None:
    """Of photographs that were blurred whole, with what lies beyond their border."""
    rng = np.random.default_rng(0)
    errors = []
    for photograph in (data.astronaut(), data.coffee(), data.chelsea()):
        blurred = gaussian_filter(photograph / 255, (width, width, 0))[40:-40, 80:-80]
        pixels = quantise((blurred + sigma * rng.standard_normal(blurred.shape)).astype(np.float32), 8)
        errors.append(estimate_blur(Picture(pixels), sigma).spread - width)
    assert np.abs(errors).max() < 0.21 * width and np.abs(errors).mean() < 0.12 * width


def test_sharp_photographs_are_estimated_sharp_and_tiny_ones_not_at_all() -> None:
    for photograph in (data.astronaut(), data.coffee()):
        assert estimate_blur(Picture(photograph), 0.0).spread < 0.7
    grey = np.repeat(data.camera()[:256, :256, None], 3, axis=2)
    blurred = quantise(gaussian_filter(grey / 255, (2.0, 2.0, 0)).astype(np.float32), 8)
    assert estimate_blur(Picture(blurred, grey=True), 0.0).spread == pytest.approx(2.0, abs=0.3)
    assert estimate_blur(Picture(np.full((64, 64, 3), 7, np.uint8)), 0.0).spread >= 0  # nothing to see
    with pytest.raises(UserError, match="40×30 pixels is too small to estimate its blur; name it"):
        estimate_blur(Picture(data.astronaut()[:30, :40]), 0.0)


@pytest.mark.parametrize(("radius", "softness"), [(2.0, 0.0), (3.1, 0.6), (9.0, 0.6)])
def test_a_disc_is_told_from_a_gaussian(radius: float, softness: float) -> None:
    for photograph in (data.astronaut(), data.coffee(), data.chelsea()):
        blur = estimate_blur(blurred(photograph, softened(disc_kernel(radius), softness)), 0.0)
        assert blur.radius == pytest.approx(radius, abs=0.11) and blur.width == pytest.approx(softness, abs=0.6)
    if radius > 4:  # a small disc and a Gaussian are much the same in noise
        noisy = estimate_blur(blurred(data.coffee(), softened(disc_kernel(radius), softness), 0.02), 0.02)
        assert noisy.radius == pytest.approx(radius, abs=0.31)


@pytest.mark.parametrize(("length", "angle", "softness"), [(6.0, 20.0, 0.0), (25.0, 160.0, 0.6)])
def test_a_motion_is_told_with_its_length_and_direction(length: float, angle: float, softness: float) -> None:
    kernel = softened(motion_kernel(length, angle), softness)
    for photograph in (data.coffee(), data.chelsea()):
        blur = estimate_blur(blurred(photograph, kernel), 0.0)
        assert blur.length == pytest.approx(length, abs=1.1) and blur.angle == pytest.approx(angle, abs=5)
        assert blur.width == pytest.approx(softness, abs=0.61)


def test_what_no_disc_can_have_made_is_none() -> None:
    """A lattice has dark rings in its spectrum, as a disc has."""
    column = np.arange(256)
    lattice = 128 + 80 * np.sign(np.sin(column / 3.5))[:, None, None] * np.sign(np.sin(column / 3.5))[None, :, None]
    soft = gaussian_filter(np.repeat(lattice, 3, axis=2), (1, 1, 0))
    picture = Picture(quantise((soft / 255).astype(np.float32), 8))
    assert is_possible(picture, GaussianBlur(1.0), 0.0)
    assert not is_possible(picture, KernelBlur(disc_kernel(7)), 0.0)
    blur = estimate_blur(picture, 0.0)
    assert not blur.radius or is_possible(picture, Task.parse(blur.task).operator(), 0.0)


def test_an_estimate_names_its_task_and_its_spread() -> None:
    assert [BlurEstimate(*blur).task for blur in ((0, 1.5), (3, 0), (2.95, 0.6), (0, 0, 9, 30))] == [
        "gauss1.5",
        "disc3",
        "disc2.95+gauss0.6",
        "motion9@30",
    ]
    kernel = softened(disc_kernel(4.0), 1.0).double()
    axis = torch.arange(len(kernel)) - len(kernel) // 2
    assert BlurEstimate(4.0, 1.0).spread == pytest.approx(float((kernel.sum(1) * axis**2).sum() ** 0.5), rel=0.02)
    assert BlurEstimate(0.0, 1.5).spread == 1.5


def test_the_dark_rings_of_a_disc_lie_where_bessel_says() -> None:
    power = passed_power(5.0, 0.0, 0.0, 120, 1)[0]
    darkest = 2 + int(np.argmin(power[2:20]))
    assert darkest == pytest.approx(120 * 3.8317 / (2 * np.pi * 5), abs=1) and power[darkest] < 1e-3
    assert np.array_equal(passed_power(0.0, 0.0, 0.0, 120, 1)[0], np.ones_like(power))
