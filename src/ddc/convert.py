"""Converts checkpoints (.pt, .ckpt) to model folders in the format of diffusers.

OpenAI's guided-diffusion: 256x256_diffusion_uncond.pt and its siblings (2105.05233), RePaint's CelebA-HQ network, and the
older improved-diffusion networks. Most of the architecture is inferred from the shapes in the checkpoint. The rest
are options: the width or number of attention heads, the order of queries, keys and values, and the noise schedule.
DDIM's `Model` (2010.02502): celeba_hq.ckpt of the DDRM and DDNM repositories. Of a class-conditional diffusers model, one
class becomes a prior.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.networks import WEIGHTS, build_network, check_finite, check_fit, read_config, read_weights, save_network
from ddc.pickles import State, read_checkpoint
from ddc.priors import Prior, prediction_type_of, read_scheduler, schedule_from_config, scheduler_config


@dataclass(frozen=True)
class GuidedOptions:
    """What cannot be inferred from a guided-diffusion checkpoint; the defaults fit the 256×256 models."""

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
    """The size of the training images, which is written to the configuration."""
    class_label: int | None = None
    """For a class-conditional checkpoint or folder: the class of the prior."""

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

    A diffusers pickle (diffusion_pytorch_model.bin beside its config.json), or the folder of one, becomes a prior with the
    scheduler of its folder, or a network folder if there is none. The folder of a class-conditional diffusers model becomes a
    prior of one class.
    """
    settings = GuidedOptions(**options)
    checkpoint, out = Path(checkpoint), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists; name a new or empty folder for the converted model")
    if checkpoint.is_dir() and (pickled := pickle_of(checkpoint)) is not None:
        checkpoint = pickled
    if checkpoint.is_dir():
        choose_class(checkpoint, out, settings.class_label)
        return
    if not checkpoint.is_file():
        raise UserError(f"{checkpoint} is not a file; expected a checkpoint, for example 256x256_diffusion_uncond.pt")
    state = read_checkpoint(checkpoint)
    if any(tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes() for tensor in state.values()):
        raise UserError(
            f"{checkpoint} holds tensors that are larger than their data; save the model's state_dict again"
        )
    check_finite(state, checkpoint)
    if "conv_in.weight" in state and "temb.dense.0.weight" not in state:
        of_diffusers(checkpoint, state, out, settings.class_label)
        return

    try:
        if "temb.dense.0.weight" in state:
            converted, config = ddim_model(state, checkpoint, settings.image_size)
        else:
            layout = read_layout(state, checkpoint)
            _check_heads(layout, settings)
            converted, config = _Conversion(state, layout, settings, checkpoint).run(), unet_config(layout, settings)
    except (IndexError, TypeError, RuntimeError, ZeroDivisionError) as error:
        shape = "its tensors do not have the shapes of one"
        raise UserError(f"{checkpoint} is not a U-Net that is known here: {shape} ({str(error)[:80]})") from None
    inputs, outputs = config["in_channels"], config["out_channels"]
    if (inputs, outputs) not in ((3, 3), (3, 6)):
        raise UserError(
            f"{checkpoint} has {inputs} input and {outputs} output channels; "
            "an RGB prior has 3 and 3 (or 6, with learned variance). Upsamplers cannot be converted"
        )
    network = _fitting_network(config, converted, checkpoint)
    scheduler = scheduler_config(
        train_steps=settings.diffusion_steps,
        beta_schedule={"linear": "linear", "cosine": "squaredcos_cap_v2"}[settings.noise_schedule],
        prediction_type="sample" if settings.predict_xstart else "epsilon",
        learned_variance=outputs == 6,
    )
    stretch = 1000 / settings.diffusion_steps  # a shorter or longer linear schedule ends at the same noise
    scheduler |= {"beta_start": 1e-4 * stretch, "beta_end": 0.02 * stretch}
    Prior(network, schedule_from_config(scheduler), scheduler_config=scheduler).save_pretrained(out, state=converted)


