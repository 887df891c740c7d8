"""What every operator in `OPERATORS` must do. A new one without arguments is tested by its line there."""

import pytest
import torch
from torch import Tensor

from ddc.operators import OPERATORS, LinearOperator, Operator, SVDOperator
from ddc.operators.base import SINGULAR_CUTOFF, Size, conjugate_gradient
from ddc.operators.blur import GaussianBlur, KernelBlur, motion_kernel
from ddc.operators.colorize import Colorize
from ddc.operators.custom import check_adjoint
from ddc.operators.inpaint import Inpaint, random_mask, stroke_mask
from ddc.operators.superres import AveragePool, Bicubic

SIZES = [(16, 24), (17, 13), (1, 1), (1, 7), (9, 1), (5, 40)]
KERNEL = torch.tensor([[0.0, 0.1, 0.05], [0.1, 0.6, 0.05], [0.02, 0.05, 0.03], [0.0, 0.0, 0.0]])
SINGULAR_KINDS = [name for name, kind in OPERATORS.items() if issubclass(kind, SVDOperator)]


def examples(name: str, size: Size) -> list[Operator]:
    """Operators of each kind, for a batch of two pictures of the given size."""
    if name == "bicubic":
        return [Bicubic(scale) for scale in (2, 3, 4, 8)]
    if name == "average-pool":
        return [AveragePool(scale) for scale in (2, 3, 5)]
    if name == "gaussian-blur":
        return [GaussianBlur(), GaussianBlur(0.7, 9)]
    if name == "kernel-blur":
        generator = torch.Generator().manual_seed(5)
        each = torch.rand(2, 1, 4, 7, generator=generator, dtype=torch.float64)
        return [KernelBlur(KERNEL), KernelBlur(motion_kernel(9, 30)), KernelBlur(each / 14)]
    if name == "inpaint":
        return [Inpaint(random_mask(size, 0.5, [1, 2])), Inpaint(stroke_mask(size, 3))]
    return [OPERATORS[name]()]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def linear_examples(size: Size) -> list[LinearOperator]:
    found = [operator for name in OPERATORS for operator in examples(name, size)]
    return [operator for operator in found if isinstance(operator, LinearOperator)]


def dense(operator: Operator, size: Size) -> Tensor:
    """The matrix of a linear operator on one picture, column by column."""
    count = 3 * size[0] * size[1]
    basis = torch.eye(count, dtype=torch.float64).view(count, 3, *size)
    return operator(basis).flatten(1).mT


def single(operator: Operator) -> Operator:
    """The operator for the first picture alone, where it holds something for each picture."""
    if isinstance(operator, Inpaint):
        return Inpaint(operator.mask[:1])
    if isinstance(operator, KernelBlur) and operator.kernel.ndim == 4:
        return KernelBlur(operator.kernel[:1])
    return operator


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPERATORS)
def test_adjoint_in_float64(name: str, size: Size) -> None:
    for operator in examples(name, size):
        x = normal(2, 3, *size)
        y = operator(x)
        assert y.shape[0] == 2 and y.dtype == x.dtype
        if isinstance(operator, LinearOperator):
            v = normal(*y.shape, seed=1)
            back = operator.adjoint(v, size)
            assert back.shape == x.shape
            error = abs(float((y * v).sum() - (x * back).sum())) / float(x.norm() * v.norm())
            assert error < 1e-10, operator


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SINGULAR_KINDS)
def test_pseudo_inverse_explains_what_it_keeps(name: str, size: Size) -> None:
    """A A† A = A, where the singular values that DDRM leaves out count as zero."""
    for operator in examples(name, size):
        assert isinstance(operator, SVDOperator)
        x = normal(2, 3, *size)
        s = operator.singular_values(size, x)
        kept = operator.U(torch.where(operator.measured(size, x), s, 0.0) * operator.Vt(x))
        again = operator(operator.pinv(operator(x), size))
        assert (again - kept).norm() <= 1e-10 * max(float(x.norm()), 1.0), operator
        if not bool(((s > 1e-9) & ~operator.measured(size, x)).any()):  # nothing was cut
            assert (again - operator(x)).norm() <= 1e-10 * max(float(x.norm()), 1.0), operator


