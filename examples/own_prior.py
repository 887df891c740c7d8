"""Your own prior: any object with a schedule and `predict`.

A solver asks a prior for one thing: the clean picture x̂0 and the noise ε̂, given x_t. Here the answer is exact, because
the pixels are independent and normal with a known mean and spread. No network is needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.noise import Noise
from ddc.priors import Prediction, Schedule, Time
from ddc.problems import make_problem
from ddc.solvers.base import Run
from ddc.solvers.ddnm import DDNM


@dataclass
class NormalPrior:
    """x ~ N(mean, std² I), for which E[x | x_t] is known."""

    mean: float
    std: float
    schedule: Schedule

    def predict(self, x: Tensor, t: Time) -> Prediction:
        signal, level = self.schedule.signal(t, x), self.schedule.level(t, x)
        gain = signal * self.std**2 / (signal**2 * self.std**2 + level**2)
        x0 = self.mean + gain * (x - signal * self.mean)
        return Prediction(x0, (x - signal * x0) / level)


def main(size: int = 32, steps: int = 20) -> float:
    """Inpaint a picture of which 92 % is missing, and return the mean of the restored pixels."""
    prior = NormalPrior(mean=0.5, std=0.05, schedule=Schedule.linear())
    problem = make_problem("inpaint92", size=(size, size))
    truth = prior.mean + prior.std * Noise(seeds=[0]).normal((1, 3, size, size))
    y = problem.measure(truth)
    restored = DDNM(steps=steps).solve(Run(y, problem, prior, Noise(seeds=[1])))
    observed = problem.operator.observed(y)
    assert observed is not None
    hole = observed.expand_as(restored) == 0
    print(f"missing pixels: mean {restored[hole].mean():.3f}, spread {restored[hole].std():.3f}")
    assert torch.allclose(restored[~hole], truth[~hole], atol=1e-4)  # what was measured is kept
    return float(restored[hole].mean())


if __name__ == "__main__":
    main()
