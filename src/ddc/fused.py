"""Layers of a U-Net that use the kernels of `ddc.kernels` on a GPU.

Each layer can still be computed in the plain way. This happens where the kernels cannot be used, and for the rest of the
process once they have failed or computed something else.
"""

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddc.errors import shorten
from ddc.networks import GroupNorm, ResidualBlock

logger = logging.getLogger("ddc")

VARIABLE = "DDC_KERNELS"  # "0" turns the fused kernels and CUDA graphs off
DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of the kernels
LARGEST_PICTURE = 2**31  # values of one picture in one layer; the kernels count them in 32 bits
LARGEST_TILE = 128  # channels that the kernels take at a time, of whole groups
EIGHT_BIT_CAPABILITY = (9, 0)  # the least compute capability of GPUs with matrix products in FP8 as they are used here
TOLERANCE = 0.02  # how far a layer may be from the plain way: several times the rounding of bfloat16


def fuse(network: nn.Module, eight_bits: bool = False) -> nn.Module:
    """The network with its convolutions, normalisations and residual blocks run by `ddc.kernels`, or in 8 bits."""
    kinds: dict[Any, list[Any]] = {}
    for block in _fuse_layers(network):
        if eight_bits:
            use_eight_bits(block)
        kinds.setdefault((block.projection.in_features, block.projection.bias is None, block.activated), []).append(
            block
        )
    for blocks in kinds.values():
        table = TimeTable([block.projection for block in blocks], blocks[0].activated)
        for number, block in enumerate(blocks):
            block.table = partial(table, number)
    return network


def _fuse_layers(network: Any) -> Iterator[Any]:
    """Replace the layers. Yields the residual blocks."""
    if isinstance(getattr(network, "conv_act", None), nn.SiLU) and _takes(network.conv_norm_out):
        network.conv_act = nn.Identity()
        network.conv_norm_out.__class__ = FusedNormSiLU
    for name, child in network.named_children():
        if _is_plain_resnet(child):
            setattr(network, name, FusedResnetBlock(child))
            yield getattr(network, name)
        elif type(child) is ResidualBlock and _takes(child.norm1):
            child.__class__ = FusedResidualBlock
            yield child
        elif _takes(child):
            child.__class__ = FusedNorm
        elif type(child) is nn.Conv2d and child.bias is not None and child.padding_mode == "zeros":
            child.__class__ = FusedConv
        else:
            yield from _fuse_layers(child)