def test_cut_offs() -> None:
    """DDRM cuts the values of one side, so that smaller products are kept; the network's inputs cut the products."""
    blur, size = GaussianBlur(3.0), (64, 48)
    x = normal(1, 3, *size)
    s, measured = blur.singular_values(size, x), blur.measured(size, x)
    one_side = [torch.linalg.svdvals(blur.matrix(length, x)) > SINGULAR_CUTOFF for length in size]
    assert measured.equal(one_side[0].view(-1, 1) & one_side[1])
    assert 0.0009 < float(s[measured].min()) < SINGULAR_CUTOFF
    y = blur(x)
    assert torch.allclose(blur.Vt(blur.pinv(y))[..., ~measured], torch.zeros(()).double(), atol=1e-9)
    assert float(blur.Vt(blur.guess(y, 0.0) - blur.pinv(y))[..., measured].abs().max()) > 1e-3
    faint = measured & (s <= SINGULAR_CUTOFF)
    assert torch.allclose(blur.Vt(blur.project(x, y + 1, 0.0) - x)[..., faint], torch.zeros(()).double(), atol=1e-9)
    loose = blur.pinv(y, cutoff=1e-5)
    assert (blur(loose) - y).norm() < 0.1 * (blur(blur.pinv(y)) - y).norm()


def test_grey_by_other_weights() -> None:
    third, x = Colorize((1 / 3, 1 / 3, 1 / 3)), normal(2, 3, 4, 5)
    assert torch.allclose(third(x), x.mean(1, keepdim=True))
    assert torch.allclose(third.pinv(third(x)), x.mean(1, keepdim=True).expand_as(x))
    assert third.key != Colorize().key
    with pytest.raises(ValueError, match="three numbers"):
        Colorize((1.0, 0.0))


