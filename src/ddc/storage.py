"""Folders and files behind fsspec URLs (s3://, gs://, hf://, https://, …), with the methods of local paths."""

import dataclasses
import re
import stat
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ddc.errors import UserError
from ddc.formats import FORMATS

# A path has lost the second slash of s3://bucket. One letter before the colon is a drive of Windows.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)", re.DOTALL)
# where a file appears when all of it has arrived; elsewhere it is sent under another name, and renamed
_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "hf", "memory"}
_ARCHIVES = (".tar", ".parquet", ".arrow")

if TYPE_CHECKING:
    from pathlib import Path as _Local
else:
    _Local = type(Path())


def changed_at(path: Path) -> float:
    """When a file was written, by the clock of its storage; 0 if it is not there."""
    try:
        return float(path.stat().st_mtime)
    except OSError:
        return 0.0


def located(path: str | Path) -> Path:
    """The local path or the URL that a person wrote."""
    found = None if isinstance(path, Remote) else _URL.fullmatch(str(path))
    if found is None:
        return Path(path) if isinstance(path, str) else path
    return Path("/" + found[2]) if found[1] == "file" else Remote(f"{found[1]}:", found[2])


def use_urls(options: Any) -> None:
    """Make `Remote` of the URLs among the options of a command. Those that its `urls` do not name take local paths only."""
    for name in (field.name for field in dataclasses.fields(options)):
        value = getattr(options, name)
        if dataclasses.is_dataclass(value):
            use_urls(value)
        paths = [path for path in (value if isinstance(value, tuple) else [value]) if isinstance(path, Path)]
        if not paths:
            continue
        found = tuple(map(located, paths))
        if name in getattr(options, "urls", ()):
            object.__setattr__(options, name, found if isinstance(value, tuple) else found[0])
        elif url := next((path for path in found if isinstance(path, Remote)), None):
            raise UserError(
                f"{url} is a URL, but {name.replace('_', '-')} takes local paths only; give a path on this computer"
            )


