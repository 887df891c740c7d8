"""What the web page does, without the page: plain functions that a test can call.

Everything that computes is in the library; here, a visitor's choices become its arguments, its results become
what a page can show, and what is too large or too slow for a shared computer is refused in a sentence.
"""

import re
import shlex
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from ddc.cli.degrade import Degrade
from ddc.errors import UserError
from ddc.estimates import BlurEstimate, diagnose
from ddc.evaluation.metrics import psnr
from ddc.images import (
    READABLE,
    Picture,
    quantise,
    to_internal,
)
from ddc.operators.base import Operator
from ddc.perceptual import LPIPS
from ddc.pipeline import RestorationPipeline, RestorationResult, duration, make_solver
from ddc.problems import TASKS, make_problem, task_family
from ddc.solvers import SOLVERS
from ddc.solvers.base import Solver, find_part
from ddc.tiling import plan_for

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[float, str], None]

KINDS = ("Low resolution", "Blur", "Holes", "JPEG artefacts", "Noise")
SHAPES = (
    "Soft",
    "Out of focus",
    "The camera moved",
)  # of a point that was blurred: a Gaussian, a disc, a line
NEED_A_FILE = ("blur", "inpaint", "custom")  # tasks that a menu alone cannot name
SHOWABLE = "PNG, JPEG, WebP, TIFF, BMP or HEIC"
VIEW = 1600  # pixels; a longer picture is shown smaller, and downloaded whole
CANVAS = 768  # pixels of the picture that holes are painted on
# black, indigo, red, orange, pale yellow: darker is more certain, also for colour-blind eyes
HEAT = np.array([(0, 0, 4), (66, 10, 104), (188, 55, 84), (249, 142, 9), (252, 255, 164)], np.float32)


@dataclass(frozen=True)
class Limits:
    """What one visitor may ask of a computer that others use too."""

    megapixels: float = 4.0
    """Largest restored picture, in megapixels."""
    minutes: float = 20.0
    """Longest restoration, in minutes."""
    samples: int = 8
    """Most restorations of one picture."""
    megabytes: int = 50
    """Largest upload, in megabytes."""
    queue: int = 20
    """Most visitors who wait at once; others are told to come back."""
    keep_minutes: float = 60.0
    """Uploads and results are deleted after so many minutes."""

    def __post_init__(self) -> None:
        for name in ("megapixels", "minutes", "samples", "megabytes", "queue", "keep_minutes"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True)
class Upload:
    """A visitor's file: where it lies here, and what it is called there."""

    path: Path
    name: str


@dataclass(frozen=True)
class Choices:
    """What a visitor chose on the page."""

    kind: str = "Low resolution"
    scale: int = 4
    shape: str = SHAPES[0]
    blur: float = 3.0  # pixels: the width, the radius or the length
    softness: float = 0.0  # of a disc or a line: the width of a Gaussian on top of it
    angle: float = 45.0
    quality: int = 10
    sigma: float = 0.0
    solver: str = "ddc"
    steps: int = 5
    seed: int = 0
    samples: int = 1

    @property
    def task(self) -> str:
        """The name of the task, as the command line takes it."""
        match self.kind:
            case "Low resolution":
                return f"sr{self.scale:d}"
            case "Blur":
                return self._blur()
            case "Holes":
                return "inpaint"
            case "JPEG artefacts":
                return f"jpeg{self.quality:d}"
            case "Noise":
                return "denoise"
        raise UserError(f"{self.kind!r} is not known; expected one of {', '.join(KINDS)}")

    def _blur(self) -> str:
        soft, disc, line = SHAPES
        if self.shape == soft:
            return f"gauss{self.blur:g}"
        if self.shape == disc:
            return BlurEstimate(radius=self.blur, width=self.softness).task
        if self.shape == line:
            return BlurEstimate(length=self.blur, angle=self.angle, width=self.softness).task
        raise UserError(f"{self.shape!r} is not known; expected one of {', '.join(SHAPES)}")


