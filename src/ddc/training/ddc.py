"""Training Δφ by the variational bound: Algorithm 2 of the paper, and beyond it on the sampler's own states.

L = w₁ MSE + w₂ LPIPS + w₃ KL, and where wanted a distance in the prior's own features. In the paper x_t is noised
truth with uniform t. In sampling, x_t comes from the network's own earlier steps. A share of the batch can therefore
be trajectories: pictures that stay in the batch for a whole run of the sampler, one step of it per training step, so
that the network learns on the states it will meet, at no extra cost.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddc.consistency import CHANNELS, TRAIN_STEPS, DataConsistency
from ddc.errors import UserError
from ddc.networks import network_config, read_config
from ddc.noise import Noise, derive_seed, on_device
from ddc.perceptual import LPIPS
from ddc.priors import Prior, schedule_from_config
from ddc.problems import Problem, measure_named
from ddc.schedule import Schedule
from ddc.solvers.ddc import DDC
from ddc.training.data import Draws
from ddc.training.features import PriorFeatures
from ddc.training.objectives import Forward, Losses, Objective, call, figures_of, fingerprint
from ddc.training.tasks import Draw, Group, Groups, TaskMix, group_draws, make_draws, measure_batch, pick


@dataclass
class Slots:
    """The pictures in the batch: truth, measurement, and where each stands in its run."""

    numbers: list[int]
    stage: list[int]  # position in the run, or −1 for noised truth at a time of its own
    draws: list[Draw]
    y: list[Tensor]
    truth: Tensor
    x: Tensor
    known: Tensor  # what the network is told; the part that depends on x̂0 is written anew at each step


@dataclass
class DDCObjective(Objective):
    """The loss of the data-consistency network."""

    network: DataConsistency
    prior: Prior
    mixes: tuple[tuple[float, TaskMix], ...]  # shares of the draws and what they are drawn from
    lpips: LPIPS | None
    w_mse: float = 1.0
    w_lpips: float = 0.1
    w_kl: float = 1e-3
    trajectory_share: float = 0.0  # of the batch; 0 is the paper's Algorithm 2
    trajectory_steps: tuple[int, ...] = (5,)
    lpips_shift: int = 8  # pixels; 0 is the paper's loss
    w_lpips_of: Mapping[str, float] = field(default_factory=dict)  # of single tasks, in place of w_lpips
    features: PriorFeatures | None = None
    w_features: float = 0.0
    validation_tasks: tuple[tuple[str, float], ...] = ()
    slots: Slots | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.module = self.network.unet
        self.schedule = self.prior.schedule
        self._pairs = [DDC(steps).pairs(self.schedule) for steps in self.trajectory_steps]
        # The pictures that come next do not depend on the network: a thread makes them during the backward pass.
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="refill")
        self._next: tuple[list[int], Future[Slots]] | None = None  # their numbers, and the pictures

    def prepare(self, device: torch.device) -> None:
        self.prior.to(device).requires_grad_(False)
        if device.type == "cuda":
            self.prior.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._helper = ThreadPoolExecutor(1, "refill", torch.cuda.set_device, (index,))
            # a table on the CPU would be copied at each use, and each copy waits for the device
            self.schedule = self.prior.schedule = Schedule(self.schedule.alpha_bars.to(device))
        if self.lpips is not None:
            self.lpips.to(device)

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        device, schedule = draws.device, self.schedule
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            slots = self._refill(draws, batch)
            pairs = [self._pair(n, k, draws) for n, k in zip(slots.numbers, slots.stage, strict=True)]
            t, s = on_device(pairs, device, torch.int64).unbind(1)
            seeds = [
                derive_seed(draws.seed, f"z/{n}/{k}") for n, k in zip(slots.numbers, slots.stage, strict=True)
            ]
            z = Noise(seeds, device=device).normal(slots.truth.shape)
        with torch.no_grad():
            prediction = self.prior.predict(slots.x, t)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            x0 = prediction.x0.float()
            groups = group_draws(slots.draws, device)
            self._write_projection(slots, groups, x0)
        raw = call(forward, torch.cat([x0, slots.known], dim=1), t).float()
        x0_y = x0 - self.network.delta(raw, slots.known, x0, t)  # equation 6
        with torch.autocast(device.type, enabled=False):
            x0_y = _operate(slots, groups, x0_y, "keep_known")

        mse = (x0_y - slots.truth).square().mean()
        kl = kl_of_step(schedule, slots.x, x0_y, slots.truth, t, z, prediction.v)
        loss = self.w_mse * mse + self.w_kl * kl
        terms = {"mse": mse.detach(), "kl": kl.detach()}
        shifted = self._shifted(step, x0_y, slots.truth)
        if self.lpips is not None and any((self.w_lpips, *self.w_lpips_of.values())):
            distance = self.lpips(*shifted)
            loss = loss + (self._lpips_weights(slots) * distance).mean()
            terms["lpips"] = distance.detach().mean()
        if self.features is not None and self.w_features:
            distance = self.features(*shifted).mean()
            loss = loss + self.w_features * distance
            terms["features"] = distance.detach()
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            slots.x = schedule.posterior(slots.x, x0_y.detach(), t, s, z, prediction.v)
            slots.stage = [k + 1 if k >= 0 else k for k in slots.stage]
        self._prepare_next(draws, draws.advance(len(self._done(slots))))
        return {"loss": loss, **terms}

    def _lpips_weights(self, slots: Slots) -> Tensor:
        weights = [self.w_lpips_of.get(draw.task, self.w_lpips) for draw in slots.draws]
        return on_device(weights, slots.x.device, slots.x.dtype)

    def _shifted(self, step: int, *pictures: Tensor) -> tuple[Tensor, ...]:
        """The pictures, moved round their borders to another place in every step.

        AlexNet looks at every fourth pixel. Compared at one place only, a network learns to please just these, and
        leaves a weave of four pixels' width that the distance does not see.
        """
        places = max(self.lpips_shift, 1)
        left, down = step % places, step // places % places
        return tuple(x.roll((down, left), (-2, -1)) for x in pictures)

    # -- the batch -------------------------------------------------------------------------------------------

    def _run_of(self, number: int) -> list[tuple[int, int]]:
        return self._pairs[number % len(self._pairs)]

    def _pair(self, number: int, stage: int, draws: Draws) -> tuple[int, int]:
        """(t, s) of a picture: its place in its run, or a time of its own on the whole chain."""
        if stage >= 0:
            return self._run_of(number)[stage]
        t = draws.times([number], self.schedule.train_steps)[0]
        return t, t - 1

    def _done(self, slots: Slots) -> list[int]:
        """Finished runs, and every picture that is noised truth: they make room for new pictures."""
        return [i for i, k in enumerate(slots.stage) if k < 0 or k >= len(self._run_of(slots.numbers[i]))]

    def _refill(self, draws: Draws, batch: int) -> Slots:
        if self.slots is None:
            runs = round(self.trajectory_share * batch)
            numbers = draws.advance(batch)
            # runs begin at staggered stages, from noised truth where they are under way
            stages = [i % len(self._run_of(n)) if i < runs else -1 for i, n in enumerate(numbers)]
            self.slots = self._new_slots(draws, numbers, stages)
            return self.slots
        slots, done = self.slots, self._done(self.slots)
        if done:
            if self._next is None:
                self._prepare_next(draws, draws.advance(len(done)))
            assert self._next is not None
            fresh = self._next[1].result()
            index = on_device(done, slots.truth.device, torch.int64)
            for old, new in ((slots.truth, fresh.truth), (slots.known, fresh.known), (slots.x, fresh.x)):
                old.index_copy_(0, index, new)
            for j, i in enumerate(done):
                slots.numbers[i], slots.stage[i] = fresh.numbers[j], fresh.stage[j]
                slots.draws[i], slots.y[i] = fresh.draws[j], fresh.y[j]
        self._next = None
        return slots

    def _prepare_next(self, draws: Draws, numbers: list[int]) -> None:
        assert self.slots is not None
        if numbers:
            stages = [min(self.slots.stage[i], 0) for i in self._done(self.slots)]
            self._next = numbers, self._helper.submit(self._new_slots, draws, numbers, stages)

    @torch.no_grad()
    def _new_slots(self, draws: Draws, numbers: list[int], stages: list[int]) -> Slots:
        """New pictures with their measurements; the same numbers always give the same."""
        truth = draws.crops(numbers)
        device = truth.device
        seeds = draws.seeds(numbers, "measure")
        choices = [self._choose(draws, number, truth.shape[-1]) for number in numbers]
        drawn = make_draws(choices, seeds, truth.shape[-1], device)
        groups = group_draws(drawn, device)
        y = measure_batch(truth, drawn, seeds, groups)
        width = sum(CHANNELS[name] for name in self.network.inputs)
        known = torch.zeros(len(numbers), width, *truth.shape[-2:], device=device)
        sorted_truth = truth[groups.order]

        def describe(name: Any, group: Group) -> Tensor:
            measured = torch.cat([y[i] for i in group.indices])
            return self.network.channel(name, measured, sorted_truth[group.part], group.problem)

        for name, part in self.network.layout():
            if name != "projection":
                known[:, part] = groups.apply(partial(describe, name))

        x_seeds = [derive_seed(draws.seed, f"x/{number}") for number in numbers]
        z = Noise(x_seeds, device=device).normal(truth.shape)
        times = [self._pair(number, stage, draws)[0] for number, stage in zip(numbers, stages, strict=True)]
        noised = self.schedule.add_noise(truth, on_device(times, device, torch.int64), z)
        begins = on_device([stage == 0 for stage in stages], device, torch.bool).view(-1, 1, 1, 1)
        x = torch.where(begins, z, noised)  # x_T ~ N(0, I) at the start of a run
        return Slots(list(numbers), list(stages), drawn, y, truth, x, known)

    def _choose(self, draws: Draws, number: int, size: int) -> Any:
        rng = np.random.default_rng((draws.seed, 2, number))
        return self.mixes[pick(tuple(share for share, _ in self.mixes), rng)][1].choose(rng, size)

    def _write_projection(self, slots: Slots, groups: Groups, x0: Tensor) -> None:
        for name, part in self.network.layout():
            if name == "projection":
                slots.known[:, part] = _operate(slots, groups, x0, "project")

    # -- what the loop asks ----------------------------------------------------------------------------------

    def model_record(self) -> dict[str, Any]:
        return {
            "kind": "ddc",
            "network": network_config(self.network.unet),
            "inputs": list(self.network.inputs),
            "residual": self.network.residual,
            "remarks": {"_prior_schedule": schedule_remark(self.prior)},
        }

    def save(self, folder: Path, state: dict[str, Tensor], **options: Any) -> None:
        remarks = {"_prior_schedule": schedule_remark(self.prior)}
        self.network.save_pretrained(folder, state=state, extra_config=remarks, **options)

    def identity(self) -> dict[str, str]:
        return {"weights of the prior": fingerprint(self.prior)}

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
        # a run that is over has no time of its own to be noised to; its x is overwritten here in any case
        self.slots = self._new_slots(draws, tensors["numbers"].tolist(), [min(stage, 0) for stage in stages])
        self.slots.stage = stages
        self.slots.x = tensors["x"].clone()
        if "next" in tensors:
            self._prepare_next(draws, [n for n in tensors["next"].tolist() if n >= 0])

    def describe_batch(self) -> str:
        return "tasks " + ", ".join(sorted({draw.task for draw in self.slots.draws})) if self.slots else ""

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS of five-step restorations for the validation tasks."""
        figures: dict[str, list[float]] = {}
        for task, sigma_y in self.validation_tasks:
            x = self._restore(crops, names, *measure_named(task, sigma_y, crops, names))
            figures |= figures_of(f"{task}@{sigma_y:g}", x, crops, self.lpips)
        return figures

    def _restore(self, crops: Tensor, names: list[str], problem: Problem, y: Tensor) -> Tensor:
        noise = Noise([derive_seed(1, name) for name in names], device=crops.device)
        return DDC().solve(y, problem, self.prior, noise, network=self.network).float().clamp(-1, 1)

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, y at image size, x̂0 of noised truth half way, and the restored picture, a task for each row."""
        tasks = self.validation_tasks or tuple((task.name, 0.0) for task in self.mixes[0][1].tasks[:1])
        half = self.schedule.train_steps // 2
        rows = []
        for i, name in enumerate(names):
            truth = crops[i : i + 1]
            problem, y = measure_named(*tasks[i % len(tasks)], truth, [name])
            z = Noise([derive_seed(2, name)], device=crops.device).normal(truth.shape)
            x0 = self.prior.predict(self.schedule.add_noise(truth, half, z), half).x0.float()
            size = (truth.shape[-2], truth.shape[-1])
            restored = self._restore(truth, [name], problem, y)
            rows.append(torch.cat([truth, problem.operator.to_image(y, size), x0, restored]))
        return rows


def _operate(slots: Slots, groups: Groups, x: Tensor, method: str) -> Tensor:
    """What the operator of each picture makes of x, y and σ."""
    sorted_x = x[groups.order]

    def of_group(group: Group) -> Tensor:
        y = torch.cat([slots.y[i] for i in group.indices])
        made: Tensor = getattr(group.problem.operator, method)(sorted_x[group.part], y, group.problem.sigma)
        return made

    return groups.apply(of_group)


def schedule_remark(prior: Prior) -> dict[str, Any]:
    """The settings of a prior that decide its schedule, as its scheduler has them."""
    keys = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "trained_betas")
    return {key: prior.scheduler_config[key] for key in keys if key in prior.scheduler_config}


def check_schedules(prior: Prior, network_folder: Path | None) -> None:
    """Refuse a prior whose schedule is not the one that networks are built for, or `network_folder` was
    trained with."""
    if prior.schedule.train_steps != TRAIN_STEPS:
        raise UserError(
            f"the prior's schedule has {prior.schedule.train_steps} steps; a data-consistency network is trained "
            f"on {TRAIN_STEPS}: give a prior with num_train_timesteps {TRAIN_STEPS}"
        )
    if network_folder is None:
        return
    then = read_config(network_folder).get("_prior_schedule")
    if then is not None and not torch.equal(
        schedule_from_config(then).alpha_bars, prior.schedule.alpha_bars.cpu()
    ):
        raise UserError(
            f"the network in {network_folder} was trained with another schedule ({then}) than this prior's "
            f"({schedule_remark(prior)}); give the prior it was trained with, or leave --init out"
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
