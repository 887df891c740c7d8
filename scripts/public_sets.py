"""Measures `ddc restore` on public sets of pictures, which are for measuring only.

    python scripts/public_sets.py levin PHOTOGRAPHS [--pictures 6] [--kernels 4]   (needs DDC_LEVIN09)
    python scripts/public_sets.py polyu CROPPED_IMAGES [--pictures 8]              (needs opencv-python-headless)
    python scripts/public_sets.py jpeg LIVE1_COLOR [--qualities 10 20 30]
    python scripts/public_sets.py real REALSET65 [--out restored]                  (needs basicsr, see niqe.py)

`levin` blurs photographs with Levin's kernels, σ 0.01, 8 bits, and compares the gain by the estimated kernel with that by
the true one. `polyu`, also for CC15, restores NAME_real.JPG, compares it with NAME_mean.JPG, and with NL-means, FFDNet (`--against ffdnet`)
and `denoise` under the strength that is best for each picture. `jpeg` compresses pictures. Each prints PSNR and LPIPS (VGG16, AlexNet).
`real` restores pictures of which no truth is known. It prints NIQE of the results at the size of the input, to which those of
opponents that enlarge are reduced, and of parts of 96 pixels that are enlarged ×4. sheet.png shows both.
Pictures are cropped to --side pixels in the middle. `--against` adds other networks: `opponents.py` says how to install them.
"""

import argparse
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from niqe import BLOCK, GoodPhotographs, niqe
from opponents import DENOISERS, OPPONENTS, at_size
from PIL import Image

from ddc.images import Picture
from ddc.operators.blur import KernelBlur, levin_kernel
from ddc.perceptual import LPIPS
from ddc.pipeline import RestorationPipeline

Pixels = np.ndarray[Any, Any]

NOISE_OF_LEVIN = 0.01
STRENGTHS = (3, 5, 7, 10, 13, 17)  # h of NL-means, of which the best is taken
SIGMAS = (0.01, 0.02, 0.03, 0.045, 0.065, 0.09)  # of `denoise`, of which the best is taken
FINE = tuple(step / 255 for step in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25))  # σ of FFDNet, likewise
PART = 96  # pixels of the part that is enlarged
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


