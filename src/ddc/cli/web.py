"""`ddc web`: the page for restoring pictures."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Web:
    """Open a web page for restoring pictures. It answers to this computer alone unless --host says otherwise, and
    calls no other."""

    model: Path | None = None
    """The model folder; left out, the one that comes with the package."""
    network: Path | None = None
    """A data-consistency network outside the model folder."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    fast: bool = True
    """The fast path: half precision and compiled code on CUDA, faster convolutions on the CPU."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets others in, so put a login (a reverse proxy) before it."""
    port: int | None = None
    """Port; left out, the first that is free from 7860 on."""
    open_browser: bool = False
    """Also open the page in the browser."""
    megapixels: float = 4.0
    """Largest restored picture, in megapixels."""
    minutes: float = 20.0
    """Longest restoration, in minutes."""
    queue: int = 20
    """Most visitors who wait at once."""
    megabytes: int = 50
    """Largest upload, in megabytes."""
    keep_minutes: float = 60.0
    """Uploads and results are deleted after so many minutes."""

    def run(self) -> int:
        from ddc.pipeline import RestorationPipeline
        from ddc.web.page import free_port, serve
        from ddc.web.service import Limits

        limits = Limits(
            megapixels=self.megapixels,
            minutes=self.minutes,
            megabytes=self.megabytes,
            queue=self.queue,
            keep_minutes=self.keep_minutes,
        )
        port = free_port(self.host, self.port)  # before the model is read
        pipe = RestorationPipeline.from_pretrained(self.model, self.network)
        pipe.to(self.device, self.fast, compile=False)  # nobody wants to wait for that at a page
        serve(pipe, limits, self.host, port, self.open_browser)
        return 0
