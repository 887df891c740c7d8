"""The benchmark: the same numbers however it is cut up, interrupted or batched."""

import importlib.util
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from run_folder import without_pictures
from skimage import data

from ddc.cli.evaluate import Evaluate
from ddc.datasets import CleanImage, evenly, load_images
from ddc.errors import UserError
from ddc.evaluation.benchmark import (
    EvaluationOptions,
    Measured,
    Measuring,
    Models,
    cap_evaluations,
    evaluate,
    make_cases,
    parse_models,
)
from ddc.evaluation.experiments import bundled_images
from ddc.evaluation.results import COLUMNS, paired_differences, read_results, write_results
from ddc.evaluation.run import KEY, WORST, RunFolder, picture_paths, read_rows, solver_label
from ddc.perceptual import vgg16_weights
from ddc.priors import Prior
from ddc.problems import measure
from ddc.solvers.base import make_solver
from ddc.solvers.bridge import Bridge
from processes import start_two

SIZE = 32
pytestmark = pytest.mark.usefixtures("small_metrics")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for i, name in enumerate(("astronaut", "coffee", "cat", "rocket")):
        Pillow.fromarray(getattr(data, name)()[60:110, 90 + i : 150 + i]).save(folder / f"{name}.png")
    return folder


def settle(row: dict) -> dict:
    """A row without what differs from run to run."""
    return {k: v for k, v in row.items() if k not in ("seconds", "batch", "features")}


def run_all(model: Path, pictures: Path, out: Path, batch_size: int = 1, **limits: int) -> list[dict]:
    models = Models({"tiny": model})
    cases = make_cases(models, ["sr4:sigma=0", "inpaint92"], [0.05], ["ddc", "ddnm:steps=3", "pinv"])
    evaluate(cases, load_images(pictures, SIZE, **limits), models, EvaluationOptions(out, batch_size=batch_size))
    rows, _ = read_rows(out)
    return sorted((settle(row) for row in rows), key=lambda r: json.dumps([r[k] for k in (*KEY, "image")]))


