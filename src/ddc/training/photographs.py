"""What cameras, messengers and web sites do to a picture after the blur or the reduction that an operator describes.

Noise of a sensor, made coarse by demosaicing and stronger in colour; sharpening; JPEG, once or twice with another grid; 8 bits.
All of it is applied to a batch at once, on its device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from ddc.diagnosis.grain import Bands, Noise
from ddc.diagnosis.treatment import Conditions, jpeg_error, noise_in_bands
from ddc.images import round_to_8_bit, to_unit
from ddc.noise import on_device
from ddc.operators.jpeg import JPEG

NOT_SAVED = 0  # instead of a JPEG quality
UNKNOWN = 0.1  # σ that networks are told of a picture of which nothing else is known
SOFT = (1.2, 3.0)  # times that soft pictures are enlarged


@dataclass(frozen=True)
class Damage:
    """What happens to one measurement."""

    sigma: float = 0.0  # of the sensor's noise, in [0, 1] units
    grain: tuple[float, float] = (0.0, 0.0)  # widths in pixels to which the noise of luma and of chroma is blurred
    chroma: float = 1.0  # how many times as strong as in luma the noise is in chroma
    signal: float = 0.0  # 1 if the noise grows with the light
    sharpening: float = 0.0  # share of the fine detail that is added
    first: int = NOT_SAVED  # quality of an earlier JPEG file, whose blocks began at `grid`
    grid: tuple[int, int] = (0, 0)
    quality: int = NOT_SAVED  # of the last JPEG file

    @staticmethod
    def draw(rng: np.random.Generator, sigma: float) -> "Damage":
        luma = 0.0 if rng.random() < 0.4 else float(rng.uniform(0.3, 1.1))
        chroma = luma if rng.random() < 0.5 else float(rng.uniform(luma, 2.0))
        again = rng.random() < 0.2
        saved = rng.random() < (0.5 if again else 0.7)
        return Damage(
            sigma,
            (round(luma, 1), round(chroma, 1)),
            round(float(np.exp(rng.normal(0, 0.35))), 1),
            float(rng.random() < 0.5),
            0.0 if rng.random() < 0.85 else float(rng.uniform(0.2, 1.0)),
            int(rng.integers(20, 61)) if again else NOT_SAVED,
            (int(rng.integers(0, 8)), int(rng.integers(0, 8))),
            int(rng.integers(70 if again else 30, 96)) if saved else NOT_SAVED,
        )

    def told(self, blind: bool) -> tuple[float, Conditions]:
        """σ in [0, 1] units and the conditions that a diagnosis would tell the network."""
        quality = self.quality or 100
        if blind:
            return UNKNOWN, Conditions(blind=True, quality=quality)
        strength, colour = _colour(self.grain, self.chroma)
        sigma = math.hypot(strength * self.sigma, jpeg_error(quality), jpeg_error(self.first or 100))
        coloured = self.sigma > 0 and (self.grain != (0.0, 0.0) or self.chroma != 1)
        return sigma, Conditions(quality=quality, colour=colour if coloured else (0.0,) * 6)


@lru_cache(maxsize=4096)
def _colour(grain: tuple[float, float], chroma: float) -> tuple[float, tuple[float, ...]]:
    """How many times as strong as its luma's σ the noise is over luma and chroma, and its colour, see `noise_in_bands`."""
    step = np.fft.fftfreq(64)
    radius = np.hypot(step[:, None], step)
    bands = [radius >= 0.25, (radius >= 0.125) & (radius < 0.25), (radius >= 0.04) & (radius < 0.125)]

    def of(width: float, strength: float) -> Bands:
        power = np.exp(-((2 * np.pi * width * radius) ** 2))
        return Bands(*(strength * math.sqrt(float((power / power.mean())[band].mean())) for band in bands))

    return noise_in_bands(Noise(of(grain[0], 1.0), of(grain[1], chroma)))


