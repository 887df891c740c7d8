"""Every code block of the README is run, in order, in a folder with the pictures that it names.

Left out are `make …` (this suite is one), installing, and `ddc web`, which never ends; commands after the comment
<!-- parsed only --> are only parsed, for they are meant for a GPU.
"""

import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image, ImageFilter
from skimage import data

import processes
from code_blocks import PARSED_ONLY, SHELLS, Block, code_blocks, ddc_arguments, parse_only

README = Path(__file__).parents[1] / "README.md"
NOT_RUN = ("make", "git", "pip", "python3 -m venv", "cd", "source")


@pytest.fixture
def folder(tmp_path: Path, small_metrics: Path) -> Path:
    """photo.jpg, bad.jpg, small.png, soft.png, and photos/ with two pictures."""
    Image.fromarray(data.astronaut()[20:68, 170:234]).save(tmp_path / "photo.jpg", quality=90)
    Image.fromarray(data.astronaut()[20:68, 170:234]).save(tmp_path / "bad.jpg", quality=15)
    Image.fromarray(data.coffee()[150:166, 200:224]).save(tmp_path / "small.png")
    Image.fromarray(data.coffee()[150:214, 200:280]).filter(ImageFilter.GaussianBlur(1.5)).save(tmp_path / "soft.png")
    (tmp_path / "photos").mkdir()
    Image.fromarray(data.chelsea()[100:124, 150:182]).save(tmp_path / "photos" / "cat.png")
    Image.fromarray(data.rocket()[150:174, 300:332]).save(tmp_path / "photos" / "rocket.png")
    return tmp_path


def execute(words: list[str]) -> None:
    exec(compile(words[0], "<README.md>", "exec"), {"__name__": "__main__"})


def commands_of(block: Block) -> list[str]:
    """Those to run; the others are parsed, or left alone."""
    commands = []
    for command in block.commands():
        if block.parsed_only or command.startswith("ddc web") or command.split()[:2] == ["accelerate", "launch"]:
            if ddc_arguments(command) is not None:
                parse_only(command)
        elif not command.startswith(NOT_RUN):
            commands.append(command)
    return commands


def run(block: Block, folder: Path) -> None:
    if block.language == "python":
        compile(block.text, f"README.md line {block.line}", "exec")
        ended = [] if block.parsed_only else [processes.run([block.text], folder=folder, call=execute)]
    else:
        ended = []
        for command in commands_of(block):
            words = ddc_arguments(command)
            if words is None:
                ended.append(subprocess.run(["bash", "-euc", command], cwd=folder, capture_output=True, text=True))
            else:
                ended.append(processes.run(words, folder=folder))
    for done in ended:
        assert done.returncode == 0, f"README.md line {block.line}:\n{block.text}\n{done.stderr}"


def test_every_block_runs(folder: Path) -> None:
    text = README.read_text()
    assert "make demo" in text and "make test" in text
    for block in code_blocks(text):
        if block.language == "python" or block.language in SHELLS:
            run(block, folder)


def test_every_link_to_a_file_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", README.read_text())
    missing = [link for link in links if not (README.parent / link).exists()]
    assert not missing


def test_a_block_that_fails_is_noticed(folder: Path) -> None:
    page = f"""
```python
raise SystemExit(3)
```
{PARSED_ONLY}
```bash
# comment
ddc restore photo.jpg -o out.png \\
  --tusk sr4
make demo
```
```bash
make demo
test -f photo.jpg && test -f photos/cat.png
```
"""
    wrong, unknown, right = code_blocks(page)
    assert (wrong.language, wrong.line, unknown.parsed_only, right.parsed_only) == ("python", 2, True, False)
    with pytest.raises(AssertionError, match="line 2"):
        run(wrong, folder)
    with pytest.raises(AssertionError, match="cannot be parsed"):
        run(unknown, folder)
    run(right, folder)
    parse_only("accelerate launch -m ddc evaluate --images photos --out runs/x --solver ddc")
