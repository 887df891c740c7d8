"""The larger components of the page."""

from collections.abc import Sequence
from typing import Any

import gradio as gr

from ddc.web.uploads import Upload

CANVAS = 768  # pixels of the picture that holes are painted on


def picture_input(label: str, name: str) -> Any:
    """Where a picture is dropped."""
    settings: dict[str, Any] = {"type": "filepath", "image_mode": None, "sources": ["upload", "clipboard"]}
    return gr.Image(label=label, height=250, buttons=[], elem_id=name, **settings)


def example_gallery(uploads: Sequence[Upload]) -> Any:
    """The examples to click on."""
    samples, shown = [[str(upload.path)] for upload in uploads], gr.Image(visible=False, render=False)
    return gr.Dataset(label="Examples", components=[shown], samples=samples, type="index")


def painting_editor() -> Any:
    """The brush for holes."""
    return gr.ImageEditor(
        label="Paint over what is to be filled or removed",
        type="numpy",
        sources=[],
        transforms=[],
        layers=False,
        brush=gr.Brush(default_size=16, colors=["#ff2d78"], color_mode="fixed"),
        canvas_size=(CANVAS, CANVAS),
        height=420,
        buttons=[],
        visible=False,
        elem_id="editor",
    )


def _result(label: str, **settings: Any) -> Any:
    return gr.Image(label=label, format="png", interactive=False, elem_classes="result", **settings)


def restore_results() -> list[Any]:
    """→ slider, summary, uncertainty, files, command, Python."""
    shown: dict[str, Any] = {"format": "png", "interactive": False, "buttons": ["fullscreen"]}
    slider = gr.ImageSlider(label="Before and after", max_height=620, **shown)
    summary = gr.Markdown(elem_id="summary")
    label, buttons = (
        "Uncertainty: pale where the samples differ, or where a pixel may be far off",
        ["download", "fullscreen"],
    )
    uncertainty = _result(label, visible=False, height=420, buttons=buttons)
    return [slider, summary, uncertainty, *_downloads("shell", "python")]


def no_result() -> tuple[Any, ...]:
    """→ slider, summary, uncertainty, files, command, Python, all empty."""
    hidden = gr.update(value=None, visible=False)
    return None, "", hidden, hidden, "", ""


def compare_results() -> list[Any]:
    """→ clean, degraded, two results, table, files, commands."""
    pictures = []
    for labels in (("Clean", "Degraded"), ("Solver", "Compared with")):
        with gr.Row():
            pictures += [_result(label, height=300, buttons=["fullscreen"]) for label in labels]
    return [*pictures, gr.Markdown(), *_downloads("shell")]


def _downloads(*languages: str) -> list[Any]:
    """The files of a result, and code that makes them."""
    hidden: dict[str, Any] = {"visible": False, "interactive": False, "elem_classes": "files"}
    files = gr.File(label="Download", file_count="multiple", **hidden)
    labels = {"shell": "Command line", "python": "Python"}
    plain: dict[str, Any] = {"interactive": False, "wrap_lines": True, "lines": 1}
    with gr.Accordion("The same on your own computer", open=False):
        codes = [gr.Code(label=labels[name], language=name, **plain) for name in languages]
    return [files, *codes]
