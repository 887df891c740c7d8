"""Training a posterior network: the mean by the squared error, the generator by a proper scoring rule.

The denoiser learns E[x0 | x_t, y] for x_t with any noise, and for no x_t at all, which is the posterior mean.

The generator learns to draw samples. The energy score of two samples x, x′ of one measurement of the picture x0,
½(‖x − x0‖ + ‖x′ − x0‖ − ‖x − x′‖), has its least mean if the samples come from the posterior (Gneiting and Raftery 2007;
for diffusion models De Bortoli et al. 2025, arXiv 2502.02483): the last term keeps them from becoming one picture. It is
taken at each place, of the pixels at several scales and of AlexNet's features, with the weights of LPIPS. What the score
does not see, such as the joint texture of distant places, an adversary can (adversary.py).

The sharp estimate has the same loss without the last term, ‖x − x0‖, so that nothing rewards it for varying. It still starts
with noise: a network that is given the same smooth picture everywhere can make texture only as a regular pattern.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from ddc.datasets import Stream
from ddc.errors import UserError
from ddc.images import to_unit
from ddc.networks import read_config
from ddc.noise import on_device
from ddc.operators.base import Operator
from ddc.perceptual import LPIPS, judge_samples, rolled, unit_length
from ddc.pipeline import PARTS
from ddc.priors import DataConsistency, Measured, read_preset
from ddc.solvers.base import Run
from ddc.solvers.posterior import CONDITIONS, SAMPLE, SHARP, Posterior, PosteriorDenoiser, coefficients, wide_holes
from ddc.training.adversary import Adversary, balanced
from ddc.training.data import Draw, Draws, MixedOperator, Mixes, example_run, measure_draws
from ddc.training.objectives import Forward, Losses, Objective, figures_of
from ddc.training.settings import PosteriorSettings

RESOLUTION = 10_000  # of the noise levels
HIGH = (1.0, 60.0)  # the noise levels of `high_share`
SCALES = (1, 2, 4, 8, 16)  # of the pixels' energy score
MUCH_MISSING = 0.1  # error of a mean in [-1, 1] from which on its picture has its full weight for the adversary
SMALLEST_DISTANCE = 1e-4  # the root of an exact zero has no gradient


@dataclass
class Batch:
    """Pictures, and what is known of each."""

    numbers: list[int]
    truth: Tensor
    draws: list[Draw]
    operators: list[Operator]
    measured: Measured
    known: tuple[Tensor, Tensor]  # what the network is told of y
    wide: Tensor  # whether there are wide holes, (B, 1, 1, 1)

    def part(self, indices: Sequence[int]) -> "Batch":
        """These pictures of the batch."""
        device, (_, y, sigma) = self.truth.device, self.measured
        index = on_device(list(indices), device, torch.int64)
        operators = [self.operators[i] for i in indices]
        measured = MixedOperator(operators, device), [y[i] for i in indices], sigma[index]
        return Batch(
            [self.numbers[i] for i in indices],
            self.truth[index],
            [self.draws[i] for i in indices],
            operators,
            measured,
            (self.known[0][index], self.known[1][index]),
            self.wide[index],
        )

    def conditions(self) -> Tensor:
        """What the network is told beside the measurement, (B, 9)."""
        return on_device([draw.conditions.numbers() for draw in self.draws], self.truth.device, torch.float32)


@dataclass
class PosteriorObjective(Objective):
    """The squared error of the denoiser, and the energy score of the generator."""

    settings: PosteriorSettings
    network: PosteriorDenoiser
    lpips: LPIPS | None = None

    def __post_init__(self) -> None:
        s = self.settings
        self.module, self.model = self.network.unet, self.network
        self.folder = PARTS["posterior"]  # where the solver looks for it
        self.mixes = Mixes.of(s)
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="measure")
        self._ahead: tuple[list[int], Future[Batch]] | None = None  # the next numbers, and their pictures
        self._side: torch.cuda.Stream | None = None  # of that thread
        self._current: Batch | None = None
        if s.generator_share:
            if len(s.generator) != len(s.generator_wide):
                raise UserError("a generator needs as many --generator-wide as --generator levels; give both")
            if not self.network.conditional:
                raise UserError(
                    f'a generator needs a network with "conditions": {CONDITIONS} in its configuration (--network)'
                )
            self.network.generator = list(s.generator), list(s.generator_wide)
            self.network.sharp, self.network.temperature = s.sharp_share > 0, s.temperature
        self.adversary: Adversary | None = None
        if s.generator_share and s.w_adversary and self.lpips is not None:
            self.adversary = Adversary(self.lpips.features.widths, s.critic_rate)
            if s.critic is not None:
                self.adversary.read(s.critic)

    @classmethod
    def from_settings(cls, settings: PosteriorSettings) -> "PosteriorObjective":
        config = read_preset("posterior", settings.network)
        if settings.init is None:
            network = PosteriorDenoiser.from_config(config)
        elif read_config(settings.init).get("posterior"):
            network = PosteriorDenoiser.from_pretrained(settings.init)
        else:
            network = PosteriorDenoiser.grown(DataConsistency.from_pretrained(settings.init), config)
        return cls(settings, network, LPIPS("alex"))

    def prepare(self, device: torch.device) -> None:
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._helper = ThreadPoolExecutor(1, "measure", torch.cuda.set_device, (index,))
            self._side = torch.cuda.Stream(device)
        if self.adversary is not None:
            self.adversary.to(device)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.adversary is None else self.adversary.tensors()

    def restore(self, tensors: dict[str, Tensor], draws: Draws) -> None:
        if self.adversary is not None:
            self.adversary.restore(tensors)

    # -- the loss --------------------------------------------------------------------------------------------

    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        used = round(self.settings.generator_share * batch)  # by the generator
        drawn = used - round(self.settings.sharp_share * used)  # with two samples
        measured = self._batch(draws, batch)
        loss, terms, means = self._denoise(forward, draws, measured, used)
        if used:
            rows = [*range(drawn)] * 2 + [*range(drawn, used)]
            index = on_device(rows, means.device, torch.int64)
            x = self._generate(forward, draws, measured.part(rows), means[index], drawn, step)
            score, found = self._score(x, means[:used], measured.truth[:used], index, step)
            loss, terms = loss + score, terms | found
        return {"loss": loss} | {name: term.detach() for name, term in terms.items()}

    def _batch(self, draws: Draws, count: int) -> Batch:
        """The next pictures. They do not depend on the network, so that a thread prepares those of the next step."""
        ahead, self._ahead = self._ahead, None
        numbers = draws.advance(count)
        # kept until the next call: its memory must not be used again before the network has read it
        self._current = ahead[1].result() if ahead and ahead[0] == numbers else self._measured(draws, numbers)
        if not isinstance(draws.pool, Stream):  # which decodes ahead by itself
            coming = draws.coming(count)
            before = torch.cuda.current_stream().record_event() if self._side is not None else None
            self._ahead = coming, self._helper.submit(self._measured, draws, coming, before)
        return self._current

    @torch.no_grad()
    def _measured(self, draws: Draws, numbers: list[int], before: torch.cuda.Event | None = None) -> Batch:
        """These pictures; on CUDA in a stream of their own, after `before`, so that they wait for nothing later."""
        side = self._side if before is not None else None
        with torch.autocast(draws.device.type, enabled=False), torch.cuda.stream(side):
            if side is not None and before is not None:
                side.wait_event(before)
            truth, drawn, operators, measured = measure_draws(draws, numbers, self.mixes.draw)
            known = PosteriorDenoiser.describe(measured, truth)
            wide = measured[0].each(_wide, measured[2])
            batch = Batch(numbers, truth, drawn, operators, measured, known, wide)
            if side is not None:
                side.synchronize()
        return batch

    def _denoise(self, forward: Forward, draws: Draws, batch: Batch, means: int) -> tuple[Tensor, Losses, Tensor]:
        """The squared error at many noise levels, weighted, and as it is; the pictures, of which the first `means` are
        posterior means."""
        truth = batch.truth
        with torch.no_grad(), torch.autocast(truth.device.type, enabled=False):
            angles = [self.angle(place / RESOLUTION) for place in draws.times(batch.numbers, RESOLUTION)]
            angles[:means] = [math.pi / 2] * means
            theta = on_device(angles, truth.device, truth.dtype).view(-1, 1, 1, 1)
            x = theta.cos().clamp(min=0) * truth + theta.sin() * draws.noise(batch.numbers, truth.shape)
        x0, known = self.network(batch.measured, x, theta, batch.known, forward, batch.conditions())
        error = (x0 - truth).square().mean((1, 2, 3))
        of_x, of_guess, scale = coefficients(theta)
        # tasks differ in how far the truth is from what is known; without a weight the hardest would be the whole loss
        start = (of_x * x + of_guess * known[0] - truth).square().mean((1, 2, 3)).clamp(min=1e-6)
        return (error / (scale.flatten() * start.sqrt())).mean(), {"mse": error.mean()}, x0.detach()

    def _generate(self, forward: Forward, draws: Draws, batch: Batch, mean: Tensor, drawn: int, step: int) -> Tensor:
        """One of the generator's evaluations, after those before it. The first `drawn` pictures of the batch are there
        twice, for two samples; the rest get sharp estimates."""
        assert self.network.generator is not None
        device, places = batch.truth.device, range(len(batch.numbers))
        levels = list(zip(*self.network.generator, strict=True))
        last, conditions, x = step % len(levels), batch.conditions(), mean
        modes = on_device([SAMPLE if i < 2 * drawn else SHARP for i in places], device, torch.float32)
        sample = (modes == SAMPLE).view(-1, 1, 1, 1)
        share = torch.where(sample | batch.wide, 1.0, self.network.temperature)
        for stage, (usual, in_holes) in enumerate(levels[: last + 1]):
            names = [f"{batch.numbers[i]}/{int(drawn <= i < 2 * drawn)}/{stage}" for i in places]
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                n = torch.where(batch.wide & sample, in_holes, usual).to(mean)
                z = share * draws.noise(names, mean.shape, "generator")
                v = (x.float().clamp(-1, 1) + n * z) / (1 + n**2).sqrt()
            with torch.set_grad_enabled(stage == last):
                x, _ = self.network(batch.measured, v, n.atan(), batch.known, forward, conditions, modes)
        return x

    def _score(self, x: Tensor, mean: Tensor, truth: Tensor, index: Tensor, step: int) -> tuple[Tensor, Losses]:
        """The loss of the generator's pictures x, of which the i-th belongs to `truth[index[i]]`, and its terms."""
        s, lpips = self.settings, self.lpips
        assert lpips is not None
        compare = partial(scored, len(x) - len(truth))
        with torch.autocast(x.device.type, enabled=False):
            terms = {"pixels": compare(pyramid(x.float()), pyramid(truth))}
        loss = s.w_pixels * terms["pixels"]
        if not s.w_features and self.adversary is None:
            return loss, terms
        shifted = rolled(step, s.lpips_shift, x, truth, mean)
        features = [lpips.deep_features(picture) for picture in shifted]
        if s.w_features:
            with torch.autocast(x.device.type, enabled=False):
                terms["features"] = compare(*(_weighted(lpips, each) for each in features[:2]))
            loss = loss + s.w_features * terms["features"]
        if self.adversary is not None:
            photographs, means = (
                (p[index], [f[index] for f in each]) for p, each in zip(shifted[1:], features[1:], strict=True)
            )
            # where little is missing, a critic would only add grain
            missing = ((mean - truth).square().mean((1, 2, 3)).sqrt() / MUCH_MISSING).clamp(max=1)
            verdict = self.adversary.judge((shifted[0], features[0]), photographs, means, missing[index])
            terms |= {"critic": verdict.right, "adversary": verdict.generator}
            ramp = min(1.0, step / max(s.critic_warmup, 1))
            loss = balanced(loss, verdict.generator, x, ramp * s.w_adversary)
            self.adversary.learn(verdict)
        return loss, terms

    def angle(self, share: float) -> float:
        """θ of a picture, for a number that is uniform in [0, 1)."""
        mean, high = self.settings.mean_share, self.settings.high_share * (1 - self.settings.mean_share)
        if share < mean:
            return math.pi / 2
        if share < mean + high:
            return math.atan(HIGH[0] * (HIGH[1] / HIGH[0]) ** ((share - mean) / high))
        quantile = (share - mean - high) / max(1 - mean - high, 1e-9)
        normal = NormalDist().inv_cdf(min(max(quantile, 1e-4), 1 - 1e-4))
        return math.atan(self.settings.median * math.exp(self.settings.width * normal))

    # -- validation ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """PSNR and LPIPS of the posterior mean for the validation tasks; of a generator also the spread of its samples
        against their error, which is to be 1."""
        figures: dict[str, list[float]] = {}
        for task, sigma_y in self.mixes.validation_tasks():
            name = f"{task}@{sigma_y:g}"
            run, _ = self._example(task, sigma_y, crops, names)
            figures |= figures_of(name, Posterior(realism=0.0).solve(run).float(), crops, self.lpips)
            if self.network.sharp:
                figures |= figures_of(f"{name}/sharp", Posterior(realism=SHARP).solve(run).float(), crops, self.lpips)
            if self.network.generator is not None:
                samples = torch.stack([to_unit(Posterior(realism=1.0).solve(run).float()) for _ in range(2)])
                judged = judge_samples(samples, to_unit(crops))
                pairs = zip(judged["spread"], judged["rmse"], strict=True)
                figures[f"{name}/ratio"] = [2**0.5 * spread / max(rmse, 1e-9) for spread, rmse in pairs]
                figures[f"{name}/crps"] = judged["crps"]
        return figures

    def _example(self, task: str, sigma_y: float, crops: Tensor, names: list[str]) -> tuple[Run, Tensor]:
        return example_run(task, sigma_y, crops, names, None, posterior=self.network)

    @torch.no_grad()
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Truth, y at image size, the posterior mean, the sharp estimate, if there is one, and a sample; the tasks take
        turns."""
        tasks, rows = self.mixes.validation_tasks(), []
        dial = (0.0, SHARP, 1.0) if self.network.sharp else (0.0, 1.0)
        for i, name in enumerate(names):
            truth = crops[i : i + 1]
            run, y = self._example(*tasks[i % len(tasks)], truth, [name])
            made = [Posterior(realism=realism).solve(run).float().clamp(-1, 1) for realism in dial]
            rows.append(torch.cat([truth, y.expand_as(truth), *made]))
        return rows


