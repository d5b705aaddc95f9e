"""Compute the `Facts` of a block of stored elements: counts of NaN and infinities, range, constancy, digest.

Floats need not be decoded: without the sign bit, the bits of IEEE floats, read as integers, have the order of the
numbers. Denormals are below the smallest normal number, and NaN is above infinity. One-byte types are counted by code.
`_native.c`, if compiled, does the same in a single pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np

from statecli.values.compiled_kernel import native as _native
from statecli.values.elements import (
    COMPLEX,
    COMPLEX_PARTS,
    SMALL_FLOATS,
    Array,
    Decoder,
    Element,
    code_values,
    find_element,
    require_element,
)
from statecli.values.summary import DIGEST_MASK, Facts

#: Size of a block in bytes: with its intermediate arrays it fits a core's second-level cache.
BLOCK_BYTES = 512 << 10

#: Float types -> signed integer of equal size, bits of infinity, bits of the smallest normal number.
FLOAT_LAYOUTS = {
    "float64": ("i8", 0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000),
    "float32": ("i4", 0x7F80_0000, 0x0080_0000),
    "float16": ("i2", 0x7C00, 0x0400),
    "bfloat16": ("i2", 0x7F80, 0x0080),
}


def count_block_elements(dtype: str) -> int:
    """Return the number of elements per block of a dtype. Blocks begin at multiples of this number."""
    element = find_element(dtype)
    return max(BLOCK_BYTES // element.size, 1) if element else BLOCK_BYTES


def scan_stored(items: Array, dtype: str, block: int, decoder: Decoder) -> Facts:
    """Return the `Facts` about a block of stored items in native byte order. `block`: number of the block."""
    element = require_element(dtype)
    return _add_bits(_scan_numbers(items, dtype, element, decoder), items, element, block)


def scan_values(items: Array, dtype: str, values: Array, block: int) -> Facts:
    """Return the `Facts` about stored items whose `values` were scaled, negated or conjugated."""
    name = values.dtype.name
    facts = _scan_complex(values, name) if values.dtype.kind == "c" else _scan_plain(values, name)
    return _add_bits(facts, items, require_element(dtype), block)


def scan_bits(items: Array, dtype: str, block: int) -> Facts:
    """Return the `Facts` about elements of a dtype that is not numeric."""
    element = require_element(dtype)
    return _add_bits(Facts(items.size // element.items), items, element, block)


# --- numbers -------------------------------------------------------------------------------------------------------


def _scan_numbers(items: Array, dtype: str, element: Element, decoder: Decoder) -> Facts:
    if dtype in FLOAT_LAYOUTS:
        return _scan_floats(items, dtype)
    if dtype in COMPLEX:
        return _scan_complex(items, dtype)
    if element.table is not None or items.itemsize == 1:
        return _scan_codes(items, dtype, decoder)
    return _scan_plain(items, items.dtype.name)


def _scan_plain(values: Array, name: str) -> Facts:
    if name in FLOAT_LAYOUTS:
        return _scan_floats(values, name)
    zeros = values.size - int(np.count_nonzero(values))
    return Facts(values.size, zeros=zeros, low=values.min().item(), high=values.max().item())


def _scan_floats(items: Array, dtype: str) -> Facts:
    signed, infinity, normal = FLOAT_LAYOUTS[dtype]
    raw = items.view(signed)
    if _native is not None:
        counts = _native.floats(raw, raw.itemsize, infinity, normal)
    else:
        counts = _count_floats(raw, infinity, normal)
    nan, inf, minus_inf, zeros, tiny, low, high = counts
    facts = Facts(raw.size, nan, inf, minus_inf, zeros, tiny - zeros)
    if nan + inf == raw.size:
        return facts
    typical = _measure_typical_size(raw, infinity, dtype)
    return msgspec.structs.replace(
        facts, low=_decode_float(low, dtype), high=_decode_float(high, dtype), typical=typical
    )


#: Minimum number of elements of a block that is sampled, and the distance of the samples: a prime, so that they do not
#: come from a few columns of a matrix.
MIN_ELEMENTS_TO_SAMPLE, SAMPLE_STRIDE = 4096, 61
#: Number of largest values of a sample that are skipped.
SKIPPED_LARGEST_VALUES = 3


def _measure_typical_size(raw: Array, infinity: int, dtype: str) -> float | None:
    """Return the fourth largest absolute value among the finite values of a sample, or None for fewer than four."""
    sample = raw[:: SAMPLE_STRIDE if raw.size >= MIN_ELEMENTS_TO_SAMPLE else 1] & np.iinfo(raw.dtype).max
    sample = sample[sample < infinity]
    if sample.size <= SKIPPED_LARGEST_VALUES:
        return None
    index = sample.size - 1 - SKIPPED_LARGEST_VALUES
    return _decode_float(int(np.partition(sample, index)[index]), dtype)


def _count_floats(raw: Array, infinity: int, normal: int) -> tuple[int, ...]:
    """Count NaN, inf, -inf, zeros and denormals; find the bits of the lowest and the highest finite value."""
    top = np.iinfo(raw.dtype)
    size = raw & top.max
    sizes = [int(np.count_nonzero(mask)) for mask in (size > infinity, size == infinity, size == 0, size < normal)]
    minus = int(np.count_nonzero(raw == raw.dtype.type(infinity + top.min))) if sizes[1] else 0
    # Reverse the order of negative numbers, because their bits are in the order of absolute values.
    order = raw ^ ((raw >> (8 * raw.itemsize - 1)) & top.max)
    if sizes[0] or sizes[1]:
        order = order[size < infinity]
    low, high = (int(order.min()), int(order.max())) if order.size else (0, 0)
    return (sizes[0], sizes[1], minus, sizes[2], sizes[3], _restore_bits(low, top), _restore_bits(high, top))


def _restore_bits(order: int, top: Any) -> int:
    return order if order >= 0 else order ^ int(top.max)


def _decode_float(bits: int, dtype: str) -> float:
    """Return the float that has the given bits (a signed integer). Both zeros become 0.0."""
    element = require_element(dtype)
    item = np.array([bits], FLOAT_LAYOUTS[dtype][0]).view(element.stored)
    return float(Decoder()(item, element)[0]) + 0.0


def _scan_complex(items: Array, dtype: str) -> Facts:
    part = COMPLEX_PARTS[dtype]
    signed, infinity, normal = FLOAT_LAYOUTS[part]
    raw = items.view(signed)
    size = (raw & np.iinfo(raw.dtype).max).reshape(-1, 2)
    masks = (size > infinity, size == infinity, (size > 0) & (size < normal))
    nan, inf, denormal = (int(np.count_nonzero(mask.any(axis=1))) for mask in masks)
    zeros = int(np.count_nonzero((size == 0).all(axis=1)))
    return Facts(len(size), nan, inf, 0, zeros, denormal)


def _scan_codes(items: Array, dtype: str, decoder: Decoder) -> Facts:
    if _native is not None:
        counts: Array = np.frombuffer(_native.codes(items.view(np.uint8)), np.int64)
    else:
        counts = np.zeros(256, np.int64)
        decoder.count_codes(items, counts)
    values = code_values(dtype)
    counts, values = np.repeat(counts, values.size // counts.size), values.reshape(-1)
    finite = values[(counts > 0) & np.isfinite(values)]
    masks = (np.isnan(values), np.isinf(values), values == -np.inf, values == 0, _mask_denormals(dtype, values))
    nan, inf, minus_inf, zeros, denormal = (int(counts[mask].sum()) for mask in masks)
    exact = float if "float" in dtype else int
    low, high = (exact(finite.min() + 0.0), exact(finite.max() + 0.0)) if finite.size else (None, None)
    return Facts(int(counts.sum()), nan, inf, minus_inf, zeros, denormal, low, high)


def _mask_denormals(dtype: str, numbers: Array) -> Array:
    kind = SMALL_FLOATS.get(dtype.removesuffix("_x2"))
    smallest = 2.0 ** (1 - kind.bias) if kind else 0.0
    return np.asarray((numbers != 0) & (np.abs(numbers) < smallest))


# --- bits ----------------------------------------------------------------------------------------------------------

#: The digest of a block is the NH of UMAC (RFC 4418) over rows of 1 KiB in eight lanes; rows and lanes are joined by a
#: polynomial modulo 2 ** 64. The keys are public, so equal digests of two tensors are confirmed by SHA-256.
ROW_WORDS, LANES = 128, 8
GOLDEN = 0x9E37_79B9_7F4A_7C15


def mix_bits(number: int) -> int:
    """Mix the bits, so that each depends on all bits of `number`: SplitMix64's finalizer (Steele et al. 2014)."""
    number = (number ^ number >> 30) * 0xBF58_476D_1CE4_E5B9 & DIGEST_MASK
    number = (number ^ number >> 27) * 0x94D0_49BB_1331_11EB & DIGEST_MASK
    return number ^ number >> 31


