"""Protocol of a server that stores objects (remote files), and the choice of a server for a URL."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from itertools import zip_longest
from typing import NamedTuple, Protocol, cast

from statecli.core.errors import UnreadableError
from statecli.storage import lifetime
from statecli.storage.store import CHANGED_TRY_AGAIN, FileVersion
from statecli.storage.url import SERVERS, split_url

#: HTTP statuses of redirects.
REDIRECTS = frozenset([301, 302, 303, 307, 308])


class Missing(UnreadableError):
    """Error: the object does not exist."""


class Unfetched(UnreadableError):
    """Error: the bytes did not arrive, so their content is unknown."""


class Unsure(UnreadableError):
    """Error: the answer is not an object, but a refusal or a page. A folder may exist."""


class VersionedBytes(NamedTuple):
    """Bytes of an object, and the version of the object from which the bytes come."""

    data: bytes
    version: FileVersion


class Listing(NamedTuple):
    """Names in a folder, with True for a folder. `incomplete`: the reason why names are missing, or None."""

    folders: dict[str, bool]
    incomplete: str | None = None


def confirm_version(expected: FileVersion | None, actual: FileVersion) -> FileVersion:
    """Return a version with the markers of both versions. Raises UnreadableError if the file has changed."""
    if expected is None:
        return actual
    old, new = ((marker or "").split("\n") for _, marker in (expected, actual))
    pairs = [(before, after) for before, after in zip_longest(old, new, fillvalue="") if before and after]
    # Only the first marker is compared, because it is the most reliable.
    if expected.size != actual.size or (pairs and pairs[0][0] != pairs[0][1]):
        raise UnreadableError(CHANGED_TRY_AGAIN)
    markers = "\n".join(before or after for before, after in zip_longest(old, new, fillvalue=""))
    return FileVersion(expected.size, markers or None)


class ObjectStore(Protocol):
    """Server with objects. Errors do not name the URL: UnreadableError, or `Missing` if the object does not exist."""

    def get(self, url: str, offset: int, length: int, expected: FileVersion | None) -> VersionedBytes:
        """Return the bytes from `offset` on and the version; fewer than `length` bytes only at the end of the object.

        `expected`: the version of an earlier answer. Raises UnreadableError if the object has changed since.
        """

    def listing(self, url: str) -> Listing:
        """Return the names in a folder."""


class _Stores:
    """Object stores of one command. The next command opens new stores, so that it reads credentials again."""

    def __init__(self) -> None:
        self._by_key: dict[str, ObjectStore] = {}
        self._lock = threading.Lock()

    def open(self, url: str) -> ObjectStore:
        server = SERVERS.get(url.partition("://")[0].lower())
        with self._lock:
            if server is None:
                return self._create(_build_filesystem_key(url), "fsspec_store", "Filesystem", url)
            return self._create(server.module, server.module, server.store)

    def _create(self, key: str, module: str, name: str, *arguments: str) -> ObjectStore:
        if key not in self._by_key:
            store = cast(Callable[..., ObjectStore], getattr(import_module(f"statecli.storage.{module}"), name))
            self._by_key[key] = store(*arguments)
        return self._by_key[key]


def open_store(url: str) -> ObjectStore:
    """Return the object store for a URL; URLs of a server share a store. Raises MissingDependency, UnreadableError."""
    return lifetime.for_command(_Stores).open(url)


def _build_filesystem_key(url: str) -> str:
    """Return the part of a URL that identifies the filesystem: scheme, host or bucket, and query."""
    parts = split_url(url)
    return f"{parts.scheme}{parts.path.partition('/')[0]}{parts.query}"
