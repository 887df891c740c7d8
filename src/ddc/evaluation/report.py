"""The report of a run: tables as Markdown, LaTeX and CSV, and one HTML page that contains its pictures."""

import base64
import importlib.util
import io
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddc.errors import UserError
from ddc.evaluation.plots import Plot, scatter
from ddc.evaluation.results import (
    FIGURES,
    HIGHER_IS_BETTER,
    SAMPLED,
    SETS,
    Results,
    case_name,
    method_name,
    read_results,
    write_results,
)
from ddc.evaluation.run import WORST, Key, Row, key_of, picture_paths

CROP = 64  # pixels of the enlarged window
PICTURES = 240  # at most in the grid of one page, which would become too large
LINES = 8  # of a contact sheet
FEWEST = 5  # pictures for a confidence interval
NAMES = ("method", "setting", "task")  # columns of words
# our column → the paper's, which is shown beside it
PAPER = {"psnr": "psnr", "ssim_paper": "ssim", "lpips": "lpips", "fid": "fid"}
BETTER = HIGHER_IS_BETTER | SAMPLED | SETS

Setting = tuple[str, float]  # task, sigma


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
class ReportPage:
    """The contents of a report beside its results."""

    title: str = "Evaluation"
    notes: Sequence[str] = ()  # at the top: what this is, and what is missing
    differences: Sequence[str] = ()  # from the paper's protocol
    missing: Sequence[str] = ()  # models that are still needed, with their commands
    paper: dict[Setting, dict[str, dict[str, float]]] = field(default_factory=dict)
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    method: Callable[[Row], str] = lambda row: str(row["solver"])  # the paper's name of a row
    cases: Collection[Key] | None = None  # the keys of the rows to show; None is all of the run


def check_packages() -> None:
    """Refuse before anything is measured if the report's packages are missing."""
    absent = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(f"the report needs {' and '.join(absent)}: pip install 'deep-data-consistency[eval]'")


