"""JPEG, identical to libjpeg's default to the last bit: 4:2:0 chroma, Annex K tables scaled by quality.

Every rounding passes the gradient straight through, so that gradient-based solvers can use it.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from ddc.errors import UserError
from ddc.images import to_internal, to_unit
from ddc.noise import on_device
from ddc.operators.base import ROUNDING, Operator, Sigma, Size, remember

ROUNDING_ERROR = 1.0  # of a coefficient, because an encoder first rounds luma and chroma to whole levels
DEBLURRINGS = 8  # passes that estimate the chroma before it was enlarged

# ITU-T T.81, Annex K, tables K.1 and K.2
LUMA = """
16 11 10 16  24  40  51  61
12 12 14 19  26  58  60  55
14 13 16 24  40  57  69  56
14 17 22 29  51  87  80  62
18 22 37 56  68 109 103  77
24 35 55 64  81 104 113  92
49 64 78 87 103 121 120 101
72 92 95 98 112 100 103  99
"""
CHROMA = (
    """
17 18 24 47  99  99  99  99
18 21 26 66  99  99  99  99
24 26 56 99  99  99  99  99
47 66 99 99  99  99  99  99
"""
    + 32 * " 99"
)

Tables = tuple[Tensor, Tensor]  # of one plane: the DCT (8, 8) and the quantisation steps (B or 1, 1, 1, 1, 8, 8)
_TABLES: dict[Hashable, Tables] = {}


class JPEG(Operator):
    """Compression at a quality of 1 to 100. y is the decompressed image, in 8-bit levels."""

    align = 16  # two 8×8 blocks: those of the halved chroma
    local = True
    quality: int | Tensor

    def __init__(self, quality: int | Tensor = 10) -> None:
        """A tensor holds one quality for each image, and is not checked."""
        super().__init__()
        if isinstance(quality, Tensor):
            self.register_buffer("quality", quality, persistent=False)
            return
        if type(quality) is not int or not 1 <= quality <= 100:
            raise UserError(f"the JPEG quality is {quality!r}; expected a whole number from 1 to 100")
        self.quality, self.settings = quality, ("quality",)

    @property
    def batch_key(self) -> Hashable:
        return type(self)

    @classmethod
    def merge(cls, operators: Sequence[Self], device: torch.device) -> Operator:
        if len({one.key for one in operators}) == 1:
            return operators[0]
        merged = cls(on_device([one.quality for one in operators], device, torch.int64))
        merged.__dict__["_cache"] = operators[0].__dict__.setdefault("_cache", {})  # copying tables makes a GPU wait
        return merged

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 3:
            raise UserError(f"JPEG compresses images of 3 channels; this one has {x.shape[1]}")
        height, width = x.shape[-2:]
        work = torch.promote_types(x.dtype, torch.float32)
        # double, where there is one: whole numbers stay whole, whatever a GPU does to products of floats
        double = work if x.device.type == "mps" else torch.float64
        with torch.autocast(x.device.type, enabled=False):
            rgb = _round(to_unit(x.to(work)) * 255)
            luma, chroma = rgb_to_ycc(rgb)
            luma = compress(luma, self._tables(LUMA, double, x.device))
            chroma = compress(halve(chroma), self._tables(CHROMA, double, x.device))[..., : -(-width // 2)]
            chroma = upsample(chroma)[..., :height, :width]
            return to_internal(ycc_to_rgb(luma, chroma) / 255).to(x.dtype)

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        """Returns x with every DCT coefficient inside the interval in which y's was rounded, if y has no noise. Where
        x is too far off for its place in the interval to mean anything, the coefficient moves towards the centre."""
        height, width = x.shape[-2:]
        work = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            (luma, chroma), (luma_y, chroma_y) = (_split(image.to(work)) for image in (x, y))
            exact = sigma <= ROUNDING
            luma_change = _into_cells(luma, luma_y, self._tables(LUMA, work, x.device), exact, (height, width))
            small, small_y = _mean(chroma), _mean(chroma_y)
            for _ in range(DEBLURRINGS):  # enlarging made y's chroma smooth
                small_y = small_y + _mean(chroma_y) - _mean(upsample(small_y)[..., :height, :width])
            tables = self._tables(CHROMA, work, x.device)
            chroma_change = _into_cells(small, small_y, tables, exact, (height // 2, width // 2))
            chroma_change = chroma_change.repeat_interleave(2, -2).repeat_interleave(2, -1)
            cb, cr = pad(chroma_change, (0, width % 2, 0, height % 2)).unbind(1)
            rgb = [luma_change[:, 0] + part for part in (1.402 * cr, -0.34414 * cb - 0.71414 * cr, 1.772 * cb)]
            return x + (torch.stack(rgb, dim=1) / 127.5).to(x.dtype)

    def _tables(self, table: str, dtype: torch.dtype, device: torch.device) -> Tables:
        """Returns the DCT and the steps of the quality. Those of all qualities are kept on the device, for all operators."""

        def make() -> Tables:
            return _dct().to(dtype).to(device), quantisation(table).to(dtype).to(device)

        dct, steps = remember(_TABLES, (table, dtype, device), make, 16)
        return dct, steps[self.quality].view(-1, 1, 1, 1, 8, 8)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns luma and chroma of an image in [-1, 1], in levels around 0, not rounded."""
    r, g, b = (127.5 * x - 0.5).unbind(1)  # level − 128
    luma = 0.299 * r + 0.587 * g + 0.114 * b
    return luma.unsqueeze(1), torch.stack([(b - luma) / 1.772, (r - luma) / 1.402], dim=1)


