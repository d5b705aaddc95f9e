"""A local regular file, read by position: what every format reader reads through.

Opening never blocks and never follows a device: a fifo or `/dev/zero` named `model.pt` is refused before a byte is
read. Reading is `os.pread`, not a mapping: touched pages of a mapping count as the process's own memory.
Messages carry no path; whoever knows what the user typed puts it in front.
"""

from __future__ import annotations

import os
import stat
from types import TracebackType

from statecli.errors import MalformedError, UnreadableError

#: Bytes kept of the start of every file: enough to tell each format that statecli knows.
HEAD = 4096

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


class Source:
    """An open regular file: `path`, its `size` in bytes, its first 4096 bytes as `head`.

    With `length`, only so many bytes from byte `start`, as if they were a file; places count from there. Raises
    UnreadableError for what is missing, not permitted, empty or no regular file.
    """

    __slots__ = ("_fd", "head", "path", "size", "start")

    def __init__(self, path: str, start: int = 0, length: int | None = None) -> None:
        self.path = path
        self.start = start
        self._fd = _open(path)
        try:
            size = _size_of(self._fd)
            if length is not None and not 0 <= start <= start + length <= size:
                raise _truncated(start, length, size)
            self.size = size if length is None else length
            self.head = self.read(0, min(HEAD, self.size))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from byte `offset`; MalformedError where the file does not hold them."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise _truncated(offset, length, self.size)
        offset += self.start
        data = os.pread(self._fd, length, offset)
        if len(data) == length:
            return data
        return data + self._rest(offset + len(data), length - len(data))

    def _rest(self, offset: int, length: int) -> bytes:
        """What the kernel did not hand out in one call: it stops at 2 GiB, and where the file has shrunk."""
        parts = []
        while length:
            part = os.pread(self._fd, length, offset)
            if not part:
                raise _truncated(offset, length, os.fstat(self._fd).st_size)
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)


def small(path: str, longest: int) -> bytes:
    """All of a regular file of `longest` bytes at most, which may be empty; UnreadableError for any other."""
    fd = _open(path)
    try:
        size = _regular(fd)
        if size > longest:
            raise UnreadableError(f"is too long: {size:,} bytes, at most {longest:,} are read")
        with open(fd, "rb", closefd=False) as file:
            return file.read(longest)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {(error.strerror or 'unknown error').lower()}") from error
    finally:
        os.close(fd)


class Window:
    """Small reads served from one larger one: for many headers that lie close together, in rising order."""

    __slots__ = ("_data", "_source", "_span", "_start")

    def __init__(self, source: Source, span: int) -> None:
        """Reads ahead `span` bytes at a time."""
        self._source = source
        self._span = span
        self._start = 0
        self._data = b""

    def read(self, offset: int, length: int) -> bytes:
        """As `Source.read`."""
        at = offset - self._start
        if at < 0 or at + length > len(self._data):
            ahead = min(max(length, self._span), max(length, self._source.size - offset))
            self._data = self._source.read(offset, ahead)
            self._start = offset
            at = 0
        return self._data[at : at + length]


def _open(path: str) -> int:
    try:
        # Without O_NONBLOCK, opening a named pipe waits for ever for its writer.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise UnreadableError(f"cannot be opened: {(error.strerror or 'unknown error').lower()}") from error
    except ValueError as error:
        raise UnreadableError("cannot be opened: its name holds a NUL character") from error


def _size_of(fd: int) -> int:
    size = _regular(fd)
    if size == 0:
        raise UnreadableError("is an empty file")
    return size


def _regular(fd: int) -> int:
    """The size of what is a regular file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        raise UnreadableError(f"is {kind}, not a regular file")
    return status.st_size


def _truncated(offset: int, length: int, size: int) -> MalformedError:
    return MalformedError(f"file is truncated: bytes {offset} to {offset + length} are needed, it holds {size}")
