"""Charts as geometry: where bars, ticks and labels stand. Plain numbers and text, drawn by the page's template.

Lengths are in units of the picture's own coordinate system, y downwards, as SVG has it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal

import msgspec

from statecli.render._escape import elided
from statecli.report import Bars, Spread
from statecli.report.text import count_text, number, plural

#: More values than this are drawn several to a bar: bars thinner than two pixels cannot be told apart.
MAX_BARS = 500
#: So many bars have room for a name each.
MAX_NAMED = 40
#: Characters of a name below its bar, and units of width of one of them.
NAME_LENGTH, NAME_WIDTH = 26, 6.3
#: Ticks of layers on an axis.
MAX_LAYERS = 24
#: The least height of a bar, and that of a zero: what is there is seen.
MIN_HEIGHT, ZERO_HEIGHT = 1.5, 4.0
#: A bar of few is no wall.
MAX_WIDTH = 40.0

#: The first number of a name that is a part of its own: the 3 of `encoder.layer.3.weight`.
_LAYER = re.compile(r"(?:^|[.\[])(\d{1,6})(?=[.\]]|$)")


class Mark(msgspec.Struct, frozen=True):
    """One bar. `mood`: "" a value, "most" and "least" of several, "zero" nothing to show of it, "odd" not to scale."""

    x: float
    y: float
    width: float
    height: float
    title: str
    mood: str = ""


class Tick(msgspec.Struct, frozen=True):
    """A position on an axis, and what is written there."""

    at: float
    text: str


class Picture(msgspec.Struct, frozen=True):
    """A chart laid out. The plot lies between `left` and `right`, `top` and `bottom`; `zero` is where x is 0, if it is.

    `upright` says that the texts of the x axis are names, written upwards. `unit` heads the y axis, `below` the x axis.
    """

    title: str
    note: str
    wide: bool
    width: float
    height: float
    left: float
    top: float
    right: float
    bottom: float
    marks: tuple[Mark, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    unit: str
    below: str = ""
    upright: bool = False
    zero: float | None = None
    #: Where bars stand: the height of the value 0, or the bottom.
    ground: float = 0.0


def drawn(chart: Bars | Spread) -> Picture:
    """The chart, laid out."""
    return _bars(chart) if isinstance(chart, Bars) else _spread(chart)


class _Scale(msgspec.Struct, frozen=True):
    """Values -> 0..1 on an axis, on which `ticks` are worth writing down.

    `low` and `high` are logarithms, or the ends in units of 10**exponent: that holds for the whole range of floats.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False
    exponent: int = 0

    def at(self, value: float) -> float:
        """The share of the axis below the value."""
        place = math.log10(value) if self.log else _mantissa(value, self.exponent)
        return (place - self.low) / (self.high - self.low)


def _logarithmic(least: float, most: float) -> _Scale:
    """Whole decades around two positive numbers; the least of them stands a little above the end."""
    low, high = math.floor(math.log10(least) - 0.1), math.ceil(math.log10(most))
    high = max(high, low + 1)
    step = math.ceil((high - low) / 7)
    parts = (1, 2, 5) if high - low <= 2 else (1,)
    exponents = range(low, high + 1, step)
    ticks = [(math.log10(part) + e, _written(part, e)) for e in exponents for part in parts]
    return _Scale(low, high, tuple(((e - low) / (high - low), text) for e, text in ticks if e <= high), log=True)


def _linear(low: float, high: float, most: int = 5) -> _Scale:
    """Ticks at 1, 2 or 5 times a power of ten between two finite numbers."""
    largest = max(abs(low), abs(high))
    exponent = math.floor(math.log10(largest)) if largest else 0
    start, end = _mantissa(low, exponent), _mantissa(high, exponent)
    if start == end:
        start, end = start - 0.5, end + 0.5
    step = _step((end - start) / most)
    places = [n * step for n in range(math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9) + 1)]
    ticks = tuple(((at - start) / (end - start), _written(at, exponent)) for at in places)
    return _Scale(start, end, ticks, exponent=exponent)


