"""The page itself: its layout, and the handlers of its events."""

import contextlib
import functools
import html
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import PIL.Image

from ddc.errors import UserError
from ddc.formats import open_image
from ddc.images import Picture
from ddc.solvers import SOLVERS
from ddc.web.components import (
    CANVAS,
    compare_results,
    example_gallery,
    no_result,
    painting_editor,
    picture_input,
    restore_results,
)
from ddc.web.controls import PAINTED, Choices, Form, Trial, controls, from_values
from ddc.web.guard import visitor_of
from ddc.web.limits import MOST_FILES
from ddc.web.service import PREVIEWED, Progress, Service, Stopped, Visitors
from ddc.web.shown import Array, resized, view
from ddc.web.uploads import Upload, inspect, write_clean_examples, write_examples

SHOWN_BY_BROWSERS = {".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp"}
DETECTED = [
    *controls(Choices, "kind"),
    *controls(Choices, "details"),
    "sigma",
    "solver",
    "steps",
]  # the fields that an upload sets
INTRO = """# Restore a picture
Drop a photograph: the page finds out what is wrong with it and shows a preview. Restore then does the whole picture.
The detail that is added is plausible, not certain; several samples show where the model is guessing.
Pictures stay on the computer that runs this page and are deleted after {minutes:g} minutes."""

# Events that only change what is shown. Those that are not queued work even when the queue is full. Handlers check the
# values themselves, and open files themselves: Gradio would open all formats that Pillow knows.
RAW: dict[str, Any] = {"api_visibility": "private", "preprocess": False}
QUIET: dict[str, Any] = {**RAW, "show_progress": "hidden"}
AT_ONCE: dict[str, Any] = {**QUIET, "queue": False}
# Events that use the model: one at a time.
HEAVY: dict[str, Any] = {**RAW, "concurrency_limit": 1, "concurrency_id": "model", "trigger_mode": "once"}


