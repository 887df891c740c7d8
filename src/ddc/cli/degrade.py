"""`ddc degrade`: make the measurement of a task from clean pictures."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from ddc.cli.files import FileOptions, explained, kernel_in_order, progress_bar, shown
from ddc.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Degrade(FileOptions):
    """Degrade clean pictures. Inpainting tasks write their mask into the alpha channel. Files in .npy format
    (--ext npy) keep values below black and above white, which other formats clip."""

    task: str = "sr4"
    """How to degrade the pictures: sr4, gauss, disc, motion, blur, inpaint92, box, strokes, jpeg10, denoise."""
    sigma: float = 0.0
    """Standard deviation of the noise to add, for pixels in [0, 1], for example 0.05."""
    mask: Annotated[Path | None, shown("FILE")] = None
    """A mask for inpainting, of the same size as the picture: white is kept, black becomes a hole."""
    kernel: Annotated[Path | None, shown("FILE")] = None
    """The kernel of the task blur: a picture or a 2-D .npy array. It is convolved with the picture, so it is the image
    of a point of light."""
    correlation: bool = False
    """The kernel is that of a correlation, as for OpenCV's filter2D; it is rotated by 180°."""
    operator: Annotated[str | None, shown("FILE.py:CLASS")] = None
    """Your own operator, a class in a Python file; it replaces --task."""
    seed: int = 0
    """Seed of masks and noise, together with each file's name."""

    def run(self) -> int:
        from ddc.degrade import degrade
        from ddc.images import KEEPS_ALPHA, check_writable
        from ddc.problems import Task, check_sigma
        from ddc.telling import noting

        report = self.plan(default_ext="png")
        check_sigma(self.sigma)
        task = Task.parse("custom" if self.operator is not None else self.task)
        if task.family == "inpaint":
            for item in report.items:
                if check_writable(item.target) not in KEEPS_ALPHA:
                    raise UserError(f"{item.target.name} cannot hold the mask in an alpha channel; use --ext png")
        kernel = kernel_in_order(self.kernel, self.correlation)
        if not report.items:
            return report.exit_code()
        with report, progress_bar(self.task, len(report.items)) as show:
            for item, picture in report.pictures():
                given = (item.source.name, self.mask, kernel, self.operator)
                floating = item.target.suffix.lower() == ".npy"
                try:
                    with noting(report.notes[item], report.told):
                        measured = degrade(picture, task, self.sigma, self.seed, *given, floating=floating)
                except Exception as error:
                    report.failed(item.source, explained(error, item.source))
                    continue
                height, width = measured.size
                facts = {"task": task.name, "sigma": self.sigma, "seed": self.seed, "width": width, "height": height}
                report.write(item, facts, partial(measured.write, item.target))
                report.settle(1)
                if show:
                    show(report.begun)
            report.settle()
        return report.exit_code()
