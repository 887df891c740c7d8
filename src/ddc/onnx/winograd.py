"""Replaces 3×3 convolutions of an ONNX graph by Winograd's algorithm, for runtimes that compute them directly.

This is F(4×4, 3×3) as in `ddc.fast`, in standard operators: 6×6 windows of each channel become 36 numbers by a convolution with
stride 4, matrix products sum over the channels, and another matrix product makes 4×4 pixels of 36 numbers. WebAssembly has no
such convolution, and needs half of the time this way.
"""

from typing import Any

import torch

from ddc.fast import INPUT, KERNEL, OUTPUT

MIN_CHANNELS = 32
MIN_PATCHES = 64  # with fewer 4×4 patches the transformed kernels, four times as large, do not pay


def with_winograd(model: Any) -> Any:
    """A copy of a model with its large 3×3 convolutions replaced."""
    import onnx
    from onnx import numpy_helper

    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    shapes = _shapes(model)
    convolutions = [node for node in graph.node if _is_large(node, shapes)]
    tables = {
        "winograd.input": torch.einsum("ai,bj->abij", INPUT, INPUT).reshape(36, 1, 6, 6),
        "winograd.kernel": torch.einsum("ai,bj->abij", KERNEL, KERNEL).reshape(36, 3, 3).float(),
        "winograd.output": torch.einsum("ai,bj->abij", OUTPUT, OUTPUT).reshape(16, 36),
    }
    sizes: dict[str, list[int]] = {}
    nodes = []
    for node in graph.node:
        nodes += _replaced(node, shapes, sizes) if node in convolutions else [node]
    del graph.node[:]
    graph.node.extend(nodes)
    if convolutions:
        graph.initializer.extend(numpy_helper.from_array(table.numpy(), name) for name, table in tables.items())
        whole = {name: torch.tensor(size).numpy() for name, size in sizes.items()}
        graph.initializer.extend(numpy_helper.from_array(size, name) for name, size in whole.items())
    return made


def _shapes(model: Any) -> dict[str, list[int]]:
    """The shape of every value of a graph."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    found = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}
    return found | {tensor.name: list(tensor.dims) for tensor in graph.initializer}


def _is_large(node: Any, shapes: dict[str, list[int]]) -> bool:
    if node.op_type != "Conv":
        return False
    options = {one.name: list(one.ints) or one.i for one in node.attribute}
    plain = {"strides": [1, 1], "pads": [1, 1, 1, 1], "dilations": [1, 1], "group": 1}
    if options != plain:
        return False
    (outputs, channels, *kernel), (_, _, height, width) = shapes[node.input[1]], shapes[node.input[0]]
    aligned = height % 4 == 0 and width % 4 == 0 and height * width >= 16 * MIN_PATCHES
    return kernel == [3, 3] and aligned and min(outputs, channels) >= MIN_CHANNELS


def _replaced(node: Any, shapes: dict[str, list[int]], sizes: dict[str, list[int]]) -> list[Any]:
    """Nodes for one convolution. `sizes` collects the shapes that they name."""
    from onnx import helper

    x, weight, bias = node.input
    (outputs, channels, *_), (_, _, height, width) = shapes[weight], shapes[x]
    rows, columns = height // 4, width // 4
    made: list[Any] = []

    def add(operation: str, *inputs: str, **options: Any) -> str:
        name = f"{node.output[0]}.winograd{len(made)}"
        made.append(helper.make_node(operation, list(inputs), [name], **options))
        return name

    def shaped(value: str, *size: int) -> str:
        name = "winograd.size" + "x".join(map(str, size))
        sizes[name] = list(size)
        return add("Reshape", value, name)

    kernel = add("Einsum", weight, "winograd.kernel", equation="ocij,fij->foc")  # computed once, by the runtime
    windows = add(
        "Conv",
        shaped(x, channels, 1, height, width),
        "winograd.input",
        strides=[4, 4],
        pads=[1, 1, 1, 1],
        kernel_shape=[6, 6],
    )
    windows = add("Transpose", shaped(windows, channels, 36, rows * columns), perm=[1, 0, 2])
    product = shaped(add("MatMul", kernel, windows), 36, outputs * rows * columns)
    patches = shaped(add("MatMul", "winograd.output", product), 1, 16 * outputs, rows, columns)
    picture = add("DepthToSpace", patches, blocksize=4, mode="DCR")
    made.append(helper.make_node("Add", [picture, shaped(bias, 1, outputs, 1, 1)], list(node.output)))
    return made
