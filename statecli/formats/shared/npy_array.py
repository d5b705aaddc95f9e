"""One numpy array as written by `numpy.save`: a magic number, a header (a Python literal), the elements.

Format: numpy/lib/format.py, versions 1.0 to 3.0 (NEP 1). The literal has only texts, whole numbers, True, False and
brackets. An array of objects is a pickle, and never loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.core import quoting, record_dtypes
from statecli.core.dtypes import ELEMENT_BITS
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Box, Boxes, ByteRange, Evidence, Kind, TensorData, TensorInfo
from statecli.formats.shared.joined_states import mark_unreadable
from statecli.formats.torch.arguments import MAX_DIMENSIONS, MAX_ELEMENTS

MAGIC = b"\x93NUMPY"
#: Maximum size of a header's literal in bytes; numpy's default is 10,000.
MAX_HEADER_BYTES = 64 << 10
#: Number of bytes that contain the whole header of nearly every array.
USUAL_HEADER_BYTES = 256
#: Size of the literal's length field in bytes, by format version.
_LENGTH_FIELD_BYTES = {1: 2, 2: 4, 3: 4}
#: A header: texts, whole numbers, True, False, brackets and blanks, but no names and no operators.
_HEADER = compile_on_use(
    r"""(?:'(?:[^'\\\n]|\\['"\\abfnrtvxuU])*'|"(?:[^"\\\n]|\\['"\\abfnrtvxuU])*\""""
    r"""|\d{1,19}L?\b|True\b|False\b|[()\[\]{},:\s])*""",
    re.ASCII,
)
#: A text, or the suffix of a whole number of Python 2.
_TEXT_OR_SUFFIX = compile_on_use(r"""('[^'\\]*'|"[^"\\]*")|(?<=\d)L\b""")
#: Parts of a type code: byte order, kind, size, and the unit of a time.
_DESCR = compile_on_use(r"([<>|=]?)([?biufcSaUVOmM])(\d{0,9})(\[\w+\])?", re.ASCII)
#: Sizes (digits of the type code) that numpy saves for each kind. Without a size numpy reads another type: b is int8, f
#: is float32.
_SIZES = {
    "?": ("",),
    "b": ("1",),
    "O": ("", "4", "8"),
    **dict.fromkeys("iu", ("1", "2", "4", "8")),
    "f": ("2", "4", "8", "12", "16"),
    "c": ("8", "16", "24", "32"),
    **dict.fromkeys("mM", ("", "8")),
}
_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_OBJECTS_NOTE = "Python objects, saved as a pickle: not loaded"

#: Notes on numpy's types longer than eight bytes per real number: their format and size depend on the machine.
LONG_DOUBLE_NOTES = {
    **dict.fromkeys(("float96", "float128"), "longdouble: only its bytes are compared"),
    **dict.fromkeys(("complex192", "complex256"), "clongdouble: only its bytes are compared"),
}

#: Function that returns the first bytes of an array's file: the requested number, or all if there are fewer.
Head = Callable[[int], bytes]


class NpyElement(msgspec.Struct, frozen=True):
    """Element type of an array: its dtype, its size in bytes, and the note for the array's tensor row."""

    dtype: str
    size: int
    note: str | None = None
    is_big_endian: bool = False
    has_objects: bool = False
    #: False for text, times, records and objects, because no model trains them.
    is_number: bool = True


class Header(msgspec.Struct, frozen=True):
    """A parsed header, and its size in bytes including the magic number."""

    element: NpyElement
    shape: tuple[int, ...]
    is_fortran: bool
    length: int

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return prod(self.shape) * self.element.size


def read_header(head: Head) -> Header:
    """Read the header of one array. Raises UnreadableError for a newer format, MalformedError for other content."""
    raw = head(USUAL_HEADER_BYTES)
    if not raw.startswith(MAGIC):
        raise MalformedError("is not a numpy array: it does not begin with \\x93NUMPY")
    width = _LENGTH_FIELD_BYTES.get(raw[6]) if len(raw) > 7 else 2
    if width is None:
        raise UnreadableError(f"has .npy format version {raw[6]}.{raw[7]}, but statecli reads only 1.0 to 3.0")
    start = 8 + width
    length = int.from_bytes(raw[8:start], "little")
    if length > MAX_HEADER_BYTES:
        raise MalformedError(f"its header claims {length} bytes, more than statecli's limit of {MAX_HEADER_BYTES}")
    if start + length > len(raw):
        raw = head(start + length)
    if start + length > len(raw):
        raise MalformedError(f"is truncated: its header needs {start + length} bytes, but only {len(raw)} exist")
    try:
        text = raw[start : start + length].decode("utf-8" if raw[6] == 3 else "latin-1")
    except UnicodeDecodeError as error:
        raise MalformedError(f"its header is not valid UTF-8 near byte {error.start}") from error
    return _parse_literal(_parse_text(text), start + length)


