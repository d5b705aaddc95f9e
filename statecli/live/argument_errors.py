"""Explain errors in the constructor arguments of a model spec (`net.py:Net(3)`): what is missing, unknown or wrong."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from statecli.core import build_function
from statecli.core.errors import ModelError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.python_names import SEQUENCE_ANNOTATIONS, takes_object
from statecli.core.quoting import quote_for_shell
from statecli.core.units import join_names
from statecli.live import downloads
from statecli.live.argument_lines import (
    TRIED_NUMBERS,
    VALUES_TEXT,
    find_missing_arguments,
    format_line,
    has_parameter,
    list_lines,
    rename_unknown,
    suggest_renamed,
    unquote_numbers,
    write_call,
)
from statecli.live.configuration_argument import is_of_transformers, list_parameters
from statecli.live.exception_text import get_exception_text
from statecli.live.object_scope import spell
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import ObjectCall, ObjectName, format_call
from statecli.live.suggested_arguments import get_annotation_text, write_modules, write_values
from statecli.live.suggested_target import Advice, advise_line

#: Python's message for a call of a constructor that lacks arguments.
_MISSING = compile_on_use(r"(?P<function>[\w.]+)\(\) missing \d+ required [\w-]+ arguments?: (?P<names>.*)", re.DOTALL)
#: Prefix of class names in messages: the module name under which statecli imports a file.
_MODULE_OF_FILE = compile_on_use(r"\b_statecli_\d+_\w+\.")
#: Names by which an annotation declares a dict.
_MAPPINGS = {"Mapping", "dict", "Dict", "Any"}


def explain_arguments(spec: ModelSpec, callee: Callee, error: BaseException, *, is_call: bool) -> ModelError | None:
    """Return an error that explains how to pass the arguments of a model spec, or None if they are not the cause.

    `is_call`: the call itself has raised the error, and not a line of the user's code.
    """
    configuration = _explain_configuration(spec, callee)
    if configuration is not None:
        return configuration
    if not isinstance(error, TypeError):
        return None
    try:
        signature = inspect.signature(callee)
    except (TypeError, ValueError):  # a function of C++
        return None
    try:
        if is_call:
            signature.bind(*spec.args, **spec.kwargs)
    except TypeError as mismatch:
        return _explain_mismatch(spec, callee, signature, mismatch)
    missing = _find_arguments_passed_on(spec, callee, error)
    return write_call(spec, callee, missing).build_error(_describe_need(spec, callee, missing)) if missing else None


def _explain_configuration(spec: ModelSpec, callee: Callee) -> ModelError | None:
    """Return an error with a corrected model spec if a transformers class got a wrong configuration, otherwise None.

    The configuration is a dict, or of another class, or the fields of the configuration are passed as arguments.
    """
    config_class = getattr(callee, "config_class", None)
    config_argument = spec.kwargs.get("config", spec.args[0] if spec.args else None)
    if not isinstance(config_class, type) or not is_of_transformers(config_class):
        return None
    name = config_class.__name__
    if config_argument is None:
        return _explain_fields(spec, callee, config_class)
    if type(config_argument) is dict and all(type(key) is str and key.isidentifier() for key in config_argument):
        argument_kind, value = "a dict", ObjectCall(name, (), config_argument)
    elif (
        isinstance(config_argument, ObjectCall)
        and config_argument.name.endswith("Config")
        and config_argument.name.rpartition(".")[2] != name
    ):
        argument_kind, value = f"a {config_argument.name}", ObjectCall(name)
    elif isinstance(config_argument, ObjectName) and config_argument.name.endswith("Config"):
        argument_kind, value = "its class", ObjectCall(name)
    else:
        return None
    args = (value, *spec.args[1:]) if "config" not in spec.kwargs else spec.args
    kwargs = {**spec.kwargs, "config": value} if "config" in spec.kwargs else spec.kwargs
    line = f"{spec.base}({format_call(args, kwargs)})"
    problem = f"{spec.text}: {spec.attribute} needs a {name}, not {argument_kind}"
    return ModelError(problem, advice=build_function.spell(line), lines=(quote_for_shell(line),))


def _explain_fields(spec: ModelSpec, callee: Callee, config_class: type) -> ModelError | None:
    """Return an error with a corrected model spec if a transformers class got configuration fields as arguments."""
    fields = {name: value for name, value in spec.kwargs.items() if not has_parameter(callee, name)}
    if not fields or spec.args or not has_parameter(callee, "config"):
        return None
    weights = [name for name in fields if downloads.names_weights(name)]
    fields = {name: value for name, value in fields.items() if name not in weights}
    mapped_names = getattr(config_class, "attribute_map", {})
    config = replace(spec, attribute=config_class.__name__, args=(), kwargs=fields)
    config = rename_unknown(config, config_class, [name for name in fields if name not in mapped_names])
    value = ObjectCall(config.attribute, (), {name: unquote_numbers(value) for name, value in config.kwargs.items()})
    other_kwargs = {name: value for name, value in spec.kwargs.items() if name not in fields and name not in weights}
    line = spell(replace(spec, kwargs={"config": value, **other_kwargs}))
    if weights:
        problem = f"{spec.text}: {spec.attribute} does not take {weights[0]}"
        return advise_line(line).build_error(f"{problem}, because it builds a model with random values")
    verb = "belongs" if len(fields) == 1 else "belong"
    return advise_line(line).build_error(f"{spec.text}: {join_names(list(fields))} {verb} to {config.attribute}")


def _describe_need(spec: ModelSpec, callee: Callee, missing: Sequence[str]) -> str:
    callee_kind = "constructor" if isinstance(callee, type) else "function"
    return f"{spec.text}: the {callee_kind} needs {join_names(missing)}"


def _explain_missing(spec: ModelSpec, callee: Callee, missing: Sequence[str]) -> ModelError:
    problem = _describe_need(spec, callee, missing)
    if any(_takes_object(callee, name) for name in missing):
        advice = _advise_object(spec, callee, missing)
        return ModelError(problem, advice=advice, lines=list_lines(spec, callee, missing))
    values = write_values(spec, callee, missing)
    if values is None or ObjectName("...") in values.values():
        return write_call(spec, callee, missing).build_error(problem)
    return advise_line(format_line(spec, values)).build_error(problem)


def _explain_mismatch(spec: ModelSpec, callee: Callee, signature: inspect.Signature, mismatch: TypeError) -> ModelError:
    error_with_nested_fields = _nest_fields(spec, callee)
    if error_with_nested_fields:
        return error_with_nested_fields
    renamed_spec = rename_unknown(spec, callee, spec.kwargs)
    missing = find_missing_arguments(callee, renamed_spec)
    if missing:
        return _explain_missing(renamed_spec, callee, missing)
    problem = f"{spec.text}: {' '.join(str(mismatch).split())}"
    renamed_line = suggest_renamed(spec, callee, spec.kwargs)
    if renamed_line is not None:
        return renamed_line.build_error(problem)
    signature_text = _MODULE_OF_FILE.sub("", " ".join(str(signature).split()))
    advice = f"its signature is {spec.attribute}{signature_text}"
    return ModelError(problem, advice=advice, lines=_write_accepted(spec, callee))


def _write_accepted(spec: ModelSpec, callee: Callee) -> tuple[str, ...]:
    """Return model specs that pass the unknown arguments in a dict, in a list or by position, or omit them.

    `ModuleDict(a=Linear(2, 3))` takes a dict, `Sequential` takes modules.
    """
    known_arguments = {name: value for name, value in spec.kwargs.items() if has_parameter(callee, name)}
    unknown_arguments = {name: value for name, value in spec.kwargs.items() if name not in known_arguments}
    calls = [spec.args, spec.args[: len(list_parameters(callee))]]
    if unknown_arguments and not known_arguments and not spec.args:
        calls = [*_list_joined(callee, unknown_arguments), *calls]
    accepted_specs = [replace(spec, args=args, kwargs=known_arguments) for args in calls]
    changes = (None, functools.partial(write_modules, spec, callee, TRIED_NUMBERS[0]))
    lines = [spell(call, change) for call in accepted_specs for change in changes]
    return () if spec.is_file else tuple(dict.fromkeys(line for line in lines if line != spell(spec)))


def _list_joined(callee: Callee, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return positional arguments that pass all values through the callee's only parameter, or [] if impossible."""
    with suppress(TypeError, ValueError):
        (only_parameter,) = inspect.signature(callee).parameters.values()
        words = set(re.findall(r"\w+", get_annotation_text(only_parameter)))
        if only_parameter.kind is only_parameter.VAR_POSITIONAL:
            return [tuple(values.values())]
        return [([*values.values()],)] if words & SEQUENCE_ANNOTATIONS else [(values,)] if words & _MAPPINGS else []
    return []


