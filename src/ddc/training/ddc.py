"""Training Δφ by the variational bound: Algorithm 2 of the paper, and beyond it on the sampler's own states.

L = w₁ MSE + w₂ LPIPS + w₃ KL, and optionally a distance in the prior's own features. In the paper x_t is noised
truth with uniform t. In sampling, x_t comes from the network's own earlier steps. A share of the batch can
therefore be trajectories: pictures that stay in the batch for a whole run of the sampler, one sampling step for
each training step. The network then learns on the states that it meets in sampling, at no extra cost.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddc.cuda import write_out_norms
from ddc.errors import UserError
from ddc.networks import CompactUNet, read_config, run_unet
from ddc.operators.base import Operator
from ddc.perceptual import LPIPS, rolled, unit_difference
from ddc.priors import TRAIN_STEPS, DataConsistency, Measured, Prediction, Prior, Schedule, schedule_from_config
from ddc.solvers.ddc import DDC
from ddc.training.data import (
    Draw,
    Draws,
    MixedOperator,
    Mixes,
    example_run,
    lpips_weights,
    measure_draws,
    noise_levels,
    noise_like,
)
from ddc.training.objectives import Forward, Losses, Objective, figures_of
from ddc.training.settings import DDCSettings


class PriorFeatures(nn.Module):
    """The distance of two batches of [-1, 1] pictures, (B,), as a frozen prior sees them at the time 0: a perceptual loss
    that needs no other network (Lin & Yang 2023, 2401.00110). It is LPIPS's distance, without learned weights, on the
    features of the prior's way down: each place's channels are brought to unit length and compared."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, x: Tensor, truth: Tensor) -> Tensor:
        features = self.features(x)
        with torch.no_grad():
            expected = self.features(truth)
        distance = torch.zeros(len(x), device=x.device)
        for fx, fy in zip(features, expected, strict=True):
            distance = distance + unit_difference(fx, fy).sum(1).mean((1, 2))
        return distance / len(features)

    def features(self, x: Tensor) -> list[Tensor]:
        if isinstance(self.unet, CompactUNet):
            return self.unet.encode(x, torch.zeros(1, device=x.device))
        blocks = getattr(self.unet, "down_blocks", None)  # of diffusers' UNet2DModel
        if blocks is None:
            raise UserError(
                f"the prior is a {type(self.unet).__name__}, whose features are not known; leave --w-features out"
            )
        found: list[Tensor] = []
        hooks = [block.register_forward_hook(lambda _, __, out: found.append(out[0])) for block in blocks]
        try:
            run_unet(self.unet, x, 0)
        finally:
            for hook in hooks:
                hook.remove()
        return found


@dataclass
class Slots:
    """The pictures in the batch: truth, measurement, and the position of each in its trajectory."""

    numbers: list[int]
    stage: list[int]  # position in the trajectory, or −1 for noised truth at a time of its own
    draws: list[Draw]
    operators: list[Operator]
    y: list[Tensor]
    truth: Tensor
    x: Tensor
    known: Tensor  # what the network is told; `consistent` computes the projection of x̂0 again in each step

    def measured(self) -> Measured:
        """The measurements as the data-consistency step takes them."""
        device = self.truth.device
        return MixedOperator(self.operators, device), self.y, noise_levels(self.draws, device)

    def replace(self, indices: list[int], index: Tensor, new: "Slots") -> None:
        """Put new pictures in the place of these; `index` has their indices on the device."""
        for old, fresh in ((self.truth, new.truth), (self.known, new.known), (self.x, new.x)):
            old.index_copy_(0, index, fresh)
        for j, i in enumerate(indices):
            self.numbers[i], self.stage[i], self.draws[i] = new.numbers[j], new.stage[j], new.draws[j]
            self.operators[i], self.y[i] = new.operators[j], new.y[j]


