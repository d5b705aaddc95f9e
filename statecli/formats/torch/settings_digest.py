"""Digests of a pickle's settings: equal contents have equal digests, different contents have different digests.

The order of a dict and of a set is ignored. A list equals a tuple, and 1 equals 1.0, but True does not equal 1. Shared
objects count as copies. Every part is written with its type and its length, so that different contents are written
differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from statecli.formats.torch.reading import Reading
from statecli.pickles.graph import (
    LEAF_TYPES,
    as_mapping,
    as_sequence,
    get_attributes,
    get_name,
    iter_loose_arguments,
    read_raw_bytes,
)
from statecli.pickles.nodes import Global, Key, Obj, Persistent, SetOf
from statecli.pickles.numpy_types import read_number

#: Maximum number of entries that are hashed; entries of a cycle count once for each round.
MAX_DIGESTED = 2_000_000
#: Maximum depth of nested containers. Python's own pickler stops at 1,000, or at its recursion limit.
MAX_NESTED = 10_000
#: Number of entries that a container adds to the count, because it takes as long to read.
_ENTRIES_PER_CONTAINER = 6
#: Leaves up to this size in bytes are stored verbatim; longer ones as a cached hash.
_MAX_VERBATIM_BYTES = 64

#: Types of JSON scalars.
SCALARS = frozenset([str, int, float, bool, type(None)])
#: Prefixes of containers whose arguments are their content, or have no effect on `==`: a default, a maximum length.
_PLAIN_CONTAINERS = ("collections.", "builtins.", "torch.Size")

#: Part of a container: the type of its name, and its nodes (key and value, or the value alone).
_Part = tuple[bytes, tuple[Any, ...]]


class Digests:
    """Digests of one file's settings. A container that is shared in the file is read only once."""

    def __init__(self, reading: Reading) -> None:
        self._reading, self.decoder = reading, reading.decoder
        self._digests_by_id: dict[int, bytes] = {}
        self._entries_left = MAX_DIGESTED
        self._is_noted = False
        self._is_deep = False
        self._kept_nodes: list[Any] = []

    def of(self, node: object, path: str) -> str:
        """Return 128 bits of a SHA-256 of the node. Content beyond `MAX_DIGESTED` is ignored and noted as an oddity."""
        if not self.is_leaf(node) and id(node) not in self._digests_by_id:
            self._read(node)
        if self._entries_left < 0 and not self._is_noted:
            self._is_noted = True
            message = (
                f"{path} has more than {MAX_NESTED:,} nested containers"
                if self._is_deep
                else f"the values up to {path} have more than {MAX_DIGESTED:,} entries (a container counts as "
                f"{_ENTRIES_PER_CONTAINER})"
            )
            message = f"{message}; statecli ignores the values beyond this limit"
            self._reading.add_oddity("metadata-cut", message)
        return _format_digest(self._hash_leaf(node))

    def keep(self, node: object) -> Any:
        """Keep a reference to the node: digests are stored by `id`, and Python reuses the `id` of a freed object."""
        self._kept_nodes.append(node)
        return node

    def is_tensor(self, node: object) -> bool:
        """Return whether the node is a tensor or a tensor's storage. Neither of them is compared as a setting."""
        return type(node) is Persistent or self.decoder.is_tensor(node)

    def is_leaf(self, node: object) -> bool:
        """Return whether the node contains no further settings."""
        if type(node) in SCALARS or type(node) in (Global, bytes):
            return True
        if self.is_tensor(node):
            return not self.decoder.get_attributes(node)
        return type(node) is Obj and (read_raw_bytes(node) is not None or decode_numpy_scalar(node) is not None)

    def _read(self, root: object) -> None:
        """Compute all digests with Tarjan's algorithm: inner containers first, a cycle's containers together."""
        number: dict[int, int] = {}
        lowest: dict[int, int] = {}
        open_containers: list[tuple[Any, list[_Part]]] = []
        frames: list[tuple[Any, Iterator[Any]]] = []
        next_container = root
        while True:
            if next_container is not None:
                parts = self._list_parts(next_container)
                children = self._collect_below(parts)
                if not children:
                    self._digests_by_id[id(next_container)] = self._hash_container(next_container, parts, {})
                else:
                    number[id(next_container)] = lowest[id(next_container)] = len(number)
                    open_containers.append((next_container, parts))
                    frames.append((next_container, iter(children)))
                    if len(frames) > MAX_NESTED:
                        self._is_deep, self._entries_left = True, -1
            if not frames:
                return
            node, remaining_children = frames[-1]
            next_container = self._find_next_container(node, remaining_children, number, lowest)
            if next_container is not None:
                continue
            frames.pop()
            if frames:
                parent = id(frames[-1][0])
                lowest[parent] = min(lowest[parent], lowest[id(node)])
            if lowest[id(node)] == number[id(node)]:
                start = next(at for at in range(len(open_containers) - 1, -1, -1) if open_containers[at][0] is node)
                self._hash_component(open_containers[start:])
                del open_containers[start:]

    def _find_next_container(
        self, node: object, remaining_children: Iterator[Any], number: dict[int, int], lowest: dict[int, int]
    ) -> Any:
        """Return the next inner container without a digest, or None. Update `lowest` as Tarjan's algorithm does."""
        for child in remaining_children:
            if id(child) in self._digests_by_id:
                continue
            if id(child) not in number:
                return child
            lowest[id(node)] = min(lowest[id(node)], number[id(child)])
        return None

    def _list_parts(self, node: Any) -> list[_Part]:
        """List the parts of a container, such as keys and values. Return [] once the limit of entries is exceeded."""
        if self._entries_left < 0:
            return []
        self._entries_left -= _ENTRIES_PER_CONTAINER
        if type(node) in (list, tuple):
            self._entries_left -= len(node)
            return [(b"", (child,)) for child in node]
        is_tensor = self.is_tensor(node)
        parts: list[_Part] = (
            [(b"attribute", pair) for pair in self.decoder.get_attributes(node).items()]
            if is_tensor
            else list(_list_parts(node))
        )
        self._entries_left -= len(parts)
        return parts

    def _collect_below(self, parts: list[_Part]) -> list[Any]:
        return [
            child for _, nodes in parts for child in nodes if type(child) not in SCALARS and not self.is_leaf(child)
        ]

    def _hash_component(self, together: list[tuple[Any, list[_Part]]]) -> None:
        first, parts = together[0]
        if len(together) > 1 or any(child is first for child in self._collect_below(parts)):
            self._digests_by_id.update(
                self._hash_cycle([node for node, _ in together], [parts for _, parts in together])
            )
        else:
            self._digests_by_id[id(first)] = self._hash_container(first, parts, {})

    def _hash_cycle(self, cycle: list[Any], parts_of_each: list[list[_Part]]) -> dict[int, bytes]:
        """Return a digest of each container in a cycle. Hash them in rounds, until a round finds no new difference.

        The classes of a round and their parts describe the whole cycle, independent of the entry point.
        """
        classes, class_count = {id(node): b"itself" for node in cycle}, 1
        size = sum(map(len, parts_of_each)) + _ENTRIES_PER_CONTAINER * len(parts_of_each)
        while True:
            self._entries_left -= size
            pairs = zip(cycle, parts_of_each, strict=True)
            refined = {id(node): self._hash_container(node, parts, classes) for node, parts in pairs}
            digests = set(refined.values())
            if len(digests) == class_count or self._entries_left < 0:
                cycle_digest = _hash_parts(sorted(digests))
                return {node: _hash_parts([digest, cycle_digest]) for node, digest in refined.items()}
            classes, class_count = refined, len(digests)

    def _hash_container(self, node: object, parts: list[_Part], classes: Mapping[int, bytes]) -> bytes:
        if type(node) in (list, tuple):
            return _hash_parts([b"list", *(self._find_digest(child, classes) for _, (child,) in parts)])
        ordered: list[bytes] = [describe_kind(node).encode("utf-8", "surrogatepass")]
        unordered: list[bytes] = []
        in_order = not _is_set(node)
        for tag, nodes in parts:
            part = _join_framed([tag, *(self._find_digest(node, classes) for node in nodes)])
            (ordered if in_order and len(nodes) == 1 else unordered).append(part)
        return _hash_parts([_join_framed(ordered), *sorted(unordered)])

    def _find_digest(self, node: object, classes: Mapping[int, bytes]) -> bytes:
        return classes.get(id(node)) or self._hash_leaf(node)

    def _hash_leaf(self, node: object) -> bytes:
        """Return the cached digest of a container or a long leaf, or the encoding of a short leaf."""
        cached = self._digests_by_id.get(id(node))
        if cached is not None:
            return cached
        text = self._encode_leaf(node)
        if len(text) <= _MAX_VERBATIM_BYTES:
            return text
        self._entries_left -= len(text) >> 4
        self._digests_by_id[id(self.keep(node))] = _hash_parts([text])
        return self._digests_by_id[id(node)]

    def _encode_leaf(self, node: Any) -> bytes:
        if type(node) is str:
            return b"s" + node.encode("utf-8", "surrogatepass")
        if type(node) is bool or node is None:
            return repr(node).encode()
        if type(node) is int:
            return b"i" + hex(node).encode()
        if type(node) is float:
            return b"i" + hex(int(node)).encode() if node.is_integer() else b"f" + repr(node).encode()
        if type(node) is Global:
            return b"g" + node.qualified.encode("utf-8", "surrogatepass")
        if self.is_tensor(node):
            return b"t"
        raw = read_raw_bytes(node)
        if raw is not None:
            return b"b" + raw
        return self._encode_leaf(decode_numpy_scalar(node))


