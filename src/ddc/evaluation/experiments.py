"""The experiments of "Deep Data Consistency" (Chen, Hao, Xiao 2024), one name for each table and figure, and others.

Each runs the benchmark and writes a report with the paper's figures beside ours, what differs from the paper, and the
models that are missing.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddc.datasets import CleanImage, crop_centre
from ddc.errors import UserError
from ddc.evaluation.benchmark import EvaluationOptions, Models, evaluate, make_cases
from ddc.evaluation.plots import Plot, curves, new_figure, png_of
from ddc.evaluation.report import Cell, ReportPage, Table, ranked, write_report
from ddc.evaluation.results import Results, read_results
from ddc.evaluation.run import Key, Row
from ddc.pipeline import DEFAULT_MODEL


@dataclass(frozen=True)
class Experiment:
    """What one table or figure measures; all of them are in experiments.json."""

    title: str
    tasks: list[str]
    sigmas: list[float]
    solvers: list[str]
    models: dict[str, str] = field(default_factory=lambda: {"default": "ddc"})
    """Models that ddc runs with, by the name to give them, and what the paper's table calls each."""
    paper: str | None = None  # the table in paper_tables.json
    steps: Sequence[int] = ()
    faces: bool = False
    quick_nfe: int = 10
    remarks: Sequence[str] = ()


def _read_json(name: str) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return contents


EXPERIMENTS = {name: Experiment(**entry) for name, entry in _read_json("experiments.json").items()}

_TRAIN = "ddc train ddc --prior MODEL/prior --data DIR --out RUN"
COMMANDS = {
    "default": f"{_TRAIN} --tasks sr4,sr8,gauss,inpaint92,jpeg10,denoise --sigma-max 0.05",
    "no-lpips": f"{_TRAIN} --tasks sr4,sr8,gauss,inpaint92,jpeg10,denoise --sigma-max 0.05 --w-lpips 0",
    "faces": "ddc train prior --data FACES --out RUN, then ddc train ddc --prior RUN/prior --data FACES --out RUN2",
    "gauss": f"{_TRAIN} --tasks gauss --sigma-max 0.05",
    "gauss-no-lpips": f"{_TRAIN} --tasks gauss --sigma-max 0.05 --w-lpips 0",
    "sr4-noise": f"{_TRAIN} --tasks sr4 --sigma-max 0.25",
    "checkpoints": f"{_TRAIN} --tasks sr4 --sigma-max 0, with `ddc export RUN OUT` every few thousand steps",
}


@dataclass(frozen=True)
class Reproduction:
    """How to run an experiment."""

    name: str
    images: Sequence[CleanImage]
    images_name: str
    given: dict[str, Path]  # the models there are, by name
    options: EvaluationOptions
    quick: bool = False
    max_nfe: int | None = None
    report: bool = True

    @property
    def experiment(self) -> Experiment:
        return EXPERIMENTS[self.name]

    @property
    def limit(self) -> int | None:
        """The most network evaluations of a solver."""
        return self.experiment.quick_nfe if self.quick and self.max_nfe is None else self.max_nfe


def reproduce(plan: Reproduction) -> list[str]:
    """Measure what there are models for, and write the report. Returns lines to print."""
    experiment, options = plan.experiment, plan.options
    models, missing = choose_models(plan)
    tasks = [*experiment.tasks]
    if plan.name == "unseen" and os.environ.get("DDC_LEVIN09"):
        tasks += [f"levin{number}" for number in range(1, 9)]
    cases = make_cases(models, tasks, experiment.sigmas, experiment.solvers, experiment.steps, plan.limit)
    if plan.name == "figure2":
        options = dataclasses.replace(options, trace=True)
    if plan.name == "table4":
        options = dataclasses.replace(options, batch_size=1)
    protocol = {"experiment": plan.name, "images": plan.images_name, "count": len(plan.images)}
    result = evaluate(cases, plan.images, models, options, protocol | {"max_nfe": plan.limit})
    if result.rank:
        return []
    told = [result.unfinished] if result.left else []
    if not (plan.report and result.rows):
        return [*told, f"{result.rows} rows are in {options.out}"]
    page = make_page(plan, {case.key for case in cases}, result.notes, missing)
    return [*told, str(write_report(options.out, page))]


def bundled_images(size: int = 256, limit: int | None = None) -> list[CleanImage]:
    """Four photographs from scikit-image, for a first look without any data."""
    from skimage import data

    if limit is not None and limit < 1:
        raise UserError(f"the limit is {limit}; expected at least one picture")
    images = []
    for name in ("astronaut", "coffee", "cat", "rocket")[:limit]:
        pixels = torch.from_numpy(np.array(getattr(data, name)())).permute(2, 0, 1)
        images.append(CleanImage(name, crop_centre(pixels, size, name)))
    return images


def find_variants(names: Iterable[str], main: Path) -> dict[str, Path]:
    """The models that belong to the main one, by name: beside it or, for the shipped one, in models/ of the repository
    that the package is used from."""
    places = [main.parent]
    if main == DEFAULT_MODEL:
        places.append(main.parents[3] / "models")
    found = ((name, place / name) for name in names if name != "default" for place in reversed(places))
    return {name: folder for name, folder in found if folder.is_dir()}


