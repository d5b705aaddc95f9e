"""What can be asked of any place that holds objects, and which place a URL means."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from statecli.errors import UnreadableError

#: The size of an object in bytes, and what tells two versions of it apart (an ETag); None where the store says nothing.
Known = tuple[int, str | None]


class Missing(UnreadableError):
    """There is no such object."""


class Listing(NamedTuple):
    """What is in a folder: whether each name is a folder's."""

    folders: dict[str, bool]


class Store(Protocol):
    """Where objects lie. Each method raises UnreadableError without the URL, and `Missing` where there is none."""

    def get(self, url: str, offset: int, length: int, known: Known | None) -> tuple[bytes, Known]:
        """The bytes from `offset` on, fewer than `length` only where the object ends, and what is known of it.

        `known` of an earlier answer: raises UnreadableError where the object is another by now.
        """

    def listing(self, url: str) -> Listing:
        """What is in the folder."""


def store_of(url: str) -> Store:
    """The store for a URL. Raises MissingDependency where the package for it is missing."""
    scheme = url.partition("://")[0].lower()
    if scheme in ("http", "https"):
        from statecli.remote.http import Http

        return Http()
    from statecli.remote.filesystems import Filesystem

    return Filesystem(url)
