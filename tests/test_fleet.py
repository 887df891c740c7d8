"""Many workers: `ddc restore --ray`, `ddc evaluate --ray` and `ddc.fleet.restore`, with one Ray for all tests."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skimage import data

from ddc import fleet
from ddc.cli import main
from ddc.cli.files import Item, RayOptions
from ddc.cli.restore import Restore
from ddc.cluster import _check_answer, cluster, pool, told
from ddc.errors import UserError
from ddc.evaluation.run import read_rows
from ddc.fleet import LOST, SMALL_TILE, Job, Worker
from ddc.images import Picture

LONG = pytest.mark.skipif("DDC_LONG" not in os.environ, reason="takes a minute; set DDC_LONG=1")
OPTIONS = ("--task", "sr2", "--steps", "1")


@pytest.fixture(scope="module")
def ray(small_metrics: Path) -> Iterator[Any]:
    """Ray with two cores, and a GPU that is only declared."""
    pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.data", reason="ray[data] is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"CPU": 2, "GPU": 1}))
        with cluster("") as ray:
            patch.undo()
            yield ray
    assert not ray.is_initialized()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures of two sizes and formats, and a file that is none."""
    for number in range(6):
        picture = Picture(data.astronaut()[8 * number :, 40:][: 12 + 4 * (number % 2), :20])
        picture.write(tmp_path / "in" / ("below" if number > 3 else "") / f"{number}.{'jpg' if number % 3 else 'png'}")
    (tmp_path / "in" / "bad.png").write_bytes(b"not a picture")
    return tmp_path


