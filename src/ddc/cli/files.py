"""What `restore` and `degrade` share: which files go where, progress, and what happens to those that fail."""

import json
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from ddc.errors import UserError
from ddc.formats import FORMATS, READABLE

if TYPE_CHECKING:
    from torch import Tensor

    from ddc.images import Picture

logger = logging.getLogger("ddc")

STD_OF_WHITE = 0.1  # the standard deviation that is white in the picture of it

# Formats that are not written. As the name of a folder, such a name would be a surprise.
OTHER_FORMATS = {
    ".gif",
    ".avif",
    ".jxl",
    ".jp2",
    ".ppm",
    ".tga",
    ".ico",
    ".psd",
    ".svg",
    ".pdf",
    ".exr",
    ".raw",
    ".dng",
}


def shown(metavar: str) -> Any:
    """How --help shows an option whose text states its default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Item:
    """One picture: where it is, and where its result goes."""

    source: Path
    target: Path


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The files of a command."""

    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, shown("IN…")]
    """Pictures, and folders of pictures. Folders are searched with their subfolders, whose tree is kept."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="OUT")]
    """The folder of the results, or the name of the result if IN is one picture."""
    ext: Annotated[str | None, shown("EXT")] = None
    """Format of the results: png, jpg, webp, tiff, bmp, heic or npy. By default restore keeps the format of each
    picture, and degrade writes png."""
    suffix: Annotated[str, shown("TEXT")] = ""
    """Added to the names of the results: --suffix _restored makes a_restored.png."""
    skip_existing: bool = False
    """Skip pictures whose result exists, to continue an interrupted run."""
    shard: Annotated[str | None, shown("K/N")] = None
    """Process the K-th of N equal parts of the list, as in 3/16."""
    json: bool = False
    """Print one line of JSON for each picture instead of its name."""

    def items(self, default_ext: str | None = None) -> list[Item]:
        """The pictures of this run. Whatever would overwrite an input is refused before anything runs."""
        ext = self._checked_ext(default_ext)
        if not self.inputs:
            raise UserError("no picture was named; give files or folders")
        self._check_out(ext)
        found = find_pictures(self.inputs, outside=self.out)
        items = [Item(one.path, self._target(one.relative, ext)) for one in found]
        if self.suffix:
            items = self._without_results(items)
        self._refuse_collisions(items)
        first, count = self._part()
        items = items[first::count]
        return [item for item in items if not (self.skip_existing and item.target.exists())]

    def _checked_ext(self, default: str | None) -> str | None:
        """The ending of the results, as in .png; None keeps that of each picture."""
        ext = self.ext or default
        if ext is None:
            return None
        ext = "." + ext.lower().removeprefix(".")
        if ext not in FORMATS:
            raise UserError(f"the format {self.ext!r} is not known; expected one of {', '.join(sorted(FORMATS))}")
        return ext

    def _check_out(self, ext: str | None) -> None:
        """Refuse an --out that does not fit the inputs or the format."""
        if self.names_a_file():
            if len(self.inputs) > 1 or self.inputs[0].is_dir():
                raise UserError(f"{self.out} names one picture, but there are several to do; give a folder with -o")
            if self.ext and FORMATS[self.out.suffix.lower()] != FORMATS[str(ext)]:
                raise UserError(f"{self.out} names another format than --ext {self.ext}; leave one of them out")
        elif not self.out.is_dir():
            if self.out.suffix.lower() in OTHER_FORMATS:
                raise UserError(
                    f"{self.out.suffix} pictures cannot be written; expected one of {', '.join(sorted(FORMATS))}"
                )
            if self.out.exists():
                raise UserError(f"{self.out} is a file, but not a picture; give a folder with -o")

    def _target(self, relative: Path, ext: str | None) -> Path:
        """Where the result of a picture goes; `relative` is its path below the input folder."""
        if self.names_a_file():
            return self.out
        own = relative.suffix if relative.suffix.lower() in FORMATS else ".png"
        return self.out / relative.with_name(f"{relative.stem}{self.suffix}{ext or own}")

    def written(self, item: Item) -> list[Path]:
        """Every file that is written for a picture."""
        return [item.target]

    def names_a_file(self) -> bool:
        """Whether --out is the name of the one result, and not a folder."""
        return self.out.suffix.lower() in FORMATS and not self.out.is_dir()

    def _without_results(self, items: list[Item]) -> list[Item]:
        """Skip what an earlier run wrote beside its inputs: a_restored.png, if a.png is an input."""
        named = {path.resolve() for path in self.inputs}
        results = {path.resolve() for item in items for path in self.written(item)} - named
        return [item for item in items if item.source.resolve() not in results]

    def _refuse_collisions(self, items: list[Item]) -> None:
        sources = {item.source.resolve() for item in items}
        taken: dict[Path, Path] = {}
        for source, path in [(item.source, path) for item in items for path in self.written(item)]:
            target = path.resolve()
            if target in sources:
                raise UserError(f"{path} would overwrite an input; give another folder with -o, or a --suffix")
            if target in taken:
                raise UserError(
                    f"{taken[target]} and {source} would both write {path}; "
                    "run the command once for each, with different folders"
                )
            taken[target] = source

    def _part(self) -> tuple[int, int]:
        """The part of the list that this process takes: first index and stride. A launcher of several processes sets
        RANK and WORLD_SIZE."""
        if self.shard is None:
            return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        index, _, count = self.shard.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise UserError(f"--shard {self.shard} is not a part of a whole; expected K/N with 1 ≤ K ≤ N, as in 3/16")
        return int(index) - 1, int(count)

    @property
    def manifest(self) -> Path:
        """The list of failures, in the folder of the results."""
        first, count = self._part()
        name = "ddc-failures.json" if count == 1 else f"ddc-failures-{first + 1}-of-{count}.json"
        return self.out / name


@dataclass
class Report:
    """Which pictures are done and which failed; decides the exit code."""

    options: FileOptions
    count: int
    done: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    echo: Callable[[str], None] = print  # to stdout, without breaking the bar

    def finished(self, item: Item, facts: dict[str, Any]) -> None:
        self.done += 1
        if self.options.json:
            self.echo(json.dumps({"input": str(item.source), "output": str(item.target), **facts}))
        else:
            self.echo(str(item.target))

    def failed(self, item: Item, error: UserError) -> None:
        self.failures.append({"input": str(item.source), "error": str(error)})
        if self.options.json:
            self.echo(json.dumps(self.failures[-1]))
        if self.count == 1:
            raise error  # the only picture: the command itself has failed
        print(f"ddc: {error}", file=sys.stderr)

    def exit_code(self) -> int:
        from ddc.images import appearing

        if not self.failures:
            if not self.options.names_a_file():
                self.options.manifest.unlink(missing_ok=True)  # of an earlier run
            return 0
        if not self.done:
            raise UserError(f"none of the {self.count} pictures could be processed; the reasons are above")
        manifest = self.options.manifest
        with appearing(manifest) as temporary:
            text = json.dumps(self.failures, indent=2, ensure_ascii=False) + "\n"
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        print(
            f"ddc: {len(self.failures)} of {self.count} pictures failed; they are listed in {manifest}",
            file=sys.stderr,
        )
        return 1


class Found(NamedTuple):
    """A picture's path, and its path relative to the folder that was searched."""

    path: Path
    relative: Path


