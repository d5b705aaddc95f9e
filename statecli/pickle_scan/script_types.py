"""Find objects whose class, and tuples whose length, differs from the declaration in a TorchScript archive's code.

torch.jit.load gives the attributes of an object the values of the pickle without a check. Compiled code reads an
attribute by its number, and unpacks a tuple of the declared length. So the code reads other memory if an object has
fewer attributes or a tuple is shorter. torch checks all other types when the value is used. Sources: obj_loader in
torch/csrc/jit/serialization/import.cpp, and importClass in import_source.cpp, of torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan.packed_weights import TYPE_TAG, is_cpp_class, strip_tags
from statecli.pickle_scan.script_code import CHARACTERS_PER_STEP, blank_strings
from statecli.pickle_scan.script_nesting import MAX_TYPE_DEPTH
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Build, Global, Key, Obj, Value

_NOT_COMPARED_REASON = (
    "torch.jit.load does not compare the value with the declared type, so the code may read memory outside the value"
)
_ROOT = "__torch__"
_RECORD = compile_on_use(r"(?:.*/)?code/(__torch__.*)\.py", re.DOTALL)
_CLASS = compile_on_use(r"class (?P<name>\w+)(?:\((?P<base>\w+)\))?:", re.ASCII)
_CLASS_TOKEN = compile_on_use(r"\bclass\b", re.ASCII)
#: Lines that torch writes in the body of a class: declarations of attributes, and lines that declare no attribute.
_ATTRIBUTE = compile_on_use(
    r'  (?:(?P<name>\w+) : |__annotations__\["(?P<quoted>[^"\\\n]*)"\] = )(?P<type>[\w.,\[\]() ]+)', re.ASCII
)
_NO_ATTRIBUTE = compile_on_use(r"  (?:def \w|pass\Z|\w+ : Final\[.*\] = |\w+ = )", re.ASCII)
_MEMBER = compile_on_use(r"  \w+ = (.+)", re.ASCII)
_SIGNATURE = compile_on_use(r"def (\w+)\(\w+(?:: [\w.]+)?(?:, )?(.*):", re.ASCII)
_DEFAULT = compile_on_use(r"=(?:\[[^\]]*\]|\([^)]*\)|\"[^\"]*\"|[^,)])*")
_TYPE_WORD = compile_on_use(r"[\w.]+|[\[\],]", re.ASCII)
_QUOTE, _INDENT = frozenset("\"'"), 2
#: Types whose values are checked here, with the types of their arguments.
_OPTIONAL, _LIST, _DICT, _TUPLE = "Optional", "List", "Dict", "Tuple"


class ScriptType(NamedTuple):
    """A type of TorchScript: `Dict[str, int]` has the name Dict and two arguments."""

    name: str
    arguments: tuple[ScriptType, ...] = ()


class ScriptClass(msgspec.Struct, frozen=True):
    """Class in TorchScript code. `base` is the name of its base (Module, NamedTuple, Enum, an interface); else None.

    `methods` has the parameters and the result of each method as text; `members` the values of an Enum as text.
    """

    base: str | None
    attributes: Mapping[str, ScriptType]
    methods: Mapping[str, str] = {}
    members: frozenset[str] = frozenset()


class ScriptTypes(msgspec.Struct, frozen=True):
    """Classes of an archive by qualified name. `unreadable_class` is the name of a class that statecli cannot read."""

    classes: Mapping[str, ScriptClass]
    unreadable_class: str | None


def read_types(codes: Iterable[tuple[str, bytes]], steps: Steps) -> ScriptTypes:
    """Read the classes of all texts of an archive, given as pairs (record name, text). Raises OutOfSteps."""
    classes: dict[str, ScriptClass] = {}
    unreadable_class = None
    for record, code in codes:
        if b"class" not in code:
            continue
        match = _RECORD.fullmatch(record)
        module = match[1].replace("/", ".") if match else record
        steps.take(Budget.TEXT, 1 + len(code) // CHARACTERS_PER_STEP)
        text = code.decode("latin-1")
        blank = blank_strings(text, steps)
        if not _QUOTE.isdisjoint(blank):
            unreadable_class = unreadable_class or module
            continue
        count = 0
        for name, script_class in _iter_classes(text, blank):
            count += 1
            qualified = f"{module}.{name}"
            if script_class is None or classes.setdefault(qualified, script_class) != script_class:
                unreadable_class = unreadable_class or qualified
        if count != len(_CLASS_TOKEN.findall(blank)):
            unreadable_class = unreadable_class or module
    return ScriptTypes(classes, unreadable_class)


def _iter_classes(text: str, blank: str) -> Iterator[tuple[str, ScriptClass | None]]:
    """Yield each class's name and definition. The definition is None if torch cannot have written the class.

    `blank` is the text without strings and comments.
    """
    current: re.Match[str] | None = None
    lines: list[tuple[int, str]] = []
    for line, code in zip((*text.split("\n"), "end"), (*blank.split("\n"), "end"), strict=True):
        indent = len(code) - len(code.lstrip())
        if indent == 0 and code:
            if current:
                yield current["name"], _read_class(current["base"], lines)
            current, lines = _CLASS.fullmatch(line), []
        elif current and code.strip():
            lines.append((indent, line))


def _read_class(base: str | None, lines: list[tuple[int, str]]) -> ScriptClass | None:
    """Return the class that these lines define; None if a line has a form that torch never writes."""
    attributes = _read_attributes(lines)
    if attributes is None:
        return None
    methods: dict[str, str] = {}
    for place, (indent, line) in enumerate(lines):
        if indent == _INDENT and line.startswith("  def "):
            text = _read_signature(following_line for _, following_line in lines[place:])
            if text is None:
                return None
            methods[text[0]] = text[1]
    members = [match[1] for _, line in lines if (match := _MEMBER.fullmatch(line))] if base == "Enum" else []
    return ScriptClass(base, attributes, methods, frozenset(members))


def _read_signature(lines: Iterable[str]) -> tuple[str, str] | None:
    """Return a method's name, and the text of its parameters and result, without defaults and the type of `self`."""
    parts: list[str] = []
    for line in lines:
        parts.append(line.strip())
        if line.endswith(":"):
            break
    match = _SIGNATURE.fullmatch(" ".join(parts))
    return (match[1], _DEFAULT.sub("", match[2].replace(", )", ")"))) if match else None