class RestorationPage:
    """The page. Each handler takes the values of components and returns what other components show."""

    def __init__(self, work: Service) -> None:
        self.work = work
        self.visitors = Visitors()
        names = work.solver_names()
        # what depends on the model and the limits: settings of controls, by their fields
        self.settings: dict[str, dict[str, Any]] = {
            "solver": {"choices": names},
            "other": {"choices": names},
            "samples": {"maximum": work.limits.samples},
            "realism": {"visible": "posterior" in names},
        }
        solver = work.pipe.solver if work.pipe.solver in names else names[0]
        self.first: dict[str, Any] = {"solver": solver, "steps": SOLVERS[solver]().steps}

    # ------------------------------------------------------------------------------------------------------
    # handlers of "Restore my photo"

    def uploaded(self, request: gr.Request, data: Mapping[str, Any] | None) -> tuple[Any, ...]:
        """→ upload, facts, the fields that are detected, canvas, editor, picture."""
        if data is None:
            return self.cleared()
        upload = _as_upload(data)
        try:
            seen = self._seen(request, upload)
        except UserError as error:  # the picture before it goes as well, so that nobody restores what is not shown
            return None, _warn(error), *[gr.skip()] * len(DETECTED), None, None, None
        return *seen, gr.skip() if upload.path.suffix.lower() in SHOWN_BY_BROWSERS else seen[-1]

    def clicked(self, request: gr.Request, upload: Upload, choices: Choices) -> tuple[Any, ...]:
        """The same for an example."""
        return *self._seen(request, upload, choices), str(upload.path)

    def cleared(self) -> tuple[Any, ...]:
        """The same where there is no picture."""
        return None, "", *[gr.skip()] * len(DETECTED), None, None, gr.skip()

    def _seen(self, request: gr.Request, upload: Upload, choices: Choices | None = None) -> tuple[Any, ...]:
        picture = upload.read(self.work.limits)
        facts, suggested = inspect(upload.name, picture, self.work.limits)
        wanted = replace(choices or suggested, **self.first)
        detected = [getattr(wanted, name) for name in DETECTED[:-2]]
        quick = self.work.quick
        too_long = self.work.is_too_long(upload, wanted)
        detected += [quick, SOLVERS[quick]().steps] if too_long else [gr.skip()] * 2  # a solver that was chosen stays
        with self.work.store.room(3 * CANVAS**2):
            folder = self.work.store.new_folder(visitor_of(request.session_hash))
            canvas = _stored(folder, "canvas", view(picture, CANVAS))
        return upload, html.escape(facts, quote=False), *detected, canvas, canvas

    def _form(self, form: type[Form], values: Sequence[Any]) -> Form:
        return from_values(form, values, self.settings)

    def visibility(self, *values: Any) -> list[Any]:
        """→ the fields of the group "details", editor."""
        choices = self._form(Choices, values)
        visible = [control.visible(choices) for control in controls(Choices, "details").values()]
        return [gr.update(visible=each) for each in (*visible, choices.kind in PAINTED)]

    def unpainted(self, canvas: str | None, kind: Any) -> Any:
        """→ editor: a painting that is no longer shown goes."""
        return gr.skip() if kind in PAINTED else canvas

    def forecast(self, upload: Upload | None, *values: Any) -> str:
        if upload is None:
            return ""
        try:
            return self.work.forecast(upload, self._form(Choices, values))
        except UserError as error:
            return f"⚠ {_sentence(str(error))}"

    def preview(
        self, request: gr.Request, upload: Upload | None, values: Sequence[Any], place: tuple[int, int] | None = None
    ) -> tuple[Any, ...]:
        """→ slider, summary, uncertainty, files, command, Python: a small part, which replaces the result before it."""
        if upload is None:
            return (gr.skip(),) * len(no_result())
        try:
            shown = self.work.preview(upload, self._form(Choices, values), place)
            if shown is None:
                return no_result()
            with self.work.store.room(6 * PREVIEWED**2):
                folder = self.work.store.new_folder(visitor_of(request.session_hash))
                parts = _stored(folder, "before", shown[0]), _stored(folder, "after", shown[1])
            text = f"{shown[2]} Click your picture to see another part; Restore does the whole of it."
            return parts, text, *no_result()[2:]
        except UserError as error:
            return None, f"⚠ {_sentence(str(error))}", *no_result()[2:]

    def opening(self, upload: Upload, choices: Choices) -> Callable[[], tuple[Any, ...]]:
        """What a new tab shows: an example, restored when the page starts. → upload, facts, the fields that are detected,
        canvas, editor, picture, slider, summary, uncertainty, files, command, Python."""
        if self.work.pipe.solver not in self.work.solver_names():
            return lambda: (*self.cleared(), *no_result())
        wanted = replace(choices, **self.first)
        result = self.work._run(Picture.read(upload.path), wanted.task, wanted.options)
        after = view(result.picture)
        before = resized(view(Picture.read(upload.path)), *after.shape[:2])
        folder = upload.path.parent / "shown"
        parts = _stored(folder, "before", before), _stored(folder, "after", after)
        detected = [getattr(wanted, name) for name in DETECTED]
        told = "An example: drop your own picture above, or click another example."
        values = (upload, told, *detected, None, None, str(upload.path), parts, "", *no_result()[2:])
        return lambda: values

    # ------------------------------------------------------------------------------------------------------
    # handlers of "Several photos"

    def restore_several(self, visitor: str, progress: Progress, given: Any, solver: Any, kind: Any) -> tuple[Any, ...]:
        """→ files, what was found."""
        chosen = self._form(Choices, astuple(replace(Choices(), **self.first | {"solver": solver, "format": kind})))
        done = self.work.restore_several(
            [_as_upload(one) for one in given], chosen.solver, chosen.format, progress, visitor
        )
        said = "\n".join(f"- {html.escape(line, quote=False)}" for line in done.said)
        return gr.update(value=[str(path) for path in done.files], visible=bool(done.files)), said

    # ------------------------------------------------------------------------------------------------------
    # the whole of "Restore my photo"

    def restore(self, visitor: str, progress: Progress, upload: Upload, drawn: Any, *values: Any) -> tuple[Any, ...]:
        """→ slider, summary, uncertainty, files, command, Python."""
        choices = self._form(Choices, values)
        layers = self._layers(visitor, drawn or {}) if choices.kind in PAINTED else []
        done = self.work.restore(upload, choices, painted(layers), progress, visitor)
        folder = done.files[0].parent / "shown"
        uncertain = None if done.uncertainty is None else _stored(folder, "uncertainty", done.uncertainty)
        return (
            (_stored(folder, "before", done.before), _stored(folder, "after", done.after)),
            _with_notes(done.summary, done.notes),
            gr.update(value=uncertain, visible=uncertain is not None),
            gr.update(value=[str(path) for path in done.files], visible=True),
            done.command,
            done.python,
        )

    def _layers(self, visitor: str, drawn: Mapping[str, Any]) -> list[Array]:
        """The layers of a painting: files that the editor sent by themselves, or that the event names."""
        name = drawn.get("id")
        sent = sorted((self.work.store.home(visitor) / f"painted-{name}").glob("*.png")) if name else []
        paths = sent or [Path(layer["path"]) for layer in drawn.get("layers") or []]
        layers = []
        for path in paths:
            self.work.limits.check_size(*Upload(path, "the painting").size())
            try:
                with open_image(path) as image:
                    layers.append(np.asarray(image.convert("RGBA")))
            except Exception:  # whatever the decoder raises
                raise UserError("the painting is damaged; paint it again") from None
        return layers

    # ------------------------------------------------------------------------------------------------------
    # handlers of "Try it"

    def try_uploaded(self, data: Mapping[str, Any] | None) -> tuple[Any, Any]:
        """→ upload, picture."""
        if data is None:
            return None, gr.skip()
        upload = _as_upload(data)
        try:
            upload.read(self.work.limits)
        except UserError as error:
            _warn(error)
            return None, None
        return upload, gr.skip()

    def compare(self, visitor: str, progress: Progress, upload: Upload, *values: Any) -> tuple[Any, ...]:
        """→ clean, measured, first, second, table, files, commands."""
        trial = self._form(Trial, values)
        done = self.work.compare(upload, trial, progress, visitor)
        folder = done.files[0].parent / "shown"
        first, second = (_stored(folder, f"result{index}", shown) for index, shown in enumerate(done.results))
        return (
            _stored(folder, "clean", done.clean),
            _stored(folder, "measured", done.measured),
            gr.update(value=first, label=trial.solver),
            gr.update(value=second, label=trial.other),
            _with_notes(done.table, done.notes),
            gr.update(value=[str(path) for path in done.files], visible=True),
            done.command,
        )

    # ------------------------------------------------------------------------------------------------------
    # handlers of both

    def stop(self, request: gr.Request) -> None:
        for handler in (self.restore, self.restore_several, self.compare):
            self._stop(handler, request)

    def _stop(self, handler: Callable[..., Any], request: gr.Request) -> None:
        self.visitors.stop(_run_name(handler, request))

    def emptied(self, request: gr.Request) -> tuple[Any, ...]:
        """What is shown of the picture before, which is no longer restored. → slider, …, Python."""
        self._stop(self.restore, request)
        return no_result()

    def emptied_several(self, request: gr.Request) -> tuple[Any, ...]:
        """The same for several pictures. → files, what was found."""
        self._stop(self.restore_several, request)
        return gr.update(value=None, visible=False), ""

    def _heavy(self, handler: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        """A handler as an event that shows its progress, can be stopped, and shows errors to the visitor."""

        # Gradio passes the request and the progress bar, because of the annotation and the default.
        def event(request: gr.Request, progress: Any = gr.Progress(), *values: Any) -> Any:
            if not values[0]:
                text = "Upload a picture first, or click an example."
                raise gr.Error(text, title="No picture", print_exception=False)
            name = _run_name(handler, request)
            report = self.visitors.begin(name, lambda share, text: progress(share, desc=text))
            try:
                shown = handler(visitor_of(request.session_hash), report, *values)
                report(1.0, "Done")  # a result that was stopped after its last step is not shown either
                return shown
            except Stopped as stopped:  # the page stays as it was
                gr.Info(_sentence(str(stopped)))
                return gr.skip()
            except UserError as error:
                raise _refused(error) from None
            finally:
                self.visitors.stop(name)

        event.__name__ = handler.__name__
        return event

    # ------------------------------------------------------------------------------------------------------
    # layout

    def build(self) -> gr.Blocks:
        """The page, with its events."""
        with gr.Blocks(title="Restore a picture", analytics_enabled=False) as page:
            gr.Markdown(INTRO.format(minutes=self.work.limits.keep_minutes))
            with gr.Tab("Restore my photo"):
                self._build_restore(page)
            with gr.Tab("Several photos"):
                self._build_several()
            with gr.Tab("Try it"):
                self._build_compare()
            page.unload(self.stop)  # closing the tab ends its run
        page.queue(max_size=self.work.limits.queue, api_open=False, default_concurrency_limit=8)
        return page

    def _build_restore(self, page: gr.Blocks) -> None:
        upload, canvas, form = gr.State(), gr.State(), replace(Choices(), **self.first)
        examples = write_examples(self.work.store.examples / "restore")
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=360):
                picture = picture_input("Your picture", "picture")
                facts = gr.Markdown(elem_id="facts")
                gallery = example_gallery([example for example, _ in examples])
                fields = self._fields(form, "kind")
                editor = painting_editor()
                fields |= self._fields(form, "details")
                with gr.Accordion("More", open=False, elem_id="more"):
                    fields |= self._fields(form, "more")
                forecast = gr.Markdown(elem_id="forecast")
                with gr.Row():
                    go = gr.Button("Restore", variant="primary", elem_id="restore")
                    halt = gr.Button("Stop", elem_id="stop")
            with gr.Column(scale=1, min_width=360):
                results = restore_results()

        values = list(fields.values())
        seen = [upload, facts, *(fields[name] for name in DETECTED), canvas, editor, picture]
        told: dict[str, Any] = {"fn": self.forecast, "inputs": [upload, *values], "outputs": forecast, **AT_ONCE}
        # Uploads are queued, because only queued events can show a warning.
        # Before another picture is examined, which takes seconds, the result of the one before it goes.
        gone: dict[str, Any] = {"fn": self.emptied, "inputs": None, "outputs": results, **AT_ONCE}
        for event in (picture.upload, picture.clear, gallery.click):
            event(**gone)
        glance: dict[str, Any] = {"outputs": results, "show_progress_on": results[0], **HEAVY}

        def preview(request: gr.Request, upload: Any, *values: Any) -> tuple[Any, ...]:
            return self.preview(request, upload, values)

        def preview_here(request: gr.Request, clicked: gr.SelectData, upload: Any, *values: Any) -> tuple[Any, ...]:
            return self.preview(request, upload, values, clicked.index and (clicked.index[1], clicked.index[0]))

        looked: dict[str, Any] = {"fn": preview, "inputs": [upload, *values], **glance}
        picture.select(preview_here, [upload, *values], **glance)
        for name in ("kind", "strength", "scale", "shape"):
            fields[name].input(**looked | {"trigger_mode": "always_last"})
        page.load(self.opening(*examples[0]), None, [*seen, *results], **AT_ONCE)
        picture.upload(self.uploaded, picture, seen, **QUIET).then(**told).then(**looked)
        picture.clear(self.cleared, None, seen, **AT_ONCE).then(**told)

        def example(request: gr.Request, index: Any) -> tuple[Any, ...]:
            return self.clicked(request, *_chosen(examples, index))

        gallery.click(_telling(example), gallery, seen, **AT_ONCE).then(**told).then(**looked)
        details = [fields[name] for name in controls(Choices, "details")]
        for name in ("kind", "shape"):
            shown = fields[name].change(_telling(self.visibility), values, [*details, editor], **AT_ONCE)
            shown.then(self.unpainted, [canvas, fields["kind"]], editor, **AT_ONCE)
        _follow_solver(fields["solver"], fields["steps"])
        for field in values:
            field.change(trigger_mode="always_last", **told)
        given = [upload, editor, *values]
        go.click(self._heavy(self.restore), given, results, show_progress_on=results[0], scroll_to_output=True, **HEAVY)
        halt.click(self.stop, **AT_ONCE)

    def _build_several(self) -> None:
        gr.Markdown(
            f"Up to {MOST_FILES} pictures. Each is restored as what is found in it; a good one is left as it is."
        )
        pictures = gr.File(label="Your pictures", file_count="multiple", elem_id="pictures")
        with gr.Row():
            names = self.work.solver_names()
            quick = self.work.quick if self.work.quick in names else names[0]
            solver = gr.Dropdown(names, value=quick, label="Solver", elem_id="several-solver")
            settings = controls(Choices)["format"].settings
            kind = gr.Radio(value="jpg", label="Save as", elem_id="several-format", **settings)
        with gr.Row():
            go = gr.Button("Restore all", variant="primary", elem_id="restore-all")
            halt = gr.Button("Stop")
        said = gr.Markdown(elem_id="several-said")
        files = gr.File(label="Download", file_count="multiple", visible=False, interactive=False, elem_classes="files")
        event = self._heavy(self.restore_several)
        pictures.clear(self.emptied_several, None, [files, said], **AT_ONCE)
        go.click(event, [pictures, solver, kind], [files, said], show_progress_on=said, **HEAVY)
        halt.click(self.stop, **AT_ONCE)

    def _build_compare(self) -> None:
        upload, form = gr.State(), replace(Trial(), **self.first)
        examples = write_clean_examples(self.work.store.examples / "try")
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=360):
                picture = picture_input("A clean picture", "clean")
                gallery = example_gallery(examples)
                fields = self._fields(form, "details", "try-")
                with gr.Row():
                    go = gr.Button("Degrade and restore", variant="primary", elem_id="compare")
                    halt = gr.Button("Stop")
            with gr.Column(scale=1, min_width=360):
                results = compare_results()

        def example(index: Any) -> tuple[Any, ...]:
            chosen = _chosen(examples, index)
            return chosen, str(chosen.path)

        picture.upload(self.try_uploaded, picture, [upload, picture], **QUIET)
        picture.clear(lambda: None, None, upload, **AT_ONCE)
        gallery.click(_telling(example), gallery, [upload, picture], **AT_ONCE)
        _follow_solver(fields["solver"], fields["steps"])
        _follow_solver(fields["other"], fields["other_steps"])
        event = self._heavy(self.compare)
        go.click(event, [upload, *fields.values()], results, show_progress_on=results[2:4], **HEAVY)
        halt.click(self.stop, **AT_ONCE)

    def _fields(self, form: Any, group: str, prefix: str = "") -> dict[str, Any]:
        """The components of a form's group, by the names of their fields."""
        made = {}
        by_row = itertools.groupby(controls(form, group).items(), lambda item: item[1].row)
        for row, members in by_row:
            with gr.Row(elem_classes="fields") if row else contextlib.nullcontext():
                for name, control in members:
                    made[name] = getattr(gr, control.component)(
                        value=getattr(form, name),
                        label=control.label,
                        elem_id=prefix + name,
                        **{"visible": control.visible(form)} | control.settings | self.settings.get(name, {}),
                    )
        return made


