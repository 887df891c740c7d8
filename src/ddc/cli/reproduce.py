"""ddc reproduce: the experiments of the paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

Name = Literal[
    "table1", "table2", "table3", "table4", "table5", "table6", "figure2", "figure5", "figure7", "figure8"
]


@dataclass(frozen=True)
class Reproduce:
    """Run a table or a figure of the paper, with its own figures beside ours, as a page to read.

    What is measured already in the --out folder is not measured again. Several devices: accelerate launch.
    """

    name: Positional[Name]
    """The table or figure."""
    images: Path | None = None
    """A folder or a .tar archive of clean pictures; none takes the four that come with scikit-image."""
    out: Path | None = None
    """The folder of the run; none is runs/NAME, or runs/NAME-quick."""
    model: Path | None = None
    """The generalised model's folder; none is the one that comes with the package."""
    models: str = ""
    """The other models of the experiment: no-lpips=DIR,faces=DIR. The page says which it can use."""
    quick: bool = False
    """A form for two CPU cores and a few minutes: two small pictures, short runs."""
    limit: int | None = None
    """Measure this many pictures, evenly spread over all."""
    slow_limit: int | None = None
    """Measure solvers of more than 200 network evaluations on this many pictures only."""
    max_nfe: int | None = None
    """Shorten every solver to at most this many network evaluations."""
    batch_size: int = 1
    """Pictures restored at once."""
    size: int | None = None
    """Height and width of the centre that is measured; none is 256, or 128 in the quick form."""
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
    minutes: float | None = None
    """Start no batch that would end later than this; 0 measures nothing. The same command goes on later."""
    report: bool = True
    """Write the report. Without it the measuring computer needs neither matplotlib nor jinja2: copy the --out
    folder and run the same command elsewhere."""
    vgg16: Path | None = None
    """VGG16's weights for LPIPS-VGG16 and FD-VGG16, vgg16.safetensors; none takes them from the cache, or
    downloads them."""
    fid_inception: Path | None = None
    """The standard Inception weights, pt_inception-2015-12-05-6726825d.pth; FID is measured where they are."""

    def run(self) -> int:
        import time

        deadline = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        from ddc.cli.evaluate import parse_models, use_vgg16
        from ddc.evaluation.benchmark import Options, bundled_images, load_images, recorded_models
        from ddc.evaluation.experiments import EXPERIMENTS, Plan, reproduce
        from ddc.evaluation.inception import find_inception
        from ddc.evaluation.report import check_packages
        from ddc.pipeline import DEFAULT_MODEL

        if self.report:
            check_packages()
        use_vgg16(self.vgg16)
        size = self.size or (128 if self.quick else 256)
        limit = self.limit or (2 if self.quick else None)
        if self.images is None:
            images, images_name = bundled_images(size, limit), "scikit-image's pictures"
        else:
            images, images_name = load_images(self.images, size, limit), self.images.name
        main = self.model or DEFAULT_MODEL
        out = self.out or Path("runs") / (self.name + ("-quick" if self.quick else ""))
        given = {"default": main} if main.is_dir() or self.model else {}
        for name in EXPERIMENTS[self.name].models:  # the others may lie beside it, or be shipped
            for place in (DEFAULT_MODEL.parent / name, main.parent / name):
                if name != "default" and place.is_dir():
                    given[name] = place
        given |= parse_models(self.models) if self.models else {}
        for name in recorded_models(out):  # measured elsewhere: its rows need no folder
            given.setdefault(name, main.parent / name)
        options = Options(
            out,
            self.batch_size,
            self.seed,
            self.device,
            self.precision,
            keep=self.keep,
            inception=find_inception(self.fid_inception),
            slow_limit=self.slow_limit,
            deadline=deadline,
            compile=self.compile,
        )
        plan = Plan(self.name, images, images_name, given, options, self.quick, self.max_nfe, self.report)
        for line in reproduce(plan):
            print(line)
        return 0
