"""What every solver in SOLVERS promises, with the real operators and tiny networks of the real classes."""

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.noise import Noise
from ddc.operators import JPEG, Bicubic, Colorize, Denoise, GaussianBlur, Inpaint, KernelBlur, Operator
from ddc.operators.inpaint import random_mask
from ddc.priors import DataConsistency, Prediction, Prior, Schedule
from ddc.problems import Problem
from ddc.solvers import SOLVERS
from ddc.solvers.base import Run, Solver, Step, make_solver
from ddc.solvers.bridge import CDDB, Bridge
from ddc.solvers.ddnm import DDNM
from ddc.solvers.dds import DDS
from ddc.solvers.diffpir import DiffPIR
from ddc.solvers.gradients import DPS, MCG, PiGDM
from ddc.solvers.latent import PSLD
from ddc.solvers.pnp_admm import DnCNN
from ddc.solvers.posterior import PosteriorDenoiser
from ddc.solvers.reddiff import REDdiff, count_measured
from tiny import tiny_latent_prior, tiny_unet

SIZE = 32
SEEDS = [11, 12]
OPERATORS: dict[str, Operator] = {
    "sr4": Bicubic(4),
    "gauss": GaussianBlur(),
    "inpaint92": Inpaint(random_mask((SIZE, SIZE), 0.92, SEEDS)),
    "jpeg10": JPEG(10),
    "denoise": Denoise(),
}
MOTION = torch.eye(5) / 5
STEPS = 3
ONE_STEP = ("pinv", "one-pass", "autoencoder")


