"""User and password for a server: those of the URL, or else of the netrc file. They go to that server alone."""

from __future__ import annotations

import os
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from statecli.core.errors import UnreadableError
from statecli.storage import redact
from statecli.storage.url import parts

NO_URL = "is no URL: it names no host, or an impossible one"


class Sent(NamedTuple):
    """The headers with them, and where they are from, in words; None where there are none, `why_not` if that is odd."""

    headers: dict[str, str]
    source: str | None
    why_not: str | None = None


def of(url: str) -> Sent:
    """What is sent to the server that a URL, as it was typed, names."""
    link = parts(url)
    if link.user is not None:
        user, _, password = link.user.partition(":")
        return Sent(_basic(unquote(user), unquote(password)), "the user and the password of the URL")
    return _of_netrc(host(url))


def _of_netrc(name: str) -> Sent:
    path = os.environ.get("NETRC") or os.path.expanduser("~/_netrc" if os.name == "nt" else "~/.netrc")
    if not os.path.isfile(path):
        return Sent({}, None)
    import netrc

    try:
        found = netrc.netrc(path).authenticators(name)
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return Sent({}, None, "the netrc file cannot be read")
    if found is None:
        return Sent({}, None)
    return Sent(_basic(found[0], found[2] or ""), "the user and the password of the netrc file")


def _basic(user: str, password: str) -> dict[str, str]:
    import base64

    text = base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
    redact.remember(password, text)
    return {"Authorization": f"Basic {text}"}


def bare(url: str) -> str:
    """The URL without user and password, and as it can be asked for: `#` is in the name of a file, HTTPS is https."""
    link = parts(url)
    way = link.way
    try:
        way.partition("/")[0].encode("ascii")
    except UnicodeEncodeError:
        way = _ascii(way)
    return link.scheme.lower() + (way + ("" if link.query is None else f"?{link.query}")).replace("#", "%23")


def _ascii(way: str) -> str:
    name, slash, rest = way.partition("/")
    try:
        return name.encode("idna").decode("ascii") + slash + rest
    except UnicodeError:
        return way


def host(url: str) -> str:
    """The name of the server. Raises UnreadableError for what is no URL."""
    return _split(url).hostname or ""


def origin(url: str) -> tuple[str, str]:
    """Whom credentials are for: scheme, host and port. Raises UnreadableError for what is no URL."""
    found = _split(url)
    scheme = found.scheme.lower()
    place = found.netloc.lower().removesuffix(":443" if scheme == "https" else ":80")
    return scheme, place


def place(url: str) -> str:
    """The name of the server, and its port where it is no usual one."""
    return origin(url)[1]


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(bare(url))
    except ValueError:
        raise UnreadableError(NO_URL) from None


def may_have(url: str, other: str) -> bool:
    """Whether what is for the first URL's server may go to the other's: to itself, also where that is safer."""
    here, there = origin(url), origin(other)
    return here == there or (here[1] == there[1] and (here[0], there[0]) == ("http", "https"))
