"""Tally two blocks of values: count differing and nonfinite elements, and sum the differences.

`compiled_kernel` processes blocks in a single pass. Without it, numpy processes blocks whose sums float32 can represent
in reused buffers that fit a core's second-level cache. All other blocks are widened to float64.

Only ufuncs compute numpy's sums, so IEEE 754 and a fixed order of the terms determine every bit. BLAS (`dot`, `vecdot`)
and `einsum` may be faster, but their number of lanes depends on the processor or on their release.
"""

from __future__ import annotations

import math

import numpy as np

from statecli.values import compiled_kernel
from statecli.values.compiled_kernel import tally_stored
from statecli.values.delta import CompareOptions
from statecli.values.elements import MAX_UNSCALED, Array, Decoder
from statecli.values.tally import MIN_SQUARES, TERMS_PER_SUM, Tally, Wide


def kernel_name() -> str:
    """Return the name of the kernel that computes sums, "C" or "numpy".

    The sums of the two kernels differ in the last bits, but do not depend on the processor or on a release.
    """
    return "numpy" if compiled_kernel.native is None else "C"


def tally_values(
    before: Array,
    after: Array,
    options: CompareOptions,
    decoder: Decoder,
    changed_mask: Array | None = None,
    values: int = 1,
) -> Tally:
    """Return the `Tally` of two flat blocks of decoded values (float, integer or complex) of equal length.

    `changed_mask` replaces the comparison, because with `options.bitwise` only equal bits are equal. `values` is the
    number of values of an element. The blocks are not modified.
    """
    if not before.size:
        return Tally()
    with np.errstate(all="ignore"):
        if before.dtype == after.dtype == np.float32 and not (options.atol or options.rtol):
            if values > 1 and changed_mask is None:
                changed_mask = _any_in_element(before != after, values)
            tally = _tally_float32(before, after, decoder, changed_mask)
            if tally is not None:
                return tally
        kinds = before.dtype.kind + after.dtype.kind
        wide = np.complex128 if "c" in kinds else np.float64
        wide_before, wide_after = before.astype(wide), after.astype(wide)
        finite = np.isfinite(wide_before) & np.isfinite(wide_after)
        gap = (
            _compute_integer_gap(before, after)
            if "f" not in kinds and "c" not in kinds
            else _compute_gap(before, after, wide_before, wide_after, finite)
        )
        if changed_mask is None:
            changed_mask = _any_in_element(_find_changed(wide_before, wide_after, finite, gap, options), values)
        return _build_tally(wide_before, wide_after, finite, gap, changed_mask)


def tally_opaque(changed_mask: Array) -> Tally:
    """Return the `Tally` of elements whose dtype is not numeric. `changed_mask` is True for each changed element."""
    count = int(np.count_nonzero(changed_mask))
    return Tally(changed=count, first=int(changed_mask.argmax()) if count else None, left_out=changed_mask.size)


def tally_equal(block: Array, decoder: Decoder) -> Tally:
    """Return the `Tally` of a block that is equal in both tensors: its norm, and the count of nonfinite elements."""
    with np.errstate(all="ignore"):
        if block.dtype == np.float32 and compiled_kernel.native is not None:
            tally = tally_stored(block, block, ("float32", "float32"))
            if tally is not None:
                return tally
        elif block.dtype == np.float32:
            padded_rows = _pad_rows(block, decoder, "before")
            squares = _sum_squares(padded_rows, decoder)
            if MIN_SQUARES <= squares < np.inf or (squares == 0 and not block.any()):
                square = Wide(squares)
                return Tally(finite=block.size, before=square, after=square, product=square)
        wide = np.complex128 if block.dtype.kind == "c" else np.float64
        values = block.astype(wide)
        finite = np.isfinite(values)
        nan, inf, left_out = _count_not_finite(values, finite)
        finite_values = values[finite].view(np.float64)
        square = _sum_products(*_scale_down(finite_values), *_scale_down(finite_values))
        return Tally(
            finite=int(np.count_nonzero(finite)),
            before=square,
            after=square,
            product=square,
            nan_before=nan,
            nan_after=nan,
            inf_before=inf,
            inf_after=inf,
            left_out=left_out,
        )


# --- float32, fast -----------------------------------------------------------------------------------------------


def _tally_float32(before: Array, after: Array, decoder: Decoder, changed_mask: Array | None) -> Tally | None:
    """Return the `Tally` of two float32 blocks, or None if float32 cannot represent the sums."""
    if compiled_kernel.native is None:
        return _tally_in_passes(before, after, decoder, changed_mask)
    tally = tally_stored(before, after, ("float32", "float32"))
    if tally is None or changed_mask is None:
        return tally
    count = int(np.count_nonzero(changed_mask))
    return tally._replace(changed=count, first=int(changed_mask.argmax()) if count else None)


