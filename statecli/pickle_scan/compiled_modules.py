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
#: Largest number of objects in one context; torch 2.13 creates nine.
_MAX_PARTS = 50
_SETTING_TYPES = (bool, int, float, type(None))
_PLAIN_TYPES = (*_SETTING_TYPES, str)


def is_module(call: Obj) -> bool:
    """Return True for a call that creates the compiled module, not one of its parts."""
    return get_name(call.cls) == _MODULE_CLASS


def find_module_calls(calls: Sequence[Obj], builds: Iterable[Build]) -> dict[int, Obj]:
    """Return the calls that create compiled modules and their parts, by id; {} if one call has an unusual form.

    `calls` are all calls of a pickle, `builds` all its BUILDs.
    """
    module_calls = [call for call in calls if is_module(call)]
    if not module_calls:
        return {}
    parts: dict[int, Obj] = {}
    for call in module_calls:
        wrapper_parts: dict[int, Obj] = {}
        if not _is_wrapped(call, wrapper_parts):
            return {}
        parts |= wrapper_parts
    states = Counter(id(target) for target, _ in builds)
    if any(states[part] > 1 for part in parts):
        return {}
    if any(get_name(call.cls) in _NAMES and id(call) not in parts for call in calls):
        return {}
    return parts


def collect_name_ids(parts: dict[int, Obj], names: Iterable[Global]) -> set[int]:
    """Return the ids of the names that the calls use. If only these calls use a name, the name is harmless."""
    if not parts:
        return set()
    values = {id(name) for name in names if name.qualified == _NULL_CONTEXT or name.qualified in _BACKENDS}
    return {id(part.cls) for part in parts.values()} | values


def _is_wrapped(call: Obj, parts: dict[int, Obj]) -> bool:
    """Return True if torch.compile can have written the call. Add the call and the calls inside it to `parts`."""
    parts[id(call)] = call
    is_plain = _has_only_arguments(call, "reduce") and len(call.args) == 2 and call.state is None
    context = call.args[1] if is_plain else None
    if type(context) is not Obj:
        return False
    parts[id(context)] = context
    if get_name(context.cls) != _CONTEXT_CLASS or not _has_only_arguments(context, "reduce") or len(context.args) != 3:
        return False
    callback, manager, is_first = context.args
    state = {} if context.state is None else context.state
    return (
        type(state) is dict
        and state.keys() <= _CONTEXT_STATE
        and get_name(manager) == _NULL_CONTEXT
        and type(is_first) is bool
        and all(_is_plain_data(value) for value in state.values())
        and _is_part(callback, parts)
    )


def _is_part(value: Value, parts: dict[int, Obj]) -> bool:
    """Return True for an object of the compiler whose state has only plain values and other objects of the compiler."""
    if type(value) is not Obj or get_name(value.cls) not in _PART_CLASSES:
        return False
    if value.args or not _has_only_arguments(value, "newobj"):
        return False
    if id(value) in parts or len(parts) > _MAX_PARTS:
        return id(value) in parts
    parts[id(value)] = value
    state = {} if value.state is None else value.state
    return type(state) is dict and all(_is_attribute(key, attribute, parts) for key, attribute in state.items())


def _is_attribute(key: Value, value: Value, parts: dict[int, Obj]) -> bool:
    if key == _GETTER:
        return _is_getter(value, parts)
    if key == "config":
        return type(value) is dict and all(type(setting) in _SETTING_TYPES for setting in value.values())
    if key == "kwargs":
        return type(value) is dict and not value
    return type(key) is str and (type(value) in _PLAIN_TYPES or get_name(value) in _BACKENDS or _is_part(value, parts))


def _is_getter(value: Value, parts: dict[int, Obj]) -> bool:
    """Return True for the call `getattr(part, 'get_compiler_config')` on an object of the compiler."""
    if type(value) is not Obj or get_name(value.cls) not in _GETATTR or not _has_only_arguments(value, "reduce"):
        return False
    parts[id(value)] = value
    return len(value.args) == 2 and value.args[1] == _GETTER and _is_part(value.args[0], parts)


def _has_only_arguments(call: Obj, how: str) -> bool:
    return call.how == how and not (call.kwargs or call.items or call.elems)


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
