"""The demonstration: four free photographs, degraded and restored for every kind of task."""

import html
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ddc.cli.degrade import Degrade
from ddc.evaluation.metrics import psnr
from ddc.images import Picture, to_internal
from ddc.perceptual import LPIPS
from ddc.pipeline import RestorationPipeline
from ddc.problems import make_problem


@dataclass(frozen=True)
class Setting:
    """One row of the demonstration."""

    task: str
    sigma: float
    title: str


SETTINGS = (
    Setting("sr4", 0.0, "a quarter of the size"),
    Setting("sr8", 0.0, "an eighth of the size"),
    Setting("sr4", 0.05, "a quarter of the size, and noise"),
    Setting("gauss", 0.0, "out of focus"),
    Setting("motion", 0.02, "camera shake, and a little noise"),
    Setting("inpaint92", 0.0, "92 % of the pixels lost"),
    Setting("strokes", 0.0, "scratches"),
    Setting("jpeg10", 0.0, "JPEG at quality 10"),
    Setting("denoise", 0.1, "strong noise"),
)
OVERVIEW = ("sr4", "gauss", "inpaint92", "jpeg10")
SIDE = 256


def photographs() -> dict[str, Picture]:
    """256×256 crops of scikit-image's astronaut, coffee, cat and rocket, which are free to use."""
    from skimage import data

    corners = {"astronaut": (0, 96), "coffee": (60, 120), "cat": (20, 80), "rocket": (100, 200)}
    return {
        name: Picture(np.ascontiguousarray(getattr(data, name)()[top : top + SIDE, left : left + SIDE]))
        for name, (top, left) in corners.items()
    }


@dataclass(frozen=True)
class Outcome:
    """One photograph, one setting."""

    name: str
    setting: Setting
    before: Tensor  # the measurement at image size, (3, H, W) in [0, 1]
    after: Tensor
    psnr: tuple[float, float]  # of the first guess from the measurement alone, and of the restored picture
    lpips: tuple[float, float]
    seconds: float


def run_demo(out: Path, settings: list[Setting], model: Path | None, device: str, seed: int) -> Path:
    """Make everything; returns the page."""
    console = Console(stderr=True)
    started = time.perf_counter()
    pipe = RestorationPipeline.from_pretrained(model).to(device)
    distance = LPIPS("alex")
    pictures = photographs()
    out.mkdir(parents=True, exist_ok=True)
    todo = [(setting, name) for setting in settings for name in pictures]
    outcomes = [
        restore_one(pipe, distance, name, pictures[name], setting, seed)
        for setting, name in track(todo, "restoring", console=console, disable=not console.is_terminal)
    ]
    for setting in settings:
        rows = [outcome for outcome in outcomes if outcome.setting == setting]
        write_grid(
            out / f"{file_stem(setting)}.png",
            [(pictures[row.name].tensor, row.before, row.after) for row in rows],
        )
    write_overview(out / "overview.jpg", outcomes)
    write_page(out / "index.html", settings, outcomes, pictures, out, seed)
    show_table(settings, outcomes)
    print(f"{len(outcomes)} restorations in {time.perf_counter() - started:.0f} s on {device_name(pipe)}")
    return out / "index.html"


def restore_one(
    pipe: RestorationPipeline, distance: LPIPS, name: str, truth: Picture, setting: Setting, seed: int
) -> Outcome:
    """Measure, round to 8 bits as a file does, and restore."""
    degrade = Degrade(inputs=(Path(name),), out=Path(name), task=setting.task, sigma=setting.sigma, seed=seed)
    measured = degrade.measure(truth, name)
    y = (measured.tensor.clamp(0, 1) * 255).round() / 255
    measured = Picture.from_tensor(y, alpha=measured.alpha)
    result = pipe(measured, setting.task, sigma=setting.sigma, seed=seed, names=[name])
    after = result.picture.tensor

    problem = make_problem(setting.task, setting.sigma, truth.size, mask=measured.mask)
    size = truth.size
    with torch.inference_mode():
        internal = to_internal(y)[None]
        if measured.mask is not None:
            internal = internal * measured.mask[None]
        before = (problem.operator.to_image(internal, size)[0] + 1) / 2
        guess = ((problem.operator.estimate(internal, problem.sigma, size) + 1) / 2).clamp(0, 1)
        clean = truth.tensor[None]
        figures = [
            (float(psnr(x, clean)), float(distance(to_internal(x), to_internal(clean))))
            for x in (guess, after[None])
        ]
    (guess_psnr, guess_lpips), (after_psnr, after_lpips) = figures
    return Outcome(
        name, setting, before, after, (guess_psnr, after_psnr), (guess_lpips, after_lpips), result.seconds
    )


def file_stem(setting: Setting) -> str:
    return setting.task + (f"-noise{setting.sigma:g}" if setting.sigma else "")


