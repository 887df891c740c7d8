"""The server of the page: it makes no outgoing connections, and keeps its files in a private folder that is cleaned
while the page runs and removed when it ends."""

import contextlib
import errno
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import PIL.Image

from ddc.errors import UserError
from ddc.pipeline import RestorationPipeline
from ddc.web.limits import Limits
from ddc.web.service import Service
from ddc.web.uploads import remove_old

CSS = """
.gradio-container { max-width: 1280px !important; margin: 0 auto !important; }
#kind label { padding: 6px 9px; }
#facts:empty, #forecast:empty, #summary:empty, .fields:empty { display: none; }
#editor .layer-wrap, #editor .controls-wrap .upload { display: none; }
#picture img, #clean img, .result img { width: 100%; height: 100%; object-fit: contain; }
.files .label-clear-button { display: none; }
footer { display: none !important; }
"""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can read, for all files that Gradio and the page write; removed at the end."""
    before = {key: value for key, value in os.environ.items() if key == "GRADIO_TEMP_DIR"}
    with tempfile.TemporaryDirectory(prefix="ddc-web-", ignore_cleanup_errors=True) as name:
        os.environ |= {"GRADIO_TEMP_DIR": name, "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
        try:
            yield Path(name).resolve()
        finally:
            del os.environ["GRADIO_TEMP_DIR"]
            os.environ |= before


@contextlib.contextmanager
def pillow_limit(megapixels: float) -> Iterator[None]:
    """Have Pillow refuse pictures that are much larger than this; Gradio opens some files by itself."""
    before = PIL.Image.MAX_IMAGE_PIXELS
    PIL.Image.MAX_IMAGE_PIXELS = max(int(megapixels * 1e6), 1_000_000)
    try:
        yield
    finally:
        PIL.Image.MAX_IMAGE_PIXELS = before


@contextlib.contextmanager
def cleaning(folder: Path, minutes: float) -> Iterator[None]:
    """Delete old files in the background, except for the examples."""
    ended = threading.Event()

    def clean() -> None:
        while not ended.wait(60):
            remove_old(folder, minutes, keep=(folder / "examples",))

    threading.Thread(target=clean, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def free_port(host: str, port: int | None) -> int:
    """The given port, or the first free one from 7860 on; one that cannot be used is refused."""
    if port is not None and not 1 <= port <= 65535:
        raise UserError(f"the port is {port}; expected 1024 to 65535")
    for candidate in [port] if port is not None else range(7860, 7960):
        try:
            found = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
            return candidate
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"{host} port {candidate} cannot be used ({error}); expected an address of this computer, "
                    "such as 127.0.0.1 or 0.0.0.0, and a port from 1024 to 65535"
                ) from None
    raise UserError(f"port {port or '7860 to 7959'} is taken; name another with --port")


def serve(
    pipe: RestorationPipeline,
    limits: Limits,
    host: str,
    port: int | None,
    open_browser: bool = False,
    wait: Callable[[Any], None] | None = None,
) -> None:
    """Show the page until interrupted. `wait` (for tests) is given the running page; the page ends when it returns."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # so that services, which send it, leave no files behind
    with private_folder() as folder, pillow_limit(limits.megapixels):
        try:
            import gradio as gr
        except ImportError:
            raise UserError("the web page needs another package: pip install 'deep-data-consistency[web]'") from None
        from ddc.web.page import RestorationPage

        work = Service(pipe, limits, folder)
        work.warm_up()
        page = RestorationPage(work).build()
        try:
            with cleaning(folder, limits.keep_minutes):
                _, url, _ = page.launch(
                    server_name=host,
                    server_port=free_port(host, port),
                    inbrowser=open_browser,
                    prevent_thread_lock=True,
                    share=False,
                    quiet=True,
                    show_error=False,
                    max_file_size=limits.megabytes * 2**20,
                    allowed_paths=[],
                    ssr_mode=False,
                    mcp_server=False,
                    enable_monitoring=False,
                    run_history=False,
                    footer_links=[],
                    theme=gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
                    css=CSS,
                )
                print(f"the page is at {url} (stop it with Ctrl-C)", flush=True)
                (wait or _until_closed)(page)
        except KeyboardInterrupt:
            print("the page is closed")
        finally:
            page.close(verbose=False)


def _until_closed(page: Any) -> None:
    while page.is_running:
        time.sleep(0.5)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
