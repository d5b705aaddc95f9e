"""Charts as geometry: where bars, ticks and labels stand. Plain numbers and text, drawn by the page's template.

Lengths are in units of the picture's own coordinate system, y downwards, as SVG has it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import NamedTuple

import msgspec

from statecli.core.escaping import truncate_middle
from statecli.core.units import format_count, format_number, plural
from statecli.report import Bars, Spread

#: More values than this are drawn several to a bar: bars thinner than two pixels cannot be told apart.
MAX_BARS = 500
#: So many bars have room for a name each.
MAX_NAMED = 40
#: Characters of a name below its bar, and units of width of one of them.
NAME_LENGTH, NAME_WIDTH = 26, 6.3
#: Units of width of a digit on an axis, and between two numbers there.
DIGIT, BETWEEN = 7.0, 9.0
#: The least height of a bar, and those of a zero and of what hangs from the top: what is there is seen.
MIN_HEIGHT, ZERO_HEIGHT, BOUNDLESS_HEIGHT = 1.5, 4.0, 7.0
#: A bar of few is no wall.
MAX_WIDTH = 40.0

#: The first number of a name that is a part of its own: the 3 of `encoder.layer.3.weight`.
_LAYER = re.compile(r"(?:^|[.\[])(\d{1,6})(?=[.\]]|$)")


class Mark(msgspec.Struct, frozen=True):
    """One bar. `mood`: "" a value, "most" and "least" of several, "zero" nothing to show of it; not to
    scale are "odd", not finite, and "boundless".
    """

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


class Box(msgspec.Struct, frozen=True):
    """Where the plot lies in its picture."""

    left: float
    top: float
    right: float
    bottom: float

    def x(self, share: float) -> float:
        """The place of a share of the width, from the left."""
        return self.left + share * (self.right - self.left)

    def y(self, share: float) -> float:
        """The place of a share of the height, from the bottom."""
        return self.bottom - share * (self.bottom - self.top)


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A chart laid out. `unit` heads the y axis, `below` the x axis; `wide` asks for the whole width of a page.

    `upright` says that the texts of the x axis are names, written upwards. `ground` is the height at which bars stand,
    `zero` where on the x axis its 0 is, None where it is not on it.
    """

    title: str
    note: str
    width: float
    height: float
    plot: Box
    marks: tuple[Mark, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    unit: str
    below: str
    ground: float
    wide: bool = False
    upright: bool = False
    zero: float | None = None


def drawn(chart: Bars | Spread) -> Picture:
    """The chart, laid out."""
    return _bars(chart) if isinstance(chart, Bars) else _spread(chart)


class _Bar(NamedTuple):
    """A value with its name, and what it is where it is infinite."""

    label: str
    value: float
    word: str


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
        return format_number(float(Decimal(repr(round(mantissa, 9))).scaleb(exponent)))
    return f"{mantissa:g}e{exponent}" if mantissa else "0"


# Bars: one value after the other.


def _bars(chart: Bars) -> Picture:
    """A bar a value, or one for several neighbours where there are too many."""
    words = chart.words or ("infinite",) * len(chart.values)
    bars = [_Bar(*one) for one in zip(chart.labels, chart.values, words, strict=True)]
    size = max(1, math.ceil(len(bars) / MAX_BARS))
    plot = Box(58.0, 30.0, 1094.0, 300.0)
    scale = _scale([value for value in chart.values if math.isfinite(value)])
    ground = _height(scale, 0.0, plot)
    named = len(bars) <= MAX_NAMED
    below, ticks = ("", _names(chart.labels, plot)) if named else _layers(chart.labels, plot)
    room = 12 + NAME_WIDTH * max((len(tick.text) for tick in ticks), default=0) if named else 40.0
    return Picture(
        title=chart.title,
        note=_note(bars, size),
        width=1100.0,
        height=plot.bottom + room,
        plot=plot,
        marks=tuple(_marks([bars[at : at + size] for at in range(0, len(bars), size)], scale, ground, plot)),
        x_ticks=ticks,
        y_ticks=tuple(Tick(plot.y(at), text) for at, text in scale.ticks) if scale else (),
        unit=chart.unit,
        below=below,
        ground=ground,
        wide=True,
        upright=named,
    )


def _names(labels: Sequence[str], plot: Box) -> tuple[Tick, ...]:
    return tuple(
        Tick(plot.x((n + 0.5) / len(labels)), truncate_middle(label, NAME_LENGTH)) for n, label in enumerate(labels)
    )


def _scale(finite: Sequence[float]) -> _Scale | None:
    """By orders of magnitude, unless a value is negative; None where all are zero or there are none."""
    positive = [value for value in finite if value > 0]
    if any(value < 0 for value in finite):
        return _linear(min(finite), max(0.0, *finite))
    return _logarithmic(min(positive), max(positive)) if positive else None


def _height(scale: _Scale | None, value: float, plot: Box) -> float:
    """The y of a value; the bottom for a zero that the scale does not have."""
    return plot.y(0.0 if scale is None or (scale.log and value <= 0) else scale.at(value))


def _marks(bins: list[list[_Bar]], scale: _Scale | None, ground: float, plot: Box) -> Iterator[Mark]:
    """The bar of each value. Of several: a faint one of the largest, and on it a strong one of the smallest."""
    slot = (plot.right - plot.left) / max(1, len(bins))
    width = min(slot * 0.8, MAX_WIDTH) if slot > 3 else slot
    for n, several in enumerate(bins):
        x = plot.left + slot * n + (slot - width) / 2
        title = _said(several)
        sizes = sorted((one.value for one in several if math.isfinite(one.value)), key=abs)
        if any(math.isnan(one.value) for one in several):
            yield Mark(x, plot.top, width, plot.bottom - plot.top, title, "odd")
            continue
        if len(sizes) < len(several):
            yield Mark(x, plot.top, width, BOUNDLESS_HEIGHT, title, "boundless")
        if sizes and sizes[-1] == 0:
            yield Mark(x, ground - ZERO_HEIGHT, width, ZERO_HEIGHT, title, "zero")
        elif sizes:
            moods = ["most", "least"] if len(several) > 1 else [""]
            for value, mood in zip((sizes[-1], sizes[0]), moods, strict=False):
                height = max(abs(ground - _height(scale, value, plot)), MIN_HEIGHT) if value else 0.0
                yield Mark(x, ground if value < 0 else ground - height, width, height, title, mood)


def _said(several: list[_Bar]) -> str:
    """What a bar is of: its name and value, or the first and last name and the largest value."""
    if len(several) == 1:
        return f"{several[0].label}: {_word(several[0]) or format_number(several[0].value)}"
    finite = [one for one in several if math.isfinite(one.value)]
    parts = [f"{several[0].label} … {several[-1].label}"]
    if finite:
        most = max(finite, key=lambda one: abs(one.value))
        parts.append(f"the largest is {format_number(most.value)}, of {most.label}")
    odd: dict[str, list[str]] = {}
    for one in several:
        odd.setdefault(_word(one), []).append(one.label)
    parts.extend(f"{len(labels):,} {word}, as {labels[0]}" for word, labels in odd.items() if word)
    return "; ".join(parts)


def _word(one: _Bar) -> str:
    """What stands in the place of a number that there is not."""
    return one.word if math.isinf(one.value) else "not finite" if math.isnan(one.value) else ""


def _note(bars: Sequence[_Bar], size: int) -> str:
    """How to read the bars, as far as they do not say it themselves."""
    values = [one.value for one in bars]
    zero, odd = sum(value == 0 for value in values), sum(map(math.isnan, values))
    parts = [f"{plural(len(values), 'value')}, in order"]
    if size > 1:
        parts.append(f"each bar is {size:,} neighbours, faint up to the largest, strong up to the smallest")
    if zero:
        parts.append(f"{zero:,} zero (grey)")
    boundless = Counter(one.word for one in bars if math.isinf(one.value))
    if boundless:
        parts.append(", ".join(f"{count:,} {word}" for word, count in boundless.items()) + " (from the top)")
    if odd:
        parts.append(f"{odd:,} not finite (red, full height)")
    return "; ".join(parts)


def _layers(labels: Sequence[str], plot: Box) -> tuple[str, tuple[Tick, ...]]:
    """`encoder.layer.N`, and the middle of each N of the most frequent such prefix; nothing where there are no two.

    Those that would run into the number before them are left out.
    """
    matches = [(position, _LAYER.search(label)) for position, label in enumerate(labels)]
    parts = [(position, match.string[: match.start(1)], match[1]) for position, match in matches if match]
    prefix = Counter(start for _, start, _ in parts).most_common(1)[0][0] if parts else ""
    found: dict[str, list[int]] = {}
    for position, start, layer in parts:
        if start == prefix:
            found.setdefault(layer, []).append(position)
    if len(found) < 2:
        return "", ()
    ticks: list[Tick] = []
    for layer, places in found.items():
        at = plot.x((places[0] + places[-1] + 1) / 2 / len(labels))
        before = ticks[-1].at + DIGIT * len(ticks[-1].text) / 2 if ticks else -math.inf
        if at - DIGIT * len(layer) / 2 >= before + BETWEEN:
            ticks.append(Tick(at, layer))
    return truncate_middle(prefix, 90) + "N", tuple(ticks)


# Spread: how often each value occurs.


def _spread(chart: Spread) -> Picture:
    """A histogram; bins that are not equally wide are drawn as wide as they are."""
    plot = Box(52.0, 26.0, 370.0, 170.0)  # the number at either end stands half outside
    drawable = bool(chart.edges) and all(map(math.isfinite, chart.edges))
    low, high = (min(chart.edges), max(chart.edges)) if drawable else (0.0, 1.0)
    across = _linear(low, high)
    up = _linear(0.0, float(max(chart.counts, default=0) or 1), 4)
    return Picture(
        title=chart.title,
        note=plural(sum(chart.counts), "element") + ("" if drawable else "; not drawn: its range is not finite"),
        width=400.0,
        height=206.0,
        plot=plot,
        marks=tuple(_bins(chart, across, up, plot)) if drawable else (),
        x_ticks=tuple(Tick(plot.x(at), text) for at, text in across.ticks) if drawable else (),
        # There is no half element.
        y_ticks=tuple(Tick(plot.y(at), format_count(int(float(text)))) for at, text in up.ticks if "." not in text),
        unit="elements",
        below=chart.unit,
        ground=plot.bottom,
        zero=plot.x(across.at(0.0)) if drawable and low <= 0 <= high else None,
    )


def _bins(chart: Spread, across: _Scale, up: _Scale, plot: Box) -> Iterator[Mark]:
    for low, high, count in zip(chart.edges, chart.edges[1:], chart.counts, strict=False):
        start, end = plot.x(across.at(low)), plot.x(across.at(high))
        height = max(plot.bottom - plot.y(up.at(float(count))), MIN_HEIGHT) if count else 0.0
        title = f"{format_number(low)} … {format_number(high)}: {count:,}"
        yield Mark(start, plot.bottom - height, max(end - start, 0.5), height, title)
