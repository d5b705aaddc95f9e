"""Strict reader of zip archives as torch writes them: a file that can be read in two ways is an error.

Python's `zipfile` is unsuitable. Of two records of one name, it takes the last, but torch takes the first. It accepts
bytes before the archive, refuses archives without checksums, and is slow for 100,000 records. torch's own reader
(miniz) checks no checksum and no overlap.

Layout: PKWARE's APPNOTE 6.3.10, sections 4.3.7 to 4.3.16, 4.5.3 (zip64). torch compresses no record, writes sizes in
the directory and in a descriptor after the data, and always writes zip64 end records.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import UNSET

from statecli.core.errors import TRUNCATED, ChecksumMismatch, MalformedError, UnreadableError
from statecli.core.model_state import Oddity, Place
from statecli.core.oddity_kind import OddityKind
from statecli.storage.byte_source import ByteSource, Window
from statecli.storage.files import Guard
from statecli.storage.store import Extent
from statecli.storage.zip_directory import (
    DEFLATED,
    ENCRYPTED,
    SPANS_FILES,
    STORED,
    U16_MAX,
    U32_MAX,
    Record,
    create_damage_error,
    create_unsupported_error,
    decode_name,
    parse_entries,
)

#: Maximum inflated size of a record in bytes; a pickle of 64 MB describes half a million tensors.
MAX_INFLATED_BYTES = 64 * 2**20
#: Maximum size of the directory in bytes; 100,000 records of torch take 9 MB.
MAX_DIRECTORY_BYTES = 256 * 2**20
MAX_RECORDS = 2_000_000

#: Maximum number of bytes between the data of two records, without the header and name of the second record. These are
#: a descriptor of 24 bytes, torch's padding to a multiple of 64, zip64 sizes, and the times that other tools record.
MAX_PADDING = 24 + 64 + 64

_END = struct.Struct("<4sHHHHIIH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCAL = struct.Struct("<4s2xHH4xIIIHH")
#: Number of bytes at the end of a file in which torch's reader finds an end record: the record, a comment, one buffer.
FARTHEST_END = _END.size + 65_535 + 4096
#: Number of bytes at the end of a file that include the end records of nearly every archive.
_USUAL_END_BYTES = 1024

#: General purpose flag of a record whose checksum and sizes follow its data (APPNOTE 4.4.4).
_SIZES_FOLLOW = 0x0008

#: Alignment of each record's data by torch, and the possible sizes of the descriptor after the data, by flag.
_ALIGNMENT = 64
_DESCRIPTORS = {0: (0,), _SIZES_FOLLOW: (16, 24)}

#: Number of local headers fetched at once, and the maximum size in bytes of a record that is prefetched.
_HEADERS_AT_ONCE = 1024
_MAX_PREFETCH_BYTES = 32 << 20
#: Number of bytes of a record that show its format.
BEGINNING_BYTES = 512
#: Maximum size in bytes of the records that torch writes after the last storage.
_TRAILING_BYTES = 1024
#: Average record size in bytes below which an archive's headers are read in windows, otherwise one by one.
_DENSE_RECORD_BYTES = 8192
_WINDOW = 65_536
#: Number of bytes read and inflated at a time to verify a checksum.
_PIECE_BYTES = 1 << 20


#: Number of bytes at either end of a directory that `mentions` searches.
_MENTION_BYTES = 64 * 1024


def mentions(path: str, *names: bytes) -> bool:
    """Return whether one of the names appears near the beginning or the end of a zip file's central directory.

    This is a guess at the kind of archive, which the reader must check. Returns False for other files.
    """
    try:
        with ByteSource(path) as source:
            tail = source.read(max(0, source.size - _MENTION_BYTES), min(_MENTION_BYTES, source.size))
            at = tail.rfind(b"PK\5\6")
            fields = _END.unpack_from(tail, at) if 0 <= at <= len(tail) - _END.size else None
            if fields is None:
                return False
            size, offset = fields[5], fields[6]
            if offset == U32_MAX and (end64 := tail.rfind(b"PK\6\6")) >= 0 and end64 + _END64.size <= len(tail):
                size, offset = _END64.unpack_from(tail, end64)[-2:]
            # Prefetch for the archive's reader, which reads the whole directory and the small records before it.
            start, length = max(0, offset - _TRAILING_BYTES), min(size, _MAX_PREFETCH_BYTES) + _TRAILING_BYTES
            source.prefetch([Extent(start, length)])
            first = source.read(offset, min(size, _MENTION_BYTES, max(0, source.size - offset)))
            last = tail[max(0, at - size) : at]
    except UnreadableError:  # reading the archive raises the same error
        return False
    return any(name in part for name in names for part in (first, last))


class _End(msgspec.Struct):
    """Values from the end records of a zip file, and the offset of the first end record."""

    at: int
    records: int
    size: int
    offset: int


class Archive:
    """Records of a zip file by name, in the order of its directory, each checked against its local header.

    For a remote file, local headers are not read if the directory places the records exactly as torch does. Each header
    is then checked when its record is read. With `looked_at`, all headers are checked at once, because this number of
    bytes of each record will be read. Raises MalformedError for a directory that contradicts itself or the file.

    Attributes:
        folder: Top folder of the first record, "" for a record named "/…", None for a record in no folder.
        spaces: Gaps of more than `MAX_PADDING` bytes between the data of records, each with the preceding record.
    """

    __slots__ = ("_looked_at", "_source", "folder", "oddities", "path", "records", "spaces")

    def __init__(self, source: ByteSource, looked_at: int | None = None) -> None:
        self._source, self._looked_at = source, looked_at
        self.path = source.path
        self.oddities: list[Oddity] = []
        self.spaces: list[tuple[str, Place]] = []
        end = self._read_end()
        self.records = self._read_directory(end)
        self._locate(end)
        first = next(iter(self.records), "")
        self.folder = first.partition("/")[0] if "/" in first else None
        if len({name.casefold() for name in self.records}) < len(self.records):
            self._add_oddity(
                OddityKind.CASE_ONLY_NAMES.value,
                "two records of the zip archive have names that differ only in upper and lower case; torch and some "
                "other programs may read the wrong record",
            )

    def open_window(self, source: ByteSource) -> Window:
        """Return a buffer for reads from many records; small records are read together."""
        is_dense = len(self.records) * _DENSE_RECORD_BYTES > source.size and not source.reads_are_requests
        return Window(source, _WINDOW if is_dense else 0)

    def prefetch(self, is_requested: Callable[[str], bool]) -> None:
        """Fetch the requested records together, before they are read."""
        records = (
            record
            for name, record in self.records.items()
            if record.compressed_size <= _MAX_PREFETCH_BYTES and is_requested(name)
        )
        self._source.prefetch(
            Extent(record.offset, record.data_offset - record.offset + record.compressed_size) for record in records
        )

    def read(self, record: Record, limit: int) -> bytes:
        """Return the inflated content of a record, with its checksum verified unless the recorded checksum is 0.

        `limit`: maximum size of the content in bytes; a compressed record may also not exceed 64 MiB.
        """
        if record.method == DEFLATED:
            limit = min(limit, MAX_INFLATED_BYTES)
        if record.size > limit or record.compressed_size > limit:
            is_packed = record.method == DEFLATED
            problem = "is compressed and takes {:,} bytes unpacked" if is_packed else "has {:,} bytes"
            raise MalformedError(
                f"{record.name} {problem.format(record.size)}, more than statecli's limit of {limit:,}"
            )
        data = self._source.read(record.data_offset, record.compressed_size)
        if record.method == DEFLATED:
            data = _inflate(record, data)
        elif record.method != STORED:
            raise create_unsupported_error(record)
        _check_crc(record, zlib.crc32(data))
        return data

    def verify(self, record: Record) -> None:
        """Check a record's CRC-32 piece by piece. Raises ChecksumMismatch. A recorded 0 means: no checksum."""
        if not record.crc32:
            return
        crc = size = 0
        for piece in self._inflate_pieces(record) if record.method == DEFLATED else self._read_pieces(record):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
            if size > record.size:
                raise _create_size_error(record)
        _check_crc(record, crc)

    def _read_pieces(self, record: Record) -> Iterator[bytes]:
        end = record.data_offset + record.compressed_size
        for at in range(record.data_offset, end, _PIECE_BYTES):
            yield self._source.read(at, min(_PIECE_BYTES, end - at))

    def _inflate_pieces(self, record: Record) -> Iterator[bytes]:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        for piece in self._read_pieces(record):
            content = _inflate_piece(record, inflater, piece)
            while content:
                yield content
                content = _inflate_piece(record, inflater, inflater.unconsumed_tail)

    def _add_oddity(self, name: str, message: str, at: int = 0, length: int = 0) -> None:
        self.oddities.append(Oddity(name, message, place=Place(self.path, at, length) if length else UNSET))

    def _read_end(self) -> _End:
        """Return the values of the zip64 end record or, if the file has none, of the plain end record."""
        source = self._source
        for reach in (_USUAL_END_BYTES, FARTHEST_END):
            tail_at = max(0, source.size - reach)
            tail = source.read(tail_at, source.size - tail_at)
            at = tail.rfind(b"PK\5\6", 0, max(0, len(tail) - _END.size + 4)) + tail_at
            if at >= tail_at:
                break
        else:
            raise MalformedError(
                f"{TRUNCATED}: its {source.size} bytes contain no end record of a zip archive "
                "(end-of-central-directory record); copy or download the file again"
            )
        _, disk, first_disk, disk_records, records, size, offset, comment = _END.unpack_from(tail, at - tail_at)
        end = self._read_end64(_End(at, records, size, offset))
        if disk_records != records or disk not in (0, U16_MAX) or first_disk not in (0, U16_MAX):
            raise MalformedError(SPANS_FILES)
        if end.offset + end.size != end.at:
            raise create_damage_error(
                f"its list of records (central directory) should end at byte {end.offset + end.size} but ends at byte "
                f"{end.at}; data was added before or after the archive"
            )
        self._check_after(at + _END.size, comment)
        return end

    def _check_after(self, end: int, comment: int) -> None:
        trailing_bytes = self._source.size - end
        if trailing_bytes > comment:
            surplus = trailing_bytes - comment
            self._add_oddity(
                OddityKind.SUFFIXED.value,
                f"{surplus} bytes are appended after the zip archive; other programs may read them as another file",
                end + comment,
                surplus,
            )
        elif trailing_bytes < comment:
            self._add_oddity(
                OddityKind.SUFFIXED.value,
                f"the file ends within the comment of the zip archive: the comment should have {comment} bytes "
                f"but has {trailing_bytes}",
            )
        elif comment:
            self._add_oddity(
                OddityKind.ZIP_COMMENT.value,
                f"the zip archive ends with a comment of {comment} bytes, but libraries that save weights "
                "write no comment",
                end,
                comment,
            )

    def _read_end64(self, end: _End) -> _End:
        at = end.at - _END64_LOCATOR.size
        locator = self._source.read(at, _END64_LOCATOR.size) if at >= 0 else b""
        if not locator.startswith(b"PK\6\7"):
            if end.records == U16_MAX or U32_MAX in (end.size, end.offset):
                raise create_damage_error(
                    "its end record refers to a second end record (zip64), but the file has no such record"
                )
            return end
        _, disk, end64_at, disks = _END64_LOCATOR.unpack(locator)
        if disk or disks > 1:
            raise MalformedError(SPANS_FILES)
        record = self._source.read(end64_at, _END64.size) if end64_at + _END64.size <= at else bytes(_END64.size)
        signature, length, _, _, disk, first_disk, disk_records, records, size, offset = _END64.unpack(record)
        # Python's zipfile reads the 56 bytes before the locator, whatever its offset, so no data may lie between.
        if signature != b"PK\6\6" or end64_at + 12 + length != at or end64_at + _END64.size != at:
            raise create_damage_error(
                f"its second end record (zip64) is not at byte {end64_at}, where the archive says; data was added "
                "before or after the archive"
            )
        if disk or first_disk or disk_records != records:
            raise MalformedError(SPANS_FILES)
        end64 = _End(end64_at, records, size, offset)
        for label, end_value, end64_value, unset in (
            ("the number of records", end.records, records, U16_MAX),
            ("the size of the list of records", end.size, size, U32_MAX),
            ("the position of the list of records", end.offset, offset, U32_MAX),
        ):
            if end_value not in (end64_value, unset):
                raise create_damage_error(
                    f"its two end records (zip and zip64) contradict each other: {label} is {end_value} in one, but "
                    f"{end64_value} in the other, so programs may find different contents"
                )
        return end64

    def _read_directory(self, end: _End) -> dict[str, Record]:
        if end.size > MAX_DIRECTORY_BYTES or end.records > MAX_RECORDS:
            raise MalformedError(
                f"the zip archive lists {end.records} records in {end.size} bytes, more than statecli's limits of "
                f"{MAX_RECORDS} and {MAX_DIRECTORY_BYTES}"
            )
        records: dict[str, Record] = {}
        for count, record in enumerate(parse_entries(self._source.read(end.offset, end.size)), 1):
            records[record.name] = record
            if len(records) != count:
                raise MalformedError(f"two records are named {record.name!r}; programs may read either record")
        if len(records) != end.records:
            raise create_damage_error(
                f"its list of records (central directory) has {len(records)} entries, but its end record says "
                f"{end.records}"
            )
        return records

    def _locate(self, end: _End) -> None:
        """Locate each record's data, and check for overlaps."""
        sorted_records = sorted(self.records.values(), key=attrgetter("offset"))
        if sorted_records and sorted_records[0].offset > 0:
            prefix_bytes = sorted_records[0].offset
            self._add_oddity(
                OddityKind.PREFIXED.value,
                f"{prefix_bytes} bytes precede the first record of the zip archive; other programs may read them as "
                "another file",
                0,
                prefix_bytes,
            )
        is_trusted = self._looked_at is None and self._source.is_trusted
        starts = self._place_as_torch(sorted_records, end.offset) if is_trusted else None
        starts = starts or self._read_starts(sorted_records)
        previous_end, previous_name = 0, ""
        for record in sorted_records:
            if record.offset < previous_end:
                raise _create_overlap_error(previous_name, record)
            if record.offset + _LOCAL.size > end.offset:
                raise MalformedError(
                    f"{record.name!r} is outside the archive: its header is at byte {record.offset}, but the records "
                    f"end at byte {end.offset}; copy or download the file again"
                )
            record.data_offset = next(starts)
            if record.data_offset - previous_end > MAX_PADDING:
                self._add_space(previous_name, previous_end, record.data_offset - _LOCAL.size - len(record.name))
            previous_end, previous_name = record.data_offset + record.compressed_size, record.name
            if previous_end > end.offset:
                raise _create_outside_error(previous_name, previous_end, end.offset)
        self._add_space(previous_name, previous_end, end.offset)

    def _read_starts(self, sorted_records: list[Record]) -> Iterator[int]:
        """Yield the offset of each record's data, as its local header states."""
        window = self.open_window(self._source)
        header_bytes = _LOCAL.size + MAX_PADDING + (self._looked_at or BEGINNING_BYTES)
        for n, record in enumerate(sorted_records):
            if n % _HEADERS_AT_ONCE == 0:
                next_records = sorted_records[n : n + _HEADERS_AT_ONCE]
                self._source.prefetch(
                    Extent(later.offset, header_bytes + len(later.name) * 4) for later in next_records
                )
            yield _find_data(record, window.read)

    def _place_as_torch(self, sorted_records: list[Record], end: int) -> Iterator[int] | None:
        """Return the offset of each record's data as torch aligns it. Local headers are not read yet.

        Returns None if bytes other than descriptors would lie between the records. Cached headers are checked at once,
        other headers when their record is read.
        """
        guards = []
        for record, following in zip_longest(sorted_records, sorted_records[1:]):
            start, space_end = _align(record), following.offset if following else end
            if space_end - start - record.compressed_size not in _DESCRIPTORS[record.flags & _SIZES_FOLLOW]:
                return None
            if (header := self._source.read_cached(record.offset, start - record.offset)) is None:
                guards.append(
                    Guard(record.offset, start, space_end, partial(_check_place, record, start, following, space_end))
                )
            elif _find_data(record, _create_reader(header, record.offset)) != start:
                return None
        self._source.guard(guards)
        return map(_align, sorted_records)

    def _add_space(self, previous_name: str, start: int, end: int) -> None:
        if previous_name and end - start > MAX_PADDING:
            self.spaces.append((previous_name, Place(self.path, start, end - start)))


