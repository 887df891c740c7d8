"""Draw the sheet of the model card: scikit-image's photographs, degraded and restored, enlarged twice with more contrast.

python scripts/sheet.py docs/assets/sheet.webp [MODEL]
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFont
from skimage import data
from torch import Tensor

from ddc import RestorationPipeline
from ddc.images import quantise, to_internal, to_unit
from ddc.problems import image_seeds, measure
from ddc.solvers.base import make_solver

# a photograph, and the first row and column of the 256×256 pixels that are restored
CROPS = (
    *(("astronaut", 0, 100), ("chelsea", 30, 90), ("coffee", 40, 200)),
    *(("rocket", 120, 190), ("astronaut", 250, 200), ("rocket", 10, 300)),
)
SETTINGS = (
    *(("sr4", 0.0), ("sr4", 0.05), ("sr8", 0.0), ("sr8", 0.05), ("gauss", 0.05), ("inpaint92", 0.0)),
    *(("jpeg10", 0.0), ("denoise", 0.1), ("box96", 0.0), ("strokes", 0.0)),
)
SIDE, SHOWN, LABEL = 256, 120, 22  # of a crop, of its middle, and the height of a label
CONTRAST = 1.4


def load(name: str, top: int, left: int) -> Tensor:
    pixels = np.ascontiguousarray(getattr(data, name)()[top : top + SIDE, left : left + SIDE])
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255


def middle(x: Tensor) -> Image.Image:
    start = (SIDE - SHOWN) // 2
    part = x[0, :, start : start + SHOWN, start : start + SHOWN].clamp(0, 1)
    image = Image.fromarray(quantise(part.permute(1, 2, 0).numpy(), 8))
    return ImageEnhance.Contrast(image.resize((2 * SHOWN, 2 * SHOWN), Image.Resampling.LANCZOS)).enhance(CONTRAST)


@torch.no_grad()
def main(out: Path, model: str | None = None) -> None:
    pipe = RestorationPipeline.from_pretrained(model).to("auto")
    solver = make_solver(pipe.solver)
    crops = [load(*crop) for crop in CROPS]
    rows = {"the photographs": crops}
    for task, sigma in SETTINGS:
        rows[f"{task}, sigma {sigma:g}"] = restored = []
        for i, x in enumerate(crops):
            problem, y = measure(task, sigma, to_internal(x.to(pipe.device)), [str(i)])
            seeds = image_seeds(0, "solve", [str(i)])
            restored.append(to_unit(pipe.solve(y, problem, solver, seeds, size=(SIDE, SIDE))).cpu())
    height = 2 * SHOWN + LABEL
    sheet = Image.new("RGB", (2 * SHOWN * len(crops), height * len(rows)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (label, pictures) in enumerate(rows.items()):
        draw.text((4, number * height + 4), label, fill="black", font=ImageFont.load_default(14))
        for i, x in enumerate(pictures):
            sheet.paste(middle(x), (2 * SHOWN * i, number * height + LABEL))
    sheet.save(out, quality=78)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
