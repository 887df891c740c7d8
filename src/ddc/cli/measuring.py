"""What `evaluate` and `reproduce` share: how to measure."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ddc.cli.files import shown
from ddc.errors import UserError

if TYPE_CHECKING:
    from ddc.evaluation.benchmark import Options


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """How to measure."""

    limit: Annotated[int | None, shown("N")] = None
    """Measure this many pictures, evenly spread over all."""
    slow_limit: Annotated[int | None, shown("N")] = None
    """Measure solvers of more than 200 network evaluations on this many pictures only."""
    max_nfe: Annotated[int | None, shown("N")] = None
    """Shorten every solver to at most this many network evaluations."""
    batch_size: int = 1
    """Pictures restored at once."""
    seed: int = 0
    """Decides masks, measurement noise and sampling noise, together with each image's name."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the networks."""
    keep: int = 4
    """Pictures of each method that the report may show, beside the worst ones."""
    compile: bool = False
    """Compile the networks for the batch size (CUDA): minutes at the start, then faster."""
    minutes: Annotated[float | None, shown("MINUTES")] = None
    """Start no batch that would end later than this; 0 measures nothing. The same command goes on later."""
    report: bool = True
    """Write the report. Without it the measuring computer needs neither matplotlib nor jinja2: copy the --out
    folder and run the same command elsewhere."""
    vgg16: Annotated[Path | None, shown("FILE")] = None
    """VGG16's weights for LPIPS-VGG16 and FD-VGG16, vgg16.safetensors; none takes them from the cache, or
    downloads them."""
    fid_inception: Annotated[Path | None, shown("FILE")] = None
    """The standard Inception weights, pt_inception-2015-12-05-6726825d.pth; FID is measured where they are."""

    def options(self, out: Path, samples: int = 1) -> "Options":
        """Refuses what is missing; the clock of --minutes starts here."""
        started = time.monotonic()
        for name, value in {
            "batch-size": self.batch_size,
            "samples": samples,
            "slow-limit": self.slow_limit,
        }.items():
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}; expected 1 or more")
        from ddc.evaluation.benchmark import Options
        from ddc.evaluation.inception import find_inception
        from ddc.evaluation.report import check_packages

        if self.report:
            check_packages()
        use_vgg16(self.vgg16)
        return Options(
            out,
            self.batch_size,
            self.seed,
            self.device,
            self.precision,
            samples,
            keep=self.keep,
            inception=find_inception(self.fid_inception),
            slow_limit=self.slow_limit,
            deadline=None if self.minutes is None else started + 60 * self.minutes,
            compile=self.compile,
        )


def use_vgg16(path: Path | None) -> None:
    """Have LPIPS read VGG16 from a file."""
    if path is not None:
        from ddc.perceptual import VGG_VARIABLE

        if not path.is_file():
            raise UserError(f"{path} is not a file; expected VGG16's weights, vgg16.safetensors (--vgg16)")
        os.environ[VGG_VARIABLE] = str(path)
