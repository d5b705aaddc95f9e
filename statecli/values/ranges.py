"""Read the bytes of a storage, which may be plain, compressed, quantized, or split into several files.

Local and remote files are read in the same way.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from math import prod
from typing import TypeVar

import msgspec
import numpy as np

from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import ChecksumMismatch, MalformedError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import Box, ByteRange, Place, TensorData, TensorInfo
from statecli.formats import torch_zip
from statecli.storage import files, lifetime
from statecli.storage.files import File
from statecli.storage.store import Extent
from statecli.values.elements import Array, find_element
from statecli.values.ggml_blocks import dequantize_blocks, explain_unreadable_blocks, find_ggml_type
from statecli.values.open_files import borrow_file, keep_files_open

_Task = TypeVar("_Task")

#: Number of bytes read at once when only some of the elements are needed.
WINDOW_BYTES = 1 << 20
#: Elements that are further apart than this number of bytes are read one by one.
MAX_GAP_BYTES = 16 << 10


class _RemoteFacts:
    """Facts about remote files, kept while the command runs, because reading them again would cost requests.

    Attributes:
        tensors: The tensor of each archive with a single tensor.
        crc32: CRC-32 of inflated bytes, by path and offset.
    """

    def __init__(self) -> None:
        self.tensors: dict[ByteRange, TensorData] = {}
        self.crc32: dict[tuple[str, int], int] = {}


# --- files ---------------------------------------------------------------------------------------------------------


def fill_buffer(buffer: Array, file: File, offset: int, byte_range: ByteRange, name: str) -> None:
    """Fill `buffer` with bytes of the storage `byte_range`. The first byte is at `offset` in the file.

    Raises `MalformedError` if the file ends too early.
    """
    memory, filled = buffer.data, 0
    while filled < buffer.size:
        try:
            count = file.fill(offset + filled, memory[filled:], byte_range.offset + byte_range.length - offset - filled)
        except UnreadableError as error:
            raise type(error)(f"{byte_range.path}: {name}: {error}") from error
        if not count:
            raise MalformedError(
                f"{byte_range.path}: {name}: ends at byte {byte_range.offset + byte_range.length}, but the file has "
                f"{file.measure()} bytes: it is truncated, or changed while statecli read it; copy the file again"
            )
        filled += count


def iter_paths(*parts: TensorData) -> Iterator[str]:
    """Yield the path of each file with bytes of these tensors."""
    for data in parts:
        for byte_range in TensorInfo("", "", (), 0, 0, data=data).ranges:
            if byte_range.path:
                yield byte_range.path


def iter_places(*sources: ByteRange | TensorData) -> Iterator[Place]:
    """Yield the location in a file of each source that is read in a single pass from its beginning to its end.

    Bytes that are read in another order, or whose location is unknown, are left out.
    """
    for source in sources:
        byte_range = _storage_of(source)
        if byte_range.boxes is not None:
            full_shape = byte_range.boxes.shape
            yield from iter_places(*(box.data for box in byte_range.boxes.boxes if is_run(box.data.shape, full_shape)))
        elif isinstance(source, TensorData) and (
            source.inline is not None or source.strides not in (None, contiguous_strides(source.shape))
        ):
            continue
        elif byte_range.is_archive:
            with suppress(UnreadableError):  # the later read raises the same error
                storage = locate_storage(byte_range, "storage")
                yield Place(storage.path, storage.offset, storage.length)
        elif byte_range.packing is not None:
            yield Place(byte_range.path, byte_range.offset, byte_range.packing.length)
        elif isinstance(source, TensorData) and (size := get_element_width(source.dtype)):
            yield Place(byte_range.path, byte_range.offset + source.offset * size, prod(source.shape) * size)
        else:
            yield Place(byte_range.path, byte_range.offset, byte_range.length)


@contextmanager
def prefetch(*sources: ByteRange | TensorData) -> Iterator[None]:
    """Fetch all remote bytes together before the block reads them in order. Open each local file only once."""
    remote = [source for source in sources if files.reads_are_requests(_storage_of(source).path)]
    with keep_files_open(), prefetch_archive_ends(*remote), files.expect_values(list(iter_places(*remote))):
        yield


def sort_by_place(tasks: list[_Task], sides_of: Callable[[_Task], Iterable[ByteRange | TensorData]]) -> list[_Task]:
    """Sort tasks by the location of their bytes if any file is remote, to save requests. Otherwise keep the order."""
    if not files.is_anything_remote():
        return tasks

    def place(task: _Task) -> tuple[str, int]:
        first_place = next(
            ((side.storage, side.offset) if isinstance(side, TensorData) else (side, 0) for side in sides_of(task)),
            None,
        )
        return ("", 0) if first_place is None else (first_place[0].path, first_place[0].offset + first_place[1])

    return sorted(tasks, key=place)


#: Number of bytes at each end of a single-tensor archive that show where the tensor is.
ARCHIVE_END_BYTES = 1 << 10


@contextmanager
def prefetch_archive_ends(*sources: ByteRange | TensorData) -> Iterator[None]:
    """Fetch the beginning and the end of all remote archives together, because the block locates storages in them."""
    ends: dict[str, list[Extent]] = {}
    for byte_range in _iter_remote_archives(sources):
        assert byte_range.packing is not None  # noqa: S101 - it is an archive
        last = byte_range.offset + max(0, byte_range.packing.length - ARCHIVE_END_BYTES)
        starts = (byte_range.offset, last)
        ends.setdefault(byte_range.path, []).extend(Extent(start, ARCHIVE_END_BYTES) for start in starts)
    with files.prefetch_extents(ends):
        yield


def _storage_of(source: ByteRange | TensorData) -> ByteRange:
    return source.storage if isinstance(source, TensorData) else source


def _iter_remote_archives(sources: Iterable[ByteRange | TensorData]) -> Iterator[ByteRange]:
    for source in sources:
        byte_range = _storage_of(source)
        if byte_range.boxes is not None:
            yield from _iter_remote_archives(box.data for box in byte_range.boxes.boxes)
        elif (
            byte_range.is_archive
            and files.reads_are_requests(byte_range.path)
            and byte_range not in lifetime.for_command(_RemoteFacts).tensors
        ):
            yield byte_range


def is_run(shape: tuple[int, ...], full_shape: tuple[int, ...]) -> bool:
    """Return whether a part of shape `shape` is contiguous in an array of shape `full_shape`."""
    axis = next((n for n, size in enumerate(shape) if size != 1), len(shape))
    return shape[axis + 1 :] == full_shape[axis + 1 :]


def get_element_width(dtype: str) -> int:
    """Return the size of an element in bytes, or 0 if several elements share a byte or the type is unknown."""
    element = find_element(dtype)
    return element.size if element and element.values == 1 else 0


# --- readers ---------------------------------------------------------------------------------------------------------


class Range:
    """Bytes of a storage in an open file. Messages name the storage by `storage_name`."""

    def __init__(self, byte_range: ByteRange, storage_name: str, file: File) -> None:
        self.size = byte_range.length
        self._byte_range, self._storage_name, self._file = byte_range, storage_name, file

    def read(self, at: int, into: Array) -> None:
        """Fill the contiguous array `into` with the storage's bytes from position `at` on.

        Raises `MalformedError` if the file ends too early.
        """
        fill_buffer(
            into.reshape(-1).view(np.uint8),
            self._file,
            self._byte_range.offset + at,
            self._byte_range,
            self._storage_name,
        )

    def gather(self, at: int, into: Array, strides: Sequence[int]) -> None:
        """Fill `into` with strided elements. The first element is at byte `at`, and `strides` count bytes.

        Strides must descend along the axes.
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
    """Inflated bytes of a range of a file (RFC 1951). Reading backwards inflates again from the beginning.

    The CRC-32 of a remote range is cached, so that a checksum over the range needs no further request.
    """

    def __init__(self, byte_range: ByteRange, storage_name: str, file: File) -> None:
        super().__init__(byte_range, storage_name, file)
        assert byte_range.packing is not None  # noqa: S101 - narrows the type
        self._end = byte_range.offset + byte_range.packing.length
        self._keeps_crc = files.reads_are_requests(byte_range.path)
        self._rewind()

    def _rewind(self) -> None:
        self._packed, self._at, self._crc = self._byte_range.offset, 0, 0
        self._stream = zlib.decompressobj(-zlib.MAX_WBITS)

    def read(self, at: int, into: Array) -> None:
        """Fill `into` with inflated bytes, as `Range.read` does.

        Raises `MalformedError` if the range does not inflate to the size recorded by its container.
        """
        if at < self._at:
            self._rewind()
        while self._at < at:
            self._read_next(min(at - self._at, WINDOW_BYTES))
        flat, filled = into.reshape(-1).view(np.uint8), 0
        while filled < flat.size:
            block = self._read_next(min(flat.size - filled, WINDOW_BYTES))
            flat[filled : filled + len(block)] = np.frombuffer(block, np.uint8)
            filled += len(block)
        if self._at == self.size and not self._is_at_end():
            raise self._length_error(f"more than {self.size}")
        if self._at == self.size and self._keeps_crc:
            lifetime.for_command(_RemoteFacts).crc32[self._byte_range.path, self._byte_range.offset] = self._crc

    def _is_at_end(self) -> bool:
        """Return whether all bytes are inflated, by trying to inflate another byte."""
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
                packed_bytes = self._stream.unconsumed_tail or self._read_packed()
                block = self._stream.decompress(packed_bytes, limit)
                if block or not (packed_bytes or self._stream.unconsumed_tail):
                    return block
        except zlib.error as why:
            raise MalformedError(
                f"{self._byte_range.path}: {self._storage_name}: cannot be decompressed: the file is damaged ({why}); "
                "copy the file again"
            ) from why
        return b""

    def _read_packed(self) -> bytes:
        packed_bytes = np.empty(min(WINDOW_BYTES // 4, self._end - self._packed), np.uint8)
        fill_buffer(packed_bytes, self._file, self._packed, self._byte_range, self._storage_name)
        self._packed += packed_bytes.size
        return packed_bytes.tobytes()

    def _length_error(self, length: str) -> MalformedError:
        return MalformedError(
            f"{self._byte_range.path}: {self._storage_name}: decompresses to {length} bytes, but the archive records "
            f"{self.size}: the file is damaged; copy the file again"
        )


#: Number of bytes of values that are dequantized at a time.
VALUES_BYTES = 256 << 10


class Dequantized(Range):
    """Float32 values, as bytes, of a storage that is quantized in its file."""

    def __init__(self, byte_range: ByteRange, storage_name: str, file: File) -> None:
        super().__init__(byte_range, storage_name, file)
        name = find_ggml_type(byte_range) or ""
        reason = explain_unreadable_blocks(name)
        if reason is not None:
            raise UnreadableError(f"{byte_range.path}: {storage_name}: {reason}")
        self._name = name
        values, self._stored_block_bytes = BLOCK_SIZES[name]
        self._float_block_bytes = values * 4

    def read(self, at: int, into: Array) -> None:
        flat, filled = into.reshape(-1).view(np.uint8), 0
        while filled < flat.size:
            first, skip = divmod(at + filled, self._float_block_bytes)
            blocks = -(-min(skip + flat.size - filled, VALUES_BYTES) // self._float_block_bytes)
            part = self._dequantize(first, blocks)[skip : skip + flat.size - filled]
            flat[filled : filled + part.size] = part
            filled += part.size

    def _dequantize(self, first: int, count: int) -> Array:
        packed_blocks = np.empty(count * self._stored_block_bytes, np.uint8)
        fill_buffer(
            packed_blocks,
            self._file,
            self._byte_range.offset + first * self._stored_block_bytes,
            self._byte_range,
            self._storage_name,
        )
        return dequantize_blocks(packed_blocks, self._name).view(np.uint8)


#: Maximum number of files open at once for a storage in many files.
MAX_OPEN_FILES = 32


class Assembled(Range):
    """Storage whose elements are in several files, in boxes (a range of indices per axis). Reads join the boxes."""

    def __init__(self, byte_range: ByteRange, storage_name: str, stack: ExitStack) -> None:
        assert byte_range.boxes is not None  # noqa: S101 - narrows the type
        self.size = byte_range.length
        self._byte_range, self._storage_name, self._stack = byte_range, storage_name, stack
        self._shape = (*byte_range.boxes.shape, byte_range.boxes.itemsize)
        self._strides = contiguous_strides(self._shape)
        self._pieces = sorted(
            (self._build_piece(box) for box in byte_range.boxes.boxes if 0 not in box.data.shape),
            key=lambda piece: piece.at,
        )
        #: For each piece, the largest `stop` of this piece and all earlier pieces.
        self._reach = list(accumulate((piece.stop for piece in self._pieces), max))
        self._open: dict[int, tuple[Range, TensorData]] = {}

    def _build_piece(self, box: Box) -> _Piece:
        start, shape = (*box.start, 0), (*box.data.shape, self._shape[-1])
        last = tuple(at + size - 1 for at, size in zip(start, shape, strict=True))
        return _Piece(
            _compute_dot_product(start, self._strides),
            _compute_dot_product(last, self._strides) + 1,
            start,
            shape,
            box.data,
        )

    def read(self, at: int, into: Array) -> None:
        """Fill `into` as `Range.read` does. Raises an error if a box cannot be opened or read."""
        flat, filled = into.reshape(-1).view(np.uint8), 0
        for start, shape in _split_into_boxes(at, at + flat.size, self._shape, self._strides):
            size = prod(shape)
            self._fill_box(flat[filled : filled + size].reshape(shape), start)
            filled += size

    def _fill_box(self, into: Array, start: tuple[int, ...]) -> None:
        first = _compute_dot_product(start, self._strides)
        filled, n = 0, bisect_right(self._reach, first)
        while n < len(self._pieces) and self._pieces[n].at < first + into.size:
            filled += self._copy_piece(n, into, start)
            n += 1
        if filled != into.size:
            fault = "overlap" if filled > into.size else "leave a gap"
            raise MalformedError(
                f"{self._byte_range.path}: {self._storage_name}: its chunks {fault}; save the checkpoint again"
            )

    def _copy_piece(self, number: int, into: Array, start: tuple[int, ...]) -> int:
        """Copy the overlap of a piece and the box `into`, which begins at index `start`. Return the number of bytes."""
        piece = self._pieces[number]
        low = tuple(map(max, start, piece.start))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, into.shape, piece.start, piece.shape, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return 0
        target = into[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, start, strict=True))]
        memory, data = self._open_piece(number)
        item = self._shape[-1]
        strides = [step * item for step in data.strides or contiguous_strides(data.shape)] + [1]
        offset_in_piece = _compute_dot_product([a - at for a, at in zip(low, piece.start, strict=True)], strides)
        axes = sorted((axis for axis, size in enumerate(target.shape) if size > 1), key=lambda axis: -strides[axis])
        aligned_target = target.transpose(*axes, *(axis for axis in range(target.ndim) if axis not in axes))
        memory.gather(
            data.offset * item + offset_in_piece,
            aligned_target.reshape(aligned_target.shape[: len(axes)]),
            [strides[axis] for axis in axes],
        )
        return target.size

    def _open_piece(self, number: int) -> tuple[Range, TensorData]:
        if number not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self._stack.close()
                self._open.clear()
            data = resolve_data(self._pieces[number].data, self._storage_name)
            self._open[number] = self._stack.enter_context(open_range(data.storage, self._storage_name)), data
        return self._open[number]


class _Piece(msgspec.Struct, frozen=True):
    """Box of bytes, between `at` and `stop` in the storage. The last axis of `start` and `shape` counts bytes."""

    at: int
    stop: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: TensorData


def _compute_dot_product(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _split_into_boxes(
    at: int, stop: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split elements `at` to `stop` of a C-contiguous array into the fewest boxes. Yield start and shape of each."""
    while at < stop:
        start, remainder = [], at
        for stride in strides:
            index, remainder = divmod(remainder, stride)
            start.append(index)
        axis = next(n for n, stride in enumerate(strides) if at % stride == 0 and at + stride <= stop)
        count = min((stop - at) // strides[axis], shape[axis] - start[axis])
        yield tuple(start), (*(1,) * axis, count, *shape[axis + 1 :])
        at += count * strides[axis]


@contextmanager
def open_range(byte_range: ByteRange, storage_name: str = "storage") -> Iterator[Range]:
    """Open the bytes of a storage, decompressed and in one piece. Messages name the storage by `storage_name`.

    Raises `UnreadableError` if a file is missing or unreadable, `MalformedError` if unpacking fails.
    """
    if byte_range.length < 0 or byte_range.offset < 0:
        raise MalformedError(
            f"{byte_range.path}: {storage_name}: offset {byte_range.offset} or length {byte_range.length} is negative; "
            "the file is damaged: copy the file again"
        )
    with ExitStack() as stack:
        if byte_range.boxes is not None:
            yield Assembled(byte_range, storage_name, stack)
            return
        byte_range = locate_storage(byte_range, storage_name)
        file = stack.enter_context(borrow_file(byte_range.path))
        yield _reader_class(byte_range)(byte_range, storage_name, file)


def _reader_class(byte_range: ByteRange) -> type[Range]:
    if byte_range.packing is None:
        return Range
    return Inflated if find_ggml_type(byte_range) is None else Dequantized


def resolve_data(data: TensorData, name: str) -> TensorData:
    """Return the exact location of a tensor, even if `data` only names the archive that contains the tensor.

    Raises `MalformedError` if the archive contains another tensor.
    """
    if not data.storage.is_archive:
        return data
    tensor = _read_archive(data.storage, name)
    if (tensor.dtype, tensor.shape) != (data.dtype, data.shape):
        raise MalformedError(
            f"{data.storage.path}: {name}: the index records {data.dtype} {list(data.shape)}, but the array at byte "
            f"{data.storage.offset} has {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor


def locate_storage(byte_range: ByteRange, storage_name: str) -> ByteRange:
    """Return a storage's location, even if only its archive is known. Raises an error if the archive is unreadable."""
    return _read_archive(byte_range, storage_name).storage if byte_range.is_archive else byte_range


def _read_archive(byte_range: ByteRange, name: str) -> TensorData:
    assert byte_range.packing is not None  # noqa: S101 - narrows the type
    cache = lifetime.for_command(_RemoteFacts).tensors if files.reads_are_requests(byte_range.path) else {}
    try:
        if byte_range not in cache:
            cache[byte_range] = torch_zip.read_single(byte_range.path, byte_range.offset, byte_range.packing.length)
        return cache[byte_range]
    except UnreadableError as error:
        message = f"{byte_range.path}: {name}: the archive at byte {byte_range.offset}: {error}"
        if isinstance(error, ChecksumMismatch):
            raise ChecksumMismatch(message, difference=error.difference) from error
        raise type(error)(message) from error


def _find_cached_crc(byte_range: ByteRange) -> int | None:
    """Return the CRC-32 of a byte range if it is already known, or None if the bytes must be read."""
    if byte_range.packing is None or not files.reads_are_requests(byte_range.path):
        return files.find_crc32(byte_range.path, byte_range.offset, byte_range.length)
    return lifetime.for_command(_RemoteFacts).crc32.get((byte_range.path, byte_range.offset))


def read_chunks(byte_range: ByteRange, name: str, size: int) -> Iterator[tuple[int, Array]]:
    """Yield position and content of each chunk of a storage's bytes. A chunk is valid until the next one is yielded."""
    buffer = np.empty(min(size, byte_range.length), np.uint8)
    with open_range(byte_range, name) as source:
        for start in range(0, byte_range.length, size):
            chunk = buffer[: byte_range.length - start]
            source.read(start, chunk)
            yield start, chunk


def check_crc(byte_range: ByteRange, name: str = "storage") -> None:
    """Compare a byte range with the CRC-32 that its archive records; without a recorded CRC-32, do nothing.

    Raises `ChecksumMismatch` if they do not match.
    """
    byte_range = locate_storage(byte_range, name)
    if byte_range.crc32 is None:
        return
    computed = _find_cached_crc(byte_range)
    if computed is None:
        computed = 0
        for _, chunk in read_chunks(byte_range, name, WINDOW_BYTES):
            computed = zlib.crc32(chunk.data, computed)
    if computed != byte_range.crc32:
        difference = f"recorded 0x{byte_range.crc32:08x}, computed 0x{computed:08x}"
        raise ChecksumMismatch(
            f"{byte_range.path}: {name}: checksum wrong: {difference}; the file is damaged: copy the file again",
            difference=difference,
            place=byte_range.place,
        )
