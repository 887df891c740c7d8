"""How much the shipped network needs the prior's x̂0: PSNR and LPIPS as it is, and with x̂0 = 0 in every step.

python scripts/without_prior.py IMAGES [N]: N pictures (12) of a folder or archive, evenly over their names.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ddc.datasets import load_images
from ddc.images import to_internal, to_unit
from ddc.noise import derive_seed
from ddc.perceptual import LPIPS, psnr
from ddc.pipeline import RestorationPipeline
from ddc.priors import Denoiser, Prediction, Schedule, Time
from ddc.problems import measure
from ddc.solvers.ddc import DDC


@dataclass
class Blind:
    """A prior whose x̂0 is hidden."""

    prior: Denoiser
    schedule: Schedule

    def predict(self, x: Tensor, t: Time) -> Prediction:
        prediction = self.prior.predict(x, t)
        return replace(prediction, x0=torch.zeros_like(prediction.x0))


@torch.no_grad()
def main(images: Path, count: int, size: int = 256) -> None:
    pipe, lpips = RestorationPipeline.from_pretrained().to("cpu"), LPIPS("alex")
    priors = {"as it is": pipe.prior, "with x̂0 = 0": Blind(pipe.prior, pipe.prior.schedule)}
    chosen = load_images(images, size, count)
    for task in ("sr4", "inpaint92"):
        for name, prior in priors.items():
            pipe.prior = prior  # type: ignore[assignment]
            found = []
            for image in chosen:
                truth = to_internal(image.pixels[None].float() / 255)
                problem, y = measure(task, 0.0, truth, [image.name])
                x = pipe.solve(y, problem, DDC(), [derive_seed(1, image.name)]).clamp(-1, 1)
                found.append((float(psnr(to_unit(x), to_unit(truth))), float(lpips(x, truth))))
            quality, distance = (sum(column) / len(found) for column in zip(*found, strict=True))
            print(f"{task} {name}: {quality:.2f} dB, LPIPS {distance:.3f} ({len(found)} pictures)", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12)
