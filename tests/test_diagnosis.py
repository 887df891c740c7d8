"""What the diagnosis finds in small pictures that other programs damaged, and what it leaves alone."""

import io
import math
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFilter
import pytest
import torch
from scipy.ndimage import convolve, gaussian_filter
from skimage import data

from ddc.diagnosis import findings, shake
from ddc.diagnosis.blocks import FirstSaving, detect_blocks
from ddc.diagnosis.content import belongs_to_picture, find_fading, find_marks, is_drawing, with_fixed_colours
from ddc.diagnosis.enlargement import Enlargement, detect_enlargement
from ddc.diagnosis.findings import Findings, examine, is_demosaiced
from ddc.diagnosis.grain import Bands, Noise, measure_noise
from ddc.diagnosis.planes import Plane, luma_chroma
from ddc.diagnosis.shake import estimate_kernel, explains, is_cut_off, spread_of
from ddc.diagnosis.treatment import (
    LEAST_ERROR,
    LENS,
    NOTHING,
    Conditions,
    Treatment,
    composition,
    noise_in_bands,
    plan_treatment,
    regret,
    treatment,
    with_marks_filled,
)
from ddc.estimates import BlurEstimate, Spectrum, blur_before_jpeg, direction_spectrum, estimate_blur, with_jpeg_noise
from ddc.images import Picture, from_light, to_light
from ddc.operators.blur import KernelBlur, disc_kernel, gaussian_kernel, motion_kernel
from ddc.operators.inpaint import Inpaint
from ddc.problems import Problem, make_problem

RESAMPLING = PIL.Image.Resampling
COFFEE = data.coffee()[:384, :384]
CUP = COFFEE[100:300, 100:300]


def jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.asarray(PIL.Image.open(file))


def resized(pixels: np.ndarray, factor: float, method: RESAMPLING) -> np.ndarray:
    height, width = (round(length * factor) for length in pixels.shape[:2])
    return np.asarray(PIL.Image.fromarray(pixels).resize((width, height), method))


def unit(pixels: np.ndarray) -> Plane:
    return pixels.astype(np.float32) / 255


def luma(pixels: np.ndarray) -> Plane:
    return luma_chroma(unit(pixels))[0]


def with_grain(pixels: np.ndarray, sigma: float, width: float) -> np.ndarray:
    """Coarse noise, independent in each channel, as demosaicing and denoising in a camera leave it."""
    noise = gaussian_filter(np.random.default_rng(0).normal(size=pixels.shape), (width, width, 0))
    return ((unit(pixels) + sigma * noise / noise.std()).clip(0, 1) * 255).round().astype(np.uint8)


@pytest.mark.parametrize(("quality", "cut"), [(10, 0), (20, 0), (30, 3), (50, 5), (75, 0), (85, 2)])
def test_jpeg_is_found_in_pixels(quality: int, cut: int) -> None:
    found = detect_blocks(luma(jpeg(CUP, quality)[cut:, cut:]))
    assert found is not None
    assert abs(found.quality - quality) <= 1 and (found.top, found.left) == (-cut % 8, -cut % 8)


@pytest.mark.parametrize("quality", [10, 25])
def test_a_coarse_jpeg_is_not_called_blurred(quality: int, tmp_path: Path) -> None:
    PIL.Image.fromarray(COFFEE[:256, :256]).save(tmp_path / "a.jpg", quality=quality)
    picture = Picture.read(tmp_path / "a.jpg")
    assert blur_before_jpeg(picture, 0.0).spread > 0.7  # it has as little fine detail
    assert examine(picture).sentences() == [f"It was compressed as JPEG of quality {quality}."]


@pytest.mark.parametrize("width", [1.2, 2.0])
def test_the_blur_before_jpeg_is_estimated(width: float, tmp_path: Path) -> None:
    blurred = gaussian_filter(data.astronaut()[:256, :256].astype(float), (width, width, 0))
    PIL.Image.fromarray(blurred.round().astype(np.uint8)).save(tmp_path / "a.jpg", quality=75)
    picture = Picture.read(tmp_path / "a.jpg")
    assert blur_before_jpeg(picture, 0.0).width == pytest.approx(width, abs=0.15)
    assert estimate_blur(picture, with_jpeg_noise(picture, 0.0)).width > width + 0.05  # JPEG made it look wider


