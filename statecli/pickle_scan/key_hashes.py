"""Find dictionary keys with the same hash, because a file can choose many of them.

Python's hash is computed for texts, numbers and tuples. All other keys that a file may choose, such as frozensets,
decimals and UUIDs, count as keys with the same hash: checkpoints do not have thousands of them in a dict.
"""

from __future__ import annotations

from collections.abc import Iterable

from statecli.pickle_scan import exceptions
from statecli.pickle_scan.expected_calls import get_plain_name, is_clean, is_copyreg_call
from statecli.pickles.nodes import Global, Obj, SetOf, Value

#: Depth to which nested tuples are hashed to find collisions; deeper tuples have the unknown hash.
_MAX_HASHED_NESTING = 100
#: Hash of all values whose hashes a file may choose, and of all tuples with such a value. Usual numbers differ.
_UNKNOWN_HASH = 1_234_567_890_123_456_789


class _Hashed:
    """Stand-in for a container's element with a known hash; it equals only itself."""

    __slots__ = ("_hash",)

    def __init__(self, number: int) -> None:
        self._hash = number

    def __hash__(self) -> int:
        return self._hash


class KeyHashes:
    """Hashes of keys. Keys with the same hash in Python have the same hash here."""

    def __init__(self) -> None:
        #: Hashes of containers, by id, because many keys can share a container.
        self._cached_hashes: dict[int, int] = {}

    def compute_hash(self, value: Value, nesting: int = 0) -> int:
        """Return Python's hash of the value, or one hash for all values whose hashes a file may choose."""
        if type(value) not in (tuple, list, Obj):
            return _UNKNOWN_HASH if type(value) in (dict, SetOf) else hash(value)
        if nesting > _MAX_HASHED_NESTING:
            return _UNKNOWN_HASH
        if id(value) not in self._cached_hashes:
            self._cached_hashes[id(value)] = _UNKNOWN_HASH  # for a container that contains itself
            self._cached_hashes[id(value)] = (
                self._hash_call(value, nesting + 1) if type(value) is Obj else self._hash_tuple(value, nesting + 1)
            )
        return self._cached_hashes[id(value)]

    def _hash_tuple(self, children: Iterable[Value], nesting: int) -> int:
        hashes = [self.compute_hash(child, nesting) for child in children]
        return _UNKNOWN_HASH if _UNKNOWN_HASH in hashes else hash(tuple(map(_Hashed, hashes)))

    def _hash_call(self, call: Obj, nesting: int) -> int:
        """Return the hash of the object that a call creates; or the unknown hash."""
        name, args = _get_class_name(call), call.args
        if name in ("torch.Size", "builtins.tuple") and args and type(args[0]) in (tuple, list):
            return self._hash_tuple(args[0], nesting)
        if name.endswith(".multiarray.scalar") and len(args) > 1:
            return _UNKNOWN_HASH if _is_hashed_by_sum(args[0]) else self.compute_hash(args[1], nesting)
        if not reads_contents(call):
            return id(call)
        if name.startswith(_HASHED_BY_CONTENT):
            state = call.state.values() if type(call.state) is dict else (call.state,)
            hashes = [self.compute_hash(child, nesting) for child in (*args, *state)]
            return _UNKNOWN_HASH if _UNKNOWN_HASH in hashes else hash((name, *hashes))
        return _UNKNOWN_HASH


def reads_contents(key: Value) -> bool:
    """Return True if Python hashes a key by its contents, False if by its address, as for a tensor."""
    return type(key) in (tuple, SetOf) or (type(key) is Obj and not _is_hashed_by_address(_get_class_name(key)))


def _is_hashed_by_address(name: str) -> bool:
    """Return True for a class whose objects Python hashes by address, as it probably does for unknown classes.

    Most classes keep the hash of `object`, and other hashes depend on code that statecli does not know.
    """
    if name == "torch.nn.utils.rnn.PackedSequence_":
        return False
    is_tensor = name.startswith("torch.") and name.endswith(("Storage", "Tensor"))
    return is_tensor or name.startswith(_HASHED_BY_ADDRESS) or exceptions.is_exception(name) or not is_clean(name)


def _get_class_name(call: Obj) -> str:
    cls = call.args[0] if is_copyreg_call(call) else call.cls
    return get_plain_name(cls) if type(cls) is Global else ""


#: Classes whose objects hash the tuple of their parts, or text or bytes; Python hashes text with a key that nobody
#: outside the process knows.
_HASHED_BY_CONTENT = (
    *("builtins.str", "builtins.bytes", "numpy.str_", "pathlib.", "datetime.", "_codecs.encode"),
    *("torch.", "numpy.dtype", "collections.UserString", "re._compile"),
)
#: Classes and functions whose objects are hashed by address: tensors, modules, optimizers and storages.
_HASHED_BY_ADDRESS = (
    *("torch._utils._rebuild_", "torch._tensor.", "torch.nn.", "torch.optim.", "torch.storage."),
    *("builtins.object", "functools.partial"),
)


def _is_hashed_by_sum(dtype: Value) -> bool:
    """Return True if numpy hashes a scalar of this dtype as a sum of two hashes, so that many values collide."""
    kind = dtype.args[0] if type(dtype) is Obj and dtype.args else None
    return type(kind) is not str or kind[:1] in "cgGVO"
