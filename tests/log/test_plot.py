"""The plot of `statecli log -f html`: norm and change over the steps."""

from __future__ import annotations

import math
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from statecli.render._curve_geometry import build_curve_picture
from statecli.report import Curve

torch = pytest.importorskip("torch")


def draw(values, places=None, alarms=None):
    labels = tuple(str(number) for number in range(len(values)))
    places = tuple(float(number) for number in range(len(values))) if places is None else places
    return build_curve_picture(Curve("title", labels, places, tuple(values), alarms or ("",) * len(values)))


def list_corners(picture):
    return [[tuple(map(float, corner.split(","))) for corner in line.split(" ")] for line in picture.lines]


@given(st.lists(st.floats(), max_size=30))
def test_every_number_is_drawn_inside_of_the_plot(values):
    """The values include the largest float, a denormal, or no value; a value that is not finite is a gap."""
    picture = draw(values)
    corners = [corner for line in list_corners(picture) for corner in line]
    assert len(corners) == sum(map(math.isfinite, values))
    assert all(picture.plot.left - 0.1 <= x <= picture.plot.right + 0.1 for x, _ in corners)
    assert all(picture.plot.top - 0.1 <= y <= picture.plot.bottom + 0.1 for _, y in corners)


def test_places_are_to_scale():
    """The horizontal distance of two checkpoints is proportional to their steps."""
    ((first, second, third),) = list_corners(draw([1.0, 2.0, 3.0], (0.0, 100.0, 300.0)))
    assert third[0] - second[0] == pytest.approx(2 * (second[0] - first[0]), abs=0.2)
    assert first[1] > second[1] > third[1]


def test_a_gap_divides_the_line():
    """An unknown value is not drawn, and its neighbours are not connected."""
    assert [len(line) for line in list_corners(draw([1.0, 2.0, math.nan, 3.0]))] == [2, 1]


def test_changes_of_several_magnitudes_have_a_logarithmic_scale():
    """Equal factors have equal heights."""
    ((first, second, third),) = list_corners(draw([1e-4, 1e-3, 1e-2]))
    assert first[1] - second[1] == pytest.approx(second[1] - third[1], abs=0.2)


def test_an_alarm_is_a_red_point():
    """The point is on the line; an unknown value has a vertical line instead. The title has the text of the alarm."""
    picture = draw([1.0, 2.0], alarms=("", "NaN in w"))
    (alarm,) = [point for point in picture.points if point.mood == "odd"]
    assert alarm.title == "1: 2; NaN in w"
    assert alarm.y == pytest.approx(list_corners(picture)[0][1][1], abs=0.1)
    (gap,) = [point for point in draw([1.0, math.nan], alarms=("", "NaN in w")).points if point.mood == "odd"]
    assert (gap.y, gap.width) == (None, 3.0)
    assert "1 alarm (red)" in picture.note


def test_ten_thousand_checkpoints_have_a_line_and_no_titles():
    """Without titles the page stays small; alarms are still drawn."""
    picture = draw([1.0] * 10_000, alarms=("",) * 9_999 + ("NaN in w",))
    assert len(list_corners(picture)[0]) == 10_000
    assert len(picture.points) == 1


def test_the_page_has_both_curves(statecli, saved_runs):
    """The curves are drawn over the steps, with the NaN in red; the page fetches nothing."""
    page = statecli("log", saved_runs("trainer"), "-f", "html").out
    assert page.count("<polyline") == 2
    assert "step 1,000: 25." in page
    assert page.count('class="point odd"') == 2
    assert not re.search(r'(?:src|href)="?https?:', page)


def test_a_copy_of_the_last_checkpoint_does_not_change_the_axis(statecli, saved_runs):
    """Lightning's last.ckpt has the step of the previous checkpoint."""
    page = statecli("log", saved_runs("lightning"), "-f", "html").out
    assert '<text class="middle" x="1080" y="317">1,200</text>' in page


def test_names_are_text(statecli, tmp_path):
    """A tensor name with markup is escaped in the page."""
    name = "<script>alert(1)</script>"
    for number, value in enumerate((1.0, float("nan"))):
        torch.save({f"a.{name}": torch.tensor([value])}, tmp_path / f"{number}.pt")
    assert name not in statecli("log", tmp_path, "-f", "html").out
