"""The static page in a real browser, a headless Chromium, with a tiny network."""

import base64
import io
import shutil
import struct
import zlib
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms
from skimage import data

from chromium import CHROMIUM, SOFTWARE_WEBGPU, Page, chromium, served
from ddc.errors import UserError
from ddc.onnx import export, winograd
from ddc.onnx.export import round_weights
from ddc.onnx.restorations import restorations
from ddc.pipeline import RestorationPipeline
from ddc.web.site import find_runtime, write_site
from tiny import tiny_network, tiny_posterior

pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this computer")
SIDE = 64
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        runtime = find_runtime(None)
    except UserError as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("site")
    network = tiny_network()
    network.unet.load_state_dict(round_weights(network.unet.state_dict(), "8bit")[1])
    network.save_pretrained(root / "model" / "network")
    shutil.copytree(tiny_model / "prior", root / "model" / "prior")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "MIN_CHANNELS", 8)  # as in a large network
        write_site(root / "page", root / "model", runtime, "8bit", SIDE)
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ThreadingHTTPServer]:
    with served(folder / "page") as server:
        yield server


@pytest.fixture(scope="module")
def page(folder: Path, server: ThreadingHTTPServer) -> Iterator[Page]:
    with chromium() as page:
        page.send("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
        page.wait(f"{text('engine')}.startsWith('Ready')")
        page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        yield page


def text(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


def chosen(page: Page, path: Path) -> str:
    """What the page says about a file."""
    page.run(f"{text('facts')} = {text('problem')} = ''")
    page.choose(path)
    said: str = page.wait(f"({text('facts')}.includes('pixels') && {text('facts')}) || {text('problem')}")
    return said


def restored(page: Page, **form: Any) -> np.ndarray[Any, Any]:
    """The pixels that the page makes of the chosen file."""
    for name, value in form.items():
        page.run(f"document.forms[0].elements.{name}.value = '{value}'")
    page.run("document.forms[0].requestSubmit()")
    page.wait("document.getElementById('stop').disabled")
    assert page.run(text("problem")) == ""
    script = """(async () => {
        const image = document.getElementById("after"), canvas = document.createElement("canvas");
        await image.decode();
        canvas.width = image.naturalWidth, canvas.height = image.naturalHeight;
        canvas.getContext("2d").drawImage(image, 0, 0);
        return canvas.toDataURL().split(",")[1];
    })()"""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(page.run(script)))).convert("RGB"))


def written(folder: Path, name: str, pixels: np.ndarray[Any, Any], **options: Any) -> Path:
    Image.fromarray(pixels).save(folder / name, **options)
    return folder / name


def test_the_page_is_isolated_and_calls_nobody(page: Page) -> None:
    assert page.run("crossOriginIsolated")
    assert "thread" in page.run(text("engine"))
    home = page.run("location.origin")
    assert page.requests and all(url.startswith((home, "data:", "blob:")) for url in page.requests)
    blocked = "fetch('http://127.0.0.2:9/').then(() => false, (error) => error instanceof TypeError)"
    assert page.run(blocked)
    assert any("Content Security Policy" in message for message in page.messages)


@pytest.mark.parametrize(
    ("task", "sigma", "form", "most"),
    [
        ("denoise", 0.1, {"kind": "noise"}, 1.0),
        ("sr2", 0.0, {"kind": "size", "scale": 2}, 1.0),
        ("gauss1.5", 0.01, {"kind": "blur", "shape": "soft", "blur": 1.5}, 4.0),
        ("disc1.5", 0.01, {"kind": "blur", "shape": "disc", "blur": 1.5}, 4.0),
    ],
)
def test_tiles_are_those_of_the_core(
    page: Page, folder: Path, task: str, sigma: float, form: dict[str, Any], most: float
) -> None:
    """Of a blurred picture, the core also looks at what surrounds a tile."""
    height, width = (64, 90) if form["kind"] == "blur" else (112, 170)  # a blur takes longer
    pixels = np.ascontiguousarray(data.astronaut()[100 : 100 + height, 150 : 150 + width])
    path = written(folder, "clean.png" if task == "denoise" else f"{task}.png", pixels)
    said = chosen(page, path)
    assert f"{width} × {height} pixels" in said and "no noticeable noise" in said
    ours = restored(page, sigma=sigma, **form)
    pipe = RestorationPipeline.from_pretrained(folder / "model")
    theirs = pipe(path, task, sigma=sigma, solver="one-pass", tile=SIDE).picture.pixels * 255
    assert np.abs(ours - theirs).max() <= most