def find_pictures(paths: Iterable[str | Path], outside: Path | None = None) -> list[Found]:
    """The files that are named, and every picture below the folders, sorted.

    Other files, hidden files, and everything below the folder `outside` (where results go) are ignored.
    """
    found: list[Found] = []
    empty: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(Found(path, Path(path.name)))
            continue
        inside = _pictures_below(path, outside)
        if not inside:
            empty.append(path)
        found.extend(sorted(inside, key=lambda one: one.relative.as_posix()))
    for path in empty:
        message = f"{path} has no pictures in it; expected {READABLE} files"
        if not found:
            raise UserError(message)
        logger.warning(message)
    return found


def _pictures_below(path: Path, outside: Path | None) -> list[Found]:
    excluded = None if outside is None else outside.resolve()
    inside = []
    for folder, folders, names in os.walk(path):
        here = Path(folder)
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and (here / name).resolve() != excluded
        )
        for name in names:
            if Path(name).suffix.lower() in FORMATS and not name.startswith("."):
                inside.append(Found(here / name, (here / name).relative_to(path)))
    return inside


def read_ahead(items: list[Item], report: Report) -> Iterator[tuple[Item, "Picture"]]:
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


def same_size(pictures: Iterator[tuple[Item, "Picture"]], batch: int) -> Iterator[list[tuple[Item, "Picture"]]]:
    """Neighbours of one size, at most `batch` of them."""
    group: list[tuple[Item, Picture]] = []
    for entry in pictures:
        if group and (len(group) == batch or entry[1].size != group[0][1].size):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


class Writer:
    """Writes results in a thread, and reports each of them when it is written."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.pool = ThreadPoolExecutor(1)
        self.waiting: deque[tuple[Item, dict[str, Any], Future[None]]] = deque()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def submit(self, item: Item, facts: dict[str, Any], write: Callable[[], None]) -> None:
        """Call `write` in the thread; `facts` are reported afterwards."""
        self.waiting.append((item, facts, self.pool.submit(write)))

    def settle(self, at_most: int = 0) -> None:
        """Wait until at most so many results are waiting."""
        while len(self.waiting) > at_most:
            item, facts, future = self.waiting.popleft()
            try:
                future.result()
            except UserError as error:
                self.report.failed(item, error)
            else:
                self.report.finished(item, facts)


def sample_files(target: Path, samples: int) -> list[Path]:
    """The files of several samples: their mean, each of them, _std.npy and _std.png."""
    numbered = [f"{target.stem}_{number}{target.suffix}" for number in range(1, samples + 1)]
    beside = [*numbered, f"{target.stem}_std.npy", f"{target.stem}_std.png"]
    return [target, *(target.with_name(name) for name in beside)]


def write_samples(target: Path, mean: "Picture", samples: "list[Picture]", std: "Tensor", quality: int) -> None:
    """Write the `sample_files` of a target."""
    import numpy as np

    from ddc.images import Picture, appearing

    _, *numbered, std_numbers, std_picture = sample_files(target, len(samples))
    for path, sample in zip(numbered, samples, strict=True):
        sample.write(path, quality)
    with appearing(std_numbers) as temporary, temporary.open("wb") as file:
        np.save(file, std.permute(1, 2, 0).numpy())
    Picture.from_tensor(std.mean(0, keepdim=True) / STD_OF_WHITE, grey=True).write(std_picture)
    mean.write(target, quality)


@contextmanager
def progress_bar(report: Report, what: str) -> Iterator[Callable[[float], None] | None]:
    """A progress bar with the time left, on stderr.

    Yields a function that takes the number of pictures done, which may be a fraction, or None without a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # results that go to a file or a pipe must go there
    ) as bar:
        task = bar.add_task(what, total=report.count)
        yield lambda done: bar.update(task, completed=done)
