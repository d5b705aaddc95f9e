"""Cache of a remote file's bytes, so that a reader's many small reads take few requests.

Headers are fetched once and kept while the file is open; small headers are kept longer. Values are not kept: readers
read them through windows, up to the announced end of their reads.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from statecli.core.errors import UnreadableError
from statecli.storage import lifetime, prefetch_progress
from statecli.storage.checksums import Checksums
from statecli.storage.object_store import ObjectStore, Unfetched, confirm_version
from statecli.storage.parallel import run_in_threads
from statecli.storage.retry import retry
from statecli.storage.store import Extent, FileVersion, Guard

#: Number of bytes of the first request: the header of most files, and many whole files.
HEAD_BYTES = 64 << 10
#: Number of bytes of a request at the end of a file: the end record of a zip archive and a comment.
TAIL_BYTES = 66 << 10
#: Number of bytes of the first request, by suffix: more for files that are read whole, fewer for files that begin with
#: values.
HEAD_BYTES_BY_SUFFIX = {".json": 4 << 20, ".metadata": 1 << 20, ".distcp": 4 << 10}
#: Number of bytes fetched for a small read, and its maximum for consecutive small reads.
MIN_REQUEST_BYTES, MAX_REQUEST_BYTES = 16 << 10, 4 << 20
#: Maximum gap in bytes between two ranges that are fetched together, because one request is faster than two.
MAX_GAP_BYTES = 16 << 10
#: Size of a window of values in bytes. A thread keeps at most two windows, for all files together.
WINDOW_BYTES = 2 << 20
#: Maximum number of cached bytes of a file while it is open, and after it was closed.
MAX_KEPT_BYTES, MAX_KEPT_CLOSED_BYTES = 64 << 20, 4 << 20
#: First bytes of files with checksums: zip archives, and files that begin with an archive.
_ZIP_MAGIC = b"PK\3\4"


class Span(NamedTuple):
    """Bytes of a file from the offset `start` up to the offset `stop`, exclusive."""

    start: int
    stop: int


class RemoteFile:
    """Cache of the file behind a URL.

    Attributes:
        version: The required version of all answers; None before the first answer.
        checksums: Checksums of the values read, if the file has checksums to compare with.
    """

    def __init__(self, url: str, store: ObjectStore, version: FileVersion | None = None) -> None:
        self._url, self._store = url, store
        self.version = version
        self._first, self._lock = threading.Lock(), threading.Lock()
        self._error: UnreadableError | None = None
        self._readers = 0
        #: Cached spans by offset, and their sorted offsets.
        self._starts: list[int] = []
        self._spans: dict[int, bytes] = {}
        self._cached_bytes = 0
        self._end, self._step = -1, MIN_REQUEST_BYTES
        self.checksums: Checksums | None = None
        #: Guards by the offset of their bytes, and the sorted offsets.
        self._guarded: list[int] = []
        self._guards: dict[int, Guard] = {}
        self._confirmed: set[int] = set()

    def prefetch_head(self) -> None:
        """Fetch the beginning of the file once. After a failure, each call raises the same UnreadableError."""
        with self._first:
            if self._error is not None:
                raise self._error
            if self.version is not None:
                return
            path = self._url.partition("?")[0]
            sizes = (size for suffix, size in HEAD_BYTES_BY_SUFFIX.items() if path.endswith(suffix))
            try:
                data = self.request(0, next(sizes, HEAD_BYTES))
            except UnreadableError as why:
                self._error = why
                raise
            self._keep(0, data)
            self._end = len(data)
            self.checksums = Checksums() if data.startswith(_ZIP_MAGIC) else None

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        self.prefetch_head()
        assert self.version is not None  # noqa: S101 - set by prefetch_head
        return self.version.size

    def request(self, offset: int, length: int) -> bytes:
        """Fetch `length` bytes from `offset` on, without keeping them."""
        try:
            data, version = retry(lambda: self._store.get(self._url, offset, length, self.version), self._url)
            with self._lock:  # other threads fetch too, and each answer may add markers of the version
                self.version = confirm_version(self.version, version)
        except UnreadableError as why:
            if type(why) is UnreadableError:  # also raised for values that are not numbers
                raise Unfetched(str(why)) from None
            raise
        return data

    def add_reader(self) -> None:
        """Count a handle that was opened."""
        with self._lock:
            self._readers += 1

    def remove_reader(self) -> None:
        """Count a handle that was closed. After the last handle, keep only a few cached bytes."""
        with self._lock:
            self._readers -= 1
            if not self._readers:
                self._evict(MAX_KEPT_CLOSED_BYTES)

    def release(self) -> None:
        """Drop the cached bytes of a closed file, but keep its version."""
        with self._lock:
            if not self._readers:
                self._evict(0)

    # --- headers ------------------------------------------------------------------------------------------------------

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer at the end of the file; fetch bytes that are not cached."""
        end = min(offset + length, self.size)
        guards = self._find_guards(offset, end)
        begin = min(offset, *(guard.header for guard in guards)) if guards else offset
        start = begin if offset - begin <= MIN_REQUEST_BYTES else offset
        data = self._read_span(start, end)[offset - start :]
        for guard in guards:
            self._confirm_guard(guard, self._read_span(guard.header, guard.start))
        return data

    def read_cached(self, offset: int, length: int) -> bytes | None:
        """See `File.read_cached`."""
        parts, holes = self._split_cached(offset, offset + length)
        return None if holes else b"".join(parts.values())

    def prefetch(self, extents: Iterable[Extent]) -> None:
        """Fetch the extents for the next reads: adjacent extents together, with parallel requests."""
        run_in_threads(self.fetch, self.missing_spans(extents))

    def fetch(self, span: Span) -> None:
        """Fetch the bytes of the span for the following reads."""
        self._keep(span.start, self.request(span.start, span.stop - span.start))

    def missing_spans(self, extents: Iterable[Extent]) -> list[Span]:
        """Return the spans of the extents that are not cached. Spans that are close together are joined."""
        missing: list[Span] = []
        spans = (Span(extent.offset, min(extent.offset + extent.length, self.size)) for extent in extents)
        for start, stop in sorted(hole for span in spans for hole in self._split_cached(*span)[1]):
            first, last = missing[-1] if missing else (0, -MAX_REQUEST_BYTES)
            if start - last <= MAX_GAP_BYTES and stop - first <= MAX_REQUEST_BYTES:
                missing[-1] = Span(first, max(stop, last))
            else:
                missing.append(Span(start, stop))
        return missing

    def _read_span(self, offset: int, end: int) -> bytes:
        parts, holes = self._split_cached(offset, end)
        if not holes:
            return b"".join(parts.values()) if len(parts) != 1 else next(iter(parts.values()))
        start, stop = self._widen(holes[0].start, holes[-1].stop)
        data = self.request(start, stop - start)
        self._end = stop
        self._keep(start, data)
        fetched_part = data[max(offset - start, 0) : min(stop, end) - start]
        preceding_parts = (part for at, part in parts.items() if at < start)
        return b"".join((*preceding_parts, fetched_part, *(part for at, part in parts.items() if at >= stop)))

    def _widen(self, start: int, stop: int) -> Span:
        """Return the span to fetch for missing bytes. The span may be longer, but contains no cached bytes."""
        at = bisect_right(self._starts, start) - 1
        if stop == self.size:
            previous_end = self._starts[at] + len(self._spans[self._starts[at]]) if at >= 0 else 0
            return Span(max(min(previous_end, start), min(start, stop - TAIL_BYTES)), stop)
        if stop - start >= HEAD_BYTES:
            return Span(start, stop)
        is_sequential = 0 <= start - self._end <= HEAD_BYTES
        self._step = min(self._step * 2, MAX_REQUEST_BYTES) if is_sequential else MIN_REQUEST_BYTES
        next_start = self._starts[at + 1] if at + 1 < len(self._starts) else self.size
        return Span(start, max(stop, min(start + self._step, next_start)))

    def _split_cached(self, offset: int, end: int) -> tuple[dict[int, bytes], list[Span]]:
        """Return the cached parts of the bytes `offset` to `end` by their offsets, and the spans that are missing."""
        parts: dict[int, bytes] = {}
        holes: list[Span] = []
        with self._lock:
            n = max(bisect_right(self._starts, offset) - 1, 0)
            while offset < end and n < len(self._starts) and (start := self._starts[n]) < end:
                if start > offset:
                    holes.append(Span(offset, start))
                    offset = start
                if part := self._spans[start][offset - start : end - start]:
                    parts[offset] = part
                offset += len(part)
                n += 1
        return parts, [*holes, Span(offset, end)] if offset < end else holes

    def _keep(self, offset: int, data: bytes) -> None:
        with self._lock:
            if self._cached_bytes + len(data) > MAX_KEPT_BYTES:
                self._evict(MAX_KEPT_CLOSED_BYTES)
            if len(data) > MAX_KEPT_BYTES or len(data) <= len(self._spans.get(offset, b"")):
                return
            if offset not in self._spans:
                insort(self._starts, offset)
            self._cached_bytes += len(data) - len(self._spans.get(offset, b""))
            self._spans[offset] = data

    def _evict(self, limit: int) -> None:
        for start in sorted(self._starts, key=lambda start: -len(self._spans[start])):
            if self._cached_bytes <= limit:
                break
            self._cached_bytes -= len(self._spans.pop(start))
        self._starts = sorted(self._spans)

    # --- bytes whose place in the file is not yet confirmed -----------------------------------------------------------

    def guard(self, guards: Iterable[Guard]) -> None:
        """See `File.guard`."""
        with self._lock:
            self._guards.update((guard.start, guard) for guard in guards if guard.start not in self._confirmed)
            self._guarded = sorted(self._guards)

    def confirm_guards(self) -> None:
        """See `Store.confirm_guards`."""
        guards = list(self._guards.values())
        self.prefetch(Extent(guard.header, guard.start - guard.header) for guard in guards)
        for guard in guards:
            self._confirm_guard(guard, self._read_span(guard.header, guard.start))

    def _find_guards(self, offset: int, end: int) -> list[Guard]:
        """Return the guards of these bytes that are not confirmed yet."""
        if not self._guards:
            return []
        with self._lock:
            first = max(bisect_right(self._guarded, offset) - 1, 0)
            last = bisect_left(self._guarded, end)
            guards = [self._guards[start] for start in self._guarded[first:last]]
        return [guard for guard in guards if guard.stop > offset]

    def _confirm_guard(self, guard: Guard, header: bytes) -> None:
        """Check a guard once. Raises MalformedError."""
        guard.check(header)
        with self._lock:
            self._confirmed.add(guard.start)
            if self._guards.pop(guard.start, None) is not None:
                self._guarded.pop(bisect_left(self._guarded, guard.start))

    # --- values -------------------------------------------------------------------------------------------------------

    def find_crc32(self, offset: int, end: int) -> int | None:
        """Return the CRC-32 of the bytes `offset` to `end`; None unless all bytes were read as values or are cached."""
        if self.checksums is None:
            return None
        is_confirmed = not self._find_guards(offset, end)
        return self.checksums.combine(offset, end, self.read_cached if is_confirmed else lambda *_: None)

    def read_window(self, offset: int, stop: int) -> memoryview:
        """Return bytes from `offset` to at most `stop`. The bytes are either all cached or all fetched together."""
        stop = min(stop, self.size)
        holes = self._split_cached(offset, stop)[1]
        if not holes or holes[0].start > offset:
            stop = holes[0].start if holes else stop
            return self._confirm_window(offset, stop, offset, memoryview(self._read_span(offset, stop)))
        for (_, end), (start, _) in pairwise((*holes, Span(self.size + HEAD_BYTES, 0))):
            if start - end > MAX_GAP_BYTES:  # the cached bytes are long enough to save a request
                stop = end
                break
        guards = self._find_guards(offset, stop)
        begin = min([offset, *(guard.header for guard in guards if guard.header >= offset - MIN_REQUEST_BYTES)])
        data = self.request(begin, stop - begin)
        prefetch_progress.count_fetched_values().bytes += len(data)
        return self._confirm_window(offset, stop, begin, memoryview(data))

    def _confirm_window(self, offset: int, stop: int, begin: int, data: memoryview) -> memoryview:
        """Return the part of `data` from `offset` to the first wrong header. `data` begins at offset `begin`."""
        for guard in self._find_guards(offset, stop):
            header_view = data[guard.header - begin : guard.start - begin] if guard.header >= begin else None
            try:
                self._confirm_guard(
                    guard, self._read_span(guard.header, guard.start) if header_view is None else bytes(header_view)
                )
            except UnreadableError:
                if guard.start <= offset:
                    raise
                return data[offset - begin : guard.header - begin]  # the next read raises the error
        return data[offset - begin :]


