"""Plans what to do with a photograph: from what was found to a measurement, its operator, its noise, and whether the
result is better."""

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from ddc.diagnosis.blocks import saved, with_margin
from ddc.diagnosis.content import Mask, find_marks
from ddc.diagnosis.enlarged_jpeg import EnlargedJPEG
from ddc.diagnosis.enlargement import without_enlargement
from ddc.diagnosis.findings import STRONGEST, Findings, examine
from ddc.diagnosis.grain import Noise
from ddc.diagnosis.planes import luma_chroma
from ddc.estimates import COARSEST_TO_DEBLUR, is_possible
from ddc.images import Picture, from_light, quantise, to_internal, unit_float
from ddc.jpegfile import jpeg_settings
from ddc.operators.base import LinearOperator, Operator
from ddc.operators.blur import KernelBlur
from ddc.operators.inpaint import Denoise, Inpaint
from ddc.problems import Problem, Task

NOTHING = "nothing"  # the task of a picture that is returned as it is
AREAS = np.array(
    [1 - math.pi / 16, 3 * math.pi / 64, math.pi / 64]
)  # shares of the bands of `grain` in all frequencies
# RMS error of JPEG in [0, 1] units at quality 30, 35, … 95, a median of photographs
JPEG_QUALITIES = np.arange(30, 100, 5)
JPEG_ERRORS = (
    0.0316,
    0.0295,
    0.0278,
    0.0263,
    0.0251,
    0.0241,
    0.0229,
    0.0218,
    0.0205,
    0.0192,
    0.0174,
    0.0151,
    0.0122,
    0.0085,
)
FINEST_JPEG = 96  # quality from which on the errors are those of rounding
NOISE_OF_SHAKEN = 0.02  # σ that covers the errors of an estimated kernel
# Shares of the restoration in the result at two JPEG qualities. The picture's coefficients and the restoration's were
# rounded to the same values, and so are those of their mean, which has less error than both.
JPEG_SHARES = ((10, 30), (0.8, 0.6))
# for weak damage and coarse noise, where sharper estimates only add grain; two copies take no more time than these
LEAST_ERROR = "posterior:realism=0:copies=2"
# for blurs, whose shape and width are estimates: sharper pictures, or ones that are fitted to y in rounds, get waves; and for
# enlarged JPEG files, from whose marks sharper pictures make detail
CALM = "posterior:realism=0.25:rounds=0"
# for blurs in linear light, whose shape is known well enough to fit the picture to y
LENS = "posterior:realism=0.25"
NOISE_OF_LIGHT = 1.5  # times σ in linear light, where the noise is stronger in bright parts
# What tells that a restoration is worse than its source, see `regret`
MOST_RESIDUAL, RINGING, STRUCTURE, EVEN, HIDDEN = (1.6, 0.012), (1.25, 0.006), 3.0, 0.008, 3.5

DOING = {  # what is done for the tasks of each family
    "superres": "New detail replaces the enlargement",
    "blur": "The blur is undone",
    "inpaint": "The holes are filled",
    "jpeg": "The marks of JPEG are removed",
    "denoise": "The noise is removed",
}


@dataclass(frozen=True)
class Conditions:
    """What a posterior network is told of a photograph beside its operator and σ (`ddc.solvers.posterior.CONDITIONS`)."""

    blind: bool = False  # the operator is unknown, and told as the identity
    quality: int = 100  # of the last JPEG compression
    colour: tuple[float, ...] = (0.0,) * 6  # of the noise, in three bands of luma and of chroma

    @staticmethod
    def of_quality(quality: int | None) -> "Conditions":
        """Returns what is told of a JPEG file of this quality, or of another file."""
        return Conditions(quality=100 if quality is None or quality >= FINEST_JPEG else quality)

    def numbers(self) -> tuple[float, ...]:
        """Returns what the network is told, 9 numbers; the first is set by the solver."""
        return 0.0, float(self.blind), (100 - self.quality) / 100, *self.colour

    def tensor(self, device: torch.device) -> Tensor:
        """Returns the numbers, (1, 9): the same tensor for equal conditions, so that such pictures can share a batch."""
        return _as_tensor(self, device)


@lru_cache(maxsize=256)
def _as_tensor(conditions: Conditions, device: torch.device) -> Tensor:
    return torch.tensor([conditions.numbers()], device=device)


