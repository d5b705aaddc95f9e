"""User and password for a server, from the URL or else the netrc file; sent only to this server."""

from __future__ import annotations

import os
from contextlib import suppress
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from statecli.core.errors import UnreadableError
from statecli.storage import redact
from statecli.storage.masked_url import parse_url


class InvalidUrl(UnreadableError):
    """Error: the URL does not have a valid host name."""

    def __init__(self, message: str = "is not a URL with a valid host name") -> None:
        super().__init__(message)


class Sent(msgspec.Struct, frozen=True):
    """Headers with credentials, and text about their source. Both are empty if the server gets no credentials.

    `why_not` is the error that prevented reading credentials.
    """

    headers: dict[str, str]
    source: str | None
    why_not: str | None = None


def credentials_for(url: str) -> Sent:
    """Return the credentials for the server of a URL that the user typed."""
    link = parse_url(url)
    if link.user is not None:
        user, _, password = link.user.partition(":")
        return Sent(_encode_basic(unquote(user), unquote(password)), "the user name and the password of the URL")
    return _read_netrc(parse_host(url))


def _read_netrc(name: str) -> Sent:
    path = os.environ.get("NETRC") or os.path.expanduser("~/_netrc" if os.name == "nt" else "~/.netrc")
    if not os.path.isfile(path):
        return Sent({}, None)
    import netrc

    try:
        entry = netrc.netrc(path).authenticators(name)
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return Sent({}, None, "the netrc file cannot be read")
    if entry is None:
        return Sent({}, None)
    return Sent(_encode_basic(entry[0], entry[2] or ""), "the user name and the password of the netrc file")


def _encode_basic(user: str, password: str) -> dict[str, str]:
    import base64

    text = base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
    redact.hide(password, text)
    return {"Authorization": f"Basic {text}"}


def strip_user(url: str) -> str:
    """Return the URL to request: without user and password, with `%23` for `#`, with a lower-case scheme."""
    link = parse_url(url)
    host, slash, path = link.path.partition("/")
    if not host.isascii():
        with suppress(UnicodeError):
            host = host.encode("idna").decode("ascii")
    query = "" if link.query is None else f"?{link.query}"
    return link.scheme.lower() + (host + slash + path + query).replace("#", "%23")


def parse_host(url: str) -> str:
    """Return the name of the server. Raises UnreadableError for an impossible URL."""
    return _split(url).hostname or ""


def parse_origin(url: str) -> tuple[str, str]:
    """Return the scheme and server to which credentials belong. Raises UnreadableError for an impossible URL."""
    link = _split(url)
    scheme = link.scheme.lower()
    server = link.netloc.lower().removesuffix(":443" if scheme == "https" else ":80")
    return scheme, server


def parse_server(url: str) -> str:
    """Return the name of the server, with the port unless it is the scheme's default."""
    return parse_origin(url)[1]


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(strip_user(url))
    except ValueError:
        raise InvalidUrl from None


def may_share_credentials(url: str, other: str) -> bool:
    """Return whether credentials for `url` may go to `other`: to the same scheme and server, or from http to https."""
    first, second = parse_origin(url), parse_origin(other)
    return first == second or (first[1] == second[1] and (first[0], second[0]) == ("http", "https"))
