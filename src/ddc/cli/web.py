"""`ddc web`: serve the web page for restoring pictures, and the API."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ddc.cli.files import shown
from ddc.web.limits import Limits


@dataclass(frozen=True, kw_only=True)
class Web:
    """Start a web page for restoring pictures, and an API for programs (POST /api/restore). Only this computer can reach
    it unless --host says otherwise. It makes no connections to other computers."""

    model: Annotated[Path | None, shown("FOLDER")] = None
    """The model folder, or a model on the Hugging Face Hub, as in user/model or user/model@revision; by default the
    model that is shipped with the package."""
    network: Annotated[Path | None, shown("FOLDER")] = None
    """A data-consistency network outside the model folder."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    fast: bool = True
    """The fast path: half precision on CUDA, faster convolutions on the CPU."""
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """The address to listen on. 0.0.0.0 lets other computers in, without a login; a reverse proxy can add one."""
    port: Annotated[int | None, shown("N")] = None
    """The port; by default the first free one from 7860 on."""
    allowed_host: Annotated[tuple[str, ...], shown("[NAME …]")] = ()
    """Further host names that the page answers to, such as that of the reverse proxy."""
    page: bool = True
    """Serve the page; without it, only the API for programs."""
    open_browser: bool = False
    """Also open the page in the browser."""
    static: Annotated[Path | None, shown("FOLDER")] = None
    """Write the page into this new folder and exit. Its files restore pictures in the browser; any static server can host them."""
    runtime: Annotated[Path | None, shown("FILE")] = None
    """With --static: onnxruntime-web's archive, from `npm pack`; by default npm downloads it."""
    dtype: Literal["fp32", "fp16", "8bit"] = "fp16"
    """With --static: data type of the weights that a visitor loads."""
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)

    def run(self) -> int:
        if self.static is not None:
            from ddc.web.site import write_site

            write_site(self.static, self.model, self.runtime, self.dtype)
            print(f"{self.static}: the page; look at it with `python -m http.server --directory {self.static}`")
            return 0
        from ddc.pipeline import RestorationPipeline
        from ddc.web.server import listen, serve

        bound = listen(self.host, self.port)  # before the model is read
        pipe = RestorationPipeline.from_pretrained(self.model, self.network)
        pipe.to(self.device, self.fast, compile=False)  # the first visitor would wait for the compilation
        serve(pipe, self.limits, self.host, bound, self.allowed_host, self.open_browser, with_page=self.page)
        return 0
