"""The loop: schedules, averages, time, states, what bad input gets, and exactness."""

import json
import math
import os
import random
import re
import select
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from training_parts import (
    INPUTS,
    latent_words,
    quick_arguments,
    tiny,
    tiny_objective,
    tiny_prior,
    tiny_prior_objective,
    write_config,
)

from ddc.cli import main
from ddc.errors import UserError
from ddc.training import loop, output
from ddc.training.ddc import DDCObjective
from ddc.training.loop import Average, Guard, learning_rate_factor, train
from ddc.training.output import read_latest
from processes import start, start_two


def quiet(line: str) -> None:
    pass


def final_state(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = read_latest(run / "checkpoints", quiet)
    assert found is not None
    return found[1][0]


def assert_same(one: Path, other: Path) -> None:
    a, b = final_state(one), final_state(other)
    assert set(a) == set(b) and "optimiser" in a
    for part in a:
        assert set(a[part]) == set(b[part])
        for name in a[part]:
            assert torch.equal(a[part][name], b[part][name]), f"{part} {name}"


# -- schedules, averages, accumulation ----------------------------------------------------------------------


def test_learning_rates() -> None:
    def rate(schedule: Any, step: int, share: float) -> float:
        objective = tiny_prior_objective(schedule=schedule, warmup=10, decay_share=0.25)
        return learning_rate_factor(objective.settings, step, share)

    assert rate("constant", 0, 0.0) == pytest.approx(0.1) and rate("constant", 500, 0.9) == 1
    assert rate("cosine", 50, 0.5) == pytest.approx(0.5) and rate("cosine", 50, 1.0) == pytest.approx(0, abs=1e-9)
    assert rate("cosine", 50, 0.25) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert rate("decay", 50, 0.74) == 1 and rate("decay", 50, 0.875) == pytest.approx(0.5)
    assert rate("decay", 4, 0.0) == pytest.approx(0.5)


def test_the_average_warms_up() -> None:
    module = torch.nn.Linear(2, 2)
    average = Average(module, 0.9)
    expected = module.weight.detach().clone()
    for step in range(1, 40):
        with torch.no_grad():
            module.weight += 0.1
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * module.weight.detach()
    assert torch.allclose(average.state["weight"], expected, atol=1e-6)


def test_accumulated_batches_equal_a_larger_one(pictures: Path, tmp_path: Path) -> None:
    states, rates = [], []
    for name, batch, accumulate in (("one", 4, 1), ("two", 2, 2)):
        how = {"batch_size": batch, "accumulate": accumulate, "steps": 3, "learning_rate": 1e-4}
        progress = train(tiny_objective(pictures, tmp_path / name, **how), quiet)
        states.append(final_state(tmp_path / name)["weights"])
        rates.append([figures["rate"] for figures in progress.history])
        assert progress.step == 3
    assert rates[0] == rates[1] and len(rates[0]) == 3  # the schedule counts optimiser steps
    change = max(float((states[0][k] - tiny(11, seed=1).state_dict()[k]).abs().max()) for k in states[0])
    apart = max(float((states[0][k] - states[1][k]).abs().max()) for k in states[0])
    assert apart < 0.02 * change


# -- time ---------------------------------------------------------------------------------------------------


def test_minutes_and_total_minutes(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)

    def tick() -> float:
        clock.now += 0.25
        return clock.now

    monkeypatch.setattr("ddc.training.loop.time", SimpleNamespace(monotonic=tick))
    how: dict[str, Any] = {"total_minutes": 1.0, "warmup": 1, "save_every": 1000, "steps": 10**6}
    begun = clock.now
    first = train(tiny_prior_objective(pictures, tmp_path, minutes=0.5, **how), quiet)
    assert clock.now - begun < 33 and 25 < first.seconds <= 30  # stopped, and saved, in time
    second = train(tiny_prior_objective(pictures, tmp_path, minutes=10, **how), quiet)
    assert second.step > first.step and 59 < second.seconds < 63  # the sum of both calls
    rates = [figures["rate"] for figures in first.history + second.history]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.01 * rates[0]  # one cosine over both
    assert rates[len(first.history)] < rates[len(first.history) - 1] < 0.75 * rates[0]


# -- states -------------------------------------------------------------------------------------------------


def command(kind: str, pictures: Path, folder: Path, out: Path, **options: Any) -> list[str]:
    """A training of a tiny network as words of the command line."""
    words = ["train", kind, *quick_arguments(pictures, out, **options)]
    if kind == "prior":
        return [*words, "--network", str(write_config(folder / "prior.json", in_channels=3))]
    if kind in ("autoencoder", "latent"):
        return [*words, *latent_words(kind, folder)]
    if not (folder / "prior").exists():
        tiny_prior().save_pretrained(folder / "prior")
    config = write_config(folder / "network.json", inputs=INPUTS, residual="blend")
    tasks = "sr4,gauss1-2,inpaint92,jpeg10-30,denoise,motion5-9:weight=0.5,strokes"
    return [*words, "--network", str(config), "--prior", str(folder / "prior"), "--tasks", tasks]


@pytest.mark.parametrize("kind", ["prior", "ddc", "autoencoder", "latent"])
def test_killed_and_resumed_is_bit_identical(kind: str, pictures: Path, tmp_path: Path) -> None:
    extra = ["--trajectory-share", "0.5", "--noiseless-share", "0.5"] if kind == "ddc" else []
    steps = {"steps": 9, "save-every": 2}
    assert main([*command(kind, pictures, tmp_path, tmp_path / "whole", **steps), *extra]) == 0

    killed_at = random.randrange(1, 9)
    words = [*command(kind, pictures, tmp_path, tmp_path / "killed", **steps), *extra]
    os.mkfifo(tmp_path / "said")
    process = start(words, stderr=tmp_path / "said")
    with (tmp_path / "said").open() as said:
        for line in said:
            if line.startswith(f"step {killed_at} "):
                process.kill()
                break
        process.join()
    assert process.exitcode == -signal.SIGKILL, f"to be killed at step {killed_at}"
    reached = read_latest(tmp_path / "killed" / "checkpoints", quiet)
    assert reached is None or reached[0].name < "step-00000009"  # none, before the first save
    assert main(words) == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")


def train_and_die(words: list[str]) -> int:
    """The second process is killed before its third step."""
    step = loop._Run._step

    def dying(run: Any, rate: float) -> Any:
        if (run.progress.step, os.environ["RANK"]) == (2, "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(run, rate)

    loop._Run._step = dying  # type: ignore[method-assign]
    return main(words)


def test_two_processes_one_of_them_killed_equal_one_with_twice_the_batch(pictures: Path, tmp_path: Path) -> None:
    """To 1e-6, where an update is of the order of 1e-4: sums are taken in another order."""
    how: dict[str, Any] = {"steps": 3, "learning-rate": 1e-4, "save-every": 2}
    assert main(command("ddc", pictures, tmp_path, tmp_path / "one", **how, **{"batch-size": 4})) == 0
    words = command("ddc", pictures, tmp_path, tmp_path / "two", **how, **{"batch-size": 2})
    first, second = start_two(words, tmp_path / "died", train_and_die)
    second.join(120)
    assert second.exitcode == -signal.SIGKILL
    first.terminate()  # as a launcher does
    first.join()
    for process in start_two(words, tmp_path / "again"):
        process.join(120)
        assert process.exitcode == 0, (tmp_path / "again-0").read_text()
    assert "training on 3 pictures" in (tmp_path / "died-0").read_text()
    assert "step-00000002 at step 2" in (tmp_path / "again-0").read_text()
    one, two = final_state(tmp_path / "one"), final_state(tmp_path / "two")
    # part of the updates is in the average by now: it tells how large they are
    moved = max(float((one["weights"][k] - one["average"][k]).abs().max()) for k in one["weights"])
    apart = max(float((one["weights"][k] - two["weights"][k]).abs().max()) for k in one["weights"])
    assert 1e-5 < moved < 1e-3 and apart < 1e-6, (apart, moved)
    record = json.loads((tmp_path / "two/checkpoints/step-00000003/record.json").read_text())
    assert record["settings"]["processes"] == 2 and record["positions"] == [8, 8]
    assert len(two["objective"]["numbers"]) == 4


def test_a_full_disk_leaves_the_previous_checkpoint(
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how: dict[str, Any] = {"steps": 6, "save_every": 2}
    real, calls = output.save_file, []

    def fills_up(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) > 4:  # within the second checkpoint
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(output, "save_file", fills_up)
    with pytest.raises(UserError, match=r"could not be written .*No space left.*previous one is untouched"):
        train(tiny_prior_objective(pictures, tmp_path / "run", **how), quiet)
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir() if p.is_dir()] == ["step-00000002"]
    assert train(tiny_prior_objective(pictures, tmp_path / "run", **how), quiet).step == 6
    train(tiny_prior_objective(pictures, tmp_path / "whole", steps=6, save_every=2), quiet)
    assert_same(tmp_path / "run", tmp_path / "whole")


class Poisoned(DDCObjective):
    """Its loss is no number at the third step."""

    def losses(self, *args: Any) -> dict[str, torch.Tensor]:
        terms = super().losses(*args)
        self.before = {k: v.clone() for k, v in self.module.state_dict().items()}
        return terms | {"loss": terms["loss"] * float("nan")} if args[-1] == 2 else terms


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_no_number_stops_with_a_good_state(
    log_every: int,
    pictures: Path,
    tmp_path: Path,
) -> None:
    how = {"steps": 10, "log_every": log_every, "save_every": 2}
    plain = tiny_objective(pictures, tmp_path, tasks="sr4,jpeg10", **how)
    objective = Poisoned(plain.settings, plain.network, plain.prior)
    with pytest.raises(UserError, match=r"not finite at step 3 \(tasks (jpeg10|sr4|jpeg10, sr4)\).*saved in"):
        train(objective, quiet)
    weights = load_file(tmp_path / "not-finite" / "step-00000003" / "weights.safetensors")
    assert all(torch.equal(weights[k], v) for k, v in objective.before.items())
    latest = read_latest(tmp_path / "checkpoints", quiet)
    assert latest is not None and latest[0].name == "step-00000002"


def test_the_guard_remembers_the_first_step() -> None:
    guard = Guard(torch.device("cpu"))
    for step, value in enumerate((1.0, float("inf"), 1.0, float("nan")), 1):
        guard.look(torch.tensor(value).isfinite(), step)
    assert guard.failed() == guard.failed(wait=True) == 2


def test_a_fused_step_does_nothing_where_the_loss_is_not_finite() -> None:
    """What the loop relies on where it cannot look at the loss in time."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimiser = torch.optim.AdamW([parameter], 0.1, fused=True)
    for bad in (0.0, 1.0):
        before = parameter.detach().clone()
        parameter.grad = torch.full((4,), float("nan") if bad else 1.0)
        optimiser.found_inf = torch.tensor(bad)  # type: ignore[attr-defined]
        optimiser.step()
        assert torch.equal(parameter.detach(), before) == bool(bad)
    assert float(optimiser.state[parameter]["step"]) == 1


def test_resuming_with_other_settings_is_refused(
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = command("ddc", pictures, tmp_path, tmp_path / "run", steps=1)
    assert main(words) == 0
    capsys.readouterr()
    changed = [*words, "--w-kl", "0.5", "--seed", "3", "--batch-size", "2"]
    changed[changed.index("--tasks") + 1] = "sr8"
    assert main(changed) == 2
    error = capsys.readouterr().err
    for text in (
        "batch_size was 4 and is 2",
        "seed was 0 and is 3",
        "tasks was 'sr4,",
        "w_kl was 0.001 and is 0.5",
    ):
        assert text in error
    assert "Use the same, or another --out" in error

    tiny_prior(seed=5).save_pretrained(tmp_path / "prior")  # the same folder, another network
    assert main(words) == 2
    assert "weights of the prior was" in capsys.readouterr().err
    tiny_prior().save_pretrained(tmp_path / "prior")
    fewer = tmp_path / "fewer"
    shutil.copytree(pictures, fewer)
    next(fewer.glob("*.png")).unlink()
    moved = [str(fewer) if word == str(pictures) else word for word in words]
    assert main(moved) == 2
    assert "pictures was '3 pictures" in capsys.readouterr().err
    shutil.rmtree(fewer)
    shutil.copytree(pictures, fewer)
    assert main([*moved, "--steps", "2"]) == 0  # the same pictures elsewhere, and a longer run


def test_an_older_record_without_new_settings_is_taken(pictures: Path, tmp_path: Path) -> None:
    train(tiny_prior_objective(pictures, tmp_path, steps=1), quiet)
    path = tmp_path / "checkpoints/step-00000001/record.json"
    record = json.loads(path.read_text())
    for key in ("pictures", "processes", "flip"):
        del record["settings"][key]
    path.write_text(json.dumps(record))
    assert train(tiny_prior_objective(pictures, tmp_path, steps=2), quiet).step == 2
    with pytest.raises(UserError, match="flip was True and is False"):
        train(tiny_prior_objective(pictures, tmp_path, steps=3, flip=False), quiet)


def test_old_checkpoints_go_and_beginning_again_keeps_the_newest(pictures: Path, tmp_path: Path) -> None:
    train(tiny_prior_objective(pictures, tmp_path, steps=6, save_every=1, keep=2), quiet)
    names = sorted(p.parent.name for p in (tmp_path / "checkpoints").glob("*/record.json"))
    assert names == ["step-00000005", "step-00000006"]
    again = tiny_prior_objective(pictures, tmp_path, steps=3, save_every=1, keep=2, resume=False)
    assert train(again, quiet).step == 3
    names = sorted(p.parent.name for p in (tmp_path / "checkpoints").glob("*/record.json"))
    assert names == ["step-00000002", "step-00000003"]


# -- what people look at ------------------------------------------------------------------------------------


def test_lines_scalars_figures_and_pictures(pictures: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    how = {"validate_every": 2, "pictures_every": 2, "validation": pictures, "validation_limit": 2}
    objective = tiny_objective(pictures, tmp_path, steps=4, **how)
    objective.validation_tasks = (("sr4", 0.0), ("denoise", 0.05))
    train(objective, lines.append)
    assert lines[0] == "training on 3 pictures, validating on 2"
    assert any(line.startswith("step 2  loss ") and "images/s" in line for line in lines)
    assert "step 4 validation on 2: sr4@0/psnr" in " ".join(lines)
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"loss", "mse", "kl", "gradient", "rate", "images_per_second"} <= set(logged[0])
    assert [row["step"] for row in logged if "validation/denoise@0.05/psnr" in row] == [2, 4]
    sheet = Image.open(tmp_path / "pictures" / "step-00000004.png")
    assert sheet.size == (4 * 34 - 2, 2 * 34 - 2)
    truth = np.array(Image.open(sorted(pictures.glob("*.png"))[0]))
    assert np.array_equal(np.array(sheet)[:32, :32], truth[48:80, 59:91])
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert {"loss", "mse", "kl", "validation/sr4@0/psnr"} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("kl")) == 4


def test_validation_leaves_the_training_alone(pictures: Path, tmp_path: Path) -> None:
    for name, every in (("without", 0), ("with", 1)):
        how = {"validate_every": every, "pictures_every": every, "validation": pictures}
        train(tiny_prior_objective(pictures, tmp_path / name, **how), quiet)
    assert_same(tmp_path / "without", tmp_path / "with")


def test_streaming_trains_the_same(pictures: Path, tmp_path: Path) -> None:
    for stream in ("off", "on"):
        how = {"stream": stream, "workers": 2, "trajectory_share": 0.5}
        train(tiny_objective(pictures, tmp_path / stream, **how), quiet)
    assert_same(tmp_path / "off", tmp_path / "on")


def test_a_corrupt_picture_among_good_ones(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "data")
    (tmp_path / "data" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    lines: list[str] = []
    train(tiny_prior_objective(tmp_path / "data", tmp_path / "run", steps=1), lines.append)
    assert lines[0] == "training on 3 pictures, 1 unreadable passed over"


def test_a_bar_on_a_terminal_shows_time_left_speed_and_losses(pictures: Path, tmp_path: Path) -> None:
    """The command in a terminal of its own, 80 columns wide."""
    pty = pytest.importorskip("pty")
    words = command("prior", pictures, tmp_path, tmp_path / "run", steps=3)
    leader, follower = pty.openpty()
    terminal, environment = os.ttyname(follower), os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    process = start(words, terminal, terminal, environment)
    shown = b""
    while process.is_alive() or select.select([leader], [], [], 0)[0]:
        if select.select([leader], [], [], 0.1)[0]:
            shown += os.read(leader, 4096)
    os.close(leader), os.close(follower)
    assert process.exitcode == 0
    text = shown.decode(errors="replace")
    last = r"100 % step 3  0 s left  \d+ images/s  loss 0\.\d+  mse"
    assert "━━━━" in text and re.search(last, text), text[-600:]
