"""Sampling of the posterior with a network trained for it: DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095) as an SDE.

The first evaluation is the posterior mean. From there the noise n falls by Karras' spacing (2206.00364).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.operators.base import Operator
from ddc.solvers.base import Run, Solver


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
        if self.steps < 1:
            raise UserError(f"posterior needs at least one step, not {self.steps}")
        if not 0 <= self.realism <= 1:
            raise UserError(f"realism is {self.realism}; expected a number from 0 to 1")
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