@dataclass
class DDCObjective(Objective):
    """The loss of the data-consistency network."""

    settings: DDCSettings
    network: DataConsistency
    prior: Prior
    lpips: LPIPS | None = None
    features: PriorFeatures | None = None
    slots: Slots | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        s = self.settings
        self.module, self.model = self.network.unet, self.network
        self.schedule = self.prior.schedule
        self.mixes = Mixes.of(s)
        weights = [s.w_lpips, *(entry.lpips for mix in self.mixes.mixes for entry in mix.tasks)]
        self.uses_lpips = self.lpips is not None and any(weights)
        self.validation_tasks = self.mixes.validation_tasks()
        self._pairs = [DDC(steps).pairs(self.schedule) for steps in s.trajectory_steps]
        # The next pictures do not depend on the network: a thread prepares them during the backward pass.
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="refill")
        self._next: tuple[list[int], Future[Slots]] | None = None  # their numbers, and the pictures

    @classmethod
    def from_settings(cls, settings: DDCSettings) -> "DDCObjective":
        prior = Prior.from_pretrained(settings.prior)
        check_schedules(prior, settings.init)
        if settings.init is not None:
            network = DataConsistency.from_pretrained(settings.init)
        else:
            network = DataConsistency.from_config(settings.network)
        features = PriorFeatures(prior.unet) if settings.w_features else None
        objective = cls(settings, network, prior, LPIPS("alex"), features)
        if settings.compile:
            write_out_norms(prior.unet).compile(dynamic=False)
            if features is not None:
                features.compile(dynamic=False)
        return objective

    def prepare(self, device: torch.device) -> None:
        self.prior.to(device).requires_grad_(False)
        if device.type == "cuda":
            self.prior.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._helper = ThreadPoolExecutor(1, "refill", torch.cuda.set_device, (index,))
            # a table on the CPU would be copied at each use, and each copy waits for the device
            self.schedule = self.prior.schedule = Schedule(self.schedule.alpha_bars.to(device))

    # -- the loss --------------------------------------------------------------------------------------------

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        device = draws.device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            slots = self._refill(draws, batch)
            places = list(zip(slots.numbers, slots.stage, strict=True))
            t, s = draws.tensor([self._pair(*place, draws) for place in places]).unbind(1)
            z = draws.noise([f"{number}/{stage}" for number, stage in places], slots.truth.shape, "z")
        with torch.no_grad():
            prediction = self.prior.predict(slots.x, t)
        x0, measured = prediction.x0.float(), slots.measured()
        x0_y, slots.known = self.network.consistent(measured, x0, t, slots.known, forward)  # equation 6
        terms = self._terms(slots, x0_y, prediction, t, z, step)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            slots.x = self.schedule.posterior(slots.x, x0_y.detach(), t, s, z, prediction.v)
            slots.stage = [stage + 1 if stage >= 0 else stage for stage in slots.stage]
        self._prepare_next(draws, draws.advance(len(self._done(slots))))
        return terms

    def _terms(self, slots: Slots, x0_y: Tensor, prediction: Prediction, t: Tensor, z: Tensor, step: int) -> Losses:
        """The loss and its parts, which are not weighted."""
        settings = self.settings
        mse = (x0_y - slots.truth).square().mean()
        kl = kl_of_step(self.schedule, slots.x, x0_y, slots.truth, t, z, prediction.v)
        loss = settings.w_mse * mse + settings.w_kl * kl
        terms = {"mse": mse.detach(), "kl": kl.detach()}
        shifted = rolled(step, settings.lpips_shift, x0_y, slots.truth)
        if self.uses_lpips and self.lpips is not None:
            distance = self.lpips(*shifted)
            loss = loss + (lpips_weights(slots.draws, settings.w_lpips, slots.x) * distance).mean()
            terms["lpips"] = distance.detach().mean()
        if self.features is not None and settings.w_features:
            distance = self.features(*shifted).mean()
            loss = loss + settings.w_features * distance
            terms["features"] = distance.detach()
        return {"loss": loss, **terms}

    # -- the batch -------------------------------------------------------------------------------------------

    def _trajectory(self, number: int) -> list[tuple[int, int]]:
        return self._pairs[number % len(self._pairs)]

    def _pair(self, number: int, stage: int, draws: Draws) -> tuple[int, int]:
        """(t, s) of a picture: its place in its trajectory, or a time of its own on the whole chain."""
        if stage >= 0:
            return self._trajectory(number)[stage]
        t = draws.times([number], self.schedule.train_steps)[0]
        return t, t - 1

    def _done(self, slots: Slots) -> list[int]:
        """The pictures to replace: those at the end of their trajectory, and all that are noised truth."""
        places = enumerate(zip(slots.numbers, slots.stage, strict=True))
        return [i for i, (number, stage) in places if not 0 <= stage < len(self._trajectory(number))]

    def _refill(self, draws: Draws, batch: int) -> Slots:
        if self.slots is None:
            followed = round(self.settings.trajectory_share * batch)
            numbers = draws.advance(batch)
            # trajectories begin at staggered stages, with noised truth where they are under way
            stages = [i % len(self._trajectory(n)) if i < followed else -1 for i, n in enumerate(numbers)]
            self.slots = self._new_slots(draws, numbers, stages)
            return self.slots
        done = self._done(self.slots)
        if done:
            if self._next is None:
                self._prepare_next(draws, draws.advance(len(done)))
            assert self._next is not None
            self.slots.replace(done, draws.tensor(done), self._next[1].result())
        self._next = None
        return self.slots

    def _prepare_next(self, draws: Draws, numbers: list[int]) -> None:
        assert self.slots is not None
        if numbers:
            stages = [min(self.slots.stage[i], 0) for i in self._done(self.slots)]
            self._next = numbers, self._helper.submit(self._new_slots, draws, numbers, stages)

    @torch.no_grad()
    def _new_slots(self, draws: Draws, numbers: list[int], stages: list[int]) -> Slots:
        """New pictures with their measurements; the same numbers always give the same."""
        truth, drawn, operators, measured = measure_draws(draws, numbers, self.mixes.draw)
        known = [
            torch.zeros_like(truth) if name == "projection" else self.network.channel(name, measured, truth)
            for name, _ in self.network.layout()
        ]
        z = draws.noise(numbers, truth.shape, "x")
        times = [self._pair(number, stage, draws)[0] for number, stage in zip(numbers, stages, strict=True)]
        noised = self.schedule.add_noise(truth, draws.tensor(times), z)
        begins = draws.tensor([stage == 0 for stage in stages], torch.bool).view(-1, 1, 1, 1)
        x = torch.where(begins, z, noised)  # x_T ~ N(0, I) at the start of a trajectory
        return Slots(list(numbers), list(stages), drawn, operators, measured[1], truth, x, torch.cat(known, dim=1))

    # -- checkpoints and messages ----------------------------------------------------------------------------

    def remarks(self) -> dict[str, Any]:
        return {"_prior_schedule": schedule_settings(self.prior)}

    def frozen(self) -> dict[str, nn.Module]:
        return {"prior": self.prior}

    def tensors(self) -> dict[str, Tensor]:
        if self.slots is None:
            return {}
        coming = self._next[0] if self._next is not None else []
        device, batch = self.slots.x.device, len(self.slots.numbers)
        return {
            "numbers": torch.tensor(self.slots.numbers, device=device),
            "stage": torch.tensor(self.slots.stage, device=device),
            "next": torch.tensor(coming + [-1] * (batch - len(coming)), device=device),
            "x": self.slots.x,
        }

    def restore(self, tensors: dict[str, Tensor], draws: Draws) -> None:
        if not tensors:
            return
        stages = tensors["stage"].tolist()
        # a finished trajectory has no time to be noised to; its x is loaded here in any case
        self.slots = self._new_slots(draws, tensors["numbers"].tolist(), [min(stage, 0) for stage in stages])
        self.slots.stage = stages
        if tensors["x"].shape != self.slots.x.shape or len(stages) != len(self.slots.numbers):
            raise ValueError(f"x has the shape {tuple(tensors['x'].shape)}, not {tuple(self.slots.x.shape)}")
        self.slots.x = tensors["x"].to(self.slots.x.dtype).clone()
        if "next" in tensors:
            self._prepare_next(draws, [n for n in tensors["next"].tolist() if n >= 0])

    def describe_batch(self) -> str:
        names = {draw.task.name for draw in self.slots.draws} if self.slots else set()
        return "tasks " + ", ".join(sorted(names))

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS of five-step restorations for the validation tasks."""
        figures: dict[str, list[float]] = {}
        for task, sigma_y in self.validation_tasks:
            _, x = self._restore(task, sigma_y, crops, names)
            figures |= figures_of(f"{task}@{sigma_y:g}", x, crops, self.lpips)
        return figures

    def _restore(self, task: str, sigma_y: float, crops: Tensor, names: list[str]) -> tuple[Tensor, Tensor]:
        """y at image size, and the restored pictures."""
        run, y = example_run(task, sigma_y, crops, names, self.prior, network=self.network)
        return y, DDC().solve(run).float().clamp(-1, 1)

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, y at image size, x̂0 of half-noised truth, and the restored picture; a task for each row."""
        half = self.schedule.train_steps // 2
        rows = []
        for i, name in enumerate(names):
            truth = crops[i : i + 1]
            z = noise_like(truth, 2, [name])
            x0 = self.prior.predict(self.schedule.add_noise(truth, half, z), half).x0.float()
            y, restored = self._restore(*self.validation_tasks[i % len(self.validation_tasks)], truth, [name])
            rows.append(torch.cat([truth, y, x0, restored]))
        return rows


