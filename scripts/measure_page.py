"""The static page in a headless Chromium: what it loads, its time beside PyTorch's, large pictures, memory, responsiveness.

python scripts/measure_page.py PAGE [MODEL]: a folder from `ddc web --static`, and the model that it was made from (the shipped one).
"""

import base64
import functools
import http.server
import io
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from skimage import data

from ddc.images import Picture, from_uint8, to_unit
from ddc.pipeline import RestorationPipeline
from ddc.problems import make_problem
from ddc.tiling import NETWORK_MARGIN, plan

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from chromium import Page, chromium

WATCH = """window.longest = 0; window.before = performance.now();
    setInterval(() => { const now = performance.now(); longest = Math.max(longest, now - before); before = now; }, 10); 0"""
TASKS: dict[str, dict[str, Any]] = {
    "denoise": {"kind": "noise", "sigma": 0.1},
    "gauss1.5": {"kind": "blur", "shape": "soft", "blur": 1.5, "sigma": 0.01},
    "disc3": {"kind": "blur", "shape": "disc", "blur": 3, "sigma": 0.01},
}
PIXELS = """(async () => { const image = document.getElementById("after"), canvas = document.createElement("canvas");
    await image.decode(); canvas.width = image.naturalWidth, canvas.height = image.naturalHeight;
    canvas.getContext("2d").drawImage(image, 0, 0); return canvas.toDataURL().split(",")[1]; })()"""


class Counting(http.server.SimpleHTTPRequestHandler):
    sent = 0

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        Counting.sent += len(content)
        outputfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def text(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


def restored(page: Page, path: Path, **form: Any) -> tuple[float, str]:
    """The seconds from the click to the picture, and what the page says."""
    page.run(f"{text('facts')} = {text('problem')} = ''")
    page.choose(path)
    page.wait(f"{text('facts')}.includes('pixels')")
    for name, value in form.items():
        page.run(f"document.forms[0].elements.{name}.value = '{value}'")
    started = time.perf_counter()
    page.run("document.forms[0].requestSubmit()")
    page.wait("document.getElementById('stop').disabled", 600)
    seconds = time.perf_counter() - started
    assert not page.run(text("problem")), page.run(text("problem"))
    return seconds, page.run(text("summary"))


def peak_memory() -> float:
    """The most memory that a renderer of this Chromium has held, in GB."""
    peaks = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and (process / "cmdline").is_file():
            try:
                if b"--type=renderer" in (process / "cmdline").read_bytes():
                    lines = (process / "status").read_text().splitlines()
                    peaks += [int(line.split()[1]) / 1e6 for line in lines if line.startswith("VmHWM")]
            except OSError:  # it has ended
                continue
    return max(peaks)


def measured(pixels: np.ndarray[Any, Any], task: str, sigma: float, path: Path) -> Path:
    """A file with what the task makes of a clean picture."""
    x, problem = from_uint8(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]), make_problem(task, sigma)
    y = problem.measure(x, torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    Image.fromarray((255 * to_unit(y)[0].permute(1, 2, 0)).round().byte().numpy()).save(path)
    return path


def seams(difference: np.ndarray[Any, Any]) -> tuple[float, float]:
    """The largest step of a mean line of pixels from the one before, where two tiles are blended, and elsewhere."""
    blended, others = [], []
    for axis in (0, 1):
        steps = np.abs(np.diff(difference.mean(axis=(1 - axis, 2))))
        weights = [
            np.pad(one.numpy(), (start, len(steps) + 1 - start - len(one))) for start, one in sides(len(steps) + 1)
        ]
        inside = np.sum([(one > 0) & (one < 1) for one in weights], axis=0)[1:] > 0
        blended += list(steps[inside])
        others += list(steps[~inside])
    return float(np.max(blended)), float(np.max(others))


def sides(length: int) -> list[tuple[int, Any]]:
    tiles = plan((length, 1), 256, NETWORK_MARGIN, 1)
    return [(tile.window.top, tile.rows) for tile in tiles]


def main(site: Path, model: Path | None) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Counting, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe = RestorationPipeline.from_pretrained(model).to("cpu")
    solver: dict[str, Any] = {"solver": "posterior:realism=0" if pipe.solver == "posterior" else "one-pass"}
    with tempfile.TemporaryDirectory() as folder, chromium() as page:
        photo = Image.fromarray(data.astronaut())
        wide = photo.resize((1024, 1024), Image.Resampling.LANCZOS).crop((0, 0, 1024, 768))
        large = measured(np.asarray(wide), "denoise", 0.1, Path(folder) / "large.png")
        small = Path(folder) / "small.png"
        page.send("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/#wasm")
        page.wait(f"{text('engine')}.startsWith('Ready')", 120)
        print(page.run(text("engine")), f"First load: {Counting.sent / 1e6:.1f} MB", flush=True)
        noisy = {"kind": "noise", "sigma": 0.1}
        for task, form in TASKS.items():
            solver["sigma"] = form["sigma"]
            measured(data.astronaut()[:256, 96:352], task, form["sigma"], small)
            restored(page, small, **form), pipe(small, task, **solver)
            ours, theirs = [], []
            for _ in range(6):  # by turns, because other programs slow both down
                ours.append(restored(page, small, **form)[0])
                started = time.perf_counter()
                pipe(small, task, **solver)
                theirs.append(time.perf_counter() - started)
            for name, times in (("page", ours), ("ddc", theirs)):
                print(
                    f"256 × 256, {task}, {name}: {min(times):.2f} s, median {statistics.median(times):.2f} s",
                    flush=True,
                )
        page.run(WATCH)
        _, said = restored(page, large, **noisy)
        print(
            said,
            f"Longest pause of the page: {page.run('longest'):.0f} ms, most memory: {peak_memory():.2f} GB",
            flush=True,
        )
        ours_pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(page.run(PIXELS)))).convert("RGB"))
        solver["sigma"] = noisy["sigma"]
        core, whole = (
            pipe(Picture.read(large), "denoise", tile=tile, **solver).pictures[0].pixels * 255 for tile in (256, 0)
        )
        steps = seams(ours_pixels - whole)
        print(
            f"from the core's tiles: at most {np.abs(ours_pixels - core).max():.2f} of 255. From the whole picture, "
            f"steps of mean lines: at most {steps[0]:.2f} of 255 where tiles are blended, {steps[1]:.2f} elsewhere",
            flush=True,
        )
        sent = Counting.sent
        server.shutdown()
        server.server_close()
        page.run("location.reload()")
        page.wait(f"{text('engine')}.startsWith('Ready')", 120)
        restored(page, small, **noisy)
        print(f"without a connection: works, {Counting.sent - sent} bytes loaded")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
