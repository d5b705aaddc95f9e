"""Decide whether equal values are evidence of a transformation: chance gives no claim."""

from __future__ import annotations

import math

from statecli.commands.diff.transformations.views import take_places
from statecli.core.model_state import TensorData
from statecli.values.evidence import measure_bits, measure_evidence

#: Smallest number of bits of evidence, besides the bits for choosing between the ways in which both sides may fit.
#: Chance gives one claim in 2 ** 32 trials.
MIN_BITS = 32


def count_bits(data: TensorData, name: str, elements: int, exceptions: int) -> float:
    """Return the bits by which the equal elements are more than chance. `data` has strides, and their values."""
    return measure_evidence(measure_bits(take_places(data), name), elements, exceptions)


def is_evident(data: TensorData, name: str, elements: int, exceptions: int = 0, ways: int = 1) -> bool:
    """Return True if chance does not make so many elements equal in any of so many ways to align both sides."""
    return count_bits(data, name, elements, exceptions) >= MIN_BITS + math.log2(ways)
