"""http and https: ranges (RFC 9110, section 14), each answer held to what was asked before it is read.

fsspec's own reads to the end whatever comes; a server that ignores `Range` would send a checkpoint whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from statecli.errors import MissingDependency, UnreadableError
from statecli.remote.attempts import Transient
from statecli.remote.settings import settings
from statecli.remote.stores import Known, Listing, Missing

#: Bytes of an answer that are taken although a range of it was asked for: small files of servers without ranges.
WHOLE = 16 << 20
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="?next')
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_BUSY = frozenset([408, 425, 429, 500, 502, 503, 504])


class Refused(UnreadableError):
    """An answer of this status and with these headers has not what was asked for."""

    def __init__(self, text: str, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


class Gone(Refused, Missing):
    """There is no such object."""


class Http:
    """Every server there is; `headers` are sent to the host that a URL names, and to no other."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})

    def get(self, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
        """As `Store.get`."""
        import urllib3

        headers = {**self._headers, "Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        try:
            answer = _pool().request(
                "GET", url, headers=headers, preload_content=False, retries=urllib3.Retry(0, redirect=10), redirect=True
            )
        except urllib3.exceptions.HTTPError as why:
            raise Transient(f"cannot be reached: {type(why).__name__}") from None
        try:
            _refuse(answer)
            start, end, size = _span(answer, offset, length)
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            if known is not None and known != (size, version):
                raise UnreadableError("changed while it was read: try again")
            try:
                data = answer.read(end - start)
            except urllib3.exceptions.HTTPError as why:
                raise Transient(f"the connection broke: {type(why).__name__}") from None
            if len(data) != end - start:
                raise Transient(f"the connection was cut after {len(data)} of {end - start} bytes")
            return bytes(data[offset - start : offset - start + length]), (size, version)
        finally:
            answer.release_conn()

    def listing(self, url: str) -> Listing:  # noqa: ARG002 - not yet
        """As `Store.listing`, of the page with links that servers make of a folder."""
        raise Missing("is no folder that can be listed")


def _span(answer: Any, offset: int, length: int) -> tuple[int, int, int]:
    if answer.status == 206:
        found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if found is None:
            raise UnreadableError("the server answered with a range that it does not name")
        start, last, size = map(int, found.groups())
        if start != offset or last + 1 != min(offset + length, size):
            raise UnreadableError(f"the server answered with bytes {start} to {last + 1}, not with those asked for")
        return start, last + 1, size
    size = int(answer.headers.get("Content-Length", -1))
    if not 0 <= size <= WHOLE:
        raise UnreadableError(f"the server ignores ranges and would send all {size:,} bytes: download it first")
    return 0, size, size


def _refuse(answer: Any) -> None:
    status = answer.status
    if status in _BUSY:
        raise Transient(f"the server is busy (HTTP {status})")
    if status not in (200, 206):
        text = f"is not there (HTTP {status})" if status in (404, 410) else f"cannot be read (HTTP {status})"
        raise (Gone if status in (404, 410) else Refused)(text, status, answer.headers)


def document(url: str, headers: Mapping[str, str]) -> tuple[Any, str | None]:
    """A JSON document, and the URL of its next page. Raises Refused, UnreadableError and Transient."""
    import urllib3

    try:
        answer = _pool().request("GET", url, headers=dict(headers), preload_content=False, retries=False)
        with answer:
            _refuse(answer)
            raw = answer.read(WHOLE + 1)
            following = _NEXT.search(answer.headers.get("Link", ""))
    except urllib3.exceptions.HTTPError as why:
        raise Transient(f"cannot be reached: {type(why).__name__}") from None
    try:
        found = json.loads(raw[: WHOLE + 1])
    except ValueError:
        raise UnreadableError("the server answered with no JSON") from None
    return found, following[1] if following else None


@cache
def _pool() -> Any:
    try:
        import urllib3
    except ImportError as missing:
        raise MissingDependency("URLs need the package urllib3: pip install 'statecli[remote]'") from missing
    seconds = settings().timeout
    return urllib3.PoolManager(
        num_pools=16, maxsize=settings().connections, timeout=urllib3.Timeout(connect=min(10, seconds), read=seconds)
    )
