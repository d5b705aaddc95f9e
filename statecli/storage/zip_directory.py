"""Central directory of a zip file: its records, and the entries that statecli refuses."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from statecli.core.errors import MalformedError, UnreadableError

#: Methods of compression that statecli reads, and names of others.
STORED, DEFLATED = 0, 8
_METHODS = {1: "shrink", 6: "implode", 9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz", 98: "ppmd"}
SPANS_FILES = (
    "the zip archive spans several files (disks), which statecli does not read; save the checkpoint in one file"
)
_ENTRY = struct.Struct("<8xHH4xIIIHHHH2xII")
#: Values of fields whose real value is in a zip64 field.
U16_MAX, U32_MAX = 0xFFFF, 0xFFFFFFFF

# General purpose flags (APPNOTE 4.4.4).
ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_UTF8 = 0x0800
#: Flag of a folder in the external attributes, for every system: torch's reader reads no bytes of a record with this
#: flag.
_FOLDER_FLAG = 0x10
#: Extra field with a record's name in UTF-8, and the size of the field's header. The header has a version and the
#: checksum of the record's ordinary name (APPNOTE 4.6.9).
_UNICODE_PATH, _UNICODE_PATH_HEADER = 0x7075, 5
_UNICODE_PATH_BYTES = _UNICODE_PATH.to_bytes(2, "little")


class Record(msgspec.Struct, gc=False):
    """A member of an archive. Its header is at `offset`, its bytes at `data_offset`, from the start of the file.

    `crc32` as in the directory; torch writes 0 for a checksum that was not computed.
    """

    name: str
    offset: int
    data_offset: int
    size: int
    compressed_size: int
    method: int
    crc32: int
    flags: int


def parse_entries(directory: bytes) -> Iterator[Record]:
    """Yield the records of the central directory, without `data_offset`."""
    at, end, unpack = 0, len(directory), _ENTRY.unpack_from
    while at < end:
        if at + 46 > end or directory[at : at + 4] != b"PK\1\2":
            raise create_damage_error(
                f"no entry of its list of records (central directory) begins at byte {at} of the list"
            )
        flags, method, crc, compressed_size, size, n, extra, comment, disk, marks, offset = unpack(directory, at)
        name_end = at + 46 + n
        entry_end = name_end + extra + comment
        if entry_end > end:
            raise create_damage_error(
                "an entry of its list of records (central directory) runs past the end of the list"
            )
        raw = directory[at + 46 : name_end]
        name = str(raw, "ascii") if raw.isascii() else decode_name(raw, flags)
        if extra and _UNICODE_PATH_BYTES in directory[name_end : name_end + extra]:
            _check_unicode_path(name, directory[name_end : name_end + extra])
        if size == U32_MAX or compressed_size == U32_MAX or offset == U32_MAX or disk == U16_MAX:
            extras = directory[name_end : name_end + extra]
            size, compressed_size, offset, disk = _read_zip64(name, extras, size, compressed_size, offset, disk)
        record = Record(name, offset, 0, size, compressed_size, method, crc, flags)
        if disk or flags & ENCRYPTED or (method != DEFLATED and (method != STORED or size != compressed_size)):
            _refuse(record, disk)
        if marks & _FOLDER_FLAG and compressed_size:
            raise MalformedError(
                f"{name!r} is marked as a folder but has {compressed_size} bytes of data, which other programs skip"
            )
        yield record
        at = entry_end


def _check_unicode_path(name: str, extras: bytes) -> None:
    """Raise MalformedError for an extra field that states a different name: only some zip readers use this field."""
    unicode_name = _find_extra_field(name, extras, _UNICODE_PATH)[_UNICODE_PATH_HEADER:]
    if unicode_name and unicode_name != name.encode("utf-8", "surrogateescape"):
        raise MalformedError(f"{name!r} has a second, different name in the zip archive; programs may use either name")


def _refuse(record: Record, disk: int) -> None:
    if disk:
        raise MalformedError(SPANS_FILES)
    if record.flags & ENCRYPTED:
        raise UnreadableError(f"{record.name!r} is encrypted, and statecli cannot decrypt it")
    if record.method != STORED:
        raise create_unsupported_error(record)
    raise create_damage_error(
        f"{record.name!r} is stored without compression, but the archive's list of records gives two sizes, "
        f"{record.compressed_size} and {record.size} bytes"
    )


def decode_name(name: bytes, flags: int) -> str:
    """Return the name of a record. Raises MalformedError for a name that torch reads as UTF-8 and zipfile as CP437."""
    if not (flags & _UTF8 or name.isascii()):
        raise MalformedError(
            f"the record {name.decode('utf-8', 'backslashreplace')!r} does not declare the encoding of its name; "
            "programs may read different names"
        )
    return str(name, "utf-8", "surrogateescape")


def _read_zip64(name: str, extras: bytes, *fields: int) -> tuple[int, int, int, int]:
    """Return size, compressed size, offset and disk of an entry. Larger values come from its zip64 extra field.

    The field contains only the overflown values, in this order: 8, 8, 8 and 4 bytes.
    """
    values = []
    field_bytes = _find_extra_field(name, extras, 1)
    names = ("size", "compressed size", "position", "disk number")
    for label, field, width in zip(names, fields, (8, 8, 8, 4), strict=True):
        if field != (U16_MAX if width == 4 else U32_MAX):
            values.append(field)
            continue
        if len(field_bytes) < width:
            raise create_damage_error(f"its list of records lacks the {label} of {name!r} (a zip64 field)")
        values.append(int.from_bytes(field_bytes[:width], "little"))
        field_bytes = field_bytes[width:]
    size, compressed_size, offset, disk = values
    return size, compressed_size, offset, disk


def _find_extra_field(name: str, extras: bytes, requested_kind: int) -> bytes:
    at = 0
    while at + 4 <= len(extras):
        kind, length = struct.unpack_from("<HH", extras, at)
        if at + 4 + length > len(extras):
            raise create_damage_error(f"in its list of records, an optional field of {name!r} is longer than the entry")
        if kind == requested_kind:
            return extras[at + 4 : at + 4 + length]
        at += 4 + length
    return b""


def create_damage_error(text: str) -> MalformedError:
    """Return the error of a damaged archive. `text` describes the damage."""
    return MalformedError(f"the zip archive is damaged: {text}; copy or download the file again")


def create_unsupported_error(record: Record) -> UnreadableError:
    """Return the error of a record whose method of compression statecli does not read."""
    method = _METHODS.get(record.method, f"method {record.method}")
    return UnreadableError(
        f"{record.name!r} is compressed with {method}, which statecli cannot unpack; save the file again without "
        "compression"
    )
