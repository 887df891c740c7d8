"""A U-Net prepared for a GPU: with fused kernels and CUDA graphs, or compiled with `torch.compile`.

A CUDA graph is the list of a network's kernels, recorded once: with a few pictures, launching kernels one by one takes
longer than running them. Compiling takes minutes for each batch size, recording seconds. The fused kernels are in `ddc.fused`.
"""

import copy
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ddc.errors import shorten
from ddc.fused import FusedFunctions, can_fuse, fuse, give_up, is_recording, needs_gradient, usable
from ddc.networks import GroupNorm, run_unet, unet_size_multiple

logger = logging.getLogger("ddc")

Network = Callable[..., Tensor]  # from pictures, times and, for some networks, conditions
RECORDED_BATCH = 64  # up to this batch size, launching kernels may cost more than running them
COMPILED_GRAPH_BATCH = 4  # the same for compiled networks, which have fewer kernels
GRADIENT_BATCH = 4  # the same for gradients, whose graph also keeps all activations
BORDER = 16  # pixels by which a solver may widen pictures of the usual size
MOST_GRAPHS = 16  # of a network, for as many shapes
ELSEWHERE_PATIENCE = 50  # calls with a shape of another size, after which recording it pays
LAUNCHED_PICTURES = 8  # with fewer pictures, launching the fused kernels one by one takes longer than they save


