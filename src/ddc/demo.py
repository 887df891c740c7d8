"""The demonstration: four free photographs, degraded and restored for every kind of task."""

import html
import platform
import string
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ddc.degrade import degrade
from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT, Picture, quantise, to_internal
from ddc.perceptual import LPIPS, psnr
from ddc.pipeline import RestorationPipeline
from ddc.problems import make_problem

OVERVIEW = ("sr4", "gauss", "inpaint92", "jpeg10")  # the tasks of the overview picture
SIDE = 256


@dataclass(frozen=True)
class DemoTask:
    """One section of the demonstration."""

    task: str
    sigma: float
    title: str

    @property
    def stem(self) -> str:
        """The name of its files."""
        return self.task + (f"-noise{self.sigma:g}" if self.sigma else "")


DEMO_TASKS = (
    DemoTask("sr4", 0.0, "a quarter of the size"),
    DemoTask("sr8", 0.0, "an eighth of the size"),
    DemoTask("sr4", 0.05, "a quarter of the size, and noise"),
    DemoTask("gauss", 0.0, "out of focus"),
    DemoTask("motion", 0.02, "camera shake, and a little noise"),
    DemoTask("inpaint92", 0.0, "92 % of the pixels lost"),
    DemoTask("strokes", 0.0, "scratches"),
    DemoTask("jpeg10", 0.0, "JPEG at quality 10"),
    DemoTask("denoise", 0.1, "strong noise"),
)


@dataclass(frozen=True)
class DemoResult:
    """One photograph, degraded and restored for one task."""

    name: str
    clean: Tensor  # (3, H, W) in [0, 1]
    before: Tensor  # the measurement at image size
    after: Tensor
    psnr: tuple[float, float]  # of the first guess from the measurement alone, and of the restored picture
    lpips: tuple[float, float]
    seconds: float


def run_demo(
    out: Path, names: tuple[str, ...] = (), model: Path | None = None, device: str = "auto", seed: int = 0
) -> Path:
    """Run the demonstration for these tasks, or for all; returns the path of its page."""
    if unknown := sorted(set(names) - {task.task for task in DEMO_TASKS}):
        known = ", ".join(dict.fromkeys(task.task for task in DEMO_TASKS))
        raise UserError(f"the demo has no task {', '.join(unknown)}; it shows {known}")
    started = time.perf_counter()
    pipe = RestorationPipeline.from_pretrained(model).to(device)
    lpips, photos = LPIPS("alex"), photographs()
    jobs = [(task, name) for task in DEMO_TASKS if not names or task.task in names for name in photos]
    console = Console(stderr=True)
    progress = track(jobs, "restoring", console=console, disable=not console.is_terminal)
    results: dict[DemoTask, list[DemoResult]] = {}
    for task, name in progress:
        results.setdefault(task, []).append(restore_one(pipe, lpips, name, photos[name], task, seed))
    out.mkdir(parents=True, exist_ok=True)
    for task, rows in results.items():
        grid([(row.clean, row.before, row.after) for row in rows]).save(out / f"{task.stem}.png")
    write_overview(out / "overview.jpg", results)
    write_page(out / "index.html", results, seed)
    Console().print(table(results))
    seconds = time.perf_counter() - started
    print(f"{len(jobs)} restorations in {seconds:.0f} s on {device_name(pipe.device)}")
    return out / "index.html"


def photographs() -> dict[str, Picture]:
    """256×256 crops of scikit-image's astronaut, coffee, cat and rocket, which are free to use."""
    from skimage import data

    corners = {"astronaut": (0, 96), "coffee": (60, 120), "cat": (20, 80), "rocket": (100, 200)}
    return {
        name: Picture(np.ascontiguousarray(getattr(data, name)()[top : top + SIDE, left : left + SIDE]))
        for name, (top, left) in corners.items()
    }


