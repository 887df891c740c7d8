"""Whether a restored face is the same person."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from skimage import data

from ddc.cli import main
from ddc.evaluation.results import summarise
from ddc.faces import HASHES, Identity
from ddc.perceptual import Metrics, cache_folder


def picture() -> torch.Tensor:
    return torch.from_numpy(data.astronaut()[:256, 96:352].copy()).permute(2, 0, 1)[None] / 255


def test_without_dlib_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dlib", None)
    assert main(["evaluate", "--images", str(tmp_path), "--out", str(tmp_path / "out"), "--faces"]) == 2
    assert "deep-data-consistency[faces]" in capsys.readouterr().err


def test_without_its_networks_identity_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DDC_VGG16", str(tmp_path / "absent"))
    metrics = Metrics()
    assert metrics.identity is None
    assert "identity" not in metrics(picture(), picture())[0]


def test_images_without_a_face_do_not_count() -> None:
    row = {
        "model": "m",
        "task": "sr4",
        "sigma": 0.0,
        "solver": "ddc",
        "steps": 5,
        "psnr": 1.0,
        "nfe": 1,
        "seconds": 1.0,
    }
    rows = [row | {"image": "a", "features": {}, "identity": 0.3}, row | {"image": "b", "features": {}}]
    assert summarise(rows, {})[0]["identity"] == 0.3


def test_a_face_that_is_changed_is_further_away() -> None:
    pytest.importorskip("dlib")
    if not all((cache_folder() / name).is_file() for name in HASHES):
        pytest.skip("dlib's networks were not downloaded (ddc evaluate --faces)")
    truth = picture()
    soft = F.interpolate(F.avg_pool2d(truth, 2), scale_factor=2.0, mode="bilinear")
    coarse = F.interpolate(F.avg_pool2d(truth, 8), scale_factor=8.0, mode="bilinear")
    same, near, far = (Identity()(x, truth)[0] for x in (truth, soft, coarse))
    assert same == 0 and near is not None and far is not None and 0 < near < 0.4 < far
    assert Identity()(truth, torch.zeros_like(truth)) == [None]
