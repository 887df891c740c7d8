"""The API as a program sees it: a real server on loopback, without the page."""

import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from skimage import data

pytest.importorskip("uvicorn")

from starlette.datastructures import UploadFile

from ddc.cli import main
from ddc.errors import UserError
from ddc.images import Picture
from ddc.pipeline import RestorationPipeline
from ddc.web.api import NUMBER, Api, _options
from ddc.web.folders import Store
from ddc.web.limits import Limits
from ddc.web.receiving import Refusal, base_name, write_upload
from ddc.web.server import listen, serve
from ddc.web.service import Service
from ddc.web.uploads import Upload
from tiny import tiny_posterior

CLEAN = data.astronaut()[20:60, 180:228]
# certificates take long to read, and plain HTTP has no use for them
get, post = partial(httpx.get, verify=False), partial(httpx.post, verify=False)


def encoded(pixels: np.ndarray = CLEAN, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[SimpleNamespace]:
    """What `ddc web --no-page` serves, where Gradio cannot be imported."""
    ready, running, blocked = threading.Event(), [], pytest.MonkeyPatch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "gradio"]:
        blocked.delitem(sys.modules, name)
    blocked.setitem(sys.modules, "gradio", None)
    pipe, limits = RestorationPipeline.from_pretrained(tiny_model), Limits(megapixels=0.1, queue=2, megabytes=1)
    bound = listen("127.0.0.1", None)

    def started(server: Any, page: Any) -> None:
        running.extend([server, page])
        ready.set()

    words = (pipe, limits, "127.0.0.1", bound, (), False, started, False)
    thread = threading.Thread(target=serve, args=words, daemon=True)
    thread.start()
    assert ready.wait(60)
    made, page = running
    assert page is None
    found = made.config.app.api
    yield SimpleNamespace(url=f"http://127.0.0.1:{bound.getsockname()[1]}", api=found, work=found.work)
    try:
        until(lambda: not files_in(found.work.store.visitors))  # nothing is kept after an answer
    finally:
        made.should_exit = True
        thread.join(30)
        blocked.undo()


def send(
    server: Any, name: str = "a.png", content: bytes | None = None, mask: bytes | None = None, **query: Any
) -> Any:
    files = {"picture": (name, encoded() if content is None else content)}
    if mask is not None:
        files["mask"] = ("mask.png", mask)
    return post(f"{server.url}/api/restore", params=query, files=files, timeout=60)


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    text = answer.json()["detail"]
    assert answer.status_code == status and "\n" not in text and "/tmp" not in text, answer.text
    assert all(word in text for word in words), text


