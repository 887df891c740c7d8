import logging
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from skimage import data
from torch import Tensor

from ddc import telling
from ddc.diagnosis.treatment import plan_treatment
from ddc.errors import UserError
from ddc.fast import pick_device
from ddc.images import ROUNDING_8_BIT, Picture, to_internal, to_unit
from ddc.operators import Bicubic, GaussianBlur, LinearOperator
from ddc.operators.base import Size
from ddc.pipeline import RestorationPipeline, as_pictures
from ddc.priors import DataConsistency
from ddc.problems import Task
from ddc.solvers.base import Step, make_solver
from ddc.solvers.ddnm import DDNM
from ddc.tiling import plan_for


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> RestorationPipeline:
    return RestorationPipeline.from_pretrained(tiny_model)


def ship(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the package ship the model in `folder`."""
    monkeypatch.setattr("ddc.pipeline.DEFAULT_MODEL", folder)


def crops(count: int, side: int) -> list[Tensor]:
    picture = torch.from_numpy(data.astronaut()).permute(2, 0, 1).float() / 255
    return [picture[:, 40 * i : 40 * i + side, 60 * i : 60 * i + side] for i in range(count)]


def test_super_resolution_enlarges(pipe: RestorationPipeline) -> None:
    result = pipe(crops(1, 13)[0], "sr3")
    assert result.picture.size == (39, 39)
    assert result.evaluations == 10 and result.seconds > 0
    assert result.picture.tensor.min() >= 0 and result.picture.tensor.max() <= 1


@pytest.mark.parametrize("task", ["sr4", "gauss", "motion", "jpeg10", "denoise", "colorize"])
@pytest.mark.parametrize("size", [(17, 23), (1, 9), (40, 40)])
def test_every_task_takes_any_size(pipe: RestorationPipeline, task: str, size: tuple[int, int]) -> None:
    y = torch.rand(3, *size, generator=torch.Generator().manual_seed(0))
    picture = pipe(y, task, sigma=0.05).picture
    scale = 4 if task == "sr4" else 1
    assert picture.size == (size[0] * scale, size[1] * scale)
    assert np.isfinite(picture.pixels).all()


def test_a_batch_of_four_equals_four_single_runs_in_any_order(pipe: RestorationPipeline) -> None:
    pictures = [Picture.from_tensor(x, path=Path(f"{i}.png")) for i, x in enumerate(crops(4, 16))]
    together = [p.tensor for p in pipe(pictures, "sr2", sigma=0.02, batch=4).pictures]
    alone = [pipe(p, "sr2", sigma=0.02).picture.tensor for p in pictures]
    backwards = [p.tensor for p in pipe(pictures[::-1], "sr2", sigma=0.02, batch=3).pictures][::-1]
    for a, b, c in zip(together, alone, backwards, strict=True):
        assert (a - b).abs().max() < 1e-3 and (a - c).abs().max() < 1e-3
    assert (together[0] - together[1]).abs().max() > 0.05


def test_pictures_without_a_name_are_told_apart_by_their_index(pipe: RestorationPipeline) -> None:
    x = crops(1, 16)[0]
    first, second = pipe([x, x], "denoise").pictures
    assert (first.tensor - second.tensor).abs().max() > 0.01
    assert torch.equal(first.tensor, pipe(x, "denoise").picture.tensor)
    assert torch.equal(second.tensor, pipe(x, "denoise", names=["1"]).picture.tensor)


def test_the_seed_decides(pipe: RestorationPipeline) -> None:
    x = crops(1, 16)[0]
    a, b, c = (pipe(x, "denoise", seed=seed).picture.tensor for seed in (0, 0, 1))
    assert torch.equal(a, b) and (a - c).abs().max() > 0.01


def test_samples_with_mean_and_deviation(pipe: RestorationPipeline) -> None:
    x = crops(2, 16)
    result = pipe(x, "denoise", samples=3)
    assert len(result.pictures) == 2 and len(result.samples[1]) == 3
    assert torch.equal(result.pictures[1].tensor, pipe(x, "denoise").pictures[1].tensor)
    stack = torch.stack([sample.tensor for sample in result.samples[0]])
    assert torch.allclose(result.mean[0].tensor, stack.mean(0), atol=1e-6)
    assert torch.allclose(result.std[0], stack.std(0), atol=1e-6) and result.std[0].max() > 0.01
    assert not pipe(x[0], "denoise").std[0].any()


def test_files_keep_what_they_say(pipe: RestorationPipeline, tmp_path: Path) -> None:
    source = PIL.Image.fromarray(data.astronaut()[:20, :30]).convert("LA")
    source.putalpha(PIL.Image.fromarray(np.tile(np.arange(30, dtype=np.uint8) * 8, (20, 1))))
    exif = PIL.Image.Exif()
    exif[0x010F] = "Maker"
    source.save(tmp_path / "a.png", exif=exif)
    picture = pipe(tmp_path / "a.png", "sr2").picture
    assert picture.grey and picture.bits == 8 and picture.exif is not None and b"Maker" in picture.exif
    assert picture.alpha is not None and picture.alpha.shape == (40, 60)
    assert picture.alpha[0, 0] == 0 and picture.alpha[0, -1] == 232
    assert not pipe(tmp_path / "a.png", "colorize").picture.grey


def test_what_can_be_given(pipe: RestorationPipeline, tmp_path: Path) -> None:
    array = data.astronaut()[:16, :16]
    Picture(array).write(tmp_path / "0.png")
    tensor = torch.from_numpy(array).permute(2, 0, 1).float() / 255
    floats = array.astype(np.float32) / 255
    expected = pipe(tensor, "denoise", names=["a"]).picture.tensor
    for given in (array, floats, PIL.Image.fromarray(array), tmp_path / "0.png", str(tmp_path / "0.png")):
        assert torch.allclose(pipe(given, "denoise", names=["a"]).picture.tensor, expected, atol=1e-5)
    assert len(pipe(torch.stack([tensor, tensor]), "denoise").pictures) == 2


def test_callback_and_progress(pipe: RestorationPipeline) -> None:
    steps: list[Step] = []
    shares: list[float] = []
    pipe(crops(2, 16), "denoise", steps=3, callback=steps.append, progress=shares.append)
    assert [step.t for step in steps] == [999, 500, 0] * 2
    assert shares == sorted(shares) and shares[0] == pytest.approx(1 / 6) and shares[-1] == pytest.approx(1)


def test_other_solvers_and_their_settings(pipe: RestorationPipeline) -> None:
    y = crops(1, 16)[0]
    restored = pipe(y, "sr2", solver="ddnm:eta=0.5", steps=4).picture.tensor
    again = Bicubic(2)(2 * restored[None] - 1)
    inside = (restored > 0) & (restored < 1)
    assert inside.any() and torch.isfinite(again).all()
    assert torch.equal(restored, pipe(y, "sr2", solver=DDNM(steps=4, eta=0.5)).picture.tensor)


# ---------------------------------------------------------------------------------------------------------
# inpainting


def test_alpha_is_the_mask_of_inpainting(pipe: RestorationPipeline) -> None:
    pixels = data.astronaut()[:16, :24].copy()
    alpha = np.full((16, 24), 255, np.uint8)
    alpha[4:9, 5:15] = 0
    holes = alpha == 0
    first = pipe(Picture(pixels, alpha), "inpaint", names=["a"]).picture
    pixels[holes] = 7  # what is written in a hole does not matter
    second = pipe(Picture(pixels, alpha), "inpaint92", names=["a"]).picture
    mask = torch.from_numpy((alpha > 0).astype(np.float32))[None, None]
    third = pipe(Picture(pixels), "box", mask=mask, names=["a"]).picture
    assert first.alpha is None
    assert torch.equal(first.tensor, second.tensor) and torch.equal(first.tensor, third.tensor)
    pillow = PIL.Image.fromarray(np.dstack([pixels, alpha]))
    assert torch.equal(first.tensor, pipe(pillow, "inpaint", names=["a"]).picture.tensor)
    with pytest.raises(UserError, match="no transparent pixel"):
        pipe(Picture(pixels, np.full_like(alpha, 255)), "inpaint")


def test_observed_pixels_stay_where_there_is_no_noise(pipe: RestorationPipeline) -> None:
    picture = PIL.Image.fromarray(data.astronaut()[:24, :24])
    mask = torch.ones(24, 24)
    mask[8:14, 5:20] = 0
    restored = pipe(picture, "inpaint", mask=mask).picture
    again = np.rint(restored.pixels * 255).astype(np.uint8)
    seen = mask.numpy() > 0
    assert (again[seen] == np.asarray(picture)[seen]).all() and (again[~seen] != 0).any()


@pytest.fixture(scope="module")
def wiener_pipe(pipe: RestorationPipeline) -> RestorationPipeline:
    """One whose results depend on the noise level that its network is told."""
    config = {
        "channels": [8, 16],
        "encoder_blocks": [1, 1],
        "decoder_blocks": [1],
        "groups": 4,
        "head_dim": 8,
    }
    network = DataConsistency.from_config(config | {"inputs": ["wiener"], "residual": "blend"})
    return RestorationPipeline(pipe.prior, network.eval())


def test_a_network_is_told_of_rounding_to_8_bits(wiener_pipe: RestorationPipeline) -> None:
    rounded = data.astronaut()[:24, :24]
    floats = torch.from_numpy(rounded).permute(2, 0, 1).float() / 255
    exact = floats * 0.9999  # no whole levels
    told, as_floats, untold = (wiener_pipe(y, "gauss", names=["a"]) for y in (rounded, floats, exact))
    again = wiener_pipe(exact, "gauss", sigma=ROUNDING_8_BIT, names=["a"])
    assert torch.equal(told.picture.tensor, as_floats.picture.tensor)
    assert (told.picture.tensor - again.picture.tensor).abs().max() < 0.02
    assert (told.picture.tensor - untold.picture.tensor).abs().max() > 0.05
    assert told.sigma == untold.sigma == [0.0]  # what was asked for


def test_a_network_is_told_that_the_channels_of_a_grey_picture_share_their_noise(
    wiener_pipe: RestorationPipeline,
) -> None:
    pixels = np.repeat(data.astronaut()[:24, :24, :1], 3, axis=2)

    def restored(sigma: float, grey: bool) -> Tensor:
        return wiener_pipe(Picture(pixels, grey=grey), "gauss", sigma=sigma, names=["a"]).picture.tensor

    assert (restored(0.05, True) - restored(0.05 * 3**0.5, False)).abs().max() < 1e-4
    assert (restored(0.05, True) - restored(0.05, False)).abs().max() > 1e-3


def test_alpha_stays_alpha_where_a_mask_is_given(pipe: RestorationPipeline) -> None:
    alpha = np.full((16, 24), 99, np.uint8)
    picture = Picture(data.astronaut()[:16, :24], alpha)
    restored = pipe(picture, "inpaint", mask=torch.ones(1, 1, 16, 24)).picture
    assert restored.alpha is not None and (restored.alpha == 99).all()


def test_tiles_see_their_part_of_the_mask(pipe: RestorationPipeline) -> None:
    alpha = np.where(np.random.default_rng(0).random((70, 150)) < 0.5, 255, 0).astype(np.uint8)
    picture = Picture(data.astronaut()[:70, :150], alpha)
    known = torch.from_numpy(alpha > 0)
    settings: dict[str, Any] = {"solver": "ddnm", "steps": 3, "tile": 64}
    restored = pipe(picture, "inpaint", **settings).picture.tensor
    assert (restored - picture.tensor)[:, known].abs().max() < 1e-3
    assert torch.allclose(pipe(picture, "inpaint", batch=4, **settings).picture.tensor, restored, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------
# tiles


def border_ratio(x: Tensor, borders: list[int]) -> float:
    """The mean gradient across the lines where a tile begins or ends, over that across all other lines."""
    lines = torch.cat([x.diff(dim=-1).abs().mean((0, 1)), x.diff(dim=-2).abs().mean((0, 2))])
    at = torch.zeros(x.shape[-1] - 1, dtype=torch.bool)
    at[[border - 1 for border in borders]] = True
    at = torch.cat([at, at])
    return float(lines[at].mean() / lines[~at].mean())


def smooth_picture(side: int) -> Tensor:
    v = torch.linspace(0, 1, side)
    return torch.stack(
        [0.3 + 0.4 * v[:, None] * v, 0.5 + 0.3 * torch.sin(3 * v[:, None] + 2 * v), v.expand(side, side)]
    )


def test_tiles_share_one_noise_field(pipe: RestorationPipeline) -> None:
    """With a solver that looks at no neighbour, tiles must give exactly the untiled picture."""
    y = crops(1, 150)[0]
    settings: dict[str, Any] = {"solver": "ddnm", "steps": 3, "sigma": 0.0}
    whole = pipe(y, "denoise", tile=0, **settings).picture.tensor
    tiled = pipe(y, "denoise", tile=64, **settings).picture.tensor
    assert (whole - tiled).abs().max() < 1e-4
    together = pipe([y, y], "denoise", sigma=0.1, tile=64, batch=7).pictures
    for index, one in enumerate(together):
        alone = pipe(y, "denoise", sigma=0.1, tile=64, names=[str(index)]).picture
        assert (one.tensor - alone.tensor).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["smooth", "textured"])
@pytest.mark.parametrize("task", ["sr4", "gauss", "jpeg10"])
def test_tile_borders_cannot_be_seen(pipe: RestorationPipeline, kind: str, task: str) -> None:
    side = 128
    x = smooth_picture(side) if kind == "smooth" else crops(1, side)[0]
    operator = Task.parse(task).operator()
    y = (operator(2 * x[None] - 1)[0] + 1) / 2
    tiled = pipe(y, task, tile=64).picture.tensor
    tiles = plan_for((side, side), operator, 64)
    edges = {tile.window.left for tile in tiles} | {tile.window.left + tile.window.width for tile in tiles}
    assert border_ratio(tiled, sorted(edges - {0, side})) < 1.05


def test_out_of_memory_halves_the_tile_and_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    predict = pipe.prior.predict

    def small_memory(x: Tensor, t: Any) -> Any:
        if x.shape[-1] > 70 or x.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return predict(x, t)

    y = crops(2, 128)
    expected = pipe(y, "denoise", tile=64, steps=2).pictures
    monkeypatch.setattr(pipe.prior, "predict", small_memory)
    with caplog.at_level(logging.WARNING, logger="ddc"):
        result = pipe(y, "denoise", batch=2, steps=2)
    assert "continuing with 1 at once" in caplog.text and "tiles of 64 pixels" in caplog.text
    assert result.notes == [caplog.messages] * 2
    for a, b in zip(result.pictures, expected, strict=True):
        assert torch.allclose(a.tensor, b.tensor, atol=1e-4)
    caplog.clear()
    pipe(y[0], "denoise", steps=2)
    assert not caplog.text  # it is remembered

    monkeypatch.setattr(pipe.prior, "predict", lambda x, t: torch.empty(2**60))
    with pytest.raises(UserError, match="not enough memory"):
        pipe(y[0], "denoise")


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    pipe: RestorationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(x: Tensor, t: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(pipe.prior, "predict", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        pipe(crops(1, 16)[0], "denoise")


def test_the_fast_path_gives_the_same_pictures(pipe: RestorationPipeline, tiny_model: Path) -> None:
    y = crops(1, 40)[0]
    fast = RestorationPipeline.from_pretrained(tiny_model).to("cpu")
    plain = RestorationPipeline.from_pretrained(tiny_model).to("cpu", fast=False)
    expected = pipe(y, "sr2").picture.tensor
    assert torch.equal(plain(y, "sr2").picture.tensor, expected)
    assert (fast(y, "sr2").picture.tensor - expected).abs().max() < 1e-3


def test_a_pipeline_can_be_moved_again(tiny_model: Path) -> None:
    y = crops(1, 40)[0]
    pipe = RestorationPipeline.from_pretrained(tiny_model)
    unet = pipe.prior.unet
    quick = [pipe.to("cpu")(y, "sr2").picture.tensor for _ in range(2)]
    assert torch.equal(*quick) and pipe.prior.unet is not unet
    again = pipe.to("cpu", fast=False)
    assert again is pipe and pipe.prior.unet is unet  # the networks as they were given, not wrapped twice
    expected = RestorationPipeline.from_pretrained(tiny_model)(y, "sr2").picture.tensor
    assert torch.equal(pipe(y, "sr2").picture.tensor, expected)
    pipe.to("cpu", batch=4)
    assert pipe.batch == 4 and pipe.to("cpu").batch == pipe.to("cpu", fast=False).batch == 1
    with pytest.raises(UserError, match="not available"):
        pipe.to("toaster")
    with pytest.raises(UserError, match="needs a CUDA device"):
        pipe.to("cpu", dtype="float16")
    assert torch.equal(pipe(y, "sr2").picture.tensor, expected)  # it stays as it was


# ---------------------------------------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "sr99"}, "expected a whole number from 2 to 16"),
        ({"task": "upscale"}, "is not known"),
        ({"sigma": -0.1}, "sigma is -0.1"),
        ({"sigma": float("nan")}, "sigma is nan"),
        ({"steps": 0}, "steps"),
        ({"steps": 1001}, "between 1 and 1000"),
        ({"samples": 0}, "samples"),
        ({"tile": 10}, "at least 64"),
        ({"solver": "magic"}, "expected one of ddc"),
        ({"solver": "ddrm", "task": "jpeg10"}, "ddrm needs an operator with an SVD"),
        ({"solver": "ddnm:zeta=1"}, "it takes steps, eta"),
        ({"solver": "ddnm:eta=much"}, "expected a number"),
        ({"solver": "ddc:spacing=odd"}, "expected leading or even"),
        ({"task": "inpaint"}, "no mask was given"),
        ({"task": "inpaint", "mask": torch.ones(1, 1, 5, 5)}, "mask is 5×5"),
        ({"task": "sr4", "mask": torch.ones(1, 1, 16, 16)}, "does not use one"),
        ({"task": "jpeg"}, "name it"),
    ],
)
def test_bad_settings_are_refused(pipe: RestorationPipeline, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pipe(crops(1, 16)[0], settings.pop("task", "denoise"), **settings)


def test_bad_pictures_are_refused(pipe: RestorationPipeline) -> None:
    with pytest.raises(UserError, match="NaN"):
        pipe(torch.full((3, 8, 8), torch.nan), "denoise")
    with pytest.raises(UserError, match="no picture"):
        pipe([], "denoise")
    with pytest.raises(UserError, match=r"\(H, W, 3\)"):
        pipe(np.zeros((8, 8), np.uint8), "denoise")
    with pytest.raises(UserError, match="from 0 to 255; expected"):
        pipe(torch.linspace(0, 255, 192).reshape(3, 8, 8), "denoise")


def test_pixels_of_every_kind_are_one_picture(pipe: RestorationPipeline) -> None:
    levels = data.astronaut()[:16, :16].copy()
    tensor = torch.from_numpy(levels).permute(2, 0, 1)
    kinds = (levels, levels / 255, tensor, tensor / 255, levels[None] / np.float32(255))
    results = [pipe(kind, "sr2", sigma=0.1).picture.tensor for kind in kinds]
    assert all(torch.allclose(result, results[0], atol=1e-5) for result in results[1:])
    assert pipe(tensor / 127.5 - 1, "sr2").notes[0][0].endswith("expected [0, 1]: take (x + 1) / 2")


def test_a_blur_is_estimated_from_each_picture(pipe: RestorationPipeline) -> None:
    cup = torch.from_numpy(data.coffee()[120:216, 220:316] / np.float32(255)).permute(2, 0, 1)
    blurred = [to_unit(GaussianBlur(width)(to_internal(cup)[None])[0]) for width in (1.5, 3.0)]
    result = pipe(blurred, "deblur", steps=1)
    widths = [float(task.removeprefix("gauss")) for task in result.tasks]  # no discs
    assert widths == [pytest.approx(1.5, abs=0.5), pytest.approx(3.0, abs=0.6)] and result.notes == [[], []]
    assert all(0 < sigma < 0.01 for sigma in result.sigma)  # estimated, too
    sharp = pipe(data.astronaut()[:96, :96], "deblur", steps=1)
    assert sharp.tasks == ["gauss0.5"] and "looks sharp" in sharp.notes[0][0]


def test_each_picture_says_what_is_wrong_with_it(pipe: RestorationPipeline) -> None:
    cup = torch.from_numpy(data.coffee()[120:216, 220:316] / np.float32(255)).permute(2, 0, 1)
    blurred = to_unit(GaussianBlur(2.0)(to_internal(cup)[None])[0])
    noisy = (cup + 0.06 * torch.randn(cup.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    holed = np.dstack([data.coffee()[:64, :64], np.full((64, 64), 255, np.uint8)])
    holed[20:24, :, 3] = 0
    pictures = [blurred, noisy, PIL.Image.fromarray(holed)]
    plans = [plan_treatment(picture) for picture in as_pictures(pictures)]
    assert [Task.parse(plan.task).family for plan in plans] == ["blur", "denoise", "inpaint"]
    assert [plan.sigma for plan in plans] == [pytest.approx(0, abs=0.01), pytest.approx(0.06, abs=0.01), 0]
    result = pipe(pictures, "auto", steps=1)  # an untrained network, whose results are taken back
    assert result.tasks == ["nothing", "nothing", "inpaint"] and "left as it is" in result.notes[1][0]
    assert torch.equal(result.pictures[1].tensor, noisy)
    filled = result.pictures[2]
    assert filled.mask is None or bool(filled.mask.all())
    both = pipe([noisy, cup], "auto", steps=1)
    assert both.tasks == ["nothing", "nothing"] and "is left as it is: Nothing is wrong" in both.notes[1][0]
    assert "noise" in both.found[0][0] and torch.equal(both.pictures[1].tensor, cup)


def test_what_is_left_out_of_a_call(pipe: RestorationPipeline) -> None:
    picture = crops(1, 16)[0]
    assert pipe(picture, "denoise").sigma[0] > 0  # estimated, as the command does
    mask = np.ones((16, 16), np.uint8)
    mask[4:8, 4:8] = 0
    assert pipe(picture, "inpaint", mask=mask).picture.size == (16, 16)
    assert len(repr(pipe(picture, "sr2"))) < 600  # no pixels


def test_a_blur_said_too_strong_is_spoken_of(pipe: RestorationPipeline, caplog: pytest.LogCaptureFixture) -> None:
    sharp = Picture(data.coffee()[150:250, 250:350]).tensor
    right, wrong = (
        Picture.from_tensor(GaussianBlur(sigma)(sharp[None])[0], path=Path(name))
        for sigma, name in ((3.0, "right.png"), (1.5, "wrong.png"))
    )
    notes = pipe([right, wrong], "gauss", steps=1).notes
    assert notes == [[], caplog.messages]
    (note,) = caplog.messages
    assert "wrong.png is sharper or noisier than gauss" in note
    assert "try gauss1.75 or less, or a larger sigma" in note


def test_a_note_is_logged_once_and_returned_each_time(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ship(monkeypatch, tiny_model)
    pipe = RestorationPipeline.from_pretrained()
    mask = np.zeros((16, 16), np.uint8)
    mask[:4] = 255
    PIL.Image.fromarray(mask).save(tmp_path / "mask.png")
    inpainted = pipe(crops(2, 16), "inpaint", steps=1, mask=tmp_path / "mask.png").notes
    coloured = [pipe(crops(1, 16)[0], "colorize", steps=1).notes for _ in range(2)]
    assert inpainted[0] == inpainted[1] == caplog.messages[:1] and "75 %" in inpainted[0][0]
    assert coloured == [[caplog.messages[1:]]] * 2 and "not trained for colorize" in coloured[0][0][0]
    assert len(caplog.messages) == 2
    assert pipe(crops(1, 16)[0], "colorize", steps=1, solver="ddnm").notes == [[]]
    ((noisy,),) = pipe(crops(1, 16)[0], "sr4", sigma=0.3, steps=1).notes
    assert "not trained for noise above 0.1" in noisy


class Shifted(LinearOperator):
    """Each pixel and the one 50 rows below are added: a mixture of distant pixels, in which not every frequency is left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x.roll(50, -2)) / 2

    def adjoint(self, y: torch.Tensor, size: tuple[int, int] | None = None) -> torch.Tensor:
        return (y + y.roll(-50, -2)) / 2