def _mean(chroma: Tensor) -> Tensor:
    """Returns `halve` without rounding."""
    height, width = chroma.shape[-2:]
    return avg_pool2d(pad(chroma, (0, -width % 16, 0, height % 2), mode="replicate"), 2)


def _into_cells(plane: Tensor, measured: Tensor, tables: Tables, exact: bool | Tensor, size: Size) -> Tensor:
    """Returns what to add to the first `size` pixels of `plane`, so that its coefficients fall into the intervals in
    which those of `measured` were rounded. Blocks beyond the image, whose content is unknown, do not change."""
    height, width = size
    bottom, right = height - height % 8, width - width % 8
    if not bottom * right:
        return plane.new_zeros(*plane.shape[:2], height, width)
    plane, measured = plane[..., :bottom, :right], measured[..., :bottom, :right]
    dct, steps = tables
    ours, theirs = (dct @ _blocks(image) @ dct.mT / 8 for image in (plane, measured))
    centre = torch.round(theirs / steps) * steps
    away = ours - centre
    # a coefficient has the variance steps²/12 in its interval; a guess with more is worse than the centre
    spread = away.square().mean(dim=(2, 3), keepdim=True)
    away = away * (steps.square() / 12 / spread.clamp(min=1e-6)).clamp(max=1)
    half = steps / 2 + ROUNDING_ERROR
    change = centre + torch.minimum(torch.maximum(away, -half), half) - ours
    if isinstance(exact, Tensor):
        exact = exact.view(-1, 1, 1, 1, 1, 1)
    return pad(_plane(dct.mT @ (change * exact) @ dct / 8), (0, width - right, 0, height - bottom))