def test_it_restores_as_the_command_line_does(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(encoded(kind="JPEG", quality=20))
    words = ["--task", "jpeg", "--seed", "3", "--samples", "2", "--sigma", "0.02", "--no-fast", "--device", "cpu"]
    assert (
        main(["restore", str(tmp_path / "photo.jpg"), "-o", str(tmp_path / "out"), "--model", str(tiny_model), *words])
        == 0
    )
    answer = send(
        server, "photo.jpg", (tmp_path / "photo.jpg").read_bytes(), task="jpeg", seed=3, samples=2, sigma=0.02
    )
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/jpeg"
    assert answer.content == (tmp_path / "out" / "photo.jpg").read_bytes()
    figures = {name: answer.headers[f"x-ddc-{name}"] for name in ("task", "sigma", "evaluations", "seconds")}
    assert figures["task"] == "jpeg20" and figures["sigma"] == "0.02" and figures["evaluations"] == "10"
    assert float(figures["seconds"]) > 0 and 'filename="photo_restored.jpg"' in answer.headers["content-disposition"]


def test_the_seed_depends_on_the_name_as_it_was_sent(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x+y, [1].png"
    path.write_bytes(encoded())
    words = ["--task", "sr2", "--steps", "1", "--no-fast", "--device", "cpu", "--model", str(tiny_model)]
    assert main(["restore", str(path), "-o", str(tmp_path / "out"), *words]) == 0
    answer = send(server, path.name, path.read_bytes(), task="sr2", steps=1)
    assert answer.content == (tmp_path / "out" / path.name).read_bytes()
    assert send(server, "x_y_ _1_.png", path.read_bytes(), task="sr2", steps=1).content != answer.content
    for given, name in (
        ("C:\\a/x+y.png", "x+y.png"),
        ("a\r\n\ud800b.png", "ab.png"),
        ("..", "upload"),
        (None, "upload"),
    ):
        assert base_name(given) == name
    assert len(base_name("é" * 400)) == 255


def test_parameters_may_be_fields_of_the_form(server: Any) -> None:
    url, picture = f"{server.url}/api/restore", {"picture": ("a.png", encoded())}
    answer = post(f"{url}?task=sr2", data={"task": "sr2", "steps": "1", "format": "bmp"}, files=picture)
    assert answer.headers["x-ddc-task"] == "sr2" and answer.headers["content-type"] == "image/bmp"
    assert Image.open(io.BytesIO(answer.content)).size == (96, 80) and answer.headers["x-ddc-evaluations"] == "2"
    for fields, *words in (
        ({"task": "sr4"}, "task is 'sr2' in the query and 'sr4' in the form", "give it once"),
        ({"tusk": "sr2"}, "there is no parameter 'tusk'", "expected task, sigma"),
        ({"steps": ["1", "1"]}, "steps is given twice"),
        ({"steps": "0"}, "steps is '0'", "1 to 1000"),
        ({"solver": "ddrm", "sigma": "7"}, "sigma is 7"),  # with the query's task
        ({"mask": "@mask.png"}, "the field mask is a text", "expected a file"),
    ):
        refused(post(f"{url}?task=sr2", data=fields, files=picture), 400, *words)
    refused(post(url, files=picture | {"task": ("a.png", b"x")}), 400, "a file in the field 'task'", "field picture")


def test_a_good_picture_comes_back_as_it_was_sent(server: Any) -> None:
    sent = encoded(data.chelsea()[60:180, 120:240], "WEBP", quality=97)
    answer = send(server, "fine.webp", sent)
    assert answer.headers["x-ddc-task"] == "nothing" and answer.headers["content-type"] == "image/webp"
    assert answer.content == sent == send(server, "fine.webp", sent, format="webp").content
    assert answer.content == send(server, "fine", sent, format="webp", samples=2).content
    for name, kind in (("fine.webp", "png"), ("fine.png", "same")):  # the second has the wrong ending
        answer = send(server, name, sent, format=kind)
        assert Image.open(io.BytesIO(answer.content)).format == "PNG", answer.text
        assert answer.headers["content-type"] == "image/png" and answer.headers["x-ddc-task"] == "nothing"


def test_notes_are_also_about_the_files(server: Any) -> None:
    pages = [Image.fromarray(CLEAN).convert("RGBA") for _ in range(2)]
    buffer, masks = io.BytesIO(), io.BytesIO()
    pages[0].save(buffer, "TIFF", save_all=True, append_images=pages[1:])
    answer = send(server, "x+y.tiff", buffer.getvalue(), task="denoise", sigma=0.1, steps=1, format="jpg")
    first, *_, last = json.loads(answer.headers["x-ddc-notes"])
    assert first == "x+y.tiff has several pages; the first is read"
    assert last == "x+y.tiff: the picture is laid on white, because JPEG has no transparency"
    known = Image.fromarray(np.pad(np.zeros((20, 28), np.uint8), 10, constant_values=255))
    known.save(masks, "TIFF", save_all=True, append_images=[known])
    answer = send(server, mask=masks.getvalue(), task="inpaint", steps=1)
    assert "/" not in answer.headers["x-ddc-notes"] and answer.status_code == 200


def test_formats_tasks_and_notes(server: Any) -> None:
    answer = send(server, "small.webp", encoded(kind="WEBP"), task="sr2", format="png", steps=2)
    assert Image.open(io.BytesIO(answer.content)).format == "PNG"
    assert Image.open(io.BytesIO(answer.content)).size == (96, 80) and answer.headers["x-ddc-evaluations"] == "4"
    for name in ("-", "photo", "photo.dat"):  # curl sends a picture from a pipe as "-"
        answer = send(server, name, encoded(kind="JPEG"), task="jpeg", steps=1)
        assert answer.headers["content-type"] == "image/jpeg" and answer.headers["x-ddc-task"].startswith("jpeg")
    drawing = np.full((64, 64, 3), 255, np.uint8)
    drawing[20:40, 20:40] = 0
    answer = send(server, "draußen.png", encoded(drawing))
    assert answer.headers["x-ddc-task"] == "nothing" and answer.headers["x-ddc-evaluations"] == "0"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(answer.content))), drawing)
    assert "draußen.png is left as it is" in json.loads(answer.headers["x-ddc-notes"])[0]
    assert json.loads(answer.headers["x-ddc-found"]) == ["It is a drawing or a screenshot, which is left alone."]
    grey = send(server, "grey.png", encoded(np.full((64, 64, 3), 128, np.uint8)))
    assert json.loads(grey.headers["x-ddc-found"]) == ["Nothing is wrong with it."]


