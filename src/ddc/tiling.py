"""Cut, restore, blend: any picture size in memory that is bounded by the tile.

Every tile is restored by itself, with the same noise field that the whole picture would see, and faded into
its neighbours. Near its border a tile knows less than the whole picture does (the network sees padding there), so
a margin of it is thrown away before fading. A blur has mixed in what lies outside, of a tile and of a photograph:
a guess of the surroundings takes that out of the measurement first.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.operators.base import LinearOperator, Operator, Size
from ddc.operators.blur import Blur
from ddc.operators.border import see_through
from ddc.problems import Problem

NETWORK_MARGIN = 8  # pixels that padding inside a network is given to fade away
RAMP = 32  # pixels over which one tile fades into the next
SMALLEST_TILE = 64
ENOUGH_PIXELS = 200  # measured ones, to take a mean of


@dataclass(frozen=True)
class Window:
    """A part of the restored picture, in its pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Tile:
    """A window and how much its pixels count: rows × columns, 1 in all where windows overlap."""

    window: Window
    rows: Tensor  # (height,)
    columns: Tensor  # (width,)


def plan(size: Size, tile: int, margin: int, grid: int) -> list[Tile]:
    """Tiles that cover a picture, with their first rows and columns on the operator's `grid`.

    All are `tile` pixels high and wide (the last ones are shifted inwards and may be larger by less than
    one step of the grid), or as large as the picture where that is smaller.
    """
    tile = max(tile // grid, 1) * grid
    vertical, horizontal = (_along(length, tile, margin, grid) for length in size)
    return [
        Tile(Window(top, left, len(rows), len(columns)), rows, columns)
        for top, rows in vertical
        for left, columns in horizontal
    ]


def plan_for(size: Size, operator: Operator, tile: int) -> list[Tile]:
    """The tiles of a picture of that size; 0 never cuts."""
    tile = tile or max(size)
    margin = margin_of(operator, min(tile, *size)) if max(size) > tile else 0
    return plan(size, tile, margin, math.lcm(operator.align, operator.scale))


def _along(length: int, tile: int, margin: int, grid: int) -> list[tuple[int, Tensor]]:
    """The starts along one side, and the weights of each stretch."""
    if length <= tile:
        return [(0, torch.ones(length))]
    margin = min(margin, tile // 4)
    overlap = min(2 * margin + RAMP, tile // 2)
    stride = max((tile - overlap) // grid, 1) * grid
    last = (length - tile) // grid * grid
    starts = [*range(0, last, stride), last]
    ends = [start + tile for start in starts[:-1]] + [length]

    raw = []
    for start, end in zip(starts, ends, strict=True):
        centre = torch.arange(end - start) + 0.5
        inside = torch.full_like(centre, math.inf)  # how far from a border that is not the picture's own
        if start > 0:
            inside = torch.minimum(inside, centre)
        if end < length:
            inside = torch.minimum(inside, end - start - centre)
        ramp = ((inside - margin) / max(overlap - 2 * margin, 1)).clamp(0, 1)
        raw.append(torch.sin(ramp * math.pi / 2) ** 2)
    total = torch.zeros(length)
    for start, weight in zip(starts, raw, strict=True):
        total[start : start + len(weight)] += weight
    return [(start, w / total[start : start + len(w)]) for start, w in zip(starts, raw, strict=True)]


def margin_of(operator: Operator, tile: int) -> int:
    """How far from its border a tile is not to be trusted."""
    reach = reach_of(operator, tile)
    return max(NETWORK_MARGIN, 2 * reach if _rings(operator) else reach)


def surroundings_of(operator: Operator, tile: int) -> int:
    """How far around a tile `own_measurement` looks: until the guess of it is that of the whole picture, which for
    exact measurements of a Gaussian blur takes four times its reach, and for a motion blur eight times."""
    reach = min(8 * reach_of(operator, tile), tile // 2) if _rings(operator) else 0
    return -(-reach // operator.align) * operator.align


def _rings(operator: Operator) -> bool:
    """Whether undoing the operator goes beyond its reach, as it does with a blur."""
    return isinstance(operator, LinearOperator) and operator.scale == 1


def reach_of(operator: Operator, tile: int) -> int:
    """How far a pixel of the picture is seen in the measurement, told by an impulse."""
    side = max(tile // operator.align, 1) * operator.align
    # in the middle of a measured pixel, where the impulse of a coarse operator is seen best
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
    scale = side / response.shape[0]
    place = (torch.arange(response.shape[0]) * scale - middle).abs()
    distance = torch.maximum(place[:, None], place[None, :])
    return next(r for r in range(side + 1) if float(response[distance > r].sum()) <= 0.01 * total)


def widened(window: Window, by: int, size: Size) -> Window:
    """The window and its surroundings in a picture of that size."""
    top, left = max(window.top - by, 0), max(window.left - by, 0)
    bottom, right = (
        min(window.top + window.height + by, size[0]),
        min(window.left + window.width + by, size[1]),
    )
    return Window(top, left, bottom - top, right - left)


def own_measurement(
    y: Tensor, problem: Problem, wide: Window, window: Window, goes_on: bool = False
) -> Tensor:
    """What the operator would have measured of the window alone, from the measurements y of a wider window.

    Of the guess x̃ that y gives, the operator A of the window measures A x̃; what x̃ leaves unexplained of y is
    added as it stands. Away from the border of the window that is y. At the border only what the guess lacks is
    taken wrongly, and of that a blur shows little.

    goes_on: whether the wider window is a part of a world in turn, as a photograph is, and not all there is
    """
    if wide == window and not goes_on:
        return y
    around, inside = (
        problem.operator.crop(part.top, part.left, part.height, part.width) for part in (wide, window)
    )
    top, left = window.top - wide.top, window.left - wide.left

    def cut(image: Tensor) -> Tensor:
        return image[..., top : top + window.height, left : left + window.width]

    with torch.no_grad():
        if goes_on and isinstance(around, Blur):
            reach = reach_of(around, min(wide.height, wide.width))
            guess, explained = see_through(y, around, problem.sigma, 2 * reach)
        else:
            guess = around.wiener(y, problem.sigma)
            explained = around(guess)
        return inside(cut(guess)) + cut(y - explained)


def level(x: Tensor, y: Tensor, problem: Problem) -> Tensor:
    """Restored tiles whose mean colour is that of their measurement, so that neighbours agree.

    The mean of the noise that a run starts from leaks into its brightness, the more so the smaller the tile.
    """
    operator = problem.operator
    with torch.no_grad():
        flat = operator(torch.full_like(x, 0.5))
        observed = operator.observed(y)
        seen = torch.ones_like(y) if observed is None else observed.to(y).expand_as(y)
        if flat.shape != y.shape or not torch.allclose(flat, 0.5 * seen, atol=0.02):
            return x  # the operator changes the brightness of a flat picture
        # near black and white a file has cut the noise off, which shifts its mean
        seen = seen * (y.abs() <= 1 - 3 * problem.sigma + 1e-3)
        count = seen.sum((-2, -1), keepdim=True)
        shift = ((y - operator(x)) * seen).sum((-2, -1), keepdim=True) / count.clamp(min=1)
        return x + torch.where(count >= ENOUGH_PIXELS, shift, 0.0)


def restore_by_tiles(
    tiles: list[Tile],
    size: Size,
    batch: int,
    solve: Callable[[list[Window]], Tensor],
    together: int = 1,
) -> Tensor:
    """Blend what `solve` makes of the windows, (n, B, 3, h, w) for n of one shape, into (B, 3, H, W) on the CPU."""
    out = torch.zeros(batch, 3, *size)
    shapes: dict[Size, list[Tile]] = {}
    for tile in tiles:
        shapes.setdefault((tile.window.height, tile.window.width), []).append(tile)
    for alike in shapes.values():
        for first in range(0, len(alike), together):
            group = alike[first : first + together]
            parts = solve([tile.window for tile in group]).to("cpu", torch.float32)
            for tile, part in zip(group, parts, strict=True):
                top, left, height, width = dataclasses.astuple(tile.window)
                out[..., top : top + height, left : left + width] += part * tile.rows[:, None] * tile.columns
    return out
