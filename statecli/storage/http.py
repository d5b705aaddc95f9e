"""Object store of http and https: range requests (RFC 9110, section 14), each answer checked before its body is read.

fsspec's implementation reads any answer to the end: a server that ignores `Range` would send a whole checkpoint.
Credentials go only to their own server, and the target of a redirect is not shown.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from statecli.core.errors import PlaceUnreadable, UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.storage import connections, credentials, html_listing, redact
from statecli.storage.http_refusals import NoFile, RangeRefused, Response, is_page, name_server, refuse, refuse_page
from statecli.storage.masked_url import hide_secrets, parse_url
from statecli.storage.object_store import REDIRECTS, Listing, Missing, VersionedBytes, confirm_version
from statecli.storage.retry import ConnectionCut, Transient, retry
from statecli.storage.store import FileVersion

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

    from statecli.storage.minimum_speed import Pace

#: Maximum size in bytes of a file from a server without range requests, and of all these files together.
MAX_WHOLE_BYTES, MAX_ALL_WHOLE_BYTES = 16 << 20, 256 << 20
#: Maximum number of unread bytes that are read to reuse a connection, and the time limit for this in seconds.
MAX_DRAINED_BYTES, DRAIN_TIMEOUT_S = 16 << 10, 0.1
#: Maximum number of redirects of a request.
MAX_REDIRECTS = 10

_NEXT_LINK = compile_on_use(r'<([^<>]+)>\s*;\s*rel="?next')
_RANGE = compile_on_use(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_LENGTH = compile_on_use(r"\d{1,19}")
_EMPTY_RANGE = compile_on_use(r"(?:bytes )?\*/(?P<size>\d{1,19})")
#: End of a path that names a file. The URL of a folder with such a name must end in a slash.
_FILE_PATH = compile_on_use(
    r"\.(?:safetensors|bin|pth?|ckpt|gguf|msgpack|json|npy|npz|pkl|distcp|metadata|txt|py|onnx|h5)(?:#[^/]*)?$"
)
#: HTTP statuses that may mean an expired signature; the original URL is then requested again.
_EXPIRED_STATUSES = frozenset([400, 401, 403, 404, 410])


class JsonPage(NamedTuple):
    """A JSON document, and the URL of the next page (None for the last page)."""

    document: Any
    next_url: str | None


class Http:
    """`ObjectStore` for all web servers.

    `headers` are sent only to the host of a URL. If None, the user and password of the URL or the netrc file are sent.
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = headers
        for value in (headers or {}).values():
            redact.hide(value.rpartition(" ")[2])
        #: Requested URL -> URL of its last answer, after redirects.
        self._redirected: dict[str, str] = {}
        self._wholes: dict[str, VersionedBytes] = {}
        self._lock = threading.Lock()

    def get(self, url: str, offset: int, length: int, expected: FileVersion | None) -> VersionedBytes:
        """See `ObjectStore.get`. If the connection breaks, only the missing bytes are requested again."""
        if url not in self._wholes:
            return retry(_Range(self, url, offset, length, expected).fetch, url)
        data, version = self._wholes[url]
        return VersionedBytes(data[offset : offset + length], confirm_version(expected, version))

    def listing(self, url: str) -> Listing:
        """See `ObjectStore.listing`. Reads the HTML page of links with which servers list a folder."""
        folder = _add_slash(url)
        page, answer = self.body(folder)
        names = None
        if is_page(answer.response) and _has_same_path(answer.url, folder):
            names = html_listing.parse_names(page.decode("utf-8", "replace"), answer.url)
        if names is None:
            raise NoFile("the server sent an HTML page instead of a list of files", 200, answer.response.headers)
        return Listing(names)

    def body(self, url: str) -> tuple[bytes, Response]:
        """Return the body of a small answer. Raises RangeRefused, UnreadableError and Transient."""
        with self.request(url, {}) as answer:
            response = answer.response
            refuse(answer, url)
            return _receive(response, _parse_length(response), []), answer

    def document(self, url: str) -> JsonPage:
        """Return a JSON document. Raises RangeRefused, UnreadableError and Transient."""
        import json

        raw, answer = self.body(url)
        try:
            document = json.loads(raw)
        except ValueError:
            raise UnreadableError("the answer of the server is not valid JSON") from None
        next_link = _NEXT_LINK.search(answer.response.headers.get("Link", ""))
        return JsonPage(document, next_link[1] if next_link else None)

    def require_room(self, length: int) -> None:
        """Raise UnreadableError if a whole file of this length and the files kept so far exceed the limit."""
        if sum(len(whole.data) for whole in [*self._wholes.values()]) + length > MAX_ALL_WHOLE_BYTES:
            raise PlaceUnreadable(
                "the server ignores range requests, and whole files would need more than "
                f"{MAX_ALL_WHOLE_BYTES >> 20} MiB of memory; download the files first"
            )

    def keep(self, url: str, data: bytes, version: FileVersion) -> None:
        """Keep the bytes of a file that was fetched whole, for the next reads. Raises UnreadableError."""
        with self._lock:
            self.require_room(0 if url in self._wholes else len(data))
            self._wholes[url] = VersionedBytes(data, version)

    @contextmanager
    def request(self, url: str, headers: dict[str, str]) -> Iterator[Response]:
        """Request a URL and follow redirects. After the block, return the connection to its pool or close it."""
        redirected = self._redirected.get(url)
        answer = self._follow(url, redirected, headers)
        if redirected is not None and answer.response.status in _EXPIRED_STATUSES:
            _release(answer.response)
            self._redirected.pop(url, None)
            answer = self._follow(url, None, headers)
        try:
            yield answer
        except (Transient, UnreadableError) as why:
            raise name_server(why, answer.url, url) from None
        else:
            if answer.response.status < 300 and answer.url != credentials.strip_user(url):
                self._redirected[url] = answer.url
        finally:
            _release(answer.response)

    def _follow(self, url: str, redirected: str | None, headers: dict[str, str]) -> Response:
        sent = (
            credentials.credentials_for(url)
            if self._headers is None
            else credentials.Sent(dict(self._headers), "the credentials")
        )
        at = redirected or credentials.strip_user(url)
        visited_urls = set[str]()
        for _ in range(MAX_REDIRECTS + 1):
            visited_urls.add(at)
            own_headers = sent.headers if credentials.may_share_credentials(url, at) else {}
            try:
                response = connections.send(at, {**headers, **own_headers, "Accept-Encoding": "identity"})
            except (Transient, UnreadableError) as why:
                raise name_server(why, at, url) from None
            if response.status not in REDIRECTS:
                return Response(response, at, sent)
            _release(response)
            at = _resolve_redirect(at, response.headers.get("Location"))
            if at in visited_urls:
                raise UnreadableError("the server redirects in a circle; check the URL")
        raise UnreadableError(f"the server redirects more than {MAX_REDIRECTS} times")


