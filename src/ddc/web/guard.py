"""What stands between the network and Gradio. It answers to known hosts and to pages of its own origin alone, tells
visitors apart, stores and serves their files, and passes on only what the page itself would send."""

import asyncio
import hashlib
import ipaddress
import json
import math
import re
import secrets
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from ddc.errors import UserError
from ddc.web.api import Api
from ddc.web.folders import ALIAS, Store
from ddc.web.limits import MOST_FILES
from ddc.web.receiving import (
    Message,
    Receive,
    Refusal,
    Send,
    base_name,
    file_name,
    read_body,
    read_form,
    stated_length,
    write_upload,
)

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
EVERY_ADDRESS = {"0.0.0.0", "::", ""}
COOKIE = "ddc-visitor"
API = "/gradio_api/"
# What the page asks for. All other addresses of Gradio are closed.
PAGES = {"/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt", f"{API}info", f"{API}app_id"}
STATIC = ("/assets/", "/static/", "/svelte/")
HEADERS = {b"host", b"accept", b"accept-encoding", b"content-type", b"x-forwarded-proto", b"if-none-match", b"range"}
SECURE = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}
IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".jfif": "image/jpeg"} | {
    ".webp": "image/webp",
    ".bmp": "image/bmp",
}
LARGEST_LAYER = 8 * 2**20  # bytes of a painted layer
SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
VISITOR_LENGTH = 32


