"""Weights of 8 bits: matrices and kernels as int8, with a scale for each output channel."""

from pathlib import Path

import torch
from torch import Tensor

from ddc.errors import UserError

SCALE = ".scale"  # after the name of the weights: that of their scales
SMALL = 1 << 16  # numbers: weights with fewer, such as those of the first and last layers, keep their bits


def to_8_bits(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights, of which large matrices and kernels have 8 bits. Errors of small ones would reach every pixel."""
    stored = dict(state)
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() >= SMALL:
            wide = tensor.detach().float()
            scale = (wide.flatten(1).abs().amax(1) / 127).clamp(min=1e-12)
            stored[name + SCALE] = scale
            stored[name] = (wide / _broad(scale, wide)).round().to(torch.int8)
    return stored


def from_8_bits(stored: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """The weights as they were before `to_8_bits`, nearly."""
    state = dict(stored)
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            scale = state.pop(name + SCALE, None)
            if scale is None or scale.shape != tensor.shape[:1]:
                raise UserError(f"the 8-bit weights {name[:100]} in {source} have no scales; copy the folder again")
            state[name] = tensor * _broad(scale.float(), tensor)
    return state


def _broad(scale: Tensor, like: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (like.dim() - 1))
