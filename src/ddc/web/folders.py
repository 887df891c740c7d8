"""The private folder of a running page: a part for each visitor, the examples, and a limit on the whole."""

import contextlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from ddc.errors import UserError
from ddc.storage import changed_at

PREFIX = "ddc-web-"
ALIAS = "/ddc-files"  # what the folder is called in requests and answers, so that nobody learns where it is
SMALLEST = 65_536  # bytes that a file counts for at least, so that the number of files is limited too
IDLE = 300  # seconds without a request, after which a visitor's files may go when the room is needed


class Store:
    """The files of the visitors. A visitor's files lie in a folder of their own, which no other visitor can name."""

    def __init__(self, folder: Path, gigabytes: float = 1.0) -> None:
        self.folder = folder
        self.examples = folder / "examples"
        self.visitors = folder / "visitors"
        self.limit = int(gigabytes * 1e9)
        self.reserved = 0
        self.lock = threading.Lock()

    def home(self, visitor: str) -> Path:
        """The folder of a visitor, who has just made a request."""
        home = self.visitors / visitor
        home.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            os.utime(home)
        return home

    def new_folder(self, visitor: str) -> Path:
        """A new folder for files of a visitor."""
        folder = self.home(visitor) / uuid.uuid4().hex
        folder.mkdir()
        return folder

    def find(self, visitor: str, name: object) -> Path | None:
        """The file that a request names: one of this visitor's, or an example; otherwise None."""
        if not isinstance(name, str) or not name.startswith(f"{ALIAS}/") or "\0" in name or len(name) > 2000:
            return None
        try:
            path = (self.folder / name.removeprefix(f"{ALIAS}/")).resolve()
            inside = any(path.is_relative_to(part) for part in (self.visitors / visitor, self.examples))
            return path if inside and path.is_file() else None
        except (OSError, ValueError, RuntimeError):  # a name that is too long, or no text of the file system
            return None

    def hide(self, answer: bytes) -> bytes:
        """An answer without the folder's path."""
        for path in {str(self.folder), quote(str(self.folder))}:
            answer = answer.replace(path.encode(), ALIAS.encode())
        return answer

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Reserve room for files of this many bytes while they are written. Files of visitors who have left make way;
        where that is not enough, the files are refused."""
        size = max(size, SMALLEST)
        with self.lock:
            used = {home: _used(home) for home in self.visitors.glob("*")}
            free = self.limit - self.reserved - sum(used.values())
            for home in sorted(used, key=changed_at):  # the one that was used longest ago comes first
                if free < size and changed_at(home) < time.time() - IDLE:
                    shutil.rmtree(home, ignore_errors=True)
                    free += used[home]
            if free < size:
                raise UserError("this page has no room for more files at present; try again later, or a smaller one")
            self.reserved += size
        try:
            yield
        finally:
            with self.lock:
                self.reserved -= size

    def remove_old(self, minutes: float) -> None:
        """Delete visitors' files that are older than this, and the folders that become empty."""
        before = time.time() - 60 * minutes
        for path in _below(self.visitors):
            with contextlib.suppress(OSError):  # it is not empty, or already gone
                if path.lstat().st_mtime < before:
                    path.rmdir() if path.is_dir() else path.unlink()

    @contextlib.contextmanager
    def cleaning(self, minutes: float) -> Iterator[None]:
        """Delete old files in the background."""
        ended = threading.Event()

        def clean() -> None:
            while not ended.wait(60):
                self.remove_old(minutes)

        threading.Thread(target=clean, daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def _below(folder: Path) -> Iterator[Path]:
    """Everything below a folder, the content of a folder before the folder. What vanishes meanwhile is passed over."""
    for parent, folders, files in os.walk(folder, topdown=False):
        yield from (Path(parent, name) for name in files + folders)


def _used(folder: Path) -> int:
    """The bytes of the files in a folder."""
    total = 0
    for path in _below(folder):
        with contextlib.suppress(OSError):
            total += 0 if path.is_dir() else max(path.lstat().st_size, SMALLEST)
    return total


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can read, for all files that Gradio and the page write; removed at the end. What a
    page that was killed left behind is removed first."""
    remove_leftovers(Path(tempfile.gettempdir()))
    before = {key: value for key, value in os.environ.items() if key == "GRADIO_TEMP_DIR"}
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name, _locked(Path(name) / "lock"):
        os.environ |= {"GRADIO_TEMP_DIR": name, "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
        try:
            yield Path(name).resolve()
        finally:
            del os.environ["GRADIO_TEMP_DIR"]
            os.environ |= before


def remove_leftovers(parent: Path) -> None:
    """Remove the folders of pages of this user that no longer run. The system releases the lock of a killed process."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or still locked
            ours = hasattr(os, "getuid") and folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if ours and (folder / "lock").is_file():
                with _locked(folder / "lock"):
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; raises an OSError if another process holds it."""
    with path.open("a") as file:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
