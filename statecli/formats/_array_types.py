"""Whether the state that a pickle gives to a numpy dtype is one that numpy writes.

numpy takes it as it is. Flags that deny the objects among the fields, or a field that lies outside of its record, make
it take bytes of the file for addresses: that crashes the process, or hands it over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from statecli.formats._pickle import Global, Obj, Value

#: What numpy writes for the type, as the first argument: a letter and a number of bytes, or of characters.
_CODE = re.compile(r"[<>|=]?([?biufcSUVOMmTa])(\d*)\Z", re.ASCII)
_FIXED = {"?": 1, "O": 8}
#: Their state says how many bytes they have.
_SIZED = frozenset("SUVa")
#: Fields in fields in fields; numpy itself goes no deeper than 64.
_MAX_DEPTH = 64
#: The flag of a type whose elements are counted references.
_OBJECTS = 1


def is_sound(dtype: Obj, state: Value, depth: int = 0) -> bool:
    """Whether the type is told by its code, has the flags of its fields, and its fields lie in it."""
    code, size = _coded(dtype)[0], size_of(dtype, state)
    if type(state) is not tuple or len(state) < 8 or size is None or depth > _MAX_DEPTH:
        return False
    objects = code == "O"
    for inner, at, count in _parts(state):
        own = inner.state if type(inner) is Obj else None
        length = size_of(inner, own) if type(inner) is Obj and is_sound(inner, own, depth + 1) else None
        if length is None or at < 0 or at + length * count > size:
            return False
        objects = objects or _has_objects(own)
    return type(state[7]) is int and objects == _has_objects(state)


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


def _parts(state: tuple[Value, ...]) -> Iterator[tuple[Value, int, int]]:
    """Each type inside this one, where it begins, and how many of it there are; -1 where that is no number."""
    subarray, fields = state[2], state[4]
    if type(subarray) is tuple and len(subarray) == 2:
        shape = subarray[1] if type(subarray[1]) is tuple else (subarray[1],)
        whole = all(type(one) is int and one >= 0 for one in shape)
        yield subarray[0], 0 if whole else -1, math.prod(shape) if whole else 0
    elif subarray is not None:
        yield None, -1, 0
    if type(fields) is dict:
        for field in fields.values():
            told = type(field) is tuple and len(field) > 1 and type(field[1]) is int
            yield (field[0], field[1], 1) if told else (None, -1, 0)
    elif fields is not None:
        yield None, -1, 0
