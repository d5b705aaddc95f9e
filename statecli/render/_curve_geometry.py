"""Curves as geometry: a line through values over steps, with a point for each value."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

from statecli.core.units import format_number, plural
from statecli.render._chart_geometry import Picture, PlotBox, Point, Scale, Tick, build_linear_scale, build_log_scale
from statecli.report import Curve

#: Largest number of points with a title; of more points, only alarms have a title.
MAX_POINTS = 500
#: Smallest ratio between the largest and the smallest value for a logarithmic scale.
MIN_LOG_RATIO = 20.0
#: Width of the strip of an alarm whose value is unknown.
ALARM_WIDTH = 3.0


def build_curve_picture(chart: Curve) -> Picture:
    """Lay out the curve."""
    plot = PlotBox(58.0, 30.0, 380.0, 150.0) if chart.small else PlotBox(58.0, 30.0, 1080.0, 300.0)
    values = [value for value in chart.values if math.isfinite(value)]
    y_scale = _choose_scale(values)
    across = build_linear_scale(min(chart.places, default=0.0), max(chart.places, default=0.0), 4 if chart.small else 8)
    xs = [plot.to_x(across.compute_share(place)) for place in chart.places]
    ys = [plot.compute_y(value, y_scale) if math.isfinite(value) else None for value in chart.values]
    return Picture(
        title=chart.title,
        note=_describe_curve(chart),
        width=plot.right + 20.0,
        height=plot.bottom + 40.0,
        plot=plot,
        marks=(),
        x_ticks=tuple(Tick(plot.to_x(at), _add_separators(text)) for at, text in across.ticks),
        y_ticks=tuple(Tick(plot.to_y(at), text) for at, text in y_scale.ticks) if y_scale else (),
        unit=chart.unit,
        below=chart.below,
        ground=plot.bottom,
        wide=not chart.small,
        lines=tuple(_build_lines(xs, ys)),
        points=tuple(_build_points(chart, xs, ys, plot)),
    )


def _choose_scale(values: Sequence[float]) -> Scale | None:
    """Return a logarithmic scale for values of several magnitudes, else a linear scale, or None for no values."""
    positive = [value for value in values if value > 0]
    if not positive:
        return build_linear_scale(min(values), max(values) or float(not any(values))) if values else None
    low, high = min(positive), max(positive)
    if min(values) >= 0 and high / MIN_LOG_RATIO > low:
        return build_log_scale(low, high)
    low = min(values)
    margin, largest = high * 0.05 - low * 0.05, sys.float_info.max
    return build_linear_scale(max(low - margin, -largest), min(high + margin, largest))


def _build_lines(xs: Sequence[float], ys: Sequence[float | None]) -> Iterator[str]:
    """Yield the corners of each part of the line. A missing value ends a part."""
    part: list[str] = []
    for x, y in zip(xs, ys, strict=True):
        if y is not None:
            part.append(f"{x:.1f},{y:.1f}")
        elif part:
            yield " ".join(part)
            part = []
    if part:
        yield " ".join(part)


def _build_points(chart: Curve, xs: Sequence[float], ys: Sequence[float | None], plot: PlotBox) -> Iterator[Point]:
    borders = [plot.left, *((before + after) / 2 for before, after in pairwise(xs)), plot.right]
    tensors = chart.tensors or (None,) * len(xs)
    entries = zip(xs, ys, chart.labels, chart.values, chart.alarms, tensors, strict=True)
    for n, (x, y, label, value, alarm, tensor) in enumerate(entries):
        width = max(0.0, borders[n + 1] - borders[n])
        number = format_number(value) if math.isfinite(value) else "not known"
        title = "; ".join(filter(None, (f"{label}: {number}", alarm)))
        if alarm and y is None:
            yield Point(x, None, x - ALARM_WIDTH / 2, ALARM_WIDTH, title, "odd", tensor)
        elif y is not None and (alarm or len(xs) <= MAX_POINTS):
            yield Point(x, y, borders[n], width, title, "odd" if alarm else "", tensor)


def _describe_curve(chart: Curve) -> str:
    """Return a note about the curve: the number of values, gaps and alarms."""
    parts = [plural(len(chart.values), "value")]
    if unknown := sum(not math.isfinite(value) for value in chart.values):
        parts.append(f"{unknown:,} not known (gaps)")
    if alarms := sum(map(bool, chart.alarms)):
        parts.append(f"{plural(alarms, 'alarm')} (red)")
    return "; ".join(parts)


def _add_separators(text: str) -> str:
    """Return a number with commas between thousands, as in all other texts about steps."""
    return f"{int(text):,}" if text.isdecimal() else text
