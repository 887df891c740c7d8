"""RestorationPipeline: pictures in, pictures out.

pipe = RestorationPipeline.from_pretrained("model").to("cuda")
pipe("small.png", task="sr4").picture.write("large.png")
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from ddc.diagnosis.content import Mask, with_fixed_colours
from ddc.diagnosis.treatment import NOTHING, Treatment, regret
from ddc.errors import UserError
from ddc.fast import (
    TRAINED_SIZE,
    accelerate_models,
    default_tile,
    fast_unet,
    pick_device,
    prepare_device,
)
from ddc.images import ROUNDING_8_BIT, ImageLike, Picture, as_picture
from ddc.jobs import Execution, Job, Options, Request
from ddc.latents import LatentPrior
from ddc.operators.base import Operator, Size
from ddc.operators.colorize import Colorize
from ddc.operators.inpaint import Denoise
from ddc.operators.natural import far_and_unmixed
from ddc.perceptual import interval
from ddc.priors import DataConsistency, Prior, autoencoder_folder
from ddc.problems import Problem, Task
from ddc.solvers.base import Callback, Run, Solver, make_solver
from ddc.solvers.bridge import Bridge
from ddc.solvers.pnp_admm import DnCNN
from ddc.solvers.posterior import PosteriorDenoiser
from ddc.telling import Clock, Forecast, noting

logger = logging.getLogger("ddc")

DEFAULT_MODEL = Path(__file__).parent / "models" / "default"  # what is shipped with the package
# the folders of networks that solvers need beside the model
PARTS = {"bridge": "i2sb-{task}", "denoiser": "dncnn", "posterior": "posterior"}
LATENT_SOLVER = "resample"  # of a latent prior, if none is named: the better one in its paper
DOUBT_SAMPLES = 8  # from which the interval of a pixel is found
MOST_NOISE = 0.1  # that the shipped network was trained for, in [0, 1] units


@dataclass(frozen=True)
class RestorationResult:
    """The restored pictures, one entry for each picture that was given."""

    pictures: list[Picture]  # the first sample of each
    samples: list[list[Picture]] = field(repr=False)  # all samples of each
    mean: list[Picture] = field(repr=False)  # over the samples
    # standard deviation of each pixel over the samples, (3, H, W) in [0, 1] units; zero for one sample
    std: list[Tensor] = field(repr=False)
    seconds: float  # in total
    evaluations: int  # of a network, for one sample of the last picture, over all its tiles
    seed: int
    sigma: list[float]  # the noise level used for each
    tasks: list[str]  # the task of each
    solvers: list[str]  # the solver of each; empty where nothing was done
    notes: list[list[str]]  # the warnings of the logger "ddc" for each
    forecast: Forecast | None = None  # the expected time, where the solver has steps
    found: list[list[str]] = field(default_factory=list)  # for the task auto, what was found in each, in words
    # with `scratches`, which pixels of each were filled, (H, W); None where there were none
    marks: list[Mask | None] = field(default_factory=list, repr=False)
    # with `doubt`, the bounds between which each pixel of the true picture lies with 90 %, (3, H, W) in [0, 1] units
    intervals: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    @property
    def picture(self) -> Picture:
        """The restored picture, if one was given."""
        return self.pictures[0]


class RestorationPipeline:
    """A prior, and the data-consistency network that belongs to it; or a posterior network, which needs neither."""

    prior: Prior
    network: DataConsistency | None

    def __init__(
        self,
        prior: Prior | None,
        network: DataConsistency | None = None,
        folder: Path | None = None,
        tile: int | None = None,
    ) -> None:
        """Without a prior, it and the network are read from the model's folder when a solver first needs them."""
        self.folder = folder
        self._plain = None if prior is None else (prior, network)  # as given, before they were prepared for a device
        self.solver = default_solver(folder) if prior is None else LATENT_SOLVER if self.latent else "ddc"
        if prior is not None:
            self.prior, self.network = prior, network
        self._target: tuple[bool, dict[str, Any]] = (False, {})  # the fast path, and its options
        self.tile = TRAINED_SIZE if tile is None else tile
        self.device = torch.device("cpu")
        self.batch = 1  # pictures or tiles at once; the fast path chooses it by the card's memory
        self._chosen_tile = tile
        self._told: set[str] = set()  # warnings that were logged
        self._parts: dict[tuple[str, ...], dict[str, Any]] = {}  # of solvers, by their name and those of the folders

    @staticmethod
    def from_pretrained(folder: str | Path | None = None, network: str | Path | None = None) -> "RestorationPipeline":
        """Read a model folder: prior/ and network/, or posterior/. A model on the Hugging Face Hub is "user/model" or
        "user/model@revision". None is the model that is shipped with the package.

        In a model with posterior/ the others are read only when a solver needs them.
        A prior's own folder (unet/ and scheduler/) works as well, and so does a folder with network/ alone, which uses
        the shipped prior. A latent prior has vae/ beside them. `network` names a data-consistency network in another folder.
        """
        folder = DEFAULT_MODEL if folder is None else model_folder(folder)
        if network is None and default_solver(folder) == "posterior":
            return RestorationPipeline(None, None, folder)
        return RestorationPipeline(*_read_models(folder, network), folder)

    def __getattr__(self, name: str) -> Any:
        """Read the prior and the network when one of them is first asked for."""
        if name not in ("prior", "network") or self.__dict__.get("_plain", ()) is not None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._plain = _read_models(self.folder or DEFAULT_MODEL, None)
        fast, options = self._target
        self.to(self.device, fast, **options)
        return self.__dict__[name]

    def to(self, device: str | torch.device, fast: bool = True, **options: Any) -> "RestorationPipeline":
        """Move to a device; "auto" is the best one available.

        The fast path is used unless `fast` is False; `options` are those of `ddc.fast.accelerate_models`.
        """
        device = pick_device(device)
        tile = default_tile(device) if self._chosen_tile is None else self._chosen_tile
        self.device, self.tile, self.batch, self._target = device, tile, 1, (fast, options)
        self._parts.clear()
        if self._plain is None:
            if fast:
                self.batch = options.get("batch") or prepare_device(device)
            return self
        prior, network = self._plain
        if fast:
            models = accelerate_models(prior, network, device, size=tile, **options)
            prior, network, self.batch = models.prior, models.network, models.batch
        else:
            prior.to(device)
            if network is not None:
                network.to(device)
        self.prior, self.network = prior, network
        return self

    def __call__(
        self, images: ImageLike | Sequence[ImageLike], task: str | Task | Operator = "sr4", **options: Unpack[Options]
    ) -> RestorationResult:
        """Restore one picture or several.

        images: files, `Picture`s, Pillow images, (H, W, 3) arrays, or (3, H, W) tensors; floats are in [0, 1]
        task, options: see `ddc.jobs.Request`

        Warnings about a picture, for example that it does not fit the task, are in the result's notes. The logger
        "ddc" shows each of them once.
        """
        started = time.perf_counter()
        pictures = as_pictures(images)
        request = Request(task, **self._with_solver(options))
        if request.steps is not None and "prior" in request.method.needs:
            self.prior.schedule.pairs(request.steps)  # too many are refused before anything is said or done
        notes: list[list[str]] = [[] for _ in pictures]
        plans, jobs = self._planned(request, pictures, notes)
        more = _more_jobs(request, jobs[:: request.samples]) if request.doubt else 0.0
        run = Execution(self, request, Clock(started, len(jobs), request.forecast, self.device, more))
        of_all: list[str] = []  # warnings about the computer, not a picture
        with noting(of_all, set()):
            restored = iter(run.all(jobs))
        n = request.samples
        remaining = iter(jobs[::n])
        first: list[Job | None] = []  # of each picture; None where it is left alone
        per_picture: list[list[Picture]] = []
        done: list[tuple[str, float, str]] = []  # the task, the noise and the solver of each
        for index, (picture, plan) in enumerate(zip(pictures, plans, strict=True)):
            alone = plan is not None and plan.task == NOTHING
            first.append(None if alone else next(remaining))
            samples = [picture] * n if alone else [next(restored) for _ in range(n)]
            with noting(notes[index], self._told):
                kept, task_done = _accepted(samples, picture, plan, first[index])
            per_picture.append([with_fixed_colours(one) for one in kept] if request.fix_colours else kept)
            done.append(task_done)
        intervals = self._intervals(pictures, task, request, options, first) if request.doubt else []
        return RestorationResult(
            pictures=[samples[0] for samples in per_picture],
            samples=per_picture,
            mean=[_mean(samples) for samples in per_picture],
            std=[_std(samples) for samples in per_picture],
            seconds=time.perf_counter() - started,
            evaluations=run.evaluations,
            seed=request.seed,
            sigma=[sigma for _, sigma, _ in done],
            tasks=[name for name, _, _ in done],
            solvers=[solver for _, _, solver in done],
            notes=[own + of_all for own in notes],
            forecast=run.clock.forecast,
            found=[list(plan.because) if plan else [] for plan in plans],
            marks=[plan.marks if plan else None for plan in plans],
            intervals=intervals,
        )

    def _with_solver(self, options: Options) -> Options:
        """The options with the model's own solver, if none is named; without one, a plan may choose between ddc's two."""
        if options.get("solver") is not None or self.solver == "ddc":
            return options
        return options | Options(solver=self.solver)

    def _planned(
        self, request: Request, pictures: list[Picture], notes: list[list[str]]
    ) -> tuple[list[Treatment | None], list[Job]]:
        """What to do with each picture, and the jobs of all; warnings go to the notes."""
        plans: list[Treatment | None] = []
        jobs: list[Job] = []
        for index, picture in enumerate(pictures):
            with noting(notes[index], self._told):
                plans.append(plan := request.plan(picture, index))
                if plan is not None and plan.task == NOTHING:
                    continue
                measured = plan.prepared(picture) if plan else picture
                problem, solver = request.problem(measured, plan), request.solver_of(plan)
                self.check_training(solver, problem, measured.pixels.shape[:2])
            parts = self.parts(solver, problem)
            if (told := request.conditions(measured, problem.operator, plan)) is not None:
                parts = parts | {"conditions": told.tensor(self.device)}
            jobs += request.jobs(measured, problem, index, solver, parts)
        return plans, jobs

    def _intervals(
        self,
        pictures: list[Picture],
        task: str | Task | Operator,
        request: Request,
        options: Options,
        jobs: list[Job | None],
    ) -> list[tuple[Tensor, Tensor]]:
        """The interval of each pixel, from samples that are drawn for it; a picture without a job is left alone."""
        drawn: Options = {**self._with_solver(options), "doubt": False, "samples": DOUBT_SAMPLES}
        drawn |= {"callback": None, "progress": None, "forecast": None, "planned": None}
        if "posterior" in request.method.needs:
            drawn["realism"] = 1.0
        samples = self(pictures, task, **drawn).samples
        widths = [job.interval_width() if job else 1.0 for job in jobs]
        return [interval(torch.stack([p.tensor for p in each]), w) for each, w in zip(samples, widths, strict=True)]

    @staticmethod
    def check_options(task: str | Task | Operator, **options: Unpack[Options]) -> None:
        """Refuse a task and options that cannot work, before a model or a picture is read."""
        Request(task, **options).check()

    def solve(
        self,
        y: Tensor,
        problem: Problem,
        solver: Solver,
        seeds: Sequence[int],
        callback: Callback | None = None,
        size: Size | None = None,
    ) -> Tensor:
        """The restored pictures (B, 3, H, W) in about [-1, 1], for measurements y on this pipeline's device, with a
        seed for each; `size` is their height and width."""
        solver.check(problem)
        prior = self.prior if "prior" in solver.needs else None
        run = Run(y, problem, prior, list(seeds), callback, size, **self.parts(solver, problem))
        return solver.solve(run).detach()

    def check_training(self, solver: Solver, problem: Problem, size: Size) -> None:
        """Refuse a solver whose network is missing; warn if the shipped one was not trained for the task or the noise;
        `size` is that of the measurement."""
        self.check_prior(solver)
        if not {"network", "posterior"} & {*solver.needs}:
            return
        if "network" in solver.needs and self.network is None:
            raise UserError(
                f"{solver.name} needs a data-consistency network; {self.folder or 'this model'} has no network/. "
                "Name one with --network, or use ddnm or dps"
            )
        unknown = None
        if isinstance(problem.operator, Colorize) or problem.operator.scale > 8:
            unknown = problem.name
        elif float(problem.sigma_y) > (2 if isinstance(problem.operator, Denoise) else 1.5) * MOST_NOISE:
            unknown = f"noise above {MOST_NOISE:g}"
        elif not problem.operator.local and far_and_unmixed(problem.operator, size, "posterior" in solver.needs):
            unknown = "an operator that mixes distant pixels"
        if unknown and self.folder == DEFAULT_MODEL:
            logger.warning(
                "the shipped model was not trained for %s, so the result will be poor; the solver %s needs no training",
                *(unknown, problem.solver_without_training()),
            )

    @property
    def latent(self) -> bool:
        """Whether the prior is one of latents."""
        return self._plain is not None and isinstance(self._plain[0], LatentPrior)

    def check_prior(self, solver: Solver) -> None:
        """Refuse a solver that needs the other kind of prior."""
        if solver.latent == self.latent or not {"prior", "network"} & {*solver.needs}:
            return
        needed, has, use = "a prior of pictures", "latents", "use resample or psld"
        if solver.latent:
            needed, has, use = "a latent prior (vae/, unet/ and scheduler/)", "pictures", "name one with --model"
        raise UserError(f"{solver.name} needs {needed}, and {self.folder or 'this model'} has one of {has}; {use}")

    def parts(self, solver: Solver, problem: Problem) -> dict[str, Any]:
        """The networks that a solver uses beside the prior, on this device."""
        self.check_prior(solver)
        if "network" in solver.needs:
            return {"network": self.network}
        key = (solver.name, *part_names(solver, problem.name))
        if key not in self._parts:
            loaded = load_parts(solver, self.folder, problem)
            for part in loaded.values():
                if self._target[0] and hasattr(part, "unet"):  # the fast path
                    part.unet = fast_unet(part.unet, self.device, self.tile, self._target[1].get("dtype", "auto"))
            self._parts[key] = {name: part.to(self.device) for name, part in loaded.items()}
        return self._parts[key]


