"""Test whether a file descriptor is a terminal, and read the width of the terminal."""

from __future__ import annotations

import os

#: Columns of an output whose width is unknown.
DEFAULT_WIDTH = 80


def is_terminal(descriptor: int) -> bool:
    """Return whether the file descriptor is an open terminal."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def get_terminal_width(descriptor: int) -> int:
    """Return the number of columns of the terminal. Without a terminal, return COLUMNS or else `DEFAULT_WIDTH`."""
    try:
        columns = os.get_terminal_size(descriptor).columns
    except OSError:  # `COLUMNS=120 statecli … -f table | less`
        columns = 0
    return columns or get_requested_width() or DEFAULT_WIDTH


def get_requested_width() -> int:
    """Return the number of columns in the variable COLUMNS, or 0 if it is unset or invalid."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
