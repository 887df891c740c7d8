"""The posterior denoiser: its inputs, its folder, and its training."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_parts import TINY

from ddc.cli import main
from ddc.datasets import load_images
from ddc.errors import UserError
from ddc.evaluation.benchmark import EvaluationOptions, Models, evaluate, make_cases
from ddc.evaluation.run import read_rows
from ddc.images import Picture, to_internal
from ddc.jobs import Request
from ddc.networks import build_network, load_network, run_unet
from ddc.noise import Noise
from ddc.notation import duration
from ddc.operators.inpaint import Inpaint
from ddc.pipeline import RestorationPipeline
from ddc.problems import Problem, make_problem, measure
from ddc.solvers.base import Run
from ddc.solvers.patches import fill_with_patches
from ddc.solvers.posterior import Posterior, PosteriorDenoiser, coefficients, wide_holes
from tiny import tiny_unet

TINY_CONFIG: dict[str, Any] = {"_class_name": "CompactUNet", "in_channels": 11, "conditions": 9} | TINY
SETTINGS = "--batch-size 4 --crop 32 --warmup 1 --precision fp32 --tasks denoise --sigma-max 0.3 --log-every 1"


def test_the_linear_estimate_lies_between_the_noisy_picture_and_the_guess() -> None:
    theta = torch.tensor([0.0, math.atan(0.25), math.pi / 2]).view(-1, 1, 1, 1)
    of_x, of_guess, scale = (part.flatten() for part in coefficients(theta))
    cos = theta.cos().flatten()
    assert torch.allclose(of_x * cos + of_guess, torch.ones(3), atol=1e-6)  # unbiased
    assert torch.allclose(of_guess, torch.tensor([0.0, 0.5, 1.0]), atol=1e-6)  # as good as the guess at n = s
    assert torch.allclose(scale, torch.tensor([0.0, 0.25 / 2**0.5, 0.25]), atol=1e-6)


@pytest.mark.parametrize("task", ["sr4", "inpaint92", "jpeg10", "motion"])
def test_the_mean_does_not_depend_on_the_noisy_picture(task: str) -> None:
    network = PosteriorDenoiser(tiny_unet(11, seed=5))
    truth = to_internal(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    problem, y = measure(task, 0.0, truth, ["a", "b"])
    measured = (problem.operator, y, problem.sigma)
    theta = torch.full((2, 1, 1, 1), math.pi / 2)
    with torch.no_grad():
        first, known = network(measured, truth, theta)
        second, _ = network(measured, torch.zeros_like(truth), theta)
        kept, _ = network(measured, torch.zeros_like(truth), theta, known)
        clean, _ = network(measured, truth, torch.full((2, 1, 1, 1), 1e-6))
    assert torch.allclose(first, second, atol=1e-5) and torch.equal(second, kept)
    # without noise it is the picture itself, within the cells of JPEG's coefficients
    assert (clean - truth).abs().mean() < (0.03 if task == "jpeg10" else 1e-3) < (first - truth).abs().mean()


def test_the_network_is_told_conditions_and_the_mode(tmp_path: Path) -> None:
    network = PosteriorDenoiser(build_network(TINY_CONFIG))
    generator = torch.Generator().manual_seed(2)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    network.save_pretrained(tmp_path)
    network = PosteriorDenoiser.from_pretrained(tmp_path)
    truth = to_internal(torch.rand(2, 3, 32, 32, generator=generator))
    problem, y = measure("denoise", 0.1, truth, ["a", "b"])
    told = torch.zeros(2, 9)
    told[1, 2:] = 0.5

    def mean(**options: Any) -> torch.Tensor:
        theta = torch.full((1, 1, 1, 1), math.pi / 2)
        return network((problem.operator, y, problem.sigma), truth, theta, **options)[0].detach()

    plain, conditioned = mean(), mean(conditions=told)
    assert torch.allclose(conditioned[0], plain[0], atol=1e-6) and (conditioned[1] - plain[1]).abs().max() > 1e-4
    assert (mean(mode=1) - plain).abs().max() > 1e-4 and float(told[0].abs().sum()) == 0
    with pytest.raises(UserError, match="9 conditions"):
        PosteriorDenoiser.from_config({"_class_name": "CompactUNet", "conditions": 4} | TINY)


@pytest.fixture(scope="module")
def with_posterior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with posterior/ alone, whose network is a generator."""
    folder = tmp_path_factory.mktemp("models") / "posterior-model"
    unet = build_network(TINY_CONFIG)
    generator = torch.Generator().manual_seed(4)
    for weight in unet.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    PosteriorDenoiser(unet, ([1.0, 0.25], [4.0, 0.5])).save_pretrained(folder / "posterior")
    return folder


