"""OpenAI's guided-diffusion checkpoints (.pt) → a prior's folder in the diffusers convention.

The family: 256x256_diffusion_uncond.pt and its siblings (2105.05233), RePaint's CelebA-HQ network, and the
older improved-diffusion ones. Nearly everything about the network is read from the shapes in the checkpoint.
What leaves no trace there is an option: the width or number of attention heads, the packing of queries, keys
and values, and the noise schedule. This is the only place where a pickle is opened, and only for tensors.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.networks import build_network, read_config, save_network
from ddc.priors import Prior, schedule_from_config, scheduler_config

State = dict[str, Tensor]

GROUPS = 32  # of every normalisation in the family


@dataclass(frozen=True)
class GuidedOptions:
    """What a guided-diffusion checkpoint does not say about itself; the defaults are the 256×256 models'."""

    head_channels: int = 64
    """Channels per attention head (OpenAI's num_head_channels)."""
    num_heads: int | None = None
    """Attention heads, for models trained with a number of heads instead (128x128_diffusion.pt: 4)."""
    num_heads_upsample: int | None = None
    """Attention heads on the way up, where they differ from num_heads."""
    new_attention_order: bool = False
    """Queries, keys and values packed by kind instead of by head (64x64_diffusion.pt)."""
    noise_schedule: Literal["linear", "cosine"] = "linear"
    """The noise schedule of the training."""
    diffusion_steps: int = 1000
    """The length of that schedule."""
    predict_xstart: bool = False
    """The network predicts the clean image instead of the noise."""
    image_size: int = 256
    """The size of the training images, noted in the configuration."""
    class_label: int | None = None
    """For a class-conditional checkpoint: the class whose prior to write."""

    def __post_init__(self) -> None:
        for name in ("head_channels", "num_heads", "num_heads_upsample", "diffusion_steps", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        if self.num_heads_upsample is not None and self.num_heads is None:
            raise UserError("num_heads_upsample goes with num_heads; give both")


@dataclass(frozen=True)
class Layout:
    """The network's architecture, as read from the checkpoint's names and shapes."""

    model_channels: int
    in_channels: int
    out_channels: int
    widths: tuple[int, ...]  # of each level, the finest first
    res_blocks: int
    attention: tuple[bool, ...]  # for each level
    scale_shift: bool
    resampling: Literal["resblock", "conv", "pool"]


def convert(checkpoint: str | Path, out: str | Path, **options: Any) -> None:
    """Write the checkpoint as a folder at `out`; `options` are the fields of `GuidedOptions`.

    A diffusers pickle (diffusion_pytorch_model.bin beside its config.json) becomes a network folder.
    """
    unknown = set(options) - set(GuidedOptions.__dataclass_fields__)
    if unknown:
        raise UserError(
            f"convert has no option {sorted(unknown)}; it takes {sorted(GuidedOptions.__dataclass_fields__)}"
        )
    settings = GuidedOptions(**options)
    checkpoint, out = Path(checkpoint), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists; name a new or empty folder for the converted model")
    state = read_pickle(checkpoint)
    if "conv_in.weight" in state:
        config = read_config(checkpoint.parent)
        extra = {"inputs": config.pop("inputs")} if "inputs" in config else {}
        network = _fitting_network(config, state, checkpoint)
        save_network(network, out, state=state, extra_config=extra)
        return

    layout = read_layout(state, checkpoint)
    if (layout.in_channels, layout.out_channels) not in ((3, 3), (3, 6)):
        raise UserError(
            f"{checkpoint} has {layout.in_channels} input and {layout.out_channels} output channels; "
            "an RGB prior has 3 and 3 (or 6, with learned variance). Upsamplers cannot be converted"
        )
    _check_heads(layout, settings)
    config = unet_config(layout, settings)
    converted = convert_state(state, layout, settings, checkpoint)
    network = _fitting_network(config, converted, checkpoint)
    scheduler = _scheduler(layout, settings)
    prior = Prior(network, schedule_from_config(scheduler), scheduler_config=scheduler)
    prior.save_pretrained(out, state=converted)


def read_pickle(path: Path) -> State:
    """The tensors of a PyTorch checkpoint, in float32; anything but plain tensors is refused."""
    if not path.is_file():
        raise UserError(
            f"{path} is not a file; give the checkpoint to convert, for example 256x256_diffusion_uncond.pt"
        )
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, UnicodeDecodeError):
        raise UserError(
            f"{path} is not a PyTorch checkpoint of plain tensors (damaged, or holding other objects); "
            "download it again or save its state_dict alone"
        ) from None
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise UserError(
            f"{path} does not hold a state dict (names and tensors); save the model's state_dict alone"
        )
    return {str(name): tensor.float() for name, tensor in loaded.items()}


