"""The page as a browser sees it: a real server on loopback, driven over HTTP."""

import contextlib
import http.server
import io
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from PIL import Image
from skimage import data
from starlette.requests import Request

from ddc.errors import UserError
from ddc.images import Picture
from ddc.pipeline import RestorationPipeline
from ddc.web.controls import Choices, Trial
from ddc.web.folders import ALIAS, Store, private_folder, remove_leftovers
from ddc.web.guard import Guard
from ddc.web.limits import Limits
from ddc.web.receiving import Refusal
from ddc.web.server import listen, serve
from ddc.web.service import Stopped
from processes import start

if TYPE_CHECKING:
    from ddc.web.page import RestorationPage

# Gradio takes seconds to import, and not every process that collects the tests needs it
pytestmark = pytest.mark.skipif(find_spec("gradio") is None, reason="gradio is not installed")
CHOICES = Choices(kind="Noise", steps=2)


class Visitor:
    """One browser tab."""

    def __init__(self, page: Any) -> None:
        self.page = page
        # certificates take long to read, and plain HTTP has no use for them
        self.http = httpx.Client(base_url=page.local_url, timeout=60, verify=False)
        self.session = uuid.uuid4().hex

    def upload(self, name: str, content: bytes) -> dict[str, Any]:
        answer = self.http.post("gradio_api/upload", files={"files": (name, content)})
        answer.raise_for_status()
        return {"path": answer.json()[0], "orig_name": name, "meta": {"_type": "gradio.FileData"}}

    def send(self, name: str, *values: Any) -> httpx.Response:
        """Trigger an event as the browser does."""
        index, event = next((i, fn) for i, fn in self.page.fns.items() if name in (fn.name or ""))
        order = {"data": list(values), "fn_index": index, "session_hash": self.session}
        return self.http.post(f"gradio_api/{'queue/join' if event.queue else 'run/predict'}", json=order)

    def completed(self) -> dict[str, Any]:
        """What the event that was sent to the queue gives, when it is done."""
        parameters = {"session_hash": self.session}
        with self.http.stream("GET", "gradio_api/queue/data", params=parameters) as stream:
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    message = json.loads(line[5:])
                    if message["msg"] == "process_completed":
                        return message
        raise AssertionError("the stream ended early")

    def call(self, name: str, *values: Any) -> dict[str, Any]:
        answer = self.send(name, *values)
        answer.raise_for_status()
        if "event_id" in answer.json():
            return self.completed()
        return {"success": True, "output": answer.json()}

    def give(self, name: str, content: bytes) -> dict[str, Any]:
        return self.call("uploaded", self.upload(name, content))

    def download(self, name: str) -> httpx.Response:
        return self.http.get(f"gradio_api/file={name}")

    def restore(self, choices: Choices = CHOICES) -> dict[str, Any]:
        return self.call("restore", None, None, *astuple(choices))


def png(seed: int = 0, side: int = 40) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(data.astronaut()[seed : seed + side, 180 : 180 + side]).save(buffer, "PNG")
    return buffer.getvalue()


def handlers_of(page: Any) -> "RestorationPage":
    from ddc.web.page import RestorationPage

    owners = (getattr(fn.fn, "__self__", None) for fn in page.fns.values())
    return next(owner for owner in owners if isinstance(owner, RestorationPage))


