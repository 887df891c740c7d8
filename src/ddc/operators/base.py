"""What an operator is: y = A(x), for images in [-1, 1] of shape (B, C, H, W).

An operator with a usable singular value decomposition is an `SVDOperator`; DDRM, DDNM+ and the network's
inputs use it. Everything is batched, keeps the dtype and device of its argument, and takes any height and
width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ddc.errors import UserError

Size = tuple[int, int]
Sigma = float | Tensor  # the noise of y in [-1, 1] units; a tensor is (B, 1, 1, 1), one for each image

SINGULAR_CUTOFF = 0.03  # smaller singular values count as zero, as in DDRM
NOISE_FLOOR = 1e-4  # of y, for Wiener's filter: what float32 and its transforms leave of an exact measurement
EXACT = 1e-6  # of y: the rounding of float32 and its transforms
FAINT = 1e-4  # of y: where a photograph leaves less than this, errors of y show
ROUNDING = 1 / 255  # of y: noise up to half a level of 8 bits, below which a pixel counts as known
SIGNAL_STD = 0.25  # the spread of an image around a guess of it, in `project`'s balance of guess and data


class Operator(ABC):
    """A forward operator. `scale` is image size over measurement size, `align` the grid tiles must keep."""

    scale: int = 1
    align: int = 1

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The measurement of x, without noise."""

    def image_size(self, y: Tensor) -> Size:
        """The height and width of the picture that y measures."""
        return y.shape[-2] * self.scale, y.shape[-1] * self.scale

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        """y at image size, as the paper's network reads it."""
        return y

    def estimate(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """A cheap first guess of the picture from y alone."""
        return self.to_image(y, size)

    def wiener(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """The best linear guess for a photograph, where one is known; else the first guess."""
        return self.estimate(y, sigma, size)

    def project(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        """x, moved towards explaining y as far as the noise in y lets it."""
        size = (x.shape[-2], x.shape[-1])
        return x + self.to_image(y, size) - self.to_image(self(x), size)

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        """x, with what y tells exactly put back: pixels, or the interval that a coefficient was rounded in."""
        return x

    def add_noise(self, y: Tensor, z: Tensor, sigma: Sigma) -> Tensor:
        """y with measurement noise; an operator that does not observe every pixel leaves the others alone."""
        return y + sigma * z

    def unround(self, y: Tensor) -> Tensor:
        """y as it was before rounding to 8 bits, as far as one can tell, where the operator's inverse would
        amplify the error."""
        return y

    def observed(self, y: Tensor, size: Size | None = None) -> Tensor | None:
        """A (B or 1, 1, H, W) map of observed pixels, where the operator leaves some out."""
        return None

    def crop(self, top: int, left: int, height: int, width: int) -> "Operator":
        """The same operator for a window of the picture (in image pixels, on the `align` grid)."""
        return self


class LinearOperator(Operator):
    """An operator with an adjoint. Inverses use conjugate gradients unless something better is known."""

    cg_iterations: int = 50

    @abstractmethod
    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        """Aᵀy, for a picture of the given size (default: `image_size(y)`)."""

    def pinv(self, y: Tensor, size: Size | None = None) -> Tensor:
        """A†y."""
        return self.regularised_inverse(y, 0.0, size)

    def regularised_inverse(self, r: Tensor, lam: Sigma, size: Size | None = None) -> Tensor:
        """Aᵀ(AAᵀ + λI)⁻¹ r = (AᵀA + λI)⁻¹Aᵀ r; with λ = 0, the pseudo-inverse."""
        size = size or self.image_size(r)
        floor = SINGULAR_CUTOFF**2 * 0.1
        damped = lam.to(r).clamp(min=floor) if isinstance(lam, Tensor) else max(lam, floor)
        rhs = self.adjoint(r, size)
        return conjugate_gradient(
            lambda x: self.adjoint(self(x), size) + damped * x, rhs, torch.zeros_like(rhs), self.cg_iterations
        )

    def estimate(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        return self.regularised_inverse(y, _noise_to_signal(sigma), size)

    def project(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        size = (x.shape[-2], x.shape[-1])
        return x + self.regularised_inverse(y - self(x), _noise_to_signal(sigma), size)


class SVDOperator(LinearOperator):
    """A = U diag(s) Vᵀ, with all coefficients kept in the shape of the picture.

    `Vt` and `V` are orthogonal maps of images; `singular_values(size)` broadcasts over them and is zero on
    the null space; `Ut` puts the coefficients of y where their singular values are, and zeros elsewhere.
    """

    by_frequency = False  # whether the coefficients of Vᵀx run from low to high frequencies along both sides

    @abstractmethod
    def singular_values(self, size: Size, like: Tensor) -> Tensor: ...

    @abstractmethod
    def Vt(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def V(self, c: Tensor) -> Tensor: ...

    @abstractmethod
    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor: ...

    @abstractmethod
    def U(self, c: Tensor) -> Tensor: ...

    def __call__(self, x: Tensor) -> Tensor:
        return self.U(self.singular_values((x.shape[-2], x.shape[-1]), x) * self.Vt(x))

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        size = size or self.image_size(y)
        return self.V(self.singular_values(size, y) * self.Ut(y, size))

    def regularised_inverse(self, r: Tensor, lam: Sigma, size: Size | None = None) -> Tensor:
        size = size or self.image_size(r)
        s = self.singular_values(size, r)
        kept = s > SINGULAR_CUTOFF
        gain = torch.where(kept, s, 0.0) / torch.where(kept, s**2 + lam, 1.0)
        return self.V(gain * self.Ut(r, size))

    def wiener(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Wiener's filter for the spectrum of photographs: V diag(s r² / (s² r² + σ²)) Uᵀ y."""
        if not self.by_frequency:
            return self.estimate(y, sigma, size)
        size = size or self.image_size(y)
        r = natural_spectrum(size, y.dtype, y.device)
        sr = self.singular_values(size, y) * r
        noise = sigma.clamp(min=NOISE_FLOOR) if isinstance(sigma, Tensor) else max(sigma, NOISE_FLOOR)
        return self.V(sr * r / (sr**2 + noise**2) * self.Ut(y, size))

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        """x + V diag(s e² / (s² e² + ν²)) (Uᵀy − s Vᵀx): what an exact y says of x and x does not show, with e the
        spread of photographs, which errors of x do not exceed.

        How exact y is shows where A leaves little of a photograph: what y has there beyond that is its error, ν. The
        larger it is, the less is put back: a network knows better what to make of a y that was rounded.
        """
        if not self.by_frequency or (not isinstance(sigma, Tensor) and sigma > NOISE_FLOOR):
            return x
        size = (x.shape[-2], x.shape[-1])
        s, e = self.singular_values(size, x), natural_spectrum(size, x.dtype, x.device)
        lacking = self.Ut(y, size) - s * self.Vt(x)
        expected = (s * e) ** 2  # of the square of what is lacking, if y is exact
        weight = ((s > 0) / (expected + FAINT**2) ** 2).expand(lacking.shape)
        excess = (weight * (lacking.detach() ** 2 - expected)).sum((1, 2, 3), keepdim=True)
        error = (excess / weight.sum((1, 2, 3), keepdim=True)).clamp(min=EXACT**2)
        trust = 1 / (1 + error / NOISE_FLOOR**2)
        if isinstance(sigma, Tensor):
            trust = trust * (sigma <= NOISE_FLOOR)
        return x + self.V(s * e**2 / (expected + error) * trust * lacking)


@lru_cache(maxsize=32)
def natural_spectrum(size: Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The spread r of a photograph's coefficients in an orthonormal basis of frequencies, (H, W)."""
    height, width = size
    with torch.inference_mode(False):
        rows = torch.arange(height, dtype=torch.float64)[:, None] * (256 / height)
        columns = torch.arange(width, dtype=torch.float64)[None] * (256 / width)
        return spread_of_photographs((rows**2 + columns**2).sqrt()).to(dtype).to(device)


def spread_of_photographs(q: Tensor) -> Tensor:
    """r = 75 (1 + q)^(−5/4) with q the frequency in half periods per 256 pixels.

    A fit to the cosine transforms of 206 photographs in [-1, 1], within a third of it from q = 1 to 300.
    """
    return 75 * (1 + q) ** -1.25


def _noise_to_signal(sigma: Sigma) -> Sigma:
    return (sigma / SIGNAL_STD) ** 2


def conjugate_gradient(
    apply: Callable[[Tensor], Tensor], b: Tensor, x: Tensor, iterations: int, tolerance: float = 1e-6
) -> Tensor:
    """Solve apply(x) = b for a symmetric positive `apply`, each image by itself, from the start x."""

    def dot(u: Tensor, v: Tensor) -> Tensor:
        return (u * v).flatten(1).sum(1).view(-1, 1, 1, 1)

    r = b - apply(x)
    p = r
    rr = dot(r, r)
    target = tolerance**2 * torch.maximum(dot(b, b), rr)
    for _ in range(iterations):
        if not x.is_cuda and bool((rr <= target).all()):  # on a GPU, looking would cost more than going on
            break
        ap = apply(p)
        alpha = torch.where(rr > target, rr / dot(p, ap).clamp(min=1e-30), 0.0)
        x = x + alpha * p
        r = r - alpha * ap
        rr, previous = dot(r, r), rr
        p = r + torch.where(previous > 0, rr / previous.clamp(min=1e-30), 0.0) * p
    return x


def check_adjoint(operator: LinearOperator, x: Tensor, tolerance: float = 1e-3) -> None:
    """⟨A x, y⟩ must equal ⟨x, Aᵀ y⟩, and A must be linear: refuse an operator that fails."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator).to(x.device, x.dtype)

    name = type(operator).__name__
    u, v = normal(x.shape), normal(x.shape)
    au, av = operator(u), operator(v)
    bend = (operator(u + 2 * v) - au - 2 * av).norm() / (au.norm() + av.norm()).clamp(min=1e-12)
    if not bend <= tolerance:
        raise UserError(
            f"{name} is not linear: A(u + 2v) differs from A(u) + 2A(v) by {float(bend):.1e} of its size; "
            "derive it from Operator instead of LinearOperator, or remove the offset or clipping"
        )
    y = normal(au.shape)
    back = operator.adjoint(y, (x.shape[-2], x.shape[-1]))
    if back.shape != x.shape:
        raise UserError(f"{name}.adjoint returned the shape {tuple(back.shape)}; A took {tuple(x.shape)}")
    left, right = float((au * y).sum()), float((u * back).sum())
    scale = float(au.norm() * y.norm())
    if not abs(left - right) <= tolerance * max(scale, 1e-12):
        raise UserError(
            f"{name}.adjoint is not the adjoint of its __call__: ⟨Ax, y⟩ = {left:.6g} but "
            f"⟨x, Aᵀy⟩ = {right:.6g}; check flips, strides and border handling"
        )
