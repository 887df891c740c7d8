"""The networks: a compact U-Net, and folders of weights in the diffusers convention.

A folder holds `config.json` and safetensors (one file or shards). `_class_name` in the configuration
chooses the class: `CompactUNet` here, or diffusers' `UNet2DModel`, which is what the paper's network and
OpenAI's 256×256 prior are.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddc.errors import UserError

WEIGHTS = "diffusion_pytorch_model"


class CompactUNet(nn.Module):
    """A U-Net on `patch_size`² pixel-unshuffled images, with attention at the lowest level only.

    Convolutional elsewhere, so it takes any height and width (padded inside to a multiple of
    `size_multiple`). `channels[i]` is the width of level i and `blocks[i]` the number of residual blocks
    before and after it; the last level is the middle and has `blocks[-1]` of them.
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
    ) -> None:
        super().__init__()
        if len(encoder_blocks) != len(channels) or len(decoder_blocks) != len(channels) - 1:
            raise UserError(
                f"a U-Net of {len(channels)} levels needs {len(channels)} encoder_blocks and "
                f"{len(channels) - 1} decoder_blocks, not {len(encoder_blocks)} and {len(decoder_blocks)}"
            )
        uneven = [width for width in channels if width % groups]
        if uneven:
            raise UserError(
                f"channels {uneven} are no multiples of groups ({groups}); choose widths that are"
            )
        if channels[-1] % max(channels[-1] // head_dim, 1):
            raise UserError(
                f"{channels[-1]} channels, the last of them, cannot be divided among {channels[-1] // head_dim} "
                f"attention heads (head_dim {head_dim}); change either"
            )
        self.config: dict[str, Any] = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "patch_size": patch_size,
            "channels": list(channels),
            "encoder_blocks": list(encoder_blocks),
            "decoder_blocks": list(decoder_blocks),
            "head_dim": head_dim,
            "groups": groups,
        }
        self.patch_size = patch_size
        self.size_multiple = patch_size * 2 ** (len(channels) - 1)
        time_dim = 4 * channels[0]
        self.time_dim = channels[0]
        self.checkpointing = False  # see set_checkpointing
        self.time = nn.Sequential(nn.Linear(channels[0], time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        self.enter = nn.Conv2d(in_channels * patch_size**2, channels[0], 3, padding=1)

        self.down = nn.ModuleList()
        for level, width in enumerate(channels):
            stage = nn.ModuleList(
                [ResidualBlock(width, time_dim, groups) for _ in range(encoder_blocks[level])]
            )
            if level == len(channels) - 1:
                stage.insert(len(stage) // 2, Attention(width, head_dim, groups))
            else:
                stage.append(nn.Conv2d(width, channels[level + 1], 2, stride=2))
            self.down.append(stage)

        self.up = nn.ModuleList()
        for level in reversed(range(len(channels) - 1)):
            width = channels[level]
            stage = nn.ModuleList(
                [nn.Conv2d(channels[level + 1], 4 * width, 1), nn.Conv2d(2 * width, width, 1)]
            )
            stage.extend(ResidualBlock(width, time_dim, groups) for _ in range(decoder_blocks[level]))
            self.up.append(stage)

        self.exit_norm = GroupNorm(groups, channels[0])
        self.exit = nn.Conv2d(channels[0], out_channels * patch_size**2, 3, padding=1)
        nn.init.zeros_(self.exit.weight)
        nn.init.zeros_(self.exit.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """x (B, in, H, W) and t (B,), or (1,) for all images, → (B, out, H, W)."""
        height, width = x.shape[-2:]
        emb = self._embed(t, x.dtype)
        *skips, h = self._encode(x, emb)
        for stage in self.up:
            upsample, fuse, *blocks = stage.children()
            h = _packed(F.pixel_shuffle(upsample(h), 2))
            h = fuse(torch.cat([h, skips.pop()], dim=1))
            for block in blocks:
                h = self._run_block(block, h, emb)
        h = self.exit(F.silu(self.exit_norm(h)))
        return F.pixel_shuffle(h, self.patch_size)[..., :height, :width]

    def encode(self, x: Tensor, t: Tensor) -> list[Tensor]:
        """The features of the way down, one tensor for each level."""
        return self._encode(x, self._embed(t, x.dtype))

    def _embed(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return F.silu(self.time(sinusoidal(t, self.time_dim).to(dtype)))

    def _encode(self, x: Tensor, emb: Tensor) -> list[Tensor]:
        x = pad_to_multiple(x, self.size_multiple)
        h = self.enter(_packed(F.pixel_unshuffle(x, self.patch_size)))  # (B, C, H/p, W/p)
        features = []
        for stage in self.down:
            for layer in stage.children():
                if isinstance(layer, nn.Conv2d):
                    features.append(h)
                    h = layer(h)
                else:
                    h = self._run_block(layer, h, emb)
        return [*features, h]

    def _run_block(self, block: nn.Module, h: Tensor, emb: Tensor) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, h, emb, use_reentrant=False)
        return block(h, emb)


class ResidualBlock(nn.Module):
    """GroupNorm, SiLU, convolution, twice; the time scales and shifts the second normalisation."""

    def __init__(self, width: int, time_dim: int, groups: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(groups, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time_dim, 2 * width)
        self.norm2 = GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.time(emb)[:, :, None, None].chunk(2, dim=1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h, 1 + scale, shift)))
        return x + h


class Attention(nn.Module):
    """Self-attention over the positions of the lowest level."""

    def __init__(self, width: int, head_dim: int, groups: int) -> None:
        super().__init__()
        self.heads = max(width // head_dim, 1)
        self.norm = GroupNorm(groups, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        batch, width, height, breadth = x.shape
        qkv = self.qkv(self.norm(x)).flatten(2).view(batch, 3, self.heads, width // self.heads, -1)
        q, k, v = qkv.transpose(-1, -2).unbind(1)  # each (B, heads, H·W, dim)
        h = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(batch, width, height, breadth)
        return x + self.out(h)


class GroupNorm(nn.GroupNorm):
    """nn.GroupNorm, and a scale and shift on top; written out where it is compiled.

    The compiler turns channels last into channels first for a GroupNorm, and every convolution after it turns
    that back. With sums over pixels, and one product and one sum for each channel, memory stays as it is.
    """

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling():
            h = super().forward(x)
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


def write_out_norms(module: nn.Module) -> nn.Module:
    """The module, about to be compiled, with all its normalisations of that kind."""
    for name, child in module.named_children():
        if type(child) is nn.GroupNorm:
            norm = GroupNorm(child.num_groups, child.num_channels, child.eps)
            norm.weight, norm.bias = child.weight, child.bias
            setattr(module, name, norm)
        else:
            write_out_norms(child)
    return module


def _packed(x: Tensor) -> Tensor:
    """Channels last again, where the compiler would leave pixels apart after they were moved about."""
    moved = torch.compiler.is_compiling() and x.is_cuda
    return x.contiguous(memory_format=torch.channels_last) if moved else x


def sinusoidal(t: Tensor, dim: int) -> Tensor:
    """The usual sine and cosine embedding of t (B,) → (B, dim), in float32."""
    half = dim // 2
    frequencies = torch.exp(
        -math.log(10000.0) * torch.arange(half, device=t.device, dtype=torch.float32) / half
    )
    angles = t.float()[:, None] * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Pad below and to the right by mirroring; by repeating the border where the picture is too small for that."""
    height, width = x.shape[-2:]
    down, right = -height % multiple, -width % multiple
    if not (down or right):
        return x
    mode = "reflect" if down < height and right < width else "replicate"
    return F.pad(x, (0, right, 0, down), mode=mode)


def run_unet(unet: nn.Module, x: Tensor, t: int | Tensor) -> Tensor:
    """Call either class of U-Net with an integer t or one per image."""
    times = t if isinstance(t, Tensor) else torch.full((1,), t, device=x.device)  # one for all images
    if isinstance(unet, CompactUNet):
        return unet(x, times)
    height, width = x.shape[-2:]
    out = unet(pad_to_multiple(x, unet_size_multiple(unet)), times)
    out = out if isinstance(out, Tensor) else out.sample
    return out[..., :height, :width]


def set_checkpointing(network: nn.Module, on: bool) -> None:
    """For the U-Nets in `network`: keep only the inputs of each block for a backward pass, and compute its
    inside again on the way back."""
    for module in network.modules():
        if isinstance(module, CompactUNet):
            module.checkpointing = on
        elif hasattr(module, "enable_gradient_checkpointing"):  # diffusers'
            (module.enable_gradient_checkpointing if on else module.disable_gradient_checkpointing)()  # type: ignore[operator]


def unet_size_multiple(unet: nn.Module) -> int:
    if hasattr(unet, "size_multiple"):
        return int(unet.size_multiple)  # type: ignore[arg-type]
    return 2 ** (len(unet.config["block_out_channels"]) - 1)  # type: ignore[index]


# ---------------------------------------------------------------------------------------------------------
# folders


def build_network(config: dict[str, Any]) -> nn.Module:
    """A network with fresh weights from its configuration; keys that begin with _ are remarks."""
    name = config.get("_class_name", "CompactUNet")
    settings = {k: v for k, v in config.items() if not k.startswith("_")}
    if name == "CompactUNet":
        unknown = set(settings) - set(CompactUNet().config if not settings else _compact_keys())
        if unknown:
            raise UserError(
                f"CompactUNet has no setting {sorted(unknown)}; it takes {sorted(_compact_keys())}"
            )
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        return CompactUNet(**arguments)
    if name == "UNet2DModel":
        from diffusers import UNet2DModel

        return UNet2DModel.from_config(settings)
    if name == "GuidedUNet":
        from ddc.guided import GuidedUNet

        return GuidedUNet(**settings)
    raise UserError(
        f"the network class {name!r} is not known; expected CompactUNet, UNet2DModel or GuidedUNet"
    )


def _compact_keys() -> set[str]:
    names = CompactUNet.__init__.__code__.co_varnames
    return set(names[1 : CompactUNet.__init__.__code__.co_argcount])


def network_config(network: nn.Module) -> dict[str, Any]:
    """The configuration that `build_network` takes."""
    return {"_class_name": type(network).__name__, **dict(network.config)}  # type: ignore[arg-type]


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    path = folder / name
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; a model is a folder with config.json and safetensors")
    if not path.is_file():
        raise UserError(f"{folder} has no {name}; a model is a folder with config.json and safetensors")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} should hold one JSON object")
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: one safetensors file, or the shards that its index names."""
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    single = folder / f"{WEIGHTS}.safetensors"
    if index.is_file():
        names = sorted(set(read_config(folder, index.name)["weight_map"].values()))
        paths = [folder / name for name in names]
    elif single.is_file():
        paths = [single]
    else:
        pickles = [p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".ckpt"}]
        hint = (
            f"; {pickles[0]} is a pickle, which is not opened: turn it into a folder with `ddc convert`"
            if pickles
            else ""
        )
        raise UserError(f"{folder} has no weights ({WEIGHTS}.safetensors){hint}")
    state: dict[str, Tensor] = {}
    for path in paths:
        try:
            state.update(load_file(path))
        except FileNotFoundError:
            raise UserError(f"{path} is missing; copy the model folder again, with all its shards") from None
        except SafetensorError as error:
            raise UserError(f"{path} is not a good safetensors file ({error}); copy it again") from None
    return state


def load_network(folder: str | Path, config: dict[str, Any] | None = None) -> nn.Module:
    """Read a network and its weights, in float32 and eval mode. A missing weight is an error."""
    folder = Path(folder)
    network = build_network(config if config is not None else read_config(folder))
    state = {name: tensor.float() for name, tensor in read_weights(folder).items()}
    expected = network.state_dict()
    wrong = [k for k in expected if k in state and state[k].shape != expected[k].shape]
    missing, extra = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or extra or wrong:
        raise UserError(
            f"the weights in {folder} do not fit its config.json: {len(missing)} missing, {len(extra)} unknown, "
            f"{len(wrong)} of another shape, for example {(missing + extra + wrong)[0]}"
        )
    network.load_state_dict(state)
    return network.eval().requires_grad_(False)


def save_network(
    network: nn.Module,
    folder: str | Path,
    *,
    extra_config: dict[str, Any] | None = None,
    state: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    shard_mb: float | None = None,
) -> None:
    """Write config.json and safetensors, in shards of at most `shard_mb` megabytes if given."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = network_config(network) | (extra_config or {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        k: v.detach().to("cpu", dtype if v.is_floating_point() else v.dtype).contiguous()
        for k, v in (state if state is not None else network.state_dict()).items()
    }
    for old in folder.glob(f"{WEIGHTS}*"):
        old.unlink()
    limit = float("inf") if shard_mb is None else shard_mb * 1e6
    shards: list[dict[str, Tensor]] = [{}]
    size = 0.0
    for name, tensor in tensors.items():
        n_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + n_bytes > limit:
            shards.append({})
            size = 0.0
        shards[-1][name] = tensor
        size += n_bytes
    if len(shards) == 1:
        save_file(shards[0], folder / f"{WEIGHTS}.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        name = f"{WEIGHTS}-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