def read_layout(state: State, source: Path | str) -> Layout:
    """Infer the architecture; anything but a guided-diffusion U-Net is refused."""
    wanted = ("time_embed.0.weight", "input_blocks.0.0.weight", "middle_block.1.qkv.weight", "out.2.weight")
    absent = [name for name in (*wanted, "output_blocks.0.0.in_layers.2.weight") if name not in state]
    if absent:
        raise UserError(f"{source} is not a guided-diffusion U-Net: it has no {absent[0]}")
    blocks = 1 + max(_number(name) for name in state if name.startswith("input_blocks."))
    inputs = [
        {name.split(".")[2] for name in state if name.startswith(f"input_blocks.{i}.")} for i in range(blocks)
    ]
    # the levels are told apart by their resampling: a layer of its own on the way down, the last layer of
    # a block on the way up; average pooling has no weights and leaves a gap in the numbers
    pools = sum(not parts for parts in inputs)
    convs = sum(f"input_blocks.{i}.0.op.weight" in state for i in range(blocks))
    ups = sum(name.endswith(".in_layers.2.weight") and name.split(".")[2] != "0" for name in _outputs(state))
    levels = 1 + (pools or convs or ups)
    resampling: Literal["resblock", "conv", "pool"] = (
        "pool" if pools else "conv" if convs or not ups else "resblock"
    )
    if blocks % levels or blocks == levels:
        raise UserError(f"{source} has {blocks} input blocks, which do not divide into {levels} levels")
    res_blocks = blocks // levels - 1
    first = [1 + level * (res_blocks + 1) for level in range(levels)]
    widths = tuple(_width(state, f"input_blocks.{i}.0.out_layers.3.weight", source) for i in first)
    return Layout(
        model_channels=state["time_embed.0.weight"].shape[1],
        in_channels=state["input_blocks.0.0.weight"].shape[1],
        out_channels=state["out.2.weight"].shape[0],
        widths=widths,
        res_blocks=res_blocks,
        attention=tuple(f"input_blocks.{i}.1.qkv.weight" in state for i in first),
        scale_shift=_width(state, "input_blocks.1.0.emb_layers.1.weight", source) == 2 * widths[0],
        resampling=resampling,
    )


def unet_config(layout: Layout, options: GuidedOptions = GuidedOptions()) -> dict[str, Any]:
    """The configuration of the same network in diffusers: UNet2DModel if it can say it, else GuidedUNet."""
    resblock = layout.resampling == "resblock"
    down = [
        "AttnDownBlock2D" if a else "ResnetDownsampleBlock2D" if resblock else "DownBlock2D"
        for a in layout.attention
    ]
    up = [
        "AttnUpBlock2D" if a else "ResnetUpsampleBlock2D" if resblock else "UpBlock2D"
        for a in reversed(layout.attention)
    ]
    config: dict[str, Any] = {
        "_class_name": "UNet2DModel",
        "sample_size": options.image_size,
        "in_channels": layout.in_channels,
        "out_channels": layout.out_channels,
        "freq_shift": 0,
        "flip_sin_to_cos": True,  # guided-diffusion puts the cosines first
        "block_out_channels": list(layout.widths),
        "layers_per_block": layout.res_blocks,
        "down_block_types": down,
        "up_block_types": up,
        "downsample_type": "resnet" if resblock else "conv",
        "upsample_type": "resnet" if resblock else "conv",
        "attention_head_dim": options.head_channels,
        "norm_num_groups": GROUPS,
        "attn_norm_num_groups": GROUPS,  # else the middle attention loses its norm beside "scale_shift"
        "norm_eps": 1e-5,
        "resnet_time_scale_shift": "scale_shift" if layout.scale_shift else "default",
    }
    attended = {width for width, a in zip(layout.widths, layout.attention, strict=True) if a} | {
        layout.widths[-1]
    }
    if options.num_heads is not None:
        one_count = options.num_heads_upsample in (None, options.num_heads)
        if len(attended) == 1 and one_count:
            config["attention_head_dim"] = layout.widths[-1] // options.num_heads
        else:
            config |= {
                "_class_name": "GuidedUNet",
                "attention_head_dim": None,
                "num_heads": options.num_heads,
            }
            config["num_heads_upsample"] = options.num_heads_upsample
    if layout.widths[0] != layout.model_channels:
        config |= {"_class_name": "GuidedUNet", "time_channels": layout.model_channels}
        config["time_embedding_dim"] = 4 * layout.model_channels
    return config


