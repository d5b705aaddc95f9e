"""Read the bytes of a storage: in one range of a file, compressed, quantized, or in pieces of several files.

Local and remote files are read alike.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import ChecksumMismatch, MalformedError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import Box, ByteRange, TensorData, TensorInfo
from statecli.formats import torch_zip
from statecli.storage import files, lifetime
from statecli.storage.files import File
from statecli.values.elements import Array, find_element
from statecli.values.ggml_blocks import dequantize_blocks, explain_unreadable_blocks, find_ggml_type
from statecli.values.open_files import borrow_file, keep_files_open

_Task = TypeVar("_Task")

#: Bytes read at once to pick elements from.
WINDOW_BYTES = 1 << 20
#: Elements that are further apart, in bytes, are read one by one.
MAX_GAP_BYTES = 16 << 10


class _RemoteFacts:
    """Facts from reading remote files during this command, because asking again would take requests.

    Attributes:
        tensors: The tensor of each archive with a single tensor.
        crc32: CRC-32 of inflated bytes, by path and offset.
    """

    def __init__(self) -> None:
        self.tensors: dict[ByteRange, TensorData] = {}
        self.crc32: dict[tuple[str, int], int] = {}


# --- files ---------------------------------------------------------------------------------------------------------


def fill_buffer(buffer: Array, file: File, offset: int, where: ByteRange, name: str) -> None:
    """Read bytes from `offset` on until `buffer` is full; `where` is the range of the bytes.

    Raises `MalformedError` if the file ends before.
    """
    memory, filled = buffer.data, 0
    while filled < buffer.size:
        try:
            count = file.fill(offset + filled, memory[filled:], where.offset + where.length - offset - filled)
        except UnreadableError as error:
            raise type(error)(f"{where.path}: {name}: {error}") from error
        if not count:
            raise MalformedError(
                f"{where.path}: {name}: ends at byte {where.offset + where.length}, but the file has {file.measure()} "
                "bytes: it is truncated, or changed while statecli read it; copy the file again"
            )
        filled += count


def iter_paths(*parts: TensorData) -> Iterator[str]:
    """Yield the path of each file with bytes of these tensors."""
    for data in parts:
        for where in TensorInfo("", "", (), 0, 0, data=data).ranges:
            if where.path:
                yield where.path


def iter_places(*sources: ByteRange | TensorData) -> Iterator[tuple[str, int, int]]:
    """Yield (path, offset, length) of the bytes to be read in order, each once.

    Bytes read in another order, or at an unknown place, are left out.
    """
    for source in sources:
        where = _storage_of(source)
        if where.boxes is not None:
            whole = where.boxes.shape
            yield from iter_places(*(box.data for box in where.boxes.boxes if is_run(box.data.shape, whole)))
        elif isinstance(source, TensorData) and (
            source.inline is not None or source.strides not in (None, contiguous_strides(source.shape))
        ):
            continue
        elif where.is_archive:
            with suppress(UnreadableError):  # reading it raises the same error later
                storage = locate_storage(where, "storage")
                yield storage.path, storage.offset, storage.length
        elif where.packing is not None:
            yield where.path, where.offset, where.packing.length
        elif isinstance(source, TensorData) and (size := element_width(source.dtype)):
            yield where.path, where.offset + source.offset * size, prod(source.shape) * size
        else:
            yield where.path, where.offset, where.length


@contextmanager
def prefetch(*sources: ByteRange | TensorData) -> Iterator[None]:
    """Fetch the remote bytes of these sources together while the block reads in order; open each local file once."""
    remote = [source for source in sources if files.reads_are_requests(_storage_of(source).path)]
    with keep_files_open(), prefetch_archive_ends(*remote), files.expect_values(list(iter_places(*remote))):
        yield


def sort_by_place(tasks: list[_Task], sides_of: Callable[[_Task], Iterable[ByteRange | TensorData]]) -> list[_Task]:
    """Return remote tasks in the order of their bytes, so that few requests suffice; local tasks unchanged."""
    if not files.is_anything_remote():
        return tasks

    def place(task: _Task) -> tuple[str, int]:
        where = next(
            ((side.storage, side.offset) if isinstance(side, TensorData) else (side, 0) for side in sides_of(task)),
            None,
        )
        return ("", 0) if where is None else (where[0].path, where[0].offset + where[1])

    return sorted(tasks, key=place)


#: Bytes at each end of an archive of one tensor that say where the tensor is.
ARCHIVE_END_BYTES = 1 << 10


@contextmanager
def prefetch_archive_ends(*sources: ByteRange | TensorData) -> Iterator[None]:
    """Fetch the ends of the remote archives of these sources together while the block locates storages there."""
    ends: dict[str, list[tuple[int, int]]] = {}
    for where in _iter_remote_archives(sources):
        assert where.packing is not None  # noqa: S101 - it is an archive
        last = where.offset + max(0, where.packing.length - ARCHIVE_END_BYTES)
        ends.setdefault(where.path, []).extend(((where.offset, ARCHIVE_END_BYTES), (last, ARCHIVE_END_BYTES)))
    with files.prefetch_ranges(ends):
        yield


def _storage_of(source: ByteRange | TensorData) -> ByteRange:
    return source.storage if isinstance(source, TensorData) else source


def _iter_remote_archives(sources: Iterable[ByteRange | TensorData]) -> Iterator[ByteRange]:
    for source in sources:
        where = _storage_of(source)
        if where.boxes is not None:
            yield from _iter_remote_archives(box.data for box in where.boxes.boxes)
        elif (
            where.is_archive
            and files.reads_are_requests(where.path)
            and where not in lifetime.for_command(_RemoteFacts).tensors
        ):
            yield where


def is_run(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return True if a box of an array is a run of elements: full along all axes after the first longer than 1."""
    axis = next((n for n, size in enumerate(shape) if size != 1), len(shape))
    return shape[axis + 1 :] == whole[axis + 1 :]


