"""Writes a network as ONNX: the network alone, and one graph for each family of restorations in one pass.

All graphs share the file weights.bin. Each is run with onnxruntime, and its picture compared with PyTorch's.
"""

import copy
import hashlib
import importlib.util
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.fast import cpu_unet
from ddc.images import from_uint8
from ddc.networks import CompactUNet, read_config, run_unet, sinusoidal, unet_size_multiple
from ddc.onnx.blur import KERNEL, Border
from ddc.onnx.record import Recorder
from ddc.onnx.restorations import SinglePass, restorations
from ddc.onnx.winograd import with_winograd
from ddc.pipeline import DEFAULT_MODEL, model_folder
from ddc.priors import DataConsistency
from ddc.solvers.posterior import CONDITIONS, PosteriorDenoiser

Precision = Literal["8bit", "fp16", "fp32"]
WEIGHTS = "weights.bin"
LEAST_SHARED = 512  # bytes; smaller tensors stay in the graphs
LEAST_ROUNDED = 4096  # numbers; smaller tensors are stored in float32
TOLERANCE = {"8bit": 1 / 255, "fp16": 1 / 255, "fp32": 1e-4}  # between onnxruntime's picture and PyTorch's, in [0, 1]
PROBE_NOISE = 0.02  # σ of the picture that is compared


@dataclass(frozen=True)
class Checked:
    """A graph that was written, and how far its picture is from PyTorch's."""

    name: str
    difference: float  # the largest, with the same weights
    psnr: float  # in dB, against the weights before they were rounded

    def __str__(self) -> str:
        rounding = "" if math.isinf(self.psnr) else f", {self.psnr:.1f} dB from unrounded weights"
        return f"{self.name}.onnx: within {self.difference:.1g} of PyTorch{rounding}"


def export_onnx(
    model: str | Path | None,
    out: str | Path,
    dtype: Precision = "fp32",
    side: int = 256,
    tell: Callable[[str], None] = print,
    for_page: bool = False,
) -> list[Checked]:
    """Write the graphs of a model into the new folder `out`, if all of them agree with PyTorch. None is the shipped model.

    for_page: write what the page runs, whole restorations in two forms: NAME.onnx, and NAME.wasm.onnx for WebAssembly
    """
    _require("onnx", "onnxruntime")
    network, out = one_pass_network(DEFAULT_MODEL if model is None else model_folder(model)), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists; name a new or empty folder for the ONNX files")
    step = math.lcm(unet_size_multiple(network.unet), 16)
    if not 64 <= side <= 1024 or side % step:
        raise UserError(f"--size is {side}; expected a multiple of {step} from 64 to 1024")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".onnx-") as folder:
        made = Path(folder) / "graphs"
        made.mkdir()
        checked = []
        for one in _write(network, made, dtype, side, for_page):
            tell(str(one))
            checked.append(one)
        if out.exists():
            out.rmdir()
        made.replace(out)
    return checked


Network = PosteriorDenoiser | DataConsistency


def one_pass_network(model: Path) -> Network:
    """The network of a model that restores in one pass: network/, which is sharper, else posterior/; or the model's folder
    itself."""
    for folder in (model / "network", model / "posterior", model):
        if (folder / "config.json").is_file():
            kind: Any = PosteriorDenoiser if read_config(folder).get("posterior") else DataConsistency
            network: Network = kind.from_pretrained(folder).requires_grad_(False)
            return network
    raise UserError(
        f"{model} holds no network that restores in one pass; name a model with network/ or posterior/, "
        "or train one with `ddc train network`"
    )


def _require(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"the package {name} is missing; install deep-data-consistency[onnx]")


def _write(network: Network, folder: Path, dtype: Precision, side: int, for_page: bool) -> Iterator[Checked]:
    rounded, state = round_weights(network.unet.state_dict(), dtype)
    ours, unrounded = copy.deepcopy(network), copy.copy(network)
    ours.unet.load_state_dict(state)
    unrounded._modules = {"unet": cpu_unet(network.unet)}  # faster, and nearly the same
    one_pass = SinglePass(ours)
    _fold_time(ours.unet, one_pass.time)
    weights: dict[str, Tensor] = dict(ours.unet.named_parameters())
    with (folder / WEIGHTS).open("wb") as file:
        shared = _SharedWeights(file, rounded)
        graphs: dict[str, Any] = {}
        exact = restorations(SinglePass(unrounded), side, for_page)
        for name, restoration in restorations(one_pass, side, for_page).items():
            arguments = restoration.arguments(_photograph(restoration.side), PROBE_NOISE)
            model, expected = _record(restoration, arguments, weights)
            paths = [shared.save(model, folder / f"{name}.onnx")]
            if for_page:
                paths.append(folder / f"{name}.wasm.onnx")
                paths[1].write_bytes(with_winograd(model).SerializeToString())
            difference = max(_compare(path, arguments, expected, TOLERANCE[dtype]) for path in paths)
            error = (exact[name](*arguments.values()) - expected).square().mean().item() if rounded else 0.0
            graphs[name] = {"scale": restoration.scale, "side": restoration.side, "inputs": list(arguments)}
            yield Checked(name, difference, -10 * math.log10(error) if error else math.inf)
        arguments = (border := Border(side)).arguments(_photograph(side), PROBE_NOISE)
        model, expected = _record(border, arguments, {})
        path = shared.save(model, folder / "border.onnx")
        yield Checked("border", _compare(path, arguments, expected, TOLERANCE[dtype]), math.inf)
        if not for_page:
            arguments = {"x": torch.rand(1, int(ours.unet.config["in_channels"]), side, side)}  # type: ignore[index]
            arguments |= {"conditions": torch.zeros(1, CONDITIONS)} if one_pass.conditional else {}
            model, expected = _record(_Network(ours.unet, one_pass.time), arguments, weights)
            path = shared.save(model, folder / "network.onnx")
            yield Checked("network", _compare(path, arguments, expected, TOLERANCE[dtype]), math.inf)
    record = {"dtype": dtype, "kernel": KERNEL, "weights": WEIGHTS, "graphs": graphs}
    (folder / "model.json").write_text(json.dumps(record, indent=2) + "\n")