def schedule_settings(prior: Prior) -> dict[str, Any]:
    """The settings of a prior's scheduler that determine its schedule."""
    keys = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "trained_betas")
    return {key: prior.scheduler_config[key] for key in keys if key in prior.scheduler_config}


def check_schedules(prior: Prior, network_folder: Path | None) -> None:
    """Refuse a prior whose schedule does not fit the networks, or not the one in `network_folder`."""
    if prior.schedule.train_steps != TRAIN_STEPS:
        raise UserError(
            f"the prior's schedule has {prior.schedule.train_steps} steps; a data-consistency network is trained "
            f"on {TRAIN_STEPS}: give a prior with num_train_timesteps {TRAIN_STEPS}"
        )
    if network_folder is None:
        return
    then = read_config(network_folder).get("_prior_schedule")
    if then is not None and not torch.equal(schedule_from_config(then).alpha_bars, prior.schedule.alpha_bars.cpu()):
        raise UserError(
            f"the network in {network_folder} was trained with another schedule ({then}) than this prior's "
            f"({schedule_settings(prior)}); give the prior it was trained with, or leave --init out"
        )


def kl_of_step(
    schedule: Schedule, x: Tensor, x0_y: Tensor, truth: Tensor, t: Tensor, z: Tensor, v: Tensor | None
) -> Tensor:
    """KL(q(x_s | x_0) ‖ p(x_s | y)) with s = t − 1, from the moments of the reverse noisy picture.

    m and v are the mean and variance, over pixels and channels, of x_s − √ā_s x_0; q has 0 and 1 − ā_s.
    """
    s = t - 1
    x_s = schedule.posterior(x, x0_y, t, s, z, v)
    a_s = schedule.alpha_bar(s, x)
    rest = x_s - a_s.sqrt() * truth
    m, var = rest.mean(dim=(1, 2, 3)), rest.var(dim=(1, 2, 3), unbiased=False)
    width = (1 - a_s).flatten()
    width_or_one = torch.where(s >= 0, width, torch.ones_like(width))
    kl = 0.5 * ((var / width_or_one).log() + (width_or_one + m**2) / var - 1)
    return torch.where(s >= 0, kl, torch.zeros_like(kl)).mean()
