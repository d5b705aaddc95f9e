"""From where a tensor's bytes are to its values, chunk by chunk, whatever the format.

A `TensorData` is plain data: path, offset, length, strides; ranges.py reads its bytes. Memory stays bounded however big
the tensor is: what lies in order is read a chunk at a time, what does not (a transposed matrix) in bands, each in one
walk through the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.state import Quantizer, TensorData
from statecli.values.elements import QUANTIZED, Array, Decoder, Element, element
from statecli.values.ggml_blocks import why_no_numbers
from statecli.values.ranges import Range, contiguous_strides, open_range, resolved

#: Values decoded at a time: the buffers of one chunk stay in a core's second-level cache.
CHUNK = 64 * 1024
#: Bytes gathered at a time of a tensor whose elements do not lie in their order.
BAND = 16 << 20
#: Bytes of a line of the cache.
LINE = 64
#: A tensor whose windows overlap may have this many times more elements than lie in its storage ...
OVERLAP = 16
#: ... unless it is small enough not to matter.
OVERLAP_FREE = 1 << 24
#: Dimensions that numpy 1 can hold, less one for the parts of a complex32.
DIMENSIONS = 31


class Affine(msgspec.Struct, frozen=True, gc=False):
    """(q - zero_point) * scale: one of each, or one for each index along `axis`. float64 arrays."""

    scales: Array
    zero_points: Array
    axis: int | None = None


class Strided(msgspec.Struct, frozen=True, gc=False):
    """A strided view into bytes that are in memory or in a file. Offset and strides count elements, as torch's do."""

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
        """Elements of the logical tensor, expanded ones counted each time."""
        return prod(self.shape)


@contextmanager
def opened(data: TensorData, what: str = "tensor") -> Iterator[Strided]:
    """`data` with its file open and its place in it checked. Raises as `open_range` does."""
    data = resolved(data, what)
    affine = _affine(data.quantizer, what) if data.quantizer else None
    with _memory(data, what) as memory:
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
        wrong = out_of_bounds(view)
        if wrong:
            raise MalformedError(f"{data.storage.path}: {what}: {wrong}")
        yield view


def _memory(data: TensorData, what: str) -> AbstractContextManager[Array | Range]:
    if data.inline is None:
        return open_range(data.storage, what)
    return nullcontext(np.frombuffer(data.inline, np.uint8))


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
    size = kind.size
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


# --- stored items --------------------------------------------------------------------------------------------------


