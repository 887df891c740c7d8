"""Degrading a clean picture: the measurement that a task would start from, as a picture."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.images import Picture, to_internal
from ddc.problems import Task, measure


def degrade(
    picture: Picture,
    task: str | Task,
    sigma: float = 0.0,
    seed: int = 0,
    name: str = "",
    mask: Tensor | str | Path | None = None,
    kernel: Tensor | str | Path | None = None,
    operator_file: str | None = None,
    floating: bool = False,
) -> Picture:
    """The measurement of a clean picture, with the picture's metadata.

    The seed and the name determine masks and noise. Holes are transparent in the result. Its pixels are floating-point
    numbers, which noise can take beyond [0, 1]; `floating` says so in its bits.
    """
    with torch.inference_mode():
        x = to_internal(picture.tensor)[None]
        problem, y = measure(task, sigma, x, [name], seed, mask=mask, kernel=kernel, operator_file=operator_file)
        observed = problem.operator.observed(y)
    if y.shape[1] not in (1, 3):
        raise UserError(f"the measurement of {problem.name} has {y.shape[1]} channels and is no picture")
    measured = Picture.from_tensor((y[0] + 1) / 2)
    alpha = picture.alpha if measured.size == picture.size else None
    if observed is not None:
        if not observed.any():
            height, width = picture.size
            raise UserError(f"{problem.name} leaves nothing of {name}, {width}×{height}; name a smaller hole")
        alpha = (observed[0, 0] * 255).to(torch.uint8).numpy()
    return replace(
        picture,
        pixels=measured.pixels,
        alpha=alpha,
        grey=picture.grey or y.shape[1] == 1,
        bits=32 if floating else picture.bits,
    )