@pytest.mark.parametrize(("width", "quality", "found"), [(1.2, 75, False), (1.2, 90, True), (2.0, 75, True)])
def test_softness_of_cameras_beneath_jpeg_is_left_alone(
    width: float, quality: int, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found:  # whether it was shaken does not matter
        monkeypatch.setattr(findings, "SMALLEST_SHAKEN", math.inf)
    soft = gaussian_filter(data.astronaut()[:256, :256].astype(float), (width, width, 0)).round().astype(np.uint8)
    PIL.Image.fromarray(soft).save(tmp_path / "soft.jpg", quality=quality)
    picture = Picture.read(tmp_path / "soft.jpg")
    seen = examine(picture)
    assert (seen.blur is not None) == found
    if not found:
        monkeypatch.setattr("ddc.diagnosis.treatment.examine", lambda picture: seen)  # once is enough
        plan, told = plan_treatment(picture), composition(seen)
        assert plan.task == NOTHING and plan.because[-1].startswith("It has so little fine detail")
        assert told is not None and told.task == "denoise"


@pytest.mark.parametrize(("first", "second", "cut"), [(30, 90, 0), (30, 90, 5), (50, 95, 4)])
def test_an_earlier_jpeg_is_found(first: int, second: int, cut: int) -> None:
    again = jpeg(jpeg(CUP, first)[cut:, cut:], second)
    found = detect_blocks(luma(again), own=second)
    assert found is not None and abs(found.quality - first) <= 2 and found.top == -cut % 8
    assert detect_blocks(luma(jpeg(CUP, second)), own=second) is None


@pytest.mark.parametrize("photograph", [data.astronaut(), data.coffee(), data.rocket()[:400, 100:500]])
def test_pixels_that_were_not_compressed_have_no_blocks(photograph: np.ndarray) -> None:
    reduced = resized(photograph, 0.5, RESAMPLING.BOX)  # whatever they were before
    assert detect_blocks(luma(reduced)) is None


@pytest.mark.parametrize(
    ("factor", "method"),
    [
        (1.5, RESAMPLING.BICUBIC),
        (2, RESAMPLING.BILINEAR),
        (2, RESAMPLING.LANCZOS),
        (2.5, RESAMPLING.BICUBIC),
        (3, RESAMPLING.NEAREST),
        (4, RESAMPLING.BICUBIC),
    ],
)
def test_an_enlargement_is_found(factor: float, method: RESAMPLING) -> None:
    small = resized(data.astronaut(), 1 / factor, RESAMPLING.BOX)[: round(400 / factor), : round(400 / factor)]
    found = detect_enlargement(luma(resized(small, factor, method)), jpeg=False)
    assert found is not None and found.factor == pytest.approx(factor, rel=0.03)


def test_an_enlargement_is_found_after_jpeg_and_a_blur_is_none() -> None:
    small = resized(data.astronaut(), 1 / 4, RESAMPLING.BOX)
    found = detect_enlargement(luma(jpeg(resized(small, 4, RESAMPLING.BICUBIC), 90)), jpeg=True)
    assert found is not None and found.factor == pytest.approx(4, rel=0.05)
    for width in (1, 2, 3):
        assert detect_enlargement(luma(gaussian_filter(COFFEE, (width, width, 0))), jpeg=False) is None


def test_demosaicing_is_no_enlargement() -> None:
    """Two of three colours of each pixel are means of their neighbours, which leaves traces as of an enlargement."""
    scene = gaussian_filter(data.astronaut(), (0.8, 0.8, 0))  # as soft as a camera's pictures at full size
    seen = np.zeros(scene.shape)
    for row, column, channel in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)):
        seen[row::2, column::2, channel] = 1
    weights = np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]])[..., None]
    made, count = (convolve(values, weights) for values in (seen * scene, seen))
    demosaiced = np.rint(np.where(seen > 0, scene, made / count)).astype(np.uint8)
    found = detect_enlargement(luma(demosaiced), jpeg=False)
    assert found is not None and is_demosaiced(found)
    nothing = examine(Picture(demosaiced))
    assert nothing.enlargement is None and nothing.blur is None
    twice = resized(resized(data.astronaut(), 0.5, RESAMPLING.BOX), 2, RESAMPLING.BICUBIC)
    found = detect_enlargement(luma(twice), jpeg=False)
    assert found is not None and not is_demosaiced(found)


