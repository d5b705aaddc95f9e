"""Connections with a minimum speed, closed if a server sends too few bytes.

The timeout of a socket applies to a single read: a server that sends a byte a second, or endless headers, never exceeds
this timeout.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from functools import partial
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from statecli.storage.limits import settings

#: Minimum speed of a server in bytes per second, measured over the timeout.
MIN_BYTES_PER_SECOND = 1 << 10


class Stalled(TimeoutError):
    """Error: too few bytes arrived. The text names the missing part of the answer."""


class Pace:
    """Deadline for the next bytes: all headers within the timeout, then a minimum number of body bytes per timeout."""

    def __init__(self) -> None:
        self._seconds, self._until, self._last, self._in_body, self._came = 0.0, 0.0, 0.0, False, 0

    def start_headers(self, seconds: float) -> None:
        """Expect all headers within `seconds`."""
        self._seconds, self._in_body, self._came = seconds, False, 0
        self._last = time.monotonic()
        self._until = self._last + seconds

    def start_body(self) -> None:
        """Start the deadlines of the body, because all headers have arrived."""
        self._in_body, self._came = True, 0
        self._until = time.monotonic() + self._seconds

    def hurry(self, seconds: float) -> None:
        """Expect the rest of the answer within `seconds`, at any speed."""
        self._in_body = False
        self._until = min(self._until, time.monotonic() + seconds)

    def remaining_seconds(self) -> float:
        """Return the time in seconds until the next bytes must arrive. Raises Stalled after the deadline."""
        remaining = self._until - time.monotonic()
        if remaining <= 0:
            raise Stalled(self._describe_stall())
        return remaining

    def count(self, size: int) -> None:
        """Count received bytes."""
        self._came += size
        self._last = time.monotonic()
        if self._in_body and self._came >= MIN_BYTES_PER_SECOND * self._seconds:
            self.start_body()

    def _describe_stall(self) -> str:
        if self._until - self._last > self._seconds / 2:
            return "no data arrived"
        return "too few bytes arrived" if self._in_body else "incomplete response headers"


class _Raw(io.RawIOBase):
    """Reader of a socket. Raises Stalled if bytes arrive too slowly."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock, self._file, self._pace = sock, sock.makefile("rb", buffering=0), pace

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        self._sock.settimeout(self._pace.remaining_seconds())
        try:
            count: int | None = self._file.readinto(into)
        except TimeoutError:
            self._pace.remaining_seconds()
            raise
        self._pace.count(count or 0)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, pace: Pace, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self._pace = pace
        pace.start_headers(settings().timeout)
        self.fp = io.BufferedReader(_Raw(sock, pace))

    def begin(self) -> None:
        super().begin()
        self._pace.start_body()

    def _read_and_discard_trailer(self) -> None:
        # A limit for the trailer after the last chunk, because it may be endless, as headers may.
        self._pace.start_headers(settings().timeout)
        super()._read_and_discard_trailer()  # type: ignore[misc]  # of the standard library, and its own


class _Plain(HTTPConnection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pace = Pace()
        self.response_class = partial(_Response, self.pace)  # type: ignore[assignment]


class _Secure(_Plain, HTTPSConnection):
    """HTTPS connection with a minimum speed; `_Plain.__init__` calls `HTTPSConnection.__init__`."""


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _Secure


#: Pool classes for `PoolManager.pool_classes_by_scheme`.
POOLS = {"http": _PlainPool, "https": _SecurePool}