def convert_state(
    state: State, layout: Layout, options: GuidedOptions, source: Path | str = "the checkpoint"
) -> State:
    """The checkpoint's tensors under diffusers' names. Every tensor must find its place."""
    rest = dict(state)
    done: State = {}

    def move(old: str, new: str) -> None:
        for kind in ("weight", "bias"):
            done[f"{new}.{kind}"] = _take(rest, f"{old}.{kind}", source)

    def move_resnet(old: str, new: str) -> None:
        move(f"{old}.in_layers.0", f"{new}.norm1")
        move(f"{old}.in_layers.2", f"{new}.conv1")
        move(f"{old}.emb_layers.1", f"{new}.time_emb_proj")
        move(f"{old}.out_layers.0", f"{new}.norm2")
        move(f"{old}.out_layers.3", f"{new}.conv2")
        if f"{old}.skip_connection.weight" in rest:
            move(f"{old}.skip_connection", f"{new}.conv_shortcut")

    def move_attention(old: str, new: str, heads: int) -> None:
        move(f"{old}.norm", f"{new}.group_norm")
        for kind in ("weight", "bias"):
            packed = _take(rest, f"{old}.qkv.{kind}", source)
            for letter, part in zip("qkv", _unpack(packed, heads, options.new_attention_order), strict=True):
                done[f"{new}.to_{letter}.{kind}"] = part
        move(f"{old}.proj_out", f"{new}.to_out.0")
        done[f"{new}.to_out.0.weight"] = done[f"{new}.to_out.0.weight"].flatten(
            1
        )  # a convolution of length 1

    def heads_of(width: int, going_up: bool = False) -> int:
        if options.num_heads is None:
            return width // options.head_channels
        return options.num_heads_upsample if going_up and options.num_heads_upsample else options.num_heads

    def move_resampling(old: str, new: str, layer: str, width: int) -> None:
        if layout.resampling == "resblock":
            move_resnet(old, new)
        elif layout.resampling == "conv":
            move(f"{old}.{layer}", f"{new}.conv")
        else:
            done[f"{new}.conv.weight"] = _pooling_kernel(width) if layer == "op" else _identity_kernel(width)
            done[f"{new}.conv.bias"] = torch.zeros(width)

    move("time_embed.0", "time_embedding.linear_1")
    move("time_embed.2", "time_embedding.linear_2")
    if "label_emb.weight" in rest:
        labels = rest.pop("label_emb.weight")
        label = _label_embedding(labels, options.class_label, source)
        done["time_embedding.linear_2.bias"] = done["time_embedding.linear_2.bias"] + label
    elif options.class_label is not None:
        raise UserError(f"{source} is not class-conditional; leave class_label out")
    move("input_blocks.0.0", "conv_in")

    last = len(layout.widths) - 1
    number = 1
    for level, width in enumerate(layout.widths):
        for i in range(layout.res_blocks):
            move_resnet(f"input_blocks.{number}.0", f"down_blocks.{level}.resnets.{i}")
            if layout.attention[level]:
                move_attention(
                    f"input_blocks.{number}.1", f"down_blocks.{level}.attentions.{i}", heads_of(width)
                )
            number += 1
        if level < last:
            move_resampling(f"input_blocks.{number}.0", f"down_blocks.{level}.downsamplers.0", "op", width)
            number += 1

    move_resnet("middle_block.0", "mid_block.resnets.0")
    move_attention("middle_block.1", "mid_block.attentions.0", heads_of(layout.widths[-1]))
    move_resnet("middle_block.2", "mid_block.resnets.1")

    number = 0
    for place, level in enumerate(range(last, -1, -1)):
        width, attended = layout.widths[level], layout.attention[level]
        for i in range(layout.res_blocks + 1):
            move_resnet(f"output_blocks.{number}.0", f"up_blocks.{place}.resnets.{i}")
            if attended:
                heads = heads_of(width, going_up=True)
                move_attention(f"output_blocks.{number}.1", f"up_blocks.{place}.attentions.{i}", heads)
            if level > 0 and i == layout.res_blocks:
                old = f"output_blocks.{number}.{2 if attended else 1}"
                move_resampling(old, f"up_blocks.{place}.upsamplers.0", "conv", width)
            number += 1

    move("out.0", "conv_norm_out")
    move("out.2", "conv_out")
    if rest:
        raise UserError(
            f"{source} has {len(rest)} tensors that this U-Net family does not, for example {sorted(rest)[0]}"
        )
    return done


