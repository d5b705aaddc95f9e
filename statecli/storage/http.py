"""http and https: ranges (RFC 9110, section 14), each answer held to what was asked before it is read.

fsspec's own reads to the end whatever comes; a server that ignores `Range` would send a checkpoint whole. Credentials
go to the server that they were given for; where a redirect leads is known to nobody else.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from statecli.core.errors import PlaceUnreadable, UnreadableError
from statecli.storage import connections, credentials, html_listing, redact
from statecli.storage.retry import Transient, repeated
from statecli.storage.store import Known, Listing, Missing, Unsure, merged
from statecli.storage.url import hide, parts

#: Bytes of an answer that are taken although a range of it was asked for, and of all such files together.
WHOLE, WHOLES = 16 << 20, 256 << 20
#: Bytes of an answer that nobody wants, which are read so that its connection can be used again, if they come at once.
DRAINED, DRAIN_S = 16 << 10, 0.1
#: How often a request is led elsewhere.
REDIRECTS = 10

_DOWNLOAD = "download it first"
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="?next')
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_LENGTH = re.compile(r"\d{1,19}")
_EMPTY = re.compile(r"(?:bytes )?\*/(?P<size>\d{1,19})")
#: Whoever means a folder of such a name, also one with a section behind it, ends it with a slash.
_FILE = re.compile(
    r"\.(?:safetensors|bin|pth?|ckpt|gguf|msgpack|json|npy|npz|pkl|distcp|metadata|txt|py|onnx|h5)(?:#[^/]*)?$"
)
_BUSY = frozenset([408, 425, 429, 500, 502, 503, 504])
_ELSEWHERE = frozenset([301, 302, 303, 307, 308])
#: What the end of a signature, or another server, is answered with.
_EXPIRED = frozenset([400, 401, 403, 404, 410])


class Refused(UnreadableError):
    """An answer of this status and with these headers has not what was asked for."""

    def __init__(self, text: str, status: int = 0, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers or {}

    def __reduce__(self) -> tuple[type[Refused], tuple[str]]:
        return type(self), (str(self),)  # where it was led is nobody else's


class NoFile(Refused, Unsure):
    """There may be a folder, though."""


class Gone(NoFile, Missing):
    """There is no such object."""


class Answer(NamedTuple):
    """The head of an answer, the URL that gave it, and what was sent to the server that was asked first."""

    response: Any
    url: str
    sent: credentials.Sent


class Http:
    """Every server there is; `headers` are sent to the host that a URL names, and to no other.

    None: user and password of the URL or of the netrc file.
    """

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = headers
        for value in (headers or {}).values():
            redact.remember(value.rpartition(" ")[2])
        #: Where the last answer for a URL came from, if that was elsewhere.
        self._led: dict[str, str] = {}
        self._wholes: dict[str, tuple[bytes, Known]] = {}
        #: Bytes of them, and of those that are on their way.
        self._taken, self._lock = 0, threading.Lock()

    def __repr__(self) -> str:
        return "Http()"

    def get(self, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
        """As `Store.get`, tried again where that may help: what came before a cut is not asked for twice."""
        if url not in self._wholes:
            return repeated(_Range(self, url, offset, length, known).fetch, url)
        data, found = self._wholes[url]
        return data[offset : offset + length], merged(known, found)

    def listing(self, url: str) -> Listing:
        """As `Store.listing`, of the page with links that servers make of a folder."""
        folder = _as_folder(url)
        page, answer = self.body(folder)
        found = None
        if _is_page(answer.response) and _is_of(answer.url, folder):
            found = html_listing.names(page.decode("utf-8", "replace"), answer.url)
        if found is None:
            raise NoFile("answers with a page, and with no list of files", 200, answer.response.headers)
        return Listing(found)

    def body(self, url: str) -> tuple[bytes, Answer]:
        """All of a small answer. Raises Refused, UnreadableError and Transient."""
        with self.answered(url, {}) as answer:
            response = answer.response
            _refuse(answer, url)
            return _received(response, _length(response), []), answer

    @contextmanager
    def room(self, length: int) -> Iterator[Callable[[int], None]]:
        """Around fetching all of a file of `length` bytes at least; each further byte that comes is told.

        Raises UnreadableError, before they are fetched, where all such files have too many bytes together.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            with self._lock:
                if self._taken + count > WHOLES:
                    mib = WHOLES >> 20
                    raise PlaceUnreadable(f"the server ignores ranges, and its files have over {mib} MiB: {_DOWNLOAD}")
                self._taken += count
                taken += count

        try:
            take(length)
            yield take
        except BaseException:
            with self._lock:
                self._taken -= taken
            raise

    def keep(self, url: str, data: bytes, known: Known) -> None:
        """All of a file of a server without ranges, so that it is fetched once."""
        with self._lock:
            self._taken -= len(self._wholes[url][0]) if url in self._wholes else 0
            self._wholes[url] = (data, known)

    @contextmanager
    def answered(self, url: str, headers: dict[str, str]) -> Iterator[Answer]:
        """The answer for a URL, wherever that leads. Its connection is closed where bytes of it are left unread."""
        led = self._led.get(url)
        answer = self._led_to(url, led, headers)
        if led is not None and answer.response.status in _EXPIRED:
            _end(answer.response)
            self._led.pop(url, None)
            answer = self._led_to(url, None, headers)
        try:
            yield answer
        except (Transient, UnreadableError) as why:
            raise _placed(why, answer.url, url) from None
        else:
            if answer.response.status < 300 and answer.url != credentials.bare(url):
                self._led[url] = answer.url
        finally:
            _end(answer.response)

    def _led_to(self, url: str, led: str | None, headers: dict[str, str]) -> Answer:
        own = self._headers
        sent = credentials.of(url) if own is None else credentials.Sent(dict(own), "the credentials")
        at = led or credentials.bare(url)
        seen = set[str]()
        for _ in range(REDIRECTS + 1):
            seen.add(at)
            own = sent.headers if credentials.may_have(url, at) else {}
            try:
                response = connections.ask(at, {**headers, **own, "Accept-Encoding": "identity"})
            except (Transient, UnreadableError) as why:
                raise _placed(why, at, url) from None
            if response.status not in _ELSEWHERE:
                return Answer(response, at, sent)
            _end(response)
            at = _next(at, response.headers.get("Location"))
            if at in seen:
                raise UnreadableError("the server redirects in a circle")
        raise UnreadableError(f"the server redirects more than {REDIRECTS} times")


