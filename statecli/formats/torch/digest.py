"""Digests of what a pickle holds beside its tensors: equal contents have equal ones, others have others.

The order of a dict and of a set means nothing, a list is a tuple, 1 is 1.0 and True is not; what is shared counts as
if it were copied. Every part is written with its type and its length, so that no two contents are written alike.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from statecli.formats.torch.reading import Reading
from statecli.formats.torch.tensors import raw_bytes
from statecli.pickles.graph import LEAVES, attributes, loose_arguments, mapping, name_of, sequence
from statecli.pickles.machine import Global, Key, Obj, Persistent, SetOf

#: Entries that go into digests, those of a cycle each time they are looked at.
MAX_DIGESTED = 2_000_000
#: Containers in containers in containers. Python's own pickler ends at 1,000, or where its recursion limit is set.
MAX_NESTED = 10_000
#: Entries that take as long to read as a container by itself.
_CONTAINER = 6
#: Bytes of a leaf that is written as it is; of a longer one its hash, which is made once.
_SHORT = 64

_SCALARS = frozenset([str, int, float, bool, type(None)])
#: numpy's type codes that `struct` reads.
_NUMPY = {"f2": "e", "f4": "f", "f8": "d", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "b1": "?"}
_NUMPY |= {"u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
#: Containers whose arguments are their content, or nothing that `==` looks at: a default, a length to keep.
_PLAIN = ("collections.", "builtins.", "__builtin__.", "torch.Size")

#: What is held under one name: the name's type, and the nodes (key and value, or the value alone).
_Part = tuple[bytes, tuple[Any, ...]]


class Digests:
    """The digests of one file's settings. Each container is read once, however often it is shared."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._known: dict[int, bytes] = {}
        self._left = MAX_DIGESTED
        self._said = False
        self._is_deep = False
        self._kept: list[Any] = []

    def of(self, node: Any, where: str) -> str:
        """`sha256` and 128 bits of it. What is beyond `MAX_DIGESTED` is left out, and an oddity says so."""
        if not self.is_leaf(node) and id(node) not in self._known:
            self._read(node)
        if self._left < 0 and not self._said:
            self._said = True
            entries = f"hold more than {MAX_DIGESTED:,} entries (a container counts as {_CONTAINER})"
            limit = f"nest more than {MAX_NESTED:,} containers" if self._is_deep else entries
            message = f"{where} and what follows {limit}; only the first are read"
            self._reading.odd("metadata-cut", message)
        return _shown(self._leaf(node))

    def keep(self, node: Any) -> Any:
        """The node, which is then known by its address for as long as these digests are."""
        self._kept.append(node)
        return node

    def is_tensor(self, node: Any) -> bool:
        """Whether this is no setting but a tensor, or a part of one, which is compared as such."""
        return type(node) is Persistent or self._reading.decoder.is_tensor(node)

    def is_leaf(self, node: Any) -> bool:
        """Whether nothing hangs below that would be a setting."""
        if type(node) in _SCALARS or type(node) in (Global, bytes) or self.is_tensor(node):
            return True
        return type(node) is Obj and (raw_bytes(node) is not None or numpy_scalar(node) is not None)

    def _read(self, root: Any) -> None:
        """Tarjan's algorithm: containers that hold each other come together, and after all that they hold."""
        number: dict[int, int] = {}
        lowest: dict[int, int] = {}
        opened: list[tuple[Any, list[_Part]]] = []
        frames: list[tuple[Any, Iterator[Any]]] = []
        entered = root
        while True:
            if entered is not None:
                held = self._parts(entered)
                below = self._below(held)
                if not below:
                    self._known[id(entered)] = self._container(entered, held, {})
                else:
                    number[id(entered)] = lowest[id(entered)] = len(number)
                    opened.append((entered, held))
                    frames.append((entered, iter(below)))
                    if len(frames) > MAX_NESTED:
                        self._is_deep, self._left = True, -1
            if not frames:
                return
            node, rest = frames[-1]
            entered = self._next(node, rest, number, lowest)
            if entered is not None:
                continue
            frames.pop()
            if frames:
                above = id(frames[-1][0])
                lowest[above] = min(lowest[above], lowest[id(node)])
            if lowest[id(node)] == number[id(node)]:
                start = next(at for at in range(len(opened) - 1, -1, -1) if opened[at][0] is node)
                self._settle(opened[start:])
                del opened[start:]

    def _next(self, node: Any, rest: Iterator[Any], number: dict[int, int], lowest: dict[int, int]) -> Any:
        """The next container below that was not entered yet; None where all were. Those that are open reach up."""
        for child in rest:
            if id(child) in self._known:
                continue
            if id(child) not in number:
                return child
            lowest[id(node)] = min(lowest[id(node)], number[id(child)])
        return None

    def _parts(self, node: Any) -> list[_Part]:
        """What a container holds; nothing where too much was read already."""
        if self._left < 0:
            return []
        self._left -= _CONTAINER
        if type(node) in (list, tuple):
            self._left -= len(node)
            return [(b"", (child,)) for child in node]
        held = list(_held(node))
        self._left -= len(held)
        return held

    def _below(self, held: list[_Part]) -> list[Any]:
        return [
            child for _, nodes in held for child in nodes if type(child) not in _SCALARS and not self.is_leaf(child)
        ]

    def _settle(self, together: list[tuple[Any, list[_Part]]]) -> None:
        first, held = together[0]
        if len(together) > 1 or any(child is first for child in self._below(held)):
            self._known.update(self._cycle([node for node, _ in together], [held for _, held in together]))
        else:
            self._known[id(first)] = self._container(first, held, {})

    def _cycle(self, together: list[Any], held: list[list[_Part]]) -> dict[int, bytes]:
        """Containers that hold each other, told apart until looking further tells no more apart.

        The classes of a round and what they hold say all of the cycle, wherever it was entered.
        """
        classes, seen = {id(node): b"itself" for node in together}, 1
        size = sum(map(len, held)) + _CONTAINER * len(held)
        while True:
            self._left -= size
            pairs = zip(together, held, strict=True)
            further = {id(node): self._container(node, parts, classes) for node, parts in pairs}
            every = set(further.values())
            if len(every) == seen or self._left < 0:
                whole = _hash(sorted(every))
                return {node: _hash([digest, whole]) for node, digest in further.items()}
            classes, seen = further, len(every)

    def _container(self, node: Any, held: list[_Part], classes: Mapping[int, bytes]) -> bytes:
        if type(node) in (list, tuple):
            return _hash([b"list", *(self._told(child, classes) for _, (child,) in held)])
        ordered: list[bytes] = [kind_of(node).encode("utf-8", "surrogatepass")]
        unordered: list[bytes] = []
        in_order = not _is_set(node)
        for tag, nodes in held:
            part = _framed([tag, *(self._told(one, classes) for one in nodes)])
            (ordered if in_order and len(nodes) == 1 else unordered).append(part)
        return _hash([_framed(ordered), *sorted(unordered)])

    def _told(self, node: Any, classes: Mapping[int, bytes]) -> bytes:
        return classes.get(id(node)) or self._leaf(node)

    def _leaf(self, node: Any) -> bytes:
        """What is known of a container, and of a leaf what it is."""
        known = self._known.get(id(node))
        if known is not None:
            return known
        text = self._written(node)
        if len(text) <= _SHORT:
            return text
        self._left -= len(text) >> 4
        self._known[id(self.keep(node))] = _hash([text])
        return self._known[id(node)]

    def _written(self, node: Any) -> bytes:
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
        raw = raw_bytes(node)
        if raw is not None:
            return b"b" + raw
        return self._written(numpy_scalar(node))