@pytest.fixture(scope="module")
def whole(tiny_model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A run without an interruption, one picture at a time, and its rows."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, run_all(tiny_model, pictures, folder)


def test_interrupted_evaluation_ends_with_the_same_numbers(
    whole: tuple[Path, list[dict]], tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whole
    assert len(expected) == 2 * 3 * 4

    calls = 0
    measure_batch = Measuring.batch

    def interrupted(*args: Any) -> Measured:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise KeyboardInterrupt
        return measure_batch(*args)

    monkeypatch.setattr(Measuring, "batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(tiny_model, pictures, tmp_path / "cut")
    path = tmp_path / "cut" / "rows-0.jsonl"
    before = read_rows(tmp_path / "cut")[0]
    assert len(before) == 10
    path.write_text(path.read_text() + '{"model": "tiny", "task": "sr')  # as a kill while writing leaves it
    resumed = run_all(tiny_model, pictures, tmp_path / "cut")
    assert calls == 11 + len(expected) - 10  # nothing was measured twice
    assert resumed == expected
    assert read_rows(tmp_path / "cut")[0][:10] == before

    # and the summaries agree too
    both = []
    for run in (folder, tmp_path / "cut"):
        write_results(run, read_results(run))
        both.append(json.loads((run / "results.json").read_text())["rows"])
    for row in (*both[0], *both[1]):
        row.pop("seconds")
    assert both[0] == both[1]


def test_batches_and_processes_give_the_same_numbers(
    whole: tuple[Path, list[dict]], tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = whole[1]
    batched = run_all(tiny_model, pictures, tmp_path / "batched", batch_size=4)
    monkeypatch.setattr(RunFolder, "wait_for_all", lambda run: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        shared = run_all(tiny_model, pictures, tmp_path / "shared", batch_size=2)
    for other in (batched, shared):
        assert len(other) == len(single)
        for a, b in zip(single, other, strict=True):
            assert a["image"] == b["image"] and a["solver"] == b["solver"]
            for name in ("psnr", "ssim", "lpips", "consistency"):
                assert a[name] == pytest.approx(b[name], abs=2e-4)


def test_two_processes_of_a_launcher(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["evaluate", "--images", str(pictures), "--out", str(out), "--model", str(tiny_model)]
    words += ["--size", str(SIZE), "--device", "cpu", "--solver", "pinv", "--limit", "3"]
    for process in start_two(words, tmp_path / "said"):
        process.join(120)
        assert process.exitcode == 0, (tmp_path / "said-0").read_text()
    assert {path.name for path in out.glob("rows-*")} == {"rows-0.jsonl", "rows-1.jsonl"}
    assert json.loads((out / "results.json").read_text())["rows"][0]["n"] == 3
    assert (out / "report.html").is_file()


def test_measurements_depend_on_name_and_seed_alone(pictures: Path) -> None:
    images = load_images(pictures, SIZE)
    x = torch.stack([image.pixels for image in images]).float() / 127.5 - 1
    names = [image.name for image in images]
    _, y = measure("inpaint92", 0.05, x, names, seed=0)
    _, again = measure("inpaint92", 0.05, x[2:3], names[2:3], seed=0)
    torch.testing.assert_close(y[2:3], again)
    _, other = measure("inpaint92", 0.05, x, names, seed=1)
    assert not torch.allclose(y, other)
    # the same field of noise, scaled, for every σ
    _, clean = measure("sr4", 0.0, x, names, seed=0)
    (_, low), (_, high) = (measure("sr4", sigma, x, names, seed=0) for sigma in (0.05, 0.1))
    torch.testing.assert_close(high - clean, 2 * (low - clean), atol=1e-5, rtol=0)


def test_a_run_of_other_settings_is_refused(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    models = Models({"tiny": tiny_model})
    cases = make_cases(models, ["sr4"], [0], ["pinv"])
    images = load_images(pictures, SIZE)
    evaluate(cases, images, models, EvaluationOptions(tmp_path))
    with pytest.raises(UserError, match=r"was measured with seed 0 \(now 1\)"):
        evaluate(cases, images, models, EvaluationOptions(tmp_path, seed=1))
    changed = [CleanImage(images[0].name, 255 - images[0].pixels)]
    with pytest.raises(UserError, match="another picture"):
        evaluate(cases, changed, models, EvaluationOptions(tmp_path))


def test_rows_of_the_prior_stay_when_its_network_is_another(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(tiny_model / "prior", folder / "prior")
    images = load_images(pictures, SIZE, 1)

    def run(solver: str) -> list[Any]:
        models = Models({"ours": folder})
        evaluate(make_cases(models, ["sr4"], [0], [solver]), images, models, EvaluationOptions(out))
        return read_rows(out)[0]

    (baseline,) = run("ddnm:steps=2")
    shutil.copytree(tiny_model / "network", folder / "network")  # trained later
    assert run("ddc:steps=2")[0] == baseline
    weights = folder / "network" / "config.json"
    weights.write_text(weights.read_text() + "\n")
    with pytest.raises(UserError, match="model ours: other weights"):
        run("ddnm:steps=2")


def test_rows_of_a_bridge_do_not_stay_when_it_is_another(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(tiny_model / "prior", folder / "prior")
    Bridge(Prior.from_pretrained(folder / "prior").unet, "sr4").save_pretrained(folder / "i2sb-sr4")
    images = load_images(pictures, SIZE, 1)

    def run(solver: str) -> int:
        models = Models({"ours": folder})
        return evaluate(make_cases(models, ["sr4"], [0], [solver]), images, models, EvaluationOptions(out)).rows

    assert run("i2sb:steps=2") == run("ddnm:steps=2") == 1
    config = folder / "i2sb-sr4" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(UserError, match="ours/i2sb-sr4: other weights"):
        run("i2sb:steps=2")
    assert run("ddnm:steps=2") == 1  # it has no use for the bridge


def test_what_cannot_run_is_said_and_the_rest_is_measured(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    models = Models({"tiny": tiny_model})
    cases = make_cases(models, ["jpeg37"], [0], ["ddnm", "cddb", "pinv"])
    outcome = evaluate(cases, load_images(pictures, SIZE, 1), models, EvaluationOptions(tmp_path))
    skipped = outcome.skipped
    assert len(skipped) == 2 and not outcome.left and outcome.rows == 1
    assert "ddnm needs" in skipped[0] and "ddc train i2sb --task jpeg37" in skipped[1]
    assert {row["solver"] for row in read_rows(tmp_path)[0]} == {"pinv"}


def test_nothing_to_measure_is_an_error(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    models = Models({"tiny": tiny_model})
    cases = make_cases(models, ["jpeg10"], [0], ["ddnm"])
    with pytest.raises(UserError, match="nothing can be measured: ddnm on jpeg10"):
        evaluate(cases, load_images(pictures, SIZE, 1), models, EvaluationOptions(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        load_images(tmp_path / "absent")


def test_an_archive_holds_the_pictures_of_its_folder(pictures: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "pictures.tar", "w") as archive:
        archive.add(pictures, ".")  # the names in it are ./astronaut.png and so on
    packed, loose = load_images(tmp_path / "pictures.tar", SIZE), load_images(pictures, SIZE)
    assert [image.name for image in packed] == [image.name for image in loose]
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(packed, loose, strict=True))


def test_missing_packages_are_named_first(
    tiny_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jinja2" else find(name))
    with pytest.raises(UserError, match=r"needs jinja2: pip install 'deep-data-consistency\[eval\]'"):
        Evaluate(pictures, tmp_path / "run", str(tiny_model)).run()
    assert not (tmp_path / "run").exists()


def test_results_schema_report_and_paired_differences(tiny_model: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = Evaluate(pictures, out, str(tiny_model), "ddc,pinv", "sr4", "0,0.05", size=SIZE, samples=2, device="cpu")
    assert command.run() == 0
    results = json.loads((out / "results.json").read_text())
    assert set(results) == {"rows", "protocol"}
    assert len(results["rows"]) == 4
    for row in results["rows"]:
        assert tuple(row)[: len(COLUMNS)] == COLUMNS
        assert set(row) - set(COLUMNS) == {"spread", "ratio", "crps", "coverage", "psnr_mean"}
        assert row["psnr_mean"] >= row["psnr"] - 1e-6 and row["crps"] > 0
        assert row["n"] == 4 and row["psnr_ci"] > 0 and row["lpips_vgg"] is None
    ddc, pinv = results["rows"][:2]
    assert (ddc["nfe"], ddc["steps"], pinv["nfe"]) == (10, 5, 0)
    assert ddc["spread"] > 0 and pinv["spread"] == 0 and ddc["ratio"] > 0 and pinv["ratio"] == 0
    assert len(list((out / "sheets").glob("*.png"))) == 4
    with Pillow.open(out / "sheets" / "tiny-sr4-0.05-ddc-5.png") as sheet:
        assert sheet.size == (4 * SIZE, 4 * SIZE)  # truth, measurement and two samples, of four pictures
    assert "VGG16" in results["protocol"]["not_measured"][0]
    assert results["protocol"]["size"] == [SIZE, SIZE] and results["protocol"]["models"]["tiny"]["millions"] > 0

    html = (out / "report.html").read_text()
    assert "<th>‖Ax−y‖</th>" in html and "<th>‖Ax−y‖/σ</th>" in html  # without noise there is no σ to divide by
    assert "http" not in without_pictures(html) and "<link" not in html and "<script" not in html
    assert html.count('src="') == html.count('src="data:image/')
    assert html.count("<figure>") > 4 * 3 and 'class="place1"' in html
    assert "**" in (out / "report.md").read_text() and r"\textbf{" in (out / "report.tex").read_text()
    for name in ("results.csv", "rows.csv", "paired.csv"):
        assert len((out / name).read_text().splitlines()) > 3

    rows, _ = read_rows(out)
    by = {(r["solver"], r["image"]): r["psnr"] for r in rows if r["sigma"] == 0}
    expected = np.mean(
        [by["ddc", f"{n}.png"] - by["pinv", f"{n}.png"] for n in ("astronaut", "coffee", "cat", "rocket")]
    )
    found = [p for p in paired_differences(rows) if p["metric"] == "psnr" and p["sigma"] == 0]
    assert len(found) == 1 and abs(found[0]["difference"]) == pytest.approx(abs(expected))


def test_seconds_of_different_batches_are_not_compared_in_silence(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    common = {"size": SIZE, "keep": 0, "device": "cpu"}
    assert Evaluate(pictures, tmp_path, str(tiny_model), "pinv", "sr4", "0", batch_size=3, **common).run() == 0
    assert "batches of different sizes" not in (tmp_path / "report.md").read_text()  # the last holds one picture
    assert Evaluate(pictures, tmp_path, str(tiny_model), "pinv,ddc", "sr4", "0", **common).run() == 0
    assert "batches of different sizes: 1 (ddc), 3 (pinv)" in (tmp_path / "report.md").read_text()
    protocol = json.loads((tmp_path / "results.json").read_text())["protocol"]
    assert protocol["batch_size"] == {"1": ["ddc"], "3": ["pinv"]}


def test_vgg16_figures_where_its_weights_are(
    tiny_model: Path, pictures: Path, tmp_path: Path, small_metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("DDC_VGG16")
        patch.setenv("XDG_CACHE_HOME", str(small_metrics))
        try:
            weights = vgg16_weights()
        except UserError:
            pytest.skip("VGG16's weights cannot be fetched here")
    monkeypatch.setenv("DDC_VGG16", str(weights))
    models = Models({"tiny": tiny_model})
    cases = make_cases(models, ["sr2"], [0], ["pinv"])
    evaluate(cases, load_images(pictures, SIZE), models, EvaluationOptions(tmp_path))
    (row,) = read_results(tmp_path).summary
    assert 0 < row["lpips_vgg"] < 1 and row["fd_vgg16"] > 0


def test_worst_pictures_of_the_first_method_are_kept_and_others_are_not(
    tiny_model: Path, pictures: Path, tmp_path: Path
) -> None:
    models = Models({"tiny": tiny_model})
    pinv, ddnm = make_cases(models, ["sr4"], [0], ["pinv", "ddnm:steps=2"])
    evaluate([pinv, ddnm], load_images(pictures, SIZE), models, EvaluationOptions(tmp_path, batch_size=2, keep=0))
    rows = [row for row in read_rows(tmp_path)[0] if row["solver"] == "ddnm"]
    worst = sorted(rows, key=lambda r: -r["lpips"])[:WORST]
    kept = {path.stem for path in picture_paths(tmp_path, rows[0])[2].parent.glob("*.png")}
    assert kept == {Path(row["image"]).stem for row in worst} and len(kept) == WORST < len(rows)
    assert not picture_paths(tmp_path, rows[0] | {"solver": "pinv", "steps": 1})[2].parent.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": SIZE + 2}, f"{SIZE + 2}×{SIZE + 2} pixels cannot be made 4 times smaller"),
        ({"size": 16}, "expected at least 32 pixels"),
        ({"batch_size": 0}, "--batch-size is 0; expected 1 or more"),
        ({"samples": 0}, "--samples is 0; expected 1 or more"),
        ({"task": "sr4:sigma=much"}, "sigma of sr4 is 'much'; expected a number"),
    ],
)
def test_settings_that_cannot_be_measured(
    tiny_model: Path, pictures: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Evaluate(pictures, tmp_path / "run", str(tiny_model), **{"task": "sr4", "size": SIZE} | settings).run()


def test_what_is_left_out_is_said(
    tiny_model: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Evaluate(pictures, tmp_path / "run", str(tiny_model), "pinv,ddrm", "jpeg10", "0", size=SIZE, limit=1)
    assert command.run() == 0
    assert "skipped ddrm on jpeg10: ddrm needs an operator with an SVD" in capsys.readouterr().err


def test_solvers_are_parsed_and_capped(tiny_model: Path) -> None:
    assert solver_label("pigdm:noise_blind=true:steps=7") == "pigdm:noise_blind=true"
    assert cap_evaluations(make_solver("dps"), 20).steps == 20
    assert cap_evaluations(make_solver("ddc"), 4).evaluations() == 4
    assert cap_evaluations(make_solver("ddc"), 1).steps == 2
    models = Models({"tiny": tiny_model})
    (case,) = make_cases(models, ["jpeg10:sigma=0.1"], [0], ["pigdm:noise_blind=true:steps=7"])
    assert case.key == ("tiny", "jpeg10", 0.1, "pigdm:noise_blind=true", 7)
    assert case.solver.noise_blind is True and case.evaluations == 7  # type: ignore[attr-defined]
    for wrong in ("nothing", "ddnm:colour=3", "ddnm:eta", "ddnm:eta=much", "ddnm:steps=0"):
        with pytest.raises(UserError):
            make_cases(models, ["sr4"], [0], [wrong])
    with pytest.raises(UserError, match="sr4 has no setting 'noise'"):
        make_cases(models, ["sr4:noise=0"], [0], ["ddc"])


def test_models_that_share_a_prior_run_its_solvers_once(tiny_model: Path, tmp_path: Path) -> None:
    variant = tmp_path / "variant"
    variant.mkdir()
    (variant / "network").symlink_to(tiny_model / "network")
    models = Models({"a": tiny_model, "b": variant})
    cases = make_cases(models, ["sr4"], [0], ["ddc", "ddnm", "pinv"], steps=[2, 3])
    keys = {(case.model, case.label, case.solver.steps) for case in cases}
    assert keys == {("a", "ddc", 2), ("a", "ddc", 3), ("b", "ddc", 2), ("b", "ddc", 3)} | {
        ("a", "ddnm", 2),
        ("a", "ddnm", 3),
        ("a", "pinv", 1),
    }
    assert models.pipeline("b").folder == variant and models.prior_folder("b") == models.prior_folder("a")


def test_a_fingerprint_is_of_what_computes(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "whole")
    shutil.copytree(tiny_model / "network", tmp_path / "alone" / "network")
    (tmp_path / "alone" / "README.md").write_text("a card")
    (tmp_path / "alone" / "network" / "training.json").write_text("{}")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "network").symlink_to(tiny_model / "network")
    models = Models({name: tmp_path / name for name in ("whole", "alone", "linked")})
    assert models.fingerprint("alone") == models.fingerprint("whole") == models.fingerprint("linked")
    facts = models.facts()
    assert facts["alone"]["millions"] == facts["whole"]["millions"] > 0 and facts["alone"]["name"] == "alone"

    changed = tmp_path / "whole" / "prior" / "scheduler" / "scheduler_config.json"
    changed.write_text(changed.read_text() + " ")
    network, prior = models.fingerprint("whole").split("-")
    again = Models({"whole": tmp_path / "whole"}).fingerprint("whole").split("-")
    assert again[0] == network and again[1] != prior


def test_images_are_chosen_evenly_and_checked(pictures: Path, tmp_path: Path) -> None:
    assert [image.name for image in load_images(pictures, SIZE, 2)] == ["astronaut.png", "coffee.png"]
    assert evenly(range(100), 4) == [0, 25, 50, 75] and evenly(evenly(range(100), 20), 4) == [0, 25, 50, 75]
    assert evenly([1, 2, 3], 5) == [1, 2, 3] and evenly([1, 2], 0) == []
    assert [image.name for image in bundled_images(64, 3)] == ["astronaut", "coffee", "cat"]
    with pytest.raises(UserError, match="at least 256×256"):
        load_images(pictures, 256)
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(UserError, match="cannot be read"):
        load_images(tmp_path, SIZE)
    with pytest.raises(UserError, match="limit"):
        load_images(pictures, SIZE, 0)


def test_models_are_named(tmp_path: Path) -> None:
    assert parse_models("x:name=a,some/y") == {"a": Path("x"), "y": Path("some/y")}
    with pytest.raises(UserError, match="two models"):
        parse_models("x:name=a,y:name=a")
    with pytest.raises(UserError, match="has no setting 'label'"):
        parse_models("x:label=a")
    with pytest.raises(UserError, match="does not exist"):
        Models({"a": tmp_path / "absent"})
