"""Fills holes with `ddc` and with another network, and compares both. The pictures are for measuring only.

    python scripts/holes.py fill IMAGES FOLDER [--by ddc mi-gan] [--task box96 strokes] [--limit 500]
    python scripts/holes.py score IMAGES FOLDER [--by …] [--task …] [--limit 500]
    python scripts/holes.py sheet IMAGES FOLDER [--by …] [--task …] [--limit 12]

`fill` writes FOLDER/TASK/WHO/NAME.png, and passes over those that are there. Pictures, masks and seeds are those of
`ddc evaluate --task TASK --sigma 0 --seed 0 --limit N`; ddc uses its default solver. Known pixels are pasted back.
`score` measures what was written: PSNR, FID to the true pictures of the same names, and LPIPS-VGG16 and DISTS, of --judged
pictures. FID depends on the number of pictures, so that only figures of equal numbers may be compared. `sheet` shows holes, truth and fillings at twice
their size. `opponents.py` says how to install the other network.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opponents import INPAINTERS
from PIL import Image
from torch import Tensor

from ddc.datasets import CleanImage, evenly, load_images
from ddc.evaluation.results import frechet_distance
from ddc.images import to_internal, to_unit
from ddc.perceptual import Metrics, psnr
from ddc.pipeline import RestorationPipeline
from ddc.problems import image_seeds, measure
from ddc.solvers.base import make_solver

Pixels = np.ndarray[Any, Any]
Filling = Callable[[str, CleanImage], Pixels]  # from a task and a picture


def known(task: str, image: CleanImage) -> Pixels:
    """Returns a boolean mask (H, W), True where a pixel is known."""
    x = to_internal(image.pixels[None].float() / 255)
    problem, y = measure(task, 0.0, x, [image.name])
    seen = problem.operator.observed(y)
    assert seen is not None, f"{task} has no hole"
    mask: Pixels = seen[0, 0].numpy() > 0
    return mask


def levels(image: CleanImage) -> Pixels:
    return image.pixels.permute(1, 2, 0).numpy()


def with_hole(task: str, image: CleanImage) -> Pixels:
    """Returns a picture that is grey in its hole."""
    return np.where(known(task, image)[..., None], levels(image), np.uint8(128))


def by_ddc(model: Path | None) -> Filling:
    pipe = RestorationPipeline.from_pretrained(model).to("cpu")
    solver = make_solver(pipe.solver)

    def fill(task: str, image: CleanImage) -> Pixels:
        x = to_internal(image.pixels[None].float() / 255)
        problem, y = measure(task, 0.0, x, [image.name])
        with torch.no_grad():
            restored = pipe.solve(y, problem, solver, image_seeds(0, "solve", [image.name]), None, None)
        filled: Pixels = to_unit(restored.float())[0].permute(1, 2, 0).numpy()
        return np.rint(255 * filled).astype(np.uint8)

    return fill


def smooth(task: str, image: CleanImage) -> Pixels:
    """Returns a picture with its hole filled smoothly from the pixels around it, so that what was there cannot be seen."""
    x = to_internal(image.pixels[None].float() / 255)
    problem, y = measure(task, 0.0, x, [image.name])
    filled: Pixels = to_unit(problem.operator.guess(y, 0.0))[0].permute(1, 2, 0).numpy()
    return np.rint(255 * filled).astype(np.uint8)


def by_opponent(name: str, packages: Path) -> Filling:
    """MI-GAN enlarges a picture and blends its result, by which pixels of the hole reach those around it. An even colour
    in the hole would be seen as a frame, and the truth would be given away."""
    inpaint = INPAINTERS[name](packages)
    return lambda task, image: inpaint(smooth(task, image), np.uint8(255) * known(task, image))


def place(folder: Path, task: str, who: str, image: CleanImage) -> Path:
    return folder / task / who / f"{Path(image.name).stem}.png"


def fill(arguments: argparse.Namespace, images: list[CleanImage]) -> None:
    for who in arguments.by:
        filling = by_ddc(arguments.model) if who == "ddc" else by_opponent(who, arguments.packages)
        for task in arguments.task:
            (arguments.folder / task / who).mkdir(parents=True, exist_ok=True)
            started, count = time.perf_counter(), 0
            for image in images:
                target = place(arguments.folder, task, who, image)
                if not target.exists():
                    pasted = np.where(known(task, image)[..., None], levels(image), filling(task, image))
                    Image.fromarray(pasted).save(target)
                    count += 1
            seconds = (time.perf_counter() - started) / max(count, 1)
            print(f"{task} {who}: {count} pictures, {seconds:.2f} s each", flush=True)


def unit(path: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 255


def score(arguments: argparse.Namespace, images: list[CleanImage]) -> None:
    metrics = Metrics(fid=True)
    assert metrics.inception is not None and metrics.vgg is not None
    truths = [image.pixels[None].float() / 255 for image in images]
    with torch.no_grad():
        true_features = torch.cat([metrics.inception(x) for x in truths]).numpy()
        for task in arguments.task:
            for who in arguments.by:
                filled = [unit(place(arguments.folder, task, who, image)) for image in images]
                error = np.mean([float(psnr(x, truth)) for x, truth in zip(filled, truths, strict=True)])
                features = torch.cat([metrics.inception(x) for x in filled]).numpy()
                told = f"{error:.2f} dB  {frechet_distance(features, true_features):.2f} FID  ({len(images)} pictures)"
                print(f"{task:8} {who:8} {told}", flush=True)
                few = evenly(list(zip(filled, truths, strict=True)), arguments.judged)
                lpips = np.mean([float(metrics.vgg(2 * x - 1, 2 * truth - 1)) for x, truth in few])
                dists = [float(metrics.dists(x, truth)) for x, truth in few]
                told = f"{lpips:.4f} LPIPS-VGG16  {np.mean(dists):.4f} DISTS  ({len(few)} pictures)"
                print(f"{task:8} {who:8} {told}", flush=True)
                np.savetxt(arguments.folder / f"dists_{task}_{who}.txt", dists, "%.5f")


def sheet(arguments: argparse.Namespace, images: list[CleanImage]) -> None:
    for task in arguments.task:
        rows = []
        for image in images:
            filled = [np.array(Image.open(place(arguments.folder, task, who, image))) for who in arguments.by]
            rows.append(np.hstack([with_hole(task, image), levels(image), *filled]))
        drawn = Image.fromarray(np.vstack(rows))
        target = arguments.folder / f"sheet_{task}.png"
        drawn.resize((2 * drawn.width, 2 * drawn.height), Image.Resampling.LANCZOS).save(target)
        print(f"{target}: hole, truth, {', '.join(arguments.by)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"fill": fill, "score": score, "sheet": sheet}
    parser.add_argument("command", choices=commands)
    parser.add_argument("images", type=Path, help="a folder or a tar archive of pictures")
    parser.add_argument("folder", type=Path, help="where filled pictures are")
    parser.add_argument("--by", nargs="+", choices=("ddc", *INPAINTERS), default=["mi-gan", "ddc"])
    parser.add_argument("--task", nargs="+", default=["box96", "strokes"])
    parser.add_argument("--limit", type=int, default=None, help="pictures, at equal distances in the order of names")
    parser.add_argument("--judged", type=int, default=1000, help="pictures for LPIPS and DISTS, which take long")
    parser.add_argument("--model", type=Path, default=None, help="the model folder")
    parser.add_argument("--packages", type=Path, default=Path("opponents/node_modules"), help="where npm put theirs")
    arguments = parser.parse_args()
    commands[arguments.command](arguments, load_images(arguments.images, limit=arguments.limit))


if __name__ == "__main__":
    main()
