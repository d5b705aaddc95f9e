"""Silence torch's compiler, and find lines of the user's code in its output."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.core.lazy_pattern import compile_on_use
from statecli.live import tensor_sources
from statecli.live.source_line import SourceLine

#: A frame in a traceback, as Python writes it.
_FRAME = compile_on_use(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@contextmanager
def silence() -> Iterator[None]:
    """Drop the warnings, log lines and printed graphs of torch's compiler."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def find_place(trace: str) -> SourceLine | None:
    """Return the deepest line of user code in the text of a traceback."""
    places = [SourceLine(match["file"], int(match["line"])) for match in _FRAME.finditer(trace)]
    return next((place for place in reversed(places) if tensor_sources.is_user_code(place.file)), None)


def format_reader(subject: ModelUnderTest, place: SourceLine | None) -> str:
    """Return the text `, read at net.py:12` for the source line `place`, or "" if `place` is None."""
    return "" if place is None else f", read at {tensor_sources.format_file(place.file, subject.target)}:{place.line}"
