"""Restores a picture of any size tile by tile, in memory that is bounded by the tile.

Every tile is restored by itself, with the same noise field that the whole picture would have, and blended into its
neighbours. The network sees padding at the border of a tile, so a margin is discarded before blending. A blur has mixed
in what lies outside of a tile, and of a photograph: a guess of the surroundings removes it from the measurement first.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ddc.operators.base import LinearOperator, Operator, Size
from ddc.operators.blur import Blur
from ddc.operators.border import extrapolate_border
from ddc.problems import Problem

NETWORK_MARGIN = 8  # pixels at the border of a tile that padding inside a network affects
RAMP = 32  # pixels over which one tile is blended into the next
SMALLEST_TILE = 64  # pixels
ENOUGH_PIXELS = 200  # measured pixels that a mean needs


class Window(NamedTuple):
    """A part of the restored picture, in its pixels."""

    top: int
    left: int
    height: int
    width: int


class Tile(NamedTuple):
    """A window and the weights of its pixels, rows × columns, which sum to 1 where windows overlap."""

    window: Window
    rows: Tensor  # (height,)
    columns: Tensor  # (width,)


def plan_for(size: Size, operator: Operator, tile: int) -> list[Tile]:
    """Returns the tiles of a picture of that size; with `tile` 0, one."""
    tile = tile or max(size)
    margin = margin_of(operator, min(tile, *size)) if max(size) > tile else 0
    return plan(size, tile, margin, math.lcm(operator.align, operator.scale))


def plan(size: Size, tile: int, margin: int, grid: int) -> list[Tile]:
    """Returns tiles that cover a picture, with their first rows and columns on the operator's `grid`.

    All are `tile` pixels high and wide (the last ones are shifted inwards and may be larger by less than one step of
    the grid), or as large as the picture if that is smaller.
    """
    tile = max(tile // grid, 1) * grid
    vertical, horizontal = (_along(length, tile, margin, grid) for length in size)
    return [
        Tile(Window(top, left, len(rows), len(columns)), rows, columns)
        for top, rows in vertical
        for left, columns in horizontal
    ]


def _along(length: int, tile: int, margin: int, grid: int) -> list[tuple[int, Tensor]]:
    """Returns the starts of the tiles along one side, and their weights."""
    if length <= tile:
        return [(0, torch.ones(length))]
    margin = min(margin, tile // 4)
    overlap = min(2 * margin + RAMP, tile // 2)
    stride = max((tile - overlap) // grid, 1) * grid
    last = (length - tile) // grid * grid
    total, parts = torch.zeros(length), []
    for start in (*range(0, last, stride), last):
        end = start + tile if start < last else length
        centre = torch.arange(end - start) + 0.5
        inside = torch.full_like(centre, math.inf)  # distance to the borders that are not the picture's own
        if start > 0:
            inside = torch.minimum(inside, centre)
        if end < length:
            inside = torch.minimum(inside, end - start - centre)
        ramp = ((inside - margin) / max(overlap - 2 * margin, 1)).clamp(0, 1)
        weight = torch.sin(ramp * math.pi / 2) ** 2
        total[start:end] += weight
        parts.append((start, weight))
    return [(start, weight / total[start : start + len(weight)]) for start, weight in parts]


def margin_of(operator: Operator, tile: int) -> int:
    """Returns how many pixels at the border of a tile are discarded."""
    reach = reach_of(operator, tile)
    return max(NETWORK_MARGIN, 2 * reach if _rings(operator) else reach)


def surroundings_of(operator: Operator, tile: int) -> int:
    """Returns how many pixels around a tile `own_measurement` uses: enough for the guess that the whole picture gives.
    Exact measurements of a Gaussian blur need four times its reach, and those of a motion blur eight times."""
    reach = min(8 * reach_of(operator, tile), tile // 2) if _rings(operator) else 0
    return -(-reach // operator.align) * operator.align


def _rings(operator: Operator) -> bool:
    """Returns whether the inverse of the operator reaches further than the operator, as that of a blur does."""
    return isinstance(operator, LinearOperator) and operator.scale == 1


def reach_of(operator: Operator, tile: int) -> int:
    """Returns how far a pixel of the picture spreads in the measurement, from the response to an impulse."""
    side = max(tile // operator.align, 1) * operator.align
    # in the middle of a measured pixel, where a coarse operator responds most
    middle = side // 2 // operator.scale * operator.scale
    window = operator.crop(0, 0, side, side)
    flat = torch.zeros(1, 3, side, side)
    impulse = flat.clone()
    impulse[..., middle, middle] = 1.0
    with torch.inference_mode():
        response = (window(impulse) - window(flat)).abs().sum((0, 1))  # (h, w)
    total = float(response.sum())
    if total <= 0:
        return 0
    place = (torch.arange(response.shape[0]) * (side / response.shape[0]) - middle).abs()
    distance = torch.maximum(place[:, None], place[None, :])
    return next(r for r in range(side + 1) if float(response[distance > r].sum()) <= 0.01 * total)


def widened(window: Window, by: int, size: Size) -> Window:
    """Returns the window and its surroundings, inside a picture of that size."""
    top, left = max(window.top - by, 0), max(window.left - by, 0)
    bottom, right = min(window.top + window.height + by, size[0]), min(window.left + window.width + by, size[1])
    return Window(top, left, bottom - top, right - left)


def own_measurement(y: Tensor, problem: Problem, wide: Window, window: Window, continues: bool = False) -> Tensor:
    """Returns what the operator would have measured of the window alone, from the measurements y of a wider window.

    y gives a guess x̃ of the wider window. The operator A of the window measures A x̃, and the part of y that x̃ does not
    explain is added. Away from the border of the window the result is y. At the border only the error of the guess
    matters, of which a blur shows little.

    continues: whether the scene continues beyond the wider window, as it does in a photograph
    """
    if wide == window and not continues:
        return y
    around, inside = problem.operator.crop(*wide), problem.operator.crop(*window)
    top, left = window.top - wide.top, window.left - wide.left

    def cut(image: Tensor) -> Tensor:
        return image[..., top : top + window.height, left : left + window.width]

    with torch.no_grad():
        if continues and isinstance(around, Blur):
            reach = reach_of(around, min(wide.height, wide.width))
            guess, explained = extrapolate_border(y, around, problem.sigma, 2 * reach)
        else:
            guess = around.guess(y, problem.sigma)
            explained = around(guess)
        return inside(cut(guess)) + cut(y - explained)


def match_mean(x: Tensor, y: Tensor, problem: Problem) -> Tensor:
    """Returns restored tiles with the mean colour of their measurement, so that neighbours agree. The mean of the noise
    that a run starts from changes the brightness, more so for small tiles."""
    operator = problem.operator
    with torch.no_grad():
        flat = operator(torch.full_like(x, 0.5))
        observed = operator.observed(y)
        seen = torch.ones_like(y) if observed is None else observed.to(y).expand_as(y)
        if flat.shape != y.shape:
            return x  # another number of channels
        even = ((flat - 0.5 * seen).abs() <= 0.02).all()  # else the operator changes the brightness of a flat picture
        # near black and white a file has clipped the noise, which shifts its mean
        seen = seen * (y.abs() <= 1 - 3 * problem.sigma + 1e-3)
        count = seen.sum((-2, -1), keepdim=True)
        shift = ((y - operator(x)) * seen).sum((-2, -1), keepdim=True) / count.clamp(min=1)
        return x + torch.where(even & (count >= ENOUGH_PIXELS), shift, 0.0)


def restore_by_tiles(
    tiles: list[Tile], size: Size, batch: int, solve: Callable[[list[Window]], Tensor], together: int = 1
) -> Tensor:
    """Returns (B, 3, H, W) on the CPU, blended from the tiles. `solve` returns (n, B, 3, h, w) for n windows of one
    shape, at most `together`."""
    out = torch.zeros(batch, 3, *size)
    shapes: dict[Size, list[Tile]] = {}
    for tile in tiles:
        shapes.setdefault(tile.window[2:], []).append(tile)
    for alike in shapes.values():
        for first in range(0, len(alike), together):
            group = alike[first : first + together]
            parts = solve([tile.window for tile in group]).to("cpu", torch.float32)
            for ((top, left, height, width), rows, columns), part in zip(group, parts, strict=True):
                out[..., top : top + height, left : left + width] += part * rows[:, None] * columns
    return out