class Guard:
    """An ASGI application around Gradio's, if there is a page, and the API."""

    def __init__(self, app: Any, page: Any, api: Api, store: Store, host: str, names: Iterable[str] = ()) -> None:
        self.app, self.page, self.api, self.store = app, page, api, store
        self.any_address = host in EVERY_ADDRESS
        self.hosts = {name.strip("[]").lower() for name in (host, *names)} - EVERY_ADDRESS
        if self.any_address or self.hosts & LOOPBACK:
            self.hosts |= LOOPBACK
        if self.any_address:
            self.hosts |= {socket.gethostname().lower()}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._answer(Request(scope, receive), receive, send)
            except Refusal as refusal:
                text, plain = str(refusal), scope["path"] == f"{API}upload"
                answer = PlainTextResponse if plain else lambda text, status: JSONResponse({"detail": text}, status)
                # what was not read of a refused request would be taken for the next one
                end = {"connection": "close"} if scope["method"] == "POST" else {}
                await answer(text, refusal.status)(scope, receive, self._outgoing(send, end))

    async def _answer(self, request: Request, receive: Receive, send: Send) -> None:
        self._check_sender(request)
        if request.scope["path"].startswith("/api") or self.page is None:
            await self.api.answer(request, receive, self._outgoing(send, {}))
            return
        token = request.cookies.get(COOKIE, "")
        cookie = {}
        if not re.fullmatch(r"[A-Za-z0-9_-]{43}", token):
            token = secrets.token_urlsafe(32)
            secure = "; Secure" if request.headers.get("x-forwarded-proto") == "https" else ""
            cookie = {"set-cookie": f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict{secure}"}
        visitor = hashlib.sha256(token.encode()).hexdigest()[:VISITOR_LENGTH]
        send = self._outgoing(send, cookie)
        if request.method in ("GET", "HEAD"):
            response = await self._get(request, visitor, receive, send)
        elif request.method == "POST":
            response = await self._post(request, visitor, receive, send)
        else:
            raise Refusal(405, "only GET and POST are answered")
        if response is not None:
            await response(request.scope, receive, send)

    def _check_sender(self, request: Request) -> None:
        """Refuse other hosts, so that no foreign name leads here, and requests that other pages send."""
        hosts = request.headers.getlist("host")
        name, port = _host_and_port(hosts[0]) if len(hosts) == 1 else ("", "")
        if name not in self.hosts and not (self.any_address and _is_address(name)):
            raise Refusal(421, "this page does not answer to that host name; add it with --allowed-host")
        site = request.headers.get("sec-fetch-site", "same-origin")
        origin = request.headers.get("origin")
        if origin is not None:
            from_name, from_port = _host_and_port(urlsplit(origin).netloc) if "://" in origin else ("", "")
            # a proxy may leave the port out of the host
            if from_name != name or (port and from_port and port != from_port):
                raise Refusal(403, "requests of other pages are not answered")
        elif request.method not in ("GET", "HEAD") and site not in ("same-origin", "none"):
            raise Refusal(403, "requests of other pages are not answered")

    # ------------------------------------------------------------------------------------------------------
    # requests

    async def _get(self, request: Request, visitor: str, receive: Receive, send: Send) -> Response | None:
        path: str = request.scope["path"]
        if ".." in path or "\\" in path or "\0" in path:
            raise Refusal(404, "there is nothing at this address")
        if path.startswith(f"{API}file="):
            return self._file(visitor, path.removeprefix(f"{API}file="))
        if path == f"{API}upload_progress":  # uploads are stored here, so that Gradio knows nothing of their progress
            return Response('data: {"msg": "done"}\n\n', media_type="text/event-stream")
        query = b""
        if path == f"{API}queue/data":
            session = parse_qs(request.scope["query_string"].decode("latin-1")).get("session_hash", [""])[0]
            scoped = _scoped(visitor, session)
            if scoped not in self.page._queue.pending_messages_per_session:  # Gradio would write a traceback
                raise Refusal(404, "no event of this page is in the queue")
            query = f"session_hash={scoped}".encode()
        elif path.startswith(f"{API}heartbeat/"):
            path = f"{API}heartbeat/{_scoped(visitor, path.removeprefix(f'{API}heartbeat/'))}"
        elif path not in PAGES and not path.startswith(STATIC):
            raise Refusal(404, "there is nothing at this address")
        await self._pass_on(request, path, query, receive, send)
        return None

    async def _post(self, request: Request, visitor: str, receive: Receive, send: Send) -> Response | None:
        path: str = request.scope["path"]
        if path == f"{API}upload":
            return await self._upload(request, visitor, receive)
        if path == f"{API}component_server":
            return await self._painted(request, visitor, receive)
        clean = {
            f"{API}queue/join": self._event,
            f"{API}run/predict": self._event,
            f"{API}cancel": _cancelling,
            f"{API}reset": lambda visitor, order: {"event_id": _text(order.get("event_id"))},
        }.get(path)
        if clean is None:
            raise Refusal(404, "there is nothing at this address")
        if path == f"{API}queue/join":
            self.api.check_line()
        content = await read_body(request, receive)
        try:
            order = json.loads(content, parse_constant=lambda name: 1 / 0)
            json.dumps(order, ensure_ascii=False).encode()  # half a character, which no answer could repeat, raises
        except (ValueError, RecursionError, ZeroDivisionError):
            raise Refusal(400, "the request is not JSON that this page reads") from None
        if not isinstance(order, dict):
            raise Refusal(400, "the request is not a JSON object")
        body = json.dumps(clean(visitor, order)).encode()
        sent = False

        async def cleaned() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._pass_on(request, path, b"", cleaned, send, len(body))
        return None

    async def _pass_on(
        self, request: Request, path: str, query: bytes, receive: Receive, send: Send, length: int | None = None
    ) -> None:
        """Let Gradio answer. Of the headers it sees only those that it needs."""
        # answers in which the folder's path is hidden must not be compressed
        wanted = HEADERS if path.startswith(STATIC) else HEADERS - {b"accept-encoding"}
        headers = [(name, value) for name, value in request.scope["headers"] if name in wanted]
        if length is not None:
            headers = [(name, value) for name, value in headers if name != b"content-type"]
            headers += [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
        scope = {**request.scope, "path": path, "raw_path": path.encode(), "query_string": query, "headers": headers}
        await self.app(scope, receive, send)

    def _event(self, visitor: str, order: dict[str, Any]) -> dict[str, Any]:
        """An event of the page, with nothing in it but what the page sends."""
        index, values = order.get("fn_index"), order.get("data")
        event = self.page.fns.get(index) if type(index) is int else None
        if event is None or not isinstance(values, list) or len(values) != len(event.inputs):
            raise Refusal(400, "this is not an event of the page, or not all of its values")
        pairs = zip(event.inputs, values, strict=True)
        return {
            "data": [self._value(visitor, component.get_block_name(), value) for component, value in pairs],
            "fn_index": index,
            "session_hash": _scoped(visitor, order.get("session_hash")),
            "event_data": _place(order.get("event_data")),
            "trigger_id": order.get("trigger_id") if type(order.get("trigger_id")) is int else None,
        }

    def _value(self, visitor: str, component: str, value: Any) -> Any:
        """The value of a component. A file is one of this visitor's, and has no address that Gradio would fetch."""
        if component == "state" or value is None:
            return None
        if component == "image":
            return self._file_data(visitor, value)
        if component == "file":
            if not isinstance(value, list) or len(value) > MOST_FILES:
                raise Refusal(400, f"this is not a list of at most {MOST_FILES} files")
            return [self._file_data(visitor, one) for one in value]
        if component == "imageeditor":
            if not isinstance(value, dict) or not isinstance(value.get("layers") or [], list):
                raise Refusal(400, "this is not a painting")
            layers = [self._file_data(visitor, layer) for layer in (value.get("layers") or [])[:8] if layer]
            return {"layers": layers, "id": _text(value.get("id"))}
        if not isinstance(value, (bool, int, float, str)):
            raise Refusal(400, f"{component} has a value of the wrong type")
        if isinstance(value, str):
            return _text(value, 200)
        if not math.isfinite(value) or abs(value) > 2**53:
            raise Refusal(400, f"{component} has a number that is too large")
        return value

    def _file_data(self, visitor: str, value: Any) -> dict[str, Any]:
        path = self.store.find(visitor, value.get("path")) if isinstance(value, dict) else None
        if path is None:
            raise Refusal(403, "there is no such file of yours; upload it again")
        name = base_name(value["orig_name"]) if isinstance(value.get("orig_name"), str) else path.name
        return {"path": str(path), "orig_name": name, "meta": {"_type": "gradio.FileData"}}

    # ------------------------------------------------------------------------------------------------------
    # files

    def _file(self, visitor: str, name: str) -> Response:
        path = self.store.find(visitor, name)
        if path is None:
            raise Refusal(403, "there is no such file of yours")
        kind = IMAGES.get(path.suffix.lower())
        disposition = "inline" if kind else "attachment"
        headers = {"cache-control": "private, no-store"}
        kind = kind or "application/octet-stream"
        return FileResponse(path, 200, headers, kind, filename=path.name, content_disposition_type=disposition)

    async def _upload(self, request: Request, visitor: str, receive: Receive) -> Response:
        """Store files in the visitor's folder; the answer is their names there."""
        names = []
        async with self.api.receiver.uploaded(request, receive, MOST_FILES) as form:
            for given in self.api.receiver.files(form, "files"):
                # the same content has the same name, or the editor would send it again and again
                content = (await asyncio.to_thread(hashlib.file_digest, given.file, "sha256")).hexdigest()  # type: ignore[arg-type]
                path = self.store.home(visitor) / content[:VISITOR_LENGTH] / file_name(given.filename)
                await asyncio.to_thread(write_upload, path, given)
                names.append(f"{ALIAS}/{path.relative_to(self.store.folder).as_posix()}")
        return JSONResponse(names)

    async def _painted(self, request: Request, visitor: str, receive: Receive) -> Response:
        """Store a layer that was painted. The other pictures of the editor are not needed."""
        try:
            with self.store.room(stated_length(request, LARGEST_LAYER)):
                form = await read_form(request, receive, LARGEST_LAYER)
                given, index = form.get("file"), str(form.get("index"))
                if form.get("fn_name") != "accept_blobs" or not isinstance(given, UploadFile):
                    raise Refusal(404, "there is nothing at this address")
                if form.get("type") == "layer" and re.fullmatch(r"[0-7]", index):
                    name = _text(str(form.get("id")))
                    await asyncio.to_thread(
                        write_upload, self.store.home(visitor) / f"painted-{name}" / f"{index}.png", given
                    )
        except UserError as error:
            raise Refusal(507, str(error)) from None
        except OSError:
            raise Refusal(507, "the painting could not be stored; try again later") from None
        return JSONResponse(None)

    # ------------------------------------------------------------------------------------------------------
    # answers

    def _outgoing(self, send: Send, more: dict[str, str]) -> Send:
        """`send`, with headers that protect the visitor, and without the folder's path."""
        start: Message | None = None
        streaming, parts = False, []

        async def outgoing(message: Message) -> None:
            nonlocal start, streaming
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in (SECURE | more).items()]
                message["headers"] = [*message.get("headers", []), *added]
                kind = dict(message["headers"]).get(b"content-type", b"")
                streaming = kind.startswith(b"text/event-stream")
                if kind.startswith((b"text/html", b"application/json")):
                    start = message  # it says how long the answer is, which is not yet known
                    return
            elif message["type"] == "http.response.body" and streaming:
                message["body"] = self.store.hide(message.get("body", b""))
            elif message["type"] == "http.response.body" and start is not None:
                parts.append(message.get("body", b""))
                if message.get("more_body"):
                    return
                body = self.store.hide(b"".join(parts))
                headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
                length = (b"content-length", str(len(body)).encode())
                await send({**start, "headers": [*headers, length]})
                message["body"] = body
            await send(message)

        return outgoing


def _host_and_port(text: str) -> tuple[str, str]:
    """`name:port`, `[::1]:port` or either without a port."""
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]@/\s]+)(?::(\d{1,5}))?", text.lower())
    return (found[1].strip("[]").rstrip("."), found[2] or "") if found else ("", "")


