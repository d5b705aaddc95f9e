"""Check that the exceptions in a pickle are as Python writes them.

Python's C code builds the message of a UnicodeError from the bytes at its position, and does not check their length.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from functools import lru_cache

from statecli.pickles.graph import read_raw_bytes
from statecli.pickles.nodes import Obj, Value

_UNICODE_ERRORS: dict[str, type[bytes] | type[str]] = {
    "builtins.UnicodeDecodeError": bytes,
    "builtins.UnicodeEncodeError": str,
}


@lru_cache(maxsize=1024)
def is_exception(name: str) -> bool:
    """Return True for the `module.name` of a built-in exception of Python."""
    return isinstance(_find_class(name), type)


def has_valid_arguments(name: str, call: Obj, root_name: Callable[[Value], str | None]) -> bool:
    """Return True for a Unicode error whose position is within its text, and for any other exception."""
    if name not in _UNICODE_ERRORS:
        return True
    match call.args:
        case (str(), text, int(start), int(end), str()):
            length = _measure_text(text, _UNICODE_ERRORS[name], root_name)
            return length is not None and 0 <= start <= end <= length
    return False


def is_state(name: str, state: Value) -> bool:
    """Return True if a state sets no attribute of the class, because picklers pass such attributes as arguments."""
    return type(state) is dict and not any(type(key) is not str or hasattr(_find_class(name), key) for key in state)


def _find_class(name: str) -> type[BaseException] | None:
    module, _, last = name.rpartition(".")
    value = getattr(builtins, last, None) if module == "builtins" else None
    return value if isinstance(value, type) and issubclass(value, BaseException) else None


def _measure_text(text: Value, kind: type[bytes] | type[str], root_name: Callable[[Value], str | None]) -> int | None:
    """Return the length of a text or of bytes in a form that picklers write; None for any other value."""
    if kind is bytes and type(text) is Obj and root_name(text) == "builtins.bytes" and not text.args:
        return 0  # as protocol 2 writes empty bytes
    value = read_raw_bytes(text) if kind is bytes else text
    return len(value) if type(value) is kind else None
