"""Every number depends on its own address alone, and together they look like N(0, I)."""

import pytest
import torch
from torch import Tensor

from ddc.noise import Noise, derive_seed

SHAPE = (1, 3, 256, 256)


def correlation(a: Tensor, b: Tensor) -> float:
    a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
    return float((a * b).mean() / (a.std() * b.std()))


def test_a_batch_equals_single_runs() -> None:
    batch = Noise([5, 6, 7])
    singles = [Noise([seed]) for seed in (5, 6, 7)]
    for _ in range(3):
        together = batch.normal((3, 3, 9, 7))
        assert torch.equal(together, torch.cat([single.normal((1, 3, 9, 7)) for single in singles]))


def test_a_tile_equals_the_window_of_the_whole() -> None:
    whole, tile = Noise([5]), Noise([5], origin=(32, 48))
    for _ in range(2):
        assert torch.equal(whole.normal((1, 3, 128, 96))[..., 32:64, 48:80], tile.normal((1, 3, 32, 32)))


def test_a_tall_field_is_drawn_in_bands_and_equals_its_windows() -> None:
    shape = (2, 3, 700, 37)
    tall = Noise([5, 6], origin=[(3, 1), (900, 40)])
    for draw in range(2):
        z = tall.normal(shape)
        for top in (0, 200, 256, 511, 650):
            part = Noise([5, 6], origin=[(3 + top, 1), (900 + top, 40)])
            part.draws = draw
            assert torch.equal(z[..., top : top + 50, :], part.normal((2, 3, 50, 37)))
    assert tall.draws == 2


def test_a_tall_field_never_hashes_all_its_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    plain = Noise._hashes

    def counted(self: Noise, shape: tuple[int, ...], first_row: int = 0) -> tuple[Tensor, Tensor]:
        rows.append(shape[2])
        return plain(self, shape, first_row)

    monkeypatch.setattr(Noise, "_hashes", counted)
    assert Noise([1]).normal((1, 3, 1000, 8)).shape == (1, 3, 1000, 8)
    assert sum(rows) == 1000 and max(rows) <= 256


def test_the_same_seed_gives_the_same_run_and_draws_differ() -> None:
    first, second = Noise([1]), Noise([1])
    a, b = first.normal(SHAPE), first.normal(SHAPE)
    assert torch.equal(a, second.normal(SHAPE))
    assert torch.equal(b, second.normal(SHAPE))
    assert not torch.equal(a, b)
    assert first.draws == 2


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31, 2**40 + 3, -1])
def test_moments(seed: int) -> None:
    z = Noise([seed]).normal(SHAPE)
    n = z.numel()
    assert abs(float(z.mean())) < 5 / n**0.5
    assert abs(float(z.var()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float((z**3).mean())) < 5 * (15 / n) ** 0.5
    assert abs(float((z**4).mean()) - 3) < 5 * (96 / n) ** 0.5
    assert float(z.abs().max()) < 6


def test_distribution() -> None:
    z = Noise([3]).normal(SHAPE).flatten().double().sort().values
    expected = torch.special.ndtri((torch.arange(len(z), dtype=torch.float64) + 0.5) / len(z))
    gap = (torch.special.ndtr(z) - torch.special.ndtr(expected)).abs().max()  # Kolmogorov and Smirnov
    assert float(gap) < 1.95 / len(z) ** 0.5


def test_uniform() -> None:
    u = Noise([3]).uniform(SHAPE)
    assert float(u.min()) > 0 and float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=5 / (12 * u.numel()) ** 0.5)


def test_no_correlation_between_seeds_draws_channels_and_neighbours() -> None:
    limit = 5 / 256  # five standard errors of one channel
    fields = {}
    for seed in (0, 1, 2, 1000):
        noise = Noise([seed])
        for draw in range(3):
            z = noise.normal(SHAPE)[0]
            fields |= {(seed, draw, channel): z[channel] for channel in range(3)}
    names = list(fields)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert abs(correlation(fields[a], fields[b])) < limit, (a, b)
            assert abs(correlation(fields[a] ** 2, fields[b] ** 2)) < limit, (a, b)
        field = fields[a]
        for down, right in ((0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (16, 0), (0, 16)):
            near = field[: 256 - down, : 256 - right]
            assert abs(correlation(near, field[down:, right:])) < limit, (a, down, right)


def test_the_spectrum_is_white() -> None:
    """No bin of the periodogram stands out: exponential heights stay below log(bins) + 10."""
    power = torch.fft.fft2(Noise([4]).normal(SHAPE).double()).abs() ** 2 / 256**2
    assert float(power.max()) < torch.log(torch.tensor(power.numel())).item() + 10


def test_dtype_and_batch_size() -> None:
    assert Noise([1], dtype=torch.float64).normal((1, 1, 2, 2)).dtype == torch.float64
    with pytest.raises(ValueError, match="2 seeds"):
        Noise([1, 2]).normal((3, 3, 4, 4))


def test_derived_seeds() -> None:
    assert derive_seed(0, "a.png") == derive_seed(0, "a.png")
    seeds = {derive_seed(seed, name) for seed in range(20) for name in ("a.png", "b.png", 0, 1)}
    assert len(seeds) == 80
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_uniform_and_normal_fields_of_one_seed_are_independent() -> None:
    """A mask and the noise on it may come from one seed: the noise on the observed pixels must be whole."""
    u = Noise([3]).uniform((1, 3, 256, 256))
    z = Noise([3]).normal((1, 3, 256, 256))
    for kept in (u > 0.92, u < 0.08):
        assert abs(float(z[kept].std()) - 1) < 0.03
        assert abs(float(z[kept].mean())) < 0.03
