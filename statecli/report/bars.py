"""Draw a relative change as a bar of block characters, for a cell of a table."""

from __future__ import annotations

import math

#: Width of a bar in cells, and the number of decades of a full bar: from a float32 rounding error to a change as large
#: as the value.
BAR_CELLS = 10
BAR_DECADES = 8
#: Heading of a column of bars, which is their scale.
BAR_SCALE = f"1e-{BAR_DECADES} to 1 (log)"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def draw_bar(relative: float | None) -> str:
    """Return a relative change as a bar on a log scale. The bar is full at 1, and empty for None and 0."""
    if not relative:
        return ""
    filled = min(1.0, max(0.0, 1 + math.log10(relative) / BAR_DECADES))
    eighths = max(1, round(filled * BAR_CELLS * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
