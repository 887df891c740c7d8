"""What each kind of training minimises. The loop is the same for all of them.

An objective owns the module that is trained, draws its own batches, and returns named loss terms.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddc.perceptual import LPIPS
from ddc.training.data import Draws

Losses = dict[str, Tensor]
Forward = Callable[..., Tensor]


class Objective(ABC):
    """The loss of one kind of training."""

    module: nn.Module  # what is trained
    folder: str = "model"  # where in the run's folder the inference model is written

    @abstractmethod
    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        """The terms of one batch, "loss" (what is minimised) among them. `forward` is the wrapped module."""

    @abstractmethod
    def save(self, folder: Path, state: dict[str, Tensor], **options: Any) -> None:
        """Write an inference model with the given weights of `module`."""

    @abstractmethod
    def model_record(self) -> dict[str, Any]:
        """What `ddc.training.export` needs to write that model from a checkpoint alone."""

    def prepare(self, device: torch.device) -> None:
        """Bring what is used beside `module` to the device."""

    def identity(self) -> dict[str, str]:
        """What must be the same when a run is resumed, beside its settings."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What else must survive a checkpoint; the first dimension is the batch."""
        return {}

    def restore(self, tensors: dict[str, Tensor], draws: Draws) -> None:
        """Put `tensors()` back."""

    def describe_batch(self) -> str:
        """What the last batch was, for the message when a loss is not finite."""
        return ""

    @abstractmethod
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """Figures for held-out pictures, one number per picture and figure."""

    @abstractmethod
    def pictures(self, crops: Tensor, names: list[str]) -> list[Tensor]:
        """What to look at: for each picture a row (k, 3, H, W), from truth to result."""


def call(forward: Forward, x: Tensor, t: Tensor) -> Tensor:
    """The raw output of a (possibly wrapped) U-Net."""
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


def fingerprint(module: nn.Module) -> str:
    """A short hash of the beginning of every tensor: enough to tell one trained network from another."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]
