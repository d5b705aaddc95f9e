"""Sum of the squares of a tensor's finite values, from its statistics."""

from __future__ import annotations

import math

from statecli.core.model_state import Stats


def sum_squares(stats: Stats, elements: int) -> float | str:
    """Return the sum of the squares of a tensor's finite values, or the reason why it is unknown."""
    if stats.nan is None or stats.inf is None:
        return stats.reason or "its values are not numbers"
    finite = elements - stats.nan - stats.inf
    if finite <= 0:
        return 0.0
    if stats.mean is None or (stats.std is None and finite > 1):
        return stats.reason or "statecli does not compute a norm of its values"
    try:
        squares = (stats.std or 0.0) ** 2 * (finite - 1) + stats.mean**2 * finite
    except OverflowError:
        squares = math.inf
    return squares if math.isfinite(squares) else "its norm is too large for float64"
