"""Changes of a module as a line of small bars."""

from __future__ import annotations

import math

import pytest

from statecli.report.sparkline import MAX_CELLS, draw_sparkline, find_range


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e-3, 1e-2, 1e-1, 1.0], "▁▃▆█"),
        ([0.0, None, math.nan, 1.0], "· ×█"),
        ([1.0, 0.99, 1.01], "███"),
        ([0.0, 0.0], "··"),
        ([1e-300, 1e300], "▁█"),
        ([5e-324, 1.0], "▁█"),
        ([], ""),
    ],
)
def test_heights_are_logarithmic(values, expected):
    """Zero, unknown and non-finite values have their own characters; a variation of one per cent is level."""
    assert draw_sparkline(values, find_range([values])) == expected


def test_cell_of_many_values_shows_the_largest():
    """300 checkpoints fit into a line of 80 columns, and a spike stays visible."""
    values = [1e-6] * 300
    values[150] = 1.0
    text = draw_sparkline(values, find_range([values]))
    assert len(text) <= MAX_CELLS
    assert (text.count("█"), text.count("▁")) == (1, len(text) - 1)
