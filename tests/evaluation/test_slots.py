"""Measuring in short slots on one machine, and reporting on another."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow
from skimage import data

from ddc.cli.evaluate import Evaluate
from ddc.cli.reproduce import Reproduce
from ddc.datasets import load_images
from ddc.errors import UserError
from ddc.evaluation import benchmark
from ddc.evaluation.benchmark import (
    Case,
    EvaluationOptions,
    Measured,
    Measuring,
    Models,
    evaluate,
    make_cases,
)
from ddc.evaluation.results import in_order
from ddc.evaluation.run import KEY, Timer, progress, read_rows
from ddc.pipeline import RestorationPipeline
from ddc.problems import make_problem
from ddc.solvers import SOLVERS
from ddc.solvers.posterior import PosteriorDenoiser
from tiny import tiny_posterior

SIZE = 32
pytestmark = pytest.mark.usefixtures("small_metrics")
UNNEEDED = ("matplotlib", "jinja2", "skimage", "scipy", "diffusers", "rich", "accelerate")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for i, name in enumerate(("astronaut", "coffee", "cat", "rocket", "astronaut")):
        Pillow.fromarray(getattr(data, name)()[60:110, 90 + i : 150 + i]).save(folder / f"{i}.png")
    return folder


def command(pictures: Path, out: Path, model: Path, **settings: object) -> Evaluate:
    given = {"solver": "ddc,ddnm:steps=4,pinv", "task": "sr4,inpaint92", "sigma": "0.05"} | settings
    return Evaluate(pictures, out, f"{model}:name=tiny", size=SIZE, **given)  # type: ignore[arg-type]


def figures(out: Path) -> list[dict]:
    """The rows of a run without their times, in one order."""
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "batch")} for row in read_rows(out)[0]]
    return sorted(rows, key=lambda row: json.dumps([row[k] for k in (*KEY, "image")]))


def test_the_time_is_up_and_the_next_run_goes_on(
    tiny_model: Path,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert command(pictures, tmp_path / "whole", tiny_model, report=False).run() == 0
    whole = figures(tmp_path / "whole")
    out = tmp_path / "cut"
    measure_batch = Measuring.batch
    now = 0.0

    def slow(self: Measuring, case: Case, *rest: Any) -> Measured:
        nonlocal now
        now += case.evaluations  # a second for each evaluation
        return measure_batch(self, case, *rest)

    monkeypatch.setattr(Measuring, "batch", slow)
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now)
    capsys.readouterr()
    # pinv is free; two batches of ddnm take 4 s each on both tasks; ddc, of 10 s, is then started once
    assert command(pictures, out, tiny_model, minutes=0.5, batch_size=3).run() == 0
    assert now <= 30
    said = capsys.readouterr().out
    counts = {(r["solver"], r["task"]): 0 for r in figures(out)}
    for row in figures(out):
        counts[row["solver"], row["task"]] += 1
    assert counts == {
        **{(solver, task): 5 for solver in ("ddnm", "pinv") for task in ("sr4", "inpaint92")},
        ("ddc", "sr4"): 3,
    }
    missing = "7 of 30 rows are missing (ddc: 7 in sr4 σ=0.05, inpaint92 σ=0.05)"
    assert missing in said and missing in (out / "report.html").read_text()

    monkeypatch.undo()
    assert command(pictures, out, tiny_model, minutes=5, report=False).run() == 0
    assert "missing" not in capsys.readouterr().out
    resumed = figures(out)
    assert [(r["solver"], r["task"], r["image"]) for r in resumed] == [
        (r["solver"], r["task"], r["image"]) for r in whole
    ]
    assert [r["psnr"] for r in resumed] == pytest.approx([r["psnr"] for r in whole], abs=1e-3)


def test_no_time_at_all(tiny_model: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert command(pictures, tmp_path, tiny_model, minutes=0).run() == 0
    assert "30 of 30 rows are missing" in capsys.readouterr().out
    assert not (tmp_path / "report.html").exists()


def test_the_time_of_a_posterior_network_is_that_of_its_own_evaluations(
    tiny_model: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two for a generator with one noise level, not the 20 steps of the SDE, for which there would be no time."""
    shutil.copytree(tiny_model, tmp_path / "model")
    PosteriorDenoiser(tiny_posterior().unet, ([0.5], [1.0]), realism=0.5).save_pretrained(tmp_path / "model/posterior")
    measure_batch, now, begun = Measuring.batch, 0.0, []

    def slow(self: Measuring, case: Case, *rest: Any) -> Measured:
        nonlocal now
        begun.append(case.label)
        measured = measure_batch(self, case, *rest)
        now += measured[0][0]["nfe"]  # a second for each evaluation
        return measured

    monkeypatch.setattr(Measuring, "batch", slow)
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now)
    settings: dict[str, Any] = {"solver": "ddnm:steps=4,posterior", "task": "sr4", "minutes": 0.2, "batch_size": 5}
    assert command(pictures, tmp_path / "out", tmp_path / "model", report=False, **settings).run() == 0
    assert begun == ["posterior", "ddnm"] and now == 2 + 4
    assert "10 rows are in" in capsys.readouterr().out


