"""Deep Data Consistency: restore images with diffusion models.

from ddc import restore
restore("bad.jpg").picture.write("better.png")
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ddc.pipeline": ("RestorationPipeline", "RestorationResult", "restore"),
    "ddc.images": ("Picture",),
    "ddc.problems": ("Problem", "Task", "make_problem"),
    "ddc.operators": (
        *("Operator", "LinearOperator", "SVDOperator", "Bicubic", "AveragePool", "GaussianBlur", "KernelBlur"),
        *("Inpaint", "JPEG", "Denoise", "Colorize"),
    ),
    "ddc.priors": ("Prior",),
    "ddc.solvers": ("SOLVERS", "make_solver"),
    "ddc.errors": ("UserError",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from ddc.errors import UserError as UserError
    from ddc.images import Picture as Picture
    from ddc.operators import JPEG as JPEG
    from ddc.operators import AveragePool as AveragePool
    from ddc.operators import Bicubic as Bicubic
    from ddc.operators import Colorize as Colorize
    from ddc.operators import Denoise as Denoise
    from ddc.operators import GaussianBlur as GaussianBlur
    from ddc.operators import Inpaint as Inpaint
    from ddc.operators import KernelBlur as KernelBlur
    from ddc.operators import LinearOperator as LinearOperator
    from ddc.operators import Operator as Operator
    from ddc.operators import SVDOperator as SVDOperator
    from ddc.pipeline import RestorationPipeline as RestorationPipeline
    from ddc.pipeline import RestorationResult as RestorationResult
    from ddc.pipeline import restore as restore
    from ddc.priors import Prior as Prior
    from ddc.problems import Problem as Problem
    from ddc.problems import Task as Task
    from ddc.problems import make_problem as make_problem
    from ddc.solvers import SOLVERS as SOLVERS
    from ddc.solvers import make_solver as make_solver


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import ddc` and the command line start quickly."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ddc' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME_OF]
