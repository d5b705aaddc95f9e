"""Convert names and classes in the arguments of a model spec to objects: `Net(cfg=Config(depth=2), act=nn.GELU)`.

`object_scope` says where a name is looked up. Only classes are called.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from statecli.core.build_function import BUILD_ADVICE
from statecli.core.errors import ModelError
from statecli.core.units import join_names
from statecli.live import configured_model
from statecli.live.configuration_argument import build_from_json, find_configuration, is_of_transformers
from statecli.live.object_scope import Scope, spell
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import ObjectCall, ObjectName, map_items, replace_call

#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.7


@dataclass(frozen=True)
class Arguments:
    """Positional and keyword arguments of a call, as Python objects."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def resolve_arguments(spec: ModelSpec, module: types.ModuleType, callee: Callee) -> Arguments:
    """Return the arguments of a model spec as Python objects. Each call creates new objects. Raises ModelError."""
    scope = Scope.around(spec, module, callee)
    arguments = _resolve_all(scope, spec.args, spec.kwargs)
    if spec.options.config_json is not None:
        name, config_class = find_configuration(scope, callee)
        arguments.kwargs[name] = build_from_json(spec, spec.options.config_json, config_class)
    return arguments


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
        advice = _advise_call(scope, call, list(signature.parameters))
        raise ModelError(f"{scope.spec.text}: {call.callee!r}: {error}", advice=advice) from error


def _advise_call(scope: Scope, call: ObjectCall, names: Sequence[str]) -> str:
    """Return advice for a call in the model spec: the line with a renamed argument, or the valid names."""
    unknown = next((key for key in call.kwargs if key not in names), "")
    similar_names = get_close_matches(unknown, names, 1, _SIMILARITY)
    if not similar_names:
        return f"{call.callee!r} takes {join_names(list(names), 8)}"
    kwargs = {similar_names[0] if key == unknown else key: value for key, value in call.kwargs.items()}
    changed_call = ObjectCall(call.name, call.args, kwargs, call.module)
    line = spell(scope.spec, lambda value: replace_call(value, call, changed_call))
    return f"did you mean {similar_names[0]}? write {line}"
