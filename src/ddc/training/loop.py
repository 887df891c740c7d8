"""One training loop for all objectives, on Accelerate: one device, several, or several machines.

Every random number follows from the seed and a counter, so a run that is killed and resumed ends bit for bit where an
uninterrupted one does (on the CPU, and wherever the kernels are deterministic).
"""

import dataclasses
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddc.cuda import write_out_norms
from ddc.datasets import Pictures
from ddc.errors import UserError
from ddc.networks import check_fit
from ddc.training.data import Draws, centre_crops, load_data
from ddc.training.objectives import Objective
from ddc.training.output import (
    Display,
    Log,
    check_replaceable,
    read_latest,
    save_model,
    weights_fingerprint,
    write_checkpoint,
)
from ddc.training.settings import FREE, LIMITS, LoopSettings

_GRID_ROWS = 8


@dataclass
class Progress:
    """The state of a run."""

    step: int = 0
    seconds: float = 0.0  # of all calls together
    history: list[dict[str, float]] = field(default_factory=list)


def learning_rate_factor(settings: LoopSettings, step: int, share: float) -> float:
    """The rate at `step`, relative to the peak, when `share` of the whole run is done."""
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
        self.live = {k: v.detach() for k, v in module.state_dict().items()}  # trained in place
        self.state = {k: v.float().clone() for k, v in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.state.values()), [self.live[k].float() for k in self.state], 1 - decay)


class Guard:
    """The first step whose loss was not finite, recorded on the device and read a little later.

    Reading it from a GPU at every step would make the GPU wait; the value is copied while it works on.
    """

    def __init__(self, device: torch.device) -> None:
        self.first = torch.full((), -1, dtype=torch.int64, device=device)
        self._host = torch.full((), -1, dtype=torch.int64)
        if device.type == "cuda":
            self._host = self._host.pin_memory()

    def look(self, good: Tensor, step: int) -> None:
        self.first = torch.where(~good & (self.first < 0), step, self.first)
        self._host.copy_(self.first, non_blocking=True)

    def failed(self, wait: bool = False) -> int | None:
        """The step, if it is known by now; with `wait`, if there was one."""
        step = int(self.first) if wait else int(self._host)
        return step if step >= 0 else None


def train_model(settings: LoopSettings) -> Progress:
    """Train what the settings describe, with new weights or those of `settings.init`."""
    check_settings(settings)
    module, _, name = settings.objective.partition(":")
    torch.manual_seed(settings.seed)
    return train(getattr(import_module(module), name).from_settings(settings))


def check_settings(settings: LoopSettings) -> None:
    """Refuse numbers that no run can use."""
    for one in dataclasses.fields(settings):
        value, option = getattr(settings, one.name), f"--{one.name.replace('_', '-')}"
        low, high, expected = LIMITS.get(one.name, (-math.inf, math.inf, "a number"))
        for number in (value or (math.nan,)) if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not (math.isfinite(number) and low <= number <= high):
                raise UserError(f"{option} is {number}; expected {expected}")


def check_processes() -> int:
    """The number of processes that the environment describes; a wrong one would train nothing, or wait for ever."""
    given = {name: os.environ.get(name, default) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"))}
    world, rank = (int(text) if text.isdecimal() else -1 for text in given.values())
    if not 0 <= rank < world:
        raise UserError(
            f"the environment says WORLD_SIZE={given['WORLD_SIZE']} and RANK={given['RANK']}; expected a rank from 0 to "
            "WORLD_SIZE − 1: unset both, or start the processes with `accelerate launch` or `torchrun`"
        )
    return world


def train(objective: Objective, report: Callable[[str], None] | None = None) -> Progress:
    """Train until the steps or the minutes of the objective's settings are over; save and export."""
    start = time.monotonic()
    settings = objective.settings
    world = check_processes()
    check_replaceable(settings.out / objective.folder)
    try:
        from accelerate import Accelerator
    except ImportError:
        raise UserError(
            "training needs accelerate; install it with `pip install 'deep-data-consistency[train]'`"
        ) from None
    cuda = torch.cuda.is_available()
    precision = settings.precision if settings.precision != "auto" else ("bf16" if cuda else "fp32")
    if precision != "fp32" and not cuda:
        raise UserError(f"{precision} training needs a CUDA device; use --precision fp32 on this machine")
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=settings.accumulate,
        cpu=not cuda and world > 1,  # several processes without a GPU: gloo
    )
    if cuda:
        torch.backends.cudnn.benchmark = True
    with Display(report, accelerator.is_main_process) as display:
        return _Run(objective, accelerator, display, start).train()


