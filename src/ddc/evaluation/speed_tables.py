"""The results of `ddc bench` as tables and as a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

Results = dict[str, Any]
Rows = list[list[str]]


def tables(results: Results) -> list[Any]:
    """The results as rich tables."""
    from rich.table import Table

    made = []
    for title, columns, rows, caption in _parts(results):
        table = Table(title=title, title_justify="left", caption=caption)
        for i, column in enumerate(columns.split("|")):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        made.append(table)
    return made


def _parts(results: Results) -> Iterator[tuple[str, str, Rows, str | None]]:
    """Title, column names, rows and caption of each table."""
    e = results["environment"]
    size = f"{e['size']}×{e['size']}, {e['steps']} steps"
    rows = [
        [name, f"{row['million_parameters']:.1f} M", f"{row['gflop']:.1f} G"] for name, row in results["models"].items()
    ]
    title = f"{e['device']} ({e['kind']}, {e['threads']} threads), torch {e['torch']}"
    yield title, "|parameters|FLOPs", rows, None
    if "latency" in results:
        yield _latency(results, f"one picture, {size}")
    if results.get("throughput"):
        yield _throughput(results["throughput"], f"batches, {size}")
    if profile := results.get("profile"):
        rows = [[k, f"{s:.4f}", f"{s / profile['seconds']:.0%}"] for k, s in profile["kinds"].items()]
        yield f"where the time goes, batches of {profile['batch']}", "kind|seconds|share", rows, None
    if found := results.get("solvers"):
        rows = [[row["solver"], str(row["steps"]), f"{row['seconds']:.2f}"] for row in found]
        yield "solvers, one picture at their usual number of steps", "solver|steps|seconds", rows, None
    if found := results.get("training"):
        rows = [
            [
                row["way"],
                str(row["batch"]),
                f"{row['images_per_second']:.4g}",
                f"{row['tflops']:.3g}",
                _memory(row),
            ]
            for row in found
        ]
        yield "training", "way|batch|pictures a second|TFLOP/s|memory MB", rows, None
    for what, title in (("count", "number of pictures"), ("size", "larger pictures, by tiles")):
        if found := results.get(f"{what}s"):
            rows = [
                [str(row[what]), f"{row['seconds']:.2f}", _memory(row)]
                if row["seconds"] is not None
                else [str(row[what]), f"about {row['predicted_s']:.0f}", ""]
                for row in found
            ]
            yield title, f"{what}|seconds|memory MB", rows, None


def _latency(results: Results, title: str) -> tuple[str, str, Rows, str]:
    latency = results["latency"]
    rows = []
    for way in ("plain", "fast"):
        row = latency[way]
        cells = [f"{row[key]:.4f}" for key in ("seconds", "prior_s", "network_s", "rest_s")]
        rows.append([way, *cells, f"{row['tflops']:.3g}", f"{row['share_of_peak']:.0%}"])
    caption = f"the fast path is {latency['speedup']:.2f} times as fast"
    if "agreement_db" in results:
        caption += f", and agrees with float32 to {results['agreement_db']:.1f} dB"
    return title, "way|seconds|prior|network|rest|TFLOP/s|of peak", rows, caption


def _throughput(found: list[Results], title: str) -> tuple[str, str, Rows, str | None]:
    rows = []
    for row in found:
        cells = [str(row["batch"]), f"{row['seconds_per_image']:.4f}", _memory(row)]
        rows.append([row["way"], *cells, f"{row['share_of_peak']:.0%}"])
    caption = None
    plain = [row["seconds_per_image"] for row in found if (row["way"], row["batch"]) == ("plain", 1)]
    if plain:
        best = min(found, key=lambda row: row["seconds_per_image"])
        ratio = plain[0] / best["seconds_per_image"]
        caption = f"batches of {best['batch']} with the {best['way']} path: {ratio:.2f} times as fast as the plain loop"
    return title, "way|batch|seconds per picture|memory MB|of peak", rows, caption


def _memory(row: Results) -> str:
    return f"{row.get('device_mb', row.get('host_mb')):.0f}"


def plot(results: dict[str, Any], path: Path) -> None:
    """Throughput, solvers and growth in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for way in ("plain", "fast"):
        rows = [row for row in results.get("throughput", []) if row["way"] == way]
        axes[0].plot([r["batch"] for r in rows], [r["seconds_per_image"] for r in rows], "o-", label=way)
    axes[0].set(xlabel="batch", ylabel="seconds per picture", title="throughput", yscale="log")
    axes[0].legend()
    rows = sorted(results.get("solvers", []), key=lambda row: -row["seconds"])
    axes[1].barh([row["solver"] for row in rows], [row["seconds"] for row in rows])
    axes[1].set(xlabel="seconds per picture", title="solvers", **({"xscale": "log"} if rows else {}))
    rows = [row for row in results.get("sizes", []) if row["seconds"] is not None]
    axes[2].plot([r["size"] for r in rows], [r["seconds"] for r in rows], "o-", label="seconds")
    memory = axes[2].twinx()
    megabytes = [row.get("device_mb", row.get("host_mb")) for row in rows]
    memory.plot([row["size"] for row in rows], megabytes, "s--", color="tab:orange", label="memory")
    memory.set_ylabel("memory, MB")
    axes[2].set(xlabel="side of the picture", ylabel="seconds", title="larger pictures")
    if rows:
        axes[2].set(xscale="log", yscale="log")
        memory.set_ylim(bottom=0)
    figure.suptitle(f"{results['environment']['device']}, torch {results['environment']['torch']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
