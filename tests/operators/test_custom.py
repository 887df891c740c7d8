from pathlib import Path

import pytest
import torch

from ddc.errors import UserError
from ddc.operators import LinearOperator
from ddc.operators.custom import load_operator
from ddc.problems import make_problem

FLIP = """
from ddc.operators import LinearOperator, Operator

class Flip(LinearOperator):
    def forward(self, x):
        return 0.5 * x.flip(-1)

    def adjoint(self, y, size=None):
        return {adjoint}

class Saturate(Operator):
    def forward(self, x):
        return (3 * x).tanh()

class Needy(Operator):
    def __init__(self, amount):
        super().__init__()
        self.amount = amount

    def forward(self, x):
        return x * self.amount

class Halved(Operator):
    def forward(self, x):
        return x[..., ::2, ::2]

class Broken(Operator):
    def forward(self, x):
        return x @ x.new_zeros(3, 3)

class Infinite(Operator):
    def forward(self, x):
        return x / 0

class Flat(Operator):
    def forward(self, x):
        return x.sum()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_op.py"
    path.write_text(FLIP.format(adjoint="0.5 * y.flip(-1)"))
    return path


def test_a_class_in_a_file_is_an_operator(file: Path) -> None:
    operator = load_operator(f"{file}:Flip", (12, 9))
    assert isinstance(operator, LinearOperator)
    x = torch.randn(1, 3, 8, 5)
    assert torch.equal(operator(x), 0.5 * x.flip(-1))
    problem = make_problem("custom", 0.05, operator_file=f"{file}:Saturate")
    assert problem.measure(x).abs().max() <= 1
    assert problem.suggested_solvers() == "ddc, dps, pigdm or reddiff"


def test_a_wrong_adjoint_is_refused(file: Path) -> None:
    file.write_text(FLIP.format(adjoint="0.5 * y"))
    with pytest.raises(UserError, match=r"Flip.adjoint is not the adjoint of its forward.*check flips"):
        load_operator(f"{file}:Flip")


@pytest.mark.parametrize(
    "name, message",
    [
        ("Needy", "without arguments"),
        ("Halved", "to_image"),
        ("Broken", "failed on a batch"),
        ("Infinite", "NaN or infinity"),
        ("Flat", "expected a batch"),
        ("Missing", "no class Missing.*it has Flip, Saturate"),
        ("torch.x", "file.py:Class"),
    ],
)
def test_what_cannot_be_used_is_said(file: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_operator(f"{file}:{name}")
    assert "\n" not in str(caught.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "syntax.py").write_text("def (")
    (tmp_path / "fails.py").write_text("raise RuntimeError('first line\\nsecond line')")
    (tmp_path / "words.txt").write_text("class A: pass")
    for spec, message in [
        ("syntax.py:A", "does not run"),
        ("fails.py:A", "does not run"),
        ("words.txt:A", "must end in .py"),
        ("gone.py:A", "there is no file"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            load_operator(f"{tmp_path}/{spec}")
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"file\.py:Class"):
        load_operator("my_op.py")
