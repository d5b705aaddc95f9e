"""Explain errors in the constructor arguments of a model spec (`net.py:Net(3)`), and suggest a corrected spec."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from statecli.core import build_function
from statecli.core.errors import ModelError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.python_names import PRETRAINED_EXAMPLES, SEQUENCE_ANNOTATIONS, takes_configuration, takes_object
from statecli.core.quoting import quote_for_shell
from statecli.core.units import join_names
from statecli.live import documented_example, downloads
from statecli.live.configuration_argument import is_configuration, is_of_transformers, list_parameters
from statecli.live.exception_text import get_exception_text
from statecli.live.object_scope import Scope, spell
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import ObjectCall, ObjectName, format_call, map_items
from statecli.live.suggested_arguments import (
    get_annotation_text,
    is_module_class,
    list_factories,
    list_subclasses,
    set_argument,
    takes_sequence,
    write_modules,
    write_options,
    write_values,
)
from statecli.live.suggested_target import Advice, advise_line
from statecli.storage.checkpoint_folder import CONFIG, MODULES

#: Python's message for a call of a constructor that lacks arguments.
_MISSING = compile_on_use(r"(?P<function>[\w.]+)\(\) missing \d+ required [\w-]+ arguments?: (?P<names>.*)", re.DOTALL)
_UNEXPECTED = compile_on_use(r"(?P<class>[\w.]+)\.__init__\(\) got an unexpected keyword argument ")
#: Python's messages for a number in place of a sequence.
_NOT_SEQUENCE = compile_on_use(r"object of type '(int|float)' has no len|'(int|float)' object is not (iterable|subscr)")
#: Prefix of class names in messages: the module name under which statecli imports a file.
_MODULE_OF_FILE = compile_on_use(r"\b_statecli_\d+_\w+\.")
#: Messages about a list of modules in place of modules, or about a class or a text in place of a module.
_NOT_MODULE = compile_on_use(r"is not a Module subclass")
_NOT_ITERABLE = compile_on_use(r"object is not iterable|called with an iterable|must be an iterable")
#: Names by which an annotation declares a dict.
_MAPPINGS = {"Mapping", "dict", "Dict", "Any"}
_NOT_PAIRS = compile_on_use(r"key/value pairs|update sequence element")
_NUMBER = compile_on_use(r"-?\d+(\.\d+)?")
#: The type `str` in a message.
_TEXT_TYPE = compile_on_use(r"\bstr\b")
#: A quoted name in a message.
_QUOTED = compile_on_use(r"[`'\"](\w+)[`'\"]")
#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.7
_VALUES = " with a number, a string or a list in place of each `...`"
#: Numbers to try for sizes, the same for all arguments, because channels must often divide another argument.
TRIED_NUMBERS = (3, 2, 8, 64)


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
        if is_call:
            signature.bind(*spec.args, **spec.kwargs)
    except (TypeError, ValueError) as mismatch:
        return _explain_mismatch(spec, callee, mismatch)
    missing = _find_arguments_passed_on(spec, callee, error)
    return _write_call(spec, callee, missing).build_error(_describe_need(spec, callee, missing)) if missing else None


def suggest_arguments(spec: ModelSpec, callee: Callee, error: BaseException) -> Advice | None:
    """Return advice with a corrected model spec after a constructor's error, or None if no correction is known."""
    folder = next(filter(_is_configured_folder, _iter_texts((*spec.args, *spec.kwargs.values()))), None)
    if folder is not None and isinstance(error, OSError):
        line = quote_for_shell(folder)
        return Advice(f"to build the class without weights, write {line}", (line,))
    text = get_exception_text(error)
    quoted_words = _QUOTED.findall(text)
    refusing_class = _find_refusing_class(error, text)
    for refusing_callee in (callee,) if refusing_class is None else (callee, refusing_class):
        rename_advice = _suggest_renamed(spec, refusing_callee, quoted_words)
        if rename_advice:
            return rename_advice
    line_without_quotes = spell(spec, _unquote_numbers)
    if line_without_quotes != spell(spec) and (isinstance(error, TypeError) or _TEXT_TYPE.search(text)):
        return advise_line(line_without_quotes)
    lines_with_option = {
        spell(spec, functools.partial(_choose_option, write(text))): None for write in (str, str.lower)
    }
    options = tuple(line for line in lines_with_option if line != spell(spec)) if isinstance(error, ValueError) else ()
    if options:
        return Advice(f"write {options[0]}", options)
    try:
        signature = inspect.signature(callee)
        bound = signature.bind_partial(*spec.args, **spec.kwargs).arguments
    except (TypeError, ValueError):
        return None
    lines = _write_objects(spec, callee, signature, text) if isinstance(error, TypeError) else ()
    if lines:
        return Advice(f"write {lines[0]}", lines)
    if isinstance(error, TypeError) and _NOT_SEQUENCE.match(text):
        line = _write_lists(spec, signature)
        return advise_line(line) if line != spell(spec) else None
    none_parameters = [
        parameter for parameter in list_parameters(callee) if parameter.default is None and parameter.name not in bound
    ]
    quoted_names = [parameter.name for parameter in none_parameters if parameter.name in quoted_words]
    if quoted_names:
        advice = _write_call(spec, callee, quoted_names)
        single_lines = (
            [line for name in quoted_names[:2] for line in _list_lines(spec, callee, [name])]
            if len(quoted_names) > 1
            else []
        )
        return advice._replace(lines=(*advice.lines, *single_lines))
    return _advise_modules(spec, callee, none_parameters, text) if not bound else None


