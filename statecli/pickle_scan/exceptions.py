"""Check that the exceptions in a pickle are as Python writes them.

Python's C code builds the message of a UnicodeError from the bytes at its position, and does not check their length.
"""

from __future__ import annotations

import builtins
from functools import lru_cache

from statecli.pickles.nodes import Value

#: Errors whose message is built from an unchecked position.
UNICODE_ERRORS = frozenset(["builtins.UnicodeDecodeError", "builtins.UnicodeEncodeError"])


@lru_cache(maxsize=1024)
def is_exception(name: str) -> bool:
    """Return True for the `module.name` of a built-in exception of Python."""
    return isinstance(_find_class(name), type)


def is_state(name: str, state: Value) -> bool:
    """Return True if a state sets no attribute of the class, because picklers pass such attributes as arguments."""
    return type(state) is dict and not any(type(key) is not str or hasattr(_find_class(name), key) for key in state)


def _find_class(name: str) -> type[BaseException] | None:
    module, _, last = name.rpartition(".")
    value = getattr(builtins, last, None) if module == "builtins" else None
    return value if isinstance(value, type) and issubclass(value, BaseException) else None
