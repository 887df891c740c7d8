"""Δφ(y, x̂0, t): the trained network that replaces a hand-derived data-consistency step.

The paper's network reads x̂0 and y repeated to image size: `inputs = ("y",)`. Ours also reads what is known about the
measurement. The configuration of a network lists its inputs.
"""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.networks import build_network, load_network, read_config, run_unet, save_network
from ddc.schedule import Time

Input = Literal["y", "estimate", "wiener", "mask", "sigma", "projection"]
Residual = Literal["x0", "blend"]
TRAIN_STEPS = 1000
# An operator, y and its noise σ in [-1, 1] units. In training the operator stands for one operator for each picture.
Measured = tuple[Any, Any, Any]
CHANNELS: dict[Input, int] = {"y": 3, "estimate": 3, "wiener": 3, "mask": 1, "sigma": 1, "projection": 3}


class DataConsistency(nn.Module):
    """The network and the list of what it reads beside x̂0."""

    def __init__(self, unet: nn.Module, inputs: tuple[Input, ...] = ("y",), residual: Residual = "x0") -> None:
        super().__init__()
        if residual == "blend" and not {"estimate", "wiener"} & set(inputs):
            raise UserError('a network with residual "blend" must read "estimate" or "wiener"; add one to its inputs')
        unknown = set(inputs) - set(get_args(Input))
        if unknown:
            raise UserError(f"network inputs {sorted(unknown)} are not known; expected some of {get_args(Input)}")
        expected = 3 + sum(CHANNELS[name] for name in inputs)
        actual = int(unet.config["in_channels"])  # type: ignore[index]
        if actual != expected:
            raise UserError(
                f"this is not a data-consistency network for inputs {list(inputs)}: it takes {actual} channels, "
                f"expected {expected} (3 for x̂0 and {expected - 3} for the measurement)"
            )
        self.unet = unet
        self.inputs = inputs
        self.residual = residual

    def delta(self, raw: Tensor, known: Tensor, x0: Tensor, t: Time) -> Tensor:
        """Δ from the U-Net's output.

        With the residual "x0" (the paper's) the output is Δ. With "blend" the U-Net corrects a picture that is mostly
        the first guess from y at high noise, where x̂0 says little, and mostly x̂0 at low noise.
        """
        if self.residual == "x0":
            return raw
        guess = next(known[:, part] for name, part in self.layout() if name in ("wiener", "estimate"))
        trust = (1 - t / TRAIN_STEPS) ** 2
        trust = trust.view(-1, 1, 1, 1).to(x0.dtype) if isinstance(trust, Tensor) else trust
        return (1 - trust) * (x0 - guess) - raw

    def layout(self) -> list[tuple[Input, slice]]:
        """The channels of each input."""
        ends = list(accumulate(CHANNELS[name] for name in self.inputs))
        return [(name, slice(end - CHANNELS[name], end)) for name, end in zip(self.inputs, ends, strict=True)]

    def consistent(
        self,
        measured: Measured,
        x0: Tensor,
        t: Time,
        known: Tensor | None = None,
        unet: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The data-consistency step, x̂0,y = x̂0 − Δφ(y, x̂0, t), with what y states exactly put back.

        Also returns what the network was told, which the next step passes as `known`. In training `unet` is the wrapped
        form of the network's own U-Net.
        """
        operator, y, sigma = measured
        with torch.no_grad(), torch.autocast(x0.device.type, enabled=False):
            known = self.describe(measured, x0, known)
        raw = run_unet(unet or self.unet, torch.cat([x0, known], dim=1), t).to(x0.dtype)
        x0 = x0 - self.delta(raw, known, x0, t)
        with torch.autocast(x0.device.type, enabled=False):
            return operator.keep_known(x0, y, sigma), known

    def describe(self, measured: Measured, x0: Tensor, before: Tensor | None = None) -> Tensor:
        """What the network is told beside x̂0: (B, k, H, W). `before` is what it was told in an earlier step, of which
        only the projection of x̂0 is computed again."""
        parts = [
            self.channel(name, measured, x0) if before is None or name == "projection" else before[:, part]
            for name, part in self.layout()
        ]
        return torch.cat(parts, dim=1)

    def channel(self, name: Input, measured: Measured, x0: Tensor) -> Tensor:
        """One of the inputs; only "projection" depends on the values of x̂0."""
        operator, y, sigma = measured
        size = (x0.shape[-2], x0.shape[-1])
        if name == "projection":
            return operator.project(x0, y, sigma)
        if name == "y":
            return operator.to_image(y, size)
        if name in ("wiener", "estimate"):  # two names of one input
            return operator.guess(y, sigma, size)
        one = torch.ones_like(x0[:, :1])
        if name == "sigma":
            return one * (10.0 * sigma)  # the noise level, scaled to the order of 1
        mask = operator.observed(y, size)
        return one if mask is None else mask.to(one.dtype).expand_as(one)

    @staticmethod
    def from_pretrained(folder: str | Path) -> "DataConsistency":
        """Read a network folder; one without `inputs` in its configuration is the paper's (x̂0 and y)."""
        config = read_config(Path(folder))
        inputs, residual = tuple(config.pop("inputs", ("y",))), config.pop("residual", "x0")
        return DataConsistency(load_network(folder, config), inputs, residual).eval()

    @staticmethod
    def from_config(config: dict[str, Any]) -> "DataConsistency":
        config = dict(config)
        inputs: tuple[Input, ...] = tuple(config.pop("inputs", ("y",)))
        residual: Residual = config.pop("residual", "x0")
        config["in_channels"] = 3 + sum(CHANNELS[name] for name in inputs)
        return DataConsistency(build_network(config), inputs, residual)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        extra = {"inputs": list(self.inputs), "residual": self.residual} | options.pop("extra_config", {})
        save_network(self.unet, folder, extra_config=extra, **options)
