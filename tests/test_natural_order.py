"""The sorting key for names, with numbers in numerical order."""

from __future__ import annotations

import re

from hypothesis import given, strategies as st

from statecli.core.natural_order import make_natural_key


@given(st.lists(st.text("ab.\n\u00e90123456789", max_size=12), max_size=20))
def test_numbers_are_in_the_order_of_numbers(names):
    """Names that differ in one number are in the order of this number, whatever the earlier keys."""
    for name in names:
        parts = re.split("([0-9]+)", name)
        expected = "".join(
            f"{len(part.lstrip('0') or '0'):c}{part.lstrip('0') or '0'}" if n % 2 else part
            for n, part in enumerate(parts)
        )
        assert make_natural_key(name) == expected


def test_layers_are_sorted_by_number():
    """`layers.2` comes before `layers.10`, and names without a number are their own keys."""
    names = ["layers.10.a", "layers.9.b", "layers.2.b", "layers.2.a", "a"]
    assert sorted(names, key=make_natural_key) == ["a", "layers.2.a", "layers.2.b", "layers.9.b", "layers.10.a"]
    assert make_natural_key("weight") == "weight"
