"""Graph that a pickle describes: names, calls and containers. Nothing in the graph is imported or called.

The graph may be cyclic, and a shared tuple can make it exponential when printed. Walk it with a set of ids, and never
pass a node to `repr`, `str` or `hash` (tuples hash recursively).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from statecli.pickles.python2_names import MODULES, rename_python2

Value = Any  # any value in a graph: the classes below, and None, bool, int, float, str, bytes, list, tuple, dict


class _Node(msgspec.Struct, eq=False):
    """Node of a pickle's graph. Its repr does not show child nodes, because these can be exponentially many."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class Global(_Node):
    """Name that the pickle would import, with the byte of its first mention. A pickle has one object for each name."""

    module: str
    name: str
    position: int

    @property
    def qualified(self) -> str:
        """Name as `module.name`; a name of Python 2 is replaced by its name in Python 3."""
        if self.module in MODULES:
            return ".".join(rename_python2(self.module, self.name))
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<Global {self.qualified!r}>"


class Obj(_Node):
    """A call that the pickle would make, with the state, items and elements that the pickle adds to the result.

    `cls` is the callee, nearly always a Global. `how` is reduce, newobj, obj or inst, or enum for a member of an Enum
    of TorchScript, whose argument is not a tuple. `kwargs` is a dict for NEWOBJ_EX, `state` is the argument of the last
    BUILD, `items` are the dict items set on the result, `elems` are the appended or added elements.
    """

    cls: Value
    args: tuple[Value, ...]
    how: str = "reduce"
    kwargs: dict[Value, Value] | None = None
    state: Value = None
    items: dict[Value, Value] | None = None
    elems: list[Value] | None = None


class Key(_Node, eq=False):
    """Wrapper of a dictionary key that is not safe to hash: a tuple, a float, a node or a huge integer.

    Keys are equal if they are equal in Python. `plain` is compared: a number, text, bytes, or ("token", bytes) for a
    container or a huge integer; None for a key that equals only itself.
    """

    value: Value
    plain: Value = None

    def __hash__(self) -> int:
        return id(self.value) if self.plain is None else hash(self.plain)

    def __eq__(self, other: object) -> bool:
        if type(other) is not Key:
            return bool(self.plain is not None and self.plain == other)
        if self.plain is None or other.plain is None:
            return self.value is other.value
        return bool(self.plain is other.plain or self.plain == other.plain)


class Build(NamedTuple):
    """Effect of the opcode BUILD: an object, and the state to set on it (the argument of `__setstate__`)."""

    target: Value
    state: Value


class Persistent(_Node):
    """A persistent id, which the loader resolves. torch's storages are `("storage", type, key, location, numel)`."""

    pid: Value


class SetOf(_Node):
    """A set or a frozenset, stored as the list of its elements."""

    elems: list[Value]


class Pickle(_Node):
    """A parsed pickle: its root node, and its names (`globals`) and storages in order of first mention.

    `end` is the first byte after the pickle. `duplicate_keys` are up to 100 dictionary keys that are set twice; the
    last value wins, as in torch.
    """

    root: Value
    globals: list[Global]
    end: int
    persistent: list[Persistent]
    duplicate_keys: list[Value]


_NOUNS: dict[type, str] = {
    type(None): "None",
    bool: "a bool",
    int: "an int",
    float: "a float",
    str: "a string",
    bytes: "bytes",
    list: "a list",
    tuple: "a tuple",
    dict: "a dict",
    SetOf: "a set",
    Persistent: "a storage",
    Obj: "the result of a call",
}


def describe(value: Value) -> str:
    """Return the kind of `value` in words, never its repr, because a repr can be exponential."""
    if type(value) is Global:
        return f"the function or class {value.qualified[:200]!r}"
    return _NOUNS.get(type(value), "an unknown object")
