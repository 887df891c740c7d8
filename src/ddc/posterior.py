"""The posterior denoiser E[x0 | x_t, y]: one network from the mean of all pictures that explain y to a sample of them.

x_t = cos θ x0 + sin θ z is a picture with noise; n = tan θ is the noise level in units of x0. At θ = π/2 nothing but y is
known, so that the denoiser is the posterior mean E[x0 | y], in one evaluation. A run from large n to 0 draws a sample of
p(x0 | y). The network corrects the linear estimate from x_t and y, and is trained with the squared error alone.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddc.consistency import CHANNELS, Input, Measured
from ddc.errors import UserError
from ddc.networks import build_network, load_network, read_config, run_unet, save_network
from ddc.operators.base import SIGNAL_STD, LinearOperator

INPUTS: tuple[Input, ...] = ("wiener", "projection", "mask", "sigma")


class PosteriorDenoiser(nn.Module):
    """The network, which reads the linear estimate c, the guess from y, the projection of c, the mask and σ."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        expected, actual = 3 + sum(CHANNELS[name] for name in INPUTS), int(unet.config["in_channels"])  # type: ignore[index]
        if actual != expected:
            raise UserError(f"a posterior network takes {expected} channels; this one takes {actual}")
        self.unet = unet

    def forward(
        self,
        measured: Measured,
        x: Tensor,
        theta: Tensor,
        known: tuple[Tensor, Tensor] | None = None,
        unet: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x̂0 for x_t and θ, (B, 1, 1, 1). Also returns what depends on y alone, which the next step passes as `known`.

        In training `unet` is the wrapped form of the network's own U-Net.
        """
        operator, y, sigma = measured
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            guess, told = known or self.describe(measured, x)
            of_x, of_guess, scale = coefficients(theta)
            c = of_x * x + of_guess * guess
            # the proximal step from c, whose error is smaller than that of a guess
            ratio = theta.cos().clamp(min=0) / theta.sin().clamp(min=1e-4)
            p = operator.project(c, y, sigma * (1 + (SIGNAL_STD * ratio) ** 2).sqrt())
        inputs = torch.cat([c, guess, p, told], dim=1)
        raw = run_unet(unet or self.unet, inputs, 1000 * theta.flatten() / (math.pi / 2)).to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            x0 = torch.where(is_linear(operator, x.device), p, c) + scale * raw
            return operator.keep_known(x0, y, sigma), (guess, told)

    @staticmethod
    def describe(measured: Measured, x: Tensor) -> tuple[Tensor, Tensor]:
        """The guess from y, and the mask and the noise level as channels."""
        operator, y, sigma = measured
        size = (x.shape[-2], x.shape[-1])
        one = torch.ones_like(x[:, :1])
        mask = operator.observed(y, size)
        mask = one if mask is None else mask.to(one.dtype).expand_as(one)
        return operator.guess(y, sigma, size), torch.cat([mask, one * (10.0 * sigma)], dim=1)

    @staticmethod
    def from_pretrained(folder: str | Path) -> "PosteriorDenoiser":
        config = read_config(Path(folder))
        if not config.pop("posterior", False):
            raise UserError(f'{folder} is not a posterior network: its config.json does not say "posterior": true')
        return PosteriorDenoiser(load_network(folder, config)).eval()

    @staticmethod
    def from_config(config: dict[str, Any]) -> "PosteriorDenoiser":
        return PosteriorDenoiser(build_network(config | {"in_channels": 3 + sum(CHANNELS[name] for name in INPUTS)}))

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        save_network(self.unet, folder, extra_config={"posterior": True} | options.pop("extra_config", {}), **options)


def coefficients(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of x_t and of the guess in c, their mean by precision, and the scale of the network's output.

    The guess has an error of about s = `SIGNAL_STD`, and x_t / cos θ one of n = tan θ; the scale is that of c's error.
    """
    cos, sin = theta.cos().clamp(min=0), theta.sin()
    total = (SIGNAL_STD * cos) ** 2 + sin**2
    return cos * SIGNAL_STD**2 / total, sin**2 / total, SIGNAL_STD * sin / total.sqrt()


def is_linear(operator: Any, device: torch.device) -> Tensor:
    """Whether the operator is linear; for JPEG the projection of a noisy picture says little, and c is corrected."""
    linear = getattr(operator, "linear", isinstance(operator, LinearOperator))
    return linear if isinstance(linear, Tensor) else torch.tensor(linear, device=device)
