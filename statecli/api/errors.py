"""What goes wrong, told to Python: in the words of its arguments, and without a way through our own code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from statecli.core.errors import EngineError, MissingDependency, StateError, UnreadableError, UsageError
from statecli.storage import files

_Found = TypeVar("_Found")

__tracebackhide__ = True  # pytest shows the caller's line

#: What the command line calls otherwise.
_ARGUMENTS = {"input": "inputs", "check": "checks", "i": "include", "x": "exclude"}
_OF_PACKAGES = (EngineError, MissingDependency, UnreadableError)
#: What stands as it is behind an argument's name, and the words of the command line that its own advice uses.
_PLAIN = r"'[^']*'|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)"
_ADVISED = r"fake-cuda|meta|values"


def told(given: dict[str, Any], ask: Callable[[], _Found]) -> _Found:
    """What `ask` gives. What it raises of ours is raised from here, with the names of the arguments `given`."""
    try:
        return ask()
    except StateError as error:
        if isinstance(error, UsageError):
            error.args = (in_python(str(error), given),)
        error.args = tuple(files.remove_secrets(one) if isinstance(one, str) else one for one in error.args)
        # That of a store or an engine was raised by a package, whose frames may hold what must not be shown.
        cause = None if isinstance(error, _OF_PACKAGES) else error.__cause__
        theirs = _theirs(cause.__traceback__) if cause is not None else None
        # Whoever shows the variables of each frame shows no URL as it was typed.
        given.clear()
        error.__context__ = None
        raise error.with_traceback(None) from (cause.with_traceback(theirs) if cause and theirs else None)


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """The part of it that is in the user's own code; None where there is none."""
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def in_python(message: str, given: Mapping[str, Any]) -> str:
    """`--device nope: …` as `device='nope': …`; options that are none of the arguments `given` stay as they are."""

    def argument(found: re.Match[str]) -> str:
        option, plain, word = found.groups()
        name = _ARGUMENTS.get(option, option.replace("-", "_"))
        if name not in given:
            return found[0]
        value = plain or (None if word is None else repr(word))
        return f"{name}={value}" if value else name

    words = "|".join([*map(re.escape, sorted(_texts(given.values()), key=len, reverse=True)), _ADVISED])
    option = r"(?<![\w-])(?:--|-(?=[ix]\b))([a-z][a-z-]*)"
    return re.sub(rf"{option}(?: (?:({_PLAIN})|({words})(?![\w-])))?", argument, message)


def _texts(values: Any) -> Iterator[str]:
    """As the command line would have them."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _texts(value)
        elif isinstance(value, type):
            yield value.__name__
        elif isinstance(value, (str, int, float)) or type(value).__name__ in ("dtype", "device"):
            yield str(getattr(value, "value", value)).removeprefix("torch.")
