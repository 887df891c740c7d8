"""Convolutions in FP8 against plain PyTorch: on a GPU of compute capability 9.0, or with Triton's interpreter."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc import fused
from ddc.cuda import FastUNet
from test_kernels import DEVICE, compact, error, kernels, of_diffusers, random, random_norm

assert kernels  # a fixture
if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("FP8 needs a GPU of compute capability 9.0", allow_module_level=True)


@pytest.fixture
def eight(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ddc.kernels_fp8`, with tiles that the interpreter can run."""
    module = importlib.import_module("ddc.kernels_fp8")
    if DEVICE.type == "cpu":
        interpreter = importlib.import_module("triton.runtime.interpreter")
        usual, of_triton = interpreter._convert_float, importlib.import_module("triton.language")

        def convert(values: Any, given: Any, wanted: Any, mode: Any) -> Any:
            """Triton's interpreter loses the carry where rounding to 8 bits reaches the next power of two."""
            if (given, wanted) != (of_triton.float32, of_triton.float8e4nv):
                return usual(values, given, wanted, mode)
            return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

        monkeypatch.setattr(interpreter, "_convert_float", convert)
        monkeypatch.setattr(module, "PROGRAMS", 16)
        monkeypatch.setattr(module, "DEEP", 32)
        monkeypatch.setattr(module, "TALL_TILE", (64, 32, 32, 4, 2))
        monkeypatch.setattr(module, "LARGE_TILE", (32, 32, 32, 4, 2))
        monkeypatch.setattr(module, "LONE_TILE", (32, 32, 32, 4, 3))
        monkeypatch.setattr(module, "MIDDLE_TILE", (32, 16, 32, 4, 2))
        monkeypatch.setattr(module, "SMALL_TILE", (16, 16, 64, 4, 2))
    return module


def convolution(channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, out_channels, 3, padding=1).to(DEVICE).requires_grad_(False)
    conv.weight.copy_(random(*conv.weight.shape)), conv.bias.copy_(random(out_channels))
    return conv


def values_of(padded: Any) -> Tensor:
    """The pictures without their border and scale, in float64."""
    values = padded.values.double()
    for edge in (values[:, 0], values[:, -1], values[:, :, 0], values[:, :, -1]):
        assert not edge.any()
    return values[:, 1:-1, 1:-1].movedim(-1, 1) / padded.scale


@pytest.mark.parametrize(("size", "scale"), [(0, 2.0), (1, 1.0), (2, 4.0)])
@pytest.mark.parametrize(("channels", "groups"), [(64, 8), (48, 4)])
def test_a_normalisation_in_8_bits(eight: Any, size: int, scale: float, channels: int, groups: int) -> None:
    norm, x = random_norm(groups, channels, torch.float32), random(2, channels, 6, 10)
    modulation = random(1, 2 * channels)
    found = eight.normalise(x, norm, scale, modulation, size)
    of_scale, shift = modulation[:, :, None, None].chunk(2, 1)
    expected = F.silu(norm(x) * (1 + of_scale) + shift)
    if size == eight.DOUBLED:
        expected = F.interpolate(expected, scale_factor=2.0, mode="nearest")
    elif size == eight.HALVED:
        expected = F.avg_pool2d(expected, 2)
    assert error(values_of(found), expected.double()) < 0.04  # the rounding of three bits
    rounded = (expected * scale).to(torch.float8_e4m3fn).double() / scale
    assert error(values_of(found), rounded) < 2e-3  # but for numbers half-way between two of 8 bits


def test_large_values_are_clipped_and_do_not_become_nan(eight: Any) -> None:
    norm, x = random_norm(4, 32, torch.float32), random(1, 32, 5, 5)
    found = values_of(eight.normalise(x, norm, 448.0))
    assert bool(found.isfinite().all()) and float(found.max()) == 1.0


@pytest.mark.parametrize(
    ("batch", "channels", "out_channels", "size"),
    [(2, 64, 32, (6, 8)), (1, 48, 80, (7, 5)), (3, 32, 64, (9, 17))],
)
@pytest.mark.parametrize("added", [False, True])
def test_a_convolution_in_8_bits(
    eight: Any, batch: int, channels: int, out_channels: int, size: tuple[int, int], added: bool
) -> None:
    conv, norm, x = convolution(channels, out_channels), random_norm(8, channels, torch.float32), None
    x = eight.normalise(random(batch, channels, *size), norm, 8.0)
    weights = eight.Weights(conv)
    assert weights.values.shape == (out_channels, 9 * (channels + -channels % eight.DEEP))
    bias = random(batch, out_channels) if added else None
    residual = random(batch, out_channels, *size) if added else None
    found = eight.convolve(x, weights, bias, residual, torch.float32)
    wide = conv.weight.double() / weights.factor.double().view(-1, 1, 1, 1)
    exact = F.conv2d(values_of(x), wide.to(torch.float8_e4m3fn).double(), padding=1)
    exact = exact * weights.factor.double().view(-1, 1, 1)
    if added:
        exact = exact + bias.double()[:, :, None, None] + residual.double()  # type: ignore[union-attr]
    tolerance = 1e-6 if DEVICE.type == "cpu" else 2e-3  # tensor cores keep fewer bits of their sums
    assert error(found, exact) < tolerance
    assert error(F.conv2d(values_of(x), conv.weight.double(), padding=1), exact) > 1e-3 or added  # 8 bits were used
    sums, pixels = found.channel_sums.sum(1), found.double().flatten(2)
    assert error(sums[:, 0], pixels.sum(2)) < 1e-5 and error(sums[:, 1], pixels.square().sum(2)) < 1e-5


