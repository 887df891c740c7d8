"""The Triton kernels against plain PyTorch: on a GPU, or with Triton's interpreter."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc import cuda, fused
from ddc.cuda import FastUNet
from ddc.networks import CompactUNet

pytest.importorskip("triton", reason="Triton is not installed; on Linux `pip install triton` has its interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ddc.kernels`, which networks use on the CPU too; conftest.py has them interpreted where there is no GPU."""
    for user in (fused, cuda):
        monkeypatch.setattr(user, "can_fuse", lambda device: not fused.FAILURES)
    monkeypatch.setattr(fused, "FAILURES", [])
    monkeypatch.setattr(fused.FusedFunctions, "seen", set())
    module = importlib.import_module("ddc.kernels")
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, "PROGRAMS", 16)  # which the interpreter runs one after the other
        monkeypatch.setattr(module, "FEW_PIXELS", 64)
    return module


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x


def random_norm(groups: int, channels: int, dtype: torch.dtype) -> nn.GroupNorm:
    norm = nn.GroupNorm(groups, channels).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.copy_(random(channels) + 1), norm.bias.copy_(random(channels, 1)[:, 0])
    return norm


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and bool(found.isfinite().all())
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("batch", "channels", "size", "groups"),
    [
        (2, 64, (8, 7), 8),  # one kernel for a small picture
        (1, 48, (5, 3), 16),  # groups of three channels
        (2, 96, (13, 11), 8),  # three kernels, a block of channels that is not full
        (1, 160, (17, 15), 10),  # two blocks of channels
    ],
)
def test_they_equal_the_plain_way(
    kernels: Any, batch: int, channels: int, size: tuple[int, int], groups: int, dtype: torch.dtype
) -> None:
    norm, x = random_norm(groups, channels, dtype), 2 * random(batch, channels, *size, dtype=dtype) + 0.5
    residual, bias = random(batch, channels, *size, dtype=dtype).contiguous(), random(channels, dtype=dtype)
    modulation = random(batch, 2 * channels, dtype=dtype)
    exact = nn.GroupNorm(groups, channels, norm.eps).double().to(DEVICE)
    exact.requires_grad_(False).load_state_dict(norm.state_dict())
    wide, offset = x.double(), bias.double()[:, None, None]
    scale, shift = modulation.double()[:, :, None, None].chunk(2, 1)

    total = kernels.add(x, bias, residual)
    assert error(total, wide + offset + residual.double()) < ROUNDING[dtype]
    assert error(kernels.normalise(total, norm), F.silu(exact(total.double()))) < ROUNDING[dtype]
    expected = F.silu(exact(wide + offset) * (1 + scale) + shift)
    assert error(kernels.normalise(x, norm, bias, modulation), expected) < ROUNDING[dtype]
    one = kernels.normalise(x, norm, modulation[:, :channels].contiguous(), modulation[:1], silu=False)
    assert error(one, exact(wide + scale) * (1 + scale[:1]) + shift[:1]) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("silu", [True, False])
def test_gradients_equal_those_of_the_plain_way(kernels: Any, silu: bool, dtype: torch.dtype) -> None:
    for batch, channels, size, groups in ((2, 96, (13, 11), 8), (1, 48, (5, 3), 16), (2, 40, (9, 8), 8)):
        norm = random_norm(groups, channels, dtype)
        exact = nn.GroupNorm(groups, channels, norm.eps).double().to(DEVICE)
        exact.requires_grad_(False).load_state_dict(norm.state_dict())
        x = (2 * random(batch, channels, *size, dtype=dtype) + 0.5).requires_grad_()
        residual = random(batch, channels, *size, dtype=dtype).contiguous().requires_grad_()
        bias, modulation = random(channels, dtype=dtype), random(batch, 2 * channels, dtype=dtype)
        wide, other = (t.detach().double().requires_grad_() for t in (x, residual))
        scale, shift = modulation.double()[:, :, None, None].chunk(2, 1)
        offset = bias.double()[:, None, None]

        total = kernels.add(x, bias, residual)
        found = kernels.normalise(total, norm, bias, modulation, silu=silu)
        found = found + kernels.normalise(total, norm, silu=silu)
        plain = wide + offset + other
        expected = exact(plain + offset) * (1 + scale) + shift, exact(plain)
        result = sum(F.silu(part) if silu else part for part in expected)
        back = random(*found.shape, dtype=dtype)
        for a, b in zip(
            torch.autograd.grad(found, (x, residual), back),
            torch.autograd.grad(result, (wide, other), back.double()),
            strict=True,
        ):
            assert error(a, b) < 3 * ROUNDING[dtype]


