"""ddc evaluate: measure solvers on a folder of pictures. Also the options that it shares with `reproduce`."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from ddc.cli.files import RayOptions
from ddc.errors import UserError
from ddc.storage import mirrored

if TYPE_CHECKING:
    from ddc.evaluation.benchmark import EvaluationOptions

# options whose texts say what happens if they are left out
N = tyro.conf.arg(metavar="N", help_behavior_hint="")
MINUTES = tyro.conf.arg(metavar="MINUTES", help_behavior_hint="")
FILE = tyro.conf.arg(metavar="FILE", help_behavior_hint="")


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """How to measure."""

    limit: Annotated[int | None, N] = None
    """Measure this many pictures, evenly spread over all. Default: all."""
    slow_limit: Annotated[int | None, N] = None
    """Measure solvers of more than 200 network evaluations on this many pictures only."""
    max_nfe: Annotated[int | None, N] = None
    """Shorten every solver to at most this many network evaluations."""
    batch_size: int = 1
    """Pictures restored at once."""
    seed: int = 0
    """Masks, measurement noise and sampling noise depend on this seed and on each image's name."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Arithmetic of the networks; bf16 and fp16 need a CUDA device."""
    keep: int = 4
    """Pictures of each method that the report may show, in addition to the worst ones."""
    compile: bool = False
    """Compile the networks for the batch size (CUDA): takes minutes at the start, then runs faster."""
    minutes: Annotated[float | None, MINUTES] = None
    """Start no batch that would end later than this; 0 measures nothing. Run the same command again to continue."""
    report: bool = True
    """Write the report. Without it the measuring computer needs neither matplotlib nor jinja2: copy the --out
    folder and run the same command elsewhere."""
    vgg16: Annotated[Path | None, FILE] = None
    """VGG16's weights for LPIPS-VGG16 and FD-VGG16, vgg16.safetensors. Default: from the cache, or downloaded."""
    fid: bool = False
    """Measure FID, to the true pictures. The Inception weights are downloaded once (87 MB)."""
    fid_reference: Annotated[Path | None, FILE] = None
    """A folder or archive of other photographs: FID is also measured against these, as papers do."""
    faces: bool = False
    """Measure whether faces stay the same person: the distance of their embeddings (identity). It needs the extra `faces`;
    dlib's networks are downloaded once (100 MB)."""
    fid_inception: Annotated[Path | None, FILE] = None
    """The standard Inception weights, pt_inception-2015-12-05-6726825d.pth; FID is measured if they are found."""

    def options(self, out: Path, samples: int = 1) -> "EvaluationOptions":
        """Check the options; the time of --minutes starts here."""
        started = time.monotonic()
        positive = {
            "batch-size": self.batch_size,
            "samples": samples,
            "slow-limit": self.slow_limit,
            "max-nfe": self.max_nfe,
        }
        for name, value in positive.items():
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}; expected 1 or more")
        if self.keep < 0:
            raise UserError(f"--keep is {self.keep}; expected 0 or more")
        if self.minutes is not None and not self.minutes >= 0:
            raise UserError(f"--minutes is {self.minutes}; expected 0 or more")
        weights = {
            "vgg16": (self.vgg16, "VGG16's weights, vgg16.safetensors"),
            "fid-inception": (self.fid_inception, "the Inception weights, pt_inception-2015-12-05-6726825d.pth"),
        }
        for name, (path, expected) in weights.items():
            if path is not None and not path.is_file():
                raise UserError(f"{path} is not a file; expected {expected} (--{name})")
        if self.fid_reference is not None and not self.fid_reference.exists():
            raise UserError(f"{self.fid_reference} does not exist; expected other photographs (--fid-reference)")
        from ddc.evaluation.benchmark import EvaluationOptions

        if self.report:
            from ddc.evaluation.report import check_packages

            check_packages()
        if self.faces:
            from ddc.faces import fetch_face_models

            fetch_face_models()
        if self.vgg16 is not None:
            from ddc.perceptual import VGG_VARIABLE

            os.environ[VGG_VARIABLE] = str(self.vgg16)
        return EvaluationOptions(
            out,
            self.batch_size,
            self.seed,
            self.device,
            self.precision,
            samples,
            keep=self.keep,
            fid=self.fid,
            inception=self.fid_inception,
            reference=self.fid_reference,
            slow_limit=self.slow_limit,
            deadline=None if self.minutes is None else started + 60 * self.minutes,
            compile=self.compile,
        )


@dataclass(frozen=True)
class Evaluate(RayOptions, MeasuringOptions):
    """Measure solvers on pictures: rows for each image, and a report with tables, plots and pictures.

    Rows that are already in the --out folder are not measured again. For several devices, use --ray or accelerate launch.
    """

    urls: ClassVar = ("images", "out")  # options that may be URLs

    images: Path
    """A folder or a .tar archive of clean pictures, or the URL of one; their centres are measured."""
    out: Path
    """The folder of the run, or its URL: rows, results.json and report.html."""
    model: str = ""
    """Model folders, separated by commas, each with an optional name: DIR:name=ours,DIR2. Default: the shipped model."""
    solver: str = "ddc"
    """Solvers, separated by commas, with optional settings: ddc,ddnm:steps=50,pigdm:noise_blind=true."""
    task: str = "sr4"
    """Tasks, separated by commas, with an optional noise level of their own: sr4,gauss,jpeg10:sigma=0."""
    sigma: str = "0.05"
    """Noise of the measurements in [0, 1] units, separated by commas: 0,0.05."""
    steps: str = ""
    """Sampling steps, separated by commas. Default: those of each solver."""
    size: int = 256
    """Height and width of the centre that is measured."""
    samples: int = 1
    """Restorations of each measurement, for the spread between them."""

    def run(self) -> int:
        with mirrored(self.out, "*.json*") as out:
            return self._measure(out)

    def _measure(self, out: Path) -> int:
        options = self.options(out, self.samples)
        from ddc.datasets import load_images
        from ddc.evaluation.benchmark import Models, evaluate, parse_cases, parse_models

        models = Models(parse_models(self.model), out=out)
        cases = parse_cases(models, self.task, self.sigma, self.solver, self.steps, self.max_nfe)
        images = load_images(self.images, self.size, self.limit)
        protocol = {"images": self.images.name, "count": len(images), "max_nfe": self.max_nfe}
        if self.ray is not None:
            from ddc.fleet import evaluate_with

            result = evaluate_with(self, cases, images, models, options, protocol)
        else:
            result = evaluate(cases, images, models, options, protocol)
        if result.rank:
            return 0
        if result.left:
            print(result.unfinished)
        for reason in result.skipped:
            print(f"ddc: skipped {reason}", file=sys.stderr)
        if self.report and result.rows:
            from ddc.evaluation.report import ReportPage, write_report

            page = write_report(out, ReportPage(f"Evaluation on {self.images.name}", result.notes))
            print(self.out / page.relative_to(out))
        else:
            print(f"{result.rows} rows are in {self.out}")
        return 0
