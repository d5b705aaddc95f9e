"""Check that the state of a numpy dtype in a pickle is a state written by numpy.

numpy accepts any state. In three cases, bytes of the file become addresses, which crash or take over the process. The
flags deny the objects among the fields. A field is outside of its record or over an object. Or a type changes after its
use in an array.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Global, Obj, Value

#: First argument that numpy writes for a dtype: a letter, and a number of bytes or characters.
_CODE = compile_on_use(r"[<>|=]?([?biufcSUVOMma])(\d*)\Z", re.ASCII)
#: Function that numpy writes for a dtype of texts of any length, and the types of its arguments. Such arguments have no
#: methods from the file.
STRING_DTYPE = "numpy._core._internal._convert_to_stringdtype_kwargs"
_PLAIN_ARGUMENT_TYPES = (str, int, float, bool, type(None))
_FIXED_BYTES = {"?": 1, "O": 8}
#: Codes of the types whose state has the number of bytes.
_SIZED_CODES = frozenset("SUVa")
#: Largest nesting of fields; numpy itself goes no deeper than 64.
_MAX_DEPTH = 64
#: Largest number of dimensions of a shape, and limit of each length; both are numpy's own limits.
_MAX_DIMENSIONS = 64
_MAX_LENGTH = 2**63
#: Flags by which numpy counts references to the elements, pickles them as a list and clears new memory.
_HAS_OBJECTS_FLAGS = 0x1B
#: Flags of an object dtype: the elements are pointers, and a function reads them.
_OBJECT_FLAGS = _HAS_OBJECTS_FLAGS | 0x24
#: Flags by which numpy treats bytes as references.
_REFERENCE_FLAGS = 0x03
#: Flags of text, of a record and of an aligned record.
_HARMLESS_FLAGS = 0x08 | 0x10 | 0x80
_ALIGNED_FLAG = 0x80
#: Alignments of elements of sized types, in bytes; a record may have the alignment of its fields.
_ALIGNMENTS = {"S": (1,), "a": (1,), "U": (4,)}
_DEFAULT_ALIGNMENTS = (1, 2, 4, 8, 16, 32, 64)
#: Number of values in the state of an array: before numpy 1.0, today, with a mask.
_ARRAY_STATE_LENGTHS = (4, 5, 7)
#: Codes of numbers and dates.
NUMBER_CODES = frozenset("?biufcMm")
#: Codes of dates, whose state has the unit after the flags.
_DATE_CODES = frozenset("Mm")


class ArrayTypes:
    """Checker of numpy's dtypes in a pickle. A dtype nested in several dtypes is checked once."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        #: Ids of the types that another value refers to; numpy sets the state of a type before that.
        self._referenced_types: set[int] = set()
        #: Nesting depth of each type, by its id; 0 for a type that is invalid or is being checked.
        self._depths: dict[int, int] = {}

    def is_sound(self, dtype: Obj, state: Value) -> bool:
        """Return True for a valid dtype: a new object with a known code, valid flags and fields at valid offsets.

        Raises OutOfSteps.
        """
        return id(dtype) not in self._referenced_types and self._measure_depth(dtype, state, 1) > 0

    def add_referenced_types(self, values: Iterable[Value]) -> None:
        """Record the dtypes among the values, because a dtype must not change after its first use."""
        self._referenced_types.update(id(value) for value in values if is_dtype(value))

    def is_sound_array(self, state: Value) -> bool:
        """Return True for a valid state of an array: the dtype is known, and a list has one object for each element.

        numpy reads beyond a short list. Types from other sources (a class of `numpy.dtypes`, a function that returns
        its argument) are unknown, because their elements may be pointers.
        """
        if type(state) is not tuple or len(state) not in _ARRAY_STATE_LENGTHS:
            return False
        self.add_referenced_types(state)
        shape, dtype, _, elements = split_array_state(state)
        count = count_elements(shape) if type(shape) is tuple else None
        is_full = type(elements) is list and len(elements) == count
        if is_string_dtype(dtype):
            self._steps.take(Budget.FLOW, len(elements) if is_full else 0)
            return is_full and all(type(text) in _PLAIN_ARGUMENT_TYPES for text in elements)
        if not is_dtype(dtype) or not get_code(dtype):
            return False
        fill = state[6] if len(state) > 6 else None  # of a masked array
        if type(fill) is Obj and not (type(fill.cls) is Global and fill.cls.qualified.startswith("numpy.")):
            return False
        return is_full if _holds_objects(dtype) else count is not None and type(elements) is not list

    def is_sound_scalar(self, args: tuple[Value, ...]) -> bool:
        """Return True for a valid scalar. A record that holds objects must come from a non-empty array of its dtype."""
        if len(args) != 2 or not is_dtype(args[0]):
            return False
        dtype, source = args
        if not _holds_objects(dtype) or _parse_code(dtype)[0] == "O":
            return True
        state = source.state if type(source) is Obj else None
        return type(state) is tuple and len(state) > 4 and state[2] is dtype and bool(count_elements(state[1]))

    def _measure_depth(self, dtype: Obj, state: Value, outer_depth: int) -> int:
        code, size = _parse_code(dtype)[0], count_element_bytes(dtype, state)
        if type(state) is not tuple or len(state) < 8 or size is None or outer_depth > _MAX_DEPTH:
            return 0
        deepest, spans = 0, []
        for inner, at, count in self._iter_parts(state):
            inner_state = inner.state if type(inner) is Obj else None
            depth = self._measure_part_depth(inner, inner_state, outer_depth + 1) if is_dtype(inner) else 0
            length = count_element_bytes(inner, inner_state) if depth else None
            if length is None or at < 0 or at + length * count > size:
                return 0
            self._referenced_types.add(id(inner))
            deepest = max(deepest, depth)
            spans.append((at, at + length * count, _holds_objects(inner)))
        is_apart = _has_no_overlap(spans) and deepest < _MAX_DEPTH and _is_numpy_state(dtype, state)
        return deepest + 1 if is_apart and _has_valid_flags(state, code, any(span[2] for span in spans)) else 0

    def _measure_part_depth(self, dtype: Obj, state: Value, outer_depth: int) -> int:
        depth = self._depths.get(id(dtype))
        if depth is None:
            self._depths[id(dtype)] = 0  # a type that is a part of itself is not sound
            depth = self._depths[id(dtype)] = self._measure_depth(dtype, state, outer_depth)
        return depth

    def _iter_parts(self, state: tuple[Value, ...]) -> Iterator[tuple[Value, int, int]]:
        """Yield (dtype, offset, count) for each dtype nested in a state; the offset is -1 for an invalid entry."""
        subarray, fields = state[2], state[4]
        self._steps.take(Budget.FLOW)
        if type(subarray) is tuple and len(subarray) == 2:
            count = count_elements(subarray[1])
            yield subarray[0], 0 if count is not None else -1, count or 0
        elif subarray is not None:
            yield None, -1, 0
        if type(fields) is dict:
            self._steps.take(Budget.FLOW, len(fields))
            # A title is a second key of its field.
            for field in {id(field): field for field in fields.values()}.values():
                is_field = type(field) is tuple and len(field) > 1 and type(field[1]) is int
                yield (field[0], field[1], 1) if is_field else (None, -1, 0)
        elif fields is not None:
            yield None, -1, 0