def test_an_operator_that_mixes_distant_pixels_is_noted(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship(monkeypatch, tiny_model)
    pipe = RestorationPipeline.from_pretrained()
    ((note,),) = pipe(crops(1, 96)[0], Shifted(), steps=1, sigma=0.01, solver="ddc").notes
    assert "not trained for an operator that mixes distant pixels" in note and "dds needs no training" in note
    for solver, sigma in (("dds", 0.01), ("ddnm", 0)):
        assert pipe(crops(1, 96)[0], Shifted(), steps=1, sigma=sigma, solver=solver).notes == [[]]


def test_jpeg_files_bring_their_own_noise(
    pipe: RestorationPipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for quality in (30, 95):
        PIL.Image.fromarray(data.coffee()[100:132, 200:232]).save(tmp_path / f"{quality}.jpg", quality=quality)
    rough, fine = tmp_path / "30.jpg", tmp_path / "95.jpg"
    assert pipe(rough, "sr2").sigma[0] > 3 * pipe(fine, "sr2").sigma[0] > 0
    assert pipe(rough, "sr2", sigma=0.5).sigma == [0.5]
    assert pipe(rough, "denoise", sigma=0.01).sigma == [0.01] and pipe(rough, "jpeg").sigma == [0.0]
    assert not caplog.messages
    assert pipe(fine, "jpeg").tasks == ["jpeg95"]
    assert "95.jpg states quality 95" in caplog.text


class HalfAdjoint(LinearOperator):
    """An operator whose adjoint is wrong by a factor."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def adjoint(self, y: Tensor, size: Size | None = None) -> Tensor:
        return y


def test_an_operator_of_ones_own_is_checked_on_first_use(pipe: RestorationPipeline) -> None:
    with pytest.raises(UserError, match="not the adjoint"):
        pipe(crops(1, 16)[0], HalfAdjoint())
    assert pipe(crops(1, 16)[0], Bicubic(2)).picture.size == (32, 32)


def test_settings_of_solvers_from_texts() -> None:
    solver = make_solver("ddnm", 7, {"eta": "1"})
    assert isinstance(solver, DDNM) and solver.steps == 7 and solver.eta == 1.0 and type(solver.eta) is float
    assert make_solver(solver, 9).steps == 9


def test_model_folders_that_cannot_be_used(tiny_model: Path, tmp_path: Path) -> None:
    load = RestorationPipeline.from_pretrained
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "none")
    with pytest.raises(UserError, match="is not a model"):
        load(tmp_path)
    (tmp_path / "model.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(UserError, match="ddc convert"):
        load(tmp_path / "model.pt")

    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    weights = broken / "network" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(UserError, match="is a pickle"):
        load(broken)
    shutil.rmtree(broken / "network")
    shutil.copytree(tiny_model / "prior" / "unet", broken / "network")
    with pytest.raises(UserError, match="takes 3 channels, expected 6"):
        load(broken)


def test_a_prior_alone_serves_the_other_solvers(tiny_model: Path) -> None:
    pipe = RestorationPipeline.from_pretrained(tiny_model / "prior")
    assert pipe(crops(1, 16)[0], "sr2", solver="ddnm", steps=2).picture.size == (32, 32)
    with pytest.raises(UserError, match="needs a data-consistency network"):
        pipe(crops(1, 16)[0], "sr2")
    both = RestorationPipeline.from_pretrained(tiny_model / "prior", tiny_model / "network")
    assert isinstance(both.network, DataConsistency)


def test_a_network_alone_takes_the_shipped_prior(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model / "network", tmp_path / "variant" / "network")
    ship(monkeypatch, tiny_model)
    pipe, whole = (RestorationPipeline.from_pretrained(f) for f in (tmp_path / "variant", tiny_model))
    restored = [p(crops(1, 16)[0], "sr2", steps=2).picture.tensor for p in (pipe, whole)]
    assert torch.equal(*restored)
    ship(monkeypatch, tmp_path / "none")
    with pytest.raises(UserError, match="none is shipped with this package"):
        RestorationPipeline.from_pretrained(tmp_path / "variant")


def test_only_the_measured_steps_wait_for_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device, expected in (("cpu", 0), ("cuda:1", telling.MEASURED_STEPS)):
        ticking = telling.Clock(time.perf_counter(), 1, None, torch.device(device))
        for index in range(5):
            x = torch.zeros(1)
            ticking.tick(Step(index, 5, 0, x, x), (8, 8), 1, 1)
        assert waited == [torch.device(device)] * expected and ticking.forecast is not None


def test_devices() -> None:
    assert str(pick_device("cpu")) == "cpu"
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(UserError, match="is not available"):
        pick_device("toaster")


def test_no_default_model_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ship(monkeypatch, tmp_path / "default")
    with pytest.raises(UserError, match="--model"):
        RestorationPipeline.from_pretrained()


def test_a_model_in_a_closed_folder_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path, **_: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", closed)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
        RestorationPipeline.from_pretrained(tiny_model)
