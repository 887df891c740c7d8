"""Every table and figure of the paper runs, says what it lacks, and shows the paper's figures."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from run_folder import without_pictures

from ddc.cli.reproduce import Name, Reproduce
from ddc.errors import UserError
from ddc.evaluation.experiments import COMMANDS, EXPERIMENTS, find_variants, paper_figures, paper_tables
from ddc.problems import Task
from ddc.solvers import SOLVERS

# of the longest experiment: one solver of each kind, and one level of noise
FEW: dict[str, Any] = {"solvers": ["ddc", "dps", "dds", "pinv"], "sigmas": [0.02]}


def ship(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Take another folder for the shipped model."""
    for module in ("pipeline", "evaluation.benchmark", "evaluation.experiments"):
        monkeypatch.setattr(f"ddc.{module}.DEFAULT_MODEL", folder)


@pytest.fixture(autouse=True)
def small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_metrics: Path) -> None:
    """Without the largest networks of the metrics, the models that are shipped, and the plots of every report."""
    ship(monkeypatch, tmp_path / "shipped" / "default")
    monkeypatch.setattr("ddc.evaluation.report.quality_plots", lambda rows: [])
    monkeypatch.setitem(EXPERIMENTS, "unseen", replace(EXPERIMENTS["unseen"], **FEW))


def reproduce(name: str, model: Path | None, out: Path, **settings: object) -> tuple[list[dict], str]:
    command = Reproduce(name, out=out, model=model, quick=True, size=32, device="cpu", **settings)  # type: ignore[arg-type]
    assert command.run() == 0
    return json.loads((out / "results.json").read_text())["rows"], (out / "report.html").read_text()


def test_experiments_are_what_the_command_offers() -> None:
    assert get_args(Name) == tuple(EXPERIMENTS)
    for experiment in EXPERIMENTS.values():
        assert all(Task.parse(task).family for task in experiment.tasks)
        assert all(text.split(":")[0] in SOLVERS for text in experiment.solvers)
        assert all(name in COMMANDS for name in experiment.models)
        assert experiment.paper is None or experiment.paper in paper_tables()


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_quick_form(name: str, tiny_model: Path, tmp_path: Path) -> None:
    rows, html = reproduce(name, tiny_model, tmp_path / name, limit=1, max_nfe=4)
    assert rows and all(row["nfe"] <= 4 for row in rows)
    assert "Quick form" in html and "http" not in without_pictures(html)
    assert {row["task"] for row in rows} == set(EXPERIMENTS[name].tasks)
    for (task, _), methods in paper_figures(EXPERIMENTS[name]).items():
        assert f"{methods[next(iter(methods))]['psnr']:.2f}" in html, task


def test_the_papers_figures_stand_beside_the_right_method(tiny_model: Path, tmp_path: Path) -> None:
    variant = tmp_path / "no-lpips"
    variant.mkdir()
    (variant / "network").symlink_to(tiny_model / "network")
    rows, html = reproduce("table3", tiny_model, tmp_path / "run", limit=1, models=f"{variant}:name=no-lpips")
    assert [(r["model"], r["solver"]) for r in rows if r["solver"] == "ddc"] == [
        ("default", "ddc"),
        ("no-lpips", "ddc"),
    ]
    lines = [line for line in (tmp_path / "run" / "report.md").read_text().splitlines() if line.startswith("| ")]
    row = {line.split("|")[1].strip(): line for line in lines}
    assert "26.21" in row["ddc (default)"] and "26.84" in row["ddc (no-lpips)"]
    assert "24.23" in row["pigdm"] and "25.72" in row["cddb"]
    assert "still needed" not in html


def test_missing_models_are_named_with_their_command(tiny_model: Path, tmp_path: Path) -> None:
    _, html = reproduce("table6", tiny_model, tmp_path, limit=1)
    assert "still needed" in html and "--tasks gauss --sigma-max 0.05 --w-lpips 0" in html
    assert "23.49" in html  # the paper's figure stands there all the same


def test_variants_of_the_shipped_model_are_found_in_the_repository(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, variant = tmp_path / "src" / "ddc" / "models" / "default", tmp_path / "models" / "no-lpips"
    shutil.copytree(tiny_model, shipped)
    shutil.copytree(tiny_model / "network", variant / "network")
    ship(monkeypatch, shipped)
    rows, html = reproduce("table3", None, tmp_path / "run", limit=1)
    assert [r["model"] for r in rows if r["solver"] == "ddc"] == ["default", "no-lpips"]
    assert "still needed" not in html
    # another model's prior is not theirs
    assert find_variants(["default", "no-lpips"], shipped) == {"no-lpips": variant}
    assert find_variants(["default", "no-lpips"], tiny_model) == {}


def test_faces_take_the_face_prior(tiny_model: Path, tmp_path: Path) -> None:
    rows, html = reproduce("table5", tiny_model, tmp_path / "run", limit=1, models=f"{tiny_model}:name=faces")
    ddc = [row for row in rows if row["solver"] == "ddc" and row["task"] == "sr4"]
    assert [row["model"] for row in ddc] == ["faces", "default"]
    assert ddc[0]["psnr"] == ddc[1]["psnr"]  # the same network with the same prior
    assert {row["model"] for row in rows if row["solver"] == "ddnm"} == {"faces"}
    assert "All solvers use the face prior" in html


def test_without_a_face_model_the_page_says_so(tiny_model: Path, tmp_path: Path) -> None:
    _, html = reproduce("table5", tiny_model, tmp_path / "run", limit=1, max_nfe=2)
    assert "Without a face model" in html and "All solvers use the face prior" not in html


def test_checkpoints_along_training(tiny_model: Path, tmp_path: Path) -> None:
    models = f"{tiny_model}:name=1000,{tiny_model}:name=200"
    rows, html = reproduce("figure8", tiny_model, tmp_path / "run", limit=1, models=models)
    assert [row["model"] for row in rows] == ["200", "1000"]
    assert "still needed" not in html


def test_slow_solvers_on_fewer_pictures(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddc.evaluation.benchmark.SLOW_EVALUATIONS", 15)
    rows, html = reproduce("figure2", tiny_model, tmp_path, limit=2, slow_limit=1, max_nfe=20)
    assert {row["solver"]: row["n"] for row in rows} == {"dps": 1, "ddnm": 1, "unconditional": 1}
    assert "Measured on one picture only" in html
    assert "mean |kurtosis|" in html


def test_without_any_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ddc train ddc"):
        Reproduce("table3", out=tmp_path / "run", quick=True, size=32, device="cpu").run()