def restore(
    images: ImageLike | Sequence[ImageLike], task: str | Task | Operator = "auto", **options: Unpack[Options]
) -> RestorationResult:
    """Restore pictures with the shipped model on the best device; for many calls, keep a `RestorationPipeline`."""
    return RestorationPipeline.from_pretrained().to("auto")(images, task, **options)


def sampling(solver: Solver) -> Solver:
    """The solver that draws samples: posterior with a realism of 1, and others as they are."""
    return make_solver(solver, options={"realism": 1.0}) if "posterior" in solver.needs else solver


def _more_jobs(request: Request, jobs: list[Job]) -> float:
    """How many jobs as long as these are needed for the intervals; `jobs` has one of each picture."""
    solver = sampling(request.method)

    def evaluations(solver: Solver, job: Job) -> int:
        return max(solver.settled(job.problem, job.parts, job.image_size()).evaluations(), 1)

    return DOUBT_SAMPLES * sum(evaluations(solver, job) / evaluations(job.solver, job) for job in jobs)


def _accepted(
    samples: list[Picture], source: Picture, plan: Treatment | None, job: Job | None
) -> tuple[list[Picture], tuple[str, float, str]]:
    """The restored pictures, the task, the noise and the solver; a guess of the task auto that made things worse is taken back."""
    if job is None:
        return samples, (NOTHING, 0.0, "")
    sorry = regret(samples[0], job.picture, job.problem, plan.light) if plan else None
    if sorry:
        logger.warning("%s: %s", source.path or "the picture", sorry)
        return [source] * len(samples), (NOTHING, 0.0, "")
    finished = [plan.finished(sample, source) for sample in samples] if plan else samples
    return finished, (job.problem.name, float(job.problem.sigma_y), job.solver.name)


