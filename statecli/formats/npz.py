"""numpy's archives of arrays (`.npz`): a zip of `.npy` files, stored (`savez`) or deflated (`savez_compressed`).

statecli reads (or inflates) only the header of a large array. Format: numpy/lib/_npyio_impl.py of numpy 2.4.
"""

from __future__ import annotations

import zlib

from statecli.core import quoting
from statecli.core.errors import ChecksumMismatch, MalformedError, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import ByteRange, ModelState, Oddity, Packing, Place, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.formats.shared import npy_array
from statecli.formats.shared.joined_states import build_unreadable_row
from statecli.storage.byte_source import ByteSource
from statecli.storage.zip_archive import Archive, mentions
from statecli.storage.zip_directory import DEFLATED, Record

NAME = "npz"
TRAITS = FormatTraits(
    distinguishes_case=True,
    never_mapped="numpy and Flax never memory-map .npz and msgpack files, so alignment does not matter",
)

_SUFFIX = ".npy"
#: Maximum total size in bytes of arrays whose checksums are verified while an archive is listed: a fifth of a second.
#: The checksums of other arrays, and of all arrays in remote storage, are verified when the values are read.
MAX_VERIFIED_BYTES = 128 << 20


def sniff(path: str, head: bytes) -> bool:
    """Return whether the file is a zip archive of numpy arrays, not one of torch's archives."""
    return head.startswith(b"PK\3\4") and mentions(path, b".npy") and not mentions(path, b"data.pkl", b"archive_format")


def read(path: str, section: str | None = None) -> ModelState:  # noqa: ARG001  # a file has one section
    """Read the headers of all arrays. The format records neither devices nor requires_grad.

    A self-contradictory array is damaged, and the rest is read. Raises UnreadableError and MalformedError, without the
    path, for a damaged archive.
    """
    with ByteSource(path) as source:
        archive = Archive(source, looked_at=2 * npy_array.USUAL_HEADER_BYTES)
        budget = 0 if source.reads_are_requests else MAX_VERIFIED_BYTES
        arrays = {
            name: record
            for name, record in archive.records.items()
            if name.endswith(_SUFFIX) or _is_bare_array(record, source)
        }
        rows: dict[str, TensorInfo] = {}
        for name, record in arrays.items():
            fqn = name.removesuffix(_SUFFIX)
            budget -= record.size
            is_disputed = (name + _SUFFIX if fqn == name else fqn) in archive.records
            rows[fqn] = (
                _build_disputed_row(fqn, source.path)
                if is_disputed
                else _read_row(fqn, record, source, archive, verify=budget >= 0)
            )
        oddities = archive.oddities
        if others := [name for name in archive.records if name not in arrays]:
            message = f"statecli did not read files in the archive that are not arrays: {quoting.names(others)}"
            oddities.append(Oddity(OddityKind.UNUSED_RECORDS.value, message))
        return ModelState(path, NAME, tuple(rows.values()), oddities=tuple(oddities), traits=TRAITS)


def _is_bare_array(record: Record, source: ByteSource) -> bool:
    """Return whether a record without the suffix `.npy` is an array. Like numpy.load, read only its first bytes."""
    try:
        return _read_head(record, source, len(npy_array.MAGIC)) == npy_array.MAGIC
    except MalformedError:  # numpy.load fails too
        return False


def _build_disputed_row(fqn: str, path: str) -> TensorInfo:
    """Return the tensor row as unreadable: numpy.load calls both `x` and `x.npy` `x`, and returns only one of them."""
    names = f"{quoting.quote(fqn)} and {quoting.quote(fqn + _SUFFIX)}"
    why = (
        f"two records have the same array name ({names}), so numpy.load returns only one of them under this "
        "name; save the archive again with different names"
    )
    return build_unreadable_row(fqn, path, why)


def _read_row(fqn: str, record: Record, source: ByteSource, archive: Archive, *, verify: bool) -> TensorInfo:
    """Build the tensor row of an array. Without `verify`, check the checksum only if header and size disagree."""
    try:
        header = npy_array.read_header(lambda length: _read_head(record, source, length))
        if verify:
            archive.verify(record)
        row = npy_array.build_row(fqn, header, _locate_array(record, source.path, header.element.is_big_endian))
        surplus = record.size - header.length - row.nbytes
        if surplus and not verify:
            archive.verify(record)
    except UnreadableError as error:
        if isinstance(error, ChecksumMismatch):
            message = f"{quoting.name(fqn)}: its bytes do not match the saved checksum: {error.difference}"
            place = Place(source.path, record.data_offset, record.compressed_size)
            archive.oddities.append(Oddity(OddityKind.CHECKSUM_MISMATCH.value, message, fqn, place=place))
        return build_unreadable_row(fqn, source.path, str(error))
    if surplus and not row.damage:
        place = Place(source.path, record.data_offset, record.compressed_size)
        message = f"{surplus} bytes follow the array {quoting.name(fqn)}: numpy.load ignores them"
        archive.oddities.append(Oddity(OddityKind.SUFFIXED.value, message, fqn, place=place))
    return row


def _locate_array(record: Record, path: str, is_big_endian: bool) -> ByteRange:
    """Return the byte range of the record. A saved checksum of 0 is treated as missing."""
    packing = Packing("deflate", record.compressed_size) if record.method == DEFLATED else None
    return ByteRange(path, record.data_offset, record.size, record.crc32 or None, is_big_endian, packing)


def _read_head(record: Record, source: ByteSource, length: int) -> bytes:
    """Read the first bytes of the record's content, inflating no more than needed."""
    if record.method != DEFLATED:
        return source.read(record.data_offset, min(length, record.size))
    # Deflate expands data by a few bytes at most, so this many compressed bytes contain `length` bytes of content.
    compressed = source.read(record.data_offset, min(length + length // 8 + 64, record.compressed_size))
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(compressed, length)
    except zlib.error as error:
        raise MalformedError(f"cannot be decompressed: the file is damaged ({error})") from error
