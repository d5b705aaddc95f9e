"""Find casts in the code of TorchScript that treat a value as an object or a tuple without a check.

torch writes `unchecked_cast(T, x)` after the code has tested that x, of type Optional[T], is not None. With another x,
compiled code reads the attributes and elements of T from other memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan.script_code import CHARACTERS_PER_STEP, blank_strings
from statecli.pickle_scan.script_types import ScriptTypes, is_optional_attribute, is_trusted
from statecli.pickle_scan.step_budget import Budget, Steps

_CAST = compile_on_use(r"\bunchecked_cast\b\s*(?:\((?P<type>[\w.,\[\]() ]+), (?P<name>\w+)\))?", re.ASCII)
_DEF = compile_on_use(r"^ *def \w+", re.MULTILINE | re.ASCII)
#: Targets of an assignment, up to the equals sign.
_TARGETS = compile_on_use(r"([^=]*[^=!<>])=(?!=)")
#: Characters of code in which one step finds all mentions of a name.
_CHARACTERS_SEARCHED_PER_STEP = 100
#: Largest number of variables through which a value is followed.
_MAX_NAMES = 8
_CALL = compile_on_use(r"\w\(")


class UncheckedCast(msgspec.Struct, frozen=True):
    """Unchecked cast in line `line` of an archive's text `number`. The value may have a different type."""

    number: int
    line: int


def find_unchecked_casts(codes: Iterable[bytes], types: ScriptTypes, steps: Steps) -> Iterator[UncheckedCast]:
    """Yield the casts to a class or tuple, unless the value is declared as Optional of this type. Raises OutOfSteps."""
    for number, code in enumerate(codes):
        if b"unchecked_cast" not in code:
            continue
        text = blank_strings(code.decode("latin-1"), steps)
        steps.take(Budget.TEXT, 1 + len(text) // CHARACTERS_PER_STEP)
        starts = [0, *(match.start() for match in _DEF.finditer(text)), len(text)]
        for start, end in pairwise(starts):
            lines = list(_join_lines(text[start:end])) if _CAST.search(text, start, end) else []
            for match in _CAST.finditer(text, start, end):
                steps.take(Budget.TEXT, 1 + (end - start) // _CHARACTERS_SEARCHED_PER_STEP)
                declared, name = match["type"], match["name"]
                is_known = declared is not None and (
                    is_trusted(declared) or _is_optional(name, declared, lines, types, frozenset())
                )
                if not is_known:
                    yield UncheckedCast(number, text.count("\n", 0, match.start()) + 1)


def _is_optional(name: str, declared: str, lines: list[str], types: ScriptTypes, visited_names: frozenset[str]) -> bool:
    """Return True if every value assigned to a name in a function is declared as Optional of the type `declared`.

    `visited_names`: names that get their value from this name.
    """
    optional, bindings = f"Optional[{declared}]", 0
    mention = re.compile(rf"(?<![\w.]){name}\b", re.ASCII)
    for line in filter(mention.search, lines):
        statement = line.strip()
        targets = _TARGETS.match(statement)
        if statement.startswith("def "):
            if re.search(rf"{mention.pattern}\s*:", statement) is None:
                continue
            is_declared = f" {name}: {optional}" in statement.replace("(", "( ")
        elif "\\" in statement or statement.startswith(("for ", "with ")):  # torch never writes a continued line
            return False
        elif targets is None or not mention.search(targets[1]) or _CALL.search(targets[1]):
            continue
        elif statement.startswith((f"{name} : {optional} = ", f"{name} = annotate({optional}, ")):
            is_declared = True
        else:
            cast = rf"unchecked_cast\({re.escape(declared)}, \w+\)"
            value = re.fullmatch(rf"{name} = (?:(?P<name>\w+)|\w+\.(?P<attribute>\w+)|{cast})", statement)
            is_declared = value is not None and _is_value(value, declared, lines, types, visited_names | {name})
        if not is_declared:
            return False
        bindings += 1
    return bindings > 0


def _is_value(
    value: re.Match[str], declared: str, lines: list[str], types: ScriptTypes, visited_names: frozenset[str]
) -> bool:
    """Return True if an assigned value is None, is declared as Optional, or is a cast (which is checked separately)."""
    if value["attribute"]:
        return is_optional_attribute(types, value["attribute"], f"Optional[{declared}]")
    if value["name"] in (None, "None") or value["name"] in visited_names:
        return True
    return len(visited_names) < _MAX_NAMES and _is_optional(value["name"], declared, lines, types, visited_names)


def _join_lines(text: str) -> Iterator[str]:
    parts: list[str] = []
    depth = 0
    for line in text.split("\n"):
        parts.append(line)
        depth += sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
        if depth <= 0:
            yield " ".join(parts)
            parts, depth = [], 0
    yield " ".join(parts)
