"""Turn the names and classes in the arguments of a spec into objects: `Net(cfg=Config(depth=2), act=nn.GELU)`.

A name is looked up in the module of the spec, in the module that defines the class, and in the packages around them.
Only classes are called. Nothing of Python's standard library is named, so that no argument runs a command.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from statecli.core.errors import ModelError
from statecli.core.python_names import takes_configuration, takes_object
from statecli.core.units import join_names
from statecli.live import config_guards
from statecli.live.spec import ModelSpec
from statecli.live.spec_objects import ObjectCall, ObjectName
from statecli.storage import files

#: Ends of the names of classes that hold settings.
_CONFIGURATION_ENDS = ("Config", "Cfg", "Args", "Configuration", "HParams")
#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.7
_STANDARD_LIBRARY = sys.stdlib_module_names


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call, as objects."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def resolve_arguments(spec: ModelSpec, module: types.ModuleType, callee: Any) -> Arguments:
    """Return the arguments of the spec as objects; each call builds their classes again. Raises ModelError."""
    resolver = _Resolver(spec, tuple(_iter_namespaces(module, callee)))
    args = tuple(map(resolver.resolve, spec.args))
    kwargs = {name: resolver.resolve(value) for name, value in spec.kwargs.items()}
    if spec.options.config_json is not None:
        name, config_class = _find_configuration(spec, resolver, callee)
        kwargs[name] = _build_from_json(spec, spec.options.config_json, config_class)
    return Arguments(args, kwargs)


def _iter_namespaces(module: types.ModuleType, callee: Any) -> Iterator[types.ModuleType]:
    """Yield the modules whose names an argument may use: the most specific first."""
    defining = sys.modules.get(getattr(callee, "__module__", None) or "")
    for start in filter(None, (module, defining)):
        if start.__name__.partition(".")[0] in _STANDARD_LIBRARY:
            continue
        yield start
        package = start.__name__
        while "." in package:
            package = package.rpartition(".")[0]
            if package in sys.modules:
                yield sys.modules[package]


@dataclass(frozen=True)
class _Resolver:
    spec: ModelSpec
    namespaces: tuple[types.ModuleType, ...]

    def resolve(self, value: Any) -> Any:
        if isinstance(value, ObjectName):
            return self._look_up(value.name)
        if isinstance(value, ObjectCall):
            args = tuple(map(self.resolve, value.args))
            kwargs = {name: self.resolve(item) for name, item in value.kwargs.items()}
            return self.call(value.name, self._look_up(value.name), args, kwargs)
        if type(value) in (list, tuple):
            return type(value)(map(self.resolve, value))
        return {key: self.resolve(item) for key, item in value.items()} if type(value) is dict else value

    def _look_up(self, name: str) -> Any:
        first, *rest = name.split(".")
        for namespace in self.namespaces:
            value = getattr(namespace, first, _MISSING)
            if value is not _MISSING:
                break
        else:
            raise ModelError(f"{self.spec.text}: {name} is not defined in {self._where}{self._suggest(name)}")
        for attribute in rest:
            value = getattr(value, attribute, _MISSING) if isinstance(value, (types.ModuleType, type)) else _MISSING
        if value is _MISSING or isinstance(value, types.ModuleType):
            raise ModelError(f"{self.spec.text}: {name} is not a class or a value in {self._where}")
        if callable(value) and str(getattr(value, "__module__", "")).partition(".")[0] in _STANDARD_LIBRARY:
            raise ModelError(f"{self.spec.text}: {name} belongs to Python's standard library, not to {self._where}")
        return value

    @property
    def _where(self) -> str:
        return self.spec.module

    def _suggest(self, name: str) -> str:
        known = [key for namespace in self.namespaces for key in dir(namespace) if not key.startswith("_")]
        near = get_close_matches(name, known, 1, _SIMILARITY)
        if near:
            return f"; did you mean {near[0]}?"
        return (
            f"; an argument is a number, a string in quotes, or a class of {self._where}"
            if "." in name
            else f"; write a string in quotes: {name!r}"
        )

    def call(self, name: str, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(called, type):
            raise ModelError(
                f"{self.spec.text}: {name} is not a class; write a function that builds the model, and give this "
                "function instead: build.py:make"
            )
        _check_signature(self.spec, name, called, args, kwargs)
        return called(*args, **kwargs)


_MISSING = object()


def _check_signature(spec: ModelSpec, name: str, called: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [parameter.name for parameter in signature.parameters.values()]
        unknown = next((key for key in kwargs if key not in names), None)
        near = get_close_matches(unknown, names, 1, _SIMILARITY) if unknown is not None else []
        hint = f"did you mean {near[0]}?" if near else f"{name} takes {join_names(names, 8)}"
        raise ModelError(f"{spec.text}: {name}: {error}; {hint}") from error


# --- a configuration from a file --------------------------------------------------------------------------------------


def _find_configuration(spec: ModelSpec, resolver: _Resolver, callee: Any) -> tuple[str, type]:
    """Return the parameter that takes the configuration, and its class. Raises ModelError."""
    parameters = _list_parameters(callee)[len(spec.args) :]
    names = [parameter.name for parameter in parameters if parameter.name not in spec.kwargs]
    for name in names:
        found = find_class(callee, name, resolver.namespaces)
        if found is not None and _is_configuration(found):
            return name, found
    raise ModelError(
        f"{spec.text}: no argument of {spec.attribute} takes a configuration class; write the arguments in "
        f"parentheses: {spec.base}({', '.join(f'{name}=...' for name in names[:4])})"
    )


def _list_parameters(callee: Any) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(callee).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def find_class(callee: Any, name: str, namespaces: tuple[types.ModuleType, ...]) -> type | None:
    """Return the class that a parameter takes; None if unknown.

    It is the class in the annotation (`Config`, `"Config"`, `Config | None`), the class that a class of transformers
    names, or for an argument such as `cfg` the only configuration class of the module.
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
    known = _list_configuration_classes(namespaces[:1])
    return config_class if isinstance(config_class, type) else known[0] if len(known) == 1 else None


