"""Two blocks of values -> their `Tally`: which differ, by how much, and what of them is no number.

What float32 can carry is done in one pass by `_native.c` where it was compiled, and by numpy where not: it writes into
buffers that are used again and again and fit a core's second-level cache.

numpy's sums are made by ufuncs alone, of which IEEE 754 and a fixed order of the terms say every bit. BLAS (`dot`,
`vecdot`) and `einsum` may be faster, and add in as many lanes as a processor has, or a release of them likes.
"""

from __future__ import annotations

import math

import numpy as np

from statecli.values.delta import How
from statecli.values.elements import Array, Decoder
from statecli.values.tally import SAFE, SMALL, TERMS, Tally, Wide

try:
    from statecli.values import _native
except ImportError:  # there was no compiler when statecli was installed
    _native = None  # type: ignore[assignment]

#: The types whose blocks the compiled kernel reads as they are stored.
STORED = frozenset(("float32", "bfloat16", "float16"))


def made_of() -> str:
    """What does the sums here, "C" or "numpy": the two differ in the last bits, and neither by processor or release."""
    return "numpy" if _native is None else "C"


def tally(
    before: Array, after: Array, how: How, decoder: Decoder, changed: Array | None = None, values: int = 1
) -> Tally:
    """Two flat blocks of equally many decoded values, as `values.read` gives them: float, integer or complex.

    `changed`, a mask, overrides what counts as changed: with `how.bitwise` equal bits alone are equal. So many `values`
    make an element. Neither block is written to.
    """
    if not before.size:
        return Tally()
    with np.errstate(all="ignore"):
        if before.dtype == after.dtype == np.float32 and not (how.atol or how.rtol):
            if values > 1 and changed is None:
                changed = elements_differ(before, after, values)
            found = _in_float32(before, after, decoder, changed)
            if found is not None:
                return found
        kinds = before.dtype.kind + after.dtype.kind
        wide = np.complex128 if "c" in kinds else np.float64
        one, two = before.astype(wide), after.astype(wide)
        finite = np.isfinite(one) & np.isfinite(two)
        gap = (
            _distance(before, after) if "f" not in kinds and "c" not in kinds else _gap(before, after, one, two, finite)
        )
        if changed is None:
            changed = _of_elements(_differ(one, two, finite, gap, how), values)
        return _tallied(one, two, finite, gap, changed)


def opaque(changed: Array) -> Tally:
    """Of elements that are no numbers: which differ is all that can be said."""
    count = int(np.count_nonzero(changed))
    return Tally(changed=count, first=int(changed.argmax()) if count else None, left_out=changed.size)


def stored(before: Array, after: Array, types: tuple[str, str], bits: bool = False) -> Tally | None:
    """Two flat blocks of equally many elements as they are stored, of the types named; `bits` alone decide, or values.

    None where it takes `tally`: for other types, what float32 cannot carry, and without the compiled kernel.
    """
    if _native is None or not STORED.issuperset(types):
        return None
    found = _native.tally(before, after, *types, bits)
    if found is None:
        return None
    changed, first, largest, gaps, squares, norm_a, norm_b, product = found
    if not math.isfinite(gaps + norm_a + norm_b + squares) or (squares < SMALL and largest):
        return None
    if _may_have_vanished(norm_a, before) or _may_have_vanished(norm_b, after):
        return None
    return Tally(
        changed=changed,
        first=first if changed else None,
        finite=before.size,
        max_abs=largest,
        sum_abs=Wide(gaps),
        squares=Wide(squares),
        before=Wide(norm_a),
        after=Wide(norm_b),
        product=Wide(product + 0.0),  # 0.0 for -0.0, as in a sum with other tallies
    )


def norm(block: Array, decoder: Decoder) -> Tally:
    """The tally of a block that is equal on both sides: its norm and what of it is no number."""
    if not block.size:
        return Tally()
    with np.errstate(all="ignore"):
        if block.dtype == np.float32 and _native is not None:
            found = stored(block, block, ("float32", "float32"))
            if found is not None:
                return found
        elif block.dtype == np.float32:
            padded = _padded(block, decoder, "before")
            squares = _squares(padded, decoder)
            if SMALL <= squares < np.inf or (squares == 0 and not block.any()):
                same = Wide(squares)
                return Tally(finite=block.size, before=same, after=same, product=same)
        wide = np.complex128 if block.dtype.kind == "c" else np.float64
        values = block.astype(wide)
        finite = np.isfinite(values)
        nan, inf, left_out = _not_numbers(values, finite)
        kept = values[finite].view(np.float64)
        same = _product(*_scaled(kept), *_scaled(kept))
        return Tally(
            finite=int(np.count_nonzero(finite)),
            before=same,
            after=same,
            product=same,
            nan_before=nan,
            nan_after=nan,
            inf_before=inf,
            inf_after=inf,
            left_out=left_out,
        )