def test_noise_has_a_colour() -> None:
    assert not measure_noise(unit(COFFEE)).found
    white = measure_noise(unit(with_grain(COFFEE, 0.05, 0)))
    assert white.found and white.white == pytest.approx(0.05, rel=0.15) and not white.coloured
    coarse = measure_noise(unit(with_grain(COFFEE, 0.04, 0.8)))
    assert coarse.found and coarse.coloured
    assert coarse.luma.fine < 0.04 < coarse.luma.middle and 0.05 < coarse.white < 0.12
    assert not measure_noise(unit(COFFEE[:16, :16])).found  # too small to tell


def with_camera_noise(pixels: np.ndarray, colour: float, sparse: bool = False) -> np.ndarray:
    """Weak noise as of a camera in poor light: coarse in luma, and coarser in colour. Sparse, it is as strong, but dots."""
    random = np.random.default_rng(0)
    points = random.normal(size=pixels.shape[:2]) * (random.random(pixels.shape[:2]) < (0.02 if sparse else 1))
    grain, cloud = gaussian_filter(points, 0.9), gaussian_filter(random.normal(size=pixels.shape), (2.5, 2.5, 0))
    cloud -= (cloud @ [0.299, 0.587, 0.114])[..., None]
    noise = 0.007 * (grain / grain.std())[..., None] + colour * cloud / cloud.std()
    return ((unit(pixels) + noise).clip(0, 1) * 255).round().astype(np.uint8)


def test_weak_noise_of_a_camera_is_known_by_its_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = with_camera_noise(COFFEE, 0.014)
    for pixels, quality in ((noisy, None), (jpeg(noisy, 80), 80)):
        seen = measure_noise(unit(pixels), quality)
        assert seen.found and seen.coloured and 0.012 < seen.luma.middle < 0.035
        assert seen.covering == pytest.approx(0.03 + 0.7 * seen.luma.middle)
    assert not measure_noise(unit(with_camera_noise(COFFEE, 0.0))).found  # it may be the picture's own
    assert not measure_noise(unit(with_camera_noise(COFFEE, 0.014, sparse=True))).found
    plan = composition(examine(Picture(noisy)))
    assert plan is not None and plan.task == "denoise" and plan.solver == LEAST_ERROR
    assert plan.sigma == pytest.approx(measure_noise(unit(noisy)).covering)
    # coarse noise has directions by chance, which are not those of a shake
    monkeypatch.setattr(findings, "is_soft", lambda luma, drop=0.0: True)
    searched: list[float] = []
    monkeypatch.setattr(findings, "_shake", lambda picture, luma, sigma, quality, blur: searched.append(sigma))
    examine(Picture(noisy))
    assert measure_noise(unit(noisy)).unblurred and not searched
    soft = gaussian_filter(COFFEE, (3, 3, 0))
    examine(Picture(soft))
    assert not measure_noise(unit(soft)).unblurred and len(searched) == 1
    wide = Noise(Bands(0.01, 0.02, 0.04), found=True, white=0.02)  # the strength of coarse noise is that of white noise
    assert wide.coloured and not wide.unblurred and wide.covering > findings.NOISIEST_SHAKEN


def test_drawings_and_cut_outs_are_known() -> None:
    paper = PIL.Image.new("RGB", (300, 300), "white")
    for offset in range(0, 300, 25):
        PIL.ImageDraw.Draw(paper).line((offset, 0, 300 - offset, 300), fill="black", width=2)
    assert is_drawing(unit(np.asarray(paper))) and is_drawing(unit(jpeg(np.asarray(paper), 92)))
    assert not is_drawing(unit(COFFEE)) and not is_drawing(unit(data.rocket()))
    dithered = PIL.Image.fromarray(COFFEE).convert("1").convert("RGB")
    assert is_drawing(unit(np.asarray(dithered)))
    alpha = np.zeros((96, 96), np.float32)
    alpha[30:70, 30:70] = 1
    assert belongs_to_picture(alpha) and not belongs_to_picture(1 - alpha)
    scattered = (np.random.default_rng(0).random((96, 96)) < 0.08).astype(np.float32)
    assert not belongs_to_picture(scattered)


