"""Measure the parts of the fast path on a GPU one by one, in under three minutes: kernels, CUDA graphs, gradients.

python scripts/speed.py [--device cuda] [--seconds 150] [--compiled] [--small]

The networks have the paper's size and random weights (without diffusers: those of a CompactUNet at half the cost).
--compiled also measures torch.compile, which takes minutes more; --small takes small networks, to try the script itself.
`ddc bench` measures whole restorations of a model.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc import cuda
from ddc.cuda import FastUNet
from ddc.evaluation.speed import EagerUNet, kind_of_kernel, random_models
from ddc.fast import agreement, prepare_compiler, probe, rewrap
from ddc.networks import CompactUNet
from ddc.noise import Noise
from ddc.priors import DataConsistency, Prior, schedule_from_config, scheduler_config
from ddc.problems import make_problem
from ddc.solvers.base import Run
from ddc.solvers.ddc import DDC
from ddc.solvers.gradients import DPS

Models = tuple[Prior, DataConsistency]
# batch, channels, side: layers of the paper's networks; the first ones are tuned on
SHAPES = [(16, 256, 256), (1, 256, 256), (16, 512, 64), (1, 1024, 32), (16, 1536, 16), (1, 96, 128), (3, 160, 70)]
STARTED = time.monotonic()
os.environ.setdefault(cuda.VARIABLE, "1")


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


def milliseconds(run: Callable[[], Any], repeats: int = 5, device: str = "cuda") -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    run()
    taken = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        run()
        wait()
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken)


# ---------------------------------------------------------------------------------------------------------
# the kernels alone


def check_kernels() -> None:
    """Relative errors against float64, and how near the kernels are to the memory's speed."""
    from triton.testing import do_bench

    from ddc import kernels

    for batch, channels, side in SHAPES:
        errors, times = [], []
        for dtype in (torch.float32, torch.bfloat16, torch.float16)[0 if side in (32, 70) else 2 :]:
            norm = nn.GroupNorm(32, channels).to("cuda", dtype).requires_grad_(False)
            norm.weight.normal_(), norm.bias.normal_()
            x, residual = (
                torch.randn(batch, channels, side, side, device="cuda", dtype=dtype).contiguous(
                    memory_format=torch.channels_last
                )
                for _ in range(2)
            )
            bias, modulation = (torch.randn(n, device="cuda", dtype=dtype) for n in (channels, 2 * channels))
            modulation = modulation.expand(batch, -1).contiguous()
            runs = {
                "norm": lambda: kernels.normalise(x, norm, bias, modulation),  # noqa: B023
                "add": lambda: kernels.add(x, bias, residual),  # noqa: B023
            }
            if dtype == torch.float16:
                passes = {"norm": 3, "add": 3}
                for name, run in runs.items():
                    taken = do_bench(run, return_mode="median")
                    times.append(f"{name} {taken:.3f} ms {passes[name] * x.nbytes / taken / 1e9:.2f} TB/s")
                plain = do_bench(lambda: F.silu(norm(x)), return_mode="median")  # noqa: B023
                times.append(f"plain norm {plain:.3f} ms")
            found, total = runs["norm"]()[:1].double(), runs["add"]()[:1].double()
            wide = x[:1].double() + bias.double()[:, None, None]
            scale, shift = modulation[:1].double()[:, :, None, None].chunk(2, 1)
            exact = F.group_norm(wide, 32, norm.weight.double(), norm.bias.double(), norm.eps)
            errors += [
                float((a - b).norm() / b.norm())
                for a, b in ((found, F.silu(exact * (1 + scale) + shift)), (total, wide + residual[:1].double()))
            ]
        say(f"{batch}×{channels}×{side}²: {', '.join(times)}; errors {' '.join(f'{e:.1e}' for e in errors)}")