def test_the_generator_goes_from_the_mean_to_a_sample(with_posterior: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(with_posterior)
    small = torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(1))
    results = {realism: pipe(small, "sr4", realism=realism, seed=3) for realism in (None, 0.0, 0.5, 1.0)}
    usual, mean, half, sample = (result.picture.tensor for result in results.values())
    assert [result.evaluations for result in results.values()] == [1, 1, 3, 3]
    assert torch.equal(usual, mean) and (sample - mean).abs().max() > 0.01
    inside = (sample > 0) & (sample < 1) & (mean > 0) & (mean < 1)
    assert torch.allclose(half[inside], ((mean + sample) / 2)[inside], atol=1e-5)
    other = pipe(small, "sr4", realism=1.0, seed=4).picture.tensor
    assert (sample - other).abs().max() > 0.01
    assert pipe(small, "sr4", solver="posterior:sampler=sde:steps=4:realism=1").evaluations == 4
    # neither the prior nor a network of another solver was read
    assert pipe.solver == "posterior" and "prior" not in vars(pipe) and "network" not in vars(pipe)
    with pytest.raises(UserError, match="ddc has no realism"):
        pipe(small, "sr4", solver="ddc", realism=0.5)


def test_strong_noise_alone_gets_the_mean(with_posterior: Path) -> None:
    parts = RestorationPipeline.from_pretrained(with_posterior).parts(Posterior(), make_problem("denoise"))
    parts["posterior"].realism = 0.5
    for task, sigma, realism in (("denoise", 0.14, 0.5), ("denoise", 0.16, 0.0), ("gauss", 0.16, 0.5)):
        assert Posterior().settled(make_problem(task, sigma), parts).realism == realism
    assert Posterior(realism=0.5).settled(make_problem("denoise", 0.16), parts).realism == 0.5
    several = Request("denoise", solver="posterior", samples=2).method
    assert several.settled(make_problem("denoise", 0.16), parts).realism == 0.5  # type: ignore[attr-defined]


@pytest.mark.usefixtures("small_metrics")
@pytest.mark.parametrize(("realism", "sampler", "own"), [(0.0, "auto", 1), (1.0, "auto", 3), (1.0, "sde", 4)])
def test_the_evaluations_of_message_passing_count(
    with_posterior: Path, tmp_path: Path, realism: float, sampler: str, own: int
) -> None:
    """Random projections mix distant pixels, which takes eight evaluations to undo."""
    pipe = RestorationPipeline.from_pretrained(with_posterior)
    network = pipe.parts(Posterior(), make_problem("denoise"))["posterior"]
    calls: list[object] = []
    network.unet.register_forward_hook(lambda *_: calls.append(0))
    solver, seen = Posterior(realism=realism, sampler=sampler, steps=4), []  # type: ignore[arg-type]
    truth = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    problem, y = measure("projections50", 0.02, truth, ["a"])
    pipe.solve(y, problem, solver, [0], seen.append)
    assert len(calls) == 8 + own
    assert [(step.index, step.steps) for step in seen] == [(i, 8 + own) for i in range(8 + own)]
    assert solver.settled(problem, {"posterior": network}, (64, 64)).evaluations() == 8 + own
    assert pipe(y[0].clamp(0, 1), problem.operator, solver=solver).evaluations == 8 + own
    assert solver.settled(make_problem("denoise"), {"posterior": network}, (64, 64)).evaluations() == own
    with pytest.raises(UserError, match="unmix needs a linear operator; jpeg10 is not one"):
        Posterior(unmix=True).settled(make_problem("jpeg10"), {"posterior": network})
    Picture(np.full((64, 64, 3), 90, np.uint8)).write(tmp_path / "photos" / "a.png")
    models, text = Models({"m": with_posterior}), f"posterior:realism={realism}:sampler={sampler}:steps=4"
    cases = make_cases(models, ["projections50"], [0.02], [text])
    evaluate(cases, load_images(tmp_path / "photos", 64), models, EvaluationOptions(tmp_path / "run"))
    assert read_rows(tmp_path / "run")[0][0]["nfe"] == 8 + own


