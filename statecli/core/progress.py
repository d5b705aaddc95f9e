"""Progress of a command, for display by the caller: bytes of values, and the stage of slow work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: Takes the bytes that will be read in all; returns a function to call with each tensor's FQN and size in bytes.
Progress = Callable[[int], Callable[[str, int], None]]

_show_stage: ContextVar[Callable[[str], None] | None] = ContextVar("show_stage", default=None)


def report_stage(text: str) -> None:
    """Report the stage that begins now: `importing torch`."""
    show = _show_stage.get()
    if show is not None:
        show(text)


@contextmanager
def watch_stages(show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` with each stage that begins in the block."""
    before = _show_stage.set(show)
    try:
        yield
    finally:
        _show_stage.reset(before)