class Handle:
    """Remote file, open for a single reader: a `File`."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self.size = file.size
        self.read, self.read_cached, self.prefetch, self.guard = file.read, file.read_cached, file.prefetch, file.guard
        self._is_open = True
        file.add_reader()

    def fill(self, offset: int, into: memoryview, read_ahead: int) -> int:
        part = lifetime.for_command(_ValueReads).windows.read(self._file, offset, len(into), read_ahead)
        into[: len(part)] = part
        return len(part)

    def measure(self) -> int:
        return self.size

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._file.remove_reader()


# --- values -----------------------------------------------------------------------------------------------------------


class ExpectedRead(NamedTuple):
    """Bytes that will be read: `length` bytes of a file from `offset` on."""

    file: RemoteFile
    offset: int
    length: int


class _Windows(threading.local):
    """Buffers for one thread's reads of values: a window of bytes at each offset where a read may continue."""

    def __init__(self, workers: threading.Semaphore) -> None:
        self.is_at_work = False
        self._workers = workers
        #: Runs of bytes that will be read consecutively, sorted, by file.
        self._runs: dict[RemoteFile, list[Span]] = {}
        #: Sorted starts and ends of the expected ranges, by file.
        self._cuts: dict[RemoteFile, list[int]] = {}
        #: Windows by file and offset; the last used window is last.
        self._windows: OrderedDict[tuple[RemoteFile, int], memoryview] = OrderedDict()
        #: Windows that were read to the end.
        self._finished_windows: set[tuple[RemoteFile, int]] = set()
        #: Size of a new window in bytes.
        self._limit = WINDOW_BYTES

    def expect(self, reads: Iterable[ExpectedRead]) -> None:
        """Plan the reads: adjacent bytes are fetched together."""
        self.clear()
        for file, offset, length in sorted(reads, key=attrgetter("offset")):
            runs = self._runs.setdefault(file, [])
            if runs and offset - runs[-1].stop <= MAX_GAP_BYTES:
                runs[-1] = Span(runs[-1].start, max(runs[-1].stop, offset + length))
            else:
                runs.append(Span(offset, offset + length))
            self._cuts.setdefault(file, []).extend((offset, offset + length))
        if len(self._runs) > 2:
            self._limit = WINDOW_BYTES // 2
        self._cuts = {file: sorted(set(cuts)) for file, cuts in self._cuts.items() if file.checksums}

    def read(self, file: RemoteFile, offset: int, length: int, read_ahead: int) -> memoryview:
        """Return at most `length` bytes from `offset` on; empty at the end. `read_ahead`: see `File.fill`."""
        preceding_bytes = 0
        for key, window in reversed(self._windows.items()):
            if key[0] is file and key[1] <= offset < key[1] + len(window):
                return self._use_window(key, window, offset, length)
            if key == (file, offset - len(window)):
                preceding_bytes = len(window)
        if offset >= file.size:
            return memoryview(b"")
        stop = self._plan_stop(file, offset, max(read_ahead, length), preceding_bytes)
        self._shrink(2 * WINDOW_BYTES - (stop - offset))
        self._windows[file, offset] = window = self._fetch(file, offset, stop)
        return self._use_window((file, offset), window, offset, length)

    def _use_window(self, key: tuple[RemoteFile, int], window: memoryview, offset: int, length: int) -> memoryview:
        self._windows.move_to_end(key)
        part = window[offset - key[1] :][:length]
        if offset + length >= key[1] + len(window):
            self._finished_windows.add(key)
        return part

    def _fetch(self, file: RemoteFile, offset: int, stop: int) -> memoryview:
        """Fetch a window. Meanwhile another thread may compute, because this thread releases the semaphore."""
        if not self.is_at_work:
            return file.read_window(offset, stop)
        self._workers.release()
        try:
            window = file.read_window(offset, stop)
            if file.checksums:
                file.checksums.add(offset, window, self._cuts.get(file, ()))
            return window
        finally:
            self._workers.acquire()

    def _plan_stop(self, file: RemoteFile, offset: int, read_ahead: int, preceding_bytes: int) -> int:
        """Return the end of a new window. Without expected ranges, windows grow while reads are consecutive."""
        runs = self._runs.get(file, ())
        n = bisect_right(runs, (offset, file.size)) - 1
        if n >= 0 and offset < runs[n].stop:
            return min(offset + self._limit, runs[n].stop)
        return offset + min(read_ahead, max(HEAD_BYTES, min(2 * preceding_bytes, self._limit)))

    def _shrink(self, limit: int) -> None:
        """Drop finished windows, then the least recently used. If this drops unread bytes, halve the window size."""
        while self._windows and sum(map(len, self._windows.values())) > limit:
            key = next((key for key in self._windows if key in self._finished_windows), next(iter(self._windows)))
            self._windows.pop(key)
            self._limit = self._limit if key in self._finished_windows else max(self._limit // 2, HEAD_BYTES)

    def clear(self) -> None:
        """Drop all windows and expected ranges."""
        self._runs, self._cuts, self._limit = {}, {}, WINDOW_BYTES
        self._windows.clear()
        self._finished_windows.clear()


class _ValueReads:
    """Limit for threads that read values: one thread per core may compute. Threads that wait for bytes do not count."""

    def __init__(self) -> None:
        self.workers = threading.Semaphore(max(os.cpu_count() or 1, 2))
        self.windows = _Windows(self.workers)


@contextmanager
def expect_values(expected_reads: Iterable[ExpectedRead]) -> Iterator[None]:
    """Fetch adjacent bytes together while the block does the expected reads in order in this thread."""
    reads = lifetime.for_command(_ValueReads)
    windows = reads.windows
    if windows.is_at_work:  # nested in another block, whose ranges include these
        yield
        return
    windows.expect(expected_reads)
    with reads.workers:
        windows.is_at_work = True
        try:
            yield
        finally:
            windows.is_at_work = False
            windows.clear()
