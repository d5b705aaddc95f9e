"""Compute the geometry of charts: positions of bars, ticks and labels, which the page's template draws.

Lengths are in units of the picture's coordinate system, y downwards, as in SVG.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal

import msgspec

from statecli.core.escaping import truncate_middle
from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import TensorKey
from statecli.core.units import format_count, format_number, plural
from statecli.report import Bars, Spread

#: Largest number of bars; more values share bars, because bars thinner than two pixels cannot be distinguished.
MAX_BARS = 500
#: Largest number of bars that each have a name.
MAX_NAMED_BARS = 40
#: Largest number of characters of a name below its bar, and width of a character in units.
NAME_LENGTH, NAME_WIDTH = 26, 6.3
#: Width of a digit on an axis in units, and smallest gap between two numbers there.
DIGIT_WIDTH, MIN_TICK_GAP = 7.0, 9.0
#: Smallest height of a bar, height of a zero, and height of a bar without a measure, which is drawn from the top.
MIN_HEIGHT, ZERO_HEIGHT, BOUNDLESS_HEIGHT = 1.5, 4.0, 7.0
#: Largest width of a bar, for charts with few bars.
MAX_BAR_WIDTH = 40.0

#: First number among the parts of a name: the 3 of `encoder.layer.3.weight`.
_LAYER = compile_on_use(r"(?:^|[.\[])(\d{1,6})(?=[.\]]|$)")


class Mark(msgspec.Struct, frozen=True):
    """Rectangle of a chart: a bar, or a part of a bar.

    `mood` sets the style: "" for a value, "unusual" for a value that stands out, "most" and "least" for several values
    in a bar. Bars with the mood "zero", "odd" (not finite) or "boundless" (no measure) are not to scale. `tensor` is
    the section and name of the tensor behind the bar.
    """

    x: float
    y: float
    width: float
    height: float
    title: str
    mood: str = ""
    tensor: TensorKey | None = None


class Tick(msgspec.Struct, frozen=True):
    """A position on an axis, and its text."""

    at: float
    text: str


class PlotBox(msgspec.Struct, frozen=True):
    """Position of the plot inside its picture."""

    left: float
    top: float
    right: float
    bottom: float

    def to_x(self, share: float) -> float:
        """Return the x coordinate of a point at `share` (0 to 1) of the plot's width, from the left."""
        return self.left + share * (self.right - self.left)

    def to_y(self, share: float) -> float:
        """Return the y coordinate of a point at `share` (0 to 1) of the plot's height, from the bottom."""
        return self.bottom - share * (self.bottom - self.top)

    def compute_y(self, value: float, scale: Scale | None) -> float:
        """Return the y coordinate of a value. Without a scale, and for 0 on a log scale, this is the bottom."""
        return self.to_y(0.0 if scale is None or (scale.log and value <= 0) else scale.compute_share(value))


