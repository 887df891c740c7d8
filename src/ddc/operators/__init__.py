"""Operators, one file for each degradation. A new operator needs its file and one line in `OPERATORS`."""

from ddc.operators.base import LinearOperator as LinearOperator
from ddc.operators.base import Operator
from ddc.operators.base import SVDOperator as SVDOperator
from ddc.operators.blur import GaussianBlur, KernelBlur
from ddc.operators.colorize import Colorize
from ddc.operators.custom import load_operator as load_operator
from ddc.operators.inpaint import Denoise, Inpaint
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