def test_an_old_print_is_known() -> None:
    faded = (0.18 + 0.6 * unit(COFFEE)) * np.array([1.08, 1, 0.76], np.float32)
    fading = find_fading(faded)
    assert fading is not None and find_fading(unit(COFFEE)) is None
    assert np.abs(fading.corrected(faded) - unit(COFFEE)).mean() < np.abs(faded - unit(COFFEE)).mean() / 2
    scratched = faded.copy()
    scratched[40:340, 100:102] = 0.95
    marks = find_marks(scratched)
    assert marks is not None and marks[60:320, 100:102].mean() > 0.9 and marks.mean() < 0.1


def test_colours_are_fixed_without_a_network() -> None:
    faded = Picture((0.18 + 0.6 * unit(COFFEE)) * np.array([1.08, 1, 0.76], np.float32), bits=32)
    fixed = with_fixed_colours(faded)
    assert np.abs(fixed.pixels - unit(COFFEE)).mean() < np.abs(faded.pixels - unit(COFFEE)).mean() / 2
    flat = with_fixed_colours(Picture(np.full((40, 40, 3), 128, np.uint8)))
    assert np.abs(flat.pixels - 0.5).max() < 0.01  # nothing to stretch


def test_scratches_are_filled_on_demand() -> None:
    scratched = COFFEE.copy()
    scratched[40:340, 100:102] = 245
    plan = with_marks_filled(Treatment("denoise", 0.05), Picture(scratched))
    assert (
        plan.task == "inpaint"
        and plan.sigma == 0.05
        and plan.marks is not None
        and plan.marks[60:320, 100].mean() > 0.7
    )
    assert isinstance(plan.operator, Inpaint) and np.array_equal(plan.operator.mask[0, 0] == 0, plan.marks)
    grey = Picture(np.full((64, 64, 3), 100, np.uint8))
    assert with_marks_filled(Treatment(NOTHING), grey) == Treatment(NOTHING)


def test_the_first_saving_is_found_and_comes_back() -> None:
    first = jpeg(COFFEE, 30)
    again = jpeg(first[3:, 5:], 90)
    found = examine(Picture(again))
    assert found.first == FirstSaving(30, 3, 5)
    plan = treatment(found)
    assert plan is not None and plan.task == "jpeg30" and plan.sigma == 0
    back = plan.prepared(Picture(again)).pixels[16:-16, 16:-16].astype(int)
    original = first[16:-16, 16:-16]
    assert np.abs(back - original).mean() < np.abs(again[13:-16, 11:-16].astype(int) - original).mean() / 2


def test_a_picture_that_was_saved_again_keeps_a_part_of_itself() -> None:
    first = jpeg(COFFEE, 30)[3:, 5:]
    plan = treatment(examine(Picture(first)))
    assert plan is not None and plan.share == 0.6
    measured = unit(plan.prepared(Picture(first)).pixels)
    done = plan.finished(Picture(np.zeros_like(measured), bits=32), Picture(first)).pixels
    assert done.shape == first.shape and np.allclose(done, 0.4 * measured[3:, 5:], atol=1e-6)


@pytest.mark.parametrize("factor", [2.5, 3.0, 5.0])
def test_repeated_pixels_tell_their_factor(factor: float) -> None:
    small = resized(COFFEE, 1 / factor, RESAMPLING.BOX)
    for large in (resized(small, factor, RESAMPLING.NEAREST), jpeg(resized(small, factor, RESAMPLING.NEAREST), 90)):
        found = detect_enlargement(luma(large), jpeg=True)
        assert found is not None and found.factor == pytest.approx(factor, rel=0.05)


def test_detail_of_a_sharp_picture_is_no_noise() -> None:
    random = np.random.default_rng(0)
    coarse = gaussian_filter(random.normal(size=(384, 384, 3)), (3, 3, 0))
    pixels = 0.5 + 0.05 * coarse / coarse.std() + random.normal(0, 0.003, (384, 384, 3))
    seen = measure_noise(pixels.astype(np.float32))
    assert seen.chroma.coarse > 0.05 and seen.chroma.middle < 0.3 * seen.chroma.coarse and not seen.found


