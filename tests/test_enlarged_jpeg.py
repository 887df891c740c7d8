"""JPEG files that were enlarged afterwards: found beneath the enlargement, and undone."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from skimage import data

from ddc.diagnosis.enlarged_jpeg import EnlargedJPEG, detect_enlarged_jpeg, shrunk
from ddc.diagnosis.enlargement import Enlargement
from ddc.diagnosis.findings import Findings, examine
from ddc.diagnosis.treatment import Conditions, composition, jpeg_error, plan_treatment, treatment
from ddc.images import Picture

RESAMPLING = PIL.Image.Resampling
SMALL = PIL.Image.fromarray(data.coffee()).resize((240, 160), RESAMPLING.LANCZOS)


def enlarged(
    folder: Path, factor: float, method: RESAMPLING, quality: int | None, last: int | None = None
) -> tuple[Picture, np.ndarray]:
    """An enlarged file, which may be saved as JPEG again, and the levels of the small one."""
    small = SMALL
    if quality is not None:
        small.save(folder / "small.jpg", quality=quality)
        small = PIL.Image.open(folder / "small.jpg").convert("RGB")
    large = small.resize((round(small.width * factor), round(small.height * factor)), method)
    path = folder / ("large.png" if last is None else "large.jpg")
    large.save(path, **({} if last is None else {"quality": last}))
    return Picture.read(path), np.asarray(small)


@pytest.mark.parametrize(
    ("factor", "method", "quality", "last"),
    [
        (2, RESAMPLING.BICUBIC, 40, None),
        (2, RESAMPLING.LANCZOS, 30, 88),
        (1.5, RESAMPLING.BICUBIC, 60, None),
        (3, RESAMPLING.BILINEAR, 50, 90),
    ],
)
def test_the_file_is_found_beneath_the_enlargement(
    factor: float, method: RESAMPLING, quality: int, last: int | None, tmp_path: Path
) -> None:
    picture, small = enlarged(tmp_path, factor, method, quality, last)
    found = examine(picture)
    assert found.enlargement is not None and found.enlargement.factor == pytest.approx(factor, rel=0.01)
    file = found.enlarged_jpeg
    assert file is not None and abs(file.quality - quality) <= 1
    assert f"enlarged {factor:.1f} times, from a JPEG file of quality {file.quality}" in " ".join(found.sentences())
    undone = file.undone(np.asarray(picture.pixels))
    assert undone.shape == small.shape
    reduced = np.asarray(PIL.Image.fromarray(np.asarray(picture.pixels)).resize(SMALL.size, RESAMPLING.BOX))
    error, plain = (np.abs(one.astype(float) - small).mean() for one in (undone, reduced))
    assert error < 1.5 and error < 0.6 * plain  # nearer to the file than a reduction


def test_a_wrong_factor_that_blocks_suggest_is_corrected(tmp_path: Path) -> None:
    picture, _ = enlarged(tmp_path, 2, RESAMPLING.BICUBIC, 40)
    for suggested in (2 * 8 / 7, 2 * 8 / 6, 2 * 8 / 5, 4.0, 1.0):
        found = detect_enlarged_jpeg(picture, suggested)
        assert found is not None and (found.factor, found.quality) == (2, 40)


def test_an_enlarged_picture_that_was_no_jpeg_has_none(tmp_path: Path) -> None:
    for last in (None, 88):
        found = examine(enlarged(tmp_path, 2, RESAMPLING.BICUBIC, None, last)[0])
        assert found.enlargement is not None and found.enlarged_jpeg is None


def test_too_small_a_picture_is_not_examined() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (80, 80, 3), np.uint8)
    assert detect_enlarged_jpeg(Picture(pixels), 2.0) is None


def test_an_enlargement_is_undone() -> None:
    small = np.asarray(SMALL, np.float32) / 255
    for kernel in (RESAMPLING.BICUBIC, RESAMPLING.LANCZOS, RESAMPLING.BILINEAR):
        planes = [
            np.asarray(PIL.Image.fromarray(plane).resize((480, 320), kernel)) for plane in np.moveaxis(small, 2, 0)
        ]
        error = np.abs(shrunk(np.stack(planes, axis=2), 2.0, kernel) - small).mean()
        assert error < 0.004, kernel


def test_the_network_is_told_of_the_file(tmp_path: Path) -> None:
    file = EnlargedJPEG(2.0, RESAMPLING.BICUBIC, 40, None)
    found = Findings(enlargement=Enlargement(2.0, 1.0, 20.0), enlarged_jpeg=file, quality=88)
    told, plain = composition(found), treatment(found)
    assert told is not None and plain is not None
    assert told.task == plain.task == "sr2" and told.enlarged is plain.enlarged is file
    assert told.conditions == Conditions(quality=40) and plain.conditions is None
    assert told.sigma == plain.sigma == pytest.approx(jpeg_error(40))
    picture, small = enlarged(tmp_path, 2, RESAMPLING.BICUBIC, 40, 90)
    plan = plan_treatment(picture, told=True)
    assert plan.shrink == 2 and plan.prepared(picture).size == small.shape[:2]
    restored = Picture(np.zeros((320, 480, 3), np.float32))
    assert plan.finished(restored, picture).size == picture.size
