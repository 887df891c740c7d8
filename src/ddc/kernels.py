"""GroupNorm with all that stands around it in a residual block, in few passes over a GPU's memory: Triton kernels.

A convolution's bias, a residual, a scale and shift by the time, and SiLU are part of the same kernels. Pictures are channels
last, float16, bfloat16 or float32; sums are float32. A small picture is normalised by one kernel, with a program for each
group. A larger one is read by many programs, which sum over parts of its pixels; a second kernel adds these sums up and
normalises. The first is not needed where an addition or a concatenation has summed before. Normalisations and additions can
be differentiated by x, not by their parameters.

This file is imported where Triton is installed and a GPU is used, see `ddc.fused`.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton import next_power_of_2

WHOLE = 32768  # values of a group that one program can hold,
FEW_PIXELS = 1024  # and pixels up to which it should: the values of a group are far apart in memory
TILE = 4096  # values that a program sums at a time; it normalises twice as many
WARPS = 8
PROGRAMS = 2048  # enough of them to fill a large GPU
MOST_PARTS = 64  # of a picture, each with its own sums, which every program that normalises adds up
UNSPECIALISED = ["pixels", "part", "parts", "bias_row", "modulation_row"]  # one kernel for all their values


@triton.jit
def _coefficients(
    total, squares, count, eps, bias, bias_row, weight, offset, modulation, modulation_row, image, channels, c, mask
):  # fmt: skip
    """The factor and the summand of channels c, from the sums over their group. `bias` is one not yet added."""
    mean = total / count
    inverse = tl.rsqrt(tl.maximum(squares / count - mean * mean, 0.0) + eps)
    product = inverse * tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    summand = tl.load(offset + c, mask=mask, other=0.0).to(tl.float32) - mean * product
    if modulation is not None:
        row = modulation + image * modulation_row
        scale = 1.0 + tl.load(row + c, mask=mask, other=0.0).to(tl.float32)
        product *= scale
        summand = summand * scale + tl.load(row + channels + c, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        summand += product * tl.load(bias + image * bias_row + c, mask=mask, other=0.0).to(tl.float32)
    return product, summand


@triton.jit(do_not_specialize=UNSPECIALISED)
def _sum_parts(
    x, bias, residual, out, sums, pixels, channels, out_channels, bias_row, part,
    ADD: tl.constexpr, STORE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Of each part of a picture and each channel: the sum and the sum of squares. STORE writes what was summed.

    `out` and `sums` may be some channels of those of a picture that has `out_channels` of them.
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
    place = sums + (image * tl.num_programs(1) + tl.program_id(1)) * 2 * out_channels + c
    tl.store(place, tl.sum(total, 0), mask=inside)
    tl.store(place + out_channels, tl.sum(squares, 0), mask=inside)


@triton.jit
def _group_sums(
    sums, parts, channels, image, i, c, inside, WIDTH: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """For the channels c, counted from 0 by i: the sum and the sum of squares of their group of WIDTH, from those of all parts."""
    total = tl.zeros([PARTS, COLS], tl.float32)
    squares = tl.zeros([PARTS, COLS], tl.float32)
    for first in range(0, parts, PARTS):
        s = first + tl.arange(0, PARTS)
        mask = (s < parts)[:, None] & inside[None, :]
        at = (image * parts + s[:, None]) * 2 * channels + c[None, :]
        total += tl.load(sums + at, mask=mask, other=0.0)
        squares += tl.load(sums + at + channels, mask=mask, other=0.0)
    together = (i // WIDTH)[:, None] == (i // WIDTH)[None, :]
    group_total = tl.sum(tl.where(together, tl.sum(total, 0)[None, :], 0.0), 1)
    group_squares = tl.sum(tl.where(together, tl.sum(squares, 0)[None, :], 0.0), 1)
    return group_total, group_squares


@triton.jit(do_not_specialize=UNSPECIALISED)
def _normalise(
    x, sums, bias, weight, offset, modulation, y, pixels, channels, parts, part, eps, bias_row, modulation_row,
    SILU: tl.constexpr, WIDTH: tl.constexpr, TAKEN: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A part of the pixels and TAKEN channels, which are whole groups of WIDTH, from the sums of all parts."""
    # from the end backwards: what was read last is still in the cache
    image = tl.num_programs(2) - 1 - tl.program_id(2)
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * part
    end = tl.minimum(begin + part, pixels)
    i = tl.arange(0, COLS)
    c = tl.program_id(0) * TAKEN + i
    inside = (i < TAKEN) & (c < channels)
    group_total, group_squares = _group_sums(sums, parts, channels, image, i, c, inside, WIDTH, PARTS, COLS)
    product, summand = _coefficients(
        group_total, group_squares, pixels * WIDTH, eps, bias, bias_row, weight, offset, modulation, modulation_row,
        image, channels, c, inside,
    )  # fmt: skip
    base = image.to(tl.int64) * pixels * channels
    for row in range(begin, end, ROWS):
        p = row + tl.arange(0, ROWS)
        mask = (p < end)[:, None] & inside[None, :]
        at = base + p[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * product[None, :] + summand[None, :]
        if SILU:
            value = value * tl.sigmoid(value)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _normalise_whole(
    x, bias, weight, offset, modulation, y, pixels, channels, eps, bias_row, modulation_row,
    SILU: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One group of one small picture."""
    image = tl.program_id(1)
    j, p = tl.arange(0, COLS), tl.arange(0, ROWS)
    c, inside = tl.program_id(0) * WIDTH + j, j < WIDTH
    mask = (p < pixels)[:, None] & inside[None, :]
    at = image.to(tl.int64) * pixels * channels + p[:, None] * channels + c[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        extra = tl.load(bias + image * bias_row + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        value = tl.where(mask, value + extra, 0.0)
    product, summand = _coefficients(
        tl.sum(value), tl.sum(value * value), pixels * WIDTH, eps, None, 0, weight, offset, modulation, modulation_row,
        image, channels, c, inside,
    )  # fmt: skip
    value = value * product[None, :] + summand[None, :]
    if SILU:
        value = value * tl.sigmoid(value)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _go_back(
    x, gradient, made, out, pixels, channels, part,
    SILU: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Backwards through SiLU to z = x · factor + summand: of each part, the sums of dz and of dz · x; LAST: the gradient of x.

    made: (B, 4, C), the factor and the summand; and for LAST what is added to dz · factor, as a number and as a factor of x
    """
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    image = tl.program_id(2)
    inside = c < channels
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, pixels)
    table = made + image * 4 * channels + c
    factor = tl.load(table, mask=inside, other=0.0)[None, :]
    summand = tl.load(table + channels, mask=inside, other=0.0)[None, :]
    if LAST:
        constant = tl.load(table + 2 * channels, mask=inside, other=0.0)[None, :]
        slope = tl.load(table + 3 * channels, mask=inside, other=0.0)[None, :]
    base = image.to(tl.int64) * pixels * channels
    total = tl.zeros([ROWS, COLS], tl.float32)
    products = tl.zeros([ROWS, COLS], tl.float32)
    for row in range(begin, end, ROWS):
        p = row + tl.arange(0, ROWS)
        mask = (p < end)[:, None] & inside[None, :]
        at = base + p[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        dz = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            z = value * factor + summand
            sigmoid = tl.sigmoid(z)
            dz *= sigmoid * (1.0 + z * (1.0 - sigmoid))
        if LAST:
            tl.store(out + at, (dz * factor + constant + slope * value).to(out.dtype.element_ty), mask=mask)
        else:
            total += dz
            products += dz * value
    if not LAST:
        place = out + (image * tl.num_programs(1) + tl.program_id(1)) * 2 * channels + c
        tl.store(place, tl.sum(total, 0), mask=inside)
        tl.store(place + channels, tl.sum(products, 0), mask=inside)


def add(x: Tensor, bias: Tensor | None, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x + bias + residual, which remembers its sums for a normalisation that follows. With `out` it has no gradient."""
    if out is None and torch.is_grad_enabled() and x.requires_grad:
        made, sums = _Add.apply(x, bias, residual)
        made.channel_sums = sums
        return made
    x = packed(x)
    out = torch.empty_like(x) if out is None else out
    sums = _sums(x, bias, None if residual is None else packed(residual), out)
    out.channel_sums = sums  # type: ignore[attr-defined]
    return out


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        out = add(x, bias, residual)
        ctx.mark_non_differentiable(out.channel_sums)  # type: ignore[attr-defined]
        return out, out.channel_sums  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, gradient if ctx.needs_input_grad[2] else None


def concatenate(first: Tensor, second: Tensor) -> Tensor:
    """The channels of both, which remembers its sums too."""
    a, b = packed(first), packed(second)
    known = [getattr(part, "channel_sums", None) for part in (a, b)]
    if all(sums is not None for sums in known):
        if len({sums.shape[1] for sums in known}) > 1:  # type: ignore[union-attr]
            known = [sums.sum(1, keepdim=True) for sums in known]  # type: ignore[union-attr]
        out = joined(a, b)
        out.channel_sums = torch.cat(known, -1)  # type: ignore[arg-type, attr-defined]
        return out
    (batch, one, *size), two = a.shape, b.shape[1]
    rows = torch.empty(batch, *size, one + two, dtype=a.dtype, device=a.device)
    sums = _sums(a, out=rows, channels=one + two)
    _sums(b, out=rows[..., one:], channels=one + two, into=sums[..., one:])
    out = rows.movedim(-1, 1)
    out.channel_sums = sums  # type: ignore[attr-defined]
    return out


def joined(a: Tensor, b: Tensor) -> Tensor:
    """The channels of both, channels last. `torch.cat` takes twice as long."""
    parts = [packed(x).movedim(1, -1) for x in (a, b)]  # (B, H, W, C)
    words = [in_words(x) for x in parts]
    if words[0].dtype != words[1].dtype:
        words = parts
    one = words[0].shape[-1]
    out = words[0].new_empty(*words[0].shape[:-1], one + words[1].shape[-1])
    out[..., :one], out[..., one:] = words
    return out.view(a.dtype).movedim(-1, 1)


def in_words(rows: Tensor) -> Tensor:
    """Rows as words of 16 bytes, or of 8, if they are whole ones: PyTorch copies wide words faster."""
    for kind in (torch.complex128, torch.int64):
        if rows.shape[-1] * rows.element_size() % kind.itemsize == 0:
            return rows.view(kind)
    return rows


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
    if torch.is_grad_enabled() and x.requires_grad:
        return _Normalise.apply(x, norm, bias, modulation, silu)
    return _normalised(x, norm, bias, modulation, silu)


class _Normalise(torch.autograd.Function):
    """For the gradient nothing is kept but x and its sums."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: nn.GroupNorm, bias: Tensor | None, modulation: Tensor | None, silu: bool
    ) -> Tensor:
        sums, x = getattr(x, "channel_sums", None) if bias is None else None, packed(x)
        sums = _sums(x, bias) if sums is None else sums
        ctx.save_for_backward(x, sums, bias, modulation)
        ctx.norm, ctx.silu = norm, silu
        return _normalised(x, norm, bias, modulation, silu, sums)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, sums, bias, modulation = ctx.saved_tensors
        gradient, (batch, channels), norm = packed(gradient), x.shape[:2], ctx.norm
        pixels, groups = x.numel() // (batch * channels), (batch, norm.num_groups, -1)
        factor, summand, inverse, moved = _tables(sums, norm, bias, modulation, pixels)
        cols = _columns(batch, channels)
        blocks = triton.cdiv(channels, cols)
        rows, part, grid = _split(batch, pixels, blocks, TILE // cols, PROGRAMS)
        sizes = {"SILU": ctx.silu, "ROWS": rows, "COLS": cols, "num_warps": WARPS}
        with torch.cuda.device_of(x):
            made = torch.stack([factor, summand, factor, summand], 1).view(batch, 4, channels)
            found = torch.empty(batch, grid[1], 2, channels, device=x.device)
            _go_back[grid](x, gradient, made, found, pixels, channels, part, LAST=False, **sizes)
            one, by_x = (part.view(groups) for part in found.sum(1).unbind(1))
            count = pixels * channels // norm.num_groups
            mean = (factor * one).sum(2, keepdim=True) / count
            slope = -((factor * (by_x + moved * one)).sum(2, keepdim=True) / count) * inverse.square()
            made[:, 2] = (slope * moved - mean).flatten(1)
            made[:, 3] = slope.expand_as(factor).flatten(1)
            out = torch.empty_like(x)
            _go_back[grid](x, gradient, made, out, pixels, channels, part, LAST=True, **sizes)
        return out, None, None, None, None


def _tables(
    sums: Tensor, norm: nn.GroupNorm, bias: Tensor | None, modulation: Tensor | None, pixels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each picture, group and channel: factor, summand, 1/σ, and the bias less the mean."""
    batch, channels = len(sums), sums.shape[-1]
    groups, count = (batch, norm.num_groups, -1), pixels * channels // norm.num_groups
    mean, square = (part.reshape(groups).sum(2, keepdim=True) / count for part in sums.sum(1).unbind(1))
    inverse = ((square - mean.square()).clamp(min=0) + norm.eps).rsqrt()
    weight, offset = norm.weight.float(), norm.bias.float()
    if modulation is not None:
        scale, shift = modulation.float().chunk(2, 1)
        weight, offset = weight * (1 + scale), offset * (1 + scale) + shift
    weight, offset = (part.expand(batch, channels).reshape(groups) for part in (weight, offset))
    moved = (-mean).expand_as(weight)
    if bias is not None:
        moved = bias.float().expand(batch, channels).reshape(groups) + moved
    return weight * inverse, offset + weight * inverse * moved, inverse, moved


def _normalised(
    x: Tensor,
    norm: nn.GroupNorm,
    bias: Tensor | None,
    modulation: Tensor | None,
    silu: bool,
    sums: Tensor | None = None,
) -> Tensor:
    x = packed(x)
    batch, channels = x.shape[:2]
    pixels, width = x.numel() // (batch * channels), channels // norm.num_groups
    y = torch.empty_like(x)
    given, last = (norm.weight, norm.bias, modulation, y, pixels, channels), (norm.eps, _row(bias), _row(modulation))
    sums = getattr(x, "channel_sums", None) if bias is None and sums is None else sums
    rows, cols = next_power_of_2(pixels), next_power_of_2(width)
    with torch.cuda.device_of(x):
        if sums is None and pixels <= FEW_PIXELS and rows * cols <= WHOLE:
            warps = max(4, min(rows * cols // 1024, 16))
            grid: tuple[int, ...] = (norm.num_groups, batch)
            sizes = {"SILU": silu, "WIDTH": width, "ROWS": rows, "COLS": cols, "num_warps": warps}
            _normalise_whole[grid](x, bias, *given, *last, **sizes)
            return y
        sums = _sums(x, bias) if sums is None else sums
        unit = math.lcm(width, 8)  # whole groups, and whole words of 16 bytes
        cols = max(_columns(batch, channels), next_power_of_2(unit))
        taken = cols // unit * unit
        rows, part, grid = _split(batch, pixels, triton.cdiv(channels, taken), 2 * TILE // cols, PROGRAMS)
        parts = sums.shape[1]
        _normalise[grid](
            x, sums, bias, *given, parts, part, *last, SILU=silu, WIDTH=width, TAKEN=taken,
            PARTS=min(next_power_of_2(parts), TILE // cols), ROWS=rows, COLS=cols, num_warps=WARPS,
        )  # fmt: skip
    return y


def _sums(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    channels: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """Sums and sums of squares (B, parts, 2, channels) of x + bias + residual, which is written to `out` if that is given.

    Of the `channels`, those from the first on are x's. `into` is where its sums are written, if not in new memory.
    """
    batch, own = x.shape[:2]
    channels, pixels = channels or own, x.numel() // (batch * own)
    cols = _columns(batch, channels)
    blocks = triton.cdiv(channels, cols)
    rows, part, grid = _split(batch, pixels, blocks, TILE // cols, min(PROGRAMS, MOST_PARTS * batch * blocks))
    sums = torch.empty(batch, grid[1], 2, channels, device=x.device) if into is None else into
    with torch.cuda.device_of(x):
        _sum_parts[triton.cdiv(own, cols), *grid[1:]](
            x, bias, residual, out, sums, pixels, own, channels, _row(bias), part,
            ADD=residual is not None, STORE=out is not None, ROWS=rows, COLS=cols, num_warps=WARPS,
        )  # fmt: skip
    return sums


def _columns(batch: int, channels: int) -> int:
    """Channels of a tile: few where there is little to do, for then a picture has more parts."""
    return min(32 if batch * channels < 2048 else 64, max(8, next_power_of_2(channels)))


def _split(batch: int, pixels: int, blocks: int, rows: int, programs: int) -> tuple[int, int, tuple[int, int, int]]:
    """Rows of a tile, pixels of a part, and the grid, so that there are about so many programs."""
    rows = min(rows, next_power_of_2(pixels))
    parts = max(1, min(programs // (batch * blocks), pixels // rows))
    part = triton.cdiv(triton.cdiv(pixels, parts), rows) * rows
    return rows, part, (blocks, triton.cdiv(pixels, part), batch)


def packed(x: Tensor) -> Tensor:
    """x (B, C, …) with its channels beside each other in memory."""
    rows = x.movedim(1, -1)
    return x if rows.is_contiguous() else rows.contiguous().movedim(-1, 1)


def _row(table: Tensor | None) -> int:
    """How far the numbers of one picture are from those of the next; 0 if all have the same."""
    return table.stride(0) if table is not None and table.ndim == 2 and len(table) > 1 else 0
