"""Commands in processes of their own, without the seconds that importing torch takes.

They are forked from a process that has imported the package and has no threads (multiprocessing's fork server).
"""

import atexit
import io
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from ddc.cli import main

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *("ddc.cli.restore", "ddc.cli.train", "ddc.cli.evaluate", "ddc.pipeline", "ddc.training.loop"),
        *("ddc.training.ddc", "ddc.evaluation.benchmark", "diffusers.models.unets.unet_2d", "accelerate", "tyro"),
    ]
)
Call = Callable[[list[str]], object]


def _become(call: Call, words: list[str], outputs: list[str], environment: dict[str, str], folder: str) -> None:
    """Do in a forked process what a new one would do."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # which may be another than the environment's
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY), number)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(number, "wb"), encoding=encoding, line_buffering=number == 2) for number in (1, 2)
    )
    sys.exit(call(words))


def script(words: list[str]) -> None:
    """`python WORDS`."""
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


def on_a_small_disk(words: list[str]) -> int:
    """Several commands, as JSON, where no file may have more than 6000 bytes; their exit code, if it is the same for all."""
    import resource

    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, unlimited[1]))
    codes = {main(line) for line in json.loads(words[0])}
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return codes.pop() if len(codes) == 1 else 9


def start(
    words: Iterable[object],
    stdout: str | Path = os.devnull,
    stderr: str | Path = os.devnull,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    call: Call = main,
) -> BaseProcess:
    """Start `ddc WORDS`, or another function. Its output goes into files, pipes with a name, or terminals.

    The function's module is imported anew in the process, so it must not import a conftest.
    """
    outputs = [str(stdout), str(stderr)]
    given = dict(os.environ if environment is None else environment)
    process = FORKED.Process(target=_become, args=(call, [*map(str, words)], outputs, given, str(folder or Path.cwd())))
    process.start()
    atexit.register(process.kill)  # if a test failed before its end; else the tests would wait for it
    return process


def start_two(words: list[str], said: Path, call: Call = main) -> list[BaseProcess]:
    """Two processes that work together, as a launcher starts them. Their stderr goes to SAID-0 and SAID-1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    how = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    how = os.environ | how | {"CUDA_VISIBLE_DEVICES": ""}
    ranks = ({"RANK": rank, "LOCAL_RANK": rank} for rank in "01")
    return [start(words, stderr=f"{said}-{rank['RANK']}", environment=how | rank, call=call) for rank in ranks]


def run(
    words: Iterable[object],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    call: Call = main,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `ddc WORDS`, or another function, to its end."""
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place, "stdout"), Path(place, "stderr")]
        process = start(words, *outputs, environment, folder, call)
        process.join(timeout)
        assert process.exitcode is not None, f"still running after {timeout} s"
        texts = [path.read_text("utf-8", "replace") for path in outputs]
    return subprocess.CompletedProcess([*map(str, words)], process.exitcode, *texts)