def _is_configuration(value: type) -> bool:
    return (
        dataclasses.is_dataclass(value) or hasattr(value, "from_dict") or value.__name__.endswith(_CONFIGURATION_ENDS)
    )


def _list_configuration_classes(namespaces: tuple[types.ModuleType, ...]) -> list[type]:
    values = [value for space in namespaces for value in vars(space).values()]
    return [value for value in values if isinstance(value, type) and value.__name__.endswith(_CONFIGURATION_ENDS)]


def _build_from_json(spec: ModelSpec, path: str, config_class: type) -> Any:
    from statecli.formats.shared import config_files

    folder, name = files.split(path)
    document = config_files.read_document(folder or ".", name)
    if not _has_from_dict(config_class):
        return _build_class(spec, path, config_class, document)
    from_dict = getattr(config_class, "from_dict", None)
    assert from_dict is not None  # noqa: S101 - checked by `_has_from_dict`
    if not _is_of_transformers(config_class):
        return from_dict(document)
    _check_model_type(path, config_class, document)
    config_guards.check_config({**document, "quantization_config": None}, path)
    return from_dict(config_guards.remove_fetches(document))


def _has_from_dict(config_class: type) -> bool:
    """Return True if `from_dict` of the class builds the configuration; False if the class takes the fields."""
    is_plain = dataclasses.is_dataclass(config_class) and not _is_of_transformers(config_class)
    return hasattr(config_class, "from_dict") and not is_plain


def _is_of_transformers(config_class: type) -> bool:
    """Return True for a configuration class of transformers, or a subclass: a dataclass whose file has other keys."""
    return any(base.__module__ == "transformers.configuration_utils" for base in config_class.__mro__)


def _check_model_type(path: str, config_class: type, document: Mapping[str, Any]) -> None:
    """Raise ModelError for the configuration of another model, which `from_dict` accepts."""
    own, given = getattr(config_class, "model_type", ""), document.get("model_type")
    if own and type(given) is str and given != own:
        raise ModelError(
            f"{path}: model_type is {given!r}, but {config_class.__name__} needs {own!r}; give the configuration of "
            "that model"
        )


