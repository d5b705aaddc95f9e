"""Find pickles whose loading allocates more memory than the file explains, or whose keys take too long to hash.

`bytearray(2**36)` is 30 bytes of pickle and 64 GiB of memory; a tuple with itself as two items, 64 levels deep, takes
2**64 steps to hash. Nothing here allocates or hashes: sizes are computed from the arguments of each call, in the order
of the pickle. Ordinary picklers write all data, so a call allocates at most a few times the size of its pickle.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from statecli.core.dtypes import ELEMENT_BITS, STORAGE_DTYPES, VALUES_PER_BYTE
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Bomb
from statecli.pickle_scan import numpy_dtype_states
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickle_scan.tensor_sizes import MAX_SIZE, TensorSizes, element_bytes, resolve_copyreg_call
from statecli.pickle_scan.text_values import TEXT_CLASSES
from statecli.pickles.nodes import Global, Key, Obj, Persistent, SetOf, Value

#: Bytes that a pickle may allocate: so many, and so many times its own size.
_ALLOWED_BYTES = 16 * 2**20
_ALLOWED_BYTES_PER_PICKLE_BYTE = 64
#: How many times its size a file can hold, compressed.
_MAX_COMPRESSION_RATIO = 1032
#: Steps of hashing all keys of one pickle, a few seconds; the nesting of a tuple at which the stack overflows.
_MAX_HASH_STEPS = 50_000_000
_MAX_NESTING = 10_000
#: Keys of one dict or set that have the same hash. Each is compared with all before it.
_MAX_COLLISIONS = 5_000
#: Tuples inside one another that are hashed here to find collisions; deeper ones count as if they had one hash.
_MAX_HASHED_NESTING = 100
#: Steps of compiling the regular expressions of one pickle, about a second for every 5 million.
_MAX_PATTERN_STEPS = 20_000_000
#: What the compiler of `re` does for a class of characters, each of which may span all of Unicode's first plane; and
#: the square of the length that costs one step: it moves all branches of an alternation for each common character.
_STEPS_PER_CHARACTER_CLASS, _SQUARED_LENGTH_PER_STEP = 65_536, 500
#: Bytes of a pointer, of a small integer object, of an entry of the unpickler's memo.
_POINTER_BYTES, _INTEGER_BYTES, _MEMO_ENTRY_BYTES = 8, 32, 16
#: Bytes of a tensor without dimensions, as which a tensor gives each of its elements to what iterates over it.
_TENSOR_OBJECT_BYTES = 640

#: As Python reads it: digits of any script, and underscores between them.
_EXPONENT = compile_on_use(r"[eE][-+]?([\d_]+)\s*\Z")
#: Digits of an exponent that is read; a number of more is larger than any size.
_MAX_EXPONENT_DIGITS = 1000
#: Bytes that encoding a character makes; 10 for codecs that are not here.
_BYTES_PER_CHARACTER = {"latin1": 1, "latin-1": 1, "ascii": 1, "utf-8": 1, "utf8": 1}
_COPIERS = frozenset(
    [
        *(f"builtins.{name}" for name in ("list", "tuple", "set", "frozenset", "dict")),
        *(f"collections.{name}" for name in ("deque", "UserList", "Counter", "OrderedDict")),
        *("torch.Size", "numpy.ma.core.MaskedArray", "numpy.ma.MaskedArray"),
    ]
)
_NUMPY_INTEGER = compile_on_use(r"numpy\.(?:u?int|u?long|u?short|u?byte|bool)\w*")
_HASHING_CLASSES = frozenset(["builtins.set", "builtins.frozenset", "collections.Counter"])
#: Given a number, these make as many bytes.
_BYTES_CLASSES = frozenset(
    ["builtins.bytes", "builtins.bytearray"] + [f"numpy.{name}" for name in ("bytes_", "void", "record", "rec.record")]
)
_DICT_CLASSES = frozenset(["builtins.dict", "collections.OrderedDict"])
_TENSOR_CLASSES = compile_on_use(r"torch(?:\.cuda|\.storage)?\.\w*(?:Storage|Tensor)")
#: These copy the elements of the tensors that they are given, of each storage that is repeated in the tensor.
_COPYREG_FUNCTIONS = frozenset(["copyreg.__newobj__", "copyreg.__newobj_ex__", "copyreg._reconstructor"])
_COPYING_TENSORS = compile_on_use(r"torch\._utils\._rebuild_(?:device_tensor_\w+|xla_tensor)")
#: Classes of Python and numpy that read a state element by element; the state of a tensor is a geometry.
_STATE_ITERATING_MODULES = ("numpy.", "random.", "array.", "decimal.", "fractions.")

#: The plain name of a global, and the calls that a function makes of what it is given.
PlainName: TypeAlias = Callable[[Global], str]
IndirectCalls: TypeAlias = Callable[[str, tuple[Value, ...]], Iterable[Obj]]


class Allocations:
    """Sizes of the objects made by a pickle."""

    def __init__(self, plain: PlainName, calls_made_by: IndirectCalls, steps: Steps) -> None:
        self._plain = plain
        self._calls_made_by = calls_made_by
        self._steps = steps
        #: Bytes that calls allocate, by the id of the name that is called.
        self._bytes_by_name: Counter[int] = Counter()
        self._names_by_id: dict[int, Global] = {}
        #: How many elements the result of a call has, by its id.
        self._lengths: dict[int, int] = {}
        self._tensors = TensorSizes(plain, steps)
        #: Keys of the storages that were written out once, which takes as much memory as the file has of them.
        self._copied_storages: set[Value] = set()
        #: Bytes of each storage by its key, the fewest that the pickle says: torch takes the first description.
        self._held: dict[Value, int] = {}
        #: How many values a container has, all that it holds counted each time; how deep it is nested. Of what is
        #: hashed, and of what is gone through element by element.
        self._hashed_sizes: dict[int, tuple[int, int]] = {}
        self._iterated_sizes: dict[int, tuple[int, int]] = {}
        self._keys: list[tuple[int, Value]] = []
        self._hashes = _KeyHashes(plain)
        #: Regular expressions that are compiled, and the steps of that.
        self._patterns: list[Global] = []
        self._pattern_steps = 0

    def add_keys(self, holder: Value, keys: Iterable[Value]) -> None:
        """Record keys of a dict, or elements of a set, with a costly hash."""
        for key in keys:
            value = key.value if type(key) is Key else key
            if type(value) in (tuple, int, float, Obj, SetOf):
                self._keys.append((id(holder), value))

    def find_bombs(
        self, calls: Sequence[Obj], built: Iterable[tuple[Value, Value]], pickle_bytes: int, highest_memo: int
    ) -> Iterator[Bomb]:
        """Yield calls with too large an allocation and keys with too long a hash. Raises OutOfSteps."""
        for call in calls:
            if type(call.cls) is Global:
                self._lengths[id(call)] = self._count_call(call, call.cls, 0)
                self._tensors.add_call(call)
        for target, state in built:
            self._count_state(target, state)
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
        yield from self._find_hash_bombs()
        deep = _find_too_deep_call(calls, self._tensors.get_name, self._steps) if len(calls) > _MAX_NESTING else None
        if deep is not None:
            why = (
                f"creates objects nested more than {_MAX_NESTING:,} levels deep; Python crashes when it frees these "
                "objects (stack overflow)"
            )
            yield Bomb(why, deep.position)

    def find_storage_bombs(self, storages: Iterable[Persistent], file_bytes: int) -> Iterator[Bomb]:
        """Find storages larger than the file can hold, compressed too, and a storage loaded often.

        torch keeps each storage by its key, and its zip reader ends a name at the first NUL and ignores case: keys "0"
        and "0\0a" are two storages of one record.
        """
        sizes: dict[Value, int] = {}
        records: set[str] = set()
        total, again = 0, 0
        bytes_by_class: dict[int, int] = {}
        for storage in storages:
            pid = storage.pid if type(storage.pid) is tuple else ()
            if len(pid) < 5 or type(pid[1]) is not Global or type(pid[4]) is not int or pid[3] == "meta":
                continue
            key = pid[2] if type(pid[2]) is str else _key_of(pid)
            if id(pid[1]) not in bytes_by_class:
                bytes_by_class[id(pid[1])] = element_bytes(pid[1].name)
            size = pid[4] * bytes_by_class[id(pid[1])]
            self._held[key] = min(size, self._held.get(key, size))
            if sizes.get(key, 0) >= size:
                continue
            total += size - sizes.get(key, 0)
            record = str(key, "latin-1") if type(key) is bytes else str(key)
            record = record if record.isdecimal() else record.partition("\0")[0].casefold()
            again += size if record in records and key not in sizes else 0
            sizes[key] = size
            records.add(record)
            if max(size, total) > _ALLOWED_BYTES + _MAX_COMPRESSION_RATIO * file_bytes:
                what = "a storage" if size > total - size else f"{len(sizes):,} storages"
                yield Bomb(
                    f"allocates {_format_bytes(total)} for {what}, but the file has only {_format_bytes(file_bytes)}",
                    pid[1].position,
                )
                return
            if again > _ALLOWED_BYTES:
                why = (
                    f"loads the record {record} again for each of several storages, so a small file can fill the memory"
                )
                yield Bomb(why, pid[1].position)
                return

    # Calls.

    def _count_call(self, call: Obj, name: Global, depth: int) -> int:
        """Count the bytes allocated by a call; return the number of elements of its result."""
        plain = self._plain(name)
        self._steps.take(Budget.FLOW)
        # Keyword arguments are in the order of the parameters where one of them decides.
        args = (*call.args, *call.kwargs.values()) if call.kwargs else call.args
        size, length = self._measure_call(plain, args)
        if plain == "re._compile" and args:
            self._patterns.append(name)
            self._pattern_steps += _count_pattern_steps(args[0])
        self._add_bytes(name, size)
        for indirect in self._calls_made_by(plain, call.args) if depth < 8 else ():
            if type(indirect.cls) is Global:
                length = max(length, self._count_call(indirect, indirect.cls, depth + 1))
        if plain == "functools.partial" and call.args and type(call.args[0]) is Global and depth < 8:
            self._count_call(Obj(call.args[0], call.args[1:]), call.args[0], depth + 1)
        return length

    def _add_bytes(self, name: Global, size: int) -> None:
        if size:
            self._names_by_id[id(name)] = name
            self._bytes_by_name[id(name)] = min(self._bytes_by_name[id(name)] + size, MAX_SIZE)

    def _measure_call(self, name: str, args: tuple[Value, ...]) -> tuple[int, int]:
        """Return the bytes allocated by a call, and the number of elements of its result."""
        first = args[0] if args else None
        if name in _BYTES_CLASSES:
            length = self._tensors.get_number(first)
            length = self._count_elements(first) if length is None else length
            return _clamp(length + self._count_iterated_bytes(first)), _clamp(length)
        if name in _COPIERS or name.startswith("numpy."):
            self._add_element_keys(name, first)
            size = self._measure_numpy_call(name, args)
            if _NUMPY_INTEGER.fullmatch(name) and not self._lengths.get(id(first)):
                size += sum(map(_number_bytes, args))
            length = max((self._count_elements(arg) for arg in args), default=0)
            ranges = any(type(arg) is Obj for arg in args)
            of_tensors = sum(
                map(self._count_copied_bytes if name.startswith("numpy.") else self._count_iterated_bytes, args)
            )
            return _clamp(size + length * (_POINTER_BYTES + _INTEGER_BYTES * ranges) + of_tensors), length
        if name == "builtins.range":
            return 0, self._count_range(args)
        if name == "array.array" and len(args) > 1:
            size = self._count_elements(args[1]) * _POINTER_BYTES + self._count_iterated_bytes(args[1])
            return _clamp(size), self._count_elements(args[1])
        if name == "_codecs.encode":
            codec = args[1] if len(args) > 1 and type(args[1]) is str else "utf-8"
            length = _clamp(self._count_elements(first) * _BYTES_PER_CHARACTER.get(codec.lower(), 10))
            return (length if type(first) is Obj else 0), length
        if name in TEXT_CLASSES:
            size = self._measure_expansion(first)[0] * 2 if _list_children(first) else 0
            return _clamp(size), _clamp(size)
        if name == "fractions.Fraction":
            return _clamp(sum(map(_number_bytes, args))), 0
        if name == "logging.getLogger" and type(first) is str:
            return _clamp(first.count(".") * len(first) // 2), 0
        return self._measure_tensor_call(name, args), 0

    def _measure_numpy_call(self, name: str, args: tuple[Value, ...]) -> int:
        if name.endswith(".multiarray._reconstruct") and len(args) > 2:
            return _clamp(self._tensors.count_elements(args[1]) * _element_bytes(args[2]))
        if name == "numpy.ma.core._mareconstruct" and len(args) > 3:
            return _clamp(2 * self._tensors.count_elements(args[2]) * _element_bytes(args[3]))
        if name.endswith(".multiarray.scalar") and len(args) == 1:
            return _clamp(_element_bytes(args[0]))
        return 0

    def _measure_tensor_call(self, name: str, args: tuple[Value, ...]) -> int:
        last = name.rpartition(".")[2]
        if _TENSOR_CLASSES.fullmatch(name):
            first = args[0] if args else None
            if self._tensors.is_shape(first):
                return _clamp(self._tensors.count_elements(first) * element_bytes(last))
            if type(first) in (list, tuple):
                return _clamp(self._measure_expansion(first, iterated=True)[0] * _POINTER_BYTES)
            if type(first) is Obj and self._tensors.get_number(first) is None:
                size = self._count_iterated_bytes(first) if last.endswith("Storage") else 0
                return _clamp(self._count_elements(first) * _POINTER_BYTES + size)
            return _clamp(self._tensors.count_elements(args) * element_bytes(last)) if args else 0
        if name.startswith("torch._utils._rebuild_tensor") and len(args) > 3:
            dtype = args[6] if name.endswith("_v3") and len(args) > 6 else None
            return _clamp(self._count_grown_bytes(args[0], args[1], args[2], args[3], dtype))
        if name == "torch._utils._rebuild_qtensor" and len(args) > 2:
            quantizer = sum(map(self._count_written_bytes, self._tensors.iter_tensors(args[4:5])))
            grown = self._count_grown_bytes(*args[:4]) if len(args) > 3 else 0
            return _clamp(self._count_repeated_bytes(Obj(None, args)) + quantizer + grown)
        if name == "torch._utils._rebuild_nested_tensor":
            sizes = (self._tensors.get_size(tensor) for tensor in args[1:])
            return _clamp(sum(max(0, size.elements - size.held) * _TENSOR_OBJECT_BYTES for size in sizes))
        if _COPYING_TENSORS.fullmatch(name):
            return _clamp(sum(map(self._count_written_bytes, self._tensors.iter_tensors(args))))
        return 0

    def _count_written_bytes(self, tensor: Value) -> int:
        """Return the bytes of a tensor with each element written out, less the bytes of its storage in the file."""
        size = self._tensors.get_size(tensor)
        stored = 0 if size.key in self._copied_storages else size.held
        self._copied_storages.add(size.key if type(size.key) in (str, int, bytes) else None)
        return max(0, size.elements - stored) * _POINTER_BYTES

    def _count_grown_bytes(
        self, storage: Value, offset: Value, shape: Value, strides: Value, dtype: Value = None
    ) -> int:
        """Return the bytes of a tensor beyond the storage set for it. `dtype`: the tensor's own, if any.

        Storages made by calls, and storages of legacy files and tar archives, grow to their tensors. Storages of a zip
        archive do not grow, but no honest tensor is larger than its storage either.
        """
        needed = self._tensors.count_reached_elements(offset, shape, strides)
        pid = storage.pid if type(storage) is Persistent and type(storage.pid) is tuple else ()
        if len(pid) < 5 or type(pid[1]) is not Global or type(pid[4]) is not int:
            return needed * _POINTER_BYTES if type(storage) in (Obj, Persistent) else 0
        item, name = element_bytes(pid[1].name), STORAGE_DTYPES.get(pid[1].name, "")
        stored = min(pid[4] * item, self._held.get(_key_of(pid), MAX_SIZE))
        if type(dtype) is Global:
            item, name = ELEMENT_BITS.get(dtype.name, 8) // 8 or 1, dtype.name
        return max(0, -(-needed // VALUES_PER_BYTE.get(name, 1)) * item - stored)

    def _count_copied_bytes(self, value: Value) -> int:
        """Return the bytes allocated by numpy for a tensor, or for the tensors, ranges and lists in a list."""
        if type(value) in (list, tuple):
            return max(0, self._measure_expansion(value, iterated=True)[0] * _POINTER_BYTES)
        return self._tensors.get_size(value).elements * _POINTER_BYTES

    def _count_iterated_bytes(self, value: Value) -> int:
        """Return the bytes of the scalar tensors created by iterating over a tensor."""
        return self._tensors.get_size(value).elements * _TENSOR_OBJECT_BYTES

    def _count_state(self, target: Value, state: Value) -> None:
        """Count the bytes allocated by a BUILD.

        An array of objects has the length of its shape, whatever list follows; a tensor grows a storage to its
        geometry; other classes go through the tensors in their state.
        """
        if type(target) is not Obj or type(target.cls) is not Global:
            return
        name, root = target.cls, self._tensors.get_name(target)
        root = (
            self._tensors.get_name(resolve_copyreg_call(self._plain, target))
            if root in _COPYREG_FUNCTIONS and target.args
            else root
        )
        if type(state) is tuple and len(state) > 4 and root.endswith("._reconstruct") and type(state[4]) is list:
            extra = self._tensors.count_elements(state[1]) - len(state[4])
            self._add_bytes(name, max(0, extra) * _POINTER_BYTES)
        if root.startswith("torch.") and type(state) is tuple and len(state) in (4, 5):
            self._add_bytes(name, _clamp(self._count_grown_bytes(*state[:4])))
        elif root.startswith(_STATE_ITERATING_MODULES) and root != "numpy.dtype":
            tensors = self._tensors.iter_tensors(state)
            self._add_bytes(name, _clamp(sum(map(self._count_iterated_bytes, tensors))))
        self._add_bytes(name, _clamp(self._count_iterated_bytes(state)))

    def _count_repeated_bytes(self, call: Obj) -> int:
        """Return the bytes of a quantized tensor that repeats its storage, because each element is allocated first."""
        size = self._tensors.measure_call(Obj(_QTENSOR, call.args))
        pid = call.args[0].pid if type(call.args[0]) is Persistent else None
        kind = pid[1] if type(pid) is tuple and len(pid) > 1 else None
        packed = VALUES_PER_BYTE.get(STORAGE_DTYPES.get(kind.name, ""), 1) if type(kind) is Global else 1
        return max(0, -(-size.elements // packed) - size.held) * _POINTER_BYTES

    def _count_range(self, args: tuple[Value, ...]) -> int:
        """Number of elements of a range."""
        numbers = [self._tensors.get_number(number) for number in args]
        if not 1 <= len(args) <= 3 or any(number is None for number in numbers):
            return 0
        limits = [number for number in numbers if number is not None]
        if any(type(number) is Obj for number in args) and MAX_SIZE in limits:
            return MAX_SIZE
        start, stop = (0, limits[0]) if len(limits) == 1 else limits[:2]
        step = limits[2] if len(limits) == 3 else 1
        if step == 0:
            return 0
        return _clamp(-((start - stop) // step) if step > 0 else -((stop - start) // -step))

    def _count_elements(self, value: Value) -> int:
        if type(value) is Obj:
            return self._lengths.get(id(value), 0) + len(value.elems or ())
        if type(value) is SetOf:
            return len(value.elems)
        return len(value) if type(value) in (list, tuple, dict, str, bytes) else 0

    # Keys.

    def _add_element_keys(self, name: str, elements: Value) -> None:
        if name in _HASHING_CLASSES and type(elements) in (list, tuple):
            self._steps.take(Budget.FLOW, len(elements))
            self.add_keys(elements, elements)
        elif name in _DICT_CLASSES and type(elements) is list:
            self._steps.take(Budget.FLOW, len(elements))
            pairs = (pair for pair in elements if type(pair) in (list, tuple) and len(pair) == 2)
            self.add_keys(elements, (pair[0] for pair in pairs))

    def _find_hash_bombs(self) -> Iterator[Bomb]:
        steps, hashes = 0, Counter[tuple[int, int]]()
        for holder, key in self._keys:
            size, depth = self._measure_expansion(key) if self._hashes.reads_contents(key) else (1, 0)
            steps += size
            if depth > _MAX_NESTING:
                yield Bomb(
                    f"hashes a key with more than {_MAX_NESTING:,} nested tuples; this crashes Python (stack overflow)",
                    0,
                )
                return
            if steps > _MAX_HASH_STEPS:
                yield Bomb(f"needs more than {_MAX_HASH_STEPS:,} steps to hash dictionary keys; loading may hang", 0)
                return
            hashes[holder, self._hashes.compute_hash(key)] += 1
        for (_, _), count in hashes.most_common(1):
            if count > _MAX_COLLISIONS:
                why = (
                    f"compares each of {count:,} keys with all others, because all keys have the same hash; "
                    "loading may hang"
                )
                yield Bomb(why, 0)

    def _measure_expansion(self, root: Value, *, iterated: bool = False) -> tuple[int, int]:
        """Return the number of values in a container, shared values counted each time, and the depth.

        `iterated`: including elements of ranges, copies and tensors, as made by code iterating over them.
        """
        sizes, entered, waiting, depth = self._iterated_sizes if iterated else self._hashed_sizes, set[int](), [root], 0
        while waiting:
            value = waiting[-1]
            children = () if id(value) in sizes else _list_children(value)
            missing = [child for child in children if _list_children(child) and id(child) not in sizes]
            if missing and id(value) not in entered:
                entered.add(id(value))  # a container that holds itself is entered once
                depth += 1
                if depth > _MAX_NESTING:
                    return MAX_SIZE, depth
                self._steps.take(Budget.FLOW, len(children))
                waiting.extend(missing)
                continue
            if id(value) not in sizes:
                inner = [sizes.get(id(child), (1, 0)) for child in children]
                size = 1 + sum(size for size, _ in inner)
                if iterated and type(value) is Obj:
                    size += self._count_elements(value) + self._count_iterated_bytes(value) // _POINTER_BYTES
                sizes[id(value)] = (min(size, MAX_SIZE), 1 + max((depth for _, depth in inner), default=0))
            depth -= waiting.pop() is value and id(value) in entered and bool(children)
        return sizes[id(root)]


def _find_too_deep_call(calls: Iterable[Obj], name_of: Callable[[Value], str], steps: Steps) -> Global | None:
    """Return the name of a call with more than `_MAX_NESTING` nested calls; None without such a call.

    Objects of Python classes keep their state in a dict, which is freed without recursion, like lists and tuples, but
    unlike slices, deques, defaultdicts and arrays of objects. Containers among the arguments of a call are not kept.
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
                parts = [part for part in _list_owned_values(value, name_of) if type(part) in _CONTAINER_TYPES]
                steps.take(Budget.FLOW, 1 + len(parts))
                missing = [(part, None) for part in parts if id(part) not in depths]
                if missing:
                    depths[id(value)] = 0  # what holds itself is not freed so
                    waiting += [(value, parts), *missing]
                    continue
            depth = max((depths[id(part)] for part in parts), default=0) + (type(value) is Obj)
            depths[id(value)] = depth
            if depth > _MAX_NESTING and type(value) is Obj and type(value.cls) is Global:
                return value.cls
    return None