def wait_until_begun(page: Any, visitor: Visitor) -> None:
    """Wait until a visitor's restoration is no longer in the queue."""
    running, deadline = handlers_of(page).visitors.running, time.monotonic() + 60
    while not any(name.endswith(visitor.session) for name in running) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def page(tiny_model: Path) -> Iterator[Any]:
    """The page, served by the same function that `ddc web` calls."""
    import gradio  # noqa: F401  (before the private folder is made, where its import would write)

    ready, running = threading.Event(), []

    def started(server: Any, made: Any) -> None:
        running.extend([server, made])
        ready.set()

    pipe = RestorationPipeline.from_pretrained(tiny_model)
    limits = Limits(megapixels=0.5, queue=12, megabytes=1)
    bound = listen("127.0.0.1", None)
    thread = threading.Thread(target=serve, args=(pipe, limits, "127.0.0.1", bound, (), False, started))
    thread.start()
    assert ready.wait(60)
    server, made = running
    made.local_url = f"http://127.0.0.1:{bound.getsockname()[1]}/"
    made.server_port = bound.getsockname()[1]
    yield made
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    assert folder.is_dir() and any(folder.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == ["examples", "lock", "visitors"]  # none by Gradio itself
    server.should_exit = True
    thread.join(30)
    assert not folder.exists() and "GRADIO_TEMP_DIR" not in os.environ


def test_it_answers_to_this_computer_alone_and_calls_no_other(page: Any) -> None:
    assert page.analytics_enabled is False
    config = httpx.get(f"{page.local_url}config", verify=False).json()
    assert "Restore my photo" in json.dumps(config)
    assert "fonts.googleapis.com" not in httpx.get(f"{page.local_url}theme.css", verify=False).text


def test_upload_suggestion_restoration_download(page: Any) -> None:
    visitor = Visitor(page)
    suggestion = visitor.give("photo.png", png())
    assert suggestion["success"], suggestion
    _, facts, kind, *_ = suggestion["output"]["data"]
    assert "photo.png" in facts and "40 × 40 pixels" in facts and kind in ("Low resolution", "Noise")
    restored = visitor.restore()
    assert restored["success"], restored
    slider, summary, uncertainty, files, command, python = restored["output"]["data"]
    assert "40 × 40 pixels in" in summary and uncertainty["visible"] is False
    assert command.startswith("ddc restore photo.png") and "steps=2" in python
    assert files["value"][0]["orig_name"] == "photo_restored.png"
    download = visitor.download(files["value"][0]["path"])
    assert download.status_code == 200 and download.content.startswith(b"\x89PNG")
    assert len(slider) == 2


def test_it_opens_with_an_example(page: Any) -> None:
    visitor = Visitor(page)
    index = next(i for i, fn in page.fns.items() if any(event == "load" for _, event in fn.targets))
    order = {"data": [], "fn_index": index, "session_hash": visitor.session}
    values = visitor.http.post("gradio_api/run/predict", json=order).json()["data"]
    assert "An example" in values[1]
    for part in values[-6]:
        assert visitor.download(part["path"]).content.startswith(b"\x89PNG")
    assert visitor.restore()["success"]  # of the example


def test_a_preview_before_the_whole(page: Any) -> None:
    visitor = Visitor(page)
    assert visitor.call("preview", None, *astuple(CHOICES))["output"]["data"] == [{"__type__": "update"}] * 6
    visitor.give("photo.png", png(side=100))
    slider, text, *rest = visitor.call("preview", None, *astuple(CHOICES))["output"]["data"]
    assert len(slider) == 2 and text.startswith("A preview of 100 × 100 pixels")
    assert is_empty(rest)  # nothing is left of the result before
    index = next(i for i, fn in page.fns.items() if fn.name == "preview_here")
    order = {"data": [None, *astuple(CHOICES)], "fn_index": index, "session_hash": visitor.session}
    for place in ({"index": [10, 20]}, {"index": [-1, 2]}, {"index": "x"}, None):
        visitor.http.post("gradio_api/queue/join", json=order | {"event_data": place}).raise_for_status()
        assert visitor.completed()["success"]


def is_empty(results: list[Any]) -> bool:
    """Whether these are the last components of a result, all empty."""
    uncertainty, files, *codes = results
    return codes == ["", ""] and all(
        one.get("value") is None and one["visible"] is False for one in (uncertainty, files)
    )


def test_another_picture_ends_the_run_of_the_one_before(page: Any) -> None:
    handlers, visitor = handlers_of(page), Visitor(page)
    visitor.give("photo.png", png())
    with handlers.work.lock:  # it cannot be done before the other picture is chosen
        visitor.send("restore", None, None, *astuple(CHOICES)).raise_for_status()
        wait_until_begun(page, visitor)
        slider, summary, *rest = visitor.call("emptied")["output"]["data"]
    assert slider is None and summary == "" and is_empty(rest)
    assert visitor.completed()["output"]["data"] == [{"__type__": "update"}] * 6


def test_what_was_stopped_after_its_last_step_is_not_shown(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, visitor = handlers_of(page), Visitor(page)
    visitor.give("photo.png", png())
    restore = handlers.work.restore

    def late(*words: Any) -> Any:
        done = restore(*words)
        visitor.call("emptied")
        return done

    monkeypatch.setattr(handlers.work, "restore", late)
    assert visitor.restore()["output"]["data"] == [{"__type__": "update"}] * 6


def test_results_go_before_another_picture_is_examined(page: Any) -> None:
    targets = [page.blocks[block].elem_id or event for fn in page.fns.values() if fn.name == "emptied"
               for block, event in fn.targets]  # fmt: skip
    assert sorted(targets) == ["click", "picture", "picture"]  # of the gallery; uploaded and cleared


def test_several_pictures(page: Any, tmp_path: Path) -> None:
    visitor = Visitor(page)
    two = [("files", ("a.png", png())), ("files", ("b.png", png(10)))]
    names = visitor.http.post("gradio_api/upload", files=two).json()
    given = [{"path": name, "orig_name": f"{index}.png"} for index, name in enumerate(names)]
    files, said = visitor.call("restore_several", given, "one-pass", "webp")["output"]["data"]
    assert [file["orig_name"] for file in files["value"]] == ["1_0_restored.webp", "2_1_restored.webp"]
    assert said.count("\n") == 1 and "- 0.png" in said
    assert not visitor.call("restore_several", [], "one-pass", "webp")["success"]
    theirs = [{"path": Visitor(page).upload("t.png", png())["path"]}]
    for bad in (theirs, given * 20, "x", {}):
        assert visitor.send("restore_several", bad, "one-pass", "webp").status_code in (400, 403)
    assert not visitor.call("restore_several", given, "one-pass", "exe")["success"]
    files, said = visitor.call("emptied_several")["output"]["data"]  # when they are cleared
    assert files["value"] is None and files["visible"] is False and said == ""


def test_notes_are_shown_beside_the_result(page: Any) -> None:
    visitor = Visitor(page)
    visitor.give("<b>cup.png", png(side=100))
    summary = visitor.restore(Choices(kind="Blur", blur=4, steps=1))["output"]["data"][1]
    first, noise, note = summary.split("\n\n")
    assert "100 × 100 pixels in" in first and "cup.png has noise of about 0.0067, which is removed as well" in noise
    assert note.startswith("⚠ ") and "cup.png is sharper or noisier than gauss4" in note
    assert "<" not in note and "/" not in note and note.endswith("or a larger sigma.")


def test_several_samples_show_a_map(page: Any) -> None:
    visitor = Visitor(page)
    visitor.give("photo.png", png())
    shown = visitor.restore(Choices(kind="Noise", steps=2, samples=3))["output"]["data"]
    assert shown[2]["visible"] is True and len(shown[3]["value"]) == 4


@pytest.mark.parametrize(
    ("name", "content", "answer"),
    [
        ("a.png", b"no picture at all", "a.png is not a picture"),
        ("a.txt", b"text", "not a picture"),
        ("<b>x.png", b"", "empty"),
    ],
)
def test_what_is_no_picture_is_told_so(page: Any, name: str, content: bytes, answer: str) -> None:
    visitor = Visitor(page)
    visitor.give("photo.png", png())
    _, facts, *_, shown = visitor.give(name, content)["output"]["data"]
    assert facts.startswith("⚠") and answer in facts and "/" not in facts and "<" not in facts
    assert shown is None and not visitor.restore()["success"]  # not the one before, either


def test_large_uploads_are_refused(page: Any) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (10_000, 100)).save(buffer, "PNG")
    _, facts, *_ = Visitor(page).give("wide.png", buffer.getvalue())["output"]["data"]
    assert "10000×100 pixels" in facts
    buffer = io.BytesIO()
    Image.new("1", (13_000, 13_000)).save(buffer, "PNG")
    _, facts, *_ = Visitor(page).give("bomb.png", buffer.getvalue())["output"]["data"]
    assert "bomb.png claims 169 megapixels" in facts
    with pytest.raises(httpx.HTTPStatusError, match="413"):
        Visitor(page).upload("heavy.png", bytes(2 * 2**20))


def test_nothing_to_restore(page: Any) -> None:
    told = Visitor(page).restore()
    assert not told["success"] and "Upload a picture first" in told["output"]["error"]


def test_files_outside_the_uploads_cannot_be_named(page: Any, tmp_path: Path) -> None:
    """A path that a client makes up, with and without what marks it as a file for Gradio."""
    (tmp_path / "secret.png").write_bytes(png())
    visitor, other = Visitor(page), Visitor(page)
    theirs = other.upload("theirs.png", png())["path"]
    folder = os.environ["GRADIO_TEMP_DIR"]
    for path in (str(tmp_path / "secret.png"), theirs, theirs.replace(ALIAS, folder), f"{ALIAS}/lock", f"{ALIAS}/../x"):
        for meta in ({}, {"meta": {"_type": "gradio.FileData"}}):
            for event in ("uploaded", "try_uploaded"):
                assert visitor.send(event, {"path": path, "orig_name": "a.png", **meta}).status_code == 403
        assert visitor.download(path).status_code in (403, 404)
    assert other.download(theirs).content == png()
    assert httpx.get(f"{page.local_url}gradio_api/file={theirs}", verify=False).status_code == 403


def test_a_session_belongs_to_its_visitor(page: Any) -> None:
    """Who learns the name of another visitor's session has nothing of it."""
    visitor, thief = Visitor(page), Visitor(page)
    visitor.give("photo.png", png())
    thief.session = visitor.session
    assert not thief.restore()["success"]
    assert visitor.restore()["success"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example", "0.0.0.0"])
def test_other_hosts_are_not_answered(page: Any, host: str) -> None:
    answer = httpx.get(page.local_url, headers={"Host": host}, verify=False)
    assert answer.status_code in (400, 421) and "Restore" not in answer.text


def test_hosts_that_are_meant_are_answered(page: Any) -> None:
    for host in ("localhost", "LOCALHOST:1234", "[::1]:80", f"127.0.0.1:{page.server_port}"):
        assert httpx.get(page.local_url, headers={"Host": host}, verify=False).status_code == 200
    made = Guard(None, None, None, Store(Path()), "0.0.0.0", ["Restore.Example.org"])
    assert made.any_address and {"restore.example.org", "localhost"} <= made.hosts
    assert "localhost" not in Guard(None, None, None, Store(Path()), "192.0.2.1").hosts


def test_other_pages_cannot_upload_or_send_events(page: Any) -> None:
    visitor, files = Visitor(page), {"files": ("a.png", png())}
    foreign = [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
    foreign += [{"Origin": f"http://127.0.0.1:{page.server_port + 1}"}, {"Sec-Fetch-Site": "same-site"}]
    for headers in foreign:
        assert visitor.http.post("gradio_api/upload", files=files, headers=headers).status_code == 403
        assert visitor.http.post("gradio_api/queue/join", json={}, headers=headers).status_code == 403
    own = {"Origin": page.local_url.rstrip("/")}
    assert visitor.http.post("gradio_api/upload", files=files, headers=own).status_code == 200


def test_no_answer_names_the_private_folder(page: Any) -> None:
    visitor, folder = Visitor(page), os.environ["GRADIO_TEMP_DIR"]
    visitor.give("photo.png", png())
    told = json.dumps(visitor.restore())
    for text in (
        visitor.http.get("").text,
        visitor.http.get("config").text,
        visitor.upload("a.png", png())["path"],
        told,
    ):
        assert ALIAS in text and folder not in text


def test_addresses_in_files_are_not_fetched(page: Any) -> None:
    called = threading.Event()

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            called.set()

    with http.server.HTTPServer(("127.0.0.1", 0), Listener) as listener:
        threading.Thread(target=listener.serve_forever, args=[0.02], daemon=True).start()
        url, visitor = f"http://127.0.0.1:{listener.server_port}/a.png", Visitor(page)
        mine = visitor.upload("a.png", png())
        assert visitor.send("uploaded", mine | {"path": url}).status_code == 403
        assert visitor.call("uploaded", mine | {"url": url})["success"]
        assert visitor.http.get(f"gradio_api/file={url}").status_code in (403, 404)
        assert visitor.http.get(f"gradio_api/proxy={url}").status_code == 404
        listener.shutdown()
    assert not called.is_set()


def test_the_command_names_the_file_as_the_visitor_does(page: Any) -> None:
    visitor = Visitor(page)
    assert visitor.call("uploaded", visitor.upload("a.png", png()) | {"orig_name": "x+y, [1].png"})["success"]
    assert "ddc restore 'x+y, [1].png' -o 'x+y, [1]_restored.png'" in visitor.restore()["output"]["data"][4]


def test_names_that_no_file_can_have(page: Any) -> None:
    visitor = Visitor(page)
    mine = visitor.upload("a.png", png())
    for name in ("é" * 250 + ".png", "a\0b.png", "../../x.png", "", 7, "a\nb.png"):
        assert visitor.call("uploaded", mine | {"orig_name": name})["success"]
        done = visitor.restore()
        assert done["success"] and done["output"]["data"][3]["value"][0]["orig_name"].endswith("_restored.png")


def test_a_painting_is_kept_in_a_file(page: Any) -> None:
    visitor, canvas = Visitor(page), io.BytesIO()
    visitor.give("photo.png", png())
    pixels = np.zeros((40, 40, 4), np.uint8)
    pixels[10:20, 10:20] = 255
    Image.fromarray(pixels).save(canvas, "PNG")
    fields = {"fn_name": "accept_blobs", "component_id": "1", "session_hash": visitor.session, "id": "brush1"}
    for kind, index in (("layer", "0"), ("composite", "null")):
        sent = fields | {"type": kind, "index": index}
        answer = visitor.http.post(
            "gradio_api/component_server", data=sent, files={"file": ("l.png", canvas.getvalue())}
        )
        assert answer.status_code == 200
    done = visitor.call("restore", None, {"id": "brush1"}, *astuple(Choices(kind="Holes", steps=1)))
    assert done["success"] and [file["orig_name"] for file in done["output"]["data"][3]["value"]][-1] == "mask.png"
    editors = [block for block in page.blocks.values() if block.get_block_name() == "imageeditor"]
    assert editors and not any(editor.blob_storage for editor in editors)
    assert not Visitor(page).call("restore", None, {"id": "brush1"}, *astuple(Choices(kind="Holes")))["success"]


def test_what_the_reader_cannot_take_is_told_in_a_sentence(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a TIFF file with a strange orientation once raised a SystemError."""

    def fail(path: Path) -> Any:
        raise SystemError

    monkeypatch.setattr(Picture, "read", fail)
    facts = Visitor(page).give("exif6.tif", png())["output"]["data"][1]
    assert facts == "⚠ exif6.tif is damaged or unusual (SystemError); save it again, as a PNG."


@pytest.mark.parametrize(
    "order",
    [[], "x", 1, {}, {"data": []}, {"data": {}, "fn_index": 0}, {"data": [1] * 99, "fn_index": 0}]
    + [{"data": [], "fn_index": index, "session_hash": "a"} for index in (-1, 9999, "0", None, True, 0.5)],
)
def test_events_of_another_form_are_refused(page: Any, order: Any) -> None:
    for address in ("queue/join", "run/predict"):
        answer = Visitor(page).http.post(f"gradio_api/{address}", json=order)
        assert answer.status_code == 400 and answer.json()["detail"]


def test_values_of_another_form_are_refused(page: Any, capfd: pytest.CaptureFixture[str]) -> None:
    visitor = Visitor(page)
    visitor.give("photo.png", png())
    for field, value in (
        ("steps", "x"),
        ("steps", 1e9),
        ("blur", -1),
        ("solver", "none"),
        ("kind", 7),
        ("seed", 2**52),
    ):
        told = visitor.call("restore", None, None, *astuple(replace(CHOICES, **{field: value})))
        assert not told["success"] and "expected" in told["output"]["error"].lower(), (field, told)
    for value in ([], {}, "x" * 500, 10**30):
        order = [None, None, *astuple(replace(CHOICES, steps=value))]  # type: ignore[arg-type]
        assert visitor.send("restore", *order).status_code == 400
    assert "Traceback" not in capfd.readouterr().err


def test_ten_visitors_get_their_own_pictures(page: Any) -> None:
    def visit(number: int) -> tuple[str, str, bytes]:
        visitor = Visitor(page)
        visitor.give(f"photo{number}.png", png(seed=4 * number, side=32 + number))
        shown = visitor.restore()["output"]["data"]
        file = shown[3]["value"][0]
        content = visitor.download(file["path"]).content
        return shown[4], file["path"], content

    with ThreadPoolExecutor(10) as pool:
        results = list(pool.map(visit, range(10)))
    for number, (command, _, content) in enumerate(results):
        assert f"photo{number}.png" in command
        width, height = np.frombuffer(content[16:24], ">u4")
        assert (width, height) == (32 + number, 32 + number)
    assert len({path for _, path, _ in results}) == 10
    assert Visitor(page).restore()["success"] is False  # a newcomer has nobody's picture


def test_the_queue_has_an_end(page: Any) -> None:
    visitors = [Visitor(page) for _ in range(14)]
    for visitor in visitors:
        visitor.give("photo.png", png())
    with handlers_of(page).work.lock:  # as if a long restoration were running
        answers = []
        for visitor in visitors:
            answers.append(visitor.send("restore", None, None, *astuple(CHOICES)))
            if len(answers) == 1:
                wait_until_begun(page, visitor)  # it is taken from the queue
        told = visitors[-1].call("forecast", None, *astuple(CHOICES))["output"]["data"][0]
    assert [answer.status_code for answer in answers[:12]] == [200] * 12
    assert answers[13].status_code == 503 and "full" in answers[13].text
    assert "40 × 40 pixels" in told  # who is refused can still change the settings
    for visitor, answer in zip(visitors, answers, strict=True):
        assert answer.status_code == 503 or visitor.completed()["success"]


def test_a_forecast_is_a_sentence_or_a_warning(page: Any) -> None:
    visitor = Visitor(page)
    visitor.give("photo.png", png())
    wanted = Choices(kind="Low resolution", scale=4)
    assert "160 × 160 pixels" in visitor.call("forecast", None, *astuple(wanted))["output"]["data"][0]
    wanted = Choices(kind="JPEG artefacts", scale=4, solver="ddrm")
    assert visitor.call("forecast", None, *astuple(wanted))["output"]["data"][0].startswith("⚠ ddrm needs")


def test_controls_are_shown_where_they_matter(page: Any) -> None:
    names = ["scale", "shape", "blur", "softness", "angle", "quality", "strength", "editor"]
    visible = {
        Choices(): {"strength"},
        Choices(kind="Low resolution"): {"scale"},
        Choices(kind="Blur"): {"shape", "blur", "strength"},
        Choices(kind="Blur", shape="Out of focus"): {"shape", "blur", "softness", "strength"},
        Choices(kind="Blur", shape="The camera moved"): {"shape", "blur", "softness", "angle", "strength"},
        Choices(kind="Holes"): {"editor"},
        Choices(kind="Remove something"): {"editor"},
        Choices(kind="JPEG artefacts"): {"quality"},
        Choices(kind="Noise"): {"strength"},
    }
    for choices, expected in visible.items():
        updates = Visitor(page).call("visibility", *astuple(choices))["output"]["data"]
        assert {name for name, update in zip(names, updates, strict=True) if update["visible"]} == expected


def test_a_painting_goes_when_the_brush_is_hidden(page: Any) -> None:
    visitor = Visitor(page)
    visitor.give("photo.png", png())
    (hidden,) = visitor.call("unpainted", None, "Noise")["output"]["data"]
    assert not hidden["layers"] and hidden["background"]["path"].endswith("canvas.png")  # to paint on again
    assert visitor.call("unpainted", None, "Holes")["output"]["data"] == [{"__type__": "update"}]


def test_try_it(page: Any) -> None:
    visitor = Visitor(page)
    assert visitor.call("try_uploaded", visitor.upload("clean.png", png(side=64)))["success"]
    trial = Trial("denoise", 0.1, "ddc", 2, "pinv", 1, longest=64)
    done = visitor.call("compare", None, *astuple(trial))
    assert done["success"], done
    assert "PSNR" in done["output"]["data"][4] and "ddc degrade" in done["output"]["data"][6]


def test_painting_is_read_from_the_layers() -> None:
    from ddc.web.page import painted

    layer = np.zeros((4, 6, 4), np.uint8)
    layer[1, 2, 3] = 200
    mask = painted([layer, layer * 0])
    assert mask is not None and mask.shape == (4, 6) and mask.sum() == 200
    assert painted([]) is None
    with pytest.raises(UserError, match="differ in size"):
        painted([layer, layer[:2]])


def test_stopping_is_no_error_and_leaves_the_page_as_it_was(page: Any) -> None:
    handlers, visitor = handlers_of(page), Visitor(page)
    visitor.give("photo.png", png())
    with handlers.work.lock:  # it cannot be done before it is stopped
        visitor.send("restore", None, None, *astuple(CHOICES)).raise_for_status()
        wait_until_begun(page, visitor)
        visitor.call("stop")
    done = visitor.completed()
    assert done["success"] and done["output"]["data"] == [{"__type__": "update"}] * 6


def test_a_closed_tab_stops_its_run(page: Any) -> None:
    handlers = handlers_of(page)
    report = handlers.visitors.begin("gone", lambda share, text: None)
    report(0.1, "still here")
    handlers.visitors.stop("gone")
    assert "gone" not in handlers.visitors.running
    with pytest.raises(Stopped):
        report(0.2, "gone")


def test_ports(page: Any) -> None:
    with listen("127.0.0.1", None) as bound:
        assert bound.getsockname()[1] >= 7860
    with pytest.raises(UserError, match=f"port {page.server_port} is taken"):
        listen("127.0.0.1", page.server_port)
    with pytest.raises(UserError, match="cannot be used"):
        listen("203.0.113.7", None)
    with pytest.raises(UserError, match="the port is 70000"):
        listen("127.0.0.1", 70_000)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ending_the_process_leaves_nothing_behind(tiny_model: Path, tmp_path: Path, number: int) -> None:
    """Without the page, whose packages take long to import; tests/attack/test_web.py ends a process with the page."""
    said, temporary = tmp_path / "said", tmp_path / "temporary"
    os.mkfifo(said)
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    environment.pop("GRADIO_TEMP_DIR", None)
    words = ["web", "--model", tiny_model, "--device", "cpu", "--no-page"]
    process = start(words, said, environment=environment)
    with said.open() as lines:
        assert "http://127.0.0.1:" in lines.readline()
        (folder,) = temporary.glob("ddc-web-*")
        assert not any(folder.glob("examples/*/*.png"))
        (folder / "file").write_text("of a visitor")
        remove_leftovers(temporary)
        assert any(temporary.iterdir())  # it is still running
        os.kill(process.pid or 0, number)
        process.join(30)
        assert process.exitcode == (0 if number != signal.SIGKILL else -number)
    if number == signal.SIGKILL:
        assert any(temporary.iterdir())
        remove_leftovers(temporary)  # as the next start does
    assert not list(temporary.iterdir())


def test_the_private_folder_is_private_and_goes() -> None:
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "a").write_text("x")
    assert not folder.exists()


@pytest.mark.parametrize(
    ("origin", "refused"),
    [("https://restore.example.org", False), ("https://restore.example.org:8443", False), ("https://evil.org", True)],
)
def test_a_reverse_proxy_passes_on_its_host(origin: str, refused: bool) -> None:
    """As docs/serving.md has it: the proxy's host name, without a port, and https outside."""
    guard = Guard(None, None, None, Store(Path()), "127.0.0.1", ["restore.example.org"])
    headers = [(b"host", b"restore.example.org"), (b"origin", origin.encode()), (b"x-forwarded-proto", b"https")]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers})
    with pytest.raises(Refusal) if refused else contextlib.nullcontext():
        guard._check_sender(request)
