"""The figures of a report, drawn with matplotlib."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddc.evaluation.results import FIGURES, method_name
from ddc.evaluation.run import Row


@dataclass(frozen=True)
class Plot:
    caption: str
    png: bytes


def scatter(summary: list[Row], settings: list[tuple[str, float]], axis: str) -> bytes:
    """PSNR above LPIPS, a column for each task and noise; side by side if there is one.

    A method without a network is a dashed line. One that was measured on fewer pictures, which may be easier or harder,
    has hollow marks.
    """
    alone = len(settings) == 1
    figure, panels = new_figure(1, 2) if alone else new_figure(2, len(settings))
    methods = list(dict.fromkeys(method_name(row, summary) for row in summary))
    for column, (task, sigma) in enumerate(settings):
        here = [row for row in summary if (row["task"], row["sigma"]) == (task, sigma)]
        for line, metric in enumerate(("psnr", "lpips")):
            panel = panels[0][line] if alone else panels[line][column]
            for number, method in enumerate(methods):
                rows = [row for row in here if method_name(row, summary) == method]
                draw_method(panel, rows, axis, metric, method, number, max(row["n"] for row in summary))
            log_ticks(panel)
            panel.set_ylabel(axis_name(metric))
            if alone or metric == "psnr":
                panel.set_title(f"{task}, σ = {sigma:g}", fontsize=10)
            if alone or metric == "lpips":
                panel.set_xlabel("seconds per image" if axis == "seconds" else "network evaluations")
    handles = {text: h for p in panels.flat for h, text in zip(*p.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 6), fontsize=8)
    return png_of(figure)


def draw_method(panel: Any, rows: list[Row], axis: str, metric: str, method: str, number: int, most: int) -> None:
    """The points of one method in one panel; `most` is the usual number of pictures."""
    points = sorted((row["nfe"], row[axis], row[metric]) for row in rows)
    if not points:
        return
    few = rows[0]["n"] < most
    style: dict[str, Any] = {"color": f"C{number % 10}", "linewidth": 1}
    style["label"] = f"{method} (n = {rows[0]['n']})" if few else method
    if points[0][0] == 0:
        panel.axhline(points[0][2], linestyle="--", **style)
        return
    _, xs, ys = zip(*points, strict=True)
    marker = "osD^vP*Xhd"[number // 10 % 10]
    panel.plot(xs, ys, marker=marker, fillstyle="none" if few else "full", **style)


def curves(
    summary: list[Row],
    axis: Callable[[Row], float],
    label: str,
    marks: dict[float, dict[str, float]],
    log: bool = False,
) -> bytes:
    """PSNR, SSIM, LPIPS and FD-VGG16 along an axis, a line for each method; the paper's values are crosses."""
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


def axis_name(metric: str) -> str:
    return "PSNR (dB) ↑" if metric == "psnr" else FIGURES[metric][0]


def log_ticks(panel: Any) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2, 5, 10, …"""
    from matplotlib.ticker import LogLocator

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    panel.minorticks_off()


def new_figure(lines: int, columns: int, wide: int = 1) -> tuple[Any, Any]:
    """A figure of equal panels, each `wide` times the usual width."""
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
