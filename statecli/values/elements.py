"""Decode stored bytes to numbers, for every element type that torch saves.

Each type is decoded to the smallest float type that represents its values exactly (half, bfloat16, float8 and float4 to
float32; float64 unchanged). Integers are unchanged; complex32 becomes complex64. One- and two-byte floats are looked up
in a table of all their values, which is built here from the definition of the format:

    float8_e4m3fn, e5m2          OCP 8-bit Floating Point Specification (OFP8), revision 1.0
    float8_e4m3fnuz, e5m2fnuz    "8-bit Numerical Formats for Deep Neural Networks", arXiv 2206.02915: no -0, no inf
    float8_e8m0fnu, float4_e2m1  OCP Microscaling Formats (MX) Specification, revision 1.0
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from statecli.core.dtypes import VALUES_PER_BYTE
from statecli.core.errors import UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.lazy_pattern import compile_on_use

Array = npt.NDArray[Any]

#: Values of at least this size, or at most its inverse, are scaled before they are squared in float64. Between these
#: limits, the sum of 2 ** 22 squared differences is finite and not 0.
MAX_UNSCALED = 2.0**500

#: Types whose stored bits numpy can interpret: dtype -> numpy's name.
NUMPY_TYPES: dict[str, str] = {
    "float64": "f8",
    "float32": "f4",
    "complex128": "c16",
    "complex64": "c8",
    "int64": "i8",
    "int32": "i4",
    "int16": "i2",
    "int8": "i1",
    "uint64": "u8",
    "uint32": "u4",
    "uint16": "u2",
    "uint8": "u1",
    "qint32": "i4",
    "qint8": "i1",
    "quint8": "u1",
}


class SmallFloat(NamedTuple):
    """Bits and bias of a float type of at most eight bits, and its codes that are not numbers."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str