class Point(msgspec.Struct, frozen=True):
    """Point of a line. The page shows its title if the mouse is over the strip from `left` that is `width` wide.

    `mood` "odd" marks an alarm: a red point, or a strip from the bottom to the top if the value is unknown.
    `tensor` is the section and name of the tensor behind the point.
    """

    x: float
    y: float | None
    left: float
    width: float
    title: str
    mood: str = ""
    tensor: TensorKey | None = None


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Chart with its layout. `unit` is the title of the y axis, `below` is that of the x axis.

    `wide` requests the whole width of a page. `lines` are the corners of lines, as SVG writes them. With `upright`, the
    texts of the x axis are names, written upwards. `ground` is the y of the bars' base. `zero` is the x of 0, or None
    if the x axis does not include 0.
    """

    title: str
    note: str
    width: float
    height: float
    plot: PlotBox
    marks: tuple[Mark, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    unit: str
    below: str
    ground: float
    wide: bool = False
    upright: bool = False
    zero: float | None = None
    lines: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()


def build_picture(chart: Bars | Spread) -> Picture:
    """Lay out the chart."""
    return _build_bar_chart(chart) if isinstance(chart, Bars) else _build_histogram(chart)


class _Bar(msgspec.Struct, frozen=True):
    """A value with its name. `word` replaces an infinite value in texts; for a finite value, `word` is a remark."""

    label: str
    value: float
    word: str
    tensor: TensorKey | None
    is_unusual: bool


class Scale(msgspec.Struct, frozen=True):
    """Scale that maps values to 0..1 on an axis with `ticks`.

    `low` and `high` are logarithms, or the ends in units of 10**exponent, which works for the whole range of floats.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False
    exponent: int = 0

    def compute_share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 (lower end) to 1 (upper end)."""
        position = math.log10(value) if self.log else _compute_mantissa(value, self.exponent)
        return (position - self.low) / (self.high - self.low)


def build_log_scale(smallest: float, largest: float) -> Scale:
    """Return a scale of whole decades around two positive numbers. It begins at least 0.1 decades below `smallest`."""
    low, high = math.floor(math.log10(smallest) - 0.1), math.ceil(math.log10(largest))
    high = max(high, low + 1)
    step = math.ceil((high - low) / 7)
    parts = (1, 2, 5) if high - low <= 2 else (1,)
    exponents = range(low, high + 1, step)
    ticks = [(math.log10(part) + e, _format_scaled(part, e)) for e in exponents for part in parts]
    return Scale(low, high, tuple(((e - low) / (high - low), text) for e, text in ticks if e <= high), log=True)


def build_linear_scale(low: float, high: float, max_ticks: int = 5) -> Scale:
    """Return a scale between two finite numbers, with ticks at 1, 2 or 5 times a power of ten."""
    largest = max(abs(low), abs(high))
    exponent = math.floor(math.log10(largest)) if largest else 0
    start, end = _compute_mantissa(low, exponent), _compute_mantissa(high, exponent)
    if start == end:
        start, end = start - 0.5, end + 0.5
    step = _choose_step((end - start) / max_ticks)
    places = [n * step for n in range(math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9) + 1)]
    ticks = tuple(((at - start) / (end - start), _format_scaled(at, exponent)) for at in places)
    return Scale(start, end, ticks, exponent=exponent)


def _compute_mantissa(value: float, exponent: int) -> float:
    """Return value / 10**exponent, also if the power is too large for a float."""
    return float(Decimal(value).scaleb(-exponent))


def _choose_step(min_step: float) -> float:
    """Return the smallest step of at least `min_step` among 1, 2, 5 or 10 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(min_step))
    return next(part * power for part in (1, 2, 5, 10) if part * power >= min_step * (1 - 1e-9))


def _format_scaled(mantissa: float, exponent: int) -> str:
    """Format mantissa * 10**exponent, also if the product is too large for a float."""
    if -300 < exponent < 300:
        return format_number(float(Decimal(repr(round(mantissa, 9))).scaleb(exponent)))
    return f"{mantissa:g}e{exponent}" if mantissa else "0"


# Bars: one value after the other.


def _build_bar_chart(chart: Bars) -> Picture:
    """Lay out a bar for each value. If there are too many values, neighbours share a bar."""
    count = len(chart.values)
    words = chart.words or tuple("infinite" if math.isinf(value) else "" for value in chart.values)
    tensors, unusual = chart.tensors or (None,) * count, chart.unusual or (False,) * count
    bars = [_Bar(*entry) for entry in zip(chart.labels, chart.values, words, tensors, unusual, strict=True)]
    size = max(1, math.ceil(len(bars) / MAX_BARS))
    plot = PlotBox(58.0, 30.0, 1094.0, 300.0)
    scale = _choose_scale([value for value in chart.values if math.isfinite(value)])
    ground = plot.compute_y(0.0, scale)
    has_names = len(bars) <= MAX_NAMED_BARS
    axis_title, ticks = (
        ("", _build_name_ticks(chart.labels, plot)) if has_names else _build_layer_ticks(chart.labels, plot)
    )
    label_height = 12 + NAME_WIDTH * max((len(tick.text) for tick in ticks), default=0) if has_names else 40.0
    return Picture(
        title=chart.title,
        note=_describe_chart(bars, size),
        width=1100.0,
        height=plot.bottom + label_height,
        plot=plot,
        marks=tuple(_build_marks([bars[at : at + size] for at in range(0, len(bars), size)], scale, ground, plot)),
        x_ticks=ticks,
        y_ticks=tuple(Tick(plot.to_y(at), text) for at, text in scale.ticks) if scale else (),
        unit=chart.unit,
        below=axis_title,
        ground=ground,
        wide=True,
        upright=has_names,
    )


