"""The scripts under examples/, each run on something tiny."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from skimage import data

from ddc.cli import main
from ddc.images import Picture
from ddc.pipeline import RestorationPipeline

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_examples_are_tested() -> None:
    tests = Path(__file__).read_text()
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    assert len(names) >= 5 and all(f'load("{name}")' in tests for name in names)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.fromarray(data.astronaut()[20:84, 180:244]).save(path)
    return path


def test_quick_start_restores_with_the_model_that_ships(photo: Path, tmp_path: Path) -> None:
    gain = load("quick_start").main(str(photo), str(tmp_path / "out.png"))
    assert gain > 4
    assert Picture.read(tmp_path / "out.png").size == (64, 64)


def test_own_operator_keeps_what_was_measured(photo: Path, tmp_path: Path, tiny_model: Path) -> None:
    example = load("own_operator")
    example.main(str(photo), str(tmp_path / "out.png"), str(tiny_model), steps=3)
    restored, clean = Picture.read(tmp_path / "out.png").tensor, Picture.read(photo).tensor
    difference = (restored - clean).abs().amax((0, 2)).numpy()
    assert difference[np.arange(64) % 4 != 3].max() < 1e-3 and difference[3::4].max() > 0.01


def test_own_operator_on_the_command_line(photo: Path, tmp_path: Path, tiny_model: Path) -> None:
    operator = ["--operator", f"{EXAMPLES / 'own_operator.py'}:LostRows"]
    rows, whole = tmp_path / "rows.png", tmp_path / "whole.png"
    assert main(["degrade", str(photo), "-o", str(rows), *operator]) == 0
    assert len(np.unique(Picture.read(rows).pixels[3::4])) == 1  # the lost rows are all alike
    for solver in ("ddnm:steps=2", "pinv"):
        settings = ["--model", str(tiny_model), "--solver", solver]
        assert main(["restore", str(rows), "-o", str(whole), *operator, *settings]) == 0
        assert Picture.read(whole).size == (64, 64)


def test_own_solver_reaches_the_measurement(photo: Path, tmp_path: Path, tiny_model: Path) -> None:
    example = load("own_solver")
    holes = tmp_path / "holes.png"
    assert main(["degrade", str(photo), "-o", str(holes), "--task", "box"]) == 0
    example.main(str(holes), str(tmp_path / "out.png"), str(tiny_model), steps=4)
    restored, clean = Picture.read(tmp_path / "out.png").pixels, Picture.read(photo).pixels
    known = np.ones((64, 64), bool)
    known[16:48, 16:48] = False
    assert np.abs(restored.astype(int) - clean.astype(int))[known].max() <= 1
    solver = example.GradientStep(steps=2, rho=0.5)
    assert RestorationPipeline.from_pretrained(tiny_model)(clean, "denoise", solver=solver).evaluations == 2


def test_own_prior_fills_in_what_it_knows() -> None:
    assert load("own_prior").main() == pytest.approx(0.5, abs=0.02)


def test_train_tiny_makes_a_model_that_restores(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name in ("astronaut", "coffee", "chelsea"):
        Image.fromarray(getattr(data, name)()[50:114, 50:114]).save(pictures / f"{name}.png")
    model = load("train_tiny").main(str(pictures), str(tmp_path / "out"), steps=2)
    pipe = RestorationPipeline.from_pretrained(model)
    assert pipe(data.coffee()[:16, :16].copy(), "sr2").picture.size == (32, 32)
