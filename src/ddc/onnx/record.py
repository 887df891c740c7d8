"""Records what PyTorch computes as an ONNX graph.

A `Recorder` watches the operations of ATen. Those that depend on its sources become nodes of the graph, with the shapes that
they have in this run. Everything else, such as the matrices of an operator or the embedding of the time, is computed now and
stored as a constant.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddc.errors import UserError

SMALL = 64  # numbers, which are stored as they are
OPSET = 17  # which onnxruntime-web runs with WebAssembly and with WebGPU


class Recorder(TorchDispatchMode):
    """`with Recorder(inputs, weights) as recorder: out = module(*inputs.values())`; then `recorder.model("picture", out)`."""

    def __init__(self, inputs: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self._found: dict[tuple[Any, ...], str] = {}  # constants by their content
        self._kept: list[Tensor] = []  # so that no other tensor gets the id of one that is named
        self._names: dict[int, str | None] = {}  # None: changed in place
        for name, tensor in (inputs | weights).items():
            self.name(tensor, name)
        self.constants |= {name: weight.detach().numpy() for name, weight in weights.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in _flat([*args, *(kwargs or {}).values()]) if isinstance(one, Tensor)]
        if not any(id(one) in self._names for one in tensors):
            return out
        operation = func.overloadpacket.__name__
        if operation in CONSTANT:
            return out
        if operation.endswith("_") and not operation.startswith("_"):
            memory = args[0].untyped_storage().data_ptr()
            for tensor in self._kept:
                if tensor.untyped_storage().data_ptr() == memory:
                    self._names[id(tensor)] = None
        elif isinstance(out, (Tensor, list, tuple)):
            if operation not in OPERATIONS:
                raise UserError(f"this network cannot be written as ONNX: it uses {operation}")
            made = OPERATIONS[operation](self, out, *args, **(kwargs or {}))
            for tensor, name in zip(_flat([out]), [made] if isinstance(made, str) else made, strict=False):
                self.name(tensor, name)
        return out

    def name(self, tensor: Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        self._kept.append(tensor)

    def of(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """The name of a tensor or a number in the graph, with this dtype."""
        if isinstance(value, Tensor) and id(value) in self._names:
            name = self._names[id(value)]
            if name is None:
                raise UserError("this network cannot be written as ONNX: it changes a tensor in place")
            return name if dtype in (None, value.dtype) else self.add("Cast", name, to=_TYPES[dtype])
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
        return self.constant(tensor.to(dtype or tensor.dtype).numpy())

    def constant(self, values: Any) -> str:
        """The name of a constant. Equal ones are stored once, repeated rows and columns once, and transposes not at all."""
        values = np.ascontiguousarray(values) if np.ndim(values) else np.asarray(values)
        key = _content(values)
        if key in self._found:
            return self._found[key]
        once = values
        for axis in range(values.ndim if values.size > SMALL else 0):
            first = once.take([0], axis)
            once = first if (once == first).all() else once
        if once.size < values.size:
            name = self.add("Expand", self.constant(once), self.whole(values.shape))
        elif values.ndim == 2 and values.size > SMALL and (turned := _content(values.T)) in self._found:
            name = self.add("Transpose", self._found[turned], perm=[1, 0])
        else:
            name = f"constant{len(self._found)}"
            self.constants[name] = values
        self._found[key] = name
        return name

    def whole(self, numbers: Sequence[int]) -> str:
        return self.constant(np.asarray(numbers, np.int64))

    def add(self, operation: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one output, and return its name."""
        from onnx import helper

        output = f"{operation.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, list(inputs), [output], **attributes))
        return output

    def model(self, name: str, out: Tensor) -> Any:
        """The ONNX model with this output, without nodes that nothing needs."""
        from onnx import helper, numpy_helper

        last = self.add("Identity", self.of(out))
        self.nodes[-1].output[0] = name
        needed, nodes = {name}, []
        for node in reversed(self.nodes):
            if node.output[0] in needed:
                nodes.append(node)
                needed.update(node.input)
        assert last not in needed
        graph = helper.make_graph(
            nodes[::-1],
            "ddc",
            [
                helper.make_tensor_value_info(key, _TYPES[one.dtype], list(one.shape))
                for key, one in self.inputs.items()
            ],
            [helper.make_tensor_value_info(name, _TYPES[out.dtype], list(out.shape))],
            [numpy_helper.from_array(values, key) for key, values in self.constants.items() if key in needed],
        )
        # the version of the format that onnxruntime reads since 1.12
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def _content(values: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return values.dtype.str, values.shape, values.tobytes()


_TYPES = {torch.float32: 1, torch.int64: 7, torch.bool: 9, torch.float64: 11}  # TensorProto.DataType


def _flat(values: Any) -> list[Any]:
    return [inner for one in values for inner in (_flat(one) if isinstance(one, (list, tuple)) else [one])]


# ---------------------------------------------------------------------------------------------------------
# operations: (recorder, output, *arguments of ATen) → the names of the outputs

Emit = Callable[..., str | list[str]]


def _elementwise(operation: str) -> Emit:
    def emit(r: Recorder, out: Tensor, *values: Any, **_: Any) -> str:
        return r.add(operation, *(r.of(value, out.dtype) for value in values))

    return emit


def _comparison(operation: str) -> Emit:
    def emit(r: Recorder, out: Tensor, a: Any, b: Any) -> str:
        dtype = torch.promote_types(a.dtype, b.dtype) if isinstance(b, Tensor) else a.dtype
        return r.add(operation, r.of(a, dtype), r.of(b, dtype))

    return emit


def _same(r: Recorder, out: Tensor, x: Tensor, *_: Any, **__: Any) -> str:
    return r.of(x, out.dtype)


def _reshape(r: Recorder, out: Tensor, x: Tensor, *_: Any, **__: Any) -> str:
    return r.add("Reshape", r.of(x), r.whole(out.shape))


def _permute(order: Callable[..., Sequence[int]]) -> Emit:
    def emit(r: Recorder, out: Tensor, x: Tensor, *dims: Any) -> str:
        return r.add("Transpose", r.of(x), perm=[d % x.ndim for d in order(x.ndim, *dims)])

    return emit


def _swapped(ndim: int, a: int, b: int) -> list[int]:
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return order


def _slice(r: Recorder, x: Tensor, dim: int, start: int, stop: int, step: int = 1) -> str:
    return r.add("Slice", r.of(x), *(r.whole([n]) for n in (start, stop, dim % x.ndim, step)))


def _cut(
    r: Recorder, out: Tensor, x: Tensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> str:
    length = x.shape[dim]
    start, stop = start or 0, length if stop is None else stop
    if (start, step) == (0, 1) and stop >= length:
        return r.of(x)
    return _slice(r, x, dim, start, min(stop, length), step)


def _split(r: Recorder, out: Sequence[Tensor], x: Tensor, size: Any, dim: int = 0) -> list[str]:
    ends = np.cumsum([0, *(part.shape[dim] for part in out)]).tolist()
    return [_slice(r, x, dim, a, b) for a, b in pairwise(ends)]


def _unbind(r: Recorder, out: Sequence[Tensor], x: Tensor, dim: int = 0) -> list[str]:
    return [r.add("Gather", r.of(x), r.constant(np.int64(i)), axis=dim % x.ndim) for i in range(len(out))]


def _select(r: Recorder, out: Tensor, x: Tensor, dim: int, index: int) -> str:
    return r.add("Gather", r.of(x), r.constant(np.int64(index)), axis=dim % x.ndim)


def _gathered(r: Recorder, out: Tensor, x: Tensor, dim: int, index: Tensor) -> str:
    return r.add("Gather", r.of(x), r.of(index), axis=dim % x.ndim)


def _concatenate(r: Recorder, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> str:
    return r.add("Concat", *(r.of(part) for part in parts), axis=dim % out.ndim)


def _stack(r: Recorder, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> str:
    axis = r.whole([dim % out.ndim])
    return r.add("Concat", *(r.add("Unsqueeze", r.of(part), axis) for part in parts), axis=dim % out.ndim)


def _reduction(operation: str) -> Emit:
    def emit(r: Recorder, out: Tensor, x: Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> str:
        axes = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims or range(x.ndim))]
        if operation == "ReduceMean":  # its axes became an input in opset 18
            return r.add(operation, r.of(x), axes=axes, keepdims=int(keepdim))
        return r.add(operation, r.of(x), r.whole(axes), keepdims=int(keepdim))

    return emit


def _clamp(r: Recorder, out: Tensor, x: Tensor, low: Any = None, high: Any = None, **named: Any) -> str:
    name = r.of(x, out.dtype)
    for operation, bound in (("Max", named.get("min", low)), ("Min", named.get("max", high))):
        name = name if bound is None else r.add(operation, name, r.of(bound, out.dtype))
    return name


def _power(r: Recorder, out: Tensor, x: Tensor, exponent: float) -> str:
    name = r.of(x)
    return r.add("Mul", name, name) if exponent == 2 else r.add("Pow", name, r.of(float(exponent), x.dtype))


def _scaled(operation: str, reverse: bool = False) -> Emit:
    """a + alpha b, or a − alpha b."""

    def emit(r: Recorder, out: Tensor, a: Any, b: Any, alpha: float = 1) -> str:
        assert alpha == 1
        names = r.of(a, out.dtype), r.of(b, out.dtype)
        return r.add(operation, *(names[::-1] if reverse else names))

    return emit


def _product(r: Recorder, out: Tensor, a: Tensor, b: Tensor) -> str:
    def operand(x: Tensor) -> str:
        alike = x.ndim == 3 and id(x) not in r._names and torch.equal(x, x[:1].expand_as(x))
        return r.of(x[0] if alike else x)  # one matrix for all: MatMul repeats it

    return r.add("MatMul", operand(a), operand(b))


def _affine(r: Recorder, out: Tensor, bias: Tensor, a: Tensor, b: Tensor) -> str:
    return r.add("Add", r.add("MatMul", r.of(a), r.of(b)), r.of(bias))


def _convolution(
    r: Recorder,
    out: Tensor,
    x: Tensor,
    w: Tensor,
    b: Any,
    stride: Any,
    pad: Any,
    dilation: Any,
    transposed: bool,
    _: Any,
    groups: int,
) -> str:
    assert not transposed
    names = [r.of(x), r.of(w), *([] if b is None else [r.of(b)])]
    return r.add("Conv", *names, strides=stride, pads=[*pad, *pad], dilations=dilation, group=groups)


def _mean_pool(r: Recorder, out: Tensor, x: Tensor, kernel: Any, stride: Any = None, *_: Any) -> str:
    both = [list(v) * (2 // len(v)) for v in (kernel, stride or kernel)]
    return r.add("AveragePool", r.of(x), kernel_shape=both[0], strides=both[1])


def _padded(mode: str) -> Emit:
    def emit(r: Recorder, out: Tensor, x: Tensor, pads: Sequence[int], value: float = 0) -> str:
        sides = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)][::-1]
        sides = [(0, 0)] * (x.ndim - len(sides)) + sides
        name = r.of(x)
        if any(min(pair) < 0 for pair in sides):
            cuts = [(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(sides, x.shape, strict=True)]
            starts, stops = ([cut[i] for cut in cuts] for i in (0, 1))
            name = r.add("Slice", name, r.whole(starts), r.whole(stops))
        amounts = [max(pair[i], 0) for i in (0, 1) for pair in sides]
        extra = [r.of(float(value), x.dtype)] if mode == "constant" else []
        return r.add("Pad", name, r.whole(amounts), *extra, mode=mode)

    return emit


def _bilinear(r: Recorder, out: Tensor, x: Tensor, *_: Any) -> str:
    return r.add(
        "Resize", r.of(x), "", "", r.whole(out.shape), mode="linear", coordinate_transformation_mode="half_pixel"
    )


def _nearest(r: Recorder, out: Tensor, x: Tensor, *_: Any) -> str:
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return r.add("Resize", r.of(x), "", "", r.whole(out.shape), mode="nearest", **how)


def _silu(r: Recorder, out: Tensor, x: Tensor) -> str:
    return r.add("Mul", r.of(x), r.add("Sigmoid", r.of(x)))


def _group_norm(
    r: Recorder, out: Any, x: Tensor, w: Any, b: Any, n: int, channels: int, pixels: int, groups: int, eps: float
) -> list[str]:
    flat = r.add("Reshape", r.of(x), r.whole([n, groups, channels // groups * pixels]))
    one, zero = (r.constant(np.full(groups, value, np.float32)) for value in (1, 0))
    normal = r.add("InstanceNormalization", flat, one, zero, epsilon=eps)
    name, shape = r.add("Reshape", normal, r.whole(x.shape)), r.whole([channels, *[1] * (x.ndim - 2)])
    name = r.add("Mul", name, r.add("Reshape", r.of(w), shape))
    return [r.add("Add", name, r.add("Reshape", r.of(b), shape))]


def _shuffle(r: Recorder, out: Tensor, x: Tensor, factor: int) -> str:
    return r.add("DepthToSpace", r.of(x), blocksize=factor, mode="CRD")


def _unshuffle(r: Recorder, out: Tensor, x: Tensor, factor: int) -> str:
    n, c, height, width = out.shape
    blocks = r.add("Reshape", r.of(x), r.whole([n, x.shape[1], height, factor, width, factor]))
    return r.add("Reshape", r.add("Transpose", blocks, perm=[0, 1, 3, 5, 2, 4]), r.whole([n, c, height, width]))


def _attention(
    r: Recorder, out: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, scale: float | None = None, **__: Any
) -> list[str]:
    scaled = r.add("Mul", r.of(q), r.of(scale or 1 / math.sqrt(q.shape[-1]), q.dtype))
    scores = r.add("MatMul", scaled, r.add("Transpose", r.of(k), perm=[0, 1, 3, 2]))
    return [r.add("MatMul", r.add("Softmax", scores, axis=-1), r.of(v))]


def _softmax(r: Recorder, out: Tensor, x: Tensor, dim: int, *_: Any) -> str:
    return r.add("Softmax", r.of(x), axis=dim)


def _where(r: Recorder, out: Tensor, condition: Tensor, a: Any, b: Any) -> str:
    return r.add("Where", r.of(condition), r.of(a, out.dtype), r.of(b, out.dtype))


def _all(r: Recorder, out: Tensor, x: Tensor, *_: Any) -> str:
    return r.add("Cast", r.add("ReduceMin", r.of(x, torch.float32), keepdims=0), to=_TYPES[torch.bool])


CONSTANT = ("ones_like", "zeros_like", "new_zeros", "new_ones", "full_like")  # whatever the values of the tensor are
OPERATIONS: dict[str, Emit] = {
    **dict.fromkeys(("alias", "detach", "clone", "_to_copy", "lift_fresh_copy", "contiguous"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias"), _reshape),
    **{"add": _scaled("Add"), "sub": _scaled("Sub"), "rsub": _scaled("Sub", reverse=True), "pow": _power},
    **{"mul": _elementwise("Mul"), "div": _elementwise("Div"), "neg": _elementwise("Neg")},
    **{name: _elementwise(name.capitalize()) for name in ("sqrt", "reciprocal", "abs", "sign", "floor", "round")},
    **{"maximum": _elementwise("Max"), "minimum": _elementwise("Min"), "sigmoid": _elementwise("Sigmoid")},
    **{"bitwise_or": _elementwise("Or"), "bitwise_and": _elementwise("And"), "clamp": _clamp, "where": _where},
    **{"gt": _comparison("Greater"), "lt": _comparison("Less"), "eq": _comparison("Equal")},
    **{"ge": _comparison("GreaterOrEqual"), "le": _comparison("LessOrEqual"), "all": _all},
    **{"sum": _reduction("ReduceSum"), "mean": _reduction("ReduceMean")},
    **{"cat": _concatenate, "stack": _stack, "split": _split, "split_with_sizes": _split, "unbind": _unbind},
    **{"slice": _cut, "select": _select, "index_select": _gathered},
    **{"expand": lambda r, out, x, *_: r.add("Expand", r.of(x), r.whole(out.shape))},
    **{
        "transpose": _permute(_swapped),
        "t": _permute(lambda ndim: [1, 0]),
        "permute": _permute(lambda ndim, dims: dims),
    },
    **{"bmm": _product, "mm": _product, "addmm": _affine, "convolution": _convolution, "avg_pool2d": _mean_pool},
    **{
        "constant_pad_nd": _padded("constant"),
        "replication_pad2d": _padded("edge"),
        "reflection_pad2d": _padded("reflect"),
    },
    **{
        "upsample_bilinear2d": _bilinear,
        "upsample_nearest2d": _nearest,
        "silu": _silu,
        "native_group_norm": _group_norm,
    },
    **{"pixel_shuffle": _shuffle, "pixel_unshuffle": _unshuffle},
    **{"_scaled_dot_product_flash_attention_for_cpu": _attention, "_softmax": _softmax, "_safe_softmax": _softmax},
}