def _photograph(side: int) -> Tensor:
    """A picture (1, 3, side, side) in [0, 1]."""
    from skimage import data

    pixels = torch.from_numpy(data.astronaut()).permute(2, 0, 1)[None]
    repeats = -(-side // 512)
    return (from_uint8(pixels).repeat(1, 1, repeats, repeats)[..., :side, -side:] + 1) / 2


def _compare(path: Path, arguments: dict[str, Tensor], expected: Tensor, tolerance: float) -> float:
    """The largest difference of the graph's output from the expected one. Too large a difference is an error."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (picture,) = session.run(None, {name: value.numpy() for name, value in arguments.items()})
    difference = float(np.abs(picture - expected.numpy()).max())
    if not difference <= tolerance:
        raise UserError(
            f"{path.name} differs from PyTorch by {difference:.2g}, more than {tolerance:.2g}, so nothing was written; "
            "try --dtype fp32, or other versions of torch and onnxruntime"
        )
    return difference


# ---------------------------------------------------------------------------------------------------------
# weights

Rounded = dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]]


def round_weights(state: dict[str, Tensor], dtype: Precision) -> tuple[Rounded, dict[str, Tensor]]:
    """The large weights as they are stored, with the scales of 8bit, and all weights as they are computed with.

    8bit has one scale for each output channel.
    """
    rounded: Rounded = {}
    used = dict(state)
    for name, weight in state.items():
        if dtype == "fp32" or weight.numel() < LEAST_ROUNDED or weight.ndim < 2:
            continue
        if dtype == "fp16":
            half = weight.half()
            rounded[name], used[name] = (half.numpy(), None), half.float()
            continue
        scale = weight.flatten(1).abs().amax(1).clamp(min=1e-12) / 127
        shape = (-1,) + (1,) * (weight.ndim - 1)
        whole = (weight / scale.view(shape)).round()
        rounded[name], used[name] = (whole.to(torch.int8).numpy(), scale.numpy()), whole * scale.view(shape)
    return rounded, used


class _SharedWeights:
    """One file with the large tensors of several graphs; equal tensors are written once."""

    def __init__(self, file: Any, rounded: Rounded) -> None:
        self.file, self.rounded, self.places = file, rounded, dict[bytes, int]()

    def save(self, model: Any, path: Path) -> Path:
        """Write the graph, with its weights as they were rounded and its large tensors in the shared file."""
        import onnx
        from onnx import helper, numpy_helper

        graph, nodes, tensors = model.graph, [], []
        for tensor in graph.initializer:
            name = tensor.name
            if name not in self.rounded:
                tensors.append(tensor)
                continue
            values, scale = self.rounded[name]
            tensors.append(numpy_helper.from_array(values, f"{name}.stored"))
            if scale is None:
                nodes.append(helper.make_node("Cast", [f"{name}.stored"], [name], to=onnx.TensorProto.FLOAT))
            else:
                tensors.append(numpy_helper.from_array(scale, f"{name}.scale"))
                nodes.append(helper.make_node("DequantizeLinear", [f"{name}.stored", f"{name}.scale"], [name], axis=0))
        nodes += graph.node
        del graph.initializer[:], graph.node[:]
        graph.node.extend(nodes)
        graph.initializer.extend(self._placed(tensor) for tensor in tensors)
        self.file.flush()
        path.write_bytes(model.SerializeToString())
        onnx.checker.check_model(str(path))
        return path

    def _placed(self, tensor: Any) -> Any:
        from onnx.external_data_helper import set_external_data

        content = tensor.raw_data
        if len(content) >= LEAST_SHARED:
            key = hashlib.sha256(content).digest()
            if key not in self.places:
                self.file.write(bytes(-self.file.tell() % 64))
                self.places[key] = self.file.tell()
                self.file.write(content)
            set_external_data(tensor, WEIGHTS, self.places[key], len(content))
            tensor.ClearField("raw_data")
        return tensor


class _Network(nn.Module):
    """The U-Net at one time."""

    def __init__(self, unet: nn.Module, time: int) -> None:
        super().__init__()
        self.unet, self.time = unet, time

    def forward(self, x: Tensor, *conditions: Tensor) -> Tensor:
        return run_unet(self.unet, x, self.time, *conditions)


class _Constant(nn.Module):
    """What an embedding of the time is at one time."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, _: Tensor) -> Tensor:
        return self.value


def _fold_time(unet: Any, time: int) -> None:
    if isinstance(unet, CompactUNet):
        unet.time = _Constant(unet.time(sinusoidal(torch.full((1,), float(time)), unet.time_dim)))  # type: ignore[assignment]


@torch.no_grad()
def _record(module: nn.Module, arguments: dict[str, Tensor], weights: dict[str, Tensor]) -> tuple[Any, Tensor]:
    """The ONNX model of a module, and the output for these arguments."""
    with Recorder(arguments, weights) as recorder:
        out = module(*arguments.values())
    return recorder.model("picture", out), out
