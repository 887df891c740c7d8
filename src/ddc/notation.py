"""The notation of the command line: NAME, or NAME:key=value:key=value; entries of a list are separated by commas.

ddnm:eta=0.5:steps=50        a solver with settings
jpeg10:sigma=0               a task with its own noise level
jpeg5-95:weight=0.5          a range of tasks in a training mix, with its weight
runs/net:name=ours           a model folder with a name for the tables
"""

import contextlib
import io
import math
import re
import typing
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ddc.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One entry: its name and its settings, as texts."""

    name: str
    settings: dict[str, str]

    @staticmethod
    def parse(text: str) -> "Entry":
        # a colon that no `key=` follows belongs to the name, as in C:\models or my_op.py:MyOp
        name, *settings = re.split(r":(?=[\w-]*=)", text.strip())
        pairs = [setting.split("=", 1) for setting in settings]
        for key, value in pairs:
            if not key or not value:
                raise UserError(f"{text!r} has an empty setting; expected name:key=value, as in ddnm:steps=50")
        return Entry(name, {key.replace("-", "_"): value for key, value in pairs})

    def number(self, key: str, default: float) -> float:
        """The setting `key` as a number."""
        return to_number(self.settings[key], f"{key} of {self.name}") if key in self.settings else default

    def check_keys(self, *known: str) -> "Entry":
        """Refuse settings other than these."""
        unknown = sorted(set(self.settings) - set(known))
        if unknown:
            raise UserError(f"{self.name} has no setting {unknown[0]!r}; it takes {', '.join(known)}")
        return self


def split(text: str) -> list[str]:
    """The parts of a list, which is separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def to_number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{what} is {text!r}; expected a number")
    return value


def with_settings(kind: type[T], name: str, settings: dict[str, Any]) -> T:
    """An instance of the dataclass `kind`; values may be texts, and are checked against the types of its fields."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for key in settings:
        if key not in known:
            raise UserError(f"{name} has no setting {key!r}; it takes {', '.join(known)}")
    return kind(**{key: _converted(name, key, value, hints[key]) for key, value in settings.items()})


def _converted(name: str, key: str, value: Any, hint: Any) -> Any:
    import tyro

    text = str(value)
    text = text.capitalize() if text.lower() in ("true", "false", "none") else text
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            made = tyro.cli(hint, args=[text], console_outputs=False)
    except SystemExit:
        made = math.nan
    if isinstance(made, float) and not math.isfinite(made):
        raise UserError(f"{name}'s setting {key} cannot be {value!r}; expected {_in_words(hint)}")
    return made


def _in_words(hint: Any) -> str:
    """The values of a type: "a whole number or none"."""
    if parts := typing.get_args(hint):
        return " or ".join(_in_words(part) for part in parts)
    words = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}
    return words.get(hint, str(hint))


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds < 1.5:
        return "a second"
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"