def _add_bits(facts: Facts, items: Array, element: Element, block: int) -> Facts:
    raw = items.view(np.uint8)
    size = element.size
    digest = _native.digest(raw) if _native is not None else _hash_block(raw)
    first = raw[:size].tobytes()
    # Compare the first two elements first, because they differ in most tensors.
    is_constant = raw[size : 2 * size].tobytes() in (first, b"") and np.array_equal(raw[size:], raw[:-size])
    total = mix_bits(digest + (block + 1) * GOLDEN + raw.size & DIGEST_MASK)
    return msgspec.structs.replace(facts, only=first if is_constant else None, digest=total)


@cache
def _compute_hash_keys() -> tuple[Array, Array, Array]:
    """Return the keys of the digest: for lower halves of words, for upper halves, and for the eight lanes of a row."""
    words = np.array([mix_bits(n * GOLDEN & DIGEST_MASK) for n in range(1, ROW_WORDS + 1)], np.uint64)
    lanes = np.array(
        [mix_bits(n * GOLDEN & DIGEST_MASK) | 1 for n in range(ROW_WORDS + 1, ROW_WORDS + LANES + 1)], np.uint64
    )
    half = np.uint64(0xFFFF_FFFF)
    return (words & half).reshape(-1, LANES), (words >> np.uint64(32)).reshape(-1, LANES), lanes


@cache
def _compute_golden_powers(rows: int) -> Array:
    """Return the powers of `GOLDEN` (modulo 2 ** 64) with the exponents rows - 1, ..., 1, 0."""
    factors = np.full(rows, GOLDEN, np.uint64)
    factors[-1:] = 1
    return np.ascontiguousarray(np.multiply.accumulate(factors[::-1])[::-1])


def _hash_block(raw: Array) -> int:
    words = np.zeros(-(-raw.size // (8 * ROW_WORDS)) * ROW_WORDS, np.uint64)
    words.view(np.uint8)[: raw.size] = raw
    lower, upper, lanes = _compute_hash_keys()
    half = np.uint64(0xFFFF_FFFF)
    rows = words.reshape(-1, ROW_WORDS // LANES, LANES)
    products = ((rows & half) + lower & half) * ((rows >> np.uint64(32)) + upper & half)
    sums = products.sum(axis=1, dtype=np.uint64)
    return int(
        ((sums * _compute_golden_powers(len(sums))[:, None]).sum(axis=0, dtype=np.uint64) * lanes).sum(dtype=np.uint64)
    )
