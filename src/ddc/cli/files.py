"""What `restore` and `degrade` share: which files go where, progress, and what happens to those that fail."""

import json
import logging
import os
import re
import sys
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TextIO

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from ddc.errors import UserError
from ddc.formats import FORMATS, READABLE
from ddc.storage import Remote

if TYPE_CHECKING:
    from torch import Tensor

    from ddc.images import Picture

logger = logging.getLogger("ddc")

IN_FLIGHT = 8  # files of a bucket that are read ahead, and that wait to be written

# Formats that are not written. As the name of a folder, such a name would be a surprise.
OTHER_FORMATS = {
    ".gif",
    ".avif",
    ".jxl",
    ".jp2",
    ".ppm",
    ".tga",
    ".psd",
    ".svg",
    ".ico",
    ".pdf",
    ".exr",
    ".raw",
    ".dng",
}


def shown(metavar: str) -> Any:
    """How --help shows an option whose text states its default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def _one_address(words: list[str]) -> str:
    if len(words) > 1:
        raise ValueError(f"--ray takes one address, not {' '.join(words)}")
    return words[0] if words else ""


# an option that stands alone, or with a value
_ADDRESS = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[ADDRESS]",
    instance_from_str=_one_address,
    is_instance=lambda value: value is None or isinstance(value, str),
    str_from_instance=lambda value: [value] if value else [],
)


class Item(NamedTuple):
    """One picture: where it is, and where its result goes."""

    source: Path
    target: Path


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The files of a command."""

    urls: ClassVar = ("inputs", "out")  # options that may be URLs

    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, shown("IN…")]
    """Pictures, and folders of pictures. Folders are searched with their subfolders, whose tree is kept. Links to folders
    are not followed; name them as well. A URL (s3://bucket/folder, gs://, hf://, https://) is a folder, too."""
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

    samples = 1  # restorations of each picture: an option of restore
    doubt = False  # whether a picture of the doubt is written: another
    scratches = False  # whether a mask of scratches is written: another

    def plan(self, default_ext: str | None = None) -> "Report":
        """The pictures of this run. Whatever would overwrite an input is refused before anything runs."""
        ext = self._checked_ext(default_ext)
        if not self.inputs:
            raise UserError("no picture was named; give files or folders")
        if Path(self.suffix).name != self.suffix:
            raise UserError(f"--suffix {self.suffix} names a folder; expected the end of a name, as in _restored")
        self._check_out(ext)
        closed: list[OSError] = []
        found = find_pictures(self.inputs, self.out, closed)
        items = [Item(path, self._target(relative, ext)) for path, relative in found]
        if self.suffix:  # skip what an earlier run wrote beside its inputs: a_r.png and a_r_1.png, if a.png is an input
            named = {os.path.realpath(path) for path in self.inputs}
            results = {os.path.realpath(path) for item in items for path in self.written(item)} - named
            targets = {os.path.realpath(item.target.with_suffix("")) for item in items}
            items = [
                item
                for item in items
                if (source := os.path.realpath(item.source)) not in results
                and (source in named or re.sub(r"_(\d+|std|doubt|scratches)\.\w+$", "", source) not in targets)
            ]
        self._refuse_collisions(items)
        first, count = self._part()
        items = items[first::count]
        if self.skip_existing:
            there = {self.out / name for name in self.out.files()} if isinstance(self.out, Remote) else None
            items = [
                item for item in items if not (holds(item.target.exists) if there is None else item.target in there)
            ]
        if items:
            check_folder(self.out.parent if self.names_a_file() else self.out)
        return Report(self, items, closed)

    def _checked_ext(self, default: str | None) -> str | None:
        """The ending of the results, as in .png; None keeps that of each picture."""
        if (self.ext or default) is None:
            return None
        ext = "." + (self.ext or default or "").lower().removeprefix(".")
        if ext not in FORMATS:
            raise UserError(f"the format {self.ext!r} is not known; expected one of {', '.join(sorted(FORMATS))}")
        return ext

    def _check_out(self, ext: str | None) -> None:
        """Refuse an --out that does not fit the inputs or the format."""
        if self.names_a_file():
            if len(self.inputs) > 1 or holds(self.inputs[0].is_dir):
                raise UserError(f"{self.out} names one picture, but there are several to do; give a folder with -o")
            if self.ext and FORMATS[self.out.suffix.lower()] != FORMATS[str(ext)]:
                raise UserError(f"{self.out} names another format than --ext {self.ext}; leave one of them out")
        elif not self.out.is_dir():
            if self.out.suffix.lower() in OTHER_FORMATS:
                known = ", ".join(sorted(FORMATS))
                raise UserError(f"{self.out.suffix} pictures cannot be written; expected one of {known}")
            if self.out.exists():
                raise UserError(f"{self.out} is a file, but not a picture; give a folder with -o")

    def names_a_file(self) -> bool:
        """Whether --out is the name of the one result, and not a folder."""
        return self.out.suffix.lower() in FORMATS and not self.out.is_dir()

    def _target(self, relative: Path, ext: str | None) -> Path:
        """Where the result of a picture goes; `relative` is its path below the input folder."""
        if self.names_a_file():
            return self.out
        own = relative.suffix if relative.suffix.lower() in FORMATS else ".png"
        return self.out / relative.with_name(f"{relative.stem}{self.suffix}{ext or own}")

    def written(self, item: Item) -> list[Path]:
        """Every file that is written for a picture: the result, and with several samples each of them (_1, _2, …) and
        their standard deviation; with --doubt a picture of it, and with --scratches a mask."""
        target = item.target
        numbered = [f"{target.stem}_{number}{target.suffix}" for number in range(1, self.samples + 1)]
        beside = [*numbered, f"{target.stem}_std.npy", f"{target.stem}_std.png"] if self.samples > 1 else []
        beside += [f"{target.stem}_doubt.png"] if self.doubt else []
        beside += [f"{target.stem}_scratches.png"] if self.scratches else []
        return [target, *(target.with_name(name) for name in beside)]

    def name_of(self, source: Path) -> str:
        """A picture as messages name it: by its path below the folder that was given."""
        folder = next((path for path in self.inputs if path in source.parents), None)
        return source.name if folder is None else str(source.relative_to(folder))

    def _refuse_collisions(self, items: list[Item]) -> None:
        sources = {os.path.realpath(item.source) for item in items}  # Path.resolve raises for a link to itself
        taken: dict[str, Path] = {}
        for source, path in [(item.source, path) for item in items for path in self.written(item)]:
            target = os.path.realpath(path)
            if target in sources:
                raise UserError(f"{path} would overwrite an input; give another folder with -o, or a --suffix")
            if target in taken:
                both = f"{taken[target]} and {source} would both write {path}"
                raise UserError(f"{both}; run the command once for each, with different folders")
            taken[target] = source

    def _part(self) -> tuple[int, int]:
        """The part of the list that this process takes: first index and stride. A launcher of several processes sets
        RANK and WORLD_SIZE."""
        if self.shard is None:
            rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
            if not (rank.isdecimal() and count.isdecimal() and int(rank) < int(count)):
                given = f"RANK is {rank} and WORLD_SIZE is {count}"
                raise UserError(
                    f"{given}; expected 0 ≤ RANK < WORLD_SIZE, as a launcher of several processes sets them"
                )
            return int(rank), int(count)
        index, _, count = self.shard.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise UserError(f"--shard {self.shard} is not a part of a whole; expected K/N with 1 ≤ K ≤ N, as in 3/16")
        return int(index) - 1, int(count)

    @property
    def manifest(self) -> Path:
        """The list of failures, in the folder of the results."""
        first, count = self._part()
        return self.out / ("ddc-failures.json" if count == 1 else f"ddc-failures-{first + 1}-of-{count}.json")