def _is_address(name: str) -> bool:
    """Whether it is an IP address, which no foreign name server can make lead here."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _scoped(visitor: str, session: object) -> str:
    """The name of a session, of this visitor alone."""
    return visitor + _text(session)


def visitor_of(session: str | None) -> str:
    """The visitor to whom a session that Gradio knows belongs."""
    return str(session)[:VISITOR_LENGTH]


def _text(value: object, most: int = 0) -> str:
    """A name that the page makes up, or another text of at most that many characters."""
    if value is None and not most:
        return ""
    if not isinstance(value, str) or not (len(value) <= most if most else SESSION.fullmatch(value)):
        raise Refusal(400, "the request has a value that this page does not send")
    return value


def _place(data: Any) -> dict[str, Any]:
    """Where a picture was clicked: a column and a row, or None. Nothing else that an event may carry is passed on."""
    index = data.get("index") if isinstance(data, dict) else None
    if not isinstance(index, list) or len(index) != 2 or not all(type(n) is int and 0 <= n < 10**6 for n in index):
        index = None
    return {"index": index, "value": None}


def _cancelling(visitor: str, order: dict[str, Any]) -> dict[str, Any]:
    index = order.get("fn_index")
    if type(index) is not int or not 0 <= index < 1000:
        raise Refusal(400, "this is not an event of the page")
    session = _scoped(visitor, order.get("session_hash"))
    return {"session_hash": session, "fn_index": index, "event_id": _text(order.get("event_id"))}