def element_width(dtype: str) -> int:
    """Return the bytes of an element; 0 if several share a byte or the type is unknown."""
    element = find_element(dtype)
    return element.size if element and element.values == 1 else 0


# --- readers ---------------------------------------------------------------------------------------------------------


class Range:
    """The bytes of a range of an open file. `what` names the tensor in messages."""

    def __init__(self, where: ByteRange, what: str, file: File) -> None:
        self.size = where.length
        self._where, self._what, self._file = where, what, file

    def read(self, at: int, into: Array) -> None:
        """Fill `into`, a contiguous array, with the bytes from `at` on.

        Raises `MalformedError` if the file ends before.
        """
        fill_buffer(into.reshape(-1).view(np.uint8), self._file, self._where.offset + at, self._where, self._what)

    def gather(self, at: int, into: Array, strides: Sequence[int]) -> None:
        """Fill `into` with elements `strides` bytes apart, the first at `at`.

        Strides descend along the axes.
        """
        if into.flags.c_contiguous and tuple(strides) == into.strides:
            self.read(at, into)
            return
        reach = into.itemsize + sum((size - 1) * step for size, step in zip(into.shape, strides, strict=True))
        if reach <= WINDOW_BYTES and strides[0] <= MAX_GAP_BYTES:
            window = np.empty(reach, np.uint8)
            self.read(at, window)
            np.copyto(into, np.ndarray(into.shape, into.dtype, window.data, 0, tuple(strides)))
            return
        rows = WINDOW_BYTES // strides[0] if strides[0] <= MAX_GAP_BYTES else 1
        for start in range(0, len(into), rows) if 1 < rows < len(into) else ():
            self.gather(at + start * strides[0], into[start : start + rows], strides)
        for row in range(len(into)) if not 1 < rows < len(into) else ():
            self.gather(at + row * strides[0], into[row, ...], strides[1:])


