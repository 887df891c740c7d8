"""Results of a run: means with confidence intervals, distances between sets of pictures, and paired differences."""

import csv
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddc.errors import UserError
from ddc.evaluation.reference import Reference, read_reference
from ddc.evaluation.run import KEY, Key, Row, key_of, read_protocol, read_rows, solver_order, unpack
from ddc.perceptual import Array

# What is averaged over images, and whether more of it is better
HIGHER_IS_BETTER = {
    **{"psnr": True, "ssim": True, "ssim_paper": True},
    **{"lpips": False, "lpips_vgg": False, "dists": False, "identity": False},
}
AVERAGED = (*HIGHER_IS_BETTER, "consistency")
SAMPLED = {"crps": False, "psnr_mean": True}  # of several samples
SETS = {"fd_vgg16": False, "fid_truth": False, "fid": False}  # distances between sets of pictures
FEATURES = {"fd_vgg16": "fd_vgg16", "fid_truth": "fid"}  # those to the true pictures, and of which features
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
    "dists": ("DISTS ↓", 3),
    "identity": ("identity ↓", 3),
    "fd_vgg16": ("FD-VGG16 ↓", 1),
    "fid": ("FID ↓", 1),
    "fid_truth": ("FID to the truth ↓", 1),
    "consistency": ("‖Ax−y‖/σ", 3),
    "crps": ("CRPS ↓", 4),
    "psnr_mean": ("PSNR of the mean ↑", 2),
    "spread": ("spread", 3),
    "ratio": ("spread·√2/RMSE", 2),
    "coverage": ("within 90 %", 3),
    "hole_spread": ("spread in holes", 3),
    "hole_ratio": ("ratio in holes", 2),
    "nfe": ("evaluations", 0),
    "seconds": ("s/image", 3),
}


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


def summarise(rows: list[Row], truths: dict[str, Row], reference: Reference | None = None) -> list[Row]:
    """One row for each (model, task, sigma, solver, steps), with the keys of `COLUMNS`, and "fid" and "spread" if they
    were measured."""
    out = []
    for key, group in group_rows(rows).items():
        row: Row = dict(zip(KEY, key, strict=True)) | {"n": len(group)}
        for name in (*AVERAGED, *SAMPLED, "spread", "coverage", "hole_spread"):
            values = [r[name] for r in group if r.get(name) is not None]
            if values or name in COLUMNS:
                row[name] = float(np.mean(values)) if values else None
        for name, part in (("ratio", ""), ("hole_ratio", "hole_")):
            both = [(r[f"{part}spread"], r[f"{part}rmse"]) for r in group if r.get(f"{part}rmse")]
            if both:
                variance, error = np.mean(np.square(both), axis=0)
                row[name] = float(np.sqrt(2 * variance / error))
        row["psnr_ci"] = half_width(r["psnr"] for r in group)
        row |= distances(group, truths, reference)
        row["nfe"] = group[0]["nfe"]
        row["seconds"] = float(np.median([r["seconds"] for r in group]))
        out.append({k: row[k] for k in COLUMNS} | {k: v for k, v in row.items() if k not in COLUMNS})
    return out


def distances(group: list[Row], truths: dict[str, Row], reference: Reference | None) -> Row:
    """The distances of a case's pictures, as a set, to the true ones, and to the reference."""
    found: Row = {"fd_vgg16": None}
    for name, kind in FEATURES.items():
        both = [
            (r["features"][kind], truths[r["image"]]["features"][kind])
            for r in group
            if kind in r["features"] and kind in truths.get(r["image"], {}).get("features", {})
        ]
        if len(both) < 2:
            continue
        if len({len(text) for pair in both for text in pair}) > 1:
            raise UserError(
                f"the features {kind} of {case_name(key_of(group[0]))} have different lengths in rows-*.jsonl"
            )
        a, b = (np.stack([unpack(text) for text in side]) for side in zip(*both, strict=True))
        found[name] = frechet_distance(a, b)
        if reference is not None and kind == "fid":
            found["fid"] = reference.distance(a)
    return found


def frechet_distance(a: Array, b: Array) -> float:
    """The Fréchet distance of two Gaussians fitted to the rows of a (n, d) and b (m, d):
    ‖μ_a − μ_b‖² + tr(C_a + C_b − 2 (C_a C_b)^½)."""
    if min(len(a), len(b)) < 2:
        raise UserError(f"a Fréchet distance needs at least 2 pictures in each set, not {min(len(a), len(b))}")
    return Reference.of(b).distance(a)


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
    return Results(rows, summarise(rows, truths, read_reference(run)), paired_differences(rows), protocol)


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
