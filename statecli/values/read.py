"""From where a tensor's bytes are to its values, chunk by chunk, whatever the format.

A `TensorData` is plain data: path, offset, length, strides. Its bytes are memory-mapped and walked in chunks of at
most `CHUNK` values, so that memory stays bounded however big the tensor is. A file is measured before it is mapped
and again before each chunk: touching mapped bytes beyond the end of a file kills the process.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from statecli.errors import MalformedError, UnreadableError
from statecli.state import ByteRange, Quantizer, TensorData
from statecli.values.elements import QUANTIZED, Array, Decoder, Element, element

#: Values decoded at a time: the buffers of one chunk stay in a core's second-level cache.
CHUNK = 64 * 1024
#: Mapped bytes read before the pages are given back, so that a big file does not count as ours.
KEEP = 64 << 20
#: A tensor whose windows overlap may have this many times more elements than lie in its storage ...
OVERLAP = 16
#: ... unless it is small enough not to matter.
OVERLAP_FREE = 1 << 24
#: Dimensions that numpy 1 can hold, less one for the parts of a complex32.
DIMENSIONS = 31
PAGE = 4096
#: Bytes of a range that are copied rather than mapped.
COPIED = 8 << 20


class Affine(msgspec.Struct, frozen=True, gc=False):
    """(q - zero_point) * scale: one of each, or one for each index along `axis`. float64 arrays."""

    scales: Array
    zero_points: Array
    axis: int | None = None


class Strided(msgspec.Struct, frozen=True, gc=False):
    """A strided view into bytes that are in memory or mapped. Offset and strides count elements, as torch's do.

    `before_chunk` is called with the number of bytes about to be touched.
    """

    memory: Array
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    big_endian: bool = False
    conjugate: bool = False
    negative: bool = False
    affine: Affine | None = None
    before_chunk: Callable[[int], None] | None = None

    @property
    def elements(self) -> int:
        """Elements of the logical tensor, expanded ones counted each time."""
        return prod(self.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# --- files ---------------------------------------------------------------------------------------------------------


class _Mapping:
    """One mapped range of one open file."""

    def __init__(self, where: ByteRange, what: str, handle: int) -> None:
        self._where, self._what, self._handle, self._touched = where, what, handle, 0
        self.check(0)
        start = where.offset - where.offset % mmap.ALLOCATIONGRANULARITY
        skip = where.offset - start
        self._map = mmap.mmap(handle, skip + where.length, access=mmap.ACCESS_READ, offset=start)
        self.memory: Array = np.frombuffer(self._map, np.uint8, where.length, skip)

    def check(self, touched: int) -> None:
        """Refuses a file that has become shorter than the range, and gives pages back now and then."""
        size, end = os.fstat(self._handle).st_size, self._where.offset + self._where.length
        if size < end:
            raise _cut_short(self._where, self._what, size)
        self._touched += touched
        if self._touched > KEEP and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._touched = 0

    def close(self) -> None:
        """Unmaps, unless a caller still holds a view: then the mapping goes with the last view."""
        del self.memory
        try:
            self._map.close()
        except BufferError:
            return


def _cut_short(where: ByteRange, what: str, size: int) -> MalformedError:
    return MalformedError(
        f"{where.path}: {what}: ends at byte {where.offset + where.length}, the file has {size} bytes: "
        "it was cut short, or changed while it was read; copy it again"
    )


def open_regular(path: str) -> int:
    """A descriptor of a regular file. A pipe must not block the process and a device has no end: both refused."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags)
    except OSError as why:
        raise UnreadableError(f"{path}: cannot be opened any more: {why.strerror or why}") from why
    except ValueError as why:
        raise UnreadableError(f"{path!r}: is no file name: {why}") from why
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UnreadableError(f"{path}: is not a regular file any more")
    return handle


def fill(into: Array, file: io.FileIO, where: ByteRange, what: str) -> None:
    """The bytes of `where`, as many as `into` has. Raises `MalformedError` where the file ends before."""
    file.seek(where.offset)
    view, got = memoryview(into.data), 0
    while got < where.length:
        more = file.readinto(view[got:])
        if not more:
            raise _cut_short(where, what, os.fstat(file.fileno()).st_size)
        got += more


def _copied(where: ByteRange, what: str, handle: int) -> Array:
    """The range in memory: a process that touches mapped bytes of a file that somebody cuts short is killed."""
    memory = np.empty(where.length, np.uint8)
    with open(handle, "rb", buffering=0, closefd=False) as file:
        fill(memory, file, where, what)
    memory.flags.writeable = False
    return memory


