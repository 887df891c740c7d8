"""The experiments of "Deep Data Consistency" (Chen, Hao, Xiao 2024): one name for each table and figure.

Each runs the benchmark and writes its report with the paper's own figures beside ours, what differs, and which
models it still needs.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddc import pipeline
from ddc.errors import UserError
from ddc.evaluation.benchmark import (
    Image,
    Models,
    Options,
    Row,
    evaluate,
    make_cases,
    read_protocol,
    recorded_models,
    slow_note,
)
from ddc.evaluation.report import (
    Cell,
    Page,
    Plot,
    Table,
    axis_name,
    method_name,
    new_figure,
    png_of,
    ranked,
    write_report,
)
from ddc.evaluation.results import chosen_rows, summarise

LINEAR = ("sr4", "sr8", "gauss", "inpaint92")
BASELINES = ("dps", "ddnm", "ddrm", "pigdm", "reddiff", "pnp-admm")


@dataclass(frozen=True)
class Experiment:
    """What one table or figure measures."""

    title: str
    tasks: tuple[str, ...]
    sigmas: tuple[float, ...]
    solvers: tuple[str, ...]
    models: dict[str, str] = field(default_factory=lambda: {"default": "ddc"})
    """Models that ddc runs with, by the name to give them, and what the paper's table calls each."""
    paper: str | None = None  # the table in paper_tables.json
    steps: tuple[int, ...] = ()
    faces: bool = False
    quick_nfe: int = 10
    remarks: tuple[str, ...] = ()


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment(
        "Table 1: linear tasks with noise, σ = 0.05",
        LINEAR,
        (0.05,),
        ("ddc", *BASELINES, "pigdm:noise_blind=true", "pinv"),
        {"default": "ddc", "no-lpips": "ddc-no-lpips"},
        "table1_sigma0.05",
        remarks=(
            "ΠGDM is noise-aware here; the paper's rows are those of its noise-blind code, which is "
            "pigdm:noise_blind=true.",
        ),
    ),
    "table2": Experiment(
        "Table 2: linear tasks without noise",
        LINEAR,
        (0.0,),
        ("ddc", *BASELINES, "pinv"),
        {"default": "ddc", "no-lpips": "ddc-no-lpips"},
        "table2_sigma0",
    ),
    "table3": Experiment(
        "Table 3: JPEG at quality 10",
        ("jpeg10",),
        (0.0,),
        ("ddc", "pigdm", "cddb", "pinv"),
        {"default": "ddc", "no-lpips": "ddc-no-lpips"},
        "table3_jpeg10_sigma0",
        remarks=(
            "JPEG is the standard here, as libjpeg has it; the paper's took every second chroma pixel and did not "
            "round to 8 bits.",
        ),
    ),
    "table4": Experiment(
        "Table 4: steps and seconds",
        ("sr4",),
        (0.0,),
        ("ddc", "dps", "ddnm", "ddrm", "pigdm", "reddiff", "cddb", "pnp-admm"),
        paper="table4_time",
        remarks=("Seconds are for one picture at a time.",),
    ),
    "table5": Experiment(
        "Table 5: faces, σ = 0.05",
        ("sr4", "inpaint92"),
        (0.05,),
        ("ddc", "dps", "ddnm", "pigdm", "pigdm:noise_blind=true", "reddiff"),
        {"faces": "ddc-celeba", "default": "ddc-imagenet"},
        "table5_celeba_sigma0.05",
        faces=True,
    ),
    "table6": Experiment(
        "Table 6: one model for all tasks against one for Gaussian blur alone, σ = 0.05",
        ("gauss",),
        (0.05,),
        ("ddc",),
        {
            "default": "generalised",
            "gauss": "specialised",
            "no-lpips": "generalised-no-lpips",
            "gauss-no-lpips": "specialised-no-lpips",
        },
        "table6_gauss_sigma0.05",
    ),
    "figure2": Experiment(
        "Figure 2: the kurtosis of ε̂ along the run (super-resolution ×4, no noise)",
        ("sr4",),
        (0.0,),
        ("dps", "ddnm", "unconditional"),
        quick_nfe=40,
    ),
    "figure5": Experiment(
        "Figure 5: noise from 0 to 0.25 (super-resolution ×4)",
        ("sr4",),
        (0.0, 0.05, 0.1, 0.15, 0.2, 0.25),
        ("ddc",),
        {"default": "ddc", "sr4-noise": "ddc (σ up to 0.25)"},
    ),
    "figure7": Experiment(
        "Figure 7: the number of steps (super-resolution ×4, no noise)",
        ("sr4",),
        (0.0,),
        ("ddc",),
        steps=(2, 3, 5, 10, 20, 50),
        quick_nfe=20,
    ),
    "figure8": Experiment(
        "Figure 8: quality along training (super-resolution ×4, no noise)",
        ("sr4",),
        (0.0,),
        ("ddc",),
        remarks=(
            "Give exported checkpoints as --models STEPS=DIR,STEPS=DIR: their names are the training steps.",
        ),
    ),
}

