"""Damages photographs with other programs than ddc, and counts what `ddc restore` would do to them.

    python scripts/photographs.py make PHOTOGRAPHS FOLDER [--half 0|1] [--count 20]     (needs opencv-python-headless)
    python scripts/photographs.py count FOLDER [--most 20] [--rows ROW …] [--restore 5]  (needs ddc)

PHOTOGRAPHS are folders of pictures with a number in their names. Numbers that 36 divides are held out from training;
only those are used. Half 0 is for developing, half 1 for reporting. `make` writes FOLDER/ROW/NAME.EXT for each
row of damage and for undamaged pictures, FOLDER/clean/ROW/NAME.png and FOLDER/truth.json. `count` prints, for each
row, how many diagnoses are right, harmless (the picture is left alone, or treated with too little) and wrong, and the
seconds of a diagnosis. With `--restore N` it also restores the first N pictures of each row, writes them to --out and
prints PSNR and LPIPS-VGG16 before and after, and how many became worse by more than 0.3 dB and 0.02.
"""

import argparse
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

Pixels = np.ndarray[Any, Any]
Truth = dict[str, Any]
Damaged = tuple[Truth, Pixels]

LARGE, LEAST = 640, 256  # pixels of the shorter side: from which on a photograph is halved, and which it needs
WORSE = (0.3, 0.02)  # dB and LPIPS by which no picture should become worse

# ---------------------------------------------------------------------------------------------------------
# damage. Each function writes a damaged picture, and returns what was done and the clean picture.


def load(path: Path) -> Pixels:
    """Returns a photograph; a large one at half its size, in which marks of its own JPEG file are gone."""
    import cv2

    pixels = np.asarray(Image.open(path).convert("RGB"))
    if min(pixels.shape[:2]) < LARGE:
        return pixels
    height, width = (length // 2 for length in pixels.shape[:2])
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)


def crop(pixels: Pixels, side: int, rng: np.random.Generator) -> Pixels:
    top, left = (int(rng.integers(0, max(1, length - side + 1))) for length in pixels.shape[:2])
    return pixels[top : top + side, left : left + side]


def eight_bits(values: Pixels) -> Pixels:
    return np.rint(values.clip(0, 1) * 255).astype(np.uint8)


def through_camera(pixels: Pixels, sigma: float, rng: np.random.Generator) -> tuple[Pixels, float]:
    """Returns a photograph with the noise of a sensor behind a Bayer filter, demosaiced; and σ of what was added."""
    import cv2

    def demosaic(values: Pixels) -> Pixels:
        raw = np.empty(values.shape[:2])
        for row, column, channel in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)):
            raw[row::2, column::2] = values[row::2, column::2, channel]
        levels = np.rint(raw.clip(0, 1) * 65535).astype(np.uint16)
        return cv2.cvtColor(levels, cv2.COLOR_BayerRG2RGB) / 65535

    unit = pixels / 255
    noisy = unit + rng.normal(0, 1, unit.shape) * sigma * np.sqrt(0.4 + 1.2 * unit)
    result = demosaic(noisy)
    if np.abs(result.mean((0, 1)) - unit.mean((0, 1))).max() > 0.02:
        result = result[..., ::-1]  # OpenCV's names of Bayer patterns differ between versions
    clean = demosaic(unit)
    clean = clean if np.abs(clean - result).mean() < np.abs(clean[..., ::-1] - result).mean() else clean[..., ::-1]
    return eight_bits(result), float((result - clean).std())


def jpeg(pixels: Pixels, quality: int, sampling: int = 2) -> Pixels:
    import io

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality, subsampling=sampling)
    return np.asarray(Image.open(buffer))


