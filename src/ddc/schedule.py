"""The noise schedule ᾱ, the (t, s) pairs of a short run, and the steps from t to s.

The table is float64; results are cast to the dtype of the images. Index −1 is the clean image, ᾱ = 1: a step to
it adds no noise. `t` and `s` are integers, or a tensor of shape (B,) with one integer per image.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ddc.errors import UserError

Spacing = Literal["leading", "even"]
Time = int | Tensor


@dataclass(frozen=True)
class Schedule:
    """A variance-preserving noise schedule."""

    alpha_bars: Tensor  # (N + 1,) float64; the last entry is 1, so that index −1 means "clean"

    @staticmethod
    def from_betas(betas: Tensor) -> "Schedule":
        alpha_bars = torch.cumprod(1.0 - betas.double().cpu(), dim=0)
        return Schedule(torch.cat([alpha_bars, torch.ones(1, dtype=torch.float64)]))

    @staticmethod
    def linear(train_steps: int = 1000, start: float = 1e-4, end: float = 0.02) -> "Schedule":
        return Schedule.from_betas(torch.linspace(start, end, train_steps, dtype=torch.float64))

    @staticmethod
    def scaled_linear(train_steps: int = 1000, start: float = 1e-4, end: float = 0.02) -> "Schedule":
        return Schedule.from_betas(torch.linspace(start**0.5, end**0.5, train_steps, dtype=torch.float64) ** 2)

    @staticmethod
    def cosine(train_steps: int = 1000) -> "Schedule":
        """Nichol and Dhariwal (2102.09672), equation 17."""
        u = torch.arange(train_steps + 1, dtype=torch.float64) / train_steps
        f = torch.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2
        return Schedule.from_betas((1 - f[1:] / f[:-1]).clamp(max=0.999))

    @property
    def train_steps(self) -> int:
        return len(self.alpha_bars) - 1

    def pairs(self, steps: int, spacing: Spacing = "leading") -> list[tuple[int, int]]:
        """The (t, s) of a run: 800→600, …, 200→0, 0→clean for five steps of a 1000-step schedule.

        "leading" is t = i·N/steps, as in the paper; "even" includes both ends, as in Nichol and Dhariwal
        (999, 749, 500, 250, 0).
        """
        n = self.train_steps
        if not 1 <= steps <= n:
            raise UserError(f"steps must be between 1 and {n} (the schedule's length), not {steps}")
        if steps == 1:  # a single step starts from pure noise, not at t = 0
            times = [n - 1]
        elif spacing == "leading":
            times = [i * n // steps for i in reversed(range(steps))]
        else:
            times = [round(i * (n - 1) / (steps - 1)) for i in reversed(range(steps))]
        return list(zip(times, [*times[1:], -1], strict=True))

    def alpha_bar(self, t: Time, like: Tensor) -> Tensor:
        """ᾱ_t, shaped to broadcast over images of `like`'s dtype and device."""
        return self._exact(t, like).to(like.dtype)

    def signal(self, t: Time, like: Tensor) -> Tensor:
        """√ᾱ_t, the scale of x_0 in x_t."""
        return self._exact(t, like).sqrt().to(like.dtype)

    def level(self, t: Time, like: Tensor) -> Tensor:
        """√(1−ᾱ_t), the noise level of x_t. The cast follows the subtraction, which is inexact in float32."""
        return (1 - self._exact(t, like)).sqrt().to(like.dtype)

    def add_noise(self, x0: Tensor, t: Time, z: Tensor) -> Tensor:
        """q(x_t | x_0): √ᾱ_t x_0 + √(1−ᾱ_t) z."""
        return self.signal(t, x0) * x0 + self.level(t, x0) * z

    def posterior_mean(self, x: Tensor, x0: Tensor, t: Time, s: Time) -> Tensor:
        """The mean of q(x_s | x_t, x_0): √ā_s β/(1−ā_t) x0 + √(1−β) (1−ā_s)/(1−ā_t) x_t."""
        a_t, a_s, beta, _ = self._variances(t, s, x)
        c0 = a_s.sqrt() * beta / (1 - a_t)
        ct = (1 - beta).sqrt() * (1 - a_s) / (1 - a_t)
        return c0.to(x.dtype) * x0 + ct.to(x.dtype) * x

    def posterior_std(self, x: Tensor, t: Time, s: Time, v: Tensor | None = None) -> Tensor:
        """The standard deviation of the posterior step; exactly 0 where ā_s = 1.

        `v` in [0, 1] is a learned interpolation, exp(½(v log β + (1−v) log β̃)); None is β̃.
        """
        _, a_s, beta, tilde = self._variances(t, s, x)
        if v is None:
            return tilde.sqrt().to(x.dtype)
        log_tilde = tilde.clamp(min=1e-20).log()
        std = torch.exp(0.5 * (v.double() * beta.log() + (1 - v.double()) * log_tilde))
        return (std * (a_s < 1)).to(x.dtype)

    def posterior(self, x: Tensor, x0: Tensor, t: Time, s: Time, z: Tensor, v: Tensor | None = None) -> Tensor:
        """A sample of q(x_s | x_t, x_0), with the standard normal field z."""
        return self.posterior_mean(x, x0, t, s) + self.posterior_std(x, t, s, v) * z

    def ddim(self, x0: Tensor, noise: Tensor, t: Time, s: Time, z: Tensor, eta: float) -> Tensor:
        """DDIM(η): c1 = η√β̃, c2 = √(1−ā_s−c1²); √ā_s x0 + c1 z + c2 ε̂."""
        _, a_s, _, tilde = self._variances(t, s, x0)
        c1 = eta * tilde.sqrt()
        c2 = (1 - a_s - c1**2).clamp(min=0).sqrt()
        return a_s.sqrt().to(x0.dtype) * x0 + c1.to(x0.dtype) * z + c2.to(x0.dtype) * noise

    def ddnm_noise_rule(self, x0: Tensor, noise: Tensor, s: Time, z: Tensor, eta: float) -> Tensor:
        """DDNM's step to the next level, which is not DDIM(η): √ā_s x0 + √(1−ā_s)(η z + √(1−η²) ε̂)."""
        mixed = eta * z + math.sqrt(1 - eta**2) * noise
        return self.signal(s, x0) * x0 + self.level(s, x0) * mixed

    def _variances(self, t: Time, s: Time, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ā_t, ā_s, β and β̃ of a step from t to s."""
        a_t, a_s = self._exact(t, like), self._exact(s, like)
        beta = 1 - a_t / a_s
        return a_t, a_s, beta, beta * (1 - a_s) / (1 - a_t)

    def _exact(self, t: Time, like: Tensor) -> Tensor:
        """ᾱ_t in float64 (float32 on MPS, which has no float64), broadcastable over `like`.

        For a single t it stays on the CPU: kernels take such a number as an argument, and a copy to the device
        would synchronise.
        """
        if not isinstance(t, Tensor):
            return self.alpha_bars[t]
        wide = torch.float32 if like.device.type == "mps" else torch.float64
        return self.alpha_bars.to(t.device)[t].to(wide).to(like.device).view(-1, 1, 1, 1)
