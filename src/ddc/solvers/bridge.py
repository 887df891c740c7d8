"""I²SB (Liu et al. 2023, arXiv 2302.05872), Algorithm 2, and CDDB (Chung, Kim and Ye 2023, arXiv 2305.19809).

x₀ is the clean picture and x₁ the measurement at image size; x_n lies between them. The network, trained for one task,
is shown x_n and n and predicts (x_n − x₀)/S_n. A run starts at the measurement, not at noise.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.networks import load_network, read_config, run_unet, save_network
from ddc.operators.base import Operator
from ddc.operators.jpeg import JPEG
from ddc.priors import Time
from ddc.solvers.base import Run, Solver
from ddc.solvers.gradients import residual_and_gradient


@dataclass(frozen=True)
class BridgeSchedule:
    """S_n² = Σ_{≤n} β, the variance gathered from the clean side, and S̄_n² = Σ_{>n} β from the other."""

    forward: Tensor  # S_n², (N,) float64
    backward: Tensor  # S̄_n², (N,) float64; 0 at the last index, where x_n is x₁

    @staticmethod
    def symmetric(length: int = 1000, start: float = 1e-4, end: float = 3e-4) -> "BridgeSchedule":
        """β rises as a square of a line over the first half and falls back over the second."""
        rising = torch.linspace(start**0.5, end**0.5, length, dtype=torch.float64)[: length // 2] ** 2
        forward = torch.cumsum(torch.cat([rising, rising.flip(0)]), dim=0)
        return BridgeSchedule(forward, forward[-1] - forward)

    @property
    def length(self) -> int:
        return len(self.forward)

    def pairs(self, steps: int) -> list[tuple[int, int]]:
        """The (n, m) of a run, evenly spaced from the last index to 0."""
        last = self.length - 1
        if not 1 <= steps <= last:
            raise UserError(f"steps must be between 1 and {last} (the bridge's length), not {steps}")
        indices = [round(i * last / steps) for i in reversed(range(steps + 1))]
        return list(pairwise(indices))

    def sample(self, x0: Tensor, x1: Tensor, n: Time, z: Tensor) -> Tensor:
        """q(x_n | x₀, x₁): mean (S̄² x₀ + S² x₁)/(S̄² + S²), variance S² S̄²/(S̄² + S²)."""
        fwd, bwd = self._at(self.forward, n, x0), self._at(self.backward, n, x0)
        total = fwd + bwd
        mean = (bwd / total).to(x0.dtype) * x0 + (fwd / total).to(x0.dtype) * x1
        return mean + (fwd * bwd / total).sqrt().to(x0.dtype) * z

    def target(self, x: Tensor, x0: Tensor, n: Time) -> Tensor:
        """What the network learns to predict: (x_n − x₀)/S_n."""
        return (x - x0) / self._at(self.forward, n, x).sqrt().to(x.dtype)

    def clean(self, x: Tensor, predicted: Tensor, n: Time) -> Tensor:
        """x̂₀ from the network's prediction: `target` turned round."""
        return x - self._at(self.forward, n, x).sqrt().to(x.dtype) * predicted

    def share(self, n: Time, m: Time, like: Tensor) -> Tensor:
        """α²/S_n² with α² = S_n² − S_m²: the weight of x̂₀ in the step n → m."""
        fwd_n, fwd_m = self._at(self.forward, n, like), self._at(self.forward, m, like)
        return ((fwd_n - fwd_m) / fwd_n).to(like.dtype)

    def step(self, x: Tensor, x0: Tensor, n: int, m: int, z: Tensor) -> Tensor:
        """p(x_m | x_n, x̂₀): mean (α² x̂₀ + S_m² x_n)/S_n², variance α² S_m²/S_n², and none at m = 0."""
        fwd_n, fwd_m = self._at(self.forward, n, x), self._at(self.forward, m, x)
        alpha2 = fwd_n - fwd_m
        mean = (alpha2 / fwd_n).to(x.dtype) * x0 + (fwd_m / fwd_n).to(x.dtype) * x
        return mean if m == 0 else mean + (alpha2 * fwd_m / fwd_n).sqrt().to(x.dtype) * z

    @staticmethod
    def _at(table: Tensor, n: Time, like: Tensor) -> Tensor:
        wide = torch.float32 if like.device.type == "mps" else torch.float64  # MPS has no float64
        if isinstance(n, Tensor):
            return table.to(n.device)[n].to(wide).to(like.device).view(-1, 1, 1, 1)
        return table[n].to(wide).to(like.device)


