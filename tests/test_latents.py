"""Latent priors: folders of diffusers, what they compute, and what the pipeline makes of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, UNet2DModel, VQModel
from safetensors.torch import load_file, save_file

from ddc.cli import main
from ddc.errors import UserError
from ddc.images import Picture
from ddc.latents import Autoencoder, LatentPrior
from ddc.networks import PRESETS, WEIGHTS, build_network
from ddc.noise import Noise
from ddc.pipeline import RestorationPipeline, default_solver
from ddc.priors import Prior
from tiny import TINY_VAE, small_diffusers, tiny_latent_prior

X = torch.linspace(-1, 1, 2 * 3 * 40 * 32).view(2, 3, 40, 32)


def vae(kind: str) -> Any:
    torch.manual_seed(3)
    options = TINY_VAE | {"scaling_factor": 0.3}
    if kind == "VQModel":
        return VQModel(**options, latent_channels=3, num_vq_embeddings=64).eval()
    return AutoencoderKL(**options, latent_channels=4, shift_factor=0.2).eval()


def write(folder: Path, kind: str = "AutoencoderKL", name: str = "vae", **scheduler: Any) -> Path:
    """A folder as diffusers writes it."""
    autoencoder = vae(kind)
    channels = autoencoder.config["latent_channels"]
    autoencoder.save_pretrained(folder / name)
    small_diffusers(in_channels=channels, out_channels=channels).save_pretrained(folder / "unet")
    DDIMScheduler(set_alpha_to_one=True, **({"clip_sample": False} | scheduler)).save_pretrained(folder / "scheduler")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("latent"), prediction_type="v_prediction")


@pytest.mark.parametrize(("kind", "name"), [("AutoencoderKL", "vae"), ("VQModel", "vae"), ("VQModel", "vqvae")])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@torch.no_grad()
def test_everything_is_that_of_diffusers(kind: str, name: str, prediction_type: str, tmp_path: Path) -> None:
    """Latents, x̂0 and pictures, computed with the classes of diffusers and by its conventions."""
    prior = LatentPrior.from_pretrained(write(tmp_path, kind, name, prediction_type=prediction_type))
    theirs, unet = vae(kind), UNet2DModel.from_pretrained(tmp_path / "unet").eval()
    scheduler = DDIMScheduler.from_pretrained(tmp_path / "scheduler")
    scheduler.set_timesteps(1000)
    found, config = theirs.encode(X), theirs.config
    latents = found.latents if kind == "VQModel" else found.latent_dist.mean
    expected = (latents - (config.get("shift_factor") or 0)) * config["scaling_factor"]
    z = prior.encode(X)
    assert z.shape == (2, prior.channels, 5, 4) and prior.factor == 8
    assert torch.allclose(z, expected, atol=1e-5)
    noisy = Noise([1, 2]).normal(z.shape)[..., :4]  # of a size that the U-Net takes without padding
    noisy = noisy[..., :4, :]
    for t in (0, 400, 999):
        x0 = scheduler.step(unet(noisy, t).sample, t, noisy).pred_original_sample
        ours = prior.predict(noisy, t).x0
        assert torch.allclose(ours, x0, rtol=1e-5, atol=1e-5 * float(x0.abs().max()))
        picture = theirs.decode(x0 / config["scaling_factor"] + (config.get("shift_factor") or 0)).sample
        assert torch.allclose(prior.decode(x0), picture, atol=1e-5 * max(1.0, float(picture.abs().max())))


def test_diffusers_reads_what_is_written(tmp_path: Path) -> None:
    prior = tiny_latent_prior()
    prior.save_pretrained(tmp_path)
    theirs = AutoencoderKL.from_pretrained(tmp_path / "vae").eval()
    unet = UNet2DModel.from_pretrained(tmp_path / "unet").eval()
    scheduler = DDPMScheduler.from_pretrained(tmp_path / "scheduler")
    assert scheduler.config["prediction_type"] == "v_prediction"
    again = LatentPrior.from_pretrained(tmp_path)
    z = prior.encode(X)
    with torch.no_grad():
        assert torch.equal(again.encode(X), z)
        assert torch.allclose((theirs.encode(X).latent_dist.mean - 0.1) * 0.7, z, atol=1e-6)
        assert torch.equal(again.predict(z, 300).x0, prior.predict(z, 300).x0)
        assert unet(z[..., :4, :], 300).sample.shape == (2, 4, 4, 4)


@pytest.mark.parametrize("size", [(40, 32), (41, 30), (9, 70), (3, 5)])
@torch.no_grad()
def test_any_size(size: tuple[int, int]) -> None:
    prior = tiny_latent_prior()
    x = X.repeat(1, 1, 2, 3)[..., : size[0], : size[1]]
    z = prior.encode(x)
    assert z.shape[-2:] == (-(-size[0] // 8), -(-size[1] // 8))
    assert prior.predict(z, 500).x0.shape == z.shape
    assert prior.decode(z, size).shape == x.shape


def test_the_decoder_can_be_differentiated(folder: Path) -> None:
    prior = LatentPrior.from_pretrained(folder)
    z = prior.encode(X).requires_grad_()
    (gradient,) = torch.autograd.grad(prior.decode(z).square().sum(), z)
    assert bool(gradient.isfinite().all()) and float(gradient.abs().max()) > 0


def test_half_precision_files_and_old_names(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "old")
    path = copied / "vae" / f"{WEIGHTS}.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for name, tensor in load_file(path).items():
        for new, was in old.items():
            name = name.replace(f".attentions.0.{new}.", f".attentions.0.{was}.")
        renamed[name] = tensor
    assert sum("query" in name for name in renamed) == 4
    path.unlink()
    save_file(renamed, copied / "vae" / f"{WEIGHTS}.fp16.safetensors")
    ours, theirs = LatentPrior.from_pretrained(copied), LatentPrior.from_pretrained(folder)
    assert torch.equal(ours.encode(X), theirs.encode(X))


# ---------------------------------------------------------------------------------------------------------
# the pipeline


def test_the_pipeline_knows_a_latent_prior(folder: Path, tmp_path: Path) -> None:
    for model in (folder, shutil.copytree(folder, tmp_path / "model" / "prior").parent):
        pipe = RestorationPipeline.from_pretrained(model).to("cpu")
        assert pipe.latent and pipe.solver == default_solver(model) == "resample"
    picture = X[0].add(1).div(2)
    results = pipe(
        [picture, picture.flip(-1)], "denoise", sigma=0.05, solver="resample:steps=6:every=2:iterations=2", batch=2
    )
    assert [result.size for result in results.pictures] == [(40, 32)] * 2
    alone = pipe(picture, "denoise", sigma=0.05, solver="resample:steps=6:every=2:iterations=2")
    assert torch.allclose(alone.picture.tensor, results.pictures[0].tensor, atol=2e-3)
    assert results.evaluations == 12 and alone.notes == [[]]


def test_pictures_larger_than_a_tile(folder: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(folder)
    made = pipe(torch.rand(3, 40, 70, generator=torch.Generator().manual_seed(0)), "sr2", solver="hgu:steps=2", tile=64)
    assert made.picture.size == (80, 140) and made.evaluations > 4


@pytest.mark.parametrize("solver", ["ddc", "one-pass", "dps", "ddnm", "mcg", "unconditional"])
def test_other_solvers_are_refused(solver: str, folder: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(folder)
    with pytest.raises(UserError, match=r"needs a prior of pictures, .* one of latents; use resample or psld"):
        pipe(X[0].add(1).div(2), "denoise", sigma=0.1, solver=solver)
    assert pipe(X[0].add(1).div(2), "denoise", sigma=0.1, solver="pinv").picture.size == (40, 32)  # needs none


@pytest.mark.parametrize("solver", ["psld", "resample", "hgu", "autoencoder"])
def test_latent_solvers_are_refused_by_a_prior_of_pictures(solver: str, tiny_model: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    with pytest.raises(UserError, match=rf"{solver} needs a latent prior .*vae/.*--model"):
        pipe(X[0].add(1).div(2), "denoise", sigma=0.1, solver=solver)
    with pytest.raises(UserError, match="latent prior"):
        RestorationPipeline.from_pretrained()(
            X[0].add(1).div(2), "denoise", sigma=0.1, solver=solver
        )  # nothing is read for that


def edit(folder: Path, part: str, **changes: Any) -> None:
    path = folder / part / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vae", {"_class_name": "AsymmetricAutoencoderKL"}, "expected AutoencoderKL or VQModel"),
        ("vae", {"scaling_factor": 0}, "scaling_factor of an autoencoder is 0"),
        ("vae", {"shift_factor": "a"}, "shift_factor of an autoencoder is a"),
        ("vae", {"in_channels": 1}, "1 input and 3 output channels"),
        ("vae", {"latent_channels": 10**9}, "latent_channels of a network"),
        ("vae", {"down_block_types": ["Nonsense"] * 4}, "cannot be built"),
        ("vae", {"block_out_channels": [8, 8, 8, 8]}, "do not fit its architecture"),
        ("unet", {"_class_name": "UNet2DConditionModel"}, "is not known; expected CompactUNet, UNet2DModel"),
    ],
)
def test_folders_that_do_not_fit(
    part: str, changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied")
    edit(copied, part, **changes)
    with pytest.raises(UserError, match=message) as refused:
        RestorationPipeline.from_pretrained(copied)
    assert "\n" not in str(refused.value)


def test_more_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no vae/ in it"):
        LatentPrior.from_pretrained(folder / "vae")
    for part in (folder, folder / "unet"):  # with three channels it would pass for a prior of pictures
        with pytest.raises(UserError, match="is a latent prior"):
            Prior.from_pretrained(part)
    assert RestorationPipeline.from_pretrained(folder / "unet").latent
    with pytest.raises(UserError, match="leave --network out"):
        RestorationPipeline.from_pretrained(folder, network=folder)
    copied = shutil.copytree(folder, tmp_path / "copied")
    shutil.rmtree(copied / "unet")
    small_diffusers(in_channels=5, out_channels=5).save_pretrained(copied / "unet")
    with pytest.raises(UserError, match="5 input and 5 output channels; expected the 4"):
        LatentPrior.from_pretrained(copied)


def test_damaged_weights(folder: Path, tmp_path: Path) -> None:
    weights = Path("vae") / f"{WEIGHTS}.safetensors"
    for number, (damage, message) in enumerate(
        [
            (lambda path: path.write_bytes(path.read_bytes()[:5000]), "is not a good safetensors file"),
            (lambda path: save_file({k: v * torch.nan for k, v in load_file(path).items()}, path), "NaN or infinity"),
            (lambda path: path.unlink(), "has no weights"),
        ]
    ):
        copied = shutil.copytree(folder, tmp_path / str(number))
        damage(copied / weights)
        with pytest.raises(UserError, match=message) as refused:
            RestorationPipeline.from_pretrained(copied)
        assert "\n" not in str(refused.value)


def test_info_and_restore_on_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(folder), "--json", "--size", "64"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["autoencoder"]["factor"] == 8 and model["prior"]["channels in"] == 4
    assert main(["info", str(folder / "vae"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["autoencoder"]["class"] == "AutoencoderKL"
    Picture((X[0].permute(1, 2, 0).numpy() + 1) / 2, bits=32).write(tmp_path / "in.png")
    words = f"restore {tmp_path / 'in.png'} -o {tmp_path / 'out.png'} --model {folder} --task inpaint92"
    words = words.replace("--task inpaint92", "--task denoise --sigma 0.1 --solver psld:steps=3")
    assert main(words.split()) == 0 and Picture.read(tmp_path / "out.png").size == (40, 32)
    assert main(["bench", str(folder)]) == 2
    assert "latent prior" in capsys.readouterr().err


def test_presets_are_small() -> None:
    with torch.device("meta"):
        for config in PRESETS["autoencoder"].values():
            autoencoder = Autoencoder.from_config(config)
            assert sum(p.numel() for p in autoencoder.parameters()) <= 15e6 and autoencoder.factor == 8
        for config in PRESETS["latent"].values():
            channels = {"in_channels": autoencoder.channels, "out_channels": autoencoder.channels}
            assert sum(p.numel() for p in build_network(config | channels).parameters()) <= 25e6