def list_attempts(spec: ModelSpec, callee: Callee, error: BaseException) -> tuple[str, ...]:
    """Return model specs to try after an error that does not name a missing argument.

    The specs quote names, change or omit an argument, or take the arguments from an example.
    """
    if spec.is_file:
        return ()
    if isinstance(callee, type) and inspect.isabstract(callee):
        return tuple(spell(replace(spec, attribute=name)) for name in list_subclasses(callee, spec.module))
    lines_with_values = [
        spell(replace(set_argument(spec, callee, *value), called=True)) for value in _list_named(callee, error)
    ]
    names = tuple(spec.kwargs)
    reduced_specs = [replace(spec, kwargs={key: spec.kwargs[key] for key in names if key != name}) for name in names]
    reduced_specs += [replace(spec, args=spec.args[:count]) for count in reversed(range(len(spec.args)))]
    shorter_lines = [spell(call) for call in reduced_specs]
    documented_lines = _list_documented(spec, callee)
    lines = (
        spell(spec, _quote_names),
        *lines_with_values,
        *write_options(spec, callee),
        *shorter_lines,
        *documented_lines,
    )
    return tuple(line for line in dict.fromkeys(lines) if line != spell(spec))


def _list_named(callee: Callee, error: BaseException) -> list[tuple[str, Any]]:
    """Return (argument, value) pairs to try, for the arguments that an error message names."""
    text = get_exception_text(error)
    words = set(re.findall(r"\w+", text))
    numbers = dict.fromkeys([*map(int, re.findall(r"\b\d{1,4}\b", text)), *TRIED_NUMBERS])
    integer_arguments = [
        parameter.name
        for parameter in list_parameters(callee)
        if parameter.name in words and type(parameter.default) is int
    ]
    values: list[tuple[str, Any]] = [(name, number) for name in integer_arguments for number in numbers if number]
    if isinstance(error, KeyError) and error.args and takes_configuration(str(error.args[0]), ""):
        module = sys.modules.get(callee.__module__)
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and is_configuration(value)]
        values += [(error.args[0], ObjectCall(name)) for name in classes]
    return values