def test_what_is_not_known_yet_is_guessed_from_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: 0.0)
    timer = Timer(60.0)
    evaluations = {name: SOLVERS[name]().evaluations() for name in ("ddnm", "ddrm", "pigdm", "dps")}

    def allowed() -> set[str]:
        return {name for name, count in evaluations.items() if timer.allows((name,), count)}

    assert allowed() == set(evaluations)
    timer.took(("ddrm",), 20, 2.0)
    assert "ddnm" in allowed() and "dps" not in allowed()
    timer.took(("pigdm",), evaluations["pigdm"], 61.0)
    assert allowed() == {"ddrm"}


def test_rows_are_measured_without_the_packages_of_the_report(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["--images", str(pictures), "--out", str(out), "--solver", "ddc,pinv", "--size", str(SIZE)]
    arguments += ["--model", str(tiny_model), "--no-report", "--device", "cpu"]
    table = ["--images", str(pictures), "--out", str(tmp_path / "table"), "--size", str(SIZE), "--no-report"]
    table += ["--model", str(tiny_model), "--limit", "1", "--max-nfe", "2", "--device", "cpu"]
    program = f"""
import sys
sys.modules.update(dict.fromkeys({UNNEEDED!r}))  # importing one of them fails
from ddc.cli import main
print(main(["evaluate", *{arguments!r}]), main(["reproduce", "table3", *{table!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"10 rows are in {out}",
        f"4 rows are in {tmp_path / 'table'}",  # of ddc, pigdm, cddb and pinv
        "0 0",
    ]
    assert "measured 10 of 10" in done.stderr
    assert not (out / "report.html").exists() and len(read_rows(out)[0]) == 10


def test_a_report_needs_the_rows_alone(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "model"
    shutil.copytree(tiny_model, there)
    monkeypatch.setattr(benchmark, "machine", lambda device, compiled: "A large GPU (torch 2.11)")
    few: dict[str, object] = {"solver": "ddnm:steps=2,pinv", "task": "sr4"}
    assert command(pictures, tmp_path / "run", there, report=False, **few).run() == 0
    monkeypatch.undo()
    shutil.rmtree(there)
    here = tmp_path / "copied"
    shutil.copytree(tmp_path / "run", here)

    def nothing(*_: object) -> None:
        raise AssertionError("nothing is left to measure")

    for name in ("Metrics", "Measuring", "device_options"):
        monkeypatch.setattr(benchmark, name, nothing)
    assert command(pictures, here, there, device="cuda:7", **few).run() == 0
    protocol = json.loads((here / "results.json").read_text())["protocol"]
    assert protocol["hardware"] == ["A large GPU (torch 2.11)"]
    assert "A large GPU" in (here / "report.html").read_text()
    with pytest.raises(UserError, match="does not exist, and it is no model on the Hub"):
        command(pictures, tmp_path / "other", there).run()


def test_a_table_of_the_paper_is_reported_elsewhere_from_rows_of_an_evaluation(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "model"
    shutil.copytree(tiny_model, there)
    out = tmp_path / "run"
    evaluation = command(pictures, out, there, solver="ddc,pigdm:steps=2,pinv", task="sr4,jpeg10:sigma=0", report=False)
    Evaluate(**(vars(evaluation) | {"model": f"{there}:name=default"})).run()
    assert {(r["task"], r["sigma"]) for r in read_rows(out)[0]} == {("sr4", 0.05), ("jpeg10", 0.0)}
    shutil.rmtree(there)
    monkeypatch.setattr("ddc.pipeline.DEFAULT_MODEL", tmp_path / "shipped" / "default")
    table = Reproduce("table3", pictures, out, there, size=SIZE, minutes=0, device="cpu")
    assert table.run() == 0
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert {(r["task"], r["solver"], r["n"]) for r in rows} == {("jpeg10", "ddc", 5), ("jpeg10", "pinv", 5)}
    html = (out / "report.html").read_text()
    assert "26.21" in html and "pigdm on jpeg10" in html and "<h3>sr4" not in html and "<h3>jpeg10" in html


def test_slow_solvers_on_fewer_pictures(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "SLOW_EVALUATIONS", 9)
    assert command(pictures, tmp_path, tiny_model, slow_limit=2, task="sr4").run() == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["solver"]: row["n"] for row in rows} == {"ddc": 2, "ddnm": 5, "pinv": 5}
    html = (tmp_path / "report.html").read_text()
    assert "Measured on 2 pictures only, because they are slow: ddc." in html
    for name in ("0.png", "2.png"):  # what is shown side by side was restored by all
        assert f"sr4, σ = 0.05: {name}" in html


def test_rows_are_shown_in_the_order_of_the_solvers() -> None:
    rows = [
        {"task": task, "sigma": 0.0, "solver": solver}
        for task, solver in (
            ("sr4", "pinv"),
            ("gauss", "pinv"),
            ("sr4", "pigdm:noise_blind=true"),
            ("sr4", "ddc"),
        )
    ]
    assert [(r["task"], r["solver"]) for r in in_order(rows)] == [
        ("sr4", "ddc"),
        ("sr4", "pigdm:noise_blind=true"),
        ("sr4", "pinv"),
        ("gauss", "pinv"),
    ]


def test_vgg16_by_path(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected VGG16.s weights"):
        command(pictures, tmp_path / "run", tiny_model, vgg16=tmp_path / "absent.safetensors").run()
    broken = tmp_path / "vgg16.safetensors"
    broken.write_bytes(b"nothing")
    # weights that cannot be read leave the figure out and are no reason to measure nothing
    assert command(pictures, tmp_path / "run", tiny_model, vgg16=broken, solver="pinv").run() == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {row["lpips_vgg"] for row in results["rows"]} == {None}
    assert str(broken) in results["protocol"]["not_measured"][0]


# ---------------------------------------------------------------------------------------------------------
# compiled networks


def test_compiled_networks_are_always_given_full_batches(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch is filled up, because compiling for its size would take minutes."""
    sizes: list[int] = []
    solve = RestorationPipeline.solve

    def record(self: RestorationPipeline, y: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(y))
        return solve(self, y, *rest)

    monkeypatch.setattr(RestorationPipeline, "solve", record)
    monkeypatch.setattr(benchmark, "device_options", lambda options: {"device": torch.device("cpu")})
    images = load_images(pictures, SIZE)

    def run(out: Path, **options: Any) -> list[dict]:
        models = Models({"tiny": tiny_model})
        cases = make_cases(models, ["inpaint92"], [0.05], ["ddc", "dps:steps=3"])
        evaluate(cases, images, models, EvaluationOptions(out, batch_size=3, **options))
        return figures(out)

    plain = run(tmp_path / "plain")
    assert sizes == [3, 3, 2, 2]  # both solvers restore a batch before the next one
    filled = run(tmp_path / "filled", compile=True)
    assert sizes[4:] == [3, 3, 3, 3]
    assert len(plain) == len(filled) == 5 * 2
    for a, b in zip(plain, filled, strict=True):
        assert (a["solver"], a["image"]) == (b["solver"], b["image"])
        assert a["psnr"] == pytest.approx(b["psnr"], abs=2e-3)
        assert a["consistency"] == pytest.approx(b["consistency"], abs=1e-3)


def test_the_cpu_refuses_to_compile_and_half_precision(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--compile needs a CUDA device|compiles for CUDA devices"):
        command(pictures, tmp_path, tiny_model, compile=True, device="cpu").run()
    with pytest.raises(UserError, match="float16 needs a CUDA device"):
        command(pictures, tmp_path, tiny_model, precision="fp16", device="cpu").run()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", ["sr4", "gauss", "inpaint92", "jpeg10"])
@pytest.mark.parametrize(
    "name", [name for name, solver in SOLVERS.items() if set(solver.needs) <= {"prior", "network"}]
)
def test_no_step_waits_for_the_gpu(name: str, task: str, tiny_model: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(tiny_model).to("cuda", dtype="float32", compile=False, batch=2)
    problem = make_problem(task, 0.0, size=(SIZE, SIZE), seeds=[0, 1])
    problem.operator.to(pipe.device)
    solver = SOLVERS[name]() if name in ("pinv", "one-pass") else SOLVERS[name](steps=4)
    try:
        solver.check(problem)
    except UserError:
        pytest.skip(f"{name} does not take {task}")
    y = problem.operator(torch.zeros(2, 3, SIZE, SIZE, device=pipe.device))
    waits: list[int] = []

    def watch(step: object) -> None:  # what is made once, before or in the first step, may wait
        torch.cuda.set_sync_debug_mode("error")
        waits.append(0)

    try:
        pipe.solve(y, problem, solver, [0, 1], watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == solver.steps


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_on_the_gpu(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    solvers = "ddc,ddnm:steps=5,dps:steps=5,pigdm:steps=5,reddiff:steps=5"
    settings = {"solver": solvers, "device": "cuda", "report": False}
    command(pictures, tmp_path / "plain", tiny_model, **settings).run()
    command(pictures, tmp_path / "fast", tiny_model, batch_size=3, compile=True, **settings).run()
    plain, fast = figures(tmp_path / "plain"), figures(tmp_path / "fast")
    assert len(plain) == len(fast) == 5 * 2 * 5
    for a, b in zip(plain, fast, strict=True):
        assert a["psnr"] == pytest.approx(b["psnr"], abs=0.2)


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress(4) as advance:
        advance(1, "sr4 with ddc")
        advance(3, "sr4 with dps")
    assert "sr4 with dps" in screen.getvalue() and "4/4" in screen.getvalue()
