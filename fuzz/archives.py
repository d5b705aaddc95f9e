"""The zip reader against torch's: what torch reads of a record is what the listing and the scan read of it."""

from __future__ import annotations

import io
import random
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from statecli.core.errors import UnreadableError
from statecli.storage.byte_source import ByteSource
from statecli.storage.zip_archive import Archive
from statecli.storage.zip_directory import DEFLATED, Record
from tests.formats.attacks import Lies, Member, build, records

#: Bytes that a record may have in such an input.
MAX_RECORD = 10 * 2**20
PATH = "fuzz.pt"
#: The records that torch asks for by name, whatever the directory lists.
ASKED = ("data.pkl", "version", "byteorder", ".format_version", ".storage_alignment", "data/0", "constants.pkl")


class Differs(AssertionError):
    """torch reads other bytes of a record than statecli does."""


def check(data: bytes) -> None:
    """Raise Differs where torch reads a record that is not listed, or other bytes of one that is."""
    Path(PATH).write_bytes(data or b"\0")
    try:
        with ByteSource(PATH) as source:
            archive = Archive(source)
            raw = {name: _raw(source, record) for name, record in archive.records.items()}
            listed = {name: _listed(archive, record) for name, record in archive.records.items()}
    except UnreadableError:
        return
    if None in raw.values():  # the scan reports a record that cannot be inflated
        return
    for name, content in _torch_records().items():
        if content not in raw.values():
            raise Differs(f"torch reads {content[:50]!r} of {name!r}, and no record has these bytes: {data!r}")
        ours = listed.get(f"{archive.folder}/{name}", content)
        if ours not in (content, None) and not archive.oddities:  # an oddity is reported with the listing
            raise Differs(f"torch reads {content[:50]!r} of {name!r}, statecli reads {ours[:50]!r}: {data!r}")


def _torch_records() -> dict[str, bytes]:
    """The content of each record that torch's reader gives."""
    found: dict[str, bytes] = {}
    try:
        reader = torch._C.PyTorchFileReader(PATH)
        names = [*ASKED, *reader.get_all_records()]
    except (RuntimeError, UnicodeDecodeError):
        return found
    for name in names:
        try:
            if reader.has_record(name):
                found[name] = reader.get_record(name)
        except (RuntimeError, UnicodeDecodeError):
            continue
    return found


def _raw(source: ByteSource, record: Record) -> bytes | None:
    """What the scan reads of the record without a look at its checksum, None where it reports that it cannot."""
    data = source.read(record.data_offset, record.compressed_size)
    if record.method != DEFLATED:
        return data
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = inflater.decompress(data, MAX_RECORD)
    except zlib.error:
        return None
    return content if inflater.eof else None


def _listed(archive: Archive, record: Record) -> bytes | None:
    """What the listing reads of the record, None where it refuses it."""
    try:
        return archive.read(record, MAX_RECORD)
    except UnreadableError:
        return None


def seeds() -> Iterator[bytes]:
    """Yield archives as torch and others write them, and some that say one thing twice."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    yield buffer.getvalue()
    yield build(records())
    yield build([*records(), Member("archive/DATA.PKL", b"N.")])
    yield build([*records(), Member("archive/data.pkl\0x", b"N.", zip64=True)])
    yield build(records(), Lies(only_in_zip64=True))
    yield build(records(), Lies(zip64=False, comment=b"PK\5\6" + bytes(18)))
    yield build([Member("archive/data.pkl", b"N." * 50, method=DEFLATED), Member("archive/version", b"3\n")])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"N.")
        archive.writestr("archive/version", b"3\n")
    yield buffer.getvalue()


#: Values that fields of a zip have special meanings for.
SPECIAL = (
    b"\0",
    b"\1",
    b"\xff\xff",
    b"\xff\xff\xff\xff",
    b"PK\1\2",
    b"PK\3\4",
    b"PK\5\6",
    b"PK\6\6",
    b"PK\6\7",
    b"\x08\0",
)


def mutate(data: bytes, dice: random.Random, others: list[bytes]) -> bytes:
    """Change fields, most of them in the directory and the end records; copy a piece elsewhere."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        start = data.find(b"PK\1\2") if dice.randrange(3) else 0
        at = dice.randrange(max(start, 0), len(data)) if data else 0
        kind = dice.randrange(5)
        if kind == 0:
            data = data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            value = dice.choice(SPECIAL)
            data = data[:at] + value + data[at + len(value) :]
        elif kind == 2:
            value = (int.from_bytes(data[at : at + 4], "little") + dice.choice((-64, -1, 1, 30, 64))) % 2**32
            data = data[:at] + value.to_bytes(4, "little") + data[at + 4 :]
        elif kind == 3:
            data = data[:at] + data[at + dice.choice((1, 2, 4, 46, 64)) :]
        else:
            other = dice.choice(others)
            begin = dice.randrange(len(other))
            data = data[:at] + other[begin : begin + dice.choice((4, 30, 46, 100))] + data[at:]
    return data
