"""Networks prepared for one device.

On CUDA: half precision where it agrees with float32, channels last, fused kernels and CUDA graphs (`ddc.cuda`), or
torch.compile with a cache on disk, and a batch size chosen for the card's memory. On the CPU: Winograd's 3×3
convolutions in float32.
"""

import copy
import logging
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc.cuda import FastUNet
from ddc.errors import UserError
from ddc.fused import FAILURES, can_compile, can_fuse
from ddc.latents import LatentPrior
from ddc.networks import GroupNorm, ResidualBlock, run_unet
from ddc.perceptual import cache_folder
from ddc.priors import DataConsistency, Prior

logger = logging.getLogger("ddc")

DType = Literal["auto", "float8", "float16", "bfloat16", "float32"]
LATENT_BATCH = 4  # pictures at once with a latent prior, whose solvers keep the decoder's activations
LARGEST_BATCH = 16  # a larger batch only needs more memory, because the chip is busy
PICTURE_MEMORY = 2**30  # bytes for each picture of the usual size, with a network of the shipped size
PATIENCE = 1000  # network calls that take about as long as compiling: 200 restorations of a batch
GRAPH_PATIENCE = 50  # network calls, ten restorations of a batch, after which preparing kernels and graphs pays
TRAINED_SIZE = 256  # pixels; the networks are trained on crops of this side, and compiled for it on CUDA
CPU_TILE = 512  # nothing is compiled on the CPU, and fewer tile borders are faster and better


def pick_device(name: str | torch.device) -> torch.device:
    """A device that works, by name; "auto" is CUDA (one for each process of a launcher), else MPS, else the CPU."""
    if str(name) in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if str(name) == "auto":
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises any of these
        raise UserError(f"the device {str(name)!r} is not available; expected auto, cpu, cuda, cuda:1 or mps") from None
    return device


def default_tile(device: torch.device) -> int:
    """The side of a tile, if none was chosen."""
    return CPU_TILE if device.type == "cpu" else TRAINED_SIZE


class FastModels(NamedTuple):
    """The result of `accelerate_models`."""

    prior: Prior
    network: DataConsistency | None
    dtype: torch.dtype
    batch: int  # pictures to restore at once
    compiled: bool


def accelerate_models(
    prior: Prior,
    network: DataConsistency | None,
    device: str | torch.device,
    *,
    dtype: DType = "auto",
    compile: bool | None = None,
    autotune: bool = False,
    batch: int | None = None,
    size: int = 256,
    check: bool = True,
) -> FastModels:
    """Copies of the prior and the network, prepared for `device`.

    dtype: "auto" is the fastest precision of 16 bits that agrees with float32 (on CUDA; elsewhere it is float32); "float8" is
        float16 with 3×3 convolutions in FP8, which needs a GPU of compute capability 9.0, and prints how well it agrees
    compile: True compiles at once, instead of using fused kernels and CUDA graphs. Where these cannot be used, None compiles
        on CUDA after so many calls that it pays, if a compiler is available. On the CPU compiling gains too little and is
        refused
    autotune: let the compiler search for faster kernels, which takes minutes more
    batch: pictures at once; None chooses by the card's memory (1 without a card)
    size: the height and width that compiled networks are made for; other sizes run uncompiled
    check: whether to use float16 instead of float8 if its pictures differ too much from those of float32
    """
    device = torch.device(device)
    if isinstance(prior, LatentPrior) and device.type == "cuda":
        return accelerate_latents(prior, device, dtype, bool(compile or autotune), batch)
    if device.type != "cuda":
        if dtype not in ("auto", "float32"):
            raise UserError(f"the fast path of {device.type} works in float32; {dtype} needs a CUDA device")
        if compile or autotune:
            raise UserError(f"the fast path compiles for CUDA devices, not for {device.type}; leave that out")
        if device.type == "cpu":
            torch.set_num_threads(cpu_threads())
        wrap = cpu_unet if device.type == "cpu" else lambda unet: copy.deepcopy(unet).to(device)
        return FastModels(*rewrap(prior, network, wrap), torch.float32, batch or 1, False)

    from ddc.precision import networks_in  # which only a GPU needs

    compiling = bool(compile or autotune)
    fast = networks_in(dtype, prior, network, device, size, compiling, check)
    eight_bits, chosen = fast[0].unet.eight_bits, fast[0].unet.dtype
    batch = batch or choose_batch(*fast, device, size)
    kernels, patience = not compiling and can_fuse(device), 0
    if kernels:
        patience = 0 if eight_bits else GRAPH_PATIENCE  # in 8 bits every picture is restored in the same way
    elif compile is None and not autotune:
        patience = PATIENCE
        if not can_compile():
            logger.info("Triton or a C compiler is missing: the fast path runs without torch.compile")
        compile = can_compile() and not FAILURES  # which the compiler may share
    if compile or autotune:
        prepare_compiler()
    for part in fast:
        if part is not None and isinstance(part.unet, FastUNet):
            unet = part.unet
            unet.kernels, unet.graphs, unet.patience = kernels, kernels, patience
            unet.sizes, unet.autotune = tuple(sorted({1, batch})) if compile or autotune else (), autotune
    return FastModels(*fast, chosen, batch, bool(compile or autotune))