@dataclass(frozen=True)
class Treatment:
    """What the pipeline does: prepare the picture, restore it with a task and σ_y, and bring it to its size."""

    task: str
    sigma: float = 0.0
    light: bool = False  # whether the picture is restored in linear light
    shrink: float = 1.0  # the factor by which it was enlarged
    enlarged: EnlargedJPEG | None = None  # the JPEG file that was enlarged
    margins: tuple[int, int] = (0, 0)  # rows and columns to add above and to the left, for whole blocks of JPEG
    first: int | None = None  # the quality in which it was first saved, to undo the errors of the second saving
    share: float = 1.0  # of the restoration in the result; the rest is the measurement
    because: tuple[str, ...] = ()  # the findings, in words
    operator: Operator | None = dataclasses.field(default=None, compare=False)  # instead of the task's own
    conditions: Conditions | None = None  # for a posterior network
    solver: str | None = None  # where none is named
    marks: Mask | None = dataclasses.field(default=None, compare=False)  # scratches and dust that are filled

    def in_words(self) -> str:
        """Returns what was found in a picture, and what is done about it."""
        found = " ".join(self.because)
        if self.task == NOTHING:
            return f"{found} It is left as it is."
        noise = " in linear light" if self.light else ""
        noise += f" with noise {self.sigma:.3f}" if self.sigma else ""
        return f"{found} {DOING[Task.parse(self.task).family]} ({self.task}{noise})."

    def prepared(self, picture: Picture) -> Picture:
        """Returns the picture that is the measurement of the task."""
        if self.light:
            return picture.in_light()
        if self.shrink > 1:
            levels = quantise(picture.pixels, 8)
            small = self.enlarged.undone(levels) if self.enlarged else without_enlargement(levels, self.shrink)
            return dataclasses.replace(picture, pixels=small, alpha=None)
        top, left = self.margins
        if self.first is not None:
            pixels = saved(with_margin(quantise(picture.pixels, 8), top, left), self.first)
            return dataclasses.replace(picture, pixels=pixels, alpha=None)
        if self.margins != (0, 0):
            return dataclasses.replace(picture, pixels=with_margin(picture.pixels, top, left), alpha=None)
        return picture

    def finished(self, restored: Picture, source: Picture) -> Picture:
        """Returns a restored picture at the place and in the size of its source."""
        if self.light:
            return dataclasses.replace(restored, pixels=from_light(unit_float(restored.pixels)), bits=source.bits)
        if self.shrink > 1 and restored.size != source.size:
            planes = [PIL.Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(restored.pixels, 2, 0)]
            size = source.size[::-1]
            resized = [np.asarray(plane.resize(size, PIL.Image.Resampling.LANCZOS)) for plane in planes]
            return dataclasses.replace(restored, pixels=np.stack(resized, axis=2).clip(0, 1), alpha=source.alpha)
        if self.share < 1:
            measured = unit_float(self.prepared(source).pixels)
            mixed = self.share * unit_float(restored.pixels) + (1 - self.share) * measured
            restored = dataclasses.replace(restored, pixels=mixed)
        if self.shrink == 1 and restored.size != source.size:
            top, left = self.margins
            return dataclasses.replace(restored, pixels=restored.pixels[top:, left:], alpha=source.alpha)
        return restored


def plan_treatment(picture: Picture, told: bool = False, strength: float = 1.0) -> Treatment:
    """Returns what to do with a picture, and why; the task is `NOTHING` if it should be left alone.

    told: whether the network can be told conditions
    strength: the factor of σ
    """
    found = examine(picture)
    plan = (composition if told else treatment)(found, strength) or Treatment(NOTHING)
    why: tuple[str, ...] = ()
    if found.compressed and found.soft and plan.task == NOTHING:
        why = ("It has so little fine detail that this changed little.",)
    if _is_contradicted(plan, picture):
        plan, why = Treatment(NOTHING), ("But it is sharper or noisier than that blur would leave it.",)
    return dataclasses.replace(plan, because=(*found.sentences(), *why))


def _is_contradicted(plan: Treatment, picture: Picture) -> bool:
    """Returns whether the shape of a blur was guessed, but cannot have made the picture."""
    if plan.task == NOTHING or plan.operator is not None:
        return False
    task = Task.parse(plan.task)
    return task.family == "blur" and not is_possible(plan.prepared(picture), task.operator(picture.size), plan.sigma)


