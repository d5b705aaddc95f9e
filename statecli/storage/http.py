"""The object store of http and https: range requests (RFC 9110, section 14). Each answer is checked before it is read.

The implementation of fsspec reads any answer to the end: a server that ignores `Range` would send a whole checkpoint.
Credentials go to the server that they were given for, and the target of a redirect is not shown.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from statecli.core.errors import PlaceUnreadable, UnreadableError
from statecli.storage import connections, credentials, html_listing, redact
from statecli.storage.masked_url import hide_secrets, parse_url
from statecli.storage.object_store import Listing, Missing, Unsure, confirm_version
from statecli.storage.retry import Transient, retry
from statecli.storage.store import FileVersion

#: Largest file in bytes that is accepted from a server without ranges, and all such files together.
MAX_WHOLE_BYTES, MAX_ALL_WHOLE_BYTES = 16 << 20, 256 << 20
#: Most unread bytes of an answer that are read so that the connection can be reused, and the time limit in seconds.
MAX_DRAINED_BYTES, DRAIN_TIMEOUT_S = 16 << 10, 0.1
#: Most redirects of a request.
MAX_REDIRECTS = 10

_DOWNLOAD = "download the file first"
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="?next')
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_LENGTH = re.compile(r"\d{1,19}")
_EMPTY = re.compile(r"(?:bytes )?\*/(?P<size>\d{1,19})")
#: Paths that name a file; the URL of a folder with such a name ends with a slash.
_FILE = re.compile(
    r"\.(?:safetensors|bin|pth?|ckpt|gguf|msgpack|json|npy|npz|pkl|distcp|metadata|txt|py|onnx|h5)(?:#[^/]*)?$"
)
_BUSY = frozenset([408, 425, 429, 500, 502, 503, 504])
_REDIRECTS = frozenset([301, 302, 303, 307, 308])
#: Statuses of an answer to an expired signature, after which the first URL is requested again.
_EXPIRED = frozenset([400, 401, 403, 404, 410])


class Refused(UnreadableError):
    """The answer does not contain the requested bytes."""

    def __init__(self, text: str, status: int = 0, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers or {}

    def __reduce__(self) -> tuple[type[Refused], tuple[str]]:
        return type(self), (str(self),)  # the headers may hold secrets


class NoFile(Refused, Unsure):
    """There is no file; there may be a folder."""


class Gone(NoFile, Missing):
    """There is no such object."""


class Answer(NamedTuple):
    """The head of an answer, the URL that it came from after redirects, and the credentials for the first server."""

    response: Any
    url: str
    sent: credentials.Sent


class Http:
    """All web servers: an `ObjectStore`.

    `headers` are sent to the host of a URL alone; None: user and password of the URL or of the netrc file.
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = headers
        for value in (headers or {}).values():
            redact.hide(value.rpartition(" ")[2])
        #: The URL that the last answer came from after redirects, by the first URL.
        self._redirected: dict[str, str] = {}
        self._wholes: dict[str, tuple[bytes, FileVersion]] = {}
        #: Bytes of `_wholes`, and of such files that are being fetched.
        self._taken, self._lock = 0, threading.Lock()

    def __repr__(self) -> str:
        return "Http()"

    def get(self, url: str, offset: int, length: int, expected: FileVersion | None) -> tuple[bytes, FileVersion]:
        """See `ObjectStore.get`. After a broken connection only the rest is requested."""
        if url not in self._wholes:
            return retry(_Range(self, url, offset, length, expected).fetch, url)
        data, version = self._wholes[url]
        return data[offset : offset + length], confirm_version(expected, version)

    def listing(self, url: str) -> Listing:
        """See `ObjectStore.listing`: by the page with links that servers generate for a folder."""
        folder = _add_slash(url)
        page, answer = self.body(folder)
        names = None
        if _is_page(answer.response) and _has_same_path(answer.url, folder):
            names = html_listing.parse_names(page.decode("utf-8", "replace"), answer.url)
        if names is None:
            raise NoFile("the server sent an HTML page instead of a list of files", 200, answer.response.headers)
        return Listing(names)

    def body(self, url: str) -> tuple[bytes, Answer]:
        """Return the body of a small answer. Raises Refused, UnreadableError and Transient."""
        with self.request(url, {}) as answer:
            response = answer.response
            _refuse(answer, url)
            return _receive(response, _parse_length(response), []), answer

    @contextmanager
    def reserve(self, length: int) -> Iterator[Callable[[int], None]]:
        """Reserve memory for a whole file of at least `length` bytes; the block reports further bytes as they come.

        Raises UnreadableError if all such files together have too many bytes.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            with self._lock:
                if self._taken + count > MAX_ALL_WHOLE_BYTES:
                    mib = MAX_ALL_WHOLE_BYTES >> 20
                    raise PlaceUnreadable(
                        "the server ignores range requests, and whole files would take over "
                        f"{mib} MiB of memory; download the files first"
                    )
                self._taken += count
                taken += count

        try:
            take(length)
            yield take
        except BaseException:
            with self._lock:
                self._taken -= taken
            raise

    def keep(self, url: str, data: bytes, version: FileVersion) -> None:
        """Keep a whole file of a server without ranges for the next reads."""
        with self._lock:
            self._taken -= len(self._wholes[url][0]) if url in self._wholes else 0
            self._wholes[url] = (data, version)

    @contextmanager
    def request(self, url: str, headers: dict[str, str]) -> Iterator[Answer]:
        """Request a URL and follow redirects; after the block the connection is released, or closed with bytes left."""
        redirected = self._redirected.get(url)
        answer = self._follow(url, redirected, headers)
        if redirected is not None and answer.response.status in _EXPIRED:
            _release(answer.response)
            self._redirected.pop(url, None)
            answer = self._follow(url, None, headers)
        try:
            yield answer
        except (Transient, UnreadableError) as why:
            raise _name_server(why, answer.url, url) from None
        else:
            if answer.response.status < 300 and answer.url != credentials.strip_user(url):
                self._redirected[url] = answer.url
        finally:
            _release(answer.response)

    def _follow(self, url: str, redirected: str | None, headers: dict[str, str]) -> Answer:
        own = self._headers
        sent = credentials.credentials_for(url) if own is None else credentials.Sent(dict(own), "the credentials")
        at = redirected or credentials.strip_user(url)
        seen = set[str]()
        for _ in range(MAX_REDIRECTS + 1):
            seen.add(at)
            own = sent.headers if credentials.may_have(url, at) else {}
            try:
                response = connections.send(at, {**headers, **own, "Accept-Encoding": "identity"})
            except (Transient, UnreadableError) as why:
                raise _name_server(why, at, url) from None
            if response.status not in _REDIRECTS:
                return Answer(response, at, sent)
            _release(response)
            at = _resolve_redirect(at, response.headers.get("Location"))
            if at in seen:
                raise UnreadableError("the server redirects in a circle")
        raise UnreadableError(f"the server redirects more than {MAX_REDIRECTS} times")


class _Range:
    """A request for a range, with the parts received so far: after a broken connection only the rest is requested."""

    def __init__(self, http: Http, url: str, offset: int, length: int, expected: FileVersion | None) -> None:
        self._http, self._url = http, url
        self._offset, self._length, self._known = offset, length, expected
        self._parts: list[bytes] = []

    def fetch(self) -> tuple[bytes, FileVersion]:
        """Return the whole range. Raises Transient."""
        start = self._offset + sum(map(len, self._parts))
        end = self._offset + self._length
        if self._known is not None:
            end = min(end, self._known[0])
            if start >= end:
                return b"".join(self._parts), self._known
        with self._http.request(self._url, {"Range": f"bytes={start}-{end - 1}"}) as answer:
            return self._receive(answer, start, end - start)

    def _receive(self, answer: Answer, start: int, length: int) -> tuple[bytes, FileVersion]:
        response = answer.response
        if response.status == 416:
            return b"", confirm_version(
                self._known, FileVersion(_parse_empty_size(answer, start), _parse_marker(response))
            )
        _refuse(answer, self._url)
        if response.status == 200:
            return self._receive_whole(answer)
        size = _check_range(response, start, length)
        self._known = confirm_version(self._known, FileVersion(size, _parse_marker(response)))
        self._length = min(self._length, size - self._offset)
        data = _receive(response, self._length, self._parts)
        _refuse_surplus(response)
        if start == self._offset == 0:
            _refuse_page(answer, data, self._url)
        return data, self._known

    def _receive_whole(self, answer: Answer) -> tuple[bytes, FileVersion]:
        length = _parse_length(answer.response)
        with self._http.reserve(length or 0) as take:
            data = _receive(answer.response, length, [], take)
            _refuse_page(answer, data, self._url)
            version = confirm_version(self._known, FileVersion(len(data), _parse_marker(answer.response)))
        self._http.keep(self._url, data, version)
        return data[self._offset : self._offset + self._length], version


# --- headers---------------------------------------------------------------------------------------------------------


def _check_range(response: Any, offset: int, length: int) -> int:
    """Return the size of the file. Raises UnreadableError if the answer is another range than the requested one."""
    text = response.headers.get("Content-Range", "")
    match = _RANGE.fullmatch(text)
    if match is None:
        what = "the size of the file" if text.endswith("/*") else "the range of its answer"
        raise UnreadableError(f"the server does not report {what}; download the file first")
    start, last, size = map(int, match.groups())
    if (start, last + 1) != (offset, min(offset + length, size)) or start > last:
        raise UnreadableError(
            f"the server answered with bytes {start} to {last + 1} of {size}, but statecli requested {offset} to "
            f"{offset + length}"
        )
    if response.headers.get("Content-Length", str(last + 1 - start)) != str(last + 1 - start):
        raise UnreadableError("the server reports contradictory sizes for its answer")
    return size


def _parse_length(response: Any) -> int | None:
    """Return the length of an answer without range; None for chunks. Raises UnreadableError for too many bytes."""
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


def _parse_empty_size(answer: Answer, offset: int) -> int:
    """Return the size of a file that ends before the requested range: 0 for an empty file."""
    match = _EMPTY.fullmatch(answer.response.headers.get("Content-Range", ""))
    if match is None or int(match["size"]) > offset:
        raise Refused(
            f"the server refuses the byte range that statecli requested (HTTP 416): {_DOWNLOAD}",
            416,
            answer.response.headers,
        )
    return int(match["size"])


def _parse_marker(response: Any) -> str | None:
    """Return the marker of a `FileVersion`: ETag and date, or the date alone if the ETag is weak.

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
        raise UnreadableError("the server redirects from https:// to http://, where others could change the data")
    return target


