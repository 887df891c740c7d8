"""The page as a browser sees it: a real server on loopback, driven over HTTP."""

import io
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from skimage import data

pytest.importorskip("gradio")

from ddc.errors import UserError
from ddc.pipeline import RestorationPipeline
from ddc.web.controls import Choices, Trial
from ddc.web.limits import Limits
from ddc.web.page import RestorationPage, painted
from ddc.web.server import free_port, private_folder, serve
from ddc.web.service import Stopped

CHOICES = Choices(kind="Noise", steps=2)


class Visitor:
    """One browser tab."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.http = httpx.Client(base_url=page.local_url, timeout=60)
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

    def restore(self, choices: Choices = CHOICES) -> dict[str, Any]:
        return self.call("restore", None, None, *astuple(choices))


def png(seed: int = 0, side: int = 40) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(data.astronaut()[seed : seed + side, 180 : 180 + side]).save(buffer, "PNG")
    return buffer.getvalue()


def handlers_of(page: Any) -> RestorationPage:
    owners = (getattr(fn.fn, "__self__", None) for fn in page.fns.values())
    return next(owner for owner in owners if isinstance(owner, RestorationPage))


@pytest.fixture(scope="module")
def page(tiny_model: Path) -> Iterator[Any]:
    """The page, served by the same function that `ddc web` calls."""
    ready, done, running = threading.Event(), threading.Event(), []

    def wait(made: Any) -> None:
        running.append(made)
        ready.set()
        done.wait(120)

    pipe = RestorationPipeline.from_pretrained(tiny_model)
    limits = Limits(megapixels=0.5, queue=12, megabytes=1)
    thread = threading.Thread(target=serve, args=(pipe, limits, "127.0.0.1", None, False, wait))
    thread.start()
    assert ready.wait(60)
    yield running[0]
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    assert folder.is_dir() and any(folder.iterdir())
    done.set()
    thread.join(30)
    assert not folder.exists() and "GRADIO_TEMP_DIR" not in os.environ


def test_it_answers_to_this_computer_alone_and_calls_no_other(page: Any) -> None:
    assert page.server_name == "127.0.0.1" and page.share is False
    assert page.analytics_enabled is False
    config = httpx.get(f"{page.local_url}config").json()
    assert "Restore my photo" in json.dumps(config)
    assert "fonts.googleapis.com" not in httpx.get(f"{page.local_url}theme.css").text


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
    download = httpx.get(f"{page.local_url}gradio_api/file={files['value'][0]['path']}")
    assert download.status_code == 200 and download.content.startswith(b"\x89PNG")
    assert len(slider) == 2


def test_notes_are_shown_beside_the_result(page: Any) -> None:
    visitor = Visitor(page)
    visitor.give("<b>cup.png", png(side=100))
    summary = visitor.restore(Choices(kind="Blur", blur=4, steps=1))["output"]["data"][1]
    first, note = summary.split("\n\n")
    assert "100 × 100 pixels in" in first
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
    (tmp_path / "secret.png").write_bytes(png())
    visitor = Visitor(page)
    order = {"path": str(tmp_path / "secret.png"), "orig_name": "a.png", "meta": {"_type": "gradio.FileData"}}
    assert not visitor.call("uploaded", order)["success"]
    assert httpx.get(f"{page.local_url}gradio_api/file={tmp_path / 'secret.png'}").status_code in (403, 404)


def test_ten_visitors_get_their_own_pictures(page: Any) -> None:
    def visit(number: int) -> tuple[str, str, bytes]:
        visitor = Visitor(page)
        visitor.give(f"photo{number}.png", png(seed=4 * number, side=32 + number))
        shown = visitor.restore()["output"]["data"]
        file = shown[3]["value"][0]
        content = httpx.get(f"{page.local_url}gradio_api/file={file['path']}").content
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
            time.sleep(0.1)  # the first one is taken from the queue
        told = visitors[-1].call("forecast", None, *astuple(CHOICES))["output"]["data"][0]
    assert [answer.status_code for answer in answers[:12]] == [200] * 12
    assert answers[13].status_code == 503 and "full" in answers[13].text
    assert "40 × 40 pixels" in told  # who is refused can still change the settings
    for visitor, answer in zip(visitors, answers, strict=True):
        assert answer.status_code == 503 or visitor.completed()["success"]


def test_a_forecast_is_a_sentence_or_a_warning(page: Any) -> None:
    visitor = Visitor(page)
    visitor.give("photo.png", png())
    wanted = Choices(scale=4)
    assert "160 × 160 pixels" in visitor.call("forecast", None, *astuple(wanted))["output"]["data"][0]
    wanted = Choices(kind="JPEG artefacts", scale=4, solver="ddrm")
    assert visitor.call("forecast", None, *astuple(wanted))["output"]["data"][0].startswith("⚠ ddrm needs")


def test_controls_are_shown_where_they_matter(page: Any) -> None:
    names = ["scale", "shape", "blur", "softness", "angle", "quality", "sigma", "editor"]
    visible = {
        Choices(kind="Low resolution"): {"scale", "sigma"},
        Choices(kind="Blur"): {"shape", "blur", "sigma"},
        Choices(kind="Blur", shape="Out of focus"): {"shape", "blur", "softness", "sigma"},
        Choices(kind="Blur", shape="The camera moved"): {"shape", "blur", "softness", "angle", "sigma"},
        Choices(kind="Holes"): {"editor", "sigma"},
        Choices(kind="JPEG artefacts"): {"quality", "sigma"},
        Choices(kind="Noise"): {"sigma"},
    }
    for choices, expected in visible.items():
        updates = Visitor(page).call("visibility", *astuple(choices))["output"]["data"]
        assert {name for name, update in zip(names, updates, strict=True) if update["visible"]} == expected


def test_try_it(page: Any) -> None:
    visitor = Visitor(page)
    assert visitor.call("try_uploaded", visitor.upload("clean.png", png(side=64)))["success"]
    trial = Trial("denoise", 0.1, "ddc", 2, "pinv", 1, longest=64)
    done = visitor.call("compare", None, *astuple(trial))
    assert done["success"], done
    assert "PSNR" in done["output"]["data"][4] and "ddc degrade" in done["output"]["data"][6]


def test_painting_is_read_from_the_layers() -> None:
    layer = np.zeros((4, 6, 4), np.uint8)
    layer[1, 2, 3] = 200
    mask = painted({"background": None, "layers": [layer, layer * 0], "composite": None})
    assert mask is not None and mask.shape == (4, 6) and mask.sum() == 200
    assert painted(None) is None and painted({"layers": []}) is None


def test_stopping_is_no_error_and_leaves_the_page_as_it_was(page: Any) -> None:
    handlers, visitor = handlers_of(page), Visitor(page)
    visitor.give("photo.png", png())
    with handlers.work.lock:  # it cannot be done before it is stopped
        visitor.send("restore", None, None, *astuple(CHOICES)).raise_for_status()
        deadline = time.monotonic() + 60
        while visitor.session not in handlers.visitors.running and time.monotonic() < deadline:
            time.sleep(0.01)
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
    assert free_port("127.0.0.1", None) >= 7860
    with pytest.raises(UserError, match=f"port {page.server_port} is taken"):
        free_port("127.0.0.1", page.server_port)
    with pytest.raises(UserError, match="cannot be used"):
        free_port("203.0.113.7", None)
    with pytest.raises(UserError, match="the port is 70000"):
        free_port("127.0.0.1", 70_000)


def test_ending_the_process_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddc", "web", "--model", str(tiny_model), "--device", "cpu"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    environment.pop("GRADIO_TEMP_DIR", None)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "http://127.0.0.1:" in process.stdout.readline()
        assert any(tmp_path.glob("ddc-web-*/examples/*/*.png"))
        process.terminate()
        assert process.wait(30) == 0
    assert not list(tmp_path.iterdir())


def test_the_private_folder_is_private_and_goes() -> None:
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "a").write_text("x")
    assert not folder.exists()
