"""Estimates the kernel of a shaken photograph: a path of free shape.

From coarse to fine, it alternates between a picture of few, sharp edges that the kernel explains (L0 gradients: Xu et al.
2013, Pan et al. 2014) and the kernel that explains the gradients of the photograph from these edges: least squares over
kernels that are nowhere negative and sum to 1. A kernel is known up to a shift; its centre of mass is put in the middle.
Whether the photograph was shaken can be told from its spectrum (`explains`).
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.fft import irfft2, rfft2
from torch.nn.functional import interpolate, pad

from ddc.diagnosis.planes import Plane
from ddc.estimates import BlurEstimate, Spectrum, each, passed_by

SIDE = 288  # pixels of the part that is used
TAPS = 35  # along a side of the kernel
COARSEST = 5  # taps at the coarsest scale
ROUNDS = 5  # at each scale
EDGES, EDGES_DECAY, LEAST_EDGES = 4e-3, 1.05, 1e-4  # weight λ of the number of edges, which falls
PENALTY_GROWTH = 1.5  # in the search for the edges; if it grows faster, edges stay where they were first found
RIDGE = 0.1  # weight of the kernel's square, beside that of the edges
FAINT, SMALL_PART = 0.02, 0.02  # of the largest tap, and of the sum: what is less is noise
# shares of the power that an estimated kernel may leave at any frequency: its zeros are misplaced
ERRORS = (0.003, 0.01)
# pixels of even blurs, which are the same in all directions
WIDTHS, RADII = np.arange(0.3, 4, 0.3), np.arange(1.5, 6, 0.5)
# the following are shares of what a blur changes: the most that even blurs explain of a shaken picture (they explain more of
# one out of focus), the least that a kernel must explain, and the least by which it must be ahead of other blurs
MOST_BY_EVEN, LEAST_BY_SHAKE, LEAST_AHEAD = 0.45, 0.2, 0.05
SMALL = 2.5  # pixels of a kernel's spread; less is also what texture of a sharp picture looks like
# of what another blur leaves unexplained, that a kernel must explain if it is small or the picture may be out of focus
LEAST_SHARE = 0.35
LEAST_SHARE_IN_JPEG = 0.6  # the same beneath coarse JPEG, where noise and softness of a camera look like a shake
LEAST_SHARE_OF_BLUR = 0.1  # of all that a blur changes: a Gaussian leaves at most 0.06 to a kernel of free shape


def estimate_kernel(luma: Plane) -> Tensor:
    """Returns the kernel, of odd size, of a plane in [0, 1]."""
    rows, columns = (slice(max(0, (length - SIDE) // 2), max(0, (length - SIDE) // 2) + SIDE) for length in luma.shape)
    return _kernel(torch.from_numpy(np.ascontiguousarray(luma[rows, columns], np.float32)), TAPS)


def explains(spectrum: Spectrum, kernel: Tensor, blur: BlurEstimate | None, in_jpeg: bool) -> bool:
    """Returns whether a kernel explains the spectrum of a photograph, and better than blurs of a known shape do.

    blur: the best one of a known shape, if it is worth undoing
    in_jpeg: whether the photograph was coarsely compressed
    """
    passed = passed_by(kernel, spectrum.rings, spectrum.sectors)
    sharp, _ = spectrum.best([BlurEstimate()], 2)
    even, _ = spectrum.best([*each(width=WIDTHS), *each(RADII)], 2)
    other, _ = spectrum.best([BlurEstimate(), blur or BlurEstimate()], 2)
    least, small = spectrum.least_cost(), spread_of(kernel) < SMALL
    if small:  # a soft picture is explained as well by a blur that is not worth undoing
        other = min(other, even)
    if in_jpeg or small or sharp - even > MOST_BY_EVEN * (sharp - least):
        share = LEAST_SHARE_IN_JPEG if in_jpeg else LEAST_SHARE
        needed = max(share * (other - least), LEAST_SHARE_OF_BLUR * (sharp - least))
        return other - spectrum.cost(passed, 2) >= needed
    cost = min(spectrum.cost(passed + errors, 2) for errors in ERRORS)
    explained, ahead = sharp - cost, min(other, even) - cost
    return explained >= LEAST_BY_SHAKE * (sharp - least) and ahead >= LEAST_AHEAD * (sharp - least)


def spread_of(kernel: Tensor) -> float:
    """Returns the standard deviation of a kernel in pixels, in the direction in which it is largest."""
    places = torch.stack(torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in kernel.shape), indexing="ij"))
    weight = kernel.double() / kernel.double().sum()
    offset = (places - (places * weight).sum((1, 2), keepdim=True)).flatten(1)
    return float(torch.linalg.eigvalsh((offset * weight.flatten()) @ offset.T).max().clamp(min=0).sqrt())


def is_cut_off(kernel: Tensor) -> bool:
    """Returns whether a kernel fills its window from side to side, so that the path is probably longer."""
    return any(int((kernel.sum(axis) > 0).sum()) >= TAPS - 1 for axis in (0, 1))


def _kernel(luma: Tensor, taps: int) -> Tensor:
    kernel, edges = None, EDGES
    for level in range(math.ceil(2 * math.log2(taps / COARSEST)), -1, -1):
        scale = 0.5 ** (level / 2)
        size = 2 * (round(taps * scale) // 2) + 1
        y = _resized(luma, [round(length * scale) for length in luma.shape])
        if kernel is None:
            kernel = torch.zeros(size, size)
            kernel[size // 2, size // 2 : size // 2 + 2] = 0.5
        else:
            kernel = _resized(kernel, [size, size]).clamp(min=0)
            kernel = _centred(kernel / kernel.sum())
        y = _continued(y, size)
        inside = _fade(y.shape, 2 * size)
        for _ in range(ROUNDS):
            sharp = _sharp_edges(y, kernel, edges)
            kernel = _explaining(_strongest(_gradients(sharp) * inside, size), _gradients(y) * inside, kernel)
            kernel = _centred(_cleaned(kernel))
            edges = max(edges / EDGES_DECAY, LEAST_EDGES)
    assert kernel is not None
    return kernel


def _sharp_edges(y: Tensor, kernel: Tensor, weight: float) -> Tensor:
    """Returns argmin ‖k ∗ x − y‖² + λ·(number of pixels with a gradient) by splitting, for pictures that continue on the
    other side."""
    size = y.shape
    blur, measured = _transfer(kernel, size), rfft2(y)
    along, down = (_transfer(torch.tensor(taps), size) for taps in ([[1.0, -1.0, 0.0]], [[1.0], [-1.0], [0.0]]))
    explained, power, slopes = blur.conj() * measured, blur.abs() ** 2, along.abs() ** 2 + down.abs() ** 2
    x, penalty = y, 2 * weight
    while penalty < 1e5:
        spectrum = rfft2(x)
        gradient = torch.stack([irfft2(along * spectrum, s=size), irfft2(down * spectrum, s=size)])
        gradient = rfft2(gradient * ((gradient**2).sum(0) >= weight / penalty))
        wanted = along.conj() * gradient[0] + down.conj() * gradient[1]
        x = irfft2((explained + penalty * wanted) / (power + penalty * slopes), s=size)
        penalty *= PENALTY_GROWTH
    return x


def _explaining(of_x: Tensor, of_y: Tensor, start: Tensor) -> Tensor:
    """Returns argmin ‖k ∗ ∇x − ∇y‖² over kernels on the simplex, by Nesterov's gradient steps."""
    taps, size = start.shape[0], of_x.shape[-2:]
    x, y = rfft2(of_x), rfft2(of_y)
    own, cross = irfft2((x.conj() * x).sum(0), s=size), irfft2((x.conj() * y).sum(0), s=size)
    shift = torch.arange(1 - taps, taps)
    products = torch.zeros(2 * taps, 2 * taps)
    products[shift[:, None], shift] = own[shift[:, None], shift] / own[0, 0]  # negative shifts are at the end
    products = rfft2(products)
    shift = torch.arange(taps) - taps // 2
    aim = cross[shift[:, None], shift] / own[0, 0]
    steepest = float(products.abs().max()) + RIDGE
    kernel, ahead, momentum = start, start, 1.0
    for _ in range(60):
        along = irfft2(products * rfft2(pad(ahead, (0, taps, 0, taps))), s=(2 * taps, 2 * taps))[:taps, :taps]
        new = _on_simplex(ahead - (along - aim + RIDGE * ahead) / steepest)
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new + (momentum - 1) / following * (new - kernel)
        kernel, momentum = new, following
    return kernel


