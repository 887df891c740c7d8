"""One file for each degradation. An operator is added by its file and one line in `OPERATORS`."""

from ddc.operators.base import LinearOperator, Operator, SVDOperator
from ddc.operators.blur import GaussianBlur, KernelBlur
from ddc.operators.colorize import Colorize
from ddc.operators.custom import load_operator
from ddc.operators.denoise import Denoise
from ddc.operators.inpaint import Inpaint
from ddc.operators.jpeg import JPEG
from ddc.operators.superres import AveragePool, Bicubic

OPERATORS: dict[str, type[Operator]] = {
    "bicubic": Bicubic,
    "average-pool": AveragePool,
    "gaussian-blur": GaussianBlur,
    "kernel-blur": KernelBlur,
    "inpaint": Inpaint,
    "jpeg": JPEG,
    "denoise": Denoise,
    "colorize": Colorize,
}

__all__ = [
    "JPEG",
    "OPERATORS",
    "AveragePool",
    "Bicubic",
    "Colorize",
    "Denoise",
    "GaussianBlur",
    "Inpaint",
    "KernelBlur",
    "LinearOperator",
    "Operator",
    "SVDOperator",
    "load_operator",
]
