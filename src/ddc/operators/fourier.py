"""Magnetic resonance imaging: y holds some of the Fourier coefficients of the image."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.noise import derive_seed
from ddc.operators.base import Sigma, Size, SVDOperator, like


class MaskedFourier(SVDOperator):
    """y = M F x, with F the orthonormal Fourier transform of each channel and M a mask of 0 and 1.

    A complex coefficient is two channels of y: the real parts of all channels first, then the imaginary parts. x is
    real, so that AᵀA = Fᴴ d F with d(k) = (M(k) + M(−k)) / 2. The Hartley transform H = Re F − Im F is a real
    orthogonal matrix that diagonalises it: V = H, s = √d and U = A H / s.
    """

    def __init__(self, mask: Tensor) -> None:
        """`mask` is (H, W) or (B, 1, H, W), with the lowest frequency in its first row and column."""
        super().__init__()
        mask = mask.reshape(-1, 1, *mask.shape[-2:]).double()
        if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any()):
            raise UserError("a Fourier mask holds 1 for measured and 0 for missing coefficients, and at least one 1")
        self.register_buffer("mask", mask)

    mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.check_size((x.shape[-2], x.shape[-1]))
        with torch.autocast(x.device.type, enabled=False):
            coefficients = torch.fft.fft2(_wide(x), norm="ortho")
            return torch.cat([coefficients.real, coefficients.imag], dim=1).to(x.dtype) * like(self.mask, x)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        self.check_size((y.shape[-2], y.shape[-1]))
        if y.shape[1] % 2:
            raise UserError(f"a Fourier measurement has real and imaginary channels, an even number, not {y.shape[1]}")
        with torch.autocast(y.device.type, enabled=False):
            real, imaginary = (_wide(y) * self.mask.to(y.device, _wide(y).dtype)).chunk(2, dim=1)
            return torch.fft.ifft2(torch.complex(real, imaginary), norm="ortho").real.to(y.dtype)

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        """Returns the zero-filled reconstruction."""
        return self.adjoint(y)

    def add_noise(self, y: Tensor, z: Tensor, sigma: Sigma) -> Tensor:
        return y + sigma * z * like(self.mask, y)

    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        self.check_size(size)
        mirrored = self.mask.flip((-2, -1)).roll((1, 1), (-2, -1))
        return like(((self.mask + mirrored) / 2).sqrt(), x)

    def Vt(self, x: Tensor) -> Tensor:
        return hartley(x)

    def V(self, c: Tensor) -> Tensor:
        return self.Vt(c)

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self.Vt(self.adjoint(y)) * self._inverse(y)

    def U(self, c: Tensor) -> Tensor:
        return self(self.V(c * self._inverse(c)))

    def crop(self, top: int, left: int, height: int, width: int) -> "MaskedFourier":
        """Returns the operator itself: each coefficient measures the whole image, which has no windows."""
        self.check_size((height, width))
        return self

    def check_size(self, size: Size) -> None:
        if tuple(self.mask.shape[-2:]) != tuple(size):
            height, width = self.mask.shape[-2:]
            raise UserError(
                f"the Fourier mask is for images of {width}×{height} pixels, not {size[1]}×{size[0]}; "
                "restore the image as a whole, without tiles, with a mask of its size"
            )

    @property
    def batch_key(self) -> Hashable:
        return type(self), self.mask.shape[-2:]

    @classmethod
    def merge(cls, operators: Sequence["MaskedFourier"], device: torch.device) -> "MaskedFourier":
        return MaskedFourier(torch.cat([one.mask.cpu() for one in operators])).to(device)

    def _inverse(self, x: Tensor) -> Tensor:
        s = self.singular_values((x.shape[-2], x.shape[-1]), x)
        return torch.where(s > 0, 1 / s.clamp(min=0.5), 0.0)


class RandomProjections(SVDOperator):
    """Compressed sensing: some coefficients of the Hartley transform of an image whose pixels have random signs, so that
    each measures the whole image. Those that are not measured are 0 in y."""

    settings = ("size", "share", "seed")

    def __init__(self, size: Size, share: float, seed: int = 0) -> None:
        super().__init__()
        if not 0 < share <= 1:
            raise UserError(f"the share of random projections is {share:g}; expected more than 0 and at most 1")
        self.size, self.share, self.seed = (size[0], size[1]), float(share), int(seed)
        generator = torch.Generator().manual_seed(derive_seed(seed, "projections"))
        self.register_buffer("signs", torch.randint(2, self.size, generator=generator) * 2.0 - 1, persistent=False)
        self.register_buffer("mask", (torch.rand(self.size, generator=generator) < share).double(), persistent=False)

    signs: Tensor
    mask: Tensor

    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        if self.size != tuple(size):
            raise UserError(
                f"these projections are of images of {self.size[1]}×{self.size[0]} pixels; measure the whole"
            )
        return like(self.mask, x)

    def Vt(self, x: Tensor) -> Tensor:
        return hartley(x * like(self.signs, x))

    def V(self, c: Tensor) -> Tensor:
        return hartley(c) * like(self.signs, c)

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y * self.singular_values((y.shape[-2], y.shape[-1]), y)

    def U(self, c: Tensor) -> Tensor:
        return self.Ut(c)

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        return self.adjoint(y)

    def add_noise(self, y: Tensor, z: Tensor, sigma: Sigma) -> Tensor:
        return y + sigma * z * like(self.mask, y)


def hartley(x: Tensor) -> Tensor:
    """Returns the orthonormal Hartley transform, Re F − Im F, which is its own inverse."""
    with torch.autocast(x.device.type, enabled=False):
        coefficients = torch.fft.fft2(_wide(x), norm="ortho")
        return (coefficients.real - coefficients.imag).to(x.dtype)


def cartesian_mask(size: Size, acceleration: float, seeds: Sequence[int], centre: float = 0.08) -> Tensor:
    """Returns masks (B, 1, H, W) of whole columns: the lowest frequencies, a share `centre` of all columns, and random
    others, so that one of `acceleration` columns is measured in all. As in fastMRI (arXiv 1811.08839)."""
    height, width = size
    kept, low = max(round(width / acceleration), 1), max(round(width * centre), 1)
    masks = torch.zeros(len(seeds), 1, height, width)
    order = torch.fft.fftfreq(width).abs().argsort(stable=True)
    for mask, seed in zip(masks, seeds, strict=True):
        generator = torch.Generator().manual_seed(derive_seed(seed, "cartesian"))
        others = order[low:][torch.randperm(max(width - low, 0), generator=generator)]
        mask[..., torch.cat([order[:low], others[: max(kept - low, 0)]])] = 1
    return masks


def _wide(x: Tensor) -> Tensor:
    """Returns x in a precision that has a Fourier transform everywhere."""
    return x if x.dtype == torch.float64 else x.float()
