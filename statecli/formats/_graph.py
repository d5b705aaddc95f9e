"""Looking at a pickle's inert graph: what is a mapping, a sequence, an object's attributes, a module, an optimizer.

Nothing here calls, compares or prints a node; the repr of a pickled graph can be exponentially long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from statecli.formats._pickle import Global, Key, Obj, SetOf, as_key

#: The function that makes a GraphModule; its first argument is the module's `__dict__`.
GRAPH_MODULE = "torch.fx.graph_module.reduce_graph_module"
#: Types with nothing below them.
LEAVES = frozenset([str, int, float, bool, bytes, type(None), Global])


def mapping(node: Any) -> Mapping[Any, Any] | None:
    """The items of a dict, an OrderedDict or any pickled dict subclass; None for everything else."""
    if type(node) is dict:
        return node
    if type(node) is not Obj:
        return None
    place = _MADE_WITH.get(name_of(node.cls))
    if place is None:
        return node.items
    given = _items(node.args[place]) if len(node.args) > place else {}
    if given is None:
        return node.items
    return {**given, **node.items} if given and node.items else given or node.items or {}


def _items(held: Any) -> Mapping[Any, Any] | None:
    """What a dict is made of: a dict, or pairs; None for what is neither."""
    if type(held) is list and all(type(pair) in (list, tuple) and len(pair) == 2 for pair in held):
        return {as_key(key): value for key, value in held}
    return held if type(held) is dict else None


#: Dicts, and at which place of their arguments the items are: Counter({"a": 1}) is always pickled so, and Python 2
#: wrote OrderedDict([["a", 1]]).
_MADE_WITH = {"collections.OrderedDict": 0, "collections.defaultdict": 1, "collections.Counter": 0}


def sequence(node: Any) -> list[Any] | tuple[Any, ...] | None:
    """The elements of a list, tuple, set, deque or list subclass; None for everything else."""
    if type(node) in (list, tuple):
        return node  # type: ignore[no-any-return]
    if type(node) is SetOf:
        return list(node.elems)
    if type(node) is Obj:
        if name_of(node.cls) in _WRAPPED_SEQUENCES and node.args and type(node.args[0]) in (list, tuple):
            return [*node.args[0], *node.elems] if node.elems else node.args[0]
        return node.elems
    return None


_WRAPPED_SEQUENCES = frozenset(
    ["torch.Size", "collections.deque"]
    + [f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset", "list", "tuple")]
)


def attributes(node: Any) -> dict[str, Any]:
    """What BUILD gave an object: its `__dict__`, and its slots where the state is the pair (dict, slots)."""
    if type(node) is not Obj:
        return {}
    if name_of(node.cls) == GRAPH_MODULE and node.args:
        return named(node.args[0])
    return of_state(node.state)


def of_state(state: Any) -> dict[str, Any]:
    """The attributes in the argument of BUILD: a dict, or the pair (dict, slots)."""
    if type(state) is tuple and len(state) == 2:
        return {**named(state[0]), **named(state[1])}
    return named(state)


def named(node: Any) -> dict[str, Any]:
    """The items of a mapping whose keys are text; empty for everything else."""
    items = mapping(node)
    return {key: value for key, value in items.items() if type(key) is str} if items else {}


def name_of(node: Any) -> str:
    """`module.name` of a global, "" for anything else."""
    return node.qualified if type(node) is Global else ""


def children(node: Any) -> Iterator[tuple[str, Any]]:
    """What hangs below a container or an object, with the piece of Python that reaches it (`['k']`, `[0]`, `.a`)."""
    items = mapping(node)
    if items is not None:
        for index, (key, value) in enumerate(items.items()):
            yield key_path(key) or f"[#{index}]", value
    elif (elements := sequence(node)) is not None:
        mark = "#" if type(node) is SetOf else ""  # a set has no order that Python could subscript
        for index, value in enumerate(elements):
            yield f"[{mark}{index}]", value
    if type(node) is Obj:
        for name, value in attributes(node).items():
            yield f".{name}", value
        if items is None and elements is None:
            for index, value in enumerate(node.args):
                yield f".__args__[{index}]", value
            for name, value in (node.kwargs or {}).items():
                yield f".__kwargs__[{name!r}]", value
            if type(node.cls) is Obj:  # what is called is made by the pickle too: a partial
                yield ".__func__", node.cls
            if node.state is not None and not attributes(node):
                yield ".__state__", node.state


def key_path(key: Any) -> str:
    """A dict key as Python would write the subscript; "" where it cannot be written."""
    if type(key) is not Key:
        return f"[{key!r}]"
    value = key.value
    parts = value if type(value) is tuple and len(value) <= 8 else (value,)
    return f"[{value!r}]" if all(map(_is_short, parts)) else ""


def _is_short(value: Any) -> bool:
    if type(value) in (float, int):
        return not abs(value) >= 2**60
    return value is None or type(value) is bool or (type(value) is str and len(value) <= 200)


def entries(node: Any) -> Iterator[tuple[Any, Any]]:
    """Key and value of a mapping, index and element of a sequence, nothing of all else."""
    items = mapping(node)
    if items is not None:
        yield from items.items()
    else:
        yield from enumerate(sequence(node) or ())


def dotted(path: str, key: Any) -> str:
    """A key below a dotted path, as sections and settings are named."""
    plain = type(key) in (str, int, bool) or key is None
    text = str(key) if plain else key_path(key) or f"[<{type(key.value).__name__}>]"
    return f"{path}.{text}" if path else text


def is_module(node: Any) -> bool:
    """Whether the object's pickled `__dict__` is that of an nn.Module."""
    if type(node) is not Obj:
        return False
    node = unwrapped(node)
    return all(mapping(_attribute(node, name)) is not None for name in ("_parameters", "_modules"))


def _attribute(node: Obj, name: str) -> Any:
    """The attribute of `attributes(node)`, without copying all of them: many objects can share one state."""
    if name_of(node.cls) == "torch.fx.graph_module.reduce_graph_module" and node.args:
        states: tuple[Any, ...] = (node.args[0],)
    else:
        states = node.state if type(node.state) is tuple and len(node.state) == 2 else (node.state,)
    for state in reversed(states):
        items = state if type(state) is dict else mapping(state)
        if items and name in items:
            return items[name]
    return None


def unwrapped(node: Obj) -> Obj:
    """torch.compile pickles itself as a call on the module it wraps."""
    while (
        node.state is None
        and name_of(node.cls).endswith(".OptimizedModule")
        and node.args
        and type(node.args[0]) is Obj
    ):
        node = node.args[0]
    return node


def is_optimizer(node: Any) -> bool:
    """Whether this is `optimizer.state_dict()`, or an optimizer pickled whole."""
    items = mapping(node)
    if items is None:
        items = attributes(node)
    return (
        "param_groups" in items
        and mapping(items.get("state")) is not None
        and sequence(items["param_groups"]) is not None
    )


def is_flat_optimizer(node: Any) -> bool:
    """Whether this is an optimizer's state with names in its keys: "state.fc.weight.exp_avg", "param_groups.fc.lr".

    `torch.distributed.checkpoint.state_dict` makes it with `flatten_optimizer_state_dict`.
    """
    items = mapping(node)
    if not items or not all(type(key) is str and key.startswith(FLAT) for key in islice(items, 64)):
        return False
    return any(key.startswith(FLAT[0]) and key.count(".") > 1 for key in items if type(key) is str)


#: How the keys of a flattened optimizer begin.
FLAT = ("state.", "param_groups.")