_TRAIN = "ddc train ddc --prior MODEL/prior --data DIR --out RUN"
COMMANDS = {
    "default": f"{_TRAIN} --tasks sr4,sr8,gauss,inpaint92,jpeg10,denoise --sigma-max 0.05",
    "no-lpips": f"{_TRAIN} --tasks sr4,sr8,gauss,inpaint92,jpeg10,denoise --sigma-max 0.05 --w-lpips 0",
    "faces": "ddc train prior --data FACES --out RUN, then ddc train ddc --prior RUN/prior --data FACES --out RUN2",
    "gauss": f"{_TRAIN} --tasks gauss --sigma-max 0.05",
    "gauss-no-lpips": f"{_TRAIN} --tasks gauss --sigma-max 0.05 --w-lpips 0",
    "sr4-noise": f"{_TRAIN} --tasks sr4 --sigma-max 0.25",
    "checkpoints": f"{_TRAIN} --tasks sr4 --sigma-max 0, with an `ddc export RUN OUT` every few thousand steps",
}


@dataclass(frozen=True)
class Plan:
    """How to run an experiment."""

    name: str
    images: Sequence[Image]
    images_name: str
    given: dict[str, Path]  # the models there are, by name
    options: Options
    quick: bool = False
    max_nfe: int | None = None
    report: bool = True


def reproduce(plan: Plan) -> list[str]:
    """Measure what there are models for, and write the report. Returns what to tell people."""
    experiment = EXPERIMENTS[plan.name]
    models, missing = choose_models(plan, experiment)
    max_nfe = plan.max_nfe if plan.max_nfe is not None else (experiment.quick_nfe if plan.quick else None)
    cases = make_cases(
        models, experiment.tasks, experiment.sigmas, experiment.solvers, experiment.steps, max_nfe
    )
    options = plan.options
    if plan.name == "figure2":
        options = dataclasses.replace(options, trace=True)
    if plan.name == "table4":
        options = dataclasses.replace(options, batch_size=1)
    protocol = {
        "experiment": plan.name,
        "images": plan.images_name,
        "count": len(plan.images),
        "max_nfe": max_nfe,
    }
    outcome = evaluate(cases, plan.images, models, options, protocol)
    if int(os.environ.get("RANK", 0)):
        return []
    told = [str(outcome)] if outcome.left else []
    if not (plan.report and outcome.rows):
        return [*told, f"{outcome.rows} rows are in {options.out}"]
    notes = [*told, *slow_note(cases, plan.images, options)]
    notes += [f"Not run: {reason}" for reason in outcome.skipped]
    page = make_page(plan, experiment, {case.key for case in cases}, notes, missing, max_nfe)
    return [*told, str(write_report(options.out, page))]


def find_variants(names: Iterable[str], main: Path) -> dict[str, Path]:
    """The models that go with the main one, by name: beside it, or, for the one that comes with the package, in
    the repository that the package is used from."""
    places = [main.parent]
    if main == pipeline.DEFAULT_MODEL:
        places.append(main.parents[3] / "models")
    found = ((name, place / name) for name in names if name != "default" for place in reversed(places))
    return {name: folder for name, folder in found if folder.is_dir()}


def choose_models(plan: Plan, experiment: Experiment) -> tuple[Models, list[str]]:
    """The models of the experiment that were given, and how to get the others."""
    given = plan.given
    if plan.name == "figure8":
        checkpoints = {name: path for name, path in given.items() if name.isdigit()}
        folders = dict(sorted(checkpoints.items(), key=lambda item: int(item[0])))
        missing = [] if len(folders) > 1 else [f"checkpoints along a training: {COMMANDS['checkpoints']}"]
        if not folders:
            folders = {name: path for name, path in given.items() if name == "default"}
    else:
        folders = {name: given[name] for name in experiment.models if name in given}
        missing = [f"{name}: {COMMANDS[name]}" for name in experiment.models if name not in given]
    if not folders:
        raise UserError(
            f"{plan.name} has no model to measure; give one with --model, or train it: {COMMANDS['default']}"
        )
    priors = {}
    if experiment.faces and "faces" in given:
        priors = dict.fromkeys(folders, given["faces"])
    # figure 8's checkpoints, and variants, may be networks alone: the prior is the default model's
    elif "default" in given:
        priors = {n: given["default"] for n, path in folders.items() if not (path / "prior").is_dir()}
    return Models(folders, priors, recorded_models(plan.options.out)), missing