@pytest.mark.parametrize(
    ("kind", "form", "size"),
    [("size", {"scale": 3}, (120, 90)), ("blur", {"shape": "line", "blur": 5}, (40, 30)), ("jpeg", {}, (40, 30))],
)
def test_every_kind_gives_a_picture(
    page: Page, folder: Path, kind: str, form: dict[str, Any], size: tuple[int, int]
) -> None:
    pixels = np.ascontiguousarray(data.coffee()[100:130, 100:140])
    assert "JPEG of quality 30" in chosen(page, written(folder, "small.jpg", pixels, quality=30))
    ours = restored(page, kind=kind, sigma=0.05, **form)
    assert ours.shape == (size[1], size[0], 3)
    assert 0.6 < ours.mean() / pixels.mean() < 1.5


def test_painted_and_transparent_pixels_are_filled(page: Page, folder: Path) -> None:
    pixels = np.dstack([data.coffee()[100:150, 100:160], np.full((50, 60), 255, np.uint8)])
    pixels[20:30, 20:40] = 0
    assert "transparent pixels" in chosen(page, written(folder, "holes.png", pixels))
    ours = restored(page)  # the page has suggested to fill the holes
    known = np.ones((50, 60), bool)
    known[20:30, 20:40] = False
    assert np.abs(ours[known].astype(int) - pixels[..., :3][known]).max() <= 1
    assert ours[~known].mean() > 10
    assert chosen(page, written(folder, "whole.png", pixels[:16, :16, :3]))
    page.run("document.forms[0].elements.kind.value = 'holes'; document.forms[0].requestSubmit()")
    assert "Nothing is painted" in page.wait(text("problem"))
    key = "new KeyboardEvent('keydown', {key: ' '})"
    page.run(f"document.forms[0].elements.width.value = 4; document.getElementById('brush').dispatchEvent({key})")
    painted = restored(page)
    changed = np.abs(painted.astype(int) - pixels[:16, :16, :3]).max(2) > 1
    assert changed[6:10, 6:10].any() and not changed[:4].any()