def split_array_state(state: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return the shape, dtype, order and data from the state of an array or a masked array."""
    return state[:4] if len(state) == 4 else state[1:5]


def is_dtype(value: Value) -> bool:
    """Return True for a call of `numpy.dtype`."""
    return type(value) is Obj and type(value.cls) is Global and value.cls.qualified == "numpy.dtype"


def is_string_dtype(value: Value) -> bool:
    """Return True for a call, with plain arguments, that creates numpy's dtype for texts of any length."""
    if type(value) is not Obj or type(value.cls) is not Global or value.cls.qualified != STRING_DTYPE:
        return False
    is_plain = value.how == "reduce" and not value.kwargs and len(value.args) in (1, 2)
    return is_plain and all(type(argument) in _PLAIN_ARGUMENT_TYPES for argument in value.args)


def _holds_objects(dtype: Value) -> bool:
    return is_dtype(dtype) and (_parse_code(dtype)[0] == "O" or _has_objects(dtype.state))


def _has_no_overlap(spans: list[tuple[int, int, bool]]) -> bool:
    """Return True if no field overlaps a field with objects. A span is (start, end, whether the field has objects)."""
    if not any(has_objects for _, _, has_objects in spans):
        return True
    spans = sorted(span for span in spans if span[0] < span[1])
    end, end_of_objects = 0, 0
    for begin, after, has_objects in spans:
        if begin < (end if has_objects else end_of_objects):
            return False
        end = max(end, after)
        end_of_objects = max(end_of_objects, after) if has_objects else end_of_objects
    return True


def _is_numpy_state(dtype: Obj, state: tuple[Value, ...]) -> bool:
    """Return True if version, byte order, size, alignment, names and unit are as numpy writes them for this dtype."""
    version, order, subarray, names, fields, size, alignment = state[:7]
    code, digits = _parse_code(dtype)
    is_byte = code in "?OSVa" or (digits == "1" and code != "U")
    is_sized = type(size) is int and 0 <= size < 2**31 and alignment in _ALIGNMENTS.get(code, _DEFAULT_ALIGNMENTS)
    if code in _SIZED_CODES and not (is_sized and int(digits or size) * (4 if code == "U" else 1) == size):
        return False
    if code not in _SIZED_CODES and not (size == alignment == -1 and subarray is None):
        return False
    is_record = type(names) is tuple and type(fields) is dict
    has_named_fields = is_record and all(type(name) in (str, bytes) and name in fields for name in names)
    has_no_fields = names is None and fields is None
    is_ordered = type(order) is str and len(order) == 1 and order in ("|" if is_byte else "<>")
    return version in (3, 4) and is_ordered and (has_named_fields or has_no_fields) and _has_unit(code, state)


def _has_unit(code: str, state: tuple[Value, ...]) -> bool:
    """Return True if the rest of the state is valid: a unit for dates, a metadata dict or nothing for other dtypes."""
    metadata = state[8:]
    if code not in _DATE_CODES:
        return not metadata or (len(metadata) == 1 and type(metadata[0]) is dict)
    return len(metadata) == 1 and type(metadata[0]) is tuple and [type(part) for part in metadata[0][1:]] == [tuple]


def _has_valid_flags(state: tuple[Value, ...], code: str, has_objects: bool) -> bool:
    """Return True if the flags in a dtype's state are valid for its code. `has_objects`: a field holds objects."""
    flags = state[7]
    if type(flags) is not int or not -0x80 <= flags <= 0xFF:
        return False
    flags &= 0xFF  # numpy 1 wrote a signed byte
    if code == "O":
        return flags == _OBJECT_FLAGS and not has_objects
    return (
        flags & ~_ALIGNED_FLAG in (_HAS_OBJECTS_FLAGS, _OBJECT_FLAGS) if has_objects else not flags & ~_HARMLESS_FLAGS
    )


def count_elements(shape: Value) -> int | None:
    """Return the number of elements in an array of this shape; None for an invalid shape."""
    lengths = shape if type(shape) is tuple else (shape,)
    is_valid = all(type(length) is int and 0 <= length < _MAX_LENGTH for length in lengths)
    return math.prod(lengths) if is_valid and len(lengths) <= _MAX_DIMENSIONS else None


def count_element_bytes(dtype: Obj, state: Value) -> int | None:
    """Return the size of an array element in bytes; None if unknown."""
    code, digits = _parse_code(dtype)
    if code in _SIZED_CODES and type(state) is tuple and len(state) > 5 and type(state[5]) is int and state[5] >= 0:
        return state[5]
    return int(digits[:9] or _FIXED_BYTES.get(code, 0)) * (4 if code == "U" else 1) if code else None


def is_swapped(dtype: Obj) -> bool:
    """Return True for a big-endian dtype: `>` in its state or its code. Little-endian machines swap its elements."""
    state, first = dtype.state, dtype.args[0] if dtype.args else None
    if type(state) is tuple and len(state) > 1:
        return state[1] not in ("<", "|", "=")
    return type(first) is str and first.startswith((">", "!"))


def get_code(dtype: Value) -> str:
    """Return the letter of a dtype's code (`f` of `<f4`, V for a record); "" for values without a code."""
    return _parse_code(dtype)[0] if type(dtype) is Obj else ""


def _parse_code(dtype: Obj) -> tuple[str, str]:
    """Return a dtype's code as letter and digits, such as ("f", "4"). The class `numpy.record` has the code V."""
    first = dtype.args[0] if dtype.args else None
    if type(first) is Global and first.module.startswith("numpy") and first.name == "record":
        return "V", ""
    match = _CODE.match(first) if type(first) is str else None
    return (match.group(1), match.group(2)) if match else ("", "")


def _has_objects(state: Value) -> bool:
    return type(state) is tuple and len(state) > 7 and type(state[7]) is int and bool(state[7] & _REFERENCE_FLAGS)