def of_text(text: str, _: str = "") -> str:
    """The digest of one text, as `Digests.of` has it."""
    written = b"s" + text.encode("utf-8", "surrogatepass")
    return _shown(written if len(written) <= _SHORT else _hash([written]))


def _held(node: Any) -> Iterator[_Part]:
    """What a container or an object holds: what has a name as name and value, what has a place alone, in order."""
    items, elements = mapping(node), None
    if items is not None:
        yield from ((b"key", (key.value if type(key) is Key else key, value)) for key, value in items.items())
    else:
        elements = sequence(node)
        yield from ((b"", (value,)) for value in elements or ())
    if type(node) is Obj:
        if type(node.cls) is not Global:
            yield b"class", (node.cls,)
        yield from ((b"attribute", pair) for pair in own_attributes(node).items())
        yield from ((b"argument", (value,)) for value in own_arguments(node))
        yield from ((b"keyword", pair) for pair in (node.kwargs or {}).items())
        if odd_state(node) is not None:
            yield b"state", (node.state,)


def own_attributes(node: Any) -> dict[str, Any]:
    """An object's attributes; not the versions of its modules, which torch hangs on a state_dict."""
    held = attributes(node)
    return {name: value for name, value in held.items() if name != "_metadata"} if mapping(node) is not None else held


