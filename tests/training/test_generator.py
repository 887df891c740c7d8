"""The generator of a posterior network: its scoring rule, its training, and the network that it grows from."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import avg_pool2d
from training_parts import TINY

from ddc.cli import main
from ddc.datasets import find_sources, load_pictures
from ddc.errors import UserError
from ddc.images import Picture, to_internal
from ddc.networks import build_network
from ddc.noise import Noise
from ddc.perceptual import LPIPS
from ddc.priors import DataConsistency
from ddc.problems import make_problem, measure
from ddc.solvers.base import Run
from ddc.solvers.posterior import INPUTS, Posterior, PosteriorDenoiser
from ddc.training.adversary import Adversary, balanced
from ddc.training.data import Draws
from ddc.training.posterior import PosteriorObjective, energy_score, pyramid, scored
from ddc.training.settings import PosteriorSettings
from tiny import tiny_unet

WEIGHTS = "diffusion_pytorch_model.safetensors"
CONFIG = {"_class_name": "CompactUNet", "out_channels": 3, "conditions": 9} | TINY


def score_of(samples: Tensor, truth: Tensor) -> float:
    return float(energy_score(samples[0], samples[1], truth).mean())


def test_the_energy_score_prefers_the_true_distribution() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(width: float, correlation: float = 0.0) -> Tensor:
        z = torch.randn(2, 1, 3, 200, 200, generator=generator)
        shared = torch.randn(2, 1, 1, 200, 200, generator=generator)
        return width * (math.sqrt(1 - correlation) * z + math.sqrt(correlation) * shared)

    truth = drawn(1.0, 0.8)[0]
    best = score_of(drawn(1.0, 0.8), truth)
    for other in (drawn(0.0), drawn(0.5, 0.8), drawn(2.0, 0.8), drawn(1.0, 0.0), drawn(1.0, 0.8) + 0.5):
        assert score_of(other, truth) > best + 0.005


def test_only_samples_are_rewarded_for_varying() -> None:
    truth, away = torch.zeros(3, 3, 8, 8), torch.ones(1, 3, 8, 8)

    def score(
        first: Tensor, second: Tensor, sharp: Tensor
    ) -> float:  # of two pictures: two samples, and a sharp estimate
        return float(scored(1, [torch.cat([first, second, sharp])], [truth[:2]]))

    assert score(away, away, truth[:1]) > 1
    assert abs(score(away, -away, truth[:1])) < 1e-3
    assert score(truth[:1], truth[:1], away) == pytest.approx(3**-0.5, rel=1e-3)
    assert score(truth[:1], truth[:1], -away) == pytest.approx(3**-0.5, rel=1e-3)


def test_the_pyramid_ends_at_one_pixel() -> None:
    assert [level.shape[-1] for level in pyramid(torch.zeros(1, 3, 32, 32))] == [32, 16, 8, 4, 2]
    assert [level.shape[-1] for level in pyramid(torch.zeros(1, 3, 4, 4))] == [4, 2, 1]


@pytest.mark.parametrize("task", ["sr4", "inpaint92", "jpeg10", "gauss", "denoise"])
def test_a_grown_network_begins_as_one_pass(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddc.solvers.posterior.MARGIN", 0)  # which the other network does not have
    network = DataConsistency(tiny_unet(11, seed=5), INPUTS, "blend")
    grown = PosteriorDenoiser.grown(network, CONFIG | {"middle_blocks": 1, "attention_levels": [0]})
    truth = to_internal(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    problem = make_problem(task, 0.05, size=(32, 32))
    y = problem.measure(truth, torch.randn(problem.operator(truth).shape, generator=torch.Generator().manual_seed(1)))
    measured, theta = (problem.operator, y, problem.sigma), torch.full((1, 1, 1, 1), math.pi / 2)
    guess = problem.operator.guess(y, problem.sigma, (32, 32))
    with torch.no_grad():
        before, _ = network.consistent(measured, guess, 1000)
        after, _ = grown(measured, torch.zeros_like(truth), theta)
    # the old one corrects the guess, the new one its projection
    start = guess if task == "jpeg10" else problem.operator.project(guess, y, problem.sigma)
    assert torch.allclose(after - start, before - guess, atol=1e-4)
    assert (before - guess).abs().mean() > 0.01


def test_only_a_network_that_fits_is_grown() -> None:
    with pytest.raises(UserError, match="the residual blend"):
        PosteriorDenoiser.grown(DataConsistency(tiny_unet(11, seed=5), INPUTS, "x0"), CONFIG)
    with pytest.raises(UserError, match="give it the channels"):
        wider = CONFIG | {"channels": [16, 32]}
        PosteriorDenoiser.grown(DataConsistency(tiny_unet(11, seed=5), INPUTS, "blend"), wider)


def test_the_score_falls_and_samples_stay_different(tmp_path: Path) -> None:
    for i in range(8):
        Picture(np.full((24, 24, 3), 20 + 30 * i, np.uint8)).write(tmp_path / f"{i}.png")
    pool = load_pictures(find_sources([tmp_path]), 16, torch.device("cpu"), "off", 1, 0.3)
    torch.manual_seed(0)
    network = PosteriorDenoiser(build_network(CONFIG | {"in_channels": 11}))
    options = {"tasks": "denoise", "sigma_max": 0.15, "crop": 16, "w_features": 0.0}
    levels = {"generator_share": 1.0, "generator": (1.0,), "generator_wide": (2.0,), "sharp_share": 0.5}
    settings = PosteriorSettings(data=(tmp_path,), out=tmp_path / "run", **options, **levels)  # type: ignore[arg-type]
    objective = PosteriorObjective(settings, network, LPIPS("alex"))
    optimiser = torch.optim.AdamW(network.parameters(), 0.005)
    scores = []
    for _ in range(70):  # the same pictures again and again
        terms = objective.losses(network.unet, Draws(pool, 16, seed=0), 8, 0)
        optimiser.zero_grad()
        terms["loss"].backward()
        optimiser.step()
        scores.append(float(terms["pixels"]))
    assert min(scores[-10:]) < 0.85 * scores[0]

    truth = torch.stack([torch.full((3, 16, 16), value) for value in (-0.6, 0.7)])
    problem = make_problem("denoise", 0.1)
    y = problem.measure(truth, Noise([0, 1]).normal(truth.shape))
    runs = (Run(y, problem, None, Noise([seed, seed + 1]), posterior=network) for seed in (100, 200))
    first, second = (Posterior(realism=1.0).solve(run) for run in runs)
    assert (first - second).square().mean().sqrt() > 0.01  # the squared error alone would make them one picture


def test_the_dial_passes_the_sharp_estimate() -> None:
    torch.manual_seed(0)
    unet = build_network(CONFIG | {"in_channels": 11})
    for parameter in unet.parameters():  # some begin as 0, and would hide the mode
        torch.nn.init.normal_(parameter, std=0.2)
    network = PosteriorDenoiser(unet, ([1.0, 0.5], [2.0, 0.5]), sharp=True)
    problem, y = measure("sr2", 0.05, torch.rand(2, 3, 16, 16) * 2 - 1, ["a", "b"])

    def solve(realism: float) -> tuple[Tensor, int]:
        run = Run(y, problem, None, Noise([1, 2]), posterior=network)
        solver = Posterior(realism=realism)
        return solver.solve(run), solver.settled(problem, {"posterior": network}).evaluations()

    made = {realism: solve(realism) for realism in (0.0, 0.25, 0.5, 0.75, 1.0)}
    assert [count for _, count in made.values()] == [1, 3, 3, 3, 3]
    mean, quarter, sharp, much, sample = (picture for picture, _ in made.values())
    different = [(mean, sharp), (sharp, much), (much, sample), (sharp, sample)]
    assert min(float((one - other).abs().max()) for one, other in different) > 0.003
    assert torch.allclose(quarter, (mean + sharp) / 2, atol=1e-6)
    network.temperature = 0.25
    calm, as_before = solve(0.5)[0], solve(1.0)[0]
    assert torch.equal(as_before, sample) and 0 < (calm - mean).abs().mean() < (sharp - mean).abs().mean()
    assert network.in_wide_holes == 0.5  # where the mean, 0, would be a blur
    network.sharp = False
    assert network.in_wide_holes == 1
    assert torch.equal(solve(1.0)[0], sample) and torch.allclose(solve(0.5)[0], (mean + sample) / 2, atol=1e-6)


def test_levels_must_fit(tmp_path: Path) -> None:
    Picture(np.zeros((16, 16, 3), np.uint8)).write(tmp_path / "photos" / "0.png")
    words = (
        f"train posterior --data {tmp_path / 'photos'} --out {tmp_path / 'run'} --generator-share 0.5 --generator 1 0.5"
    )
    assert main([*words.split(), "--generator-wide", "2"]) == 2
    assert main([*words.split(), "--generator-wide", "2", "1", "--sharp-share", "1.5"]) == 2
    assert not (tmp_path / "run").exists()


def test_features_are_scored_and_every_evaluation_is_trained(tmp_path: Path) -> None:
    Picture(np.random.default_rng(0).integers(0, 256, (48, 48, 3), np.uint8)).write(tmp_path / "photos" / "0.png")
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    words = f"train posterior --data {tmp_path / 'photos'} --out {tmp_path / 'run'} --network {tmp_path / 'tiny.json'}"
    words += " --crop 40 --batch-size 2 --precision fp32 --tasks box20,sr2:photo=1 --log-every 1 --pictures-every 0 --steps 2"
    words += f" --generator-share 1 --validation {tmp_path / 'photos'}"
    assert main(words.split()) == 0
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    scores = [entry["features"] for entry in log if "features" in entry]
    assert len(scores) == 2 and all(0 < score < 2 for score in scores)
    assert 0 <= log[-1]["validation/box20@0.05/ratio"] < 10 and log[-1]["validation/sr2@0.05/crps"] > 0


@pytest.mark.parametrize("adversary", [False, True])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path: Path, adversary: bool) -> None:
    side = 40 if adversary else 16  # AlexNet sees no smaller ones
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 256, (side + 8, side + 8, 3), np.uint8)
        Picture(pixels).write(tmp_path / "photos" / f"{i}.png")
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    words = (
        f"train posterior --data {tmp_path / 'photos'} --network {tmp_path / 'tiny.json'} --crop {side} --batch-size 3"
    )
    words += " --precision fp32 --tasks denoise:photo=0.5:blind=0.5,sr2 --pictures-every 0 --schedule constant"
    words += " --generator-share 0.5 --w-features 0 --learning-rate 0.01 --warmup 1"
    words += " --w-adversary 1 --critic-warmup 1 --sharp-share 0.5" if adversary else ""
    for run, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        assert main([*words.split(), "--out", str(tmp_path / run), "--steps", str(steps)]) == 0
    whole, parts = (PosteriorDenoiser.from_pretrained(tmp_path / run / "posterior") for run in ("whole", "parts"))
    states = zip(whole.state_dict().items(), parts.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for (_, ours), theirs in states)
    assert float(whole.unet.exit.weight.abs().max()) > 0  # it begins at zero
    assert whole.sharp == adversary
    if adversary:
        (critic,) = (tmp_path / "whole" / "checkpoints").glob("step-00000004/objective.safetensors")
        settings = PosteriorSettings(
            data=(),
            out=tmp_path,
            generator_share=1.0,
            w_adversary=1.0,
            critic=critic,
            network=str(tmp_path / "tiny.json"),
        )
        begun = PosteriorObjective.from_settings(settings).tensors()
        assert all(torch.equal(value, begun[name]) for name, value in load_file(critic).items())
        moved = Adversary((64, 192, 384, 256, 256), 1e-3)
        moved.read(critic)
        moved.to(torch.device("meta"))
        moments = [moved.optimiser.state[key]["exp_avg"] for key in moved.optimiser.state]
        assert moments and all(moment.device.type == "meta" for moment in moments)  # where the critic learns
        for wrong in (tmp_path / "absent", tmp_path / "tiny.json", tmp_path / "whole" / "posterior" / WEIGHTS):
            with pytest.raises(UserError, match="does not hold a critic"):
                Adversary((64, 192, 384, 256, 256), 1e-3).read(wrong)


def test_a_critic_learns_what_samples_lack() -> None:
    """Its loss then brings a blurred picture nearer to the texture of the photographs."""
    torch.manual_seed(0)
    lpips, adversary = LPIPS("alex"), Adversary((64, 192, 384, 256, 256), 1e-3)

    def seen(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x, lpips.deep_features(x)

    mean = torch.zeros(4, 3, 32, 32)
    for _ in range(15):
        photographs = 0.5 * torch.randn(4, 3, 32, 32)
        verdict = adversary.judge(seen(avg_pool2d(photographs, 5, 1, 2)), seen(photographs), seen(mean))
        adversary.learn(verdict)
    assert verdict.right > 0.9
    sample = (0.02 * torch.randn(4, 3, 32, 32)).requires_grad_()
    optimiser = torch.optim.Adam([sample], 0.02)
    for _ in range(15):
        photographs = 0.5 * torch.randn(4, 3, 32, 32)
        optimiser.zero_grad()
        adversary.judge(seen(sample), seen(photographs), seen(mean)).generator.backward()
        optimiser.step()
    assert sample.std() > 0.1


def test_a_critic_counts_as_its_weights_say() -> None:
    torch.manual_seed(0)
    adversary = Adversary((4,), 1e-3)
    photographs, samples = (torch.randn(2, 3, 32, 32) for _ in range(2))
    features = [torch.randn(2, 4, 8, 8)]
    (gradient,) = torch.autograd.grad(
        adversary.judge(
            (samples.requires_grad_(), features),
            (photographs, features),
            (photographs, features),
            torch.tensor([1.0, 0.0]),
        ).generator,
        samples,
    )
    assert gradient[0].abs().max() > 0 and not gradient[1].any()


def test_the_adversary_has_the_length_that_was_asked_for() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    score, other = x.square().sum(), 100 * (x * torch.arange(5.0)).sum()
    loss = balanced(score, other, x, 0.5)
    assert loss == score
    (gradient,) = torch.autograd.grad(loss, x)
    gradient = gradient - 2 * x  # that of the score
    assert torch.allclose(gradient.norm(), 0.5 * (2 * x).norm())
    assert torch.allclose(
        gradient / gradient.norm(), torch.arange(5.0).expand(3, 5) / torch.arange(5.0).expand(3, 5).norm()
    )
