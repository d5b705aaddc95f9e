"""The bytes of one storage, wherever they lie: in one range of a file, compressed, or in pieces of several files.

Where a file is, on disk or behind a URL, is no matter here.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from statecli.core.errors import ChecksumMismatch, MalformedError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.state import Box, ByteRange, TensorData
from statecli.storage import files, session
from statecli.storage.files import File
from statecli.values.elements import Array, element
from statecli.values.ggml_blocks import numbers, quantized, why_no_numbers

_Task = TypeVar("_Task")

#: Bytes read at once to pick elements from, and how far apart these may lie before each is read by itself.
WINDOW = 1 << 20
GAP = 16 << 10


class _RemoteFacts:
    """What reading remote files has shown during this command, because asking again would take requests.

    Attributes:
        tensors: The tensor that each archive of one tensor holds.
        crc32: CRC-32 of inflated bytes, by path and offset.
    """

    def __init__(self) -> None:
        self.tensors: dict[ByteRange, TensorData] = {}
        self.crc32: dict[tuple[str, int], int] = {}


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# --- files ---------------------------------------------------------------------------------------------------------


def _cut_short(where: ByteRange, what: str, size: int) -> MalformedError:
    return MalformedError(
        f"{where.path}: {what}: ends at byte {where.offset + where.length}, the file has {size} bytes: "
        "it was cut short, or changed while it was read; copy it again"
    )


def opened_file(path: str) -> File:
    """The file, open. Raises `UnreadableError` for what is not there any more, or no regular file."""
    try:
        return files.open_file(path)
    except UnreadableError as why:
        raise type(why)(f"{path}: {why}") from why


def fill(into: Array, file: File, offset: int, where: ByteRange, what: str) -> None:
    """The bytes from `offset` on, as many as `into` has; `where` is the range that they are part of.

    Raises `MalformedError` where the file ends before.
    """
    memory, got = into.data, 0
    while got < into.size:
        try:
            more = file.fill(offset + got, memory[got:], where.offset + where.length - offset - got)
        except UnreadableError as why:
            raise type(why)(f"{where.path}: {what}: {why}") from why
        if not more:
            raise _cut_short(where, what, file.measure())
        got += more


def places(*things: ByteRange | TensorData) -> Iterator[tuple[str, int, int]]:
    """Where (path, offset, length) bytes lie that will be read one after another, all of them and each once.

    What is read in another order, or who knows where, has no place.
    """
    for one in things:
        where = one.storage if isinstance(one, TensorData) else one
        if where.boxes is not None:
            whole = where.boxes.shape
            yield from places(*(box.data for box in where.boxes.boxes if is_run(box.data.shape, whole)))
        elif isinstance(one, TensorData) and not (one.inline is None and _is_in_order(one)):
            continue
        elif is_archive(where):
            with suppress(UnreadableError):  # whoever reads it meets the same, and says so
                found = located(where, "storage")
                yield found.path, found.offset, found.length
        elif where.packing is not None:
            yield where.path, where.offset, where.packing.length
        elif isinstance(one, TensorData) and (size := width(one.dtype)):
            yield where.path, where.offset + one.offset * size, prod(one.shape) * size
        else:
            yield where.path, where.offset, where.length


@contextmanager
def reading(*things: ByteRange | TensorData) -> Iterator[None]:
    """Around reading these, one after another: what they need of what is remote is fetched together."""
    far = [
        one for one in things if files.reads_are_requests((one.storage if isinstance(one, TensorData) else one).path)
    ]
    with looking_up(*far), files.expect_values(list(places(*far))):
        yield


def in_file_order(tasks: list[_Task], sides_of: Callable[[_Task], Iterable[ByteRange | TensorData]]) -> list[_Task]:
    """Of what is remote, tasks whose bytes are neighbours behind one another, so that few requests fetch them."""
    if not files.is_anything_remote():
        return tasks

    def place(task: _Task) -> tuple[str, int]:
        where = next(
            ((one.storage, one.offset) if isinstance(one, TensorData) else (one, 0) for one in sides_of(task)), None
        )
        return ("", 0) if where is None else (where[0].path, where[0].offset + where[1])

    return sorted(tasks, key=place)


#: Bytes at each end of an archive of one tensor that say where it lies.
ENDS = 1 << 10


@contextmanager
def looking_up(*things: ByteRange | TensorData) -> Iterator[None]:
    """Around asking the remote archives that hold these where in them they lie."""
    ends: dict[str, list[tuple[int, int]]] = {}
    for where in _archives(things):
        assert where.packing is not None  # noqa: S101 - it is an archive
        last = where.offset + max(0, where.packing.length - ENDS)
        ends.setdefault(where.path, []).extend(((where.offset, ENDS), (last, ENDS)))
    with files.prefetch_ranges(ends):
        yield


def _archives(things: Iterable[ByteRange | TensorData]) -> Iterator[ByteRange]:
    for one in things:
        where = one.storage if isinstance(one, TensorData) else one
        if where.boxes is not None:
            yield from _archives(box.data for box in where.boxes.boxes)
        elif (
            is_archive(where)
            and files.reads_are_requests(where.path)
            and where not in session.for_command(_RemoteFacts).tensors
        ):
            yield where


def _is_in_order(data: TensorData) -> bool:
    return data.strides is None or tuple(data.strides) == contiguous_strides(data.shape)


def is_run(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a box of an array is one run of its elements: full along all axes behind the first that is not 1."""
    axis = next((n for n, size in enumerate(shape) if size != 1), len(shape))
    return shape[axis + 1 :] == whole[axis + 1 :]


