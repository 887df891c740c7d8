"""A person's own operator: a plain Python class in a file, named as `path/to/my_op.py:MyOp`.

The class derives from `ddc.operators.Operator` (or `LinearOperator`, `SVDOperator`) and is made without
arguments. Loading runs the file, as importing it would.
"""

import importlib.util
from pathlib import Path

import torch

from ddc.errors import UserError
from ddc.operators.base import LinearOperator, Operator, Size, check_adjoint


def load_operator(spec: str, size: Size | None = None) -> Operator:
    """The operator that `spec` names, tried once on a picture of the given size (default 64×64)."""
    file, colon, name = str(spec).rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UserError(
            f"the operator {spec!r} is not of the form file.py:Class; give for example my_op.py:MyOp"
        )
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
        raise UserError(
            f"operator {spec}: {path.name} does not run ({_line(error)}); mend the file"
        ) from error
    made = getattr(module, name, None)
    if not (isinstance(made, type) and issubclass(made, Operator)):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Operator) and value.__module__ == module.__name__
        ]
        raise UserError(
            f"operator {spec}: {path.name} has no class {name} derived from ddc.operators.Operator; "
            f"it has {', '.join(classes) or 'none at all'}"
        )
    try:
        operator = made()
    except TypeError as error:
        raise UserError(
            f"operator {spec}: {name}() cannot be made without arguments ({_line(error)})"
        ) from error
    check_operator(operator, size or (64, 64))
    return operator


def check_operator(operator: Operator, size: Size) -> None:
    """Try the operator: y must be a finite 4-D batch that returns to image size, and an adjoint must be one."""
    name = type(operator).__name__
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, *size, generator=generator) * 2 - 1
    try:
        y = operator(x)
        if not isinstance(y, torch.Tensor) or y.ndim != 4 or y.shape[0] != 2:
            shape = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise UserError(
                f"{name} returned {shape} for x of {tuple(x.shape)}; expected a batch (2, C, h, w)"
            )
        if not bool(y.isfinite().all()):
            raise UserError(
                f"{name} returned NaN or infinity for a picture in [-1, 1]; check divisions and roots"
            )
        back = operator.to_image(y, size)
        if back.shape[-2:] != x.shape[-2:]:
            raise UserError(
                f"{name}.to_image returned the shape {tuple(back.shape)} for a picture of {tuple(size)}; "
                "override it (and `scale`) so that y comes back at image size"
            )
        if isinstance(operator, LinearOperator):
            check_adjoint(operator, x)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name} failed on a batch of shape {tuple(x.shape)}: {_line(error)}; "
            "it must take any (B, 3, H, W) tensor"
        ) from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
