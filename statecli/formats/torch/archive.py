"""Common parts of the zip archives written by torch: one folder, a version, a byte order.

Sources: caffe2/serialize/inline_container.cc and torch/serialization.py of torch 2.13. torch.save, torch.jit.save and
torch.export.save use the same writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import UNSET

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS, STORAGE_DTYPES
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import ByteRange, Oddity, Place
from statecli.core.oddity_kind import OddityKind
from statecli.formats.torch import checkpoint_pickle
from statecli.pickles.nodes import Global, Pickle
from statecli.storage.zip_archive import MAX_PADDING, Archive
from statecli.storage.zip_directory import STORED, Record

#: Maximum size of data.pkl in bytes; torch writes 115 to 128 bytes for each tensor.
MAX_PICKLE_BYTES = 256 * 2**20
#: The newest file format that torch 2.13 reads (kMaxSupportedFileFormatVersion).
MAX_VERSION = 10
_MAX_WORD = 64
#: Size or offset in bytes from which a zip archive uses 64-bit numbers.
_ZIP64 = 2**32 - 1


def find_record(archive: Archive, name: str) -> Record | None:
    """Return the record of this name in the archive's folder, or None if the record is missing."""
    return archive.records.get(f"{archive.folder}/{name}")


def read_word(archive: Archive, name: str) -> str | None:
    """Return the text in a small record, or None if the record is missing."""
    record = find_record(archive, name)
    if record is None:
        return None
    content = archive.read(record, _MAX_WORD)
    return content.decode("ascii", "backslashreplace").strip()


def prefetch(archive: Archive, *storages: str) -> None:
    """Prefetch all records except the records in the folders `storages`."""
    folders = tuple(f"{archive.folder}/{name}/" for name in storages)
    archive.prefetch(lambda name: not name.startswith(folders))


def check_folder(archive: Archive) -> None:
    """Check that all records are in the folder of the first record, and that the folder's name has no NUL.

    Raises MalformedError.
    """
    prefix = f"{archive.folder}/"
    if "\0" in prefix:
        raise MalformedError(
            f"the folder name in the archive, {prefix!r}, contains a NUL character; torch cuts each record name at "
            "this character, so all records get the same name"
        )
    for name in archive.records:
        if not name.startswith(prefix):
            raise MalformedError(
                f"record {name!r} is outside the archive's folder {prefix!r}, so torch refuses the file"
            )


def check_version(archive: Archive) -> None:
    """Refuse a malformed version of the zip container, and a version newer than statecli knows.

    If the archive has a record `.data/version` (a trace with stored inputs), torch reads it in place of `version`.
    """
    text = read_word(archive, ".data/version" if find_record(archive, ".data/version") else "version")
    if text is None:
        raise MalformedError("contains no version record, so torch refuses the file; save the checkpoint again")
    if not (text.isdecimal() and text.isascii()) or int(text) == 0:
        raise MalformedError(f"the version record contains {text!r}; expected a positive integer")
    if int(text) > MAX_VERSION:
        raise UnreadableError(
            f"the version record says {text}: a newer torch wrote the file; statecli knows only versions up to "
            f"{MAX_VERSION}"
        )
    layout = read_word(archive, ".format_version")
    if layout not in (None, "1"):
        archive.oddities.append(
            Oddity("format-version", f".format_version record says {layout!r}; statecli knows only '1'")
        )


def refuse_big_endian(archive: Archive) -> None:
    """Refuse a program marked as big-endian, because torch's loaders ignore the mark and do not swap bytes."""
    if is_big_endian(archive):
        raise UnreadableError(
            "the byteorder record is 'big', but torch.jit.load and torch.export.load ignore this record, so the values "
            "depend on the loading machine; save the program again on a little-endian machine"
        )


