"""One plain training loop, on Accelerate: one device, several, or several machines.

Every random number follows from the seed and a counter, so a run that is killed and resumed ends bit for bit
where an uninterrupted one does (on the CPU, and wherever the kernels are deterministic).
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.training.checkpoints import latest_checkpoint, read_checkpoint, write_checkpoint
from ddc.training.data import Draws, Pool, centre_crops, find_sources, load_pool, split_holdout
from ddc.training.objectives import Objective
from ddc.training.settings import LoopSettings

# settings that may change between a run and its resumption
_FREE = {
    "minutes",
    "total_minutes",
    "out",
    "resume",
    "compile",
    "compile_cache",
    "save_every",
    "keep",
    "log_every",
    "steps",
}
_FREE |= {
    "export_every_minutes",
    "export_dtype",
    "shard_mb",
    "validate_every",
    "validation_limit",
    "checkpoints",
    "data",
}


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    seconds: float = 0.0  # of all calls together
    history: list[dict[str, float]] = field(default_factory=list)


def learning_rate_factor(settings: LoopSettings, step: int, share: float) -> float:
    """The rate at `step`, as a share of the peak, when `share` of the whole run lies behind."""
    warm = min(1.0, (step + 1) / max(settings.warmup, 1))
    share = min(max(share, 0.0), 1.0)
    if settings.schedule == "constant":
        return warm
    if settings.schedule == "cosine":
        return warm * 0.5 * (1 + math.cos(math.pi * share))
    left = (1 - share) / max(settings.decay_share, 1e-9)
    return warm * min(1.0, left)


class Average:
    """The exponential moving average of the weights."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.state = {k: v.detach().float().clone() for k, v in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        current = module.state_dict()
        names = list(self.state)
        torch._foreach_lerp_([self.state[k] for k in names], [current[k].float() for k in names], 1 - decay)


def train(
    objective: Objective, settings: LoopSettings, report: Callable[[str], None] | None = None
) -> Progress:
    """Train until the steps or the minutes are over; save, export, and say how it went."""
    from accelerate import Accelerator

    start = time.monotonic()
    cuda = torch.cuda.is_available()
    precision = settings.precision if settings.precision != "auto" else ("bf16" if cuda else "fp32")
    if precision == "bf16" and not cuda:
        raise UserError("bf16 training needs a CUDA device; use --precision fp32 on this machine")
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=settings.accumulate,
    )
    device, main = accelerator.device, accelerator.is_main_process
    say = report or (lambda text: print(text, file=sys.stderr, flush=True))
    if not main:
        say = lambda text: None  # noqa: E731
    if cuda:
        torch.backends.cudnn.benchmark = True

    pool, validation = _load_data(settings, device)
    say(f"training on {pool.report()}" + (f", validating on {len(validation)}" if validation else ""))
    draws = Draws(
        pool,
        settings.crop,
        settings.seed,
        accelerator.process_index,
        accelerator.num_processes,
        settings.flip,
    )

    module = objective.module.to(device)
    module.train().requires_grad_(True)
    if cuda:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fused: dict[str, Any] = {"fused": True} if cuda else {}
    optimiser = torch.optim.AdamW(
        module.parameters(),
        settings.learning_rate,
        settings.betas,
        weight_decay=settings.weight_decay,
        **fused,
    )
    average = Average(module, settings.ema)
    progress = Progress()
    _resume(settings, objective, module, optimiser, average, draws, progress, device, bool(fused), say)

    if settings.compile:
        _load_compile_cache(settings, say)
        module.compile(dynamic=False)
    forward, optimiser = accelerator.prepare(module, optimiser)
    scale_seconds = progress.seconds
    first_step = progress.step
    last_log, last_export = (time.monotonic(), progress.step), time.monotonic()
    writer = _writer(settings) if main else None

    def share() -> float:
        if settings.total_minutes is not None:
            return (scale_seconds + time.monotonic() - start) / (60 * settings.total_minutes)
        return progress.step / settings.steps

    def out_of_time() -> bool:
        if settings.minutes is not None and time.monotonic() - start > 60 * settings.minutes:
            return True
        return share() >= 1

    def save(name: str = "") -> None:
        progress.seconds = scale_seconds + time.monotonic() - start
        if main and settings.checkpoints:
            _save(settings, objective, accelerator.unwrap_model(forward), optimiser, average, draws, progress)
        if main:
            _export(settings, objective, average, progress)
        accelerator.wait_for_everyone()

    first_share = share()
    while not _agree(accelerator, out_of_time()):
        rate = settings.learning_rate * learning_rate_factor(settings, progress.step, share())
        for group in optimiser.param_groups:
            group["lr"] = rate
        terms: dict[str, Tensor] = {}
        for _ in range(settings.accumulate):
            with accelerator.accumulate(forward), accelerator.autocast():
                terms = objective.losses(forward, draws, settings.batch_size, progress.step)
                accelerator.backward(terms["loss"])
                if accelerator.sync_gradients:
                    terms["gradient"] = accelerator.clip_grad_norm_(forward.parameters(), settings.clip)
                optimiser.step()
                optimiser.zero_grad()
        progress.step += 1
        average.update(accelerator.unwrap_model(forward), progress.step)

        if progress.step % settings.log_every == 0 or progress.step == first_step + 1:
            figures = {k: float(v.detach()) for k, v in terms.items()}
            if not math.isfinite(figures["loss"]):
                save()
                raise UserError(
                    f"the loss is {figures['loss']} at step {progress.step} ({objective.describe_batch()}); the state "
                    f"is saved in {settings.out}; lower --learning-rate or look at that batch"
                )
            now = time.monotonic()
            images = (
                (progress.step - last_log[1])
                * settings.batch_size
                * settings.accumulate
                * accelerator.num_processes
            )
            figures |= {
                "step": progress.step,
                "rate": rate,
                "images_per_second": images / max(now - last_log[0], 1e-9),
            }
            last_log = (now, progress.step)
            progress.history.append(figures)
            say(_line(figures, (now - start) * (1 - share()) / max(share() - first_share, 1e-9)))
            _log(writer, settings, figures)
        if settings.validate_every and progress.step % settings.validate_every == 0 and validation:
            _validate(
                settings,
                objective,
                accelerator.unwrap_model(forward),
                average,
                validation,
                progress,
                say,
                writer,
            )
        if progress.step % settings.save_every == 0:
            save()
        if (
            settings.export_every_minutes
            and time.monotonic() - last_export > 60 * settings.export_every_minutes
            and main
        ):
            _export(settings, objective, average, progress)
            last_export = time.monotonic()
    save()
    if settings.compile and main:
        _save_compile_cache(settings)
    if validation and main:
        _validate(
            settings, objective, accelerator.unwrap_model(forward), average, validation, progress, say, writer
        )
    say(
        f"stopped at step {progress.step} after {(time.monotonic() - start) / 60:.1f} minutes; model in {settings.out / 'model'}"
    )
    return progress


