"""The border of a blurred photograph.

A blur operator reflects the image at its border. A photograph was blurred together with the scene around it, so a
restoration that assumes a reflection rings far into the image. `extrapolate_border` estimates the scene around a
photograph, from which `ddc.tiling.own_measurement` computes the measurement of a reflected image. `is_reflected`
detects measurements that were in fact reflected.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.operators.base import ROUNDING, Sigma, conjugate_gradient, spread_of_photographs
from ddc.operators.blur import Blur, GaussianBlur, fast_length

FINEST = 0.01  # of y: the least noise that is assumed, because less needs more iterations and changes little
EXPLAINED = 6e-5  # of y: the residual of an exact measurement in float32
ITERATIONS = 10  # for each of three noise levels


def extrapolate_border(y: Tensor, blur: Blur, sigma: Sigma, margin: int) -> tuple[Tensor, Tensor]:
    """Estimates the most probable scene, larger than y by `margin` on each side, of which y is a blurred window.

    Returns the scene inside the border of y, and the blur of the whole scene there: y without its noise.

    It minimises ‖M K x − y‖² / ν² + Σ |x̂|² / r², with K the convolution, M the window, x̂ the spectrum of x and r the
    spread of photographs. With x̂ = r T d̂ and T² = 1 / (1 + |K̂ r|² / ν²), the system is the identity except for the
    part beyond the border. Large ν first finds its coarse shape.
    """
    height, width = y.shape[-2:]
    rows, columns = (
        fast_length(max(length + 2 * margin, taps))
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
    scene = spectrum(around(torch.zeros_like(y)))
    for coarseness in (10, 3, 1):
        noise = coarseness * torch.as_tensor(sigma, dtype=y.dtype, device=y.device).clamp(min=FINEST)
        measured = blurring * spread / noise
        scale = (1 + measured.abs() ** 2).rsqrt()

        def apply(d: Tensor, measured: Tensor = measured, scale: Tensor = scale) -> Tensor:
            d_spectrum = scale * spectrum(d)
            back = spectrum(around(window(picture(measured * d_spectrum))))
            return picture(scale * (d_spectrum + measured.conj() * back))

        known = picture(scale * measured.conj() * spectrum(around(y - mean)) / noise)
        start = picture(scene / (spread * scale))
        scene = spread * scale * spectrum(conjugate_gradient(apply, known, start, ITERATIONS))
    return window(picture(scene)) + mean, window(picture(blurring * scene)) + mean


def is_reflected(y: Tensor, blur: Blur, sigma: float, reach: int) -> bool:
    """Returns whether the image was reflected at its border as the blur operator does, judging by the top and left
    border of y; flip y to test the others.

    A linear guess then explains y at the border as well as elsewhere. For 40 photographs, blurred by 1.5 to 4 pixels
    and rounded to 8 bits, the residual at the border was 0.5 to 1.2 times that inside if they were reflected, and 1.3
    to 12 times if not. For exact measurements it was at most 6e-5 and at least 1.3e-3. Noise hides the difference.
    """
    if not isinstance(blur, GaussianBlur) or sigma > ROUNDING:
        return False
    shorter = min(y.shape[-2:])
    edge, margin = max(1, min(reach, shorter // 8)), min(4 * reach, shorter // 4)
    middle = slice(margin, -margin or None)
    unexplained = (y - blur(blur.guess(y, sigma))).square()
    top, left, inside = (
        unexplained[..., rows, columns].mean((1, 2, 3))
        for rows, columns in ((slice(edge), middle), (middle, slice(edge)), (middle, middle))
    )
    return bool(((top + left) / 2 <= (1.4**2 * inside).clamp(min=EXPLAINED**2)).all())
