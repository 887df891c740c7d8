"""`ddc export`: the model of a training run, as a folder to share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Export:
    """Write the model (averaged weights) of a run's latest checkpoint; the run may still be training."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The --out folder of `ddc train`."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder of the model; replaced if it exists."""
    dtype: Literal["fp32", "fp16"] = "fp32"
    """Data type of the weights."""
    shard_mb: float | None = None
    """Maximum size of a safetensors file, in megabytes."""

    def run(self) -> int:
        from ddc.training.output import export_run

        step = export_run(self.run_folder, self.out, self.dtype, self.shard_mb)
        print(f"{self.out}: the model of step {step}")
        return 0
