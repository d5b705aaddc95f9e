"""Progress of fetching remote files, for whoever draws a bar: headers of many files, and bytes of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from statecli.storage import session

#: Takes the number of files; the block gets a function to call after each file.
Watch = Callable[[int], AbstractContextManager[Callable[[], None]]]
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def report_prefetch(total: int) -> AbstractContextManager[Callable[[], None]]:
    """Report that the block fetches `total` files; the block gets a function to call after each file."""
    watch = _watch.get()
    return nullcontext(lambda: None) if watch is None else watch(total)


@contextmanager
def watch_prefetch(watch: Watch) -> Iterator[None]:
    """Call `watch` when the block fetches many files."""
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)


class FetchedValues:
    """Bytes of values that arrived during this command. Threads count at once; a lost count is a shorter bar."""

    def __init__(self) -> None:
        self.bytes = 0


def count_fetched_values() -> FetchedValues:
    """Return the count of this command."""
    return session.for_command(FetchedValues)
