"""What each kind of training minimises. The loop is the same for all of them.

An objective owns the module that is trained, draws its own batches, and returns named loss terms.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddc.perceptual import LPIPS
from ddc.training.data import Draws
from ddc.training.settings import LoopSettings

Losses = dict[str, Tensor]
Forward = Callable[..., Tensor]


class Objective(ABC):
    """The loss of one kind of training."""

    settings: LoopSettings
    module: nn.Module  # what is trained
    model: Any  # the model that it is a part of, with from_pretrained and save_pretrained
    folder: str = "model"  # of the exported model, in the run's folder
    lpips: LPIPS | None = None

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Any) -> "Objective":
        """The objective of a run, with a new network or that of `settings.init`."""

    @abstractmethod
    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        """The terms of one batch; "loss" is the one that is minimised. `forward` is the wrapped module."""

    def remarks(self) -> dict[str, Any]:
        """What the configuration of the exported model states beside what `model` needs."""
        return {}

    def prepare(self, device: torch.device) -> None:
        """Move what is used beside `module` and `lpips` to the device."""

    def frozen(self) -> dict[str, nn.Module]:
        """Networks that must be the same when a run is resumed, by their names."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What else a checkpoint must hold; the first dimension is the batch."""
        return {}

    def restore(self, tensors: dict[str, Tensor], draws: Draws) -> None:
        """Load `tensors()` of a checkpoint."""

    def describe_batch(self) -> str:
        """A description of the last batch, for the message when a loss is not finite."""
        return ""

    @abstractmethod
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """Metrics of validation pictures, one number for each picture."""

    @abstractmethod
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """Examples: for each picture a row (k, 3, H, W), from the truth to the result."""


def call(forward: Forward, x: Tensor, t: Tensor) -> Tensor:
    """The output of a U-Net, which may be wrapped."""
    out = forward(x, t)
    return out if isinstance(out, Tensor) else out.sample


def figures_of(name: str, x: Tensor, truth: Tensor, lpips: LPIPS | None) -> dict[str, list[float]]:
    """PSNR and LPIPS of each picture in [-1, 1]."""
    mse = ((x.clamp(-1, 1) - truth) / 2).square().mean(dim=(1, 2, 3))
    figures = {f"{name}/psnr": (-10 * mse.log10()).tolist()}
    if lpips is not None:
        with torch.autocast(x.device.type, enabled=False):
            figures[f"{name}/lpips"] = lpips(x, truth).tolist()
    return figures
