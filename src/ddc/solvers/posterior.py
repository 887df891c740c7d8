"""From the mean of the posterior to a sample of it, with one network.

The denoiser is E[x0 | x_t, y] for x_t = cos θ x0 + sin θ z, a picture with noise; n = tan θ is the noise level in units of
x0. At θ = π/2 nothing but y is known, so that the first evaluation is the posterior mean E[x0 | y]. A sample is drawn
from there by the generator, the same network in another mode, trained to jump from a noisy picture to a sharp one; or by
an SDE: DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095), with n falling to 0 by Karras' spacing (2206.00364).

Between the mean and a sample, the generator's picture is mean + realism · (sample − mean): if the sample is one of the
posterior, its squared error is 1 + realism² times the least. A network with a sharp estimate, which is trained to look like
the truth and not to vary, has it at 0.5: below, the picture is a mixture of the mean and it; above, the realism itself is the
mode of the network. The SDE starts at less noise instead. In a wide hole a sharp estimate starts from patches of the rest of the
picture (`patches`), chosen by the mean, and is averaged with them.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.images import INTERNAL_RANGE
from ddc.networks import build_network, load_network, read_config, run_unet, save_network
from ddc.operators.base import SIGNAL_STD, LinearOperator, Operator, Size
from ddc.operators.blur import KernelBlur
from ddc.operators.inpaint import Denoise, Inpaint
from ddc.operators.natural import blank, mixes
from ddc.priors import CHANNELS, DataConsistency, Input, Measured, check_rgb
from ddc.problems import Problem
from ddc.solvers.base import Run, Solver, Step
from ddc.solvers.messages import EVALUATIONS, as_noisy_picture
from ddc.solvers.patches import fill_with_patches
from ddc.solvers.splitting import fit_in_rounds, share_left_open, usual_rounds

INPUTS: tuple[Input, ...] = ("wiener", "projection", "mask", "sigma")
# The numbers that a network with conditions is told of a picture; all are 0 where nothing is known:
# 0    the mode, which is 0 for the mean and the SDE, 0.5 for the sharp estimate, 1 for a sample of the generator
# 1    1 if the operator is unknown, and told as the identity
# 2    (100 − quality) / 100 of the last saving as JPEG
# 3–8  0.5 ln(power of the noise / that of white noise with the same σ), of luma and of chroma: above 1/4 cycle a pixel, above
#      1/8, and below
CONDITIONS = 9
MODE = 0
SHARP, SAMPLE = 0.5, 1.0  # modes, and their realism
OWN = (
    "generator",
    "realism",
    "doubt",
    "doubt_jpeg",
    "sharp",
    "temperature",
)  # what a configuration says beside the U-Net's
MIRRORED = ((-1,), (-2, -1), (-2,))  # axes along which the further copies are turned over
MARGIN = 8  # pixels by which a noisy picture is continued, because the network leaves noise in its outermost ones
# share of σ at which a mean is denoised again, and the least σ for which that is worth its time
AGAIN, LEAST_AGAIN = 0.15, 0.04
MOST_FOR_SHARP = 0.15  # σ of noise alone, up to which a sharp estimate is better than the mean
WIDE_HOLE = 24  # pixels: a hole with a square of this side inside is wide


@dataclass(frozen=True)
class Posterior(Solver):
    """From the mean of the posterior to a sample of it: any operator the network was trained for."""

    name: ClassVar[str] = "posterior"
    operators: ClassVar[type] = Operator
    needs: ClassVar[tuple[str, ...]] = ("posterior",)

    steps: int = 20
    """Network evaluations of a sample by the SDE; the first is the mean. The generator has its own number."""
    realism: float | None = None
    """0 has the least error, 0.5 is sharp if the network can, 1 is a sample. None: the network's; 0 for noise alone above 0.15; no mean in wide holes."""
    calm: bool = True
    """Whether noise alone above 0.15 is restored with the mean, if no realism is given; not for several samples."""
    sampler: Literal["auto", "generator", "sde"] = "auto"
    """How a sample is drawn; auto is the generator if the network was trained as one."""
    wide: bool | None = None
    """Whether the holes are wide; None looks for a square of 24 missing pixels in the mask."""
    unmix: bool | None = None
    """Whether y is made a picture with noise first, in eight evaluations; None does so if the operator mixes distant pixels."""
    rounds: int | None = None
    """Rounds in which the mean is fitted to y and denoised, one evaluation each; None is 3 or 6 for blurs by a kernel, else 0."""
    again: bool | None = None
    """Whether the mean is denoised once more, at 0.15 of the noise; None does so for noise alone from 0.04, at a realism of 0."""
    copies: int | None = None
    """Mirrored copies of the picture, 1, 2 or 4, over which the mean is averaged, one evaluation each; None is 1."""
    eta: float = 1.0
    """The share η of fresh noise in the SDE: 0 is an ODE."""
    n_max: float = 20.0
    """Largest noise level of the SDE, in units of pictures in [-1, 1]."""
    n_min: float = 0.015
    """Smallest noise level of the SDE."""
    rho: float = 5.0
    """ρ of the spacing of the SDE's noise levels; larger values put more of them at low noise."""

    def __post_init__(self) -> None:
        self.check_settings()
        if not 0 < self.n_min < self.n_max:
            raise UserError(f"n_min is {self.n_min} and n_max {self.n_max}; expected 0 < n_min < n_max")
        if self.copies not in (None, 1, 2, 4):
            raise UserError(f"copies is {self.copies}; expected 1, 2 or 4")

    def settled(self, problem: Problem, parts: Mapping[str, Any], size: Size | None = None) -> "Posterior":
        """With the sampler, the kind of the holes, the realism and whether to unmix, where these are left open."""
        network = parts["posterior"]
        generator = getattr(network, "generator", None)
        sampler = ("generator" if generator else "sde") if self.sampler == "auto" else self.sampler
        if sampler == "generator" and not generator:
            raise UserError("this posterior network was not trained as a generator; use sampler=sde, or another model")
        wide, realism = self.wide, self.realism
        if wide is None and len(set((found := wide_holes(problem.operator)).tolist())) == 1:
            wide = bool(found[0])
        if realism is None and wide is not None:  # else each picture of the batch has its own
            realism = network.in_wide_holes if wide else self._usual(problem, network)
        steps, unmix, rounds, operator = self.steps, self.unmix, self.rounds, problem.operator
        if generator and sampler == "generator":
            steps = 1 + len(generator[0])
        for name, value in {"unmix": unmix, "rounds": rounds}.items():
            if value and not isinstance(operator, LinearOperator):
                raise UserError(f"{name} needs a linear operator; {problem.name} is not one. Leave it out")
        if unmix is None and size is not None:
            unmix = isinstance(operator, LinearOperator) and mixes(operator, blank(operator, size))
        told = parts.get("conditions") is not None  # of a photograph, which is not what A alone makes
        if rounds is None:
            rounds = usual_rounds(problem.sigma, realism) if isinstance(operator, KernelBlur) and not told else 0
        again, copies = self.again, 1 if self.copies is None else self.copies
        if again is None:
            again = realism == 0 and not told and _is_noise_above(LEAST_AGAIN, problem)
        chosen = dataclasses.replace(self, sampler=sampler, wide=wide, realism=realism, steps=steps, unmix=unmix)
        return dataclasses.replace(chosen, rounds=rounds, again=again, copies=copies)

    def _usual(self, problem: Problem, network: "PosteriorDenoiser") -> float:
        """The realism of a picture without wide holes."""
        return 0.0 if self.calm and _is_noise_above(MOST_FOR_SHARP, problem) else network.realism

    @torch.no_grad()
    def solve(self, run: Run) -> Tensor:
        chosen, network = self.settled(run.problem, run.parts, run.size), run.parts["posterior"]
        copies = chosen.copies or 1
        if chosen.unmix:
            return chosen._unmix(run)
        denoise = partial(network, (run.A, run.y, run.sigma), conditions=run.parts.get("conditions"))
        zero = torch.zeros(run.shape, device=run.y.device, dtype=run.y.dtype)
        mean, known = denoise(zero, zero.new_full((1, 1, 1, 1), math.pi / 2), copies=copies)  # E[x0 | y]
        count, of_mean = chosen.evaluations(), chosen.evaluations_of_mean()
        run.at(copies - 1, count, 1000)
        run.show(mean)
        left_open = zero.new_ones(1, 1, 1, 1)
        if chosen.rounds:
            mean = fit_in_rounds(
                run.A, run.y, run.sigma, mean, chosen.rounds, chosen._white_denoiser(run, first=copies)
            )
            left_open = share_left_open(run.A, run.sigma, zero)
            # the guess of a blurred picture has waves beside edges, which a sharp estimate would keep
            known = ((known[0] + mean) / 2, known[1])
        if chosen.again:
            level = AGAIN * torch.as_tensor(run.sigma, device=mean.device).to(mean).view(-1, 1, 1, 1)
            mean = chosen._white_denoiser(run, first=of_mean - copies)(mean, level)
        if count == of_mean:
            return mean
        if chosen.sampler == "sde":
            return chosen._follow_sde(run, denoise, mean, known)
        wide = wide_holes(run.A) if chosen.wide is None else torch.tensor([chosen.wide])
        no_holes = not bool(wide.any())
        wide = wide.to(zero.device).view(-1, 1, 1, 1)
        realism = torch.where(wide, network.in_wide_holes, network.realism)
        if chosen.realism is not None:
            realism = torch.full_like(realism, chosen.realism)
        middle = SHARP if network.sharp else SAMPLE
        mode = realism.clamp(min=middle)
        # a sharp estimate of a wide hole starts with patches from around it: from a smooth start it would be a regular pattern
        holes = wide if no_holes else wide & (mode == SHARP) & (run.A.observed(run.y, run.size) == 0)
        start = x = mean if no_holes else with_patches(mean, holes)
        calm = (1 - mode) / (1 - SHARP)  # 1 for the sharp estimate, 0 for a sample
        # of the noise; other pictures of wide holes need all of it
        share = torch.where(wide & (mode > SHARP), 1.0, 1 - (1 - network.temperature) * calm)
        for i, (usual, in_holes) in enumerate(zip(*network.generator, strict=True), of_mean):
            n = torch.where(wide, calm * usual + (1 - calm) * in_holes, usual).to(x)
            v = x.clamp(-1, 1) + share * n * run.normal()
            x, _ = denoise(v / (1 + n**2).sqrt(), n.atan(), known=known, mode=mode.flatten())
            run.at(i, count, round(1000 * math.atan(usual) / (math.pi / 2)))
            run.show(x, (v - x) / n)
        x = torch.where(holes, (x + start) / 2, x)
        return mean + left_open * (realism / middle).clamp(max=1) * (x - mean)

    def _white_denoiser(self, run: Run, first: int = 0) -> Callable[[Tensor, Tensor], Tensor]:
        """The mean of pictures with white noise; its evaluations are counted from `first`."""
        network, copies = run.parts["posterior"], self.copies or 1
        done = itertools.count(first + copies - 1, copies)

        def mean(noisy: Tensor, level: Tensor) -> Tensor:
            unknown = noisy.new_full((1, 1, 1, 1), math.pi / 2)
            found: Tensor = network((Denoise(), noisy, level), torch.zeros_like(noisy), unknown, copies=copies)[0]
            run.at(next(done), self.evaluations(), 1000)
            run.show(found)
            return found

        return mean

    def _unmix(self, run: Run) -> Tensor:
        """The solution for an operator that mixes distant pixels: y as a picture with noise, which is denoised."""
        zero = torch.zeros(run.shape, device=run.y.device, dtype=run.y.dtype)

        def show(step: Step) -> None:
            if run.callback:
                run.callback(
                    dataclasses.replace(
                        step, index=EVALUATIONS * (self.copies or 1) + step.index, steps=self.evaluations()
                    )
                )

        noisy, level = as_noisy_picture(run.A, run.y, run.sigma, zero, self._white_denoiser(run))
        problem = Problem(Denoise(), level / INTERNAL_RANGE, run.problem.name)
        denoiser = dataclasses.replace(self, unmix=False, rounds=0, again=False)
        x = denoiser.solve(Run(noisy, problem, None, run.noise, show, run.size, posterior=run.parts["posterior"]))
        return run.A.keep_known(run.A.project(x, run.y, run.sigma), run.y, run.sigma)

    def _follow_sde(self, run: Run, denoise: Callable[..., Any], x0: Tensor, known: Any) -> Tensor:
        """The sample at the end of the SDE, which starts with noise on the mean x0."""
        levels, first = self.levels(), self.evaluations_of_mean()
        v = x0 + levels[0] * run.normal()  # v = x0 + n z
        before, h_before = None, 1.0
        for i, (n, following) in enumerate(pairwise([*levels, 0.0])):
            x0, known = denoise(v / math.hypot(1, n), v.new_full((1, 1, 1, 1), math.atan(n)), known=known)
            noise = (v - x0) / n
            if following:
                h = math.log(n / following)
                slope = 0.0 if before is None else (x0 - before) * (h / h_before)
                keep = math.exp(-h * (1 + self.eta))
                fresh = following * math.sqrt(1 - math.exp(-2 * self.eta * h))
                v = keep * v + (1 - keep) * (x0 + 0.5 * slope) + fresh * run.normal()
                before, h_before = x0, h
            run.at(first + i, first + len(levels), round(1000 * math.atan(n) / (math.pi / 2)))
            run.show(x0, noise)
        return x0

    def levels(self) -> list[float]:
        """The noise levels of the SDE, from the one where it starts."""
        count = self._evaluations_of_sampler() - 1
        start = self.n_min * (self.n_max / self.n_min) ** (1.0 if self.realism is None else self.realism)
        a, b = start ** (1 / self.rho), self.n_min ** (1 / self.rho)
        return [(a + i / max(count - 1, 1) * (b - a)) ** self.rho for i in range(count)]

    def evaluations(self) -> int:
        return self.evaluations_of_mean() + self._evaluations_of_sampler() - 1

    def evaluations_of_mean(self) -> int:
        return (self.copies or 1) * (1 + (EVALUATIONS if self.unmix else (self.rounds or 0) + bool(self.again)))

    def _evaluations_of_sampler(self) -> int:
        realism = 1.0 if self.realism is None else self.realism
        if self.sampler == "generator":
            return self.steps if realism else 1
        return 1 + math.ceil(realism * (self.steps - 1))


