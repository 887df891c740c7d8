from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

from ddc.errors import UserError
from ddc.images import ROUNDING_8_BIT
from ddc.operators.inpaint import Inpaint, box_mask, fill_holes, random_mask, read_mask, stroke_mask
from ddc.problems import Problem


def test_noise_falls_on_observed_pixels_only() -> None:
    mask = random_mask((20, 30), 0.6, [1, 2])
    problem = Problem(Inpaint(mask), sigma_y=0.05)
    x, z = torch.randn(2, 3, 20, 30), torch.randn(2, 3, 20, 30)
    y = problem.measure(x, z)
    holes = (mask == 0).expand_as(y)
    assert bool((y[holes] == 0).all())
    assert torch.allclose(y[~holes], (x + 0.1 * z)[~holes])


def test_random_masks_depend_on_their_seed_alone() -> None:
    both = random_mask((40, 50), 0.92, [7, 8])
    assert torch.equal(both[1:], random_mask((40, 50), 0.92, 8))
    assert not torch.equal(both[0], both[1])
    assert float(random_mask((256, 256), 0.92, 0).mean()) == pytest.approx(0.08, abs=0.005)


def test_a_crop_measures_a_window() -> None:
    operator = Inpaint(random_mask((32, 40), 0.5, 0))
    x = torch.randn(1, 3, 32, 40)
    window = operator.crop(8, 16, 10, 20)
    assert torch.equal(window(x[..., 8:18, 16:36]), operator(x)[..., 8:18, 16:36])
    observed = window.observed(x[..., 8:18, 16:36])
    assert torch.equal(observed, operator.mask[..., 8:18, 16:36])


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (31, 17), (64, 64)])
def test_filling_keeps_what_is_observed_and_leaves_no_hole(size: tuple[int, int]) -> None:
    mask = random_mask(size, 0.9, [3, 4])
    mask[:, :, 0, 0] = 1
    y = (torch.rand(2, 3, *size) + 1) * mask  # observed pixels lie in [1, 2]
    filled = fill_holes(y, mask)
    assert torch.equal(filled * mask, y)
    assert float(filled.min()) > 0.999 and float(filled.max()) < 2.001


def test_one_observed_pixel_fills_the_picture() -> None:
    mask = torch.zeros(1, 1, 300, 200)
    mask[..., 0, 0] = 1
    assert torch.allclose(fill_holes(0.7 * mask, mask), torch.tensor(0.7), atol=1e-5)


def test_filling_is_a_useful_guess() -> None:
    x = torch.from_numpy(data.astronaut()[:256, :256].copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    operator = Inpaint(random_mask((256, 256), 0.92, 0))
    guess = operator.guess(operator(x), 0.0)
    mse = float((guess - x).square().mean()) / 4
    assert -10 * np.log10(mse) > 24
    assert bool((fill_holes(torch.zeros_like(x), torch.zeros(1, 1, 256, 256)) == 0).all())


def test_boxes_and_strokes() -> None:
    box = box_mask((20, 30), (4, 6))
    assert int((box == 0).sum()) == 24 and bool((box[..., 8:12, 12:18] == 0).all())
    assert int((box_mask((20, 30)) == 0).sum()) == 10 * 15
    strokes = stroke_mask((64, 80), [1, 2])
    assert strokes.shape == (2, 1, 64, 80)
    assert torch.equal(strokes[1:], stroke_mask((64, 80), 2)) and not torch.equal(strokes[0], strokes[1])
    assert 0.02 < float((strokes == 0).float().mean()) < 0.6
    with pytest.raises(UserError, match="at least one"):
        box_mask((20, 30), (0, 4))


def test_masks_from_files(tmp_path: Path) -> None:
    observed = np.zeros((5, 7), dtype=np.uint8)
    observed[1:3, 2:6] = 255
    expected = torch.from_numpy(observed / 255).float()[None, None]
    Image.fromarray(observed).save(tmp_path / "grey.png")
    Image.merge("RGBA", [Image.new("L", (7, 5), 9)] * 3 + [Image.fromarray(observed)]).save(tmp_path / "alpha.png")
    Image.fromarray(observed).convert("1").save(tmp_path / "bits.png")
    Image.fromarray(observed).convert("RGBA").save(tmp_path / "opaque.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned right to be seen
    Image.fromarray(np.rot90(observed).copy()).save(tmp_path / "turned.png", exif=turned)
    for name in ("grey.png", "alpha.png", "bits.png", "opaque.png", "turned.png"):
        assert torch.equal(read_mask(tmp_path / name), expected), name
    (tmp_path / "text.png").write_text("not a picture")
    for name, says in (("text.png", "cannot be read"), ("missing.png", "does not exist")):
        with pytest.raises(UserError, match=says):
            read_mask(tmp_path / name)


def test_a_pixel_that_a_soft_brush_touched_is_a_hole(tmp_path: Path) -> None:
    Image.fromarray(np.array([[255, 240, 180, 90, 0, 255, 255, 255]], dtype=np.uint8)).save(tmp_path / "m.png")
    assert read_mask(tmp_path / "m.png").flatten().tolist() == [1, 1, 0, 0, 0, 1, 1, 1]


def test_masks_that_cannot_be_meant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zero_one = np.ones((6, 8), dtype=np.uint8)
    zero_one[2:4] = 0
    Image.fromarray(zero_one).save(tmp_path / "m.png")
    with pytest.raises(UserError, match=r"no observed pixel: its values are 0 to 1; expected 0 .* 255"):
        read_mask(tmp_path / "m.png")
    Image.new("L", (8, 6), 255).save(tmp_path / "m.png")
    with pytest.raises(UserError, match="no hole"):
        read_mask(tmp_path / "m.png")
    Image.fromarray(zero_one * 255).save(tmp_path / "m.png")
    read_mask(tmp_path / "m.png")
    assert not caplog.messages
    Image.fromarray(255 - zero_one * 255).save(tmp_path / "m.png")
    read_mask(tmp_path / "m.png")
    assert "67 % of the pixels are holes" in caplog.text and "white is observed" in caplog.text


def test_bad_masks_are_refused() -> None:
    with pytest.raises(UserError, match="expected"):
        Inpaint(torch.ones(4, 4))
    with pytest.raises(UserError, match="other than 0 and 1"):
        Inpaint(torch.full((1, 1, 4, 4), 0.5))
    with pytest.raises(UserError, match=r"4×5.*8×6"):
        Inpaint(torch.ones(1, 1, 5, 4))(torch.zeros(1, 3, 6, 8))
    with pytest.raises(UserError, match="2 masks"):
        Inpaint(torch.ones(2, 1, 4, 4))(torch.zeros(3, 3, 4, 4))
    with pytest.raises(UserError, match="missing pixels"):
        random_mask((4, 4), 1.0, 0)


def test_known_pixels_are_kept_where_they_carry_no_noise() -> None:
    mask = random_mask((8, 8), 0.5, [0, 1, 2])
    operator = Inpaint(mask)
    x, y = torch.full((3, 3, 8, 8), 0.25), torch.full((3, 3, 8, 8), -0.5) * mask
    sigma = torch.tensor([0.0, 2 * ROUNDING_8_BIT, 0.02]).view(-1, 1, 1, 1)
    kept = operator.keep_known(x, y, sigma)
    assert torch.equal(kept[:2], torch.where(mask[:2] > 0, -0.5, 0.25).expand(2, 3, 8, 8))
    assert torch.equal(kept[2], x[2])  # noisy pixels are restored too
    assert torch.equal(operator.keep_known(x, y, 0.0)[0], kept[0])
    assert torch.equal(operator.keep_known(x, y, 0.1), x)
