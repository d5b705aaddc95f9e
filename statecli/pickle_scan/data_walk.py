"""Walk over the containers of a pickle, and read mappings and sequences as a loader may read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

from statecli.core import quoting
from statecli.pickle_scan import known_names
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickle_scan.text_values import read_text
from statecli.pickles.graph import as_mapping, as_sequence, format_subscript, read_raw_bytes
from statecli.pickles.nodes import Global, Key, Obj, SetOf, Value

CONTAINER_TYPES = frozenset([dict, list, tuple, Obj, SetOf])
#: Prefixes of calls that hold only a tensor, and of objects whose states `random_states` checks.
_SKIPPED_PREFIXES = ("torch._utils._rebuild_", "torch._tensor._rebuild_", "numpy.random.", "random.Random")
#: Largest number of subscripts that a message shows, and of characters in each.
_MAX_SHOWN_SUBSCRIPTS, _MAX_SUBSCRIPT_CHARACTERS = 4, 1000

_Sized = TypeVar("_Sized", bound=Sized)


class DataWalk:
    """Walk over the containers of a pickle. `_links` has each container's parent and key, by the container's id.

    `skips_texts`: the walk does not enter objects that Python reads as a text or as bytes.
    """

    def __init__(self, steps: Steps, *, skips_texts: bool = False) -> None:
        self._steps = steps
        self._skips_texts = skips_texts
        self._links: dict[int, tuple[Value, Value]] = {}
        self._skipped_names: dict[int, bool] = {}
        #: Containers whose paths were checked, by their use and id.
        self._checked: dict[tuple[str, int], Value] = {}

    def iter_containers(self, root: Value) -> Iterator[Value]:
        """Yield each container and object reached from the root, except tensors."""
        waiting = [root] if type(root) in CONTAINER_TYPES else []
        self._links[id(root)] = (None, None)
        while waiting:
            node = waiting.pop()
            yield node
            for key, child in _iter_children(node):
                if type(child) in CONTAINER_TYPES and id(child) not in self._links and not self._is_skipped(child):
                    self._links[id(child)] = (node, key)
                    waiting.append(child)

    def _is_skipped(self, node: Value) -> bool:
        if type(node) is not Obj or type(node.cls) is not Global:
            return False
        if self._skips_texts and (type(read_text(node)) is str or read_raw_bytes(node) is not None):
            return True
        is_skipped = self._skipped_names.get(id(node.cls))
        if is_skipped is None:
            name = known_names.get_plain_name(node.cls.module, node.cls.name)
            is_skipped = self._skipped_names[id(node.cls)] = name.startswith(_SKIPPED_PREFIXES)
        return is_skipped

    def get_items(self, node: Value) -> Mapping[Any, Any] | None:
        """Return the items of a mapping; None for other values. Items copied from a call's arguments count as steps."""
        items = as_mapping(node)
        return self.count_steps(items) if items and type(node) is Obj and node.args else items

    def spell_keys(self, items: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the items with keys that are objects replaced by their texts. Of equal keys, the last one counts."""
        if not any(type(key) is Key and type(key.value) is Obj for key in items):
            return items
        self.count_steps(items)
        return {text if type(text := read_text(key)) is str else key: value for key, value in items.items()}

    def get_spelled_items(self, node: Value) -> Mapping[Any, Any] | None:
        """Return the items of a mapping with spelled keys (see `spell_keys`); None for other values."""
        items = self.get_items(node)
        return None if items is None else self.spell_keys(items)

    def find_mappings(self, value: Value) -> Iterator[Mapping[Any, Any]]:
        """Yield the mappings in which a loader may look up a key, including those inside an object.

        The mappings of an object are its items, and the dicts in its arguments and attributes. UserDict, ChainMap and
        DictConfig look up keys there.
        """
        yield from map(self.spell_keys, self.find_unspelled(value))

    def find_unspelled(self, value: Value) -> Iterator[Mapping[Any, Any]]:
        """Yield the same mappings as `find_mappings`, but with keys that are objects unchanged."""
        for part in self._iter_parts(value):
            items = self.count_steps(self.get_items(part))
            if items:
                yield items

    def is_unchecked(self, use: str, node: Value) -> bool:
        """Return True the first time that `node` is checked for `use`, so that a shared value is checked only once."""
        is_first = (use, id(node)) not in self._checked
        self._checked[use, id(node)] = node  # keeps the id in use
        return is_first

    def find_elements(self, value: Value) -> Iterator[Value]:
        """Yield the elements that a loader may take from a sequence, or from sequences inside an object."""
        for part in self._iter_parts(value):
            yield from self.count_steps(self.get_elements(part)) or ()

    def _iter_parts(self, value: Value) -> Iterator[Value]:
        """Yield a value. For an object, also yield all containers and objects in its arguments and attributes."""
        waiting, seen = [value], set[int]()
        while waiting:
            part = waiting.pop()
            if type(part) not in CONTAINER_TYPES or id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            if type(part) is Obj:
                states = part.state if type(part.state) in (list, tuple) else (part.state,)
                attributes = [value for state in states for value in (state.values() if type(state) is dict else ())]
                children = [*part.args, *(part.kwargs or {}).values(), *states, *attributes]
                self._steps.take(Budget.FLOW, 1 + len(children))
                waiting.extend(children)
            elif part is not value:
                elements = self.count_steps(self.get_elements(part)) or ()
                waiting.extend(element for element in elements if type(element) in CONTAINER_TYPES)

    def get_elements(self, node: Value) -> Sequence[Any] | None:
        """Return the elements of a sequence, else None. Elements copied from a call's arguments count as steps."""
        elements = as_sequence(node)
        return self.count_steps(elements) if elements and type(node) is Obj and node.args else elements

    def count_steps(self, values: _Sized | None) -> _Sized | None:
        """Count the values of a container as steps, each time that the walk reads the container. Raises OutOfSteps."""
        if values:
            self._steps.take(Budget.FLOW, len(values))
        return values

    def describe_path(self, node: Value) -> str:
        """Return the path to a container as Python subscripts; a long path begins with `…`."""
        steps: list[str] = []
        parent, key = self._links.get(id(node), (None, None))
        while parent is not None and len(steps) < _MAX_SHOWN_SUBSCRIPTS:
            steps.append(f".{key[0]}" if type(key) is tuple else format_key(key))
            parent, key = self._links.get(id(parent), (None, None))
        return ("…" if parent is not None else "") + "".join(reversed(steps))


def _iter_children(node: Value) -> Iterable[tuple[Value, Value]]:
    """Return (key, value) for each value in a container or object. The key of an attribute is a tuple (name,)."""
    if type(node) is dict:
        return node.items()
    if type(node) in (list, tuple):
        return enumerate(node)
    if type(node) is SetOf:
        return enumerate(node.elems)
    parts = {"__args__": node.args, "__kwargs__": node.kwargs, "__state__": node.state, "__func__": node.cls}
    attributes = [((name,), value) for name, value in parts.items()]
    return [*attributes, *(node.items or {}).items(), *enumerate(node.elems or ())]


def format_key(key: Value) -> str:
    """Return a key as a Python subscript, or `[…]` for a long key."""
    text = f"[{quoting.quote(key)}]" if type(key) is str else format_subscript(key)
    return text if text and len(text) <= _MAX_SUBSCRIPT_CHARACTERS else "[…]"
