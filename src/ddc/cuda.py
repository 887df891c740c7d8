"""A U-Net prepared for a GPU: compiled with `torch.compile`, or with fused kernels and CUDA graphs.

A CUDA graph is the list of a network's kernels, recorded once: with a few pictures, launching kernels one by one takes
longer than running them. Compiling takes minutes for each batch size, recording seconds. The kernels and graphs are an
experiment, turned on with DDC_KERNELS=1.
"""

import contextlib
import copy
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddc.networks import GroupNorm, ResidualBlock, run_unet, shorten, unet_size_multiple, write_out_norms

logger = logging.getLogger("ddc")

Network = Callable[[Tensor, Tensor], Tensor]
RECORDED_BATCH = 64  # up to this batch size, launching kernels may cost more than running them
COMPILED_GRAPH_BATCH = 4  # the same for compiled networks, which have fewer kernels
GRADIENT_BATCH = 4  # pictures whose activations are kept at once for a gradient
VARIABLE = "DDC_KERNELS"  # "1" turns on the fused kernels and CUDA graphs, which are an experiment
LARGEST_PICTURE = 2**31  # values of one picture in one layer; the kernels count them in 32 bits


class FastUNet(nn.Module):
    """A U-Net for a GPU and one precision, channels last. Its weights are not trained.

    For pictures of `size` it is prepared further, after `patience` calls with one batch size: cuDNN searches for the fastest
    convolutions, and the network is recorded as a CUDA graph if `graphs` is true, or compiled if `sizes` names batch sizes.
    """

    def __init__(
        self, unet: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32, size: int = 256
    ) -> None:
        super().__init__()
        self.config = unet.config
        self.size_multiple = unet_size_multiple(unet)
        self.dtype, self.size = dtype, size
        self.sizes: tuple[int, ...] = ()
        self.graphs, self.autotune, self.patience = False, False, 0
        self._prepared: dict[Any, Network] = {}
        self._calls: Counter[Any] = Counter()
        module = copy.deepcopy(unet).to(device=device, dtype=dtype).eval().requires_grad_(False)
        module = write_out_norms(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module = fuse(module) if experimental() else module

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        x = x.to(self.dtype).contiguous(memory_format=torch.channels_last)
        gradient = torch.is_grad_enabled() and x.requires_grad
        ready = (self.graphs or bool(self.sizes)) and tuple(x.shape[-2:]) == (self.size, self.size)
        if ready:
            self._calls[len(x), gradient] += 1
            ready = self._calls[len(x), gradient] > self.patience  # a few pictures are restored before preparing pays
        if ready and self.sizes:
            return self._compiled(len(x), gradient)(x, times) if gradient else self._in_sizes(x, times)
        if gradient and self.graphs and len(x) > GRADIENT_BATCH:
            return _InParts.apply(x, times.expand(len(x)), self)
        if ready and len(x) <= RECORDED_BATCH:
            return self._graph(x, times, gradient)(x, times)
        return self._run(x, times)

    def _run(self, x: Tensor, times: Tensor) -> Tensor:
        with FusedFunctions() if usable(x) else contextlib.nullcontext():
            return run_unet(self.module, x, times)

    def _graph(self, x: Tensor, times: Tensor, gradient: bool) -> Network:
        """The network recorded for batches like this one."""
        key = (tuple(x.shape), tuple(times.shape), times.dtype, gradient)
        if key not in self._prepared:
            searched = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True  # seconds for each size, for which there is enough work from here on
            try:
                self._prepared[key] = (recorded_with_gradient if gradient else Recorded)(self._run, x, times)
            except RuntimeError as error:  # too little memory, or a network that waits for the device
                torch.cuda.empty_cache()
                logger.warning("the network runs without a CUDA graph (%s)", shorten(error))
                self._prepared[key] = self._run
            finally:
                torch.backends.cudnn.benchmark = searched
        return self._prepared[key]

    def _in_sizes(self, x: Tensor, times: Tensor) -> Tensor:
        """The compiled network on parts of the sizes that it was compiled for."""
        times = times.expand(len(x))
        parts = []
        for start, stop, size in chunks(len(x), self.sizes):
            part, at = x[start:stop], times[start:stop]
            if stop - start < size:
                index = torch.arange(size, device=x.device).clamp(max=stop - start - 1)
                part, at = part[index], at[index]
            part = part.contiguous(memory_format=torch.channels_last)
            parts.append(self._compiled(size)(part, at.contiguous())[: stop - start])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _compiled(self, size: int, gradient: bool = False) -> Network:
        """The network compiled for batches of this size."""
        if (size, gradient) not in self._prepared:
            torch.backends.cudnn.benchmark = True
            graphs = size <= COMPILED_GRAPH_BATCH and not gradient
            if self.autotune:
                mode = "max-autotune" if graphs else "max-autotune-no-cudagraphs"
            else:
                mode = "reduce-overhead" if graphs else "default"
            logger.warning("compiling for batches of %d: minutes the first time, seconds afterwards", size)
            compiled = torch.compile(partial(run_unet, self.module), mode=mode, dynamic=False)

            def call(x: Tensor, times: Tensor) -> Tensor:
                with torch.no_grad():
                    torch.compiler.cudagraph_mark_step_begin()
                    out = compiled(x, times)
                    return out.clone() if graphs else out  # the graph's own memory is written again next time

            self._prepared[size, gradient] = compiled if gradient else call
        return self._prepared[size, gradient]


def chunks(n: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut n images into (start, stop, size) of compiled sizes.

    A rest that fills half of the largest size is padded to it, which costs less than one at a time.
    """
    small, large = min(sizes), max(sizes)
    start = 0
    while start < n:
        left = n - start
        size = large if left >= large or (2 * left >= large and left > small) else small
        stop = min(n, start + size)
        yield start, stop, size
        start = stop


# ---------------------------------------------------------------------------------------------------------
# CUDA graphs, and gradients


class Recorded:
    """A network as a CUDA graph, for batches of one shape. All graphs share their memory: one runs at a time."""

    lock = threading.Lock()

    def __init__(self, run: Network, x: Tensor, times: Tensor) -> None:
        with self.lock, torch.inference_mode(False), torch.no_grad(), torch.cuda.device(x.device):
            self.x, self.times = x.clone(), times.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # kernels are chosen and compiled before they are recorded
                run(self.x, self.times)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=graph_memory(x.device), capture_error_mode="thread_local"):
                self.out = run(self.x, self.times)

    def __call__(self, x: Tensor, times: Tensor) -> Tensor:
        with self.lock, torch.no_grad(), torch.cuda.device(self.x.device):
            self.x.copy_(x)
            self.times.copy_(times)
            self.graph.replay()
            return self.out.clone()  # the graph's own memory is written again next time


@cache
def graph_memory(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle()


def recorded_with_gradient(run: Network, x: Tensor, times: Tensor) -> Network:
    """The same, and its gradient as a second graph. Each forward pass must have its backward pass before the next."""
    with torch.cuda.device(x.device):
        sample = (x.detach().clone().requires_grad_(), times.clone())
        recorded: Any = torch.cuda.make_graphed_callables(run, sample)
    return lambda x, times: recorded(x, times).clone()


class _InParts(torch.autograd.Function):
    """The network and its gradient, for which only a few pictures' activations are kept at once, and computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: Tensor, unet: FastUNet) -> Tensor:
        ctx.save_for_backward(x, times)
        ctx.unet = unet
        return unet(x, times)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, times = ctx.saved_tensors
        made = []
        with torch.enable_grad():
            for first in range(0, len(x), GRADIENT_BATCH):
                part = slice(first, first + GRADIENT_BATCH)
                given = x[part].detach().requires_grad_()
                made += torch.autograd.grad(ctx.unet(given, times[part]), given, gradient[part])
        return torch.cat(made), None, None


# ---------------------------------------------------------------------------------------------------------
# fused kernels


def fuse(network: nn.Module) -> nn.Module:
    """The network with its convolutions, normalisations and residual blocks run by `ddc.kernels`, where these can be used."""
    if isinstance(getattr(network, "conv_act", None), nn.SiLU) and isinstance(network.conv_norm_out, GroupNorm):
        network.conv_act = nn.Identity()
        network.conv_norm_out.__class__ = FusedNormSiLU
    for name, child in network.named_children():
        if _is_plain_resnet(child):
            setattr(network, name, FusedResnetBlock(child))
        elif type(child) is ResidualBlock:
            child.__class__ = FusedResidualBlock
        elif type(child) is GroupNorm and child.weight is not None:
            child.__class__ = FusedNorm
        elif type(child) is nn.Conv2d and child.bias is not None and child.padding_mode == "zeros":
            child.__class__ = FusedConv
        else:
            fuse(child)
    return network


def _is_plain_resnet(module: Any) -> bool:
    """Whether it is diffusers' residual block without any of its rarer options."""
    return (
        type(module).__name__ == "ResnetBlock2D"
        and isinstance(module.nonlinearity, nn.SiLU)
        and module.time_embedding_norm in ("default", "scale_shift")
        and module.time_emb_proj is not None
        and module.output_scale_factor == 1
    )


@cache
def can_compile() -> bool:
    """Whether kernels can be compiled for the GPU: that needs Triton, and Triton a C compiler."""
    from torch.utils._triton import has_triton

    return has_triton() and any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def experimental() -> bool:
    """Whether the fused kernels and CUDA graphs are turned on."""
    return os.environ.get(VARIABLE) == "1"


def usable(x: Tensor) -> bool:
    """Whether the kernels can take x: on CUDA, where no gradient is needed and nothing is compiled."""
    if (
        torch.compiler.is_compiling()
        or not x.is_cuda
        or not experimental()
        or (torch.is_grad_enabled() and x.requires_grad)
    ):
        return False
    return can_compile() and x.numel() // len(x) < LARGEST_PICTURE


class FusedFunctions(TorchFunctionMode):
    """While this is entered, `torch.cat` also sums for a normalisation that follows, and `interpolate` copies wide words."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat and len(args[0]) == 2 and kwargs.get("dim", args[-1]) == 1:
            a, b = args[0]
            if a.ndim == 4 and a.dtype == b.dtype and usable(a) and usable(b):
                from ddc import kernels

                if a[0, 0].numel() > kernels.FEW_PIXELS:  # the sums of a smaller one are not needed
                    return kernels.concatenate(a, b)
        if func is F.interpolate and (kwargs.get("scale_factor"), kwargs.get("mode")) == (2.0, "nearest"):
            return doubled(args[0])
        return func(*args, **kwargs)


def doubled(x: Tensor) -> Tensor:
    """Each pixel four times: nearest neighbours at twice the size, channels last."""
    rows = x.movedim(1, -1).contiguous()  # (B, H, W, C)
    wide = rows.view(torch.int64) if rows.shape[-1] * rows.element_size() % 8 == 0 else rows
    batch, height, width, words = wide.shape
    wide = wide[:, :, None, :, None].expand(batch, height, 2, width, 2, words)
    return wide.reshape(batch, 2 * height, 2 * width, words).view(x.dtype).movedim(-1, 1)


class FusedNorm(GroupNorm):
    """A normalisation in few passes."""

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        if scale is not None or not usable(x):
            return super().forward(x, scale, shift)
        from ddc import kernels

        return kernels.normalise(x, self, silu=False)


class FusedNormSiLU(GroupNorm):
    """A normalisation and SiLU."""

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        if scale is not None or not usable(x):
            return F.silu(super().forward(x, scale, shift))
        from ddc import kernels

        return kernels.normalise(x, self)


class FusedConv(nn.Conv2d):
    """A convolution whose bias is added together with the sums for a normalisation that follows."""

    def forward(self, x: Tensor) -> Tensor:
        if not usable(x):
            return super().forward(x)
        from ddc import kernels

        h = kernels.packed(without_bias(self, x))
        return kernels.add(h, self.bias, out=h)


class FusedResidualBlock(ResidualBlock):
    """The residual block of a CompactUNet."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        if not usable(x):
            return super().forward(x, emb)
        from ddc import kernels

        h = without_bias(self.conv1, kernels.normalise(x, self.norm1))
        h = without_bias(self.conv2, kernels.normalise(h, self.norm2, self.conv1.bias, self.time(emb)))
        return kernels.add(h, self.conv2.bias, x)  # type: ignore[arg-type]


class FusedResnetBlock(nn.Module):
    """diffusers' ResnetBlock2D."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block: Any = block
        bias = block.conv2.bias
        if block.conv_shortcut is not None and block.conv_shortcut.bias is not None:
            bias = bias + block.conv_shortcut.bias
        self.bias: Tensor
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        block = self.block
        if not usable(x):
            return block(x, temb)
        from ddc import kernels

        h = kernels.normalise(x, block.norm1)
        resample = block.upsample or block.downsample
        if resample is not None:
            x, h = resample(x), resample(h)
        h = without_bias(block.conv1, h)
        time = block.time_emb_proj(temb if block.skip_time_act else F.silu(temb))
        if block.time_embedding_norm == "scale_shift":
            h = kernels.normalise(h, block.norm2, block.conv1.bias, time)
        else:
            h = kernels.normalise(h, block.norm2, block.conv1.bias + time)
        if block.conv_shortcut is not None:
            x = without_bias(block.conv_shortcut, x)
        return kernels.add(without_bias(block.conv2, h), self.bias, x)


def without_bias(conv: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
