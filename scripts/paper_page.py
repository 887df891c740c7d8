"""Writes the tables of docs/paper.md anew, from the results in docs/results: python scripts/paper_page.py"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ddc.evaluation.experiments import EXPERIMENTS, paper_figures, paper_method, paper_tables

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "paper.md"

Row = dict[str, Any]


def results(name: str) -> list[Row]:
    """The rows of a results.json, as `ddc reproduce NAME` writes it."""
    rows: list[Row] = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def quality(name: str) -> str:
    """PSNR / LPIPS of each method, ours and then the paper's; the best of ours in bold."""
    experiment, published = EXPERIMENTS[name], paper_figures(EXPERIMENTS[name])
    measured = {(row["model"], row["solver"], row["task"]): row for row in results(name)}
    methods = [("default", "ddc"), ("no-lpips", "ddc"), *(("default", s) for s in experiment.solvers[1:])]
    most = max(row["n"] for row in measured.values())
    best = {
        (task, metric): choose(
            row[metric] for row in measured.values() if row["task"] == task and row["n"] == most
        )
        for task in experiment.tasks
        for metric, choose in (("psnr", max), ("lpips", min))
    }

    def figure(row: Row, metric: str, digits: int) -> str:
        text = f"{row[metric]:.{digits}f}"
        return f"**{text}**" if row[metric] == best[row["task"], metric] else text

    lines = []
    for model, solver in methods:
        first = measured[model, solver, experiment.tasks[0]]
        cells = [solver if model == "default" else "ddc, without LPIPS", str(first["n"])]
        for task in experiment.tasks:
            row = measured[model, solver, task]
            paper = published[task, row["sigma"]].get(paper_method(row, experiment))
            cells.append(f"{figure(row, 'psnr', 2)} / {figure(row, 'lpips', 3)}")
            cells.append(f"{paper['psnr']:.2f} / {paper['lpips']:.3f}" if paper else "–")
        lines.append(cells)
    return table(["method", "n", *(head for task in experiment.tasks for head in (task, "paper"))], lines)


def seconds() -> str:
    paper, rows = paper_tables()["table4_time"], results("table4")
    (fast,) = (row["seconds"] for row in rows if row["solver"] == "ddc")
    lines = []
    for row in rows:
        theirs = paper[row["solver"]]
        ours = [str(row["n"]), str(row["nfe"]), f"{row['seconds']:.2f}", f"{row['seconds'] / fast:.1f}"]
        lines.append([row["solver"], *ours, f"{theirs['s']:.2f}", f"{theirs['s'] / paper['ddc']['s']:.1f}"])
    heads = ["n", "evaluations", "seconds", "times ddc", "paper: seconds", "paper: times ddc"]
    return table(["method", *heads], lines)


def steps() -> str:
    columns = {
        **{"T": ("steps", 0), "evaluations": ("nfe", 0), "PSNR": ("psnr", 2), "SSIM": ("ssim", 3)},
        **{"LPIPS": ("lpips", 3), "LPIPS-VGG16": ("lpips_vgg", 3), "FD-VGG16": ("fd_vgg16", 1)},
    }
    rows = results("figure7")
    return table(columns, [[f"{row[key]:.{digits}f}" for key, digits in columns.values()] for row in rows])


def table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))


TABLES: dict[str, Callable[[], str]] = {
    "table1": lambda: quality("table1"),
    "table2": lambda: quality("table2"),
    "table3": lambda: quality("table3"),
    "table4": seconds,
    "figure7": steps,
}


def written(page: str) -> str:
    """The page, with each table between its marks as the results have it."""
    for name, make in TABLES.items():
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = f"{marks[0]}\n{make()}\n{marks[1]}"
        page, count = re.subn(f"{marks[0]}.*?{marks[1]}", text.replace("\\", r"\\"), page, flags=re.DOTALL)
        assert count == 1, f"{PAGE} has {count} places for {name}; expected one"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
