"""Where the time of a training step goes: python scripts/profile_training.py posterior --data PHOTOS --out RUN …

Takes the options of `ddc train`, trains for 62 steps, and prints the seconds of a step, those in which the host prepares and
queues its work, the parts of a step, the kinds of its kernels, and the operations that take most time. While the parts are
measured, each waits for the GPU, so their sum is longer than a step.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import ddc.training.loop as loop
from ddc.cli import main
from ddc.evaluation.speed import kinds_in

WARM, TIMED, PARTED, PROFILED = 40, 10, 10, 2
steps = 0
marks: dict[str, float] = {}
parts: dict[str, float] = {}
running: list[float] = []  # seconds of the parts within each part that is running
profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * torch.cuda.is_available())])
plain_step = loop._Run._step


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call`, whose time is added to a part, without that of the parts within it."""

    def run(*arguments: Any, **named: Any) -> Any:
        begun = now()
        running.append(0.0)
        result = call(*arguments, **named)
        whole = now() - begun
        parts[name] = parts.get(name, 0.0) + whole - running.pop()
        if running:
            running[-1] += whole
        return result

    return run


def measure_parts(run: Any) -> None:
    objective, accelerator = run.objective, run.accelerator
    places = [
        ("pictures and measurements", objective, "_refill"),
        ("pictures and measurements", objective, "_batch"),
        ("prior", getattr(objective, "prior", None), "predict"),
        ("network", getattr(objective, "network", None), "consistent"),
        ("network", objective, "_denoise"),
        ("network", objective, "_generate"),
        ("losses", objective, "_terms"),
        ("losses", objective, "_score"),
        ("backward", accelerator, "backward"),
        ("clipping", accelerator, "clip_grad_norm_"),
        ("optimiser", run.optimiser, "step"),
        ("average of the weights", run.average, "update"),
    ]
    for name, owner, attribute in places:
        if hasattr(owner, attribute):
            setattr(owner, attribute, measured(name, getattr(owner, attribute)))


def print_parts(whole: float) -> None:
    for name, seconds in sorted((parts | {"the rest": whole - sum(parts.values())}).items(), key=lambda p: -p[1]):
        print(f"{name:28} {1e3 * seconds / PARTED:8.2f} ms  {seconds / whole:6.1%}")


def print_profile() -> None:
    table = profiler.key_averages()
    if torch.cuda.is_available():
        for kind, seconds in kinds_in(table).items():
            print(f"{kind:40} {1e3 * seconds / PROFILED:8.2f} ms")
        print(table.table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60))
    print(table.table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))


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
        measure_parts(run)
        marks["begin"] = now()
    if steps == WARM + TIMED + PROFILED + PARTED:
        print_parts(now() - marks["begin"])
        print_profile()
        raise SystemExit
    begun = time.perf_counter()
    terms = plain_step(run, rate)
    if WARM <= steps < WARM + TIMED:
        marks["host"] += time.perf_counter() - begun  # returns when all is queued
    return terms


setattr(loop._Run, "_step", step)  # noqa: B010
if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
