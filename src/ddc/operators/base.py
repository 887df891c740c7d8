"""Operators: y = A(x), for images x in [-1, 1] of shape (B, C, H, W).

An operator is a torch module. It works on batches, keeps the dtype and device of its argument and accepts any
height and width. The contract is small: `forward`, `prox`, `to_image` and `guess`, and for linear operators `adjoint`
and `pinv`. Everything else is derived from these. `A2 @ A1` is the operator that applies A1 first, then A2.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Size = tuple[int, int]
Sigma = float | Tensor  # the noise of y in [-1, 1] units; a tensor is (B, 1, 1, 1), one value for each image
T = TypeVar("T")

SINGULAR_CUTOFF = 0.03  # smaller singular values count as zero: in DDRM those of one side, elsewhere their products
NOISE_FLOOR = 1e-4  # of y, for Wiener's filter: the error of an exact measurement in float32
EXACT = 1e-6  # of y: the rounding of float32 and its transforms
FAINT = 1e-4  # of y: where a photograph leaves less than this, errors of y show
UNEXPLAINED = (0.2, 4e-3)  # what 50 conjugate gradients leave of noise in y, relative to their start, and in all
STILL_UNEXPLAINED = (0.02, 7e-5)  # what `exact_iterations` more of them leave, likewise
ROUNDING = 1 / 255  # of y: noise up to half a level of 8 bits, below which a pixel counts as known
SIGNAL_STD = 0.25  # the spread of an image around a guess of it, in `project`
BLOCK = 256  # rows of a block: small enough to skip the zeros of a large image, large enough for one matmul


class Operator(nn.Module, ABC):
    """A forward operator. A subclass defines `forward`."""

    scale: int = 1  # image size over measurement size
    local: bool = False  # whether each number of y is known to depend on near pixels only
    align: int = 1  # tiles of an image must start at multiples of it
    settings: tuple[str, ...] | None = None  # the attributes that define the operator, if these are numbers
    guess_iterations: int | None = None  # of conjugate gradients in `guess` and `project`, if other than in `prox`

    if TYPE_CHECKING:  # nn.Module.__call__ returns Any

        def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Returns the measurement A(x) without noise, of ceil(H / scale) × ceil(W / scale) pixels."""

    def to_image(self, y: Tensor, size: Size | None = None) -> Tensor:
        """Returns y at image size, with repeated pixels, as the paper's network reads it."""
        return y if self.scale == 1 else repeat_pixels(y, self.scale, size or self.image_size(y))

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns the best cheap guess of the image from y alone."""
        return self.to_image(y, size)

    def prox(self, x: Tensor, y: Tensor, lam: Sigma, iterations: int | None = None) -> Tensor:
        """Returns argmin ‖A z − y‖² + λ‖z − x‖² over z, which linear operators solve in closed form or with at most
        `iterations` of conjugate gradients. Other operators add the residual to x, whatever λ is."""
        size = size_of(x)
        return x + self.to_image(y, size) - self.to_image(self(x), size)

    def project(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        """Returns x, moved towards explaining y as far as the noise of y permits."""
        return self.prox(x, y, noise_to_signal(sigma), self.guess_iterations)

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        """Returns x, with everything that y determines exactly replaced: pixels, or the interval in which a
        coefficient was rounded."""
        return x

    def observed(self, y: Tensor, size: Size | None = None) -> Tensor | None:
        """Returns a map (B or 1, 1, h, w), 1 for observed and 0 for missing pixels, or None if none is missing. It has
        the size of y, or that of the image if `size` is given."""
        return None

    def add_noise(self, y: Tensor, z: Tensor, sigma: Sigma) -> Tensor:
        """Returns y with the noise σz on its observed pixels."""
        noise, observed = sigma * z, self.observed(y)
        return y + (noise if observed is None else noise * observed)

    def unround(self, y: Tensor) -> Tensor:
        """Returns an estimate of y before it was rounded to 8 bits, if the inverse of A would amplify the error."""
        return y

    def image_size(self, y: Tensor) -> Size:
        """Returns the height and width of the image that y measures."""
        return y.shape[-2] * self.scale, y.shape[-1] * self.scale

    def crop(self, top: int, left: int, height: int, width: int) -> "Operator":
        """Returns the operator for a window of the image, in image pixels on the `align` grid."""
        return self

    @property
    def key(self) -> Hashable:
        """Operators with equal keys (one type, equal settings) compute the same. `==` compares by identity, because
        torch.nn skips a module that equals one it has already moved."""
        return self if self.settings is None else (type(self), *(getattr(self, name) for name in self.settings))

    @property
    def batch_key(self) -> Hashable:
        """Operators with equal batch keys can be merged."""
        return self.key

    @classmethod
    def merge(cls, operators: Sequence[Self], device: torch.device) -> "Operator":
        """Returns one operator for a batch, in which each image has its own of these, which have one `batch_key`."""
        return operators[0]

    def __matmul__(self, first: "Operator") -> "Operator":
        from ddc.operators.compose import Composition, LinearComposition  # which derive from this class

        linear = isinstance(self, LinearOperator) and isinstance(first, LinearOperator)
        return LinearComposition(self, first) if linear else Composition(self, first)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.settings or ())

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns `make()`, computed once and kept until the module is moved."""
        return remember(self.__dict__.setdefault("_cache", {}), key, make, 32)

    def cached_like(self, x: Tensor, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Returns `make()` with the dtype and device of x, computed once for each of them."""
        return self.cached((key, x.dtype, x.device), lambda: like(make(), x))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.__dict__.pop("_cache", None)
        with torch.inference_mode(False):  # buffers may be needed with autograd later
            return super()._apply(fn, recurse)


class LinearOperator(Operator):
    """An operator with an adjoint. Its inverses use conjugate gradients unless a subclass knows better."""

    cg_iterations: int = 50
    exact_iterations: int = 150  # further ones in `keep_known`, where y is exact

    @abstractmethod
    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        """Returns Aᵀy for an image of the given size (default: `image_size(y)`)."""

    def pinv(self, y: Tensor, size: Size | None = None, cutoff: float | None = None) -> Tensor:
        """Returns A†y; see `regularised_inverse`."""
        return self.regularised_inverse(y, 0.0, size, cutoff=cutoff)

    def regularised_inverse(
        self,
        r: Tensor,
        lam: Sigma,
        size: Size | None = None,
        iterations: int | None = None,
        cutoff: float | None = None,
    ) -> Tensor:
        """Returns Aᵀ(AAᵀ + λI)⁻¹r = (AᵀA + λI)⁻¹Aᵀr; with λ = 0, the pseudo-inverse. Singular values up to `cutoff`
        count as zero (here they are damped); by default those that DDRM leaves out."""
        return self._regularised(r, lam, size or self.image_size(r), iterations, cutoff)

    def _regularised(self, r: Tensor, lam: Sigma, size: Size, iterations: int | None, cutoff: float | None) -> Tensor:
        floor = (SINGULAR_CUTOFF if cutoff is None else cutoff) ** 2 * 0.1
        damped = lam.to(r).clamp(min=floor) if isinstance(lam, Tensor) else max(lam, floor)

        def normal(x: Tensor) -> Tensor:
            return self.adjoint(self(x), size) + damped * x

        b = self.adjoint(r, size)
        return conjugate_gradient(normal, b, torch.zeros_like(b), iterations or self.cg_iterations)

    def prox(self, x: Tensor, y: Tensor, lam: Sigma, iterations: int | None = None) -> Tensor:
        return x + self.regularised_inverse(y - self(x), lam, size_of(x), iterations)

    def project(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        return x + self._towards(y - self(x), sigma, size_of(x))

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns the likeliest photograph, if these are a Gaussian."""
        from ddc.operators.natural import likeliest  # which needs this class

        return likeliest(self, y, sigma, size or self.image_size(y))

    def _towards(self, r: Tensor, sigma: Sigma, size: Size | None) -> Tensor:
        return self.regularised_inverse(r, noise_to_signal(sigma), size, self.guess_iterations, SINGULAR_CUTOFF)

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        """Returns x with what an exact y adds to it, by conjugate gradients on ‖A z − y‖² from z = x. The more of y they
        leave unexplained, the less is added: then y has noise, which they would amplify. More iterations follow where
        they explain most of y. Training does without them, because they would take as much time as the network."""
        exact = torch.as_tensor(sigma, device=x.device) <= NOISE_FLOOR
        if torch.is_grad_enabled() or not bool(exact.any()):
            return x
        size, work = size_of(x), torch.promote_types(x.dtype, torch.float32)
        lacking = y.to(work) - self(x.to(work))
        b = self.adjoint(lacking, size)

        def normal(p: Tensor) -> Tensor:
            return self.adjoint(self(p), size)

        change = conjugate_gradient(normal, b, torch.zeros_like(b), self.cg_iterations, tolerance=1e-5)
        observed = self.observed(y)
        weight = torch.ones_like(lacking) if observed is None else observed.to(work).expand_as(lacking)

        def power(r: Tensor) -> Tensor:
            return (weight * r**2).sum((1, 2, 3), keepdim=True) / weight.sum((1, 2, 3), keepdim=True).clamp(min=1)

        before = power(lacking)
        limit = (UNEXPLAINED[0] ** 2 * before).clamp(min=EXACT**2, max=UNEXPLAINED[1] ** 2)
        trust = exact / (1 + (power(lacking - self(change)) / limit) ** 3)
        if bool((trust > 0.5).any()):
            more = conjugate_gradient(normal, b, change, self.exact_iterations, 1e-5, self.preconditioner(size, b))
            limit = (STILL_UNEXPLAINED[0] ** 2 * before).clamp(min=EXACT**2, max=STILL_UNEXPLAINED[1] ** 2)
            sure = (trust > 0.5) / (1 + (power(lacking - self(more)) / limit) ** 3)
            return (x.to(work) + (1 - sure) * trust * change + sure * more).to(x.dtype)
        return (x.to(work) + trust * change).to(x.dtype)

    def preconditioner(self, size: Size, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Returns a map near (AᵀA)⁻¹ for images of this size, symmetric and positive, with which conjugate gradients
        need fewer iterations; None if there is none."""
        return None


class SVDOperator(LinearOperator):
    """A = U diag(s) Vᵀ, with all coefficients in the shape of the image.

    `Vt` and `V` are orthogonal maps of images. `singular_values` broadcasts over them and is zero on the null space.
    `Ut` returns the coefficients of y at the places of their singular values, and zeros elsewhere.
    """

    by_frequency = False  # whether the coefficients Vᵀx run from low to high frequencies along both sides

    @abstractmethod
    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        """Returns s for images of the given size, with the dtype and device of x."""

    @abstractmethod
    def Vt(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def V(self, c: Tensor) -> Tensor: ...

    @abstractmethod
    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor: ...

    @abstractmethod
    def U(self, c: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.U(self.singular_values(size_of(x), x) * self.Vt(x))

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        size = size or self.image_size(y)
        return self.V(self.singular_values(size, y) * self.Ut(y, size))

    def measured(self, size: Size, x: Tensor) -> Tensor:
        """Returns which singular values count as measured in DDRM, DDNM and pseudo-inverses, as booleans."""
        return self.singular_values(size, x) > SINGULAR_CUTOFF

    def _regularised(self, r: Tensor, lam: Sigma, size: Size, iterations: int | None, cutoff: float | None) -> Tensor:
        s = self.singular_values(size, r)
        kept = self.measured(size, r) if cutoff is None else s > cutoff
        gain = torch.where(kept, s, 0.0) / torch.where(kept, s**2 + lam, 1.0)
        return self.V(gain * self.Ut(r, size))

    def guess(self, y: Tensor, sigma: Sigma, size: Size | None = None) -> Tensor:
        """Returns Wiener's filter for the spectrum of photographs: V diag(s r² / (s² r² + σ²)) Uᵀ y."""
        if not self.by_frequency:
            return super().guess(y, sigma, size)
        size = size or self.image_size(y)
        r = self.spectrum(size, y)
        sr = self.singular_values(size, y) * r
        noise = sigma.clamp(min=NOISE_FLOOR) if isinstance(sigma, Tensor) else max(sigma, NOISE_FLOOR)
        return self.V(sr * r / (sr**2 + noise**2) * self.Ut(y, size))

    def keep_known(self, x: Tensor, y: Tensor, sigma: Sigma) -> Tensor:
        """Returns x + V diag(s e² / (s² e² + ν²)) (Uᵀy − s Vᵀx): x with what an exact y adds to it. e is the spread
        of photographs, which errors of x do not exceed. Where A leaves little of a photograph, the excess of y is its
        error ν. The larger it is, the less is added: the network handles a y that was rounded better."""
        if not isinstance(sigma, Tensor) and sigma > NOISE_FLOOR:
            return x
        size = size_of(x)
        if not self.by_frequency:  # pixels, colours or samples of a spectrum: nothing is faint
            return torch.where(torch.as_tensor(sigma <= NOISE_FLOOR, device=x.device), self.prox(x, y, 0.0), x)
        s, e = self.singular_values(size, x), self.spectrum(size, x)
        lacking = self.Ut(y, size) - s * self.Vt(x)
        expected = (s * e) ** 2  # of lacking², if y is exact
        weight = ((s > 0) / (expected + FAINT**2) ** 2).expand(lacking.shape)
        excess = (weight * (lacking.detach() ** 2 - expected)).sum((1, 2, 3), keepdim=True)
        error = (excess / weight.sum((1, 2, 3), keepdim=True)).clamp(min=EXACT**2)
        trust = 1 / (1 + error / NOISE_FLOOR**2)
        if isinstance(sigma, Tensor):
            trust = trust * (sigma <= NOISE_FLOOR)
        return x + self.V(s * e**2 / (expected + error) * trust * lacking)

    def spectrum(self, size: Size, x: Tensor) -> Tensor:
        """Returns `natural_spectrum(size)` with the dtype and device of x."""
        return self.cached_like(x, ("spectrum", size), lambda: natural_spectrum(size))


def natural_spectrum(size: Size) -> Tensor:
    """Returns the spread r of a photograph's coefficients in an orthonormal basis of frequencies, (H, W) float64."""
    rows, columns = (torch.arange(length, dtype=torch.float64) * (256 / length) for length in size)
    return spread_of_photographs((rows[:, None] ** 2 + columns**2).sqrt())


def spread_of_photographs(q: Tensor) -> Tensor:
    """Returns r = 75 (1 + q)^(−5/4), with q the frequency in half periods per 256 pixels: a fit to the cosine
    transforms of 206 photographs in [-1, 1], within a third of them from q = 1 to 300."""
    return 75 * (1 + q) ** -1.25


# Columns (m, k) int64, which may repeat, and weights (m, k) float64: row i of a 1-D operator is
# Σ_k weight[i, k] · e[column[i, k]].
Taps = tuple[Tensor, Tensor]


class SeparableOperator(SVDOperator):
    """y = L x Rᵀ, with sparse L and R. A subclass defines `taps` and the `settings` that they depend on.

    The forward operator multiplies by blocks of a banded matrix, so that a large image costs little. The SVD of each
    side is computed when a solver first needs it.
    """

    by_frequency = True  # singular values fall with frequency, and are sorted
    local = True

    @abstractmethod
    def taps(self, length: int) -> Taps:
        """Returns the 1-D operator on `length` pixels, of ceil(length / scale) rows; see `Taps`."""

    def forward(self, x: Tensor) -> Tensor:
        return _along_both(x, self._measure)

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        height, width = size or self.image_size(y)
        with torch.autocast(y.device.type, enabled=False):
            return self._spread(self._spread(y, height).mT, width).mT

    def singular_values(self, size: Size, x: Tensor) -> Tensor:
        """Returns the (H, W) outer product of the values of both sides, zero on the null space."""

        def make() -> Tensor:
            outer = torch.outer(self._factors(size[0])["s"], self._factors(size[1])["s"])
            return pad(outer, (0, size[1] - outer.shape[1], 0, size[0] - outer.shape[0]))

        return self.cached_like(x, ("s", size), make)

    def measured(self, size: Size, x: Tensor) -> Tensor:
        """Returns where the values of both sides are above the cut-off, which is DDRM's rule: products may be smaller."""

        def make() -> Tensor:
            rows, columns = (self._factors(length)["s"] > SINGULAR_CUTOFF for length in size)
            kept = torch.outer(rows.double(), columns.double())
            return pad(kept, (0, size[1] - kept.shape[1], 0, size[0] - kept.shape[0]))

        return self.cached_like(x, ("measured", size), make) > 0

    def Vt(self, x: Tensor) -> Tensor:
        return _along_both(x, lambda side: self.basis("v", side.shape[-2], side).mT @ side)

    def V(self, c: Tensor) -> Tensor:
        return _along_both(c, lambda side: self.basis("v", side.shape[-2], side) @ side)

    def Ut(self, y: Tensor, size: Size | None = None) -> Tensor:
        height, width = size or self.image_size(y)
        with torch.autocast(y.device.type, enabled=False):
            c = self.basis("u", height, y).mT @ y @ self.basis("u", width, y)
        return pad(c, (0, width - c.shape[-1], 0, height - c.shape[-2]))

    def U(self, c: Tensor) -> Tensor:
        left, right = (self.basis("u", length, c) for length in c.shape[-2:])
        with torch.autocast(c.device.type, enabled=False):
            return left @ c[..., : left.shape[0], : right.shape[0]] @ right.mT

    def basis(self, name: Literal["u", "v"], length: int, x: Tensor) -> Tensor:
        """Returns one factor of the SVD on `length` pixels, with the dtype and device of x."""
        return self.cached_like(x, (name, length), lambda: self._factors(length)[name])

    def matrix(self, length: int, x: Tensor) -> Tensor:
        """Returns the dense 1-D operator on `length` pixels, with the dtype and device of x."""
        return self.cached_like(x, ("matrix", length), lambda: _matrix(self.taps(length), 0, length))

    def _factors(self, length: int) -> dict[str, Tensor]:
        """Returns u (m, m), s (m) and v (n, n) in float64; the last n − m columns of v span the null space."""

        def decompose() -> dict[str, Tensor]:
            u, s, vt = torch.linalg.svd(_matrix(self.taps(length), 0, length), full_matrices=True)
            return {"u": u, "s": s, "v": vt.mT.contiguous()}

        return remember(_DECOMPOSITIONS, (self.key, length), decompose, 16)

    def _measure(self, x: Tensor) -> Tensor:
        parts = [values @ x[..., columns, :] for _, columns, values in self._blocks(x.shape[-2], x)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def _spread(self, y: Tensor, length: int) -> Tensor:
        x = y.new_zeros(*y.shape[:-2], length, y.shape[-1])
        for rows, columns, values in self._blocks(length, y):
            x = x + pad(values.mT @ y[..., rows, :], (0, 0, columns.start, length - columns.stop))
        return x

    def _blocks(self, length: int, x: Tensor) -> list[tuple[slice, slice, Tensor]]:
        """Returns the rows, columns and values of the blocks outside of which the 1-D operator is zero."""

        def make() -> list[tuple[slice, slice, Tensor]]:
            column, weight = self.taps(length)
            blocks = []
            for top in range(0, len(column), BLOCK):
                rows = slice(top, top + BLOCK)
                left, right = int(column[rows].min()), int(column[rows].max()) + 1
                values = like(_matrix((column[rows], weight[rows]), left, right), x)
                blocks.append((rows, slice(left, right), values))
            return blocks

        return self.cached(("blocks", length, x.dtype, x.device), make)


_DECOMPOSITIONS: dict[Hashable, dict[str, Tensor]] = {}  # in float64: operators with equal keys share them


def _matrix(taps: Taps, left: int, right: int) -> Tensor:
    """Returns the columns `left` to `right` of the matrix of taps, in float64."""
    column, weight = taps
    matrix = torch.zeros(len(column), right - left, dtype=torch.float64)
    return matrix.scatter_add_(1, column - left, weight)


def _along_both(x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies a function of dimension −2 to the columns of x, then to the rows, always in full precision."""
    with torch.autocast(x.device.type, enabled=False):
        return apply(apply(x).mT).mT


def size_of(x: Tensor) -> Size:
    """Returns the height and width of a batch."""
    return x.shape[-2], x.shape[-1]


def noise_to_signal(sigma: Sigma) -> Sigma:
    """Returns the λ of `prox` for noise σ in y."""
    return (sigma / SIGNAL_STD) ** 2


def repeat_pixels(y: Tensor, scale: int, size: Size) -> Tensor:
    """Returns y enlarged to `size` by repeating each pixel `scale` times."""
    large = y if scale == 1 else y.repeat_interleave(scale, dim=-2).repeat_interleave(scale, dim=-1)
    return large[..., : size[0], : size[1]]


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Returns the tensor with the dtype and device of another; the dtype first, because MPS has no float64."""
    return tensor.to(other.dtype).to(other.device)


def remember(store: dict[Hashable, Any], key: Hashable, make: Callable[[], T], limit: int) -> T:
    """Returns `store[key]`, made if it is missing; a full store drops its oldest entry."""
    found: T | None = store.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # it may later be needed with autograd
            found = make()
        if len(store) >= limit:
            store.pop(next(iter(store)), None)
        store[key] = found
    return found


def conjugate_gradient(
    apply: Callable[[Tensor], Tensor],
    b: Tensor,
    x: Tensor,
    iterations: int,
    tolerance: float = 1e-6,
    precondition: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Solves apply(x) = b for a symmetric positive `apply` from the start x, each image by itself."""

    def dot(u: Tensor, v: Tensor) -> Tensor:
        if u.is_cuda:
            return (u * v).sum((1, 2, 3), keepdim=True)
        # rows first: one sum over all would depend on the number of threads
        return (u * v).sum(-1).flatten(1).sum(1).view(-1, 1, 1, 1)

    near_inverse = precondition or (lambda r: r)
    r = b - apply(x)
    p = q = near_inverse(r)
    rq = dot(r, q)
    target = tolerance**2 * torch.maximum(dot(b, near_inverse(b)), rq)
    for _ in range(iterations):
        # on a GPU, the check would cost more than an iteration
        if not x.is_cuda and bool((rq <= target).all()):
            break
        ap = apply(p)
        alpha = torch.where(rq > target, rq / dot(p, ap).clamp(min=1e-30), 0.0)
        x = x + alpha * p
        r = r - alpha * ap
        q = near_inverse(r)
        rq, previous = dot(r, q), rq
        p = q + torch.where(previous > 0, rq / previous.clamp(min=1e-30), 0.0) * p
    return x