def pickle_of(folder: Path) -> Path | None:
    """The pickled weights in a diffusers folder or in its unet/, unless there are safetensors."""
    unet = folder / "unet" if (folder / "unet").is_dir() else folder
    if any(unet.glob("*.safetensors")):
        return None
    found = [unet / f"{WEIGHTS}{variant}.bin" for variant in ("", ".fp16")]
    if not any(path.is_file() for path in found) and (others := sorted(unet.glob("*.bin"))):
        raise UserError(f"{others[0]} cannot be converted by itself; save the model as one file or as safetensors")
    return next((path for path in found if path.is_file()), None)


def of_diffusers(checkpoint: Path, state: State, out: Path, label: int | None) -> None:
    """Write diffusers' pickle as a prior, if its folder has a scheduler, or else as a network."""
    config, scheduler = read_config(checkpoint.parent), read_scheduler(checkpoint.parent)
    if config.get("num_class_embeds") is not None:
        write_class(config, state, scheduler, checkpoint, out, label)
        return
    if label is not None:
        raise UserError(f"{checkpoint} is not class-conditional; leave class_label out")
    extra = {"inputs": config.pop("inputs")} if "inputs" in config else {}
    network = _fitting_network(config, state, checkpoint)
    if extra or not scheduler:
        save_network(network, out, state=state, extra_config=extra)
        return
    kind = prediction_type_of(scheduler)
    Prior(network, schedule_from_config(scheduler), kind, scheduler_config=scheduler).save_pretrained(out, state=state)


def choose_class(folder: Path, out: Path, label: int | None) -> None:
    """Write one class of a class-conditional UNet2DModel as a prior."""
    unet = folder / "unet" if (folder / "unet").is_dir() else folder
    config = read_config(unet)
    if config.get("num_class_embeds") is None:
        raise UserError(f"{folder} is not a class-conditional UNet2DModel; other folders need no conversion")
    state = read_weights(unet)
    check_finite(state, folder)
    write_class(config, state, read_scheduler(folder), folder, out, label)


def write_class(
    config: dict[str, Any], state: State, scheduler: dict[str, Any], source: Path, out: Path, label: int | None
) -> None:
    """Write a class of a class-conditional network as a prior."""
    if config.pop("class_embed_type", None) is not None:
        raise UserError(f"{source} has classes of another kind than a table of embeddings, which cannot be converted")
    del config["num_class_embeds"]
    _fold_class(state, "time_embedding.linear_2.bias", state.pop("class_embedding.weight", None), label, source)
    network, kind = _fitting_network(config, state, source), prediction_type_of(scheduler)
    Prior(network, schedule_from_config(scheduler), kind, scheduler_config=scheduler).save_pretrained(out, state=state)


def _fold_class(state: State, bias: str, labels: Tensor | None, label: int | None, source: Path) -> None:
    """A class only adds a constant to the time embedding, so one class folds into its bias."""
    if labels is None or bias not in state:
        raise UserError(f"{source} is not class-conditional; leave class_label out")
    if label is None:
        problem = f"{source} is class-conditional ({len(labels)} classes) and a prior is not"
        raise UserError(f"{problem}; convert an unconditional checkpoint, or choose one class with class_label")
    if not 0 <= label < len(labels) or labels.shape[1:] != state[bias].shape:
        raise UserError(f"class_label must be between 0 and {len(labels) - 1}, not {label}")
    state[bias] = state[bias] + labels[label]


DDIM_NAMES = [
    (r"^temb\.dense\.0", "time_embedding.linear_1"),
    (r"^temb\.dense\.1", "time_embedding.linear_2"),
    (r"^norm_out", "conv_norm_out"),
    (r"^mid\.block_1", "mid_block.resnets.0"),
    (r"^mid\.block_2", "mid_block.resnets.1"),
    (r"^mid\.attn_1", "mid_block.attentions.0"),
    (r"^(down|up)\.(\d+)\.block", r"\1_blocks.\2.resnets"),
    (r"^(down|up)\.(\d+)\.attn", r"\1_blocks.\2.attentions"),
    (r"^(down|up)\.(\d+)\.(down|up)sample", r"\1_blocks.\2.\3samplers.0"),
    (r"\.temb_proj\.", ".time_emb_proj."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"(attentions\.\d+)\.norm\.", r"\1.group_norm."),
    (r"(attentions\.\d+)\.([qkv])\.", r"\1.to_\2."),
    (r"(attentions\.\d+)\.proj_out\.", r"\1.to_out.0."),
]


