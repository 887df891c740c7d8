"""What resuming a run refuses, and what it falls back to."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from training_parts import quick_arguments, tiny_objective, tiny_prior_objective, write_config

from ddc.cli import main
from ddc.errors import UserError
from ddc.training import loop
from ddc.training.loop import Progress, check_processes, train
from ddc.training.output import RECORD
from processes import run as run_command


def run(pictures: Path, out: Path, steps: int, lines: list[str] | None = None, **options: object) -> Progress:
    objective = tiny_prior_objective(pictures, out, steps=steps, save_every=1, schedule="constant", **options)
    return train(objective, (lines if lines is not None else []).append)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    run(pictures, out, 3, keep=3)
    return out


def step(number: int) -> str:
    return f"step-{number:08d}"


def remove_latest(folder: Path) -> None:
    (folder / "latest").unlink()


POINTERS: dict[str, Callable[[Path], object]] = {
    "empty": lambda folder: (folder / "latest").write_text(""),
    "missing": remove_latest,
    "of an absent folder": lambda folder: (folder / "latest").write_text("step-00009999\n"),
    "binary": lambda folder: (folder / "latest").write_bytes(bytes(range(256))),
    "outside": lambda folder: (folder / "latest").write_text("../../elsewhere"),
}


@pytest.mark.parametrize("kind", POINTERS)
def test_without_a_good_pointer_the_newest_checkpoint_is_used(
    kind: str, trained: Path, pictures: Path, tmp_path: Path
) -> None:
    out, lines = shutil.copytree(trained, tmp_path / "out"), list[str]()
    POINTERS[kind](out / "checkpoints")
    assert run(pictures, out, 4, lines, keep=3).step == 4
    assert any(line.startswith("resumed from") and line.endswith("at step 3") for line in lines)
    assert any("latest names no checkpoint" in line and step(3) in line for line in lines)
    kept = {path.name for path in (out / "checkpoints").iterdir()}
    assert kept == {"latest", step(2), step(3), step(4)}


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no optimiser": ("optimiser", lambda path: (path / "optimiser.safetensors").unlink()),
    "no average": ("average", lambda path: (path / "average.safetensors").unlink()),
    "an empty record": (RECORD, lambda path: (path / RECORD).write_text("{}")),
    "half a record": ("cannot be read", lambda path: (path / RECORD).write_text('{"step": 3,')),
    "half of the weights": ("weights", lambda path: os.truncate(path / "weights.safetensors", 900)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    kind: str, trained: Path, pictures: Path, tmp_path: Path
) -> None:
    word, damage = DAMAGES[kind]
    out, lines = shutil.copytree(trained, tmp_path / "out"), list[str]()
    damage(out / "checkpoints" / step(3))
    assert run(pictures, out, 4, lines).step == 4
    assert any(line.startswith("resumed from") and line.endswith("at step 2") for line in lines)
    assert any(step(3) in line or word in line for line in lines if "is used instead" in line)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_run_does_not_begin_anew_where_checkpoints_are(
    kind: str, trained: Path, pictures: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(trained, tmp_path / "out")
    for number in (1, 2, 3):
        DAMAGES[kind][1](out / "checkpoints" / step(number))
    before = sorted(path.name for path in out.rglob("*"))
    with pytest.raises(UserError, match=r"no complete checkpoint .*--no-resume") as error:
        run(pictures, out, 4)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in out.rglob("*")) == before
    assert run(pictures, out, 1, resume=False).step == 1  # asked for


def test_the_last_step_is_saved_once(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, exported = list[str](), list[Path]()
    write, export = loop.write_checkpoint, loop.save_model
    monkeypatch.setattr(loop, "write_checkpoint", lambda *a: (saved.append(a[1]), write(*a)))
    monkeypatch.setattr(loop, "save_model", lambda *a: (exported.append(a[1]), export(*a)))
    run(pictures, tmp_path, 2)
    assert saved == [step(1), step(2)] and len(exported) == 2
    run(pictures, tmp_path, 2)  # nothing is left to do
    assert saved == [step(1), step(2)] and len(exported) == 3


def test_a_run_of_another_kind_is_not_resumed(trained: Path, pictures: Path, tmp_path: Path) -> None:
    out = shutil.copytree(trained, tmp_path / "out")
    with pytest.raises(UserError, match=r"is another kind of run: it has no --prior\. Give another --out"):
        train(tiny_objective(pictures, out, steps=4), [].append)


def test_a_changed_picture_is_noticed(pictures: Path, tmp_path: Path) -> None:
    data = shutil.copytree(pictures, tmp_path / "data")
    out, lines = tmp_path / "out", list[str]()
    run(data, out, 1)
    first = sorted(data.iterdir())[0]
    Image.open(first).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(first)
    with pytest.raises(UserError, match=r"training pictures have changed .*contents was .*--accept-data") as error:
        run(data, out, 2)
    assert "\n" not in str(error.value)
    assert run(data, out, 2, lines, accept_data=True).step == 2
    assert any("continuing with other training pictures" in line for line in lines)
    assert run(data, out, 3).step == 3  # these are the pictures from now on


def test_a_record_without_contents_is_taken(pictures: Path, tmp_path: Path) -> None:
    run(pictures, tmp_path, 1)
    path = tmp_path / "checkpoints" / step(1) / RECORD
    record = json.loads(path.read_text())
    record["settings"].pop("contents")
    record.pop("tensors")
    path.write_text(json.dumps(record))
    assert run(pictures, tmp_path, 2).step == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("learning-rate", value) for value in ("nan", "inf", "-1")),
        *(("seed", "-1"), ("ema", "nan"), ("clip", "0"), ("minutes", "nan"), ("shard-mb", "0"), ("keep", "0")),
    ],
)
def test_numbers_that_no_run_can_use(
    option: str, value: str, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "network.json")
    words = quick_arguments(pictures, tmp_path / "out", network=config, **{option: value})
    assert main(["train", "prior", *words]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and f"--{option} is " in lines[0] and "expected" in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "x"}, {"WORLD_SIZE": "0"}, {"RANK": "7"}, {"WORLD_SIZE": "2", "RANK": "-1"}, {"WORLD_SIZE": "two"}],
)
def test_an_environment_of_no_process(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_processes() == 1
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"WORLD_SIZE=.*unset both"):
        check_processes()


def test_rank_alone_is_an_error_of_the_command(pictures: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "network.json")
    words = ["train", "prior", *quick_arguments(pictures, tmp_path / "out", network=config)]
    done = run_command(words, os.environ | {"RANK": "7"})
    assert done.returncode != 0 and len(done.stderr.strip().splitlines()) == 1 and "RANK=7" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="modes of files")
def test_weights_can_be_read_by_whom_the_umask_allows(pictures: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run(pictures, tmp_path, 1)
    finally:
        os.umask(before)
    weights = [*tmp_path.rglob("*.safetensors")]
    assert len(weights) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in weights} == {0o640}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in weights} == {0o750}
