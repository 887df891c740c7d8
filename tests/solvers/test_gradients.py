"""Derivatives through the prior."""

import torch

from ddc.networks import CompactUNet
from ddc.priors import Prior, Schedule
from ddc.solvers.gradients import predict_with_vjp


def test_small_gradients_survive_float16() -> None:
    torch.manual_seed(0)
    unet = CompactUNet(3, channels=(8, 16), encoder_blocks=(1, 1), decoder_blocks=(1,), groups=4, head_dim=8)
    for parameter in unet.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    prior = Prior(unet.eval().requires_grad_(False), Schedule.linear(), "v_prediction")
    x, cotangent = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)
    cotangent[1] *= 1e-6  # each image by itself
    exact = predict_with_vjp(prior, x, 500)[1](cotangent)
    with torch.autocast("cpu", torch.float16):
        _, vjp = predict_with_vjp(prior, x, 500)
        rough = vjp(cotangent)
    error = (rough - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert (error < 0.01).all()


def test_no_gradient_goes_back_as_none() -> None:
    unet = CompactUNet(3, channels=(8, 16), encoder_blocks=(1, 1), decoder_blocks=(1,), groups=4, head_dim=8)
    prior = Prior(unet.eval().requires_grad_(False), Schedule.linear())
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(predict_with_vjp(prior, x, 500)[1](torch.zeros_like(x)), torch.zeros_like(x))
