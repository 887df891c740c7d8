"""Speed and memory of the plain loop and of the fast path, measured side by side in one run.

The plain loop is what one would write first: eager, one picture at a time, bfloat16 on CUDA and float32 on the CPU. All
figures are measured on the same machine, including the matrix-product peak that they are compared with. Nothing depends
on the weights, so networks with random weights can be measured.
"""

import copy
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddc.cuda import FastUNet
from ddc.errors import UserError
from ddc.fast import default_tile, pick_device, rewrap
from ddc.fused import can_compile, can_fuse
from ddc.jobs import is_out_of_memory
from ddc.networks import PRESETS, build_network, network_config, run_unet, unet_size_multiple
from ddc.noise import Noise
from ddc.pipeline import RestorationPipeline
from ddc.precision import agreement, probe
from ddc.priors import DataConsistency, Prior, schedule_from_config, scheduler_config
from ddc.problems import make_problem
from ddc.solvers import SOLVERS
from ddc.solvers.ddc import DDC

Found = dict[str, Any]
# pictures per second of training: (prior, network, batch, size, compile) → the speed
TrainingSpeed = Callable[[Prior, DataConsistency, int, int, bool], float]

TASK, SIGMA_Y = "sr4", 0.05
# kinds of kernels, by parts of their names; the first that fits
KERNELS = (
    ("attention", ("flash", "fmha", "attention")),
    ("fused normalisation and elementwise", ("triton", "_sum_parts", "_normalise", "_go_back")),
    ("convolution", ("conv", "fprop", "implicit_gemm", "xmma", "cudnn", "winograd")),
    ("matrix product", ("gemm", "nvjet", "cutlass", "::mm", "::bmm", "::addmm", "matmul", "einsum")),
    ("copies", ("copy", "memcpy", "memset", "contiguous", "::cat", "clone")),
    ("normalisation", ("norm",)),
)
SOLVER_STEPS = 3  # measured of each solver; its time for the paper's number of steps follows


