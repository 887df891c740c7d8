"""Holes filled with patches from around them."""

import pytest
import torch
from torch import Tensor

from ddc.solvers import patches
from ddc.solvers.patches import distance_to_border, fill_with_patches

SIZE = 96
ROWS, COLUMNS = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
STRIPES = (((ROWS + 2 * COLUMNS) % 12 < 6).float() * 1.6 - 0.8).expand(3, -1, -1)


def square(side: int, size: int = SIZE) -> Tensor:
    hole = torch.zeros(size, size, dtype=torch.bool)
    start = (size - side) // 2
    hole[start : start + side, start : start + side] = True
    return hole


def grey_in(hole: Tensor, x: Tensor) -> Tensor:
    return torch.where(hole, torch.zeros(()), x)


def error(x: Tensor, truth: Tensor, hole: Tensor) -> float:
    return float((x - truth)[:, hole].abs().mean())


@pytest.mark.parametrize("pairs", [patches.MOST_PAIRS, 0])
def test_a_texture_is_continued(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All patches are compared, or the matches of the coarser scale are refined."""
    monkeypatch.setattr(patches, "MOST_PAIRS", pairs)
    hole = square(30)
    filled = fill_with_patches(grey_in(hole, STRIPES), hole)
    assert torch.equal(filled[:, ~hole], STRIPES[:, ~hole])
    assert error(filled, STRIPES, hole) < 0.2 * error(grey_in(hole, STRIPES), STRIPES, hole)
    # sharp: nearly all values are those of stripes
    assert ((filled[:, hole].abs() - 0.8).abs() < 0.1).float().mean() > 0.8


def test_the_first_filling_decides_what_fits() -> None:
    """Left of the hole the picture is bright, and dark on its right; the filling says where one ends."""
    hole = square(40)
    for edge in (36, 60):
        truth = torch.where(edge > COLUMNS, 0.7, -0.7).expand(3, -1, -1)
        blurred = torch.nn.functional.avg_pool2d(truth[None], 9, 1, 4, count_include_pad=False)[0]
        filled = fill_with_patches(torch.where(hole, blurred, truth), hole)
        assert error(filled, truth, hole) < 0.1


def test_what_has_no_hole_or_nothing_else_is_kept() -> None:
    x = torch.rand(3, 40, 40)
    assert torch.equal(fill_with_patches(x, torch.zeros(40, 40, dtype=torch.bool)), x)
    assert torch.equal(fill_with_patches(x, torch.ones(40, 40, dtype=torch.bool)), x)
    narrow = square(34, 40)  # no patch beside it is whole
    assert torch.isfinite(fill_with_patches(x, narrow)).all()
    assert torch.equal(fill_with_patches(x, narrow)[:, ~narrow], x[:, ~narrow])


def test_holes_at_borders_and_of_any_shape() -> None:
    hole = (ROWS - 10) ** 2 + (COLUMNS - 80) ** 2 < 25**2
    hole[60:, 5:30] = True
    filled = fill_with_patches(grey_in(hole, STRIPES), hole)
    assert torch.equal(filled[:, ~hole], STRIPES[:, ~hole]) and filled.abs().max() <= 1
    assert error(filled, STRIPES, hole) < 0.6 * error(grey_in(hole, STRIPES), STRIPES, hole)


def test_only_what_is_near_is_used() -> None:
    hole = torch.zeros(200, 400, dtype=torch.bool)
    hole[80:110, 30:60] = True
    x = torch.rand(3, 200, 400, generator=torch.Generator().manual_seed(0)) * 0.5
    other = x.clone()
    other[..., 200:] = -1
    assert torch.equal(fill_with_patches(x, hole)[:, hole], fill_with_patches(other, hole)[:, hole])


def test_the_number_of_threads_changes_nothing() -> None:
    hole = square(30)
    x = grey_in(hole, STRIPES + 0.05 * torch.randn(STRIPES.shape, generator=torch.Generator().manual_seed(0)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = fill_with_patches(x, hole)
        torch.set_num_threads(2)
        assert torch.equal(fill_with_patches(x, hole), one)
    finally:
        torch.set_num_threads(before)


def test_the_distance_to_the_border() -> None:
    hole = square(5, 9)
    assert distance_to_border(hole)[4].tolist() == [0, 0, 1, 2, 3, 2, 1, 0, 0]
    assert int(distance_to_border(torch.zeros(4, 4, dtype=torch.bool)).max()) == 0
