"""Wiener's filter: the best linear guess under the spectrum of photographs."""

import numpy as np
import pytest
import torch
from scipy.fft import dctn
from skimage import data

from ddc.operators.base import NOISE_FLOOR, SVDOperator, natural_spectrum, noise_to_signal
from ddc.operators.blur import GaussianBlur, GaussianBlurs
from ddc.operators.inpaint import Denoise
from ddc.operators.superres import Bicubic


@pytest.mark.parametrize("operator", [Bicubic(2), Bicubic(3), GaussianBlur(1.0, 9)])
@pytest.mark.parametrize("sigma", [0.01, 0.1])
def test_it_is_the_posterior_mean_of_a_gaussian_with_that_spectrum(operator: SVDOperator, sigma: float) -> None:
    size = (6, 8)
    basis = torch.eye(48, dtype=torch.float64).view(48, 1, *size)
    a = operator(basis).flatten(1).mT  # (m, n)
    v = operator.V(basis).flatten(1).mT
    r = natural_spectrum(size).flatten()
    prior = v @ torch.diag(r**2) @ v.mT
    noise = sigma**2 * torch.eye(a.shape[0], dtype=torch.float64)
    y = torch.randn(a.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = prior @ a.mT @ torch.linalg.solve(a @ prior @ a.mT + noise, y)
    shape = operator(basis[:1]).shape
    guess = operator.guess(y.view(shape), sigma, size).flatten()
    assert torch.allclose(guess, exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize(
    ("operator", "sigma"),
    [(Bicubic(4), 0.1), (Bicubic(8), 0.1), (GaussianBlur(), 0.1), (GaussianBlur(), 0.0)],
)
def test_it_beats_the_regularised_inverse(operator: SVDOperator, sigma: float) -> None:
    truth = torch.from_numpy(data.astronaut()[:256, 96:352].copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    y = operator(truth)
    y = y + sigma * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    error = [
        float((guess - truth).square().mean())
        for guess in (operator.guess(y, sigma), operator.regularised_inverse(y, noise_to_signal(sigma)))
    ]
    assert error[0] < 0.75 * error[1]


def test_blurs_of_a_batch_agree_with_each_alone() -> None:
    blurs = [GaussianBlur(1.0), GaussianBlur(2.5)]
    y = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    together = GaussianBlurs(blurs).guess(y, 0.05)
    apart = torch.cat([blur.guess(y[i : i + 1], 0.05) for i, blur in enumerate(blurs)])
    assert torch.allclose(together, apart, atol=1e-4)


def test_an_exact_measurement_is_trusted_to_the_noise_floor() -> None:
    y = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    assert torch.equal(Bicubic(2).guess(y, 0.0), Bicubic(2).guess(y, NOISE_FLOOR))


def test_noise_alone_is_left_to_the_network() -> None:
    y = torch.randn(1, 3, 8, 8)
    assert torch.equal(Denoise().guess(y, 0.1), y)


def test_the_spectrum_is_that_of_a_photograph() -> None:
    picture = data.astronaut()[:256, :256] / 127.5 - 1.0
    power = (dctn(picture, axes=(0, 1), norm="ortho") ** 2).mean(-1)
    model = natural_spectrum((256, 256)).numpy() ** 2
    rows, columns = np.mgrid[:256, :256]
    q = np.hypot(rows, columns)
    for low, high in ((4, 16), (16, 64), (64, 128)):
        band = (q >= low) & (q < high)
        assert 0.2 < power[band].mean() / model[band].mean() < 5