def _align(record: Record) -> int:
    """Return the offset of a record's data in a file of torch (`getPadding` in inline_container.cc)."""
    zip64_bytes = 4 * (record.size >= U32_MAX or record.offset >= U32_MAX)
    zip64_bytes += 16 * (record.size >= U32_MAX) + 8 * (record.offset >= U32_MAX)
    earliest = record.offset + _LOCAL.size + len(record.name.encode("utf-8", "surrogateescape")) + 4 + zip64_bytes
    return -(-earliest // _ALIGNMENT) * _ALIGNMENT


def _check_place(record: Record, start: int, following: Record | None, space_end: int, header: bytes) -> None:
    """Raise MalformedError unless a record's data begins at `start`, as its local header states.

    `space_end`: the offset of the following record.
    """
    data_offset = _find_data(record, _create_reader(header, record.offset))
    end = data_offset + record.compressed_size
    if end > space_end:
        raise (
            _create_overlap_error(record.name, following)
            if following
            else _create_outside_error(record.name, end, space_end)
        )
    if data_offset != start:
        raise MalformedError(
            f"{record.name!r}: its data begins at byte {data_offset}, not at byte {start}, where torch puts it; "
            "download the file to read it"
        )


def _create_overlap_error(previous_name: str, record: Record) -> MalformedError:
    return create_damage_error(f"the records {previous_name!r} and {record.name!r} overlap")


def _create_outside_error(name: str, end: int, records_end: int) -> MalformedError:
    return MalformedError(
        f"{name!r} is outside the archive: it ends at byte {end}, but the records end at byte {records_end}; copy or "
        "download the file again"
    )


def _create_reader(data: bytes, start: int) -> Callable[[int, int], bytes]:
    """Return a function that reads from `data` like `ByteSource.read`. `data` begins at offset `start` of the file."""
    return lambda offset, length: data[offset - start : offset - start + length]


def _find_data(record: Record, read: Callable[[int, int], bytes]) -> int:
    """Return the offset of a record's data, as its local header states. Raises MalformedError for a wrong header."""
    raw = record.name.encode() if record.name.isascii() else b""
    header = read(record.offset, _LOCAL.size + len(raw))
    n: int
    extra: int
    signature, flags, method, crc, compressed_size, size, n, extra = _LOCAL.unpack_from(header)
    if signature != b"PK\3\4":
        raise create_damage_error(
            f"its list of records (central directory) puts {record.name!r} at byte {record.offset}, but no record "
            "begins at this byte"
        )
    is_same = raw != b"" and n == len(raw) and header[_LOCAL.size :] == raw
    if not is_same:  # a character takes at most four bytes
        is_same = n <= 4 * len(record.name) and decode_name(read(record.offset + _LOCAL.size, n), flags) == record.name
    is_same = is_same and method == record.method and flags & ENCRYPTED == record.flags & ENCRYPTED
    if is_same and not flags & _SIZES_FOLLOW:
        pairs = ((crc, record.crc32), (compressed_size, record.compressed_size), (size, record.size))
        is_same = all(local in (U32_MAX, central) for local, central in pairs)
    if not is_same:
        raise MalformedError(
            f"{record.name!r}: its own header contradicts the archive's list of records (central directory), so "
            "programs may read different bytes; save the checkpoint again"
        )
    return record.offset + _LOCAL.size + n + extra


def _check_crc(record: Record, crc: int) -> None:
    if record.crc32 and crc != record.crc32:
        difference = f"computed {crc:08x}, recorded {record.crc32:08x}"
        raise ChecksumMismatch(
            f"{record.name}: checksum wrong: {difference}; the file is damaged: copy or download the file again",
            difference=difference,
        )


def _inflate_piece(record: Record, inflater: Any, piece: bytes, limit: int = _PIECE_BYTES) -> bytes:
    try:
        content: bytes = inflater.decompress(piece, limit)
    except zlib.error as error:
        raise MalformedError(
            f"{record.name} cannot be decompressed: the file is damaged ({error}); copy or download the file again"
        ) from error
    return content


def _inflate(record: Record, data: bytes) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    content = _inflate_piece(record, inflater, data, record.size + 1)
    if len(content) != record.size or not inflater.eof:
        raise _create_size_error(record)
    return content


def _create_size_error(record: Record) -> MalformedError:
    return MalformedError(
        f"{record.name} does not decompress to the {record.size} bytes that the archive records: the file is "
        "damaged; copy or download the file again"
    )


def ends_as_zip(source: ByteSource) -> bool:
    """Return whether the zip reader of torch or of Python would find an end record and a directory."""
    return find_zip_end(source) is not None


def find_zip_end(source: ByteSource) -> int | None:
    """Return the offset of the end record that the zip readers of torch and of Python use; None without a directory.

    Both use the last end record, and allow any bytes before the archive and after its end. torch's reader ignores the
    record's comment, and reads whole buffers.
    """
    start = max(0, source.size - FARTHEST_END)
    tail = source.read(start, source.size - start)
    at = tail.rfind(b"PK\5\6", 0, max(0, len(tail) - _END.size + 4))
    if at < 0:
        return None
    if tail[max(0, at - _END64_LOCATOR.size) : at].startswith(b"PK\6\7"):
        return start + at
    size, offset = struct.unpack_from("<II", tail, at + 12)
    begins = (offset, start + at - size)  # zipfile finds the directory by its size
    is_found = any(0 <= begin <= source.size - 4 and source.read(begin, 4) == b"PK\1\2" for begin in begins)
    return start + at if is_found else None