def _on_simplex(kernel: Tensor) -> Tensor:
    """Returns the nearest kernel that is nowhere negative and sums to 1."""
    ordered = kernel.flatten().sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(ordered) + 1)
    return (kernel - excess[int((ordered > excess).sum()) - 1]).clamp(min=0)


def _strongest(gradients: Tensor, taps: int) -> Tensor:
    """Returns the strongest gradients, as many as a kernel needs in each of four directions (Cho and Lee 2009)."""
    strength = (gradients**2).sum(0).sqrt()
    quarter = (torch.atan2(gradients[1], gradients[0]) % math.pi * (4 / math.pi)).long().clamp(max=3)
    needed = int(2 * math.sqrt(strength.numel()) * taps)
    least = math.inf
    for direction in range(4):
        found = strength[quarter == direction]
        if len(found) > 10:
            least = min(least, float(found.topk(min(needed, len(found))).values[-1]))
    return gradients * (strength >= least)


def _cleaned(kernel: Tensor) -> Tensor:
    """Returns a kernel without faint taps and small parts."""
    from scipy.ndimage import label

    kernel = torch.where(kernel < FAINT * kernel.max(), 0.0, kernel)
    parts = torch.from_numpy(label((kernel > 0).numpy(), np.ones((3, 3)))[0])
    for number in range(1, int(parts.max()) + 1):
        if kernel[parts == number].sum() < SMALL_PART * kernel.sum():
            kernel = torch.where(parts == number, 0.0, kernel)
    return kernel / kernel.sum()


