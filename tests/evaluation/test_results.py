"""Means, confidence intervals, distances and differences of rows whose results are known."""

import csv
import json
import os
import shutil
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from run_folder import IMAGES, PROTOCOL, VALUES, feature, make_row, write_run

from ddc.errors import UserError
from ddc.evaluation.reference import FILE
from ddc.evaluation.results import batch_sizes, half_width, method_name, paired_differences, read_results, write_results
from ddc.evaluation.run import Gallery, RunFolder, key_of, picture_paths, read_rows


def test_the_summary_of_known_rows(tmp_path: Path) -> None:
    write_run(tmp_path)
    summary = {row["solver"]: row for row in read_results(tmp_path).summary}
    assert list(summary) == ["ddc", "ddnm", "pinv"]  # the order of the solvers
    for solver, (psnr, lpips) in VALUES.items():
        row = summary[solver]
        assert row["n"] == 5
        assert row["psnr"] == pytest.approx(statistics.mean(psnr))
        assert row["lpips"] == pytest.approx(statistics.mean(lpips))
        # Student's t with 4 degrees of freedom: 2.776
        assert row["psnr_ci"] == pytest.approx(2.7764 * statistics.stdev(psnr) / 5**0.5, rel=1e-4)
    assert summary["ddc"]["seconds"] == pytest.approx(1.5)  # the median of 0.5, 1, 1.5, 2, 2.5
    assert (summary["ddnm"]["nfe"], summary["ddnm"]["steps"]) == (100, 100)
    # sets that differ by a shift of every feature: the squared length of the shift
    assert summary["ddc"]["fid_truth"] == pytest.approx(0, abs=1e-6)
    assert summary["ddnm"]["fid_truth"] == pytest.approx(3, abs=1e-6)
    assert summary["pinv"]["fid_truth"] == pytest.approx(12, abs=1e-6)
    assert summary["ddc"]["fd_vgg16"] is None and summary["ddc"]["lpips_vgg"] is None


def test_fid_against_other_photographs(tmp_path: Path) -> None:
    """Against the reference in the run's folder: the truth shifted by 2, so that `pinv`, which is shifted by 2 too, has 0."""
    write_run(tmp_path)
    features = np.stack([feature(i) + 2 for i in range(5)]).astype(np.float16)
    np.savez(tmp_path / FILE, features=features)
    summary = {row["solver"]: row for row in read_results(tmp_path).summary}
    assert [summary[name]["fid"] for name in ("ddc", "ddnm", "pinv")] == pytest.approx([12, 3, 0], abs=1e-6)
    assert summary["pinv"]["fid_truth"] == pytest.approx(12, abs=1e-6)


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive"])
def test_a_damaged_reference_is_named(tmp_path: Path, content: bytes) -> None:
    write_run(tmp_path)
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError, match=f"{FILE} is damaged; delete it"):
        read_results(tmp_path)


def test_a_reference_that_is_no_table_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    np.savez(tmp_path / FILE, features=np.array([np.nan, 1.0]))
    with pytest.raises(UserError, match="is damaged"):
        read_results(tmp_path)


def test_paired_differences_of_known_rows(tmp_path: Path) -> None:
    write_run(tmp_path)
    paired = {(row["solver"], row["metric"]): row for row in read_results(tmp_path).paired}
    assert {metric for _, metric in paired} == {"psnr", "ssim", "ssim_paper", "lpips"}
    row = paired["ddnm", "psnr"]
    differences = [-1.0, -0.5, -2.0, -1.0, -1.0]
    assert row["difference"] == pytest.approx(statistics.mean(differences))
    assert row["ci"] == pytest.approx(2.7764 * statistics.stdev(differences) / 5**0.5, rel=1e-4)
    assert row["best"] == "ddc (tiny, 5 steps)" and row["n"] == 5
    assert paired["pinv", "psnr"]["difference"] == pytest.approx(-10)
    assert paired["pinv", "psnr"]["ci"] == pytest.approx(0, abs=1e-9)
    # a lower LPIPS is better: ddc has 0.3 on average, ddnm 0.34
    assert paired["ddnm", "lpips"]["difference"] == pytest.approx(0.04)
    assert ("ddc", "psnr") not in paired and ("ddc", "lpips") not in paired


def test_the_best_of_paired_differences_has_the_most_images() -> None:
    """One easy picture makes no solver the best."""
    key = {"model": "m", "task": "sr4", "sigma": 0.0, "steps": 5}
    rows = [key | {"solver": "ddc", "image": f"{i}", "psnr": 20.0 + i} for i in range(4)]
    rows += [key | {"solver": "ddnm", "image": f"{i}", "psnr": 19.0 + i} for i in range(4)]
    rows += [key | {"solver": "dps", "image": "3", "psnr": 22.5}]
    found = {p["solver"]: p for p in paired_differences(rows)}
    assert set(found) == {"ddnm", "dps"} and all("ddc" in p["best"] for p in found.values())
    assert found["dps"]["n"] == 1 and found["dps"]["difference"] == pytest.approx(-0.5)


