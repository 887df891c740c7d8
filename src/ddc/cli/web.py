"""`ddc web`: open the web page for restoring pictures."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ddc.web.limits import Limits


@dataclass(frozen=True, kw_only=True)
class Web:
    """Open a web page for restoring pictures. Only this computer can reach it unless --host says otherwise. It
    makes no connections to other computers."""

    model: Path | None = None
    """The model folder; if left out, the one that is shipped with the package."""
    network: Path | None = None
    """A data-consistency network outside the model folder."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    fast: bool = True
    """The fast path: half precision on CUDA, faster convolutions on the CPU."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other computers in; better put a reverse proxy with a login in front."""
    port: int | None = None
    """Port; if left out, the first free one from 7860 on."""
    allowed_host: tuple[str, ...] = ()
    """Further host names that the page answers to, such as that of the reverse proxy."""
    open_browser: bool = False
    """Also open the page in the browser."""
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)

    def run(self) -> int:
        from ddc.pipeline import RestorationPipeline
        from ddc.web.server import listen, serve

        bound = listen(self.host, self.port)  # before the model is read
        pipe = RestorationPipeline.from_pretrained(self.model, self.network)
        pipe.to(self.device, self.fast, compile=False)  # the first visitor would wait for the compilation
        serve(pipe, self.limits, self.host, bound, self.allowed_host, self.open_browser)
        return 0