class _Range:
    """Request for a byte range. It keeps the received parts, so that a retry requests only the rest."""

    def __init__(self, http: Http, url: str, offset: int, length: int, expected: FileVersion | None) -> None:
        self._http, self._url = http, url
        self._offset, self._length, self._version = offset, length, expected
        self._parts: list[bytes] = []

    def fetch(self) -> VersionedBytes:
        """Return the whole range. Raises Transient."""
        start = self._offset + sum(map(len, self._parts))
        end = self._offset + self._length
        if self._version is not None:
            end = min(end, self._version[0])
            if start >= end:
                return VersionedBytes(b"".join(self._parts), self._version)
        with self._http.request(self._url, {"Range": f"bytes={start}-{end - 1}"}) as answer:
            return self._receive(answer, start, end - start)

    def _receive(self, answer: Response, start: int, length: int) -> VersionedBytes:
        response = answer.response
        if response.status == 416:
            version = FileVersion(_parse_empty_size(answer, start), _parse_marker(response))
            return VersionedBytes(b"", confirm_version(self._version, version))
        refuse(answer, self._url)
        if response.status == 200:
            return self._receive_whole(answer)
        size = _check_range(response, start, length)
        self._version = confirm_version(self._version, FileVersion(size, _parse_marker(response)))
        self._length = min(self._length, size - self._offset)
        data = _receive(response, self._length, self._parts)
        _refuse_surplus(response)
        if start == self._offset == 0:
            refuse_page(answer, data, self._url)
        return VersionedBytes(data, self._version)

    def _receive_whole(self, answer: Response) -> VersionedBytes:
        length = _parse_length(answer.response)
        self._http.require_room(length or 0)
        data = _receive(answer.response, length, [])
        refuse_page(answer, data, self._url)
        version = confirm_version(self._version, FileVersion(len(data), _parse_marker(answer.response)))
        self._http.keep(self._url, data, version)
        return VersionedBytes(data[self._offset : self._offset + self._length], version)