@contextmanager
def mapped(where: ByteRange, what: str = "storage") -> Iterator[tuple[Array, Callable[[int], None]]]:
    """The range's bytes as a read-only uint8 array, and a function to call before touching the next n of them.

    Raises `UnreadableError` if the file is gone or cannot be read, `MalformedError` if it is too short; `what`
    names the range in the message.
    """
    if where.length < 0 or where.offset < 0:
        raise MalformedError(f"{where.path}: {what}: impossible place: {where.length} bytes at byte {where.offset}")
    handle = open_regular(where.path)
    try:
        if not where.length:
            yield np.empty(0, np.uint8), lambda _: None
            return
        if where.length <= COPIED:
            yield _copied(where, what, handle), lambda _: None
            return
        try:
            mapping = _Mapping(where, what, handle)
        except (OSError, ValueError, OverflowError) as why:
            raise UnreadableError(f"{where.path}: {what}: cannot be mapped into memory: {why}") from why
        try:
            yield mapping.memory, mapping.check
        finally:
            mapping.close()
    finally:
        os.close(handle)


@contextmanager
def _inline(raw: bytes) -> Iterator[tuple[Array, Callable[[int], None]]]:
    yield np.frombuffer(raw, np.uint8), lambda _: None


def check_crc(where: ByteRange, what: str = "storage") -> None:
    """Compares the range's bytes with the CRC-32 its container recorded; does nothing where it recorded none.

    Raises `MalformedError` where they disagree.
    """
    if where.crc32 is None:
        return
    found, left = 0, where.length
    handle = open_regular(where.path)
    with open(handle, "rb", buffering=0) as file:
        file.seek(where.offset)
        while left:
            block = file.read(min(left, 1 << 20))
            if not block:
                raise _cut_short(where, what, os.fstat(handle).st_size)
            found, left = zlib.crc32(block, found), left - len(block)
    if found != where.crc32:
        raise MalformedError(
            f"{where.path}: {what}: checksum wrong: recorded 0x{where.crc32:08x}, bytes give 0x{found:08x}; "
            "the file is damaged: copy it again"
        )


@contextmanager
def opened(data: TensorData, what: str = "tensor") -> Iterator[Strided]:
    """`data` with its storage mapped and its place in it checked. Raises as `mapped` does."""
    affine = _affine(data.quantizer, what) if data.quantizer else None
    with mapped(data.storage, what) if data.inline is None else _inline(data.inline) as (memory, before):
        view = Strided(
            memory=memory,
            dtype=data.dtype,
            shape=tuple(data.shape),
            strides=contiguous_strides(data.shape) if data.strides is None else tuple(data.strides),
            offset=data.offset,
            big_endian=data.storage.big_endian,
            conjugate=data.conjugate,
            negative=data.negative,
            affine=affine,
            before_chunk=before,
        )
        wrong = out_of_bounds(view)
        if wrong:
            raise MalformedError(f"{data.storage.path}: {what}: {wrong}")
        del memory
        yield view
        del view


def _affine(quantizer: Quantizer, what: str) -> Affine:
    if quantizer.scales is None:
        scale, zero = quantizer.scale, quantizer.zero_point
        return Affine(np.array([1.0 if scale is None else scale]), np.array([float(zero or 0)]))
    scales = _vector(quantizer.scales, f"{what}: scales")
    zeros = _vector(quantizer.zero_points, f"{what}: zero points") if quantizer.zero_points else np.zeros(1)
    return Affine(scales, zeros, quantizer.axis or 0)


def _vector(data: TensorData, what: str) -> Array:
    """A small tensor whole, as float64."""
    with opened(data, what) as view:
        parts = [chunk.astype(np.float64) for chunk in values(view)]
        del view
    return np.concatenate(parts) if parts else np.zeros(0)


# --- geometry ------------------------------------------------------------------------------------------------------


def out_of_bounds(view: Strided) -> str | None:
    """What is wrong with the view's place in its storage, in a few words; None if it lies inside."""
    if len(view.shape) != len(view.strides):
        return f"{len(view.shape)} dimensions and {len(view.strides)} strides"
    if min(view.shape, default=0) < 0 or min(view.strides, default=0) < 0 or view.offset < 0:
        return f"impossible shape {list(view.shape)}, strides {list(view.strides)} or offset {view.offset}"
    kind = element(view.dtype)
    if kind is None or 0 in view.shape:
        return None
    packed = kind.values if view.dtype in QUANTIZED else 1
    size = np.dtype(kind.stored).itemsize * kind.items
    end = (view.offset + span(view) + packed - 1) // packed * size
    if end > view.memory.size:
        return f"needs {end} bytes of its storage, which has {view.memory.size}"
    return None


