"""`ddc restore`: degraded pictures in, restored pictures out."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ddc.cli.files import FileOptions, Item, Report, progress_bar, shown
from ddc.errors import UserError

if TYPE_CHECKING:
    from ddc.images import Picture
    from ddc.pipeline import Forecast, RestorationPipeline, RestorationResult

SLOW = 30  # seconds from which on the time is told beforehand
STD_OF_WHITE = 0.1  # the standard deviation that is white in the picture of it


@dataclass(frozen=True, kw_only=True)
class Restore(FileOptions):
    """Restore pictures. For super-resolution IN is the small picture; for inpainting, its transparent pixels
    (or --mask) are the holes."""

    task: Annotated[str, tyro.conf.arg(metavar="TASK")] = "sr4"
    """What happened to the pictures: sr2 … sr16, deblur (estimated), disc3, gauss1.5, motion, blur, inpaint, jpeg
    (quality as the file says), jpeg10, denoise, colorize; `ddc info` lists all. auto looks for holes, marks of JPEG,
    blur and noise in each."""
    solver: Annotated[str, tyro.conf.arg(metavar="SOLVER")] = "ddc"
    """The algorithm; `ddc info` lists all."""
    model: Annotated[Path | None, shown("FOLDER")] = None
    """The model folder; left out, the one that comes with the package."""
    network: Annotated[Path | None, shown("FOLDER")] = None
    """A data-consistency network outside the model folder."""
    sigma: Annotated[float | Literal["auto"] | None, shown("NUMBER|auto")] = None
    """The noise in the pictures, for pixels in [0, 1], as in 0.05; auto estimates it. Left out, it is auto for the
    tasks denoise, deblur and auto and 0 for the others."""
    mask: Annotated[Path | None, shown("FILE")] = None
    """A mask for inpainting, as large as the picture: white is known, black is a hole."""
    kernel: Annotated[Path | None, shown("FILE")] = None
    """The kernel of the task blur: a picture or a 2-D .npy array."""
    operator: Annotated[str | None, shown("FILE.py:CLASS")] = None
    """Your own operator, a class in a Python file; it takes the place of --task."""
    steps: Annotated[int | None, shown("N")] = None
    """Length of the run; left out, the solver's own."""
    solver_option: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], shown("KEY=VALUE")] = ()
    """Another setting of the solver; may be given several times."""
    samples: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Restorations of each picture. From two on, the result is their mean, and beside it lie the samples (_1, _2, …)
    and their standard deviation, in numbers (_std.npy) and to look at (_std.png, where white is 0.1 or more)."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Of all randomness; with a file's name it decides the result."""
    tile: Annotated[int | None, shown("PIXELS")] = None
    """Side of the tiles that large pictures are cut into; left out, the model's own; 0 never cuts."""
    batch: Annotated[int | None, shown("N")] = None
    """Pictures of one size that are restored together; left out, chosen for the device."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    fast: bool = True
    """The fast path: half precision on CUDA, and compiled code once a few hundred pictures or tiles are done; faster
    convolutions on the CPU."""
    quality: Annotated[int, tyro.conf.arg(metavar="N")] = 95
    """Quality of JPEG and HEIC results."""

    def run(self) -> int:
        import logging

        logging.basicConfig(format="ddc: %(message)s")
        items = self.items()
        options = self._check()
        if not items:
            return 0
        from ddc.pipeline import RestorationPipeline

        pipe = RestorationPipeline.from_pretrained(self.model, self.network).to(self.device, self.fast)
        report = Report(self, len(items))
        batch = self.batch or pipe.batch
        with progress_bar(report, self.task) as show, ThreadPoolExecutor(1) as writer:
            writing: list[tuple[Item, dict[str, Any], Future[None]]] = []
            for group in _same_size(_read_ahead(items, report), batch):
                begun = report.done + len(report.failures) + len(writing)
                results = self._results(pipe, group, options, report, partial(_show_from, show, begun))
                for entries, result in results:
                    for index, (item, _) in enumerate(entries):
                        facts = self._facts(item, result, index)
                        if self.task in ("deblur", "auto"):
                            _tell_task(item, facts)
                        writing.append((item, facts, writer.submit(self._write, item, result, index)))
                while len(writing) > batch:
                    _settle(writing.pop(0), report)
            for entry in writing:
                _settle(entry, report)
        return report.exit_code()

    def _check(self) -> dict[str, str]:
        """Refuse what can be refused before a model is read. Returns the solver's settings."""
        from ddc.pipeline import make_solver
        from ddc.problems import READ_OFF, check_sigma, make_problem, task_family

        if self.batch is not None and self.batch < 1:
            raise UserError(f"--batch {self.batch} is no number of pictures; expected 1 or more")
        if not 1 <= self.quality <= 100:
            raise UserError(f"--quality {self.quality} is not known; expected a number from 1 to 100")
        options = {}
        for text in self.solver_option:
            key, equals, value = text.partition("=")
            if not equals:
                raise UserError(f"--solver-option {text} is not KEY=VALUE, as in eta=0.85")
            options[key.strip()] = value.strip()
        solver = make_solver(self.solver, self.steps, options)
        task = self._task()
        sigma = self.sigma if isinstance(self.sigma, float) else 0.0  # else it is estimated, or none
        check_sigma(sigma)
        if task in READ_OFF:
            if self.mask or self.kernel:
                raise UserError(f"the task {task} takes no mask and no kernel; leave them out")
        elif task_family(task) not in ("inpaint", "custom"):
            solver.check(make_problem(task, sigma, mask=self.mask, kernel=self.kernel))
        return options

    def _task(self) -> str:
        return "custom" if self.operator is not None else self.task

    def _results(
        self,
        pipe: "RestorationPipeline",
        group: list[tuple[Item, "Picture"]],
        options: dict[str, str],
        report: Report,
        progress: Callable[[float], None],
    ) -> Iterator[tuple[list[tuple[Item, "Picture"]], "RestorationResult"]]:
        """Restore a group; where it fails as one, each picture by itself, so that only the bad one is lost."""
        try:
            result = pipe(
                [picture for _, picture in group],
                self._task(),
                sigma=self.sigma,
                solver=self.solver,
                steps=self.steps,
                options=options,
                seed=self.seed,
                samples=self.samples,
                names=[item.source.name for item, _ in group],
                mask=self.mask,
                kernel=self.kernel,
                operator_file=self.operator,
                tile=self.tile,
                batch=self.batch,
                progress=lambda share: progress(share * len(group)),
                forecast=partial(_tell, [item.source.name for item, _ in group]),
            )
        except UserError as error:
            if len(group) == 1:
                report.failed(group[0][0], error)
                return
            for one in group:
                yield from self._results(pipe, [one], options, report, progress)
            return
        yield group, result

    def _files(self, item: Item) -> list[Path]:
        """What is written for a picture: the result, and with several samples each of them, _std.npy and _std.png."""
        if self.samples == 1:
            return [item.target]
        stem, suffix = item.target.stem, item.target.suffix
        numbered = [f"{stem}_{number}{suffix}" for number in range(1, self.samples + 1)]
        beside = [*numbered, f"{stem}_std.npy", f"{stem}_std.png"]
        return [item.target, *(item.target.with_name(name) for name in beside)]

    def _write(self, item: Item, result: "RestorationResult", index: int) -> None:
        if self.samples == 1:
            result.pictures[index].write(item.target, self.quality)
            return
        import numpy as np

        from ddc.images import Picture, appearing

        target, *numbered, std_numbers, std_picture = self._files(item)
        for path, sample in zip(numbered, result.samples[index], strict=True):
            sample.write(path, self.quality)
        std = result.std[index]
        with appearing(std_numbers) as temporary, temporary.open("wb") as file:
            np.save(file, std.permute(1, 2, 0).numpy())
        Picture.from_tensor(std.mean(0, keepdim=True) / STD_OF_WHITE, grey=True).write(std_picture)
        result.mean[index].write(target, self.quality)

    def _facts(self, item: Item, result: "RestorationResult", index: int) -> dict[str, Any]:
        height, width = result.pictures[index].size
        expected = result.forecast
        told = {} if expected is None else {"tiles": expected.tiles, "forecast": round(expected.seconds, 3)}
        return {
            "task": result.tasks[index],
            "sigma": round(result.sigma[index], 6),
            "solver": self.solver,
            "seed": self.seed,
            "samples": self.samples,
            "width": width,
            "height": height,
            "evaluations": result.evaluations,
            "seconds": round(result.seconds, 3),
            **told,
            "files": [str(path) for path in self._files(item)],
            "notes": result.notes[index],
        }


