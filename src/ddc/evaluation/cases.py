"""What is measured: clean pictures, models, and the cases, each of which is a solver with a model on a task."""

import dataclasses
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ddc.datasets import decode, find_sources
from ddc.errors import UserError
from ddc.evaluation.metrics import kurtosis
from ddc.images import to_internal, to_unit
from ddc.models import find_part, fingerprint, parameter_count, part_names, weight_files
from ddc.noise import derive_seed
from ddc.notation import Entry, split, to_number
from ddc.pipeline import RestorationPipeline
from ddc.priors import DEFAULT_MODEL, prior_folder
from ddc.problems import Problem, make_problem, measure
from ddc.solvers.base import Solver, Step, make_solver

T = TypeVar("T")
SMALLEST = 32  # pixels of a side that AlexNet needs


@dataclass(frozen=True)
class CleanImage:
    """A clean picture, cropped: uint8 (3, H, W)."""

    name: str
    pixels: Tensor

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.pixels.numpy().tobytes())


def load_images(path: Path, size: int = 256, limit: int | None = None) -> list[CleanImage]:
    """The centres of the pictures in a folder or tar archive; `limit` takes that many, evenly over the names."""
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a folder or a .tar archive of pictures (--images)")
    sources = find_sources([path])
    if len({source.name for source in sources}) < len(sources):
        raise UserError(f"{path} has two pictures of the same name; rows are stored by name, so rename one")
    if limit is not None:
        if limit < 1:
            raise UserError(f"the limit is {limit}; expected at least one picture")
        sources = evenly(sources, limit)
    images = []
    for source in sources:
        pixels = decode(source)
        if pixels is None:
            raise UserError(f"{source.name} in {path} cannot be read; remove it, or copy it again")
        images.append(CleanImage(source.name, crop_centre(pixels, size, source.name)))
    return images


def evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, spread over all of them. A smaller count that divides a larger one selects some of the same."""
    return list(items[:: max(len(items) // max(count, 1), 1)][:count])


def bundled_images(size: int = 256, limit: int | None = None) -> list[CleanImage]:
    """Four photographs from scikit-image, for a first look without any data."""
    from skimage import data

    images = []
    for name in ("astronaut", "coffee", "cat", "rocket")[:limit]:
        pixels = torch.from_numpy(np.array(getattr(data, name)())).permute(2, 0, 1)
        images.append(CleanImage(name, crop_centre(pixels, size, name)))
    return images


def crop_centre(pixels: Tensor, size: int, name: str) -> Tensor:
    height, width = pixels.shape[1:]
    if size < SMALLEST:
        raise UserError(f"the size is {size}; expected at least {SMALLEST} pixels, which LPIPS needs")
    if min(height, width) < size:
        raise UserError(f"{name} has {width}×{height} pixels; expected at least {size}×{size} for its centre")
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[:, top : top + size, left : left + size].contiguous()


# ---------------------------------------------------------------------------------------------------------
# models and cases


@dataclass(frozen=True)
class Case:
    """One solver with one model on one task: a row of the table."""

    model: str
    task: str
    sigma: float
    label: str  # the solver's name, and the settings that are not its defaults
    solver: Solver
    evaluations: int = field(init=False)  # of a network, for one image
    key: tuple[str, str, float, str, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "evaluations", self.solver.evaluations())
        object.__setattr__(self, "key", (self.model, self.task, self.sigma, self.label, self.solver.steps))


@dataclass(frozen=True)
class Restoration:
    """Images, their measurements, and what a solver made of them, on the device."""

    truth: Tensor  # (B, 3, H, W) in [0, 1], as are the samples
    samples: list[Tensor]
    finite: list[bool]  # whether the first sample of an image has neither infinite nor undefined values
    y: Tensor  # in [-1, 1]
    measurement: Tensor  # y at image size, in [0, 1]
    problem: Problem
    seconds: float  # for each image of the first sample
    trace: list[tuple[int, Tensor]]  # (t, kurtosis of ε̂) of each step, if recorded


def parse_models(text: str) -> dict[str, Path]:
    """Names and folders from "DIR:name=ours,DIR2"; a folder without a name is called by its own. "" is the shipped one."""
    folders: dict[str, Path] = {}
    for part in split(text) or [f"{DEFAULT_MODEL}:name=default"]:
        entry = Entry.parse(part).check_keys("name")
        path = Path(entry.name)
        name = entry.settings.get("name", path.resolve().name)
        if name in folders:
            raise UserError(f"two models are called {name}; give them names: DIR:name=first,DIR2:name=second")
        folders[name] = path
    return folders


class Models:
    """Model folders by their names. Their pipelines are loaded when they are needed.

    `priors` names other folders to take a model's prior from. A model without a prior uses that of the first model, or
    the shipped one. `recorded` has the fingerprints of models that were measured before; their folders may be gone.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        priors: dict[str, Path] | None = None,
        recorded: dict[str, str] | None = None,
    ) -> None:
        if not folders:
            raise UserError("no model was given; expected a folder with prior/ and network/ (--model)")
        self.folders, self.priors, self.recorded = folders, priors or {}, recorded or {}
        for name, folder in folders.items():
            if not folder.is_dir() and name not in self.recorded:
                raise UserError(f"the model {folder} is not a folder; expected one with prior/ and network/")
        self.target: dict[str, Any] = {
            "device": "cpu",
            "fast": False,
        }  # the arguments of `RestorationPipeline.to`
        self.size: int | None = None  # of the pictures, for which networks are compiled
        self._pipes: dict[str, RestorationPipeline] = {}
        self._prints: dict[str, str] = {}

    def pipeline(self, name: str) -> RestorationPipeline:
        """The model's pipeline, on the device that `target` names."""
        if name not in self._pipes:
            folder = self.folders[name]
            network = folder / "network" if (folder / "network").is_dir() else None
            loaded = RestorationPipeline.from_pretrained(self.prior_folder(name), network)
            # in the model's own folder, the networks of other solvers are found
            pipe = RestorationPipeline(loaded.prior, loaded.network, folder, self.size)
            self._pipes[name] = pipe.to(**self.target)
        return self._pipes[name]

    def prior_folder(self, name: str) -> Path:
        own, first = self.priors.get(name, self.folders[name]), next(iter(self.folders.values()))
        folder = prior_folder(own if (own / "prior").is_dir() else first)
        if folder is None:
            raise UserError(f"the model {own} has no prior/ (with unet/ and scheduler/) in it")
        return folder

    def fingerprint(self, name: str) -> str:
        """Hashes of the model's network and of its prior; the recorded ones if the folder is gone."""
        if name not in self._prints:
            here = self.folders[name].is_dir()
            self._prints[name] = "-".join(map(fingerprint, self._files(name))) if here else self.recorded[name]
        return self._prints[name]

    def _files(self, name: str) -> tuple[dict[str, Path], dict[str, Path]]:
        """The files of the network, and those of the prior."""
        network = weight_files(self.folders[name] / "network")
        return {f"network/{key}": path for key, path in network.items()}, weight_files(self.prior_folder(name))

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the protocol states about each model: its fingerprint, millions of parameters and folder name."""
        return {
            name: {
                "sha256": self.fingerprint(name),
                "millions": parameter_count([path for files in self._files(name) for path in files.values()]),
                "name": folder.resolve().name,
            }
            for name, folder in self.folders.items()
            if folder.is_dir()
        }

    def part_fingerprints(self, cases: Iterable[Case]) -> dict[str, str]:
        """Hashes of the networks that solvers need beside the model's, by model and folder."""
        prints = {}
        for model, part in {(c.model, part): 0 for c in cases for part in part_names(c.solver, c.task)}:
            folder = find_part(part, self.folders[model]) if self.folders[model].is_dir() else None
            if folder is not None:
                prints[f"{model}/{part}"] = fingerprint(weight_files(folder))
        return prints

    def distinct_for(self, solver: Solver) -> list[str]:
        """The models that differ for this solver: all by their networks, or those of different priors."""
        names = list(self.folders)
        if "network" in solver.needs:
            return names
        if "prior" not in solver.needs:
            return names[:1]
        first = {self.fingerprint(name).rpartition("-")[2]: name for name in reversed(names)}
        return [name for name in names if name in first.values()]

    def why_not(self, case: Case, image: CleanImage) -> str | None:
        """Why a case cannot run: the solver does not support the task or the size, or a network is missing."""
        height, width = image.pixels.shape[1:]
        problem = make_problem(case.task, case.sigma, size=(height, width), seeds=[0])
        scale = problem.operator.scale
        if height % scale or width % scale:
            return f"{width}×{height} pixels cannot be made {scale} times smaller; choose another --size"
        try:
            case.solver.check(problem)
            pipe = self.pipeline(case.model)
            pipe.check_training(case.solver, problem)
            pipe.parts(case.solver, problem)
        except UserError as error:
            return str(error)
        return None

    def restore(
        self, case: Case, images: Sequence[CleanImage], seed: int, samples: int = 1, trace: bool = False
    ) -> Restoration:
        """Degrade and restore images, `samples` times."""
        pipe = self.pipeline(case.model)
        names = [image.name for image in images]
        truth = torch.stack([image.pixels for image in images]).to(pipe.device).float() / 255
        problem, y = measure(case.task, case.sigma, to_internal(truth), names, seed)
        traced: list[tuple[int, Tensor]] = []

        def watch(step: Step) -> None:
            if step.noise is not None:
                traced.append((step.t, kurtosis(step.noise)))

        restored, seconds = [], []
        for k in range(samples):
            seeds = [derive_seed(seed, f"solve/{name}" + (f"/{k}" if k else "")) for name in names]
            synchronise(pipe.device)
            started = time.perf_counter()
            with torch.no_grad():
                x = pipe.solve(y, problem, case.solver, seeds, watch if trace and k == 0 else None)
            synchronise(pipe.device)
            seconds.append((time.perf_counter() - started) / len(images))
            restored.append(x.float())
        finite = torch.isfinite(restored[0]).flatten(1).all(1).tolist()
        pictures = [to_unit(torch.nan_to_num(x, nan=0.0)) for x in restored]
        measurement = to_unit(problem.operator.to_image(y))
        return Restoration(truth, pictures, finite, y, measurement, problem, seconds[0], traced)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parse_cases(
    models: Models, task: str, sigma: str, solver: str, steps: str = "", max_nfe: int | None = None
) -> list[Case]:
    """The cases of a command line, whose lists are separated by commas."""
    sigmas = [to_number(text, "sigma") for text in split(sigma)]
    counts = [int(to_number(text, "steps")) for text in split(steps)]
    return make_cases(models, split(task), sigmas, split(solver), counts, max_nfe)


