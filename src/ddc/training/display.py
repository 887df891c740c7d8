"""What people see of a run: a bar on a terminal, plain lines elsewhere; scalars and pictures in its folder."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_ASIDE = ("step", "rate", "images_per_second")  # shown in their own way


class Display:
    """Messages and progress. With `report`, both go there as lines."""

    def __init__(self, report: Callable[[str], None] | None, on: bool = True) -> None:
        self._report, self._on = report, on
        self._bar: Any = None

    def __enter__(self) -> "Display":
        if self._on and self._report is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            bar, percent = BarColumn(bar_width=16), TextColumn("{task.percentage:3.0f} %")
            text = TextColumn("{task.description}")
            self._bar = Progress(bar, percent, text, console=Console(stderr=True))
            self._task = self._bar.add_task("starting", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        if not self._on:
            return
        if self._report is not None:
            self._report(text)
        elif self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, figures: dict[str, float], share: float, seconds_left: float) -> None:
        terms = "  ".join(f"{k} {v:.4g}" for k, v in figures.items() if k not in _ASIDE)
        step, speed = f"step {figures['step']:.0f}", f"{figures['images_per_second']:.0f} images/s"
        left = f"{duration(seconds_left)} left" if seconds_left < 1e7 else ""
        rate = f"rate {figures['rate']:.2e}"
        if self._bar is not None:
            # what does not fit beside the bar is cut at its end, where the least wanted terms stand
            text = "  ".join([step, left, speed, terms, rate])[: max(self._bar.console.width - 26, 20)]
            self._bar.update(self._task, completed=min(share, 1.0), description=text)
        else:
            self.say("  ".join([step, terms, rate, speed, left]).rstrip())


def duration(seconds: float) -> str:
    minutes = max(seconds, 0) / 60
    if minutes < 2:
        return f"{max(seconds, 0):.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


class Log:
    """One JSON object a line in log.jsonl, and TensorBoard's scalars where it is installed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "logs"))
        except ImportError:
            pass

    def write(self, figures: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(figures) + "\n")
        if self._writer is not None:
            for key, value in figures.items():
                if key != "step":
                    self._writer.add_scalar(key, value, int(figures["step"]))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def write_grid(path: Path, rows: list[Tensor]) -> None:
    """Pictures in [-1, 1] as one PNG: a row for each, two grey pixels between them."""
    count, _, height, width = rows[0].shape
    gap = 2
    sheet = np.full((len(rows) * (height + gap) - gap, count * (width + gap) - gap, 3), 128, np.uint8)
    for r, row in enumerate(rows):
        pixels = ((row.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
        for c, one in enumerate(pixels.cpu().numpy()):
            top, left = r * (height + gap), c * (width + gap)
            sheet[top : top + height, left : left + width] = one
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet).save(path)
