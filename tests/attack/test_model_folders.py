"""Hostile model folders: each is a working model or is refused in one line, soon and in little memory."""

import json
import os
import random
import resource
import shutil
import signal
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from conftest import count
from ddc.cli import main
from ddc.convert import convert
from ddc.errors import UserError
from ddc.evaluation.run import weight_files
from ddc.networks import WEIGHTS, save_network
from ddc.pipeline import RestorationPipeline
from ddc.priors import DataConsistency, Prior, schedule_from_config, scheduler_config
from ddc.solvers.pnp_admm import DnCNN
from test_convert import reference
from tiny import small_diffusers, tiny_unet

PATIENCE = 10  # seconds
MEMORY = 600  # megabytes that all attacks of a test together may add
PICTURE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
CONFIG, SCHEDULER, INDEX = "config.json", "scheduler_config.json", f"{WEIGHTS}.safetensors.index.json"
UNET = ("prior", "unet")

Attack = Callable[[Path], None]


@contextmanager
def soon() -> Iterator[None]:
    """Fail after `PATIENCE` seconds, wherever the program is."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"still running after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """The memory of the process grows little, whatever a folder asks for."""

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    before = peak()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    assert peak() - before < MEMORY


def outcome(run: Callable[[], Any]) -> str:
    """ "works", or the one line of the refusal. Any other error is the test's."""
    with soon():
        try:
            run()
        except UserError as error:
            text = str(error)
            assert text and "\n" not in text and len(text) < 1000, text[:1000]
            return text
    return "works"


def restore(folder: Path) -> None:
    """Reads a model and restores a picture with it, as it is and on the fast path."""
    pipe = RestorationPipeline.from_pretrained(folder)
    weight_files(folder)
    for fast in (False, True):
        restored = pipe.to("cpu", fast)(PICTURE, "sr2", solver="ddc" if pipe.network else "ddnm", steps=2)
        assert np.isfinite(restored.picture.pixels).all() and restored.picture.size == (32, 32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Good models: of our class and of diffusers', both with prior/ and network/."""
    root = tmp_path_factory.mktemp("good")
    config = scheduler_config(clamp=1.0)
    made = {
        "compact": (tiny_unet(3, 0), tiny_unet(6, 1)),
        "diffusers": (small_diffusers(in_channels=3), small_diffusers(in_channels=6)),
    }
    for name, (prior, network) in made.items():
        Prior(prior, schedule_from_config(config), clamp=1.0, scheduler_config=config).save_pretrained(
            root / name / "prior"
        )
        DataConsistency(network).save_pretrained(root / name / "network")
        assert outcome(lambda name=name: restore(root / name)) == "works"
    return {name: root / name for name in made}


# ---------------------------------------------------------------------------------------------------------
# by hand


def edit(*place: str, file: str = CONFIG, drop: tuple[str, ...] = (), **changes: Any) -> Attack:
    """Changes a JSON file of a model."""

    def attack(folder: Path) -> None:
        path = folder.joinpath(*place, file)
        config = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in (config | changes).items() if k not in drop}))

    return attack


def write(*place: str, text: str | bytes) -> Attack:
    """Replaces a file of a model."""

    def attack(folder: Path) -> None:
        path = folder.joinpath(*place)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    return attack


def tensors(change: Callable[[dict[str, torch.Tensor]], Any], *place: str) -> Attack:
    """Changes the weights of a network."""

    def attack(folder: Path) -> None:
        path = folder.joinpath(*place or UNET, f"{WEIGHTS}.safetensors")
        state = load_file(path)
        change(state)
        save_file(state, path)

    return attack


