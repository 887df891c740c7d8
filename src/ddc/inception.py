"""Inception-v3 (Szegedy et al., 1512.00567) as FID uses it: the 2,048 features before the classifier.

The weights are those of the TensorFlow network of 2015. They are downloaded, or read from the file that
PyTorch's FID packages share, pt_inception-2015-12-05-6726825d.pth. That network differs from the classifier in
its poolings: averages exclude the padding, and the last block takes a maximum.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.images import to_internal
from ddc.pickles import State, read_checkpoint, read_torchscript

Kernel = int | tuple[int, int]


class Conv(nn.Module):
    """Convolution, batch normalisation, ReLU; without padding if the stride is 2."""

    def __init__(self, ins: int, outs: int, kernel: Kernel, stride: int = 1, pad: bool = True) -> None:
        super().__init__()
        padding = "same" if pad and stride == 1 else 0
        self.conv = nn.Conv2d(ins, outs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Block(nn.Module):
    """Chains of convolutions side by side; "branch_pool" works on the pooled x. A pair splits its chain in two."""

    def __init__(self, pool: Callable[[Tensor], Tensor], **chains: Sequence[Conv | tuple[Conv, Conv]]) -> None:
        super().__init__()
        self.pool, self.chains = pool, chains
        for chain, steps in chains.items():
            for i, step in enumerate(steps, 1):
                name = f"{chain}_{i}" if len(steps) > 1 else chain
                convs = {name: step} if isinstance(step, Conv) else {f"{name}a": step[0], f"{name}b": step[1]}
                for part, conv in convs.items():
                    self.add_module(part, conv)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for chain, steps in self.chains.items():
            y = self.pool(x) if chain == "branch_pool" else x
            for step in steps:
                y = step(y) if isinstance(step, Conv) else torch.cat([conv(y) for conv in step], 1)
            outputs.append(y)
        return torch.cat(outputs if "branch_pool" in self.chains else [*outputs, self.pool(x)], 1)


average = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
maximum = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
halve = partial(F.max_pool2d, kernel_size=3, stride=2)


def block_a(ins: int, pooled: int) -> Block:
    """35×35."""
    return Block(
        average,
        branch1x1=[Conv(ins, 64, 1)],
        branch5x5=[Conv(ins, 48, 1), Conv(48, 64, 5)],
        branch3x3dbl=[Conv(ins, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3)],
        branch_pool=[Conv(ins, pooled, 1)],
    )


def block_b() -> Block:
    """35×35 → 17×17."""
    double = [Conv(288, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3, stride=2)]
    return Block(halve, branch3x3=[Conv(288, 384, 3, stride=2)], branch3x3dbl=double)


def block_c(c: int) -> Block:
    """17×17, with 7×7 convolutions factored into 1×7 and 7×1."""
    wide, tall = (1, 7), (7, 1)
    double = [Conv(768, c, 1), Conv(c, c, tall), Conv(c, c, wide), Conv(c, c, tall), Conv(c, 192, wide)]
    return Block(
        average,
        branch1x1=[Conv(768, 192, 1)],
        branch7x7=[Conv(768, c, 1), Conv(c, c, wide), Conv(c, 192, tall)],
        branch7x7dbl=double,
        branch_pool=[Conv(768, 192, 1)],
    )


def block_d() -> Block:
    """17×17 → 8×8."""
    seven = [Conv(768, 192, 1), Conv(192, 192, (1, 7)), Conv(192, 192, (7, 1)), Conv(192, 192, 3, stride=2)]
    return Block(halve, branch3x3=[Conv(768, 192, 1), Conv(192, 320, 3, stride=2)], branch7x7x3=seven)


def block_e(ins: int, pool: Callable[[Tensor], Tensor]) -> Block:
    """8×8, with 3×3 convolutions split into 1×3 and 3×1."""
    three, double = ((Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1))) for _ in range(2))
    return Block(
        pool,
        branch1x1=[Conv(ins, 320, 1)],
        branch3x3=[Conv(ins, 384, 1), three],
        branch3x3dbl=[Conv(ins, 448, 1), Conv(448, 384, 3), double],
        branch_pool=[Conv(ins, 192, 1)],
    )


class Inception(nn.Module):
    """(B, 3, H, W) in [0, 1] → (B, 2048). Its convolutions have the order of the TensorFlow graph."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3, self.Conv2d_2a_3x3 = Conv(3, 32, 3, stride=2), Conv(32, 32, 3, pad=False)
        self.Conv2d_2b_3x3, self.Conv2d_3b_1x1 = Conv(32, 64, 3), Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3, pad=False)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = block_a(192, 32), block_a(256, 64), block_a(288, 64)
        self.Mixed_6a, self.Mixed_6b, self.Mixed_6c = block_b(), block_c(128), block_c(160)
        self.Mixed_6d, self.Mixed_6e, self.Mixed_7a = block_c(160), block_c(192), block_d()
        self.Mixed_7b, self.Mixed_7c = block_e(1280, average), block_e(2048, maximum)

    def forward(self, x: Tensor) -> Tensor:
        x = to_internal(F.interpolate(x, size=(299, 299), mode="bilinear", align_corners=False))
        x = halve(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))
        x = halve(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        return self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))).mean((2, 3))

    @staticmethod
    def from_file(path: Path) -> "Inception":
        """Read the weights' file; the classifier in it is ignored."""
        network = Inception()
        try:
            state = load_file(path) if path.suffix == ".safetensors" else read_checkpoint(path)
            network.load_state_dict({k: v for k, v in state.items() if not k.startswith(("fc.", "AuxLogits."))})
        except (UserError, SafetensorError, RuntimeError):
            raise UserError(
                f"{path} does not hold FID's Inception weights; expected the file pt_inception-2015-12-05-6726825d.pth"
            ) from None
        return network.eval().requires_grad_(False)


def convert_inception(content: bytes) -> State:
    """The weights of `Inception` from a TorchScript module, whose layers carry the names of the TensorFlow graph."""
    tensors = read_torchscript(content)
    theirs = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    with torch.device("meta"):
        ours = [name for name, module in Inception().named_modules() if isinstance(module, Conv)]
    names = {"conv.weight": "weight", "bn.bias": "beta", "bn.running_mean": "mean", "bn.running_var": "var"}
    state: State = {}
    for new, old in zip(ours, theirs, strict=True):
        state |= {f"{new}.{a}": tensors[f"{old}.{b}"].detach().clone() for a, b in names.items()}
        state[f"{new}.bn.weight"] = torch.ones_like(tensors[f"{old}.beta"])  # the graph has no γ
    return state
