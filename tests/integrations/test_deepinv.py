"""The bridge to deepinv: with deepinv itself where it is installed, and with classes of its documented interface."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from ddc.errors import UserError
from ddc.images import to_unit
from ddc.operators import JPEG, AveragePool, Bicubic, Colorize, GaussianBlur
from ddc.operators.custom import check_adjoint, check_operator
from ddc.pipeline import RestorationPipeline
from ddc.problems import Problem
from ddc.solvers import make_solver

FILE = Path(__file__).parents[2] / "integrations" / "deepinv" / "ddc_deepinv.py"
spec = importlib.util.spec_from_file_location("ddc_deepinv", FILE)
assert spec is not None and spec.loader is not None
bridge: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bridge)


class LinearPhysics(nn.Module):
    """What deepinv's documentation says of its class: y = N(A(x)), with A_adjoint and A_dagger."""

    def __init__(self, img_size: tuple[int, ...] | None = None, noise_model: Any = None, **_: Any) -> None:
        super().__init__()
        self.img_size, self.noise_model = img_size, noise_model or (lambda y: y)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.noise_model(self.A(x, **kwargs))


class Pooling(LinearPhysics):
    """A measurement that is a smaller picture."""

    factor = 2

    def A(self, x: Tensor, **_: Any) -> Tensor:
        return avg_pool2d(x, 2)

    def A_adjoint(self, y: Tensor, **_: Any) -> Tensor:
        return y.repeat_interleave(2, -1).repeat_interleave(2, -2) / 4


class Projections(LinearPhysics):
    """A measurement that is no picture: (B, m)."""

    def __init__(self, img_size: tuple[int, ...], m: int) -> None:
        super().__init__(img_size)
        pixels = torch.Size(img_size).numel()
        matrix = torch.randn(m, pixels, generator=torch.Generator().manual_seed(0)) / pixels**0.5
        self.register_buffer("matrix", matrix)

    def A(self, x: Tensor, **_: Any) -> Tensor:
        return x.flatten(1) @ self.matrix.mT

    def A_adjoint(self, y: Tensor, **_: Any) -> Tensor:
        return (y @ self.matrix).view(-1, *self.img_size)


def real(name: str, **options: Any) -> Any:
    deepinv = pytest.importorskip("deepinv", reason="deepinv is not installed")
    return getattr(deepinv.physics, name)(**options)


PHYSICS = {
    "pooling": lambda: Pooling(),
    "projections": lambda: Projections((3, 16, 16), 300),
    "deepinv blur": lambda: real("Blur", filter=torch.ones(1, 1, 3, 3) / 9, padding="circular"),
    "deepinv valid blur": lambda: real("Blur", filter=torch.ones(1, 1, 3, 3) / 9, padding="valid"),
    "deepinv downsampling": lambda: real("Downsampling", img_size=(3, 16, 16), factor=2, filter="gaussian"),
    "deepinv inpainting": lambda: real("Inpainting", img_size=(3, 16, 16), mask=0.5),
    "deepinv compressed sensing": lambda: real("CompressedSensing", m=300, img_size=(3, 16, 16), channelwise=False),
    "deepinv tomography": lambda: real("Tomography", angles=30, img_width=16, normalize=True),
}


@pytest.mark.parametrize("name", PHYSICS)
def test_a_physics_is_an_operator(name: str) -> None:
    operator = bridge.from_deepinv(PHYSICS[name]())
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    y = operator(x)
    check_adjoint(operator, x)
    assert operator.image_size(y) == (16, 16) and operator.to_image(y).shape == x.shape
    if y.ndim == 4:
        check_operator(operator, (16, 16))
    # A A† A = A, as far as the cut-off of small singular values allows
    assert float((operator(operator.pinv(y, (16, 16))) - y).norm() / y.norm()) < 0.02
    closer = operator.prox(torch.zeros_like(x), y, 0.01)
    assert float((operator(closer) - y).norm()) < 0.2 * float(y.norm())
    # the measurement of 2x − 1 from that of x
    assert torch.allclose(bridge.to_internal(operator, y), operator(2 * x - 1), atol=1e-5)


