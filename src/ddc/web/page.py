"""The page itself: what is where, and which function of `service` answers which button.

Gradio is told to call nobody, to run one restoration at a time, and to keep its files in a folder of ours, which
is swept while the page runs and removed when it ends.
"""

import contextlib
import errno
import html
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from ddc.errors import UserError
from ddc.pipeline import RestorationPipeline
from ddc.solvers import SOLVERS
from ddc.web import service
from ddc.web.service import (
    KINDS,
    SHAPES,
    Array,
    Choices,
    Example,
    Limits,
    Service,
    Stopped,
    Upload,
    Visitors,
)

SHOWN_BY_BROWSERS = {".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp"}
CSS = """
.gradio-container { max-width: 1280px !important; margin: 0 auto !important; }
#kind label { padding: 6px 9px; }
#facts:empty, #forecast:empty, #summary:empty { display: none; }
#editor .layer-wrap, #editor .controls-wrap .upload { display: none; }
#picture img, #clean img, #uncertainty img, .result img { width: 100%; height: 100%; object-fit: contain; }
#files .label-clear-button, #try-files .label-clear-button { display: none; }
footer { display: none !important; }
"""
INTRO = """# Restore a picture
A diffusion model fills in what is missing, and a second network keeps it true to what you give: five steps.
What it adds is plausible, not certain; several samples show where it is guessing.
Pictures stay on the computer that runs this page and are deleted after {minutes:g} minutes."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can read, for everything that Gradio and we write; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ddc-web-")).resolve()
    before = os.environ.get("GRADIO_TEMP_DIR")
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["GRADIO_TEMP_DIR"]
        else:
            os.environ["GRADIO_TEMP_DIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def small_pictures_only(limits: Limits) -> Iterator[None]:
    """Gradio opens some files itself; nothing much larger than what we take is decoded anywhere."""
    before = PIL.Image.MAX_IMAGE_PIXELS
    PIL.Image.MAX_IMAGE_PIXELS = max(int(limits.megapixels * 1e6), 1_000_000)
    try:
        yield
    finally:
        PIL.Image.MAX_IMAGE_PIXELS = before


class Page:
    """The handlers of the page's events. Each takes what Gradio gives and returns what it shows."""

    def __init__(self, work: Service) -> None:
        self.work = work
        self.visitors = Visitors()

    # ------------------------------------------------------------------------------------------------------
    # "Restore my photo"

    def uploaded(self, data: Mapping[str, Any] | None) -> tuple[Any, ...]:
        """A file came: → upload, facts, what is known, editor, picture."""
        import gradio as gr

        if data is None:
            return self.cleared()
        upload = _as_upload(data)
        try:
            seen = self.work.inspect(upload)
        except UserError as error:  # and what was there before is gone: nobody restores what is not shown
            kept, _, *others = self.cleared()
            return kept, _warn(error), *others[:-1], None
        choices = seen.suggested
        shown = gr.skip() if upload.path.suffix.lower() in SHOWN_BY_BROWSERS else seen.preview
        facts = html.escape(seen.facts, quote=False)
        return upload, facts, *_known(choices), seen.preview, shown

    def clicked(self, example: Example) -> tuple[Any, ...]:
        """An example was clicked: the same, with what is known of it."""
        upload, facts, *_, preview, _ = self.uploaded(
            {"path": str(example.path), "orig_name": example.path.name}
        )
        return upload, facts, *_known(example.choices), preview, str(example.path)

    def cleared(self) -> tuple[Any, ...]:
        import gradio as gr

        return None, "", *[gr.skip()] * len(_known(Choices())), None, gr.skip()

    def forecast(self, upload: Upload | None, *values: Any) -> str:
        if upload is None:
            return ""
        try:
            return self.work.forecast(upload, _as_choices(values))
        except UserError as error:
            return f"⚠ {_sentence(str(error))}"

    def restore(
        self, visitor: str, progress: Any, upload: Upload | None, drawn: Any, *values: Any
    ) -> tuple[Any, ...]:
        """→ slider, uncertainty, summary, files, command, Python."""
        import gradio as gr

        if upload is None:
            raise gr.Error(
                "Upload a picture first, or click an example.", title="No picture", print_exception=False
            )
        report = service.stoppable(
            lambda share, text: progress(share, desc=text), self.visitors.begin(visitor)
        )
        with _told_to_visitor():
            done = self.work.restore(upload, _as_choices(values), _painted(drawn), report)
        return (
            (done.before, done.after),
            gr.update(value=done.uncertainty, visible=done.uncertainty is not None),
            _with_notes(done.summary, done.notes),
            gr.update(value=[str(path) for path in done.files], visible=True),
            done.command,
            done.python,
        )

    # ------------------------------------------------------------------------------------------------------
    # "Try it"

    def try_uploaded(self, data: Mapping[str, Any] | None) -> tuple[Any, Any]:
        """→ upload, picture."""
        import gradio as gr

        if data is None:
            return None, gr.skip()
        upload = _as_upload(data)
        try:
            self.work.read(upload)
        except UserError as error:
            _warn(error)
            return None, None
        return upload, gr.skip()

    def compare(
        self,
        visitor: str,
        progress: Any,
        upload: Upload | None,
        task: str,
        sigma: float,
        longest: int,
        seed: int,
        *chosen: Any,
    ) -> tuple[Any, ...]:
        """→ clean, measured, first, second, table, files, commands."""
        import gradio as gr

        if upload is None:
            raise gr.Error(
                "Upload a clean picture first, or click an example.",
                title="No picture",
                print_exception=False,
            )
        report = service.stoppable(
            lambda share, text: progress(share, desc=text), self.visitors.begin(visitor)
        )
        first, first_steps, second, second_steps = chosen
        with _told_to_visitor():
            done = self.work.compare(
                upload,
                task,
                float(sigma or 0),
                (first, second),
                (int(first_steps), int(second_steps)),
                int(longest),
                int(seed or 0),
                report,
            )
        return (
            done.clean,
            done.measured,
            gr.update(value=done.results[0], label=first),
            gr.update(value=done.results[1], label=second),
            _with_notes(done.table, done.notes),
            gr.update(value=[str(path) for path in done.files], visible=True),
            done.command,
        )

    # ------------------------------------------------------------------------------------------------------

    def build(self) -> Any:
        """The page, with its events."""
        import gradio as gr

        # Gradio reads these annotations to know that it must pass the request and the progress bar.
        def restore(request: gr.Request, *values: Any, progress: Any = gr.Progress()) -> Any:
            return _unless_stopped(self.restore, _visitor(request), progress, *values)

        def compare(request: gr.Request, *values: Any, progress: Any = gr.Progress()) -> Any:
            return _unless_stopped(self.compare, _visitor(request), progress, *values)

        def stop(request: gr.Request) -> None:
            self.visitors.stop(_visitor(request))

        quietly: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        at_once = {**quietly, "queue": False}  # a full queue stops nobody from changing a setting
        heavy: dict[str, Any] = {
            "api_visibility": "private",
            "concurrency_limit": 1,
            "concurrency_id": "model",
            "trigger_mode": "once",
        }
        with gr.Blocks(title="Restore a picture", analytics_enabled=False) as page:
            gr.Markdown(INTRO.format(minutes=self.work.limits.keep_minutes))
            with gr.Tab("Restore my photo"):
                self._build_restore(restore, stop, quietly, at_once, heavy)
            with gr.Tab("Try it"):
                self._build_compare(compare, stop, quietly, at_once, heavy)
            page.unload(stop)  # a closed tab waits for nothing
        page.queue(max_size=self.work.limits.queue, api_open=False, default_concurrency_limit=8)
        return page

    def _build_restore(
        self,
        restore: Callable[..., Any],
        stop: Callable[..., Any],
        quietly: dict[str, Any],
        at_once: dict[str, Any],
        heavy: dict[str, Any],
    ) -> None:
        import gradio as gr

        first = Choices()
        upload = gr.State()
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=360):
                picture = gr.Image(
                    label="Your picture",
                    type="filepath",
                    image_mode=None,
                    sources=["upload", "clipboard"],
                    height=250,
                    buttons=[],
                    elem_id="picture",
                )
                facts = gr.Markdown(elem_id="facts")
                examples = service.write_examples(self.work.folder / "examples" / "restore")
                gallery = gr.Dataset(
                    components=[gr.Image(visible=False, render=False)],
                    samples=[[str(example.path)] for example in examples],
                    type="index",
                    label="Examples",
                    elem_id="examples",
                )
                kind = gr.Radio(list(KINDS), value=first.kind, label="What is wrong with it?", elem_id="kind")
                scale = gr.Radio([2, 3, 4, 8], value=first.scale, label="Enlarge so many times")
                with gr.Column(visible=False) as blurs:
                    shape = gr.Radio(list(SHAPES), value=first.shape, label="Which blur?")
                    with gr.Row():
                        blur = gr.Slider(
                            0.5, 30, first.blur, step=0.05, label="Pixels", info="Width, radius or length"
                        )
                        softness = gr.Slider(
                            0,
                            3,
                            first.softness,
                            step=0.1,
                            label="Softness",
                            info="On top of it",
                            visible=False,
                        )
                        angle = gr.Slider(
                            0,
                            180,
                            first.angle,
                            step=1,
                            label="Degrees",
                            info="Counter-clockwise",
                            visible=False,
                        )
                editor = gr.ImageEditor(
                    label="Paint over what is to be filled",
                    type="numpy",
                    sources=[],
                    transforms=[],
                    layers=False,
                    brush=gr.Brush(default_size=16, colors=["#ff2d78"], color_mode="fixed"),
                    canvas_size=(service.CANVAS, service.CANVAS),
                    height=420,
                    buttons=[],
                    visible=False,
                    elem_id="editor",
                )
                quality = gr.Slider(1, 100, first.quality, step=1, label="JPEG quality", visible=False)
                sigma = gr.Slider(
                    0,
                    0.3,
                    first.sigma,
                    step=0.001,
                    label="Noise",
                    info="Standard deviation, where black is 0 and white is 1",
                    elem_id="sigma",
                )
                with gr.Accordion("More", open=False, elem_id="more"):
                    with gr.Row():
                        solver = gr.Dropdown(self.work.solver_names(), value=first.solver, label="Solver")
                        steps = gr.Slider(1, 1000, first.steps, step=1, label="Steps")
                    with gr.Row():
                        samples = gr.Slider(
                            1,
                            self.work.limits.samples,
                            first.samples,
                            step=1,
                            label="Samples",
                            info="Several show where the model is guessing",
                            elem_id="samples",
                        )
                        seed = gr.Number(first.seed, precision=0, label="Seed")
                forecast = gr.Markdown(elem_id="forecast")
                with gr.Row():
                    go = gr.Button("Restore", variant="primary", elem_id="restore")
                    halt = gr.Button("Stop", elem_id="stop")
            with gr.Column(scale=1, min_width=360):
                slider = gr.ImageSlider(
                    label="Before and after",
                    format="png",
                    max_height=620,
                    interactive=False,
                    buttons=["fullscreen"],
                    elem_id="slider",
                )
                summary = gr.Markdown(elem_id="summary")
                uncertainty = gr.Image(
                    label="Uncertainty: pale where the samples differ",
                    format="png",
                    interactive=False,
                    visible=False,
                    height=420,
                    buttons=["download", "fullscreen"],
                    elem_id="uncertainty",
                )
                files = gr.File(
                    label="Download", file_count="multiple", visible=False, interactive=False, elem_id="files"
                )
                with gr.Accordion("The same on your own computer", open=False):
                    command = gr.Code(
                        label="Command line", language="shell", interactive=False, wrap_lines=True, lines=1
                    )
                    python = gr.Code(
                        label="Python", language="python", interactive=False, wrap_lines=True, lines=1
                    )

        choices = [kind, scale, shape, blur, softness, angle, quality, sigma, solver, steps, seed, samples]
        seen = [upload, facts, kind, scale, shape, blur, softness, angle, quality, sigma, editor, picture]
        told: dict[str, Any] = {
            "fn": self.forecast,
            "inputs": [upload, *choices],
            "outputs": forecast,
            **at_once,
        }
        # preprocess=False: the file as it came, so that we are the ones who open it. An upload stays in the
        # queue, because only events of the queue can show a warning.
        picture.upload(self.uploaded, picture, seen, preprocess=False, **quietly).then(**told)
        picture.clear(self.cleared, None, seen, **at_once).then(**told)
        gallery.click(lambda index: self.clicked(examples[index]), gallery, seen, **at_once).then(**told)
        kind.change(
            lambda chosen: [
                gr.update(visible=chosen == "Low resolution"),
                gr.update(visible=chosen == "Blur"),
                gr.update(visible=chosen == "Holes"),
                gr.update(visible=chosen == "JPEG artefacts"),
            ],
            kind,
            [scale, blurs, editor, quality],
            **at_once,
        )
        shape.change(
            lambda chosen: [gr.update(visible=chosen != SHAPES[0]), gr.update(visible=chosen == SHAPES[2])],
            shape,
            [softness, angle],
            **at_once,
        )
        solver.change(lambda name: SOLVERS[name]().steps, solver, steps, **at_once)
        for control in choices:
            control.change(trigger_mode="always_last", **told)
        shown = [slider, uncertainty, summary, files, command, python]
        go.click(
            restore,
            [upload, editor, *choices],
            shown,
            show_progress_on=slider,
            scroll_to_output=True,
            **heavy,
        )
        halt.click(stop, **at_once)

    def _build_compare(
        self,
        compare: Callable[..., Any],
        stop: Callable[..., Any],
        quietly: dict[str, Any],
        at_once: dict[str, Any],
        heavy: dict[str, Any],
    ) -> None:
        import gradio as gr

        upload = gr.State()
        names = self.work.solver_names()
        second_name = "ddnm" if "ddnm" in names else names[-1]
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=360):
                picture = gr.Image(
                    label="A clean picture",
                    type="filepath",
                    image_mode=None,
                    sources=["upload", "clipboard"],
                    height=260,
                    buttons=[],
                    elem_id="clean",
                )
                examples = service.write_clean_examples(self.work.folder / "examples" / "try")
                gallery = gr.Dataset(
                    components=[gr.Image(visible=False, render=False)],
                    samples=[[str(path)] for path in examples],
                    type="index",
                    label="Examples",
                    elem_id="clean-examples",
                )
                tasks = [(f"{name}: {text}", name) for name, text in service.try_tasks().items()]
                task = gr.Dropdown(tasks, value="sr4", label="What to do to it")
                sigma = gr.Slider(0, 0.3, 0.05, step=0.005, label="Noise to add")
                with gr.Row():
                    first = gr.Dropdown(names, value=names[0], label="Solver")
                    first_steps = gr.Slider(1, 1000, SOLVERS[names[0]]().steps, step=1, label="Steps")
                with gr.Row():
                    second = gr.Dropdown(names, value=second_name, label="Against")
                    second_steps = gr.Slider(1, 1000, 20, step=1, label="Steps")
                with gr.Row():
                    longest = gr.Slider(64, 512, 128, step=32, label="Longest side in pixels")
                    seed = gr.Number(0, precision=0, label="Seed")
                with gr.Row():
                    go = gr.Button("Degrade and restore", variant="primary", elem_id="compare")
                    halt = gr.Button("Stop")
            with gr.Column(scale=1, min_width=360):
                plain: dict[str, Any] = {
                    "format": "png",
                    "interactive": False,
                    "buttons": ["fullscreen"],
                    "height": 300,
                    "elem_classes": "result",
                }
                with gr.Row():
                    clean = gr.Image(label="Clean", **plain)
                    measured = gr.Image(label="Degraded", **plain)
                with gr.Row():
                    one = gr.Image(label="Solver", elem_id="one", **plain)
                    two = gr.Image(label="Against", elem_id="two", **plain)
                table = gr.Markdown(elem_id="table")
                files = gr.File(
                    label="Download",
                    file_count="multiple",
                    visible=False,
                    interactive=False,
                    elem_id="try-files",
                )
                with gr.Accordion("The same on your own computer", open=False):
                    command = gr.Code(
                        label="Command line", language="shell", interactive=False, wrap_lines=True, lines=1
                    )

        picture.upload(self.try_uploaded, picture, [upload, picture], preprocess=False, **quietly)
        picture.clear(lambda: None, None, upload, **at_once)
        gallery.click(
            lambda index: (Upload(examples[index], examples[index].name), str(examples[index])),
            gallery,
            [upload, picture],
            **at_once,
        )
        for chosen, count in ((first, first_steps), (second, second_steps)):
            chosen.change(lambda name: SOLVERS[name]().steps, chosen, count, **at_once)
        go.click(
            compare,
            [upload, task, sigma, longest, seed, first, first_steps, second, second_steps],
            [clean, measured, one, two, table, files, command],
            show_progress_on=[one, two],
            **heavy,
        )
        halt.click(stop, **at_once)