def build_row(fqn: str, header: Header, storage: ByteRange) -> TensorInfo:
    """Build the tensor row of an array. `storage` is its byte range with the header. A truncated array gets `damage`.

    Raises MalformedError for elements of 0 bytes if there are more of them than the file has bytes.
    """
    element, available = header.element, storage.length - header.length
    elements = prod(header.shape)
    kind, evidence = (Kind.PARAMETER, Evidence.ASSUMED) if element.is_number else (Kind.OTHER, Evidence.CONVENTION)
    row = TensorInfo(fqn, element.dtype, header.shape, elements, 0, kind=kind, evidence=evidence, saved=True)
    if element.has_objects:
        return replace(row, nbytes=available, note=element.note)
    if header.nbytes > available:
        why = (
            f"{element.dtype} {quoting.shape(header.shape)} takes {header.nbytes} bytes, but {available} follow "
            "the header: truncated; copy or download the file again"
        )
        return mark_unreadable(row, storage.path, why)
    if not element.size and elements > storage.length:
        raise MalformedError(
            f"claims {elements} elements of 0 bytes each, but the file has only {storage.length} bytes; statecli "
            "refuses such an array"
        )
    strides = tuple(prod(header.shape[:axis]) for axis in range(len(header.shape))) if header.is_fortran else None
    data = _build_data(header, storage, strides)
    return replace(row, nbytes=header.nbytes, note=element.note, data=data)