@dataclass(frozen=True)
class Inspection:
    """What a file says about itself, and what follows for the choices."""

    facts: str
    suggested: Choices
    preview: Array  # (h, w, 3) uint8, at most CANVAS pixels long


@dataclass(frozen=True)
class Restored:
    """What the page shows of a restoration."""

    before: Array  # (h, w, 3) uint8, as large as `after`
    after: Array
    uncertainty: Array | None
    files: list[Path]
    summary: str
    notes: list[str]  # what the visitor should know about the result
    command: str
    python: str


@dataclass(frozen=True)
class Compared:
    """What the page shows of two solvers on one degraded picture."""

    clean: Array
    measured: Array
    results: tuple[Array, Array]
    table: str
    notes: list[str]
    files: list[Path]
    command: str


@dataclass
class Service:
    """A model, the limits, and a folder for results."""

    pipe: RestorationPipeline
    limits: Limits
    folder: Path
    lock: threading.Lock = field(default_factory=threading.Lock)  # one restoration at a time
    rates: dict[str, float] = field(default_factory=dict)  # seconds per evaluation and megapixel, by solver
    lpips: LPIPS | None = None

    # ------------------------------------------------------------------------------------------------------
    # before a restoration

    def inspect(self, upload: Upload) -> Inspection:
        """Look at an upload: refuse it, or suggest what is wrong with it."""
        picture = self.read(upload)
        height, width = picture.size
        facts = [f"**{upload.name}**, {width} × {height} pixels"]
        found = diagnose(picture)
        if found.quality is not None:
            facts.append(f"JPEG of quality {found.quality}")
        if found.holes:
            facts.append("transparent pixels, which can be filled")
        if found.noisy:
            facts.append(f"noise of about {found.sigma:.3f}")
        elif found.sigma is not None:
            facts.append("no noise to speak of")
        if found.blur is not None:
            facts.append(_described(found.blur))
        blur = found.blur or BlurEstimate(width=Choices.blur)
        suggested = Choices(
            kind=_kind_of(found.task),
            scale=4 if max(picture.size) <= 512 else 2,
            shape=SHAPES[1] if blur.radius else SHAPES[2] if blur.length else SHAPES[0],
            blur=blur.radius or blur.length or blur.width,
            softness=blur.width if blur.radius or blur.length else Choices.softness,
            angle=blur.angle if blur.length else Choices.angle,
            quality=found.quality or Choices.quality,
            sigma=round(found.task_sigma, 3) if found.noisy else 0.0,
        )
        return Inspection(", ".join(facts) + ".", suggested, view(picture, CANVAS))

    def read(self, upload: Upload) -> Picture:
        """The upload's picture. Its size is looked at before its pixels are."""
        try:
            width, height = _size_in_file(upload.path)
            self._check_size(height, width)
            picture = Picture.read(upload.path)
        except UserError as error:
            raise _named_as_given(error, upload) from None
        if min(picture.size) < 8:
            raise UserError(
                f"{upload.name} has {width}×{height} pixels; expected at least 8 on each side. Choose a larger one"
            )
        return picture

    def _check_size(self, height: int, width: int) -> None:
        if height * width > self.limits.megapixels * 1e6:
            raise UserError(
                f"this would be a picture of {width}×{height} pixels ({height * width / 1e6:.1f} megapixels); this page "
                f"takes up to {self.limits.megapixels:g}. Make it smaller, or use `ddc restore`, which takes any size"
            )

    def solver_names(self) -> list[str]:
        """The solvers that this model has the parts for."""
        return [name for name, kind in SOLVERS.items() if self._has_parts(kind())]

    def _has_parts(self, solver: Solver) -> bool:
        if "network" in solver.needs and self.pipe.network is None:
            return False
        tasks = ("sr4", "sr8", "gauss", "inpaint92", "jpeg10", "denoise")
        parts = [part for task in tasks if (part := solver.part(task))]
        return not parts or any(find_part(part, self.pipe.folder) for part in parts)

    def expected_seconds(
        self, size: tuple[int, int], operator: Operator, solver: Solver, samples: int = 1
    ) -> float:
        """How long a restoration to `size` will take, from the speed of those before it."""
        windows = [one.window for one in plan_for(size, operator, self.pipe.tile)]
        megapixels = sum(window.height * window.width for window in windows) / 1e6
        return samples * solver.evaluations() * megapixels * self._rate(solver)

    def _rate(self, solver: Solver) -> float:
        if solver.name in self.rates:
            return self.rates[solver.name]
        slower = (
            3.0 if hasattr(solver, "checkpointing") else 1.0
        )  # a gradient through the network in each step
        return slower * self.rates.get("ddc", next(iter(self.rates.values()), 10.0))

    def warm_up(self) -> None:
        """Measure this computer's speed once, on a small picture."""
        solver = "ddc" if self.pipe.network is not None else "ddnm"
        grey = np.full((128, 128, 3), 128, np.uint8)
        self.pipe(grey, "denoise", sigma=0.0, solver=solver, steps=1)  # the first run of all is slower
        self._timed(
            lambda: self.pipe(grey, "denoise", sigma=0.0, solver=solver, steps=2), make_solver(solver, 2)
        )

    def _timed(self, run: Callable[[], RestorationResult], solver: Solver) -> RestorationResult:
        result = run()
        height, width = result.picture.size
        work = result.evaluations * len(result.samples[0]) * min(height * width, self.pipe.tile**2) / 1e6
        if work > 0:
            self.rates[solver.name] = result.seconds / work
        return result

    def forecast(self, upload: Upload, choices: Choices) -> str:
        """One sentence on what will happen and how long it will take; what cannot be done is refused."""
        height, width = self._measured_size(upload)
        solver, operator = self._checked(choices, (height, width))
        size = (height * operator.scale, width * operator.scale)
        self._check_size(*size)
        seconds = self.expected_seconds(size, operator, solver, choices.samples)
        self._check_time(seconds)
        large = " It is a large one: it is cut into tiles." if max(size) > self.pipe.tile else ""
        return f"The result will have {size[1]} × {size[0]} pixels and take about {duration(seconds)}.{large}"

    def _measured_size(self, upload: Upload) -> tuple[int, int]:
        try:
            width, height = _size_in_file(upload.path)
        except UserError as error:
            raise _named_as_given(error, upload) from None
        return height, width

    def _checked(self, choices: Choices, size: tuple[int, int]) -> tuple[Solver, Operator]:
        """The solver and an operator of the task, after everything that can be refused without pixels."""
        if not 1 <= choices.samples <= self.limits.samples:
            raise UserError(f"{choices.samples} samples were asked for; expected 1 to {self.limits.samples}")
        solver = make_solver(choices.solver, choices.steps)
        task = "box" if choices.task == "inpaint" else choices.task  # a mask of the right kind
        problem = make_problem(task, choices.sigma, size)
        self.pipe.check(solver, problem)
        return solver, problem.operator

    def _check_time(self, seconds: float) -> None:
        if seconds > 60 * self.limits.minutes:
            raise UserError(
                f"this would take about {duration(seconds)}; this page allows {self.limits.minutes:g} minutes. "
                "Take fewer steps or samples, a smaller picture, or the solver ddc"
            )

    # ------------------------------------------------------------------------------------------------------
    # restoring

    def restore(
        self,
        upload: Upload,
        choices: Choices,
        painted: Array | None = None,
        progress: Progress = lambda share, text: None,
    ) -> Restored:
        """Restore an upload. `painted` (h, w) is above 0 where the brush was, at any size."""
        picture = self.read(upload)
        self.forecast(upload, choices)
        solver = make_solver(choices.solver, choices.steps)
        mask = self._mask(picture, choices, painted)
        samples = f" ({choices.samples} samples)" if choices.samples > 1 else ""
        progress(0.0, f"Restoring{samples}")
        with self.lock:
            result = self._timed(
                lambda: self.pipe(
                    picture,
                    choices.task,
                    sigma=choices.sigma,
                    solver=solver,
                    seed=choices.seed,
                    samples=choices.samples,
                    names=[upload.name],
                    mask=mask,
                    progress=lambda share: progress(share, f"Restoring{samples}"),
                ),
                solver,
            )
        after = view(result.picture, VIEW)
        std = result.std[0] if choices.samples > 1 else None
        return Restored(
            before=_resized(view(picture, VIEW), (after.shape[1], after.shape[0])),
            after=after,
            uncertainty=None if std is None else _resized(heat_map(std), (after.shape[1], after.shape[0])),
            files=self._write(upload, result, mask),
            summary=_summary(result, choices, std),
            notes=[_as_given(note, upload) for note in result.notes[0]],
            command=command_line(upload.name, choices, mask is not None),
            python=python_code(upload.name, choices, mask is not None),
        )

    def _mask(self, picture: Picture, choices: Choices, painted: Array | None) -> Tensor | None:
        """The mask that was painted; None where the task has none, or the picture's transparency says it."""
        if choices.task != "inpaint":
            return None
        if painted is not None and painted.any():
            holes = PIL.Image.fromarray((painted > 0).astype(np.uint8) * 255)
            height, width = picture.size
            known = np.asarray(holes.resize((width, height), PIL.Image.Resampling.NEAREST)) == 0
            if not known.any():
                raise UserError("everything was painted over; leave some of the picture")
            return torch.from_numpy(known.astype(np.float32))[None]
        if picture.mask is None or bool(picture.mask.all()):
            raise UserError("there is no hole; paint over what is to be filled with the brush")
        return None

    def _write(self, upload: Upload, result: RestorationResult, mask: Tensor | None) -> list[Path]:
        """The files that `ddc restore` would write, and the mask."""
        folder = self.new_folder()
        target = folder / result_name(upload.name)
        files = [target]
        result.mean[0].write(target)
        if len(result.samples[0]) > 1:
            for number, sample in enumerate(result.samples[0], 1):
                files.append(target.with_name(f"{target.stem}_{number}.png"))
                sample.write(files[-1])
        if mask is not None:
            files.append(folder / "mask.png")
            Picture.from_tensor(mask, grey=True).write(files[-1])
        return files

    def new_folder(self) -> Path:
        """A folder for one visitor's results, with a name that cannot be guessed."""
        folder = self.folder / uuid.uuid4().hex
        folder.mkdir(parents=True)
        return folder

    # ------------------------------------------------------------------------------------------------------
    # trying

    def compare(
        self,
        upload: Upload,
        task: str,
        sigma: float,
        solvers: tuple[str, str],
        steps: tuple[int, int],
        longest: int = 256,
        seed: int = 0,
        progress: Progress = lambda share, text: None,
    ) -> Compared:
        """Degrade a clean picture and restore it with two solvers."""
        if task not in try_tasks():
            raise UserError(f"the task {task!r} is not offered; expected one of {', '.join(try_tasks())}")
        clean = shrunk(self.read(upload), longest)
        methods = [make_solver(name, count) for name, count in zip(solvers, steps, strict=True)]
        problem = make_problem(task, sigma, clean.size)
        for method in methods:
            self.pipe.check(method, problem)
        self._check_time(
            sum(self.expected_seconds(clean.size, problem.operator, method) for method in methods)
        )
        recipe = Degrade(inputs=(), out=Path(), task=task, sigma=sigma, seed=seed)
        measured = recipe.measure(clean, "clean.png")
        folder = self.new_folder()
        files = [folder / "clean.png", folder / "measured.npy"]
        clean.write(files[0])
        measured.write(files[1])
        rows, pictures, notes = [], [], []
        truth = clean.tensor[None]
        for index, method in enumerate(methods):
            text = f"Solver {index + 1} of 2: {method.name}"
            progress(index / 2, text)
            with self.lock:
                result = self._timed(
                    lambda method=method, index=index, text=text: self.pipe(  # type: ignore[misc]
                        measured,
                        task,
                        sigma=sigma,
                        solver=method,
                        seed=seed,
                        names=["measured.npy"],
                        progress=lambda share: progress((index + share) / 2, text),
                    ),
                    method,
                )
            # a size that the scale does not divide comes back a little larger
            restored = result.picture.tensor[None, :, : clean.size[0], : clean.size[1]]
            files.append(folder / f"restored_{index + 1}_{method.name}.png")
            result.picture.write(files[-1])
            pictures.append(view(result.picture, VIEW)[: clean.size[0], : clean.size[1]])
            notes += [note for note in result.notes[0] if note not in notes]
            rows.append(
                f"| {method.name} | {method.steps} | {result.evaluations} | "
                f"{float(psnr(restored, truth)):.2f} dB | {self._distance(restored, truth):.3f} | "
                f"{result.seconds:.1f} s |"
            )
        shown = view(measured, VIEW)
        return Compared(
            clean=view(clean, VIEW),
            measured=_resized(shown, (clean.size[1], clean.size[0]), PIL.Image.Resampling.NEAREST),
            results=(pictures[0], pictures[1]),
            table="\n".join(
                [
                    "| solver | steps | evaluations | PSNR ↑ | LPIPS ↓ | time |",
                    "|---|---|---|---|---|---|",
                    *rows,
                ]
            ),
            notes=notes,
            files=files,
            command=_compare_commands(task, sigma, methods, seed),
        )

    def _distance(self, x: Tensor, truth: Tensor) -> float:
        if self.lpips is None:
            self.lpips = LPIPS("alex").to(self.pipe.device)
        with torch.no_grad():
            device = self.pipe.device
            return float(self.lpips(to_internal(x).to(device), to_internal(truth).to(device)))