class Inflated(Range):
    """Inflated bytes of a range of a file (RFC 1951). Reading backwards begins again from the start.

    The CRC-32 of a remote range is remembered, so that a checksum over the range needs no further request.
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
        """See `Range.read`.

        Raises `MalformedError` if the range does not inflate to the size recorded by its container.
        """
        if at < self._at:
            self._rewind()
        while self._at < at:
            self._read_next(min(at - self._at, WINDOW_BYTES))
        flat, done = into.reshape(-1).view(np.uint8), 0
        while done < flat.size:
            block = self._read_next(min(flat.size - done, WINDOW_BYTES))
            flat[done : done + len(block)] = np.frombuffer(block, np.uint8)
            done += len(block)
        if self._at == self.size and not self._is_at_end():
            raise self._length_error(f"more than {self.size}")
        if self._at == self.size and self._keeps_crc:
            lifetime.for_command(_RemoteFacts).crc32[self._where.path, self._where.offset] = self._crc

    def _is_at_end(self) -> bool:
        """Return True if nothing more is inflated; the end of the last block may still be unread."""
        return self._stream.eof or not self._inflate(1)

    def _read_next(self, limit: int) -> bytes:
        block = self._inflate(limit)
        if not block:
            raise self._length_error(str(self._at))
        self._at += len(block)
        if self._keeps_crc:
            self._crc = zlib.crc32(block, self._crc)
        return block

    def _inflate(self, limit: int) -> bytes:
        try:
            while not self._stream.eof:
                packed = self._stream.unconsumed_tail or self._read_packed()
                block = self._stream.decompress(packed, limit)
                if block or not (packed or self._stream.unconsumed_tail):
                    return block
        except zlib.error as why:
            raise MalformedError(
                f"{self._where.path}: {self._what}: cannot be decompressed: the file is damaged ({why}); copy the "
                "file again"
            ) from why
        return b""

    def _read_packed(self) -> bytes:
        packed = np.empty(min(WINDOW_BYTES // 4, self._end - self._packed), np.uint8)
        fill_buffer(packed, self._file, self._packed, self._where, self._what)
        self._packed += packed.size
        return packed.tobytes()

    def _length_error(self, length: str) -> MalformedError:
        return MalformedError(
            f"{self._where.path}: {self._what}: decompresses to {length} bytes, but the archive records {self.size}: "
            "the file is damaged; copy the file again"
        )


#: Bytes of values that are dequantized at a time.
VALUES_BYTES = 256 << 10


class Dequantized(Range):
    """Float32 values of a storage quantized in its file, as bytes."""

    def __init__(self, where: ByteRange, what: str, file: File) -> None:
        super().__init__(where, what, file)
        name = find_ggml_type(where) or ""
        why = explain_unreadable_blocks(name)
        if why is not None:
            raise UnreadableError(f"{where.path}: {what}: {why}")
        self._name = name
        values, self._stored = BLOCK_SIZES[name]
        self._block = values * 4

    def read(self, at: int, into: Array) -> None:
        flat, done = into.reshape(-1).view(np.uint8), 0
        while done < flat.size:
            first, skip = divmod(at + done, self._block)
            blocks = -(-min(skip + flat.size - done, VALUES_BYTES) // self._block)
            part = self._dequantize(first, blocks)[skip : skip + flat.size - done]
            flat[done : done + part.size] = part
            done += part.size

    def _dequantize(self, first: int, count: int) -> Array:
        packed = np.empty(count * self._stored, np.uint8)
        fill_buffer(packed, self._file, self._where.offset + first * self._stored, self._where, self._what)
        return dequantize_blocks(packed, self._name).view(np.uint8)


#: Files that are open at once for a storage in many files.
MAX_OPEN_FILES = 32


class Assembled(Range):
    """Bytes of a storage in boxes of several files, as if contiguous."""

    def __init__(self, where: ByteRange, what: str, stack: ExitStack) -> None:
        assert where.boxes is not None  # noqa: S101 - narrows the type
        self.size = where.length
        self._where, self._what, self._stack = where, what, stack
        self._shape = (*where.boxes.shape, where.boxes.itemsize)
        self._strides = contiguous_strides(self._shape)
        self._pieces = sorted(
            (self._build_piece(box) for box in where.boxes.boxes if 0 not in box.data.shape), key=lambda piece: piece.at
        )
        #: For each piece the furthest byte of all pieces up to it.
        self._reach = list(accumulate((piece.stop for piece in self._pieces), max))
        self._open: dict[int, tuple[Range, TensorData]] = {}

    def _build_piece(self, box: Box) -> _Piece:
        start, shape = (*box.start, 0), (*box.data.shape, self._shape[-1])
        last = tuple(at + size - 1 for at, size in zip(start, shape, strict=True))
        return _Piece(_dot(start, self._strides), _dot(last, self._strides) + 1, start, shape, box.data)

    def read(self, at: int, into: Array) -> None:
        """See `Range.read`. Raises any error of opening and reading a box."""
        flat, done = into.reshape(-1).view(np.uint8), 0
        for start, shape in _split_into_boxes(at, at + flat.size, self._shape, self._strides):
            size = prod(shape)
            self._fill_box(flat[done : done + size].reshape(shape), start)
            done += size

    def _fill_box(self, into: Array, start: tuple[int, ...]) -> None:
        first = _dot(start, self._strides)
        filled, n = 0, bisect_right(self._reach, first)
        while n < len(self._pieces) and self._pieces[n].at < first + into.size:
            filled += self._copy_piece(n, into, start)
            n += 1
        if filled != into.size:
            fault = "overlap" if filled > into.size else "leave a gap"
            raise MalformedError(f"{self._where.path}: {self._what}: its chunks {fault}; save the checkpoint again")

    def _copy_piece(self, number: int, into: Array, start: tuple[int, ...]) -> int:
        """Copy the box's bytes of a piece from `start` on; return how many."""
        piece = self._pieces[number]
        low = tuple(map(max, start, piece.start))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, into.shape, piece.start, piece.shape, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return 0
        target = into[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, start, strict=True))]
        memory, data = self._open_piece(number)
        item = self._shape[-1]
        strides = [step * item for step in data.strides or contiguous_strides(data.shape)] + [1]
        within = _dot([a - at for a, at in zip(low, piece.start, strict=True)], strides)
        axes = sorted((axis for axis, size in enumerate(target.shape) if size > 1), key=lambda axis: -strides[axis])
        lined = target.transpose(*axes, *(axis for axis in range(target.ndim) if axis not in axes))
        memory.gather(
            data.offset * item + within,
            lined.reshape(lined.shape[: len(axes)]),
            [strides[axis] for axis in axes],
        )
        return target.size

    def _open_piece(self, number: int) -> tuple[Range, TensorData]:
        if number not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self._stack.close()
                self._open.clear()
            data = resolve_data(self._pieces[number].data, self._what)
            self._open[number] = self._stack.enter_context(open_range(data.storage, self._what)), data
        return self._open[number]