SMALL_FLOATS = {
    "float8_e4m3fn": SmallFloat(4, 3, 7, "all ones"),
    "float8_e5m2": SmallFloat(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": SmallFloat(4, 3, 8, "negative zero"),
    "float8_e5m2fnuz": SmallFloat(5, 2, 16, "negative zero"),
    "float4_e2m1fn": SmallFloat(2, 1, 1, "none"),
}

#: Types with several values in a byte, lowest bits first -> number of values. torch counts a byte of float4 as one
#: element.
_PACKED_VALUES: dict[str, int] = {**VALUES_PER_BYTE, "float4_e2m1fn_x2": 2}

#: Quantized types, whose values need a scale.
QUANTIZED = frozenset(["qint8", "quint8", "qint32", "quint4x2", "quint2x4"])

#: Complex types -> the type of their two parts.
COMPLEX_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
COMPLEX = frozenset(COMPLEX_PARTS)

#: Types without numbers (dtype -> numpy's name): whole elements can only be compared for equality.
OPAQUE_TYPES = {"bits8": "u1", "bits16": "u2", "bits1x8": "u1", "bits2x4": "u1", "bits4x2": "u1"}
#: Numpy types other than numbers. The name of a record type has its fields after the size.
_NOT_NUMERIC = compile_on_use(r"numpy (?:([SUV])([1-9][0-9]{0,8})(?: .*)?|[mM]8(?:\[\w+\])?)", re.DOTALL)
#: Types longdouble and clongdouble of numpy, which are compared by their bits.
_LONG_DOUBLE = compile_on_use(r"numpy (?:float(?:96|128)|complex(?:192|256))")


class Element(msgspec.Struct, frozen=True):
    """How an element type is stored and decoded.

    Attributes:
        stored: numpy's name of a stored item.
        items: Number of stored items of an element (2 for complex32).
        values: Number of values in a stored item (2 for float4).
        table: Value or values of each stored item; None if the item itself is the value, or if `shift` is set.
        shift: True for bfloat16, the upper half of a float32.
        half: True for float16 and complex32, which are mostly decoded without the table, because this is faster.
        numbers: False if items can be equal or different, but have no value.
    """

    stored: str
    items: int = 1
    values: int = 1
    table: Array | None = None
    shift: bool = False
    half: bool = False
    numbers: bool = True

    @property
    def size(self) -> int:
        """Size of an element in bytes, or of a stored item if an item contains several values."""
        return np.dtype(self.stored).itemsize * self.items


@cache
def find_element(dtype: str) -> Element | None:
    """Return how `dtype` is stored and decoded, or None if this is unknown, as for uint3."""
    if dtype in NUMPY_TYPES:
        return Element(NUMPY_TYPES[dtype])
    if dtype == "bfloat16":
        return Element("u2", shift=True)
    if dtype in ("float16", "complex32"):
        table = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
        return Element("u2", items=2 if dtype == "complex32" else 1, table=table, half=True)
    if dtype in _PACKED_VALUES:
        return Element("u1", values=_PACKED_VALUES[dtype], table=_build_packed_table(dtype))
    if dtype == "bool":
        # A stored byte other than 0 and 1 counts as true, with the value 1.
        return Element("u1", table=(np.arange(256) > 0).astype(np.float32))
    if dtype == "float8_e8m0fnu":
        return Element("u1", table=_build_exponent_table())
    if dtype in SMALL_FLOATS:
        return Element("u1", table=build_small_float_table(dtype))
    if dtype in OPAQUE_TYPES:
        return Element(OPAQUE_TYPES[dtype], numbers=False)
    if dtype in BLOCK_SIZES:
        return Element("u1", items=BLOCK_SIZES[dtype][1], numbers=False)
    text = _NOT_NUMERIC.fullmatch(dtype)
    if text and text[1] is None:
        return Element("u8", numbers=False)
    if text:
        return Element("u4" if text[1] == "U" else "u1", items=int(text[2]), numbers=False)
    if _LONG_DOUBLE.fullmatch(dtype):
        return Element("u1", items=int(re.sub(r"\D", "", dtype)) // 8, numbers=False)
    return None


def require_element(dtype: str) -> Element:
    """Return how `dtype` is stored and decoded. Raises UnreadableError if this is unknown."""
    element = find_element(dtype)
    if element is None:
        raise UnreadableError(f"statecli cannot read {dtype} elements as numbers")
    return element


@cache
def code_values(dtype: str) -> Array:
    """Return the float64 values of the 256 codes of a one-byte type. A packed type has several values per code."""
    kind = find_element(dtype)
    assert kind is not None and np.dtype(kind.stored).itemsize == 1  # noqa: S101, PT018 - callers choose the type
    if kind.table is not None:
        return kind.table.astype(np.float64)
    return np.arange(256).astype(np.uint8).view(kind.stored).astype(np.float64)


def build_small_float_table(name: str) -> Array:
    """Return all values of a float type of at most eight bits as float32, indexed by code."""
    exponent_bits, mantissa_bits, bias, special = SMALL_FLOATS[name]
    half = 1 << (exponent_bits + mantissa_bits)
    top = (1 << exponent_bits) - 1
    table = np.empty(2 * half, np.float32)
    for code in range(half):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        if special == "ieee" and exponent == top:
            value = float("nan") if mantissa else float("inf")
        table[code], table[code + half] = value, -value
    if special == "all ones":
        table[half - 1] = table[-1] = np.nan
    if special == "negative zero":
        table[half] = np.nan
    return table


def _build_exponent_table() -> Array:
    """Return the values of float8_e8m0fnu: 2 ** (code - 127), NaN for 255. The type has no zero, sign or infinity."""
    table = np.full(256, np.nan, np.float32)
    table[:255] = np.ldexp(np.float64(1), np.arange(255) - 127)
    return table


def _build_packed_table(dtype: str) -> Array:
    """Return the values that each of the 256 bytes packs, the lowest bits first."""
    count = _PACKED_VALUES[dtype]
    bits = 8 // count
    codes = (np.arange(256)[:, None] >> (bits * np.arange(count))) & ((1 << bits) - 1)
    if dtype == "float4_e2m1fn_x2":
        return np.ascontiguousarray(build_small_float_table("float4_e2m1fn")[codes])
    return np.ascontiguousarray(codes.astype(np.float32))


#: Mask for sign, exponent and mantissa of a float16 that was sign-extended to 32 bits and shifted left by 13.
_HALF_BITS = np.array(0x8FFFE000, np.uint32).view(np.int32)[()]


class Arena:
    """Block of memory for many buffers.

    numpy requests huge pages for arrays of four megabytes or more. Buffers on huge pages avoid misses of the page table
    and of the second-level cache, which cost a quarter of the time.
    """

    def __init__(self) -> None:
        self._memory = np.empty(8 << 20, np.uint8)
        self._used_bytes = 0

    def clear(self) -> None:
        """Free all memory of the arena for new arrays. New arrays may overwrite earlier arrays."""
        self._used_bytes = 0

    def take(self, size: int, dtype: str) -> Array:
        """Return an array of `size` items with arbitrary content. If the arena is full, the array gets new memory."""
        length = size * np.dtype(dtype).itemsize
        start = self._used_bytes
        if start + length > self._memory.size:
            return np.empty(size, dtype)
        self._used_bytes += -(-length // 64) * 64
        return self._memory[start : start + length].view(dtype)


class Decoder:
    """Decoder of blocks of stored items into flat arrays of values, in reused buffers.

    The result of `__call__` is valid until the next call. Without reuse, the work takes ten times as long, because the
    allocator maps and unmaps each temporary array.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self._buffers: dict[tuple[str, str], Array] = {}
        self._arena = arena

    def buffer(self, purpose: str, dtype: str, size: int) -> Array:
        """Return an array of `size` items with arbitrary content. Arrays for the same `purpose` share memory."""
        memory = self._buffers.get((purpose, dtype))
        if memory is None or memory.size < size:
            memory = self._arena.take(size, dtype) if self._arena else np.empty(size, dtype)
            self._buffers[purpose, dtype] = memory
        return memory[:size]

    def __call__(self, block: Array, kind: Element) -> Array:
        """Return the values of a flat block of aligned items in native byte order."""
        if kind.half:
            return self._decode_half(block, kind)
        if kind.table is not None:
            return self._look_up(block, kind)
        if kind.shift:
            wide = self._gather(block, "u4")
            np.left_shift(wide, 16, out=wide)
            return wide.view(np.float32)
        return block

    def _gather(self, block: Array, dtype: str) -> Array:
        out = self.buffer("gather", dtype, block.size)
        np.copyto(out.reshape(block.shape), block)
        return out

    def _decode_half(self, block: Array, kind: Element) -> Array:
        """Decode float16: move the exponent to its place in float32, then multiply by 2 ** 112, the bias difference.

        Subnormals are decoded correctly; a block with infinities or NaN is looked up in the table.
        """
        exponents = np.bitwise_and(block, np.uint16(0x7C00), out=self.buffer("exponents", "u2", block.size))
        if block.size and exponents.max() == 0x7C00:
            return self._look_up(block, kind)
        bits = self.buffer("half", "i4", block.size)
        np.copyto(bits, block.view(np.int16))
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, _HALF_BITS, out=bits)
        out: Array = bits.view(np.float32)
        np.multiply(out, np.float32(2.0**112), out=out)
        return out.view(np.complex64) if kind.items == 2 else out

    def count_codes(self, block: Array, counts: Array) -> None:
        """Count the codes in a block of one-byte items, and add the numbers to `counts`."""
        index = self._gather(block.view(np.uint8), np.dtype(np.intp).str)
        np.add(counts, np.bincount(index, minlength=counts.size), out=counts)

    def _look_up(self, block: Array, kind: Element) -> Array:
        assert kind.table is not None  # noqa: S101 - narrows the type
        index = self._gather(block, np.dtype(np.intp).str)
        out = self.buffer("look-up", "f4", index.size * kind.values)
        output_rows = out.reshape(index.size, kind.values) if kind.values > 1 else out
        # mode="clip", because "raise" makes numpy work in a temporary array; every index is inside the table.
        np.take(kind.table, index, axis=0, out=output_rows, mode="clip")
        return out.view(np.complex64) if kind.items == 2 else out