def test_sums_are_used_again_and_other_layouts_are_taken(kernels: Any) -> None:
    norm, x = random_norm(4, 32, torch.float32), random(1, 32, 34, 33)
    total = kernels.add(x, random(32))
    assert total.channel_sums.shape[2:] == (2, 32)
    total.channel_sums = 4 * total.channel_sums  # to see that nothing is summed again
    assert error(kernels.normalise(total, norm), F.silu(norm(total).double())) > 0.1
    rows = random(2, 32, 6, 7).flatten(2)  # as attention has them, channels last and channels first
    for layout in (rows, rows.contiguous()):
        assert error(kernels.normalise(layout, norm, silu=False), norm(layout).double()) < 1e-6


def test_channels_are_joined(kernels: Any) -> None:
    a, b = random(2, 40, 12, 11), random(2, 24, 12, 11).contiguous()
    joined, norm = kernels.concatenate(a, b), random_norm(8, 64, torch.float32)
    expected = torch.cat([a, b], 1)
    assert torch.equal(joined, expected) and joined.is_contiguous(memory_format=torch.channels_last)
    assert joined.channel_sums.shape[2:] == (2, 64)
    assert error(kernels.normalise(joined, norm), F.silu(norm(expected).double())) < 1e-6


@pytest.mark.parametrize("dtype", ROUNDING)
def test_pixels_are_doubled(kernels: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(fused, "doubled", lambda x, run=fused.doubled: calls.append(1) or run(x))
    for channels in (3, 8):
        x = random(2, channels, 5, 4, dtype=dtype)
        with fused.FusedFunctions():
            found = F.interpolate(x, scale_factor=2.0, mode="nearest")
            other = F.interpolate(x, scale_factor=2.0, mode="bilinear")
        assert torch.equal(found, F.interpolate(x, scale_factor=2.0, mode="nearest"))
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(other, F.interpolate(x, scale_factor=2.0, mode="bilinear"))
    assert len(calls) == 2


def compact() -> nn.Module:
    return CompactUNet(3, 3, channels=(32, 48), encoder_blocks=(1, 1), decoder_blocks=(1,), groups=4, head_dim=8)


def of_diffusers(shift: str, resample: str) -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=4,
        attn_norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("ResnetDownsampleBlock2D" if resample == "resnet" else "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "ResnetUpsampleBlock2D" if resample == "resnet" else "UpBlock2D"),
        downsample_type=resample,
        upsample_type=resample,
        resnet_time_scale_shift=shift,
    )


@pytest.mark.parametrize("kind", ["compact", "scale_shift", "default"])
def test_networks_predict_the_same(kernels: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    unet = compact() if kind == "compact" else of_diffusers(kind, "resnet" if kind == "scale_shift" else "conv")
    for parameter in unet.to(DEVICE).eval().requires_grad_(False).parameters():
        parameter += 0.1 * torch.randn_like(parameter) / max(1, parameter[0].numel()) ** 0.5
    calls = []
    for name in ("add", "normalise", "concatenate"):
        run = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, _run=run, **given: calls.append(_run.__name__) or _run(*args, **given)
        )
    fast = FastUNet(unet, DEVICE, torch.float32)
    fast.kernels = True
    x, times = random(2, 3, 20, 20), torch.tensor([3, 700], device=DEVICE)
    expected = unet(x, times)
    expected = expected if isinstance(expected, Tensor) else expected.sample
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert error(fast(x, times), expected.double()) < 1e-5
    assert len(calls) > 10 and set(calls) == {"add", "normalise", "concatenate"}
    x.requires_grad_()
    calls.clear()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        (gradient,) = torch.autograd.grad(fast(x, times).square().sum(), x)
    assert set(calls) == {"add", "normalise"} and not fused.FAILURES
    plain = unet(x, times)
    plain = plain if isinstance(plain, Tensor) else plain.sample
    assert error(gradient, torch.autograd.grad(plain.square().sum(), x)[0].double()) < 1e-4


def raising(*_: Any, **__: Any) -> Tensor:
    raise ValueError("this GPU has too few registers")


def test_a_kernel_that_cannot_be_compiled_does_no_harm(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unet = compact().to(DEVICE).eval().requires_grad_(False)
    fast, other = (FastUNet(unet, DEVICE) for _ in range(2))
    fast.kernels = other.kernels = True
    x, times = random(2, 3, 16, 16), torch.tensor([3, 700], device=DEVICE)
    monkeypatch.setattr(kernels, "normalise", raising)
    for network in (fast, other, fast):
        assert torch.equal(network(x, times), fast.module(x, times))
    assert caplog.text.count("the plain layers are used instead of fused kernels") == 1
    assert "ValueError: this GPU has too few registers" in caplog.text and len(fused.FAILURES) == 1
    assert not fused.usable(x)


@pytest.mark.parametrize("name", ["add", "normalise", "concatenate"])
def test_a_kernel_that_computes_something_else_is_not_used(
    kernels: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    unet = compact().to(DEVICE).eval().requires_grad_(False)
    for parameter in unet.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    fast = FastUNet(unet, DEVICE)
    fast.kernels = True
    x, times = random(2, 3, 20, 20), torch.tensor([3, 700], device=DEVICE)
    right, calls = getattr(kernels, name), []
    monkeypatch.setattr(kernels, name, lambda *args, **given: calls.append(1) or 1.1 * right(*args, **given))
    for _ in range(3):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            assert error(fast(x, times), unet(x, times).double()) < 1e-5
    assert len(calls) <= 3 and caplog.text.count("computes something else for (2, ") == 1  # no more than one layer's


def test_too_little_memory_is_no_fault_of_the_kernels(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fast = FastUNet(compact().eval(), DEVICE)
    fast.kernels = True
    monkeypatch.setattr(kernels, "add", full)
    with pytest.raises(torch.OutOfMemoryError):  # which the pipeline answers with smaller tiles
        fast(random(1, 3, 16, 16), torch.tensor([3], device=DEVICE))
    assert not fused.FAILURES


def test_each_layer_is_compared_once_for_a_size_and_after_some_calls(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = FastUNet(compact().eval(), DEVICE)
    fast.kernels, fast.patience = True, 1
    checks, calls = [], []
    monkeypatch.setattr(fused, "agree", lambda *both, run=fused.agree: checks.append(1) or run(*both))
    monkeypatch.setattr(cuda, "usable", lambda x, run=fused.usable: calls.append(1) or run(x))
    x, times = random(2, 3, 16, 28), torch.tensor([3], device=DEVICE)
    fast(x, times)
    assert not calls  # a single picture does not wait for kernels to be compiled
    fast(x, times)
    layers = len(checks)
    assert layers > 5
    fast(x[..., :24], times)  # about the same size
    assert len(checks) == layers
    fast(x[:1], times)
    assert len(checks) == 2 * layers


def test_rounding_is_no_wrong_gradient() -> None:
    x = torch.randn(1, 32, 256, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    both = F.group_norm(x.float(), 8).half(), F.group_norm(x, 8)
    assert fused.agree(*fused._gradients(both, x))
    assert not fused.agree(*fused._gradients((1.1 * both[0], both[1]), x))


def test_a_wrong_gradient_is_found_and_checkpoints_take_the_plain_way(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    unet = compact().to(DEVICE).eval().requires_grad_(False)
    for parameter in unet.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    x, times = random(1, 3, 20, 20).requires_grad_(), torch.tensor([3], device=DEVICE)
    (expected,) = torch.autograd.grad(unet(x, times).square().sum(), x)
    back, calls = kernels._Normalise.backward, []

    def wrong(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        calls.append(1)
        made, *rest = back(ctx, gradient)
        return 1.1 * made, *rest

    monkeypatch.setattr(kernels._Normalise, "backward", staticmethod(wrong))
    fast = FastUNet(unet, DEVICE)
    fast.kernels, fast.module.checkpointing = True, True
    for checkpointing in (True, False):
        fast.module.checkpointing = checkpointing
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            (found,) = torch.autograd.grad(fast(x, times).square().sum(), x)
        assert error(found, expected.double()) < 0.02  # up to the layers that came before the one that was wrong
        assert bool(calls) == bool(fused.FAILURES) == (not checkpointing)


def test_a_network_that_cannot_be_fused_runs_as_it_is(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "fuse", raising)
    fast = FastUNet(compact().eval(), DEVICE)
    fast.kernels = True
    x, times = random(1, 3, 16, 16), torch.tensor([3], device=DEVICE)
    assert torch.equal(fast(x, times), fast.module(x, times)) and fused.FAILURES


def test_the_time_is_projected_for_all_blocks_at_once(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unet = compact().to(DEVICE).eval().requires_grad_(False)
    fast = FastUNet(unet, DEVICE)
    fast.kernels = True
    blocks = [block for block in fast.fused.modules() if isinstance(block, fused.FusedResidualBlock)]
    tables = {id(block.table.func): block.table.func for block in blocks}
    (table,) = tables.values()
    held = table.weight.untyped_storage().data_ptr()
    assert len(blocks) > 2 and all(block.time.weight.untyped_storage().data_ptr() == held for block in blocks)
    x, times = random(2, 3, 16, 16), torch.tensor([3, 700], device=DEVICE)
    fast(x, times)  # which compares
    widths, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: widths.append(len(weight)) or linear(x, weight, bias))
    fast(x, times)
    assert widths.count(len(table.weight)) == 1 and not set(table.sizes) & set(widths)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("kind", ["compact", "scale_shift", "default"])
def test_recorded_networks_and_gradients_are_those_of_the_plain_way(kind: str) -> None:
    torch.manual_seed(0)
    unet = compact() if kind == "compact" else of_diffusers(kind, "resnet" if kind == "scale_shift" else "conv")
    for parameter in unet.to(DEVICE).eval().requires_grad_(False).parameters():
        parameter += 0.1 * torch.randn_like(parameter) / max(1, parameter[0].numel()) ** 0.5
    plain, recorded = (FastUNet(unet, DEVICE, torch.float32, 64) for _ in range(2))
    recorded.graphs = recorded.kernels = True
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for batch in (1, 2, 5, 1, 5):  # in any order, and again
            x, times = torch.randn(batch, 3, 64, 64, device=DEVICE), torch.randint(1000, (batch,), device=DEVICE)
            with torch.inference_mode():
                assert error(recorded(x, times), plain(x, times).double()) < 1e-5
            x.requires_grad_()
            (expected,) = torch.autograd.grad(plain(x, times).square().sum(), x)
            (found,) = torch.autograd.grad(recorded(x, times).square().sum(), x)
            assert error(found, expected.double()) < 1e-4
    assert all(type(made).__name__ != "method" for made in recorded._prepared.values())  # none had to do without
