"""How two tensors' values differ, as sums that can be added up: of one block, of a task, of a tensor.

Blocks of float32 (all that float16, bfloat16 and float8 decode to) are summed `TERMS` products at a time, and these
sums in float64; products of two bfloat16 are exact. The result is within 1e-6 of a sum in float64 throughout, at twice
its speed. A block with anything in it that
float32 cannot carry (NaN, infinities, squares that overflow or vanish) is done again in float64, and one that float64
cannot carry is scaled by a power of two, which changes no digit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from statecli.values.delta import Delta

#: Products summed in float32 before float64 takes over.
TERMS = 16
#: A sum of squares in float32 below this may have lost what vanished on the way.
SMALL = 2.0**-80
#: Values of this size and above, or below its inverse, are scaled before they are squared in float64.
SAFE = 2.0**500


class Wide(NamedTuple):
    """`mantissa * 4.0 ** exponent`: a sum of squares of float64 values may be far beyond float64."""

    mantissa: float = 0.0
    exponent: int = 0

    def plus(self, other: Wide) -> Wide:
        """The sum, at the larger exponent of the two."""
        if not other.mantissa:
            return self
        if not self.mantissa:
            return other
        top = max(self.exponent, other.exponent)
        return Wide(_shifted(self, top) + _shifted(other, top), top)

    def root(self) -> float:
        """The square root; infinite where float64 cannot hold it."""
        try:
            return math.ldexp(math.sqrt(self.mantissa), self.exponent)
        except OverflowError:
            return math.inf

    def over(self, other: Wide) -> Wide:
        """The quotient; `other` is not zero. The mantissas alone may be too far apart for float64."""
        (one, up), (two, down) = math.frexp(self.mantissa), math.frexp(other.mantissa)
        fours, odd = divmod(up - down, 2)
        return Wide(math.ldexp(one / two, odd), self.exponent - other.exponent + fours)

    def value(self) -> float:
        """The sum itself; infinite where float64 cannot hold it."""
        try:
            return math.ldexp(self.mantissa, 2 * self.exponent)
        except OverflowError:
            return math.copysign(math.inf, self.mantissa)


def _earlier(one: int | None, other: int | None) -> int | None:
    return min(one, other) if one is not None and other is not None else one if other is None else other


def _shifted(sum_: Wide, exponent: int) -> float:
    return math.ldexp(sum_.mantissa, 2 * (sum_.exponent - exponent))


class Tally(NamedTuple):
    """Sums over the positions that are finite on both sides (`finite` of them) and counts over all.

    `first` is the flat index of the first changed element in C order, None where none is. The sums: |Δ|, Δ²,
    before², after², before · after; `sum_abs` is scaled as `Wide` is.
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
    #: How many of those left out changed.
    lost: int = 0

    def plus(self, other: Tally) -> Tally:
        """Both together. The order of additions decides the last digit, so callers keep it fixed."""
        return Tally(
            self.changed + other.changed,
            _earlier(self.first, other.first),
            self.finite + other.finite,
            max(self.max_abs, other.max_abs),
            self.sum_abs.plus(other.sum_abs),
            self.squares.plus(other.squares),
            self.before.plus(other.before),
            self.after.plus(other.after),
            self.product.plus(other.product),
            self.nan_before + other.nan_before,
            self.nan_after + other.nan_after,
            self.inf_before + other.inf_before,
            self.inf_after + other.inf_after,
            self.left_out + other.left_out,
            self.lost + other.lost,
        )

    def moved(self, start: int) -> Tally:
        """The same of a block that begins at element `start`."""
        return self if self.first is None else self._replace(first=self.first + start)

    def delta(self, shape: tuple[int, ...], reason: str | None = None) -> Delta:
        """As the diff shows it."""
        elements = math.prod(shape)
        largest = mean = l2 = relative = cosine = None
        if not self.finite:
            reason = reason or ("no position is finite on both sides" if elements else None)
        elif self.lost and not self.squares.mantissa:
            reason = reason or "what changed is not finite"
        else:
            largest, mean, l2 = self.max_abs, self._mean(), self.squares.root()
            relative, cosine = self._relative(), self._cosine()
            reason = reason or self._undefined(relative, largest, mean, l2)
        return Delta(
            elements=elements,
            changed=self.changed,
            max_abs=self._held(largest),
            mean_abs=self._held(mean),
            l2=self._held(l2),
            relative_l2=self._held(relative),
            cosine=cosine,
            nan_before=self.nan_before,
            nan_after=self.nan_after,
            inf_before=self.inf_before,
            inf_after=self.inf_after,
            left_out=self.left_out,
            first=self._index(shape),
            reason=reason,
        )

    def _index(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return None if self.first is None else _unraveled(self.first, shape)

    def _held(self, value: float | None) -> float | None:
        """What float64 can hold; None for infinity, and for a 0 that is more than nothing."""
        if value is None or not math.isfinite(value) or (self.squares.mantissa and not value):
            return None
        return value

    def _mean(self) -> float:
        return Wide(self.sum_abs.mantissa / self.finite, self.sum_abs.exponent).value()

    def _undefined(self, relative: float | None, *others: float) -> str | None:
        """Why one of the numbers is not there; None where all are."""
        if not all(map(math.isfinite, others)):
            return "some differences are beyond float64"
        if relative is None:
            return "before is zero throughout"
        if not math.isfinite(relative):
            return "the relative change is beyond float64"
        if self.squares.mantissa and not all((relative, *others)):
            return "some numbers are too small for float64"
        return None if self.after.mantissa else "after is zero throughout"

    def _relative(self) -> float | None:
        if not self.before.mantissa:
            return None
        return self.squares.over(self.before).root()

    def _cosine(self) -> float | None:
        if not (self.before.mantissa and self.after.mantissa):
            return None
        norms = math.sqrt(self.before.mantissa) * math.sqrt(self.after.mantissa)
        # Half-powers of four are powers of two: exponents of norms add up without a root.
        shift = 2 * self.product.exponent - self.before.exponent - self.after.exponent
        return max(-1.0, min(1.0, math.ldexp(self.product.mantissa / norms, shift)))


#: The tally of what is equal, which most tasks share: it has 15 fields.
NOTHING = Tally()


@lru_cache(maxsize=256)
def _unraveled(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of a flat element; the same tuple for the layers of a model, of which each changes at once."""
    return tuple(int(i) for i in np.unravel_index(number, shape)) if shape else ()
