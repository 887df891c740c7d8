"""`ddc train` and `ddc export` as people type them."""

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open
from training_parts import (
    INPUTS,
    quick_arguments,
    tiny_prior,
    write_config,
)

from ddc.cli import main
from ddc.pipeline import find_part
from ddc.priors import DataConsistency, Prior, scheduler_config
from ddc.solvers.bridge import Bridge
from ddc.solvers.pnp_admm import DnCNN
from ddc.training.loop import load_moments

MOMENTS = ("exp_avg", "exp_avg_sq")


def test_help_does_not_need_torch() -> None:
    script = (
        "import sys; from ddc.cli import main; main(['train', '--help']); main(['train', 'ddc', '--help']);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n") and "--sigma-max" in done.stdout
    for kind in ("prior", "ddc", "i2sb", "dncnn", "autoencoder", "latent"):
        assert f"• {kind}" in done.stdout


def test_pictures_behind_urls_give_the_same_model(pictures: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "prior.json", in_channels=3)
    memory = fsspec.filesystem("memory")
    memory.put(str(pictures), "/photos", recursive=True)
    for out, data in (("local", str(pictures)), ("far", "memory://photos")):
        words = [*quick_arguments(Path(data), tmp_path / out, steps=1), "--network", str(config), "--validation", data]
        assert main(["train", "prior", *words]) == 0
    memory.rm("/photos", recursive=True)
    near, far = (Prior.from_pretrained(tmp_path / out / "model").unet.state_dict() for out in ("local", "far"))
    assert all(torch.equal(near[name], far[name]) for name in near)


def test_prior_then_network_then_export(pictures: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "prior.json", in_channels=3)
    words = quick_arguments(pictures, tmp_path / "p", steps=2)
    assert main(["train", "prior", *words, "--network", str(config), "--learned-variance"]) == 0
    prior = Prior.from_pretrained(tmp_path / "p" / "model")
    assert prior.learns_variance and prior.prediction_type == "v_prediction"

    network = write_config(tmp_path / "n.json", inputs=INPUTS, residual="blend")
    words = quick_arguments(pictures, tmp_path / "n", steps=2)
    words += ["--prior", str(tmp_path / "p" / "model"), "--network", str(network), "--tasks", "sr4"]
    assert main(["train", "ddc", *words, "--sigma-max", "0.05", "--wide-tasks", "jpeg5-95"]) == 0
    folder = tmp_path / "exported"
    options = ["--dtype", "fp16", "--shard-mb", "0.02"]
    assert main(["export", str(tmp_path / "n"), str(folder), *options]) == 0
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1 and all(path.stat().st_size < 25_000 for path in shards)
    with safe_open(shards[0], "pt") as file:
        assert all(file.get_tensor(name).dtype == torch.float16 for name in file.keys())  # noqa: SIM118
    exported, written = (DataConsistency.from_pretrained(p) for p in (folder, tmp_path / "n" / "model"))
    assert exported.inputs == INPUTS and exported.residual == "blend"
    for name, tensor in written.state_dict().items():
        assert torch.equal(tensor, exported.state_dict()[name])

    begun = ["--init", str(folder), "--steps", "1"]
    assert main(["train", "ddc", *quick_arguments(pictures, tmp_path / "m"), *words[-6:], *begun]) == 0
    other = tiny_prior(beta_schedule="squaredcos_cap_v2")
    other.save_pretrained(tmp_path / "cosine")
    again = ["--prior", str(tmp_path / "cosine"), *begun]
    assert main(["train", "ddc", *quick_arguments(pictures, tmp_path / "k"), *again]) == 2
    assert not (tmp_path / "k").exists()


def test_counts_below_one_are_refused(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "p.json")
    for option in ("--batch-size", "--save-every"):
        words = [*quick_arguments(pictures, tmp_path / "z"), "--network", str(config), option, "0"]
        assert main(["train", "prior", *words]) == 2
        assert f"{option} is 0; expected 1 or more" in capsys.readouterr().err
    assert not (tmp_path / "z").exists()


def test_bridge_and_denoiser_are_found_by_their_solvers(pictures: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "b.json", in_channels=3)
    words = quick_arguments(pictures, tmp_path / "b", steps=1)
    assert main(["train", "i2sb", "--task", "sr4", "--network", str(config), *words]) == 0
    found = find_part("i2sb-sr4", tmp_path / "b")
    assert found is not None and Bridge.from_pretrained(found).task == "sr4"
    words = quick_arguments(pictures, tmp_path / "d", steps=1)
    assert main(["train", "dncnn", "--depth", "3", "--width", "8", "--sigma", "0.15", *words]) == 0
    found = find_part("dncnn", tmp_path / "d")
    assert found is not None and DnCNN.from_pretrained(found).sigma_y == 0.15
    for run, kind in (("b", Bridge), ("d", DnCNN)):
        assert main(["export", str(tmp_path / run), str(tmp_path / "out" / run)]) == 0
        assert isinstance(kind.from_pretrained(tmp_path / "out" / run), kind)


