"""The algorithms, by name: the paper's comparison in its order, then what it discusses, then references."""

from ddc.solvers.base import Solver, make_solver
from ddc.solvers.cddb import CDDB
from ddc.solvers.ddc import DDC
from ddc.solvers.ddnm import DDNM
from ddc.solvers.ddrm import DDRM
from ddc.solvers.dds import DDS
from ddc.solvers.diffpir import DiffPIR
from ddc.solvers.dps import DPS
from ddc.solvers.i2sb import I2SB
from ddc.solvers.mcg import MCG
from ddc.solvers.pigdm import PiGDM
from ddc.solvers.pinv import PseudoInverse
from ddc.solvers.pnp_admm import PnPADMM
from ddc.solvers.posterior import Posterior
from ddc.solvers.reddiff import REDdiff
from ddc.solvers.unconditional import Unconditional

SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver
    for solver in (
        DDC,
        DPS,
        DDNM,
        DDRM,
        PiGDM,
        REDdiff,
        PnPADMM,
        CDDB,
        I2SB,
        MCG,
        DDS,
        DiffPIR,
        Posterior,
        Unconditional,
        PseudoInverse,
    )
}

__all__ = ["SOLVERS", "Solver", "make_solver"]