def _is_noise_above(least: float, problem: Problem) -> bool:
    """Whether nothing but noise was added to the pictures, of at least this σ in [0, 1] units."""
    noisy = bool((torch.as_tensor(problem.sigma) >= least * INTERNAL_RANGE).all())
    return noisy and isinstance(problem.operator, Denoise)


def wide_holes(operator: Operator) -> Tensor:
    """Whether each mask of an operator has a square of `WIDE_HOLE` missing pixels, (masks,); for other operators not."""
    if not isinstance(operator, Inpaint) or min(operator.mask.shape[-2:]) < WIDE_HOLE:
        return torch.tensor([False])
    rows = F.max_pool2d(operator.mask.float(), (WIDE_HOLE, 1), 1)
    return (F.max_pool2d(rows, (1, WIDE_HOLE), 1) == 0).flatten(1).any(1)


def with_patches(x: Tensor, holes: Tensor) -> Tensor:
    """The pictures with patches in their holes, (B or 1, 1, H, W) of booleans."""
    holes = holes.expand(len(x), 1, *x.shape[-2:])[:, 0]
    return torch.stack([fill_with_patches(one.float(), hole) for one, hole in zip(x, holes, strict=True)]).to(x)


class PosteriorDenoiser(nn.Module):
    """The network, which reads the linear estimate c, the guess from y, the projection of c, the mask and σ."""

    def __init__(
        self,
        unet: nn.Module,
        generator: tuple[list[float], list[float]] | None = None,
        realism: float = 0.0,
        doubt: float = 1.0,
        sharp: bool = False,
        temperature: float = 1.0,
        doubt_jpeg: float | None = None,
    ) -> None:
        """`generator`: the noise levels after the mean, and those of samples in wide holes. `realism` is the usual one. `doubt`: how
        many times as wide as between samples the intervals of 90 % are, as calibrated; `doubt_jpeg` for measurements with JPEG. `sharp`: whether the generator also
        has a sharp estimate. `temperature`: the share of its noise that the sharp estimate gets where there are no wide holes;
        less makes it calmer."""
        super().__init__()
        config: Any = unet.config
        expected, actual = 3 + sum(CHANNELS[name] for name in INPUTS), int(config["in_channels"])
        if actual != expected:
            raise UserError(f"a posterior network takes {expected} channels; this one takes {actual}")
        if (told := config.get("conditions", 0)) not in (0, CONDITIONS):
            raise UserError(f"a posterior network is told {CONDITIONS} conditions, or none; this one is told {told}")
        check_rgb(unet)
        if generator is not None and not (told and _are_levels(generator)):
            raise UserError(
                "the generator of a posterior network should be two lists of noise levels, as long as each other"
            )
        doubt_jpeg = doubt if doubt_jpeg is None else doubt_jpeg
        ranges = {"realism": (realism, 1), "temperature": (temperature, 1)}
        ranges |= {"doubt": (doubt, 100), "doubt_jpeg": (doubt_jpeg, 100)}
        for name, (value, most) in ranges.items():
            if not (isinstance(value, (int, float)) and 0 <= value <= most):
                raise UserError(f"the {name} of a posterior network is {str(value)[:40]}; expected 0 to {most}")
        self.unet, self.conditional, self.generator = unet, bool(told), generator
        self.realism, self.doubt, self.sharp = float(realism), float(doubt), bool(sharp and generator)
        self.temperature, self.doubt_jpeg = float(temperature), float(doubt_jpeg)

    @property
    def in_wide_holes(self) -> float:
        """The usual realism in wide holes, where the mean is a blur: a sharp estimate, or a sample if there is none."""
        return max(self.realism, SHARP if self.sharp else SAMPLE)

    def widening(self, operator: Operator) -> float:
        """How many times as wide as between samples the intervals of 90 % are for this operator."""
        return self.doubt if isinstance(operator, LinearOperator) else self.doubt_jpeg

    def forward(
        self,
        measured: Measured,
        x: Tensor,
        theta: Tensor,
        known: tuple[Tensor, Tensor] | None = None,
        unet: Callable[..., Tensor] | None = None,
        conditions: Tensor | None = None,
        mode: float | Tensor = 0.0,
        copies: int = 1,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x̂0 for x_t and θ, (B or 1, 1, 1, 1). Also returns what depends on y alone, which the next step passes as `known`.

        In training `unet` is the wrapped form of the network's own U-Net. `conditions`, (B or 1, 9), say more about the
        measurement, see `CONDITIONS`; `mode`, for all or for each picture, is set in them. The result is the average over so many
        mirrored `copies` of the inputs.
        """
        operator, y, sigma = measured
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            guess, told = known or self.describe(measured, x)
            of_x, of_guess, scale = coefficients(theta)
            c = of_x * x + of_guess * guess
            # the proximal step from c, whose error is smaller than that of a guess
            ratio = theta.cos().clamp(min=0) / theta.sin().clamp(min=1e-4)
            p = operator.project(c, y, sigma * (1 + (SIGNAL_STD * ratio) ** 2).sqrt())
        margin = min(MARGIN, *(side - 1 for side in x.shape[-2:])) if isinstance(operator, Denoise) else 0
        inputs = F.pad(torch.cat([c, guess, p, told], dim=1), (margin,) * 4, mode="reflect")
        told_of = None
        if self.conditional:
            told_of = x.new_zeros(1, CONDITIONS) if conditions is None else conditions.to(x)
            told_of = told_of.expand(max(len(told_of), torch.as_tensor(mode).numel()), -1).clone()
            told_of[:, MODE] = mode
        times, unet = 1000 * theta.flatten() / (math.pi / 2), unet or self.unet
        raw = run_unet(unet, inputs, times, told_of).to(x.dtype)
        for axes in MIRRORED[: copies - 1]:
            raw = raw + run_unet(unet, inputs.flip(axes), times, told_of).to(x.dtype).flip(axes)
        raw = raw / copies if copies > 1 else raw
        raw = raw[..., margin : margin + x.shape[-2], margin : margin + x.shape[-1]]
        with torch.autocast(x.device.type, enabled=False):
            x0 = torch.where(is_linear(operator, x.device), p, c) + scale * raw
            return operator.keep_known(x0, y, sigma), (guess, told)

    @staticmethod
    def describe(measured: Measured, x: Tensor) -> tuple[Tensor, Tensor]:
        """The guess from y, and the mask and the noise level as channels."""
        operator, y, sigma = measured
        size = (x.shape[-2], x.shape[-1])
        one = torch.ones_like(x[:, :1])
        mask = operator.observed(y, size)
        mask = one if mask is None else mask.to(one.dtype).expand_as(one)
        return operator.guess(y, sigma, size), torch.cat([mask, one * (10.0 * sigma)], dim=1)

    @staticmethod
    def from_pretrained(folder: str | Path) -> "PosteriorDenoiser":
        config = read_config(Path(folder))
        if not config.pop("posterior", False):
            raise UserError(f'{folder} is not a posterior network: its config.json does not say "posterior": true')
        own = {name: config.pop(name) for name in OWN if name in config}
        return PosteriorDenoiser(load_network(folder, config), **own).eval()

    @staticmethod
    def from_config(config: dict[str, Any]) -> "PosteriorDenoiser":
        return PosteriorDenoiser(build_network(config | {"in_channels": 3 + sum(CHANNELS[name] for name in INPUTS)}))

    @staticmethod
    def grown(network: DataConsistency, config: dict[str, Any]) -> "PosteriorDenoiser":
        """A posterior network that begins as the first step of a data-consistency network, with what is new in the
        configuration adding nothing yet."""
        made = PosteriorDenoiser.from_config(config)
        old, new = network.unet.state_dict(), made.unet.state_dict()
        if network.inputs != INPUTS or network.residual != "blend":
            raise UserError(
                f"only a data-consistency network with the inputs {list(INPUTS)} and the residual blend can become a "
                f"posterior network; this one has {list(network.inputs)} and {network.residual}"
            )
        if different := [name for name, value in old.items() if name not in new or new[name].shape != value.shape]:
            raise UserError(
                f"the posterior network has no {different[0]} of the shape {tuple(old[different[0]].shape)}; give it the "
                "channels and blocks of the network that it begins with"
            )
        scaled = {name: value / SIGNAL_STD for name, value in old.items() if name.startswith("exit.")}
        made.unet.load_state_dict(new | old | scaled)
        return made

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        own: dict[str, Any] = {"posterior": True, "realism": self.realism, "doubt": self.doubt}
        own["doubt_jpeg"] = self.doubt_jpeg
        if self.generator:
            own |= {"generator": self.generator, "sharp": self.sharp, "temperature": self.temperature}
        save_network(self.unet, folder, extra_config=own | options.pop("extra_config", {}), **options)


def _are_levels(generator: Any) -> bool:
    """Whether this is two lists of as many noise levels, at most 19."""
    lists = isinstance(generator, (list, tuple)) and all(isinstance(levels, (list, tuple)) for levels in generator)
    if not lists or len(generator) != 2 or not 1 <= len(generator[0]) == len(generator[1]) <= 19:
        return False
    return all(isinstance(n, (int, float)) and 1e-3 <= n <= 1e3 for levels in generator for n in levels)


def coefficients(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of x_t and of the guess in c, their mean by precision, and the scale of the network's output.

    The guess has an error of about s = `SIGNAL_STD`, and x_t / cos θ one of n = tan θ; the scale is that of c's error.
    """
    cos, sin = theta.cos().clamp(min=0), theta.sin()
    total = (SIGNAL_STD * cos) ** 2 + sin**2
    return cos * SIGNAL_STD**2 / total, sin**2 / total, SIGNAL_STD * sin / total.sqrt()


def is_linear(operator: Any, device: torch.device) -> Tensor:
    """Whether the operator is linear; for JPEG the projection of a noisy picture says little, and c is corrected."""
    linear = getattr(operator, "linear", isinstance(operator, LinearOperator))
    return linear if isinstance(linear, Tensor) else torch.tensor(linear, device=device)