@pytest.mark.parametrize("name", SINGULAR_KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_svd_is_one(name: str, size: Size) -> None:
    for operator in examples(name, size):
        assert isinstance(operator, SVDOperator)
        x = normal(2, 3, *size)
        y = operator(x)
        v = normal(*y.shape, seed=1)
        s = operator.singular_values(size, x)
        assert torch.allclose(operator.V(operator.Vt(x)), x, atol=1e-10)
        assert torch.allclose(operator.Vt(operator.V(x)), x, atol=1e-10)
        assert torch.allclose(operator.Vt(x).norm(), x.norm(), rtol=1e-10)
        assert torch.allclose(operator.U(s * operator.Vt(x)), y, atol=1e-10)
        assert torch.allclose(operator.V(s * operator.Ut(v, size)), operator.adjoint(v, size), atol=1e-10)
        assert operator.Ut(v, size).shape == x.shape
        assert bool((s >= 0).all())


@pytest.mark.parametrize("size", [(6, 5), (7, 4)])
def test_regularised_inverse_is_a_dense_solve(size: Size) -> None:
    for operator in linear_examples(size):
        operator = single(operator)
        assert isinstance(operator, LinearOperator)
        matrix = dense(operator, size)
        r = operator(normal(1, 3, *size)) + 0.1
        for lam in (0.02, 0.5):
            found = operator.regularised_inverse(r, lam, size).flatten()
            if isinstance(operator, SVDOperator):
                found = operator.regularised_inverse(r, lam, size, cutoff=SINGULAR_CUTOFF).flatten()
                u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
                gain = torch.where(s > SINGULAR_CUTOFF, s / (s**2 + lam), 0.0)
                expected = vt.mT @ (gain * (u.mT @ r.flatten()))
                tolerance = 1e-9
            else:
                normal_matrix = matrix.mT @ matrix + lam * torch.eye(matrix.shape[1], dtype=torch.float64)
                expected = torch.linalg.solve(normal_matrix, matrix.mT @ r.flatten())
                tolerance = 1e-4  # conjugate gradients stop when the residual is 1e-6
            assert (found - expected).norm() <= tolerance * expected.norm(), operator


def test_regularised_inverse_takes_one_value_for_each_image() -> None:
    size = (6, 5)
    for operator in linear_examples(size):
        r = operator(normal(2, 3, *size))
        both = operator.regularised_inverse(r, torch.tensor([0.1, 0.4]).double().view(2, 1, 1, 1), size)
        first = operator.regularised_inverse(r, 0.1, size)
        assert torch.allclose(both[0], first[0], atol=1e-4), operator


def test_pinv_of_a_gentle_kernel() -> None:
    operator = KernelBlur(KERNEL)
    y = operator(normal(2, 3, 16, 12))
    assert (operator(operator.pinv(y)) - y).norm() < 5e-3 * y.norm()


def test_gradient_is_the_adjoint_even_after_inference() -> None:
    """What is cached by a first run in inference mode serves a later run that wants gradients."""
    size = (22, 10)
    for operator in linear_examples(size):
        with torch.inference_mode():
            plain = operator(torch.ones(2, 3, *size, dtype=torch.float64))
        x = normal(2, 3, *size).requires_grad_()
        y = operator(x)
        v = normal(*y.shape, seed=1)
        assert plain.shape == y.shape
        (gradient,) = torch.autograd.grad((y * v).sum(), x)
        assert torch.allclose(gradient, operator.adjoint(v, size), atol=1e-10), operator
        if isinstance(operator, SVDOperator):
            assert torch.autograd.grad(operator.Vt(x).square().sum(), x)[0].allclose(2 * x, atol=1e-9)


@pytest.mark.parametrize("name", OPERATORS)
def test_lower_precision(name: str) -> None:
    size = (32, 20)
    for operator in examples(name, size):
        x = normal(2, 3, *size, dtype=torch.float32).mul(0.4).clamp(-1, 1)
        y = operator(x)
        half = operator(x.half())
        assert y.dtype == torch.float32 and half.dtype == torch.float16
        # in JPEG a pixel that rounds to another level may move its block by a step
        limit = 0.5 if name == "jpeg" else 5e-3
        assert float((half.float() - y).abs().max()) < limit, operator
        guess, projected = operator.guess(half, 0.1, size), operator.project(x.half(), half, 0.1)
        assert guess.dtype == projected.dtype == torch.float16
        assert bool(guess.isfinite().all()) and bool(projected.isfinite().all()), operator


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_leaves_measurements_alone(name: str) -> None:
    size = (24, 17)
    for operator in examples(name, size):
        x = normal(2, 3, *size, dtype=torch.float32).clamp(-1, 1)
        y = operator(x)
        with torch.autocast("cpu", dtype=torch.float16):
            again = operator(x)
            guess = operator.guess(y, 0.1, size)
        assert again.dtype == guess.dtype == torch.float32
        assert torch.equal(again, y), operator


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_and_batches(name: str, size: Size) -> None:
    for operator in examples(name, size):
        x = normal(2, 3, *size, dtype=torch.float32).clamp(-1, 1)
        y = operator(x)
        assert y.shape[-2:] == tuple(-(-side // operator.scale) for side in size)
        assert operator.image_size(y) == tuple(side * operator.scale for side in y.shape[-2:])
        for picture in (
            operator.to_image(y, size),
            operator.guess(y, 0.1, size),
            operator.guess(y, torch.tensor([0.0, 0.2]).view(2, 1, 1, 1), size),
            operator.project(x, y, 0.0),
        ):
            assert picture.shape == x.shape, operator
            assert bool(picture.isfinite().all()), operator
        alone = single(operator)(x[:1])
        assert torch.allclose(alone, y[:1], atol=1e-5), operator
        assert operator.add_noise(y, torch.ones_like(y), 0.0).equal(y)


def test_default_size_of_the_inverse_maps() -> None:
    for operator in linear_examples((120, 120)):
        y = operator(normal(2, 3, 120, 120))
        assert operator.adjoint(y).shape == operator.pinv(y).shape == (2, 3, 120, 120), operator
        assert operator.to_image(y).shape == (2, 3, 120, 120)


def test_conjugate_gradients_stop_at_rounding() -> None:
    """AᵀA of a grey picture has a null space; iterations past the answer would blow up what rounding leaves there."""
    A = Colorize()
    start, y = normal(2, 3, 8, 8, dtype=torch.float32), A(normal(2, 3, 8, 8, seed=1, dtype=torch.float32))
    found = conjugate_gradient(lambda p: A.adjoint(A(p)), A.adjoint(y), start, 8, tolerance=1e-5)
    assert (found - start - A.pinv(y - A(start), (8, 8))).abs().max() < 1e-5


def test_projection_explains_the_measurement_without_noise() -> None:
    size = (24, 20)
    for name in ("bicubic", "average-pool", "inpaint", "denoise", "colorize"):
        for operator in examples(name, size):
            truth, guess = normal(2, 3, *size), normal(2, 3, *size, seed=1)
            y = operator(truth)
            moved = operator.project(guess, y, 0.0)
            assert torch.allclose(operator(moved), y, atol=1e-9), operator
            assert (operator.project(guess, y, 1e3) - guess).norm() < 1e-5 * guess.norm()


def test_the_check_of_people_s_operators_passes_ours() -> None:
    for operator in linear_examples((12, 10)):
        check_adjoint(operator, torch.zeros(2, 3, 12, 10))
    with pytest.raises(ValueError, match="not linear"):
        check_adjoint(OffsetBlur(), torch.zeros(1, 3, 8, 8))


class OffsetBlur(LinearOperator):
    """Not linear: the constant spoils it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y
