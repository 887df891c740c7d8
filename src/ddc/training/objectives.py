"""What each kind of training minimises. The loop is the same for all of them.

An objective owns the module that is trained, draws its own batches, and returns named loss terms.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddc.training.data import Draws

Losses = dict[str, Tensor]
Forward = Callable[[Tensor, Tensor], Tensor]


class Objective(ABC):
    """The loss of one kind of training."""

    module: nn.Module  # what is trained

    @abstractmethod
    def losses(self, forward: Forward, draws: Draws, batch: int, step: int) -> Losses:
        """The terms of one batch, "loss" (what is minimised) among them. `forward` is the wrapped module."""

    @abstractmethod
    def save(self, folder: Path, state: dict[str, Tensor], **options: Any) -> None:
        """Write an inference model with the given weights of `module`."""

    def tensors(self) -> dict[str, Tensor]:
        """What else must survive a checkpoint."""
        return {}

    def restore(self, tensors: dict[str, Tensor], draws: Draws) -> None:
        """Put `tensors()` back."""

    def describe_batch(self) -> str:
        """What the last batch was, for the message when a loss is not finite."""
        return ""

    @abstractmethod
    def validate(self, crops: Tensor, names: list[str]) -> dict[str, list[float]]:
        """Figures for held-out pictures, one number per picture and figure."""


def call(forward: Forward, x: Tensor, t: Tensor) -> Tensor:
    """The raw output of a (possibly wrapped) U-Net."""
    out = forward(x, t)
    return out if isinstance(out, Tensor) else out.sample
