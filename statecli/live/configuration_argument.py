"""Find the argument that takes a configuration, and build its value from a file (`--config-json`)."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from statecli.core.build_function import BUILD_ADVICE
from statecli.core.errors import ModelError
from statecli.core.python_names import takes_configuration
from statecli.core.quoting import quote_for_shell
from statecli.core.units import join_names
from statecli.formats.shared import config_files
from statecli.live import config_guards
from statecli.live.object_scope import Scope
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import format_call
from statecli.storage import files

#: Suffixes of the names of classes that hold settings.
_CONFIGURATION_ENDS = ("Config", "Cfg", "Args", "Configuration", "HParams")
#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.7


def find_configuration(scope: Scope, callee: Callee) -> tuple[str, type]:
    """Return name and class of the parameter that takes a configuration. Raises ModelError if there is none."""
    spec = scope.spec
    parameters = list_parameters(callee)[len(spec.args) :]
    names = [parameter.name for parameter in parameters if parameter.name not in spec.kwargs]
    for name in names:
        config_class = find_class(callee, name, scope.namespaces)
        if config_class is not None and is_configuration(config_class):
            return name, config_class
    config = spec.options.config_json
    if spec.module.partition(".")[0] == "diffusers" and not spec.args:
        kwargs = {**spec.kwargs, "config": config}
        line = quote_for_shell(f"{spec.base}({format_call((), kwargs)})")
        raise ModelError(f"{spec.text}: a class of diffusers has its configuration as an argument; write {line}")
    unknown = next((name for name in names if takes_configuration(name, "")), None)
    if unknown is not None:
        raise ModelError(f"{spec.text}: {unknown} takes a configuration whose class is unknown", advice=BUILD_ADVICE)
    raise ModelError(
        f"{spec.text}: no argument of {spec.attribute} takes a configuration class; write the arguments in "
        f"parentheses: {spec.base}({', '.join(f'{name}=...' for name in names[:4])})"
    )


def list_parameters(callee: Callee) -> list[inspect.Parameter]:
    """Return the callee's parameters except `*args` and `**kwargs`, or [] if the callee has no signature."""
    try:
        parameters = inspect.signature(callee).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def find_class(callee: Callee, name: str, namespaces: tuple[types.ModuleType, ...]) -> type | None:
    """Return the class of the values that parameter `name` takes, or None if unknown.

    The class is named in the annotation (`Config`, `"Config"`, `Config | None`) or by a class of transformers. For an
    argument such as `cfg`, it may be the only class with settings that the module defines or imports.
    """
    annotation = inspect.signature(callee).parameters[name].annotation
    if isinstance(annotation, str):
        words = [word.strip() for word in annotation.replace("Optional[", "").rstrip("]").split("|")]
        values: list[Any] = [getattr(space, word.rpartition(".")[2], None) for word in words for space in namespaces]
    else:
        values = [annotation, *getattr(annotation, "__args__", ())]
    classes = (value for value in values if isinstance(value, type) and value.__module__ != "builtins")
    annotated = next((value for value in classes if value is not inspect.Parameter.empty), None)
    if annotated is not None or not takes_configuration(name, ""):
        return annotated
    config_class = getattr(callee, "config_class", None)
    if isinstance(config_class, type):
        return config_class
    library_classes = {kind for kind in _iter_config_classes(callee) if is_configuration(kind)}
    if len(library_classes) == 1:
        return library_classes.pop()
    values = [value for space in namespaces[:1] for value in vars(space).values() if isinstance(value, type)]
    settings_classes = {value for value in values if value.__name__.endswith(_CONFIGURATION_ENDS)}
    own_classes = settings_classes.difference(base for value in settings_classes for base in value.__mro__[1:])
    return own_classes.pop() if len(own_classes) == 1 else None


def _iter_config_classes(callee: Callee) -> Iterator[type]:
    """Yield the `config_class` of each class that the callee's module defines. Classes of transformers have one."""
    module = sys.modules.get(callee.__module__)
    for value in vars(module).values() if module is not None else ():
        config_class = getattr(value, "config_class", None) if isinstance(value, type) else None
        if isinstance(config_class, type) and value.__module__ == callee.__module__:
            yield config_class


def is_configuration(value: type) -> bool:
    """Return True if the class is a dataclass, has a `from_dict`, or has a name such as `NetConfig`."""
    return (
        dataclasses.is_dataclass(value) or hasattr(value, "from_dict") or value.__name__.endswith(_CONFIGURATION_ENDS)
    )


