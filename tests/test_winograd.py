import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddc.winograd import WinogradConv2d, _helpers, transform_kernel, winograd


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
