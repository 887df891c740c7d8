"""What the tests of training share: tiny networks of the real classes, pictures, and settings that run quickly."""

import json
from pathlib import Path
from typing import Any

import torch

from ddc.networks import CompactUNet, network_config
from ddc.priors import DataConsistency, Prior, schedule_from_config, scheduler_config
from ddc.training.data import Mixes, TaskMix, parse_tasks
from ddc.training.ddc import DDCObjective
from ddc.training.objectives import PriorObjective
from ddc.training.settings import DDCSettings, PriorSettings
from tiny import TINY_VAE, small_diffusers, tiny_latent_prior

TINY: dict[str, Any] = {
    "channels": (8, 16),
    "encoder_blocks": (1, 1),
    "decoder_blocks": (1,),
    "groups": 4,
    "head_dim": 8,
}
INPUTS = ("estimate", "projection", "mask", "sigma")
MIX = "sr4,gauss,gauss1.5,inpaint92,jpeg10,jpeg30,denoise,motion5-9,box8-16,strokes"


def tiny(in_channels: int = 3, out_channels: int = 3, seed: int = 0) -> CompactUNet:
    torch.manual_seed(seed)
    return CompactUNet(in_channels, out_channels, **TINY)


def tiny_prior(seed: int = 0, **options: Any) -> Prior:
    config = scheduler_config(prediction_type="v_prediction", **options)
    unet = tiny(seed=seed).eval().requires_grad_(False)
    return Prior(unet, schedule_from_config(config), "v_prediction", scheduler_config=config)


def tiny_network(seed: int = 1) -> DataConsistency:
    return DataConsistency(tiny(3 + 8, seed=seed), INPUTS, "blend")


QUICK: dict[str, Any] = {
    "steps": 4,
    "batch_size": 4,
    "crop": 32,
    "warmup": 2,
    "learning_rate": 1e-3,
    "log_every": 1,
    "pictures_every": 0,
}
NOWHERE = Path("nowhere")


def tiny_objective(pictures: Path = NOWHERE, out: Path = NOWHERE, **options: Any) -> DDCObjective:
    lpips, features = options.pop("lpips", None), options.pop("features", None)
    options = QUICK | {"tasks": MIX, "prior": NOWHERE, "noiseless_share": 0.3} | options
    settings = DDCSettings(data=(pictures,), out=out, **options)
    objective = DDCObjective(settings, tiny_network(), tiny_prior(), lpips, features)
    mix = TaskMix(parse_tasks(settings.tasks), 0.05, settings.noiseless_share, 0.5)
    objective.mixes = Mixes((mix,))
    return objective


def tiny_prior_objective(pictures: Path = NOWHERE, out: Path = NOWHERE, **options: Any) -> PriorObjective:
    return PriorObjective(PriorSettings(data=(pictures,), out=out, **(QUICK | options)), tiny_prior())


def quick_arguments(pictures: Path, out: Path, **options: Any) -> list[str]:
    """The same as words of a command line."""
    words = ["--data", str(pictures), "--out", str(out)]
    quick = {name.replace("_", "-"): value for name, value in QUICK.items()}
    for name, value in (quick | options).items():
        words += [f"--{name}", str(value)]
    return words


def write_config(path: Path, **extra: Any) -> Path:
    path.write_text(json.dumps({"_class_name": "CompactUNet", "out_channels": 3, **TINY, **extra}))
    return path


def latent_words(kind: str, folder: Path) -> list[str]:
    """What else the command line needs to train a tiny autoencoder or a tiny latent prior."""
    if kind == "autoencoder":
        path = folder / "autoencoder.json"
        path.write_text(json.dumps({"_class_name": "AutoencoderKL", "latent_channels": 4, **TINY_VAE}))
        return ["--network", str(path)]
    if not (folder / "vae").exists():
        tiny_latent_prior().autoencoder.save_pretrained(folder / "vae")
    path = folder / "unet.json"
    path.write_text(json.dumps(network_config(small_diffusers())))
    return ["--network", str(path), "--autoencoder", str(folder / "vae")]