def stored(view: Strided) -> Iterator[Array]:
    """The stored items of all elements in logical (C) order and native byte order, flat, at most `CHUNK` at a time.

    Each chunk is valid until the next is asked for. Elements of quantized types that share bytes come as one code each.
    Raises `UnreadableError` for a type whose items are not known.
    """
    kind = element(view.dtype)
    if kind is None:
        raise UnreadableError(f"{view.dtype} elements are not numbers that statecli reads")
    if 0 in view.shape:
        return
    if packed(view.dtype):
        yield from _codes(view, kind.values)
        return
    buffer = _Buffer()
    for block in _raw_blocks(view, kind, max(CHUNK // (kind.items * kind.values), 1)):
        if block.flags.c_contiguous and block.flags.aligned and block.dtype.isnative:
            yield block.reshape(-1)
            continue
        flat = buffer.of(block.nbytes)[: block.nbytes].view(kind.stored)
        np.copyto(flat.reshape(block.shape), block)
        yield flat


def packed(dtype: str) -> bool:
    """Whether several elements share a byte."""
    kind = element(dtype)
    return dtype in QUANTIZED and kind is not None and kind.values > 1


def _raw_blocks(view: Strided, kind: Element, limit: int) -> Iterator[Array]:
    """The stored items in logical order, at most `limit` elements at a time."""
    for items in _items(view, kind):
        for index in _blocks(items.shape[: items.ndim - (kind.items > 1)], limit):
            yield items[index]


def code_counts(view: Strided, decoder: Decoder) -> Array:
    """How often each of the 256 codes of a one-byte type occurs in the view; packed values are counted by the byte."""
    kind, counts = Element("u1"), np.zeros(256, np.int64)
    for block in _raw_blocks(view, kind, CHUNK):
        decoder.count(block, counts)
    return counts


def _items(view: Strided, kind: Element) -> Iterator[Array]:
    """The stored items as numpy views, one after another, with an axis more where an element is made of several.

    One view of what is in memory. From a file, a view into a buffer of each band.
    """
    dtype = np.dtype(kind.stored).newbyteorder(">" if view.big_endian else "=")
    size = kind.size
    shape, strides = _merged(view.shape, view.strides)
    if len(shape) > DIMENSIONS:
        raise UnreadableError(f"{len(shape)} dimensions: more than {DIMENSIONS} cannot be read")
    steps = tuple(stride * size for stride in strides)
    more, step = ((kind.items,), (dtype.itemsize,)) if kind.items > 1 else ((), ())
    if not isinstance(view.memory, Range):
        yield np.ndarray((*shape, *more), dtype, view.memory.data, view.offset * size, (*steps, *step))
        return
    in_order = steps == tuple(sorted(steps, reverse=True))
    limit = CHUNK if in_order else max(BAND // size, 1)
    buffer = _Buffer()
    for index in _blocks(shape, limit):
        at, part = _place(index, shape, steps)
        memory, compact = _gathered(view.memory, view.offset * size + at, part, steps, size, buffer)
        yield np.ndarray((*part, *more), dtype, memory.data, 0, (*compact, *step))


def _place(index: tuple[int | slice, ...], shape: tuple[int, ...], steps: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Where a block of `_blocks` begins, in bytes, and its shape, of as many dimensions as the whole has."""
    whole = (*index, *[slice(None)] * (len(shape) - len(index)))
    ranges = [
        one.indices(size)[:2] if isinstance(one, slice) else (one, one + 1)
        for one, size in zip(whole, shape, strict=True)
    ]
    at = sum(start * step for (start, _), step in zip(ranges, steps, strict=True))
    return at, tuple(stop - start for start, stop in ranges)


def _gathered(
    source: Range, at: int, shape: tuple[int, ...], steps: Sequence[int], size: int, buffer: _Buffer
) -> tuple[Array, tuple[int, ...]]:
    """Reads the elements, each once; gives the memory where they are then and their strides there, in bytes."""
    order = sorted((axis for axis, step in enumerate(steps) if step and shape[axis] > 1), key=lambda axis: -steps[axis])
    sizes = [shape[axis] for axis in order]
    # Rows a power of two apart would all fall into the same few lines of the cache.
    compact = [step * size for step in contiguous_strides(sizes)]
    if len(order) > 1 and compact[-2] % 1024 == 0:
        compact = [step + step // compact[-2] * LINE for step in compact[:-1]] + compact[-1:]
    memory = buffer.of(sizes[0] * compact[0] if order else size)
    # What they are does not matter here, only that numpy moves this many bytes at once.
    word = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.get(size, f"V{size}")
    source.gather(at, np.ndarray(tuple(sizes), word, memory.data, 0, tuple(compact)), [steps[axis] for axis in order])
    found = dict(zip(order, compact, strict=True))
    return memory, tuple(found.get(axis, 0) for axis in range(len(shape)))


class _Buffer:
    """Memory that is used again."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.uint8)

    def of(self, size: int) -> Array:
        if self._memory.size < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory


def _codes(view: Strided, per: int) -> Iterator[Array]:
    """Elements that share bytes; torch packs them one after another across rows and keeps such tensors contiguous."""
    if _merged(view.shape, view.strides) != ((view.elements,), (1,)):
        raise UnreadableError(f"{view.dtype} with strides {list(view.strides)} is not read")
    first, last, bits = view.offset, view.offset + view.elements, 8 // per
    for start in range(first - first % per, last, CHUNK):
        stop = min(start + CHUNK, last)
        block = _bytes(view.memory, start // per, -(-stop // per))
        codes = (block[:, None] >> np.arange(0, 8, bits).astype(np.uint8)) & np.uint8((1 << bits) - 1)
        yield codes.reshape(-1)[max(first - start, 0) : stop - start]


def _bytes(memory: Array | Range, start: int, stop: int) -> Array:
    if not isinstance(memory, Range):
        return memory[start:stop]
    block = np.empty(stop - start, np.uint8)
    memory.read(start, block)
    return block


# --- values --------------------------------------------------------------------------------------------------------


def no_numbers(dtype: str, quantized: bool = False) -> str | None:
    """Why elements of `dtype` cannot be read as numbers; None if they can. `quantized`: their scale is known."""
    kind = element(dtype)
    if dtype in BLOCK_SIZES:
        return why_no_numbers(dtype) or f"blocks of {dtype} as they are stored"
    if kind is None or not kind.numbers:
        return f"{dtype} elements are not numbers that statecli reads"
    if dtype in QUANTIZED and not quantized:
        return f"{dtype} without a recorded scale"
    return None


def values(view: Strided, decoder: Decoder | None = None) -> Iterator[Array]:
    """All values in logical (C) order, in flat chunks of at most `CHUNK`, each valid until the next is asked for.

    Floats come as float32 or float64, whichever holds the stored type exactly; bool as float32; integers as
    stored; complex as complex; quantized ones dequantized, as float32. Raises `UnreadableError` for a type without
    numbers.
    """
    reason = no_numbers(view.dtype, view.affine is not None)
    if reason:
        raise UnreadableError(reason)
    decoder = decoder or Decoder()
    done = 0
    for items in stored(view):
        chunk = valued(view, items, done, decoder)
        done += chunk.size
        yield chunk


def valued(view: Strided, items: Array, start: int, decoder: Decoder) -> Array:
    """What stored items are worth, as `values` has it, the first of them that of element `start`.

    That is what torch does lazily too: scale, conjugate, negate.
    """
    kind = element(view.dtype)
    assert kind is not None  # noqa: S101 - it has been stored
    chunk = items if packed(view.dtype) else decoder(items, kind)
    if view.affine is not None:
        chunk = _dequantized(view, view.affine, chunk, start, decoder)
    if view.conjugate and chunk.dtype.kind == "c":
        chunk = np.conjugate(chunk, out=decoder.buffer("conjugate", chunk.dtype.str, chunk.size))
    if view.negative:
        chunk = np.negative(chunk, out=decoder.buffer("negative", chunk.dtype.str, chunk.size))
    return chunk


def dequantized(codes: Array, zero_points: Array, scales: Array, decoder: Decoder) -> Array:
    """(code - zero point) * scale, one each or one for all, rounded to float32 where torch rounds."""
    out = decoder.buffer("dequantized", "f4", codes.size).reshape(codes.shape)
    with np.errstate(all="ignore"):
        np.subtract(codes, zero_points, out=out, dtype=np.float64, casting="same_kind")
        return np.multiply(out, scales.astype(np.float32), out=out)


def _dequantized(view: Strided, affine: Affine, chunk: Array, start: int, decoder: Decoder) -> Array:
    if affine.axis is None:
        return dequantized(chunk, affine.zero_points, affine.scales, decoder)
    if not 0 <= affine.axis < len(view.shape):
        raise UnreadableError(f"quantized along axis {affine.axis} of {len(view.shape)}")
    channels, inner = view.shape[affine.axis], prod(view.shape[affine.axis + 1 :])
    if affine.scales.size != channels or affine.zero_points.size not in (1, channels):
        raise UnreadableError(f"{affine.scales.size} scales for {channels} channels")
    index = np.arange(start, start + chunk.size) // inner % channels
    zero_points = affine.zero_points[index] if affine.zero_points.size > 1 else affine.zero_points
    return dequantized(chunk, zero_points, affine.scales[index], decoder)


def all_values(data: TensorData, what: str = "tensor") -> Any:
    """Every value of a small tensor as one flat numpy array. For bigger ones use `opened` and `values`."""
    with opened(data, what) as view:
        chunks = [chunk.copy() for chunk in values(view)]
    return np.concatenate(chunks) if chunks else np.empty(0)
