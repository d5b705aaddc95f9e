"""Charts are drawn to scale and inside the picture, and report the values that cannot be drawn."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from statecli.render._chart_geometry import MAX_BARS, build_picture
from statecli.report import Bars, Spread

finite = st.floats(allow_nan=False, allow_infinity=False)


def bars(values, labels=None):
    return build_picture(Bars("t", tuple(labels or (f"x{n}" for n in range(len(values)))), tuple(values), "u"))


def test_y_axis_of_bars_is_logarithmic():
    """The y axis counts orders of magnitude, and each tick is at its value."""
    picture = bars([0.001, 0.01, 0.1])
    heights = [mark.height for mark in picture.marks]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1])
    at = {tick.text: tick.at for tick in picture.y_ticks}
    assert at["0.01"] == pytest.approx(picture.plot.bottom - heights[1])
    assert at["0.1"] == pytest.approx(picture.plot.top)


def test_negative_values_stand_below_the_axis():
    """A signed chart is linear and its bars start at zero."""
    picture = bars([3.0, -1.5])
    up, down = picture.marks
    assert up.y + up.height == pytest.approx(picture.ground) == pytest.approx(down.y)
    assert up.height == pytest.approx(2 * down.height)


def test_a_zero_and_a_nan_look_like_neither_a_small_nor_a_large_value():
    """Zero and NaN have separate moods, and the note counts both."""
    picture = bars([0.0, math.nan, math.inf, 1.0])
    assert [mark.mood for mark in picture.marks] == ["zero", "odd", "boundless", ""]
    assert "1 zero" in picture.note
    assert "1 not finite (red" in picture.note
    assert "1 infinite (drawn from the top)" in picture.note
    assert [mark.title for mark in picture.marks[1:3]] == ["x1: not finite", "x2: infinite"]


def test_chart_names_bars_without_a_bound_and_bars_with_nan():
    """This holds among neighbours too; if a bar also has a NaN, the bar has the colour of NaN."""
    values = [1.0] * 5000
    values[7] = values[777] = math.inf
    values[779] = math.nan
    picture = build_picture(Bars("t", tuple(f"x{n}" for n in range(5000)), tuple(values), "u", ("from zero",) * 5000))
    first, second = (mark for mark in picture.marks if mark.mood in ("odd", "boundless"))
    assert (first.mood, second.mood) == ("boundless", "odd")
    assert [mark.mood for mark in picture.marks if mark.x == first.x] == ["boundless", "most", "least"]
    assert "1 from zero, for example x7" in first.title
    assert "1 not finite, for example x779" in second.title
    assert "2 from zero (drawn from the top)" in picture.note


def test_note_counts_bars_without_a_value_by_reason():
    """Each bar without a value has its own reason, and the note counts the reasons."""
    words = ("of another shape", "not compared", "not compared", "")
    picture = build_picture(Bars("t", ("a", "b", "c", "d"), (math.inf, math.inf, math.inf, 0.5), "u", words))
    assert [mark.title for mark in picture.marks] == [
        "a: of another shape",
        "b: not compared",
        "c: not compared",
        "d: 0.5",
    ]
    assert "1 of another shape, 2 not compared (drawn from the top)" in picture.note


def test_layers_are_marked_in_their_middle():
    """The axis names the stack and counts its layers; names of another stack do not interfere."""
    labels = ["emb.w", *(f"h.{n}.{part}" for n in range(12) for part in "abcd"), "z.0.w"]
    picture = bars([1.0] * len(labels), labels)
    assert picture.below == "h.N"
    assert [tick.text for tick in picture.x_ticks] == [str(n) for n in range(12)]
    slot = (picture.plot.right - picture.plot.left) / len(labels)
    assert picture.x_ticks[3].at == pytest.approx(picture.plot.left + slot * (1 + 3 * 4 + 2))


@pytest.mark.parametrize(("layers", "others"), [(24, 0), (24, 400), (300, 0), (1200, 3000)])
def test_numbers_of_layers_never_run_into_each_other(layers, others):
    """This holds in the corner of the axis too; a digit of 12 px sans-serif is less than 7 units wide."""
    labels = [f"h.{n}.{part}" for n in range(layers) for part in "abc"] + [f"z{n}" for n in range(others)]
    ticks = bars([1.0] * len(labels), labels).x_ticks
    assert len(ticks) > 1
    for first, second in itertools.pairwise(ticks):
        assert second.at - first.at >= 7 * (len(first.text) + len(second.text)) / 2 + 5


def test_few_bars_have_their_names():
    """Up to 40 bars are named below, long names elided in the middle."""
    picture = bars([1.0, 2.0], ["a", "m." * 40 + "weight"])
    assert picture.upright
    assert picture.x_ticks[0].text == "a"
    assert picture.x_ticks[1].text.endswith("m.weight")
    assert len(picture.x_ticks[1].text) < 30


@given(st.lists(st.one_of(st.floats(), st.just(0.0)), max_size=60).flatmap(lambda v: st.just(v * 11)))
def test_bars_of_any_values_are_inside_the_plot(values):
    """From the least denormal to the greatest float, signed or not: finite coordinates in the plot, in order."""
    picture = bars(values)
    check_bounds(picture)
    drawn_marks = [mark for mark in picture.marks if mark.mood not in ("least", "boundless")]
    assert [mark.x for mark in drawn_marks] == sorted(mark.x for mark in drawn_marks)
    assert len(drawn_marks) <= MAX_BARS
    assert len(picture.y_ticks) <= 12


def check_bounds(picture):
    for mark in picture.marks:
        assert picture.plot.left - 1e-6 <= mark.x <= mark.x + mark.width <= picture.plot.right + 1
        assert picture.plot.top - 5 <= mark.y <= mark.y + mark.height <= picture.plot.bottom + 5
    for tick in picture.y_ticks:
        assert picture.plot.top - 1e-6 <= tick.at <= picture.plot.bottom + 1e-6


@given(st.lists(finite, min_size=2, max_size=50, unique=True), st.data())
def test_histogram_with_any_edges_is_inside_the_plot(edges, data):
    """This holds for denormal and huge ranges; zero is marked exactly if zero lies between the ends."""
    edges = sorted(edges)
    counts = data.draw(st.lists(st.integers(0, 10**12), min_size=len(edges) - 1, max_size=len(edges) - 1))
    picture = build_picture(Spread("t", tuple(edges), tuple(counts), "Δ"))
    check_bounds(picture)
    assert (picture.zero is not None) == (edges[0] <= 0 <= edges[-1])
    assert all(picture.plot.left - 1e-6 <= tick.at <= picture.plot.right + 1e-6 for tick in picture.x_ticks)


def test_a_histograms_bars_are_to_scale():
    """Twice the count has twice the height; an empty bin has no bar, and a count of one in a million is visible."""
    picture = build_picture(Spread("t", (0.0, 1.0, 2.0, 3.0, 4.0), (500_000, 1_000_000, 0, 1), "Δ"))
    half, whole, none, first = (mark.height for mark in picture.marks)
    assert whole == pytest.approx(2 * half)
    assert none == 0 < 1 <= first
    assert whole == pytest.approx(picture.plot.bottom - picture.plot.top)


def test_ticks_of_a_histogram_are_round_numbers_at_their_values():
    """-0.02, 0, 0.02 between -0.03 and 0.03; zero in the middle."""
    picture = build_picture(Spread("t", (-0.03, 0.03), (4,), "Δ"))
    at = {tick.text: tick.at for tick in picture.x_ticks}
    assert set(at) == {"-0.02", "0", "0.02"}
    assert at["0"] == pytest.approx((picture.plot.left + picture.plot.right) / 2) == pytest.approx(picture.zero)


@pytest.mark.parametrize("edges", [(), (0.0, math.inf), (math.nan, 1.0)])
def test_a_histogram_without_a_finite_range_says_so(edges):
    """Such a histogram is neither drawn wrong nor left out."""
    picture = build_picture(Spread("t", edges, (1,) if edges else (), "Δ"))
    assert (picture.marks, picture.x_ticks) == ((), ())
    assert "not drawn" in picture.note


def test_counts_are_written_whole():
    """An axis does not show half an element."""
    assert [tick.text for tick in build_picture(Spread("t", (0.0, 1.0), (1,), "Δ")).y_ticks] == ["0", "1"]


@pytest.mark.parametrize("largest", [0.001, 0.00025, 1e-5, 3e-7, 1e300])
def test_numbers_of_a_histogram_stand_inside_the_picture(largest):
    """The numbers at the ends count too, half outside of the plot; a character of 12 px is 6 to 7 units wide."""
    picture = build_picture(Spread("t", (-largest, 0.0, largest), (1, 2), "Δ"))
    for tick in picture.x_ticks:
        assert tick.at - 6.5 * len(tick.text) / 2 >= 0
        assert tick.at + 6.5 * len(tick.text) / 2 <= picture.width
