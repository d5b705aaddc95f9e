"""Connections that give up on a server which sends too little, however it keeps the connection alive.

The timeout of a socket is for one piece: a server that sends a byte a second, or heads without end, never meets it.
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

#: Bytes a second, over the time of the timeout; a server that sends fewer stalls.
SLOWEST = 1 << 10


class Stalled(TimeoutError):
    """Too little came; its text says what was waited for."""


class Pace:
    """When the next bytes must have come: a head as a whole within the timeout, of a body so many in each such time."""

    def __init__(self) -> None:
        self._seconds, self._until, self._last, self._in_body, self._came = 0.0, 0.0, 0.0, False, 0

    def head(self, seconds: float) -> None:
        """A head begins, which has so many seconds."""
        self._seconds, self._in_body, self._came = seconds, False, 0
        self._last = time.monotonic()
        self._until = self._last + seconds

    def body(self) -> None:
        """The head has ended."""
        self._in_body, self._came = True, 0
        self._until = time.monotonic() + self._seconds

    def hurry(self, seconds: float) -> None:
        """All that is left has so many seconds, however fast it comes."""
        self._in_body = False
        self._until = min(self._until, time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds. Raises Stalled where there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise Stalled(self._said())
        return left

    def came(self, size: int) -> None:
        """So many bytes."""
        self._came += size
        self._last = time.monotonic()
        if self._in_body and self._came >= SLOWEST * self._seconds:
            self.body()

    def _said(self) -> str:
        if self._until - self._last > self._seconds / 2:
            return "nothing came"
        return "too little came" if self._in_body else "the head of its answer did not end"


class _Raw(io.RawIOBase):
    """The bytes of a socket, read at the pace."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock, self._file, self._pace = sock, sock.makefile("rb", buffering=0), pace

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        self._sock.settimeout(self._pace.left())
        try:
            count: int | None = self._file.readinto(into)
        except TimeoutError:
            self._pace.left()
            raise
        self._pace.came(count or 0)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, pace: Pace, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self._pace = pace
        pace.head(settings().timeout)
        self.fp = io.BufferedReader(_Raw(sock, pace))

    def begin(self) -> None:
        super().begin()
        self._pace.body()

    def _read_and_discard_trailer(self) -> None:
        # What stands behind the last chunk may go on for ever, as a head may.
        self._pace.head(settings().timeout)
        super()._read_and_discard_trailer()  # type: ignore[misc]  # of the standard library, and its own


class _Plain(HTTPConnection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pace = Pace()
        self.response_class = partial(_Response, self.pace)  # type: ignore[assignment]


class _Secure(HTTPSConnection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pace = Pace()
        self.response_class = partial(_Response, self.pace)  # type: ignore[assignment]


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _Secure


#: For `PoolManager.pool_classes_by_scheme`.
POOLS = {"http": _PlainPool, "https": _SecurePool}