def damaged(clean: Tensor, z: Tensor, damages: Sequence[Damage]) -> Tensor:
    """Returns clean measurements (B, 3, h, w) in [-1, 1] after their damages; z is standard normal noise for them."""
    device = clean.device
    settings = [(2 * d.sigma, *d.grain, d.chroma, d.signal, d.sharpening, d.first, *d.grid, d.quality) for d in damages]
    columns = on_device(settings, device, torch.float32).view(len(damages), -1, 1, 1, 1).unbind(1)
    sigma, luma, chroma, strength, signal, sharpening, first, top, left, quality = columns
    noise = _coloured(z, luma, chroma, strength)
    x = clean + sigma * noise * (1 + signal * ((0.4 + 1.2 * to_unit(clean)).sqrt() - 1))
    x = x + sharpening * (x - _blurred(x, torch.ones_like(sigma)))
    rows, columns_ = (
        (torch.arange(length, device=device) + shift.view(-1, 1).long()) % length
        for length, shift in ((x.shape[-2], top), (x.shape[-1], left))
    )
    x = _saved(x, first, rows, columns_)
    return round_to_8_bit(_saved(x, quality))


def enlarge(x: Tensor, factors: Sequence[float]) -> Tensor:
    """The middle of each picture in [-1, 1], enlarged by its factor to the size of the picture."""
    shrinking = on_device([1 / factor for factor in factors], x.device, x.dtype)
    matrices = torch.eye(2, 3, device=x.device, dtype=x.dtype) * shrinking.view(-1, 1, 1)
    grid = affine_grid(matrices, list(x.shape), align_corners=False)
    return grid_sample(x, grid, "bicubic", "reflection", align_corners=False).clamp(-1, 1)


def _coloured(z: Tensor, luma: Tensor, chroma: Tensor, strength: Tensor) -> Tensor:
    """Noise whose luma and chroma are blurred and scaled, with the σ of z in the luma."""
    grey = z.mean(1, keepdim=True)
    colour = z - grey
    return _unit_blur(grey, luma) + strength * _unit_blur(colour, chroma)


def _unit_blur(z: Tensor, width: Tensor) -> Tensor:
    """White noise after a Gaussian blur, as strong as before."""
    transfer = _gaussian(z, width)
    full = _gaussian(z, width, real=False)
    return (
        torch.fft.irfft2(torch.fft.rfft2(z) * transfer, z.shape[-2:])
        / full.square().mean((-2, -1), keepdim=True).sqrt()
    )


def _blurred(x: Tensor, width: Tensor) -> Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(x) * _gaussian(x, width), x.shape[-2:])


def _gaussian(x: Tensor, width: Tensor, real: bool = True) -> Tensor:
    """The transfer function of a Gaussian blur for the (real) Fourier transform of x."""
    height, breadth = x.shape[-2:]
    down = torch.fft.fftfreq(height, device=x.device).view(-1, 1)
    right = (torch.fft.rfftfreq if real else torch.fft.fftfreq)(breadth, device=x.device)
    return (-0.5 * (2 * math.pi * width) ** 2 * (down**2 + right**2)).exp()


def _saved(x: Tensor, quality: Tensor, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
    """Each picture after JPEG of its quality, with blocks that begin at other rows and columns if these are given."""
    number = quality.flatten().long()
    work = x
    if rows is not None and columns is not None:
        picture = torch.arange(len(x), device=x.device).view(-1, 1, 1)
        work = x.permute(0, 2, 3, 1)[picture, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    made = JPEG(number.clamp(min=1))(work.clamp(-1, 1))
    if rows is not None and columns is not None:
        back = torch.empty_like(x).permute(0, 2, 3, 1)
        back[picture, rows[:, :, None], columns[:, None, :]] = made.permute(0, 2, 3, 1)
        made = back.permute(0, 3, 1, 2)
    return torch.where(quality > 0, made, x)
