"""The fast path on the CPU, and the parts of the CUDA one that are plain arithmetic."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddc.cuda import FastUNet, GraphMemory, chunks
from ddc.errors import UserError
from ddc.fast import (
    SteadyNorm,
    WinogradConv2d,
    _helpers,
    accelerate_latents,
    accelerate_models,
    cpu_threads,
    cpu_unet,
    fast_unet,
    prepare_compiler,
    transform_kernel,
    winograd,
)
from ddc.networks import CompactUNet, GroupNorm, run_unet
from ddc.operators import Denoise
from ddc.precision import agreement, choose_dtype, probe, unet_dtype
from ddc.priors import DataConsistency, Prior, Schedule
from tiny import tiny_latent_prior

CPU = torch.device("cpu")


def randomise(module: nn.Module) -> nn.Module:
    """No parameter at zero, so that no branch is silent."""
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator) / max(1, p[0].numel()) ** 0.5
    return module.eval().requires_grad_(False)


def models() -> tuple[Prior, DataConsistency]:
    torch.manual_seed(0)
    small = {
        "channels": (32, 64),
        "encoder_blocks": (1, 1),
        "decoder_blocks": (1,),
        "groups": 4,
        "head_dim": 8,
    }
    prior = Prior(randomise(CompactUNet(3, 6, **small)), Schedule.linear())  # type: ignore[arg-type]
    network = DataConsistency(randomise(CompactUNet(10, 3, **small)), ("y", "estimate", "mask"))  # type: ignore[arg-type]
    return prior, network


def diffusers_prior() -> Prior:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return Prior(randomise(unet), Schedule.linear())


@pytest.mark.parametrize("t", [400, torch.tensor([1, 900])])
def test_the_cpu_path_predicts_the_same(t: int | torch.Tensor) -> None:
    prior, network = models()
    fast = accelerate_models(prior, network, "cpu")
    assert (fast.dtype, fast.batch, fast.compiled) == (torch.float32, 1, False)
    x = torch.randn(2, 3, 70, 37)
    measured = (Denoise(), torch.randn(2, 3, 70, 37), 0.1)
    plain, quick = prior.predict(x, t), fast.prior.predict(x, t)
    assert torch.allclose(plain.noise, quick.noise, atol=1e-4)
    assert plain.v is not None and quick.v is not None and torch.allclose(plain.v, quick.v, atol=1e-4)
    assert fast.network is not None
    slow, known = network.consistent(measured, x, t)
    assert torch.allclose(slow, fast.network.consistent(measured, x, t, known)[0], atol=1e-4)
    assert not torch.allclose(slow, x, atol=1e-2)


@pytest.mark.parametrize("kind", ["compact", "diffusers"])
def test_the_cpu_path_does_not_depend_on_the_number_of_threads(kind: str) -> None:
    unet = cpu_unet(models()[0].unet if kind == "compact" else diffusers_prior().unet)
    x = torch.randn(1, 3, 72, 64, generator=torch.Generator().manual_seed(2))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            with torch.inference_mode():
                results.append(run_unet(unet, x, 500))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_steady_normalisation_is_exact(layout: torch.memory_format) -> None:
    norm = randomise(GroupNorm(8, 32))
    x = (5 + torch.randn(2, 32, 13, 21, generator=torch.Generator().manual_seed(3))).to(memory_format=layout)
    exact = F.group_norm(x.double(), 8, norm.weight.double(), norm.bias.double(), norm.eps)
    norm.__class__ = SteadyNorm
    with torch.no_grad():
        steady = norm(x)
    assert (steady - exact).abs().max() < 1e-5
    given = x.clone().requires_grad_()  # gradients take PyTorch's own
    assert torch.autograd.grad(norm(given).square().sum(), given)[0].abs().max() > 0


def test_the_cpu_path_takes_diffusers_networks() -> None:
    prior = diffusers_prior()
    fast = accelerate_models(prior, None, "cpu")
    x = torch.randn(1, 3, 33, 64)
    assert fast.network is None
    assert torch.allclose(prior.predict(x, 5).noise, fast.prior.predict(x, 5).noise, atol=1e-4)


def test_gradients_flow_through_the_fast_prior() -> None:
    prior, _ = models()
    fast = accelerate_models(prior, None, "cpu").prior
    x = torch.randn(1, 3, 64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(prior.predict(x, 600).x0.square().sum(), x)
    (gradient,) = torch.autograd.grad(fast.predict(x, 600).x0.square().sum(), x)
    assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-3)


def test_the_models_given_are_left_alone() -> None:
    prior, network = models()
    before = {k: v.clone() for k, v in prior.state_dict().items()}
    x = torch.randn(1, 3, 64, 64)
    noise = prior.predict(x, 3).noise
    fast = accelerate_models(prior, network, "cpu")
    quick = fast.prior.predict(x, 3).noise
    assert torch.equal(prior.predict(x, 3).noise, noise) and not torch.equal(quick, noise)
    assert type(prior.unet).__name__ == "CompactUNet"
    assert all(torch.equal(v, before[k]) for k, v in prior.state_dict().items())


def test_whole_runs_agree() -> None:
    prior, network = models()
    fast = accelerate_models(prior, network, "cpu")
    assert agreement(probe(fast.prior, fast.network, CPU, 64), probe(prior, network, CPU, 64)) > 80


def test_what_the_cpu_cannot_do_is_refused() -> None:
    prior, _ = models()
    with pytest.raises(UserError, match="needs a CUDA device"):
        accelerate_models(prior, None, "cpu", dtype="float16")
    with pytest.raises(UserError, match="compiles for CUDA"):
        accelerate_models(prior, None, "cpu", compile=True)


@pytest.mark.parametrize(
    ("n", "sizes", "expected"),
    [
        (1, (1, 16), [(0, 1, 1)]),
        (16, (1, 16), [(0, 16, 16)]),
        (18, (1, 16), [(0, 16, 16), (16, 17, 1), (17, 18, 1)]),
        (24, (1, 16), [(0, 16, 16), (16, 24, 16)]),
        (3, (1,), [(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
    ],
)
def test_chunks(n: int, sizes: tuple[int, ...], expected: list[tuple[int, int, int]]) -> None:
    assert list(chunks(n, sizes)) == expected


def test_batches_are_cut_padded_and_joined() -> None:
    """The cutting into compiled sizes, with the network itself in the place of its compiled forms."""
    prior, _ = models()
    unet = FastUNet(prior.unet, CPU, torch.float32, 16)
    unet.sizes = (1, 4)
    seen = []

    def run(x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        assert times.shape == (len(x),)
        return unet.module(x, times)

    unet._prepared = {(1, False): run, (4, False): run}
    x = torch.randn(11, 3, 16, 16)  # 4 + 4 + 3, the last with one repeated
    times = torch.arange(11)
    assert torch.allclose(unet(x, times), prior.unet(x, times), atol=1e-5)
    assert seen == [4, 4, 4]
    assert torch.allclose(unet(x[:, :, :8], times), prior.unet(x[:, :, :8], times), atol=1e-5)
    assert len(seen) == 3  # another size is not compiled for


def test_code_is_compiled_when_there_was_work_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, _ = models()
    unet = FastUNet(prior.unet, CPU, torch.float32, 16)
    unet.sizes, unet.patience = (1, 4), 2
    compiled = []

    def compile(run: Callable, **_: object) -> Callable:
        compiled.append(run)
        return run

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    x, times = torch.randn(3, 3, 16, 16), torch.arange(3)
    results = []
    for made in (0, 0, 1, 1):
        unet(x[:, :, :8], times)  # another size does not count
        results.append(unet(x, times))
        assert len(compiled) == made
        assert torch.backends.cudnn.benchmark == (made > 0)  # a search that one picture should not wait for
    assert all(torch.allclose(result, results[0], atol=1e-5) for result in results)


def test_small_batches_are_recorded_when_there_was_work_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which batches are recorded, with the network itself in the place of its CUDA graphs."""
    recorded: list[tuple[int, bool]] = []

    def record(gradient: bool) -> Callable:
        return lambda run, x, times: recorded.append((len(x), gradient)) or run

    monkeypatch.setattr("ddc.cuda.Recorded", record(False))
    monkeypatch.setattr("ddc.cuda.recorded_with_gradient", record(True))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    prior, _ = models()
    unet = FastUNet(prior.unet, CPU, torch.float32, 16)
    unet.graphs, unet.patience = True, 1
    x, times = torch.randn(5, 3, 16, 16), torch.tensor([7])
    monkeypatch.setattr("ddc.cuda.RECORDED_BATCH", 4)
    for n in (1, 1, 1, 5, 5, 2):
        assert torch.allclose(unet(x[:n], times), prior.unet(x[:n], times), atol=1e-5)
    assert recorded == [(1, False)]  # not in the first call of a size, and once
    unet(x[:1, :, :8], times)
    for _ in range(2):
        unet(x[:1].clone().requires_grad_(), times)
        unet(x.clone().requires_grad_(), times)  # too many to keep their activations
    assert recorded == [(1, False), (1, True)]
    assert not torch.backends.cudnn.benchmark  # other sizes are not searched for