def _mantissa(value: float, exponent: int) -> float:
    """value / 10**exponent, where a float has no room for that power too."""
    return float(Decimal(value).scaleb(-exponent))


def _step(least: float) -> float:
    """The first of 1, 2, 5, 10, … times a power of ten that is not less."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(part * power for part in (1, 2, 5, 10) if part * power >= least * (1 - 1e-9))


def _written(mantissa: float, exponent: int) -> str:
    """mantissa * 10**exponent, also where a float has no room for it."""
    if -300 < exponent < 300:
        return number(float(Decimal(repr(round(mantissa, 9))).scaleb(exponent)))
    return f"{mantissa:g}e{exponent}" if mantissa else "0"


# Bars: one value after the other.


def _bars(chart: Bars) -> Picture:
    """A bar a value, or one for several neighbours where there are too many."""
    pairs = list(zip(chart.labels, chart.values, strict=True))
    size = max(1, math.ceil(len(pairs) / MAX_BARS))
    bins = [pairs[at : at + size] for at in range(0, len(pairs), size)]
    names = [elided(label, NAME_LENGTH) for label in chart.labels] if len(pairs) <= MAX_NAMED else []
    below, layers = ("", []) if names else _layers(chart.labels)
    room = max(map(len, names), default=0) * NAME_WIDTH + 12 if names else 40.0 if below else 26.0
    left, top, right, bottom = 58.0, 30.0, 1094.0, 300.0
    scale = _scale([value for value in chart.values if math.isfinite(value)])
    slot = (right - left) / max(1, len(bins))
    ground = _height(scale, 0.0, top, bottom)
    box = (top, bottom, ground)
    marks = tuple(mark for n, several in enumerate(bins) for mark in _bar(several, scale, left + slot * n, slot, box))
    if names:
        ticks = tuple(Tick(left + slot * (n + 0.5), name) for n, name in enumerate(names))
    else:
        ticks = tuple(Tick(left + (right - left) * n / len(pairs), text) for n, text in layers)
    return Picture(
        chart.title,
        _note(chart.values, size),
        True,
        1100.0,
        bottom + room,
        left,
        top,
        right,
        bottom,
        marks,
        ticks,
        _y_ticks(scale, top, bottom),
        chart.unit,
        below,
        bool(names),
        None,
        ground,
    )


def _scale(finite: Sequence[float]) -> _Scale | None:
    """By orders of magnitude, unless a value is negative; None where all are zero or there are none."""
    positive = [value for value in finite if value > 0]
    if any(value < 0 for value in finite):
        return _linear(min(finite), max(0.0, *finite))
    return _logarithmic(min(positive), max(positive)) if positive else None


def _height(scale: _Scale | None, value: float, top: float, bottom: float) -> float:
    """The y of a value; the bottom for a zero that the scale does not have."""
    if scale is None or (scale.log and value <= 0):
        return bottom
    return bottom - scale.at(value) * (bottom - top)


def _bar(
    several: list[tuple[str, float]], scale: _Scale | None, x: float, slot: float, box: tuple[float, float, float]
) -> Iterator[Mark]:
    """The bar of a value. Of several: a light one of the largest, and before it a dark one of the smallest."""
    top, bottom, ground = box
    width = min(slot * 0.8, MAX_WIDTH) if slot > 3 else slot
    x += (slot - width) / 2
    finite = [pair for pair in several if math.isfinite(pair[1])]
    title = _said(several, finite)
    if len(finite) < len(several):
        yield Mark(x, top, width, bottom - top, title, "odd")
        return
    sizes = sorted((value for _, value in finite), key=abs)
    if sizes[-1] == 0:
        yield Mark(x, ground - ZERO_HEIGHT, width, ZERO_HEIGHT, title, "zero")
        return
    moods = ["most", "least"] if len(several) > 1 else [""]
    for value, mood in zip((sizes[-1], sizes[0]), moods, strict=False):
        height = max(abs(ground - _height(scale, value, top, bottom)), MIN_HEIGHT)
        yield Mark(x, ground if value < 0 else ground - height, width, height if value else 0.0, title, mood)


def _said(several: list[tuple[str, float]], finite: list[tuple[str, float]]) -> str:
    if len(several) == 1:
        return f"{several[0][0]}: {number(several[0][1])}"
    parts = [f"{several[0][0]} … {several[-1][0]}"]
    if finite:
        label, value = max(finite, key=lambda pair: abs(pair[1]))
        parts.append(f"the largest is {number(value)}, of {label}")
    odd = [pair for pair in several if not math.isfinite(pair[1])]
    if odd:
        parts.append(f"{len(odd):,} not finite, as {odd[0][0]}")
    return "; ".join(parts)


def _note(values: Sequence[float], size: int) -> str:
    """How to read the bars, as far as they do not say it themselves."""
    zero, odd = sum(value == 0 for value in values), sum(not math.isfinite(value) for value in values)
    parts = [f"{plural(len(values), 'value')}, in order"]
    if size > 1:
        parts.append(f"each bar is {size:,} neighbours, faint up to the largest, strong up to the smallest")
    if zero:
        parts.append(f"{zero:,} zero (grey)")
    if odd:
        parts.append(f"{odd:,} not finite (red, full height)")
    return "; ".join(parts)


def _layers(labels: Sequence[str]) -> tuple[str, list[tuple[int, str]]]:
    """`encoder.layer.N`, and where each N of the most frequent such prefix begins; nothing where there are no two."""
    matches = [(position, _LAYER.search(label)) for position, label in enumerate(labels)]
    parts = [(position, match.string[: match.start(1)], match[1]) for position, match in matches if match]
    if not parts:
        return "", []
    prefix = Counter(start for _, start, _ in parts).most_common(1)[0][0]
    found: dict[str, int] = {}
    for position, start, layer in parts:
        if start == prefix:
            found.setdefault(layer, position)
    if len(found) < 2:
        return "", []
    thinned = list(found.items())[:: math.ceil(len(found) / MAX_LAYERS)]
    return elided(prefix, 90) + "N", [(position, text) for text, position in thinned]


def _y_ticks(scale: _Scale | None, top: float, bottom: float) -> tuple[Tick, ...]:
    return tuple(Tick(bottom - at * (bottom - top), text) for at, text in scale.ticks) if scale else ()


# Spread: how often each value occurs.


def _spread(chart: Spread) -> Picture:
    """A histogram; bins that are not equally wide are drawn as wide as they are."""
    left, top, right, bottom = 52.0, 26.0, 390.0, 170.0
    total = sum(chart.counts)
    x_scale = _linear(min(chart.edges), max(chart.edges))
    y_scale = _linear(0.0, float(max(chart.counts, default=0) or 1), 4)

    def x(share: float) -> float:
        return left + share * (right - left)

    marks = []
    for low, high, count in zip(chart.edges, chart.edges[1:], chart.counts, strict=False):
        start, end = x(x_scale.at(low)), x(x_scale.at(high))
        height = max(y_scale.at(float(count)) * (bottom - top), MIN_HEIGHT) if count else 0.0
        title = f"{number(low)} … {number(high)}: {count:,}"
        marks.append(Mark(start, bottom - height, max(end - start, 0.5), height, title))
    inside = min(chart.edges) <= 0 <= max(chart.edges)
    return Picture(
        chart.title,
        f"{plural(total, 'element')}",
        False,
        400.0,
        206.0,
        left,
        top,
        right,
        bottom,
        tuple(marks),
        tuple(Tick(x(at), text) for at, text in x_scale.ticks),
        tuple(
            Tick(bottom - at * (bottom - top), count_text(int(float(text))))
            for at, text in y_scale.ticks
            if "." not in text
        ),
        "elements",
        chart.unit,
        False,
        x(x_scale.at(0.0)) if inside else None,
        bottom,
    )
