"""What the diagnosis finds in small pictures that other programs damaged, and what it leaves alone."""

import io

import numpy as np
import PIL.Image
import PIL.ImageDraw
import pytest
from scipy.ndimage import gaussian_filter
from skimage import data

from ddc.diagnosis.blocks import detect_blocks
from ddc.diagnosis.content import belongs_to_picture, find_fading, find_marks, is_drawing
from ddc.diagnosis.enlargement import detect_enlargement
from ddc.diagnosis.findings import NOTHING, Findings, Treatment, examine, plan_treatment, treatment
from ddc.diagnosis.grain import measure_noise
from ddc.diagnosis.planes import Plane, luma_chroma
from ddc.estimates import BlurEstimate
from ddc.images import Picture

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


def test_noise_has_a_colour() -> None:
    assert not measure_noise(unit(COFFEE)).luma_found
    white = measure_noise(unit(with_grain(COFFEE, 0.05, 0)))
    assert white.luma_found and white.white == pytest.approx(0.05, rel=0.15) and not white.coloured
    coarse = measure_noise(unit(with_grain(COFFEE, 0.04, 0.8)))
    assert coarse.luma_found and coarse.chroma_found and coarse.coloured
    assert coarse.luma.fine < 0.04 < coarse.luma.middle and 0.05 < coarse.white < 0.12
    assert not measure_noise(unit(COFFEE[:16, :16])).luma_found  # too small to tell


def test_drawings_and_cut_outs_are_known() -> None:
    paper = PIL.Image.new("RGB", (300, 300), "white")
    for offset in range(0, 300, 25):
        PIL.ImageDraw.Draw(paper).line((offset, 0, 300 - offset, 300), fill="black", width=2)
    assert is_drawing(unit(np.asarray(paper))) and is_drawing(unit(jpeg(np.asarray(paper), 92)))
    assert not is_drawing(unit(COFFEE)) and not is_drawing(unit(data.rocket()))
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


def test_what_is_found_becomes_a_plan() -> None:
    assert treatment(Findings()) is None and treatment(Findings(quality=92)) is None
    assert treatment(Findings(hole=120)) == Treatment("inpaint")
    assert treatment(Findings(quality=30, grid=(5, 0), saved_again=True)) == Treatment("jpeg30", 0.008, grid=(5, 0))
    assert treatment(Findings(drawing=True, sigma=0.1)) is None
    soft = treatment(Findings(blur=BlurEstimate(radius=3.0), quality=50))
    assert soft == Treatment("jpeg50")  # its marks would grow
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


@pytest.mark.parametrize(
    "plan", [Treatment("sr4", shrink=4.0), Treatment("sr3", shrink=2.5), Treatment("jpeg30", grid=(5, 3))]
)
def test_a_plan_returns_pictures_at_their_place(plan: Treatment) -> None:
    source = Picture(COFFEE[:101, :90])
    prepared = plan.prepared(source)
    scale = int(plan.task[2:]) if plan.task.startswith("sr") else 1
    enlarged = resized(prepared.pixels, scale, RESAMPLING.BICUBIC)
    back = plan.finished(Picture(unit(enlarged)), source)
    assert back.size == source.size
    assert np.abs(back.pixels - unit(source.pixels)).mean() < 0.03
    if plan.grid != (0, 0):
        assert prepared.size == (104, 95) and np.array_equal(back.pixels, unit(source.pixels))
