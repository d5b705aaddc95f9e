"""Suggest a corrected model spec (`net.py:Net(3)`) after an error in its constructor."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.python_names import PRETRAINED_EXAMPLES, takes_configuration
from statecli.core.quoting import quote_for_shell
from statecli.live.argument_lines import (
    MIN_SIMILARITY,
    TRIED_NUMBERS,
    list_documented,
    list_lines,
    suggest_renamed,
    unquote_numbers,
    write_call,
)
from statecli.live.configuration_argument import is_configuration, list_parameters
from statecli.live.exception_text import get_exception_text
from statecli.live.object_scope import spell
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import ObjectCall, ObjectName, format_call
from statecli.live.suggested_arguments import (
    get_annotation_text,
    list_subclasses,
    set_argument,
    takes_sequence,
    write_modules,
    write_options,
    write_values,
)
from statecli.live.suggested_target import Advice, advise_line
from statecli.storage.checkpoint_folder import CONFIG, MODULES

_UNEXPECTED = compile_on_use(r"(?P<class>[\w.]+)\.__init__\(\) got an unexpected keyword argument ")
#: Python's messages for a number in place of a sequence.
_NOT_SEQUENCE = compile_on_use(r"object of type '(int|float)' has no len|'(int|float)' object is not (iterable|subscr)")
#: Messages about a list of modules in place of modules, or about a class or a text in place of a module.
_NOT_MODULE = compile_on_use(r"is not a Module subclass")
_NOT_ITERABLE = compile_on_use(r"object is not iterable|called with an iterable|must be an iterable")
_NOT_PAIRS = compile_on_use(r"key/value pairs|update sequence element")
#: The type `str` in a message.
_TEXT_TYPE = compile_on_use(r"\bstr\b")
#: A quoted name in a message.
_QUOTED = compile_on_use(r"[`'\"](\w+)[`'\"]")


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
        rename_advice = suggest_renamed(spec, refusing_callee, quoted_words)
        if rename_advice:
            return rename_advice
    line_without_quotes = spell(spec, unquote_numbers)
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
        advice = write_call(spec, callee, quoted_names)
        single_lines = (
            [line for name in quoted_names[:2] for line in list_lines(spec, callee, [name])]
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
    documented_lines = list_documented(spec, callee)
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


def _choose_option(text: str, value: Any) -> Any:
    """Replace a string with the most similar word quoted in an error message. Return other values unchanged."""
    options = [option for option in _QUOTED.findall(text) if option != value]
    options_by_lowercase = {option.lower(): option for option in options} if type(value) is str else {}
    similar_options = (
        difflib.get_close_matches(value.lower(), options_by_lowercase, 1, MIN_SIMILARITY)
        if options_by_lowercase
        else []
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
