"""The speed of training, for `ddc bench --training`."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ddc.cuda import write_out_norms
from ddc.fast import prepare_compiler
from ddc.images import Picture
from ddc.perceptual import LPIPS
from ddc.priors import DataConsistency, Prior
from ddc.training.ddc import DDCObjective
from ddc.training.loop import train
from ddc.training.settings import DDCSettings

STEPS = 8  # before the measurement starts, and measured


def training_speed(prior: Prior, network: DataConsistency, batch: int, size: int, compile: bool) -> float:
    """Pictures per second of `ddc train ddc` with random pictures. The networks are changed."""
    if compile:
        prepare_compiler()
        write_out_norms(prior.unet).compile(dynamic=False)
    with TemporaryDirectory() as folder:
        pictures = Path(folder) / "pictures"
        pictures.mkdir()
        for i in range(64):
            pixels = np.random.default_rng(i).integers(0, 256, (size, size, 3), np.uint8)
            Picture(pixels).write(pictures / f"{i}.bmp")
        settings = DDCSettings(
            prior=Path(),  # given below
            data=(pictures,),
            out=Path(folder) / "run",
            steps=2 * STEPS,
            batch_size=batch,
            crop=size,
            compile=compile,
            log_every=STEPS,
            pictures_every=0,
            checkpoints=False,
        )
        objective = DDCObjective(settings, network, prior, LPIPS("alex"))
        return float(train(objective, report=lambda text: None).history[-1]["images_per_second"])
