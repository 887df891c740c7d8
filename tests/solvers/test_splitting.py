"""Half-quadratic splitting: the mean is fitted to y and denoised in turn."""

import numpy as np
import pytest
import torch
from skimage import data
from torch import Tensor

from ddc.errors import UserError
from ddc.images import Picture
from ddc.jobs import Job
from ddc.operators import AveragePool, Denoise
from ddc.operators.base import LinearOperator
from ddc.operators.blur import KernelBlur, coded_kernel, disc_kernel, gaussian_kernel
from ddc.operators.inpaint import Inpaint
from ddc.operators.natural import coefficients_of, picture_of, spreads
from ddc.perceptual import psnr
from ddc.pipeline import RestorationPipeline
from ddc.problems import Problem, make_problem, measure
from ddc.solvers.base import Step
from ddc.solvers.posterior import Posterior
from ddc.solvers.splitting import FEW_ROUNDS, ROUNDS, fit_in_rounds, share_left_open, usual_rounds, with_blurred_border

SIZE = (48, 48)
STRIPES = Inpaint((torch.arange(64) % 2 == 0).float().expand(1, 1, 64, 64))


@pytest.fixture(scope="module")
def pipe() -> RestorationPipeline:
    return RestorationPipeline.from_pretrained().to("cpu")


@pytest.fixture(scope="module")
def coffee() -> Tensor:
    return torch.from_numpy(data.coffee()[100:164, 200:264].copy()).permute(2, 0, 1)[None].float() / 127.5 - 1


@pytest.mark.parametrize("sigma", [0.0, 0.04])
def test_with_the_right_denoiser_each_round_comes_nearer(sigma: float) -> None:
    """The picture is drawn from a Gaussian, for which Wiener's filter is the best denoiser."""
    spread = 0.15 * spreads(3, SIZE).float()
    signs = torch.randn(1, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    truth = picture_of(spread * signs)
    operator = KernelBlur(disc_kernel(2.0))
    y = operator(truth) + sigma * torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))

    def denoise(noisy: Tensor, level: Tensor) -> Tensor:
        return picture_of(spread**2 / (spread**2 + level**2) * coefficients_of(noisy))

    zero = torch.zeros_like(truth)
    errors = [
        float((fit_in_rounds(operator, y, sigma, zero, rounds, denoise) - truth).square().mean().sqrt())
        for rounds in (1, 3, 6)
    ]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.8 * errors[0]
    best = operator.regularised_inverse(y, 0.04**2, SIZE)
    assert errors[2] < float((best - truth).square().mean().sqrt())


def test_without_rounds_nothing_but_an_exact_y_is_put_back() -> None:
    x, operator = torch.rand(1, 3, *SIZE), KernelBlur(coded_kernel())

    def refuse(noisy: Tensor, level: Tensor) -> Tensor:
        raise AssertionError("there is nothing to denoise")

    assert torch.equal(fit_in_rounds(operator, operator(x), 0.1, x, 0, refuse), x)


def test_where_the_kernel_reaches_the_border_rounds_start_from_the_measurement() -> None:
    x, y = torch.rand(2, 3, 24, 32), torch.rand(2, 3, 24, 32)
    start = with_blurred_border(x, y, KernelBlur(torch.ones(5, 9) / 45))
    assert torch.equal(start[..., 2:-2, 4:-4], x[..., 2:-2, 4:-4])
    for frame in (np.s_[..., :2, :], np.s_[..., -2:, :], np.s_[..., :4], np.s_[..., -4:]):
        assert torch.equal(start[frame], y[frame])
    assert torch.equal(with_blurred_border(x, y, KernelBlur(torch.ones(25, 1) / 25)), y)


def test_the_border_is_better_where_the_kernel_is_off_its_centre(pipe: RestorationPipeline, coffee: Tensor) -> None:
    """The last rows are hardly measured. From the network's own guess the error there would be 0.61 instead of 0.28."""
    kernel = torch.zeros(15, 15)
    kernel[10:13, 2:5] = coded_kernel(3)
    operator = KernelBlur(kernel / kernel.sum())
    y = operator(coffee)
    x = pipe.solve(y, Problem(operator, 0.0), Posterior(realism=0.0), [0], size=(64, 64))
    outer = (x - coffee)[..., -3:, :]
    print(f"error of the last rows: {float(outer.square().mean().sqrt()):.4f}")
    assert float(outer.square().mean().sqrt()) < 0.4


