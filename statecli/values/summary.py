"""Summarize a part of a tensor's values, and merge two summaries.

Moments merge by the formulas of Chan, Golub and LeVeque (1979). Mean and standard deviation are kept instead of sums
and squares. They do not overflow if the values do not, and they keep their digits for values far from zero.
"""

from __future__ import annotations

import math
from operator import add, or_

import msgspec
import numpy as np
from msgspec.structs import astuple

from statecli.core.model_state import Stats
from statecli.values.elements import MAX_UNSCALED, Array, Decoder
from statecli.values.merge_summaries import (
    Rule,
    choose_given,
    choose_largest,
    choose_smallest,
    keep_if_equal,
    merge_fields,
)

#: Mask for digests of blocks, which are added modulo 2 ** 64.
DIGEST_MASK = (1 << 64) - 1


class Moments(msgspec.Struct, frozen=True, gc=False):
    """Mean and population standard deviation of the finite values, and the number `finite` of these values."""

    finite: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of values together. The order of merging changes only the last bits."""
        if not (self.finite and other.finite):
            return self if self.finite else other
        count = self.finite + other.finite
        share, other_share = self.finite / count, other.finite / count
        # Computed in halves, because a difference of two floats can overflow.
        half = other.mean / 2 - self.mean / 2
        # Clamped, because half of the smallest float is 0.
        low, high = min(self.mean, other.mean), max(self.mean, other.mean)
        mean = min(max(2 * (self.mean / 2 + half * other_share), low), high)
        deviation_of_means = half * (2 * math.sqrt(share * other_share))
        deviation = math.hypot(
            self.deviation * math.sqrt(share), other.deviation * math.sqrt(other_share), deviation_of_means
        )
        return Moments(count, mean, deviation)


class Facts(msgspec.Struct, frozen=True, gc=False):
    """Facts about the values of some elements (counts, range, digest). Facts of pieces of a tensor merge in any order.

    Attributes:
        elements: Number of elements.
        nan, inf, denormal: Counts; a complex element counts if either part does. `inf` counts both signs.
        minus_inf: Count of -inf.
        low, high: Range of the finite values; None if no value is finite, or if the values are complex.
        moments: Mean and deviation, if computed.
        only: The stored bytes of an element if all elements are equal bit for bit, else None.
        digest: Equal for pieces whose elements are equal; None if not known.
        reason: Why the elements were not read as numbers.
        damaged: True for unreadable bytes.
        contradiction: Why the indices of a sparse tensor do not fit its shape.
        typical: Size of a float near the largest: for a block the fourth largest of a sample, for several blocks the
            largest of these. None if not known.
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
    moments: Moments = Moments()
    contradiction: str | None = None

    def merge(self, other: Facts) -> Facts:
        """Return the facts about the elements of `self` and `other` together."""
        if not other.elements or not self.elements:
            return other if not self.elements else self
        return Facts(*merge_fields(_MERGE_RULES, astuple(self), astuple(other)))

    def repeat(self, count: int) -> Facts:
        """Return the `Facts` about `count` repetitions of the elements, without a digest: their order is unknown."""
        if count == 1:
            return self
        names = ("elements", "nan", "inf", "minus_inf", "zeros", "denormal")
        moments = msgspec.structs.replace(self.moments, finite=self.moments.finite * count)
        counts = {name: getattr(self, name) * count for name in names}
        return msgspec.structs.replace(self, digest=None, moments=moments, **counts)

    def to_stats(self, reason: str | None = None) -> Stats:
        """Return the public `Stats`. If no value is finite, min, max, mean and std are None. std divides by n - 1."""
        if self.low is None or self.high is None:
            return Stats(zeros=self.zeros, nan=self.nan, inf=self.inf, reason=reason)
        finite = self.moments.finite
        std = self.moments.deviation * math.sqrt(finite / (finite - 1)) if finite > 1 else None
        if any(float(value) != value for value in (self.low, self.high)):
            reason = join_reasons(reason, f"min and max are rounded; the exact values are {self.low} and {self.high}")
        if std is not None and not math.isfinite(std):
            std, reason = None, join_reasons(reason, "std is too large for float64")
        return Stats(
            min=float(self.low),
            max=float(self.high),
            mean=self.moments.mean,
            std=std,
            zeros=self.zeros,
            nan=self.nan,
            inf=self.inf,
            reason=reason,
        )