@pytest.fixture(scope="module")
def parts(tiny_model: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    denoiser = DnCNN(depth=3, width=8)
    torch.nn.init.normal_(denoiser.layers[-1].weight, std=0.02)
    return {
        "network": DataConsistency.from_pretrained(tiny_model / "network"),
        "bridge": Bridge(Prior.from_pretrained(tiny_model / "prior").unet, "sr4"),
        "denoiser": denoiser,
        "posterior": PosteriorDenoiser(tiny_unet(11, seed=3)),
    }


@pytest.fixture(scope="module")
def prior(tiny_model: Path) -> Prior:
    return Prior.from_pretrained(tiny_model / "prior")


@pytest.fixture(scope="module")
def priors(prior: Prior) -> dict[bool, Prior]:
    """A prior of pictures, and one of latents."""
    return {False: prior, True: tiny_latent_prior()}


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    """Two 32×32 windows in [-1, 1]."""
    whole = torch.from_numpy(skimage.data.astronaut()).permute(2, 0, 1).float() / 127.5 - 1
    return torch.stack([whole[:, 80:112, 200:232], whole[:, 300:332, 120:152]])


def short(name: str) -> Solver:
    if name == "posterior":  # a sample
        return make_solver("posterior:realism=1", STEPS)
    if name == "resample":
        return make_solver("resample:every=1:iterations=2", STEPS)
    return SOLVERS[name]() if name in ONE_STEP else SOLVERS[name](steps=STEPS)


def measured(pictures: Tensor, task: str, sigma_y: float = 0.05) -> tuple[Tensor, Problem]:
    problem = Problem(OPERATORS[task], sigma_y, task)
    y = problem.operator(pictures)
    return problem.measure(pictures, Noise([1, 2]).normal(y.shape)), problem


def one(problem: Problem, i: int) -> Problem:
    """The problem of the i-th picture alone: masks are one for each."""
    operator = problem.operator
    return replace(problem, operator=Inpaint(operator.mask[i : i + 1])) if isinstance(operator, Inpaint) else problem


def takes(solver: Solver, problem: Problem) -> bool:
    try:
        solver.check(problem)
    except UserError:
        return False
    return True


CASES = [(name, task) for name in SOLVERS for task in OPERATORS if takes(short(name), Problem(OPERATORS[task], 0.05))]


@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_batch_equals_single_runs_and_is_reproducible(
    name: str, task: str, pictures: Tensor, priors: dict[bool, Prior], parts: dict[str, Any]
) -> None:
    prior = priors[SOLVERS[name].latent]
    y, problem = measured(pictures, task)
    solver, seen = short(name), list[Step]()
    together = solver.solve(Run(y, problem, prior, Noise(SEEDS), seen.append, **parts))
    again = solver.solve(Run(y, problem, prior, Noise(SEEDS), **parts))
    alone, other = (solver.solve(Run(y[1:], one(problem, 1), prior, Noise([seed]), **parts)) for seed in (SEEDS[1], 99))

    assert together.shape == (2, 3, SIZE, SIZE)
    assert together.dtype == torch.float32
    assert not together.requires_grad
    assert bool(together.isfinite().all())
    assert torch.equal(together, again)
    # some draw no noise, and a projection (mcg's, the example's) may leave nothing but y where A is the identity
    only_y = task == "denoise" and torch.allclose(together, y, atol=1e-5)
    if name not in (*ONE_STEP, "pnp-admm") and not only_y:
        assert not torch.equal(alone, other)
    # JPEG's rounding turns a last bit into a level
    assert (alone[0] - together[1]).abs().max() < (0.05 if task == "jpeg10" else 1e-3)

    assert [step.index for step in seen] == list(range(solver.steps))
    for step in seen:
        assert step.steps == solver.steps
        assert step.x0.shape == together.shape
        assert bool(step.x0.isfinite().all())
        assert not step.x0.requires_grad
        assert step.noise is None or (bool(step.noise.isfinite().all()) and not step.noise.requires_grad)
    if name not in (*ONE_STEP, "pnp-admm", "posterior"):  # whose first step is the mean
        assert all(step.noise is not None for step in seen)
        times = [step.t for step in seen]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", SOLVERS)
def test_network_evaluations_are_counted(
    name: str, pictures: Tensor, priors: dict[bool, Prior], parts: dict[str, Any]
) -> None:
    prior = priors[SOLVERS[name].latent]
    y, problem = measured(pictures, "sr4")
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    networks = [prior.unet, parts["network"].unet, parts["bridge"].unet, parts["denoiser"], parts["posterior"].unet]
    hooks = [network.register_forward_hook(count) for network in networks]
    try:
        short(name).solve(Run(y, problem, prior, Noise(SEEDS), **parts))
    finally:
        for hook in hooks:
            hook.remove()
    assert calls == short(name).evaluations()


@pytest.mark.parametrize("name", SOLVERS)
def test_any_size_and_colourisation(name: str, priors: dict[bool, Prior], parts: dict[str, Any]) -> None:
    prior = priors[SOLVERS[name].latent]
    x = torch.linspace(-1, 1, 3 * 19 * 23).view(1, 3, 19, 23)
    for operator in (Denoise(), GaussianBlur(), Colorize(), Bicubic(2)):
        picture = x[..., :18, :22] if isinstance(operator, Bicubic) else x
        problem = Problem(operator, 0.02)
        y = problem.measure(picture, Noise([0]).normal(operator(picture).shape))
        out = short(name).solve(Run(y, problem, prior, Noise([0]), **parts))
        assert out.shape == picture.shape
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", SOLVERS)
def test_settings_are_documented_and_frozen(name: str) -> None:
    kind = SOLVERS[name]
    assert kind.name == name
    assert kind.__doc__ is not None and "\n" not in kind.__doc__.strip()
    for field in fields(kind):
        homes = [base for base in kind.__mro__ if field.name in vars(base).get("__annotations__", {})]
        below = [inspect.getsource(home).split(f"    {field.name}: ", 1)[1].split("\n")[1].strip() for home in homes]
        assert any(text.startswith('"""') and text.endswith('."""') for text in below), field.name
    with pytest.raises(AttributeError):
        kind().steps = 3  # type: ignore[misc]


def test_paper_defaults() -> None:
    steps = {name: SOLVERS[name]().steps for name in SOLVERS}
    assert steps == {
        "ddc": 5,
        "one-pass": 1,
        "dps": 1000,
        "ddnm": 100,
        "ddrm": 20,
        "pigdm": 100,
        "reddiff": 100,
        "pnp-admm": 10,
        "cddb": 20,
        "i2sb": 20,
        "mcg": 1000,
        "dds": 50,
        "diffpir": 100,
        "posterior": 20,
        "psld": 1000,
        "resample": 500,
        "hgu": 1000,
        "unconditional": 100,
        "pinv": 1,
        "autoencoder": 1,
    }
    assert DPS().setting("zeta", Problem(GaussianBlur())) == 0.4
    assert DPS().setting("zeta", Problem(Bicubic(4))) == 1.0
    assert DPS(zeta=0.0).setting("zeta", Problem(GaussianBlur())) == 0.0
    assert DiffPIR().setting("zeta", Problem(OPERATORS["inpaint92"])) == 1.0
    assert DiffPIR().setting("zeta", Problem(Bicubic(4))) == 0.1
    assert REDdiff().setting("lr", Problem(JPEG(10))) == 0.1
    assert REDdiff().setting("lr", Problem(Bicubic(4))) == 0.5
    assert DDS().weights(Problem(GaussianBlur(), 0.05)) == (1.0, 1.0)
    assert DDS().weights(Problem(Bicubic(8), 0.05)) == (1.0, 64.0)
    assert DDS().weights(Problem(Bicubic(8), 0.0)) == (0.0, 64.0)
    one_noisy = Problem(Bicubic(8), torch.tensor([0.0, 0.05]))
    assert DDS().weights(one_noisy)[0].flatten().tolist() == [0.0, 1.0]
    assert DDS(gamma=1.0).weights(Problem(Bicubic(8), 0.0)) == (1.0, 1.0)
    assert CDDB().setting("c", Problem(JPEG(10))) == 0.5
    assert PSLD().setting("omega", Problem(Bicubic(4))) == 0.9
    assert PSLD().setting("omega", Problem(GaussianBlur())) == 0.1
    assert CDDB().setting("c", Problem(Bicubic(4))) == 1.0
    assert CDDB(c=0.3).setting("c", Problem(JPEG(10))) == 0.3


def test_refusals_name_a_solver_that_can() -> None:
    jpeg, motion = Problem(OPERATORS["jpeg10"], 0.0, "jpeg10"), Problem(KernelBlur(MOTION), 0.05, "motion")
    refused_jpeg = [name for name in SOLVERS if not takes(short(name), jpeg)]
    refused_motion = [name for name in SOLVERS if not takes(short(name), motion)]
    assert refused_jpeg == ["ddnm", "ddrm", "pnp-admm", "mcg", "dds", "diffpir", "psld"]
    assert refused_motion == ["ddnm", "ddrm"]
    assert takes(short("ddnm"), Problem(KernelBlur(MOTION), 0.0))  # without noise the pseudo-inverse is enough
    for problem, names in ((jpeg, refused_jpeg), (motion, refused_motion)):
        for name in names:
            with pytest.raises(UserError, match=problem.name) as refusal:
                short(name).check(problem)
            suggested = str(refusal.value).split("Use ")[1]
            assert name not in suggested
            offered = [other for other in SOLVERS if other in suggested.replace(",", "").replace(".", "").split()]
            assert offered
            assert all(takes(short(other), problem) for other in offered)


@pytest.mark.parametrize("name", [name for name in SOLVERS if name not in ("ddnm", "ddrm")])
def test_blur_without_an_svd(name: str, pictures: Tensor, priors: dict[bool, Prior], parts: dict[str, Any]) -> None:
    prior = priors[SOLVERS[name].latent]
    problem = Problem(KernelBlur(MOTION), 0.05, "motion")
    y = problem.measure(pictures, Noise([1, 2]).normal(pictures.shape))
    out = short(name).solve(Run(y, problem, prior, Noise(SEEDS), **parts))
    assert out.shape == pictures.shape
    assert bool(out.isfinite().all())


IMPOSSIBLE = [(name, steps) for name in SOLVERS if name not in ("pinv", "autoencoder") for steps in (0, -1, 1001)]
for name in ("pnp-admm", "posterior"):  # they have no schedule that could be too short
    IMPOSSIBLE.remove((name, 1001))


@pytest.mark.parametrize(("name", "steps"), IMPOSSIBLE)
def test_impossible_steps(
    name: str, steps: int, pictures: Tensor, priors: dict[bool, Prior], parts: dict[str, Any]
) -> None:
    prior = priors[SOLVERS[name].latent]
    y, problem = measured(pictures, "sr4")
    with pytest.raises(UserError, match="step"):
        SOLVERS[name](steps=steps).solve(Run(y, problem, prior, Noise(SEEDS), **parts))


@pytest.mark.parametrize("name", ["pinv", "autoencoder"])
def test_what_has_one_step(name: str) -> None:
    with pytest.raises(UserError, match="one step"):
        SOLVERS[name](steps=5)


# ----------------------------------------------------------------------------------------------------------
# consistency with the measurement, on the real operators


@pytest.mark.parametrize("task", ["sr4", "gauss", "inpaint92", "denoise"])
def test_ddnm_without_noise_ends_on_the_measurement(task: str, pictures: Tensor, prior: Prior) -> None:
    problem = Problem(OPERATORS[task], 0.0, task)
    y = problem.measure(pictures)
    x = DDNM(steps=10).solve(Run(y, problem, prior, Noise(SEEDS)))
    residual = problem.operator(x) - y
    print(f"DDNM at σ = 0, {task}: ‖A x − y‖∞ = {float(residual.abs().max()):.1e}")
    # Gaussian blur has singular values below the cut-off of 0.03, which are left as the prior has them
    assert residual.abs().max() < (0.05 if task == "gauss" else 2e-6)
    assert problem.operator.pinv(residual).abs().max() < 2e-5  # what counts as measured is met to rounding


# ----------------------------------------------------------------------------------------------------------
# where the released code differs from a paper


def test_dps_clips_as_the_released_code(pictures: Tensor) -> None:
    """A prior that says 3 everywhere is taken for 1, whose derivative is 0; without clipping it is taken at its word."""

    class Bright:
        schedule = Schedule.linear()

        def predict(self, x: Tensor, t: Any) -> Prediction:
            return Prediction(3 + 0.1 * x, x)

    y, problem = measured(pictures, "sr4")
    clipped, free = (DPS(steps=2, clip=clip).solve(Run(y, problem, Bright(), Noise(SEEDS))) for clip in (True, False))
    assert torch.allclose(clipped, torch.ones_like(clipped)) and (free - 3).abs().max() < 1
    assert DPS().clip


def test_reddiff_may_count_the_holes_of_a_mask(pictures: Tensor, prior: Prior) -> None:
    """The released code's mean over all pixels is a smaller weight of the measurement: here 8 % of it."""
    y, problem = measured(pictures, "inpaint92")
    half, same = Inpaint(torch.ones(1, 1, SIZE, SIZE)), []
    for count_holes in (False, True):
        solver = REDdiff(steps=3, count_holes=count_holes)
        same.append(solver.solve(Run(pictures, Problem(half, 0.0), prior, Noise(SEEDS))))
    assert torch.equal(same[0], same[1])  # without holes there is nothing to count
    few, all_pixels = count_measured(y, problem), y[0].numel()
    observed = OPERATORS["inpaint92"].mask.flatten(1).sum(1)  # type: ignore[operator, union-attr]
    assert few.flatten().tolist() == (3 * observed).tolist() and float(few.max()) < 0.15 * all_pixels
    apart = [REDdiff(steps=3, count_holes=count).solve(Run(y, problem, prior, Noise(SEEDS))) for count in (False, True)]
    assert (apart[0] - apart[1]).abs().max() > 1e-3


def test_the_pseudo_inverse_keeps_more_of_an_exact_measurement(pictures: Tensor, prior: Prior) -> None:
    def pinv(sigma_y: float, **settings: float) -> Tensor:
        y, problem = measured(pictures, "gauss", sigma_y)
        return SOLVERS["pinv"](**settings).solve(Run(y, problem, None, Noise(SEEDS)))

    assert torch.equal(pinv(0.0), pinv(0.0, cutoff=1e-6)) and not torch.equal(pinv(0.0), pinv(0.0, cutoff=0.03))
    assert torch.equal(pinv(0.05), pinv(0.05, cutoff=0.03))
    errors = [(pinv(0.0, cutoff=cutoff) - pictures).square().mean() for cutoff in (1e-6, 0.03)]
    assert errors[0] < errors[1]


# ----------------------------------------------------------------------------------------------------------
# gradients


@pytest.mark.parametrize("kind", [DPS, MCG, PiGDM])
def test_checkpointing_changes_memory_and_nothing_else(
    kind: type[Solver], pictures: Tensor, prior: Prior, parts: dict[str, Any]
) -> None:
    y, problem = measured(pictures, "sr4")
    results, kept = [], []
    for checkpointing in (False, True):
        solver = kind(steps=2, checkpointing=checkpointing)  # type: ignore[call-arg]
        size = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal size
            size += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results.append(solver.solve(Run(y, problem, prior, Noise(SEEDS))))
        kept.append(size)
    assert torch.allclose(results[0], results[1], atol=1e-5)
    assert kept[1] < 0.75 * kept[0]


@pytest.mark.parametrize("name", ["dps", "pigdm", "reddiff", "cddb", "psld", "resample", "hgu"])
def test_gradients_in_inference_mode(
    name: str, pictures: Tensor, priors: dict[bool, Prior], parts: dict[str, Any]
) -> None:
    prior = priors[SOLVERS[name].latent]
    for task in ("sr4", "jpeg10") if SOLVERS[name].operators is Operator else ("sr4",):
        y, problem = measured(pictures, task)
        expected = short(name).solve(Run(y, problem, prior, Noise(SEEDS), **parts))
        with torch.inference_mode():
            out = short(name).solve(Run(y.clone(), problem, prior, Noise(SEEDS), **parts))
        assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "ddnm:eta=99999",
            "ddnm:eta=-1",
            "ddnm:eta=nan",
            "ddrm:eta=2",
            "ddrm:eta_b=1.5",
            "dds:eta=1.01",
            "dds:gamma=-1",
        ),
        *("diffpir:zeta=2", "diffpir:lam=-1", "dps:zeta=inf", "mcg:zeta=-1", "pigdm:eta=3", "posterior:eta=-2"),
        *("posterior:realism=2", "posterior:rho=0", "reddiff:lr=-1", "reddiff:lam=nan", "pnp-admm:cg_iterations=0"),
        *("pnp-admm:rho=-1", "unconditional:eta=7", "cddb:c=inf", "ddc:steps=0", "dds:cg_iterations=1000000000"),
        *(
            "psld:omega=-1",
            "resample:every=0",
            "resample:iterations=0",
            "resample:lookahead=-1",
            "hgu:order=3",
            "hgu:eta2=1",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"must be .*, not|expected"):
        make_solver(text)
