"""Text form of numpy's record dtypes, as numpy prints them: fields with types, byte orders and offsets.

Two records with equal bytes have different values if their fields differ, so the whole dtype is compared.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

#: Largest number of characters of a shown dtype; the end of a longer dtype is a digest of the whole.
MAX_CHARACTERS = 100


def has_objects(dtype: str) -> bool:
    """Return True for the dtype of an array of Python objects, or of records with such objects."""
    return dtype.startswith("numpy O")


class RecordField(msgspec.Struct, frozen=True):
    """Field of a record: name (a Python literal), type (as in `dtype.descr`), offset and size in bytes."""

    name: str
    dtype: str
    offset: int
    size: int


def format_fields(fields: Iterable[RecordField], size: int) -> str:
    """Format the fields of a record of `size` bytes as `dtype.descr` does. Unused bytes become unnamed void fields.

    A field that overlaps the field before is written with its offset: `dtype.descr` has no form for overlaps.
    """
    parts, end = [], 0
    for field in fields:
        if field.offset > end:
            parts.append(f"('', '|V{field.offset - end}')")
        offset = f", offset {field.offset}" if field.offset < end else ""
        parts.append(f"({field.name}, {field.dtype}{offset})")
        end = field.offset + field.size
    if size > end:
        parts.append(f"('', '|V{size - end}')")
    return f"[{', '.join(parts)}]"


def format_code(code: str) -> str:
    """Format a type code (`<f4`, `f4`, `=f4`) as in `dtype.descr`: with a byte order, or `|` if the type has none."""
    order, type_code = (code[0], code[1:]) if code[0] in "<>|=" else ("<", code)
    type_code = {"?": "b1", "a": "S"}.get(type_code[0], type_code[0]) + type_code[1:]
    return repr(f"{'|' if type_code[0] in 'SVO' or type_code[1:] == '1' else '>' if order == '>' else '<'}{type_code}")


def name_dtype(code: str, fields: str) -> str:
    """Return the name of a dtype, such as `numpy V8 [('lr', '<f4'), ('wd', '<f4')]`. A long name ends with a digest."""
    if len(fields) > MAX_CHARACTERS:
        import hashlib  # OpenSSL, which hashlib imports, takes longer to load than most checkpoints to list

        digest = hashlib.sha256(fields.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        fields = f"{fields[: MAX_CHARACTERS - 50]}..., sha256 {digest}]"
    return f"numpy {code} {fields}"
