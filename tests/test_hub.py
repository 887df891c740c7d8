"""Models on the Hub: fetched, pinned, cached and pushed, with a server that speaks its protocol."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from skimage import data

from ddc.cli import main
from ddc.cli.restore import Restore
from ddc.errors import UserError
from ddc.fleet import absolute
from ddc.hub import fetch_model, part_of
from ddc.images import Picture
from ddc.pipeline import RestorationPipeline
from hub_server import Hub
from tiny import tiny_unet


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with the model ann/tiny, which also has files that no model needs, and a cache of its own."""
    files = {
        path.relative_to(tiny_model).as_posix(): path.read_bytes() for path in tiny_model.rglob("*") if path.is_file()
    }
    with Hub().serving() as made:
        made.commit("ann/tiny", files | {"README.md": b"a card", "evil.py": b"x", "prior/pytorch_model.bin": b"pickle"})
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        monkeypatch.chdir(tmp_path)
        yield made


def test_a_model_is_fetched_by_its_name_and_nothing_else_of_it(hub: Hub, tiny_model: Path) -> None:
    there, here = (RestorationPipeline.from_pretrained(name) for name in ("ann/tiny", tiny_model))
    picture = Picture(data.astronaut()[20:52, 180:212])
    assert (there(picture, "sr2").picture.pixels == here(picture, "sr2").picture.pixels).all()
    kinds = {Path(name).suffix for name in hub.fetched}
    assert kinds == {".safetensors", ".json", ".md"} and "evil.py" not in hub.fetched
    assert there.folder is not None and not list(there.folder.rglob("*.py")) + list(there.folder.rglob("*.bin"))


def test_a_revision_is_kept_to(hub: Hub) -> None:
    first = hub.refs["ann/tiny"]["main"]
    hub.refs["ann/tiny"]["v1"] = first
    second = hub.commit("ann/tiny", hub.commits["ann/tiny"][first] | {"README.md": b"another card"})
    for revision, card in ((first, b"a card"), ("v1", b"a card"), (second, b"another card"), ("main", b"another card")):
        assert (fetch_model(f"ann/tiny@{revision}") / "README.md").read_bytes() == card
    assert fetch_model("ann/tiny").name == second and fetch_model(f"ann/tiny@{first}").name == first
    asked = hub.asked
    fetch_model(f"ann/tiny@{first}")  # a commit that is in the cache needs no connection
    assert hub.asked == asked


def test_the_workers_of_a_cluster_all_fetch_one_commit(hub: Hub, tiny_model: Path) -> None:
    first = hub.refs["ann/tiny"]["v1"] = hub.refs["ann/tiny"]["main"]
    for name in ("ann/tiny", "ann/tiny@v1"):
        command = absolute(Restore(inputs=(), out=Path("out"), model=Path(name)))
        assert command.model == Path(f"ann/tiny@{first}") and command.out == Path("out").absolute()
        hub.commit("ann/tiny", {"README.md": b"another"})  # to which main points now
    assert command.model is not None and (fetch_model(command.model) / "network").is_dir()
    assert absolute(Restore(inputs=(), out=Path("out"), model=tiny_model)).model == tiny_model
    with pytest.raises(UserError, match="the Hub has no model bob/none"):
        absolute(Restore(inputs=(), out=Path("out"), model=Path("bob/none")))


def test_a_changed_file_of_a_commit_is_refused(hub: Hub) -> None:
    name = f"ann/tiny@{hub.refs['ann/tiny']['main']}"
    folder = fetch_model(name)
    for changed in (next(folder.rglob("*.safetensors")), folder / "network" / "config.json"):
        before = changed.read_bytes()
        changed.resolve().write_bytes(before[:-1] + b"!")
        with pytest.raises(UserError, match=rf"{changed.name} is not the file of ann/tiny@"):
            fetch_model(name)
        changed.resolve().write_bytes(before)
    assert fetch_model(name) == folder