# ---------------------------------------------------------------------------------------------------------
# values and texts


def _follow_solver(solver: Any, steps: Any) -> None:
    """Choosing a solver sets the steps to its own number."""
    solver.change(lambda name: SOLVERS[name]().steps if name in SOLVERS else gr.skip(), solver, steps, **AT_ONCE)


def _run_name(handler: Callable[..., Any], request: gr.Request) -> str:
    """The run of a handler in a browser tab, among all runs."""
    return f"{handler.__name__} {request.session_hash}"


def _as_upload(data: Mapping[str, Any]) -> Upload:
    path = Path(str(data["path"]))
    return Upload(path, Path(str(data.get("orig_name") or path.name)).name)


def painted(layers: Sequence[Array]) -> Array | None:
    """Where the brush was, from the layers (h, w, 4) of the editor: (h, w), above 0."""
    if len({layer.shape for layer in layers}) > 1:
        raise UserError("the layers of the painting differ in size; paint it again")
    return np.max([layer[:, :, 3] for layer in layers], axis=0) if layers else None


def _stored(folder: Path, name: str, pixels: Array) -> str:
    """The path of a file with these pixels."""
    folder.mkdir(exist_ok=True)
    PIL.Image.fromarray(pixels).save(folder / f"{name}.png")
    return str(folder / f"{name}.png")


