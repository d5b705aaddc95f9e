"""Names and calls in the arguments of a class on the command line, which stand for objects of the class's module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class ObjectName(msgspec.Struct, frozen=True):
    """A name in the arguments of a class: `nn.GELU`."""

    name: str

    def __repr__(self) -> str:
        return self.name


class ObjectCall(msgspec.Struct, frozen=True):
    """A class in the arguments of a class, and the arguments to call it with: `Config(depth=2)`."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"{self.name}({format_call(self.args, self.kwargs)})"


def format_call(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Return arguments as written in a call."""
    return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
