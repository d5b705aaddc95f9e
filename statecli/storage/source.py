"""A file, local or remote, read by position: what every format reader reads through.

Messages carry no path; whoever knows what the user typed puts it in front.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from statecli.core.errors import MalformedError, UnreadableError
from statecli.storage import files

#: Bytes kept of the start of every file: enough to tell each format that statecli knows.
HEAD = 4096


class Source:
    """An open regular file: `path`, its `size` in bytes, its first 4096 bytes as `head`; `is_far` if each read of it
    is a journey.

    With `length`, only so many bytes from byte `start`, as if they were a file; places count from there. Raises
    UnreadableError for what is missing, not permitted, empty or no regular file.
    """

    __slots__ = ("_file", "head", "is_far", "path", "size", "start")

    def __init__(self, path: str, start: int = 0, length: int | None = None) -> None:
        self.path = path
        self.start = start
        self.is_far = files.is_remote(path)
        self._file = files.opened(path)
        try:
            size = self._file.size
            if size == 0:
                raise UnreadableError("is an empty file")
            if length is not None and not 0 <= start <= start + length <= size:
                raise _truncated(start, length, size)
            self.size = size if length is None else length
            # Of what lies inside a file, the beginning need not be looked at: that may be a journey of its own.
            self.head = b"" if length is not None and self.is_far else self.read(0, min(HEAD, self.size))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    @property
    def is_trusted(self) -> bool:
        """Whether what a journey would be needed for is confirmed only when it is read."""
        return self.is_far and not files.is_thorough()

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """These (offset, length) are about to be read, one after another."""
        self._file.prefetch((self.start + offset, length) for offset, length in ranges)

    def here(self, offset: int, length: int) -> bytes | None:
        """As `files.File.here`; None also where the file does not hold them."""
        if offset < 0 or length < 0 or offset + length > self.size:
            return None
        return self._file.here(self.start + offset, length)

    def guard(self, guards: Iterable[files.Guard]) -> None:
        """As `files.File.guard`."""
        at = self.start
        self._file.guard(
            one._replace(header=at + one.header, start=at + one.start, stop=at + one.stop) for one in guards
        )

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from byte `offset`; MalformedError where the file does not hold them."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise _truncated(offset, length, self.size)
        offset += self.start
        data = self._file.read(offset, length)
        if len(data) != length:  # it was cut short since it was opened
            raise _truncated(offset + len(data), length - len(data), self._file.now())
        return data


def small(path: str, longest: int) -> bytes:
    """All of a regular file of `longest` bytes at most, which may be empty; UnreadableError for any other."""
    file = files.opened(path)
    try:
        if file.size > longest:
            raise UnreadableError(f"is too long: {file.size:,} bytes, at most {longest:,} are read")
        return file.read(0, longest)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {(error.strerror or 'unknown error').lower()}") from error
    finally:
        file.close()


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


def _truncated(offset: int, length: int, size: int) -> MalformedError:
    return MalformedError(f"file is truncated: bytes {offset} to {offset + length} are needed, it holds {size}")