# --- float32, fast -----------------------------------------------------------------------------------------------


def _in_float32(before: Array, after: Array, decoder: Decoder, changed: Array | None) -> Tally | None:
    """None where float32 cannot carry it."""
    if _native is None:
        return _in_passes(before, after, decoder, changed)
    found = stored(before, after, ("float32", "float32"))
    if found is None or changed is None:
        return found
    count = int(np.count_nonzero(changed))
    return found._replace(changed=count, first=int(changed.argmax()) if count else None)


def _in_passes(before: Array, after: Array, decoder: Decoder, changed: Array | None) -> Tally | None:
    a, b = _padded(before, decoder, "before"), _padded(after, decoder, "after")
    gap = np.subtract(b, a, out=decoder.buffer("gap", "f4", a.size))
    if changed is None:
        changed = np.not_equal(gap, 0, out=decoder.buffer("changed", "?", gap.size))
    norm_a, norm_b, squares = (_squares(one, decoder) for one in (a, b, gap))
    sum_abs = _added(np.abs(gap, out=gap))
    # An infinity or a NaN on one side, or an overflow, is in its norm.
    if not math.isfinite(norm_a + norm_b + squares) or any(
        _may_have_vanished(*one) for one in ((norm_a, before), (norm_b, after), (squares, gap))
    ):
        return None
    # |b - a|² = |a|² + |b|² - 2 a·b spares a pass, and loses no digit unless the two point apart: then products cancel.
    product = (norm_a + norm_b - squares) / 2
    if product < (norm_a + norm_b) / 4:
        product = float(np.add.reduce(a.astype(np.float64) * b))
    count = int(np.count_nonzero(changed))
    return Tally(
        changed=count,
        first=int(changed.argmax()) if count else None,
        finite=before.size,
        max_abs=float(gap.max()),
        sum_abs=Wide(sum_abs),
        squares=Wide(squares),
        before=Wide(norm_a),
        after=Wide(norm_b),
        product=Wide(product),
    )