def span(view: Strided) -> int:
    """Elements from the first that the view touches to the last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))


def distinct(view: Strided) -> tuple[Strided, int]:
    """The view without its expanded dimensions, and how many times each of its elements counts."""
    kept = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if stride and size != 1]
    times = prod(size for size, stride in zip(view.shape, view.strides, strict=True) if not stride)
    shape = tuple(size for size, _ in kept)
    return replace(view, shape=shape, strides=tuple(stride for _, stride in kept)), times


def in_memory_order(view: Strided) -> Strided:
    """The same elements, once each, in an order that walks through memory forwards."""
    dims = sorted(zip(view.shape, view.strides, strict=True), key=lambda dim: -dim[1])
    return replace(view, shape=tuple(size for size, _ in dims), strides=tuple(stride for _, stride in dims))


def overlap(view: Strided) -> str | None:
    """Why the view is not read: its windows overlap so much that reading it would take for ever. None if it is."""
    count, stored = view.elements, span(view)
    if count <= max(OVERLAP_FREE, OVERLAP * stored):
        return None
    return f"{count} elements overlap in {stored} stored ones: not read"


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Fewer dimensions for the same elements in the same order."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return tuple(size for size, _ in dims) or (1,), tuple(stride for _, stride in dims) or (1,)


def _blocks(shape: tuple[int, ...], limit: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices of consecutive blocks, in C order, of at most `limit` elements each."""
    axis, inner = len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= limit:
        inner *= shape[axis]
        axis -= 1
    pieces = -(-shape[axis] // max(limit // inner, 1))
    step = -(-shape[axis] // pieces)
    for flat in range(prod(shape[:axis])):
        outer = _unravel(flat, shape[:axis])
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, start + step))


