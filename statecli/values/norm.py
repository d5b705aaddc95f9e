"""L2 norm of a tensor's finite values, from its statistics."""

from __future__ import annotations

import math

from statecli.core.model_state import Stats


def compute_norm(stats: Stats, elements: int) -> float | str:
    """Return the L2 norm of a tensor's finite values, or the reason why it is unknown."""
    if stats.nan is None or stats.inf is None:
        return stats.reason or "its values are not numbers"
    finite = elements - stats.nan - stats.inf
    if finite <= 0:
        return 0.0
    if stats.mean is None or (stats.std is None and finite > 1):
        return stats.reason or "statecli does not compute a norm of its values"
    norm = math.hypot((stats.std or 0.0) * math.sqrt(finite - 1), stats.mean * math.sqrt(finite))
    return norm if math.isfinite(norm) else "its norm is too large for float64"
