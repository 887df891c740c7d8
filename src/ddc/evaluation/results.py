"""The folder of a run: measured rows, the protocol that they share, kept pictures, and the results.

Each finished row is one line of `rows-*.jsonl`; it is written at once and never measured again. `protocol.json` states
what all rows have in common. So an interrupted evaluation can continue at any time, with another number of processes
and on another computer, and a finished folder needs neither the models nor the device that it was measured with.

Results are means with confidence intervals, distances between sets of pictures, and paired differences.
"""

import base64
import csv
import json
import math
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddc import __version__
from ddc.errors import UserError
from ddc.evaluation.metrics import Array
from ddc.images import Picture
from ddc.solvers import SOLVERS

Row = dict[str, Any]
Key = tuple[Any, ...]
KEY = ("model", "task", "sigma", "solver", "steps")
WORST = 3  # pictures kept of the worst results of a case
# what the protocol says about the columns
EXPLANATIONS = {
    "seeds": "masks, measurement noise and sampling noise depend on the seed and the image's name; equal for all solvers",
    "measurement": "floating point, not rounded to 8 bits; sigma in [0, 1] units",
    "output": "clipped to [0, 1], not rounded",
    "psnr_ci": "half the width of the 95 % confidence interval of the mean (Student's t)",
    "ssim": "scikit-image's default, data range 1; ssim_paper with data range 2, as in the paper's tables",
    "consistency": "RMS of A x − y over observed values, relative to sigma; if sigma is 0, in [0, 1] units",
    "fd_vgg16": "Fréchet distance of position averages of VGG16's relu5_3; it falls with n, so compare equal n",
    "seconds": "median per image of the solver alone, at the batch size",
}
# What is averaged over images, and whether more of it is better
HIGHER_IS_BETTER = {"psnr": True, "ssim": True, "ssim_paper": True, "lpips": False, "lpips_vgg": False}
AVERAGED = (*HIGHER_IS_BETTER, "consistency")
SETS = {"fd_vgg16": False, "fid": False}  # distances between sets of pictures
COLUMNS = (
    *(*KEY, "n", "psnr", "psnr_ci", "ssim", "ssim_paper", "lpips", "lpips_vgg", "consistency", "fd_vgg16"),
    *("nfe", "seconds"),
)
# column → heading, decimals
FIGURES = {
    "psnr": ("PSNR ↑", 2),
    "ssim": ("SSIM ↑", 3),
    "ssim_paper": ("SSIM (range 2) ↑", 3),
    "lpips": ("LPIPS ↓", 3),
    "lpips_vgg": ("LPIPS-VGG16 ↓", 3),
    "fd_vgg16": ("FD-VGG16 ↓", 1),
    "fid": ("FID ↓", 1),
    "consistency": ("‖Ax−y‖/σ", 3),
    "spread": ("spread", 3),
    "nfe": ("evaluations", 0),
    "seconds": ("s/image", 3),
}


def key_of(row: Row) -> Key:
    return tuple(row[name] for name in KEY)


def solver_order(label: str) -> int:
    """The place of a solver in every table."""
    return list(SOLVERS).index(label.partition(":")[0])


def pack(feature: Array) -> str:
    return base64.b64encode(feature.astype(np.float16).tobytes()).decode()


def unpack(text: str) -> Array:
    return np.frombuffer(base64.b64decode(text), np.float16).astype(np.float64)


