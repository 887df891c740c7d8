import pytest
import torch
from skimage import data

from ddc.images import round_to_8_bit, to_internal
from ddc.operators.blur import Blur, GaussianBlur, KernelBlur, motion_kernel
from ddc.operators.border import extrapolate_border, is_reflected

LOPSIDED = torch.tensor([[0.0, 0.1, 0.0, 0.0], [0.0, 0.2, 0.3, 0.0], [0.0, 0.0, 0.2, 0.2]])
BLURS = [GaussianBlur(3.0), GaussianBlur(1.5), KernelBlur(motion_kernel()), KernelBlur(LOPSIDED)]


def world() -> torch.Tensor:
    """(1, 3, 320, 320) in [-1, 1]."""
    return to_internal(torch.from_numpy(data.astronaut()[:320, :320].copy()).permute(2, 0, 1)[None] / 255)


def cut(x: torch.Tensor) -> torch.Tensor:
    return x[..., 40:232, 60:252]


def at_the_border(x: torch.Tensor) -> torch.Tensor:
    inner = torch.zeros(x.shape[-2:], dtype=torch.bool)
    inner[12:-12, 12:-12] = True
    return x[..., ~inner]


@pytest.mark.parametrize("blur", BLURS, ids=["gauss3", "gauss1.5", "motion", "lopsided"])
def test_a_window_of_the_world_is_explained_and_seen_better_than_if_it_were_all_there_is(blur: Blur) -> None:
    x = world()
    y, truth = cut(blur(x)), cut(x)
    guess, explained = extrapolate_border(y, blur, 0.0, margin=16)
    assert float((explained - y).square().mean().sqrt()) < 0.006
    # what the blur would have made of the window alone: closer than what it made of the world
    own = blur(guess) + y - explained
    off, before = (float(at_the_border(one - blur(truth)).square().mean().sqrt()) for one in (own, y))
    assert off < 0.4 * before
    reflecting = blur.guess(y, 0.01)
    assert at_the_border(guess - truth).square().mean() < 0.7 * at_the_border(reflecting - truth).square().mean()


def test_each_image_is_seen_by_itself_with_its_own_noise() -> None:
    blur, y = GaussianBlur(2.0), cut(GaussianBlur(2.0)(world()))
    sigma = torch.tensor([0.0, 0.1]).view(2, 1, 1, 1)
    together = extrapolate_border(torch.cat([y, y.flip(-1)]), blur, sigma, margin=12)
    for index, (one, noise) in enumerate(((y, 0.0), (y.flip(-1), 0.1))):
        alone = extrapolate_border(one, blur, noise, margin=12)
        torch.testing.assert_close(together[0][index : index + 1], alone[0], atol=1e-3, rtol=0)
        torch.testing.assert_close(together[1][index : index + 1], alone[1], atol=1e-3, rtol=0)


def test_a_window_may_be_smaller_than_the_kernel() -> None:
    y = GaussianBlur(3.0, 61)(world())[..., 100:110, 100:117]
    guess, explained = extrapolate_border(y, GaussianBlur(3.0, 61), 0.0, margin=0)
    assert guess.shape == y.shape and float((explained - y).abs().max()) < 0.05


@pytest.mark.parametrize("width", [1.5, 3.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_reflected_border_is_told_from_one_where_the_world_goes_on(width: float, rounded: bool) -> None:
    blur, reach = GaussianBlur(width), round(2.6 * width)
    sigma = 0.0034 if rounded else 0.0  # 8 bits, in [-1, 1] units

    def told(y: torch.Tensor) -> bool:
        return is_reflected(blur.unround(round_to_8_bit(y)) if rounded else y, blur, sigma, reach)

    x = world()
    reflected, goes_on = blur(cut(x)), cut(blur(x))
    assert told(reflected) and not told(goes_on)
    assert not told(torch.cat([reflected, goes_on]))
    small = blur(cut(x)[..., 60:124, 60:124]), cut(blur(x))[..., 60:124, 60:124]
    assert told(small[0]) and not told(small[1])
    assert not is_reflected(reflected, blur, 0.05, reach)  # noise hides it
