"""Quick start: degrade a picture, restore it, and measure what was won.

python examples/quick_start.py photo.jpg restored.png
"""

import sys
from pathlib import Path

from ddc.evaluation.metrics import psnr
from ddc.images import Picture, to_internal, to_unit
from ddc.noise import Noise
from ddc.pipeline import RestorationPipeline
from ddc.problems import make_problem


def main(source: str, target: str, model: str | None = None) -> float:
    """Restore a noisy version of the picture, and return by how many dB it became better."""
    clean = Picture.read(source)
    problem = make_problem("denoise", sigma_y=0.1)
    x = to_internal(clean.tensor)[None]  # (1, 3, H, W) in [-1, 1]
    y = problem.measure(x, Noise(seeds=[0]).normal(x.shape))
    noisy = to_unit(y)

    pipe = RestorationPipeline.from_pretrained(model).to("auto")
    result = pipe(noisy[0], task="denoise", sigma=0.1, seed=0)
    result.picture.write(target)

    truth = clean.tensor[None]
    before, after = float(psnr(noisy, truth)), float(psnr(result.picture.tensor[None], truth))
    print(f"{Path(source).name}: {before:.1f} dB noisy, {after:.1f} dB restored in {result.seconds:.1f} s")
    return after - before


if __name__ == "__main__":
    main(*sys.argv[1:])
