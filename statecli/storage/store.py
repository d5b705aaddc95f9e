"""What can be asked of any place that holds objects, and which place a URL means."""

from __future__ import annotations

import threading
from importlib import import_module
from itertools import zip_longest
from typing import NamedTuple, Protocol

from statecli.core.errors import UnreadableError
from statecli.storage import files

#: What is said of an object that is another by now.
CHANGED = "changed while it was read: try again"

#: The size of an object in bytes, and what tells two versions of it apart; None where the store says nothing.
#: That is an ETag, or several such things of which an answer may lack some, each on its line.
Known = tuple[int, str | None]


class Missing(UnreadableError):
    """There is no such object."""


class Unfetched(UnreadableError):
    """Its bytes did not come, whatever they are."""


class Unsure(UnreadableError):
    """Something answers that is no object: a refusal, a page. There may be a folder all the same."""


class Listing(NamedTuple):
    """What is in a folder: whether each name is a folder's. `unlisted` says why these are not all of the names."""

    folders: dict[str, bool]
    unlisted: str | None = None


def merged(known: Known | None, found: Known) -> Known:
    """All that is known by now. Raises UnreadableError where the object is another than it was."""
    if known is None:
        return found
    old, new = ((version or "").split("\n") for _, version in (known, found))
    apart = [(one, other) for one, other in zip_longest(old, new, fillvalue="") if one and other]
    # The first tells more than what is behind it.
    if known[0] != found[0] or (apart and apart[0][0] != apart[0][1]):
        raise UnreadableError(CHANGED)
    both = "\n".join(one or other for one, other in zip_longest(old, new, fillvalue=""))
    return known[0], both or None


class Store(Protocol):
    """Where objects lie. Each method raises UnreadableError without the URL, and `Missing` where there is none."""

    def get(self, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
        """The bytes from `offset` on, fewer than `length` only where the object ends, and what is known of it.

        `known` of an earlier answer: raises UnreadableError where the object is another by now.
        """

    def listing(self, url: str) -> Listing:
        """What is in the folder."""


_stores: dict[str, Store] = {}
_lock = threading.Lock()


def store_of(url: str) -> Store:
    """The store for a URL, the same one for all that it holds. Raises MissingDependency, UnreadableError."""
    scheme = url.partition("://")[0].lower()
    with _lock:
        if scheme in ("http", "https"):
            return _known("http", "http", "Http")
        if scheme in ("s3", "s3a"):
            return _known("s3", "s3", "S3")
        if scheme in ("gs", "gcs"):
            return _known("gs", "gcs", "CloudStorage")
        if scheme == "hf":
            return _known("hf", "hub", "Hub")
        return _known(_held_by(url), "fsspec_store", "Filesystem", url)


def _known(key: str, module: str, name: str, *arguments: str) -> Store:
    if key not in _stores:
        _stores[key] = getattr(import_module(f"statecli.storage.{module}"), name)(*arguments)
    return _stores[key]


def _held_by(url: str) -> str:
    """What of a URL says which filesystem it is of: all but the way of an object in it."""
    link = files.link(url)
    host = "" if link.rest.startswith("::") else link.way.partition("/")[0]
    return f"{link.scheme}{host}{link.rest}"


def forget() -> None:
    """The next command finds its stores anew: with the credentials that there are then."""
    with _lock:
        _stores.clear()