class _Range:
    """One range on its way: what has come of it, so that after a cut only the rest is asked for."""

    def __init__(self, http: Http, url: str, offset: int, length: int, known: Known | None) -> None:
        self._http, self._url = http, url
        self._offset, self._length, self._known = offset, length, known
        self._parts: list[bytes] = []

    def fetch(self) -> tuple[bytes, Known]:
        """All of it, or Transient."""
        start = self._offset + sum(map(len, self._parts))
        end = self._offset + self._length
        if self._known is not None:
            end = min(end, self._known[0])
            if start >= end:
                return b"".join(self._parts), self._known
        with self._http.answered(self._url, {"Range": f"bytes={start}-{end - 1}"}) as answer:
            return self._of(answer, start, end - start)

    def _of(self, answer: Answer, start: int, length: int) -> tuple[bytes, Known]:
        response = answer.response
        if response.status == 416:
            return b"", merged(self._known, (_emptiness(answer, start), _version(response)))
        _refuse(answer, self._url)
        if response.status == 200:
            return self._whole(answer)
        size = _span(response, start, length)
        self._known = merged(self._known, (size, _version(response)))
        self._length = min(self._length, size - self._offset)
        data = _received(response, self._length, self._parts)
        _refuse_more(response)
        if start == self._offset == 0:
            _refuse_page(answer, data, self._url)
        return data, self._known

    def _whole(self, answer: Answer) -> tuple[bytes, Known]:
        length = _length(answer.response)
        with self._http.room(length or 0) as take:
            data = _received(answer.response, length, [], take)
            _refuse_page(answer, data, self._url)
            known = merged(self._known, (len(data), _version(answer.response)))
        self._http.keep(self._url, data, known)
        return data[self._offset : self._offset + self._length], known


# --- heads -----------------------------------------------------------------------------------------------------------


def _span(response: Any, offset: int, length: int) -> int:
    """The size of the file, where the answer is the range that was asked for."""
    said = response.headers.get("Content-Range", "")
    found = _RANGE.fullmatch(said)
    if found is None:
        what = "how long the file is" if said.endswith("/*") else "which range it answers with"
        raise UnreadableError(f"the server does not say {what}: download it first")
    start, last, size = map(int, found.groups())
    if (start, last + 1) != (offset, min(offset + length, size)) or start > last:
        raise UnreadableError(
            f"the server answered with bytes {start} to {last + 1} of {size}, asked for {offset} to {offset + length}"
        )
    if response.headers.get("Content-Length", str(last + 1 - start)) != str(last + 1 - start):
        raise UnreadableError("the server contradicts itself about how many bytes it answers with")
    return size


def _length(response: Any) -> int | None:
    """How many bytes a whole answer has, if that is few enough to take them; None where its end says so."""
    said = response.headers.get("Content-Length", "")
    if not said and "chunked" in response.headers.get("Transfer-Encoding", "").lower():
        return None
    if not _LENGTH.fullmatch(said):
        raise UnreadableError("the server does not say how long its answer is: download it first")
    if int(said) > WHOLE:
        raise UnreadableError(f"the server ignores ranges and would send all {int(said):,} bytes: download it first")
    return int(said)


