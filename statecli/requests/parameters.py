"""What the parsers, the Python API and the documents need to know of each option, read from the classes of options."""

from __future__ import annotations

import types
from functools import cache
from typing import Any, get_args, get_origin

import msgspec

from statecli.requests.options import Group, Option, Options, Target


class Parameter(msgspec.Struct, frozen=True):
    """One option, or one target, of a command.

    Attributes:
        field: The field of the options, which is also the argument in Python.
        flags: The spellings on the command line, the full one first; () for a target.
        type: The type of one value: bool, str, int, float or an Enum.
        repeatable: True if it may be given several times; the field is then a tuple.
        default: The value if it is not given; msgspec.NODEFAULT for a target that must be given.
        metavar, help, group: As in `Option`.
    """

    field: str
    flags: tuple[str, ...]
    type: Any
    repeatable: bool
    default: Any
    metavar: str | None
    help: str | None
    group: Group

    @property
    def is_target(self) -> bool:
        """True for a word of the line that is no option."""
        return not self.flags

    @property
    def is_flag(self) -> bool:
        """True for an option without a value."""
        return self.type is bool

    def convert(self, word: str) -> Any:
        """Return the value that a word of the command line stands for. Raises ValueError if it stands for none."""
        return self.type(word)


@cache
def parameters_of(options: type[Options]) -> tuple[Parameter, ...]:
    """Return the parameters of a command: its targets in order, then its options as the help lists them."""
    annotations: dict[str, Any] = {}
    for base in reversed(options.__mro__):
        annotations |= getattr(base, "__annotations__", {})
    fields = [field for field in msgspec.structs.fields(options) if field.name in annotations]
    parameters = [_parameter(field, annotations[field.name]) for field in fields]
    groups = list(Group)
    return tuple(sorted(parameters, key=lambda parameter: (not parameter.is_target, groups.index(parameter.group))))


def _parameter(field: msgspec.structs.FieldInfo, annotation: Any) -> Parameter:
    plain, info = get_args(annotation)
    repeatable = get_origin(plain) is tuple
    if repeatable:
        plain = get_args(plain)[0]
    elif isinstance(plain, types.UnionType):
        plain = next(part for part in get_args(plain) if part is not types.NoneType)
    default = field.default
    if isinstance(info, Target):
        return Parameter(field.name, (), plain, repeatable, default, info.metavar, info.help, Group.TASK)
    assert isinstance(info, Option)  # noqa: S101 - each field is one or the other
    of = info.type or plain
    return Parameter(field.name, info.flags, of, repeatable, default, info.metavar, info.help, info.group)