def test_smaller_and_wider_pictures_are_recorded_if_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[int, ...]] = []
    monkeypatch.setattr("ddc.cuda.Recorded", lambda run, *inputs: recorded.append(inputs[0].shape[-2:]) or run)
    monkeypatch.setattr("ddc.cuda.ELSEWHERE_PATIENCE", 2)
    monkeypatch.setattr("ddc.cuda.MOST_GRAPHS", 2)
    prior, _ = models()
    unet = FastUNet(prior.unet, CPU, torch.float32, 16)
    unet.graphs = True
    for sides in ((16, 16), (32, 32), (34, 16), (8, 16), (16, 8)):
        x, times = torch.randn(1, 3, *sides), torch.tensor([7])
        for _ in range(4):
            assert torch.allclose(unet(x, times), run_unet(prior.unet, x, times), atol=1e-5)
    assert recorded == [(16, 16), (32, 32)]  # (34, 16) is too wide, and then there are enough


def test_conditions_reach_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = CompactUNet(
        3, 3, channels=(8, 16), encoder_blocks=(1, 1), decoder_blocks=(1,), groups=4, head_dim=8, conditions=2
    )
    for parameter in plain.eval().requires_grad_(False).parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    x, times = torch.randn(3, 3, 16, 16), torch.tensor([7])
    conditions = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    expected = plain(x, times, conditions)
    assert float((expected - plain(x, times, conditions[:1])).abs().max()) > 1e-2
    unet = FastUNet(plain, CPU, torch.float32, 16)
    assert torch.allclose(run_unet(unet, x, times, conditions), expected, atol=1e-5)
    unet.sizes = (1, 2)
    monkeypatch.setattr(unet, "_compiled", lambda size, gradient=False: lambda *inputs: unet._run(*inputs))
    assert torch.allclose(run_unet(unet, x, times, conditions), expected, atol=1e-5)
    assert torch.allclose(run_unet(unet, x, times, conditions[:1]), plain(x, times, conditions[:1]), atol=1e-5)
    unet.sizes, unet.graphs = (), True
    monkeypatch.setattr("ddc.cuda.Recorded", lambda run, *inputs: run)
    assert torch.allclose(run_unet(unet, x, times, conditions), expected, atol=1e-5)