def accelerate_latents(
    prior: LatentPrior, device: torch.device, dtype: DType, compile: bool, batch: int | None
) -> FastModels:
    """A copy of a latent prior for CUDA, channels last. It stays in float32, in which its solvers fit latents."""
    if dtype not in ("auto", "float32") or compile:
        raise UserError("a latent prior works in float32 and is not compiled; leave the precision and --compile out")
    copied = copy.deepcopy(prior).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return FastModels(copied, None, torch.float32, batch or LATENT_BATCH, False)


def cpu_unet(unet: nn.Module) -> nn.Module:
    """A copy of a U-Net with faster convolutions and normalisations, in channels last. Gradients take the plain ones.

    Its result does not depend on the number of threads. Its parameters are shared with the given network, because
    Winograd's kernels need memory of their own.
    """
    shared = {id(p): p for p in unet.parameters() if (p.device.type, p.dtype) == ("cpu", torch.float32)}
    fast = with_winograd(copy.deepcopy(unet, shared).cpu().float()).eval()
    for block in fast.modules():
        if isinstance(block, ResidualBlock):
            block.folded = True
        elif type(block) in (GroupNorm, nn.GroupNorm) and block.affine:
            block.__class__ = SteadyNorm
        elif type(block) is nn.Conv2d and block.kernel_size == (1, 1) == block.stride and block.groups == 1:
            block.__class__ = PixelwiseConv
    fast.channels_last = True  # type: ignore[assignment]
    return fast