@dataclass(frozen=True)
class BenchSettings:
    """What to measure."""

    steps: int = 5
    """Steps of the restoration."""
    size: int = 256
    """Side of the picture."""
    batches: tuple[int, ...] = ()
    """Batch sizes to try; by default 1, 2 on the CPU and 1, 4, 8, 16, 32 elsewhere."""
    sizes: tuple[int, ...] = ()
    """Sides of larger pictures to restore; by default up to 1024 on the CPU and 4096 elsewhere."""
    counts: tuple[int, ...] = ()
    """Numbers of pictures to restore; by default up to 4 on the CPU and 64 elsewhere."""
    repeats: int = 0
    """Repeats of each measurement, whose median is taken; by default 3 on the CPU and 11 elsewhere."""
    minutes: float = 20.0
    """Start nothing new after this many minutes."""
    compile: bool = False
    """Compile the networks with torch.compile on CUDA instead of using fused kernels and CUDA graphs."""
    autotune: bool = False
    """Compile, and let the compiler search for faster kernels."""
    eight_bits: bool = False
    """Compute most convolutions in FP8, which needs a GPU of compute capability 9.0 or above."""
    solvers: bool = True
    """Measure the other solvers as well."""
    training: int = 0
    """Measure training too, with batches of this many pictures; 0 skips it."""

    def __post_init__(self) -> None:
        for name in ("steps", "size", "minutes"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("repeats", "training"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("batches", "sizes", "counts"):
            if any(n < 1 for n in getattr(self, name)):
                raise UserError(f"{name} must be whole numbers from 1 on, not {getattr(self, name)}")


def random_models(prior: str, network: str, device: str = "cpu") -> tuple[Prior, DataConsistency]:
    """The networks of two presets with random weights, none of them zero."""
    config = scheduler_config(learned_variance=PRESETS["prior"][prior]["out_channels"] == 6)
    with torch.device(device):
        unet, consistency = build_network(PRESETS["prior"][prior]), DataConsistency.from_config(network)
    made = Prior(unet, schedule_from_config(config), scheduler_config=config), consistency
    for model in made:
        for parameter in model.eval().requires_grad_(False).parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
    return made


class EagerUNet(nn.Module):
    """A U-Net in one precision, without any other preparation."""

    def __init__(self, unet: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.size_multiple, self.dtype = unet.config, unet_size_multiple(unet), dtype
        self.module = copy.deepcopy(unet).to(device=device, dtype=dtype)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return run_unet(self.module, x.to(self.dtype), times)


class Bench:
    """One run. `results` is complete after every part, so an interrupted run keeps what was measured."""

    def __init__(
        self,
        prior: Prior,
        network: DataConsistency | None,
        device: str = "auto",
        settings: BenchSettings = BenchSettings(),
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
        training_speed: TrainingSpeed | None = None,
    ) -> None:
        if network is None:
            raise UserError("bench measures DDC and needs a data-consistency network; this model has none")
        self.prior, self.network, self.settings, self.folder, self.say = prior, network, settings, folder, say
        self.training_speed, self.device = training_speed, pick_device(device)
        self.cuda, cpu = self.device.type == "cuda", self.device.type == "cpu"
        self.batches = settings.batches or ((1, 2) if cpu else (1, 4, 8, 16, 32))
        self.sizes = settings.sizes or ((256, 512, 1024) if cpu else (256, 512, 1024, 2048, 4096))
        self.repeats = settings.repeats or (3 if cpu else 11)
        self.counts = settings.counts or ((1, 2, 4) if cpu else (1, 4, 16, 64))
        self.problem = make_problem(TASK, SIGMA_Y)
        self.problem.operator.to(self.device)
        self.deadline = time.monotonic() + 60 * settings.minutes
        self.beside = 0  # bytes on the device that do not belong to what is measured
        self.results: Found = {"skipped": []}

    def run(self) -> Found:
        self.results["environment"] = {
            "device": torch.cuda.get_device_name(self.device) if self.cuda else cpu_name(),
            "kind": self.device.type,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "steps": self.settings.steps,
            "size": self.settings.size,
        }
        self.results["models"] = {"prior": self.cost(self.prior), "network": self.cost(self.network)}
        self.say("preparing the fast path")
        self.prepare()
        parts: dict[str, Callable[[], Any]] = {
            "peak": self.peak,
            "latency": self.latency,
            "agreement_db": self.agreement,
            "throughput": lambda: list(self.throughput()),
            "profile": lambda: self.profile() if self.cuda else {},  # a CPU's threads are not seen by the profiler
            "solvers": lambda: list(self.solvers()) if self.settings.solvers else [],
            "training": lambda: list(self.training()) if self.settings.training else [],
            "counts": lambda: list(self.growth("count", self.counts)),
            "sizes": lambda: list(self.growth("size", self.sizes)),
        }
        for name, measure in parts.items():
            if not self.late(name):
                self.say(name)
                found = self.unless_out_of_memory(name, measure)
                if found is not None:
                    self.results[name] = found
                if self.cuda:
                    torch.cuda.empty_cache()
        return self.results

    def prepare(self) -> None:
        """The pipelines of both ways."""
        plain = torch.bfloat16 if self.cuda else torch.float32
        self.plain = RestorationPipeline(*self.eager(plain), self.folder)
        self.plain.device = self.device
        started = time.monotonic()
        chosen = self.settings.compile or self.settings.autotune or not can_fuse(self.device)
        self.compiled = self.cuda and can_compile() and chosen and not self.settings.eight_bits
        self.fast = RestorationPipeline(self.prior, self.network, self.folder, self.settings.size).to(
            self.device,
            dtype="float8" if self.settings.eight_bits else "auto",
            check=False,  # random weights say nothing of pictures; what they agree to is part of the results
            compile=self.compiled or None,
            autotune=self.compiled and self.settings.autotune,
            batch=max(self.batches) if self.settings.batches else None,
        )
        for part in (self.fast.prior, self.fast.network):
            if part is not None and isinstance(part.unet, FastUNet):
                part.unet.patience = 0
        self.ways = {"plain": self.plain, "fast": self.fast}
        self.dtypes = {"plain": plain, "fast": getattr(self.fast.prior.unet, "dtype", torch.float32)}
        self.results["fast"] = {
            "dtype": _name(self.dtypes["fast"]),
            "eight_bits": getattr(self.fast.prior.unet, "eight_bits", False),
            "batch": self.fast.batch,
            "compiled": self.compiled,
            "prepare_s": time.monotonic() - started,
        }

    def eager(self, dtype: torch.dtype) -> tuple[Prior, DataConsistency | None]:
        return rewrap(self.prior, self.network, lambda unet: EagerUNet(unet, self.device, dtype))

    # -----------------------------------------------------------------------------------------------------
    # the parts

    def cost(self, model: Prior | DataConsistency) -> Found:
        """Parameters and FLOPs (a multiplication and an addition are two) of one evaluation."""
        from torch.utils.flop_counter import FlopCounterMode

        channels, side = int(model.unet.config["in_channels"]), self.settings.size  # type: ignore[index]
        with FlopCounterMode(display=False) as counter, torch.device("meta"):
            run_unet(build_network(network_config(model.unet)), torch.zeros(1, channels, side, side), 0)
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        return {"million_parameters": millions, "gflop": counter.get_total_flops() / 1e9}

    def peak(self) -> dict[str, float]:
        """TFLOP/s of a large matrix product, in the precisions of both ways."""
        n = 8192 if self.cuda else 1536
        rates = {}
        for kind in dict.fromkeys(self.dtypes.values()):
            a = torch.randn(n, n, device=self.device).to(kind)
            rates[_name(kind)] = 2 * n**3 / min(self.times(partial(torch.mm, a, a), 10)) / 1e12
        return rates

    def latency(self) -> Found:
        """One picture at a time, both ways in turn, and how long each network takes."""
        runs = {way: partial(self.restore, pipe, 1) for way, pipe in self.ways.items()}
        started = time.monotonic()
        for run in runs.values():
            self.once(run)
        rows: Found = {"first_s": time.monotonic() - started}  # compiling included
        rounds = [{way: self.once(run) for way, run in runs.items()} for _ in range(self.repeats)]
        x = torch.randn(1, 3, self.settings.size, self.settings.size, device=self.device)
        known = self.network.describe((self.problem.operator, self.measurement(1), self.problem.sigma), x)
        for way, pipe in self.ways.items():
            taken = [seconds[way] for seconds in rounds]
            unet = (pipe.network or self.network).unet
            one_prior = statistics.median(self.times(partial(pipe.prior.predict, x, 400)))
            one_network = statistics.median(self.times(partial(run_unet, unet, torch.cat([x, known], 1), 400)))
            seconds = statistics.median(taken)
            rest = seconds - self.settings.steps * (one_prior + one_network)
            rows[way] = {"seconds": seconds, "all_seconds": taken, "prior_s": one_prior, "network_s": one_network}
            rows[way] |= {"rest_s": rest, **self.rate(seconds, way)}
        rows["speedup"] = statistics.median(seconds["plain"] / seconds["fast"] for seconds in rounds)
        return rows

    def agreement(self) -> float:
        """PSNR between the pictures of the fast path and of float32."""
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            truth = probe(*self.eager(torch.float32), self.device, self.settings.size)
        return agreement(probe(self.fast.prior, self.fast.network, self.device, self.settings.size), truth)

    def throughput(self) -> Iterator[Found]:
        """Seconds per picture over batch sizes, both ways."""
        for batch in self.batches:
            for way, pipe in self.ways.items():
                what = f"throughput, {way}, batch {batch}"
                if self.late(what):
                    continue
                if way == "fast":
                    self.compile_for(batch)
                times = self.unless_out_of_memory(what, partial(self.batch_times, pipe, batch))
                if times is not None:
                    seconds = statistics.median(times) / batch
                    row = {"way": way, "batch": batch, "seconds_per_image": seconds, **self.memory()}
                    yield row | self.rate(seconds, way)
        self.compile_for(1, self.fast.batch)

    def compile_for(self, *sizes: int) -> None:
        """Let compiled networks take batches of these sizes."""
        if self.compiled:
            for model in (self.fast.prior, self.fast.network):
                model.unet.sizes = tuple(sorted(set(sizes)))  # type: ignore[union-attr]

    def batch_times(self, pipe: RestorationPipeline, batch: int) -> list[float]:
        run = partial(self.restore, pipe, batch)
        self.once(run)
        self.reset_memory(pipe.prior, pipe.network)
        return self.times(run, warm=False)

    def profile(self) -> Found:
        """Where the fast path's time goes on a GPU, by kinds of kernels, at its usual batch."""
        run = partial(self.restore, self.fast, self.fast.batch)
        self.once(run)
        seconds, kinds = self.once(run), kinds_of_kernels(run)
        kinds["nothing runs"] = max(seconds - sum(kinds.values()), 0.0)
        return {
            "batch": self.fast.batch,
            "seconds": seconds,
            "kinds": dict(sorted(kinds.items(), key=lambda k: -k[1])),
        }

    def solvers(self) -> Iterator[Found]:
        """Each solver's time for one picture, from a few of its steps (the paper's Table 4)."""
        for name, kind in SOLVERS.items():
            what, usual = f"solver {name}", kind().steps
            if self.late(what):
                continue
            solver = kind(steps=min(usual, SOLVER_STEPS))
            try:
                solver.check(self.problem)
                self.fast.parts(solver, self.problem)
            except UserError as error:
                self.skip(what, str(error))
                continue
            run = partial(self.fast.solve, self.measurement(1), self.problem, solver, [0])
            times = self.unless_out_of_memory(what, partial(self.times, run, 2))
            if times is not None:
                seconds = min(times) * usual / solver.steps
                yield {"solver": name, "steps": usual, "measured_steps": solver.steps, "seconds": seconds}

    def training(self) -> Iterator[Found]:
        """Pictures per second of `ddc train ddc`, plain and, on CUDA, with --compile.

        A backward pass counts as two forward passes; the loss and the degrading of pictures are not counted.
        """
        batch, models = self.settings.training, self.results["models"]
        for way in ("plain", "compiled") if self.cuda else ("plain",):
            if self.training_speed is None or self.late(f"training, {way}"):
                continue
            prior, network = copy.deepcopy((self.prior, self.network))
            self.reset_memory(prior, network)
            speed = self.training_speed(prior, network, batch, self.settings.size, way == "compiled")
            tera = speed * (models["prior"]["gflop"] + 3 * models["network"]["gflop"]) / 1e3
            yield {"way": way, "batch": batch, "images_per_second": speed, "tflops": tera, **self.memory()}

    def growth(self, what: str, values: tuple[int, ...]) -> Iterator[Found]:
        """Time and memory of the whole pipeline over larger pictures (by tiles), or over more of them."""
        side, per_pixel = self.settings.size, 0.0
        tile = default_tile(self.device) if self.device.type == "cpu" else side
        for value in sorted(values):
            height, count = (value, 1) if what == "size" else (side, value)
            pixels = height * height * count
            expected = per_pixel * pixels
            if self.late(f"{what} {value}", expected):
                yield {what: value, "seconds": None, "predicted_s": expected}
                continue
            pictures = torch.rand(count, 3, height, height)
            self.reset_memory(self.fast.prior, self.fast.network)
            run = partial(self.fast, pictures, "denoise", sigma=SIGMA_Y, steps=self.settings.steps, tile=tile)
            seconds = self.once(run)
            per_pixel = seconds / pixels
            yield {what: value, "seconds": seconds, "megapixels": pixels / 1e6, **self.memory()}

    # -----------------------------------------------------------------------------------------------------
    # measuring

    def measurement(self, batch: int) -> Tensor:
        side = self.settings.size // self.problem.operator.scale
        return Noise(range(batch), device=self.device).normal((batch, 3, side, side)).clamp(-1, 1)

    def restore(self, pipe: RestorationPipeline, batch: int) -> Tensor:
        return pipe.solve(self.measurement(batch), self.problem, DDC(steps=self.settings.steps), range(batch))

    def unless_out_of_memory(self, what: str, measure: Callable[[], Any]) -> Any:
        """What `measure` returns; None, with a note, if there is not enough memory."""
        try:
            return measure()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self.skip(what, "out of memory")
        return None

    def once(self, run: Callable[[], Any]) -> float:
        wait = torch.cuda.synchronize if self.cuda else lambda device: None
        wait(self.device)
        started = time.perf_counter()
        run()
        wait(self.device)
        return time.perf_counter() - started

    def times(self, run: Callable[[], Any], repeats: int | None = None, warm: bool = True) -> list[float]:
        if warm:
            self.once(run)
        return [self.once(run) for _ in range(repeats or self.repeats)]

    def rate(self, seconds: float, way: str) -> dict[str, float]:
        """TFLOP/s, and the share of the matrix-product peak."""
        models = self.results["models"]
        tera = self.settings.steps * (models["prior"]["gflop"] + models["network"]["gflop"]) / 1e3 / seconds
        return {
            "tflops": tera,
            "share_of_peak": tera / self.results.get("peak", {}).get(_name(self.dtypes[way]), math.nan),
        }

    def reset_memory(self, *models: nn.Module | None) -> None:
        """Begin to measure the memory of the given models; anything else on the device is not counted."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            weights = sum(p.numel() * p.element_size() for m in models if m is not None for p in m.parameters())
            self.beside = torch.cuda.memory_allocated(self.device) - weights

    def memory(self) -> dict[str, float]:
        """Megabytes: the device's peak since `reset_memory`, or the peak of the process."""
        if self.cuda:
            return {"device_mb": (torch.cuda.max_memory_allocated(self.device) - self.beside) / 1e6}
        import resource

        return {"host_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}

    def late(self, what: str, needed: float = 0.0) -> bool:
        """Whether there is no time for this part, which is then noted as skipped."""
        late = time.monotonic() + needed > self.deadline
        if late:
            self.skip(what, f"it would take about {needed:.0f} s" if needed else "the time was up")
        return late

    def skip(self, what: str, why: str) -> None:
        self.results["skipped"].append({"what": what, "why": why})
        self.say(f"{what}: skipped, {why}")


def kind_of_kernel(name: str) -> str:
    return next((kind for kind, marks in KERNELS if any(mark in name.lower() for mark in marks)), "other")


def kinds_of_kernels(run: Callable[[], Any]) -> dict[str, float]:
    """Seconds that each kind of kernels takes on the GPU, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return kinds_in(profiler.key_averages())


def kinds_in(events: Any) -> dict[str, float]:
    """Does the same for the events of a profile."""
    kinds: dict[str, float] = {}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:  # not the calls that queued them
            kind = kind_of_kernel(event.key)
            kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 1e6
    return dict(sorted(kinds.items(), key=lambda k: -k[1]))


def cpu_name() -> str:
    """The processor's name, if it can be read."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