def test_a_solvers_own_network_is_prepared_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, _ = models()
    assert fast_unet(prior.unet, torch.device("mps"), 16) is prior.unet
    assert fast_unet(prior.unet, CPU, 16).channels_last is True
    # as if the CPU were a GPU
    monkeypatch.setattr("ddc.precision.AGREEMENT", {torch.float16: 20.0})
    gpu = type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr("ddc.precision.unet_dtype", lambda unet, device, size: unet_dtype(unet, CPU, size))
    monkeypatch.setattr("ddc.fast.FastUNet", lambda unet, device, *rest: FastUNet(unet, CPU, *rest))
    monkeypatch.setattr("ddc.fast.can_fuse", lambda device: True)
    for dtype, expected in {"auto": torch.float16, "float8": torch.float16, "float32": torch.float32}.items():
        fast = fast_unet(prior.unet, gpu, 16, dtype)  # type: ignore[arg-type]
        assert fast.dtype is expected and fast.kernels and fast.graphs and fast.patience > 0


def test_a_network_that_cannot_be_recorded_runs_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr("ddc.cuda.Recorded", fail)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    prior, _ = models()
    unet = FastUNet(prior.unet, CPU, torch.float32, 16)
    unet.graphs = True
    x, times = torch.randn(1, 3, 16, 16), torch.tensor([7])
    for _ in range(2):
        assert torch.allclose(unet(x, times), prior.unet(x, times), atol=1e-5)
    assert caplog.text.count("without a CUDA graph (no memory)") == 1


