"""Non-numeric dtype of a numpy array in a pickle: text, times with their unit, records with their fields.

A dtype is `numpy.dtype('V8', False, True)` with a state: (version, byte order, part and shape, names, fields, bytes,
alignment, flags, metadata). Source: arraydescr_reduce in numpy/_core/src/multiarray/descriptor.c of numpy 2.4.
"""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec

from statecli.core.errors import MalformedError
from statecli.core.record_dtypes import RecordField, format_code, format_fields, name_dtype
from statecli.pickles.graph import as_mapping, get_name, read_raw_bytes
from statecli.pickles.nodes import Obj

#: Maximum depth of nested records, and maximum number of fields of an array's dtype (fields of a shared record count
#: each time).
MAX_DEPTH = 32
MAX_FIELDS = 10_000


def format_array_dtype(node: object) -> str:
    """Return the name of an array's dtype: `numpy U3`, `numpy M8[ms]` or `numpy V8 [('lr', '<f4')]`.

    Raises MalformedError for fields not written by numpy.
    """
    code = _read_code(node) or "of no name"
    state = _read_state(node)
    if get_name(node.cls if type(node) is Obj else None) != "numpy.dtype" or (state[2] is None and not state[3]):
        return f"numpy {code}{_format_unit(code, state)}"
    layout = _Layouts().read(node, 0)
    return name_dtype("O" if code[0] == "O" else f"V{layout.size}", layout.dtype)


class _Layout(msgspec.Struct, frozen=True):
    dtype: str
    size: int


class _Layouts:
    """Reader of a dtype and the dtypes of its fields."""

    def __init__(self) -> None:
        self._fields = 0

    def read(self, node: object, depth: int) -> _Layout:
        code, state = _read_code(node), _read_state(node)
        if depth == MAX_DEPTH:
            raise MalformedError(
                f"a numpy dtype nests records more than {MAX_DEPTH} levels deep, the limit of statecli"
            )
        if state[2] is not None:
            return self._read_part(state[2], depth)
        if state[3]:
            return self._read_fields(state, depth)
        size = _read_size(code, state)
        if not code or size is None:
            raise _create_error("a field has an unknown type")
        order = ">" if state[1] in (">", b">") else "<"
        return _Layout(format_code(f"{order}{code}{_format_unit(code, state)}"), size)

    def _read_part(self, part: object, depth: int) -> _Layout:
        """Read the type of an array field of a record. The type is a pair of the element type and a shape."""
        if type(part) is not tuple or len(part) != 2:
            raise _create_error("the shape of a field is missing")
        element = self.read(part[0], depth + 1)
        shape = part[1] if type(part[1]) is tuple else (part[1],)
        if any(type(count) is not int or not 0 <= count < 2**63 for count in shape):
            raise _create_error("the shape of a field is not a tuple of sizes")
        return _Layout(f"{element.dtype}, {shape}", prod(shape) * element.size)

    def _read_fields(self, state: tuple[Any, ...], depth: int) -> _Layout:
        names, entries, size = state[3], as_mapping(state[4]), state[5]
        if type(names) is not tuple or entries is None or type(size) is not int or not 0 <= size < 2**63:
            raise _create_error("the names, fields and size of a dtype are not a tuple, a dict and a number")
        self._fields += len(names)
        if self._fields > MAX_FIELDS:
            raise MalformedError(f"a numpy dtype has more than {MAX_FIELDS:,} fields, the limit of statecli")
        return _Layout(format_fields([self._read_field(name, entries, depth) for name in names], size), size)

    def _read_field(self, name: Any, entries: Any, depth: int) -> RecordField:
        entry = entries.get(name) if type(name) in (str, bytes) else None
        if type(entry) is not tuple or len(entry) not in (2, 3) or type(entry[1]) is not int or entry[1] < 0:
            raise _create_error("a field does not have a type and an offset")
        layout = self.read(entry[0], depth + 1)
        text = name if type(name) is str else str(name, "latin-1")
        title = entry[2] if len(entry) == 3 and type(entry[2]) is str else None
        return RecordField(repr(text if title is None else (title, text)), layout.dtype, entry[1], layout.size)


def _read_code(node: object) -> str:
    """Return the code of a dtype, such as `V8`. For a class such as `numpy.record`, return its name (`record`)."""
    code = node.args[0] if type(node) is Obj and node.args else None
    return code if type(code) is str else get_name(code).removeprefix("numpy.")


def _read_state(node: object) -> tuple[Any, ...]:
    """Return the pickled state of a dtype as at least nine entries. Missing entries are None."""
    state = node.state if type(node) is Obj and type(node.state) is tuple else ()
    return (*state, *[None] * (9 - len(state)))


def _read_size(code: str, state: tuple[Any, ...]) -> int | None:
    """Return the size of an element in bytes: the recorded size for text and void, otherwise the size in the code."""
    digits = code[1:]
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 9:
        return None
    size = state[5]
    return size if code[0] in "SUV" and type(size) is int and size >= 0 else int(digits) * (4 if code[0] == "U" else 1)


def _format_unit(code: str, state: tuple[Any, ...]) -> str:
    """Return the unit of a date or time dtype, such as `[25s]`, or "" for any other dtype."""
    metadata = state[8]  # (metadata, (unit, count, divisor, event))
    if code not in ("M8", "m8") or type(metadata) is not tuple or len(metadata) != 2 or type(metadata[1]) is not tuple:
        return ""
    unit, count, divisor = (*metadata[1], None, None, None)[:3]
    raw = read_raw_bytes(unit)
    name = unit if raw is None else raw.decode("latin-1")
    if type(name) is not str or type(count) is not int or abs(count) >= 2**63:
        raise _create_error("the unit of a date or time is not a pair of a name and a number")
    divisor_text = f"/{divisor}" if type(divisor) is int and divisor != 1 and abs(divisor) < 2**63 else ""
    return "" if name == "generic" else f"[{'' if count == 1 else count}{name}{divisor_text}]"


def _create_error(why: str) -> MalformedError:
    return MalformedError(f"a numpy array has a dtype that numpy does not write: {why}")
