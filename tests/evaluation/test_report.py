"""The report of rows whose results are known: numbers, places, plots and pictures."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from run_folder import make_row, write_run

from ddc.errors import UserError
from ddc.evaluation.report import (
    ReportPage,
    Table,
    busiest_window,
    markdown_row,
    quality_plots,
    ranked,
    read_picture,
    result_column,
    write_report,
)


def table_rows(markdown: str, title: str) -> dict[str, list[str]]:
    """The cells of a table by their first one."""
    lines = markdown.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in cells}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of known rows, and its report."""
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    write_report(folder)
    return folder


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take most of the time of a report."""
    monkeypatch.setattr("ddc.evaluation.report.quality_plots", lambda rows: [])


def test_the_page_has_the_right_numbers(run: Path) -> None:
    markdown, html = (run / "report.md").read_text(), (run / "report.html").read_text()
    rows = table_rows(markdown, "sr4, σ = 0.05")
    assert rows["method"][:3] == ["steps", "n", "PSNR ↑"] and "FID to the truth ↓" in rows["method"]
    assert rows["ddc"][:3] == ["5", "5", "**32.00 ± 1.96**"]
    assert rows["ddnm"][:3] == ["100", "5", "<u>30.90 ± 1.98</u>"]
    assert rows["pinv"][:3] == ["1", "5", "22.00 ± 1.96"]
    fid = rows["method"].index("FID to the truth ↓")
    assert [rows[name][fid] for name in ("ddc", "ddnm", "pinv")] == ["**0.0**", "<u>3.0</u>", "12.0"]
    differences = [line for line in markdown.splitlines() if line.startswith("| sr4, σ = 0.05 | ddnm")]
    assert "-1.100 ± 0.680" in differences[0] and "+0.040" in differences[0]
    assert '<td class="place1">32.00 ± 1.96</td>' in html and '<td class="place2">30.90 ± 1.98</td>' in html
    tex = (run / "report.tex").read_text()
    assert r"\textbf{32.00 $\pm$ 1.96}" in tex and r"PSNR $\uparrow$" in tex
    assert "A test computer" in html and "tiny: 1.5 million parameters, sha256 0123-4567" in markdown


def test_the_page_has_the_right_pictures(run: Path) -> None:
    html = (run / "report.html").read_text()
    grid = html.split('id="pictures"')[1]
    # two images have pictures: truth, measurement and three methods each
    assert grid.count("<figcaption>") == 2 * 5 and "sr4, σ = 0.05: a.png" in grid and "c.png" not in grid
    assert "ddc, 5 steps: 30.00 dB, LPIPS 0.100" in grid and "pinv, 1 steps: 21.00 dB, LPIPS 0.600" in grid
    assert 'id="worst"' not in html  # no pictures of the three worst images of ddc (e, d and c) were kept
    assert html.count('src="data:image/webp') == 10 and not re.search(r'src="(?!data:)', html)
    assert html.count('src="data:image/png') == 10 + 2  # enlarged windows, and two plots


@pytest.mark.usefixtures("no_plots")
def test_the_worst_pictures_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, [make_row("ddc", i) for i in range(2)])
    worst = write_report(tmp_path).read_text().split('id="worst"')[1]
    assert worst.index("b.png: truth") < worst.index("a.png: truth")  # by LPIPS
    assert "31.00 dB, LPIPS 0.200" in worst and "sr4, σ = 0.05: ddc (tiny, 5 steps)" in worst


@pytest.mark.usefixtures("no_plots")
def test_the_papers_figures_are_shown_beside_ours(tmp_path: Path) -> None:
    write_run(tmp_path)
    paper = {("sr4", 0.05): {"ddc": {"psnr": 27.77, "lpips": 0.25}, "other": {"psnr": 25.5}}}
    page = ReportPage(paper=paper, differences=["another prior"], missing=["faces: `ddc train`"])
    html = write_report(tmp_path, page).read_text()
    rows = table_rows((tmp_path / "report.md").read_text(), "sr4, σ = 0.05")
    column = rows["method"].index("paper: PSNR ↑")
    assert [rows[name][column] for name in ("ddc", "ddnm", "other")] == ["**27.77**", "–", "<u>25.50</u>"]
    assert rows["other"][:3] == ["", "", "–"]
    assert "What differs from the paper" in html and "<code>ddc train</code>" in html


@pytest.mark.usefixtures("no_plots")
def test_many_settings_of_few_methods_are_one_table(tmp_path: Path) -> None:
    rows = [make_row("ddc", i, sigma=sigma) for sigma in (0.0, 0.1, 0.2) for i in range(2)]
    write_run(tmp_path, rows)
    write_report(tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    assert "## All settings" in markdown and "## sr4" not in markdown and "‖Ax−y‖ (/σ)" in markdown
    assert sum(line.startswith("| ddc | sr4 |") for line in markdown.splitlines()) == 3


def test_a_folder_without_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no measured rows"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("no_plots")
def test_text_in_a_report_is_escaped(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = ReportPage(title="<b>& title", notes=["run `ddc <i>`"], tables=[Table("none", ["a"], [])])
    html = write_report(tmp_path, page).read_text()
    assert "<b>&" not in html and "&lt;b&gt;&amp; title" in html
    assert "run <code>ddc &lt;i&gt;</code>" in html


def test_places_and_intervals() -> None:
    assert [cell.place for cell in ranked([1.0, 3.001, None, 3.0, 2.0], 2, True)] == [0, 1, 0, 1, 2]
    assert [cell.place for cell in ranked([1.0, 2.0], 2, None)] == [0, 0]
    few = ranked([9.0, 1.0, 2.0], 2, True, counts=[10, 100, 100])  # the mean of other pictures
    assert [(cell.text, cell.place) for cell in few] == [("9.00", 0), ("1.00", 2), ("2.00", 1)]
    for n, text in ((5, "20.00 ± 0.50"), (4, "20.00")):  # few pictures give no useful interval
        assert result_column([{"psnr": 20.0, "n": n, "psnr_ci": 0.5}], "psnr")[0].text == text


def test_plots_are_drawn_where_there_is_something_to_compare() -> None:
    row = {"model": "m", "task": "sr4", "sigma": 0.0, "psnr": 20.0, "lpips": 0.5, "n": 4}
    rows = [row | {"solver": name, "nfe": 10, "seconds": s} for name, s in (("ddc", 1.0), ("ddnm", 2.0))]
    free = row | {"solver": "pinv", "nfe": 0, "seconds": 0.1}
    assert [plot.caption for plot in quality_plots([*rows, free])] == ["Quality against time per image."]
    assert quality_plots([rows[0], rows[1] | {"seconds": 1.01}, free]) == []
    assert len(quality_plots([rows[0], rows[1] | {"nfe": 100}])) == 2
    few = rows[1] | {"nfe": 100, "n": 1}
    assert quality_plots([rows[0], few])[0].png != quality_plots([rows[0], few | {"n": 4}])[0].png


def test_the_window_with_most_detail(tmp_path: Path) -> None:
    pixels = np.zeros((200, 200, 3), np.uint8)
    pixels[100:140, 30:80] = np.random.default_rng(0).integers(0, 255, (40, 50, 3))
    Pillow.fromarray(pixels).save(tmp_path / "a.png")
    left, top, right, bottom = busiest_window(read_picture(tmp_path / "a.png"))
    assert left <= 30 and right >= 80 and top <= 100 and bottom >= 140


def test_columns_of_a_markdown_table_stay_apart() -> None:
    assert markdown_row(["method", "mean |kurtosis|"]) == r"| method | mean \|kurtosis\| |"
