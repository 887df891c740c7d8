"""Training the posterior denoiser: the squared error of x̂0 at a random noise level, in units of the network's output.

A share of the pictures is at θ = π/2, where nothing but y is known: there the network learns the posterior mean.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from ddc.models import PARTS
from ddc.noise import Noise, on_device
from ddc.perceptual import LPIPS
from ddc.posterior import PosteriorDenoiser, coefficients
from ddc.presets import POSTERIORS, preset
from ddc.solvers.posterior import Posterior
from ddc.training.data import Draws
from ddc.training.objectives import Forward, Losses, Objective, figures_of
from ddc.training.settings import PosteriorSettings
from ddc.training.tasks import MixedOperator, Mixes, example_run, make_operators, noise_levels

RESOLUTION = 10_000  # of the noise levels that are drawn


@dataclass
class PosteriorObjective(Objective):
    """The loss of the posterior denoiser."""

    settings: PosteriorSettings
    network: PosteriorDenoiser
    lpips: LPIPS | None = None  # for validation alone

    def __post_init__(self) -> None:
        self.module, self.model = self.network.unet, self.network
        self.folder = PARTS["posterior"]  # where the solver looks for it
        self.mixes = Mixes.of(self.settings)

    @classmethod
    def from_settings(cls, settings: PosteriorSettings) -> "PosteriorObjective":
        if settings.init is not None:
            network = PosteriorDenoiser.from_pretrained(settings.init)
        else:
            network = PosteriorDenoiser.from_config(preset(settings.network, POSTERIORS))
        return cls(settings, network, LPIPS("alex"))

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        with torch.no_grad(), torch.autocast(draws.device.type, enabled=False):
            truth, numbers = draws.take(batch)
            seeds, size = draws.seeds(numbers, "measure"), truth.shape[-1]
            drawn = [self.mixes.draw(draws.seed, number, size) for number in numbers]
            operator = MixedOperator(make_operators(drawn, seeds, size, truth.device), truth.device)
            measured = operator, operator.measure(truth, drawn, seeds), noise_levels(drawn, truth.device)
            angles = [self.angle(place / RESOLUTION) for place in draws.times(numbers, RESOLUTION)]
            theta = on_device(angles, truth.device, truth.dtype).view(-1, 1, 1, 1)
            z = Noise(draws.seeds(numbers, "noise"), device=truth.device).normal(truth.shape)
            x = theta.cos().clamp(min=0) * truth + theta.sin() * z
        x0, _ = self.network(measured, x, theta, unet=forward)
        error = (x0 - truth).square().mean((1, 2, 3))
        loss = (error / coefficients(theta)[2].flatten().square()).mean()
        return {"loss": loss, "mse": error.detach().mean()}

    def angle(self, share: float) -> float:
        """θ of a picture, for a number that is uniform in [0, 1)."""
        if share < self.settings.mean_share:
            return math.pi / 2
        quantile = (share - self.settings.mean_share) / (1 - self.settings.mean_share)
        normal = NormalDist().inv_cdf(min(max(quantile, 1e-4), 1 - 1e-4))
        return math.atan(self.settings.median * math.exp(self.settings.width * normal))

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS of the posterior mean for the validation tasks."""
        figures: dict[str, list[float]] = {}
        for task, sigma_y in self.mixes.validation_tasks():
            run, _ = example_run(task, sigma_y, crops, names, None, posterior=self.network)
            figures |= figures_of(f"{task}@{sigma_y:g}", Posterior(realism=0.0).solve(run).float(), crops, self.lpips)
        return figures

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, y at image size, the posterior mean and a sample; the tasks take turns."""
        tasks, rows = self.mixes.validation_tasks(), []
        for i, name in enumerate(names):
            truth = crops[i : i + 1]
            run, y = example_run(*tasks[i % len(tasks)], truth, [name], None, posterior=self.network)
            made = [Posterior(realism=realism).solve(run).float().clamp(-1, 1) for realism in (0.0, 1.0)]
            rows.append(torch.cat([truth, y.expand_as(truth), *made]))
        return rows
