"""Distribution of the values of a tensor, as plain data."""

from __future__ import annotations

import msgspec

#: Levels of `Distribution.quantiles`.
QUANTILE_LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class Distribution(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How the finite values of a tensor are spread.

    Attributes:
        first: The first values in the order of the elements; null for a value that is not finite.
        low: Smallest value, where the first bin begins.
        high: Largest value, where the last bin ends.
        counts: Numbers of values in bins of equal width; empty if all values are equal or none is finite.
        quantiles: The values at the levels 0.01, 0.05, 0.25, 0.5, 0.75, 0.95 and 0.99, within 0.4 %.
        reason: Why the values cannot be read as numbers.
        first_nan: Index of the first NaN in the order of the elements; left out without NaN.
        first_inf: Index of the first infinity.
    """

    first: tuple[float | None, ...] = ()
    low: float | None = None
    high: float | None = None
    counts: tuple[int, ...] = ()
    quantiles: tuple[float, ...] = ()
    reason: str | None = None
    first_nan: tuple[int, ...] | None = None
    first_inf: tuple[int, ...] | None = None