def _visitor(request: Any) -> str:
    return str(getattr(request, "session_hash", None))


def _as_upload(data: Mapping[str, Any]) -> Upload:
    path = Path(str(data["path"]))
    return Upload(path, Path(str(data.get("orig_name") or path.name)).name)


def _known(choices: Choices) -> tuple[Any, ...]:
    """What a file or an example tells, in the order of the page's controls."""
    c = choices
    return c.kind, c.scale, c.shape, c.blur, c.softness, c.angle, c.quality, c.sigma


def _as_choices(values: tuple[Any, ...]) -> Choices:
    kind, scale, shape, blur, softness, angle, quality, sigma, solver, steps, seed, samples = values
    return Choices(
        kind,
        int(scale),
        shape,
        float(blur),
        float(softness),
        float(angle),
        int(quality),
        float(sigma or 0),
        solver,
        int(steps),
        int(seed or 0),
        int(samples),
    )


def _painted(drawn: Mapping[str, Any] | None) -> Array | None:
    """Where the brush was, from the editor's layers: (h, w), above 0."""
    layers = [layer for layer in (drawn or {}).get("layers", []) if layer is not None and layer.ndim == 3]
    if not layers:
        return None
    return np.max([layer[:, :, 3] for layer in layers], axis=0)


def _with_notes(text: str, notes: list[str]) -> str:
    """What is said of a result, with a paragraph for each note."""
    return "\n\n".join([text, *(f"⚠ {_sentence(note)}" for note in notes)])