def _list_owned_values(value: Value, name_of: Callable[[Value], str]) -> Sequence[Value]:
    """Return the values of a container or an object, without its `__dict__`."""
    if type(value) is not Obj:
        return _list_children(value)
    state = value.state if name_of(value).startswith(_STATE_ITERATING_MODULES) else None
    return [*value.args, *(value.elems or ()), *_list_children(value.items), *_list_children(value.kwargs), state]


_CONTAINER_TYPES = frozenset([Obj, list, tuple, dict, SetOf])


def _list_children(value: Any) -> Sequence[Value]:
    """Return the values of a container, or the parts of an object."""
    if type(value) in (list, tuple):
        return value  # type: ignore[no-any-return]
    if type(value) is dict:
        return [*(key.value for key in value if type(key) is Key), *value.values()]
    if type(value) is SetOf:
        return value.elems
    if type(value) is Obj:
        return [
            *value.args,
            *(value.elems or ()),
            *_list_children(value.items),
            *_list_children(value.kwargs),
            value.state,
        ]
    return ()


class _KeyHashes:
    """Hashes of keys under an attacker's control: hashes of numbers, and of containers of numbers."""

    def __init__(self, plain: PlainName) -> None:
        self._plain = plain
        #: Of containers, by id: what many keys share is hashed once.
        self._cached_hashes: dict[int, int] = {}

    def compute_hash(self, value: Value, nesting: int = 0) -> int:
        """Return Python's hash of the value, or a constant shared by all values with unknown hashes."""
        if type(value) not in (tuple, list, SetOf, Obj):
            return 0 if type(value) is dict else hash(value)
        if nesting > _MAX_HASHED_NESTING:
            return 0
        if id(value) not in self._cached_hashes:
            self._cached_hashes[id(value)] = 0  # of what holds itself
            self._cached_hashes[id(value)] = self._hash_container(value, nesting + 1)
        return self._cached_hashes[id(value)]

    def reads_contents(self, key: Value) -> bool:
        """Return True if the hash of a key depends on its contents; the hash of a tensor is its address."""
        name = self._plain(key.cls) if type(key) is Obj and type(key.cls) is Global else ""
        by_address = name.startswith(_HASHED_BY_ADDRESS) and name != "torch.nn.utils.rnn.PackedSequence_"
        by_address = by_address or (name.startswith("torch.") and name.endswith(("Storage", "Tensor")))
        return type(key) in (tuple, SetOf, Obj) and not by_address

    def _hash_container(self, value: Value, nesting: int) -> int:
        if type(value) in (tuple, list):
            return hash(tuple(self.compute_hash(child, nesting) for child in value))
        if type(value) is SetOf:
            return hash(frozenset(self.compute_hash(child, nesting) for child in value.elems))
        assert type(value) is Obj  # noqa: S101  # the only other container
        return self._hash_call(value, self._plain(value.cls) if type(value.cls) is Global else "", nesting)

    def _hash_call(self, call: Obj, name: str, nesting: int) -> int:
        """Return the hash of an object; the hash of the class, if the class hashes only numbers or is unknown."""
        args = call.args
        if name == "builtins.complex" and args and all(type(arg) in (int, float) for arg in args[:2]):
            return hash(args[0]) + 1_000_003 * hash(args[1] if len(args) > 1 else 0)
        if name in ("torch.Size", "builtins.tuple", "builtins.frozenset") and args and type(args[0]) in (tuple, list):
            hashes = tuple(self.compute_hash(child, nesting) for child in args[0])
            return hash(frozenset(hashes) if name.endswith("frozenset") else hashes)
        if name.endswith(".multiarray.scalar") and len(args) > 1:
            return hash(name) if _is_hashed_by_sum(args[0]) else self.compute_hash(args[1], nesting)
        if not self.reads_contents(call):
            return id(call)
        if name.startswith(_HASHED_BY_CONTENT):
            state = call.state.values() if type(call.state) is dict else (call.state,)
            return hash((name, *(self.compute_hash(child, nesting) for child in (*args, *state))))
        return hash(name)


