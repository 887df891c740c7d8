"""Files that must not run, folders that must not be lost, and names that must not be confused."""

import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddc.cli import main
from ddc.datasets import decode, find_sources
from ddc.errors import UserError
from ddc.images import Picture
from ddc.jpegfile import jpeg_settings
from ddc.operators.blur import read_kernel
from ddc.operators.inpaint import read_mask
from ddc.solvers.dncnn import DnCNN
from ddc.training.output import save_model

ROOT = Path(__file__).parents[1]
ENDLESS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n{ } loop\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("read", [Picture.read, read_mask, read_kernel])
def test_a_program_in_the_clothes_of_a_picture_is_not_run(read: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "loop.png"
    path.write_bytes(ENDLESS)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"loop\.png"):
        read(path)
    assert time.monotonic() - started < 5
    assert jpeg_settings(path) is None
    assert decode(find_sources([path])[0]) is None


@pytest.mark.parametrize("kind", ["GIF", "PPM", "ICO", "PCX", "TGA"])
def test_formats_that_are_not_named_are_refused(kind: str, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "a.png", kind)
    with pytest.raises(UserError, match="not a picture that can be read; expected PNG, JPEG"):
        Picture.read(tmp_path / "a.png")


def test_an_export_does_not_delete_other_files(tmp_path: Path) -> None:
    model = DnCNN(depth=2, width=4)
    state = dict(model.state_dict())
    photos = tmp_path / "photos"
    (photos / "2020").mkdir(parents=True)
    (photos / "2020" / "wedding.png").write_bytes(b"irreplaceable")
    with pytest.raises(UserError, match=r"2020/wedding\.png in it is not part of a model"):
        save_model(model, photos, state, {}, "fp32", None)
    assert (photos / "2020" / "wedding.png").read_bytes() == b"irreplaceable"


def test_an_export_replaces_a_model_and_nothing_beside_it(tmp_path: Path) -> None:
    model, folder = DnCNN(depth=2, width=4), tmp_path / "model"
    for name in ("model.old", "model.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    for value in (0.0, 1.0):
        state = {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}
        save_model(model, folder, state, {}, "fp32", None)
        assert all((tensor == value).all() for tensor in DnCNN.from_pretrained(folder).state_dict().values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.old", "model.partial"]
    assert (tmp_path / "model.old" / "notes.txt").read_text() == "mine"


def test_samples_overwrite_neither_inputs_nor_each_other(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "v"
    for name in ("b.png", "b_r_1.png"):
        Picture(np.full((16, 16, 3), 90, np.uint8)).write(folder / name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = ["restore", "--task", "denoise", "--model", str(tiny_model), "--samples", "2"]
    assert main([*words, str(folder / "b.png"), str(folder / "b_r_1.png"), "-o", str(folder), "--suffix", "_r"]) == 2
    assert "would overwrite an input" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    (folder / "b_r_1.png").rename(folder / "b_1.png")
    assert main([*words, str(folder), "-o", str(tmp_path / "out")]) == 2
    assert "would both write" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_messages_name_our_distribution() -> None:
    """`ddc` on the package index is another project."""
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert name == "deep-data-consistency"
    texts = [path.read_text() for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md")]]
    named = [found for text in texts for found in re.findall(r"pip install '?([\w-]+)\[", text)]
    assert len(named) >= 4 and set(named) == {name}