def holds(check: Callable[[], bool]) -> bool:
    """What `path.is_dir` or `path.exists` returns; False where that is not to be found out, as in a closed folder."""
    try:
        return check()
    except OSError:
        return False


def check_folder(folder: Path) -> None:
    """Refuse a folder for results that cannot be written, before there is something to write. If it does not exist, the
    folder that it will be made in is tried, so that nothing is left behind."""
    if isinstance(folder, Remote):
        return folder.check_writable()
    existing = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)
    probe = existing / f".ddc-{uuid.uuid4().hex}.part"
    try:
        probe.write_bytes(b"ddc")
    except OSError as error:
        reason = error.strerror if existing.is_dir() else f"{existing} is not a folder"
        raise UserError(
            f"{folder} cannot be written ({reason}); check its permissions, or give another place with -o"
        ) from None
    finally:
        with suppress(OSError):
            probe.unlink()


def find_pictures(
    paths: Iterable[Path], outside: Path | None = None, closed: list[OSError] | None = None
) -> list[tuple[Path, Path]]:
    """The files that are named, and every picture below the folders, sorted; each with its path below its folder.

    Other files, hidden files, and everything below the folder `outside` (where results go) are ignored; pictures in other
    formats are counted in a warning. Folders that cannot be opened are added to `closed`.
    """
    closed = [] if closed is None else closed
    found: list[tuple[Path, Path]] = []
    empty: list[Path] = []
    others = Counter[str]()
    for path in paths:
        if not holds(path.is_dir):
            found.append((path, Path(path.name)))
            continue
        files = _pictures_below(path, outside, closed)
        inside = [file for file in files if file.suffix.lower() in FORMATS]
        others.update(suffix for file in files if (suffix := file.suffix.lower()) in OTHER_FORMATS)
        if not inside and not closed:
            empty.append(path)
        relative = [(file, file.relative_to(path)) for file in inside]
        found += sorted(relative, key=lambda pair: pair[1].as_posix())
    if others:
        count, endings = others.total(), ", ".join(sorted(suffix[1:] for suffix in others))
        what = "1 file of another format was" if count == 1 else f"{count} files of other formats were"
        logger.warning("%s left out (%s)", what, endings)
    for path in empty:
        message = f"{path} has no pictures in it; expected {READABLE} files"
        if not found:
            raise UserError(message)
        logger.warning(message)
    return found


