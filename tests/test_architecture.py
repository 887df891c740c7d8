"""The shape of the source: layers, sizes of files and functions, and the way of a picture through the files."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from skimage import data

import processes
from ddc.images import Picture

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ddc"
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

# ---------------------------------------------------------------------------------------------------------
# layers

# From the bottom to the top. Each line is a group: its files may import each other and everything above the line.
# Files of one layer that stand on different lines, with the same number, may not import each other.
GROUPS: list[tuple[int, tuple[str, ...]]] = [
    (0, ("__init__.py", "errors.py", "noise.py", "notation.py", "pickles.py", "hub.py")),
    (1, ("images.py", "formats.py", "jpegfile.py", "storage.py", "datasets.py")),
    (2, ("operators/", "problems.py")),
    (3, ("eight_bits.py", "networks.py", "guided.py", "priors.py", "flows.py", "latents.py")),
    (3, ("perceptual.py", "inception.py", "faces.py")),
    (4, ("solvers/",)),
    (4, ("cuda.py", "fused.py", "kernels.py", "kernels_fp8.py")),
    (5, ("telling.py", "tiling.py", "estimates.py", "diagnosis/", "precision.py", "fast.py", "jobs.py", "pipeline.py")),
    (5, ("convert.py",)),
    (5, ("degrade.py",)),
    (6, ("training/",)),
    (6, ("evaluation/",)),
    (6, ("onnx/",)),
    (7, ("cli/", "__main__.py", "cluster.py", "fleet.py")),
    (7, ("web/",)),
    (7, ("demo.py",)),
]

# (importer, imported) → why it is allowed
ALLOWED: dict[tuple[str, str], str] = {
    ("__init__.py", "*"): "the names at the top of the package, each imported when it is first used",
    ("cli/*", "web/*"): "`ddc web` starts the page",
    ("cli/*", "demo.py"): "`ddc demo` runs the demonstration",
}


def group_of(file: str) -> tuple[int, tuple[str, ...]]:
    for level, names in GROUPS:
        if any(file == name or (name.endswith("/") and file.startswith(name)) for name in names):
            return level, names
    raise AssertionError(f"{file} belongs to no layer; add it to GROUPS")


@cache
def nodes(file: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((SOURCE / file).read_text())))


def imported_files(file: str) -> Iterator[str]:
    """The files of the package that a file imports, anywhere in it: also in functions and for type checkers."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name == "ddc" or name.startswith("ddc."):
                path = name.removeprefix("ddc").removeprefix(".").replace(".", "/")
                candidates = [f"{path}.py", f"{path}/__init__.py".removeprefix("/")]
                yield from (one for one in candidates if one in FILES and one != "__init__.py")


def matches(file: str, pattern: str) -> bool:
    return pattern == "*" or file == pattern or (pattern.endswith("/*") and file.startswith(pattern[:-1]))


def wrong_imports() -> set[tuple[str, str]]:
    found = set()
    for file in FILES:
        level, group = group_of(file)
        for other in imported_files(file):
            other_level, other_group = group_of(other)
            upwards_or_sideways = other_level > level or (other_level == level and other_group != group)
            allowed = any(matches(file, a) and matches(other, b) for a, b in ALLOWED)
            if upwards_or_sideways and not allowed:
                found.add((file, other))
    return found


def test_no_file_imports_upwards_or_sideways() -> None:
    assert not wrong_imports()


def test_every_allowed_import_is_used() -> None:
    used = {(file, other) for file in FILES for other in imported_files(file)}
    for importer, imported in ALLOWED:
        assert any(matches(file, importer) and matches(other, imported) for file, other in used), importer


def test_a_solver_is_looked_up_in_one_place() -> None:
    """`make_solver` imports the list of solvers, which import its file: the one circle in the package."""
    lookups = [
        file
        for file in FILES
        if file.startswith("solvers/")
        and file != "solvers/__init__.py"
        and "import SOLVERS" in (SOURCE / file).read_text()
    ]
    assert lookups == ["solvers/base.py"]


# ---------------------------------------------------------------------------------------------------------
# sizes

LONGEST_FILE, LONGEST_FUNCTION = 500, 60

# Files and functions above the limit, with their lines today. An entry fails when it grows, and when it is no longer
# needed.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def function_lengths() -> Iterator[tuple[str, int]]:
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                yield f"{file}:{node.name}", node.end_lineno - node.lineno + 1


def check_lengths(found: dict[str, int], limit: int, known: dict[str, int]) -> None:
    too_long = {name: lines for name, lines in found.items() if lines > limit}
    assert set(too_long) == set(known), "split what is new; remove what is listed and short by now"
    grown = {name: lines for name, lines in too_long.items() if lines > known[name]}
    assert not grown


def test_no_file_is_too_long() -> None:
    check_lengths({file: len((SOURCE / file).read_text().splitlines()) for file in FILES}, LONGEST_FILE, LONG_FILES)


def test_no_function_is_too_long() -> None:
    longest: dict[str, int] = {}
    for name, lines in function_lengths():
        longest[name] = max(lines, longest.get(name, 0))
    check_lengths(longest, LONGEST_FUNCTION, LONG_FUNCTIONS)


# ---------------------------------------------------------------------------------------------------------
# the way of a picture: how often it passes from one file to another (scripts/walk.py)

LIMITS = {"restore": 25, "evaluate": 30, "train": 28}

CONFIG = """{"_class_name": "CompactUNet", "channels": [8, 16], "encoder_blocks": [1, 1], "decoder_blocks": [1],
"groups": 4, "head_dim": 8, "out_channels": 3, "inputs": ["y"]}"""


@pytest.mark.usefixtures("small_metrics")
@pytest.mark.parametrize("command", LIMITS)
def test_a_picture_passes_few_files(command: str, tiny_model: Path, tmp_path: Path) -> None:
    for name in ("astronaut", "coffee"):
        Picture(getattr(data, name)()[:64, :64]).write(tmp_path / "pictures" / f"{name}.png")
    (tmp_path / "network.json").write_text(CONFIG)
    train = "--batch-size 2 --crop 32 --steps 1 --warmup 1 --precision fp32"
    words = {
        "restore": f"pictures/astronaut.png -o out.png --model {tiny_model} --task sr4",
        "evaluate": f"--images pictures --out out --model {tiny_model} --task sr4 --size 32 --device cpu --no-report",
        "train": f"ddc --data pictures --out out --prior {tiny_model / 'prior'} --network network.json --tasks sr4 {train}",
    }
    ran = processes.run(
        [ROOT / "scripts" / "walk.py", command, *words[command].split()], None, tmp_path, processes.script
    )
    assert ran.returncode == 0, ran.stderr
    *hops, last = ran.stdout.splitlines()
    # on a slow computer, and where VGG16's weights are absent
    special = ("_forecast_text", "telling.py:tick ->", "perceptual.py:__init__ -> errors.py")
    count = int(last.split()[0]) - sum(any(part in hop for part in special) for hop in hops)
    assert count >= 15 and count <= LIMITS[command], "\n".join(hops)
    assert any(hop.startswith(f"cli/__init__.py:main -> cli/{command}.py:run") for hop in hops)
