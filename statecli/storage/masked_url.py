"""Masked URLs: URLs for output, without user, password and signatures.

`https://me:pw@host/m.pt?version=3&X-Amz-Signature=5f…` is shown as `https://…@host/m.pt?version=3&X-Amz-Signature=…`.
The file next to `m.pt`, `https://…@host/config.json?version=3&X-Amz-Signature=…`, is requested with the same user and
query. URLs that differ only in their secrets are shown with `…2`, `…3`. A name with `…` is always a URL with secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from statecli.core.lazy_pattern import compile_on_use
from statecli.storage import lifetime, redact
from statecli.storage.url import find_query, split_url

_SHOWN_PARAMETERS = "file filename name path rev revision ref version versionid generation branch raw download dl"
#: Query parameters that are shown, because they select a file or its version.
SHOWN_PARAMETERS = frozenset(_SHOWN_PARAMETERS.split())
#: Value that contains no further parameter.
_PLAIN_VALUE = compile_on_use(r"(?:[\w./~+ -]|%2[0F])*", re.IGNORECASE)
_PARAMETER = compile_on_use(r"[\w.~%\[\]-]{1,40}")
#: Parts of parameter names whose values are certainly secret. Values of other parameters may be a format or a date.
_SECRET_NAME = compile_on_use("sig|token|secret|passw|pwd|key|auth|cred|session|jwt", re.IGNORECASE)
#: Secret parameter outside a query, and the text after it, which may contain `/`.
_TOKEN = compile_on_use(rf"[?#][^/]*?(?:{_SECRET_NAME.pattern})[^/=]*=.*", re.IGNORECASE | re.DOTALL)
#: Schemes in which the text before `@` is not a user: `hf://gpt2@main`, `abfs://container@account`.
_SCHEMES_WITHOUT_USER = frozenset(("hf", "abfs", "abfss", "az", "adl", "wasb", "wasbs"))

#: Separator of the links of a chain: `zip://m.pt::https://host/a.zip`.
_CHAIN = compile_on_use(r"::(?=[a-zA-Z][\w+.-]*(?:::|://))")
#: URL inside a text.
_URL_IN_TEXT = compile_on_use(r"[a-zA-Z][\w+.-]*://[^\s\"'<>(){},]+")


class TypedUrl(NamedTuple):
    """URL as typed. `start` is the text up to the end of the path; `suffix` is the query or the rest of a chain."""

    start: str
    suffix: str


class PlainUrl(msgspec.Struct, frozen=True):
    """Parts of a URL that is not a chain: `https://`, `me:pw` or None, `host/m.pt`, `version=3` or None."""

    scheme: str
    user: str | None
    path: str
    query: str | None


class _TypedUrls(dict[str, TypedUrl]):
    """Typed URLs by masked name. They include the URLs of the folders around each file."""


def typed_urls() -> dict[str, TypedUrl]:
    """Return the URLs of this process by masked name. They are kept after a command, so that a name stays usable."""
    return lifetime.for_process(_TypedUrls)


def parse_url(url: str) -> PlainUrl:
    """Parse a URL that is not a chain. A `#` does not begin a fragment, because file names may contain `#`.

    Text that may be a password with `/`, `?` or `#` counts as a password: hiding too much is safer than too little.
    """
    scheme, mark, address = url.partition("://")
    host = re.split("[/?]", address, maxsplit=1)[0]
    user: str | None = None
    if "@" in host and (":" in host or scheme.rpartition("::")[2].lower() not in _SCHEMES_WITHOUT_USER):
        user, _, _ = host.rpartition("@")
    elif "@" in address and _has_invalid_port(host):
        user, _, _ = address.rpartition("@")
    path = address[0 if user is None else len(user) + 1 :]
    at = find_query(scheme, path)
    return PlainUrl(scheme + mark, user, path[:at], path[at + 1 :] if at < len(path) else None)


def _has_invalid_port(host: str) -> bool:
    _, colon, port = re.sub(r"^\[[^\]]*\]", "", host).partition(":")
    return bool(colon) and not (port.isdigit() and len(port) < 6)


def mask_url(url: str) -> str:
    """Return the masked name of a URL; a masked name stays unchanged, and so does a section after `#`."""
    file, mark, section = url.rpartition("#")
    if not mark or re.search("[/?@:=&;]", section):
        file, mark, section = url, "", ""
    if file in typed_urls():
        return url
    return _create_name(file) + mark + section


def _create_name(url: str) -> str:
    typed = typed_urls()
    mask = redact.MARK
    has_user = any(parse_url(link).user is not None for link in _CHAIN.split(url) if "://" in link)
    for count in range(2, 1_000_000):
        pairs = list(_name_folders(url, mask))
        # URLs of the same user share a mark, but a signature belongs to one file.
        distinct = pairs if has_user else pairs[:1]
        if all(typed.get(name, typed_url) == typed_url for name, typed_url in distinct):
            break
        mask = f"{redact.MARK}{count}"
    if mask in pairs[0][0]:
        redact.mask_everywhere(url, pairs[0][0])
        for name, typed_url in pairs:
            typed.setdefault(name, typed_url)
    return pairs[0][0]


def _name_folders(url: str, mask: str) -> Iterator[tuple[str, TypedUrl]]:
    """Yield (masked name, URL) of the file, then of each parent folder up to the host."""
    # Links of a chain before the first path have no path, as in `simplecache::https://…`.
    links = _CHAIN.split(url)
    first = next(n for n, link in enumerate(links) if "://" in link)
    prefix = "".join(f"{link}::" for link in links[:first])
    parsed, outer = parse_url(links[first]), links[first + 1 :]
    masked_suffix = _mask_query(parsed.query, mask) + "".join(f"::{hide_secrets(link, mask)}" for link in outer)
    suffix = ("" if parsed.query is None else f"?{parsed.query}") + "".join(f"::{link}" for link in outer)
    scheme = prefix + parsed.scheme
    user = "" if parsed.user is None else f"{parsed.user}@"
    masked_user = "" if parsed.user is None else f"{_hide_user(parsed.user, mask)}@"
    steps = _split_path(parsed.path)
    masked_steps = [_mask_step(_mask_port(steps[0], mask), mask), *(_mask_step(step, mask) for step in steps[1:])]
    for n in range(len(steps), 0, -1):
        path = "/".join(steps[:n])
        yield (
            f"{scheme}{masked_user}{'/'.join(masked_steps[:n])}{masked_suffix}",
            TypedUrl(f"{scheme}{user}{path}", suffix),
        )


def hide_secrets(url: str, mask: str = redact.MARK) -> str:
    """Return a URL that the user did not type, without its secrets; all later text hides these secrets too."""
    if "://" not in url:
        return url
    parsed = parse_url(url)
    first, *steps = _split_path(parsed.path)
    path = "/".join((_mask_step(_mask_port(first, mask), mask), *(_mask_step(step, mask) for step in steps)))
    user = "" if parsed.user is None else f"{_hide_user(parsed.user, mask)}@"
    return parsed.scheme + user + path + _mask_query(parsed.query, mask)


def _mask_port(host: str, mask: str) -> str:
    """Mask a port that is not a number, because it may be the password of an incomplete URL."""
    port = re.sub(r"^\[[^\]]*\]?", "", host).partition(":")[2]
    return host.removesuffix(port) + _hide_user(port, mask) if port and _has_invalid_port(host) else host


def hide_in_typo(text: str) -> None:
    """Hide a possible password in a text that is nearly a URL: `https:/me:pw@host`, `me:pw@host`.

    The text stays usable, because a file may be written to this name later.
    """
    scheme, colon, address = text.partition(":")
    secret, at, host = address.rpartition("@")
    if colon and at and secret:
        _hide_user(secret.lstrip("/"), redact.MARK)
        redact.mask_everywhere(text, f"{scheme}:{redact.MARK}@{host}")


def _hide_user(text: str, mask: str) -> str:
    user, colon, password = text.partition(":")
    redact.hide(text, password)
    redact.hide(user, sure=not colon)
    return mask


def _split_path(path: str) -> list[str]:
    token = _TOKEN.search(path)
    at = token.start() if token else len(path)
    *folders, last = path[:at].split("/")
    return [*folders, last + path[at:]]


def _mask_step(step: str, mask: str) -> str:
    """Mask secrets inside a step of a path: `;jsessionid=…`, `#access_token=…`, or `?signature=…`."""
    return re.sub(r"(?<=[;?#])[^;?#]*=[^;?#]*", lambda match: _mask_query(match[0], mask)[1:], step)


def _mask_query(query: str | None, mask: str) -> str:
    if query is None:
        return ""
    return "?" + "&".join(_mask_parameter(parameter, mask) for parameter in query.split("&"))


def _mask_parameter(text: str, mask: str) -> str:
    name, _, value = text.partition("=")
    is_shown = name.lower() in SHOWN_PARAMETERS
    if not text or (is_shown and _PLAIN_VALUE.fullmatch(value)):
        return text
    # A text that ends in `=` may be a token without a name.
    if not value.strip("=") or not _PARAMETER.fullmatch(name):
        redact.hide(text)
        return mask
    redact.hide(value, sure=_SECRET_NAME.search(name) is not None)
    return f"{name}={mask}"


def unmask_url(name: str) -> str:
    """Return the URL of a masked name: a typed URL, a file in a typed folder, or a folder around a typed file."""
    typed = typed_urls()
    if redact.MARK not in name:
        return name
    if name in typed:
        return "".join(typed[name])
    scheme, path, query = split_url(name)
    folder, inner = path, ""
    while "/" in folder:
        folder, _, step = folder.rpartition("/")
        inner = f"/{step}{inner}"
        url = typed.get(f"{scheme}{folder}{query}")
        if url is not None:
            return url.start + inner + url.suffix
    return name


def mask_urls_in(text: str) -> str:
    """Return a text (not itself a URL) with its URLs replaced by masked names."""
    return _URL_IN_TEXT.sub(lambda match: mask_url(match[0]), text)


def unmask_urls_in(text: str) -> str:
    """Return the text with each masked name replaced by the URL as typed."""
    return _URL_IN_TEXT.sub(lambda match: unmask_url(match[0]), text) if redact.MARK in text else text