def make_page(
    plan: Plan,
    experiment: Experiment,
    cases: set[tuple[Any, ...]],
    remarks: Sequence[str],
    missing: Sequence[str],
    max_nfe: int | None,
) -> Page:
    rows, truths = chosen_rows(plan.options.out, cases)
    summary = summarise(rows, truths)
    notes = []
    side = plan.images[0].pixels.shape[-1]
    if plan.quick:
        notes.append(
            f"Quick form: {len(plan.images)} pictures of {side}×{side} and at most {max_nfe} network evaluations for "
            "each. It shows that everything runs; its figures say little about quality. The full form needs a GPU: "
            f"`ddc reproduce {plan.name} --images DIR`."
        )
    elif max_nfe is not None:
        notes.append(f"Solvers were shortened to at most {max_nfe} network evaluations.")
    tables, plots = EXTRAS[plan.name](summary, rows) if plan.name in EXTRAS else ([], [])
    return Page(
        title=experiment.title,
        notes=[*notes, *remarks],
        differences=[*differences(plan, experiment, summary), *experiment.remarks],
        missing=missing,
        paper=paper_figures(experiment),
        plots=plots,
        tables=tables,
        method=lambda row: paper_method(row, experiment),
        cases=cases,
    )


def differences(plan: Plan, experiment: Experiment, summary: list[Row]) -> list[str]:
    """Where this run is not the paper's."""
    protocol = read_protocol(plan.options.out)
    side = plan.images[0].pixels.shape[-1]
    theirs = "1,000 of CelebA" if experiment.faces else "1,000 of ImageNet-1k's validation set"
    prior = (
        "RePaint's CelebA-HQ network"
        if experiment.faces
        else "OpenAI's ImageNet network, 552.8 million parameters"
    )
    ours = [f"{name} {model['millions']:g} million" for name, model in protocol["models"].items()]
    lines = [
        f"Images: {len(plan.images)} of {plan.images_name}, {side}×{side}; the paper: {theirs}, 256×256.",
        f"Networks, prior and all: {', '.join(ours)} parameters; the paper: {prior}, and a DDC network of 113.7 million.",
        f"Hardware: {'; '.join(protocol['hardware'])}, {plan.options.precision}; the paper: one RTX 4090.",
        "SSIM (range 2) is the scale of the paper's SSIM; SSIM is the usual one.",
    ]
    if experiment.faces and "faces" in plan.given:
        lines.append("All solvers use the face prior; default is the general network with it.")
    elif experiment.faces:
        lines.append(
            "Without a face model, all solvers use the general prior; the paper's use the face prior."
        )
    if not any(row.get("fid") is not None for row in summary):
        lines.append(
            "FID was not measured (it needs the Inception weights); FD-VGG16 cannot be compared with it."
        )
    return lines


def paper_tables() -> dict[str, Any]:
    """The paper's figures, as its tables print them."""
    tables: dict[str, Any] = json.loads(
        (Path(__file__).parent / "paper_tables.json").read_text(encoding="utf-8")
    )
    return tables


def paper_figures(experiment: Experiment) -> dict[tuple[str, float], dict[str, dict[str, float]]]:
    """The paper's table as setting → method → figures; empty for what it only draws."""
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
    """What the paper calls a row of ours; a name that it does not have where it has no such row."""
    solver = str(row["solver"])
    if solver == "ddc":
        return experiment.models.get(row["model"], str(row["model"]))
    if row["sigma"] > 0 and solver == "pigdm":
        return "pigdm (noise-aware)"
    return solver.partition(":")[0]


# ---------------------------------------------------------------------------------------------------------
# what tables of images do not show


