"""One block of stored elements -> its `Facts`: what of it is no number, its range, whether all is one, its digest.

Floats are not decoded for it: without its sign, the bits of an IEEE float are an integer in the order of the numbers,
NaN above infinity above all others, and denormals below the smallest normal one. One-byte types are counted by code.
`_native.c` does the same in one pass where it was compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np

from statecli.values.elements import COMPLEX, SMALL_FLOATS, Array, Decoder, Element, element, worth_of_codes

try:
    from statecli.values import _native
except ImportError:  # there was no compiler when statecli was installed
    _native = None  # type: ignore[assignment]
else:
    if not hasattr(_native, "floats"):  # it was built before an update of the source: `pip install -e .` builds it anew
        _native = None  # type: ignore[assignment]

#: Bytes of a block: with what is made of it, it stays in a core's second-level cache.
BLOCK = 512 << 10

#: Signed integer of the same size, bits of infinity, bits of the smallest normal number.
FLOATS = {
    "float64": ("i8", 0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000),
    "float32": ("i4", 0x7F80_0000, 0x0080_0000),
    "float16": ("i2", 0x7C00, 0x0400),
    "bfloat16": ("i2", 0x7F80, 0x0080),
}
#: Complex types -> the type of their two parts.
PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


class Facts(msgspec.Struct, frozen=True, gc=False):
    """What is known of some elements. Facts of pieces of a tensor add up, in any order.

    `inf` counts both signs, `minus_inf` one; a complex element is NaN, infinite or denormal where a part of it is.
    `low` and `high` are of the finite values, None where there is none or they have no order. `only` is the element,
    as it is stored, that all are bit for bit, None where they differ. Pieces whose elements are equal have equal
    `digest`; None where it is not known. `reason` says why the elements were not read as numbers, `damaged` that their
    bytes could not be read at all. `typical` is the size of a float that is near the largest: without the three largest
    of a sample of each block, and the largest of all blocks; None where it is not known.
    """

    elements: int = 0
    nan: int = 0
    inf: int = 0
    minus_inf: int = 0
    zeros: int = 0
    denormal: int = 0
    low: float | int | None = None
    high: float | int | None = None
    only: bytes | None = None
    digest: int | None = 0
    reason: str | None = None
    damaged: bool = False
    typical: float | None = None

    def plus(self, other: Facts) -> Facts:
        """Both together."""
        if not other.elements or not self.elements:
            return other if not self.elements else self
        return Facts(
            self.elements + other.elements,
            self.nan + other.nan,
            self.inf + other.inf,
            self.minus_inf + other.minus_inf,
            self.zeros + other.zeros,
            self.denormal + other.denormal,
            min((one for one in (self.low, other.low) if one is not None), default=None),
            max((one for one in (self.high, other.high) if one is not None), default=None),
            self.only if self.only == other.only else None,
            None if self.digest is None or other.digest is None else self.digest + other.digest & MASK,
            self.reason or other.reason,
            self.damaged or other.damaged,
            max((one for one in (self.typical, other.typical) if one is not None), default=None),
        )

    def times(self, count: int) -> Facts:
        """The same elements `count` times over, in an order that is not known."""
        if count == 1:
            return self
        names = ("elements", "nan", "inf", "minus_inf", "zeros", "denormal")
        return msgspec.structs.replace(self, digest=None, **{name: getattr(self, name) * count for name in names})


def in_block(dtype: str) -> int:
    """Elements in a block of that type: where blocks begin depends on nothing else."""
    kind = element(dtype)
    return max(BLOCK // kind.size, 1) if kind else BLOCK


def stored(items: Array, dtype: str, block: int, decoder: Decoder) -> Facts:
    """Of flat stored items in native byte order, all of the block of that number or its beginning."""
    kind = element(dtype)
    assert kind is not None  # noqa: S101 - it has been read
    found = _numbers(items, dtype, kind, decoder)
    return _with_bits(found, items, kind, block)


def worth(items: Array, dtype: str, values: Array, block: int) -> Facts:
    """The same where the items are worth other `values`: scaled, conjugated, negated. float, integer or complex."""
    kind = element(dtype)
    assert kind is not None  # noqa: S101 - it has been read
    name = values.dtype.name
    found = _of_complex(values, name) if values.dtype.kind == "c" else _of_plain(values, name)
    return _with_bits(found, items, kind, block)


def bits(items: Array, dtype: str, block: int) -> Facts:
    """What can be said of elements that are no numbers."""
    kind = element(dtype)
    assert kind is not None  # noqa: S101 - it has been read
    return _with_bits(Facts(items.size // kind.items), items, kind, block)


# --- numbers -------------------------------------------------------------------------------------------------------


def _numbers(items: Array, dtype: str, kind: Element, decoder: Decoder) -> Facts:
    if dtype in FLOATS:
        return _of_floats(items, dtype)
    if dtype in COMPLEX:
        return _of_complex(items, dtype)
    if kind.table is not None or items.itemsize == 1:
        return _of_codes(items, dtype, decoder)
    return _of_plain(items, items.dtype.name)


def _of_plain(values: Array, name: str) -> Facts:
    if name in FLOATS:
        return _of_floats(values, name)
    zeros = values.size - int(np.count_nonzero(values))
    return Facts(values.size, zeros=zeros, low=values.min().item(), high=values.max().item())


def _of_floats(items: Array, dtype: str) -> Facts:
    signed, infinity, normal = FLOATS[dtype]
    raw = items.view(signed)
    if _native is not None:
        counts = _native.floats(raw, raw.itemsize, infinity, normal)
    else:
        counts = _floats(raw, infinity, normal)
    nan, inf, minus_inf, zeros, tiny, low, high = counts
    found = Facts(raw.size, nan, inf, minus_inf, zeros, tiny - zeros)
    if nan + inf == raw.size:
        return found
    typical = _typical(raw, infinity, dtype)
    return msgspec.structs.replace(found, low=_number(low, dtype), high=_number(high, dtype), typical=typical)


#: Elements of a block from which on a sample of it is looked at, one in SAMPLE_STRIDE: a prime, so that the sample does
#: not consist of a few columns of a matrix.
SAMPLED, SAMPLE_STRIDE = 4096, 61
#: The largest values of a sample that do not count.
SPARED = 3


def _typical(raw: Array, infinity: int, dtype: str) -> float | None:
    """The size of the fourth largest finite value of a sample; None where there are fewer than four."""
    sample = raw[:: SAMPLE_STRIDE if raw.size >= SAMPLED else 1] & np.iinfo(raw.dtype).max
    sample = sample[sample < infinity]
    if sample.size <= SPARED:
        return None
    place = sample.size - 1 - SPARED
    return _number(int(np.partition(sample, place)[place]), dtype)


def _floats(raw: Array, infinity: int, normal: int) -> tuple[int, ...]:
    """How many are NaN, infinite, -inf, zero, below the smallest normal; bits of the lowest and highest finite one."""
    top = np.iinfo(raw.dtype)
    size = raw & top.max
    sizes = [int(np.count_nonzero(one)) for one in (size > infinity, size == infinity, size == 0, size < normal)]
    minus = int(np.count_nonzero(raw == raw.dtype.type(infinity + top.min))) if sizes[1] else 0
    # Negative numbers in the order of their sizes are in the wrong one.
    order = raw ^ ((raw >> (8 * raw.itemsize - 1)) & top.max)
    if sizes[0] or sizes[1]:
        order = order[size < infinity]
    low, high = (int(order.min()), int(order.max())) if order.size else (0, 0)
    return (sizes[0], sizes[1], minus, sizes[2], sizes[3], _unordered(low, top), _unordered(high, top))


def _unordered(order: int, top: Any) -> int:
    return order if order >= 0 else order ^ int(top.max)


def _number(bits: int, dtype: str) -> float:
    """What the bits of a float, as a signed integer, are worth; 0.0 for both zeros."""
    kind = element(dtype)
    assert kind is not None  # noqa: S101 - one of FLOATS
    item = np.array([bits], FLOATS[dtype][0]).view(kind.stored)
    return float(Decoder()(item, kind)[0]) + 0.0


def _of_complex(items: Array, dtype: str) -> Facts:
    part = PARTS[dtype]
    signed, infinity, normal = FLOATS[part]
    raw = items.view(signed)
    size = (raw & np.iinfo(raw.dtype).max).reshape(-1, 2)
    either = (size > infinity, size == infinity, (size > 0) & (size < normal))
    nan, inf, denormal = (int(np.count_nonzero(one.any(axis=1))) for one in either)
    zeros = int(np.count_nonzero((size == 0).all(axis=1)))
    return Facts(len(size), nan, inf, 0, zeros, denormal)


def _of_codes(items: Array, dtype: str, decoder: Decoder) -> Facts:
    if _native is not None:
        counts: Array = np.frombuffer(_native.codes(items.view(np.uint8)), np.int64)
    else:
        counts = np.zeros(256, np.int64)
        decoder.count(items, counts)
    numbers = worth_of_codes(dtype)
    counts, numbers = np.repeat(counts, numbers.size // counts.size), numbers.reshape(-1)
    finite = numbers[(counts > 0) & np.isfinite(numbers)]
    masks = (np.isnan(numbers), np.isinf(numbers), numbers == -np.inf, numbers == 0, _denormal(dtype, numbers))
    nan, inf, minus_inf, zeros, denormal = (int(counts[mask].sum()) for mask in masks)
    exact = float if "float" in dtype else int
    low, high = (exact(finite.min() + 0.0), exact(finite.max() + 0.0)) if finite.size else (None, None)
    return Facts(int(counts.sum()), nan, inf, minus_inf, zeros, denormal, low, high)


def _denormal(dtype: str, numbers: Array) -> Array:
    exponents = SMALL_FLOATS.get(dtype.removesuffix("_x2"))
    smallest = 2.0 ** (1 - exponents[2]) if exponents else 0.0
    return np.asarray((numbers != 0) & (np.abs(numbers) < smallest))


# --- bits ----------------------------------------------------------------------------------------------------------

#: The digest of a block is the NH of UMAC (RFC 4418), 1 KiB at a time in eight lanes, rows and lanes joined by a
#: polynomial modulo 2 ** 64. Its keys are no secret: two tensors that have it in common are looked at again.
MASK = (1 << 64) - 1
ROW, LANES = 128, 8
GOLDEN = 0x9E37_79B9_7F4A_7C15


def mixed(number: int) -> int:
    """Every bit of the result depends on every bit of the number: the finalizer of SplitMix64 (Steele et al. 2014)."""
    number = (number ^ number >> 30) * 0xBF58_476D_1CE4_E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D0_49BB_1331_11EB & MASK
    return number ^ number >> 31


def _with_bits(found: Facts, items: Array, kind: Element, block: int) -> Facts:
    raw = items.view(np.uint8)
    size = kind.size
    digest = _native.digest(raw) if _native is not None else _digest(raw)
    first = raw[:size].tobytes()
    # Where two elements differ, the first two mostly do.
    is_one = raw[size : 2 * size].tobytes() in (first, b"") and np.array_equal(raw[size:], raw[:-size])
    total = mixed(digest + (block + 1) * GOLDEN + raw.size & MASK)
    return msgspec.structs.replace(found, only=first if is_one else None, digest=total)


@cache
def _keys() -> tuple[Array, Array, Array]:
    """Of the words' lower and upper halves; of the lanes."""
    words = np.array([mixed(n * GOLDEN & MASK) for n in range(1, ROW + 1)], np.uint64)
    lanes = np.array([mixed(n * GOLDEN & MASK) | 1 for n in range(ROW + 1, ROW + LANES + 1)], np.uint64)
    half = np.uint64(0xFFFF_FFFF)
    return (words & half).reshape(-1, LANES), (words >> np.uint64(32)).reshape(-1, LANES), lanes


@cache
def _powers(rows: int) -> Array:
    """The golden number to the power of rows - 1, ..., 1, 0."""
    found = np.full(rows, GOLDEN, np.uint64)
    found[-1:] = 1
    return np.ascontiguousarray(np.multiply.accumulate(found[::-1])[::-1])


def _digest(raw: Array) -> int:
    words = np.zeros(-(-raw.size // (8 * ROW)) * ROW, np.uint64)
    words.view(np.uint8)[: raw.size] = raw
    lower, upper, lanes = _keys()
    half = np.uint64(0xFFFF_FFFF)
    rows = words.reshape(-1, ROW // LANES, LANES)
    products = ((rows & half) + lower & half) * ((rows >> np.uint64(32)) + upper & half)
    sums = products.sum(axis=1, dtype=np.uint64)
    return int(((sums * _powers(len(sums))[:, None]).sum(axis=0, dtype=np.uint64) * lanes).sum(dtype=np.uint64))
