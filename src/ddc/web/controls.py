"""The controls of the page. Each is one field of a form: its default, its component and what it means are stated here
once. The page's components, the arguments of its handlers and the commands that it shows are made from these fields."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ddc.errors import UserError
from ddc.estimates import BlurEstimate
from ddc.jobs import STRENGTHS, Options
from ddc.problems import TASKS
from ddc.solvers.posterior import Posterior

Form = TypeVar("Form")

KINDS = AUTO, SUPER_RESOLUTION, BLUR, NOISE, JPEG, HOLES, REMOVE = (
    "Find out",
    "Low resolution",
    "Blur",
    "Noise",
    "JPEG artefacts",
    "Holes",
    "Remove something",
)
PAINTED = (HOLES, REMOVE)  # for which the brush is shown
SHAPES = SOFT, DISC, LINE = "Soft", "Out of focus", "The camera moved"  # a Gaussian, a disc, a line
WIDTH = "Width, radius or length"
DEVIATION = (
    "Standard deviation, where black is 0 and white is 1. The strength multiplies it. At 0 it is estimated, except for "
    "holes and JPEG artefacts"
)
GENTLE = "Low keeps more of the picture, high removes more"
LARGEST_SEED = 2**31
REALISM = (
    "0: least error; 0.5: what the model prefers, with wide holes filled freely; 1: a sample, with invented detail"
)
GUESSING = "Several show where the model is guessing"
TRY_TASKS = [name for name in TASKS if name not in ("blur", "inpaint", "custom", "colorize")]  # those that need no file


@dataclass(frozen=True)
class Control:
    """How the page shows a field of a form."""

    component: str  # a component of Gradio
    label: str
    settings: dict[str, Any]  # of the component
    group: str  # the part of the form that it belongs to
    row: str  # controls with the same name here share a row
    visible: Callable[[Any], bool]


def control(
    default: Any,
    component: str,
    label: str,
    span: tuple[float, float, float] | None = None,
    *,
    group: str = "details",
    row: str = "",
    visible: Callable[[Any], bool] = lambda form: True,
    **settings: Any,
) -> Any:
    """A field of a form. `span` is the minimum, the maximum and the step of a slider."""
    if span:
        settings |= dict(zip(("minimum", "maximum", "step"), span, strict=True))
    return field(default=default, metadata={"control": Control(component, label, settings, group, row, visible)})


def controls(form: Any, group: str | None = None) -> dict[str, Control]:
    """The controls of a form, or of one of its groups, by the names of their fields, in order."""
    found = {one.name: one.metadata["control"] for one in fields(form)}
    return {name: control for name, control in found.items() if group in (None, control.group)}


def from_values(form: type[Form], values: Sequence[Any], settings: Mapping[str, dict[str, Any]] | None = None) -> Form:
    """A form from the values of its components, in the order of its fields. An empty number is 0. A value that the
    component does not offer is refused; `settings`, by fields, replace those of the controls."""
    given = zip(fields(form), values, strict=True)  # type: ignore[arg-type]
    return form(*(_checked(one, value, (settings or {}).get(one.name, {})) for one, value in given))


def _checked(one: Any, value: Any, settings: dict[str, Any]) -> Any:
    control = one.metadata["control"]
    settings = control.settings | settings
    offered = [choice[1] if isinstance(choice, tuple) else choice for choice in settings.get("choices", ())]
    if not isinstance(one.default, str):
        try:
            value = type(one.default)(value or 0)
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"{control.label} is {str(value)[:40]!r}; expected a number") from None
    low, high = settings.get("minimum", -LARGEST_SEED), settings.get("maximum", LARGEST_SEED)
    if offered and value not in offered:
        raise UserError(f"{str(value)[:40]!r} is not known; expected one of {', '.join(map(str, offered))}")
    if not isinstance(value, str) and not low <= value <= high and value != one.default:
        raise UserError(f"{control.label} is {value:g}; expected {low:g} to {high:g}")
    return value


def _is(kind: str, *shapes: str) -> Callable[["Choices"], bool]:
    return lambda form: form.kind == kind and (not shapes or form.shape in shapes)


def _has_strength(form: "Choices") -> bool:
    return form.kind in (AUTO, BLUR, NOISE)


@dataclass(frozen=True)
class Choices:
    """What a visitor chose for a photo. An upload sets the controls of the groups "kind" and "details"."""

    kind: str = control(AUTO, "Radio", "What is wrong with it?", choices=KINDS, group="kind")
    scale: int = control(4, "Radio", "Enlarge how many times?", choices=(2, 3, 4, 8), visible=_is(SUPER_RESOLUTION))
    shape: str = control(SOFT, "Radio", "Which blur?", choices=SHAPES, visible=_is(BLUR))
    blur: float = control(3.0, "Slider", "Pixels", (0.5, 30, 0.05), info=WIDTH, row="blur", visible=_is(BLUR))
    softness: float = control(
        0.0, "Slider", "Softness", (0, 3, 0.1), info="A Gaussian on top", row="blur", visible=_is(BLUR, DISC, LINE)
    )
    angle: float = control(
        45.0, "Slider", "Degrees", (0, 180, 1), info="Counter-clockwise", row="blur", visible=_is(BLUR, LINE)
    )
    quality: int = control(10, "Slider", "JPEG quality", (1, 100, 1), visible=_is(JPEG))
    strength: str = control("medium", "Radio", "Strength", choices=tuple(STRENGTHS), info=GENTLE, visible=_has_strength)
    sigma: float = control(0.0, "Slider", "Noise", (0, 0.3, 0.001), info=DEVIATION, group="more")
    solver: str = control("ddc", "Dropdown", "Solver", group="more", row="solver")
    steps: int = control(5, "Slider", "Steps", (1, 1000, 1), group="more", row="solver")
    seed: int = control(0, "Number", "Seed", group="more", row="samples", precision=0)
    samples: int = control(1, "Slider", "Samples", (1, 8, 1), info=GUESSING, group="more", row="samples")
    realism: float = control(0.5, "Slider", "Realism", (0, 1, 0.05), info=REALISM, group="more")
    doubt: bool = control(False, "Checkbox", "Show how far each pixel may be off", group="more")
    format: str = control("png", "Radio", "Save as", choices=("png", "jpg", "webp", "tiff"), group="more")

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
            AUTO: "auto",
            SUPER_RESOLUTION: f"sr{self.scale}",
            BLUR: blurs[self.shape].task,
            HOLES: "inpaint",
            REMOVE: "inpaint",
            JPEG: f"jpeg{self.quality}",
            NOISE: "denoise",
        }
        return tasks[self.kind]

    @property
    def options(self) -> Options:
        """The options of the restoration."""
        names = ["solver", "steps", "seed", "samples"]
        if self.kind == AUTO and (self.solver, self.steps) == (Choices.solver, Choices.steps):
            names = names[2:]  # where none is chosen, the plan may prefer a quicker solver
        elif self.kind == AUTO and (self.solver, self.steps) == (Posterior.name, Posterior.steps):
            names.remove("steps")  # and a realism
        if self.solver == Posterior.name and self.realism != Choices.realism:
            names.append("realism")
        names += ["doubt"] if self.doubt else []
        estimated = self.kind in (NOISE, BLUR, SUPER_RESOLUTION) and not self.sigma
        if self.kind == AUTO or estimated:
            names += ["strength"] if _has_strength(self) else []
            return {name: getattr(self, name) for name in names}  # type: ignore[return-value]
        sigma = round(self.sigma * (STRENGTHS[self.strength] if _has_strength(self) else 1), 4)
        return {"sigma": sigma, **{name: getattr(self, name) for name in names}}  # type: ignore[typeddict-item]


@dataclass(frozen=True)
class Trial:
    """What a visitor chose to try: a degradation, and two solvers to restore it."""

    task: str = control("sr4", "Dropdown", "How to degrade it", choices=[(f"{t}: {TASKS[t]}", t) for t in TRY_TASKS])
    sigma: float = control(0.05, "Slider", "Noise to add", (0, 0.3, 0.005))
    solver: str = control("ddc", "Dropdown", "Solver", row="solver")
    steps: int = control(5, "Slider", "Steps", (1, 1000, 1), row="solver")
    other: str = control("ddnm", "Dropdown", "Compared with", row="other")
    other_steps: int = control(20, "Slider", "Steps", (1, 1000, 1), row="other")
    longest: int = control(128, "Slider", "Longest side in pixels", (64, 512, 32), row="size")
    seed: int = control(0, "Number", "Seed", row="size", precision=0)

    @property
    def options(self) -> list[Options]:
        """The options of the two restorations."""
        solvers = ((self.solver, self.steps), (self.other, self.other_steps))
        return [{"sigma": self.sigma, "solver": solver, "steps": steps, "seed": self.seed} for solver, steps in solvers]
