"""Progress of a command, for display by the caller: bytes of values, and the stage of slow work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: Function that takes the total number of bytes to read, and returns a function to call with the FQN and the size in
#: bytes of each read tensor.
Progress = Callable[[int], Callable[[str, int], None]]

_show_stage: ContextVar[Callable[[str], None] | None] = ContextVar("show_stage", default=None)


def report_stage(text: str) -> None:
    """Report the stage that begins now, such as `importing torch`."""
    show = _show_stage.get()
    if show is not None:
        show(text)


@contextmanager
def watch_stages(show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` with each stage that begins while the block runs."""
    before = _show_stage.set(show)
    try:
        yield
    finally:
        _show_stage.reset(before)
