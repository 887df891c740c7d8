"""ddc reproduce: the experiments of the paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from ddc.cli.measuring import MeasuringOptions

Name = Literal[
    "table1", "table2", "table3", "table4", "table5", "table6", "figure2", "figure5", "figure7", "figure8"
]


@dataclass(frozen=True)
class Reproduce(MeasuringOptions):
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
    size: int | None = None
    """Height and width of the centre that is measured; none is 256, or 128 in the quick form."""

    def run(self) -> int:
        out = self.out or Path("runs") / (self.name + ("-quick" if self.quick else ""))
        options = self.options(out)
        from ddc.cli.evaluate import parse_models
        from ddc.evaluation.benchmark import bundled_images, load_images, recorded_models
        from ddc.evaluation.experiments import EXPERIMENTS, Plan, find_variants, reproduce
        from ddc.pipeline import DEFAULT_MODEL

        size = self.size or (128 if self.quick else 256)
        limit = self.limit or (2 if self.quick else None)
        if self.images is None:
            images, images_name = bundled_images(size, limit), "scikit-image's pictures"
        else:
            images, images_name = load_images(self.images, size, limit), self.images.name
        main = self.model or DEFAULT_MODEL
        given = {"default": main} if main.is_dir() or self.model else {}
        given |= find_variants(EXPERIMENTS[self.name].models, main)
        given |= parse_models(self.models) if self.models else {}
        for name in recorded_models(out):  # measured elsewhere: its rows need no folder
            given.setdefault(name, main.parent / name)
        plan = Plan(self.name, images, images_name, given, options, self.quick, self.max_nfe, self.report)
        for line in reproduce(plan):
            print(line)
        return 0
