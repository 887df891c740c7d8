"""The generated parts of the documentation: tables, loops and the command line.

`<!-- generated: NAME -->` in a page is replaced by the result of the function NAME below.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddc.cli import available, main
from ddc.errors import UserError
from ddc.evaluation.experiments import EXPERIMENTS
from ddc.networks import PRESETS
from ddc.operators import OPERATORS, LinearOperator, Operator, SVDOperator
from ddc.problems import DETECTED, TASKS, make_problem
from ddc.solvers import SOLVERS
from ddc.solvers.base import Solver
from ddc.training.settings import LoopSettings

EXAMPLES = Path(__file__).parents[1] / "examples"

# The middle of each loop in the papers' symbols; ā is the product of 1 − β, s the next, lower timestep.
EQUATIONS = {
    "ddc": "x̂0 ← x̂0 − Δφ(y, x̂0, t)\nx_s ~ q(x_s | x_t, x̂0)",
    "one-pass": "x = 0 − Δφ(y, 0, T)",
    "dps": "x_s ~ q(x_s | x_t, x̂0)\nx_s ← x_s − ζ ∇ₓₜ ‖y − A(x̂0)‖",
    "ddnm": "x̂0 ← x̂0 − A†(A x̂0 − y)\nx_s = √ā_s x̂0 + √(1−ā_s) (η z + √(1−η²) ε̂)",
    "ddrm": (
        "in the basis V, with ȳ = Uᵀy/s_i:\n"
        "s_i = 0: x̄_s = x̄0 + σ_s (√(1−η²) ε̄ + η z)\n"
        "σ_s < σ/s_i: x̄_s = x̄0 + σ_s (√(1−η²) (ȳ − x̄0) s_i/σ + η z)\n"
        "else: x̄_s = (1−η_b) x̄0 + η_b ȳ + √(σ_s² − η_b² σ²/s_i²) z"
    ),
    "pigdm": ("g = (∂x̂0/∂x_t)ᵀ Aᵀ(AAᵀ + σ²/r² I)⁻¹ (y − A x̂0), r² = 1−ā_t\nx_s = DDIM(η) + √(ā_t ā_s) g"),
    "reddiff": "x_t = √ā μ + √(1−ā) z\nμ ← Adam on ½‖y − A μ‖² + λ √((1−ā)/ā) (ε̂ − z)ᵀ μ",
    "pnp-admm": "x ← argmin ½‖A x − y‖² + ρ/2 ‖x − v + u‖²\nv ← D(x + u)\nu ← u + x − v",
    "cddb": "I²SB's step\nx_m ← x_m − c (α²/S_n²) ∇‖A x̂0 − y‖²",
    "i2sb": "x_m ~ N((α² x̂0 + S_m² x_n)/S_n², α² S_m²/S_n²)\nα² = S_n² − S_m²",
    "mcg": "x' = DPS's update\nx_s = (I − A†A) x' + A†(√ā_s y + √(1−ā_s) A z)",
    "dds": "x̂0 ← CG on (I + γ AᵀA) x = x̂0 + γ Aᵀy, at σ = 0 on AᵀA x = Aᵀy\nx_s by DDNM's noise rule",
    "diffpir": (
        "x̂0 ← argmin ‖A x − y‖² + ρ_t ‖x − x̂0‖²\nε̂' = (x_t − √ā_t x̂0)/√(1−ā_t)\n"
        "x_s = √ā_s x̂0 + √(1−ā_s) (√(1−ζ) ε̂' + √ζ z)"
    ),
    "posterior": "m = D(·, y, ∞) = E[x0 | y]\n"
    "blurs, in rounds: r = argmin ‖A r − y‖²/σ² + ‖r − m‖²/τ², m ← D(·, r, ∞) for white noise τ, which falls\n"
    "generator: x ← m, x ← G(x + n z, y, n) for each n, m + realism · (x − m)\n"
    "with a sharp estimate: x ← G(x + n z, y, n, max(realism, ½)), m + min(2 · realism, 1) · (x − m)\n"
    "sharp, in wide holes: x ← patches of m that continue it, in the end the mean of these and G\n"
    "SDE: x̂0 = D(v, y, n), v ← DPM-Solver++(2M) from n to the next lower noise level",
    "psld": "z_s by DDIM from ẑ0\nz_s ← z_s − ∇_z (ω ‖y − A D(ẑ0)‖ + γ ‖ẑ0 − E(A†y + (I − A†A) D(ẑ0))‖)",
    "resample": (
        "z_s by DDIM, and − ζ ā_t ∇_z ‖y − A D(ẑ0)‖\n"
        "now and then: ẑ0(y) = argmin ‖y − A D(z)‖ from ẑ0 (in pixels first: E of the x nearest to D(ẑ0))\n"
        "z_s ~ N((σ² √ā_s ẑ0(y) + (1−ā_s) z_s)/(σ² + 1−ā_s), σ² (1−ā_s)/(σ² + 1−ā_s)), σ² = γ β̃_t"
    ),
    "hgu": (
        "z_s ~ q(z_s | z_t, ẑ0), g = ∇_z ‖y − A D(ẑ0)‖\nm ← η₁ m + (1−η₁) g, v ← η₂ v + (1−η₂) g²\n"
        "z_s ← z_s − ζ m/(1−η₁) / √(v/(1−η₂))"
    ),
    "unconditional": "x_s ~ q(x_s | x_t, x̂0)",
    "pinv": "x = A†y",
    "autoencoder": "x = D(E(A†y))",
}


# Steps and evaluations that depend on the network: those of the shipped one.
OF_SHIPPED = {"posterior": ("1 or 2; SDE: 20", "1 (mean) or 2; 20 for a sample with `sampler=sde`")}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: GENERATED[found[1]](), markdown)


def tasks() -> str:
    rows = ["| task | what happened to the picture | operator |", "|---|---|---|"]
    for name, text in TASKS.items():
        try:
            operator = type(make_problem(name, size=(64, 64)).operator).__name__
        except UserError:  # needs a file of the reader's
            operator = {"blur": "KernelBlur", "inpaint": "Inpaint"}.get(name, "yours")
        rows.append(f"| `{name}` | {text} | `{operator}` |")
    classes = {"jpeg": "`JPEG`", "deblur": "`GaussianBlur` or `KernelBlur`", "auto": "one of these"}
    for name, text in DETECTED.items():  # these restore; they cannot degrade
        rows.append(f"| `{name}` | {text} | {classes[name]} |")
    return "\n".join(rows)


def operators() -> str:
    rows = ["| operator | class | | kind | settings |", "|---|---|---|---|---|"]
    for name, kind in OPERATORS.items():
        rows.append(
            f"| `{name}` | [`{kind.__name__}`][{kind.__module__}.{kind.__name__}] | {_line(kind)} | {_kind(kind)} | "
            f"{_parameters(kind)} |"
        )
    return "\n".join(rows)


def solver_table() -> str:
    rows = ["| solver | | steps | network evaluations | operators | needs |", "|---|---|---|---|---|---|"]
    for name, kind in SOLVERS.items():
        solver = kind()
        steps, evaluations = OF_SHIPPED.get(name) or (solver.steps, solver.evaluations())
        rows.append(
            f"| [`{name}`](#{name}) | {_line(kind)} | {steps} | {evaluations} | "
            f"{_kind(kind.operators)} | {'latent prior' if kind.latent else ', '.join(kind.needs) or 'nothing'} |"
        )
    return "\n".join(rows)


def matrix() -> str:
    """Which solver takes which task, without noise and with it."""
    shown = [name for name in TASKS if name not in ("blur", "inpaint", "custom", "sr2", "sr3", "sr8")]
    rows = [f"| | {' | '.join(f'`{name}`' for name in shown)} |", "|---" * (len(shown) + 1) + "|"]
    for name, kind in SOLVERS.items():
        rows.append(f"| `{name}` | {' | '.join(_takes(kind(), task) for task in shown)} |")
    return "\n".join(rows)


def solvers() -> str:
    """Each solver: its source, its equation beside the code that computes it, and its settings."""
    parts = []
    for name, kind in SOLVERS.items():
        module = inspect.getmodule(kind)
        assert module is not None and module.__doc__
        equation = re.sub(r"_([a-z])", r"<sub>\1</sub>", EQUATIONS[name]).replace("\n", "<br>")
        parts += [
            f"## {name}",
            module.__doc__.strip(),
            '<div class="beside" markdown>',
            f'<p class="equation">{equation}</p>',
            f"```python\n{_loop(kind)}\n```",
            "</div>",
            _settings(kind),
        ]
    return "\n\n".join(parts)


def presets() -> str:
    rows = ["| for | preset | class | channels |", "|---|---|---|---|"]
    for what in ("prior", "network", "autoencoder", "latent"):
        for name, config in PRESETS[what].items():
            channels = config.get("channels") or config["block_out_channels"]
            rows.append(f"| {what} | `{name}` | `{config['_class_name']}` | {', '.join(map(str, channels))} |")
    return "\n".join(rows)


def loop_settings() -> str:
    return _settings(LoopSettings)


def experiments() -> str:
    rows = ["| name | | tasks | solvers |", "|---|---|---|---|"]
    for name, experiment in EXPERIMENTS.items():
        rows.append(
            f"| `{name}` | {experiment.title} | {', '.join(experiment.tasks)} | {', '.join(experiment.solvers)} |"
        )
    return "\n".join(rows)


def own_solver() -> str:
    return _class_of_example("own_solver.py", "GradientStep")


def own_operator() -> str:
    return _class_of_example("own_operator.py", "LostRows")


def _class_of_example(name: str, wanted: str) -> str:
    tree = ast.parse(text := (EXAMPLES / name).read_text())
    found = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == wanted)
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    source = "\n".join(text.splitlines()[first - 1 : found.end_lineno])
    return f"```python\n{source}\n```"


def commands() -> str:
    """The help of every command and subcommand, as the command line prints it."""
    parts = []
    for name, (place, summary) in available().items():
        parts += [f"## ddc {name}", f"{summary[:1].upper()}{summary[1:]}.", f"```text\n{_help(name)}\n```"]
        for subcommand in _subcommands(place):
            parts += [f"### ddc {name} {subcommand}", f"```text\n{_help(name, subcommand)}\n```"]
    return "\n\n".join(parts)


def _subcommands(place: str) -> list[str]:
    """The names of a command's subcommands: the members of a union among its fields, as the command line knows them."""
    module, _, name = place.partition(":")
    command = getattr(importlib.import_module(module), name)
    fields = typing.get_type_hints(command, include_extras=True).values()
    unions = [typing.get_args(typing.get_args(hint)[0]) for hint in fields if typing.get_args(hint)]
    members = [typing.get_args(member) for union in unions for member in union]
    return [member[1].name for member in members if len(member) == 2 and hasattr(member[1], "name")]


