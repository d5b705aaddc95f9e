"""Compute Python's hashes of dictionary keys whose hashes a file can choose, to find keys with the same hash."""

from __future__ import annotations

from statecli.pickle_scan.expected_calls import get_plain_name
from statecli.pickles.nodes import Global, Obj, SetOf, Value

#: Depth to which nested tuples are hashed to find collisions; every deeper tuple counts as hash 0.
_MAX_HASHED_NESTING = 100


class KeyHashes:
    """Python's hashes of keys whose hashes a file can choose: numbers, and containers of numbers."""

    def __init__(self) -> None:
        #: Hashes of containers, by id, because many keys can share a container.
        self._cached_hashes: dict[int, int] = {}

    def compute_hash(self, value: Value, nesting: int = 0) -> int:
        """Return Python's hash of the value, or a constant shared by all values with unknown hashes."""
        if type(value) not in (tuple, list, SetOf, Obj):
            return 0 if type(value) is dict else hash(value)
        if nesting > _MAX_HASHED_NESTING:
            return 0
        if id(value) not in self._cached_hashes:
            self._cached_hashes[id(value)] = 0  # for a container that contains itself
            self._cached_hashes[id(value)] = self._hash_container(value, nesting + 1)
        return self._cached_hashes[id(value)]

    def _hash_container(self, value: Value, nesting: int) -> int:
        if type(value) in (tuple, list):
            return hash(tuple(self.compute_hash(child, nesting) for child in value))
        if type(value) is SetOf:
            return hash(frozenset(self.compute_hash(child, nesting) for child in value.elems))
        assert type(value) is Obj  # noqa: S101  # the only other container
        return self._hash_call(value, get_plain_name(value.cls) if type(value.cls) is Global else "", nesting)

    def _hash_call(self, call: Obj, name: str, nesting: int) -> int:
        """Return Python's hash of an object, or one hash for all objects of a class that may hash chosen numbers."""
        args = call.args
        if name == "builtins.complex" and args and all(type(arg) in (int, float) for arg in args[:2]):
            return hash(args[0]) + 1_000_003 * hash(args[1] if len(args) > 1 else 0)
        if name in ("torch.Size", "builtins.tuple", "builtins.frozenset") and args and type(args[0]) in (tuple, list):
            hashes = tuple(self.compute_hash(child, nesting) for child in args[0])
            return hash(frozenset(hashes) if name.endswith("frozenset") else hashes)
        if name.endswith(".multiarray.scalar") and len(args) > 1:
            return hash(name) if _is_hashed_by_sum(args[0]) else self.compute_hash(args[1], nesting)
        if not reads_contents(call):
            return id(call)
        if name.startswith(_HASHED_BY_CONTENT):
            state = call.state.values() if type(call.state) is dict else (call.state,)
            return hash((name, *(self.compute_hash(child, nesting) for child in (*args, *state))))
        return hash(name)


def reads_contents(key: Value) -> bool:
    """Return True if the hash of a key depends on its contents; the hash of a tensor is its address."""
    name = get_plain_name(key.cls) if type(key) is Obj and type(key.cls) is Global else ""
    by_address = name.startswith(_HASHED_BY_ADDRESS) and name != "torch.nn.utils.rnn.PackedSequence_"
    by_address = by_address or (name.startswith("torch.") and name.endswith(("Storage", "Tensor")))
    return type(key) in (tuple, SetOf, Obj) and not by_address


#: Classes whose objects hash the tuple of their parts, or text or bytes; Python hashes text with a key that nobody
#: outside the process knows.
_HASHED_BY_CONTENT = (
    *("builtins.str", "builtins.bytes", "numpy.str_", "pathlib.", "datetime.", "_codecs.encode"),
    *("torch.", "numpy.dtype", "collections.UserString"),
)
#: Classes and functions whose objects are hashed by address: tensors, modules, optimizers and storages.
_HASHED_BY_ADDRESS = ("torch._utils._rebuild_", "torch._tensor.", "torch.nn.", "torch.optim.", "torch.storage.")


def _is_hashed_by_sum(dtype: Value) -> bool:
    """Return True if numpy hashes the number as a sum of two hashes, so many numbers collide."""
    kind = dtype.args[0] if type(dtype) is Obj and dtype.args else None
    return type(kind) is not str or kind[:1] in "cgGVO"