def _mean(samples: list[Picture]) -> Picture:
    if len(samples) == 1:
        return samples[0]
    total = torch.stack([sample.tensor for sample in samples]).mean(0)
    return dataclasses.replace(samples[0], pixels=total.permute(1, 2, 0).numpy())


def _std(samples: list[Picture]) -> Tensor:
    if len(samples) == 1:
        return torch.zeros(1).expand(3, *samples[0].pixels.shape[:2])  # a view: no memory
    return torch.stack([sample.tensor for sample in samples]).std(0)


def as_pictures(images: ImageLike | Sequence[ImageLike]) -> list[Picture]:
    """Whatever people give as images, as pictures; files are read."""
    if isinstance(images, (Tensor, np.ndarray)) and images.ndim == 4:
        images = list(images)
    if isinstance(images, (str, Path, Picture, Tensor, np.ndarray, PIL.Image.Image)):
        images = [images]
    if not images:
        raise UserError("no picture was given")
    return [image if isinstance(image, Picture) else as_picture(image) for image in images]


def model_folder(given: str | Path) -> Path:
    """The folder of a model; one on the Hugging Face Hub is fetched first."""
    with _readable(given):
        if Path(given).exists():
            return Path(given)
    from ddc.hub import fetch_model

    return fetch_model(given)


