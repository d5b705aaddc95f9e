"""Names and calls that stand for Python objects in the arguments of a model spec (`act=nn.GELU`).

The module stands before the colon: `transformers:BertModel`. A name without a colon belongs to the class's module, or
begins with the name of a package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec


class ObjectName(msgspec.Struct, frozen=True):
    """A name in the arguments of a class: `nn.GELU`, `torch.nn:GELU`."""

    name: str
    module: str | None = None

    def __repr__(self) -> str:
        return self.name if self.module is None else f"{self.module}:{self.name}"


class ObjectCall(msgspec.Struct, frozen=True):
    """A call in the arguments of a class: the name of the called class, and its arguments (`Config(depth=2)`)."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    module: str | None = None

    @property
    def callee(self) -> ObjectName:
        """Name of the called class, before the parenthesis."""
        return ObjectName(self.name, self.module)

    def __repr__(self) -> str:
        return f"{self.callee!r}({format_call(self.args, self.kwargs)})"


def format_call(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Return arguments as source code of a call."""
    return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])


def map_items(value: Any, change: Callable[[Any], Any], callee: ObjectName | None = None) -> Any:
    """Apply `change` to each item of a list, tuple, dict or call. `callee` replaces the name of a call."""
    if isinstance(value, ObjectCall):
        new_callee = callee or value.callee
        kwargs = {name: change(item) for name, item in value.kwargs.items()}
        return ObjectCall(new_callee.name, tuple(map(change, value.args)), kwargs, new_callee.module)
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    return {key: change(item) for key, item in value.items()} if type(value) is dict else value


def replace_call(value: object, old: ObjectCall, new: ObjectCall) -> Any:
    """Replace the call `old` in an argument, also inside lists and calls."""
    return new if value is old else map_items(value, lambda item: replace_call(item, old, new))
