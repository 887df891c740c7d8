"""Training the bridge of I²SB (Liu et al. 2023, arXiv 2302.05872), Algorithm 1: one network for one task.

x_n is drawn between the picture x₀ and its measurement at image size x₁, with n uniform; the network learns
(x_n − x₀)/S_n.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddc.models import PARTS
from ddc.networks import build_network
from ddc.noise import Noise, on_device
from ddc.perceptual import LPIPS
from ddc.presets import BRIDGES, preset
from ddc.solvers.bridge import Bridge, BridgeSchedule
from ddc.solvers.i2sb import I2SB
from ddc.training.data import Draws
from ddc.training.objectives import Forward, Losses, Objective, call, figures_of
from ddc.training.settings import BridgeSettings
from ddc.training.tasks import MixedOperator, TaskMix, example_run, make_operators, single_task


@dataclass
class BridgeObjective(Objective):
    """The squared error of the bridge network's prediction."""

    settings: BridgeSettings
    bridge: Bridge
    lpips: LPIPS | None = None

    def __post_init__(self) -> None:
        self.module, self.model = self.bridge.unet, self.bridge
        self.mix = TaskMix((single_task(self.settings.task),), self.settings.sigma_max)
        self.bridge.task, self.bridge.sigma_max = self.settings.task, self.settings.sigma_max
        self.folder = PARTS["bridge"].format(task=self.bridge.task)  # where the solver looks for it

    @classmethod
    def from_settings(cls, settings: BridgeSettings) -> "BridgeObjective":
        if settings.init is not None:  # a network of another task is a good start
            bridge = Bridge.from_pretrained(settings.init)
        else:
            config = preset(settings.network, BRIDGES) | {"in_channels": 3, "out_channels": 3}
            bridge = Bridge(build_network(config), settings.task)
        return cls(settings, bridge, LPIPS("alex"))

    def prepare(self, device: torch.device) -> None:
        if device.type == "cuda":  # a table on the CPU would be copied at each use, and each copy waits
            schedule = self.bridge.schedule
            self.bridge.schedule = BridgeSchedule(schedule.forward.to(device), schedule.backward.to(device))

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        schedule = self.bridge.schedule
        with torch.no_grad(), torch.autocast(draws.device.type, enabled=False):
            x0, numbers = draws.take(batch)
            x1 = self._measured(x0, numbers, draws)
            n = on_device(draws.times(numbers, schedule.length), x0.device, torch.int64)
            z = Noise(draws.seeds(numbers, "noise"), device=x0.device).normal(x0.shape)
            x = schedule.sample(x0, x1, n, z)
            target = schedule.target(x, x0, n)
        loss = (call(forward, x, n).float() - target).square().mean()
        return {"loss": loss, "mse": loss.detach()}

    def _measured(self, x0: Tensor, numbers: list[int], draws: Draws) -> Tensor:
        """y at image size."""
        side = x0.shape[-1]
        drawn = [self.mix.draw(np.random.default_rng((draws.seed, 2, n)), side) for n in numbers]
        seeds = draws.seeds(numbers, "measure")
        operator = MixedOperator(make_operators(drawn, seeds, side, x0.device), x0.device)
        return operator.to_image(operator.measure(x0, drawn, seeds), (side, side))

    def describe_batch(self) -> str:
        return f"task {self.bridge.task}"

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS of restorations, and of the measurement at image size that they start from."""
        start, restored = self._restore(crops, names)
        figures = figures_of(self.bridge.task, restored, crops, self.lpips)
        return figures | figures_of("measurement", start, crops, self.lpips)

    def _restore(self, crops: Tensor, names: list[str]) -> tuple[Tensor, Tensor]:
        """y at image size, and the restored pictures; the solver does not use a prior."""
        task, sigma_y = self.bridge.task, self.settings.sigma_max
        run, start = example_run(task, sigma_y, crops, names, None, bridge=self.bridge)
        return start, I2SB().solve(run).float().clamp(-1, 1)

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, y at image size, the network's x̂₀ from it in one step, and the restored picture."""
        schedule, last = self.bridge.schedule, self.bridge.schedule.length - 1
        x1, restored = self._restore(crops, names)
        x0 = schedule.clean(x1, self.bridge(x1, last), last)
        return list(torch.stack([crops, x1, x0, restored], dim=1).unbind(0))
