"""The compiled kernel against numpy in float64: every type, tolerance, tail, alignment and special value."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from statecli.values import compiled_kernel, kernels
from statecli.values.compiled_kernel import native
from statecli.values.delta import CompareOptions
from statecli.values.elements import Decoder, require_element

pytestmark = pytest.mark.skipif(native is None, reason="no compiled kernel")

TYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
#: Types whose sums the kernel makes in float32: 8 terms, each with the error of its product.
NARROW = frozenset(TYPES) - {"int32", "uint32", "int64", "uint64", "float64", "complex64", "complex128"}


def tally_by_numpy(before, after, types, options):
    """The tally of the decoded values, computed in float64."""
    kinds = [require_element(dtype) for dtype in types]
    first, second = (Decoder()(block, kind).copy() for block, kind in zip((before, after), kinds, strict=True))
    first, second = (block.astype(np.float64) if block.dtype == np.float32 else block for block in (first, second))
    changed = kernels.compare_bits(before, after, kinds[0].items) if options.bitwise else None
    return kernels.tally_values(first, second, options, Decoder(), changed)


def assert_same(before, after, types, options):
    """Check the kernel's counts and sums against numpy's; return False if the kernel leaves the block to numpy."""
    stored = compiled_kernel.tally_stored(before, after, types, options)
    if stored is None:
        return False
    expected = tally_by_numpy(before, after, types, options)
    assert stored[:3] == expected[:3], (types, options)
    assert (stored.nan_before, stored.left_out, stored.lost) == (expected.nan_before, expected.left_out, expected.lost)
    tolerance = 6e-7 if NARROW.issuperset(types) else 1e-13
    assert stored.max_abs == pytest.approx(expected.max_abs, rel=2e-7 if tolerance > 1e-9 else 1e-15)
    for name in ("sum_abs", "squares", "before", "after"):
        assert getattr(stored, name).to_float() == pytest.approx(getattr(expected, name).to_float(), rel=tolerance), (
            name
        )
    scale = math.sqrt(expected.before.to_float() * expected.after.to_float())
    assert stored.product.to_float() == pytest.approx(expected.product.to_float(), abs=tolerance * scale)
    return True


def draw_block(dtype, rng, count, *, special=False):
    """Return stored elements of a type: ordinary values, or arbitrary bits if `special`."""
    stored = np.dtype(require_element(dtype).stored)
    if special or dtype in ("bool", "int8", "uint8", "int16", "uint16"):
        block = np.frombuffer(rng.bytes(count * stored.itemsize), stored).copy()
        if dtype == "bool" and not special:
            block &= 1
        return block
    if stored.kind in "iu" and not dtype.startswith(("float", "bfloat")):
        info = np.iinfo(stored)
        return rng.integers(info.min, info.max, count, stored, endpoint=True)
    numbers = rng.standard_normal(count) * 10.0 ** rng.integers(-2, 2)
    if stored.kind == "c":
        return (numbers + 1j * rng.standard_normal(count)).astype(stored)
    if dtype in ("float32", "float64"):
        return numbers.astype(stored)
    if dtype == "float16":
        return numbers.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes = rng.integers(0, 0x70, count, np.uint8) | (rng.integers(0, 2, count, np.uint8) << 7)
    return np.where(codes == 0x80, 0, codes).astype(np.uint8)  # not NaN in any of them


#: Tails of rows and of lanes, and a block of many rows.
COUNTS = (1, 7, 16, 127, 128, 129, 1000, 70_001)
OPTIONS = (
    CompareOptions(),
    CompareOptions(bitwise=True),
    CompareOptions(atol=0.25),
    CompareOptions(rtol=1e-2),
    CompareOptions(atol=1e-6, rtol=1e-6),
    CompareOptions(atol=3.0, rtol=2.0),
)


#: Types that the kernel compares only by value: their bits are left to numpy.
COMPARED_BY_VALUE = {"bool", "float64", "complex64", "complex128"}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_kernel_equals_numpy_for_each_type_and_tolerance(dtype, count):
    """Some blocks have few changed elements, or differences close to the tolerance."""
    rng = np.random.default_rng(count)
    before, after = draw_block(dtype, rng, count), draw_block(dtype, rng, count)
    few = before.copy()
    few[-1:] = after[-1:]
    for options, other in itertools.product(OPTIONS, (after, few, before)):
        is_compared = assert_same(before, other, (dtype, dtype), options)
        assert bool(is_compared) != (options.bitwise and dtype in COMPARED_BY_VALUE), options


@pytest.mark.parametrize("before_type", TYPES)
def test_kernel_equals_numpy_for_each_pair_of_types(before_type):
    """Different types are compared by value; 64-bit integers only with the same type, complex only with complex."""
    rng = np.random.default_rng(5)
    before = draw_block(before_type, rng, 300)
    for after_type in TYPES:
        after = draw_block(after_type, rng, 300)
        for options in (CompareOptions(), CompareOptions(atol=0.5, rtol=1e-3)):
            assert_same(before, after, (before_type, after_type), options)
    with pytest.raises(ValueError, match="not compared here"):
        native.tally(bytes(64), bytes(64), "int64", "uint64", False, 0.0, 0.0)
    with pytest.raises(ValueError, match="not compared here"):
        native.tally(bytes(64), bytes(64), "complex64", "float64", False, 0.0, 0.0)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TYPES), st.integers(0, 2**32), st.sampled_from(OPTIONS), st.integers(1, 300))
def test_kernel_equals_numpy_for_any_bits(dtype, seed, options, count):
    """NaN, infinities, -0.0, denormal and extreme numbers: the kernel is right, or leaves the block to numpy."""
    rng = np.random.default_rng(seed)
    before = draw_block(dtype, rng, count, special=True)
    after = before.copy()
    where = rng.random(count) < rng.random()
    after[where] = draw_block(dtype, rng, count, special=True)[where]
    assert_same(before, after, (dtype, dtype), options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1e-44, 2e-39, 3e-38, 1e25, 3e38])
def test_squares_beyond_float32_are_summed_in_float64(dtype, options, size):
    """Squares or their sums overflow or vanish in float32; zeros of either sign need no second pass."""
    bits = np.random.default_rng(1).standard_normal(300).clip(-1, 1).astype(np.float32)
    for numbers in (bits * np.float32(size), np.where(np.arange(300) == 7, np.float32(size), np.float32(-0.0))):
        before = numbers if dtype == "float32" else (numbers.view(np.uint32) >> 16).astype(np.uint16)
        after = before.copy()
        after[::3] = 0
        for sides in ((before, after), (after, before), (before, before)):
            assert assert_same(*sides, (dtype, dtype), options)


@pytest.mark.parametrize("dtype", TYPES)
def test_kernel_reads_blocks_at_unaligned_addresses(dtype):
    """Elements of a mapped file may lie at an odd byte."""
    rng = np.random.default_rng(7)
    before, after = draw_block(dtype, rng, 500), draw_block(dtype, rng, 500)
    expected = compiled_kernel.tally_stored(before, after, (dtype, dtype))
    shifted = [np.frombuffer(b"x" + block.tobytes(), np.uint8)[1:].view(block.dtype) for block in (before, after)]
    assert compiled_kernel.tally_stored(*shifted, (dtype, dtype)) == expected


@pytest.mark.parametrize(
    ("dtype", "before", "after", "gap"),
    [
        ("int64", -(2**63), 2**63 - 1, 2.0**64),
        ("int64", 2**62, 2**62 + 1, 1.0),
        ("uint64", 0, 2**64 - 1, 2.0**64),
        ("uint64", 2**63, 2**63 + 1, 1.0),
        ("int64", 0, 2**53 + 1, 2.0**53),
        ("uint64", 0, 2**53 + 3, 2.0**53 + 4),
    ],
)
def test_differences_of_64_bit_integers_are_rounded_once(dtype, before, after, gap):
    """The integers have no exact float64, but neighbours differ by 1."""
    first, second = (np.array([value] * 3, require_element(dtype).stored) for value in (before, after))
    stored = compiled_kernel.tally_stored(first, second, (dtype, dtype))
    assert (stored.max_abs, stored.changed) == (gap, 3)
    assert compiled_kernel.tally_stored(first, second, (dtype, dtype), CompareOptions(atol=gap)).changed == 0
    assert compiled_kernel.tally_stored(first, second, (dtype, dtype), CompareOptions(atol=gap * 0.999)).changed == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int16", "float64", "complex64"])
def test_an_element_at_the_tolerance_is_compared_in_float64(dtype):
    """A tolerance equal to the difference makes the elements equal; the next smaller float64 does not."""
    kind = require_element(dtype).stored
    values = {"bfloat16": (0x3F80, 0x3F90), "float16": (0x3C00, 0x3C10)}.get(dtype, (1, 3))
    first, second = (np.full(200, value, kind) for value in values)
    gap = compiled_kernel.tally_stored(first, second, (dtype, dtype)).max_abs
    for atol, changed in ((gap, 0), (math.nextafter(gap, 0), 200), (math.nextafter(gap, 9), 0)):
        stored = compiled_kernel.tally_stored(first, second, (dtype, dtype), CompareOptions(atol=atol))
        assert stored.changed == changed, atol
