"""Merge two summaries of values: one rule for each field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: Merges the values of a field in two summaries.
Rule = Callable[[Any, Any], Any]


def merge_fields(rules: Mapping[str, Rule], one: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    """Return the merged values of the fields; `rules` has the rule of each field, in the order of the fields."""
    return [rule(a, b) for rule, a, b in zip(rules.values(), one, other, strict=True)]


def choose_smallest(a: Any, b: Any) -> Any:
    """Return the smaller value; None is an unknown value."""
    return min(a, b) if a is not None and b is not None else a if b is None else b


def choose_largest(a: Any, b: Any) -> Any:
    """Return the larger value; None is an unknown value."""
    return max(a, b) if a is not None and b is not None else a if b is None else b


def choose_given(a: Any, b: Any) -> Any:
    """Return the first value that is given."""
    return a or b


def keep_if_equal(a: Any, b: Any) -> Any:
    """Return the value that both have; None if they differ."""
    return a if a == b else None
