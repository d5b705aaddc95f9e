"""Read a local or remote file by position. Every format reader uses `ByteSource`.

Messages contain no path; the caller adds the path as typed by the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.storage import files
from statecli.storage.store import Extent

#: Number of bytes kept of the start of every file: enough to recognise each format that statecli reads.
HEAD_BYTES = 4096


class ByteSource:
    """An open regular file, or `length` bytes of a file from byte `start` on. Offsets then count from `start`.

    Raises UnreadableError for a missing, forbidden, empty or special file.

    Attributes:
        path: Path or masked URL of the file.
        size: Size in bytes.
        head: The first 4096 bytes; empty for a part of a remote file.
        reads_are_requests: As in `Store`: True if each read is a request to a server.
    """

    __slots__ = ("_file", "head", "path", "reads_are_requests", "size", "start")

    def __init__(self, path: str, start: int = 0, length: int | None = None) -> None:
        self.path = path
        self.start = start
        self.reads_are_requests = files.reads_are_requests(path)
        self._file = files.open_file(path)
        try:
            size = self._file.size
            if size == 0:
                raise UnreadableError("is an empty file")
            if length is not None and not 0 <= start <= start + length <= size:
                raise _create_truncation_error(start, length, size)
            self.size = size if length is None else length
            # Empty for a part of a remote file, because its head is not needed, and reading it may take a request.
            self.head = (
                b"" if length is not None and self.reads_are_requests else self.read(0, min(HEAD_BYTES, self.size))
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ByteSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    @property
    def is_trusted(self) -> bool:
        """True if a reader may check an archive's offsets only when it reads the bytes, to save requests."""
        return self.reads_are_requests and not files.is_strict()

    def prefetch(self, extents: Iterable[Extent]) -> None:
        """Fetch the extents (byte ranges) together before they are read, if the file is behind a URL."""
        self._file.prefetch(Extent(self.start + extent.offset, extent.length) for extent in extents)

    def read_cached(self, offset: int, length: int) -> bytes | None:
        """Return the requested bytes; None if reading them takes a request, or if they are outside the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            return None
        return self._file.read_cached(self.start + offset, length)

    def guard(self, guards: Iterable[files.Guard]) -> None:
        at = self.start
        self._file.guard(
            replace(guard, header=at + guard.header, start=at + guard.start, stop=at + guard.stop) for guard in guards
        )

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from byte `offset`. Raises MalformedError outside the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise _create_truncation_error(offset, length, self.size)
        offset += self.start
        data = self._file.read(offset, length)
        if len(data) != length:  # the file was truncated while open
            raise _create_truncation_error(offset + len(data), length - len(data), self._file.measure())
        return data

    def read_up_to(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from byte `offset`, fewer at the end of the file."""
        remaining_bytes = max(self.size - offset, 0)
        return self.read(offset, min(length, remaining_bytes)) if remaining_bytes else b""


def read_small_file(path: str, longest: int) -> bytes:
    """Return the bytes of a regular file, possibly empty. Raises UnreadableError for more than `longest` bytes."""
    file = files.open_file(path)
    try:
        if file.size > longest:
            raise UnreadableError(
                f"is too long: the file has {file.size:,} bytes, but statecli reads at most {longest:,} of a file of "
                "this kind"
            )
        return file.read(0, longest)
    finally:
        file.close()


@contextmanager
def add_subject_to_errors(label: str) -> Iterator[None]:
    """Add `label` to each UnreadableError that the block raises, as `quoting.append_reason` does."""
    try:
        yield
    except UnreadableError as error:
        raise type(error)(quoting.append_reason(label, error)) from error.__cause__


class Window:
    """Buffer for many small reads that are close together, at rising offsets."""

    __slots__ = ("_data", "_source", "_span", "_start")

    def __init__(self, source: ByteSource, span: int) -> None:
        """Read `span` bytes of the source at a time."""
        self._source = source
        self._span = span
        self._start = 0
        self._data = b""

    def read(self, offset: int, length: int) -> bytes:
        """See `ByteSource.read`."""
        at = offset - self._start
        if at < 0 or at + length > len(self._data):
            window_length = min(max(length, self._span), max(length, self._source.size - offset))
            self._data = self._source.read(offset, window_length)
            self._start = offset
            at = 0
        return self._data[at : at + length]


def _create_truncation_error(offset: int, length: int, size: int) -> MalformedError:
    return MalformedError(
        f"file is truncated: bytes {offset} to {offset + length} are needed, but the file has {size}; copy or "
        "download the file again"
    )