def distance(a: Tensor, b: Tensor) -> Tensor:
    """The mean over places of the distance of features (B, C, h, w), for each picture."""
    return ((a - b).square().sum(1) + SMALLEST_DISTANCE**2).sqrt().mean((1, 2))


def energy_score(first: Tensor, second: Tensor, truth: Tensor) -> Tensor:
    """The energy score of two samples of each picture, for features (B, C, h, w)."""
    return 0.5 * (distance(first, truth) + distance(second, truth) - distance(first, second))


def scored(drawn: int, made: list[Tensor], truth: list[Tensor]) -> Tensor:
    """The energy score of the first and second `drawn` pictures, and the distance of the others; the mean over all of them
    and over lists of features."""
    scores = []
    for x, x0 in zip(made, truth, strict=True):
        energy = energy_score(x[:drawn], x[drawn : 2 * drawn], x0[:drawn])
        scores.append(torch.cat([energy, energy, distance(x[2 * drawn :], x0[drawn:])]).mean())
    return torch.stack(scores).mean()


def _wide(operator: Operator, sigma: Tensor) -> Tensor:
    return wide_holes(operator).to(sigma.device).view(-1, 1, 1, 1).expand_as(sigma)


def pyramid(x: Tensor) -> list[Tensor]:
    """The pictures at several scales, at most down to one pixel."""
    return [avg_pool2d(x, scale) if scale > 1 else x for scale in SCALES if scale <= min(x.shape[-2:])]


def _weighted(lpips: LPIPS, features: list[Tensor]) -> list[Tensor]:
    """Features whose squared distance at a place is that of LPIPS."""
    return [
        unit_length(feature.float()) * head.clamp(min=0).sqrt().view(1, -1, 1, 1)
        for feature, head in zip(features, lpips.heads, strict=True)
    ]
