"""Estimate the factor between the values of an older and a newer tensor from samples. These may have outliers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from statecli.core.denormals import with_denormals
from statecli.core.dtypes import SPACING
from statecli.core.errors import StateError
from statecli.core.model_state import TensorData
from statecli.values.elements import Array
from statecli.values.read import read_all_values

#: Minimum fraction of the elements whose ratio must be near the median.
_MIN_SHARE = 0.5
#: Maximum relative distance of a ratio from the median, for types with at most 3 bits of mantissa.
_MAX_DISTANCE_OF_SMALL_FLOATS = 0.15


@with_denormals
def estimate_factor(before: Sequence[TensorData], after: Sequence[TensorData], name: str) -> float | None:
    """Estimate new value / old value from two small samples. Return None if most ratios are far from the median.

    Elements that are zero or not finite on either side are ignored. Also return None for an unreadable sample.
    """
    try:
        old, new = (np.concatenate([read_all_values(part, name) for part in side]) for side in (before, after))
    except StateError:
        return None
    with np.errstate(all="ignore"):
        old, new = old.astype(np.float64), new.astype(np.float64)
        usable_mask = np.isfinite(old) & np.isfinite(new) & (old != 0) & (new != 0)
        return _combine(old[usable_mask], new[usable_mask], before[0].dtype) if usable_mask.any() else None


def _combine(old: Array, new: Array, dtype: str) -> float | None:
    ratios = new / old
    median = float(np.median(ratios))
    distance = 1e-3 + 2 * SPACING[dtype][0] if dtype in SPACING else _MAX_DISTANCE_OF_SMALL_FLOATS
    near_median = np.abs(ratios - median) <= distance * abs(median)
    if np.count_nonzero(near_median) < _MIN_SHARE * ratios.size:
        return None
    factor = float(np.dot(old[near_median], new[near_median]) / np.dot(old[near_median], old[near_median]))
    return factor if np.isfinite(factor) else None
