"""Conversion, against a U-Net written here from guided-diffusion's definition, with its names of weights."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc.cli import main
from ddc.convert import Layout, convert, read_layout, unet_config
from ddc.errors import UserError
from ddc.networks import build_network, load_network, run_unet
from ddc.operators import Denoise
from ddc.priors import DataConsistency, Prior


class RefResample(nn.Module):
    """Repeating then a convolution, a strided convolution, or repeating and pooling without weights."""

    def __init__(self, width: int, up: bool, learned: bool) -> None:
        super().__init__()
        self.up = up
        if learned and up:
            self.conv = nn.Conv2d(width, width, 3, padding=1)
        elif learned:
            self.op = nn.Conv2d(width, width, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.up:
            x = x.repeat_interleave(2, -1).repeat_interleave(2, -2)
            return self.conv(x) if hasattr(self, "conv") else x
        return self.op(x) if hasattr(self, "op") else F.avg_pool2d(x, 2)


class RefResBlock(nn.Module):
    def __init__(self, width: int, out: int, time: int, scale_shift: bool, resample: str | None = None) -> None:
        super().__init__()
        self.scale_shift = scale_shift
        self.resample = RefResample(width, resample == "up", learned=False) if resample else nn.Identity()
        self.in_layers = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, out, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time, 2 * out if scale_shift else out))
        convolution = nn.Conv2d(out, out, 3, padding=1)
        self.out_layers = nn.Sequential(nn.GroupNorm(32, out), nn.SiLU(), nn.Dropout(0.1), convolution)
        self.skip_connection = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers[2](self.resample(self.in_layers[:2](x)))
        e = self.emb_layers(emb)[:, :, None, None]
        if self.scale_shift:
            scale, shift = e.chunk(2, dim=1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + e)
        return self.skip_connection(self.resample(x)) + h


class RefAttention(nn.Module):
    def __init__(self, width: int, heads: int, new_order: bool) -> None:
        super().__init__()
        self.heads, self.new_order = heads, new_order
        self.norm = nn.GroupNorm(32, width)
        self.qkv = nn.Conv1d(width, 3 * width, 1)
        self.proj_out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, height, width = x.shape
        flat = x.flatten(2)
        qkv = self.qkv(self.norm(flat))
        dim = c // self.heads
        results = []
        for head in range(self.heads):
            if self.new_order:  # all queries, then all keys, then all values
                starts = [kind * c + head * dim for kind in range(3)]
            else:  # head by head, its query, key and value
                starts = [head * 3 * dim + kind * dim for kind in range(3)]
            q, k, v = (qkv[:, start : start + dim] for start in starts)
            weights = torch.softmax(q.transpose(1, 2) @ k / math.sqrt(dim), dim=-1)  # (B, query, key)
            results.append(v @ weights.transpose(1, 2))
        return (flat + self.proj_out(torch.cat(results, dim=1))).view(b, c, height, width)


class RefUNet(nn.Module):
    """guided-diffusion's UNetModel, by its constructor's options."""

    def __init__(
        self,
        model_channels: int = 32,
        channel_mult: tuple[float, ...] = (1, 2),
        num_res_blocks: int = 1,
        attention_resolutions: tuple[int, ...] = (2,),  # as downsampling factors
        learn_sigma: bool = True,
        scale_shift: bool = True,
        resampling: str = "resblock",
        new_order: bool = False,
        head_channels: int = 16,
        num_heads: int | None = None,
        num_heads_upsample: int | None = None,
        classes: int | None = None,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        self.model_channels = model_channels
        time = 4 * model_channels
        self.time_embed = nn.Sequential(nn.Linear(model_channels, time), nn.SiLU(), nn.Linear(time, time))
        if classes:
            self.label_emb = nn.Embedding(classes, time)

        def attention(width: int, going_up: bool = False) -> RefAttention:
            count = (num_heads_upsample if going_up else None) or num_heads or width // head_channels
            return RefAttention(width, count, new_order)

        def resample(width: int, direction: str) -> nn.Module:
            if resampling == "resblock":
                return RefResBlock(width, width, time, scale_shift, direction)
            return RefResample(width, direction == "up", learned=resampling == "conv")

        width = int(channel_mult[0] * model_channels)
        self.input_blocks = nn.ModuleList([nn.ModuleList([nn.Conv2d(in_channels, width, 3, padding=1)])])
        skips = [width]
        for level, mult in enumerate(channel_mult):
            for _ in range(num_res_blocks):
                out = int(mult * model_channels)
                block = nn.ModuleList([RefResBlock(width, out, time, scale_shift)])
                width = out
                if 2**level in attention_resolutions:
                    block.append(attention(width))
                self.input_blocks.append(block)
                skips.append(width)
            if level + 1 < len(channel_mult):
                self.input_blocks.append(nn.ModuleList([resample(width, "down")]))
                skips.append(width)

        self.middle_block = nn.ModuleList(
            [
                RefResBlock(width, width, time, scale_shift),
                attention(width),
                RefResBlock(width, width, time, scale_shift),
            ]
        )

        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(channel_mult))):
            for i in range(num_res_blocks + 1):
                out = int(mult * model_channels)
                block = nn.ModuleList([RefResBlock(width + skips.pop(), out, time, scale_shift)])
                width = out
                if 2**level in attention_resolutions:
                    block.append(attention(width, going_up=True))
                if level > 0 and i == num_res_blocks:
                    block.append(resample(width, "up"))
                self.output_blocks.append(block)
        outputs = 6 if learn_sigma else 3
        self.out = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, outputs, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, label: int | None = None) -> Tensor:
        half = self.model_channels // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half) / half)
        angles = t.float()[:, None] * frequencies
        emb = self.time_embed(torch.cat([torch.cos(angles), torch.sin(angles)], dim=1))
        if label is not None:
            emb = emb + self.label_emb.weight[label]

        def through(block: nn.ModuleList, h: Tensor) -> Tensor:
            for layer in block:
                h = layer(h, emb) if isinstance(layer, RefResBlock) else layer(h)
            return h

        kept = []
        for block in self.input_blocks:
            x = through(block, x)
            kept.append(x)
        x = through(self.middle_block, x)
        for block in self.output_blocks:
            x = through(block, torch.cat([x, kept.pop()], dim=1))
        return self.out(x)


def reference(seed: int = 0, **options: object) -> RefUNet:
    """A reference with random numbers in every parameter, so that no branch is silent."""
    generator = torch.Generator().manual_seed(seed)
    net = RefUNet(**options).eval()  # type: ignore[arg-type]
    for p in net.parameters():
        spread = 1 / math.sqrt(p[0].numel()) if p.ndim > 1 else 0.3
        p.data = torch.randn(p.shape, generator=generator) * spread
    return net


def save(net: nn.Module, path: Path) -> Path:
    torch.save(net.state_dict(), path)
    return path


def difference(net: RefUNet, prior: Prior, label: int | None = None) -> float:
    """The largest difference of two forward passes, relative to the size of the output."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((2, 3, 16, 16), generator=generator)
    t = torch.tensor([3, 801])
    with torch.no_grad():
        expected, actual = net(x, t, label), run_unet(prior.unet, x, t)
    assert expected.shape == actual.shape
    return float((expected - actual).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("scale_shift", "resampling", "new_order", "learn_sigma"),
    list(product([True, False], ["resblock", "conv", "pool"], [True, False], [True, False])),
)
def test_forward_pass_is_equal(
    tmp_path: Path, scale_shift: bool, resampling: str, new_order: bool, learn_sigma: bool
) -> None:
    net = reference(scale_shift=scale_shift, resampling=resampling, new_order=new_order, learn_sigma=learn_sigma)
    checkpoint = save(net, tmp_path / "model.pt")
    convert(checkpoint, tmp_path / "out", head_channels=16, new_attention_order=new_order)
    prior = Prior.from_pretrained(tmp_path / "out")
    assert type(prior.unet).__name__ == "UNet2DModel"
    assert prior.learns_variance is learn_sigma
    assert difference(net, prior) <= 1e-4


