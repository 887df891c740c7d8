import io

import numpy as np
import pytest
import torch
from PIL import Image, features
from skimage import data

from ddc.errors import UserError
from ddc.operators.jpeg import JPEG, LUMA, quantisation

BARS = {10: 42.0, 50: 45.0, 90: 48.0}


def with_pillow(picture: np.ndarray, quality: int) -> np.ndarray:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream).convert("RGB")).astype(np.float64)


def with_ours(picture: np.ndarray, quality: int) -> np.ndarray:
    x = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 127.5 - 1
    return ((JPEG(quality)(x)[0].permute(1, 2, 0).double() + 1) * 127.5).numpy()


@pytest.mark.parametrize("quality", BARS)
@pytest.mark.parametrize("name", ["astronaut", "coffee", "chelsea", "rocket"])
@pytest.mark.parametrize("size", [(256, 256), (201, 187)])
def test_against_pillow(name: str, quality: int, size: tuple[int, int]) -> None:
    picture = np.ascontiguousarray(getattr(data, name)()[: size[0], : size[1]])
    difference = with_pillow(picture, quality) - with_ours(picture, quality)
    assert 10 * np.log10(255**2 / max(np.mean(difference**2), 1e-9)) > BARS[quality]
    if features.check("libjpeg_turbo"):  # another library may use another DCT
        assert np.mean(np.abs(difference) > 0.5) < 1e-3


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 4), (4, 5), (7, 6), (9, 17), (33, 18), (1, 40), (16, 1)])
def test_small_pictures_and_borders(size: tuple[int, int]) -> None:
    picture = np.ascontiguousarray(data.astronaut()[60 : 60 + size[0], 200 : 200 + size[1]])
    for quality in BARS:
        assert np.abs(with_pillow(picture, quality) - with_ours(picture, quality)).max() <= 4


@pytest.mark.skipif(not features.check("libjpeg_turbo"), reason="another library may use another DCT")
def test_noise_at_any_quality_is_equal_to_pillow() -> None:
    rng = np.random.default_rng(0)
    for quality in (1, 3, 25, 49, 51, 75, 97, 100):
        picture = rng.integers(0, 256, (*rng.integers(3, 60, 2), 3), dtype=np.uint8)
        assert np.abs(with_pillow(picture, quality) - with_ours(picture, quality)).max() < 0.5


def test_levels_are_of_8_bits() -> None:
    levels = with_ours(data.coffee()[:40, :50].copy(), 30)
    assert np.abs(levels - np.round(levels)).max() < 1e-3
    assert levels.min() >= 0 and levels.max() <= 255


def test_gradient_is_straight_through() -> None:
    x = torch.from_numpy(data.coffee()[:37, :45].copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    x = (0.9 * x).requires_grad_()
    y = JPEG(10)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert bool(gradient.isfinite().all())
    assert float((gradient != 0).float().mean()) > 0.99
    # all pixels brighter by one level is a picture brighter by one level
    assert float(gradient.mean()) == pytest.approx(1, abs=0.05)


def test_a_better_quality_is_nearer() -> None:
    picture = data.chelsea()[:64, :64].copy()
    errors = [np.mean((with_ours(picture, quality) - picture) ** 2) for quality in (1, 10, 50, 90, 100)]
    assert errors == sorted(errors, reverse=True)


def test_tables_follow_the_quality() -> None:
    assert int(quantisation(LUMA)[50][0, 0]) == 16 and int(quantisation(LUMA)[50][7, 7]) == 99
    assert int(quantisation(LUMA)[10][0, 0]) == 80 and int(quantisation(LUMA)[1].max()) == 255
    assert bool((quantisation(LUMA)[100] == 1).all())


@pytest.mark.parametrize("quality", [0, 101, -5, 10.0, True, "10"])
def test_bad_qualities_are_refused(quality: int) -> None:
    with pytest.raises(UserError, match="from 1 to 100"):
        JPEG(quality)


def test_channels_are_checked() -> None:
    with pytest.raises(UserError, match="3 channels"):
        JPEG(10)(torch.zeros(1, 1, 8, 8))


def test_pictures_without_a_whole_block_are_left_alone() -> None:
    x = torch.rand(1, 3, 7, 20, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert torch.equal(JPEG(20).keep_known(x, JPEG(20)(x), 0.0), x)


@pytest.mark.parametrize("quality", [10, 50, 90, 97])
@pytest.mark.parametrize("size", [(64, 64), (37, 51)])
def test_what_compression_tells_exactly_is_kept(quality: int, size: tuple[int, int]) -> None:
    picture = torch.from_numpy(data.astronaut()[100 : 100 + size[0], 150 : 150 + size[1]].copy())
    truth = (picture.permute(2, 0, 1)[None].float() / 127.5 - 1).repeat(2, 1, 1, 1)
    operator = JPEG(torch.tensor([quality, quality]))
    y = operator(truth)
    assert (operator.keep_known(truth, y, 0.0) - truth).abs().max() < 0.02  # the truth is hardly ever ruled out
    guess = truth + 0.1 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(0))
    kept = operator.keep_known(guess, y, 0.0)
    share = float((kept - truth).square().mean() / (guess - truth).square().mean())
    assert share < (0.85 if quality >= 90 else 1.0)  # wide cells rule little out
    assert (operator.keep_known(kept, y, 0.0) - kept).abs().max() < 1e-4
    noisy = operator.keep_known(guess, y, torch.tensor([0.0, 0.1]).view(-1, 1, 1, 1))
    assert torch.equal(noisy[1], guess[1]) and torch.allclose(noisy[0], kept[0])