def choose_models(plan: Reproduction) -> tuple[Models, list[str]]:
    """The models of the experiment that were given, and how to get the others."""
    experiment, given = plan.experiment, plan.given
    if plan.name == "figure8":
        checkpoints = sorted((name for name in given if name.isdigit()), key=int)
        folders = {name: given[name] for name in checkpoints or given if name.isdigit() or name == "default"}
        missing = [] if len(checkpoints) > 1 else [f"checkpoints along a training: {COMMANDS['checkpoints']}"]
    else:
        folders = {name: given[name] for name in experiment.models if name in given}
        missing = [f"{name}: {COMMANDS[name]}" for name in experiment.models if name not in given]
    if not folders:
        raise UserError(
            f"{plan.name} has no model to measure; give one with --model, or train it: {COMMANDS['default']}"
        )
    other_priors = {}
    if experiment.faces and "faces" in given:
        other_priors = dict.fromkeys(folders, given["faces"])
    elif "default" in given:  # checkpoints and variants may be networks alone
        other_priors = {n: given["default"] for n, path in folders.items() if not (path / "prior").is_dir()}
    return Models(folders, other_priors, plan.options.out), missing


def make_page(plan: Reproduction, cases: set[Key], remarks: Sequence[str], missing: Sequence[str]) -> ReportPage:
    experiment, results = plan.experiment, read_results(plan.options.out, cases)
    notes = []
    side = plan.images[0].pixels.shape[-1]
    if plan.quick:
        notes.append(
            f"Quick form: {len(plan.images)} pictures of {side}×{side} and at most {plan.limit} network evaluations for "
            "each. It shows that everything runs; its figures say little about quality. The full form needs a GPU: "
            f"`ddc reproduce {plan.name} --images DIR`."
        )
    elif plan.limit is not None:
        notes.append(f"Solvers were shortened to at most {plan.limit} network evaluations.")
    tables, plots = EXTRAS[plan.name](results) if plan.name in EXTRAS else ([], [])
    return ReportPage(
        title=experiment.title,
        notes=[*notes, *remarks],
        differences=[*(differences(plan, results) if plan.name != "unseen" else []), *experiment.remarks],
        missing=missing,
        paper=paper_figures(experiment),
        plots=plots,
        tables=tables,
        method=lambda row: paper_method(row, experiment),
        cases=cases,
    )


def differences(plan: Reproduction, results: Results) -> list[str]:
    """How this run differs from the paper's."""
    protocol, faces = results.protocol, plan.experiment.faces
    side = plan.images[0].pixels.shape[-1]
    theirs = "1,000 of CelebA" if faces else "1,000 of ImageNet-1k's validation set"
    prior = "RePaint's CelebA-HQ network" if faces else "OpenAI's ImageNet network, 552.8 million parameters"
    ours = [f"{name} {model['millions']:g} million" for name, model in protocol["models"].items()]
    lines = [
        f"Images: {len(plan.images)} of {plan.images_name}, {side}×{side}; the paper: {theirs}, 256×256.",
        f"Networks with their prior: {', '.join(ours)} parameters; the paper: {prior}, and a DDC network of 113.7 million.",
        f"Hardware: {'; '.join(protocol['hardware'])}, {plan.options.precision}; the paper: one RTX 4090.",
        "SSIM (range 2) has the scale of the paper's SSIM; SSIM is the usual one.",
    ]
    if faces and "faces" in plan.given:
        lines.append("All solvers use the face prior; default is the general network with it.")
    elif faces:
        lines.append("Without a face model, all solvers use the general prior; the paper's use the face prior.")
    if not any(row.get("fid") is not None for row in results.summary):
        lines.append("FID was not measured (it needs --fid and --fid-reference); FD-VGG16 cannot be compared with it.")
    return lines


def paper_tables() -> dict[str, Any]:
    """The figures of the paper's tables."""
    return _read_json("paper_tables.json")


def paper_figures(experiment: Experiment) -> dict[tuple[str, float], dict[str, dict[str, float]]]:
    """The paper's table as setting → method → figures; empty for its drawings."""
    if experiment.paper in (None, "table4_time"):
        return {}
    table = paper_tables()[experiment.paper]
    if experiment.paper.startswith("table6"):
        methods = {"generalised": table["lpips"]["generalised"], "specialised": table["lpips"]["specialised"]}
        methods |= {f"{name}-no-lpips": figures for name, figures in table["no-lpips"].items()}
        table = {name: {"gauss": figures} for name, figures in methods.items()}
    (sigma,) = experiment.sigmas
    return {
        (task, sigma): {method: tasks[task] for method, tasks in table.items() if tasks.get(task)}
        for task in experiment.tasks
    }


