"""Damaged image files: each is read or refused by name, whatever its bytes are; none stops the others or hangs."""

import io
import json
import queue
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from image_mutator import LONGEST, attempt, mutated, png_chunks, png_file, rle_bmp, scans_jpeg, seeds

from conftest import count
from ddc.errors import UserError
from ddc.images import Picture
from processes import on_a_small_disk, run
from tiny import lzw_tiff

WORKERS = count(1, 2)  # each imports the package


def watch(folder: Path, first: int, stop: int, outcomes: dict[int, str]) -> None:
    """Have a process read every second file of a range. One that hangs or dies is noted, and another goes on."""
    folder.mkdir(exist_ok=True)
    while first < stop:
        command = [sys.executable, str(Path(__file__).with_name("image_mutator.py")), folder, first, stop, WORKERS]
        with (folder / "stderr").open("wb") as errors:
            worker = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=errors, text=True)
        lines: queue.Queue[str] = queue.Queue()

        def forward(worker: subprocess.Popen[str] = worker, lines: queue.Queue[str] = lines) -> None:
            assert worker.stdout is not None
            for line in worker.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=forward, daemon=True).start()
        current, line = first, "start"
        while line:
            try:
                line = lines.get(timeout=300)  # after LONGEST seconds of work the worker ends by itself
            except queue.Empty:
                outcomes[current], line = "hangs", ""
                worker.kill()
            if line:
                word, number, what = line.rstrip("\n").split(" ", 2)
                current = int(number)
                if word == "end":
                    outcomes[current] = what
        if worker.wait() and current not in outcomes:
            outcomes[current] = f"the process ended with {worker.returncode}"
        first = current + WORKERS


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    total = count(800, 20_000)
    outcomes: dict[int, str] = {}
    started = time.monotonic()
    watchers = [
        threading.Thread(target=watch, args=(tmp_path / str(first), first, total, outcomes)) for first in range(WORKERS)
    ]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    counts = Counter(outcomes.values())
    print(f"{total} files in {time.monotonic() - started:.0f} s: {dict(counts)}")
    assert set(outcomes) == set(range(total))
    wrong = {number: what for number, what in outcomes.items() if what not in ("picture", "refused")}
    assert not wrong
    assert counts["picture"] > 0.05 * total and counts["refused"] > 0.3 * total


def test_the_seeds_are_good_and_reach_every_format(tmp_path: Path) -> None:
    for number, (ending, content) in enumerate(seeds()):
        path = tmp_path / f"{number}{ending}"
        path.write_bytes(content)
        assert attempt(path, number) == "picture"
    assert {ending for ending, _ in seeds()} == {".png", ".jpg", ".webp", ".tif", ".bmp", ".heic", ".npy"}
    assert len({mutated(number) for number in range(500)}) > 480