def test_a_file_is_saved_upright_with_its_profile(page: Page, folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    pixels = np.ascontiguousarray(data.astronaut()[:40, :56])
    path = written(folder, "turned.jpg", pixels, quality=95, exif=exif, icc_profile=SRGB)
    assert "56 × 40 pixels" in chosen(page, path)
    restored(page, kind="noise", sigma=0.01)
    for name in ("png", "jpg"):
        page.run(f"document.getElementById('{name}').click()")
        saved = folder / f"turned-restored.{name}"
        page.wait("new Promise((done) => setTimeout(() => done(true), 300))")
        with Image.open(saved) as image:
            assert image.size == (40, 56)
            assert image.info["icc_profile"] == SRGB
            assert image.getexif().get(0x0112, 1) == 1
            upright = np.asarray(image.convert("RGB")).astype(int)
        assert np.abs(upright - np.rot90(pixels, -1)).mean() < 25  # a tiny network, but the same picture


def test_a_picture_can_be_dropped(page: Page, folder: Path) -> None:
    small = base64.b64encode(written(folder, "dropped.png", data.coffee()[:20, :30]).read_bytes()).decode()
    for count in (1, 2):
        page.run(f"{text('facts')} = ''")
        page.run(f"""(() => {{
            const bytes = Uint8Array.from(atob("{small}"), (letter) => letter.charCodeAt(0));
            const dataTransfer = new DataTransfer();
            for (let i = 0; i < {count}; i++) dataTransfer.items.add(new File([bytes], i ? "other.png" : "dropped.png"));
            document.body.dispatchEvent(new DragEvent("drop", {{ dataTransfer, bubbles: true }}));
        }})()""")
        end = "one at a time" if count > 1 else "pixels"
        assert "dropped.png, 30 × 20 pixels" in page.wait(f"{text('facts')}.includes('{end}') && {text('facts')}")


def huge_png() -> bytes:
    """A PNG that claims 20,000 × 20,000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


def test_bad_files_get_one_sentence(page: Page, folder: Path) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    for name in ("moving.gif", "moving.png", "moving.webp"):
        frames[0].save(folder / name, save_all=True, append_images=frames[1:], loop=0, duration=100)
        assert "is animated" in chosen(page, folder / name)
    for name, content, message in (
        ("letter.txt", b"Dear reader", "is not a picture"),
        ("empty.png", b"", "is not a picture"),
        ("cut.jpg", b"\xff\xd8\xff\xdb\x00\x43\x00", "is not a picture"),
        ("huge.png", huge_png(), "400 megapixels"),
    ):
        (folder / name).write_bytes(content)
        assert message in chosen(page, folder / name)
        assert page.run("document.getElementById('restore').disabled")
    with (folder / "long.png").open("wb") as file:
        file.truncate(201_000_000)  # without content, so that it takes no room
    assert "more than 200 MB" in chosen(page, folder / "long.png")
    chosen(page, written(folder, "flat.png", np.full((700, 700, 3), 90, np.uint8)))
    page.run(
        f"{text('problem')} = ''; document.forms[0].elements.kind.value = 'size'; document.forms[0].elements.scale.value = 8"
    )
    page.run("document.forms[0].requestSubmit()")
    assert "The result would have 31 megapixels" in page.wait(text("problem"))
    assert "no noticeable noise" in chosen(page, folder / "clean.png")  # it stays usable
    assert restored(page, kind="noise", sigma=0.1).shape == (112, 170, 3)


def test_an_old_browser_is_told_so(server: ThreadingHTTPServer) -> None:
    with chromium() as page:
        page.send("Page.addScriptToEvaluateOnNewDocument", source="delete globalThis.WebAssembly")
        page.send("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
        assert "too old" in page.wait(f"{text('engine')}.includes('WebAssembly') && {text('engine')}")
        assert page.run("document.getElementById('restore').disabled")


def test_it_can_be_used_by_keyboard_and_screen_reader_and_on_a_phone(page: Page) -> None:
    unnamed = """[...document.querySelectorAll("input, button, a, canvas, img, progress")].filter((one) =>
        !(one.labels?.length || one.ariaLabel || one.alt || one.textContent.trim() || one.querySelector("img[alt]")))"""
    assert page.run(f"({unnamed}).map((one) => one.outerHTML)") == []
    page.send("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    assert page.run("document.documentElement.scrollWidth") <= 360
    page.send("Emulation.clearDeviceMetricsOverride")


def test_without_threads_it_says_so_and_works(page: Page, folder: Path) -> None:
    """The service worker, which isolates the page, is bypassed, as in a private window."""
    page.send("Network.setBypassServiceWorker", bypass=True)
    page.run(f"{text('engine')} = ''; location.reload()")
    assert "one thread only" in page.wait(f"{text('engine')}.startsWith('Ready') && {text('engine')}")
    assert not page.run("crossOriginIsolated")
    chosen(page, folder / "dropped.png")
    assert restored(page, kind="noise", sigma=0.1).shape == (20, 30, 3)
    page.send("Network.setBypassServiceWorker", bypass=False)
    page.run(f"{text('engine')} = ''; location.reload()")
    page.wait(f"{text('engine')}.startsWith('Ready') && crossOriginIsolated")


def test_webgpu_makes_the_same_pictures(folder: Path, server: ThreadingHTTPServer) -> None:
    """With the adapter that Chromium computes in software."""
    pictures = []
    with chromium(*SOFTWARE_WEBGPU) as page:
        for engine in ("webgpu", "wasm"):
            page.send("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/?{engine}#{engine}")
            said = page.wait(f"{text('engine')}.startsWith('Ready') && {text('engine')}")
            if engine == "webgpu" and "WebGPU" not in said:
                pytest.skip("this Chromium has no software adapter for WebGPU")
            chosen(page, folder / "dropped.png")
            forms = ({"kind": "noise"}, {"kind": "blur", "shape": "soft"})
            pictures.append([restored(page, sigma=0.02, **form).astype(int) for form in forms])
            assert engine.lower() in page.run(text("summary")).lower().replace("webassembly", "wasm")
    assert all(np.abs(ours - theirs).max() <= 1 for ours, theirs in zip(*pictures, strict=True))


def test_a_posterior_network_works_as_well(folder: Path) -> None:
    tiny_posterior().save_pretrained(folder / "other" / "posterior")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "restorations", lambda *given: {"noise": restorations(*given)["noise"]})
        write_site(folder / "other-page", folder / "other", None, "8bit", SIDE)
    with served(folder / "other-page") as server, chromium() as page:
        page.send("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
        page.wait(f"{text('engine')}.startsWith('Ready')")
        chosen(page, folder / "clean.png")
        assert restored(page, kind="noise", sigma=0.1).shape == (112, 170, 3)


def test_it_works_without_a_connection(page: Page, folder: Path, server: ThreadingHTTPServer) -> None:
    """Last: the server ends, and the page is opened again."""
    server.shutdown()
    server.server_close()
    page.run(f"{text('engine')} = ''")
    page.send("Page.navigate", url=page.run("location.href") + "#wasm")
    page.run("location.reload()")
    page.wait(f"{text('engine')}.startsWith('Ready')")
    chosen(page, folder / "clean.png")
    assert restored(page, kind="noise", sigma=0.1).shape == (112, 170, 3)
