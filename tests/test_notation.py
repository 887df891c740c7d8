"""The notation of the command line: NAME:key=value:key=value, and lists separated by commas."""

from dataclasses import dataclass
from typing import Literal

import pytest

from ddc.errors import UserError
from ddc.notation import Entry, duration, split, to_number, with_settings
from ddc.problems import Task
from ddc.solvers import SOLVERS, make_solver
from ddc.solvers.ddc import DDC
from ddc.solvers.ddnm import DDNM
from ddc.solvers.gradients import PiGDM


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("ddnm", "ddnm", {}),
        ("ddnm:eta=0.5:steps=50", "ddnm", {"eta": "0.5", "steps": "50"}),
        ("pigdm:noise-blind=true", "pigdm", {"noise_blind": "true"}),
        ("jpeg10:sigma=0", "jpeg10", {"sigma": "0"}),
        ("jpeg5-95:weight=0.5", "jpeg5-95", {"weight": "0.5"}),
        ("inpaint92:lpips=0.4", "inpaint92", {"lpips": "0.4"}),
        ("motion21@-30+gauss0.6:sigma=0.05", "motion21@-30+gauss0.6", {"sigma": "0.05"}),
        ("runs/net:name=ours", "runs/net", {"name": "ours"}),
        (r"C:\models\net:name=ours", r"C:\models\net", {"name": "ours"}),
        ("my_op.py:MyOp", "my_op.py:MyOp", {}),
        ("a:b=c=d", "a", {"b": "c=d"}),
        ("  sr4 ", "sr4", {}),
        ("", "", {}),
    ],
)
def test_every_form_of_an_entry(text: str, name: str, settings: dict[str, str]) -> None:
    assert Entry.parse(text) == Entry(name, settings)


@pytest.mark.parametrize("text", ["ddnm:eta=", "ddnm:=0.5", "ddnm:eta=0.5:steps="])
def test_empty_settings_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"empty setting; expected name:key=value"):
        Entry.parse(text)


def test_numbers_and_known_keys() -> None:
    entry = Entry.parse("jpeg10:sigma=0.05:weight=2")
    assert entry.number("sigma", 0.1) == 0.05 and entry.number("lpips", 0.1) == 0.1
    assert entry.check_keys("sigma", "weight") is entry
    with pytest.raises(UserError, match="jpeg10 has no setting 'weight'; it takes sigma, lpips"):
        entry.check_keys("sigma", "lpips")
    with pytest.raises(UserError, match="sigma of jpeg10 is 'much'; expected a number"):
        Entry.parse("jpeg10:sigma=much").number("sigma", 0.0)


@pytest.mark.parametrize("text", ["", "much", "nan", "inf", "1,5"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(UserError, match=r"steps is .*expected a number"):
        to_number(text, "steps")
    assert to_number("1e-3", "steps") == 0.001


def test_lists() -> None:
    assert split("sr4, gauss:sigma=0 ,,jpeg10") == ["sr4", "gauss:sigma=0", "jpeg10"]
    assert split("") == split(" , ") == []


@dataclass(frozen=True)
class Settings:
    count: int = 1
    share: float = 0.5
    given: float | None = 2.0
    on: bool = False
    kind: Literal["even", "odd"] | None = None


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "3", 3),
        ("count", 3, 3),
        ("share", "1", 1.0),
        ("share", 0.25, 0.25),
        ("given", "none", None),
        ("given", "0.1", 0.1),
        ("on", "true", True),
        ("on", "False", False),
        ("on", True, True),
        ("kind", "odd", "odd"),
        ("kind", "None", None),
    ],
)
def test_settings_take_the_types_of_their_fields(key: str, text: object, value: object) -> None:
    made = with_settings(Settings, "thing", {key: text})
    assert getattr(made, key) == value and type(getattr(made, key)) is type(value)
    assert {name: v for name, v in vars(made).items() if name != key} == {
        name: v for name, v in vars(Settings()).items() if name != key
    }


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("count", "1.5", "thing's setting count cannot be '1.5'; expected a whole number"),
        ("count", "many", "expected a whole number"),
        ("share", "much", "expected a number"),
        ("share", "nan", "expected a number"),
        ("share", "inf", "expected a number"),
        ("on", "maybe", "expected true or false"),
        ("kind", "prime", "expected even or odd"),
        ("size", "1", "thing has no setting 'size'; it takes count, share, given, on, kind"),
    ],
)
def test_settings_that_are_refused(key: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_settings(Settings, "thing", {key: text})


def test_solvers_with_settings() -> None:
    assert make_solver("ddnm:eta=0.5:steps=50") == DDNM(eta=0.5, steps=50)
    assert make_solver("ddnm:eta=0.5:steps=50", 7) == DDNM(eta=0.5, steps=7)  # --steps is the stronger
    assert make_solver("pigdm:noise_blind=true:steps=50") == PiGDM(noise_blind=True, steps=50)
    assert make_solver("ddc:spacing=even") == DDC(spacing="even")
    assert make_solver(DDNM(eta=0.5), 7) == DDNM(eta=0.5, steps=7)
    assert make_solver("ddnm", options={"eta": 1}) == DDNM(eta=1.0)
    assert all(make_solver(name) == SOLVERS[name]() for name in SOLVERS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic:eta=1", "the solver 'magic' is not known; expected one of ddc"),
        ("ddnm:zeta=1", "ddnm has no setting 'zeta'; it takes steps, eta"),
        ("ddnm:eta=much", "ddnm's setting eta cannot be 'much'; expected a number"),
        ("ddnm:steps=0", "steps must be at least 1, not 0"),
        ("ddnm:eta", "the solver 'ddnm:eta' is not known"),
    ],
)
def test_solvers_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_solver(text)


def test_a_task_is_the_name_of_an_entry() -> None:
    entry = Entry.parse("motion21@30+gauss0.6:sigma=0.05")
    task = Task.parse(entry.name)
    assert task.kind == "motion" and task.numbers == {"length": 21, "angle": 30, "softness": 0.6}
    assert Task.parse(task) is task and entry.number("sigma", 0) == 0.05


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "a second"), (1.6, "2 seconds"), (89, "89 seconds"), (120, "2 minutes"), (5400, "1.5 hours")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