def test_a_scene_of_two_colours_has_not_faded() -> None:
    ramp = np.linspace(0, 1, 20000, dtype=np.float32)[:, None]
    sea = np.concatenate([0.10 + ramp * 0.70, 0.12 + ramp * 0.60, 0.15 + ramp * 0.53], axis=1).reshape(100, 200, 3)
    print_of_one_tint = sea * np.float32([0.9, 0.85, 0.6]) + np.float32([0.03, 0.0, 0.0])
    assert find_fading(sea) is None and find_fading(print_of_one_tint) is not None


def test_what_is_found_becomes_a_plan() -> None:
    weak = treatment(Findings(quality=75))
    assert weak is not None and weak.task == "denoise" and weak.solver == "one-pass" and 0.02 < weak.sigma < 0.04
    assert treatment(Findings()) is None and treatment(Findings(quality=92)) is None
    assert treatment(Findings(quality=75, soft=True)) is None  # there is little to gain
    assert treatment(Findings(hole=120)) == Treatment("inpaint")
    assert treatment(Findings(quality=30, grid=(5, 0), saved_again=True)) == Treatment(
        "jpeg30", 0.008, margins=(3, 0), share=0.6
    )
    assert treatment(Findings(drawing=True, sigma=0.1)) is None
    soft = treatment(Findings(blur=BlurEstimate(radius=3.0), quality=50))
    assert soft == Treatment("jpeg50", share=0.6)  # its marks would grow
    coarse = treatment(Findings(quality=10))
    assert coarse is not None and coarse.share == 0.8
    assert "invented" in " ".join(Findings(hole=120).sentences())


def test_pictures_are_examined() -> None:
    assert plan_treatment(Picture(COFFEE)).task == NOTHING
    grainy = plan_treatment(Picture(with_grain(COFFEE, 0.045, 0.8)))
    assert grainy.task == "denoise" and 0.06 < grainy.sigma <= 0.12 and "coarse noise" in " ".join(grainy.because)
    twice = examine(Picture(jpeg(COFFEE, 20)))
    assert twice.quality == 20 and twice.saved_again and twice.compressed
    alpha = np.full(COFFEE.shape[:2], 255, np.uint8)
    alpha[100:220, 90:200] = 0
    assert examine(Picture(COFFEE, alpha)).hole == 110
    assert (
        examine(Picture(COFFEE, 255 - alpha)).cut_out and plan_treatment(Picture(COFFEE, 255 - alpha)).task == NOTHING
    )
    alpha = np.zeros(COFFEE.shape[:2], np.uint8)
    alpha[30:350, 40:360] = 255
    noisy = COFFEE / 255 + 0.06 * np.random.default_rng(0).standard_normal(COFFEE.shape)
    plan = plan_treatment(Picture((255 * noisy.clip(0, 1)).round().astype(np.uint8), alpha))
    assert plan.task == "denoise" and 0.05 < plan.sigma < 0.08 and "background is kept" in plan.because[0]


def test_values_beyond_black_and_white_are_examined() -> None:
    noisy = unit(COFFEE) + 0.1 * np.random.default_rng(0).standard_normal(COFFEE.shape).astype(np.float32)
    assert noisy.min() < 0 and noisy.max() > 1
    assert plan_treatment(Picture(noisy, bits=32)).task == "denoise"


