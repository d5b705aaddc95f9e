"""One object in a store: what was fetched of it, so that a reader's many small reads are few requests."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Iterable

from statecli.errors import UnreadableError
from statecli.remote.attempts import repeated
from statecli.remote.stores import Known, Missing, Store

__all__ = ["Handle", "Missing", "Object"]

#: Bytes fetched first: the header of most files, and all of many.
GUESS = 64 << 10
#: Bytes fetched ahead of small reads that follow one another, at most.
AHEAD = 4 << 20
#: Bytes of values that a worker holds of a file.
WINDOW = 8 << 20
#: Bytes of an object that are kept for the next read.
KEPT = 64 << 20


class Object:
    """Behind `url` in `store`; `known` of it where another process has asked before."""

    def __init__(self, url: str, store: Store, known: Known | None = None) -> None:
        self._url, self._store = url, store
        self.known = known
        self._lock = threading.Lock()
        self._error: UnreadableError | None = None
        #: What was fetched, by where it begins: sorted starts, and the bytes of each.
        self._starts: list[int] = []
        self._spans: dict[int, bytes] = {}
        self._end, self._step = -1, GUESS

    def prime(self) -> None:
        """Fetches its beginning, unless it is known. Raises UnreadableError, the same one each time."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self.known is not None:
                return
            try:
                self._keep(0, self.get(0, GUESS))
            except UnreadableError as why:
                self._error = why
                raise

    def try_prime(self) -> None:
        """As `prime`; what goes wrong is said by whoever opens it."""
        try:
            self.prime()
        except UnreadableError:
            return

    @property
    def size(self) -> int:
        """Bytes."""
        self.prime()
        assert self.known is not None  # noqa: S101 - primed
        return self.known[0]

    def get(self, offset: int, length: int) -> bytes:
        """These bytes, fetched."""
        data, known = repeated(lambda: self._store.get(self._url, offset, length, self.known))
        self.known = known
        return data

    def read(self, offset: int, length: int) -> bytes:
        """These bytes, fewer where it ends, fetched if they are not here."""
        length = max(0, min(length, self.size - offset))
        here = self._here(offset, length)
        if here is not None:
            return here
        if length < AHEAD and 0 <= offset - self._end <= GUESS:
            self._step = min(self._step * 2, AHEAD)
        else:
            self._step = GUESS
        data = self.get(offset, min(max(length, self._step), self.size - offset))
        self._end = offset + len(data)
        self._keep(offset, data)
        return data[:length]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetches these (offset, length), neighbours together and many at a time, for the reads that follow."""
        from statecli.remote import side_by_side

        wanted: list[list[int]] = []
        for offset, length in sorted(ranges):
            end = min(offset + length, self.size)
            if end <= offset or self._here(offset, end - offset) is not None:
                continue
            if wanted and offset - wanted[-1][1] <= GUESS // 4 and end - wanted[-1][0] <= AHEAD:
                wanted[-1][1] = max(end, wanted[-1][1])
            else:
                wanted.append([offset, end])
        side_by_side(lambda span: self._keep(span[0], self.get(span[0], span[1] - span[0])), wanted)

    def _here(self, offset: int, length: int) -> bytes | None:
        if not length:
            return b""
        at = bisect_right(self._starts, offset) - 1
        for start in self._starts[max(0, at - 3) : at + 1][::-1]:
            span = self._spans[start]
            if offset + length <= start + len(span):
                return span[offset - start : offset - start + length]
        return None

    def _keep(self, offset: int, data: bytes) -> None:
        if sum(map(len, self._spans.values())) + len(data) > KEPT:
            head = self._spans.get(0)
            self._spans = {} if head is None or len(head) > GUESS else {0: head}
            self._starts = list(self._spans)
        if len(data) <= KEPT and len(data) > len(self._spans.get(offset, b"")):
            if offset not in self._spans:
                insort(self._starts, offset)
            self._spans[offset] = data


class Handle:
    """An object, open: `files.File` for one reader."""

    def __init__(self, one: Object) -> None:
        self._object = one
        self.size = one.size
        self._at, self._window = 0, memoryview(b"")

    def read(self, offset: int, length: int) -> bytes:
        """As `files.File.read`."""
        return self._object.read(offset, length)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Object.prefetch`."""
        self._object.prefetch(ranges)

    def fill(self, offset: int, into: memoryview, ahead: int) -> int:
        """As `files.File.fill`."""
        if not self._at <= offset < self._at + len(self._window):
            wanted = max(len(into), min(ahead, WINDOW))
            self._at, self._window = offset, memoryview(self._object.get(offset, min(wanted, self.size - offset)))
        start = offset - self._at
        part = self._window[start : start + len(into)]
        into[: len(part)] = part
        return len(part)

    def now(self) -> int:
        """As `files.File.now`."""
        return self.size

    def close(self) -> None:
        """As `files.File.close`."""
        self._window = memoryview(b"")
