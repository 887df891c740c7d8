"""What is told while pictures are restored: how long it takes, from the first steps, and the warnings about each picture."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from ddc.operators.base import Size
from ddc.solvers.base import Step

logger = logging.getLogger("ddc")

SLOW = 5  # seconds from which the expected time is announced
MEASURED_STEPS = 3  # after which the time of all is forecast


@dataclass(frozen=True)
class Forecast:
    """What a call of the pipeline will take, estimated after its first steps."""

    height: int  # of the restored picture
    width: int
    tiles: int
    seconds: float  # for the whole call


class Clock:
    """Measures the first steps of a call, and forecasts the time of the whole.

    `more`: how many further jobs will follow, such as those for intervals, each as long as one of `jobs`
    """

    def __init__(
        self, started: float, jobs: int, tell: Callable[[Forecast], None] | None, device: torch.device, more: float = 0
    ) -> None:
        self.started, self.jobs, self.tell, self.device, self.more = started, jobs, tell, device, more
        self.prepared = time.perf_counter()  # the pictures and networks are read
        self.done: list[float] = []  # when each step ended
        self.forecast: Forecast | None = None

    def tick(self, step: Step, size: Size, tiles: int, together: int) -> None:
        """A step is done, of as many tiles as are restored together."""
        if self.forecast:
            return
        if self.device.type == "cuda":  # where a step returns before it is done
            torch.cuda.synchronize(self.device)
        self.done.append(time.perf_counter())
        steps = step.steps * math.ceil(self.jobs * tiles / together)
        if len(self.done) != min(steps, MEASURED_STEPS):
            return
        first = self.done[0] - self.started  # slower than all that follow
        count = len(self.done) - 1
        each = (self.done[-1] - self.done[0]) / count if count else self.done[0] - self.prepared
        steps_of_more = step.steps * self.more * tiles / together
        self.forecast = Forecast(*size, tiles, first + each * (steps - 1 + steps_of_more))
        if self.tell and self.forecast.seconds >= SLOW:
            self.tell(self.forecast)


# Where the warnings about a picture go while it is being restored, and which were logged before.
_notebook: ContextVar[tuple[list[str], set[str]] | None] = ContextVar("_notebook", default=None)


@contextlib.contextmanager
def noting(notes: list[str], told: set[str]) -> Iterator[None]:
    """Collect the logger's warnings; one that was logged before is collected, but not logged again."""
    token = _notebook.set((notes, told))
    try:
        yield
    finally:
        _notebook.reset(token)


def _take_note(record: logging.LogRecord) -> bool:
    """A filter, not a handler: a logger whose only handler is this one would print nothing."""
    notebook = _notebook.get()
    if notebook is None or record.levelno < logging.WARNING:
        return True
    notes, told = notebook
    text = record.getMessage()
    if text not in notes:
        notes.append(text)
    new = text not in told
    told.add(text)
    return new


logger.addFilter(_take_note)
