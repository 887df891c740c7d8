"""How to train, whatever is trained. (Apart from the loop, so that the command line can show it quickly.)"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How to train, whatever is trained."""

    data: tuple[Path, ...]
    """Folders, tar archives, Parquet or Arrow files of a Hugging Face dataset, or pictures to train on."""
    out: Path
    """Folder of the run: checkpoints, logs and the exported model."""
    steps: int = 10_000
    """Optimiser steps; the end of the schedule unless --total-minutes is given."""
    minutes: float | None = None
    """Stop and save within this many minutes of this call."""
    total_minutes: float | None = None
    """Fit the schedule to this many minutes, summed over resumed calls, instead of --steps."""
    batch_size: int = 32
    """Pictures per process and forward pass."""
    accumulate: int = 1
    """Forward passes per optimiser step."""
    crop: int = 256
    """Side of the square training crops."""
    flip: bool = True
    """Mirror half of the crops."""
    stream: Literal["auto", "on", "off"] = "auto"
    """Decode pictures when they are needed, instead of once; auto does where they do not fit."""
    workers: int = 8
    """Threads that decode pictures."""
    memory_share: float = 0.3
    """Share of the device's memory that decoded pictures may take, with --stream auto."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "constant", "decay"] = "cosine"
    """Learning rate: cosine to zero, constant, or constant with a final linear decay."""
    decay_share: float = 0.3
    """With --schedule decay: the last share of the run in which the rate falls to zero."""
    warmup: int = 200
    """Optimiser steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's moment decays."""
    weight_decay: float = 1e-6
    """AdamW's weight decay."""
    clip: float = 1.0
    """Largest gradient norm."""
    ema: float = 0.9999
    """Decay of the averaged weights that are exported; warmed up as (1 + n)/(10 + n)."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the networks; auto is bf16 on CUDA and fp32 elsewhere."""
    compile: bool = False
    """Compile the networks (CUDA; costs one to three minutes at the start)."""
    compile_cache: Path | None = None
    """File that keeps compiled kernels between calls."""
    seed: int = 0
    """Seed of everything random."""
    resume: bool = True
    """Go on from the latest checkpoint of --out, if there is one; --no-resume begins again."""
    init: Path | None = None
    """Start from the exported model in this folder, with its network; a checkpoint in --out goes before it."""
    save_every: int = 1000
    """Optimiser steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    export_every_minutes: float | None = None
    """Also write the exported model this often."""
    export_dtype: Literal["fp32", "fp16"] = "fp16"
    """Number format of the exported model."""
    shard_mb: float | None = None
    """Largest safetensors file of the exported model, in megabytes."""
    log_every: int = 50
    """Optimiser steps between log lines."""
    holdout: int = 0
    """Keep files whose number divides by this out of training, for validation; 0 keeps none."""
    validation: Path | None = None
    """Validation pictures, instead of --holdout."""
    validate_every: int = 0
    """Optimiser steps between validations; 0 only at the end."""
    validation_limit: int = 64
    """Most pictures to validate on."""
    pictures_every: int = 1000
    """Optimiser steps between grids of pictures to look at; 0 makes none."""
    checkpoints: bool = True
    """Write full training states (off where only the exported model can be kept)."""
