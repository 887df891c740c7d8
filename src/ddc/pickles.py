"""Opens pickles, which other modules never do. Only tensors and numpy arrays are admitted."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddc.errors import UserError

State = dict[str, Tensor]


def read_checkpoint(path: Path) -> State:
    """The tensors of a PyTorch checkpoint, in float32; a file with other objects is refused."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, UnicodeDecodeError):
        raise UserError(
            f"{path} is not a PyTorch checkpoint of plain tensors (damaged, or holding other objects); "
            "download it again or save its state_dict alone"
        ) from None
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise UserError(f"{path} does not hold a state dict (names and tensors); save the model's state_dict alone")
    return {str(name): tensor.float() for name, tensor in loaded.items()}


def read_torchscript(content: bytes) -> State:
    """The tensors of a TorchScript module, whose code is not run."""
    state: State = torch.jit.load(io.BytesIO(content), map_location="cpu").state_dict()
    return state


class _ArrayUnpickler(pickle.Unpickler):
    """Admits what numpy arrays of numbers are pickled with, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.zeros(0).__reduce__()[0]  # this function has moved between numpy's versions
        raise UserError(f"the pickle contains {module}.{name}; expected numpy arrays alone")


def unpickle_arrays(content: bytes) -> dict[str, Any]:
    """The nested dictionary of numpy arrays in a pickle; one that holds other classes is refused."""
    try:
        tree: dict[str, Any] = _ArrayUnpickler(io.BytesIO(content)).load()
    except UserError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise UserError(f"the pickle is broken ({error}); download it again") from None
    return tree