def _pictures_below(path: Path, outside: Path | None, closed: list[OSError]) -> list[Path]:
    """Every picture below a folder, also in formats that are not read."""
    known = FORMATS.keys() | OTHER_FORMATS
    if isinstance(path, Remote):
        names = [name for name in path.files() if not re.search(r"(^|/)\.", name)]
        files = [path / name for name in names if Path(name).suffix.lower() in known]
        return [file for file in files if outside in (None, path) or outside not in file.parents]
    excluded = None if outside is None else os.path.realpath(outside)
    inside = []
    for folder, folders, names in os.walk(path, onerror=closed.append):
        here = Path(folder)
        folders[:] = [name for name in folders if name[0] != "." and os.path.realpath(here / name) != excluded]
        for link in sorted(name for name in folders if (here / name).is_symlink()):
            logger.warning("%s is a link to a folder, which is not followed; name it as well", here / link)
        inside += [here / name for name in names if name[0] != "." and Path(name).suffix.lower() in known]
    return inside


@dataclass
class Report:
    """Reads the pictures and writes the results, each in a thread; which of them failed decides the exit code."""

    options: FileOptions
    items: list[Item]
    closed: list[OSError]  # from folders that cannot be opened
    done: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    waiting: deque[tuple[Item, dict[str, Any], Future[None]]] = field(default_factory=deque)
    notes: dict[Item, list[str]] = field(default_factory=lambda: defaultdict(list))  # the warnings of reading
    told: set[str] = field(default_factory=set)  # warnings that were logged
    stream: TextIO | None = None  # where the lines about results go; None is stdout

    def __enter__(self) -> "Report":
        remote = [any(isinstance(place, Remote) for place in places) for places in zip(*self.items, strict=True)]
        self.ahead, self.behind = (IN_FLIGHT if far else 1 for far in remote or (False, False))
        self.reader, self.writer = ThreadPoolExecutor(self.ahead), ThreadPoolExecutor(self.behind)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.reader.shutdown()
        self.writer.shutdown()
        if kind is KeyboardInterrupt:  # list what was written
            self.settle()

    @property
    def begun(self) -> int:
        """How many pictures are done, failed or being written."""
        return self.done + len(self.failures) + len(self.waiting)

    def pictures(self) -> Iterator[tuple[Item, "Picture"]]:
        """The pictures that can be read; the next one is decoded while this one is restored."""
        from ddc.images import Picture
        from ddc.telling import noting

        coming: deque[Future[Picture]] = deque()
        for index, item in enumerate(self.items):
            for later in self.items[index + len(coming) : index + 1 + self.ahead]:
                coming.append(self.reader.submit(noting(self.notes[later], self.told)(Picture.read), later.source))
            try:
                picture = coming.popleft().result()
            except Exception as error:
                self.failed(item.source, explained(error, item.source))
                continue
            yield item, picture

    def write(self, item: Item, facts: dict[str, Any], write: Callable[[], None]) -> None:
        """Call `write` in the thread; `facts` are reported when that is done, with all warnings in their notes."""
        from ddc.telling import noting

        notes = self.notes.pop(item, [])
        notes += [note for note in facts.get("notes", []) if note not in notes]
        self.waiting.append((item, facts | {"notes": notes}, self.writer.submit(noting(notes, self.told)(write))))

    def settle(self, at_most: int = 0) -> None:
        """Wait until at most so many results are waiting to be written."""
        while len(self.waiting) > max(at_most, self.behind if at_most else 0):
            item, facts, future = self.waiting.popleft()
            try:
                future.result()
            except Exception as error:
                self.failed(item.source, explained(error, item.source))
                continue
            self.finished({"input": str(item.source), "output": str(item.target), **facts})

    def finished(self, line: dict[str, Any]) -> None:
        """Print what was written; `line` is that of --json."""
        self.done += 1
        print_line(json.dumps(line) if self.options.json else line["output"], self.stream or sys.stdout)

    def say(self, text: str) -> None:
        """Print what was found in a picture, or how long it takes."""
        print_line(text, sys.stderr)

    def failed(self, source: Path, error: UserError) -> None:
        self.failures.append({"input": str(source), "error": str(error)})
        if self.options.json:
            print_line(json.dumps(self.failures[-1]), self.stream or sys.stdout)
        if len(self.items) + len(self.closed) == 1:
            raise error  # the only picture: the command itself has failed
        print_line(f"ddc: {error}", sys.stderr)

    def exit_code(self) -> int:
        """0 if all is done; 1 if something failed, which is listed in the manifest; if all failed, a `UserError`."""
        for closed in self.closed:
            folder = Path(closed.filename)
            self.failed(folder, UserError(f"{folder} cannot be opened ({closed.strerror}); check its permissions"))
        manifest = self.options.manifest
        if not self.failures:
            if not self.options.names_a_file():
                manifest.unlink(missing_ok=True)  # of an earlier run
            return 0
        count = len(self.items) + len(self.closed)
        if not self.done:
            raise UserError(f"none of the {count} inputs could be processed; the reasons are above")
        from ddc.images import appearing

        failed = f"ddc: {len(self.failures)} of {count} inputs failed"
        try:
            with appearing(manifest) as temporary:
                text = json.dumps(self.failures, indent=2, ensure_ascii=False) + "\n"
                temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            print_line(f"{failed}; they are listed in {manifest}", sys.stderr)
        except UserError as error:
            print_line(f"{failed}; {error}", sys.stderr)
        return 1


