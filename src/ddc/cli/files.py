"""What `restore` and `degrade` share: which files go where, progress, and what happens to those that fail."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from ddc.errors import UserError

# Names of pictures that we do not write: taken for a folder, they would surprise.
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
    """How --help shows an option whose text says what happens where it is left out."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Item:
    """One picture to do: where it is, and where its result goes."""

    source: Path
    target: Path


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The files of a command."""

    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, shown("IN…")]
    """Pictures, and folders of pictures (searched through; their tree is kept)."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="OUT")]
    """A folder, or the name of the result where IN is one picture."""
    ext: Annotated[str | None, shown("EXT")] = None
    """Format of the results: png, jpg, webp, tiff, bmp, heic or npy. Left out, restore keeps that of each picture
    and degrade writes png."""
    suffix: Annotated[str, shown("TEXT")] = ""
    """Added to the names of the results: --suffix _restored makes a_restored.png."""
    skip_existing: bool = False
    """Leave out pictures whose result is already there, to go on with a run that was stopped."""
    shard: Annotated[str | None, shown("K/N")] = None
    """Do the K-th of N equal parts of the list, as in 3/16."""
    json: bool = False
    """Print one JSON object a line for each picture instead of its name."""

    def items(self, default_ext: str | None = None) -> list[Item]:
        """What is to be done. Whatever would overwrite an input is refused before anything runs."""
        from ddc.images import FORMATS, find_pictures

        ext = self.ext or default_ext
        if ext is not None:
            ext = "." + ext.lower().removeprefix(".")
            if ext not in FORMATS:
                raise UserError(
                    f"the format {self.ext!r} is not known; expected one of {', '.join(sorted(FORMATS))}"
                )
        if not self.inputs:
            raise UserError("no picture was named; give files or folders")
        single = len(self.inputs) == 1 and not self.inputs[0].is_dir()
        names_a_file = self.names_a_file()
        if names_a_file and not single:
            raise UserError(
                f"{self.out} names one picture, but there are several to do; give a folder with -o"
            )
        if names_a_file and self.ext and FORMATS[self.out.suffix.lower()] != FORMATS[str(ext)]:
            raise UserError(f"{self.out} names another format than --ext {self.ext}; leave one of them out")
        if self.out.suffix.lower() in OTHER_FORMATS and not self.out.is_dir():
            raise UserError(
                f"{self.out.suffix} pictures cannot be written; expected one of {', '.join(sorted(FORMATS))}"
            )
        if not names_a_file and self.out.exists() and not self.out.is_dir():
            raise UserError(f"{self.out} is a file and no picture; give a folder with -o")

        found = find_pictures(self.inputs, outside=self.out)
        items = []
        for one in found:
            if names_a_file:
                target = self.out
            else:
                own = one.relative.suffix if one.relative.suffix.lower() in FORMATS else ".png"
                target = self.out / one.relative.with_name(f"{one.relative.stem}{self.suffix}{ext or own}")
            items.append(Item(one.path, target))
        if self.suffix:
            items = self._without_results(items)
        self._refuse_collisions(items)
        first, count = self._part()
        items = items[first::count]
        return [item for item in items if not (self.skip_existing and item.target.exists())]

    def names_a_file(self) -> bool:
        """Whether --out is the name of the one result, and not a folder."""
        from ddc.images import FORMATS

        return self.out.suffix.lower() in FORMATS and not self.out.is_dir()

    def _without_results(self, items: list[Item]) -> list[Item]:
        """Leave out what an earlier run wrote beside its inputs: a_restored.png, where a.png is there."""
        named = {path.resolve() for path in self.inputs}
        results = {item.target.resolve() for item in items} - named
        return [item for item in items if item.source.resolve() not in results]

    def _refuse_collisions(self, items: list[Item]) -> None:
        sources = {item.source.resolve() for item in items}
        taken: dict[Path, Path] = {}
        for item in items:
            target = item.target.resolve()
            if target in sources:
                raise UserError(
                    f"{item.target} would overwrite an input; give another folder with -o, or a --suffix"
                )
            if target in taken:
                raise UserError(
                    f"{taken[target]} and {item.source} would both become {item.target}; "
                    "do them one after another, into different folders"
                )
            taken[target] = item.source

    def _part(self) -> tuple[int, int]:
        """Which part of the list is ours: first index and stride. Launchers of several processes say it too."""
        if self.shard is None:
            return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        index, _, count = self.shard.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise UserError(
                f"--shard {self.shard} is not a part of a whole; expected K/N with 1 ≤ K ≤ N, as in 3/16"
            )
        return int(index) - 1, int(count)

    @property
    def manifest(self) -> Path:
        """The list of failures, in the folder of the results."""
        first, count = self._part()
        name = "ddc-failures.json" if count == 1 else f"ddc-failures-{first + 1}-of-{count}.json"
        return self.out / name


@dataclass
class Report:
    """What has been done and what failed; decides the exit code."""

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
            raise error  # the only one: the command itself has failed
        print(f"ddc: {error}", file=sys.stderr)

    def exit_code(self) -> int:
        from ddc.images import appearing

        if not self.failures:
            if not self.options.names_a_file():
                self.options.manifest.unlink(missing_ok=True)  # of an earlier run
            return 0
        if not self.done:
            raise UserError(f"none of the {self.count} pictures could be done; the reasons are above")
        manifest = self.options.manifest
        with appearing(manifest) as temporary:
            text = json.dumps(self.failures, indent=2, ensure_ascii=False) + "\n"
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        print(
            f"ddc: {len(self.failures)} of {self.count} pictures failed; they are listed in {manifest}",
            file=sys.stderr,
        )
        return 1


@contextmanager
def progress_bar(report: Report, what: str) -> Iterator[Callable[[float], None]]:
    """One bar with the time left, on stderr where that is a terminal. Yields a function that takes the
    number of pictures done, which may be a fraction."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # results that go to a file or a pipe must go there
    ) as bar:
        task = bar.add_task(what, total=report.count)
        yield lambda done: bar.update(task, completed=done)