def _unpack(packed: Tensor, heads: int, new_order: bool) -> tuple[Tensor, ...]:
    """Queries, keys and values: the new order is (3, heads, dim), the legacy one (heads, 3, dim)."""
    matrix = packed.flatten(1) if packed.ndim > 1 else packed  # the convolution's length of 1 goes
    shape = (3, heads, -1) if new_order else (heads, 3, -1)
    parts = matrix.unflatten(0, shape).movedim(0 if new_order else 1, 0)
    return tuple(part.flatten(0, 1).contiguous() for part in parts)


def _pooling_kernel(width: int) -> Tensor:
    """2×2 average pooling as a 3×3 convolution of stride 2 and padding 1."""
    kernel = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.25, 0.25], [0.0, 0.25, 0.25]])
    return torch.eye(width)[:, :, None, None] * kernel


def _identity_kernel(width: int) -> Tensor:
    """A 3×3 convolution that changes nothing, after nearest-neighbour upsampling."""
    kernel = torch.zeros(3, 3)
    kernel[1, 1] = 1.0
    return torch.eye(width)[:, :, None, None] * kernel


def _label_embedding(labels: Tensor, label: int | None, source: Path | str) -> Tensor:
    """A class only adds a constant to the time embedding, so one class folds into its bias."""
    if label is None:
        raise UserError(
            f"{source} is class-conditional ({len(labels)} classes) and a prior is not; convert "
            "an unconditional checkpoint, or choose one class with class_label"
        )
    if not 0 <= label < len(labels):
        raise UserError(f"class_label must be between 0 and {len(labels) - 1}, not {label}")
    return labels[label]


def _check_heads(layout: Layout, options: GuidedOptions) -> None:
    for width, attended in zip((*layout.widths, layout.widths[-1]), (*layout.attention, True), strict=True):
        for name in ("num_heads", "num_heads_upsample") if options.num_heads else ("head_channels",):
            value = getattr(options, name)
            if attended and value is not None and width % value:
                raise UserError(
                    f"{name} {value} does not divide the {width} channels of an attention in this checkpoint"
                )


def _scheduler(layout: Layout, options: GuidedOptions) -> dict[str, Any]:
    scheduler = scheduler_config(
        train_steps=options.diffusion_steps,
        beta_schedule={"linear": "linear", "cosine": "squaredcos_cap_v2"}[options.noise_schedule],
        prediction_type="sample" if options.predict_xstart else "epsilon",
        learned_variance=layout.out_channels == 2 * layout.in_channels,
    )
    stretch = 1000 / options.diffusion_steps  # a shorter or longer linear schedule ends at the same noise
    return scheduler | {"beta_start": 1e-4 * stretch, "beta_end": 0.02 * stretch}


def _fitting_network(config: dict[str, Any], state: State, source: Path) -> torch.nn.Module:
    """The network of `config`, without memory for weights; its names and shapes must be the state's."""
    with torch.device("meta"):
        network = build_network(config)
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    actual = {name: tensor.shape for name, tensor in state.items()}
    wrong = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    if wrong:
        raise UserError(
            f"{source} does not fit its architecture: {len(wrong)} tensors differ, for example {wrong[0]}"
        )
    return network


def _number(name: str) -> int:
    return int(name.split(".")[1])


def _outputs(state: State) -> list[str]:
    return [name for name in state if name.startswith("output_blocks.")]


def _take(rest: State, name: str, source: Path | str) -> Tensor:
    if name not in rest:
        raise UserError(f"{source} has no {name}; it is damaged or not of the guided-diffusion family")
    return rest.pop(name)


def _width(state: State, name: str, source: Path | str) -> int:
    if name not in state:
        raise UserError(f"{source} has no {name}; it is damaged or not of the guided-diffusion family")
    return state[name].shape[0]
