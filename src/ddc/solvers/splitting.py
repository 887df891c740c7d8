"""Half-quadratic splitting with the network as its denoiser (DPIR, Zhang et al. 2021, arXiv 2008.13751).

In each round, the first half takes the picture nearest to the estimate that explains y, r = argmin ‖A r − y‖² / σ² + ‖r − x‖² / τ²,
and the second half denoises it as a picture with white noise of the level τ. τ falls from round to round. A network that was not
trained for A learns from this what y says about the picture.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ddc.operators.base import NOISE_FLOOR, LinearOperator, Sigma, size_of
from ddc.operators.blur import KernelBlur
from ddc.operators.natural import gain, spreads

ROUNDS, FEW_ROUNDS = 6, 3  # few where y has noise and the mean is only where a sharp estimate or a sample begins
FIRST, LAST = 0.3, 0.02  # τ in the first and in the last round; if y has more noise, it ends there
LEAST_NOISE = 1e-3  # of y: with less, conjugate gradients converge slowly
OPEN = (
    0.01,
    0.06,
)  # error of the best linear estimate, up to which y leaves nothing open, and from which on all detail

Denoise = Callable[[Tensor, Tensor], Tensor]  # of a picture and the level of its noise, (B or 1, 1, 1, 1)


def usual_rounds(sigma: Sigma, realism: float | None) -> int:
    """How many rounds are worth their time."""
    noisy = bool((torch.as_tensor(sigma) > LAST).any())
    return FEW_ROUNDS if noisy and realism != 0 else ROUNDS


def fit_in_rounds(
    operator: LinearOperator, y: Tensor, sigma: Sigma, x: Tensor, rounds: int, denoise: Denoise
) -> Tensor:
    """The estimate x after some rounds; what an exact y determines is put back at the end."""
    noise = torch.as_tensor(sigma, device=x.device).to(x).view(-1, 1, 1, 1).clamp(min=LEAST_NOISE)
    if rounds and isinstance(operator, KernelBlur):
        x = with_blurred_border(x, y, operator)
    last = noise.clamp(min=LAST, max=FIRST)
    for i in range(rounds):
        level = FIRST * (last / FIRST) ** (i / max(rounds - 1, 1))
        x = denoise(operator.prox(x, y, (noise / level) ** 2), level)
    return operator.keep_known(x, y, sigma)


def with_blurred_border(x: Tensor, y: Tensor, operator: KernelBlur) -> Tensor:
    """The estimate x, with y itself as far from the border as the kernel reaches. There a kernel off its centre measures
    little, and what a network guesses may be so wrong that no round mends it; a blurred border is a better start."""
    top, left = (taps // 2 for taps in operator.kernel.shape[-2:])
    inside = (..., slice(top, x.shape[-2] - top), slice(left, x.shape[-1] - left))
    start = y.to(x).clone()
    start[inside] = x[inside]
    return start


def share_left_open(operator: LinearOperator, sigma: Sigma, x: Tensor) -> Tensor:
    """The share of a picture's detail that y leaves open, from 0 to 1, (B or 1, 1, 1, 1): from the error of the best linear
    estimate, if photographs are a Gaussian."""
    noise = torch.as_tensor(sigma, device=x.device).to(x).view(-1, 1, 1, 1).clamp(min=NOISE_FLOOR) ** 2
    power = operator.cached_like(x, ("power", x.shape[1:]), lambda: spreads(x.shape[1], size_of(x)) ** 2)
    error = (noise * power / (gain(operator, x[:1]) * power + noise)).mean((1, 2, 3), keepdim=True).sqrt()
    least, most = OPEN
    return ((error - least) / (most - least)).clamp(0, 1)
