"""The walk of a picture through the package: which file calls which, hop by hop, in one run of a `ddc` command.

python scripts/walk.py restore bad.png -o better.png --task sr4

Prints each pair (caller's file, called file) when it first occurs, with the two functions and the number of calls, and
last the number of pairs. A call through a library, as from a thread pool, counts as a call of the nearest file of the
package. Importing a file does not count.
"""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import ddc
from ddc.cli import main

PACKAGE = str(Path(ddc.__file__).parent) + os.sep
Hop = tuple[str, str]  # the caller's file and the called one


class Walk:
    """The hops of a run, in the order of their first call; each with its two functions and its number of calls."""

    def __init__(self) -> None:
        self.functions: dict[Hop, Hop] = {}
        self.calls: dict[Hop, int] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Python's profiling hook."""
        called = frame.f_code.co_filename
        if event != "call" or not called.startswith(PACKAGE) or frame.f_code.co_name == "<module>":
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename == called:
            return
        hop = (caller.f_code.co_filename, called)
        self.functions.setdefault(hop, (caller.f_code.co_name, frame.f_code.co_name))
        self.calls[hop] = self.calls.get(hop, 0) + 1

    def lines(self) -> list[str]:
        def place(file: str, function: str) -> str:
            return f"{file.removeprefix(PACKAGE)}:{function}"

        hops = [
            f"{place(hop[0], names[0])} -> {place(hop[1], names[1])}  x{self.calls[hop]}"
            for hop, names in self.functions.items()
        ]
        files = {file for hop in self.calls for file in hop}
        return [*hops, f"{len(hops)} transitions, {len(files)} files"]


def walk(arguments: list[str]) -> int:
    """Run a command, print its walk, and return its exit code."""
    trace = Walk()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        code = main(arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    print("\n".join(trace.lines()))
    return code


if __name__ == "__main__":
    sys.exit(walk(sys.argv[1:]))
