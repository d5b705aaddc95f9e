"""Merge two summaries of values field by field, each field by its own rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

_Number = TypeVar("_Number", bound=float)
_Value = TypeVar("_Value")

#: Function that merges the values of a field in two summaries.
Rule = Callable[[Any, Any], Any]


def merge_fields(rules: Mapping[str, Rule], values: Iterable[Any], other_values: Iterable[Any]) -> list[Any]:
    """Merge the field values of two summaries; `rules` has a rule for each field, in the order of the fields."""
    return [rule(a, b) for rule, a, b in zip(rules.values(), values, other_values, strict=True)]


def choose_smallest(a: _Number | None, b: _Number | None) -> _Number | None:
    """Return the smaller of two values; an unknown value (None) is ignored."""
    return min(a, b) if a is not None and b is not None else a if b is None else b


def choose_largest(a: _Number | None, b: _Number | None) -> _Number | None:
    """Return the larger of two values; an unknown value (None) is ignored."""
    return max(a, b) if a is not None and b is not None else a if b is None else b


def choose_given(a: _Value, b: _Value) -> _Value:
    """Return the first value, or the second value if the first is None, zero or empty."""
    return a or b


def keep_if_equal(a: _Value | None, b: _Value | None) -> _Value | None:
    """Return the value if both are equal. Otherwise return None."""
    return a if a == b else None