def compute_text_digest(text: str, _: str = "") -> str:
    """Return the digest of a text, equal to the result of `Digests.of`."""
    encoded = b"s" + text.encode("utf-8", "surrogatepass")
    return _format_digest(encoded if len(encoded) <= _MAX_VERBATIM_BYTES else _hash_parts([encoded]))


def _list_parts(node: object) -> Iterator[_Part]:
    """Yield the parts of a container or object: the kind of part (`key`, `attribute`), its name if any, its value."""
    items, elements = as_mapping(node), None
    if items is not None:
        yield from ((b"key", (key.value if type(key) is Key else key, value)) for key, value in items.items())
    else:
        elements = as_sequence(node)
        yield from ((b"", (value,)) for value in elements or ())
    if type(node) is Obj:
        if type(node.cls) is not Global:
            yield b"class", (node.cls,)
        yield from ((b"attribute", pair) for pair in select_own_attributes(node).items())
        yield from ((b"argument", (value,)) for value in select_own_arguments(node))
        yield from ((b"keyword", pair) for pair in (node.kwargs or {}).items())
        if get_unusual_state(node) is not None:
            yield b"state", (node.state,)


def select_own_attributes(node: object) -> dict[str, Any]:
    """Return an object's attributes without `_metadata` (module versions, which torch attaches to a state_dict)."""
    attributes = get_attributes(node)
    return (
        {name: value for name, value in attributes.items() if name != "_metadata"}
        if as_mapping(node) is not None
        else attributes
    )


