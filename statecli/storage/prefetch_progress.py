"""Progress of fetching remote files, for progress bars: headers of files, and bytes of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from statecli.storage import lifetime

#: Function that takes the number of files and returns a context manager. The block gets a function to call after each
#: file.
Watch = Callable[[int], AbstractContextManager[Callable[[], None]]]
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def report_prefetch(total: int) -> AbstractContextManager[Callable[[], None]]:
    """Report the progress of a block that fetches several files. The block gets a function to call after each file."""
    watch = _watch.get()
    return nullcontext(lambda: None) if watch is None or total < 2 else watch(total)


@contextmanager
def watch_prefetch(watch: Watch) -> Iterator[None]:
    """Call `watch` each time that the block begins to prefetch several files, to report the progress."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


class FetchedValues:
    """Number of value bytes that this command received. It needs no lock, because a small error does little harm."""

    def __init__(self) -> None:
        self.bytes = 0


def count_fetched_values() -> FetchedValues:
    """Return the counter of the value bytes that this command received."""
    return lifetime.for_command(FetchedValues)
