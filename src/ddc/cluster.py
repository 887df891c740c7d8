"""A Ray cluster: connecting to it, asking it for workers, and what it says when they fail."""

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ddc.cli.files import RayOptions
from ddc.errors import UserError

WAIT = 5  # seconds for an address to answer


class Ledger:
    """Which shares were begun before, and how many workers a picture has cost. It lives beside the program that waits for
    the results, in a process that does not import torch."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.lost: Counter[str] = Counter()

    def take(self, share: str) -> bool:
        """Whether a share was begun before, by a worker that is lost."""
        again = share in self.taken
        self.taken.add(share)
        return again

    def begin(self, picture: str) -> int:
        """How many workers were lost with this picture alone in their hands; until `end`, one more is counted."""
        self.lost[picture] += 1
        return self.lost[picture] - 1

    def end(self, picture: str) -> None:
        self.lost.pop(picture, None)


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """The module `ray`, connected: to the address, to that of RAY_ADDRESS, or to a Ray that is started here for now."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.data
    except ImportError:
        raise UserError("Ray is not installed; pip install 'deep-data-consistency[ray]'") from None
    if ray.is_initialized():  # by the program that this runs in
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS", "") or "local"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        quiet |= {"include_dashboard": False, "object_store_memory": 256 << 20}  # rows are short
    advice = "start one with `ray start --head`, or leave the address out"
    try:
        if ":" in address and "RAY_USE_TLS" not in os.environ:
            _check_answer(address)
        with _quiet():
            ray.init(address, **quiet)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"no Ray answers at {address} ({reason}); {advice}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what Ray's C++ code writes to stderr when it starts: that it will be quiet."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _check_answer(address: str) -> None:
    """Raise an `OSError` or a `ValueError` unless a gRPC server is there: Ray would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), WAIT) as connection:
        connection.settimeout(WAIT)
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")  # and empty settings
        if connection.recv(9)[3:4] != b"\4":  # the settings of the server
            raise OSError("another program answers")


def pool(options: RayOptions, ray: Any, device: str, tasks: int | None = None) -> tuple[int, dict[str, Any]]:
    """How many workers there are, not more than `tasks`, and the arguments of `map_batches` that ask Ray for them."""
    for name, value in (("workers", options.workers), ("cores", options.cores)):
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; expected 1 or more")
    if device.startswith("cuda:"):
        raise UserError(f"--device {device} names one GPU, but each worker of Ray gets its own; use --device cuda")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = int(max((node.get("CPU", 0) for node in nodes), default=0))
    if most < options.cores:
        raise UserError(f"--cores is {options.cores}, but no computer of this cluster has more than {most}")
    gpus = 0 if device == "cpu" else int(sum(node.get("GPU", 0) for node in nodes))
    workers = options.workers or gpus or sum(int(node.get("CPU", 0)) // options.cores for node in nodes)
    workers = workers if tasks is None else max(1, min(workers, tasks))
    needs = {"num_cpus": options.cores, "num_gpus": 1 if gpus else None}
    return workers, {"compute": ray.data.ActorPoolStrategy(size=workers), "batch_format": "pyarrow", **needs}


@contextmanager
def silent(address: str) -> Iterator[Any]:
    """A `cluster` that leaves the terminal to our own lines. Ray prints pages about a lost worker, which are in its logs,
    too."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), cluster(address) as ray:
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield ray


@contextmanager
def told(ray: Any) -> Iterator[None]:
    """What the workers raise, in one line."""
    try:
        yield
    except ray.exceptions.RayError as error:
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise UserError(f"the workers of Ray failed ({reason.strip()}); the same command continues") from None
