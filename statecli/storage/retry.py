"""Asking again, later and later, where that may help: a connection that broke, a server that is busy.

A file has thousands of ranges, and a folder hundreds of files: what was in vain for one is not waited for with each.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from statecli.core.errors import UnreadableError
from statecli.storage import files, redact
from statecli.storage.limits import settings

_Result = TypeVar("_Result")
#: Seconds before the second attempt, twice as many before each next one, at most LONGEST.
FIRST, LONGEST = 0.2, 20.0
#: Seconds that a server may ask to wait; nobody sits before a terminal for longer and knows why.
PATIENCE = 20.0

#: By URL, why it was asked for in vain as often as that may help: it is not asked for again.
_lost: dict[str, str] = {}
#: Places of such, where one attempt is enough until one succeeds.
_silent: set[str] = set()


class Transient(Exception):
    """What went wrong this time; `after` seconds, if the server says when it is worth asking again."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


def forget() -> None:
    """The next command finds out anew what answers."""
    _lost.clear()
    _silent.clear()


def repeated(attempt: Callable[[], _Result], url: str) -> _Result:
    """The result of the first attempt that succeeds, of those to get something of what is behind the URL.

    Raises UnreadableError where none did, now or earlier, and whatever an attempt raises that is no `Transient`.
    """
    place = _place(url)
    retries = 0 if place in _silent else settings().retries
    redact.quiet()
    for count in range(retries + 1):
        if url in _lost:  # since, in another thread, too
            raise UnreadableError(_lost[url])
        try:
            result = attempt()
        except Transient as why:
            if count < retries and (why.after is None or why.after <= PATIENCE):
                time.sleep(min(LONGEST, why.after if why.after is not None else _pause(count)))
                continue
            text = _in_vain(why, count)
        else:
            _silent.discard(place)
            return result
        _silent.add(place)
        raise UnreadableError(_lost.setdefault(url, text))
    raise AssertionError  # pragma: no cover - range(1) or more


def _in_vain(why: Transient, retries: int) -> str:
    if why.after is not None and why.after > PATIENCE:
        return f"{why}: it asks to wait {why.after:,.0f} s; try again later"
    return f"{why}{f', {retries + 1} times' if retries else ''}; try again later"


def _place(url: str) -> str:
    """Scheme and host, or bucket; of a chain those of what it leads to."""
    link = files.link(url)
    behind = link.rest.removeprefix("::")
    if behind != link.rest and files.is_remote(behind):
        return _place(behind)
    return link.scheme + link.way.partition("/")[0]


def _pause(count: int) -> float:
    """With chance in it: a hundred connections that broke together must not come back together."""
    return FIRST * float(2**count) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
