"""What a training checkpoint says beside its tensors: epoch, step, lr, hyper-parameters, as numbers and words.

Nothing is passed over: what is too long, too deep or too strange to be told in a word is told as what it is and a
digest of its content, so that two of them can be compared.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

from statecli.formats._graph import attributes, children, dotted, entries, key_path, mapping, name_of, sequence
from statecli.formats._pickle import Global, Obj, Persistent, SetOf
from statecli.formats._reading import Reading
from statecli.formats._sections import MAX_SECTION_DEPTH
from statecli.formats._tensors import raw_bytes
from statecli.state import Scalar

#: Characters of a settings container's path.
MAX_SETTING = 1_000
#: Settings that are told one by one, and containers that are opened for them.
MAX_METADATA = 20_000
#: Entries of a list that are told one by one.
MAX_LISTED = 64
#: Characters and bits of a value that is told whole.
MAX_TEXT = 1_000
MAX_BITS = 1_024
#: Entries of containers that are looked at, those of a shared one each time.
MAX_LOOKED_AT = 500_000
#: Nodes that go into digests.
MAX_DIGESTED = 2_000_000

_SCALARS = frozenset([str, int, float, bool, type(None)])
#: numpy's type codes that `struct` reads.
_NUMPY = {"f2": "e", "f4": "f", "f8": "d", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "b1": "?"}
_NUMPY |= {"u1": "B", "u2": "H", "u4": "I", "u8": "Q"}


def scalars(root: Any, reading: Reading) -> dict[str, Scalar]:
    """Settings by dotted path; tensors left out."""
    found: dict[str, Scalar] = {}
    digests = _Digests(reading)
    looked_at = 0
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    while stack:
        path, node, depth = stack.pop()
        below = []
        for key, child in _entries(node):
            if _is_tensor(child, reading):
                continue
            looked_at += 1
            if len(path) > MAX_SETTING or len(found) == MAX_METADATA or looked_at > MAX_LOOKED_AT:
                # Containers may hold each other and be shared without end; what they hold is one thing all the same.
                found["(and more)"] = digests.told(root, "the file")
                return found
            where = _free(dotted(path, key), path, key, found)
            if type(child) in _SCALARS:
                found[where] = digests.scalar(child)
            elif depth < MAX_SECTION_DEPTH and _is_listed(child):
                below.append((where, child, depth + 1))
            else:
                found[where] = digests.told(child, where)
        stack.extend(reversed(below))
    return found


def _free(where: str, path: str, key: Any, found: dict[str, Scalar]) -> str:
    """A dotted path that is not taken: {'a.b': 1, 'a': {'b': 2}} has two of one."""
    return where if where not in found else f"{path}{key_path(key) or '[?]'}"


def _entries(node: Any) -> Iterable[tuple[Any, Any]]:
    if mapping(node) is not None or sequence(node) is not None:
        return entries(node)
    return attributes(node).items()


def _is_tensor(node: Any, reading: Reading) -> bool:
    return type(node) is Persistent or reading.decoder.is_tensor(node)


def _is_listed(node: Any) -> bool:
    if mapping(node) is not None:
        return True
    if type(node) in (list, tuple):
        return len(node) <= MAX_LISTED
    return type(node) is Obj and sequence(node) is None and bool(attributes(node))


def _scalar(value: Any) -> Scalar:
    if type(value) is float and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if type(value) is int and abs(value) >= 2**63:
        bits = value.bit_length()
        return str(value) if bits <= MAX_BITS else f"an integer of {bits} bits, {_hash([hex(value)])}"
    return value  # type: ignore[no-any-return]


def _kind(node: Any) -> str:
    if _is_set(node):
        return "set"
    if mapping(node) is not None:
        return "dict"
    if type(node) is Obj:
        return name_of(node.cls).replace("__builtin__.", "builtins.") or "an object"
    return "list" if type(node) is tuple else type(node).__name__


def _numpy_scalar(node: Obj) -> Any:
    """The number in `numpy.core.multiarray.scalar(dtype('f8'), b'...')`, as best_metric often is."""
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


def _call(node: Obj) -> str | None:
    """`torch.device('cuda', 0)`: an object that is no more than a short call."""
    plain = all(type(arg) in _SCALARS for arg in node.args)
    if not plain or node.state is not None or node.items is not None or node.elems is not None or node.kwargs:
        return None
    text = f"{_kind(node)}({', '.join(_short(arg) for arg in node.args)})"
    return text if len(text) <= 200 else None


def _short(value: Any) -> str:
    if type(value) is int and abs(value) >= 2**63:
        return str(_scalar(value))
    return repr(value) if type(value) is not str or len(value) <= 200 else " " * 201


class _Digests:
    """What cannot be listed, in a few words with a digest of its content.

    The digest of a container is made of those of what it holds, so that what is shared counts as if it were not, each
    node is read once, and equal contents have equal digests: the order of a dict and of a set means nothing, a list is
    a tuple, 1 is 1.0.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._known: dict[int, str] = {}
        self._left = MAX_DIGESTED

    def told(self, node: Any, where: str) -> Scalar:
        """A number that numpy or a short call stands for, else a kind, a length and a digest."""
        raw = raw_bytes(node)
        if raw is not None:
            return f"{len(raw)} bytes, {self._leaf(node)}"
        if type(node) is Obj:
            number = _numpy_scalar(node)
            if number is not None:
                return self.scalar(number)
            called = _call(node)
            if called is not None:
                return called
        held = sequence(node)
        count = "" if held is None else f" of {len(held)}"
        return f"{_kind(node)}{count}, {self._digest(node, where)}"

    def scalar(self, value: Any) -> Scalar:
        """Itself, or where it is long its beginning and a digest."""
        if type(value) is str and len(value) > MAX_TEXT:
            return f"{len(value)} characters, {self._leaf(value)}: {value[: MAX_TEXT - 60]}..."
        return _scalar(value)

    def _digest(self, root: Any, where: str) -> str:
        """The containers below first, each once; one that holds itself stands there as such."""
        stack: list[tuple[Any, list[tuple[str, Any]] | None]] = [(root, None)]
        begun: set[int] = set()
        while stack:
            node, held = stack.pop()
            if id(node) in self._known:
                continue
            if held is None:
                held = [] if self._left < 0 else list(_held(node))
                self._left -= 1 + len(held)
                begun.add(id(node))
                stack.append((node, held))
                stack.extend((child, None) for _, child in held if id(child) not in begun and not self._is_leaf(child))
                continue
            parts = [f"{label}={self._known.get(id(child)) or self._leaf(child)}" for label, child in held]
            self._known[id(node)] = _hash([_kind(node), *(sorted(parts) if _is_unordered(node) else parts)])
        if self._left < 0:
            message = f"{where} and what follows hold more than {MAX_DIGESTED:,} entries; only the first are read"
            self._reading.odd("metadata-cut", message)
        return self._known[id(root)]

    def _is_leaf(self, node: Any) -> bool:
        if type(node) in _SCALARS or type(node) in (Global, bytes) or _is_tensor(node, self._reading):
            return True
        return type(node) is Obj and (raw_bytes(node) is not None or _numpy_scalar(node) is not None)

    def _leaf(self, node: Any) -> str:
        if _is_tensor(node, self._reading):
            return "tensor"  # compared as such
        if not self._is_leaf(node):
            return "itself"
        number = _numpy_scalar(node) if type(node) is Obj else None
        value = node if number is None else number
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int:
            return hex(value)
        raw = raw_bytes(value)
        if raw is None and (type(value) is not str or len(value) <= MAX_TEXT):
            return name_of(value) or repr(value)
        if id(node) not in self._known:
            self._left -= len(value if raw is None else raw) >> 4
            self._known[id(node)] = _hash([value if raw is None else raw.hex()])
        return self._known[id(node)]


def _held(node: Any) -> Iterator[tuple[str, Any]]:
    if _is_set(node):
        return (("", child) for child in sequence(node) or ())
    return children(node)


def _is_unordered(node: Any) -> bool:
    return _is_set(node) or mapping(node) is not None


def _is_set(node: Any) -> bool:
    return type(node) is SetOf or (type(node) is Obj and name_of(node.cls).endswith((".set", ".frozenset")))


def _hash(parts: Iterable[str]) -> str:
    import hashlib

    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass"))
    return f"sha256 {digest.hexdigest()[:16]}"