class _Run:
    """One call of `train`."""

    def __init__(self, objective: Objective, accelerator: Any, display: Display, start: float) -> None:
        self.objective, self.settings = objective, objective.settings
        self.accelerator, self.display, self.start = accelerator, display, start
        self.main, self.device = accelerator.is_main_process, accelerator.device
        settings, rank, world = self.settings, accelerator.process_index, accelerator.num_processes
        self.pictures, self.validation = load_data(settings, self.device)
        validating = f", validating on {len(self.validation.names)}" if self.validation else ""
        display.say(f"training on {self.pictures.count}{validating}")
        self.draws = Draws(self.pictures, settings.crop, settings.seed, rank, world, settings.flip)
        self.progress = Progress()
        self.record = {k: v for k, v in _as_json(dataclasses.asdict(settings)).items() if k not in FREE}
        self.record |= {"pictures": self.pictures.fingerprint, "contents": self.pictures.contents, "processes": world}
        self.record |= {f"weights of the {k}": weights_fingerprint(v) for k, v in objective.frozen().items()}

        self.module, optimiser = self._prepare_module()
        self.average = Average(self.module, settings.ema)
        self.saved = self.exported = -1  # the steps of the last checkpoint and the last exported model
        self._resume(optimiser)
        if settings.compile:
            _load_compile_cache(settings.compile_cache, display.say)
            write_out_norms(self.module).compile(dynamic=False)
        self.forward, self.optimiser = accelerator.prepare(self.module, optimiser)

        self.seconds_before = self.progress.seconds
        # seconds that a step takes, and a save: before the first one, of weights, average and moments at 200 MB/s
        self.stepping, self.saving = 0.0, sum(p.numel() for p in self.module.parameters()) * 16 / 2e8
        self.guard = Guard(self.device)
        self.recent: deque[tuple[int, str]] = deque(maxlen=64)  # steps and what was in their batches
        self.log = Log(settings.out) if self.main else None

    def _prepare_module(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.objective.prepare(self.device)
        if self.objective.lpips is not None:
            self.objective.lpips.to(self.device)
        module = self.objective.module.to(self.device)
        module.train().requires_grad_(True)
        options: dict[str, Any] = {"weight_decay": self.settings.weight_decay}
        if self.device.type == "cuda":
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            options["fused"] = True
        rate, betas = self.settings.learning_rate, self.settings.betas
        return module, torch.optim.AdamW(module.parameters(), rate, betas, **options)

    # -- the loop --------------------------------------------------------------------------------------------

    def train(self) -> Progress:
        settings, progress = self.settings, self.progress
        first_step = progress.step
        self.first = self.last_log = (time.monotonic(), progress.step, self._share())
        last_export = self.first[0]
        share, stop = self._agree()
        while not stop:
            begun = time.monotonic()
            rate = settings.learning_rate * learning_rate_factor(settings, progress.step, share)
            terms = self._step(rate)
            self._check(wait=False)
            if self._due(settings.log_every) or progress.step == first_step + 1:
                self._log(terms, rate)
            if progress.step > first_step + 1:  # the first one may compile
                self.stepping = time.monotonic() - begun
            self._examine(self._due(settings.validate_every), self._due(settings.pictures_every))
            if self._due(settings.save_every):
                self._save()
            every = settings.export_every_minutes
            if every and time.monotonic() - last_export > 60 * every and self.main:
                self._export()
                last_export = time.monotonic()
            share, stop = self._agree()

        self._check(wait=True)
        self._save()
        if settings.compile and self.main:
            _save_compile_cache(settings.compile_cache)
        wants_pictures = settings.pictures_every > 0 and not self._due(settings.pictures_every)
        self._examine(not self._due(settings.validate_every), wants_pictures)
        if self.log is not None:
            self.log.close()
        minutes = (time.monotonic() - self.start) / 60
        where = settings.out / self.objective.folder
        self.display.say(f"stopped at step {progress.step} after {minutes:.1f} minutes; model in {where}")
        return progress

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _step(self, rate: float) -> dict[str, Tensor]:
        """One optimiser step. If the loss or the gradient is not finite, the weights stay as they are."""
        settings, accelerator, optimiser = self.settings, self.accelerator, self.optimiser
        for group in optimiser.param_groups:
            group["lr"] = rate
        good = torch.ones((), dtype=torch.bool, device=self.device)
        terms: dict[str, Tensor] = {}
        for _ in range(settings.accumulate):
            with accelerator.accumulate(self.forward), accelerator.autocast():
                terms = self.objective.losses(self.forward, self.draws, settings.batch_size, self.progress.step)
                good = good & terms["loss"].detach().isfinite()
                accelerator.backward(terms["loss"])
                if accelerator.sync_gradients:
                    terms["gradient"] = accelerator.clip_grad_norm_(self.forward.parameters(), settings.clip)
                    # a loss scale that is too large is no failure; its own scaler skips that step
                    if accelerator.scaler is None:
                        good = good & terms["gradient"].isfinite()
                        if self.device.type == "cuda":  # the fused step then does nothing
                            optimiser.optimizer.found_inf = (~good).float()
                        elif not bool(good):
                            optimiser.zero_grad()  # without gradients nothing is updated
                optimiser.step()
                optimiser.zero_grad()
        self.progress.step += 1
        self.recent.append((self.progress.step, self.objective.describe_batch()))
        self.guard.look(good, self.progress.step)
        self.average.update(self.progress.step)
        return terms

    def _check(self, wait: bool) -> None:
        """Stop a run whose loss is not finite, with the state before that step."""
        if self.accelerator.num_processes > 1:
            if not wait:  # saving takes all processes, so that they must learn of it together
                return
            self.guard.first = self.accelerator.gather(self.guard.first.view(1)).max()
        failed = self.guard.failed(wait)
        if failed is None:
            return
        batch = next((text for step, text in self.recent if step == failed), "")
        self.progress.seconds = self.seconds_before + time.monotonic() - self.start
        where = self.settings.out / "not-finite"
        self._write(where)
        raise UserError(
            f"the loss is not finite at step {failed}" + (f" ({batch})" if batch else "") + "; the weights "
            f"before it are saved in {where}, and the checkpoints are as they were; lower --learning-rate or "
            "look at that batch"
        )

    def _log(self, terms: dict[str, Tensor], rate: float) -> None:
        self._check(wait=True)
        values = torch.stack([v.detach().float() for v in terms.values()])
        figures = dict(zip(terms, self.accelerator.reduce(values, "mean").tolist(), strict=True))
        now, step, share = time.monotonic(), self.progress.step, self._share()
        pictures = self.settings.batch_size * self.settings.accumulate * self.accelerator.num_processes
        speed = (step - self.last_log[1]) * pictures / max(now - self.last_log[0], 1e-9)
        self.last_log = (now, step, share)
        figures |= {"step": step, "rate": rate, "images_per_second": speed}
        self.progress.history.append(figures)
        left = (now - self.first[0]) * (1 - share) / max(share - self.first[2], 1e-9)
        self.display.progress(figures, share, left)
        if self.log is not None:
            self.log.write(figures)

    # -- time ------------------------------------------------------------------------------------------------

    def _share(self) -> float:
        """The share of the whole run that is done."""
        if self.settings.total_minutes is not None:
            seconds = self.seconds_before + time.monotonic() - self.start
            return seconds / (60 * self.settings.total_minutes)
        return self.progress.step / self.settings.steps

    def _agree(self) -> tuple[float, bool]:
        """The share that is done and whether to stop, the same on all processes: their clocks differ."""
        share, minutes = self._share(), self.settings.minutes
        # another step, and the save after it, must be in time as well
        end = time.monotonic() - self.start + self.stepping + 1.5 * self.saving
        late = minutes is not None and end > 60 * minutes
        stop = share >= 1 or late
        if self.accelerator.num_processes == 1:
            return share, stop
        own = [share if self.main else 0.0, float(stop)]
        own_values = torch.tensor(own, dtype=torch.float64, device=self.device)
        share, stops = self.accelerator.reduce(own_values, "sum").tolist()
        return share, stops > 0

    # -- states ----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        begun = time.monotonic()
        self._check(wait=True)
        self.progress.seconds = self.seconds_before + begun - self.start
        step = self.progress.step
        if self.settings.checkpoints and self.saved != step:
            self._write(self.settings.out / "checkpoints")
            self.saved = step
        if self.main and self.exported != step:
            self._export()
        self.accelerator.wait_for_everyone()
        self.saving = time.monotonic() - begun

    def _export(self) -> None:
        objective, settings = self.objective, self.settings
        out, how = settings.out / objective.folder, (settings.export_dtype, settings.shard_mb)
        save_model(objective.model, out, self.average.state, objective.remarks(), *how)
        self.exported = self.progress.step

    def _write(self, folder: Path) -> None:
        """Write the full state. Each process has its own pictures in its batch; the main one writes them all."""
        kept = {k: self.accelerator.gather(v) for k, v in self.objective.tensors().items()}
        position = torch.tensor([self.draws.position], device=self.device)
        positions = self.accelerator.gather(position).tolist()
        if not self.main:
            return
        moments = {}
        for i, parameter in enumerate(self.module.parameters()):
            for key, value in self.optimiser.state[parameter].items():
                moments[f"{i}.{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        tensors = {"weights": self.module.state_dict(), "average": self.average.state, "optimiser": moments}
        if kept:
            tensors["objective"] = kept
        record = {
            "step": self.progress.step,
            "seconds": self.progress.seconds,
            "position": positions[0],
            "positions": positions,
            "settings": self.record,
            "model": {
                "class": type(self.objective.model).__name__,
                "folder": self.objective.folder,
                "remarks": self.objective.remarks(),
            },
        }
        write_checkpoint(folder, f"step-{self.progress.step:08d}", tensors, record, self.settings.keep)

    def _resume(self, optimiser: torch.optim.Optimizer) -> None:
        settings, say = self.settings, self.display.say
        found = read_latest(settings.out / "checkpoints", say) if settings.resume else None
        if found is None:
            return
        path, (tensors, record) = found
        self._compare(record["settings"])
        for part in ("weights", "average"):
            shapes = {name: tensor.shape for name, tensor in tensors[part].items()}
            check_fit(self.module, shapes, path / f"{part}.safetensors")
        self.module.load_state_dict(tensors["weights"])
        self.average.state = {k: v.float().to(self.device) for k, v in tensors["average"].items()}
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        try:
            load_moments(optimiser, list(self.module.parameters()), tensors["optimiser"], self.device)
            self.draws.position = record.get("positions", [record.get("position")] * world)[rank]
            kept = {k: v.chunk(world)[rank].to(self.device) for k, v in tensors.get("objective", {}).items()}
            self.objective.restore(kept, self.draws)
        except (KeyError, IndexError, ValueError, TypeError, RuntimeError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"the checkpoint {path} does not fit this run ({reason}); write the name of an older one into "
                f"{path.parent / 'latest'}, or begin again with --no-resume"
            ) from None
        self.progress.step, self.progress.seconds = record["step"], record["seconds"]
        self.saved = self.progress.step
        say(f"resumed from {path} at step {self.progress.step}")

    def _compare(self, then: dict[str, Any]) -> None:
        """Refuse to resume with other settings or pictures. An option that did not exist then counts as its default."""
        now, settings, missing = self.record, self.settings, dataclasses.MISSING
        options = {f.name: f.default for f in dataclasses.fields(settings)}
        defaults = _as_json({k: v for k, v in options.items() if v is not missing})
        if lacking := list((options.keys() & now.keys()) - defaults.keys() - then.keys()):
            raise UserError(f"{settings.out} is another kind of run: it has no --{lacking[0]}. Give another --out")
        then = {k: then.get(k, defaults.get(k, value)) for k, value in now.items()}
        different = {k: f"{k} was {then[k]!r} and is {now[k]!r}" for k in sorted(now) if now[k] != then[k]}
        data = [different.pop(k) for k in ("pictures", "contents") if k in different]
        if different:
            changes, advice = "; ".join(different.values()), "or another --out (with --init to start from its model)"
            raise UserError(f"{settings.out} was trained with other settings: {changes}. Use the same, {advice}")
        if data and not settings.accept_data:
            raise UserError(
                f"the training pictures have changed since the checkpoint in {settings.out} ({'; '.join(data)}); give the "
                "same ones, or continue with these with --accept-data"
            )
        if data:
            self.display.say(f"continuing with other training pictures ({'; '.join(data)})")

    # -- validation ------------------------------------------------------------------------------------------

    def _examine(self, validate: bool, pictures: bool) -> None:
        """Metrics and example pictures of the averaged weights; the weights in training are put back."""
        if not (validate or pictures):
            return
        if self.log is not None:
            module = self.module
            current = {k: v.clone() for k, v in module.state_dict().items()}
            module.load_state_dict({k: v.to(current[k].dtype) for k, v in self.average.state.items()})
            module.eval()
            # a compiled network would be compiled again for other batches
            eager = torch.compiler.set_stance("force_eager")
            kind = self.device.type
            with eager, torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                if validate and self.validation is not None:
                    self._validate(self.validation, self.log)
                if pictures:
                    held = self.validation or self.pictures
                    crops, names = next(centre_crops(held, self.settings.crop, _GRID_ROWS, _GRID_ROWS))
                    self.log.write_pictures(self.progress.step, self.objective.pictures(crops, names))
            module.load_state_dict(current)
            module.train()
        self.accelerator.wait_for_everyone()

    def _validate(self, validation: Pictures, log: Log) -> None:
        step, totals = self.progress.step, dict[str, list[float]]()
        for crops, names in centre_crops(validation, self.settings.crop, self.settings.batch_size):
            for key, values in self.objective.validate(crops, names).items():
                totals.setdefault(key, []).extend(values)
        means = {key: sum(values) / len(values) for key, values in totals.items()}
        shown = "  ".join(f"{key} {value:.4g}" for key, value in means.items())
        self.display.say(f"step {step} validation on {len(validation.names)}: {shown}")
        figures = {"step": step} | {f"validation/{key}": value for key, value in means.items()}
        log.write(figures)
        self.progress.history.append(figures)


def _as_json(record: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(record, default=str)))


def load_moments(
    optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], moments: dict[str, Tensor], device: torch.device
) -> None:
    """Put the moments of a checkpoint into the optimiser; ValueError if they are not those of its parameters."""
    # moments must have the memory layout of their parameter; a fused optimiser counts steps on the device
    counter = device if optimiser.defaults.get("fused") else torch.device("cpu")
    for key, value in moments.items():
        index, _, name = key.partition(".")
        parameter = parameters[int(index)] if index.isdecimal() and int(index) < len(parameters) else None
        if parameter is None or name not in ("step", "exp_avg", "exp_avg_sq"):
            raise ValueError(f"the optimiser has no moment {key}")
        if value.shape != (parameter.shape if name != "step" else ()):
            raise ValueError(f"the moment {key} has the shape {tuple(value.shape)}")
        moment = torch.empty_like(parameter).copy_(value) if name != "step" else value.float().to(counter)
        optimiser.state[parameter][name] = moment
    if any(len(state) != 3 for state in optimiser.state.values()):
        raise ValueError("a parameter lacks a moment")


def _load_compile_cache(path: Path | None, say: Callable[[str], None]) -> None:
    if path is not None and path.is_file():
        torch.compiler.load_cache_artifacts(path.read_bytes())
        say(f"compiled kernels loaded from {path}")


def _save_compile_cache(path: Path | None) -> None:
    artifacts = torch.compiler.save_cache_artifacts() if path is not None else None
    if path is not None and artifacts is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(artifacts[0])
