"""`keep_known` of operators with frequencies: an exact measurement holds in the result."""

import pytest
import torch
from skimage import data
from torch import Tensor

from ddc.images import round_to_8_bit
from ddc.operators.base import SVDOperator
from ddc.operators.blur import GaussianBlur, GaussianBlurs
from ddc.operators.superres import AveragePool, Bicubic

OPERATORS = [Bicubic(4), Bicubic(8), AveragePool(4), GaussianBlur(3.0), GaussianBlur(1.0, 9)]


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


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_an_exact_measurement_holds_afterwards(operator: SVDOperator, truth: Tensor) -> None:
    x, y = guess_of(truth), operator(truth)
    kept = operator.keep_known(x, y, 0.0)
    assert error(operator(kept), y) < 1e-3 * error(operator(x), y)
    assert error(kept, truth) < error(x, truth)
    again = operator.keep_known(kept, y, 0.0)
    assert error(again, kept) < 0.2 * error(kept, x)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
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


def test_blurs_of_a_batch_keep_as_each_alone(truth: Tensor) -> None:
    blurs = [GaussianBlur(3.0), GaussianBlur(1.0)]
    x = guess_of(truth).repeat(2, 1, 1, 1)
    y = torch.cat([blur(truth) for blur in blurs])
    together = GaussianBlurs(blurs).keep_known(x, y, torch.zeros(2, 1, 1, 1))
    alone = torch.cat([blur.keep_known(x[:1], part, 0.0) for blur, part in zip(blurs, y.split(1), strict=True)])
    assert error(together, alone) < 0.02 * error(alone, x)