def _padded(block: Array, decoder: Decoder, purpose: str) -> Array:
    """So many values that TERMS divides them, the last of them zeros; the block itself where it has."""
    if block.size % TERMS == 0:
        return block
    size = -(-block.size // TERMS) * TERMS
    padded = decoder.buffer(purpose, "f4", size)
    padded[: block.size] = block
    padded[block.size :] = 0
    return padded


def _squares(block: Array, decoder: Decoder) -> float:
    return _added(np.multiply(block, block, out=decoder.buffer("squares", "f4", block.size)))


def _added(block: Array) -> float:
    """The sum of TERMS rows: of each column in float32, and of these in float64."""
    return float(np.add.reduce(np.add.reduce(block.reshape(TERMS, -1), axis=0).astype(np.float64)))


def _may_have_vanished(squares: float, block: Array) -> bool:
    return squares < SMALL and (squares != 0 or bool(block.any()))


# --- float64, and whatever float32 could not carry ----------------------------------------------------------------


def _gap(before: Array, after: Array, one: Array, two: Array, finite: Array) -> Array:
    """|after - before| where both are `finite`, in float64; `one` and `two` are the same values, widened."""
    gap = _size(two[finite] - one[finite])
    for whole, other, real in ((before, after, two.real), (after, before, one.real)):
        if whole.dtype.kind in "iu" and whole.dtype.itemsize == 8:
            hidden = _rounded_away(whole, real)[finite]
            gap = _length(hidden, gap) if other.dtype.kind == "c" else gap + hidden
    return gap


def _size(values: Array) -> Array:
    """|values|. Of complex ones numpy's own has other last bits on other processors."""
    return _length(values.real, values.imag) if values.dtype.kind == "c" else np.abs(values)


def _length(one: Array, other: Array) -> Array:
    """The root of the sum of their squares, which are near 1: none overflows or vanishes."""
    exponent = np.frexp(np.maximum(np.abs(one), np.abs(other)))[1]
    squares = (np.square(np.ldexp(side, -exponent)) for side in (one, other))
    length: Array = np.ldexp(np.sqrt(np.add(*squares)), exponent)
    return length


def _rounded_away(whole: Array, real: Array) -> Array:
    """How far a 64-bit integer is from the float64 that it rounds to where that is `real`, 0 elsewhere; exactly."""
    rounded = whole.astype(np.float64) == real
    top = rounded & (real >= 2.0**63)
    low = np.where(rounded & ~top, real, 0).astype(np.int64).view(np.uint64)
    high = np.where(top, real - 2.0**63, 0).astype(np.uint64) + (top.astype(np.uint64) << np.uint64(63))
    # Modulo 2 ** 64, of which the distance is a tiny part.
    apart = (whole.view(np.uint64) - low - high).view(np.int64)
    return np.where(rounded, np.abs(apart), 0).astype(np.float64)


def _differ(before: Array, after: Array, finite: Array, gap: Array, how: How) -> Array:
    """Which elements differ: by more than the tolerance where both are finite, at all where not."""
    changed: Array = ~_alike(before, after)
    one, two = before[finite], after[finite]
    changed[finite] = _beyond(one, two, gap, how) if how.atol or how.rtol else gap != 0
    return changed


def _beyond(before: Array, after: Array, gap: Array, how: How) -> Array:
    """Where the gap is larger than the tolerance."""
    limit = how.atol + how.rtol * _size(before)
    beyond: Array = gap > limit
    far = ~np.isfinite(gap + limit)
    # A quarter of any gap fits float64, and no gap is larger than a limit whose quarter does not.
    before, after = before[far] / 4, after[far] / 4
    beyond[far] = _size(after - before) > how.atol / 4 + how.rtol * _size(before)
    return beyond


def _alike(before: Array, after: Array) -> Array:
    """Equal, or both NaN. A complex value is the two parts that it has: nan+1j is not nan+2j."""
    alike: Array = (before == after) | (np.isnan(before) & np.isnan(after))
    if before.dtype.kind == "c" and np.isnan(before).any():
        alike = ~_of_elements(~_alike(before.view(np.float64), after.view(np.float64)), 2)
    return alike


def _distance(before: Array, after: Array) -> Array:
    """|after - before| of integers, rounded once to float64: a uint64 is as far as 1.5 * 2 ** 64 from an int64."""
    if before.dtype.kind == after.dtype.kind:
        wide = np.int64 if before.dtype.kind == "i" else np.uint64
        a, b = before.astype(wide), after.astype(wide)
        return (np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).astype(np.float64)
    signed, plain = (before, after) if before.dtype.kind == "i" else (after, before)
    s, p = signed.astype(np.int64), plain.astype(np.uint64)
    below = s < 0
    size = np.where(below, np.uint64(0) - s.view(np.uint64), s.view(np.uint64))
    far = p + size
    near = (np.maximum(p, size) - np.minimum(p, size)).astype(np.float64)
    return np.where(below, far.astype(np.float64) + np.where(far < p, 2.0**64, 0.0), near)


def _tallied(before: Array, after: Array, finite: Array, gap: Array, changed: Array) -> Tally:
    nan_before, inf_before, _ = _not_numbers(before, np.isfinite(before))
    nan_after, inf_after, _ = _not_numbers(after, np.isfinite(after))
    count = int(np.count_nonzero(changed))
    a, b = _scaled(before[finite].view(np.float64)), _scaled(after[finite].view(np.float64))
    largest = float(gap.max()) if gap.size else 0.0
    small, exponent = _scaled(gap) if np.isfinite(largest) else (gap, 0)
    return Tally(
        changed=count,
        first=int(changed.argmax()) if count else None,
        finite=gap.size,
        max_abs=largest,
        sum_abs=Wide(float(np.add.reduce(small)), exponent // 2),
        squares=_product(small, exponent, small, exponent),
        before=_product(*a, *a),
        after=_product(*b, *b),
        product=_product(*a, *b),
        nan_before=nan_before,
        nan_after=nan_after,
        inf_before=inf_before,
        inf_after=inf_after,
        left_out=finite.size - gap.size,
        lost=int(np.count_nonzero(changed & ~finite)) if gap.size < finite.size == changed.size else 0,
    )


def _not_numbers(values: Array, finite: Array) -> tuple[int, int, int]:
    """How many are NaN, infinite, either. A complex value with a NaN in it counts as NaN."""
    left_out = finite.size - int(np.count_nonzero(finite))
    nan = int(np.count_nonzero(np.isnan(values))) if left_out else 0
    return nan, left_out - nan, left_out


def _scaled(values: Array) -> tuple[Array, int]:
    """The values times a power of two that lets their squares fit float64, and the even exponent taken out."""
    size = float(max(values.max(), -values.min())) if values.size else 0.0
    if not size or 1 / SAFE < size < SAFE:
        return values, 0
    exponent = int(np.frexp(size)[1]) // 2 * 2
    return np.ldexp(values, -exponent), exponent


def _product(a: Array, power_a: int, b: Array, power_b: int) -> Wide:
    return Wide(float(np.add.reduce(a * b)), (power_a + power_b) // 2)


def bits_differ(before: Array, after: Array, items: int) -> Array:
    """Which elements differ in their stored bits, NaN included; `items` stored items make one element."""
    size = before.dtype.itemsize
    word = f"u{min(size, 8)}"
    return elements_differ(before.view(word), after.view(word), items * max(size // 8, 1))


def elements_differ(before: Array, after: Array, items: int) -> Array:
    """Which elements differ, of which each has `items` values."""
    return _of_elements(before != after, items)


def _of_elements(differ: Array, items: int) -> Array:
    return np.asarray(differ.reshape(-1, items).any(axis=1)) if items > 1 else differ
