"""Scan a pickle in a file: read growing windows, within a budget, and report the imported names.

Other modules decide which bytes of a file are pickles; this module reads a pickle from its first byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Place
from statecli.pickle_scan.imported_names import Scanner
from statecli.pickle_scan.module_search import AdjacentFiles
from statecli.pickle_scan.scanner_opcodes import EXTENSION_REGISTRY
from statecli.pickle_scan.step_budget import Budget, OutOfSteps, Steps
from statecli.pickles.errors import ComputedName, OverBudget, TruncatedPickle
from statecli.pickles.machine import METADATA_BUDGET_FACTOR
from statecli.pickles.nodes import Global, Obj
from statecli.storage import files
from statecli.storage.byte_source import ByteSource
from statecli.storage.checkpoint_names import LEGACY_MAGIC_NUMBER, METADATA_NAME
from statecli.storage.store import Extent

#: Largest pickle that is read, in bytes.
MAX_PICKLE_BYTES = 256 * 2**20
#: Bytes read first of a pickle of unknown length, bytes read if it is longer, and factor by which later reads grow.
#: Each step scans the pickle again.
FIRST_WINDOW_BYTES, SECOND_WINDOW_BYTES, _WINDOW_GROWTH = 64 * 1024, 4 * 1024**2, 8
#: Bytes needed to see whether a record begins like a pickle.
REGION_HEAD_BYTES = 512
_ZIP_START = b"PK\3\4"
_PLAIN_NAME = compile_on_use(r"[A-Za-z_][\w.]*\Z")
#: Name of a module: any name without blanks, because text has blanks, and `import` takes any name of a file or folder,
#: such as `lib-dynload`.
_IMPORTABLE_NAME = compile_on_use(r"[^\s\0]+\Z")
#: Text in UTF-8 or in an encoding of one byte a character.
_TEXT = compile_on_use(rb"[\t\n\f\r\x1b -\x7e\x80-\xff]*")


class FetchError(Exception):
    """Error for bytes that could not be fetched. The file itself may be correct."""


@contextmanager
def raise_fetch_errors() -> Iterator[None]:
    """Raise FetchError for bytes that cannot be fetched. Errors about fetched bytes stay MalformedError."""
    try:
        yield
    except MalformedError:
        raise
    except UnreadableError as error:
        raise FetchError(str(error)) from error


class Region(ByteSource):
    """Part of an open file, or inflated bytes, read like a file. `base` is the part's offset, None if inflated."""

    __slots__ = ("_data", "_source", "base", "span")

    def __init__(self, source: ByteSource, offset: int, length: int, data: bytes | None = None) -> None:
        self.path = source.path
        self.size = length if data is None else len(data)
        self.reads_are_requests = source.reads_are_requests and data is None
        self._source, self._data, self.span = source, data, Place(source.path, offset, length)
        self.base = offset if data is None else None
        self.head = self.read(0, min(REGION_HEAD_BYTES, self.size))

    def prefetch(self, extents: Iterable[Extent]) -> None:
        if self._data is None:
            with raise_fetch_errors():
                self._source.prefetch(Extent(self.span.offset + extent.offset, extent.length) for extent in extents)

    def read_cached(self, offset: int, length: int) -> bytes | None:
        return self.read(offset, length) if self._data is not None or not self.reads_are_requests else None

    def close(self) -> None:
        """Do nothing: the caller that opened the file closes the file."""

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises MalformedError if the region has fewer bytes."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise MalformedError(
                f"is truncated: bytes {offset} to {offset + length} are needed, but there are only {self.size} bytes"
            )
        if self._data is not None:
            return self._data[offset : offset + length]
        with raise_fetch_errors():
            return self._source.read(self.span.offset + offset, length)

    def get_part(self, offset: int, length: int) -> Region:
        """Return a region of the `length` bytes from `offset`."""
        if self._data is not None:
            return self.with_data(self._data[offset : offset + length])
        return Region(self._source, self.span.offset + offset, length)

    def with_data(self, data: bytes) -> Region:
        """Return a region with other bytes, such as inflated bytes, at the same place in the file."""
        return Region(self._source, self.span.offset, self.span.length, data)


class PickleScan(NamedTuple):
    """Result of scanning a pickle: the scanner, and the error at which it stopped (None if it read to the end)."""

    scanner: Scanner
    error: MalformedError | None


