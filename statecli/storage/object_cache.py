"""One object in a store: what was fetched of it, so that a reader's many small reads are few requests.

What a reader asks for is fetched once and kept while the file is open, and of small things longer. Values are not kept:
they come in windows, which end where whoever reads them said that he would.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import itemgetter

from statecli.core.errors import UnreadableError
from statecli.storage.checksums import Sums
from statecli.storage.files import Guard
from statecli.storage.parallel import side_by_side
from statecli.storage.retry import repeated
from statecli.storage.store import Known, Missing, Store, Unfetched, merged

__all__ = ["Handle", "Missing", "Object", "reading"]

#: Bytes fetched first: the header of most files, and all of many.
GUESS = 64 << 10
#: Those of an end: a zip's end record and its comment.
TAIL = 66 << 10
#: Those of what is read to its end, whatever it says: an index of 40,000 tensors; and of what begins with values.
GUESSES = {".json": 4 << 20, ".metadata": 1 << 20, ".distcp": 4 << 10}
#: Bytes fetched for a small read somewhere, and at most ahead of small reads that follow one another.
STEP, AHEAD = 16 << 10, 4 << 20
#: Bytes between two ranges that are fetched with them, where one request is quicker than two.
GAP = 16 << 10
#: Bytes of values that are fetched at a time, half of what a thread holds of all files together.
WINDOW = 2 << 20
#: Bytes of an object that are kept for the next read, while it is open and after it.
KEPT, LEFT = 64 << 20, 4 << 20
#: What begins with this has checksums: zip archives, and files of several of them.
_CHECKED = b"PK\3\4"


class Object:
    """Behind `url` in `store`; `known` of it where another process has asked before."""

    def __init__(self, url: str, store: Store, known: Known | None = None) -> None:
        self._url, self._store = url, store
        self.known = known
        self._first, self._lock = threading.Lock(), threading.Lock()
        self._error: UnreadableError | None = None
        self._open = 0
        #: What was fetched, by where it begins: sorted starts, and the bytes of each.
        self._starts: list[int] = []
        self._spans: dict[int, bytes] = {}
        self._held = 0
        self._end, self._step = -1, STEP
        #: Of its values, as they come, where it has checksums to compare them with.
        self.sums: Sums | None = None
        #: What is to be confirmed before it is read: where its bytes begin, sorted, and the rest.
        self._guarded: list[int] = []
        self._guards: dict[int, Guard] = {}
        self._confirmed: set[int] = set()
        #: Bytes that lie elsewhere than was foretold: where they were looked for, up to where, and how much later.
        self.moved: dict[int, tuple[int, int]] = {}

    def prime(self) -> None:
        """Fetches its beginning, unless it is known. Raises UnreadableError, the same one each time."""
        with self._first:
            if self._error is not None:
                raise self._error
            if self.known is not None:
                return
            way = self._url.partition("?")[0]
            guess = next((size for suffix, size in GUESSES.items() if way.endswith(suffix)), GUESS)
            try:
                data = self.get(0, guess)
            except UnreadableError as why:
                self._error = why
                raise
            self._keep(0, data)
            self._end = len(data)
            self.sums = Sums() if data.startswith(_CHECKED) else None

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
        try:
            data, known = repeated(lambda: self._store.get(self._url, offset, length, self.known), self._url)
            with self._lock:  # several are on their way, and each may tell more of the version
                self.known = merged(self.known, known)
        except UnreadableError as why:
            if type(why) is UnreadableError:  # which values have too that are no numbers
                raise Unfetched(str(why)) from None
            raise
        return data

    def opened(self) -> None:
        """One more reads it."""
        with self._lock:
            self._open += 1

    def closed(self) -> None:
        """One less; little is kept behind the last one."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._forget(LEFT)

    def release(self) -> None:
        """Nothing of it is kept, unless it is open; what is known of it is."""
        with self._lock:
            if not self._open:
                self._forget(0)

    # --- headers ------------------------------------------------------------------------------------------------------

    def read(self, offset: int, length: int) -> bytes:
        """These bytes, fewer where it ends, of which those are fetched that are not here."""
        end = min(offset + length, self.size)
        guards = self._unconfirmed(offset, end)
        begin = min(offset, *(guard.header for guard in guards)) if guards else offset
        data = self._read(begin, end)[offset - begin :] if offset - begin <= STEP else self._read(offset, end)
        for guard in guards:
            self._confirm(guard, self._read(guard.header, guard.start))
        real, stop = self._real(offset, end)
        return data if real == offset else self._read(real, stop)

    def here(self, offset: int, length: int) -> bytes | None:
        """These bytes where nothing need be fetched for them."""
        parts, holes = self._parts(offset, offset + length)
        return None if holes else b"".join(parts.values())

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetches these (offset, length), neighbours together and many at a time, for the reads that follow."""
        side_by_side(self.fetch, self.missing(ranges))

    def fetch(self, span: Sequence[int]) -> None:
        """The bytes from one place to another, for the reads that follow."""
        self._keep(span[0], self.get(span[0], span[1] - span[0]))

    def missing(self, ranges: Iterable[tuple[int, int]]) -> list[list[int]]:
        """What to fetch, from one place to another, to have all of these (offset, length)."""
        wanted: list[list[int]] = []
        spans = ((offset, min(offset + length, self.size)) for offset, length in ranges)
        for start, stop in sorted(hole for span in spans for hole in self._parts(*span)[1]):
            if wanted and start - wanted[-1][1] <= GAP and stop - wanted[-1][0] <= AHEAD:
                wanted[-1][1] = max(stop, wanted[-1][1])
            else:
                wanted.append([start, stop])
        return wanted

    def _read(self, offset: int, end: int) -> bytes:
        parts, holes = self._parts(offset, end)
        if not holes:
            return b"".join(parts.values()) if len(parts) != 1 else next(iter(parts.values()))
        start, stop = self._wider(holes[0][0], holes[-1][1])
        data = self.get(start, stop - start)
        self._end = stop
        self._keep(start, data)
        inside = data[max(offset - start, 0) : min(stop, end) - start]
        before = (part for at, part in parts.items() if at < start)
        return b"".join((*before, inside, *(part for at, part in parts.items() if at >= stop)))

    def _wider(self, start: int, stop: int) -> tuple[int, int]:
        """What is fetched for bytes that are not here: more than little, up to what is."""
        at = bisect_right(self._starts, start) - 1
        if stop == self.size:
            before = self._starts[at] + len(self._spans[self._starts[at]]) if at >= 0 else 0
            return max(min(before, start), min(start, stop - TAIL)), stop
        if stop - start >= GUESS:
            return start, stop
        follows = 0 <= start - self._end <= GUESS
        self._step = min(self._step * 2, AHEAD) if follows else STEP
        after = self._starts[at + 1] if at + 1 < len(self._starts) else self.size
        return start, max(stop, min(start + self._step, after))

    def _parts(self, offset: int, end: int) -> tuple[dict[int, bytes], list[tuple[int, int]]]:
        """What is here of these bytes, by where it begins, and the holes that are left."""
        parts: dict[int, bytes] = {}
        holes: list[tuple[int, int]] = []
        with self._lock:
            n = max(bisect_right(self._starts, offset) - 1, 0)
            while offset < end and n < len(self._starts) and (start := self._starts[n]) < end:
                if start > offset:
                    holes.append((offset, start))
                    offset = start
                if part := self._spans[start][offset - start : end - start]:
                    parts[offset] = part
                offset += len(part)
                n += 1
        return parts, [*holes, (offset, end)] if offset < end else holes

    def _keep(self, offset: int, data: bytes) -> None:
        with self._lock:
            if self._held + len(data) > KEPT:
                self._forget(LEFT)
            if len(data) > KEPT or len(data) <= len(self._spans.get(offset, b"")):
                return
            if offset not in self._spans:
                insort(self._starts, offset)
            self._held += len(data) - len(self._spans.get(offset, b""))
            self._spans[offset] = data

    def _forget(self, limit: int) -> None:
        """The largest of what is here, until no more than `limit` bytes are."""
        for start in sorted(self._starts, key=lambda start: -len(self._spans[start])):
            if self._held <= limit:
                break
            self._held -= len(self._spans.pop(start))
        self._starts = sorted(self._spans)

    # --- what is not yet known to be where it is looked for -----------------------------------------------------------

    def guard(self, guards: Iterable[Guard]) -> None:
        """From now on these are confirmed before any of their bytes are handed out."""
        with self._lock:
            self._guards.update((guard.start, guard) for guard in guards if guard.start not in self._confirmed)
            self._guarded = sorted(self._guards)

    def confirm(self) -> None:
        """Confirms all that is not. Raises MalformedError as its check does."""
        guards = list(self._guards.values())
        self.prefetch((guard.header, guard.start - guard.header) for guard in guards)
        for guard in guards:
            self._confirm(guard, self._read(guard.header, guard.start))

    def _unconfirmed(self, offset: int, end: int) -> list[Guard]:
        """Those that have some of these bytes."""
        if not self._guards:
            return []
        with self._lock:
            first = max(bisect_right(self._guarded, offset) - 1, 0)
            last = bisect_left(self._guarded, end)
            found = [self._guards[start] for start in self._guarded[first:last]]
        return [guard for guard in found if guard.stop > offset]

    def _confirm(self, guard: Guard, header: bytes) -> bool:
        """Whether its bytes begin where they were looked for. Raises MalformedError as its check does."""
        later = guard.check(header)
        with self._lock:
            if later:
                self.moved[guard.start] = guard.stop, later
            self._confirmed.add(guard.start)
            if self._guards.pop(guard.start, None) is not None:
                self._guarded.pop(bisect_left(self._guarded, guard.start))
        return not later

    def _real(self, offset: int, stop: int) -> tuple[int, int]:
        """Where the bytes from `offset` on really begin, and where those up to `stop` end that follow one another."""
        for start, (end, later) in list(self.moved.items()):
            if start <= offset < end:
                return offset + later, min(min(stop, end) + later, self.size)
            if offset < start:
                stop = min(stop, start)
        return offset, stop

    # --- values -------------------------------------------------------------------------------------------------------

    def crc32_of(self, offset: int, end: int) -> int | None:
        """CRC-32 of these bytes, where all of them were read as values, or are here."""
        if self.sums is None:
            return None
        is_sure = self._real(offset, end) == (offset, end) and not self._unconfirmed(offset, end)
        return self.sums.of(offset, end, self.here if is_sure else lambda *_: None)

    def window(self, offset: int, stop: int) -> memoryview:
        """Bytes from `offset` on, up to `stop` at most: those that are here, or else fetched, and not kept."""
        real, stop = self._real(offset, min(stop, self.size))
        if real != offset:
            return memoryview(self.get(real, stop - real))
        holes = self._parts(offset, stop)[1]
        if not holes or holes[0][0] > offset:
            stop = holes[0][0] if holes else stop
            return self._as_far_as_sound(offset, stop, offset, memoryview(self._read(offset, stop)))
        for (_, end), (start, _) in pairwise((*holes, (self.size + GUESS, 0))):
            if start - end > GAP:  # what is here is worth another request
                stop = end
                break
        guards = self._unconfirmed(offset, stop)
        begin = min([offset, *(guard.header for guard in guards if guard.header >= offset - STEP)])
        return self._as_far_as_sound(offset, stop, begin, memoryview(self.get(begin, stop - begin)))

    def _as_far_as_sound(self, offset: int, stop: int, begin: int, data: memoryview) -> memoryview:
        """Of `data`, which begins at `begin`, what is from `offset` on, up to what is not where it was looked for."""
        for guard in self._unconfirmed(offset, stop):
            header = bytes(data[guard.header - begin : guard.start - begin]) if guard.header >= begin else None
            try:
                is_there = self._confirm(guard, self._read(guard.header, guard.start) if header is None else header)
            except UnreadableError:
                if guard.start <= offset:
                    raise
                is_there = False
            if not is_there and guard.start <= offset:
                return self.window(offset, stop)
            if not is_there:  # whoever reads on is told
                return data[offset - begin : guard.header - begin]
        return data[offset - begin :]


class Handle:
    """An object, open: `files.File` for one reader."""

    def __init__(self, one: Object) -> None:
        self._object = one
        self.size = one.size
        self._is_open = True
        one.opened()

    def read(self, offset: int, length: int) -> bytes:
        """As `files.File.read`."""
        return self._object.read(offset, length)

    def here(self, offset: int, length: int) -> bytes | None:
        """As `files.File.here`."""
        return self._object.here(offset, length)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `files.File.prefetch`."""
        self._object.prefetch(ranges)

    def guard(self, guards: Iterable[Guard]) -> None:
        """As `files.File.guard`."""
        self._object.guard(guards)

    def fill(self, offset: int, into: memoryview, ahead: int) -> int:
        """As `files.File.fill`."""
        part = _windows.at(self._object, offset, len(into), ahead)
        into[: len(part)] = part
        return len(part)

    def now(self) -> int:
        """As `files.File.now`."""
        return self.size

    def close(self) -> None:
        """As `files.File.close`."""
        if self._is_open:
            self._is_open = False
            self._object.closed()