def _add_slash(url: str) -> str:
    """Return the URL with a slash at the end of the path. Raises Missing for the name of a file."""
    link = parse_url(url)
    if link.path.endswith("/"):
        return url
    if _FILE.search(link.path):
        raise Missing("is not a folder")
    query = "" if link.query is None else f"?{link.query}"
    return f"{url.removesuffix(query)}/{query}"


def _has_same_path(url: str, requested: str) -> bool:
    """Return True if an answer is about the requested folder, on any server, and not about another page."""
    return parse_url(url).path.partition("/")[2].rstrip("/") == parse_url(requested).path.partition("/")[2].rstrip("/")


# --- refusals --------------------------------------------------------------------------------------------------------


def _refuse(answer: Answer, url: str) -> None:
    response = answer.response
    status, where = response.status, _describe_server(answer, url)
    if status in _BUSY:
        raise Transient(
            f"the server is busy (HTTP {status}{where})", _parse_retry_after(response.headers.get("Retry-After"))
        )
    if status in (404, 410):
        raise Gone(f"does not exist (HTTP {status}{where})", status, response.headers)
    if status not in (200, 206):
        # Without credentials, the requests for thirty usual names would be refused as well.
        kind = Refused if status in (401, 407) else NoFile
        raise kind(_explain_refusal(status, where, answer, url), status, response.headers)
    codings = ",".join(response.headers.get(name, "") for name in ("Content-Encoding", "Transfer-Encoding")).lower()
    coding = " ".join(name for name in re.split(r"[\s,]+", codings) if name not in ("", "identity", "chunked"))
    if coding:
        _refuse_page(answer, b"<html", url)
        raise UnreadableError(
            f"the server sends the file compressed ({coding[:16]}), so it cannot be read in parts; download the "
            "file first"
        )


