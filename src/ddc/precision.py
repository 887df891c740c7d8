"""Which precision a network gets on a GPU: the fastest whose pictures agree with those of float32."""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddc.cuda import FastUNet
from ddc.errors import UserError
from ddc.fast import DType, rewrap
from ddc.fused import FAILURES, has_eight_bits
from ddc.images import to_unit
from ddc.networks import run_unet
from ddc.noise import Noise
from ddc.priors import DataConsistency, Prior
from ddc.problems import make_problem
from ddc.solvers.base import Run
from ddc.solvers.ddc import DDC
from ddc.solvers.references import Unconditional

logger = logging.getLogger("ddc")

AGREEMENT = {torch.float16: 50.0, torch.bfloat16: 40.0}  # dB against float32 that a precision must reach
EIGHT_BIT_AGREEMENT = 45.0  # the same for FP8, which is used only if asked for


def networks_in(
    dtype: DType,
    prior: Prior,
    network: DataConsistency | None,
    device: torch.device,
    size: int,
    compiling: bool,
    check: bool = True,
) -> tuple[Any, Any]:
    """The prior and the network in a precision; in float16 where float8 is wanted, but differs too much from float32 (`check`)."""
    if dtype == "float8":
        if not has_eight_bits(device) or compiling:
            needed = "a GPU of compute capability 9.0 or above, Triton and a C compiler, and does not go with --compile"
            raise UserError(f"float8 needs {needed}; use float16")
        found = _in_eight_bits(prior, network, device, size, check)
        if found is not None:
            return found
        dtype = "float16"
    chosen = choose_dtype(prior, network, device, size) if dtype == "auto" else getattr(torch, dtype)
    return rewrap(prior, network, partial(FastUNet, device=device, dtype=chosen, size=size))


def _in_eight_bits(
    prior: Prior, network: DataConsistency | None, device: torch.device, size: int, check: bool
) -> tuple[Any, Any] | None:
    """The prior and the network in FP8; None, with a message, if their pictures differ too much from those of float32."""
    make = partial(FastUNet, device=device, size=size)
    fast = rewrap(prior, network, partial(make, dtype=torch.float16, eight_bits=True))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        truth = probe(*rewrap(prior, network, make), device, size)
    reached = agreement(probe(*fast, device, size), truth)  # which also chooses the scales
    if (check and reached < EIGHT_BIT_AGREEMENT) or FAILURES:
        logger.warning(
            "float16 is used instead of float8, whose pictures agree with float32 to %.1f dB (%.0f are needed)",
            reached,
            EIGHT_BIT_AGREEMENT,
        )
        return None
    logger.warning("float8: pictures agree with those of float32 to %.1f dB", reached)
    return fast


def choose_dtype(prior: Prior, network: DataConsistency | None, device: torch.device, size: int = 256) -> torch.dtype:
    """The fastest precision whose pictures agree with float32's: float16, else bfloat16, else float32."""

    def picture(dtype: torch.dtype) -> Tensor:
        make = partial(FastUNet, device=device, dtype=dtype, size=size)
        return probe(*rewrap(prior, network, make), device, size)

    return _fastest(picture)


def _fastest(picture: Callable[[torch.dtype], Tensor]) -> torch.dtype:
    """The fastest precision in which a picture agrees with that in float32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        truth = picture(torch.float32)
    for dtype, wanted in AGREEMENT.items():
        reached = agreement(picture(dtype), truth)
        logger.info("%s agrees with float32 to %.1f dB, of %.0f that it needs", dtype, reached, wanted)
        if reached >= wanted:
            return dtype
    return torch.float32


@torch.no_grad()
def unet_dtype(unet: nn.Module, device: torch.device, size: int) -> torch.dtype:
    """The same for a U-Net by itself, by its result for made-up inputs."""
    soft = Noise([0], device=device).normal((1, int(unet.config["in_channels"]), 8, 8))  # type: ignore[index]
    x = F.interpolate(soft, size=(size, size), mode="bicubic").clamp(-1, 1)
    return _fastest(lambda dtype: run_unet(FastUNet(unet, device, dtype, size), x, 500))


@torch.no_grad()
def probe(prior: Prior, network: DataConsistency | None, device: torch.device, size: int) -> Tensor:
    """The picture of a short run on a made-up measurement, to compare precisions with."""
    noise = Noise([0], device=device)
    soft = F.interpolate(noise.normal((1, 3, 8, 8)), size=(size, size), mode="bicubic").clamp(-1, 1)
    problem = make_problem("denoise", 0.05)
    if network is None:
        return Unconditional(steps=5).solve(Run(soft, problem, prior, noise))
    return DDC().solve(Run(soft, problem, prior, noise, network=network))


def agreement(a: Tensor, b: Tensor) -> float:
    """PSNR in dB between two pictures in [-1, 1]; NaN counts as no agreement."""
    error = float((to_unit(a.float()) - to_unit(b.float())).square().mean())
    return 10 * math.log10(1 / max(error, 1e-20)) if math.isfinite(error) else -math.inf
