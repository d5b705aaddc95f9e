"""Facts as people read them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from statecli.core.units import format_count, format_shape, format_size
from statecli.report.bars import draw_bar


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (90_900_000, "90.9 MB"),
        (400_000_000, "400 MB"),
        (10**15, "1000 TB"),
    ],
)
def test_sizes_are_decimal_with_three_digits(count, text):
    """Sizes never carry more digits than a person reads."""
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (512, "512"), (664_000, "664 K"), (22_713_216, "22.7 M"), (10**9, "1 B")]
)
def test_counts_are_scaled(count, text):
    """Elements are counted like sizes, without a unit."""
    assert format_count(count) == text


def test_shape_is_formatted_in_brackets():
    """A scalar is [] and an unknown shape a question mark."""
    assert [format_shape(s) for s in ((2, 3), (), None)] == ["[2,3]", "[]", "?"]


def test_bar_of_a_value_other_than_zero_is_not_empty():
    """Full at 1 and above; a rounding of float32 and less is still seen; nothing for nothing."""
    assert [draw_bar(value) for value in (None, 0.0, 1e-30, 1.0, 1e9)] == ["", "", "▏", "█" * 10, "█" * 10]


@given(st.floats(min_value=0, allow_infinity=False), st.floats(min_value=0, allow_infinity=False))
def test_a_bar_grows_with_the_change(first, second):
    """Never longer for less, and never more than ten cells."""
    less, more = (sum(" ▏▎▍▌▋▊▉█".index(cell) for cell in draw_bar(value)) for value in sorted((first, second)))
    assert less <= more <= 80
    assert len(draw_bar(max(first, second))) <= 10
