"""Cut, restore, blend: any picture size in memory that is bounded by the tile.

Every tile is restored by itself, with the same noise field that the whole picture would see, and faded into
its neighbours. Near its border a tile knows less than the whole picture does (a blur has mixed in what lies
outside, and the network sees padding there), so a margin of it is thrown away before fading.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddc.operators.base import LinearOperator, Operator, Size
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
    """How far from its border a tile is not to be trusted: the reach of the operator, measured by an impulse."""
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
        return NETWORK_MARGIN
    scale = side / response.shape[0]
    place = (torch.arange(response.shape[0]) * scale - middle).abs()
    distance = torch.maximum(place[:, None], place[None, :])
    reach = next(r for r in range(side + 1) if float(response[distance > r].sum()) <= 0.01 * total)
    # undoing a blur rings beyond its reach
    rings = isinstance(operator, LinearOperator) and operator.scale == 1
    return max(NETWORK_MARGIN, 2 * reach if rings else reach)


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
