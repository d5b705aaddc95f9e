"""Whether a file descriptor is a terminal, and how wide that is."""

from __future__ import annotations

import os

#: Columns of an output whose width is unknown.
DEFAULT_WIDTH = 80


def is_terminal(descriptor: int) -> bool:
    """Return whether the descriptor is a terminal; False for a descriptor that is closed."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def get_terminal_width(descriptor: int) -> int:
    """Return the columns of the terminal; without a terminal those of COLUMNS, else `DEFAULT_WIDTH`."""
    try:
        columns = os.get_terminal_size(descriptor).columns
    except OSError:  # `COLUMNS=120 statecli … -f table | less`
        columns = 0
    return columns or get_requested_width() or DEFAULT_WIDTH


def get_requested_width() -> int:
    """Return the columns that COLUMNS asks for; 0 if it asks for none."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdecimal() else 0