def width(dtype: str) -> int:
    """Bytes of an element; 0 where several share them, or it is not known."""
    kind = element(dtype)
    return kind.size if kind and kind.values == 1 else 0


# --- what is read ----------------------------------------------------------------------------------------------------


class Range:
    """The bytes of one range of an open file."""

    def __init__(self, where: ByteRange, what: str, file: File) -> None:
        self.size = where.length
        self._where, self._what, self._file = where, what, file

    def read(self, at: int, into: Array) -> None:
        """The bytes from `at` on, as many as `into`, contiguous, has. Raises `MalformedError` where the file ends."""
        fill(into.reshape(-1).view(np.uint8), self._file, self._where.offset + at, self._where, self._what)

    def gather(self, at: int, into: Array, strides: Sequence[int]) -> None:
        """Elements `strides` bytes apart, the first of them at `at`. The axes of `into` have descending strides."""
        if into.flags.c_contiguous and tuple(strides) == into.strides:
            self.read(at, into)
            return
        reach = into.itemsize + sum((size - 1) * step for size, step in zip(into.shape, strides, strict=True))
        if reach <= WINDOW and strides[0] <= GAP:
            window = np.empty(reach, np.uint8)
            self.read(at, window)
            np.copyto(into, np.ndarray(into.shape, into.dtype, window.data, 0, tuple(strides)))
            return
        rows = WINDOW // strides[0] if strides[0] <= GAP else 1
        for start in range(0, len(into), rows) if 1 < rows < len(into) else ():
            self.gather(at + start * strides[0], into[start : start + rows], strides)
        for row in range(len(into)) if not 1 < rows < len(into) else ():
            self.gather(at + row * strides[0], into[row, ...], strides[1:])