def test_realism_is_for_the_posterior_network(tmp_path: Path) -> None:
    tiny_posterior().save_pretrained(tmp_path / "posterior")
    upload = Upload(tmp_path / "a.png", "a.png")
    upload.path.write_bytes(encoded())
    work = Service(RestorationPipeline.from_pretrained(tmp_path), Limits(), Store(tmp_path / "files"))
    work.rates["posterior"], work.measured["posterior"] = 1.0, time.monotonic()  # else its speed is measured
    api, pictures, evaluations = Api(work), [], []
    for wrong in (b"2", b"-1", b"nan", b"much"):
        with pytest.raises(Refusal, match="a number from 0 to 1"):
            api._given(b"task=sr2&realism=" + wrong)
    with pytest.raises(Refusal, match="ddnm has no realism"):
        api._given(b"task=sr2&solver=ddnm&realism=1")
    for realism in (b"0", b"1"):
        options = _options(api._given(b"task=sr2&realism=" + realism))
        result = work.restore_file(upload, "sr2", options, tmp_path / "out.png", 95, None)
        pictures.append(result.picture.pixels)
        evaluations.append(result.evaluations)
    assert not np.array_equal(*pictures) and evaluations[0] == 1 < evaluations[1]


def test_a_mask_says_what_is_missing(server: Any) -> None:
    known = np.full(CLEAN.shape[:2], 255, np.uint8)
    known[10:20, 10:20] = 0
    answer = send(server, mask=encoded(known), task="inpaint", steps=1)
    assert answer.status_code == 200
    changed = (np.asarray(Image.open(io.BytesIO(answer.content))) != CLEAN).any(axis=2)
    assert changed[10:20, 10:20].any() and changed.sum() == changed[10:20, 10:20].sum()
    missing = send(server, task="inpaint")
    refused(missing, 422, "a.png has no transparency", "in the field mask of the form")
    assert "--mask" not in missing.text
    refused(send(server, mask=encoded(known[:30]), task="inpaint"), 422, "48×30")
    refused(send(server, mask=encoded(known), task="denoise"), 422, "a mask was given")
    refused(send(server, mask=b"no picture", task="inpaint"), 422, "mask.png")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"task": "sharpen"}, ("sharpen", "expected one of")),
        ({"task": "custom"}, ("custom",)),
        ({"task": "blur"}, ("kernel",)),
        ({"sigma": "nan"}, ("sigma is 'nan'",)),
        ({"sigma": "7"}, ("sigma is 7",)),
        ({"solver": "ddnm:eta=0.5"}, ("solver", "expected ddc or")),
        ({"solver": "ddnm", "task": "jpeg10"}, ("ddnm needs a linear operator",)),
        ({"steps": "0"}, ("steps is '0'", "1 to 1000")),
        ({"steps": "5.5"}, ("whole number",)),
        ({"samples": "9"}, ("1 to 8",)),
        ({"format": "exe"}, ("format is 'exe'",)),
        ({"quality": "101"}, ("1 to 100",)),
        ({"seed": "9" * 40}, ("seed",)),
        ({"operator": "x.py:X"}, ("there is no parameter 'operator'", "task, sigma")),
        ({"task": ["sr2", "sr4"]}, ("task is given twice",)),
        ({"task": "a\nb"}, ("short text",)),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused_before_the_picture_is_read(
    server: Any, query: Any, words: tuple[str, ...]
) -> None:
    refused(send(server, content=b"no picture", **query), 400, *words)


def test_long_parameters_are_refused_at_once(server: Any) -> None:
    for name in ("sigma", "task", "seed", "format"):
        started = time.monotonic()
        answer = post(f"{server.url}/api/restore", data={name: "1" * 200_000}, files={"picture": encoded()})
        refused(answer, 400, f"{name} is '1111", "short text")
        assert time.monotonic() - started < 5  # a search that goes back and forth would take minutes
    assert all(re.fullmatch(NUMBER, text) for text in ("0.05", ".5", "5", "5.", "00.10"))
    assert not any(re.fullmatch(NUMBER, text) for text in ("", ".", "1.2.3", "1e3", "-1", "nan"))


