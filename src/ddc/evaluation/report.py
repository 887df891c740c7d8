"""The report of a run: tables as Markdown, LaTeX and CSV, and one HTML page that needs nothing beside it."""

import base64
import importlib.util
import io
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddc.errors import UserError
from ddc.evaluation.benchmark import WORST, Case, Row, parse_solver, picture_paths
from ddc.evaluation.results import HIGHER_IS_BETTER, KEY, SETS, case_name, protocol_of, write_results

CROP = 64  # pixels of the zoomed window
PICTURES = 240  # at most in the grid of one page, to keep it light
FEWEST = 5  # pictures for an interval that says something
NAMES = ("method", "setting", "task")  # columns of words

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
# our column → the paper's, which stands beside it
PAPER = {"psnr": "psnr", "ssim_paper": "ssim", "lpips": "lpips", "fid": "fid"}
BETTER = HIGHER_IS_BETTER | SETS


@dataclass(frozen=True)
class Cell:
    """Text, and its place in its column: 1 best, 2 second, 0 otherwise."""

    text: str
    place: int = 0


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Plot:
    caption: str
    png: bytes


@dataclass(frozen=True)
class Page:
    """What a report says beside its figures."""

    title: str = "Evaluation"
    notes: Sequence[str] = ()  # said first: what this is, and what was left out of it
    differences: Sequence[str] = ()  # from the paper's protocol
    missing: Sequence[str] = ()  # models that are still needed, with their commands
    paper: dict[tuple[str, float], dict[str, dict[str, float]]] = field(default_factory=dict)
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    method: Callable[[Row], str] | None = None  # the paper's name of a row
    cases: Collection[tuple[Any, ...]] | None = None  # the keys of the rows to show; None is all of the run


def check_packages() -> None:
    """Refuse before anything is measured, not when the report is due."""
    absent = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(f"the report needs {' and '.join(absent)}: pip install 'ddc[eval]'")


def write_report(run: Path, page: Page | None = None) -> Path:
    """Write all forms of the report into the run's folder; returns the HTML page."""
    page = page or Page()
    rows, summary, paired = write_results(run, page.cases)
    protocol = protocol_of(run, rows)
    if len(protocol["batch_size"]) > 1:
        ways = batches_text(protocol["batch_size"])
        note = f"Seconds are those of batches of different sizes: {ways}. Compare them within one size only."
        page = replace(page, notes=[*page.notes, note])
    tables = [*page.tables, *result_tables(summary, page), *paired_table(paired, summary)]
    (run / "report.md").write_text(markdown(page, tables, protocol), encoding="utf-8")
    (run / "report.tex").write_text(latex(tables), encoding="utf-8")
    plots = list(page.plots) or quality_plots(summary)
    html = render(page, tables, plots, picture_grids(run, rows), worst_cases(run, rows), protocol)
    path = run / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------------------
# tables


def method_name(row: Row, summary: list[Row]) -> str:
    """What a row is called in a table: no more than tells it from the others."""
    name = str(row["solver"])
    if len({r["model"] for r in summary if r["solver"] == row["solver"]}) > 1:
        name += f" ({row['model']})"
    return name


def result_tables(summary: list[Row], page: Page) -> list[Table]:
    """One table for each task and noise: ours, and the paper's figures beside them where it has some."""
    tables = []
    settings = dict.fromkeys([*((r["task"], r["sigma"]) for r in summary), *page.paper])
    if len(settings) > 2 and len(settings) > len(summary) / 3 and not page.paper:
        return [sweep_table(summary)]
    name = page.method or (lambda row: str(row["solver"]))
    for task, sigma in settings:
        ours = [row for row in summary if (row["task"], row["sigma"]) == (task, sigma)]
        theirs = page.paper.get((task, sigma), {})
        lines = [(method_name(row, summary), row, theirs.get(name(row), {})) for row in ours]
        measured = {name(row) for row in ours}
        lines += [(method, {}, figures) for method, figures in theirs.items() if method not in measured]
        heads = ["method", "steps", "n"]
        columns = [
            [Cell(method) for method, _, _ in lines],
            [Cell(str(row.get("steps", ""))) for _, row, _ in lines],
            [Cell(str(row.get("n", ""))) for _, row, _ in lines],
        ]
        for key, (heading, decimals) in FIGURES.items():
            values = [row.get(key) for _, row, _ in lines]
            if any(value is not None for value in values):
                heads.append(heading if key != "consistency" or sigma else "‖Ax−y‖")
                cells = ranked(values, decimals, BETTER.get(key), [row.get("n", 0) for _, row, _ in lines])
                if key == "psnr":
                    cells = [with_interval(c, row) for c, (_, row, _) in zip(cells, lines, strict=True)]
                columns.append(cells)
            if theirs and key in PAPER:
                heads.append(f"paper: {heading}")
                published = [figures.get(PAPER[key]) for _, _, figures in lines]
                columns.append(ranked(published, decimals, BETTER[key]))
        tables.append(
            Table(f"{task}, σ = {sigma:g}", heads, [list(row) for row in zip(*columns, strict=True)])
        )
    return tables


