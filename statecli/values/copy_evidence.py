"""Measure how strongly equal values show that a tensor is a copy: values may also be equal by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError
from statecli.core.model_state import TensorData
from statecli.values.elements import Array
from statecli.values.read import read_all_values

#: Maximum number of bits of information in a value: the mantissa bits of float32.
_MAX_BITS = 24
#: Minimum number of equal pairs in a sample for estimating the probability of an equal pair.
_MIN_EQUAL_PAIRS = 16


@with_denormals
def measure_bits(sample: Sequence[TensorData], name: str) -> float:
    """Estimate the bits of information per element from a small sample. Return 0 for equal or unreadable elements.

    Two elements of the sample are equal with probability 2 ** -bits. If few or no elements are equal, the result is
    limited to the mean number of bits that the values use.
    """
    try:
        values = np.concatenate([read_all_values(part, name) for part in sample])
    except StateError:
        return 0.0
    if not values.size:
        return 0.0
    _, counts = np.unique(values, return_counts=True)
    pairs = values.size * (values.size - 1) / 2
    equal = float((counts * (counts - 1.0)).sum() / 2)
    if equal >= _MIN_EQUAL_PAIRS:
        return -math.log2(equal / pairs)
    return min(_count_written_bits(values), -math.log2(equal / pairs) if equal else math.inf)


def _count_written_bits(values: Array) -> float:
    """Return the mean number of significant mantissa bits of floats, or the bits of the range of integers."""
    if values.dtype.kind == "c":
        return _count_written_bits(values.real) + _count_written_bits(values.imag)
    if values.dtype.kind in "iu":
        lowest, highest = int(values.min()), int(values.max())
        return min(_MAX_BITS, math.log2(1 + (highest - lowest if values.size > 1 else abs(highest))))
    with np.errstate(all="ignore"):
        finite = values[np.isfinite(values)].astype(np.float64)
        mantissas = np.abs(np.ldexp(np.frexp(finite)[0], 53)).astype(np.int64)
    zeros = np.log2(np.maximum(mantissas & -mantissas, 1).astype(np.float64))
    bits = np.where(mantissas == 0, 0, np.minimum(53 - zeros, _MAX_BITS))
    return float(bits.sum() / values.size)


def measure_evidence(bits: float, elements: int, exceptions: int) -> float:
    """Return the bits of evidence that a tensor is a copy, if `exceptions` of `elements` compared elements differ.

    By chance, as many or more elements are equal with a probability of at most 2 ** -result (Chernoff bound).
    """
    chance, share = 2.0**-bits, (elements - exceptions) / elements if elements else 0.0
    if share <= chance:
        return 0.0
    exception_term = (1 - share) * math.log2((1 - share) / (1 - chance)) if share < 1 else 0.0
    return elements * (share * (math.log2(share) + bits) + exception_term)
