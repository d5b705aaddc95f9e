"""Do the requests of several objects at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from statecli.storage.limits import settings

_One = TypeVar("_One")


def side_by_side(function: Callable[[_One], object], works: Sequence[_One]) -> None:
    """`function` of each, as many at a time as there may be connections."""
    if len(works) < 2:
        for work in works:
            function(work)
        return
    threads = ThreadPoolExecutor(min(settings().connections, len(works)))
    try:
        for _ in threads.map(function, works):
            pass
    finally:  # an interrupt waits for nobody
        threads.shutdown(wait=False, cancel_futures=True)
