"""Interpret the nodes of a pickle's graph: mappings, sequences, attributes of objects, modules, optimizers.

Nothing here calls, compares or prints a node; the repr of a pickled graph can be exponentially long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from statecli.pickles.keys import MAX_KEY_PARTS, Tokens, wrap_key
from statecli.pickles.machine_state import MAX_NESTED_COPIES
from statecli.pickles.nodes import Global, Key, Obj, SetOf

#: Function that creates a GraphModule; its first argument is the module's `__dict__`.
GRAPH_MODULE = "torch.fx.graph_module.reduce_graph_module"
#: Types of nodes without child nodes.
LEAF_TYPES = frozenset([str, int, float, bool, bytes, type(None), Global])

#: Class that is pickled with a dict, because a Counter counts the elements of any other argument.
_COUNTER_CLASS = "collections.Counter"
#: Classes of containers -> position of the argument that fills the container.
_DICT_ARGUMENT_POSITIONS = {
    "collections.OrderedDict": 0,
    "collections.defaultdict": 1,
    "builtins.dict": 0,
    _COUNTER_CLASS: 0,
}
_DEQUE_CLASS = "collections.deque"
#: Codec by which protocol 2 writes bytes as text.
PICKLED_CODEC = "latin1"
_SEQUENCE_CLASSES = frozenset(
    ["torch.Size", _DEQUE_CLASS, "builtins.set", "builtins.frozenset", "builtins.list", "builtins.tuple"]
)
#: Suffixes of classes whose `__new__` uses its argument, so NEWOBJ fills them too; other classes ignore the argument.
_NEWOBJ_SUFFIXES = ("torch.Size", ".frozenset", ".tuple")


def as_mapping(node: object) -> Mapping[Any, Any] | None:
    """Return the items of a dict, an OrderedDict or any pickled dict subclass; None for other nodes."""
    if type(node) is dict:
        return node
    return _expand_mapping(node, MAX_NESTED_COPIES) if type(node) is Obj else None


def _expand_mapping(node: Obj, copies: int) -> Mapping[Any, Any] | None:
    name = get_name(node.cls)
    place = _DICT_ARGUMENT_POSITIONS.get(name)
    if place is None:
        return node.items
    has_argument = len(node.args) > place and node.how != "newobj"
    argument_items = _expand_items(node.args[place], copies, pairs=name != _COUNTER_CLASS) if has_argument else {}
    if argument_items is None:
        return node.items
    return {**argument_items, **node.items} if argument_items and node.items else argument_items or node.items or {}


def _expand_items(source: object, copies: int, *, pairs: bool) -> Mapping[Any, Any] | None:
    """Return the items that a dict takes from its argument (a mapping or a sequence of pairs); None for other nodes."""
    if type(source) is dict:
        return source
    if type(source) is Obj:
        items = _expand_mapping(source, copies - 1) if copies else None
        if items is not None:
            return items
    # A set of pairs is not read: which of two pairs with the same key wins depends on Python's order of the set.
    is_set = type(source) is SetOf or get_name(getattr(source, "cls", None)).endswith("set")
    elements = _expand_sequence(source, copies - 1) if pairs and copies and not is_set else None
    if elements is None:
        return None
    items_by_key, tokens = {}, Tokens(MAX_KEY_PARTS * len(elements))
    for pair in elements:
        # A dict accepts any iterable of two values as a pair, such as the keys of another dict, but picklers write
        # lists and tuples.
        if type(pair) not in (list, tuple) or len(pair) != 2:
            return None
        items_by_key[wrap_key(pair[0], tokens)] = pair[1]
    return items_by_key


def is_unknown_mapping(node: Obj) -> bool:
    """Return True for a call of a dict class with an argument whose items cannot be listed."""
    name = get_name(node.cls)
    place = _DICT_ARGUMENT_POSITIONS.get(name)
    if place is None or node.how == "newobj" or len(node.args) <= place:
        return False
    return _expand_items(node.args[place], MAX_NESTED_COPIES, pairs=name != _COUNTER_CLASS) is None


def as_sequence(node: object) -> list[Any] | tuple[Any, ...] | None:
    """Return the elements of a list, tuple, set, deque or list subclass; None for other nodes."""
    return _expand_sequence(node, MAX_NESTED_COPIES)


def _expand_sequence(node: Any, copies: int) -> list[Any] | tuple[Any, ...] | None:
    if type(node) in (list, tuple):
        return node  # type: ignore[no-any-return]
    if type(node) is SetOf:
        return list(node.elems)
    if type(node) is not Obj:
        return None
    name = get_name(node.cls)
    has_argument = node.args and (node.how != "newobj" or name.endswith(_NEWOBJ_SUFFIXES))
    argument_elements = (
        _expand_sequence(node.args[0], copies - 1) if name in _SEQUENCE_CLASSES and has_argument and copies else None
    )
    if argument_elements is None:
        return node.elems
    elements = [*argument_elements, *node.elems] if node.elems else argument_elements
    longest = node.args[1] if name == _DEQUE_CLASS and len(node.args) > 1 else None
    return elements[max(0, len(elements) - longest) :] if type(longest) is int and longest >= 0 else elements


def iter_loose_arguments(node: Obj) -> Iterator[tuple[int, Any]]:
    """Yield the position and value of each argument of a call, except an argument that only fills a container."""
    name, place = get_name(node.cls), None
    if name in _SEQUENCE_CLASSES and as_sequence(node) is not None and as_sequence(node) is not node.elems:
        place = 0
    elif name in _DICT_ARGUMENT_POSITIONS and as_mapping(node) is not None and as_mapping(node) is not node.items:
        place = _DICT_ARGUMENT_POSITIONS[name]
    return ((n, value) for n, value in enumerate(node.args) if n != place)


def get_attributes(node: object) -> dict[str, Any]:
    """Return the attributes that the pickle sets on an object: its `__dict__` and its slots."""
    if type(node) is not Obj:
        return {}
    if get_name(node.cls) == GRAPH_MODULE and node.args:
        return get_text_items(node.args[0])
    return get_state_attributes(node.state)


def get_state_attributes(state: object) -> dict[str, Any]:
    """Return the attributes in a state that the opcode BUILD sets: a dict, or a pair (dict, slots)."""
    if type(state) is tuple and len(state) == 2:
        return {**get_text_items(state[0]), **get_text_items(state[1])}
    return get_text_items(state)


def get_text_items(node: object) -> dict[str, Any]:
    """Return the items of a mapping that have text keys; {} for other nodes."""
    items = as_mapping(node)
    return {key: value for key, value in items.items() if type(key) is str} if items else {}


def get_name(node: object) -> str:
    """Return the `module.name` of a Global; "" for other nodes."""
    return node.qualified if type(node) is Global else ""


#: Names of Python's class `bytes` in pickles of protocols 2 and 3.
_BYTES_CLASSES = frozenset(["__builtin__.bytes", "builtins.bytes"])


def read_raw_bytes(node: object) -> bytes | None:
    """Return the bytes of a node: literal bytes, or bytes that protocol 2 writes as a call; else None.

    Protocol 2 writes bytes as an encoded text, and empty bytes as `bytes()`.
    """
    if type(node) is bytes:
        return node
    if type(node) is not Obj:
        return None
    if get_name(node.cls) in _BYTES_CLASSES and not (node.args or node.kwargs or node.state):
        return b""
    if get_name(node.cls) == "_codecs.encode" and len(node.args) == 2:
        text, encoding = node.args
        if type(text) is str and encoding == PICKLED_CODEC:
            try:
                return text.encode("latin1")
            except UnicodeEncodeError:
                return None
    return None


def iter_children(node: object) -> Iterator[tuple[str, Any]]:
    """Yield the child nodes of a container or an object, each with its Python subscript (`['k']`, `[0]`, `.a`)."""
    items = as_mapping(node)
    if items is not None:
        for index, (key, value) in enumerate(items.items()):
            yield format_subscript(key) or f"[#{index}]", value
    elif (elements := as_sequence(node)) is not None:
        mark = "#" if type(node) is SetOf else ""  # a set has no order that Python could subscript
        for index, value in enumerate(elements):
            yield f"[{mark}{index}]", value
    yield from iter_non_items(node)


def list_child_nodes(node: object) -> list[Any]:
    """Return the same nodes as `iter_children` without subscripts. This takes a third of the time."""
    items = as_mapping(node)
    nodes = list(items.values()) if items is not None else list(as_sequence(node) or ())
    return [*nodes, *(child for _, child in iter_non_items(node))] if type(node) is Obj else nodes


def iter_non_items(node: object) -> Iterator[tuple[str, Any]]:
    """Yield the child nodes of an object that are not items or elements: attributes, arguments and the state."""
    if type(node) is not Obj:
        return
    attributes = get_attributes(node)
    for name, value in attributes.items():
        yield f".{name}", value
    for index, value in iter_loose_arguments(node):
        yield f".__args__[{index}]", value
    for name, value in (node.kwargs or {}).items():
        yield f".__kwargs__[{name!r}]", value
    if type(node.cls) is Obj:  # the pickle creates the callee too: a partial
        yield ".__func__", node.cls
    if node.state is not None and not attributes:
        yield ".__state__", node.state


def format_subscript(key: object) -> str:
    """Return a dict key as a Python subscript; "" if the key has no short literal."""
    if type(key) is not Key:
        return f"[{key!r}]"
    value = key.value
    parts = value if type(value) is tuple and len(value) <= 8 else (value,)
    return f"[{value!r}]" if all(map(_is_short, parts)) else ""


def _is_short(value: Any) -> bool:
    if type(value) in (float, int):
        return not abs(value) >= 2**60
    return value is None or type(value) is bool or (type(value) is str and len(value) <= 200)


def iter_entries(node: object) -> Iterator[tuple[Any, Any]]:
    """Yield key and value of a mapping, or index and element of a sequence; nothing for other nodes."""
    items = as_mapping(node)
    if items is not None:
        yield from items.items()
    else:
        yield from enumerate(as_sequence(node) or ())


def append_key(path: str, key: Any) -> str:
    """Return `path` with a key appended after a dot, as in the names of sections and settings."""
    is_plain = type(key) in (str, int, bool) or key is None
    text = str(key) if is_plain else format_subscript(key) or f"[<{type(key.value).__name__}>]"
    return f"{path}.{text}" if path else text


def is_module(node: object) -> bool:
    """Return True if the object has the pickled `__dict__` of an nn.Module."""
    if type(node) is not Obj:
        return False
    node = strip_compile_wrapper(node)
    return all(as_mapping(get_attribute(node, name)) is not None for name in ("_parameters", "_modules"))


def get_attribute(node: Obj, name: str) -> Any:
    """Return an attribute's value; None if it is not set. The state is read in place, because objects may share it."""
    if get_name(node.cls) == GRAPH_MODULE and node.args:
        states: tuple[Any, ...] = (node.args[0],)
    else:
        states = node.state if type(node.state) is tuple and len(node.state) == 2 else (node.state,)
    for state in reversed(states):
        items = state if type(state) is dict else as_mapping(state)
        if items and name in items:
            return items[name]
    return None


