"""Reading what visitors send: within its limits, in time, and under a name that every file system takes."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from ddc.errors import UserError
from ddc.web.folders import Store
from ddc.web.limits import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

LARGEST_ORDER, ORDER_SECONDS = 256 * 1024, 8  # of the JSON that the page sends
UPLOAD_SECONDS, IDLE_SECONDS = 300, 8  # an upload may take that long, and pause that long
UPLOADS = 32  # at once


class Refusal(Exception):
    """A request that is not answered, and the sentence that says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Receiver:
    """Receives the uploads of all visitors, a limited number at once."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self.store, self.limits = store, limits
        self.uploads = 0

    @contextlib.asynccontextmanager
    async def uploaded(self, request: Request, receive: Receive, files: int = 1) -> AsyncIterator[FormData]:
        """The parts of an upload, while there is room to store them."""
        most = self.limits.megabytes * 2**20 + LARGEST_ORDER
        length = stated_length(request, most)
        if self.uploads >= UPLOADS:
            raise Refusal(503, "too many files are being uploaded; try again in a minute")
        self.uploads += 1
        try:
            with self.store.room(2 * length):  # while it arrives, there are two of it
                yield await read_form(request, receive, most, files)
        except UserError as error:
            raise Refusal(507, str(error)) from None
        except OSError:
            raise Refusal(507, "the file could not be stored; try again later") from None
        finally:
            self.uploads -= 1

    def file(self, form: FormData, name: str) -> UploadFile:
        """The file of that name among the parts."""
        given = self.files(form, name)
        if len(given) > 1:
            raise Refusal(400, f"there are several files in the field {name}; send one picture in each request")
        return given[0]

    def files(self, form: FormData, name: str) -> list[UploadFile]:
        """The files of that name among the parts."""
        given = [part for part in form.getlist(name) if isinstance(part, UploadFile)]
        if not given:
            raise Refusal(400, f"there is no file in this upload; expected one in the field {name}")
        if any((one.size or 0) > self.limits.megabytes * 2**20 for one in given):
            raise Refusal(413, f"the file is larger than {self.limits.megabytes} MB")
        return given


def stated_length(request: Request, most: int) -> int:
    """The length that the request states, or the largest that is taken; a larger one is refused."""
    text = request.headers.get("content-length", str(most))
    if not re.fullmatch(r"\d{1,15}", text) or int(text) > most:
        raise Refusal(413, f"the request is larger than {most / 2**20:.3g} MB")
    return int(text)


def _bounded(receive: Receive, most: int) -> Receive:
    """`receive`, which refuses more bytes than this, and a sender that pauses too long."""
    total = 0

    async def bounded() -> Message:
        nonlocal total
        try:
            message = await asyncio.wait_for(receive(), IDLE_SECONDS)
        except TimeoutError:
            raise Refusal(408, "the request came too slowly") from None
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the request broke off")
        total += len(message.get("body", b""))
        if total > most:
            raise Refusal(413, f"the request is larger than {most / 2**20:.3g} MB")
        return message

    return bounded


async def read_body(request: Request, receive: Receive) -> bytes:
    """The body of a small request."""
    stated_length(request, LARGEST_ORDER)
    more, parts = _bounded(receive, LARGEST_ORDER), []
    try:
        async with asyncio.timeout(ORDER_SECONDS):
            while True:
                message = await more()
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise Refusal(408, "the request came too slowly") from None


async def read_form(request: Request, receive: Receive, most: int, files: int = 1) -> FormData:
    """The parts of an upload. A large file lies in a temporary file without a name."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refusal(400, "this is not an upload; expected multipart/form-data")
    reader = Request({**request.scope, "app": None}, _bounded(receive, most))
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            return await reader.form(max_files=files, max_fields=10, max_part_size=LARGEST_ORDER)
    except TimeoutError:
        raise Refusal(408, "the upload took too long") from None
    except (Refusal, OSError):
        raise
    except Exception:  # whatever the parser raises, the upload is not what a browser sends
        raise Refusal(400, "the upload cannot be read") from None


def base_name(name: str | None) -> str:
    """The name of a file without its folders, as its sender knows it: a seed depends on it. No control character and no
    half of a character is left in it."""
    base = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "", (name or "").replace("\\", "/").rpartition("/")[2])[:255]
    return base if base.strip(". ") else "upload"


def file_name(name: str | None) -> str:
    """A name that every file system takes, with the suffix of the given one."""
    plain = Path(re.sub(r"[^\w .()-]", "_", (name or "").replace("\\", "/").rpartition("/")[2])).name.lstrip(". ")
    suffix = Path(plain).suffix[:10]
    return (plain.removesuffix(suffix).encode()[:80].decode(errors="ignore").strip() or "upload") + suffix


def write_upload(path: Path, given: UploadFile) -> None:
    """Store an upload. A file of that name stays whole for whoever is reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        given.file.seek(0)
        with temporary.open("wb") as file:
            while part := given.file.read(2**20):
                file.write(part)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