def _read_ahead(items: list[Item], report: Report) -> Iterator[tuple[Item, "Picture"]]:
    """The pictures that can be read; the next one is decoded while this one is restored."""
    from ddc.images import Picture

    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(Picture.read, items[0].source)
        for index, item in enumerate(items):
            current = ahead
            if index + 1 < len(items):
                ahead = reader.submit(Picture.read, items[index + 1].source)
            try:
                picture = current.result()
            except UserError as error:
                report.failed(item, error)
                continue
            yield item, picture


def _same_size(
    pictures: Iterator[tuple[Item, "Picture"]], batch: int
) -> Iterator[list[tuple[Item, "Picture"]]]:
    group: list[tuple[Item, Picture]] = []
    for entry in pictures:
        if group and (len(group) == batch or entry[1].size != group[0][1].size):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _show_from(show: Callable[[float], None], begun: int, part: float) -> None:
    show(begun + part)


def _tell(names: list[str], forecast: "Forecast") -> None:
    """How long it will take, in one line, where people would wonder."""
    if forecast.seconds < SLOW:
        return
    from ddc.pipeline import duration

    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    tiles = f"{forecast.tiles} tile{'s' if forecast.tiles > 1 else ''}"
    size = f"{forecast.width}×{forecast.height}"
    print(f"{names[0]}{more}: {size}, {tiles}, about {duration(forecast.seconds)}", file=sys.stderr)


def _tell_task(item: Item, facts: dict[str, Any]) -> None:
    """What was estimated, for people who want to try something a little different."""
    print(f"{item.source.name}: taken for {facts['task']} with noise {facts['sigma']:.3f}", file=sys.stderr)


def _settle(entry: tuple[Item, dict[str, Any], "Future[None]"], report: Report) -> None:
    """Wait for one picture to be written."""
    item, facts, future = entry
    try:
        future.result()
    except UserError as error:
        report.failed(item, error)
    else:
        report.finished(item, facts)