def test_the_cache_serves_where_the_hub_does_not(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="does not exist, and the Hub cannot be reached"):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        fetch_model("ann/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = fetch_model("ann/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = hub.asked
    assert fetch_model("ann/tiny") == folder and hub.asked == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    assert fetch_model("ann/tiny") == folder
    with pytest.raises(UserError, match="the Hub cannot be reached"):
        fetch_model("bob/other")


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "a/b/c",
        "a b/c",
        "/a/b",
        "../a/b",
        "-a/b",
        "ann/tiny@",
        "ann/tiny@a b",
        "ann/tiny@x@y",
        "é/b",
        "runs/mine",
    ],
)
def test_what_is_neither_a_folder_nor_a_model_is_told_in_one_sentence(
    name: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs").mkdir()
    Picture(data.astronaut()[:32, :32]).write("a.png")
    assert main(["restore", "a.png", "-o", "b.png", "--task", "denoise", f"--model={name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not exist, and it is no model on the Hub, as in user/model" in line and hub.asked == 0


def test_models_that_are_not_there(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.commit("ann/empty", {"weights.pt": b"pickle"})
    for name, words in {
        "bob/none": "the Hub has no model bob/none, or it is private",
        "ann/tiny@v9": "no such revision",
        f"ann/tiny@{'0' * 40}": "the Hub",
        "ann/empty": "has no safetensors or JSON files",
    }.items():
        assert main(["info", name]) == 2
        line = capsys.readouterr().err.splitlines()[-1]  # after the progress of the library
        assert line.startswith("ddc: ") and words in line and len(line) < 300, line


def test_hostile_answers_stay_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    files = hub.files("ann/tiny", "main")[1]
    for bad in (
        "../../../../outside.json",
        "/outside.json",
        "a/../../../../../outside.json",
        "\0.json",
        "x" * 300 + ".json",
    ):
        hub.commit("eve/evil", files | {bad: b"{}"})
        with pytest.raises(UserError) as refused:
            fetch_model("eve/evil")
            raise UserError("fetched without it")  # the library may pass the name over
        assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    assert not list(tmp_path.parent.glob("outside*")) and not Path("/outside.json").exists()


def test_export_pushes_with_a_card(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Path) -> None:
    assert main(["export", str(trained), "out/prior", "--push", "ann/mine"]) == 0
    where = capsys.readouterr().out.splitlines()[-1]
    assert where == f"ann/mine@{hub.refs['ann/mine']['main']}"
    files = hub.files("ann/mine", "main")[1]
    assert {Path(name).parts[0] for name in files} == {"prior", "README.md"}
    assert b"library_name: ddc" in files["README.md"] and b'from_pretrained("ann/mine")' in files["README.md"]
    assert b"step 1" in files["prior/README.md"] and b"CompactUNet" in files["prior/README.md"]
    pipe = RestorationPipeline.from_pretrained(where)
    assert pipe.prior.channels == 3 and pipe.folder is not None
    hub.commit("ann/mine", files | {"README.md": b"my own card"})  # which is kept
    assert main(["export", str(trained), "out/prior", "--push", "ann/mine"]) == 0
    assert hub.files("ann/mine", "main")[1]["README.md"] == b"my own card"


@pytest.mark.parametrize(
    ("name", "token"), [("mine", "hf_right"), ("a/b@main", "hf_right"), ("ann/x", ""), ("ann/x", "hf_wrong")]
)
def test_pushes_that_cannot_be(
    name: str, token: str, hub: Hub, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "nowhere")
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", "nowhere")
    assert main(["export", str(trained), "out", "--push", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("could not be pushed" in line) == (token == "hf_wrong") == Path("out").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, as `ddc train prior` leaves it."""
    pytest.importorskip("accelerate")
    from ddc.priors import Prior, schedule_from_config, scheduler_config
    from ddc.training.loop import train
    from ddc.training.objectives import PriorObjective
    from ddc.training.settings import PriorSettings

    folder, config = tmp_path_factory.mktemp("run"), scheduler_config()
    Picture(data.astronaut()[:64, :64]).write(folder / "pictures" / "a.png")
    settings = PriorSettings(
        data=(folder / "pictures",), out=folder / "out", steps=1, batch_size=1, crop=32, pictures_every=0
    )
    train(
        PriorObjective(settings, Prior(tiny_unet(3, 0), schedule_from_config(config), scheduler_config=config)),
        lambda _: None,
    )
    return folder / "out"


def test_each_network_has_its_place() -> None:
    assert part_of({"_class_name": "CompactUNet", "inputs": ["y"]}) == "network"
    assert part_of({"_class_name": "CompactUNet", "task": "sr4"}) == "i2sb-sr4"
    assert part_of({"_class_name": "CompactUNet", "posterior": True}) == "posterior"
    assert part_of({"_class_name": "DnCNN"}) == "dncnn" and part_of({"_class_name": "UNet2DModel"}) == "prior"


def test_the_environment_of_the_hub_is_honoured(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE, as they are set for a process."""
    code = "from ddc.hub import fetch_model; print(fetch_model('ann/tiny'))"
    given = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    for offline in ("0", "1"):
        asked = hub.asked
        environment = os.environ | given | {"HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).is_relative_to(tmp_path / "home") and (hub.asked > asked) == (offline == "0")