def _load_data(settings: LoopSettings, device: torch.device) -> tuple[Pool, Pool | None]:
    sources, held = split_holdout(find_sources(settings.data), settings.holdout)
    if settings.validation is not None:
        held = find_sources([settings.validation])
    if not sources:
        raise UserError(
            f"--holdout {settings.holdout} keeps every picture out of training; choose a larger number"
        )
    validation = load_pool(held[: settings.validation_limit], settings.crop, device) if held else None
    return load_pool(sources, settings.crop, device), validation


def _agree(accelerator: Any, stop: bool) -> bool:
    """Whether any process wants to stop, so that all stop at the same step."""
    if accelerator.num_processes == 1:
        return stop
    flag = torch.tensor([float(stop)], device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum").item() > 0)


def _settings_record(settings: LoopSettings) -> dict[str, Any]:
    record = {k: v for k, v in dataclasses.asdict(settings).items() if k not in _FREE}
    return json.loads(json.dumps(record, default=str))


def _save(
    settings: LoopSettings,
    objective: Objective,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    average: Average,
    draws: Draws,
    progress: Progress,
) -> None:
    moments = {}
    for i, parameter in enumerate(module.parameters()):
        for key, value in optimiser.state[parameter].items():
            moments[f"{i}.{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    tensors = {"weights": module.state_dict(), "average": average.state, "optimiser": moments}
    kept = objective.tensors()
    if kept:
        tensors["objective"] = kept
    record = {
        "step": progress.step,
        "seconds": progress.seconds,
        "position": draws.position,
        "settings": _settings_record(settings),
    }
    write_checkpoint(
        settings.out / "checkpoints", f"step-{progress.step:08d}", tensors, record, settings.keep
    )


def _resume(
    settings: LoopSettings,
    objective: Objective,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    average: Average,
    draws: Draws,
    progress: Progress,
    device: torch.device,
    fused: bool,
    say: Callable[[str], None],
) -> None:
    path = latest_checkpoint(settings.out / "checkpoints") if settings.resume else None
    if path is None:
        return
    tensors, record = read_checkpoint(path)
    now, then = _settings_record(settings), record["settings"]
    different = [
        f"{k} was {then.get(k)!r} and is {now.get(k)!r}" for k in sorted(now) if now.get(k) != then.get(k)
    ]
    if different:
        raise UserError(
            f"{settings.out} was trained with other settings: {'; '.join(different)}. Use the same, or another --out "
            "(with --init to start from its model)"
        )
    module.load_state_dict(tensors["weights"])
    average.state = {k: v.to(device) for k, v in tensors["average"].items()}
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.get("optimiser", {}).items():
        index, name = key.split(".", 1)
        moments.setdefault(int(index), {})[name] = value
    for i, parameter in enumerate(module.parameters()):
        if i in moments:
            # moments must lie in memory as their parameter does; a fused optimiser counts steps on the device
            optimiser.state[parameter] = {
                k: torch.empty_like(parameter).copy_(v)
                if v.dim()
                else v.to(parameter.device if fused else "cpu")
                for k, v in moments[i].items()
            }
    progress.step, progress.seconds = record["step"], record["seconds"]
    draws.position = record["position"]
    objective.restore({k: v.to(device) for k, v in tensors.get("objective", {}).items()}, draws)
    say(f"resumed from {path} at step {progress.step}")


def _export(settings: LoopSettings, objective: Objective, average: Average, progress: Progress) -> None:
    dtype = torch.float16 if settings.export_dtype == "fp16" else torch.float32
    objective.save(settings.out / "model", average.state, dtype=dtype, shard_mb=settings.shard_mb)


def _validate(
    settings: LoopSettings,
    objective: Objective,
    module: nn.Module,
    average: Average,
    validation: Pool,
    progress: Progress,
    say: Callable[[str], None],
    writer: Any,
) -> None:
    """Figures of the averaged weights on held-out pictures; the weights in training are put back after."""
    current = {k: v.clone() for k, v in module.state_dict().items()}
    module.load_state_dict({k: v.to(current[k].dtype) for k, v in average.state.items()})
    module.eval()
    totals: dict[str, list[float]] = {}
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    eager = torch.compiler.set_stance(
        "force_eager"
    )  # a compiled network would be compiled anew for other batches
    with eager, torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        for crops, names in centre_crops(validation, settings.crop, settings.batch_size):
            for key, values in objective.validate(crops, names).items():
                totals.setdefault(key, []).extend(values)
    module.load_state_dict(current)
    module.train()
    means = {f"validation/{k}": sum(v) / len(v) for k, v in totals.items()}
    say(
        f"step {progress.step} validation on {len(validation)}: "
        + "  ".join(f"{k[11:]} {v:.4g}" for k, v in means.items())
    )
    _log(writer, settings, {"step": progress.step, **means})
    progress.history.append({"step": progress.step, **means})


def _line(figures: dict[str, float], seconds_left: float) -> str:
    shown = {k: v for k, v in figures.items() if k not in ("step", "rate", "images_per_second")}
    terms = "  ".join(f"{k} {v:.4g}" for k, v in shown.items())
    left = f"{seconds_left / 60:.0f} min left" if seconds_left < 1e7 else ""
    return (
        f"step {figures['step']:.0f}  {terms}  rate {figures['rate']:.2e}  "
        f"{figures['images_per_second']:.0f} images/s  {left}"
    )


def _writer(settings: LoopSettings) -> Any:
    """TensorBoard's writer, where it is installed; the JSON lines are written in any case."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(settings.out / "logs"))


def _log(writer: Any, settings: LoopSettings, figures: dict[str, float]) -> None:
    if writer is not None:
        for key, value in figures.items():
            if key != "step":
                writer.add_scalar(key, value, int(figures["step"]))
    settings.out.mkdir(parents=True, exist_ok=True)
    with (settings.out / "log.jsonl").open("a") as file:
        file.write(json.dumps(figures) + "\n")


def _load_compile_cache(settings: LoopSettings, say: Callable[[str], None]) -> None:
    if settings.compile_cache is not None and settings.compile_cache.is_file():
        torch.compiler.load_cache_artifacts(settings.compile_cache.read_bytes())
        say(f"compiled kernels loaded from {settings.compile_cache}")


def _save_compile_cache(settings: LoopSettings) -> None:
    if settings.compile_cache is None:
        return
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is not None:
        settings.compile_cache.parent.mkdir(parents=True, exist_ok=True)
        settings.compile_cache.write_bytes(artifacts[0])
