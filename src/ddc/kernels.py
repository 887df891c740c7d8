"""GroupNorm with all that stands around it in a residual block, in few passes over a GPU's memory: Triton kernels.

A convolution's bias, a residual, a scale and shift by the time, and SiLU are part of the same kernels. Pictures are channels
last, float16, bfloat16 or float32; sums are float32. A small picture is normalised by one kernel, with a program for each
group. A larger one is read by many programs, which sum over parts of its pixels; a second kernel makes two numbers for each
channel of these sums; a third normalises. Nothing here is differentiable.

This file is imported where Triton is installed and a GPU is used, see `ddc.cuda`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton import next_power_of_2

WHOLE = 32768  # values of a group that one program can hold,
FEW_PIXELS = 1024  # and pixels up to which it should: the values of a group are far apart in memory
TILE = 4096  # values that a program holds at a time
WARPS = 8
WIDEST = 128  # channels of a tile
PROGRAMS = 2048  # enough of them to fill a large GPU
MOST_PARTS = 512  # of a picture, each with its own sums


@triton.jit
def _coefficients(total, squares, count, eps, weight, offset, modulation, row, channels, c, mask):
    """The factor and the summand of channels c, from the sums over their group."""
    mean = total / count
    inverse = tl.rsqrt(tl.maximum(squares / count - mean * mean, 0.0) + eps)
    product = inverse * tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    summand = tl.load(offset + c, mask=mask, other=0.0).to(tl.float32) - mean * product
    if modulation is not None:
        scale = 1.0 + tl.load(modulation + row + c, mask=mask, other=0.0).to(tl.float32)
        product *= scale
        summand = summand * scale + tl.load(modulation + row + channels + c, mask=mask, other=0.0).to(tl.float32)
    return product, summand


@triton.jit
def _sum_parts(
    x, bias, residual, out, sums, pixels, channels, out_channels, bias_row, part,
    ADD: tl.constexpr, STORE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Of each part of a picture and each channel: the sum and the sum of squares. STORE writes what was summed.

    `out` may be some channels of a picture that has `out_channels` of them.
    """
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    image = tl.program_id(2)
    inside = c < channels
    extra = tl.zeros([1, COLS], tl.float32)
    if bias is not None:
        extra = tl.load(bias + image * bias_row + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, pixels)
    base = image.to(tl.int64) * pixels * channels
    out_base = image.to(tl.int64) * pixels * out_channels
    total = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS, COLS], tl.float32)
    for row in range(begin, end, ROWS):
        p = row + tl.arange(0, ROWS)
        mask = (p < end)[:, None] & inside[None, :]
        at = base + p[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + extra
        if ADD:
            value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        if STORE:
            rounded = value.to(out.dtype.element_ty)
            tl.store(out + out_base + p[:, None] * out_channels + c[None, :], rounded, mask=mask)
            value = rounded.to(tl.float32)
        value = tl.where(mask, value, 0.0)
        total += value
        squares += value * value
    place = sums + (image * tl.num_programs(1) + tl.program_id(1)) * 2 * channels + c
    tl.store(place, tl.sum(total, 0), mask=inside)
    tl.store(place + channels, tl.sum(squares, 0), mask=inside)


@triton.jit
def _finish(
    sums, bias, weight, offset, modulation, made, parts, pixels, channels, width, eps, bias_row, modulation_row,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Of one picture and group: the two numbers with which each channel is normalised. `bias` is one not yet added."""
    image = tl.program_id(1)
    j = tl.arange(0, COLS)
    c, inside = tl.program_id(0) * width + j, j < width
    total = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS, COLS], tl.float32)
    for row in range(0, parts, ROWS):
        s = row + tl.arange(0, ROWS)
        mask = (s < parts)[:, None] & inside[None, :]
        at = (image * parts + s[:, None]) * 2 * channels + c[None, :]
        total += tl.load(sums + at, mask=mask, other=0.0)
        squares += tl.load(sums + at + channels, mask=mask, other=0.0)
    product, summand = _coefficients(
        tl.sum(total), tl.sum(squares), pixels * width, eps, weight, offset, modulation, image * modulation_row,
        channels, c, inside,
    )  # fmt: skip
    if bias is not None:
        summand += product * tl.load(bias + image * bias_row + c, mask=inside, other=0.0).to(tl.float32)
    place = made + image * 2 * channels + c
    tl.store(place, product, mask=inside)
    tl.store(place + channels, summand, mask=inside)


@triton.jit
def _normalise(x, made, y, pixels, channels, SILU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    # from the end backwards: what was read last is still in the cache
    image = tl.num_programs(1) - 1 - tl.program_id(1)
    tile, blocks = tl.num_programs(0) - 1 - tl.program_id(0), tl.cdiv(channels, COLS)
    p = tile // blocks * ROWS + tl.arange(0, ROWS)
    c = tile % blocks * COLS + tl.arange(0, COLS)
    inside = c < channels
    place = made + image * 2 * channels + c
    product = tl.load(place, mask=inside, other=0.0)
    summand = tl.load(place + channels, mask=inside, other=0.0)
    mask = (p < pixels)[:, None] & inside[None, :]
    at = image.to(tl.int64) * pixels * channels + p[:, None] * channels + c[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * product[None, :] + summand[None, :]
    if SILU:
        value = value * tl.sigmoid(value)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _normalise_whole(
    x, bias, weight, offset, modulation, y, pixels, channels, width, eps, bias_row, modulation_row,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One group of one small picture."""
    image = tl.program_id(1)
    j, p = tl.arange(0, COLS), tl.arange(0, ROWS)
    c, inside = tl.program_id(0) * width + j, j < width
    mask = (p < pixels)[:, None] & inside[None, :]
    at = image.to(tl.int64) * pixels * channels + p[:, None] * channels + c[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        extra = tl.load(bias + image * bias_row + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        value = tl.where(mask, value + extra, 0.0)
    product, summand = _coefficients(
        tl.sum(value), tl.sum(value * value), pixels * width, eps, weight, offset, modulation, image * modulation_row,
        channels, c, inside,
    )  # fmt: skip
    value = value * product[None, :] + summand[None, :]
    if SILU:
        value = value * tl.sigmoid(value)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


def add(x: Tensor, bias: Tensor | None, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x + bias + residual, which remembers its sums for a normalisation that follows."""
    x = packed(x)
    out = torch.empty_like(x) if out is None else out
    sums = _sums(x, bias, None if residual is None else packed(residual), out)
    out.channel_sums = sums  # type: ignore[attr-defined]
    return out


def concatenate(first: Tensor, second: Tensor) -> Tensor:
    """The channels of both, which remembers its sums too."""
    a, b = packed(first), packed(second)
    (batch, one, *size), two = a.shape, b.shape[1]
    rows = torch.empty(batch, *size, one + two, dtype=a.dtype, device=a.device)
    out = rows.movedim(-1, 1)
    made = [
        _sums(x, out=rows[..., start:], out_channels=one + two, widest=max(one, two)) for x, start in ((a, 0), (b, one))
    ]
    out.channel_sums = torch.cat(made, -1)  # type: ignore[attr-defined]
    return out


def normalise(
    x: Tensor,
    norm: nn.GroupNorm,
    bias: Tensor | None = None,
    modulation: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """SiLU(norm(x + bias) · (1 + scale) + shift), where `modulation` (B or 1, 2·C) holds scale and shift.

    bias: (C,) or (B, C), of the convolution that made x
    """
    x = packed(x)
    batch, channels = x.shape[:2]
    pixels, width = x.numel() // (batch * channels), channels // norm.num_groups
    y = torch.empty_like(x)
    last = (norm.eps, _row(bias), _row(modulation))
    cols, rows, grid = next_power_of_2(width), next_power_of_2(pixels), (norm.num_groups, batch)
    with torch.cuda.device_of(x):
        if pixels <= FEW_PIXELS and rows * cols <= WHOLE:
            given = (norm.weight, norm.bias, modulation, y, pixels, channels, width, *last)
            warps = max(4, min(rows * cols // 2048, 16))
            _normalise_whole[grid](x, bias, *given, SILU=silu, ROWS=rows, COLS=cols, num_warps=warps)
            return y
        sums = getattr(x, "channel_sums", None) if bias is None else None
        sums = _sums(x, bias) if sums is None else sums
        parts, made = sums.shape[1], torch.empty(batch, 2, channels, device=x.device)
        rows = min(max(TILE // cols, 1), next_power_of_2(parts))
        known = (norm.weight, norm.bias, modulation, made, parts, pixels, channels, width, *last)
        _finish[grid](sums, bias, *known, ROWS=rows, COLS=cols, num_warps=WARPS)
        cols = min(next_power_of_2(channels), WIDEST)
        rows = 2 * TILE // cols
        tiles = (triton.cdiv(channels, cols) * triton.cdiv(pixels, rows), batch)
        _normalise[tiles](x, made, y, pixels, channels, SILU=silu, ROWS=rows, COLS=cols, num_warps=WARPS)
    return y


def _sums(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_channels: int = 0,
    widest: int = 0,
) -> Tensor:
    """Sums and sums of squares (B, parts, 2, C) of x + bias + residual, which is written to `out` if that is given.

    Tensors of one size and one `widest`, at least C, have the same number of parts.
    """
    batch, channels = x.shape[:2]
    widest, pixels = widest or channels, x.numel() // (batch * channels)
    cols = min(next_power_of_2(widest), WIDEST)
    blocks, rows = triton.cdiv(channels, cols), TILE // cols
    parts = max(1, min(PROGRAMS // (batch * triton.cdiv(widest, cols)), MOST_PARTS, pixels // rows))
    part = triton.cdiv(triton.cdiv(pixels, parts), rows) * rows
    parts = triton.cdiv(pixels, part)
    sums = torch.empty(batch, parts, 2, channels, device=x.device)
    with torch.cuda.device_of(x):
        _sum_parts[blocks, parts, batch](
            x, bias, residual, out, sums, pixels, channels, out_channels or channels, _row(bias), part,
            ADD=residual is not None, STORE=out is not None, ROWS=rows, COLS=cols, num_warps=WARPS,
        )  # fmt: skip
    return sums


def packed(x: Tensor) -> Tensor:
    """x (B, C, …) with its channels beside each other in memory."""
    rows = x.movedim(1, -1)
    return x if rows.is_contiguous() else rows.contiguous().movedim(-1, 1)


def _row(table: Tensor | None) -> int:
    """How far the numbers of one picture are from those of the next; 0 if all have the same."""
    return table.stride(0) if table is not None and table.ndim == 2 and len(table) > 1 else 0
