"""The API for programs: `POST /api/restore` takes a picture and returns it restored. It shares the page's queue, limits
and private folder."""

import asyncio
import html
import json
import logging
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response

from ddc import __version__
from ddc.errors import UserError
from ddc.formats import FORMATS, open_image
from ddc.jobs import AS_MASK, Options
from ddc.jobs import Request as Order
from ddc.pipeline import RestorationResult
from ddc.solvers.posterior import Posterior
from ddc.web.controls import LARGEST_SEED
from ddc.web.limits import SMALLEST_SIDE
from ddc.web.receiving import Receive, Receiver, Refusal, Send, base_name, file_name, write_upload
from ddc.web.service import Service, Stopped
from ddc.web.uploads import Upload

logger = logging.getLogger("ddc")

RESTORE = "/api/restore"
FILES = ("picture", "mask")  # fields of the form; all others are parameters
MASK_FIELD = "in the field mask of the form (white is known, black a hole)"
NUMBER = r"[0-9]+(\.[0-9]*)?|\.[0-9]+"
LONGEST = 60  # characters of a parameter
TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "TIFF": "image/tiff",
    "BMP": "image/bmp",
    "HEIF": "image/heic",
}
ENDINGS = ("png", "jpg", "webp", "tiff", "bmp", "heic")
FIGURES = {
    "Task": "the task; nothing, if the picture was left as it is",
    "Sigma": "the noise that was assumed",
    "Evaluations": "of a network, for one sample",
    "Seconds": "of the restoration, without waiting",
    "Found": "a JSON list of what the task auto found, in words",
    "Notes": "a JSON list of warnings",
}
ERRORS = {
    400: "a parameter or the upload is wrong",
    408: "the upload came too slowly",
    413: "the upload is too large",
    422: "this picture cannot be restored in this way",
    503: "too many are waiting; try again later",
    507: "there is no room; try again later",
}


