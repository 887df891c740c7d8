import pytest
import torch
from torch import Tensor

from ddc.operators import JPEG, Bicubic, Denoise, GaussianBlur, Inpaint
from ddc.tiling import NETWORK_MARGIN, RAMP, Window, margin_of, plan, restore_by_tiles

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
