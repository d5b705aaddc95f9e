"""Natural order of names: `step-2` comes before `step-10`."""

from __future__ import annotations

import re

#: Digits of a number in a name that count, because Python refuses to convert numbers of thousands of digits.
_MAX_DIGITS = 1000
_NUMBER = re.compile(r"(\d+)")


def make_natural_key(text: str) -> list[int | str]:
    """Return a sort key of texts and numbers, which alternate."""
    return [int(part[:_MAX_DIGITS]) if n % 2 else part for n, part in enumerate(_NUMBER.split(text))]
