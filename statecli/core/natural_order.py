"""Natural order of names: `layers.2` comes before `layers.10`."""

from __future__ import annotations

import re
from functools import lru_cache

from statecli.core.lazy_pattern import compile_on_use

_NUMBER = compile_on_use(r"0*([0-9]+)")
_TO_LAST_DIGIT = compile_on_use(r".*[0-9]", re.DOTALL)
#: Largest number of digits whose count fits in one character.
_MAX_COUNTED_DIGITS = 0x10FFFF


def make_natural_key(name: str) -> str:
    """Return a sort key that orders the numbers in names by value, so that `layers.2` comes before `layers.10`.

    No number is converted, because Python converts 4,300 digits at most.
    """
    digits_match = _TO_LAST_DIGIT.match(name)
    if digits_match is None:
        return name
    end = digits_match.end()
    return _make_key_of_beginning(name[:end]) + name[end:]


@lru_cache(maxsize=256)
def _make_key_of_beginning(text: str) -> str:
    """Return the sort key of the beginning of a name, cached because many names of a layer share it."""
    return _NUMBER.sub(lambda match: f"{min(len(match[1]), _MAX_COUNTED_DIGITS):c}{match[1]}", text)