class Bridge(nn.Module):
    """A U-Net trained for one task, shown to solvers as x̂₀."""

    def __init__(
        self, unet: nn.Module, task: str, sigma_max: float = 0.0, schedule: BridgeSchedule | None = None
    ) -> None:
        super().__init__()
        inputs, outputs = unet.config["in_channels"], unet.config["out_channels"]  # type: ignore[index]
        if (inputs, outputs) != (3, 3):
            raise UserError(f"a bridge network has 3 input and 3 output channels; this one has {inputs} and {outputs}")
        self.unet = unet
        self.task = task
        self.sigma_max = sigma_max  # the largest noise of the measurements it is trained on, in [0, 1] units
        self.schedule = schedule or BridgeSchedule.symmetric()

    def forward(self, x: Tensor, n: Time) -> Tensor:
        """The prediction of (x_n − x₀)/S_n."""
        return run_unet(self.unet, x, n).to(x.dtype)

    @staticmethod
    def from_pretrained(folder: str | Path) -> "Bridge":
        config = read_config(Path(folder))
        if "task" not in config:
            raise UserError(f'{folder} is not a bridge: its config.json names no task, for example "task": "sr4"')
        task, sigma_max = config.pop("task"), config.pop("sigma_max", 0.0)
        if not isinstance(task, str) or type(sigma_max) not in (int, float) or not 0 <= sigma_max <= 1:
            raise UserError(f"{folder}: a bridge has a task by its name and a sigma_max from 0 to 1 in its config.json")
        return Bridge(load_network(folder, config), task, sigma_max).eval()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        extra = {"task": self.task, "sigma_max": self.sigma_max} | options.pop("extra_config", {})
        save_network(self.unet, folder, extra_config=extra, **options)


@dataclass(frozen=True)
class I2SB(Solver):
    """Image-to-image bridge: any operator that a bridge network was trained for."""

    name = "i2sb"
    operators = Operator
    needs = ("bridge",)

    steps: int = 20

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        bridge = run.parts["bridge"]
        x = run.A.to_image(run.y)  # x₁
        for n, m in run.steps(bridge.schedule.pairs(self.steps)):
            predicted = bridge(x, n)
            x0 = bridge.schedule.clean(x, predicted, n)
            x = bridge.schedule.step(x, x0, n, m, run.normal())  # the posterior of the bridge
            run.show(x0, predicted)
        return x


@dataclass(frozen=True)
class CDDB(I2SB):
    """Image-to-image bridge kept consistent with y: any operator that a bridge network was trained for."""

    name = "cddb"
    paper: ClassVar[dict[str, dict[type, float]]] = {"c": {JPEG: 0.5, Operator: 1.0}}

    c: float | None = None
    """Step size c of the gradient; None is the paper's: 0.5 for JPEG, 1.0 otherwise."""

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        bridge, c = run.parts["bridge"], self.setting("c", run.problem)
        x = run.A.to_image(run.y)  # x₁
        for n, m in run.steps(bridge.schedule.pairs(self.steps)):
            predicted = bridge(x, n)
            x0 = bridge.schedule.clean(x, predicted, n)
            x = bridge.schedule.step(x, x0, n, m, run.normal())
            _, gradient = residual_and_gradient(run.A, x0, run.y)
            x = x - c * bridge.schedule.share(n, m, x) * 2 * gradient  # c (α²/S_n²) ∇‖A x̂0 − y‖²
            run.show(x0, predicted)
        return x
