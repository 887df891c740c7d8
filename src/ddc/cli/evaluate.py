"""ddc evaluate: measure solvers on a folder of pictures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Evaluate:
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
    """Tasks, separated by commas: sr4,gauss,inpaint92,jpeg10."""
    sigma: str = "0.05"
    """Noise of the measurements in [0, 1] units, separated by commas: 0,0.05."""
    steps: str = ""
    """Sampling steps, separated by commas; empty takes each solver's own."""
    limit: int | None = None
    """Measure this many pictures, evenly spread over all."""
    max_nfe: int | None = None
    """Shorten every solver to at most this many network evaluations."""
    batch_size: int = 1
    """Pictures restored at once."""
    size: int = 256
    """Height and width of the centre that is measured."""
    samples: int = 1
    """Restorations of each measurement, for the spread between them."""
    seed: int = 0
    """Decides masks, measurement noise and sampling noise, together with each image's name."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the networks."""
    fid_inception: Path | None = None
    """The standard Inception weights, pt_inception-2015-12-05-6726825d.pth; FID is measured where they are."""

    def run(self) -> int:
        import os

        from ddc.evaluation.benchmark import Models, Options, evaluate, load_images, make_cases
        from ddc.evaluation.inception import find_inception
        from ddc.evaluation.report import Page, check_packages, write_report
        from ddc.pipeline import pick_device

        check_packages()
        device = str(pick_device(self.device))
        models = Models(parse_models(self.model), device)
        sigmas = [number(text, "sigma") for text in split(self.sigma)]
        steps = [int(number(text, "steps")) for text in split(self.steps)]
        cases = make_cases(models, split(self.task), sigmas, split(self.solver), steps, self.max_nfe)
        images = load_images(self.images, self.size, self.limit)
        options = Options(
            self.out,
            self.batch_size,
            self.seed,
            device,
            self.precision,
            self.samples,
            inception=find_inception(self.fid_inception),
        )
        protocol = {"images": self.images.name, "count": len(images), "max_nfe": self.max_nfe}
        skipped = evaluate(cases, images, models, options, protocol)
        if int(os.environ.get("RANK", 0)) == 0:
            print(write_report(self.out, Page(title=f"Evaluation on {self.images.name}", notes=skipped)))
        return 0


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def number(text: str, what: str) -> float:
    from ddc.errors import UserError

    try:
        return float(text)
    except ValueError:
        raise UserError(f"{what} is {text!r}; expected numbers separated by commas") from None


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