def treatment(found: Findings, strength: float = 1.0) -> Treatment | None:
    """Returns what to do about the findings with a network that knows one task at a time; None if nothing."""
    if found.hole:
        return Treatment("inpaint")
    if found.drawing or (found.cut_out and not found.noise.found):
        return None

    def plan(task: str, sigma: float, **other: Any) -> Treatment:
        return Treatment(task, min(strength * sigma, STRONGEST), **other)

    quality = 100 if found.quality is None else found.quality
    if found.enlargement is not None:
        factor, file = found.enlargement.factor, found.enlarged_jpeg
        sigma = math.hypot(found.strength, jpeg_error(file.quality)) if file else found.strength
        return plan(_enlarging(factor), sigma, shrink=factor, enlarged=file)
    if found.kernel is not None:
        return plan("blur", max(_noise_of_blurred(found), NOISE_OF_SHAKEN), operator=KernelBlur(found.kernel))
    if found.blur is not None and quality >= COARSEST_TO_DEBLUR:
        sigma = NOISE_OF_LIGHT * found.light or _noise_of_blurred(found)
        return plan(found.blur.task, sigma, light=found.light > 0)
    if found.noise.found:
        return plan("denoise", max(1.1 * found.strength, found.noise.covering))
    if found.compressed and quality >= COARSEST_TO_DEBLUR and not found.saved_again:
        # the errors of fine quantisation, and weak noise before it, are most like noise
        error = 1.5 * jpeg_error(quality)
        if found.noise == Noise() and found.sigma > error:  # too dark or too bright for a second opinion
            return plan("denoise", 1.1 * found.sigma)
        return None if found.soft else plan("denoise", error, solver="one-pass")
    if found.compressed:
        first = found.first
        if first is not None:
            margins, quality = (first.top, first.left), first.quality
        else:
            margins = (-found.grid[0] % 8, -found.grid[1] % 8)
        sigma = 0.008 if found.saved_again and first is None else 0.0
        share = float(np.interp(quality, *JPEG_SHARES))
        return plan(f"jpeg{quality}", sigma, margins=margins, first=first and first.quality, share=share)
    return plan("denoise", found.sigma) if found.sigma else None


def with_marks_filled(plan: Treatment, picture: Picture) -> Treatment:
    """Returns a plan that fills scratches and dust, and removes noise if the plan does; the same one if there are none."""
    marks = find_marks(unit_float(picture.pixels))
    if marks is None or plan.task == "inpaint":
        return plan
    said = f"Scratches and dust on {100 * marks.mean():.1f} % of it are filled."
    known = Inpaint(torch.from_numpy(~marks)[None, None].float())
    sigma = plan.sigma if plan.task == "denoise" else 0.0
    return Treatment("inpaint", sigma, because=(*plan.because, said), operator=known, marks=marks)


def composition(found: Findings, strength: float = 1.0) -> Treatment | None:
    """Returns what to do about the findings with a posterior network. Of an enlarged picture, and of slight damage, it is also
    told what JPEG and noise have left."""
    plain = treatment(dataclasses.replace(found, soft=False), strength)  # it was trained on soft pictures, too
    if plain is None:
        return None
    told = Conditions.of_quality(found.quality)
    error = jpeg_error(told.quality)
    if Task.parse(plain.task).family == "blur":
        return dataclasses.replace(plain, solver=LENS if plain.light else CALM)
    if found.enlarged_jpeg is not None:
        return dataclasses.replace(plain, conditions=Conditions(quality=found.enlarged_jpeg.quality), solver=CALM)
    if found.enlargement is not None:  # an area of the enlarged picture becomes one pixel, and its errors their mean
        sigma = math.hypot(plain.sigma, strength * error) / found.enlargement.factor
        return dataclasses.replace(plain, sigma=sigma, conditions=told)
    if found.noise.coloured:
        return dataclasses.replace(plain, conditions=told, solver=LEAST_ERROR)
    if plain.solver is None:
        return plain
    rms, colour = noise_in_bands(found.noise)
    told = dataclasses.replace(told, colour=colour if found.noise.coloured else told.colour)
    sigma = min(strength * math.hypot(rms, error), STRONGEST)
    return Treatment("denoise", sigma, conditions=told, solver=LEAST_ERROR)


def told_by_file(picture: Picture, operator: Operator) -> Conditions | None:
    """Returns what a JPEG file says of its compression, if it is to be enlarged or denoised; None for other files."""
    settings = jpeg_settings(picture.file) if picture.is_jpeg else None
    if settings is None or not (operator.scale > 1 or isinstance(operator, Denoise)):
        return None
    return Conditions.of_quality(settings.quality)