# --- values of several ranges, one after another ----------------------------------------------------------------------


class _Windows(threading.local):
    """The windows that a thread reads values through: few bytes of each place where it goes on reading."""

    def __init__(self) -> None:
        #: The runs of bytes that are about to be read one after another, sorted, by object.
        self._runs: dict[Object, list[tuple[int, int]]] = {}
        self.is_at_work = False
        #: Where what was asked for begins and ends, sorted.
        self._cuts: dict[Object, list[int]] = {}
        #: Where each window begins, with its bytes and its object, the one used last behind the others.
        self._held: OrderedDict[tuple[Object, int], memoryview] = OrderedDict()
        #: Windows that were read to their end, and bytes of a new one somewhere else.
        self._done: set[tuple[Object, int]] = set()
        self._limit = WINDOW

    def expect(self, ranges: Iterable[tuple[Object, int, int]]) -> None:
        """These (object, offset, length) are about to be read; what lies close together is fetched together."""
        self.clear()
        for one, offset, length in sorted(ranges, key=itemgetter(1)):
            runs = self._runs.setdefault(one, [])
            if runs and offset - runs[-1][1] <= GAP:
                runs[-1] = runs[-1][0], max(runs[-1][1], offset + length)
            else:
                runs.append((offset, offset + length))
            self._cuts.setdefault(one, []).extend((offset, offset + length))
        if len(self._runs) > 2:
            self._limit = WINDOW // 2
        self._cuts = {one: sorted(set(cuts)) for one, cuts in self._cuts.items() if one.sums}

    def at(self, one: Object, offset: int, length: int, ahead: int) -> memoryview:
        """Bytes of the object from `offset` on, `length` at most; none at its end. The next `ahead` are wanted too."""
        follows = 0
        for key, window in reversed(self._held.items()):
            if key[0] is one and key[1] <= offset < key[1] + len(window):
                return self._part(key, window, offset, length)
            if key == (one, offset - len(window)):
                follows = len(window)
        if offset >= one.size:
            return memoryview(b"")
        stop = self._stop(one, offset, max(ahead, length), follows)
        self._shrink(2 * WINDOW - (stop - offset))
        self._held[one, offset] = window = self._fetched(one, offset, stop)
        return self._part((one, offset), window, offset, length)

    def _part(self, key: tuple[Object, int], window: memoryview, offset: int, length: int) -> memoryview:
        self._held.move_to_end(key)
        part = window[offset - key[1] :][:length]
        if offset + length >= key[1] + len(window):
            self._done.add(key)
        return part

    def _fetched(self, one: Object, offset: int, stop: int) -> memoryview:
        """The window; another thread may work meanwhile."""
        if not self.is_at_work:
            return one.window(offset, stop)
        _at_work.release()
        try:
            found = one.window(offset, stop)
            if one.sums:
                one.sums.add(offset, found, self._cuts.get(one, ()))
            return found
        finally:
            _at_work.acquire()

    def _stop(self, one: Object, offset: int, ahead: int, follows: int) -> int:
        """Where a new window ends. Nobody knows how far a reader goes on who has not said so: it begins small."""
        runs = self._runs.get(one, ())
        n = bisect_right(runs, (offset, one.size)) - 1
        if n >= 0 and offset < runs[n][1]:
            return min(offset + self._limit, runs[n][1])
        return offset + min(ahead, max(GUESS, min(2 * follows, self._limit)))

    def _shrink(self, limit: int) -> None:
        """Lets go of what was read, then of what was not used for the longest time, and holds less from then on."""
        while self._held and sum(map(len, self._held.values())) > limit:
            key = next((key for key in self._held if key in self._done), next(iter(self._held)))
            self._held.pop(key)
            self._limit = self._limit if key in self._done else max(self._limit // 2, GUESS)

    def clear(self) -> None:
        """Nothing is held, and nothing known of what is about to be read."""
        self._runs, self._cuts, self._limit = {}, {}, WINDOW
        self._held.clear()
        self._done.clear()


_windows = _Windows()
#: As many work at a time as there are cores, while the others wait for bytes: more would only take turns.
_at_work = threading.Semaphore(max(os.cpu_count() or 1, 2))


@contextmanager
def reading(ranges: Iterable[tuple[Object, int, int]]) -> Iterator[None]:
    """Around reading the values of these (object, offset, length) in this thread, one after another."""
    if _windows.is_at_work:  # inside another, which has said what there is to read
        yield
        return
    _windows.expect(ranges)
    with _at_work:
        _windows.is_at_work = True
        try:
            yield
        finally:
            _windows.is_at_work = False
            _windows.clear()
