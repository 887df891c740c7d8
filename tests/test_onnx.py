"""ONNX graphs against PyTorch, with tiny networks."""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.cli import main
from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT, to_internal, to_unit
from ddc.noise import Noise
from ddc.operators.base import Operator
from ddc.operators.blur import GaussianBlur, KernelBlur, motion_kernel
from ddc.operators.border import extrapolate_border
from ddc.operators.inpaint import Denoise, Inpaint, random_mask
from ddc.operators.jpeg import CHROMA, JPEG, LUMA, quantisation
from ddc.operators.superres import Bicubic
from ddc.priors import DataConsistency
from ddc.problems import Problem
from ddc.solvers.base import Run
from ddc.solvers.ddc import OnePass
from ddc.tiling import Window, own_measurement
from tiny import small_diffusers, tiny_network, tiny_posterior

pytest.importorskip("onnx", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")

from ddc.onnx import export, winograd  # noqa: E402
from ddc.onnx.blur import KERNEL, Border, MatrixBlur, singular_vectors  # noqa: E402
from ddc.onnx.record import Recorder  # noqa: E402
from ddc.onnx.winograd import with_winograd  # noqa: E402

SIDE = 64


NETWORKS = {"posterior": tiny_posterior, "network": tiny_network}


@pytest.fixture(scope="module", params=NETWORKS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with one network, by whose name the folder ends."""
    folder = tmp_path_factory.mktemp("model") / request.param
    NETWORKS[request.param]().save_pretrained(folder / request.param)
    return folder


@pytest.fixture(scope="module")
def graphs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("onnx") / "graphs"
    checked = export.export_onnx(model, out, "8bit", SIDE, tell=lambda text: None)
    assert len(checked) == 11
    assert all(one.difference <= 1e-4 for one in checked)
    assert all(one.psnr > 30 for one in checked)  # the rounding shows, and is small
    return out


def rounded_network(model: Path) -> export.Network:
    network = export.one_pass_network(model)
    rounded, state = export.round_weights(network.unet.state_dict(), "8bit")
    assert rounded
    network.unet.load_state_dict(state)
    return network


def pictures(count: int, side: int) -> Tensor:
    soft = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.interpolate(soft, size=(side, side), mode="bicubic").clamp(0, 1)


def one_pass(model: Path, operator: Operator, y: Tensor, sigma_y: float, side: int, conditions: Tensor) -> Tensor:
    """The same restoration with the operators and the solvers of the core."""
    zero, sigma = torch.zeros(len(y), 3, side, side), torch.full((len(y), 1, 1, 1), 2 * sigma_y)
    network = rounded_network(model)
    if isinstance(network, DataConsistency):
        run = Run(y, Problem(operator, sigma_y), None, Noise([0] * len(y)), network=network)  # type: ignore[arg-type]
        return to_unit(OnePass().solve(run))
    theta = torch.full((len(y), 1, 1, 1), math.pi / 2)
    with torch.no_grad():
        return to_unit(network((operator, y, sigma), zero, theta, conditions=conditions)[0])


def centred(kernel: Tensor) -> Tensor:
    rows, columns = ((KERNEL - length) // 2 for length in kernel.shape)
    return pad(kernel, (columns, columns, rows, rows))


MASK = random_mask((SIDE, SIDE), 0.4, 3)
LINE, SOFT = centred(motion_kernel(9, 30)), GaussianBlur(1.5)
FAMILIES: dict[str, tuple[Operator, dict[str, Tensor]]] = {
    **{f"sr{scale}": (Bicubic(scale), {}) for scale in (2, 3, 4, 8)},
    "blur": (KernelBlur(LINE), {"kernel": LINE}),
    "gauss": (SOFT, dict(zip("usv", singular_vectors(SOFT, SIDE), strict=True))),
    "holes": (Inpaint(MASK), {"mask": MASK}),
    "jpeg": (JPEG(35), {"luma": quantisation(LUMA)[35].float(), "chroma": quantisation(CHROMA)[35].float()}),
    "noise": (Denoise(), {}),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sigma_y", [0.0, 0.05])
def test_a_graph_restores_as_pytorch_does(model: Path, graphs: Path, name: str, sigma_y: float) -> None:
    operator, given = FAMILIES[name]
    sigma_y = (
        max(sigma_y, ROUNDING_8_BIT) if name in ("blur", "gauss") else sigma_y
    )  # the graph takes no blurred picture as exact
    side = SIDE // operator.scale * operator.scale
    conditions = torch.linspace(0, 0.5, 9).view(1, 9)
    y = operator(to_internal(pictures(2, side)))
    y = operator.add_noise(y, torch.randn(y.shape, generator=torch.Generator().manual_seed(2)), 2 * sigma_y)
    expected = one_pass(model, operator, y, sigma_y, side, conditions)
    session = opened(graphs / f"{name}.onnx")
    named = {"sigma": torch.tensor([sigma_y]), "conditions": conditions, **given}
    for index in range(2):
        restored = run(session, y=to_unit(y[index : index + 1], clip=False), **named)
        # the blur is computed by other sums, which an exact measurement amplifies
        assert np.abs(restored - expected[index].numpy()).max() <= (5e-4 if name == "blur" else 1e-4)


@lru_cache(maxsize=len(FAMILIES))
def opened(path: Path) -> Any:
    """A graph that is ready to run, for all tests of one model."""
    return onnxruntime.InferenceSession(str(path))


def run(session: Any, **inputs: Tensor) -> np.ndarray[Any, Any]:
    names = [one.name for one in session.get_inputs()]
    picture: np.ndarray[Any, Any] = session.run(None, {name: inputs[name].numpy() for name in names})[0]
    return picture


def test_the_blur_by_matrices_is_the_blur() -> None:
    x = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    ours, plain = MatrixBlur(LINE, SIDE), KernelBlur(LINE)
    assert torch.allclose(ours(x), plain(x), atol=1e-5)
    assert torch.allclose(ours.adjoint(x), plain.adjoint(x), atol=1e-5)


def test_the_border_of_a_photograph_is_that_of_the_core(graphs: Path) -> None:
    """y is a window of a larger scene. Its border is estimated as in the core, also beyond a photograph that is smaller."""
    scene = to_internal(pictures(1, 2 * SIDE))
    y = KernelBlur(LINE)(scene)[..., 32:96, 32:96] + 0.02 * torch.randn(1, 3, SIDE, SIDE)
    session = onnxruntime.InferenceSession(str(graphs / "border.onnx"))
    inputs = {"y": to_unit(y, clip=False), "sigma": torch.tensor([0.01]), "kernel": LINE}
    whole, operator = Window(0, 0, SIDE, SIDE), KernelBlur(LINE)
    guess, explained = extrapolate_border(y, operator, 0.02, (Border(SIDE).length - SIDE) // 2)
    expected = to_unit(operator(guess) + y - explained, clip=False)
    ours = run(session, **inputs, rows=torch.ones(SIDE), columns=torch.ones(SIDE))
    assert np.abs(ours - expected.numpy()).max() < 1e-4
    core = own_measurement(y, Problem(operator, 0.01), whole, whole, continues=True)  # with less room beyond the border
    assert np.abs(ours - to_unit(core, clip=False).numpy()).max() < 0.02
    rows = (torch.arange(SIDE) < 50).float()
    other = run(session, **inputs, rows=rows, columns=torch.ones(SIDE))
    assert np.abs(other - ours)[..., :40, :].max() < 0.01 < np.abs(other - ours)[..., 50:, :].max()


def test_graphs_share_their_weights(graphs: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in graphs.iterdir()}
    weights = sum(p.numel() for p in tiny_posterior().parameters())  # the larger one
    constants = 1.5e6  # matrices of the operators
    assert sizes["weights.bin"] < constants + 2 * weights
    assert all(size < 400_000 for name, size in sizes.items() if name.endswith(".onnx"))


@pytest.mark.parametrize("name", ["noise", "sr4"])
def test_winograds_convolutions_are_the_same(graphs: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    plain = onnx.load(graphs / f"{name}.onnx", load_external_data=False)
    assert with_winograd(plain) == plain  # all of its convolutions are too small
    monkeypatch.setattr(winograd, "MIN_CHANNELS", 8)
    made = with_winograd(plain)
    assert [node.op_type for node in made.graph.node].count("DepthToSpace") > 2
    (graphs / f"{name}.wasm.onnx").write_bytes(made.SerializeToString())
    inputs = {"y": pictures(1, SIDE // (4 if name == "sr4" else 1)), "sigma": torch.tensor([0.05])}
    inputs["conditions"] = torch.zeros(1, 9)
    both = [run(opened(graphs / f"{name}{end}.onnx"), **inputs) for end in ("", ".wasm")]
    assert 0 < np.abs(both[0] - both[1]).max() < 1e-5


def test_a_network_of_diffusers(tmp_path: Path) -> None:
    """The paper's network is one. It reads y as a picture."""
    unet = small_diffusers(in_channels=6, out_channels=3, sample_size=SIDE)
    DataConsistency(unet, ("y",)).save_pretrained(tmp_path / "network")
    checked = export.export_onnx(tmp_path, tmp_path / "graphs", "fp32", SIDE, tell=lambda text: None)
    assert len(checked) == 11 and all(one.difference <= 1e-4 for one in checked)


def test_half_precision_and_full_precision() -> None:
    state = tiny_posterior().unet.state_dict()
    assert not export.round_weights(state, "fp32")[0]
    rounded, used = export.round_weights(state, "fp16")
    assert {values.dtype for values, _ in rounded.values()} == {np.dtype(np.float16)}
    assert 0 < max(float((used[name] - state[name]).abs().max()) for name in rounded) < 1e-3


def test_nothing_is_written_if_a_picture_differs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(export.TOLERANCE, "fp32", -1.0)
    with pytest.raises(UserError, match=r"sr2\.onnx differs from PyTorch by .* nothing was written"):
        export.export_onnx(model, tmp_path / "out", "fp32", SIDE)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{empty}", "{new}", "--onnx"], "holds no network that restores in one pass"),
        (["{model}", "{model}", "--onnx"], "already exists"),
        (["{model}", "{new}", "--onnx", "--size", "100"], "multiple of 16"),
        (["{model}", "{new}", "--onnx", "--push", "me/mine"], "--push is for a model folder"),
    ],
)
def test_refusals(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"model": model, "empty": tmp_path / "empty", "new": tmp_path / "new"}
    assert main(["export", *(text.format(**places) for text in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_recorder_refuses_what_it_does_not_know() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(UserError, match="it uses cumsum"), Recorder({"x": x}, {}):
        x.cumsum(0)
    with pytest.raises(UserError, match="in place"), Recorder({"x": x}, {}):
        x.add_(1)
        x * 2