SHAPES = {
    "three levels, two blocks": {
        "channel_mult": (1, 2, 3),
        "num_res_blocks": 2,
        "attention_resolutions": (2, 4),
    },
    "attention everywhere": {"channel_mult": (1, 2), "attention_resolutions": (1, 2)},
    "attention in the middle only": {"channel_mult": (1, 2), "attention_resolutions": ()},
    "attention at the top only": {"channel_mult": (1, 2), "attention_resolutions": (1,)},
    "narrowing": {"channel_mult": (2, 1, 1), "attention_resolutions": (4,)},
    "half-width first level": {
        "model_channels": 64,
        "channel_mult": (0.5, 1, 1),
        "attention_resolutions": (4,),
    },
    "one level": {"channel_mult": (1,), "num_res_blocks": 2, "attention_resolutions": (1,)},
    "heads by number": {"channel_mult": (1, 2), "attention_resolutions": (1, 2), "num_heads": 4},
    "heads by number, one width": {"channel_mult": (1, 2), "attention_resolutions": (2,), "num_heads": 4},
    "other heads on the way up": {"attention_resolutions": (1, 2), "num_heads": 4, "num_heads_upsample": 2},
}


RESAMPLED = [(shape, "resblock") for shape in SHAPES]
RESAMPLED += [
    (shape, kind) for kind in ("conv", "pool") for shape in ("three levels, two blocks", "narrowing", "one level")
]


