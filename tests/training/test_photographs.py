"""What cameras and messengers do to the measurements that a network is trained on."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

from ddc.datasets import find_sources, load_pictures
from ddc.diagnosis.blocks import detect_blocks
from ddc.diagnosis.grain import measure_noise
from ddc.diagnosis.planes import luma_chroma
from ddc.diagnosis.treatment import noise_in_bands
from ddc.errors import UserError
from ddc.images import to_internal, to_unit
from ddc.training.data import Draws, MixEntry, TaskMix, measure_draws, parse_tasks
from ddc.training.photographs import SOFT, Damage, damaged, enlarge


def photograph(side: int = 256) -> torch.Tensor:
    pixels = torch.from_numpy(data.coffee()[60 : 60 + side, 150 : 150 + side].copy())
    return to_internal(pixels.permute(2, 0, 1)[None].float() / 255)


def noise_like(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("grain", "chroma"), [((0.0, 0.0), 1.0), ((0.7, 0.7), 1.0), ((0.5, 1.2), 1.0), ((0.6, 0.6), 1.6)]
)
def test_the_network_is_told_what_a_diagnosis_finds(grain: tuple[float, float], chroma: float) -> None:
    flat = torch.zeros(1, 3, 512, 512)
    damage = Damage(0.05, grain, chroma)
    pixels = to_unit(damaged(flat, noise_like(flat), [damage]))[0].permute(1, 2, 0).numpy()
    found, colour = noise_in_bands(measure_noise(pixels))
    sigma, told = damage.told(blind=False)
    assert found == pytest.approx(sigma, rel=0.2)
    # the coarse band has few coefficients in a block, so that its quietest blocks have less than the mean
    assert np.abs(np.array(colour) - told.colour).max() < 0.4


def test_a_saved_picture_is_pillows() -> None:
    clean = photograph()
    made = damaged(clean, noise_like(clean), [Damage(quality=60)])
    file = io.BytesIO()
    pixels = (to_unit(clean)[0].permute(1, 2, 0) * 255).round().byte().numpy()
    Image.fromarray(pixels).save(file, "JPEG", quality=60)
    expected = torch.from_numpy(np.asarray(Image.open(file)).copy()).permute(2, 0, 1)[None].float() / 255
    assert (to_unit(made) - expected).abs().max() < 1e-5


def test_an_earlier_file_has_its_own_grid() -> None:
    clean = photograph()
    made = damaged(clean, noise_like(clean), [Damage(first=25, grid=(3, 5), quality=92)])
    luma = luma_chroma(to_unit(made)[0].permute(1, 2, 0).numpy())[0]
    found = detect_blocks(luma, 92)
    assert found is not None and (found.top % 8, found.left % 8) == (3, 5)
    assert abs(found.quality - 25) <= 8


def test_a_batch_equals_single_pictures() -> None:
    clean = torch.cat([photograph(), photograph().flip(-1), photograph().flip(-2)])
    z, rng = noise_like(clean), np.random.default_rng(3)
    damages = [Damage.draw(rng, sigma) for sigma in (0.0, 0.03, 0.08)]
    together = damaged(clean, z, damages)
    assert torch.equal((together * 127.5 + 127.5).round() / 127.5 - 1, together)  # 8 bits
    for i, damage in enumerate(damages):
        alone = damaged(clean[i : i + 1], z[i : i + 1], [damage])
        assert (alone - together[i : i + 1]).abs().mean() < 1e-4  # a last bit may become a level of JPEG
    assert (damaged(clean[:1], z[:1], [replace(damages[2], sharpening=1.0)]) - clean[:1]).abs().mean() > 0.01


def test_a_mix_draws_photographs_and_blind_ones() -> None:
    mix = TaskMix(parse_tasks("disc1-3:photo=0.8:blind=0.5,sr2-3:photo=1,denoise"), 0.08, noiseless_share=0.2)
    drawn = [mix.draw(np.random.default_rng((0, i)), 64) for i in range(400)]
    discs = [one for one in drawn if one.task.kind == "disc"]
    photos = [one for one in discs if one.damage is not None]
    blind = [one for one in photos if one.conditions.blind]
    assert 0.7 < len(photos) / len(discs) < 0.9 and 0.35 < len(blind) / len(photos) < 0.65
    assert all(one.told.kind == "denoise" and 0.05 < one.sigma_y < 0.2 for one in blind)
    assert all(one.damage is not None and not one.conditions.blind for one in drawn if one.task.kind == "sr")
    assert all(one.damage is None and not any(one.conditions.numbers()) for one in drawn if one.task.kind == "denoise")
    assert any(one.conditions.colour[0] < -0.3 for one in photos)
    for text, reason in (
        ("disc2:photo=2", "shares"),
        ("disc2:photo=1:soft=2", "shares"),
        ("jpeg10:photo=0.5", "needs a linear task"),
        ("sr4:photo=1:blind=0.5", "never unknown"),
    ):
        with pytest.raises(UserError, match=reason):
            MixEntry.parse(text)


def test_soft_photographs_are_enlarged_first(tmp_path: Path) -> None:
    x = photograph(64)
    twice = torch.nn.functional.interpolate(x[..., 16:48, 16:48], scale_factor=2, mode="bicubic").clamp(-1, 1)
    made = enlarge(x.repeat(2, 1, 1, 1), [2.0, 1.0])
    assert torch.allclose(made[0, :, 4:-4, 4:-4], twice[0, :, 4:-4, 4:-4], atol=1e-5)
    assert torch.allclose(made[1], x[0], atol=1e-5)

    Image.fromarray(data.astronaut()[:96, :96]).save(tmp_path / "a.png")
    draws = Draws(load_pictures(find_sources([tmp_path]), 64, torch.device("cpu"), "off", 1, 0.3), 64, seed=0)
    mix, numbers = TaskMix(parse_tasks("denoise:photo=0.8:soft=0.5"), 0.08), list(range(24))
    truth, drawn, _, (_, y, _) = measure_draws(
        draws, numbers, lambda seed, number, size: mix.draw(np.random.default_rng((seed, number)), size)
    )
    plain, soft = draws.crops(numbers), [one.enlarged > 1 for one in drawn]
    assert 5 <= sum(soft) <= 15 and all(one.damage is not None for one in drawn if one.enlarged > 1)
    assert all(SOFT[0] <= one.enlarged <= SOFT[1] for one, is_soft in zip(drawn, soft, strict=True) if is_soft)
    assert [not torch.equal(a, b) for a, b in zip(truth, plain, strict=True)] == soft
    assert all((measured - x).square().mean() < 0.1 for measured, x in zip(y, truth, strict=True))


def test_what_is_measured_and_what_is_told(tmp_path: Path) -> None:
    Image.fromarray(data.astronaut()[:96, :96]).save(tmp_path / "a.png")
    pool = load_pictures(find_sources([tmp_path]), 64, torch.device("cpu"), "off", 1, 0.3)
    mix = TaskMix(parse_tasks("disc2:photo=1:blind=0.5,sr2:photo=1"), 0.08)
    draws = Draws(pool, 64, seed=0)
    truth, drawn, operators, (mixed, y, sigma) = measure_draws(
        draws, list(range(12)), lambda seed, number, size: mix.draw(np.random.default_rng((seed, number)), size)
    )
    names = {type(operator).__name__ for operator in operators}
    assert {"Denoise", "Bicubic"} <= names
    for one, operator, measured, level in zip(drawn, operators, y, sigma, strict=True):
        expected = 32 if one.task.kind == "sr" else 64
        assert measured.shape[-1] == expected
        assert float(level) == pytest.approx(2 * one.sigma_y)
        assert (type(operator).__name__ == "Denoise") == one.conditions.blind
    assert bool(mixed.guess(y, sigma, (64, 64)).isfinite().all()) and truth.shape == (12, 3, 64, 64)