@contextlib.contextmanager
def _readable(folder: str | Path) -> Iterator[None]:
    """Refuse a folder that the operating system keeps closed."""
    try:
        yield
    except OSError as error:
        where, why = error.filename or folder, error.strerror or error
        raise UserError(f"the model {where} cannot be read ({why}); check its folder") from None


def _read_models(folder: Path, network: str | Path | None) -> tuple[Prior, DataConsistency | None]:
    """The prior and the network of a model folder."""
    with _readable(folder):
        if not folder.exists():
            raise UserError("no model is shipped with this package; name a folder with --model")
        if folder.is_file():
            raise UserError(
                f"{folder} is a file; a model is a folder with prior/ and network/. "
                "Convert a checkpoint (.pt) with `ddc convert`"
            )
        prior = prior_folder(folder)
        if prior is None:
            lack = ", and none is shipped with this package" if (folder / "network").is_dir() else ""
            raise UserError(f"{folder} is not a model: it has no prior/ (with unet/ and scheduler/) in it{lack}")
        if autoencoder_folder(prior) is not None:
            if network is not None:
                raise UserError(f"{folder} is a latent prior and takes no network; leave --network out")
            return LatentPrior.from_pretrained(prior).requires_grad_(False), None
        network_folder = Path(network) if network is not None else folder / "network"
        has_network = network is not None or network_folder.is_dir()
        return (
            Prior.from_pretrained(prior).requires_grad_(False),
            DataConsistency.from_pretrained(network_folder).requires_grad_(False) if has_network else None,
        )