class Remote(_Local):
    """A URL as a path: parts, names and the methods below are those of a local path. A name that ends like a picture or an
    archive is a file; any other is a folder or a bucket.

    Whatever the storage refuses is a `UserError`, except that a file does not exist.
    """

    if TYPE_CHECKING:

        def __init__(self, *parts: str) -> None: ...

    def __str__(self) -> str:
        text = "/".join(self.parts)
        return text.replace(":/", "://", 1) if self.parts and self.parts[0][-1] == ":" else text  # or a part of a URL

    @contextmanager
    def _opened(self, doing: str) -> Iterator[tuple[Any, str]]:
        """The file system, and this path in it."""
        try:
            from fsspec.core import url_to_fs

            yield url_to_fs(str(self))
        except (UserError, FileNotFoundError, FileExistsError):
            raise
        except ImportError as error:
            extra = "; pip install 'deep-data-consistency[s3]'" if self.parts[0] == "s3:" else ""
            raise UserError(f"{self} cannot be {doing}: {error}{extra}") from None
        except Exception as error:  # each file system and its libraries have their own
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{self} cannot be {doing} ({reason}); check the URL, your credentials and rights"
            ) from None

    def absolute(self) -> "Remote":
        return self

    def is_dir(self) -> bool:
        return self.suffix.lower() not in (*FORMATS, *_ARCHIVES)

    def is_file(self) -> bool:
        return not self.is_dir()

    def exists(self) -> bool:
        try:
            self.stat()
            return True
        except FileNotFoundError:
            return False

    def stat(self, **_: Any) -> Any:
        """The size, and the time of the last change by the storage's clock."""
        with self._opened("read") as (fs, path):
            fs.invalidate_cache()
            info = fs.info(path)
            folder, changed = info["type"] == "directory", 0.0
            with suppress(NotImplementedError):  # as over HTTP
                changed = 0.0 if folder else fs.modified(path).timestamp()
        mode = stat.S_IFDIR if folder else stat.S_IFREG
        return SimpleNamespace(st_mode=mode, st_size=info.get("size") or 0, st_mtime=changed)

    def files(self) -> dict[str, float]:
        """Every file below this folder, by its path below it, with the time of its last change (0 if unknown)."""
        with self._opened("listed") as (fs, path):
            fs.invalidate_cache()
            try:
                found = fs.find(path, detail=True)
                if not found and self.parts[0] in ("http:", "https:"):
                    fs.cat_file(path)  # raises what `find` hides
            except FileNotFoundError:
                raise UserError(f"{self} does not exist; check the bucket and the name") from None
        changed: dict[str, float] = {}
        for name, info in found.items():
            time = next(
                (info[key] for key in ("LastModified", "mtime", "last_modified", "created") if info.get(key)), 0.0
            )
            stamp = time.timestamp() if hasattr(time, "timestamp") else float(time) if isinstance(time, float) else 0.0
            changed[name.removeprefix(path.rstrip("/")).lstrip("/")] = stamp
        return changed

    def rglob(self, pattern: str, **_: Any) -> Iterator["Remote"]:  # type: ignore[override]
        """Every file below this folder."""
        return (self / name for name in self.files())

    def open(self, mode: str = "rb", *_: Any, **__: Any) -> Any:
        with self._opened("read") as (fs, path):
            return fs.open(path, mode)

    def read_bytes(self) -> bytes:
        try:
            with self._opened("read") as (fs, path):
                return bytes(fs.cat_file(path))
        except FileNotFoundError:
            raise UserError(f"{self} does not exist") from None

    def create(self, content: bytes) -> None:
        """Write a new file; `FileExistsError` if it is there."""
        with self._opened("written") as (fs, path):
            fs.pipe_file(path, content, mode="create")

    def send(self, file: Path) -> None:
        """Copy a local file here. It appears whole or not at all."""
        with self._opened("written") as (fs, path):
            if self.parts[0].removesuffix(":") in _WHOLE:
                fs.put_file(str(file), path)
                return
            part = str(Path(path).with_name(f".ddc-{uuid.uuid4().hex}.part"))
            fs.makedirs(str(Path(path).parent), exist_ok=True)
            fs.put_file(str(file), part)
            fs.mv(part, path)

    def unlink(self, missing_ok: bool = False) -> None:
        with self._opened("deleted") as (fs, path):
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def check_writable(self) -> None:
        """Refuse a folder that cannot be written, before there is something to write."""
        if self.parts[0] in ("http:", "https:"):
            raise UserError(f"{self} can be read, not written; give a folder or a bucket with -o")
        try:
            with self._opened("written") as (fs, path):
                probe = f"{path.rstrip('/')}/.ddc-{uuid.uuid4().hex}.part"
                fs.pipe_file(probe, b"ddc", mode="create")
                fs.rm_file(probe)
        except FileNotFoundError:
            raise UserError(f"{self} cannot be written: there is no such bucket; make it first") from None


@contextmanager
def mirrored(path: Path, often: str) -> Iterator[Path]:
    """A local folder in place of one behind a URL. What is there is fetched first, and what has changed is sent at the end.
    Files that match `often`, which are whole at any time, are sent every minute."""
    if not isinstance(path, Remote):
        yield path
        return
    path.check_writable()
    over = threading.Event()
    with TemporaryDirectory(prefix="ddc-") as name:
        folder = Path(name)
        for file in path.files():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes((path / file).read_bytes())

        def times(pattern: str) -> dict[str, int]:
            files = (file for file in folder.rglob(pattern) if file.is_file())
            return {file.relative_to(folder).as_posix(): file.stat().st_mtime_ns for file in files}

        sent = times("*")

        def send(pattern: str) -> None:
            for file, changed in times(pattern).items():
                if sent.get(file) != changed:
                    (path / file).send(folder / file)
                    sent[file] = changed

        def keep_sending() -> None:
            while not over.wait(60):
                with suppress(UserError, OSError):  # it may work the next time
                    send(often)

        thread = threading.Thread(target=keep_sending, daemon=True)
        thread.start()
        try:
            yield folder
        finally:
            over.set()
            thread.join()
            send("*")
            for file in sent.keys() - times("*").keys():
                (path / file).unlink(missing_ok=True)
