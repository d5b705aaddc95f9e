"""Summarize some of a tensor's values, and merge two such summaries.

Partials merge by the formulas of Chan, Golub and LeVeque (1979). Mean and standard deviation are kept, not sums and
squares: neither overflows if the values do not, and data far from zero loses no digits.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from statecli.core.state import Stats
from statecli.values.elements import Array, Decoder

#: Squares of magnitudes outside 1/SAFE ... SAFE could leave the range of float64.
MAX_UNSCALED = 1e120


class Partial(msgspec.Struct, frozen=True, gc=False):
    """Summary of some of a tensor's elements. `mean` and `deviation` (population) are of the `finite` elements."""

    finite: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    low: float | int | None = None
    high: float | int | None = None
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    def merge(self, other: Partial) -> Partial:
        """Return the summary of both. The order of merges changes the last bits only."""
        count = self.finite + other.finite
        mean, deviation = (
            _merge_moments(self, other, count) if self.finite and other.finite else _finite_moments(self, other)
        )
        return Partial(
            count,
            mean,
            deviation,
            min((p.low for p in (self, other) if p.low is not None), default=None),
            max((p.high for p in (self, other) if p.high is not None), default=None),
            self.zeros + other.zeros,
            self.nan + other.nan,
            self.inf + other.inf,
        )

    def repeat(self, count: int) -> Partial:
        """Return the summary of the same elements `count` times over."""
        return Partial(
            self.finite * count,
            self.mean,
            self.deviation,
            self.low if count else None,
            self.high if count else None,
            self.zeros * count,
            self.nan * count,
            self.inf * count,
        )

    def to_stats(self, reason: str | None = None) -> Stats:
        """Return the public `Stats`: nulls if no value is finite, std over n - 1."""
        if self.low is None or self.high is None:
            return Stats(zeros=self.zeros, nan=self.nan, inf=self.inf, reason=reason)
        std = self.deviation * math.sqrt(self.finite / (self.finite - 1)) if self.finite > 1 else None
        if any(float(value) != value for value in (self.low, self.high)):
            reason = join_reasons(reason, f"min and max are rounded: {self.low} and {self.high} exactly")
        if std is not None and not math.isfinite(std):
            std, reason = None, join_reasons(reason, "std is beyond float64")
        return Stats(
            min=float(self.low),
            max=float(self.high),
            mean=self.mean,
            std=std,
            zeros=self.zeros,
            nan=self.nan,
            inf=self.inf,
            reason=reason,
        )


def join_reasons(reason: str | None, more: str) -> str:
    """Return two reasons in one line, or the second alone."""
    return f"{reason}; {more}" if reason else more


def _finite_moments(a: Partial, b: Partial) -> tuple[float, float]:
    return (a.mean, a.deviation) if a.finite else (b.mean, b.deviation)


def _merge_moments(a: Partial, b: Partial, count: int) -> tuple[float, float]:
    """Return mean and deviation of two sets together, halved on the way: a difference of two floats can overflow."""
    share_a, share_b = a.finite / count, b.finite / count
    half = b.mean / 2 - a.mean / 2
    # The result is clamped, because half of the smallest float is 0.
    mean = min(max(2 * (a.mean / 2 + half * share_b), min(a.mean, b.mean)), max(a.mean, b.mean))
    between = half * (2 * math.sqrt(share_a * share_b))
    return mean, math.hypot(a.deviation * math.sqrt(share_a), b.deviation * math.sqrt(share_b), between)


# --- one chunk -----------------------------------------------------------------------------------------------------


def summarize_chunk(chunk: Array, decoder: Decoder) -> Partial:
    """Return the summary of one flat chunk of real or complex values."""
    if chunk.dtype.kind == "c":
        return _count_complex(chunk)
    is_zero = np.equal(chunk, 0, out=decoder.buffer("mask", "?", chunk.size))
    zeros = int(np.count_nonzero(is_zero))
    low, high = chunk.min(), chunk.max()
    if chunk.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
        return _summarize_partly_finite(chunk, zeros, decoder)
    return _summarize_finite(chunk, low.item(), high.item(), zeros, decoder)


def _count_complex(chunk: Array) -> Partial:
    return Partial(
        zeros=int(chunk.size - np.count_nonzero(chunk)),
        nan=int(np.count_nonzero(np.isnan(chunk))),
        inf=int(np.count_nonzero(np.isinf(chunk))),
    )


def _summarize_partly_finite(chunk: Array, zeros: int, decoder: Decoder) -> Partial:
    mask = np.isfinite(chunk, out=decoder.buffer("mask", "?", chunk.size))
    count = int(np.count_nonzero(mask))
    finite = np.compress(mask, chunk, out=decoder.buffer("finite", chunk.dtype.str, count))
    nan = int(np.count_nonzero(np.isnan(chunk, out=mask)))
    odd = Partial(nan=nan, inf=chunk.size - count - nan)
    if not count:
        return odd
    return odd.merge(_summarize_finite(finite, finite.min().item(), finite.max().item(), zeros, decoder))


def _summarize_finite(chunk: Array, low: float | int, high: float | int, zeros: int, decoder: Decoder) -> Partial:
    if low == high:
        return Partial(chunk.size, float(low), 0.0, low, high, zeros)
    work = decoder.buffer("work", "f8", chunk.size)
    np.copyto(work, chunk)
    size = float(max(abs(low), abs(high)))
    # A power of two changes no digit.
    exponent = 0 if 1 / MAX_UNSCALED < size < MAX_UNSCALED else math.frexp(size)[1]
    if exponent:
        np.ldexp(work, -exponent, out=work)
    mean = float(np.add.reduce(work)) / chunk.size
    np.subtract(work, mean, out=work)
    deviation = math.sqrt(float(np.add.reduce(np.square(work, out=work))) / chunk.size)
    scaled = min(max(mean, math.ldexp(low, -exponent)), math.ldexp(high, -exponent)) if exponent else mean
    return Partial(chunk.size, math.ldexp(scaled, exponent), math.ldexp(deviation, exponent), low, high, zeros)


def summarize_codes(counts: Array, values: Array) -> Partial:
    """Return the summary of values that each occur `counts[i]` times: float64, a row a code of packed types."""
    counts, values = np.repeat(counts, values.size // counts.size), values.reshape(-1)
    occurs, finite = counts > 0, np.isfinite(values)
    nan = int(counts[np.isnan(values)].sum())
    zeros, inf = int(counts[values == 0].sum()), int(counts[~finite].sum()) - nan
    counts, values = counts[occurs & finite], values[occurs & finite]
    if not counts.size:
        return Partial(nan=nan, inf=inf)
    count, low, high = int(counts.sum()), float(values.min()), float(values.max())
    # Only an absurd scale brings codes near the square root of the largest float64; then std is not available.
    with np.errstate(over="ignore", invalid="ignore"):
        # Not by BLAS, whose last bits depend on the processor.
        mean = min(max(float(np.add.reduce(counts * values)) / count, low), high)
        deviation = math.sqrt(float(np.add.reduce(counts * np.square(values - mean))) / count)
    return Partial(count, mean, deviation, low, high, zeros, nan, inf)