def write_report(run: Path, page: ReportPage = ReportPage()) -> Path:
    """Write all forms of the report into the run's folder; returns the HTML page."""
    results = read_results(run, page.cases)
    write_results(run, results)
    notes = list(page.notes)
    if len(results.protocol["batch_size"]) > 1:
        ways = batches_text(results.protocol["batch_size"])
        notes.append(f"Seconds come from batches of different sizes: {ways}. Compare them within one size only.")
    lists = {"": notes, "What differs from the paper": page.differences, "What is still needed": page.missing}
    tables = [
        *page.tables,
        *result_tables(results.summary, page),
        *paired_table(results.paired, results.summary),
    ]
    protocol = protocol_lines(results.protocol)
    (run / "report.md").write_text(markdown(page.title, lists, tables, protocol), encoding="utf-8")
    (run / "report.tex").write_text(latex(tables), encoding="utf-8")
    sheets = contact_sheets(run, results)
    several = int(results.protocol.get("samples") or 1) > 1
    path = run / "report.html"
    html = render(
        title=page.title,
        lists=lists,
        tables=tables,
        plots=list(page.plots) or quality_plots(results.summary),
        grids=picture_grids(run, results.rows),
        worst=worst_cases(run, results.rows),
        sheets=[(text, data_uri(read_picture(sheet), "WEBP", quality=90)) for text, sheet in sheets] if several else [],
        protocol=protocol,
    )
    path.write_text(html, encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------------------
# tables


def setting_of(row: Row) -> Setting:
    return row["task"], row["sigma"]


def result_tables(summary: list[Row], page: ReportPage) -> list[Table]:
    """One table for each task and noise: ours, and the paper's figures beside them if it has any."""
    settings = dict.fromkeys([*map(setting_of, summary), *page.paper])
    if len(settings) > 2 and len(settings) > len(summary) / 3 and not page.paper:
        return [sweep_table(summary)]
    return [setting_table(setting, summary, page) for setting in settings]


def setting_table(setting: Setting, summary: list[Row], page: ReportPage) -> Table:
    """The results of one task and noise."""
    task, sigma = setting
    ours = [row for row in summary if setting_of(row) == setting]
    theirs = page.paper.get(setting, {})
    lines = [(method_name(row, summary), row, theirs.get(page.method(row), {})) for row in ours]
    measured = {page.method(row) for row in ours}
    lines += [(method, {}, figures) for method, figures in theirs.items() if method not in measured]
    rows = [row for _, row, _ in lines]
    heads = ["method", "steps", "n"]
    columns = [[Cell(method) for method, _, _ in lines]]
    columns += [[Cell(str(row.get(name, ""))) for row in rows] for name in ("steps", "n")]
    for key, (heading, decimals) in FIGURES.items():
        if any(row.get(key) is not None for row in rows):
            heads.append(heading if key != "consistency" or sigma else "‖Ax−y‖")
            columns.append(result_column(rows, key))
        if theirs and key in PAPER:
            heads.append(f"paper: {heading}")
            published = [figures.get(PAPER[key]) for _, _, figures in lines]
            columns.append(ranked(published, decimals, BETTER[key]))
    return Table(f"{task}, σ = {sigma:g}", heads, [list(row) for row in zip(*columns, strict=True)])


def sweep_table(summary: list[Row]) -> Table:
    """Many settings of few methods, in one table; the best and the second are those of their setting."""
    keys = [key for key in FIGURES if any(row.get(key) is not None for row in summary)]
    cells = []
    for setting in dict.fromkeys(map(setting_of, summary)):
        rows = [row for row in summary if setting_of(row) == setting]
        columns = [result_column(rows, key) for key in keys]
        for row, figures in zip(rows, zip(*columns, strict=True), strict=True):
            texts = [
                method_name(row, summary),
                row["task"],
                f"{row['sigma']:g}",
                str(row["steps"]),
                str(row["n"]),
            ]
            cells.append([*map(Cell, texts), *figures])
    heads = ["method", "task", "σ", "steps", "n", *(FIGURES[key][0] for key in keys)]
    if any(row["sigma"] == 0 for row in summary):
        heads = ["‖Ax−y‖ (/σ)" if head == FIGURES["consistency"][0] else head for head in heads]
    return Table("All settings", heads, cells)


def result_column(rows: list[Row], key: str) -> list[Cell]:
    """One figure of methods that can be compared; PSNR with its confidence interval."""
    counts = [row.get("n", 0) for row in rows]
    cells = ranked([row.get(key) for row in rows], FIGURES[key][1], BETTER.get(key), counts)
    if key != "psnr":
        return cells
    return [
        Cell(f"{cell.text} ± {row['psnr_ci']:.2f}", cell.place) if n >= FEWEST else cell
        for cell, row, n in zip(cells, rows, counts, strict=True)
    ]


def ranked(
    values: Sequence[float | None], decimals: int, higher: bool | None, counts: Sequence[int] | None = None
) -> list[Cell]:
    """Cells of one column. Values that read the same share a place. Means over fewer pictures than the others (`counts`)
    have none, because they are of other pictures."""
    texts = ["–" if value is None else f"{value:.{decimals}f}" for value in values]
    most = max(counts or [0], default=0)
    compared = [text != "–" and (counts is None or counts[i] == most) for i, text in enumerate(texts)]
    ranks = {float(text) for text, taken in zip(texts, compared, strict=True) if taken}
    if higher is None or len(ranks) < 2:
        return [Cell(text) for text in texts]
    order = sorted(ranks, reverse=higher)
    places = {f"{value:.{decimals}f}": place for place, value in enumerate(order[:2], 1)}
    return [Cell(text, places.get(text, 0) if taken else 0) for text, taken in zip(texts, compared, strict=True)]


def paired_table(paired: list[Row], summary: list[Row]) -> list[Table]:
    """Each case minus the best one of its setting, image by image."""
    found = {(*key_of(row), row["metric"]): row for row in paired}
    metrics = [
        metric
        for metric in ("psnr", "ssim", "lpips", "lpips_vgg", "dists", "identity")
        if any(r["metric"] == metric for r in paired)
    ]
    cells = []
    for row in summary if paired else []:
        line = [f"{row['task']}, σ = {row['sigma']:g}", method_name(row, summary), str(row["steps"])]
        for metric in metrics:
            pair = found.get((*key_of(row), metric))
            interval = "" if pair is None or pair["n"] < FEWEST else f" ± {pair['ci']:.3f}"
            line.append("best" if pair is None else f"{pair['difference']:+.3f}{interval}")
        cells.append([Cell(text, int(text == "best")) for text in line])
    heads = ["setting", "method", "steps", *(FIGURES[metric][0] for metric in metrics)]
    return [Table("Paired differences to the best, image by image", heads, cells)] if cells else []


def quality_plots(summary: list[Row]) -> list[Plot]:
    """PSNR and LPIPS against time and against network evaluations, for settings in which methods differ."""
    captions = {"seconds": "Quality against time per image.", "nfe": "Quality against network evaluations."}
    plots = []
    for axis, caption in captions.items():
        places: dict[Setting, list[float]] = {}
        for row in summary:
            places.setdefault(setting_of(row), []).extend([row[axis]] if row["nfe"] else [])
        settings = [setting for setting, xs in places.items() if xs and max(xs) > 1.5 * min(xs)]
        for start in range(0, len(settings), 4):
            plots.append(Plot(caption, scatter(summary, settings[start : start + 4], axis)))
    return plots


# ---------------------------------------------------------------------------------------------------------
# texts


def markdown(
    title: str, lists: dict[str, Sequence[str]], tables: Sequence[Table], protocol: list[tuple[str, str]]
) -> str:
    lines = [f"# {title}", ""]
    for heading, items in lists.items():
        lines += [f"## {heading}", ""] if heading and items else []
        lines += [*(f"- {item}" for item in items), ""] if items else []
    for table in tables:
        lines += [f"## {table.title}", "", *markdown_lines(table), ""]
    lines += ["## Protocol", "", *(f"- {name}: {text}" for name, text in protocol)]
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
                f"{model}: {facts.get('millions', 0):g} million parameters, sha256 {facts['sha256']}"
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
# pictures


@dataclass(frozen=True)
class Thumbnail:
    caption: str
    picture: str  # data URI
    crop: str


@dataclass(frozen=True)
class Strip:
    title: str
    tiles: list[Thumbnail]


def picture_grids(run: Path, rows: list[Row]) -> list[Strip]:
    """Truth, measurement and every method, for the first images of each task and noise."""
    groups: dict[Setting, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(setting_of(row), {}).setdefault(row["image"], []).append(row)
    methods = {setting: max(map(len, images.values())) for setting, images in groups.items()}
    per_setting = max(PICTURES // max(sum(count + 2 for count in methods.values()), 1), 1)
    strips = []
    for setting, images in groups.items():
        complete = [
            (image, group)
            for image, group in images.items()
            if len(group) == methods[setting] and all(picture_paths(run, row)[2].is_file() for row in group)
        ]
        for image, group in complete[:per_setting]:
            truth, measurement, *_ = picture_paths(run, group[0])
            restored = [
                (
                    f"{method_name(row, rows)}, {row['steps']} steps: {quality(row)}",
                    picture_paths(run, row)[2],
                )
                for row in group
            ]
            tiles = thumbnails([("truth", truth), ("measurement", measurement), *restored])
            strips.append(Strip(f"{setting[0]}, σ = {setting[1]:g}: {image}", tiles))
    return strips


def worst_cases(run: Path, rows: list[Row]) -> list[Strip]:
    """The highest LPIPS of the first method, for each task and noise."""
    first: dict[Setting, Key] = {}
    for row in rows:
        first.setdefault(setting_of(row), key_of(row))
    strips = []
    for (task, sigma), key in first.items():
        tiles = []
        for row in sorted((r for r in rows if key_of(r) == key), key=lambda r: -r["lpips"])[:WORST]:
            truth, measurement, restored = picture_paths(run, row)
            if restored.is_file() and truth.is_file() and measurement.is_file():
                named = [
                    (f"{row['image']}: truth", truth),
                    ("measurement", measurement),
                    (quality(row), restored),
                ]
                tiles += thumbnails(named)
        if tiles:
            strips.append(Strip(f"{task}, σ = {sigma:g}: {case_name(key)}", tiles))
    return strips


def contact_sheets(run: Path, results: Results) -> list[tuple[str, Path]]:
    """Write a picture for each case: a line for each kept image, with the truth, the measurement and all samples.

    Returns captions and files.
    """
    from PIL import Image as Pillow

    samples = int(results.protocol.get("samples") or 1)
    lines: dict[Key, list[list[Path]]] = {}
    for row in results.rows:
        paths = picture_paths(run, row, samples)
        if all(path.is_file() for path in paths):
            lines.setdefault(key_of(row), []).append(paths)
    sheets = []
    for key, found in lines.items():
        width, height = read_picture(found[0][0]).size
        sheet = Pillow.new("RGB", (width * len(found[0]), height * len(found[:LINES])))
        for y, paths in enumerate(found[:LINES]):
            for x, path in enumerate(paths):
                sheet.paste(read_picture(path), (x * width, y * height))
        path = run / "sheets" / f"{'-'.join(found[0][2].parent.relative_to(run / 'pictures').parts)}.png"
        path.parent.mkdir(exist_ok=True)
        sheet.save(path)
        sheets.append((f"{key[1]}, σ = {key[2]:g}: {case_name(key)}; truth, measurement, {samples} samples", path))
    return sheets


def quality(row: Row) -> str:
    return f"{row['psnr']:.2f} dB, LPIPS {row['lpips']:.3f}"


def read_picture(path: Path) -> Any:
    """A kept picture, as Pillow's RGB image."""
    from PIL import Image as Pillow

    try:
        with Pillow.open(path, formats=["PNG"]) as image:
            return image.convert("RGB")
    except Exception as error:  # a damaged file can raise anything
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is damaged ({reason}); delete it, or measure in another --out") from None


def busiest_window(picture: Any) -> tuple[int, int, int, int]:
    """The window of the truth with the most detail, which is shown enlarged: (left, top, right, bottom)."""
    grey = np.asarray(picture.convert("L"), dtype=np.float64)
    side = min(CROP, *grey.shape)
    energy = np.zeros_like(grey)
    energy[1:, 1:] = np.abs(np.diff(grey, axis=0))[:, 1:] + np.abs(np.diff(grey, axis=1))[1:, :]
    total = np.pad(energy, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    sums = total[side:, side:] - total[:-side, side:] - total[side:, :-side] + total[:-side, :-side]
    top, left = np.unravel_index(int(sums.argmax()), sums.shape)
    return int(left), int(top), int(left) + side, int(top) + side


def thumbnails(pictures: Sequence[tuple[str, Path]]) -> list[Thumbnail]:
    """Captions and pictures, the truth first, each with the truth's busiest window; a frame in the truth shows it."""
    from PIL import ImageDraw

    box = busiest_window(read_picture(pictures[0][1]))
    made: list[Thumbnail] = []
    for caption, path in pictures:
        picture = read_picture(path)
        crop = data_uri(picture.crop(box), "PNG")
        if not made:
            left, top, right, bottom = box
            ImageDraw.Draw(picture).rectangle((left, top, right - 1, bottom - 1), outline=(255, 220, 0))
        made.append(Thumbnail(caption, data_uri(picture, "WEBP", quality=92), crop))
    return made


def data_uri(image: Any, kind: str, **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def render(plots: Sequence[Plot], **contents: Any) -> str:
    """The HTML page."""
    from jinja2 import Environment, StrictUndefined

    source = (Path(__file__).parent / "report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["with_code"] = with_code
    images = [(plot.caption, f"data:image/png;base64,{base64.b64encode(plot.png).decode()}") for plot in plots]
    return environment.from_string(source).render(plots=images, names=NAMES, fewest=FEWEST, **contents)


def with_code(text: str) -> str:
    """HTML of a text, with `commands` between backticks as code."""
    from markupsafe import Markup, escape

    parts = [
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(text.split("`"))
    ]
    return Markup("").join(parts)
