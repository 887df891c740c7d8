"""Attacks on the files of training: a kill at every write, rename and removal of a save, and hostile checkpoints."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from skimage import data

from conftest import count
from ddc.errors import UserError
from ddc.networks import CompactUNet
from ddc.priors import Prior, schedule_from_config, scheduler_config
from ddc.training import output
from ddc.training.loop import Progress, train
from ddc.training.objectives import PriorObjective
from ddc.training.output import RECORD, export_run, read_checkpoint, read_latest, save_model, write_checkpoint
from ddc.training.settings import PriorSettings


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- a kill at every change of the file system ---------------------------------------------------------------


class Killed(BaseException):
    """An interruption that no handler of errors catches."""


class Faults:
    """Counts the changes that are made under a folder, and calls `stop` before the one with the number `at`.

    Python reports each change before it happens (an audit event). Three things it does not report are counted here: fsync,
    a text of which half is written, and weights, which safetensors writes by itself, of which half is written.
    """

    events = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod")

    def __init__(self) -> None:
        self.folder, self.at, self.seen, self.on = Path(), 0, 0, False
        self.stop: Callable[[], None] = lambda: None
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        changes = event in self.events
        if event == "open":
            changes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if changes and str(self.folder) in str(arguments[0]) and "/logs" not in str(arguments[0]):  # TensorBoard's
            self.change()

    def change(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            self.on = False
            self.stop()

    def run(self, folder: Path, at: int, stop: Callable[[], None], action: Callable[[], Any]) -> int:
        """Run an action up to its change number `at`; returns how many changes it made."""
        self.folder, self.at, self.stop, self.seen = folder, at, stop, 0
        write_text, fsync, save = Path.write_text, os.fsync, safetensors.torch.save_file

        def half_text(path: Path, text: str, *rest: Any, **more: Any) -> int:
            if self.on and str(self.folder) in str(path):
                write_text(path, text[: len(text) // 2])
                self.change()
            return write_text(path, text, *rest, **more)

        def counted_fsync(descriptor: int) -> None:
            if self.on:
                self.change()
            fsync(descriptor)

        def half_weights(tensors: dict[str, torch.Tensor], path: Any, *rest: Any, **more: Any) -> None:
            if self.on:
                self.change()
                Path(path).write_bytes(safetensors.torch.save(tensors)[: 8 + len(tensors)])
                self.change()
            save(tensors, path, *rest, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "write_text", half_text)
            patch.setattr(os, "fsync", counted_fsync)
            patch.setattr(output, "save_file", half_weights)
            patch.setattr(safetensors.torch, "save_file", half_weights)
            self.on = True
            try:
                action()
            finally:
                self.on = False
        return self.seen


FAULTS = Faults()


def killed(folder: Path, at: int, action: Callable[[], Any]) -> bool:
    """Run an action in a process that ends, without any cleaning up, before its change number `at`; whether it did."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            FAULTS.run(folder, at, lambda: os._exit(9), action)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), "the action failed by itself"
    return code == 9


def tensors_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        part: {"a": torch.full((3,), float(step)), "b": torch.ones(2)} for part in ("weights", "average", "optimiser")
    }


def record_of(step: int) -> dict[str, Any]:
    return {"step": step, "seconds": 1.0, "position": 0, "positions": [0], "settings": {}}


def save(folder: Path, step: int) -> Path:
    return write_checkpoint(folder, f"step-{step:08d}", tensors_of(step), record_of(step))


def complete(folder: Path) -> list[int]:
    """The steps of the checkpoints that can be read, each with the tensors that were saved."""
    steps = []
    for record in folder.glob(f"[!.]*/{RECORD}"):
        tensors, found = read_checkpoint(record.parent)
        expected = tensors_of(found["step"])
        assert all(torch.equal(tensors[part][k], v) for part in expected for k, v in expected[part].items())
        steps.append(found["step"])
    return sorted(steps)


SAVES = [((2, 4), 6), ((), 2), ((2,), 4), ((2, 4), 2), ((2, 4, 4), 4)]  # the steps before, and that of the save


