"""From rows to results: means with confidence intervals, distances between sets, paired differences."""

import csv
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ddc.evaluation.benchmark import KEY, Row, read_protocol, read_rows, solver_order, unpack
from ddc.evaluation.metrics import frechet_distance

# What is averaged over images, and whether more of it is better. The rest of a row is bookkeeping.
HIGHER_IS_BETTER = {"psnr": True, "ssim": True, "ssim_paper": True, "lpips": False, "lpips_vgg": False}
AVERAGED = (*HIGHER_IS_BETTER, "consistency")
SETS = {"fd_vgg16": False, "fid": False}  # distances between sets of pictures
COLUMNS = (
    *(*KEY, "n", "psnr", "psnr_ci", "ssim", "ssim_paper", "lpips", "lpips_vgg", "consistency", "fd_vgg16"),
    *("nfe", "seconds"),
)


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


def group_rows(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[k] for k in KEY)].append(row)
    return dict(groups)


def summarise(rows: list[Row], truths: dict[str, Row]) -> list[Row]:
    """One row for each (model, task, sigma, solver, steps), with the keys of `COLUMNS`; "fid" as well, and
    "spread", where they were measured."""
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


def paired_differences(rows: list[Row]) -> list[Row]:
    """For each task, noise and metric: every case minus the best one, image by image, with its interval. The best is
    one of those with the most images: the mean of a few says little."""
    groups = group_rows(rows)
    out = []
    settings = dict.fromkeys((key[1], key[2]) for key in groups)
    for task, sigma in settings:
        here = {key: group for key, group in groups.items() if (key[1], key[2]) == (task, sigma)}
        for metric, higher in HIGHER_IS_BETTER.items():
            values = {
                key: {r["image"]: r[metric] for r in group if r.get(metric) is not None}
                for key, group in here.items()
            }
            values = {key: column for key, column in values.items() if column}
            if len(values) < 2:
                continue
            mean = {key: float(np.mean(list(column.values()))) for key, column in values.items()}
            most = max(len(column) for column in values.values())
            full = [key for key, column in values.items() if len(column) == most]
            best = (max if higher else min)(full, key=mean.__getitem__)
            for key, column in values.items():
                shared = [image for image in column if image in values[best]]
                if key == best or not shared:
                    continue
                differences = [column[image] - values[best][image] for image in shared]
                out.append(
                    dict(zip(KEY, key, strict=True))
                    | {"metric": metric, "best": case_name(best), "n": len(shared)}
                    | {"difference": float(np.mean(differences)), "ci": half_width(differences)}
                )
    return out


def case_name(key: tuple[Any, ...]) -> str:
    model, _, _, solver, steps = key
    return f"{solver} ({model}, {steps} steps)"


def chosen_rows(
    run: Path, keys: Collection[tuple[Any, ...]] | None = None
) -> tuple[list[Row], dict[str, Row]]:
    """The rows of some cases of a run, or of all, in order; and the truths."""
    rows, truths = read_rows(run)
    return in_order(row for row in rows if keys is None or tuple(row[k] for k in KEY) in keys), truths


def write_results(
    run: Path, keys: Collection[tuple[Any, ...]] | None = None
) -> tuple[list[Row], list[Row], list[Row]]:
    """results.json, results.csv, rows.csv and paired.csv of a run. Returns its rows, summary and differences."""
    rows, truths = chosen_rows(run, keys)
    protocol = protocol_of(run, rows)
    summary, paired = summarise(rows, truths), paired_differences(rows)
    text = json.dumps({"rows": summary, "protocol": protocol}, indent=1, ensure_ascii=False, allow_nan=False)
    (run / "results.json").write_text(text + "\n", encoding="utf-8")
    write_csv(run / "results.csv", summary)
    write_csv(run / "paired.csv", paired)
    hidden = {"features", "kurtosis"}
    write_csv(run / "rows.csv", [{k: v for k, v in row.items() if k not in hidden} for row in rows])
    return rows, summary, paired


def protocol_of(run: Path, rows: Iterable[Row]) -> dict[str, Any]:
    """The protocol of some rows of a run."""
    return read_protocol(run) | {"batch_size": batch_sizes(rows)}


def batch_sizes(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Batch size → the methods whose pictures were mostly restored so: parts of a run can be measured in their own
    ways, and seconds are those of a batch, divided."""
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
