"""Read a tensor's values chunk by chunk, in any format.

A `TensorData` is plain data: path, offset, length, strides; `ranges.py` reads its bytes. Memory is bounded for any size
of tensor: contiguous elements are read one chunk at a time. Other elements (a transposed matrix) are read in bands,
each band in a single pass through the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from statecli.core.dtypes import contiguous_strides, unravel_index
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import Quantizer, TensorData
from statecli.values.elements import QUANTIZED, Array, Decoder, Element, find_element, require_element
from statecli.values.ggml_blocks import explain_unreadable_blocks
from statecli.values.ranges import Range, open_range, resolve_data
from statecli.workers.task import Piece

#: Number of values decoded at a time: the buffers of one chunk fit a core's second-level cache.
CHUNK_ELEMENTS = 64 * 1024
#: Number of bytes gathered at a time for a tensor whose elements are not in order.
BAND_BYTES = 16 << 20
#: Number of elements of a block of rows: ten float64 arrays take 40 MB.
ROW_BLOCK_ELEMENTS = 1 << 19
#: Size of a cache line in bytes.
CACHE_LINE_BYTES = 64
#: Maximum ratio of elements of a tensor with overlapping windows to elements of its storage; only checked above
#: `FREE_OVERLAP_ELEMENTS`.
MAX_OVERLAP = 16
#: Number of elements up to which a tensor may overlap at any ratio.
FREE_OVERLAP_ELEMENTS = 1 << 24
#: Maximum number of dimensions: numpy 1 supports one more, used for the parts of a complex32.
MAX_DIMENSIONS = 31


class Affine(msgspec.Struct, frozen=True, gc=False):
    """Quantization (q - zero_point) * scale. Without `axis`, all elements have the same scale.

    `scales` has the type in which torch multiplies: float64 for scales stored as float64, otherwise float32.
    """

    scales: Array
    zero_points: Array
    axis: int | None = None


class Strided(msgspec.Struct, frozen=True, gc=False):
    """Strided view into bytes in memory or in a file. Offset and strides count elements, as in torch."""

    memory: Array | Range
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    big_endian: bool = False
    conjugate: bool = False
    negative: bool = False
    affine: Affine | None = None

    @property
    def elements(self) -> int:
        """Number of elements of the logical tensor; expanded elements count each time."""
        return prod(self.shape)


@contextmanager
def open_view(data: TensorData, name: str = "tensor") -> Iterator[Strided]:
    """Open `data` as a strided view, and check that the view is inside its storage. Raises as `open_range` does."""
    data = resolve_data(data, name)
    affine = _read_affine(data.quantizer, name) if data.quantizer else None
    with _open_memory(data, name) as memory:
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
        )
        defect = explain_out_of_bounds(view)
        if defect:
            raise MalformedError(f"{data.storage.path}: {name}: {defect}")
        yield view


def _open_memory(data: TensorData, name: str) -> AbstractContextManager[Array | Range]:
    if data.inline is None:
        return open_range(data.storage, name)
    return nullcontext(np.frombuffer(data.inline, np.uint8))


def _read_affine(quantizer: Quantizer, name: str) -> Affine:
    if quantizer.scales is None:
        scale, zero = quantizer.scale, quantizer.zero_point
        return Affine(np.array([1.0 if scale is None else scale], np.float32), np.array([float(zero or 0)]))
    scales, zeros = read_all_values(quantizer.scales, f"{name}: scales"), np.zeros(1)
    if quantizer.zero_points:
        zeros = read_all_values(quantizer.zero_points, f"{name}: zero points")
    scales = scales if scales.dtype == np.float64 else scales.astype(np.float32)
    return Affine(scales, zeros.astype(np.float64), quantizer.axis or 0)


# --- geometry ------------------------------------------------------------------------------------------------------


def explain_out_of_bounds(view: Strided) -> str | None:
    """Return in a few words why the view is not inside its storage, or None if the view is inside."""
    if len(view.shape) != len(view.strides):
        return f"the tensor has {len(view.shape)} dimensions but {len(view.strides)} strides"
    if min(view.shape, default=0) < 0 or min(view.strides, default=0) < 0 or view.offset < 0:
        return f"shape {list(view.shape)}, strides {list(view.strides)} or offset {view.offset} is negative"
    element = find_element(view.dtype)
    if element is None or 0 in view.shape:
        return None
    values_per_item = element.values if view.dtype in QUANTIZED else 1
    size = element.size
    end = (view.offset + count_span(view) + values_per_item - 1) // values_per_item * size
    if end > view.memory.size:
        return f"needs {end} bytes of its storage, but the storage has only {view.memory.size}"
    return None


def count_span(view: Strided) -> int:
    """Return the number of stored elements from the first to the last element of the view, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))


