"""Find numbers in the code of TorchScript that stand for a dtype, a layout or a memory format that does not exist.

Code writes these as numbers, and torch uses a number as an index into its tables without a check; it computes
`promote_types` of two numbers even during a load. Numbers that a program computes, or reads from a pickle, are not
known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan.script_code import CHARACTERS_PER_STEP, Call, blank_strings
from statecli.pickle_scan.step_budget import Budget, Steps

#: Up to where torch 2.13 has values, with room for later releases.
SIZES = {"memory_format": 4, "dtype": 64, "layout": 16}
HARM = (
    "gets a number that is not a valid dtype, layout or memory format; torch does not check the number, and may read "
    "memory outside its tables"
)
#: Operators of torch 2.13, and the positions of their arguments that are dtypes, layouts (l) or memory formats (m).
_OPERATORS = """
    _assert_tensor_metadata 3
    _autocast_to_reduced_precision 3 4
    _cslt_sparse_mm 4
    _cslt_sparse_mm_search 4
    _foreach_norm 2
    _foreach_powsum 2
    _grouped_mm 4
    _log_softmax_backward_data 3
    _nested_tensor_from_tensor_list 1 2l
    _rowwise_prune 2
    _safe_softmax 2
    _scaled_grouped_mm 7
    _scaled_grouped_mm_v2 10
    _scaled_mm 6
    _scaled_mm_v2 9
    _sobol_engine_draw 5
    _softmax_backward_data 3
    _sparse_compressed_tensor_with_dims 4
    _sparse_log_softmax 2
    _sparse_softmax 2
    _spdiags 3l
    _to_dense 1
    _validate_sparse_compressed_tensor_args 4l
    addmm 3
    baddbmm 3
    bmm 2
    can_cast 0 1
    is_contiguous 1m
    is_strides_like_format 1m
    log_softmax 2
    mm 2
    native_norm 4
    promote_types 0 1
    qadd 8
    qadd_relu 8
    qbatch_norm2d 10
    qmul 8
    quantize_per_channel 4
    quantize_per_tensor 3
    quantize_per_tensor_dynamic 1
    softmax 2
    special_softmax 2
    sym_is_contiguous 1m
    to 1 2 4m 5m
    to_copy 1
    to_dense 1
    to_maybe_copy_out 1
    to_mkldnn 1
    view 1
    view_copy 1
"""
_KINDS = {"": "dtype", "l": "layout", "m": "memory_format"}
POSITIONS = {
    name: {int(place.rstrip("lm")): _KINDS[place.lstrip("0123456789")] for place in places}
    for name, *places in map(str.split, filter(str.strip, _OPERATORS.split("\n")))
}
_NUMBER = r"[(\s]*(-?\d[\d.]*)[)\s]*"
_ASSIGNED = compile_on_use(rf"^[^\S\n]*(\w+)[^\S\n]*(?::[^\S\n]*int[^\S\n]*)?=(?!=){_NUMBER}$", re.MULTILINE | re.ASCII)
_KEYWORD = compile_on_use(r"(?<![\w.])(dtype|layout|memory_format)\s*=(?!=)(?P<value>[^,\n]*)", re.ASCII)
_CALL = compile_on_use(rf"(?<!\w)(?P<name>{'|'.join(POSITIONS)})\s*\(", re.ASCII)
#: What stands in front of a called name: the names of a path, or the end of the value that has the method.
_PATH = compile_on_use(r"(?:(?P<root>\w+)\s*\.\s*(?:\w+\s*\.\s*)*|[)\]]\s*\.\s*)\Z", re.ASCII)
_MAX_PATH_CHARACTERS = 200
_LITERAL = compile_on_use(_NUMBER, re.ASCII)
_NAME = compile_on_use(r"[(\s]*([A-Za-z_]\w*)[)\s]*", re.ASCII)
_SEPARATOR = compile_on_use(r"[(\[]|[)\]]|,")
#: Characters of the arguments of a call that are read.
_MAX_ARGUMENT_CHARACTERS = 2_000


def find_odd_numbers(code: bytes, steps: Steps) -> Iterator[Call]:
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
        if _is_odd(match["value"], match[1], assigned):
            yield _build_call(text, match.start(), match[1])
    for match in _CALL.finditer(text):
        path = _PATH.search(text, max(0, match.start() - _MAX_PATH_CHARACTERS), match.start())
        if path is None or path["root"] == "__torch__":  # a function of the archive
            continue
        arguments = list(_split_arguments(text, match.end(), steps))
        first = 0 if path["root"] in ("torch", "ops") else 1  # a method has its first argument in front
        for position, kind in POSITIONS[match["name"]].items():
            if 0 <= position - first < len(arguments) and _is_odd(arguments[position - first], kind, assigned):
                yield _build_call(text, match.start("name"), match["name"])
                break


def _build_call(text: str, at: int, name: str) -> Call:
    return Call("TorchScript", name, at, text.count("\n", 0, at) + 1, HARM, on_load=False)


def _is_odd(value: str, kind: str, assigned: dict[str, str]) -> bool:
    """Return whether the text of an argument is a number out of range, or a name of such a number."""
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
