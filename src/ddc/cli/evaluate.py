"""ddc evaluate: measure solvers on a folder of pictures."""

import sys
from dataclasses import dataclass
from pathlib import Path

from ddc.cli.measuring import MeasuringOptions


@dataclass(frozen=True)
class Evaluate(MeasuringOptions):
    """Measure solvers on pictures: rows for each image, and a report with tables, plots and pictures.

    What is measured already in the --out folder is not measured again. Several devices: accelerate launch.
    """

    images: Path
    """A folder or a .tar archive of clean pictures; their centres are measured."""
    out: Path
    """The folder of the run: rows, results.json and report.html."""
    model: str = ""
    """Model folders, separated by commas, each with a name if you like (ours=DIR). Empty: the one shipped."""
    solver: str = "ddc"
    """Solvers, separated by commas, with settings if you like: ddc,ddnm,pigdm:noise_blind=true."""
    task: str = "sr4"
    """Tasks, separated by commas, with a noise of their own if you like: sr4,gauss,jpeg10:sigma=0."""
    sigma: str = "0.05"
    """Noise of the measurements in [0, 1] units, separated by commas: 0,0.05."""
    steps: str = ""
    """Sampling steps, separated by commas; empty takes each solver's own."""
    size: int = 256
    """Height and width of the centre that is measured."""
    samples: int = 1
    """Restorations of each measurement, for the spread between them."""

    def run(self) -> int:
        import os

        options = self.options(self.out, self.samples)
        from ddc.evaluation.benchmark import (
            Models,
            evaluate,
            load_images,
            make_cases,
            number,
            recorded_models,
            slow_note,
        )
        from ddc.evaluation.report import Page, write_report

        models = Models(parse_models(self.model), recorded=recorded_models(self.out))
        sigmas = [number(text, "sigma") for text in split(self.sigma)]
        steps = [int(number(text, "steps")) for text in split(self.steps)]
        cases = make_cases(models, split(self.task), sigmas, split(self.solver), steps, self.max_nfe)
        images = load_images(self.images, self.size, self.limit)
        protocol = {"images": self.images.name, "count": len(images), "max_nfe": self.max_nfe}
        outcome = evaluate(cases, images, models, options, protocol)
        if int(os.environ.get("RANK", 0)):
            return 0
        if outcome.left:
            print(outcome)
        for left_out in outcome.skipped:
            print(f"ddc: left out {left_out}", file=sys.stderr)
        if self.report and outcome.rows:
            notes = [str(outcome)] if outcome.left else []
            notes += [*slow_note(cases, images, options), *outcome.skipped]
            print(write_report(self.out, Page(title=f"Evaluation on {self.images.name}", notes=notes)))
        else:
            print(f"{outcome.rows} rows are in {self.out}")
        return 0


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_models(text: str) -> dict[str, Path]:
    """ "a=DIR1,DIR2" → names and folders; a folder without a name is called as itself."""
    from ddc.errors import UserError
    from ddc.pipeline import DEFAULT_MODEL

    folders: dict[str, Path] = {}
    for part in split(text) or [f"default={DEFAULT_MODEL}"]:
        name, found, folder = part.partition("=")
        path = Path(folder if found else name)
        label = name if found else path.resolve().name
        if label in folders:
            raise UserError(f"two models are called {label}; give them names: first=DIR,second=DIR")
        folders[label] = path
    return folders
