"""Asking again, later and later, where that may help: a connection that broke, a server that is busy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from statecli.errors import UnreadableError
from statecli.remote import secrets
from statecli.remote.settings import settings

_Result = TypeVar("_Result")
#: Seconds before the second attempt, twice as many before each next one, at most LONGEST.
FIRST, LONGEST = 0.2, 20.0
#: Seconds that a server may ask to wait; nobody sits before a terminal for longer and knows why.
PATIENCE = 20.0


class Transient(Exception):
    """What went wrong this time; `after` seconds, if the server says when it is worth asking again."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


def repeated(attempt: Callable[[], _Result]) -> _Result:
    """The result of the first attempt that succeeds.

    Raises UnreadableError where none did, and whatever an attempt raises that is no `Transient`.
    """
    retries = settings().retries
    secrets.quiet()
    for count in range(retries + 1):
        try:
            return attempt()
        except Transient as why:
            if why.after is not None and why.after > PATIENCE:
                raise UnreadableError(f"{why}: it asks to wait {why.after:,.0f} s; try again later") from None
            if count == retries:
                times = f", {retries + 1} times" if retries else ""
                raise UnreadableError(f"{why}{times}; try again later") from None
            time.sleep(min(LONGEST, why.after if why.after is not None else _pause(count)))
    raise AssertionError  # pragma: no cover - range(1) or more


def _pause(count: int) -> float:
    """With chance in it: a hundred connections that broke together must not come back together."""
    return FIRST * float(2**count) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