def print_line(text: str, stream: TextIO) -> None:
    """Print a line at once. If its reader has gone, as in `ddc … | head`, or its disk is full, the work goes on without output."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def explained(error: Exception, source: Path) -> UserError:
    """What went wrong with a picture, as people read it. Any other error than a `UserError` is a defect of this program."""
    if isinstance(error, UserError):
        return error
    logger.debug("%s", source, exc_info=error)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return UserError(f"{source} failed with an unexpected error ({what}); please report it")


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Whether and how to use a Ray cluster."""

    ray: Annotated[str | None, _ADDRESS, tyro.conf.arg(help_behavior_hint="")] = None
    """Share the work among the workers of a Ray cluster: host:port, or auto for the one that this computer belongs to.
    Without ADDRESS, use that of RAY_ADDRESS, or start Ray on this computer."""
    workers: Annotated[int | None, shown("N")] = None
    """Workers of --ray; by default one for each GPU of the cluster, or for each --cores if there is none."""
    cores: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Processor cores of each worker of --ray."""


def kernel_in_order(path: Path | None, correlation: bool) -> "Path | Tensor | None":
    """The kernel of a convolution, from a file with one, or with that of a correlation."""
    if path is None or not correlation:
        return path
    from torch.nn.functional import pad

    from ddc.operators.blur import read_kernel

    turned = read_kernel(path).flip(0, 1)
    # the centre of n taps is n // 2, which an even number of taps would lose when it is turned
    return pad(turned, (1 - turned.shape[1] % 2, 0, 1 - turned.shape[0] % 2, 0))


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[float], None] | None]:
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
    # results that go to a file or a pipe must go there
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