def _build_class(spec: ModelSpec, path: str, config_class: type, document: Mapping[str, Any]) -> Any:
    """Build a class from the fields of a document; a field that is a dataclass is built from the inner object."""
    parameters = _list_parameters(config_class)
    names = [parameter.name for parameter in parameters]
    unknown = [key for key in document if key not in names]
    if unknown and not _takes_any_keyword(config_class):
        near = get_close_matches(unknown[0], names, 1, _SIMILARITY)
        hint = f"did you mean {near[0]}?" if near else f"its fields are {join_names(names, 8)}"
        raise ModelError(f"{path}: {config_class.__name__} has no field {unknown[0]!r}; {hint}")
    missing = [one.name for one in parameters if one.default is one.empty and one.name not in document]
    if missing:
        raise ModelError(f"{path}: {config_class.__name__} needs {join_names(missing, 8)}; add the fields to the file")
    values = dict(document)
    for name, inner in _list_inner_classes(config_class, values):
        values[name] = _build_class(spec, path, inner, values[name])
    return config_class(**values)


def _list_inner_classes(config_class: type, document: Mapping[str, Any]) -> list[tuple[str, type]]:
    """Return the fields of a configuration class whose values are built from inner objects, with their classes."""
    spaces = tuple(filter(None, [sys.modules.get(config_class.__module__)]))
    classes = {
        parameter.name: find_class(config_class, parameter.name, spaces)
        for parameter in _list_parameters(config_class)
        if type(document.get(parameter.name)) is dict
    }
    return [(name, found) for name, found in classes.items() if found is not None and dataclasses.is_dataclass(found)]


def _takes_any_keyword(callee: Any) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(callee).parameters.values())


class JsonConfiguration(NamedTuple):
    """How an argument is built from a file of JSON.

    `has_from_dict`: by `from_dict` of the class, else by a call with the fields. `inner`: the keys of each inner object
    that is built first, with its class; the innermost first.
    """

    argument: str
    config_class: type
    has_from_dict: bool
    inner: tuple[tuple[tuple[str, ...], type], ...]


def describe_configuration(spec: ModelSpec, module: types.ModuleType, callee: Any) -> JsonConfiguration:
    """Return how `resolve_arguments` builds the configuration of `--config-json`. Raises ModelError."""
    from statecli.formats.shared import config_files

    path = spec.options.config_json
    assert path is not None  # noqa: S101 - the caller has such a spec
    argument, config_class = _find_configuration(spec, _Resolver(spec, tuple(_iter_namespaces(module, callee))), callee)
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


def find_namespace(module: types.ModuleType, callee: Any, name: str) -> types.ModuleType | None:
    """Return the module whose name an argument of the spec stands for: `nn` of `nn.GELU`; None if there is none."""
    return next((space for space in _iter_namespaces(module, callee) if hasattr(space, name)), None)


# --- the arguments to type --------------------------------------------------------------------------------------------


def write_values(spec: ModelSpec, callee: Any, names: Iterable[str]) -> dict[str, Any] | None:
    """Return values to type for arguments of a class: `Config(size=...)`; None if an object is of no known class."""
    module = None if spec.is_file else sys.modules.get(spec.module)
    defining = sys.modules.get(getattr(callee, "__module__", None) or "")
    start = module or defining
    spaces = () if start is None else tuple(_iter_namespaces(start, callee))
    values = {name: _write_value(callee, name, spaces) for name in names}
    return None if None in values.values() else values


def _write_value(callee: Any, name: str, namespaces: tuple[types.ModuleType, ...], depth: int = 0) -> Any:
    found = find_class(callee, name, namespaces)
    annotation = inspect.signature(callee).parameters[name].annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    if found is None or depth > _MAX_DEPTH:
        return None if takes_object(name, text) else ObjectName("...")
    is_named = any(getattr(space, found.__name__, None) is found for space in namespaces)
    if not is_named or not _is_configuration(found):
        return None
    needed = [one.name for one in _list_parameters(found) if one.default is one.empty]
    values = {inner: _write_value(found, inner, namespaces, depth + 1) for inner in needed}
    return None if None in values.values() else ObjectCall(found.__name__, (), values)


#: Configurations inside of configurations that a line to type shows.
_MAX_DEPTH = 3