def _enlarging(factor: float) -> str:
    """Returns the task that replaces an enlargement."""
    whole = round(factor) if abs(factor - round(factor)) < 0.06 else math.ceil(factor)
    return f"sr{min(max(whole, 2), 8)}"


def _noise_of_blurred(found: Findings) -> float:
    """Returns σ of a blurred picture. After JPEG, the finest noise is weaker than that before it, and too little is
    worse than too much."""
    luma = found.noise.luma
    compressed = found.quality is not None and found.quality < 95
    return max(found.strength, min(1.5 * luma.middle, 3 * luma.fine) if compressed else 0.0)


def jpeg_error(quality: int) -> float:
    """Returns the usual error of JPEG, in [0, 1] units."""
    return 0.0 if quality >= FINEST_JPEG else float(np.interp(quality, JPEG_QUALITIES, JPEG_ERRORS))


def noise_in_bands(noise: Noise) -> tuple[float, tuple[float, ...]]:
    """Returns σ of coloured noise over all frequencies, and its colour: half the logarithm of each band's power over
    that of white noise with the same σ, three bands of luma and three of chroma."""
    bands = np.array([noise.luma, noise.chroma])
    bands[:, 2] = np.minimum(bands[:, 2], 1.5 * bands[:, 1])  # detail adds to the coarse band
    bands = bands.clip(1e-4)
    sigma = math.sqrt(float((bands**2 @ AREAS) @ np.array([1 / 3, 2 / 3])))
    return sigma, tuple(float(value) for value in np.log(bands / sigma).clip(-3, 3).ravel())


def regret(restored: Picture, measured: Picture, problem: Problem, light: bool = False) -> str | None:
    """Returns why a restoration is worse than the picture that it was made from, as a sentence; None if it is not.
    `light`: whether these are pictures in linear light."""
    operator, sigma = problem.operator, float(problem.sigma_y)
    if operator.scale > 1 or not isinstance(operator, LinearOperator) or isinstance(operator, Inpaint):
        return None
    x, y = _window(restored), _window(measured)
    with torch.no_grad():
        residual = ((operator.cpu()(x) - y) / 2)[0].numpy()
    edge = min(residual.shape[-2:]) // 8  # no operator knows what lies beyond the border
    inside = (slice(None), slice(edge, -edge or None), slice(edge, -edge or None))
    factor, least = MOST_RESIDUAL
    if np.sqrt((residual[inside] ** 2).mean()) > factor * sigma + least:
        return "The result does not explain the picture, so it is left as it is."
    before, after, removed = (
        _spread(plane) for plane in (_luma(y)[edge:], _luma(x)[edge:], _luma(torch.from_numpy(residual[None]))[edge:])
    )
    order = np.argsort(before)
    quiet, busy = order[: len(order) // 5], order[-(len(order) // 5) :]
    factor, least = RINGING
    if (problem.name == "blur" or light) and len(quiet) and np.median(before[quiet]) >= EVEN:
        factor = HIDDEN  # a shake hides texture; a shape that was guessed from values of sRGB needs the whole test
    if len(quiet) and np.median(after[quiet]) > factor * np.median(before[quiet]) + least:
        return "The result has waves where the picture is even, so it is left as it is."
    if isinstance(operator, KernelBlur) or not len(quiet):
        return None
    if np.median(removed[busy]) > STRUCTURE * max(np.median(removed[quiet]), 0.01):
        return "What was taken for noise belongs to the picture, so it is left as it is."
    return None


def _window(picture: Picture) -> Tensor:
    """Returns the middle of a picture, at most 512 pixels, (1, 3, h, w) in [-1, 1]."""
    side = 512
    top, left = (max(0, (length - side) // 2) for length in picture.size)
    return to_internal(picture.window(top, left, min(side, picture.size[0]), min(side, picture.size[1])))[None]


def _luma(x: Tensor) -> np.ndarray[Any, Any]:
    return luma_chroma((x[0] / 2).permute(1, 2, 0).numpy())[0]


def _spread(plane: np.ndarray[Any, Any], side: int = 16) -> np.ndarray[Any, Any]:
    """Returns the standard deviation of each block."""
    rows, columns = (length // side for length in plane.shape)
    blocks = plane[: rows * side, : columns * side].reshape(rows, side, columns, side)
    return np.asarray(blocks.std((1, 3))).ravel()