def is_big_endian(archive: Archive) -> bool:
    """Return whether the byteorder record says big-endian. Older files without this record are not big-endian."""
    order = read_word(archive, "byteorder")
    name = f"{archive.folder}/byteorder"
    if any(record_name != name and record_name.lower() == name.lower() for record_name in archive.records):
        raise MalformedError(
            "has a byteorder record with upper-case letters in its name; torch never writes such a name, so another "
            "program changed the file; save the checkpoint again"
        )
    if order not in (None, "little", "big"):
        raise MalformedError(f"the byteorder record contains {order!r}; expected 'little' or 'big'")
    return order == "big"


def read_pickle(archive: Archive, name: str = "data.pkl") -> Pickle:
    """Read the pickle in a record of the archive's folder. Bytes after the pickle are reported as an oddity."""
    record = archive.records[f"{archive.folder}/{name}"]
    if not record.crc32 and record.size:
        archive.oddities.append(
            Oddity("no-checksums", f"the archive has no checksum of {name}, so statecli cannot detect damage")
        )
    data = archive.read(record, MAX_PICKLE_BYTES)
    pickle = checkpoint_pickle.load(data, name)
    if pickle.end < len(data):
        message = f"{len(data) - pickle.end} bytes follow the pickle in {name}"
        # No place for a compressed record, because the bytes after its pickle are not separate bytes of the file.
        place = Place(archive.path, record.data_offset + pickle.end, record.size - pickle.end)
        archive.oddities.append(
            Oddity(OddityKind.PICKLE_TRAILING.value, message, place=place if record.method == STORED else UNSET)
        )
    return pickle


def locate_storages(
    archive: Archive, base: int = 0, folder: str = "data", *, big_endian: bool = False
) -> dict[str, ByteRange]:
    """Return the byte range of each storage by key. Ignore a recorded checksum of 0 unless the storage is empty.

    `base` is the start of the archive in its file; `folder` is relative to the archive's folder. Record names are
    matched without case, because torch does so.
    """
    prefix = f"{archive.folder}/{folder}/"
    folded, skip, storages = prefix.lower(), len(prefix), {}
    for name, record in archive.records.items():
        if not name.startswith(prefix) and name[:skip].lower() != folded:
            continue
        if record.method != STORED:
            raise MalformedError(f"{name!r} is compressed; save the checkpoint again with torch")
        crc = record.crc32 if record.crc32 or not record.size else None
        storages[name[skip:]] = ByteRange(archive.path, base + record.data_offset, record.size, crc, big_endian)
    return storages


def find_unused_storages(pickle: Pickle, storages: Mapping[str, ByteRange], folder: str = "data") -> Iterator[Oddity]:
    """Yield an `Oddity` about the storages that have bytes, but that the pickle does not refer to."""
    used_keys = {
        pid[2]
        for persistent in pickle.persistent
        if type(pid := persistent.pid) is tuple and len(pid) > 2 and type(pid[2]) is str
    }
    if storages.keys() <= used_keys:
        return
    unused_keys = [key for key, storage in storages.items() if key not in used_keys and storage.length]
    if unused_keys:
        total, first = sum(storages[key].length for key in unused_keys), storages[unused_keys[0]]
        names = quoting.names([f"{folder}/{key}" for key in unused_keys])
        message = f"{total} bytes belong to storages that no tensor uses: {names}"
        yield Oddity(OddityKind.UNUSED_STORAGES.value, message, place=Place(first.path, first.offset, first.length))