#: Classes whose objects are hashed as a tuple of what they are made of, or by text or bytes, with a key that nobody
#: outside the process knows.
_HASHED_BY_CONTENT = (
    *("builtins.str", "builtins.bytes", "numpy.str_", "pathlib.", "datetime.", "_codecs.encode"),
    *("torch.", "numpy.dtype", "collections.UserString"),
)
#: Tensors and modules.
_HASHED_BY_ADDRESS = ("torch._utils._rebuild_", "torch._tensor.", "torch.nn.", "torch.optim.", "torch.storage.")


def _is_hashed_by_sum(dtype: Value) -> bool:
    """Return True if numpy hashes the number as a sum of two hashes, so many numbers collide."""
    kind = dtype.args[0] if type(dtype) is Obj and dtype.args else None
    return type(kind) is not str or kind[:1] in "cgGVO"


#: Characters by number or name, which may be no ASCII.
_ESCAPED_CHARACTER = compile_on_use(r"\\[uUxN0-7]")


def _find_text(value: Value) -> Value:
    """Return the result of calls on a text or on bytes: each call with a codec encodes or decodes its argument."""
    codecs: list[Value] = []
    while type(value) is Obj and value.args:
        codecs.append(value.args[1] if len(value.args) > 1 else None)
        value = value.args[0]
    for codec in reversed(codecs):
        with contextlib.suppress(LookupError, UnicodeError):
            if type(codec) is str and type(value) is bytes:
                value = value.decode(codec, "replace")
            elif type(codec) is str and type(value) is str:
                value = value.encode(codec, "replace")
    return value


