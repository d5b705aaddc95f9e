"""Send a request again after a broken connection or from a busy server, with increasing pauses.

A file has thousands of ranges and a folder hundreds of files. Therefore a URL that failed after all retries fails at
once from then on, and other URLs of its server get one attempt.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from statecli.core.errors import UnreadableError
from statecli.storage import lifetime, redact
from statecli.storage.limits import settings
from statecli.storage.url import split_url

_Result = TypeVar("_Result")
#: Pause before the second attempt, doubled before each next attempt, and the maximum pause; both in seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 20.0
#: Maximum pause that a server may request, in seconds, because a user at a terminal does not see why it takes longer.
MAX_RETRY_AFTER_S = 20.0


class _Failures:
    """URLs and servers that failed after all retries during a command.

    Attributes:
        by_url: The message for each URL not requested again.
        servers: Servers that get one attempt until an attempt succeeds.
    """

    def __init__(self) -> None:
        self.by_url: dict[str, str] = {}
        self.servers: set[str] = set()


class Transient(Exception):
    """Error that may disappear in a retry. `retry_after_s`: wait in seconds that the server requests, or None."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class ConnectionCut(Transient):
    """Error: the connection ended before the answer was complete."""


def retry(attempt: Callable[[], _Result], url: str) -> _Result:
    """Return the result of the first attempt that does not raise `Transient`.

    Raises UnreadableError if all attempts raised `Transient`, now or earlier for this URL. Raises other errors at once.
    """
    failures, server = lifetime.for_command(_Failures), _find_server(url)
    retries = 0 if server in failures.servers else settings().retries
    redact.filter_logs()
    for count in range(retries + 1):
        if url in failures.by_url:  # another thread may have given up
            raise UnreadableError(failures.by_url[url])
        try:
            result = attempt()
        except Transient as why:
            if count < retries and (why.retry_after_s is None or why.retry_after_s <= MAX_RETRY_AFTER_S):
                time.sleep(
                    min(LONGEST_PAUSE_S, why.retry_after_s if why.retry_after_s is not None else _choose_pause(count))
                )
                continue
            text = _explain_failure(why, count)
        else:
            failures.servers.discard(server)
            return result
        failures.servers.add(server)
        raise UnreadableError(failures.by_url.setdefault(url, text))
    raise AssertionError  # pragma: no cover - range(1) or more


def _explain_failure(why: Transient, retries: int) -> str:
    if why.retry_after_s is not None and why.retry_after_s > MAX_RETRY_AFTER_S:
        return f"{why}: the server asks statecli to wait {why.retry_after_s:,.0f} s; try again later"
    problem, _, advice = str(why).partition("; ")
    attempts = f", in each of {retries + 1} attempts" if retries else ""
    return f"{problem}{attempts}; {f'{advice}, then try again' if advice else 'try again later'}"


def _find_server(url: str) -> str:
    parts = split_url(url)
    return parts.scheme + parts.path.partition("/")[0]


def _choose_pause(count: int) -> float:
    """Return a pause in seconds, partly random, so that a hundred broken connections do not retry together."""
    return FIRST_PAUSE_S * float(2**count) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