def _blocks(plane: Tensor) -> Tensor:
    """Returns (B, C, h, w, 8, 8), with the border pixels repeated to whole blocks."""
    height, width = plane.shape[-2:]
    plane = pad(plane, (0, -width % 8, 0, -height % 8), mode="replicate")
    batch, channels, rows, columns = plane.shape
    return plane.reshape(batch, channels, rows // 8, 8, columns // 8, 8).transpose(3, 4)


def _plane(blocks: Tensor) -> Tensor:
    batch, channels, rows, columns = blocks.shape[:4]
    return blocks.transpose(3, 4).reshape(batch, channels, 8 * rows, 8 * columns)


def rgb_to_ycc(rgb: Tensor) -> tuple[Tensor, Tensor]:
    """Returns JFIF's full-range YCbCr in 8-bit levels: (B, 1, H, W) and (B, 2, H, W)."""
    r, g, b = rgb.unbind(1)
    y = _fixed(0.299) * r + _fixed(0.587) * g + _fixed(0.114) * b
    cb = 128 - _fixed(0.168735892) * r - _fixed(0.331264108) * g + 0.5 * b
    cr = 128 + 0.5 * r - _fixed(0.418687589) * g - _fixed(0.081312411) * b
    # libjpeg's offset for the chroma lies just below one half, so that 255.5 does not become 256
    return _round(y.unsqueeze(1)), _floor(torch.stack([cb, cr], dim=1) + (0.5 - 2**-16))


def ycc_to_rgb(luma: Tensor, chroma: Tensor) -> Tensor:
    y, cb, cr = luma[:, 0], chroma[:, 0] - 128, chroma[:, 1] - 128
    r = y + _round(_fixed(1.402) * cr)
    g = y + _round(-_fixed(0.34414) * cb - _fixed(0.71414) * cr)
    b = y + _round(_fixed(1.772) * cb)
    return torch.stack([r, g, b], dim=1).clamp(0, 255)


def halve(chroma: Tensor) -> Tensor:
    """Returns the mean of 2×2 pixels in whole levels: ceil(H/2) rows, and columns to the end of the last block.
    libjpeg extends the width to whole blocks before the mean, and the height after it (in `compress`)."""
    height, width = chroma.shape[-2:]
    chroma = pad(chroma, (0, -width % 16, 0, height % 2), mode="replicate")
    total = chroma[..., ::2, ::2] + chroma[..., 1::2, ::2] + chroma[..., ::2, 1::2] + chroma[..., 1::2, 1::2]
    bias = 1 + torch.arange(total.shape[-1], device=total.device, dtype=total.dtype) % 2  # no drift
    return _floor((total + bias) / 4)


def compress(plane: Tensor, tables: Tables) -> Tensor:
    """Returns a plane of any size after 8×8 DCT, quantisation and decoding, in 8-bit levels."""
    height, width = plane.shape[-2:]
    dct, steps = tables
    blocks = _blocks(plane).to(dct.dtype) - 128
    # libjpeg's integer DCT: quarters between its two passes, and eighths of a coefficient at the end
    eighths = _round(dct @ (_round(4 * (blocks @ dct.mT)) / 4))
    size = torch.floor((eighths.detach().abs() + 4 * steps) / (8 * steps))  # halves away from zero
    levels = torch.sign(eighths.detach()) * size * steps
    coefficients = eighths / 8 + (levels - eighths / 8).detach()
    blocks = _round((_round(4 * (dct.mT @ coefficients)) / 4) @ dct / 8 + 128).clamp(0, 255)
    return _plane(blocks.to(plane.dtype))[..., :height, :width]


def upsample(chroma: Tensor) -> Tensor:
    """Doubles the size with libjpeg's triangle filter, ¾ near and ¼ far pixel; narrow planes are repeated."""
    if chroma.shape[-1] <= 2:
        return chroma.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)
    rows = pad(chroma, (0, 0, 1, 1), mode="replicate")
    near, above, below = rows[..., 1:-1, :], rows[..., :-2, :], rows[..., 2:, :]
    tall = torch.stack([3 * near + above, 3 * near + below], dim=-2).flatten(-3, -2)
    columns = pad(tall, (1, 1, 0, 0), mode="replicate")
    near, left, right = columns[..., 1:-1], columns[..., :-2], columns[..., 2:]
    # two biases alternate, so that rounding has no drift
    wide = torch.stack([3 * near + left + 8, 3 * near + right + 7], dim=-1).flatten(-2)
    return _floor(wide / 16)


def quantisation(table: str) -> Tensor:
    """Returns the (101, 8, 8) steps of every quality, by the rule of the Independent JPEG Group."""
    quality = torch.arange(101).clamp(min=1).view(-1, 1)
    scale = torch.where(quality < 50, 5000 // quality, 200 - 2 * quality)
    base = torch.tensor([int(number) for number in table.split()])
    return ((base * scale + 50) // 100).clamp(1, 255).view(-1, 8, 8).double()


def _dct() -> Tensor:
    """Returns √8 times the orthonormal (8, 8) DCT-II, with the small errors of libjpeg's constants: the algorithm of
    Loeffler, Ligtenberg and Moschytz (1989) with constants of 13 bits, applied to the eight unit vectors."""
    c = partial(_fixed, bits=13)
    x = torch.eye(8, dtype=torch.float64)
    s0, s1, s2, s3 = x[:4] + x[4:].flip(0)
    d0, d1, d2, d3 = x[:4] - x[4:].flip(0)
    even, odd = s0 - s3, s1 - s2
    turned = c(0.541196100) * (even + odd)
    shared = c(1.175875602) * (d0 + d1 + d2 + d3)
    outer, inner = -c(0.899976223) * (d0 + d3), -c(2.562915447) * (d1 + d2)
    left, right = shared - c(1.961570560) * (d1 + d3), shared - c(0.390180644) * (d0 + d2)
    return torch.stack(
        [
            s0 + s1 + s2 + s3,
            c(1.501321110) * d0 + outer + right,
            turned + c(0.765366865) * even,
            c(3.072711026) * d1 + inner + left,
            s0 - s1 - s2 + s3,
            c(2.053119869) * d2 + inner + right,
            turned - c(1.847759065) * odd,
            c(0.298631336) * d3 + outer + left,
        ]
    )


def _fixed(value: float, bits: int = 16) -> float:
    """Returns a constant as libjpeg's fixed-point arithmetic has it."""
    return round(value * 2**bits) / 2**bits


def _floor(x: Tensor) -> Tensor:
    return x + (torch.floor(x) - x).detach()


def _round(x: Tensor) -> Tensor:
    """Rounds half up, as libjpeg; the gradient passes."""
    return x + (torch.floor(x + 0.5) - x).detach()