def time_table(summary: list[Row], rows: list[Row]) -> tuple[list[Table], list[Plot]]:
    paper = paper_tables()["table4_time"]
    fast = next((row["seconds"] for row in summary if row["solver"] == "ddc"), None)
    ours = ranked([row["seconds"] for row in summary], 3, False)
    theirs = [paper.get(row["solver"], {}) for row in summary]
    published = ranked([figures.get("s") for figures in theirs], 2, False)
    cells = []
    for row, figures, seconds, paper_seconds in zip(summary, theirs, ours, published, strict=True):
        factor = f"{row['seconds'] / fast:.1f}" if fast else "–"
        paper_factor = f"{figures['s'] / paper['ddc']['s']:.1f}" if "s" in figures else "–"
        head = [Cell(text) for text in (row["solver"], str(row["steps"]), str(row["nfe"]))]
        tail = [Cell(str(figures.get("steps") or "–")), paper_seconds, Cell(paper_factor)]
        cells.append([*head, seconds, Cell(factor), *tail])
    measured = {row["solver"] for row in summary}
    for method, figures in paper.items():
        if method not in measured:
            factor = f"{figures['s'] / paper['ddc']['s']:.1f}"
            texts = [method, "", "–", "–", "–", str(figures["steps"] or "–"), f"{figures['s']:.2f}", factor]
            cells.append([Cell(text) for text in texts])
    heads = ["method", "steps", "evaluations", "s/image", "times ddc"]
    heads += ["paper: steps", "paper: s/image", "paper: times ddc"]
    return [Table("Steps and time", heads, cells)], []


def kurtosis_plot(summary: list[Row], rows: list[Row]) -> tuple[list[Table], list[Plot]]:
    """The kurtosis of ε̂ against t, mean over images, and its mean magnitude in a table."""
    figure, panels = new_figure(1, 1, wide=2)
    panel = panels[0][0]
    cells = []
    for solver in dict.fromkeys(row["solver"] for row in rows):
        traces = [row["kurtosis"] for row in rows if row["solver"] == solver and row.get("kurtosis")]
        if not traces:
            continue
        times = [t for t, _ in traces[0]]
        mean = np.mean([[k for _, k in trace] for trace in traces], axis=0)
        panel.plot(times, mean, label=solver, linewidth=1)
        row = next(r for r in summary if r["solver"] == solver)
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
    caption = "0 is Gaussian. The paper draws DPS near the unconditional run and DDNM further from 0."
    return [Table("Kurtosis of ε̂", heads, cells)], [Plot(caption, png_of(figure))]


def noise_plot(summary: list[Row], rows: list[Row]) -> tuple[list[Table], list[Plot]]:
    tables = paper_tables()
    marks = {0.0: tables["table2_sigma0"]["ddc"]["sr4"], 0.05: tables["table1_sigma0.05"]["ddc"]["sr4"]}
    png = curves(summary, lambda row: row["sigma"], "σ of the measurement", marks)
    return [], [Plot("Crosses: the paper's tables 1 and 2 (its figure prints no numbers).", png)]


def steps_plot(summary: list[Row], rows: list[Row]) -> tuple[list[Table], list[Plot]]:
    marks = {5.0: paper_tables()["table2_sigma0"]["ddc"]["sr4"]}
    png = curves(summary, lambda row: row["steps"], "steps T", marks, log=True)
    return [], [
        Plot("Cross: the paper's table 2, T = 5 (its figure prints no numbers; it is best at 5).", png)
    ]


def training_plot(summary: list[Row], rows: list[Row]) -> tuple[list[Table], list[Plot]]:
    measured = [row for row in summary if str(row["model"]).isdigit()]
    if not measured:
        return [], []
    named = [row | {"position": int(row["model"]), "model": "ddc"} for row in measured]
    png = curves(named, lambda row: row["position"], "training steps", {})
    return [], [Plot("The paper: basic reconstruction after 5,000 steps, little gain after 25,000.", png)]


def curves(
    summary: list[Row], axis: Any, label: str, marks: dict[float, dict[str, float]], log: bool = False
) -> bytes:
    """PSNR, SSIM, LPIPS and FD-VGG16 along an axis, a line for each method; the paper's figures as crosses."""
    metrics = {"psnr": "psnr", "ssim_paper": "ssim", "lpips": "lpips", "fd_vgg16": None}
    figure, panels = new_figure(1, len(metrics))
    for panel, (metric, theirs) in zip(panels[0], metrics.items(), strict=True):
        for method in dict.fromkeys(method_name(row, summary) for row in summary):
            points = sorted(
                (axis(row), row[metric])
                for row in summary
                if method_name(row, summary) == method and row[metric] is not None
            )
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1, label=method)
        if theirs and marks:
            panel.plot(list(marks), [m[theirs] for m in marks.values()], "kx", label="paper")
        if log:
            panel.set_xscale("log")
            ticks = sorted({axis(row) for row in summary})
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.minorticks_off()
        panel.set_xlabel(label)
        panel.set_title(axis_name(metric), fontsize=10)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize=8)
    return png_of(figure)


EXTRAS = {
    "table4": time_table,
    "figure2": kurtosis_plot,
    "figure5": noise_plot,
    "figure7": steps_plot,
    "figure8": training_plot,
}