def test_many_sums_are_added_up(eight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight, "MOST_PARTS", 2)
    x = eight.normalise(random(1, 32, 12, 12), random_norm(4, 32, torch.float32), 8.0)
    found = eight.convolve(x, eight.Weights(convolution(32, 32)), None, None, torch.float32)
    assert found.channel_sums.shape == (1, 1, 2, 32)
    assert error(found.channel_sums[:, 0, 0], found.double().sum((2, 3))) < 1e-5


@pytest.mark.parametrize(("largest", "scale"), [(1.0, 32.0), (7.0, 8.0), (1000.0, 0.03125), (0.0, 1.0)])
def test_scales_are_powers_of_two_with_headroom(eight: Any, largest: float, scale: float) -> None:
    assert eight.scale_for(torch.tensor([-largest, 0.0])) == scale
    assert largest * scale * eight.HEADROOM <= eight.LARGEST


@pytest.mark.parametrize("kind", ["compact", "scale_shift", "default"])
def test_networks_predict_nearly_the_same(eight: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    unet = compact() if kind == "compact" else of_diffusers(kind, "resnet" if kind == "scale_shift" else "conv")
    for parameter in unet.to(DEVICE).eval().requires_grad_(False).parameters():
        parameter += 0.1 * torch.randn_like(parameter) / max(1, parameter[0].numel()) ** 0.5
    fast = FastUNet(unet, DEVICE, torch.float32, eight_bits=True)
    calls = []
    convolve = eight.convolve
    monkeypatch.setattr(eight, "convolve", lambda *args: calls.append(1) or convolve(*args))
    x, times = random(2, 3, 8, 8), torch.tensor([3, 700], device=DEVICE)
    expected = unet(x, times)
    expected = expected if isinstance(expected, Tensor) else expected.sample
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = fast(x, times)
    blocks = [block for block in fast.fused.modules() if isinstance(block, fused.EightBits)]
    assert len(blocks) > 2 and len(calls) == 2 * len(blocks) and not fused.FAILURES
    assert 1e-4 < error(found, expected.double()) < 0.1
    assert torch.equal(fast(x, times), found)  # with scales that were chosen before
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(fast(x, times).square().sum(), x)
    plain = unet(x, times)
    plain = plain if isinstance(plain, Tensor) else plain.sample
    assert error(gradient, torch.autograd.grad(plain.square().sum(), x)[0].double()) < 1e-4  # not in 8 bits
    assert len(calls) == 4 * len(blocks)


def test_a_wrong_convolution_is_not_used(
    eight: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    unet = compact().to(DEVICE).eval().requires_grad_(False)
    for parameter in unet.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    fast = FastUNet(unet, DEVICE, eight_bits=True)
    right = eight.convolve
    monkeypatch.setattr(eight, "convolve", lambda *args: 1.5 * right(*args))
    x, times = random(1, 3, 20, 20), torch.tensor([3], device=DEVICE)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert error(fast(x, times), unet(x, times).double()) < 1e-5
    assert "EightBitResidualBlock computes something else" in caplog.text and fused.FAILURES


def test_tiles_are_smaller_where_there_are_few_of_them() -> None:
    module = importlib.import_module("ddc.kernels_fp8")
    pixels = {side: side * (side + 2) for side in (8, 32, 64, 256)}
    assert module._tile(16, pixels[256], 256) == module.LARGE_TILE
    assert module._tile(1, pixels[256], 128) == module.TALL_TILE
    assert module._tile(1, pixels[64], 512) == module.LONE_TILE  # one for each multiprocessor
    assert module._tile(2, pixels[32], 512) == module.MIDDLE_TILE
    assert module._tile(1, pixels[8], 1024) == module.SMALL_TILE


def test_other_convolutions_stay_as_they_are(eight: Any) -> None:
    block = fused.FusedResidualBlock.__new__(fused.FusedResidualBlock)
    nn.Module.__init__(block)
    block.conv1, block.conv2 = nn.Conv2d(24, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)  # no multiples of 16
    fused.use_eight_bits(block)
    assert type(block) is fused.FusedResidualBlock