def tune_kernels() -> None:
    """The constants of `ddc.kernels` against others."""
    from triton.testing import do_bench

    from ddc import kernels

    usual = {name: getattr(kernels, name) for name in ("TILE", "WARPS", "WIDEST", "PROGRAMS", "WHOLE", "FEW_PIXELS")}
    others: list[dict[str, int]] = [
        {},
        *({"TILE": 2048, "WARPS": 4}, {"TILE": 4096, "WARPS": 4}, {"TILE": 8192, "WARPS": 8}, {"WIDEST": 64}),
        *({"WIDEST": 256}, {"PROGRAMS": 1024}, {"PROGRAMS": 4096}, {"WHOLE": 4096}, {"FEW_PIXELS": 4096}),
    ]
    shapes = [(16, 256, 256), (1, 256, 256), (16, 512, 64), (1, 512, 32)]
    inputs = []
    for batch, channels, side in shapes:
        x = torch.randn(batch, channels, side, side, device="cuda", dtype=torch.float16)
        norm = nn.GroupNorm(32, channels).to("cuda", torch.float16).requires_grad_(False)
        inputs.append((x.contiguous(memory_format=torch.channels_last), norm))
    say("norm and add in µs for " + ", ".join(f"{b}×{c}×{s}²" for b, c, s in shapes))
    for change in others:
        for name, value in (usual | change).items():
            setattr(kernels, name, value)
        cells = []
        for x, norm in inputs:
            ways = (lambda: kernels.normalise(x, norm), lambda: kernels.add(x, norm.bias, x))  # noqa: B023
            cells.append(" + ".join(f"{1e3 * do_bench(way, 10, 40, return_mode='median'):.0f}" for way in ways))
        say(f"  {change or 'as it is'}: {', '.join(cells)}")
    for name, value in usual.items():
        setattr(kernels, name, value)


# ---------------------------------------------------------------------------------------------------------
# whole networks