@pytest.mark.parametrize(("shape", "resampling"), RESAMPLED)
def test_every_shape_is_equal(tmp_path: Path, shape: str, resampling: str) -> None:
    net = reference(**SHAPES[shape], resampling=resampling)
    heads = {k: v for k, v in SHAPES[shape].items() if k.startswith("num_heads")}
    convert(save(net, tmp_path / "model.pt"), tmp_path / "out", head_channels=16, **heads)
    assert difference(net, Prior.from_pretrained(tmp_path / "out")) <= 1e-4


def test_a_wrong_attention_order_or_head_is_another_network(tmp_path: Path) -> None:
    """The equality above would notice: the two flags that the checkpoint cannot tell change the output."""
    net = reference()
    checkpoint = save(net, tmp_path / "model.pt")
    for name, options in {
        "order": {"new_attention_order": True, "head_channels": 16},
        "heads": {"head_channels": 32},
    }.items():
        convert(checkpoint, tmp_path / name, **options)
        assert difference(net, Prior.from_pretrained(tmp_path / name)) > 1e-3


def test_half_precision_weights_and_class_folding(tmp_path: Path) -> None:
    net = reference(classes=5).half().float()
    path = tmp_path / "model.pt"
    torch.save({name: tensor.half() for name, tensor in net.state_dict().items()}, path)
    with pytest.raises(UserError, match="class-conditional"):
        convert(path, tmp_path / "none", head_channels=16)
    with pytest.raises(UserError, match="between 0 and 4"):
        convert(path, tmp_path / "none", head_channels=16, class_label=5)
    assert not (tmp_path / "none").exists()
    convert(path, tmp_path / "out", head_channels=16, class_label=3)
    prior = Prior.from_pretrained(tmp_path / "out")
    assert difference(net, prior, label=3) <= 1e-4
    assert difference(net, prior, label=2) > 1e-3


