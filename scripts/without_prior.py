"""What the prior's x̂0 is worth to the network that ships: PSNR and LPIPS as it is, and with x̂0 = 0 in every step.

python scripts/without_prior.py IMAGES [N]: N pictures (12) of a folder or archive, evenly over their names.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ddc.evaluation.benchmark import load_images
from ddc.images import to_internal
from ddc.noise import Noise, derive_seed
from ddc.perceptual import LPIPS
from ddc.pipeline import RestorationPipeline
from ddc.priors import Denoiser, Prediction
from ddc.problems import measure_named
from ddc.schedule import Schedule, Time
from ddc.solvers.ddc import DDC
from ddc.training.objectives import figures_of


@dataclass
class Blind:
    """A prior whose x̂0 nobody is told."""

    prior: Denoiser
    schedule: Schedule

    def predict(self, x: Tensor, t: Time) -> Prediction:
        prediction = self.prior.predict(x, t)
        return replace(prediction, x0=torch.zeros_like(prediction.x0))


@torch.no_grad()
def main(images: Path, count: int, size: int = 256) -> None:
    pipe = RestorationPipeline.from_pretrained().to("cpu", fast=True)
    blind, lpips = Blind(pipe.prior, pipe.prior.schedule), LPIPS("alex")
    chosen = load_images(images, size, count)
    for task in ("sr4", "inpaint92"):
        for name, prior in (("as it is", pipe.prior), ("with x̂0 = 0", blind)):
            figures: dict[str, list[float]] = {}
            for image in chosen:
                truth = to_internal(image.pixels[None].float() / 255)
                problem, y = measure_named(task, 0.0, truth, [image.name])
                noise = Noise([derive_seed(1, image.name)])
                x = DDC().solve(y, problem, prior, noise, network=pipe.network)
                for key, values in figures_of(task, x.clamp(-1, 1), truth, lpips).items():
                    figures.setdefault(key, []).extend(values)
            psnr, distance = (sum(values) / len(values) for values in figures.values())
            print(f"{task} {name}: {psnr:.2f} dB, LPIPS {distance:.3f} ({len(chosen)} pictures)", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12)
