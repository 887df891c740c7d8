"""`keep_known` of linear operators: an exact measurement holds in the result."""

import pytest
import torch
from skimage import data
from torch import Tensor

from ddc.images import round_to_8_bit
from ddc.operators.base import LinearOperator, Operator, SVDOperator
from ddc.operators.blur import SMALLEST_POWER, GaussianBlur, GaussianBlurs, KernelBlur, disc_kernel, motion_kernel
from ddc.operators.colorize import Colorize
from ddc.operators.fourier import MaskedFourier, cartesian_mask
from ddc.operators.inpaint import Denoise, Inpaint, random_mask
from ddc.operators.superres import AveragePool, Bicubic

SIZE = (64, 64)
BY_FREQUENCY = [Bicubic(4), Bicubic(8), AveragePool(4), GaussianBlur(3.0), GaussianBlur(1.0, 9)]
OTHERS: dict[str, LinearOperator] = {
    "motion": KernelBlur(motion_kernel(15, 45)),
    "disc": KernelBlur(disc_kernel(3)),
    "kernels": KernelBlur(torch.stack([motion_kernel(7, 10), motion_kernel(7, 80)]).unsqueeze(1)),
    "downscale after motion": Bicubic(2) @ KernelBlur(motion_kernel(9, 20)),  # type: ignore[dict-item]
    "mask after blur": Inpaint(random_mask(SIZE, 0.4, [1])) @ GaussianBlur(1.0, 9),  # type: ignore[dict-item]
    "colorize": Colorize(),
    "denoise": Denoise(),
    "mri": MaskedFourier(cartesian_mask(SIZE, 3, [1])),
}


@pytest.fixture(scope="module")
def truth() -> Tensor:
    picture = torch.from_numpy(data.astronaut()[64:192, 160:288].copy()).permute(2, 0, 1)
    return (picture.float() / 127.5 - 1)[None]


def guess_of(truth: Tensor) -> Tensor:
    """A restored picture: smoother than the truth and off by a little."""
    blurred = GaussianBlur(1.5, 13)(truth)
    return blurred + 0.02 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))


def error(x: Tensor, truth: Tensor) -> float:
    return float((x - truth).square().mean().sqrt())


@pytest.mark.parametrize("operator", BY_FREQUENCY, ids=str)
def test_an_exact_measurement_holds_afterwards(operator: SVDOperator, truth: Tensor) -> None:
    x, y = guess_of(truth), operator(truth)
    kept = operator.keep_known(x, y, 0.0)
    assert error(operator(kept), y) < 1e-3 * error(operator(x), y)
    assert error(kept, truth) < error(x, truth)
    again = operator.keep_known(kept, y, 0.0)
    assert error(again, kept) < 0.2 * error(kept, x)


@pytest.mark.parametrize("operator", BY_FREQUENCY, ids=str)
def test_noise_leaves_the_picture_alone(operator: SVDOperator, truth: Tensor) -> None:
    x, y = guess_of(truth).repeat(2, 1, 1, 1), operator(truth).repeat(2, 1, 1, 1)
    assert torch.equal(operator.keep_known(x, y, 0.1), x)
    mixed = operator.keep_known(x, y, torch.tensor([0.0, 0.1]).view(-1, 1, 1, 1))
    assert torch.equal(mixed[1], x[1])
    assert torch.allclose(mixed[:1], operator.keep_known(x[:1], y[:1], 0.0), atol=1e-5)