def test_presets_of_bridges_are_small() -> None:
    from ddc.networks import PRESETS, build_network

    for config in PRESETS["bridge"].values():
        with torch.device("meta"):
            parameters = sum(p.numel() for p in build_network(config).parameters())
        assert parameters <= 10_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ddc", "--prior", "{tmp}/none"], "is not a folder"),
        (["ddc", "--prior", "{tmp}/empty"], "has no config.json"),
        (["ddc", "--prior", "{tmp}/grey"], "is not an RGB prior"),
        (["ddc", "--prior", "{tmp}/short"], "schedule has 500 steps"),
        (["ddc", "--prior", "{tmp}/good", "--data", "{tmp}/empty"], "no pictures in"),
        (["ddc", "--prior", "{tmp}/good", "--tasks", "sharpen"], "is not known"),
        (["ddc", "--prior", "{tmp}/good", "--network", "huge"], "neither a preset"),
        (["prior", "--crop", "5000"], "smaller than the 5000-pixel crop"),
        (["prior", "--network", "{tmp}/tiny.json", "--precision", "bf16"], "needs a CUDA device"),
        (
            ["prior", "--init", "{tmp}/good", "--beta-schedule", "squaredcos_cap_v2"],
            "beta_schedule was linear",
        ),
        (["prior", "--init", "{tmp}/good", "--learned-variance"], "variance_type was fixed_small"),
        (["i2sb", "--task", "jpeg5-95"], "is not one task"),
        (["dncnn", "--sigma", "0.1", "--sigma-low", "0.2"], "lies above"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    message: str,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    write_config(tmp_path / "tiny.json", in_channels=3)
    tiny_prior().save_pretrained(tmp_path / "good")
    if "short" in words[-1]:
        short = tiny_prior()
        short.scheduler_config = scheduler_config(500)
        short.save_pretrained(tmp_path / "short")
    if "grey" in words[-1]:
        from training_parts import tiny

        grey = tiny_prior()
        grey.unet = tiny(1, 1)
        grey.save_pretrained(tmp_path / "grey")
    given = [word.replace("{tmp}", str(tmp_path)) for word in words]
    data = [] if "--data" in words else ["--data", str(pictures)]
    if words[0] == "prior" and "--network" not in words:
        given += ["--network", str(tmp_path / "tiny.json")]
    if words[0] == "ddc" and "--network" not in words:
        given += ["--network", str(write_config(tmp_path / "n.json", inputs=["y"]))]
    assert main(["train", *given, *data, "--out", str(tmp_path / "run"), "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("ddc: ")


def test_export_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "has no checkpoint" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_model_folder_is_written_again(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tiny_model), str(tmp_path / "half"), "--dtype", "fp16", "--shard-mb", "0.02"]) == 0
    names = {path.relative_to(tiny_model) for path in tiny_model.rglob("*.json")}
    assert names <= {path.relative_to(tmp_path / "half") for path in (tmp_path / "half").rglob("*.json")}
    assert len([*(tmp_path / "half" / "prior").rglob("*.safetensors")]) > 1  # in parts
    before, after = (Prior.from_pretrained(folder / "prior") for folder in (tiny_model, tmp_path / "half"))
    again = after.unet.state_dict()
    for name, weights in before.unet.state_dict().items():
        torch.testing.assert_close(again[name], weights.half().float())
    capsys.readouterr()
    assert main(["export", str(tiny_model), str(tmp_path / "other"), "--shard-mb", "0"]) == 2
    assert "--shard-mb is 0.0; expected a number above 0" in capsys.readouterr().err


def test_moments_that_do_not_fit_are_refused() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    moments = {f"{i}.{name}": torch.ones_like(weight) for i, weight in enumerate(weights) for name in MOMENTS}
    moments |= {f"{i}.step": torch.tensor(7.0) for i in range(2)}
    optimiser = torch.optim.AdamW(weights)
    load_moments(optimiser, weights, moments, torch.device("cpu"))
    assert all(int(state["step"]) == 7 and bool(state["exp_avg"].all()) for state in optimiser.state.values())
    for wrong, said in (
        ({"2.step": torch.tensor(7.0)}, "the optimiser has no moment 2.step"),
        ({"0.other": torch.ones(2, 3)}, "no moment 0.other"),
        ({"1.exp_avg": torch.ones(3)}, r"1.exp_avg has the shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            load_moments(torch.optim.AdamW(weights), weights, moments | wrong, torch.device("cpu"))
    with pytest.raises(ValueError, match="a parameter lacks a moment"):
        load_moments(torch.optim.AdamW(weights), weights, {"0.step": torch.tensor(7.0)}, torch.device("cpu"))
