"""Operators of experiments: their contracts, their task names, and phantoms restored without a network."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.images import Picture
from ddc.noise import Noise
from ddc.operators.base import LinearOperator, SVDOperator
from ddc.operators.blur import gaussian_kernel
from ddc.operators.colorize import Bayer
from ddc.operators.custom import check_adjoint
from ddc.operators.fourier import RandomProjections
from ddc.operators.natural import coefficients_of, far_and_unmixed, is_far, mixes, picture_of, spreads
from ddc.operators.superres import AreaDownscale, AveragePool
from ddc.priors import Prediction, Schedule
from ddc.problems import EXPERIMENTAL, Problem, Task, make_problem, measure
from ddc.solvers import make_solver
from ddc.solvers.base import Run
from ddc.solvers.messages import as_noisy_picture

# fewer angles of the tomography, which takes longest
NAMES = ["ct12" if name == "ct60" else name for name in EXPERIMENTAL if not name.startswith("levin")]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [(32, 24), (17, 21)])
@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str, size: tuple[int, int]) -> None:
    A = make_problem(name, size=size, seeds=[1, 2]).operator
    assert isinstance(A, LinearOperator)
    x = normal(2, 3, *size)
    check_adjoint(A, x, tolerance=1e-6)
    y = A(x)
    for picture in (A.to_image(y, size), A.guess(y, 0.1, size), A.project(x, y, 0.1), A.pinv(y, size)):
        assert picture.shape == x.shape and bool(picture.isfinite().all())
    assert A.image_size(y) == size
    if isinstance(A, SVDOperator):
        s = A.singular_values(size, x)
        assert torch.allclose(A.V(A.Vt(x)), x) and torch.allclose(A.U(s * A.Vt(x)), y, atol=1e-9)
    with torch.no_grad():
        assert (A(A.keep_known(0 * x, y, 0.0)) - y).norm() < y.norm()


def test_area_downscaling() -> None:
    x = normal(1, 3, 28, 28)
    assert torch.allclose(AreaDownscale((28, 28), 4)(x), AveragePool(4)(x))
    y = AreaDownscale((28, 28), 3.5)(torch.arange(28.0).double().expand(1, 1, 28, 28))
    assert y.shape[-2:] == (8, 8)
    assert y[0, 0, 0].tolist() == pytest.approx([1.25 + 3.5 * i for i in range(8)], abs=0.2)
    assert float(y[0, 0, 0, 0]) == pytest.approx((0 + 1 + 2 + 0.5 * 3) / 3.5)
    with pytest.raises(UserError, match="shorter side"):
        AreaDownscale((8, 4), 5)


def test_bayer() -> None:
    x = normal(1, 3, 4, 6)
    y = Bayer()(x)
    assert y[0, 0, 0, 0] == x[0, 0, 0, 0] and y[0, 0, 0, 1] == x[0, 1, 0, 1]
    assert y[0, 0, 1, 0] == x[0, 1, 1, 0] and y[0, 0, 1, 1] == x[0, 2, 1, 1]


def test_anisotropic_kernels() -> None:
    kernel = gaussian_kernel(3, 1, 0).double()
    offset = torch.arange(kernel.shape[0]) - kernel.shape[0] // 2
    assert math.sqrt(float((kernel.sum(0) * offset**2).sum())) == pytest.approx(3, rel=0.01)
    assert math.sqrt(float((kernel.sum(1) * offset**2).sum())) == pytest.approx(1, rel=0.01)
    assert torch.allclose(gaussian_kernel(3, 1, 90), gaussian_kernel(1, 3, 0), atol=1e-6)


def test_levins_kernels_come_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from scipy.io import savemat

    monkeypatch.delenv("DDC_LEVIN09", raising=False)
    with pytest.raises(UserError, match="DDC_LEVIN09"):
        Task.parse("levin3").operator()
    kernels = np.empty((1, 8), dtype=object)
    for i in range(8):
        kernels[0, i] = np.eye(3 + 2 * i)
    savemat(tmp_path / "Levin09.mat", {"kernels": kernels})
    monkeypatch.setenv("DDC_LEVIN09", str(tmp_path / "Levin09.mat"))
    assert torch.allclose(Task.parse("levin3").operator().kernel, torch.eye(7) / 7)  # type: ignore[union-attr, arg-type]
    (tmp_path / "Levin09.mat").write_bytes(b"MATLAB 5.0")
    with pytest.raises(UserError, match="cannot be read"):
        Task.parse("levin3").operator()
    (tmp_path / "Levin09.mat").write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(64))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match="pip install h5py"):
        Task.parse("levin3").operator()


def test_names_and_refusals() -> None:
    for name in EXPERIMENTAL:
        assert Task.parse(name).name == name
    for wrong in ("ct0", "ct2000", "mri0.5", "area20", "projections0", "levin9", "aniso3x0@1"):
        with pytest.raises(UserError, match="expected"):
            Task.parse(wrong)
    with pytest.raises(UserError, match="cannot be restored from a file"):
        Task.parse("ct60").operator()
    from ddc.degrade import degrade

    with pytest.raises(UserError, match="6 channels"):
        degrade(Picture(np.zeros((16, 16, 3), np.uint8)), "mri4")
    for name, shape in (("ct60", (1, 3, 16, 16)), ("mri4", (1, 3, 16, 16))):
        with pytest.raises(UserError, match=r"measurement (has|in)|real and imaginary"):
            make_problem(name, size=(16, 16)).operator.adjoint(torch.zeros(shape))  # type: ignore[operator]


SIDE = 24


def phantoms(count: int, seed: int) -> Tensor:
    """Drawn heads, (count, 1, SIDE, SIDE) in [-1, 1]: a skull with five ellipses of random places and greys in it."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.linspace(-1, 1, SIDE)
    v, u = axis.view(-1, 1), axis

    def ellipse(number: Tensor) -> Tensor:
        """Soft at its border; `number` is (count, 5): centre, half axes and angle."""
        x, y, a, b, angle = number.view(count, 5, 1, 1).unbind(1)
        along, across = (u - x) * angle.cos() + (v - y) * angle.sin(), (v - y) * angle.cos() - (u - x) * angle.sin()
        return torch.sigmoid(12 * (1 - ((along / a) ** 2 + (across / b) ** 2).sqrt()))

    low, high = torch.tensor([-0.4, -0.4, 0.1, 0.1, 0.0]), torch.tensor([0.4, 0.4, 0.4, 0.4, 3.0])
    picture = 0.9 * ellipse(torch.tensor([0, 0, 0.85, 0.95, 0]).expand(count, 5))
    picture = picture - 0.5 * ellipse(torch.tensor([0, 0, 0.75, 0.85, 0]).expand(count, 5))
    for _ in range(5):
        grey = torch.rand(count, 1, 1, generator=generator) * 0.6 - 0.3
        picture = picture + grey * ellipse(low + (high - low) * torch.rand(count, 5, generator=generator))
    return (2 * picture - 1).clamp(-1, 1).unsqueeze(1)


