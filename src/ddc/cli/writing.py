"""The files that `ddc restore` writes for a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
    write: Callable[[Picture, Path, int], None] = Picture.write_unchanged if unchanged else Picture.write
    if len(samples) == 1:
        return write(samples[0], files[0], quality)
    target, *numbered, std_numbers, std_picture = files
    for path, sample in zip(numbered, samples, strict=True):
        write(sample, path, quality)
    with appearing(std_numbers) as temporary, temporary.open("wb") as file:
        np.save(file, std.permute(1, 2, 0).numpy())
    Picture.from_tensor(std.mean(0, keepdim=True) / STD_OF_WHITE, grey=True).write(std_picture)
    write(samples[0] if unchanged else mean, target, quality)
