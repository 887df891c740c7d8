"""Conversion of DDIM's `Model`, against one written here from its definition, and the choice of a class."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc.cli import main
from ddc.convert import convert
from ddc.errors import UserError
from ddc.networks import load_network, run_unet, save_network
from ddc.priors import DataConsistency, Prior
from tiny import small_diffusers


def norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, width, eps=1e-6)


class Block(nn.Module):
    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(width), nn.Conv2d(width, out, 3, padding=1)
        self.temb_proj = nn.Linear(time, out)
        self.norm2, self.conv2 = norm(out), nn.Conv2d(out, out, 3, padding=1)
        if width != out:
            self.nin_shortcut = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.temb_proj(F.silu(emb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(q.transpose(1, 2) @ k / q.shape[1] ** 0.5, dim=2)
        return x + self.proj_out((v @ weights.transpose(1, 2)).view_as(x))


class Conv(nn.Module):
    """The one convolution of a change of size."""

    def __init__(self, width: int, **options: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, **options)


class Model(nn.Module):
    """The U-Net of DDIM's repository; `attended` are the levels with attention."""

    def __init__(
        self, ch: int, mult: tuple[int, ...], blocks: int, attended: tuple[int, ...], outputs: int = 3
    ) -> None:
        super().__init__()
        self.ch, time, levels = ch, 4 * ch, range(len(mult))
        self.temb = nn.Module()
        self.temb.dense = nn.ModuleList([nn.Linear(ch, time), nn.Linear(time, time)])
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        width, skips = ch, [ch]
        self.down = nn.ModuleList()
        for level in levels:
            stage = nn.Module()
            stage.block, stage.attn = nn.ModuleList(), nn.ModuleList()
            for _ in range(blocks):
                stage.block.append(Block(width, ch * mult[level], time))
                width = ch * mult[level]
                skips.append(width)
                if level in attended:
                    stage.attn.append(Attention(width))
            if level != levels[-1]:
                stage.downsample = Conv(width, stride=2)
                skips.append(width)
            self.down.append(stage)
        self.mid = nn.Module()
        self.mid.block_1, self.mid.attn_1, self.mid.block_2 = (
            Block(width, width, time),
            Attention(width),
            Block(width, width, time),
        )
        self.up = nn.ModuleList()
        for level in reversed(levels):
            stage = nn.Module()
            stage.block, stage.attn = nn.ModuleList(), nn.ModuleList()
            for _ in range(blocks + 1):
                stage.block.append(Block(width + skips.pop(), ch * mult[level], time))
                width = ch * mult[level]
                if level in attended:
                    stage.attn.append(Attention(width))
            if level:
                stage.upsample = Conv(width, padding=1)
            self.up.insert(0, stage)
        self.norm_out, self.conv_out = norm(width), nn.Conv2d(width, outputs, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.ch // 2
        angles = t[:, None] * 10_000.0 ** (-torch.arange(half) / (half - 1))
        emb = torch.cat([angles.sin(), angles.cos()], dim=1)
        emb = self.temb.dense[1](F.silu(self.temb.dense[0](emb)))
        features = [self.conv_in(x)]
        for stage in self.down:
            for i, block in enumerate(stage.block):
                h = block(features[-1], emb)
                features.append(stage.attn[i](h) if stage.attn else h)
            if hasattr(stage, "downsample"):
                features.append(stage.downsample.conv(F.pad(features[-1], (0, 1, 0, 1))))
        h = self.mid.block_2(self.mid.attn_1(self.mid.block_1(features[-1], emb)), emb)
        for stage in reversed(self.up):
            for i, block in enumerate(stage.block):
                h = block(torch.cat([h, features.pop()], dim=1), emb)
                h = stage.attn[i](h) if stage.attn else h
            if hasattr(stage, "upsample"):
                h = stage.upsample.conv(h.repeat_interleave(2, -1).repeat_interleave(2, -2))
        return self.conv_out(F.silu(self.norm_out(h)))


def saved(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize(
    ("mult", "blocks", "attended", "kind"),
    [((1, 1, 2), 2, (2,), "UNet2DModel"), ((1, 2, 2), 1, (), "UNet2DModel"), ((1, 2), 1, (0, 1), "GuidedUNet")],
)
def test_forward_pass_is_equal(
    mult: tuple[int, ...], blocks: int, attended: tuple[int, ...], kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Model(32, mult, blocks, attended).eval()
    assert main(["convert", str(saved(model, tmp_path / "celeba_hq.ckpt")), str(tmp_path / "out")]) == 0
    prior = Prior.from_pretrained(tmp_path / "out")
    assert type(prior.unet).__name__ == kind and prior.prediction_type == "epsilon"
    x, t = torch.randn(2, 3, 16, 24), torch.tensor([3, 801])
    with torch.no_grad():
        expected, actual = model(x, t), run_unet(prior.unet, x, t)
    assert (expected - actual).abs().max() <= 1e-5 * expected.abs().max()


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    good = Model(32, (1, 2), 1, (1,)).state_dict()
    for name, state in {
        "missing": {k: v for k, v in good.items() if k != "mid.attn_1.q.weight"},
        "extra": good | {"down.0.block.7.more.weight": torch.zeros(1)},
        "no levels": {k: v for k, v in good.items() if not k.startswith("down.")},
        "bayesian": good | {"logvar": torch.zeros(1000)},
        "shape": good | {"conv_out.weight": torch.zeros(())},
    }.items():
        torch.save(state, tmp_path / name)
        with pytest.raises(UserError):
            convert(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_class_of_a_diffusers_model_becomes_a_prior(tmp_path: Path) -> None:
    network, folder = small_diffusers(num_class_embeds=5), tmp_path / "model"
    save_network(network, folder / "unet")
    (folder / "scheduler").mkdir()
    scheduler = {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction", "num_train_timesteps": 500}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    with pytest.raises(UserError, match=r"ddc convert FOLDER OUT --class-label N"):
        Prior.from_pretrained(folder)
    for label, problem in ((None, r"5 classes.*class_label"), (5, "between 0 and 4"), (-1, "between 0 and 4")):
        with pytest.raises(UserError, match=problem):
            convert(folder, tmp_path / "out", class_label=label)
    assert main(["convert", str(folder), str(tmp_path / "out"), "--class-label", "3"]) == 0
    prior = Prior.from_pretrained(tmp_path / "out")
    assert prior.prediction_type == "v_prediction" and prior.schedule.train_steps == 500
    x, t = torch.randn(2, 3, 16, 16), torch.tensor([3, 401])
    with torch.no_grad():
        expected, other = (network(x, t, class_labels=torch.tensor([n, n])).sample for n in (3, 2))
        actual = run_unet(prior.unet, x, t)
    assert torch.allclose(actual, expected, atol=1e-6) and not torch.allclose(actual, other, atol=1e-3)
    with pytest.raises(UserError, match="not a class-conditional"):
        convert(tmp_path / "out", tmp_path / "again", class_label=1)


def test_info_tells_how_a_released_network_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The released data-consistency networks are UNet2DModels of six channels, without a list of inputs."""
    save_network(small_diffusers(in_channels=6), tmp_path)
    assert DataConsistency.from_pretrained(tmp_path).inputs == ("y",)
    assert main(["info", str(tmp_path), "--size", "16"]) == 0
    assert f"--network {tmp_path}" in capsys.readouterr().out
    with pytest.raises(UserError, match="--network"):
        Prior.from_pretrained(tmp_path)
    assert load_network(tmp_path).config["in_channels"] == 6  # type: ignore[operator]


def test_info_names_the_schedule_of_a_flow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_network(small_diffusers(), tmp_path)
    (tmp_path / "scheduler_config.json").write_text('{"_class_name": "FlowMatchEulerDiscreteScheduler"}')
    assert main(["info", str(tmp_path), "--size", "16"]) == 0
    out = capsys.readouterr().out
    assert "FlowMatchEulerDiscreteScheduler" in out and "flow" in out
