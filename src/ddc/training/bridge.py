"""Training the bridge of I²SB (Liu et al. 2023, arXiv 2302.05872), Algorithm 1: one network for one task.

x_n is drawn between the picture x₀ and its measurement at image size x₁, with n uniform; the network learns
(x_n − x₀)/S_n.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddc.networks import network_config
from ddc.noise import Noise, derive_seed, on_device
from ddc.perceptual import LPIPS
from ddc.problems import Problem, measure_named
from ddc.solvers.base import PARTS
from ddc.solvers.bridge import Bridge, BridgeSchedule
from ddc.solvers.i2sb import I2SB
from ddc.training.data import Draws
from ddc.training.objectives import Forward, Losses, Objective, call, figures_of
from ddc.training.tasks import Group, TaskMix, group_draws, make_draws, measure_batch


@dataclass
class BridgeObjective(Objective):
    """The squared error of the bridge network's prediction."""

    bridge: Bridge
    mix: TaskMix  # the task, and the noise of its measurements
    lpips: LPIPS | None = None

    def __post_init__(self) -> None:
        self.module = self.bridge.unet
        self.bridge.sigma_max = self.mix.sigma_max
        self.folder = PARTS["bridge"].format(task=self.bridge.task)  # where the solver looks for it

    def prepare(self, device: torch.device) -> None:
        if device.type == "cuda":  # a table on the CPU would be copied at each use, and each copy waits
            schedule = self.bridge.schedule
            self.bridge.schedule = BridgeSchedule(schedule.forward.to(device), schedule.backward.to(device))
        if self.lpips is not None:
            self.lpips.to(device)

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
        choices = [self.mix.choose(np.random.default_rng((draws.seed, 2, n)), side) for n in numbers]
        seeds = draws.seeds(numbers, "measure")
        drawn = make_draws(choices, seeds, side, x0.device)
        groups = group_draws(drawn, x0.device)
        y = measure_batch(x0, drawn, seeds, groups)

        def enlarge(group: Group) -> Tensor:
            return group.problem.operator.to_image(torch.cat([y[i] for i in group.indices]), (side, side))

        return groups.apply(enlarge)

    def model_record(self) -> dict[str, Any]:
        bridge = self.bridge
        known = {"task": bridge.task, "sigma_max": bridge.sigma_max}
        return {"kind": "i2sb", **known, "network": network_config(bridge.unet)}

    def save(self, folder: Path, state: dict[str, Tensor], **options: Any) -> None:
        self.bridge.save_pretrained(folder, state=state, **options)

    def describe_batch(self) -> str:
        return f"task {self.bridge.task}"

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS of restorations, and of the measurement at image size that they start from."""
        size = (crops.shape[-2], crops.shape[-1])
        problem, y = measure_named(self.bridge.task, self.mix.sigma_max, crops, names)
        restored = self._restore(problem, y, names)
        start = problem.operator.to_image(y, size)
        figures = figures_of(self.bridge.task, restored, crops, self.lpips)
        return figures | figures_of("measurement", start, crops, self.lpips)

    def _restore(self, problem: Problem, y: Tensor, names: list[str]) -> Tensor:
        noise = Noise([derive_seed(1, name) for name in names], device=y.device)
        none: Any = None  # solvers are called with a prior, and this one has no use for it
        return I2SB().solve(y, problem, none, noise, bridge=self.bridge).float().clamp(-1, 1)

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, y at image size, the network's x̂₀ from it in one step, and the restored picture."""
        schedule, last = self.bridge.schedule, self.bridge.schedule.length - 1
        problem, y = measure_named(self.bridge.task, self.mix.sigma_max, crops, names)
        x1 = problem.operator.to_image(y, (crops.shape[-2], crops.shape[-1]))
        x0 = schedule.clean(x1, self.bridge(x1, last), last)
        columns = [crops, x1, x0, self._restore(problem, y, names)]
        return list(torch.stack(columns, dim=1).unbind(0))
