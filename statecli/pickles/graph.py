"""Looking at a pickle's inert graph: what is a mapping, a sequence, an object's attributes, a module, an optimizer.

Nothing here calls, compares or prints a node; the repr of a pickled graph can be exponentially long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from statecli.pickles.machine import MAX_COPIES, MAX_KEY_PARTS, Global, Key, Obj, SetOf, Tokens, as_key

#: The function that makes a GraphModule; its first argument is the module's `__dict__`.
GRAPH_MODULE = "torch.fx.graph_module.reduce_graph_module"
#: Types with nothing below them.
LEAVES = frozenset([str, int, float, bool, bytes, type(None), Global])


#: Classes of containers, by the place of the argument that a call of them fills the container from.
_DICTS = {"collections.OrderedDict": 0, "collections.defaultdict": 1, "builtins.dict": 0, "__builtin__.dict": 0}
#: Pickled with a dict; with anything else, a Counter counts it.
_COUNTER = "collections.Counter"
_DEQUE = "collections.deque"
_SEQUENCES = frozenset(
    ["torch.Size", _DEQUE]
    + [f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset", "list", "tuple")]
)
#: Those that NEWOBJ fills too: `__new__` of the others ignores what it is given.
_FILLED_BY_NEW = ("torch.Size", ".frozenset", ".tuple")


def mapping(node: Any) -> Mapping[Any, Any] | None:
    """The items of a dict, an OrderedDict or any pickled dict subclass; None for everything else."""
    if type(node) is dict:
        return node
    return _mapping_of(node, MAX_COPIES) if type(node) is Obj else None


def _mapping_of(node: Obj, copies: int) -> Mapping[Any, Any] | None:
    name = name_of(node.cls)
    if name not in _DICTS and name != _COUNTER:
        return node.items
    place = _DICTS.get(name, 0)
    called = len(node.args) > place and node.how != "newobj"
    given = _items(node.args[place], copies, pairs=name != _COUNTER) if called else {}
    if given is None:
        return node.items
    return {**given, **node.items} if given and node.items else given or node.items or {}


def _items(held: Any, copies: int, *, pairs: bool) -> Mapping[Any, Any] | None:
    """What a dict is made of: a mapping or a sequence of pairs; None for what is neither."""
    if type(held) is dict:
        return held
    if type(held) is Obj:
        items = _mapping_of(held, copies - 1) if copies else None
        if items is not None:
            return items
    elements = _elements(held, copies - 1) if pairs and copies else None
    if elements is None:
        return None
    made, tokens = {}, Tokens(MAX_KEY_PARTS * len(elements))
    for element in elements:
        pair = element if type(element) is str else _elements(element, copies - 1)
        if pair is None or len(pair) != 2:
            return None
        made[as_key(pair[0], tokens)] = pair[1]
    return made


def sequence(node: Any) -> list[Any] | tuple[Any, ...] | None:
    """The elements of a list, tuple, set, deque or list subclass; None for everything else."""
    return _elements(node, MAX_COPIES)


def _elements(node: Any, copies: int) -> list[Any] | tuple[Any, ...] | None:
    if type(node) in (list, tuple):
        return node  # type: ignore[no-any-return]
    if type(node) is SetOf:
        return list(node.elems)
    if type(node) is not Obj:
        return None
    name = name_of(node.cls)
    called = node.args and (node.how != "newobj" or name.endswith(_FILLED_BY_NEW))
    given = _elements(node.args[0], copies - 1) if name in _SEQUENCES and called and copies else None
    if given is None:
        return node.elems
    elements = [*given, *node.elems] if node.elems else given
    longest = node.args[1] if name == _DEQUE and len(node.args) > 1 else None
    return elements[max(0, len(elements) - longest) :] if type(longest) is int and longest >= 0 else elements


def loose_arguments(node: Obj) -> Iterator[tuple[int, Any]]:
    """Arguments of a call by their places, without the one that a container was filled from."""
    name, place = name_of(node.cls), None
    if name in _SEQUENCES and sequence(node) is not None and sequence(node) is not node.elems:
        place = 0
    elif (name in _DICTS or name == _COUNTER) and mapping(node) is not None and mapping(node) is not node.items:
        place = _DICTS.get(name, 0)
    return ((n, value) for n, value in enumerate(node.args) if n != place)


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
    yield from beside(node)


def child_nodes(node: Any) -> list[Any]:
    """The nodes of `children`, without their paths: a third of the time."""
    items = mapping(node)
    nodes = list(items.values()) if items is not None else list(sequence(node) or ())
    return [*nodes, *(child for _, child in beside(node))] if type(node) is Obj else nodes


def beside(node: Any) -> Iterator[tuple[str, Any]]:
    """What hangs below an object and is no entry of a container: attributes, arguments, a state."""
    if type(node) is not Obj:
        return
    held = attributes(node)
    for name, value in held.items():
        yield f".{name}", value
    for index, value in loose_arguments(node):
        yield f".__args__[{index}]", value
    for name, value in (node.kwargs or {}).items():
        yield f".__kwargs__[{name!r}]", value
    if type(node.cls) is Obj:  # what is called is made by the pickle too: a partial
        yield ".__func__", node.cls
    if node.state is not None and not held:
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
