from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import convolve, gaussian_filter1d
from skimage import data

from ddc.errors import UserError
from ddc.images import round_to_8_bit
from ddc.operators.base import LinearOperator
from ddc.operators.blur import GaussianBlur, KernelBlur, disc_kernel, motion_kernel, read_kernel, softened


@pytest.mark.parametrize("size", [(80, 70), (20, 9)])
def test_gaussian_is_scipy_s_with_reflection(size: tuple[int, int]) -> None:
    """scipy's "mirror" is whole-sample reflection, repeated where the picture is smaller than the kernel."""
    x = np.random.default_rng(0).normal(size=size)
    expected = gaussian_filter1d(
        gaussian_filter1d(x, 3.0, 0, mode="mirror", radius=30), 3.0, 1, mode="mirror", radius=30
    )
    ours = GaussianBlur(3.0, 61)(torch.from_numpy(x)[None, None])[0, 0].numpy()
    assert np.abs(ours - expected).max() < 1e-12


@pytest.mark.parametrize("shape", [(3, 5), (4, 6), (31, 2), (1, 1)])
def test_kernel_blur_is_a_convolution(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    x, kernel = rng.normal(size=(20, 17)), rng.normal(size=shape)
    expected = convolve(x, kernel, mode="mirror")
    ours = KernelBlur(torch.from_numpy(kernel))(torch.from_numpy(x)[None, None])[0, 0].numpy()
    assert np.abs(ours - expected).max() < 1e-10


def test_both_blurs_agree() -> None:
    x = torch.randn(2, 3, 40, 25, dtype=torch.float64)
    offset = torch.arange(-30, 31, dtype=torch.float64)
    line = torch.exp(-0.5 * (offset / 3) ** 2)
    line = line / line.sum()
    assert torch.allclose(GaussianBlur()(x), KernelBlur(torch.outer(line, line))(x), atol=1e-12)


def test_one_kernel_for_each_image() -> None:
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    kernels = torch.rand(2, 1, 5, 5, dtype=torch.float64)
    y = KernelBlur(kernels)(x)
    for i in range(2):
        assert torch.allclose(y[i : i + 1], KernelBlur(kernels[i, 0])(x[i : i + 1]))


def test_estimate_sharpens() -> None:
    x = torch.from_numpy(data.astronaut()[100:228, 150:278]).permute(2, 0, 1)[None].float() / 127.5 - 1
    for operator in (GaussianBlur(2.0), KernelBlur(motion_kernel(11, 20))):
        y = operator(x)
        guess = operator.guess(y, 0.01)
        assert (guess - x).norm() < 0.8 * (y - x).norm()
        assert (operator.project(y, y, 0.01) - x).norm() < 0.8 * (y - x).norm()


@pytest.mark.parametrize("radius", [0.6, 1.0, 2.5, 7.3])
def test_disc_kernel_is_even_round_and_of_its_size(radius: float) -> None:
    kernel = disc_kernel(radius).double()
    assert float(kernel.sum()) == pytest.approx(1) and torch.equal(kernel, kernel.mT)
    assert torch.allclose(kernel, kernel.flip(0)) and kernel.max() == kernel[len(kernel) // 2, len(kernel) // 2]
    assert float(1 / kernel.max()) == pytest.approx(max(np.pi * radius**2, 1), rel=0.13)  # its area, or a pixel
    axis = torch.arange(len(kernel)) - len(kernel) // 2
    spread = float((kernel.sum(1) * axis**2).sum())
    assert spread == pytest.approx(radius**2 / 4, abs=0.15)
    soft = softened(disc_kernel(radius), 1.2).double()
    axis = torch.arange(len(soft)) - len(soft) // 2
    assert float((soft.sum(1) * axis**2).sum()) == pytest.approx(spread + 1.44, rel=0.01)


def test_a_disc_that_cannot_be_is_refused() -> None:
    for radius in (0.0, float("nan"), -1.0):
        with pytest.raises(UserError, match="expected a number above 0"):
            disc_kernel(radius)


@pytest.mark.parametrize("angle", [0, 45, 90, 30, -60])
@pytest.mark.parametrize("length", [1, 7, 15, 16])
def test_motion_kernel_has_its_length_and_direction(length: int, angle: float) -> None:
    kernel = motion_kernel(length, angle).double()
    half = kernel.shape[0] // 2
    axis = torch.arange(-half, half + 1).double()
    column, row = axis.view(1, -1), axis.view(-1, 1)
    assert kernel.min() >= 0 and float(kernel.sum()) == pytest.approx(1)
    assert abs(float((kernel * row).sum())) < 1e-6 and abs(float((kernel * column).sum())) < 1e-6
    cosine, sine = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    along = float((kernel * (column * cosine - row * sine) ** 2).sum())
    across = float((kernel * (column * sine + row * cosine) ** 2).sum())
    assert across < 0.3
    assert along == pytest.approx(length**2 / 12, rel=0.1, abs=0.3)  # the variance of a line


def test_kernels_from_files(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.save(tmp_path / "kernel.npy", values)
    Image.fromarray(values.astype(np.uint8)).save(tmp_path / "kernel.png")
    expected = torch.from_numpy(values / values.sum())
    assert torch.allclose(read_kernel(tmp_path / "kernel.npy"), expected)
    assert torch.allclose(read_kernel(tmp_path / "kernel.png"), expected)


def test_bad_kernels_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "cube.npy", np.ones((2, 2, 2)))
    np.save(tmp_path / "zero.npy", np.zeros((3, 3)))
    np.save(tmp_path / "nan.npy", np.full((3, 3), np.nan))
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "empty.npy").write_bytes(b"")
    for file, message in [
        ("cube.npy", "2-D"),
        ("zero.npy", "sum"),
        ("nan.npy", "sum"),
        ("text.png", "cannot be read"),
        ("empty.npy", "cannot be read"),
        ("missing.npy", "cannot be read"),
    ]:
        with pytest.raises(UserError, match=message):
            read_kernel(tmp_path / file)
    with pytest.raises(UserError, match="expected"):
        KernelBlur(torch.ones(3))
    with pytest.raises(UserError, match="finite"):
        KernelBlur(torch.tensor([[float("nan")]]))


@pytest.mark.parametrize("sigma, size", [(0.0, 61), (-1.0, 61), (float("nan"), 61), (3.0, 60), (3.0, 0)])
def test_bad_gaussians_are_refused(sigma: float, size: int) -> None:
    with pytest.raises(UserError, match="expected"):
        GaussianBlur(sigma, size)


@pytest.mark.parametrize("operator", [GaussianBlur(), KernelBlur(motion_kernel(9, 30))])
def test_rounding_is_undone_in_a_slow_gradient_and_nowhere_else(operator: LinearOperator) -> None:
    y = operator(torch.linspace(-0.3, -0.1, 96).expand(1, 3, 64, 96))
    rounded = round_to_8_bit(y)
    before, after = (rounded - y).square().mean(), (operator.unround(rounded) - y).square().mean()
    assert after < 0.1 * before
    rough = round_to_8_bit(torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)) * 0.3)
    assert torch.equal(operator.unround(rough), rough)


def test_motions_of_no_length_are_refused() -> None:
    for length, angle in ((0.5, 0.0), (float("inf"), 0.0), (5.0, float("nan"))):
        with pytest.raises(UserError, match="expected at least 1 pixel"):
            motion_kernel(length, angle)