def as_image(x: Tensor) -> Image.Image:
    return Image.fromarray((x.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())


def write_grid(path: Path, rows: list[tuple[Tensor, ...]]) -> None:
    """A picture of pictures: truth, measurement and restoration, one photograph below the other."""
    as_image(torch.cat([torch.cat(row, dim=2) for row in rows], dim=1)).save(path)


def write_overview(path: Path, outcomes: list[Outcome], width: int = 1600) -> None:
    """Before and after side by side, the tasks without noise in columns and the photographs in rows."""
    rows: dict[str, list[Tensor]] = {}
    for o in outcomes:
        if not o.setting.sigma and o.setting.task in OVERVIEW:
            rows.setdefault(o.name, []).extend([o.before, o.after])
    if rows:
        image = as_image(torch.cat([torch.cat(row, dim=2) for row in rows.values()], dim=1))
        small = image.resize((width, round(width * image.height / image.width)), Image.Resampling.LANCZOS)
        small.save(path, quality=88)


def show_table(settings: list[Setting], outcomes: list[Outcome]) -> None:
    table = Table(title="mean over four photographs (8-bit measurements, five steps)")
    table.add_column("task")
    table.add_column("noise σ", justify="right")
    for heading in (
        "PSNR of the first guess",
        "restored",
        "LPIPS of the first guess",
        "restored",
        "seconds each",
    ):
        table.add_column(heading, justify="right")
    for setting in settings:
        rows = [o for o in outcomes if o.setting == setting]
        p0, p1, l0, l1, s = np.mean([[*o.psnr, *o.lpips, o.seconds] for o in rows], axis=0)
        table.add_row(
            setting.task, f"{setting.sigma:g}", f"{p0:.2f}", f"{p1:.2f}", f"{l0:.3f}", f"{l1:.3f}", f"{s:.1f}"
        )
    Console().print(table)


def device_name(pipe: RestorationPipeline) -> str:
    if pipe.device.type == "cuda":
        return torch.cuda.get_device_name(pipe.device)
    return f"{platform.machine()} {pipe.device.type}, {torch.get_num_threads()} threads"


def write_page(
    path: Path,
    settings: list[Setting],
    outcomes: list[Outcome],
    pictures: dict[str, Picture],
    out: Path,
    seed: int,
) -> None:
    """One page that needs nothing from outside its folder: a slider over each pair of pictures."""
    folder = out / "pictures"
    folder.mkdir(exist_ok=True)
    sections = []
    for setting in settings:
        figures = []
        for o in (o for o in outcomes if o.setting == setting):
            stem = f"{o.name}-{file_stem(setting)}"
            as_image(o.before).save(folder / f"{stem}-before.png")
            as_image(o.after).save(folder / f"{stem}-after.png")
            figures.append(
                f'<figure><div class="pair" style="--at:50%">'
                f'<img src="pictures/{stem}-after.png" alt="{o.name}, restored">'
                f'<img class="top" src="pictures/{stem}-before.png" alt="{o.name}, as measured">'
                f'<input type="range" min="0" max="100" value="50" aria-label="before and after"></div>'
                f"<figcaption>{o.name}: {o.psnr[1]:.1f} dB, LPIPS {o.lpips[1]:.3f}</figcaption></figure>"
            )
        noise = f", σ = {setting.sigma:g}" if setting.sigma else ""
        command = f"ddc restore IN -o OUT --task {setting.task}" + (
            f" --sigma {setting.sigma:g}" if setting.sigma else ""
        )
        sections.append(
            f"<section><h2>{html.escape(setting.title)} <small>{setting.task}{noise}</small></h2>"
            f'<div class="row">{"".join(figures)}</div><code>{command}</code></section>'
        )
    for name, picture in pictures.items():
        as_image(picture.tensor).save(folder / f"{name}.png")
    path.write_text(PAGE.format(sections="\n".join(sections), seed=seed))


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>ddc: before and after</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1150px; padding: 0 1rem; color: #222 }}
h1 {{ margin-bottom: 0 }} h2 {{ margin: 2.5rem 0 .5rem }} small {{ color: #777; font-weight: normal }}
.row {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 1rem }}
figure {{ margin: 0 }} figcaption {{ font-size: .85rem; color: #555 }}
.pair {{ position: relative; aspect-ratio: 1; overflow: hidden; border-radius: 6px }}
.pair img {{ position: absolute; inset: 0; width: 100%; height: 100% }}
.pair .top {{ clip-path: inset(0 calc(100% - var(--at)) 0 0); image-rendering: pixelated }}
.pair::after {{ content: ""; position: absolute; top: 0; bottom: 0; left: var(--at); width: 2px; background: #fff;
  box-shadow: 0 0 4px #0008; pointer-events: none }}
.pair input {{ position: absolute; inset: 0; width: 100%; height: 100%; margin: 0; opacity: 0; cursor: ew-resize }}
code {{ display: inline-block; margin-top: .5rem; background: #f3f3f3; padding: .2rem .5rem; border-radius: 4px }}
@media print {{ section {{ break-inside: avoid }} }}
</style></head><body>
<h1>Before and after</h1>
<p>Left of the line is what was given, right of it what came out of five diffusion steps (seed {seed}). Move the line.
The figures are against the original. Restored detail is plausible, not certain: some of it is invented.</p>
{sections}
<p><small>Photographs: scikit-image's astronaut (NASA), coffee (Rachel Michetti), cat (Stéfan van der Walt) and
rocket (SpaceX), all in the public domain or CC0.</small></p>
<script>
for (const input of document.querySelectorAll(".pair input"))
  input.addEventListener("input", () => input.parentNode.style.setProperty("--at", input.value + "%"));
</script></body></html>
"""