def _add_digests(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b & DIGEST_MASK


_MERGE_RULES: dict[str, Rule] = {
    "elements": add,
    "nan": add,
    "inf": add,
    "minus_inf": add,
    "zeros": add,
    "denormal": add,
    "low": choose_smallest,
    "high": choose_largest,
    "only": keep_if_equal,
    "digest": _add_digests,
    "reason": choose_given,
    "damaged": or_,
    "typical": choose_largest,
    "moments": Moments.merge,
    "contradiction": choose_given,
}


def join_reasons(reason: str | None, further: str) -> str:
    """Join two reasons in one line; if the first is None, return only the second."""
    return f"{reason}; {further}" if reason else further


# --- one chunk -----------------------------------------------------------------------------------------------------


def summarize_chunk(chunk: Array, decoder: Decoder) -> Facts:
    """Return the `Facts` about a flat chunk of real or complex values."""
    if chunk.dtype.kind == "c":
        return _count_complex(chunk)
    is_zero = np.equal(chunk, 0, out=decoder.buffer("mask", "?", chunk.size))
    zeros = int(np.count_nonzero(is_zero))
    low, high = chunk.min(), chunk.max()
    if chunk.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
        return _summarize_partly_finite(chunk, zeros, decoder)
    return _summarize_finite(chunk, low.item(), high.item(), zeros, decoder)


def _count_complex(chunk: Array) -> Facts:
    return Facts(
        chunk.size,
        zeros=int(chunk.size - np.count_nonzero(chunk)),
        nan=int(np.count_nonzero(np.isnan(chunk))),
        inf=int(np.count_nonzero(np.isinf(chunk))),
    )


def _summarize_partly_finite(chunk: Array, zeros: int, decoder: Decoder) -> Facts:
    mask = np.isfinite(chunk, out=decoder.buffer("mask", "?", chunk.size))
    count = int(np.count_nonzero(mask))
    finite = np.compress(mask, chunk, out=decoder.buffer("finite", chunk.dtype.str, count))
    nan = int(np.count_nonzero(np.isnan(chunk, out=mask)))
    non_finite_facts = Facts(chunk.size - count, nan, chunk.size - count - nan)
    if not count:
        return non_finite_facts
    return non_finite_facts.merge(_summarize_finite(finite, finite.min().item(), finite.max().item(), zeros, decoder))


def _summarize_finite(chunk: Array, low: float | int, high: float | int, zeros: int, decoder: Decoder) -> Facts:
    if low == high:
        return Facts(chunk.size, zeros=zeros, low=low, high=high, moments=Moments(chunk.size, float(low)))
    work = decoder.buffer("work", "f8", chunk.size)
    np.copyto(work, chunk)
    size = float(max(abs(low), abs(high)))
    # A power of two does not change any digit.
    exponent = 0 if 1 / MAX_UNSCALED < size < MAX_UNSCALED else math.frexp(size)[1]
    if exponent:
        np.ldexp(work, -exponent, out=work)
    mean = float(np.add.reduce(work)) / chunk.size
    np.subtract(work, mean, out=work)
    deviation = math.sqrt(float(np.add.reduce(np.square(work, out=work))) / chunk.size)
    clamped_mean = min(max(mean, math.ldexp(low, -exponent)), math.ldexp(high, -exponent)) if exponent else mean
    moments = Moments(chunk.size, math.ldexp(clamped_mean, exponent), math.ldexp(deviation, exponent))
    return Facts(chunk.size, zeros=zeros, low=low, high=high, moments=moments)


def summarize_codes(counts: Array, values: Array) -> Facts:
    """Return the `Facts` about counted elements: code i occurs `counts[i]` times and has the value `values[i]`."""
    counts, values = np.repeat(counts, values.size // counts.size), values.reshape(-1)
    elements = int(counts.sum())
    occurs, finite = counts > 0, np.isfinite(values)
    nan = int(counts[np.isnan(values)].sum())
    zeros, inf = int(counts[values == 0].sum()), int(counts[~finite].sum()) - nan
    counts, values = counts[occurs & finite], values[occurs & finite]
    if not counts.size:
        return Facts(elements, nan, inf)
    count, low, high = int(counts.sum()), float(values.min()), float(values.max())
    # Only an absurd scale makes codes so large that their squares exceed float64; std is then not available.
    with np.errstate(over="ignore", invalid="ignore"):
        # Without BLAS, because its last bits depend on the processor.
        mean = min(max(float(np.add.reduce(counts * values)) / count, low), high)
        deviation = math.sqrt(float(np.add.reduce(counts * np.square(values - mean))) / count)
    return Facts(elements, nan, inf, zeros=zeros, low=low, high=high, moments=Moments(count, mean, deviation))
