"""`ddc convert`: turn a checkpoint into a model folder."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ddc.convert import GuidedOptions, convert


@dataclass(frozen=True)
class Convert:
    """Convert a checkpoint of OpenAI's guided-diffusion or of DDIM's repository (.pt, .ckpt) into a folder with config.json
    and safetensors, or choose a class of a class-conditional diffusers model."""

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CKPT")]
    """The checkpoint, for example 256x256_diffusion_uncond.pt or celeba_hq.ckpt, or a diffusers folder that is class-conditional or has .bin weights."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The new folder."""
    options: Annotated[GuidedOptions, tyro.conf.arg(name="")] = field(default_factory=GuidedOptions)

    def run(self) -> int:
        convert(self.checkpoint, self.out, **asdict(self.options))
        print(self.out)
        return 0
