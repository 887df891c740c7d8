"""The server of the page and the API: it makes no outgoing connections, and keeps its files in a private folder that is
cleaned while it runs and removed when it ends."""

import contextlib
import errno
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import PIL.Image

from ddc.errors import UserError
from ddc.pipeline import RestorationPipeline
from ddc.web.folders import Store, private_folder
from ddc.web.limits import Limits
from ddc.web.service import Service

CSS = """
.gradio-container { max-width: 1280px !important; margin: 0 auto !important; }
#kind label { padding: 6px 9px; }
#facts:empty, #forecast:empty, #summary:empty, .fields:empty { display: none; }
#editor .layer-wrap, #editor .controls-wrap .upload { display: none; }
#picture img, #clean img, .result img { width: 100%; height: 100%; object-fit: contain; }
.files .label-clear-button { display: none; }
footer { display: none !important; }
"""


CONNECTIONS = 500  # at once; each open tab has two
SESSIONS = 500  # whose settings are remembered


@contextlib.contextmanager
def pillow_limit(megapixels: float) -> Iterator[None]:
    """Have Pillow refuse pictures that are much larger than this; Gradio opens some files by itself."""
    before = PIL.Image.MAX_IMAGE_PIXELS
    PIL.Image.MAX_IMAGE_PIXELS = max(int(megapixels * 1e6), 1_000_000)
    try:
        yield
    finally:
        PIL.Image.MAX_IMAGE_PIXELS = before


def listen(host: str, port: int | None) -> socket.socket:
    """A socket on the given port, or on the first free one from 7860 on; one that cannot be used is refused."""
    if port is not None and not 1 <= port <= 65535:
        raise UserError(f"the port is {port}; expected 1024 to 65535")
    for candidate in [port] if port is not None else range(7860, 7960):
        bound = None
        try:
            found = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            bound = socket.socket(family, kind, protocol)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()
            return bound
        except OSError as error:
            if bound is not None:
                bound.close()
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
    bound: socket.socket,
    allowed_hosts: Sequence[str] = (),
    open_browser: bool = False,
    started: Callable[[Any, Any], None] = lambda server, page: None,
    with_page: bool = True,
) -> None:
    """Serve the page and the API, or the API alone, until interrupted. `started` (for tests) is given the server and the
    page."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # so that services, which send it, leave no files behind
        if hasattr(signal, "SIGHUP"):  # a closed terminal
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with bound, private_folder() as folder, pillow_limit(limits.megapixels):
        try:
            import python_multipart  # noqa: F401  (Starlette imports it for the first upload)
            import uvicorn

            from ddc.web.api import Api
            from ddc.web.guard import Guard
        except ImportError:
            raise _missing("web" if with_page else "api") from None
        store = Store(folder, limits.gigabytes)
        work = Service(pipe, limits, store)
        work.warm_up()
        app, page = _gradio(work) if with_page else (None, None)
        # h11 limits the size of headers; uvicorn's other parser does not
        settings: dict[str, Any] = {"log_level": "warning", "server_header": False, "ws": "none", "http": "h11"}
        settings |= {"limit_concurrency": CONNECTIONS, "timeout_keep_alive": 10, "timeout_graceful_shutdown": 1}
        settings |= {} if with_page else {"lifespan": "off"}
        api = Api(work, lambda: 0 if page is None else len(page._queue))
        guard = Guard(app, page, api, store, host, allowed_hosts)
        server = uvicorn.Server(uvicorn.Config(guard, **settings))
        name = "localhost" if guard.any_address else f"[{host}]" if ":" in host else host
        url = f"http://{name}:{bound.getsockname()[1]}/"
        with store.cleaning(limits.keep_minutes), contextlib.suppress(KeyboardInterrupt):
            print(f"the {'page' if with_page else 'API'} is at {url} (stop it with Ctrl-C)", flush=True)
            if open_browser:
                webbrowser.open(url)
            started(server, page)
            server.run(sockets=[bound])
        print("the server is closed")


def _gradio(work: Service) -> tuple[Any, Any]:
    """Gradio's application, and the page in it."""
    try:
        import fastapi
        import gradio as gr
    except ImportError:
        raise _missing("web") from None
    from ddc.web.page import RestorationPage

    page = RestorationPage(work).build()
    page.state_session_capacity = SESSIONS
    app = gr.mount_gradio_app(
        fastapi.FastAPI(openapi_url=None),
        page,
        path="/",
        show_error=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        theme=gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
        css=CSS,
    )
    return app, page


def _missing(extra: str) -> UserError:
    return UserError(f"`ddc web` needs other packages: pip install 'deep-data-consistency[{extra}]'")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