class _Piece(NamedTuple):
    """A box in bytes: its span `at` to `stop`, and its place with an additional axis for the bytes of an element."""

    at: int
    stop: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: TensorData


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _split_into_boxes(
    at: int, stop: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield elements `at` to `stop` of a C-contiguous array as the fewest boxes: the start and the shape of each."""
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
    """Open the range's bytes, unpacked and assembled, for reading. `what` names the storage in messages.

    Raises `UnreadableError` if a file is missing or unreadable, `MalformedError` if unpacking fails.
    """
    if where.length < 0 or where.offset < 0:
        raise MalformedError(
            f"{where.path}: {what}: offset {where.offset} or length {where.length} is negative; the file is damaged: "
            "copy the file again"
        )
    with ExitStack() as stack:
        if where.boxes is not None:
            yield Assembled(where, what, stack)
            return
        where = locate_storage(where, what)
        file = stack.enter_context(borrow_file(where.path))
        yield _reader_class(where)(where, what, file)


def _reader_class(where: ByteRange) -> type[Range]:
    if where.packing is None:
        return Range
    return Inflated if find_ggml_type(where) is None else Dequantized


def resolve_data(data: TensorData, name: str) -> TensorData:
    """Return the tensor at its own bytes, if `data` names only their archive.

    Raises `MalformedError` if the archive has another tensor.
    """
    if not data.storage.is_archive:
        return data
    tensor = _read_archive(data.storage, name)
    if (tensor.dtype, tensor.shape) != (data.dtype, data.shape):
        raise MalformedError(
            f"{data.storage.path}: {name}: the index records {data.dtype} {list(data.shape)}, but the array at byte "
            f"{data.storage.offset} holds {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor


def locate_storage(where: ByteRange, what: str) -> ByteRange:
    """Return the storage itself, if `where` names only its archive. Raises as opening the archive does."""
    return _read_archive(where, what).storage if where.is_archive else where


def _read_archive(where: ByteRange, name: str) -> TensorData:
    assert where.packing is not None  # noqa: S101 - narrows the type
    cache = lifetime.for_command(_RemoteFacts).tensors if files.reads_are_requests(where.path) else {}
    try:
        if where not in cache:
            cache[where] = torch_zip.read_single(where.path, where.offset, where.packing.length)
        return cache[where]
    except UnreadableError as error:
        message = f"{where.path}: {name}: the archive at byte {where.offset}: {error}"
        if isinstance(error, ChecksumMismatch):
            raise ChecksumMismatch(message, difference=error.difference) from error
        raise type(error)(message) from error


def _cached_crc(where: ByteRange) -> int | None:
    """Return the CRC-32 of a range, if known without reading all bytes again."""
    if where.packing is None or not files.reads_are_requests(where.path):
        return files.find_crc32(where.path, where.offset, where.length)
    return lifetime.for_command(_RemoteFacts).crc32.get((where.path, where.offset))


def read_chunks(where: ByteRange, name: str, size: int) -> Iterator[tuple[int, Array]]:
    """Yield the bytes of a storage with the position of the first, each chunk valid until the next."""
    buffer = np.empty(min(size, where.length), np.uint8)
    with open_range(where, name) as source:
        for start in range(0, where.length, size):
            chunk = buffer[: where.length - start]
            source.read(start, chunk)
            yield start, chunk


def check_crc(where: ByteRange, name: str = "storage") -> None:
    """Compare the range's bytes with the CRC-32 recorded by its container, if any.

    Raises `ChecksumMismatch` if the checksums differ.
    """
    where = locate_storage(where, name)
    if where.crc32 is None:
        return
    computed = _cached_crc(where)
    if computed is None:
        computed = 0
        for _, chunk in read_chunks(where, name, WINDOW_BYTES):
            computed = zlib.crc32(chunk.data, computed)
    if computed != where.crc32:
        difference = f"recorded 0x{where.crc32:08x}, computed 0x{computed:08x}"
        raise ChecksumMismatch(
            f"{where.path}: {name}: checksum wrong: {difference}; the file is damaged: copy the file again",
            difference=difference,
            place=where.place,
        )
