"""Fit the width of a posterior network's intervals, so that 90 % of the pixels of other pictures lie in them.

python scripts/calibrate.py MODEL IMAGES [N]: N pictures (40) of a folder or archive, evenly over their names, with the
paper's nine settings and jpeg30. Prints the factor that each needs, and writes that of the linear ones (doubt) and that of JPEG (doubt_jpeg)
into MODEL/posterior/config.json.
"""

import json
import sys
from pathlib import Path

import torch

from ddc.datasets import load_images
from ddc.images import to_internal, to_unit
from ddc.perceptual import interval
from ddc.pipeline import DOUBT_SAMPLES, RestorationPipeline
from ddc.problems import image_seeds, measure
from ddc.solvers.posterior import Posterior

SETTINGS = [(task, sigma) for sigma in (0.0, 0.05) for task in ("sr4", "sr8", "gauss", "inpaint92")] + [
    ("jpeg10", 0.0),
    ("jpeg30", 0.0),
]
PER_PICTURE = 4096  # pixels that count, at random places


@torch.no_grad()
def main(model: Path, images: Path, count: int, size: int = 256) -> dict[str, float]:
    pipe = RestorationPipeline.from_pretrained(model).to("auto")
    ratios: list[torch.Tensor] = []  # distance from the middle of the interval, over half its width
    for task, sigma in SETTINGS:
        own = []
        for image in load_images(images, size, count):
            truth = image.pixels[None].float().to(pipe.device) / 255
            problem, y = measure(task, sigma, to_internal(truth), [image.name])
            y = y.expand(DOUBT_SAMPLES, -1, -1, -1)
            seeds = [seed for k in range(DOUBT_SAMPLES) for seed in image_seeds(k, "calibrate", [image.name])]
            samples = to_unit(pipe.solve(y, problem, Posterior(realism=1.0), seeds, size=(size, size)))
            low, high = interval(samples)
            ratio = ((truth[0] - (low + high) / 2) / ((high - low) / 2)).abs().flatten().cpu()
            own.append(ratio[torch.randint(len(ratio), (PER_PICTURE,), generator=torch.Generator().manual_seed(0))])
        ratios.append(torch.cat(own))
        print(f"{task} {sigma:g}: {float(ratios[-1].quantile(0.9)):.3f}", flush=True)
    jpeg = [task.startswith("jpeg") for task, _ in SETTINGS]
    factors = {
        "doubt": fitted([found for found, is_jpeg in zip(ratios, jpeg, strict=True) if not is_jpeg]),
        "doubt_jpeg": fitted([found for found, is_jpeg in zip(ratios, jpeg, strict=True) if is_jpeg]),
    }
    path = model / "posterior" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | factors, indent=2) + "\n")
    print(f"{factors} (written to {path})")
    return factors


def fitted(ratios: list[torch.Tensor]) -> float:
    """The factor with which 90 % of all lie within their interval."""
    return round(float(torch.cat(ratios)[:: len(ratios)].quantile(0.9)), 3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 40)
