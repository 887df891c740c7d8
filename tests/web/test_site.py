"""What `ddc web --static` needs before it writes anything; tests/test_browser.py opens the page."""

import gzip
import hashlib
import json
import os
import tarfile
from base64 import b64encode
from pathlib import Path

import pytest

from ddc.cli import main
from ddc.errors import UserError
from ddc.onnx.export import WEIGHTS
from ddc.web import site
from ddc.web.site import RUNTIME, find_runtime, write_site
from tiny import tiny_network


def npm(folder: Path, script: str) -> str:
    """A PATH on which npm is this shell script."""
    folder.mkdir(exist_ok=True)
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_a_folder_with_files_is_left_alone(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "mine.txt").write_text("mine")
    assert main(["web", "--static", str(tmp_path / "page"), "--model", str(tiny_model)]) == 2
    assert "already exists; name a new or empty folder" in capsys.readouterr().err
    with pytest.raises(UserError, match="already exists"):
        write_site(tmp_path / "page" / "mine.txt", tiny_model)
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["mine.txt"]


def test_a_runtime_that_is_not_the_known_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.tgz is not a file; expected onnxruntime-web-.*npm pack"):
        find_runtime(tmp_path / "absent.tgz")
    (tmp_path / "other.tgz").write_bytes(b"another archive")
    with pytest.raises(UserError, match=r"other\.tgz is not onnxruntime-web.* or is damaged"):
        find_runtime(tmp_path / "other.tgz")
    assert (tmp_path / "other.tgz").exists()  # it is the user's


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_npm_fetches_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="npm, which fetches it, is not installed"):
        find_runtime(None)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", npm(tmp_path / "bin", "echo 'no  network' >&2; exit 1"))
    with pytest.raises(UserError, match=r"npm could not fetch .* \(no network\)"):
        find_runtime(None)
    assert not list((tmp_path / "cache").rglob("*.tgz"))
    npm(tmp_path / "bin", f'test "$*" = "pack onnxruntime-web@1.30.0 --silent" && echo a file > {RUNTIME}')
    with pytest.raises(UserError, match="delete it, and fetch it again"):  # of another content
        find_runtime(None)
    assert [path.name for path in (tmp_path / "cache").rglob("*.tgz")] == [RUNTIME]


def test_the_page_is_written_with_what_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    tiny_network().save_pretrained(tmp_path / "model" / "network")
    (tmp_path / "dist").mkdir()
    engines = [f"{engine}.{end}" for engine in site.ENGINES for end in ("mjs", "wasm")]
    with tarfile.open(tmp_path / "runtime.tgz", "w:gz") as archive:
        for name in (*site.MODULES, *engines, "unused.js"):
            (tmp_path / "dist" / name).write_text(f"content of {name}")
            archive.add(tmp_path / "dist" / name, f"package/dist/{name}")
    digest = hashlib.sha512((tmp_path / "runtime.tgz").read_bytes()).digest()
    monkeypatch.setattr(site, "INTEGRITY", b64encode(digest).decode())
    (tmp_path / "page").mkdir()  # an empty folder is taken
    write_site(tmp_path / "page", tmp_path / "model", tmp_path / "runtime.tgz", side=64)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "model", "page", "runtime.tgz"]
    packed = [name + ".packed" if name.endswith(".wasm") else name for name in engines]
    assert {path.name for path in (tmp_path / "page" / "ort").iterdir()} == {*site.MODULES, *packed}
    wasm = next(name for name in packed if name.endswith(".packed"))
    assert gzip.decompress((tmp_path / "page" / "ort" / wasm).read_bytes()).decode().startswith("content of ort-wasm")
    examples = json.loads((tmp_path / "page" / "examples" / "examples.json").read_text())
    assert all((tmp_path / "page" / "examples" / example["file"]).is_file() for example in examples)
    assert {example["kind"] for example in examples} <= set(site.KINDS.values()) and examples
    worker = (tmp_path / "page" / "sw.js").read_text()
    assert "{{" not in worker and '"index.html"' in worker and "ort/" not in worker.partition("]")[0]
    assert site.POLICY in (tmp_path / "page" / "index.html").read_text()
    assert (tmp_path / "page" / "model" / f"{WEIGHTS}.packed").is_file()
