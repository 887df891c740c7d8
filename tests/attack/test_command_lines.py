"""Odd command lines: an exit code as documented, one line that says why, no traceback, and nothing written."""

import shlex
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddc.cli import main
from ddc.images import Picture

# Lines that cannot be parsed are answered by the parser, in a box; the others by one line.
UNPARSABLE = """
restore -o {out}.png --sigma
restore {photo} -o {out} --sigma much
restore {photo} -o {out} --sigma 0.1 0.2
restore {photo} -o {out} --steps 1.5
restore {photo} -o {out} --steps ten
restore {photo} -o {out} --samples 1e3
restore {photo} -o {out} --quality high
restore {photo} -o {out} --fast maybe
restore {photo} -o {out} --seed 0x10
restore {photo} -o {out} --tile big
restore {photo} -o {out} --batch 2.0
restore {photo} -o {out} --no-such-option
restore {photo} -o {out} --Task denoise
restore {photo} -o {out} --json=1 2
degrade {photo}
degrade {photo} -o {out} --sigma auto
degrade {photo} -o {out} --steps 5
info {model} {model}
info --size large
convert {photo}
convert
demo --seed x
evaluate --out {out}
reproduce table9
reproduce
train
train nothing
train ddc
export {model}
web --port many
"""

REFUSED = """
no-such-command
--restore {photo} -o {out}
Restore {photo} -o {out}
restore -o {out}
restore {photo} -o {out} --task ""
restore {photo} -o {out} --task sr
restore {photo} -o {out} --task sr0
restore {photo} -o {out} --task sr-4
restore {photo} -o {out} --task sr4x
restore {photo} -o {out} --task sr99999999999999999999
restore {photo} -o {out} --task "sr4 gauss"
restore {photo} -o {out} --task ../sr4
restore {photo} -o {out} --task jpeg0
restore {photo} -o {out} --task jpeg101
restore {photo} -o {out} --task inpaint100
restore {photo} -o {out} --task gauss0
restore {photo} -o {out} --task gaussnan
restore {photo} -o {out} --task motion0
restore {photo} -o {out} --task custom
restore {photo} -o {out} --task denoise:sigma=x
restore {photo} -o {out} --task denoise:
restore {photo} -o {out} --task denoise --sigma nan
restore {photo} -o {out} --task denoise --sigma inf
restore {photo} -o {out} --task denoise --sigma -1
restore {photo} -o {out} --task denoise --sigma 1e30
restore {photo} -o {out} --steps 0
restore {photo} -o {out} --steps -5
restore {photo} -o {out} --steps 100000
restore {photo} -o {out} --solver ""
restore {photo} -o {out} --solver magic
restore {photo} -o {out} --solver ddnm:eta
restore {photo} -o {out} --solver ddnm:eta=
restore {photo} -o {out} --solver ddnm:=1
restore {photo} -o {out} --solver ddnm:eta=x
restore {photo} -o {out} --solver ddnm:eta=nan
restore {photo} -o {out} --solver ddnm:steps=1.5
restore {photo} -o {out} --solver ddnm:__class__=1
restore {photo} -o {out} --solver ddc,ddnm
restore {photo} -o {out} --samples 0
restore {photo} -o {out} --samples -3
restore {photo} -o {out} --tile 1
restore {photo} -o {out} --tile -64
restore {photo} -o {out} --batch 0
restore {photo} -o {out} --quality 0
restore {photo} -o {out} --quality 101
restore {photo} -o {out} --device toaster
restore {photo} -o {out} --device cuda:99
restore {photo} -o {out} --device ""
restore {photo} -o {out} --ext gif
restore {photo} -o {out} --ext ""png""x
restore {photo} -o {out} --ext ../png
restore {photo} -o {out} --suffix a/b
restore {photo} -o {out} --suffix ../x
restore {photo} -o {out} --suffix /tmp/x
restore {photo} -o {out} --shard 0/4
restore {photo} -o {out} --shard 5/4
restore {photo} -o {out} --shard 1
restore {photo} -o {out} --shard /
restore {photo} -o {out} --shard 1/0
restore {photo} -o {out} --shard ²/4
restore {photo} -o {out} --shard -1/4
restore {photo} -o {out} --task jpeg --mask {photo}
restore {photo} -o {out} --task inpaint
restore {photo} -o {out} --task inpaint --mask nowhere.png
restore {photo} -o {out} --task inpaint --mask {folder}
restore {photo} -o {out} --task inpaint --mask {text}
restore {photo} -o {out} --task inpaint --mask {other}
restore {photo} -o {out} --task blur
restore {photo} -o {out} --task blur --kernel nowhere.npy
restore {photo} -o {out} --task blur --kernel {text}
restore {photo} -o {out} --task blur --kernel {folder}
restore {photo} -o {out} --task blur --kernel {text} --correlation
restore {photo} -o {out} --task blur --kernel {zeros}
restore {photo} -o {out} --kernel {zeros}
restore {photo} -o {out} --operator nowhere.py:Op
restore {photo} -o {out} --operator {text}
restore {photo} -o {out} --operator {text}:Op
restore {photo} -o {out} --operator :
restore {photo} -o {out} --model nowhere
restore {photo} -o {out} --model {photo}
restore {photo} -o {out} --model {folder}
restore {photo} -o {out} --model ""
restore {photo} -o {out} --network nowhere
restore {photo} -o {out} --network {text}
restore {text} -o {out}
restore {folder}/none.png -o {out}
restore {photo}/none.png -o {out}
restore {photo} -o {photo}
restore {photo} -o {text}
restore {photo} -o {out}.gif
restore {photo} -o {photo}/below --task denoise
restore
restore {photo} {other}
restore {photo} {photo} -o {out}
restore {folder} -o {out}.png
restore {empty} -o {out}
restore {long} -o {out}
restore . -o {out}.png
restore {photo} -o {out}.jpg --ext png
degrade {photo} -o {out} --task deblur
degrade {photo} -o {out} --task auto
degrade {photo} -o {out} --sigma nan
degrade {photo} -o {out} --task inpaint50 --ext jpg
degrade {photo} -o {out} --task box9999
degrade {photo} -o {out} --task blur --kernel {photo}/x
degrade {text} -o {out}
degrade {photo} -o {out} --operator {text}:X
info nowhere
info {photo}
info {folder}
info --size 0
info --size -5
convert nowhere.pt {out}
convert {text} {out}
convert {folder} {out}
demo --out {out} --tasks sharpen
demo --out {out} --model nowhere
evaluate --images nowhere --out {out}
evaluate --images {text} --out {out}
evaluate --images {folder} --out {out} --task sharpen
evaluate --images {folder} --out {out} --sigma much
evaluate --images {folder} --out {out} --solver magic
evaluate --images {folder} --out {out} --model nowhere
evaluate --images {folder} --out {out} --batch-size 0
evaluate --images {folder} --out {out} --vgg16 nowhere
reproduce table1 --out {out} --images nowhere
reproduce table1 --out {out} --model nowhere
export nowhere {out}
export {folder} {out}
web --model nowhere
bench --json 3
web --port 99999999
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("odd")
    photo = folder / "photos" / "photo.png"
    Picture(np.random.default_rng(0).integers(0, 256, (16, 24, 3)).astype(np.uint8)).write(photo)
    other = Image.new("L", (5, 6), 255)
    other.putpixel((2, 2), 0)
    other.save(folder / "other.png")
    (folder / "text.py").write_text("not a picture, not a kernel and not a class\n")
    np.save(folder / "zeros.npy", np.zeros((3, 3)))
    (folder / "empty").mkdir()
    named = {"photo": photo, "folder": photo.parent, "other": folder / "other.png", "text": folder / "text.py"}
    named |= {"zeros": folder / "zeros.npy", "empty": folder / "empty", "long": folder / ("x" * 300 + ".png")}
    return {name: str(path) for name, path in named.items()}


def run(line: str, files: dict[str, str], out: Path, model: Path) -> tuple[int, float]:
    words = [word.format(**files, out=out, model=model) for word in shlex.split(line)]
    if words[0] in ("restore", "evaluate") and "--model" not in words:
        words += ["--model", str(model)]
    started = time.monotonic()
    return main(words), time.monotonic() - started


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_line_that_is_refused(
    line: str, files: dict[str, str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path(files["folder"]).iterdir())
    code, seconds = run(line, files, tmp_path / "out", tiny_model)
    said = capsys.readouterr()
    assert code == 2 and seconds < 10
    errors = said.err.splitlines()
    assert errors and errors[-1].startswith("ddc: ") and said.out == ""
    assert len(errors) == 1 or all(error.startswith("ddc: ") for error in errors)
    assert not list(tmp_path.iterdir()) and sorted(Path(files["folder"]).iterdir()) == before


@pytest.mark.parametrize("line", UNPARSABLE.strip().splitlines())
def test_a_line_that_cannot_be_parsed(
    line: str, files: dict[str, str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line, files, tmp_path / "out", tiny_model)[0] == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "--help" in said.err and said.out == ""
    assert not list(tmp_path.iterdir())


def test_there_are_many() -> None:
    assert len(set(REFUSED.strip().splitlines()) | set(UNPARSABLE.strip().splitlines())) >= 100