def sweep_table(summary: list[Row]) -> Table:
    """Many settings of few methods, in one table; the best and the second are those of their setting."""
    heads = ["method", "task", "σ", "steps", "n"]
    keys = [key for key in FIGURES if any(row.get(key) is not None for row in summary)]
    cells = []
    for task, sigma in dict.fromkeys((row["task"], row["sigma"]) for row in summary):
        rows = [row for row in summary if (row["task"], row["sigma"]) == (task, sigma)]
        counts = [row["n"] for row in rows]
        columns = [
            ranked([row.get(key) for row in rows], FIGURES[key][1], BETTER.get(key), counts) for key in keys
        ]
        for row, figures in zip(rows, zip(*columns, strict=True), strict=True):
            texts = [method_name(row, summary), task, f"{sigma:g}", str(row["steps"]), str(row["n"])]
            psnr, *others = figures
            cells.append([*(Cell(text) for text in texts), with_interval(psnr, row), *others])
    heads += [FIGURES[key][0] for key in keys]
    if any(row["sigma"] == 0 for row in summary):
        heads = ["‖Ax−y‖ (/σ)" if head == FIGURES["consistency"][0] else head for head in heads]
    return Table("All settings", heads, cells)


def with_interval(cell: Cell, row: Row) -> Cell:
    return cell if row.get("n", 0) < FEWEST else Cell(f"{cell.text} ± {row['psnr_ci']:.2f}", cell.place)


def ranked(
    values: Sequence[float | None], decimals: int, higher: bool | None, counts: Sequence[int] | None = None
) -> list[Cell]:
    """Cells of one column. What reads the same to the given decimals shares its place; means over fewer pictures
    than the others' (`counts`) have none, for they are of other pictures."""
    texts = ["–" if value is None else f"{value:.{decimals}f}" for value in values]
    most = max(counts or [0], default=0)
    compared = [text != "–" and (counts is None or counts[i] == most) for i, text in enumerate(texts)]
    ranks = {float(text) for text, taken in zip(texts, compared, strict=True) if taken}
    if higher is None or len(ranks) < 2:
        return [Cell(text) for text in texts]
    order = sorted(ranks, reverse=higher)
    places = {f"{value:.{decimals}f}": place for place, value in enumerate(order[:2], 1)}
    return [
        Cell(text, places.get(text, 0) if taken else 0) for text, taken in zip(texts, compared, strict=True)
    ]


def paired_table(paired: list[Row], summary: list[Row]) -> list[Table]:
    """Each case minus the best one of its setting, image by image."""
    found = {(*(row[k] for k in KEY), row["metric"]): row for row in paired}
    metrics = [
        metric
        for metric in ("psnr", "ssim", "lpips", "lpips_vgg")
        if any(r["metric"] == metric for r in paired)
    ]
    cells = []
    for row in summary if paired else []:
        line = [f"{row['task']}, σ = {row['sigma']:g}", method_name(row, summary), str(row["steps"])]
        for metric in metrics:
            pair = found.get((*(row[k] for k in KEY), metric))
            interval = "" if pair is None or pair["n"] < FEWEST else f" ± {pair['ci']:.3f}"
            line.append("best" if pair is None else f"{pair['difference']:+.3f}{interval}")
        cells.append([Cell(text, int(text == "best")) for text in line])
    heads = ["setting", "method", "steps", *(FIGURES[metric][0] for metric in metrics)]
    return [Table("Paired differences to the best, image by image", heads, cells)] if cells else []


