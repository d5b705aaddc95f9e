"""Check the texts that torch or its compilers copy from a torch.export program into source code.

`torch.export.load` compiles names of the graph as Python source, and `torch.export.unflatten` the paths of modules.
inductor writes values, names and stack traces into Python and C++. Sources: torch/fx/graph.py,
torch/export/unflatten.py (`_dispatch_modules`, `_assign_attr`), torch/_inductor/utils.py (`get_fused_kernel_name`,
`get_kernel_metadata`), torch/_inductor/codegen/cpp.py, cpp_wrapper_cpu.py and wrapper.py (`stream_idx_to_user_obj_idx`)
of torch 2.13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from statecli.core import unicode_forms
from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan.export_arguments import TAKEN_NAMES
from statecli.pickle_scan.module_attributes import find_module_attribute
from statecli.pickle_scan.program_schema import TextRequirement
from statecli.pickle_scan.step_budget import Budget, Steps

_NAME = compile_on_use(r"\w*")
_PARAMETER = compile_on_use(r"\*{0,2}\w*")
#: Characters that end a quoted text, a comment or a line of source.
_TEXT_BREAKS = compile_on_use(r"[\"'\\\n\r]")
#: The same for paths of modules, because torch writes the quotes of `L['self']` in them, between double quotes.
_PATH_BREAKS = compile_on_use(r"[\"\\\n\r]|'''")
#: The same for values. Messages of assertions have single quotes, also at their end. inductor writes the C++ around
#: them between three single quotes of Python. `??/` is a backslash for some C++ compilers.
_VALUE_BREAKS = compile_on_use(r"[\"\\\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]|\?\?/|'''")
#: The same for stack traces. inductor writes a C++ wrapper with the traces between three double quotes of Python, and a
#: kernel between three single quotes. None of 8,142 stack traces in 266 exported programs has either.
_TRACE_BREAKS = compile_on_use(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]|\"{3}|'{3}")
#: Names of functions and classes; names inside a function contain `<locals>`.
_FUNCTION_NAMES = compile_on_use(r"(?:[-\w.,;:#]|<locals>|<lambda>)*")
_FLOATS = frozenset(["Infinity", "-Infinity", "NaN"])
#: End of the raw string that inductor writes a stack trace into; and texts that may hide the rest of that string from
#: C++. Such a text is a raw string with up to 16 characters before its bracket, a line that goes on, a directive, or a
#: comment.
_RAW_END = ')"'
_RAW_BEGIN = compile_on_use(r"R\"[^ \t\v\f\n()\\]{0,16}\(|(?:\\|\?\?/)[ \t]*$|^[ \t]*(?:#|%:|\?\?=)|/\*", re.MULTILINE)
#: Keys in an annotation that inductor reads: the options of the compiler, and the number of a stream.
_COMPILER_OPTIONS, _STREAM = "inductor_configs", "stream"
_BRACKET = compile_on_use(r"[\[()\]]")
_CALL_NUMBER = compile_on_use(r"@\d+")


def is_valid(text: str, judgement: TextRequirement) -> bool:
    """Return True if torch can write the text into source code without changing the meaning of the code."""
    check = CHECKS.get(judgement)
    return check is None or check(text)


def _is_stable(text: str) -> bool:
    """Return False for a name that Python's parser would normalize (NFKC), because the result may be `self`."""
    return unicode_forms.is_normalized("NFKC", text)


def _refuse(text: str) -> bool:
    return not text


def _is_plain(text: str) -> bool:
    return _is_stable(text) and not _TEXT_BREAKS.search(text)


def _is_parameter(text: str) -> bool:
    return _is_stable(text) and _PARAMETER.fullmatch(text) is not None and text.lstrip("*") not in TAKEN_NAMES


def _is_module_path(text: str) -> bool:
    """Return True for a path of module names, each of which may end with the number of a call (`@1`)."""
    numbered = (part.partition("@") for part in text.split("."))
    return _is_plain(text) and all(_CALL_NUMBER.fullmatch(at + number) for _, at, number in numbered if at)


def _is_module_stack(text: str) -> bool:
    """Return True if each module in the stack has a key, a path and a class."""
    if not _is_stable(text) or _PATH_BREAKS.search(text):
        return False
    paths = list_stack_paths(text)
    return None not in paths and all(_CALL_NUMBER.sub("", path or "").find("@") < 0 for path in paths)


def list_stack_paths(text: str) -> list[str | None]:
    """Return the path of each module in `nn_module_stack`; None for an entry that torch refuses."""
    return [parts[1] if len(parts := _split_entry(entry)) == 3 else None for entry in text.split(";")] if text else []


def _split_entry(entry: str) -> list[str]:
    """Split an entry of `nn_module_stack` at the commas outside of brackets."""
    if not _BRACKET.search(entry):
        return entry.split(",")
    parts, begin, depth = [], 0, 0
    for at, character in enumerate(entry):
        if character in "[(":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "," and not depth:
            parts.append(entry[begin:at])
            begin = at + 1
    return [*parts, entry[begin:]]


def find_module_call(text: str) -> str | None:
    """Return the first part of a module's path that is an attribute of modules, ignoring call numbers such as `@1`.

    None if each part may name a module. `_guards_fn` is a module of each program, and so of a program exported again.
    """
    for part in text.split("."):
        attribute = find_module_attribute(unicode_forms.normalize("NFKC", part.partition("@")[0]))
        if attribute and attribute != "_guards_fn":
            return attribute
    return None


def strip_call_numbers(path: str) -> str:
    """Return the path without the numbers of calls (`@1`), as unflatten sets a tensor for all calls of a module."""
    return _CALL_NUMBER.sub("", path)


