"""Orthogonal approximate message passing (Ma and Ping 2017, arXiv 1602.06509), for operators that mix distant pixels evenly.

Each round has two halves. The linear one, r = x + W(y − A x) / g, is exact on average, so that the errors of x in r look like
white noise of a known level τ. A denoiser takes it away, and what it kept of the noise is subtracted, so that the new errors do
not depend on the old ones. The first denoiser is Wiener's filter, which costs little; then the network follows. In the end y is
replaced by r, a picture with white noise.

If A treats all channels alike, the noise has the colours of the errors: luma and chroma then have levels of their own.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ddc.operators.base import LinearOperator, Sigma, size_of
from ddc.operators.natural import (
    coefficients_of,
    from_luma_and_chroma,
    picture_of,
    random_signs,
    spreads,
    to_luma_and_chroma,
)

WIENER_ROUNDS, NETWORK_ROUNDS = 6, 4
EVALUATIONS = 2 * NETWORK_ROUNDS  # a second one in each round measures what the denoiser keeps of the noise
LEAST = 1e-4  # error of x, below which nothing is left to do
MOST_KEPT = 0.95  # of the noise
PROBE = 0.02  # the size of a probe, relative to the noise

Denoise = Callable[[Tensor, Tensor], Tensor]  # of a picture and the level of its noise, (B, 1, 1, 1)


class Messages:
    """The linear half for one measurement, with what random signs tell about A."""

    def __init__(self, operator: LinearOperator, y: Tensor, sigma: Sigma, x: Tensor) -> None:
        self.operator, self.y, self.x = operator, y, x
        self.sigma = torch.as_tensor(sigma, device=y.device).to(y)
        self.signs = random_signs(x, 1)
        self.seen = operator(self.signs)
        self.noise = operator.add_noise(torch.zeros_like(y), random_signs(y, 2), 1.0)
        alike = y.shape[1] == x.shape[1] and torch.allclose(operator(self.signs.flip(1)), self.seen.flip(1), atol=1e-4)
        self.dims = (2, 3) if alike else (1, 2, 3)  # over which a level is a mean

    def mean(self, values: Tensor) -> Tensor:
        return values.mean(self.dims, keepdim=True)

    def colours(self, x: Tensor) -> Tensor:
        """Luma and chroma, if they have levels of their own."""
        return to_luma_and_chroma(x) if self.dims == (2, 3) else x

    def linear(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """r, and the power of its noise in each of the colours."""
        lacking = self.y - self.operator(x)
        noise = self.sigma**2 * self.mean(self.colours(self.noise).square())
        error = (self.mean(self.colours(lacking).square()) - noise) / self.mean(self.colours(self.seen).square())
        error = error.clamp(min=LEAST**2)
        ratio = self.sigma**2 / error.mean(1, keepdim=True)

        def inverse(values: Tensor) -> Tensor:
            return self.operator.regularised_inverse(values, ratio, size_of(x))

        back = inverse(self.seen)
        whole = (self.signs * back).mean((1, 2, 3), keepdim=True)  # g, the share of x in WAx
        mixed = (self.signs - back / whole).square().mean((1, 2, 3), keepdim=True)
        amplified = (inverse(self.noise.expand_as(self.y)) / whole).square().mean((1, 2, 3), keepdim=True)
        return x + inverse(lacking) / whole, error * mixed + self.sigma**2 * amplified

    def without_noise_of(self, r: Tensor, found: Tensor, kept: Tensor) -> Tensor:
        """The denoised picture without the share of r's noise that is in it."""
        kept = kept.clamp(0, MOST_KEPT)
        x = (self.colours(found) - kept * self.colours(r)) / (1 - kept)
        return from_luma_and_chroma(x) if self.dims == (2, 3) else x


def as_noisy_picture(
    operator: LinearOperator, y: Tensor, sigma: Sigma, x: Tensor, denoise: Denoise
) -> tuple[Tensor, Tensor]:
    """r and the level of its noise, (B, 1, 1, 1), for pictures shaped like x: the best of all rounds."""
    messages = Messages(operator, y, sigma, x)
    spread = spreads(x.shape[1], size_of(x)).to(x.dtype).to(x.device)
    x = torch.zeros_like(x)
    best, least = x, x.new_full((len(x), 1, 1, 1), torch.inf)
    for i in range(WIENER_ROUNDS + NETWORK_ROUNDS + 1):
        r, power = messages.linear(x)
        level = power.mean(1, keepdim=True).sqrt()
        best, least = torch.where(level < least, r, best), torch.minimum(level, least)
        if i < WIENER_ROUNDS:
            share = (spread**2 / (spread**2 + power)).expand_as(x)
            found, kept = picture_of(share * coefficients_of(r)), messages.mean(share)
        elif i < WIENER_ROUNDS + NETWORK_ROUNDS:
            found = denoise(r, level)
            signs, size = random_signs(x, 3 + i), PROBE * level
            change = messages.colours(denoise(r + size * signs, level) - found)
            kept = messages.mean(messages.colours(signs) * change) / size
        else:
            break
        x = messages.without_noise_of(r, found, kept)
    return best, least
