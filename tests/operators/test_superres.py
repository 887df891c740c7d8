import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

from ddc.errors import UserError
from ddc.operators.superres import AveragePool, Bicubic


@pytest.mark.parametrize("scale", [2, 3, 4, 8])
def test_bicubic_is_pillow_s_in_the_interior(scale: int) -> None:
    grey = data.astronaut()[: 24 * scale, : 30 * scale].astype(np.float32).mean(-1) / 127.5 - 1
    small = Image.fromarray(grey, mode="F").resize((30, 24), Image.Resampling.BICUBIC)
    ours = Bicubic(scale)(torch.from_numpy(grey)[None, None])[0, 0].numpy()
    difference = np.abs(ours - np.asarray(small))[2:-2, 2:-2]
    assert difference.max() < 1e-4


def test_average_pool_is_the_mean() -> None:
    x = torch.randn(2, 3, 12, 18, dtype=torch.float64)
    assert torch.allclose(AveragePool(3)(x), torch.nn.functional.avg_pool2d(x, 3))


@pytest.mark.parametrize("operator", [Bicubic(4), AveragePool(4)])
def test_a_size_that_is_no_multiple_is_reflected(operator: Bicubic | AveragePool) -> None:
    x = torch.randn(1, 3, 13, 10, dtype=torch.float64)
    whole = torch.cat([x, x.flip(-2)[..., :3, :]], dim=-2)
    whole = torch.cat([whole, whole.flip(-1)[..., :2]], dim=-1)  # 16 × 12
    y = operator(x)
    assert y.shape == (1, 3, 4, 3)
    # away from the far border, where the reflection goes on about another place
    assert torch.allclose(y[..., :2, :1], operator(whole)[..., :2, :1])
    if isinstance(operator, AveragePool):
        assert torch.allclose(y, operator(whole))


@pytest.mark.parametrize("operator", [Bicubic(4), Bicubic(3), AveragePool(2)])
def test_constants_stay(operator: Bicubic | AveragePool) -> None:
    y = operator(torch.full((1, 3, 11, 1), 0.7, dtype=torch.float64))
    assert torch.allclose(y, torch.full_like(y, 0.7))


def test_blocks_of_a_long_side_equal_one_matrix() -> None:
    """1,100 rows need more than one block; a picture of one column shows each of them."""
    operator = Bicubic(2)
    x = torch.randn(1, 1, 1100, 2, dtype=torch.float64)
    y = operator(x)
    s = operator.singular_values((1100, 2), x)
    assert y.shape == (1, 1, 550, 1)
    assert torch.allclose(operator.U(s * operator.Vt(x)), y, atol=1e-10)
    v = torch.randn_like(y)
    assert torch.allclose((y * v).sum(), (x * operator.adjoint(v, (1100, 2))).sum())


def test_to_image_repeats() -> None:
    y = torch.arange(4.0).view(1, 1, 2, 2)
    assert Bicubic(2).to_image(y, (3, 4)).tolist() == [[[[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3]]]]


@pytest.mark.parametrize("scale", [0, 1, -3, 2.5, True])
def test_bad_scales_are_refused(scale: int) -> None:
    for kind in (Bicubic, AveragePool):
        with pytest.raises(UserError, match="whole number of at least 2"):
            kind(scale)


def test_equal_operators_share_their_decomposition() -> None:
    one, other = Bicubic(4), Bicubic(4)
    assert one != other and one.key == other.key
    assert one._factors(12) is other._factors(12)
    assert Bicubic(4).key != AveragePool(4).key
    assert Bicubic(4).align == 4


def test_the_guess_from_means_is_smooth_and_has_these_means() -> None:
    x = torch.from_numpy(data.astronaut()[:96, 120:216]).permute(2, 0, 1)[None] / 127.5 - 1
    operator = AveragePool(4)
    y = operator(x)
    guess, squares = operator.guess(y, 1e-3), operator.to_image(y)
    assert torch.allclose(operator(guess), y, atol=1e-3)
    assert (guess - x).square().mean() < 0.8 * (squares - x).square().mean()