def test_schedule_and_prediction_type(tmp_path: Path) -> None:
    checkpoint = save(reference(learn_sigma=False), tmp_path / "model.pt")
    convert(checkpoint, tmp_path / "linear", head_channels=16)
    prior = Prior.from_pretrained(tmp_path / "linear")
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    assert torch.allclose(prior.schedule.alpha_bars[:-1], torch.cumprod(1 - betas, 0))
    assert prior.prediction_type == "epsilon"
    convert(
        checkpoint,
        tmp_path / "cosine",
        head_channels=16,
        noise_schedule="cosine",
        predict_xstart=True,
        diffusion_steps=500,
    )
    prior = Prior.from_pretrained(tmp_path / "cosine")
    half_way = math.cos((0.5 + 0.008) / 1.008 * math.pi / 2) ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    assert float(prior.schedule.alpha_bars[249]) == pytest.approx(half_way, rel=1e-9)
    assert prior.prediction_type == "sample"
    convert(checkpoint, tmp_path / "short", head_channels=16, diffusion_steps=100)
    config = json.loads((tmp_path / "short" / "scheduler" / "scheduler_config.json").read_text())
    assert (config["beta_start"], config["beta_end"]) == pytest.approx((1e-3, 0.2))


IMAGENET_256 = Layout(
    model_channels=256,
    in_channels=3,
    out_channels=6,
    widths=(256, 256, 512, 512, 1024, 1024),
    res_blocks=2,
    attention=(False, False, False, True, True, True),
    scale_shift=True,
    resampling="resblock",
)


def test_parameter_counts_of_the_paper() -> None:
    blocks = ["DownBlock2D"] * 4 + ["AttnDownBlock2D", "DownBlock2D"]
    paper = {
        "_class_name": "UNet2DModel",
        "in_channels": 6,
        "out_channels": 3,
        "block_out_channels": [128, 128, 256, 256, 512, 512],
        "layers_per_block": 2,
        "down_block_types": blocks,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(blocks)],
    }
    with torch.device("meta"):
        network = build_network(paper)
        prior = build_network(unet_config(IMAGENET_256))
        # the same architecture as guided-diffusion makes it
        widths = {
            "model_channels": 256,
            "channel_mult": (1, 1, 2, 2, 4, 4),
            "num_res_blocks": 2,
            "head_channels": 64,
        }
        source = RefUNet(**widths, attention_resolutions=(8, 16, 32))
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 2) == 113.68
    assert round(sum(p.numel() for p in prior.parameters()) / 1e6, 2) == 552.81
    assert sum(p.numel() for p in source.parameters()) == sum(p.numel() for p in prior.parameters())
    assert read_layout(source.state_dict(), "source") == IMAGENET_256
    assert type(prior).__name__ == "UNet2DModel"


def tiny_paper_network(channels: int = 6) -> nn.Module:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        in_channels=channels,
        out_channels=3,
        block_out_channels=(32, 32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ).eval()


def test_the_released_kind_of_network_folder_loads_as_it_is(tmp_path: Path) -> None:
    network = tiny_paper_network()
    network.save_pretrained(tmp_path)
    loaded = DataConsistency.from_pretrained(tmp_path)
    y, x0 = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = x0 - network(torch.cat([x0, y], dim=1), torch.tensor([200, 200])).sample
        assert torch.allclose(loaded.consistent((Denoise(), y, 0.1), x0, 200)[0], expected, atol=1e-5)
    assert loaded.inputs == ("y",)


def test_a_pickle_in_a_folder_is_refused_and_convert_turns_it_over(tmp_path: Path) -> None:
    network = tiny_paper_network()
    network.save_pretrained(tmp_path / "old", safe_serialization=False)
    with pytest.raises(UserError, match=r"diffusion_pytorch_model\.bin is a pickle.*ddc convert"):
        DataConsistency.from_pretrained(tmp_path / "old")
    convert(tmp_path / "old" / "diffusion_pytorch_model.bin", tmp_path / "new")
    loaded = DataConsistency.from_pretrained(tmp_path / "new")
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), loaded.unet.parameters(), strict=True))