def huge_png(side: int) -> bytes:
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = bytes(min(((side + 7) // 8 + 1) * side, 30_000_000))
    return png_file([(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")])


def swollen_png(kind: bytes, head: bytes) -> bytes:
    """A PNG with 60 MB of zeros in a compressed chunk beside its pixels."""
    chunks = png_chunks(next(content for ending, content in seeds() if ending == ".png"))
    return png_file([chunks[0], (kind, head + zlib.compress(bytes(60_000_000))), *chunks[1:]])


def wide_png(width: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, 1, 8, 0, 0, 0, 0)
    return png_file([(b"IHDR", header), (b"IDAT", zlib.compress(bytes(width + 1))), (b"IEND", b"")])


def wide_webp() -> bytes:
    """An animation on a canvas of 16,777,216×8 pixels."""
    content = bytearray(next(content for ending, content in seeds() if ending == ".webp" and b"ANMF" in content))
    at = content.index(b"VP8X") + 12
    content[at : at + 6] = b"\xff\xff\xff\x07\0\0"
    return bytes(content)


def endless_tiff(pages: int) -> bytes:
    """A TIFF whose directories go on and on."""
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, np.zeros((8, 8), np.uint8), photometric="minisblack")
    content = bytearray(buffer.getvalue())
    directory = struct.unpack("<I", content[4:8])[0]
    tags = struct.unpack("<H", content[directory : directory + 2])[0]
    at = directory + 2 + 12 * tags
    first = len(content)
    content[at : at + 4] = struct.pack("<I", first)
    for page in range(1, pages):
        content += struct.pack("<HHHIII", 1, 256, 3, 1, 8, first + 18 * page)
    return bytes(content + struct.pack("<HHHIII", 1, 256, 3, 1, 8, 0))


def npy(shape: str, kind: str = "<f4", content: bytes = b"") -> bytes:
    header = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + content


def many_samples() -> bytes:
    content = bytearray(lzw_tiff(np.zeros((8, 8, 3), np.uint16)))
    content[content.index(struct.pack("<HHI", 277, 4, 1)) + 8] = 200
    return bytes(content)


BOMBS: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "3,600 megapixels": (".png", "refused", lambda: huge_png(60_000)),
    "64 megapixels of one bit": (".png", "picture", lambda: huge_png(8000)),
    "a text of 60 MB": (".png", "refused", lambda: swollen_png(b"zTXt", b"Comment\0\0")),
    "a profile of 60 MB": (".png", "refused", lambda: swollen_png(b"iCCP", b"ICC\0\0")),
    "a row of 40 million": (".png", "picture", lambda: wide_png(40_000_000)),
    "an animation with long rows": (".webp", "refused", wide_webp),
    "run lengths of one long row": (".bmp", "refused", lambda: rle_bmp(170_000_000, 1, b"\x01\x40\x00\x00\x00\x01")),
    "run lengths of many rows": (
        ".bmp",
        "picture",
        lambda: rle_bmp(2000, 2000, b"\x01\x40\x00\x00" * 2000 + b"\x00\x01"),
    ),
    "20,000 scans": (".jpg", "refused", lambda: scans_jpeg(4000, 20_000)),
    "300,000 pages": (".tif", "picture", lambda: endless_tiff(300_000)),
    "200 channels": (".tif", "refused", many_samples),
    "an array of 4 TB": (".npy", "refused", lambda: npy("(1000000, 1000000)")),
    "an array that lacks its 600 MB": (".npy", "refused", lambda: npy("(10000, 5000, 3)", content=b"\0" * 100)),
    "a shape of many numbers": (".npy", "refused", lambda: npy("(" + "1," * 3000 + ")")),
    "a negative shape": (".npy", "refused", lambda: npy("(-4, 4)", content=bytes(64))),
    "an expression of brackets": (".npy", "refused", lambda: npy("(" * 5000)),
    "a pickle": (".npy", "refused", lambda: npy("(1,)", "|O", b"cos\nsystem\n(S'true'\ntR.")),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_or_read_in_time(name: str, tmp_path: Path) -> None:
    ending, outcome, make = BOMBS[name]
    path = tmp_path / f"bomb{ending}"
    path.write_bytes(make())
    started = time.process_time()
    assert attempt(path, 0) == outcome
    assert time.process_time() - started < LONGEST


def test_a_folder_of_damaged_files(tiny_model: Path, tmp_path: Path) -> None:
    """The real command: what can be read is restored, the rest is named and listed, and the exit code says so."""
    folder, readable, good = tmp_path / "in", set(), set()
    folder.mkdir()
    for number, (ending, content) in enumerate(seeds()[::6]):
        good.add(f"good{number}{ending}")
        (folder / f"good{number}{ending}").write_bytes(content)
    for number in range(count(60, 600)):
        ending, content = mutated(100_000 + number)
        path = folder / f"{number}{ending}"
        path.write_bytes(content)
        try:
            height, width = Picture.read(path).size
            if height * width > 2000:  # its restoration takes long, or is too small to be one
                path.unlink()
            else:
                readable.add(path.name)
        except UserError:
            pass
    names = {path.name for path in folder.iterdir()}
    command = ["restore", folder, "-o", tmp_path / "out", "--model", tiny_model]
    ran = run([*command, "--task", "denoise", "--sigma", "0.1", "--steps", "1", "--device", "cpu"], timeout=600)
    errors = ran.stderr
    assert ran.returncode == 1 and "Traceback" not in errors
    failures = json.loads((tmp_path / "out" / "ddc-failures.json").read_text())
    failed = {Path(failure["input"]).name for failure in failures}
    written = {path.name for path in (tmp_path / "out").iterdir()} - {"ddc-failures.json"}
    assert written | failed == names and not written & failed
    assert good <= written and len(failed - readable) == len(names - readable - good) > 0
    assert len(failed & readable) <= 0.1 * len(readable)
    assert all(f"{name} " in errors for name in failed)
    assert len(ran.stdout.splitlines()) == len(written)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_a_full_disk(tiny_model: Path, tmp_path: Path) -> None:
    """What does not fit is named, nothing half-written stays, and what fits is done."""
    generator = np.random.default_rng(0)
    for side in (8, 96):
        Picture(generator.integers(0, 256, (side, side, 3)).astype(np.uint8)).write(tmp_path / "in" / f"{side}.png")
    options = ["--model", tiny_model, "--task", "denoise", "--sigma", "0.1", "--steps", "1", "--device", "cpu"]
    runs = {"npy": [], "png": ["--samples", "2"], "tiff": [], "bmp": []}
    lines = [
        ["restore", tmp_path / "in", "-o", tmp_path / ext, "--ext", ext, *options, *more] for ext, more in runs.items()
    ]
    ran = run([json.dumps([[*map(str, line)] for line in lines])], call=on_a_small_disk)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
    assert ran.stderr.count("could not be written (") == 4
    for ext in runs:
        out = tmp_path / ext
        assert (out / f"8.{ext}").is_file() and (out / "ddc-failures.json").is_file()
        assert not (out / f"96.{ext}").exists() and not list(out.glob(".*"))
