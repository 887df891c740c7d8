"""Sampling of the posterior with a network trained for it: DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095) as an SDE.

The denoiser is E[x0 | x_t, y] for x_t = cos θ x0 + sin θ z, a picture with noise; n = tan θ is the noise level in units of
x0. At θ = π/2 nothing but y is known, so that the first evaluation is the posterior mean E[x0 | y]. From there n falls to 0
by Karras' spacing (2206.00364). The network corrects the linear estimate from x_t and y, and is trained with the squared
error alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.networks import build_network, load_network, read_config, run_unet, save_network
from ddc.operators.base import SIGNAL_STD, LinearOperator, Operator
from ddc.priors import CHANNELS, Input, Measured, check_rgb
from ddc.solvers.base import Run, Solver

INPUTS: tuple[Input, ...] = ("wiener", "projection", "mask", "sigma")


@dataclass(frozen=True)
class Posterior(Solver):
    """From the mean of the posterior to a sample of it: any operator the network was trained for."""

    name: ClassVar[str] = "posterior"
    operators: ClassVar[type] = Operator
    needs: ClassVar[tuple[str, ...]] = ("posterior",)

    steps: int = 20
    """Network evaluations of a sample; the first is the mean."""
    realism: float = 1.0
    """0 is the estimate with the least error, in one evaluation; 1 is a sample; between them the run starts at less noise."""
    eta: float = 1.0
    """The share η of fresh noise: 0 is an ODE, 1 the SDE."""
    n_max: float = 20.0
    """Largest noise level, in units of pictures in [-1, 1]."""
    n_min: float = 0.015
    """Smallest noise level."""
    rho: float = 5.0
    """ρ of the spacing of noise levels; larger values put more of them at low noise."""

    def __post_init__(self) -> None:
        self.check_settings()
        if not 0 < self.n_min < self.n_max:
            raise UserError(f"n_min is {self.n_min} and n_max {self.n_max}; expected 0 < n_min < n_max")

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        denoise, measured = run.parts["posterior"], (run.A, run.y, run.sigma)
        levels = self.levels()
        zero = torch.zeros(run.shape, device=run.y.device, dtype=run.y.dtype)

        def angle(n: float) -> Tensor:
            return torch.full((run.shape[0], 1, 1, 1), math.atan(n), device=run.y.device, dtype=run.y.dtype)

        x0, known = denoise(measured, zero, angle(math.inf))  # E[x0 | y]
        run.at(0, len(levels) + 1, 1000)
        run.show(x0)
        v = x0 + levels[0] * run.normal() if levels else x0  # v = x0 + n z
        before, h_before = None, 1.0
        for i, (n, following) in enumerate(pairwise([*levels, 0.0])):
            x0, known = denoise(measured, v / math.hypot(1, n), angle(n), known)
            noise = (v - x0) / n
            if following:
                h = math.log(n / following)
                slope = 0.0 if before is None else (x0 - before) * (h / h_before)
                keep = math.exp(-h * (1 + self.eta))
                fresh = following * math.sqrt(1 - math.exp(-2 * self.eta * h))
                v = keep * v + (1 - keep) * (x0 + 0.5 * slope) + fresh * run.normal()
                before, h_before = x0, h
            run.at(i + 1, len(levels) + 1, round(1000 * math.atan(n) / (math.pi / 2)))
            run.show(x0, noise)
        return x0

    def levels(self) -> list[float]:
        """The noise levels after the mean, from the one where the run starts."""
        count = self.evaluations() - 1
        start = self.n_min * (self.n_max / self.n_min) ** self.realism
        a, b = start ** (1 / self.rho), self.n_min ** (1 / self.rho)
        return [(a + i / max(count - 1, 1) * (b - a)) ** self.rho for i in range(count)]

    def evaluations(self) -> int:
        return 1 + math.ceil(self.realism * (self.steps - 1))


class PosteriorDenoiser(nn.Module):
    """The network, which reads the linear estimate c, the guess from y, the projection of c, the mask and σ."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        expected, actual = 3 + sum(CHANNELS[name] for name in INPUTS), int(unet.config["in_channels"])  # type: ignore[index]
        if actual != expected:
            raise UserError(f"a posterior network takes {expected} channels; this one takes {actual}")
        check_rgb(unet)
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
