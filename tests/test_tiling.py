from pathlib import Path

import pytest
import torch
from skimage import data
from torch import Tensor

from ddc.images import to_internal, to_unit
from ddc.operators import JPEG, Bicubic, Denoise, GaussianBlur, Inpaint, KernelBlur
from ddc.operators.blur import motion_kernel
from ddc.pipeline import RestorationPipeline
from ddc.problems import Problem, make_problem
from ddc.tiling import (
    NETWORK_MARGIN,
    RAMP,
    Window,
    margin_of,
    match_mean,
    own_measurement,
    plan,
    restore_by_tiles,
    surroundings_of,
    widened,
)

SIZES = [(256, 256), (257, 512), (300, 1000), (512, 64), (1, 700), (77, 83), (449, 448)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grid", [1, 3, 4, 16])
@pytest.mark.parametrize("tile", [64, 256])
def test_weights_are_one_everywhere_and_tiles_are_full(size: tuple[int, int], grid: int, tile: int) -> None:
    total = torch.zeros(size)
    for one in plan(size, tile, margin=8, grid=grid):
        window = one.window
        assert window.top % grid == 0 and window.left % grid == 0
        for length, side in zip(size, (window.height, window.width), strict=True):
            step = tile // grid * grid
            assert side == length if length <= step else step <= side < step + grid
        rows = slice(window.top, window.top + window.height)
        total[rows, window.left : window.left + window.width] += one.rows[:, None] * one.columns
    assert torch.allclose(total, torch.ones(size), atol=1e-6)


def test_inner_borders_of_a_tile_count_nothing_within_the_margin() -> None:
    first, second = (tile.rows for tile in plan((400, 100), 256, margin=20, grid=1))
    assert not first[-20:].any() and not second[:20].any()
    assert first[:100].eq(1).all() and second[-100:].eq(1).all()  # the picture's own borders count fully


def test_neighbours_fade_slowly() -> None:
    rows = plan((400, 100), 256, margin=8, grid=1)[0].rows
    assert rows.diff().abs().max() < 2 / RAMP


def test_a_small_picture_is_one_tile() -> None:
    (only,) = plan((100, 256), 256, margin=8, grid=4)
    assert only.window == Window(0, 0, 100, 256)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("together", [1, 3])
def test_blending_copies_gives_the_picture(size: tuple[int, int], together: int) -> None:
    picture = torch.rand(2, 3, *size)

    def cut(windows: list[Window]) -> Tensor:
        assert len(windows) <= together
        return torch.stack([picture[..., w.top : w.top + w.height, w.left : w.left + w.width] for w in windows])

    blended = restore_by_tiles(plan(size, 64, margin=8, grid=16), size, 2, cut, together)
    assert torch.allclose(blended, picture, atol=1e-5)


def test_a_difference_between_tiles_leaves_no_step() -> None:
    size = (300, 300)
    values = iter(range(100))

    def flat(windows: list[Window]) -> Tensor:
        return torch.full((1, 1, 3, windows[0].height, windows[0].width), float(next(values) % 2))

    blended = restore_by_tiles(plan(size, 128, margin=8, grid=1), size, 1, flat)
    steps = torch.cat([blended.diff(dim=-1).flatten(), blended.diff(dim=-2).flatten()])
    assert blended.max() > 0.99 and steps.abs().max() < 2 / RAMP


def test_margins_follow_the_operator() -> None:
    assert margin_of(Denoise(), 256) == NETWORK_MARGIN
    assert margin_of(Bicubic(4), 256) == 8
    assert margin_of(Bicubic(8), 256) >= 12
    assert margin_of(JPEG(10), 256) <= 16
    assert 14 <= margin_of(GaussianBlur(3.0), 256) < margin_of(GaussianBlur(6.0, 61), 256)
    assert margin_of(Inpaint(torch.zeros(1, 1, 256, 256)), 256) == NETWORK_MARGIN


def test_only_a_blur_makes_a_tile_look_around() -> None:
    for operator in (Denoise(), Bicubic(4), JPEG(10), Inpaint(torch.ones(1, 1, 256, 256))):
        assert surroundings_of(operator, 256) == 0
    gaussian = GaussianBlur(3.0)
    assert surroundings_of(gaussian, 256) == 4 * margin_of(gaussian, 256)
    assert surroundings_of(gaussian, 64) == 32  # memory stays that of the tile
    assert surroundings_of(KernelBlur(motion_kernel()), 256) > 15


def test_surroundings_end_where_the_picture_does() -> None:
    assert widened(Window(100, 50, 64, 64), 20, (300, 400)) == Window(80, 30, 104, 104)
    assert widened(Window(0, 10, 64, 64), 20, (70, 80)) == Window(0, 0, 70, 80)


def photograph() -> Tensor:
    """(1, 3, 320, 320) in [-1, 1]."""
    pixels = torch.from_numpy(data.astronaut()[:320, :320].copy()).permute(2, 0, 1)
    return to_internal(pixels[None].float() / 255)


def psnr(x: Tensor, truth: Tensor) -> float:
    """Of images in [-1, 1]."""
    return float(-10 * ((x - truth) / 2).square().mean().log10())


@pytest.mark.parametrize(
    ("blur", "sigma", "loss", "gain"),
    [
        (GaussianBlur(3.0), 0.0, 0.02, 10),
        (GaussianBlur(3.0), 0.02, 0.02, -0.02),
        (KernelBlur(motion_kernel()), 0.0, 0.6, 0.8),
        (KernelBlur(motion_kernel()), 0.02, 0.1, 0),
    ],
)
def test_a_tile_is_guessed_as_the_whole_is(
    blur: GaussianBlur | KernelBlur, sigma: float, loss: float, gain: float
) -> None:
    """A guess of an exact measurement takes what was blurred into the tile's border for detail, unless that is
    taken out."""
    x, window = photograph(), Window(96, 96, 128, 128)
    problem = Problem(blur, sigma)
    y = problem.measure(x, torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    wide = widened(window, surroundings_of(blur, 128), (320, 320))
    around = y[..., wide.top : wide.top + wide.height, wide.left : wide.left + wide.width]
    own = own_measurement(around, problem, wide, window)
    assert torch.allclose(own[..., 32:96, 32:96], y[..., 128:192, 128:192], atol=1e-5)

    def quality(guess: Tensor) -> float:
        margin = margin_of(blur, 128)
        inner = slice(margin, 128 - margin)
        return psnr(guess[..., inner, inner], x[..., 96:224, 96:224][..., inner, inner])

    whole = quality(blur.guess(y, problem.sigma)[..., 96:224, 96:224])
    alone = quality(blur.guess(own, problem.sigma))
    naive = quality(blur.guess(y[..., 96:224, 96:224], problem.sigma))
    assert alone > whole - loss and alone > naive + gain


def test_tiles_of_an_exact_blur_give_the_picture_that_the_whole_gives(tiny_model: Path) -> None:
    x = photograph()
    y = to_unit(GaussianBlur(3.0)(x))
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    whole, tiled = (
        to_internal(pipe(y, "gauss", solver="pinv:cutoff=0.03", tile=tile).picture.tensor) for tile in (0, 160)
    )
    assert abs(psnr(tiled, x[0]) - psnr(whole, x[0])) < 0.02 and psnr(tiled, whole) > 45


@pytest.mark.parametrize("task", ["gauss", "motion"])
def test_blurred_tiles_of_several_pictures_at_once(tiny_model: Path, task: str) -> None:
    y = to_unit(make_problem(task).operator(photograph())[0, :, :128, :100])
    rounded = (255 * y.flip(-1)).round() / 255  # told another noise level than an exact one
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    together = pipe([y, rounded], task, names=["a", "b"], steps=2, tile=64, batch=8).pictures
    for name, picture, joined in zip("ab", (y, rounded), together, strict=True):
        alone = pipe(picture, task, names=[name], steps=2, tile=64, batch=1).picture
        assert (joined.tensor - alone.tensor).abs().max() < 1e-3


@pytest.mark.parametrize("task", ["sr4", "gauss", "jpeg50", "denoise", "inpaint92", "colorize"])
@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_tiles_get_the_brightness_of_their_measurement(task: str, sigma: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 0.5 * (2 * torch.rand(2, 3, 8, 8, generator=generator) - 1)
    x = torch.nn.functional.interpolate(x, 64, mode="bilinear")
    problem = make_problem(task, sigma, (64, 64), [0, 1])
    y = problem.operator(x)
    y = problem.operator.add_noise(y, torch.randn(y.shape, generator=generator), problem.sigma)
    offset = torch.tensor([0.05, -0.1, 0.04]).view(1, 3, 1, 1)
    if task == "colorize":  # which measures one channel
        offset = torch.full((1, 3, 1, 1), 0.05)
    remaining = (match_mean(x + offset, y, problem) - x).mean((-2, -1))
    assert remaining.abs().max() < 0.02


def test_brightness_is_left_alone_where_it_cannot_be_known() -> None:
    class Half(Denoise):
        def __call__(self, x: Tensor) -> Tensor:
            return 0.5 * x

    x, y = torch.full((1, 3, 32, 32), 0.2), torch.zeros(1, 3, 32, 32)
    assert torch.equal(match_mean(x, y, Problem(Half())), x)
    assert torch.equal(match_mean(x, y + 1, Problem(Denoise(), 0.05)), x)  # all white: the noise is cut off
    assert torch.equal(match_mean(x, y, Problem(Inpaint(torch.zeros(1, 1, 32, 32)))), x)
    assert torch.allclose(match_mean(x, y, Problem(Denoise())), y, atol=1e-6)
