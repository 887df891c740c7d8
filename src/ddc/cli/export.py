"""`ddc export`: the model of a training run, as a folder to share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Export:
    """Write the inference model (averaged weights) of a run's latest checkpoint, at any time of its training."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The --out folder of `ddc train`."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The model's folder; one that is there is replaced."""
    dtype: Literal["fp32", "fp16"] = "fp32"
    """Number format of the weights."""
    shard_mb: float | None = None
    """Largest safetensors file, in megabytes."""

    def run(self) -> int:
        import torch

        from ddc.training.export import export_run

        dtype = torch.float16 if self.dtype == "fp16" else torch.float32
        step = export_run(self.run_folder, self.out, dtype, self.shard_mb)
        print(f"{self.out}: the model of step {step}")
        return 0
