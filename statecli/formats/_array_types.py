"""Whether the state that a pickle gives to a numpy dtype is one that numpy writes.

numpy takes it as it is. Flags that deny the objects among the fields, or a field that lies outside of its record, make
it take bytes of the file for addresses: that crashes the process, or hands it over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from statecli.formats._pickle import Global, Obj, Value
from statecli.formats._steps import Budget, Steps

#: What numpy writes for the type, as the first argument: a letter and a number of bytes, or of characters.
_CODE = re.compile(r"[<>|=]?([?biufcSUVOMmTa])(\d*)\Z", re.ASCII)
_FIXED = {"?": 1, "O": 8}
#: Their state says how many bytes they have.
_SIZED = frozenset("SUVa")
#: Fields in fields in fields; numpy itself goes no deeper than 64.
_MAX_DEPTH = 64
#: Numbers of a shape, and the largest: numpy itself has no more than 64, and none above.
_MAX_DIMENSIONS = 64
_MAX_LENGTH = 2**63
#: The flag of a type whose elements are counted references.
_OBJECTS = 1


class ArrayTypes:
    """The numpy types of one pickle. A type that many others have in them is judged once."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        #: How deep the types in a type are nested, by its id; 0 where it is not sound, or is being judged.
        self._depths: dict[int, int] = {}

    def is_sound(self, dtype: Obj, state: Value) -> bool:
        """Whether the type is told by its code, has the flags of its fields, and its fields lie in it.

        Raises OutOfSteps.
        """
        return self._depth(dtype, state, 1) > 0

    def _depth(self, dtype: Obj, state: Value, outer: int) -> int:
        code, size = _coded(dtype)[0], size_of(dtype, state)
        if type(state) is not tuple or len(state) < 8 or size is None or outer > _MAX_DEPTH:
            return 0
        deepest, objects = 0, code == "O"
        for inner, at, count in self._parts(state):
            own = inner.state if type(inner) is Obj else None
            depth = self._depth_of_part(inner, own, outer + 1) if type(inner) is Obj else 0
            length = size_of(inner, own) if depth else None
            if length is None or at < 0 or at + length * count > size:
                return 0
            deepest, objects = max(deepest, depth), objects or _has_objects(own)
        is_sound = type(state[7]) is int and objects == _has_objects(state) and deepest < _MAX_DEPTH
        return deepest + 1 if is_sound else 0

    def _depth_of_part(self, dtype: Obj, state: Value, outer: int) -> int:
        known = self._depths.get(id(dtype))
        if known is None:
            self._depths[id(dtype)] = 0  # a type that is a part of itself is not sound
            known = self._depths[id(dtype)] = self._depth(dtype, state, outer)
        return known

    def _parts(self, state: tuple[Value, ...]) -> Iterator[tuple[Value, int, int]]:
        """Each type inside this one, where it begins, and how many of it there are; -1 where that is no number."""
        subarray, fields = state[2], state[4]
        self._steps.take(Budget.FLOW)
        if type(subarray) is tuple and len(subarray) == 2:
            count = count_of(subarray[1])
            yield subarray[0], 0 if count is not None else -1, count or 0
        elif subarray is not None:
            yield None, -1, 0
        if type(fields) is dict:
            self._steps.take(Budget.FLOW, len(fields))
            for field in fields.values():
                told = type(field) is tuple and len(field) > 1 and type(field[1]) is int
                yield (field[0], field[1], 1) if told else (None, -1, 0)
        elif fields is not None:
            yield None, -1, 0


def count_of(shape: Value) -> int | None:
    """Number of elements in an array of this shape; None where it is no shape."""
    lengths = shape if type(shape) is tuple else (shape,)
    if len(lengths) > _MAX_DIMENSIONS or not all(type(one) is int and 0 <= one < _MAX_LENGTH for one in lengths):
        return None
    return math.prod(lengths)


def size_of(dtype: Obj, state: Value) -> int | None:
    """Bytes of an element; None where that cannot be told."""
    code, digits = _coded(dtype)
    if code in _SIZED and type(state) is tuple and len(state) > 5 and type(state[5]) is int and state[5] >= 0:
        return state[5]
    return int(digits[:9] or _FIXED.get(code, 0)) * (4 if code == "U" else 1) if code else None


def _coded(dtype: Obj) -> tuple[str, str]:
    """The letter of the type and its digits; "" where it is told in another way. Of a record array it is a class."""
    first = dtype.args[0] if dtype.args else None
    if type(first) is Global and first.module.startswith("numpy") and first.name == "record":
        return "V", ""
    match = _CODE.match(first) if type(first) is str else None
    return (match.group(1), match.group(2)) if match else ("", "")


def _has_objects(state: Value) -> bool:
    return type(state) is tuple and len(state) > 7 and type(state[7]) is int and bool(state[7] & _OBJECTS)