def _help(*words: str) -> str:
    output = io.StringIO()
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "92"
    try:
        with contextlib.redirect_stdout(output):
            main([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    plain = re.sub(r"\x1b\[[\d;]*m", "", output.getvalue()).strip()
    return "\n".join(textwrap.fill(line, 96) if len(line) > 96 else line for line in plain.splitlines())


def _takes(solver: Solver, task: str) -> str:
    size = (64, 64)
    try:
        solver.check(make_problem(task, 0.0, size))
    except UserError:
        return ""
    try:
        solver.check(make_problem(task, 0.05, size))
    except UserError:
        return "without noise"
    return "✓"


def _kind(kind: type) -> str:
    if issubclass(kind, SVDOperator):
        return "linear, with an SVD"
    if issubclass(kind, LinearOperator):
        return "linear"
    return "any" if kind is Operator else "not linear"


def _line(kind: type) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph, maxsplit=1)[0]


def _parameters(kind: type) -> str:
    """The parameters of an operator's constructor, without `*args` and `**kwargs` that it passes on."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(kind).parameters.values()
    return ", ".join(f"`{each.name}`" for each in found if each.kind not in variable) or "none"


def _loop(kind: type[Solver]) -> str:
    """The part of `solve` that repeats; all of its body where nothing does."""
    lines = textwrap.dedent(inspect.getsource(kind.solve)).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("    for ")), None)
    if start is None:
        start = 1 + next(i for i, line in enumerate(lines) if line.startswith("def "))
    kept = [line for line in lines[start:] if "run.show(" not in line]
    loop = textwrap.dedent("\n".join(kept))
    owners = (kind, importlib.import_module(kind.__module__))
    for name in dict.fromkeys(re.findall(r"\b(\w+_step)\(", loop)):  # and the steps that it calls
        function = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
        loop += "\n\n" + textwrap.dedent(inspect.getsource(function))
    return loop.rstrip()


def _settings(kind: type) -> str:
    """Fields, their defaults, and the texts below them."""
    rows = ["| setting | default | |", "|---|---|---|"]
    texts = _field_texts(kind)
    for field in dataclasses.fields(kind):
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default}`"
        rows.append(f"| `{field.name}` | {default} | {texts.get(field.name, '')} |")
    return "\n".join(rows)


def _field_texts(kind: type) -> dict[str, str]:
    """The texts below the fields of a class; of those that have none, the texts of its base classes."""
    pattern = re.compile(r'^    (\w+): [^\n]*\n    """(.*?)"""', re.MULTILINE | re.DOTALL)
    owners = [owner for owner in reversed(kind.__mro__) if dataclasses.is_dataclass(owner)]
    found = (pattern.findall(inspect.getsource(owner)) for owner in owners)
    return {name: " ".join(text.split()) for texts in found for name, text in texts}


GENERATED: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        *(tasks, operators, solver_table, matrix, solvers),
        *(presets, loop_settings, experiments, commands, own_solver, own_operator),
    )
}