def test_half_widths() -> None:
    assert half_width([1.0]) is None
    assert half_width([0.0, 2.0]) == pytest.approx(12.706, abs=1e-3)  # t(1) = 12.706, s/√n = 1


def test_the_files_of_the_results(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_results(tmp_path, read_results(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["protocol"] == PROTOCOL | {"batch_size": {"1": ["ddc", "ddnm", "pinv"]}}
    assert [row["psnr"] for row in results["rows"]] == pytest.approx([32.0, 30.9, 22.0])
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15 and "features" not in rows[0]
    assert [row["psnr"] for row in rows if row["solver"] == "ddnm"] == [
        "29.0",
        "30.5",
        "30.0",
        "32.0",
        "33.0",
    ]
    with (tmp_path / "paired.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 4


def test_some_cases_of_a_run(tmp_path: Path) -> None:
    rows = write_run(tmp_path)
    key = key_of(rows[0])
    assert [row["solver"] for row in read_results(tmp_path, {key}).summary] == ["ddc"]
    with pytest.raises(UserError, match="no measured rows"):
        read_results(tmp_path, {(*key[:4], 99)})


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no measured rows to report"):
        read_results(tmp_path)
    write_run(tmp_path)
    path = tmp_path / "rows-0.jsonl"
    lines = path.read_text().splitlines()
    lines[6] = lines[6][:20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"line 7 of .*rows-0.jsonl is damaged; delete it"):
        read_results(tmp_path)


def test_a_row_of_two_processes_counts_once_and_an_incomplete_line_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_run(tmp_path)
    (tmp_path / "rows-1.jsonl").write_text(json.dumps(rows[0] | {"psnr": 0.0}) + "\n" + '{"model": "ti')
    found, truths = read_rows(tmp_path)
    assert len(found) == 15 and found[0]["psnr"] == 30.0 and set(truths) == set(IMAGES)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with RunFolder(tmp_path) as run:
        run.write([make_row("ddc", 0, task="gauss")])
    assert len(read_rows(tmp_path)[0]) == 16  # the incomplete line was removed before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"rows-0.jsonl cannot be written \(No space left on"),
        RunFolder(tmp_path) as run,
    ):
        os.dup2(os.open("/dev/full", os.O_WRONLY), run.file.fileno())
        run.write([make_row("ddc", 0)])
    assert run.file.closed


def test_a_run_ends_when_its_folder_is_deleted(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as run:
        run.write([make_row("ddc", 0)])
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(UserError, match=r"rows-0\.jsonl was deleted or moved during the run"):
            run.write([make_row("ddc", 1)])


def test_the_protocol_is_extended_not_replaced(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.save_protocol({"seed": 0}, hardware=["a CPU"], models={"a": {"sha256": "1-2"}})
    run.save_protocol({"count": 3}, hardware=["a GPU", "a CPU"], models={"b": {"sha256": "3-4"}})
    assert json.loads((tmp_path / "protocol.json").read_text()) == {
        "seed": 0,
        "count": 3,
        "hardware": ["a CPU", "a GPU"],
        "models": {"a": {"sha256": "1-2"}, "b": {"sha256": "3-4"}},
    }
    run.check({"seed": 0}, {"a": "1-2", "c": "5-6"}, {})
    with pytest.raises(UserError, match=r"seed 0 \(now 1\)"):
        run.check({"seed": 1}, {}, {})
    with pytest.raises(UserError, match="model a: other weights"):
        run.check({"seed": 0}, {"a": "1-9"}, {})


def test_methods_are_named_by_their_model_if_several_ran_them() -> None:
    rows = [make_row("ddc", 0), make_row("pinv", 0)]
    assert [method_name(row, rows) for row in rows] == ["ddc", "pinv"]
    rows.append(make_row("ddc", 0, model="other"))
    assert [method_name(row, rows) for row in rows] == ["ddc (tiny)", "pinv", "ddc (other)"]
    assert batch_sizes([*rows, make_row("pinv", 1, batch=4), make_row("pinv", 2, batch=4)]) == {
        "1": ["ddc"],
        "4": ["pinv"],
    }


def test_the_gallery_keeps_the_worst_pictures(tmp_path: Path) -> None:
    picture = torch.full((3, 8, 8), 0.5)
    with RunFolder(tmp_path) as run, ThreadPoolExecutor(1) as writer:
        rows = [make_row("ddc", i) for i in range(5)]
        gallery = Gallery(run, key_of(rows[0]), {"a.png"}, 1, writer)
        for row in rows:
            for job in gallery.offer([row], [(picture, picture, picture)]):
                job.result()
    folder = picture_paths(tmp_path, rows[0])[2].parent
    assert {path.name for path in folder.glob("*.png")} == {"a.png", "e.png"}  # LPIPS is highest for e