def test_the_doubt_is_written(with_posterior: Path, tmp_path: Path) -> None:
    Picture(np.full((16, 20, 3), 90, np.uint8)).write(tmp_path / "a.png")
    words = f"restore {tmp_path / 'a.png'} -o {tmp_path / 'out.png'} --model {with_posterior} --task sr2 --doubt"
    assert main(words.split()) == 0
    drawn = Picture.read(tmp_path / "out_doubt.png")
    assert drawn.size == (32, 40) and drawn.pixels.max() > 0
    pipe = RestorationPipeline.from_pretrained(with_posterior)
    result = pipe(tmp_path / "a.png", "sr2", doubt=True)
    (low, high), samples = result.intervals[0], pipe(tmp_path / "a.png", "sr2", realism=1.0, samples=8).samples[0]
    stack = torch.stack([sample.tensor for sample in samples])
    assert torch.allclose((low + high) / 2, stack.mean(0), atol=1e-5) and bool((low < high).all())
    assert result.evaluations == 1 and len(result.samples[0]) == 1
    pipe.parts(Posterior(), make_problem("denoise"))["posterior"].doubt = 2.0  # as a calibrated model has
    wide = pipe(tmp_path / "a.png", "sr2", doubt=True).intervals[0]
    assert float((wide[1] - wide[0]).mean()) > 1.5 * float((high - low).mean())


