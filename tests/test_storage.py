"""Pictures behind URLs: fsspec's memory, and buckets of an S3 server in this process."""

import http.server
import json
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from skimage import data

from ddc.cli import main
from ddc.datasets import find_sources
from ddc.errors import UserError
from ddc.images import Picture
from ddc.storage import Remote, located

PHOTO = data.astronaut()[100:124, 200:232]


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def restore(tiny_model: Path) -> Callable[..., int]:
    def run(*arguments: object) -> int:
        options = ("--model", str(tiny_model), "--device", "cpu", "--task", "sr2", "--steps", "1")
        return main(["restore", *options, *map(str, arguments)])

    return run


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty bucket."""
    import s3fs

    for name, value in {"ENDPOINT_URL": s3_server, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    fs.mkdir("pictures")
    yield located("s3://pictures")
    fs.rm("pictures", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_url_is_a_path() -> None:
    url = located(Path("s3://bucket/in"))  # which has lost a slash
    assert isinstance(url, Remote) and str(url) == "s3://bucket/in"
    assert str((url / "a" / "b.png").with_suffix(".jpg")) == "s3://bucket/in/a/b.jpg"
    assert url == located("s3://bucket/in/") and pickle.loads(pickle.dumps(url)) == url
    assert url.is_dir() and not (url / "b.png").is_dir()
    assert [located(text) for text in ("C:/x", "a/b", "file:///a/b")] == [Path("C:/x"), Path("a/b"), Path("/a/b")]


def test_a_folder_in_memory_gives_the_same_files_as_a_local_one(
    restore: Callable[..., int], memory: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    for name in ("a.png", "below/b.jpg", ".hidden/c.png"):
        Picture(PHOTO).write(tmp_path / "in" / name, 40)
        memory.pipe_file(f"/in/{name}", (tmp_path / "in" / name).read_bytes())
    memory.pipe_file("/in/notes.txt", b"no picture")
    options = ("--task", "jpeg")  # reads the quality from the file
    assert restore(tmp_path / "in", "-o", tmp_path / "out") == 0
    assert restore("memory://in", "-o", "memory://in/out") == 0
    assert restore(tmp_path / "in" / "below", "-o", tmp_path / "jpeg", *options) == 0
    assert restore("memory://in/below/b.jpg", "-o", "memory://jpeg/b.jpg", *options) == 0
    made = {name.removeprefix("/in/out/") for name in memory.find("/in/out")}
    assert made == {"a.png", "below/b.jpg"}  # whole, and nothing beside them
    for name in made:
        assert memory.cat_file(f"/in/out/{name}") == (tmp_path / "out" / name).read_bytes()
    assert memory.cat_file("/jpeg/b.jpg") == (tmp_path / "jpeg" / "b.jpg").read_bytes()
    assert Picture.read("memory://in/out/a.png").size == (48, 64)


def test_a_dataset_may_lie_behind_a_url(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    Picture(PHOTO).write(tmp_path / "a.png")
    memory.pipe_file("/data/below/a.png", (tmp_path / "a.png").read_bytes())
    (source,) = find_sources([Path("memory://data")])
    assert source.name == "below/a.png" and source.read() == (tmp_path / "a.png").read_bytes()


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_table_may_lie_behind_a_url(ending: str, memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    Picture(PHOTO).write(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    table, sink = pa.table({"image": [content, b"other"]}), pa.BufferOutputStream()
    if ending == "parquet":
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    memory.pipe_file(f"/data/train.{ending}", sink.getvalue().to_pybytes())
    assert [source.read() for source in find_sources([Path("memory://data")])] == [content, b"other"]


@pytest.mark.parametrize(
    "words",
    [
        "demo --out s3://b/x",
        "restore a.png -o b.png --model s3://b/x",
        "restore a.png -o b.png --task inpaint --mask s3://b/x",
        "train prior --data s3://pictures --out s3://b/x",
        "export s3://b/x out",
        "info s3://b/x",
        "reproduce table1 --images s3://pictures --out s3://b/x",
        "web --static s3://b/x",
    ],
)
def test_elsewhere_urls_are_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ddc: s3://b/x is a URL, but ") and "takes local paths only" in line
    assert not list(tmp_path.iterdir())


def test_a_measurement_may_be_in_a_bucket(bucket: Remote, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ddc degrade` and `ddc evaluate`: pictures from a bucket, results into it; and again, with nothing to do."""
    for number in range(2):
        Picture(data.astronaut()[40 * number :, 40:][:40, :40]).write(bucket / "clean" / f"{number}.png")
    assert main(["degrade", str(bucket / "clean"), "-o", str(bucket / "small"), "--task", "sr2"]) == 0
    assert Picture.read(bucket / "small" / "0.png").size == (20, 20)
    words = ["evaluate", "--images", str(bucket / "clean"), "--out", str(bucket / "run"), "--model", str(tiny_model)]
    words += ["--size", "32", "--solver", "ddnm:steps=2", "--device", "cpu", "--no-report", "--keep", "0"]
    assert main(words) == 0
    before = (bucket / "run").files()
    assert any(name.endswith(".jsonl") for name in before)
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 rows are in s3://pictures/run"
    assert set((bucket / "run").files()) == set(before)


