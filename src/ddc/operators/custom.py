"""Your own operator: a Python class in a file, named as `path/to/my_op.py:MyOp`.

The class derives from `ddc.operators.Operator` (or `LinearOperator`, `SVDOperator`) and takes no arguments. Loading
runs the file, as importing it would.
"""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.operators.base import LinearOperator, Operator, Size, size_of


def load_operator(spec: str, size: Size | None = None) -> Operator:
    """Returns the operator that `spec` names, after a test on an image of the given size (default 64×64)."""
    file, _, name = str(spec).rpartition(":")
    if not file or not name.isidentifier():
        raise UserError(f"the operator {spec!r} is not of the form file.py:Class; give for example my_op.py:MyOp")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"operator {spec}: there is no file {path}; give the path of a Python file")
    module_spec = importlib.util.spec_from_file_location(f"ddc_custom_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"operator {spec}: {path.name} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"operator {spec}: {path.name} does not run ({_line(error)}); correct the file") from error
    operators = {key: one for key, one in vars(module).items() if isinstance(one, type) and issubclass(one, Operator)}
    if name not in operators:
        own = [key for key, one in operators.items() if one.__module__ == module.__name__]
        raise UserError(
            f"operator {spec}: {path.name} has no class {name} derived from ddc.operators.Operator; "
            f"it has {', '.join(own) or 'none'}"
        )
    try:
        operator: Operator = operators[name]()
    except TypeError as error:
        raise UserError(f"operator {spec}: {name}() cannot be made without arguments ({_line(error)})") from error
    check_operator(operator, size or (64, 64))
    return operator


def check_operator(operator: Operator, size: Size) -> None:
    """Raises an error unless y is a finite 4-D batch, `to_image` returns image size, and an adjoint is correct."""
    name = type(operator).__name__
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    try:
        y = operator(x)
        if not isinstance(y, Tensor) or y.ndim != 4 or y.shape[0] != 2:
            shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise UserError(f"{name} returned {shape} for x of {tuple(x.shape)}; expected a batch (2, C, h, w)")
        if not bool(y.isfinite().all()):
            raise UserError(f"{name} returned NaN or infinity for an image in [-1, 1]; check divisions and roots")
        shape = tuple(operator.to_image(y, size).shape)
        if shape[-2:] != tuple(size):
            raise UserError(
                f"{name}.to_image returned the shape {shape} for an image of {tuple(size)}; "
                "override it (and `scale`) so that it returns y at image size"
            )
        if isinstance(operator, LinearOperator):
            check_adjoint(operator, x)
    except UserError:
        raise
    except Exception as error:
        failed = f"{name} failed on a batch of shape {tuple(x.shape)}: {_line(error)}"
        raise UserError(f"{failed}; it must take any (B, 3, H, W) tensor") from error


def check_adjoint(operator: LinearOperator, x: Tensor, tolerance: float = 1e-3) -> None:
    """Raises an error unless A is linear and ⟨A x, y⟩ equals ⟨x, Aᵀ y⟩ for images shaped like x."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator).to(x.device, x.dtype)

    name = type(operator).__name__
    u, v = normal(x.shape), normal(x.shape)
    au, av = operator(u), operator(v)
    deviation = (operator(u + 2 * v) - au - 2 * av).norm() / (au.norm() + av.norm()).clamp(min=1e-12)
    if not deviation <= tolerance:
        raise UserError(
            f"{name} is not linear: A(u + 2v) differs from A(u) + 2A(v) by {float(deviation):.1e} of its size; "
            "derive it from Operator instead of LinearOperator, or remove the offset or clipping"
        )
    y = normal(au.shape)
    back = operator.adjoint(y, size_of(x))
    if back.shape != x.shape:
        raise UserError(f"{name}.adjoint returned the shape {tuple(back.shape)}; A took {tuple(x.shape)}")
    left, right = float((au * y).sum()), float((u * back).sum())
    if not abs(left - right) <= tolerance * max(float(au.norm() * y.norm()), 1e-12):
        raise UserError(
            f"{name}.adjoint is not the adjoint of its forward: ⟨Ax, y⟩ = {left:.6g} but "
            f"⟨x, Aᵀy⟩ = {right:.6g}; check flips, strides and border handling"
        )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
