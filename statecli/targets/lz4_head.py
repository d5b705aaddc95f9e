"""Unpack the beginning of an LZ4 file, loaded by joblib but not unpacked by Python's library.

Source: lz4_Frame_format.md and lz4_Block_format.md of lz4 1.10.
"""

from __future__ import annotations

from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use

MAGIC = b"\x04\x22\x4d\x18"
#: The first bytes of a frame with data of the user, which is skipped.
SKIPPED = compile_on_use(rb"[\x50-\x5f]\x2a\x4d\x18")
#: Bytes of the largest block, with the headers of several frames before it.
MAX_READ_BYTES = 5 * 2**20
_HAS_DICTIONARY, _HAS_SIZE, _HAS_BLOCK_CHECKSUM, _HAS_CHECKSUM = 1, 8, 16, 4
_UNCOMPRESSED = 1 << 31
_MIN_MATCH, _LONG = 4, 15


def unpack_head(data: bytes, length: int) -> tuple[bytes, bool]:
    """Return the first `length` unpacked bytes of these frames, and whether the frames end early because of damage."""
    out = bytearray()
    try:
        at = 0
        while len(out) < length:
            if SKIPPED.match(data, at):
                at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            elif data[at : at + 4] == MAGIC:
                at = _unpack_frame(data, at + 4, out, length)
            else:
                break
    except (IndexError, MalformedError):
        return bytes(out[:length]), len(out) < length
    return bytes(out[:length]), False


def _unpack_frame(data: bytes, at: int, out: bytearray, length: int) -> int:
    """Unpack a frame whose flags are at byte `at`, up to `length` bytes in all; return where the frame ends."""
    flags = data[at]
    at += 3 + 8 * bool(flags & _HAS_SIZE) + 4 * bool(flags & _HAS_DICTIONARY)
    while len(out) < length:
        header = data[at : at + 4]
        size = int.from_bytes(header, "little")
        at += 4
        if len(header) < 4:
            raise MalformedError("the lz4 data ends in the middle of a frame")
        if not size:
            return at + 4 * bool(flags & _HAS_CHECKSUM)
        block = data[at : at + (size & ~_UNCOMPRESSED)]
        if size & _UNCOMPRESSED:
            out += block
        else:
            _unpack_block(block, out, length)
        if len(block) < size & ~_UNCOMPRESSED and len(out) < length:
            raise MalformedError("the lz4 data ends in the middle of a block")
        at += len(block) + 4 * bool(flags & _HAS_BLOCK_CHECKSUM)
    return at


def _unpack_block(block: bytes, out: bytearray, length: int) -> None:
    """Append the bytes of a block until there are `length`. Raises IndexError and MalformedError for damage."""
    at = 0
    while at < len(block) and len(out) < length:
        token = block[at]
        literals, at = _read_length(block, at + 1, token >> 4)
        out += block[at : at + literals]
        at += literals
        if at >= len(block):  # the last sequence has no match
            return
        offset = block[at] | block[at + 1] << 8
        matched, at = _read_length(block, at + 2, token & 15)
        if not 0 < offset <= len(out):
            raise MalformedError("the lz4 data copies from a position before the start of the data")
        for _ in range(min(matched + _MIN_MATCH, length)):
            out.append(out[-offset])


def _read_length(block: bytes, at: int, length: int) -> tuple[int, int]:
    """Return a length, continued in the next bytes if the token has its highest value, and the end of the length."""
    if length == _LONG:
        while (more := block[at]) == 255:
            length, at = length + more, at + 1
        length, at = length + more, at + 1
    return length, at
