"""`ddc train`: priors, of pictures or latents, and the networks of solvers."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from ddc.training.settings import (
    AutoencoderSettings,
    BridgeSettings,
    DDCSettings,
    DnCNNSettings,
    LatentSettings,
    PosteriorSettings,
    PriorSettings,
)


@dataclass(frozen=True)
class Train:
    """Train a prior or a network."""

    settings: Annotated[
        Annotated[PriorSettings, tyro.conf.subcommand("prior")]
        | Annotated[DDCSettings, tyro.conf.subcommand("ddc")]
        | Annotated[PosteriorSettings, tyro.conf.subcommand("posterior")]
        | Annotated[BridgeSettings, tyro.conf.subcommand("i2sb")]
        | Annotated[DnCNNSettings, tyro.conf.subcommand("dncnn")]
        | Annotated[AutoencoderSettings, tyro.conf.subcommand("autoencoder")]
        | Annotated[LatentSettings, tyro.conf.subcommand("latent")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        from ddc.training.loop import train_model

        train_model(self.settings)
        return 0
