"""Measure the parts of the fast path on a GPU one by one, the most important first: kernels, CUDA graphs, gradients.

python scripts/speed.py [--seconds 110] [--eight-bits] [--compiled] [--small] [--device cuda]

The networks have the paper's size and random weights; --small takes those of the shipped model. What there is no time for is
left out. --eight-bits computes convolutions in FP8. --compiled measures torch.compile instead, which takes minutes.
`ddc bench` measures whole restorations of a model.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddc.cuda import FastUNet
from ddc.evaluation.speed import Bench, BenchSettings, kinds_of_kernels, random_models
from ddc.fast import prepare_compiler, rewrap
from ddc.fused import FAILURES
from ddc.noise import Noise
from ddc.pipeline import RestorationPipeline
from ddc.precision import agreement, probe
from ddc.problems import make_problem
from ddc.solvers.base import Run
from ddc.solvers.ddc import DDC
from ddc.solvers.gradients import DPS

STARTED = time.monotonic()
DPS_STEPS = 3
# batch, channels, side: layers of the paper's networks, and two others
SHAPES = [(16, 256, 256), (1, 256, 256), (16, 512, 64), (1, 512, 64), (1, 1024, 32), (16, 1536, 16), (1, 96, 128)]


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


class Measuring:
    def __init__(self, bench: Bench, eight_bits: bool = False) -> None:
        self.bench, self.device, self.eight_bits = bench, bench.device, eight_bits
        self.many = 16 if bench.cuda else 2
        self.first: dict[int, Tensor] = {}  # results of the gradients' first way, by batch size

    def fast(self, kernels: bool, graphs: bool, sizes: tuple[int, ...] = ()) -> RestorationPipeline:
        """The fast path, of which only so much is used."""
        dtype = torch.float16 if self.bench.cuda else torch.float32
        made = rewrap(
            self.bench.prior,
            self.bench.network,
            lambda unet: FastUNet(unet, self.device, dtype, self.bench.settings.size, kernels and self.eight_bits),
        )
        for part in made:
            unet: Any = part.unet  # type: ignore[union-attr]
            unet.kernels, unet.graphs, unet.sizes = kernels, graphs and self.bench.cuda, sizes
        return self.pipeline(*made)

    def pipeline(self, *models: Any) -> RestorationPipeline:
        pipe = RestorationPipeline(*models)
        pipe.device = self.device
        return pipe

    def restorations(self, what: str, pipe: RestorationPipeline, *batches: int, profile: bool = False) -> None:
        """Milliseconds a picture in five steps."""
        for batch in batches:
            run = partial(self.bench.restore, pipe, batch)
            taken = statistics.median(self.bench.times(run, 5)) / batch
            say(f"{what}, batch {batch}: {1e3 * taken:.2f} ms a picture")
            if profile and self.bench.cuda:
                kinds = {kind: 1e3 * seconds / batch for kind, seconds in kinds_of_kernels(run).items()}
                parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.items())
                say(f"  {sum(kinds.values()):.2f} ms of kernels: {parts}")

    def gradients(self, what: str, pipe: RestorationPipeline) -> None:
        """Milliseconds and memory of a step of DPS, and how far its result is from that of the first way."""
        for batch in (1, 8) if self.bench.cuda else (1,):
            y, seeds = self.bench.measurement(batch), range(batch)
            run = partial(pipe.solve, y, self.bench.problem, DPS(steps=DPS_STEPS), seeds)
            self.bench.reset_memory(pipe.prior)
            taken = statistics.median(self.bench.times(run, 3)) / DPS_STEPS / batch
            memory = ", ".join(f"{size / 1e3:.1f} GB" for size in self.bench.memory().values())
            same = agreement(run(), self.first.setdefault(batch, run()))
            say(f"a step of DPS, {what}, batch {batch}: {1e3 * taken:.1f} ms a picture, {memory}, {same:.1f} dB")

    def agreement(self, pipe: RestorationPipeline) -> None:
        size = self.bench.settings.size
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            truth = probe(*self.bench.eager(torch.float32), self.device, size)
        say(
            f"pictures agree with float32's to {agreement(probe(pipe.prior, pipe.network, self.device, size), truth):.1f} dB"
        )

    @torch.no_grad()
    def one_graph(self, pipe: RestorationPipeline) -> None:
        """All five steps as one CUDA graph, with noise that was drawn before: what could still be gained."""
        side = self.bench.settings.size
        field = Noise([0], device=self.device).normal((1, 3, side, side))
        y, problem = field.clamp(-1, 1), make_problem("denoise", 0.05)
        noise: Any = type("Drawn", (), {"normal": lambda self, shape: field})()

        def run() -> Tensor:
            return DDC().solve(Run(y, problem, pipe.prior, noise, network=pipe.network))

        run()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        say(
            f"all five steps in one graph, batch 1: {1e3 * statistics.median(self.bench.times(graph.replay, 5)):.2f} ms"
        )

    def layers(self) -> None:
        """How near the kernels are to the memory's speed, in CUDA graphs, so that launching them does not count."""
        from triton.testing import do_bench_cudagraph

        from ddc import kernels

        for batch, channels, side in SHAPES:
            norm = nn.GroupNorm(32, channels).to("cuda", torch.float16).requires_grad_(False)
            x = torch.randn(batch, channels, side, side, device="cuda", dtype=torch.float16)
            x = x.contiguous(memory_format=torch.channels_last)
            total, scales = (
                kernels.add(x, norm.bias, x),
                torch.zeros(1, 2 * channels, device="cuda", dtype=torch.float16),
            )
            runs: dict[str, tuple[int, Callable[[], Any]]] = {  # passes over memory, and what does them
                "norm": (3, lambda: kernels.normalise(x, norm, norm.bias, scales)),  # noqa: B023
                "norm with sums": (2, lambda: kernels.normalise(total, norm)),  # noqa: B023
                "add": (3, lambda: kernels.add(x, norm.bias, x)),  # noqa: B023
            }
            cells = []
            for name, (passes, run) in runs.items():
                taken = do_bench_cudagraph(run, return_mode="median")
                cells.append(f"{name} {1e3 * taken:.1f} µs {passes * x.nbytes / taken / 1e9:.2f} TB/s")
            say(f"{batch}×{channels}×{side}²: {', '.join(cells)}")

    def parts(self) -> list[tuple[str, float, Callable[[], None]]]:
        """What is measured, and about how many seconds each takes on an H200."""
        whole, eager = self.fast(True, True), self.fast(True, False)
        parts: list[tuple[str, float, Callable[[], None]]] = [
            (
                "kernels and graphs",
                35,
                lambda: self.restorations("kernels and graphs", whole, 1, self.many, profile=True),
            ),
            ("gradients", 10, lambda: self.gradients("kernels and graphs", whole)),
            ("plain gradients", 25, lambda: self.gradients("neither", self.fast(False, False))),
            ("agreement", 5, lambda: self.agreement(whole)),
        ]
        if self.bench.cuda:
            parts += [("one graph", 3, lambda: self.one_graph(eager))]
        parts += [
            ("kernels alone", 10, lambda: self.restorations("kernels without graphs", eager, 1, self.many)),
            ("neither", 10, lambda: self.restorations("neither", self.fast(False, False), 1, self.many)),
            ("plain loop", 5, lambda: self.restorations("plain loop", self.pipeline(*self.plain()), 1)),
        ]
        return parts + ([("layers", 10, self.layers)] if self.bench.cuda else [])

    def plain(self) -> tuple[Any, Any]:
        return self.bench.eager(torch.bfloat16 if self.bench.cuda else torch.float32)

    def compiled(self) -> list[tuple[str, float, Callable[[], None]]]:
        prepare_compiler()
        return [
            ("torch.compile", 0, lambda: self.restorations("compiled", self.fast(False, False, (n,)), n, profile=True))  # noqa: B023
            for n in (self.many, 1)
        ]


def main(device: str, seconds: float, compiled: bool, small: bool, eight_bits: bool) -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    models = random_models(*(("compact", "compact") if small else ("adm-256", "paper")), device)
    bench = Bench(*models, device, BenchSettings(size=64 if small else 256, minutes=seconds / 60), say=say)
    bench.deadline = STARTED + seconds
    say(f"torch {torch.__version__}" + (f", {torch.cuda.get_device_name()}" if bench.cuda else ""))
    measuring = Measuring(bench, eight_bits)
    for name, needed, run in measuring.compiled() if compiled else measuring.parts():
        if compiled or not bench.late(name, needed):
            try:
                run()
            except Exception as error:  # the other parts should still be measured
                say(f"{name} failed: {type(error).__name__}: {str(error)[:300]}")
            if bench.cuda:
                torch.cuda.empty_cache()
    say(f"done; kernels that failed: {FAILURES or 'none'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--eight-bits", action="store_true")
    main(**vars(parser.parse_args()))
