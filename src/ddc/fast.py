"""The fast path: the same prior and network, made ready for one device.

On CUDA: half precision where it agrees with float32, channels last, torch.compile with a cache on disk, CUDA
graphs for small batches, and a batch chosen for the card's memory. On the CPU: float32, channels last, 3×3
convolutions by Winograd's way, and the time's scale and shift folded into the normalisation. What comes back
is called as before (`Prior.predict`, `DataConsistency`).
"""

import copy
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc.consistency import CHANNELS, DataConsistency
from ddc.errors import UserError
from ddc.images import to_unit
from ddc.networks import ResidualBlock, run_unet, unet_size_multiple, write_out_norms
from ddc.noise import Noise
from ddc.priors import Prior
from ddc.winograd import WinogradConv2d

logger = logging.getLogger("ddc")

DType = Literal["auto", "float16", "bfloat16", "float32"]
AGREEMENT = {torch.float16: 50.0, torch.bfloat16: 40.0}  # dB against float32 that a precision must reach
LARGEST_BATCH = 16  # beyond it the chip is busy and little but memory grows
PATIENCE = 1000  # calls of a network that take about as long as to compile it: 200 restorations of a batch
CUDA_GRAPH_BATCH = 4  # up to here launching kernels costs more than running them


@dataclass(frozen=True)
class FastModels:
    """What `accelerate_models` made, and how."""

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
) -> FastModels:
    """Copies of the prior and the network, ready for `device`.

    dtype: "auto" takes the fastest precision that agrees with float32 (on CUDA; elsewhere it is float32)
    compile: None is yes on CUDA, where it can be done and once there was work enough that it will pay; True is at
        once; the CPU gains too little from it and refuses
    autotune: let the compiler search for faster kernels, which takes minutes more
    batch: pictures at once; None chooses by the card's memory (1 where there is no card)
    size: the height and width that compiled networks are made for; other sizes run uncompiled
    """
    device = torch.device(device)
    if device.type != "cuda":
        if dtype not in ("auto", "float32"):
            raise UserError(f"the fast path of {device.type} works in float32; {dtype} needs a CUDA device")
        if compile or autotune:
            raise UserError(f"the fast path compiles for CUDA devices, not for {device.type}; leave that out")
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
        return FastModels(*rewrap(prior, network, CpuUNet), torch.float32, batch or 1, False)
    if device.type != "cuda":
        moved = copy.deepcopy(network).to(device) if network is not None else None
        return FastModels(copy.deepcopy(prior).to(device), moved, torch.float32, batch or 1, False)

    chosen = choose_dtype(prior, network, device, size) if dtype == "auto" else getattr(torch, dtype)
    fast = rewrap(prior, network, partial(CudaUNet, device=device, dtype=chosen, size=size))
    batch = batch or choose_batch(*fast, device, size)
    patience = PATIENCE if compile is None else 0
    if compile is None:
        compile = can_compile()
        if not compile:
            logger.info("Triton or a C compiler is missing: the fast path runs without torch.compile")
    if compile:
        prepare_compiler()
        for part in fast:
            if part is not None and isinstance(part.unet, CudaUNet):
                part.unet.sizes = tuple(sorted({1, batch}))
                part.unet.autotune, part.unet.patience = autotune, patience
    return FastModels(*fast, chosen, batch, compile)


