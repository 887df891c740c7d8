"""Updates the tables of docs/paper.md from the results in docs/results: python scripts/paper_page.py"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddc.evaluation.experiments import EXPERIMENTS, paper_figures, paper_method, steps_and_time
from ddc.evaluation.report import (
    Cell,
    ReportPage,
    Table,
    markdown_cell,
    markdown_lines,
    ranked,
    result_tables,
)

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "paper.md"


def results(name: str) -> list[dict[str, Any]]:
    """The rows of a results.json, as `ddc reproduce NAME` writes it."""
    rows: list[dict[str, Any]] = json.loads((DOCS / "results" / f"{name}.json").read_text("utf-8"))["rows"]
    return rows


def quality(name: str) -> Table:
    """PSNR / LPIPS of each method, ours and then the paper's."""
    experiment, published = EXPERIMENTS[name], paper_figures(EXPERIMENTS[name])
    measured = {(row["model"], row["solver"], row["task"]): row for row in results(name)}
    methods = [("default", "ddc"), ("no-lpips", "ddc"), *(("default", s) for s in experiment.solvers[1:])]
    counts = [measured[model, solver, experiment.tasks[0]]["n"] for model, solver in methods]
    names = [solver if model == "default" else "ddc, without LPIPS" for model, solver in methods]
    heads = ["method", "n"]
    columns = [[Cell(name) for name in names], [Cell(str(count)) for count in counts]]
    for task in experiment.tasks:
        rows = [measured[model, solver, task] for model, solver in methods]
        theirs = [published[task, row["sigma"]].get(paper_method(row, experiment), {}) for row in rows]
        heads += [task, "paper"]
        for figures, n in ((rows, counts), (theirs, None)):
            psnr = ranked([row.get("psnr") for row in figures], 2, True, n)
            lpips = ranked([row.get("lpips") for row in figures], 3, False, n)
            both = zip(map(markdown_cell, psnr), map(markdown_cell, lpips), strict=True)
            columns.append([Cell(" / ".join(pair).replace("– / –", "–")) for pair in both])
    return Table("", heads, [list(row) for row in zip(*columns, strict=True)])


TABLES: dict[str, Callable[[], Table]] = {
    "table1": lambda: quality("table1"),
    "table2": lambda: quality("table2"),
    "table3": lambda: quality("table3"),
    "table4": lambda: steps_and_time(results("table4")),
    "figure7": lambda: result_tables(results("figure7"), ReportPage())[0],
}


def written(page: str) -> str:
    """The page with updated tables, each between its marks."""
    for name, make in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = "\n".join([start, *markdown_lines(make()), end])
        page, count = re.subn(f"{start}.*?{end}", text.replace("\\", r"\\"), page, flags=re.DOTALL)
        assert count == 1, f"{PAGE} has {count} places for {name}; expected one"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