# ---------------------------------------------------------------------------------------------------------
# what a file says


def _named_as_given(error: UserError, upload: Upload) -> UserError:
    """The same error with the visitor's name of the file, and without the formats of programs."""
    return UserError(_as_given(str(error), upload).replace(READABLE, SHOWABLE))


def _as_given(text: str, upload: Upload) -> str:
    return text.replace(str(upload.path), upload.name)


def _size_in_file(path: Path) -> tuple[int, int]:
    """Width and height as the file's header says, without decoding it."""
    if path.suffix.lower() == ".npy":  # for programs, and not from strangers
        raise UserError(f"{path} is not a picture that can be shown; expected {READABLE}")
    if not path.exists():
        raise UserError(f"{path} is no longer here, for uploads are kept for a short time; upload it again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with PIL.Image.open(path) as image:
                width, height = image.size
                # only of cameras' formats: looking for it decodes a PNG
                turned = image.format in ("JPEG", "MPO") and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                return (height, width) if turned else (width, height)
    except PIL.Image.DecompressionBombError as error:
        pixels = next(int(word) for word in re.findall(r"\d+", str(error)))
        raise UserError(
            f"{path} claims {pixels / 1e6:.0f} megapixels, far more than this page takes. Make it smaller, or use "
            "`ddc restore`, which takes any size"
        ) from None
    except (PIL.UnidentifiedImageError, OSError, ValueError, SyntaxError):
        Picture.read(path)  # says what is wrong with it, and reads formats that Pillow needs help with
        raise UserError(f"{path} is not a picture that can be read; expected {READABLE}") from None


def _described(blur: BlurEstimate) -> str:
    if blur.radius:
        return f"out of focus, by a disc of about {blur.radius:.1f} pixels"
    if blur.length:
        return f"moved by about {blur.length:.0f} pixels at {blur.angle:.0f}°"
    return f"blur of about {blur.width:.1f} pixels"


def _kind_of(task: str | None) -> str:
    if task is None:
        return "Low resolution"
    kinds = {"blur": "Blur", "inpaint": "Holes", "jpeg": "JPEG artefacts", "denoise": "Noise"}
    return kinds[task_family(task)]


def try_tasks() -> dict[str, str]:
    """The tasks that "Try it" offers: those that need no file of the visitor's."""
    return {name: text for name, text in TASKS.items() if name not in NEED_A_FILE}


# ---------------------------------------------------------------------------------------------------------
# what a page shows


def view(picture: Picture, longest: int) -> Array:
    """(h, w, 3) uint8, no longer than so many pixels."""
    return _resized(np.ascontiguousarray(quantise(picture.pixels, 8)), _fitted(picture.size, longest))


def shrunk(picture: Picture, longest: int) -> Picture:
    """The picture in 8 bits without its transparency, no longer than so many pixels."""
    return Picture(view(picture, longest), grey=picture.grey)


def _fitted(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Width and height of a picture (given as height, width) within a square."""
    share = min(1.0, longest / max(size))
    return max(1, round(size[1] * share)), max(1, round(size[0] * share))


def _resized(
    pixels: Array, size: tuple[int, int], how: PIL.Image.Resampling = PIL.Image.Resampling.BICUBIC
) -> Array:
    if pixels.shape[1::-1] == size:
        return pixels
    return np.asarray(PIL.Image.fromarray(pixels).resize(size, how))


def heat_map(std: Tensor) -> Array:
    """(3, H, W) → (H, W, 3) uint8: black where the samples agree, pale yellow where they differ most."""
    level = std.mean(0).numpy()
    level = (level / max(_brightest(level), 1e-6)).clip(0, 1) * (len(HEAT) - 1)
    below = np.minimum(level.astype(int), len(HEAT) - 2)
    part = (level - below)[..., None]
    return np.rint(HEAT[below] * (1 - part) + HEAT[below + 1] * part).astype(np.uint8)


def _brightest(level: Array) -> float:
    """Where the scale of a heat map ends: one pixel in two hundred lies beyond."""
    return float(np.quantile(level, 0.995))


def _summary(result: RestorationResult, choices: Choices, std: Tensor | None) -> str:
    height, width = result.picture.size
    text = (
        f"**{width} × {height} pixels in {result.seconds:.1f} s**: {choices.solver}, {choices.steps} steps, "
        f"{result.evaluations} network evaluations"
    )
    if std is None:
        return text + "."
    level = std.mean(0).numpy()
    return (
        f"{text} for each of {choices.samples} samples. They differ by {100 * float(level.mean()):.1f} % of the "
        f"brightness range on average; the map's palest colour stands for {100 * _brightest(level):.1f} %. "
        "The slider shows the first sample, the first download is their mean."
    )


# ---------------------------------------------------------------------------------------------------------
# the same, typed


def result_name(name: str) -> str:
    return f"{Path(name).stem}_restored.png"


def _options(choices: Choices) -> dict[str, Any]:
    """The choices that differ from the defaults of the pipeline and the command line."""
    chosen: dict[str, Any] = {"task": choices.task}
    if choices.sigma or choices.task == "denoise":  # which the command line takes for "auto" otherwise
        chosen["sigma"] = choices.sigma
    if choices.solver != "ddc":
        chosen["solver"] = choices.solver
    if choices.steps != SOLVERS[choices.solver]().steps:
        chosen["steps"] = choices.steps
    if choices.seed:
        chosen["seed"] = choices.seed
    if choices.samples > 1:
        chosen["samples"] = choices.samples
    return chosen


def command_line(name: str, choices: Choices, mask: bool) -> str:
    """The `ddc restore` that gives the same pixels."""
    options = _options(choices) | ({"mask": "mask.png"} if mask else {})
    words = ["ddc", "restore", name, "-o", result_name(name)]
    for key, value in options.items():
        words += [f"--{key}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def python_code(name: str, choices: Choices, mask: bool) -> str:
    """The Python that gives the same pixels."""
    options = _options(choices) | ({"mask": "mask.png"} if mask else {})
    arguments = ", ".join([repr(name), *(f"{key}={value!r}" for key, value in options.items())])
    which = "mean[0]" if choices.samples > 1 else "picture"
    return "\n".join(
        [
            "from ddc.pipeline import RestorationPipeline",
            "",
            'pipe = RestorationPipeline.from_pretrained().to("auto")',
            f"result = pipe({arguments})",
            f"result.{which}.write({result_name(name)!r})",
        ]
    )


def _compare_commands(task: str, sigma: float, methods: list[Solver], seed: int) -> str:
    common = (
        ["--task", task]
        + (["--sigma", f"{sigma:g}"] if sigma or task == "denoise" else [])
        + (["--seed", str(seed)] if seed else [])
    )
    lines = [["ddc", "degrade", "clean.png", "-o", "measured.npy", *common]]
    for index, method in enumerate(methods, 1):
        steps = [] if method.steps == type(method)().steps else ["--steps", str(method.steps)]
        target = f"restored_{index}_{method.name}.png"
        lines.append(
            ["ddc", "restore", "measured.npy", "-o", target, *common, "--solver", method.name, *steps]
        )
    return "\n".join(shlex.join(line) for line in lines)


# ---------------------------------------------------------------------------------------------------------
# examples, and what is left behind


@dataclass(frozen=True)
class Example:
    """A degraded picture to click, and what is wrong with it."""

    path: Path
    choices: Choices


def write_examples(folder: Path) -> list[Example]:
    """Examples made from the pictures that come with scikit-image."""
    from skimage import data

    folder.mkdir(parents=True, exist_ok=True)
    face, cat = Picture(data.astronaut()[10:202, 120:312]), Picture(data.chelsea()[20:212, 90:282])
    rocket, coffee = Picture(data.rocket()[100:292, 230:422]), Picture(data.coffee()[90:282, 150:342])
    made = []
    for picture, task, name, choices in (
        (face, "sr4", "small-face.png", Choices("Low resolution")),
        (cat, "gauss1.5", "blurred-cat.png", Choices("Blur", blur=1.5)),
        (rocket, "strokes", "scratched-rocket.png", Choices("Holes")),
        (coffee, "denoise", "noisy-coffee.png", Choices("Noise", sigma=0.1)),
    ):
        recipe = Degrade(inputs=(), out=folder / name, task=task, sigma=choices.sigma)
        recipe.measure(picture, name).write(folder / name)
        made.append(Example(folder / name, choices))
    path = folder / "crushed-shuttle.jpg"
    PIL.Image.fromarray(data.astronaut()[60:252, 320:512]).save(path, quality=10)
    return [*made, Example(path, Choices("JPEG artefacts", quality=10))]


def write_clean_examples(folder: Path) -> list[Path]:
    """Clean pictures to try solvers on."""
    from skimage import data

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, pixels in (
        ("astronaut.png", data.astronaut()[:256, 96:352]),
        ("cat.png", data.chelsea()[20:276, 90:346]),
        ("coffee.png", data.coffee()[70:326, 150:406]),
    ):
        Picture(pixels).write(folder / name)
        made.append(folder / name)
    return made


def remove_old(folder: Path, minutes: float, keep: tuple[Path, ...] = ()) -> None:
    """Delete files of a folder that are older than so many minutes, and the folders they leave empty."""
    before = time.time() - 60 * minutes
    for path in sorted(folder.rglob("*"), reverse=True):  # what is inside a folder comes before it
        if any(path == kept or kept in path.parents for kept in keep):
            continue
        try:
            if path.lstat().st_mtime < before:
                path.rmdir() if path.is_dir() else path.unlink()
        except OSError:  # not empty, or gone already
            continue


@dataclass
class Visitors:
    """Who is having something restored, so that it can be stopped."""

    stopped: dict[str, threading.Event] = field(default_factory=dict)

    def begin(self, visitor: str) -> threading.Event:
        event = self.stopped[visitor] = threading.Event()
        return event

    def stop(self, visitor: str) -> None:
        event = self.stopped.pop(visitor, None)
        if event is not None:
            event.set()


class Stopped(UserError):
    """Ended by the person who began it."""


def stoppable(progress: Progress, stop: threading.Event) -> Progress:
    """Progress that ends the run once `stop` is set."""

    def report(share: float, text: str) -> None:
        if stop.is_set():
            raise Stopped("stopped, as you asked")
        progress(share, text)

    return report
