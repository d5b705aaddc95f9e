"""URLs, and the names by which everything else knows them: without user, password, or what a query may sign.

`https://me:pw@host/m.pt?version=3&X-Amz-Signature=5f…` is shown as `https://…@host/m.pt?version=3&X-Amz-Signature=…`.
The file beside it, `https://…@host/config.json?version=3&X-Amz-Signature=…`, is asked for with the same user and query.
What differs only in what is hidden is shown with `…2`, `…3`. A name that holds `…` is never a URL without secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from statecli.storage import files, redact

_HARMLESS = "file filename name path rev revision ref version versionid generation branch raw download dl"
#: Parameters of a query that are shown as they are: which file, and which version of it.
HARMLESS = frozenset(_HARMLESS.split())
#: Such a value holds no parameter of its own.
_PLAIN = re.compile(r"(?:[\w./~+ -]|%2[0F])*", re.IGNORECASE)
_PARAMETER = re.compile(r"[\w.~%\[\]-]{1,40}")
#: Parameters whose values are secret for sure; others say a format or a date.
_SECRET = re.compile("sig|token|secret|passw|pwd|key|auth|cred|session|jwt", re.IGNORECASE)
#: Such a value where no query is, and all behind it: it may have a `/`.
_TOKEN = re.compile(rf"[?#][^/]*?(?:{_SECRET.pattern})[^/=]*=.*", re.IGNORECASE | re.DOTALL)
#: Schemes in which what stands before `@` is no user: `hf://gpt2@main`, `abfs://container@account`.
_NO_USER = frozenset(("hf", "abfs", "abfss", "az", "adl", "wasb", "wasbs"))

#: The links of a chain: `zip://m.pt::https://host/a.zip`.
_CHAIN = re.compile(r"::(?=[a-zA-Z][\w+.-]*(?:::|://))")
#: A URL somewhere in a text.
_INSIDE = re.compile(r"[a-zA-Z][\w+.-]*://[^\s\"'<>(){},]+")


class Typed(NamedTuple):
    """A URL as it was typed, in two: up to where the way of a file ends, and its query or the rest of the chain."""

    way: str
    rest: str


#: The name shown -> the URL; the folders around it too.
typed: dict[str, Typed] = {}


class Link(NamedTuple):
    """One URL: `https://`, `me:pw` or None, `host/m.pt`, `version=3` or None."""

    scheme: str
    user: str | None
    way: str
    query: str | None


def parts(url: str) -> Link:
    """What a URL, no chain, consists of; no fragment, for `#` may be in the name of a file.

    Whatever is taken for a password with `/`, `?` or `#` in it is one: too much is hidden rather than too little.
    """
    scheme, mark, rest = url.partition("://")
    host = re.split("[/?]", rest, maxsplit=1)[0]
    user: str | None = None
    if "@" in host and (":" in host or scheme.rpartition("::")[2].lower() not in _NO_USER):
        user, _, _ = host.rpartition("@")
    elif "@" in rest and _odd_port(host):
        user, _, _ = rest.rpartition("@")
    way = rest[0 if user is None else len(user) + 1 :]
    at = files.query_at(scheme, way)
    return Link(scheme + mark, user, way[:at], way[at + 1 :] if at < len(way) else None)


def _odd_port(host: str) -> bool:
    _, colon, port = re.sub(r"^\[[^\]]*\]", "", host).partition(":")
    return bool(colon) and not (port.isdigit() and len(port) < 6)


def shown(url: str) -> str:
    """The name for a URL, which may be such a name already; a section behind `#` stays where it is."""
    way, mark, section = url.rpartition("#")
    if not mark or re.search("[/?@:=&;]", section):
        way, mark, section = url, "", ""
    if way in typed:
        return url
    return _named(way) + mark + section


def _named(url: str) -> str:
    hidden = redact.MARK
    for count in range(2, 1_000_000):
        pairs = list(_pairs(url, hidden))
        # Those of one user share a mark; a signature is of one file.
        apart = pairs if _has_user(url) else pairs[:1]
        if all(typed.get(name, real) == real for name, real in apart):
            break
        hidden = f"{redact.MARK}{count}"
    if hidden in pairs[0][0]:
        redact.name(url, pairs[0][0])
        for name, real in pairs:
            typed.setdefault(name, real)
    return pairs[0][0]


def _has_user(url: str) -> bool:
    return any(parts(one).user is not None for one in _CHAIN.split(url) if "://" in one)


def _pairs(url: str, hidden: str) -> Iterator[tuple[str, Typed]]:
    """The name and the URL of it, and of each folder around it down to the host."""
    # What is before the first way, as in `simplecache::https://…`, has none of its own.
    links = re.split(_CHAIN, url)
    first = next(n for n, one in enumerate(links) if "://" in one)
    before = "".join(f"{one}::" for one in links[:first])
    link, behind = parts(links[first]), links[first + 1 :]
    rest_shown = _query(link.query, hidden) + "".join(f"::{_link(one, hidden)}" for one in behind)
    rest = ("" if link.query is None else f"?{link.query}") + "".join(f"::{one}" for one in behind)
    scheme = before + link.scheme
    user = "" if link.user is None else f"{link.user}@"
    user_shown = "" if link.user is None else f"{_user(link.user, hidden)}@"
    steps = _steps(link.way)
    steps_shown = [_step(_host(steps[0], hidden), hidden), *(_step(step, hidden) for step in steps[1:])]
    for n in range(len(steps), 0, -1):
        way = "/".join(steps[:n])
        yield (
            f"{scheme}{user_shown}{'/'.join(steps_shown[:n])}{rest_shown}",
            Typed(f"{scheme}{user}{way}", rest),
        )


def hide(url: str) -> str:
    """A URL that nobody typed, as it may be shown; what is secret in it is shown nowhere from now on."""
    return _link(url, redact.MARK)


def _link(url: str, hidden: str) -> str:
    if "://" not in url:
        return url
    link = parts(url)
    first, *steps = _steps(link.way)
    way = "/".join((_step(_host(first, hidden), hidden), *(_step(step, hidden) for step in steps)))
    user = "" if link.user is None else f"{_user(link.user, hidden)}@"
    return link.scheme + user + way + _query(link.query, hidden)


def _host(text: str, hidden: str) -> str:
    """A port that is none may be a password, of whose URL the rest is missing."""
    port = re.sub(r"^\[[^\]]*\]?", "", text).partition(":")[2]
    return text.removesuffix(port) + _user(port, hidden) if port and _odd_port(text) else text


def hide_in_typo(text: str) -> None:
    """`https:/me:pw@host`, `me:pw@host`: what may be a password in what is no URL is not shown from now on.

    The text itself stays what it is: it may be the name of a file that is still to be written.
    """
    before, colon, rest = text.partition(":")
    secret, at, behind = rest.rpartition("@")
    if colon and at and secret:
        _user(secret.lstrip("/"), redact.MARK)
        redact.name(text, f"{before}:{redact.MARK}@{behind}")


def _user(text: str, hidden: str) -> str:
    user, colon, password = text.partition(":")
    redact.remember(text, password)
    redact.remember(user, sure=not colon)
    return hidden


def _steps(way: str) -> list[str]:
    token = _TOKEN.search(way)
    at = token.start() if token else len(way)
    *folders, last = way[:at].split("/")
    return [*folders, last + way[at:]]


def _step(step: str, hidden: str) -> str:
    """`;jsessionid=…`, `#access_token=…`, and `?signature=…` where `?` begins no query."""
    return re.sub(r"(?<=[;?#])[^;?#]*=[^;?#]*", lambda found: _query(found[0], hidden)[1:], step)


def _query(query: str | None, hidden: str) -> str:
    if query is None:
        return ""
    return "?" + "&".join(_parameter(one, hidden) for one in query.split("&"))


def _parameter(text: str, hidden: str) -> str:
    name, _, value = text.partition("=")
    harmless = name.lower() in HARMLESS
    if not text or (harmless and _PLAIN.fullmatch(value)):
        return text
    # What ends in `=` may be a token alone.
    if not value.strip("=") or not _PARAMETER.fullmatch(name):
        redact.remember(text)
        return hidden
    redact.remember(value, sure=_SECRET.search(name) is not None)
    return f"{name}={hidden}"


def url_of(path: str) -> str:
    """The URL for a name: as it was typed, or that of a file in a folder that was typed, or around a file that was."""
    if redact.MARK not in path:
        return path
    if path in typed:
        return "".join(typed[path])
    scheme, way, rest = files.link(path)
    folder, inner = way, ""
    while "/" in folder:
        folder, _, name = folder.rpartition("/")
        inner = f"/{name}{inner}"
        known = typed.get(f"{scheme}{folder}{rest}")
        if known is not None:
            return known.way + inner + known.rest
    return path


def inside(text: str) -> str:
    """Text that is no URL, with the names of those in it."""
    return _INSIDE.sub(lambda found: shown(found[0]), text)


def outside(text: str) -> str:
    """The text again, with the URLs for the names in it."""
    return _INSIDE.sub(lambda found: url_of(found[0]), text) if redact.MARK in text else text


def is_folder(path: str) -> bool:
    """Whether it can only be a folder, as its name ends."""
    scheme, way, _ = files.link(path)
    # `memory://m.pt` and `zip://m.pt::…` are files: nothing but plain ones begins with a host or a bucket.
    return way.endswith("/") or not way or ("/" not in way and files.is_plain(scheme))