def _build_name_ticks(labels: Sequence[str], plot: PlotBox) -> tuple[Tick, ...]:
    return tuple(
        Tick(plot.to_x((n + 0.5) / len(labels)), truncate_middle(label, NAME_LENGTH)) for n, label in enumerate(labels)
    )


def _choose_scale(finite: Sequence[float]) -> Scale | None:
    """Return a logarithmic scale, or a linear scale if a value is negative. Return None if all values are zero."""
    positive = [value for value in finite if value > 0]
    if any(value < 0 for value in finite):
        return build_linear_scale(min(finite), max(0.0, *finite))
    return build_log_scale(min(positive), max(positive)) if positive else None


def _build_marks(bins: list[list[_Bar]], scale: Scale | None, ground: float, plot: PlotBox) -> Iterator[Mark]:
    """Yield the marks of each bar. A bar for several values shows the largest faintly and the smallest strongly."""
    slot = (plot.right - plot.left) / max(1, len(bins))
    width = min(slot * 0.8, MAX_BAR_WIDTH) if slot > 3 else slot
    for n, values in enumerate(bins):
        x = plot.left + slot * n + (slot - width) / 2
        title, largest = _describe_bars(values), max(values, key=_rank_bar)
        sizes = sorted((bar.value for bar in values if math.isfinite(bar.value)), key=abs)
        if any(math.isnan(bar.value) for bar in values):
            yield Mark(x, plot.top, width, plot.bottom - plot.top, title, "odd", largest.tensor)
            continue
        if len(sizes) < len(values):
            yield Mark(x, plot.top, width, BOUNDLESS_HEIGHT, title, "boundless", largest.tensor)
        if sizes and sizes[-1] == 0:
            yield Mark(x, ground - ZERO_HEIGHT, width, ZERO_HEIGHT, title, "zero", largest.tensor)
        elif sizes:
            moods = ["most", "least"] if len(values) > 1 else ["unusual" if largest.is_unusual else ""]
            for size, mood in zip((sizes[-1], sizes[0]), moods, strict=False):
                height = max(abs(ground - plot.compute_y(size, scale)), MIN_HEIGHT) if size else 0.0
                yield Mark(x, ground if size < 0 else ground - height, width, height, title, mood, largest.tensor)


def _rank_bar(bar: _Bar) -> tuple[bool, float]:
    """Return a sort key: by absolute value, with NaN last."""
    return math.isnan(bar.value), abs(bar.value)


def _describe_bars(bars: list[_Bar]) -> str:
    """Describe a bar by its name and value. For several values, use the first and last name and the largest value."""
    if len(bars) == 1:
        remark = f" ({bars[0].word})" if bars[0].word and math.isfinite(bars[0].value) else ""
        return f"{bars[0].label}: {_describe_unmeasured(bars[0]) or format_number(bars[0].value)}{remark}"
    finite = [bar for bar in bars if math.isfinite(bar.value)]
    parts = [f"{bars[0].label} … {bars[-1].label}"]
    if finite:
        largest_bar = max(finite, key=lambda bar: abs(bar.value))
        parts.append(f"the largest is {format_number(largest_bar.value)}, for {largest_bar.label}")
    by_word = group_by(bars, _describe_unmeasured).items()
    parts.extend(f"{len(same_word):,} {word}, for example {same_word[0].label}" for word, same_word in by_word if word)
    return "; ".join(parts)


def _describe_unmeasured(bar: _Bar) -> str:
    return bar.word if math.isinf(bar.value) else "not finite" if math.isnan(bar.value) else ""


