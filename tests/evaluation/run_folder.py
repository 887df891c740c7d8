"""A run folder with known rows, for the tests of the results and of the report."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ddc.evaluation.run import Row, pack, picture_paths

IMAGES = ("a.png", "b.png", "c.png", "d.png", "e.png")
# solver → PSNR and LPIPS of each image
VALUES = {
    "ddc": ((30.0, 31.0, 32.0, 33.0, 34.0), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "ddnm": ((29.0, 30.5, 30.0, 32.0, 33.0), (0.2, 0.1, 0.3, 0.4, 0.7)),
    "pinv": ((20.0, 21.0, 22.0, 23.0, 24.0), (0.6, 0.6, 0.6, 0.6, 0.6)),
}
SHAPES = {"ddc": (5, 10, 0.5), "ddnm": (100, 100, 4.0), "pinv": (1, 0, 0.001)}  # steps, evaluations, seconds
PROTOCOL: dict[str, Any] = {
    "seed": 0,
    "size": [80, 80],
    "models": {"tiny": {"sha256": "0123-4567", "millions": 1.5, "name": "tiny"}},
    "hardware": ["A test computer"],
}


def make_row(solver: str, number: int, **changes: Any) -> Row:
    psnr, lpips = VALUES[solver]
    steps, nfe, seconds = SHAPES[solver]
    row: Row = {"model": "tiny", "task": "sr4", "sigma": 0.05, "solver": solver, "steps": steps}
    row |= {"image": IMAGES[number], "psnr": psnr[number], "ssim": psnr[number] / 40}
    row |= {"ssim_paper": psnr[number] / 36, "lpips": lpips[number], "consistency": 1.0}
    row |= {"nfe": nfe, "seconds": seconds * (1 + number), "batch": 1}
    shift = {"ddc": 0.0, "ddnm": 1.0, "pinv": 2.0}[solver]
    return row | {"features": {"fid": pack(feature(number) + shift)}} | changes


def feature(number: int) -> np.ndarray[Any, np.dtype[Any]]:
    return np.array([float(number), number % 2, 1.0])


def write_run(folder: Path, rows: list[Row] | None = None) -> list[Row]:
    """Write a run folder: five images, three solvers, with the pictures of the first two images."""
    rows = [make_row(solver, i) for solver in VALUES for i in range(5)] if rows is None else rows
    truths = [{"truth": name, "checksum": i, "features": {"fid": pack(feature(i))}} for i, name in enumerate(IMAGES)]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in [*truths, *rows]]
    (folder / "rows-0.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "protocol.json").write_text(json.dumps(PROTOCOL), encoding="utf-8")
    for row in rows:
        if row["image"] in IMAGES[:2]:
            for path in picture_paths(folder, row):
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = np.random.default_rng(len(str(path))).integers(0, 256, (80, 80, 3), np.uint8)
                Image.fromarray(pixels).save(path)
    return rows


def without_pictures(html: str) -> str:
    """A page without the letters of its pictures, which may be any."""
    return re.sub(r"data:image/[^\"']*", "", html)