def test_from_bucket_to_bucket_and_again(
    restore: Callable[..., int], bucket: Remote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        Picture(PHOTO).write(bucket / "in" / f"{number}.png")
    (tmp_path / "bad.png").write_bytes(b"not a picture")
    (bucket / "in" / "bad.png").send(tmp_path / "bad.png")
    assert restore(bucket / "in", "-o", bucket / "out") == 1
    assert set((bucket / "out").files()) == {*(f"{number}.png" for number in range(4)), "ddc-failures.json"}
    (failure,) = json.loads((bucket / "out" / "ddc-failures.json").read_bytes())
    assert failure["input"] == "s3://pictures/in/bad.png"
    assert failure["error"].startswith("s3://pictures/in/bad.png is not a picture")
    (bucket / "in" / "bad.png").unlink()
    (bucket / "out" / "2.png").unlink()
    capsys.readouterr()
    assert restore(bucket / "in", "-o", bucket / "out", "--skip-existing") == 0
    assert capsys.readouterr().out == "s3://pictures/out/2.png\n"
    assert len((bucket / "out").files()) == 4  # and the list of failures is gone


def test_pictures_on_a_web_server(
    restore: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Picture(PHOTO).write(tmp_path / "in" / "a.png")
    Picture(PHOTO).write(tmp_path / "in" / "below" / "b.png")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(tmp_path))

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert restore(f"{url}/in", "-o", tmp_path / "out") == 0
        assert sorted(source.name for source in find_sources([Path(f"{url}/in")])) == ["a.png", "below/b.png"]
        assert located(f"{url}/in").exists() and located(f"{url}/in/a.png").exists()
        assert restore(f"{url}/none", "-o", tmp_path / "no") == 2
        assert f"{url}/none does not exist" in capsys.readouterr().err
        server.shutdown()
    assert restore(tmp_path / "in", "-o", tmp_path / "local") == 0
    for name in ("a.png", "below/b.png"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    assert restore(f"{url}/in", "-o", tmp_path / "no") == 2
    assert f"{url}/in cannot be listed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("s3://nobody/in", "-o", "out"), "s3://nobody/in does not exist; check the bucket"),
        (("s3://pictures/in", "-o", "out"), "s3://pictures/in has no pictures in it"),
        (("s3://pictures/none.png", "-o", "out.png"), "s3://pictures/none.png does not exist"),
        (("PHOTO", "-o", "s3://nobody/out"), "s3://nobody/out cannot be written: there is no such bucket"),
        (("PHOTO", "-o", "https://localhost/out"), "https://localhost/out can be read, not written"),
        (("odd://a/b", "-o", "out"), "odd://a/b cannot be listed (Protocol not known: odd)"),
        (("sftp://a/b", "-o", "out"), "sftp://a/b cannot be listed"),
    ],
)
def test_bad_urls(
    given: tuple[str, ...],
    told: str,
    restore: Callable[..., int],
    bucket: Remote,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Picture(PHOTO).write(tmp_path / "PHOTO.png")
    assert restore(*("PHOTO.png" if word == "PHOTO" else word for word in given)) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_right_to_write_is_told_before_the_first_picture(
    restore: Callable[..., int], bucket: Remote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import s3fs

    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::pictures/*"}
    fs = s3fs.S3FileSystem()
    fs.call_s3(
        "put_bucket_policy", Bucket="pictures", Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    )
    (tmp_path / "in.png").write_bytes(b"never read")
    assert restore(tmp_path / "in.png", "-o", bucket / "out") == 2
    error = capsys.readouterr().err
    assert "cannot be written" in error and "rights" in error and error.count("\n") == 1
    fs.call_s3("delete_bucket_policy", Bucket="pictures")


class Near(LocalFileSystem):
    """A file system where a file appears while it is written, as on an SFTP server."""

    protocol = "near"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return LocalFileSystem._strip_protocol("/" + path.removeprefix("near://").lstrip("/"))


def test_where_files_appear_in_parts_they_are_sent_under_another_name(tmp_path: Path) -> None:
    fsspec.register_implementation("near", Near, clobber=True)
    target = located(f"near://{tmp_path}/deep/a.png")
    Picture(PHOTO).write(target)
    assert Picture.read(target).size == PHOTO.shape[:2]
    with pytest.raises(UserError, match="could not be written"):
        Picture(PHOTO).write(target / "b.png")  # below a file
    assert [path.name for path in tmp_path.rglob("*")] == ["deep", "a.png"]