def _unravel(flat: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return index[::-1]


# --- values --------------------------------------------------------------------------------------------------------


def no_numbers(dtype: str, quantized: bool = False) -> str | None:
    """Why elements of `dtype` cannot be read as numbers; None if they can. `quantized`: their scale is known."""
    if element(dtype) is None:
        return f"{dtype} elements are not numbers that statecli reads"
    if dtype in QUANTIZED and not quantized:
        return f"{dtype} without a recorded scale"
    return None


def values(view: Strided, decoder: Decoder | None = None) -> Iterator[Array]:
    """All values in logical (C) order, in flat chunks of at most `CHUNK`, each valid until the next is asked for.

    Floats come as float32 or float64, whichever holds the stored type exactly; bool as float32; integers as
    stored; complex as complex; quantized ones dequantized, as float64. Raises `UnreadableError` for a type without
    numbers.
    """
    reason = no_numbers(view.dtype, view.affine is not None)
    kind = element(view.dtype)
    if reason or kind is None:
        raise UnreadableError(reason or view.dtype)
    if 0 in view.shape:
        return
    decoder = decoder or Decoder()
    done = 0
    for chunk in _decoded(view, kind, decoder):
        done += chunk.size
        yield _finished(view, chunk, done - chunk.size, decoder)


def _decoded(view: Strided, kind: Element, decoder: Decoder) -> Iterator[Array]:
    if view.dtype in QUANTIZED and kind.values > 1:
        yield from _unpacked(view, kind, decoder)
        return
    for block in _raw_blocks(view, kind, CHUNK // (kind.items * kind.values)):
        yield decoder(block, kind)


def _raw_blocks(view: Strided, kind: Element, limit: int) -> Iterator[Array]:
    """The stored items in logical order, at most `limit` elements at a time."""
    items = _items(view, kind)
    dims = items.ndim - (kind.items > 1)
    # A stride touches more than its elements: up to a page for each.
    touched = max(items.itemsize, min(PAGE, *items.strides[:dims]))
    for index in _blocks(items.shape[:dims], limit):
        block = items[index]
        if view.before_chunk:
            view.before_chunk(block.size * touched)
        yield block


def code_counts(view: Strided, decoder: Decoder) -> Array:
    """How often each of the 256 codes of a one-byte type occurs in the view; packed values are counted by the byte."""
    kind, counts = Element("u1"), np.zeros(256, np.int64)
    for block in _raw_blocks(view, kind, CHUNK):
        decoder.count(block, counts)
    return counts


def _items(view: Strided, kind: Element) -> Array:
    """The stored items as a numpy view, one axis more where an element is made of several."""
    dtype = np.dtype(kind.stored)
    size = dtype.itemsize * kind.items
    shape, strides = _merged(view.shape, view.strides)
    if len(shape) > DIMENSIONS:
        raise UnreadableError(f"{len(shape)} dimensions: more than {DIMENSIONS} cannot be read")
    steps = [stride * size for stride in strides]
    if kind.items > 1:
        shape, steps = (*shape, kind.items), [*steps, dtype.itemsize]
    if view.big_endian:
        dtype = dtype.newbyteorder(">")
    return np.ndarray(shape, dtype, view.memory.data, view.offset * size, steps)


def _unpacked(view: Strided, kind: Element, decoder: Decoder) -> Iterator[Array]:
    """Values that share bytes; torch packs them one after another across rows and keeps such tensors contiguous."""
    if _merged(view.shape, view.strides) != ((view.elements,), (1,)):
        raise UnreadableError(f"{view.dtype} with strides {list(view.strides)} is not read")
    per = kind.values
    first, last = view.offset, view.offset + view.elements
    for start in range(first - first % per, last, CHUNK):
        stop = min(start + CHUNK, last)
        block = view.memory[start // per : -(-stop // per)]
        if view.before_chunk:
            view.before_chunk(block.size)
        yield decoder(block, kind)[max(first - start, 0) : stop - start]


def _finished(view: Strided, chunk: Array, start: int, decoder: Decoder) -> Array:
    """What torch does to elements lazily: scale them, conjugate them, negate them."""
    if view.affine is not None:
        chunk = _dequantized(view, view.affine, chunk, start, decoder)
    if view.conjugate and chunk.dtype.kind == "c":
        chunk = np.conjugate(chunk, out=decoder.buffer("conjugate", chunk.dtype.str, chunk.size))
    if view.negative:
        chunk = np.negative(chunk, out=decoder.buffer("negative", chunk.dtype.str, chunk.size))
    return chunk


def _dequantized(view: Strided, affine: Affine, chunk: Array, start: int, decoder: Decoder) -> Array:
    out = decoder.buffer("dequantized", "f8", chunk.size)
    if affine.axis is None:
        np.subtract(chunk, affine.zero_points[0], out=out)
        np.multiply(out, affine.scales[0], out=out)
        return out
    if not 0 <= affine.axis < len(view.shape):
        raise UnreadableError(f"quantized along axis {affine.axis} of {len(view.shape)}")
    channels, inner = view.shape[affine.axis], prod(view.shape[affine.axis + 1 :])
    if affine.scales.size != channels or affine.zero_points.size not in (1, channels):
        raise UnreadableError(f"{affine.scales.size} scales for {channels} channels")
    index = np.arange(start, start + chunk.size) // inner % channels
    np.subtract(chunk, affine.zero_points[index if affine.zero_points.size > 1 else 0], out=out)
    np.multiply(out, affine.scales[index], out=out)
    return out


def raw_values(view: Strided, word: int = 0) -> Iterator[Array]:
    """The stored bits of each element as an unsigned integer, in C order; of 16-byte elements one of two words."""
    for flat, size in _native(view):
        yield flat.view(f"u{min(size, 8)}")[word :: max(size // 8, 1)]


def raw_bytes(view: Strided) -> Iterator[Array]:
    """The stored elements in C order and native byte order, as bytes."""
    return (flat.view(np.uint8) for flat, _ in _native(view))


def _native(view: Strided) -> Iterator[tuple[Array, int]]:
    """Flat stored items, and the bytes of one element."""
    kind = element(view.dtype)
    if kind is None or (kind.values > 1 and view.dtype in QUANTIZED):
        raise UnreadableError(f"{view.dtype}: its elements cannot be compared bit by bit")
    for block in _raw_blocks(view, kind, CHUNK) if 0 not in view.shape else ():
        flat = block.astype(block.dtype.newbyteorder("="), order="C").reshape(-1)
        yield flat, flat.itemsize * kind.items


def all_values(data: TensorData) -> Any:
    """Every value of a small tensor as one flat numpy array. For bigger ones use `opened` and `values`."""
    with opened(data) as view:
        chunks = [chunk.copy() for chunk in values(view)]
        del view
    return np.concatenate(chunks) if chunks else np.empty(0)