def select_own_arguments(node: Obj) -> tuple[Any, ...]:
    """Return an object's constructor arguments. For a container, omit the arguments that are its items."""
    name = get_name(node.cls)
    if (as_mapping(node) is not None or as_sequence(node) is not None) and name.startswith(_PLAIN_CONTAINERS):
        return tuple(value for _, value in iter_loose_arguments(node) if type(value) not in LEAF_TYPES)
    if name.endswith("._reconstructor"):  # (class, its built-in base, content of the base)
        return tuple(argument for argument in node.args[2:] if argument is not None)
    return node.args


def get_unusual_state(node: Obj) -> Any:
    """Return the state that a pickle's BUILD opcode sets on an object, or None for a state of attributes only."""
    if node.state is None:
        return None
    pair = node.state if type(node.state) is tuple and len(node.state) == 2 else (node.state, None)
    mappings = [as_mapping(part) for part in pair if part is not None]
    has_only_attributes = all(items is not None and all(type(key) is str for key in items) for items in mappings)
    return None if has_only_attributes else node.state


def describe_kind(node: object) -> str:
    """Return `dict`, `list`, `set`, or the full name of an object's class."""
    if _is_set(node):
        return "set"
    if as_mapping(node) is not None:
        return "dict"
    if type(node) is Obj:
        cls = node.args[0] if get_name(node.cls).endswith("._reconstructor") and node.args else node.cls
        return get_name(cls) or "an object"
    return "list" if type(node) is tuple else type(node).__name__


def _is_set(node: object) -> bool:
    return type(node) is SetOf or (type(node) is Obj and get_name(node.cls).endswith((".set", ".frozenset")))


def decode_numpy_scalar(node: Obj) -> Any:
    """Return the number in a pickled numpy scalar (`multiarray.scalar(dtype, bytes)`), or None for other objects."""
    if not get_name(node.cls).endswith("multiarray.scalar") or len(node.args) != 2:
        return None
    raw = read_raw_bytes(node.args[1])
    return None if raw is None else read_number(node.args[0], raw)


def _join_framed(parts: Iterable[bytes]) -> bytes:
    return b"".join([b"%d:%b" % (len(part), part) for part in parts])


def _hash_parts(parts: Iterable[bytes]) -> bytes:
    """Return a hash of the parts. The hash begins with the byte `#`, unlike every leaf that is stored verbatim."""
    import hashlib  # a slow import, because loading OpenSSL takes longer than listing most checkpoints

    return b"#" + hashlib.sha256(_join_framed(parts)).digest()


def _format_digest(digest: bytes) -> str:
    return f"sha256 {_hash_parts([digest]).hex()[2:34]}"