def _explain_refusal(status: int, where: str, answer: Answer, url: str) -> str:
    source, why_not = answer.sent.source, answer.sent.why_not
    code = f"(HTTP {status}{where})"
    if status in (401, 403) and source is not None and not credentials.may_have(url, answer.url):
        return f"access is refused {code}: {source} are for the server of the URL and were not sent to the other server"
    if status == 401 and source is None:
        how = "write them into the URL, https://USER:PASSWORD@…, or into ~/.netrc"
        return f"a user and a password are needed {code}: {how}{f' ({why_not})' if why_not else ''}"
    if status == 401:
        return f"the server does not accept {source} {code}"
    if status == 403:
        return f"access is refused {code}: {_describe_credentials(source, url)}"
    if status == 407:
        return f"the proxy asks for a user and a password {code}: write them into its URL in the environment"
    return f"cannot be read {code}"


def _describe_credentials(source: str | None, url: str) -> str:
    if redact.MARK in url:
        return f"the URL contains {redact.MARK} in place of a secret; use the original URL"
    if source is not None:
        return f"{source} were sent, but do not give access"
    if parse_url(url).query is not None:
        return "the query was sent unchanged; a signature in the query may have expired"
    return "no user and no password were sent"


def _describe_server(answer: Answer, url: str) -> str:
    """Return the server that a redirect led to, for a message; empty for the server of the URL."""
    return f" from {credentials.parse_server(answer.url)}" if _is_other_server(answer.url, url) else ""


def _is_other_server(at: str, url: str) -> bool:
    return credentials.parse_server(at) != credentials.parse_server(url)