def _centred(kernel: Tensor) -> Tensor:
    middle = kernel.shape[0] // 2
    place = torch.arange(kernel.shape[0], dtype=kernel.dtype)
    by = [middle - round(float((kernel.sum(1 - axis) * place).sum())) for axis in (0, 1)]
    return kernel.roll(by, (0, 1))


def _transfer(kernel: Tensor, size: torch.Size) -> Tensor:
    """Returns the spectrum of a kernel whose centre is at the first pixel of a picture."""
    height, width = kernel.shape
    placed = pad(kernel, (0, size[1] - width, 0, size[0] - height))
    return rfft2(placed.roll((-(height // 2), -(width // 2)), (0, 1)))


def _gradients(x: Tensor) -> Tensor:
    return torch.stack([x.roll(-1, -1) - x, x.roll(-1, -2) - x])


def _fade(size: torch.Size, margin: int) -> Tensor:
    """Returns weights that fall to 0 at the border."""
    sides = []
    for length in size:
        place = torch.arange(length, dtype=torch.float32)
        distance = torch.minimum(place, length - 1 - place)
        sides.append(torch.sin(((distance - 1) / margin).clamp(0, 1) * (math.pi / 2)) ** 2)
    return sides[0][:, None] * sides[1]


def _continued(y: Tensor, margin: int) -> Tensor:
    """Returns a larger picture that continues on the other side: reflected at its border, and blurred where it wraps."""
    wide = pad(y[None, None], (margin,) * 4, mode="reflect")[0, 0]
    frequency = torch.fft.fftfreq(wide.shape[0])[:, None] ** 2 + torch.fft.rfftfreq(wide.shape[1]) ** 2
    soft = irfft2(rfft2(wide) * torch.exp(-2 * (math.pi * margin / 3) ** 2 * frequency), s=wide.shape)
    return torch.lerp(soft, wide, _fade(wide.shape, margin))


def _resized(x: Tensor, size: list[int]) -> Tensor:
    if list(x.shape) == size:
        return x
    return interpolate(x[None, None], size=size, mode="bicubic", antialias=True, align_corners=False)[0, 0]
