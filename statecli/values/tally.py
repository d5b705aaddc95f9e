"""Mergeable sums of the differences between two tensors' values, for a block, a task or a tensor.

Blocks of float32 (also decoded from float16, bfloat16 and float8) are summed in float32, `TERMS_PER_SUM` products at a
time. These sums are added in float64. Products of two bfloat16 are exact. The result is within 1e-6 of a sum that is
computed only in float64, at twice the speed. A block beyond float32 (NaN, infinities, squares that overflow or vanish)
is computed again in float64. A block beyond float64 is scaled by a power of two, which does not change any digit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from operator import add
from typing import NamedTuple

from statecli.core.dtypes import unravel_index
from statecli.values.delta import ZERO_BEFORE, Delta
from statecli.values.merge_summaries import Rule, choose_smallest, merge_fields

#: Number of elements compared at a time: both blocks, decoded, fit a core's second-level cache.
BLOCK_ELEMENTS = 64 * 1024
#: Number of products summed in float32 before their sum is added in float64.
TERMS_PER_SUM = 16
#: Sum of squares in float32 below which terms may have been rounded to 0.
MIN_SQUARES = 2.0**-80


class Wide(NamedTuple):
    """Sum stored as `mantissa * 4.0 ** exponent`, because a sum of squares of float64 values may exceed float64."""

    mantissa: float = 0.0
    exponent: int = 0

    def add(self, other: Wide) -> Wide:
        """Return the sum of both numbers."""
        if not other.mantissa:
            return self
        if not self.mantissa:
            return other
        top = max(self.exponent, other.exponent)
        return Wide(_mantissa_at(self, top) + _mantissa_at(other, top), top)

    def square_root(self) -> float:
        """Return the square root, or infinity if it is too large for float64."""
        try:
            return math.ldexp(math.sqrt(self.mantissa), self.exponent)
        except OverflowError:
            return math.inf

    def divide(self, other: Wide) -> Wide:
        """Return the quotient; `other` must not be zero. Mantissas may be too far apart for a division in float64."""
        (fraction, power), (divisor, divisor_power) = math.frexp(self.mantissa), math.frexp(other.mantissa)
        fours, odd_power = divmod(power - divisor_power, 2)
        return Wide(math.ldexp(fraction / divisor, odd_power), self.exponent - other.exponent + fours)

    def to_float(self) -> float:
        """Return the sum as a float, or infinity if it is too large for float64."""
        try:
            return math.ldexp(self.mantissa, 2 * self.exponent)
        except OverflowError:
            return math.copysign(math.inf, self.mantissa)


def _mantissa_at(sum_: Wide, exponent: int) -> float:
    return math.ldexp(sum_.mantissa, 2 * (sum_.exponent - exponent))


class Tally(NamedTuple):
    """Sums over the `finite` positions where both tensors have finite values, and counts over all positions.

    Attributes:
        first: Flat index of the first changed element in C order; None if nothing changed.
        sum_abs: Sum of |Δ|.
        squares, before, after, product: Sums of Δ², before², after², and before · after.
        left_out: Number of positions that are not finite on at least one side.
        lost: Number of changed positions among `left_out`.
    """

    changed: int = 0
    first: int | None = None
    finite: int = 0
    max_abs: float = 0.0
    sum_abs: Wide = Wide()
    squares: Wide = Wide()
    before: Wide = Wide()
    after: Wide = Wide()
    product: Wide = Wide()
    nan_before: int = 0
    nan_after: int = 0
    inf_before: int = 0
    inf_after: int = 0
    left_out: int = 0
    lost: int = 0

    def merge(self, other: Tally) -> Tally:
        """Return the tally of both blocks. Callers merge in a fixed order, because the order affects the last digit."""
        return other if self is EQUAL_TALLY else Tally(*merge_fields(_MERGE_RULES, self, other))

    def shift(self, start: int) -> Tally:
        """Return the tally of the block as if the block began at element `start` of the tensor."""
        return self if self.first is None else self._replace(first=self.first + start)

    def to_delta(self, shape: tuple[int, ...], reason: str | None = None) -> Delta:
        """Return the public `Delta` of a tensor of this shape."""
        elements = math.prod(shape)
        largest = mean = l2 = relative = cosine = None
        if not self.finite:
            reason = reason or ("at each position, the old or the new value is NaN or Inf" if elements else None)
        elif self.lost and not self.squares.mantissa:
            reason = reason or "changed elements are NaN or Inf"
        else:
            largest, mean, l2 = self.max_abs, self._compute_mean_abs(), self.squares.square_root()
            relative, cosine = self._compute_relative_l2(), self._compute_cosine()
            reason = reason or self._explain_undefined(relative, largest, mean, l2)
        return Delta(
            elements=elements,
            changed=self.changed,
            max_abs=self._keep_representable(largest),
            mean_abs=self._keep_representable(mean),
            l2=self._keep_representable(l2),
            relative_l2=self._keep_representable(relative),
            cosine=cosine,
            nan_before=self.nan_before,
            nan_after=self.nan_after,
            inf_before=self.inf_before,
            inf_after=self.inf_after,
            left_out=self.left_out,
            first=None if self.first is None else _unravel(self.first, shape),
            reason=reason,
        )

    def _keep_representable(self, value: float | None) -> float | None:
        """Return `value`, or None if it is not finite in float64 or was rounded to 0."""
        if value is None or not math.isfinite(value) or (self.squares.mantissa and not value):
            return None
        return value

    def _compute_mean_abs(self) -> float:
        return Wide(self.sum_abs.mantissa / self.finite, self.sum_abs.exponent).to_float()

    def _explain_undefined(self, relative: float | None, *statistics: float) -> str | None:
        """Return why a statistic is not available, or None if all statistics are available."""
        if not all(map(math.isfinite, statistics)):
            return "some differences are too large for float64"
        if relative is None:
            return ZERO_BEFORE
        if not math.isfinite(relative):
            return "the relative change is too large for float64"
        if self.squares.mantissa and not all((relative, *statistics)):
            return (
                "some differences are so close to 0 that float64 rounds a statistic of them to 0, so this statistic "
                "is not available"
            )
        return None if self.after.mantissa else "all new values are zero"

    def _compute_relative_l2(self) -> float | None:
        if not self.before.mantissa:
            return None
        return self.squares.divide(self.before).square_root()

    def _compute_cosine(self) -> float | None:
        if not (self.before.mantissa and self.after.mantissa):
            return None
        norms = math.sqrt(self.before.mantissa) * math.sqrt(self.after.mantissa)
        # Half-powers of four are powers of two, so exponents of norms are added without a root.
        shift = 2 * self.product.exponent - self.before.exponent - self.after.exponent
        return max(-1.0, min(1.0, math.ldexp(self.product.mantissa / norms, shift)))


_MERGE_RULES: dict[str, Rule] = {
    "changed": add,
    "first": choose_smallest,
    "finite": add,
    "max_abs": max,
    "sum_abs": Wide.add,
    "squares": Wide.add,
    "before": Wide.add,
    "after": Wide.add,
    "product": Wide.add,
    "nan_before": add,
    "nan_after": add,
    "inf_before": add,
    "inf_after": add,
    "left_out": add,
    "lost": add,
}

#: Tally of equal elements, shared by most tasks, because a tally has 15 fields.
EQUAL_TALLY = Tally()


#: Cached, because layers of a model often have their first change at the same element.
_unravel = lru_cache(maxsize=256)(unravel_index)