def _are_origins(text: str) -> bool:
    """Return True if no text in the JSON can end the string literal in which torch writes the JSON."""
    if "\\" not in text and "'''" not in text:  # without escapes, a JSON string has no quote and no line break
        return True
    try:
        return not any(type(value) is str and _VALUE_BREAKS.search(value) for value in _iter_json(text))
    except (ValueError, RecursionError):
        return False


def _are_annotations(text: str) -> bool:
    """Return False for annotations with compiler options (these can run commands) or an invalid stream number.

    inductor writes the number of a stream into source unchanged.
    """
    try:
        dicts = [value for value in _iter_json(text) if type(value) is dict]
    except (ValueError, RecursionError):
        return False
    return all(
        _COMPILER_OPTIONS not in value and type(value.get(_STREAM)) in (int, bool, type(None)) for value in dicts
    )


def _iter_json(text: str) -> Iterator[Any]:
    """Yield each value in a JSON document. Raises ValueError and RecursionError."""
    stack = [json.loads(text)]
    while stack:
        value = stack.pop()
        yield value
        stack.extend(value.values() if type(value) is dict else value if type(value) is list else ())


def find_end_of_raw_string(traces: list[str]) -> str | None:
    """Return a stack trace that can end its C++ raw string, so that C++ reads the rest as code; else None.

    C++ reads the text after `)"` as code. C++ refuses the code unless a stack trace hides the mark at the end of each
    raw string. Python code often has `)"`, but hardly ever both.
    """
    ends = next((trace for trace in traces if _RAW_END in trace), None)
    return ends if ends is not None and any(_RAW_BEGIN.search(trace) for trace in traces) else None


#: Test of a text for each requirement. Operators, expressions, symbols and guards have further checks of their own.
CHECKS: dict[TextRequirement, Callable[[str], bool]] = {
    TextRequirement.NUMBER: _refuse,
    TextRequirement.FLOAT: _FLOATS.__contains__,
    TextRequirement.IDENTIFIER: lambda text: _is_stable(text) and _NAME.fullmatch(text) is not None,
    TextRequirement.PARAMETER: _is_parameter,
    TextRequirement.ATTRIBUTE: _is_plain,
    TextRequirement.MODULE: _is_module_path,
    TextRequirement.OPERATOR: _is_plain,
    TextRequirement.SYMBOL: _is_plain,
    TextRequirement.PLAIN: _is_plain,
    TextRequirement.INPUT: _is_plain,
    TextRequirement.VALUE: lambda text: not _VALUE_BREAKS.search(text),
    TextRequirement.TRACE: lambda text: not _TRACE_BREAKS.search(text),
    TextRequirement.MODULES: _is_module_stack,
    TextRequirement.FUNCTIONS: lambda text: _is_stable(text) and _FUNCTION_NAMES.fullmatch(text) is not None,
    TextRequirement.ORIGINS: _are_origins,
    TextRequirement.ANNOTATIONS: _are_annotations,
    TextRequirement.UNKNOWN: _is_plain,
    TextRequirement.UNREADABLE: _refuse,
}


#: Key of a text that is JSON again.
_CONTEXT_KEY = "context"


class _NestingObject(list[tuple[str, Any]]):
    """JSON object in nested arguments, as a list of (key, value) pairs so that repeated keys are kept.

    torch imports the class of each object while parsing the object, even if a later key replaces the object.
    """


def iter_spec_texts(text: str, is_input: bool, steps: Steps) -> Iterator[tuple[TextRequirement, str]]:
    """Yield (requirement, text) for each text in the JSON of nested arguments. Raises OutOfSteps.

    `is_input`: the nesting of the inputs has the names of keyword arguments.
    """
    stack: list[tuple[str, Any]] = [(_CONTEXT_KEY, text)]
    names = _find_keyword_names(text) if is_input else []
    yield from ((TextRequirement.IDENTIFIER, str(name)) for name in names)
    while stack:
        key, node = stack.pop()
        steps.take(Budget.TEXT)
        if type(node) is _NestingObject:
            yield from _iter_class_texts(dict(node))
            yield from ((TextRequirement.PLAIN, inner_key) for inner_key, _ in node)
            stack.extend(node)
        elif type(node) is list:
            stack.extend((key, child) for child in node)
        elif type(node) is str and key == _CONTEXT_KEY:
            steps.take(Budget.TEXT, len(node) // 8)
            try:
                stack.append(("", json.loads(node, object_pairs_hook=_NestingObject)))
            except ValueError:  # torch reads the text with the same parser
                yield TextRequirement.PLAIN, node
            except RecursionError:
                yield TextRequirement.UNREADABLE, node
        elif type(node) is str:
            yield TextRequirement.PLAIN, node


def _iter_class_texts(node: dict[str, Any]) -> Iterator[tuple[TextRequirement, str]]:
    """Yield the class that a JSON object names, and the member if the class is an enumeration."""
    if type(node.get("default_factory_module")) is str:
        yield TextRequirement.CLASS, f"{node['default_factory_module']}:{node.get('default_factory_name')}"
    if "__enum__" in node:
        yield TextRequirement.CLASS, str(node.get("fqn"))
        yield TextRequirement.IDENTIFIER, str(node.get("name"))


def _find_keyword_names(text: str) -> list[Any]:
    """Return the names of keyword arguments, because torch writes them into the source of `forward`."""
    try:
        names = json.loads(json.loads(text)[1]["children_spec"][1]["context"])
    except (TypeError, KeyError, IndexError, ValueError, RecursionError):
        return []
    return list(names or ()) if type(names) in (list, dict) else [names] if type(names) is str else []