def _chosen(examples: Sequence[Any], index: Any) -> Any:
    if type(index) is not int or not 0 <= index < len(examples):
        raise UserError(f"there is no example {index}")
    return examples[index]


def _telling(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler whose refusals are shown to the visitor."""

    @functools.wraps(handler)
    def event(*values: Any) -> Any:
        try:
            return handler(*values)
        except UserError as error:
            raise _refused(error) from None

    return event


def _refused(error: UserError) -> gr.Error:
    text = _sentence(str(error))
    return gr.Error(text, title="That did not work", duration=20, print_exception=False)


def _with_notes(text: str, notes: list[str]) -> str:
    """A text, with a paragraph for each note."""
    return "\n\n".join([text, *(f"⚠ {_sentence(note)}" for note in notes)])


def _sentence(text: str) -> str:
    """A message as a sentence: with a full stop, and with a capital letter unless it begins with a name."""
    text = text.rstrip(".") + "."
    first = text.split()[0]
    is_name = first in SOLVERS or not first.rstrip(",;:").isalpha()
    return html.escape(text if is_name else text[:1].upper() + text[1:], quote=False)


def _warn(error: UserError) -> str:
    """Show a warning, and return its text."""
    gr.Warning(_sentence(str(error)), title="That did not work", duration=20)
    return f"⚠ {_sentence(str(error))}"