@pytest.mark.parametrize(("before", "step"), SAVES[: count(2, 5)])
def test_a_kill_at_every_change_of_a_save(before: tuple[int, ...], step: int, tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    for earlier in before:
        save(start, earlier)
    foreign = {"notes.txt": b"mine", ".step-notes": b"mine", "photos.partial/a.png": b"a picture", "latest.old": b"x"}
    for name, content in foreign.items():
        (start / name).parent.mkdir(exist_ok=True)
        (start / name).write_bytes(content)
    kills, earlier_steps = 0, complete(start)
    while True:
        folder = shutil.copytree(start, tmp_path / f"kill-{kills + 1}")
        if not killed(folder, kills + 1, lambda folder=folder: save(folder, step)):
            break
        kills += 1
        found, steps = read_latest(folder, lambda _: None), complete(folder)
        assert (found is None) == (not steps), "a run never begins anew where a checkpoint is"
        assert found is None or found[1][1]["step"] in {step, earlier_steps[-1] if earlier_steps else step, *before}
        assert len(steps) >= min(len(earlier_steps), 2), "no checkpoint is lost before its successor is complete"
        again = save(folder, step)  # the next save succeeds, and removes what was left
        assert read_latest(folder, lambda _: None)[0] == again  # type: ignore[index]
        assert all((folder / name).read_bytes() == content for name, content in foreign.items())
        assert not [path for path in folder.iterdir() if path.name.startswith(".") and path.name != ".step-notes"]
        shutil.rmtree(folder)
    assert kills >= 24
    print(f"{kills} kills")


def tiny(seed: int) -> Prior:
    torch.manual_seed(seed)
    config = scheduler_config(prediction_type="v_prediction")
    unet = CompactUNet(channels=(8, 16), encoder_blocks=(1, 1), decoder_blocks=(1,), groups=4, head_dim=8)
    return Prior(unet, schedule_from_config(config), "v_prediction", scheduler_config=config)


def test_a_kill_at_every_change_of_an_export(tmp_path: Path) -> None:
    old, new = tiny(0), tiny(1)

    def export(out: Path, prior: Prior) -> None:
        save_model(prior, out, prior.unet.state_dict(), {}, "fp32", None)

    def holds(out: Path, prior: Prior) -> bool:
        found, expected = Prior.from_pretrained(out).unet.state_dict(), prior.unet.state_dict()
        return all(torch.equal(found[k], v) for k, v in expected.items())

    start = tmp_path / "start"
    export(start / "model", old)
    foreign = {".model.ddc-mine/photo.png": b"a picture", "model.old/x": b"x", ".model.backup": b"y"}
    for name, content in foreign.items():
        (start / name).parent.mkdir(exist_ok=True)
        (start / name).write_bytes(content)
    kills = 0
    while True:
        folder = shutil.copytree(start, tmp_path / f"kill-{kills + 1}")
        if not killed(folder, kills + 1, lambda folder=folder: export(folder / "model", new)):
            break
        kills += 1
        output.recover_model(folder / "model")
        assert holds(folder / "model", old) or holds(folder / "model", new)
        export(folder / "model", new)
        assert holds(folder / "model", new)
        assert all((folder / name).read_bytes() == content for name, content in foreign.items())
        assert [path.name for path in folder.glob(".model.ddc-*")] == [".model.ddc-mine"]
        shutil.rmtree(folder)
    assert kills >= 15
    print(f"{kills} kills")


# -- a whole run ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for name in ("astronaut", "coffee"):
        Image.fromarray(getattr(data, name)()[100:132, 150:182]).save(folder / f"{name}.png")
    return folder


def run(pictures: Path, out: Path, steps: int, lines: list[str] | None = None, **options: Any) -> Progress:
    how: dict[str, Any] = {
        "batch_size": 2,
        "crop": 16,
        "warmup": 1,
        "log_every": 1,
        "pictures_every": 0,
        "save_every": 1,
    }
    how |= {"precision": "fp32", "schedule": "constant"}
    objective = PriorObjective(PriorSettings(data=(pictures,), out=out, steps=steps, **(how | options)), tiny(0))
    return train(objective, (lines if lines is not None else []).append)


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    run(pictures, out, 2)
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    found = read_latest(out / "checkpoints", lambda _: None)
    assert found is not None
    return found[1][0]["weights"]


def test_an_interrupted_run_goes_on_and_ends_where_another_does(trained: Path, pictures: Path, tmp_path: Path) -> None:
    whole = shutil.copytree(trained, tmp_path / "whole")
    changes = FAULTS.run(whole, 0, lambda: None, lambda: run(pictures, whole, 4))
    expected = weights(whole)

    def stop() -> None:
        raise Killed

    tried = range(1, changes + 1, count(18, 1))
    for at in tried:
        out = shutil.copytree(trained, tmp_path / f"stopped-{at}")
        with pytest.raises(Killed):
            FAULTS.run(out, at, stop, lambda out=out: run(pictures, out, 4))
        lines: list[str] = []
        run(pictures, out, 4, lines)
        assert any(line.startswith("resumed from") for line in lines)
        assert all(torch.equal(v, expected[k]) for k, v in weights(out).items())
        shutil.rmtree(out)
    assert len(tried) >= 6
    print(f"{len(tried)} of {changes} interruptions")


# -- hostile checkpoints -------------------------------------------------------------------------------------

FILES = ("weights.safetensors", "average.safetensors", "optimiser.safetensors", RECORD, "../latest")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=4), inside, max_size=3),
    max_leaves=5,
)
KEYS = ("step", "seconds", "position", "positions", "settings", "tensors", "model", "settings/pictures", "model/class")
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a wrong shape": lambda x: torch.zeros(3, 7),
    "a scalar": lambda x: torch.tensor(1.0),
    "nothing": lambda x: torch.zeros(0),
    "NaN": lambda x: torch.full(x.shape, torch.nan),
    "infinity": lambda x: torch.full(x.shape, torch.inf),
    "huge": lambda x: torch.full(x.shape, 1e38),
    "integers": lambda x: torch.ones(x.shape, dtype=torch.int64),
    "booleans": lambda x: torch.ones(x.shape, dtype=torch.bool),
    "complex": lambda x: torch.ones(x.shape, dtype=torch.complex64),
}