def _tally_in_passes(before: Array, after: Array, decoder: Decoder, changed_mask: Array | None) -> Tally | None:
    a, b = _pad_rows(before, decoder, "before"), _pad_rows(after, decoder, "after")
    gap = np.subtract(b, a, out=decoder.buffer("gap", "f4", a.size))
    if changed_mask is None:
        changed_mask = np.not_equal(gap, 0, out=decoder.buffer("changed", "?", gap.size))
    norm_a, norm_b, squares = (_sum_squares(block, decoder) for block in (a, b, gap))
    sum_abs = _sum_rows(np.abs(gap, out=gap))
    # A sum is not finite if its block has an infinity or a NaN, or if the sum overflowed.
    if not math.isfinite(norm_a + norm_b + squares) or any(
        _may_have_vanished(*sums) for sums in ((norm_a, before), (norm_b, after), (squares, gap))
    ):
        return None
    # Saves a pass: |b - a|² = |a|² + |b|² - 2 a·b. Only loses digits if a and b have different directions (products
    # cancel).
    product = (norm_a + norm_b - squares) / 2
    if product < (norm_a + norm_b) / 4:
        product = float(np.add.reduce(a.astype(np.float64) * b))
    count = int(np.count_nonzero(changed_mask))
    return Tally(
        changed=count,
        first=int(changed_mask.argmax()) if count else None,
        finite=before.size,
        max_abs=float(gap.max()),
        sum_abs=Wide(sum_abs),
        squares=Wide(squares),
        before=Wide(norm_a),
        after=Wide(norm_b),
        product=Wide(product),
    )


