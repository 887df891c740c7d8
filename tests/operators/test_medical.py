"""Tomography and magnetic resonance imaging."""

import time
from collections.abc import Callable

import pytest
import torch
from skimage.data import shepp_logan_phantom
from skimage.transform import radon, resize
from torch.nn.functional import avg_pool2d

from ddc.errors import UserError
from ddc.operators.custom import check_adjoint
from ddc.operators.fourier import MaskedFourier, RandomProjections, cartesian_mask
from ddc.operators.radon import Radon

PHANTOM = torch.from_numpy(resize(shepp_logan_phantom(), (64, 64), anti_aliasing=True)).expand(1, 3, 64, 64) * 2 - 1


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [(16, 24), (17, 13), (8, 8), (1, 5)])
def test_adjoints(size: tuple[int, int]) -> None:
    x = torch.zeros(2, 3, *size, dtype=torch.float64)
    check_adjoint(Radon(size, 11), x, tolerance=1e-6)
    check_adjoint(MaskedFourier(cartesian_mask(size, 3, [1, 2])), x, tolerance=1e-9)


def test_radon_equals_skimage_s_on_a_smooth_picture() -> None:
    """Both interpolate, in different ways, so that they agree to a few per cent on what is smooth."""
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 65), torch.linspace(-1, 1, 65), indexing="ij")
    picture = torch.exp(-8 * ((rows - 0.2) ** 2 + 2 * (columns + 0.1) ** 2)).double()
    A = Radon((65, 65), 20)
    ours = A(picture.view(1, 1, 65, 65))[0, 0] * 65
    theirs = torch.from_numpy(radon(picture.numpy(), torch.arange(20).numpy() * 9.0, circle=False)).mT
    assert theirs.shape[1] == 92 and ours.shape[1] == 93  # the centre of rotation is the 46th of both
    theirs = torch.nn.functional.pad(theirs, (0, 1))
    assert (ours - theirs).norm() < 0.03 * theirs.norm()
    assert torch.allclose(ours.sum(1), picture.sum().expand(20), rtol=1e-9)  # every angle sees all of the picture


def test_the_radon_transform_is_about_as_quick_as_its_adjoint() -> None:
    """It adds to few detectors at once; to add to those of all angles took ten times as long."""
    A, x = Radon((96, 96), 60), torch.rand(1, 3, 96, 96)
    y = A(x)

    def seconds(work: Callable[[], torch.Tensor]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    forwards, backwards = zip(*[(seconds(lambda: A(x)), seconds(lambda: A.adjoint(y))) for _ in range(15)], strict=True)
    assert min(forwards) < 5 * min(backwards)


def test_many_angles_determine_the_picture() -> None:
    x = avg_pool2d(PHANTOM, 2)
    A, few = Radon((32, 32), 60), Radon((32, 32), 8)
    error = (A.pinv(A(x)) - x).square().mean().sqrt()
    assert error < 0.05 < (few.pinv(few(x)) - x).square().mean().sqrt()


def test_svd_of_the_masked_fourier_transform() -> None:
    size = (12, 10)
    A = MaskedFourier((normal(1, 1, *size) > 0).double())
    x, y = normal(2, 3, *size), normal(2, 6, *size, seed=1)
    assert torch.allclose(A.V(A.Vt(x)), x) and torch.allclose(A.Vt(A.V(x)), x)
    assert torch.allclose(A.U(A.singular_values(size, x) * A.Vt(x)), A(x), atol=1e-12)
    assert torch.allclose(A.V(A.singular_values(size, x) * A.Ut(y)), A.adjoint(y), atol=1e-12)
    assert torch.allclose(A(A.pinv(A(x))), A(x), atol=1e-12)
    z = A.prox(x, A(normal(2, 3, *size, seed=2)), 0.3)
    gradient = A.adjoint(A(z) - A(normal(2, 3, *size, seed=2))) + 0.3 * (z - x)
    assert gradient.abs().max() < 1e-10


def test_a_full_mask_gives_the_picture_back() -> None:
    A = MaskedFourier(torch.ones(64, 64))
    assert torch.allclose(A.to_image(A(PHANTOM)), PHANTOM.double())
    y = A(PHANTOM)
    assert torch.equal(A.add_noise(y, torch.ones_like(y), 0.5), y + 0.5)


def test_cartesian_masks() -> None:
    masks = cartesian_mask((6, 200), 4, [1, 2, 1])
    assert masks[0].equal(masks[2]) and not masks[0].equal(masks[1])
    columns = masks[:, 0, 0]
    assert columns.sum(1).tolist() == [50, 50, 50]
    assert bool(masks.eq(columns[:, None, None]).all())
    assert bool(columns[:, :8].all()) and bool(columns[:, -7:].all())  # 0, ±1 … ±7 and 8


def test_noise_falls_on_what_is_measured() -> None:
    mask = cartesian_mask((8, 16), 2, [0])
    A = MaskedFourier(mask)
    y = A.add_noise(torch.zeros(1, 6, 8, 16), torch.ones(1, 6, 8, 16), 0.1)
    assert torch.allclose(y, 0.1 * mask.expand_as(y))


def test_merged_masks_measure_each_picture_with_its_own() -> None:
    each = [MaskedFourier(cartesian_mask((8, 16), 2, [seed])) for seed in (1, 2)]
    assert each[0].batch_key == each[1].batch_key
    both, x = MaskedFourier.merge(each, torch.device("cpu")), normal(2, 3, 8, 16)
    assert torch.equal(both(x), torch.cat([each[0](x[:1]), each[1](x[1:])]))


def test_sizes_and_masks_are_checked() -> None:
    with pytest.raises(UserError, match="24×16 pixels, not 16×16"):
        Radon((16, 24), 3)(torch.zeros(1, 3, 16, 16))
    with pytest.raises(UserError, match="without tiles"):
        MaskedFourier(torch.ones(16, 24)).crop(0, 0, 16, 16)
    with pytest.raises(UserError, match="0 for missing"):
        MaskedFourier(torch.full((4, 4), 0.5))
    with pytest.raises(UserError, match="at least one angle"):
        Radon((16, 24), 0)


def test_what_measures_the_whole_picture_has_no_windows() -> None:
    for operator in (MaskedFourier(torch.ones(8, 8)), Radon((8, 8), 5)):
        assert operator.crop(0, 0, 8, 8) is operator
        with pytest.raises(UserError, match="8×8 pixels, not 4×8"):
            operator.crop(0, 4, 8, 4)
    for share in (0.0, 1.5):
        with pytest.raises(UserError, match=f"random projections is {share:g}; expected more than 0"):
            RandomProjections((8, 8), share)
    with pytest.raises(UserError, match="images of 8×8 pixels; measure the whole"):
        RandomProjections((8, 8), 0.5).singular_values((4, 8), torch.zeros(1))