@torch.no_grad()
def choose_batch(prior: Prior, network: DataConsistency | None, device: torch.device, size: int = 256) -> int:
    """The largest power of two of pictures that fit the card's free memory, by what one of them takes."""
    needed = 0
    for part in (prior, network):
        if part is not None:
            channels = int(part.unet.config["in_channels"])  # type: ignore[index]
            x = torch.zeros(1, channels, size, size, device=device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run_unet(part.unet, x, 0)
            needed = max(needed, torch.cuda.max_memory_allocated(device) - before)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    batch = 1
    while batch < LARGEST_BATCH and 2 * batch * needed * 1.5 < free:  # compiled code keeps more at once
        batch *= 2
    return batch


def fast_unet(unet: nn.Module, device: torch.device, size: int, dtype: DType = "auto") -> nn.Module:
    """A U-Net of a solver's own network, prepared for its device. "float8" is the same as "auto"."""
    if device.type != "cuda":
        return cpu_unet(unet) if device.type == "cpu" else unet
    from ddc.precision import unet_dtype

    chosen = unet_dtype(unet, device, size) if dtype in ("auto", "float8") else getattr(torch, dtype)
    fast = FastUNet(unet, device, chosen, size)
    fast.kernels = fast.graphs = can_fuse(device)
    fast.patience = GRAPH_PATIENCE
    return fast


def prepare_device(device: torch.device) -> int:
    """Set the threads of a CPU. Returns how many pictures to restore at once with a network of the shipped size."""
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
    if device.type != "cuda":
        return 1
    fitting = torch.cuda.mem_get_info(device)[0] // PICTURE_MEMORY
    return max(1, min(LARGEST_BATCH, 1 << max(int(fitting).bit_length() - 1, 0)))


def cpu_threads() -> int:
    """Threads for the CPU: what torch would take, but no more than this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, _, period = quota.read_text().partition(" ")
        if limit != "max":
            allowed = min(allowed, max(1, round(int(limit) / int(period))))
    return min(torch.get_num_threads(), allowed)


def rewrap(
    prior: Prior, network: DataConsistency | None, wrap: Callable[[nn.Module], nn.Module]
) -> tuple[Prior, DataConsistency | None]:
    """The prior and the network with other U-Nets; everything else is shared."""

    def with_unet(part: Any) -> Any:
        clone = copy.copy(part)
        clone._modules = {**part._modules, "unet": wrap(part.unet)}
        return clone.eval()

    return with_unet(prior), None if network is None else with_unet(network)


def prepare_compiler() -> None:
    """Let compiled code outlive the process, in the user's cache, and let both networks have several sizes."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    import torch._dynamo

    config = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # its name in torch 2.6
    setattr(config, limit, max(getattr(config, limit), 64))


# ---------------------------------------------------------------------------------------------------------
# 3×3 convolutions on the CPU with a quarter of the multiplications
#
# Winograd's F(4×4, 3×3), as in Lavin and Gray (1509.09308): 6×6 windows of the picture, four pixels apart, and the
# kernel are each transformed to 36 numbers; multiplying these gives a 4×4 patch of the result, after another
# transform. The channels are summed by 36 matrix products, so that it runs at the speed of the BLAS. In float32 the
# result differs from direct convolution by about 1e-5 of its size.

# the transforms for the interpolation points 0, ±1, ±2, ∞
INPUT = torch.tensor(
    [
        [4.0, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
)
KERNEL = torch.tensor(
    [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]], dtype=torch.float64
).div(24)
OUTPUT = torch.tensor([[1.0, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]])

MIN_PATCHES = 16  # with fewer 4×4 patches, reading the transformed kernel costs more than it saves
ONES = 7  # of the 36 products, the one that is added to every pixel of a patch (the point 1, 1)
STRIP_PATCHES = 128  # patches worked on at once: their transforms stay in the cache

_memory = threading.local()


def with_winograd(module: nn.Module) -> nn.Module:
    """The module with its convolutions replaced where Winograd's algorithm is faster."""
    if WinogradConv2d.takes(module):
        return WinogradConv2d(module)  # type: ignore[arg-type]
    for name, child in module.named_children():
        setattr(module, name, with_winograd(child))
    return module


class SteadyNorm(GroupNorm):
    """A normalisation that sums each row of a picture by itself, then the rows in float64: PyTorch's own splits a picture
    among its threads, and is less exact and slower."""

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if x.ndim != 4 or (x.device.type, x.dtype) != ("cpu", torch.float32) or torch.is_grad_enabled():
            return super().normalise(x, weight, bias)
        pixels = x.permute(0, 2, 3, 1).contiguous()  # (B, H, W, C)
        squares = torch.mul(pixels, pixels, out=_buffer("squares", *pixels.shape))
        by_group = (len(x), self.num_groups, -1)
        count = x[0].numel() // self.num_groups
        one = torch.ones(1, x.shape[-1])
        mean, square = (  # a product with 1 for each row, which no thread shares with another
            (one @ part).double().sum((1, 2)).view(by_group).sum(2, keepdim=True) / count for part in (pixels, squares)
        )
        inverse = ((square - mean.square()).clamp(min=0) + self.eps).rsqrt()
        product = inverse * weight.view(1, *by_group[1:])
        offset = bias.view(1, *by_group[1:]) - mean * product
        shape = (len(x), 1, 1, x.shape[1])
        return torch.addcmul(offset.float().view(shape), pixels, product.float().view(shape)).permute(0, 3, 1, 2)


class PixelwiseConv(nn.Conv2d):
    """A 1×1 convolution as a product of matrices, whose sums do not depend on the number of threads."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.is_grad_enabled():
            return super().forward(x)
        return F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class WinogradConv2d(nn.Module):
    """A 3×3 convolution of stride 1 and padding 1; where Winograd's way cannot be taken, the plain one is."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self._kernel: Tensor | None = None  # (36, in, out), made when first needed

    @staticmethod
    def takes(module: nn.Module) -> bool:
        return (
            isinstance(module, nn.Conv2d)
            and (module.kernel_size, module.stride, module.padding) == ((3, 3), (1, 1), (1, 1))
            and (module.dilation, module.groups, module.padding_mode) == ((1, 1), 1, "zeros")
            and min(module.in_channels, module.out_channels) >= 32
        )

    def forward(self, x: Tensor) -> Tensor:
        tiles = x.shape[0] * -(-x.shape[-2] // 4) * -(-x.shape[-1] // 4)
        plain = x.device.type != "cpu" or x.dtype != torch.float32 or tiles < MIN_PATCHES
        if plain or (torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)):
            return F.conv2d(x, self.weight, self.bias, padding=1)
        if self._kernel is None:
            self._kernel = transform_kernel(self.weight)
        return winograd(x, self._kernel, self.bias)


def transform_kernel(weight: Tensor) -> Tensor:
    """(out, in, 3, 3) → (36, in, out)."""
    with torch.inference_mode(False), torch.no_grad():
        kernel = torch.einsum("ai,bj,ocij->abco", KERNEL, KERNEL, weight.double())
        return kernel.reshape(36, weight.shape[1], weight.shape[0]).float().contiguous()


def winograd(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """x (B, C, H, W) → (B, K, H, W), channels last, with a kernel from `transform_kernel`."""
    batch, channels, height, width = x.shape
    outputs = kernel.shape[2]
    rows, cols = -(-height // 4), -(-width // 4)  # of 4×4 patches
    padded = _buffer("padded", batch, 4 * rows + 2, 4 * cols + 2, channels)
    padded[:, 0].zero_(), padded[:, height + 1 :].zero_()
    padded[:, :, 0].zero_(), padded[:, :, width + 1 :].zero_()
    padded[:, 1 : height + 1, 1 : width + 1].copy_(x.permute(0, 2, 3, 1))
    per_image, per_row, per_col, _ = padded.stride()
    result = torch.empty(batch, rows, 4, cols, 4, outputs)

    def work(top: int, n: int) -> None:
        """Rows top … top + n of patches."""
        tiles = batch * n * cols
        windows = padded.as_strided(
            (6, 6, batch, n, cols, channels),
            (per_row, per_col, per_image, 4 * per_row, 4 * per_col, 1),
            padded.storage_offset() + top * 4 * per_row,
        )
        # each transform is done along the rows of the windows, then along their columns
        gathered = _buffer("a", 6, 6, batch, n, cols, channels).copy_(windows)
        half = torch.mm(INPUT, gathered.view(6, -1), out=_buffer("b", 6, 6 * tiles * channels)).view(6, 6, -1)
        transformed = torch.bmm(INPUT.expand(6, 6, 6), half, out=_buffer("a", 6, 6, tiles * channels))
        product = torch.bmm(transformed.view(36, tiles, channels), kernel, out=_buffer("b", 36, tiles, outputs))
        if bias is not None:
            product[ONES] += bias
        half = torch.mm(OUTPUT, product.view(6, -1), out=_buffer("a", 4, 6 * tiles * outputs)).view(4, 6, -1)
        patches = torch.bmm(OUTPUT.expand(4, 4, 6), half, out=_buffer("c", 4, 4, tiles * outputs))
        result[:, top : top + n].copy_(patches.view(4, 4, batch, n, cols, outputs).permute(2, 3, 0, 4, 1, 5))

    threads = torch.get_num_threads()
    strip = max(1, min(STRIP_PATCHES // (batch * cols), -(-rows // threads)))  # rows of patches at once
    _in_threads(work, [(top, min(strip, rows - top)) for top in range(0, rows, strip)], threads)
    image = result.view(batch, 4 * rows, 4 * cols, outputs)[:, :height, :width]
    return image.permute(0, 3, 1, 2)


def _in_threads(work: Callable[[int, int], None], jobs: list[tuple[int, int]], threads: int) -> None:
    """Do all jobs, each by one thread: the threads meet once, and not at each of many small products."""
    inference = torch.is_inference_mode_enabled()

    def share(number: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            for job in jobs[number::threads]:
                work(*job)

    if threads == 1 or len(jobs) == 1:
        share(0)
    else:
        list(_helpers(threads).map(share, range(min(threads, len(jobs)))))


@lru_cache(maxsize=1)
def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that each compute alone."""
    pool = ThreadPoolExecutor(count, "winograd", initializer=_compute_alone)
    started = threading.Barrier(count + 1)
    for _ in range(count):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(count)  # what the helpers set is also the default of every later thread
    return pool


def _compute_alone() -> None:
    torch.get_num_threads()  # a thread takes over the process's number when it is first asked, so ask now
    # GNU's OpenMP lets idle threads of torch's spin, on the cores that we need, unless there are more of them
    # than cores: so each helper gets some of its own, which then sleep
    torch.set_num_threads(2)
    torch.ones(1 << 18).neg_()
    torch.set_num_threads(1)


def _buffer(name: str, *shape: int) -> Tensor:
    """Memory that this thread uses again and again: fresh pages would cost as much as the arithmetic."""
    size = math.prod(shape)
    held: Tensor | None = getattr(_memory, name, None)
    if held is None or held.numel() < size:
        with torch.inference_mode(False):  # else it could not be written to outside of inference mode
            held = torch.empty(size)
        setattr(_memory, name, held)
    return held[:size].view(shape)