def _pad_rows(block: Array, decoder: Decoder, purpose: str) -> Array:
    """Return the block, padded with zeros to a multiple of TERMS_PER_SUM if necessary."""
    if block.size % TERMS_PER_SUM == 0:
        return block
    size = -(-block.size // TERMS_PER_SUM) * TERMS_PER_SUM
    padded_rows = decoder.buffer(purpose, "f4", size)
    padded_rows[: block.size] = block
    padded_rows[block.size :] = 0
    return padded_rows


def _sum_squares(block: Array, decoder: Decoder) -> float:
    return _sum_rows(np.multiply(block, block, out=decoder.buffer("squares", "f4", block.size)))


def _sum_rows(block: Array) -> float:
    """Return the sum of a block of TERMS_PER_SUM rows: sum each column in float32, then all columns in float64."""
    return float(np.add.reduce(np.add.reduce(block.reshape(TERMS_PER_SUM, -1), axis=0).astype(np.float64)))


def _may_have_vanished(squares: float, block: Array) -> bool:
    return squares < MIN_SQUARES and (squares != 0 or bool(block.any()))


# --- float64, for blocks that float32 cannot represent ----------------------------------------------------------------


def _compute_gap(before: Array, after: Array, wide_before: Array, wide_after: Array, finite: Array) -> Array:
    """Return |after - before| in float64, for the positions where both values are finite.

    `wide_before` and `wide_after` are the same values in a wider type.
    """
    difference = wide_after[finite] - wide_before[finite]
    # Add the rounding errors of the conversion, because float64 represents odd integers only up to 2 ** 53.
    for integers, sign in ((before, -1), (after, 1)):
        if integers.dtype.kind in "iu" and integers.dtype.itemsize == 8:
            difference += sign * _compute_rounding_error(integers[finite])
    return _compute_magnitude(difference)


def _compute_magnitude(values: Array) -> Array:
    """Return |values|. np.abs is not used for complex values, because its last bits differ between processors."""
    return _compute_hypotenuse(values.real, values.imag) if values.dtype.kind == "c" else np.abs(values)


def _compute_hypotenuse(legs_a: Array, legs_b: Array) -> Array:
    """Return the root of the sum of the squares, scaled near 1 so that no square overflows or vanishes."""
    exponent = np.frexp(np.maximum(np.abs(legs_a), np.abs(legs_b)))[1]
    squares = (np.square(np.ldexp(side, -exponent)) for side in (legs_a, legs_b))
    hypotenuse: Array = np.ldexp(np.sqrt(np.add(*squares)), exponent)
    return hypotenuse


def _compute_rounding_error(integers: Array) -> Array:
    """Return the exact rounding error of each 64-bit integer in float64: the integer minus the float."""
    rounded_values = integers.astype(np.float64)
    exceeds_int64 = rounded_values >= 2.0**63
    low = np.where(exceeds_int64, 0, rounded_values).astype(np.int64).view(np.uint64)
    high = np.where(exceeds_int64, rounded_values - 2.0**63, 0).astype(np.uint64) + (
        exceeds_int64.astype(np.uint64) << np.uint64(63)
    )
    # Computed modulo 2 ** 64, which is much larger than the error.
    return (integers.view(np.uint64) - low - high).view(np.int64).astype(np.float64)


def _find_changed(before: Array, after: Array, finite: Array, gap: Array, options: CompareOptions) -> Array:
    """Return a mask of differing elements: finite values beyond the tolerance, and unequal nonfinite values."""
    changed_mask: Array = ~_is_equal_or_nan(before, after)
    finite_before, finite_after = before[finite], after[finite]
    changed_mask[finite] = (
        _exceeds_tolerance(finite_before, finite_after, gap, options) if options.atol or options.rtol else gap != 0
    )
    return changed_mask


def _exceeds_tolerance(before: Array, after: Array, gap: Array, options: CompareOptions) -> Array:
    limit = options.atol + options.rtol * _compute_magnitude(before)
    exceeds: Array = gap > limit
    overflows = ~np.isfinite(gap + limit)
    # A quarter of any gap fits float64. If a quarter of the limit does not, no gap exceeds the limit.
    before, after = before[overflows] / 4, after[overflows] / 4
    exceeds[overflows] = _compute_magnitude(after - before) > options.atol / 4 + options.rtol * _compute_magnitude(
        before
    )
    return exceeds


def _is_equal_or_nan(before: Array, after: Array) -> Array:
    """Return a mask of equal values; NaN equals NaN. Complex values are compared part by part: nan+1j is not nan+2j."""
    equal: Array = (before == after) | (np.isnan(before) & np.isnan(after))
    if before.dtype.kind == "c" and np.isnan(before).any():
        equal = ~_any_in_element(~_is_equal_or_nan(before.view(np.float64), after.view(np.float64)), 2)
    return equal


def _compute_integer_gap(before: Array, after: Array) -> Array:
    """Return |after - before| of integers as float64, rounded only once. The result may reach 1.5 * 2 ** 64."""
    if before.dtype.kind == after.dtype.kind:
        wide = np.int64 if before.dtype.kind == "i" else np.uint64
        a, b = before.astype(wide), after.astype(wide)
        return (np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).astype(np.float64)
    signed, unsigned = (before, after) if before.dtype.kind == "i" else (after, before)
    s, p = signed.astype(np.int64), unsigned.astype(np.uint64)
    is_negative = s < 0
    size = np.where(is_negative, np.uint64(0) - s.view(np.uint64), s.view(np.uint64))
    opposite_sign_gap = p + size
    same_sign_gap = (np.maximum(p, size) - np.minimum(p, size)).astype(np.float64)
    return np.where(
        is_negative, opposite_sign_gap.astype(np.float64) + np.where(opposite_sign_gap < p, 2.0**64, 0.0), same_sign_gap
    )


def _build_tally(before: Array, after: Array, finite: Array, gap: Array, changed_mask: Array) -> Tally:
    nan_before, inf_before, _ = _count_not_finite(before, np.isfinite(before))
    nan_after, inf_after, _ = _count_not_finite(after, np.isfinite(after))
    count = int(np.count_nonzero(changed_mask))
    a, b = _scale_down(before[finite].view(np.float64)), _scale_down(after[finite].view(np.float64))
    largest = float(gap.max()) if gap.size else 0.0
    small, exponent = _scale_down(gap) if np.isfinite(largest) else (gap, 0)
    return Tally(
        changed=count,
        first=int(changed_mask.argmax()) if count else None,
        finite=gap.size,
        max_abs=largest,
        sum_abs=Wide(float(np.add.reduce(small)), exponent // 2),
        squares=_sum_products(small, exponent, small, exponent),
        before=_sum_products(*a, *a),
        after=_sum_products(*b, *b),
        product=_sum_products(*a, *b),
        nan_before=nan_before,
        nan_after=nan_after,
        inf_before=inf_before,
        inf_after=inf_after,
        left_out=finite.size - gap.size,
        lost=int(np.count_nonzero(changed_mask & ~finite)) if gap.size < finite.size == changed_mask.size else 0,
    )


def _count_not_finite(values: Array, finite: Array) -> tuple[int, int, int]:
    """Return the counts of NaN, of infinities, and their sum. A complex value with a NaN part counts as NaN."""
    left_out = finite.size - int(np.count_nonzero(finite))
    nan = int(np.count_nonzero(np.isnan(values))) if left_out else 0
    return nan, left_out - nan, left_out


def _scale_down(values: Array) -> tuple[Array, int]:
    """Divide the values by 2 ** e, for an even e, if their squares do not fit float64. Return the values and e."""
    size = float(max(values.max(), -values.min())) if values.size else 0.0
    if not size or 1 / MAX_UNSCALED < size < MAX_UNSCALED:
        return values, 0
    exponent = int(np.frexp(size)[1]) // 2 * 2
    return np.ldexp(values, -exponent), exponent


def _sum_products(a: Array, power_a: int, b: Array, power_b: int) -> Wide:
    return Wide(float(np.add.reduce(a * b)), (power_a + power_b) // 2)


def compare_bits(before: Array, after: Array, items: int) -> Array:
    """Return a mask of elements whose stored bits differ, even if both are NaN. An element has `items` stored items."""
    size = before.dtype.itemsize
    word = f"u{min(size, 8)}"
    return _any_in_element(before.view(word) != after.view(word), items * max(size // 8, 1))


def _any_in_element(changed_mask: Array, items: int) -> Array:
    return np.asarray(changed_mask.reshape(-1, items).any(axis=1)) if items > 1 else changed_mask
