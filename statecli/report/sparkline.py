"""A sequence of relative changes as a line of small bars: a character for each checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Largest number of cells of a line, as many as the other columns leave of 80. Neighbouring values share cells if there
#: are more.
MAX_CELLS = 24
#: Smallest ratio between the highest and the lowest value of the scale, a decade, because noise in a smaller range
#: would look like a trend.
MIN_RATIO = 10.0
#: Cells of values that are zero, unknown, and not finite.
ZERO_CELL, UNKNOWN_CELL, NAN_CELL = "·", " ", "×"
_HEIGHTS = "▁▂▃▄▅▆▇█"


def find_range(series: Sequence[Sequence[float | None]]) -> tuple[float, float] | None:
    """Return the smallest and the largest positive finite value. Widen the range to a ratio of at least MIN_RATIO."""
    values = [value for line in series for value in line if value and math.isfinite(value)]
    return (min(*values, max(values) / MIN_RATIO), max(values)) if values else None


def draw_sparkline(values: Sequence[float | None], limits: tuple[float, float] | None) -> str:
    """Draw a bar for each value, or for the largest of several neighbours, on a log scale between `limits`."""
    size = max(1, math.ceil(len(values) / MAX_CELLS))
    return "".join(_draw_cell(values[start : start + size], limits) for start in range(0, len(values), size))


def _draw_cell(values: Sequence[float | None], limits: tuple[float, float] | None) -> str:
    known_values = [value for value in values if value is not None]
    if not known_values:
        return UNKNOWN_CELL
    if not all(map(math.isfinite, known_values)):
        return NAN_CELL
    largest = max(known_values)
    if not largest or limits is None:
        return ZERO_CELL
    low, high = map(math.log10, limits)
    share = (math.log10(largest) - low) / (high - low) if high > low else 1.0
    return _HEIGHTS[min(len(_HEIGHTS) - 1, max(0, int(share * len(_HEIGHTS))))]
