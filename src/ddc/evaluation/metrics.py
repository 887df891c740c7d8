"""Metrics of restored pictures, which are (B, 3, H, W) in [0, 1] unless stated otherwise."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddc.errors import UserError
from ddc.images import to_internal
from ddc.perceptual import LPIPS
from ddc.problems import Problem

Array = np.ndarray[Any, np.dtype[Any]]


def psnr(x: Tensor, truth: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, (B,); infinite for equal pictures."""
    error = ((x.double() - truth.double()) ** 2).mean((1, 2, 3))
    return -10 * torch.log10(error)


def ssim(x: Tensor, truth: Tensor, data_range: float = 1.0) -> Tensor:
    """Structural similarity, (B,), with scikit-image's defaults but on the pictures' device: 7×7 windows within the
    picture, sample covariances, the mean over channels.

    The paper's code did not state the range of its [0, 1] pictures, so scikit-image 0.19 assumed 2. `data_range=2`
    gives the paper's values, which are higher.
    """
    window, c1, c2 = 7, (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    if min(x.shape[-2:]) < window:
        raise UserError(f"SSIM needs pictures of at least {window}×{window} pixels, not {tuple(x.shape[-2:])}")
    a, b = x.double(), truth.double()
    mean_a, mean_b = F.avg_pool2d(a, window, 1), F.avg_pool2d(b, window, 1)
    unbiased = window**2 / (window**2 - 1)
    var_a = unbiased * (F.avg_pool2d(a * a, window, 1) - mean_a**2)
    var_b = unbiased * (F.avg_pool2d(b * b, window, 1) - mean_b**2)
    cov = unbiased * (F.avg_pool2d(a * b, window, 1) - mean_a * mean_b)
    similarity = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
    return (similarity / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean((1, 2, 3))


def consistency(x: Tensor, y: Tensor, problem: Problem) -> Tensor:
    """The root mean square of A x − y over what was observed, (B,), for y in [-1, 1].

    Relative to σ if the measurement has noise (the truth has 1), else in [0, 1] units.
    """
    residual = (problem.operator(to_internal(x)) - y).double()
    seen = problem.operator.observed(y, (x.shape[-2], x.shape[-1]))
    if seen is not None:  # holes are no measurement
        weight = seen.to(residual).expand_as(residual)
        mean = (weight * residual**2).sum((1, 2, 3)) / weight.sum((1, 2, 3)).clamp(min=1)
    else:
        mean = (residual**2).mean((1, 2, 3))
    sigma = torch.as_tensor(problem.sigma).double().flatten().to(mean)
    return mean.sqrt() / torch.where(sigma > 0, sigma, 2.0)


def kurtosis(noise: Tensor) -> Tensor:
    """The excess kurtosis E[((ε − μ)/σ)⁴] − 3 of each image, (B,): 0 where ε is Gaussian."""
    flat = noise.double().flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    return (centred**4).mean(1) / (centred**2).mean(1) ** 2 - 3


def spread(samples: Tensor) -> Tensor:
    """The standard deviation between samples of one measurement, (S, B, 3, H, W) → (B,), over all pixels."""
    return samples.double().var(0, unbiased=True).mean((1, 2, 3)).sqrt()


class Metrics:
    """All metrics of a picture, and the networks that they need.

    FD-VGG16 compares relu5_3 of VGG16 at the picture's own size, averaged over positions: 512 numbers.
    """

    def __init__(self, device: torch.device | str = "cpu", inception: Path | None = None) -> None:
        self.device = torch.device(device)
        self.alex = LPIPS("alex").to(self.device)
        self.vgg: LPIPS | None = None
        self.absent: list[str] = []
        try:
            self.vgg = LPIPS("vgg").to(self.device)
        except UserError as error:  # the other metrics can be measured
            self.absent.append(f"LPIPS-VGG16 and FD-VGG16 were not measured: {error}")
        self.inception = None
        if inception is not None:
            from ddc.evaluation.inception import Inception

            self.inception = Inception.from_file(inception).to(self.device)

    @torch.no_grad()
    def __call__(self, x: Tensor, truth: Tensor) -> tuple[dict[str, list[float]], dict[str, Array]]:
        """The values of each metric, one for each image, and the `features` of x."""
        # the first three are computed in float64, which MPS does not have
        place = torch.device("cpu") if self.device.type == "mps" else self.device
        a, b = x.to(place).float(), truth.to(place).float()
        values = {
            "psnr": psnr(a, b).clamp(max=100),  # equal pictures would be infinite, which JSON cannot say
            "ssim": ssim(a, b),
            "ssim_paper": ssim(a, b, data_range=2),
        }
        a, b = to_internal(a.to(self.device)), to_internal(b.to(self.device))
        deep = None
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            values["lpips"] = self.alex(a, b)
            if self.vgg is not None:
                deep = self.vgg.deep_features(a)
                values["lpips_vgg"] = self.vgg.compare(deep, self.vgg.deep_features(b))
        return {name: column.tolist() for name, column in values.items()}, self.features(x, deep)

    @torch.no_grad()
    def features(self, x: Tensor, deep: list[Tensor] | None = None) -> dict[str, Array]:
        """The features of each image for the distances between sets: (B, d) for each extractor."""
        x = x.to(self.device).float()
        out = {}
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            if self.vgg is not None:
                deep = deep or self.vgg.deep_features(to_internal(x))
                out["fd_vgg16"] = deep[-1].mean((2, 3)).cpu().numpy()
            if self.inception is not None:
                out["fid"] = self.inception(x).cpu().numpy()
        return out
