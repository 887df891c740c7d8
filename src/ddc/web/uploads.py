"""Visitors' files: reading them with care, and finding out what is wrong with them. Also the examples."""

import contextlib
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import PIL.Image

from ddc.degrade import degrade
from ddc.diagnosis.findings import examine
from ddc.diagnosis.treatment import NOTHING, Treatment, treatment
from ddc.errors import UserError
from ddc.estimates import BlurEstimate
from ddc.formats import READABLE, open_image
from ddc.images import Picture
from ddc.telling import noting
from ddc.web.controls import AUTO, BLUR, DISC, HOLES, JPEG, LINE, NOISE, SOFT, SUPER_RESOLUTION, Choices
from ddc.web.limits import SMALLEST_SIDE, Limits

SHOWABLE = "PNG, JPEG, WebP, TIFF, BMP or HEIC"


class _Everything(set[str]):
    """A set of all texts."""

    def __contains__(self, text: object) -> bool:
        return True


def quietly(notes: list[str]) -> contextlib.AbstractContextManager[None]:
    """Collect warnings instead of logging them: they name files in the private folder."""
    return noting(notes, _Everything())


@dataclass(frozen=True)
class Upload:
    """A visitor's file: where it is stored, and its name on the visitor's computer."""

    path: Path
    name: str

    def size(self) -> tuple[int, int]:
        """Height and width from the file's header; the pixels are not decoded."""
        if self.path.suffix.lower() == ".npy":  # a format for programs, not for visitors
            raise UserError(f"{self.name} is not a picture that can be shown; expected {SHOWABLE}")
        if not self.path.exists():
            raise UserError(f"{self.name} is no longer here, because uploads are deleted; upload it again")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with open_image(self.path) as image:
                    width, height = image.size
                    # only for the formats of cameras: reading the EXIF data of a PNG decodes it
                    turned = image.format in ("JPEG", "MPO") and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                    return (width, height) if turned else (height, width)
        except PIL.Image.DecompressionBombError as error:
            pixels = int(re.findall(r"\d+", str(error))[0])
            raise UserError(
                f"{self.name} claims {pixels / 1e6:.0f} megapixels, far more than this page takes. Make it smaller, "
                "or use `ddc restore`, which takes any size"
            ) from None
        except Exception:  # whatever the decoder raises
            return self._decoded().size  # says what is wrong with it, or reads a format that Pillow does not

    def read(self, limits: Limits) -> Picture:
        """The picture. Its size is checked before its pixels are decoded."""
        height, width = self.size()
        limits.check_size(height, width)
        if min(height, width) < SMALLEST_SIDE:
            raise UserError(
                f"{self.name} has {width}×{height} pixels; expected at least {SMALLEST_SIDE} on each side. Choose a "
                "larger one"
            )
        return self._decoded()

    def read_with_notes(self, limits: Limits) -> tuple[Picture, list[str]]:
        """The picture, and the warnings about its file."""
        notes: list[str] = []
        with quietly(notes):
            picture = self.read(limits)
        return picture, [self.rename(note) for note in notes]

    def _decoded(self) -> Picture:
        try:
            return Picture.read(self.path)
        except UserError as error:
            raise UserError(self.rename(str(error)).replace(READABLE, SHOWABLE)) from None
        except Exception as error:  # whatever the decoder raises, the visitor is told in a sentence
            reason = type(error).__name__
            raise UserError(f"{self.name} is damaged or unusual ({reason}); save it again, as a PNG") from None

    def write_result(self, before: Picture, after: Picture, target: Path, quality: int = 95) -> list[str]:
        """Write what was made of the picture; returns warnings. If nothing was made of it, and its format stays, the file
        itself is copied, because encoding it again would lose quality."""
        notes: list[str] = []
        with quietly(notes):
            (before.write_unchanged if after is before else after.write)(target, quality)
        return [self.rename(note, target) for note in notes]

    def rename(self, text: str, result: Path | None = None) -> str:
        """The text with the visitor's name for the file, also in place of the result's path."""
        text = text.replace(str(self.path), self.name)
        return text if result is None else text.replace(str(result), self.name)


def inspect(name: str, picture: Picture, limits: Limits | None = None) -> tuple[str, Choices]:
    """What was found in a picture, in sentences, and the choices that fit it and the limits."""
    found = examine(picture)
    plan = replace(treatment(found) or Treatment(NOTHING), because=tuple(found.sentences()))
    scale = _enlargement(picture, limits or Limits())
    said = plan.in_words()
    if plan.task == NOTHING and scale:
        said = f"{' '.join(plan.because)} It can be enlarged."
    blur, shape = found.blur or BlurEstimate(width=Choices.blur), SOFT
    if blur.radius:
        shape = DISC
    elif blur.length:
        shape = LINE
    choices = Choices(
        kind=HOLES if found.hole else SUPER_RESOLUTION if plan.task == NOTHING and scale else AUTO,
        scale=scale or 2,
        shape=shape,
        blur=blur.radius or blur.length or blur.width,
        softness=Choices.softness if shape == SOFT else blur.width,
        angle=blur.angle if shape == LINE else Choices.angle,
        quality=found.quality or Choices.quality,
        sigma=round(plan.sigma, 3),
    )
    return f"**{name}**, {picture.size[1]} × {picture.size[0]} pixels. {said}", choices


def _enlargement(picture: Picture, limits: Limits) -> int | None:
    """How many times a picture may well be enlarged; None if it is too large already."""
    height, width = picture.size
    for scale in (4, 2) if max(picture.size) <= 512 else (2,):
        with contextlib.suppress(UserError):
            limits.check_size(scale * height, scale * width)
            return scale
    return None


def write_examples(folder: Path) -> list[tuple[Upload, Choices]]:
    """Write degraded examples, made from the photographs of scikit-image; returns each with the choices that fit it."""
    from skimage import data

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for pixels, task, name, choices in (
        (data.chelsea()[20:212, 90:282], "gauss1.5", "blurred-cat.png", Choices(BLUR, blur=1.5)),
        (data.astronaut()[10:202, 120:312], "sr4", "small-face.png", Choices(SUPER_RESOLUTION)),
        (data.rocket()[100:292, 230:422], "strokes", "scratched-rocket.png", Choices(HOLES)),
        (data.coffee()[90:282, 150:342], "denoise", "noisy-coffee.png", Choices(NOISE, sigma=0.1)),
    ):
        degrade(Picture(pixels), task, choices.sigma, name=name).write(folder / name)
        made.append((Upload(folder / name, name), choices))
    path = folder / "compressed-shuttle.jpg"
    PIL.Image.fromarray(data.astronaut()[60:252, 320:512]).save(path, quality=10)
    return [*made, (Upload(path, path.name), Choices(JPEG, quality=10))]


def write_clean_examples(folder: Path) -> list[Upload]:
    """Write clean examples to try solvers on."""
    from skimage import data

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, pixels in (
        ("astronaut.png", data.astronaut()[:256, 96:352]),
        ("cat.png", data.chelsea()[20:276, 90:346]),
        ("coffee.png", data.coffee()[70:326, 150:406]),
    ):
        Picture(pixels).write(folder / name)
        made.append(Upload(folder / name, name))
    return made
