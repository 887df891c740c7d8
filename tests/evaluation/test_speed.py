import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddc.cli import main
from ddc.errors import UserError
from ddc.evaluation.speed import Bench, BenchSettings, kind_of_kernel, kinds_in, random_models
from ddc.evaluation.speed_tables import plot, tables
from ddc.pipeline import RestorationPipeline
from ddc.solvers import SOLVERS

QUICK = BenchSettings(steps=2, size=32, batches=(1, 2), sizes=(32, 64), counts=(1, 2), repeats=1, training=2)


def bench(folder: Path, settings: BenchSettings = QUICK) -> Bench:
    pipe = RestorationPipeline.from_pretrained(folder)
    return Bench(pipe.prior, pipe.network, "cpu", settings, folder, training_speed=lambda *given: 12.5)


@pytest.fixture(scope="module")
def results(tiny_model: Path) -> dict:  # type: ignore[type-arg]
    return bench(tiny_model).run()


def test_everything_is_measured(results: dict) -> None:  # type: ignore[type-arg]
    latency = results["latency"]
    assert latency["speedup"] == pytest.approx(latency["plain"]["seconds"] / latency["fast"]["seconds"])
    assert [(row["way"], row["batch"]) for row in results["throughput"]] == [
        ("plain", 1),
        ("fast", 1),
        ("plain", 2),
        ("fast", 2),
    ]
    assert [row["size"] for row in results["sizes"]] == [32, 64]
    assert [row["count"] for row in results["counts"]] == [1, 2]
    assert all(row["seconds"] > 0 and row["host_mb"] > 0 for row in results["sizes"] + results["counts"])
    assert results["agreement_db"] > 80
    (training,) = results["training"]
    per_picture = (results["models"]["prior"]["gflop"] + 3 * results["models"]["network"]["gflop"]) / 1e3
    assert training["way"] == "plain" and training["images_per_second"] == 12.5
    assert training["tflops"] == pytest.approx(training["images_per_second"] * per_picture)
    measured = {row["solver"] for row in results["solvers"]}
    left_out = {row["what"].removeprefix("solver ") for row in results["skipped"]}
    assert measured | left_out == set(SOLVERS)
    assert {"ddc", "dps", "ddnm", "ddrm"} <= measured
    dps = next(row for row in results["solvers"] if row["solver"] == "dps")
    assert (dps["steps"], dps["measured_steps"]) == (1000, 3)


def test_flops_are_counted_and_rates_follow(results: dict) -> None:  # type: ignore[type-arg]
    models, plain = results["models"], results["latency"]["plain"]
    # the first convolution alone: 9 taps of 12 inputs and 8 outputs on 16×16 pixels
    assert models["prior"]["gflop"] > 2 * 9 * 12 * 8 * 16 * 16 / 1e9
    per_run = 2 * (models["prior"]["gflop"] + models["network"]["gflop"]) / 1e3
    assert plain["tflops"] == pytest.approx(per_run / plain["seconds"])
    assert plain["share_of_peak"] == pytest.approx(plain["tflops"] / results["peak"]["float32"])


def test_tables_plot_and_json(results: dict, tmp_path: Path) -> None:  # type: ignore[type-arg]
    from rich.console import Console

    console = Console(width=120, record=True, file=(tmp_path / "text").open("w"))
    for table in tables(results):
        console.print(table)
    text = console.export_text()
    assert "times as fast" in text and "dps" in text and "larger pictures" in text
    plot(results, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(json.dumps(results)) == results


def test_when_the_time_is_up_nothing_new_is_started(tiny_model: Path, tmp_path: Path) -> None:
    results = bench(tiny_model, replace(QUICK, minutes=1e-9)).run()
    assert "latency" not in results
    assert {row["what"] for row in results["skipped"]} >= {"latency", "throughput", "solvers", "sizes"}
    assert len(tables(results)) == 1
    plot(results, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_a_size_that_would_take_too_long_is_told_beforehand(tiny_model: Path) -> None:
    run = bench(tiny_model)
    run.prepare()
    rows = list(run.growth("size", (32, 1_000_000)))
    assert rows[0]["seconds"] > 0
    assert rows[1]["seconds"] is None
    assert rows[1]["predicted_s"] == pytest.approx(rows[0]["seconds"] * (1_000_000 / 32) ** 2)


def test_out_of_memory_is_noted_and_the_rest_goes_on(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench(tiny_model, replace(QUICK, solvers=False))
    restore = run.restore

    def limited(pipe: RestorationPipeline, batch: int) -> torch.Tensor:
        if batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return restore(pipe, batch)

    monkeypatch.setattr(run, "restore", limited)
    results = run.run()
    assert [row["batch"] for row in results["throughput"]] == [1, 1]
    assert {"what": "throughput, fast, batch 2", "why": "out of memory"} in results["skipped"]
    assert results["sizes"]


def test_kernels_are_sorted_by_their_names() -> None:
    names = {
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_nhwckrsc_nhwc": "convolution",
        "triton_red_fused_native_group_norm_11": "fused normalisation and elementwise",
        "_normalise_whole": "fused normalisation and elementwise",
        "nvjet_hsh_128x256": "matrix product",
        "void pytorch_flash::flash_fwd_kernel": "attention",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "something else": "other",
    }
    assert {name: kind_of_kernel(name) for name in names} == names


def test_the_calls_that_queue_kernels_are_not_counted_again() -> None:
    kinds = torch.autograd.DeviceType
    events = [("aten::conv2d", kinds.CPU, 5e6), ("xmma_fprop", kinds.CUDA, 2e6), ("flash_fwd", kinds.CUDA, 3e6)]
    found = [SimpleNamespace(key=key, device_type=kind, self_device_time_total=time) for key, kind, time in events]
    assert list(kinds_in(found).items()) == [("attention", 3.0), ("convolution", 2.0)]


def test_random_networks_have_no_zero_layers() -> None:
    prior, network = random_models("compact", "compact")
    assert all(p.any() for model in (prior, network) for p in model.parameters())
    assert not math.isnan(float(next(prior.parameters()).sum()))


def test_command(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--device",
        "cpu",
        "--steps",
        "2",
        "--size",
        "32",
        "--batches",
        "1",
        "--sizes",
        "32",
        "--counts",
        "1",
        "--repeats",
        "1",
        "--no-solvers",
    ]
    assert main(["bench", str(tiny_model), *options, "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "bench.json").read_text())
    assert printed["latency"]["speedup"] > 0
    assert (tmp_path / "bench.png").is_file()
    assert main(["bench", str(tiny_model), "--paper-size"]) == 2
    assert main(["bench", str(tiny_model), "--steps", "0"]) == 2


def test_bad_settings_are_refused(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="batches"):
        BenchSettings(batches=(0,))
    with pytest.raises(UserError, match="data-consistency network"):
        Bench(RestorationPipeline.from_pretrained(tiny_model).prior, None, "cpu")
