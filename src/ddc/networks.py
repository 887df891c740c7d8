"""The networks: a compact U-Net, and folders of weights in the diffusers convention.

A folder holds `config.json` and safetensors (one file or shards). `_class_name` in the configuration chooses the class:
`CompactUNet` here, or diffusers' `UNet2DModel`, which is what the paper's network and OpenAI's 256×256 prior are.
"""

import contextlib
import inspect
import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddc.eight_bits import SCALE, from_8_bits, to_8_bits
from ddc.errors import UserError, shorten

WEIGHTS = "diffusion_pytorch_model"
LARGEST_CONFIG = 10_000_000  # bytes; the longest is an index of many shards
# of prior, network, posterior and bridge: configurations by their names
PRESETS: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())


class CompactUNet(nn.Module):
    """A U-Net on `patch_size`² pixel-unshuffled images, with attention at the lowest level and at `attention_levels`.

    It takes any height and width (padded inside to a multiple of `size_multiple`). `channels[i]` is the width of level i,
    the last of which is the middle; the blocks are numbers of residual blocks. `middle_blocks` more follow at the lowest
    level, each with attention. `conditions` is how many numbers it is told of each picture beside the time. Fresh blocks,
    attention and conditions add nothing, so that a trained network can be grown.
    """

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        patch_size: int = 2,
        channels: tuple[int, ...] = (96, 160, 256, 320),
        encoder_blocks: tuple[int, ...] = (2, 2, 2, 2),
        decoder_blocks: tuple[int, ...] = (2, 2, 2),
        head_dim: int = 64,
        groups: int = 32,
        middle_blocks: int = 0,
        attention_levels: tuple[int, ...] = (),
        conditions: int = 0,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        _check_settings(settings)
        self.config = {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()}
        self.patch_size = patch_size
        self.size_multiple = patch_size * 2 ** (len(channels) - 1)
        self.time_dim, time_dim = channels[0], 4 * channels[0]
        self.checkpointing = False  # keep only the inputs of each block, and compute its inside again going back
        self.time = nn.Sequential(nn.Linear(self.time_dim, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        self.conditions = _zeroed(nn.Linear(conditions, time_dim, bias=False)) if conditions else None
        self.enter = nn.Conv2d(in_channels * patch_size**2, channels[0], 3, padding=1)

        self.down = nn.ModuleList()
        for level, width in enumerate(channels):
            stage = nn.ModuleList([ResidualBlock(width, time_dim, groups) for _ in range(encoder_blocks[level])])
            if level == len(channels) - 1:
                stage.insert(len(stage) // 2, Attention(width, head_dim, groups))
            else:
                stage.append(nn.Conv2d(width, channels[level + 1], 2, stride=2))
            self.down.append(stage)

        self.middle = nn.ModuleList()
        for _ in range(middle_blocks):
            self.middle.append(ResidualBlock(channels[-1], time_dim, groups))
            self.middle.append(Attention(channels[-1], head_dim, groups))
        self.attend_down, self.attend_up = (
            nn.ModuleDict({str(level): Attention(channels[level], head_dim, groups) for level in attention_levels})
            for _ in range(2)
        )

        self.up = nn.ModuleList()
        for level in reversed(range(len(channels) - 1)):
            width = channels[level]
            stage = nn.ModuleList([nn.Conv2d(channels[level + 1], 4 * width, 1), nn.Conv2d(2 * width, width, 1)])
            stage.extend(ResidualBlock(width, time_dim, groups) for _ in range(decoder_blocks[level]))
            self.up.append(stage)

        self.exit_norm = GroupNorm(groups, channels[0])
        self.exit = _zeroed(nn.Conv2d(channels[0], out_channels * patch_size**2, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, conditions: Tensor | None = None) -> Tensor:
        """x (B, in, H, W), t (B,) and conditions (B, n), or (1,) and (1, n) for all images, → (B, out, H, W)."""
        emb = self._embed(t, x.dtype, conditions)
        features = self._encode(x, emb)
        h = features[-1]
        for stage, level in zip(self.up, reversed(range(len(self.up))), strict=True):
            upsample, fuse, *blocks = stage.children()
            h = _packed(F.pixel_shuffle(upsample(h), 2))
            h = fuse(torch.cat([h, features[level]], dim=1))
            for block in [*self._attention(self.attend_up, level), *blocks]:
                h = self._run_block(block, h, emb)
        h = self.exit(F.silu(self.exit_norm(h)))
        return F.pixel_shuffle(h, self.patch_size)[..., : x.shape[-2], : x.shape[-1]]

    def encode(self, x: Tensor, t: Tensor) -> list[Tensor]:
        """The features of the way down, one tensor for each level."""
        return self._encode(x, self._embed(t, x.dtype))

    def _embed(self, t: Tensor, dtype: torch.dtype, conditions: Tensor | None = None) -> Tensor:
        emb = self.time(sinusoidal(t, self.time_dim).to(dtype))
        if self.conditions is not None and conditions is not None:
            emb = emb + self.conditions(conditions.to(dtype))
        return F.silu(emb)

    def _encode(self, x: Tensor, emb: Tensor) -> list[Tensor]:
        x = pad_to_multiple(x, self.size_multiple)
        h = self.enter(_packed(F.pixel_unshuffle(x, self.patch_size)))  # (B, C, H/p, W/p)
        features = []
        for level, stage in enumerate(self.down):
            for layer in stage.children():
                if isinstance(layer, nn.Conv2d):
                    for attention in self._attention(self.attend_down, level):
                        h = self._run_block(attention, h, emb)
                    features.append(h)
                    h = layer(h)
                else:
                    h = self._run_block(layer, h, emb)
        for layer in self.middle:
            h = self._run_block(layer, h, emb)
        return [*features, h]

    @staticmethod
    def _attention(layers: nn.ModuleDict, level: int) -> list[nn.Module]:
        return [layers[str(level)]] if str(level) in layers else []

    def _run_block(self, block: nn.Module, h: Tensor, emb: Tensor) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, h, emb, use_reentrant=False)
        return block(h, emb)


# the lowest and highest value of each setting; of a list, of each of its 1 to 8 numbers (attention_levels may be empty)
RANGES = {
    **{"in_channels": (1, 64), "out_channels": (1, 64), "patch_size": (1, 16), "channels": (1, 8192)},
    **{"encoder_blocks": (0, 64), "decoder_blocks": (0, 64), "middle_blocks": (0, 64), "attention_levels": (0, 7)},
    **{"head_dim": (1, 8192), "groups": (1, 8192), "layers_per_block": (1, 64), "block_out_channels": (1, 8192)},
    **{"depth": (2, 200), "width": (1, 8192), "conditions": (0, 64), "latent_channels": (1, 64)},
}
LISTS = ("channels", "encoder_blocks", "decoder_blocks", "attention_levels", "block_out_channels")
LARGEST_MULTIPLE = 256  # of pixels to which a network pads a picture


def check_ranges(settings: dict[str, Any]) -> None:
    """Refuse settings of another type or range than `RANGES` names, before anything is built of them."""
    for name in settings.keys() & RANGES.keys():
        value, (low, high), several = settings[name], RANGES[name], name in LISTS
        numbers = [value] if not several else value if isinstance(value, (list, tuple)) else [None]
        if not all(type(n) is int and low <= n <= high for n in numbers) or len(numbers) > 8:
            what = "a list of at most 8 whole numbers" if several else "a whole number"
            raise UserError(f"{name} of a network is {shorten(value)}; expected {what} from {low} to {high}")


def _check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings of a CompactUNet that do not fit together."""
    check_ranges(settings)
    channels, groups, head_dim = settings["channels"], settings["groups"], settings["head_dim"]
    encoder, decoder = len(settings["encoder_blocks"]), len(settings["decoder_blocks"])
    if not channels or encoder != len(channels) or decoder != len(channels) - 1:
        raise UserError(
            f"a U-Net of {len(channels)} levels needs {len(channels)} encoder_blocks and "
            f"{len(channels) - 1} decoder_blocks, not {encoder} and {decoder}"
        )
    if any(level >= len(channels) for level in settings["attention_levels"]):
        raise UserError(f"attention_levels name a level that a U-Net of {len(channels)} levels does not have")
    if uneven := [width for width in channels if width % groups]:
        raise UserError(f"channels {uneven} are no multiples of groups ({groups}); choose widths that are")
    if channels[-1] % max(channels[-1] // head_dim, 1):
        raise UserError(
            f"{channels[-1]} channels, the last of them, cannot be divided among {channels[-1] // head_dim} "
            f"attention heads (head_dim {head_dim}); change either"
        )


def _zeroed(layer: nn.Module) -> nn.Module:
    """The layer with weights of zero, so that a fresh block adds nothing."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class ResidualBlock(nn.Module):
    """GroupNorm, SiLU, convolution, twice; the time scales and shifts the second normalisation."""

    folded = False  # whether to fold one time's scale and shift into the normalisation, which is faster on the CPU

    def __init__(self, width: int, time_dim: int, groups: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(groups, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time_dim, 2 * width)
        self.norm2 = GroupNorm(groups, width)
        self.conv2 = _zeroed(nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        if self.folded and emb.shape[0] == 1:
            return self._folded(x, emb)
        scale, shift = self.time(emb)[:, :, None, None].chunk(2, dim=1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h, 1 + scale, shift)))
        return x + h

    def _folded(self, x: Tensor, emb: Tensor) -> Tensor:
        """The same with fewer passes over memory."""
        inplace = not torch.is_grad_enabled()
        scale, shift = self.time(emb)[0].chunk(2)
        h = self.conv1(F.silu(self.norm1(x), inplace=inplace))
        weight, bias = self.norm2.weight * (1 + scale), self.norm2.bias * (1 + scale) + shift
        h = self.conv2(F.silu(self.norm2.normalise(h, weight, bias), inplace=inplace))
        return h.add_(x) if inplace else x + h


class Attention(nn.Module):
    """Self-attention over all positions."""

    def __init__(self, width: int, head_dim: int, groups: int) -> None:
        super().__init__()
        self.heads = next(heads for heads in range(max(width // head_dim, 1), 0, -1) if width % heads == 0)
        self.norm = GroupNorm(groups, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = _zeroed(nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        batch, width, height, breadth = x.shape
        qkv = self.qkv(self.norm(x)).flatten(2).view(batch, 3, self.heads, width // self.heads, -1)
        q, k, v = qkv.transpose(-1, -2).unbind(1)  # each (B, heads, H·W, dim)
        h = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(batch, width, height, breadth)
        return x + self.out(h)


class GroupNorm(nn.GroupNorm):
    """nn.GroupNorm, and a scale and shift on top; written out where it is compiled, because the compiler would turn
    channels last into channels first for it, and back for every convolution."""

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling():
            h = self.normalise(x, self.weight, self.bias)
            return h if scale is None or shift is None else h * scale + shift
        batch, channels = x.shape[:2]
        wide, pixels = x.float(), tuple(range(2, x.ndim))
        group = (1, self.num_groups, channels // self.num_groups)
        count = x[0].numel() // self.num_groups
        mean = wide.sum(pixels).view(batch, *group[1:]).sum(2, keepdim=True) / count
        square = wide.square().sum(pixels).view(batch, *group[1:]).sum(2, keepdim=True) / count
        inverse = ((square - mean.square()).clamp(min=0) + self.eps).rsqrt()
        product = inverse * self.weight.float().view(group)
        offset = self.bias.float().view(group) - mean * product
        shape = (batch, channels, *(1 for _ in pixels))
        product, offset = product.view(shape), offset.view(shape)
        if scale is not None and shift is not None:
            product, offset = product * scale, offset * scale + shift
        return (wide * product + offset).to(x.dtype)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


def _packed(x: Tensor) -> Tensor:
    """Channels last again, where the compiler would leave pixels apart after they were moved about."""
    return x.contiguous(memory_format=torch.channels_last) if torch.compiler.is_compiling() and x.is_cuda else x


def sinusoidal(t: Tensor, dim: int) -> Tensor:
    """The usual sine and cosine embedding of t (B,) → (B, dim), in float32."""
    steps = torch.arange(dim // 2, device=t.device, dtype=torch.float32)
    angles = t.float()[:, None] * torch.exp(-math.log(10000.0) * steps / (dim // 2))[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Pad below and to the right by mirroring; by repeating the border where the picture is too small for that."""
    height, width = x.shape[-2:]
    down, right = -height % multiple, -width % multiple
    if not (down or right):
        return x
    mode = "reflect" if down < height and right < width else "replicate"
    return F.pad(x, (0, right, 0, down), mode=mode)


def run_unet(unet: Callable[..., Any], x: Tensor, t: int | Tensor, conditions: Tensor | None = None) -> Tensor:
    """Call either class of U-Net with an integer t or one per image."""
    times = t if isinstance(t, Tensor) else torch.full((1,), t, device=x.device)  # one for all images
    if getattr(unet, "channels_last", False):  # prepared for the CPU
        x = x.contiguous(memory_format=torch.channels_last)
    out = unet(pad_to_multiple(x, unet_size_multiple(unet)), times, *([] if conditions is None else [conditions]))
    return (out if isinstance(out, Tensor) else out.sample)[..., : x.shape[-2], : x.shape[-1]]


def unet_size_multiple(unet: Callable[..., Any]) -> int:
    """Heights and widths must be multiples of this; 1 for a wrapped network, whose crops are chosen to fit."""
    if hasattr(unet, "size_multiple"):
        return int(unet.size_multiple)
    config = getattr(unet, "config", None)
    return 2 ** (len(config["block_out_channels"]) - 1) if config else 1


def diffusers_class(name: str) -> Any:
    """A class of diffusers. It loads its modules late, so that a package that does not fit beside it shows only here."""
    try:
        import diffusers

        return getattr(diffusers, name)
    except Exception as error:
        while error.__cause__ is not None:  # the first of the errors, which names the package
            error = error.__cause__  # type: ignore[assignment]
        raise UserError(
            f"diffusers cannot be loaded beside the other packages that are installed ({shorten(error)}); install both "
            "into a new virtual environment"
        ) from None


def build_network(config: dict[str, Any]) -> nn.Module:
    """A network with fresh weights from its configuration; keys that begin with _ are remarks."""
    name = config.get("_class_name", "CompactUNet")
    settings = {k: v for k, v in config.items() if not k.startswith("_")}
    if name == "CompactUNet":
        known = inspect.signature(CompactUNet).parameters
        if unknown := sorted(settings.keys() - known):
            raise UserError(f"CompactUNet has no setting {shorten(unknown)}; it takes {sorted(known)}")
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        network: nn.Module = CompactUNet(**arguments)
    elif name in ("UNet2DModel", "GuidedUNet"):
        diffusers_class("UNet2DModel")
        from ddc.guided import diffusers_network

        network = diffusers_network(str(name), settings)
    else:
        expected = "CompactUNet, UNet2DModel or GuidedUNet"
        raise UserError(f"the network class {shorten(name)!r} is not known; expected {expected}")
    if unet_size_multiple(network) > LARGEST_MULTIPLE:
        raise UserError(f"this network pads pictures to multiples of more than {LARGEST_MULTIPLE} pixels")
    return network


def network_config(network: nn.Module) -> dict[str, Any]:
    """The configuration that `build_network` takes, without diffusers' own remarks."""
    settings = {k: v for k, v in dict(network.config).items() if not k.startswith("_")}  # type: ignore[arg-type]
    return {"_class_name": type(network).__name__, **settings}


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        problem = f"has no {name}" if folder.is_dir() else "is not a folder"
        raise UserError(f"{folder} {problem}; a model is a folder with config.json and safetensors")
    if path.stat().st_size > LARGEST_CONFIG:
        raise UserError(f"{path} has {path.stat().st_size} bytes, which is too long for a configuration")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({shorten(error)})") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} should hold one JSON object")
    return config


def weight_paths(folder: Path) -> list[Path]:
    """The safetensors of a folder: one file, or the shards that its index names, in full or half precision."""
    for variant in ("", ".fp16"):
        single, index = f"{WEIGHTS}{variant}.safetensors", f"{WEIGHTS}.safetensors.index{variant}.json"
        if (folder / index).is_file():
            shards = read_config(folder, index).get("weight_map")
            names = list(shards.values()) if isinstance(shards, dict) else []
            if not names or not all(isinstance(n, str) and n == Path(n).name and ".safetensors" in n for n in names):
                raise UserError(f"{folder / index} should have a weight_map to safetensors files of the same folder")
            return [folder / name for name in sorted(set(names))]
        if (folder / single).is_file():
            return [folder / single]
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    hint = f"; {pickles[0]} is a pickle, which is not opened: convert it with `ddc convert`" if pickles else ""
    raise UserError(f"{folder} has no weights ({WEIGHTS}.safetensors){hint}")


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """An open safetensors file, of which nothing but the header was read."""
    if not path.is_file():
        raise UserError(f"{path} is missing; copy the model folder again, with all its shards")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{path} is not a good safetensors file ({shorten(error)}); copy it again") from None


def load_network(
    folder: str | Path, config: dict[str, Any] | None = None, build: Callable[..., nn.Module] = build_network
) -> nn.Module:
    """Read a network and its weights, in float32 and eval mode. A missing weight is an error.

    Names and shapes are compared before anything is allocated: no configuration asks for more memory than its files have.
    """
    folder = Path(folder)
    config = read_config(folder) if config is None else config
    with torch.device("meta"):
        network = build(config)
    headers: dict[str, Any] = {}
    for path in weight_paths(folder):
        with open_weights(path) as file:
            headers |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    scales = {name + SCALE for name, header in headers.items() if header.get_dtype() == "I8"}
    shapes = {_present_name(name): header.get_shape() for name, header in headers.items() if name not in scales}
    check_fit(network, shapes, folder)
    check_finite(state := read_weights(folder), folder)
    if dict(network.named_buffers()).keys() - state:  # they are computed, not stored
        network = build(config)
    network.load_state_dict(state, assign=True)
    network.eval().requires_grad_(False)
    if build is build_network and not isinstance(network, CompactUNet):
        from ddc.guided import try_out

        try_out(network, folder)
    return network


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Copies of a folder's weights, in float32, by present names: in a file they may be unaligned, which changes rounding."""
    stored: dict[str, Tensor] = {}
    for path in weight_paths(folder):
        with open_weights(path) as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    rounded = any(tensor.dtype == torch.int8 for tensor in stored.values())
    wide = from_8_bits(stored, folder) if rounded else stored  # new tensors, where there were 8 bits
    return {_present_name(n): tensor.to(torch.float32, copy=tensor is stored[n]) for n, tensor in wide.items()}


def _present_name(name: str) -> str:
    """The name of a weight in diffusers today; its attentions had other names before version 0.15."""
    old = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
    parts = name.rsplit(".", 2)
    return ".".join([parts[0], old[parts[1]], parts[2]]) if ".attentions." in name and parts[1] in old else name


def check_fit(network: nn.Module, shapes: Mapping[str, Sequence[int]], source: Path) -> None:
    """Check that weights of these names and shapes are those of the network."""
    expected = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    missing, extra = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    wrong = [name for name in expected if name in shapes and list(shapes[name]) != expected[name]]
    if missing or extra or wrong:
        raise UserError(
            f"the weights in {source} do not fit its architecture: {len(missing)} missing, {len(extra)} unknown, "
            f"{len(wrong)} of another shape, for example {shorten((missing + extra + wrong)[0])}"
        )


def check_finite(state: dict[str, Tensor], source: Path) -> None:
    """Refuse weights with NaN or infinity, which would only give a black picture."""
    for name, tensor in state.items():
        if not bool(tensor.sum().isfinite() or tensor.isfinite().all()):  # a sum is faster, but may overflow
            raise UserError(f"the weights in {source} hold NaN or infinity ({shorten(name)}); copy or train them again")


def save_network(
    network: nn.Module,
    folder: str | Path,
    *,
    extra_config: dict[str, Any] | None = None,
    state: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    shard_mb: float | None = None,
) -> None:
    """Write config.json and safetensors; see `save_weights`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = network_config(network) | (extra_config or {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_weights(state if state is not None else network.state_dict(), folder, dtype, shard_mb)


def save_weights(state: dict[str, Tensor], folder: Path, dtype: torch.dtype, shard_mb: float | None = None) -> None:
    """Write safetensors, in shards of at most `shard_mb` megabytes if given.

    The dtype int8 is that of `to_8_bits`.
    """
    from huggingface_hub import save_torch_state_dict

    if dtype == torch.int8:
        state, dtype = to_8_bits(state), torch.float16
    tensors = {
        k: v.detach().to("cpu", dtype if v.is_floating_point() and not k.endswith(SCALE) else v.dtype)
        for k, v in state.items()
    }
    tensors = {k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    limit = sys.maxsize if shard_mb is None else int(shard_mb * 1e6)
    # this also removes the files of earlier weights
    save_torch_state_dict(tensors, folder, filename_pattern=f"{WEIGHTS}{{suffix}}.safetensors", max_shard_size=limit)
