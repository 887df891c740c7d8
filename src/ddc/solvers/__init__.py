"""The algorithms, by name: the paper's comparison in its order, then what it discusses, then references."""

from ddc.solvers.base import Solver, make_solver
from ddc.solvers.bridge import CDDB, I2SB
from ddc.solvers.ddc import DDC, OnePass
from ddc.solvers.ddnm import DDNM
from ddc.solvers.ddrm import DDRM
from ddc.solvers.dds import DDS
from ddc.solvers.diffpir import DiffPIR
from ddc.solvers.gradients import DPS, MCG, PiGDM
from ddc.solvers.latent import HGU, PSLD, Reconstruction, ReSample
from ddc.solvers.pnp_admm import PnPADMM
from ddc.solvers.posterior import Posterior
from ddc.solvers.reddiff import REDdiff
from ddc.solvers.references import PseudoInverse, Unconditional

SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver
    for solver in (
        DDC,
        OnePass,
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
        PSLD,
        ReSample,
        HGU,
        Unconditional,
        PseudoInverse,
        Reconstruction,
    )
}

__all__ = ["SOLVERS", "Solver", "make_solver"]