def find_misplaced_storage(archive: Archive, pickle: Pickle) -> Iterator[Oddity]:
    """Yield an `Oddity` about the first storage that is not at the offset that torch computes.

    With `torch.utils.serialization.config.load.calculate_storage_offsets`, and under FakeTensorMode, torch adds up
    the sizes of the storages in the order of the pickle. Source: `_get_offset` in torch/serialization.py of 2.13.
    """
    if (read_word(archive, ".format_version") or "") < "1":
        return
    word = read_word(archive, ".storage_alignment") or "64"
    alignment = int(word) if word.isascii() and word.isdecimal() else 0
    prefix = f"{archive.folder}/data/"
    end: int | None = None
    checked_keys: set[str] = set()
    records, bits_by_class = archive.records, dict[int, int | None]()
    for persistent in pickle.persistent:
        pid = persistent.pid
        if type(pid) is not tuple or len(pid) < 5 or type(pid[2]) is not str or pid[2] in checked_keys:
            continue
        if id(pid[1]) not in bits_by_class:
            dtype = STORAGE_DTYPES.get(pid[1].name) if type(pid[1]) is Global else None
            bits_by_class[id(pid[1])] = ELEMENT_BITS[dtype] if dtype else None
        record, bits = records.get(prefix + pid[2]), bits_by_class[id(pid[1])]
        if record is None or bits is None or type(pid[4]) is not int:
            return  # torch does not find the data either, or the reader refuses the file
        checked_keys.add(pid[2])
        size = pid[4] * bits // 8
        start = record.data_offset if end is None else compute_data_offset(end, record.name, size, alignment or 1)
        if start != record.data_offset:
            message = (
                f"storage {quoting.name(pid[2])} starts at byte {record.data_offset:,}, but torch computes byte "
                f"{start:,}: torch.load gives wrong values if its setting calculate_storage_offsets is on"
            )
            place = Place(archive.path, record.data_offset, record.size)
            yield Oddity(OddityKind.MISPLACED_STORAGE.value, message, place=place)
            return
        header = record.offset if end is None else end
        end = start + size + ((24 if header >= _ZIP64 or size >= _ZIP64 else 16) if size else 0)


def compute_data_offset(header: int, name: str, size: int, alignment: int) -> int:
    """Compute the offset of a record's data as `get_record_offset_no_read` (inline_container.cc) does."""
    start = header + 34 + (len(name) if name.isascii() else len(name.encode(errors="surrogateescape")))
    if header >= _ZIP64 or size >= _ZIP64:
        start += 4 + 16 * (size >= _ZIP64) + 8 * (header >= _ZIP64)
    return -(-start // alignment) * alignment


def find_unused_records(archive: Archive, *used_names: str, prefix: str | None = None) -> Iterator[Oddity]:
    """Yield an `Oddity` about the records that no loader reads: all records with bytes except `used_names`.

    `used_names` are relative to `prefix`; a folder ends with /. The default of `prefix` is the archive's folder.
    """
    prefix = f"{archive.folder}/" if prefix is None else prefix
    names = {prefix + name for name in used_names}
    folders = tuple(name for name in names if name.endswith("/"))
    others = (record for name, record in archive.records.items() if not name.startswith(folders))
    unused_records = [record for record in others if record.size and record.name not in names]
    if unused_records:
        unused_names = quoting.names([record.name.removeprefix(prefix) for record in unused_records])
        size = sum(record.compressed_size for record in unused_records)
        place = Place(archive.path, unused_records[0].data_offset, unused_records[0].compressed_size)
        message = f"{size} bytes belong to records that torch does not read: {unused_names}"
        yield Oddity(OddityKind.UNUSED_RECORDS.value, message, place=place)


def find_gaps(archive: Archive) -> Iterator[Oddity]:
    """Yield an `Oddity` about the bytes between records, if these are more bytes than padding needs."""
    if not archive.spaces:
        return
    alignment = read_word(archive, ".storage_alignment") or ""
    padding = int(alignment) if alignment.isascii() and alignment.isdecimal() else 0
    gaps = [(name, place) for name, place in archive.spaces if place.length > padding + MAX_PADDING]
    if gaps:
        (name, place), total = gaps[0], sum(place.length for _, place in gaps)
        preceding = quoting.name(name) + (f" and {len(gaps) - 1} other records" if len(gaps) > 1 else "")
        yield Oddity(OddityKind.GAP.value, f"{total} bytes after {preceding} belong to no record", place=place)
