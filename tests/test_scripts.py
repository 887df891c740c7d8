"""The scripts that make and measure what ships: every command of theirs is one that `ddc` understands."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from skimage import data

from code_blocks import parse_only

SCRIPTS = Path(__file__).parents[1] / "scripts"
PARTS = {
    name: re.findall(r"^#   ([\w-]+)(?:, ([\w-]+))?  ", (SCRIPTS / name).read_text(), re.MULTILINE)
    for name in ("train_default.sh", "train_posterior.sh", "train_latent.sh", "measure_default.sh")
}
PLACES = dict.fromkeys(("DATA", "IMAGES", "VALIDATION", "FACES"), "pictures.tar")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, with its commands written instead of run."""
    environment = os.environ | PLACES | {"DDC": "echo ddc"}
    command = ["bash", str(SCRIPTS / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("script", "part"), [(script, part) for script, found in PARTS.items() for part in sum(found, ()) if part]
)
def test_every_part_is_understood(script: str, part: str) -> None:
    done = run(script, part, *(["1.5"] if script.startswith("train") else []))
    commands = done.stdout.splitlines()
    assert done.returncode == 0 and commands, done.stderr
    kinds = {parse_only(command) for command in commands}
    expected = {
        "train_default.sh": {"train"},
        "train_posterior.sh": {"train"},
        "train_latent.sh": {"train", "export", "evaluate"},
    }
    assert kinds <= expected.get(script, {"evaluate", "reproduce"})


@pytest.mark.parametrize("script", PARTS)
def test_what_is_no_part_shows_the_parts(script: str) -> None:
    done = run(script, "nonsense", "1")
    assert done.returncode == 2 and "PART" in done.stderr and not done.stdout
    assert all(part in done.stderr for part in sum(PARTS[script], ()) if part)


def test_what_the_prior_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without x̂0 the network has little to begin with: most pixels of `inpaint92` are lost."""
    Image.fromarray(data.astronaut()[64:128, 192:256]).save(tmp_path / "astronaut.png")
    runpy.run_path(str(SCRIPTS / "without_prior.py"))["main"](tmp_path, 1, 64)
    lines = re.findall(r"^(\w+) (.*): ([\d.]+) dB", capsys.readouterr().out, re.MULTILINE)
    found = {(task, how): float(psnr) for task, how, psnr in lines}
    assert len(found) == 4
    assert found["inpaint92", "as it is"] > found["inpaint92", "with x̂0 = 0"] + 5


def test_the_sheet_of_the_model_card(tiny_model: Path, tmp_path: Path) -> None:
    main = runpy.run_path(str(SCRIPTS / "sheet.py"))["main"]
    main.__wrapped__.__globals__.update(
        CROPS=(("astronaut", 0, 100), ("coffee", 40, 200)), SETTINGS=(("denoise", 0.1),)
    )
    main(tmp_path / "sheet.webp", str(tiny_model))
    sheet = Image.open(tmp_path / "sheet.webp")
    assert sheet.size == (2 * 240, 2 * 262)  # two photographs, and the row of one task
    rows = [sheet.crop((0, top, 480, top + 240)).convert("L").getextrema() for top in (22, 284)]
    assert all(high - low > 100 for low, high in rows)