def middle(pixels: Pixels, side: int, scale: int = 1) -> Pixels:
    """Returns the middle, beginning at a multiple of 8 pixels, so that blocks of JPEG lie as before.

    Of a picture that was enlarged by `scale`, it returns what has become of the middle.
    """
    top, left = (max(0, (length // scale - side) // 16 * 8) * scale for length in pixels.shape[:2])
    return pixels[top : top + scale * side, left : left + scale * side]


def load(path: Path) -> Pixels:
    return np.asarray(Image.open(path).convert("RGB"))


class Measure:
    """Restores and compares pictures, and collects the figures under names."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.opponents = {name: OPPONENTS[name](arguments.packages) for name in arguments.against if name in OPPONENTS}
        self.denoisers = {name: DENOISERS[name](arguments.packages) for name in arguments.against if name in DENOISERS}
        self.pipe = RestorationPipeline.from_pretrained(arguments.model).to("cpu")
        self.distances = [LPIPS("vgg"), LPIPS("alex")]
        self.out, self.scores = arguments.out, dict[str, list[tuple[float, ...]]]()

    def restored(self, picture: Path | Picture, name: str, task: str = "auto", **options: Any) -> Pixels:
        """Returns a restored picture in 8-bit levels, writes it, and prints what was done."""
        result = self.pipe(picture, task, **options)
        target = self.out / f"{name}.png"
        result.picture.write(target)
        print(f"{name}: {result.tasks[0]} {result.sigma[0]:.3f} {' '.join(result.found[0])}", flush=True)
        return load(target)

    def opponents_on(self, pixels: Pixels, name: str) -> Iterator[tuple[str, Pixels]]:
        """Yields the names of the opponents and their results, at the size of the picture, and writes them."""
        for opponent, restore in self.opponents.items():
            result = at_size(restore(pixels), pixels)
            Image.fromarray(result).save(self.out / f"{name}_{opponent}.png")
            yield opponent, result

    def score(self, name: str, pixels: Pixels, clean: Pixels) -> float:
        """Keeps PSNR and LPIPS under a name, and returns the first."""
        psnr = -10 * math.log10(max(float(((pixels / 255 - clean / 255) ** 2).mean()), 1e-10))
        x, y = (torch.from_numpy(z / 127.5 - 1).float().permute(2, 0, 1)[None] for z in (pixels, clean))
        with torch.no_grad():
            values = (psnr, *(float(distance(x, y)) for distance in self.distances))
        self.scores.setdefault(name, []).append(values)
        print(f"  {name:24} {values[0]:.2f} dB  {values[1]:.3f} VGG16  {values[2]:.3f} AlexNet", flush=True)
        return psnr

    def report(self) -> None:
        """Prints the means."""
        for name, values in self.scores.items():
            psnr, vgg, alex = np.mean(values, axis=0)
            print(f"{name:24} {psnr:.2f} dB  {vgg:.3f} VGG16  {alex:.3f} AlexNet  ({len(values)} pictures)")


def pictures_in(folder: Path, most: int, least: int = 1) -> Iterator[Path]:
    """Yields pictures at equal distances in the order of names, of those that have a least number of pixels a side."""
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    found = [path for path in found if min(Image.open(path).size) >= least]
    yield from found[:: max(1, len(found) // most)][:most]


def levin(arguments: argparse.Namespace, measure: Measure) -> None:
    """A kernel is known up to a shift, so that pictures are compared where they fit best."""
    from photographs import aligned

    gains = []
    for path in pictures_in(arguments.folder, arguments.pictures):
        clean = middle(load(path), arguments.side)
        x = torch.from_numpy(clean / 127.5 - 1).float().permute(2, 0, 1)[None]
        for number in range(1, arguments.kernels + 1):
            kernel = levin_kernel(number)
            edge = kernel.shape[-1] // 2 + 1
            blurred = KernelBlur(kernel)(x)[0].permute(1, 2, 0).numpy() / 2 + 0.5
            noise = np.random.default_rng(number).normal(0, NOISE_OF_LEVIN, blurred.shape)
            y = np.rint(255 * (blurred + noise).clip(0, 1)).astype(np.uint8)[edge:-edge, edge:-edge]
            truth = clean[edge:-edge, edge:-edge]
            name = f"{path.stem}_{number}"
            blind = measure.restored(Picture(y), f"{name}_blind")
            known = measure.restored(Picture(y), f"{name}_known", "blur", kernel=kernel, sigma=NOISE_OF_LEVIN)
            inside = (slice(24, -24), slice(24, -24))
            values = [
                measure.score(label, 255 * aligned(pixels / 255, truth / 255, 9)[inside], truth[inside])
                for label, pixels in [
                    ("blurred", y),
                    ("blind", blind),
                    ("true kernel", known),
                    *measure.opponents_on(y, name),
                ]
            ]
            gains.append((values[1] - values[0], values[2] - values[0]))
            print(f"{name}: gain {gains[-1][0]:+.2f} dB blind, {gains[-1][1]:+.2f} dB with the true kernel", flush=True)
    blind_gain, true_gain = np.mean(gains, axis=0)
    print(
        f"gain {blind_gain:+.2f} dB blind, {true_gain:+.2f} dB with the true kernel: {blind_gain / true_gain:.2f} of it"
    )


def closest(tried: list[Pixels], clean: Pixels) -> Pixels:
    """Returns the picture with the best PSNR."""
    return min(tried, key=lambda one: float(((one / 255 - clean / 255) ** 2).mean()))


def polyu(arguments: argparse.Namespace, measure: Measure) -> None:
    import cv2

    real = [path for path in pictures_in(arguments.folder, 10**6) if path.stem.endswith("_real")]
    for path in real[:: max(1, len(real) // arguments.pictures)][: arguments.pictures]:
        mean = path.with_name(path.name.replace("_real", "_mean"))
        noisy, clean = (middle(load(one), arguments.side) for one in (path, mean))
        measure.score("noisy", noisy, clean)
        for opponent, pixels in measure.opponents_on(noisy, path.stem):
            measure.score(opponent, pixels, clean)
        measure.score("auto", middle(measure.restored(path, path.stem), arguments.side), clean)
        tried = [cv2.fastNlMeansDenoisingColored(noisy, None, h, h, 7, 21) for h in STRENGTHS]
        measure.score("NL-means, oracle", closest(tried, clean), clean)
        for name, denoised in measure.denoisers.items():
            measure.score(f"{name}, oracle", closest([denoised(noisy, sigma) for sigma in FINE], clean), clean)
        tried = [measure.restored(Picture(noisy), f"{path.stem}_{sigma}", "denoise", sigma=sigma) for sigma in SIGMAS]
        measure.score("denoise, oracle", closest(tried, clean), clean)


def jpeg(arguments: argparse.Namespace, measure: Measure) -> None:
    for path in pictures_in(arguments.folder, arguments.pictures):
        clean = middle(load(path), arguments.side)
        for quality in arguments.qualities:
            file = io.BytesIO()
            Image.fromarray(clean).save(file, "JPEG", quality=quality)
            measured = arguments.out / f"{path.stem}_{quality}.jpg"
            measured.write_bytes(file.getvalue())
            measure.score(f"JPEG {quality}", load(measured), clean)
            for opponent, pixels in measure.opponents_on(load(measured), measured.stem):
                measure.score(f"JPEG {quality}, {opponent}", pixels, clean)
            measure.score(f"JPEG {quality}, auto", measure.restored(measured, f"{path.stem}_{quality}_auto"), clean)


def real(arguments: argparse.Namespace, measure: Measure) -> None:
    """No truth is known: NIQE of the results at the size of the input, and of parts of the middle that are ×4."""
    good = GoodPhotographs.installed()
    rows, scores = [], dict[str, list[float]]()
    for path in pictures_in(arguments.folder, arguments.pictures, 2 * BLOCK):
        pixels = middle(load(path), arguments.side)
        whole = pixels.shape[:2] == Image.open(path).size[::-1]
        auto = measure.restored(path if whole else Picture(pixels), f"{path.stem}_same_auto")
        results = {"input": pixels, "auto": auto}
        part = Image.fromarray(middle(pixels, PART))
        large = {
            "bicubic": np.asarray(part.resize((4 * PART, 4 * PART), Image.Resampling.BICUBIC)),
            "auto+sr4": measure.restored(Picture(middle(auto, PART)), f"{path.stem}_x4_auto+sr4", "sr4"),
        }
        for name, restore in measure.opponents.items():
            enlarged = restore(pixels)
            results[name] = at_size(enlarged, pixels)
            large[name] = middle(enlarged, PART, 4)
        for kind, compared in (("same", results), ("x4", large)):
            for name, result in compared.items():
                scores.setdefault(f"{kind} {name}", []).append(niqe(result, good))
                Image.fromarray(result).save(arguments.out / f"{path.stem}_{kind}_{name}.png")
        rows += [[middle(one, PART).repeat(4, 0).repeat(4, 1) for one in results.values()], list(large.values())]
        print("  NIQE " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in scores.items()), flush=True)
    Image.fromarray(np.vstack([np.hstack(row) for row in rows])).save(arguments.out / "sheet.png")
    print("NIQE, mean and number of pictures in which it is the least (less is better):")
    for kind in ("same", "x4"):
        names = [name for name in scores if name.startswith(kind)]
        table = np.array([scores[name] for name in names])
        table = table[:, ~np.isnan(table).any(0)]
        least = table.argmin(0)
        for number, name in enumerate(names):
            print(f"{name:28} {table[number].mean():.2f}  {int((least == number).sum())} of {len(least)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=("levin", "polyu", "jpeg", "real"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=6)
    parser.add_argument("--kernels", type=int, default=4, help="of Levin's eight")
    parser.add_argument("--qualities", type=int, nargs="+", default=[10, 20, 30])
    parser.add_argument("--side", type=int, default=512, help="pixels of the part that is used")
    parser.add_argument("--model", type=Path, default=None, help="the model folder")
    parser.add_argument("--out", type=Path, default=Path("restored"), help="where pictures go")
    known = (*OPPONENTS, *DENOISERS)
    parser.add_argument("--against", nargs="+", choices=known, default=[], help="opponents, see opponents.py")
    parser.add_argument("--packages", type=Path, default=Path("opponents/node_modules"), help="where npm put theirs")
    arguments = parser.parse_args()
    if arguments.set != "polyu" and set(arguments.against) & set(DENOISERS):
        parser.error(f"only polyu is for {', '.join(DENOISERS)}, which need the strength of noise")
    arguments.out.mkdir(parents=True, exist_ok=True)
    measure = Measure(arguments)
    {"levin": levin, "polyu": polyu, "jpeg": jpeg, "real": real}[arguments.set](arguments, measure)
    measure.report()


if __name__ == "__main__":
    main()
