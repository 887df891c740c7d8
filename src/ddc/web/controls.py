"""The controls of the page. Each is one field of a form: its default, its component and what it means are stated here
once. The page's components, the arguments of its handlers and the commands that it shows are made from these fields."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ddc.errors import UserError
from ddc.estimates import BlurEstimate
from ddc.jobs import Options
from ddc.problems import TASKS

Form = TypeVar("Form")

KINDS = SUPER_RESOLUTION, BLUR, HOLES, JPEG, NOISE = (
    "Low resolution",
    "Blur",
    "Holes",
    "JPEG artefacts",
    "Noise",
)
SHAPES = SOFT, DISC, LINE = "Soft", "Out of focus", "The camera moved"  # a Gaussian, a disc, a line
# The tasks that "Try it" offers: those that need no file.
TRY_TASKS = [name for name in TASKS if name not in ("blur", "inpaint", "custom")]


@dataclass(frozen=True)
class Control:
    """How the page shows a field of a form."""

    component: str  # a component of Gradio
    label: str
    settings: dict[str, Any]  # of the component
    group: str = "details"  # the part of the form that it belongs to
    row: str = ""  # controls with the same name here share a row
    visible: Callable[[Any], bool] = lambda form: True


def radio(default: Any, label: str, choices: Sequence[Any], **placing: Any) -> Any:
    return _field(default, Control("Radio", label, {"choices": choices}, **placing))


def dropdown(default: str, label: str, choices: Sequence[Any] = (), **placing: Any) -> Any:
    return _field(default, Control("Dropdown", label, {"choices": choices}, **placing))


def slider(
    default: float, label: str, span: tuple[float, float, float], info: str | None = None, **placing: Any
) -> Any:
    """A slider; `span` is its minimum, maximum and step."""
    settings = {"minimum": span[0], "maximum": span[1], "step": span[2], "info": info}
    return _field(default, Control("Slider", label, settings, **placing))


def number(default: int, label: str, **placing: Any) -> Any:
    return _field(default, Control("Number", label, {"precision": 0}, **placing))


def _field(default: Any, control: Control) -> Any:
    return field(default=default, metadata={"control": control})


def controls(form: Any, group: str) -> dict[str, Control]:
    """The controls of a form's group by the names of their fields, in order."""
    found = {one.name: one.metadata["control"] for one in fields(form)}
    return {name: control for name, control in found.items() if control.group == group}


def from_values(form: type[Form], values: Sequence[Any]) -> Form:
    """A form from the values of its components, in the order of its fields. An empty number is 0."""
    defaults: list[Any] = [one.default for one in fields(form)]  # type: ignore[arg-type]
    pairs = zip(values, defaults, strict=True)
    return form(*(value if isinstance(default, str) else type(default)(value or 0) for value, default in pairs))


def _is(kind: str, *shapes: str) -> Callable[["Choices"], bool]:
    return lambda form: form.kind == kind and (not shapes or form.shape in shapes)


@dataclass(frozen=True)
class Choices:
    """What a visitor chose for a photo. An upload sets the controls of the groups "kind" and "details"."""

    kind: str = radio(SUPER_RESOLUTION, "What is wrong with it?", KINDS, group="kind")
    scale: int = radio(4, "Enlarge how many times?", (2, 3, 4, 8), visible=_is(SUPER_RESOLUTION))
    shape: str = radio(SOFT, "Which blur?", SHAPES, visible=_is(BLUR))
    blur: float = slider(3.0, "Pixels", (0.5, 30, 0.05), "Width, radius or length", row="blur", visible=_is(BLUR))
    softness: float = slider(
        0.0, "Softness", (0, 3, 0.1), "A Gaussian on top", row="blur", visible=_is(BLUR, DISC, LINE)
    )
    angle: float = slider(45.0, "Degrees", (0, 180, 1), "Counter-clockwise", row="blur", visible=_is(BLUR, LINE))
    quality: int = slider(10, "JPEG quality", (1, 100, 1), visible=_is(JPEG))
    sigma: float = slider(0.0, "Noise", (0, 0.3, 0.001), "Standard deviation, where black is 0 and white is 1")
    solver: str = dropdown("ddc", "Solver", group="more", row="solver")
    steps: int = slider(5, "Steps", (1, 1000, 1), group="more", row="solver")
    seed: int = number(0, "Seed", group="more", row="samples")
    samples: int = slider(
        1, "Samples", (1, 8, 1), "Several show where the model is guessing", group="more", row="samples"
    )

    @property
    def task(self) -> str:
        """The name of the task."""
        for value, known in ((self.kind, KINDS), (self.shape, SHAPES)):
            if value not in known:
                raise UserError(f"{value!r} is not known; expected one of {', '.join(known)}")
        blurs = {
            SOFT: BlurEstimate(width=self.blur),
            DISC: BlurEstimate(radius=self.blur, width=self.softness),
            LINE: BlurEstimate(length=self.blur, angle=self.angle, width=self.softness),
        }
        tasks = {
            SUPER_RESOLUTION: f"sr{self.scale}",
            BLUR: blurs[self.shape].task,
            HOLES: "inpaint",
            JPEG: f"jpeg{self.quality}",
            NOISE: "denoise",
        }
        return tasks[self.kind]

    @property
    def options(self) -> Options:
        """The options of the restoration."""
        own: Options = {
            "solver": self.solver,
            "steps": self.steps,
            "seed": self.seed,
            "samples": self.samples,
        }
        return {"sigma": self.sigma, **own}


@dataclass(frozen=True)
class Trial:
    """What a visitor chose to try: a degradation, and two solvers to restore it."""

    task: str = dropdown("sr4", "How to degrade it", [(f"{name}: {TASKS[name]}", name) for name in TRY_TASKS])
    sigma: float = slider(0.05, "Noise to add", (0, 0.3, 0.005))
    solver: str = dropdown("ddc", "Solver", row="solver")
    steps: int = slider(5, "Steps", (1, 1000, 1), row="solver")
    other: str = dropdown("ddnm", "Compared with", row="other")
    other_steps: int = slider(20, "Steps", (1, 1000, 1), row="other")
    longest: int = slider(128, "Longest side in pixels", (64, 512, 32), row="size")
    seed: int = number(0, "Seed", row="size")

    @property
    def options(self) -> list[Options]:
        """The options of the two restorations."""
        solvers = ((self.solver, self.steps), (self.other, self.other_steps))
        return [{"sigma": self.sigma, "solver": solver, "steps": steps, "seed": self.seed} for solver, steps in solvers]