def _nest_fields(spec: ModelSpec, callee: Callee) -> ModelError | None:
    """Return an error with a model spec that moves unknown arguments into a configuration object, or else None.

    `Tower(width=8)` becomes `Tower(config=Config(width=8))`.
    """
    names = {parameter.name for parameter in list_parameters(callee)}
    fields = {name: value for name, value in spec.kwargs.items() if name not in names}
    accepted_spec = replace(spec, kwargs={name: value for name, value in spec.kwargs.items() if name in names})
    missing = find_missing_arguments(callee, accepted_spec)
    values = write_values(spec, callee, missing) if fields and missing else None
    for name, call in (values or {}).items():
        config_class = (
            getattr(sys.modules.get(callee.__module__), call.name, None) if isinstance(call, ObjectCall) else None
        )
        if not isinstance(config_class, type) or not fields.keys() <= {
            field.name for field in list_parameters(config_class)
        }:
            continue
        nested_values = {**(values or {}), name: ObjectCall(call.name, call.args, {**call.kwargs, **fields})}
        line = format_line(accepted_spec, nested_values)
        are = "are fields" if len(fields) > 1 else "is a field"
        advice = Advice(f"write {line}{VALUES_TEXT}") if "=..." in line else advise_line(line)
        return advice.build_error(f"{spec.text}: {join_names(tuple(fields))} {are} of {call.name}")
    return None