def _build_data(header: Header, storage: ByteRange, strides: tuple[int, ...] | None) -> TensorData:
    """Return the data after the header. The storage includes the header, because the checksum covers both."""
    dtype, size = header.element.dtype, header.element.size
    if dtype in ELEMENT_BITS and header.length % size == 0:
        return TensorData(storage, dtype, header.shape, offset=header.length // size, strides=strides)
    # An offset counts elements, whose size may not divide the header: describe the bytes after the header as one piece
    # of another storage.
    piece = Box((0,), TensorData(storage, "uint8", (header.nbytes,), offset=header.length))
    boxes = Boxes((header.nbytes,), 1, (piece,))
    element_range = ByteRange(storage.path, 0, header.nbytes, big_endian=storage.big_endian, boxes=boxes)
    return TensorData(element_range, dtype, header.shape, strides=strides)


# --- contents of the header ------------------------------------------------------------------------------------------


def _parse_literal(literal: object, length: int) -> Header:
    if type(literal) is not dict or literal.keys() != {"descr", "fortran_order", "shape"}:
        raise MalformedError("its header is not a dict with the keys descr, fortran_order and shape")
    order, shape = literal["fortran_order"], literal["shape"]
    if type(order) is not bool:
        raise MalformedError(f"its fortran_order is {quoting.value(order)}; expected True or False")
    if type(shape) is not tuple or any(type(size) is not int for size in shape):
        raise MalformedError("its shape is not a tuple of integers")
    if len(shape) > MAX_DIMENSIONS:
        raise MalformedError(f"its shape has {len(shape)} dimensions, more than statecli's limit of {MAX_DIMENSIONS}")
    if max(shape, default=0) > MAX_ELEMENTS or prod(shape) > MAX_ELEMENTS:
        raise MalformedError(f"shape {quoting.shape(shape)} is impossible: 2^63 elements or more")
    return Header(_parse_element(literal["descr"]), shape, order, length)


def _parse_element(descr: object) -> NpyElement:
    """Parse numpy's `descr` of a dtype: a code, a list of fields, or a code and a shape."""
    if type(descr) is str:
        return _parse_code(descr)
    layout = _parse_layout(descr)
    if layout.has_objects:
        return NpyElement(
            record_dtypes.name_dtype("O", layout.dtype), layout.size, _OBJECTS_NOTE, has_objects=True, is_number=False
        )
    field_names = [field[0] for field in descr if type(field[0]) is str and field[0]] if type(descr) is list else []
    note = f"records of {layout.size} bytes: {quoting.names(field_names)}" if field_names else None
    dtype = record_dtypes.name_dtype(f"V{layout.size}", layout.dtype)
    return NpyElement(dtype, layout.size, note, is_number=False)


class _Layout(msgspec.Struct, frozen=True):
    """Element type in numpy's `descr`: its name as numpy prints it, its size in bytes, and whether it has objects."""

    dtype: str
    size: int
    has_objects: bool


def _parse_layout(descr: object) -> _Layout:
    if type(descr) is str:
        element = _parse_code(descr)
        return _Layout(record_dtypes.format_code(descr), element.size, element.has_objects)
    if type(descr) is list and all(type(field) is tuple and len(field) in (2, 3) for field in descr):
        return _parse_fields(descr)
    if type(descr) is tuple and len(descr) == 2:
        base = _parse_layout(descr[0])
        shape = descr[1] if type(descr[1]) is tuple else (descr[1],)
        if all(type(count) is int for count in shape) and prod(shape) * base.size <= MAX_ELEMENTS:
            dtype = f"{base.dtype}, {shape}"
            return _Layout(dtype, prod(shape) * base.size, base.has_objects)
    raise MalformedError("its descr is not a dtype code or a list of fields")


def _parse_fields(descr: list[tuple[Any, ...]]) -> _Layout:
    """Parse a list of fields. An unnamed void field is padding, as in numpy."""
    fields, size, has_objects = [], 0, False
    for name, *dtype in descr:
        layout = _parse_layout(dtype[0] if len(dtype) == 1 else tuple(dtype))
        if name or not layout.dtype.startswith("'|V"):
            fields.append(record_dtypes.RecordField(repr(name), layout.dtype, size, layout.size))
        size += layout.size
        has_objects |= layout.has_objects
    return _Layout(record_dtypes.format_fields(fields, size), size, has_objects)


def _parse_code(descr: str) -> NpyElement:
    match = _DESCR.fullmatch(descr)
    order, kind, digits, unit = match.groups() if match else ("", "", "", "")
    if not match or digits not in _SIZES.get(kind, (digits,)) or (unit and kind + digits not in ("m8", "M8")):
        raise MalformedError(f"its descr {quoting.quote(descr)} is not a dtype that numpy saves")
    size = int(digits or {"O": 8, "m": 8, "M": 8, "?": 1}.get(kind, 0)) * (4 if kind == "U" else 1)
    is_big_endian = order == ">" and size > 1 and kind not in "SaO"
    if kind == "O":
        return NpyElement("numpy O", size, _OBJECTS_NOTE, has_objects=True, is_number=False)
    if kind in "?b":
        return NpyElement("bool", size)
    if kind == "V":
        guess = {1: "a float8 type", 2: "bfloat16"}.get(size)
        guess_text = f": perhaps {guess}, which numpy saves as void" if guess else ""
        note = f"void of {size} byte{'s' * (size != 1)}{guess_text}"
        return NpyElement(f"numpy V{size}", size, note, is_number=bool(guess_text))
    dtype = f"{_KINDS.get(kind)}{8 * size}"
    if kind in "fc" and dtype in LONG_DOUBLE_NOTES:
        # The name includes the byte order, because only the bytes are compared.
        return NpyElement(
            f"numpy {'>' * is_big_endian}{dtype}", size, LONG_DOUBLE_NOTES[dtype], is_big_endian=is_big_endian
        )
    if dtype not in ELEMENT_BITS:
        dtype = f"numpy {kind}{digits}{unit or ''}"
    return NpyElement(dtype, size, is_big_endian=is_big_endian, is_number=kind not in "SUamM")


def _parse_text(text: str) -> object:
    """Parse the Python literal in a header as numpy does. Raises MalformedError for any other text."""
    import ast  # a slow import that only arrays need

    if not _HEADER.fullmatch(text):
        raise MalformedError(f"invalid .npy header: {quoting.quote(text[:40])} is not a dict of texts and numbers")
    try:
        return ast.literal_eval(_TEXT_OR_SUFFIX.sub(lambda match: match[1] or "", text).strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise MalformedError("invalid .npy header: not a Python literal, or nested too deeply") from error
