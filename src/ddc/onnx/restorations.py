"""One-pass restorations as modules that can be recorded: a measurement in, a picture out, both in [0, 1].

Each evaluates a network once, see `SinglePass`. The operator is made inside `forward`, because what it depends on (a kernel,
a mask, quantisation tables) is an input of the graph.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ddc.images import to_internal, to_unit
from ddc.operators.base import SINGULAR_CUTOFF, Operator, Sigma, Size, conjugate_gradient, noise_to_signal
from ddc.operators.blur import GaussianBlur, KernelBlur, reflect
from ddc.operators.inpaint import Denoise, Inpaint, stroke_mask
from ddc.operators.jpeg import CHROMA, JPEG, LUMA, Tables, _dct, quantisation
from ddc.operators.superres import Bicubic
from ddc.priors import TRAIN_STEPS, DataConsistency, Measured
from ddc.solvers.posterior import CONDITIONS, PosteriorDenoiser

KERNEL = 33  # taps of the kernel that a blur takes; smaller ones are padded with zeros
SCALES = (2, 3, 4, 8)  # of super-resolution


class SinglePass(nn.Module):
    """One evaluation of a network that knows the measurement alone: the posterior mean, a `PosteriorDenoiser` at θ = π/2; or the
    solver one-pass, a `DataConsistency` network at x̂0 = 0 and the last time."""

    def __init__(self, network: PosteriorDenoiser | DataConsistency) -> None:
        super().__init__()
        self.network = network
        self.conditional = isinstance(network, PosteriorDenoiser) and network.conditional
        self.time = 1000 if isinstance(network, PosteriorDenoiser) else TRAIN_STEPS - 1  # as the U-Net is told

    def forward(self, measured: Measured, unknown: Tensor, *conditions: Tensor) -> Tensor:
        """x̂0 in [-1, 1]. `unknown` is zeros in the size of the picture."""
        network = self.network
        if isinstance(network, DataConsistency):
            return network.consistent(measured, unknown, self.time)[0]

        def unet(x: Tensor, times: Tensor, *_: Tensor) -> Tensor:  # told the conditions as they are
            return network.unet(x, times, *conditions)

        theta = torch.full((1, 1, 1, 1), math.pi / 2)
        return network(measured, unknown, theta, unet=unet)[0]


class Restoration(nn.Module, ABC):
    """`forward(y, sigma, *own inputs, conditions)` → the picture, (1, 3, side, side). σ is in [0, 1] units, (1,)."""

    scale = 1
    names: tuple[str, ...] = ()  # of the inputs beside y, sigma and conditions

    def __init__(self, one_pass: SinglePass, side: int) -> None:
        super().__init__()
        self.one_pass, self.side = one_pass, side // self.scale * self.scale

    @abstractmethod
    def operator(self, *given: Tensor) -> Operator:
        """What made y of the picture."""

    def examples(self) -> tuple[Tensor, ...]:
        """The inputs beside y, sigma and conditions, for one picture."""
        return ()

    def measurement(self, y: Tensor, sigma: Tensor, operator: Operator, *given: Tensor) -> Tensor:
        """y as the operator has it, in [-1, 1]."""
        return to_internal(y)

    def forward(self, y: Tensor, sigma: Tensor, *rest: Tensor) -> Tensor:
        given, conditions = rest[: len(self.names)], rest[len(self.names) :]
        operator = self.operator(*given)
        noise = 2 * sigma.view(1, 1, 1, 1)
        measured = operator, self.measurement(y, noise, operator, *given), noise
        return to_unit(self.one_pass(measured, torch.zeros(1, 3, self.side, self.side), *conditions))

    def arguments(self, picture: Tensor, sigma: float, conditions: Tensor | None = None) -> dict[str, Tensor]:
        """The inputs, by their names, for a clean picture (1, 3, side, side) that is measured with noise."""
        given = self.examples()
        operator = self.operator(*given)
        y = operator(to_internal(picture))
        y = operator.add_noise(y, torch.randn(y.shape, generator=torch.Generator().manual_seed(0)), 2 * sigma)
        told = {"conditions": torch.zeros(1, CONDITIONS) if conditions is None else conditions}
        named = {
            "y": to_unit(y, clip=False),
            "sigma": torch.tensor([sigma]),
            **dict(zip(self.names, given, strict=True)),
        }
        return named | (told if self.one_pass.conditional else {})


class Enlargement(Restoration):
    """Super-resolution by a whole number."""

    def __init__(self, one_pass: SinglePass, side: int, scale: int) -> None:
        self.scale = scale
        super().__init__(one_pass, side)
        self.bicubic = Bicubic(scale)  # kept, because its decomposition is computed once

    def operator(self, *given: Tensor) -> Operator:
        return self.bicubic


class Deblurring(Restoration):
    """Any blur of at most `KERNEL` taps. `known` is 1 where y is a measurement of this picture alone.

    A tile of a larger picture has its surroundings mixed in near its border, and `known` is 0 there. Then y is replaced
    by what a guess from the other pixels gives.
    """

    names = ("kernel", "known")

    def operator(self, *given: Tensor) -> Operator:
        return MatrixBlur(given[0], self.side)

    def examples(self) -> tuple[Tensor, ...]:
        return GaussianBlur(1.5, KERNEL).kernel, torch.ones(1, 1, self.side, self.side)

    def measurement(self, y: Tensor, sigma: Tensor, operator: Any, *given: Tensor) -> Tensor:
        y, known = to_internal(y), given[1]
        damped = torch.clamp(noise_to_signal(sigma), min=SINGULAR_CUTOFF**2 * 0.1)  # type: ignore[arg-type]
        b = operator.adjoint(known * (y - operator(y)))

        def normal(x: Tensor) -> Tensor:
            return operator.adjoint(known * operator(x)) + damped * x

        change = conjugate_gradient(normal, b, torch.zeros_like(b), operator.guess_iterations)
        explained = operator(y + change)
        return explained + known * (y - explained)


class Filling(Restoration):
    """Holes: the mask is 1 where the pixel is known."""

    names = ("mask",)

    def operator(self, *given: Tensor) -> Operator:
        return Inpaint(given[0])

    def examples(self) -> tuple[Tensor, ...]:
        return (stroke_mask((self.side, self.side), 0),)

    def measurement(self, y: Tensor, sigma: Tensor, operator: Operator, *given: Tensor) -> Tensor:
        return to_internal(y) * given[0]


class Decompression(Restoration):
    """JPEG with its quantisation tables, (8, 8) each, in the order of rows and columns."""

    names = ("luma", "chroma")

    def operator(self, *given: Tensor) -> Operator:
        return TableJPEG(*given)

    def examples(self) -> tuple[Tensor, ...]:
        return quantisation(LUMA)[20].float(), quantisation(CHROMA)[20].float()


class Denoising(Restoration):
    """Noise alone."""

    def operator(self, *given: Tensor) -> Operator:
        return Denoise()


def restorations(one_pass: SinglePass, side: int) -> dict[str, Restoration]:
    """All families, by the names of their files."""
    enlargements = {f"sr{scale}": Enlargement(one_pass, side, scale) for scale in SCALES}
    others: dict[str, Callable[[SinglePass, int], Restoration]] = {
        "blur": Deblurring,
        "holes": Filling,
        "jpeg": Decompression,
        "noise": Denoising,
    }
    return {**enlargements, **{name: made(one_pass, side) for name, made in others.items()}}


class TableJPEG(JPEG):
    """JPEG with any tables, in float32: WebGPU has no double precision."""

    def __init__(self, luma: Tensor, chroma: Tensor) -> None:
        super().__init__(quality=luma)  # not read
        self.luma, self.chroma = luma, chroma

    def _tables(self, table: str, dtype: torch.dtype, device: torch.device) -> Tables:
        return _dct().float(), (self.luma if table is LUMA else self.chroma).view(1, 1, 1, 1, 8, 8)


class MatrixBlur(KernelBlur):
    """KernelBlur with matrix products in place of FFTs, which ONNX runtimes in browsers lack.

    A x = D ((F k Fᵀ) ∘ (F P x Pᵀ Fᵀ)) Dᵀ, with P the reflection at the border, F the Fourier transform and D its inverse
    inside the border. Each complex matrix is one of real numbers: rows or columns of real parts, then of imaginary parts.
    Along the second side half of the frequencies is enough.
    """

    def __init__(self, kernel: Tensor, side: int) -> None:
        nn.Module.__init__(self)
        self.kernel, self.side, self.cg_iterations, self.guess_iterations = kernel, side, 50, 15
        length = side + KERNEL - 1 + (KERNEL - 1 + side) % 2
        place = torch.arange(length, dtype=torch.float64)
        angle = 2 * math.pi * place[:, None] * place / length
        cos, sin = angle.cos(), angle.sin()
        half = length // 2 + 1
        first = reflect(torch.arange(side + KERNEL - 1) - KERNEL // 2, side)
        border = pad(torch.eye(side, dtype=torch.float64)[first], (0, 0, 0, length - len(first)))
        complete = slice(KERNEL - 1, KERNEL - 1 + side)
        twice = torch.full((half,), 2.0, dtype=torch.float64)  # for the frequencies that are left out
        twice[0] = twice[-1] = 1.0
        self.left, self.right = (
            _complex(cos @ border, -sin @ border),
            _beside(cos[:half] @ border, -sin[:half] @ border),
        )
        self.kernel_left = _complex(cos[:, :KERNEL], -sin[:, :KERNEL])
        self.kernel_right = _beside(cos[:half, :KERNEL], -sin[:half, :KERNEL])
        self.back_left = _complex(cos[complete], sin[complete]) / length
        scaled = (twice * part[complete, :half] / length for part in (cos, -sin))
        self.back_right = torch.cat(list(scaled), dim=1).mT
        matrices = ("left", "right", "kernel_left", "kernel_right", "back_left", "back_right")
        for name in matrices:
            setattr(self, name, getattr(self, name).float().contiguous())
        self.spectrum = _transform(kernel[None, None], self.kernel_right, self.kernel_left)

    def forward(self, x: Tensor) -> Tensor:
        product = _multiply(_transform(x, self.right, self.left), self.spectrum, 1)
        return _transform_back(product, self.back_left, self.back_right)

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        return x  # pictures of 8 bits are not exact

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        product = _multiply(_transform(y, self.back_right.mT, self.back_left.mT), self.spectrum, -1)
        return _transform_back(product, self.left.mT, self.right.mT)


def _complex(real: Tensor, imaginary: Tensor) -> Tensor:
    """A complex matrix as one that multiplies columns of real parts above imaginary parts."""
    return torch.cat([torch.cat([real, -imaginary], dim=1), torch.cat([imaginary, real], dim=1)])


def _beside(real: Tensor, imaginary: Tensor) -> Tensor:
    return torch.cat([real, imaginary]).mT


def _transform(x: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """x (B, C, h, w) → (B, C, 2 N, M): real parts above imaginary parts."""
    return left @ torch.cat((x @ right).chunk(2, dim=-1), dim=-2)


def _transform_back(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.cat((left @ x).chunk(2, dim=-2), dim=-1) @ right


def _multiply(x: Tensor, y: Tensor, sign: int) -> Tensor:
    """The product of x and of y, or of y's conjugate if the sign is −1."""
    (a, b), (c, d) = x.chunk(2, dim=-2), y.chunk(2, dim=-2)
    return torch.cat([a * c - sign * (b * d), b * c + sign * (a * d)], dim=-2)