def _list_documented(spec: ModelSpec, callee: Callee) -> list[str]:
    return documented_example.list_lines(spec, callee, Scope.around(spec, sys.modules[spec.module], callee))


def _quote_names(value: object) -> Any:
    """Convert an argument that is a bare name to a string ('resnet18' for resnet18). Return other values unchanged."""
    return value.name if isinstance(value, ObjectName) and value.module is None and "." not in value.name else value


def _advise_modules(
    spec: ModelSpec, callee: Callee, none_parameters: Sequence[inspect.Parameter], text: str
) -> Advice | None:
    """Return advice to pass modules for arguments that default to None, or no advice if no value is known."""
    modules = [parameter.name for parameter in none_parameters if "Module" in get_annotation_text(parameter)][:1]
    # "Either a configuration or an encoder and a decoder has to be provided" of transformers.
    words = re.findall(r"\w+", text)
    models = [parameter.name for parameter in none_parameters if "PreTrainedModel" in get_annotation_text(parameter)]
    models = [name for name in models if not modules and set(name.split("_")) <= set(words)]
    values = write_values(spec, callee, modules or models)
    if not values:
        return None
    variants = [{**values, models[0]: ObjectName(example)} for example in PRETRAINED_EXAMPLES] if models else [values]
    lines = tuple(quote_for_shell(f"{spec.base}({format_call((), variant)})") for variant in variants)
    return Advice(f"write {lines[0]}", lines)


def _write_objects(spec: ModelSpec, callee: Callee, signature: inspect.Signature, text: str) -> tuple[str, ...]:
    """Return corrected model specs that pass modules as the callee expects: as arguments, in a list or in a dict.

    `Sequential([a, b])` takes the modules as arguments, `ModuleList(a)` takes a list.
    """
    if not (_NOT_MODULE.search(text) or _NOT_ITERABLE.search(text) or _NOT_PAIRS.search(text)):
        return ()
    takes_all = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    args, kwargs = spec.args, spec.kwargs
    if takes_all and len(args) == 1 and type(args[0]) in (list, tuple, dict):
        args = tuple(args[0].values() if type(args[0]) is dict else args[0])
    elif _NOT_PAIRS.search(text):
        first_value = next(iter((*args, *kwargs.values())), ())
        items = (
            first_value
            if type(first_value) in (list, tuple)
            else [first_value if isinstance(first_value, ObjectCall) else "0"]
        )
        args, kwargs = ({str(number): item for number, item in enumerate(items)},), {}
    elif _NOT_ITERABLE.search(text):
        args = tuple([value] if isinstance(value, ObjectCall) else value for value in args)
        kwargs = {name: [value] if isinstance(value, ObjectCall) else value for name, value in kwargs.items()}
    changed_spec = replace(spec, args=args, kwargs=kwargs)
    lines = [spell(changed_spec, functools.partial(write_modules, spec, callee, number)) for number in TRIED_NUMBERS]
    return tuple(line for line in dict.fromkeys(lines) if line != spell(spec))


def _write_lists(spec: ModelSpec, signature: inspect.Signature) -> str:
    """Return the model spec with `[3]` in place of `3` for each argument that accepts only sequences."""
    parameters = dict(signature.parameters)

    def write(name: str, value: object) -> Any:
        is_number = type(value) in (int, float)
        return (
            [value]
            if is_number and name in parameters and takes_sequence(get_annotation_text(parameters[name]))
            else value
        )

    args = [write(name, value) for name, value in zip(parameters, spec.args, strict=False)]
    kwargs = {name: write(name, value) for name, value in spec.kwargs.items()}
    return spell(replace(spec, args=(*args, *spec.args[len(args) :]), kwargs=kwargs))


def _find_refusing_class(error: BaseException, text: str) -> type | None:
    """Return the class whose `__init__` refused a keyword argument that a function passed, or None for other errors."""
    match = _UNEXPECTED.match(text)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if match else []
    values = [value for frame in frames[-1:] for value in (*frame.f_locals.values(), *frame.f_globals.values())]
    classes = (value for value in values if isinstance(value, type))
    return next((kind for kind in classes if match and kind.__qualname__ == match["class"]), None)