def test_graphs_share_memory_while_one_of_them_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = iter(range(3))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    memory = GraphMemory(CPU)
    assert GraphMemory.of.get(CPU) is memory and memory.handle == 0
    del memory
    assert GraphMemory.of.get(CPU) is None and GraphMemory(CPU).handle == 1


def test_precision_is_chosen_by_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, _ = models()
    monkeypatch.setattr("ddc.precision.AGREEMENT", {torch.float16: 20.0})
    assert choose_dtype(prior, None, CPU, 16) is torch.float16
    monkeypatch.setattr("ddc.precision.AGREEMENT", {torch.float16: 300.0})
    assert choose_dtype(prior, None, CPU, 16) is torch.float32
    prior.unet.exit.weight.fill_(7e4)  # beyond what float16 can hold
    monkeypatch.setattr("ddc.precision.AGREEMENT", {torch.float16: 20.0})
    assert choose_dtype(prior, None, CPU, 16) is torch.float32


def test_agreement() -> None:
    a = torch.zeros(1, 3, 4, 4)
    assert agreement(a, a + 0.2) == pytest.approx(20)
    assert agreement(a, a) == pytest.approx(200)
    assert agreement(a, a + float("nan")) == float("-inf")


def test_threads_and_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 1 <= cpu_threads() <= torch.get_num_threads()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # set first, so that the end of the test undoes it
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    prepare_compiler()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "ddc" / "compiled")


# ---------------------------------------------------------------------------------------------------------
# Winograd's convolutions


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [(16, 16), (17, 30), (4, 64), (33, 5), (1, 80)])
def test_equals_convolution(size: tuple[int, int], threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 40, *size), generator=generator)
    weight, bias = torch.randn((33, 40, 3, 3), generator=generator), torch.randn(33, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = winograd(x, transform_kernel(weight), bias)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    expected = F.conv2d(x, weight, bias, padding=1)
    assert (y - expected).abs().max() <= 5e-5 * expected.abs().max()


def test_each_helper_computes_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        helpers = _helpers(2)
        torch.set_num_threads(2)  # what the process is told later is not for them
        assert helpers.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_in_and_out_of_inference_mode() -> None:
    conv = nn.Conv2d(32, 32, 3, padding=1).requires_grad_(False)
    fast = WinogradConv2d(conv)
    x = torch.randn(1, 32, 24, 24)
    with torch.inference_mode():
        first = fast(x)
    second = fast(x.contiguous(memory_format=torch.channels_last))
    assert torch.equal(first, second)
    assert torch.allclose(second, conv(x), atol=1e-4)


def test_the_plain_way_where_gradients_or_few_pixels_need_it() -> None:
    conv = nn.Conv2d(32, 32, 3, padding=1).requires_grad_(False)
    fast = WinogradConv2d(conv)
    small = torch.randn(1, 32, 8, 8)
    assert torch.equal(fast(small), conv(small))
    x = torch.randn(1, 32, 24, 24, requires_grad=True)
    (gradient,) = torch.autograd.grad(fast(x).square().sum(), x)
    (expected,) = torch.autograd.grad(conv(x).square().sum(), x)
    assert torch.equal(gradient, expected)
    assert torch.equal(fast.double()(small.double()), conv.double()(small.double()))


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"padding": 0},
        {"dilation": 2},
        {"groups": 2},
        {"kernel_size": 1},
        {"padding_mode": "reflect"},
    ],
)
def test_only_what_it_can_do_is_taken(options: dict[str, int]) -> None:
    assert WinogradConv2d.takes(nn.Conv2d(32, 32, 3, padding=1))
    assert not WinogradConv2d.takes(nn.Conv2d(32, 32, **{"kernel_size": 3, "padding": 1} | options))  # type: ignore[arg-type]
    assert not WinogradConv2d.takes(nn.Linear(32, 32))


def test_a_latent_prior_stays_as_exact_as_its_fits_need() -> None:
    prior = tiny_latent_prior()
    fast = accelerate_latents(prior, torch.device("cpu"), "auto", False, None)
    assert fast.prior is not prior and fast.network is None and fast.dtype == torch.float32 and not fast.compiled
    z = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fast.prior.predict(z, 500).x0, prior.predict(z, 500).x0)
    for dtype, compiled in (("float16", False), ("auto", True)):
        with pytest.raises(UserError, match="a latent prior works in float32 and is not compiled"):
            accelerate_latents(prior, torch.device("cpu"), dtype, compiled, 1)  # type: ignore[arg-type]
