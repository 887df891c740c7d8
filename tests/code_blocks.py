"""Code blocks of Markdown pages: found, run, or at least parsed."""

import importlib
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise

import tyro

from ddc.cli import available

PARSED_ONLY = "<!-- parsed only -->"  # before a block whose commands are too large to run here
SHELLS = ("bash", "sh", "shell", "console")


@dataclass(frozen=True)
class Block:
    """A fenced block, and where it begins."""

    language: str
    text: str
    line: int
    parsed_only: bool

    def commands(self) -> list[str]:
        """The command lines of a shell block: continued lines joined, prompts and comments left out."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def code_blocks(markdown: str) -> list[Block]:
    blocks = []
    pattern = re.compile(r"^([ \t]*)```(\w+)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    for found in pattern.finditer(markdown):
        indent, language, text = found.groups()
        text = "\n".join(line.removeprefix(indent) for line in text.splitlines())
        before = markdown[: found.start()].rstrip()
        line = markdown.count("\n", 0, found.start()) + 1
        blocks.append(Block(language, text + "\n", line, before.endswith(PARSED_ONLY)))
    return blocks


def ddc_arguments(command: str) -> list[str] | None:
    """The arguments of `ddc` in a command, also where a launcher starts it; None where it is not ours."""
    words = shlex.split(command, comments=True)
    if words and words[0] == "ddc":
        return words[1:]
    for i, (first, second) in enumerate(pairwise(words)):
        if (first, second) == ("-m", "ddc"):
            return words[i + 2 :]
    return None


def parse_only(command: str) -> str:
    """Let the command line's own parser read a command, and run nothing. Returns the subcommand."""
    arguments = ddc_arguments(command)
    assert arguments is not None, f"{command!r} is no ddc command"
    if not arguments or arguments[0].startswith("--"):
        return ""
    name, *rest = arguments
    assert name in available(), f"{command!r}: there is no command {name}"
    module, _, class_name = available()[name][0].partition(":")
    try:
        tyro.cli(getattr(importlib.import_module(module), class_name), args=rest, prog=f"ddc {name}")
    except SystemExit as stop:
        assert stop.code in (0, None), f"{command!r} cannot be parsed"
    return name
