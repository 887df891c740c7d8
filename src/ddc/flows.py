"""Priors whose network is told a noise level σ: flow matching and EDM.

In flow matching (Lipman et al. 2022, arXiv 2210.02747) x_σ = (1−σ) x0 + σ z, and the network predicts z − x0. In EDM (Karras et
al. 2022, arXiv 2206.00364) x_σ = x0 + σ z, and the network is preconditioned. Divided by its scale, each is the variance-preserving
x_t of a `Schedule`, in which √((1−ᾱ)/ᾱ) is σ/(1−σ) for a flow and σ for EDM.
"""

from typing import Any

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.networks import run_unet
from ddc.priors import LONGEST, Prior, Time

LEAST_SIGNAL = 1e-8  # of ᾱ: of pure noise some solvers would divide by zero


def predict(prior: Prior, x: Tensor, t: Time) -> tuple[Tensor, Tensor]:
    """x̂0 and ε̂ of a prior whose prediction type is flow, edm_epsilon or edm_v_prediction."""
    n = prior.schedule.noise_to_signal(t, x)

    def run(scaled: Tensor, time: Tensor) -> Tensor:
        return run_unet(prior.unet, scaled, time.flatten().float().to(x.device)).to(x.dtype)

    if prior.prediction_type == "flow":
        sigma, signal = n / (1 + n), 1 / (1 + n)
        noisy = (signal**2 + sigma**2).sqrt().to(x.dtype) * x
        velocity = run(noisy, sigma * prior.schedule.train_steps)
        return noisy - sigma.to(x.dtype) * velocity, noisy + signal.to(x.dtype) * velocity
    spread = number_of(prior.scheduler_config, "sigma_data", 0.5)  # of the pictures
    total = n**2 + spread**2
    c_skip, c_out = spread**2 / total, n * spread / total.sqrt()
    noisy = (1 + n**2).sqrt().to(x.dtype) * x
    raw = run(noisy / total.sqrt().to(x.dtype), n.log() / 4)
    sign = -1 if prior.prediction_type == "edm_v_prediction" else 1
    x0 = c_skip.to(x.dtype) * noisy + sign * c_out.to(x.dtype) * raw
    return x0, (noisy - x0) / n.to(x.dtype)


def alpha_bars(config: dict[str, Any], flow: bool) -> Tensor:
    """The ᾱ of a scheduler's own σs, as many as its training steps, and 1 for the clean picture."""
    steps = config.get("num_train_timesteps", 1000)
    if type(steps) is not int or not 2 <= steps <= LONGEST:
        raise UserError(f"num_train_timesteps is {str(steps)[:40]}; expected a whole number from 2 to {LONGEST}")
    if flow:
        if config.get("invert_sigmas"):
            raise UserError("a flow whose sigmas are inverted (invert_sigmas) is not supported")
        shift = 1.0 if config.get("use_dynamic_shifting") else number_of(config, "shift", 1.0)
        u = torch.arange(1, steps + 1, dtype=torch.float64) / steps
        sigma = shift * u / (1 + (shift - 1) * u)
        ratio = sigma / (1 - sigma).clamp(min=LEAST_SIGNAL)
    else:
        low, high = number_of(config, "sigma_min", 0.002), number_of(config, "sigma_max", 80.0)
        number_of(config, "sigma_data", 0.5)
        if low >= high:
            raise UserError(f"sigma_min is {low:g} and sigma_max {high:g}; expected a smaller sigma_min")
        u = torch.linspace(0, 1, steps, dtype=torch.float64)
        if config.get("sigma_schedule", "karras") == "karras":
            rho = number_of(config, "rho", 7.0)
            ratio = (low ** (1 / rho) + u * (high ** (1 / rho) - low ** (1 / rho))) ** rho
        else:
            ratio = low * (high / low) ** u
    return torch.cat([(1 / (1 + ratio**2)).clamp(min=LEAST_SIGNAL), torch.ones(1, dtype=torch.float64)])


def number_of(config: dict[str, Any], name: str, default: float) -> float:
    """A positive number of a configuration."""
    value = config.get(name, default)
    if type(value) not in (int, float) or not 1e-6 <= value <= 1e6:
        raise UserError(f"{name} of a scheduler is {str(value)[:40]!r}; expected a number above 0")
    return float(value)
