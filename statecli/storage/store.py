"""Protocols of a store of files and of an open file. `local` and `remote` implement both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import msgspec

from statecli.core.errors import UnreadableError
from statecli.storage.url import is_remote

#: Error for a changed file; the next attempt may read it whole.
CHANGED_TRY_AGAIN = "changed while statecli read it; try again"
#: Maximum depth of nested folders, because a server may list a folder as part of itself.
MAX_FOLDER_DEPTH = 64
#: Maximum number of a server's folders listed for one target, and of their names, because a server may invent more.
MAX_LISTED_FOLDERS, MAX_LISTED_NAMES = 1_000, 200_000


class ListingBudget:
    """Number of folders and names that a server listed for one target. Folders on disk do not count."""

    def __init__(self, target: str) -> None:
        self._target, self._names = target, 0
        self._folders: set[str] = set()

    @property
    def exceeded(self) -> bool:
        """Whether the listings of a target exceeded the limits."""
        return len(self._folders) > MAX_LISTED_FOLDERS or self._names > MAX_LISTED_NAMES

    def exhaust(self, folder: str) -> None:
        """Use up the budget at a remote folder nested too deeply, because the server may list folders without end."""
        if is_remote(folder):
            self._names = MAX_LISTED_NAMES + 1

    def take(self, folder: str, names: int) -> None:
        """Count a folder and its names, but each folder only once. Raises UnreadableError beyond the budget."""
        if is_remote(folder) and folder not in self._folders:
            self._folders.add(folder)
            self._names += names
        if self.exceeded:
            limits = f"{MAX_LISTED_FOLDERS:,} folders or {MAX_LISTED_NAMES:,} names"
            raise UnreadableError(f"the server lists more than {limits} below {self._target}; give a deeper folder")


class FileVersion(NamedTuple):
    """Size of a file in bytes, and a marker that changes with the file (None if the store has no marker).

    The marker of a remote file is an ETag, or several markers, one per line; an answer may lack some of them.
    """

    size: int
    marker: str | None


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Range of bytes in a file: `length` bytes from `offset` on."""

    offset: int
    length: int


class FolderEntries(NamedTuple):
    """Sorted names of the files and of the folders in a folder."""

    files: list[str]
    folders: list[str]


class Guard(msgspec.Struct, frozen=True, gc=False):
    """Bytes `start` to `stop`. So far, only the archive's directory states that the data begins at `start`.

    A header from `header` up to `start` confirms the place. `check` takes the bytes of the header, and raises
    MalformedError for a wrong header.
    """

    header: int
    start: int
    stop: int
    check: Callable[[bytes], None]


class File(Protocol):
    """Open file, read by position, by one thread at a time."""

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer at the end of the file."""

    def fill(self, offset: int, into: memoryview, read_ahead: int) -> int:
        """Read bytes from `offset` on into a buffer; return their number, 0 at the end.

        `read_ahead`: number of bytes that the caller will read next.
        """

    def prefetch(self, extents: Iterable[Extent]) -> None:
        """Fetch the extents (byte ranges) together before they are read, if the file is behind a URL."""

    def read_cached(self, offset: int, length: int) -> bytes | None:
        """Return the requested bytes; None if reading them takes a request."""

    def guard(self, guards: Iterable[Guard]) -> None:
        """Check the headers of the guards, at the latest before bytes of the guarded ranges are returned."""

    def measure(self) -> int:
        """Return the file's present size, to report that the file was truncated while open."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""


class Store(Protocol):
    """Files and folders by path. Reading methods raise OSError for a local path, else UnreadableError.

    Attributes:
        reads_are_requests: True if a read takes a request to a server, so that batched reads are faster.
    """

    reads_are_requests: bool

    # Methods that only process the text of a path.

    def join(self, folder: str, *names: str) -> str:
        """Return the path of a file in a folder."""

    def split(self, path: str) -> tuple[str, str]:
        """Return the folder and the name of a file."""

    def parents(self, path: str) -> Iterator[str]:
        """Yield the folders around a file, the nearest first."""

    def make_relative(self, path: str, folder: str) -> str:
        """Return the path from the folder to the file, with `/` on every system."""

    def make_absolute(self, path: str) -> str:
        """Return the absolute path."""

    def is_glob(self, text: str) -> bool:
        """Return True if the text may be a glob."""

    # Methods for the existence and kind of names.

    def exists(self, path: str) -> bool:
        """Return True for a file, a folder and a broken link."""

    def has_file(self, path: str) -> bool:
        """Return whether the file exists. Folders are not requested, so use `exists` if the path may be a folder."""

    def is_folder(self, path: str) -> bool:
        """Return True for a folder."""

    def is_file(self, path: str) -> bool:
        """Return True for a file."""

    def is_link(self, path: str) -> bool:
        """Return True for a symbolic link."""

    def resolve_links(self, path: str) -> str:
        """Return the path without symbolic links."""

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder."""

    def list_entries(self, folder: str) -> FolderEntries:
        """Return the names in a folder by kind; every name other than a folder counts as a file."""

    def may_list(self, folder: str) -> bool:
        """Return False if the folder can be entered but not listed."""

    def is_listed(self, path: str) -> bool:
        """Return True if a listing that was already fetched contains the path."""

    def explain_missing_names(self, folder: str) -> str | None:
        """Return the reason why the names of a folder are incomplete; None if they are complete."""

    def match_glob(self, pattern: str) -> list[str]:
        """Return the paths that match a glob, which may contain `**`. Hidden names match too.

        Matches hidden folders themselves, but enters them only if a step of the glob begins with a dot.
        """

    # Methods that read bytes.

    def open(self, path: str) -> File:
        """Open a file. Raises UnreadableError for a missing file, a folder or a device; the text has no path."""

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""

    def version(self, path: str) -> FileVersion | None:
        """Return the version of a file, to compare with later versions.

        None if there is no file, or if the store itself compares the version of each read.
        """

    def find_crc32(self, path: str, offset: int, length: int) -> int | None:
        """Return the CRC-32 of a byte range if all of its bytes were read before; else None."""

    def confirm_guards(self, path: str) -> None:
        """Check the guards of a file that are not confirmed yet. Raises MalformedError; the text has no path."""