def _find_arguments_passed_on(spec: ModelSpec, callee: Callee, error: TypeError) -> list[str]:
    """Return the missing arguments of a constructor to which the callee passes `**kwargs`, or [] for other errors."""
    match = _MISSING.match(get_exception_text(error))
    constructors = [f"{base.__qualname__}.__init__" for base in getattr(callee, "__mro__", ())]
    if match is None or match["function"] not in constructors:
        return []
    names: list[str] = re.findall(r"'(\w+)'", match["names"])
    try:
        inspect.signature(callee).bind(*spec.args, **spec.kwargs, **dict.fromkeys(names))
    except (TypeError, ValueError):
        return []
    return names


def _takes_object(callee: Callee, name: str) -> bool:
    """Return True if the argument takes an object, such as a configuration, that a command line cannot express."""
    return takes_object(name, get_annotation_text(inspect.signature(callee).parameters[name]))


def _advise_object(spec: ModelSpec, callee: Callee, missing: Sequence[str]) -> str:
    """Return advice for missing arguments that take objects: a corrected model spec, or a function to write."""
    in_file = build_function.write_for_class(spec.module, spec.attribute, spec.module) if spec.is_file else None
    if in_file is not None and not (spec.args or spec.kwargs):
        return in_file
    values_to_write = write_values(spec, callee, missing)
    if values_to_write is not None:
        call = format_call(spec.args, {**spec.kwargs, **values_to_write})
        return build_function.spell(f"{spec.base}({call})")
    if in_file is not None:
        return in_file
    top = spec.attribute.partition(".")[0]
    values = ", ".join(f"{argument}=..." for argument in missing)
    return build_function.write_function(spec.module, f"{spec.attribute}({values})", (top,))
