"""One-pass restorations as modules that can be recorded: a measurement in, a picture out, both in [0, 1].

Each evaluates a network once, see `SinglePass`. The operator is made inside `forward`, because what it depends on (a kernel,
a mask, quantisation tables) is an input of the graph.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddc.images import to_internal, to_unit
from ddc.onnx.blur import KERNEL, BasisBlur, MatrixBlur, singular_vectors
from ddc.operators.base import Operator
from ddc.operators.blur import GaussianBlur
from ddc.operators.inpaint import Denoise, Inpaint, stroke_mask
from ddc.operators.jpeg import CHROMA, JPEG, LUMA, Tables, _dct, quantisation
from ddc.operators.superres import Bicubic
from ddc.priors import TRAIN_STEPS, DataConsistency, Measured
from ddc.problems import Problem
from ddc.solvers.posterior import CONDITIONS, PosteriorDenoiser
from ddc.tiling import match_mean

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
    """`forward(y, sigma, *own inputs, conditions, tiled)` → the picture, (1, 3, side, side). σ is in [0, 1] units, (1,).

    With `for_tiles` the picture is not clipped, because it may be blended with others. Then `tiled` (1,) is 1 if it is one of
    several tiles, which get the mean colour of their measurement, as in the core.
    """

    scale = 1
    names: tuple[str, ...] = ()  # of the inputs beside y, sigma, conditions and tiled
    for_tiles = False

    def __init__(self, one_pass: SinglePass, side: int) -> None:
        super().__init__()
        self.one_pass, self.side = one_pass, side // self.scale * self.scale

    @property
    def matching(self) -> bool:
        return self.for_tiles and isinstance(self.one_pass.network, DataConsistency)

    @abstractmethod
    def operator(self, *given: Tensor) -> Operator:
        """What made y of the picture."""

    def examples(self) -> tuple[Tensor, ...]:
        """The inputs beside y, sigma and conditions, for one picture."""
        return ()

    def measurement(self, y: Tensor, *given: Tensor) -> Tensor:
        """y as the operator has it, in [-1, 1]."""
        return to_internal(y)

    def forward(self, y: Tensor, sigma: Tensor, *rest: Tensor) -> Tensor:
        given, told = rest[: len(self.names)], rest[len(self.names) :]
        problem, y = Problem(self.operator(*given), sigma), self.measurement(y, *given)
        conditions = told[:1] if self.one_pass.conditional else ()
        measured = problem.operator, y, 2 * sigma.view(1, 1, 1, 1)
        x = self.one_pass(measured, torch.zeros(1, 3, self.side, self.side), *conditions)
        if self.matching:
            x = x + told[-1] * (match_mean(x, y, problem) - x)
        return to_unit(x, clip=not self.for_tiles)

    def arguments(self, picture: Tensor, sigma: float) -> dict[str, Tensor]:
        """The inputs, by their names, for a clean picture (1, 3, side, side) that is measured with noise."""
        given = self.examples()
        operator = self.operator(*given)
        y = operator(to_internal(picture))
        y = operator.add_noise(y, torch.randn(y.shape, generator=torch.Generator().manual_seed(0)), 2 * sigma)
        told = {"conditions": torch.zeros(1, CONDITIONS)} if self.one_pass.conditional else {}
        told |= {"tiled": torch.ones(1)} if self.matching else {}
        named = {
            "y": to_unit(y, clip=False),
            "sigma": torch.tensor([sigma]),
            **dict(zip(self.names, given, strict=True)),
        }
        return named | told


class Enlargement(Restoration):
    """Super-resolution by a whole number."""

    def __init__(self, one_pass: SinglePass, side: int, scale: int) -> None:
        self.scale = scale
        super().__init__(one_pass, side)
        self.bicubic = Bicubic(scale)  # kept, because its decomposition is computed once

    def operator(self, *given: Tensor) -> Operator:
        return self.bicubic


class Deblurring(Restoration):
    """Any blur of at most `KERNEL` taps that reflects the picture at its border; see `Border` for photographs."""

    names = ("kernel",)

    def operator(self, *given: Tensor) -> Operator:
        return MatrixBlur(given[0], self.side)

    def examples(self) -> tuple[Tensor, ...]:
        return (GaussianBlur(1.5, KERNEL).kernel,)


class SeparableDeblurring(Restoration):
    """A blur that is the same along both sides, such as a Gaussian, by its singular vectors and values: its inverse is exact."""

    names = ("u", "s", "v")

    def operator(self, *given: Tensor) -> Operator:
        return BasisBlur(*given)

    def examples(self) -> tuple[Tensor, ...]:
        return singular_vectors(GaussianBlur(1.5), self.side)


class Filling(Restoration):
    """Holes: the mask is 1 where the pixel is known."""

    names = ("mask",)

    def operator(self, *given: Tensor) -> Operator:
        return Inpaint(given[0])

    def examples(self) -> tuple[Tensor, ...]:
        return (stroke_mask((self.side, self.side), 0),)

    def measurement(self, y: Tensor, *given: Tensor) -> Tensor:
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


def restorations(one_pass: SinglePass, side: int, for_tiles: bool = False) -> dict[str, Restoration]:
    """All families, by the names of their files."""
    others: dict[str, Callable[[SinglePass, int], Restoration]] = {
        "blur": Deblurring,
        "gauss": SeparableDeblurring,
        "holes": Filling,
        "jpeg": Decompression,
        "noise": Denoising,
    }
    made: dict[str, Restoration] = {f"sr{scale}": Enlargement(one_pass, side, scale) for scale in SCALES}
    made |= {name: family(one_pass, side) for name, family in others.items()}
    for restoration in made.values():
        restoration.for_tiles = for_tiles
    return made


class TableJPEG(JPEG):
    """JPEG with any tables, in float32: WebGPU has no double precision."""

    def __init__(self, luma: Tensor, chroma: Tensor) -> None:
        super().__init__(quality=luma)  # not read
        self.luma, self.chroma = luma, chroma

    def _tables(self, table: str, dtype: torch.dtype, device: torch.device) -> Tables:
        return _dct().float(), (self.luma if table is LUMA else self.chroma).view(1, 1, 1, 1, 8, 8)
