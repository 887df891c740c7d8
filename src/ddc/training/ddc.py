"""Training Δφ by the variational bound: Algorithm 2 of the paper, and beyond it on the sampler's own states.

L = w₁ MSE + w₂ LPIPS + w₃ KL. In the paper x_t is noised truth with uniform t. In sampling, x_t comes from the
network's own earlier steps. A share of the batch can therefore be trajectories: pictures that stay in the batch
for a whole run of the sampler, one step of it per training step, so that the network learns on the states it
will meet, at no extra cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddc.consistency import CHANNELS, DataConsistency
from ddc.noise import Noise, derive_seed
from ddc.perceptual import LPIPS
from ddc.priors import Prior
from ddc.problems import Problem, make_problem
from ddc.schedule import Schedule
from ddc.solvers.ddc import DDC
from ddc.training.data import Draws
from ddc.training.objectives import Forward, Losses, Objective, call
from ddc.training.tasks import Draw, TaskMix, groups


@dataclass
class Slots:
    """The pictures in the batch: truth, measurement, and where each stands in its run."""

    numbers: list[int]
    draws: list[Draw]
    y: list[Tensor]
    stage: list[int]  # position in the run, or −1 for noised truth at a time of its own
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
    validation_tasks: tuple[tuple[str, float], ...] = ()
    slots: Slots | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.module = self.network.unet

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        device = draws.pool.pixels.device
        schedule = self.prior.schedule
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            slots = self._refill(draws, batch)
            t, s = self._times(slots, draws)
            seeds = [
                derive_seed(draws.seed, f"z/{n}/{k}") for n, k in zip(slots.numbers, slots.stage, strict=True)
            ]
            z = Noise(seeds, device=device).normal(slots.truth.shape)
        with torch.no_grad():
            prediction = self.prior.predict(slots.x, t)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            x0 = prediction.x0.float()
            self._write_projection(slots, x0)
        raw = call(forward, torch.cat([x0, slots.known], dim=1), t).float()
        x0_y = x0 - self.network.delta(raw, slots.known, x0, t)  # equation 6

        mse = (x0_y - slots.truth).square().mean()
        kl = kl_of_step(schedule, slots.x, x0_y, slots.truth, t, z, prediction.v)
        loss = self.w_mse * mse + self.w_kl * kl
        terms = {"mse": mse.detach(), "kl": kl.detach()}
        if self.lpips is not None and self.w_lpips > 0:
            distance = self.lpips(x0_y, slots.truth).mean()
            loss = loss + self.w_lpips * distance
            terms["lpips"] = distance.detach()
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            slots.x = schedule.posterior(slots.x, x0_y.detach(), t, s, z, prediction.v)
            slots.stage = [k + 1 if k >= 0 else k for k in slots.stage]
        return {"loss": loss, **terms}

    # -- the batch -------------------------------------------------------------------------------------------

    def _pairs(self, number: int) -> list[tuple[int, int]]:
        steps = self.trajectory_steps[number % len(self.trajectory_steps)]
        return self.prior.schedule.pairs(steps)

    def _refill(self, draws: Draws, batch: int) -> Slots:
        """Replace finished runs, and every picture that is noised truth, by new pictures."""
        if self.slots is None or len(self.slots.numbers) != batch:
            runs = round(self.trajectory_share * batch)
            self.slots = self._new_slots(draws, batch)
            # runs begin at staggered stages, from noised truth where they are under way
            stages = [i % len(self._pairs(n)) if i < runs else -1 for i, n in enumerate(self.slots.numbers)]
            self._begin(self.slots, list(range(batch)), stages, draws)
            return self.slots
        slots = self.slots
        done = [i for i, k in enumerate(slots.stage) if k < 0 or k >= len(self._pairs(slots.numbers[i]))]
        if done:
            fresh = self._new_slots(draws, len(done))
            index = torch.tensor(done, device=slots.truth.device)
            slots.truth[index], slots.known[index] = fresh.truth, fresh.known
            for j, i in enumerate(done):
                slots.numbers[i], slots.draws[i], slots.y[i] = fresh.numbers[j], fresh.draws[j], fresh.y[j]
            self._begin(slots, done, [min(slots.stage[i], 0) for i in done], draws)
        return slots

    def _begin(self, slots: Slots, indices: list[int], stages: list[int], draws: Draws) -> None:
        """Set x of these slots: pure noise at the start of a run, noised truth elsewhere."""
        device = slots.truth.device
        times = []
        for i, stage in zip(indices, stages, strict=True):
            slots.stage[i] = stage
            number = slots.numbers[i]
            times.append(self._fresh_time(number, draws) if stage < 0 else self._pairs(number)[stage][0])
        index = torch.tensor(indices, device=device)
        seeds = [derive_seed(draws.seed, f"x/{slots.numbers[i]}") for i in indices]
        z = Noise(seeds, device=device).normal((len(indices), *slots.truth.shape[1:]))
        noised = self.prior.schedule.add_noise(slots.truth[index], torch.tensor(times, device=device), z)
        start = torch.tensor([stage == 0 for stage in stages], device=device).view(-1, 1, 1, 1)
        slots.x[index] = torch.where(start, z, noised)  # x_T ~ N(0, I) at the start of a run

    def _fresh_time(self, number: int, draws: Draws) -> int:
        return int(draws.times([number], self.prior.schedule.train_steps, torch.device("cpu"))[0])

    def _times(self, slots: Slots, draws: Draws) -> tuple[Tensor, Tensor]:
        pairs = []
        for number, stage in zip(slots.numbers, slots.stage, strict=True):
            if stage < 0:
                t = self._fresh_time(number, draws)
                pairs.append((t, t - 1))
            else:
                pairs.append(self._pairs(number)[stage])
        times = torch.tensor(pairs, device=slots.truth.device)
        return times[:, 0], times[:, 1]

    def _new_slots(self, draws: Draws, count: int, numbers: Sequence[int] | None = None) -> Slots:
        """New pictures with their measurements; the same numbers always give the same."""
        if numbers is None:
            truth, taken = draws.take(count)
        else:
            truth, taken = draws.crops(numbers), list(numbers)
        device = truth.device
        seeds = draws.seeds(taken, "measure")
        drawn = [self._draw(draws, n, seed, truth).on(device) for n, seed in zip(taken, seeds, strict=True)]
        y: list[Tensor] = [truth] * count
        width = sum(CHANNELS[name] for name in self.network.inputs)
        known = torch.zeros(count, width, *truth.shape[-2:], device=device)
        for indices, problem in groups(drawn, device):
            where = torch.tensor(indices, device=device)
            clean = problem.operator(truth[where])
            z = Noise([seeds[i] for i in indices], device=device).normal(clean.shape)
            measured = problem.operator.add_noise(clean, z, problem.sigma)
            for j, i in enumerate(indices):
                one = measured[j : j + 1]
                y[i] = round_to_8_bit(one) if drawn[i].rounded else one
            stacked = torch.cat([y[i] for i in indices])
            for name, start, stop in self._layout():
                if name != "projection":
                    known[where, start:stop] = self.network.channel(name, stacked, truth[where], problem)
        return Slots(taken, drawn, y, [0] * count, truth, torch.zeros_like(truth), known)

    def _draw(self, draws: Draws, number: int, seed: int, truth: Tensor) -> Draw:
        rng = np.random.default_rng((draws.seed, 2, number))
        shares = np.array([share for share, _ in self.mixes])
        mix = self.mixes[int(rng.choice(len(self.mixes), p=shares / shares.sum()))][1]
        return mix.draw(rng, truth.shape[-1], seed)

    def _layout(self) -> list[tuple[Any, int, int]]:
        layout, start = [], 0
        for name in self.network.inputs:
            layout.append((name, start, start + CHANNELS[name]))
            start += CHANNELS[name]
        return layout

    def _write_projection(self, slots: Slots, x0: Tensor) -> None:
        for name, start, stop in self._layout():
            if name == "projection":
                for indices, problem in groups(slots.draws, x0.device):
                    where = torch.tensor(indices, device=x0.device)
                    y = torch.cat([slots.y[i] for i in indices])
                    slots.known[where, start:stop] = problem.operator.project(x0[where], y, problem.sigma)

    # -- what the loop asks ----------------------------------------------------------------------------------

    def save(self, folder: Path, state: dict[str, Tensor], **options: Any) -> None:
        self.network.save_pretrained(folder, state=state, **options)

    def tensors(self) -> dict[str, Tensor]:
        if self.slots is None:
            return {}
        return {
            "numbers": torch.tensor(self.slots.numbers),
            "stage": torch.tensor(self.slots.stage),
            "x": self.slots.x,
        }

    def restore(self, tensors: dict[str, Tensor], draws: Draws) -> None:
        if not tensors:
            return
        with torch.no_grad():
            self.slots = self._new_slots(draws, len(tensors["numbers"]), tensors["numbers"].tolist())
        self.slots.stage = tensors["stage"].tolist()
        self.slots.x = tensors["x"]

    def describe_batch(self) -> str:
        return "tasks " + ", ".join(sorted({draw.task for draw in self.slots.draws})) if self.slots else ""

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS of five-step restorations for the validation tasks."""
        figures: dict[str, list[float]] = {}
        device = crops.device
        for task, sigma_y in self.validation_tasks:
            problem, y = measure(crops, names, task, sigma_y)
            noise = Noise([derive_seed(1, name) for name in names], device=device)
            x = DDC().solve(y, problem, self.prior, noise, network=self.network).float().clamp(-1, 1)
            key = f"{task}@{sigma_y:g}"
            mse = ((x - crops) / 2).square().mean(dim=(1, 2, 3))
            figures[f"{key}/psnr"] = (-10 * mse.log10()).tolist()
            if self.lpips is not None:
                with torch.autocast(device.type, enabled=False):
                    figures[f"{key}/lpips"] = self.lpips(x, crops).tolist()
        return figures


def measure(crops: Tensor, names: Sequence[str], task: str, sigma_y: float) -> tuple[Problem, Tensor]:
    """The measurements of named pictures; noise and masks depend on the names alone."""
    seeds = [derive_seed(0, name) for name in names]
    problem = make_problem(task, sigma_y, size=(crops.shape[-2], crops.shape[-1]), seeds=seeds)
    with torch.autocast(crops.device.type, enabled=False):
        y = problem.operator(crops)
        z = Noise(seeds, device=crops.device).normal(y.shape)
        return problem, problem.operator.add_noise(y, z, problem.sigma) if sigma_y > 0 else y


def round_to_8_bit(y: Tensor) -> Tensor:
    """What a measurement becomes in a PNG file."""
    return ((y.clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1


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
