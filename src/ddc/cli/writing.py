"""The files that `ddc restore` writes for a picture."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddc.formats import FORMATS, open_image

if TYPE_CHECKING:
    from torch import Tensor

    from ddc.diagnosis.content import Mask
    from ddc.images import Picture

DOUBT_OF_WHITE = 0.25  # half the width of an interval that is white in the picture of it
STD_OF_WHITE = 0.1  # the standard deviation that is white in the picture of it


def write_result(
    files: list[Path],
    mean: "Picture",
    samples: "list[Picture]",
    std: "Tensor",
    doubt: "tuple[Tensor, Tensor] | None",
    marks: "Mask | Literal[False] | None",
    quality: int,
    unchanged: bool = False,
) -> None:
    """Write the files of a picture, which are `FileOptions.written`: of one sample, or of several. `marks` are the
    scratches, False if they were not searched. A picture that is `unchanged` keeps the bytes of its file."""
    import numpy as np
    import torch

    from ddc.images import Picture, appearing

    if marks is not False:
        known = torch.ones(1, *mean.size) if marks is None else 1 - torch.from_numpy(marks)[None].float()
        Picture.from_tensor(known, grey=True).write(files.pop())
    if doubt is not None:
        half = (doubt[1] - doubt[0]).mean(0, keepdim=True) / 2
        Picture.from_tensor((half / DOUBT_OF_WHITE).clamp(0, 1), grey=True).write(files.pop())
    write: Callable[[Picture, Path, int], None] = write_unchanged if unchanged else Picture.write
    if len(samples) == 1:
        return write(samples[0], files[0], quality)
    target, *numbered, std_numbers, std_picture = files
    for path, sample in zip(numbered, samples, strict=True):
        write(sample, path, quality)
    with appearing(std_numbers) as temporary, temporary.open("wb") as file:
        np.save(file, std.permute(1, 2, 0).numpy())
    Picture.from_tensor(std.mean(0, keepdim=True) / STD_OF_WHITE, grey=True).write(std_picture)
    write(samples[0] if unchanged else mean, target, quality)


def write_unchanged(picture: "Picture", path: Path, quality: int) -> None:
    """Write a picture that was not restored. If `path` has the format of its file, the file is copied and loses nothing."""
    from ddc.images import appearing

    source = picture.file
    if source is None or _format_of(picture.path, source) != FORMATS[path.suffix.lower()]:
        return picture.write(path, quality)
    with appearing(path) as temporary:
        if isinstance(source, bytes):
            temporary.write_bytes(source)
        else:
            shutil.copyfile(source, temporary)


def _format_of(name: Path | None, source: Path | bytes) -> str | None:
    """The format of a picture's file, by its content, or by its name where Pillow does not know it (.npy)."""
    try:
        with open_image(source) as image:
            kind: str | None = image.format
    except OSError:
        return None if name is None else FORMATS.get(name.suffix.lower())
    return "JPEG" if kind == "MPO" else kind  # a JPEG file with more pictures in it