class PhantomPrior:
    """The Gaussian of drawn phantoms, with their mean and covariance; its three channels are one grey picture."""

    def __init__(self) -> None:
        self.schedule = Schedule.linear()
        drawn = phantoms(3000, seed=0).flatten(1).double()
        self.mean = drawn.mean(0)
        self.values, self.basis = torch.linalg.eigh(torch.cov(drawn.T))

    def predict(self, x: Tensor, t: int) -> Prediction:
        signal, level = (float(part) for part in (self.schedule.signal(t, x), self.schedule.level(t, x)))
        grey = x.mean(1).flatten(1).double() - signal * self.mean
        values = self.values.clamp(min=1e-6)
        gain = signal * values / (signal**2 * values + level**2 / 3)  # three channels, a third of the noise
        x0 = self.mean + (grey @ self.basis * gain) @ self.basis.T
        x0 = x0.to(x.dtype).view(-1, 1, SIDE, SIDE).expand_as(x)
        return Prediction(x0, (x - signal * x0) / level)


@pytest.fixture(scope="module")
def prior() -> PhantomPrior:
    return PhantomPrior()


@pytest.mark.parametrize("solver", ["dds", "diffpir", "pigdm"])
@pytest.mark.parametrize(("task", "sigma"), [("ct5", 0.0), ("mri4", 0.0), ("mri3", 0.02)])
def test_a_phantom_is_restored_better_than_by_the_pseudo_inverse(
    task: str, sigma: float, solver: str, prior: PhantomPrior
) -> None:
    x = phantoms(3, seed=1).expand(-1, 3, -1, -1)
    problem, y = measure(task, sigma, x, ["a", "b", "c"])

    def error(name: str) -> float:
        result = make_solver(name).solve(Run(y, problem, prior, Noise([1, 2, 3])))
        return float((result.mean(1, keepdim=True).clamp(-1, 1) - x).square().mean().sqrt())

    floor, found = error("pinv"), error(f"{solver}:steps=20")
    print(f"{task} {solver}: RMSE {found:.3f}, A†y {floor:.3f}")
    assert found < 0.85 * floor


def test_problems_of_a_batch_have_masks_of_their_own() -> None:
    problem = make_problem("mri4", 0.01, size=(16, 32), seeds=[1, 2])
    assert isinstance(problem, Problem)
    masks = problem.operator.mask  # type: ignore[union-attr]
    assert masks.shape == (2, 1, 16, 32) and not torch.equal(masks[0], masks[1])  # type: ignore[operator]


