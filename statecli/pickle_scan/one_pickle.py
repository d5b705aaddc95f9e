"""Scan one pickle in a file: read it in growing windows, within a budget, and report what it imports.

Which bytes of a file are pickles is decided elsewhere; here one is read from where it begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.state import Place
from statecli.pickle_scan import frames
from statecli.pickle_scan.imported_names import Scanner
from statecli.pickle_scan.step_budget import Budget, OutOfSteps, Steps
from statecli.pickles.machine import METADATA_BUDGET, MisframedPickle, OverBudget, TruncatedFrame, TruncatedPickle
from statecli.storage import files
from statecli.storage.checkpoint_names import METADATA
from statecli.storage.source import Source

#: Bytes of one pickle.
MAX_PICKLE = 256 * 2**20
#: Bytes that are read first of a pickle of unknown length, and how many times as many are read next.
FIRST_WINDOW, _GROWTH = 64 * 1024, 8
#: Bytes that tell whether a record begins like a pickle.
REGION_HEAD = 512
_ZIP = b"PK\3\4"
_PLAIN = re.compile(r"[A-Za-z_][\w.]*\Z")
_TEXT = re.compile(rb"[\t\n\f\r\x1b -\x7e\x80-\xff]*")


class Unfetched(Exception):
    """Bytes did not come: none of the errors that say what is wrong with those that did."""


@contextmanager
def fetching() -> Iterator[None]:
    """Raise Unfetched for bytes that cannot be read; what is wrong with bytes that were read stays MalformedError."""
    try:
        yield
    except MalformedError:
        raise
    except UnreadableError as error:
        raise Unfetched(str(error)) from error


class Region(Source):
    """Bytes of an open file, or inflated ones, read as a file is; `base` is where they lie in the file, if they do."""

    __slots__ = ("_data", "_source", "base", "span")

    def __init__(self, source: Source, offset: int, length: int, data: bytes | None = None) -> None:
        self.path = source.path
        self.size = length if data is None else len(data)
        self.is_remote = source.is_remote and data is None
        self._source, self._data, self.span = source, data, Place(source.path, offset, length)
        self.base = offset if data is None else None
        self.head = self.read(0, min(REGION_HEAD, self.size))

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Source.prefetch`."""
        if self._data is None:
            with fetching():
                self._source.prefetch((self.span.offset + offset, length) for offset, length in ranges)

    def read_cached(self, offset: int, length: int) -> bytes | None:
        """As `Source.read_cached`."""
        return self.read(offset, length) if self._data is not None or not self.is_remote else None

    def close(self) -> None:
        """Nothing: the file is whoever's that opened it."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; MalformedError where there are not so many."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise MalformedError(f"is truncated: bytes {offset} to {offset + length} are needed, it holds {self.size}")
        if self._data is not None:
            return self._data[offset : offset + length]
        with fetching():
            return self._source.read(self.span.offset + offset, length)

    def part(self, offset: int, length: int) -> Region:
        """Some of these bytes."""
        if self._data is not None:
            return self.made(self._data[offset : offset + length])
        return Region(self._source, self.span.offset + offset, length)

    def made(self, data: bytes) -> Region:
        """What these bytes inflate or decode to."""
        return Region(self._source, self.span.offset, self.span.length, data)


class PickleReader:
    """Scans pickles of one file; `steps` counts the work that the file has caused."""

    def __init__(self, path: str, steps: Steps) -> None:
        self._is_metadata = files.get_name(path).endswith(METADATA)
        self._steps = steps

    def read(self, region: Region, at: int, where: str, window: int) -> tuple[Scanner, MalformedError | None]:
        """Read a pickle of which only a record's length is known: windows grow until it fits."""
        left = region.size - at
        while True:
            scanner, error = self.run(region.read(at, min(window, left, MAX_PICKLE)), where)
            if not isinstance(error, TruncatedPickle) or len(scanner.data) == left:
                return scanner, error
            if len(scanner.data) == MAX_PICKLE:
                return scanner, OverBudget(f"{where} is a pickle of more than {MAX_PICKLE:,} bytes")
            window *= _GROWTH

    def run(self, data: bytes, where: str) -> tuple[Scanner, MalformedError | None]:
        self._steps.take(Budget.BYTES, len(data))
        scanner, failed = Scanner(data, where, self._steps), None
        if self._is_metadata:
            scanner.budget = METADATA_BUDGET
        self._steps.unfinished = lambda: scanner.opcodes
        try:
            scanner.run(0)
        except MalformedError as error:
            failed = error
            odd = scanner.framed and not isinstance(error, (OverBudget, MisframedPickle))
            if odd and frames.read_as_file(data).dropped:
                failed = scanner.misframed(scanner.frame_end, "an opcode crosses the end of its frame")
        self._steps.unfinished = int
        try:
            self._steps.take(Budget.OPCODES, scanner.opcodes)
        except OutOfSteps as error:  # what was read is reported with its names
            failed = failed or error
        return scanner, failed


def begins_as_pickle(source: Source) -> bool:
    """Whether a pickle of any protocol is at the start of the file, whatever follows: one that says its protocol, one
    that calls what it imports, or one that goes to its STOP and imports something, exhausts memory or time, or ends
    with the file. Raises UnreadableError where its bytes do not come.
    """
    if source.head[:1] == b"\x80":
        return source.head[1:2] <= b"\x05" and source.size > 2
    if source.head.startswith(_ZIP):
        return False
    whole = Region(source, 0, source.size)
    try:
        scanner, unread = PickleReader(source.path, Steps()).read(whole, 0, "the file", FIRST_WINDOW)
    except Unfetched as error:
        raise UnreadableError(str(error)) from error
    if not is_harmless(scanner, unread):
        return True
    if unread or scanner.globals:
        return False
    return scanner.end == source.size or bool(scanner.bombs(source.size))


def is_harmless(scanner: Scanner, unread: MalformedError | None, *, copied: bool = False) -> bool:
    """Whether what begins like a pickle imports nothing, or breaks off and only looks as if it did: text, or floats.

    `copied`: a storage, whose bytes no loader unpickles.
    """
    plain = any(_PLAIN.match(one.module) and _PLAIN.match(one.name) for one in scanner.globals.values())
    chance = copied or _TEXT.fullmatch(scanner.data)
    meant = unread is None or scanner.data[:1] == b"\x80" or scanner.calls or not chance
    odd = isinstance(unread, (OverBudget, MisframedPickle, TruncatedFrame))
    return not odd and not (scanner.globals and plain and meant)