def put(value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[next(iter(state))].view(-1)[0] = value

    return change


def cast(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda state: state.update({name: tensor.to(dtype) for name, tensor in state.items()})


def as_index(weight_map: Any) -> Attack:
    """Names shards in an index instead of the one file."""

    def attack(folder: Path) -> None:
        place = folder.joinpath(*UNET)
        shutil.copy(place / f"{WEIGHTS}.safetensors", folder.parent / "outside.safetensors")
        (place / f"{WEIGHTS}.safetensors").rename(place / "part.safetensors")
        (place / INDEX).write_text(json.dumps(weight_map))

    return attack


def linked(target: str, *place: str) -> Attack:
    def attack(folder: Path) -> None:
        path = folder.joinpath(*place)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(target)

    return attack


def fifo(folder: Path) -> None:
    path = folder.joinpath(*UNET, f"{WEIGHTS}.safetensors")
    path.unlink()
    os.mkfifo(path)


def header(text: bytes, size: int | None = None) -> Attack:
    """A safetensors file with this header, and 64 bytes of data."""
    length = struct.pack("<Q", len(text) if size is None else size)
    return write(*UNET, f"{WEIGHTS}.safetensors", text=length + text + bytes(64))


HUGE = b'{"a":{"dtype":"F32","shape":[1000000000000,1000000000000],"data_offsets":[0,64]}}'
COMPACT: dict[str, tuple[Attack, str]] = {
    "a thousand million blocks": (edit(*UNET, encoder_blocks=[10**9, 1]), "encoder_blocks"),
    "a thousand million blocks on the way up": (edit(*UNET, decoder_blocks=[10**9]), "decoder_blocks"),
    "a thousand million in the middle": (edit(*UNET, middle_blocks=10**9), "middle_blocks"),
    "a million channels": (edit(*UNET, channels=[10**6, 10**6]), "channels"),
    "channels that do not fit the weights": (edit(*UNET, channels=[8192, 8192]), "do not fit"),
    "negative channels": (edit(*UNET, channels=[-8, 16]), "channels"),
    "no channels": (edit(*UNET, channels=[], encoder_blocks=[], decoder_blocks=[]), "0 levels"),
    "thirty levels": (edit(*UNET, channels=[8] * 30, encoder_blocks=[1] * 30, decoder_blocks=[1] * 29), "at most 8"),
    "channels as text": (edit(*UNET, channels="many"), "channels"),
    "channels as a number": (edit(*UNET, channels=8), "channels"),
    "channels in parts": (edit(*UNET, channels=[8.5, 16]), "channels"),
    "channels as truth values": (edit(*UNET, channels=[True, True]), "channels"),
    "channels in channels": (edit(*UNET, channels=[[8], [16]]), "channels"),
    "nothing as channels": (edit(*UNET, channels=None), "channels"),
    "groups of zero": (edit(*UNET, groups=0), "groups"),
    "a head of zero": (edit(*UNET, head_dim=0), "head_dim"),
    "a patch of a million": (edit(*UNET, patch_size=10**6), "patch_size"),
    "a patch of zero": (edit(*UNET, patch_size=0), "patch_size"),
    "attention nowhere": (edit(*UNET, attention_levels=[5]), "attention_levels"),
    "an unknown setting": (edit(*UNET, __import__="os"), "no setting|works"),
    "an unknown class": (edit(*UNET, _class_name="os.system"), "not known"),
    "a class that is a list": (edit(*UNET, _class_name=["CompactUNet"]), "not known"),
    "deep JSON": (write(*UNET, CONFIG, text='{"a":' * 100_000 + "1" + "}" * 100_000), "not valid JSON"),
    "deep JSON list": (write(*UNET, CONFIG, text="[" * 200_000), "not valid JSON"),
    "a number of 10,000 digits": (write(*UNET, CONFIG, text='{"groups": ' + "9" * 10_000 + "}"), "not valid JSON"),
    "a long configuration": (write(*UNET, CONFIG, text=" " * 11_000_000 + "{}"), "too long"),
    "not UTF-8": (write(*UNET, CONFIG, text=b"\xff\xfe\x00{"), "not valid JSON"),
    "an empty configuration": (write(*UNET, CONFIG, text=""), "not valid JSON"),
    "a configuration of null": (write(*UNET, CONFIG, text="null"), "one JSON object"),
    "no settings": (write(*UNET, CONFIG, text="{}"), "do not fit"),
    "NaN in the weights": (tensors(put(float("nan"))), "NaN or infinity"),
    "infinity in the weights": (tensors(put(float("inf"))), "NaN or infinity"),
    "NaN in the network": (tensors(put(float("nan")), "network"), "NaN or infinity"),
    "8 bits without scales": (tensors(cast(torch.int8)), "have no scales"),
    "whole numbers": (tensors(cast(torch.int16)), "works"),
    "half precision": (tensors(cast(torch.float16)), "works"),
    "weights that only overflow when it runs": (tensors(lambda s: [t.fill_(3e38) for t in s.values()]), "finite"),
    "a weight of another shape": (tensors(lambda s: s.update({"enter.bias": torch.zeros(9)})), "do not fit"),
    "a weight without dimensions": (tensors(lambda s: s.update({"enter.bias": torch.zeros(())})), "do not fit"),
    "one weight too many": (tensors(lambda s: s.update({"x\ny": torch.zeros(1)})), "do not fit"),
    "one weight too few": (tensors(lambda s: s.pop("enter.bias")), "do not fit"),
    "no weight at all": (tensors(lambda s: s.clear()), "do not fit"),
    "an index without a map": (as_index({}), "weight_map"),
    "an empty map": (as_index({"weight_map": {}}), "weight_map"),
    "a map that is a list": (as_index({"weight_map": ["part.safetensors"]}), "weight_map"),
    "a map to numbers": (as_index({"weight_map": {"a": 7}}), "weight_map"),
    "a map outside": (as_index({"weight_map": {"a": "../../../outside.safetensors"}}), "same folder"),
    "a map to an absolute path": (as_index({"weight_map": {"a": "/etc/x.safetensors"}}), "same folder"),
    "a map to a missing shard": (as_index({"weight_map": {"a": "none.safetensors"}}), "missing"),
    "a map to the folder": (as_index({"weight_map": {"a": ".."}}), "same folder"),
    "a good map": (as_index({"weight_map": {"a": "part.safetensors"}}), "works"),
    "a header of 2^60 bytes": (header(HUGE, 1 << 60), "not a good safetensors"),
    "a header of 0 bytes": (header(b"", 0), "not a good safetensors"),
    "a tensor of 10^24 numbers": (header(HUGE), "not a good safetensors"),
    "a header that is no JSON": (header(b"{{{{"), "not a good safetensors"),
    "an empty weights file": (write(*UNET, f"{WEIGHTS}.safetensors", text=""), "not a good safetensors"),
    "a pipe for weights": (fifo, "no weights"),
    "weights that link to themselves": (
        linked(f"{WEIGHTS}.safetensors", *UNET, f"{WEIGHTS}.safetensors"),
        "no weights",
    ),
    "weights that link to a device": (linked("/dev/zero", *UNET, f"{WEIGHTS}.safetensors"), "no weights"),
    "a configuration that links to a device": (linked("/dev/zero", *UNET, CONFIG), "no config.json"),
    "a network that links to its model": (linked("..", "network"), "no config.json"),
    "a prior that links to its model": (linked("..", "prior"), "Symbolic|not a model|no config|cannot be read"),
    "a scheduler that is a list": (edit("prior", "scheduler", file=SCHEDULER, _class_name=[]), "not supported"),
    "a schedule of 10^9 steps": (edit("prior", "scheduler", file=SCHEDULER, num_train_timesteps=10**9), "num_train"),
    "a schedule of no steps": (edit("prior", "scheduler", file=SCHEDULER, num_train_timesteps=0), "num_train"),
    "steps as text": (edit("prior", "scheduler", file=SCHEDULER, num_train_timesteps="1000"), "num_train"),
    "beta above 1": (edit("prior", "scheduler", file=SCHEDULER, beta_end=3), "betas"),
    "beta as NaN": (edit("prior", "scheduler", file=SCHEDULER, beta_start=float("nan")), "betas"),
    "betas as text": (edit("prior", "scheduler", file=SCHEDULER, trained_betas="0.1"), "betas"),
    "betas of lists": (edit("prior", "scheduler", file=SCHEDULER, trained_betas=[[0.1]]), "betas"),
    "an unknown prediction": (edit("prior", "scheduler", file=SCHEDULER, prediction_type=["x"]), "not known"),
    "a clamp as text": (edit("prior", "scheduler", file=SCHEDULER, clip_sample_range="1"), "clip_sample_range"),
    "a clamp of infinity": (edit("prior", "scheduler", file=SCHEDULER, clip_sample_range=float("inf")), "clip_sample"),
    "inputs as a number": (edit("network", inputs=7), "short list"),
    "inputs of lists": (edit("network", inputs=[["y"]]), "short list"),
    "inputs of a million names": (edit("network", inputs=["y"] * 10**6), "short list"),
    "unknown inputs": (edit("network", inputs=["z"]), "not known"),
    "an unknown residual": (edit("network", residual="y"), "not known"),
    "another number of outputs": (edit("network", out_channels=6), "do not fit"),
}


@pytest.mark.parametrize("name", COMPACT)
def test_a_hostile_folder_is_refused_in_one_line_or_works(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    attack, expected = COMPACT[name]
    folder = tmp_path / "model"
    shutil.copytree(models["compact"], folder)
    attack(folder)
    assert any(part in outcome(lambda: restore(folder)) for part in expected.split("|"))


DIFFUSERS: dict[str, dict[str, Any]] = {
    "layers": {"layers_per_block": 10**9},
    "widths": {"block_out_channels": [10**9, 10**9]},
    "one width": {"block_out_channels": 8},
    "many levels": {"block_out_channels": [8] * 40, "down_block_types": ["DownBlock2D"] * 40},
    "blocks": {"down_block_types": ["os.system", "DownBlock2D"]},
    "blocks as a number": {"up_block_types": 3},
    "no groups": {"norm_num_groups": 0},
    "eps as text": {"norm_eps": "small"},
    "eps of nothing": {"norm_eps": None},
    "activation": {"act_fn": "eval"},
    "activation as a list": {"act_fn": ["silu"]},
    "head of zero": {"attention_head_dim": 0},
    "classes": {"num_class_embeds": 10},
    "classes of time": {"class_embed_type": "timestep"},
    "scale of zero": {"mid_block_scale_factor": 0},
    "shift as text": {"freq_shift": "0"},
    "embedding": {"time_embedding_type": "fourier"},
    "learned embedding": {"time_embedding_type": "learned", "num_train_timesteps": 10**9},
    "channels as text": {"in_channels": "3"},
    "guided": {"_class_name": "GuidedUNet", "num_heads": "two"},
    "guided time": {"_class_name": "GuidedUNet", "time_channels": 10**7},
}


@pytest.mark.parametrize("name", DIFFUSERS)
def test_hostile_settings_of_diffusers_are_refused_in_one_line(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["diffusers"], folder)
    edit(*UNET, **DIFFUSERS[name])(folder)
    assert outcome(lambda: restore(folder)) != "works"


@pytest.mark.parametrize(
    "config",
    [
        {"depth": 10**9},
        {"width": 10**9},
        {"depth": "deep"},
        {"depth": 0},
        {"sigma_y": "x"},
        {"width": 16},
    ],
)
def test_a_hostile_denoiser_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    DnCNN(depth=3, width=8).save_pretrained(tmp_path)
    assert outcome(lambda: DnCNN.from_pretrained(tmp_path)) == "works"
    edit(**config)(tmp_path)
    assert outcome(lambda: DnCNN.from_pretrained(tmp_path)) != "works"


# ---------------------------------------------------------------------------------------------------------
# by chance

NUMBERS = st.one_of(st.integers(-3, 20), st.integers(), st.floats(), st.sampled_from([10**9, 10**18, -1, 0, 2**31]))
SCALARS = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=8), st.just("../../x"))
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=4), st.dictionaries(st.text(max_size=4), SCALARS, max_size=2))
FILES = (("prior", "unet", CONFIG), ("prior", "scheduler", SCHEDULER), ("network", CONFIG))