def _takes(norm: Any) -> bool:
    """Whether it is a normalisation whose groups the kernels can take."""
    return type(norm) is GroupNorm and norm.affine and math.lcm(norm.num_channels // norm.num_groups, 8) <= LARGEST_TILE


def _is_plain_resnet(module: Any) -> bool:
    """Whether it is diffusers' residual block without any of its rarer options."""
    return (
        type(module).__name__ == "ResnetBlock2D"
        and isinstance(module.nonlinearity, nn.SiLU)
        and module.time_embedding_norm in ("default", "scale_shift")
        and module.time_emb_proj is not None
        and module.output_scale_factor == 1
        and _takes(module.norm1)
        and _takes(module.norm2)
    )


@cache
def can_compile() -> bool:
    """Whether kernels can be compiled for the GPU: that needs Triton, and Triton a C compiler."""
    from torch.utils._triton import has_triton

    return has_triton() and any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def can_fuse(device: torch.device) -> bool:
    """Whether the fused kernels are wanted and can be compiled for the device, and have not failed."""
    return os.environ.get(VARIABLE) != "0" and not FAILURES and _capability(device) >= (8, 0) and can_compile()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_eight_bits(device: torch.device) -> bool:
    """Whether convolutions can be computed in FP8 on the device."""
    return can_fuse(device) and _capability(device) >= EIGHT_BIT_CAPABILITY


def usable(x: Tensor) -> bool:
    """Whether the kernels can take x."""
    if torch.compiler.is_compiling() or x.dtype not in DTYPES:
        return False
    return x.numel() // len(x) < LARGEST_PICTURE and can_fuse(x.device)


def needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


FAILURES: list[str] = []  # why the kernels are not used any more


def give_up(why: Any) -> None:
    if not FAILURES:
        logger.warning("the plain layers are used instead of fused kernels, which are faster (%s)", shorten(why))
    FAILURES.append(str(why))


def guarded(layer: Any, fused: Callable[..., Tensor], plain: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
    """What the kernels compute. With the first batch of each size it is compared with the plain way, which is used from then
    on if both differ.

    layer: its `seen` are the sizes for which it was compared
    """
    if FAILURES:
        return plain(x, *rest)
    found = fused(x, *rest)
    size = fused.__name__, x.dtype, needs_gradient(x), *x.shape[:2], (x[0, 0].numel() - 1).bit_length()
    if size in layer.seen or is_recording(x):
        return found
    expected = plain(x, *rest)
    same = agree(found, expected, layer.tolerance)
    if same and needs_gradient(x):
        of_found, of_expected = _gradients((found, expected), x)
        same = agree(of_found, of_expected)
    if not same:
        give_up(f"{type(layer).__name__} computes something else for {tuple(x.shape)}")
        return expected
    layer.seen.add(size)
    return found


def _gradients(results: Sequence[Tensor], x: Tensor) -> Iterator[Tensor]:
    """Of the results in some direction; they can still be differentiated. Not in that of a result itself: a normalised
    picture keeps its length, so that its gradient there is nothing but rounding."""
    direction = results[-1].detach().cos()
    for result in results:
        yield torch.autograd.grad(result, x, direction, retain_graph=True)[0]


def is_recording(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def agree(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether both are the same but for rounding; a plain result that is not finite says nothing."""
    size = torch.linalg.vector_norm(expected, dtype=torch.float32)
    error = torch.linalg.vector_norm(found - expected, dtype=torch.float32)
    same = error <= tolerance * size + 1e-6
    return found.shape == expected.shape and bool(same | ~size.isfinite())


class TimeTable:
    """The projections of the time for all blocks of a network: one product of matrices instead of one for each block."""

    def __init__(self, layers: Sequence[nn.Linear], activated: bool) -> None:
        self.sizes, self.activated = [layer.out_features for layer in layers], activated
        self.weight = torch.cat([layer.weight.detach() for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        for layer, part in zip(layers, self.weight.split(self.sizes), strict=True):
            layer.weight.data = part  # so that it is in memory once

    def __call__(self, number: int, time: Tensor) -> Tensor:
        """The projection for one block. `time` is the same tensor for all of them, and keeps those of the others."""
        made = time.__dict__.setdefault("projections", {})
        if self not in made:
            given = time if self.activated else F.silu(time)
            made[self] = F.linear(given, self.weight, self.bias).split(self.sizes, 1)
        return made[self][number]


class FusedFunctions(TorchFunctionMode):
    """While this is entered, `torch.cat` also sums for a normalisation that follows, and `interpolate` copies wide words."""

    seen: ClassVar[set[Any]] = set()
    tolerance = TOLERANCE

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat and args and len(args[0]) == 2 and kwargs.get("dim", args[-1]) == 1:
            a, b = args[0]
            if a.ndim == 4 and a.dtype == b.dtype and usable(a) and not needs_gradient(a) and not needs_gradient(b):
                return guarded(self, _joined, lambda *both: torch.cat(both, 1), a, b)
        known = kwargs.get("scale_factor"), kwargs.get("mode")
        if func is F.interpolate and known == (2.0, "nearest") and not needs_gradient(args[0]):
            return guarded(self, doubled, lambda x: func(x, **kwargs), args[0])
        return func(*args, **kwargs)


def _joined(a: Tensor, b: Tensor) -> Tensor:
    from ddc import kernels

    known = hasattr(a, "channel_sums") and hasattr(b, "channel_sums")
    return kernels.concatenate(a, b) if known or a[0, 0].numel() > kernels.FEW_PIXELS else kernels.joined(a, b)


def doubled(x: Tensor) -> Tensor:
    """Each pixel four times: nearest neighbours at twice the size, channels last."""
    from ddc import kernels

    wide = kernels.in_words(x.movedim(1, -1).contiguous())  # (B, H, W, C)
    batch, height, width, words = wide.shape
    wide = wide[:, :, None, :, None].expand(batch, height, 2, width, 2, words)
    return wide.reshape(batch, 2 * height, 2 * width, words).view(x.dtype).movedim(-1, 1)


class Fused:
    """What the fused layers share. Their classes replace those of plain layers."""

    tolerance = TOLERANCE

    @cached_property
    def seen(self) -> set[Any]:
        return set()


class FusedNorm(Fused, GroupNorm):
    """A normalisation in few passes."""

    silu = False

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        return guarded(self, self._fused, self._plain, x)

    def _plain(self, x: Tensor) -> Tensor:
        h = GroupNorm.forward(self, x)
        return F.silu(h) if self.silu else h

    def _fused(self, x: Tensor) -> Tensor:
        from ddc import kernels

        return kernels.normalise(x, self, silu=self.silu)


class FusedNormSiLU(FusedNorm):
    """A normalisation and SiLU."""

    silu = True


class FusedConv(Fused, nn.Conv2d):
    """A convolution whose bias is added together with the sums for a normalisation that follows."""

    def forward(self, x: Tensor) -> Tensor:
        return guarded(self, self._fused, super().forward, x)

    def _fused(self, x: Tensor) -> Tensor:
        from ddc import kernels

        h = kernels.packed(without_bias(self, x))
        return kernels.add(h, self.bias, out=None if needs_gradient(h) else h)


class FusedResidualBlock(Fused, ResidualBlock):
    """The residual block of a CompactUNet."""

    activated = True  # the time has gone through SiLU
    table: Any = None

    @property
    def projection(self) -> nn.Linear:
        return self.time

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return guarded(self, self._fused, super().forward, x, emb)

    def _fused(self, x: Tensor, emb: Tensor) -> Tensor:
        from ddc import kernels

        time = self.table(emb)
        h = without_bias(self.conv1, kernels.normalise(x, self.norm1))
        h = without_bias(self.conv2, kernels.normalise(h, self.norm2, self.conv1.bias, time))
        return kernels.add(h, self.conv2.bias, x)  # type: ignore[arg-type]


class FusedResnetBlock(Fused, nn.Module):
    """diffusers' ResnetBlock2D."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block: Any = block
        bias = block.conv2.bias
        if block.conv_shortcut is not None and block.conv_shortcut.bias is not None:
            bias = bias + block.conv_shortcut.bias
        self.bias: Tensor
        self.register_buffer("bias", bias)
        self.projection: Any = block.time_emb_proj
        self.activated = block.skip_time_act
        self.table: Any = None

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        return guarded(self, self._fused, self.block, x, temb)

    def _fused(self, x: Tensor, temb: Tensor) -> Tensor:
        from ddc import kernels

        block = self.block
        h = kernels.normalise(x, block.norm1)
        resample = block.upsample or block.downsample
        if resample is not None:
            x, h = resample(x), resample(h)
        h = without_bias(block.conv1, h)
        time = self.table(temb)
        if block.time_embedding_norm == "scale_shift":
            h = kernels.normalise(h, block.norm2, block.conv1.bias, time)
        else:
            h = kernels.normalise(h, block.norm2, block.conv1.bias + time)
        if block.conv_shortcut is not None:
            x = without_bias(block.conv_shortcut, x)
        return kernels.add(without_bias(block.conv2, h), self.bias, x)


def without_bias(conv: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)


# ---------------------------------------------------------------------------------------------------------
# FP8


def use_eight_bits(block: Any) -> None:
    """Let a fused residual block compute its 3×3 convolutions in FP8, if their channels fit the kernels."""
    kinds: dict[type, type] = {FusedResidualBlock: EightBitResidualBlock, FusedResnetBlock: EightBitResnetBlock}
    layers = block.block if type(block) is FusedResnetBlock else block
    convs = (layers.conv1, layers.conv2)
    usual = ((3, 3), (1, 1), (1, 1), (1, 1), 1)
    if all((c.kernel_size, c.stride, c.padding, c.dilation, c.groups) == usual for c in convs) and not any(
        c.in_channels % 16 or c.out_channels % 16 for c in convs
    ):
        from ddc import kernels_fp8

        block.__class__ = kinds[type(block)]
        block.weights1, block.weights2 = (kernels_fp8.Weights(conv) for conv in convs)


class EightBits:
    """What residual blocks in FP8 share. Their gradients are those of half precision."""

    tolerance = 0.1  # 8 bits round each number by up to a sixteenth
    weights1: Any
    weights2: Any

    @cached_property
    def scales(self) -> dict[str, float]:
        """Of the inputs of both convolutions, chosen when the block first runs."""
        return {}

    def normalise(self, which: str, x: Tensor, norm: Any, modulation: Tensor | None = None, size: int = 0) -> Any:
        from ddc import kernels, kernels_fp8

        if which not in self.scales:
            self.scales[which] = kernels_fp8.scale_for(kernels.normalise(x, norm, None, modulation))
        return kernels_fp8.normalise(x, norm, self.scales[which], modulation, size)


class EightBitResidualBlock(EightBits, FusedResidualBlock):
    """The residual block of a CompactUNet, in FP8."""

    def _fused(self, x: Tensor, emb: Tensor) -> Tensor:
        from ddc import kernels_fp8

        if needs_gradient(x):
            return super()._fused(x, emb)
        h = self.normalise("first", x, self.norm1)
        h = kernels_fp8.convolve(h, self.weights1, self.conv1.bias, None, x.dtype)
        h = self.normalise("second", h, self.norm2, self.table(emb))
        return kernels_fp8.convolve(h, self.weights2, self.conv2.bias, x, x.dtype)  # type: ignore[arg-type]


class EightBitResnetBlock(EightBits, FusedResnetBlock):
    """diffusers' ResnetBlock2D, in FP8."""

    def _fused(self, x: Tensor, temb: Tensor) -> Tensor:
        from ddc import kernels_fp8

        block = self.block
        if needs_gradient(x):
            return super()._fused(x, temb)
        size = kernels_fp8.DOUBLED if block.upsample else kernels_fp8.HALVED if block.downsample else kernels_fp8.SAME
        h = self.normalise("first", x, block.norm1, None, size)
        time = self.table(temb)
        shifted = block.time_embedding_norm != "scale_shift"
        bias = block.conv1.bias + time if shifted else block.conv1.bias
        h = kernels_fp8.convolve(h, self.weights1, bias, None, x.dtype)
        h = self.normalise("second", h, block.norm2, None if shifted else time)
        resample = block.upsample or block.downsample
        if resample is not None:
            x = resample(x)
        if block.conv_shortcut is not None:
            x = without_bias(block.conv_shortcut, x)
        return kernels_fp8.convolve(h, self.weights2, self.bias, x, x.dtype)
