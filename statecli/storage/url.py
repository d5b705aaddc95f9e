"""Syntax of URLs: the path of a file in a URL, joining and splitting.

No function opens a connection or handles secrets. `masked_url` hides passwords and signatures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from statecli.core.lazy_pattern import compile_on_use

#: Beginning of a URL: `https://…`, or a chain of fsspec, which no store reads: `simplecache::s3://…`.
_URL = compile_on_use(r"(?:[a-zA-Z][a-zA-Z0-9+.-]*::)*[a-zA-Z][a-zA-Z0-9+.-]+://")
#: IPv6 address as a host: `[::1]`.
_ADDRESS = compile_on_use(r"^\[[0-9a-fA-F:.]*\]")
#: Characters that make the path of a URL a glob; not `?`, because it begins a query.
GLOB = compile_on_use(r"[*[]")


class Server(msgspec.Struct, frozen=True):
    """A kind of server: module and class of its store in `storage`, and the text that begins a query in its URLs.

    `query` is longer than `?` if `?` may be part of a name; None if URLs have no query.
    """

    module: str
    store: str
    query: str | None


_WEB, _S3 = Server("http", "Http", "?"), Server("s3", "S3", "?versionId=")
_GOOGLE, _HUB = Server("gcs", "CloudStorage", "?generation="), Server("hub", "Hub", None)
#: Schemes whose paths begin with a host or a bucket. fsspec reads all other schemes.
SERVERS = {"http": _WEB, "https": _WEB, "s3": _S3, "s3a": _S3, "gs": _GOOGLE, "gcs": _GOOGLE, "hf": _HUB}


class UrlParts(NamedTuple):
    """Parts of a URL: `https://`, `host/m.pt`, `?version=3`."""

    scheme: str
    path: str
    query: str


def is_remote(path: str) -> bool:
    """Return True for a URL, False for a path on disk."""
    return "://" in path and _URL.match(path) is not None


def split_url(url: str) -> UrlParts:
    """Return the scheme, the path and the query of a URL."""
    match = _URL.match(url)
    assert match is not None, "no URL"  # noqa: S101 - callers check with is_remote
    scheme, text = url[: match.end()], url[match.end() :]
    at = find_query(scheme, text)
    return UrlParts(scheme, text[:at], text[at:])


def find_query(scheme: str, text: str) -> int:
    """Return the index of the query in the text after a `scheme://`; the length of the text if there is no query."""
    mark = SERVERS.get(scheme.removesuffix("://").lower(), _WEB).query
    at = -1 if mark is None else text.find(mark)
    return len(text) if at < 0 else at


def is_chain(url: str) -> bool:
    """Return True for a chain of fsspec: `simplecache::https://…`, `zip://m.pt::https://host/a.zip`."""
    # A `::` in brackets belongs to an IPv6 address.
    return re.search(r"::(?![0-9a-fA-F:.]*\])", url) is not None


def is_web(scheme: str) -> bool:
    """Return True for `http://` and `https://`, whose names are percent-encoded."""
    return scheme.lower().endswith(("http://", "https://"))


def is_folder_url(url: str) -> bool:
    """Return True if the URL can only name a folder: a host, a bucket, or a path that ends with a slash."""
    scheme, path, _ = split_url(url)
    # `memory://m.pt` is a file, because this scheme has no host or bucket.
    return path.endswith("/") or not path or ("/" not in path and scheme.removesuffix("://").lower() in SERVERS)


def is_glob(url: str) -> bool:
    """Return True if the path contains `*` or `[` outside an IPv6 address."""
    return GLOB.search(_ADDRESS.sub("", split_url(url).path)) is not None


# --- as os.path ------------------------------------------------------------------------------------------------------


def join(folder: str, *names: str) -> str:
    """Return the URL of a file in a folder; the query stays at the end."""
    scheme, path, query = split_url(folder)
    names = tuple(quote_name(scheme, name) for name in names)
    steps = (path.rstrip("/"), *names) if path else names
    return scheme + "/".join(step for step in steps if step) + query


def split(url: str) -> tuple[str, str]:
    """Return the URL of the folder, with the query, and the name of the file."""
    scheme, path, query = split_url(url)
    folder, _, name = path.rpartition("/")
    return scheme + folder + query, unquote_name(scheme, name)


def parents(url: str) -> Iterator[str]:
    """Yield the folders around a file, the nearest first, down to the host or the bucket."""
    scheme, path, query = split_url(url)
    path = path.rstrip("/")
    while "/" in path:
        path = path.rpartition("/")[0]
        yield scheme + path + query


def make_relative(url: str, folder: str) -> str:
    """Return the path from the folder to the file; return a URL outside the folder unchanged."""
    inner, outer = split_url(url), split_url(folder) if is_remote(folder) else UrlParts("", "", "")
    prefix = outer.path.rstrip("/") + "/" if outer.path else ""
    is_inside = (inner.scheme, inner.query) == (outer.scheme, outer.query) and f"{inner.path}/".startswith(prefix)
    return unquote_name(inner.scheme, inner.path[len(prefix) :].strip("/")) or os.curdir if is_inside else url


def make_absolute(url: str) -> str:
    """Return the URL without a trailing slash."""
    scheme, path, query = split_url(url)
    return scheme + path.rstrip("/") + query


def quote_name(scheme: str, name: str) -> str:
    """Percent-encode a name, or several names joined with `/`, if URLs of this scheme require it."""
    if not is_web(scheme) or re.fullmatch(r"[\w./-]*", name, re.ASCII):
        return name
    from urllib.parse import quote

    return quote(name, safe="/!$&'()*+,;=:@~")


def unquote_name(scheme: str, name: str) -> str:
    """Decode a name from a URL of this scheme."""
    if not is_web(scheme) or "%" not in name:
        return name
    from urllib.parse import unquote

    return unquote(name)