@pytest.mark.parametrize("kind", ["compact", "diffusers"])
def test_mutated_configurations(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    tried: set[str] = set()

    @settings(
        max_examples=count(25, 200),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(FILES))
        config = json.loads(models[kind].joinpath(*place).read_text())
        for _ in range(data.draw(st.integers(1, 2))):
            config[data.draw(st.sampled_from(sorted(config)))] = data.draw(VALUES)
        folder = tmp_path / str(len(tried))
        shutil.copytree(models[kind], folder)
        folder.joinpath(*place).write_text(json.dumps(config))
        tried.add(str(folder))
        outcome(lambda: restore(folder))
        shutil.rmtree(folder)

    attack()
    assert tried


def test_mutated_weights(models: dict[str, Path], tmp_path: Path) -> None:
    """Bytes of the header or of the numbers are changed, cut off or added."""
    chance = random.Random(0)
    content = models["compact"].joinpath(*UNET, f"{WEIGHTS}.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    refused = 0
    for number in range(count(25, 150)):
        changed = bytearray(content)
        if number % 5 == 0:
            changed = changed[: chance.randrange(len(content))]
        elif number % 5 == 1:
            changed += bytes(chance.randrange(1, 1000))
        else:
            for _ in range(chance.randint(1, 8)):
                changed[chance.randrange(start if number % 5 < 4 else len(content))] = chance.randrange(256)
        folder = tmp_path / str(number)
        shutil.copytree(models["compact"], folder)
        folder.joinpath(*UNET, f"{WEIGHTS}.safetensors").write_bytes(changed)
        refused += outcome(lambda folder=folder: restore(folder)) != "works"
        shutil.rmtree(folder)
    assert refused >= count(15, 90)


# ---------------------------------------------------------------------------------------------------------
# through the commands


@pytest.mark.parametrize(
    "name", ["a thousand million blocks", "NaN in the weights", "deep JSON", "an index without a map", "a good map"]
)
def test_info_says_it_in_one_line(
    name: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["compact"], folder)
    COMPACT[name][0](folder)
    with soon():
        code = main(["info", str(folder)])
    said = capsys.readouterr().err
    assert (code == 0) == (name == "a good map")
    assert "Traceback" not in said and len(said.strip().splitlines()) == (0 if code == 0 else 1)


def test_restoring_with_broken_weights_is_an_error(models: dict[str, Path], tmp_path: Path) -> None:
    from ddc.images import Picture

    folder = tmp_path / "model"
    shutil.copytree(models["compact"], folder)
    tensors(put(float("nan")))(folder)
    Picture(PICTURE).write(tmp_path / "in.png")
    words = ["restore", str(tmp_path / "in.png"), "-o", str(tmp_path / "out.png"), "--task", "sr2", "--model"]
    assert main([*words, str(folder)]) != 0
    assert not (tmp_path / "out.png").exists()
    assert main([*words, str(models["compact"]), "--steps", "2"]) == 0


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state.update({new: state.pop(old)})


def huge_view(state: dict[str, Any]) -> None:
    state["input_blocks.0.0.weight"] = torch.zeros(1).expand(10**7, 10**5)


CHECKPOINTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a block of nine digits": lambda s: s.update({"input_blocks.999999999.0.op.weight": torch.zeros(1)}),
    "a block of 5,000 digits": lambda s: s.update({f"input_blocks.{'9' * 5000}.0.op.weight": torch.zeros(1)}),
    "a block without a number": lambda s: s.update({"input_blocks.x.0.weight": torch.zeros(1)}),
    "a short name": lambda s: s.update({"input_blocks.1": torch.zeros(1)}),
    "a short name on the way up": lambda s: s.update({"output_blocks": torch.zeros(1)}),
    "block 999": lambda s: s.update({"input_blocks.999.0.op.weight": torch.zeros(1)}),
    "NaN": lambda s: s["out.2.bias"].fill_(float("nan")),
    "no dimensions": lambda s: s.update({"time_embed.0.weight": torch.zeros(())}),
    "one dimension": lambda s: s.update({"input_blocks.0.0.weight": torch.zeros(3)}),
    "flat attention": lambda s: s.update({"middle_block.1.qkv.weight": torch.zeros(7)}),
    "a width of zero": lambda s: s.update({"input_blocks.1.0.out_layers.3.weight": torch.zeros(0, 3, 3, 3)}),
    "a large view of one number": huge_view,
    "a view that is larger than memory": lambda s: s.update({"out.2.bias": torch.zeros(1).expand(1 << 50)}),
    "an empty name": lambda s: s.update({"": torch.zeros(1)}),
    "a name that is missing": renamed("time_embed.2.bias", "time_embed.3.bias"),
    "a class table without dimensions": lambda s: s.update({"label_emb.weight": torch.zeros(())}),
}


@pytest.fixture(scope="module")
def good_state() -> dict[str, Any]:
    return reference().state_dict()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused_in_one_line(name: str, good_state: dict[str, Any], tmp_path: Path) -> None:
    state = {key: tensor.clone() for key, tensor in good_state.items()}
    CHECKPOINTS[name](state)
    torch.save(state, tmp_path / "model.pt")
    assert outcome(lambda: convert(tmp_path / "model.pt", tmp_path / "out", head_channels=16)) != "works"
    assert not (tmp_path / "out").exists()


def test_mutated_checkpoints(good_state: dict[str, Any], tmp_path: Path) -> None:
    """Tensors are removed, renamed, reshaped, cut or cast."""
    chance, refused = random.Random(1), 0
    for number in range(count(12, 80)):
        state = {key: tensor.clone() for key, tensor in good_state.items()}
        for _ in range(chance.randint(1, 3)):
            key = chance.choice(sorted(state))
            change = chance.randrange(6)
            if change == 0:
                del state[key]
            elif change == 1:
                state[chance.choice(sorted(good_state)) + chance.choice(["", ".1", ".weight"])] = state[key]
            elif change == 2:
                state[key] = state[key].flatten()
            elif change == 3:
                state[key] = state[key][: chance.randint(0, 3)]
            elif change == 4:
                state[key] = state[key].to(chance.choice([torch.int8, torch.float64, torch.bool, torch.complex64]))
            else:
                state[key.replace("0", str(chance.randrange(10**6)), 1)] = state[key]
        path, out = tmp_path / f"{number}.pt", tmp_path / f"out{number}"
        torch.save(state, path)
        works = outcome(lambda path=path, out=out: convert(path, out, head_channels=16)) == "works"
        assert out.exists() == works
        refused += not works
    assert refused > 0


def test_a_folder_of_circles_is_listed_once(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["compact"], folder)
    for name in ("a", "b", "c"):
        (folder / name).symlink_to(folder)
    with soon():
        assert weight_files(folder).keys() == weight_files(models["compact"]).keys()


def test_a_posterior_and_a_bridge_of_the_wrong_kind(tmp_path: Path) -> None:
    from ddc.solvers.bridge import Bridge
    from ddc.solvers.posterior import PosteriorDenoiser

    save_network(tiny_unet(3, 0), tmp_path / "bridge", extra_config={"task": ["sr4"], "sigma_max": "much"})
    assert "sigma_max" in outcome(lambda: Bridge.from_pretrained(tmp_path / "bridge"))
    save_network(tiny_unet(3, 0), tmp_path / "posterior", extra_config={"posterior": True})
    assert "channels" in outcome(lambda: PosteriorDenoiser.from_pretrained(tmp_path / "posterior"))
