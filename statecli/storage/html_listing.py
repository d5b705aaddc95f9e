"""Pages of HTML that servers send: a folder's listing, or something else where a file was asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

_BEGINS = (b"<!doctype html", b"<html", b"<head", b"<body", b"<title", b"<script", b"<!--")
#: What stands over an empty listing.
_LISTING = re.compile(r"index of|directory listing|listing of", re.IGNORECASE)


def is_html(head: bytes) -> bool:
    """Whether it begins as a page does."""
    return head[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_BEGINS)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.base: str | None = None
        self.asks = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "base" and self.base is None:
            self.base = given.get("href")
        if tag == "a" and given.get("href"):
            self.found.append(str(given["href"]).strip())
        self.asks = self.asks or (tag == "input" and (given.get("type") or "").lower() == "password")


def names(page: str, url: str) -> dict[str, bool] | None:
    """What is in the folder whose listing this is, at `url`: whether each name is a folder's.

    Of all links only those are names that lead straight into the folder. None for a page that asks for a password, or
    has no such link and does not say that it is a listing.
    """
    links = _Links()
    links.feed(page)
    links.close()
    if links.asks:
        return None
    base = urljoin(url, links.base) if links.base else url
    found = dict(sorted(_inner(links.found, base, url)))
    return found if found or _LISTING.search(page[:4096]) else None


def _inner(hrefs: list[str], base: str, url: str) -> Iterator[tuple[str, bool]]:
    folder = urlsplit(url)
    way = unquote(folder.path).rstrip("/") + "/"
    for href in hrefs:
        try:
            link = urlsplit(urljoin(base, href))
        except ValueError:  # no URL at all
            continue
        # A link with a query sorts the listing.
        if (link.scheme, link.netloc) != (folder.scheme, folder.netloc) or link.query or link.fragment:
            continue
        around, _, last = link.path.rstrip("/").rpartition("/")
        # A slash in a name makes a way of it: as it is written here nobody finds the file, and so it is not left out.
        name = last if "/" in unquote(last) else unquote(last)
        if unquote(around) + "/" == way and name not in ("", ".", ".."):
            yield name, link.path.endswith("/")
