"""Check that a module wrapped by torch.compile is pickled as torch does, with plain compiler settings.

A whole `torch.compile(module)` has the context of its compiler in the pickle: objects of dynamo, made empty and then
filled with a state. Loading compiles nothing. The first call compiles, with the settings in the pickle: `cpp.cxx` is a
command. So the names are clean if each of the objects has its place, and the settings are numbers and truth values.
Sources: torch/_dynamo/eval_frame.py (`OptimizedModule.__reduce__`, `OptimizeContext.__reduce__`), torch/__init__.py
(`_TorchCompileInductorWrapper`) of torch 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from statecli.pickles.graph import get_name
from statecli.pickles.nodes import Build, Global, Obj, Value

_MODULE_CLASS = "torch._dynamo.eval_frame.OptimizedModule"
_CONTEXT_CLASS = "torch._dynamo.eval_frame.OptimizeContext"
_PART_CLASSES = frozenset(
    [
        "torch._dynamo.convert_frame.CatchErrorsWrapper",
        "torch._dynamo.convert_frame.ConvertFrame",
        "torch._dynamo.convert_frame.ConvertFrameAssert",
        "torch._dynamo.convert_frame.ConvertFrameBox",
        "torch._dynamo.repro.after_dynamo.WrapBackendDebug",
        "torch._dynamo.hooks.Hooks",
        "torch._TorchCompileInductorWrapper",
        "torch._TorchCompileWrapper",
    ]
)
#: Backends that compile nothing from the file and run the module's operators unchanged.
_BACKENDS = frozenset(["torch._dynamo.backends.debugging.eager", "torch._dynamo.backends.debugging.aot_eager"])
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
_NULL_CONTEXT = "contextlib.nullcontext"
_NAMES = frozenset([_MODULE_CLASS, _CONTEXT_CLASS, *_PART_CLASSES, *_GETATTR, *_BACKENDS])
_GETTER = "get_compiler_config"
_CONTEXT_STATE = frozenset(["export", "dynamic", "compiler_config"])
_SETTING_TYPES = (bool, int, float, type(None))
_PLAIN_TYPES = (*_SETTING_TYPES, str)


def is_module(call: Obj) -> bool:
    """Return True for a call that creates the compiled module, not one of its parts."""
    return get_name(call.cls) == _MODULE_CLASS


def find_module_calls(calls: Sequence[Obj], builds: Iterable[Build]) -> dict[int, Obj]:
    """Return the calls that create compiled modules and their parts, by id; {} if one call has an unusual form.

    `calls` are all calls of a pickle, `builds` all its BUILDs.
    """
    if not any(map(is_module, calls)):
        return {}
    parts = {id(call): call for call in calls if get_name(call.cls) in _NAMES}
    states = Counter(id(target) for target, _ in builds)
    is_usual = all(states[part] <= 1 and _is_usual(call, parts) for part, call in parts.items())
    return parts if is_usual else {}


def collect_name_ids(parts: dict[int, Obj], names: Iterable[Global]) -> set[int]:
    """Return the ids of the names that the calls use. If only these calls use a name, the name is harmless."""
    if not parts:
        return set()
    values = {id(name) for name in names if name.qualified == _NULL_CONTEXT or name.qualified in _BACKENDS}
    return {id(part.cls) for part in parts.values()} | values


def _is_usual(call: Obj, parts: dict[int, Obj]) -> bool:
    """Return True if torch.compile can have written the call and its state. `parts`: all calls of the compiler."""
    name, args = get_name(call.cls), call.args
    if call.kwargs or call.items or call.elems or call.how != ("newobj" if name in _PART_CLASSES else "reduce"):
        return False
    state = {} if call.state is None else call.state
    if name in _GETATTR:
        return len(args) == 2 and args[1] == _GETTER and _is_part(args[0], parts) and not state
    if name == _MODULE_CLASS:
        return len(args) == 2 and id(args[0]) not in parts and _is_part(args[1], parts, _CONTEXT_CLASS) and not state
    if type(state) is not dict or name in _BACKENDS:
        return False
    if name in _PART_CLASSES:
        return not args and all(_is_attribute(key, attribute, parts) for key, attribute in state.items())
    is_called_as_torch_does = (
        len(args) == 3 and _is_part(args[0], parts) and get_name(args[1]) == _NULL_CONTEXT and type(args[2]) is bool
    )
    return is_called_as_torch_does and state.keys() <= _CONTEXT_STATE and all(map(_is_plain_data, state.values()))


def _is_part(value: Value, parts: dict[int, Obj], *names: str) -> bool:
    """Return True for an object of the compiler, of one of the named classes if names are given."""
    return id(value) in parts and get_name(value.cls) in (names or _PART_CLASSES)


def _is_attribute(key: Value, value: Value, parts: dict[int, Obj]) -> bool:
    if key == _GETTER:
        return _is_part(value, parts, *_GETATTR)
    if key == "config":
        return type(value) is dict and all(type(setting) in _SETTING_TYPES for setting in value.values())
    if key == "kwargs":
        return type(value) is dict and not value
    return type(key) is str and (type(value) in _PLAIN_TYPES or get_name(value) in _BACKENDS or _is_part(value, parts))


def _is_plain_data(value: Any) -> bool:
    stack = [value]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if type(node) in _PLAIN_TYPES or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is dict:
            stack.extend((*node.keys(), *node.values()))
        elif type(node) in (list, tuple):
            stack.extend(node)
        else:
            return False
    return True