@pytest.mark.parametrize(("realism", "own"), [(0.0, 1), (1.0, 3)])
def test_the_samples_for_the_doubt_are_in_the_forecast(
    with_posterior: Path,
    tmp_path: Path,
    realism: float,
    own: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def slow(*given: Any) -> torch.Tensor:
        nonlocal now
        now += 1  # a second for each evaluation
        return run_unet(*given)

    monkeypatch.setattr("ddc.solvers.posterior.run_unet", slow)
    monkeypatch.setattr("ddc.telling.time.perf_counter", lambda: now)
    Picture(np.full((16, 20, 3), 90, np.uint8)).write(tmp_path / "a.png")
    words = f"restore {tmp_path / 'a.png'} -o {tmp_path / 'out.png'} --model {with_posterior} --task sr2 --json"
    for doubt, seconds in ((" --doubt", own + 8 * 3), ("", own)):
        monkeypatch.setattr("ddc.telling.SLOW", 0)
        assert main(f"{words}{doubt} --realism {realism}".split()) == 0
        said, now = capsys.readouterr(), 0.0
        facts = json.loads(said.out)
        assert f"about {duration(seconds)}\n" in said.err and facts["forecast"] == facts["seconds"] == seconds


def test_jpeg_has_a_doubt_of_its_own(with_posterior: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    pipe = RestorationPipeline.from_pretrained(with_posterior)
    network = pipe.parts(Posterior(), make_problem("denoise"))["posterior"]

    def widths(task: str) -> float:
        low, high = pipe(Picture(pixels), task, doubt=True).intervals[0]
        return float((high - low).mean())

    before = widths("jpeg10"), widths("sr2")
    network.doubt_jpeg = 3.0
    after = widths("jpeg10"), widths("sr2")
    assert after[0] == pytest.approx(3 * before[0], rel=0.1) and after[1] == before[1]
    network.save_pretrained(tmp_path / "posterior")
    assert PosteriorDenoiser.from_pretrained(tmp_path / "posterior").doubt_jpeg == 3.0


def test_wide_holes_get_a_sample(with_posterior: Path) -> None:
    network = PosteriorDenoiser.from_pretrained(with_posterior / "posterior")
    masks = torch.ones(3, 1, 48, 48)
    masks[0, :, 4:32, 6:32] = 0  # wide
    masks[1, :, 4:32, 6:20] = 0  # long, but narrow
    truth = to_internal(torch.rand(3, 3, 48, 48, generator=torch.Generator().manual_seed(0)))
    assert wide_holes(Inpaint(masks)).tolist() == [True, False, False]

    def solve(solver: Posterior, *which: int) -> torch.Tensor:
        problem = Problem(Inpaint(masks[list(which)]))
        y = problem.operator(truth[list(which)])
        return solver.solve(Run(y, problem, None, Noise([5 + i for i in which]), posterior=network))

    together, mean = solve(Posterior(), 0, 1, 2), solve(Posterior(realism=0.0), 0, 1, 2)
    assert torch.allclose(together[1:], mean[1:], atol=1e-6) and (together[0] - mean[0]).abs().max() > 0.01
    for i in range(3):
        assert torch.allclose(solve(Posterior(), i)[0], together[i], atol=1e-5)
    # the noise levels of samples differ as well
    assert (solve(Posterior(realism=1.0), 0) - solve(Posterior(realism=1.0, wide=False), 0)).abs().max() > 0.01


def test_the_sharp_estimate_of_a_wide_hole_has_patches_of_the_picture(with_posterior: Path) -> None:
    network = PosteriorDenoiser.from_pretrained(with_posterior / "posterior")
    network.sharp = True
    masks = torch.ones(2, 1, 64, 64)
    masks[0, :, 20:46, 18:44] = 0  # wide
    masks[1, :, 20:46, 18:24] = 0
    stripes = (torch.arange(64) % 8 < 4).float() * 1.6 - 0.8
    truth = stripes.expand(2, 3, 64, 64)

    def solve(solver: Posterior) -> torch.Tensor:
        problem = Problem(Inpaint(masks))
        y = problem.operator(truth)
        return solver.solve(Run(y, problem, None, Noise([5, 6]), posterior=network))

    sharp, usual, mean = (solve(Posterior(realism=r, wide=w)) for r, w in ((0.5, None), (0.5, False), (0.0, None)))
    hole = masks[0] == 0
    assert torch.allclose(sharp[1], usual[1], atol=1e-5)  # narrow
    assert torch.equal(torch.where(hole, 0, sharp[0]), torch.where(hole, 0, truth[0]))
    patches = fill_with_patches(mean[0], hole[0])
    error = ((patches - truth[0]) * hole).abs().sum() / (3 * hole.sum())
    assert error < 0.5 * ((mean[0] - truth[0]) * hole).abs().sum() / (3 * hole.sum())
    # the mean of the patches and of what the network makes of them
    from_network = 2 * sharp[0] - patches
    assert (from_network - patches)[:, hole[0]].abs().mean() > 0.01
    assert (sharp[0] - usual[0])[:, hole[0]].abs().max() > 0.1
    samples = [solve(Posterior(realism=0.75, wide=True)), solve(Posterior(realism=1.0, wide=True))]
    assert all((sample[0] - sharp[0]).abs().max() > 0.01 for sample in samples)


def test_a_bad_generator_is_refused(with_posterior: Path, tmp_path: Path) -> None:
    unet = load_network(with_posterior / "posterior", TINY_CONFIG)
    for levels in ([1.0], [[1.0], [4.0, 0.5]], [[0.0], [1.0]], [["a"], ["b"]], "ab", [[], []]):
        with pytest.raises(UserError, match="two lists of noise levels"):
            PosteriorDenoiser(unet, levels)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected 0 to 1"):
        PosteriorDenoiser(unet, None, 2.0)
    plain = PosteriorDenoiser(tiny_unet(11, seed=1))
    y = torch.zeros(1, 3, 8, 8)
    with pytest.raises(UserError, match="not trained as a generator"):
        Posterior(sampler="generator").solve(Run(y, make_problem("denoise"), None, Noise([1]), posterior=plain))


def test_a_trained_network_restores_from_its_folder(tmp_path: Path) -> None:
    for i in range(4):
        Picture(np.full((40, 40, 3), 60 + 40 * i, np.uint8)).write(tmp_path / "photos" / f"{i}.png")
    config = {"_class_name": "CompactUNet", "out_channels": 3, "middle_blocks": 1, "attention_levels": [0]}
    (tmp_path / "tiny.json").write_text(json.dumps(config | TINY))
    run = tmp_path / "run"
    words = f"train posterior --data {tmp_path / 'photos'} --out {run} --network {tmp_path / 'tiny.json'} {SETTINGS}"
    assert main([*words.split(), "--steps", "60", "--learning-rate", "0.003", "--pictures-every", "60"]) == 0
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses, errors = ([entry[name] for entry in log if name in entry] for name in ("loss", "mse"))
    assert len(losses) == 60 and all(map(math.isfinite, losses))
    assert sum(errors[-20:]) < 0.85 * sum(errors[:20])
    assert (run / "pictures" / "step-00000060.png").is_file()

    pipe = RestorationPipeline.from_pretrained(run)  # with the shipped prior, which it does not use
    small = torch.rand(3, 10, 10, generator=torch.Generator().manual_seed(1))
    mean, sample, other = (
        pipe(small, "sr4", solver=f"posterior:realism={realism}:steps=4", seed=seed)
        for realism, seed in ((0, 0), (1, 0), (1, 1))
    )
    assert mean.evaluations == 1 and sample.evaluations == 4
    assert (sample.picture.tensor - other.picture.tensor).abs().max() > 0.01
    again = pipe(small, "sr4", solver="posterior:realism=0:steps=4", seed=5).picture.tensor
    assert torch.equal(mean.picture.tensor, again)
    with pytest.raises(UserError, match="between 0 and 1"):
        pipe(small, "sr4", solver="posterior:realism=2")


def test_another_network_is_not_taken_for_one(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="not a posterior network"):
        PosteriorDenoiser.from_pretrained(tiny_model / "network")
    with pytest.raises(UserError, match="takes 11 channels"):
        PosteriorDenoiser(tiny_unet(6, seed=0))
