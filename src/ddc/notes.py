"""Collects the warnings about a picture while it is being restored."""

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

logger = logging.getLogger("ddc")

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
