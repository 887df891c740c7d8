import pytest
import torch
from torch import Tensor

from ddc.operators import JPEG, Bicubic, Denoise, GaussianBlur, Inpaint
from ddc.problems import Problem, make_problem
from ddc.tiling import NETWORK_MARGIN, RAMP, Window, level, margin_of, plan, restore_by_tiles

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
        return torch.stack(
            [picture[..., w.top : w.top + w.height, w.left : w.left + w.width] for w in windows]
        )

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
    remaining = (level(x + offset, y, problem) - x).mean((-2, -1))
    assert remaining.abs().max() < 0.02


def test_brightness_is_left_alone_where_it_cannot_be_known() -> None:
    class Half(Denoise):
        def __call__(self, x: Tensor) -> Tensor:
            return 0.5 * x

    x, y = torch.full((1, 3, 32, 32), 0.2), torch.zeros(1, 3, 32, 32)
    assert torch.equal(level(x, y, Problem(Half())), x)
    assert torch.equal(level(x, y + 1, Problem(Denoise(), 0.05)), x)  # all white: the noise is cut off
    assert torch.equal(level(x, y, Problem(Inpaint(torch.zeros(1, 1, 32, 32)))), x)
    assert torch.allclose(level(x, y, Problem(Denoise())), y, atol=1e-6)
