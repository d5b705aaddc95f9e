"""HTML pages of servers: the listing of a folder, or a page instead of a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

_BEGINS = (b"<!doctype html", b"<html", b"<head", b"<body", b"<title", b"<script", b"<!--")
#: Title of an empty listing.
_LISTING = re.compile(r"index of|directory listing|listing of", re.IGNORECASE)


def is_html(head: bytes) -> bool:
    """Return True if the bytes begin as an HTML page does."""
    return head[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_BEGINS)


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
        self.asks_password = self.asks_password or (
            tag == "input" and (attributes.get("type") or "").lower() == "password"
        )


def parse_names(page: str, url: str) -> dict[str, bool] | None:
    """Return the names in the folder at `url` from the listing, with True for a folder.

    Names are the links to files and folders directly in the folder. None for a page that asks for a password, and for a
    page without such a link that is not called a listing.
    """
    links = _Links()
    links.feed(page)
    links.close()
    if links.asks_password:
        return None
    base = urljoin(url, links.base) if links.base else url
    names = dict(sorted(_find_names(links.hrefs, base, url)))
    return names if names or _LISTING.search(page[:4096]) else None


def _find_names(hrefs: list[str], base: str, url: str) -> Iterator[tuple[str, bool]]:
    folder = urlsplit(url)
    path = unquote(folder.path).rstrip("/") + "/"
    for href in hrefs:
        try:
            link = urlsplit(urljoin(base, href))
        except ValueError:  # not a URL
            continue
        # A link with a query sorts the listing.
        if (link.scheme, link.netloc) != (folder.scheme, folder.netloc) or link.query or link.fragment:
            continue
        around, _, last = link.path.rstrip("/").rpartition("/")
        # A name with an encoded slash stays encoded, so that the name is listed although no path leads to the file.
        name = last if "/" in unquote(last) else unquote(last)
        if unquote(around) + "/" == path and name not in ("", ".", ".."):
            yield name, link.path.endswith("/")
