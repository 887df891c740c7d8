"""Speed and memory of the plain loop and of the fast path, measured side by side in one run.

The plain loop is what one would write first: eager, one picture at a time, bfloat16 on CUDA and float32 on the
CPU. Every figure is taken on the machine it runs on, the matrix-product peak that it is compared with too. Nothing here
depends on the weights, so networks with random ones can be measured.
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
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddc.consistency import DataConsistency
from ddc.errors import UserError
from ddc.fast import FastModels, accelerate_models, agreement, can_compile, prepare_compiler, probe, rewrap
from ddc.images import Picture
from ddc.networks import build_network, network_config, run_unet, unet_size_multiple, write_out_norms
from ddc.noise import Noise
from ddc.perceptual import LPIPS
from ddc.pipeline import CPU_TILE, RestorationPipeline, is_out_of_memory, pick_device
from ddc.presets import NETWORKS, PRIORS
from ddc.priors import Prior, schedule_from_config, scheduler_config
from ddc.problems import Problem, task_operator
from ddc.solvers import SOLVERS
from ddc.solvers.ddc import DDC

TASK, SIGMA_Y = "sr4", 0.05
# kinds of kernels, by what their names hold; the first that fits
KERNELS = (
    ("attention", ("flash", "fmha", "attention")),
    ("fused normalisation and elementwise", ("triton",)),
    ("convolution", ("conv", "fprop", "implicit_gemm", "xmma", "cudnn", "winograd")),
    ("matrix product", ("gemm", "nvjet", "cutlass", "::mm", "::bmm", "::addmm", "matmul", "einsum")),
    ("copies", ("copy", "memcpy", "memset", "contiguous", "::cat", "clone")),
    ("normalisation", ("norm",)),
)
TRAINING_STEPS = 8  # before the clock starts, and measured
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
    """Repeats of each measurement, of which the median counts; by default 3 on the CPU and 11 elsewhere."""
    minutes: float = 20.0
    """Start nothing new after so many minutes."""
    autotune: bool = False
    """Let the compiler search for faster kernels."""
    solvers: bool = True
    """Measure the other solvers as well."""
    training: int = 0
    """Measure training too, with batches of so many pictures; 0 leaves it out."""

    def __post_init__(self) -> None:
        for name in ("steps", "size", "minutes"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("repeats", "training"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be below 0, as {getattr(self, name)} is")
        for name in ("batches", "sizes", "counts"):
            if any(n < 1 for n in getattr(self, name)):
                raise UserError(f"{name} must be whole numbers from 1 on, not {getattr(self, name)}")


def random_models(prior: str, network: str) -> tuple[Prior, DataConsistency]:
    """The networks of two presets with random weights, none of them zero."""
    unet = build_network(PRIORS[prior])
    config = scheduler_config(learned_variance=PRIORS[prior]["out_channels"] == 6)
    made = (
        Prior(unet, schedule_from_config(config), scheduler_config=config),
        DataConsistency.from_config(NETWORKS[network]),
    )
    for model in made:
        for parameter in model.eval().requires_grad_(False).parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
    return made


class EagerUNet(nn.Module):
    """A U-Net in one precision and nothing else."""

    def __init__(self, unet: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = unet.config
        self.size_multiple = unet_size_multiple(unet)
        self.dtype = dtype
        self.module = copy.deepcopy(unet).to(device=device, dtype=dtype)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return run_unet(self.module, x.to(self.dtype), times)


class Bench:
    """One run. `results` is complete after every part, so an interrupted run has what was measured."""

    def __init__(
        self,
        prior: Prior,
        network: DataConsistency | None,
        device: str = "auto",
        settings: BenchSettings = BenchSettings(),
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if network is None:
            raise UserError("bench measures DDC and needs a data-consistency network; this model has none")
        self.prior, self.network, self.settings, self.folder, self.say = prior, network, settings, folder, say
        self.device = pick_device(device)
        cpu = self.device.type == "cpu"
        self.batches = settings.batches or ((1, 2) if cpu else (1, 4, 8, 16, 32))
        self.sizes = settings.sizes or ((256, 512, 1024) if cpu else (256, 512, 1024, 2048, 4096))
        self.repeats = settings.repeats or (3 if cpu else 11)
        self.counts = settings.counts or ((1, 2, 4) if cpu else (1, 4, 16, 64))
        self.plain_dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.problem = Problem(task_operator(TASK), SIGMA_Y, TASK)
        self.deadline = time.monotonic() + 60 * settings.minutes
        self.beside = 0  # bytes on the device that do not belong to what is measured
        self.results: dict[str, Any] = {"skipped": []}

    def run(self) -> dict[str, Any]:
        self.results["environment"] = self.environment()
        self.results["models"] = self.models()
        self.say("preparing the fast path")
        plain = rewrap(self.prior, self.network, lambda u: EagerUNet(u, self.device, self.plain_dtype))
        started = time.monotonic()
        fast = accelerate_models(
            self.prior,
            self.network,
            self.device,
            compile=True if self.device.type == "cuda" and can_compile() else None,
            autotune=self.settings.autotune,
            batch=max(self.batches) if self.settings.batches else None,
            size=self.settings.size,
        )
        self.results["fast"] = {"dtype": _name(fast.dtype), "batch": fast.batch, "compiled": fast.compiled}
        self.results["fast"]["prepare_s"] = time.monotonic() - started
        parts: list[tuple[str, Callable[[], Any]]] = [
            ("peak", lambda: self.peak(fast.dtype)),
            ("latency", lambda: self.latency(plain, fast)),
            ("agreement_db", lambda: self.agreement(fast)),
            ("throughput", lambda: list(self.throughput(plain, fast))),
            ("profile", lambda: self.profile(fast)),
            ("solvers", lambda: list(self.solvers(fast)) if self.settings.solvers else []),
            ("training", lambda: list(self.training()) if self.settings.training else []),
            ("counts", lambda: list(self.growth(fast, "count", self.counts))),
            ("sizes", lambda: list(self.growth(fast, "size", self.sizes))),
        ]
        for name, measure in parts:
            if self.late():
                self.skip(name, "the time was up")
                continue
            self.say(name)
            try:
                self.results[name] = measure()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.skip(name, "out of memory")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return self.results

    # -----------------------------------------------------------------------------------------------------
    # the parts

    def environment(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else cpu_name(),
            "kind": self.device.type,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "steps": self.settings.steps,
            "size": self.settings.size,
        }

    def models(self) -> dict[str, Any]:
        """Parameters and FLOPs (a multiplication and an addition are two) of one evaluation."""
        from torch.utils.flop_counter import FlopCounterMode

        rows = {}
        for name, model in (("prior", self.prior), ("network", self.network)):
            channels = int(model.unet.config["in_channels"])  # type: ignore[index]
            with FlopCounterMode(display=False) as counter, torch.device("meta"):
                blank = build_network(network_config(model.unet))
                run_unet(blank, torch.zeros(1, channels, self.settings.size, self.settings.size), 0)
            rows[name] = {
                "million_parameters": sum(p.numel() for p in model.parameters()) / 1e6,
                "gflop": counter.get_total_flops() / 1e9,
            }
        return rows

    def peak(self, dtype: torch.dtype) -> dict[str, float]:
        """TFLOP/s of a large matrix product, in the plain loop's and in the fast path's precision."""
        n = 8192 if self.device.type == "cuda" else 1536
        rates = {}
        for kind in dict.fromkeys((self.plain_dtype, dtype)):
            a = torch.randn(n, n, device=self.device).to(kind)
            seconds = min(self.times(partial(torch.mm, a, a), 10))
            rates[_name(kind)] = 2 * n**3 / seconds / 1e12
        return rates

    def latency(self, plain: tuple[Prior, DataConsistency | None], fast: FastModels) -> dict[str, Any]:
        """One picture at a time, the two ways in turn; and where the time goes."""
        runs = {
            "plain": lambda: self.restore(*plain, 1),
            "fast": lambda: self.restore(fast.prior, fast.network, 1),
        }
        started = time.monotonic()
        for run in runs.values():
            self.once(run)
        first = time.monotonic() - started  # compiling included
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.repeats):
            for name, run in runs.items():
                taken[name].append(self.once(run))
        rows: dict[str, Any] = {"first_s": first}
        for name, (prior, network) in {"plain": plain, "fast": (fast.prior, fast.network)}.items():
            seconds = statistics.median(taken[name])
            x = torch.randn(1, 3, self.settings.size, self.settings.size, device=self.device)
            known = self.network.describe(self.measurement(1), x, self.problem)
            one_prior = statistics.median(self.times(partial(prior.predict, x, 400)))
            one_network = statistics.median(self.times(partial(network or self.network, known, x, 400)))
            rows[name] = {
                "seconds": seconds,
                "all_seconds": taken[name],
                "prior_s": one_prior,
                "network_s": one_network,
                "rest_s": seconds - self.settings.steps * (one_prior + one_network),
                **self.rate(seconds, self.plain_dtype if name == "plain" else fast.dtype),
            }
        rows["speedup"] = statistics.median(p / f for p, f in zip(taken["plain"], taken["fast"], strict=True))
        return rows

    def agreement(self, fast: FastModels) -> float:
        """PSNR between the pictures of the fast path and of float32."""
        exact = rewrap(self.prior, self.network, lambda u: EagerUNet(u, self.device, torch.float32))
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            truth = probe(*exact, self.device, self.settings.size)
        return agreement(probe(fast.prior, fast.network, self.device, self.settings.size), truth)

    def throughput(
        self, plain: tuple[Prior, DataConsistency | None], fast: FastModels
    ) -> Iterator[dict[str, Any]]:
        """Seconds per picture over batch sizes; the plain loop beside."""
        ways = {"plain": (plain, self.plain_dtype), "fast": ((fast.prior, fast.network), fast.dtype)}
        for batch in self.batches:
            for way, (models, dtype) in ways.items():
                if self.late():
                    self.skip(f"throughput, {way}, batch {batch}", "the time was up")
                    continue
                if way == "fast" and fast.compiled:
                    for model in models:
                        model.unet.sizes = (batch,)  # type: ignore[union-attr]
                try:
                    run = partial(self.restore, *models, batch)
                    self.once(run)
                    self.reset_memory(*models)
                    times = self.times(run, warm=False)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    self.skip(f"throughput, {way}, batch {batch}", "out of memory")
                    continue
                seconds = statistics.median(times) / batch
                row = {"way": way, "batch": batch, "seconds_per_image": seconds, **self.memory()}
                yield row | self.rate(seconds, dtype)
        if fast.compiled:
            for model in (fast.prior, fast.network):
                model.unet.sizes = tuple(sorted({1, fast.batch}))  # type: ignore[union-attr]

    def profile(self, fast: FastModels) -> dict[str, Any]:
        """Where the fast path's time goes on a GPU, by kinds of kernels, at its usual batch."""
        from torch.profiler import ProfilerActivity, profile

        if self.device.type != "cuda":  # the profiler does not see the threads that work there
            return {}
        run = partial(self.restore, fast.prior, fast.network, fast.batch)
        self.once(run)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            seconds = self.once(run)
        kinds: dict[str, float] = {}
        for event in profiler.key_averages():
            kind = kind_of_kernel(event.key)
            kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 1e6
        kinds["nothing runs"] = max(seconds - sum(kinds.values()), 0.0)
        return {
            "batch": fast.batch,
            "seconds": seconds,
            "kinds": dict(sorted(kinds.items(), key=lambda k: -k[1])),
        }

    def solvers(self, fast: FastModels) -> Iterator[dict[str, Any]]:
        """Each solver's time for one picture, from a few of its steps (the paper's Table 4)."""
        for name, kind in SOLVERS.items():
            if self.late():
                self.skip(f"solver {name}", "the time was up")
                continue
            usual = kind().steps
            steps = min(usual, SOLVER_STEPS)
            solver = kind(steps=steps)
            try:
                solver.check(self.problem)
                parts = {
                    k: v.to(self.device) for k, v in solver.load_parts(self.folder, self.problem).items()
                }
            except UserError as error:
                self.skip(f"solver {name}", str(error))
                continue
            if "network" in solver.needs:
                parts["network"] = fast.network

            def run(solver: Any = solver, parts: dict[str, Any] = parts) -> None:
                noise = Noise([0], device=self.device)
                solver.solve(self.measurement(1), self.problem, fast.prior, noise, **parts)

            try:
                seconds = min(self.times(run, 2))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.skip(f"solver {name}", "out of memory")
                continue
            yield {
                "solver": name,
                "steps": usual,
                "measured_steps": steps,
                "seconds": seconds * usual / steps,
            }

    def training(self) -> Iterator[dict[str, Any]]:
        """Pictures per second of `ddc train ddc`, as it is and, on CUDA, with --compile.

        A backward pass counts as two forward passes; the loss and the measuring of pictures are not counted.
        """
        from ddc.training.ddc import DDCObjective
        from ddc.training.loop import train
        from ddc.training.settings import LoopSettings
        from ddc.training.tasks import TaskMix, parse_tasks

        batch, size = self.settings.training, self.settings.size
        mix = TaskMix(parse_tasks("sr4,sr8,gauss,inpaint92,jpeg10,denoise"))
        gflop = {name: row["gflop"] for name, row in self.results["models"].items()}
        for way in ("plain", "compiled") if self.device.type == "cuda" else ("plain",):
            if self.late():
                self.skip(f"training, {way}", "the time was up")
                continue
            prior, network = copy.deepcopy((self.prior, self.network))
            compile = way == "compiled"
            if compile:
                prepare_compiler()
                write_out_norms(prior.unet).compile(dynamic=False)
            with TemporaryDirectory() as folder:
                pictures = Path(folder) / "pictures"
                pictures.mkdir()
                for i in range(64):
                    pixels = np.random.default_rng(i).integers(0, 256, (size, size, 3), np.uint8)
                    Picture(pixels).write(pictures / f"{i}.bmp")
                settings = LoopSettings(
                    data=(pictures,),
                    out=Path(folder) / "run",
                    steps=2 * TRAINING_STEPS,
                    batch_size=batch,
                    crop=size,
                    compile=compile,
                    log_every=TRAINING_STEPS,
                    pictures_every=0,
                    checkpoints=False,
                )
                objective = DDCObjective(network, prior, ((1.0, mix),), LPIPS("alex"))
                self.reset_memory(prior, network)
                progress = train(objective, settings, report=lambda text: None)
            speed = progress.history[-1]["images_per_second"]
            tera = speed * (gflop["prior"] + 3 * gflop["network"]) / 1e3
            yield {"way": way, "batch": batch, "images_per_second": speed, "tflops": tera, **self.memory()}

    def growth(self, fast: FastModels, what: str, values: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """Time and memory of the whole pipeline over larger pictures (by tiles), or over more of them."""
        tile = CPU_TILE if self.device.type == "cpu" else self.settings.size
        pipe = RestorationPipeline(fast.prior, fast.network, self.folder, tile=tile)
        pipe.device, pipe.batch = self.device, fast.batch
        side = self.settings.size
        per_pixel = 0.0
        for value in sorted(values):
            height, count = (value, 1) if what == "size" else (side, value)
            pixels = height * height * count
            if self.late(per_pixel * pixels):
                yield {what: value, "seconds": None, "predicted_s": per_pixel * pixels}
                self.skip(f"{what} {value}", f"it would take about {per_pixel * pixels:.0f} s")
                continue
            pictures = torch.rand(count, 3, height, height)
            self.reset_memory(fast.prior, fast.network)
            run = partial(pipe, pictures, "denoise", sigma=SIGMA_Y, steps=self.settings.steps)
            seconds = self.once(run)
            per_pixel = seconds / pixels
            yield {what: value, "seconds": seconds, "megapixels": pixels / 1e6, **self.memory()}

    # -----------------------------------------------------------------------------------------------------
    # measuring

    def measurement(self, batch: int) -> Tensor:
        noise = Noise(range(batch), device=self.device)
        side = self.settings.size // self.problem.operator.scale
        return noise.normal((batch, 3, side, side)).clamp(-1, 1)

    @torch.no_grad()
    def restore(self, prior: Prior, network: DataConsistency | None, batch: int) -> Tensor:
        noise = Noise(range(batch), device=self.device)
        solver = DDC(steps=self.settings.steps)
        return solver.solve(self.measurement(batch), self.problem, prior, noise, network=network)

    def once(self, run: Callable[[], Any]) -> float:
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - started

    def times(self, run: Callable[[], Any], repeats: int | None = None, warm: bool = True) -> list[float]:
        if warm:
            self.once(run)
        return [self.once(run) for _ in range(repeats or self.repeats)]

    def rate(self, seconds: float, dtype: torch.dtype) -> dict[str, float]:
        """TFLOP/s, and the share of the matrix-product peak."""
        models = self.results["models"]
        tera = self.settings.steps * (models["prior"]["gflop"] + models["network"]["gflop"]) / 1e3 / seconds
        peak = self.results.get("peak", {}).get(_name(dtype), math.nan)
        return {"tflops": tera, "share_of_peak": tera / peak}

    def reset_memory(self, *models: nn.Module | None) -> None:
        """Begin to measure what the given models take; what else lies on the device is not counted."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            weights = sum(
                p.numel() * p.element_size() for m in models if m is not None for p in m.parameters()
            )
            self.beside = torch.cuda.memory_allocated(self.device) - weights

    def memory(self) -> dict[str, float]:
        """Megabytes: the device's peak since `reset_memory`, or the process's own so far."""
        if self.device.type == "cuda":
            return {"device_mb": (torch.cuda.max_memory_allocated(self.device) - self.beside) / 1e6}
        import resource

        return {"host_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def late(self, needed: float = 0.0) -> bool:
        return time.monotonic() + needed > self.deadline

    def skip(self, what: str, why: str) -> None:
        self.results["skipped"].append({"what": what, "why": why})
        self.say(f"{what}: left out, {why}")


def kind_of_kernel(name: str) -> str:
    return next((kind for kind, marks in KERNELS if any(mark in name.lower() for mark in marks)), "other")


def cpu_name() -> str:
    """What the processor calls itself, where that can be read."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------
# showing


def tables(results: dict[str, Any]) -> list[Any]:
    """The results as rich tables."""
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            made.add_column(column, justify="left" if i == 0 else "right")
        return made

    made = []
    e, models = results["environment"], results["models"]
    size = f"{e['size']}×{e['size']}, {e['steps']} steps"
    networks = table(
        f"{e['device']} ({e['kind']}, {e['threads']} threads), torch {e['torch']}", "", "parameters", "FLOPs"
    )
    for name, row in models.items():
        networks.add_row(name, f"{row['million_parameters']:.1f} M", f"{row['gflop']:.1f} G")
    made.append(networks)
    if latency := results.get("latency"):
        shown = table(
            f"one picture, {size}", "way", "seconds", "prior", "network", "rest", "TFLOP/s", "of peak"
        )
        for way in ("plain", "fast"):
            row = latency[way]
            cells = [f"{row[key]:.4f}" for key in ("seconds", "prior_s", "network_s", "rest_s")]
            shown.add_row(way, *cells, f"{row['tflops']:.3g}", f"{row['share_of_peak']:.0%}")
        shown.caption = f"the fast path is {latency['speedup']:.2f} times as fast"
        if "agreement_db" in results:
            shown.caption += f", and agrees with float32 to {results['agreement_db']:.1f} dB"
        made.append(shown)
    if rows := results.get("throughput"):
        shown = table(f"batches, {size}", "way", "batch", "seconds per picture", "memory MB", "of peak")
        for row in rows:
            memory = row.get("device_mb", row.get("host_mb"))
            cells = [str(row["batch"]), f"{row['seconds_per_image']:.4f}", f"{memory:.0f}"]
            shown.add_row(row["way"], *cells, f"{row['share_of_peak']:.0%}")
        plain = [row["seconds_per_image"] for row in rows if (row["way"], row["batch"]) == ("plain", 1)]
        if plain:
            best = min(rows, key=lambda row: row["seconds_per_image"])
            ratio = plain[0] / best["seconds_per_image"]
            shown.caption = (
                f"batches of {best['batch']} the {best['way']} way: {ratio:.2f} times the plain loop's"
            )
        made.append(shown)
    if profile := results.get("profile"):
        shown = table(f"where the time goes, batches of {profile['batch']}", "kind", "seconds", "share")
        for kind, seconds in profile["kinds"].items():
            shown.add_row(kind, f"{seconds:.4f}", f"{seconds / profile['seconds']:.0%}")
        made.append(shown)
    if rows := results.get("solvers"):
        shown = table("solvers, one picture at their usual number of steps", "solver", "steps", "seconds")
        for row in rows:
            shown.add_row(row["solver"], str(row["steps"]), f"{row['seconds']:.2f}")
        made.append(shown)
    if rows := results.get("training"):
        shown = table("training", "way", "batch", "pictures a second", "TFLOP/s", "memory MB")
        for row in rows:
            memory = row.get("device_mb", row.get("host_mb"))
            cells = [f"{row['images_per_second']:.4g}", f"{row['tflops']:.3g}", f"{memory:.0f}"]
            shown.add_row(row["way"], str(row["batch"]), *cells)
        made.append(shown)
    for what, title in (("counts", "number of pictures"), ("sizes", "larger pictures, by tiles")):
        if rows := results.get(what):
            key = what.removesuffix("s")
            shown = table(title, key, "seconds", "memory MB")
            for row in rows:
                known = row["seconds"] is not None
                seconds = f"{row['seconds']:.2f}" if known else f"about {row['predicted_s']:.0f}"
                memory = row.get("device_mb", row.get("host_mb"))
                shown.add_row(str(row[key]), seconds, f"{memory:.0f}" if known else "")
            made.append(shown)
    return made


def plot(results: dict[str, Any], path: Path) -> None:
    """Throughput, solvers and growth in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for way in ("plain", "fast"):
        rows = [row for row in results.get("throughput", []) if row["way"] == way]
        axes[0].plot([r["batch"] for r in rows], [r["seconds_per_image"] for r in rows], "o-", label=way)
    axes[0].set(xlabel="batch", ylabel="seconds per picture", title="throughput", yscale="log")
    axes[0].legend()
    rows = sorted(results.get("solvers", []), key=lambda row: -row["seconds"])
    axes[1].barh([row["solver"] for row in rows], [row["seconds"] for row in rows])
    axes[1].set(xlabel="seconds per picture", title="solvers", **({"xscale": "log"} if rows else {}))
    rows = [row for row in results.get("sizes", []) if row["seconds"] is not None]
    axes[2].plot([r["size"] for r in rows], [r["seconds"] for r in rows], "o-", label="seconds")
    memory = axes[2].twinx()
    megabytes = [row.get("device_mb", row.get("host_mb")) for row in rows]
    memory.plot([row["size"] for row in rows], megabytes, "s--", color="tab:orange", label="memory")
    memory.set_ylabel("memory, MB")
    axes[2].set(xlabel="side of the picture", ylabel="seconds", title="larger pictures")
    if rows:
        axes[2].set(xscale="log", yscale="log")
        memory.set_ylim(bottom=0)
    figure.suptitle(f"{results['environment']['device']}, torch {results['environment']['torch']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
