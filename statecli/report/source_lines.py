"""The lines of source around the line of a problem, for outputs with room."""

from __future__ import annotations

import linecache

import msgspec

from statecli.core.model_state import Origin

#: Lines before and after the line of a problem.
LINES_AROUND = 3


class SourceLine(msgspec.Struct, frozen=True):
    """A line of a file, without its line end; `is_origin` marks the line of the problem."""

    number: int
    text: str
    is_origin: bool


def read_lines_around(origin: Origin) -> tuple[SourceLine, ...]:
    """Return the line and its neighbours, less their common indentation; nothing if the file cannot be read."""
    try:
        lines = linecache.getlines(origin.file)
    except ValueError:  # not the name of a file: a lone surrogate, a null character
        return ()
    if not 1 <= origin.line <= len(lines):
        return ()
    first, last = max(1, origin.line - LINES_AROUND), min(len(lines), origin.line + LINES_AROUND)
    texts = [line.rstrip().expandtabs() for line in lines[first - 1 : last]]
    indentation = min((len(text) - len(text.lstrip()) for text in texts if text), default=0)
    return tuple(
        SourceLine(number, text[indentation:], number == origin.line) for number, text in enumerate(texts, start=first)
    )