def make_cases(
    models: Models,
    tasks: Sequence[str],
    sigmas: Sequence[float],
    solvers: Sequence[str],
    steps: Sequence[int] = (),
    max_nfe: int | None = None,
) -> list[Case]:
    """All combinations that differ; a solver runs once for models that are the same to it.

    A task may have its own noise: jpeg10:sigma=0.
    """
    entries = [Entry.parse(text).check_keys("sigma") for text in tasks]
    settings = [(e.name, s) for e in entries for s in ([e.number("sigma", 0)] if e.settings else sigmas)]
    cases = []
    for task, sigma in settings:
        for text in solvers:
            solver = make_solver(text)
            repeated = steps and solver.evaluations()
            runs = [dataclasses.replace(solver, steps=n) for n in steps] if repeated else [solver]
            cases += [
                Case(model, task, sigma, solver_label(text), cap_evaluations(run, max_nfe))
                for model in models.distinct_for(solver)
                for run in runs
            ]
    return list({case.key: case for case in cases}.values())  # capped runs can coincide


def solver_label(text: str) -> str:
    """A solver's name and settings as tables show them: all but the steps, which have their own column."""
    return ":".join(part for part in text.split(":") if not part.startswith("steps="))


def cap_evaluations(solver: Solver, max_nfe: int | None) -> Solver:
    """The solver with as many steps as `max_nfe` network evaluations allow; never fewer than two."""
    if max_nfe is None:
        return solver
    while solver.evaluations() > max_nfe and solver.steps > 2:
        fewer = solver.steps * max_nfe // solver.evaluations()
        solver = dataclasses.replace(solver, steps=min(max(fewer, 2), solver.steps - 1))
    return solver