def test_how_much_is_left_open() -> None:
    x = torch.zeros(1, 3, 64, 64)
    sharp, coded = KernelBlur(torch.ones(1, 1)), KernelBlur(coded_kernel())
    wide = KernelBlur(gaussian_kernel(6, 1.5, 30))
    assert [float(share_left_open(one, 0.0, x)) for one in (sharp, coded, wide)] == [0, 0, 1]
    shares = [float(share_left_open(coded, sigma, x)) for sigma in (0.0, 0.002, 0.01, 0.1)]
    assert shares == sorted(shares) and 0 < shares[2] <= shares[3] == 1
    both = share_left_open(coded, torch.tensor([0.0, 0.1]).view(-1, 1, 1, 1), x)
    assert both.flatten().tolist() == [shares[0], shares[3]]


def test_each_picture_of_a_batch_counts_by_itself() -> None:
    x = torch.zeros(1, 3, 64, 64)
    kernels = [disc_kernel(2.0), torch.nn.functional.pad(torch.ones(1, 1), (2, 2, 2, 2))]
    alone = [float(share_left_open(KernelBlur(kernel), 0.01, x)) for kernel in kernels]
    both = KernelBlur(torch.stack(kernels).unsqueeze(1))
    assert share_left_open(both, 0.01, x.expand(2, -1, -1, -1)).flatten().tolist() == pytest.approx(alone, abs=1e-5)
    assert alone[0] > alone[1] + 0.2


def test_how_many_rounds_there_are(pipe: RestorationPipeline) -> None:
    assert usual_rounds(0.0, 0.5) == usual_rounds(0.1, 0.0) == ROUNDS > FEW_ROUNDS == usual_rounds(0.1, None)
    disc, jpeg = make_problem("disc2", 0.05), make_problem("jpeg10")
    parts = pipe.parts(Posterior(), disc)
    told = parts | {"conditions": torch.zeros(1, 9)}
    found = {
        "sharp": Posterior().settled(disc, parts),
        "mean": Posterior(realism=0.0).settled(disc, parts),
        "told": Posterior().settled(disc, told),
        "other": Posterior().settled(make_problem("gauss", 0.05), parts),
        "asked": Posterior(rounds=2, realism=0.0).settled(make_problem("gauss", 0.05), parts),
    }
    assert {name: one.rounds for name, one in found.items()} == {
        "sharp": FEW_ROUNDS,
        "mean": ROUNDS,
        "told": 0,
        "other": 0,
        "asked": 2,
    }
    assert {name: one.evaluations() for name, one in found.items()} == {
        "sharp": 2 + FEW_ROUNDS,
        "mean": 1 + ROUNDS,
        "told": 2,
        "other": 2,
        "asked": 3,
    }
    with pytest.raises(UserError, match="rounds needs a linear operator; jpeg10 is not one"):
        Posterior(rounds=1).settled(jpeg, parts)
    with pytest.raises(UserError, match="rounds must be between 0 and 100, not -2"):
        Posterior(rounds=-2)


@pytest.mark.parametrize(("sigma", "least"), [(0.0, 5.0), (0.02, 1.0)])
def test_the_shipped_network_gains_by_rounds(
    pipe: RestorationPipeline, coffee: Tensor, sigma: float, least: float
) -> None:
    problem, y = measure("coded", sigma, coffee, ["coffee"])
    seen: list[int] = []

    def restored(rounds: int | None) -> float:
        solver = Posterior(realism=0.0, rounds=rounds)
        x = pipe.solve(y, problem, solver, [0], lambda step: seen.append(step.index), size=(64, 64))
        return float(psnr((x.clamp(-1, 1) + 1) / 2, (coffee + 1) / 2))

    without, usual = restored(0), restored(None)
    print(f"{without:.2f} dB, in rounds {usual:.2f} dB")
    assert usual > without + least
    assert seen == [0, *range(1 + ROUNDS)]


