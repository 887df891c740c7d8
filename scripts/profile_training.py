"""Where the time of a training step goes: python scripts/profile_training.py posterior --data PHOTOS --out RUN …

Takes the options of `ddc train`, trains for 52 steps, and prints the seconds of a step, those in which the host prepares and
queues its work, and the operations that take most time.
"""

import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import ddc.training.loop as loop
from ddc.cli import main

WARM, TIMED, PROFILED = 40, 10, 2
steps = 0
marks: dict[str, float] = {}
profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * torch.cuda.is_available())])
plain_step = loop._Run._step


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def step(run: Any, rate: float) -> dict[str, torch.Tensor]:
    """A step of the loop; the first ones warm up, the next ones are timed, and the last ones profiled."""
    global steps
    steps += 1
    if steps == WARM:
        marks["begin"], marks["host"] = now(), 0.0
    if steps == WARM + TIMED:
        whole, host = (now() - marks["begin"]) / TIMED, marks["host"] / TIMED
        pictures = run.settings.batch_size / whole
        print(f"a step takes {whole:.3f} s ({pictures:.0f} pictures a second), of which the host works {host:.3f} s")
        profiler.start()
    if steps == WARM + TIMED + PROFILED:
        now()
        profiler.stop()
        table = profiler.key_averages()
        if torch.cuda.is_available():
            print(table.table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60))
        print(table.table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))
        raise SystemExit
    begun = time.perf_counter()
    terms = plain_step(run, rate)
    if WARM <= steps < WARM + TIMED:
        marks["host"] += time.perf_counter() - begun  # returns when all is queued
    return terms


setattr(loop._Run, "_step", step)  # noqa: B010
if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
