"""3×3 convolutions on the CPU with a quarter of the multiplications.

Winograd's F(4×4, 3×3), as in Lavin and Gray (1509.09308): 6×6 windows of the picture, four pixels apart, and
the kernel are each transformed to 36 numbers; multiplying these gives a 4×4 patch of the result, again after
a transform. The channels are summed by 36 matrix products, so the whole runs at the speed of the BLAS. In
float32 the result differs from direct convolution by about 1e-5 of its size.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# the transforms for the interpolation points 0, ±1, ±2, ∞
INPUT = torch.tensor(
    [
        [4.0, 0.0, -5.0, 0.0, 1.0, 0.0],
        [0.0, -4.0, -4.0, 1.0, 1.0, 0.0],
        [0.0, 4.0, -4.0, -1.0, 1.0, 0.0],
        [0.0, -2.0, -1.0, 2.0, 1.0, 0.0],
        [0.0, 2.0, -1.0, -2.0, 1.0, 0.0],
        [0.0, 4.0, 0.0, -5.0, 0.0, 1.0],
    ]
)
KERNEL = torch.tensor(
    [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]], dtype=torch.float64
).div(24)
OUTPUT = torch.tensor(
    [
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.0],
        [0.0, 1.0, -1.0, 2.0, -2.0, 0.0],
        [0.0, 1.0, 1.0, 4.0, 4.0, 0.0],
        [0.0, 1.0, -1.0, 8.0, -8.0, 1.0],
    ]
)

MIN_TILES = 16  # with fewer 4×4 patches, reading the transformed kernel costs more than it saves
ONES = 7  # of the 36 products, the one that is added to every pixel of a patch (the point 1, 1)
STRIP_TILES = 128  # patches worked on at once: their transforms stay in the cache

_memory = threading.local()


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
        plain = x.device.type != "cpu" or x.dtype != torch.float32 or tiles < MIN_TILES
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
        half = torch.mm(INPUT, gathered.view(6, -1), out=_buffer("b", 6, 6 * tiles * channels))
        half = half.view(6, 6, -1)
        transformed = torch.bmm(INPUT.expand(6, 6, 6), half, out=_buffer("a", 6, 6, tiles * channels))
        transformed = transformed.view(36, tiles, channels)
        product = torch.bmm(transformed, kernel, out=_buffer("b", 36, tiles, outputs))
        if bias is not None:
            product[ONES] += bias
        half = torch.mm(OUTPUT, product.view(6, -1), out=_buffer("a", 4, 6 * tiles * outputs))
        half = half.view(4, 6, -1)
        patches = torch.bmm(OUTPUT.expand(4, 4, 6), half, out=_buffer("c", 4, 4, tiles * outputs))
        result[:, top : top + n].copy_(patches.view(4, 4, batch, n, cols, outputs).permute(2, 3, 0, 4, 1, 5))

    threads = torch.get_num_threads()
    strip = max(1, min(STRIP_TILES // (batch * cols), -(-rows // threads)))  # rows of patches at once
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
    size = 1
    for n in shape:
        size *= n
    held: Tensor | None = getattr(_memory, name, None)
    if held is None or held.numel() < size:
        with torch.inference_mode(False):  # else it could not be written to outside of inference mode
            held = torch.empty(size)
        setattr(_memory, name, held)
    return held[:size].view(shape)