class FastUNet(nn.Module):
    """A U-Net for a GPU and one precision, channels last. Its weights are not trained.

    After `patience` calls it uses the fused kernels, if `kernels` is true, as it is with `eight_bits` (FP8). For pictures of
    `size` it is prepared further, after `patience` calls with one batch size: cuDNN searches for the fastest convolutions, and
    the network is recorded as a CUDA graph if `graphs` is true, or compiled if `sizes` names batch sizes. Smaller pictures, and
    those with a border, are recorded as well if there are many of one size.
    """

    def __init__(
        self,
        unet: nn.Module,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        size: int = 256,
        eight_bits: bool = False,
    ) -> None:
        super().__init__()
        self.config = unet.config
        self.size_multiple = unet_size_multiple(unet)
        self.dtype, self.size, self.eight_bits = dtype, size, eight_bits
        self.sizes: tuple[int, ...] = ()
        self.kernels, self.graphs, self.autotune, self.patience = eight_bits, False, False, 0
        self._prepared: dict[Any, Network] = {}
        self._calls: Counter[Any] = Counter()
        module = copy.deepcopy(unet).to(device=device, dtype=dtype).eval().requires_grad_(False)
        self.module = write_out_norms(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.fused = self.module
        if can_fuse(device):
            try:
                shared = {id(p): p for p in self.module.parameters()}
                self.fused = fuse(copy.deepcopy(self.module, shared), eight_bits)
            except Exception as error:  # a network of a kind that nobody has tried
                give_up(f"{type(error).__name__}: {error}")

    def forward(self, x: Tensor, times: Tensor, *conditions: Tensor) -> Tensor:
        x = x.to(self.dtype).contiguous(memory_format=torch.channels_last)
        gradient = needs_gradient(x)
        self._calls[x.shape, gradient] += 1
        usual = tuple(x.shape[-2:]) == (self.size, self.size)
        patience = self.patience if usual else max(self.patience, ELSEWHERE_PATIENCE)
        if self._calls[x.shape, gradient] <= patience:  # a few pictures are restored before preparing pays
            return self._run(x, times, *conditions)
        if self.sizes and usual:
            compiled = self._compiled(len(x), gradient) if gradient else self._in_sizes
            return compiled(x, times, *conditions)
        small = max(x.shape[-2:]) <= self.size + BORDER and len(x) <= (GRADIENT_BATCH if gradient else RECORDED_BATCH)
        if self.graphs and small:
            return self._graph(gradient, x, times, *conditions)(x, times, *conditions)
        return self._run(x, times, *conditions)

    def _run(self, x: Tensor, times: Tensor, *conditions: Tensor) -> Tensor:
        """Without a CUDA graph."""
        few = len(x) * x.shape[-2:].numel() < LAUNCHED_PICTURES * self.size**2
        if few and x.is_cuda and not self.eight_bits and not needs_gradient(x):
            return run_unet(self.module, x, times, *conditions)
        return self._run_fused(x, times, *conditions)

    def _run_fused(self, x: Tensor, times: Tensor, *conditions: Tensor) -> Tensor:
        """With the fused kernels, if they are to be used."""
        if self.kernels and self._calls.total() > self.patience and usable(x) and not self._checkpointing(x):
            try:
                with FusedFunctions():
                    return run_unet(self.fused, x, times, *conditions)
            except Exception as error:  # whatever it is, the plain layers are still there
                if "out of memory" in str(error) or is_recording(x):
                    raise
                give_up(f"{type(error).__name__}: {error}")
        return run_unet(self.module, x, times, *conditions)

    def _checkpointing(self, x: Tensor) -> bool:
        """Whether layers will run a second time for the gradient; they must then save the same tensors, compared or not."""
        return needs_gradient(x) and any(getattr(module, name) for module, name in self._switches)

    @cached_property
    def _switches(self) -> list[tuple[nn.Module, str]]:
        names = ("checkpointing", "gradient_checkpointing")  # of a CompactUNet and of diffusers
        return [(module, name) for module in self.module.modules() for name in names if hasattr(module, name)]

    def _graph(self, gradient: bool, *inputs: Tensor) -> Network:
        """The network recorded for batches like this one."""
        key = (gradient, *((tuple(part.shape), part.dtype) for part in inputs))
        if key not in self._prepared and len(self._prepared) >= MOST_GRAPHS:
            return self._run
        if key not in self._prepared:
            searched = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True  # seconds for each size, for which there is enough work from here on
            try:
                self._prepared[key] = (recorded_with_gradient if gradient else Recorded)(self._run_fused, *inputs)
            except Exception as error:  # too little memory, or a network that waits for the device
                torch.cuda.empty_cache()
                logger.warning("the network runs without a CUDA graph (%s)", shorten(error))
                self._prepared[key] = self._run
            finally:
                torch.backends.cudnn.benchmark = searched
        return self._prepared[key]

    def _in_sizes(self, x: Tensor, *rest: Tensor) -> Tensor:
        """The compiled network on parts of the sizes that it was compiled for."""
        rest = tuple(
            one.expand(len(x), *one.shape[1:]) for one in rest
        )  # the times, and the conditions if there are any
        parts = []
        for start, stop, size in chunks(len(x), self.sizes):
            part, of_part = x[start:stop], [one[start:stop] for one in rest]
            if stop - start < size:
                index = torch.arange(size, device=x.device).clamp(max=stop - start - 1)
                part, of_part = part[index], [one[index] for one in of_part]
            part = part.contiguous(memory_format=torch.channels_last)
            parts.append(self._compiled(size)(part, *(one.contiguous() for one in of_part))[: stop - start])
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

            def call(*inputs: Tensor) -> Tensor:
                with torch.no_grad():
                    torch.compiler.cudagraph_mark_step_begin()
                    out = compiled(*inputs)
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

    def __init__(self, run: Network, x: Tensor, *rest: Tensor) -> None:
        with self.lock, torch.inference_mode(False), torch.no_grad(), torch.cuda.device(x.device):
            self.inputs = [part.clone() for part in (x, *rest)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # kernels are chosen, compiled and checked before they are recorded
                run(*self.inputs)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()
            self.memory = GraphMemory.of.get(x.device) or GraphMemory(x.device)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=self.memory.handle, capture_error_mode="thread_local"):
                self.out = run(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        with self.lock, torch.no_grad(), torch.cuda.device(self.out.device):
            for held, given in zip(self.inputs, inputs, strict=True):
                held.copy_(given)
            self.graph.replay()
            return self.out.clone()  # the graph's own memory is written again next time


class GraphMemory:
    """Memory that graphs of one device share. It ends with the last of them: PyTorch records no graph into memory that other
    graphs have left."""

    of: ClassVar[WeakValueDictionary[torch.device, "GraphMemory"]] = WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.of[device] = self


def recorded_with_gradient(run: Network, x: Tensor, *rest: Tensor) -> Network:
    """The same, and its gradient as a second graph. Each forward pass must have its backward pass before the next."""
    with torch.cuda.device(x.device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")  # nothing is accumulated
        sample = (x.detach().clone().requires_grad_(), *(part.clone() for part in rest))
        recorded: Any = torch.cuda.make_graphed_callables(run, sample)
    return lambda *inputs: recorded(*inputs).clone()


def write_out_norms(module: nn.Module) -> nn.Module:
    """The module, about to be compiled, with all its normalisations of that kind."""
    for name, child in module.named_children():
        if type(child) is nn.GroupNorm:
            norm = GroupNorm(child.num_groups, child.num_channels, child.eps)
            norm.weight, norm.bias = child.weight, child.bias
            setattr(module, name, norm)
        else:
            write_out_norms(child)
    return module
