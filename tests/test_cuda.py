"""The model that ships, on a GPU. Everything here is skipped where there is none."""

import gc
import logging

import numpy as np
import pytest
import torch
from skimage import data
from torch import Tensor

from ddc.images import to_internal
from ddc.pipeline import RestorationPipeline
from ddc.precision import agreement
from ddc.problems import measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def photograph(side: int) -> Tensor:
    """(1, 3, side, side) in [0, 1]: the astronaut, repeated to any size."""
    tile = torch.from_numpy(np.array(data.astronaut())).permute(2, 0, 1).float() / 255
    times = -(-side // tile.shape[-1])
    return tile.repeat(1, times, times)[None, :, :side, :side]


def psnr(x: Tensor, truth: Tensor) -> float:
    return float(-10 * (x - truth).square().mean().log10())


@pytest.mark.parametrize(
    ("task", "compile"), [("sr4", None), ("gauss", None), ("inpaint92", None), ("jpeg10", None), ("sr4", True)]
)
def test_the_fast_path_agrees_with_float32(task: str, compile: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddc.fast.GRAPH_PATIENCE", 2)  # so that most steps run as CUDA graphs
    truth = photograph(512)
    problem, y = measure(task, 0.05 if task != "jpeg10" else 0.0, to_internal(truth), ["astronaut"])
    options = {"mask": problem.operator.mask} if task == "inpaint92" else {}  # type: ignore[attr-defined]
    name = "inpaint" if task == "inpaint92" else task
    pictures = []
    for fast in (False, True):
        pipe = RestorationPipeline.from_pretrained().to("cuda", fast=fast, **({"compile": compile} if fast else {}))
        result = pipe((y + 1) / 2, name, sigma=float(problem.sigma_y), tile=256, names=["a"], **options)
        pictures.append(result.picture.tensor)
    exact, quick = pictures
    assert agreement(to_internal(quick), to_internal(exact)) >= 40
    assert abs(psnr(quick, truth[0]) - psnr(exact, truth[0])) < 0.05


def test_tiles_bound_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddc.fast.GRAPH_PATIENCE", 0)  # so that the smaller picture is restored in the same way
    pipe = RestorationPipeline.from_pretrained().to("cuda", compile=False, batch=4)
    peaks = []
    for side in (1024, 4096):
        pipe(photograph(256), "denoise", sigma=0.05)
        torch.cuda.reset_peak_memory_stats()
        pipe(photograph(side), "denoise", sigma=0.05)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.2 * peaks[0]


def test_a_full_device_halves_the_tile(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDC_KERNELS", "0")  # graphs keep memory of their own
    pipe = RestorationPipeline.from_pretrained().to("cuda", compile=False, batch=1)
    large = photograph(2048)

    def run(tile: int) -> Tensor:
        gc.collect()  # pipelines of other tests
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return pipe(large, "denoise", sigma=0.05, tile=tile).picture.tensor

    run(1024)  # libraries take their own memory once
    # A run must fail with less than its tensors take together, and goes through with what was reserved for it:
    # the limit counts reserved memory, of which what is not in use is freed before an allocation fails.
    run(0)
    too_little = torch.cuda.max_memory_allocated()
    run(1024)
    enough = torch.cuda.max_memory_reserved()
    assert enough < too_little
    # nearer to what is enough, for convolutions with too little workspace go on with another algorithm
    budget = 0.75 * enough + 0.25 * too_little
    try:
        torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.mem_get_info()[1])
        with caplog.at_level(logging.WARNING, "ddc"):
            restored = run(0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory: continuing with tiles of 1024 pixels" in caplog.text
    assert torch.cuda.max_memory_reserved() <= budget
    assert bool(restored.isfinite().all()) and psnr(restored, large[0]) > 25
