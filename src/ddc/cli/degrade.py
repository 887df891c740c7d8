"""`ddc degrade`: make the measurement of a task from clean pictures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ddc.cli.files import FileOptions, Report, progress_bar, shown
from ddc.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Degrade(FileOptions):
    """Degrade clean pictures. Inpainting tasks write their mask into the alpha channel. Files in .npy format
    (--ext npy) keep values below black and above white, which other formats clip."""

    task: str = "sr4"
    """How to degrade the pictures: sr4, gauss, disc, motion, blur, inpaint92, box, strokes, jpeg10, denoise, colorize."""
    sigma: float = 0.0
    """Standard deviation of the noise to add, for pixels in [0, 1], for example 0.05."""
    mask: Annotated[Path | None, shown("FILE")] = None
    """A mask for inpainting, of the same size as the picture: white is kept, black becomes a hole."""
    kernel: Annotated[Path | None, shown("FILE")] = None
    """The kernel of the task blur: a picture or a 2-D .npy array."""
    operator: Annotated[str | None, shown("FILE.py:CLASS")] = None
    """Your own operator, a class in a Python file; it replaces --task."""
    seed: int = 0
    """Seed of masks and noise, together with each file's name."""

    def run(self) -> int:
        from ddc.degrade import degrade
        from ddc.images import KEEPS_ALPHA, Picture, check_writable
        from ddc.problems import Task, check_sigma

        items = self.items(default_ext="png")
        check_sigma(self.sigma)
        task = Task.parse("custom" if self.operator is not None else self.task)
        if task.family == "inpaint":
            for item in items:
                if check_writable(item.target) not in KEEPS_ALPHA:
                    raise UserError(f"{item.target.name} cannot hold the mask in an alpha channel; use --ext png")
        if not items:
            return 0
        report = Report(self, len(items))
        with progress_bar(report, self.task) as show:
            for index, item in enumerate(items):
                try:
                    measured = degrade(
                        Picture.read(item.source),
                        task,
                        self.sigma,
                        self.seed,
                        item.source.name,
                        self.mask,
                        self.kernel,
                        self.operator,
                        floating=item.target.suffix.lower() == ".npy",
                    )
                    measured.write(item.target)
                except UserError as error:
                    report.failed(item, error)
                else:
                    height, width = measured.size
                    facts = {"task": task.name, "sigma": self.sigma, "seed": self.seed}
                    report.finished(item, facts | {"width": width, "height": height})
                if show:
                    show(index + 1)
        return report.exit_code()
