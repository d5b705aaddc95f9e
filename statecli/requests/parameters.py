"""The table of options for parsers, the Python API and the documents, derived from the classes of options."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import asdict

from statecli import core, workers
from statecli.core.errors import UsageError, option
from statecli.requests.options import COMMAND_NAMES, NamedKind, Option, OptionGroup, Options
from statecli.storage.files import STANDARD_INPUT


class Parameter(Option, frozen=True, kw_only=True):
    """An option or a target of a command.

    Attributes:
        field: Field of the options.
        flags: The full flag and the short flag; () for a target.
        argument: Argument in Python.
        type: Type of a value on the command line: bool, str, int, float or an Enum; str for a field of type Any.
        repeatable: True if the command line may give several values; the field is then a tuple.
        default: Default; msgspec.NODEFAULT for a required target.
        help: The phrase for this command.
    """

    field: str
    flags: tuple[str, ...]
    argument: str
    type: Any
    repeatable: bool
    default: Any

    @property
    def is_flag(self) -> bool:
        """True for an option without a value."""
        return self.type is bool

    @property
    def is_required(self) -> bool:
        """True for a target without a default."""
        return self.default is msgspec.NODEFAULT

    @property
    def reads_file(self) -> bool:
        """True if the value can name a file that the command reads."""
        return self.names in (NamedKind.TARGET, NamedKind.FUNCTION, NamedKind.INPUT)

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings of the option on the command line: flags and aliases."""
        return (*self.flags, *self.aliases)

    @property
    def choices(self) -> tuple[str, ...]:
        """Possible values of the option, or () if the option has no fixed list of values."""
        return tuple(choice.value for choice in self.type) if issubclass(self.type, Enum) else ()


@cache
def parameters_of(options: type[Options]) -> tuple[Parameter, ...]:
    """Return the parameters of a command: targets in order, then options in the order of the help."""
    annotations = _read_annotations(options)
    names, defaults = options.__struct_fields__, options.__struct_defaults__
    defaults = (msgspec.NODEFAULT,) * (len(names) - len(defaults)) + defaults
    command = COMMAND_NAMES[options]
    parameters = [
        _build_parameter(*field, annotations[field[0]], command) for field in zip(names, defaults, strict=True)
    ]
    groups = list(OptionGroup)
    return tuple(sorted(parameters, key=lambda parameter: (not parameter.is_target, groups.index(parameter.group))))


def _read_annotations(options: type[Options]) -> dict[str, Any]:
    """Return the type annotation of each field. Look up annotations that are a name, and evaluate all others."""
    table, texts = vars(sys.modules[options.__module__]), dict[str, str]()
    for base in options.__mro__[::-1]:
        texts |= base.__annotations__ if base.__module__ == options.__module__ else {}
    table_annotations = {field: table[text] for field, text in texts.items() if text in table}
    unresolved = types.SimpleNamespace(
        __annotations__={field: text for field, text in texts.items() if text not in table}
    )
    return table_annotations | get_type_hints(unresolved, table, include_extras=True)


def _build_parameter(field: str, default: object, annotation: object, command: str) -> Parameter:
    plain_type, info = get_args(annotation)
    repeatable = get_origin(plain_type) is tuple
    if repeatable:
        plain_type = get_args(plain_type)[0]
    elif isinstance(plain_type, types.UnionType):
        plain_type = next(part for part in get_args(plain_type) if part is not types.NoneType)
    row: dict[str, Any] = {
        **asdict(info),
        "field": field,
        "flags": ()
        if info.is_target
        else tuple(filter(None, (info.flag or f"--{field.replace('_', '-')}", info.short))),
        "argument": info.argument or field,
        "type": str if plain_type is Any else plain_type,
        "repeatable": repeatable,
        "default": default,
        "help": info.command_help.get(command, info.help),
    }
    return Parameter(**row)


def list_given(options: Options) -> list[Parameter]:
    """Return the parameters whose value in `options` is not the default."""
    return [each for each in parameters_of(type(options)) if getattr(options, each.field) != each.default]


def list_texts(options: Options, is_wanted: Callable[[Parameter], bool]) -> list[str]:
    """Return all texts in the values of the parameters that `is_wanted` selects, including the texts in tuples."""
    values = [getattr(options, each.field) for each in parameters_of(type(options)) if is_wanted(each)]
    items = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return [item for item in items if isinstance(item, str)]


def refuse_contradictions(pairs: Iterable[tuple[str, str]]) -> None:
    """Raise UsageError for the first pair of options that are both given. "" means that an option is not given."""
    for first, second in pairs:
        if first and second:
            raise UsageError(f"{first} and {second} contradict each other; leave one of them out")


def check_inputs(options: Options) -> None:
    """Raise UsageError for an invalid `--input`, and for `--input` with `--input-from`. Does not import torch."""
    texts = getattr(options, "input", ())
    if texts and getattr(options, "input_from", None):
        refuse_contradictions([(option("--input"), option("--input-from"))])
    if texts:
        core.input_text.parse_inputs(texts)


def check_standard_input(options: Options) -> None:
    """Raise UsageError if two targets are standard input, or if other processes would have to read standard input."""
    words = list_texts(options, lambda parameter: parameter.is_target and parameter.reads_file)
    count = sum(word.partition("#")[0] == STANDARD_INPUT for word in words)
    if count > 1:
        raise UsageError(
            "-: standard input is given twice but contains only one checkpoint; save the other checkpoint to a file"
        )
    for name in ("executor", "shard") if count else ():
        if getattr(options, name, None) is not None:
            raise UsageError(
                f"{option(f'--{name}')}: other processes cannot read standard input; save the input to a file first"
            )


def name_division(options: Options) -> str:
    """Return `--executor` or `--shard` with its value, for a message, or "" if neither is given."""
    if (executor := getattr(options, "executor", None)) is not None:
        return option("--executor", workers.executors.format_executor_name(executor))
    shard = getattr(options, "shard", None)
    return "" if shard is None else option("--shard", shard)


def refuse_division(options: Options, reason: str) -> None:
    """Raise UsageError with `reason` if `--executor` or `--shard` is given."""
    if division := name_division(options):
        raise UsageError(f"{division}: {reason}")


def check_values(options: Options) -> None:
    """Raise UsageError for a target or an option with an empty text, and for a number below the minimum.

    An unset variable in a script makes an empty text: `--lock "$LOCK"` must not skip the comparison.
    """
    for parameter in parameters_of(type(options)):
        value = getattr(options, parameter.field)
        if not parameter.may_be_empty and (value == "" or (isinstance(value, tuple) and "" in value)):
            if parameter.is_target:
                raise UsageError(f"{option(parameter.metavar.strip('[]'))}: is empty; give a value")
            raise UsageError(f"{option(parameter.flags[0])}: is empty; give a value, or leave the option out")
        if parameter.minimum is not None and value is not None and value < parameter.minimum:
            raise UsageError(f"{option(parameter.flags[0], value)}: must be {parameter.minimum} or more")