def make_models(device: str, small: bool) -> Models:
    """Random networks of the paper's size."""
    torch.manual_seed(0)
    if not small:
        try:
            return random_models("adm-256", "paper", device)
        except Exception as error:  # diffusers raises errors of several classes where it cannot be imported
            say(f"diffusers' networks cannot be made ({error}): those of another class")
    channels, blocks = ((32, 32), (1, 1)) if small else ((256, 256, 512, 512, 1024, 1024), (2, 2, 2, 2, 3, 3))

    def unet(inputs: int, outputs: int, divisor: int) -> nn.Module:
        widths = tuple(c // divisor for c in channels)
        with torch.device(device):
            made = CompactUNet(inputs, outputs, 1, widths, blocks, blocks[:-1], groups=16 if small else 32)
        for parameter in made.eval().requires_grad_(False).parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        return made

    config = scheduler_config(learned_variance=True)
    prior = Prior(unet(3, 6, 1), schedule_from_config(config), scheduler_config=config)
    return prior.eval(), DataConsistency(unet(6, 3, 2)).eval()


def restore(models: Models, batch: int, size: int, device: str, fields: list[Tensor] | None = None) -> Tensor:
    """Five steps of DDC on made-up measurements; `fields` are the noise, if it was drawn before."""
    problem = make_problem("denoise", 0.05)
    noise: Any = Noise(range(batch), device=device)
    if fields is not None:
        noise = Drawn(fields)
    y = torch.zeros(batch, 3, size, size, device=device)
    return DDC().solve(Run(y, problem, models[0], noise, network=models[1]))


class Drawn:
    """Noise that was drawn before."""

    def __init__(self, fields: list[Tensor]) -> None:
        self.fields, self.draws = fields, 0

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        self.draws += 1
        return self.fields[(self.draws - 1) % len(self.fields)]


def fast_models(models: Models, device: str, size: int, graphs: bool, sizes: tuple[int, ...] = ()) -> Models:
    dtype = torch.float16 if device == "cuda" else torch.float32
    made = rewrap(*models, lambda unet: FastUNet(unet, torch.device(device), dtype, size))
    for part in made:
        part.unet.graphs, part.unet.sizes = graphs, sizes  # type: ignore[union-attr, assignment]
    return made  # type: ignore[return-value]


def profile(run: Callable[[], Any], pictures: int) -> str:
    """Milliseconds a picture by kinds of kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    run()
    with record(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    for event in profiler.key_averages():
        kind = kind_of_kernel(event.key)
        kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 1e3 / pictures
    total = sum(kinds.values())
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {ms:.2f} ms ({ms / total:.0%})" for kind, ms in ordered)


def measure_restoration(models: Models, device: str, size: int, batch: int) -> None:
    """The plain loop, the fast path without and with kernels, and with graphs."""
    plain = torch.bfloat16 if device == "cuda" else torch.float32
    eager: Any = rewrap(*models, lambda unet: EagerUNet(unet, torch.device(device), plain))
    loop = milliseconds(lambda: restore(eager, 1, size, device), 3, device)
    say(f"plain loop, one picture: {loop:.1f} ms")
    exact: Any = rewrap(*models, lambda unet: EagerUNet(unet, torch.device(device), torch.float32))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        truth = probe(*exact, torch.device(device), size)
    torch.backends.cudnn.benchmark = True
    fast = fast_models(models, device, size, graphs=False)
    say(f"kernels agree with float32 to {agreement(probe(*fast, torch.device(device), size), truth):.1f} dB")

    def tell(what: str, made: Models, count: int) -> None:
        taken = milliseconds(lambda: restore(made, count, size, device), 5, device) / count
        say(f"{what}, batch {count}: {taken:.2f} ms a picture, {loop / taken:.1f} times the plain loop")

    tell("kernels, no graph", fast, batch)
    if device == "cuda":
        say("  " + profile(lambda: restore(fast, batch, size, device), batch))
        usable, cuda.usable = cuda.usable, lambda x: False
        tell("neither", fast, batch)
        cuda.usable = usable
        recorded = fast_models(models, device, size, graphs=True)
        tell("kernels and graphs", recorded, 1)
        x, t = torch.randn(1, 6, size, size, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        with torch.no_grad():
            alone = [milliseconds(lambda: part.unet(x[:, : 3 * k], t)) for k, part in enumerate(recorded, 1)]  # noqa: B023
        say(f"  prior {alone[0]:.2f} ms, network {alone[1]:.2f} ms: five of each {5 * sum(alone):.2f} ms")
        say("  " + profile(lambda: restore(recorded, 1, size, device), 1))
        tell("kernels and graphs", recorded, batch)
        one_graph(fast, size)
    else:
        tell("kernels, no graph", fast, 1)


@torch.no_grad()
def one_graph(models: Models, size: int) -> None:
    """All five steps, the noise apart, as one CUDA graph: what could still be gained beside the networks."""
    fields = [Noise([i], device="cuda").normal((1, 3, size, size)) for i in range(6)]
    torch.cuda.empty_cache()
    try:
        restore(models, 1, size, "cuda", fields)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            restore(models, 1, size, "cuda", fields)
        say(f"all five steps in one graph, batch 1: {milliseconds(graph.replay):.2f} ms")
    except RuntimeError as error:
        say(f"all five steps in one graph: not possible ({str(error)[:100]})")


def measure_gradient(models: Models, device: str, size: int, steps: int = 3) -> None:
    """Milliseconds for a step of DPS."""
    problem = make_problem("denoise", 0.05)
    pictures = {}
    for what, graphs in (("plain", False), ("recorded", True)):
        fast = fast_models(models, device, size, graphs=graphs and device == "cuda")
        for batch in (1, 8):
            y = torch.zeros(batch, 3, size, size, device=device)

            def run(fast: Models = fast, y: Tensor = y) -> Tensor:
                noise = Noise(range(len(y)), device=device)
                return DPS(steps=steps).solve(Run(y, problem, fast[0], noise))

            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken = milliseconds(run, 3 if batch == 1 else 1, device) / steps / batch
            memory = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
            say(f"a step of DPS, {what} gradient, batch {batch}: {taken:.1f} ms a picture, {memory:.1f} GB")
            pictures[what, batch] = run()
    for batch in (1, 8):
        same = agreement(pictures["recorded", batch], pictures["plain", batch])
        say(f"recorded and plain agree to {same:.1f} dB, batch {batch}")


def measure_compiled(models: Models, device: str, size: int, batch: int) -> None:
    """The other way: torch.compile."""
    prepare_compiler()
    for count in (batch, 1):
        started = time.monotonic()
        fast = fast_models(models, device, size, graphs=False, sizes=(count,))
        taken = milliseconds(lambda: restore(fast, count, size, device), 5, device) / count  # noqa: B023
        say(f"compiled in {time.monotonic() - started:.0f} s, batch {count}: {taken:.2f} ms a picture")
        say("  " + profile(lambda: restore(fast, count, size, device), count))  # noqa: B023


def main(device: str, seconds: float, compiled: bool, small: bool) -> None:
    size, batch = (32, 2) if small else (256, 16)
    parts: list[tuple[str, float, Callable[[], Any]]] = []
    if device == "cuda":
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        parts += [("kernels", 20, check_kernels)]
    models = make_models(device, small)
    parts += [
        ("restorations", 50, lambda: measure_restoration(models, device, size, batch)),
        ("gradients", 30, lambda: measure_gradient(models, device, size)),
    ]
    if device == "cuda":
        parts += [("tuning", 40, tune_kernels)]
        if compiled:
            parts += [("torch.compile", 0, lambda: measure_compiled(models, device, size, batch))]
    for name, needed, run in parts:
        if time.monotonic() - STARTED + needed > seconds and name != "torch.compile":
            say(f"{name}: no time left")
            continue
        say(name)
        try:
            run()
        except Exception as error:  # the other parts should still be measured
            say(f"{name} failed: {type(error).__name__}: {str(error)[:300]}")
            import traceback

            traceback.print_exc()
        if device == "cuda":
            torch.cuda.empty_cache()
    say("done")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--small", action="store_true")
    main(**vars(parser.parse_args()))