def paper_method(row: Row, experiment: Experiment) -> str:
    """What the paper calls a row of ours; a name that is not in its tables if it has no such row."""
    solver = str(row["solver"])
    if solver == "ddc":
        return experiment.models.get(row["model"], str(row["model"]))
    if row["sigma"] > 0 and solver == "pigdm":
        return "pigdm (noise-aware)"
    return solver.partition(":")[0]


# ---------------------------------------------------------------------------------------------------------
# tables and plots of single experiments

Extras = tuple[list[Table], list[Plot]]


def steps_and_time(summary: list[Row]) -> Table:
    """Steps and seconds of ours and of the paper's methods."""
    paper = paper_tables()["table4_time"]
    fast = next((row["seconds"] for row in summary if row["solver"] == "ddc"), None)
    published = {method: f"{figures['s'] / paper['ddc']['s']:.1f}" for method, figures in paper.items()}
    ours = ranked([row["seconds"] for row in summary], 3, False)
    theirs = [paper.get(row["solver"], {}) for row in summary]
    seconds = ranked([figures.get("s") for figures in theirs], 2, False)
    cells = []
    for i, row in enumerate(summary):
        factor = f"{row['seconds'] / fast:.1f}" if fast else "–"
        head = [Cell(text) for text in (row["solver"], str(row["steps"]), str(row["nfe"]))]
        tail = [Cell(str(theirs[i].get("steps") or "–")), seconds[i], Cell(published.get(row["solver"], "–"))]
        cells.append([*head, ours[i], Cell(factor), *tail])
    measured = {row["solver"] for row in summary}
    for method, figures in paper.items():
        if method not in measured:
            known = [str(figures["steps"] or "–"), f"{figures['s']:.2f}", published[method]]
            cells.append([Cell(text) for text in (method, "", "–", "–", "–", *known)])
    heads = ["method", "steps", "evaluations", "s/image", "times ddc"]
    return Table("Steps and time", [*heads, "paper: steps", "paper: s/image", "paper: times ddc"], cells)


def kurtosis_plot(results: Results) -> Extras:
    """The kurtosis of ε̂ against t, mean over images, and its mean magnitude in a table."""
    figure, panels = new_figure(1, 1, wide=2)
    panel = panels[0][0]
    cells = []
    for row in results.summary:
        solver = row["solver"]
        traces = [r["kurtosis"] for r in results.rows if r["solver"] == solver and r.get("kurtosis")]
        if not traces:
            continue
        mean = np.mean([[k for _, k in trace] for trace in traces], axis=0)
        panel.plot([t for t, _ in traces[0]], mean, label=solver, linewidth=1)
        texts = [
            solver,
            str(row["steps"]),
            str(len(traces)),
            f"{np.mean(np.abs(mean)):.3f}",
            f"{mean[-1]:.3f}",
        ]
        texts += [f"{row['ssim_paper']:.3f}", "–" if row["fd_vgg16"] is None else f"{row['fd_vgg16']:.1f}"]
        cells.append([Cell(text) for text in texts])
    panel.axhline(0, color="black", linewidth=0.6)
    if max(map(abs, panel.get_ylim())) > 1:
        panel.set_yscale("symlog", linthresh=0.1)
    panel.invert_xaxis()
    panel.set_xlabel("t")
    panel.set_ylabel("excess kurtosis of ε̂")
    panel.legend()
    heads = ["method", "steps", "n", "mean |kurtosis|", "at the last step", "SSIM (range 2)", "FD-VGG16"]
    caption = "0 is Gaussian. In the paper, DPS is close to the unconditional run and DDNM is further from 0."
    return [Table("Kurtosis of ε̂", heads, cells)], [Plot(caption, png_of(figure))]


def noise_plot(results: Results) -> Extras:
    tables = paper_tables()
    marks = {0.0: tables["table2_sigma0"]["ddc"]["sr4"], 0.05: tables["table1_sigma0.05"]["ddc"]["sr4"]}
    png = curves(results.summary, lambda row: row["sigma"], "σ of the measurement", marks)
    return [], [Plot("Crosses: the paper's tables 1 and 2 (its figure prints no numbers).", png)]


def steps_plot(results: Results) -> Extras:
    marks = {5.0: paper_tables()["table2_sigma0"]["ddc"]["sr4"]}
    png = curves(results.summary, lambda row: row["steps"], "steps T", marks, log=True)
    caption = "Cross: the paper's table 2, T = 5 (its figure prints no numbers; it is best at 5)."
    return [], [Plot(caption, png)]


def training_plot(results: Results) -> Extras:
    measured = [row for row in results.summary if str(row["model"]).isdigit()]
    if not measured:
        return [], []
    named = [row | {"position": int(row["model"]), "model": "ddc"} for row in measured]
    png = curves(named, lambda row: row["position"], "training steps", {})
    return [], [Plot("The paper: basic reconstruction after 5,000 steps, little gain after 25,000.", png)]


EXTRAS: dict[str, Callable[[Results], Extras]] = {
    "table4": lambda results: ([steps_and_time(results.summary)], []),
    "figure2": kurtosis_plot,
    "figure5": noise_plot,
    "figure7": steps_plot,
    "figure8": training_plot,
}
