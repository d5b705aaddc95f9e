"""Count the steps to compile a regular expression from a pickle. Five million steps take about a second.

Most classes, such as `[a-z0-9_]`, take microseconds. `re` reads each character of a range. For a class that reaches
beyond Latin-1, `re` reads a map of 65,536 characters. `[s]` is such a class if case is ignored, because `ſ` is an S.
"""

from __future__ import annotations

import re

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickles.graph import read_raw_bytes
from statecli.pickles.nodes import Value

#: Steps for a pattern that the pickle computes.
_UNKNOWN_STEPS = 2**62
#: Steps for a class, and for a class with a map of 65,536 characters. A longer range takes no more steps.
_STEPS_PER_CLASS, _STEPS_PER_MAP, _MAX_RANGE = 100, 2_000, 65_536
#: Squared length of a pattern that costs one step, because `re` moves all branches of an alternation for each common
#: character.
_SQUARED_LENGTH_PER_STEP = 500
_ESCAPE = compile_on_use(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(0010[0-9a-fA-F]{4}|000[0-9a-fA-F]{5}))")
_NAMED_CHARACTER = compile_on_use(r"\\N\{[^}]*\}")
#: Two characters around a dash. The second may follow a backslash, and may also begin the next range.
_RANGE = compile_on_use(r"(?<=(.))-(?=\\?(.))", re.DOTALL)
_INLINE_IGNORECASE = compile_on_use(r"\(\?[a-zA-Z]*i")


def count_pattern_steps(pattern: Value, flags: Value) -> int:
    """Return an upper bound of the steps to compile a regular expression."""
    raw_pattern = read_raw_bytes(pattern)
    text = pattern if raw_pattern is None else raw_pattern.decode("latin-1")
    if type(text) is not str:
        return _UNKNOWN_STEPS
    class_steps, range_steps = _STEPS_PER_CLASS, 0
    if raw_pattern is None:
        plain = _ESCAPE.sub(lambda escape: chr(int(escape[escape.lastindex or 0], 16)), text)
        has_names = _NAMED_CHARACTER.search(plain) is not None
        ignores_case = type(flags) is not int or flags & re.IGNORECASE or _INLINE_IGNORECASE.search(text)
        is_long = has_names or max(plain, default="") > "\xff"
        class_steps = _STEPS_PER_MAP if ignores_case or is_long else _STEPS_PER_CLASS
        lengths = (_MAX_RANGE if has_names else ord(end) - ord(start) for start, end in _RANGE.findall(plain))
        range_steps = sum(max(0, min(length, _MAX_RANGE)) for length in lengths) if is_long else 0
    return text.count("[") * class_steps + range_steps + len(text) ** 2 // _SQUARED_LENGTH_PER_STEP