class Inflated(Range):
    """The bytes that one range of a file inflates to (RFC 1951). Going back begins again from the start.

    Of what is remote the CRC-32 of all of them is remembered, so that a checksum over them needs no other journey.
    """

    def __init__(self, where: ByteRange, what: str, file: File) -> None:
        super().__init__(where, what, file)
        assert where.packing is not None  # noqa: S101 - narrows the type
        self._end = where.offset + where.packing.length
        self._keeps_crc = files.reads_are_requests(where.path)
        self._rewind()

    def _rewind(self) -> None:
        self._packed, self._at, self._crc = self._where.offset, 0, 0
        self._stream = zlib.decompressobj(-zlib.MAX_WBITS)

    def read(self, at: int, into: Array) -> None:
        """As `Range.read`. Raises `MalformedError` for what does not inflate to as many bytes as its container says."""
        if at < self._at:
            self._rewind()
        while self._at < at:
            self._more(min(at - self._at, WINDOW))
        flat, done = into.reshape(-1).view(np.uint8), 0
        while done < flat.size:
            block = self._more(min(flat.size - done, WINDOW))
            flat[done : done + len(block)] = np.frombuffer(block, np.uint8)
            done += len(block)
        if self._at == self.size and not self._is_over():
            raise self._wrong(f"more than {self.size}")
        if self._at == self.size and self._keeps_crc:
            session.for_command(_RemoteFacts).crc32[self._where.path, self._where.offset] = self._crc

    def _is_over(self) -> bool:
        """Whether nothing more comes of it; the last block's end may be left to read."""
        return self._stream.eof or not self._inflate(1)

    def _more(self, limit: int) -> bytes:
        block = self._inflate(limit)
        if not block:
            raise self._wrong(str(self._at))
        self._at += len(block)
        if self._keeps_crc:
            self._crc = zlib.crc32(block, self._crc)
        return block

    def _inflate(self, limit: int) -> bytes:
        try:
            while not self._stream.eof:
                held = self._stream.unconsumed_tail or self._next()
                block = self._stream.decompress(held, limit)
                if block or not (held or self._stream.unconsumed_tail):
                    return block
        except zlib.error as why:
            raise MalformedError(f"{self._where.path}: {self._what}: does not inflate: it is damaged: {why}") from why
        return b""

    def _next(self) -> bytes:
        held = np.empty(min(WINDOW // 4, self._end - self._packed), np.uint8)
        fill(held, self._file, self._packed, self._where, self._what)
        self._packed += held.size
        return held.tobytes()

    def _wrong(self, found: str) -> MalformedError:
        return MalformedError(
            f"{self._where.path}: {self._what}: inflates to {found} bytes, its archive says {self.size}: it is damaged"
        )


#: Bytes of values that are made at a time of what is quantized, and in a row of them.
VALUES = 256 << 10


class Dequantized(Range):
    """The float32 values of a storage that is quantized in its file, as its bytes."""

    def __init__(self, where: ByteRange, what: str, file: File) -> None:
        super().__init__(where, what, file)
        name = quantized(where) or ""
        why = why_no_numbers(name)
        if why is not None:
            raise UnreadableError(f"{where.path}: {what}: {why}")
        self._name = name
        values, self._stored = BLOCK_SIZES[name]
        self._block = values * 4

    def read(self, at: int, into: Array) -> None:
        """As `Range.read`."""
        flat, done = into.reshape(-1).view(np.uint8), 0
        while done < flat.size:
            first, skip = divmod(at + done, self._block)
            blocks = -(-min(skip + flat.size - done, VALUES) // self._block)
            part = self._values(first, blocks)[skip : skip + flat.size - done]
            flat[done : done + part.size] = part
            done += part.size

    def _values(self, first: int, count: int) -> Array:
        packed = np.empty(count * self._stored, np.uint8)
        fill(packed, self._file, self._where.offset + first * self._stored, self._where, self._what)
        return numbers(packed, self._name).view(np.uint8)


#: Files that are open at once of a storage in many of them.
MAX_OPEN = 32


class Assembled(Range):
    """The bytes of a storage that lies in boxes, as if it were one."""

    def __init__(self, where: ByteRange, what: str, stack: ExitStack) -> None:
        assert where.boxes is not None  # noqa: S101 - narrows the type
        self.size = where.length
        self._where, self._what, self._stack = where, what, stack
        self._shape = (*where.boxes.shape, where.boxes.itemsize)
        self._strides = contiguous_strides(self._shape)
        self._pieces = sorted(
            (self._piece(box) for box in where.boxes.boxes if 0 not in box.data.shape), key=lambda piece: piece.at
        )
        #: The furthest byte that any piece up to this one reaches.
        self._reach = list(accumulate((piece.stop for piece in self._pieces), max))
        self._open: dict[int, tuple[Range, TensorData]] = {}

    def _piece(self, box: Box) -> _Piece:
        start, shape = (*box.start, 0), (*box.data.shape, self._shape[-1])
        last = tuple(at + size - 1 for at, size in zip(start, shape, strict=True))
        return _Piece(_dot(start, self._strides), _dot(last, self._strides) + 1, start, shape, box.data)

    def read(self, at: int, into: Array) -> None:
        """As `Range.read`. Raises whatever opening and reading a box raises."""
        flat, done = into.reshape(-1).view(np.uint8), 0
        for start, shape in _flat_boxes(at, at + flat.size, self._shape, self._strides):
            size = prod(shape)
            self._fill(flat[done : done + size].reshape(shape), start)
            done += size

    def _fill(self, into: Array, start: tuple[int, ...]) -> None:
        first = _dot(start, self._strides)
        filled, n = 0, bisect_right(self._reach, first)
        while n < len(self._pieces) and self._pieces[n].at < first + into.size:
            filled += self._copy(n, into, start)
            n += 1
        if filled != into.size:
            raise MalformedError(f"{self._where.path}: {self._what}: its pieces do not hold each element once")

    def _copy(self, number: int, into: Array, start: tuple[int, ...]) -> int:
        """What the piece holds of the box from `start` on."""
        piece = self._pieces[number]
        low = tuple(map(max, start, piece.start))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, into.shape, piece.start, piece.shape, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return 0
        target = into[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, start, strict=True))]
        memory, data = self._opened(number)
        item = self._shape[-1]
        strides = [step * item for step in data.strides or contiguous_strides(data.shape)] + [1]
        within = _dot([a - at for a, at in zip(low, piece.start, strict=True)], strides)
        kept = sorted((axis for axis, size in enumerate(target.shape) if size > 1), key=lambda axis: -strides[axis])
        lined = target.transpose(*kept, *(axis for axis in range(target.ndim) if axis not in kept))
        memory.gather(
            data.offset * item + within,
            lined.reshape(lined.shape[: len(kept)]),
            [strides[axis] for axis in kept],
        )
        return target.size

    def _opened(self, number: int) -> tuple[Range, TensorData]:
        if number not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._stack.close()
                self._open.clear()
            data = resolved(self._pieces[number].data, self._what)
            self._open[number] = self._stack.enter_context(open_range(data.storage, self._what)), data
        return self._open[number]


class _Piece(NamedTuple):
    """A box in bytes: what it spans of the whole, `at` to `stop`, and where it is with an axis more for the bytes of
    an element."""

    at: int
    stop: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: TensorData


def _dot(one: Sequence[int], two: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(one, two, strict=True))


def _flat_boxes(
    at: int, stop: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements `at` to `stop` of a C-contiguous array as the fewest boxes: the start and the shape of each."""
    while at < stop:
        start, rest = [], at
        for stride in strides:
            index, rest = divmod(rest, stride)
            start.append(index)
        axis = next(n for n, stride in enumerate(strides) if at % stride == 0 and at + stride <= stop)
        count = min((stop - at) // strides[axis], shape[axis] - start[axis])
        yield tuple(start), (*(1,) * axis, count, *shape[axis + 1 :])
        at += count * strides[axis]


@contextmanager
def open_range(where: ByteRange, what: str = "storage") -> Iterator[Range]:
    """The range's bytes, unpacked and put together, to be read. `what` names it in messages.

    Raises `UnreadableError` if a file is gone or cannot be read, `MalformedError` for what does not unpack.
    """
    if where.length < 0 or where.offset < 0:
        raise MalformedError(f"{where.path}: {what}: impossible place: {where.length} bytes at byte {where.offset}")
    with ExitStack() as stack:
        if where.boxes is not None:
            yield Assembled(where, what, stack)
            return
        where = located(where, what)
        file = stack.enter_context(closing(opened_file(where.path)))
        yield _reader(where)(where, what, file)


def _reader(where: ByteRange) -> type[Range]:
    if where.packing is None:
        return Range
    return Inflated if quantized(where) is None else Dequantized


def resolved(data: TensorData, what: str) -> TensorData:
    """The same tensor at its own bytes, where `data` says no more than which archive holds it.

    Raises `MalformedError` where the archive holds another one.
    """
    if not is_archive(data.storage):
        return data
    found = _single(data.storage, what)
    if (found.dtype, found.shape) != (data.dtype, data.shape):
        raise MalformedError(
            f"{data.storage.path}: {what}: is said to be {data.dtype} {list(data.shape)}, the archive at byte "
            f"{data.storage.offset} holds {found.dtype} {list(found.shape)}"
        )
    return found


#: `Packing.how` of an archive of torch.save that holds one tensor.
ARCHIVE = "torch-zip"


def located(where: ByteRange, what: str) -> ByteRange:
    """The storage itself, where `where` says no more than which archive holds it. Raises as opening that does."""
    return _single(where, what).storage if is_archive(where) else where


def is_archive(where: ByteRange) -> bool:
    """Whether it says no more than which archive of torch.save holds a tensor."""
    return where.packing is not None and where.packing.how == ARCHIVE


def _single(where: ByteRange, what: str) -> TensorData:
    from statecli.formats import torch_zip

    assert where.packing is not None  # noqa: S101 - narrows the type
    known = session.for_command(_RemoteFacts).tensors if files.reads_are_requests(where.path) else {}
    try:
        if where not in known:
            known[where] = torch_zip.read_single(where.path, where.offset, where.packing.length)
        return known[where]
    except UnreadableError as why:
        raise type(why)(f"{where.path}: {what}: the archive at byte {where.offset}: {why}") from why


def _known_crc(where: ByteRange) -> int | None:
    """That of what is remote and was read to its end."""
    if where.packing is None or not files.reads_are_requests(where.path):
        return files.find_crc32(where.path, where.offset, where.length)
    return session.for_command(_RemoteFacts).crc32.get((where.path, where.offset))


def _crc(where: ByteRange, what: str) -> int:
    found, block = 0, np.empty(min(WINDOW, where.length), np.uint8)
    with open_range(where, what) as source:
        for at in range(0, where.length, WINDOW):
            part = block[: where.length - at]
            source.read(at, part)
            found = zlib.crc32(part.data, found)
    return found


def check_crc(where: ByteRange, what: str = "storage") -> None:
    """Compares the range's bytes with the CRC-32 its container recorded; does nothing where it recorded none.

    Raises `ChecksumMismatch` where they disagree.
    """
    where = located(where, what)
    if where.crc32 is None:
        return
    known = _known_crc(where)
    found = _crc(where, what) if known is None else known
    if found != where.crc32:
        error = ChecksumMismatch(
            f"{where.path}: {what}: checksum wrong: recorded 0x{where.crc32:08x}, bytes give 0x{found:08x}; "
            "the file is damaged: copy it again"
        )
        error.place = where.place
        raise error
