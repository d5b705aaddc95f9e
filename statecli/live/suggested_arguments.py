"""Suggest values for the arguments that a class requires: `cfg=Config(size=...)`, `nn=torch.nn.Linear(2, 3)`."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from statecli.core.errors import ModelError
from statecli.core.python_names import CLASS_ANNOTATIONS, SEQUENCE_ANNOTATIONS, takes_object, write_example
from statecli.core.target_suggestions import find_example
from statecli.live.configuration_argument import find_class, is_configuration, list_parameters
from statecli.live.object_scope import Scope, spell
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import ObjectCall, ObjectName, map_items

#: Largest number of functions to try in place of a class.
_MAX_FACTORIES = 2
#: Largest depth of nested configurations in a suggested spec.
_MAX_DEPTH = 3


def write_values(
    spec: ModelSpec, callee: Callee, names: Iterable[str], number: int | None = None
) -> dict[str, Any] | None:
    """Return values for arguments of a class, such as `Config(size=...)`, or None if the class of a value is unknown.

    `number` is written in place of each `...`, in the form that the annotation asks for.
    """
    module = None if spec.is_file else sys.modules.get(spec.module)
    defining_module = sys.modules.get(getattr(callee, "__module__", None) or "")
    start = module or defining_module
    scope = Scope(spec, ()) if start is None else Scope.around(spec, start, callee)
    values = {name: _write_value(callee, name, scope, number) for name in names}
    return None if None in values.values() else values


def list_factories(callee: Callee) -> list[str]:
    """Return functions in the class's module that build the class without arguments: `resnet18` for `ResNet`."""
    module = sys.modules.get(getattr(callee, "__module__", None) or "")
    names = []
    for name, value in vars(module).items() if isinstance(callee, type) and module is not None else ():
        if not inspect.isfunction(value) or value.__module__ != callee.__module__ or name.startswith("_"):
            continue
        return_annotation = value.__annotations__.get("return")
        is_factory = return_annotation in (callee, callee.__name__) or name.startswith(callee.__name__.lower())
        if is_factory and not any(parameter.default is parameter.empty for parameter in list_parameters(value)):
            names.append(f"{callee.__module__}:{name}")
    return names[:_MAX_FACTORIES]


def write_modules(spec: ModelSpec, callee: Callee, number: int, value: object) -> Any:
    """Replace each module class in an argument with a call of the class, and each string with a Linear layer."""
    module = sys.modules.get(spec.module) or sys.modules.get(callee.__module__)
    if type(value) in (list, tuple, dict):
        return map_items(value, lambda item: write_modules(spec, callee, number, item))
    if type(value) is str:
        return ObjectName("torch.nn.Linear(2, 3)")
    if not isinstance(value, ObjectName) or module is None:
        return value
    try:
        module_class = Scope.around(spec, module, callee).find(value).value
    except ModelError:
        return value
    if not is_module_class(module_class):
        return value
    needed_names = [
        parameter.name for parameter in list_parameters(module_class) if parameter.default is parameter.empty
    ]
    return ObjectCall(value.name, (), write_values(spec, module_class, needed_names, number) or {}, value.module)


def write_options(spec: ModelSpec, callee: Callee) -> Iterator[str]:
    """Yield a model spec for each other value that an argument's annotation allows, as in `Literal["G", "B"]`."""
    if spec.is_file:
        return
    for name, options in list_options(callee).items():
        for option in options:
            changed_spec = set_argument(spec, callee, name, option)
            if changed_spec.args != spec.args or changed_spec.kwargs != spec.kwargs:
                yield spell(replace(changed_spec, called=True))


def list_options(callee: Callee) -> dict[str, tuple[Any, ...]]:
    """Map the name of an argument to the values that its annotation lists, as in `Literal["G", "B"]`."""
    hints: dict[str, Any] = {}
    is_class = isinstance(callee, type)
    for function in [getattr(callee, name) for name in ("__new__", "__init__")] if is_class else [callee]:
        with suppress(Exception):  # of any kind: the code of an annotation runs
            hints.update(typing.get_type_hints(function))
    options = {
        parameter.name: _list_literals(hints.get(parameter.name, parameter.annotation))
        for parameter in list_parameters(callee)
    }
    return {name: values for name, values in options.items() if values}