def _count_pattern_steps(pattern: Value) -> int:
    """Steps of compiling a regular expression, at most."""
    pattern = _find_text(pattern)
    if type(pattern) not in (str, bytes):
        return MAX_SIZE  # text that is computed
    # In a class that ignores case, each range is expanded character by character; one of ASCII has few.
    dash, bracket = (b"-", b"[") if type(pattern) is bytes else ("-", "[")
    has_long_ranges = not pattern.isascii() or _ESCAPED_CHARACTER.search(str(pattern)) is not None
    classes = pattern.count(bracket) + (pattern.count(dash) if has_long_ranges else 0)
    return int(classes * _STEPS_PER_CHARACTER_CLASS + len(pattern) ** 2 // _SQUARED_LENGTH_PER_STEP)


def _key_of(pid: tuple[Value, ...]) -> Value:
    """Return the key of a storage as a hashable value."""
    return pid[2] if type(pid[2]) in (str, int, bytes) else id(pid[2])


def _clamp(size: int) -> int:
    return max(0, min(size, MAX_SIZE))


def _element_bytes(dtype: Value) -> int:
    """Bytes of an element of a numpy type."""
    state = dtype.state if type(dtype) is Obj else None
    return (numpy_dtype_states.element_bytes(dtype if type(dtype) is Obj else Obj(None, (dtype,)), state) or 0) or 1


#: In whose name a quantized tensor is measured.
_QTENSOR = Global("torch._utils", "_rebuild_qtensor", 0)


def _number_bytes(number: Value) -> int:
    """Return the bytes of a computed integer: from an exponent, as text or as Decimal's tuple.

    Computed numbers count as the largest possible, because picklers do not write any.
    """
    if type(number) is Obj and len(number.args) == 1 and type(number.cls) is Global and number.cls.name == "Decimal":
        number = number.args[0]
        if type(number) is tuple and len(number) == 3 and type(number[2]) is int:
            return _clamp(abs(number[2]) * _MEMO_ENTRY_BYTES)
    if type(number) in (int, float, bool):
        return 0
    if type(number) is not str:
        return MAX_SIZE
    match = _EXPONENT.search(number)
    digits = match[1].replace("_", "") if match else ""
    if len(digits) > _MAX_EXPONENT_DIGITS:
        return MAX_SIZE
    return _clamp(int(digits or 0) * _MEMO_ENTRY_BYTES)


def _format_bytes(size: int) -> str:
    for unit, name in ((2**60, "EiB"), (2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:,} bytes"