class UnexpandedView(NamedTuple):
    """View without expanded dimensions. `times` is the number of times that each element occurs in the full view."""

    view: Strided
    times: int


def skip_expanded(view: Strided) -> UnexpandedView:
    """Return the view without its expanded dimensions."""
    dims = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if stride and size != 1]
    times = prod(size for size, stride in zip(view.shape, view.strides, strict=True) if not stride)
    shape = tuple(size for size, _ in dims)
    return UnexpandedView(replace(view, shape=shape, strides=tuple(stride for _, stride in dims)), times)


def to_memory_order(view: Strided) -> Strided:
    """Return a view of the same elements in the order of their memory addresses."""
    dims = sorted(zip(view.shape, view.strides, strict=True), key=lambda dim: -dim[1])
    return replace(view, shape=tuple(size for size, _ in dims), strides=tuple(stride for _, stride in dims))


def explain_overlap(view: Strided) -> str | None:
    """Return the reason if a view repeats its elements too often to be read, or None if the view can be read."""
    count, stored_count = view.elements, count_span(view)
    if count <= max(FREE_OVERLAP_ELEMENTS, MAX_OVERLAP * stored_count):
        return None
    return f"the tensor repeats {stored_count} stored elements as {count} elements, too many for statecli to read"


def _merge_dimensions(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Merge adjacent dimensions where possible. Return shape and strides of the same elements in the same order."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return tuple(size for size, _ in dims) or (1,), tuple(stride for _, stride in dims) or (1,)


def _iter_block_indices(shape: tuple[int, ...], limit: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices of consecutive blocks of at most `limit` elements, in C order."""
    axis, inner = len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= limit:
        inner *= shape[axis]
        axis -= 1
    pieces = -(-shape[axis] // max(limit // inner, 1))
    step = -(-shape[axis] // pieces)
    for flat in range(prod(shape[:axis])):
        outer = unravel_index(flat, shape[:axis])
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, start + step))


# --- stored items --------------------------------------------------------------------------------------------------


def read_items(view: Strided) -> Iterator[Array]:
    """Yield the stored items of all elements in logical (C) order and native byte order, flat.

    Each chunk has at most `CHUNK_ELEMENTS` items and is valid until the next. Quantized elements that share bytes are
    yielded as one code each. Raises `UnreadableError` for an unknown type.
    """
    element = require_element(view.dtype)
    if 0 in view.shape:
        return
    if is_packed(view.dtype):
        yield from _read_codes(view, element.values)
        return
    buffers = Decoder()
    for block in _read_raw_blocks(view, element, max(CHUNK_ELEMENTS // (element.items * element.values), 1)):
        if block.flags.c_contiguous and block.flags.aligned and block.dtype.isnative:
            yield block.reshape(-1)
            continue
        flat = buffers.buffer("items", "u1", block.nbytes).view(element.stored)
        np.copyto(flat.reshape(block.shape), block)
        yield flat


def is_packed(dtype: str) -> bool:
    """Return whether several elements of this dtype share a byte."""
    element = find_element(dtype)
    return dtype in QUANTIZED and element is not None and element.values > 1


def _read_raw_blocks(view: Strided, element: Element, limit: int) -> Iterator[Array]:
    """Yield the stored items in logical order, at most `limit` elements at a time."""
    for items in _read_arrays(view, element):
        for index in _iter_block_indices(items.shape[: items.ndim - (element.items > 1)], limit):
            yield items[index]


def count_codes(view: Strided, decoder: Decoder) -> Array:
    """Return the count of each of the 256 codes of a one-byte type; packed values are counted by byte."""
    element, counts = Element("u1"), np.zeros(256, np.int64)
    for block in _read_raw_blocks(view, element, CHUNK_ELEMENTS):
        decoder.count_codes(block, counts)
    return counts


def _read_arrays(view: Strided, element: Element) -> Iterator[Array]:
    """Yield the stored items in order as numpy arrays, with a last axis if an element has several items.

    Yields a single view for memory, and a view into a buffer for each band of a file.
    """
    dtype = np.dtype(element.stored).newbyteorder(">" if view.big_endian else "=")
    size = element.size
    shape, strides = _merge_dimensions(view.shape, view.strides)
    if len(shape) > MAX_DIMENSIONS:
        raise UnreadableError(f"the tensor has {len(shape)} dimensions, but statecli reads at most {MAX_DIMENSIONS}")
    steps = tuple(stride * size for stride in strides)
    item_shape, item_strides = ((element.items,), (dtype.itemsize,)) if element.items > 1 else ((), ())
    if not isinstance(view.memory, Range):
        yield np.ndarray((*shape, *item_shape), dtype, view.memory.data, view.offset * size, (*steps, *item_strides))
        return
    in_order = steps == tuple(sorted(steps, reverse=True))
    limit = CHUNK_ELEMENTS if in_order else max(BAND_BYTES // size, 1)
    buffers = Decoder()
    for index in _iter_block_indices(shape, limit):
        at, part = _locate_block(index, shape, steps)
        memory, compact = _gather(view.memory, view.offset * size + at, part, steps, size, buffers)
        yield np.ndarray((*part, *item_shape), dtype, memory.data, 0, (*compact, *item_strides))


def _locate_block(
    index: tuple[int | slice, ...], shape: tuple[int, ...], steps: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """Return the byte offset and the full shape of a block. `index` is an index from `_iter_block_indices`."""
    full_index = (*index, *[slice(None)] * (len(shape) - len(index)))
    ranges = [
        position.indices(size)[:2] if isinstance(position, slice) else (position, position + 1)
        for position, size in zip(full_index, shape, strict=True)
    ]
    at = sum(start * step for (start, _), step in zip(ranges, steps, strict=True))
    return at, tuple(stop - start for start, stop in ranges)


def _gather(
    source: Range, at: int, shape: tuple[int, ...], steps: Sequence[int], size: int, buffers: Decoder
) -> tuple[Array, tuple[int, ...]]:
    """Read each element once into a buffer. Return the buffer, and the strides of its elements in bytes."""
    order = sorted((axis for axis, step in enumerate(steps) if step and shape[axis] > 1), key=lambda axis: -steps[axis])
    sizes = [shape[axis] for axis in order]
    # Add a cache line to rows at distances of a power of two, because they would share a few cache lines.
    compact = [step * size for step in contiguous_strides(sizes)]
    if len(order) > 1 and compact[-2] % 1024 == 0:
        compact = [step + step // compact[-2] * CACHE_LINE_BYTES for step in compact[:-1]] + compact[-1:]
    memory = buffers.buffer("items", "u1", sizes[0] * compact[0] if order else size)
    # Any type of this size, because numpy then moves `size` bytes at once.
    word = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.get(size, f"V{size}")
    source.gather(at, np.ndarray(tuple(sizes), word, memory.data, 0, tuple(compact)), [steps[axis] for axis in order])
    stride_of_axis = dict(zip(order, compact, strict=True))
    return memory, tuple(stride_of_axis.get(axis, 0) for axis in range(len(shape)))


def _read_codes(view: Strided, per: int) -> Iterator[Array]:
    """Yield the codes of elements that share bytes, in C order. Raises UnreadableError for non-contiguous elements."""
    if _merge_dimensions(view.shape, view.strides) != ((view.elements,), (1,)):
        raise UnreadableError(f"statecli cannot read {view.dtype} elements with strides {list(view.strides)}")
    first, last, bits = view.offset, view.offset + view.elements, 8 // per
    for start in range(first - first % per, last, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, last)
        block = _read_bytes(view.memory, start // per, -(-stop // per))
        codes = (block[:, None] >> np.arange(0, 8, bits).astype(np.uint8)) & np.uint8((1 << bits) - 1)
        yield codes.reshape(-1)[max(first - start, 0) : stop - start]


def _read_bytes(memory: Array | Range, start: int, stop: int) -> Array:
    if not isinstance(memory, Range):
        return memory[start:stop]
    block = np.empty(stop - start, np.uint8)
    memory.read(start, block)
    return block


# --- values --------------------------------------------------------------------------------------------------------


def explain_not_numeric(dtype: str, has_scale: bool = False) -> str | None:
    """Return why elements of `dtype` cannot be read as numbers, or None. Some types need a scale (`has_scale`)."""
    element = find_element(dtype)
    if dtype in BLOCK_SIZES:
        return explain_unreadable_blocks(dtype) or f"statecli compares blocks of {dtype} only as stored bytes"
    if element is None or not element.numbers:
        return f"statecli cannot read {dtype} elements as numbers"
    if dtype in QUANTIZED and not has_scale:
        return f"{dtype} elements have no recorded scale, so statecli cannot convert them to numbers"
    return None


def read_values(view: Strided, decoder: Decoder | None = None) -> Iterator[Array]:
    """Yield all values in C order, in flat chunks of at most `CHUNK_ELEMENTS`. Each may overwrite the previous chunk.

    Floats are yielded as float32 or float64, whichever represents the stored type exactly. Integers stay as
    stored, and complex values stay complex. Bool becomes float32, and quantized elements are dequantized to float32.
    Raises `UnreadableError` for a type without numbers.
    """
    reason = explain_not_numeric(view.dtype, view.affine is not None)
    if reason:
        raise UnreadableError(reason)
    decoder = decoder or Decoder()
    position = 0
    for items in read_items(view):
        chunk = to_values(view, items, position, decoder)
        position += chunk.size
        yield chunk


def to_values(view: Strided, items: Array, start: int, decoder: Decoder) -> Array:
    """Convert stored items to the values that `read_values` yields; `start` is the index of the first element.

    Applies scale, conjugation and negation, which are lazy in torch.
    """
    chunk = items if is_packed(view.dtype) else decoder(items, require_element(view.dtype))
    if view.affine is not None:
        chunk = _dequantize_chunk(view, view.affine, chunk, start, decoder)
    if view.conjugate and chunk.dtype.kind == "c":
        chunk = np.conjugate(chunk, out=decoder.buffer("conjugate", chunk.dtype.str, chunk.size))
    if view.negative:
        chunk = np.negative(chunk, out=decoder.buffer("negative", chunk.dtype.str, chunk.size))
    return chunk


def dequantize(codes: Array, zero_points: Array, scales: Array, decoder: Decoder) -> Array:
    """Return (code - zero point) * scale for each code, rounded to float32 where torch rounds."""
    out = decoder.buffer("dequantized", "f4", codes.size).reshape(codes.shape)
    shifted = decoder.buffer("shifted", scales.dtype.str, codes.size).reshape(codes.shape)
    with np.errstate(all="ignore"):
        np.subtract(codes, zero_points, out=shifted, dtype=np.float64, casting="same_kind")
        return np.multiply(shifted, scales, out=out, casting="same_kind")


def _dequantize_chunk(view: Strided, affine: Affine, chunk: Array, start: int, decoder: Decoder) -> Array:
    if affine.axis is None:
        return dequantize(chunk, affine.zero_points, affine.scales, decoder)
    if not 0 <= affine.axis < len(view.shape):
        raise UnreadableError(f"quantized along axis {affine.axis}, but the tensor has {len(view.shape)} dimensions")
    channels, inner = view.shape[affine.axis], prod(view.shape[affine.axis + 1 :])
    if affine.scales.size != channels or affine.zero_points.size not in (1, channels):
        raise UnreadableError(
            f"{channels} channels need {channels} scales and 1 or {channels} zero points, but the file has "
            f"{affine.scales.size} scales and {affine.zero_points.size} zero points"
        )
    index = np.arange(start, start + chunk.size) // inner % channels
    zero_points = affine.zero_points[index] if affine.zero_points.size > 1 else affine.zero_points
    return dequantize(chunk, zero_points, affine.scales[index], decoder)


def read_all_values(data: TensorData, name: str = "tensor") -> Array:
    """Return every value of a small tensor as a flat numpy array.

    For larger tensors use `open_view` and `read_values`.
    """
    with open_view(data, name) as view:
        chunks = [chunk.copy() for chunk in read_values(view)]
    return np.concatenate(chunks) if chunks else np.empty(0)


def read_rows(data: TensorData, name: str, start: int, stop: int) -> Array:
    """Return rows [start, stop) of the strided matrix `data`."""
    assert data.strides is not None  # noqa: S101 - narrows the type
    rows = replace(data, shape=(stop - start, data.shape[1]), offset=data.offset + start * data.strides[0])
    return read_all_values(rows, name).reshape(rows.shape)


class RowBlock(NamedTuple):
    """Rows [start, stop) of two matrices."""

    start: int
    stop: int
    before: Array
    after: Array


def iter_row_blocks(before: TensorData, after: TensorData, name: str) -> Iterator[RowBlock]:
    """Yield blocks of rows of two strided matrices, in order."""
    height, width = after.shape
    step = max(1, ROW_BLOCK_ELEMENTS // max(width, 1))
    for start in range(0, height, step):
        stop = min(start + step, height)
        with np.errstate(all="ignore"):
            old, new = (read_rows(data, name, start, stop).astype(np.float64) for data in (before, after))
        yield RowBlock(start, stop, old, new)


def is_plain(data: TensorData) -> bool:
    """Return whether the elements of a tensor are stored in order and need no conversion."""
    in_order = data.strides is None or data.strides == contiguous_strides(data.shape) or 0 in data.shape
    lazy = data.conjugate or data.negative or data.quantizer is not None
    return in_order and not lazy and not data.storage.big_endian and data.inline is None and not is_packed(data.dtype)


def find_piece(data: TensorData) -> Piece | None:
    """Return the location of a tensor's elements, or None if they are not contiguous or need a conversion."""
    element, storage = find_element(data.dtype), data.storage
    if element is None or storage.packing is not None or storage.boxes is not None or not is_plain(data):
        return None
    size = element.size
    is_inside = (data.offset + prod(data.shape)) * size <= storage.length
    return Piece(storage.path, storage.offset + data.offset * size, data.dtype) if is_inside else None