def _list_literals(hint: object) -> tuple[Any, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(value for inner in typing.get_args(hint) for value in _list_literals(inner))


def set_argument(spec: ModelSpec, callee: Callee, name: str, value: object) -> ModelSpec:
    """Return the model spec with another value for an argument. A positional argument stays positional."""
    names = [parameter.name for parameter in list_parameters(callee)]
    if name not in names[: len(spec.args)]:
        return replace(spec, kwargs={**spec.kwargs, name: value})
    index = names.index(name)
    return replace(spec, args=(*spec.args[:index], value, *spec.args[index + 1 :]))


def _write_value(callee: Callee, name: str, scope: Scope, number: int | None, depth: int = 0) -> Any:
    parameters = inspect.signature(callee).parameters
    if name not in parameters:  # a parameter of a constructor to which the callee passes `**kwargs`
        return ObjectName("...") if number is None else number
    options = list_options(callee).get(name)
    if options:
        return options[0]
    text = get_annotation_text(parameters[name])
    example = write_example(name, text, parameters)
    if example is not None:
        return ObjectName(example)
    argument_class = find_class(callee, name, scope.namespaces)
    if argument_class is None or depth > _MAX_DEPTH:
        return None if takes_object(name, text) else _write_literal(text, number)
    is_named = any(getattr(space, argument_class.__name__, None) is argument_class for space in scope.namespaces)
    if not is_named or not (is_configuration(argument_class) or is_module_class(argument_class)):
        return None
    words = set(re.findall(r"\w+", text))
    if inspect.isabstract(argument_class):
        return _write_subclass(argument_class, scope, is_sequence=bool(words & SEQUENCE_ANNOTATIONS))
    if words & CLASS_ANNOTATIONS:
        return ObjectName(argument_class.__name__)

    documented_example = find_example(argument_class.__module__)
    if documented_example is not None and f":{argument_class.__name__}(" in documented_example:
        return ObjectName(shlex.split(documented_example)[0])
    needed_names = [
        parameter.name for parameter in list_parameters(argument_class) if parameter.default is parameter.empty
    ]
    values = {inner: _write_value(argument_class, inner, scope, number, depth + 1) for inner in needed_names}
    if None in values.values():
        return None
    call = ObjectCall(argument_class.__name__, (), values)
    return [call] if words & SEQUENCE_ANNOTATIONS else call


def _write_literal(annotation: str, number: int | None) -> Any:
    """Return a literal of the annotated type, built from `number`, or `...` if `number` is None."""
    if number is None:
        return ObjectName("...")
    if takes_sequence(annotation):
        return [number, number]
    words = set(re.findall(r"\w+", annotation))
    if not words or "int" in words:
        return number
    if "float" in words:
        return 1 / number
    return False if "bool" in words else "name" if "str" in words else number


def takes_sequence(annotation: str) -> bool:
    """Return True if an annotation accepts only sequences: `Sequence[int]`, but not `Sequence[int] | int`."""
    outer_words = set(re.findall(r"\w+", re.sub(r"\w+\[[^\[\]]*\]", "", annotation)))
    return bool(SEQUENCE_ANNOTATIONS & set(re.findall(r"\w+", annotation))) and not outer_words & {"int", "float"}


def _write_subclass(base: type, scope: Scope, *, is_sequence: bool) -> Any:
    """Return a call of a concrete subclass of `base` that needs no arguments, or None if the scope has none."""
    values = [value for space in scope.namespaces for value in vars(space).values()]
    classes = (value for value in values if isinstance(value, type) and issubclass(value, base))
    for kind in classes:
        needed_parameters = [parameter for parameter in list_parameters(kind) if parameter.default is parameter.empty]
        if not needed_parameters and not inspect.isabstract(kind):
            call = ObjectCall(kind.__name__)
            return [call] if is_sequence else call
    return None


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