class CpuUNet(nn.Module):
    """A U-Net for the CPU. Gradients still flow, then through plain convolutions."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.config = unet.config
        self.size_multiple = unet_size_multiple(unet)
        # the parameters are shared with the network given: Winograd's kernels take memory enough
        shared = {id(p): p for p in unet.parameters() if (p.device.type, p.dtype) == ("cpu", torch.float32)}
        self.module = _replaced(copy.deepcopy(unet, shared).cpu().float()).eval()

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return run_unet(self.module, x.contiguous(memory_format=torch.channels_last), times)


def _channels_last(module: nn.Module) -> nn.Module:
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _replaced(module: nn.Module) -> nn.Module:
    """The module with everything in it that has a faster twin replaced by that."""
    if WinogradConv2d.takes(module):
        return WinogradConv2d(module)  # type: ignore[arg-type]
    for name, child in module.named_children():
        setattr(module, name, _replaced(child))
    return FoldedBlock(module) if isinstance(module, ResidualBlock) else module


class FoldedBlock(nn.Module):
    """A residual block with fewer passes over memory.

    Where all images are at one time, its scale and shift are the normalisation's own weight and bias.
    """

    def __init__(self, block: ResidualBlock) -> None:
        super().__init__()
        self.norm1, self.conv1, self.time = block.norm1, block.conv1, block.time
        self.norm2, self.conv2 = block.norm2, block.conv2

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        grad = (
            torch.is_grad_enabled() and x.requires_grad
        )  # what is changed in place cannot be differentiated
        scale, shift = self.time(emb).chunk(2, dim=1)
        h = self.conv1(F.silu(self.norm1(x), inplace=not grad))
        if emb.shape[0] == 1:
            weight = self.norm2.weight * (1 + scale[0])
            bias = self.norm2.bias * (1 + scale[0]) + shift[0]
            h = F.group_norm(h, self.norm2.num_groups, weight, bias, self.norm2.eps)
        else:
            h = self.norm2(h) * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        h = self.conv2(F.silu(h, inplace=not grad))
        return x + h if grad else h.add_(x)


class CudaUNet(nn.Module):
    """A U-Net in one precision, channels last; compiled for the batch sizes in `sizes` and pictures of `size`, after
    `patience` calls."""

    def __init__(self, unet: nn.Module, device: torch.device, dtype: torch.dtype, size: int) -> None:
        super().__init__()
        self.config = unet.config
        self.size_multiple = unet_size_multiple(unet)
        self.dtype, self.size = dtype, size
        self.sizes: tuple[int, ...] = ()
        self.autotune, self.patience = False, 0
        module = copy.deepcopy(unet).to(device=device, dtype=dtype).eval().requires_grad_(False)
        self.module = _channels_last(write_out_norms(module))
        self._compiled: dict[int, Callable[[Tensor, Tensor], Tensor]] = {}

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        x = x.to(self.dtype).contiguous(memory_format=torch.channels_last)
        grad = torch.is_grad_enabled() and x.requires_grad
        if grad or not self.sizes or tuple(x.shape[-2:]) != (self.size, self.size):
            return run_unet(self.module, x, times)
        if self.patience > 0:  # a few pictures are restored before their code would be compiled
            self.patience -= 1
            return run_unet(self.module, x, times)
        times = times.expand(len(x))
        parts = []
        for start, stop, size in chunks(len(x), self.sizes):
            part, at = x[start:stop], times[start:stop]
            if stop - start < size:
                index = torch.arange(size, device=x.device).clamp(max=stop - start - 1)
                part, at = part[index], at[index]
            part = part.contiguous(memory_format=torch.channels_last)
            parts.append(self._call(size)(part, at.contiguous())[: stop - start])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _call(self, size: int) -> Callable[[Tensor, Tensor], Tensor]:
        if size not in self._compiled:
            # from here on there is work enough for a search among convolutions, which takes seconds for each size
            torch.backends.cudnn.benchmark = True
            graphs = size <= CUDA_GRAPH_BATCH
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

            self._compiled[size] = call
        return self._compiled[size]


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


def choose_dtype(
    prior: Prior, network: DataConsistency | None, device: torch.device, size: int = 256
) -> torch.dtype:
    """The fastest precision whose pictures agree with float32's: float16, else bfloat16, else float32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        truth = probe(
            *rewrap(prior, network, lambda u: CudaUNet(u, device, torch.float32, size)), device, size
        )
    for dtype, wanted in AGREEMENT.items():
        make = partial(CudaUNet, device=device, dtype=dtype, size=size)
        picture = probe(*rewrap(prior, network, make), device, size)
        reached = agreement(picture, truth)
        if reached >= wanted:
            logger.info("%s agrees with float32 to %.1f dB", dtype, reached)
            return dtype
        logger.info("%s reaches only %.1f dB of the %.0f wanted against float32", dtype, reached, wanted)
    return torch.float32


@torch.no_grad()
def probe(prior: Prior, network: DataConsistency | None, device: torch.device, size: int) -> Tensor:
    """The picture of a short run on a made-up measurement, to compare precisions with."""
    noise = Noise([0], device=device)
    soft = F.interpolate(noise.normal((1, 3, 8, 8)), size=(size, size), mode="bicubic").clamp(-1, 1)
    x = noise.normal((1, 3, size, size))
    for t, s in prior.schedule.pairs(5):
        prediction = prior.predict(x, t)
        x0 = prediction.x0
        if network is not None:
            known = torch.cat([soft[:, : CHANNELS[name]] for name in network.inputs], dim=1)
            x0 = x0 - network(known, x0, t)
        x = prior.schedule.posterior(x, x0, t, s, noise.normal(x.shape), prediction.v)
    return x


def agreement(a: Tensor, b: Tensor) -> float:
    """PSNR in dB between two pictures in [-1, 1]; not a number counts as no agreement."""
    error = float((to_unit(a.float()) - to_unit(b.float())).square().mean())
    return 10 * math.log10(1 / max(error, 1e-20)) if math.isfinite(error) else -math.inf


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


def cpu_threads() -> int:
    """Threads for the CPU: what torch would take, but no more than this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, _, period = quota.read_text().partition(" ")
        if limit != "max":
            allowed = min(allowed, max(1, round(int(limit) / int(period))))
    return min(torch.get_num_threads(), allowed)


def can_compile() -> bool:
    """torch.compile for CUDA needs Triton, and Triton a C compiler."""
    from torch.utils._triton import has_triton

    return has_triton() and any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def prepare_compiler() -> None:
    """Let compiled code outlive the process, in the user's cache, and let both networks have several sizes."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home / "ddc" / "compiled"))
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


def rewrap(
    prior: Prior, network: DataConsistency | None, wrap: Callable[[nn.Module], nn.Module]
) -> tuple[Prior, DataConsistency | None]:
    """The prior and the network around other U-Nets."""
    settings = (prior.schedule, prior.prediction_type, prior.clamp, prior.scheduler_config)
    fast_prior = Prior(wrap(prior.unet), *settings).eval()
    if network is None:
        return fast_prior, None
    return fast_prior, DataConsistency(wrap(network.unet), network.inputs, network.residual).eval()