def _sentence(text: str) -> str:
    text = text.rstrip(".") + "."
    first = text.split()[0]
    names_something = first in SOLVERS or not first.rstrip(",;:").isalpha()
    return html.escape(text if names_something else text[:1].upper() + text[1:], quote=False)


def _warn(error: UserError) -> str:
    """Show a warning, and return it for a place where it stays."""
    import gradio as gr

    gr.Warning(_sentence(str(error)), title="That did not work", duration=20)
    return f"⚠ {_sentence(str(error))}"


def _unless_stopped(handler: Callable[..., tuple[Any, ...]], *values: Any) -> Any:
    """What the handler gives, or, where the visitor stopped it, the page as it was."""
    import gradio as gr

    try:
        return handler(*values)
    except Stopped as stopped:
        gr.Info(_sentence(str(stopped)))
        return gr.skip()


@contextlib.contextmanager
def _told_to_visitor() -> Iterator[None]:
    """What a person can mend is shown on the page."""
    import gradio as gr

    try:
        yield
    except Stopped:
        raise
    except UserError as error:
        raise gr.Error(
            _sentence(str(error)), title="That did not work", duration=20, print_exception=False
        ) from None


def free_port(host: str, port: int | None) -> int:
    """A port of the host that can be listened on: the one that was asked for, or the first from 7860 on."""
    if port is not None and not 1 <= port <= 65535:
        raise UserError(f"the port is {port}; expected 1024 to 65535")
    for candidate in [port] if port is not None else range(7860, 7960):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[
                0
            ]
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
            return candidate
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"{host} port {candidate} cannot be listened on ({error}); expected an address of this computer, "
                    "such as 127.0.0.1 or 0.0.0.0, and a port from 1024 to 65535"
                ) from None
    raise UserError(f"port {port or '7860 to 7959'} is taken; name another with --port")


def _until_interrupted(page: Any) -> None:
    while page.is_running:
        time.sleep(0.5)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def serve(
    pipe: RestorationPipeline,
    limits: Limits,
    host: str,
    port: int | None,
    open_browser: bool = False,
    wait: Callable[[Any], None] | None = None,
) -> None:
    """Show the page until interrupted. `wait` (for tests) is given the running page and returns to end it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGTERM, _interrupt
        )  # services are ended with it, and it must clean up as Ctrl-C does
    with private_folder() as folder, small_pictures_only(limits):
        try:
            import gradio as gr
        except ImportError:
            raise UserError("the web page needs another package: pip install 'ddc[web]'") from None
        work = Service(pipe, limits, folder)
        work.warm_up()
        page = Page(work).build()
        ended = threading.Event()

        def sweep() -> None:
            while not ended.wait(60):
                service.remove_old(folder, limits.keep_minutes, keep=(folder / "examples",))

        threading.Thread(target=sweep, daemon=True).start()
        try:
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
            (wait or _until_interrupted)(page)
        except KeyboardInterrupt:
            print("the page is closed")
        finally:
            ended.set()
            page.close(verbose=False)
