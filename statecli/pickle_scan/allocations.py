"""Find pickles that allocate more memory than the file's size explains, or whose keys take too long to hash.

`bytearray(2**36)` is 30 bytes of pickle and 64 GiB of memory. A tuple with itself as two items, 64 levels deep, takes
2**64 steps to hash. Nothing here allocates or hashes: sizes are computed from the arguments of each call. Ordinary
picklers write all data, so a call allocates at most a few times the size of its pickle. A call with a computed
argument, such as `list(range(2**40))`, is a misuse of its name (`call_flow`), and is not measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from statecli.core.dtypes import ELEMENT_BITS, STORAGE_DTYPES, VALUES_PER_BYTE
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Bomb
from statecli.pickle_scan.expansion import CONTAINER_TYPES, MAX_SIZE, Expansion, Expansions
from statecli.pickle_scan.expected_calls import (
    MAX_INDIRECT_CALLS,
    get_plain_name,
    is_clean,
    iter_indirect_calls,
    list_parts,
)
from statecli.pickle_scan.key_hashes import KeyHashes, reads_contents
from statecli.pickle_scan.regex_steps import count_pattern_steps
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.machine_state import LONG_INTEGER
from statecli.pickles.nodes import Build, Global, Key, Obj, Persistent, SetOf, Value

#: Limit of the bytes that loading a pickle may allocate: a fixed part, and a part for each byte of the pickle.
_ALLOWED_BYTES = 16 * 2**20
_ALLOWED_BYTES_PER_PICKLE_BYTE = 64
#: Highest compression ratio of a zip archive: bytes of data that one byte of the file can hold.
_MAX_COMPRESSION_RATIO = 1032
#: Largest number of steps to hash all keys of one pickle; they take a few seconds.
_MAX_HASH_STEPS = 50_000_000
#: Modules whose classes store a state without reading it: the metadata of a checkpoint has millions of their objects.
#: `expected_calls` checks the states of their TensorProperties.
_STORING_MODULES = "torch.distributed.checkpoint."
#: Length from which a tuple or a list of plain values is measured.
_FLAT_LENGTH = 64
_PLAIN_TYPES = frozenset([int, float, bool, type(None)])
#: Squared bytes of an integer that cost one step, because Python divides long integers digit by digit.
_SQUARED_BYTES_PER_STEP = 1000
#: Largest nesting of tuples in a key, and of objects; deeper nesting overflows the stack of Python.
_MAX_NESTING = 10_000
#: Largest number of keys with the same hash in a dict or set, because each key is compared with all earlier ones.
_MAX_COLLISIONS = 5_000
#: Largest number of keys with the same hash, times the number of values in these keys.
_MAX_COMPARED_VALUES = 400_000_000
#: Largest number of steps to compile the regular expressions of one pickle; 5 million steps take about a second.
_MAX_PATTERN_STEPS = 20_000_000
#: Bytes of a pointer, and of an entry in the unpickler's memo.
_POINTER_BYTES, _MEMO_ENTRY_BYTES = 8, 16
#: Bytes of a 0-dimensional tensor object, because iterating over a tensor creates one for each element.
_TENSOR_OBJECT_BYTES = 640
#: Numbers of a shape that cost one step.
_DIMENSIONS_PER_STEP = 16

#: Classes that copy the elements of their argument.
_COPIERS = frozenset(
    [
        *(f"builtins.{name}" for name in ("list", "tuple", "set", "frozenset", "dict")),
        *(f"collections.{name}" for name in ("deque", "UserList", "Counter", "OrderedDict", "defaultdict")),
        "torch.Size",
    ]
)
_HASHING_CLASSES = frozenset(["builtins.set", "builtins.frozenset", "collections.Counter"])
#: Classes that allocate N bytes if they are called with the number N.
_BYTES_CLASSES = frozenset(
    ["builtins.bytes", "builtins.bytearray"] + [f"numpy.{name}" for name in ("bytes_", "void", "record", "rec.record")]
)
_DICT_CLASSES = frozenset(["builtins.dict", "collections.OrderedDict", "collections.defaultdict"])
_TENSOR_FUNCTION = "torch._utils._rebuild_tensor"
#: Functions that write out every element of their tensor argument, also the elements that share a part of a storage.
_COPYING_FUNCTIONS = compile_on_use(r"torch\._utils\._rebuild_(?:device_tensor_\w+|xla_tensor)")
#: Classes of Python and numpy that have no `__dict__`.
_CLASSES_WITHOUT_DICT = ("numpy.", "random.", "array.", "decimal.", "fractions.")


class _TensorSize(msgspec.Struct, frozen=True):
    """Size of a tensor and of its storage, in elements; `key` identifies the storage."""

    elements: int
    stored_elements: int
    key: Value


class Allocations:
    """Sizes of the objects that loading a pickle creates."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        #: Bytes that calls allocate, by the id of the name that is called.
        self._bytes_by_name: Counter[int] = Counter()
        self._names_by_id: dict[int, Global] = {}
        #: Keys of the storages that a call has copied: the bytes in the file are subtracted only for the first copy.
        self._copied_storages: set[Value] = set()
        #: Smallest size in bytes that the pickle states for each storage, by its key: torch uses the first description.
        self._bytes_by_storage: dict[Value, int] = {}
        self._hashed = Expansions(steps, reads_contents)
        self._arguments = Expansions(steps, _is_written_out, counts_texts=True)
        self._states = Expansions(steps, _is_written_out)
        self._keys: list[tuple[int, Value]] = []
        self._hashes = KeyHashes()
        #: First name that gets containers with too large an expansion.
        self._expanding_name: Global | None = None
        #: Steps of all calls with long integers, and the byte of the first name that is called with one.
        self._number_steps, self._number_position = 0, 0
        #: Names of the calls that compile regular expressions, and the steps of all compilations.
        self._patterns: list[Global] = []
        self._pattern_steps = 0

    def add_keys(self, holder: Value, keys: Iterable[Value]) -> None:
        """Record the keys of a dict, or the elements of a set, whose hashes may be costly."""
        for key in keys:
            value = key.value if type(key) is Key else key
            if type(value) in (tuple, int, float, Obj, SetOf):
                self._keys.append((id(holder), value))

    def find_bombs(
        self, calls: Sequence[Obj], builds: Iterable[Build], pickle_bytes: int, highest_memo: int
    ) -> Iterator[Bomb]:
        """Yield calls that allocate too much memory and keys that take too long to hash. Raises OutOfSteps."""
        for call in calls:
            if type(call.cls) is Global:
                self._count_call(call, call.cls, 0)
                self._measure_arguments(call, call.cls)
        for target, state in builds:
            self._count_state(target, state)
            self._measure_state(target, state)
        limit = _ALLOWED_BYTES + _ALLOWED_BYTES_PER_PICKLE_BYTE * pickle_bytes
        large = [(size, key) for key, size in self._bytes_by_name.items() if size > limit]
        if not large and self._bytes_by_name and self._bytes_by_name.total() > limit:
            large = [(self._bytes_by_name.total(), self._bytes_by_name.most_common(1)[0][0])]
        for size, key in large:
            name = self._names_by_id[key]
            yield Bomb(f"allocates {_format_bytes(size)} in calls to {name.qualified}", name.position)
        if highest_memo * _MEMO_ENTRY_BYTES > limit:
            yield Bomb(
                f"allocates {_format_bytes(highest_memo * _MEMO_ENTRY_BYTES)} of memory, because the pickle "
                f"stores an object at memo index {highest_memo:,}",
                0,
            )
        if self._pattern_steps > _MAX_PATTERN_STEPS:
            why = f"needs more than {_MAX_PATTERN_STEPS:,} steps to compile regular expressions; loading may hang"
            yield Bomb(why, self._patterns[0].position)
        if (reason := self._explain_slow_keys()) is not None:
            yield Bomb(reason, 0)
        elif self._expanding_name is not None:
            why = (
                f"passes containers that share elements to {self._expanding_name.qualified}; as text, for example in "
                f"an error message, the containers have more than {_MAX_HASH_STEPS:,} values; loading may hang"
            )
            yield Bomb(why, self._expanding_name.position)
        if self._number_steps > _MAX_HASH_STEPS:
            why = f"needs more than {_MAX_HASH_STEPS:,} steps to compute with long integers; loading may hang"
            yield Bomb(why, self._number_position)
        nested_call = _find_too_deep_call(calls, self._steps) if len(calls) > _MAX_NESTING else None
        if nested_call is not None:
            why = (
                f"creates objects nested more than {_MAX_NESTING:,} levels deep; Python crashes when it frees these "
                "objects (stack overflow)"
            )
            yield Bomb(why, nested_call.position)

    def find_storage_bombs(self, storages: Iterable[Persistent], file_bytes: int) -> Iterator[Bomb]:
        """Yield a Bomb if a file is too small for its storages, or if several storages load the same record.

        torch keeps each storage by its key. torch's zip reader ends a name at the first NUL and ignores case. So the
        keys "0" and "0\0a" are two storages of the same record.
        """
        sizes: dict[Value, int] = {}
        records: set[str] = set()
        total, repeated_bytes = 0, 0
        bytes_by_class: dict[int, int] = {}
        for storage in storages:
            pid = _read_storage(storage)
            if not pid or pid[3] == "meta":
                continue
            key = pid[2] if type(pid[2]) is str else _get_storage_key(pid)
            if id(pid[1]) not in bytes_by_class:
                bytes_by_class[id(pid[1])] = _get_element_bytes(pid[1].name)
            size = pid[4] * bytes_by_class[id(pid[1])]
            self._bytes_by_storage[key] = min(size, self._bytes_by_storage.get(key, size))
            if sizes.get(key, 0) >= size:
                continue
            total += size - sizes.get(key, 0)
            record = str(key, "latin-1") if type(key) is bytes else str(key)
            record = record if record.isdecimal() else record.partition("\0")[0].casefold()
            repeated_bytes += size if record in records and key not in sizes else 0
            sizes[key] = size
            records.add(record)
            if max(size, total) > _ALLOWED_BYTES + _MAX_COMPRESSION_RATIO * file_bytes:
                noun = "a storage" if size > total - size else f"{len(sizes):,} storages"
                yield Bomb(
                    f"allocates {_format_bytes(total)} for {noun}, but the file has only {_format_bytes(file_bytes)}",
                    pid[1].position,
                )
                return
            if repeated_bytes > _ALLOWED_BYTES:
                why = (
                    f"loads the record {record} again for each of several storages, so a small file can fill the memory"
                )
                yield Bomb(why, pid[1].position)
                return

    # Calls.

    def _count_call(self, call: Obj, name: Global, depth: int) -> None:
        """Count the bytes that a call allocates itself, or by calling functions among its arguments."""
        plain_name = get_plain_name(name)
        self._steps.take(Budget.FLOW)
        if plain_name == "re._compile" and call.args:
            self._patterns.append(name)
            self._pattern_steps += count_pattern_steps(*(*call.args, 0)[:2])
        self._add_bytes(name, self._measure_call(plain_name, call.args))
        self._count_long_numbers(name, plain_name, call.args)
        for indirect in iter_indirect_calls(plain_name, call.args) if depth < MAX_INDIRECT_CALLS else ():
            if type(indirect.cls) is Global:
                self._count_call(indirect, indirect.cls, depth + 1)

    def _count_long_numbers(self, name: Global, plain_name: str, args: tuple[Value, ...]) -> None:
        """Count the steps of a call whose work is quadratic in the length of its numbers, such as a division."""
        for number in args if is_clean(plain_name) else ():
            if type(number) is Obj and number.cls is LONG_INTEGER:
                self._number_position = self._number_position or name.position
                self._number_steps += len(number.args[0]) ** 2 // _SQUARED_BYTES_PER_STEP

    def _measure_arguments(self, call: Obj, name: Global) -> None:
        """Measure the arguments of a call. The called function may hash these or show them in an error message."""
        for value in (call.args, call.kwargs):
            if value and not _is_nearly_flat(value):
                self._note_expansion(name, self._arguments.measure(value).size)
        if get_plain_name(name) == "types.GenericAlias":  # searches its arguments for type variables
            self._keys.append((id(call), call.args))

    def _measure_state(self, target: Value, state: Value) -> None:
        """Measure the state of an object. Its class may hash the state or show it in an error message."""
        if type(target) is not Obj or type(target.cls) is not Global or type(state) not in CONTAINER_TYPES:
            return
        if not target.cls.module.startswith(_STORING_MODULES):
            self._note_expansion(target.cls, self._states.measure(state).size)

    def _note_expansion(self, name: Global, size: int) -> None:
        if size > _MAX_HASH_STEPS and self._expanding_name is None:
            self._expanding_name = name

    def _add_bytes(self, name: Global, size: int) -> None:
        if size > 0:
            self._names_by_id[id(name)] = name
            self._bytes_by_name[id(name)] = min(self._bytes_by_name[id(name)] + size, MAX_SIZE)

    def _measure_call(self, name: str, args: tuple[Value, ...]) -> int:
        first = args[0] if args else None
        if name in _BYTES_CLASSES:
            return first if type(first) is int else 0
        if name in _COPIERS:
            self._add_element_keys(name, args)
            return _POINTER_BYTES * max((len(arg) for arg in args if type(arg) in (list, tuple, dict)), default=0)
        if name == "logging.getLogger" and type(first) is str:
            return first.count(".") * len(first) // 2
        if name.startswith(_TENSOR_FUNCTION) and len(args) > 3:
            dtype = args[6] if name.endswith("_v3") and len(args) > 6 else None
            return self._count_grown_bytes(args[0], args[1], args[2], args[3], dtype)
        if name == "torch._utils._rebuild_qtensor" and len(args) > 3:
            quantizer = args[4] if len(args) > 4 and type(args[4]) is tuple else ()
            scales = sum(self._count_written_bytes(part) for part in quantizer if type(part) is Obj)
            grown = self._count_grown_bytes(args[0], args[1], args[2], args[3])
            return self._count_repeated_bytes(args[0], args[2]) + scales + grown
        if name == "torch._utils._rebuild_nested_tensor":
            sizes = (self._measure_tensor(tensor) for tensor in args[1:])
            return sum(max(0, size.elements - size.stored_elements) * _TENSOR_OBJECT_BYTES for size in sizes)
        return self._count_written_bytes(first) if _COPYING_FUNCTIONS.fullmatch(name) else 0

    def _count_written_bytes(self, tensor: Value) -> int:
        """Return how many bytes a copy of all elements needs beyond the bytes of the tensor's storage in the file."""
        size = self._measure_tensor(tensor)
        stored = 0 if size.key in self._copied_storages else size.stored_elements
        self._copied_storages.add(size.key)
        return max(0, size.elements - stored) * _POINTER_BYTES

    def _measure_tensor(self, tensor: Value) -> _TensorSize:
        """Return the size of a tensor rebuilt from a storage: `MAX_SIZE` elements if unknown, 0 for a numpy array."""
        name = get_plain_name(tensor.cls) if type(tensor) is Obj and type(tensor.cls) is Global else ""
        if name.startswith("numpy."):
            return _TensorSize(0, 0, None)
        if not name.startswith(_TENSOR_FUNCTION) or len(tensor.args) < 4:
            return _TensorSize(MAX_SIZE, 0, None)
        pid = _read_storage(tensor.args[0])
        key, stored_elements = (_get_storage_key(pid), pid[4]) if pid else (None, 0)
        return _TensorSize(self._count_elements(tensor.args[2]), stored_elements, key)

    def _count_elements(self, shape: Value) -> int:
        sizes = self._read_numbers(shape)
        return MAX_SIZE if sizes is None else _clamp(math.prod(sizes)) if all(size > 0 for size in sizes) else 0

    def _read_numbers(self, shape: Value) -> Sequence[int] | None:
        """Return the numbers in a list, tuple or torch.Size; None if the pickle computes one of them."""
        if type(shape) is Obj and len(shape.args) == 1 and type(shape.cls) is Global:
            shape = shape.args[0] if get_plain_name(shape.cls) == "torch.Size" else None
        if type(shape) not in (list, tuple):
            return None
        self._steps.take(Budget.FLOW, len(shape) // _DIMENSIONS_PER_STEP)
        return shape if all(type(number) is int for number in shape) else None

    def _count_grown_bytes(
        self, storage: Value, offset: Value, shape: Value, strides: Value, dtype: Value = None
    ) -> int:
        """Return how many bytes a tensor needs beyond the bytes of its storage. `dtype` None: the storage's dtype.

        Storages made by calls, and storages of legacy files and tar archives, grow to their tensors. Storages of a zip
        archive do not grow, but no honest tensor is larger than its storage either.
        """
        reached_elements = self._count_reached_elements(offset, shape, strides)
        pid = _read_storage(storage)
        if not pid:
            return reached_elements * _POINTER_BYTES if type(storage) in (Obj, Persistent) else 0
        item, name = _get_element_bytes(pid[1].name), STORAGE_DTYPES.get(pid[1].name, "")
        stored: int = min(pid[4] * item, self._bytes_by_storage.get(_get_storage_key(pid), MAX_SIZE))
        if type(dtype) is Global:
            item, name = ELEMENT_BITS.get(dtype.name, 8) // 8 or 1, dtype.name
        return max(0, -(-reached_elements // VALUES_PER_BYTE.get(name, 1)) * item - stored)

    def _count_reached_elements(self, offset: Value, shape: Value, strides: Value) -> int:
        """Return how many elements a storage needs to hold a tensor with this offset, shape and strides."""
        if not self._count_elements(shape):
            return 0
        sizes, steps = self._read_numbers(shape), self._read_numbers(strides)
        if sizes is None or steps is None or type(offset) is not int:
            return MAX_SIZE
        if len(steps) != len(sizes):
            return _clamp(offset + math.prod(sizes))
        return _clamp(offset + 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)))

    def _count_state(self, target: Value, state: Value) -> None:
        """Count the bytes that a tensor's state (offset, shape and strides) adds to the tensor's storage."""
        is_tensor = type(target) is Obj and type(target.cls) is Global and type(state) is tuple and len(state) in (4, 5)
        if is_tensor and get_plain_name(target.cls).startswith("torch."):
            self._add_bytes(target.cls, self._count_grown_bytes(*state[:4]))

    def _count_repeated_bytes(self, storage: Value, shape: Value) -> int:
        """Return how many bytes torch allocates for a quantized tensor beyond the bytes of the tensor's storage."""
        pid = _read_storage(storage)
        values_per_byte, stored_elements = (
            (VALUES_PER_BYTE.get(STORAGE_DTYPES.get(pid[1].name, ""), 1), pid[4]) if pid else (1, 0)
        )
        return max(0, -(-self._count_elements(shape) // values_per_byte) - stored_elements) * _POINTER_BYTES

    # Keys.

    def _add_element_keys(self, name: str, args: tuple[Value, ...]) -> None:
        """Record the keys that a call hashes: the elements of a set, or the first value of each pair for a dict."""
        arguments = args[1:2] if name == "collections.defaultdict" else args[:1]
        if not arguments or (name not in _HASHING_CLASSES and name not in _DICT_CLASSES):
            return
        elements = self._list_elements(arguments[0])
        if name in _DICT_CLASSES and type(arguments[0]) is not dict:
            elements = [pair[0] for pair in map(self._list_elements, elements) if len(pair) == 2]
        self.add_keys(args, elements)

    def _list_elements(self, value: Value) -> Sequence[Value]:
        """Return the elements of a container, or the elements that a call such as `list(…)` copies from a container."""
        appended: list[Value] = []
        while type(value) is Obj and type(value.cls) is Global and get_plain_name(value.cls) in _COPIERS:
            appended += value.elems or ()
            value = value.args[0] if value.args else ()
            self._steps.take(Budget.FLOW)
        if type(value) not in (list, tuple, dict):
            return appended
        self._steps.take(Budget.FLOW, len(value))
        return [*value, *appended]

    def _explain_slow_keys(self) -> str | None:
        """Return why hashing all keys takes too long or crashes Python; None if all keys can be hashed quickly."""
        steps, counts, sizes = 0, Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for holder, key in self._keys:
            size, depth = self._hashed.measure(key) if reads_contents(key) else Expansion(1, 0)
            steps += size
            if depth > _MAX_NESTING:
                return (
                    f"hashes a key with more than {_MAX_NESTING:,} nested tuples; this crashes Python (stack overflow)"
                )
            if steps > _MAX_HASH_STEPS:
                return f"needs more than {_MAX_HASH_STEPS:,} steps to hash dictionary keys; loading may hang"
            group = holder, self._hashes.compute_hash(key)
            counts[group] += 1
            sizes[group] += size
        slow_counts = (
            count
            for group, count in counts.items()
            if count > _MAX_COLLISIONS or count * sizes[group] > _MAX_COMPARED_VALUES
        )
        count = max(slow_counts, default=0)
        if not count:
            return None
        return (
            f"may compare each of {count:,} keys with all others, because all these keys may have the same hash; "
            "loading may hang"
        )


def _is_nearly_flat(values: tuple[Value, ...] | dict[Value, Value]) -> bool:
    """Return True for arguments with little nesting: plain values, and short lists or tuples of plain values."""
    return type(values) is tuple and all(
        type(value) not in CONTAINER_TYPES
        or (type(value) in (tuple, list) and len(value) < _FLAT_LENGTH and _PLAIN_TYPES.issuperset(map(type, value)))
        for value in values
    )


def _is_written_out(value: Obj) -> bool:
    """Return True if an object's repr may show its contents; False for unknown classes, which other rules report."""
    return type(value.cls) is Global and is_clean(get_plain_name(value.cls)) and reads_contents(value)


def _find_too_deep_call(calls: Iterable[Obj], steps: Steps) -> Global | None:
    """Return the name of a call with more than `_MAX_NESTING` nested calls; None if no call has so many.

    Objects of Python classes keep their state in a dict. Python frees dicts, lists and tuples without recursion, but
    not slices, deques, defaultdicts and arrays of objects. Containers among the arguments of a call are not kept.
    Raises OutOfSteps.
    """
    depths: dict[int, int] = {}
    for call in calls:
        waiting: list[tuple[Value, list[Value] | None]] = [(call, None)]
        while waiting:
            value, parts = waiting.pop()
            if parts is None:
                if id(value) in depths:
                    continue
                parts = [part for part in _list_owned_values(value) if type(part) in CONTAINER_TYPES]
                steps.take(Budget.FLOW, 1 + len(parts))
                unmeasured = [(part, None) for part in parts if id(part) not in depths]
                if unmeasured:
                    depths[id(value)] = 0  # a value that contains itself is not freed recursively
                    waiting += [(value, parts), *unmeasured]
                    continue
            depth = max((depths[id(part)] for part in parts), default=0) + (type(value) is Obj)
            depths[id(value)] = depth
            if depth > _MAX_NESTING and type(value) is Obj and type(value.cls) is Global:
                return value.cls
    return None


def _list_owned_values(value: Value) -> Sequence[Value]:
    """Return the values inside a container or an object, except the values in the object's `__dict__`."""
    if type(value) is not Obj:
        return list_parts(value)
    name = get_plain_name(value.cls) if type(value.cls) is Global else ""
    parts = [*value.args, *(value.elems or ()), *list_parts(value.items), *list_parts(value.kwargs)]
    return [*parts, value.state] if name.startswith(_CLASSES_WITHOUT_DICT) else parts


def _get_storage_key(pid: tuple[Value, ...]) -> Value:
    return pid[2] if type(pid[2]) in (str, int, bytes) else id(pid[2])


def _clamp(size: int) -> int:
    return max(0, min(size, MAX_SIZE))


def _read_storage(storage: Value) -> tuple[Any, ...]:
    """Return the persistent id of a storage (class at index 1, number of elements at index 4); () for other values."""
    pid = storage.pid if type(storage) is Persistent and type(storage.pid) is tuple else ()
    return pid if len(pid) > 4 and type(pid[1]) is Global and type(pid[4]) is int else ()


def _get_element_bytes(name: str) -> int:
    kind = STORAGE_DTYPES.get(name, "uint8" if name == "UntypedStorage" else "float32")
    return ELEMENT_BITS.get(kind, 32) // 8


def _format_bytes(size: int) -> str:
    for unit, name in ((2**60, "EiB"), (2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:,} bytes"