def _unquote_numbers(value: object) -> Any:
    """Replace each quoted number in an argument ('3') with the number, also inside lists and calls."""
    if type(value) is str:
        return ObjectName(value) if _NUMBER.fullmatch(value) else value
    return map_items(value, _unquote_numbers)


def _choose_option(text: str, value: Any) -> Any:
    """Replace a string with the most similar word quoted in an error message. Return other values unchanged."""
    options = [option for option in _QUOTED.findall(text) if option != value]
    options_by_lowercase = {option.lower(): option for option in options} if type(value) is str else {}
    similar_options = (
        difflib.get_close_matches(value.lower(), options_by_lowercase, 1, _SIMILARITY) if options_by_lowercase else []
    )
    return options_by_lowercase[similar_options[0]] if similar_options else value


def _iter_texts(values: Iterable[Any]) -> Iterator[str]:
    """Yield every string in the values, including strings in nested calls, lists and dicts."""
    for value in values:
        if type(value) is str:
            yield value
        elif isinstance(value, ObjectCall):
            yield from _iter_texts((*value.args, *value.kwargs.values()))
        elif type(value) in (list, tuple, dict):
            yield from _iter_texts(value.values() if type(value) is dict else value)


def _is_configured_folder(value: str) -> bool:
    return any(os.path.isfile(os.path.join(value, name)) for name in (MODULES, CONFIG))


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
    fields = {name: value for name, value in spec.kwargs.items() if not _has_parameter(callee, name)}
    if not fields or spec.args or not _has_parameter(callee, "config"):
        return None
    weights = [name for name in fields if downloads.names_weights(name)]
    fields = {name: value for name, value in fields.items() if name not in weights}
    mapped_names = getattr(config_class, "attribute_map", {})
    config = replace(spec, attribute=config_class.__name__, args=(), kwargs=fields)
    config = _rename_unknown(config, config_class, [name for name in fields if name not in mapped_names])
    value = ObjectCall(config.attribute, (), {name: _unquote_numbers(value) for name, value in config.kwargs.items()})
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


def _write_call(spec: ModelSpec, callee: Callee, missing: Sequence[str]) -> Advice:
    line = _format_line(spec, dict.fromkeys(missing, ObjectName("...")))
    return Advice(f"write {line}{_VALUES}", _list_lines(spec, callee, missing))


def _format_line(spec: ModelSpec, values: Mapping[str, Any]) -> str:
    return quote_for_shell(f"{spec.base}({format_call(spec.args, {**spec.kwargs, **values})})")


def _list_lines(spec: ModelSpec, callee: Callee, missing: Sequence[str]) -> tuple[str, ...]:
    """Return model specs to try, with numbers for the missing arguments. Return () for a class in a user's file."""
    if spec.is_file:
        return ()
    values = (write_values(spec, callee, missing, number) for number in TRIED_NUMBERS)
    lines = [_format_line(spec, argument_values) for argument_values in values if argument_values is not None]
    return tuple(dict.fromkeys([*lines, *_list_documented(spec, callee), *list_factories(callee), *_list_owner(spec)]))


def _list_owner(spec: ModelSpec) -> list[str]:
    """Return [model spec of the class] for a method of a model class (`SchNet.from_qm9_pretrained`), otherwise []."""
    owner: Any = sys.modules.get(spec.module)
    for name in spec.attribute.split(".")[:-1]:
        owner = getattr(owner, name, None)
    attribute = spec.attribute.rpartition(".")[0]
    return [spell(replace(spec, attribute=attribute, called=False))] if is_module_class(owner) else []