def build_from_json(spec: ModelSpec, path: str, config_class: type[Any]) -> Any:
    """Build a configuration from a JSON file. Raises ModelError, UsageError."""
    folder, name = files.split(path)
    document = config_files.read_document(folder or ".", name)
    if not _has_from_dict(config_class):
        return _build_class(spec, path, config_class, document)
    if not is_of_transformers(config_class):
        return config_class.from_dict(document)
    _check_model_type(path, config_class, document)
    config_guards.check_config({**document, "quantization_config": None}, path)
    return config_class.from_dict(config_guards.remove_fetches(document))


def _has_from_dict(config_class: type) -> bool:
    """Return True if `from_dict` of the class builds the configuration, or False if the constructor does."""
    is_plain = dataclasses.is_dataclass(config_class) and not is_of_transformers(config_class)
    return hasattr(config_class, "from_dict") and not is_plain


def is_of_transformers(config_class: type) -> bool:
    """Return True for a configuration class of transformers. Its JSON file may have keys that are not fields."""
    return any(base.__module__ == "transformers.configuration_utils" for base in config_class.__mro__)


def _check_model_type(path: str, config_class: type, document: Mapping[str, Any]) -> None:
    """Raise ModelError if the configuration is for another model type, because `from_dict` would accept it."""
    expected_type, file_type = getattr(config_class, "model_type", ""), document.get("model_type")
    if expected_type and type(file_type) is str and file_type != expected_type:
        raise ModelError(
            f"{path}: model_type is {file_type!r}, but {config_class.__name__} needs {expected_type!r}; give the "
            "configuration of that model"
        )


def _build_class(spec: ModelSpec, path: str, config_class: type, document: Mapping[str, Any]) -> Any:
    """Build an instance of a configuration class, and of its fields' dataclasses, from the JSON object `document`."""
    parameters = list_parameters(config_class)
    names = [parameter.name for parameter in parameters]
    unknown = [key for key in document if key not in names]
    if unknown and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(config_class).parameters.values()
    ):
        similar_names = get_close_matches(unknown[0], names, 1, _SIMILARITY)
        hint = f"did you mean {similar_names[0]}?" if similar_names else f"its fields are {join_names(names, 8)}"
        raise ModelError(f"{path}: {config_class.__name__} has no field {unknown[0]!r}; {hint}")
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.name not in document
    ]
    if missing:
        raise ModelError(f"{path}: {config_class.__name__} needs {join_names(missing, 8)}; add the fields to the file")
    values = dict(document)
    for name, inner in _list_inner_classes(config_class, values):
        values[name] = _build_class(spec, path, inner, values[name])
    return config_class(**values)


def _list_inner_classes(config_class: type, document: Mapping[str, Any]) -> list[tuple[str, type]]:
    """Return (field, class) for each field whose value is a nested JSON object and whose class is a dataclass."""
    spaces = tuple(filter(None, [sys.modules.get(config_class.__module__)]))
    classes = {
        parameter.name: find_class(config_class, parameter.name, spaces)
        for parameter in list_parameters(config_class)
        if type(document.get(parameter.name)) is dict
    }
    return [
        (name, field_class)
        for name, field_class in classes.items()
        if field_class is not None and dataclasses.is_dataclass(field_class)
    ]


class JsonConfiguration(msgspec.Struct, frozen=True):
    """Plan for building an argument from a JSON file.

    `has_from_dict`: build it by `from_dict` of the class, else by a call with the fields. `inner`: keys and class of
    each inner object that is built before; the innermost first.
    """

    argument: str
    config_class: type
    has_from_dict: bool
    inner: tuple[tuple[tuple[str, ...], type], ...]


def describe_configuration(spec: ModelSpec, module: types.ModuleType, callee: Callee) -> JsonConfiguration:
    """Describe which argument takes the configuration of `--config-json`, and how to build it. Raises ModelError."""
    path = spec.options.config_json
    assert path is not None  # noqa: S101 - the caller has such a spec
    argument, config_class = find_configuration(Scope.around(spec, module, callee), callee)
    if _has_from_dict(config_class):
        return JsonConfiguration(argument, config_class, True, ())
    folder, name = files.split(path)
    document = config_files.read_document(folder or ".", name)
    return JsonConfiguration(argument, config_class, False, tuple(_iter_inner_objects(config_class, document, ())))


def _iter_inner_objects(
    config_class: type, document: Mapping[str, Any], keys: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], type]]:
    for name, inner in _list_inner_classes(config_class, document):
        yield from _iter_inner_objects(inner, document[name], (*keys, name))
        yield (*keys, name), inner