# --- headers---------------------------------------------------------------------------------------------------------


def _check_range(response: BaseHTTPResponse, offset: int, length: int) -> int:
    """Return the size of the file. Raises UnreadableError if the answer does not have the requested range."""
    text = response.headers.get("Content-Range", "")
    match = _RANGE.fullmatch(text)
    if match is None:
        quantity = "the size of the file" if text.endswith("/*") else "the range of its answer"
        raise UnreadableError(f"the server does not report {quantity}; download the file first")
    start, last, size = map(int, match.groups())
    if (start, last + 1) != (offset, min(offset + length, size)) or start > last:
        raise UnreadableError(
            f"the server answered with bytes {start} to {last + 1} of {size}, but statecli requested {offset} to "
            f"{offset + length}; download the file first"
        )
    if response.headers.get("Content-Length", str(last + 1 - start)) != str(last + 1 - start):
        raise UnreadableError("the server reports contradictory sizes for its answer; download the file first")
    return size


def _parse_length(response: BaseHTTPResponse) -> int | None:
    """Return the length of an answer with a whole file; None if it is sent in chunks. Raises UnreadableError."""
    length = response.headers.get("Content-Length", "")
    if not length and "chunked" in response.headers.get("Transfer-Encoding", "").lower():
        return None
    if not _LENGTH.fullmatch(length):
        raise UnreadableError("the server does not report the size of its answer; download the file first")
    if int(length) > MAX_WHOLE_BYTES:
        raise UnreadableError(
            f"the server ignores range requests and would send all {int(length):,} bytes; download the file first"
        )
    return int(length)


def _parse_empty_size(answer: Response, offset: int) -> int:
    """Return the size of a file that ends before the requested range (HTTP 416). Raises RangeRefused."""
    match = _EMPTY_RANGE.fullmatch(answer.response.headers.get("Content-Range", ""))
    if match is None or int(match["size"]) > offset:
        raise RangeRefused(
            "the server refuses the byte range that statecli requested (HTTP 416): download the file first",
            416,
            answer.response.headers,
        )
    return int(match["size"])


def _parse_marker(response: BaseHTTPResponse) -> str | None:
    """Return the marker for a `FileVersion`: ETag and date, or only the date if the ETag is weak.

    Servers behind one load balancer may have different weak ETags for the same bytes.
    """
    etag, when = (" ".join(response.headers.get(name, "").split()) for name in ("ETag", "Last-Modified"))
    if etag.startswith("W/") and when:
        etag = ""
    return f"{etag}\n{when}".rstrip("\n") or None


