"""ddc reproduce: the experiments of the paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional

from ddc.cli.evaluate import MeasuringOptions

Tables = Literal["table1", "table2", "table3", "table4", "table5", "table6"]
Name = Literal[Tables, "figure2", "figure5", "figure7", "figure8", "unseen"]


@dataclass(frozen=True)
class Reproduce(MeasuringOptions):
    """Reproduce a table or a figure of the paper; the report shows the paper's figures next to ours. "unseen" measures
    operators that no network was trained on.

    Rows that are already in the --out folder are not measured again. For several devices, use accelerate launch.
    """

    urls: ClassVar = ("images",)  # options that may be URLs

    name: Positional[Name]
    """The table or figure."""
    images: Path | None = None
    """A folder or a .tar archive of clean pictures, or the URL of one. Default: four photographs from scikit-image."""
    out: Path | None = None
    """The folder of the run. Default: runs/NAME, or runs/NAME-quick."""
    model: Path | None = None
    """The folder of the main model. Default: the shipped model."""
    models: str = ""
    """Other models of the experiment: DIR:name=no-lpips,DIR2:name=faces. The report says which are missing."""
    quick: bool = False
    """A quick version for a CPU: two small pictures, short runs, a few minutes."""
    size: int | None = None
    """Height and width of the centre that is measured. Default: 256, or 128 in the quick version."""

    def run(self) -> int:
        out = self.out or Path("runs") / (self.name + ("-quick" if self.quick else ""))
        options = self.options(out)
        from ddc.datasets import load_images
        from ddc.evaluation.benchmark import parse_models
        from ddc.evaluation.experiments import EXPERIMENTS, Reproduction, bundled_images, find_variants, reproduce
        from ddc.evaluation.run import recorded_models
        from ddc.pipeline import DEFAULT_MODEL

        size = (128 if self.quick else 256) if self.size is None else self.size
        limit = 2 if self.quick and self.limit is None else self.limit
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
        plan = Reproduction(self.name, images, images_name, given, options, self.quick, self.max_nfe, self.report)
        for line in reproduce(plan):
            print(line)
        return 0
