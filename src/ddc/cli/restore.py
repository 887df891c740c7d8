"""`ddc restore`: degraded pictures in, restored pictures out."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ddc.cli.files import (
    FileOptions,
    Item,
    RayOptions,
    Report,
    explained,
    kernel_in_order,
    progress_bar,
    shown,
)
from ddc.cli.writing import write_result
from ddc.errors import UserError
from ddc.formats import MAX_WEBP_SIDE, check_fits
from ddc.notation import duration

if TYPE_CHECKING:
    from ddc.images import Picture
    from ddc.jobs import Options
    from ddc.pipeline import RestorationPipeline, RestorationResult
    from ddc.telling import Forecast


BESIDE = Path("NAME_restored.png")  # beside the picture, where no other place is named
LARGEST_SCALE = 16  # of a task
LONG = 60  # seconds from which a quicker way is named


@dataclass(frozen=True, kw_only=True)
class Restore(RayOptions, FileOptions):
    """Restore pictures. `ddc restore bad.jpg` detects what is wrong, prints what it does and how long that takes, and
    writes bad_restored.png; a good picture is left unchanged. To enlarge a picture use --task sr4. To fill holes, make
    them transparent or give a --mask."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="OUT", help_behavior_hint="")] = BESIDE
    """The folder of the results, or the name of the result if IN is one picture; by default NAME_restored.png next
    to that picture."""
    task: Annotated[str, tyro.conf.arg(metavar="TASK")] = "auto"
    """What to undo: sr2 … sr16, deblur (the blur is estimated), disc3, gauss1.5, motion, blur, inpaint, jpeg (the
    quality is read from the file), jpeg10, denoise; `ddc info` lists all. auto detects what is
    wrong with each picture, and leaves a good one unchanged."""
    solver: Annotated[str | None, shown("SOLVER")] = None
    """The algorithm, with settings if needed, as in ddnm:eta=0.5; `ddc info` lists all. By default posterior if the model
    has a network for it, otherwise ddc. one-pass takes a tenth of the time of ddc and is nearly as good, except for
    strong noise."""
    realism: Annotated[float | None, shown("NUMBER")] = None
    """For the solver posterior: 0 is the estimate with the least error, in one evaluation; 0.5 is a sharp estimate, if the
    network has one; 1 is a sample, which looks more natural and invents more. By default the value of the model, but at
    least a sharp estimate, or else a sample, in wide holes."""
    model: Annotated[Path | None, shown("FOLDER")] = None
    """The model folder, or a model on the Hugging Face Hub, as in user/model or user/model@revision; by default the model
    that is shipped with the package."""
    network: Annotated[Path | None, shown("FOLDER")] = None
    """A data-consistency network outside the model folder."""
    sigma: Annotated[float | Literal["auto"] | None, shown("NUMBER|auto")] = None
    """The standard deviation of the noise, for pixels in [0, 1], as in 0.05; auto estimates it. By default it is auto
    for the tasks denoise, deblur and auto, and for noisy files that are enlarged or deblurred; it is 0 for the others."""
    strength: Literal["low", "medium", "high"] = "medium"
    """How much to change where the noise is estimated: low keeps more of the picture, high removes more."""
    mask: Annotated[Path | None, shown("FILE")] = None
    """A mask for inpainting, of the same size as the picture: white is known, black is a hole."""
    kernel: Annotated[Path | None, shown("FILE")] = None
    """The kernel of the task blur: a picture or a 2-D .npy array. It is convolved with the picture, so it is the image
    of a point of light."""
    correlation: bool = False
    """The kernel is that of a correlation, as for OpenCV's filter2D; it is rotated by 180°."""
    scratches: bool = False
    """Also fill scratches and dust, for the task auto. NAME_scratches.png next to the result shows in black what was
    filled; you can correct it and pass it to --task inpaint --mask."""
    fix_colours: bool = False
    """Also correct faded and tinted colours."""
    operator: Annotated[str | None, shown("FILE.py:CLASS")] = None
    """Your own operator, a class in a Python file; it replaces --task."""
    steps: Annotated[int | None, shown("N")] = None
    """Sampling steps; by default those of the solver."""
    samples: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Restorations of each picture. With two or more, the result is their mean; the samples (_1, _2, …) and their
    standard deviation are written next to it, as numbers (_std.npy) and as a picture (_std.png; white is 0.1 or more)."""
    doubt: bool = False
    """Also write NAME_doubt.png: how far each pixel may be off, at 90 % (white is 0.25 or more). It takes eight samples."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Random seed. The result depends on the seed and on the name of the file."""
    tile: Annotated[int | None, shown("PIXELS")] = None
    """Side of the tiles that large pictures are cut into; by default chosen for the device; 0 disables tiles."""
    batch: Annotated[int | None, shown("N")] = None
    """Pictures of one size that are restored together; by default chosen for the device."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    fast: bool = True
    """Use the fast path: half precision on CUDA, and compiled networks after a few hundred pictures or tiles; faster
    convolutions on the CPU."""
    quality: Annotated[int, tyro.conf.arg(metavar="N")] = 95
    """Quality of JPEG and HEIC results."""

    def run(self) -> int:
        logging.basicConfig(format="ddc: %(message)s")
        if self.out == BESIDE:
            return self._beside().run()
        report = self.plan()
        self.check()
        if not report.items:
            return report.exit_code()
        if self.ray is not None:
            from ddc.fleet import restore_files

            restore_files(self, report)
        else:
            from ddc.pipeline import RestorationPipeline

            pipe = RestorationPipeline.from_pretrained(self.model, self.network).to(self.device, self.fast)
            self.process(pipe, report)
        return report.exit_code()

    def check(self) -> None:
        """Refuse options that cannot work, before a model or a picture is read."""
        if not 1 <= self.quality <= 100:
            raise UserError(f"--quality is {self.quality}; expected a number from 1 to 100")
        from ddc.pipeline import RestorationPipeline

        RestorationPipeline.check_options(self._task(), **self._options())

    def process(self, pipe: "RestorationPipeline", report: Report) -> None:
        """Restore the pictures of a report."""
        batch = self.batch or pipe.batch
        with report, progress_bar(self.task, len(report.items)) as show:
            for _, neighbours in groupby(report.pictures(), key=lambda entry: entry[1].pixels.shape):
                while group := list(islice(neighbours, batch)):
                    for entries, result in self._results(pipe, group, report, show):
                        for index, (item, picture) in enumerate(entries):
                            unchanged = result.pictures[index] is picture
                            self._hand_over(item, result, index, report, unchanged)
                    report.settle(batch)
            report.settle()

    def _beside(self) -> "Restore":
        """The same command with a result beside its one picture."""
        if not self.inputs:
            raise UserError("no picture is named; give one, as in `ddc restore bad.jpg`, or a folder")
        if len(self.inputs) != 1 or self.inputs[0].is_dir():
            raise UserError("there are several pictures to do; give a folder for the results with -o")
        return replace(self, out=self.inputs[0].parent, suffix=self.suffix or "_restored", ext=self.ext or "png")

    def _task(self) -> str:
        return "custom" if self.operator is not None else self.task

    def _solver(self) -> str:
        from ddc.pipeline import default_solver

        if self.solver is not None:
            return self.solver
        return "ddc" if self.network else default_solver(self.model)

    def _options(self) -> "Options":
        return {
            "sigma": self.sigma,
            "strength": self.strength,
            "solver": None if self.solver is None and self._solver() == "ddc" else self._solver(),
            "steps": self.steps,
            "realism": self.realism,
            "doubt": self.doubt,
            "seed": self.seed,
            "samples": self.samples,
            "mask": self.mask,
            "kernel": kernel_in_order(self.kernel, self.correlation),
            "operator_file": self.operator,
            "scratches": self.scratches,
            "fix_colours": self.fix_colours,
            "tile": self.tile,
            "batch": self.batch,
        }

    def _results(
        self,
        pipe: "RestorationPipeline",
        group: list[tuple[Item, "Picture"]],
        report: Report,
        show: Callable[[float], None] | None,
    ) -> Iterator[tuple[list[tuple[Item, "Picture"]], "RestorationResult"]]:
        """Restore a group; if that fails, restore each picture by itself, so that only the bad one is lost."""

        begun, options = report.begun, self._options()
        options["names"] = [item.source.name for item, _ in group]  # of which the seeds are made
        names = [self.name_of(item.source) for item, _ in group]
        if show is not None:
            options["progress"] = lambda share: show(begun + share * len(group))
        options["forecast"] = lambda forecast: report.say(self._forecast_text(names, forecast, pipe.device.type))
        options["planned"] = lambda index, plan: report.say(f"{names[index]}: {plan.in_words()}")
        try:
            for item, picture in group:
                self._check_size(item, *picture.pixels.shape[:2])
            yield group, pipe([picture for _, picture in group], self._task(), **options)
        except Exception as error:
            if len(group) == 1:
                source = group[0][0].source
                report.failed(source, explained(error, source))
                return
            for one in group:
                yield from self._results(pipe, [one], report, show)

    def _check_size(self, item: Item, height: int, width: int) -> None:
        """Refuse a result that its format cannot hold, before it is made."""
        if LARGEST_SCALE * max(height, width) <= MAX_WEBP_SIDE:  # the smallest limit of a format
            return
        from ddc.problems import DETECTED, Task

        name = self._task()
        scale = 1 if name in DETECTED else int(Task.parse(name).numbers.get("scale", 1))
        check_fits(item.target, scale * height, scale * width)

    def _hand_over(self, item: Item, result: "RestorationResult", index: int, report: Report, unchanged: bool) -> None:
        """Have a result written, and print what was detected."""
        facts = self._facts(item, result, index)
        if self.task == "deblur":
            report.say(f"{self.name_of(item.source)}: restored as {facts['task']} with noise {facts['sigma']:.3f}")
        files, mean = self.written(item), result.mean[index]
        if len(files) == 1 and not unchanged:
            report.write(item, facts, partial(mean.write, files[0], self.quality))
            return
        doubt = result.intervals[index] if self.doubt else None
        marks = self.scratches and result.marks[index]
        parts = (mean, result.samples[index], result.std[index], doubt, marks)
        report.write(item, facts, partial(write_result, files, *parts, self.quality, unchanged))

    def _facts(self, item: Item, result: "RestorationResult", index: int) -> dict[str, Any]:
        height, width = result.pictures[index].pixels.shape[:2]
        expected = result.forecast
        time = {} if expected is None else {"tiles": expected.tiles, "forecast": round(expected.seconds, 3)}
        return {
            "task": result.tasks[index],
            "sigma": round(result.sigma[index], 6),
            "solver": result.solvers[index] or None,  # where nothing was done
            "seed": self.seed,
            "samples": self.samples,
            "width": width,
            "height": height,
            "evaluations": result.evaluations,
            "seconds": round(result.seconds, 3),
            **time,
            "files": [str(path) for path in self.written(item)],
            "notes": result.notes[index],
        }

    def _forecast_text(self, names: list[str], forecast: "Forecast", device: str) -> str:
        """How long a call will take, and the quick way if that is long."""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        tiles = f" in {forecast.tiles} tiles" if forecast.tiles > 1 else ""
        size = f"{forecast.width}×{forecast.height} pixels{tiles}"
        text = f"{names[0]}{more}: {size}, about {duration(forecast.seconds)}"
        from ddc.solvers.base import make_solver

        solver = make_solver(self._solver(), self.steps)
        if device != "cpu" or forecast.seconds < LONG or solver.name != "ddc":
            return text
        quick = duration(forecast.seconds / solver.evaluations())
        return f"{text}. With --solver one-pass it takes about {quick}; the result is nearly as good, except for strong noise"