class PickleReader:
    """Reader that scans the pickles of a file; `steps` counts the work that the file causes."""

    def __init__(self, path: str, steps: Steps) -> None:
        self._is_metadata = METADATA_NAME.fullmatch(files.get_name(path)) is not None
        self._steps = steps

    def read(self, region: Region, at: int, where: str, window: int) -> PickleScan:
        """Scan a pickle of unknown length: windows grow until the pickle fits."""
        remaining_bytes = region.size - at
        while True:
            data = region.read(at, min(window, remaining_bytes, MAX_PICKLE_BYTES))
            scan = self.scan(data, where, remaining_bytes, is_first=at == 0 and region.base == 0)
            if not isinstance(scan.error, TruncatedPickle) or len(data) == remaining_bytes:
                return scan
            if scan.error.needed_bytes > remaining_bytes:
                return scan
            if len(data) == MAX_PICKLE_BYTES:
                limit = f"more than {MAX_PICKLE_BYTES:,} bytes, the limit of statecli"
                return PickleScan(scan.scanner, OverBudget(f"{where}: the pickle has {limit}"))
            window = max(window * _WINDOW_GROWTH, SECOND_WINDOW_BYTES)

    def scan(self, data: bytes, where: str, size: int | None = None, *, is_first: bool = False) -> PickleScan:
        """Scan a pickle. `size` counts the bytes up to the end of the file. `is_first`: the pickle begins the file."""
        self._steps.take(Budget.BYTES, len(data))
        scanner, scan_error = Scanner(data, where, self._steps, size), None
        if self._is_metadata and is_first:
            scanner.budget = METADATA_BUDGET_FACTOR
        self._steps.set_unfinished(lambda: scanner.opcodes)
        try:
            scanner.run(0)
        except MalformedError as error:
            scan_error = error.with_traceback(None)  # its frames refer back to the error, and keep the graph in memory
        self._steps.set_unfinished(int)
        try:
            self._steps.take(Budget.OPCODES, scanner.opcodes // scanner.budget)
        except OutOfSteps as error:  # the names read so far are reported
            scan_error = scan_error or error
        return PickleScan(scanner, scan_error)


def begins_as_pickle(source: ByteSource) -> bool:
    """Return True if the file begins with a pickle of any protocol, followed by any bytes.

    The pickle declares its protocol, calls an imported name, reaches STOP after an import, exhausts memory or time, or
    ends with the file. A pickle with the value of torch.save's magic number counts too. Raises UnreadableError if bytes
    could not be fetched.
    """
    if source.head[:1] == b"\x80":
        return source.head[1:2] <= b"\x05" and source.size > 2
    if source.head.startswith(_ZIP_START):
        return False
    file_region = Region(source, 0, source.size)
    try:
        scanner, scan_error = PickleReader(source.path, Steps()).read(file_region, 0, "the file", FIRST_WINDOW_BYTES)
    except FetchError as error:
        raise UnreadableError(str(error)) from error
    if not is_harmless(scanner, scan_error, AdjacentFiles(source.path)):
        return True
    if scan_error or scanner.globals:
        return False
    if is_magic_number(scanner):
        return True
    return scanner.end == source.size or bool(scanner.find_bombs(source.size))


def is_cut_off(region: Region) -> bool:
    """Return True if the bytes end inside their first pickle. The missing rest may import something."""
    _, scan_error = PickleReader(region.path, Steps()).read(region, 0, "the file", FIRST_WINDOW_BYTES)
    return isinstance(scan_error, TruncatedPickle)


def is_magic_number(scanner: Scanner) -> bool:
    """Return True if the pickle is the magic number that begins a legacy file of torch.save."""
    return type(scanner.root) is int and scanner.root == LEGACY_MAGIC_NUMBER


def may_equal_magic_number(scanner: Scanner) -> bool:
    """Return True if torch.load may take the pickle for its magic number: objects can define the result of `!=`.

    `Decimal(119547037146038801333356)` is equal, and any result of a call except a dict may be equal.
    """
    if not isinstance(scanner.root, Obj):
        return is_magic_number(scanner)
    callee = scanner.root.cls
    return not (isinstance(callee, Global) and callee.qualified in _DICT_CLASSES)


_DICT_CLASSES = frozenset(["collections.OrderedDict", "collections.defaultdict", "collections.Counter"])


def is_harmless(
    scanner: Scanner, scan_error: MalformedError | None, adjacent_files: AdjacentFiles, *, is_storage: bool = False
) -> bool:
    """Return True if data that begins like a pickle is harmless text or numbers, with no import and no call.

    An import runs even if the data breaks off after it, with any name: `torch.ops` has an attribute for any text. Only
    text without calls is harmless, because a list of packages begins like an import (`click`). Even such text is not
    harmless if Python may import a file next to it. `is_storage`: no loader unpickles the bytes.
    """
    # Unpicklers read other opcodes from a damaged frame. Random bytes may begin with FRAME, but a frame longer than the
    # file is not ambiguous: the C unpickler raises there, and the scanner reads on like `pickle._Unpickler`.
    act_count = scanner.call_count or scanner.change_count
    # An extension code of copyreg imports only names that the loader registered, and a msgpack file begins with such a
    # code. Random bytes may seem to call the name, up to their first error, but picklers write the protocol before it.
    counts_codes = act_count and (scan_error is None or scanner.data[:1] == b"\x80")
    names = [name for name in scanner.globals.values() if counts_codes or not name.name.startswith(EXTENSION_REGISTRY)]
    is_computed = isinstance(scan_error, ComputedName) and (names or scanner.persistent)
    is_ambiguous = (scan_error is not None and scanner.has_frames) or is_computed
    if isinstance(scan_error, OverBudget) or (is_ambiguous and not is_storage):
        return False
    has_plain_name = any(_PLAIN_NAME.match(name.module) and _PLAIN_NAME.match(name.name) for name in names)
    if is_storage:
        return not (has_plain_name and (scan_error is None or scanner.data[:1] == b"\x80" or act_count))
    if not names or act_count:
        return not names
    if _TEXT.fullmatch(scanner.data):
        is_pickle = has_plain_name and scan_error is None
    else:
        is_pickle = scan_error is None or any(_IMPORTABLE_NAME.match(name.module) for name in names)
    return not (is_pickle or adjacent_files.has_import(names))
