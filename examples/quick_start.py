"""Quick start: degrade a picture, restore it, and measure the improvement.

python examples/quick_start.py photo.jpg restored.png
"""

import sys
from pathlib import Path

from ddc import Picture, RestorationPipeline
from ddc.images import to_internal, to_unit
from ddc.perceptual import psnr
from ddc.problems import measure


def main(source: str, target: str, model: str | None = None) -> float:
    """Restore a noisy version of the picture, and return the gain in dB."""
    clean = Picture.read(source)
    x = to_internal(clean.tensor)[None]  # (1, 3, H, W) in [-1, 1]
    _, y = measure("denoise", 0.1, x, [Path(source).name])
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