def markdown(page: Page, tables: Sequence[Table], protocol: dict[str, Any]) -> str:
    lines = [f"# {page.title}", ""]
    for heading, items in (
        ("", page.notes),
        ("What differs", page.differences),
        ("Still needed", page.missing),
    ):
        if items:
            lines += [f"## {heading}", ""] if heading else []
            lines += [*(f"- {item}" for item in items), ""]
    for table in tables:
        lines += [f"## {table.title}", "", *markdown_lines(table), ""]
    lines += ["## Protocol", "", *(f"- {name}: {text}" for name, text in protocol_lines(protocol))]
    return "\n".join(lines) + "\n"


def markdown_lines(table: Table) -> list[str]:
    rows = [markdown_row(map(markdown_cell, row)) for row in table.rows]
    return [markdown_row(table.columns), "|" + "---|" * len(table.columns), *rows]


def markdown_cell(cell: Cell) -> str:
    return {0: "{}", 1: "**{}**", 2: "<u>{}</u>"}[cell.place].format(cell.text)


def markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def latex(tables: Sequence[Table]) -> str:
    """Tables for a paper that loads booktabs."""
    marks = {0: "{}", 1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"}
    symbols = {
        "↑": r"$\uparrow$",
        "↓": r"$\downarrow$",
        "σ": r"$\sigma$",
        "±": r"$\pm$",
        "–": "--",
        "×": r"$\times$",
    }
    symbols |= {"‖Ax−y‖": r"$\|Ax-y\|$", "_": r"\_", "%": r"\%"}

    def escape(text: str) -> str:
        for symbol, command in symbols.items():
            text = text.replace(symbol, command)
        return text

    blocks = []
    for table in tables:
        body = [" & ".join(marks[c.place].format(escape(c.text)) for c in row) + r" \\" for row in table.rows]
        head = " & ".join(escape(column) for column in table.columns) + r" \\"
        columns = "l" * len(table.columns)
        lines = [rf"% {table.title}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
        blocks.append("\n".join([*lines, *body, r"\bottomrule", r"\end{tabular}"]))
    return "\n\n".join(blocks) + "\n"


def protocol_lines(protocol: dict[str, Any]) -> list[tuple[str, str]]:
    """The protocol as names and readable texts."""
    lines = []
    for name, value in protocol.items():
        if name == "models":
            value = "; ".join(
                f"{model}: {facts['millions']:g} million parameters, sha256 {facts['sha256']}"
                for model, facts in value.items()
            )
        elif name == "parts":
            name = "networks of solvers"
            value = "; ".join(f"{part}: sha256 {digest}" for part, digest in value.items())
        elif name == "batch_size":
            value = batches_text(value)
        elif name == "size":
            value = "×".join(map(str, value))
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        if value not in ("", None):
            lines.append((name.replace("_", " "), str(value)))
    return lines


def batches_text(sizes: dict[str, list[str]]) -> str:
    return ", ".join(f"{size} ({', '.join(methods)})" for size, methods in sizes.items())


# ---------------------------------------------------------------------------------------------------------
# plots


def quality_plots(summary: list[Row]) -> list[Plot]:
    """PSNR and LPIPS against time and against network evaluations, a column for each task and noise where there
    is something to compare."""
    captions = {"seconds": "Quality against time per image.", "nfe": "Quality against network evaluations."}
    plots = []
    for axis, caption in captions.items():
        places: dict[tuple[str, float], list[float]] = {}
        for row in summary:
            places.setdefault((row["task"], row["sigma"]), []).extend([row[axis]] if row["nfe"] else [])
        settings = [setting for setting, xs in places.items() if xs and max(xs) > 1.5 * min(xs)]
        for start in range(0, len(settings), 4):
            png = scatter(summary, settings[start : start + 4], axis)
            plots.append(Plot(caption, png))
    return plots


def scatter(summary: list[Row], settings: list[tuple[str, float]], axis: str) -> bytes:
    """PSNR above LPIPS, side by side where there is one setting; what takes no network is a dashed line, and what was
    measured on fewer pictures, which may be easier or harder ones, is hollow."""
    alone = len(settings) == 1
    figure, panels = new_figure(1, 2) if alone else new_figure(2, len(settings))
    methods = list(dict.fromkeys(method_name(r, summary) for r in summary))
    most = max(row["n"] for row in summary)
    counts = {method_name(row, summary): row["n"] for row in summary if row["n"] < most}
    labels = {
        method: f"{method} (n = {counts[method]})" if method in counts else method for method in methods
    }
    for column, (task, sigma) in enumerate(settings):
        for line, metric in enumerate(("psnr", "lpips")):
            panel = panels[0][line] if alone else panels[line][column]
            for number, method in enumerate(methods):
                points = sorted(
                    (row["nfe"], row[axis], row[metric])
                    for row in summary
                    if (row["task"], row["sigma"]) == (task, sigma) and method_name(row, summary) == method
                )
                color = f"C{number % 10}"
                if points and points[0][0] == 0:
                    panel.axhline(
                        points[0][2], color=color, linestyle="--", linewidth=1, label=labels[method]
                    )
                elif points:
                    _, xs, ys = zip(*points, strict=True)
                    marker = "osD^vP*Xhd"[number // 10 % 10]
                    fill: Any = "none" if method in counts else "full"
                    style = {"linewidth": 1, "color": color, "marker": marker, "fillstyle": fill}
                    panel.plot(xs, ys, label=labels[method], **style)
            log_ticks(panel)
            panel.set_ylabel(axis_name(metric))
            if alone or metric == "psnr":
                panel.set_title(f"{task}, σ = {sigma:g}", fontsize=10)
            if alone or metric == "lpips":
                panel.set_xlabel("seconds per image" if axis == "seconds" else "network evaluations")
    handles = {text: h for p in panels.flat for h, text in zip(*p.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 6), fontsize=8
    )
    return png_of(figure)


def axis_name(metric: str) -> str:
    return "PSNR (dB) ↑" if metric == "psnr" else FIGURES[metric][0]


def log_ticks(panel: Any) -> None:
    """A logarithmic x axis with plain numbers at 1, 2, 5, 10, …"""
    from matplotlib.ticker import LogLocator

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    panel.minorticks_off()


def new_figure(lines: int, columns: int, wide: int = 1) -> tuple[Any, Any]:
    """A figure of equal panels, each as wide as so many."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(3.2 * columns * wide, 4.5), 2.8 * lines), layout="constrained", dpi=130)
    panels = figure.subplots(lines, columns, squeeze=False)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=8)
    return figure, panels


def png_of(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------------
# pictures


@dataclass(frozen=True)
class Tile:
    caption: str
    picture: str  # data URI
    crop: str


@dataclass(frozen=True)
class Strip:
    title: str
    tiles: list[Tile]


def case_of(row: Row) -> Case:
    label, solver = parse_solver(f"{row['solver']}:steps={row['steps']}")
    return Case(row["model"], row["task"], row["sigma"], label, solver)


def picture_grids(run: Path, rows: list[Row]) -> list[Strip]:
    """Truth, measurement and every method, for the first images of each task and noise."""
    by_image: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        by_image.setdefault((row["task"], row["sigma"], row["image"]), []).append(row)
    cases = {(task, sigma): 0 for task, sigma, _ in by_image}
    for task, sigma in cases:
        cases[task, sigma] = max(len(g) for (t, s, _), g in by_image.items() if (t, s) == (task, sigma))
    per_setting = max(PICTURES // max(sum(count + 2 for count in cases.values()), 1), 1)
    shown = dict.fromkeys(cases, 0)
    strips = []
    for (task, sigma, image), group in by_image.items():
        paths = [(row, picture_paths(run / "pictures", case_of(row), image)) for row in group]
        complete = len(group) == cases[task, sigma] and all(p[0].is_file() for _, p in paths)
        if shown[task, sigma] >= per_setting or not complete:
            continue
        shown[task, sigma] += 1
        _, truth, measured = paths[0][1]
        box = busiest_window(truth)
        tiles = [make_tile("truth", truth, box, frame=True), make_tile("measurement", measured, box)]
        for row, (restored, _, _) in paths:
            caption = f"{method_name(row, rows)}, {row['steps']} steps: {row['psnr']:.2f} dB, LPIPS {row['lpips']:.3f}"
            tiles.append(make_tile(caption, restored, box))
        strips.append(Strip(f"{task}, σ = {sigma:g}: {image}", tiles))
    return strips


def worst_cases(run: Path, rows: list[Row]) -> list[Strip]:
    """The highest LPIPS of the first method, for each task and noise."""
    strips = []
    for task, sigma in dict.fromkeys((r["task"], r["sigma"]) for r in rows):
        here = [r for r in rows if (r["task"], r["sigma"]) == (task, sigma)]
        first = tuple(here[0][k] for k in KEY)
        group = sorted((r for r in here if tuple(r[k] for k in KEY) == first), key=lambda r: -r["lpips"])
        tiles = []
        for row in group[:WORST]:
            paths = picture_paths(run / "pictures", case_of(row), row["image"])
            if not all(path.is_file() for path in paths):
                continue
            restored, truth, measured = paths
            box = busiest_window(truth)
            tiles += [
                make_tile(f"{row['image']}: truth", truth, box, frame=True),
                make_tile("measurement", measured, box),
            ]
            tiles.append(make_tile(f"{row['psnr']:.2f} dB, LPIPS {row['lpips']:.3f}", restored, box))
        if tiles:
            strips.append(Strip(f"{task}, σ = {sigma:g}: {case_name(first)}", tiles))
    return strips


def busiest_window(path: Path) -> tuple[int, int, int, int]:
    """Where the truth has most detail: the window that is shown enlarged, (left, top, right, bottom)."""
    from PIL import Image as Pillow

    with Pillow.open(path) as image:
        grey = np.asarray(image.convert("L"), dtype=np.float64)
    side = min(CROP, *grey.shape)
    energy = np.zeros_like(grey)
    energy[1:, 1:] = np.abs(np.diff(grey, axis=0))[:, 1:] + np.abs(np.diff(grey, axis=1))[1:, :]
    total = np.pad(energy, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    sums = total[side:, side:] - total[:-side, side:] - total[side:, :-side] + total[:-side, :-side]
    top, left = np.unravel_index(int(sums.argmax()), sums.shape)
    return int(left), int(top), int(left) + side, int(top) + side


def make_tile(caption: str, path: Path, box: tuple[int, int, int, int], frame: bool = False) -> Tile:
    """A picture and the window of it; the frame shows where that is."""
    from PIL import Image as Pillow
    from PIL import ImageDraw

    with Pillow.open(path) as image:
        picture = image.convert("RGB")
    crop = data_uri(picture.crop(box), "PNG")
    if frame:
        left, top, right, bottom = box
        ImageDraw.Draw(picture).rectangle((left, top, right - 1, bottom - 1), outline=(255, 220, 0))
    return Tile(caption, data_uri(picture, "WEBP", quality=92), crop)


def data_uri(image: Any, kind: str, **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def render(
    page: Page,
    tables: Sequence[Table],
    plots: Sequence[Plot],
    grids: Sequence[Strip],
    worst: Sequence[Strip],
    protocol: dict[str, Any],
) -> str:
    from jinja2 import Environment, StrictUndefined

    source = (Path(__file__).parent / "report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["with_code"] = with_code
    template = environment.from_string(source)
    images = [
        (plot.caption, f"data:image/png;base64,{base64.b64encode(plot.png).decode()}") for plot in plots
    ]
    return template.render(
        page=page,
        tables=tables,
        plots=images,
        grids=grids,
        worst=worst,
        protocol=protocol_lines(protocol),
        names=NAMES,
        fewest=FEWEST,
    )


def with_code(text: str) -> str:
    """HTML of a text in which `commands` stand between backticks."""
    from markupsafe import Markup, escape

    parts = [
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part)
        for i, part in enumerate(text.split("`"))
    ]
    return Markup("").join(parts)
