"""Convert names and classes in the arguments of a model spec to objects: `Net(cfg=Config(depth=2), act=nn.GELU)`.

`object_scope` says where a name is looked up. Only classes are called.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace as replace_scope
from difflib import get_close_matches
from typing import Any

from msgspec.structs import replace

from statecli.core.build_function import BUILD_ADVICE
from statecli.core.errors import ModelError
from statecli.core.units import join_names
from statecli.live import configured_model
from statecli.live.argument_lines import TRIED_NUMBERS, find_missing_arguments
from statecli.live.configuration_argument import (
    build_from_json,
    find_configuration,
    is_of_transformers,
    list_parameters,
)
from statecli.live.object_scope import Scope, spell
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import ObjectCall, ObjectName, map_items, replace_call
from statecli.live.suggested_arguments import write_values
from statecli.live.suggested_target import Advice, advise_line

#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.7
#: Size of a layer in a suggested spec.
_EXAMPLE_SIZE = 3
#: Module in place of the name of a variable, in a suggested spec.
_EXAMPLE_MODULE = "torch.nn.Linear(2, 3)"


@dataclass(frozen=True)
class Arguments:
    """Positional and keyword arguments of a call, as Python objects."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def resolve_arguments(spec: ModelSpec, module: types.ModuleType, callee: Callee) -> Arguments:
    """Return the arguments of a model spec as Python objects. Each call creates new objects. Raises ModelError."""
    scope = Scope.around(spec, module, callee)
    try:
        arguments = _resolve_all(scope, spec.args, spec.kwargs)
    except ModelError as error:
        raise _replace_placeholders(scope, callee, error) from error.__cause__
    if spec.options.config_json is not None:
        name, config_class = find_configuration(scope, callee)
        arguments.kwargs[name] = build_from_json(spec, spec.options.config_json, config_class)
    return arguments


def _replace_placeholders(scope: Scope, callee: Callee, error: ModelError) -> ModelError:
    """Return the error with model specs that have values for unknown names, or the same error if no values are known.

    In `get_peft_model(model, LoraConfig(r=8))`, a model of the argument's kind is written for `model`.
    """
    spec = scope.spec
    positional = dict(zip((parameter.name for parameter in list_parameters(callee)), spec.args, strict=False))
    unknown = [name for name, value in {**positional, **spec.kwargs}.items() if _is_placeholder(scope, value)]
    extra_values = spec.args[len(positional) :]  # values for `*args`
    modules = [
        ObjectName(_EXAMPLE_MODULE) if _is_placeholder(scope, value) else scope.rewrite(value) for value in extra_values
    ]
    if spec.is_file or not (unknown or ObjectName(_EXAMPLE_MODULE) in modules):
        return error
    lines, has_objects = [], not unknown
    for number in TRIED_NUMBERS:
        values = write_values(spec, callee, unknown, number)
        if values is None:
            return error
        has_objects |= any(isinstance(value, (ObjectCall, ObjectName)) for value in values.values())
        args = [values.get(name, scope.rewrite(value)) for name, value in positional.items()]
        kwargs = {name: values.get(name, scope.rewrite(value)) for name, value in spec.kwargs.items()}
        lines.append(spell(replace(spec, args=(*args, *modules), kwargs=kwargs)))
    if has_objects and len(set(lines)) == 1:
        return advise_line(lines[0]).build_error(error.message)
    quoted_line = spell(spec, replace_scope(scope, quotes_names=True).rewrite)
    lines = [*lines, quoted_line] if has_objects else [quoted_line, *lines]
    return ModelError(error.message, choices=error.choices, advice=error.advice, lines=tuple(lines))


def _is_placeholder(scope: Scope, value: Any) -> bool:
    """Return True for a lower-case name without dots that is undefined or names a module."""
    is_plain = isinstance(value, ObjectName) and value.module is None and value.name.isidentifier()
    return is_plain and value.name.islower() and not scope.defines(value)


def _resolve_all(scope: Scope, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    return Arguments(
        tuple(_resolve(scope, value) for value in args), {name: _resolve(scope, kwargs[name]) for name in kwargs}
    )


def _resolve(scope: Scope, value: object) -> Any:
    if isinstance(value, ObjectName):
        return scope.find(value).value
    if isinstance(value, ObjectCall):
        return _call_class(scope, value)
    return map_items(value, lambda item: _resolve(scope, item))


def _call_class(scope: Scope, call: ObjectCall) -> Any:
    spec, callee = scope.spec, scope.find(call.callee)
    owner, name = getattr(callee.value, "__module__", ""), getattr(callee.value, "__qualname__", "")
    configured_spec = configured_model.resolve_config(
        ModelSpec(spec.text, owner, False, name, call.args, call.kwargs, True)
    )
    if configured_spec.config is not None:
        return configured_model.build_configured(*configured_spec.args, **configured_spec.kwargs)
    if not isinstance(callee.value, type):
        raise ModelError(f"{spec.text}: {call.callee!r} is not a class", advice=BUILD_ADVICE)
    arguments = _resolve_all(scope.enter(callee), call.args, call.kwargs)
    _check_signature(scope, call, callee.value, arguments)
    return callee.value(*arguments.args, **arguments.kwargs)


def _check_signature(scope: Scope, call: ObjectCall, callee: type, arguments: Arguments) -> None:
    try:
        signature = inspect.signature(callee)
    except (TypeError, ValueError):
        return
    # A configuration of transformers has fields missing in its signature, such as num_labels.
    settings = callee if is_of_transformers(callee) else None
    other_names = getattr(settings, "attribute_map", {})
    signature_kwargs = {
        key: arguments.kwargs[key] for key in arguments.kwargs if not (hasattr(settings, key) or key in other_names)
    }
    signature_kwargs.update((key, arguments.kwargs[key]) for key in signature.parameters if key in arguments.kwargs)
    try:
        signature.bind(*arguments.args, **signature_kwargs)
    except TypeError as error:
        problem = f"{scope.spec.text}: {call.callee!r}: {error}"
        raise _advise_call(scope, call, callee, list(signature.parameters)).build_error(problem) from error


def _advise_call(scope: Scope, call: ObjectCall, callee: type, names: Sequence[str]) -> Advice:
    """Return advice for a call in the model spec: rename an argument, add missing arguments, or list valid names."""
    kwargs, similar_name = dict(call.kwargs), ""
    unknown = next((key for key in kwargs if key not in names), None)
    if unknown is not None:
        similar_name = next(iter(get_close_matches(unknown, names, 1, _SIMILARITY)), "")
        kwargs = {similar_name if key == unknown else key: value for key, value in kwargs.items()}
    elif not scope.spec.is_file:
        missing = find_missing_arguments(callee, replace(scope.spec, args=call.args, kwargs=kwargs))
        kwargs.update(write_values(scope.spec, callee, missing, _EXAMPLE_SIZE) or {})
    if kwargs == call.kwargs or "" in kwargs:
        return Advice(f"{call.callee!r} takes {join_names(list(names), 8)}")
    changed_call = ObjectCall(call.name, call.args, kwargs, call.module)
    line = spell(scope.spec, lambda value: replace_call(value, call, changed_call))
    return advise_line(line, question=f"did you mean {similar_name}?" if similar_name else "")