@pytest.mark.parametrize("named", ["", "unet", "unet/diffusion_pytorch_model.bin"])
def test_a_pickled_diffusers_folder_keeps_its_scheduler(named: str, tmp_path: Path) -> None:
    from diffusers import DDIMScheduler

    unet = tiny_paper_network(3)
    unet.save_pretrained(tmp_path / "old" / "unet", safe_serialization=False)
    DDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True).save_pretrained(
        tmp_path / "old" / "scheduler"
    )
    with pytest.raises(UserError, match=r"is a pickle.*ddc convert"):
        Prior.from_pretrained(tmp_path / "old")
    convert(tmp_path / "old" / named, tmp_path / "new")
    prior = Prior.from_pretrained(tmp_path / "new")
    assert prior.prediction_type == "v_prediction" and float(prior.schedule.alpha_bars[-2]) == 0
    x, t = torch.randn(1, 3, 16, 16), torch.tensor([200])
    with torch.no_grad():
        assert torch.allclose(prior.unet(x, t).sample, unet(x, t).sample, atol=1e-6)


def test_guided_unet_survives_saving(tmp_path: Path) -> None:
    """What UNet2DModel cannot say stays in the folder's configuration."""
    net = reference(**SHAPES["other heads on the way up"])
    convert(save(net, tmp_path / "model.pt"), tmp_path / "one", num_heads=4, num_heads_upsample=2)
    prior = Prior.from_pretrained(tmp_path / "one")
    prior.save_pretrained(tmp_path / "two")
    again = load_network(tmp_path / "two" / "unet")
    assert type(again).__name__ == "GuidedUNet"
    assert difference(net, Prior.from_pretrained(tmp_path / "two")) <= 1e-4


def test_what_cannot_be_converted_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    good = reference().state_dict()

    def refused(state: object, message: str, **options: object) -> None:
        path = tmp_path / "bad.pt"
        torch.save(state, path)
        with pytest.raises(UserError, match=message):
            convert(path, tmp_path / "out", **{"head_channels": 16} | options)
        assert not (tmp_path / "out").exists()

    refused({"weights": [1, 2]}, "state dict")
    refused(reference, "plain tensors")
    refused({k: v for k, v in good.items() if not k.startswith("output_blocks")}, "not a guided-diffusion U-Net")
    refused({k: v for k, v in good.items() if k != "input_blocks.1.0.in_layers.0.bias"}, "has no input_blocks.1.0")
    refused(good | {"input_blocks.1.7.weight": torch.zeros(1)}, r"input_blocks\.1\.7\.weight")
    refused(good | {"out.2.bias": torch.zeros(5)}, "do not fit its architecture")
    refused(reference(in_channels=6).state_dict(), "6 input")
    refused(good, "head_channels 48 does not divide", head_channels=48)
    refused(good, "not class-conditional", class_label=1)
    with pytest.raises(TypeError, match="heads"):
        convert(tmp_path / "bad.pt", tmp_path / "out", heads=3)
    refused(good, "num_heads_upsample goes with num_heads", num_heads_upsample=2)
    refused(good, "at least 1", diffusion_steps=0)

    text = tmp_path / "text.pt"
    text.write_text("not a checkpoint")
    with pytest.raises(UserError, match="plain tensors"):
        convert(text, tmp_path / "out")
    with pytest.raises(UserError, match="is not a file"):
        convert(tmp_path / "missing.pt", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("here")
    with pytest.raises(UserError, match="already exists"):
        convert(save(reference(), tmp_path / "good.pt"), tmp_path / "full")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = reference(new_order=True)
    checkpoint, out = save(net, tmp_path / "model.pt"), tmp_path / "out"
    assert main(["convert", str(checkpoint), str(out), "--head-channels", "16", "--new-attention-order"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert difference(net, Prior.from_pretrained(out)) <= 1e-4
    assert main(["convert", str(checkpoint), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
