"""What each kind of training minimises. The loop is the same for all of them.

An objective owns the module that is trained, draws its own batches, and returns named loss terms. The data-consistency
network and the posterior network have files of their own.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.images import to_internal, to_unit
from ddc.networks import build_network
from ddc.noise import Noise, on_device
from ddc.perceptual import LPIPS
from ddc.pipeline import PARTS
from ddc.priors import PredictionType, Prior, Schedule, read_preset, schedule_from_config, scheduler_config
from ddc.problems import check_sigma
from ddc.solvers.bridge import I2SB, Bridge, BridgeSchedule
from ddc.solvers.pnp_admm import DnCNN
from ddc.training.data import Draw, Draws, MixEntry, TaskMix, example_run, measure_draws, noise_like
from ddc.training.settings import BridgeSettings, DnCNNSettings, LoopSettings, PriorSettings

Losses = dict[str, Tensor]
Forward = Callable[..., Tensor]
VARIATIONAL_WEIGHT = 1e-3  # of the bound that trains a learned variance (2102.09672, L_hybrid)


class Objective(ABC):
    """The loss of one kind of training."""

    settings: LoopSettings
    module: nn.Module  # what is trained
    model: Any  # the model that it is a part of, with from_pretrained and save_pretrained
    folder: str = "model"  # of the exported model, in the run's folder
    lpips: LPIPS | None = None

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Any) -> "Objective":
        """The objective of a run, with a new network or that of `settings.init`."""

    @abstractmethod
    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        """The terms of one batch; "loss" is the one that is minimised. `forward` is the wrapped module."""

    def remarks(self) -> dict[str, Any]:
        """What the configuration of the exported model states beside what `model` needs."""
        return {}

    def prepare(self, device: torch.device) -> None:
        """Move what is used beside `module` and `lpips` to the device."""

    def frozen(self) -> dict[str, nn.Module]:
        """Networks that must be the same when a run is resumed, by their names."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What else a checkpoint must hold; the first dimension is the batch."""
        return {}

    def restore(self, tensors: dict[str, Tensor], draws: Draws) -> None:
        """Load `tensors()` of a checkpoint."""

    def describe_batch(self) -> str:
        """A description of the last batch, for the message when a loss is not finite."""
        return ""

    @abstractmethod
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """Metrics of validation pictures, one number for each picture."""

    @abstractmethod
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Examples: for each picture a row (k, 3, H, W), from the truth to the result."""


def call(forward: Forward, x: Tensor, t: Tensor) -> Tensor:
    """The output of a U-Net, which may be wrapped."""
    out = forward(x, t)
    return out if isinstance(out, Tensor) else out.sample


def figures_of(name: str, x: Tensor, truth: Tensor, lpips: LPIPS | None) -> dict[str, list[float]]:
    """PSNR and LPIPS of each picture in [-1, 1]."""
    mse = ((x.clamp(-1, 1) - truth) / 2).square().mean(dim=(1, 2, 3))
    figures = {f"{name}/psnr": (-10 * mse.log10()).tolist()}
    if lpips is not None:
        with torch.autocast(x.device.type, enabled=False):
            figures[f"{name}/lpips"] = lpips(x, truth).tolist()
    return figures


@dataclass
class PriorObjective(Objective):
    """A prior: DDPM (2006.11239) with ε, v or x0 as the target, and optionally a learned variance. MSE of the target with min-SNR-γ weights (2303.09556); `snr_gamma` 0 is the plain loss of the target."""

    settings: PriorSettings
    prior: Prior

    def __post_init__(self) -> None:
        self.module, self.model = self.prior.unet, self.prior

    @classmethod
    def from_settings(cls, settings: PriorSettings) -> "PriorObjective":
        return cls(settings, Prior(*new_prior(settings, "prior", 3, Prior)))

    def prepare(self, device: torch.device) -> None:
        if device.type == "cuda":  # a table on the CPU would be copied at each use, and each copy waits
            self.prior.schedule = Schedule(self.prior.schedule.alpha_bars.to(device))

    def take(self, draws: Draws, batch: int) -> tuple[Tensor, list[int]]:
        """What the prior is of, in the next draws, and their numbers."""
        return draws.take(batch)

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        x0, numbers = self.take(draws, batch)
        schedule = self.prior.schedule
        t = on_device(draws.times(numbers, schedule.train_steps), x0.device, torch.int64)
        z = draws.noise(numbers, x0.shape)
        x = schedule.add_noise(x0, t, z)
        raw = call(forward, x, t).float()
        v = None
        if self.prior.learns_variance:
            raw, v_raw = raw.chunk(2, dim=1)
            v = ((v_raw + 1) / 2).clamp(0, 1)
        a = schedule.alpha_bar(t, x0)
        snr = (a / (1 - a)).flatten()
        target, scale = {
            "epsilon": (z, snr),
            "v_prediction": (a.sqrt() * z - (1 - a).sqrt() * x0, snr + 1),
            "sample": (x0, torch.ones_like(snr)),
        }[self.prior.prediction_type]
        error = (raw - target).square().mean(dim=(1, 2, 3))
        gamma = self.settings.snr_gamma
        weights = snr.clamp(max=gamma) / scale if gamma else torch.ones_like(snr)
        loss = (weights * error).mean()
        terms = {"mse": error.mean().detach()}
        if v is not None:
            bound = variational_bound(schedule, x0, x, self._x0(x, raw.detach(), a), t, v)
            loss = loss + VARIATIONAL_WEIGHT * bound
            terms["bound"] = bound.detach()
        return {"loss": loss, **terms}

    def _x0(self, x: Tensor, raw: Tensor, a: Tensor) -> Tensor:
        if self.prior.prediction_type == "epsilon":
            return (x - (1 - a).sqrt() * raw) / a.sqrt()
        return a.sqrt() * x - (1 - a).sqrt() * raw if self.prior.prediction_type == "v_prediction" else raw

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR of x̂0 at the timesteps that a run of five steps visits."""
        n = self.prior.schedule.train_steps
        return {
            f"psnr_t{t}": figures_of("x0", self._denoise(crops, t)[1], crops, None)["x0/psnr"]
            for t in (n // 5, 2 * n // 5, 3 * n // 5, 4 * n // 5)
        }

    def _denoise(self, crops: Tensor, t: int) -> tuple[Tensor, Tensor]:
        z = Noise([t + i for i in range(len(crops))], device=crops.device).normal(crops.shape)
        x = self.prior.schedule.add_noise(crops, t, z)
        return x, self.prior.predict(x, t).x0.float()

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, and x_t with x̂0 at two noise levels."""
        n = self.prior.schedule.train_steps
        columns = [crops, *self._denoise(crops, n // 5), *self._denoise(crops, 3 * n // 5)]
        return list(torch.stack(columns, dim=1).unbind(0))


def new_prior(
    settings: PriorSettings, kind: str, channels: int, load: type[Prior]
) -> tuple[nn.Module, Schedule, PredictionType, float | None, dict[str, Any]]:
    """What `Prior` is made of, with a new network of these channels, or with that in `settings.init`."""
    prediction, clamp, learned = settings.prediction, settings.clamp, settings.learned_variance
    scheduler = scheduler_config(1000, settings.beta_schedule, prediction, clamp, learned)
    if settings.init is None:
        outputs = {"in_channels": channels, "out_channels": 2 * channels if learned else channels}
        unet = build_network(read_preset(kind, settings.network) | outputs)
        return unet, schedule_from_config(scheduler), prediction, clamp, scheduler
    start = load.from_pretrained(settings.init)
    then = start.scheduler_config
    keys = ("num_train_timesteps", "beta_schedule", "prediction_type", "variance_type")
    different = [
        f"{key} was {then[key]} and is {scheduler[key]}" for key in keys if key in then and then[key] != scheduler[key]
    ]
    if different:
        raise UserError(
            f"the prior in {settings.init} was trained otherwise: {'; '.join(different)}. Use the same "
            "options, or leave --init out"
        )
    return start.unet, schedule_from_config(scheduler), prediction, clamp, scheduler


def variational_bound(schedule: Schedule, x0: Tensor, x: Tensor, x0_hat: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """KL(q(x_{t−1} | x_t, x_0) ‖ p(x_{t−1} | x_t)) in bits per number; t = 0 is left out (its q has no width)."""
    s = t - 1
    mean_q = schedule.posterior_mean(x, x0, t, s)
    mean_p = schedule.posterior_mean(x, x0_hat, t, s)
    std_q = schedule.posterior_std(x, t, s).clamp(min=1e-10)
    std_p = schedule.posterior_std(x, t, s, v).clamp(min=1e-10)
    kl = (std_p / std_q).log() + (std_q**2 + (mean_q - mean_p) ** 2) / (2 * std_p**2) - 0.5
    per_image = kl.mean(dim=(1, 2, 3)) / math.log(2.0)
    return torch.where(t > 0, per_image, torch.zeros_like(per_image)).mean()


@dataclass
class BridgeObjective(Objective):
    """The bridge of I²SB (2302.05872), Algorithm 1, for one task: x_n is drawn between the picture x₀ and its measurement
    at image size x₁, with n uniform, and the network learns (x_n − x₀)/S_n."""

    settings: BridgeSettings
    bridge: Bridge
    lpips: LPIPS | None = None

    def __post_init__(self) -> None:
        self.module, self.model = self.bridge.unet, self.bridge
        name, entry = self.settings.task, MixEntry.parse(self.settings.task)
        if entry.end is not None or entry.name != name or entry.task.kind == "custom":
            raise UserError(f"{name!r} is not one task; a bridge is trained for one, for example sr4")
        self.mix = TaskMix((entry,), self.settings.sigma_max)
        self.bridge.task, self.bridge.sigma_max = name, self.settings.sigma_max
        self.folder = PARTS["bridge"].format(task=name)  # where the solver looks for it

    @classmethod
    def from_settings(cls, settings: BridgeSettings) -> "BridgeObjective":
        if settings.init is not None:  # a network of another task is a good start
            bridge = Bridge.from_pretrained(settings.init)
        else:
            config = read_preset("bridge", settings.network) | {"in_channels": 3, "out_channels": 3}
            bridge = Bridge(build_network(config), settings.task)
        return cls(settings, bridge, LPIPS("alex"))

    def prepare(self, device: torch.device) -> None:
        if device.type == "cuda":  # a table on the CPU would be copied at each use, and each copy waits
            schedule = self.bridge.schedule
            self.bridge.schedule = BridgeSchedule(schedule.forward.to(device), schedule.backward.to(device))

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        schedule = self.bridge.schedule
        with torch.no_grad(), torch.autocast(draws.device.type, enabled=False):
            numbers = draws.advance(batch)
            x0, _, _, (operator, y, _) = measure_draws(draws, numbers, self._draw)
            x1 = operator.to_image(y, (x0.shape[-2], x0.shape[-1]))
            n = on_device(draws.times(numbers, schedule.length), x0.device, torch.int64)
            x = schedule.sample(x0, x1, n, draws.noise(numbers, x0.shape))
            target = schedule.target(x, x0, n)
        loss = (call(forward, x, n).float() - target).square().mean()
        return {"loss": loss, "mse": loss.detach()}

    def _draw(self, seed: int, number: int, size: int) -> Draw:
        return self.mix.draw(np.random.default_rng((seed, 2, number)), size)

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


@dataclass
class DnCNNObjective(Objective):
    """DnCNN (1608.03981), for pictures in [0, 1]: the squared error of the denoised picture, for one noise level or a
    range of them."""

    settings: DnCNNSettings
    network: DnCNN
    lpips: LPIPS | None = None

    def __post_init__(self) -> None:
        self.module = self.model = self.network
        self.folder = PARTS["denoiser"]  # where the solver looks for it
        high, low = self.settings.sigma, self.settings.sigma_low
        self.levels = (high if low is None else low, high)
        for level in self.levels:
            check_sigma(level)
        if self.levels[0] > high:
            raise UserError(f"--sigma-low {low} lies above --sigma {high}; give the smaller number there")

    @classmethod
    def from_settings(cls, settings: DnCNNSettings) -> "DnCNNObjective":
        if settings.init is not None:
            network = DnCNN.from_pretrained(settings.init)
        else:
            network = DnCNN(settings.depth, settings.width, settings.sigma)
        return cls(settings, network, LPIPS("alex"))

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        with torch.no_grad(), torch.autocast(draws.device.type, enabled=False):
            crops, numbers = draws.take(batch)
            clean = to_unit(crops)
            levels = [np.random.default_rng((draws.seed, 2, n)).uniform(*self.levels) for n in numbers]
            sigma = on_device(levels, clean.device, torch.float32).view(-1, 1, 1, 1)
            noisy = clean + sigma * draws.noise(numbers, clean.shape)
        loss = (forward(noisy).float() - clean).square().mean()
        return {"loss": loss, "mse": loss.detach()}

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS at the network's own noise level, before and after."""
        noisy, denoised = self._denoise(crops, names)
        after = figures_of("denoised", denoised, crops, self.lpips)
        return after | figures_of("noisy", noisy, crops, self.lpips)

    def _denoise(self, crops: Tensor, names: list[str]) -> tuple[Tensor, Tensor]:
        z = noise_like(crops, 0, names)
        noisy = to_unit(crops) + self.network.sigma_y * z
        return to_internal(noisy), to_internal(self.network(noisy).float())

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, noisy, and denoised."""
        return list(torch.stack([crops, *self._denoise(crops, names)], dim=1).unbind(0))
