"""Inception-v3 (Szegedy et al., 1512.00567) as FID uses it: the 2,048 features before the classifier.

The weights are the 2015 TensorFlow ones in the file that PyTorch's FID packages share,
pt_inception-2015-12-05-6726825d.pth. That network differs from the classifier in its poolings: averages leave
the padding out, and the last block takes a maximum.
"""

import os
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.images import to_internal

FILE = "pt_inception-2015-12-05-6726825d.pth"
Kernel = int | tuple[int, int]


class Conv(nn.Module):
    """Convolution, batch normalisation, ReLU."""

    def __init__(self, ins: int, outs: int, kernel: Kernel, stride: int = 1, padding: Kernel = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(ins, outs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class BlockA(nn.Module):
    """35×35: 1×1, 5×5, two 3×3, and a pool, side by side."""

    def __init__(self, ins: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(ins, 64, 1)
        self.branch5x5_1, self.branch5x5_2 = Conv(ins, 48, 1), Conv(48, 64, 5, padding=2)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Conv(ins, 64, 1), Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, padding=1)
        self.branch_pool = Conv(ins, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        five = self.branch5x5_2(self.branch5x5_1(x))
        return torch.cat([self.branch1x1(x), five, double, self.branch_pool(average(x))], 1)


class BlockB(nn.Module):
    """35×35 → 17×17."""

    def __init__(self, ins: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(ins, 384, 3, stride=2)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Conv(ins, 64, 1), Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, 2)], 1)


class BlockC(nn.Module):
    """17×17, with 7×7 convolutions taken apart into 1×7 and 7×1."""

    def __init__(self, c: int) -> None:
        super().__init__()

        def wide(outs: int) -> Conv:
            return Conv(c, outs, (1, 7), padding=(0, 3))

        def tall(outs: int) -> Conv:
            return Conv(c, outs, (7, 1), padding=(3, 0))

        self.branch1x1, self.branch_pool = Conv(768, 192, 1), Conv(768, 192, 1)
        self.branch7x7_1, self.branch7x7_2, self.branch7x7_3 = Conv(768, c, 1), wide(c), tall(192)
        self.branch7x7dbl_1, self.branch7x7dbl_2, self.branch7x7dbl_3 = Conv(768, c, 1), tall(c), wide(c)
        self.branch7x7dbl_4, self.branch7x7dbl_5 = tall(c), wide(192)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), seven, double, self.branch_pool(average(x))], 1)


class BlockD(nn.Module):
    """17×17 → 8×8."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3_1, self.branch3x3_2 = Conv(768, 192, 1), Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1, self.branch7x7x3_2 = Conv(768, 192, 1), Conv(192, 192, (1, 7), padding=(0, 3))
        self.branch7x7x3_3 = Conv(192, 192, (7, 1), padding=(3, 0))
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        return torch.cat(
            [self.branch3x3_2(self.branch3x3_1(x)), self.branch7x7x3_4(seven), F.max_pool2d(x, 3, 2)], 1
        )


class BlockE(nn.Module):
    """8×8, with 3×3 convolutions widened into 1×3 beside 3×1."""

    def __init__(self, ins: int, last: bool = False) -> None:
        super().__init__()
        self.last = last
        self.branch1x1, self.branch_pool = Conv(ins, 320, 1), Conv(ins, 192, 1)
        self.branch3x3_1, self.branch3x3_2a = Conv(ins, 384, 1), Conv(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3_2b = Conv(384, 384, (3, 1), padding=(1, 0))
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Conv(ins, 448, 1), Conv(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = Conv(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = Conv(384, 384, (3, 1), padding=(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.last else average(x)
        three = torch.cat([self.branch3x3_2a(three), self.branch3x3_2b(three)], 1)
        double = torch.cat([self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double)], 1)
        return torch.cat([self.branch1x1(x), three, double, self.branch_pool(pooled)], 1)


class Inception(nn.Module):
    """(B, 3, H, W) in [0, 1] → (B, 2048)."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3, self.Conv2d_2a_3x3 = Conv(3, 32, 3, stride=2), Conv(32, 32, 3)
        self.Conv2d_2b_3x3, self.Conv2d_3b_1x1 = Conv(32, 64, 3, padding=1), Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = BlockA(192, 32), BlockA(256, 64), BlockA(288, 64)
        self.Mixed_6a, self.Mixed_6b, self.Mixed_6c = BlockB(288), BlockC(128), BlockC(160)
        self.Mixed_6d, self.Mixed_6e, self.Mixed_7a = BlockC(160), BlockC(192), BlockD()
        self.Mixed_7b, self.Mixed_7c = BlockE(1280), BlockE(2048, last=True)

    def forward(self, x: Tensor) -> Tensor:
        x = to_internal(F.interpolate(x, size=(299, 299), mode="bilinear", align_corners=False))
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, 2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        return self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))).mean((2, 3))

    @staticmethod
    def from_file(path: Path) -> "Inception":
        """Read the weights' file; the classifier in it is passed over."""
        network = Inception()
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            network.load_state_dict(
                {k: v for k, v in state.items() if not k.startswith(("fc.", "AuxLogits."))}
            )
        except (RuntimeError, pickle.UnpicklingError, AttributeError, OSError, EOFError):
            raise UserError(
                f"{path} does not hold FID's Inception weights; expected the file {FILE}"
            ) from None
        return network.eval().requires_grad_(False)


def find_inception(given: Path | None = None) -> Path | None:
    """The weights' file: the one given, else in our cache, else where torch hub keeps its downloads."""
    if given is not None:
        if not given.is_file():
            raise UserError(f"{given} is not a file; expected FID's Inception weights ({FILE})")
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddc"
    places = [cache / FILE, Path(torch.hub.get_dir()) / "checkpoints" / FILE]
    return next((path for path in places if path.is_file()), None)