def ddim_model(state: State, source: Path, image_size: int) -> tuple[State, dict[str, Any]]:
    """The weights of DDIM's `Model` by diffusers' names, and the configuration of the same network there."""
    found = [match for name in state if (match := re.match(r"down\.(\d{1,2})\.block\.(\d{1,2})\.", name))]
    if not found or "logvar" in state:
        raise UserError(f"{source} is not a U-Net of DDIM's repository that is known here: it has no down blocks")
    levels = 1 + max(int(match[1]) for match in found)
    widths = [len(_find(state, f"down.{level}.block.0.conv1.weight", source)) for level in range(levels)]
    attention = [f"down.{level}.attn.0.q.weight" in state for level in range(levels)]
    config: dict[str, Any] = {
        "_class_name": "UNet2DModel",
        "sample_size": image_size,
        "in_channels": _find(state, "conv_in.weight", source).shape[1],
        "out_channels": len(_find(state, "conv_out.weight", source)),
        "block_out_channels": widths,
        "layers_per_block": 1 + max(int(match[2]) for match in found),
        "down_block_types": ["AttnDownBlock2D" if a else "DownBlock2D" for a in attention],
        "up_block_types": ["AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attention)],
        "downsample_padding": 0,  # on one side only, as TensorFlow
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "norm_eps": 1e-6,
        "attention_head_dim": widths[-1],
    }
    if any(a and width != widths[-1] for a, width in zip(attention, widths, strict=True)):  # one head each
        config |= {"_class_name": "GuidedUNet", "num_heads": 1, "attention_head_dim": None}
    converted = State()
    for name, tensor in state.items():
        name = re.sub(r"^up\.(\d{1,2})\.", lambda match: f"up.{levels - 1 - int(match[1])}.", name)
        for old, new in DDIM_NAMES:
            name = re.sub(old, new, name)
        linear = ".attentions." in name and tensor.ndim == 4  # a convolution of one pixel there
        converted[name] = tensor.flatten(1) if linear else tensor
    return converted, config


def read_layout(state: State, source: Path | str) -> Layout:
    """Infer the architecture; anything but a guided-diffusion U-Net is refused."""
    wanted = ("time_embed.0.weight", "input_blocks.0.0.weight", "middle_block.1.qkv.weight", "out.2.weight")
    absent = [name for name in (*wanted, "output_blocks.0.0.in_layers.2.weight") if name not in state]
    if absent:
        raise UserError(f"{source} is not a guided-diffusion U-Net: it has no {absent[0]}")
    names = [name.split(".") for name in state]
    found = {name[1] for name in names if name[0] == "input_blocks"}
    if any(name[0].endswith("_blocks") and len(name) < 4 for name in names) or not all(
        re.fullmatch(r"\d{1,3}", number) for number in found
    ):
        raise UserError(f"{source} is not a guided-diffusion U-Net: its blocks are not numbered as those are")
    numbers = {int(number) for number in found}
    blocks = 1 + max(numbers)
    # Resampling separates the levels: it is a layer of its own on the way down, and the last layer of a block
    # on the way up. Average pooling has no weights and leaves a gap in the numbers.
    pools = blocks - len(numbers)
    convs = sum(f"input_blocks.{i}.0.op.weight" in state for i in range(blocks))
    last = ["in_layers", "2", "weight"]
    ups = sum(name[0] == "output_blocks" and name[2] != "0" and name[3:] == last for name in names)
    levels = 1 + (pools or convs or ups)
    if blocks % levels or blocks == levels:
        raise UserError(f"{source} has {blocks} input blocks, which do not divide into {levels} levels")
    res_blocks = blocks // levels - 1
    first = [1 + level * (res_blocks + 1) for level in range(levels)]
    widths = tuple(len(_find(state, f"input_blocks.{i}.0.out_layers.3.weight", source)) for i in first)
    return Layout(
        model_channels=state["time_embed.0.weight"].shape[1],
        in_channels=state["input_blocks.0.0.weight"].shape[1],
        out_channels=state["out.2.weight"].shape[0],
        widths=widths,
        res_blocks=res_blocks,
        attention=tuple(f"input_blocks.{i}.1.qkv.weight" in state for i in first),
        scale_shift=len(_find(state, "input_blocks.1.0.emb_layers.1.weight", source)) == 2 * widths[0],
        resampling="pool" if pools else "conv" if convs or not ups else "resblock",
    )


def unet_config(layout: Layout, options: GuidedOptions = GuidedOptions()) -> dict[str, Any]:
    """The configuration of the same network in diffusers: a UNet2DModel if possible, else a GuidedUNet."""
    resblock = layout.resampling == "resblock"
    down = "ResnetDownsampleBlock2D" if resblock else "DownBlock2D"
    up = "ResnetUpsampleBlock2D" if resblock else "UpBlock2D"
    config: dict[str, Any] = {
        "_class_name": "UNet2DModel",
        "sample_size": options.image_size,
        "in_channels": layout.in_channels,
        "out_channels": layout.out_channels,
        "freq_shift": 0,
        "flip_sin_to_cos": True,  # guided-diffusion puts the cosines first
        "block_out_channels": list(layout.widths),
        "layers_per_block": layout.res_blocks,
        "down_block_types": ["AttnDownBlock2D" if a else down for a in layout.attention],
        "up_block_types": ["AttnUpBlock2D" if a else up for a in reversed(layout.attention)],
        "downsample_type": "resnet" if resblock else "conv",
        "upsample_type": "resnet" if resblock else "conv",
        "attention_head_dim": options.head_channels,
        "norm_num_groups": 32,
        "attn_norm_num_groups": 32,  # otherwise "scale_shift" removes the norm of the middle attention
        "norm_eps": 1e-5,
        "resnet_time_scale_shift": "scale_shift" if layout.scale_shift else "default",
    }
    guided: dict[str, Any] = {}
    if options.num_heads is not None:
        attended = {width for width, a in zip(layout.widths, layout.attention, strict=True) if a}
        same_heads = options.num_heads_upsample in (None, options.num_heads)
        if attended <= {layout.widths[-1]} and same_heads:
            config["attention_head_dim"] = layout.widths[-1] // options.num_heads
        else:
            guided = {"num_heads": options.num_heads, "num_heads_upsample": options.num_heads_upsample}
            guided["attention_head_dim"] = None
    if layout.widths[0] != layout.model_channels:
        guided["time_channels"] = layout.model_channels
        guided["time_embedding_dim"] = 4 * layout.model_channels
    return config | guided | ({"_class_name": "GuidedUNet"} if guided else {})


class _Conversion:
    """Moves the checkpoint's tensors to diffusers' names."""

    def __init__(self, state: State, layout: Layout, options: GuidedOptions, source: Path) -> None:
        self.rest, self.done = dict(state), State()
        self.layout, self.options, self.source = layout, options, source

    def run(self) -> State:
        """The converted tensors. Tensors that belong nowhere are an error."""
        self.move("time_embed.0", "time_embedding.linear_1")
        self.move("time_embed.2", "time_embedding.linear_2")
        self.fold_class_label()
        self.move("input_blocks.0.0", "conv_in")
        levels, blocks = range(len(self.layout.widths)), self.layout.res_blocks
        number = 0
        for level in levels:
            for i in range(blocks):
                number += 1
                self.move_block(f"input_blocks.{number}", f"down_blocks.{level}", i, level)
            if level < levels[-1]:
                number += 1
                self.move_resampling(f"input_blocks.{number}.0", f"down_blocks.{level}.downsamplers.0", "op", level)
        self.move_resnet("middle_block.0", "mid_block.resnets.0")
        self.move_attention("middle_block.1", "mid_block.attentions.0")
        self.move_resnet("middle_block.2", "mid_block.resnets.1")
        number = -1
        for place, level in enumerate(reversed(levels)):
            for i in range(blocks + 1):
                number += 1
                self.move_block(f"output_blocks.{number}", f"up_blocks.{place}", i, level)
            if level > 0:  # the last layer of the level's last block
                last = f"output_blocks.{number}.{1 + self.layout.attention[level]}"
                self.move_resampling(last, f"up_blocks.{place}.upsamplers.0", "conv", level)
        self.move("out.0", "conv_norm_out")
        self.move("out.2", "conv_out")
        if self.rest:
            unknown = f"{len(self.rest)} tensors that this U-Net family does not, for example {min(self.rest)}"
            raise UserError(f"{self.source} has {unknown}")
        return self.done

    def move_block(self, old: str, new: str, i: int, level: int) -> None:
        self.move_resnet(f"{old}.0", f"{new}.resnets.{i}")
        if self.layout.attention[level]:
            self.move_attention(f"{old}.1", f"{new}.attentions.{i}")

    def fold_class_label(self) -> None:
        labels = self.rest.pop("label_emb.weight", None)
        if labels is not None or self.options.class_label is not None:
            bias, label = "time_embedding.linear_2.bias", self.options.class_label
            _fold_class(self.done, bias, labels, label, self.source)

    def take(self, name: str) -> Tensor:
        _find(self.rest, name, self.source)
        return self.rest.pop(name)

    def move(self, old: str, new: str) -> None:
        for kind in ("weight", "bias"):
            self.done[f"{new}.{kind}"] = self.take(f"{old}.{kind}")

    def move_resnet(self, old: str, new: str) -> None:
        self.move(f"{old}.in_layers.0", f"{new}.norm1")
        self.move(f"{old}.in_layers.2", f"{new}.conv1")
        self.move(f"{old}.emb_layers.1", f"{new}.time_emb_proj")
        self.move(f"{old}.out_layers.0", f"{new}.norm2")
        self.move(f"{old}.out_layers.3", f"{new}.conv2")
        if f"{old}.skip_connection.weight" in self.rest:
            self.move(f"{old}.skip_connection", f"{new}.conv_shortcut")

    def move_attention(self, old: str, new: str) -> None:
        options = self.options
        self.move(f"{old}.norm", f"{new}.group_norm")
        for kind in ("weight", "bias"):
            packed = self.take(f"{old}.qkv.{kind}")
            packed = packed.flatten(1) if packed.ndim > 1 else packed  # from a convolution of length 1
            heads = options.num_heads or max(1, len(packed) // 3 // options.head_channels)
            if options.num_heads_upsample and new.startswith("up_blocks"):
                heads = options.num_heads_upsample
            if options.new_attention_order:
                parts = packed.unflatten(0, (3, heads, -1))
            else:
                parts = packed.unflatten(0, (heads, 3, -1)).transpose(0, 1)
            for letter, part in zip("qkv", parts, strict=True):
                self.done[f"{new}.to_{letter}.{kind}"] = part.flatten(0, 1).contiguous()
        self.move(f"{old}.proj_out", f"{new}.to_out.0")
        weight = f"{new}.to_out.0.weight"
        self.done[weight] = self.done[weight].flatten(1)  # from a convolution of length 1

    def move_resampling(self, old: str, new: str, layer: str, level: int) -> None:
        if self.layout.resampling == "resblock":
            self.move_resnet(old, new)
        elif self.layout.resampling == "conv":
            self.move(f"{old}.{layer}", f"{new}.conv")
        else:
            # Pooling and repetition have no weights. As 3×3 convolutions: the mean of 2×2 pixels (with stride 2
            # and padding 1), and the identity.
            kernel, width = torch.zeros(3, 3), self.layout.widths[level]
            if layer == "op":
                kernel[1:, 1:] = 0.25
            else:
                kernel[1, 1] = 1.0
            self.done[f"{new}.conv.weight"] = torch.eye(width)[:, :, None, None] * kernel
            self.done[f"{new}.conv.bias"] = torch.zeros(width)


def _check_heads(layout: Layout, options: GuidedOptions) -> None:
    attended = {width for width, a in zip(layout.widths, layout.attention, strict=True) if a} | {layout.widths[-1]}
    for name in ("num_heads", "num_heads_upsample") if options.num_heads else ("head_channels",):
        value = getattr(options, name)
        if wrong := [width for width in attended if value is not None and width % value]:
            raise UserError(
                f"{name} {value} does not divide the {wrong[0]} channels of an attention in this checkpoint"
            )


def _fitting_network(config: dict[str, Any], state: State, source: Path) -> torch.nn.Module:
    """The network of `config` on the meta device; its names and shapes must be those of the state."""
    with torch.device("meta"):
        network = build_network(config)
    check_fit(network, {name: tensor.shape for name, tensor in state.items()}, source)
    return network


def _find(state: State, name: str, source: Path | str) -> Tensor:
    if name not in state:
        raise UserError(f"{source} has no {name}; it is damaged or not of the guided-diffusion family")
    return state[name]
