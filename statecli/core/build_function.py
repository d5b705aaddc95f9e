"""Advice for a model that needs arguments: the line to type, or a function to write."""

from __future__ import annotations

from statecli.core.errors import option
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell

#: Start of the call of a class that holds settings.
_CONFIGURATION = compile_on_use(r"=[\w.]*(?:Config|Cfg|Args|Configuration|HParams)\(")
#: Advice for a model that a command line cannot express.
BUILD_ADVICE = "write a function make() in build.py that builds the model, then give build.py:make"


def spell(line: str) -> str:
    """Return the advice to type a line that builds a class. In the line, `...` stands for a value to fill in."""
    with_values = ", with a value for each `...`" if "..." in line else ""
    or_file = f", or give {option('--config-json', 'FILE')}" if with_values and _CONFIGURATION.search(line) else ""
    return f"write {quote_for_shell(line)}{with_values}{or_file}"
