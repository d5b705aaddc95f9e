"""Find checkpoints in compressed files and tar archives, which a walk over a folder would otherwise only count.

joblib, pandas and `pickle.load(gzip.open(...))` load a compressed pickle as it is, and SageMaker and NeMo unpack tar
archives. A file that holds a checkpoint fails the audit: unpack it. An archive is looked through up to
`MAX_UNPACKED_BYTES`; after that, its name decides.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

from statecli.core.errors import MalformedError, UnreadableError
from statecli.formats import registry, torch_tar
from statecli.storage import files
from statecli.storage.source import HEAD_BYTES, Source

#: Bytes of an archive that are unpacked to look for checkpoints: some seconds of work.
MAX_UNPACKED_BYTES = 128 * 2**20
_CHUNK_BYTES = 2**18
#: Bytes that tell a compression.
_MAGIC_BYTES = 6
_XZ_MEMORY = 2**26
_ZLIB, _GZIP = re.compile(rb"\x78[\x01\x5e\x9c\xda]"), b"\x1f\x8b"
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
#: Compressions that Python cannot unpack.
_UNKNOWN_COMPRESSIONS = (b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
_TAR_SUFFIXES = re.compile(r"\.(?:tar(?:\.\w{1,5})?|t[gbxz]z\w?|tzst)\Z")
#: Names of archives that loaders unpack, whatever is first in them.
_MODEL_NAME = re.compile(r"model|checkpoint|ckpt|weights|params|state", re.IGNORECASE)
#: Errors of the decompressors for damaged data.
_DAMAGE = (zlib.error, OSError, EOFError, ValueError)


class _TooLarge(Exception):
    """The archive is larger than what is unpacked of one."""


def holds_checkpoint(path: str, source: Source, is_named: Callable[[str], bool]) -> bool:
    """Return whether a compressed file or a tar archive holds a checkpoint. Raises UnreadableError.

    `is_named` returns whether a file name is that of a checkpoint. An archive that is not looked through to its end
    holds one if it is named like a model.
    """
    is_model = _MODEL_NAME.search(files.get_name(path)) is not None
    if source.head.startswith(_UNKNOWN_COMPRESSIONS):
        return is_model and _TAR_SUFFIXES.search(files.get_name(path).lower()) is not None
    decompressor = _create_decompressor(source.head)
    if decompressor is None and not _is_tar(source.head):
        return False
    unpacked = _Unpacked(source, decompressor)
    read = source.read_up_to if decompressor is None else unpacked.read
    try:
        head = read(0, HEAD_BYTES)
        return _holds_checkpoint(source, read, is_named) if _is_tar(head) else _begins_as_checkpoint(source, head)
    except MalformedError:  # a loader may find other members than statecli
        return True
    except _TooLarge:
        return is_model


def _is_tar(head: bytes) -> bool:
    return not head.startswith(b"PK\3\4") and torch_tar.parse_header(head[: torch_tar.BLOCK]) is not None


def _begins_as_checkpoint(source: Source, head: bytes) -> bool:
    """Return whether unpacked data begins as a format that is read, or as a pickle."""
    if not head:
        return False
    if _PICKLE.match(head) or any(format.sniff("", head) for format in registry.FILES):
        return True
    from statecli.pickle_scan.one_pickle import Region, begins_as_pickle  # as in `expand`

    return begins_as_pickle(Region(source, 0, len(head), head))


def _holds_checkpoint(source: Source, read: Callable[[int, int], bytes], is_named: Callable[[str], bool]) -> bool:
    """Return whether a member of a tar archive is a checkpoint, by its name or its beginning."""
    for header, extended, offset, size in torch_tar.iter_members(read):
        names = (header.name, *_LINE_END.split(extended.decode("utf-8", "replace")))
        if any(map(is_named, names)) or _begins_as_checkpoint(source, read(offset, min(size, HEAD_BYTES))):
            return True
    return False


#: Where a name in an extended header ends.
_LINE_END = re.compile(r"[\n\0]")


class _Unpacked:
    """The content of a compressed file, of which a window is kept."""

    def __init__(self, source: Source, decompressor: Any) -> None:
        self._source, self._decompressor = source, decompressor
        self._start = self._taken = 0
        self._window = self._packed = b""

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes; fewer at the end or before damage. Raises _TooLarge."""
        while self._start + len(self._window) < offset + length:
            if self._start + len(self._window) > MAX_UNPACKED_BYTES:
                raise _TooLarge
            if not (chunk := self._unpack()):
                break
            drop = max(0, min(offset - self._start, len(self._window)))
            self._window, self._start = self._window[drop:] + chunk, self._start + drop
        begin = offset - self._start
        return self._window[begin : begin + length]

    def _unpack(self) -> bytes:
        """Return the next unpacked bytes, at most a chunk; none at the end and where the data is damaged."""
        while self._decompressor is not None:
            if self._decompressor.eof:
                self._begin_next_stream()
                continue
            if not self._packed:
                self._packed = self._read_packed()
            ended = not self._packed
            try:
                chunk: bytes = self._decompressor.decompress(self._packed, _CHUNK_BYTES)
            except _DAMAGE:
                return b""
            self._packed = getattr(self._decompressor, "unconsumed_tail", b"")
            if chunk or (ended and not self._decompressor.eof):
                return chunk
        return b""

    def _begin_next_stream(self) -> None:
        """Go on after the end of a stream: gzip, bzip2 and xz files may be several, with zeros between them."""
        self._packed = self._decompressor.unused_data.lstrip(b"\0")
        while len(self._packed) < _MAGIC_BYTES and (more := self._read_packed()):
            self._packed = (self._packed + more).lstrip(b"\0")
        self._decompressor = _create_decompressor(self._packed)

    def _read_packed(self) -> bytes:
        data = self._source.read(self._taken, min(_CHUNK_BYTES, self._source.size - self._taken))
        self._taken += len(data)
        return data


def _create_decompressor(head: bytes) -> Any:
    """Return an object that unpacks what begins so; None for other files. Raises UnreadableError without a module."""
    try:
        if head.startswith(_GZIP):
            return zlib.decompressobj(31)
        if _ZLIB.match(head):
            return zlib.decompressobj()
        if head.startswith(b"BZh"):
            import bz2

            return bz2.BZ2Decompressor()
        if head.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
            import lzma

            return lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
    except ImportError as error:  # Python can be built without them
        raise UnreadableError("is compressed, and this Python cannot unpack it") from error
    return None
