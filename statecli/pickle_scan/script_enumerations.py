"""Find numbers in the code of TorchScript that stand for a nonexistent dtype, layout or memory format.

Code writes enumerations as numbers, and torch uses a number as an index into its tables without a check; torch computes
`promote_types` of two numbers even during a load. Numbers computed by a program, or read from a pickle, are not known
here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import name_lists
from statecli.pickle_scan.script_code import CHARACTERS_PER_STEP, Call, blank_strings
from statecli.pickle_scan.step_budget import Budget, Steps

#: Number of valid values in torch 2.13, with room for later releases.
SIZES = {"memory_format": 4, "dtype": 64, "layout": 16}
HARM = (
    "gets a number that is not a valid dtype, layout or memory format; torch does not check the number, and may read "
    "memory outside its tables"
)
_KINDS = {"": "dtype", "l": "layout", "m": "memory_format"}
#: Operators -> positions of their arguments that are dtypes, layouts or memory formats, with the kind.
POSITIONS = {
    name: {int(place.rstrip("lm")): _KINDS[place.lstrip("0123456789")] for place in places.split()}
    for name, places in name_lists.read_lines("operators.txt", "enumerations")
}
_NUMBER = r"[(\s]*(-?\d[\d.]*)[)\s]*"
_ASSIGNED = compile_on_use(rf"^[^\S\n]*(\w+)[^\S\n]*(?::[^\S\n]*int[^\S\n]*)?=(?!=){_NUMBER}$", re.MULTILINE | re.ASCII)
_KEYWORD = compile_on_use(r"(?<![\w.])(dtype|layout|memory_format)\s*=(?!=)(?P<value>[^,\n]*)", re.ASCII)
_CALL = compile_on_use(rf"(?<!\w)(?P<name>{'|'.join(POSITIONS)})\s*\(", re.ASCII)
#: Text before a called name: the names of a path, or the end of the value that has the method.
_PATH = compile_on_use(r"(?:(?P<root>\w+)\s*\.\s*(?:\w+\s*\.\s*)*|[)\]]\s*\.\s*)\Z", re.ASCII)
_MAX_PATH_CHARACTERS = 200
_LITERAL = compile_on_use(_NUMBER, re.ASCII)
_NAME = compile_on_use(r"[(\s]*([A-Za-z_]\w*)[)\s]*", re.ASCII)
_SEPARATOR = compile_on_use(r"[(\[]|[)\]]|,")
#: Longest arguments of a call that are read, in characters.
_MAX_ARGUMENT_CHARACTERS = 2_000


def find_invalid_numbers(code: bytes, steps: Steps) -> Iterator[Call]:
    """Yield the calls with a number for a dtype, a layout or a memory format that torch does not have.

    Raises OutOfSteps.
    """
    text = code.decode("latin-1")
    if not (_KEYWORD.search(text) or _CALL.search(text)):
        return
    steps.take(Budget.TEXT, 1 + len(code) // CHARACTERS_PER_STEP)
    text = blank_strings(text, steps)
    assigned = {match[1]: match[2] for match in _ASSIGNED.finditer(text)}
    for match in _KEYWORD.finditer(text):
        if _is_out_of_range(match["value"], match[1], assigned):
            yield _build_call(text, match.start(), match[1])
    for match in _CALL.finditer(text):
        path = _PATH.search(text, max(0, match.start() - _MAX_PATH_CHARACTERS), match.start())
        if path is None or path["root"] == "__torch__":  # a function of the archive
            continue
        arguments = list(_split_arguments(text, match.end(), steps))
        first = 0 if path["root"] in ("torch", "ops") else 1  # the first argument of a method is before its name
        for position, kind in POSITIONS[match["name"]].items():
            if 0 <= position - first < len(arguments) and _is_out_of_range(arguments[position - first], kind, assigned):
                yield _build_call(text, match.start("name"), match["name"])
                break


def _build_call(text: str, at: int, name: str) -> Call:
    return Call("TorchScript", name, at, text.count("\n", 0, at) + 1, HARM, on_load=False)


def _is_out_of_range(value: str, kind: str, assigned: dict[str, str]) -> bool:
    """Return True if an argument is a number out of range, or the name of a variable with such a value."""
    name = _NAME.fullmatch(value)
    number = _LITERAL.fullmatch(assigned.get(name[1], "") if name else value)
    digits = number[1][:9] if number else ""
    return digits.lstrip("-").isdigit() and not 0 <= int(digits) < SIZES[kind]


def _split_arguments(text: str, at: int, steps: Steps) -> Iterator[str]:
    """Yield the arguments of a call, up to its closing parenthesis."""
    depth, start = 0, at
    steps.take(Budget.TEXT)
    for match in _SEPARATOR.finditer(text, at, at + _MAX_ARGUMENT_CHARACTERS):
        if match[0] in "([":
            depth += 1
        elif match[0] == "," and depth == 0:
            yield text[start : match.start()]
            start = match.end()
            steps.take(Budget.TEXT)
        elif match[0] in ")]":
            depth -= 1
            if depth < 0:
                yield text[start : match.start()]
                return
