"""What `ddc web --static` needs before it writes anything; tests/test_browser.py opens the page."""

import os
from pathlib import Path

import pytest

from ddc.cli import main
from ddc.errors import UserError
from ddc.web.site import RUNTIME, find_runtime, write_site


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
