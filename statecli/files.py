"""Files and folders by name, on disk or behind a URL: what readers ask instead of `os`, and so need not know which.

What lies behind a URL has the name that `remote` shows of it, which holds no secret; only `remote` knows the rest.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from typing import Any, Protocol

from statecli.errors import UnreadableError

#: `https://…`, and what fsspec chains: `simplecache::s3://…`.
_URL = re.compile(r"(?:[a-zA-Z][a-zA-Z0-9+.-]*::)*[a-zA-Z][a-zA-Z0-9+.-]+://")

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


class File(Protocol):
    """An open file, read by position, by one thread at a time."""

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """The bytes from `offset` on: `length` of them, or fewer where the file ends before."""

    def fill(self, offset: int, into: memoryview, ahead: int) -> int:
        """Reads bytes from `offset` on into a buffer; how many, 0 at the end. The next `ahead` are wanted too, soon."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """These (offset, length) are about to be read: where each read is a journey, they are fetched together."""

    def now(self) -> int:
        """Its size at this moment, for what is to be said of one that was cut short."""

    def close(self) -> None:
        """A second call does nothing."""


def is_remote(path: str) -> bool:
    """Whether the name is a URL."""
    return "://" in path and _URL.match(path) is not None


def shown(text: str) -> str:
    """What was typed, as it may be shown: of a URL, also behind `--option=`, its name without what is secret in it.

    `remote` knows the rest from now on. `file:///…` is the path.
    """
    option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    if value.startswith("file://"):
        from urllib.request import url2pathname

        return option + equals + url2pathname(value.removeprefix("file://"))
    if not is_remote(value) or os.path.lexists(value):
        return text
    found: str = _remote().named(value)
    return option + equals + found


# --- names -----------------------------------------------------------------------------------------------------------


def join(folder: str, *names: str) -> str:
    """As `os.path.join`; the query of a URL stays at its end."""
    if not is_remote(folder):
        return os.path.join(folder, *names)
    way, mark, query = folder.partition("?")
    return "/".join((way.rstrip("/"), *(name for name in names if name))) + mark + query


def split(path: str) -> tuple[str, str]:
    """As `os.path.split`; the query of a URL stays with the folder."""
    if not is_remote(path):
        return os.path.split(path)
    way, mark, query = path.partition("?")
    folder, _, name = way.rpartition("/")
    return folder + mark + query, name


def folder(path: str) -> str:
    """As `os.path.dirname`."""
    return split(path)[0]


def name(path: str) -> str:
    """As `os.path.basename`."""
    return split(path)[1]


# --- what is there ---------------------------------------------------------------------------------------------------


def exists(path: str) -> bool:
    """As `os.path.lexists`."""
    return _remote().exists(path) if is_remote(path) else os.path.lexists(path)


def isdir(path: str) -> bool:
    """As `os.path.isdir`."""
    return _remote().isdir(path) if is_remote(path) else os.path.isdir(path)


def isfile(path: str) -> bool:
    """As `os.path.isfile`."""
    return _remote().isfile(path) if is_remote(path) else os.path.isfile(path)


def size(path: str) -> int:
    """As `os.path.getsize`. Raises OSError, or UnreadableError for what is remote."""
    if not is_remote(path):
        return os.path.getsize(path)
    found: int = _remote().opened(path).size
    return found


def names(path: str) -> list[str]:
    """As `os.listdir`. Raises OSError, or UnreadableError for what is remote."""
    if not is_remote(path):
        return os.listdir(path)
    found: list[str] = _remote().names(path)
    return found


def may_list(path: str) -> bool:
    """Whether the folder's names may be asked for: a local one may be entered and not listed."""
    return is_remote(path) or os.access(path, os.R_OK)


def real(path: str) -> str:
    """As `os.path.realpath`; a URL is what it is."""
    return path if is_remote(path) else os.path.realpath(path)


def absolute(path: str) -> str:
    """As `os.path.abspath`; a URL is that already."""
    return path if is_remote(path) else os.path.abspath(path)


def ahead(paths: Iterable[str]) -> None:
    """Fetches the beginning of each remote file, many at a time: they are about to be opened one after another.

    What goes wrong is said by whoever opens it.
    """
    wanted = [path for path in paths if is_remote(path)]
    if wanted:
        _remote().ahead(wanted)


def _remote() -> Any:
    from statecli import remote

    return remote


# --- open files ------------------------------------------------------------------------------------------------------


def opened(path: str) -> File:
    """Opens a regular file or what is behind a URL.

    Raises UnreadableError, without the path, for what is missing, not permitted or no regular file. Opening never
    blocks and never follows a device: a fifo or `/dev/zero` named `model.pt` is refused before a byte is read.
    """
    if is_remote(path):
        found: File = _remote().opened(path)
        return found
    return LocalFile(path)


class LocalFile:
    """A regular file on disk. Read, not mapped: touched pages of a mapping count as the process's own memory, and a
    process that touches mapped bytes of a file which somebody cuts short is killed.
    """

    __slots__ = ("_fd", "size")

    def __init__(self, path: str) -> None:
        self._fd = _open(path)
        try:
            self.size = _regular(self._fd)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, length: int) -> bytes:
        """As `File.read`. The kernel hands out at most 2 GiB at once."""
        data = os.pread(self._fd, length, offset)
        if len(data) == length or not data:
            return data
        parts, have = [data], len(data)
        while have < length and (part := os.pread(self._fd, length - have, offset + have)):
            parts.append(part)
            have += len(part)
        return b"".join(parts)

    def fill(self, offset: int, into: memoryview, ahead: int) -> int:  # noqa: ARG002 - the system reads ahead itself
        """As `File.fill`."""
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [into], offset)
        os.lseek(self._fd, offset, os.SEEK_SET)
        data = os.read(self._fd, len(into))
        into[: len(data)] = data
        return len(data)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `File.prefetch`: nothing, it is as quick to read them."""

    def now(self) -> int:
        """As `File.now`."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """As `File.close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(path: str) -> int:
    # Without O_NONBLOCK, opening a named pipe waits for ever for its writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        raise UnreadableError(f"cannot be opened: {(error.strerror or 'unknown error').lower()}") from error
    except ValueError as error:
        raise UnreadableError("cannot be opened: its name holds a NUL character") from error


def _regular(fd: int) -> int:
    """The size of what is a regular file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        raise UnreadableError(f"is {kind}, not a regular file")
    return status.st_size


# --- other processes -------------------------------------------------------------------------------------------------


def access() -> Any:
    """What another process needs to read the same remote files, as plain data; None where none was named.

    It may hold what the user typed into a URL, which must not be shown.
    """
    import sys

    return _remote().access() if "statecli.remote" in sys.modules else None


def accept(found: Any) -> None:
    """In another process, before its work: what `access` gave there."""
    if found is not None:
        _remote().accept(found)
