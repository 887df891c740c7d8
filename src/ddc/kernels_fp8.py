"""3×3 convolutions in FP8 (e4m3) on a GPU of compute capability 9.0, with all that stands around them: Triton kernels.

`normalise` writes its result in 8 bits, with a border of zeros around each picture. In this layout the pixel that a tap of the
kernel needs is a fixed number of rows further on in the matrix (pixels × channels), across the border as well. So a
convolution is one matrix product whose left matrix is read nine times, shifted. `convolve` adds the bias and a residual to the
sums while they are in registers, and sums over channels for the next normalisation. Its results are in half precision.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from ddc.kernels import (
    MOST_PARTS,
    PROGRAMS,
    TILE,
    UNSPECIALISED,
    WARPS,
    _coefficients,
    _columns,
    _group_sums,
    _row,
    _sums,
    packed,
)

LARGEST = 448.0  # of e4m3
HEADROOM = 8.0  # of an input over the largest one that was seen; 8 bits lose nothing by it, having an exponent
DEEP = 128  # input channels of a tile; the weights have a multiple of it
ENOUGH = 100  # tiles, for the 132 multiprocessors of an H200; with fewer of them, smaller ones are faster
MANY = 600  # tiles; with more of them two share a multiprocessor, which leaves memory for three stages each
# pixels, output channels and input channels of a tile, warps, and stages of its pipeline, as measured on an H200
TALL_TILE, LARGE_TILE, LONE_TILE = (256, 128, DEEP, 8, 4), (128, 128, DEEP, 4, 3), (128, 128, DEEP, 4, 4)
MIDDLE_TILE, SMALL_TILE = (128, 64, DEEP, 4, 4), (64, 64, 2 * DEEP, 4, 3)
SAME, DOUBLED, HALVED = 0, 1, 2  # the size of a normalised picture


class Padded(NamedTuple):
    """Pictures in 8 bits with a border of zeros (B, H + 2, W + 2, C): scale · x, which is 448 at most."""

    values: Tensor
    scale: float


class Weights(nn.Module):
    """The weights of a 3×3 convolution in 8 bits, with a factor for each output channel."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        weight = conv.weight.detach().float()
        factor = weight.abs().amax((1, 2, 3)).clamp(min=1e-12) / LARGEST
        taps = (weight / factor.view(-1, 1, 1, 1)).permute(0, 2, 3, 1)  # (out, 3, 3, in)
        taps = nn.functional.pad(taps, (0, -conv.in_channels % DEEP))
        self.values: Tensor
        self.factor: Tensor
        self.register_buffer("values", taps.flatten(1).to(torch.float8_e4m3fn).contiguous())
        self.register_buffer("factor", factor)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "height", "width"])