def _name_server(why: Transient | UnreadableError, at: str, url: str) -> Transient | UnreadableError:
    """Return the error with the name of the server that caused the error after a redirect."""
    was_redirected = at != credentials.strip_user(url)
    if was_redirected and str(why) == credentials.NO_URL:
        return UnreadableError("the server redirects to an invalid URL")
    if not was_redirected or not _is_other_server(at, url) or type(why) not in (Transient, UnreadableError):
        return why
    text = str(why)
    text = (
        text if credentials.parse_server(at) in text else f"{text} ({credentials.parse_server(at)}, after a redirect)"
    )
    return Transient(text, why.after) if isinstance(why, Transient) else UnreadableError(text)


def _is_page(response: Any) -> bool:
    return "html" in response.headers.get("Content-Type", "").lower()


def _refuse_page(answer: Answer, data: bytes, url: str) -> None:
    """Raise Refused for an HTML page; readers of formats refuse other files."""
    if not _is_page(answer.response) or not html_listing.is_html(data):
        return
    was_redirected = answer.url != credentials.strip_user(url)
    after = f", after a redirect to {credentials.parse_server(answer.url)}" if was_redirected else ""
    page = f"is an HTML page, perhaps a login or an error page (HTTP {answer.response.status}{after})"
    raise NoFile(page + _suggest_url(url), answer.response.status, answer.response.headers)


def _suggest_url(url: str) -> str:
    """Return advice for the URL of a page about a file on a known host; empty for other URLs."""
    host, path = credentials.parse_host(url), parse_url(url).path
    if host in ("huggingface.co", "github.com") and "/blob/" in path:
        return f"; for the file itself write /{'resolve' if host == 'huggingface.co' else 'raw'}/ in place of /blob/"
    return "; use an hf:// URL instead" if host == "huggingface.co" else ""


def _parse_retry_after(text: str | None) -> float | None:
    """Return the seconds that a server asks to wait, as a number or as a date; None without a valid header."""
    if not text:
        return None
    if text.strip().isdecimal():
        return float(text.strip()[:9])
    import time
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


# --- bodies ----------------------------------------------------------------------------------------------------------


def _receive(response: Any, length: int | None, parts: list[bytes], take: Callable[[int], None] | None = None) -> bytes:
    """Return `parts` and the rest of the answer, `length` bytes together. Raises Transient; `parts` keeps what came.

    The next attempt resumes after `parts`. `read1` returns each byte that came before the connection broke.
    Without a length, `take` is called with the number of bytes as they come.
    """
    from urllib3 import exceptions

    have, error = sum(map(len, parts)), None
    while length is None or have < length:
        try:
            part = response.read1(min(1 << 18, MAX_WHOLE_BYTES + 1 if length is None else length - have))
        except (exceptions.HTTPError, ValueError) as why:
            part, error = b"", connections.translate_error(why) if isinstance(why, exceptions.HTTPError) else None
            length = -1 if length is None else length
        if not part:
            break
        parts.append(part)
        have += len(part)
        if length is None and take is not None:
            take(len(part))
        if length is None and have > MAX_WHOLE_BYTES:
            raise UnreadableError(
                "the server ignores range requests and does not report the size of its answer; download the file first"
            )
    if length is not None and have != length:
        _raise_cut(error, have, length)
    return b"".join(parts)


def _raise_cut(error: Exception | None, have: int, length: int) -> None:
    of = f" of {length:,}" if length >= 0 else ""
    if error is not None and "cut" not in str(error):
        raise Transient(f"{error}; {have:,}{of} bytes arrived")
    raise Transient(f"the connection was cut after {have:,}{of} bytes")


def _refuse_surplus(response: Any) -> None:
    """Raise UnreadableError if chunks go on after the range."""
    from urllib3 import exceptions

    if response.length_remaining is not None or "chunked" not in response.headers.get("Transfer-Encoding", "").lower():
        return
    with suppress(exceptions.HTTPError, ValueError):  # all requested bytes have come
        _hurry(response)
        if response.read1(1):
            raise UnreadableError("the server reports contradictory sizes for its answer")


def _hurry(response: Any) -> None:
    if response.connection is not None:
        response.connection.pace.hurry(DRAIN_TIMEOUT_S)


def _release(response: Any) -> None:
    """Release the connection, or close a connection with many unread bytes."""
    left = response.length_remaining
    try:
        if response.closed or left == 0 or (left is not None and left <= MAX_DRAINED_BYTES):
            _hurry(response)
            response.drain_conn()
        else:
            response.close()
    finally:
        response.release_conn()


def fetch_document(url: str, headers: Mapping[str, str]) -> tuple[Any, str | None]:
    """Return a JSON document and the URL of the next page. Raises Refused, UnreadableError and Transient."""
    import json

    raw, answer = Http(headers).body(url)
    try:
        document = json.loads(raw)
    except ValueError:
        raise UnreadableError("the answer of the server is not valid JSON") from None
    following = _NEXT.search(answer.response.headers.get("Link", ""))
    return document, following[1] if following else None