def default_solver(model: str | Path | None) -> str:
    """The solver of a model if none is named: posterior, if the model has such a network, else ddc; resample for latents."""
    folder = DEFAULT_MODEL if model is None else model_folder(model)
    with _readable(folder):
        if (prior := prior_folder(folder)) is not None and autoencoder_folder(prior) is not None:
            return LATENT_SOLVER
    return "posterior" if (folder / PARTS["posterior"] / "config.json").is_file() else "ddc"


def prior_folder(model: Path) -> Path | None:
    """Where a model's prior lies: in prior/, in the folder itself, or, for a network alone, in the default model."""
    places = [model / "prior" if (model / "prior").is_dir() else model]
    if not (model / "prior").is_dir() and any((model / name).is_dir() for name in ("network", "posterior")):
        places.append(DEFAULT_MODEL / "prior")
    return next((p for p in places if (p / "config.json").exists() or (p / "unet").exists()), None)


def part_names(solver: Solver, task: str) -> list[str]:
    """The folder names of the networks that a solver needs for a task beside the model's own."""
    return [PARTS[need].format(task=task) for need in solver.needs if need in PARTS]


def find_part(name: str, model: str | Path | None) -> Path | None:
    """The folder of a solver's own network: in the model's folder, beside it, in the package, or in the repository
    that the package is used from."""
    package = Path(__file__).parent
    places = [package / "models", package.parents[1] / "models", DEFAULT_MODEL]
    if model is not None:
        places = [Path(model), Path(model).absolute().parent, *places]
    return next((place / name for place in places if (place / name / "config.json").is_file()), None)


def load_parts(solver: Solver, model: str | Path | None, problem: Problem) -> dict[str, Any]:
    """The networks that a solver needs for a problem beside the prior and the model's own network."""
    parts: dict[str, Any] = {}
    how = {"bridge": f"i2sb --task {problem.name}", "denoiser": "dncnn", "posterior": "posterior"}
    kinds: dict[str, Any] = {"bridge": Bridge, "denoiser": DnCNN, "posterior": PosteriorDenoiser}
    for need, training in how.items():
        if need in solver.needs:
            folder = find_part(PARTS[need].format(task=problem.name), model)
            if folder is None:
                message = f"{solver.name} needs a {need} network for {problem.name}; none was found"
                raise UserError(f"{message}. Train one with `ddc train {training}`")
            parts[need] = kinds[need].from_pretrained(folder)
    if "bridge" in parts:
        _warn_of_noise(parts["bridge"], problem)
    return parts


def _warn_of_noise(bridge: Bridge, problem: Problem) -> None:
    noise = float(torch.as_tensor(problem.sigma_y).max())
    if noise > max(bridge.sigma_max, ROUNDING_8_BIT):
        logger.warning(
            "the bridge network for %s was trained on measurements with noise of at most %g, not %g, and will "
            "take noise for part of the picture; use the solver ddc, or `ddc train i2sb --sigma-max %g`",
            problem.name,
            bridge.sigma_max,
            noise,
            noise,
        )