def _normalise_padded(
    x, sums, bias, weight, offset, modulation, y, height, width, channels, parts, part, eps, bias_row, modulation_row,
    scale, SILU: tl.constexpr, WIDTH: tl.constexpr, TAKEN: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """As `kernels._normalise`, for a part of the pixels of y, whose height and width are given without its border."""
    image = tl.num_programs(2) - 1 - tl.program_id(2)
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * part
    i = tl.arange(0, COLS)
    c = tl.program_id(0) * TAKEN + i
    inside = (i < TAKEN) & (c < channels)
    group_total, group_squares = _group_sums(sums, parts, channels, image, i, c, inside, WIDTH, PARTS, COLS)
    from_height, from_width = height, width  # of x
    if SIZE == 1:
        from_height, from_width = height // 2, width // 2
    if SIZE == 2:
        from_height, from_width = height * 2, width * 2
    product, summand = _coefficients(
        group_total, group_squares, from_height * from_width * WIDTH, eps, bias, bias_row, weight, offset, modulation,
        modulation_row, image, channels, c, inside,
    )  # fmt: skip
    source = x + image.to(tl.int64) * from_height * from_width * channels
    pitch = width + 2
    pixels = (height + 2) * pitch
    target = y + image.to(tl.int64) * pixels * channels
    end = tl.minimum(begin + part, pixels)
    for first in range(begin, end, ROWS):
        q = first + tl.arange(0, ROWS)
        row, col = q // pitch - 1, q % pitch - 1
        within = (row >= 0) & (row < height) & (col >= 0) & (col < width)
        mask = within[:, None] & inside[None, :]
        value = tl.zeros([ROWS, COLS], tl.float32)
        for tap in tl.static_range(4 if SIZE == 2 else 1):
            if SIZE == 0:
                p = row * width + col
            elif SIZE == 1:
                p = (row // 2) * from_width + col // 2
            else:
                p = (2 * row + tap // 2) * from_width + 2 * col + tap % 2
            one = tl.load(source + p[:, None] * channels + c[None, :], mask=mask, other=0.0).to(tl.float32)
            one = one * product[None, :] + summand[None, :]
            if SILU:
                one = one * tl.sigmoid(one)
            value += one
        if SIZE == 2:
            value *= 0.25
        value = tl.minimum(tl.maximum(tl.where(mask, value * scale, 0.0), -448.0), 448.0)
        place = target + q[:, None] * channels + c[None, :]
        tl.store(place, value.to(y.dtype.element_ty), mask=(q < end)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["bias_row", "height", "width", "parts", "inverse"])
def _convolve(
    x, w, factor, inverse, bias, bias_row, residual, out, sums, height, width, channels, out_channels, parts,
    SUM: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """ROWS pixels, those of the border counted, and COLS channels of one picture. x and w are descriptors."""
    blocks = tl.cdiv(out_channels, COLS)
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks % parts
    image = tl.program_id(0) // blocks // parts
    pitch = width + 2
    first = image * (height + 2) * pitch + part * ROWS
    chunks = tl.cdiv(channels, DEEP)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for k in range(9 * chunks):
        tap = k // chunks
        pixels = x.load([first + tap // 3 * pitch + tap % 3, (k - tap * chunks) * DEEP])
        weights = w.load([block * COLS, k * DEEP])
        total = tl.dot(pixels, weights.T, total)
    q = part * ROWS + tl.arange(0, ROWS)
    row, col = q // pitch, q % pitch
    c = block * COLS + tl.arange(0, COLS)
    within = (row < height) & (col < width)
    inside = c < out_channels
    mask = within[:, None]
    if not EVEN:
        mask = mask & inside[None, :]
    value = total * (tl.load(factor + c, mask=inside, other=0.0) * inverse)[None, :]
    if bias is not None:
        value += tl.load(bias + image * bias_row + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    base = image.to(tl.int64) * height * width * out_channels
    at = (row * width + col)[:, None] * out_channels + c[None, :]
    if residual is not None:
        value += tl.load(residual + base + at, mask=mask, other=0.0).to(tl.float32)
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + base + at, rounded, mask=mask)
    if SUM:
        value = tl.where(mask, rounded.to(tl.float32), 0.0)
        place = sums + (image * parts + part) * 2 * out_channels + c
        tl.store(place, tl.sum(value, 0), mask=inside)
        tl.store(place + out_channels, tl.sum(value * value, 0), mask=inside)


def scale_for(x: Tensor) -> float:
    """A power of two that leaves inputs like x, and those HEADROOM times as large, within 8 bits."""
    largest = float(x.abs().max())
    return 2.0 ** math.floor(math.log2(LARGEST / HEADROOM / largest)) if 0 < largest < math.inf else 1.0


def normalise(
    x: Tensor,
    norm: nn.GroupNorm,
    scale: float,
    modulation: Tensor | None = None,
    size: int = SAME,
) -> Padded:
    """`kernels.normalise` with SiLU, in 8 bits, at the size of x, twice it (nearest neighbours) or half of it (means)."""
    sums, x = getattr(x, "channel_sums", None), packed(x)
    batch, channels, height, width = x.shape
    if size != SAME:
        height, width = (2 * height, 2 * width) if size == DOUBLED else (height // 2, width // 2)
    group, pixels = channels // norm.num_groups, (height + 2) * (width + 2)
    values = torch.empty(batch, height + 2, width + 2, channels, dtype=torch.float8_e4m3fn, device=x.device)
    unit = math.lcm(group, 16)  # whole groups, and whole words of 16 bytes
    cols = max(_columns(batch, channels), next_power_of_2(unit))
    taken = cols // unit * unit
    rows = min(TILE // cols, next_power_of_2(pixels))
    blocks = triton.cdiv(channels, taken)
    part = triton.cdiv(triton.cdiv(pixels, max(1, min(PROGRAMS // (batch * blocks), pixels // rows))), rows) * rows
    with torch.cuda.device_of(x):
        sums = _sums(x) if sums is None else sums
        parts = sums.shape[1]
        _normalise_padded[blocks, triton.cdiv(pixels, part), batch](
            x, sums, None, norm.weight, norm.bias, modulation, values, height, width, channels, parts, part, norm.eps,
            0, _row(modulation), scale, SILU=True, WIDTH=group, TAKEN=taken,
            PARTS=min(next_power_of_2(parts), TILE // cols), SIZE=size, ROWS=rows, COLS=cols, num_warps=WARPS // 2,
        )  # fmt: skip
    return Padded(values, scale)


def convolve(x: Padded, weights: Weights, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x ∗ w + bias + residual, which remembers its sums for a normalisation that follows.

    bias: (C,) or (B, C)
    """
    batch, height, width, channels = x.values.shape
    height, width, out_channels = height - 2, width - 2, len(weights.values)
    residual = None if residual is None else packed(residual)
    out = torch.empty(batch, height, width, out_channels, dtype=dtype, device=x.values.device)
    pixels = height * (width + 2)
    rows, cols, deep, warps, stages = _tile(batch, pixels, out_channels)
    if weights.values.shape[1] // 9 % deep:
        deep = DEEP
    parts = triton.cdiv(pixels, rows)
    sums = torch.empty(batch, parts, 2, out_channels, device=out.device)
    matrix: Any = TensorDescriptor.from_tensor(x.values.view(-1, channels), [rows, deep])
    kernel: Any = TensorDescriptor.from_tensor(weights.values, [cols, deep])
    with torch.cuda.device_of(out):
        _convolve[(batch * parts * triton.cdiv(out_channels, cols),)](
            matrix, kernel, weights.factor, 1 / x.scale, bias, _row(bias), residual, out, sums, height, width, channels,
            out_channels, parts, SUM=True, EVEN=out_channels % cols == 0, ROWS=rows, COLS=cols, DEEP=deep,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    made = out.movedim(-1, 1)
    made.channel_sums = sums if parts <= MOST_PARTS else sums.sum(1, keepdim=True)  # type: ignore[attr-defined]
    return made


def _tile(batch: int, pixels: int, out_channels: int) -> tuple[int, int, int, int, int]:
    """The largest tile of which there are enough."""

    def count(tile: tuple[int, ...]) -> int:
        return batch * triton.cdiv(pixels, tile[0]) * triton.cdiv(out_channels, tile[1])

    if out_channels <= TALL_TILE[1] and count(TALL_TILE) >= ENOUGH:
        return TALL_TILE
    if count(LARGE_TILE) >= ENOUGH:
        return LARGE_TILE if count(LARGE_TILE) > MANY else LONE_TILE
    return MIDDLE_TILE if count(MIDDLE_TILE) >= ENOUGH else SMALL_TILE