def test_an_upload_does_not_cut_the_file_that_is_being_sent(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        write_upload(tmp_path / "a.png", UploadFile(io.BytesIO(content)))
        if content == b"first":
            reader = (tmp_path / "a.png").open("rb")
    with reader:
        assert reader.read() == b"first" and (tmp_path / "a.png").read_bytes() == b"second"
    assert files_in(tmp_path) == ["a.png"]


def test_wrong_pictures_are_refused_by_their_name(server: Any) -> None:
    refused(send(server, "holiday.png", b"no picture"), 422, "holiday.png is not a picture")
    refused(send(server, "cut.png", encoded()[:900], task="denoise"), 422, "cut.png")
    refused(send(server, "a.npy", b"x" * 99), 422, "a.npy is not a picture")
    refused(send(server, "wide.png", encoded(np.zeros((400, 400, 3), np.uint8))), 422, "takes up to 0.1")
    refused(send(server, task="sr16"), 422, "takes up to 0.1")
    refused(send(server, "dot.png", encoded(np.zeros((7, 9, 3), np.uint8))), 422, "dot.png", "at least 8 on each side")
    refused(send(server, "big.png", bytes(2**21)), 413, "larger")
    refused(post(f"{server.url}/api/restore", files={"other": b"x"}), 400, "field picture")
    twice = [("picture", ("a.png", encoded())), ("picture", ("b.png", encoded()))]
    refused(post(f"{server.url}/api/restore", files=twice), 400, "several files in the field picture")
    refused(post(f"{server.url}/api/restore", data={"picture": "text"}), 400, "multipart")
    refused(post(f"{server.url}/api/restore", json={}), 400, "multipart")


def test_its_pages(server: Any) -> None:
    described = get(f"{server.url}/api/openapi.json").json()
    parameters = {one["name"]: one for one in described["paths"]["/api/restore"]["post"]["parameters"]}
    assert described["openapi"].startswith("3.1") and list(parameters)[:3] == ["task", "sigma", "solver"]
    assert parameters["solver"]["schema"]["enum"] == server.work.solver_names()
    body = described["paths"]["/api/restore"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert list(body["properties"]) == ["picture", "mask", *parameters] and not body["additionalProperties"]
    for address in ("", "/", "/api", "/api/"):
        page = get(f"{server.url}{address}")
        assert "POST /api/restore" in page.text and all(f"<td>{name}</td>" in page.text for name in parameters)
        assert "<script" not in page.text and "http://" not in page.text.replace("http://HOST", "")
    refused(get(f"{server.url}/api/restore"), 405, "POST")
    for address in ("/config", "/gradio_api/info", "/api/x", "/api/../etc/passwd", "/docs"):
        refused(get(f"{server.url}{address}"), 404, "nothing at this address")
    refused(get(f"{server.url}/api", headers={"Host": "evil.example"}), 421, "host name")
    foreign = {"Origin": "http://evil.example"}
    refused(post(f"{server.url}/api/restore", files={"picture": b"x"}, headers=foreign), 403, "other pages")


def test_one_at_a_time_and_a_line_of_limited_length(server: Any) -> None:
    with ThreadPoolExecutor(5) as pool, server.work.lock:  # a visitor of the page has the model
        first = [pool.submit(send, server, task="denoise", steps=1)]
        until(server.api.turn.locked)
        first += [pool.submit(send, server, task="denoise", steps=1) for _ in range(2)]
        until(lambda: server.api.waiting == 2)
        refused(send(server), 503, "the queue is full")
        with pytest.raises(Refusal):
            server.api.check_line()  # as the page's queue asks
    assert [one.result().status_code for one in first] == [200, 200, 200] and server.api.waiting == 0


def test_who_leaves_is_not_waited_for(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    run = Service._run

    def watched(self: Service, *values: Any) -> Any:
        try:
            return run(self, *values)
        except UserError as error:
            ended.append(error)
            raise

    monkeypatch.setattr(Service, "_run", watched)
    with server.work.lock:
        for expected in (0, 1):  # the one that has the turn, and one behind it
            with pytest.raises(httpx.ReadTimeout):
                post(f"{server.url}/api/restore?task=denoise&steps=9", files={"picture": encoded()}, timeout=0.5)
            until(lambda: server.api.waiting == 0)
            assert len(ended) == 0 and expected in (0, 1)
    until(lambda: len(ended) == 1)
    assert "broke off" in str(ended[0]) and send(server, task="denoise", steps=1).status_code == 200


def test_a_fault_of_ours_is_one_line(server: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError(f"{server.work.store.folder}\nmore")

    monkeypatch.setattr(Service, "_run", fails)
    refused(send(server, task="denoise"), 500, "MemoryError", "smaller picture")
    assert "Traceback" not in capfd.readouterr().err


def files_in(folder: Path) -> list[str]:
    """All files; folders may go while they are looked at."""
    return [name for _, _, names in os.walk(folder) for name in names]


def until(holds: Any) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_without_its_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["web", "--no-page", "--model", str(tiny_model), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "ddc: `ddc web` needs other packages: pip install 'deep-data-consistency[api]'\n"


def test_the_examples_of_the_documentation_run(server: Any, tmp_path: Path) -> None:
    """The Python of docs/http.md against this server, in a folder with bad.jpg."""
    from code_blocks import code_blocks

    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    (block,) = [block for block in code_blocks(page) if block.language == "python"]
    (tmp_path / "bad.jpg").write_bytes(encoded(kind="JPEG", quality=20))
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        exec(compile(block.text.replace("http://localhost:7860", server.url), "http.md", "exec"), {})
    finally:
        os.chdir(before)
    assert Picture.read(tmp_path / "better.png").size == CLEAN.shape[:2]