def _describe_chart(bars: Sequence[_Bar], size: int) -> str:
    """Return a note about the chart: the number of values, merged bars, zeros and missing measures."""
    values = [bar.value for bar in bars]
    unusual = sum(bar.is_unusual for bar in bars)
    zero, not_finite = sum(value == 0 for value in values), sum(map(math.isnan, values))
    parts = [f"{plural(len(values), 'value')}, in order"]
    if size > 1:
        parts.append(
            f"each bar shows {size:,} values: strong colour up to the smallest, faint colour up to the largest"
        )
    if unusual:
        parts.append(f"{unusual:,} (orange) changed at least 10 times as much as the median of the layers")
    if zero:
        parts.append(f"{zero:,} zero (grey)")
    infinite_words = Counter(bar.word for bar in bars if math.isinf(bar.value))
    if infinite_words:
        parts.append(", ".join(f"{count:,} {word}" for word, count in infinite_words.items()) + " (drawn from the top)")
    if not_finite:
        parts.append(f"{not_finite:,} not finite (red, full height)")
    return "; ".join(parts)


def _build_layer_ticks(labels: Sequence[str], plot: PlotBox) -> tuple[str, tuple[Tick, ...]]:
    """Return an axis title such as `encoder.layer.N`, and a tick in the middle of each layer with the commonest prefix.

    Both are empty if there are fewer than two layers. Ticks too close to the previous tick are left out.
    """
    matches = [(position, _LAYER.search(label)) for position, label in enumerate(labels)]
    parts = [(position, match.string[: match.start(1)], match[1]) for position, match in matches if match]
    prefix = Counter(start for _, start, _ in parts).most_common(1)[0][0] if parts else ""
    layers = group_by((part for part in parts if part[1] == prefix), lambda part: part[2])
    if len(layers) < 2:
        return "", ()
    ticks: list[Tick] = []
    for layer, own_parts in layers.items():
        x = plot.to_x((own_parts[0][0] + own_parts[-1][0] + 1) / 2 / len(labels))
        previous_end = ticks[-1].at + DIGIT_WIDTH * len(ticks[-1].text) / 2 if ticks else -math.inf
        if x - DIGIT_WIDTH * len(layer) / 2 >= previous_end + MIN_TICK_GAP:
            ticks.append(Tick(x, layer))
    return truncate_middle(prefix, 90) + "N", tuple(ticks)


# Spread: how often each value occurs.


def _build_histogram(chart: Spread) -> Picture:
    """Lay out a histogram. Each bar is as wide as its bin."""
    plot = PlotBox(52.0, 26.0, 370.0, 170.0)  # half of the first and last number is outside the plot
    is_drawable = bool(chart.edges) and all(map(math.isfinite, chart.edges))
    low, high = (min(chart.edges), max(chart.edges)) if is_drawable else (0.0, 1.0)
    across = build_linear_scale(low, high)
    y_scale = build_linear_scale(0.0, float(max(chart.counts, default=0) or 1), 4)
    return Picture(
        title=chart.title,
        note=plural(sum(chart.counts), "element")
        + ("" if is_drawable else "; not drawn, because the range is not finite"),
        width=400.0,
        height=206.0,
        plot=plot,
        marks=tuple(_build_bins(chart, across, y_scale, plot)) if is_drawable else (),
        x_ticks=tuple(Tick(plot.to_x(at), text) for at, text in across.ticks) if is_drawable else (),
        # Only whole numbers, because a bin has no half element.
        y_ticks=tuple(
            Tick(plot.to_y(at), format_count(int(float(text)))) for at, text in y_scale.ticks if "." not in text
        ),
        unit="elements",
        below=chart.unit,
        ground=plot.bottom,
        zero=plot.to_x(across.compute_share(0.0)) if is_drawable and low <= 0 <= high else None,
    )


def _build_bins(chart: Spread, x_scale: Scale, y_scale: Scale, plot: PlotBox) -> Iterator[Mark]:
    for low, high, count in zip(chart.edges, chart.edges[1:], chart.counts, strict=False):
        start, end = plot.to_x(x_scale.compute_share(low)), plot.to_x(x_scale.compute_share(high))
        height = max(plot.bottom - plot.to_y(y_scale.compute_share(float(count))), MIN_HEIGHT) if count else 0.0
        title = f"{format_number(low)} … {format_number(high)}: {count:,}"
        yield Mark(start, plot.bottom - height, max(end - start, 0.5), height, title)
