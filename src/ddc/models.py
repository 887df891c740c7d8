"""Model folders: where a model's prior lies, the networks that some solvers need beside it, and fingerprints."""

import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT
from ddc.posterior import PosteriorDenoiser
from ddc.problems import Problem
from ddc.solvers.base import Solver
from ddc.solvers.bridge import Bridge
from ddc.solvers.dncnn import DnCNN

logger = logging.getLogger("ddc")

PARTS = {
    "bridge": "i2sb-{task}",
    "denoiser": "dncnn",
    "posterior": "posterior",
}  # the folders of networks that solvers need beside the model


def part_names(solver: Solver, task: str) -> list[str]:
    """The folder names of the networks that a solver needs for a task beside the model's own."""
    return [PARTS[need].format(task=task) for need in solver.needs if need in PARTS]


def find_part(name: str, model: str | Path | None) -> Path | None:
    """The folder of a solver's own network: in the model's folder, beside it, in the package, or in the repository
    that the package is used from."""
    package = Path(__file__).parent
    places = [package / "models", package.parents[1] / "models"]
    if model is not None:
        places = [Path(model), Path(model).absolute().parent, *places]
    return next((place / name for place in places if (place / name / "config.json").is_file()), None)


def load_parts(solver: Solver, model: str | Path | None, problem: Problem) -> dict[str, Any]:
    """The networks that a solver needs for a problem beside the prior and the model's own network."""
    parts: dict[str, Any] = {}
    how = {"bridge": f"i2sb --task {problem.name}", "denoiser": "dncnn", "posterior": "posterior"}
    kinds: dict[str, Any] = {"bridge": Bridge, "denoiser": DnCNN, "posterior": PosteriorDenoiser}
    for need, training in how.items():
        if need in solver.needs:
            folder = find_part(PARTS[need].format(task=problem.name), model)
            if folder is None:
                message = f"{solver.name} needs a {need} network for {problem.name}; none was found"
                raise UserError(f"{message}. Train one with `ddc train {training}`")
            parts[need] = kinds[need].from_pretrained(folder)
    if "bridge" in parts:
        _warn_of_noise(parts["bridge"], problem)
    return parts


def _warn_of_noise(bridge: Bridge, problem: Problem) -> None:
    noise = float(torch.as_tensor(problem.sigma_y).max())
    if noise > max(bridge.sigma_max, ROUNDING_8_BIT):
        logger.warning(
            "the bridge network for %s was trained on measurements with noise of at most %g, not %g, and will "
            "take noise for part of the picture; use the solver ddc, or `ddc train i2sb --sigma-max %g`",
            problem.name,
            bridge.sigma_max,
            noise,
            noise,
        )


def weight_files(folder: Path) -> dict[str, Path]:
    """The configurations and weights of a folder's networks, by their names in it."""
    settings = {"config.json", "scheduler_config.json"}
    found = (Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names)
    files = sorted(path for path in found if path.name in settings or path.suffix == ".safetensors")
    return {path.relative_to(folder).as_posix(): path for path in files}


def fingerprint(files: dict[str, Path]) -> str:
    """A hash of files and their names."""
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def parameter_count(files: Iterable[Path]) -> float:
    """Millions of numbers in the safetensors among files."""
    from safetensors import safe_open

    total = 0
    for path in (path for path in files if path.suffix == ".safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(int(np.prod(file.get_slice(key).get_shape())) for key in file.keys())  # noqa: SIM118
    return round(total / 1e6, 2)
