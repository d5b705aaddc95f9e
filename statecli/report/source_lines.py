"""Source lines around the line of a problem, for outputs that have room for them."""

from __future__ import annotations

import linecache
import re
import tokenize
from collections.abc import Sequence

import msgspec

from statecli.core.model_state import Origin

#: Number of lines shown before and after the line of a problem.
LINES_AROUND = 3
#: Largest number of lines of a statement that are joined to a single line.
MAX_STATEMENT_LINES = 12


class SourceLine(msgspec.Struct, frozen=True):
    """A line of a file, without its line end; `is_origin` marks the line of the problem."""

    number: int
    text: str
    is_origin: bool


def read_lines_around(origin: Origin) -> tuple[SourceLine, ...]:
    """Return a source line and its neighbours, without common indentation. Return () for an unreadable file."""
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


def read_statement(origin: Origin) -> str:
    """Return the source line of a problem. Join a statement of several lines to one line, without comments."""
    linecache.checkcache(origin.file)  # a caller in Python may have changed the file, or the directory
    lines = linecache.getlines(origin.file)[origin.line - 1 :][:MAX_STATEMENT_LINES]
    if not lines:
        return ""
    first, *further_lines = lines
    try:
        for token in tokenize.generate_tokens(iter(lines).__next__):
            row, column = token.start
            if token.type == tokenize.COMMENT and token.string:
                lines[row - 1] = lines[row - 1][:column]
            if token.type == tokenize.NEWLINE:
                return first.strip() if row == 1 else _join_lines(lines[:row])
    except (tokenize.TokenError, SyntaxError):  # a longer statement, or the middle of one
        pass
    return first.strip() + (" …" if further_lines and first.rstrip().endswith(("(", "[", "{", ",")) else "")


def _join_lines(lines: Sequence[str]) -> str:
    text = " ".join(filter(None, (line.strip().removesuffix("\\").rstrip() for line in lines)))
    return re.sub(r"(?<=[\[({]) | (?=[\])}])", "", text)
