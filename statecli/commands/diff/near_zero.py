"""Find parameters that start near zero, such as biases. A large relative change of such a parameter means little."""

from __future__ import annotations

import math
from collections.abc import Iterable

from statecli.commands.diff.result import Change
from statecli.core.model_state import Kind

#: A parameter starts near zero if its old RMS is less than this fraction of the median RMS of the changed parameters.
MAX_RMS_SHARE = 0.01


def find_near_zero(changes: Iterable[Change]) -> frozenset[int]:
    """Return the ids of the changed parameters that start near zero."""
    sizes = {
        id(change): delta.l2 / delta.relative_l2 / math.sqrt(delta.elements)
        for change in changes
        if change.kind is Kind.PARAMETER
        and (delta := change.values) is not None
        and delta.l2
        and delta.relative_l2
        and delta.elements
    }
    sorted_sizes = sorted(sizes.values())
    limit = MAX_RMS_SHARE * sorted_sizes[len(sorted_sizes) // 2] if sorted_sizes else 0.0
    return frozenset(key for key, size in sizes.items() if size < limit)