@pytest.mark.parametrize("name", ["pooling", "projections", "deepinv blur"])
def test_a_solver_restores_with_a_physics(name: str, tiny_model: Path) -> None:
    physics, pipe = PHYSICS[name](), RestorationPipeline.from_pretrained(tiny_model)
    operator, x = bridge.from_deepinv(physics), torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    y = bridge.to_internal(operator, physics.A(x))
    restored = pipe.solve(y, Problem(operator), make_solver("ddnm", 2), [0], size=(16, 16))
    assert restored.shape == x.shape
    assert float((physics.A(to_unit(restored, clip=False)) - physics.A(x)).abs().max()) < 0.05


def test_noise_needs_a_solver_without_an_svd(tiny_model: Path) -> None:
    """As in the documentation: y with noise."""
    pipe, physics = RestorationPipeline.from_pretrained(tiny_model), Pooling(noise_model=lambda y: y + 0.01)
    operator, x = bridge.from_deepinv(physics), torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    y = bridge.to_internal(operator, physics(x))
    for solver in ("ddc", "dds"):
        restored = pipe.solve(y, Problem(operator, 0.01), make_solver(solver, 2), [0], size=(16, 16))
        assert restored.shape == x.shape and bool(restored.isfinite().all())
    with pytest.raises(UserError, match="ddnm needs an operator with an SVD where y has noise"):
        pipe.solve(y, Problem(operator, 0.01), make_solver("ddnm", 2), [0], size=(16, 16))


class Two(LinearPhysics):
    """Measures two tensors, as deepinv's TensorList has them."""

    def A(self, x: Tensor, **_: Any) -> Any:
        return [x, x]

    def A_adjoint(self, y: Any, **_: Any) -> Tensor:
        return y[0] + y[1]


def test_a_picture_is_restored_with_a_physics(tiny_model: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    result = pipe(torch.rand(3, 16, 20), bridge.from_deepinv(Pooling()), steps=1)
    assert result.picture.size == (32, 40) and result.tasks == ["PhysicsOperator"]
    with pytest.raises(UserError, match=r"for images of 16×16 pixels.*solve"):
        pipe(torch.rand(3, 40, 40), bridge.from_deepinv(Projections((3, 16, 16), 9)))


def test_what_is_not_linear_is_refused() -> None:
    with pytest.raises(UserError, match="Identity has no A_adjoint"):
        bridge.from_deepinv(nn.Identity())
    with pytest.raises(UserError, match="Two measures list; expected one tensor"):
        bridge.from_deepinv(Two())(torch.rand(1, 3, 8, 8))
    with pytest.raises(UserError, match="JPEG is not linear"):
        bridge.to_deepinv(JPEG(10))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, physics = ModuleType("deepinv"), ModuleType("deepinv.physics")
    vars(physics)["LinearPhysics"] = LinearPhysics
    vars(package)["physics"] = physics
    monkeypatch.setitem(sys.modules, "deepinv", package)
    monkeypatch.setitem(sys.modules, "deepinv.physics", physics)


OPERATORS = [Bicubic(2), AveragePool(4), GaussianBlur(1.5), Colorize()]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("kind", ["documented", "deepinv"])
def test_an_operator_is_a_physics(kind: str, operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "documented":
        stand_in(monkeypatch)
    else:
        pytest.importorskip("deepinv", reason="deepinv is not installed")
    x = torch.rand(2, 3, 18, 18, generator=torch.Generator().manual_seed(1))
    physics = bridge.to_deepinv(operator, (3, 18, 18), noise_model=lambda y, **_: y + 1)
    y = physics.A(x)
    assert torch.equal(y, operator(x)) and torch.equal(physics(x), y + 1)
    v = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    assert float((y * v).sum()) == pytest.approx(float((x * physics.A_adjoint(v)).sum()), rel=1e-3, abs=1e-3)
    assert float((physics.A(physics.A_dagger(y)) - y).norm() / y.norm()) < 0.05
    back = bridge.from_deepinv(physics)
    assert torch.equal(back(x), y) and torch.equal(back.adjoint(v), operator.adjoint(v, (18, 18)))
    if kind == "deepinv":
        assert float(physics.adjointness_test(x)) == pytest.approx(0, abs=1e-2)
        assert float((physics.A(physics.prox_l2(torch.zeros_like(x), y, 1000.0)) - y).norm() / y.norm()) < 0.1


def test_without_deepinv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepinv", None)
    monkeypatch.setitem(sys.modules, "deepinv.physics", None)
    with pytest.raises(UserError, match="pip install deepinv"):
        bridge.to_deepinv(Bicubic(2))