def own_arguments(node: Obj) -> tuple[Any, ...]:
    """What an object was made with; () for a container that is what it holds."""
    name = name_of(node.cls)
    if (mapping(node) is not None or sequence(node) is not None) and name.startswith(_PLAIN):
        return tuple(value for _, value in loose_arguments(node) if type(value) not in LEAVES)
    if name.endswith("._reconstructor"):  # (class, its built-in base, what the base holds)
        return tuple(held for held in node.args[2:] if held is not None)
    return node.args


def odd_state(node: Obj) -> Any:
    """What BUILD gave an object, where it is more than its attributes; else None."""
    if node.state is None:
        return None
    pair = node.state if type(node.state) is tuple and len(node.state) == 2 else (node.state, None)
    held = [mapping(part) for part in pair if part is not None]
    plain = all(items is not None and all(type(key) is str for key in items) for items in held)
    return None if plain else node.state


def kind_of(node: Any) -> str:
    """`dict`, `list`, `set`, or the class of an object by its full name."""
    if _is_set(node):
        return "set"
    if mapping(node) is not None:
        return "dict"
    if type(node) is Obj:
        cls = node.args[0] if name_of(node.cls).endswith("._reconstructor") and node.args else node.cls
        return name_of(cls).replace("__builtin__.", "builtins.") or "an object"
    return "list" if type(node) is tuple else type(node).__name__


def _is_set(node: Any) -> bool:
    return type(node) is SetOf or (type(node) is Obj and name_of(node.cls).endswith((".set", ".frozenset")))


def numpy_scalar(node: Obj) -> Any:
    """The number in `numpy.core.multiarray.scalar(dtype('f8'), b'...')`, as best_metric often is; else None."""
    if not name_of(node.cls).endswith("multiarray.scalar") or len(node.args) != 2:
        return None
    dtype, raw = node.args[0], raw_bytes(node.args[1])
    if raw is None:
        return None
    code = dtype.args[0] if type(dtype) is Obj and dtype.args else None
    form = _NUMPY.get(code) if type(code) is str else None
    state = dtype.state if type(dtype) is Obj and type(dtype.state) is tuple else ()
    order = ">" if ">" in state else "<"
    if form is None or struct.calcsize(order + form) != len(raw):
        return None
    return struct.unpack(order + form, raw)[0]


def _framed(parts: Iterable[bytes]) -> bytes:
    return b"".join([b"%d:%b" % (len(part), part) for part in parts])


def _hash(parts: Iterable[bytes]) -> bytes:
    """A hash, told from whatever is written as it is by its first byte."""
    import hashlib  # OpenSSL below it takes longer to load than most checkpoints to list

    return b"#" + hashlib.sha256(_framed(parts)).digest()


def _shown(told: bytes) -> str:
    return f"sha256 {_hash([told]).hex()[2:34]}"