def _read_attributes(lines: list[tuple[int, str]]) -> dict[str, ScriptType] | None:
    """Return the attributes that the lines of a class declare; None if a line has a form that torch never writes."""
    attributes: dict[str, ScriptType] = {}
    if lines and lines[0][0] != _INDENT:
        return None
    for indent, line in lines:
        if indent > _INDENT:  # a line of a function
            continue
        match = _ATTRIBUTE.fullmatch(line)
        parsed = _parse_type(match["type"]) if match else None
        if match and parsed:
            name = match["quoted"] if match["name"] is None else match["name"]
            if attributes.setdefault(name, parsed) is not parsed:
                return None
        elif indent != _INDENT or not _NO_ATTRIBUTE.match(line):
            return None
    return attributes


def _parse_type(text: str) -> ScriptType | None:
    """Parse the text of a type; None for a text that torch does not write."""
    stack: list[tuple[str, list[ScriptType]]] = [("", [])]
    name = ""
    for word in _TYPE_WORD.findall(text):
        if word == "[":
            stack.append((name, []))
            name = ""
            if len(stack) > MAX_TYPE_DEPTH:
                return None
        elif word in ("]", ","):
            if name:
                stack[-1][1].append(ScriptType(name))
            name = ""
            if word == "]":
                outer, arguments = stack.pop()
                if not stack:
                    return None
                stack[-1][1].append(ScriptType(outer, tuple(arguments)))
        else:
            name = word
    if name:
        stack[-1][1].append(ScriptType(name))
    return stack[0][1][0] if len(stack) == 1 and len(stack[0][1]) == 1 else None


def is_trusted(text: str) -> bool:
    """Return True if torch itself checks values of this type when they are used."""
    declared = _parse_type(text)
    return declared is not None and not _has_checked_part(declared)


def _has_checked_part(declared: ScriptType) -> bool:
    is_own = declared.name == _TUPLE or declared.name.startswith(_ROOT)
    return is_own or any(map(_has_checked_part, declared.arguments))


def is_optional_attribute(types: ScriptTypes, name: str, text: str) -> bool:
    """Return True if each class that has this attribute declares it with this type."""
    declared = [
        script_class.attributes[name] for script_class in types.classes.values() if name in script_class.attributes
    ]
    return types.unreadable_class is None and bool(declared) and set(declared) == {_parse_type(text)}


class _Check(NamedTuple):
    """A value to compare with its declared type; `where` describes the value."""

    where: str
    value: Value
    declared: ScriptType