def strip_compile_wrapper(node: Obj) -> Obj:
    """Return the module inside a torch.compile wrapper that was pickled as a call; any other node unchanged."""
    while (
        node.state is None
        and get_name(node.cls).endswith(".OptimizedModule")
        and node.args
        and type(node.args[0]) is Obj
    ):
        node = node.args[0]
    return node


def is_optimizer(node: object) -> bool:
    """Return True for an `optimizer.state_dict()`, or an optimizer pickled whole."""
    items = as_mapping(node)
    if items is None:
        items = get_attributes(node)
    return (
        "param_groups" in items
        and as_mapping(items.get("state")) is not None
        and as_sequence(items["param_groups"]) is not None
    )


def is_flat_optimizer(node: object) -> bool:
    """Return True for a flattened optimizer state, with keys such as "state.fc.weight.exp_avg", "param_groups.fc.lr".

    `torch.distributed.checkpoint.state_dict` writes this with `flatten_optimizer_state_dict`.
    """
    items = as_mapping(node)
    if not items or not all(type(key) is str and key.startswith(FLAT_KEY_PREFIXES) for key in islice(items, 64)):
        return False
    return any(key.startswith(FLAT_KEY_PREFIXES[0]) and key.count(".") > 1 for key in items if type(key) is str)


#: Prefixes of the keys of a flattened optimizer.
FLAT_KEY_PREFIXES = ("state.", "param_groups.")
