"""Read the number types of numpy in a pickle: calls of `numpy.dtype`, and states with the byte order."""

from __future__ import annotations

import re
import struct

import msgspec

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickles.nodes import Global, Obj, Value

_NUMBER = compile_on_use(r"[biufc]\d+", re.ASCII)
_NUMBER_OR_DATE = compile_on_use(r"[<>|=]?[?biufcmM]\d*(?:\[\w+\])?", re.ASCII)
_TEXT = compile_on_use(r"U(\d{1,6})", re.ASCII)
#: numpy's codes of the numbers that `struct` reads.
_STRUCT_CODES = {"f2": "e", "f4": "f", "f8": "d", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "b1": "?"}
_STRUCT_CODES |= {"u1": "B", "u2": "H", "u4": "I", "u8": "Q"}


class NumberType(msgspec.Struct, frozen=True):
    """A number type of numpy; `code` is in numpy's notation, such as `f4`."""

    code: str
    is_big_endian: bool


def read_number_type(node: Value) -> NumberType | None:
    """Return the number type that a call of numpy.dtype creates; None for other nodes and for unusual forms.

    Called with other arguments, numpy.dtype returns a built-in type that ignores its state. A state may also turn a
    number into a type with subarrays and fields.
    """
    if type(node) is not Obj or type(node.cls) is not Global or node.cls.qualified != "numpy.dtype" or node.kwargs:
        return None
    code, state = node.args[0] if node.args else None, node.state
    if type(code) is not str or not _NUMBER.fullmatch(code) or node.args[1:] != (False, True):
        return None
    if state is None:
        return NumberType(code, False)
    is_plain = type(state) is tuple and len(state) >= 8 and state[2:5] == (None, None, None)
    return NumberType(code, state[1] == ">") if is_plain and state[1] in ("<", ">", "|", "=") else None


def read_number(dtype: Value, data: bytes) -> Value:
    """Return the number in the bytes of a scalar; None if the type is unknown or the size differs."""
    number = read_number_type(dtype)
    if number is None or number.code not in _STRUCT_CODES:
        return None
    form = (">" if number.is_big_endian else "<") + _STRUCT_CODES[number.code]
    return struct.unpack(form, data)[0] if struct.calcsize(form) == len(data) else None


def is_number_or_date(dtype: Value) -> bool:
    """Return True for numpy's dtype of numbers or dates, whose values never equal a text."""
    is_type = type(dtype) is Obj and type(dtype.cls) is Global and dtype.cls.qualified == "numpy.dtype"
    code = dtype.args[0] if is_type and dtype.args else None
    return type(code) is str and _NUMBER_OR_DATE.fullmatch(code) is not None


def read_text(dtype: Value, data: bytes) -> str | None:
    """Return the text in the bytes of a scalar; None if `dtype` is not a text dtype of this length."""
    if type(dtype) is not Obj or type(dtype.cls) is not Global or dtype.cls.qualified != "numpy.dtype":
        return None
    code, state = dtype.args[0] if dtype.args else None, dtype.state
    if type(code) is not str or not (match := _TEXT.fullmatch(code)) or int(match[1]) * 4 != len(data):
        return None
    is_big_endian = type(state) is tuple and state[1:2] == (">",)
    return data.decode("utf-32-be" if is_big_endian else "utf-32-le", "replace").rstrip("\0")
