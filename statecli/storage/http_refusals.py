"""Answers of a web server that are not the requested bytes: refusals, busy servers and HTML pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from statecli.core.errors import UnreadableError
from statecli.storage import connections, credentials, html_listing, redact
from statecli.storage.masked_url import parse_url
from statecli.storage.object_store import Missing, Unsure
from statecli.storage.retry import ConnectionCut, Transient

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse


_BUSY_STATUSES = frozenset([408, 425, 429, 500, 502, 503, 504])


class RangeRefused(UnreadableError):
    """Error: the answer does not contain the requested bytes."""

    def __init__(self, text: str, status: int = 0, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers or {}

    def __reduce__(self) -> tuple[type[RangeRefused], tuple[str]]:
        return type(self), (str(self),)  # the headers may contain secrets


class NoFile(RangeRefused, Unsure):
    """Error: the answer is a refusal or an HTML page, not the file; a folder may exist."""


class Gone(NoFile, Missing):
    """Error: the object does not exist."""


class Response(msgspec.Struct, frozen=True):
    """HTTP response before its body is read, with its URL after redirects, and the credentials for the first server."""

    response: BaseHTTPResponse
    url: str
    sent: credentials.Sent


def refuse(answer: Response, url: str) -> None:
    """Raise the error of an answer whose status or coding shows that its body is not the requested bytes."""
    response = answer.response
    status = response.status
    origin = f" from {credentials.parse_server(answer.url)}" if _is_other_server(answer.url, url) else ""
    if status in _BUSY_STATUSES:
        raise Transient(
            f"the server is busy (HTTP {status}{origin})", _parse_retry_after(response.headers.get("Retry-After"))
        )
    if status in (404, 410):
        raise Gone(f"does not exist (HTTP {status}{origin})", status, response.headers)
    if status not in (200, 206):
        # 401 and 407 do not count as "no file", because requests for thirty usual names would be refused as well.
        kind = RangeRefused if status in (401, 407) else NoFile
        raise kind(_explain_refusal(status, origin, answer, url), status, response.headers)
    codings = ",".join(response.headers.get(name, "") for name in ("Content-Encoding", "Transfer-Encoding")).lower()
    coding = " ".join(name for name in re.split(r"[\s,]+", codings) if name not in ("", "identity", "chunked"))
    if coding:
        refuse_page(answer, b"<html", url)
        raise UnreadableError(
            f"the server sends the file compressed ({coding[:16]}), so it cannot be read in parts; download the "
            "file first"
        )


def _explain_refusal(status: int, origin: str, answer: Response, url: str) -> str:
    source, why_not = answer.sent.source, answer.sent.why_not
    code = f"(HTTP {status}{origin})"
    if status in (401, 403) and source is not None and not credentials.may_share_credentials(url, answer.url):
        return f"access is refused {code}: {source} were not sent, because the URL redirects to another server"
    if status == 401 and source is None:
        advice = "write the user name and the password into the URL, https://USER:PASSWORD@…, or into ~/.netrc"
        return f"a user name and a password are needed {code}: {advice}{f' ({why_not})' if why_not else ''}"
    if status == 401:
        return f"the server does not accept {source} {code}"
    if status == 403:
        return f"access is refused {code}: {_describe_credentials(source, url)}"
    if status == 407:
        return f"the proxy asks for a user name and a password {code}: {connections.ADD_TO_PROXY_URL}"
    return f"cannot be read {code}"


def _describe_credentials(source: str | None, url: str) -> str:
    if redact.MARK in url:
        return f"the URL contains {redact.MARK} in place of a secret; use the original URL"
    if source is not None:
        return f"{source} were sent, but do not give access"
    if parse_url(url).query is not None:
        return "the query was sent unchanged; a signature in the query may have expired"
    return "statecli sent no user name and no password"


def _is_other_server(at: str, url: str) -> bool:
    return credentials.parse_server(at) != credentials.parse_server(url)


def name_server(why: Transient | UnreadableError, at: str, url: str) -> Transient | UnreadableError:
    """Return the error with the name of the server after a redirect, or with advice about TLS."""
    was_redirected = at != credentials.strip_user(url)
    if not was_redirected and isinstance(why, ConnectionCut) and url[:5].lower() == "http:":
        return ConnectionCut(f"{why} before an answer came; if the server uses TLS, write https://", why.retry_after_s)
    if was_redirected and isinstance(why, credentials.InvalidUrl):
        return UnreadableError("the server redirects to an invalid URL")
    extensible_types = (Transient, ConnectionCut, UnreadableError)
    if not was_redirected or not _is_other_server(at, url) or type(why) not in extensible_types:
        return why
    text, server = str(why), credentials.parse_server(at)
    if server not in text:
        problem, semicolon, advice = text.partition("; ")
        text = f"{problem} ({server}, after a redirect){semicolon}{advice}"
    return Transient(text, why.retry_after_s) if isinstance(why, Transient) else UnreadableError(text)


def is_page(response: BaseHTTPResponse) -> bool:
    """Return True if the server declares the body as HTML."""
    return "html" in response.headers.get("Content-Type", "").lower()


def refuse_page(answer: Response, data: bytes, url: str) -> None:
    """Raise NoFile for an HTML page. Format readers refuse other wrong files."""
    if not is_page(answer.response) or not html_listing.is_html(data):
        return
    was_redirected = answer.url != credentials.strip_user(url)
    redirect_text = f", after a redirect to {credentials.parse_server(answer.url)}" if was_redirected else ""
    page = f"is an HTML page, perhaps a login or an error page (HTTP {answer.response.status}{redirect_text})"
    raise NoFile(page + _suggest_url(url), answer.response.status, answer.response.headers)


def _suggest_url(url: str) -> str:
    """Return advice for the URL of a web page about a file on a known host; "" for other URLs."""
    host, path = credentials.parse_host(url), parse_url(url).path
    if host in ("huggingface.co", "github.com") and "/blob/" in path:
        return f"; to read the file, write /{'resolve' if host == 'huggingface.co' else 'raw'}/ instead of /blob/"
    return "; use an hf:// URL instead" if host == "huggingface.co" else ""


def _parse_retry_after(text: str | None) -> float | None:
    """Return the wait in seconds that the header Retry-After requests; None if the header is missing or invalid."""
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