def shake_kernel(rng: np.random.Generator) -> Pixels:
    """Returns the kernel of a hand's curved path, 9 to 19 pixels across."""
    from scipy.ndimage import gaussian_filter

    side, steps = 41, 400
    speed = np.cumsum(rng.normal(0, 1, (steps, 2)), axis=0) + rng.normal(0, 12, 2)
    path = np.cumsum(speed, axis=0)
    path -= (path.min(0) + path.max(0)) / 2
    path *= rng.uniform(9, 19) / 2 / np.abs(path).max()
    kernel = np.zeros((side, side))
    for y, x in np.rint(path * 1 + side // 2).astype(int):
        kernel[y, x] += 1
    kernel = gaussian_filter(kernel, 0.5)
    return kernel / kernel.sum()


def disc_kernel(radius: float) -> Pixels:
    from scipy.ndimage import zoom

    fine = np.hypot(*np.mgrid[-64:65, -64:65]) <= 8 * radius
    kernel = np.abs(zoom(fine.astype(float), 17 / 129, order=1))
    return kernel / kernel.sum()


def filtered(pixels: Pixels, kernel: Pixels) -> Pixels:
    import cv2

    return cv2.filter2D(pixels / 255, -1, kernel, borderType=cv2.BORDER_REFLECT_101)


def demosaiced(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    clean = crop(photo, 384, rng)
    pixels, sigma = through_camera(clean, rng.uniform(0.045, 0.07), rng)
    Image.fromarray(pixels).save(out.with_suffix(".png"))
    return {"sigma": sigma}, clean


def demosaiced_jpeg(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    clean = crop(photo, 384, rng)
    pixels, sigma = through_camera(clean, rng.uniform(0.045, 0.07), rng)
    Image.fromarray(pixels).save(out.with_suffix(".jpg"), quality=75)
    return {"sigma": sigma, "quality": 75}, clean


def reduced(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    import cv2

    height, width = (round(length / 3) for length in photo.shape[:2])
    small = cv2.resize(photo, (width, height), interpolation=cv2.INTER_AREA)
    sigma = rng.uniform(0.02, 0.04)
    noisy = eight_bits(small / 255 + rng.normal(0, sigma, small.shape))
    Image.fromarray(noisy).save(out.with_suffix(".jpg"), quality=75)
    return {"sigma": sigma, "quality": 75}, small


def saved_again(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    kind = int(rng.integers(0, 4))
    first = 20 if kind == 0 else 30
    clean = crop(photo, 384, rng)
    pixels = jpeg(clean, first)
    if kind in (0, 1):
        cut = 3 * kind
        Image.fromarray(pixels[cut:, cut:]).save(out.with_suffix(".png"))
        return {"first": first, "shifted": bool(cut)}, clean[cut:, cut:]
    cut = 0 if kind == 2 else 5
    Image.fromarray(pixels[cut:, cut:]).save(out.with_suffix(".jpg"), quality=90)
    return {"first": first, "shifted": bool(cut)}, clean[cut:, cut:]


def enlarged(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    import cv2

    factor = float(rng.choice([1.5, 2, 2.5, 3, 4, 4, 4]))
    methods = {
        "cubic": cv2.INTER_CUBIC,
        "linear": cv2.INTER_LINEAR,
        "lanczos": cv2.INTER_LANCZOS4,
        "nearest": cv2.INTER_NEAREST,
    }
    method = str(rng.choice(["cubic", "cubic", "linear", "lanczos", "nearest"]))
    whole = crop(photo, 384, rng)
    size = [round(length / factor) for length in whole.shape[1::-1]]
    small = cv2.resize(whole, size, interpolation=cv2.INTER_AREA)
    large = cv2.resize(small, None, fx=factor, fy=factor, interpolation=methods[method])
    if rng.random() < 0.7:
        Image.fromarray(large).save(out.with_suffix(".jpg"), quality=90)
    else:
        Image.fromarray(large).save(out.with_suffix(".png"))
    return {"factor": factor, "method": method}, cv2.resize(whole, large.shape[1::-1], interpolation=cv2.INTER_AREA)


def enlarged_jpeg(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    import cv2

    factor, quality = float(rng.choice([1.5, 2, 3])), int(rng.integers(30, 71))
    method = int(rng.choice([cv2.INTER_CUBIC, cv2.INTER_LINEAR, cv2.INTER_LANCZOS4]))
    whole = crop(photo, 384, rng)
    small = cv2.resize(whole, None, fx=1 / factor, fy=1 / factor, interpolation=cv2.INTER_AREA)
    large = cv2.resize(jpeg(small, quality), None, fx=factor, fy=factor, interpolation=method)
    if rng.random() < 0.7:
        Image.fromarray(large).save(out.with_suffix(".jpg"), quality=88)
    else:
        Image.fromarray(large).save(out.with_suffix(".png"))
    clean = cv2.resize(whole, large.shape[1::-1], interpolation=cv2.INTER_AREA)
    return {"factor": factor, "first": quality, "method": method}, clean


def defocused(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    radius, sigma = rng.uniform(2, 4), rng.uniform(0.01, 0.03)
    clean = crop(photo, 400, rng)
    soft = filtered(clean, disc_kernel(radius))[8:-8, 8:-8]
    Image.fromarray(eight_bits(soft + rng.normal(0, sigma, soft.shape))).save(out.with_suffix(".jpg"), quality=85)
    return {"radius": radius, "sigma": sigma}, clean[8:-8, 8:-8]


def through_lens(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    """Out of focus as behind a lens: light is blurred, and then becomes pixel values, by a power of 2.2."""
    radius, sigma = rng.uniform(2, 5), rng.uniform(0.003, 0.008)
    clean = crop(photo, 400, rng)
    soft = filtered(255 * (clean / 255) ** 2.2, disc_kernel(radius))[8:-8, 8:-8].clip(0, 1) ** (1 / 2.2)
    Image.fromarray(eight_bits(soft + rng.normal(0, sigma, soft.shape))).save(out.with_suffix(".jpg"), quality=92)
    return {"radius": radius, "sigma": sigma}, clean[8:-8, 8:-8]


def shaken(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    clean, kernel = crop(photo, 420, rng), shake_kernel(rng)
    moved = filtered(clean, kernel)[16:-16, 16:-16]
    Image.fromarray(eight_bits(moved + rng.normal(0, 0.005, moved.shape))).save(out.with_suffix(".png"))
    # OpenCV correlates, so that the kernel of the convolution is the other way round
    return {"kernel": np.round(kernel[::-1, ::-1], 5).tolist()}, clean[16:-16, 16:-16]


def with_holes(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    pixels = crop(photo, 384, rng)
    alpha = Image.new("L", pixels.shape[1::-1], 255)
    height, width = (int(rng.integers(110, 151)) for _ in range(2))
    top, left = (int(rng.integers(20, length - 170)) for length in pixels.shape[:2])
    ImageDraw.Draw(alpha).ellipse((left, top, left + width, top + height), fill=0)
    Image.fromarray(np.dstack([pixels, np.asarray(alpha)])).save(out.with_suffix(".png"))
    return {"hole": max(height, width)}, pixels


def old_scan(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    """Grain, fading, a yellow tint, scratches and dust; NUMBER_mask.png shows the scratches."""
    from scipy.ndimage import gaussian_filter

    clean = crop(photo, 384, rng)
    pixels = clean / 255
    grain = gaussian_filter(rng.normal(0, 1, pixels.shape[:2]), 0.8)
    pixels = pixels + 0.035 * (grain / grain.std())[..., None]
    pixels = (0.18 + 0.6 * pixels) * np.array([1.08, 1.0, 0.76])
    height, width = pixels.shape[:2]
    marks = Image.new("L", (width, height), 0)
    draw = ImageDraw.Draw(marks)
    for _ in range(int(rng.integers(4, 8))):
        x, lean = rng.uniform(0, width), rng.uniform(-30, 30)
        rows = np.linspace(rng.uniform(0, height / 3), rng.uniform(2 * height / 3, height), 12)
        line = [(x + lean * y / height + rng.normal(0, 0.7), y) for y in rows]
        draw.line(line, fill=255, width=int(rng.integers(1, 3)))
    for _ in range(int(rng.integers(15, 30))):
        x, y, r = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0.8, 2.2)
        draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
    mask = np.asarray(marks)[..., None] / 255
    Image.fromarray(eight_bits(pixels * (1 - mask) + mask * 0.97)).save(out.with_suffix(".png"))
    marks.save(out.parent / f"{out.name}_mask.gif")
    return {"sigma": 0.021, "mask": f"{out.name}_mask.gif"}, clean


def logo(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    """Flat shapes on a transparent background, with smooth borders."""
    side, zoom = 300, 4
    image = Image.new("RGBA", (side * zoom, side * zoom), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        colour = (*(int(value) for value in rng.integers(0, 256, 3)), 255)
        x, y = rng.uniform(0.15, 0.6, 2) * side * zoom
        w, h = rng.uniform(0.1, 0.35, 2) * side * zoom
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x, y, x + w, y + h), fill=colour)
    image = image.resize((side, side), Image.Resampling.LANCZOS)
    image.save(out.with_suffix(".png"))
    return {}, np.asarray(image.convert("RGB"))


def line_art(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    """Drawings with a pen, or windows with text, as screenshots have; some saved as JPEG."""
    kind = int(rng.integers(0, 3))
    image = Image.new("RGB", (420, 360), "white")
    draw = ImageDraw.Draw(image)
    if kind == 0:  # contours of a photograph
        from skimage import feature

        edges = feature.canny(photo.mean(2) / 255, sigma=1.5)
        image = Image.fromarray(np.where(edges[..., None], 0, 255).repeat(3, 2).astype(np.uint8))
    elif kind == 1:  # a hatched drawing
        for _ in range(90):
            x, y = rng.uniform(0, 420), rng.uniform(0, 360)
            angle, length = rng.uniform(0, math.pi), rng.uniform(10, 90)
            ends = (x, y, x + length * math.cos(angle), y + length * math.sin(angle))
            draw.line(ends, fill="black", width=int(rng.integers(1, 4)))
    else:  # a screenshot
        draw.rectangle((0, 0, 420, 28), fill=(60, 90, 160))
        for row in range(16):
            draw.text((12, 40 + 19 * row), "".join(chr(c) for c in rng.integers(97, 122, 55)), fill=(30, 30, 30))
        draw.rectangle((300, 200, 400, 300), fill=(240, 180, 60), outline=(0, 0, 0))
    if rng.random() < 0.3:
        image.save(out.with_suffix(".jpg"), quality=92)
    else:
        image.save(out.with_suffix(".png"))
    return {"kind": kind}, np.asarray(image)


def undamaged(photo: Pixels, rng: np.random.Generator, out: Path) -> Damaged:
    kind = int(rng.integers(0, 3))
    if kind == 0:
        Image.fromarray(photo).save(out.with_suffix(".png"))
    else:
        Image.fromarray(photo).save(out.with_suffix(".jpg"), quality=92 if kind == 1 else 95)
    return {}, photo


ROWS: dict[str, Callable[[Pixels, np.random.Generator, Path], Damaged]] = {
    "demosaiced": demosaiced,
    "demosaiced_jpeg75": demosaiced_jpeg,
    "reduced_noise_jpeg75": reduced,
    "saved_again": saved_again,
    "enlarged": enlarged,
    "disc_noise_jpeg85": defocused,
    "shake": shaken,
    "holes": with_holes,
    "old_scan": old_scan,
    "logo": logo,
    "line_art": line_art,
    "undamaged": undamaged,
    "enlarged_jpeg": enlarged_jpeg,
    "lens": through_lens,
}


def number_of(path: Path) -> int:
    digits = re.findall(r"-(\d{6})-", path.stem) or re.findall(r"\d+", path.stem)
    return int(digits[0]) if digits else 1


def make(arguments: argparse.Namespace) -> None:
    """Writes the damaged pictures."""
    found = sorted(path for folder in arguments.photographs for path in Path(folder).iterdir())
    held_out = [path for path in found if number_of(path) % 36 == 0 and number_of(path) // 36 % 2 == arguments.half]
    held_out = [path for path in held_out if min(Image.open(path).size) >= LEAST]
    np.random.default_rng(7).shuffle(held_out)
    if not held_out:
        sys.exit("no photograph of that half was found")
    truths: dict[str, Truth] = {}
    for row, damage in ROWS.items():
        for folder in (arguments.folder / row, arguments.folder / "clean" / row):
            folder.mkdir(parents=True, exist_ok=True)
        count = arguments.undamaged if row == "undamaged" else arguments.count
        for index, path in enumerate(held_out[:count]):
            rng = np.random.default_rng([index, list(ROWS).index(row), arguments.half])
            done, clean = damage(load(path), rng, arguments.folder / row / path.stem)
            Image.fromarray(clean).save(arguments.folder / "clean" / row / f"{path.stem}.png")
            truths[f"{row}/{path.stem}"] = done
    (arguments.folder / "truth.json").write_text(json.dumps(truths, indent=1))
    print(f"{len(truths)} pictures of {len(held_out)} photographs are in {arguments.folder}")


# ---------------------------------------------------------------------------------------------------------
# counting


def near(value: float, truth: float, low: float, high: float) -> bool:
    return low * truth <= value <= high * truth


def likeness(kernel: Pixels, truth: Pixels) -> float:
    """Returns the correlation of two kernels, at the shift where it is largest."""
    spectra = [np.fft.rfft2(one, (96, 96)) for one in (kernel, truth)]
    both = np.fft.irfft2(spectra[0] * spectra[1].conj(), (96, 96))
    return float(both.max() / np.linalg.norm(kernel) / np.linalg.norm(truth))


def judge(row: str, truth: Truth, found: Any, plan: Any) -> str:
    """Returns "right", "harmless" or "wrong" for the findings and the planned treatment of a picture."""
    kind = "" if plan is None else re.match("[a-z]+", plan.task)[0]  # type: ignore[index]
    if row in ("undamaged", "line_art"):
        return "wrong" if plan else "right"
    if row == "logo":
        return "wrong" if plan else "right" if found.cut_out else "harmless"
    if row == "holes":
        return "right" if kind == "inpaint" and near(found.hole, truth["hole"], 0.6, 1.2) else "wrong"
    if row == "saved_again":
        right = kind == "jpeg" and abs(found.quality - truth["first"]) <= 3
    elif row == "enlarged":
        right = found.enlargement is not None and near(found.enlargement.factor, truth["factor"], 0.9, 1.1)
    elif row == "enlarged_jpeg":
        file = found.enlarged_jpeg
        right = (
            file is not None
            and near(file.factor, truth["factor"], 0.99, 1.01)
            and abs(file.quality - truth["first"]) <= 8
        )
    elif row == "disc_noise_jpeg85":
        spread = found.blur.spread if found.blur else 0.0
        right = near(spread, truth["radius"] / 2, 0.8, 1.25) and plan.sigma >= 0.9 * truth["sigma"]
    elif row == "lens":
        right = near(found.blur.spread if found.blur else 0.0, truth["radius"] / 2, 0.85, 1.15)
    elif row == "shake":
        right = found.kernel is not None and likeness(found.kernel.numpy(), np.array(truth["kernel"])) > 0.6
    elif row == "old_scan":
        right = kind == "denoise" and found.fading is not None and found.marks is not None
    else:  # noise
        right = kind == "denoise" and near(plan.sigma, truth["sigma"], 0.8, 2.6)
    weak = kind in ("", "denoise") or (kind == "jpeg" and "quality" in truth)
    return "right" if right else "harmless" if weak and (plan is None or plan.sigma < 0.1) else "wrong"


def aligned(pixels: Pixels, clean: Pixels, reach: int) -> Pixels:
    """Returns pixels moved by whole pixels to where the clean picture is: a kernel is known up to a shift only."""
    best, moved = math.inf, pixels
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            tried = np.roll(pixels, (down, right), (0, 1))
            error = float(((tried - clean)[24:-24, 24:-24] ** 2).mean())
            if error < best:
                best, moved = error, tried
    return moved


class Judge:
    """Restores pictures, and compares them with the clean ones."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from ddc.perceptual import LPIPS
        from ddc.pipeline import RestorationPipeline

        self.pipe = RestorationPipeline.from_pretrained(arguments.model).to("cpu")
        self.lpips, self.out, self.folder = LPIPS("vgg"), arguments.out, arguments.folder

    def score(self, pixels: Pixels, clean: Pixels, row: str) -> tuple[float, float]:
        import torch

        pixels, clean = pixels[..., :3] / 255, clean / 255
        if row == "shake":
            pixels = aligned(pixels, clean, 9)[24:-24, 24:-24]
            clean = clean[24:-24, 24:-24]
        psnr = -10 * math.log10(max(float(((pixels - clean) ** 2).mean()), 1e-10))
        x, y = (torch.from_numpy(2 * z - 1).float().permute(2, 0, 1)[None] for z in (pixels, clean))
        with torch.no_grad():
            return psnr, float(self.lpips(x, y))

    def __call__(self, row: str, path: Path) -> tuple[tuple[float, float], tuple[float, float], str, float]:
        """Returns PSNR and LPIPS before and after, what was done, and the seconds that it took."""
        old = row == "old_scan"
        result = self.pipe(path, "auto", scratches=old, fix_colours=old)
        target = self.out / row / f"{path.stem}.png"
        result.picture.write(target)
        clean = np.asarray(Image.open(self.folder / "clean" / row / f"{path.stem}.png"))
        before = np.array(Image.open(path).convert("RGBA"))
        if row == "holes":
            before[before[..., 3] < 128] = 128
        after = np.asarray(Image.open(target).convert("RGB"))
        scores = self.score(before, clean, row), self.score(after, clean, row)
        return *scores, " ".join([f"{result.tasks[0]} {result.sigma[0]:.3f}", *result.notes[0]]), result.seconds


def count(arguments: argparse.Namespace) -> None:
    """Prints the verdicts for each row."""
    from ddc.diagnosis.findings import examine
    from ddc.diagnosis.treatment import treatment
    from ddc.images import Picture

    truths = json.loads((arguments.folder / "truth.json").read_text())
    verdicts: dict[str, Counter[str]] = {row: Counter() for row in ROWS}
    scores: dict[str, list[Any]] = {row: [] for row in ROWS}
    judge_restored = Judge(arguments) if arguments.restore else None
    seconds = 0.0
    for key, truth in truths.items():
        row = key.split("/")[0]
        if (arguments.rows and row not in arguments.rows) or verdicts[row].total() >= arguments.most:
            continue
        path = next(path for path in arguments.folder.glob(f"{key}.*") if path.suffix in (".png", ".jpg"))
        picture = Picture.read(path)
        started = time.process_time()
        found = examine(picture)
        plan = treatment(found)
        seconds += time.process_time() - started
        verdict = judge(row, truth, found, plan)
        verdicts[row][verdict] += 1
        if verdict == "wrong" or arguments.verbose:
            told = {name: value for name, value in truth.items() if name != "kernel"}
            print(f"{verdict}: {path.name} {told} → {plan}", flush=True)
        if judge_restored and len(scores[row]) < arguments.restore:
            before, after, done, took = judge_restored(row, path)
            scores[row].append((before, after))
            text = " → ".join(f"{psnr:.2f}/{lpips:.3f}" for psnr, lpips in (before, after))
            print(f"{row} {path.name}: {text} ({done}, {took:.0f} s)", flush=True)
    for row, counts in verdicts.items():
        text = f"{row:22} right {counts['right']:3}  harmless {counts['harmless']:3}  wrong {counts['wrong']:3}"
        if scores[row]:
            (a, b), (c, d) = np.mean(scores[row], axis=0)
            worse = sum(p - q > WORSE[0] and t - s > WORSE[1] for (p, s), (q, t) in scores[row])
            text += f"  {a:.2f}/{b:.3f} → {c:.2f}/{d:.3f} ({len(scores[row])}, {worse} worse)"
        print(text)
    print(f"{seconds / max(1, sum(counts.total() for counts in verdicts.values())):.2f} CPU seconds a picture")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.add_argument("photographs", nargs="+", type=Path)
    making.add_argument("folder", type=Path)
    making.add_argument("--half", type=int, default=0)
    making.add_argument("--count", type=int, default=20)
    making.add_argument("--undamaged", type=int, default=100)
    making.set_defaults(run=make)
    counting = commands.add_parser("count")
    counting.add_argument("folder", type=Path)
    counting.add_argument("--most", type=int, default=1000, help="pictures of each row")
    counting.add_argument("--rows", nargs="*", default=[])
    counting.add_argument("--verbose", action="store_true")
    counting.add_argument("--restore", type=int, default=0, metavar="N", help="restore N pictures of each row")
    counting.add_argument("--model", type=Path, default=None, help="the model folder")
    counting.add_argument("--out", type=Path, default=Path("restored"), help="where restored pictures go")
    counting.set_defaults(run=count)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
