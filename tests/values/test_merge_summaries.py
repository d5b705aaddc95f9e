"""The summaries of two pieces of a tensor merge field by field, as if the pieces had been one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from statecli.values import summary, tally
from statecli.values.elements import Decoder
from statecli.values.merge_summaries import choose_largest, choose_smallest, keep_if_equal


def test_each_field_of_a_summary_has_a_rule():
    """The rules are in the order of the fields, because the fields are merged by position."""
    assert tuple(tally._MERGE_RULES) == tally.Tally._fields
    assert tuple(summary._MERGE_RULES) == summary.Facts.__struct_fields__


@pytest.mark.parametrize("choose", [choose_smallest, choose_largest])
def test_known_value_is_chosen_over_an_unknown_value(choose):
    """A 0 is known."""
    assert choose(None, 0) == choose(0, None) == 0
    assert choose(None, None) is None


def test_the_smaller_and_the_larger_value_are_chosen():
    assert (choose_smallest(1, 2), choose_smallest(2, 1)) == (1, 1)
    assert (choose_largest(1, 2), choose_largest(2, 1)) == (2, 2)


def test_only_an_equal_value_is_kept():
    """Two pieces of different constants are not constant."""
    assert keep_if_equal(b"a", b"a") == b"a"
    assert keep_if_equal(b"a", b"b") is None


def test_the_pieces_of_a_tensor_have_the_summary_of_the_whole():
    """Counts and range exactly, mean and deviation nearly."""
    values = np.array([0.0, 1.5, -2.0, np.nan, np.inf, 7.0, -3.0, 0.0])
    whole = summary.summarize_chunk(values, Decoder())
    merged = summary.summarize_chunk(values[:3], Decoder()).merge(summary.summarize_chunk(values[3:], Decoder()))
    assert msgspec.structs.replace(merged, moments=whole.moments) == whole
    assert merged.moments.mean == pytest.approx(whole.moments.mean)
    assert merged.moments.deviation == pytest.approx(whole.moments.deviation)
