"""The dispatcher, `ddc info` and `ddc convert`."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddc import __version__
from ddc.cli import COMMANDS, available, main
from ddc.pipeline import find_part
from tiny import tiny_posterior


def test_help_answers_within_a_second() -> None:
    code = "import sys; from ddc.cli import main; main(['--help']); print('torch' in sys.modules)"
    seconds = []
    for _ in range(3):  # the best of three: other programs may be busy
        started = time.perf_counter()
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1.0
    assert "restore" in answer.stdout and answer.stdout.endswith("False\n")


def test_the_package_is_a_command_too() -> None:
    for words, code, out in ((["--version"], 0, f"ddc {__version__}\n"), (["toast"], 2, "")):
        ran = subprocess.run([sys.executable, "-m", "ddc", *words], capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (code, out)


def test_every_command_that_is_listed_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in available():
        assert main([command, "--help"]) == 0, command
        assert f"ddc {command}" in capsys.readouterr().out


def test_commands_are_those_whose_module_is_there() -> None:
    assert {"restore", "degrade", "convert", "info"} <= set(available()) <= set(COMMANDS)


def test_version_unknown_command_and_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ddc {__version__}\n"
    assert main(["destroy"]) == 2
    assert "expected one of restore" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: ddc" in capsys.readouterr().err


def test_info(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny_model), "--json", "--size", "64"]) == 0
    facts = json.loads(capsys.readouterr().out)
    prior, network = facts["model"]["prior"], facts["model"]["network"]
    assert network["inputs"] == ["x0", "y"] and network["channels in"] == 6
    assert prior["parameters"] > 10_000 and prior["GFLOP at 64×64"] > 0
    assert prior["schedule"]["steps"] == 1000 and prior["predicts"] == "epsilon"
    assert facts["versions"]["torch"] == torch.__version__ and "ddc" in facts["solvers"] and "sr4" in facts["tasks"]


def test_info_of_a_network_alone(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = tiny_model / "network"
    assert main(["info", str(network), "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["network"]["inputs"] == ["x0", "y"] and "prior" not in model
    assert main(["restore", "any.png", "-o", "out", "--model", str(network)]) == 2
    assert "is a data-consistency network, not a prior" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "kind", "known"),
    [("i2sb-sr4", "bridge", {"task": "sr4"}), ("dncnn", "denoiser", {"depth": 17, "sigma_y": 0.1})],
)
def test_info_of_the_networks_that_solvers_bring(
    part: str, kind: str, known: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = find_part(part, None)
    assert folder is not None
    assert main(["info", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["model"][kind]
    assert known.items() <= facts.items() and facts["parameters"] > 500_000


def test_info_of_a_posterior_network(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    network = tiny_posterior()
    network.realism, network.generator = 0.5, ([0.5], [1.0])
    network.save_pretrained(tmp_path / "posterior")
    for folder in (tmp_path, tmp_path / "posterior"):
        assert main(["info", str(folder), "--json", "--size", "64"]) == 0
        facts = json.loads(capsys.readouterr().out)["model"]["posterior"]
        assert facts["usual realism"] == 0.5 and facts["noise levels"] == [0.5] and facts["in wide holes"] == [1.0]
        assert facts["parameters"] == sum(p.numel() for p in network.parameters())


def test_info_for_people(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny_model)]) == 0
    text = capsys.readouterr().out
    assert "CompactUNet" in text and "devices" in text
    assert main(["info", str(tiny_model / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_convert_refuses_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pt").write_text("no checkpoint")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "out")]) == 2
    assert main(["convert", str(tmp_path / "none.pt"), str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err
    assert errors.count("ddc: ") == 2 and "Traceback" not in errors and not (tmp_path / "out").exists()