def _emptiness(answer: Answer, offset: int) -> int:
    """0 where no range can be answered, for the file is empty; the size of one that has become shorter."""
    found = _EMPTY.fullmatch(answer.response.headers.get("Content-Range", ""))
    if found is None or int(found["size"]) > offset:
        raise Refused(f"the server refuses the range (HTTP 416): {_DOWNLOAD}", 416, answer.response.headers)
    return int(found["size"])


def _version(response: Any) -> str | None:
    """What tells two versions apart: an ETag that is of the bytes, not of one server behind a balancer; the date."""
    etag, when = (" ".join(response.headers.get(name, "").split()) for name in ("ETag", "Last-Modified"))
    if etag.startswith("W/") and when:
        etag = ""
    return f"{etag}\n{when}".rstrip("\n") or None


def _next(at: str, location: str | None) -> str:
    from urllib.parse import urljoin

    if not location:
        raise UnreadableError("the server redirects, and does not say where to")
    try:
        found = urljoin(at, location).partition("#")[0]
        hide(found)
        found = credentials.bare(found)
        is_none = found.startswith("http") and not credentials.host(found)
    except (ValueError, UnreadableError):
        is_none = True
    if is_none:
        raise UnreadableError("the server redirects to what is no URL")
    if not found.startswith(("http://", "https://")):
        raise UnreadableError("the server redirects to what is no http:// or https://")
    if at.startswith("https://") and not found.startswith("https://"):
        raise UnreadableError("the server redirects from https:// to http://, where anybody could change what it sends")
    return found


def _as_folder(url: str) -> str:
    """The URL with a slash at the end of its way. Raises Missing for what is a file by its name."""
    link = parts(url)
    if link.way.endswith("/"):
        return url
    if _FILE.search(link.way):
        raise Missing("is no folder")
    query = "" if link.query is None else f"?{link.query}"
    return f"{url.removesuffix(query)}/{query}"


def _is_of(url: str, asked: str) -> bool:
    """Whether an answer is of the folder that was asked for, on whatever server, and not of a page elsewhere."""
    return parts(url).way.partition("/")[2].rstrip("/") == parts(asked).way.partition("/")[2].rstrip("/")


# --- refusals --------------------------------------------------------------------------------------------------------


def _refuse(answer: Answer, url: str) -> None:
    response = answer.response
    status, where = response.status, _where(answer, url)
    if status in _BUSY:
        raise Transient(f"the server is busy (HTTP {status}{where})", _after(response.headers.get("Retry-After")))
    if status in (404, 410):
        raise Gone(f"is not there (HTTP {status}{where})", status, response.headers)
    if status not in (200, 206):
        # Whom a server does not know it is not asked for thirty names more.
        kind = Refused if status in (401, 407) else NoFile
        raise kind(_words(status, where, answer, url), status, response.headers)
    codings = ",".join(response.headers.get(name, "") for name in ("Content-Encoding", "Transfer-Encoding")).lower()
    coding = " ".join(one for one in re.split(r"[\s,]+", codings) if one not in ("", "identity", "chunked"))
    if coding:
        _refuse_page(answer, b"<html", url)
        raise UnreadableError(f"is sent compressed ({coding[:16]}), which nobody asked for: download it first")


def _words(status: int, where: str, answer: Answer, url: str) -> str:
    source, why_not = answer.sent.source, answer.sent.why_not
    code = f"(HTTP {status}{where})"
    if status in (401, 403) and source is not None and not credentials.may_have(url, answer.url):
        return f"access is refused {code}: {source} are for the server of the URL, and were not sent to that one"
    if status == 401 and source is None:
        how = "write them into the URL, https://USER:PASSWORD@…, or into ~/.netrc"
        return f"a user and a password are needed {code}: {how}{f' ({why_not})' if why_not else ''}"
    if status == 401:
        return f"{source} are not accepted {code}"
    if status == 403:
        return f"access is refused {code}: {_sent(source, url)}"
    if status == 407:
        return f"the proxy asks for a user and a password {code}: write them into its URL in the environment"
    return f"cannot be read {code}"


def _sent(source: str | None, url: str) -> str:
    if redact.MARK in url:
        return f"with {redact.MARK} in it, it is a name as it is shown: give the URL itself"
    if source is not None:
        return f"{source} were sent"
    if parts(url).query is not None:
        return "the query was sent as it was given; a signature in it may have expired"
    return "no user and no password were sent"


def _where(answer: Answer, url: str) -> str:
    """From which other server an answer is."""
    return f" from {credentials.place(answer.url)}" if _is_elsewhere(answer.url, url) else ""


