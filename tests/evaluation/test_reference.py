"""Other photographs that FID compares with: their features are measured once, and kept in the run's folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from skimage import data

from ddc.cli import main
from ddc.datasets import load_images
from ddc.errors import UserError
from ddc.evaluation.benchmark import EvaluationOptions, Models, evaluate, make_cases
from ddc.evaluation.reference import FILE, measure_reference, read_reference
from ddc.evaluation.results import read_results
from ddc.images import Picture
from ddc.inception import Inception
from ddc.perceptual import Metrics

SIZE = 48


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for i in range(3):
        Picture(data.astronaut()[i * 60 : i * 60 + 50, 100:160]).write(tmp_path / "photographs" / f"{i}.png")
    return tmp_path / "photographs"


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DDC_VGG16", str(tmp_path / "absent"))
    return Metrics()


def test_the_features_are_measured_once(photographs: Path, metrics: Metrics, tmp_path: Path) -> None:
    torch.manual_seed(0)
    metrics.inception = Inception().eval()
    measure_reference(photographs, SIZE, lambda: metrics, tmp_path)
    features = np.load(tmp_path / FILE)["features"].astype(np.float64)
    centres = [Picture.read(path).tensor[:, 1:49, 6:54] for path in sorted(photographs.iterdir())]
    expected = metrics.features(torch.stack(centres))["fid"]
    assert features.shape == (3, 2048) and np.allclose(features, expected, rtol=2e-3, atol=1e-4)
    reference = read_reference(tmp_path)
    assert reference is not None and reference.distance(features) == pytest.approx(0, abs=1e-8)
    assert reference.distance(features + 0.5) == pytest.approx(2048 * 0.25, rel=1e-6)
    (photographs / "0.png").unlink()
    measure_reference(photographs, SIZE, lambda: metrics, tmp_path)
    assert len(np.load(tmp_path / FILE)["features"]) == 3
    photographs.rename(tmp_path / "others")
    with pytest.raises(UserError, match="is of photographs, not of others; delete it"):
        measure_reference(tmp_path / "others", SIZE, lambda: metrics, tmp_path)


def test_what_a_reference_needs(photographs: Path, metrics: Metrics, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs the Inception weights; add --fid"):
        measure_reference(photographs, SIZE, lambda: metrics, tmp_path)
    metrics.inception = Inception().eval()
    with pytest.raises(UserError, match="expected at least 64×64"):
        measure_reference(photographs, 64, lambda: metrics, tmp_path)
    for name in ("1.png", "2.png"):
        (photographs / name).unlink()
    with pytest.raises(UserError, match="fewer than two pictures"):
        measure_reference(photographs, SIZE, lambda: metrics, tmp_path)
    assert not (tmp_path / FILE).exists() and read_reference(tmp_path) is None


def test_a_reference_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--images", str(tmp_path), "--out", str(tmp_path / "out"), "--fid-reference", "nowhere"]
    assert main(words) == 2
    assert "nowhere does not exist; expected other photographs (--fid-reference)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_finished_run_is_compared_too(
    photographs: Path, metrics: Metrics, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows have the features of the restored pictures, if these were measured; if not, that is said."""
    torch.manual_seed(0)
    monkeypatch.setattr("ddc.evaluation.benchmark.Metrics", lambda *_: metrics)
    images, models = load_images(photographs, SIZE), Models({"tiny": tiny_model})
    cases = make_cases(models, ["sr4"], [0.05], ["pinv"])

    def run(folder: str, reference: Path | None = None, **more: Any) -> None:
        evaluate(cases, images, models, EvaluationOptions(tmp_path / folder, reference=reference, **more))

    run("without")
    metrics.inception = Inception().eval()
    run("with")
    assert "fid" not in read_results(tmp_path / "with").summary[0]
    run("with", photographs, deadline=0.0)  # there is no time
    assert "fid" not in read_results(tmp_path / "with").summary[0]
    run("with", photographs)
    assert read_results(tmp_path / "with").summary[0]["fid"] > 0
    metrics.inception = None
    run("with", photographs)  # it was measured before
    with pytest.raises(
        UserError, match=r"3 rows of .*without were measured without the Inception weights.* with --fid"
    ):
        run("without", photographs)