def damage_bytes(path: Path, draw: Callable[[Any], Any]) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw(st.integers(1, 8))):
        if content:
            content[draw(st.integers(0, min(len(content), 4000) - 1))] = draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: draw(st.integers(0, len(content)))]) if draw(st.booleans()) else bytes(content))


def damage_file(path: Path, draw: Callable[[Any], Any]) -> None:
    path.unlink()
    if kind := draw(st.sampled_from(("", "folder", "bytes", "loop"))):
        if kind == "folder":
            path.mkdir()
        elif kind == "bytes":
            path.write_bytes(draw(st.binary(max_size=64)))
        else:
            path.symlink_to(path.name)


def damage_record(path: Path, draw: Callable[[Any], Any]) -> None:
    record = json.loads(path.read_text())
    *parents, key = draw(st.sampled_from(KEYS)).split("/")
    inside = record[parents[0]] if parents else record
    if draw(st.booleans()):
        inside.pop(key)
    else:
        inside[key] = draw(JSON)
    path.write_text(draw(st.sampled_from((json.dumps(record), "[" * 100_000, "", "{}", "[]", "null", "0"))))


def damage_tensors(path: Path, draw: Callable[[Any], Any]) -> None:
    tensors = load_file(path)
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors.pop(name)
    if kind := draw(st.sampled_from(("", "name", *TENSORS))):
        tensors["99999.x" if kind == "name" else name] = TENSORS.get(kind, torch.clone)(tensor)
    save_file(tensors, path)


@settings(
    max_examples=count(15, 600),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(choice=st.data())
def test_hostile_checkpoints_give_one_line(
    choice: st.DataObject, trained: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(trained, out)
    alone = choice.draw(st.booleans())  # without an earlier checkpoint to fall back to
    if alone:
        shutil.rmtree(out / "checkpoints" / "step-00000001")
    folder = out / "checkpoints" / "step-00000002"
    damage, files = choice.draw(
        st.sampled_from(
            [(damage_bytes, FILES), (damage_file, FILES), (damage_record, (RECORD,)), (damage_tensors, FILES[:3])]
        )
    )
    damage(folder / choice.draw(st.sampled_from(files)), choice.draw)
    lines: list[str] = []
    try:
        progress = run(pictures, out, 3, lines)
        assert progress.step == 3 or progress.step > 2
        assert any(line.startswith("resumed from") for line in lines), "a run never begins anew where checkpoints are"
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) > 20
    try:
        export_run(out, out.parent / "exported")
    except UserError as error:
        assert "\n" not in str(error)
    shutil.rmtree(out.parent)
