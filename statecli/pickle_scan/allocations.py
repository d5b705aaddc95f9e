"""What loading a pickle allocates beyond what the file holds, and which of its keys take for ever to hash.

`bytearray(2**36)` is 30 bytes of pickle and 64 GiB of memory; a tuple that holds itself twice, 64 levels deep, takes
2**64 steps to hash. Nothing here allocates or hashes: sizes are computed from the arguments of each call, in the order
of the pickle. Ordinary picklers write what they hold, so that a call allocates no more than a few times its pickle.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from statecli.core.dtypes import BITS, PACKED, STORAGE_DTYPES
from statecli.core.state import Bomb
from statecli.pickle_scan import array_dtypes
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickle_scan.tensor_sizes import MAX_SIZE, TensorSizes, item_bytes, made_by
from statecli.pickles.machine import Global, Key, Obj, Persistent, SetOf, Value

#: Bytes that a pickle may allocate: so many, and so many times its own size.
_MIN_BYTES = 16 * 2**20
_TIMES_PICKLE = 64
#: How many times its size a file can hold, compressed.
_TIMES_COMPRESSED = 1032
#: Steps of hashing all keys of one pickle, a few seconds; the nesting of a tuple at which the stack overflows.
_MAX_HASH_STEPS = 50_000_000
_MAX_NESTED = 10_000
#: Keys of one dict or set that have the same hash. Each is compared with all before it.
_MAX_COLLISIONS = 5_000
#: Tuples inside one another that are hashed here to find collisions; deeper ones count as if they had one hash.
_MAX_HASHED_NESTING = 100
#: Steps of compiling the regular expressions of one pickle, about a second for every 5 million.
_MAX_PATTERN_STEPS = 20_000_000
#: What the compiler of `re` does for a class of characters, each of which may span all of Unicode's first plane; and
#: the square of the length that costs one step: it moves all branches of an alternation for each common character.
_STEPS_OF_CHARACTER_CLASS, _SQUARE_OF_STEP = 65_536, 500
#: Bytes of a pointer, of a small integer object, of an entry of the unpickler's memo.
_POINTER, _INTEGER, _MEMO_ENTRY = 8, 32, 16
#: Bytes of a tensor without dimensions, as which a tensor gives each of its elements to what iterates over it.
_TENSOR_OBJECT = 640

#: As Python reads it: digits of any script, and underscores between them.
_EXPONENT = re.compile(r"[eE][-+]?([\d_]+)\s*\Z")
#: Digits of an exponent that is read; a number of more is larger than any size.
_MAX_EXPONENT_DIGITS = 1000
#: Bytes that encoding a character makes; 10 for codecs that are not here.
_ENCODED = {"latin1": 1, "latin-1": 1, "ascii": 1, "utf-8": 1, "utf8": 1}
_COPIERS = frozenset(
    [
        *(f"builtins.{name}" for name in ("list", "tuple", "set", "frozenset", "dict")),
        *(f"collections.{name}" for name in ("deque", "UserList", "Counter", "OrderedDict")),
        *("torch.Size", "numpy.ma.core.MaskedArray", "numpy.ma.MaskedArray"),
    ]
)
_NUMPY_INTEGER = re.compile(r"numpy\.(?:u?int|u?long|u?short|u?byte|bool)\w*")
_TEXTS = frozenset(["builtins.str", "collections.UserString", "torch.torch_version.TorchVersion", "numpy.str_"])
_HASHING = frozenset(["builtins.set", "builtins.frozenset", "collections.Counter"])
#: Given a number, these make as many bytes.
_OF_BYTES = frozenset(
    ["builtins.bytes", "builtins.bytearray"] + [f"numpy.{name}" for name in ("bytes_", "void", "record", "rec.record")]
)
_MAKING_DICTS = frozenset(["builtins.dict", "collections.OrderedDict"])
_OF_TENSORS = re.compile(r"torch(?:\.cuda|\.storage)?\.\w*(?:Storage|Tensor)")
#: These copy the elements of the tensors that they are given, of each storage that is repeated in the tensor.
_MAKERS = frozenset(["copyreg.__newobj__", "copyreg.__newobj_ex__", "copyreg._reconstructor"])
_COPYING_TENSORS = re.compile(r"torch\._utils\._rebuild_(?:device_tensor_\w+|xla_tensor)")
#: Classes of Python and numpy that read a state element by element; the state of a tensor is a geometry.
_READING_STATES = ("numpy.", "random.", "array.", "decimal.", "fractions.")

#: The plain name of a global, and the calls that a function makes of what it is given.
Name: TypeAlias = Callable[[Global], str]
Indirect: TypeAlias = Callable[[str, tuple[Value, ...]], Iterable[Obj]]


class Allocations:
    """The sizes of what one pickle makes. `keys` are what it hashes, by the dict or set that they are in."""

    def __init__(self, plain: Name, calls_made_by: Indirect, steps: Steps) -> None:
        self._plain = plain
        self._calls_made_by = calls_made_by
        self._steps = steps
        #: Bytes that calls allocate, by the id of the name that is called.
        self._bytes: Counter[int] = Counter()
        self._called: dict[int, Global] = {}
        #: How many elements the result of a call has, by its id.
        self._lengths: dict[int, int] = {}
        self._tensors = TensorSizes(plain, steps)
        #: Keys of the storages that were written out once, which takes as much memory as the file has of them.
        self._copied: set[Value] = set()
        #: Bytes of each storage by its key, the fewest that the pickle says: torch takes the first description.
        self._held: dict[Value, int] = {}
        #: How many values a container has, all that it holds counted each time; how deep it is nested. Of what is
        #: hashed, and of what is gone through element by element.
        self._expanded: dict[int, tuple[int, int]] = {}
        self._iterated: dict[int, tuple[int, int]] = {}
        self._keys: list[tuple[int, Value]] = []
        self._hashes = _Hashes(plain)
        #: Regular expressions that are compiled, and the steps of that.
        self._patterns: list[Global] = []
        self._pattern_steps = 0

    def add_keys(self, holder: Value, keys: Iterable[Value]) -> None:
        """Note keys of a dict, or elements of a set, that are costly to hash."""
        for key in keys:
            value = key.value if type(key) is Key else key
            if type(value) in (tuple, int, float, Obj, SetOf):
                self._keys.append((id(holder), value))

    def bombs(
        self, made: Sequence[Obj], built: Iterable[tuple[Value, Value]], pickle_bytes: int, highest_memo: int
    ) -> Iterator[Bomb]:
        """What allocates too much, or takes for ever to hash. Raises OutOfSteps."""
        for call in made:
            if type(call.cls) is Global:
                self._lengths[id(call)] = self._judge(call, call.cls, 0)
                self._tensors.note(call)
        for target, state in built:
            self._judge_state(target, state)
        limit = _MIN_BYTES + _TIMES_PICKLE * pickle_bytes
        large = [(size, key) for key, size in self._bytes.items() if size > limit]
        if not large and self._bytes and self._bytes.total() > limit:
            large = [(self._bytes.total(), self._bytes.most_common(1)[0][0])]
        for size, key in large:
            name = self._called[key]
            yield Bomb(f"allocates {_amount(size)} by {name.qualified}", name.position)
        if highest_memo * _MEMO_ENTRY > limit:
            yield Bomb(f"allocates {_amount(highest_memo * _MEMO_ENTRY)} for memo entry {highest_memo:,}", 0)
        if self._pattern_steps > _MAX_PATTERN_STEPS:
            why = f"compiles regular expressions in more than {_MAX_PATTERN_STEPS:,} steps"
            yield Bomb(why, self._patterns[0].position)
        yield from self._hash_bombs()
        deep = _deepest(made, self._tensors.name_of, self._steps) if len(made) > _MAX_NESTED else None
        if deep is not None:
            why = f"nests more than {_MAX_NESTED:,} objects, which overflows the stack when they are freed"
            yield Bomb(why, deep.position)

    def storage_bombs(self, storages: Iterable[Persistent], file_bytes: int) -> Iterator[Bomb]:
        """Storages that are declared with more bytes than the file can hold, also compressed; one that is loaded often.

        torch keeps each storage by its key, and its zip reader ends a name at the first NUL and ignores its case: keys
        "0" and "0\\0a" are two storages of one record.
        """
        sizes: dict[Value, int] = {}
        records: set[str] = set()
        total, again = 0, 0
        for storage in storages:
            pid = storage.pid if type(storage.pid) is tuple else ()
            if len(pid) < 5 or type(pid[1]) is not Global or type(pid[4]) is not int or pid[3] == "meta":
                continue
            key = _key_of(pid)
            size = pid[4] * item_bytes(pid[1].name)
            self._held[key] = min(size, self._held.get(key, size))
            if sizes.get(key, 0) >= size:
                continue
            total += size - sizes.get(key, 0)
            record = (str(key, "latin-1") if type(key) is bytes else str(key)).partition("\0")[0].casefold()
            again += size if record in records and key not in sizes else 0
            sizes[key] = size
            records.add(record)
            if max(size, total) > _MIN_BYTES + _TIMES_COMPRESSED * file_bytes:
                what = "a storage" if size > total - size else f"{len(sizes):,} storages"
                yield Bomb(f"allocates {_amount(total)} for {what} of {_amount(file_bytes)}", pid[1].position)
                return
            if again > _MIN_BYTES:
                yield Bomb(f"reads the record {record} again by the key of another storage", pid[1].position)
                return

    # Calls.

    def _judge(self, call: Obj, name: Global, depth: int) -> int:
        """Count the bytes that a call allocates; the number of elements of its result."""
        plain = self._plain(name)
        self._steps.take(Budget.FLOW)
        # Keyword arguments are in the order of the parameters where one of them decides.
        args = (*call.args, *call.kwargs.values()) if call.kwargs else call.args
        size, length = self._size_of_call(plain, args)
        if plain == "re._compile" and args:
            self._patterns.append(name)
            self._pattern_steps += _pattern_steps(args[0])
        self._count(name, size)
        for indirect in self._calls_made_by(plain, call.args) if depth < 8 else ():
            if type(indirect.cls) is Global:
                length = max(length, self._judge(indirect, indirect.cls, depth + 1))
        if plain == "functools.partial" and call.args and type(call.args[0]) is Global and depth < 8:
            self._judge(Obj(call.args[0], call.args[1:]), call.args[0], depth + 1)
        return length

    def _count(self, name: Global, size: int) -> None:
        if size:
            self._called[id(name)] = name
            self._bytes[id(name)] = min(self._bytes[id(name)] + size, MAX_SIZE)

    def _size_of_call(self, name: str, args: tuple[Value, ...]) -> tuple[int, int]:
        """Bytes that a call allocates, and how many elements its result has."""
        first = args[0] if args else None
        if name in _OF_BYTES:
            length = self._tensors.number(first)
            length = self._length(first) if length is None else length
            return _capped(length + self._iterated_bytes(first)), _capped(length)
        if name in _COPIERS or name.startswith("numpy."):
            self._hash_elements(name, first)
            size = self._size_of_numpy(name, args)
            if _NUMPY_INTEGER.fullmatch(name) and not self._lengths.get(id(first)):
                size += sum(map(_size_of_number, args))
            length = max((self._length(one) for one in args), default=0)
            ranges = any(type(one) is Obj for one in args)
            of_tensors = sum(map(self._copied_bytes if name.startswith("numpy.") else self._iterated_bytes, args))
            return _capped(size + length * (_POINTER + _INTEGER * ranges) + of_tensors), length
        if name == "builtins.range":
            return 0, self._range_length(args)
        if name == "array.array" and len(args) > 1:
            size = self._length(args[1]) * _POINTER + self._iterated_bytes(args[1])
            return _capped(size), self._length(args[1])
        if name == "_codecs.encode":
            codec = args[1] if len(args) > 1 and type(args[1]) is str else "utf-8"
            length = _capped(self._length(first) * _ENCODED.get(codec.lower(), 10))
            return (length if type(first) is Obj else 0), length
        if name in _TEXTS:
            size = self._expansion(first)[0] * 2 if _children(first) else 0
            return _capped(size), _capped(size)
        if name == "fractions.Fraction":
            return _capped(sum(map(_size_of_number, args))), 0
        if name == "logging.getLogger" and type(first) is str:
            return _capped(first.count(".") * len(first) // 2), 0
        return self._size_of_tensor(name, args), 0

    def _size_of_numpy(self, name: str, args: tuple[Value, ...]) -> int:
        if name.endswith(".multiarray._reconstruct") and len(args) > 2:
            return _capped(self._tensors.elements(args[1]) * _type_bytes(args[2]))
        if name == "numpy.ma.core._mareconstruct" and len(args) > 3:
            return _capped(2 * self._tensors.elements(args[2]) * _type_bytes(args[3]))
        if name.endswith(".multiarray.scalar") and len(args) == 1:
            return _capped(_type_bytes(args[0]))
        return 0

    def _size_of_tensor(self, name: str, args: tuple[Value, ...]) -> int:
        last = name.rpartition(".")[2]
        if _OF_TENSORS.fullmatch(name):
            first = args[0] if args else None
            if self._tensors.is_shape(first):
                return _capped(self._tensors.elements(first) * item_bytes(last))
            if type(first) in (list, tuple):
                return _capped(self._expansion(first, iterated=True)[0] * _POINTER)
            if type(first) is Obj and self._tensors.number(first) is None:
                size = self._iterated_bytes(first) if last.endswith("Storage") else 0
                return _capped(self._length(first) * _POINTER + size)
            return _capped(self._tensors.elements(args) * item_bytes(last)) if args else 0
        if name.startswith("torch._utils._rebuild_tensor") and len(args) > 3:
            dtype = args[6] if name.endswith("_v3") and len(args) > 6 else None
            return _capped(self._grown_bytes(args[0], args[1], args[2], args[3], dtype))
        if name == "torch._utils._rebuild_qtensor" and len(args) > 2:
            quantizer = sum(map(self._written_bytes, self._tensors.within(args[4:5])))
            grown = self._grown_bytes(*args[:4]) if len(args) > 3 else 0
            return _capped(self._beyond(Obj(None, args)) + quantizer + grown)
        if name == "torch._utils._rebuild_nested_tensor":
            sizes = (self._tensors.of(tensor) for tensor in args[1:])
            return _capped(sum(max(0, size.elements - size.held) * _TENSOR_OBJECT for size in sizes))
        if _COPYING_TENSORS.fullmatch(name):
            return _capped(sum(map(self._written_bytes, self._tensors.within(args))))
        return 0

    def _written_bytes(self, tensor: Value) -> int:
        """Bytes of a tensor once each element is written out, less those that its storage has in the file."""
        size = self._tensors.of(tensor)
        held = 0 if size.key in self._copied else size.held
        self._copied.add(size.key if type(size.key) in (str, int, bytes) else None)
        return max(0, size.elements - held) * _POINTER

    def _grown_bytes(self, storage: Value, offset: Value, shape: Value, strides: Value, dtype: Value = None) -> int:
        """Bytes that a tensor needs beyond those of the storage that it is set to. `dtype` is its own where it has one.

        Storages that calls make, and those of legacy files and tar archives, grow to what is set to them. Those of a
        zip archive do not, but there is no honest tensor that is larger than its storage either.
        """
        needed = self._tensors.reach(offset, shape, strides)
        pid = storage.pid if type(storage) is Persistent and type(storage.pid) is tuple else ()
        if len(pid) < 5 or type(pid[1]) is not Global or type(pid[4]) is not int:
            return needed * _POINTER if type(storage) in (Obj, Persistent) else 0
        item, name = item_bytes(pid[1].name), STORAGE_DTYPES.get(pid[1].name, "")
        held = min(pid[4] * item, self._held.get(_key_of(pid), MAX_SIZE))
        if type(dtype) is Global:
            item, name = BITS.get(dtype.name, 8) // 8 or 1, dtype.name
        return max(0, -(-needed // PACKED.get(name, 1)) * item - held)

    def _copied_bytes(self, value: Value) -> int:
        """Bytes that numpy allocates for a tensor, or for the tensors, ranges and lists in a list."""
        if type(value) in (list, tuple):
            return max(0, self._expansion(value, iterated=True)[0] * _POINTER)
        return self._tensors.of(value).elements * _POINTER

    def _iterated_bytes(self, value: Value) -> int:
        """Bytes of the tensors that a tensor gives to what iterates over it."""
        return self._tensors.of(value).elements * _TENSOR_OBJECT

    def _judge_state(self, target: Value, state: Value) -> None:
        """Count what a BUILD allocates: an array of objects is made as long as its shape says, whatever list follows;
        a tensor grows a storage to its geometry; other classes go through the tensors in their state.
        """
        if type(target) is not Obj or type(target.cls) is not Global:
            return
        name, root = target.cls, self._tensors.name_of(target)
        root = self._tensors.name_of(made_by(self._plain, target)) if root in _MAKERS and target.args else root
        if type(state) is tuple and len(state) > 4 and root.endswith("._reconstruct") and type(state[4]) is list:
            extra = self._tensors.elements(state[1]) - len(state[4])
            self._count(name, max(0, extra) * _POINTER)
        if root.startswith("torch.") and type(state) is tuple and len(state) in (4, 5):
            self._count(name, _capped(self._grown_bytes(*state[:4])))
        elif root.startswith(_READING_STATES) and root != "numpy.dtype":
            tensors = self._tensors.within(state)
            self._count(name, _capped(sum(map(self._iterated_bytes, tensors))))
        self._count(name, _capped(self._iterated_bytes(state)))

    def _beyond(self, call: Obj) -> int:
        """Bytes of a quantized tensor that repeats its storage: memory for each element is allocated before."""
        size = self._tensors.measure(Obj(_QTENSOR, call.args))
        pid = call.args[0].pid if type(call.args[0]) is Persistent else None
        kind = pid[1] if type(pid) is tuple and len(pid) > 1 else None
        packed = PACKED.get(STORAGE_DTYPES.get(kind.name, ""), 1) if type(kind) is Global else 1
        return max(0, -(-size.elements // packed) - size.held) * _POINTER

    def _range_length(self, args: tuple[Value, ...]) -> int:
        """Number of elements of a range."""
        numbers = [self._tensors.number(number) for number in args]
        if not 1 <= len(args) <= 3 or any(number is None for number in numbers):
            return 0
        limits = [number for number in numbers if number is not None]
        if any(type(number) is Obj for number in args) and MAX_SIZE in limits:
            return MAX_SIZE
        start, stop = (0, limits[0]) if len(limits) == 1 else limits[:2]
        step = limits[2] if len(limits) == 3 else 1
        if step == 0:
            return 0
        return _capped(-((start - stop) // step) if step > 0 else -((stop - start) // -step))

    def _length(self, value: Value) -> int:
        if type(value) is Obj:
            return self._lengths.get(id(value), 0) + len(value.elems or ())
        if type(value) is SetOf:
            return len(value.elems)
        return len(value) if type(value) in (list, tuple, dict, str, bytes) else 0

    # Keys.

    def _hash_elements(self, name: str, elements: Value) -> None:
        if name in _HASHING and type(elements) in (list, tuple):
            self._steps.take(Budget.FLOW, len(elements))
            self.add_keys(elements, elements)
        elif name in _MAKING_DICTS and type(elements) is list:
            self._steps.take(Budget.FLOW, len(elements))
            pairs = (pair for pair in elements if type(pair) in (list, tuple) and len(pair) == 2)
            self.add_keys(elements, (pair[0] for pair in pairs))

    def _hash_bombs(self) -> Iterator[Bomb]:
        steps, hashes = 0, Counter[tuple[int, int]]()
        for holder, key in self._keys:
            size, depth = self._expansion(key) if self._hashes.reads(key) else (1, 0)
            steps += size
            if depth > _MAX_NESTED:
                yield Bomb(f"hashes a key that nests more than {_MAX_NESTED:,} tuples, which overflows the stack", 0)
                return
            if steps > _MAX_HASH_STEPS:
                yield Bomb(f"hashes its keys in more than {_MAX_HASH_STEPS:,} steps", 0)
                return
            hashes[holder, self._hashes.of(key)] += 1
        for (_, _), count in hashes.most_common(1):
            if count > _MAX_COLLISIONS:
                yield Bomb(f"compares {count:,} keys of one hash with each other", 0)

    def _expansion(self, root: Value, *, iterated: bool = False) -> tuple[int, int]:
        """Number of values in a container, what is shared counted each time, and how deep it is nested.

        `iterated`: with the elements of ranges, copies and tensors, which code that goes through them makes.
        """
        known, entered, waiting, depth = self._iterated if iterated else self._expanded, set[int](), [root], 0
        while waiting:
            value = waiting[-1]
            children = () if id(value) in known else _children(value)
            missing = [child for child in children if _children(child) and id(child) not in known]
            if missing and id(value) not in entered:
                entered.add(id(value))  # a container that holds itself is entered once
                depth += 1
                if depth > _MAX_NESTED:
                    return MAX_SIZE, depth
                self._steps.take(Budget.FLOW, len(children))
                waiting.extend(missing)
                continue
            if id(value) not in known:
                inner = [known.get(id(child), (1, 0)) for child in children]
                size = 1 + sum(size for size, _ in inner)
                if iterated and type(value) is Obj:
                    size += self._length(value) + self._iterated_bytes(value) // _POINTER
                known[id(value)] = (min(size, MAX_SIZE), 1 + max((depth for _, depth in inner), default=0))
            depth -= waiting.pop() is value and id(value) in entered and bool(children)
        return known[id(root)]


def _deepest(calls: Iterable[Obj], name_of: Callable[[Value], str], steps: Steps) -> Global | None:
    """The name of a call that nests more than `_MAX_NESTED` calls in each other; None where there is none.

    Objects of classes in Python keep what their state sets in a dict, and a dict is freed without recursion, as lists
    and tuples are. Slices, deques, defaultdicts and arrays of objects are not. The containers among the arguments of a
    call are not kept. Raises OutOfSteps.
    """
    depths: dict[int, int] = {}
    for call in calls:
        waiting: list[Value] = [call]
        while waiting:
            value = waiting[-1]
            if id(value) in depths and depths[id(value)] >= 0:
                waiting.pop()
                continue
            parts = [part for part in _kept(value, name_of) if type(part) in _HOLDING]
            if id(value) not in depths:
                depths[id(value)] = -1  # what holds itself is not freed so
                steps.take(Budget.FLOW, 1 + len(parts))
                waiting.extend(part for part in parts if id(part) not in depths)
                continue
            depth = max((depths.get(id(part), 0) for part in parts), default=0)
            depths[id(waiting.pop())] = depth = max(0, depth) + (type(value) is Obj)
            if depth > _MAX_NESTED and type(value) is Obj and type(value.cls) is Global:
                return value.cls
    return None


def _kept(value: Value, name_of: Callable[[Value], str]) -> Sequence[Value]:
    """What a container or an object holds, other than in its `__dict__`."""
    if type(value) is not Obj:
        return _children(value)
    state = value.state if name_of(value).startswith(_READING_STATES) else None
    return [*value.args, *(value.elems or ()), *_children(value.items), *_children(value.kwargs), state]


_HOLDING = frozenset([Obj, list, tuple, dict, SetOf])


def _children(value: Any) -> Sequence[Value]:
    """What a container holds, or an object is made of."""
    if type(value) in (list, tuple):
        return value  # type: ignore[no-any-return]
    if type(value) is dict:
        return [*(key.value for key in value if type(key) is Key), *value.values()]
    if type(value) is SetOf:
        return value.elems
    if type(value) is Obj:
        return [*value.args, *(value.elems or ()), *_children(value.items), *_children(value.kwargs), value.state]
    return ()


class _Hashes:
    """The hashes of keys, as far as an attacker chooses them: those of numbers, and of what is made of numbers."""

    def __init__(self, plain: Name) -> None:
        self._plain = plain
        #: Of containers, by id: what many keys share is hashed once.
        self._known: dict[int, int] = {}

    def of(self, value: Value, nesting: int = 0) -> int:
        """Return the hash that Python gives it, or one that all values have whose hash is not known here."""
        if type(value) not in (tuple, list, SetOf, Obj):
            return 0 if type(value) is dict else hash(value)
        if nesting > _MAX_HASHED_NESTING:
            return 0
        if id(value) not in self._known:
            self._known[id(value)] = 0  # of what holds itself
            self._known[id(value)] = self._of_container(value, nesting + 1)
        return self._known[id(value)]

    def reads(self, key: Value) -> bool:
        """Whether the hash of a key is made of those of all that it holds; that of a tensor is its address."""
        name = self._plain(key.cls) if type(key) is Obj and type(key.cls) is Global else ""
        by_address = name.startswith(_HASHED_BY_ADDRESS) and name != "torch.nn.utils.rnn.PackedSequence_"
        by_address = by_address or (name.startswith("torch.") and name.endswith(("Storage", "Tensor")))
        return type(key) in (tuple, SetOf, Obj) and not by_address

    def _of_container(self, value: Value, nesting: int) -> int:
        if type(value) in (tuple, list):
            return hash(tuple(self.of(child, nesting) for child in value))
        if type(value) is SetOf:
            return hash(frozenset(self.of(child, nesting) for child in value.elems))
        assert type(value) is Obj  # noqa: S101  # the only other container
        return self._of_call(value, self._plain(value.cls) if type(value.cls) is Global else "", nesting)

    def _of_call(self, call: Obj, name: str, nesting: int) -> int:
        """Of an object; of a class that hashes nothing but numbers, or is not known, all have the hash of the class."""
        args = call.args
        if name == "builtins.complex" and args and all(type(one) in (int, float) for one in args[:2]):
            return hash(args[0]) + 1_000_003 * hash(args[1] if len(args) > 1 else 0)
        if name in ("torch.Size", "builtins.tuple", "builtins.frozenset") and args and type(args[0]) in (tuple, list):
            hashes = tuple(self.of(child, nesting) for child in args[0])
            return hash(frozenset(hashes) if name.endswith("frozenset") else hashes)
        if name.endswith(".multiarray.scalar") and len(args) > 1:
            return hash(name) if _is_hashed_by_sum(args[0]) else self.of(args[1], nesting)
        if not self.reads(call):
            return id(call)
        if name.startswith(_HASHED_BY_CONTENT):
            state = call.state.values() if type(call.state) is dict else (call.state,)
            return hash((name, *(self.of(child, nesting) for child in (*args, *state))))
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
    """Whether the hash of a number of numpy is a sum of two, so that many collide; of 64 bits at most 33 do."""
    kind = dtype.args[0] if type(dtype) is Obj and dtype.args else None
    return type(kind) is not str or kind[:1] in "cgGVO"


def _pattern_steps(pattern: Value) -> int:
    """Steps of compiling a regular expression, at most."""
    while type(pattern) is Obj and pattern.args:
        pattern = pattern.args[0]
    if type(pattern) not in (str, bytes):
        return MAX_SIZE  # text that is computed
    classes = pattern.count(b"[" if type(pattern) is bytes else "[")
    return int(classes * _STEPS_OF_CHARACTER_CLASS + len(pattern) ** 2 // _SQUARE_OF_STEP)


def _key_of(pid: tuple[Value, ...]) -> Value:
    """The key of a storage as what can be hashed."""
    return pid[2] if type(pid[2]) in (str, int, bytes) else id(pid[2])


def _capped(size: int) -> int:
    return max(0, min(size, MAX_SIZE))


def _type_bytes(dtype: Value) -> int:
    """Bytes of an element of a numpy type."""
    state = dtype.state if type(dtype) is Obj else None
    return (array_dtypes.size_of(dtype if type(dtype) is Obj else Obj(None, (dtype,)), state) or 0) or 1


#: In whose name a quantized tensor is measured.
_QTENSOR = Global("torch._utils", "_rebuild_qtensor", 0)


def _size_of_number(number: Value) -> int:
    """Bytes of the integer that a number is computed as: one told by its exponent, as text or as Decimal's tuple.

    What picklers do not write, numbers that are computed, is as large as can be.
    """
    if type(number) is Obj and len(number.args) == 1 and type(number.cls) is Global and number.cls.name == "Decimal":
        number = number.args[0]
        if type(number) is tuple and len(number) == 3 and type(number[2]) is int:
            return _capped(abs(number[2]) * _MEMO_ENTRY)
    if type(number) in (int, float, bool):
        return 0
    if type(number) is not str:
        return MAX_SIZE
    match = _EXPONENT.search(number)
    digits = match[1].replace("_", "") if match else ""
    if len(digits) > _MAX_EXPONENT_DIGITS:
        return MAX_SIZE
    return _capped(int(digits or 0) * _MEMO_ENTRY)


def _amount(size: int) -> str:
    for unit, name in ((2**60, "EiB"), (2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:,} bytes"