def restore_one(
    pipe: RestorationPipeline, lpips: LPIPS, name: str, photo: Picture, task: DemoTask, seed: int
) -> DemoResult:
    """Degrade a photograph, round it to 8 bits as a file does, and restore it."""
    measured = degrade(photo, task.task, task.sigma, seed, name)
    measured = Picture(quantise(measured.pixels, 8), alpha=measured.alpha)
    result = pipe(measured, task.task, sigma=task.sigma, seed=seed, names=[name])
    clean, after = photo.tensor, result.picture.tensor
    # for the guess, rounding to 8 bits is noise
    problem = make_problem(task.task, max(task.sigma, ROUNDING_8_BIT), photo.size, mask=measured.mask)
    with torch.inference_mode():
        y = to_internal(measured.tensor)[None]
        if measured.mask is not None:
            y = y * measured.mask
        before = (problem.operator.to_image(y, photo.size)[0] + 1) / 2
        guess = ((problem.operator.guess(y, problem.sigma, photo.size)[0] + 1) / 2).clamp(0, 1)
        psnrs = [float(psnr(x[None], clean[None])) for x in (guess, after)]
        distances = [float(lpips(to_internal(x)[None], to_internal(clean)[None])) for x in (guess, after)]
    return DemoResult(name, clean, before, after, (psnrs[0], psnrs[1]), (distances[0], distances[1]), result.seconds)


def grid(rows: list[tuple[Tensor, ...]]) -> PIL.Image.Image:
    """Pictures of one size in rows and columns."""
    x = torch.cat([torch.cat(row, dim=2) for row in rows], dim=1)
    return PIL.Image.fromarray(quantise(x.permute(1, 2, 0).numpy(), 8))


def write_overview(path: Path, results: dict[DemoTask, list[DemoResult]], width: int = 1600) -> None:
    """Before and after side by side: the tasks without noise in columns, the photographs in rows."""
    columns = [rows for task, rows in results.items() if not task.sigma and task.task in OVERVIEW]
    if columns:
        image = grid([tuple(x for row in rows for x in (row.before, row.after)) for rows in zip(*columns, strict=True)])
        height = round(width * image.height / image.width)
        image.resize((width, height), PIL.Image.Resampling.LANCZOS).save(path, quality=88)


def table(results: dict[DemoTask, list[DemoResult]]) -> Table:
    made = Table(title="mean over four photographs (8-bit measurements)")
    made.add_column("task")
    guess = "of the first guess"
    headings = ("noise σ", f"PSNR {guess}", "restored", f"LPIPS {guess}", "restored", "seconds each")
    for heading in headings:
        made.add_column(heading, justify="right")
    for task, rows in results.items():
        p0, p1, l0, l1, s = np.mean([[*row.psnr, *row.lpips, row.seconds] for row in rows], axis=0)
        figures = (f"{p0:.2f}", f"{p1:.2f}", f"{l0:.3f}", f"{l1:.3f}", f"{s:.1f}")
        made.add_row(task.task, f"{task.sigma:g}", *figures)
    return made


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"


def write_page(path: Path, results: dict[DemoTask, list[DemoResult]], seed: int) -> None:
    """A page that loads nothing from outside its folder, with a slider over each pair of pictures."""
    folder = path.parent / "pictures"
    folder.mkdir(exist_ok=True)
    sections = []
    for task, rows in results.items():
        figures = []
        for row in rows:
            stem = f"{row.name}-{task.stem}"
            pictures = {f"{row.name}": row.clean, f"{stem}-before": row.before, f"{stem}-after": row.after}
            for name, x in pictures.items():
                grid([(x,)]).save(folder / f"{name}.png")
            figures.append(
                f'<figure><div class="pair" style="--at:50%">'
                f'<img src="pictures/{stem}-after.png" alt="{row.name}, restored">'
                f'<img class="top" src="pictures/{stem}-before.png" alt="{row.name}, degraded">'
                f'<input type="range" min="0" max="100" value="50" aria-label="before and after"></div>'
                f"<figcaption>{row.name}: {row.psnr[1]:.1f} dB, LPIPS {row.lpips[1]:.3f}</figcaption></figure>"
            )
        noise, option = (f", σ = {task.sigma:g}", f" --sigma {task.sigma:g}") if task.sigma else ("", "")
        sections.append(
            f"<section><h2>{html.escape(task.title)} <small>{task.task}{noise}</small></h2>"
            f'<div class="row">{"".join(figures)}</div>'
            f"<code>ddc restore IN -o OUT --task {task.task}{option}</code></section>"
        )
    page = string.Template(Path(__file__).with_name("demo.html").read_text(encoding="utf-8"))
    path.write_text(page.substitute(sections="\n".join(sections), seed=seed), encoding="utf-8")
