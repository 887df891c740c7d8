"""What the page shows of a result: arrays (h, w, 3) of uint8 that are small enough for a browser, and the commands and
the Python code that do the same."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from torch import Tensor

from ddc.images import Picture, quantise
from ddc.jobs import Options
from ddc.pipeline import default_solver
from ddc.problems import DETECTED, Task
from ddc.solvers.base import make_solver
from ddc.web.controls import Choices, Trial

Array = np.ndarray[Any, np.dtype[Any]]

VIEW = 1600  # pixels; a longer picture is shown smaller, but downloaded in full
# black, indigo, red, orange, pale yellow: the brightness increases, which colour-blind people can see as well
HEAT = np.array([(0, 0, 4), (66, 10, 104), (188, 55, 84), (249, 142, 9), (252, 255, 164)], np.float32)


def view(picture: Picture, longest: int = VIEW) -> Array:
    """The picture, reduced to at most this many pixels on its longest side."""
    share = min(1.0, longest / max(picture.size))
    height, width = (max(1, round(side * share)) for side in picture.size)
    return resized(np.ascontiguousarray(quantise(picture.pixels, 8)), height, width)


def resized(
    pixels: Array, height: int, width: int, method: PIL.Image.Resampling = PIL.Image.Resampling.BICUBIC
) -> Array:
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(PIL.Image.fromarray(pixels).resize((width, height), method))


def heat_map(std: Tensor) -> Array:
    """(3, H, W) → (H, W, 3): black where the samples agree, pale yellow where they differ most."""
    level = std.mean(0).numpy()
    level = (level / max(heat_maximum(std), 1e-6)).clip(0, 1) * (len(HEAT) - 1)
    below = np.minimum(level.astype(int), len(HEAT) - 2)
    part = (level - below)[..., None]
    return np.rint(HEAT[below] * (1 - part) + HEAT[below + 1] * part).astype(np.uint8)


def heat_maximum(std: Tensor) -> float:
    """The standard deviation that the palest colour stands for; one pixel in two hundred has more."""
    return float(np.quantile(std.mean(0).numpy(), 0.995))


def busiest(pixels: Array, side: int) -> tuple[int, int]:
    """The top and the left of the window with most detail, of that many pixels or as many as there are."""
    step = max(1, min(pixels.shape[:2]) // 256)  # so that a large picture takes no longer
    grey = pixels[::step, ::step].astype(np.float32).mean(2)
    detail = np.zeros_like(grey)
    detail[1:, 1:] = np.abs(grey[1:, 1:] - grey[:-1, 1:]) + np.abs(grey[1:, 1:] - grey[1:, :-1])
    total = np.pad(detail.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    height, width = (min(max(side // step, 1), length) for length in grey.shape)
    inside = total[height:, width:] - total[:-height, width:] - total[height:, :-width] + total[:-height, :-width]
    top, left = np.unravel_index(inside.argmax(), inside.shape)
    return int(top) * step, int(left) * step


def result_name(name: str, format: str = "png") -> str:
    return f"{Path(name).stem}_restored.{format}"


def command_line(name: str, choices: Choices, mask: bool) -> str:
    """The command that gives the same pixels."""
    return _command("restore", name, result_name(name, choices.format), _stated(choices.task, choices.options, mask))


def python_code(name: str, choices: Choices, mask: bool) -> str:
    """The Python code that gives the same pixels."""
    stated = _stated(choices.task, choices.options, mask)
    arguments = ", ".join([repr(name), *(f"{key}={value!r}" for key, value in stated.items())])
    picture = "mean[0]" if choices.samples > 1 else "picture"
    return "\n".join(
        [
            "from ddc import RestorationPipeline",
            "",
            'pipe = RestorationPipeline.from_pretrained().to("auto")',
            f"result = pipe({arguments})",
            f"result.{picture}.write({result_name(name, choices.format)!r})",
        ]
    )


def trial_commands(trial: Trial, results: list[str]) -> str:
    """The commands that degrade clean.png and write the restored pictures under these names."""
    degradation: Options = {"sigma": trial.sigma, "seed": trial.seed}
    lines = [_command("degrade", "clean.png", "measured.npy", _stated(trial.task, degradation))]
    for result, options in zip(results, trial.options, strict=True):
        lines.append(_command("restore", "measured.npy", result, _stated(trial.task, options)))
    return "\n".join(lines)


def _stated(task: str, options: Options, mask: bool = False) -> dict[str, Any]:
    """The task and the options that differ from their defaults."""
    # without --sigma, `ddc restore` estimates the noise of other tasks than these, at least where it is noticeable
    sigma = 0.0 if task in DETECTED or Task.parse(task).family in ("inpaint", "jpeg") else None
    usual = default_solver(None)
    steps = make_solver(options.get("solver", usual)).steps
    defaults = {"sigma": sigma, "solver": usual, "steps": steps, "seed": 0, "samples": 1, "strength": "medium"}
    stated = {key: value for key, value in options.items() if key not in defaults or value != defaults[key]}
    return {"task": task, **stated, **({"mask": "mask.png"} if mask else {})}


def _command(command: str, source: str, target: str, options: dict[str, Any]) -> str:
    words = ["ddc", command, source, "-o", target]
    for key, value in options.items():
        words += (
            [f"--{key}"] if value is True else [f"--{key}", f"{value:g}" if isinstance(value, float) else str(value)]
        )
    return shlex.join(words)
