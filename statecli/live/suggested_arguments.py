"""Suggest values for the arguments that a class requires: `cfg=Config(size=...)`, `nn=torch.nn.Linear(2, 3)`."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from statecli.core.python_names import CLASS_ANNOTATIONS, SEQUENCE_ANNOTATIONS, takes_object, write_example
from statecli.live.configuration_argument import find_class, is_configuration, list_parameters
from statecli.live.object_scope import Scope
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import ObjectCall, ObjectName

#: Largest depth of nested configurations in a suggested spec.
_MAX_DEPTH = 3


def write_values(spec: ModelSpec, callee: Callee, names: Iterable[str]) -> dict[str, Any] | None:
    """Return values for arguments of a class, such as `Config(size=...)`, or None if the class of one is unknown."""
    module = None if spec.is_file else sys.modules.get(spec.module)
    defining_module = sys.modules.get(getattr(callee, "__module__", None) or "")
    start = module or defining_module
    scope = Scope(spec, ()) if start is None else Scope.around(spec, start, callee)
    values = {name: _write_value(callee, name, scope) for name in names}
    return None if None in values.values() else values


def set_argument(spec: ModelSpec, callee: Callee, name: str, value: object) -> ModelSpec:
    """Return the model spec with another value for an argument. A positional argument stays positional."""
    names = [parameter.name for parameter in list_parameters(callee)]
    if name not in names[: len(spec.args)]:
        return replace(spec, kwargs={**spec.kwargs, name: value})
    index = names.index(name)
    return replace(spec, args=(*spec.args[:index], value, *spec.args[index + 1 :]))


def _write_value(callee: Callee, name: str, scope: Scope, depth: int = 0) -> Any:
    parameters = inspect.signature(callee).parameters
    text = get_annotation_text(parameters[name])
    example = write_example(name, text, parameters)
    if example is not None:
        return ObjectName(example)
    argument_class = find_class(callee, name, scope.namespaces)
    if argument_class is None or depth > _MAX_DEPTH:
        return None if takes_object(name, text) else ObjectName("...")
    is_named = any(getattr(space, argument_class.__name__, None) is argument_class for space in scope.namespaces)
    can_build = not inspect.isabstract(argument_class) and (
        is_configuration(argument_class) or is_module_class(argument_class)
    )
    if not is_named or not can_build:
        return None
    words = set(re.findall(r"\w+", text))
    if words & CLASS_ANNOTATIONS:
        return ObjectName(argument_class.__name__)
    needed_names = [
        parameter.name for parameter in list_parameters(argument_class) if parameter.default is parameter.empty
    ]
    values = {inner: _write_value(argument_class, inner, scope, depth + 1) for inner in needed_names}
    if None in values.values():
        return None
    call = ObjectCall(argument_class.__name__, (), values)
    return [call] if words & SEQUENCE_ANNOTATIONS else call


def get_annotation_text(parameter: inspect.Parameter) -> str:
    """Return the annotation of a parameter as source code, or "" if it has no annotation."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return ""
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)


def is_module_class(value: object) -> bool:
    """Return True for a subclass of nn.Module, or False while torch is not imported."""
    nn = sys.modules.get("torch.nn")
    return nn is not None and isinstance(value, type) and issubclass(value, nn.Module)