def find_mismatch(calls: Iterable[Obj], builds: Iterable[Build], types: ScriptTypes, steps: Steps) -> str | None:
    """Describe the first object whose class or length differs from its declaration in the code; None if all fit.

    `calls` are the objects made by a pickle, `builds` their states. Raises OutOfSteps.
    """
    checks: list[_Check] = []
    for target, state in builds:
        name = _get_class(target)
        if name is None or is_cpp_class(name):
            continue
        script_class = types.classes.get(name)
        if script_class is None or types.unreadable_class is not None:
            class_name = quoting.name(types.unreadable_class or name)
            return f"statecli cannot read the class {class_name} in the code, so it cannot check the objects"
        if script_class.base == "Enum":
            return (
                f"the pickle sets the state of a member of the enumeration {quoting.name(name)}; torch.jit reads "
                "this state as a call"
            )
        items = strip_tags(state)
        if type(items) is dict:
            checks += [
                _Check(f"attribute {quoting.quote(attribute)} of {quoting.name(name)}", items.get(attribute), declared)
                for attribute, declared in script_class.attributes.items()
            ]
    for call in calls:
        if (name := _get_class(call)) is not None and not _is_sound_call(call, types.classes.get(name)):
            return (
                f"the pickle calls {quoting.name(name)} in a way for which torch.jit creates no object; torch.jit "
                "then misreads the rest of the pickle"
            )
        if type(call.cls) is Global and call.cls.qualified == TYPE_TAG and len(call.args) == 2:
            text = call.args[1]
            tag = _parse_type(text) if type(text) is str else None
            if tag is not None:
                checks.append(_Check(f"a value of type {quoting.quote(text)}", call.args[0], tag))
    return _run_checks(checks, types, steps)


def _is_sound_call(call: Obj, script_class: ScriptClass | None) -> bool:
    """Return True if torch's C++ code can create the object as Python does. An Enum needs the value of a member."""
    if script_class is None or script_class.base != "Enum":
        return call.how != "enum"
    value = call.args[0] if call.how == "enum" else None
    texts = (f'"{value}"',) if type(value) is str else (repr(value), repr(value).removesuffix("0"))
    return value is not None and not script_class.members.isdisjoint(texts)


def _run_checks(checks: list[_Check], types: ScriptTypes, steps: Steps) -> str | None:
    checked_keys: set[tuple[int, ScriptType]] = set()
    while checks:
        check = checks.pop()
        steps.take(Budget.FLOW)
        check = check._replace(value=strip_tags(check.value))
        key = id(check.value), check.declared
        if key not in checked_keys and _is_checked(check.declared):
            checked_keys.add(key)
            mismatch = _describe_mismatch(check.value, check.declared, types)
            if mismatch is not None:
                return f"{check.where} is {mismatch}; {_NOT_COMPARED_REASON}"
            checks += [check._replace(value=value, declared=type) for value, type in _iter_parts(check, types)]
    return None


def _describe_mismatch(value: Value, declared: ScriptType, types: ScriptTypes) -> str | None:
    """Describe a value that differs from the declared class or tuple; None for a value that fits."""
    script_class = types.classes.get(declared.name)
    base = script_class.base if script_class else None
    length = len(script_class.attributes) if script_class and base == "NamedTuple" else len(declared.arguments)
    if base == "NamedTuple" or declared.name == _TUPLE:
        is_mismatch = type(value) is tuple and len(value) != length
        return f"a tuple of length {len(value)}, but the code declares length {length}" if is_mismatch else None
    actual = _get_class(value)
    if script_class is not None and base in ("Interface", "ModuleInterface"):
        own_class = types.classes.get(actual or "")
        methods = own_class.methods if own_class is not None else {}
        fits = all(methods.get(name) == signature for name, signature in script_class.methods.items())
        return _describe_object(actual, declared) if actual and not fits else None
    is_class = declared.name.startswith(_ROOT)
    return _describe_object(actual, declared) if is_class and actual and actual != declared.name else None


def _describe_object(actual: str, declared: ScriptType) -> str:
    return f"an object of {quoting.name(actual)}, but the code declares {quoting.name(declared.name)}"


def _iter_parts(check: _Check, types: ScriptTypes) -> Iterator[tuple[Value, ScriptType]]:
    value, (name, arguments) = check.value, check.declared
    if name == _OPTIONAL and len(arguments) == 1:
        yield value, arguments[0]
    elif name == _LIST and len(arguments) == 1 and type(value) is list and _is_checked(arguments[0]):
        yield from ((element, arguments[0]) for element in value)
    elif name == _DICT and len(arguments) == 2 and type(value) is dict and any(map(_is_checked, arguments)):
        yield from ((key.value if type(key) is Key else key, arguments[0]) for key in value)
        yield from ((element, arguments[1]) for element in value.values())
    elif type(value) is tuple:
        fields = types.classes[name].attributes.values() if name in types.classes else arguments
        yield from zip(value, fields, strict=False)


def _is_checked(declared: ScriptType) -> bool:
    return declared.name in (_OPTIONAL, _LIST, _DICT, _TUPLE) or declared.name.startswith(_ROOT)


def _get_class(value: Value) -> str | None:
    """Return the name of an object's class in TorchScript; None for other values."""
    name = value.cls.qualified if type(value) is Obj and type(value.cls) is Global else ""
    return name if name.startswith(f"{_ROOT}.") else None