class Api:
    """The part of the server that programs use. `queued` is the number of visitors who wait for the page."""

    def __init__(self, work: Service, queued: Callable[[], int] = lambda: 0) -> None:
        self.work, self.queued = work, queued
        self.receiver = Receiver(work.store, work.limits)
        self.turn = asyncio.Lock()  # first come, first served
        self.waiting = 0
        self.parameters = _parameters(work)

    async def answer(self, request: Request, receive: Receive, send: Send) -> None:
        path, get = request.scope["path"].rstrip("/"), request.method in ("GET", "HEAD")
        response: Response
        if path == RESTORE and request.method == "POST":
            await self._restore(request, receive, send)
            return
        if path == RESTORE:
            raise Refusal(405, "only POST is answered here")
        if path in ("", "/api") and get:
            response = HTMLResponse(self.page())
        elif path == "/api/openapi.json" and get:
            response = JSONResponse(self.openapi())
        else:
            raise Refusal(404, f"there is nothing at this address; expected POST {RESTORE}")
        await response(request.scope, receive, send)

    def check_line(self) -> None:
        """Refuse whoever would be one too many in the queue."""
        if self.waiting + self.queued() >= self.work.limits.queue:
            raise Refusal(503, "the queue is full; try again in a minute")

    async def _restore(self, request: Request, receive: Receive, send: Send) -> None:
        query = request.scope["query_string"]
        self._values(_pairs(query))  # what is wrong in it is refused before anything is uploaded
        self.check_line()
        visitor = secrets.token_hex(16)  # nobody has the cookie of this visitor, who leaves after the answer
        folder = self.work.store.new_folder(visitor)
        try:
            async with self.receiver.uploaded(request, receive, files=len(FILES)) as form:
                given = self._given(query, _fields(form))
                upload = await self._stored(folder, self.receiver.file(form, "picture"))
                mask = None
                if isinstance(form.get("mask"), UploadFile):
                    mask = await self._stored(folder / "mask", self.receiver.file(form, "mask"))
            self.check_line()
            response = await self._in_turn(given, upload, mask, receive)
            await response(request.scope, receive, send)
        finally:
            shutil.rmtree(self.work.store.visitors / visitor, ignore_errors=True)

    def _values(self, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """The values of parameters, each checked by itself."""
        values: dict[str, Any] = {}
        for name, text in pairs:
            if name not in self.parameters or name in values:
                wrong = f"{name} is given twice" if name in values else f"there is no parameter {name[:40]!r}"
                raise Refusal(400, f"{wrong}; expected {', '.join(self.parameters)}")
            values[name] = _value(name, text, self.parameters[name])
        return values

    def _given(self, query: bytes, fields: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
        """The parameters of a request, from its query and the fields of its form, checked together."""
        values, more = self._values(_pairs(query)), self._values(fields)
        for name, value in more.items():
            if values.get(name, value) != value:
                raise Refusal(400, f"{name} is {values[name]!r} in the query and {value!r} in the form; give it once")
        given = {name: schema["default"] for name, schema in self.parameters.items()} | values | more
        try:
            order = Order(given["task"], **_options(given))
            order.check()
        except UserError as error:
            raise Refusal(400, str(error)) from None
        if given["task"] == "custom":
            raise Refusal(400, "the task custom runs a file of yours, which is not done here; use `ddc restore`")
        return given

    async def _stored(self, folder: Path, given: UploadFile) -> Upload:
        """The uploaded file in its folder; a name without a picture's ending gets one by its content."""
        name, path = base_name(given.filename), folder / file_name(given.filename)
        await asyncio.to_thread(write_upload, path, given)
        if path.suffix.lower() in FORMATS:
            return Upload(path, name)
        try:
            with open_image(path) as image:
                ending = f".{image.format.lower()}"
        except Exception:  # whatever the decoder raises; the reader says what is wrong
            ending = ".png"
        return Upload(path.rename(path.with_name(path.name + (ending if ending in FORMATS else ".jpg"))), name)

    async def _in_turn(self, given: dict[str, Any], upload: Upload, mask: Upload | None, receive: Receive) -> Response:
        """Restore the picture when its turn comes. A sender who has gone is dropped from the line."""
        stop = threading.Event()
        gone, turn = asyncio.ensure_future(receive()), asyncio.ensure_future(self.turn.acquire())
        self.waiting += 1
        try:
            try:
                await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.waiting -= 1
            if gone.done():
                raise Refusal(400, "the request broke off")
            run = asyncio.ensure_future(asyncio.to_thread(self._restored, given, upload, mask, stop))
            await asyncio.wait({run, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                stop.set()  # it ends with its next step
            return await run
        finally:
            stop.set()
            gone.cancel()
            if not turn.cancel():
                self.turn.release()

    def _restored(self, given: dict[str, Any], upload: Upload, mask: Upload | None, stop: threading.Event) -> Response:
        """The answer with the restored picture."""

        def progress(_: float) -> None:
            if stop.is_set():
                raise Stopped("the request broke off")

        own = upload.path.suffix.lower()
        ending = own if given["format"] == "same" else f".{given['format']}"
        target = upload.path.parent / "result" / f"{Path(file_name(upload.name)).stem}_restored{ending}"
        try:
            options: Options = {**_options(given), "progress": progress}
            result = self.work.restore_file(upload, given["task"], options, target, given["quality"], mask)
        except UserError as error:
            text = upload.rename(str(error), target).replace(AS_MASK, MASK_FIELD)
            raise Refusal(422, mask.rename(text) if mask else text) from None
        except Exception as error:  # memory that ran out, or a fault of ours
            logger.error("a restoration failed: %s", UserError(f"{type(error).__name__}: {error}"))
            raise Refusal(500, f"the restoration failed ({type(error).__name__}); try a smaller picture") from None
        headers = _figures(result) | {"cache-control": "no-store"}
        return FileResponse(target, 200, headers, TYPES[FORMATS[ending]], filename=target.name)

    # ------------------------------------------------------------------------------------------------------
    # documentation

    def openapi(self) -> dict[str, Any]:
        """The description of the API in the format OpenAPI 3.1."""
        detail = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
        picture = {"type": "string", "contentMediaType": "application/octet-stream"}
        fields = dict.fromkeys(FILES, picture) | self.parameters
        body = {"type": "object", "properties": fields, "required": ["picture"], "additionalProperties": False}
        restored = {
            "description": "the restored picture; of several samples, their mean",
            "headers": {f"X-DDC-{name}": {"description": text, "schema": {}} for name, text in FIGURES.items()},
            "content": {kind: {} for kind in TYPES.values()},
        }
        refused = {"application/json": {"schema": detail}}
        return {
            "openapi": "3.1.0",
            "info": {"title": "ddc", "version": __version__, "description": "Restore pictures with diffusion models."},
            "paths": {
                RESTORE: {
                    "post": {
                        "operationId": "restore",
                        "summary": "Restore a picture",
                        "parameters": [
                            {"name": name, "in": "query", "schema": schema, "description": schema["description"]}
                            for name, schema in self.parameters.items()
                        ],
                        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": body}}},
                        "responses": {"200": restored}
                        | {str(code): {"description": text, "content": refused} for code, text in ERRORS.items()},
                    }
                }
            },
        }

    def page(self) -> str:
        """The same for people, without scripts."""
        limits = self.work.limits
        sections: dict[str, list[tuple[str, ...]]] = {
            "Parameters, in the query or as fields of the form": [
                (name, str(schema["default"] if schema["default"] is not None else ""), schema["description"])
                for name, schema in self.parameters.items()
            ],
            "Headers of the answer": [(f"X-DDC-{name}", text) for name, text in FIGURES.items()],
            "Errors": [(str(code), text) for code, text in ERRORS.items()],
        }
        tables = "".join(f"<h2>{title}</h2>{_table(rows)}" for title, rows in sections.items())
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>ddc API</title>'
            "<style>body{font-family:system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
            "td{padding:.2em 1em .2em 0;vertical-align:top}</style>"
            f"<h1>POST {RESTORE}</h1><p>Send a picture in the field <code>picture</code> of a form, and for the task "
            "inpaint a mask of its size in the field <code>mask</code> (white is known, black is a hole), unless the "
            "picture has transparent pixels. The answer is the restored picture, or JSON with the reason in "
            f"<code>detail</code>. Pictures have at least {SMALLEST_SIDE} pixels on each side, results up to "
            f"{limits.megapixels:g} megapixels, and files up to "
            f'{limits.megabytes} MB. For programs: <a href="/api/openapi.json">openapi.json</a>.</p>'
            f"<pre>curl -F picture=@bad.jpg 'http://HOST{RESTORE}?task=auto&amp;format=png' -o better.png</pre>"
            f"{tables}</html>"
        )


def _parameters(work: Service) -> dict[str, dict[str, Any]]:
    """The parameters of a restoration, as JSON schemas."""

    def one(kind: str, default: Any, description: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "default": default, "description": description, **more}

    names, most = work.solver_names(), work.limits.samples
    usual = None if work.pipe.solver in names else names[0]  # without one, the plan of auto may choose
    realism = one("number", None, "From the least error, 0, to a sample, 1; for posterior", minimum=0, maximum=1)
    return {
        "task": one(
            "string", "auto", "What to undo, as in sr4, deblur, jpeg or denoise; auto finds out", maxLength=LONGEST
        ),
        "sigma": one("string", None, "The noise, for pixels in [0, 1], as in 0.05, or auto", maxLength=20),
        "solver": one("string", usual, f"The algorithm: {', '.join(names)}; by default the model's", enum=names),
        "steps": one("integer", None, "Sampling steps; by default those of the solver", minimum=1, maximum=1000),
        **({"realism": realism} if Posterior.name in names else {}),
        "seed": one("integer", 0, "Random seed", minimum=-LARGEST_SEED, maximum=LARGEST_SEED),
        "samples": one("integer", 1, f"Restorations, 1 to {most}; the answer is their mean", minimum=1, maximum=most),
        "format": one("string", "same", f"Format of the answer: same or {', '.join(ENDINGS)}", enum=["same", *ENDINGS]),
        "quality": one("integer", 95, "Quality of a JPEG or HEIC answer", minimum=1, maximum=100),
    }


def _pairs(query: bytes) -> list[tuple[str, str]]:
    """The parameters of a query, as text."""
    try:
        return parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=20)
    except ValueError:
        raise Refusal(400, "the query has too many parameters, or is no text") from None


def _fields(form: FormData) -> list[tuple[str, str]]:
    """The parameters among the fields of a form, as text. A file in another field than its own is refused."""
    fields = []
    for name, part in form.multi_items():
        if isinstance(part, UploadFile) and name not in FILES:
            raise Refusal(400, f"there is a file in the field {name[:40]!r}; expected the field picture, or mask")
        if isinstance(part, str) and name in FILES:
            raise Refusal(400, f"the field {name} is a text; expected a file, as in `curl -F {name}=@{name}.png`")
        if isinstance(part, str):
            fields.append((name, part))
    return fields


def _value(name: str, text: str, schema: dict[str, Any]) -> Any:
    """The value of a parameter; one that its schema excludes is refused, one that is long before it is searched."""
    if len(text) > (longest := schema.get("maxLength", LONGEST)):
        raise Refusal(400, f"{name} is {text[:40]!r}…; expected a short text, of at most {longest} characters")
    if schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        if not re.fullmatch(r"-?[0-9]{1,10}", text) or not low <= int(text) <= high:
            raise Refusal(400, f"{name} is {text[:40]!r}; expected a whole number from {low} to {high}")
        return int(text)
    if schema["type"] == "number":
        low, high = schema["minimum"], schema["maximum"]
        if not re.fullmatch(NUMBER, text) or not low <= float(text) <= high:
            raise Refusal(400, f"{name} is {text[:40]!r}; expected a number from {low} to {high}")
        return float(text)
    allowed = schema.get("enum")
    if (allowed and text not in allowed) or not text.isprintable():
        raise Refusal(400, f"{name} is {text[:40]!r}; expected {' or '.join(allowed) if allowed else 'a short text'}")
    return text


def _options(given: dict[str, Any]) -> Options:
    sigma = given["sigma"]
    if sigma not in (None, "auto"):
        if not re.fullmatch(NUMBER, sigma):
            raise Refusal(400, f"sigma is {sigma!r}; expected a number such as 0.05, or auto")
        sigma = float(sigma)
    options = {name: given[name] for name in ("solver", "steps", "realism", "seed", "samples") if name in given}
    if options.get("realism") is not None and options["solver"] is None:
        options["solver"] = Posterior.name  # no other has it
    return {"sigma": sigma, **options}  # type: ignore[typeddict-item]


def _figures(result: RestorationResult) -> dict[str, str]:
    texts = {"Found": result.found[0], "Notes": result.notes[0]}
    figures = {
        "Task": result.tasks[0],
        "Sigma": f"{result.sigma[0]:.6g}",
        "Evaluations": str(result.evaluations),
        "Seconds": f"{result.seconds:.3f}",
        **{name: json.dumps(list(text)) for name, text in texts.items()},  # in ASCII, as headers must be
    }
    return {f"x-ddc-{name.lower()}": value for name, value in figures.items()}


def _table(rows: list[tuple[str, ...]]) -> str:
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