@pytest.mark.parametrize("operator", [Denoise(), AveragePool(2), STRIPES], ids=lambda operator: type(operator).__name__)
def test_the_mean_of_copies_turns_with_the_picture(
    pipe: RestorationPipeline, coffee: Tensor, operator: LinearOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two copies the mean of a mirrored measurement is the mirrored mean; with one, a network makes a difference."""
    monkeypatch.setattr("ddc.solvers.posterior.MARGIN", 0)
    mirror = Inpaint(operator.mask.flip(-1)) if isinstance(operator, Inpaint) else operator
    problem, turned = Problem(operator, 0.05), Problem(mirror, 0.05)
    y = operator(coffee)
    differences = []
    for copies in (1, 2, 4):
        solver, steps = Posterior(realism=0.0, copies=copies, again=False), list[Step]()
        x = pipe.solve(y, problem, solver, [0], steps.append, size=(64, 64))
        mirrored = pipe.solve(y.flip(-1), turned, solver, [0], size=(64, 64)).flip(-1)
        differences.append(float((x - mirrored).abs().max()))
        assert [step.index for step in steps] == [copies - 1] and steps[0].steps == copies
        assert solver.settled(problem, pipe.parts(solver, problem)).evaluations() == copies
    print(f"{type(operator).__name__}: {differences}")
    assert differences[0] > 1e-2 and max(differences[1:]) < 1e-4


def test_a_mean_that_was_denoised_again_is_nearer(pipe: RestorationPipeline, coffee: Tensor) -> None:
    """The network leaves a little of strong noise, which is noise of its own for a second look."""
    problem, y = measure("denoise", 0.1, coffee, ["coffee"])
    parts = pipe.parts(Posterior(), problem)

    def error(**settings: bool) -> float:
        return float((pipe.solve(y, problem, Posterior(realism=0.0, **settings), [0]) - coffee).square().mean().sqrt())

    print(f"{error(again=False):.4f}, again {error():.4f}")
    assert error() < 0.99 * error(again=False)
    weak, told = make_problem("denoise", 0.03), parts | {"conditions": torch.zeros(1, 9)}
    mean, sharp = Posterior(realism=0.0), Posterior(realism=0.5)
    assert mean.settled(problem, parts).again
    assert not any(
        one.again for one in (mean.settled(weak, parts), mean.settled(problem, told), sharp.settled(problem, parts))
    )


def test_copies_are_counted(pipe: RestorationPipeline, coffee: Tensor) -> None:
    """Each copy is an evaluation of the mean, of its rounds, and of what makes y a picture with noise."""
    for task, solver, count in (
        ("disc2", Posterior(realism=0.0, copies=2), 2 * (1 + ROUNDS)),
        ("disc2", Posterior(realism=0.5, copies=2), 2 * (1 + FEW_ROUNDS) + 1),
        ("denoise", Posterior(realism=1.0, sampler="sde", steps=3, copies=4), 4 + 2),
        ("denoise", Posterior(realism=0.0), 2),
        ("denoise", Posterior(realism=0.0, again=False), 1),
        ("denoise", Posterior(realism=0.0, copies=2), 4),
        ("gauss", Posterior(realism=0.0), 1),
    ):
        problem, y = measure(task, 0.05, coffee, ["coffee"])
        steps: list[Step] = []
        pipe.solve(y, problem, solver, [0], steps.append, size=(64, 64))
        assert steps[-1].index + 1 == steps[-1].steps == count, task
    with pytest.raises(UserError, match="copies is 3; expected 1, 2 or 4"):
        Posterior(copies=3)


def test_an_exact_measurement_is_explained_by_the_default(pipe: RestorationPipeline, coffee: Tensor) -> None:
    """Where y leaves nothing open, the default adds no detail of its own."""
    problem, y = measure("coded", 0.0, coffee, ["coffee"])
    mean, usual = (pipe.solve(y, problem, Posterior(realism=realism), [0], size=(64, 64)) for realism in (0.0, None))
    assert torch.equal(usual, mean)
    assert isinstance(problem.operator, LinearOperator)
    assert float((problem.operator(usual) - y).abs().max()) < 1e-3


def test_pictures_of_other_noise_are_not_restored_in_one_batch(pipe: RestorationPipeline) -> None:
    """Each would get the rounds of the other."""
    picture, operator = Picture(data.coffee()[:32, :32].copy()), KernelBlur(disc_kernel(1.5))

    def job(sigma: float) -> Job:
        problem = Problem(operator, sigma)
        return Job(picture, problem, 0, True, Posterior(), pipe.parts(Posterior(), problem))

    assert job(0.05).fits(job(0.06))
    assert not job(0.0).fits(job(0.05))
