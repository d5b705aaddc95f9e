"""HTML pages of servers: listings of a folder, and pages that a server sends instead of a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from statecli.core import quoting
from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use

_HTML_BEGINNINGS = (b"<!doctype html", b"<html", b"<head", b"<body", b"<title", b"<script", b"<!--")
#: Words in the title of a listing, to recognise an empty listing.
_LISTING_TITLE = compile_on_use(r"index of|directory listing|listing of", re.IGNORECASE)


def is_html(head: bytes) -> bool:
    """Return whether the bytes begin like an HTML page."""
    return head[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_HTML_BEGINNINGS)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []
        self.base: str | None = None
        self.asks_password = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "base" and self.base is None:
            self.base = attributes.get("href")
        if tag == "a" and attributes.get("href"):
            self.hrefs.append(str(attributes["href"]).strip())
        if tag == "input" and (attributes.get("type") or "").lower() == "password":
            self.asks_password = True


def parse_names(page: str, url: str) -> dict[str, bool] | None:
    """Return the names in the folder at `url` from its listing, with True for a folder.

    Names come from links to files and folders directly in the folder, and to deeper paths (the first step is a
    subfolder); queries are dropped. None for a page that asks for a password, and for a page without links into the
    folder and without a listing's title. Raises UnreadableError if a name is both a file and a folder.
    """
    links = _Links()
    links.feed(page)
    links.close()
    if links.asks_password:
        return None
    base = urljoin(url, links.base) if links.base else url
    links_by_name = set(_find_names(links.hrefs, base, url))
    names = dict(sorted(links_by_name))
    if len(names) < len(links_by_name):
        name = next(name for name, is_folder in sorted(links_by_name) if not is_folder and names[name])
        raise UnreadableError(
            f"the folder lists {quoting.quote(name)} both as a file and as a folder; give the URLs of the files "
            "instead of the URL of the folder"
        )
    return names if names or _LISTING_TITLE.search(page[:4096]) else None


def _has_same_host(link: SplitResult, folder: SplitResult) -> bool:
    """Return whether both URLs have the same scheme and server; the default port and the user do not count."""
    default = {"http": 80, "https": 443}.get(folder.scheme)
    try:
        ports = link.port or default, folder.port or default
    except ValueError:  # the port is not a number
        return False
    return (link.scheme, link.hostname, ports[0]) == (folder.scheme, folder.hostname, ports[1])


def _find_names(hrefs: list[str], base: str, url: str) -> Iterator[tuple[str, bool]]:
    folder = urlsplit(url)
    path = unquote(folder.path).rstrip("/") + "/"
    depth = folder.path.rstrip("/").count("/") + 1
    for href in hrefs:
        try:
            link = urlsplit(urljoin(base, href))
        except ValueError:  # not a URL
            continue
        if not _has_same_host(link, folder):
            continue
        # Drop the query: a link with a query downloads a file. A link that sorts the listing has the path of the
        # folder.
        steps = link.path.split("/")
        if len(steps) == depth or unquote("/".join(steps[:depth])) + "/" != path:
            continue
        # Keep an encoded slash in a name, so that the name is listed, although no path leads to the file.
        name = steps[depth] if "/" in unquote(steps[depth]) else unquote(steps[depth])
        if name not in ("", ".", ".."):
            yield name, len(steps) > depth + 1
