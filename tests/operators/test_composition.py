"""`A2 @ A1` keeps the contract of an operator, and operators move like other modules."""

import pytest
import torch
from torch import Tensor

from ddc.operators import (
    JPEG,
    AveragePool,
    Bicubic,
    Colorize,
    GaussianBlur,
    Inpaint,
    KernelBlur,
    LinearOperator,
    Operator,
)
from ddc.operators.base import Size
from ddc.operators.blur import motion_kernel
from ddc.operators.compose import Composition
from ddc.operators.inpaint import random_mask
from ddc.problems import Problem

SIZE = (48, 40)


def small_mask(size: Size, scale: int) -> Tensor:
    return random_mask((-(-size[0] // scale), -(-size[1] // scale)), 0.4, 1)


def linear(size: Size) -> dict[str, Operator]:
    return {
        "blur then downscale": Bicubic(4) @ GaussianBlur(1.0, 9),
        "motion then pool": AveragePool(3) @ KernelBlur(motion_kernel(5, 30)),
        "downscale twice": Bicubic(2) @ Bicubic(2),
        "mask after blur": Inpaint(random_mask(size, 0.4, [1, 2])) @ GaussianBlur(1.0, 9),
        "mask after downscale": Inpaint(small_mask(size, 2)) @ Bicubic(2),
        "grey after blur": Colorize() @ GaussianBlur(1.0, 9),
        "three": Inpaint(small_mask(size, 2)) @ Bicubic(2) @ GaussianBlur(0.8, 7),
    }


def compositions(size: Size) -> dict[str, Operator]:
    return linear(size) | {
        "downscale then jpeg": JPEG(40) @ Bicubic(2),
        "blur then jpeg": JPEG(40) @ GaussianBlur(1.0, 9),
    }


NAMES, LINEAR = list(compositions(SIZE)), list(linear(SIZE))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [SIZE, (17, 13), (5, 9)])
@pytest.mark.parametrize("name", LINEAR)
def test_adjoint(name: str, size: Size) -> None:
    A = linear(size)[name]
    assert isinstance(A, LinearOperator)
    x = normal(2, 3, *size)
    y = A(x)
    v = normal(*y.shape, seed=1)
    back = A.adjoint(v, size)
    assert back.shape == x.shape
    assert float((y * v).sum()) == pytest.approx(float((x * back).sum()), abs=1e-10 * float(x.norm() * v.norm()))


@pytest.mark.parametrize("name", LINEAR)
def test_prox_is_where_the_gradient_vanishes(name: str) -> None:
    A = linear(SIZE)[name]
    assert isinstance(A, LinearOperator)
    x, y, lam = normal(2, 3, *SIZE), A(normal(2, 3, *SIZE, seed=1)) + 0.1, 0.05
    z = A.prox(x, y, lam)
    gradient = A.adjoint(A(z) - y, SIZE) + lam * (z - x)
    assert gradient.norm() < 1e-4 * A.adjoint(A(x) - y, SIZE).norm()
    again = A(A.pinv(A(x), SIZE))
    assert (again - A(x)).norm() < 0.2 * A(x).norm()


@pytest.mark.parametrize("size", [SIZE, (17, 13)])
@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str, size: Size) -> None:
    A = compositions(size)[name]
    x = normal(2, 3, *size).float().clamp(-1, 1)
    y = A(x)
    assert y.shape[-2:] == tuple(-(-side // A.scale) for side in size)
    assert A.image_size(y) == tuple(side * A.scale for side in y.shape[-2:])
    sigma = torch.tensor([0.0, 0.2]).view(2, 1, 1, 1)
    for image in (
        A.to_image(y, size),
        A.guess(y, 0.1, size),
        A.guess(y, sigma, size),
        A.project(x, y, sigma),
    ):
        assert image.shape == x.shape and bool(image.isfinite().all())
    assert A.add_noise(y, torch.ones_like(y), 0.0).equal(y) and A.unround(y).shape == y.shape
    with torch.no_grad():
        assert A.keep_known(x, y, sigma)[1].equal(x[1])


def test_it_applies_the_first_operator_first() -> None:
    first, second = GaussianBlur(1.0, 9), Bicubic(4)
    x = normal(1, 3, *SIZE)
    assert torch.equal((second @ first)(x), second(first(x)))
    assert (second @ first).scale == 4 and isinstance(second @ first, LinearOperator)
    assert (Bicubic(2) @ AveragePool(3)).scale == 6
    assert not isinstance(JPEG(10) @ first, LinearOperator)


@pytest.mark.parametrize(
    ("A", "align"),
    [
        (Bicubic(4) @ GaussianBlur(), 4),
        (JPEG(10) @ Bicubic(2), 32),
        (Bicubic(3) @ JPEG(10), 48),
        (JPEG(10) @ Bicubic(3) @ Bicubic(2), 96),
    ],
)
def test_tiles_stay_on_the_grid_of_both(A: Operator, align: int) -> None:
    assert A.align == align


def test_a_crop_measures_a_window() -> None:
    A = Inpaint(random_mask((16, 20), 0.5, 0)) @ AveragePool(2)
    x = normal(1, 3, 32, 40)
    window = A.crop(8, 16, 12, 20)
    assert torch.equal(window(x[..., 8:20, 16:36]), A(x)[..., 4:10, 8:18])
    jpeg = JPEG(30) @ AveragePool(2)
    part = jpeg.crop(0, 32, 32, 8)(x.clamp(-1, 1)[..., :32, 32:40])
    assert part.shape[-2:] == (16, 4)


def test_noise_falls_on_the_pixels_that_the_last_mask_observes() -> None:
    mask = random_mask((16, 20), 0.5, 0)
    A = Inpaint(mask) @ Bicubic(2)
    x, z = normal(1, 3, 32, 40).float(), normal(1, 3, 16, 20, seed=1).float()
    y = Problem(A, 0.05).measure(x, z)
    assert bool((y[(mask == 0).expand_as(y)] == 0).all()) and torch.allclose(y - A(x), 0.1 * z * mask, atol=1e-6)
    large = A.observed(y, (32, 40))
    assert large is not None and torch.equal(large[..., ::2, ::2], mask) and large.shape == (1, 1, 32, 40)
    assert (Bicubic(2) @ GaussianBlur()).observed(y) is None


def test_the_guess_behind_jpeg_is_that_of_the_linear_part() -> None:
    x = GaussianBlur(2.0)(normal(1, 3, 64, 64).float()).clamp(-1, 1)
    A = JPEG(60) @ Bicubic(2)
    y = A(x)
    assert torch.equal(A.guess(y, 0.05), Bicubic(2).guess(y, 0.05))
    assert (A(A.project(torch.zeros_like(x), y, 0.0)) - y).norm() < 0.5 * y.norm()


def test_equal_compositions_are_merged_part_by_part() -> None:
    made = [Inpaint(random_mask((16, 20), 0.5, seed)) @ GaussianBlur(width) for seed, width in ((1, 1.0), (2, 2.0))]
    assert made[0].batch_key == made[1].batch_key and made[0].key != made[1].key
    assert (Bicubic(2) @ GaussianBlur()).key == (Bicubic(2) @ GaussianBlur()).key
    x = normal(2, 3, 16, 20).float()
    merged = made[0].merge(made, torch.device("cpu"))
    assert isinstance(merged, Composition)
    alone = torch.cat([A(x[i : i + 1]) for i, A in enumerate(made)])
    assert torch.allclose(merged(x), alone, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_moves(name: str) -> None:
    """`.to` moves the buffers of all parts; what was cached before is made again."""
    A = compositions(SIZE)[name]
    x = normal(2, 3, *SIZE).clamp(-1, 1)
    with torch.inference_mode():
        y, guess = A(x), A.guess(A(x), 0.1, SIZE)
        moved = A.to("cpu").to(torch.float64)
    assert moved is A and all(buffer.dtype != torch.float32 for buffer in A.buffers())
    assert torch.equal(A(x), y) and torch.equal(A.guess(y, 0.1, SIZE), guess)
    (gradient,) = torch.autograd.grad(A(x.requires_grad_()).square().sum(), x)
    assert bool(gradient.isfinite().all())


def test_a_cache_is_dropped_when_the_operator_moves() -> None:
    A, x = KernelBlur(motion_kernel()), normal(1, 3, *SIZE)
    before = A._plan(x)
    assert A._plan(x) is before and A.to(torch.float64)._plan(x) is not before
    for length in range(20, 80):
        A(normal(1, 3, length, 20))
    assert len(A.__dict__["_cache"]) == 32