@pytest.fixture
def restore(tiny_model: Path) -> Callable[..., int]:
    def run(*arguments: object) -> int:
        return main(["restore", *map(str, arguments), *OPTIONS, "--model", str(tiny_model)])

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def job_file(folder: Path, **changes: Any) -> None:
    """Make the file of a job that was killed, from that of one that runs."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    state = json.loads((folder / "ddc-job.json").read_text())
    (folder / "ddc-job.json").write_text(json.dumps(state | {"pid": ended.pid} | changes))


# ---------------------------------------------------------------------------------------------------------
# with Ray


def test_the_files_are_those_of_one_computer_and_a_killed_job_continues(
    ray: Any, restore: Callable[..., int], tiny_model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert restore(folder / "in", "-o", folder / "one", "--json") == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert restore(folder / "in", "-o", folder / "many", "--json", "--ray", "--device", "cpu") == 1
    told = capsys.readouterr()
    assert contents(folder / "one") == contents(folder / "many")
    by_ray = {line["input"]: line for line in map(json.loads, told.out.splitlines())}
    assert len(by_ray) == len(told.out.splitlines()) == 7
    for line in lines:
        same = ("task", "sigma", "width", "evaluations", "error")
        assert [by_ray[line["input"]].get(name) for name in same] == [line.get(name) for name in same]
    assert re.search(r"7 of 7, [\d.]+ a second\n", told.err) and "they are listed in" in told.err

    # as if it had been killed, after some were finished
    command = Restore(inputs=(folder / "in",), out=folder / "many", task="sr2", steps=1, model=tiny_model)
    with Job(command):
        time.sleep(0.05)
        for name in ("0.png", "1.jpg"):
            Picture(np.zeros((2, 2, 3), np.uint8)).write(folder / "many" / name)
        job_file(folder / "many")
        state = (folder / "many" / "ddc-job.json").read_bytes()
    (folder / "many" / "ddc-job.json").write_bytes(state)
    (folder / "in" / "bad.png").unlink()
    assert restore(folder / "in", "-o", folder / "many", "--ray", "--workers", "1") == 0  # on the GPU, as Ray believes
    made = capsys.readouterr().out.splitlines()
    assert sorted(Path(name).name for name in made) == ["2.jpg", "3.png", "4.jpg", "5.jpg"]
    assert Picture.read(folder / "many" / "0.png").size == (2, 2)
    assert not (folder / "many" / "ddc-job.json").exists()
    assert not (folder / "many" / "ddc-failures.json").exists()


@LONG
def test_a_dataset(ray: Any, restore: Callable[..., int], tiny_model: Path, folder: Path) -> None:
    restore(folder / "in", "-o", folder / "one")
    dataset = ray.data.read_binary_files(str(folder / "in"), include_paths=True)
    options = {"model": tiny_model, "steps": 1, "device": "cpu", "workers": 1}
    rows = fleet.restore(dataset, "sr2", **options).take_all()
    assert len(rows) == 7
    for row in rows:
        if Path(row["path"]).name == "bad.png":
            assert row["bytes"] is None and "bad.png is not a picture" in row["error"] and "ddc-" not in row["error"]
            continue
        assert row["error"] is None and json.loads(row["line"])["task"] == "sr2"
        assert row["bytes"] == (folder / "one" / Path(row["path"]).relative_to(folder / "in")).read_bytes()


def test_a_lost_worker(ray: Any, tiny_model: Path, folder: Path) -> None:
    """What is finished is left; a picture that costs workers gets small tiles, and then its line in the manifest."""
    sources = [folder / "in" / f"{name}" for name in ("0.png", "1.jpg", "2.jpg", "3.png")]
    items = [Item(source, folder / "out" / source.name) for source in sources]
    command = Restore(inputs=(), out=folder / "out", task="sr16", steps=1, model=tiny_model)
    began = time.time() - 1
    Picture(np.zeros((2, 2, 3), np.uint8)).write(items[0].target)
    ledger = ray.remote(num_cpus=0)(fleet.Ledger).remote()
    ray.get(ledger.take.remote(str(items[0].source)))
    for item, lost in zip(items, (0, 1, LOST - 1, LOST), strict=True):
        ray.get([ledger.begin.remote(str(item.source)) for _ in range(lost)])
    table = fleet_table([{"path": str(item.source), "target": str(item.target)} for item in items])
    lines = [json.loads(line) for line in Worker(command, ledger, began)(table)["line"]]
    assert {"say": "a worker was lost; its pictures are given to another", "input": ""} in lines
    results = [line for line in lines if "say" not in line]
    assert results[0]["notes"] == ["finished before its worker was lost"]
    assert Picture.read(items[0].target).size == (2, 2)
    assert results[1]["width"] == 320 and results[1]["tiles"] == 1
    assert results[2]["tiles"] > 1 and SMALL_TILE < 320
    assert f"has cost {LOST + 1} workers" in results[3]["error"] and not items[3].target.exists()
    assert ray.get(ledger.begin.remote(str(items[2].source))) == 0  # forgotten


def fleet_table(rows: list[dict[str, str]]) -> Any:
    import pyarrow

    return pyarrow.Table.from_pylist(rows)


def test_an_evaluation_has_the_same_rows(ray: Any, tiny_model: Path, tmp_path: Path) -> None:
    for number in range(3):
        Picture(data.coffee()[40 * number :, 100:][:40, :40]).write(tmp_path / "in" / f"{number}.png")
    words = ["evaluate", "--images", str(tmp_path / "in"), "--model", f"{tiny_model}:name=tiny", "--size", "32"]
    words += ["--solver", "ddc,ddnm:steps=2", "--device", "cpu", "--no-report", "--keep", "1"]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    assert main([*words, "--out", str(tmp_path / "many"), "--ray", "--workers", "1"]) == 0
    tables = [read_rows(tmp_path / name) for name in ("one", "many")]
    (one, truths), (many, other) = (
        ({(row["solver"], row["image"]): row | {"seconds": 0} for row in rows}, truths) for rows, truths in tables
    )
    assert len(one) == 6 and one == many and truths == other
    assert contents(tmp_path / "one" / "pictures") == contents(tmp_path / "many" / "pictures")


def test_workers_are_asked_for_by_cores_and_gpus(ray: Any) -> None:
    on_gpus = pool(RayOptions(), ray, "auto")
    assert on_gpus[0] == 1 and on_gpus[1]["num_gpus"] == 1
    assert [pool(RayOptions(cores=cores), ray, "cpu")[0] for cores in (1, 2)] == [2, 1]
    assert pool(RayOptions(cores=2), ray, "cpu")[1]["num_cpus"] == 2
    # not more than there is to do
    assert [pool(RayOptions(workers=5), ray, "cpu", tasks)[0] for tasks in (0, 3, 9)] == [1, 3, 5]
    for wrong, text in (
        (RayOptions(cores=3), "no computer of this cluster has more than 2"),
        (RayOptions(workers=0), "1 or"),
    ):
        with pytest.raises(UserError, match=text):
            pool(wrong, ray, "cpu")
    with pytest.raises(UserError, match="use --device cuda"):
        pool(RayOptions(), ray, "cuda:1")


def test_a_model_that_is_missing_is_told_once(ray: Any, folder: Path) -> None:
    command = Restore(inputs=(), out=folder / "out", task="sr2", model=folder / "none")
    row = {"path": str(folder / "in" / "0.png"), "target": str(folder / "out" / "0.png")}
    (line,) = Worker(command, None)(fleet_table([row, row]))["line"]
    assert json.loads(line)["fatal"].endswith("check --model")
    with pytest.raises(UserError, match="no column path; read pictures with read_binary_files"):
        Worker(command, None)(fleet_table([{"image": "a"}]))


def test_what_workers_raise_is_told_in_one_line(ray: Any) -> None:
    def fail() -> None:
        raise ValueError("the last line\n\n")

    with cluster("elsewhere:1") as same:  # there is one already, which stays
        assert same is ray
    with (
        pytest.raises(UserError, match=r"workers of Ray failed \(ValueError: the last line\); the same command"),
        told(ray),
    ):
        ray.get(ray.remote(fail).remote())


def test_ray_is_told_from_other_servers(ray: Any) -> None:
    _check_answer(ray.get_runtime_context().gcs_address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        thread.start()
        with pytest.raises(OSError, match="another program answers"):
            _check_answer(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()


# ---------------------------------------------------------------------------------------------------------
# without


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    command = Restore(inputs=(tmp_path,), out=tmp_path / "out", task="sr2")
    with Job(command) as first:
        with pytest.raises(UserError, match=rf"another job is writing into {tmp_path}/out \(process {os.getpid()} on"):
            Job(command).__enter__()
        job_file(tmp_path / "out", host="elsewhere")
        with pytest.raises(UserError, match="on elsewhere"):
            Job(command).__enter__()
        job_file(tmp_path / "out", host="elsewhere", beat=time.time() - 1000)
        with Job(command) as second:  # of a job that is silent
            assert second.state["began"] == first.state["began"]
        assert not (tmp_path / "out" / "ddc-job.json").exists()


def test_a_job_with_other_settings_begins_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    item = Item(tmp_path / "a.png", out / "a.png")
    with pytest.raises(KeyboardInterrupt), Job(Restore(inputs=(tmp_path,), out=out, task="sr2")) as job:
        assert job.unfinished([item]) == [0]
        time.sleep(0.05)
        Picture(np.zeros((2, 2, 3), np.uint8)).write(item.target)
        job.worked = True
        raise KeyboardInterrupt
    assert json.loads((out / "ddc-job.json").read_text())["running"] is False
    with Job(Restore(inputs=(tmp_path,), out=out, task="sr2", batch=4)) as job:
        assert job.unfinished([item]) == []
        job_file(out)
        state = (out / "ddc-job.json").read_bytes()
    time.sleep(0.05)
    (out / "ddc-job.json").write_bytes(state)
    with Job(Restore(inputs=(tmp_path,), out=out, task="sr4")) as job:
        assert job.unfinished([item]) == [0]
    (out / "ddc-job.json").write_bytes(b"damaged")
    with Job(Restore(inputs=(tmp_path,), out=out, task="sr4")) as job:
        assert job.unfinished([item]) == [0]


def no_server() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_bad_addresses_and_places(
    restore: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # else the Ray of the other tests is used

    def error(*words: object) -> str:
        assert restore(folder / "in", *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    address = no_server()
    assert f"no Ray answers at {address}" in error("-o", folder / "out", "--ray", address)
    assert not (folder / "out" / "ddc-job.json").exists()
    assert "no Ray answers at host:port" in error("-o", folder / "out", "--ray", "host:port")
    (folder / "file").write_text("")
    assert "cannot be written" in error("-o", folder / "file" / "out", "--ray", address)
    assert "give a folder with -o" in error("-o", folder / "out.png", "--ray", address)