def _explain_missing(spec: ModelSpec, callee: Callee, missing: Sequence[str]) -> ModelError:
    problem = _describe_need(spec, callee, missing)
    if any(_takes_object(callee, name) for name in missing):
        advice = _advise_object(spec, callee, missing)
        return ModelError(problem, advice=advice, lines=_list_lines(spec, callee, missing))
    values = write_values(spec, callee, missing)
    if values is None or ObjectName("...") in values.values():
        return _write_call(spec, callee, missing).build_error(problem)
    return advise_line(_format_line(spec, values)).build_error(problem)


def _explain_mismatch(spec: ModelSpec, callee: Callee, mismatch: Exception) -> ModelError:
    error_with_nested_fields = _nest_fields(spec, callee)
    if error_with_nested_fields:
        return error_with_nested_fields
    renamed_spec = _rename_unknown(spec, callee, spec.kwargs)
    missing = find_missing_arguments(callee, renamed_spec)
    if missing:
        return _explain_missing(renamed_spec, callee, missing)
    problem = f"{spec.text}: {' '.join(str(mismatch).split())}"
    renamed_line = _suggest_renamed(spec, callee, spec.kwargs)
    if renamed_line is not None:
        return renamed_line.build_error(problem)
    signature = f"its signature is {spec.attribute}{_format_signature(callee)}"
    return Advice(signature, _write_accepted(spec, callee)).build_error(problem)


def _write_accepted(spec: ModelSpec, callee: Callee) -> tuple[str, ...]:
    """Return model specs that pass the unknown arguments in a dict, in a list or by position, or omit them.

    `ModuleDict(a=Linear(2, 3))` takes a dict, `Sequential` takes modules.
    """
    known_arguments = {name: value for name, value in spec.kwargs.items() if _has_parameter(callee, name)}
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
        line = _format_line(accepted_spec, nested_values)
        are = "are fields" if len(fields) > 1 else "is a field"
        advice = Advice(f"write {line}{_VALUES}") if "=..." in line else advise_line(line)
        return advice.build_error(f"{spec.text}: {join_names(tuple(fields))} {are} of {call.name}")
    return None


def _suggest_renamed(spec: ModelSpec, callee: Callee, candidates: Iterable[str]) -> Advice | None:
    """Return advice to rename unknown arguments to the most similar parameters, or None if no parameter is similar."""
    renamed_spec = _rename_unknown(spec, callee, candidates)
    new_names = [name for name in renamed_spec.kwargs if name not in spec.kwargs]
    return advise_line(spell(renamed_spec), question=f"did you mean {' and '.join(new_names)}?") if new_names else None


def _rename_unknown(spec: ModelSpec, callee: Callee, candidates: Iterable[str]) -> ModelSpec:
    """Return the model spec with each unknown argument in `candidates` renamed to the most similar parameter."""
    names = [parameter.name for parameter in list_parameters(callee) if parameter.name not in spec.kwargs]
    unknown = [name for name in candidates if name in spec.kwargs and not _has_parameter(callee, name)]
    new_name_by_old = {
        name: near[0] for name in unknown if (near := difflib.get_close_matches(name, names, 1, _SIMILARITY))
    }
    return replace(spec, kwargs={new_name_by_old.get(name, name): value for name, value in spec.kwargs.items()})


def _has_parameter(callee: Callee, name: str) -> bool:
    return any(parameter.name == name for parameter in list_parameters(callee))


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


def find_missing_arguments(callee: Callee, spec: ModelSpec) -> list[str]:
    """Return the names of required arguments that the model spec lacks, or [] if the callee has no signature."""
    try:
        bound = inspect.signature(callee).bind_partial(*spec.args, **spec.kwargs).arguments
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in list_parameters(callee)
        if parameter.default is parameter.empty and parameter.name not in bound
    ]


def _format_signature(callee: Callee) -> str:
    with suppress(TypeError, ValueError):
        return _MODULE_OF_FILE.sub("", " ".join(str(inspect.signature(callee)).split()))
    return "(…)"
