"""A name with `#` in place of the numbers of its layers, and the numbers."""

from __future__ import annotations

from hypothesis import given, strategies as st

from statecli.report import fold


@given(st.lists(st.text("ab.[]:\n#0123", max_size=12), max_size=20))
def test_split_equals_a_search_in_the_whole_name(names):
    """The result does not depend on names with the same beginning that were split before."""
    for name in names:
        template, numbers = fold.split_numbers(name)
        assert (template, numbers) == (fold._NUMBER.sub("#", name), tuple(map(int, fold._NUMBER.findall(name))))


def test_a_number_is_a_whole_part_of_a_name():
    """A number with a leading zero is not a number here."""
    assert fold.split_numbers("layers.11.b2.w[3].x") == ("layers.#.b2.w[#].x", (11, 3))
    assert fold.split_numbers("layers.11.b.007") == ("layers.#.b.007", (11,))
