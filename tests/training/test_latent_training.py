"""Training an autoencoder and a prior of its latents: losses, scale of the latents, folders, refusals."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from training_parts import QUICK, latent_words, quick_arguments

from ddc.cli import main
from ddc.datasets import Pool, find_sources
from ddc.latents import Autoencoder, LatentPrior
from ddc.perceptual import LPIPS
from ddc.pipeline import RestorationPipeline
from ddc.priors import Prior
from ddc.training.data import Draws
from ddc.training.latent import AutoencoderObjective, LatentObjective
from ddc.training.objectives import PriorObjective
from ddc.training.settings import AutoencoderSettings, LatentSettings, PriorSettings
from tiny import TINY_VAE, small_diffusers, tiny_latent_prior


@pytest.fixture
def draws(pictures: Path) -> Draws:
    return Draws(Pool(find_sources([pictures]), 32), 32, seed=2)


def tiny_autoencoder() -> Autoencoder:
    torch.manual_seed(5)
    return Autoencoder.from_config({"_class_name": "AutoencoderKL", "latent_channels": 4, **TINY_VAE})


def autoencoder_objective(pictures: Path, lpips: LPIPS | None = None) -> AutoencoderObjective:
    return AutoencoderObjective(AutoencoderSettings(data=(pictures,), out=pictures, **QUICK), tiny_autoencoder(), lpips)


def test_the_loss_of_an_autoencoder(pictures: Path, draws: Draws) -> None:
    objective = autoencoder_objective(pictures, LPIPS("alex"))
    with torch.no_grad():
        terms = {name: float(value) for name, value in objective.losses(objective.module, draws, 3, 0).items()}
        crops = draws.crops([0, 1, 2])
        found = objective.autoencoder.vae.encode(crops).latent_dist  # as diffusers has it
        noise = draws.noise([0, 1, 2], found.mean.shape)
        decoded = objective.autoencoder.vae.decode(found.mean + found.std * noise).sample
    settings = objective.settings
    assert terms["absolute"] == pytest.approx(float((decoded - crops).abs().mean()), rel=1e-5)
    assert terms["kl"] == pytest.approx(float(found.kl().mean()) / found.mean[0].numel(), rel=1e-4)
    parts = terms["absolute"] + settings.w_kl * terms["kl"] + settings.w_lpips * terms["lpips"]
    assert terms["loss"] == pytest.approx(parts, rel=1e-5)


def test_the_latents_are_scaled_to_unit_variance(pictures: Path, draws: Draws, tmp_path: Path) -> None:
    objective = autoencoder_objective(pictures)
    with torch.no_grad():
        for step in range(8):
            objective.losses(objective.module, draws, 6, step)
    objective.model.save_pretrained(tmp_path, extra_config=objective.remarks())
    z = Autoencoder.from_pretrained(tmp_path).encode(draws.crops(range(48)))
    assert abs(float(z.mean())) < 0.02 and float(z.std()) == pytest.approx(1, abs=0.02)


def test_the_loss_of_a_latent_prior_is_that_of_a_prior_on_latents(pictures: Path, draws: Draws) -> None:
    prior = tiny_latent_prior()
    common = {"data": (pictures,), "out": pictures, **QUICK}
    ours = LatentObjective(LatentSettings(autoencoder=Path(), **common), prior)
    plain = PriorObjective(PriorSettings(**common), prior)
    latents = prior.encode(draws.crops([0, 1, 2])).float()
    plain.take = lambda draws, batch: (latents, [0, 1, 2])  # type: ignore[method-assign]
    with torch.no_grad():
        assert ours.losses(ours.module, draws, 3, 0)["loss"] == plain.losses(plain.module, draws, 3, 0)["loss"]


def test_an_encoded_picture_can_have_several_times_and_noises(pictures: Path, draws: Draws) -> None:
    prior = tiny_latent_prior()
    settings = LatentSettings(autoencoder=Path(), data=(pictures,), out=pictures, draws_per_picture=2, **QUICK)
    latents, numbers = LatentObjective(settings, prior).take(draws, 5)
    assert numbers == [0, 1, 2, 3, 4] and draws.position == 5
    expected = prior.encode(draws.crops([0, 2, 4])).float()
    assert torch.allclose(latents, expected[[0, 0, 1, 1, 2]], atol=1e-6)
    assert not torch.equal(latents[0], latents[2])


def test_autoencoder_then_prior_then_restore(pictures: Path, tmp_path: Path) -> None:
    first, second, model = tmp_path / "first", tmp_path / "second", tmp_path / "model"
    words = quick_arguments(pictures, first, steps=30, holdout=2, **{"pictures-every": 30, "export-dtype": "fp32"})
    assert main(["train", "autoencoder", *words, *latent_words("autoencoder", tmp_path)]) == 0
    lines = [json.loads(line) for line in (first / "log.jsonl").read_text().splitlines()]
    losses = [line["absolute"] for line in lines if "absolute" in line]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert "validation/reconstruction/psnr" in lines[-1] and "validation/reconstruction/lpips" in lines[-1]
    assert [*(first / "pictures").glob("*.png")]
    config = json.loads((first / "vae" / "config.json").read_text())
    assert config["_class_name"] == "AutoencoderKL" and 0 < config["scaling_factor"] < math.inf

    words = quick_arguments(pictures, second, steps=3, holdout=2, **{"pictures-every": 3})
    unet = latent_words("latent", tmp_path)[:2]
    assert main(["train", "latent", *words, *unet, "--autoencoder", str(first / "vae")]) == 0
    log = json.loads((second / "log.jsonl").read_text().splitlines()[-1])
    assert {"validation/psnr_t200", "validation/autoencoder/lpips"} <= log.keys()
    assert main(["export", str(second), str(model), "--dtype", "fp32"]) == 0
    written, exported = LatentPrior.from_pretrained(second / "model"), LatentPrior.from_pretrained(model)
    assert exported.prediction_type == "v_prediction" and exported.channels == 4
    assert exported.autoencoder.scale == written.autoencoder.scale == config["scaling_factor"]
    for name, tensor in written.state_dict().items():
        assert torch.allclose(tensor, exported.state_dict()[name], atol=1e-3), name
    pipe = RestorationPipeline.from_pretrained(model)
    restored = pipe(torch.rand(3, 32, 32), "sr2", solver="resample:steps=4:every=1:iterations=2")
    assert pipe.solver == "resample" and restored.picture.size == (64, 64)
    # an exported autoencoder, and a start from what was trained
    assert main(["export", str(first), str(tmp_path / "vae2")]) == 0
    assert Autoencoder.from_pretrained(tmp_path / "vae2").scale == config["scaling_factor"]
    begun = ["--autoencoder", str(first / "vae"), "--init", str(model)]
    assert main(["train", "latent", *quick_arguments(pictures, tmp_path / "third", steps=1), *begun]) == 0


def test_what_cannot_be_trained(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(kind: str, *extra: str, **options: object) -> str:
        words = quick_arguments(pictures, tmp_path / "out", **options)
        assert main(["train", kind, *words, *latent_words(kind, tmp_path), *extra]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and not (tmp_path / "out").exists()
        return lines[0]

    assert "expected a multiple of 8" in refusal("autoencoder", crop=36)
    assert "--draws-per-picture" in refusal("latent", "--draws-per-picture", "0")
    assert "expected a multiple of 16" in refusal("latent", crop=40)
    other = tmp_path / "vq.json"
    other.write_text(json.dumps({"_class_name": "VQModel", "latent_channels": 4, **TINY_VAE}))
    assert "only an AutoencoderKL" in refusal("autoencoder", "--network", str(other))
    assert "neither a preset (kl-f8)" in refusal("autoencoder", "--network", "kl-f16")
    prior = tmp_path / "prior"
    small = small_diffusers(in_channels=3)
    Prior(small, tiny_latent_prior().schedule).save_pretrained(prior)
    assert "has no vae/ in it" in refusal("latent", "--init", str(prior))