@pytest.mark.parametrize("operator", [GaussianBlur(3.0), GaussianBlur(1.0, 9)], ids=str)
def test_a_measurement_less_exact_than_said_is_left_to_the_network(operator: SVDOperator, truth: Tensor) -> None:
    """A blur's inverse would turn the rounding to 8 bits into large waves."""
    x, y = guess_of(truth), round_to_8_bit(operator(truth))
    assert error(operator.keep_known(x, y, 0.0), x) < 0.05 * error(x, truth)


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_an_exact_measurement_of_any_linear_operator_is_put_back(name: str, truth: Tensor) -> None:
    truth = truth[..., 32:96, 32:96]
    A, both = OTHERS[name], torch.cat([truth, truth.flip(-1)])
    x, y = guess_of(both), A(both)
    kept = A.keep_known(x, y, 0.0)
    assert kept.dtype == x.dtype
    assert error(A(kept), y) < 0.2 * error(A(x), y)
    assert error(kept, both) < (0.9 if "downscale" in name else 0.75) * error(x, both) or name in ("colorize", "mri")
    assert error(kept, both) < error(x, both)
    sigma = torch.tensor([0.0, 0.1]).view(-1, 1, 1, 1)
    mixed = A.keep_known(x, y, sigma)
    assert torch.allclose(mixed[:1], kept[:1], atol=1e-4) and torch.equal(mixed[1], x[1])
    assert torch.equal(A.keep_known(x, y, 0.1), x)


@pytest.mark.parametrize("name", ["motion", "disc", "kernels"])
@torch.no_grad()
def test_more_iterations_follow_where_y_is_exact(name: str, truth: Tensor) -> None:
    both = torch.cat([truth, truth.flip(-1)])[..., 32:96, 32:96]
    x, y = guess_of(both), OTHERS[name](both)
    fewer = KernelBlur(OTHERS[name].kernel)  # type: ignore[arg-type]
    fewer.exact_iterations = 0
    most, least = (error(A.keep_known(x, y, 0.0), both) for A in (OTHERS[name], fewer))
    assert most < 0.85 * least < 0.85 * error(x, both)
    # with a little noise that was not stated they stop in time
    y = y + 1e-3 * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    most, least = (error(A.keep_known(x, y, 0.0), both) for A in (OTHERS[name], fewer))
    assert most < 1.1 * least < 1.1 * error(x, both)


@torch.no_grad()
def test_the_preconditioner_inverts_a_periodic_blur(truth: Tensor) -> None:
    A = KernelBlur(motion_kernel(5, 30))
    near_inverse = A.preconditioner((128, 128), truth)
    assert near_inverse is not None
    spectrum = torch.fft.rfft2(A.kernel, s=(128, 128)).abs() ** 2
    back = torch.fft.irfft2(torch.fft.rfft2(near_inverse(truth)) * (spectrum + SMALLEST_POWER), s=(128, 128))
    assert torch.allclose(back, truth, atol=1e-5)
    assert KernelBlur(torch.ones(9, 9)).preconditioner((8, 8), truth) is None  # a kernel larger than the picture


@pytest.mark.parametrize("name", ["motion", "disc", "mask after blur"])
@torch.no_grad()
def test_noise_that_was_not_stated_is_not_amplified(name: str, truth: Tensor) -> None:
    truth = truth[..., 32:96, 32:96]
    A, x = OTHERS[name], guess_of(truth)
    y = A(truth)
    y = A.add_noise(y, torch.randn(y.shape, generator=torch.Generator().manual_seed(1)), 0.02)
    assert error(A.keep_known(x, y, 0.0), truth) < 1.02 * error(x, truth)
    amplified = A.pinv(y - A(x), SIZE)  # what the same iterations do without that care
    assert error(x + amplified, truth) > 2 * error(x, truth)


def test_training_leaves_conjugate_gradients_out(truth: Tensor) -> None:
    A, x = OTHERS["motion"], guess_of(truth)
    assert torch.is_grad_enabled() and A.keep_known(x, A(truth), 0.0) is x


def test_other_operators_know_nothing_exactly(truth: Tensor) -> None:
    class Halved(Operator):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs() / 2

    assert Halved().keep_known(truth, truth, 0.0) is truth


def test_blurs_of_a_batch_keep_as_each_alone(truth: Tensor) -> None:
    blurs = [GaussianBlur(3.0), GaussianBlur(1.0)]
    x = guess_of(truth).repeat(2, 1, 1, 1)
    y = torch.cat([blur(truth) for blur in blurs])
    together = GaussianBlurs(blurs).keep_known(x, y, torch.zeros(2, 1, 1, 1))
    alone = torch.cat([blur.keep_known(x[:1], part, 0.0) for blur, part in zip(blurs, y.split(1), strict=True)])
    assert error(together, alone) < 0.02 * error(alone, x)
