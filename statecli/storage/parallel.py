"""Send the requests for several files at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from statecli.storage.limits import settings

_Task = TypeVar("_Task")


def run_in_threads(function: Callable[[_Task], object], tasks: Sequence[_Task]) -> None:
    """Call the function with each task, in up to `settings().connections` parallel threads."""
    if len(tasks) < 2:
        for task in tasks:
            function(task)
        return
    threads = ThreadPoolExecutor(min(settings().connections, len(tasks)))
    try:
        for _ in threads.map(function, tasks):
            pass
    finally:  # an interrupt must not wait for requests
        threads.shutdown(wait=False, cancel_futures=True)