def read_rows(folder: Path) -> tuple[list[Row], dict[str, Row]]:
    """The measured rows of a run, and the truths by image; a row that two processes measured counts once."""
    rows: dict[Key, Row] = {}
    truths: dict[str, Row] = {}
    for path in sorted(folder.glob("rows-*.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is incomplete
            try:
                row = json.loads(line)
            except ValueError:
                raise UserError(f"line {number} of {path} is damaged; delete it, and it is measured again") from None
            if "truth" in row:
                truths.setdefault(row["truth"], row)
            else:
                rows.setdefault((*key_of(row), row["image"]), row)
    return list(rows.values()), truths


def read_protocol(folder: Path) -> dict[str, Any]:
    """What all rows of a run have in common; empty if nothing was measured yet."""
    path = folder / "protocol.json"
    protocol: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return protocol


def recorded_models(folder: Path) -> dict[str, str]:
    """The fingerprints of the models that a run was measured with."""
    return {name: model["sha256"] for name, model in read_protocol(folder).get("models", {}).items()}


class RunFolder:
    """All rows of a run, its protocol, and this process's own file to append to."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank = folder, rank
        self.rows, self.truths = read_rows(folder)
        self.done = {(*key_of(row), row["image"]) for row in self.rows}

    def __enter__(self) -> "RunFolder":
        path = self.folder / f"rows-{self.rank}.jsonl"
        if path.exists():  # remove an incomplete last line before the next is added
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                path.write_bytes(whole)
        self.file = path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.rows += [row for row in rows if "image" in row]

    def check(self, fixed: dict[str, Any], models: Mapping[str, str], parts: dict[str, str]) -> None:
        """Refuse other settings or weights than those of the rows here, which could not be compared.

        The computer may be another one.
        """
        old = read_protocol(self.folder)
        before, known = old.get("parts", {}), recorded_models(self.folder)
        differences = [f"{k} {old[k]} (now {fixed[k]})" for k in fixed if old and old.get(k) != fixed[k]]
        differences += [
            f"model {name}: other weights"
            for name, now in models.items()
            if name in known and not self._same_for_rows(name, known[name], now)
        ]
        differences += [f"{name}: other weights" for name in parts if before.get(name, parts[name]) != parts[name]]
        if differences:
            raise UserError(f"{self.folder} was measured with {', '.join(differences)}; use another --out")

    def _same_for_rows(self, model: str, before: str, now: str) -> bool:
        """Whether a model's rows would be the same now. Those of solvers that use its prior alone stay valid when
        its network changes."""
        if before == now:
            return True
        used = {row["solver"].partition(":")[0] for row in self.rows if row["model"] == model}
        without = all("network" not in SOLVERS[name].needs for name in used)
        return without and before.rpartition("-")[2] == now.rpartition("-")[2]

    def save_protocol(self, changes: dict[str, Any], **added: Any) -> None:
        """Update protocol.json. `added` extends the lists and tables that are there: models, parts, hardware, …"""
        protocol = read_protocol(self.folder) | changes
        for name, value in added.items():
            if isinstance(value, dict):
                protocol[name] = protocol.get(name, {}) | value
            else:
                protocol[name] = list(dict.fromkeys([*protocol.get(name, []), *value]))
        path = self.folder / "protocol.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(protocol, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.replace(path)


def machine(device: torch.device, compiled: bool) -> str:
    """The hardware that rows were measured on, and the versions."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    versions = f"ddc {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{name} ({versions}{', compiled' if compiled else ''})"


# ---------------------------------------------------------------------------------------------------------
# pictures


def picture_paths(run: Path, row: Row) -> tuple[Path, Path, Path]:
    """The files of the restored picture, the truth and the measurement of a row."""
    folder, setting = run / "pictures", f"{row['task']}-{row['sigma']:g}"
    case = f"{row['solver']}-{row['steps']}".replace(":", "-").replace("=", "-")
    file = row["image"].replace("/", "_").replace("\\", "_")
    file = file if file.endswith(".png") else f"{file}.png"
    return (
        folder / row["model"] / setting / case / file,
        folder / "truth" / file,
        folder / "y" / setting / file,
    )


class Gallery:
    """Keeps the pictures of one case for the report: those in `keep`, and the `worst` ones by LPIPS so far."""

    def __init__(self, run: RunFolder, key: Key, keep: set[str], worst: int, writer: Executor) -> None:
        self.folder, self.keep, self.count, self.writer = run.folder, keep, worst, writer
        self.lpips = {row["image"]: row["lpips"] for row in run.rows if key_of(row) == key}

    def offer(self, rows: Sequence[Row], pictures: Iterable[Sequence[Tensor]]) -> list["Future[None]"]:
        """Hand what is kept to the writer: (restored, truth, measurement) of each row. Others are deleted again."""
        before = self.worst()
        self.lpips |= {row["image"]: row["lpips"] for row in rows}
        after = self.worst()
        jobs = []
        for row, kinds in zip(rows, pictures, strict=True):
            if row["image"] in self.keep | after:
                paths = picture_paths(self.folder, row)
                jobs.append(self.writer.submit(_write_pictures, paths, [kind.cpu() for kind in kinds]))
        for loser in before - after - self.keep:
            path, *_ = picture_paths(self.folder, rows[0] | {"image": loser})
            jobs.append(self.writer.submit(path.unlink, missing_ok=True))
        return jobs

    def worst(self) -> set[str]:
        return set(sorted(self.lpips, key=self.lpips.__getitem__, reverse=True)[: self.count])


def _write_pictures(paths: Sequence[Path], pictures: Sequence[Tensor]) -> None:
    """The restored picture; the truth and the measurement if another case did not write them yet."""
    for i, (path, picture) in enumerate(zip(paths, pictures, strict=True)):
        if i == 0 or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Picture.from_tensor(picture.clamp(0, 1), bits=8).write(path)


# ---------------------------------------------------------------------------------------------------------
# results


def half_width(values: Iterable[float]) -> float | None:
    """Half of the 95 % confidence interval of the mean, by Student's t; None for a single value."""
    from scipy.special import stdtrit

    sample = np.asarray(list(values), dtype=np.float64)
    if len(sample) < 2:
        return None
    return float(stdtrit(len(sample) - 1, 0.975) * sample.std(ddof=1) / math.sqrt(len(sample)))


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows by task and noise, as they were first measured, and there in the order of the solvers."""
    rows = list(rows)
    settings = list(dict.fromkeys((row["task"], row["sigma"]) for row in rows))
    places = {setting: place for place, setting in enumerate(settings)}
    return sorted(rows, key=lambda row: (places[row["task"], row["sigma"]], solver_order(row["solver"])))


def group_rows(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    groups: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key_of(row)].append(row)
    return dict(groups)


def summarise(rows: list[Row], truths: dict[str, Row]) -> list[Row]:
    """One row for each (model, task, sigma, solver, steps), with the keys of `COLUMNS`, and "fid" and "spread" if they
    were measured."""
    out = []
    for key, group in group_rows(rows).items():
        row: Row = dict(zip(KEY, key, strict=True)) | {"n": len(group)}
        for name in (*AVERAGED, "spread"):
            values = [r[name] for r in group if r.get(name) is not None]
            if values or name != "spread":
                row[name] = float(np.mean(values)) if values else None
        row["psnr_ci"] = half_width(r["psnr"] for r in group)
        for name in SETS:
            both = [
                (r["features"][name], truths[r["image"]]["features"][name])
                for r in group
                if name in r["features"] and name in truths[r["image"]]["features"]
            ]
            if len(both) > 1:
                a, b = (np.stack([unpack(text) for text in side]) for side in zip(*both, strict=True))
                row[name] = frechet_distance(a, b)
            elif name == "fd_vgg16":
                row[name] = None
        row["nfe"] = group[0]["nfe"]
        row["seconds"] = float(np.median([r["seconds"] for r in group]))
        out.append({k: row[k] for k in COLUMNS} | {k: v for k, v in row.items() if k not in COLUMNS})
    return out


def frechet_distance(a: Array, b: Array) -> float:
    """The Fréchet distance of two Gaussians fitted to the rows of a (n, d) and b (m, d):
    ‖μ_a − μ_b‖² + tr(C_a + C_b − 2 (C_a C_b)^½)."""
    if min(len(a), len(b)) < 2:
        raise UserError(f"a Fréchet distance needs at least 2 pictures in each set, not {min(len(a), len(b))}")
    a, b = a.astype(np.float64), b.astype(np.float64)
    return frechet_of_moments(a.mean(0), np.cov(a, rowvar=False), b.mean(0), np.cov(b, rowvar=False))


def frechet_of_moments(mean_a: Array, cov_a: Array, mean_b: Array, cov_b: Array) -> float:
    # tr (C_a C_b)^½ = tr (R C_b R)^½ with R = C_a^½: symmetric, so that eigh can be used, even if n < d
    cov_a, cov_b = np.atleast_2d(cov_a), np.atleast_2d(cov_b)
    values, vectors = np.linalg.eigh(cov_a)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ cov_b @ root).clip(min=0)).sum()
    distance = ((mean_a - mean_b) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * cross
    return max(float(distance), 0.0)


def paired_differences(rows: list[Row]) -> list[Row]:
    """For each task, noise and metric: every case minus the best one, image by image, with its confidence interval.

    The best is one of those with the most images, because the mean of a few says little.
    """
    groups = group_rows(rows)
    out = []
    for setting in dict.fromkeys(key[1:3] for key in groups):
        for metric, higher in HIGHER_IS_BETTER.items():
            values = {
                key: {r["image"]: r[metric] for r in group if r.get(metric) is not None}
                for key, group in groups.items()
                if key[1:3] == setting
            }
            values = {key: column for key, column in values.items() if column}
            if len(values) < 2:
                continue
            sign = 1 if higher else -1
            best = max(values, key=lambda k: (len(values[k]), sign * float(np.mean(list(values[k].values())))))
            for key, column in values.items():
                differences = [v - values[best][image] for image, v in column.items() if image in values[best]]
                if key != best and differences:
                    out.append(
                        dict(zip(KEY, key, strict=True))
                        | {"metric": metric, "best": case_name(best), "n": len(differences)}
                        | {"difference": float(np.mean(differences)), "ci": half_width(differences)}
                    )
    return out


def method_name(row: Row, summary: list[Row]) -> str:
    """What tables and plots call a row: its solver, and its model if several models ran that solver."""
    models = {other["model"] for other in summary if other["solver"] == row["solver"]}
    return f"{row['solver']} ({row['model']})" if len(models) > 1 else str(row["solver"])


def case_name(key: Key) -> str:
    model, _, _, solver, steps = key
    return f"{solver} ({model}, {steps} steps)"


@dataclass(frozen=True)
class Results:
    """The rows of a run, their summary and paired differences, and the protocol."""

    rows: list[Row]
    summary: list[Row]
    paired: list[Row]
    protocol: dict[str, Any]


def read_results(run: Path, keys: Collection[Key] | None = None) -> Results:
    """The results of some cases of a run, or of all."""
    rows, truths = read_rows(run)
    rows = in_order(row for row in rows if keys is None or key_of(row) in keys)
    if not rows:
        raise UserError(f"{run} has no measured rows to report; run `ddc evaluate --out {run}` first")
    protocol = read_protocol(run) | {"batch_size": batch_sizes(rows)}
    return Results(rows, summarise(rows, truths), paired_differences(rows), protocol)


def write_results(run: Path, results: Results) -> None:
    """Write results.json, results.csv, rows.csv and paired.csv into the run's folder."""
    tables = {"rows": results.summary, "protocol": results.protocol}
    text = json.dumps(tables, indent=1, ensure_ascii=False, allow_nan=False)
    (run / "results.json").write_text(text + "\n", encoding="utf-8")
    write_csv(run / "results.csv", results.summary)
    write_csv(run / "paired.csv", results.paired)
    hidden = {"features", "kurtosis"}
    write_csv(run / "rows.csv", [{k: v for k, v in row.items() if k not in hidden} for row in results.rows])


def batch_sizes(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Batch size → the methods that were mostly run with it. Seconds per image depend on it."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for row in rows:
        counts[row["solver"]][row["batch"]] += 1
    usual = {method: sizes.most_common(1)[0][0] for method, sizes in counts.items()}
    return {str(size): [m for m in usual if usual[m] == size] for size in sorted(set(usual.values()))}


def write_csv(path: Path, rows: list[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