def drawn_photograph(side: int = 64, seed: int = 0) -> Tensor:
    """A picture drawn from the Gaussian of photographs, (1, 3, side, side) in about [-1, 1]."""
    return picture_of(0.3 * spreads(3, (side, side)) * normal(1, 3, side, side, seed=seed)) * 0.5


def rmse(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().mean().sqrt())


@pytest.mark.parametrize(
    ("name", "sigma", "share"), [("bayer", 0.0, 0.1), ("area3.5", 0.0, 0.7), ("projections25", 0.02, 0.4)]
)
def test_the_guess_is_far_better_than_the_pseudo_inverse(name: str, sigma: float, share: float) -> None:
    x = drawn_photograph()
    problem, y = measure(name, sigma, x, ["a"])
    A = problem.operator
    assert isinstance(A, LinearOperator)
    found, floor = rmse(A.guess(y, problem.sigma, (64, 64)), x), rmse(A.pinv(y, (64, 64)), x)
    print(f"{name}: RMSE {found:.4f}, A†y {floor:.4f}")
    assert found < share * floor


def test_the_guess_is_the_likeliest_photograph() -> None:
    """At the minimum of ‖A x − y‖² / σ² + xᵀS⁻¹x its gradient vanishes."""
    x, spread = drawn_photograph(32), spreads(3, (32, 32))
    problem, y = measure("bayer", 0.05, x, ["a"])
    A, sigma = problem.operator, float(problem.sigma)
    assert isinstance(A, LinearOperator)

    def gradient(z: Tensor) -> float:
        pull = A.adjoint(A(z) - y) / sigma**2
        return float((spread * (coefficients_of(pull) + coefficients_of(z) / spread**2)).norm())

    assert gradient(A.guess(y, sigma)) < 1e-2 * gradient(0 * x)
    assert torch.allclose(picture_of(coefficients_of(x)), x)


def test_guesses_of_trained_blurs_are_those_of_their_training() -> None:
    x = normal(1, 3, 32, 32)
    blur = make_problem("disc2").operator
    assert isinstance(blur, LinearOperator) and blur.local
    expected = blur.regularised_inverse(blur(x), (0.1 / 0.25) ** 2, iterations=15, cutoff=0.03)
    assert torch.equal(blur.guess(blur(x), 0.1), expected)


def test_which_operators_mix_distant_pixels() -> None:
    size = (128, 128)
    x = torch.zeros(1, 3, *size)
    found = {}
    for name in ("projections25", "mri4", "area3.5", "bayer", "coded"):
        A = make_problem(name, size=size, seeds=[0]).operator
        assert isinstance(A, LinearOperator)
        found[name] = (is_far(A, x), mixes(A, x))
    assert found.pop("projections25") == (True, True)
    assert found.pop("mri4") == (True, False)
    assert set(found.values()) == {(False, False)}
    projections = make_problem("projections25", size=size).operator
    assert not far_and_unmixed(projections, size, unmixing=True) and far_and_unmixed(projections, size, unmixing=False)


@pytest.mark.parametrize("sigma", [0.0, 0.04])
@pytest.mark.parametrize("alike", [True, False])
def test_projections_become_a_picture_with_noise_of_the_stated_level(sigma: float, alike: bool) -> None:
    """The denoiser is the best for the Gaussian that the picture is drawn from."""
    x = drawn_photograph()
    A: LinearOperator = RandomProjections((64, 64), 0.5) if alike else ProjectionsOfEachColour()
    y = A.add_noise(A(x), normal(*A(x).shape, seed=5), sigma)
    spread = 0.15 * spreads(3, (64, 64))

    def denoise(noisy: Tensor, level: Tensor) -> Tensor:
        return picture_of(spread**2 / (spread**2 + level**2) * coefficients_of(noisy))

    noisy, level = as_noisy_picture(A, y, sigma, x, denoise)
    assert rmse(noisy, x) == pytest.approx(float(level), rel=0.15)
    assert float(level) < 0.5 * rmse(A.pinv(y, (64, 64)), x)


class ProjectionsOfEachColour(LinearOperator):
    """Other random projections for each channel, which are therefore not treated alike."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [RandomProjections((64, 64), 0.5, seed) for seed in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x[:, i : i + 1]) for i, part in enumerate(self.parts)], dim=1)

    def adjoint(self, y: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        return torch.cat([part.adjoint(y[:, i : i + 1], size) for i, part in enumerate(self.parts)], dim=1)

    def add_noise(self, y: Tensor, z: Tensor, sigma: float | Tensor) -> Tensor:
        return y + self(self.adjoint(sigma * z))
