"""Hostile run folders and odd command lines of `ddc evaluate`, `ddc reproduce` and `ddc bench`: one line, no traceback."""

import base64
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import count
from ddc.cli import main
from ddc.errors import UserError
from ddc.evaluation.report import write_report
from ddc.evaluation.results import read_results, write_results
from ddc.evaluation.run import RunFolder, picture_paths, read_protocol, read_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
from run_folder import PROTOCOL, make_row, write_run

DEEP = "[" * 20_000 + "]" * 20_000
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    1e400,
    float("nan"),
    "",
    "x",
    "../../x",
    "\0",
    "a/b",
    [],
    [1],
    {},
    {"a": 1},
    10**400,
]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return (folder / "rows-0.jsonl").read_text(encoding="utf-8").splitlines()


def mutated(line: str, chance: random.Random) -> bytes:
    """A line with one value replaced or removed, bytes changed, or cut off."""
    kind = chance.choice(("value", "value", "value", "absent", "bytes", "cut", "feature"))
    row = json.loads(line)
    name = chance.choice(list(row))
    if kind == "value":
        row[name] = chance.choice(HOSTILE)
    elif kind == "absent":
        del row[name]
    elif kind == "feature":
        wrong = (base64.b64encode(b"odd").decode(), "!", base64.b64encode(np.full(3, np.nan, np.float16)).decode())
        row["features"] = {chance.choice(("fid", "other")): chance.choice((*wrong, 3, None))}
    data = json.dumps(row).encode()
    if kind == "bytes":
        changed = bytearray(data)
        for _ in range(3):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        data = bytes(changed)
    return data[: chance.randrange(len(data))] if kind == "cut" else data


def test_damaged_rows_are_refused_in_one_line(lines: list[str], tmp_path: Path) -> None:
    chance = random.Random(0)
    refused = 0
    for _ in range(count(400, 5000)):
        chosen = [line.encode() for line in lines]
        place = chance.randrange(len(chosen))
        chosen[place] = mutated(lines[place], chance)
        (tmp_path / "rows-0.jsonl").write_bytes(b"\n".join(chosen) + b"\n")
        try:
            write_results(tmp_path, read_results(tmp_path))
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and "jsonl" in str(error)
    assert refused > count(200, 2500)


def test_rows_that_cannot_be_text_or_json(tmp_path: Path) -> None:
    for content in (b"\xff\xfe\n", f"{DEEP}\n".encode(), b"null\n", b"[]\n", b"3\n", b'"truth"\n', b"{}\n", b"\n"):
        (tmp_path / "rows-0.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=r"rows-0\.jsonl"):
            read_rows(tmp_path)
    (tmp_path / "rows-0.jsonl").unlink()
    (tmp_path / "rows-0.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path)


@pytest.mark.parametrize("content", ["", "null", "[]", "3", DEEP, '{"models": []}', '{"models": {"a": {}}}', "\0"])
def test_damaged_protocols_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "protocol.json").write_text(content)
    with pytest.raises(UserError, match=r"protocol\.json is damaged"):
        read_protocol(tmp_path)


def test_hostile_protocols_give_a_report_or_one_line(tmp_path: Path) -> None:
    write_run(tmp_path, [make_row("pinv", i) for i in range(2)])
    chance = random.Random(1)
    for _ in range(count(12, 150)):
        name = chance.choice(["seed", "size", "models", "hardware", "samples", "parts", "not_measured", "count"])
        changed = PROTOCOL | {name: chance.choice(HOSTILE)}
        (tmp_path / "protocol.json").write_text(json.dumps(changed))
        try:
            write_report(tmp_path)
        except UserError as error:
            assert "protocol.json" in str(error)


def test_a_row_reaches_no_picture_outside_the_run(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    Image.new("RGB", (80, 80)).save(secret)
    run = tmp_path / "run"
    for name in ("../secret", "../../secret.png", "..", "/etc/passwd", "a\\..\\b", str(secret)):
        for field in ("model", "task", "image", "solver"):
            for path in picture_paths(run, make_row("ddc", 0) | {field: name}, 3):
                assert (run / "pictures").resolve() in path.resolve().parents


def test_damaged_pictures_and_unknown_solvers(tmp_path: Path) -> None:
    write_run(tmp_path, [make_row("ddc", i) | {"solver": "of-tomorrow"} for i in range(2)])
    assert write_report(tmp_path).is_file()
    for content in (b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n{ } loop", b""):
        for path in (tmp_path / "pictures").rglob("*.png"):
            path.write_bytes(content)
        with pytest.raises(UserError, match=r"\.png is damaged"):
            write_report(tmp_path)


@pytest.mark.parametrize(("rank", "world"), [("x", "1"), ("7", "1"), ("0", "0"), ("-1", "2"), ("1", "")])
def test_odd_process_numbers(rank: str, world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(UserError, match="RANK"):
        RunFolder(tmp_path)


EVALUATE = """--limit 0|--samples 0|--samples -3|--steps 0|--steps 1.5|--steps x|--sigma nan|--sigma -1|--sigma 7|--sigma=
--task=|--task ,|--task nothing|--task sr4:sigma=|--task sr4:noise=1|--solver=|--solver nothing|--solver ddc:steps=x
--solver ddnm:eta=nan|--size 0|--size 31|--size 100000|--size -5|--model absent|--model tiny:name=../x|--model tiny,tiny
--model tiny:name=.|--images absent|--images model|--images file.txt|--images empty|--out file.txt|--out file.txt/a
--minutes nan|--minutes -1|--keep -1|--batch-size 0|--device nonsense|--device cuda:99|--precision bf16|--compile
--max-nfe 0|--slow-limit 0|--vgg16 absent|--fid-inception absent|--images one/damaged.png|--model file.txt|--size 1e9"""
REPRODUCE = (
    "--size 0|--size 31|--limit 0|--limit -1|--model absent|--models absent:name=no-lpips|--models a:b=c|--out file.txt"
)
BENCH = """absent more|--minutes 0|--minutes nan|--steps 0|--size 0|--size -3|--batches 0|--sizes -1|--counts 0
--repeats -1|--training -1|--device nonsense|--paper-size|--out file.txt"""


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("pictures", "one", "empty", "model"):
        (folder / name).mkdir()
    (folder / "tiny").symlink_to(tiny_model)
    Image.new("RGB", (40, 40), (200, 30, 90)).save(folder / "pictures" / "a.png")
    (folder / "one" / "damaged.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (folder / "file.txt").write_text("words")
    return folder


def commands() -> list[list[str]]:
    evaluate = [
        "--images",
        "pictures",
        "--out",
        "run",
        "--model",
        "tiny",
        "--size",
        "32",
        "--device",
        "cpu",
        "--no-report",
    ]
    odd = [["evaluate", *evaluate, *text.split()] for text in EVALUATE.replace("\n", "|").split("|")]
    table = ["table3", "--images", "pictures", "--model", "tiny", "--device", "cpu", "--no-report", "--out", "table"]
    odd += [["reproduce", *table, *text.split()] for text in REPRODUCE.split("|")]
    odd += [["bench", "tiny", "--device", "cpu", *text.split()] for text in BENCH.replace("\n", "|").split("|")]
    return odd


@pytest.mark.usefixtures("small_metrics")
def test_odd_command_lines(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(place)
    for words in commands():
        code = main(words)
        error = capsys.readouterr().err
        assert code == 2, (words, error)
        assert "Traceback" not in error, words
        if error.startswith("ddc: "):
            assert error.count("\n") == 1, (words, error)
    assert (place / "file.txt").read_text() == "words"
