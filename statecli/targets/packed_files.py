"""Find checkpoints in compressed files and tar archives. A walk over a folder counts these files without reading them.

joblib, pandas and `pickle.load(gzip.open(...))` load a compressed pickle directly, and SageMaker and NeMo unpack tar
archives. A file with a checkpoint inside fails the audit: unpack the file. An archive is searched up to
`MAX_UNPACKED_BYTES`; after that, its name decides.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from statecli import pickle_scan
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.formats import registry
from statecli.formats.shared import tar_archive
from statecli.storage import files
from statecli.storage.byte_source import HEAD_BYTES, ByteSource

#: Maximum number of bytes unpacked from an archive in the search for checkpoints: some seconds of work.
MAX_UNPACKED_BYTES = 128 * 2**20
#: Factor by which the unpacked beginning grows if it ends inside of a pickle, which may begin with a long text.
_HEAD_GROWTH = 8
#: Maximum number of consecutive compressed streams that are unpacked.
_MAX_UNPACKED_STREAMS = 10_000
_CHUNK_BYTES = 2**18
#: Size in bytes of an input chunk while single bytes are unpacked, because zlib copies the rest of it each time.
_SMALL_CHUNK_BYTES = 2**9
#: Maximum number of zeros after an uncertain stream in bytes, and number of bytes that identify the next stream.
_MAX_ZERO_BYTES, _MIN_HEADER_BYTES = 2**20, 64
#: `wbits` of zlib for data with a gzip header.
_GZIP_WBITS = 31
#: Maximum memory for an xz file in bytes: its dictionary, of which only the used part is touched.
_XZ_MEMORY_BYTES = 2**28
#: Dictionary size for an LZMA file in bytes; no more data is unpacked, so a larger dictionary is not needed.
_LZMA_DICTIONARY_BYTES = MAX_UNPACKED_BYTES + HEAD_BYTES
_GZIP, _BZIP2, _XZ, _LZIP = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"LZIP"
_ZLIB = compile_on_use(rb"\x78[\x01\x5e\x9c\xda]")
#: Joblib's format before 0.10: the size of the data in 19 characters, then a zlib stream.
_JOBLIB_ZFILE = compile_on_use(rb"ZF.{19} ?(?=[\x08-\x78].)", re.DOTALL)
#: LZMA without a container: a byte of properties below 225, the size of the dictionary, and the size of the data. This
#: size is -1, or up to 256 GiB, the limit of liblzma.
_LZMA = compile_on_use(rb"(?!\0{13})[\x00-\xe0].{4}(?:.{4}[\x00-\x3f]\0\0\0|\xff{8})", re.DOTALL)
_LZMA_SUFFIXES = (".xz", ".lzma")
_LZMA_HEADER_BYTES, _LZIP_HEADER_BYTES = 13, 6
_PICKLE = compile_on_use(rb"\x80[\x02-\x05]")
#: First bytes of compressions that Python cannot unpack (zstd before 3.14). joblib and pandas load pickles in LZ4
#: files.
_LZ4, _ZSTD = b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd"
#: First bytes of a frame with user data, which both compressions skip.
_SKIPPED_FRAME = compile_on_use(rb"[\x50-\x5f]\x2a\x4d\x18")
_TAR_SUFFIXES = compile_on_use(r"\.(?:tar(?:\.\w{1,5})?|t[gbxz]z\w?|tzst)\Z")
#: Suffixes of tables, texts and programs. With such a suffix, an LZ4 or zstd file, which statecli cannot unpack, does
#: not count as a checkpoint.
_DATA_SUFFIXES = compile_on_use(
    r"\.(?:csv|tsv|jsonl?|ndjson|ya?ml|txt|log|xml|html|md|sql|db|parquet|arrow|npy|img|bag|pkg|deb|rpm|py)(?:\.\w{1,5})?\Z"
)
#: Names of archives that loaders unpack, whatever their first member is.
_MODEL_NAME = compile_on_use(r"model|checkpoint|ckpt|weights|params|state", re.IGNORECASE)


class _TooLarge(Exception):
    """Error: the archive is larger than the limit for unpacking."""


def holds_checkpoint(path: str, source: ByteSource, is_named: Callable[[str], bool]) -> bool:
    """Return whether a compressed file or a tar archive contains a checkpoint. Raises UnreadableError.

    `is_named` returns whether a file name is a checkpoint's. If the archive was not searched to its end, the result
    depends on its own name: True if it is named like a model.
    """
    is_model = _MODEL_NAME.search(files.get_name(path)) is not None
    name = files.get_name(path).lower()
    # Refused, because zeros may be an empty LZMA stream before other data, and pandas selects LZMA by the suffix.
    if source.head.startswith(bytes(_LZMA_HEADER_BYTES)) and name.endswith(_LZMA_SUFFIXES):
        raise _build_damage_error("it begins with zeros, which may be an empty LZMA stream before other data")
    frame = source.head
    while _SKIPPED_FRAME.match(frame):
        frame = frame[8 + int.from_bytes(frame[4:8], "little") :]
    is_lz4 = frame.startswith(_LZ4) or not frame
    if is_lz4 or frame.startswith(_ZSTD):
        may_be_pickle = is_model or (is_lz4 and _TAR_SUFFIXES.search(name) is None)
        return may_be_pickle and _DATA_SUFFIXES.search(name) is None
    unpacked = _Unpacked(source)
    try:
        if _is_tar(source.head) and _holds_checkpoint(source, source.read_up_to, is_named):
            return True
        is_tar = _is_tar(unpacked.read(0, HEAD_BYTES))
        read_head = partial(unpacked.read, 0)
        if _holds_checkpoint(source, unpacked.read, is_named) if is_tar else _begins_as_checkpoint(source, read_head):
            return True
    except MalformedError:  # loaders may find other members than statecli
        return True
    except _TooLarge:
        return is_model
    if unpacked.damage is not None and (is_tar or (unpacked.stream and unpacked.stream.is_certain)):
        raise _build_damage_error(unpacked.damage)
    return False


def _build_damage_error(damage: str) -> UnreadableError:
    description = f"a compressed file that may contain a checkpoint and cannot be unpacked ({damage})"
    return UnreadableError(f"is {description}; replace the file with a valid copy, or remove it")


def _is_tar(head: bytes) -> bool:
    return not head.startswith(b"PK\3\4") and tar_archive.parse_header(head[: tar_archive.BLOCK]) is not None


def _begins_as_checkpoint(source: ByteSource, read_head: Callable[[int], bytes]) -> bool:
    """Return whether unpacked data begins as a readable format, or as a pickle. Raises _TooLarge.

    `read_head` returns the given number of first bytes. It is called for more while these bytes end inside of a pickle,
    because a pickle may begin with a long text.
    """
    length = HEAD_BYTES
    head = read_head(length)
    if not head:
        return False
    is_checkpoint = tar_archive.is_written_by_torch(head) or any(format.sniff("", head) for format in registry.FILES)
    if is_checkpoint or _PICKLE.match(head):
        return True
    one_pickle = pickle_scan.one_pickle
    while not one_pickle.begins_as_pickle(region := one_pickle.Region(source, 0, len(head), head)):
        if len(head) < length or not one_pickle.is_cut_off(region):
            return False
        length *= _HEAD_GROWTH
        if length > MAX_UNPACKED_BYTES:
            raise _TooLarge
        head = read_head(length)
    return True


def _holds_checkpoint(source: ByteSource, read: Callable[[int, int], bytes], is_named: Callable[[str], bool]) -> bool:
    """Return whether a member of a tar archive is a checkpoint, by its name or its first bytes."""
    for header, extended, offset, size in tar_archive.iter_members(read):
        names = (header.name, *_LINE_END.split(extended.decode("utf-8", "replace")))
        if any(map(is_named, names)) or _begins_as_checkpoint(source, partial(_read_member, read, offset, size)):
            return True
    return False


def _read_member(read: Callable[[int, int], bytes], offset: int, size: int, length: int) -> bytes:
    return read(offset, min(size, length))


#: End of a name in an extended header.
_LINE_END = compile_on_use(r"[\n\0]")


class _Stream(NamedTuple):
    """Compressed stream: its decompressor, and the sizes of its header and trailer in bytes.

    `is_certain`: its first bytes identify the compression. Text may begin like zlib data.
    """

    decompressor: Any
    header_bytes: int
    trailer_bytes: int
    is_certain: bool


class _Unpacked:
    """Content of a compressed file, with a window kept in memory.

    The first bytes are unpacked one by one, to find all bytes before damage, because a loader reads them too.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._start = self._position = self._streams = 0
        self._window = self._packed = self._input = b""
        self.damage: str | None = None
        self.stream: _Stream | None = None
        self._begin_stream()

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` unpacked bytes from `offset`, or fewer if the data ends or is damaged. Raises _TooLarge."""
        end = self._start + len(self._window)
        if end < offset + length:
            chunks = [self._window]
            while end < offset + length:
                if end > MAX_UNPACKED_BYTES:
                    raise _TooLarge
                if not (chunk := self._unpack(1 if end < HEAD_BYTES else _CHUNK_BYTES)):
                    break
                if end <= offset:
                    chunks, self._start = [], end
                chunks.append(chunk)
                end += len(chunk)
            self._window = b"".join(chunks)
        begin = offset - self._start
        return self._window[begin : begin + length]

    def _unpack(self, limit: int) -> bytes:
        """Return the next unpacked bytes, at most `limit`. Return b"" at the end of the data and after damage."""
        while self.stream is not None and self.damage is None:
            decompressor = self.stream.decompressor
            if decompressor.eof:
                self._end_stream(decompressor.unused_data, self.stream.trailer_bytes)
                continue
            if not self._input:
                self._fill(1)
                size = _SMALL_CHUNK_BYTES if limit == 1 else _CHUNK_BYTES
                self._input, self._packed = self._packed[:size], self._packed[size:]
            is_last = not self._input
            try:
                chunk: bytes = decompressor.decompress(self._input, limit)
            except _list_errors() as error:
                self.damage = "unpacking needs too much memory" if "emory" in repr(error) else "it is damaged"
                return b""
            self._input = b"" if decompressor.eof else getattr(decompressor, "unconsumed_tail", b"")
            if chunk:
                return chunk
            if is_last and not decompressor.eof:
                self.damage = "it ends too early"
        return b""

    def _fill(self, length: int) -> None:
        """Read compressed bytes until `length` bytes are available or the file ends."""
        while len(self._packed) < length and self._position < self._source.size:
            data = self._source.read(self._position, min(_CHUNK_BYTES, self._source.size - self._position))
            self._position += len(data)
            self._packed += data

    def _end_stream(self, unused: bytes, trailer_bytes: int) -> None:
        """Continue after the end of a stream, because a file may have several, with zeros between them."""
        limit = self._source.size if self.stream and self.stream.is_certain else self._position + _MAX_ZERO_BYTES
        self._packed = unused + self._packed
        self._fill(trailer_bytes + _MIN_HEADER_BYTES)
        self._packed = self._packed[trailer_bytes:]
        are_stripped = not _LZMA.match(self._packed) and self._packed.startswith(b"\0")
        if are_stripped:
            self._packed = self._packed.lstrip(b"\0")
            while len(self._packed) < _MIN_HEADER_BYTES and self._position < min(limit, self._source.size):
                self._fill(_MIN_HEADER_BYTES)
                self._packed = self._packed.lstrip(b"\0")
        is_last = not self._packed and self._position >= self._source.size
        self._begin_stream()
        if are_stripped and not is_last:  # the zeros may have been streams, or the start of this one
            self.stream = self.stream or _Stream(None, 0, 0, is_certain=True)
            self.stream = self.stream._replace(is_certain=True)
            self.damage = self.damage or (None if self.stream.decompressor else "it has other data after zeros")

    def _begin_stream(self) -> None:
        """Set `stream` to the stream that begins here, or None. Raises UnreadableError if Python cannot unpack it."""
        self._streams += 1
        if self._streams > _MAX_UNPACKED_STREAMS:
            self.stream = _Stream(None, 0, 0, is_certain=True)
            self.damage = f"it has more than {_MAX_UNPACKED_STREAMS:,} compressed streams, the limit of statecli"
            return
        self._fill(_MIN_HEADER_BYTES)
        self.stream = _open_stream(self._packed)
        self._packed = self._packed[self.stream.header_bytes :] if self.stream else b""


def _open_stream(packed: bytes) -> _Stream | None:
    """Return the stream that begins with these bytes, or None. Raises UnreadableError if Python cannot unpack it."""
    if packed.startswith(_GZIP):
        return _Stream(zlib.decompressobj(_GZIP_WBITS), 0, 0, is_certain=True)
    if (zfile := _JOBLIB_ZFILE.match(packed)) and _is_zlib(packed[zfile.end() :]):
        return _Stream(zlib.decompressobj(), zfile.end(), 0, is_certain=False)
    if _ZLIB.match(packed):
        return _Stream(zlib.decompressobj(), 0, 0, is_certain=False)
    try:
        if packed.startswith(_BZIP2):
            import bz2

            return _Stream(bz2.BZ2Decompressor(), 0, 0, is_certain=True)
        if packed.startswith(_XZ):
            import lzma

            return _Stream(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES), 0, 0, is_certain=True)
        if packed.startswith(_LZIP):  # lzma.open reads lzip since liblzma 5.4
            trailer_bytes = 20 if packed[4:5] != b"\0" else 12
            return _Stream(_open_lzma(0x5D, b"\xff" * 8), _LZIP_HEADER_BYTES, trailer_bytes, is_certain=False)
        if _LZMA.match(packed):
            size = packed[_LZMA_HEADER_BYTES - 8 : _LZMA_HEADER_BYTES]
            return _Stream(_open_lzma(packed[0], size), _LZMA_HEADER_BYTES, 0, is_certain=False)
    except ImportError as error:  # Python may be built without these modules
        reason = "is compressed, and this Python was built without the module that unpacks the file"
        raise UnreadableError(f"{reason}; unpack the file first") from error
    return None


def _is_zlib(head: bytes) -> bool:
    return len(head) >= 2 and head[0] & 15 == 8 and int.from_bytes(head[:2], "big") % 31 == 0


def _open_lzma(properties: int, size: bytes) -> Any:
    """Return a decompressor for LZMA data with the given properties and size, and a dictionary of fixed size."""
    import lzma

    decompressor = lzma.LZMADecompressor(lzma.FORMAT_ALONE)
    with suppress(lzma.LZMAError):  # raised again by the next call
        decompressor.decompress(bytes([properties]) + _LZMA_DICTIONARY_BYTES.to_bytes(4, "little") + size)
    return decompressor


def _list_errors() -> tuple[type[Exception], ...]:
    """Return the error types that decompressors raise for damaged data: lzma's type only if lzma is imported."""
    errors = (zlib.error, OSError, EOFError, ValueError, MemoryError)
    return (*errors, lzma.LZMAError) if (lzma := sys.modules.get("lzma")) else errors
