"""Compute Python's hashes of dictionary keys, because a file can choose many keys with the same hash."""

from __future__ import annotations

import ipaddress
import re
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import exceptions, numpy_dtype_states
from statecli.pickle_scan.expected_calls import get_plain_name, is_clean, is_copyreg_call
from statecli.pickles.graph import read_raw_bytes
from statecli.pickles.nodes import Global, Obj, SetOf, Value

#: Depth to which nested tuples are hashed to find collisions; every deeper tuple counts as hash 0.
_MAX_HASHED_NESTING = 100


#: Largest number of elements with the same hash in a frozenset that are compared.
_MAX_SAME_HASHES = 8
#: Types whose values are compared as Python compares them.
_PLAIN_TYPES = frozenset([type(None), bool, int, float, str, bytes])


class _Hashed:
    """Stand-in for a container's element with a known hash; it equals only itself."""

    __slots__ = ("_hash",)

    def __init__(self, number: int) -> None:
        self._hash = number

    def __hash__(self) -> int:
        return self._hash


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
            return self._hash_tuple(value, nesting)
        if type(value) is SetOf:
            return self._hash_set(value.elems, nesting)
        assert type(value) is Obj  # noqa: S101  # the only other container
        return self._hash_call(value, nesting)

    def _hash_tuple(self, children: Iterable[Value], nesting: int) -> int:
        return hash(tuple(_Hashed(self.compute_hash(child, nesting)) for child in children))

    def _hash_set(self, children: Iterable[Value], nesting: int) -> int:
        """Return the hash of a frozenset; 0 if statecli cannot compare elements that have the same hash."""
        groups: dict[int, list[Value]] = {}
        for child in children:
            group = groups.setdefault(self.compute_hash(child, nesting), [])
            if any(child is other for other in group):
                continue
            if group and not _PLAIN_TYPES.issuperset(map(type, (child, *group))):
                return 0
            if child not in group:
                group.append(child)
            if len(group) > _MAX_SAME_HASHES:
                return 0
        return hash(frozenset(_Hashed(number) for number, group in groups.items() for _ in group))

    def _hash_call(self, call: Obj, nesting: int) -> int:
        """Return Python's hash of the object that a call creates; if unknown, one hash for all objects of the class."""
        name, args = _get_class_name(call), call.args
        if name == "builtins.complex" and args and all(type(arg) in (int, float) for arg in args[:2]):
            return _hash_complex(call, _build_complex(args))
        if name in ("torch.Size", "builtins.tuple", "builtins.frozenset") and args and type(args[0]) in (tuple, list):
            return (self._hash_set if name.endswith("frozenset") else self._hash_tuple)(args[0], nesting)
        if name.endswith(".multiarray.scalar") and len(args) > 1:
            number = _read_numpy_complex(args[0], args[1])
            if number is not None:
                return _hash_complex(call, number)
            return hash(name) if _is_hashed_by_sum(args[0]) else self.compute_hash(args[1], nesting)
        if not reads_contents(call):
            return id(call)
        if name.startswith(_HASHED_BY_CONTENT):
            state = call.state.values() if type(call.state) is dict else (call.state,)
            return hash((name, *(self.compute_hash(child, nesting) for child in (*args, *state))))
        number = _hash_number(name, args, call.state)
        return hash(name) if number is None else number


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


def _build_complex(args: Sequence[Any]) -> complex:
    try:
        return complex(*args[:2])
    except OverflowError:
        return 0j  # loading fails


def _read_numpy_complex(dtype: Value, data: Value) -> complex | None:
    """Return the value of a numpy complex64 or complex128, which numpy hashes as Python does; None for other values."""
    if type(dtype) is not Obj or numpy_dtype_states.get_code(dtype) != "c":
        return None
    size, raw = numpy_dtype_states.count_element_bytes(dtype, dtype.state), read_raw_bytes(data)
    layout = {8: "2f", 16: "2d"}.get(size or 0)
    if layout is None or raw is None or len(raw) < struct.calcsize(layout):
        return None
    order = ">" if numpy_dtype_states.is_swapped(dtype) else "<"
    return complex(*struct.unpack_from(f"{order}{layout}", raw))


def _hash_complex(call: Obj, number: complex) -> int:
    return hash(number) if number == number else id(call)  # NaN is hashed by address


def _hash_number(name: str, args: Sequence[Any], state: object) -> int | None:
    """Return the hash of a number-like object (Fraction, Decimal, UUID, range, IP address); None if unknown."""
    is_integer = all(type(arg) is int for arg in args)
    if name == "uuid.UUID":
        number = state.get("int") if type(state) is dict else None
        return hash(number) if type(number) is int else None
    if name == "builtins.range" and is_integer and 0 < len(args) < 4 and 0 not in args[2:]:
        return hash(range(*args))
    if name == "fractions.Fraction":
        return _hash_ratio(*args) if is_integer and len(args) == 2 else _hash_text(_FRACTION, args)
    if name == "decimal.Decimal":
        return _hash_text(_DECIMAL, args)
    if name.startswith("ipaddress.") and len(args) == 1 and (is_integer or _is_short_text(args[0])):
        try:
            return hash(getattr(ipaddress, name.removeprefix("ipaddress."))(args[0]))
        except ValueError:
            return None  # loading fails
    return None


def _is_short_text(value: object) -> bool:
    return type(value) is str and len(value) <= _MAX_DIGITS


def _hash_text(pattern: Any, args: Sequence[Any]) -> int | None:
    """Return the hash of the number that a text spells; None for another text, such as `NaN`."""
    spelling = pattern.fullmatch(args[0]) if len(args) == 1 and _is_short_text(args[0]) else None
    if spelling is None:
        return None
    parts = spelling.groupdict("")
    fraction, exponent = parts.get("fraction", ""), int(parts.get("exponent") or 0)
    scale = pow(10, exponent - len(fraction), sys.hash_info.modulus)
    number = int(parts["sign"] + parts["digits"] + fraction) * scale
    return _hash_ratio(number, int(parts.get("denominator") or 1))


def _hash_ratio(numerator: int, denominator: int) -> int:
    """Return the hash of a fraction as Python's documentation of numeric types defines this hash."""
    if denominator % sys.hash_info.modulus == 0:
        return sys.hash_info.inf
    return hash(numerator * pow(denominator, -1, sys.hash_info.modulus))


#: Longest text of a number that is read, in characters.
_MAX_DIGITS = 256
_FRACTION = compile_on_use(r"(?P<sign>-?)(?P<digits>[0-9]+)(?:/(?P<denominator>[0-9]+))?")
_DECIMAL = compile_on_use(
    r"(?P<sign>-?)(?P<digits>[0-9]+)(?:\.(?P<fraction>[0-9]+))?(?:E(?P<exponent>[-+]?[0-9]+))?", re.IGNORECASE
)
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