def test_a_lens_blurs_light(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disc that blurred linear light is no disc in the values of sRGB, and is undone in linear light."""
    light = to_light(unit(data.astronaut()[:320, 60:380]))
    disc = disc_kernel(4.0).numpy()[0, 0] if disc_kernel(4.0).ndim == 4 else disc_kernel(4.0).numpy()
    blurred = np.stack([convolve(light[..., c], disc, mode="reflect") for c in range(3)], axis=2)
    values = from_light(blurred) + 0.003 * np.random.default_rng(0).standard_normal(blurred.shape)
    picture = Picture((255 * values.clip(0, 1)).round().astype(np.uint8))
    found = examine(picture)
    assert found.blur is not None and abs(found.blur.radius - 4) < 0.15 and found.light > 0 and found.kernel is None
    plan = plan_treatment(picture, told=True)
    assert plan.light and plan.solver == LENS and "in linear light" in plan.in_words()
    prepared = plan.prepared(picture)
    assert np.allclose(prepared.pixels, to_light(unit(picture.pixels)), atol=1e-6)
    back = plan.finished(prepared, picture)
    assert np.allclose(back.pixels, unit(picture.pixels), atol=1e-5) and back.bits == 8
    plain = treatment(found)
    assert plain is not None and plain.light and plain.solver is None  # of a model without a posterior network


def test_light_and_values_are_inverse() -> None:
    values = np.linspace(0, 1, 257, dtype=np.float32)
    assert np.allclose(from_light(to_light(values)), values, atol=1e-6)
    assert to_light(np.float32([0, 0.5, 1])).tolist() == pytest.approx([0, 0.21404, 1], abs=1e-5)


def test_noise_of_a_dark_picture_is_removed() -> None:
    """All its blocks touch black, so that nothing but the finest noise can be measured."""
    dark = unit(COFFEE) ** 7 + 0.08 * np.random.default_rng(0).standard_normal(COFFEE.shape)
    assert measure_noise(dark.clip(0, 1)) == Noise()
    found = Findings(sigma=0.07, quality=80)
    for plan in (treatment(found), composition(found)):
        assert plan is not None and plan.task == "denoise" and plan.sigma == pytest.approx(0.077)
    faint = composition(Findings(sigma=0.01, quality=80))
    assert faint is not None and faint.solver == LEAST_ERROR and faint.sigma < 0.03


def test_a_path_that_fills_its_window_is_no_kernel() -> None:
    window = torch.zeros(shake.TAPS, shake.TAPS)
    window[17, 4:30] = 1
    assert not is_cut_off(window)
    window[17] = 1
    assert is_cut_off(window) and is_cut_off(window.T)


@pytest.mark.parametrize(
    "plan", [Treatment("sr4", shrink=4.0), Treatment("sr3", shrink=2.5), Treatment("jpeg30", margins=(3, 5))]
)
def test_a_plan_returns_pictures_at_their_place(plan: Treatment) -> None:
    source = Picture(COFFEE[:101, :90])
    prepared = plan.prepared(source)
    scale = int(plan.task[2:]) if plan.task.startswith("sr") else 1
    enlarged = resized(prepared.pixels, scale, RESAMPLING.BICUBIC)
    back = plan.finished(Picture(unit(enlarged)), source)
    assert back.size == source.size
    assert np.abs(back.pixels - unit(source.pixels)).mean() < 0.03
    if plan.margins != (0, 0):
        assert prepared.size == (104, 95) and np.array_equal(back.pixels, unit(source.pixels))


def test_a_composition_is_told() -> None:
    white = Noise(Bands(0.05, 0.05, 0.05), Bands(0.05, 0.05, 0.05), found=True, white=0.05)
    sigma, colour = noise_in_bands(white)
    assert sigma == pytest.approx(0.05) and np.allclose(colour, 0)
    coarse = Noise(Bands(0.02, 0.06, 0.3), Bands(0.01, 0.03, 0.03), found=True, white=0.06)
    sigma, colour = noise_in_bands(coarse)
    assert 0.02 < sigma < 0.06 and colour[0] < 0 < colour[1] < colour[2] < 1.5 and colour[3] < colour[4]
    grainy = Findings(noise=coarse, quality=75)  # noise that was found hides the rest
    for strength in (0.6, 1.0):
        plan = composition(grainy, strength)
        usual = treatment(grainy, strength)
        assert plan is not None and usual is not None and plan.task == "denoise" and plan.sigma == usual.sigma
        assert usual.solver is None and plan.solver == LEAST_ERROR and plan.conditions == Conditions(quality=75)
    assert composition(Findings(noise=white)) == treatment(Findings(noise=white))
    out_of_focus = Findings(blur=BlurEstimate(radius=3.0), sigma=0.02, quality=85)
    soft, usual = composition(out_of_focus), treatment(out_of_focus)
    assert soft is not None and usual is not None and soft.task == "disc3" and soft.sigma == usual.sigma
    assert soft.solver == "posterior:realism=0.25:rounds=0"
    thumbnail = composition(Findings(enlargement=Enlargement(2.0, 1.0, 20.0), quality=75))
    assert thumbnail is not None and thumbnail.task == "sr2" and thumbnail.conditions == Conditions(quality=75)
    for slight in (Findings(quality=75), Findings(quality=75, soft=True)):
        weak = composition(slight)
        assert weak is not None and weak.task == "denoise" and weak.solver == LEAST_ERROR
        assert weak.conditions == Conditions(quality=75) and 0.01 < weak.sigma < 0.03
    again = composition(Findings(quality=30, grid=(5, 0), saved_again=True))
    assert again == Treatment("jpeg30", 0.008, margins=(3, 0), share=0.6) and composition(Findings()) is None
    numbers = Conditions(True, 75, colour).tensor(torch.device("cpu"))
    assert numbers.shape == (1, 9) and numbers[0, :3].tolist() == [0, 1, 0.25]


def test_a_blur_that_the_picture_contradicts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sharp = Picture(np.ascontiguousarray(data.astronaut()[:128, 128:256]))
    blurred = Picture(np.rint(255 * gaussian_filter(unit(sharp.pixels), (2, 2, 0))).astype(np.uint8))
    guessed = Findings(blur=BlurEstimate(width=2.0))
    monkeypatch.setattr("ddc.diagnosis.treatment.examine", lambda picture: guessed)
    for told in (True, False):
        assert plan_treatment(blurred, told).task == "gauss2"
        left = plan_treatment(sharp, told)
        assert left.task == NOTHING and "sharper or noisier" in left.in_words()


def test_holes_of_a_large_picture_are_not_regretted() -> None:
    picture = Picture(np.full((40, 600, 3), 128, np.uint8))
    mask = torch.ones(1, 1, 40, 600)
    mask[..., 300:330] = 0
    assert regret(picture, picture, Problem(Inpaint(mask), 0.0, "inpaint")) is None


def test_strength_scales_the_noise() -> None:
    noisy = Findings(noise=Noise(Bands(0.05, 0.05, 0.05), found=True, white=0.05))
    weak, usual, strong = (treatment(noisy, factor) for factor in (0.6, 1.0, 1.6))
    assert weak and usual and strong and weak.sigma == pytest.approx(0.6 * usual.sigma)
    assert usual.sigma < strong.sigma


def test_a_worse_result_is_taken_back() -> None:
    problem = make_problem("denoise", 0.05)
    noisy = Picture(with_grain(COFFEE, 0.05, 0))
    assert regret(Picture(COFFEE), noisy, problem) is None
    rows = np.sin(np.arange(COFFEE.shape[0]) * 1.2)[:, None, None]
    waves = Picture((COFFEE + 60 * rows).clip(0, 255).astype(np.uint8))
    assert "explain" in str(regret(waves, Picture(COFFEE), problem))
    faint = Picture((COFFEE + 14 * rows).clip(0, 255).astype(np.uint8))
    assert "waves" in str(regret(faint, Picture(gaussian_filter(COFFEE, (1, 1, 0))), problem))
    smooth = Picture(gaussian_filter(COFFEE, (4, 4, 0)))
    assert "belongs to the picture" in str(regret(smooth, Picture(COFFEE), make_problem("denoise", 0.1)))
    gravel = np.repeat(data.gravel()[:256, :256, None], 3, axis=2)
    operator = KernelBlur(motion_kernel(12, 30))
    shaken = operator(torch.from_numpy(unit(gravel)).permute(2, 0, 1)[None])[0].permute(1, 2, 0).numpy()
    shaken = Picture(np.rint(255 * shaken.clip(0, 1)).astype(np.uint8))
    assert regret(Picture(gravel), shaken, Problem(operator, 0.02, "blur")) is None  # texture that the shake had hidden
    along = KernelBlur(motion_kernel(12, 0))  # it removes waves of twelve pixels, so that they explain the picture, too
    pale = 0.5 + 0.3 * (unit(shaken.pixels) - 0.5)
    stripes = pale + 0.15 * np.sin(np.arange(256) * (2 * np.pi / 12))[None, :, None]
    pale_picture, striped = (Picture(np.rint(255 * x).astype(np.uint8)) for x in (pale, stripes))
    assert "waves" in str(regret(striped, pale_picture, Problem(along, 0.02, "blur")))


def test_a_shaken_picture_shows_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    path = torch.zeros(15, 15)
    path[3:10, 4] = 1.0
    path[9, 4:12] = 0.7
    kernel = path / path.sum()
    clean = torch.from_numpy(unit(data.astronaut()[:224, 120:344]).mean(2))
    blurred = KernelBlur(kernel)(clean[None, None])[0, 0].numpy()
    found = estimate_kernel(blurred[16:-16, 16:-16])
    spectra = [torch.fft.rfft2(one, s=(64, 64)) for one in (found, kernel)]
    likeness = torch.fft.irfft2(spectra[0] * spectra[1].conj(), s=(64, 64)).max() / found.norm() / kernel.norm()
    assert likeness > 0.8 and float(found.sum()) == pytest.approx(1, abs=1e-5) and float(found.min()) >= 0
    assert spread_of(kernel) == pytest.approx(spread_of(found), rel=0.3)
    assert spread_of(motion_kernel(12, 0)) == pytest.approx(12 / 12**0.5, rel=0.1)
    monkeypatch.setattr(findings, "estimate_kernel", lambda luma: kernel)
    monkeypatch.setattr(shake, "LEAST_SHARE_IN_JPEG", 1.0)  # nothing explains as much
    grey = blurred[16:-16, 16:-16]
    picture = Picture(np.rint(255 * grey.clip(0, 1))[..., None].repeat(3, 2).astype(np.uint8))
    accepted = [findings._shake(picture, grey, 0.002, quality, None) is not None for quality in (None, 95, 75)]
    assert accepted == [True, True, False]


def test_a_rough_kernel_explains_a_shake_but_nothing_else() -> None:
    clean = torch.from_numpy(unit(data.astronaut()[:256, 100:356]).mean(2)).float()
    noise = np.random.default_rng(0).normal(0, 0.01 / 3**0.5, (256, 256))
    path = torch.zeros(15, 15)
    path[3:10, 4], path[9, 4:12] = 1.0, 0.7
    line, even = motion_kernel(15, 30), gaussian_kernel(2, 2)
    rough = torch.rand(15, 15, generator=torch.Generator().manual_seed(0)) * (path > 0)

    def spectrum(kernel: torch.Tensor) -> Spectrum:
        blurred = KernelBlur(kernel / kernel.sum())(clean[None, None])[0, 0].numpy()
        return direction_spectrum((blurred + noise)[16:-16, 16:-16], 0.01)

    assert explains(spectrum(path), rough / rough.sum(), None, False)
    assert not explains(spectrum(path), rough / rough.sum(), None, True)  # beneath coarse JPEG it must explain more
    assert not explains(spectrum(torch.ones(1, 1)), rough / rough.sum(), None, False)
    assert not explains(spectrum(even), even, BlurEstimate(width=2), False)
    assert explains(spectrum(line), line, None, False)
    assert not explains(spectrum(line), line, BlurEstimate(length=15, angle=30), False)  # its shape is known
    weak = gaussian_kernel(1, 1)
    assert not explains(spectrum(weak), weak, None, False)  # soft, by a blur that is not worth undoing


def test_a_gaussian_blur_is_not_taken_for_a_shake() -> None:
    photo = PIL.Image.fromarray(data.astronaut()[80:240, 180:340]).filter(PIL.ImageFilter.GaussianBlur(2))
    found = examine(Picture(np.asarray(photo)))
    assert found.kernel is None and found.blur is not None
    assert found.blur.width == pytest.approx(2, abs=0.4)


def test_findings_are_said_in_words() -> None:
    said = Findings(BlurEstimate(0.0, 1.5), hole=120, cut_out=True, quality=20, saved_again=True).sentences()
    assert said == [
        "Its transparent background is kept.",
        "It has holes of up to 120 pixels.",
        "What fills such large holes is invented.",
        findings._blur_in_words(BlurEstimate(0.0, 1.5)),
        "It was compressed as JPEG of quality 20, and saved again since.",
    ]
    assert "1.5" in said[3] and "9 pixels" in findings._blur_in_words(BlurEstimate(0.0, 0.0, 9.0, 30.0))
