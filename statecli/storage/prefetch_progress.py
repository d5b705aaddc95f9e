"""Progress of fetching many remote files at once, for whoever draws a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

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
