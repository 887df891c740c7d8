"""The U-Nets and their folders."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddc.cuda import write_out_norms
from ddc.eight_bits import SMALL
from ddc.errors import UserError
from ddc.networks import (
    WEIGHTS,
    CompactUNet,
    GroupNorm,
    build_network,
    load_network,
    network_config,
    pad_to_multiple,
    read_weights,
    run_unet,
    save_network,
    save_weights,
    sinusoidal,
    unet_size_multiple,
)
from ddc.solvers.gradients import set_checkpointing
from tiny import small_diffusers

TINY: dict[str, Any] = {
    "channels": (8, 16),
    "encoder_blocks": (1, 1),
    "decoder_blocks": (1,),
    "groups": 4,
    "head_dim": 8,
}
DIFFUSERS: dict[str, Any] = {
    "_class_name": "UNet2DModel",
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}


def lively(network: nn.Module, seed: int = 0) -> nn.Module:
    """Weights in the layers that begin at zero, so that everything has an effect."""
    torch.manual_seed(seed)
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return network.eval().requires_grad_(False)


def compact(**settings: Any) -> CompactUNet:
    torch.manual_seed(1)
    return lively(CompactUNet(**(TINY | settings)))  # type: ignore[return-value]


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5, 3), (17, 31), (32, 32), (2, 50)])
@pytest.mark.parametrize("patch_size", [1, 2])
def test_any_size(size: tuple[int, int], patch_size: int) -> None:
    network = compact(patch_size=patch_size)
    out = network(torch.rand(2, 3, *size), torch.tensor([3, 500]))
    assert out.shape == (2, 3, *size)
    assert bool(out.isfinite().all())


def test_a_fresh_network_predicts_zero() -> None:
    network = CompactUNet(**TINY)
    assert not network(torch.rand(1, 3, 8, 8), torch.tensor([5])).any()


def test_images_of_a_batch_do_not_mix_and_time_matters() -> None:
    network, x = compact(), torch.rand(2, 3, 16, 16)
    times = torch.tensor([3, 900])
    together = network(x, times)
    for i in range(2):
        assert torch.allclose(network(x[i : i + 1], times[i : i + 1]), together[i : i + 1], atol=1e-5)
    assert not torch.allclose(network(x, times.flip(0)), together, atol=1e-3)


def test_the_whole_picture_is_seen_through_attention() -> None:
    network, x = compact(), torch.rand(1, 3, 32, 32)
    other = x.clone()
    other[..., -2:, -2:] += 3
    change = (network(x, torch.tensor([5])) - network(other, torch.tensor([5]))).abs()
    assert float(change[..., :2, :2].max()) > 0


def test_levels_and_blocks_must_agree() -> None:
    with pytest.raises(UserError, match="2 levels needs 2 encoder_blocks and 1 decoder_blocks"):
        CompactUNet(**(TINY | {"decoder_blocks": (1, 1)}))


def test_widths_must_fit_groups_and_heads() -> None:
    with pytest.raises(UserError, match=r"channels \[10\] are no multiples of groups \(4\)"):
        CompactUNet(**(TINY | {"channels": (10, 16), "groups": 4}))
    with pytest.raises(UserError, match="16 channels, the last of them, cannot be divided among 3 attention heads"):
        CompactUNet(**(TINY | {"channels": (8, 16), "groups": 4, "head_dim": 5}))


def test_padding_mirrors_and_repeats_where_the_picture_is_too_small() -> None:
    x = torch.arange(6.0).view(1, 1, 2, 3)
    padded = pad_to_multiple(x, 4)
    assert padded.shape == (1, 1, 4, 4)
    assert torch.equal(padded[..., :2, :3], x)
    mirrored = pad_to_multiple(torch.arange(3.0).view(1, 1, 1, 3).expand(1, 1, 4, 3), 4)
    assert mirrored[0, 0, 0].tolist() == [0, 1, 2, 1]
    assert pad_to_multiple(mirrored, 4) is mirrored


def test_sinusoidal_embedding() -> None:
    embedding = sinusoidal(torch.tensor([0, 10]), 8)
    assert embedding.shape == (2, 8)
    assert embedding[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert embedding[1, 4].item() == pytest.approx(torch.sin(torch.tensor(10.0)).item(), abs=1e-6)


@pytest.mark.parametrize("config", [TINY, DIFFUSERS], ids=["CompactUNet", "UNet2DModel"])
def test_either_class_runs_at_odd_sizes_with_one_time_or_several(config: dict[str, Any]) -> None:
    network = lively(build_network(config))
    x = torch.rand(2, 3, 9, 13)
    out = run_unet(network, x, 40)
    assert out.shape == x.shape
    assert torch.allclose(out, run_unet(network, x, torch.tensor([40, 40])), atol=1e-5)
    assert unet_size_multiple(network) == (4 if network.__class__ is CompactUNet else 2)


@pytest.mark.parametrize("config", [TINY, DIFFUSERS], ids=["CompactUNet", "UNet2DModel"])
def test_checkpointing_keeps_less_and_gives_the_same_gradient(config: dict[str, Any]) -> None:
    network = lively(build_network(config))
    gradients, kept = [], []
    for on in (False, True, False):
        set_checkpointing(network, on)
        x = torch.linspace(0, 1, 3 * 16 * 16).view(1, 3, 16, 16).requires_grad_()
        size = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal size
            size += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = run_unet(network, x, 10)
        gradients.append(torch.autograd.grad(out.square().sum(), x)[0])
        kept.append(size)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-5)
    assert kept[1] < 0.75 * kept[0]
    assert kept[2] == kept[0]


# ----------------------------------------------------------------------------------------------------------
# folders


@pytest.mark.parametrize("config", [TINY, DIFFUSERS], ids=["CompactUNet", "UNet2DModel"])
@pytest.mark.parametrize("shard_mb", [None, 0.005])
def test_round_trip(config: dict[str, Any], shard_mb: float | None, tmp_path: Path) -> None:
    network, x = lively(build_network(config)), torch.rand(1, 3, 12, 12)
    save_network(network, tmp_path, shard_mb=shard_mb)
    loaded = load_network(tmp_path)
    assert torch.equal(run_unet(loaded, x, 7), run_unet(network, x, 7))
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not loaded.training
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_mb is not None)
    if shard_mb is not None:
        index = json.loads((tmp_path / f"{WEIGHTS}.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        largest = max(t.numel() * 4 for t in network.state_dict().values())
        assert all(file.stat().st_size < shard_mb * 1e6 + largest + 20_000 for file in files)


def test_saving_again_removes_old_shards(tmp_path: Path) -> None:
    network = compact()
    save_network(network, tmp_path, shard_mb=0.005)
    save_network(network, tmp_path)
    assert [path.name for path in tmp_path.glob(f"{WEIGHTS}*")] == [f"{WEIGHTS}.safetensors"]


def test_half_precision_files_load_as_float32(tmp_path: Path) -> None:
    network = compact()
    save_network(network, tmp_path, dtype=torch.float16)
    assert load_file(tmp_path / f"{WEIGHTS}.safetensors")["exit.weight"].dtype == torch.float16
    loaded = load_network(tmp_path)
    assert loaded.state_dict()["exit.weight"].dtype == torch.float32
    x = torch.rand(1, 3, 8, 8)
    assert torch.allclose(run_unet(loaded, x, 7), run_unet(network, x, 7), atol=1e-2)


def test_folders_of_diffusers_load(tmp_path: Path) -> None:
    network = lively(build_network(DIFFUSERS))
    network.save_pretrained(tmp_path)  # type: ignore[operator]
    x = torch.rand(1, 3, 8, 8)
    assert torch.equal(run_unet(load_network(tmp_path), x, 7), run_unet(network, x, 7))


def test_configuration_builds_the_same_network() -> None:
    network = compact(in_channels=6, out_channels=6)
    again = build_network(network_config(network))
    assert network_config(again) == network_config(network)
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in network.state_dict().items()}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_class_name": "ResNet"}, "'ResNet' is not known"),
        ({"_class_name": "CompactUNet", "depth": 3}, r"no setting \['depth'\]"),
    ],
)
def test_unknown_configurations_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_network(config)


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        load_network(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        load_network(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_network(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="one JSON object"):
        load_network(tmp_path)


def test_missing_weights_and_pickles_are_refused(tmp_path: Path) -> None:
    save_network(compact(), tmp_path)
    weights = tmp_path / f"{WEIGHTS}.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    with pytest.raises(UserError, match="has no weights"):
        load_network(tmp_path)
    (tmp_path / f"{WEIGHTS}.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"is a pickle.*ddc convert"):
        load_network(tmp_path)
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="not a good safetensors file"):
        load_network(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_network(compact(), tmp_path, shard_mb=0.005)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        load_network(tmp_path)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    network = compact()
    state = network.state_dict()
    wrong = {
        "1 missing": {k: v for k, v in state.items() if k != "exit.bias"},
        "1 unknown": state | {"more": torch.ones(1)},
        "1 of another shape": state | {"exit.bias": torch.ones(5)},
    }
    for message, tensors in wrong.items():
        save_network(network, tmp_path, state=tensors)
        with pytest.raises(UserError, match=message):
            load_network(tmp_path)


def test_compiled_networks_are_the_same_with_their_gradients() -> None:
    network = compact().requires_grad_(True)
    x, t = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 500])
    plain, compiled = network(x, t), torch.compile(network, backend="aot_eager")(x, t)
    assert (plain - compiled).abs().max() < 1e-5
    weights = list(network.parameters())
    grads = (torch.autograd.grad(y.square().sum(), weights) for y in (plain, compiled))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5 * float(a.abs().max()))


def test_norms_of_other_networks_are_written_out() -> None:
    network = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 1), torch.nn.Sequential(torch.nn.GroupNorm(4, 8, eps=1e-4)))
    torch.nn.init.normal_(network[1][0].weight)
    x = torch.randn(2, 4, 10) + 3
    before, names = network(x), list(network.state_dict())
    compiled = torch.compile(write_out_norms(network), backend="aot_eager")
    assert isinstance(network[1][0], GroupNorm) and list(network.state_dict()) == names
    assert torch.equal(network(x), before) and (compiled(x) - before).abs().max() < 1e-5


def test_a_class_conditional_network_is_refused(tmp_path: Path) -> None:
    save_network(small_diffusers(num_class_embeds=10), tmp_path)
    with pytest.raises(UserError, match="class-conditional"):
        load_network(tmp_path)


@pytest.mark.parametrize("file", [f"{WEIGHTS}.safetensors", f"{WEIGHTS}.fp16.safetensors"])
def test_old_names_of_attention_and_half_precision_files_are_read(file: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    network = small_diffusers()
    save_network(network, tmp_path)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(tmp_path / f"{WEIGHTS}.safetensors")
    (tmp_path / f"{WEIGHTS}.safetensors").unlink()
    for new, name in old.items():
        state = {key.replace(f".{new}.", f".{name}."): tensor for key, tensor in state.items()}
    assert sum(".proj_attn." in key for key in state) >= 4
    save_file(state, tmp_path / file)
    x, t = torch.randn(1, 3, 16, 16), torch.tensor([7])
    assert torch.equal(load_network(tmp_path)(x, t).sample, network(x, t).sample)  # type: ignore[operator]


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        network = compact()
        with torch.no_grad():
            next(network.parameters()).view(-1)[0] = value
        save_network(network, tmp_path)
        with pytest.raises(UserError, match="NaN or infinity"):
            load_network(tmp_path)


def test_an_index_names_files_of_its_own_folder(tmp_path: Path) -> None:
    save_network(compact(), tmp_path / "model", shard_mb=0.005)
    index = tmp_path / "model" / f"{WEIGHTS}.safetensors.index.json"
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[0]
    shard.rename(tmp_path / shard.name)
    index.write_text(index.read_text().replace(shard.name, f"../{shard.name}"))
    with pytest.raises(UserError, match="same folder"):
        load_network(tmp_path / "model")


def test_weights_of_8_bits_are_loaded_as_numbers(tmp_path: Path) -> None:
    network = build_network({"channels": [32, 96], "encoder_blocks": [1, 2], "decoder_blocks": [1], "head_dim": 32})
    generator = torch.Generator().manual_seed(0)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    save_network(network, tmp_path, dtype=torch.int8, shard_mb=0.05)  # weights and their scales in different files
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_network(tmp_path).state_dict()
    large = 0
    for name, weight in network.state_dict().items():
        error = (loaded[name] - weight).abs()
        if weight.dim() > 1 and weight.numel() >= SMALL:
            large += 1
            bound = weight.flatten(1).abs().amax(1) / 254 * 1.001
            assert bool((error.flatten(1).amax(1) <= bound).all()) and error.max() > 1e-5
        else:
            assert torch.equal(loaded[name], weight.half().float())
    assert large > 2
    stored = read_weights(tmp_path)
    save_weights({name: tensor.half() for name, tensor in stored.items()}, tmp_path, torch.int8)  # again, in one file
    assert all(torch.allclose(loaded[name], tensor, atol=2e-3) for name, tensor in read_weights(tmp_path).items())

    from safetensors.torch import load_file, save_file

    path = next(tmp_path.glob("*.safetensors"))
    whole = load_file(path)
    without = {name: tensor for name, tensor in whole.items() if not name.endswith(".scale")}
    save_file(without, path)
    with pytest.raises(UserError, match="no scales"):
        load_network(tmp_path)


@pytest.mark.parametrize("modulated", [False, True])
def test_a_written_out_norm_is_the_norm(modulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler traces, run by itself."""
    torch.manual_seed(0)
    norm, x = GroupNorm(4, 8, eps=1e-4), torch.randn(2, 8, 5, 3) + 3
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    given = [torch.randn(2, 8, 1, 1) for _ in range(2)] if modulated else []
    expected = norm(x, *given)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert (norm(x, *given) - expected).abs().max() < 1e-5
    assert norm(x.half(), *given).dtype == torch.float16


def test_a_diffusers_that_cannot_be_loaded_is_not_taken_for_a_wrong_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> None:
        """As diffusers does: the error that names the package is the cause of another one."""
        try:
            raise ImportError("huggingface-hub<2.0 is required, but found 2.4.0")
        except ImportError as error:
            raise RuntimeError(f"Failed to import {name}, see the traceback") from error

    config = network_config(small_diffusers(in_channels=3))
    monkeypatch.delattr(diffusers, "UNet2DModel")
    monkeypatch.setattr(diffusers, "__getattr__", broken, raising=False)
    with pytest.raises(UserError, match=r"diffusers cannot be loaded .*\(huggingface-hub<2.0 is required"):
        build_network(config)
