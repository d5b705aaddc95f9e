"""Decide whether equal values are evidence of a transformation, or may be equal by chance."""

from __future__ import annotations

import math

from statecli.commands.diff.transformations.views import take_places
from statecli.core.model_state import TensorData
from statecli.values.copy_evidence import measure_bits, measure_evidence

#: Smallest number of bits of evidence for a transformation, in addition to the bits for choosing between the ways in
#: which both sides may fit. By chance, one of 2 ** 32 trials succeeds.
MIN_BITS = 32


def count_bits(data: TensorData, name: str, elements: int, exceptions: int) -> float:
    """Return how many bits of evidence show that the elements are not equal by chance. `data` must have strides."""
    return measure_evidence(measure_bits(take_places(data), name), elements, exceptions)


def is_evident(data: TensorData, name: str, elements: int, exceptions: int = 0, ways: int = 1) -> bool:
    """Return True if the elements cannot be equal by chance, even if this is the best of `ways` tried alignments."""
    return count_bits(data, name, elements, exceptions) >= MIN_BITS + math.log2(ways)