def _is_elsewhere(at: str, url: str) -> bool:
    return credentials.place(at) != credentials.place(url)


def _placed(why: Transient | UnreadableError, at: str, url: str) -> Transient | UnreadableError:
    """The same, naming the server to which a redirect led, where it was that one's doing."""
    from_there = at != credentials.bare(url)
    if from_there and str(why) == credentials.NO_URL:
        return UnreadableError("the server redirects to what is no URL")
    if not from_there or not _is_elsewhere(at, url) or type(why) not in (Transient, UnreadableError):
        return why
    text = str(why)
    text = text if credentials.place(at) in text else f"{text} ({credentials.place(at)}, after a redirect)"
    return Transient(text, why.after) if isinstance(why, Transient) else UnreadableError(text)


def _is_page(response: Any) -> bool:
    return "html" in response.headers.get("Content-Type", "").lower()


def _refuse_page(answer: Answer, data: bytes, url: str) -> None:
    """Raises Refused for what says that it is HTML, and is; formats know what else is no checkpoint."""
    if not _is_page(answer.response) or not html_listing.is_html(data):
        return
    led = answer.url != credentials.bare(url)
    after = f", after a redirect to {credentials.place(answer.url)}" if led else ""
    page = f"is an HTML page, perhaps a login or an error page (HTTP {answer.response.status}{after})"
    raise NoFile(page + _instead(url), answer.response.status, answer.response.headers)


def _instead(url: str) -> str:
    """What URL people mean who give that of the page about a file."""
    host, way = credentials.host(url), parts(url).way
    if host in ("huggingface.co", "github.com") and "/blob/" in way:
        return f"; the file itself is behind /{'resolve' if host == 'huggingface.co' else 'raw'}/ in place of /blob/"
    return "; name it hf://…" if host == "huggingface.co" else ""


def _after(said: str | None) -> float | None:
    """Seconds that a server asks for: so many, or until a date."""
    if not said:
        return None
    if said.strip().isdecimal():
        return float(said.strip()[:9])
    import time
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


# --- bodies ----------------------------------------------------------------------------------------------------------


def _received(
    response: Any, length: int | None, parts: list[bytes], take: Callable[[int], None] | None = None
) -> bytes:
    """`parts` and what comes behind them: `length` bytes in all. Raises Transient, and `parts` has what came.

    Without a length, what comes is told to `take`.
    """
    from urllib3 import exceptions

    have, error = sum(map(len, parts)), None
    while length is None or have < length:
        try:
            part = response.read1(min(1 << 18, WHOLE + 1 if length is None else length - have))
        except (exceptions.HTTPError, ValueError) as why:
            part, error = b"", connections.failed(why) if isinstance(why, exceptions.HTTPError) else None
            length = -1 if length is None else length
        if not part:
            break
        parts.append(part)
        have += len(part)
        if length is None and take is not None:
            take(len(part))
        if length is None and have > WHOLE:
            raise UnreadableError("the server ignores ranges, and sends no one knows how much: download it first")
    if length is not None and have != length:
        _raise_cut(error, have, length)
    return b"".join(parts)


def _raise_cut(error: Exception | None, have: int, length: int) -> None:
    of = f" of {length:,}" if length >= 0 else ""
    if error is not None and "cut" not in str(error):
        raise Transient(f"{error}; {have:,}{of} bytes came")
    raise Transient(f"the connection was cut after {have:,}{of} bytes")


def _refuse_more(response: Any) -> None:
    """Raises UnreadableError where chunks go on behind the range that they are said to be."""
    from urllib3 import exceptions

    if response.length_remaining is not None or "chunked" not in response.headers.get("Transfer-Encoding", "").lower():
        return
    with suppress(exceptions.HTTPError, ValueError):  # all that was asked for has come
        _hurry(response)
        if response.read1(1):
            raise UnreadableError("the server contradicts itself about how many bytes it answers with")


def _hurry(response: Any) -> None:
    if response.connection is not None:
        response.connection.pace.hurry(DRAIN_S)


def _end(response: Any) -> None:
    """Gives the connection back, or closes it where much of the answer is left to be read, or does not come."""
    left = response.length_remaining
    try:
        if response.closed or left == 0 or (left is not None and left <= DRAINED):
            _hurry(response)
            response.drain_conn()
        else:
            response.close()
    finally:
        response.release_conn()


def document(url: str, headers: Mapping[str, str]) -> tuple[Any, str | None]:
    """A JSON document, and the URL of its next page. Raises Refused, UnreadableError and Transient."""
    import json

    raw, answer = Http(headers).body(url)
    try:
        found = json.loads(raw)
    except ValueError:
        raise UnreadableError("the server answered with no JSON") from None
    following = _NEXT.search(answer.response.headers.get("Link", ""))
    return found, following[1] if following else None
