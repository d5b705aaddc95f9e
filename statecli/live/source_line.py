"""A line of a Python source file."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple


class SourceLine(NamedTuple):
    """Line of a source file: the file's path as Python records it for the code, and the line number from 1."""

    file: str
    line: int


def get_current_line(frame: FrameType) -> SourceLine:
    """Return the line that `frame` executes."""
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)