def _resolve_redirect(at: str, location: str | None) -> str:
    from urllib.parse import urljoin

    if not location:
        raise UnreadableError("the server sent a redirect without a target")
    try:
        target = urljoin(at, location).partition("#")[0]
        hide_secrets(target)
        target = credentials.strip_user(target)
        is_url = not target.startswith("http") or bool(credentials.parse_host(target))
    except (ValueError, UnreadableError):
        is_url = False
    if not is_url:
        raise UnreadableError("the server redirects to an invalid URL")
    if not target.startswith(("http://", "https://")):
        raise UnreadableError("the server redirects to a URL that is not http:// or https://")
    if at.startswith("https://") and not target.startswith("https://"):
        raise UnreadableError(
            "the server redirects from https:// to http://, which is not encrypted: others could change the data"
        )
    return target


def _add_slash(url: str) -> str:
    """Return the URL of a folder, with a slash at the end. Raises Missing if the path looks like a file."""
    link = parse_url(url)
    if link.path.endswith("/"):
        return url
    if _FILE_PATH.search(link.path):
        raise Missing("is not a folder")
    query = "" if link.query is None else f"?{link.query}"
    return f"{url.removesuffix(query)}/{query}"


def _has_same_path(url: str, requested: str) -> bool:
    """Return whether an answer's URL has the same path as the requested folder; the server may differ."""
    return parse_url(url).path.partition("/")[2].rstrip("/") == parse_url(requested).path.partition("/")[2].rstrip("/")


# --- bodies ----------------------------------------------------------------------------------------------------------


def _receive(response: BaseHTTPResponse, length: int | None, parts: list[bytes]) -> bytes:
    """Return `parts` and the rest of the answer, `length` bytes in total. Raises Transient if bytes are missing.

    `parts` keeps the received bytes, so that the next attempt resumes after them. Uses `read1`, because it returns each
    byte received before the connection broke.
    """
    from urllib3 import exceptions

    received_bytes, error = sum(map(len, parts)), None
    while length is None or received_bytes < length:
        try:
            part = response.read1(min(1 << 18, MAX_WHOLE_BYTES + 1 if length is None else length - received_bytes))
        except (exceptions.HTTPError, ValueError) as why:
            part, error = b"", connections.translate_error(why) if isinstance(why, exceptions.HTTPError) else None
            length = -1 if length is None else length
        if not part:
            break
        parts.append(part)
        received_bytes += len(part)
        if length is None and received_bytes > MAX_WHOLE_BYTES:
            raise UnreadableError(
                "the server ignores range requests and does not report the size of its answer; download the file first"
            )
    if length is not None and received_bytes != length:
        was_cut = error is None or isinstance(error, ConnectionCut)
        total_text = f" of {length:,}" if length >= 0 else ""
        raise Transient(
            f"{'the connection was cut' if was_cut else f'{error},'} after {received_bytes:,}{total_text} bytes"
        )
    return b"".join(parts)


def _refuse_surplus(response: BaseHTTPResponse) -> None:
    """Raise UnreadableError if a chunked answer continues after the requested range."""
    from urllib3 import exceptions

    if response.length_remaining is not None or "chunked" not in response.headers.get("Transfer-Encoding", "").lower():
        return
    with suppress(exceptions.HTTPError, ValueError):  # all requested bytes were received
        _limit_drain_time(response)
        if response.read1(1):
            raise UnreadableError("the server reports contradictory sizes for its answer; download the file first")


def _limit_drain_time(response: BaseHTTPResponse) -> None:
    pace: Pace | None = getattr(response.connection, "pace", None)
    if pace is not None:
        pace.hurry(DRAIN_TIMEOUT_S)


def _release(response: BaseHTTPResponse) -> None:
    """Give a connection back to its pool, or close it if many bytes are unread."""
    unread_bytes = response.length_remaining
    try:
        if response.closed or unread_bytes == 0 or (unread_bytes is not None and unread_bytes <= MAX_DRAINED_BYTES):
            _limit_drain_time(response)
            response.drain_conn()
        else:
            response.close()
    finally:
        response.release_conn()
