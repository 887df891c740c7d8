"""The border of a blurred photograph.

A blur operator reflects the picture at its border. In a photograph the world goes on there, and was blurred into it:
taken for a reflection, that rings far into the picture. `see_through` guesses the world around a photograph, which
tells what a reflection would have made of it (`ddc.tiling.own_measurement`); `is_reflected` knows measurements that
are reflected indeed.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.operators.base import ROUNDING, Sigma, conjugate_gradient, spread_of_photographs
from ddc.operators.blur import Blur, GaussianBlur

FINEST = 0.01  # of y: a guess of what lies beyond the border needs no finer noise, and comes the sooner
EXPLAINED = 6e-5  # of y: what float32 leaves of an exact measurement that a guess explains
ITERATIONS = 10  # for each of three levels of noise


class Seen(NamedTuple):
    """What a blurred photograph shows of the world, as far as a linear guess goes."""

    guess: Tensor  # of the world, inside the border
    explained: Tensor  # what the blur makes of it and of what lies beyond: y, but for noise


def see_through(y: Tensor, blur: Blur, sigma: Sigma, margin: int) -> Seen:
    """The most probable world, larger than y by `margin` on each side, of which y is a blurred window.

    It minimises ‖M K x − y‖² / ν² + Σ |x̂|² / r², with K the convolution, M the window, x̂ the spectrum of x and r the
    spread of photographs. In x̂ = r T d̂, T² = 1 / (1 + |K̂ r|² / ν²), the equations are those of a unit matrix but for
    what lies beyond the border; a large ν finds its coarse shape first.
    """
    height, width = y.shape[-2:]
    rows, columns = (
        -(-max(length + 2 * margin, taps) // 32) * 32  # a length that FFTs are quick at
        for length, taps in zip((height, width), blur.kernel.shape[-2:], strict=True)
    )
    kernel = blur.kernel.to(y)
    kernel = pad(kernel, (0, columns - kernel.shape[-1], 0, rows - kernel.shape[-2]))
    middle = (-(blur.kernel.shape[-2] // 2), -(blur.kernel.shape[-1] // 2))
    blurring = torch.fft.rfft2(kernel.roll(middle, (-2, -1)))
    frequency = torch.fft.fftfreq(rows)[:, None] ** 2 + torch.fft.rfftfreq(columns)[None] ** 2
    spread = spread_of_photographs(512 * frequency.sqrt()).to(y)

    def spectrum(x: Tensor) -> Tensor:
        return torch.fft.rfft2(x, norm="ortho")

    def picture(x: Tensor) -> Tensor:
        return torch.fft.irfft2(x, s=(rows, columns), norm="ortho")

    def window(x: Tensor) -> Tensor:
        return x[..., margin : margin + height, margin : margin + width]

    def around(part: Tensor) -> Tensor:
        return pad(part, (margin, columns - margin - width, margin, rows - margin - height))

    mean = y.mean((-2, -1), keepdim=True)  # its spread grows with the picture
    world = spectrum(around(torch.zeros_like(y)))
    for coarseness in (10, 3, 1):
        noise = coarseness * torch.as_tensor(sigma, dtype=y.dtype, device=y.device).clamp(min=FINEST)
        measured = blurring * spread / noise
        scale = (1 + measured.abs() ** 2).rsqrt()

        def apply(d: Tensor, measured: Tensor = measured, scale: Tensor = scale) -> Tensor:
            d_spectrum = scale * spectrum(d)
            back = spectrum(around(window(picture(measured * d_spectrum))))
            return picture(scale * (d_spectrum + measured.conj() * back))

        known = picture(scale * measured.conj() * spectrum(around(y - mean)) / noise)
        start = picture(world / (spread * scale))
        world = spread * scale * spectrum(conjugate_gradient(apply, known, start, ITERATIONS))
    return Seen(window(picture(world)) + mean, window(picture(blurring * world)) + mean)


def is_reflected(y: Tensor, blur: Blur, sigma: float, reach: int) -> bool:
    """Whether a picture was reflected at its border as the blur does it, told by y, its upper left corners; for others
    turn it.

    If so, a linear guess explains y there as well as elsewhere. Of 40 photographs, blurred by 1.5 to 4 pixels and
    rounded to 8 bits, it left 0.5 to 1.2 times as much unexplained at the border where they were reflected, and 1.3
    to 12 times where they went on; of exact ones it left at most 6e-5, and at least 1.3e-3. Noise would hide it.
    """
    if not isinstance(blur, GaussianBlur) or sigma > ROUNDING:
        return False
    shorter = min(y.shape[-2:])
    edge, margin = max(1, min(reach, shorter // 8)), min(4 * reach, shorter // 4)
    middle = slice(margin, -margin or None)
    unexplained = (y - blur(blur.wiener(y, sigma))).square()
    top, left, inside = (
        unexplained[..., rows, columns].mean((1, 2, 3))
        for rows, columns in ((slice(edge), middle), (middle, slice(edge)), (middle, middle))
    )
    return bool(((top + left) / 2 <= (1.4**2 * inside).clamp(min=EXPLAINED**2)).all())
