"""The commands and the Python code that do what the page did."""

import shlex
from pathlib import Path
from typing import Any

from ddc.jobs import Options
from ddc.solvers.base import make_solver
from ddc.web.controls import Choices, Trial


def result_name(name: str) -> str:
    return f"{Path(name).stem}_restored.png"


def command_line(name: str, choices: Choices, mask: bool) -> str:
    """The command that gives the same pixels."""
    return _command("restore", name, result_name(name), _stated(choices.task, choices.options, mask))


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
            f"result.{picture}.write({result_name(name)!r})",
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
    # without --sigma, `ddc restore` estimates the noise of the task denoise
    sigma = None if task == "denoise" else 0.0
    steps = make_solver(options.get("solver", "ddc")).steps
    defaults = {"sigma": sigma, "solver": "ddc", "steps": steps, "seed": 0, "samples": 1}
    stated = {key: value for key, value in options.items() if value != defaults[key]}
    return {"task": task, **stated, **({"mask": "mask.png"} if mask else {})}


def _command(command: str, source: str, target: str, options: dict[str, Any]) -> str:
    words = ["ddc", command, source, "-o", target]
    for key, value in options.items():
        words += [f"--{key}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
